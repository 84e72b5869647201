//! Descriptors that a transport holds open for the process that it is in, which knows nothing of them.
//!
//! A library that stands before libc's `close` can keep the process from closing them: each passes through its hands here.

use std::os::fd::{OwnedFd, RawFd};
use std::sync::OnceLock;

/// Who looks after the descriptors of this process.
#[derive(Clone, Copy, Debug)]
pub struct Keeper {
    /// Is given a descriptor that was opened, and answers with the one to use: that one, or a copy with another number.
    pub opened: fn(OwnedFd) -> OwnedFd,
    /// Is told of one that is about to be closed. It may be called in a child of fork, and takes no lock.
    pub closing: fn(RawFd),
}

static KEEPER: OnceLock<Keeper> = OnceLock::new();

/// Has `keeper` look after all descriptors from now on. The first one stays.
pub fn keep_by(keeper: Keeper) {
    // Asked for again by the service of a forked child, with the same functions.
    let _ = KEEPER.set(keeper);
}

/// The descriptor to use for one that was opened.
pub fn opened(descriptor: OwnedFd) -> OwnedFd {
    match KEEPER.get() {
        Some(keeper) => (keeper.opened)(descriptor),
        None => descriptor,
    }
}

/// One that came from [`opened`] is about to be closed.
pub fn closing(fd: RawFd) {
    if let Some(keeper) = KEEPER.get() {
        (keeper.closing)(fd);
    }
}
