//! Descriptors that a transport holds open for the process that it is in, which knows nothing of them.
//!
//! A library that stands before libc's `close` can keep the process from closing them: each passes through its hands here.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
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

/// A descriptor of this library's, looked after from when it was opened until it is closed.
#[derive(Debug)]
pub struct Kept(OwnedFd);

impl Kept {
    /// Keeps one that was opened.
    pub fn new(descriptor: OwnedFd) -> Kept {
        Kept(opened(descriptor))
    }

    /// Closes it in a forked child, where the owner is never dropped. Only async-signal-safe calls.
    pub fn abandon(&self) {
        let raw = self.0.as_raw_fd();
        closing(raw);
        // Nothing can be done about a failure.
        let _ = nix::unistd::close(raw);
    }
}

impl AsFd for Kept {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Kept {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        closing(self.0.as_raw_fd());
    }
}
