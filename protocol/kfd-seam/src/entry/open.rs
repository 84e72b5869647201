//! `open` in all its forms.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint};
use std::os::fd::RawFd;
use std::path::Path;

use nix::errno::Errno;
use rustix::fs::OFlags;

use super::{Route, real_or};
use crate::attributes::Attributes;
use crate::files::{self, DeviceFile, Kind};
use crate::instance::{Instance, Preload, owns_tables};
use crate::kernel::{SavedErrno, errno, kernel};
use crate::service::{Entry, Result};
use crate::trace;

/// `openat(2)`; `mode` is whatever stood in its place when the program passed none, and then not looked at.
///
/// # Safety
/// As `openat`: `path` is null or a C string.
pub unsafe fn openat(
    preload: &Preload,
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    let saved = SavedErrno::now();
    let follow = flags & libc::O_NOFOLLOW == 0;
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, directory, path, follow) };
    real_or!(
        route,
        path,
        {
            let fd = kernel!(SYS_openat, directory, path, flags, mode) as c_int;
            files::given_out(fd);
            fd
        },
        |route| saved.finish(serve(preload, route, flags), -1)
    )
}

/// `open(2)`.
///
/// # Safety
/// As `open`: `path` is null or a C string.
pub unsafe fn open(preload: &Preload, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the caller says so.
    unsafe { openat(preload, libc::AT_FDCWD, path, flags, mode) }
}

/// `creat(2)`.
///
/// # Safety
/// As `creat`: `path` is null or a C string.
pub unsafe fn creat(preload: &Preload, path: *const c_char, mode: c_uint) -> c_int {
    // SAFETY: the caller says so.
    unsafe { open(preload, path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode) }
}

/// The fortified `openat`, for calls without a mode.
///
/// # Safety
/// As `openat`: `path` is null or a C string.
pub unsafe fn openat_2(preload: &Preload, directory: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller says so.
    unsafe { openat(preload, directory, path, flags, 0) }
}

/// The fortified `open`, for calls without a mode.
///
/// # Safety
/// As `open`: `path` is null or a C string.
pub unsafe fn open_2(preload: &Preload, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller says so.
    unsafe { open(preload, path, flags, 0) }
}

/// Opens what the service has, with the errors of the kernel's `do_open()` and of sysfs.
pub(super) fn serve(preload: &Preload, route: Route, flags: c_int) -> Result<RawFd> {
    let creates = flags & libc::O_CREAT != 0;
    let (path, entry) = match route {
        Route::Ours { path, entry } => (path, entry),
        // No file can be made in sysfs.
        Route::Missing(Errno::ENOENT) if creates => return Err(Errno::EACCES),
        Route::Missing(errno) => return Err(errno),
        _ => return Err(Errno::ENOENT),
    };
    let result = serve_entry(preload, &path, entry, flags);
    trace::path("open", &path, &result);
    result
}

fn serve_entry(preload: &Preload, path: &Path, entry: Entry, flags: c_int) -> Result<RawFd> {
    let creates = flags & libc::O_CREAT != 0;
    if creates && flags & libc::O_EXCL != 0 {
        return Err(Errno::EEXIST);
    }
    if flags & libc::O_PATH != 0 {
        return open_place(path, &entry, flags);
    }
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let directory = flags & libc::O_DIRECTORY != 0;
    match entry {
        Entry::Symlink(_) if directory => Err(Errno::ENOTDIR),
        Entry::Symlink(_) => Err(Errno::ELOOP),
        Entry::Directory { .. } if writes || creates => Err(Errno::EISDIR),
        Entry::Directory { .. } => open_place(path, &entry, flags),
        _ if directory => Err(Errno::ENOTDIR),
        Entry::File(_) if writes || flags & libc::O_TRUNC != 0 => Err(Errno::EACCES),
        Entry::File(content) => {
            let descriptor = files::content_file(&content, flags & libc::O_CLOEXEC != 0)?;
            if !owns_tables() {
                return Ok(std::os::fd::IntoRawFd::into_raw_fd(descriptor));
            }
            let entry = Entry::File(content);
            files::insert(descriptor, Attributes::of(path, &entry), Kind::Content, path, flags)
        }
        Entry::Device { id, .. } => {
            // A child of vfork shares the parent's tables and has descriptors of its own.
            if !owns_tables() {
                return Err(Errno::EOPNOTSUPP);
            }
            let instance = Instance::get(preload);
            let opened = instance.call(|service| service.open(id, flags))?;
            let device = DeviceFile { instance, file: opened.file };
            files::set_cloexec(&opened.descriptor, flags & libc::O_CLOEXEC != 0)?;
            if flags & libc::O_NONBLOCK != 0 {
                rustix::fs::fcntl_setfl(&opened.descriptor, OFlags::NONBLOCK).map_err(errno)?;
            }
            files::insert(opened.descriptor, Attributes::of(path, &entry), Kind::Device(device), path, flags)
        }
    }
}

fn open_place(path: &Path, entry: &Entry, flags: c_int) -> Result<RawFd> {
    let is_directory = matches!(entry, Entry::Directory { .. });
    if flags & libc::O_DIRECTORY != 0 && !is_directory {
        return Err(Errno::ENOTDIR);
    }
    // As for a device.
    if !owns_tables() {
        return Err(Errno::EOPNOTSUPP);
    }
    let real = matches!(entry, Entry::Directory { merge: true, .. });
    let descriptor = files::place_file(path, real, flags & libc::O_CLOEXEC != 0)?;
    files::insert(descriptor, Attributes::of(path, entry), Kind::Place, path, flags)
}
