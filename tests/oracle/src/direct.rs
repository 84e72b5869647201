//! Questions asked by ioctl and mmap on `/dev/kfd`, through libc, so that the model's preload library can stand
//! under them as well as the real driver.
#![allow(unsafe_code)] // ioctl and mmap are what is tested here, down to bad pointers that no wrapper would pass

mod event;
mod process;

use std::ffi::CStr;
use std::io;

use zerocopy::{FromBytes, IntoBytes};

use crate::transcript::Transcript;

/// An open `/dev/kfd`.
pub struct Kfd {
    fd: i32,
}

impl Kfd {
    pub fn open() -> io::Result<Kfd> {
        const PATH: &CStr = c"/dev/kfd";
        // SAFETY: the path is a valid C string.
        let fd = unsafe { libc::open(PATH.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Kfd { fd }) }
    }

    /// Makes an ioctl with a pointer to `argument`.
    pub fn ioctl<T: FromBytes + IntoBytes>(&self, request: u32, argument: &mut T) -> Result<(), i32> {
        self.ioctl_raw(request, argument.as_mut_bytes().as_mut_ptr() as usize)
    }

    /// Makes an ioctl with any third argument.
    pub fn ioctl_raw(&self, request: u32, argument: usize) -> Result<(), i32> {
        // SAFETY: the request copies at most its own encoded size from and to `argument`; callers pass a structure of
        // at least that size, or an address that is not mapped, which the kernel answers with EFAULT.
        let result = unsafe { libc::ioctl(self.fd, request.into(), argument) };
        if result < 0 { Err(errno()) } else { Ok(()) }
    }

    /// Maps the file and says how that went; the mapping is kept.
    pub fn mmap(&self, length: usize, offset: u64) -> Result<*mut u64, i32> {
        // SAFETY: a new shared mapping at an address that the kernel chooses touches nothing that exists.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.fd,
                offset as i64,
            )
        };
        if address == libc::MAP_FAILED { Err(errno()) } else { Ok(address.cast()) }
    }
}

impl Drop for Kfd {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and not used after this.
        unsafe { libc::close(self.fd) };
    }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Asks everything.
pub fn run(transcript: &mut Transcript) -> anyhow::Result<()> {
    let kfd = Kfd::open().map_err(|error| anyhow::anyhow!("open /dev/kfd: {error}"))?;
    process::ask(&kfd, transcript);
    event::ask(&kfd, transcript);
    process::after_fork(&kfd, transcript);
    Ok(())
}
