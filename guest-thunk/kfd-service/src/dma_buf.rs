//! Descriptors of dma-bufs.
//!
//! In a guest they are real ones of the guest's `virtio_gpu`, which passes them on to other processes. In loop-back they are pipes that
//! stand for the memory; their size, which runtimes ask for with `lseek`, is remembered here.
#![allow(unsafe_code, reason = "descriptors' numbers come from the program")]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_thunk::transport::Blob;
use kfd_seam::{Result, SharedMemory};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::stat::fstat;
use nix::unistd::{Whence, lseek};

use crate::failure::transport;

/// Sizes in bytes by device and inode number.
static SIZES: Mutex<BTreeMap<(u64, u64), u64>> = Mutex::new(BTreeMap::new());

/// Whether there is any.
static ANY: AtomicBool = AtomicBool::new(false);

/// For [`kfd_seam::Preload::shared`]: a dma-buf that does not know its size itself. Takes no lock that a forked child may
/// find taken.
pub fn recognise(descriptor: BorrowedFd<'_>) -> Option<SharedMemory> {
    if !ANY.load(Ordering::Acquire) {
        return None;
    }
    let status = fstat(descriptor).ok()?;
    let size = *SIZES.try_lock().ok()?.get(&(status.st_dev, status.st_ino))?;
    Some(SharedMemory { offset: 0, size })
}

fn remember(descriptor: BorrowedFd<'_>, size: u64) -> Result<()> {
    if lseek(descriptor, 0, Whence::SeekEnd) != Err(Errno::ESPIPE) {
        return Ok(());
    }
    let status = fstat(descriptor)?;
    let mut sizes = guest_thunk::thunk::lock::lock(&SIZES);
    sizes.insert((status.st_dev, status.st_ino), size);
    ANY.store(true, Ordering::Release);
    Ok(())
}

/// A new descriptor of what a blob shows, for the program.
pub fn export(blob: &dyn Blob, size: u64, cloexec: bool) -> Result<i32> {
    let descriptor = blob.export().map_err(transport)?;
    remember(descriptor.as_fd(), size)?;
    let flags = if cloexec { FdFlag::FD_CLOEXEC } else { FdFlag::empty() };
    fcntl(&descriptor, FcntlArg::F_SETFD(flags))?;
    Ok(descriptor.into_raw_fd())
}

/// A copy of the program's descriptor.
///
/// # Errors
/// `EBADF` where it is not open; `EMFILE`.
pub fn copy(number: i32) -> Result<OwnedFd> {
    if number < 0 {
        return Err(Errno::EBADF);
    }
    // SAFETY: the borrow lives for one call, which copies whatever the number is then, or fails.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    let failed = |error: std::io::Error| error.raw_os_error().map_or(Errno::EBADF, Errno::from_raw);
    descriptor.try_clone_to_owned().map_err(failed)
}
