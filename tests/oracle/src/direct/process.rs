//! Version, apertures, clocks, and what every call that needs a GPU says without one.

use kfd_abi::aperture::{GetProcessAperturesArgs, GetProcessAperturesNewArgs, ProcessDeviceApertures};
use kfd_abi::clock::GetClockCountersArgs;
use kfd_abi::ioctl::{self, Direction};
use kfd_abi::kfd::{IOCTLS, nr, request};
use kfd_abi::mmap::{self, MmapType};
use kfd_abi::version::GetVersionArgs;
use zerocopy::FromZeros;

use super::Kfd;
use crate::transcript::Transcript;

pub fn ask(kfd: &Kfd, out: &mut Transcript) {
    let mut version = GetVersionArgs::new_zeroed();
    let answer = kfd.ioctl(request::GET_VERSION, &mut version);
    out.result(
        "GET_VERSION",
        answer.map(|()| format!("{}.{}", version.major_version, version.minor_version)),
    );

    apertures(kfd, out);
    clocks(kfd, out);
    without_gpu(kfd, out);
    numbers(kfd, out);
    maps(kfd, out);
}

fn apertures(kfd: &Kfd, out: &mut Transcript) {
    let mut list = [ProcessDeviceApertures::new_zeroed(); 8];
    for count in [0, 1, 8] {
        let mut args = GetProcessAperturesNewArgs::new_zeroed();
        args.num_of_nodes = count;
        args.kfd_process_device_apertures_ptr = list.as_mut_ptr() as u64;
        let answer = kfd.ioctl(request::GET_PROCESS_APERTURES_NEW, &mut args);
        out.result(
            &format!("GET_PROCESS_APERTURES_NEW with room for {count}"),
            answer.map(|()| format!("{} nodes", args.num_of_nodes)),
        );
    }
    let mut old = GetProcessAperturesArgs::new_zeroed();
    let answer = kfd.ioctl(request::GET_PROCESS_APERTURES, &mut old);
    out.result("GET_PROCESS_APERTURES", answer.map(|()| format!("{} nodes", old.num_of_nodes)));
}

fn clocks(kfd: &Kfd, out: &mut Transcript) {
    let mut before = GetClockCountersArgs::new_zeroed();
    let mut after = GetClockCountersArgs::new_zeroed();
    let answer = kfd.ioctl(request::GET_CLOCK_COUNTERS, &mut before);
    out.result(
        "GET_CLOCK_COUNTERS of no GPU",
        answer.map(|()| {
            format!("frequency {}, GPU counter {}", before.system_clock_freq, before.gpu_clock_counter)
        }),
    );
    out.done("GET_CLOCK_COUNTERS again", kfd.ioctl(request::GET_CLOCK_COUNTERS, &mut after));
    out.line("the CPU counter runs", after.cpu_clock_counter > before.cpu_clock_counter);
    out.line("the system counter runs", after.system_clock_counter > before.system_clock_counter);
    let mut unknown = GetClockCountersArgs::new_zeroed();
    unknown.gpu_id = 1234;
    let answer = kfd.ioctl(request::GET_CLOCK_COUNTERS, &mut unknown);
    out.result(
        "GET_CLOCK_COUNTERS of GPU 1234",
        answer.map(|()| format!("GPU counter {}", unknown.gpu_clock_counter)),
    );
}

/// Every call with a zeroed argument, and with one whose every 32-bit word that looks like a GPU id is 1234: nothing
/// may work that needs a GPU, and all must agree how it fails.
fn without_gpu(kfd: &Kfd, out: &mut Transcript) {
    // These are asked elsewhere, or change state that later questions depend on.
    let elsewhere = [
        nr::GET_VERSION,
        nr::GET_PROCESS_APERTURES,
        nr::GET_PROCESS_APERTURES_NEW,
        nr::GET_CLOCK_COUNTERS,
        nr::CREATE_EVENT,
        nr::DESTROY_EVENT,
        nr::SET_EVENT,
        nr::RESET_EVENT,
        nr::WAIT_EVENTS,
    ];
    for row in IOCTLS.iter().filter(|row| row.nr <= nr::DBG_TRAP && !elsewhere.contains(&row.nr)) {
        let mut argument = [0u64; 64];
        out.done(&format!("{} with zeros", row.name), kfd.ioctl(row.request, &mut argument));
    }
    use kfd_abi::{memory, queue, svm};
    macro_rules! gpu_1234 {
        ($($name:ident: $type:ty { $($field:ident = $value:expr),* };)*) => {$(
            let mut args = <$type>::new_zeroed();
            $(args.$field = $value;)*
            out.done(concat!(stringify!($name), " of GPU 1234"), kfd.ioctl(request::$name, &mut args));
        )*};
    }
    gpu_1234! {
        ACQUIRE_VM: memory::AcquireVmArgs { gpu_id = 1234, drm_fd = 0 };
        SET_MEMORY_POLICY: memory::SetMemoryPolicyArgs { gpu_id = 1234 };
        ALLOC_MEMORY_OF_GPU: memory::AllocMemoryOfGpuArgs { gpu_id = 1234, va_addr = 1 << 32, size = 4096, flags = 2 };
        FREE_MEMORY_OF_GPU: memory::FreeMemoryOfGpuArgs { handle = 1234 << 32 };
        MAP_MEMORY_TO_GPU: memory::MapMemoryToGpuArgs { handle = 1234 << 32, n_devices = 1 };
        UNMAP_MEMORY_FROM_GPU: memory::UnmapMemoryFromGpuArgs { handle = 1234 << 32, n_devices = 1 };
        AVAILABLE_MEMORY: memory::GetAvailableMemoryArgs { gpu_id = 1234 };
        SET_SCRATCH_BACKING_VA: memory::SetScratchBackingVaArgs { gpu_id = 1234, va_addr = 1 << 32 };
        GET_TILE_CONFIG: memory::GetTileConfigArgs { gpu_id = 1234 };
        SET_TRAP_HANDLER: memory::SetTrapHandlerArgs { gpu_id = 1234 };
        CREATE_QUEUE: queue::CreateQueueArgs { gpu_id = 1234, ring_size = 4096 };
        DESTROY_QUEUE: queue::DestroyQueueArgs { queue_id = 77 };
        UPDATE_QUEUE: queue::UpdateQueueArgs { queue_id = 77, ring_size = 4096 };
        SET_CU_MASK: queue::SetCuMaskArgs { queue_id = 77, num_cu_mask = 64 };
        ALLOC_QUEUE_GWS: queue::AllocQueueGwsArgs { queue_id = 77 };
    }
    for mode in [-1, 0, 1] {
        let mut args = svm::SetXnackModeArgs::new_zeroed();
        args.xnack_enabled = mode;
        let answer = kfd.ioctl(request::SET_XNACK_MODE, &mut args);
        out.result(&format!("SET_XNACK_MODE {mode}"), answer.map(|()| args.xnack_enabled));
    }
    for mode in [1, 1, 0, 0] {
        let mut args = kfd_abi::debug::RuntimeEnableArgs::new_zeroed();
        args.mode_mask = mode;
        let answer = kfd.ioctl(request::RUNTIME_ENABLE, &mut args);
        out.result(
            &format!("RUNTIME_ENABLE {mode}"),
            answer.map(|()| format!("mask {:#x}", args.capabilities_mask)),
        );
    }
}

/// Numbers that are not in the table, other types, other sizes (case C41).
fn numbers(kfd: &Kfd, out: &mut Transcript) {
    let mut argument = [0u64; 2048];
    for number in [0, 0x27, 0x40, 0x7f, 0x80, 0x85, 0xa0, 0xff] {
        let other = ioctl::request(Direction::ReadWrite, b'K', number, 16);
        out.done(&format!("number {number:#04x}"), kfd.ioctl(other, &mut argument));
    }
    // KFD looks at the number only, never at the type.
    let other = ioctl::request(Direction::Read, b'X', nr::GET_VERSION, 8);
    argument = [0; 2048];
    out.done("GET_VERSION with type 'X'", kfd.ioctl(other, &mut argument));
    for size in [0, 4, 8, 64, 16383] {
        argument = [0; 2048];
        let other = ioctl::request(Direction::Read, b'K', nr::GET_VERSION, size);
        let answer = kfd.ioctl(other, &mut argument);
        let [first, second, ..] = argument;
        out.result(
            &format!("GET_VERSION of {size} bytes"),
            answer.map(|()| format!("{first:#x} {second:#x}")),
        );
    }
    out.done("GET_VERSION at address 0", kfd.ioctl_raw(request::GET_VERSION, 0));
    out.done("GET_VERSION at a kernel address", kfd.ioctl_raw(request::GET_VERSION, usize::MAX - 4095));
}

fn maps(kfd: &Kfd, out: &mut Transcript) {
    let kinds = [
        ("doorbell", MmapType::Doorbell),
        ("events", MmapType::Events),
        ("reserved memory", MmapType::ReservedMem),
        ("MMIO", MmapType::Mmio),
    ];
    for (name, kind) in kinds {
        let answer = kfd.mmap(4096, mmap::offset(kind, 1234));
        out.result(&format!("mmap of {name} before any event, GPU 1234"), answer.map(|_| "mapped"));
    }
    let mut args = GetVersionArgs::new_zeroed();
    out.done("GET_VERSION after the maps", kfd.ioctl(request::GET_VERSION, &mut args));
}

/// The device of another process (a forked child has it) answers nothing.
pub fn after_fork(kfd: &Kfd, out: &mut Transcript) {
    // SAFETY: the child makes only system calls and ends with _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut args = GetVersionArgs::new_zeroed();
        let code = kfd.ioctl(request::GET_VERSION, &mut args).err().unwrap_or(0);
        // SAFETY: ends this process without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: `status` is a valid place for the result.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    let errno = if waited == child && libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -1 };
    out.done("GET_VERSION in a forked child", if errno == 0 { Ok(()) } else { Err(errno) });
    let mut args = GetVersionArgs::new_zeroed();
    out.done("GET_VERSION in the parent afterwards", kfd.ioctl(request::GET_VERSION, &mut args));
}
