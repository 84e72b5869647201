//! Version, apertures, clocks, and what is set for a GPU as a whole.

use caps::{CapSet, Capability};
use kfd_abi::aperture::{
    APERTURE_LIMIT_GFX9, GPUVM_BASE_GFX9, GetProcessAperturesArgs, GetProcessAperturesNewArgs, LDS_BASE_GFX9,
    ProcessDeviceApertures, SCRATCH_BASE_GFX9,
};
use kfd_abi::clock::GetClockCountersArgs;
use kfd_abi::criu::{CriuArgs, KFD_CRIU_OP_PROCESS_INFO};
use kfd_abi::debug::{DbgTrapArgs, KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK, RuntimeEnableArgs};
use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::memory::{
    AcquireVmArgs, GetTileConfigArgs, KFD_IOC_CACHE_POLICY_COHERENT, KFD_IOC_CACHE_POLICY_NONCOHERENT,
    SetMemoryPolicyArgs, SetScratchBackingVaArgs, SetTrapHandlerArgs,
};
use kfd_abi::smi::SmiEventsArgs;
use kfd_abi::svm::SetXnackModeArgs;
use kfd_abi::version::{GetVersionArgs, KFD_IOCTL_MAJOR_VERSION};
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;

use super::{Call, Descriptor};
use crate::clock;
use crate::process::Device;
use crate::space::{TRAP_HANDLER, TRAP_HANDLER_SIZE};

/// Last GPU virtual address that user space can use: the hole of the page tables begins behind it
/// (`AMDGPU_GMC_HOLE_START`).
pub const GPUVM_LIMIT: u64 = 0x7fff_ffff_ffff;

/// Highest process id of a 64-bit kernel (`PID_MAX_LIMIT`).
const PID_MAX_LIMIT: u32 = 4 << 20;

/// Entries of `tile_mode_array` and `macrotile_mode_array` of `struct amdgpu_gfx_config`.
const TILE_MODES: usize = 32;
const MACRO_TILE_MODES: usize = 16;

/// `kfd_init_apertures_v9`.
fn apertures(device: &Device) -> ProcessDeviceApertures {
    ProcessDeviceApertures {
        lds_base: LDS_BASE_GFX9,
        lds_limit: LDS_BASE_GFX9 | APERTURE_LIMIT_GFX9,
        scratch_base: SCRATCH_BASE_GFX9,
        scratch_limit: SCRATCH_BASE_GFX9 | APERTURE_LIMIT_GFX9,
        gpuvm_base: GPUVM_BASE_GFX9,
        gpuvm_limit: GPUVM_LIMIT,
        gpu_id: device.gpu_id,
        pad: 0,
    }
}

impl Call<'_> {
    /// `kfd_ioctl_get_version`.
    pub(super) fn get_version(&self) -> Result<i32> {
        self.run(|arguments: &mut GetVersionArgs| {
            arguments.major_version = KFD_IOCTL_MAJOR_VERSION;
            arguments.minor_version = self.process.kfd_minor;
            Ok(())
        })
    }

    /// `kfd_ioctl_get_process_apertures`: the first seven GPUs.
    pub(super) fn get_process_apertures(&self) -> Result<i32> {
        self.run(|arguments: &mut GetProcessAperturesArgs| {
            arguments.num_of_nodes = 0;
            for (entry, device) in arguments.process_apertures.iter_mut().zip(&self.process.devices) {
                *entry = apertures(device);
                arguments.num_of_nodes += 1;
            }
            Ok(())
        })
    }

    /// `kfd_ioctl_get_process_apertures_new`. The upper limit of the count is that of all nodes, CPUs included.
    pub(super) fn get_process_apertures_new(&self) -> Result<i32> {
        self.run(|arguments: &mut GetProcessAperturesNewArgs| {
            let gpus = u32::try_from(self.process.devices.len()).unwrap_or(u32::MAX);
            if arguments.num_of_nodes == 0 {
                arguments.num_of_nodes = gpus;
                return Ok(());
            }
            if arguments.num_of_nodes > self.process.node_count {
                return Err(Errno::EINVAL);
            }
            let room = usize::try_from(arguments.num_of_nodes).unwrap_or(usize::MAX);
            let entries: Vec<_> =
                self.process.devices.iter().take(room).map(|device| apertures(device)).collect();
            arguments.num_of_nodes = arguments.num_of_nodes.min(gpus);
            UserMemory.write_array(UserPtr(arguments.kfd_process_device_apertures_ptr), &entries)
        })
    }

    /// `kfd_ioctl_get_clock_counters`: an unknown GPU is no error, its counter is 0.
    pub(super) fn get_clock_counters(&self) -> Result<i32> {
        self.run(|arguments: &mut GetClockCountersArgs| {
            arguments.gpu_clock_counter = match self.process.device(arguments.gpu_id) {
                Ok((_, device)) => clock::gpu_counter(device.gpu.clocks.counter_khz)?,
                Err(_) => 0,
            };
            arguments.cpu_clock_counter = clock::cpu_counter()?;
            arguments.system_clock_counter = clock::system_counter()?;
            arguments.system_clock_freq = 1_000_000_000;
            Ok(())
        })
    }

    /// `kfd_ioctl_acquire_vm`: the process keeps the render node that it named first.
    pub(super) fn acquire_vm(&self) -> Result<i32> {
        self.run(|arguments: &mut AcquireVmArgs| {
            let descriptor = self.descriptors.find(arguments.drm_fd).ok_or(Errno::EINVAL)?;
            let (index, taken) = self.process.device(arguments.gpu_id)?;
            let mut state = self.process.state();
            let device = state.device(index)?;
            match (device.drm_file, descriptor) {
                (Some(acquired), Descriptor::Render { file, .. }) if file == acquired => Ok(()),
                (Some(_), _) => Err(Errno::EBUSY),
                // The kernel lets another GPU's node pass and uses page tables of the wrong device. Here it is
                // refused at once.
                (None, Descriptor::Render { file, gpu }) if gpu == index => {
                    let trap_handler = device.trap_handler_memory(&taken.arena)?;
                    device.drm_file = Some(file);
                    taken.smi.acquired();
                    let mut space = taken.space_mut();
                    // What was mapped through the render node before stays mapped (amdgpu_vm_make_compute).
                    if let Some(drm) = state.drm_files.get_mut(&file) {
                        space.take_over(std::mem::take(&mut drm.space));
                    }
                    // kfd_process_device_init_cwsr_dgpu
                    let memory = (&taken.arena, trap_handler);
                    let flags = VmPageFlags::PAGE_READABLE | VmPageFlags::PAGE_EXECUTABLE;
                    space.map_for_the_driver(TRAP_HANDLER, TRAP_HANDLER_SIZE, memory, flags)
                }
                (None, _) => Err(Errno::EINVAL),
            }
        })
    }

    /// `kfd_ioctl_set_memory_policy`.
    pub(super) fn set_memory_policy(&self) -> Result<i32> {
        self.run(|arguments: &mut SetMemoryPolicyArgs| {
            let known = [KFD_IOC_CACHE_POLICY_COHERENT, KFD_IOC_CACHE_POLICY_NONCOHERENT];
            if !known.contains(&arguments.default_policy) || !known.contains(&arguments.alternate_policy) {
                return Err(Errno::EINVAL);
            }
            let (index, _) = self.process.device(arguments.gpu_id)?;
            let mut state = self.process.state();
            state.bound(index, Errno::ESRCH)?.cache_policy =
                (arguments.default_policy, arguments.alternate_policy);
            Ok(())
        })
    }

    /// `kfd_ioctl_set_scratch_backing_va`.
    pub(super) fn set_scratch_backing_va(&self) -> Result<i32> {
        self.run(|arguments: &mut SetScratchBackingVaArgs| {
            let (index, _) = self.process.device(arguments.gpu_id)?;
            self.process.state().bound(index, Errno::ENODEV)?.scratch_base = arguments.va_addr;
            Ok(())
        })
    }

    /// `kfd_ioctl_set_trap_handler`.
    pub(super) fn set_trap_handler(&self) -> Result<i32> {
        self.run(|arguments: &mut SetTrapHandlerArgs| {
            let (index, _) = self.process.device(arguments.gpu_id)?;
            self.process.state().bound(index, Errno::ESRCH)?.trap_handler =
                (arguments.tba_addr, arguments.tma_addr);
            Ok(())
        })
    }

    /// `kfd_ioctl_get_tile_config`; the tables are all zero from gfx9 on.
    pub(super) fn get_tile_config(&self) -> Result<i32> {
        self.run(|arguments: &mut GetTileConfigArgs| {
            let (_, device) = self.process.device(arguments.gpu_id)?;
            arguments.gb_addr_config = device.gpu.gb_addr_config;
            arguments.num_banks = 0;
            arguments.num_ranks = 0;
            let table = |pointer: u64, wanted: &mut u32, entries: &[u32]| {
                let count = entries.len().min(*wanted as usize);
                let copied = UserMemory.write_array(UserPtr(pointer), entries.get(..count).unwrap_or(&[]));
                *wanted = if copied.is_ok() { count as u32 } else { 0 };
                copied
            };
            table(arguments.tile_config_ptr, &mut arguments.num_tile_configs, &[0; TILE_MODES])?;
            table(
                arguments.macro_tile_config_ptr,
                &mut arguments.num_macro_tile_configs,
                &[0; MACRO_TILE_MODES],
            )
        })
    }

    /// `kfd_ioctl_set_xnack_mode`.
    pub(super) fn set_xnack_mode(&self) -> Result<i32> {
        self.run(|arguments: &mut SetXnackModeArgs| {
            if !self.process.svm {
                return Err(Errno::EPERM);
            }
            let mut state = self.process.state();
            if arguments.xnack_enabled < 0 {
                arguments.xnack_enabled = i32::from(state.xnack);
                return Ok(());
            }
            let wanted = arguments.xnack_enabled != 0;
            let possible = self.process.devices.iter().all(|device| {
                let gpu = &device.gpu;
                gpu.xnack_per_process || (gpu.gc_version < [10, 1, 1] && gpu.retry_faults)
            });
            if wanted && !state.xnack && !possible {
                return Err(Errno::EPERM);
            }
            state.xnack = wanted;
            Ok(())
        })
    }

    /// `kfd_ioctl_runtime_enable` without a debugger attached.
    pub(super) fn runtime_enable(&self) -> Result<i32> {
        self.run(|arguments: &mut RuntimeEnableArgs| {
            let mut state = self.process.state();
            let enable = arguments.mode_mask & KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK != 0;
            if enable && state.runtime_enabled {
                return Err(Errno::EBUSY);
            }
            if enable && state.queues.len() > 0 {
                return Err(Errno::EEXIST);
            }
            state.runtime_enabled = enable;
            state.exceptions.store(enable, std::sync::atomic::Ordering::Relaxed);
            Ok(())
        })
    }

    /// `kfd_ioctl_smi_events`.
    pub(super) fn smi_events(&self) -> Result<i32> {
        self.run(|arguments: &mut SmiEventsArgs| {
            let (_, device) = self.process.device(arguments.gpuid)?;
            arguments.anon_fd = device.smi.open()?.cast_unsigned();
            Ok(())
        })
    }

    /// The flag of the table that asks for a capability, then `kfd_ioctl_criu` for a process without devices.
    pub(super) fn criu_op(&self) -> Result<i32> {
        let has = |capability| caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false);
        if !has(Capability::CAP_CHECKPOINT_RESTORE) && !has(Capability::CAP_SYS_ADMIN) {
            return Err(Errno::EACCES);
        }
        self.run(|arguments: &mut CriuArgs| {
            if !self.process.devices.is_empty() {
                return Err(Errno::EOPNOTSUPP);
            }
            // criu_process_info; the other operations miss the lists that they need.
            Err(if arguments.op == KFD_CRIU_OP_PROCESS_INFO { Errno::ENODEV } else { Errno::EINVAL })
        })
    }

    /// `kfd_ioctl_set_debug_trap`: no process has number 0.
    pub(super) fn dbg_trap(&self) -> Result<i32> {
        self.run(|arguments: &mut DbgTrapArgs| {
            let possible = (1..=PID_MAX_LIMIT).contains(&arguments.pid);
            Err(if possible { Errno::EOPNOTSUPP } else { Errno::ESRCH })
        })
    }
}
