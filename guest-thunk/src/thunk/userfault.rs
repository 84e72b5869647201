//! userfaultfd(2), as far as this library uses it.
#![allow(unsafe_code, reason = "userfaultfd and its ioctls")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::transport::own;

/// Numbers and layouts of linux/userfaultfd.h.
mod abi {
    pub const UFFD_API: u64 = 0xaa;
    pub const USER_MODE_ONLY: libc::c_int = 1;
    pub const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
    pub const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
    pub const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    pub const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    pub const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
    pub const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
    pub const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
    pub const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
    pub const EVENT_PAGEFAULT: u8 = 0x12;
    pub const EVENT_REMAP: u8 = 0x14;
    /// Bytes of `struct uffd_msg`, whose first is the event.
    pub const MESSAGE: usize = 32;
    /// Where in it the address of a fault is (`arg.pagefault.address`), in bytes.
    pub const ADDRESS: usize = 16;
    /// Where in it a move has its addresses and its length (`arg.remap`), in bytes.
    pub const REMAP: usize = 8;

    #[repr(C)]
    pub struct Api {
        pub api: u64,
        pub features: u64,
        pub ioctls: u64,
    }

    #[repr(C)]
    pub struct Register {
        pub start: u64,
        pub length: u64,
        pub mode: u64,
        pub ioctls: u64,
    }

    #[repr(C)]
    pub struct Range {
        pub start: u64,
        pub length: u64,
    }

    #[repr(C)]
    pub struct WriteProtect {
        pub start: u64,
        pub length: u64,
        pub mode: u64,
    }

    #[repr(C)]
    pub struct Copy {
        pub to: u64,
        pub from: u64,
        pub length: u64,
        pub mode: u64,
        pub copied: i64,
    }

    // The size of each argument is part of its request's number (_IOC_SIZE of asm-generic/ioctl.h).
    const fn size_of_argument(request: libc::c_ulong) -> usize {
        (request >> 16 & 0x3fff) as usize
    }
    const _: () = assert!(size_of::<Api>() == size_of_argument(UFFDIO_API));
    const _: () = assert!(size_of::<Register>() == size_of_argument(UFFDIO_REGISTER));
    const _: () = assert!(size_of::<Range>() == size_of_argument(UFFDIO_WAKE));
    const _: () = assert!(size_of::<Range>() == size_of_argument(UFFDIO_UNREGISTER));
    const _: () = assert!(size_of::<Copy>() == size_of_argument(UFFDIO_COPY));
    const _: () = assert!(size_of::<WriteProtect>() == size_of_argument(UFFDIO_WRITEPROTECT));
}

/// Writes to protected pages are faults (`UFFD_FEATURE_PAGEFAULT_FLAG_WP`).
pub const WRITE_PROTECTION: u64 = 1 << 0;
/// Pages that move are told of (`UFFD_FEATURE_EVENT_REMAP`).
pub const MOVES: u64 = 1 << 2;
/// Writes to pages that do not exist yet are faults as well (`UFFD_FEATURE_WP_UNPOPULATED`, Linux 6.4).
pub const UNPOPULATED: u64 = 1 << 13;

/// Which faults of a range wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Mode {
    /// Accesses to pages that do not exist (`UFFDIO_REGISTER_MODE_MISSING`).
    Missing = 1 << 0,
    /// Writes to protected pages (`UFFDIO_REGISTER_MODE_WP`).
    Protected = 1 << 1,
}

/// What it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody waits at a page.
    Fault,
    /// Pages were moved.
    Moved {
        /// From this address.
        from: u64,
        /// To this one.
        to: u64,
        /// Bytes.
        length: u64,
    },
    /// Something else.
    Other,
}

/// A userfaultfd. Its ranges are registered no more when it is dropped, and who waits goes on.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl Userfault {
    /// One that serves the kernel's own faults too: by the device, which a udev rule may open to users, or by the system
    /// call, which takes CAP_SYS_PTRACE or vm.unprivileged_userfaultfd.
    pub fn full(features: u64) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        if let Ok(device) = File::open("/dev/userfaultfd") {
            // SAFETY: no pointer.
            let made = unsafe { libc::ioctl(device.as_raw_fd(), abi::USERFAULTFD_IOC_NEW, flags) };
            if made >= 0 {
                // SAFETY: the ioctl has made a descriptor that nobody else owns.
                return Userfault(own::opened(unsafe { OwnedFd::from_raw_fd(made) })).begin(features);
            }
        }
        Self::call(flags)?.begin(features)
    }

    /// One for faults of user mode alone, for which a process needs no privilege.
    pub fn of_user_mode(features: u64) -> io::Result<Self> {
        Self::call(libc::O_CLOEXEC | libc::O_NONBLOCK | abi::USER_MODE_ONLY)?.begin(features)
    }

    fn call(flags: libc::c_int) -> io::Result<Self> {
        // SAFETY: no pointer.
        let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        match i32::try_from(made) {
            // SAFETY: the call has made a descriptor that nobody else owns.
            Ok(fd) if fd >= 0 => Ok(Userfault(own::opened(unsafe { OwnedFd::from_raw_fd(fd) }))),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// An error where the kernel lacks a feature.
    fn begin(self, features: u64) -> io::Result<Self> {
        self.ioctl(abi::UFFDIO_API, &mut abi::Api { api: abi::UFFD_API, features, ioctls: 0 })?;
        Ok(self)
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: the argument is exclusive, and of the request's size: this file's requests and structs belong together.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), request, std::ptr::from_mut(argument)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Faults of this kind in a range of whole pages of private anonymous memory wait from now on.
    pub fn register(&self, start: u64, length: u64, mode: Mode) -> io::Result<()> {
        let mut register = abi::Register { start, length, mode: mode as u64, ioctls: 0 };
        self.ioctl(abi::UFFDIO_REGISTER, &mut register)
    }

    /// Nobody waits in the range any more.
    pub fn unregister(&self, start: u64, length: u64) -> io::Result<()> {
        self.ioctl(abi::UFFDIO_UNREGISTER, &mut abi::Range { start, length })
    }

    /// Writes to the range, which is registered, are faults from now on.
    pub fn protect(&self, start: u64, length: u64) -> io::Result<()> {
        let mut protect = abi::WriteProtect { start, length, mode: abi::WRITEPROTECT_MODE_WP };
        loop {
            match self.ioctl(abi::UFFDIO_WRITEPROTECT, &mut protect) {
                // The mappings changed meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                other => return other,
            }
        }
    }

    /// Those who wait there try again.
    pub fn wake(&self, start: u64, length: u64) -> io::Result<()> {
        self.ioctl(abi::UFFDIO_WAKE, &mut abi::Range { start, length })
    }

    /// Whether all of a range of whole pages is one mapping that is registered. `nowhere` are as many bytes of addresses that
    /// cannot be read: it is asked by a copy from there, which the kernel refuses with ENOENT where nothing is registered
    /// and with EFAULT elsewhere.
    ///
    /// # Errors
    /// `WouldBlock` as long as a move has not been read: whoever reads what this says must do that first. Any other answer, such
    /// as EINVAL for a range that is none.
    pub fn is_registered(&self, start: u64, length: u64, nowhere: u64) -> io::Result<bool> {
        let mut copy = abi::Copy { to: start, from: nowhere, length, mode: 0, copied: 0 };
        let error = match self.ioctl(abi::UFFDIO_COPY, &mut copy) {
            Ok(()) => return Err(io::Error::other("UFFDIO_COPY has copied what cannot be read")),
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::ENOENT) => Ok(false),
            Some(libc::EFAULT) => Ok(true),
            _ => Err(error),
        }
    }

    /// All that it says now.
    pub fn events(&self) -> Vec<Event> {
        std::iter::from_fn(|| self.next()).collect()
    }

    /// The addresses of all faults that it tells of now. What else it says is left out.
    pub fn addresses(&self) -> Vec<u64> {
        let faults = std::iter::from_fn(|| self.message()).filter(is_fault);
        faults
            .filter_map(|message| message.get(abi::ADDRESS..)?.first_chunk().copied())
            .map(u64::from_ne_bytes)
            .collect()
    }

    fn next(&self) -> Option<Event> {
        let message = self.message()?;
        let words = message.get(abi::REMAP..)?.as_chunks::<8>().0;
        Some(match (&message, words) {
            (message, _) if is_fault(message) => Event::Fault,
            ([abi::EVENT_REMAP, ..], [from, to, length]) => {
                let [from, to, length] = [from, to, length].map(|word| u64::from_ne_bytes(*word));
                Event::Moved { from, to, length }
            }
            _ => Event::Other,
        })
    }

    fn message(&self) -> Option<[u8; abi::MESSAGE]> {
        let mut message = [0u8; abi::MESSAGE];
        let read = nix::unistd::read(&self.0, &mut message).ok()?;
        (read == abi::MESSAGE).then_some(message)
    }
}

fn is_fault(message: &[u8; abi::MESSAGE]) -> bool {
    let [event, ..] = message;
    *event == abi::EVENT_PAGEFAULT
}

impl Drop for Userfault {
    fn drop(&mut self) {
        own::closing(self.0.as_raw_fd());
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
