//! What stands behind the front end: the [`KfdService`] trait and its plain data.
//!
//! The front end owns everything that is about *one process's* libc calls (file descriptors and
//! their copies, path resolution, `FILE*` and `DIR*`, `errno`). A service owns what the kernel
//! would own: the tree of files, open device files, ioctls and the memory behind an mmap.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;

/// Result of a service call; the error is the `errno` that the kernel would give.
pub type Result<T> = core::result::Result<T, Errno>;

/// A device node of the service (`/dev/kfd`, one render node). Chosen by the service, opaque to the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

/// An open file description of a device node (what `struct file` is in the kernel): copies made by
/// `dup` share it. Chosen by the service, never reused while open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u64);

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The name, without any slash.
    pub name: OsString,
    /// What it is, for `d_type`.
    pub kind: EntryKind,
}

/// The kind of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// `DT_DIR`
    Directory,
    /// `DT_REG`
    File,
    /// `DT_LNK`
    Symlink,
    /// `DT_CHR`
    CharDevice,
}

/// What stands at a path that the service owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A directory; `.` and `..` are added by the front end. `merge` says that names of the real
    /// directory of the same path are to be listed too (the service adds nodes to `/dev/dri`, say).
    Directory {
        /// The service's own names.
        entries: Vec<DirEntry>,
        /// Whether the real directory shows through.
        merge: bool,
    },
    /// A regular file, mode 0444, with this content at the time of the open (as sysfs does it). A file
    /// that also exists for real and is to be extended (`/proc/modules`, say) is read by the service.
    File(Vec<u8>),
    /// A symbolic link and its target, relative or absolute.
    Symlink(OsString),
    /// A character device.
    Device {
        /// For [`KfdService::open`].
        id: DeviceId,
        /// Device number, for `stat`.
        major: u32,
        /// Device number, for `stat`.
        minor: u32,
    },
}

/// Answer to a path look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Not the service's business: the real file system answers.
    Foreign,
    /// The service owns the path and nothing is there (`ENOENT`, `ENOTDIR`, `EACCES`).
    Missing(Errno),
    /// The service owns the path and this is there.
    Found(Entry),
}

/// A device file that was just opened.
#[derive(Debug)]
pub struct Opened {
    /// The new open file description.
    pub file: FileId,
    /// The descriptor that the process gets (a memfd or eventfd of the service: something that can be
    /// `dup`ed, passed and closed). The front end takes it over.
    pub descriptor: OwnedFd,
}

/// Arguments of an `mmap` on a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRequest {
    /// File offset in bytes, the driver's encoding (`KFD_MMAP_TYPE_*`, a DRM fake offset).
    pub offset: u64,
    /// Length in bytes as asked for, not rounded.
    pub length: u64,
    /// `PROT_*`
    pub protection: i32,
    /// `MAP_*`
    pub flags: i32,
}

/// What to map instead of the device file.
#[derive(Debug)]
pub struct MapSource {
    /// A file (memfd) that holds the memory.
    pub file: OwnedFd,
    /// Offset in bytes in that file.
    pub offset: u64,
}

/// What a descriptor shows that stands for a part of a file (a dma-buf, which is memory that can be passed on).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    /// Offset in bytes in the kernel's file behind the descriptor, whole pages.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// A pointer that came from the process, as a number: it is read and written only through
/// [`crate::UserMemory`], which answers `EFAULT` where the kernel would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserPtr(pub u64);

/// A stand-in for amdkfd and the amdgpu render node, for the process that it is loaded into.
///
/// All methods can be called from any thread at once; a blocking one (`WAIT_EVENTS`) must not hold
/// up others.
///
/// Calls to libc that a method makes on its own thread go to the real system. A thread that the service
/// starts and that opens or stats paths of the service for real holds a `Bypass`.
///
/// A panic in a method does not reach the program: it is reported on the standard error output and the
/// call fails with `EIO`.
pub trait KfdService: Send + Sync + 'static {
    /// Says what stands at `path`: absolute, lexically normalised, not resolved (the front end
    /// follows the links that the service returns). Called on every open, stat, access, readlink and
    /// opendir of the process, so a foreign path must be told quickly and without side effects.
    fn lookup(&self, path: &Path) -> Lookup;

    /// Opens a device node with the caller's `O_*` flags.
    fn open(&self, device: DeviceId, flags: i32) -> Result<Opened>;

    /// Serves an ioctl: `request` is the whole 32-bit request number (direction, size, type,
    /// number), `argument` the third argument. Returns the call's non-negative result.
    fn ioctl(&self, file: FileId, request: u32, argument: UserPtr) -> Result<i32>;

    /// Serves an `mmap` of the device file by itself, for memory that no file and offset stand for; `address` is the call's.
    /// The answer is where the memory is now. None leaves the call to [`mmap`](Self::mmap).
    fn map(&self, _file: FileId, _request: &MapRequest, _address: u64) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Says what an `mmap` of the device file shows.
    fn mmap(&self, file: FileId, request: &MapRequest) -> Result<MapSource>;

    /// What [`mmap`](Self::mmap) said has been mapped, at `address`. A map may go without a word: the front end does not
    /// see `munmap`.
    fn mapped(&self, _file: FileId, _request: &MapRequest, _address: u64) {}

    /// The last descriptor of this open file description in this process is gone.
    fn release(&self, file: FileId);

    /// The process forked and this is the child: the service's state belongs to the parent. It is
    /// called once, in the child, with other threads gone and any lock possibly held for ever, so it
    /// touches atomics and closes descriptors at most. It is the last call that this service gets in the child: the front end
    /// answers calls on files of before with `EBADF` itself, as the kernel does, releases none of
    /// them, and makes a new service when the child first names a path of it.
    fn forked(&self);
}
