//! glibc's heap.

use crate::SandboxError;

/// Arenas of the heap: the first one, which all threads then share. The processes of the host side allocate seldom
/// and in few threads at a time.
const ARENAS: i32 = 1;

/// Keeps the heap to its first arena. With more glibc opens files: to count the processors before a thread gets
/// an arena (`arena_get2`, malloc/arena.c), and to learn how to give memory of one back
/// (`check_may_shrink_heap`, sysdeps/unix/sysv/linux/malloc-sysdep.h).
#[allow(unsafe_code)] // a C function without a safe form
pub fn keep_from_files() -> Result<(), SandboxError> {
    // SAFETY: mallopt takes two numbers and locks the heap itself.
    match unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS) } {
        1 => Ok(()),
        _ => Err(SandboxError::Heap { arenas: ARENAS }),
    }
}
