//! Either a thread moves memory of which a userfaultfd tells, or all threads are being stopped.
//!
//! The kernel holds a thread that moves such memory until what it tells has been read, and such a thread cannot be stopped
//! (`userfaultfd_event_wait_completion` sleeps as TASK_KILLABLE). If the one that is to read were stopped first, the stop would
//! fail when its patience ends, with everything standing still until then.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

/// Between two attempts. Moves and stops are as rare as they are short.
const PAUSE: Duration = Duration::from_micros(100);

/// The process that has the lock, or 0. A child of `fork` may inherit the lock of a thread that it does not have.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Whoever has it is alone with what this module is about.
#[derive(Debug)]
pub struct Alone(());

impl Alone {
    /// Waits for it. The thread can be stopped meanwhile.
    pub fn wait() -> Self {
        let own = std::process::id();
        loop {
            match OWNER.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Alone(()),
                Err(owner) if owner != own => {
                    if OWNER.compare_exchange(owner, own, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        return Alone(());
                    }
                }
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        OWNER.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn one_at_a_time_and_not_for_a_process_that_is_another() {
        let count = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let _alone = Alone::wait();
                        // Without the lock another thread's sum would be lost.
                        let seen = count.load(Ordering::Relaxed);
                        thread::yield_now();
                        count.store(seen + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 2000);
        // As a child finds it whose parent had it: no process has a number as high (PID_MAX_LIMIT).
        let alone = Alone::wait();
        OWNER.store(1 << 23, Ordering::Relaxed);
        drop(Alone::wait());
        drop(alone);
    }
}
