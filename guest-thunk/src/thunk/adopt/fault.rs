//! Holds writers to a range by userfaultfd's write protection (userfaultfd(2)).
//!
//! Full userfaultfd, which serves the kernel's own faults too: a system call that writes to the range waits in the kernel and
//! goes on afterwards. One for user mode alone would let the call fail, and what it had read from a socket would be lost.
#![allow(unsafe_code, reason = "userfaultfd and its ioctls")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::signals::Blocked;

/// Numbers and layouts of linux/userfaultfd.h.
mod abi {
    pub const UFFD_API: u64 = 0xaa;
    /// Writes to protected pages are faults.
    pub const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    /// So are writes to pages that do not exist yet (Linux 6.4).
    pub const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
    pub const REGISTER_MODE_WP: u64 = 1 << 1;
    pub const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
    pub const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
    pub const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    pub const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    pub const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;

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

/// Who writes to the range waits as long as this lives; no signal is handled in this thread. Whoever has it must not
/// write to the range, and so neither allocate nor take a lock.
#[derive(Debug)]
pub struct Protected {
    // Dropped first: the last close lets the writers go on.
    _uffd: OwnedFd,
    _blocked: Blocked,
}

/// Full userfaultfd: by the device, which a udev rule may open to users, or by the system call, which takes
/// CAP_SYS_PTRACE or vm.unprivileged_userfaultfd.
fn open() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    if let Ok(device) = File::open("/dev/userfaultfd") {
        // SAFETY: no pointer.
        let made = unsafe { libc::ioctl(device.as_raw_fd(), abi::USERFAULTFD_IOC_NEW, flags) };
        if made >= 0 {
            // SAFETY: the ioctl has made a descriptor that nobody else owns.
            return Ok(unsafe { OwnedFd::from_raw_fd(made) });
        }
    }
    // SAFETY: no pointer.
    let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    match i32::try_from(made) {
        // SAFETY: the call has made a descriptor that nobody else owns.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn ioctl<T>(uffd: &OwnedFd, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: the argument is exclusive, and of the request's layout: this file's requests and structs belong together.
    match unsafe { libc::ioctl(uffd.as_raw_fd(), request, std::ptr::from_mut(argument)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn opened() -> io::Result<OwnedFd> {
    let uffd = open()?;
    let features = abi::FEATURE_PAGEFAULT_FLAG_WP | abi::FEATURE_WP_UNPOPULATED;
    let mut api = abi::Api { api: abi::UFFD_API, features, ioctls: 0 };
    ioctl(&uffd, abi::UFFDIO_API, &mut api)?;
    Ok(uffd)
}

/// Whether this process may do it, on this kernel.
pub fn is_available() -> bool {
    opened().is_ok()
}

impl Protected {
    /// Protects a range of whole pages of private anonymous memory.
    pub fn new(range: &Range<u64>) -> io::Result<Protected> {
        let uffd = opened()?;
        let (start, length) = (range.start, range.end.saturating_sub(range.start));
        let blocked = Blocked::new();
        let mut register = abi::Register { start, length, mode: abi::REGISTER_MODE_WP, ioctls: 0 };
        ioctl(&uffd, abi::UFFDIO_REGISTER, &mut register)?;
        let mut protect = abi::WriteProtect { start, length, mode: abi::WRITEPROTECT_MODE_WP };
        loop {
            match ioctl(&uffd, abi::UFFDIO_WRITEPROTECT, &mut protect) {
                // The mappings changed meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) => return Err(error),
                Ok(()) => return Ok(Protected { _uffd: uffd, _blocked: blocked }),
            }
        }
    }
}
