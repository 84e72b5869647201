//! CPU time of processes, exact enough for what should cost next to nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// CPU time that these processes have had since they began, with all their threads, also those that have ended.
///
/// It is what their CPU clocks show (clock_getcpuclockid(3)), which the kernel counts in nanoseconds, where `utime` and
/// `stime` of `/proc` count ticks. `schedstat` of `/proc/PID/task` knows threads only as long as they run.
///
/// # Errors
/// A process that has ended.
pub fn of(processes: &BTreeSet<u32>) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for pid in processes {
        let what = || format!("CPU clock of process {pid}");
        let clock = clock_getcpuclockid(Pid::from_raw(i32::try_from(*pid).with_context(what)?));
        let time = clock.and_then(clock_gettime).with_context(what)?;
        sum = sum.saturating_add(time.into());
    }
    Ok(sum)
}

/// CPU time that these processes have had since [`of`] gave `before` for them.
///
/// # Errors
/// A process that has ended.
pub fn since(processes: &BTreeSet<u32>, before: Duration) -> Result<Duration> {
    Ok(of(processes)?.saturating_sub(before))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Duration = Duration::from_millis(20);

    fn work(own: &BTreeSet<u32>, until: Duration) {
        let mut number = 1u64;
        while of(own).unwrap() < until {
            number = std::hint::black_box(number.wrapping_mul(3));
        }
    }

    #[test]
    fn what_a_process_does_is_counted() {
        let own = BTreeSet::from([std::process::id()]);
        let before = of(&own).unwrap();
        work(&own, before + WORK);
        assert!(since(&own, before).unwrap() >= WORK);
        assert_eq!(since(&own, Duration::MAX).unwrap(), Duration::ZERO);
        assert_eq!(of(&BTreeSet::new()).unwrap(), Duration::ZERO);
        // No process has a number as high as PID_MAX_LIMIT of the kernel (include/linux/threads.h), and the other is none.
        for pid in [1 << 22, u32::MAX] {
            assert!(of(&BTreeSet::from([pid])).is_err(), "{pid}");
        }
    }

    #[test]
    fn what_a_thread_did_is_counted_when_it_has_ended() {
        let own = BTreeSet::from([std::process::id()]);
        let before = of(&own).unwrap();
        let worked = std::thread::scope(|scope| {
            scope.spawn(|| work(&own, before + 5 * WORK)).join().unwrap();
            of(&own).unwrap()
        });
        assert!(worked >= before + 5 * WORK, "{before:?}, {worked:?}");
    }
}
