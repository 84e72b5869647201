//! CPU time of processes, exact enough for what should cost next to nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

/// CPU time that the threads of these processes have had, as far as they still run.
///
/// The kernel counts it in nanoseconds (`/proc/PID/task/TID/schedstat`, Documentation/scheduler/sched-stats.rst), where
/// `utime` and `stime` count ticks.
///
/// # Errors
/// A process that has ended, or a kernel without `CONFIG_SCHED_INFO`.
pub fn of(processes: &BTreeSet<u32>) -> Result<Duration> {
    let mut sum = 0u64;
    for pid in processes {
        let tasks = format!("/proc/{pid}/task");
        for task in fs::read_dir(&tasks).with_context(|| format!("read {tasks}"))? {
            // A thread may end while it is looked at.
            let Ok(task) = task else { continue };
            if let Some(time) = of_thread(&task.path()) {
                sum = sum.saturating_add(time);
            }
        }
    }
    anyhow::ensure!(sum > 0 || processes.is_empty(), "this kernel has no schedstat");
    Ok(Duration::from_nanos(sum))
}

fn of_thread(task: &Path) -> Option<u64> {
    let text = fs::read_to_string(task.join("schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_does_is_counted() {
        let own = BTreeSet::from([std::process::id()]);
        let before = of(&own).unwrap();
        let mut number = 1u64;
        while of(&own).unwrap() < before + Duration::from_millis(20) {
            number = std::hint::black_box(number.wrapping_mul(3));
        }
        assert!(of(&BTreeSet::from([u32::MAX])).is_err());
    }
}
