//! The logic over a host that keeps KFD's rules.

#[cfg(target_arch = "x86_64")]
mod hdp;
mod kept;
mod kfd;
mod queue;
mod registered;
mod vram;

use hsakmt_abi::bits::BitField;
use hsakmt_abi::event::{HsaEventDescriptor, HsaEventType};
use hsakmt_abi::memory::{HsaMemFlags, HsaPointerType};
use hsakmt_abi::status::HsakmtStatus;
use hsakmt_abi::topology::HsaHeapType;
use virtio_kfd_protocol::Call;

use self::kfd::{GPUS, Kfd};
use super::memory::Request;
use super::refusal::Outcome;

fn flags(fields: &[BitField<HsaMemFlags>]) -> HsaMemFlags {
    fields.iter().fold(HsaMemFlags(0), |flags, field| flags.with(*field, 1))
}

impl Kfd {
    /// The node of the first GPU: the CPU nodes of this machine come first.
    fn gpu_node(&self) -> u32 {
        self.thunk.snapshot().unwrap().gpus[0].node
    }

    fn allocate(&self, node: u32, size: u64, fields: &[BitField<HsaMemFlags>]) -> Outcome<u64> {
        let snapshot = self.thunk.snapshot().unwrap();
        let request = Request { node, size, alignment: 0, flags: flags(fields), address: 0 };
        self.thunk.memory.allocate(self.thunk.host(&snapshot), request)
    }

    fn map(&self, address: u64, size: u64) -> Outcome<()> {
        let snapshot = self.thunk.snapshot().unwrap();
        self.thunk.memory.map(self.thunk.host(&snapshot), address, size).map(|_| ())
    }

    fn unmap(&self, address: u64) -> Outcome<()> {
        self.thunk.memory.unmap(&self.thunk.client, address)
    }

    fn free(&self, address: u64) -> Outcome<()> {
        self.thunk.memory.free(&self.thunk.client, address)
    }

    fn event(&self) -> hsakmt_abi::event::HsaEvent {
        let snapshot = self.thunk.snapshot().unwrap();
        let descriptor = HsaEventDescriptor { event_type: HsaEventType::SIGNAL, ..Default::default() };
        self.thunk.events.create(self.thunk.host(&snapshot), descriptor, false, false).unwrap()
    }
}

fn status<T: std::fmt::Debug>(outcome: Outcome<T>) -> HsakmtStatus {
    outcome.unwrap_err().status
}

/// Whether the process has something at an address, and what: from /proc/self/maps.
fn mapping(address: u64) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let range = u64::from_str_radix(start, 16).unwrap()..u64::from_str_radix(end, 16).unwrap();
        range.contains(&address).then(|| rest[..4].to_owned())
    })
}

/// Whether nothing is mapped there any more. Other tests of this process may have had the address at once: theirs goes with
/// them, what this library forgot would stay.
fn is_gone(address: u64) -> bool {
    let look = |_| {
        let gone = mapping(address).is_none();
        if !gone {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        gone
    };
    (0..600).any(look)
}

#[test]
fn the_snapshot_has_the_gpus_behind_the_cpus() {
    let kfd = Kfd::new();
    let snapshot = kfd.thunk.snapshot().unwrap();
    let node = kfd.gpu_node();
    assert_eq!(snapshot.all_gpus(), GPUS);
    assert_eq!({ snapshot.system.platform_oem }, 7);
    assert_eq!({ snapshot.system.num_nodes }, node + 2);
    assert_eq!(snapshot.svm, Some((2 << 20, (1 << 47) - 1)));
    let banks = snapshot.banks(node).unwrap();
    assert_eq!({ banks[0].heap_type }, HsaHeapType::FRAME_BUFFER_PRIVATE, "the CPU cannot map it");
    let properties = snapshot.properties(node).unwrap();
    assert_eq!(properties.marketing_name, [0; 64], "the render node gave no information");
}

#[test]
fn system_memory_is_one_frame_for_buffer_and_mapping() {
    let kfd = Kfd::new();
    let address = kfd.allocate(0, 8192, &[HsaMemFlags::HOST_ACCESS]).unwrap();
    assert_eq!(kfd.frames(), [] as [Vec<Call>; 0], "no GPU could see it yet");
    assert_eq!(mapping(address).as_deref(), Some("rw-s"));
    kfd.map(address, 8192).unwrap();
    assert_eq!(kfd.frames(), [vec![Call::AllocMemory, Call::MapMemory]]);
    {
        let state = kfd.state.lock().unwrap();
        let buffer = state.buffers.values().next().unwrap();
        assert_eq!(buffer.mapped, GPUS);
        assert_eq!((buffer.request.va.0, buffer.request.size), (address, 8192));
        assert_eq!(buffer.request.flags, 0xc400_0004, "a user pointer, coherent");
        assert_ne!(buffer.request.resource.0, 0);
    }
    kfd.map(address, 8192).unwrap();
    assert_eq!(kfd.frames(), [] as [Vec<Call>; 0], "it is mapped");
    kfd.unmap(address).unwrap();
    kfd.unmap(address).unwrap();
    assert_eq!(kfd.frames(), [vec![Call::UnmapMemory]]);
    kfd.map(address, 8192).unwrap();
    assert_eq!(kfd.frames(), [vec![Call::MapMemory]]);
    kfd.unmap(address).unwrap();
    kfd.free(address).unwrap();
    assert!(is_gone(address));
    assert!(kfd.state.lock().unwrap().buffers.is_empty());
    assert_eq!(status(kfd.free(address)), HsakmtStatus::MEMORY_NOT_REGISTERED);
}

#[test]
fn memory_that_is_still_mapped_is_not_freed() {
    let kfd = Kfd::new();
    let address = kfd.allocate(0, 4096, &[HsaMemFlags::HOST_ACCESS]).unwrap();
    kfd.map(address, 4096).unwrap();
    assert_eq!(status(kfd.free(address)), HsakmtStatus::ERROR);
    assert_eq!(mapping(address).as_deref(), Some("rw-s"), "nothing is lost");
    kfd.unmap(address).unwrap();
    kfd.free(address).unwrap();
}

#[test]
fn a_mapping_that_ends_early_says_so_and_can_go_on() {
    let kfd = Kfd::new();
    let address = kfd.allocate(0, 4096, &[HsaMemFlags::HOST_ACCESS]).unwrap();
    kfd.state.lock().unwrap().map_limit = 1;
    assert_eq!(status(kfd.map(address, 4096)), HsakmtStatus::ERROR);
    kfd.state.lock().unwrap().map_limit = 64;
    kfd.frames();
    kfd.map(address, 4096).unwrap();
    assert_eq!(kfd.frames(), [vec![Call::MapMemory]]);
    assert_eq!(kfd.state.lock().unwrap().buffers.values().next().unwrap().mapped, GPUS);
}

#[test]
fn mapping_to_nodes_unmaps_from_the_others() {
    let kfd = Kfd::new();
    let (first, second) = (kfd.gpu_node(), kfd.gpu_node() + 1);
    let snapshot = kfd.thunk.snapshot().unwrap();
    let to = |address, nodes: &[u32]| {
        kfd.thunk.memory.map_to_nodes(kfd.thunk.host(&snapshot), address, 4096, nodes)
    };
    let mapped = || kfd.state.lock().unwrap().buffers.values().next().unwrap().mapped.clone();
    let address = kfd.allocate(0, 4096, &[HsaMemFlags::HOST_ACCESS]).unwrap();
    to(address, &[first]).unwrap();
    assert_eq!(mapped(), [GPUS[0]]);
    to(address, &[second]).unwrap();
    assert_eq!(mapped(), [GPUS[1]]);
    assert_eq!(status(to(address, &[0])), HsakmtStatus::ERROR, "a CPU node");
    assert_eq!(status(to(address, &[])), HsakmtStatus::INVALID_PARAMETER);
    assert_eq!(status(to(address + (1 << 20), &[first])), HsakmtStatus::ERROR);
    assert_eq!(status(kfd.map(address + (1 << 20), 4096)), HsakmtStatus::INVALID_PARAMETER);
}

#[test]
fn vram_is_allocated_at_once_and_its_lack_is_seen() {
    let kfd = Kfd::new();
    let vram = [HsaMemFlags::NON_PAGED, HsaMemFlags::COARSE_GRAIN];
    let address = kfd.allocate(kfd.gpu_node(), 1 << 21, &vram).unwrap();
    assert_eq!(kfd.frames(), [vec![Call::AllocMemory]]);
    assert_eq!(mapping(address).as_deref(), Some("---p"), "the CPU cannot access it");
    assert!(address.is_multiple_of(1 << 21), "in large pages");
    assert_eq!(status(kfd.allocate(kfd.gpu_node(), 1 << 31, &vram)), HsakmtStatus::NO_MEMORY);
    kfd.map(address, 1 << 21).unwrap();
    assert_eq!(kfd.state.lock().unwrap().buffers.values().next().unwrap().mapped, GPUS, "and its peer");
    kfd.unmap(address).unwrap();
    kfd.free(address).unwrap();
    assert_eq!(kfd.state.lock().unwrap().vram, 1 << 30);
    let visible = [HsaMemFlags::NON_PAGED, HsaMemFlags::HOST_ACCESS];
    assert_eq!(status(kfd.allocate(kfd.gpu_node(), 4096, &visible)), HsakmtStatus::NO_MEMORY);
    assert_eq!(kfd.state.lock().unwrap().vram, 1 << 30);
}

#[test]
fn addresses_without_memory() {
    let kfd = Kfd::new();
    let fields = [HsaMemFlags::NON_PAGED, HsaMemFlags::ONLY_ADDRESS];
    let address = kfd.allocate(kfd.gpu_node(), 1 << 21, &fields).unwrap();
    assert_eq!(kfd.frames(), [] as [Vec<Call>; 0]);
    assert_eq!(status(kfd.map(address, 1 << 21)), HsakmtStatus::INVALID_PARAMETER);
    let info = kfd.thunk.memory.pointer_info(&kfd.thunk.snapshot().unwrap(), address).unwrap();
    assert_eq!({ info.kind }, HsaPointerType::RESERVED_ADDR);
    kfd.free(address).unwrap();
    assert!(is_gone(address));
}

#[test]
fn fixed_addresses_are_taken_only_if_free() {
    let kfd = Kfd::new();
    let snapshot = kfd.thunk.snapshot().unwrap();
    let at = |address| {
        let flags = flags(&[HsaMemFlags::HOST_ACCESS, HsaMemFlags::FIXED_ADDRESS]);
        let request = Request { node: 0, size: 4096, alignment: 0, flags, address };
        kfd.thunk.memory.allocate(kfd.thunk.host(&snapshot), request)
    };
    let taken = kfd.allocate(0, 4096, &[HsaMemFlags::HOST_ACCESS]).unwrap();
    assert_eq!(status(at(taken)), HsakmtStatus::ERROR);
    kfd.free(taken).unwrap();
    assert_eq!(at(taken), Ok(taken));
    assert_eq!(status(at(4096)), HsakmtStatus::ERROR, "below what GPUs reach");
}

#[test]
fn a_ring_of_aql_packets_has_twice_its_addresses() {
    let kfd = Kfd::new();
    let fields = [HsaMemFlags::HOST_ACCESS, HsaMemFlags::AQL_QUEUE_MEMORY];
    let address = kfd.allocate(0, 4096, &fields).unwrap();
    assert_eq!(mapping(address).as_deref(), Some("rw-s"));
    assert_eq!(mapping(address + 4096).as_deref(), Some("---p"), "GPUs alone see it twice");
    kfd.map(address, 4096).unwrap();
    assert_eq!(kfd.state.lock().unwrap().buffers.values().next().unwrap().request.size, 8192);
}

#[test]
fn pointers_are_found_anywhere_in_an_allocation() {
    let kfd = Kfd::new();
    let snapshot = kfd.thunk.snapshot().unwrap();
    let memory = &kfd.thunk.memory;
    let address = kfd.allocate(0, 8192, &[HsaMemFlags::HOST_ACCESS]).unwrap();
    memory.set_user_data(address, 0xabc).unwrap();
    let info = memory.pointer_info(&snapshot, address + 8191).unwrap();
    assert_eq!(({ info.gpu_address }, { info.size_in_bytes }), (address, 8192));
    assert_eq!(({ info.kind }, { info.user_data }), (HsaPointerType::ALLOCATED, 0xabc));
    assert_eq!(({ info.n_mapped_nodes }, { info.mapped_nodes }), (0, 0));
    kfd.map(address, 8192).unwrap();
    let info = memory.pointer_info(&snapshot, address).unwrap();
    assert_eq!({ info.n_mapped_nodes }, 2);
    assert_ne!({ info.mapped_nodes }, 0);
    assert!(memory.pointer_info(&snapshot, address + 8192).is_err(), "the guard page");
    assert!(memory.pointer_info(&snapshot, address - 1).is_err());
}

#[test]
fn scratch_memory_is_mapped_in_parts() {
    let kfd = Kfd::new();
    let scratch = kfd.allocate(kfd.gpu_node(), 1 << 20, &[HsaMemFlags::SCRATCH]).unwrap();
    assert_eq!(kfd.frames(), [vec![Call::SetScratchBackingVa]]);
    assert!(scratch.is_multiple_of(64 << 10));
    let again = kfd.allocate(kfd.gpu_node(), 1 << 20, &[HsaMemFlags::SCRATCH]);
    assert_eq!(status(again), HsakmtStatus::NO_MEMORY, "a GPU has one");
    let part = scratch + (64 << 10);
    kfd.map(part, 8192).unwrap();
    assert_eq!(kfd.frames(), [vec![Call::AllocMemory, Call::MapMemory]]);
    assert_eq!(kfd.state.lock().unwrap().buffers.values().next().unwrap().mapped, [GPUS[0]]);
    assert_eq!(status(kfd.map(scratch, 2 << 20)), HsakmtStatus::INVALID_PARAMETER, "beyond its end");
    assert_eq!(status(kfd.map(part, 8192)), HsakmtStatus::INVALID_HANDLE, "it is mapped");
    kfd.unmap(part).unwrap();
    assert!(kfd.state.lock().unwrap().buffers.is_empty());
    kfd.map(part, 8192).unwrap();
    kfd.free(scratch).unwrap();
    assert!(kfd.state.lock().unwrap().buffers.is_empty(), "with all its parts");
    assert!(is_gone(scratch));
}

#[test]
fn the_first_event_brings_the_page_and_no_other() {
    let kfd = Kfd::new();
    let first = kfd.event();
    assert_eq!(kfd.frames(), [vec![Call::AllocMemory, Call::MapMemory], vec![Call::CreateEvent]]);
    {
        let state = kfd.state.lock().unwrap();
        let page = state.buffers.values().next().unwrap();
        assert!(state.event_page.is_some());
        assert_eq!((page.request.size, page.request.flags), (32768, 0xc600_0002), "GTT");
        let data = first.event_data;
        assert_eq!({ data.hw_data2 }, page.request.va.0 + 8, "the slot of event 1");
        assert_eq!(({ data.hw_data1 }, { data.hw_data3 }), (1, 1));
    }
    let second = kfd.event();
    assert_eq!(kfd.frames(), [vec![Call::CreateEvent]]);
    assert_eq!({ second.event_data.hw_data2 }, { first.event_data.hw_data2 } + 8);
}

#[test]
fn waits_tell_ages_and_time() {
    let kfd = Kfd::new();
    let mut events = [kfd.event(), kfd.event()];
    let wait = |events: &mut [_], ages: Option<&mut [u64]>| {
        kfd.thunk.events.wait(&kfd.thunk.client, None, events, ages, false, 0)
    };
    assert_eq!(status(wait(&mut events, None)), HsakmtStatus::WAIT_TIMEOUT);
    kfd.thunk.events.set(&kfd.thunk.client, &events[1]).unwrap();
    let mut ages = [4, 9];
    wait(&mut events, Some(&mut ages)).unwrap();
    assert_eq!(ages, [5, 10]);
    let mut gone = [kfd.event()];
    kfd.thunk.events.own(0x1000, &gone[0]);
    kfd.thunk.events.destroy(&kfd.thunk.client, 0x1000).unwrap();
    assert_eq!(status(wait(&mut gone, None)), HsakmtStatus::ERROR);
    let again = kfd.thunk.events.destroy(&kfd.thunk.client, 0x1000);
    assert_eq!(status(again), HsakmtStatus::INVALID_HANDLE);
}

#[test]
fn a_close_frees_what_is_left() {
    let kfd = Kfd::new();
    let vram = [HsaMemFlags::NON_PAGED, HsaMemFlags::COARSE_GRAIN];
    for _ in 0..40 {
        let system = kfd.allocate(0, 4096, &[HsaMemFlags::HOST_ACCESS]).unwrap();
        kfd.map(system, 4096).unwrap();
        kfd.allocate(kfd.gpu_node(), 4096, &vram).unwrap();
    }
    let scratch = kfd.allocate(kfd.gpu_node(), 1 << 20, &[HsaMemFlags::SCRATCH]).unwrap();
    kfd.map(scratch, 4096).unwrap();
    kfd.thunk.shut_down();
    let state = kfd.state.lock().unwrap();
    assert!(state.buffers.is_empty(), "{} buffers are left", state.buffers.len());
}

#[test]
fn threads_allocate_and_free_at_once() {
    let kfd = Kfd::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let address = kfd.allocate(0, 4096, &[HsaMemFlags::HOST_ACCESS]).unwrap();
                    kfd.map(address, 4096).unwrap();
                    kfd.unmap(address).unwrap();
                    kfd.free(address).unwrap();
                }
            });
        }
    });
    assert!(kfd.state.lock().unwrap().buffers.is_empty());
}
