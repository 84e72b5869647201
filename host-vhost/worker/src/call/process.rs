//! What belongs to the KFD process as a whole.

use kfd_abi::debug::{KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK, KFD_RUNTIME_ENABLE_MODE_TTMP_SAVE_MASK};
use kfd_host::PolicyRequest;
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{
    AcquireVm, GetApertures, GetClockCounters, GetTileConfig, RuntimeEnable, SetMemoryPolicy,
    SetScratchBackingVa, SetTrapHandler, SetXnackMode,
};
use virtio_kfd_protocol::limits::MAX_TILE_CONFIGS;
use virtio_kfd_protocol::{
    Apertures, ClockCounters, GetTileConfigAnswer, GetTileConfigRequest, GpuId, GpuRequest, Nothing,
    RuntimeEnableAnswer, RuntimeEnableRequest, SetMemoryPolicyRequest, SetScratchBackingVaRequest,
    SetTrapHandlerRequest, Status, XnackMode,
};

use super::{Outcome, Reply};
use crate::context::Context;
use crate::failure::{Failure, errno_number, expect_zero};

/// The apertures of this VM's GPUs.
pub fn get_apertures(context: &Context) -> Outcome<GetApertures> {
    let mut tail = Vec::new();
    for host in context.kfd.apertures()? {
        if context.gpu(GpuId(host.gpu_id)).is_ok() {
            tail.push(Apertures {
                lds_base: host.lds_base,
                lds_limit: host.lds_limit,
                scratch_base: host.scratch_base,
                scratch_limit: host.scratch_limit,
                gpuvm_base: host.gpuvm_base,
                gpuvm_limit: host.gpuvm_limit,
                gpu_id: GpuId(host.gpu_id),
                pad: 0,
            });
        }
    }
    Ok(Reply::with(Nothing {}, tail))
}

pub fn acquire_vm(context: &Context, request: &GpuRequest) -> Outcome<AcquireVm> {
    expect_zero("AcquireVm", &[request.pad.into()])?;
    let gpu = context.gpu(request.gpu_id)?;
    context.kfd.acquire_vm(gpu.id.0, &gpu.render)?;
    context.smi.acquired();
    Ok(Reply::of(Nothing {}))
}

pub fn set_memory_policy(context: &Context, request: &SetMemoryPolicyRequest) -> Outcome<SetMemoryPolicy> {
    expect_zero("SetMemoryPolicy", &[request.pad.into()])?;
    context.gpu(request.gpu_id)?;
    context.kfd.set_memory_policy(&PolicyRequest {
        gpu_id: request.gpu_id.0,
        default_policy: request.default_policy,
        alternate_policy: request.alternate_policy,
        alternate_base: request.alternate_aperture_base.0,
        alternate_size: request.alternate_aperture_size,
    })?;
    Ok(Reply::of(Nothing {}))
}

/// For GPU 0 the CPU's clocks alone, as the kernel gives them.
pub fn get_clock_counters(context: &Context, request: &GpuRequest) -> Outcome<GetClockCounters> {
    expect_zero("GetClockCounters", &[request.pad.into()])?;
    if request.gpu_id != GpuId(0) {
        context.gpu(request.gpu_id)?;
    }
    let clocks = context.kfd.clocks(request.gpu_id.0)?;
    Ok(Reply::of(ClockCounters {
        gpu_clock_counter: clocks.gpu,
        cpu_clock_counter: clocks.cpu,
        system_clock_counter: clocks.system,
        system_clock_freq: clocks.system_frequency,
    }))
}

/// Cannot be switched on: with XNACK the kernel answers a fault of the GPU at any address with the memory that this process
/// has there (svm_range_restore_pages and svm_range_create_unregistered_range, kfd_svm.c), its own heap and stacks
/// and all of the VM's memory. The errno is the kernel's where a GPU cannot do it.
pub fn set_xnack_mode(context: &Context, request: &XnackMode) -> Outcome<SetXnackMode> {
    expect_zero("SetXnackMode", &[request.pad.into()])?;
    if request.mode > 0 {
        let reason = "SetXnackMode: faults of the GPU would reach memory of the worker".to_owned();
        return Err(Failure { status: Status::ERRNO, errno: errno_number(Errno::EPERM), reason });
    }
    let mode = context.kfd.set_xnack_mode(request.mode)?;
    Ok(Reply::of(XnackMode { mode, pad: 0 }))
}

pub fn set_scratch_backing_va(
    context: &Context,
    request: &SetScratchBackingVaRequest,
) -> Outcome<SetScratchBackingVa> {
    expect_zero("SetScratchBackingVa", &[request.pad.into()])?;
    context.gpu(request.gpu_id)?;
    context.kfd.set_scratch_backing_va(request.gpu_id.0, request.va.0)?;
    Ok(Reply::of(Nothing {}))
}

pub fn set_trap_handler(context: &Context, request: &SetTrapHandlerRequest) -> Outcome<SetTrapHandler> {
    expect_zero("SetTrapHandler", &[request.pad.into()])?;
    context.gpu(request.gpu_id)?;
    context.kfd.set_trap_handler(request.gpu_id.0, request.tba.0, request.tma.0)?;
    Ok(Reply::of(Nothing {}))
}

/// With a runtime enabled the kernel looks for the heads of queues' save areas in this process: [`crate::exceptions`]. No debugger
/// of the guest's reaches this process, so the kernel is not told where the guest's runtime has its list of code objects, nor to set up
/// trap temporaries, which are for debuggers too: on GPUs without registers for each VMID that holds up all waves for a moment, and on
/// all GPUs of the host (kgd_gfx_v9_enable_debug_trap).
pub fn runtime_enable(context: &Context, request: &RuntimeEnableRequest) -> Outcome<RuntimeEnable> {
    expect_zero("RuntimeEnable", &[request.pad.into()])?;
    let known = KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK | KFD_RUNTIME_ENABLE_MODE_TTMP_SAVE_MASK;
    if request.mode & !known != 0 {
        let reason = format!("RuntimeEnable: mode {:#x}, known is {known:#x}", request.mode);
        return Err(Failure::new(Status::NOT_SUPPORTED, reason));
    }
    // Held during the call, so that no queue is made meanwhile.
    let mut queues = context.queues();
    if request.mode != 0 && queues.exceptions.refused {
        let reason = "RuntimeEnable: the operator of the host has switched exceptions off".to_owned();
        return Err(Failure::new(Status::NOT_SUPPORTED, reason));
    }
    let mode = request.mode & KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK;
    let before = queues.exceptions.possible;
    if mode != 0 && !before {
        // As the kernel does; such a queue would have no page.
        if queues.live().next().is_some() {
            let reason = "RuntimeEnable: there are queues".to_owned();
            return Err(Failure { status: Status::ERRNO, errno: errno_number(Errno::EEXIST), reason });
        }
        queues.exceptions.possible = true;
    }
    let capabilities = context.kfd.runtime_enable(0, mode).inspect_err(|_| {
        // The kernel has not enabled it (it knows no such call before KFD 1.13).
        queues.exceptions.possible = before;
    })?;
    Ok(Reply::of(RuntimeEnableAnswer { capabilities, pad: 0 }))
}

pub fn get_tile_config(context: &Context, request: &GetTileConfigRequest) -> Outcome<GetTileConfig> {
    expect_zero("GetTileConfig", &[request.pad.into()])?;
    context.gpu(request.gpu_id)?;
    let (tiles, macro_tiles) = (request.max_tile_configs, request.max_macro_tile_configs);
    if tiles as usize > MAX_TILE_CONFIGS || macro_tiles as usize > MAX_TILE_CONFIGS {
        let reason = format!("GetTileConfig: {tiles} and {macro_tiles} entries, at most {MAX_TILE_CONFIGS}");
        return Err(Failure::invalid(reason));
    }
    let config = context.kfd.tile_config(request.gpu_id.0, tiles, macro_tiles)?;
    let answer = GetTileConfigAnswer {
        num_tile_configs: u32::try_from(config.tiles.len()).unwrap_or(0),
        num_macro_tile_configs: u32::try_from(config.macro_tiles.len()).unwrap_or(0),
        gb_addr_config: config.gb_addr_config,
        num_banks: config.num_banks,
        num_ranks: config.num_ranks,
        pad: 0,
    };
    let mut tail = config.tiles;
    tail.extend(config.macro_tiles);
    Ok(Reply::with(answer, tail))
}
