//! Descriptors of memory that a service has shared: parts of a file, which the program sees as files of their own.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::fd::RawFd;

use nix::errno::Errno;

use crate::files::{self, Kind};
use crate::instance::{Bypass, Preload};
use crate::kernel::{SavedErrno, borrow, kernel};
use crate::service::{Result, SharedMemory};

/// What `fd` shows when it stands for shared memory.
pub(super) fn find(preload: &Preload, fd: RawFd) -> Option<SharedMemory> {
    if Bypass::is_active() {
        return None;
    }
    let descriptor = borrow(fd)?;
    let _bypass = Bypass::enter();
    (preload.shared)(descriptor)
}

impl SharedMemory {
    /// The offset in the file of a map of `length` bytes at `offset` (`dma_buf_mmap_internal()`).
    pub(super) fn map(&self, offset: i64, length: usize) -> Result<i64> {
        const PAGE: u64 = 4096;
        let offset = u64::try_from(offset).map_err(|_| Errno::EINVAL)?;
        let length = (length as u64).checked_next_multiple_of(PAGE).ok_or(Errno::EINVAL)?;
        offset.checked_add(length).filter(|end| *end <= self.size).ok_or(Errno::EINVAL)?;
        let place = self.offset.checked_add(offset).ok_or(Errno::EINVAL)?;
        i64::try_from(place).map_err(|_| Errno::EINVAL)
    }
}

/// `lseek(2)`: of shared memory only its size can be asked, and the position is never moved (`dma_buf_llseek()`).
///
/// # Safety
/// As `lseek`.
pub unsafe fn lseek(preload: &Preload, fd: c_int, offset: i64, whence: c_int) -> i64 {
    let saved = SavedErrno::now();
    let held = files::get(fd);
    if held.as_ref().is_some_and(|held| matches!(held.kind, Kind::Device(_))) {
        // Neither amdkfd nor amdgpu has a position (`vfs_llseek()`).
        return saved.finish(Err(Errno::ESPIPE), -1);
    }
    let shared = if held.is_some() { None } else { find(preload, fd) };
    let Some(shared) = shared else {
        // What was asked on the way left its errno.
        let result = kernel!(SYS_lseek, fd, offset, whence);
        return if result < 0 { result } else { saved.finish(Ok(result), -1) };
    };
    let result = match (whence, offset) {
        (libc::SEEK_END, 0) => i64::try_from(shared.size).map_err(|_| Errno::EOVERFLOW),
        (libc::SEEK_SET, 0) => Ok(0),
        _ => Err(Errno::EINVAL),
    };
    saved.finish(result, -1)
}
