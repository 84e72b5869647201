//! The one ioctl.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::error::KfdError;

/// An argument struct and the ioctl that takes it.
pub trait Argument: FromBytes + IntoBytes {
    /// The C name.
    const NAME: &'static str;
    /// The whole request number, which holds the size of this struct.
    const REQUEST: u32;
}

/// Ties argument structs to their ioctls, and proves that the sizes agree.
macro_rules! arguments {
    ($($type:ty = $name:literal, $request:expr;)*) => {
        $(
            impl $crate::call::Argument for $type {
                const NAME: &'static str = $name;
                const REQUEST: u32 = $request;
            }
            const _: () = assert!(kfd_abi::ioctl::request_size($request) == size_of::<$type>());
        )*
    };
}
pub(crate) use arguments;

/// Makes the ioctl that takes `argument`, again for as long as a signal interrupts it: the kernel writes what
/// it has done so far into the argument (`n_success`, the time left), so a repeated call goes on from there.
///
/// `describe` names the arguments for the error.
///
/// Where the argument holds addresses, the caller has filled them with those of memory that it holds borrowed or
/// owned for longer than this call, with the sizes that stand beside them.
pub fn ioctl<A: Argument>(
    fd: BorrowedFd<'_>,
    argument: &mut A,
    describe: impl FnOnce() -> String,
) -> Result<(), KfdError> {
    loop {
        match once(fd, argument) {
            Ok(()) => return Ok(()),
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(KfdError::new(A::NAME, describe(), errno)),
        }
    }
}

#[allow(unsafe_code)] // an ioctl cannot be made without
fn once<A: Argument>(fd: BorrowedFd<'_>, argument: &mut A) -> Result<(), Errno> {
    // SAFETY: the request number holds the struct's size (asserted beside each `Argument`), and both amdkfd
    // (kfd_ioctl) and DRM (drm_ioctl) copy no more than that many bytes in and out of `argument`, which is
    // exclusively borrowed and valid for every bit pattern. Addresses inside are the caller's duty, see above.
    let result =
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::c_ulong::from(A::REQUEST), std::ptr::from_mut(argument)) };
    Errno::result(result).map(drop)
}

/// Address of a slice that the kernel reads or fills during a call. Tied to nothing: the slice stays borrowed by
/// the caller until the call is made.
pub fn address<T>(slice: &mut [T]) -> u64 {
    slice.as_mut_ptr().expose_provenance() as u64
}
