//! What the watcher may take of a CPU.
//!
//! Where doorbells are is read from a list of all the process's mappings, which takes long in a process that has many. A program
//! that rings now and then shall not pay for each time, while one that has just begun to wait shall cost the host nothing soon.

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

/// One part in so many of a CPU in the long run.
const SHARE: u32 = 64;

/// What can be taken at once after a time without any.
const MOST: Duration = Duration::from_millis(500);

/// What this thread has had of a CPU.
pub fn spent() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Time of a CPU that is left to a thread.
#[derive(Debug)]
pub struct Allowance {
    left: Duration,
    /// It has grown until then.
    since: Instant,
}

impl Allowance {
    /// All of it.
    pub fn new(now: Instant) -> Allowance {
        Allowance { left: MOST, since: now }
    }

    /// So much has been taken. How long to take none: zero as long as there is some left.
    pub fn take(&mut self, taken: Duration, now: Instant) -> Duration {
        let grown = now.saturating_duration_since(self.since).checked_div(SHARE).unwrap_or_default();
        self.since = self.since.max(now);
        self.left = self.left.saturating_add(grown).min(MOST);
        let lacking = taken.saturating_sub(self.left);
        self.left = self.left.saturating_sub(taken);
        let pause = lacking.saturating_mul(SHARE);
        // It grows by what is lacking meanwhile.
        self.since = self.since.checked_add(pause).unwrap_or(self.since);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_can_be_taken_once_and_a_small_share_again_and_again() {
        let begin = Instant::now();
        let (mut now, mut taken) = (begin, Duration::ZERO);
        let mut allowance = Allowance::new(now);
        let each = Duration::from_millis(40);
        for _ in 0..12 {
            assert_eq!(allowance.take(each, now), Duration::ZERO);
            taken += each;
        }
        for _ in 0..100 {
            taken += each;
            now += allowance.take(each, now);
        }
        assert!(taken <= MOST + (now - begin) / SHARE, "{taken:?} in {:?}", now - begin);
        // All of it is there again after a rest, and no more than that.
        now += 1000 * MOST;
        assert_eq!(allowance.take(MOST, now), Duration::ZERO);
        assert_eq!(allowance.take(each, now), each * SHARE);
    }
}
