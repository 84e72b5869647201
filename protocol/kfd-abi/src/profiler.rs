//! Profiler control (PROFILER).

use crate::layout::{Since::KfdMinor, abi_consts, abi_structs};
use crate::version::minor;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Settings of a GPU for [`KFD_IOC_PROFILER_PMC`].
    struct PmcSettings = "struct kfd_ioctl_pmc_settings", size 12, since(KfdMinor(minor::PROFILER)) {
        /// Which GPU.
        gpu_id: u32 = 0;
        /// Keep the GPU for profiling.
        lock: u32 = 4;
        /// Switch the performance counters on for its queues.
        perfcount_enable: u32 = 8;
    }

    /// Peak TOPS limiter of a GPU for [`KFD_IOC_PROFILER_PTL_CONTROL`].
    struct PtlControl = "struct kfd_ioctl_ptl_control", size 8, since(KfdMinor(minor::PROFILER)) {
        /// Which GPU.
        gpu_id: u32 = 0;
        /// 1 on, 0 off.
        enable: u32 = 4;
    }

    /// Argument of PROFILER.
    struct ProfilerArgs = "struct kfd_ioctl_profiler_args", size 16, since(KfdMinor(minor::PROFILER)) {
        /// In: `KFD_IOC_PROFILER_*`.
        op: u32 = 0;
        /// The union of [`PmcSettings`], [`PtlControl`] and the version (one u32, out).
        data as "pmc": [u32; 3] = 4;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// The version that [`KFD_IOC_PROFILER_VERSION`] answers.
        KFD_IOC_PROFILER_VERSION_NUM = 1, since(KfdMinor(minor::PROFILER));
    }
    Enum u32 {
        /// Performance counters.
        KFD_IOC_PROFILER_PMC = 0, since(KfdMinor(minor::PROFILER));
        /// Ask for the version.
        KFD_IOC_PROFILER_VERSION = 2, since(KfdMinor(minor::PROFILER));
        /// Peak TOPS limiter.
        KFD_IOC_PROFILER_PTL_CONTROL = 3, since(KfdMinor(minor::PROFILER));
    }
}
