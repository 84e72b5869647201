//! The C API through loop-back, against the real daemon and worker on the KFD model. Expected answers: AMD's library
//! (rocm-6.2.4 openclose.c, topology.c, events.c, memory.c, fmm.c) over the kernel's kfd_events.c and kfd_chardev.c.
#![cfg(feature = "loopback")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "calls of the C API, fork")]

mod support;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use guest_thunk::client::LOOPBACK_VARIABLE;
use guest_thunk::export::pointer::{In, Out};
use guest_thunk::export::{event, graphics, memory, open, process, render, topology};
use guest_thunk::thunk::render::AmdgpuGpuInfo;
use hsakmt_abi::event::{HsaEvent, HsaEventDescriptor, HsaEventType};
use hsakmt_abi::memory::{HsaGraphicsResourceInfo, HsaMemFlags, HsaPointerInfo, HsaSharedMemoryHandle};
use hsakmt_abi::status::HsakmtStatus as Status;
use hsakmt_abi::topology::{
    HsaCacheProperties, HsaClockCounters, HsaIoLinkProperties, HsaNodeProperties356, HsaSystemProperties,
    HsaVersionInfo,
};

use self::support::Daemon;

/// A call of the C API.
macro_rules! ask {
    ($function:path $(, $argument:expr)* $(,)?) => {
        // SAFETY: all pointers that the test passes are null or point to its own values.
        unsafe { $function($($argument),*) }
    };
}

fn out<T>(value: &mut T) -> Out<T> {
    Out::from(std::ptr::from_mut(value))
}

fn null<T>() -> Out<T> {
    Out::from(std::ptr::null_mut())
}

/// An address as the API takes it.
fn pointer(address: u64) -> *mut libc::c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

fn set_socket(path: &Path) {
    // SAFETY: the test's threads read no variable while this runs; in a forked child there is one thread.
    unsafe { std::env::set_var(LOOPBACK_VARIABLE, path) };
}

fn acquire() -> HsaSystemProperties {
    let mut system = HsaSystemProperties::default();
    assert_eq!(ask!(topology::hsaKmtAcquireSystemProperties, out(&mut system)), Status::SUCCESS);
    system
}

fn make(event_type: HsaEventType, manual_reset: bool) -> Out<HsaEvent> {
    let descriptor = HsaEventDescriptor { event_type, ..Default::default() };
    let mut event = null();
    let made = ask!(
        event::hsaKmtCreateEvent,
        In::from(std::ptr::from_ref(&descriptor)),
        manual_reset,
        false,
        out(&mut event)
    );
    assert_eq!(made, Status::SUCCESS);
    event
}

fn destroy(event: Out<HsaEvent>) -> Status {
    ask!(event::hsaKmtDestroyEvent, event)
}

fn allocate(node: u32, size: u64, flags: HsaMemFlags) -> (Status, u64) {
    let mut address = 1;
    let status = ask!(memory::hsaKmtAllocMemory, node, size, flags, out(&mut address));
    (status, address)
}

const HOST: HsaMemFlags = HsaMemFlags(0).with(HsaMemFlags::HOST_ACCESS, 1);

/// One test, since the library's state is the process's.
#[test]
fn the_api_through_loopback() {
    let (Some(daemon), Some(other)) = (Daemon::start(), Daemon::start()) else { return };
    set_socket(&daemon.socket());
    opens_count();
    nodes();
    clocks_and_devices();
    events();
    destroyed_events_wake_their_waiters();
    memory_lives_and_dies();
    forked_children_open_anew(&other);
    assert_eq!(ask!(open::hsaKmtCloseKFD), Status::SUCCESS);
    rounds_leave_nothing();
    a_close_ends_waits();
}

fn opens_count() {
    assert_eq!(ask!(open::hsaKmtOpenKFD), Status::SUCCESS);
    assert_eq!(ask!(open::hsaKmtOpenKFD), Status::KERNEL_ALREADY_OPENED);
    assert_eq!(ask!(open::hsaKmtCloseKFD), Status::SUCCESS);
    let mut version = HsaVersionInfo::default();
    assert_eq!(ask!(open::hsaKmtGetVersion, out(&mut version)), Status::SUCCESS);
    assert_eq!({ version.kernel_interface_major_version }, 1);
}

fn nodes() {
    let mut node = HsaNodeProperties356::default();
    let before = ask!(topology::hsaKmtGetNodeProperties, 0, out(&mut node));
    assert_eq!(before, Status::INVALID_NODE_UNIT, "there is no snapshot");
    let system = acquire();
    let gpu = system.num_nodes - 1;
    assert_eq!(ask!(topology::hsaKmtGetNodeProperties, gpu, out(&mut node)), Status::SUCCESS);
    assert_eq!(({ node.num_f_compute_cores }, { node.device_id }), (240, 0x66a1));
    assert_eq!(node.amd_name[..7], *b"Vega20\0");
    let mut caches = vec![HsaCacheProperties::default(); 200];
    let first = || Out::from(caches.as_mut_ptr());
    let ask_caches = |count, place| ask!(topology::hsaKmtGetNodeCacheProperties, gpu, 0, count, place);
    let mut first = first;
    assert_eq!(ask_caches(node.num_caches + 1, first()), Status::INVALID_PARAMETER);
    assert_eq!(ask_caches(node.num_caches, first()), Status::SUCCESS);
    let mut link = HsaIoLinkProperties::default();
    let links = ask!(topology::hsaKmtGetNodeIoLinkProperties, gpu, 1, out(&mut link));
    assert_eq!((links, { link.node_from }, { link.node_to }), (Status::SUCCESS, gpu, 0));
    let beyond = ask!(topology::hsaKmtGetNodeProperties, system.num_nodes, out(&mut node));
    assert_eq!(beyond, Status::INVALID_NODE_UNIT);
}

fn clocks_and_devices() {
    let gpu = acquire().num_nodes - 1;
    let mut counters = [HsaClockCounters::default(); 2];
    for counters in &mut counters {
        assert_eq!(ask!(process::hsaKmtGetClockCounters, gpu, out(counters)), Status::SUCCESS);
    }
    let [first, second] = counters;
    assert!({ second.gpu_clock_counter } >= { first.gpu_clock_counter });
    assert!({ second.cpu_clock_counter } > { first.cpu_clock_counter });
    assert_eq!({ first.system_clock_frequency_hz }, 1_000_000_000);
    let mut cpu = HsaClockCounters::default();
    assert_eq!(ask!(process::hsaKmtGetClockCounters, 0, out(&mut cpu)), Status::SUCCESS);
    assert_eq!({ cpu.gpu_clock_counter }, 0);

    let mut handle = 0;
    assert_eq!(ask!(render::hsaKmtGetAMDGPUDeviceHandle, gpu, out(&mut handle)), Status::SUCCESS);
    let mut info = AmdgpuGpuInfo::default();
    assert_eq!(ask!(render::amdgpu_query_gpu_info, pointer(handle), out(&mut info)), 0);
    assert_eq!((info.asic_id, info.cu_active_number, info.gb_addr_cfg), (0x66a1, 60, 0x2a11_4042));
    let imported = ask!(render::amdgpu_bo_import, pointer(handle), 2, 0, null());
    assert_eq!(imported, -libc::EINVAL);
    let no_gpu = ask!(render::hsaKmtGetAMDGPUDeviceHandle, 0, out(&mut handle));
    assert_eq!(no_gpu, Status::INVALID_NODE_UNIT);
}

fn events() {
    let wait = |event, milliseconds| ask!(event::hsaKmtWaitOnEvent, event, milliseconds);
    let set = |event| ask!(event::hsaKmtSetEvent, event);
    let (signal, fault, exception) = (
        make(HsaEventType::SIGNAL, false),
        make(HsaEventType::MEMORY, true),
        make(HsaEventType::HW_EXCEPTION, true),
    );
    assert_eq!(set(null()), Status::INVALID_HANDLE);
    assert_eq!(set(fault), Status::ERROR);
    assert_eq!(ask!(event::hsaKmtResetEvent, exception), Status::ERROR);
    assert_eq!(wait(signal, 0), Status::WAIT_TIMEOUT);
    assert_eq!(set(signal), Status::SUCCESS);
    assert_eq!(wait(signal, 0), Status::SUCCESS);
    assert_eq!(wait(signal, 0), Status::WAIT_TIMEOUT, "it resets itself");
    let mut wrong = null();
    let descriptor = HsaEventDescriptor { event_type: HsaEventType(9), ..Default::default() };
    let descriptor = In::from(std::ptr::from_ref(&descriptor));
    let made = ask!(event::hsaKmtCreateEvent, descriptor, false, false, out(&mut wrong));
    assert_eq!(made, Status::INVALID_PARAMETER);

    let four = [(); 4].map(|()| make(HsaEventType::SIGNAL, false));
    let list = In::from(four.as_ptr());
    let wait_many = |all, milliseconds| ask!(event::hsaKmtWaitOnMultipleEvents, list, 4, all, milliseconds);
    assert_eq!(
        ask!(event::hsaKmtWaitOnMultipleEvents, In::from(std::ptr::null()), 1, true, 0),
        Status::INVALID_HANDLE
    );
    for event in four.iter().take(3) {
        assert_eq!(set(*event), Status::SUCCESS);
    }
    assert_eq!(wait_many(true, 50), Status::WAIT_TIMEOUT);
    assert_eq!(wait_many(false, 0), Status::WAIT_TIMEOUT, "the wait for all has consumed the three");

    assert_eq!(set(signal), Status::SUCCESS);
    let mut age = 1;
    assert_eq!(ask!(event::hsaKmtWaitOnEvent_Ext, signal, 0, out(&mut age)), Status::SUCCESS);
    assert!(age > 1, "{age}");
    for event in four.into_iter().chain([signal, fault, exception]) {
        assert_eq!(destroy(event), Status::SUCCESS);
    }
    assert_eq!(destroy(signal), Status::INVALID_HANDLE, "it is gone");
}

/// A thread that waits without limit for an event, while something else happens.
fn while_waiting(event: Out<HsaEvent>, act: impl FnOnce()) -> Status {
    let address = event.address();
    let waiter = std::thread::spawn(move || {
        let event = Out::from(std::ptr::with_exposed_provenance_mut(address));
        ask!(event::hsaKmtWaitOnEvent, event, u32::MAX)
    });
    std::thread::sleep(Duration::from_millis(100));
    act();
    let since = Instant::now();
    while !waiter.is_finished() {
        assert!(since.elapsed() < Duration::from_secs(30), "the waiter is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
    waiter.join().unwrap()
}

fn destroyed_events_wake_their_waiters() {
    let event = make(HsaEventType::SIGNAL, false);
    let answer = while_waiting(event, || assert_eq!(destroy(event), Status::SUCCESS));
    assert_eq!(answer, Status::ERROR);
}

fn memory_lives_and_dies() {
    let gpu = acquire().num_nodes - 1;
    let map = |address| ask!(memory::hsaKmtMapMemoryToGPU, pointer(address), 1 << 20, null());
    let unmap = |address| ask!(memory::hsaKmtUnmapMemoryToGPU, pointer(address));
    let free = |address| ask!(memory::hsaKmtFreeMemory, pointer(address), 1 << 20);
    assert_eq!(allocate(0, 4095, HOST), (Status::INVALID_PARAMETER, 1), "left alone");
    assert_eq!(allocate(99, 4096, HOST).0, Status::INVALID_NODE_UNIT);
    let (made, address) = allocate(0, 1 << 20, HOST);
    assert_eq!(made, Status::SUCCESS);
    // SAFETY: the allocation is readable and writable, and 1 MiB large.
    let bytes = unsafe { std::slice::from_raw_parts_mut(pointer(address).cast::<u8>(), 1 << 20) };
    assert!(bytes.iter().all(|byte| *byte == 0));
    bytes.fill(7);
    assert_eq!(map(address), Status::SUCCESS);
    let mut info = HsaPointerInfo::default();
    let query = ask!(memory::hsaKmtQueryPointerInfo, pointer(address + 100), out(&mut info));
    assert_eq!((query, { info.gpu_address }, { info.n_mapped_nodes }), (Status::SUCCESS, address, 1));
    assert_eq!(free(address), Status::ERROR, "it is mapped");
    assert_eq!(unmap(address), Status::SUCCESS);
    assert_eq!(unmap(address), Status::SUCCESS);
    assert!(bytes.iter().all(|byte| *byte == 7));
    assert_eq!(free(address), Status::SUCCESS);
    assert_eq!(free(address), Status::MEMORY_NOT_REGISTERED);
    assert_eq!(map(address), Status::INVALID_PARAMETER);

    let own = [0u8; 64];
    let own = pointer(own.as_ptr().expose_provenance() as u64);
    assert_eq!(ask!(memory::hsaKmtRegisterMemoryWithFlags, own, 64, HOST), Status::NOT_SUPPORTED);
    assert_eq!(ask!(memory::hsaKmtDeregisterMemory, own), Status::MEMORY_NOT_REGISTERED);

    let available = || {
        let mut bytes = 0;
        assert_eq!(ask!(memory::hsaKmtAvailableMemory, gpu, out(&mut bytes)), Status::SUCCESS);
        bytes
    };
    let before = available();
    let vram = HsaMemFlags(0).with(HsaMemFlags::NON_PAGED, 1).with(HsaMemFlags::COARSE_GRAIN, 1);
    let (made, address) = allocate(gpu, 64 << 20, vram);
    assert_eq!(made, Status::SUCCESS);
    assert!(before - available() >= 64 << 20);
    assert_eq!(free(address), Status::SUCCESS);
    assert_eq!(available(), before);
    visible_vram(gpu, vram.with(HsaMemFlags::HOST_ACCESS, 1));
    assert_eq!(available(), before);
}

/// Small and large, through the window; and as dma-bufs in the same process.
fn visible_vram(gpu: u32, flags: HsaMemFlags) {
    let free = |address| ask!(memory::hsaKmtFreeMemory, pointer(address), 0);
    let byte = |address: u64| pointer(address).cast::<u8>();
    for size in [4096, 131_072, 2 << 20, 32 << 20] {
        let (made, address) = allocate(gpu, size, flags);
        assert_eq!(made, Status::SUCCESS, "{size:#x} bytes");
        let last = byte(address + size - 1);
        // SAFETY: the memory is the test's, and the CPU's to access.
        assert_eq!(unsafe { last.read_volatile() }, 0);
        // C61: the first access to its page may be a write.
        // SAFETY: as above.
        unsafe { byte(address).write_volatile(7) };
        assert_eq!(ask!(memory::hsaKmtMapMemoryToGPU, pointer(address), size, null()), Status::SUCCESS);
        let (mut fd, mut offset) = (-1, 0);
        let exported =
            ask!(memory::hsaKmtExportDMABufHandle, pointer(address + 4), 8, out(&mut fd), out(&mut offset));
        assert_eq!((exported, offset), (Status::SUCCESS, 4));
        let mut info = HsaGraphicsResourceInfo::default();
        let node = [gpu];
        let registered = ask!(
            graphics::hsaKmtRegisterGraphicsHandleToNodes,
            u64::try_from(fd).unwrap(),
            out(&mut info),
            1,
            In::from(node.as_ptr())
        );
        assert_eq!(registered, Status::SUCCESS, "{size:#x} bytes");
        assert_eq!(({ info.size_in_bytes }, { info.node_id }), (size, gpu));
        let again = info.memory_address;
        assert_eq!(ask!(memory::hsaKmtMapMemoryToGPU, pointer(again), size, null()), Status::SUCCESS);
        assert_eq!(ask!(memory::hsaKmtUnmapMemoryToGPU, pointer(again)), Status::SUCCESS);
        assert_eq!(ask!(memory::hsaKmtDeregisterMemory, pointer(again)), Status::SUCCESS);
        // SAFETY: the descriptor is the test's.
        assert_eq!(unsafe { libc::close(fd) }, 0);
        assert_eq!(ask!(memory::hsaKmtUnmapMemoryToGPU, pointer(address)), Status::SUCCESS);
        // SAFETY: as above.
        assert_eq!(unsafe { byte(address).read_volatile() }, 7, "data survive map and unmap");
        assert_eq!(free(address), Status::SUCCESS);
    }
    let mut handle = HsaSharedMemoryHandle::default();
    let (_, address) = allocate(gpu, 1 << 20, flags);
    let shared = ask!(memory::hsaKmtShareMemory, pointer(address), 1 << 20, out(&mut handle));
    assert_eq!(shared, Status::SUCCESS);
    assert_eq!(free(address), Status::SUCCESS);
    // A handle whose memory is gone is as good as a forged one.
    let (mut address, mut size) = (0, 0);
    let taken = ask!(
        memory::hsaKmtRegisterSharedHandle,
        In::from(std::ptr::from_ref(&handle)),
        out(&mut address),
        out(&mut size)
    );
    assert_eq!(taken, Status::ERROR);
}

/// What a forked child does; a number that says what went wrong, 0 for nothing.
fn child(other: &Path) -> i32 {
    // SAFETY: alarm takes no pointer. The child must not outlive a hang.
    unsafe { libc::alarm(60) };
    let mut version = HsaVersionInfo::default();
    if ask!(open::hsaKmtGetVersion, out(&mut version)) != Status::KERNEL_IO_CHANNEL_NOT_OPENED {
        return 1;
    }
    // A daemon serves one VM, and in loop-back every process is one.
    set_socket(other);
    if ask!(open::hsaKmtOpenKFD) != Status::SUCCESS {
        return 2;
    }
    let mut system = HsaSystemProperties::default();
    if ask!(topology::hsaKmtAcquireSystemProperties, out(&mut system)) != Status::SUCCESS {
        return 3;
    }
    let (made, address) = allocate(0, 4096, HOST);
    if made != Status::SUCCESS {
        return 4;
    }
    if ask!(memory::hsaKmtMapMemoryToGPU, pointer(address), 4096, null()) != Status::SUCCESS {
        return 5;
    }
    if ask!(open::hsaKmtCloseKFD) != Status::SUCCESS { 6 } else { 0 }
}

fn forked_children_open_anew(other: &Daemon) {
    let stop = AtomicBool::new(false);
    let socket = other.socket();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let event = make(HsaEventType::SIGNAL, false);
                while !stop.load(Ordering::Relaxed) {
                    let (made, address) = allocate(0, 4096, HOST);
                    assert_eq!(made, Status::SUCCESS);
                    let mapped = ask!(memory::hsaKmtMapMemoryToGPU, pointer(address), 4096, null());
                    assert_eq!(mapped, Status::SUCCESS);
                    assert_eq!(ask!(memory::hsaKmtUnmapMemoryToGPU, pointer(address)), Status::SUCCESS);
                    assert_eq!(ask!(memory::hsaKmtFreeMemory, pointer(address), 4096), Status::SUCCESS);
                    assert_eq!(ask!(event::hsaKmtWaitOnEvent, event, 0), Status::WAIT_TIMEOUT);
                }
                assert_eq!(destroy(event), Status::SUCCESS);
            });
        }
        for round in 0..5 {
            // SAFETY: the child calls the library, which is made for that, and leaves with _exit.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0);
            if pid == 0 {
                let code = child(&socket);
                // SAFETY: _exit runs nothing of the parent's.
                unsafe { libc::_exit(code) };
            }
            let mut status = 0;
            // SAFETY: the pointer is to a local.
            let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
            assert_eq!(waited, pid);
            assert_eq!(status, 0, "child {round}: exit code {}", libc::WEXITSTATUS(status));
        }
        stop.store(true, Ordering::Relaxed);
    });
    acquire();
}

fn rounds_leave_nothing() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let round = || {
        assert_eq!(ask!(open::hsaKmtOpenKFD), Status::SUCCESS);
        acquire();
        make(HsaEventType::SIGNAL, false);
        let (made, address) = allocate(0, 1 << 20, HOST);
        assert_eq!(made, Status::SUCCESS);
        assert_eq!(ask!(memory::hsaKmtMapMemoryToGPU, pointer(address), 1 << 20, null()), Status::SUCCESS);
        assert_eq!(ask!(open::hsaKmtCloseKFD), Status::SUCCESS);
        address
    };
    round();
    let before = descriptors();
    for _ in 0..10 {
        round();
    }
    assert_eq!(descriptors(), before);
    assert_eq!(ask!(open::hsaKmtCloseKFD), Status::KERNEL_IO_CHANNEL_NOT_OPENED);
}

fn a_close_ends_waits() {
    assert_eq!(ask!(open::hsaKmtOpenKFD), Status::SUCCESS);
    acquire();
    let event = make(HsaEventType::SIGNAL, false);
    let answer = while_waiting(event, || assert_eq!(ask!(open::hsaKmtCloseKFD), Status::SUCCESS));
    assert_eq!(answer, Status::ERROR);
}
