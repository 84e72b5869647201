//! Copies and ends of descriptors: `dup`, `fcntl`, `close`.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};

use nix::errno::Errno;

use crate::files;
use crate::hidden;
use crate::instance::{Bypass, Preload, owns_tables};
use crate::kernel::{SavedErrno, kernel, next_fcntl};

/// `close(2)`.
///
/// # Safety
/// As `close`.
pub unsafe fn close(_: &Preload, fd: c_int) -> c_int {
    let saved = SavedErrno::now();
    if is_kept(fd) {
        return saved.finish(Err(Errno::EBADF), -1);
    }
    // First the table: once the kernel has closed it, another thread may be given the number.
    let held = files::forget(fd);
    let result = kernel!(SYS_close, fd) as c_int;
    if held.is_some() {
        drop(held);
        return saved.finish(Ok(result), -1);
    }
    result
}

/// `close_range(2)`.
///
/// # Safety
/// As `close_range`.
pub unsafe fn close_range(_: &Preload, first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let saved = SavedErrno::now();
    // A wrong call closes nothing.
    let closes = first <= last && flags & !(CLOSE_RANGE_UNSHARE) == 0;
    if closes {
        files::forget_range(first, last);
    }
    if !closes || Bypass::is_active() || !owns_tables() {
        let result = kernel!(SYS_close_range, first, last, flags) as c_int;
        return if result == 0 { saved.finish(Ok(result), -1) } else { result };
    }
    for (first, last) in hidden::between(first, last) {
        let result = kernel!(SYS_close_range, first, last, flags) as c_int;
        if result != 0 {
            return result;
        }
    }
    saved.finish(Ok(0), -1)
}

/// Whether `fd` is the service's own, and to be kept from the program.
fn is_kept(fd: c_int) -> bool {
    hidden::is_hidden(fd) && !Bypass::is_active() && owns_tables()
}

/// `linux/close_range.h`
const CLOSE_RANGE_UNSHARE: c_int = 1 << 1;

/// `closefrom(3)`.
///
/// # Safety
/// As `closefrom`.
pub unsafe fn closefrom(preload: &Preload, first: c_int) {
    let first = c_uint::try_from(first).unwrap_or(0);
    // SAFETY: the caller says so.
    unsafe { close_range(preload, first, c_uint::MAX, 0) };
}

/// `dup(2)`.
///
/// # Safety
/// As `dup`.
pub unsafe fn dup(_: &Preload, fd: c_int) -> c_int {
    let saved = SavedErrno::now();
    copied(saved, fd, kernel!(SYS_dup, fd) as c_int)
}

/// `dup2(2)`.
///
/// # Safety
/// As `dup2`.
pub unsafe fn dup2(preload: &Preload, fd: c_int, copy: c_int) -> c_int {
    if fd == copy {
        let saved = SavedErrno::now();
        let open = kernel!(SYS_fcntl, fd, libc::F_GETFD) >= 0;
        return if open { saved.finish(Ok(copy), -1) } else { -1 };
    }
    // SAFETY: the caller says so.
    unsafe { dup3(preload, fd, copy, 0) }
}

/// `dup3(2)`.
///
/// # Safety
/// As `dup3`.
pub unsafe fn dup3(_: &Preload, fd: c_int, copy: c_int, flags: c_int) -> c_int {
    let saved = SavedErrno::now();
    if fd == copy {
        return kernel!(SYS_dup3, fd, copy, flags) as c_int;
    }
    if is_kept(copy) {
        return saved.finish(Err(Errno::EBUSY), -1);
    }
    let replaced = files::forget(copy);
    let result = kernel!(SYS_dup3, fd, copy, flags) as c_int;
    if result < 0 {
        files::restore(copy, replaced);
        return result;
    }
    drop(replaced);
    copied(saved, fd, result)
}

/// `fcntl(2)`; `argument` is whatever stood in its place when the program passed none.
///
/// # Safety
/// As `fcntl`.
pub unsafe fn fcntl(_: &Preload, fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            let saved = SavedErrno::now();
            copied(saved, fd, kernel!(SYS_fcntl, fd, command, argument) as c_int)
        }
        libc::F_GETFL => {
            // SAFETY: the caller says so.
            let flags = unsafe { next_fcntl(fd, command, argument) };
            match files::get(fd).filter(|_| flags >= 0) {
                Some(held) => flags & !libc::O_ACCMODE | held.access,
                None => flags,
            }
        }
        // SAFETY: the caller says so.
        _ => unsafe { next_fcntl(fd, command, argument) },
    }
}

/// Notes that the kernel made `copy` of `fd`, or failed with -1 and `errno`.
fn copied(saved: SavedErrno, fd: c_int, copy: c_int) -> c_int {
    if copy < 0 {
        return copy;
    }
    files::copied(fd, copy);
    saved.finish(Ok(copy), -1)
}
