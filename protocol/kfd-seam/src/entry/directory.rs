//! Directory streams.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_long};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::ptr;

use nix::errno::Errno;

use super::{Route, descriptor, open, real_or};
use crate::files::{self, Kind};
use crate::instance::{Instance, Preload};
use crate::kernel::{SavedErrno, borrow, next};
use crate::path::Resolved;
use crate::service::{DirEntry, Entry, Result};
use crate::streams::Stream;

/// `opendir(3)`.
///
/// # Safety
/// As `opendir`: `path` is null or a C string.
pub unsafe fn opendir(preload: &Preload, path: *const c_char) -> *mut libc::DIR {
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, libc::AT_FDCWD, path, true) };
    // SAFETY: the caller says so.
    unsafe { open_route(preload, route, path) }
}

/// Opens what a route of `path` leads to.
///
/// # Safety
/// `path` is null or a C string.
pub(super) unsafe fn open_route(preload: &Preload, route: Route, path: *const c_char) -> *mut libc::DIR {
    let saved = SavedErrno::now();
    real_or!(
        route,
        path,
        // SAFETY: the caller says so.
        unsafe { next::opendir(path) },
        |route| {
            let opened = open::serve(preload, route, libc::O_DIRECTORY | libc::O_CLOEXEC).and_then(|fd| {
                stream(preload, fd).inspect_err(|_| {
                    // SAFETY: it was just opened here.
                    unsafe { descriptor::close(preload, fd) };
                })
            });
            saved.finish(opened, ptr::null_mut())
        }
    )
}

/// `fdopendir(3)`.
///
/// # Safety
/// As `fdopendir`.
pub unsafe fn fdopendir(preload: &Preload, fd: c_int) -> *mut libc::DIR {
    let saved = SavedErrno::now();
    if files::get(fd).is_none() {
        // SAFETY: the caller says so.
        return unsafe { next::fdopendir(fd) };
    }
    saved.finish(stream(preload, fd), ptr::null_mut())
}

/// `readdir(3)`; `struct dirent` and `struct dirent64` are one on 64-bit targets.
///
/// # Safety
/// As `readdir`: `directory` is an open stream.
pub unsafe fn readdir(_: &Preload, directory: *mut libc::DIR) -> *mut libc::dirent64 {
    match Stream::of(directory) {
        Some(stream) => stream.read(),
        // SAFETY: the caller says so.
        None => unsafe { next::readdir64(directory) },
    }
}

/// `readdir_r(3)`.
///
/// # Safety
/// As `readdir_r`: `directory` is an open stream, `entry` and `result` are valid for writing.
pub unsafe fn readdir_r(
    _: &Preload,
    directory: *mut libc::DIR,
    entry: *mut libc::dirent64,
    result: *mut *mut libc::dirent64,
) -> c_int {
    let Some(stream) = Stream::of(directory) else {
        // SAFETY: the caller says so.
        return unsafe { next::readdir64_r(directory, entry, result) };
    };
    let found = stream.read();
    let returned = if found.is_null() {
        ptr::null_mut()
    } else {
        // SAFETY: both are valid and apart: one is the stream's, one the caller's.
        unsafe { ptr::copy_nonoverlapping(found, entry, 1) };
        entry
    };
    // SAFETY: the caller says so.
    unsafe { result.write(returned) };
    0
}

/// `rewinddir(3)`.
///
/// # Safety
/// As `rewinddir`: `directory` is an open stream.
pub unsafe fn rewinddir(preload: &Preload, directory: *mut libc::DIR) {
    let saved = SavedErrno::now();
    let Some(stream) = Stream::of(directory) else {
        // SAFETY: the caller says so.
        return unsafe { next::rewinddir(directory) };
    };
    let fd = stream.state().fd;
    match contents(preload, fd) {
        Ok((path, entries, merge)) => stream.rewind(&path, &entries, merge),
        // The directory went away; the names that were there are read again.
        Err(_) => stream.state().position = 0,
    }
    saved.finish(Ok(()), ());
}

/// `telldir(3)`.
///
/// # Safety
/// As `telldir`: `directory` is an open stream.
pub unsafe fn telldir(_: &Preload, directory: *mut libc::DIR) -> c_long {
    match Stream::of(directory) {
        Some(stream) => c_long::try_from(stream.state().position).unwrap_or(c_long::MAX),
        // SAFETY: the caller says so.
        None => unsafe { next::telldir(directory) },
    }
}

/// `seekdir(3)`.
///
/// # Safety
/// As `seekdir`: `directory` is an open stream.
pub unsafe fn seekdir(_: &Preload, directory: *mut libc::DIR, position: c_long) {
    match Stream::of(directory) {
        Some(stream) => stream.state().position = usize::try_from(position).unwrap_or(0),
        // SAFETY: the caller says so.
        None => unsafe { next::seekdir(directory, position) },
    }
}

/// `dirfd(3)`.
///
/// # Safety
/// As `dirfd`: `directory` is an open stream.
pub unsafe fn dirfd(_: &Preload, directory: *mut libc::DIR) -> c_int {
    match Stream::of(directory) {
        Some(stream) => stream.state().fd,
        // SAFETY: the caller says so.
        None => unsafe { next::dirfd(directory) },
    }
}

/// `closedir(3)`.
///
/// # Safety
/// As `closedir`: `directory` is an open stream and not used afterwards.
pub unsafe fn closedir(preload: &Preload, directory: *mut libc::DIR) -> c_int {
    match Stream::of(directory) {
        // SAFETY: the descriptor belonged to the stream.
        Some(stream) => unsafe { descriptor::close(preload, stream.close()) },
        // SAFETY: the caller says so. The descriptor is closed inside libc; it was a real one.
        None => unsafe { next::closedir(directory) },
    }
}

/// A stream on `fd`, which the service's table knows.
fn stream(preload: &Preload, fd: c_int) -> Result<*mut libc::DIR> {
    let (path, entries, merge) = contents(preload, fd)?;
    Ok(Stream::open(fd, &path, &entries, merge).as_dir())
}

/// Path and names of the directory that `fd` is open on, and the real directory when that shows through.
fn contents(preload: &Preload, fd: c_int) -> Result<(PathBuf, Vec<DirEntry>, Option<BorrowedFd<'static>>)> {
    let held = files::get(fd).ok_or(Errno::EBADF)?;
    let Kind::Place = &held.kind else { return Err(Errno::ENOTDIR) };
    let resolved = Instance::get(preload).resolve(
        preload,
        std::os::unix::ffi::OsStrExt::as_bytes(held.path.as_os_str()),
        true,
    );
    match resolved {
        Resolved::Found { path, entry: Entry::Directory { entries, merge } } => {
            Ok((path, entries, merge.then(|| borrow(fd)).flatten()))
        }
        Resolved::Found { .. } => Err(Errno::ENOTDIR),
        Resolved::Missing(errno) => Err(errno),
        Resolved::Untouched | Resolved::Foreign(_) => Err(Errno::ENOENT),
    }
}
