//! The guest's memory: a sparse memfd, mapped here and in the device, and which of its pages are free.
#![allow(unsafe_code)] // mmap and madvise

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vhost::VhostUserMemoryRegionInfo;
use virtio_kfd_protocol::GuestVa;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::extents::Extents;
use super::{PAGE, system};
use crate::transport::{Result, TransportError};

/// Where a PC's memory below the hole for devices ends; the rest begins at 4 GiB. The device thus sees two regions
/// with a hole between, as from QEMU.
const LOW_END: u64 = 2 << 30;
const HIGH_START: u64 = 4 << 30;

/// A run of guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhysicalRun {
    /// Guest-physical address, a multiple of the page size.
    pub address: u64,
    /// Bytes, a multiple of the page size.
    pub length: u64,
}

/// Pages that were taken from the guest's memory. They are zero, and go back when this is dropped.
pub struct Pages {
    ram: Arc<Ram>,
    runs: Vec<PhysicalRun>,
    first: u64,
    reserved: u64,
    area: usize,
}

/// The guest's memory.
pub struct Ram {
    file: Arc<File>,
    memory: GuestMemoryMmap,
    low: u64,
    free: Mutex<Extents>,
    scatter: bool,
    /// Set when the VM ends: the device may still look at the queues, which lie in pages that go back.
    ending: AtomicBool,
}

impl Ram {
    /// Memory of `size` bytes, none of it in use yet. With `scatter`, each page that is taken lies apart from the others.
    pub(super) fn new(size: u64, scatter: bool) -> Result<Arc<Ram>> {
        let size = size.next_multiple_of(PAGE).max(PAGE);
        let failed = |call, error| system(call, format!("guest memory of {size} bytes"), error);
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let memfd: OwnedFd = memfd_create(c"virtio-kfd-loopback-ram", flags)
            .map_err(|errno| failed("memfd_create", errno.into()))?;
        let file = File::from(memfd);
        file.set_len(size).map_err(|error| failed("ftruncate", error))?;
        // Whoever else is given the file must not take memory from under those that have it mapped.
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(|errno| failed("F_ADD_SEALS", errno.into()))?;
        let file = Arc::new(file);
        let low = size.min(LOW_END);
        let high = size.saturating_sub(low);
        let range = |at: u64, offset: u64, length: u64| {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            (GuestAddress(at), length, Some(FileOffset::from_arc(Arc::clone(&file), offset)))
        };
        let mut ranges = vec![range(0, 0, low)];
        let mut free = Extents::default();
        free.add(0, low / PAGE);
        if high > 0 {
            ranges.push(range(HIGH_START, low, high));
            free.add(low / PAGE, high / PAGE);
        }
        let memory = GuestMemoryMmap::from_ranges_with_files(ranges)
            .map_err(|error| failed("mmap", io::Error::other(error.to_string())))?;
        for region in memory.iter() {
            let length = usize::try_from(region.len()).unwrap_or(usize::MAX);
            // SAFETY: the range is the region's own mapping. A forked child then does not have it, so that it can
            // neither see nor disturb the parent's VM.
            let result = unsafe { libc::madvise(region.as_ptr().cast(), length, libc::MADV_DONTFORK) };
            if result != 0 {
                return Err(failed("madvise(MADV_DONTFORK)", io::Error::last_os_error()));
            }
        }
        Ok(Arc::new(Ram {
            file,
            memory,
            low,
            free: Mutex::new(free),
            scatter,
            ending: AtomicBool::new(false),
        }))
    }

    /// From now on no page is given back: all of the memory goes soon.
    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
    }

    /// Takes zeroed pages.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Result<Pages> {
        self.take_as(bytes, self.scatter)
    }

    /// Takes zeroed pages that follow one another.
    pub fn take_adjacent(self: &Arc<Self>, bytes: u64) -> Result<Pages> {
        self.take_as(bytes, false)
    }

    fn take_as(self: &Arc<Self>, bytes: u64, scatter: bool) -> Result<Pages> {
        let pages = bytes.div_ceil(PAGE);
        // Every second page of the extent, so that no two are neighbours.
        let (stride, reserved) = if scatter { (2, pages.saturating_mul(2)) } else { (1, pages) };
        let taken = self.free.lock().unwrap_or_else(PoisonError::into_inner).take(reserved);
        let (first, area) = taken.ok_or_else(|| {
            let error = io::Error::from_raw_os_error(libc::ENOMEM);
            system("allocation of guest pages", format!("{pages} pages"), error)
        })?;
        let runs = if scatter {
            let mut order: Vec<u64> = (0..pages).map(|page| first.saturating_add(page * stride)).collect();
            shuffle(&mut order);
            order.into_iter().map(|page| PhysicalRun { address: self.physical(page), length: PAGE }).collect()
        } else {
            vec![PhysicalRun { address: self.physical(first), length: pages.saturating_mul(PAGE) }]
        };
        Ok(Pages { ram: Arc::clone(self), runs, first, reserved, area })
    }

    /// Writes at a guest-physical address.
    pub fn write(&self, bytes: &[u8], address: u64) -> Result<()> {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(|error| access("write", address, &error))
    }

    /// Reads at a guest-physical address.
    pub fn read(&self, bytes: &mut [u8], address: u64) -> Result<()> {
        self.memory.read_slice(bytes, GuestAddress(address)).map_err(|error| access("read", address, &error))
    }

    /// The memory, for atomic access.
    pub(super) fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// The file that it lies in.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// The regions as the device is told of them.
    pub(super) fn regions(&self) -> Result<Vec<VhostUserMemoryRegionInfo>> {
        self.memory
            .iter()
            .map(|region| {
                VhostUserMemoryRegionInfo::from_guest_region(region)
                    .map_err(|error| TransportError::NoDevice(format!("guest memory region: {error}")))
            })
            .collect()
    }

    /// The address in this process, as vhost-user names ring addresses.
    pub(super) fn user_address(&self, address: u64) -> Result<u64> {
        self.memory
            .get_host_address(GuestAddress(address))
            .map(|pointer| pointer.addr() as u64)
            .map_err(|error| access("translation", address, &error))
    }

    fn physical(&self, page: u64) -> u64 {
        let offset = page.saturating_mul(PAGE);
        if offset < self.low { offset } else { offset.saturating_sub(self.low).saturating_add(HIGH_START) }
    }

    fn file_offset(&self, physical: u64) -> u64 {
        if physical < self.low {
            physical
        } else {
            physical.saturating_sub(HIGH_START).saturating_add(self.low)
        }
    }
}

fn access(what: &'static str, address: u64, error: &dyn std::error::Error) -> TransportError {
    system(what, format!("guest-physical address {address:#x}"), io::Error::other(error.to_string()))
}

/// A fixed order that has no order: a linear congruential sequence chooses what to swap.
fn shuffle(items: &mut [u64]) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for end in (1..items.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let other = (state >> 33) as usize % end.saturating_add(1);
        items.swap(end, other);
    }
}

impl Pages {
    /// The memory in order.
    pub fn runs(&self) -> &[PhysicalRun] {
        &self.runs
    }

    /// Guest-physical address of the first byte.
    pub fn address(&self) -> u64 {
        self.runs.first().map_or(0, |run| run.address)
    }

    /// Writes from the first byte on, across runs.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        for run in &self.runs {
            let length = usize::try_from(run.length).unwrap_or(usize::MAX).min(rest.len());
            let (now, then) = rest.split_at_checked(length).unwrap_or((rest, &[]));
            self.ram.write(now, run.address)?;
            rest = then;
        }
        Ok(())
    }

    /// Maps the first `length` bytes at `address` of this process, over whatever is there.
    pub(super) fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()> {
        map_runs(self.ram.file.as_fd(), self.places(), address, length, protection)
    }

    /// Where in the file of the memory its runs lie: offset and bytes of each, in order.
    pub(super) fn places(&self) -> impl Iterator<Item = (u64, u64)> {
        self.runs.iter().map(|run| (self.ram.file_offset(run.address), run.length))
    }
}

/// Maps the first `length` bytes of what lies at these places of the file of a guest's memory at `address` of this process, over
/// whatever is there.
pub(super) fn map_runs(
    file: BorrowedFd<'_>,
    places: impl Iterator<Item = (u64, u64)>,
    address: GuestVa,
    length: u64,
    protection: i32,
) -> Result<()> {
    let mut at = address.0;
    let mut left = length;
    for (offset, bytes) in places {
        if left == 0 {
            break;
        }
        let piece = bytes.min(left);
        map_file(file, offset, GuestVa(at), piece, protection)?;
        at = at.saturating_add(piece);
        left = left.saturating_sub(piece);
    }
    match left {
        0 => Ok(()),
        _ => Err(system(
            "mmap",
            format!("{length} bytes of a blob that ends {left} bytes earlier"),
            io::Error::from_raw_os_error(libc::EINVAL),
        )),
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.ram.ending.load(Ordering::Relaxed) {
            return;
        }
        let offset = |page: u64| libc::off_t::try_from(page.saturating_mul(PAGE)).unwrap_or(libc::off_t::MAX);
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        // Frees the memory and makes it zero for the next one. Where it fails, the pages are not used again.
        if fallocate(&*self.ram.file, hole, offset(self.first), offset(self.reserved)).is_ok() {
            let mut free = self.ram.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.give(self.first, self.reserved, self.area);
        }
    }
}

/// Maps a piece of a file at an address of this process, over whatever is there.
pub(super) fn map_file(
    file: BorrowedFd<'_>,
    offset: u64,
    address: GuestVa,
    length: u64,
    protection: i32,
) -> Result<()> {
    let detail = || format!("{length} bytes at {:#x}, file offset {offset:#x}", address.0);
    let invalid = |_| system("mmap", detail(), io::Error::from_raw_os_error(libc::EINVAL));
    let at = usize::try_from(address.0).map_err(invalid)?;
    let bytes = usize::try_from(length).map_err(invalid)?;
    let offset = libc::off_t::try_from(offset).map_err(invalid)?;
    // SAFETY: the caller has reserved the range, so that nothing is mapped over that others use. What is mapped is
    // shared memory, which nobody here refers to by a Rust reference.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::with_exposed_provenance_mut(at),
            bytes,
            protection,
            libc::MAP_SHARED | libc::MAP_FIXED,
            file.as_raw_fd(),
            offset,
        )
    };
    match mapped {
        libc::MAP_FAILED => Err(system("mmap", detail(), io::Error::last_os_error())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zero_again_and_lie_on_both_sides_of_the_hole() {
        let ram = Ram::new(LOW_END + (1 << 30), false).unwrap();
        let low = ram.take(LOW_END).unwrap();
        let high = ram.take(PAGE).unwrap();
        assert_eq!((low.address(), high.address()), (0, HIGH_START));
        high.write(b"old").unwrap();
        let mut bytes = [1; 3];
        ram.read(&mut bytes, HIGH_START).unwrap();
        assert_eq!(&bytes, b"old");
        drop(high);
        let again = ram.take(PAGE).unwrap();
        assert_eq!(again.address(), HIGH_START);
        ram.read(&mut bytes, HIGH_START).unwrap();
        assert_eq!(bytes, [0; 3]);
        assert!(ram.read(&mut bytes, LOW_END).is_err(), "the hole");
        assert!(ram.take(1 << 40).is_err());
    }

    #[test]
    fn the_file_stays_as_large_as_it_is() {
        let ram = Ram::new(1 << 20, false).unwrap();
        let given = ram.file().try_clone().unwrap();
        for size in [0, 1 << 21] {
            assert_eq!(given.set_len(size).unwrap_err().raw_os_error(), Some(libc::EPERM), "fcntl(2): seals");
        }
        ram.take(PAGE).unwrap().write(b"here").unwrap();
    }

    #[test]
    fn scattered_pages_have_no_neighbours_and_read_in_order() {
        let ram = Ram::new(1 << 24, true).unwrap();
        let pages = ram.take(64 * PAGE).unwrap();
        let mut addresses: Vec<u64> = pages.runs().iter().map(|run| run.address).collect();
        assert!(addresses.windows(2).any(|pair| pair[1] < pair[0]), "shuffled");
        addresses.sort();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] > PAGE), "apart");
        let bytes: Vec<u8> = (0..64u8).flat_map(|page| [page; PAGE as usize]).collect();
        pages.write(&bytes).unwrap();
        for (page, run) in (0u8..).zip(pages.runs()) {
            let mut byte = [0xff];
            ram.read(&mut byte, run.address + PAGE - 1).unwrap();
            assert_eq!(byte, [page]);
        }
    }
}
