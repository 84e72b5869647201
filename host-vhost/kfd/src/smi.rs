//! System management events: a descriptor of the kernel's for each stream of lines.
//!
//! The descriptors get numbers that were reserved at the start, so that a filter of system calls can tell reads and writes of
//! them from those of any other file.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use kfd_abi::kfd::request;
use kfd_abi::smi::SmiEventsArgs;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use nix::unistd::{dup3, read, write};

use crate::call::{arguments, ioctl};
use crate::error::KfdError;
use crate::kfd::Kfd;

arguments! {
    SmiEventsArgs = "AMDKFD_IOC_SMI_EVENTS", request::SMI_EVENTS;
}

/// Places for streams, and one more descriptor that ends a wait for them.
#[derive(Debug)]
pub struct SmiPlaces {
    /// Each is a copy of `poke` while it holds no stream.
    places: Vec<OwnedFd>,
    poke: OwnedFd,
}

/// A place of [`SmiPlaces`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmiPlace(usize);

/// Moves a descriptor to a number, if that is free.
fn at(number: i32, descriptor: BorrowedFd<'_>) -> Result<OwnedFd, KfdError> {
    let failed = |errno| KfdError::new("fcntl", format!("F_DUPFD_CLOEXEC, {number}"), errno);
    let copy = fcntl(descriptor, FcntlArg::F_DUPFD_CLOEXEC(number)).map_err(failed)?;
    #[allow(unsafe_code)] // nix gives the number alone
    // SAFETY: the call above made the descriptor, and nobody else knows of it.
    let copy = unsafe { OwnedFd::from_raw_fd(copy) };
    match copy.as_raw_fd() == number {
        true => Ok(copy),
        false => Err(failed(Errno::EBUSY)),
    }
}

impl SmiPlaces {
    /// Reserves the numbers. The last one is that of the descriptor that ends waits, the others are places.
    ///
    /// # Errors
    /// A number is in use, or above what this process may have (`RLIMIT_NOFILE`).
    pub fn reserve(numbers: Range<i32>) -> Result<Self, KfdError> {
        let failed = |errno| KfdError::new("eventfd", "", errno);
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let poke = EventFd::from_value_and_flags(0, flags).map_err(failed)?;
        let mut places = numbers.map(|number| at(number, poke.as_fd())).collect::<Result<Vec<_>, _>>()?;
        let poke = places.pop().ok_or_else(|| failed(Errno::EINVAL))?;
        Ok(SmiPlaces { places, poke })
    }

    /// All places.
    pub fn all(&self) -> impl Iterator<Item = SmiPlace> + use<> {
        (0..self.places.len()).map(SmiPlace)
    }

    fn descriptor(&self, place: SmiPlace) -> Result<&OwnedFd, KfdError> {
        let none = || KfdError::new("AMDKFD_IOC_SMI_EVENTS", format!("{place:?}"), Errno::EBADF);
        self.places.get(place.0).ok_or_else(none)
    }

    /// Puts a descriptor into a place; what was there is closed.
    fn put(&self, descriptor: BorrowedFd<'_>, place: SmiPlace) -> Result<(), KfdError> {
        let number = self.descriptor(place)?.as_raw_fd();
        #[allow(unsafe_code)] // dup3 takes an owner of the number that it replaces
        // SAFETY: `places` owns the number for as long as this lives; it is not closed by way of this second owner, which is
        // forgotten below, and replacing what it names is what places are for.
        let mut owner = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
        let failed = |errno| KfdError::new("dup3", format!("to {number}"), errno);
        dup3(descriptor, &mut owner, OFlag::O_CLOEXEC).map_err(failed)
    }

    /// `AMDKFD_IOC_SMI_EVENTS`, with a mask of events ([`kfd_abi::smi::event_mask`]) enabled. `place` must hold no stream.
    pub fn open(&self, kfd: &Kfd, gpu_id: u32, mask: u64, place: SmiPlace) -> Result<(), KfdError> {
        let mut args = SmiEventsArgs { gpuid: gpu_id, anon_fd: 0 };
        ioctl(kfd.as_fd(), &mut args, || format!("gpu_id {gpu_id}"))?;
        let wrong = || KfdError::new("AMDKFD_IOC_SMI_EVENTS", format!("gpu_id {gpu_id}"), Errno::EBADF);
        let number = i32::try_from(args.anon_fd).map_err(|_| wrong())?;
        #[allow(unsafe_code)] // a descriptor that an ioctl made is a number
        // SAFETY: the kernel made the descriptor by this call, for this caller alone.
        let stream = unsafe { OwnedFd::from_raw_fd(number) };
        self.put(stream.as_fd(), place)?;
        let failed = |errno| KfdError::new("write", format!("event mask {mask:#x}"), errno);
        let written = write(self.descriptor(place)?, &mask.to_ne_bytes()).map_err(failed);
        match written {
            Ok(8) => Ok(()),
            other => {
                self.close(place)?;
                other.and(Err(failed(Errno::EIO)))
            }
        }
    }

    /// Closes the stream in a place.
    pub fn close(&self, place: SmiPlace) -> Result<(), KfdError> {
        self.put(self.poke.as_fd(), place)
    }

    /// Reads what a stream has; 0 bytes where that is nothing.
    pub fn read(&self, place: SmiPlace, buffer: &mut [u8]) -> Result<usize, KfdError> {
        match read(self.descriptor(place)?, buffer) {
            // The kernel says so; 0 would be the end of a file.
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(0),
            Ok(0) => Err(KfdError::new("read", format!("{place:?}"), Errno::EPIPE)),
            other => other.map_err(|errno| KfdError::new("read", format!("{place:?}"), errno)),
        }
    }

    /// Waits until one of the streams has something, another thread calls [`SmiPlaces::poke`], or the time is up; without a
    /// time for ever. After a poke all waits end at once, until [`SmiPlaces::calm`].
    pub fn wait(&self, streams: &[SmiPlace], timeout: Option<Duration>) -> Result<(), KfdError> {
        let mut polled = vec![PollFd::new(self.poke.as_fd(), PollFlags::POLLIN)];
        for place in streams {
            polled.push(PollFd::new(self.descriptor(*place)?.as_fd(), PollFlags::POLLIN));
        }
        match ppoll(&mut polled, timeout.map(TimeSpec::from_duration), None) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(KfdError::new("ppoll", format!("{} streams", streams.len()), errno)),
        }
    }

    /// Waits wait again after a [`SmiPlaces::poke`].
    pub fn calm(&self) {
        // There may have been none.
        let _ = read(&self.poke, &mut [0; 8]);
    }

    /// Ends the waits of all other threads.
    pub fn poke(&self) {
        // A count that is full ends waits too.
        let _ = write(&self.poke, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_were_asked_for_and_a_place_can_be_used_again() {
        let places = SmiPlaces::reserve(700..703).unwrap();
        let all: Vec<SmiPlace> = places.all().collect();
        assert_eq!(all.len(), 2);
        assert_eq!(places.descriptor(all[1]).unwrap().as_raw_fd(), 701);
        assert_eq!(SmiPlaces::reserve(702..703).unwrap_err().errno, Errno::EBUSY);
        let (reader, writer) = nix::unistd::pipe().unwrap();
        places.put(reader.as_fd(), all[1]).unwrap();
        write(&writer, b"3 1 \n").unwrap();
        places.wait(&all[1..], None).unwrap();
        let mut buffer = [0; 16];
        assert_eq!(places.read(all[1], &mut buffer).unwrap(), 5);
        places.close(all[1]).unwrap();
        drop(reader);
        assert_eq!(write(&writer, b"x"), Err(Errno::EPIPE), "no copy is left");
        drop(places);
        assert!(SmiPlaces::reserve(700..703).is_ok());
    }

    #[test]
    fn a_poke_ends_waits_until_they_are_calmed() {
        let places = SmiPlaces::reserve(710..712).unwrap();
        places.poke();
        places.wait(&[], None).unwrap();
        places.wait(&[], None).unwrap();
        places.calm();
        assert_eq!(read(&places.poke, &mut [0; 8]), Err(Errno::EAGAIN));
    }
}
