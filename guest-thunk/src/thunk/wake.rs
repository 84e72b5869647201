//! What wakes a thread of this library that polls.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::transport::own::Kept;

/// An eventfd. Unlike a pipe it never raises SIGPIPE and has no end that a child of fork could keep open.
#[derive(Debug)]
pub struct Wake(Kept);

impl Wake {
    /// One that nobody has called.
    pub fn new() -> io::Result<Wake> {
        let made = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Wake(Kept::new(made.into())))
    }

    /// It can be read from now on.
    pub fn call(&self) {
        // It only refuses a sum beyond 64 bits, and can be read then.
        let _ = nix::unistd::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes all calls.
    ///
    /// # Errors
    /// The program has closed it: it would be readable for ever.
    pub fn take(&self) -> io::Result<()> {
        match nix::unistd::read(&self.0, &mut [0; size_of::<u64>()]) {
            Ok(_) | Err(Errno::EAGAIN | Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    #[test]
    fn it_can_be_read_from_a_call_until_all_are_taken() {
        let wake = Wake::new().unwrap();
        let readable = || {
            let mut polled = [PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
            poll(&mut polled, PollTimeout::ZERO).unwrap() == 1
        };
        assert!(!readable());
        wake.take().unwrap();
        (0..3).for_each(|_| wake.call());
        assert!(readable());
        wake.take().unwrap();
        assert!(!readable());
    }
}
