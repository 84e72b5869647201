//! The debugger and what a runtime tells it.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use hsakmt_abi::debug::{HsaDbgWatchMode, HsaDbgWaveMessage, HsaDbgWaveMode, HsaDbgWaveOp};
use hsakmt_abi::event::HsaEvent;
use hsakmt_abi::status::HsakmtStatus;

use super::exports;
use super::pointer::{Address, In, Out, number};
use crate::thunk::refusal::Refusal;
use crate::thunk::{open, process};

/// Whether the runtime of this process is a ROCr from before its virtual memory interface (5.7). Its own thunk (ROCT 5.2) has another
/// ioctl for this, which upstream kernels never had, and it waits for events without their ages: with exceptions on, its queues
/// have been seen not to end. Where no runtime is in sight (`RTLD_LOCAL`) it is taken for a newer one.
fn is_early_runtime() -> bool {
    // SAFETY: dlsym takes any name; RTLD_DEFAULT is all that the program was linked with.
    let known = |name: &std::ffi::CStr| unsafe { !libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()).is_null() };
    known(c"hsa_init") && !known(c"hsa_amd_vmem_address_reserve")
}

exports! {
    "debug";
    /// Whether firmware and kernel support a debugger.
    done
    fn hsaKmtCheckRuntimeDebugSupport() {
        let thunk = open::current()?;
        process::check_debug_support(&thunk.client, &*thunk.acquire_snapshot()?)
    }

    /// Tells the kernel of a runtime that a debugger can attach to.
    done("NOT_SUPPORTED to ROCr of before 5.7, as its own thunk answers on upstream kernels")
    fn hsaKmtRuntimeEnable(r_debug: Address, setup_ttmp: bool) {
        let thunk = open::current()?;
        if is_early_runtime() {
            let why = "ROCr of before 5.7 knows exceptions of queues by the interface of AMD's own kernels alone";
            return Err(Refusal::new(HsakmtStatus::NOT_SUPPORTED, why));
        }
        process::runtime_enable(&thunk, &*thunk.acquire_snapshot()?, number(r_debug), setup_ttmp)
    }

    /// Tells the kernel that the runtime ends.
    done
    fn hsaKmtRuntimeDisable() {
        let thunk = open::current()?;
        process::runtime_disable(&thunk, &*thunk.acquire_snapshot()?)
    }

    /// What the kernel said when the runtime was enabled, 0 before.
    done
    fn hsaKmtGetRuntimeCapabilities(caps_mask: Out<u32>) {
        let caps_mask = caps_mask.required("caps_mask")?;
        caps_mask.write(open::current().map_or(0, |thunk| thunk.runtime_capabilities()));
        Ok(())
    }

    /// Attaches a debugger to this process.
    not_supported("a debugger needs the process on the host")
    fn hsaKmtDbgEnable(runtime_info: Out<Address>, data_size: Out<u32>);

    /// Detaches it.
    not_supported("a debugger needs the process on the host")
    fn hsaKmtDbgDisable();

    /// The debugger's view of the GPUs.
    not_supported("a debugger needs the process on the host")
    fn hsaKmtDbgGetDeviceData(data: Out<Address>, n_entries: Out<u32>, entry_size: Out<u32>);

    /// The debugger's view of the queues.
    not_supported("a debugger needs the process on the host")
    fn hsaKmtDbgGetQueueData(
        data: Out<Address>,
        n_entries: Out<u32>,
        entry_size: Out<u32>,
        suspend_queues: bool,
    );

    /// Any debugger operation.
    not_supported("a debugger needs the process on the host")
    fn hsaKmtDebugTrapIoctl(arg: Address, queues: In<u64>, debug_return: Out<u64>);

    /// What a core file says of the runtime.
    not_supported("a core file of the GPU needs the process on the host")
    fn hsaKmtGetCoreRuntimeInfo(runtime_info: Address);

    /// What a core file says of a GPU.
    not_supported("a core file of the GPU needs the process on the host")
    fn hsaKmtGetCoreDeviceInfo(gpu_id: u32, device_info: Address);

    /// How long the kernel waits before it signals bad memory.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtSetSigbusDelay(node_id: u32, delay_ms: u32);

    /// The debugger's version, in ROCm 5.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtGetKernelDebugTrapVersionInfo(major: Out<u32>, minor: Out<u32>);

    /// The old debugger: registers.
    not_supported("removed from the kernel")
    fn hsaKmtDbgRegister(node_id: u32);

    /// The old debugger: ends the registration.
    not_supported("removed from the kernel")
    fn hsaKmtDbgUnregister(node_id: u32);

    /// The old debugger: controls waves.
    not_supported("removed from the kernel")
    fn hsaKmtDbgWavefrontControl(
        node_id: u32,
        operand: HsaDbgWaveOp,
        mode: HsaDbgWaveMode,
        trap_id: u32,
        dbg_wave_msg_ring: Out<HsaDbgWaveMessage>,
    );

    /// The old debugger: watches addresses.
    not_supported("removed from the kernel")
    fn hsaKmtDbgAddressWatch(
        node_id: u32,
        num_watch_points: u32,
        watch_mode: In<HsaDbgWatchMode>,
        watch_address: In<Address>,
        watch_mask: In<u64>,
        watch_event: In<Out<HsaEvent>>,
    );
}
