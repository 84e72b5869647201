//! The page table of one process on one GPU: GPU virtual addresses to what lies behind them.
//!
//! An address that is not mapped is a fault. There is no fallback to the CPU address of the same value: it
//! would hide every map that a client forgot.

use std::collections::BTreeMap;
use std::sync::Arc;

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;

use crate::arena::{Arena, PAGE};

/// End of the GPU's virtual addresses: 48 bits (`max_pfn` of the GPUs from gfx9 on).
pub const ADDRESS_END: u64 = 1 << 48;

/// Memory for sequence numbers that every address space has (`AMDGPU_VA_RESERVED_SEQ64_START`), below 2 MiB for the
/// context save area. GPUs read it.
pub const SEQUENCES: u64 = ADDRESS_END - (2 << 20) - SEQUENCES_SIZE;

/// `AMDGPU_VA_RESERVED_SEQ64_SIZE`
pub const SEQUENCES_SIZE: u64 = 2 << 20;

/// Where a process's trap handler is mapped (`AMDGPU_VA_RESERVED_TRAP_START`).
pub const TRAP_HANDLER: u64 = SEQUENCES - (1 << 16);

/// Two pages for the trap handler (`KFD_CWSR_TBA_TMA_SIZE`).
pub const TRAP_HANDLER_SIZE: u64 = 2 * PAGE;

/// [`Mapping::object`] of what the driver itself maps.
pub const OF_THE_DRIVER: u64 = u64::MAX;

/// What lies behind a mapping.
#[derive(Clone, Debug)]
pub enum Backing {
    /// Memory of the model from a file offset on.
    Arena {
        /// Which file.
        arena: Arc<Arena>,
        /// Offset in it.
        offset: u64,
    },
    /// Memory of the process from a CPU address on.
    User(u64),
    /// Nothing: reads give zeros and writes are lost (a partially resident texture, `AMDGPU_VM_PAGE_PRT`).
    Nothing,
}

impl Backing {
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<()> {
        match self {
            Self::Arena { arena, offset } => arena.read(add(*offset, at)?, buffer),
            Self::User(address) => UserMemory.read_bytes(UserPtr(add(*address, at)?), buffer),
            Self::Nothing => {
                buffer.fill(0);
                Ok(())
            }
        }
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Arena { arena, offset } => arena.write(add(*offset, at)?, bytes),
            Self::User(address) => UserMemory.write_bytes(UserPtr(add(*address, at)?), bytes),
            Self::Nothing => Ok(()),
        }
    }

    /// What lies `bytes` further on.
    pub fn behind(&self, bytes: u64) -> Self {
        match self {
            Self::Arena { arena, offset } => {
                Self::Arena { arena: arena.clone(), offset: offset.saturating_add(bytes) }
            }
            Self::User(address) => Self::User(address.saturating_add(bytes)),
            Self::Nothing => Self::Nothing,
        }
    }
}

fn add(base: u64, offset: u64) -> Result<u64> {
    base.checked_add(offset).ok_or(Errno::EFAULT)
}

/// One mapped range.
#[derive(Clone, Debug)]
pub struct Mapping {
    /// Size in bytes.
    pub size: u64,
    /// What lies behind it.
    pub backing: Backing,
    /// Number of the object that is mapped ([`crate::object::Object::id`]); 0 for none.
    pub object: u64,
    /// What the GPU may do there, and the memory type.
    pub flags: VmPageFlags,
}

/// An access of the GPU that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("GPU {gpu_id} cannot {access} address {va:#x}: {reason}")]
pub struct Fault {
    /// Which GPU.
    pub gpu_id: u32,
    /// The first byte that could not be accessed.
    pub va: u64,
    /// `read`, `write` or `execute`.
    pub access: &'static str,
    /// Why.
    pub reason: FaultReason,
}

/// Why an access failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultReason {
    /// No mapping there.
    #[error("nothing is mapped there")]
    NotPresent,
    /// The mapping is not readable.
    #[error("the mapping cannot be read")]
    NotReadable,
    /// The mapping is not writable.
    #[error("the mapping is read-only")]
    ReadOnly,
    /// The mapping is not executable.
    #[error("the mapping cannot be executed")]
    NoExecute,
    /// The memory behind the mapping is gone (a user pointer whose CPU mapping went away).
    #[error("the memory behind the mapping cannot be accessed")]
    NoBacking,
}

/// The page table, and the objects that can be mapped in it (`struct amdgpu_vm`).
#[derive(Debug, Default)]
pub struct AddressSpace {
    mappings: BTreeMap<u64, Mapping>,
    /// Mappings of shared virtual memory, which the driver keeps apart. None lies where one of the others does.
    svm: BTreeMap<u64, Mapping>,
    /// How often each object was added (`amdgpu_bo_va::ref_count`), by GEM handles and by KFD.
    added: BTreeMap<u64, u32>,
    /// How many uses queues have for each object (`amdgpu_bo_va::queue_refcount`).
    held: BTreeMap<u64, u32>,
}

/// Takes away what is mapped from `va` to `end`; what reaches out of it stays.
fn clear(mappings: &mut BTreeMap<u64, Mapping>, va: u64, end: u64) {
    let reaches = |(start, mapping): &(&u64, &Mapping)| start.saturating_add(mapping.size) > va;
    let starts: Vec<u64> = mappings.range(..end).rev().take_while(reaches).map(|(start, _)| *start).collect();
    for start in starts {
        let Some(mapping) = mappings.remove(&start) else { continue };
        let last = start.saturating_add(mapping.size);
        if last > end {
            let backing = mapping.backing.behind(end - start);
            mappings.insert(end, Mapping { size: last - end, backing, ..mapping.clone() });
        }
        if start < va {
            mappings.insert(start, Mapping { size: va - start, ..mapping });
        }
    }
}

/// The mapping over `va`: its start and itself.
fn over(mappings: &BTreeMap<u64, Mapping>, va: u64) -> Option<(u64, &Mapping)> {
    let (start, mapping) = mappings.range(..=va).next_back()?;
    (va.checked_sub(*start)? < mapping.size).then_some((*start, mapping))
}

/// The end of a range that can be mapped (`amdgpu_vm_verify_parameters`).
fn end_of(va: u64, size: u64) -> Result<u64> {
    if !va.is_multiple_of(PAGE) || !size.is_multiple_of(PAGE) || size == 0 {
        return Err(Errno::EINVAL);
    }
    va.checked_add(size).filter(|end| *end <= ADDRESS_END).ok_or(Errno::EINVAL)
}

impl AddressSpace {
    /// Adds an object, so that it can be mapped (`amdgpu_vm_bo_add`).
    pub fn add(&mut self, object: u64) {
        let count = self.added.entry(object).or_default();
        *count = count.saturating_add(1);
    }

    /// Removes an object; when it was added as often as removed, with all its mappings (`amdgpu_vm_bo_del`).
    pub fn remove(&mut self, object: u64) {
        let Some(count) = self.added.get_mut(&object) else { return };
        *count = count.saturating_sub(1);
        if *count == 0 {
            self.added.remove(&object);
            self.held.remove(&object);
            self.mappings.retain(|_, mapping| mapping.object != object);
        }
    }

    /// Takes hold of the object of a queue's buffer, and returns it: its mapping has to begin with the page of `va` and
    /// to have exactly `size` bytes, where those are at least a page (`kfd_queue_buffer_get`).
    ///
    /// # Errors
    /// `EINVAL` when it is not so.
    pub fn hold(&mut self, va: u64, size: u64) -> Result<u64> {
        let page = va - va % PAGE;
        let (start, mapping) = over(&self.mappings, page).ok_or(Errno::EINVAL)?;
        if start != page || (size >= PAGE && mapping.size / PAGE != size / PAGE) {
            return Err(Errno::EINVAL);
        }
        let count = self.held.entry(mapping.object).or_default();
        *count = count.saturating_add(1);
        Ok(mapping.object)
    }

    /// Takes one [`Self::hold`] back (`kfd_queue_unref_bo_va`).
    pub fn let_go(&mut self, object: u64) {
        let Some(count) = self.held.get_mut(&object) else { return };
        *count = count.saturating_sub(1);
        if *count == 0 {
            self.held.remove(&object);
        }
    }

    /// A queue needs the object.
    pub fn is_held(&self, object: u64) -> bool {
        self.held.contains_key(&object)
    }

    /// Whether an object was added (`amdgpu_vm_bo_find`).
    pub fn has(&self, object: u64) -> bool {
        self.added.contains_key(&object)
    }

    /// Maps a range (`amdgpu_vm_bo_map`).
    ///
    /// # Errors
    /// `EINVAL` when the range is empty, not of whole pages, beyond the address space or in the way of another.
    pub fn map(&mut self, va: u64, mapping: Mapping) -> Result<()> {
        let end = end_of(va, mapping.size)?;
        if let Some((before, other)) = self.mappings.range(..end).next_back()
            && before.saturating_add(other.size) > va
        {
            return Err(Errno::EINVAL);
        }
        // It takes the place of shared virtual memory in the page table.
        clear(&mut self.svm, va, end);
        self.mappings.insert(va, mapping);
        Ok(())
    }

    /// Takes away the mapping of an object that starts at `va` (`amdgpu_vm_bo_unmap`).
    ///
    /// # Errors
    /// `ENOENT` when there is none.
    pub fn unmap(&mut self, va: u64, object: u64) -> Result<()> {
        // The kernel looks for the page.
        let va = va - va % PAGE;
        self.mappings.get(&va).filter(|mapping| mapping.object == object).ok_or(Errno::ENOENT)?;
        self.mappings.remove(&va);
        Ok(())
    }

    /// Takes away whatever is mapped in a range; what reaches out of it stays mapped there
    /// (`amdgpu_vm_bo_clear_mappings`).
    ///
    /// # Errors
    /// `EINVAL` as [`Self::map`], but for what is in the way.
    pub fn clear(&mut self, va: u64, size: u64) -> Result<()> {
        clear(&mut self.mappings, va, end_of(va, size)?);
        Ok(())
    }

    /// Whether anything but shared virtual memory is mapped in a range.
    pub fn is_mapped(&self, va: u64, size: u64) -> bool {
        let before = self.mappings.range(..va.saturating_add(size)).next_back();
        before.is_some_and(|(start, mapping)| start.saturating_add(mapping.size) > va)
    }

    /// Maps a range of shared virtual memory in place of what is there of it, or takes that away.
    ///
    /// # Errors
    /// `EINVAL` as [`Self::clear`].
    pub fn set_svm(&mut self, va: u64, size: u64, mapping: Option<Mapping>) -> Result<()> {
        clear(&mut self.svm, va, end_of(va, size)?);
        if let Some(mapping) = mapping {
            self.svm.insert(va, mapping);
        }
        Ok(())
    }

    /// Maps a range in place of whatever is there (`amdgpu_vm_bo_replace_map`).
    ///
    /// # Errors
    /// `EINVAL` as [`Self::clear`].
    pub fn replace(&mut self, va: u64, mapping: Mapping) -> Result<()> {
        self.clear(va, mapping.size)?;
        self.map(va, mapping)
    }

    /// Maps memory of the driver.
    ///
    /// # Errors
    /// As [`Self::map`].
    pub fn map_for_the_driver(
        &mut self,
        va: u64,
        size: u64,
        (arena, offset): (&Arc<Arena>, u64),
        flags: VmPageFlags,
    ) -> Result<()> {
        let backing = Backing::Arena { arena: arena.clone(), offset };
        self.map(va, Mapping { size, backing, object: OF_THE_DRIVER, flags })
    }

    /// Takes the mappings of another over into this one, which has none but of shared virtual memory.
    pub fn take_over(&mut self, other: Self) {
        let svm = std::mem::take(&mut self.svm);
        *self = Self { svm, ..other };
    }

    /// The mapping over `va`: its start and itself.
    pub fn find(&self, va: u64) -> Option<(u64, &Mapping)> {
        over(&self.mappings, va).or_else(|| over(&self.svm, va))
    }

    /// Reads through the page table.
    ///
    /// # Errors
    /// The fault, at the first byte that could not be read.
    pub fn read(&self, gpu_id: u32, va: u64, buffer: &mut [u8]) -> core::result::Result<(), Fault> {
        self.load(gpu_id, va, buffer, "read", VmPageFlags::PAGE_READABLE, FaultReason::NotReadable)
    }

    /// Fetches instructions through the page table.
    ///
    /// # Errors
    /// The fault, at the first byte that could not be fetched.
    pub fn fetch(&self, gpu_id: u32, va: u64, buffer: &mut [u8]) -> core::result::Result<(), Fault> {
        self.load(gpu_id, va, buffer, "execute", VmPageFlags::PAGE_EXECUTABLE, FaultReason::NoExecute)
    }

    fn load(
        &self,
        gpu_id: u32,
        va: u64,
        buffer: &mut [u8],
        access: &'static str,
        needed: VmPageFlags,
        otherwise: FaultReason,
    ) -> core::result::Result<(), Fault> {
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = va.wrapping_add(done as u64);
            let fault = |reason| Fault { gpu_id, va: at, access, reason };
            let (start, mapping) = self.find(at).ok_or(fault(FaultReason::NotPresent))?;
            let resident = !matches!(mapping.backing, Backing::Nothing);
            if resident && !mapping.flags.contains(needed) {
                return Err(fault(otherwise));
            }
            let inside = at - start;
            let length = chunk(rest.len(), mapping.size - inside);
            let part = rest.get_mut(..length).ok_or(fault(FaultReason::NotPresent))?;
            by_pages(at, part.len(), |from, to| {
                let part = part.get_mut(from..to).ok_or(Errno::EFAULT)?;
                mapping.backing.read(inside.saturating_add(from as u64), part)
            })
            .map_err(|bad| Fault { va: at.wrapping_add(bad as u64), ..fault(FaultReason::NoBacking) })?;
            done += length;
        }
        Ok(())
    }

    /// Writes through the page table.
    ///
    /// # Errors
    /// The fault, at the first byte that could not be written; what lies before it was written.
    pub fn write(&self, gpu_id: u32, va: u64, bytes: &[u8]) -> core::result::Result<(), Fault> {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            let at = va.wrapping_add(done as u64);
            let fault = |reason| Fault { gpu_id, va: at, access: "write", reason };
            let (start, mapping) = self.find(at).ok_or(fault(FaultReason::NotPresent))?;
            let resident = !matches!(mapping.backing, Backing::Nothing);
            if resident && !mapping.flags.contains(VmPageFlags::PAGE_WRITEABLE) {
                return Err(fault(FaultReason::ReadOnly));
            }
            let inside = at - start;
            let length = chunk(rest.len(), mapping.size - inside);
            let part = rest.get(..length).ok_or(fault(FaultReason::NotPresent))?;
            by_pages(at, part.len(), |from, to| {
                let part = part.get(from..to).ok_or(Errno::EFAULT)?;
                mapping.backing.write(inside.saturating_add(from as u64), part)
            })
            .map_err(|bad| Fault { va: at.wrapping_add(bad as u64), ..fault(FaultReason::NoBacking) })?;
            done += length;
        }
        Ok(())
    }
}

/// Runs a copy of the bytes `0..length`, which start at address `at`, at once; when that fails page by page, for the
/// first byte that cannot be copied.
fn by_pages(
    at: u64,
    length: usize,
    mut copy: impl FnMut(usize, usize) -> Result<()>,
) -> core::result::Result<(), usize> {
    if copy(0, length).is_ok() {
        return Ok(());
    }
    let mut from = 0;
    while from < length {
        let address = at.wrapping_add(from as u64);
        // At most a page.
        let rest = PAGE - address % PAGE;
        let to = from.saturating_add(rest as usize).min(length);
        copy(from, to).map_err(|_| from)?;
        from = to;
    }
    Ok(())
}

fn chunk(wanted: usize, available: u64) -> usize {
    usize::try_from(available).map_or(wanted, |available| wanted.min(available))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arc<Arena> {
        Arc::new(Arena::new("test", 1 << 20).unwrap())
    }

    fn mapping(arena: &Arc<Arena>, pages: u64, writable: bool) -> Mapping {
        let offset = arena.allocate(pages * PAGE).unwrap();
        let backing = Backing::Arena { arena: arena.clone(), offset };
        let mut flags = VmPageFlags::PAGE_READABLE;
        flags.set(VmPageFlags::PAGE_WRITEABLE, writable);
        Mapping { size: pages * PAGE, backing, object: 1, flags }
    }

    #[test]
    fn bytes_cross_from_one_mapping_into_the_next() {
        let arena = arena();
        let mut space = AddressSpace::default();
        space.map(0x10000, mapping(&arena, 1, true)).unwrap();
        space.map(0x11000, mapping(&arena, 1, true)).unwrap();
        let text = b"across the boundary";
        space.write(7, 0x10ff8, text).unwrap();
        let mut back = [0u8; 19];
        space.read(7, 0x10ff8, &mut back).unwrap();
        assert_eq!(&back, text);
    }

    #[test]
    fn what_is_not_mapped_faults_at_its_first_byte() {
        let arena = arena();
        let mut space = AddressSpace::default();
        space.map(0x10000, mapping(&arena, 1, false)).unwrap();
        let fault = |va, access, reason| Err(Fault { gpu_id: 7, va, access, reason });
        let mut bytes = [0u8; 16];
        assert_eq!(space.read(7, 0x10ff8, &mut bytes), fault(0x11000, "read", FaultReason::NotPresent));
        assert_eq!(space.read(7, 0xfff8, &mut bytes), fault(0xfff8, "read", FaultReason::NotPresent));
        assert_eq!(space.write(7, 0x10000, &bytes), fault(0x10000, "write", FaultReason::ReadOnly));
        assert_eq!(
            space.read(7, u64::MAX - 3, &mut bytes),
            fault(u64::MAX - 3, "read", FaultReason::NotPresent)
        );
        assert_eq!(space.unmap(0x10000, 2), Err(Errno::ENOENT), "another object's");
        space.unmap(0x10000, 1).unwrap();
        assert_eq!(space.read(7, 0x10000, &mut bytes), fault(0x10000, "read", FaultReason::NotPresent));
    }

    #[test]
    fn a_cpu_address_is_no_gpu_address() {
        let space = AddressSpace::default();
        let secret = [5u8; 4];
        let va = secret.as_ptr() as u64;
        let mut bytes = [0u8; 4];
        assert!(space.read(7, va, &mut bytes).is_err());
    }

    #[test]
    fn maps_are_checked_as_in_amdgpu_vm_bo_map() {
        let arena = arena();
        let mut space = AddressSpace::default();
        let mut map = |va, pages| space.map(va, mapping(&arena, pages, true));
        assert_eq!(map(0x20000, 2), Ok(()));
        assert_eq!(map(0x21000, 1), Err(Errno::EINVAL), "overlap with the end");
        assert_eq!(map(0x1f000, 2), Err(Errno::EINVAL), "overlap with the start");
        assert_eq!(map(0x1f000, 4), Err(Errno::EINVAL), "around");
        assert_eq!(map(0x1f000, 1), Ok(()));
        assert_eq!(map(0x22000, 1), Ok(()));
        assert_eq!(map(0x20800, 1), Err(Errno::EINVAL), "not page aligned");
        assert_eq!(map(ADDRESS_END - PAGE, 2), Err(Errno::EINVAL), "beyond the end");
        assert_eq!(map(!0xfff, 1), Err(Errno::EINVAL), "wraps");
    }

    #[test]
    fn clearing_splits_what_reaches_out_of_the_range() {
        let arena = arena();
        let mut space = AddressSpace::default();
        space.map(0x10000, mapping(&arena, 4, true)).unwrap();
        space.map(0x14000, mapping(&arena, 1, true)).unwrap();
        space.map(0x16000, mapping(&arena, 2, true)).unwrap();
        for page in [0x10000u64, 0x11000, 0x12000, 0x13000, 0x14000, 0x16000, 0x17000] {
            space.write(7, page, &page.to_ne_bytes()).unwrap();
        }
        let seen = |space: &AddressSpace, page: u64| {
            let mut bytes = [0; 8];
            space.read(7, page, &mut bytes).ok().map(|()| u64::from_ne_bytes(bytes))
        };
        // From the middle of one.
        space.clear(0x11000, 0x1000).unwrap();
        let pages = |space: &AddressSpace| {
            (0x10..0x18).map(|page| seen(space, page << 12).map(|value| value >> 12)).collect::<Vec<_>>()
        };
        let some = Some;
        assert_eq!(
            pages(&space),
            [some(0x10), None, some(0x12), some(0x13), some(0x14), None, some(0x16), some(0x17)]
        );
        // Over the end of one, a whole one and the start of one.
        space.clear(0x13000, 0x4000).unwrap();
        assert_eq!(pages(&space), [some(0x10), None, some(0x12), None, None, None, None, some(0x17)]);
        assert_eq!(space.clear(0x13000, 0), Err(Errno::EINVAL));
        assert_eq!(space.clear(0x13001, PAGE), Err(Errno::EINVAL));
        space.replace(0x10000, mapping(&arena, 8, true)).unwrap();
        assert_eq!(seen(&space, 0x12000), Some(0));
        assert_eq!(space.find(0x17fff).map(|(start, _)| start), Some(0x10000));
    }

    #[test]
    fn mappings_go_with_the_last_use_of_their_object() {
        let arena = arena();
        let mut space = AddressSpace::default();
        space.add(1);
        space.add(1);
        space.map(0x10000, mapping(&arena, 1, true)).unwrap();
        space.remove(1);
        assert!(space.has(1) && space.find(0x10000).is_some());
        space.remove(1);
        assert!(!space.has(1) && space.find(0x10000).is_none());
        space.remove(1);
    }

    #[test]
    fn user_memory_that_is_gone_faults() {
        let mut space = AddressSpace::default();
        let memory = vec![9u8; 2 * PAGE as usize];
        let aligned = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let user = |address| Mapping {
            size: PAGE,
            backing: Backing::User(address),
            object: 1,
            flags: VmPageFlags::PAGE_READABLE,
        };
        space.map(0x30000, user(aligned)).unwrap();
        space.map(0x40000, user(PAGE)).unwrap();
        let mut bytes = [0u8; 2];
        space.read(7, 0x30010, &mut bytes).unwrap();
        assert_eq!(bytes, [9, 9]);
        let fault = space.read(7, 0x40000, &mut bytes).unwrap_err();
        assert_eq!(fault.reason, FaultReason::NoBacking);
    }
}
