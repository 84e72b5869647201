//! Which open render node a descriptor number of the process is.
//!
//! The kernel knows a `struct file` behind every descriptor; a library has only the descriptor. Render nodes are
//! recognised by their memfd's inode, and their open file descriptions by the file position, which every
//! copy of a descriptor shares: it is set to the file's number when the node is opened, and nothing reads or seeks
//! on a render node.
//!
//! A position with [`dmabuf::MARK`] in it tells a dma-buf.
//!
//! Unsafe code: the descriptor's number comes from the process, and `lseek` and `fstat` need it as a descriptor.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use kfd_seam::{FileId, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::stat::fstat;
use nix::unistd::{Whence, lseek};

use crate::dmabuf::{self, DmaBuf};

/// What a descriptor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Examined {
    /// A dma-buf.
    DmaBuf(Box<DmaBuf>),
    /// A file: device and inode number, and the mark if it has a position.
    File((u64, u64), Option<FileId>),
}

/// Marks a freshly opened file.
///
/// # Errors
/// What `lseek` answers.
pub fn mark(descriptor: impl AsFd, file: FileId) -> Result<()> {
    lseek(descriptor, i64::try_from(file.0).map_err(|_| Errno::EOVERFLOW)?, Whence::SeekSet).map(|_| ())
}

/// What an open descriptor is.
///
/// # Errors
/// `EBADF` when the number is not open.
pub fn examine(number: u32) -> Result<Examined> {
    let number = number_of(number)?;
    // SAFETY: the borrow lives for this function only, and is used for calls that leave the file as it is. Where the
    // number is closed or becomes another file meanwhile, the calls fail or describe that one.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(descriptor, FcntlArg::F_GETFD)?;
    if let Some(found) = dmabuf::examine(descriptor) {
        return Ok(Examined::DmaBuf(Box::new(found)));
    }
    let status = fstat(descriptor)?;
    let position = lseek(descriptor, 0, Whence::SeekCur).ok();
    let mark = position.and_then(|position| u64::try_from(position).ok()).map(FileId);
    Ok(Examined::File((status.st_dev, status.st_ino), mark))
}

/// A copy of an open descriptor of the process.
///
/// # Errors
/// `EBADF` when the number is not open; `EMFILE`.
pub fn duplicate(number: u32) -> Result<OwnedFd> {
    let number = number_of(number)?;
    // SAFETY: the borrow lives for one call, which copies whatever the number is then, or fails.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    descriptor
        .try_clone_to_owned()
        .map_err(|error| error.raw_os_error().map_or(Errno::EBADF, Errno::from_raw))
}

/// Sets or clears `FD_CLOEXEC`.
///
/// # Errors
/// What `fcntl` answers.
pub fn set_cloexec(descriptor: impl AsFd, cloexec: bool) -> Result<()> {
    let flags = if cloexec { FdFlag::FD_CLOEXEC } else { FdFlag::empty() };
    fcntl(descriptor, FcntlArg::F_SETFD(flags)).map(|_| ())
}

fn number_of(number: u32) -> Result<RawFd> {
    RawFd::try_from(number).ok().filter(|number| *number >= 0).ok_or(Errno::EBADF)
}
