//! The device.

use crate::seccomp::{Check, Rule, rule};

/// The device: the runtime's calls, sockets that exist or are accepted, eventfds, epoll. It opens no file, starts no
/// process and makes no socket of its own; descriptors come over sockets.
pub fn device() -> Vec<Rule> {
    let fcntl = |command: i32| {
        rule!(SYS_fcntl, "copies and flags of descriptors", Check::Is(1, command.cast_unsigned()))
    };
    let mut rules = super::runtime();
    rules.extend([
        rule!(SYS_recvmsg, "vhost-user, channels"),
        rule!(SYS_sendmsg, "vhost-user, channels"),
        rule!(SYS_recvfrom, "vhost-user"),
        rule!(SYS_sendto, "vhost-user"),
        rule!(SYS_accept4, "the next connection"),
        rule!(SYS_shutdown, "end of a connection"),
        rule!(
            SYS_getsockopt,
            "type of a descriptor that came",
            Check::Is(1, libc::SOL_SOCKET.cast_unsigned())
        ),
        rule!(SYS_timerfd_create, "deadlines of the session"),
        rule!(SYS_timerfd_settime, "deadlines of the session"),
        rule!(SYS_read, "eventfds"),
        rule!(SYS_write, "eventfds"),
        rule!(SYS_eventfd2, "ends of threads"),
        rule!(SYS_epoll_create1, "a connection's event loop"),
        rule!(SYS_epoll_ctl, "a connection's event loop"),
        rule!(SYS_epoll_wait, "a connection's event loop"),
        rule!(SYS_epoll_pwait, "a connection's event loop"),
        rule!(SYS_poll, "waits with a time-out"),
        rule!(SYS_ppoll, "waits with a time-out"),
        rule!(SYS_fstat, "size of guest memory's file"),
        rule!(SYS_lseek, "size of guest memory's file"),
        rule!(
            SYS_fallocate,
            "zeroing what a guest gives back of the pool",
            Check::Is(1, (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE).cast_unsigned())
        ),
        rule!(SYS_dup, "copies of descriptors"),
        rule!(SYS_getpid, "identity in messages"),
        fcntl(libc::F_DUPFD_CLOEXEC),
        fcntl(libc::F_GETFD),
        fcntl(libc::F_SETFD),
        fcntl(libc::F_GETFL),
        fcntl(libc::F_SETFL),
        rule!(SYS_ioctl, "blocking mode of a socket", Check::Is(1, libc::FIONBIO as u32)),
    ]);
    rules
}
