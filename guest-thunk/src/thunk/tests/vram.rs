//! VRAM that the CPU sees, in arenas and alone, and VRAM without an address.
#![allow(unsafe_code, reason = "memory that the library gave out is read and written")]

use hsakmt_abi::bits::BitField;
use hsakmt_abi::memory::{HsaMemFlags, HsaPointerType};
use hsakmt_abi::status::HsakmtStatus;
use hsakmt_abi::topology::HsaHeapType;
use virtio_kfd_protocol::Call;

use super::kfd::{GPUS, Kfd};
use super::{flags, is_gone, mapping, status};
use crate::thunk::memory::Request;
use crate::thunk::process;
use crate::thunk::settings::Settings;

const MIB: u64 = 1 << 20;
const VISIBLE: [BitField<HsaMemFlags>; 2] = [HsaMemFlags::NON_PAGED, HsaMemFlags::HOST_ACCESS];

/// A byte of memory that the library gave out.
fn byte(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

fn store(address: u64, value: u8) {
    // SAFETY: the test has allocated the memory, visible to the CPU.
    unsafe { byte(address).write_volatile(value) };
}

fn load(address: u64) -> u8 {
    // SAFETY: the test has allocated the memory, visible to the CPU.
    unsafe { byte(address).read_volatile() }
}

impl Kfd {
    fn visible(&self, size: u64) -> crate::thunk::refusal::Outcome<u64> {
        self.allocate(self.gpu_node(), size, &VISIBLE)
    }

    fn buffers(&self) -> usize {
        self.state.lock().unwrap().buffers.len()
    }

    fn idle(&self) -> u64 {
        *self.window.lock().unwrap()
    }
}

#[test]
fn the_heap_is_the_hosts_where_there_is_a_window() {
    let kfd = Kfd::with_window(64 * MIB);
    let banks = kfd.thunk.snapshot().unwrap().banks(kfd.gpu_node()).unwrap();
    assert_eq!({ banks[0].heap_type }, HsaHeapType::FRAME_BUFFER_PUBLIC);
}

#[test]
fn hundreds_of_small_allocations_are_a_few_buffers_and_maps() {
    let kfd = Kfd::with_window(256 * MIB);
    let all: Vec<u64> = (0..600).map(|_| kfd.visible(64 << 10).unwrap()).collect();
    assert!(kfd.buffers() <= 7, "{} buffers for 600 allocations of 64 KiB", kfd.buffers());
    for (value, address) in (0u8..=255).cycle().zip(&all) {
        assert_eq!(load(address + 0xffff), 0, "fresh memory is zero");
        store(*address, value);
        store(address + 0xffff, value);
    }
    for (value, address) in (0u8..=255).cycle().zip(&all) {
        assert_eq!((load(*address), load(address + 0xffff)), (value, value), "none is another's");
    }
    // C12: a page that no GPU sees lies between neighbours.
    let mut sorted = all.clone();
    sorted.sort_unstable();
    assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] > 64 << 10));
    for address in all {
        kfd.free(address).unwrap();
    }
    assert!(kfd.buffers() <= 1, "at most a small one is kept");
    assert!(kfd.idle() >= 254 * MIB, "{} bytes of the window are free", kfd.idle());
    kfd.thunk.shut_down();
    assert_eq!((kfd.buffers(), kfd.idle()), (0, 256 * MIB));
}

/// ROCr divides blocks of 2 MiB, and shares a piece by where it is in its block: `Runtime::IPCCreate` of 5.2 to 6.1 ends the program if a
/// block is elsewhere than at a multiple of its size.
#[test]
fn whole_huge_pages_are_where_amds_library_has_them() {
    let kfd = Kfd::with_window(64 * MIB);
    let small = kfd.visible(4096).unwrap();
    let mut blocks: Vec<_> = (0..7).map(|_| (kfd.visible(2 * MIB).unwrap(), 2 * MIB)).collect();
    assert_eq!(kfd.idle(), 48 * MIB, "arenas of 2, 2, 4 and 8 MiB, the last three full");
    blocks.extend([6, 2, 4].map(|size| (kfd.visible(size * MIB).unwrap(), size * MIB)));
    assert!(blocks.iter().all(|(address, _)| address % (2 * MIB) == 0), "{blocks:x?}");
    let odd = kfd.visible(2 * MIB + 4096).unwrap();
    blocks.extend([(small, 4096), (odd, 2 * MIB + 4096)]);
    blocks.sort_unstable();
    assert!(blocks.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{blocks:x?}");
}

#[test]
fn pieces_are_executable_for_who_says_so() {
    let kfd = Kfd::with(64 * MIB, Settings { all_executable: false, ..Settings::default() }, false);
    let data = kfd.visible(4096).unwrap();
    let [kind, access] = VISIBLE;
    let code = kfd.allocate(kfd.gpu_node(), 4096, &[kind, access, HsaMemFlags::EXECUTE_ACCESS]).unwrap();
    kfd.map(data, 4096).unwrap();
    kfd.map(code, 4096).unwrap();
    let state = kfd.state.lock().unwrap();
    let of = |address| state.ranges.iter().find(|range| range.va.0 == address).map(|range| range.flags);
    // AMDGPU_VM_PAGE_READABLE, WRITEABLE, EXECUTABLE (amdgpu_drm.h)
    assert_eq!((of(data), of(code)), (Some(2 | 4), Some(2 | 4 | 8)));
    drop(state);
    assert_eq!(kfd.buffers(), 1, "both lie in one arena");
}

#[test]
fn gpus_see_parts_only_while_they_are_mapped() {
    let kfd = Kfd::with_window(64 * MIB);
    let (one, other) = (kfd.visible(4096).unwrap(), kfd.visible(8192).unwrap());
    assert_eq!(kfd.state.lock().unwrap().ranges, [], "not mapped yet");
    kfd.frames();
    kfd.map(other, 8192).unwrap();
    assert_eq!(kfd.frames(), [vec![Call::MapRange, Call::MapRange]], "one frame for a GPU and its peer");
    {
        let state = kfd.state.lock().unwrap();
        assert_eq!(state.ranges.iter().map(|range| range.gpu_id).collect::<Vec<_>>(), GPUS);
        for range in &state.ranges {
            assert_eq!((range.va.0, range.size), (other, 8192));
            assert_eq!(range.offset, other - one, "the home is one piece");
            // AMDGPU_VM_PAGE_READABLE, WRITEABLE, EXECUTABLE (amdgpu_drm.h)
            assert_eq!(range.flags, 2 | 4 | 8);
        }
    }
    let info = kfd.thunk.memory.pointer_info(&kfd.thunk.snapshot().unwrap(), other + 8191).unwrap();
    assert_eq!(
        ({ info.kind }, { info.gpu_address }, { info.cpu_address }),
        (HsaPointerType::ALLOCATED, other, other)
    );
    assert_eq!(({ info.size_in_bytes }, { info.n_mapped_nodes }), (8192, 2));
    assert_eq!(status(kfd.free(other)), HsakmtStatus::ERROR, "it is mapped");
    // C57: to a list, and to no others.
    let snapshot = kfd.thunk.snapshot().unwrap();
    let second = snapshot.gpus[1].node;
    kfd.thunk.memory.map_to_nodes(kfd.thunk.host(&snapshot), other, 8192, &[second]).unwrap();
    assert_eq!(
        kfd.state.lock().unwrap().ranges.iter().map(|range| range.gpu_id).collect::<Vec<_>>(),
        [GPUS[1]]
    );
    kfd.unmap(other).unwrap();
    kfd.unmap(other).unwrap();
    assert_eq!(kfd.state.lock().unwrap().ranges, []);
    // As AMD's library on the model: a node twice is mapped once, listed twice, and an error to unmap.
    kfd.thunk.memory.map_to_nodes(kfd.thunk.host(&snapshot), other, 8192, &[second, second]).unwrap();
    assert_eq!({ kfd.thunk.memory.pointer_info(&snapshot, other).unwrap().n_mapped_nodes }, 2);
    assert_eq!(status(kfd.unmap(other)), HsakmtStatus::ERROR);
    assert_eq!(kfd.state.lock().unwrap().ranges, []);
    kfd.free(other).unwrap();
    kfd.free(one).unwrap();
    assert_eq!(status(kfd.free(one)), HsakmtStatus::MEMORY_NOT_REGISTERED);
}

#[test]
fn a_map_that_ends_early_keeps_what_was_done() {
    let kfd = Kfd::with_window(64 * MIB);
    let address = kfd.visible(4096).unwrap();
    kfd.state.lock().unwrap().map_limit = 1;
    assert_eq!(status(kfd.map(address, 4096)), HsakmtStatus::ERROR);
    kfd.state.lock().unwrap().map_limit = 64;
    kfd.map(address, 4096).unwrap();
    assert_eq!(kfd.state.lock().unwrap().ranges.len(), 2);
    kfd.unmap(address).unwrap();
    kfd.free(address).unwrap();
}

#[test]
fn what_was_freed_comes_back_zeroed() {
    let kfd = Kfd::with_window(64 * MIB);
    let keeps_the_arena = kfd.visible(4096).unwrap();
    let address = kfd.visible(8192).unwrap();
    (0..8192).for_each(|offset| store(address + offset, 0xee));
    kfd.free(address).unwrap();
    assert_eq!(kfd.visible(8192), Ok(address), "the same place");
    assert!((0..8192).all(|offset| load(address + offset) == 0));
    assert_eq!(load(keeps_the_arena), 0);
}

/// C62, with the window that the case names.
#[test]
fn an_exhausted_window_is_no_memory_and_works_again() {
    let kfd = Kfd::with_window(64 * MIB);
    for _ in 0..20 {
        let mut held = Vec::new();
        let refusal = loop {
            match kfd.visible(MIB) {
                Ok(address) => held.push(address),
                Err(refusal) => break refusal,
            }
            assert!(held.len() <= 64, "the window has 64 MiB");
        };
        assert_eq!(refusal.status, HsakmtStatus::NO_MEMORY);
        assert!(held.len() >= 55, "{} of 64 MiB could be had", held.len());
        for address in &held {
            store(address + MIB - 1, 1);
        }
        let (odd, even): (Vec<_>, Vec<_>) = held.iter().enumerate().partition(|(index, _)| index % 2 == 1);
        odd.iter().for_each(|(_, address)| kfd.free(**address).unwrap());
        let again: Vec<_> = odd.iter().map(|_| kfd.visible(MIB).unwrap()).collect();
        again.iter().for_each(|address| kfd.free(*address).unwrap());
        even.iter().for_each(|(_, address)| kfd.free(**address).unwrap());
        let large = kfd.visible(48 * MIB).unwrap();
        kfd.free(large).unwrap();
    }
    let tiny = Kfd::with_window(4096);
    assert_eq!(status(tiny.visible(4096)), HsakmtStatus::NO_MEMORY, "its guard page does not fit");
    assert_eq!(tiny.buffers(), 0, "nothing is left over");
}

#[test]
fn exhausted_vram_is_no_memory_and_what_is_held_stays() {
    let kfd = Kfd::with_window(1 << 40);
    kfd.state.lock().unwrap().vram = 10 * MIB;
    let held: Vec<u64> = std::iter::from_fn(|| kfd.visible(MIB).ok()).collect();
    assert!((8..=10).contains(&held.len()), "{} of 10 MiB", held.len());
    held.iter().for_each(|address| store(*address, 3));
    assert!(held.iter().all(|address| load(*address) == 3));
    // What lies idle is available, too.
    let available = || process::available_memory(&kfd.thunk, GPUS[0]).unwrap();
    let before = available();
    kfd.free(held[0]).unwrap();
    assert!(available() >= before + MIB, "{before} became {}", available());
    // An allocation that needs the idle room gets it.
    held[1..].iter().for_each(|address| kfd.free(*address).unwrap());
    let vram = [HsaMemFlags::NON_PAGED];
    let all = kfd.allocate(kfd.gpu_node(), 10 * MIB, &vram).unwrap();
    kfd.free(all).unwrap();
    assert_eq!(kfd.state.lock().unwrap().vram, 10 * MIB);
}

#[test]
fn large_and_special_allocations_have_a_buffer_of_their_own() {
    let kfd = Kfd::with_window(256 * MIB);
    let address = kfd.visible(32 * MIB).unwrap();
    assert_eq!(mapping(address).as_deref(), Some("rw-s"));
    store(address + 32 * MIB - 1, 9);
    kfd.map(address, 32 * MIB).unwrap();
    assert_eq!(kfd.state.lock().unwrap().buffers.values().next().unwrap().mapped, GPUS);
    assert_eq!(load(address + 32 * MIB - 1), 9, "data survive the map");
    kfd.unmap(address).unwrap();
    kfd.free(address).unwrap();
    assert!(is_gone(address));
    let snapshot = kfd.thunk.snapshot().unwrap();
    let fields = [HsaMemFlags::NON_PAGED, HsaMemFlags::HOST_ACCESS, HsaMemFlags::FIXED_ADDRESS];
    let at = |address| {
        let request =
            Request { node: kfd.gpu_node(), size: 8192, alignment: 0, flags: flags(&fields), address };
        kfd.thunk.memory.allocate(kfd.thunk.host(&snapshot), request)
    };
    assert_eq!(at(address), Ok(address));
    // C14: never over what is there.
    assert_eq!(status(at(address + 4096)), HsakmtStatus::NO_MEMORY);
    store(address, 1);
    kfd.free(address).unwrap();
    let aligned =
        Request { node: kfd.gpu_node(), size: 4096, alignment: 8 * MIB, flags: flags(&VISIBLE), address: 0 };
    let aligned = kfd.thunk.memory.allocate(kfd.thunk.host(&snapshot), aligned).unwrap();
    assert!(aligned.is_multiple_of(8 * MIB));
    kfd.free(aligned).unwrap();
    assert_eq!((kfd.buffers(), kfd.idle()), (0, 256 * MIB));
}

#[test]
fn memory_without_an_address_is_a_number_that_no_pointer_is() {
    let kfd = Kfd::with_window(256 * MIB);
    let fields = [HsaMemFlags::NON_PAGED, HsaMemFlags::NO_ADDRESS];
    let first = kfd.allocate(kfd.gpu_node(), 2 * MIB, &fields).unwrap();
    let second = kfd.allocate(kfd.gpu_node(), 4096, &fields).unwrap();
    // START_NON_CANONICAL_ADDR of fmm.c, up to the LDS aperture.
    for fake in [first, second] {
        assert!((1 << 47..1 << 48).contains(&fake), "{fake:#x}");
    }
    assert_ne!(first, second);
    assert!(kfd.state.lock().unwrap().buffers.values().all(|buffer| buffer.request.va.0 == 0));
    assert_eq!(status(kfd.map(first, 2 * MIB)), HsakmtStatus::INVALID_PARAMETER);
    let snapshot = kfd.thunk.snapshot().unwrap();
    let to_nodes =
        kfd.thunk.memory.map_to_nodes(kfd.thunk.host(&snapshot), first, 2 * MIB, &[kfd.gpu_node()]);
    assert_eq!(status(to_nodes), HsakmtStatus::INVALID_PARAMETER);
    kfd.unmap(first).unwrap();
    let info = kfd.thunk.memory.pointer_info(&snapshot, first + 5).unwrap();
    assert_eq!(({ info.kind }, { info.gpu_address }), (HsaPointerType::ALLOCATED, first));
    kfd.free(first).unwrap();
    kfd.free(second).unwrap();
    assert_eq!(status(kfd.free(second)), HsakmtStatus::MEMORY_NOT_REGISTERED);
    assert_eq!(kfd.buffers(), 0);
}

/// A freed part of an arena that somebody else may still see is nobody's again.
#[test]
fn an_exported_part_is_not_used_again_before_its_arena_goes() {
    let kfd = Kfd::with_window(64 * MIB);
    let keeps_the_arena = kfd.visible(4096).unwrap();
    let address = kfd.visible(4096).unwrap();
    let (dma_buf, offset) = kfd.thunk.memory.export(&kfd.thunk.client, address + 16, 8).unwrap();
    assert_eq!(offset, 16);
    // An import in the same process is the same memory once more, at another address.
    let snapshot = kfd.thunk.snapshot().unwrap();
    use std::os::fd::AsFd;
    let gpus = [GPUS[0]];
    let host = kfd.thunk.host(&snapshot);
    let imported = kfd.thunk.memory.import_graphics(host, dma_buf.as_fd(), Some(&gpus)).unwrap();
    assert_eq!((imported.size, imported.node), (4096, kfd.gpu_node()));
    let info = kfd.thunk.memory.pointer_info(&snapshot, imported.address).unwrap();
    assert_eq!(({ info.kind }, { info.n_registered_nodes }), (HsaPointerType::REGISTERED_GRAPHICS, 1));
    kfd.map(imported.address, 4096).unwrap();
    let offset = address - keeps_the_arena;
    assert_eq!(kfd.state.lock().unwrap().ranges[0].offset, offset);
    kfd.free(address).unwrap();
    assert_ne!(kfd.visible(4096).unwrap(), address);
    kfd.unmap(imported.address).unwrap();
    kfd.thunk.memory.deregister(&kfd.thunk.client, imported.address).unwrap();
    let again = kfd.thunk.memory.deregister(&kfd.thunk.client, imported.address);
    assert_eq!(status(again), HsakmtStatus::MEMORY_NOT_REGISTERED);
    kfd.thunk.shut_down();
    assert_eq!(kfd.buffers(), 0);
}

/// A long-running program that exports now and then, while one small allocation keeps the arena.
#[test]
fn exported_parts_that_are_freed_do_not_use_up_what_can_be_exported() {
    let kfd = Kfd::with_window(64 * MIB);
    let keeps_the_arena = kfd.visible(4096).unwrap();
    for round in 0..2 * virtio_kfd_protocol::limits::MAX_SHARES {
        let address = kfd.visible(4096).unwrap();
        let exported = kfd.thunk.memory.export(&kfd.thunk.client, address, 4096);
        drop(exported.unwrap_or_else(|refusal| panic!("round {round}: {refusal}")));
        kfd.free(address).unwrap();
    }
    kfd.free(keeps_the_arena).unwrap();
}

#[test]
fn what_has_no_dma_buf_says_so() {
    let kfd = Kfd::with_window(64 * MIB);
    let export = |address, size| kfd.thunk.memory.export(&kfd.thunk.client, address, size).map(drop);
    assert_eq!(status(export(0x1000, 1)), HsakmtStatus::INVALID_PARAMETER, "no allocation");
    let paged = kfd.allocate(0, 4096, &[HsaMemFlags::HOST_ACCESS]).unwrap();
    assert_eq!(status(export(paged, 4096)), HsakmtStatus::ERROR, "a user pointer natively");
    let pinned = kfd.allocate(0, 4096, &[HsaMemFlags::HOST_ACCESS, HsaMemFlags::NON_PAGED]).unwrap();
    export(pinned, 4096).unwrap();
    assert_eq!(status(export(pinned, 4097)), HsakmtStatus::INVALID_PARAMETER, "beyond its end");
    // C17: shared by its first address only.
    let vram = kfd.visible(4 * MIB).unwrap();
    let snapshot = kfd.thunk.snapshot().unwrap();
    let share = |address, size| kfd.thunk.memory.share(kfd.thunk.host(&snapshot), address, size);
    assert_eq!(status(share(vram + MIB, MIB)), HsakmtStatus::INVALID_PARAMETER);
    assert_eq!(status(share(vram, 1 << 44)), HsakmtStatus::INVALID_PARAMETER);
    assert_eq!(status(share(pinned, 4096)), HsakmtStatus::NOT_SUPPORTED);
    let handle = share(vram, 4 * MIB).unwrap();
    let own = kfd.thunk.memory.import_shared(kfd.thunk.host(&snapshot), handle, &[]);
    assert_eq!(status(own), HsakmtStatus::ERROR, "this process's own");
    let forged = kfd.thunk.memory.import_shared(kfd.thunk.host(&snapshot), Default::default(), &[]);
    assert_eq!(status(forged), HsakmtStatus::ERROR);
}
