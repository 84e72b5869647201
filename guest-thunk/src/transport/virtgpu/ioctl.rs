//! One ioctl on a DRM node.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;

/// Makes an ioctl, again as long as a signal interrupts it (the driver has then done nothing).
///
/// # Safety
/// `T` is the argument struct of `request`, and every pointer in it is valid for what the ioctl reads and writes there.
pub(super) unsafe fn ioctl<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> io::Result<()> {
    debug_assert_eq!(kfd_abi::ioctl::request_size(request), size_of::<T>());
    loop {
        // SAFETY: argument is exclusive and as large as the request says; the rest is the caller's promise.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), std::ptr::from_mut(argument)) };
        if result != -1 {
            return Ok(());
        }
        match Errno::last() {
            Errno::EINTR | Errno::EAGAIN => {}
            errno => return Err(errno.into()),
        }
    }
}
