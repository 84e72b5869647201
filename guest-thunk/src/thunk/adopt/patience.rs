//! How long threads may take to stop. Times are nanoseconds of the monotonic clock.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

/// How long a thread may take to stop. One that sleeps in the kernel where no signal reaches it (a slow device, a vfork
/// whose child has not called exec yet) cannot be waited for without end.
const PATIENCE_NS: i64 = 5_000_000_000;

/// The same after a thread did not: all others stand still meanwhile, each time.
const LITTLE_PATIENCE_NS: i64 = 500_000_000;

/// How long nothing is stopped after that; twice as long each time, up to 64 seconds.
const QUIET_NS: i64 = 2_000_000_000;

/// What became of the last attempts. A process with a thread that does not stop would else stand still for seconds at each.
pub struct Attempts {
    failures: AtomicU32,
    /// Nothing is tried before.
    quiet_until: AtomicI64,
}

impl Attempts {
    /// None yet.
    pub const fn new() -> Attempts {
        Attempts { failures: AtomicU32::new(0), quiet_until: AtomicI64::new(0) }
    }

    /// How long a thread may take to stop now. None: it is too early to try again.
    pub fn patience(&self, now: i64) -> Option<i64> {
        match self.failures.load(Ordering::Relaxed) {
            0 => Some(PATIENCE_NS),
            _ => (now >= self.quiet_until.load(Ordering::Relaxed)).then_some(LITTLE_PATIENCE_NS),
        }
    }

    /// A thread did not stop in time.
    pub fn failed(&self, now: i64) {
        let failures = self.failures.load(Ordering::Relaxed);
        let quiet = QUIET_NS << failures.min(5);
        self.failures.store(failures.saturating_add(1), Ordering::Relaxed);
        self.quiet_until.store(now.saturating_add(quiet), Ordering::Relaxed);
    }

    /// All did.
    pub fn succeeded(&self) {
        self.failures.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process with a thread that does not stop stands still for a moment from time to time, not for seconds at each call.
    #[test]
    fn after_a_thread_did_not_stop_others_are_stopped_rarely_and_shortly() {
        let attempts = Attempts::new();
        let second = 1_000_000_000;
        assert_eq!(attempts.patience(0), Some(PATIENCE_NS));
        attempts.failed(10 * second);
        assert_eq!(attempts.patience(10 * second), None);
        assert_eq!(attempts.patience(12 * second), Some(LITTLE_PATIENCE_NS));
        attempts.failed(20 * second);
        assert_eq!(
            (attempts.patience(23 * second), attempts.patience(24 * second)),
            (None, Some(LITTLE_PATIENCE_NS))
        );
        for _ in 0..50 {
            attempts.failed(30 * second);
        }
        assert_eq!(
            (attempts.patience(93 * second), attempts.patience(94 * second)),
            (None, Some(LITTLE_PATIENCE_NS))
        );
        attempts.succeeded();
        assert_eq!(attempts.patience(30 * second), Some(PATIENCE_NS));
    }
}
