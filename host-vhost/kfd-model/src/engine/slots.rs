//! Which doorbell, and which SDMA engine, a new queue of a process gets on a GPU: the rules of `allocate_doorbell`
//! and `allocate_sdma_queue`.
//!
//! The driver shares SDMA queues out over all processes; here each process has all of them.

use std::collections::BTreeSet;

use kfd_seam::Result;
use nix::errno::Errno;

use crate::profile::Engines;

/// Queues that a process can have, and doorbells on each GPU (`KFD_MAX_NUM_OF_QUEUES_PER_PROCESS`).
pub const MAX_QUEUES: u32 = 1024;

/// Distance of the doorbells of an SDMA engine's even and odd queues (`KFD_QUEUE_DOORBELL_MIRROR_OFFSET`).
const MIRROR: u32 = 512;

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Compute: AQL or PM4.
    Compute,
    /// An SDMA engine for PCIe.
    Sdma,
    /// An SDMA engine for XGMI.
    Xgmi,
    /// The SDMA engine with this number; those for XGMI come last.
    Engine(u32),
}

/// The place of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Index of its doorbell, of 8 bytes, in the process's slice.
    pub doorbell: u32,
    /// Engine and queue of it, for an SDMA queue.
    pub sdma: Option<(u32, u32)>,
}

/// The places that a process has taken on one GPU.
#[derive(Debug)]
pub struct Slots {
    engines: Engines,
    /// First doorbell of the first SDMA engine, and the distance to that of the next.
    sdma_doorbells: (u32, u32),
    /// Doorbells that no compute queue gets: of SDMA, interrupts and video.
    not_compute: (u32, u32),
    compute: BTreeSet<u32>,
    /// Engine and queue.
    sdma: BTreeSet<(u32, u32)>,
}

impl Slots {
    /// For a GPU of this `gfx_target_version`.
    pub fn new(gfx_target_version: u32, engines: Engines) -> Self {
        // AMDGPU_DOORBELL64_* for Vega 10; AMDGPU_VEGA20_DOORBELL_* and AMDGPU_NAVI10_DOORBELL_* agree.
        let vega10 = gfx_target_version < 90006;
        let (sdma_doorbells, not_compute) =
            if vega10 { ((0xf0, 2), (0xf0, 0xff)) } else { ((0x100, 10), (0x100, 0x18f)) };
        Self { engines, sdma_doorbells, not_compute, compute: BTreeSet::new(), sdma: BTreeSet::new() }
    }

    /// Takes a place.
    ///
    /// # Errors
    /// `EBUSY` without a free doorbell, `ENOMEM` without a free SDMA queue, `EINVAL` for an engine that there is not.
    pub fn take(&mut self, purpose: Use) -> Result<Slot> {
        let Engines { sdma, sdma_xgmi, .. } = self.engines;
        match purpose {
            Use::Compute => self.take_compute(),
            Use::Sdma => self.take_sdma(0, sdma),
            Use::Xgmi => self.take_sdma(sdma, sdma_xgmi),
            Use::Engine(engine) if engine < sdma.saturating_add(sdma_xgmi) => self.take_sdma(engine, 1),
            Use::Engine(_) => Err(Errno::EINVAL),
        }
    }

    /// Gives a place back.
    pub fn give(&mut self, slot: Slot) {
        match slot.sdma {
            Some(place) => self.sdma.remove(&place),
            None => self.compute.remove(&slot.doorbell),
        };
    }

    fn take_compute(&mut self) -> Result<Slot> {
        let (first, last) = self.not_compute;
        let usable = |doorbell: &u32| !(first..=last).contains(&(doorbell % MIRROR));
        let free = (0..MAX_QUEUES).filter(usable).find(|doorbell| !self.compute.contains(doorbell));
        let doorbell = free.ok_or(Errno::EBUSY)?;
        self.compute.insert(doorbell);
        Ok(Slot { doorbell, sdma: None })
    }

    /// One queue of `count` engines from `first` on: round and round, so that engines fill up evenly.
    fn take_sdma(&mut self, first: u32, count: u32) -> Result<Slot> {
        let queues = 0..self.engines.sdma_queues_per_engine;
        let all =
            queues.flat_map(|queue| (0..count).map(move |engine| (first.saturating_add(engine), queue)));
        let place = { all }.find(|place| !self.sdma.contains(place)).ok_or(Errno::ENOMEM)?;
        let (engine, queue) = place;
        let (start, distance) = self.sdma_doorbells;
        let base = engine.checked_mul(distance).and_then(|offset| offset.checked_add(start));
        let doorbell = base.and_then(|base| base.checked_add((queue & 1) * MIRROR + (queue >> 1)));
        let doorbell = doorbell.filter(|doorbell| *doorbell < MAX_QUEUES).ok_or(Errno::ENOMEM)?;
        self.sdma.insert(place);
        Ok(Slot { doorbell, sdma: Some(place) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VEGA20: u32 = 90006;

    fn engines(sdma: u32, sdma_xgmi: u32, queues: u32) -> Engines {
        Engines { sdma, sdma_xgmi, sdma_queues_per_engine: queues, cp_queues: 24 }
    }

    #[test]
    fn compute_queues_get_the_lowest_doorbell_but_none_of_sdma() {
        let mut slots = Slots::new(VEGA20, engines(2, 0, 8));
        let all: Vec<u32> = std::iter::from_fn(|| Some(slots.take(Use::Compute).ok()?.doorbell)).collect();
        // 0x90 doorbells are not theirs (AMDGPU_VEGA20_DOORBELL64_FIRST_NON_CP to LAST_NON_CP), twice.
        assert_eq!(all.len(), 1024 - 2 * 0x90);
        assert_eq!((all[0], all[255], all[256]), (0, 255, 0x190));
        assert!(!all.contains(&(512 + 0x100)));
        assert_eq!(slots.take(Use::Compute), Err(Errno::EBUSY));
        slots.give(Slot { doorbell: 7, sdma: None });
        assert_eq!(slots.take(Use::Compute).unwrap().doorbell, 7);
    }

    #[test]
    fn sdma_queues_go_round_the_engines() {
        let mut slots = Slots::new(VEGA20, engines(2, 1, 8));
        let mut take = |purpose| slots.take(purpose).map(|slot| slot.doorbell);
        // Engine 0 queue 0, engine 1 queue 0, engine 0 queue 1 (the mirror), engine 1 queue 1, engine 0 queue 2.
        let first: Vec<u32> = (0..5).map(|_| take(Use::Sdma).unwrap()).collect();
        assert_eq!(first, [0x100, 0x10a, 0x300, 0x30a, 0x101]);
        assert_eq!(take(Use::Xgmi), Ok(0x114));
        assert_eq!(take(Use::Engine(1)), Ok(0x10b));
        assert_eq!(take(Use::Engine(2)), Ok(0x314));
        assert_eq!(take(Use::Engine(3)), Err(Errno::EINVAL));
        assert_eq!((0..20).map_while(|_| take(Use::Sdma).ok()).count(), 16 - 6);
        assert_eq!(take(Use::Sdma), Err(Errno::ENOMEM));
    }

    #[test]
    fn without_engines_for_xgmi_there_is_no_queue_on_one() {
        let mut slots = Slots::new(VEGA20, engines(2, 0, 8));
        assert_eq!(slots.take(Use::Xgmi), Err(Errno::ENOMEM));
    }

    #[test]
    fn vega10_has_its_own_layout() {
        let mut slots = Slots::new(90000, engines(2, 0, 2));
        let taken: Vec<Slot> = (0..4).map(|_| slots.take(Use::Sdma).unwrap()).collect();
        assert_eq!(taken.iter().map(|slot| slot.doorbell).collect::<Vec<_>>(), [0xf0, 0xf2, 0x2f0, 0x2f2]);
        slots.give(taken[1]);
        assert_eq!(slots.take(Use::Sdma), Ok(taken[1]));
    }
}
