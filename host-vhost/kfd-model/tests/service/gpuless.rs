//! The answers of a real amdkfd 1.17 (Linux 6.12, Debian 13) on a machine without a GPU, measured: the `none` profile
//! gives the same.

use kfd_abi::aperture::{GetProcessAperturesArgs, GetProcessAperturesNewArgs, ProcessDeviceApertures};
use kfd_abi::clock::GetClockCountersArgs;
use kfd_abi::debug::RuntimeEnableArgs;
use kfd_abi::event::{
    DestroyEventArgs, EventData, KFD_IOC_EVENT_MEMORY, KFD_IOC_EVENT_SIGNAL, ResetEventArgs, SetEventArgs,
    WaitEventsArgs,
};
use kfd_abi::ioctl::{Direction, request as ioc};
use kfd_abi::kfd::{nr, request};
use kfd_abi::memory::{AcquireVmArgs, AllocFlags, GetAvailableMemoryArgs};
use kfd_abi::queue::CreateQueueArgs;
use kfd_abi::svm::SetXnackModeArgs;
use kfd_abi::version::GetVersionArgs;
use nix::errno::Errno;

use crate::caller::{Caller, peek, pointer};

fn wait(caller: &Caller, event_id: u32, timeout: u32) -> (Result<i32, Errno>, u32) {
    let mut events = [EventData { event_id, ..Default::default() }];
    let mut arguments = WaitEventsArgs {
        events_ptr: pointer(&mut events).0,
        num_events: 1,
        wait_for_all: 1,
        timeout,
        wait_result: 99,
    };
    let result = caller.call(request::WAIT_EVENTS, &mut arguments);
    (result, arguments.wait_result)
}

#[test]
fn version_and_apertures() {
    let caller = Caller::new("none");
    let mut version = GetVersionArgs::default();
    assert_eq!(caller.call(request::GET_VERSION, &mut version), Ok(0));
    assert_eq!((version.major_version, version.minor_version), (1, 17));
    let mut apertures = GetProcessAperturesNewArgs::default();
    assert_eq!(caller.call(request::GET_PROCESS_APERTURES_NEW, &mut apertures), Ok(0));
    assert_eq!(apertures.num_of_nodes, 0);
    let mut room = [ProcessDeviceApertures::default(); 8];
    apertures.kfd_process_device_apertures_ptr = pointer(&mut room).0;
    apertures.num_of_nodes = 8;
    assert_eq!(caller.call(request::GET_PROCESS_APERTURES_NEW, &mut apertures), Err(Errno::EINVAL));
    // kfd_ioctl_get_process_apertures_new: one node, the CPU's, is allowed and gives none.
    apertures.num_of_nodes = 1;
    assert_eq!(caller.call(request::GET_PROCESS_APERTURES_NEW, &mut apertures), Ok(0));
    assert_eq!(apertures.num_of_nodes, 0);
    let mut old = GetProcessAperturesArgs { num_of_nodes: 5, ..Default::default() };
    assert_eq!(caller.call(request::GET_PROCESS_APERTURES, &mut old), Ok(0));
    assert_eq!(old.num_of_nodes, 0);
}

#[test]
fn events() {
    let caller = Caller::new("none");
    let event = {
        let mut arguments = kfd_abi::event::CreateEventArgs {
            event_type: KFD_IOC_EVENT_SIGNAL,
            auto_reset: 1,
            ..Default::default()
        };
        assert_eq!(caller.call(request::CREATE_EVENT, &mut arguments), Ok(0));
        arguments
    };
    assert_eq!((event.event_id, event.event_slot_index, event.event_trigger_data), (1, 1, 1));
    assert_eq!(event.event_page_offset, 0x8000_0000_0000_0000);
    let page = caller.mmap_kfd(event.event_page_offset, 32768).unwrap();
    let mut slot = [0u8; 8];
    peek(&page, 0, &mut slot);
    assert_eq!(slot, [0xff; 8]);
    let id = event.event_id;
    assert_eq!(wait(&caller, id, 50), (Ok(0), 1), "timeout");
    assert_eq!(caller.call(request::SET_EVENT, &mut SetEventArgs { event_id: id, pad: 0 }), Ok(0));
    assert_eq!(wait(&caller, id, 1000), (Ok(0), 0));
    assert_eq!(wait(&caller, id, 20), (Ok(0), 1), "auto-reset");
    let second = caller.create_event(KFD_IOC_EVENT_SIGNAL, 0).unwrap().event_id;
    assert_eq!(caller.call(request::RESET_EVENT, &mut ResetEventArgs { event_id: second, pad: 0 }), Ok(0));
    let destroy = |event_id| caller.call(request::DESTROY_EVENT, &mut DestroyEventArgs { event_id, pad: 0 });
    assert_eq!((destroy(id), destroy(id)), (Ok(0), Err(Errno::EINVAL)));
    assert_eq!(
        caller.call(request::SET_EVENT, &mut SetEventArgs { event_id: 4000, pad: 0 }),
        Err(Errno::EINVAL)
    );
    assert_eq!(caller.create_event(KFD_IOC_EVENT_MEMORY, 0).unwrap().event_id, 0x4000_0000);
}

#[test]
fn what_needs_a_gpu_is_einval() {
    let caller = Caller::new("none");
    let mut clocks = GetClockCountersArgs::default();
    assert_eq!(caller.call(request::GET_CLOCK_COUNTERS, &mut clocks), Ok(0));
    assert_eq!((clocks.gpu_clock_counter, clocks.system_clock_freq), (0, 1_000_000_000));
    assert!(clocks.cpu_clock_counter > 0 && clocks.system_clock_counter > 0);
    assert_eq!(
        caller.call(request::ACQUIRE_VM, &mut AcquireVmArgs { drm_fd: 0, gpu_id: 1234 }),
        Err(Errno::EINVAL)
    );
    assert_eq!(caller.allocate(1234, 1 << 32, 4096, AllocFlags::GTT).unwrap_err(), Errno::EINVAL);
    let mut queue = CreateQueueArgs { gpu_id: 1234, ..Default::default() };
    assert_eq!(caller.call(request::CREATE_QUEUE, &mut queue), Err(Errno::EINVAL));
    let mut available = GetAvailableMemoryArgs::default();
    assert_eq!(caller.call(request::AVAILABLE_MEMORY, &mut available), Err(Errno::EINVAL));
    assert_eq!(
        caller.call(request::SET_XNACK_MODE, &mut SetXnackModeArgs { xnack_enabled: -1 }),
        Err(Errno::EPERM)
    );
    assert_eq!(caller.call(request::RUNTIME_ENABLE, &mut RuntimeEnableArgs::default()), Ok(0));
    assert_eq!(caller.call(0xc010_4b7f, &mut [0u8; 16]), Err(Errno::ENOTTY));
}

#[test]
fn there_is_no_render_node() {
    use kfd_seam::{KfdService, Lookup};
    let caller = Caller::new("none");
    let foreign = caller.model.lookup(std::path::Path::new("/dev/dri/renderD128"));
    assert_eq!(foreign, Lookup::Foreign);
}

/// Answers of Debian's kernel 6.12.117 with amdgpu loaded and no GPU, to root: the number of the ioctl, then the
/// results with an argument of 16 zero bytes, 128 zero bytes, 128 bytes of 0xff, and no bytes.
const REAL: &str = include_str!("../data/amdkfd-6.12-without-gpu-answers.txt");

#[test]
fn all_ones_and_all_zeros_are_answered_as_by_a_real_amdkfd() {
    let caller = Caller::new("none");
    let mut compared = 0;
    for line in REAL.lines() {
        let mut fields = line.split(' ');
        let number = u8::from_str_radix(fields.next().unwrap(), 16).unwrap();
        // CREATE_EVENT had no free slots there; CRIU_OP depends on the caller's capabilities.
        if [nr::CREATE_EVENT, nr::CRIU_OP].contains(&number) {
            continue;
        }
        for ((fill, size), expected) in [(0u8, 16), (0, 128), (0xff, 128), (0xff, 0)].into_iter().zip(fields)
        {
            let mut bytes = [fill; 128];
            let code = ioc(Direction::ReadWrite, b'K', number, size);
            let answer = match caller.call(code, &mut bytes) {
                Ok(value) => value,
                Err(errno) => -(errno as i32),
            };
            assert_eq!(
                answer,
                expected.parse::<i32>().unwrap(),
                "{number:#x} with {size} bytes of {fill:#x}"
            );
            compared += 1;
        }
    }
    assert_eq!(compared, 39 * 4);
}

#[test]
fn more_answers_of_a_real_amdkfd_about_events() {
    let caller = Caller::new("none");
    let wait = |events_ptr, num_events, wait_for_all| {
        let mut arguments =
            WaitEventsArgs { events_ptr, num_events, wait_for_all, timeout: 0, wait_result: 99 };
        let result = caller.call(request::WAIT_EVENTS, &mut arguments);
        (result, arguments.wait_result)
    };
    assert_eq!((wait(0, 0, 1), wait(0, 0, 0)), ((Ok(0), 0), (Ok(0), 0)));
    assert_eq!(wait(8, 74_898, 0), (Err(Errno::EFAULT), 2));
    assert_eq!(wait(8, 74_899, 0), (Err(Errno::ENOMEM), 2));
    let page = 0x8000_0000_0000_0000;
    assert_eq!(caller.mmap_kfd(page, 32768).unwrap_err(), Errno::EINVAL, "before the first event");
    let fill = || {
        let mut last = 0;
        let error = loop {
            match caller.create_event(KFD_IOC_EVENT_SIGNAL, 0) {
                Ok(event) => last = event.event_id,
                Err(errno) => break errno,
            }
        };
        (last, error)
    };
    assert_eq!(fill(), (255, Errno::ENOSPC));
    assert_eq!(caller.mmap_kfd(page, 65536).unwrap_err(), Errno::EINVAL);
    assert!(caller.mmap_kfd(page, 32768).is_ok());
    assert_eq!(fill(), (4095, Errno::ENOSPC));
    for kind in [0, 1, 3] {
        for gpu in [0, 77] {
            let answer = caller.mmap_kfd(kind << 62 | gpu << 46, 8192).unwrap_err();
            assert_eq!(answer, Errno::ENODEV, "type {kind}, GPU {gpu}");
        }
    }
}
