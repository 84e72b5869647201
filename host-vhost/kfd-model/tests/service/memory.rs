//! Buffers and page tables.

use kfd_abi::event::{EVENT_PAGE_SIZE, KFD_IOC_EVENT_SIGNAL};
use kfd_abi::kfd::request;
use kfd_abi::memory::{AllocFlags, GetAvailableMemoryArgs};
use kfd_model::space::FaultReason;
use nix::errno::Errno;

use crate::caller::{Caller, PAGE, peek, poke};

const VRAM: AllocFlags = AllocFlags::VRAM.union(AllocFlags::WRITABLE);
const GTT: AllocFlags = AllocFlags::GTT.union(AllocFlags::WRITABLE);
const USERPTR: AllocFlags = AllocFlags::USERPTR.union(AllocFlags::WRITABLE);
const VA: u64 = 0x7000_0000_0000;

fn available(caller: &Caller) -> u64 {
    let mut arguments = GetAvailableMemoryArgs { gpu_id: caller.gpu(), ..Default::default() };
    caller.call(request::AVAILABLE_MEMORY, &mut arguments).unwrap();
    arguments.available
}

#[test]
fn a_buffer_is_one_memory_for_cpu_and_gpu() {
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    for (va, flags) in [(VA, VRAM), (VA + (1 << 30), GTT)] {
        let buffer = caller.allocate(gpu, va, 3 * PAGE, flags).unwrap();
        assert_eq!(buffer.handle >> 32, u64::from(gpu));
        let map = caller.mmap_render(&caller.gpus[0], buffer.mmap_offset, 3 * PAGE).unwrap();
        assert_eq!(map.offset, buffer.mmap_offset, "the mmap offset is the offset in the render node's file");
        poke(&map, PAGE, b"from the CPU");
        let mut bytes = [0u8; 12];
        let fault = caller.model.read_gpu(gpu, va + PAGE, &mut bytes).unwrap_err();
        assert_eq!((fault.va, fault.reason), (va + PAGE, FaultReason::NotPresent), "not mapped yet");
        assert_eq!(caller.map(buffer.handle, &[gpu]), (Ok(0), 1));
        caller.model.read_gpu(gpu, va + PAGE, &mut bytes).unwrap();
        assert_eq!(&bytes, b"from the CPU");
        caller.model.write_gpu(gpu, va + 2 * PAGE, b"from the GPU").unwrap();
        peek(&map, 2 * PAGE, &mut bytes);
        assert_eq!(&bytes, b"from the GPU");
        assert_eq!(caller.unmap(buffer.handle, &[gpu]), (Ok(0), 1));
        assert!(caller.model.read_gpu(gpu, va + PAGE, &mut bytes).is_err(), "unmapped again");
    }
}

#[test]
fn user_memory_is_used_where_it_lies() {
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let mut memory = vec![7u8; 3 * PAGE as usize];
    let user = (memory.as_mut_ptr() as u64).next_multiple_of(PAGE);
    let buffer = caller.allocate_user(gpu, VA, 2 * PAGE, USERPTR, user).unwrap();
    caller.map(buffer.handle, &[gpu]).0.unwrap();
    let mut bytes = [0u8; 4];
    caller.model.read_gpu(gpu, VA + PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4]);
    caller.model.write_gpu(gpu, VA, &[9; 4]).unwrap();
    let start = (user - memory.as_ptr() as u64) as usize;
    assert_eq!(std::hint::black_box(&memory)[start..start + 5], [9, 9, 9, 9, 7]);
    assert!(caller.model.read_gpu(gpu, user, &mut bytes).is_err(), "the CPU address is no GPU address");
    // amdgpu_gem_object_mmap.
    assert_eq!(caller.mmap_render(&caller.gpus[0], buffer.mmap_offset, PAGE).unwrap_err(), Errno::EPERM);
    // amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu, amdgpu_ttm_tt_get_user_pages.
    assert_eq!(caller.allocate_user(gpu, VA, PAGE, USERPTR, 0).unwrap_err(), Errno::EINVAL);
    assert_eq!(caller.allocate_user(gpu, VA, PAGE, USERPTR, PAGE).unwrap_err(), Errno::EFAULT);
}

/// A range of the process's own memory, as a program maps and remaps it.
#[allow(unsafe_code, reason = "maps memory at an address, as a program does")]
mod mapped {
    use std::num::NonZeroUsize;
    use std::ptr::NonNull;

    use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

    pub struct Mapped {
        pub address: u64,
        pub length: usize,
    }

    impl Mapped {
        pub fn new(pages: usize) -> Self {
            let (length, flags) = (pages * 4096, MapFlags::MAP_PRIVATE);
            Self { address: map(None, length, flags), length }
        }

        fn at(&self, page: usize) -> NonNull<std::ffi::c_void> {
            NonNull::new(std::ptr::with_exposed_provenance_mut(self.address as usize + page * 4096)).unwrap()
        }

        pub fn fill(&self, page: usize, pages: usize, byte: u8) {
            // SAFETY: the pages are mapped and nothing refers to them.
            unsafe { self.at(page).cast::<u8>().write_bytes(byte, pages * 4096) };
        }

        pub fn drop_pages(&self, page: usize, pages: usize) {
            // SAFETY: nothing refers to these pages.
            unsafe { madvise(self.at(page), pages * 4096, MmapAdvise::MADV_DONTNEED) }.unwrap();
        }

        pub fn unmap(&self, page: usize, pages: usize) {
            // SAFETY: nothing refers to these pages.
            unsafe { munmap(self.at(page), pages * 4096) }.unwrap();
        }

        /// Maps fresh memory where there was other.
        pub fn map_again(&self) {
            let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
            assert_eq!(map(Some(self.address), self.length, flags), self.address);
        }
    }

    fn map(address: Option<u64>, length: usize, flags: MapFlags) -> u64 {
        let address = address.and_then(|address| NonZeroUsize::new(address as usize));
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: only memory that these tests mapped is replaced.
        let start = unsafe { mmap_anonymous(address, NonZeroUsize::new(length).unwrap(), access, flags) };
        start.unwrap().as_ptr().expose_provenance() as u64
    }
}

#[test]
fn user_memory_is_what_is_at_its_address_now() {
    // amdgpu_amdkfd_evict_userptr, update_invalid_user_pages: never what was there before.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let memory = mapped::Mapped::new(16);
    memory.fill(0, 16, 1);
    let buffer = caller.allocate_user(gpu, VA, 16 * PAGE, USERPTR, memory.address).unwrap();
    caller.map(buffer.handle, &[gpu]).0.unwrap();
    // The first byte of each page.
    let pages = |caller: &Caller| {
        let bytes = caller.seen(gpu, VA, 16 * PAGE as usize);
        bytes.map(|bytes| bytes.iter().step_by(PAGE as usize).copied().collect::<Vec<u8>>())
    };
    assert_eq!(pages(&caller), Ok(vec![1; 16]));
    memory.drop_pages(4, 4);
    let mut expected = [1; 16];
    expected[4..8].fill(0);
    assert_eq!(pages(&caller), Ok(expected.to_vec()));
    memory.fill(4, 4, 2);
    expected[4..8].fill(2);
    assert_eq!(pages(&caller), Ok(expected.to_vec()));
    memory.unmap(0, 16);
    memory.map_again();
    memory.fill(0, 16, 3);
    assert_eq!(pages(&caller), Ok(vec![3; 16]));
    caller.model.write_gpu(gpu, VA + 5 * PAGE, &[4]).unwrap();
    assert_eq!(pages(&caller).unwrap()[4..7], [3, 4, 3]);
    // Gone, in part: what is left can be used, and the fault says where.
    memory.unmap(6, 2);
    let fault = pages(&caller).unwrap_err();
    assert_eq!((fault.va, fault.reason), (VA + 6 * PAGE, FaultReason::NoBacking));
    let fault = caller.model.write_gpu(gpu, VA + 5 * PAGE, &[5; 2 * PAGE as usize]).unwrap_err();
    assert_eq!((fault.va, fault.reason), (VA + 6 * PAGE, FaultReason::NoBacking));
    assert_eq!(caller.seen(gpu, VA + 5 * PAGE, 1).unwrap(), [5]);
    assert_eq!(caller.seen(gpu, VA + 8 * PAGE, 1).unwrap(), [3]);
    caller.unmap(buffer.handle, &[gpu]).0.unwrap();
    caller.free(buffer.handle).unwrap();
}

#[test]
fn addresses_at_the_ends() {
    // amdgpu_vm_verify_parameters, amdgpu_vm_bo_map; what the driver maps: amdgpu_seq64_map,
    // kfd_process_device_init_cwsr_dgpu.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let end = 1u64 << 48;
    let (save_area, sequences) = (2 << 20, 2 << 20);
    let sequences_at = end - save_area - sequences;
    let trap_handler_at = sequences_at - (1 << 16);
    for (why, va, pages, expected) in [
        ("the last page", end - PAGE, 1, Ok(0)),
        ("beyond the end", end - PAGE, 2, Err(Errno::EINVAL)),
        ("far beyond", end, 1, Err(Errno::EINVAL)),
        ("the end of 64 bits", !0xfff, 1, Err(Errno::EINVAL)),
        ("sequence numbers", sequences_at + sequences - PAGE, 1, Err(Errno::EINVAL)),
        ("up to them", sequences_at - PAGE, 2, Err(Errno::EINVAL)),
        ("trap handler", trap_handler_at + PAGE, 1, Err(Errno::EINVAL)),
        ("behind it", trap_handler_at + 2 * PAGE, 1, Ok(0)),
        ("the first page", 0, 1, Err(Errno::EINVAL)),
        ("the second", PAGE, 1, Ok(0)),
        ("no page", VA + 8, 1, Err(Errno::EINVAL)),
        ("above the hole's start", 0x8000_0000_0000, 1, Ok(0)),
    ] {
        let buffer = caller.allocate(gpu, va, pages * PAGE, GTT).unwrap();
        assert_eq!(caller.map(buffer.handle, &[gpu]).0, expected, "{why}");
        if expected.is_ok() {
            caller.unmap(buffer.handle, &[gpu]).0.unwrap();
        }
        caller.free(buffer.handle).unwrap();
    }
    assert_eq!(caller.seen(gpu, trap_handler_at, 4).unwrap(), [0; 4]);
    let write = caller.model.write_gpu(gpu, trap_handler_at, &[1]).unwrap_err();
    assert_eq!(write.reason, FaultReason::ReadOnly);
}

#[test]
fn more_than_four_gib() {
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let size = (6 << 30) + PAGE;
    for (va, flags) in [(VA, VRAM), (VA + (1 << 40), GTT)] {
        let buffer = caller.allocate(gpu, va, size, flags).unwrap();
        caller.map(buffer.handle, &[gpu]).0.unwrap();
        let map = caller.mmap_render(&caller.gpus[0], buffer.mmap_offset, size).unwrap();
        for at in [0, (1 << 32) - 4, 1 << 32, size - 8] {
            let value = at ^ 0x5a5a_5a5a_5a5a_5a5a;
            caller.model.write_gpu(gpu, va + at, &value.to_ne_bytes()).unwrap();
            let mut bytes = [0; 8];
            peek(&map, at, &mut bytes);
            assert_eq!(u64::from_ne_bytes(bytes), value, "{at:#x}");
        }
        let fault = caller.seen(gpu, va + size - 4, 8).unwrap_err();
        assert_eq!((fault.va, fault.reason), (va + size, FaultReason::NotPresent));
        let dmabuf = caller.export(buffer.handle).unwrap();
        assert_eq!(caller.dmabuf_info(&dmabuf, &mut []).1.size, size);
        caller.unmap(buffer.handle, &[gpu]).0.unwrap();
        caller.free(buffer.handle).unwrap();
    }
}

#[test]
fn sizes_and_kinds_are_checked() {
    // kfd_ioctl_alloc_memory_of_gpu, amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu.
    let caller = Caller::new("gfx906");
    let allocate = |size, flags| caller.allocate(caller.gpu(), VA, size, flags).map(|_| ());
    assert_eq!(allocate(0, VRAM), Err(Errno::EINVAL));
    assert_eq!(allocate(PAGE, AllocFlags::WRITABLE), Err(Errno::EINVAL), "no kind");
    assert_eq!(allocate(PAGE, AllocFlags::DOORBELL), Err(Errno::EINVAL));
    assert_eq!(allocate(2 * PAGE, AllocFlags::DOORBELL), Ok(()));
    assert_eq!(allocate(2 * PAGE, AllocFlags::MMIO_REMAP), Err(Errno::EINVAL));
    assert_eq!(allocate(PAGE, AllocFlags::MMIO_REMAP), Ok(()));
    assert_eq!(allocate(1, VRAM | AllocFlags::AQL_QUEUE_MEM), Err(Errno::EINVAL), "half of it is nothing");
    assert_eq!(allocate(1, VRAM), Ok(()));
    for flags in [VRAM, GTT] {
        for size in [u64::MAX, 1 << 63, 1 << 50] {
            assert_eq!(allocate(size, flags), Err(Errno::ENOMEM), "{size:#x}");
        }
    }
}

#[test]
fn a_small_bar_has_no_public_vram() {
    use kfd_model::Model;
    use kfd_model::profile::Profile;
    let mut profile = Profile::load("gfx906").unwrap();
    profile.gpu[0].memory.visible_mib = 256;
    let model = Model::on(profile, &crate::caller::machine()).unwrap();
    assert_eq!(model.topology().nodes[1].banks[0].heap_type, 2, "HSA_MEM_HEAP_TYPE_FB_PRIVATE");
    assert!(model.topology().nodes[0].io_links.is_empty(), "no link from the CPU");
    let caller = Caller::on(model);
    caller.acquire(&caller.gpus[0], &caller.gpus[0].descriptor).unwrap();
    let public = VRAM | AllocFlags::PUBLIC;
    assert_eq!(caller.allocate(caller.gpu(), VA, PAGE, public).unwrap_err(), Errno::EINVAL);
    assert!(caller.allocate(caller.gpu(), VA, PAGE, VRAM).is_ok());
}

#[test]
fn vram_is_counted() {
    // amdgpu_amdkfd_reserve_mem_limit, amdgpu_amdkfd_get_available_memory.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let all = available(&caller);
    // 16368 MiB less the larger of 8 MiB and a 16384th of all memory, in steps of 2 MiB.
    assert_eq!(all, (16368 - 8) << 20);
    let small = caller.allocate(gpu, VA, PAGE, VRAM).unwrap();
    assert_eq!(available(&caller), all - (2 << 20), "rounded up to 2 MiB");
    let rest = all - PAGE;
    assert_eq!(caller.allocate(gpu, VA, rest + PAGE, VRAM).unwrap_err(), Errno::ENOMEM);
    let large = caller.allocate(gpu, VA, rest, VRAM).unwrap();
    assert_eq!(available(&caller), 0);
    assert_eq!(caller.allocate(gpu, VA, PAGE, VRAM).unwrap_err(), Errno::ENOMEM);
    caller.free(small.handle).unwrap();
    caller.free(large.handle).unwrap();
    assert_eq!(available(&caller), all);
}

#[test]
fn system_memory_is_counted() {
    // amdgpu_amdkfd_gpuvm_init_mem_limits: of 16 GiB, all but a 64th and 1.5 GiB; half of it for the driver.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    assert_eq!(caller.allocate(gpu, VA, (8 << 30) + PAGE, GTT).unwrap_err(), Errno::ENOMEM);
    let half = caller.allocate(gpu, VA, 8 << 30, GTT).unwrap();
    assert_eq!(caller.allocate(gpu, VA, PAGE, GTT).unwrap_err(), Errno::ENOMEM);
    caller.free(half.handle).unwrap();
    assert!(caller.allocate(gpu, VA, PAGE, GTT).is_ok());
}

#[test]
fn fresh_memory_is_zero() {
    let caller = Caller::new("gfx906");
    for _ in 0..3 {
        let buffer = caller.allocate(caller.gpu(), VA, PAGE, VRAM).unwrap();
        let map = caller.mmap_render(&caller.gpus[0], buffer.mmap_offset, PAGE).unwrap();
        let mut bytes = [1u8; 16];
        peek(&map, 0, &mut bytes);
        assert_eq!(bytes, [0; 16]);
        poke(&map, 0, b"secret");
        caller.free(buffer.handle).unwrap();
    }
}

#[test]
fn free_wants_a_known_unmapped_buffer_that_is_not_the_event_page() {
    // kfd_ioctl_free_memory_of_gpu, amdgpu_amdkfd_gpuvm_free_memory_of_gpu.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let buffer = caller.allocate(gpu, VA, PAGE, GTT).unwrap();
    caller.map(buffer.handle, &[gpu]).0.unwrap();
    assert_eq!(caller.free(buffer.handle), Err(Errno::EBUSY));
    caller.unmap(buffer.handle, &[gpu]).0.unwrap();
    assert_eq!(caller.free(buffer.handle), Ok(0));
    assert_eq!(caller.free(buffer.handle), Err(Errno::EINVAL));
    let page = caller.allocate(gpu, VA, EVENT_PAGE_SIZE, GTT).unwrap();
    caller.create_event(KFD_IOC_EVENT_SIGNAL, page.handle).unwrap();
    assert_eq!(caller.free(page.handle), Err(Errno::EPERM));
}

#[test]
fn map_and_unmap_answer_as_the_kernel() {
    // kfd_ioctl_map_memory_to_gpu, amdgpu_vm_bo_map, amdgpu_amdkfd_gpuvm_unmap_memory_from_gpu.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let buffer = caller.allocate(gpu, VA, 2 * PAGE, GTT).unwrap();
    assert_eq!(caller.unmap(buffer.handle, &[gpu]), (Err(Errno::EINVAL), 0), "not mapped");
    assert_eq!(caller.map(buffer.handle, &[gpu, gpu]), (Ok(0), 2), "mapped already is no error");
    assert_eq!(caller.map(buffer.handle, &[gpu, gpu ^ 1]), (Err(Errno::EINVAL), 1), "stops at the bad one");
    assert_eq!(caller.map(buffer.handle + 1, &[gpu]), (Err(Errno::ENOMEM), 0), "no such buffer");
    assert_eq!(caller.unmap(buffer.handle + 1, &[gpu]), (Err(Errno::ENOMEM), 0), "no such buffer");
    let overlap = caller.allocate(gpu, VA + PAGE, PAGE, GTT).unwrap();
    assert_eq!(caller.map(overlap.handle, &[gpu]), (Err(Errno::EINVAL), 0));
    let unaligned = caller.allocate(gpu, VA + 3 * PAGE + 8, PAGE, GTT).unwrap();
    assert_eq!(caller.map(unaligned.handle, &[gpu]), (Err(Errno::EINVAL), 0));
    let nowhere = caller.allocate(gpu, 0, PAGE, VRAM).unwrap();
    assert_eq!(caller.map(nowhere.handle, &[gpu]), (Err(Errno::EINVAL), 0), "kfd_mem_attach");
    let beyond = caller.allocate(gpu, !0xfff, PAGE, GTT).unwrap();
    assert_eq!(caller.map(beyond.handle, &[gpu]), (Err(Errno::EINVAL), 0));
    assert_eq!(caller.unmap(buffer.handle, &[gpu]), (Ok(0), 1));
    assert_eq!(caller.map(overlap.handle, &[gpu]), (Ok(0), 1));
}

#[test]
fn read_only_memory_is_not_written() {
    // get_pte_flags.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let buffer = caller.allocate(gpu, VA, PAGE, AllocFlags::GTT).unwrap();
    caller.map(buffer.handle, &[gpu]).0.unwrap();
    let fault = caller.model.write_gpu(gpu, VA + 4, b"x").unwrap_err();
    assert_eq!((fault.va, fault.reason), (VA + 4, FaultReason::ReadOnly));
    assert_eq!(
        fault.to_string(),
        format!("GPU {gpu} cannot write address {:#x}: the mapping is read-only", VA + 4)
    );
}

#[test]
fn an_aql_ring_appears_twice() {
    // kfd_mem_attach with is_aql.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let ring = caller.allocate(gpu, VA, 4 * PAGE, GTT | AllocFlags::AQL_QUEUE_MEM).unwrap();
    caller.map(ring.handle, &[gpu]).0.unwrap();
    caller.model.write_gpu(gpu, VA + 2 * PAGE - 4, b"wraparnd").unwrap();
    let mut bytes = [0u8; 4];
    caller.model.read_gpu(gpu, VA, &mut bytes).unwrap();
    assert_eq!(&bytes, b"arnd");
    caller.unmap(ring.handle, &[gpu]).0.unwrap();
    assert!(caller.model.read_gpu(gpu, VA + 2 * PAGE, &mut bytes).is_err());
    assert_eq!(caller.free(ring.handle), Ok(0));
}

#[test]
fn gpus_share_memory_as_their_links_allow() {
    // kfd_mem_attach, amdgpu_device_is_peer_accessible.
    for (profile, vram, doorbells) in
        [("gfx906x2", Ok(0), Err(Errno::EINVAL)), ("gfx906x2-pcie", Ok(0), Ok(0))]
    {
        let caller = Caller::new(profile);
        let [first, second] = [caller.gpus[0].id, caller.gpus[1].id];
        let system = caller.allocate(first, VA, PAGE, GTT).unwrap();
        assert_eq!(caller.map(system.handle, &[first, second]), (Ok(0), 2), "{profile}");
        caller.model.write_gpu(first, VA, b"shared").unwrap();
        let mut bytes = [0u8; 6];
        caller.model.read_gpu(second, VA, &mut bytes).unwrap();
        assert_eq!(&bytes, b"shared");
        assert_eq!(caller.unmap(system.handle, &[first]), (Ok(0), 1));
        assert!(caller.model.read_gpu(first, VA, &mut bytes).is_err(), "A faults");
        assert!(caller.model.read_gpu(second, VA, &mut bytes).is_ok(), "B goes on");
        assert_eq!(caller.free(system.handle), Err(Errno::EBUSY));

        let local = caller.allocate(first, VA + (1 << 30), PAGE, VRAM).unwrap();
        assert_eq!(caller.map(local.handle, &[second]).0, vram, "{profile}");
        let slice = caller.allocate(first, VA + (2 << 30), 2 * PAGE, AllocFlags::DOORBELL).unwrap();
        assert_eq!(caller.map(slice.handle, &[second]).0, doorbells, "{profile}");
    }
    let mut profile = kfd_model::profile::Profile::load("gfx906x2-pcie").unwrap();
    profile.kernel.p2p = false;
    let caller = Caller::on(kfd_model::Model::on(profile, &crate::caller::machine()).unwrap());
    for gpu in &caller.gpus {
        caller.acquire(gpu, &gpu.descriptor).unwrap();
    }
    let local = caller.allocate(caller.gpus[0].id, VA, PAGE, VRAM).unwrap();
    assert_eq!(caller.map(local.handle, &[caller.gpus[1].id]), (Err(Errno::EINVAL), 0));
}

#[test]
fn handles_are_reused_from_the_lowest() {
    // kfd_process_device_create_obj_handle: idr_alloc from 0 on.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let handles: Vec<u64> = (0..3).map(|_| caller.allocate(gpu, VA, PAGE, GTT).unwrap().handle).collect();
    assert_eq!(handles.iter().map(|handle| handle & 0xffff_ffff).collect::<Vec<_>>(), [0, 1, 2]);
    caller.free(handles[1]).unwrap();
    assert_eq!(caller.allocate(gpu, VA, PAGE, GTT).unwrap().handle, handles[1]);
}
