//! Rings for calls that block.
//!
//! Ring 0 carries control calls. The last ring carries waits that only look (time-out 0), which never block and so can
//! share it. The rings between are claimed by one waiting thread each; the last [`TURNS`] of them are for turns:
//! where more threads wait than there are rings, the ones there are sent for a short time and give way, first come
//! first served, so that the one wait that lets all others go on is never shut out.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use virtio_kfd_protocol::limits::{CONTROL_RING, MAX_FRAMES_IN_FLIGHT, MAX_RINGS};

/// Rings that threads take turns on.
const TURNS: u32 = 16;

/// Most frames in flight on each of the two rings that are shared. Together with one on each other ring that is at
/// most what the host holds for a context.
const SHARED: usize = 32;
const _: () = assert!(2 * SHARED + (MAX_RINGS as usize - 2) <= MAX_FRAMES_IN_FLIGHT);

/// The fewest rings that a context needs: control, one wait, looks.
pub(super) const FEWEST: u32 = 3;

/// A thread that waits for a ring.
#[derive(Default)]
struct Waiter {
    granted: Mutex<Option<u8>>,
    wake: Condvar,
}

#[derive(Default)]
struct Pool {
    /// Bit by ring.
    free: u64,
    queue: VecDeque<Arc<Waiter>>,
}

/// The rings of a client.
pub(super) struct WaitRings {
    pool: Mutex<Pool>,
    control_gate: Gate,
    look_gate: Gate,
    look: u8,
    first_turn: u8,
}

/// Lets a bounded number in.
struct Gate {
    free: Mutex<usize>,
    wake: Condvar,
}

/// A place behind a gate, until dropped.
pub(super) struct Pass<'a>(&'a Gate);

impl Gate {
    fn new() -> Gate {
        Gate { free: Mutex::new(SHARED), wake: Condvar::new() }
    }

    fn enter(&self) -> Pass<'_> {
        let mut free = lock(&self.free);
        loop {
            if let Some(left) = free.checked_sub(1) {
                *free = left;
                return Pass(self);
            }
            free = self.wake.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut free = lock(&self.0.free);
        *free = free.saturating_add(1);
        self.0.wake.notify_one();
    }
}

/// A ring that is ours until dropped.
pub(super) struct Claim<'a> {
    pub(super) ring: u8,
    /// Whether the ring is one to take turns on.
    pub(super) turns: bool,
    rings: &'a WaitRings,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here panics while it holds a lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WaitRings {
    /// For a context of `rings` rings, at least [`FEWEST`]; more than [`MAX_RINGS`] are not used.
    pub(super) fn new(rings: u32) -> WaitRings {
        let rings = rings.clamp(FEWEST, MAX_RINGS);
        let look = rings.saturating_sub(1);
        let turns = TURNS.min(look.saturating_sub(1).div_ceil(2));
        // Bits 1 to look - 1; look is at most 63.
        let free = (1..look).fold(0, |mask, ring| mask | 1u64 << ring);
        WaitRings {
            pool: Mutex::new(Pool { free, queue: VecDeque::new() }),
            control_gate: Gate::new(),
            look_gate: Gate::new(),
            look: look as u8,
            first_turn: look.saturating_sub(turns) as u8,
        }
    }

    /// The ring for waits that only look.
    pub(super) fn look_ring(&self) -> u8 {
        self.look
    }

    /// Waits until a frame may be sent on a ring. On a claimed ring that is at once.
    pub(super) fn enter(&self, ring: u8) -> Option<Pass<'_>> {
        match ring {
            CONTROL_RING => Some(self.control_gate.enter()),
            ring if ring == self.look => Some(self.look_gate.enter()),
            _ => None,
        }
    }

    /// Whether a thread waits for a ring.
    pub(super) fn contended(&self) -> bool {
        !lock(&self.pool).queue.is_empty()
    }

    /// Takes a free ring, or waits for one until the deadline.
    pub(super) fn claim(&self, deadline: Option<Instant>) -> Option<Claim<'_>> {
        let waiter = {
            let mut pool = lock(&self.pool);
            // Lowest first, so that the rings for turns are the last ones taken.
            let ring = pool.free.trailing_zeros();
            if ring < u64::BITS {
                pool.free &= !(1u64 << ring);
                return Some(self.claimed(ring as u8));
            }
            let waiter = Arc::new(Waiter::default());
            pool.queue.push_back(Arc::clone(&waiter));
            waiter
        };
        let mut granted = lock(&waiter.granted);
        loop {
            if let Some(ring) = *granted {
                return Some(self.claimed(ring));
            }
            granted = match deadline {
                None => waiter.wake.wait(granted).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    waiter.wake.wait_timeout(granted, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        drop(granted);
        // The locks are taken in the order of release(): first the pool, then the waiter.
        lock(&self.pool).queue.retain(|queued| !Arc::ptr_eq(queued, &waiter));
        // A ring may have been handed over just before the place in the queue was given up.
        let granted = lock(&waiter.granted).take();
        granted.map(|ring| self.claimed(ring))
    }

    fn claimed(&self, ring: u8) -> Claim<'_> {
        Claim { ring, turns: ring >= self.first_turn, rings: self }
    }

    fn release(&self, ring: u8) {
        let mut pool = lock(&self.pool);
        match pool.queue.pop_front() {
            Some(waiter) => {
                *lock(&waiter.granted) = Some(ring);
                waiter.wake.notify_one();
            }
            None => pool.free |= 1u64 << u32::from(ring),
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.rings.release(self.ring);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn rings_between_control_and_look_are_given_out_once_each_and_the_ones_for_turns_last() {
        let rings = WaitRings::new(64);
        let claims: Vec<Claim<'_>> = (0..62).map(|_| rings.claim(Some(Instant::now())).unwrap()).collect();
        let numbers: Vec<u8> = claims.iter().map(|claim| claim.ring).collect();
        assert_eq!(numbers, (1..=62).collect::<Vec<u8>>());
        assert_eq!(claims.iter().filter(|claim| claim.turns).count(), TURNS as usize);
        assert!(claims.last().unwrap().turns && !claims.first().unwrap().turns);
        assert_eq!(rings.look_ring(), 63);
        assert!(rings.claim(Some(Instant::now())).is_none(), "all are taken");
        drop(claims);
        assert_eq!(rings.claim(None).unwrap().ring, 1);
    }

    #[test]
    fn the_fewest_rings_still_have_one_for_turns() {
        let rings = WaitRings::new(FEWEST);
        let claim = rings.claim(None).unwrap();
        assert_eq!((claim.ring, claim.turns, rings.look_ring()), (1, true, 2));
    }

    #[test]
    fn a_ring_goes_to_who_came_first() {
        let rings = WaitRings::new(FEWEST);
        let claim = rings.claim(None).unwrap();
        let place = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for number in 0..8 {
                let (rings, place) = (&rings, &place);
                threads.push(scope.spawn(move || {
                    let _claim = rings.claim(None).unwrap();
                    assert_eq!(place.fetch_add(1, Ordering::SeqCst), number);
                }));
                while lock(&rings.pool).queue.len() <= number {
                    std::thread::yield_now();
                }
            }
            assert!(rings.contended());
            drop(claim);
        });
        assert_eq!(place.into_inner(), 8);
        assert!(!rings.contended());
    }

    #[test]
    fn one_who_gives_up_leaves_no_ring_behind() {
        let rings = WaitRings::new(FEWEST);
        for round in 0..200u64 {
            let claim = rings.claim(None).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let deadline = Instant::now() + Duration::from_micros(round % 50);
                    drop(rings.claim(Some(deadline)));
                });
                scope.spawn(|| drop(claim));
            });
            let again = rings.claim(Some(Instant::now()));
            assert_eq!(again.map(|claim| claim.ring), Some(1), "round {round}");
        }
    }
}
