//! What is said about files: `stat` and `access` in all their forms, `readlink`, `realpath`.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use nix::errno::Errno;

use super::{Route, real_or, shared};
use crate::attributes::Attributes;
use crate::files;
use crate::instance::{Bypass, Preload};
use crate::kernel::{SavedErrno, kernel, next};
use crate::service::{Entry, Result};

/// `fstatat(2)`. `struct stat` and `struct stat64` are one on 64-bit targets.
///
/// # Safety
/// As `fstatat`: `path` is null or a C string, `to` is null or valid for writing.
pub unsafe fn fstatat(
    preload: &Preload,
    directory: c_int,
    path: *const c_char,
    to: *mut libc::stat,
    flags: c_int,
) -> c_int {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { find(preload, directory, path, flags) };
    // SAFETY: the caller says so.
    let own = matches!(route, Route::Real) && unsafe { is_descriptor(path, flags) };
    if own {
        // As `fstat`, but for what the flags may be otherwise.
        let result = kernel!(SYS_newfstatat, directory, path, to, flags) as c_int;
        if result == 0 {
            // SAFETY: the kernel has just filled it.
            unsafe { show_shared(preload, directory, to) };
            return saved.finish(Ok(0), -1);
        }
        return result;
    }
    real_or!(route, path, kernel!(SYS_newfstatat, directory, path, to, flags) as c_int, |route| {
        let result = attributes(route).and_then(|attributes| {
            // SAFETY: the caller says so.
            unsafe { attributes.write_stat(to) }
        });
        saved.finish(result.map(|()| 0), -1)
    })
}

/// `stat(2)`.
///
/// # Safety
/// As [`fstatat`].
pub unsafe fn stat(preload: &Preload, path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: the caller says so.
    unsafe { fstatat(preload, libc::AT_FDCWD, path, to, 0) }
}

/// `lstat(2)`.
///
/// # Safety
/// As [`fstatat`].
pub unsafe fn lstat(preload: &Preload, path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: the caller says so.
    unsafe { fstatat(preload, libc::AT_FDCWD, path, to, libc::AT_SYMLINK_NOFOLLOW) }
}

/// `fstat(2)`.
///
/// # Safety
/// As [`fstatat`].
pub unsafe fn fstat(preload: &Preload, fd: c_int, to: *mut libc::stat) -> c_int {
    let saved = SavedErrno::now();
    match files::get(fd) {
        Some(held) => {
            // SAFETY: the caller says so.
            let result = unsafe { held.attributes.write_stat(to) };
            saved.finish(result.map(|()| 0), -1)
        }
        None => {
            let result = kernel!(SYS_fstat, fd, to) as c_int;
            if result != 0 {
                return result;
            }
            // SAFETY: the kernel has just filled it.
            unsafe { show_shared(preload, fd, to) };
            saved.finish(Ok(0), -1)
        }
    }
}

/// Puts the size of shared memory into what the kernel says of the descriptor.
///
/// # Safety
/// `to` is filled and valid for writing.
unsafe fn show_shared(preload: &Preload, fd: c_int, to: *mut libc::stat) {
    // SAFETY: the caller says so.
    let status = unsafe { &mut *to };
    // Shared memory is a file without a name.
    if status.st_nlink == 0
        && let Some(shared) = shared::find(preload, fd)
    {
        status.st_size = i64::try_from(shared.size).unwrap_or(i64::MAX);
    }
}

/// `__xstat`: `stat` of programs built against glibc before 2.33. The version says which `struct stat`; on
/// 64-bit targets there is one.
///
/// # Safety
/// As [`fstatat`].
pub unsafe fn xstat(preload: &Preload, _: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: the caller says so.
    unsafe { stat(preload, path, to) }
}

/// `__lxstat`: see [`xstat`].
///
/// # Safety
/// As [`fstatat`].
pub unsafe fn lxstat(preload: &Preload, _: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: the caller says so.
    unsafe { lstat(preload, path, to) }
}

/// `__fxstat`: see [`xstat`].
///
/// # Safety
/// As [`fstatat`].
pub unsafe fn fxstat(preload: &Preload, _: c_int, fd: c_int, to: *mut libc::stat) -> c_int {
    // SAFETY: the caller says so.
    unsafe { fstat(preload, fd, to) }
}

/// `__fxstatat`: see [`xstat`].
///
/// # Safety
/// As [`fstatat`].
pub unsafe fn fxstatat(
    preload: &Preload,
    _: c_int,
    directory: c_int,
    path: *const c_char,
    to: *mut libc::stat,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller says so.
    unsafe { fstatat(preload, directory, path, to, flags) }
}

/// `statx(2)`.
///
/// # Safety
/// As `statx`: `path` is null or a C string, `to` is null or valid for writing.
pub unsafe fn statx(
    preload: &Preload,
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    to: *mut libc::statx,
) -> c_int {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { find(preload, directory, path, flags) };
    // SAFETY: the caller says so.
    let own = matches!(route, Route::Real) && unsafe { is_descriptor(path, flags) };
    if own {
        let result = kernel!(SYS_statx, directory, path, flags, mask, to) as c_int;
        if result != 0 {
            return result;
        }
        // SAFETY: the kernel has just filled it.
        let status = unsafe { &mut *to };
        if status.stx_nlink == 0
            && let Some(shared) = shared::find(preload, directory)
        {
            status.stx_size = shared.size;
        }
        return saved.finish(Ok(0), -1);
    }
    real_or!(route, path, kernel!(SYS_statx, directory, path, flags, mask, to) as c_int, |route| {
        let result = attributes(route).and_then(|attributes| {
            // SAFETY: the caller says so.
            unsafe { attributes.write_statx(to) }
        });
        saved.finish(result.map(|()| 0), -1)
    })
}

/// `faccessat(3)`.
///
/// # Safety
/// As `faccessat`: `path` is null or a C string.
pub unsafe fn faccessat(
    preload: &Preload,
    directory: c_int,
    path: *const c_char,
    mode: c_int,
    flags: c_int,
) -> c_int {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { find(preload, directory, path, flags) };
    real_or!(
        route,
        path,
        match flags {
            0 => kernel!(SYS_faccessat, directory, path, mode) as c_int,
            _ => {
                let mut result = kernel!(SYS_faccessat2, directory, path, mode, flags) as c_int;
                if result != 0 && Errno::last() == Errno::ENOSYS {
                    // Linux before 5.8.
                    // SAFETY: the caller says so.
                    result = unsafe { next::faccessat(directory, path, mode, flags) };
                }
                if result == 0 { saved.finish(Ok(0), -1) } else { result }
            }
        },
        |route| {
            let result = attributes(route).and_then(|attributes| attributes.access(mode));
            saved.finish(result.map(|()| 0), -1)
        }
    )
}

/// `access(2)`.
///
/// # Safety
/// As [`faccessat`].
pub unsafe fn access(preload: &Preload, path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the caller says so.
    unsafe { faccessat(preload, libc::AT_FDCWD, path, mode, 0) }
}

/// `euidaccess(3)`.
///
/// # Safety
/// As [`faccessat`].
pub unsafe fn euidaccess(preload: &Preload, path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the caller says so.
    unsafe { faccessat(preload, libc::AT_FDCWD, path, mode, libc::AT_EACCESS) }
}

/// `readlinkat(2)`.
///
/// # Safety
/// As `readlinkat`: `path` is null or a C string, `to` valid for writing `size` bytes.
pub unsafe fn readlinkat(
    preload: &Preload,
    directory: c_int,
    path: *const c_char,
    to: *mut c_char,
    size: usize,
) -> isize {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { find_link(preload, directory, path) };
    real_or!(route, path, kernel!(SYS_readlinkat, directory, path, to, size) as isize, |route| {
        let result = match route {
            // The kernel takes an int and refuses what is not positive.
            _ if size == 0 || i32::try_from(size).is_err() => Err(Errno::EINVAL),
            Route::Ours { entry: Entry::Symlink(target), .. } => {
                let target = target.as_bytes();
                let length = target.len().min(size);
                // SAFETY: `length` bytes are there on both sides, and the target is a copy of the
                // service's, apart from the program's buffer.
                unsafe { ptr::copy_nonoverlapping(target.as_ptr(), to.cast(), length) };
                isize::try_from(length).map_err(|_| Errno::EINVAL)
            }
            Route::Missing(errno) => Err(errno),
            _ => Err(Errno::EINVAL),
        };
        saved.finish(result, -1)
    })
}

/// The route of `readlinkat`, which takes an empty path for the link that the descriptor is open on (`do_readlinkat()`).
///
/// # Safety
/// `path` is null or a C string.
unsafe fn find_link(preload: &Preload, directory: c_int, path: *const c_char) -> Route {
    // SAFETY: the caller says so.
    let own = !path.is_null() && unsafe { is_descriptor(path, libc::AT_EMPTY_PATH) };
    match files::get(directory).filter(|_| own) {
        Some(held) if held.attributes.mode & libc::S_IFMT == libc::S_IFLNK => {
            Route::resolve(preload, held.path.as_os_str().as_bytes(), false, true)
        }
        Some(_) => Route::Missing(Errno::ENOENT),
        // SAFETY: the caller says so.
        None => unsafe { Route::find(preload, directory, path, false) },
    }
}

/// `readlink(2)`.
///
/// # Safety
/// As [`readlinkat`].
pub unsafe fn readlink(preload: &Preload, path: *const c_char, to: *mut c_char, size: usize) -> isize {
    // SAFETY: the caller says so.
    unsafe { readlinkat(preload, libc::AT_FDCWD, path, to, size) }
}

/// The fortified `readlink`: the size of the program's buffer was checked by the compiler or is checked here.
///
/// # Safety
/// As [`readlinkat`].
pub unsafe fn readlink_chk(
    preload: &Preload,
    path: *const c_char,
    to: *mut c_char,
    size: usize,
    room: usize,
) -> isize {
    // SAFETY: the caller says so; never more than there is room for.
    unsafe { readlink(preload, path, to, size.min(room)) }
}

/// The fortified `readlinkat`: see [`readlink_chk`].
///
/// # Safety
/// As [`readlinkat`].
pub unsafe fn readlinkat_chk(
    preload: &Preload,
    directory: c_int,
    path: *const c_char,
    to: *mut c_char,
    size: usize,
    room: usize,
) -> isize {
    // SAFETY: the caller says so; never more than there is room for.
    unsafe { readlinkat(preload, directory, path, to, size.min(room)) }
}

/// `getxattr(2)`: the service's files have no extended attributes.
///
/// # Safety
/// As `getxattr`: `path` and `name` are null or C strings, `value` is valid for writing `size` bytes.
pub unsafe fn getxattr(
    preload: &Preload,
    path: *const c_char,
    name: *const c_char,
    value: *mut c_void,
    size: usize,
) -> isize {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, libc::AT_FDCWD, path, true) };
    real_or!(route, path, kernel!(SYS_getxattr, path, name, value, size) as isize, |route| {
        saved.finish(attributes(route).and(Err(Errno::EOPNOTSUPP)), -1)
    })
}

/// `lgetxattr(2)`: see [`getxattr`].
///
/// # Safety
/// As [`getxattr`].
pub unsafe fn lgetxattr(
    preload: &Preload,
    path: *const c_char,
    name: *const c_char,
    value: *mut c_void,
    size: usize,
) -> isize {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, libc::AT_FDCWD, path, false) };
    real_or!(route, path, kernel!(SYS_lgetxattr, path, name, value, size) as isize, |route| {
        saved.finish(attributes(route).and(Err(Errno::EOPNOTSUPP)), -1)
    })
}

/// `listxattr(2)`: see [`getxattr`].
///
/// # Safety
/// As `listxattr`: `path` is null or a C string, `list` is valid for writing `size` bytes.
pub unsafe fn listxattr(preload: &Preload, path: *const c_char, list: *mut c_char, size: usize) -> isize {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, libc::AT_FDCWD, path, true) };
    real_or!(route, path, kernel!(SYS_listxattr, path, list, size) as isize, |route| {
        saved.finish(attributes(route).map(|_| 0), -1)
    })
}

/// `llistxattr(2)`: see [`getxattr`].
///
/// # Safety
/// As [`listxattr`].
pub unsafe fn llistxattr(preload: &Preload, path: *const c_char, list: *mut c_char, size: usize) -> isize {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, libc::AT_FDCWD, path, false) };
    real_or!(route, path, kernel!(SYS_llistxattr, path, list, size) as isize, |route| {
        saved.finish(attributes(route).map(|_| 0), -1)
    })
}

/// `realpath(3)`.
///
/// # Safety
/// As `realpath`: `path` is null or a C string, `to` is null or valid for writing `PATH_MAX` bytes.
pub unsafe fn realpath(preload: &Preload, path: *const c_char, to: *mut c_char) -> *mut c_char {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, libc::AT_FDCWD, path, true) };
    real_or!(
        route,
        path,
        // SAFETY: the caller says so.
        unsafe { next::realpath(path, to) },
        |route| {
            let result = match route {
                Route::Ours { path, entry: Entry::Directory { merge: true, .. } } => {
                    // Real links may lead to it.
                    let _bypass = Bypass::enter();
                    let path = std::fs::canonicalize(&path).unwrap_or(path);
                    // SAFETY: the caller says so.
                    unsafe { give_path(&path, to) }
                }
                // SAFETY: the caller says so.
                Route::Ours { path, .. } => unsafe { give_path(&path, to) },
                Route::Missing(errno) => Err(errno),
                _ => Err(Errno::ENOENT),
            };
            saved.finish(result, ptr::null_mut())
        }
    )
}

/// The fortified `realpath`: a buffer that is too small ends the program in glibc, and is an error here.
///
/// # Safety
/// As [`realpath`], with `room` bytes at `to`.
pub unsafe fn realpath_chk(
    preload: &Preload,
    path: *const c_char,
    to: *mut c_char,
    room: usize,
) -> *mut c_char {
    if room < libc::PATH_MAX as usize {
        Errno::ERANGE.set();
        return ptr::null_mut();
    }
    // SAFETY: the caller says so.
    unsafe { realpath(preload, path, to) }
}

/// `canonicalize_file_name(3)`.
///
/// # Safety
/// As [`realpath`].
pub unsafe fn canonicalize_file_name(preload: &Preload, path: *const c_char) -> *mut c_char {
    // SAFETY: the caller says so.
    unsafe { realpath(preload, path, ptr::null_mut()) }
}

/// Copies `path` to the caller's `PATH_MAX` bytes, or to memory that the caller frees.
///
/// # Safety
/// `to` is null or valid for writing `PATH_MAX` bytes.
unsafe fn give_path(path: &Path, to: *mut c_char) -> Result<*mut c_char> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::ENOENT)?;
    let bytes = path.as_bytes_with_nul();
    if bytes.len() > libc::PATH_MAX as usize {
        return Err(Errno::ENAMETOOLONG);
    }
    let to = if to.is_null() {
        // SAFETY: the size is not 0.
        unsafe { libc::malloc(bytes.len()) }.cast::<c_char>()
    } else {
        to
    };
    if to.is_null() {
        return Err(Errno::ENOMEM);
    }
    // SAFETY: there are at least that many bytes, and they are not those of the local string.
    unsafe { ptr::copy_nonoverlapping(path.as_ptr(), to, bytes.len()) };
    Ok(to)
}

/// The route of a call with `AT_*` flags.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn find(preload: &Preload, directory: c_int, path: *const c_char, flags: c_int) -> Route {
    // SAFETY: the caller says so.
    if unsafe { is_descriptor(path, flags) } {
        return files::get(directory).map_or(Route::Real, Route::Descriptor);
    }
    // SAFETY: the caller says so.
    unsafe { Route::find(preload, directory, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0) }
}

/// Whether a call with `AT_*` flags is about the descriptor itself.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn is_descriptor(path: *const c_char, flags: c_int) -> bool {
    // SAFETY: null was excluded, and the caller says that it is a C string, which has a first byte.
    flags & libc::AT_EMPTY_PATH != 0 && (path.is_null() || unsafe { *path } == 0)
}

fn attributes(route: Route) -> Result<Attributes> {
    match route {
        Route::Ours { path, entry } => Ok(Attributes::of(&path, &entry)),
        Route::Descriptor(held) => Ok(held.attributes),
        Route::Missing(errno) => Err(errno),
        Route::Real | Route::Rewritten(_) => Err(Errno::ENOENT),
    }
}
