//! One ioctl on a DRM node.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;

/// Makes an ioctl, again as long as a signal interrupts it (the driver has then done nothing).
///
/// # Safety
/// `T` is the argument struct of `request`, and every pointer in it is valid for what the ioctl reads and writes there.
pub(super) unsafe fn ioctl<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> io::Result<()> {
    loop {
        // SAFETY: the caller's promise.
        match unsafe { ioctl_once(fd, request, argument) } {
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            done => return done.map_err(io::Error::from),
        }
    }
}

/// Makes an ioctl once.
///
/// # Safety
/// As [`ioctl`].
pub(super) unsafe fn ioctl_once<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> Result<(), Errno> {
    debug_assert_eq!(kfd_abi::ioctl::request_size(request), size_of::<T>());
    // SAFETY: argument is exclusive and as large as the request says; the rest is the caller's promise.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), std::ptr::from_mut(argument)) };
    Errno::result(result).map(drop)
}
