//! What `stat` says about the service's files.
//!
//! Unsafe code: the answers are written into the program's own `struct stat` and `struct statx`.
#![allow(unsafe_code)]

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;

use crate::service::{Entry, EntryKind, Result};

/// `st_dev` of everything that the service has: major 0, as file systems without a disk have it, with the
/// largest minor, which the kernel gives out last.
const DEVICE_MINOR: u32 = 0xf_ffff;

/// `st_blksize`, bytes.
const BLOCK_SIZE: u32 = 4096;

/// Attributes of a file of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// `S_IF*` and permission bits.
    pub mode: u32,
    /// Device number of a device node, major and minor.
    pub device: (u32, u32),
    /// Bytes.
    pub size: u64,
    /// Not 0, and the same for the same path.
    pub inode: u64,
}

impl Attributes {
    /// Of `entry` at the resolved `path`. A directory that shows a real one through has that one's mode.
    pub fn of(path: &Path, entry: &Entry) -> Self {
        let (mode, device, size) = match entry {
            Entry::Directory { merge, .. } => {
                let real = merge.then(|| rustix::fs::stat(path).ok()).flatten();
                (real.map_or(libc::S_IFDIR | 0o755, |stat| stat.st_mode), (0, 0), 0)
            }
            Entry::File(content) => (libc::S_IFREG | 0o444, (0, 0), content.len()),
            Entry::Symlink(target) => (libc::S_IFLNK | 0o777, (0, 0), target.len()),
            Entry::Device { major, minor, .. } => (libc::S_IFCHR | 0o666, (*major, *minor), 0),
        };
        Self {
            mode,
            device,
            // A usize always fits.
            size: size as u64,
            inode: inode(path.as_os_str()),
        }
    }

    /// The answer of `access`: the mode's bits for others, and for root what
    /// `generic_permission()` lets `CAP_DAC_OVERRIDE` do.
    pub fn access(&self, wanted: i32) -> Result<()> {
        let bits = if rustix::process::geteuid().is_root() {
            let is_directory = self.mode & libc::S_IFMT == libc::S_IFDIR;
            let executable = is_directory || self.mode & 0o111 != 0;
            libc::R_OK | libc::W_OK | if executable { libc::X_OK } else { 0 }
        } else {
            // The bits of a mode's last digit are R_OK, W_OK and X_OK.
            (self.mode & 0o7) as i32
        };
        if wanted & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 {
            Err(Errno::EINVAL)
        } else if wanted & !bits != 0 {
            Err(Errno::EACCES)
        } else {
            Ok(())
        }
    }

    /// Fills the program's `struct stat` (`stat64` has the same layout on 64-bit targets).
    ///
    /// # Safety
    /// `to` is valid for writing.
    pub unsafe fn write_stat(&self, to: *mut libc::stat) -> Result<()> {
        if to.is_null() {
            return Err(Errno::EFAULT);
        }
        let zero = MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: a struct of integers may be zero.
        let mut stat = unsafe { zero.assume_init() };
        stat.st_mode = self.mode;
        stat.st_nlink = self.links();
        stat.st_ino = self.inode;
        stat.st_dev = libc::makedev(0, DEVICE_MINOR);
        stat.st_rdev = libc::makedev(self.device.0, self.device.1);
        stat.st_size = i64::try_from(self.size).unwrap_or(i64::MAX);
        stat.st_blksize = BLOCK_SIZE.into();
        // SAFETY: the caller says so.
        unsafe { to.write(stat) };
        Ok(())
    }

    /// Fills the program's `struct statx` with the basic fields, whatever was asked for.
    ///
    /// # Safety
    /// `to` is valid for writing.
    pub unsafe fn write_statx(&self, to: *mut libc::statx) -> Result<()> {
        if to.is_null() {
            return Err(Errno::EFAULT);
        }
        let zero = MaybeUninit::<libc::statx>::zeroed();
        // SAFETY: a struct of integers may be zero.
        let mut statx = unsafe { zero.assume_init() };
        statx.stx_mask = libc::STATX_BASIC_STATS;
        // A mode is 16 bits.
        statx.stx_mode = self.mode as u16;
        statx.stx_nlink = self.links();
        statx.stx_ino = self.inode;
        statx.stx_dev_minor = DEVICE_MINOR;
        (statx.stx_rdev_major, statx.stx_rdev_minor) = self.device;
        statx.stx_size = self.size;
        statx.stx_blksize = BLOCK_SIZE;
        // SAFETY: the caller says so.
        unsafe { to.write(statx) };
        Ok(())
    }

    /// 1, as on file systems that do not count a directory's subdirectories (`btrfs`): a count of 2 would
    /// tell `find` that there are none.
    fn links<N: From<u8>>(&self) -> N {
        1.into()
    }
}

/// The inode number of a path.
pub fn inode(path: &OsStr) -> u64 {
    let mut hasher = DefaultHasher::new();
    path.as_bytes().hash(&mut hasher);
    hasher.finish().max(1)
}

/// `d_type` of an entry.
pub fn directory_type(kind: EntryKind) -> u8 {
    match kind {
        EntryKind::Directory => libc::DT_DIR,
        EntryKind::File => libc::DT_REG,
        EntryKind::Symlink => libc::DT_LNK,
        EntryKind::CharDevice => libc::DT_CHR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::DeviceId;

    #[test]
    fn a_directory_shows_the_real_ones_mode() {
        let entry = |merge| Entry::Directory { entries: vec![], merge };
        assert_eq!(Attributes::of(Path::new("/tmp"), &entry(true)).mode, libc::S_IFDIR | 0o1777);
        assert_eq!(Attributes::of(Path::new("/tmp"), &entry(false)).mode, libc::S_IFDIR | 0o755);
        assert_eq!(Attributes::of(Path::new("/no/such"), &entry(true)).mode, libc::S_IFDIR | 0o755);
    }

    #[test]
    fn stat_and_statx_agree() {
        let entry = Entry::Device { id: DeviceId(1), major: 226, minor: 128 };
        let attributes = Attributes::of(Path::new("/dev/dri/renderD128"), &entry);
        let mut stat = MaybeUninit::zeroed();
        let mut statx = MaybeUninit::<libc::statx>::zeroed();
        // SAFETY: both are local memory of their size.
        unsafe { attributes.write_stat(stat.as_mut_ptr()) }.unwrap();
        // SAFETY: as above.
        unsafe { attributes.write_statx(statx.as_mut_ptr()) }.unwrap();
        // SAFETY: it was zero, then written.
        let stat = unsafe { stat.assume_init() };
        // SAFETY: as above.
        let statx = unsafe { statx.assume_init() };
        assert_eq!(stat.st_mode, libc::S_IFCHR | 0o666);
        assert_eq!(u32::from(statx.stx_mode), stat.st_mode);
        assert_eq!(stat.st_rdev, libc::makedev(226, 128));
        assert_eq!((statx.stx_rdev_major, statx.stx_rdev_minor), (226, 128));
        assert_eq!((statx.stx_ino, statx.stx_size), (stat.st_ino, 0));
        assert_eq!(libc::makedev(statx.stx_dev_major, statx.stx_dev_minor), stat.st_dev);
    }

    #[test]
    fn access_asks_the_mode() {
        let file = Attributes::of(Path::new("/sys/f"), &Entry::File(b"1\n".to_vec()));
        assert_eq!(file.size, 2);
        assert_eq!(file.access(libc::F_OK), Ok(()));
        assert_eq!(file.access(libc::R_OK), Ok(()));
        assert_eq!(file.access(libc::X_OK), Err(Errno::EACCES));
        assert_eq!(file.access(8), Err(Errno::EINVAL));
        let writes = file.access(libc::W_OK);
        assert_eq!(writes.is_ok(), rustix::process::geteuid().is_root());
    }
}
