//! The real system under the front end.
//!
//! Three ways lead there, none of them back into the exported functions:
//! - [`kernel!`] hands a call of the program to the kernel as it came, as a raw system call: what is a system
//!   call behind a thin libc function must also work before libc's constructors ran, in signal handlers
//!   and between `vfork` and `exec`, where `dlsym` must not be called (the price: such a call is no cancellation
//!   point, and a second preload library behind this one does not see it);
//! - [`next`] finds the libc function of the same name (`RTLD_NEXT`) where there is more behind it: streams,
//!   `popen`, `realpath`, `fcntl`;
//! - what the front end does on its own behalf goes through rustix, which makes system calls itself and leaves
//!   `errno` alone.
//!
//! Unsafe code: calls of foreign functions with the program's own pointers.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::errno::Errno;

use crate::entry::listing::{Compare, Filter, Glob, OnError};

/// A raw system call with the program's arguments: returns -1 and sets `errno` on failure, as libc's
/// function does.
macro_rules! kernel {
    ($number:ident $(, $argument:expr)* $(,)?) => {{
        // SAFETY: the kernel checks every argument itself; a buffer is the one that the program named
        // for this very purpose.
        unsafe { libc::syscall(libc::$number $(, $argument)*) }
    }};
}
pub(crate) use kernel;

/// `errno` of a moment, put back when a call that went well touched it on the way.
pub struct SavedErrno(i32);

impl SavedErrno {
    /// `errno` as the program left it.
    pub fn now() -> Self {
        Self(Errno::last_raw())
    }

    /// The C result of a call: the value with `errno` as it was before, or `failed` and the error.
    pub fn finish<T>(self, result: Result<T, Errno>, failed: T) -> T {
        match result {
            Ok(value) => {
                Errno::set_raw(self.0);
                value
            }
            Err(errno) => {
                errno.set();
                failed
            }
        }
    }
}

/// rustix's error as nix's.
pub fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

/// The program's descriptor `fd` for the length of a call; `None` when it is no descriptor number.
pub fn borrow<'fd>(fd: RawFd) -> Option<BorrowedFd<'fd>> {
    if fd < 0 {
        return None;
    }
    // SAFETY: it is used for one system call in the program's own call on that descriptor; a number that
    // is not open makes that call fail with EBADF.
    Some(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// The device and inode numbers of an open descriptor.
pub fn identity(fd: RawFd) -> Option<(u64, u64)> {
    let stat = rustix::fs::fstat(borrow(fd)?).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// libc's own function of that name, which this library's export hides.
struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        // SAFETY: the name is a C string.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Release);
        found
    }
}

macro_rules! next {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty, else $failed:expr)?;)*) => {
        /// libc's own functions (`RTLD_NEXT`). Where one is missing they fail with `ENOSYS`.
        pub mod next {
            use super::*;
            $(
                $(#[$doc])*
                ///
                /// # Safety
                /// As the C function of that name.
                pub unsafe fn $name($($argument: $type),*) $(-> $result)? {
                    const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => c"",
                    };
                    static NEXT: Next = Next::new(NAME);
                    let address = NEXT.address();
                    if address.is_null() {
                        Errno::ENOSYS.set();
                        return $($failed)?;
                    }
                    type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
                    // SAFETY: the address is that of libc's function, which has this C type.
                    let function = unsafe { std::mem::transmute::<*mut c_void, Function>(address) };
                    // SAFETY: the caller upholds the C function's contract.
                    unsafe { function($($argument),*) }
                }
            )*
        }
    };
}

next! {
    /// Opens a stream on a file.
    fn fopen(path: *const c_char, mode: *const c_char) -> *mut libc::FILE, else ptr::null_mut();
    /// Opens a stream on a shell command.
    fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE, else ptr::null_mut();
    /// Opens a directory stream.
    fn opendir(path: *const c_char) -> *mut libc::DIR, else ptr::null_mut();
    /// Makes a directory stream of a descriptor.
    fn fdopendir(fd: c_int) -> *mut libc::DIR, else ptr::null_mut();
    /// The next entry of a directory stream.
    fn readdir64(directory: *mut libc::DIR) -> *mut libc::dirent64, else ptr::null_mut();
    /// The next entry of a directory stream, into the caller's memory.
    fn readdir64_r(directory: *mut libc::DIR, entry: *mut libc::dirent64, result: *mut *mut libc::dirent64) -> c_int, else libc::ENOSYS;
    /// Back to the first entry.
    fn rewinddir(directory: *mut libc::DIR);
    /// The position in a directory stream.
    fn telldir(directory: *mut libc::DIR) -> libc::c_long, else -1;
    /// Back to a position.
    fn seekdir(directory: *mut libc::DIR, position: libc::c_long);
    /// The descriptor of a directory stream.
    fn dirfd(directory: *mut libc::DIR) -> c_int, else -1;
    /// Closes a directory stream.
    fn closedir(directory: *mut libc::DIR) -> c_int, else -1;
    /// Opens another file on a stream.
    fn freopen(path: *const c_char, mode: *const c_char, stream: *mut libc::FILE) -> *mut libc::FILE, else ptr::null_mut();
    /// The entries of a directory that is named as seen from another.
    fn scandirat64(directory: c_int, path: *const c_char, list: *mut *mut *mut libc::dirent64, filter: Filter, compare: Compare) -> c_int, else -1;
    /// The entries of a directory.
    fn scandir64(path: *const c_char, list: *mut *mut *mut libc::dirent64, filter: Filter, compare: Compare) -> c_int, else -1;
    /// The paths of a pattern.
    fn glob64(pattern: *const c_char, flags: c_int, on_error: OnError, found: *mut Glob) -> c_int, else libc::GLOB_NOSPACE;
    /// Resolves links.
    fn realpath(path: *const c_char, resolved: *mut c_char) -> *mut c_char, else ptr::null_mut();
    /// `access` with flags, which the kernel's older call does not have.
    fn faccessat(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int, else -1;
}

/// libc's own `fcntl`.
static FCNTL: Next = Next::new(c"fcntl64");

/// Finds, when the library is loaded, what programs may call where nothing can be looked for: in signal handlers, after `vfork`.
pub fn bind() {
    FCNTL.address();
}

/// libc's own `fcntl`, which knows better than the system call how `F_GETOWN` reports a group.
///
/// # Safety
/// As `fcntl(2)`.
pub unsafe fn next_fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    let address = FCNTL.address();
    if address.is_null() {
        return kernel!(SYS_fcntl, fd, command, argument) as c_int;
    }
    // SAFETY: the address is that of libc's function, which has this C type.
    let function: unsafe extern "C" fn(c_int, c_int, ...) -> c_int = unsafe { std::mem::transmute(address) };
    // SAFETY: the caller upholds fcntl's contract; the third argument is passed as it came, in a register.
    unsafe { function(fd, command, argument) }
}
