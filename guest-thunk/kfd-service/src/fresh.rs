//! Host memory that the thunk allocates.
//!
//! AMD's thunk maps fresh private memory and then names it in ALLOC_MEMORY_OF_GPU as a user pointer at its own address. Such
//! memory, of which no page exists, nobody has used yet, so a blob is mapped over it: it is memory for both from birth,
//! without a copy. What the application owned before, the thunk gives another address on GPUs, or it has pages:
//! it is refused, and the runtime copies in stages (docs/limits.md).
#![allow(
    unsafe_code,
    reason = "madvise of memory that was mapped here, and a descriptor that is kept elsewhere"
)]

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use guest_thunk::thunk::adopt::maps::areas;
use guest_thunk::thunk::adopt::proc::{MAPS, PAGES};
use kfd_seam::Result;
use nix::errno::Errno;

/// Smallest page of x86-64.
const PAGE: u64 = 4096;

/// A page is there, or swapped (pagemap.rst of the kernel's documentation).
const POPULATED: u64 = 0b11 << 62;

/// Bytes of an entry of /proc/self/pagemap.
const ENTRY: usize = 8;

/// Entries that are read at a time.
const WINDOW: u64 = 4096;

/// Whether the range is private anonymous memory that can be read and written, without any page.
///
/// # Errors
/// `EFAULT` where it is not all mapped, or /proc cannot be read.
pub fn is_fresh(start: u64, size: u64) -> Result<bool> {
    let end = start.checked_add(size).ok_or(Errno::EFAULT)?;
    let areas = areas(&(start..end)).map_err(|_| Errno::EFAULT)?;
    let mut at = start;
    for area in &areas {
        if area.start > at {
            return Err(Errno::EFAULT);
        }
        if area.permissions != "rw-p" || area.file.inode != 0 || !area.name.is_empty() {
            return Ok(false);
        }
        at = area.end;
    }
    if at < end {
        return Err(Errno::EFAULT);
    }
    is_empty(start, end).map_err(|_| Errno::EFAULT)
}

fn is_empty(start: u64, end: u64) -> io::Result<bool> {
    let opened = PAGES.open()?;
    // SAFETY: it is open for as long as `opened` lives, or, closed by the program, another file of which check() tells. It is not closed
    // here.
    let pagemap = ManuallyDrop::new(unsafe { File::from_raw_fd(opened.descriptor()) });
    let (mut page, last) = (start / PAGE, end.div_ceil(PAGE));
    let mut bytes = vec![0; usize::try_from(WINDOW).unwrap_or(0).saturating_mul(ENTRY)];
    while page < last {
        let count = last.saturating_sub(page).min(WINDOW);
        let length = usize::try_from(count).unwrap_or(0).saturating_mul(ENTRY);
        let window = bytes.get_mut(..length).unwrap_or_default();
        pagemap.read_exact_at(window, page.saturating_mul(ENTRY as u64))?;
        let populated = window.chunks_exact(ENTRY).any(|entry| {
            entry.first_chunk::<ENTRY>().is_some_and(|entry| u64::from_ne_bytes(*entry) & POPULATED != 0)
        });
        if populated {
            return Ok(false);
        }
        page = page.saturating_add(count);
    }
    opened.check()?;
    Ok(true)
}

/// Keeps open what is read here, so that memory can be allocated when no descriptor is left.
///
/// # Errors
/// `EMFILE`, or no /proc.
pub fn prepare() -> io::Result<()> {
    MAPS.keep()?;
    PAGES.keep()
}

/// In a child of fork: it has its parent's.
pub fn forget() {
    MAPS.forget();
    PAGES.forget();
}

/// Keeps a range out of forked children: the thunk said so of what was there before.
pub fn keep_from_children(start: u64, size: u64) {
    let (Ok(start), Ok(size)) = (usize::try_from(start), usize::try_from(size)) else { return };
    // SAFETY: DONTFORK changes nothing in this process. A kernel that refuses leaves children with a mapping.
    let _ = unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(start), size, libc::MADV_DONTFORK) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_thunk::thunk::memory::address::Reservation;

    #[test]
    fn only_untouched_private_memory_is_fresh() {
        let reservation = Reservation::new(8 * PAGE, PAGE, 0, (0, u64::MAX)).unwrap();
        let start = reservation.start();
        assert_eq!(is_fresh(start, 8 * PAGE), Ok(false), "it cannot be accessed");
        reservation.fill_with_private_memory().unwrap();
        assert_eq!(is_fresh(start, 8 * PAGE), Ok(true));
        let page = std::ptr::with_exposed_provenance_mut::<u8>((start + 3 * PAGE) as usize);
        // SAFETY: the page lies in the reservation, which is writable and nobody else's.
        unsafe { page.write_volatile(0) };
        assert_eq!(is_fresh(start, 8 * PAGE), Ok(false), "a zero that was written is a page");
        assert_eq!(is_fresh(start, 3 * PAGE), Ok(true));
        drop(reservation);
    }

    #[test]
    fn what_is_not_mapped_is_a_fault() {
        assert_eq!(is_fresh(0, PAGE), Err(Errno::EFAULT));
        assert_eq!(is_fresh(u64::MAX - PAGE + 1, 2 * PAGE), Err(Errno::EFAULT));
    }
}
