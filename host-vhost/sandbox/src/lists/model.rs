//! The KFD model under a worker.

use crate::seccomp::{Check, Rule, rule};

/// `UFFD_USER_MODE_ONLY` of linux/userfaultfd.h: faults of the process's own code, none of the kernel's.
const USER_MODE_ONLY: i32 = 1;
/// `UFFDIO_API`
const UFFDIO_API: u32 = 0xc018_aa3f;
/// `UFFDIO_REGISTER`
const UFFDIO_REGISTER: u32 = 0xc020_aa00;
/// `UFFDIO_WRITEPROTECT`
const UFFDIO_WRITEPROTECT: u32 = 0xc018_aa06;

/// What the KFD model does in the worker's process beyond what a worker may do: the memory of its GPU lies in memfds,
/// it reads ioctl arguments as the kernel would, and its queues wait with time-outs.
pub fn model() -> Vec<Rule> {
    let own = Check::Is(0, std::process::id());
    vec![
        rule!(SYS_memfd_create, "memory of the GPU, open files of the devices"),
        rule!(SYS_ftruncate, "memory of the GPU"),
        rule!(SYS_fallocate, "memory of the GPU given back"),
        // Not all of it: with F_SETOWN and F_SETSIG the kernel sends signals to other processes of the user.
        rule!(SYS_fcntl, "copies of descriptors", Check::Is(1, libc::F_DUPFD_CLOEXEC.cast_unsigned())),
        rule!(SYS_fcntl, "whether a descriptor is open", Check::Is(1, libc::F_GETFD.cast_unsigned())),
        rule!(SYS_fcntl, "the flags that a call asks for", Check::Is(1, libc::F_SETFD.cast_unsigned())),
        rule!(SYS_fcntl, "who uses shared memory", Check::Is(1, libc::F_OFD_SETLK.cast_unsigned())),
        rule!(SYS_fcntl, "who uses shared memory", Check::Is(1, libc::F_OFD_GETLK.cast_unsigned())),
        rule!(SYS_fcntl, "counts of the machine", Check::Is(1, libc::F_OFD_SETLKW.cast_unsigned())),
        rule!(SYS_unlink, "its debug mailbox at exit; Landlock refuses it, which does no harm"),
        // Landlock lets it open nothing but files without a place in the file system, which its memory is.
        rule!(SYS_openat, "its own memory, by a further description that locks a buffer's range"),
        rule!(SYS_fstat, "which file a descriptor is"),
        rule!(SYS_lseek, "sizes of files"),
        rule!(SYS_msync, "whether user memory is mapped", Check::Is(2, libc::MS_ASYNC.cast_unsigned())),
        rule!(SYS_pread64, "memory of the GPU"),
        rule!(SYS_pwrite64, "memory of the GPU"),
        rule!(SYS_process_vm_readv, "ioctl arguments", own),
        rule!(SYS_process_vm_writev, "ioctl arguments", own),
        rule!(SYS_getpid, "which process it is in"),
        rule!(SYS_clock_nanosleep, "pace of its queues"),
        rule!(
            SYS_userfaultfd,
            "doorbells that trap while they are still",
            Check::Is(0, (libc::O_CLOEXEC | USER_MODE_ONLY).cast_unsigned())
        ),
        rule!(SYS_ioctl, "the same", Check::Is(1, UFFDIO_API)),
        rule!(SYS_ioctl, "the same", Check::Is(1, UFFDIO_REGISTER)),
        rule!(SYS_ioctl, "the same", Check::Is(1, UFFDIO_WRITEPROTECT)),
        rule!(SYS_read, "the same; a worker reads no other descriptor but its streams of events"),
        rule!(SYS_socketpair, "streams of system management events"),
        rule!(SYS_sendto, "the same"),
        rule!(SYS_recvfrom, "the same: which events are enabled"),
        rule!(
            SYS_prctl,
            "the same: the name of the thread that a fault is told by",
            Check::Is(0, libc::PR_GET_NAME.cast_unsigned())
        ),
    ]
}
