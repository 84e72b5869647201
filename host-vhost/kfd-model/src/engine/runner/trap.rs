//! Doorbells that trap, so that nobody has to look at them while they are still.
//!
//! The pages of doorbells that the process has mapped are registered with a userfaultfd for write protection, for faults of
//! user mode only, which no process needs a privilege for. [`Trap::arm`] protects them; the next store to one waits
//! until the trap's thread has taken the protection away from all of them, and then is made like any other. So a store is
//! either in memory when `arm` returns, or the thread calls [`Heard`] for it.
//!
//! Where userfaultfd is refused (containers, kernels before 5.19) doorbells are looked at again and again instead. A map that
//! the trap does not know, such as one that was moved by `mremap`, is the reason to look from time to time even so.
#![allow(unsafe_code, reason = "userfaultfd and its ioctls")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use nix::libc;

use super::{lock, spawn};

/// Numbers and layouts of linux/userfaultfd.h.
mod abi {
    use nix::libc;

    pub const USER_MODE_ONLY: libc::c_int = 1;
    pub const UFFD_API: u64 = 0xaa;
    /// Write protection of shared memory, also of pages that are not there.
    pub const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
    pub const REGISTER_MODE_WP: u64 = 1 << 1;
    pub const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
    pub const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    pub const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    pub const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
    /// Bytes of `struct uffd_msg`.
    pub const MESSAGE: usize = 32;

    #[derive(Default)]
    #[repr(C)]
    pub struct Api {
        pub api: u64,
        pub features: u64,
        pub ioctls: u64,
    }

    #[derive(Default)]
    #[repr(C)]
    pub struct Register {
        pub start: u64,
        pub length: u64,
        pub mode: u64,
        pub ioctls: u64,
    }

    #[derive(Default)]
    #[repr(C)]
    pub struct WriteProtect {
        pub start: u64,
        pub length: u64,
        pub mode: u64,
    }
}

/// A userfaultfd for faults of user mode.
#[derive(Debug)]
struct Faults(OwnedFd);

impl Faults {
    fn new() -> io::Result<Self> {
        // SAFETY: no pointer.
        let made = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | abi::USER_MODE_ONLY) };
        let faults = match i32::try_from(made) {
            // SAFETY: the call has made a descriptor that nobody else owns.
            Ok(fd) if fd >= 0 => Self(unsafe { OwnedFd::from_raw_fd(fd) }),
            _ => return Err(io::Error::last_os_error()),
        };
        let features = abi::FEATURE_WP_HUGETLBFS_SHMEM;
        faults.ioctl(abi::UFFDIO_API, &mut abi::Api { api: abi::UFFD_API, features, ioctls: 0 })?;
        Ok(faults)
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: the argument is exclusive and of the request's layout: this file's requests and structs belong together.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), request, std::ptr::from_mut(argument)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn register(&self, Range { start, length, .. }: Range) -> io::Result<()> {
        let mode = abi::REGISTER_MODE_WP;
        self.ioctl(abi::UFFDIO_REGISTER, &mut abi::Register { start, length, mode, ioctls: 0 })
    }

    /// Protects a range, or takes the protection away and has those try again who wait.
    fn protect(&self, Range { start, length, .. }: Range, on: bool) -> io::Result<()> {
        let mode = if on { abi::WRITEPROTECT_MODE_WP } else { 0 };
        loop {
            let mut argument = abi::WriteProtect { start, length, mode };
            match self.ioctl(abi::UFFDIO_WRITEPROTECT, &mut argument) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
        }
    }

    /// Waits until somebody waits at a page.
    fn wait(&self) -> io::Result<()> {
        let mut message = [0u8; abi::MESSAGE];
        match nix::unistd::read(&self.0, &mut message) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// What is to happen when a store has been let through.
pub(super) type Heard = Box<dyn Fn() + Send>;

/// Mapped doorbells of the process.
#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    length: u64,
    armed: bool,
}

/// The trap of a process.
#[derive(Debug, Default)]
pub(super) struct Trap {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    faults: Option<Arc<Faults>>,
    ranges: Vec<Range>,
    /// There are doorbells that do not trap.
    refused: bool,
}

impl State {
    fn disarm(&mut self) {
        let Some(faults) = &self.faults else { return };
        // One that is gone needs nothing, and is forgotten.
        self.ranges
            .retain_mut(|range| !core::mem::take(&mut range.armed) || faults.protect(*range, false).is_ok());
    }
}

impl Trap {
    /// The process has mapped doorbells. `heard` is called, by a thread of the trap, when a store to any has trapped: that of
    /// the first call counts.
    pub(super) fn add(self: &Arc<Self>, start: u64, length: u64, heard: Heard) {
        let mut state = lock(&self.state);
        let range = Range { start, length, armed: false };
        let made = match &state.faults {
            Some(faults) => Ok(Arc::clone(faults)),
            None if state.refused => return,
            None => self.start(heard),
        };
        let registered = made.and_then(|faults| {
            state.faults = Some(Arc::clone(&faults));
            faults.register(range)
        });
        match registered {
            Ok(()) => {
                let end = start.saturating_add(length);
                state.ranges.retain(|old| old.start >= end || old.start.saturating_add(old.length) <= start);
                state.ranges.push(range);
            }
            Err(_) => {
                state.disarm();
                state.refused = true;
            }
        }
    }

    fn start(self: &Arc<Self>, heard: Heard) -> io::Result<Arc<Faults>> {
        let faults = Arc::new(Faults::new()?);
        let (waits, trap) = (Arc::clone(&faults), Arc::downgrade(self));
        // It waits as long as the process lives, which keeps no process from ending.
        spawn("kfd-trap".to_owned(), move || {
            while waits.wait().is_ok() {
                let Some(trap) = trap.upgrade() else { return };
                trap.disarm();
                heard();
            }
        })?;
        Ok(faults)
    }

    /// From here on every store to a doorbell is heard of. False where that cannot be had.
    pub(super) fn arm(&self) -> bool {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let Some(faults) = state.faults.as_ref().filter(|_| !state.refused) else { return false };
        state.ranges.retain_mut(|range| {
            range.armed = range.armed || faults.protect(*range, true).is_ok();
            range.armed
        });
        !state.ranges.is_empty()
    }

    /// Doorbells are like any other memory.
    pub(super) fn disarm(&self) {
        lock(&self.state).disarm();
    }

    /// This process may have it.
    #[cfg(test)]
    pub(super) fn is_available() -> bool {
        Faults::new().is_ok()
    }
}

#[cfg(test)]
mod tests;
