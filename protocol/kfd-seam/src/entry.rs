//! The libc functions, behind the names that [`crate::preload!`] exports.
//!
//! Each takes the library's [`Preload`] and then the C function's own arguments, and is as unsafe as that:
//! pointers are the program's. The rules are the same in all of them:
//! - what is not the service's goes to the real system with the arguments as they came, after a look at the
//!   path or number that makes no system call and takes no lock;
//! - a call that went well leaves `errno` alone;
//! - nothing unwinds: the service's panics end in [`Instance::call`], and what is here has none. (One that
//!   were here all the same would end the process at the `extern "C"` function.)
//!
//! Unsafe code: the program's pointers are read and written as the C contract says.
#![allow(unsafe_code)]

pub mod descriptor;
pub mod device;
pub mod directory;
pub mod listing;
pub mod open;
pub mod shared;
pub mod stat;
pub mod stream;

use std::ffi::{CStr, CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::files::{self, Kind, OpenFile};
use crate::instance::{Bypass, Instance, Preload};
use crate::links;
use crate::path::{Resolved, is_near};
use crate::service::Entry;
use crate::table::Held;

pub use crate::instance::loaded;

/// Where a call with a path goes.
pub enum Route {
    /// To the real system as it came.
    Real,
    /// To the real system with this absolute path.
    Rewritten(CString),
    /// Nowhere.
    Missing(Errno),
    /// To the service's `entry` at the resolved `path`.
    Ours {
        /// Resolved, absolute.
        path: PathBuf,
        /// What is there.
        entry: Entry,
    },
    /// To what this descriptor stands for.
    Descriptor(Held<OpenFile>),
}

impl Route {
    /// For `path` as seen from `directory`; the last component's link is followed when `follow` is set.
    ///
    /// # Safety
    /// `path` is null or a C string.
    pub unsafe fn find(preload: &Preload, directory: c_int, path: *const c_char, follow: bool) -> Self {
        if path.is_null() || Bypass::is_active() {
            return Self::Real;
        }
        // SAFETY: the caller says so.
        let path = unsafe { CStr::from_ptr(path) }.to_bytes();
        if path.first() == Some(&b'/') {
            return match links::descriptor(path) {
                Some((fd, rest)) => Self::through(preload, path, fd, rest, follow),
                None if is_near(preload.prefixes, path) => Self::resolve(preload, path, follow, false),
                None => Self::Real,
            };
        }
        if path.is_empty() {
            return Self::Real;
        }
        match files::get(directory) {
            Some(held) if matches!(held.kind, Kind::Place) => {
                let mut whole = held.path.as_os_str().as_bytes().to_vec();
                whole.push(b'/');
                whole.extend(path);
                Self::resolve(preload, &whole, follow, true)
            }
            Some(_) => Self::Missing(Errno::ENOTDIR),
            None if links::may_lead(preload.prefixes, path) => {
                match links::from_directory(preload.prefixes, directory, path) {
                    Some(whole) => Self::resolve(preload, &whole, follow, false),
                    None => Self::Real,
                }
            }
            None => Self::Real,
        }
    }

    /// For `path`, which names the descriptor `fd` by a link of `/proc` and `rest` behind it.
    fn through(preload: &Preload, path: &[u8], fd: c_int, rest: &[u8], follow: bool) -> Self {
        let Some(held) = files::get(fd) else { return Self::Real };
        if !follow && rest.is_empty() {
            // The link itself.
            let entry = Entry::Symlink(held.path.as_os_str().to_owned());
            return Self::Ours { path: PathBuf::from(std::ffi::OsStr::from_bytes(path)), entry };
        }
        let mut whole = held.path.as_os_str().as_bytes().to_vec();
        whole.extend(rest);
        Self::resolve(preload, &whole, follow, true)
    }

    /// For the absolute `path`. `relative` says that the program named it from a directory of the service's, so
    /// that the real system cannot be given the path as it came.
    fn resolve(preload: &Preload, path: &[u8], follow: bool, relative: bool) -> Self {
        match Instance::get(preload).resolve(preload, path, follow) {
            Resolved::Untouched if relative => Self::rewritten(Path::new(std::ffi::OsStr::from_bytes(path))),
            Resolved::Untouched => Self::Real,
            Resolved::Foreign(path) => Self::rewritten(&path),
            Resolved::Missing(errno) => Self::Missing(errno),
            Resolved::Found { path, entry } => Self::Ours { path, entry },
        }
    }

    fn rewritten(path: &Path) -> Self {
        match CString::new(path.as_os_str().as_bytes()) {
            Ok(path) => Self::Rewritten(path),
            Err(_) => Self::Missing(Errno::ENOENT),
        }
    }
}

/// Calls the real system by way of a route: `$call` with the program's path, or with the rewritten one.
macro_rules! real_or {
    ($route:expr, $path:ident, $call:expr, |$ours:ident| $serve:expr) => {
        match $route {
            $crate::entry::Route::Real => $call,
            $crate::entry::Route::Rewritten(rewritten) => {
                let $path = rewritten.as_ptr();
                $call
            }
            $ours => $serve,
        }
    };
}
pub(crate) use real_or;
