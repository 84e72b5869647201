//! What the functions answer without a device and without arguments. Expected statuses: AMD's library (rocm-6.2.4:
//! CHECK_KFD_OPEN comes first in most functions; openclose.c, topology.c, events.c, memory.c, debug.c).
#![allow(unsafe_code, reason = "calls of the C API")]

use std::ptr::null_mut;

use guest_thunk::client::{DEVICE_VARIABLE, LOOPBACK_VARIABLE};
use guest_thunk::export::pointer::{In, Out};
use guest_thunk::export::{debug, event, memory, open, process, profile, queue, render, topology};
use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::queue::{HsaQueuePriority, HsaQueueType};
use hsakmt_abi::status::HsakmtStatus as Status;
use hsakmt_abi::topology::{HsaNodeProperties356, HsaSystemProperties};

/// A call of the C API.
macro_rules! ask {
    ($function:path, $($argument:expr),* $(,)?) => {
        // SAFETY: all pointers that the test passes are null or point to its own values.
        unsafe { $function($($argument),*) }
    };
}

fn out<T>() -> Out<T> {
    Out::from(null_mut())
}

/// One test, since it changes the environment.
#[test]
fn without_a_device() {
    // SAFETY: this is the only test of the program and it has no other threads that read the environment.
    unsafe { std::env::remove_var(LOOPBACK_VARIABLE) };
    // SAFETY: as above.
    unsafe { std::env::set_var(DEVICE_VARIABLE, "/dev/null/no-such-device") };

    let closed = Status::KERNEL_IO_CHANNEL_NOT_OPENED;
    let mut system = HsaSystemProperties::default();
    let mut node = HsaNodeProperties356::default();
    let mut address = 0;
    let system = Out::from(&raw mut system);
    let node = Out::from(&raw mut node);
    let flags = HsaMemFlags(0);
    let answers = [
        ("open", ask!(open::hsaKmtOpenKFD,), closed),
        ("open again", ask!(open::hsaKmtOpenKFD,), closed),
        ("close", ask!(open::hsaKmtCloseKFD,), closed),
        ("version", ask!(open::hsaKmtGetVersion, out()), closed),
        ("acquire", ask!(topology::hsaKmtAcquireSystemProperties, system), closed),
        ("release", ask!(topology::hsaKmtReleaseSystemProperties,), Status::SUCCESS),
        ("node", ask!(topology::hsaKmtGetNodeProperties, 0, node), closed),
        ("node NULL", ask!(topology::hsaKmtGetNodeProperties, 0, out()), Status::INVALID_PARAMETER),
        ("banks NULL", ask!(topology::hsaKmtGetNodeMemoryProperties, 0, 1, out()), Status::INVALID_PARAMETER),
        (
            "caches NULL",
            ask!(topology::hsaKmtGetNodeCacheProperties, 0, 0, 1, out()),
            Status::INVALID_PARAMETER,
        ),
        ("links NULL", ask!(topology::hsaKmtGetNodeIoLinkProperties, 0, 1, out()), Status::INVALID_PARAMETER),
        (
            "create event",
            ask!(event::hsaKmtCreateEvent, In::from(std::ptr::null()), false, false, out()),
            closed,
        ),
        ("destroy event", ask!(event::hsaKmtDestroyEvent, out()), closed),
        ("set event", ask!(event::hsaKmtSetEvent, out()), closed),
        // The only ones that look at the event first.
        ("wait", ask!(event::hsaKmtWaitOnEvent, out(), 0), Status::INVALID_HANDLE),
        ("wait ext", ask!(event::hsaKmtWaitOnEvent_Ext, out(), 0, out()), Status::INVALID_HANDLE),
        ("allocate", ask!(memory::hsaKmtAllocMemory, 0, 4096, flags, Out::from(&raw mut address)), closed),
        ("free", ask!(memory::hsaKmtFreeMemory, null_mut(), 0), closed),
        ("register", ask!(memory::hsaKmtRegisterMemory, null_mut(), 0), closed),
        ("clocks", ask!(process::hsaKmtGetClockCounters, 0, out()), closed),
        ("device handle", ask!(render::hsaKmtGetAMDGPUDeviceHandle, 0, out()), closed),
        ("runtime", ask!(debug::hsaKmtRuntimeEnable, null_mut(), false), closed),
        ("queue", ask!(queue::hsaKmtDestroyQueue, 0), closed),
        ("sampling", ask!(profile::hsaKmtPcSamplingSupport,), Status::NOT_SUPPORTED),
        ("SVM", ask!(process::hsaKmtSVMSetAttr, null_mut(), 0, 0, out()), closed),
        (
            "make queue",
            ask!(
                queue::hsaKmtCreateQueue,
                1,
                HsaQueueType::COMPUTE_AQL,
                100,
                HsaQueuePriority::NORMAL,
                null_mut(),
                4096,
                out(),
                out(),
            ),
            closed,
        ),
    ];
    for (call, answer, expected) in answers {
        assert_eq!(answer, expected, "{call}");
    }

    // A handle that is not ours goes to the real library, which is not here.
    // SAFETY: no library has the function, so nothing is done with the pointers.
    let answer = unsafe { render::amdgpu_query_gpu_info(null_mut(), out()) };
    assert_eq!(answer, -libc::ENOSYS);
}
