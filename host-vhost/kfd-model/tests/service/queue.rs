//! Queues: what the driver checks, and that packets run.

use std::time::Duration;

use kfd_abi::event::{EventData, KFD_IOC_EVENT_MEMORY, WaitEventsArgs};
use kfd_abi::kfd::request;
use kfd_abi::memory::AllocFlags;
use kfd_abi::mmap::{MmapType, offset};
use kfd_abi::queue::{
    AllocQueueGwsArgs, CreateQueueArgs, DestroyQueueArgs, GetQueueWaveStateArgs, KFD_IOC_QUEUE_TYPE_COMPUTE,
    KFD_IOC_QUEUE_TYPE_COMPUTE_AQL, KFD_IOC_QUEUE_TYPE_SDMA, KFD_IOC_QUEUE_TYPE_SDMA_XGMI, SetCuMaskArgs,
    UpdateQueueArgs,
};
use kfd_model::Model;
use kfd_model::profile::Profile;
use kfd_seam::Result;
use nix::errno::Errno;

use crate::caller::{Buffer, Caller, PAGE, machine, pointer, poke};

/// Where things are for the GPU.
const RING: u64 = 0x10_0000;
const WRITE_POINTER: u64 = 0x20_0000;
const READ_POINTER: u64 = 0x21_0000;
const EOP: u64 = 0x30_0000;
const DATA: u64 = 0x40_0000;
const SAVE_AREA: u64 = 0x1000_0000;

/// `kfd_queue_ctx_save_restore_size` for Vega 20 with 60 compute units: 2048 waves (4 engines of 512), of 8 bytes in the
/// control stack and 32 for the debugger; for each unit 256 KiB of vector registers, 16 KiB of scalar ones, 64 KiB of
/// LDS and 4 KiB of hardware registers.
const CONTROL_STACK: u32 = 0x5000;
const SAVE_AREA_SIZE: u32 = CONTROL_STACK + 60 * (0x4_0000 + 0x4000 + 0x1_0000 + 0x1000);
const DEBUGGER: u32 = 2048 * 32;

struct Program {
    caller: Caller,
    ring: Buffer,
}

impl Program {
    /// With all buffers that a queue needs, for a GPU of `gfx906`'s kind.
    fn new(caller: Caller) -> Self {
        let buffer = |va, size| {
            let flags = AllocFlags::GTT | AllocFlags::WRITABLE;
            let buffer = caller.allocate(caller.gpu(), va, size, flags).unwrap();
            caller.map(buffer.handle, &[caller.gpu()]).0.unwrap();
            buffer
        };
        let ring = buffer(RING, PAGE);
        for va in [WRITE_POINTER, READ_POINTER, EOP, DATA] {
            buffer(va, PAGE);
        }
        buffer(SAVE_AREA, u64::from(SAVE_AREA_SIZE + DEBUGGER));
        Self { caller, ring }
    }

    fn arguments(&self, queue_type: u32) -> CreateQueueArgs {
        CreateQueueArgs {
            gpu_id: self.caller.gpu(),
            ring_base_address: RING,
            ring_size: 4096,
            write_pointer_address: WRITE_POINTER,
            read_pointer_address: READ_POINTER,
            eop_buffer_address: EOP,
            eop_buffer_size: 4096,
            ctx_save_restore_address: SAVE_AREA,
            ctx_save_restore_size: SAVE_AREA_SIZE,
            ctl_stack_size: CONTROL_STACK,
            queue_percentage: 100,
            queue_priority: 7,
            queue_type,
            ..Default::default()
        }
    }

    fn create(&self, mut arguments: CreateQueueArgs) -> Result<CreateQueueArgs> {
        self.caller.call(request::CREATE_QUEUE, &mut arguments).map(|_| arguments)
    }

    fn destroy(&self, queue_id: u32) -> Result<i32> {
        self.caller.call(request::DESTROY_QUEUE, &mut DestroyQueueArgs { queue_id, pad: 0 })
    }

    fn update(&self, queue_id: u32, queue_percentage: u32, ring_base_address: u64) -> Result<i32> {
        let mut arguments = UpdateQueueArgs {
            ring_base_address,
            queue_id,
            ring_size: 4096,
            queue_percentage,
            queue_priority: 7,
        };
        self.caller.call(request::UPDATE_QUEUE, &mut arguments)
    }

    /// Rings for an SDMA queue whose ring has one more packet, the second, third and so on: a FENCE that writes `data`
    /// to `va` (`SDMA_PKT_FENCE_*` of vega10_sdma_pkt_open.h).
    fn fence(&self, queue: &CreateQueueArgs, number: u64, va: u64, data: u32) {
        let words = [5, va as u32, (va >> 32) as u32, data];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let gpu = self.caller.gpu();
        self.caller.model.write_gpu(gpu, RING + (number - 1) * 16, &bytes).unwrap();
        self.caller.model.write_gpu(gpu, WRITE_POINTER, &(number * 16).to_le_bytes()).unwrap();
        let slice = self.caller.mmap_kfd(offset(MmapType::Doorbell, gpu), 2 * PAGE).unwrap();
        poke(&slice, queue.doorbell_offset & 0x1fff, &(number * 16).to_le_bytes());
    }

    fn word(&self, va: u64) -> u32 {
        let bytes = self.caller.seen(self.caller.gpu(), va, 4).unwrap();
        u32::from_le_bytes(bytes.try_into().unwrap())
    }

    fn gws(&self, queue_id: u32, num_gws: u32) -> Result<i32> {
        let mut arguments = AllocQueueGwsArgs { queue_id, num_gws, first_gws: 9, pad: 0 };
        let result = self.caller.call(request::ALLOC_QUEUE_GWS, &mut arguments);
        if result.is_ok() {
            assert_eq!(arguments.first_gws, 0);
        }
        result
    }
}

fn until(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::yield_now();
    }
}

#[test]
fn buffers_are_mapped_with_the_size_that_the_driver_expects() {
    // kfd_queue_acquire_buffers, kfd_queue_buffer_get.
    let program = Program::new(Caller::new("gfx906"));
    let aql = program.arguments(KFD_IOC_QUEUE_TYPE_COMPUTE_AQL);
    let bad = |arguments| program.create(arguments).unwrap_err();
    for wrong in [
        CreateQueueArgs { write_pointer_address: 0x50_0000, ..aql },
        CreateQueueArgs { read_pointer_address: 0x50_0000, ..aql },
        CreateQueueArgs { write_pointer_address: SAVE_AREA, ..aql },
        CreateQueueArgs { ring_size: 8192, ..aql },
        CreateQueueArgs { ring_base_address: 0, ..aql },
        CreateQueueArgs { ring_base_address: SAVE_AREA + PAGE, ..aql },
        CreateQueueArgs { eop_buffer_size: 2048, ..aql },
        CreateQueueArgs { eop_buffer_size: 8192, ..aql },
        CreateQueueArgs { eop_buffer_address: 0x50_0000, ..aql },
        CreateQueueArgs { ctl_stack_size: CONTROL_STACK + 1, ..aql },
        CreateQueueArgs { ctx_save_restore_size: SAVE_AREA_SIZE - 1, ..aql },
        CreateQueueArgs { ctx_save_restore_size: SAVE_AREA_SIZE + 4096, ..aql },
        CreateQueueArgs { ctx_save_restore_address: RING, ..aql },
    ] {
        assert_eq!(bad(wrong), Errno::EINVAL, "{wrong:?}");
    }
    // Only compute queues have the others.
    let sdma = CreateQueueArgs {
        queue_type: KFD_IOC_QUEUE_TYPE_SDMA,
        eop_buffer_address: 0x50_0000,
        ctl_stack_size: 1,
        ctx_save_restore_address: 0,
        ..aql
    };
    // Within a page anything goes; a size of less than a page is not compared.
    let inside = CreateQueueArgs { write_pointer_address: WRITE_POINTER + 8, ring_size: 512, ..sdma };
    for good in [aql, CreateQueueArgs { eop_buffer_address: 0, ..aql }, sdma, inside] {
        let made = program.create(good).unwrap();
        assert_eq!(made.ring_size, good.ring_size.max(1024), "KFD_MIN_QUEUE_RING_SIZE");
        assert_eq!((made.queue_id, program.destroy(0)), (0, Ok(0)));
    }
    // Nothing of all that is held.
    assert_eq!(program.caller.unmap(program.ring.handle, &[aql.gpu_id]), (Ok(0), 1));
}

#[test]
fn older_kernels_do_not_look_at_buffers() {
    let mut profile = Profile::load("gfx906").unwrap();
    profile.kernel.kfd_minor = 16;
    let program = Program::new(Caller::bound(Model::on(profile, &machine()).unwrap()));
    let aql = program.arguments(KFD_IOC_QUEUE_TYPE_COMPUTE_AQL);
    let queue = program.create(CreateQueueArgs { ctl_stack_size: 1, eop_buffer_size: 8192, ..aql }).unwrap();
    assert_eq!(program.caller.unmap(program.ring.handle, &[aql.gpu_id]), (Ok(0), 1));
    assert_eq!(program.destroy(queue.queue_id), Ok(0));
}

#[test]
fn buffers_stay_mapped_as_long_as_their_queue_is_there() {
    // unmap_bo_from_gpuvm, kfd_queue_unref_bo_vas, pqm_update_queue_properties.
    let program = Program::new(Caller::new("gfx906"));
    let gpu = program.caller.gpu();
    let unmap = || program.caller.unmap(program.ring.handle, &[gpu]);
    let arguments = program.arguments(KFD_IOC_QUEUE_TYPE_COMPUTE);
    let ids = [(); 2].map(|()| program.create(arguments).unwrap().queue_id);
    assert_eq!(unmap(), (Err(Errno::EBUSY), 0));
    program.destroy(ids[0]).unwrap();
    assert_eq!(unmap(), (Err(Errno::EBUSY), 0));
    assert_eq!(program.update(ids[1], 100, 0x50_0000), Err(Errno::EFAULT), "not mapped");
    assert_eq!(
        program.update(ids[1], 100, 0),
        Ok(0),
        "without a ring it rests, and keeps the one that it had"
    );
    assert_eq!(unmap(), (Err(Errno::EBUSY), 0));
    assert_eq!(program.update(ids[1], 100, DATA), Ok(0), "another ring");
    assert_eq!(unmap(), (Ok(0), 1));
    assert_eq!(program.destroy(ids[1]), Ok(0));
    assert_eq!(program.destroy(ids[1]), Err(Errno::EINVAL));
    assert_eq!(program.update(ids[1], 100, 0), Err(Errno::EFAULT));
}

#[test]
fn a_gpu_takes_so_many_queues() {
    // pqm_create_queue: max_queues.
    let program = Program::new(Caller::new("gfx906"));
    let arguments = program.arguments(KFD_IOC_QUEUE_TYPE_COMPUTE_AQL);
    let doorbells: Vec<u64> =
        (0..127).map(|_| program.create(arguments).unwrap().doorbell_offset & 0x1fff).collect();
    assert_eq!(doorbells, (0..127).map(|number| number * 8).collect::<Vec<_>>());
    assert_eq!(program.create(arguments).unwrap_err(), Errno::ENOSPC);
    program.destroy(5).unwrap();
    let xgmi = program.arguments(KFD_IOC_QUEUE_TYPE_SDMA_XGMI);
    assert_eq!(program.create(xgmi).unwrap_err(), Errno::ENOMEM, "allocate_sdma_queue: no such engine");
    let again = program.create(arguments).unwrap();
    assert_eq!((again.queue_id, again.doorbell_offset & 0x1fff), (5, 40));
    assert_eq!(again.doorbell_offset & !0x1fff, offset(MmapType::Doorbell, arguments.gpu_id));
}

#[test]
fn packets_run_while_the_queue_is_active() {
    let program = Program::new(Caller::new("gfx906"));
    let queue = program.create(program.arguments(KFD_IOC_QUEUE_TYPE_SDMA)).unwrap();
    program.fence(&queue, 1, DATA, 7);
    until(|| program.word(DATA) == 7);
    program.update(queue.queue_id, 0, RING).unwrap();
    program.fence(&queue, 2, DATA, 8);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(program.word(DATA), 7);
    program.update(queue.queue_id, 50, RING).unwrap();
    until(|| program.word(DATA) == 8);
    until(|| program.word(READ_POINTER) == 32);
    // The next queue in its place finds no ring of the old one.
    program.destroy(queue.queue_id).unwrap();
    for pointer in [WRITE_POINTER, READ_POINTER] {
        program.caller.model.write_gpu(program.caller.gpu(), pointer, &[0; 8]).unwrap();
    }
    let next = program.create(program.arguments(KFD_IOC_QUEUE_TYPE_SDMA)).unwrap();
    assert_eq!(next.doorbell_offset, queue.doorbell_offset);
    program.fence(&next, 1, DATA + 4, 9);
    until(|| program.word(DATA + 4) == 9);
}

#[test]
fn a_memory_fault_takes_all_queues_off_the_gpu() {
    // kfd_set_dbg_ev_from_interrupt: kfd_dqm_evict_pasid, then kfd_signal_vm_fault_event.
    let program = Program::new(Caller::new("gfx906"));
    // With pointers of its own: it looks at its write pointer before its doorbell is rung.
    let aql = CreateQueueArgs {
        write_pointer_address: DATA + 2048,
        read_pointer_address: DATA + 2048 + 72,
        ..program.arguments(KFD_IOC_QUEUE_TYPE_COMPUTE_AQL)
    };
    let aql = program.create(aql).unwrap();
    let mut stack = [0u32; 4];
    let mut state = GetQueueWaveStateArgs {
        ctl_stack_address: pointer(&mut stack).0,
        queue_id: aql.queue_id,
        ..Default::default()
    };
    let sdma = program.arguments(KFD_IOC_QUEUE_TYPE_SDMA);
    let wrong = program.create(sdma).unwrap();
    // It rests until then, so that it is in the middle of nothing.
    let other = program.create(CreateQueueArgs { queue_percentage: 0, ..sdma }).unwrap();
    let event = program.caller.create_event(KFD_IOC_EVENT_MEMORY, 0).unwrap().event_id;
    let wave_state =
        |state: &mut GetQueueWaveStateArgs| program.caller.call(request::GET_QUEUE_WAVE_STATE, state);
    assert_eq!(wave_state(&mut state), Err(Errno::EINVAL), "it is active");
    program.fence(&wrong, 1, 0x50_0010, 1);
    let mut events = [EventData { event_id: event, ..Default::default() }];
    let mut wait = WaitEventsArgs {
        events_ptr: pointer(&mut events).0,
        num_events: 1,
        timeout: u32::MAX,
        ..Default::default()
    };
    program.caller.call(request::WAIT_EVENTS, &mut wait).unwrap();
    let data = std::hint::black_box(&events)[0].memory_exception_data();
    assert_eq!((data.va, data.gpu_id, data.failure.not_present), (0x50_0000, sdma.gpu_id, 1));
    let next = program.create(sdma).unwrap();
    for queue in [&other, &next] {
        program.fence(queue, 1, DATA, 1);
        program.update(queue.queue_id, 100, RING).unwrap();
    }
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(program.word(DATA), 0);
    assert_eq!(wave_state(&mut state), Ok(0), "it is inactive now");
    for queue in [&aql, &wrong, &other, &next] {
        assert_eq!(program.destroy(queue.queue_id), Ok(0));
    }
}

#[test]
fn the_wave_state_of_an_inactive_queue() {
    // dqm get_wave_state, get_wave_state of kfd_mqd_manager_v9.c with what its init_mqd sets.
    let program = Program::new(Caller::new("gfx906"));
    let [queue, sdma] = [KFD_IOC_QUEUE_TYPE_COMPUTE_AQL, KFD_IOC_QUEUE_TYPE_SDMA].map(|kind| {
        program.create(CreateQueueArgs { queue_percentage: 0, ..program.arguments(kind) }).unwrap()
    });
    let mut stack = [9u32; 5];
    let mut arguments = GetQueueWaveStateArgs {
        ctl_stack_address: pointer(&mut stack).0,
        ctl_stack_used_size: 9,
        save_area_used_size: 9,
        queue_id: queue.queue_id,
        pad: 0,
    };
    let call =
        |arguments: &mut GetQueueWaveStateArgs| program.caller.call(request::GET_QUEUE_WAVE_STATE, arguments);
    assert_eq!(call(&mut arguments), Ok(0));
    assert_eq!((arguments.ctl_stack_used_size, arguments.save_area_used_size), (0, 0));
    assert_eq!(*std::hint::black_box(&stack), [CONTROL_STACK, 0, CONTROL_STACK, 0, 9]);
    arguments.queue_id = sdma.queue_id;
    assert_eq!(call(&mut arguments), Err(Errno::EINVAL));
    arguments.queue_id = 77;
    assert_eq!(call(&mut arguments), Err(Errno::EFAULT));
    arguments = GetQueueWaveStateArgs { ctl_stack_address: 8, queue_id: queue.queue_id, ..arguments };
    assert_eq!(call(&mut arguments), Err(Errno::EFAULT));
}

#[test]
fn global_wave_sync_goes_to_one_queue() {
    // kfd_ioctl_alloc_queue_gws, pqm_set_gws, pqm_clean_queue_resource.
    let program = Program::new(Caller::new("gfx906"));
    let arguments = program.arguments(KFD_IOC_QUEUE_TYPE_COMPUTE_AQL);
    let [one, two] = [(); 2].map(|()| program.create(arguments).unwrap().queue_id);
    assert_eq!(program.gws(77, 1), Err(Errno::EINVAL));
    assert_eq!(program.gws(one, 0), Err(Errno::EINVAL));
    assert_eq!(program.gws(one, 64), Ok(0));
    assert_eq!((program.gws(two, 1), program.gws(one, 1)), (Err(Errno::EBUSY), Err(Errno::EBUSY)));
    assert_eq!(program.gws(one, 0), Ok(0));
    assert_eq!(program.gws(two, 1), Ok(0));
    program.destroy(two).unwrap();
    assert_eq!(program.gws(one, 1), Ok(0));
    let mut profile = Profile::load("gfx906").unwrap();
    profile.gpu[0].shader.gws = 0;
    let without = Program::new(Caller::bound(Model::on(profile, &machine()).unwrap()));
    let queue = without.create(arguments).unwrap().queue_id;
    assert_eq!(without.gws(queue, 1), Err(Errno::ENODEV));
}

#[test]
fn masks_of_compute_units() {
    // pqm_update_mqd: units of a workgroup processor go together from gfx10 on.
    for (profile, split) in [("gfx906", Ok(0)), ("gfx1030", Err(Errno::EINVAL))] {
        let mut profile = Profile::load(profile).unwrap();
        // What is looked at here is the GPU; the buffers of others have other sizes.
        profile.kernel.kfd_minor = 16;
        let program = Program::new(Caller::bound(Model::on(profile, &machine()).unwrap()));
        let queue_id = program.create(program.arguments(KFD_IOC_QUEUE_TYPE_COMPUTE)).unwrap().queue_id;
        let set = |mut words: [u32; 2]| {
            let mut mask = SetCuMaskArgs { queue_id, num_cu_mask: 64, cu_mask_ptr: pointer(&mut words).0 };
            let result = program.caller.call(request::SET_CU_MASK, &mut mask);
            std::hint::black_box(words);
            result
        };
        assert_eq!(set([0x0000_00ff, 0xc]), Ok(0));
        assert_eq!(set([0x0000_00ff, 0x6]), split);
    }
}
