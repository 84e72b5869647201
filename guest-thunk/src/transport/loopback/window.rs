//! The window through which the device shows host memory (virtio-gpu's shared memory region 1), from the VMM's side.
#![allow(unsafe_code)] // mmap, madvise, and descriptors that the vhost crate passes as numbers

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{Frontend, HandlerResult, VhostUserFrontend, VhostUserFrontendReqHandler};
use virtio_kfd_protocol::GuestVa;

use super::extents::Extents;
use super::ram::map_file;
use super::{PAGE, system};
use crate::transport::{Result, TransportError};

/// `VIRTIO_GPU_SHM_ID_HOST_VISIBLE`
pub(super) const SHM_ID: u8 = 1;

/// Guest-physical address of the window: far above any memory of the guest.
const WINDOW_START: u64 = 1 << 40;

/// Memory of the device that is mapped in the window.
#[derive(Clone)]
pub(super) struct Shown {
    /// Bytes.
    pub(super) length: u64,
    pub(super) file: Arc<File>,
    /// Where in the file, in bytes.
    pub(super) file_offset: u64,
    pub(super) writable: bool,
}

impl Shown {
    /// Maps its first `length` bytes at an address of this process.
    pub(super) fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()> {
        let failed = |code| system("mmap", format!("{length} bytes of the window"), error(code));
        if length > self.length {
            return Err(failed(libc::EINVAL));
        }
        if !self.writable && protection & libc::PROT_WRITE != 0 {
            return Err(failed(libc::EACCES));
        }
        map_file(self.file.as_fd(), self.file_offset, address, length, protection)
    }
}

/// The window.
pub struct Window {
    base: usize,
    size: u64,
    /// What the guest's driver has given out.
    free: Mutex<Extents>,
    /// What the device has mapped, by offset.
    shown: Mutex<BTreeMap<u64, Shown>>,
    /// Most maps that there were at once.
    most: AtomicUsize,
    /// Set when maps are told to the device as memory regions, which QEMU does.
    announce: OnceLock<Frontend>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here panics while it holds a lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn error(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

impl Window {
    /// A window of `size` bytes: address space only.
    pub(super) fn new(size: u64) -> Result<Window> {
        let failed = |call, error| system(call, format!("a window of {size} bytes"), error);
        let length = usize::try_from(size).map_err(|_| failed("mmap", error(libc::EINVAL)))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses touches no existing memory.
        let base = unsafe { libc::mmap(ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(failed("mmap", io::Error::last_os_error()));
        }
        let mut free = Extents::default();
        free.add(0, size / PAGE);
        Ok(Window {
            base: base.expose_provenance(),
            size,
            free: Mutex::new(free),
            shown: Mutex::new(BTreeMap::new()),
            most: AtomicUsize::new(0),
            announce: OnceLock::new(),
        })
    }

    /// From now on, tells the device of each map as QEMU does: as a region of guest memory, on the main channel, before
    /// the map is answered.
    pub(super) fn announce_maps(&self, frontend: Frontend) {
        // Only set once, while the VM is set up.
        let _ = self.announce.set(frontend);
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Maps that the device has in the window now.
    pub fn maps(&self) -> usize {
        lock(&self.shown).len()
    }

    /// Most maps that the device ever had in the window at once.
    pub fn most_maps(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    /// Takes a place in the window for a blob.
    pub(super) fn take(&self, bytes: u64) -> Result<u64> {
        let pages = bytes.div_ceil(PAGE);
        let taken = lock(&self.free).take(pages);
        taken.map(|(first, _)| first.saturating_mul(PAGE)).ok_or_else(|| {
            system("allocation in the window", format!("{bytes} bytes of {}", self.size), error(libc::ENOSPC))
        })
    }

    /// Gives a place back.
    pub(super) fn give(&self, offset: u64, bytes: u64) {
        lock(&self.free).give(offset / PAGE, bytes.div_ceil(PAGE), 0);
    }

    /// Maps what the device shows at `offset` at an address of this process.
    pub(super) fn map_fixed(
        &self,
        offset: u64,
        address: GuestVa,
        length: u64,
        protection: i32,
    ) -> Result<()> {
        self.shown(offset)?.map_fixed(address, length, protection)
    }

    /// What the device shows at `offset`.
    pub(super) fn shown(&self, offset: u64) -> Result<Shown> {
        let shown = lock(&self.shown).get(&offset).cloned();
        shown.ok_or_else(|| system("mmap", format!("the window's offset {offset:#x}"), error(libc::ENXIO)))
    }

    /// Where in a file lies what is shown at `offset`.
    pub(super) fn offset_in_file(&self, offset: u64, file: Option<&File>) -> Result<u64> {
        let inode = |file: &File| file.metadata().map(|data| (data.dev(), data.ino())).ok();
        let shown = lock(&self.shown).get(&offset).cloned();
        let same = |shown: &Shown| file.is_some_and(|file| inode(file) == inode(&shown.file));
        match shown.filter(same) {
            Some(shown) => Ok(shown.file_offset),
            None => Err(TransportError::NotSupported("mmap of memory in another file than the first")),
        }
    }

    /// Checks a range that the device names.
    fn range(&self, request: &VhostUserMMap) -> io::Result<(u64, u64)> {
        let (shmid, offset, length) = (request.shmid, request.shm_offset, request.len);
        let end = offset.checked_add(length);
        let whole = offset.is_multiple_of(PAGE) && length.is_multiple_of(PAGE) && length != 0;
        if shmid != SHM_ID || !whole || end.is_none_or(|end| end > self.size) {
            return Err(error(libc::EINVAL));
        }
        Ok((offset, length))
    }

    fn address(&self, offset: u64) -> GuestVa {
        GuestVa((self.base as u64).saturating_add(offset))
    }

    fn region(&self, offset: u64, shown: &Shown) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: WINDOW_START.saturating_add(offset),
            memory_size: shown.length,
            userspace_addr: self.address(offset).0,
            mmap_offset: shown.file_offset,
            mmap_handle: shown.file.as_raw_fd(),
        }
    }

    /// Puts the empty window back over a range.
    fn clear(&self, offset: u64, length: u64) -> io::Result<()> {
        let address = usize::try_from(self.address(offset).0).map_err(|_| error(libc::EINVAL))?;
        let length = usize::try_from(length).map_err(|_| error(libc::EINVAL))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let at = ptr::with_exposed_provenance_mut(address);
        // SAFETY: the range lies in the window (see range()), which is this object's own reservation and which nobody
        // refers to by a Rust reference.
        let mapped = unsafe { libc::mmap(at, length, libc::PROT_NONE, flags, -1, 0) };
        if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl VhostUserFrontendReqHandler for Window {
    fn shmem_map(&self, request: &VhostUserMMap, fd: &dyn AsRawFd) -> HandlerResult<u64> {
        let (offset, length) = self.range(request)?;
        let (flags, file_offset) = (request.flags, request.fd_offset);
        let writable = flags & VhostUserMMapFlags::WRITABLE.bits() != 0;
        // SAFETY: fcntl takes no pointer here, and the descriptor is open as long as the request is handled.
        let copy = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fcntl has just made this descriptor, and nothing else owns it.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(copy) });
        let mut shown = lock(&self.shown);
        let before = shown.range(..offset.saturating_add(length)).next_back();
        if before.is_some_and(|(at, other)| at.saturating_add(other.length) > offset) {
            // The specification wants overlapping maps refused.
            return Err(error(libc::EEXIST));
        }
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        map_file(file.as_fd(), file_offset, self.address(offset), length, protection)
            .map_err(|error| io::Error::other(error.to_string()))?;
        let one = Shown { length, file: Arc::new(file), file_offset, writable };
        let region = self.region(offset, &one);
        shown.insert(offset, one);
        self.most.fetch_max(shown.len(), Ordering::Relaxed);
        if let Some(frontend) = self.announce.get() {
            let told = frontend.clone().add_mem_region(&region);
            told.map_err(|error| io::Error::other(format!("ADD_MEM_REG: {error}")))?;
        }
        Ok(0)
    }

    fn shmem_unmap(&self, request: &VhostUserMMap) -> HandlerResult<u64> {
        let (offset, length) = self.range(request)?;
        let mut shown = lock(&self.shown);
        let one =
            shown.get(&offset).filter(|shown| shown.length == length).ok_or_else(|| error(libc::EINVAL))?;
        if let Some(frontend) = self.announce.get() {
            let told = frontend.clone().remove_mem_region(&self.region(offset, one));
            told.map_err(|error| io::Error::other(format!("REM_MEM_REG: {error}")))?;
        }
        self.clear(offset, length)?;
        shown.remove(&offset);
        Ok(0)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let length = usize::try_from(self.size).unwrap_or(0);
        // SAFETY: the range is this object's own reservation, which nobody refers to any more. It is not dropped in a
        // forked child (see VmHandle). A failure leaves the range reserved.
        let _ = unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.base), length) };
    }
}
