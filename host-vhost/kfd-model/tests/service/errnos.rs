//! Answers to wrong calls.

use std::os::fd::AsFd;

use kfd_abi::clock::GetClockCountersArgs;
use kfd_abi::criu::CriuArgs;
use kfd_abi::debug::{DbgRegisterArgs, DbgTrapArgs, RuntimeEnableArgs};
use kfd_abi::event::{EventData, KFD_IOC_EVENT_SIGNAL, WaitEventsArgs};
use kfd_abi::ioctl::{Direction, request as ioc};
use kfd_abi::kfd::{nr, request};
use kfd_abi::memory::{
    AcquireVmArgs, AllocFlags, ExportDmabufArgs, GetAvailableMemoryArgs, GetTileConfigArgs, ImportDmabufArgs,
    MapMemoryToGpuArgs, SetMemoryPolicyArgs, SetScratchBackingVaArgs, SetTrapHandlerArgs,
};
use kfd_abi::queue::{CreateQueueArgs, DestroyQueueArgs, SetCuMaskArgs, UpdateQueueArgs};
use kfd_abi::smi::SmiEventsArgs;
use kfd_abi::svm::{SetXnackModeArgs, SvmArgs};
use kfd_abi::version::GetVersionArgs;
use kfd_model::Model;
use kfd_model::profile::Profile;
use kfd_seam::{KfdService, UserPtr};
use nix::errno::Errno;

use crate::caller::{Caller, PAGE, machine, model, open, pointer};

/// A profile with another kernel.
fn with_kernel(name: &str, change: impl Fn(&mut Profile)) -> Caller {
    let mut profile = Profile::load(name).unwrap();
    change(&mut profile);
    Caller::on(Model::on(profile, &machine()).unwrap())
}

#[test]
fn numbers_out_of_range_are_enotty() {
    // kfd_ioctl: nr >= AMDKFD_CORE_IOCTL_COUNT, or below AMDKFD_COMMAND_START.
    let caller = Caller::unbound("gfx906");
    let mut bytes = [0u8; 64];
    for number in [0, 0x27, 0x28, 0x7f, 0x82, 0xff] {
        let code = ioc(Direction::ReadWrite, b'K', number, 16);
        assert_eq!(caller.call(code, &mut bytes), Err(Errno::ENOTTY), "{number:#x}");
    }
}

#[test]
fn the_range_grows_with_the_version() {
    for (minor, last) in
        [(9, nr::AVAILABLE_MEMORY), (11, 0x23), (12, 0x24), (13, 0x26), (18, 0x26), (19, 0x27)]
    {
        let caller = with_kernel("gfx906", |profile| profile.kernel.kfd_minor = minor);
        let mut bytes = [0u8; 256];
        let mut answer = |number| caller.call(ioc(Direction::ReadWrite, b'K', number, 0), &mut bytes);
        assert_ne!(answer(last), Err(Errno::ENOTTY), "minor {minor}");
        assert_eq!(answer(last + 1), Err(Errno::ENOTTY), "minor {minor}");
        let mut version = GetVersionArgs::default();
        caller.call(request::GET_VERSION, &mut version).unwrap();
        assert_eq!((version.major_version, version.minor_version), (1, minor));
    }
}

#[test]
fn neither_type_nor_size_of_a_request_matters() {
    // kfd_ioctl dispatches by _IOC_NR and copies as many bytes as the caller named.
    let caller = Caller::unbound("gfx906");
    let mut version = [0x5555_5555u32; 4];
    caller.call(ioc(Direction::Write, b'x', nr::GET_VERSION, 4), &mut version).unwrap();
    assert_eq!(version, [1, 0x5555_5555, 0x5555_5555, 0x5555_5555]);
    caller.call(ioc(Direction::Read, b'K', nr::GET_VERSION, 16), &mut version).unwrap();
    assert_eq!(version, [1, 17, 0, 0], "bytes beyond the kernel's structure are the zeros it began with");
}

#[test]
fn a_wrong_pointer_is_efault() {
    let caller = Caller::unbound("gfx906");
    for address in [0, 8, 1 << 63, u64::MAX] {
        let answer = caller.model.ioctl(caller.kfd, request::GET_VERSION, UserPtr(address));
        assert_eq!(answer, Err(Errno::EFAULT), "{address:#x}");
    }
}

#[test]
fn an_unknown_gpu_is_einval() {
    // kfd_process_device_data_by_id in every handler but GET_CLOCK_COUNTERS.
    let caller = Caller::new("gfx906");
    let gpu_id = caller.gpu() ^ 1;
    let einval = Err(Errno::EINVAL);
    assert_eq!(
        caller.call(request::SET_MEMORY_POLICY, &mut SetMemoryPolicyArgs { gpu_id, ..Default::default() }),
        einval
    );
    let mut scratch = SetScratchBackingVaArgs { gpu_id, ..Default::default() };
    assert_eq!(caller.call(request::SET_SCRATCH_BACKING_VA, &mut scratch), einval);
    assert_eq!(
        caller.call(request::SET_TRAP_HANDLER, &mut SetTrapHandlerArgs { gpu_id, ..Default::default() }),
        einval
    );
    assert_eq!(
        caller.call(request::GET_TILE_CONFIG, &mut GetTileConfigArgs { gpu_id, ..Default::default() }),
        einval
    );
    assert_eq!(caller.call(request::ACQUIRE_VM, &mut AcquireVmArgs { gpu_id, drm_fd: 0 }), einval);
    let mut available = GetAvailableMemoryArgs { gpu_id, ..Default::default() };
    assert_eq!(caller.call(request::AVAILABLE_MEMORY, &mut available), einval);
    assert_eq!(
        caller.call(request::CREATE_QUEUE, &mut CreateQueueArgs { gpu_id, ..Default::default() }),
        einval
    );
    assert_eq!(caller.call(request::SMI_EVENTS, &mut SmiEventsArgs { gpuid: gpu_id, anon_fd: 0 }), einval);
    assert_eq!(
        caller.call(request::IMPORT_DMABUF, &mut ImportDmabufArgs { gpu_id, ..Default::default() }),
        einval
    );
    let handle = u64::from(gpu_id) << 32;
    assert_eq!(
        caller.call(request::EXPORT_DMABUF, &mut ExportDmabufArgs { handle, ..Default::default() }),
        einval
    );
    assert_eq!(caller.allocate(gpu_id, 0x10_0000, PAGE, AllocFlags::GTT).unwrap_err(), Errno::EINVAL);
    assert_eq!(caller.free(handle), einval);
    assert_eq!(caller.map(handle, &[gpu_id]), (einval, 0));
    assert_eq!(caller.unmap(handle, &[gpu_id]), (einval, 0));
    let mut clocks = GetClockCountersArgs { gpu_id, ..Default::default() };
    assert_eq!(caller.call(request::GET_CLOCK_COUNTERS, &mut clocks), Ok(0), "kfd_ioctl_get_clock_counters");
    assert_eq!(clocks.gpu_clock_counter, 0);
}

#[test]
fn without_an_address_space_nothing_goes() {
    // kfd_bind_process_to_device: ENODEV, which some handlers turn into ESRCH.
    let caller = Caller::unbound("gfx906");
    let gpu_id = caller.gpu();
    let enodev = Err(Errno::ENODEV);
    let esrch = Err(Errno::ESRCH);
    assert_eq!(
        caller.call(request::SET_MEMORY_POLICY, &mut SetMemoryPolicyArgs { gpu_id, ..Default::default() }),
        esrch
    );
    assert_eq!(
        caller.call(request::SET_TRAP_HANDLER, &mut SetTrapHandlerArgs { gpu_id, ..Default::default() }),
        esrch
    );
    assert_eq!(
        caller.call(request::CREATE_QUEUE, &mut CreateQueueArgs { gpu_id, ..Default::default() }),
        esrch
    );
    let mut scratch = SetScratchBackingVaArgs { gpu_id, ..Default::default() };
    assert_eq!(caller.call(request::SET_SCRATCH_BACKING_VA, &mut scratch), enodev);
    assert_eq!(caller.allocate(gpu_id, 0x10_0000, PAGE, AllocFlags::GTT).unwrap_err(), Errno::ENODEV);
    assert_eq!(caller.map(u64::from(gpu_id) << 32, &[gpu_id]), (enodev, 0));
    // kfd_ioctl_get_tile_config and kfd_ioctl_get_available_memory do not bind.
    assert_eq!(
        caller.call(request::GET_TILE_CONFIG, &mut GetTileConfigArgs { gpu_id, ..Default::default() }),
        Ok(0)
    );
    let mut available = GetAvailableMemoryArgs { gpu_id, ..Default::default() };
    assert_eq!(caller.call(request::AVAILABLE_MEMORY, &mut available), Ok(0));
}

#[test]
fn a_render_node_is_acquired_once() {
    // kfd_ioctl_acquire_vm.
    let caller = Caller::unbound("gfx906x2");
    let [first, second] = &caller.gpus[..] else { panic!() };
    let bad = |drm_fd| caller.call(request::ACQUIRE_VM, &mut AcquireVmArgs { drm_fd, gpu_id: first.id });
    assert_eq!(bad(u32::MAX), Err(Errno::EINVAL), "no descriptor");
    assert_eq!(bad(999_999), Err(Errno::EINVAL), "not open");
    assert_eq!(caller.acquire(first, &caller.descriptor), Err(Errno::EINVAL), "no render node");
    assert_eq!(caller.acquire(first, &second.descriptor), Err(Errno::EINVAL), "another GPU's");
    assert_eq!(caller.acquire(first, &first.descriptor), Ok(0));
    assert_eq!(caller.acquire(first, &first.descriptor), Ok(0), "the same file again");
    let copy = first.descriptor.as_fd().try_clone_to_owned().unwrap();
    assert_eq!(caller.acquire(first, &copy), Ok(0), "a copy is the same file");
    let (_, other) = open(&caller.model, "/dev/dri/renderD128");
    assert_eq!(caller.acquire(first, &other), Err(Errno::EBUSY));
    assert_eq!(caller.acquire(first, &caller.descriptor), Err(Errno::EBUSY));
    assert_eq!(bad(999_999), Err(Errno::EINVAL));
}

#[test]
fn policies_are_checked() {
    // kfd_ioctl_set_memory_policy.
    let caller = Caller::new("gfx906");
    let set = |default_policy, alternate_policy| {
        let mut arguments = SetMemoryPolicyArgs {
            gpu_id: caller.gpu(),
            default_policy,
            alternate_policy,
            ..Default::default()
        };
        caller.call(request::SET_MEMORY_POLICY, &mut arguments)
    };
    assert_eq!((set(0, 1), set(1, 0)), (Ok(0), Ok(0)));
    assert_eq!((set(2, 0), set(0, 2)), (Err(Errno::EINVAL), Err(Errno::EINVAL)));
}

#[test]
fn queue_arguments_are_checked_in_the_kernels_order() {
    // set_queue_properties_from_user, kfd_ioctl_create_queue.
    let caller = Caller::new("gfx906");
    let good = CreateQueueArgs {
        gpu_id: caller.gpu(),
        ring_base_address: 0x10_0000,
        ring_size: 4096,
        read_pointer_address: 0x20_0000,
        write_pointer_address: 0x20_0008,
        queue_type: 2,
        queue_percentage: 100,
        queue_priority: 7,
        ..Default::default()
    };
    let create =
        |mut arguments: CreateQueueArgs| caller.call(request::CREATE_QUEUE, &mut arguments).unwrap_err();
    assert_eq!(create(CreateQueueArgs { queue_percentage: 101, ..good }), Errno::EINVAL);
    assert_eq!(create(CreateQueueArgs { queue_priority: 16, ..good }), Errno::EINVAL);
    assert_eq!(create(CreateQueueArgs { ring_size: 4097, ..good }), Errno::EINVAL);
    assert_eq!(create(CreateQueueArgs { ring_base_address: 1 << 63, ..good }), Errno::EFAULT);
    assert_eq!(create(CreateQueueArgs { read_pointer_address: u64::MAX, ..good }), Errno::EFAULT);
    assert_eq!(create(CreateQueueArgs { write_pointer_address: 1 << 63, ..good }), Errno::EFAULT);
    assert_eq!(create(CreateQueueArgs { eop_buffer_address: 1 << 63, ..good }), Errno::EFAULT);
    assert_eq!(create(CreateQueueArgs { ctx_save_restore_address: 1 << 63, ..good }), Errno::EFAULT);
    let unknown_type = caller.model.ioctl(
        caller.kfd,
        request::CREATE_QUEUE,
        pointer(&mut CreateQueueArgs { queue_type: 5, ..good }),
    );
    assert_eq!(unknown_type.unwrap_err() as i32, Errno::from_raw(524) as i32, "ENOTSUPP");
    assert_eq!(create(CreateQueueArgs { queue_type: 4, sdma_engine_id: 2, ..good }), Errno::EINVAL);
    assert_eq!(create(good), Errno::EINVAL, "kfd_queue_acquire_buffers: nothing is mapped");
}

#[test]
fn queues_that_do_not_exist() {
    let caller = Caller::new("gfx906");
    // pqm_destroy_queue, pqm_update_queue_properties, pqm_update_mqd.
    assert_eq!(caller.call(request::DESTROY_QUEUE, &mut DestroyQueueArgs::default()), Err(Errno::EINVAL));
    assert_eq!(caller.call(request::UPDATE_QUEUE, &mut UpdateQueueArgs::default()), Err(Errno::EFAULT));
    let mut priority = UpdateQueueArgs { queue_priority: 16, ..Default::default() };
    assert_eq!(caller.call(request::UPDATE_QUEUE, &mut priority), Err(Errno::EINVAL));
    let mut words = [0u32; 2];
    let mut mask = SetCuMaskArgs { queue_id: 0, num_cu_mask: 33, cu_mask_ptr: pointer(&mut words).0 };
    assert_eq!(caller.call(request::SET_CU_MASK, &mut mask), Err(Errno::EINVAL));
    mask.num_cu_mask = 0;
    assert_eq!(caller.call(request::SET_CU_MASK, &mut mask), Err(Errno::EINVAL));
    mask.num_cu_mask = 64;
    assert_eq!(caller.call(request::SET_CU_MASK, &mut mask), Err(Errno::EFAULT));
}

#[test]
fn old_debugger_and_checkpoints() {
    let caller = Caller::new("gfx906");
    // kfd_ioctl_dbg_register, the CRIU flag of the table.
    let mut old = DbgRegisterArgs::default();
    for code in [
        request::DBG_REGISTER_DEPRECATED,
        request::DBG_UNREGISTER_DEPRECATED,
        request::DBG_ADDRESS_WATCH_DEPRECATED,
        request::DBG_WAVE_CONTROL_DEPRECATED,
    ] {
        assert_eq!(caller.call(code, &mut old), Err(Errno::EPERM));
    }
    let criu = caller.call(request::CRIU_OP, &mut CriuArgs::default());
    assert!(matches!(criu, Err(Errno::EACCES | Errno::EOPNOTSUPP)), "by capability: {criu:?}");
    // kfd_ioctl_set_debug_trap: no process has number 0.
    assert_eq!(caller.call(request::DBG_TRAP, &mut DbgTrapArgs::default()), Err(Errno::ESRCH));
    let mut own = DbgTrapArgs { pid: std::process::id(), ..Default::default() };
    assert_eq!(caller.call(request::DBG_TRAP, &mut own), Err(Errno::EOPNOTSUPP));
}

#[test]
fn the_runtime_announces_itself_once() {
    // runtime_enable, runtime_disable.
    let caller = Caller::new("gfx906");
    let set = |mode_mask| {
        caller.call(request::RUNTIME_ENABLE, &mut RuntimeEnableArgs { mode_mask, ..Default::default() })
    };
    assert_eq!(set(0), Ok(0));
    assert_eq!(set(3), Ok(0));
    assert_eq!(set(1), Err(Errno::EBUSY));
    assert_eq!(set(0), Ok(0));
    assert_eq!(set(1), Ok(0));
}

#[test]
fn xnack_and_svm_by_kernel_and_gpu() {
    // kfd_ioctl_set_xnack_mode, kfd_process_xnack_mode, kfd_ioctl_svm, and their stubs without CONFIG_HSA_AMD_SVM.
    let xnack = |caller: &Caller, xnack_enabled| {
        let mut arguments = SetXnackModeArgs { xnack_enabled };
        caller.call(request::SET_XNACK_MODE, &mut arguments).map(|_| arguments.xnack_enabled)
    };
    let svm = |caller: &Caller, mut arguments: SvmArgs| caller.call(request::SVM, &mut arguments);
    let pages = SvmArgs { start_addr: PAGE, size: PAGE, ..Default::default() };

    let without = Caller::new("gfx906");
    assert_eq!((xnack(&without, -1), xnack(&without, 0)), (Err(Errno::EPERM), Err(Errno::EPERM)));
    assert_eq!(svm(&without, pages), Err(Errno::EPERM));
    assert_eq!(svm(&without, SvmArgs { nattr: 1, ..pages }), Err(Errno::EINVAL), "kfd_ioctl_svm_validate");
    assert_eq!(svm(&without, SvmArgs { nattr: u32::MAX, ..pages }), Err(Errno::EINVAL));

    let gfx906 = with_kernel("gfx906", |profile| profile.kernel.svm = true);
    assert_eq!(xnack(&gfx906, -1), Ok(0));
    assert_eq!((xnack(&gfx906, 0), xnack(&gfx906, 1)), (Ok(0), Err(Errno::EPERM)), "noretry");
    assert_eq!(svm(&gfx906, SvmArgs { start_addr: 1, ..pages }), Err(Errno::EINVAL));
    assert_eq!(svm(&gfx906, SvmArgs { size: 0, ..pages }), Err(Errno::EINVAL));
    assert_eq!(svm(&gfx906, pages), Err(Errno::EINVAL), "svm_range_set_attr: no address space was taken");

    let gfx90a = with_kernel("gfx90a", |profile| profile.kernel.svm = true);
    assert_eq!((xnack(&gfx90a, -1), xnack(&gfx90a, 1), xnack(&gfx90a, -1)), (Ok(0), Ok(1), Ok(1)));
    let navi = with_kernel("gfx1030", |profile| {
        profile.kernel.svm = true;
        profile.gpu[0].retry_faults = true;
    });
    assert_eq!(xnack(&navi, 0), Ok(0));
}

#[test]
fn waits_are_bounded_and_their_pointer_is_checked() {
    // alloc_event_waiters, kfd_wait_on_events.
    let caller = Caller::new("gfx906");
    let mut wait = WaitEventsArgs { num_events: u32::MAX, events_ptr: 8, ..Default::default() };
    assert_eq!(caller.call(request::WAIT_EVENTS, &mut wait), Err(Errno::ENOMEM));
    assert_eq!(wait.wait_result, 2);
    wait.num_events = 1;
    assert_eq!(caller.call(request::WAIT_EVENTS, &mut wait), Err(Errno::EFAULT));
    let mut events = [EventData { event_id: 9, ..Default::default() }];
    wait.events_ptr = pointer(&mut events).0;
    assert_eq!(caller.call(request::WAIT_EVENTS, &mut wait), Err(Errno::EINVAL));
    let event = caller.create_event(KFD_IOC_EVENT_SIGNAL, 0).unwrap();
    let mut events = [EventData { event_id: event.event_id, ..Default::default() }];
    wait.events_ptr = pointer(&mut events).0;
    assert_eq!(caller.call(request::WAIT_EVENTS, &mut wait), Ok(0));
    assert_eq!(wait.wait_result, 1);
}

#[test]
fn maps_name_one_gpu_at_least_and_not_too_many() {
    // kfd_ioctl_map_memory_to_gpu.
    let caller = Caller::new("gfx906");
    let call = |n_devices, n_success, device_ids_array_ptr| {
        let mut arguments = MapMemoryToGpuArgs { handle: 0, device_ids_array_ptr, n_devices, n_success };
        caller.call(request::MAP_MEMORY_TO_GPU, &mut arguments).unwrap_err()
    };
    assert_eq!(call(0, 0, 0), Errno::EINVAL);
    assert_eq!(call(1, 2, 0), Errno::EINVAL);
    assert_eq!(call(u32::MAX, 0, 0), Errno::ENOMEM);
    assert_eq!(call(1, 0, 8), Errno::EFAULT);
}

#[test]
fn closed_files_and_forked_children_are_ebadf() {
    let caller = Caller::new("gfx906");
    let (file, _descriptor) = open(&caller.model, "/dev/kfd");
    let mut version = GetVersionArgs::default();
    assert_eq!(caller.model.ioctl(file, request::GET_VERSION, pointer(&mut version)), Ok(0));
    caller.model.release(file);
    assert_eq!(caller.model.ioctl(file, request::GET_VERSION, pointer(&mut version)), Err(Errno::EBADF));
    caller.model.forked();
    assert_eq!(caller.call(request::GET_VERSION, &mut version), Err(Errno::EBADF));
}

#[test]
fn state_outlives_the_descriptors() {
    // amdkfd keeps a process until its address space is gone.
    let model = model("gfx906");
    let caller = Caller::on(model);
    let event = caller.create_event(KFD_IOC_EVENT_SIGNAL, 0).unwrap();
    caller.model.release(caller.kfd);
    let again = Caller { kfd: open(&caller.model, "/dev/kfd").0, ..caller };
    assert_eq!(again.create_event(KFD_IOC_EVENT_SIGNAL, 0).unwrap().event_id, event.event_id + 1);
}
