//! The clocks that GET_CLOCK_COUNTERS reads.

use kfd_seam::Result;
use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of a clock.
fn nanoseconds(clock: ClockId) -> Result<u64> {
    let time = clock_gettime(clock)?;
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    let rest = u64::try_from(time.tv_nsec()).unwrap_or(0);
    Ok(seconds.saturating_mul(1_000_000_000).saturating_add(rest))
}

/// `ktime_get_raw_ns`: CLOCK_MONOTONIC_RAW.
pub fn cpu_counter() -> Result<u64> {
    nanoseconds(ClockId::CLOCK_MONOTONIC_RAW)
}

/// `ktime_get_boottime_ns`: CLOCK_BOOTTIME.
pub fn system_counter() -> Result<u64> {
    nanoseconds(ClockId::CLOCK_BOOTTIME)
}

/// Ticks of a GPU's reference clock of `khz` kHz; all time stamps of the GPU count it.
pub fn gpu_counter(khz: u32) -> Result<u64> {
    let ticks = u128::from(cpu_counter()?).saturating_mul(u128::from(khz)) / 1_000_000;
    Ok(u64::try_from(ticks).unwrap_or(u64::MAX))
}
