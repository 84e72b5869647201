//! Numbers that stand for memory without an address, as AMD's library gives them out (`mem_handle_aperture` of fmm.c): in
//! the hole between the two halves of the address space, so that no pointer is one.

use hsakmt_abi::status::HsakmtStatus;

use super::Memory;
use super::address::page_size;
use super::space::Space;
use crate::thunk::lock::lock;
use crate::thunk::refusal::{Outcome, Refusal};

/// `START_NON_CANONICAL_ADDR`
pub(super) const START: u64 = 1 << 47;

/// Up to the LDS aperture, which KFD puts at 2^48.
pub(super) const SIZE: u64 = 1 << 47;

/// Numbers that stand for some bytes of memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fake {
    /// The first.
    pub(super) start: u64,
    /// How many.
    pub(super) size: u64,
}

impl Memory {
    /// Takes numbers for `size` bytes, from a multiple of `align` on. Two such ranges are never neighbours.
    pub(super) fn fake_addresses(&self, size: u64, align: u64) -> Outcome<Fake> {
        let mut space = lock(&self.fake);
        let space = space.get_or_insert_with(|| Space::new(START, SIZE));
        let start = size.checked_add(page_size()).and_then(|taken| space.take(taken, align.max(page_size())));
        let start = start.ok_or_else(|| {
            Refusal::new(
                HsakmtStatus::NO_MEMORY,
                format!("no {size:#x} numbers for memory without an address"),
            )
        })?;
        Ok(Fake { start, size })
    }

    /// Gives them back.
    pub(super) fn give_fake_addresses(&self, fake: Fake) {
        if let Some(space) = &mut *lock(&self.fake) {
            space.give(fake.start, fake.size.saturating_add(page_size()));
        }
    }
}
