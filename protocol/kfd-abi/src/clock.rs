//! Clock counters.

use crate::layout::abi_structs;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of GET_CLOCK_COUNTERS.
    struct GetClockCountersArgs = "struct kfd_ioctl_get_clock_counters_args", size 40 {
        /// Out: the GPU's counter in its own ticks, 0 without a GPU.
        gpu_clock_counter: u64 = 0;
        /// Out: `CLOCK_MONOTONIC_RAW` in nanoseconds.
        cpu_clock_counter: u64 = 8;
        /// Out: `CLOCK_BOOTTIME` in nanoseconds.
        system_clock_counter: u64 = 16;
        /// Out: ticks per second of the system clock, 1e9.
        system_clock_freq: u64 = 24;
        /// In: which GPU; an unknown one gives the CPU's clocks alone.
        gpu_id: u32 = 32;
        /// Padding.
        pad: u32 = 36;
    }
}
