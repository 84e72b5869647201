//! mmap of `/dev/kfd` and of render nodes.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use kfd_abi::event::{EVENT_PAGE_SIZE, KFD_IOC_EVENT_SIGNAL};
use kfd_abi::memory::AllocFlags;
use kfd_abi::mmap::{MmapType, offset};
use kfd_seam::{KfdService, MapRequest};
use nix::errno::Errno;
use nix::libc;

use crate::caller::{Caller, PAGE, open, peek, poke, shared};

const VA: u64 = 0x7000_0000_0000;

#[test]
fn doorbells() {
    // kfd_mmap, kfd_doorbell_mmap.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let slice = offset(MmapType::Doorbell, gpu);
    assert_eq!(caller.mmap_kfd(slice, PAGE).unwrap_err(), Errno::EINVAL);
    assert_eq!(caller.mmap_kfd(offset(MmapType::Doorbell, gpu ^ 1), 2 * PAGE).unwrap_err(), Errno::ENODEV);
    // The low bits of what CREATE_QUEUE gives name the doorbell in the slice.
    let map = caller.mmap_kfd(slice | 0x18, 2 * PAGE).unwrap();
    let mut bytes = [0u8; 8192];
    peek(&map, 0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0xff), "no queue is rung");
    let buffer = caller.allocate(gpu, VA, 2 * PAGE, AllocFlags::DOORBELL | AllocFlags::WRITABLE).unwrap();
    caller.map(buffer.handle, &[gpu]).0.unwrap();
    caller.model.write_gpu(gpu, VA + 8, &5u64.to_ne_bytes()).unwrap();
    let again = caller.mmap_kfd(slice, 2 * PAGE - 1).unwrap();
    peek(&again, 8, &mut bytes[..8]);
    assert_eq!(bytes[..8], 5u64.to_ne_bytes(), "one slice for all maps, and for the GPU");
}

#[test]
fn remapped_registers_and_trap_handler() {
    // kfd_mmio_mmap, kfd_reserved_mem_mmap.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let buffer = caller.allocate(gpu, VA, PAGE, AllocFlags::MMIO_REMAP).unwrap();
    assert_eq!(buffer.mmap_offset, offset(MmapType::Mmio, gpu));
    assert!(caller.mmap_kfd(buffer.mmap_offset, PAGE).is_ok());
    assert_eq!(caller.mmap_kfd(buffer.mmap_offset, 2 * PAGE).unwrap_err(), Errno::EINVAL);
    assert_eq!(caller.mmap_kfd(0, PAGE).unwrap_err(), Errno::ENODEV);
    let trap = offset(MmapType::ReservedMem, gpu);
    assert!(caller.mmap_kfd(trap, 2 * PAGE).is_ok());
    assert_eq!(caller.mmap_kfd(trap, PAGE).unwrap_err(), Errno::EINVAL);
    assert_eq!(caller.mmap_kfd(offset(MmapType::ReservedMem, 0), 2 * PAGE).unwrap_err(), Errno::ENODEV);
}

#[test]
fn a_buffer_becomes_the_event_page() {
    // kfd_kmap_event_page, kfd_event_page_set, amdgpu_amdkfd_gpuvm_map_gtt_bo_to_kernel.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let create = |handle| caller.create_event(KFD_IOC_EVENT_SIGNAL, handle);
    let allocate = |size, flags| caller.allocate(gpu, VA, size, flags).unwrap().handle;
    assert_eq!(create(allocate(PAGE, AllocFlags::GTT)).unwrap_err(), Errno::EINVAL, "too small");
    assert_eq!(
        create(allocate(EVENT_PAGE_SIZE, AllocFlags::VRAM)).unwrap_err(),
        Errno::EINVAL,
        "not system memory"
    );
    assert_eq!(create(77).unwrap_err(), Errno::EINVAL, "no GPU");
    assert_eq!(create(u64::from(gpu) << 32 | 77).unwrap_err(), Errno::EINVAL, "no buffer");
    let page = caller.allocate(gpu, VA, EVENT_PAGE_SIZE, AllocFlags::GTT).unwrap();
    let map = caller.mmap_render(&caller.gpus[0], page.mmap_offset, EVENT_PAGE_SIZE).unwrap();
    let event = create(page.handle).unwrap();
    assert_eq!(event.event_page_offset, offset(MmapType::Events, 0));
    let mut slots = vec![0u8; EVENT_PAGE_SIZE as usize];
    peek(&map, 0, &mut slots);
    assert!(slots.iter().all(|byte| *byte == 0xff));
    assert_eq!(create(page.handle).unwrap_err(), Errno::EINVAL, "there is one already");
    // The GPU writes the slot and raises an interrupt: the event is signalled and its slot free again.
    poke(&map, u64::from(event.event_id) * 8, &1u64.to_ne_bytes());
    caller.model.interrupt(event.event_id, 28);
    peek(&map, 0, &mut slots);
    assert!(slots.iter().all(|byte| *byte == 0xff));
}

#[test]
fn a_render_node_maps_whole_buffers_of_its_owner() {
    // drm_gem_mmap, ttm_bo_mmap_obj.
    let caller = Caller::new("gfx906");
    let gpu = &caller.gpus[0];
    let buffer = caller.allocate(gpu.id, VA, 4 * PAGE, AllocFlags::VRAM).unwrap();
    let map = |at, length| caller.mmap_render(gpu, at, length).map(|_| ());
    assert_eq!(map(buffer.mmap_offset, 4 * PAGE), Ok(()));
    assert_eq!(map(buffer.mmap_offset, PAGE), Ok(()));
    assert_eq!(map(buffer.mmap_offset, 5 * PAGE), Err(Errno::EINVAL), "too long");
    assert_eq!(map(buffer.mmap_offset + PAGE, PAGE), Err(Errno::EINVAL), "from its middle");
    assert_eq!(map(buffer.mmap_offset, 0), Err(Errno::EINVAL));
    assert_eq!(map(buffer.mmap_offset, u64::MAX), Err(Errno::EINVAL));
    let (stranger, _descriptor) = open(&caller.model, "/dev/dri/renderD128");
    let request = shared(buffer.mmap_offset, PAGE);
    assert_eq!(caller.model.mmap(stranger, &request).unwrap_err(), Errno::EACCES);
    let private = |protection| {
        caller
            .model
            .mmap(gpu.file, &MapRequest { flags: libc::MAP_PRIVATE, protection, ..request })
            .map(|_| ())
    };
    assert_eq!(private(libc::PROT_READ), Err(Errno::EINVAL));
    assert_eq!(private(libc::PROT_NONE), Ok(()));
    caller.free(buffer.handle).unwrap();
    assert_eq!(map(buffer.mmap_offset, PAGE), Err(Errno::EINVAL), "freed");
}

#[test]
fn whoever_has_the_render_nodes_descriptor_can_map_by_offset() {
    let caller = Caller::new("gfx906");
    let gpu = &caller.gpus[0];
    let buffer = caller.allocate(gpu.id, VA, PAGE, AllocFlags::VRAM).unwrap();
    let map = caller.mmap_render(gpu, buffer.mmap_offset, PAGE).unwrap();
    poke(&map, 0, b"seen by a VMM");
    // Only the descriptor and the offset, as after SCM_RIGHTS.
    let file: File = gpu.descriptor.try_clone().unwrap().into();
    let mut bytes = [0u8; 13];
    file.read_exact_at(&mut bytes, buffer.mmap_offset).unwrap();
    assert_eq!(&bytes, b"seen by a VMM");
    assert!(file.metadata().unwrap().size() > buffer.mmap_offset + PAGE);
}
