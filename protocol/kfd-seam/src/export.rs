//! [`preload!`]: the exported names.

/// Makes a `cdylib` a preload library: exports the libc functions of the front end, which then serve what
/// the given [`Preload`](crate::Preload) says. The crate must be a `cdylib` and nothing else: linked into
/// a program or a test, the names would replace libc's there.
///
/// ```text
/// kfd_seam::preload!(kfd_seam::Preload {
///     name: "kfd-model",
///     prefixes: &["/dev/kfd", "/sys/class/kfd"],
///     shared: |_| None,
///     service: make_service,
/// });
/// ```
#[macro_export]
macro_rules! preload {
    ($preload:expr) => {
        static KFD_SEAM_PRELOAD: $crate::Preload = $preload;

        // The names must be libc's, and the pointers are the program's.
        #[allow(unsafe_code, missing_docs)]
        mod kfd_seam_exports {
            use super::KFD_SEAM_PRELOAD as PRELOAD;
            use $crate::entry::{descriptor, device, directory, listing, loaded, open, shared, stat, stream};
            use $crate::export::c::*;

            /// Run by the dynamic linker when the library is loaded.
            #[used]
            #[unsafe(link_section = ".init_array")]
            static LOADED: extern "C" fn() = {
                extern "C" fn at_load() {
                    loaded();
                }
                at_load
            };

            $crate::preload! { @functions PRELOAD
                open, open64, __open, __open64 => open::open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int;
                openat, openat64 => open::openat(directory: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int;
                creat, creat64 => open::creat(path: *const c_char, mode: c_uint) -> c_int;
                __open_2, __open64_2 => open::open_2(path: *const c_char, flags: c_int) -> c_int;
                __openat_2, __openat64_2 => open::openat_2(directory: c_int, path: *const c_char, flags: c_int) -> c_int;

                close, __close => descriptor::close(fd: c_int) -> c_int;
                close_range => descriptor::close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
                closefrom => descriptor::closefrom(first: c_int) -> ();
                dup => descriptor::dup(fd: c_int) -> c_int;
                dup2, __dup2 => descriptor::dup2(fd: c_int, copy: c_int) -> c_int;
                dup3 => descriptor::dup3(fd: c_int, copy: c_int, flags: c_int) -> c_int;
                fcntl, fcntl64, __fcntl => descriptor::fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int;

                ioctl => device::ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int;
                mmap, mmap64 => device::mmap(address: *mut c_void, length: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void;

                lseek, lseek64, __lseek => shared::lseek(fd: c_int, offset: i64, whence: c_int) -> i64;

                stat, stat64 => stat::stat(path: *const c_char, to: *mut struct_stat) -> c_int;
                lstat, lstat64 => stat::lstat(path: *const c_char, to: *mut struct_stat) -> c_int;
                fstat, fstat64 => stat::fstat(fd: c_int, to: *mut struct_stat) -> c_int;
                fstatat, fstatat64 => stat::fstatat(directory: c_int, path: *const c_char, to: *mut struct_stat, flags: c_int) -> c_int;
                __xstat, __xstat64 => stat::xstat(version: c_int, path: *const c_char, to: *mut struct_stat) -> c_int;
                __lxstat, __lxstat64 => stat::lxstat(version: c_int, path: *const c_char, to: *mut struct_stat) -> c_int;
                __fxstat, __fxstat64 => stat::fxstat(version: c_int, fd: c_int, to: *mut struct_stat) -> c_int;
                __fxstatat, __fxstatat64 => stat::fxstatat(version: c_int, directory: c_int, path: *const c_char, to: *mut struct_stat, flags: c_int) -> c_int;
                statx => stat::statx(directory: c_int, path: *const c_char, flags: c_int, mask: c_uint, to: *mut struct_statx) -> c_int;
                access => stat::access(path: *const c_char, mode: c_int) -> c_int;
                faccessat => stat::faccessat(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int;
                euidaccess, eaccess => stat::euidaccess(path: *const c_char, mode: c_int) -> c_int;
                readlink => stat::readlink(path: *const c_char, to: *mut c_char, size: usize) -> isize;
                readlinkat => stat::readlinkat(directory: c_int, path: *const c_char, to: *mut c_char, size: usize) -> isize;
                __readlink_chk => stat::readlink_chk(path: *const c_char, to: *mut c_char, size: usize, room: usize) -> isize;
                __readlinkat_chk => stat::readlinkat_chk(directory: c_int, path: *const c_char, to: *mut c_char, size: usize, room: usize) -> isize;
                realpath => stat::realpath(path: *const c_char, to: *mut c_char) -> *mut c_char;
                __realpath_chk => stat::realpath_chk(path: *const c_char, to: *mut c_char, room: usize) -> *mut c_char;
                canonicalize_file_name => stat::canonicalize_file_name(path: *const c_char) -> *mut c_char;
                getxattr => stat::getxattr(path: *const c_char, name: *const c_char, value: *mut c_void, size: usize) -> isize;
                lgetxattr => stat::lgetxattr(path: *const c_char, name: *const c_char, value: *mut c_void, size: usize) -> isize;
                listxattr => stat::listxattr(path: *const c_char, list: *mut c_char, size: usize) -> isize;
                llistxattr => stat::llistxattr(path: *const c_char, list: *mut c_char, size: usize) -> isize;

                opendir => directory::opendir(path: *const c_char) -> *mut DIR;
                fdopendir => directory::fdopendir(fd: c_int) -> *mut DIR;
                readdir, readdir64 => directory::readdir(directory: *mut DIR) -> *mut dirent;
                readdir_r, readdir64_r => directory::readdir_r(directory: *mut DIR, entry: *mut dirent, result: *mut *mut dirent) -> c_int;
                rewinddir => directory::rewinddir(directory: *mut DIR) -> ();
                telldir => directory::telldir(directory: *mut DIR) -> c_long;
                seekdir => directory::seekdir(directory: *mut DIR, position: c_long) -> ();
                dirfd => directory::dirfd(directory: *mut DIR) -> c_int;
                closedir => directory::closedir(directory: *mut DIR) -> c_int;

                scandir, scandir64 => listing::scandir(path: *const c_char, list: *mut *mut *mut dirent, filter: listing::Filter, compare: listing::Compare) -> c_int;
                scandirat, scandirat64 => listing::scandirat(directory: c_int, path: *const c_char, list: *mut *mut *mut dirent, filter: listing::Filter, compare: listing::Compare) -> c_int;
                glob, glob64 => listing::glob(pattern: *const c_char, flags: c_int, on_error: listing::OnError, found: *mut listing::Glob) -> c_int;

                fopen, fopen64 => stream::fopen(path: *const c_char, mode: *const c_char) -> *mut FILE;
                freopen, freopen64 => stream::freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE;
                popen => stream::popen(command: *const c_char, mode: *const c_char) -> *mut FILE;
            }
        }
    };

    (@functions $preload:ident $($($name:ident),+ => $module:ident::$function:ident $arguments:tt -> $result:ty;)*) => {
        $($crate::preload! { @names $preload [$($name),+] $module $function $arguments $result })*
    };

    (@names $preload:ident [$($name:ident),+] $module:ident $function:ident $arguments:tt $result:ty) => {
        $($crate::preload! { @function $preload $name $module $function $arguments $result })+
    };

    (@function $preload:ident $name:ident $module:ident $function:ident ($($argument:ident: $type:ty),*) $result:ty) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: the program calls it as the libc function of this name and keeps that one's contract.
            unsafe { $module::$function(&$preload, $($argument),*) }
        }
    };
}

/// The C types in the exported signatures.
pub mod c {
    pub use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};

    pub use libc::dirent64 as dirent;
    pub use libc::stat as struct_stat;
    pub use libc::statx as struct_statx;
    pub use libc::{DIR, FILE};
}
