//! The system calls that each process may make.

mod device;
mod model;
mod never;
mod worker;

pub use device::device;
pub use model::model;
pub use never::{never, never_with_model};
pub use worker::{SMI_DESCRIPTORS, worker};

use crate::seccomp::{Check, Rule, rule};

/// Flags of `clone` with which glibc starts a thread (nptl's pthread_create.c); no other combination makes
/// anything but a thread of this process.
pub const THREAD_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// The signal with which glibc makes a change of user reach all threads (`SIGSETXID`, nptl's
/// internal-signals.h). Its handler is installed when a process starts its first thread.
const SIGSETXID: u32 = 33;

/// Memory may not become executable.
const NO_EXEC: u32 = libc::PROT_EXEC.cast_unsigned();

/// What Rust's standard library and glibc do on their own: memory, threads, locks, clocks, the log.
fn runtime() -> Vec<Rule> {
    vec![
        rule!(SYS_brk, "the heap"),
        rule!(SYS_mmap, "heap, stacks, guest memory", Check::Without(2, NO_EXEC)),
        rule!(SYS_mprotect, "heap growth, stack guards", Check::Without(2, NO_EXEC)),
        rule!(SYS_munmap, "heap, stacks, guest memory"),
        rule!(SYS_mremap, "growth of large heap blocks"),
        rule!(SYS_madvise, "heap and stacks given back"),
        rule!(SYS_clone, "threads", Check::Is(0, THREAD_FLAGS.cast_unsigned())),
        rule!(SYS_clone3, "answered with ENOSYS by a second filter"),
        rule!(SYS_set_robust_list, "start of a thread"),
        rule!(SYS_rseq, "start of a thread"),
        rule!(SYS_sigaltstack, "start and end of a thread"),
        rule!(SYS_rt_sigprocmask, "start and end of a thread"),
        rule!(SYS_rt_sigaction, "start of the first thread", Check::Is(0, SIGSETXID)),
        rule!(SYS_sched_getaffinity, "start of a thread"),
        rule!(SYS_prctl, "name of a thread", Check::Is(0, libc::PR_SET_NAME.cast_unsigned())),
        rule!(SYS_gettid, "start of a thread"),
        rule!(SYS_futex, "locks"),
        rule!(SYS_sched_yield, "locks"),
        rule!(SYS_exit, "end of a thread"),
        rule!(SYS_exit_group, "end of the process"),
        rule!(SYS_restart_syscall, "a wait after a stop"),
        rule!(SYS_getrandom, "seeds of hash tables"),
        rule!(SYS_clock_gettime, "clocks where the vDSO has none"),
        rule!(SYS_close, "descriptors"),
        rule!(SYS_write, "the log", Check::Is(0, libc::STDERR_FILENO.cast_unsigned())),
    ]
}
