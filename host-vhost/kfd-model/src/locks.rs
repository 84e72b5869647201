//! Locks that belong to an open file description (`F_OFD_SETLK`): they go with the last copy of the descriptor,
//! also of a killed process, and are seen across PID name spaces.

use std::os::fd::AsFd;

use kfd_seam::Result;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

fn range(kind: i32, start: u64, length: u64) -> Result<libc::flock> {
    Ok(libc::flock {
        l_type: i16::try_from(kind).map_err(|_| Errno::EINVAL)?,
        l_whence: 0, // SEEK_SET
        l_start: i64::try_from(start).map_err(|_| Errno::EOVERFLOW)?,
        l_len: i64::try_from(length).map_err(|_| Errno::EOVERFLOW)?,
        l_pid: 0,
    })
}

/// Takes a lock against all other descriptions on `length` bytes from `start` on; they need not exist.
///
/// # Errors
/// `EAGAIN` when another description has one in the way.
pub fn take(file: impl AsFd, start: u64, length: u64) -> Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&range(libc::F_WRLCK, start, length)?)).map(|_| ())
}

/// Takes a lock, and waits for it.
///
/// # Errors
/// What `fcntl` answers.
pub fn wait(file: impl AsFd, start: u64, length: u64) -> Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLKW(&range(libc::F_WRLCK, start, length)?)).map(|_| ())
}

/// Takes a lock against the exclusive ones, which any number of descriptions can have.
///
/// # Errors
/// `EAGAIN` when another description has an exclusive one in the way.
pub fn share(file: impl AsFd, start: u64, length: u64) -> Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&range(libc::F_RDLCK, start, length)?)).map(|_| ())
}

/// Gives a lock back.
///
/// # Errors
/// What `fcntl` answers.
pub fn give(file: impl AsFd, start: u64, length: u64) -> Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&range(libc::F_UNLCK, start, length)?)).map(|_| ())
}

/// Whether another description has any lock on these bytes.
///
/// # Errors
/// What `fcntl` answers.
pub fn held_elsewhere(file: impl AsFd, start: u64, length: u64) -> Result<bool> {
    let mut found = range(libc::F_WRLCK, start, length)?;
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
    Ok(i32::from(found.l_type) != libc::F_UNLCK)
}
