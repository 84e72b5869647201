//! Addresses of the process: reservations without memory, where blobs are then mapped.
#![allow(unsafe_code, reason = "mmap, munmap and madvise")]

use std::io;
use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::OnceLock;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::thunk::adopt;

/// Bytes of a page.
pub fn page_size() -> u64 {
    static SIZE: OnceLock<u64> = OnceLock::new();
    *SIZE.get_or_init(|| {
        let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
        size.and_then(|size| u64::try_from(size).ok()).unwrap_or(4096)
    })
}

/// Reserved addresses of the process: inaccessible, without memory, nobody else's. Dropping gives them up, with
/// whatever is mapped there.
#[derive(Debug)]
pub struct Reservation {
    /// What was taken from the kernel.
    base: u64,
    length: u64,
    /// What is for use.
    start: u64,
    size: u64,
}

impl Reservation {
    /// Reserves `size` bytes at a multiple of `align`, with `guard` bytes behind them that stay inaccessible. All are
    /// multiples of the page size; `align` is a power of two. The addresses lie within `range` (first, last).
    pub fn new(size: u64, align: u64, guard: u64, range: (u64, u64)) -> io::Result<Self> {
        let slack = align.saturating_sub(page_size());
        let length = size.checked_add(guard).and_then(|sum| sum.checked_add(slack)).ok_or_else(too_large)?;
        let base = map(None, length)?;
        let start = base.checked_next_multiple_of(align).ok_or_else(too_large)?;
        let mut reservation = Reservation { base, length, start, size };
        let last = start.saturating_add(size.saturating_sub(1));
        if start < range.0 || last > range.1 {
            let message = format!("the kernel gave {start:#x}, GPUs reach {:#x} to {:#x}", range.0, range.1);
            return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, message));
        }
        reservation.trim(guard);
        Ok(reservation)
    }

    /// Reserves exactly these addresses, unless any of them is in use.
    pub fn at(start: u64, size: u64) -> io::Result<Self> {
        let base = map(Some(start), size)?;
        let reservation = Reservation { base, length: size, start: base, size };
        // Kernels before 4.17 take the address for a hint.
        if base != start {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{start:#x} is not free")));
        }
        Ok(reservation)
    }

    /// Gives back what the alignment made superfluous.
    fn trim(&mut self, guard: u64) {
        let end = self.start.saturating_add(self.size).saturating_add(guard);
        let (head, all) = (self.start.saturating_sub(self.base), self.base.saturating_add(self.length));
        if head > 0 && unmap(self.base, head).is_ok() {
            (self.base, self.length) = (self.start, self.length.saturating_sub(head));
        }
        let tail = all.saturating_sub(end);
        if tail > 0 && unmap(end, tail).is_ok() {
            self.length = self.length.saturating_sub(tail);
        }
    }

    /// First address for use.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Bytes for use.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Keeps what is mapped here out of forked children: they could hold the memory, and a copy of it would be
    /// another memory than the GPU's.
    pub fn keep_from_children(&self) {
        keep_from_children(self.start, self.size);
    }

    /// Makes ordinary private memory of it, zeroed.
    pub fn fill_with_private_memory(&self) -> io::Result<()> {
        self.fill(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)
    }

    /// Makes zeros of it that can only be read.
    pub fn fill_with_zeros_to_read(&self) -> io::Result<()> {
        self.fill(ProtFlags::PROT_READ)
    }

    fn fill(&self, protection: ProtFlags) -> io::Result<()> {
        let start = usize::try_from(self.start).ok().and_then(NonZero::new).ok_or_else(too_large)?;
        let size = usize::try_from(self.size).ok().and_then(NonZero::new).ok_or_else(too_large)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
        // SAFETY: the range is this reservation's, in which nothing is mapped yet.
        unsafe { mmap_anonymous(Some(start), size, protection, flags) }?;
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // An unmap of a range that is mapped only fails for lack of kernel memory; the addresses are lost then.
        let _ = unmap(self.base, self.length);
    }
}

/// Keeps a range of whole pages out of forked children, whatever is mapped there.
pub fn keep_from_children(start: u64, size: u64) {
    let Some(start) = pointer(start) else { return };
    let Ok(size) = usize::try_from(size) else { return };
    // SAFETY: DONTFORK changes nothing in this process.
    // A kernel that refuses leaves children with a mapping, which is no harm to this process.
    let _ = unsafe { madvise(start, size, MmapAdvise::MADV_DONTFORK) };
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, "the size is beyond the address space")
}

fn pointer(address: u64) -> Option<NonNull<libc::c_void>> {
    NonNull::new(std::ptr::without_provenance_mut(usize::try_from(address).ok()?))
}

/// Takes addresses from the kernel: these, if they are free, or any.
fn map(address: Option<u64>, length: u64) -> io::Result<u64> {
    let length = usize::try_from(length).ok().and_then(NonZero::new).ok_or_else(too_large)?;
    let mut flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
    if address.is_some() {
        flags |= MapFlags::MAP_FIXED_NOREPLACE;
    }
    let address = address.map(|address| usize::try_from(address).map_err(|_| too_large())).transpose()?;
    // SAFETY: without MAP_FIXED, or with MAP_FIXED_NOREPLACE, mmap takes only addresses that nothing uses.
    let place =
        unsafe { mmap_anonymous(address.and_then(NonZero::new), length, ProtFlags::PROT_NONE, flags) }?;
    let start = u64::try_from(place.as_ptr().addr()).map_err(|_| too_large())?;
    adopt::overtake(start..start.saturating_add(u64::try_from(length.get()).unwrap_or(u64::MAX)));
    Ok(start)
}

/// Gives up a part of a reservation.
fn unmap(address: u64, length: u64) -> io::Result<()> {
    let start = pointer(address).ok_or_else(too_large)?;
    let length = usize::try_from(length).map_err(|_| too_large())?;
    // SAFETY: both callers pass a range within the reservation that they own, which no Rust object lives in; who still
    // uses memory there has freed it through the API before.
    unsafe { munmap(start, length) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANYWHERE: (u64, u64) = (0, u64::MAX);

    /// Permissions of the mapping that holds an address, from /proc/self/maps.
    fn permissions(address: u64) -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().find_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let range = u64::from_str_radix(start, 16).unwrap()..u64::from_str_radix(end, 16).unwrap();
            range.contains(&address).then(|| rest[..4].to_owned())
        })
    }

    #[test]
    fn aligned_inaccessible_and_guarded() {
        let (page, align) = (page_size(), 2 << 20);
        let reservation = Reservation::new(3 * page, align, page, ANYWHERE).unwrap();
        assert_eq!(reservation.start() % align, 0);
        assert_eq!(permissions(reservation.start()).as_deref(), Some("---p"));
        assert_eq!(permissions(reservation.start() + 3 * page).as_deref(), Some("---p"), "the guard page");
        reservation.fill_with_private_memory().unwrap();
        assert_eq!(permissions(reservation.start()).as_deref(), Some("rw-p"));
        assert_eq!(permissions(reservation.start() + 3 * page).as_deref(), Some("---p"), "the guard page");
    }

    #[test]
    fn a_fixed_address_is_taken_only_if_free() {
        let page = page_size();
        let first = Reservation::new(4 * page, page, 0, ANYWHERE).unwrap();
        assert!(Reservation::at(first.start() + page, page).is_err(), "it is in use");
        let free = first.start();
        drop(first);
        let second = Reservation::at(free, page).unwrap();
        assert_eq!((second.start(), second.size()), (free, page));
    }

    #[test]
    fn out_of_the_gpus_reach() {
        assert!(Reservation::new(page_size(), page_size(), 0, (0, 0xffff)).is_err());
        assert!(Reservation::new(u64::MAX - 4095, page_size(), 0, ANYWHERE).is_err());
    }
}
