//! What belongs to the process as a whole.

use guest_thunk::thunk::lock::lock;
use guest_thunk::thunk::process::clock_counters;
use kfd_abi::aperture::{
    GetProcessAperturesArgs, GetProcessAperturesNewArgs, NUM_OF_SUPPORTED_GPUS, ProcessDeviceApertures,
};
use kfd_abi::clock::GetClockCountersArgs;
use kfd_abi::debug::RuntimeEnableArgs;
use kfd_abi::memory::{
    AcquireVmArgs, GetTileConfigArgs, SetMemoryPolicyArgs, SetScratchBackingVaArgs, SetTrapHandlerArgs,
};
use kfd_abi::svm::SetXnackModeArgs;
use kfd_abi::version::GetVersionArgs;
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{
    AcquireVm, GetApertures, GetTileConfig, RuntimeEnable, SetMemoryPolicy, SetScratchBackingVa,
    SetTrapHandler, SetXnackMode,
};
use virtio_kfd_protocol::limits::{MAX_GPUS, MAX_TILE_CONFIGS};
use virtio_kfd_protocol::{
    Apertures, GetTileConfigRequest, GpuId, GpuRequest, GuestVa, Nothing, RuntimeEnableRequest,
    SetMemoryPolicyRequest, SetScratchBackingVaRequest, SetTrapHandlerRequest, XnackMode,
};

use super::Call;
use crate::failure::errno;

fn apertures(of: &Apertures) -> ProcessDeviceApertures {
    ProcessDeviceApertures {
        lds_base: of.lds_base,
        lds_limit: of.lds_limit,
        scratch_base: of.scratch_base,
        scratch_limit: of.scratch_limit,
        gpuvm_base: of.gpuvm_base,
        gpuvm_limit: of.gpuvm_limit,
        gpu_id: of.gpu_id.0,
        pad: 0,
    }
}

fn small(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

impl Call<'_> {
    pub(super) fn get_version(&self) -> Result<i32> {
        self.run(|arguments: &mut GetVersionArgs| {
            (arguments.major_version, arguments.minor_version) = self.kfd.client.kfd_version();
            Ok(())
        })
    }

    fn apertures(&self) -> Result<Vec<ProcessDeviceApertures>> {
        let (_, all) = self.kfd.client.call::<GetApertures>(&Nothing {}, &[], MAX_GPUS).map_err(errno)?;
        Ok(all.iter().map(apertures).collect())
    }

    pub(super) fn get_process_apertures(&self) -> Result<i32> {
        self.run(|arguments: &mut GetProcessAperturesArgs| {
            let all = self.apertures()?;
            for (place, apertures) in arguments.process_apertures.iter_mut().zip(&all) {
                *place = *apertures;
            }
            arguments.num_of_nodes = small(all.len().min(NUM_OF_SUPPORTED_GPUS));
            Ok(())
        })
    }

    pub(super) fn get_process_apertures_new(&self) -> Result<i32> {
        self.run(|arguments: &mut GetProcessAperturesNewArgs| {
            let all = self.apertures()?;
            if arguments.num_of_nodes == 0 {
                arguments.num_of_nodes = small(all.len());
                return Ok(());
            }
            let room = usize::try_from(arguments.num_of_nodes).unwrap_or(usize::MAX).min(all.len());
            let filled = all.get(..room).unwrap_or_default();
            UserMemory.write_array(UserPtr(arguments.kfd_process_device_apertures_ptr), filled)?;
            arguments.num_of_nodes = small(filled.len());
            Ok(())
        })
    }

    /// The GPU's counter is the host's, the other clocks are the guest's. The kernel gives 0 for a GPU that it does not know.
    pub(super) fn get_clock_counters(&self) -> Result<i32> {
        self.run(|arguments: &mut GetClockCountersArgs| {
            let gpu = self.kfd.gpu(arguments.gpu_id).map(|gpu| gpu.gpu_id);
            let counters = clock_counters(&self.kfd.client, gpu).map_err(|_| Errno::EIO)?;
            arguments.gpu_clock_counter = counters.gpu_clock_counter;
            arguments.cpu_clock_counter = counters.cpu_clock_counter;
            arguments.system_clock_counter = counters.system_clock_counter;
            arguments.system_clock_freq = counters.system_clock_frequency_hz;
            Ok(())
        })
    }

    /// The host's worker takes its own render node. The process keeps the one that it named first, as for the kernel: a runtime that was
    /// unloaded and is loaded anew must not go on with what its first self has left.
    pub(super) fn acquire_vm(&self) -> Result<i32> {
        self.run(|arguments: &mut AcquireVmArgs| {
            let (file, node) = self.kfd.render_node(arguments.drm_fd).ok_or(Errno::EINVAL)?;
            let gpu = self.kfd.gpus.get(node).filter(|gpu| gpu.gpu_id.0 == arguments.gpu_id);
            let gpu_id = gpu.ok_or(Errno::EINVAL)?.gpu_id;
            let first = lock(&self.kfd.files).acquire(node, file)?;
            let answer = self.kfd.client.call::<AcquireVm>(&GpuRequest { gpu_id, pad: 0 }, &[], 0);
            if answer.is_err() && first {
                lock(&self.kfd.files).not_acquired(node);
            }
            answer.map(|_| ()).map_err(errno)
        })
    }

    pub(super) fn set_memory_policy(&self) -> Result<i32> {
        self.run(|arguments: &mut SetMemoryPolicyArgs| {
            let request = SetMemoryPolicyRequest {
                alternate_aperture_base: GuestVa(arguments.alternate_aperture_base),
                alternate_aperture_size: arguments.alternate_aperture_size,
                gpu_id: GpuId(arguments.gpu_id),
                default_policy: arguments.default_policy,
                alternate_policy: arguments.alternate_policy,
                pad: 0,
            };
            self.kfd.client.call::<SetMemoryPolicy>(&request, &[], 0).map_err(errno)?;
            Ok(())
        })
    }

    pub(super) fn set_scratch_backing_va(&self) -> Result<i32> {
        self.run(|arguments: &mut SetScratchBackingVaArgs| {
            let request = SetScratchBackingVaRequest {
                va: GuestVa(arguments.va_addr),
                gpu_id: GpuId(arguments.gpu_id),
                pad: 0,
            };
            self.kfd.client.call::<SetScratchBackingVa>(&request, &[], 0).map_err(errno)?;
            Ok(())
        })
    }

    pub(super) fn set_trap_handler(&self) -> Result<i32> {
        self.run(|arguments: &mut SetTrapHandlerArgs| {
            let request = SetTrapHandlerRequest {
                tba: GuestVa(arguments.tba_addr),
                tma: GuestVa(arguments.tma_addr),
                gpu_id: GpuId(arguments.gpu_id),
                pad: 0,
            };
            self.kfd.client.call::<SetTrapHandler>(&request, &[], 0).map_err(errno)?;
            Ok(())
        })
    }

    pub(super) fn get_tile_config(&self) -> Result<i32> {
        self.run(|arguments: &mut GetTileConfigArgs| {
            let most = small(MAX_TILE_CONFIGS);
            let request = GetTileConfigRequest {
                gpu_id: GpuId(arguments.gpu_id),
                max_tile_configs: arguments.num_tile_configs.min(most),
                max_macro_tile_configs: arguments.num_macro_tile_configs.min(most),
                pad: 0,
            };
            let room = MAX_TILE_CONFIGS.saturating_mul(2);
            let (answer, words) =
                self.kfd.client.call::<GetTileConfig>(&request, &[], room).map_err(errno)?;
            let tiles = usize::try_from(answer.num_tile_configs).unwrap_or(usize::MAX);
            let (tiles, macros) = words.split_at_checked(tiles).unwrap_or((&words, &[]));
            let cut = |list: &[u32], most: u32| -> Vec<u32> {
                list.iter().copied().take(usize::try_from(most).unwrap_or(0)).collect()
            };
            let tiles = cut(tiles, request.max_tile_configs);
            let macros = cut(macros, request.max_macro_tile_configs);
            UserMemory.write_array(UserPtr(arguments.tile_config_ptr), &tiles)?;
            UserMemory.write_array(UserPtr(arguments.macro_tile_config_ptr), &macros)?;
            arguments.num_tile_configs = small(tiles.len());
            arguments.num_macro_tile_configs = small(macros.len());
            arguments.gb_addr_config = answer.gb_addr_config;
            arguments.num_banks = answer.num_banks;
            arguments.num_ranks = answer.num_ranks;
            Ok(())
        })
    }

    pub(super) fn set_xnack_mode(&self) -> Result<i32> {
        self.run(|arguments: &mut SetXnackModeArgs| {
            let request = XnackMode { mode: arguments.xnack_enabled, pad: 0 };
            let (answer, _) = self.kfd.client.call::<SetXnackMode>(&request, &[], 0).map_err(errno)?;
            arguments.xnack_enabled = answer.mode;
            Ok(())
        })
    }

    /// Exceptions reach this process as the heads of queues' save areas say; no debugger does, which would have to attach to the
    /// host's worker.
    pub(super) fn runtime_enable(&self) -> Result<i32> {
        self.run(|arguments: &mut RuntimeEnableArgs| {
            let request = RuntimeEnableRequest {
                r_debug: GuestVa(arguments.r_debug),
                mode: arguments.mode_mask,
                pad: 0,
            };
            let (answer, _) = self.kfd.client.call::<RuntimeEnable>(&request, &[], 0).map_err(errno)?;
            arguments.capabilities_mask = answer.capabilities;
            Ok(())
        })
    }
}
