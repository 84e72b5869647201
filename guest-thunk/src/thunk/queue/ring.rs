//! Ringing an AQL queue's doorbell for the application, which under `HSA_ENABLE_DTIF` asks for it instead of storing there.
//!
//! A store to the doorbell names the last packet that the ring holds. This call names none, so all that have been reserved are
//! rung for. That is no more than an application may do itself: the packet processor waits at a packet that is not published yet.
#![allow(
    unsafe_code,
    reason = "the write index and the doorbell are memory that a GPU and other threads look at"
)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::lock::lock;

/// Where an AQL queue's write index and doorbell are.
pub struct Ring {
    /// Address of the write index: the number of packets that were ever reserved.
    write_index: u64,
    /// Address of the doorbell.
    doorbell: u64,
    /// Held from the look at the index to the store, so that what is stored never becomes less.
    order: Mutex<()>,
}

impl Ring {
    /// Of a queue that has just been made.
    pub fn new(write_index: u64, doorbell: u64) -> Ring {
        Ring { write_index, doorbell, order: Mutex::new(()) }
    }

    /// Rings for all packets that have been reserved.
    pub fn ring(&self) {
        let _order = lock(&self.order);
        // SAFETY: the application gave the address of the write index with the queue, which is live.
        let Some(written) = (unsafe { word(self.write_index) }) else { return };
        let Some(last) = written.load(Ordering::Acquire).checked_sub(1) else { return };
        // SAFETY: the doorbells of this process stay until the close, and the address is in a page of them.
        let Some(doorbell) = (unsafe { word(self.doorbell) }) else { return };
        doorbell.store(last, Ordering::Release);
    }
}

/// The word at an address; none at an address that is null or not aligned for it.
///
/// # Safety
/// The address is null, or memory for as long as the reference is used that nobody accesses but atomically.
unsafe fn word<'a>(address: u64) -> Option<&'a AtomicU64> {
    let aligned = |address: &usize| address.is_multiple_of(align_of::<AtomicU64>());
    let address = usize::try_from(address).ok().filter(aligned)?;
    let place = std::ptr::with_exposed_provenance::<AtomicU64>(address);
    // SAFETY: it is null or valid as the caller says, and aligned.
    unsafe { place.as_ref() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_for_the_last_packet_that_was_reserved() {
        let (write_index, doorbell) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
        let place = |word: &AtomicU64| word.as_ptr().expose_provenance() as u64;
        let ring = Ring::new(place(&write_index), place(&doorbell));
        ring.ring();
        assert_eq!(doorbell.load(Ordering::Acquire), u64::MAX, "none was");
        for (reserved, rung) in [(1, 0), (3, 2), (3, 2), (640, 639)] {
            write_index.store(reserved, Ordering::Release);
            ring.ring();
            assert_eq!(doorbell.load(Ordering::Acquire), rung);
        }
    }

    #[test]
    fn addresses_that_cannot_be_are_left_alone() {
        Ring::new(0, 8).ring();
        Ring::new(3, 8).ring();
    }
}
