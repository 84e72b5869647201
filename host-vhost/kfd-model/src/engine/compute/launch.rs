//! A kernel that runs: its grid, cut into workgroups.

use crate::engine::DispatchFailure;

use super::object::USER_SGPRS;

/// Most bytes of group memory of a workgroup.
pub const MAX_GROUP_SEGMENT: u32 = 64 << 10;

/// Lanes of a wave.
pub const LANES: u32 = 64;

/// Rows of vector registers that a SIMD has for its waves.
const SIMD_VGPRS: u32 = 256;
/// SIMDs of a compute unit.
const SIMDS: u32 = 4;
/// Waves that a SIMD can have.
const SIMD_WAVES: u32 = 10;

/// Scratch memory of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scratch {
    /// Waves that it is for.
    pub waves: u32,
    /// Bytes for each.
    pub wave_bytes: u32,
}

impl Scratch {
    /// By `COMPUTE_TMPRING_SIZE`: bits 0 to 11 count waves, bits 12 to 24 KiB for each.
    ///
    /// A wave finds its memory by an offset of 32 bits; what is beyond that is for none.
    pub fn from_tmpring(tmpring: u32) -> Self {
        let wave_bytes = (tmpring >> 12 & 0x1fff) << 10;
        let most = u32::MAX.checked_div(wave_bytes).unwrap_or(u32::MAX);
        Self { waves: (tmpring & 0xfff).min(most), wave_bytes }
    }

    /// There is room for the waves of a workgroup with `private` bytes for each work-item.
    pub fn is_enough(&self, private: u32, items: u32) -> bool {
        let needed = u64::from(private).saturating_mul(u64::from(LANES));
        needed <= u64::from(self.wave_bytes) && items.div_ceil(LANES) <= self.waves
    }
}

/// A kernel with all that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// GPU address of the first instruction.
    pub entry: u64,
    /// `COMPUTE_PGM_RSRC1`.
    pub rsrc1: u32,
    /// `COMPUTE_PGM_RSRC2`.
    pub rsrc2: u32,
    /// User SGPRs, of which rsrc2 counts those that are loaded.
    pub user: [u32; USER_SGPRS],
    /// Work-items of a workgroup in each dimension.
    pub workgroup: [u32; 3],
    /// And in all of it: at most 1024.
    pub items: u32,
    /// Number of the first workgroup in each dimension.
    pub start: [u32; 3],
    /// Work-items in each dimension.
    pub grid: [u64; 3],
    /// Bytes of group memory of a workgroup.
    pub group_segment: u32,
    /// Where its waves have their private memory.
    pub scratch: Scratch,
}

impl Launch {
    /// Waves of a whole workgroup.
    pub fn waves(&self) -> u32 {
        self.items.div_ceil(LANES)
    }

    /// Rows of vector registers of each wave (`GRANULATED_WORKITEM_VGPR_COUNT`, in fours).
    pub fn vgprs(&self) -> u32 {
        ((self.rsrc1 & 0x3f) + 1) * 4
    }

    /// A compute unit has what a workgroup needs.
    ///
    /// # Errors
    /// More registers than there are.
    pub(super) fn check(&self) -> Result<(), DispatchFailure> {
        // All waves of a workgroup are on one compute unit, spread over its SIMDs.
        let rows = self.waves().div_ceil(SIMDS).saturating_mul(self.vgprs());
        let user = self.rsrc2 >> 1 & 0x1f;
        if rows > SIMD_VGPRS || user > USER_SGPRS as u32 {
            return Err(DispatchFailure::Registers);
        }
        Ok(())
    }

    /// Workgroups that a compute unit has room for at a time.
    pub fn groups_of_a_unit(&self) -> u32 {
        let by_registers = (SIMD_VGPRS / self.vgprs()).min(SIMD_WAVES) * SIMDS / self.waves().max(1);
        let by_memory = MAX_GROUP_SEGMENT.checked_div(self.group_segment).unwrap_or(u32::MAX);
        by_registers.min(by_memory).max(1)
    }

    /// Numbers of workgroups in each dimension.
    fn counts(&self) -> [u64; 3] {
        let mut counts = [0; 3];
        for ((count, grid), workgroup) in counts.iter_mut().zip(self.grid).zip(self.workgroup) {
            *count = grid.div_ceil(u64::from(workgroup.max(1)));
        }
        counts
    }
}

/// One workgroup of a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workgroup {
    /// Its number in each dimension.
    pub id: [u32; 3],
    /// Work-items in each dimension: fewer at the end of the grid.
    pub size: [u32; 3],
}

/// The workgroups of a grid that were not begun yet: x first, then y, then z.
#[derive(Debug)]
pub struct Workgroups {
    counts: [u64; 3],
    next: Option<[u64; 3]>,
}

impl Workgroups {
    /// All of a launch.
    pub fn new(launch: &Launch) -> Self {
        let counts = launch.counts();
        Self { counts, next: (!counts.contains(&0)).then_some([0; 3]) }
    }

    /// There is none any more.
    pub fn is_empty(&self) -> bool {
        self.next.is_none()
    }

    /// About how many there are: all of the grid, as long as there is one.
    pub fn left(&self) -> usize {
        let all = self.counts.iter().fold(1u64, |all, count| all.saturating_mul(*count));
        if self.next.is_some() { usize::try_from(all).unwrap_or(usize::MAX) } else { 0 }
    }

    /// The next one.
    pub fn take(&mut self, launch: &Launch) -> Option<Workgroup> {
        let position = self.next?;
        let mut following = position;
        let mut carried = true;
        for (place, count) in following.iter_mut().zip(self.counts) {
            *place += 1;
            if *place < count {
                carried = false;
                break;
            }
            *place = 0;
        }
        self.next = (!carried).then_some(following);
        let mut taken = Workgroup { id: [0; 3], size: [0; 3] };
        let ids = taken.id.iter_mut().zip(&mut taken.size);
        let sizes = launch.grid.iter().zip(launch.workgroup).zip(launch.start);
        for (((id, size), ((grid, full), start)), place) in ids.zip(sizes).zip(position) {
            // The counter of a dimension has 32 bits.
            *id = (place as u32).wrapping_add(start);
            let before = place.saturating_mul(u64::from(full));
            *size = u32::try_from(grid.saturating_sub(before)).unwrap_or(u32::MAX).min(full);
        }
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(workgroup: [u32; 3], grid: [u64; 3]) -> Launch {
        Launch {
            entry: 0,
            rsrc1: 0,
            rsrc2: 0,
            user: [0; USER_SGPRS],
            workgroup,
            items: workgroup.iter().product(),
            start: [0; 3],
            grid,
            group_segment: 0,
            scratch: Scratch::default(),
        }
    }

    #[test]
    fn the_last_workgroups_are_smaller() {
        let launch = launch([4, 2, 1], [6, 3, 1]);
        let mut workgroups = Workgroups::new(&launch);
        let all: Vec<_> = core::iter::from_fn(|| workgroups.take(&launch)).map(|w| (w.id, w.size)).collect();
        let expected =
            [([0, 0, 0], [4, 2, 1]), ([1, 0, 0], [2, 2, 1]), ([0, 1, 0], [4, 1, 1]), ([1, 1, 0], [2, 1, 1])];
        assert_eq!(all, expected);
        assert!(workgroups.is_empty());
    }

    #[test]
    fn a_grid_without_work_items_has_no_workgroups() {
        let launch = launch([1, 1, 1], [5, 0, 1]);
        assert_eq!(Workgroups::new(&launch).take(&launch), None);
    }

    #[test]
    fn absurd_grids_are_only_counted() {
        let most = u64::from(u32::MAX);
        let launch = launch([1, 1, 1], [most; 3]);
        let mut workgroups = Workgroups::new(&launch);
        workgroups.next = Some([most - 1, most - 1, 7]);
        assert_eq!(workgroups.take(&launch).unwrap().id, [u32::MAX - 1, u32::MAX - 1, 7]);
        assert_eq!(workgroups.take(&launch).unwrap().id, [0, 0, 8]);
        workgroups.next = Some([most - 1; 3]);
        assert!(workgroups.take(&launch).is_some());
        assert!(workgroups.is_empty());
    }

    // amd_hsa_queue.h: WAVES 12 bits, WAVESIZE 13 bits in units of 256 words.
    #[test]
    fn scratch_memory_is_enough_when_a_workgroup_fits() {
        let scratch = Scratch::from_tmpring(3 << 12 | 4);
        assert_eq!(scratch, Scratch { waves: 4, wave_bytes: 3072 });
        assert!(scratch.is_enough(48, 256));
        assert!(!scratch.is_enough(49, 64));
        assert!(!scratch.is_enough(16, 257));
        assert!(!scratch.is_enough(u32::MAX, 1));
        // 8 MiB less 1 KiB for each of 4095 waves are more than 32 bits can say.
        let most = Scratch::from_tmpring(0x1fff << 12 | 0xfff);
        assert_eq!(most, Scratch { waves: 512, wave_bytes: 0x1fff << 10 });
    }

    #[test]
    fn registers_limit_the_workgroup() {
        let mut launch = launch([1024, 1, 1], [1024, 1, 1]);
        launch.rsrc1 = 15;
        assert_eq!((launch.vgprs(), launch.check()), (64, Ok(())));
        assert_eq!(launch.groups_of_a_unit(), 1);
        launch.rsrc1 = 16;
        assert_eq!(launch.check(), Err(DispatchFailure::Registers));
        launch.rsrc1 = 0;
        launch.rsrc2 = 17 << 1;
        assert_eq!(launch.check(), Err(DispatchFailure::Registers));
    }
}
