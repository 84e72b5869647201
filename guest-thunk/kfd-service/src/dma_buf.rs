//! Descriptors of dma-bufs.
//!
//! In a guest they are real ones of the guest's `virtio_gpu`; in loop-back they are files that stand for the memory. Either way other
//! processes can have them, and `lseek` tells their size, which runtimes ask for.
#![allow(unsafe_code, reason = "descriptors' numbers come from the program")]

use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};

use guest_thunk::transport::Blob;
use kfd_seam::Result;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use crate::failure::transport;

/// A new descriptor of what a blob shows, for the program.
pub fn export(blob: &dyn Blob, cloexec: bool) -> Result<i32> {
    let descriptor = blob.export().map_err(transport)?;
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
