//! What belongs to the KFD process as a whole: apertures, memory policy, clocks, XNACK, trap handler, scratch,
//! runtime state.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{GpuId, GuestVa};

/// `struct kfd_process_device_apertures`: where the GPU sees LDS, scratch and global memory. Limits are inclusive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Apertures {
    /// First address of the LDS aperture.
    pub lds_base: u64,
    /// Last address of the LDS aperture.
    pub lds_limit: u64,
    /// First address of the scratch aperture.
    pub scratch_base: u64,
    /// Last address of the scratch aperture.
    pub scratch_limit: u64,
    /// First address of the GPU's virtual memory.
    pub gpuvm_base: u64,
    /// Last address of the GPU's virtual memory.
    pub gpuvm_limit: u64,
    /// The GPU.
    pub gpu_id: GpuId,
    /// Zero.
    pub pad: u32,
}

/// `struct kfd_ioctl_set_memory_policy_args`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SetMemoryPolicyRequest {
    /// Start of the alternate aperture.
    pub alternate_aperture_base: GuestVa,
    /// Size of the alternate aperture in bytes.
    pub alternate_aperture_size: u64,
    /// The GPU.
    pub gpu_id: GpuId,
    /// `KFD_IOC_CACHE_POLICY_*` of all other memory.
    pub default_policy: u32,
    /// `KFD_IOC_CACHE_POLICY_*` of the alternate aperture.
    pub alternate_policy: u32,
    /// Zero.
    pub pad: u32,
}

/// `struct kfd_ioctl_get_clock_counters_args`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ClockCounters {
    /// The GPU's counter, in its own ticks.
    pub gpu_clock_counter: u64,
    /// The host's `CLOCK_MONOTONIC_RAW`, in ns.
    pub cpu_clock_counter: u64,
    /// The host's `CLOCK_BOOTTIME`, in ns.
    pub system_clock_counter: u64,
    /// Ticks of the system clock in a second.
    pub system_clock_freq: u64,
}

/// XNACK mode: 1 on, 0 off, negative to ask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct XnackMode {
    /// The mode.
    pub mode: i32,
    /// Zero.
    pub pad: u32,
}

/// `struct kfd_ioctl_set_scratch_backing_va_args`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SetScratchBackingVaRequest {
    /// Start of the scratch memory; a multiple of 64 KiB.
    pub va: GuestVa,
    /// The GPU.
    pub gpu_id: GpuId,
    /// Zero.
    pub pad: u32,
}

/// `struct kfd_ioctl_set_trap_handler_args`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SetTrapHandlerRequest {
    /// Address of the handler's code; a multiple of 256.
    pub tba: GuestVa,
    /// Address of the handler's memory.
    pub tma: GuestVa,
    /// The GPU.
    pub gpu_id: GpuId,
    /// Zero.
    pub pad: u32,
}

/// `struct kfd_ioctl_runtime_enable_args`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RuntimeEnableRequest {
    /// Address of the runtime's debug structure in the guest process; the kernel only keeps it for a debugger.
    pub r_debug: GuestVa,
    /// `KFD_RUNTIME_ENABLE_MODE_*`; 0 disables.
    pub mode: u32,
    /// Zero.
    pub pad: u32,
}

/// Answer to a runtime enable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RuntimeEnableAnswer {
    /// `capabilities_mask` of the kernel.
    pub capabilities: u32,
    /// Zero.
    pub pad: u32,
}

/// `struct kfd_ioctl_get_tile_config_args`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct GetTileConfigRequest {
    /// The GPU.
    pub gpu_id: GpuId,
    /// Most tile entries that the asker takes, up to 64.
    pub max_tile_configs: u32,
    /// Most macro tile entries that the asker takes, up to 64.
    pub max_macro_tile_configs: u32,
    /// Zero.
    pub pad: u32,
}

/// Answer with the sizes of the two lists in the tail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct GetTileConfigAnswer {
    /// Tile entries in the tail.
    pub num_tile_configs: u32,
    /// Macro tile entries in the tail, behind the tile entries.
    pub num_macro_tile_configs: u32,
    /// `GB_ADDR_CONFIG`
    pub gb_addr_config: u32,
    /// DRAM banks.
    pub num_banks: u32,
    /// DRAM ranks.
    pub num_ranks: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<Apertures>() == 56);
const _: () = assert!(size_of::<SetMemoryPolicyRequest>() == 32);
const _: () = assert!(size_of::<ClockCounters>() == 32);
const _: () = assert!(size_of::<XnackMode>() == 8);
const _: () = assert!(size_of::<SetScratchBackingVaRequest>() == 16);
const _: () = assert!(size_of::<SetTrapHandlerRequest>() == 24);
const _: () = assert!(size_of::<RuntimeEnableRequest>() == 16);
const _: () = assert!(size_of::<GetTileConfigRequest>() == 16);
const _: () = assert!(size_of::<GetTileConfigAnswer>() == 24);
