//! The hand-over between a guest that arms its trap and a pump that goes to sleep, in all interleavings.
//!
//! The guest's side is what a guest library has to do: one thread, the watcher, arms the trap and then tells the host; a store
//! that traps waits until the watcher has disarmed it and told the host. Stores and changes of the trap exclude each other as
//! they do in the guest's page table.

/// What `handover` runs on here.
mod sync {
    pub use loom::sync::{Condvar, Mutex, MutexGuard};
}

#[allow(clippy::duplicate_mod)] // the same source on loom's primitives
#[path = "handover.rs"]
mod handover;

use handover::{Bells, Handover, Turn};
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

/// Two doorbells in memory that is shared with the guest, and the real ones.
struct Pair {
    shadow: Arc<[AtomicU64; 2]>,
    last: [u64; 2],
    real: Arc<Mutex<Vec<(usize, u64)>>>,
}

impl Bells for Pair {
    fn look(&mut self) -> bool {
        let mut rang = false;
        for slot in 0..2 {
            let value = self.shadow[slot].load(Ordering::Acquire);
            if value != self.last[slot] {
                self.last[slot] = value;
                self.real.lock().unwrap().push((slot, value));
                rang = true;
            }
        }
        rang
    }

    fn is_empty(&self) -> bool {
        false
    }
}

/// A guest process: stores go to the shadow, or trap.
struct Guest {
    shadow: Arc<[AtomicU64; 2]>,
    /// The page table's lock, and whether the shadow's page is behind a trap.
    trap: Mutex<bool>,
    /// The watcher does one thing after the other.
    watcher: Mutex<()>,
}

impl Guest {
    fn new(shadow: &Arc<[AtomicU64; 2]>) -> Self {
        Guest { shadow: shadow.clone(), trap: Mutex::new(false), watcher: Mutex::new(()) }
    }

    fn arm(&self, pump: &Handover<Pair>) {
        let watcher = self.watcher.lock().unwrap();
        *self.trap.lock().unwrap() = true;
        pump.arm(true);
        drop(watcher);
    }

    /// A store of the program, which the CPU tries again after each trap.
    fn ring(&self, pump: &Handover<Pair>, slot: usize, value: u64) {
        loop {
            let trap = self.trap.lock().unwrap();
            if !*trap {
                self.shadow[slot].store(value, Ordering::Release);
                return;
            }
            drop(trap);
            // The watcher brings the shadow back and tells the host.
            let watcher = self.watcher.lock().unwrap();
            *self.trap.lock().unwrap() = false;
            pump.arm(false);
            drop(watcher);
        }
    }
}

/// A pump, a guest that rings on it, and the real doorbells in the order in which they rang.
type Setting = (Arc<Handover<Pair>>, Guest, Arc<Mutex<Vec<(usize, u64)>>>);

fn setting() -> Setting {
    let shadow = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let real = Arc::new(Mutex::new(Vec::new()));
    let bells = Pair { shadow: shadow.clone(), last: [0; 2], real: real.clone() };
    (Arc::new(Handover::new(bells)), Guest::new(&shadow), real)
}

/// Runs turns until the real doorbell has `value`. A pump that sleeps though a ring has not come through never gets
/// there, which loom reports as a deadlock.
fn pump_until(pump: &Handover<Pair>, real: &Mutex<Vec<(usize, u64)>>, value: (usize, u64)) {
    while !real.lock().unwrap().contains(&value) {
        if pump.turn() == Turn::Still {
            thread::yield_now();
        }
    }
}

/// All interleavings with at most so many preemptions.
fn bounded(preemptions: usize, check: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(check);
}

#[test]
fn no_ring_is_lost_while_the_guest_arms_and_the_pump_goes_to_sleep() {
    bounded(3, || {
        let (pump, guest, real) = setting();
        let guest = Arc::new(guest);
        let program = {
            let (pump, guest) = (pump.clone(), guest.clone());
            thread::spawn(move || guest.ring(&pump, 1, 7))
        };
        let watcher = {
            let (pump, guest) = (pump.clone(), guest.clone());
            thread::spawn(move || guest.arm(&pump))
        };
        pump_until(&pump, &real, (1, 7));
        program.join().unwrap();
        watcher.join().unwrap();
        assert_eq!(*real.lock().unwrap(), [(1, 7)], "once");
    });
}

#[test]
fn values_come_in_order_and_the_last_one_always() {
    bounded(3, || {
        let (pump, guest, real) = setting();
        let guest = Arc::new(guest);
        guest.arm(&pump);
        let program = {
            let (pump, guest) = (pump.clone(), guest.clone());
            thread::spawn(move || {
                guest.ring(&pump, 0, 1);
                guest.ring(&pump, 0, 2);
            })
        };
        pump_until(&pump, &real, (0, 2));
        program.join().unwrap();
        let real = real.lock().unwrap();
        assert!(matches!(real.as_slice(), [(0, 2)] | [(0, 1), (0, 2)]), "{real:?}");
    });
}

#[test]
fn two_threads_ring_while_the_guest_arms() {
    bounded(2, || {
        let (pump, guest, real) = setting();
        let guest = Arc::new(guest);
        let ring = |slot: usize, value: u64| {
            let (pump, guest) = (pump.clone(), guest.clone());
            thread::spawn(move || guest.ring(&pump, slot, value))
        };
        let (first, second) = (ring(0, 3), ring(1, 4));
        guest.arm(&pump);
        pump_until(&pump, &real, (0, 3));
        pump_until(&pump, &real, (1, 4));
        first.join().unwrap();
        second.join().unwrap();
        assert_eq!(real.lock().unwrap().len(), 2, "each once");
    });
}

/// These tests themselves: a guest that tells the host first and lets its stores trap afterwards does lose rings.
#[test]
#[should_panic(expected = "deadlock")]
fn a_guest_that_arms_in_the_wrong_order_is_found_out() {
    bounded(3, || {
        let (pump, Guest { shadow, .. }, real) = setting();
        let shadow = shadow.clone();
        let program = {
            let pump = pump.clone();
            // This store is too early for the trap.
            thread::spawn(move || {
                shadow[1].store(7, Ordering::Release);
                drop(pump);
            })
        };
        pump.arm(true);
        // Here the trap would be armed.
        pump_until(&pump, &real, (1, 7));
        program.join().unwrap();
    });
}
