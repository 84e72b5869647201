//! Files of /proc that stay open from the first adoption on: neither a fork nor what gives memory back may fail since the
//! process, or the system, has no descriptor left.
//!
//! The numbers are not owned as other descriptors are. The application may close all that it does not know (closefrom(3)),
//! and have files of its own under these numbers, so each use makes sure which file it is. A child of fork inherits what
//! shows its parent, and closes it.
#![allow(unsafe_code, reason = "descriptors that somebody else may have closed")]

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, TryLockError};

use crate::transport::own;

/// The process's mappings.
pub static MAPS: Kept = Kept::new("/proc/self/maps");
/// Which of its pages are there.
pub static PAGES: Kept = Kept::new("/proc/self/pagemap");
/// The directory of its threads.
pub static TASKS: Kept = Kept::new("/proc/self/task");

/// A file that is kept open, or is to be.
pub struct Kept {
    path: &'static str,
    known: Mutex<Option<Known>>,
}

/// What was opened.
#[derive(Clone, Copy)]
pub struct Known {
    descriptor: RawFd,
    /// Device and inode: no other file has them for as long as this one is open.
    identity: (u64, u64),
    /// Whose it is: a child that no handler was called in has its parent's.
    process: u32,
}

impl Known {
    fn of(file: File) -> io::Result<Known> {
        let identity = identity(file.as_raw_fd())?;
        let descriptor = own::opened(OwnedFd::from(file)).into_raw_fd();
        Ok(Known { descriptor, identity, process: std::process::id() })
    }

    fn is_open(&self) -> bool {
        identity(self.descriptor).is_ok_and(|found| found == self.identity)
    }

    fn is_own(&self) -> bool {
        self.process == std::process::id() && self.is_open()
    }
}

fn identity(descriptor: RawFd) -> io::Result<(u64, u64)> {
    let mut found = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the result lives beyond the call; a descriptor that is not open is an error.
    if unsafe { libc::fstat(descriptor, found.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeros are valid, and so is what the C library wrote.
    let found = unsafe { found.assume_init() };
    Ok((found.st_dev, found.st_ino))
}

impl Kept {
    const fn new(path: &'static str) -> Kept {
        Kept { path, known: Mutex::new(None) }
    }

    /// None while another user has it.
    fn try_lock(&self) -> Option<MutexGuard<'_, Option<Known>>> {
        match self.known.try_lock() {
            Ok(known) => Some(known),
            Err(TryLockError::Poisoned(known)) => Some(known.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Keeps it open from now on.
    pub fn keep(&self) -> io::Result<()> {
        match self.try_lock() {
            // Whoever has it has seen that it is there.
            None => Ok(()),
            Some(mut known) => self.renew(&mut known),
        }
    }

    fn renew(&self, known: &mut Option<Known>) -> io::Result<()> {
        if !known.is_some_and(|it| it.is_own()) {
            *known = Some(Known::of(File::open(self.path)?)?);
        }
        Ok(())
    }

    /// For one user at a time; others, and those before anything was adopted, have it opened for themselves.
    pub fn open(&'static self) -> io::Result<Opened> {
        if let Some(mut known) = self.try_lock()
            && known.is_some()
        {
            self.renew(&mut known)?;
            return Ok(Opened::Kept(known));
        }
        File::open(self.path).map(Opened::Own)
    }

    /// In a child: it has its parent's. Only system calls.
    pub fn forget(&self) {
        if let Some(mut known) = self.try_lock()
            && let Some(known) = known.take()
            && known.is_open()
        {
            own::closing(known.descriptor);
            // SAFETY: it is the descriptor that was opened here, and nobody uses it in this process.
            unsafe { libc::close(known.descriptor) };
        }
    }
}

/// An open file. Whatever position a kept one has is another use's.
pub enum Opened {
    /// Nobody else has it meanwhile.
    Kept(KeptFile),
    /// Closed with this.
    Own(File),
}

/// Locked for as long as it is used.
type KeptFile = MutexGuard<'static, Option<Known>>;

impl Opened {
    /// That it is still what was opened: another thread may close all descriptors, and read something else under this
    /// number.
    pub fn check(&self) -> io::Result<()> {
        match self {
            Opened::Own(_) => Ok(()),
            Opened::Kept(known) if known.is_some_and(|it| it.is_open()) => Ok(()),
            Opened::Kept(_) => Err(io::Error::from_raw_os_error(libc::EBADF)),
        }
    }

    /// Its number.
    pub fn descriptor(&self) -> RawFd {
        match self {
            Opened::Kept(known) => known.as_ref().map_or(-1, |it| it.descriptor),
            Opened::Own(file) => file.as_raw_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;

    use super::*;

    #[test]
    fn what_the_application_closes_is_opened_anew_and_what_it_opens_there_is_left_alone() {
        static FILE: Kept = Kept::new("/proc/self/status");
        assert!(matches!(FILE.open().unwrap(), Opened::Own(_)), "nothing is kept before it is asked for");
        FILE.keep().unwrap();
        let first = FILE.open().unwrap();
        assert!(matches!(first, Opened::Kept(_)));
        assert!(matches!(FILE.open().unwrap(), Opened::Own(_)), "one user at a time");
        let number = first.descriptor();
        // SAFETY: no pointer.
        assert_eq!(unsafe { libc::fcntl(number, libc::F_GETFD) }, libc::FD_CLOEXEC);
        first.check().unwrap();
        let other = File::open("/proc/self/stat").unwrap();
        // SAFETY: no pointer; the number is replaced as an application may do it.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        assert_eq!(first.check().unwrap_err().raw_os_error(), Some(libc::EBADF));
        drop(first);
        let again = FILE.open().unwrap();
        assert!(again.descriptor() != number && matches!(again, Opened::Kept(_)));
        again.check().unwrap();
        let number_of_again = again.descriptor();
        drop(again);
        FILE.forget();
        assert!(matches!(FILE.open().unwrap(), Opened::Own(_)));
        // SAFETY: no pointer.
        assert_eq!(unsafe { libc::fcntl(number_of_again, libc::F_GETFD) }, -1, "closed");
        // SAFETY: the descriptor that was made above, which is not closed by what forgot it.
        let left = unsafe { File::from_raw_fd(number) };
        assert_eq!(identity(number).unwrap(), identity(other.as_raw_fd()).unwrap());
        drop(left);
    }
}
