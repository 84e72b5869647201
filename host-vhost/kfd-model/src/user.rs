//! Memory of the process that a GPU is to use.
//!
//! Unsafe code: `msync` takes a range by address.
#![allow(unsafe_code)]

use std::ptr;

use kfd_seam::Result;
use nix::errno::Errno;

use crate::arena::PAGE;

/// Checks that every page of a range is mapped (`amdgpu_ttm_tt_get_user_pages` faults them all in).
///
/// Costs a walk over the mappings and nothing for their pages, whatever the range's size. A mapping without write
/// permission passes, other than in the kernel; a write of the GPU then faults.
///
/// # Errors
/// `EFAULT` when a page is not mapped.
pub fn check(address: u64, size: u64) -> Result<()> {
    let start = address - address % PAGE;
    let end =
        address.checked_add(size).and_then(|end| end.checked_next_multiple_of(PAGE)).ok_or(Errno::EFAULT)?;
    let length = usize::try_from(end.saturating_sub(start)).map_err(|_| Errno::EFAULT)?;
    let start = usize::try_from(start).map_err(|_| Errno::EFAULT)?;
    // SAFETY: with MS_ASYNC alone the kernel only looks whether the range is mapped (since 2.6.19 it writes
    // nothing back then) and answers ENOMEM when it is not; it touches no memory, so any address is sound.
    match unsafe { nix::libc::msync(ptr::without_provenance_mut(start), length, nix::libc::MS_ASYNC) } {
        0 => Ok(()),
        _ => Err(Errno::EFAULT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_passes_and_holes_do_not() {
        let memory = vec![0u8; 3 * PAGE as usize];
        let address = memory.as_ptr() as u64;
        assert_eq!(check(address, memory.len() as u64), Ok(()));
        assert_eq!(check(PAGE, PAGE), Err(Errno::EFAULT));
        assert_eq!(check(address, 1 << 46), Err(Errno::EFAULT));
        assert_eq!(check(u64::MAX - 10, 4), Err(Errno::EFAULT));
        assert_eq!(check(u64::MAX - 10, 40), Err(Errno::EFAULT));
        assert_eq!(check(1 << 63, PAGE), Err(Errno::EFAULT));
    }
}
