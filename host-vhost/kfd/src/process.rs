//! What belongs to the KFD process as a whole: apertures, address spaces, cache policy, clocks, XNACK, scratch, trap
//! handler, runtime state, tiling.

use std::os::fd::{AsFd, AsRawFd};

use kfd_abi::aperture::{GetProcessAperturesNewArgs, ProcessDeviceApertures};
use kfd_abi::clock::GetClockCountersArgs;
use kfd_abi::debug::RuntimeEnableArgs;
use kfd_abi::kfd::request;
use kfd_abi::memory::{
    AcquireVmArgs, GetTileConfigArgs, SetMemoryPolicyArgs, SetScratchBackingVaArgs, SetTrapHandlerArgs,
};
use kfd_abi::svm::SetXnackModeArgs;
use nix::errno::Errno;

use crate::call::{address, arguments, ioctl};
use crate::error::KfdError;
use crate::kfd::Kfd;
use crate::render::RenderNode;

arguments! {
    GetProcessAperturesNewArgs = "AMDKFD_IOC_GET_PROCESS_APERTURES_NEW", request::GET_PROCESS_APERTURES_NEW;
    AcquireVmArgs = "AMDKFD_IOC_ACQUIRE_VM", request::ACQUIRE_VM;
    SetMemoryPolicyArgs = "AMDKFD_IOC_SET_MEMORY_POLICY", request::SET_MEMORY_POLICY;
    GetClockCountersArgs = "AMDKFD_IOC_GET_CLOCK_COUNTERS", request::GET_CLOCK_COUNTERS;
    SetXnackModeArgs = "AMDKFD_IOC_SET_XNACK_MODE", request::SET_XNACK_MODE;
    SetScratchBackingVaArgs = "AMDKFD_IOC_SET_SCRATCH_BACKING_VA", request::SET_SCRATCH_BACKING_VA;
    SetTrapHandlerArgs = "AMDKFD_IOC_SET_TRAP_HANDLER", request::SET_TRAP_HANDLER;
    RuntimeEnableArgs = "AMDKFD_IOC_RUNTIME_ENABLE", request::RUNTIME_ENABLE;
    GetTileConfigArgs = "AMDKFD_IOC_GET_TILE_CONFIG", request::GET_TILE_CONFIG;
}

/// Most GPUs that [`Kfd::apertures`] takes from the kernel. The kernel's topology has at most 128 nodes
/// (`MAX_GPU_INSTANCE`, kfd_priv.h, is 64).
const MAX_APERTURES: u32 = 256;

/// Cache policy of a GPU's memory, as SET_MEMORY_POLICY takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyRequest {
    /// The GPU.
    pub gpu_id: u32,
    /// `KFD_IOC_CACHE_POLICY_*` outside of the alternate aperture.
    pub default_policy: u32,
    /// `KFD_IOC_CACHE_POLICY_*` inside.
    pub alternate_policy: u32,
    /// GPU address where the alternate aperture begins.
    pub alternate_base: u64,
    /// Its bytes.
    pub alternate_size: u64,
}

/// The clocks of a GPU and of the CPU, read together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clocks {
    /// The GPU's counter, in its own ticks; 0 without a GPU.
    pub gpu: u64,
    /// `CLOCK_MONOTONIC_RAW` in ns.
    pub cpu: u64,
    /// `CLOCK_BOOTTIME` in ns.
    pub system: u64,
    /// Ticks of the system clock per second.
    pub system_frequency: u64,
}

/// Tiling of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TileConfig {
    /// `GB_TILE_MODE*`
    pub tiles: Vec<u32>,
    /// `GB_MACROTILE_MODE*`
    pub macro_tiles: Vec<u32>,
    /// `GB_ADDR_CONFIG`
    pub gb_addr_config: u32,
    /// Memory banks.
    pub num_banks: u32,
    /// Memory ranks.
    pub num_ranks: u32,
}

impl Kfd {
    /// `AMDKFD_IOC_GET_PROCESS_APERTURES_NEW`: the apertures of all GPUs of the host.
    pub fn apertures(&self) -> Result<Vec<ProcessDeviceApertures>, KfdError> {
        let mut args = GetProcessAperturesNewArgs::default();
        ioctl(self.as_fd(), &mut args, || "num_of_nodes 0".into())?;
        let count = args.num_of_nodes;
        if count == 0 {
            return Ok(Vec::new());
        }
        if count > MAX_APERTURES {
            return Err(KfdError::new(
                "AMDKFD_IOC_GET_PROCESS_APERTURES_NEW",
                format!("num_of_nodes {count}, expected at most {MAX_APERTURES}"),
                Errno::E2BIG,
            ));
        }
        let mut apertures = vec![ProcessDeviceApertures::default(); count as usize];
        args.kfd_process_device_apertures_ptr = address(&mut apertures);
        args.num_of_nodes = count;
        ioctl(self.as_fd(), &mut args, || format!("num_of_nodes {count}"))?;
        apertures.truncate(args.num_of_nodes as usize);
        Ok(apertures)
    }

    /// `AMDKFD_IOC_ACQUIRE_VM`: the KFD process uses the address space of the open render node from now on.
    pub fn acquire_vm(&self, gpu_id: u32, render: &RenderNode) -> Result<(), KfdError> {
        let file = render.as_fd().as_raw_fd();
        let mut args = AcquireVmArgs { drm_fd: file.cast_unsigned(), gpu_id };
        ioctl(self.as_fd(), &mut args, || format!("gpu_id {gpu_id}, drm_fd {file}"))
    }

    /// `AMDKFD_IOC_SET_MEMORY_POLICY`
    pub fn set_memory_policy(&self, policy: &PolicyRequest) -> Result<(), KfdError> {
        let mut args = SetMemoryPolicyArgs {
            alternate_aperture_base: policy.alternate_base,
            alternate_aperture_size: policy.alternate_size,
            gpu_id: policy.gpu_id,
            default_policy: policy.default_policy,
            alternate_policy: policy.alternate_policy,
            ..Default::default()
        };
        ioctl(self.as_fd(), &mut args, || format!("{policy:?}"))
    }

    /// `AMDKFD_IOC_GET_CLOCK_COUNTERS`; a `gpu_id` that the kernel does not know gives the CPU's clocks alone.
    pub fn clocks(&self, gpu_id: u32) -> Result<Clocks, KfdError> {
        let mut args = GetClockCountersArgs { gpu_id, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("gpu_id {gpu_id}"))?;
        Ok(Clocks {
            gpu: args.gpu_clock_counter,
            cpu: args.cpu_clock_counter,
            system: args.system_clock_counter,
            system_frequency: args.system_clock_freq,
        })
    }

    /// `AMDKFD_IOC_SET_XNACK_MODE`: 1 on, 0 off, negative only asks. Returns the mode.
    pub fn set_xnack_mode(&self, mode: i32) -> Result<i32, KfdError> {
        let mut args = SetXnackModeArgs { xnack_enabled: mode };
        ioctl(self.as_fd(), &mut args, || format!("xnack_enabled {mode}"))?;
        Ok(args.xnack_enabled)
    }

    /// `AMDKFD_IOC_SET_SCRATCH_BACKING_VA`: `va` is a GPU address.
    pub fn set_scratch_backing_va(&self, gpu_id: u32, va: u64) -> Result<(), KfdError> {
        let mut args = SetScratchBackingVaArgs { va_addr: va, gpu_id, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("gpu_id {gpu_id}, va_addr {va:#x}"))
    }

    /// `AMDKFD_IOC_SET_TRAP_HANDLER`: both are GPU addresses.
    pub fn set_trap_handler(&self, gpu_id: u32, tba: u64, tma: u64) -> Result<(), KfdError> {
        let mut args = SetTrapHandlerArgs { tba_addr: tba, tma_addr: tma, gpu_id, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("gpu_id {gpu_id}, tba_addr {tba:#x}, tma_addr {tma:#x}"))
    }

    /// `AMDKFD_IOC_RUNTIME_ENABLE`: `r_debug` is kept by the kernel for a debugger and not followed. Returns the
    /// capabilities mask.
    ///
    /// Enabled, the kernel reads and writes memory of this process where a queue that has an exception has its context save
    /// area: see [`crate::ExceptionPage`].
    pub fn runtime_enable(&self, r_debug: u64, mode_mask: u32) -> Result<u32, KfdError> {
        let mut args = RuntimeEnableArgs { r_debug, mode_mask, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("mode_mask {mode_mask:#x}"))?;
        Ok(args.capabilities_mask)
    }

    /// `AMDKFD_IOC_GET_TILE_CONFIG`, with room for that many entries of each list.
    pub fn tile_config(&self, gpu_id: u32, tiles: u32, macro_tiles: u32) -> Result<TileConfig, KfdError> {
        let mut config = TileConfig {
            tiles: vec![0; tiles as usize],
            macro_tiles: vec![0; macro_tiles as usize],
            ..Default::default()
        };
        let mut args = GetTileConfigArgs {
            tile_config_ptr: address(&mut config.tiles),
            macro_tile_config_ptr: address(&mut config.macro_tiles),
            num_tile_configs: tiles,
            num_macro_tile_configs: macro_tiles,
            gpu_id,
            ..Default::default()
        };
        ioctl(self.as_fd(), &mut args, || {
            format!("gpu_id {gpu_id}, num_tile_configs {tiles}, num_macro_tile_configs {macro_tiles}")
        })?;
        config.tiles.truncate(args.num_tile_configs as usize);
        config.macro_tiles.truncate(args.num_macro_tile_configs as usize);
        config.gb_addr_config = args.gb_addr_config;
        config.num_banks = args.num_banks;
        config.num_ranks = args.num_ranks;
        Ok(config)
    }
}
