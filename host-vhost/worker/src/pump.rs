//! The doorbell pump. A guest process cannot map a page of doorbells (KFD gives it to the KFD process alone), so it rings in
//! memory of its own, the shadow, and a thread here passes on what changes.
//!
//! The thread polls closely after a ring, backs off, and sleeps for good where the guest has said that it announces its next
//! store (`handover`). It holds the lock of the doorbells while it looks, so that whoever takes a shadow away under
//! that lock knows that it is not touched any more.

mod bells;
mod handover;
#[cfg(test)]
#[allow(dead_code)] // it uses some of `handover`
mod loomed;

/// What `handover` runs on.
mod sync {
    pub use std::sync::{Condvar, Mutex, MutexGuard};
}

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub use bells::{Doorbells, GuestWords};
use handover::{Handover, Turn};

/// Polling without a pause for so long after a ring.
const CLOSE: Duration = Duration::from_micros(50);
/// Longest pause between two looks at first. The kernel adds up to 50 us (the timer slack of a thread), so that it is 100 us
/// from a store to the look at it.
const PAUSE: Duration = Duration::from_micros(50);
/// Without a ring for so long the doorbells are still, and the guest may let its stores trap.
const STILL: Duration = Duration::from_millis(100);
/// A guest that has not done so by then cannot; longer pauses are all that is left to save.
const LONG: Duration = Duration::from_secs(1);
/// Longest pause then.
const LONG_PAUSE: Duration = Duration::from_millis(1);
/// Stack of the thread in bytes.
const STACK_BYTES: usize = 128 * 1024;

/// Pauses between looks begin with this.
const FIRST_PAUSE: Duration = Duration::from_micros(1);
/// Looks at nothing between two looks at the doorbells while polling closely. Each is a pause instruction of up to 150 ns
/// (81 ns where it was measured), and adds half of that to what a ring takes on average.
const SPINS: u32 = 2;

/// The pump of a context.
#[derive(Debug)]
pub struct Pump {
    shared: Arc<Shared>,
    /// Whether the thread runs.
    started: Mutex<bool>,
}

#[derive(Debug)]
struct Shared {
    handover: Handover<Doorbells>,
    /// Those who want the lock of the doorbells: a thread that polls takes it again and again, and std's locks are not fair.
    wanted: AtomicUsize,
    pace: Mutex<Pace>,
    /// Ends a pause.
    called: Condvar,
    ended: AtomicBool,
}

#[derive(Debug)]
struct Pace {
    /// When something rang, or could be about to, last.
    rang: Instant,
    /// Changes when a pause is to end.
    calls: u64,
}

impl Shared {
    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the doorbells while the pump holds off.
    fn with<R>(&self, run: impl FnOnce(&Handover<Doorbells>) -> R) -> R {
        self.wanted.fetch_add(1, Ordering::SeqCst);
        let result = run(&self.handover);
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Polls closely from now on.
    fn expect_rings(&self) {
        let mut pace = self.pace();
        pace.rang = Instant::now();
        pace.calls = pace.calls.wrapping_add(1);
        self.called.notify_all();
    }

    /// The thread.
    fn run(&self) {
        let mut pause = FIRST_PAUSE;
        while !self.ended.load(Ordering::Acquire) {
            let calls = self.pace().calls;
            match self.handover.turn() {
                Turn::Woken => pause = FIRST_PAUSE,
                Turn::Rang => {
                    self.pace().rang = Instant::now();
                    pause = FIRST_PAUSE;
                }
                Turn::Still => pause = self.rest(calls, pause),
            }
            while self.wanted.load(Ordering::SeqCst) != 0 {
                thread::yield_now();
            }
        }
    }

    /// Passes the time to the next look. Returns the next pause.
    fn rest(&self, calls: u64, pause: Duration) -> Duration {
        let pace = self.pace();
        let still = pace.rang.elapsed();
        if still < CLOSE {
            drop(pace);
            (0..SPINS).for_each(|_| std::hint::spin_loop());
            return FIRST_PAUSE;
        }
        if pace.calls == calls {
            // However it ends, the doorbells are looked at next.
            let _ = self.called.wait_timeout(pace, pause);
        }
        pause.saturating_mul(2).min(if still < LONG { PAUSE } else { LONG_PAUSE })
    }
}

impl Pump {
    /// A pump without doorbells, which is not running yet.
    pub fn new() -> Self {
        let pace = Pace { rang: Instant::now(), calls: 0 };
        Pump {
            shared: Arc::new(Shared {
                handover: Handover::new(Doorbells::default()),
                wanted: AtomicUsize::new(0),
                pace: Mutex::new(pace),
                called: Condvar::new(),
                ended: AtomicBool::new(false),
            }),
            started: Mutex::new(false),
        }
    }

    /// Starts the thread, if it does not run yet.
    pub fn start(&self) -> std::io::Result<()> {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        if !*started {
            let shared = self.shared.clone();
            let thread = thread::Builder::new().name("doorbells".into()).stack_size(STACK_BYTES);
            thread.spawn(move || shared.run())?;
            *started = true;
        }
        Ok(())
    }

    /// Looks something up.
    pub fn look_up<R>(&self, look: impl FnOnce(&Doorbells) -> R) -> R {
        self.shared.with(|handover| look(&handover.lock().bells))
    }

    /// Changes the doorbells, and has them looked at.
    pub fn change<R>(&self, change: impl FnOnce(&mut Doorbells) -> R) -> R {
        let result = self.shared.with(|handover| handover.change(change));
        self.shared.expect_rings();
        result
    }

    /// The guest memory for which `gone` holds is not touched any more when this returns.
    pub fn fence(&self, gone: impl Fn(&GuestWords) -> bool) {
        self.shared.with(|handover| handover.lock().bells.fence(gone));
    }

    /// New memory of the guest stands for doorbells. Whether stores to it trap has not been said.
    pub fn set_shadow(&self, gpu: u32, shadow: GuestWords) {
        self.change(|doorbells| doorbells.set_shadow(gpu, shadow));
        self.ring();
    }

    /// The guest rings: the doorbells are looked at now, and its next store is not announced.
    pub fn ring(&self) {
        self.shared.with(|handover| handover.arm(false));
        self.shared.expect_rings();
    }

    /// From now on the guest announces its next store.
    pub fn arm(&self) {
        self.shared.with(|handover| handover.arm(true));
        let mut pace = self.shared.pace();
        pace.calls = pace.calls.wrapping_add(1);
        self.shared.called.notify_all();
    }

    /// Waits until nothing has rung for [`STILL`]; `false` if `timeout` is over before.
    pub fn wait_still(&self, timeout: Duration) -> bool {
        let begin = Instant::now();
        let mut pace = self.shared.pace();
        loop {
            let left = STILL.saturating_sub(pace.rang.elapsed());
            if left.is_zero() {
                return true;
            }
            let patience = timeout.saturating_sub(begin.elapsed());
            if patience.is_zero() {
                return false;
            }
            let waited = self.shared.called.wait_timeout(pace, left.min(patience));
            pace = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        self.ring();
    }
}

#[cfg(test)]
mod tests;
