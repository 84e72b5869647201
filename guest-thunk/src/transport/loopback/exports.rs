//! What stands for dma-bufs, in whatever process it is.
//!
//! Each is a sealed memfd of the memory's size, opened only for writing: it knows its size, as runtimes ask for with `lseek`, and `mmap`
//! refuses it, for it does not have the memory's bytes. It is known by its inode. As long as any copy of the descriptor is
//! open, in any process, so is its lock, and the memory stays.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;

use super::blob::Resource;
use super::system;
use crate::transport::{Result, TransportError};

/// Device and inode number.
type Identity = (u64, u64);

/// What dma-bufs stand for.
#[derive(Default)]
pub(super) struct Exports(Mutex<HashMap<Identity, (OwnedFd, Arc<Resource>)>>);

/// A lock of the first byte.
fn lock(kind: i32) -> libc::flock {
    let whence = i16::try_from(libc::SEEK_SET).unwrap_or(0);
    let kind = i16::try_from(kind).unwrap_or(0);
    libc::flock { l_type: kind, l_whence: whence, l_start: 0, l_len: 1, l_pid: 0 }
}

fn identity(file: BorrowedFd<'_>) -> Result<Identity> {
    let failed = |errno: Errno| system("fstat", "a dma-buf", errno.into());
    fstat(file).map(|status| (status.st_dev, status.st_ino)).map_err(failed)
}

/// A memfd of `size` bytes, and what is given out of it.
fn make(size: u64) -> Result<(OwnedFd, OwnedFd)> {
    let failed = |call| move |errno: Errno| system(call, format!("a dma-buf of {size} bytes"), errno.into());
    let name = c"virtio-kfd-loopback-dma-buf";
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let kept = File::from(memfd_create(name, flags).map_err(failed("memfd_create"))?);
    let wrong = |call| move |error| system(call, format!("a dma-buf of {size} bytes"), error);
    kept.set_len(size).map_err(wrong("ftruncate"))?;
    let seals =
        SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    fcntl(&kept, FcntlArg::F_ADD_SEALS(seals)).map_err(failed("F_ADD_SEALS"))?;
    let path = format!("/proc/self/fd/{}", kept.as_raw_fd());
    // A file description of its own, which the lock is of.
    let given = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(path)
        .map_err(wrong("open of /proc/self/fd"))?;
    fcntl(&given, FcntlArg::F_OFD_SETLK(&lock(libc::F_WRLCK))).map_err(failed("F_OFD_SETLK"))?;
    Ok((kept.into(), given.into()))
}

/// Whether all copies of what was given out are closed. If that cannot be told, they are not.
fn closed(kept: &OwnedFd) -> bool {
    let mut found = lock(libc::F_RDLCK);
    fcntl(kept, FcntlArg::F_OFD_GETLK(&mut found)).is_ok() && i32::from(found.l_type) == libc::F_UNLCK
}

impl Exports {
    fn all(&self) -> MutexGuard<'_, HashMap<Identity, (OwnedFd, Arc<Resource>)>> {
        // Nothing in here panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new descriptor that stands for a resource.
    pub(super) fn add(&self, resource: &Arc<Resource>) -> Result<OwnedFd> {
        self.sweep();
        let (kept, given) = make(resource.size())?;
        let identity = identity(given.as_fd())?;
        self.all().insert(identity, (kept, Arc::clone(resource)));
        Ok(given)
    }

    /// What a dma-buf stands for.
    pub(super) fn find(&self, dma_buf: BorrowedFd<'_>) -> Result<Arc<Resource>> {
        self.sweep();
        let foreign = TransportError::NotSupported("a descriptor that is no dma-buf of this VM");
        // The kernel has them of memory files alone. Any other file may be one that a process serves, which need not answer.
        if fcntl(dma_buf, FcntlArg::F_GET_SEALS).is_err() {
            return Err(foreign);
        }
        let identity = identity(dma_buf)?;
        let found = self.all().get(&identity).map(|(_, resource)| Arc::clone(resource));
        found.ok_or(foreign)
    }

    /// Forgets what no descriptor stands for any more.
    pub(super) fn sweep(&self) {
        let mut all = self.all();
        if all.is_empty() {
            return;
        }
        let gone: Vec<_> = all.extract_if(|_, (kept, _)| closed(kept)).collect();
        drop(all);
        // Resources that end send commands: not under the lock.
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use nix::unistd::{Whence, lseek};

    use super::*;

    #[test]
    fn a_dma_buf_knows_its_size_shows_nothing_and_tells_when_its_last_copy_is_closed() {
        const SIZE: usize = 3 << 20;
        let (kept, given) = make(SIZE as u64).unwrap();
        assert_eq!(identity(kept.as_fd()).unwrap(), identity(given.as_fd()).unwrap());
        assert_eq!(lseek(&given, 0, Whence::SeekEnd).unwrap(), SIZE as i64);
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "read line"]).stdin(std::process::Stdio::piped());
        let copy = given.try_clone().unwrap();
        let mut child = command.stdout(copy).spawn().unwrap();
        drop(command);
        assert_eq!(nix::unistd::write(&given, b"x"), Err(Errno::EPERM));
        let exports = Exports::default();
        let foreign = |file: BorrowedFd<'_>| exports.find(file).map(|_| ()).unwrap_err().to_string();
        let null = File::open("/dev/null").unwrap();
        for file in [given.as_fd(), null.as_fd()] {
            assert!(foreign(file).contains("no dma-buf of this VM"), "{}", foreign(file));
        }
        let file = File::from(given);
        assert_eq!(file.set_len(1).unwrap_err().raw_os_error(), Some(libc::EPERM));
        let at = super::super::ram::map_file(
            file.as_fd(),
            0,
            virtio_kfd_protocol::GuestVa(1 << 44),
            4096,
            libc::PROT_WRITE,
        );
        assert!(at.unwrap_err().to_string().contains("Permission denied"), "mmap(2): EACCES");
        assert!(!closed(&kept));
        drop(file);
        assert!(!closed(&kept), "another process has a copy");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(closed(&kept));
    }
}
