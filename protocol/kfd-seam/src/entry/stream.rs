//! Streams: `fopen` and `freopen` on the service's files, `popen` for programs that ask `lsmod` for the driver.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::os::fd::RawFd;
use std::ptr;

use nix::errno::Errno;

use super::{Route, descriptor, open, real_or};
use crate::files;
use crate::instance::Preload;
use crate::kernel::{SavedErrno, next};
use crate::service::Result;

/// `fopen(3)`.
///
/// # Safety
/// As `fopen`: `path` is null or a C string, `mode` is a C string.
pub unsafe fn fopen(preload: &Preload, path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, libc::AT_FDCWD, path, true) };
    real_or!(
        route,
        path,
        // SAFETY: the caller says so.
        unsafe { next::fopen(path, mode) },
        |route| {
            // SAFETY: the caller says so.
            let opened = unsafe { serve(preload, route, mode) };
            saved.finish(opened, ptr::null_mut())
        }
    )
}

/// `freopen(3)`. Without a path the stream's own file is opened anew, by the name that `/proc` has for it.
///
/// # Safety
/// As `freopen`: `path` is null or a C string, `mode` is a C string, `stream` is open.
pub unsafe fn freopen(
    preload: &Preload,
    path: *const c_char,
    mode: *const c_char,
    stream: *mut libc::FILE,
) -> *mut libc::FILE {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, libc::AT_FDCWD, path, true) };
    real_or!(
        route,
        path,
        // SAFETY: the caller says so.
        unsafe { next::freopen(path, mode, stream) },
        |route| {
            // SAFETY: the caller says so.
            let opened = unsafe { reopen(preload, route, mode, stream) };
            saved.finish(opened, ptr::null_mut())
        }
    )
}

/// Opens the service's file, and lets libc put the stream on the kernel's file behind it, under the number that the stream has.
///
/// # Safety
/// `mode` is null or a C string, `stream` is open.
unsafe fn reopen(
    preload: &Preload,
    route: Route,
    mode: *const c_char,
    stream: *mut libc::FILE,
) -> Result<*mut libc::FILE> {
    // SAFETY: the caller says so.
    let opened = unsafe { open_file(preload, route, mode) };
    // The stream is closed where nothing could be opened, which libc does by itself: there is no such descriptor.
    let link = format!("/proc/self/fd/{}\0", opened.as_ref().copied().unwrap_or(-1));
    // SAFETY: the path is a C string, the rest is the caller's.
    let stream = unsafe { next::freopen(link.as_ptr().cast(), mode, stream) };
    let errno = Errno::last();
    let fd = opened?;
    if !stream.is_null() {
        // SAFETY: the stream is open.
        files::copied(fd, unsafe { libc::fileno(stream) });
    }
    // SAFETY: it was opened above and nobody knows it.
    unsafe { descriptor::close(preload, fd) };
    if stream.is_null() { Err(errno) } else { Ok(stream) }
}

/// Opens the service's file for a stream.
///
/// # Safety
/// `mode` is null or a C string.
unsafe fn open_file(preload: &Preload, route: Route, mode: *const c_char) -> Result<RawFd> {
    if mode.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the caller says so.
    let flags = open_flags(unsafe { CStr::from_ptr(mode) }.to_bytes()).ok_or(Errno::EINVAL)?;
    open::serve(preload, route, flags)
}

/// Opens the service's file and puts a stream on it.
///
/// # Safety
/// `mode` is null or a C string.
unsafe fn serve(preload: &Preload, route: Route, mode: *const c_char) -> Result<*mut libc::FILE> {
    // SAFETY: the caller says so.
    let fd = unsafe { open_file(preload, route, mode) }?;
    // SAFETY: the descriptor is open and the stream's from here on.
    let stream = unsafe { libc::fdopen(fd, mode) };
    if stream.is_null() {
        let errno = Errno::last();
        // SAFETY: it was opened above and nobody knows it.
        unsafe { descriptor::close(preload, fd) };
        return Err(errno);
    }
    Ok(stream)
}

/// `O_*` of an `fopen` mode.
fn open_flags(mode: &[u8]) -> Option<c_int> {
    let (first, rest) = mode.split_first()?;
    // What follows a comma is the encoding.
    let rest = rest.split(|byte| *byte == b',').next().unwrap_or_default();
    let begin = match first {
        b'r' => 0,
        b'w' => libc::O_CREAT | libc::O_TRUNC,
        b'a' => libc::O_CREAT | libc::O_APPEND,
        _ => return None,
    };
    let access = match (first, rest.contains(&b'+')) {
        (_, true) => libc::O_RDWR,
        (b'r', false) => libc::O_RDONLY,
        (_, false) => libc::O_WRONLY,
    };
    let cloexec = if rest.contains(&b'e') { libc::O_CLOEXEC } else { 0 };
    let exclusive = if rest.contains(&b'x') { libc::O_EXCL } else { 0 };
    Some(begin | access | cloexec | exclusive)
}

/// `popen(3)`.
///
/// # Safety
/// As `popen`: `command` and `mode` are null or C strings.
pub unsafe fn popen(_: &Preload, command: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    if !command.is_null() {
        // SAFETY: the caller says so.
        let text = unsafe { CStr::from_ptr(command) };
        if let Some(with_lsmod) = with_lsmod(text) {
            // SAFETY: a C string, and the caller's.
            return unsafe { next::popen(with_lsmod.as_ptr(), mode) };
        }
    }
    // SAFETY: the caller says so.
    unsafe { next::popen(command, mode) }
}

/// A command that runs `lsmod` also where there is none in the shell's path (it comes with kmod, which a
/// container has no need of): there it becomes a shell function that shows what `lsmod` reads. Both read
/// `/proc/modules` in a child that this library is loaded into, so the service's word on it stands.
fn with_lsmod(command: &CStr) -> Option<CString> {
    let command = command.to_bytes();
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'/' | b'.');
    if !command.split(|byte| !is_word(byte)).any(|word| word == b"lsmod") {
        return None;
    }
    let mut text = b"command -v lsmod >/dev/null 2>&1 || lsmod() { cat /proc/modules; }\n".to_vec();
    text.extend(command);
    CString::new(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_fopen_modes() {
        // The table of fopen(3).
        assert_eq!(open_flags(b"r"), Some(libc::O_RDONLY));
        assert_eq!(open_flags(b"rb+"), Some(libc::O_RDWR));
        assert_eq!(open_flags(b"w"), Some(libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC));
        assert_eq!(open_flags(b"w+"), Some(libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC));
        assert_eq!(open_flags(b"a"), Some(libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND));
        assert_eq!(open_flags(b"a+"), Some(libc::O_RDWR | libc::O_CREAT | libc::O_APPEND));
        assert_eq!(open_flags(b"re"), Some(libc::O_RDONLY | libc::O_CLOEXEC));
        assert_eq!(open_flags(b"wx"), Some(libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | libc::O_EXCL));
        assert_eq!(open_flags(b"r,ccs=utex+"), Some(libc::O_RDONLY));
        assert_eq!(open_flags(b""), None);
        assert_eq!(open_flags(b"q"), None);
    }

    #[test]
    fn only_commands_that_run_lsmod_are_touched() {
        for command in [c"lsmod | grep amdgpu", c"lsmod", c"(lsmod)|cat"] {
            let text = with_lsmod(command).unwrap().into_string().unwrap();
            assert!(text.ends_with(command.to_str().unwrap()), "{text}");
        }
        for command in [c"/sbin/lsmod", c"my-lsmod", c"lsmod2", c"lspci | grep VGA", c""] {
            assert_eq!(with_lsmod(command), None, "{command:?}");
        }
    }
}
