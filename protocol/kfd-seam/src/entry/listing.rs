//! What libc makes of directory streams inside itself, where no library stands between: `scandir`, `scandirat` and `glob`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::errno::Errno;

use super::{Route, directory, stat};
use crate::instance::{Bypass, Preload};
use crate::kernel::{SavedErrno, next};
use crate::path::may_be_near;

/// The `filter` of `scandir`.
pub type Filter = Option<unsafe extern "C" fn(*const libc::dirent64) -> c_int>;

/// The `compar` of `scandir`.
pub type Compare =
    Option<unsafe extern "C" fn(*mut *const libc::dirent64, *mut *const libc::dirent64) -> c_int>;

/// Entries that were copied for the program, freed when they are not handed over.
struct Copies(Vec<*mut libc::dirent64>);

impl Drop for Copies {
    fn drop(&mut self) {
        for copy in &self.0 {
            // SAFETY: each came from malloc below and was given to nobody.
            unsafe { libc::free(copy.cast()) };
        }
    }
}

/// `scandir(3)`; `struct dirent` and `struct dirent64` are one on 64-bit targets.
///
/// # Safety
/// As `scandir`: `path` is null or a C string, `list` is valid for writing, the functions are what `scandir` takes.
pub unsafe fn scandir(
    preload: &Preload,
    path: *const c_char,
    list: *mut *mut *mut libc::dirent64,
    filter: Filter,
    compare: Compare,
) -> c_int {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, libc::AT_FDCWD, path, true) };
    if matches!(route, Route::Real) {
        // SAFETY: the caller says so.
        return unsafe { next::scandir64(path, list, filter, compare) };
    }
    // SAFETY: the caller says so.
    unsafe { list_route(preload, saved, route, list, filter, compare) }
}

/// `scandirat(3)`.
///
/// # Safety
/// As [`scandir`].
pub unsafe fn scandirat(
    preload: &Preload,
    directory: c_int,
    path: *const c_char,
    list: *mut *mut *mut libc::dirent64,
    filter: Filter,
    compare: Compare,
) -> c_int {
    let saved = SavedErrno::now();
    // SAFETY: the caller says so.
    let route = unsafe { Route::find(preload, directory, path, true) };
    if matches!(route, Route::Real) {
        // SAFETY: the caller says so.
        return unsafe { next::scandirat64(directory, path, list, filter, compare) };
    }
    // SAFETY: the caller says so.
    unsafe { list_route(preload, saved, route, list, filter, compare) }
}

/// Lists what a route leads to that is not the real system's as it came.
///
/// # Safety
/// As [`scandir`].
unsafe fn list_route(
    preload: &Preload,
    saved: SavedErrno,
    route: Route,
    list: *mut *mut *mut libc::dirent64,
    filter: Filter,
    compare: Compare,
) -> c_int {
    // SAFETY: the route does not take the path.
    let stream = unsafe { directory::open_route(preload, route, ptr::null()) };
    if stream.is_null() {
        return -1;
    }
    // SAFETY: the stream was just opened; the rest is the caller's.
    let found = unsafe { collect(preload, stream, filter) };
    // SAFETY: it is used no more.
    unsafe { directory::closedir(preload, stream) };
    let result = found.and_then(|copies| {
        // SAFETY: the caller says so.
        unsafe { hand_over(copies, list, compare) }
    });
    saved.finish(result, -1)
}

/// Copies of the entries that `filter` wants.
///
/// # Safety
/// `stream` is open, and `filter` is a function of `scandir`'s.
unsafe fn collect(preload: &Preload, stream: *mut libc::DIR, filter: Filter) -> Result<Copies, Errno> {
    let mut copies = Copies(Vec::new());
    loop {
        // SAFETY: the caller says so.
        let entry = unsafe { directory::readdir(preload, stream) };
        if entry.is_null() {
            return Ok(copies);
        }
        if let Some(filter) = filter {
            // SAFETY: the program's own function, with an entry.
            if unsafe { filter(entry) } == 0 {
                continue;
            }
        }
        // SAFETY: readdir's result is a whole entry.
        let name = unsafe { &raw const (*entry).d_name };
        // SAFETY: an entry's name is terminated.
        let name = unsafe { CStr::from_ptr(name.cast()) };
        let used = offset_of!(libc::dirent64, d_name).saturating_add(name.to_bytes_with_nul().len());
        // The length that the entry says it has, which is rounded up and what a program may copy. So much is there: libc's own entries
        // are the kernel's records, and a stream's are whole structs, which no name of theirs goes beyond.
        // SAFETY: readdir's result is a whole entry.
        let size = used.max(usize::from(unsafe { (*entry).d_reclen }));
        // SAFETY: the size is not 0.
        let copy = unsafe { libc::malloc(size) };
        if copy.is_null() {
            return Err(Errno::ENOMEM);
        }
        // SAFETY: both are valid for so many bytes, and apart.
        unsafe { ptr::copy_nonoverlapping(entry.cast::<u8>(), copy.cast(), size) };
        copies.0.push(copy.cast());
    }
}

/// Gives the program its sorted array, which it frees with its entries.
///
/// # Safety
/// `list` is valid for writing, and `compare` is a function of `scandir`'s.
unsafe fn hand_over(
    mut copies: Copies,
    list: *mut *mut *mut libc::dirent64,
    compare: Compare,
) -> Result<c_int, Errno> {
    let count = c_int::try_from(copies.0.len()).map_err(|_| Errno::EOVERFLOW)?;
    let bytes = copies.0.len().saturating_mul(size_of::<*mut libc::dirent64>()).max(1);
    // SAFETY: the size is not 0.
    let array = unsafe { libc::malloc(bytes) }.cast::<*mut libc::dirent64>();
    if array.is_null() {
        return Err(Errno::ENOMEM);
    }
    // SAFETY: the array is as long as the list, and apart from it.
    unsafe { ptr::copy_nonoverlapping(copies.0.as_ptr(), array, copies.0.len()) };
    if let Some(compare) = compare {
        // SAFETY: a pointer to an entry is what both compare: the types differ in what they point to alone.
        let compare = unsafe {
            std::mem::transmute::<
                unsafe extern "C" fn(*mut *const libc::dirent64, *mut *const libc::dirent64) -> c_int,
                unsafe extern "C" fn(*const c_void, *const c_void) -> c_int,
            >(compare)
        };
        // SAFETY: the array has so many elements of that size.
        unsafe { libc::qsort(array.cast(), copies.0.len(), size_of::<*mut libc::dirent64>(), Some(compare)) };
    }
    copies.0.clear();
    // SAFETY: the caller says so.
    unsafe { list.write(array) };
    Ok(count)
}

/// `glob_t` of glibc for 64-bit targets.
#[repr(C)]
#[derive(Debug)]
pub struct Glob {
    count: usize,
    paths: *mut *mut c_char,
    offset: usize,
    flags: c_int,
    closedir: Option<unsafe extern "C" fn(*mut c_void)>,
    readdir: Option<unsafe extern "C" fn(*mut c_void) -> *mut libc::dirent64>,
    opendir: Option<unsafe extern "C" fn(*const c_char) -> *mut c_void>,
    lstat: Option<unsafe extern "C" fn(*const c_char, *mut c_void) -> c_int>,
    stat: Option<unsafe extern "C" fn(*const c_char, *mut c_void) -> c_int>,
}

const _: () = assert!(size_of::<Glob>() == size_of::<libc::glob64_t>());

/// The error function of `glob`.
pub type OnError = Option<unsafe extern "C" fn(*const c_char, c_int) -> c_int>;

/// The library that glob's functions serve, of which a process has one.
static LIBRARY: AtomicPtr<Preload> = AtomicPtr::new(ptr::null_mut());

/// `glob(3)`, with this library's functions for directories where the pattern may lead to the service.
///
/// # Safety
/// As `glob`: `pattern` is a C string, `found` is valid, and initialised where the flags say so.
pub unsafe fn glob(
    preload: &'static Preload,
    pattern: *const c_char,
    flags: c_int,
    on_error: OnError,
    found: *mut Glob,
) -> c_int {
    // SAFETY: the caller says so.
    let near =
        !pattern.is_null() && may_be_near(preload.prefixes, unsafe { CStr::from_ptr(pattern) }.to_bytes());
    if !near || found.is_null() || flags & libc::GLOB_ALTDIRFUNC != 0 || Bypass::is_active() {
        // SAFETY: the caller says so.
        return unsafe { next::glob64(pattern, flags, on_error, found) };
    }
    LIBRARY.store(ptr::from_ref(preload).cast_mut(), Ordering::Release);
    // SAFETY: the caller says that it is valid; without GLOB_ALTDIRFUNC libc does not look at the functions.
    let functions = unsafe { &mut *found };
    functions.closedir = Some(close_directory);
    functions.readdir = Some(read_directory);
    functions.opendir = Some(open_directory);
    functions.lstat = Some(stat_link);
    functions.stat = Some(stat_file);
    // SAFETY: the caller says so, and the functions are there.
    unsafe { next::glob64(pattern, flags | libc::GLOB_ALTDIRFUNC, on_error, found) }
}

/// The library whose `glob` runs.
fn library() -> &'static Preload {
    // SAFETY: null, or what `glob` has stored, which is a static.
    let library = unsafe { LIBRARY.load(Ordering::Acquire).as_ref() };
    // No glob has run: nobody can have the functions.
    library.unwrap_or(&NOTHING)
}

/// A library that serves nothing.
static NOTHING: Preload =
    Preload { name: "", prefixes: &[], shared: |_| None, service: || Err("no library".into()) };

unsafe extern "C" fn open_directory(path: *const c_char) -> *mut c_void {
    // SAFETY: glob calls it as opendir.
    unsafe { directory::opendir(library(), path) }.cast()
}

unsafe extern "C" fn read_directory(stream: *mut c_void) -> *mut libc::dirent64 {
    // SAFETY: glob calls it as readdir.
    unsafe { directory::readdir(library(), stream.cast()) }
}

unsafe extern "C" fn close_directory(stream: *mut c_void) {
    // SAFETY: glob calls it as closedir. It has no use for the result.
    unsafe { directory::closedir(library(), stream.cast()) };
}

unsafe extern "C" fn stat_link(path: *const c_char, to: *mut c_void) -> c_int {
    // SAFETY: glob calls it as lstat.
    unsafe { stat::lstat(library(), path, to.cast()) }
}

unsafe extern "C" fn stat_file(path: *const c_char, to: *mut c_void) -> c_int {
    // SAFETY: glob calls it as stat.
    unsafe { stat::stat(library(), path, to.cast()) }
}
