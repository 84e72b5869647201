//! The names that a preload library exports.

use std::collections::BTreeSet;

use object::{Object, ObjectSymbol};

/// What libhsakmt, ROCr, libdrm, libdrm_amdgpu and rocminfo of Debian bookworm and trixie import
/// (`nm -D`) of the calls that can reach a device file or a path, their fortified forms, what glibc before 2.33
/// had in place of `stat`, what cat, ls, find, stat, head, readlink and realpath import besides, what glibc also calls
/// them, and what libc makes of these calls inside itself.
const NAMES: &str = "open open64 __open __open64 openat openat64 creat creat64 __open_2 __open64_2 __openat_2 __openat64_2 \
    close __close close_range closefrom dup dup2 __dup2 dup3 fcntl fcntl64 __fcntl ioctl mmap mmap64 lseek lseek64 __lseek \
    stat stat64 lstat lstat64 fstat fstat64 fstatat fstatat64 statx \
    __xstat __xstat64 __lxstat __lxstat64 __fxstat __fxstat64 __fxstatat __fxstatat64 \
    access faccessat euidaccess eaccess readlink readlinkat __readlink_chk __readlinkat_chk \
    realpath __realpath_chk canonicalize_file_name getxattr lgetxattr listxattr llistxattr \
    opendir fdopendir readdir readdir64 readdir_r readdir64_r rewinddir telldir seekdir dirfd closedir \
    scandir scandir64 scandirat scandirat64 glob glob64 fopen fopen64 freopen freopen64 popen";

/// Rust exports the functions that `preload!` makes in the cdylib, and nothing else.
#[test]
fn a_preload_library_exports_these_names_and_no_others() {
    let library = std::fs::read(crate::support::fixture()).unwrap();
    let library = object::File::parse(&*library).unwrap();
    let found: BTreeSet<_> = library
        .dynamic_symbols()
        .filter(|symbol| symbol.is_global() && symbol.is_definition())
        .map(|symbol| symbol.name().unwrap().to_owned())
        .collect();
    assert_eq!(found, NAMES.split_whitespace().map(str::to_owned).collect());
}

/// A test or tool that uses this crate for its types must not replace libc's functions in its own process.
#[test]
fn the_crate_itself_exports_none() {
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let program = object::File::parse(&*program).unwrap();
    // The use of a type, so that the crate is linked in.
    assert!(!kfd_seam::Bypass::is_active());
    let names: BTreeSet<_> = NAMES.split_whitespace().collect();
    for symbol in program.dynamic_symbols().chain(program.symbols()).filter(ObjectSymbol::is_definition) {
        let name = symbol.name().unwrap();
        assert!(!(symbol.is_global() && names.contains(name)), "{name}");
    }
}
