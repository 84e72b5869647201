//! Which open render node a descriptor number of the process is.
//!
//! The kernel knows a `struct file` behind every descriptor; a library has only the descriptor. Render nodes are
//! recognised by their memfd's inode, and their open file descriptions by the file position, which every
//! copy of a descriptor shares: it is set to the file's number when the node is opened, and nothing reads or seeks
//! on a render node.
//!
//! Unsafe code: the descriptor's number comes from the process, and `lseek` and `fstat` need it as a descriptor.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, RawFd};

use kfd_seam::{FileId, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::stat::fstat;
use nix::unistd::{Whence, lseek};

/// Marks a freshly opened file.
///
/// # Errors
/// What `lseek` answers.
pub fn mark(descriptor: impl AsFd, file: FileId) -> Result<()> {
    lseek(descriptor, i64::try_from(file.0).map_err(|_| Errno::EOVERFLOW)?, Whence::SeekSet).map(|_| ())
}

/// What an open descriptor is: device and inode number, and the mark if it has a position.
///
/// # Errors
/// `EBADF` when the number is not open.
pub fn examine(number: u32) -> Result<((u64, u64), Option<FileId>)> {
    let number = RawFd::try_from(number).ok().filter(|number| *number >= 0).ok_or(Errno::EBADF)?;
    // SAFETY: the borrow lives for this function only, and is used for three calls that leave the file as it is. Where
    // the number is closed or becomes another file meanwhile, the calls fail or describe that one.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(descriptor, FcntlArg::F_GETFD)?;
    let status = fstat(descriptor)?;
    let position = lseek(descriptor, 0, Whence::SeekCur).ok();
    let mark = position.and_then(|position| u64::try_from(position).ok()).map(FileId);
    Ok(((status.st_dev, status.st_ino), mark))
}
