//! Shared virtual memory: ranges of the process's addresses with attributes (`kfd_svm.c`).
//!
//! A GPU that may access a range sees the process's memory at the same address. Memory is never migrated; where it is
//! preferred or prefetched is only remembered.

use std::collections::BTreeMap;

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::svm::{
    KFD_IOCTL_SVM_ATTR_ACCESS, KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE, KFD_IOCTL_SVM_ATTR_CLR_FLAGS,
    KFD_IOCTL_SVM_ATTR_GRANULARITY, KFD_IOCTL_SVM_ATTR_NO_ACCESS, KFD_IOCTL_SVM_ATTR_PREFERRED_LOC,
    KFD_IOCTL_SVM_ATTR_PREFETCH_LOC, KFD_IOCTL_SVM_ATTR_SET_FLAGS, KFD_IOCTL_SVM_LOCATION_SYSMEM,
    KFD_IOCTL_SVM_LOCATION_UNDEFINED, SvmAttribute, SvmFlags,
};
use kfd_seam::Result;
use nix::errno::Errno;

use crate::profile::Gpu;

/// Default of the module parameter `svm_default_granularity`: 2 MiB.
const DEFAULT_GRANULARITY: u32 = 9;

/// The largest granularity that is stored.
const MAX_GRANULARITY: u32 = 0x3f;

/// GPUs, one bit for each index.
pub type Gpus = u64;

/// The bit of a GPU.
pub fn bit(index: usize) -> Gpus {
    u32::try_from(index).ok().and_then(|index| 1u64.checked_shl(index)).unwrap_or(0)
}

/// What a range has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    preferred: u32,
    prefetched: u32,
    granularity: u32,
    flags: SvmFlags,
    access: Gpus,
    in_place: Gpus,
}

impl Attributes {
    /// `svm_range_new`, `svm_range_set_default_attributes`; with XNACK all GPUs have access.
    fn new(all: Gpus, xnack: bool) -> Self {
        Self {
            preferred: KFD_IOCTL_SVM_LOCATION_UNDEFINED,
            prefetched: KFD_IOCTL_SVM_LOCATION_UNDEFINED,
            granularity: DEFAULT_GRANULARITY,
            flags: SvmFlags::HOST_ACCESS | SvmFlags::COHERENT,
            access: if xnack { all } else { 0 },
            in_place: 0,
        }
    }

    /// `svm_range_apply_attrs`; `index` finds a GPU by its KFD id.
    fn apply(&mut self, attributes: &[SvmAttribute], index: &dyn Fn(u32) -> Option<usize>) {
        for SvmAttribute { kind, value } in attributes {
            let gpu = index(*value).map_or(0, bit);
            match *kind {
                KFD_IOCTL_SVM_ATTR_PREFERRED_LOC => self.preferred = *value,
                KFD_IOCTL_SVM_ATTR_PREFETCH_LOC => self.prefetched = *value,
                KFD_IOCTL_SVM_ATTR_ACCESS => {
                    self.access |= gpu;
                    self.in_place &= !gpu;
                }
                KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE => {
                    self.access &= !gpu;
                    self.in_place |= gpu;
                }
                KFD_IOCTL_SVM_ATTR_NO_ACCESS => {
                    self.access &= !gpu;
                    self.in_place &= !gpu;
                }
                KFD_IOCTL_SVM_ATTR_SET_FLAGS => self.flags |= SvmFlags::from_bits_retain(*value),
                KFD_IOCTL_SVM_ATTR_CLR_FLAGS => {
                    self.flags = SvmFlags::from_bits_retain(self.flags.bits() & !*value);
                }
                _ => self.granularity = (*value).min(MAX_GRANULARITY),
            }
        }
    }

    /// Whether a GPU may access the range.
    pub fn reaches(&self, index: usize) -> bool {
        (self.access | self.in_place) & bit(index) != 0
    }

    /// `svm_range_get_pte_flags` for system memory.
    pub fn page_flags(&self, gpu: &Gpu) -> VmPageFlags {
        let mut page = VmPageFlags::PAGE_READABLE | VmPageFlags::PAGE_WRITEABLE;
        page.set(VmPageFlags::PAGE_WRITEABLE, !self.flags.contains(SvmFlags::GPU_RO));
        page.set(VmPageFlags::PAGE_EXECUTABLE, self.flags.contains(SvmFlags::GPU_EXEC));
        let coherent = self.flags.intersects(SvmFlags::COHERENT | SvmFlags::EXT_COHERENT);
        let uncached = match gpu.gc_version {
            [9, 4, 3 | 4] => true,
            [12, ..] => false,
            _ => coherent,
        };
        page | if uncached { VmPageFlags::MTYPE_UC } else { VmPageFlags::MTYPE_NC }
    }
}

/// One range: where it starts, its size in bytes, and what it has.
pub type Range = (u64, u64, Attributes);

/// The ranges of a process.
#[derive(Debug, Default)]
pub struct Ranges {
    ranges: BTreeMap<u64, (u64, Attributes)>,
}

/// Checks what is to be set (`svm_range_check_attr`).
///
/// # Errors
/// `EINVAL` for an attribute or a GPU that does not exist.
pub fn check(attributes: &[SvmAttribute], index: &dyn Fn(u32) -> Option<usize>) -> Result<()> {
    for SvmAttribute { kind, value } in attributes {
        let known = index(*value).is_some();
        let fits = match *kind {
            KFD_IOCTL_SVM_ATTR_PREFERRED_LOC => {
                known || [KFD_IOCTL_SVM_LOCATION_SYSMEM, KFD_IOCTL_SVM_LOCATION_UNDEFINED].contains(value)
            }
            KFD_IOCTL_SVM_ATTR_PREFETCH_LOC => known || *value == KFD_IOCTL_SVM_LOCATION_SYSMEM,
            KFD_IOCTL_SVM_ATTR_ACCESS | KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE | KFD_IOCTL_SVM_ATTR_NO_ACCESS => {
                known
            }
            KFD_IOCTL_SVM_ATTR_SET_FLAGS | KFD_IOCTL_SVM_ATTR_CLR_FLAGS | KFD_IOCTL_SVM_ATTR_GRANULARITY => {
                true
            }
            _ => false,
        };
        if !fits {
            return Err(Errno::EINVAL);
        }
    }
    Ok(())
}

impl Ranges {
    /// Whether any range overlaps `size` bytes from `start` on.
    pub fn overlap(&self, start: u64, size: u64) -> bool {
        self.within(start, start.saturating_add(size)).next().is_some()
    }

    /// Whether GPU `index` always has all of `size` bytes from `start` on mapped (`kfd_queue_buffer_svm_get`).
    pub fn always_mapped(&self, start: u64, size: u64, index: usize) -> bool {
        let end = start.saturating_add(size);
        let mut at = start;
        for (first, length, attributes) in self.within(start, end) {
            let always = attributes.flags.contains(SvmFlags::GPU_ALWAYS_MAPPED);
            if first > at || !always || !attributes.reaches(index) {
                return false;
            }
            at = first.saturating_add(length);
        }
        at >= end
    }

    /// The ranges that overlap, in order.
    fn within(&self, start: u64, end: u64) -> impl Iterator<Item = Range> + '_ {
        let first = self.ranges.range(..=start).next_back().map_or(start, |(first, _)| *first);
        let reaches = move |range: &Range| range.0.saturating_add(range.1) > start && range.0 < end;
        let all = self.ranges.range(first..end).map(|(at, (size, attributes))| (*at, *size, *attributes));
        all.filter(reaches)
    }

    /// Cuts the range over `at` in two there.
    fn cut(&mut self, at: u64) {
        let Some((start, (size, attributes))) = self.ranges.range(..at).next_back() else { return };
        let (start, end, attributes) = (*start, start.saturating_add(*size), *attributes);
        if end > at {
            self.ranges.insert(start, (at - start, attributes));
            self.ranges.insert(at, (end - at, attributes));
        }
    }

    /// Sets attributes, which were checked, of `size` bytes from `start` on (`svm_range_set_attr`). Returns the ranges
    /// that lie there now.
    pub fn set(
        &mut self,
        start: u64,
        size: u64,
        attributes: &[SvmAttribute],
        index: &dyn Fn(u32) -> Option<usize>,
        (all, xnack): (Gpus, bool),
    ) -> Vec<Range> {
        let end = start.saturating_add(size);
        self.cut(start);
        self.cut(end);
        // What is not in a range yet.
        let mut at = start;
        let mut gaps = Vec::new();
        for (next, length, _) in self.within(start, end) {
            if next > at {
                gaps.push((at, next - at));
            }
            at = next.saturating_add(length);
        }
        if at < end {
            gaps.push((at, end - at));
        }
        for (at, length) in gaps {
            self.ranges.insert(at, (length, Attributes::new(all, xnack)));
        }
        for (_, (_, range)) in self.ranges.range_mut(start..end) {
            range.apply(attributes, index);
        }
        self.within(start, end).collect()
    }

    /// Answers for `size` bytes from `start` on what was asked, in place (`svm_range_get_attr`).
    ///
    /// # Errors
    /// `EINVAL` for an attribute that cannot be asked for, or a GPU that does not exist.
    pub fn get(
        &self,
        start: u64,
        size: u64,
        attributes: &mut [SvmAttribute],
        index: &dyn Fn(u32) -> Option<usize>,
        (all, xnack): (Gpus, bool),
    ) -> Result<()> {
        let asked = [
            KFD_IOCTL_SVM_ATTR_PREFERRED_LOC,
            KFD_IOCTL_SVM_ATTR_PREFETCH_LOC,
            KFD_IOCTL_SVM_ATTR_ACCESS,
            KFD_IOCTL_SVM_ATTR_SET_FLAGS,
            KFD_IOCTL_SVM_ATTR_CLR_FLAGS,
            KFD_IOCTL_SVM_ATTR_GRANULARITY,
        ];
        if attributes.iter().any(|attribute| !asked.contains(&attribute.kind)) {
            return Err(Errno::EINVAL);
        }
        let mut ranges = self.within(start, start.saturating_add(size)).map(|range| range.2);
        let first = ranges.next();
        let mut found = first.unwrap_or_else(|| Attributes::new(all, xnack));
        let mut any = found.flags;
        for range in ranges {
            let same = |one: u32, other: u32| match one == other {
                true => one,
                false => KFD_IOCTL_SVM_LOCATION_UNDEFINED,
            };
            found = Attributes {
                preferred: same(found.preferred, range.preferred),
                prefetched: same(found.prefetched, range.prefetched),
                granularity: found.granularity.min(range.granularity),
                flags: found.flags & range.flags,
                access: found.access & range.access,
                in_place: found.in_place & range.in_place,
            };
            any |= range.flags;
        }
        for attribute in attributes {
            match attribute.kind {
                KFD_IOCTL_SVM_ATTR_PREFERRED_LOC => attribute.value = found.preferred,
                KFD_IOCTL_SVM_ATTR_PREFETCH_LOC => attribute.value = found.prefetched,
                KFD_IOCTL_SVM_ATTR_SET_FLAGS => attribute.value = found.flags.bits(),
                KFD_IOCTL_SVM_ATTR_CLR_FLAGS => attribute.value = !any.bits(),
                KFD_IOCTL_SVM_ATTR_GRANULARITY => attribute.value = found.granularity,
                _ => {
                    let gpu = bit(index(attribute.value).ok_or(Errno::EINVAL)?);
                    attribute.kind = match (found.access & gpu != 0, found.in_place & gpu != 0) {
                        (true, _) => KFD_IOCTL_SVM_ATTR_ACCESS,
                        (false, true) => KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE,
                        (false, false) => KFD_IOCTL_SVM_ATTR_NO_ACCESS,
                    };
                }
            }
        }
        Ok(())
    }
}
