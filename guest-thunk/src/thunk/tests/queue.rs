//! Queues over a host that keeps KFD's rules.
#![allow(unsafe_code, reason = "reads of the memory that the library has made for a queue")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hsakmt_abi::event::HsaEvent;
use hsakmt_abi::queue::{HsaQueuePriority, HsaQueueResource, HsaQueueType};
use hsakmt_abi::status::HsakmtStatus;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use virtio_kfd_protocol::{Call, Status};

use super::kfd::{GPUS, Kfd};
use super::{is_gone, mapping, status};
use crate::client::Client;
use crate::thunk::Thunk;
use crate::thunk::queue::trap::{Slice, Watched, Watcher};
use crate::thunk::queue::{NewQueue, Update, trap};
use crate::thunk::refusal::Outcome;
use crate::thunk::smi::Connected;

/// A read of memory that was just made.
fn word(address: u64) -> u32 {
    let pointer = std::ptr::with_exposed_provenance::<u32>(address as usize);
    assert!(pointer.is_aligned() && mapping(address).as_deref() == Some("rw-s"), "{address:#x}");
    // SAFETY: the address is aligned and in a mapping that can be read, and nobody writes there meanwhile.
    unsafe { pointer.read_volatile() }
}

fn long(address: u64) -> u64 {
    u64::from(word(address)) | u64::from(word(address + 4)) << 32
}

impl Kfd {
    pub fn new_queue(&self, kind: HsaQueueType) -> NewQueue {
        NewQueue {
            sdma_engine: 0,
            node: self.gpu_node(),
            kind,
            percentage: 100,
            priority: HsaQueuePriority::NORMAL,
            ring: 0x7000_0000,
            ring_size: 4096,
            event: None,
            resource: HsaQueueResource {
                queue_wptr_value: 0x6000_0038,
                queue_rptr_value: 0x6000_0080,
                ..Default::default()
            },
        }
    }

    fn create(&self, new: NewQueue) -> Outcome<HsaQueueResource> {
        let snapshot = self.thunk.snapshot().unwrap();
        self.thunk.queues.create(&self.thunk.memory, self.thunk.host(&snapshot), new)
    }

    fn destroy(&self, id: u64) -> Outcome<()> {
        self.thunk.queues.destroy(&self.thunk.memory, &self.thunk.client, id)
    }
}

#[test]
fn an_aql_queue_has_what_the_kernel_demands() {
    let kfd = Kfd::new();
    let event = HsaEvent { event_id: 9, ..Default::default() };
    let mut new = kfd.new_queue(HsaQueueType::COMPUTE_AQL);
    (new.event, new.priority) = (Some(event), HsaQueuePriority::MAXIMUM);
    new.resource.error_reason = 0x1234_5678_9abc;
    kfd.state.lock().unwrap().doorbell = 0x1238;
    let queue = kfd.create(new).unwrap();
    let request = *kfd.state.lock().unwrap().queues.values().next().unwrap();
    assert_eq!((request.kind, request.gpu_id, request.priority, request.percentage), (2, GPUS[0], 15, 100));
    assert_eq!((request.ring_va.0, request.ring_size), (0x7000_0000, 4096));
    assert_eq!((request.write_pointer_va.0, request.read_pointer_va.0), (0x6000_0038, 0x6000_0080));
    assert_eq!((request.eop_size, request.context_save_size), (4096, 0x13f_1000));
    assert_eq!(mapping(request.eop_va.0).as_deref(), Some("---p"), "VRAM");
    // fill_cwsr_header of AMD's library.
    let area = request.context_save_va.0;
    assert_eq!((word(area + 16), word(area + 20)), (0x13f_1000, 0x1_0000), "the debugger's memory");
    assert_eq!((long(area + 24), word(area + 32)), (0x1234_5678_9abc, 9));
    assert_eq!(({ queue.queue_wptr_value }, { queue.queue_rptr_value }), (0x6000_0038, 0x6000_0080));
    let doorbell = queue.queue_door_bell;
    assert_eq!(doorbell & 0xfff, 0x238);
    assert_eq!(long(doorbell), u64::MAX);
    assert_eq!((long(doorbell - 0x1238), long(doorbell + 8192 - 0x1240)), (u64::MAX, u64::MAX));
    kfd.destroy(queue.queue_id).unwrap();
    let state = kfd.state.lock().unwrap();
    assert!(state.queues.is_empty());
    assert!(state.memory().is_empty(), "{:?}", state.buffers);
    // GPUs find the real doorbells at the same addresses (fmm_allocate_doorbell).
    let on_gpu = state.buffers.values().next().unwrap();
    let (place, flags) = (on_gpu.request.va.0, on_gpu.request.flags);
    assert_eq!((place, on_gpu.request.size, flags), (doorbell - 0x1238, 8192, 0x9400_0008));
    assert_eq!(on_gpu.mapped, [GPUS[0]]);
    drop(state);
    assert!(is_gone(area));
    assert_eq!(long(doorbell), u64::MAX, "doorbells stay");
    assert_eq!(status(kfd.destroy(queue.queue_id)), HsakmtStatus::INVALID_PARAMETER);
}

#[test]
fn sdma_queues_get_their_pointers_and_share_the_doorbells_of_a_gpu() {
    let kfd = Kfd::new();
    let first = kfd.create(kfd.new_queue(HsaQueueType::SDMA)).unwrap();
    let (write, read) = ({ first.queue_wptr_value }, { first.queue_rptr_value });
    assert_eq!((write - first.queue_id, read - first.queue_id), (8, 16));
    assert_eq!((long(write), long(read)), (0, 0));
    kfd.frames();
    kfd.state.lock().unwrap().doorbell = 8;
    let second = kfd.create(kfd.new_queue(HsaQueueType::SDMA_XGMI)).unwrap();
    assert_eq!({ second.queue_door_bell }, first.queue_door_bell + 8);
    let calls = kfd.frames().concat();
    assert_eq!(calls, [Call::AllocMemory, Call::MapMemory, Call::CreateQueue]);
    let mut on_the_other = kfd.new_queue(HsaQueueType::COMPUTE);
    on_the_other.node += 1;
    let third = kfd.create(on_the_other).unwrap();
    assert_ne!(third.queue_door_bell & !8191, first.queue_door_bell & !8191);
    let state = kfd.state.lock().unwrap();
    assert_eq!(state.doorbells.len(), 2);
    let kinds: Vec<u32> = state.queues.values().map(|queue| queue.kind).collect();
    assert_eq!(kinds, [1, 3, 0]);
    assert!(state.queues.values().take(2).all(|queue| (queue.eop_va.0, queue.context_save_va.0) == (0, 0)));
}

#[test]
fn a_refused_queue_leaves_nothing() {
    let kfd = Kfd::new();
    let bad = |change: fn(&mut NewQueue)| {
        let mut new = kfd.new_queue(HsaQueueType::COMPUTE_AQL);
        change(&mut new);
        status(kfd.create(new))
    };
    assert_eq!(bad(|new| new.ring_size = 4097), HsakmtStatus::INVALID_PARAMETER);
    assert_eq!(bad(|new| new.percentage = 101), HsakmtStatus::INVALID_PARAMETER);
    kfd.frames();
    assert_eq!(bad(|new| new.priority = HsaQueuePriority(4)), HsakmtStatus::INVALID_PARAMETER);
    assert_eq!(bad(|new| new.kind = HsaQueueType::DMA_AQL), HsakmtStatus::INVALID_PARAMETER);
    assert_eq!(bad(|new| new.ring_size = 1 << 32), HsakmtStatus::INVALID_PARAMETER);
    assert_eq!(bad(|new| new.node = 99), HsakmtStatus::INVALID_NODE_UNIT);
    assert_eq!(bad(|new| new.node = 0), HsakmtStatus::INVALID_NODE_UNIT, "a CPU node");
    assert_eq!(kfd.frames(), [] as [Vec<Call>; 0]);
    for (errno, expected) in
        [(12, HsakmtStatus::NO_MEMORY), (22, HsakmtStatus::INVALID_PARAMETER), (524, HsakmtStatus::ERROR)]
    {
        kfd.state.lock().unwrap().queue_errno = errno;
        assert_eq!(bad(|_| ()), expected);
    }
    kfd.state.lock().unwrap().queue_errno = 0;
    // Each of the three pieces of memory cannot be had or mapped.
    kfd.state.lock().unwrap().vram = 0;
    assert_eq!(bad(|_| ()), HsakmtStatus::NO_MEMORY);
    (kfd.state.lock().unwrap().vram, kfd.state.lock().unwrap().map_limit) = (1 << 30, 0);
    assert_eq!(bad(|_| ()), HsakmtStatus::NO_MEMORY);
    kfd.state.lock().unwrap().map_limit = 64;
    // A host whose doorbell nobody could ring.
    for offset in [4, 8192, u32::MAX - 7] {
        kfd.state.lock().unwrap().doorbell = offset;
        assert_eq!(bad(|_| ()), HsakmtStatus::ERROR, "{offset:#x}");
    }
    let state = kfd.state.lock().unwrap();
    assert!(state.memory().is_empty() && state.queues.is_empty());
    assert_eq!(state.vram, 1 << 30);
}

#[test]
fn a_queue_that_the_host_does_not_destroy_stays() {
    let kfd = Kfd::new();
    let queue = kfd.create(kfd.new_queue(HsaQueueType::COMPUTE)).unwrap();
    kfd.state.lock().unwrap().queue_errno = 62;
    assert_eq!(status(kfd.destroy(queue.queue_id)), HsakmtStatus::ERROR);
    assert_eq!(long(queue.queue_wptr_value), 0, "its memory is there");
    kfd.state.lock().unwrap().queue_errno = 0;
    kfd.destroy(queue.queue_id).unwrap();
}

#[test]
fn updates_and_masks() {
    let kfd = Kfd::new();
    let (queues, client) = (&kfd.thunk.queues, &kfd.thunk.client);
    let id = kfd.create(kfd.new_queue(HsaQueueType::COMPUTE_AQL)).unwrap().queue_id;
    let update = Update { percentage: 0, priority: HsaQueuePriority::LOW, ring: 0, ring_size: 4096 };
    queues.update(client, id, update).unwrap();
    let updated = kfd.state.lock().unwrap().updated.unwrap();
    assert_eq!((updated.percentage, updated.priority, updated.ring_va.0, updated.ring_size), (0, 3, 0, 4096));
    let wrong = Update { priority: HsaQueuePriority(-4), ..update };
    assert_eq!(status(queues.update(client, id, wrong)), HsakmtStatus::INVALID_PARAMETER);
    assert_eq!(status(queues.update(client, 0, update)), HsakmtStatus::INVALID_PARAMETER);
    let (info, _) = queues.info(client, id).unwrap();
    assert_eq!({ info.num_cu_assigned }, 64, "60 units");
    assert_eq!(long(info.cu_mask_info), (1 << 60) - 1);
    queues.set_cu_mask(client, id, &[0xff00, 1, 2]).unwrap();
    assert_eq!(kfd.state.lock().unwrap().cu_mask, [0xff00, 1, 2]);
    let (info, _) = queues.info(client, id).unwrap();
    assert_eq!(({ info.num_cu_assigned }, long(info.cu_mask_info)), (96, 0x1_0000_ff00));
    queues.set_cu_mask(client, id, &[7; 40]).unwrap();
    assert_eq!(kfd.state.lock().unwrap().cu_mask, [7; 32], "as the kernel cuts it");
    assert_eq!(queues.alloc_gws(client, id, 1), Ok(0));
    for (errno, expected) in [
        (22, HsakmtStatus::INVALID_PARAMETER),
        (16, HsakmtStatus::OUT_OF_RESOURCES),
        (19, HsakmtStatus::NOT_SUPPORTED),
        (5, HsakmtStatus::ERROR),
    ] {
        kfd.state.lock().unwrap().queue_errno = errno;
        assert_eq!(status(queues.alloc_gws(client, id, 1)), expected, "{errno}");
    }
}

#[test]
fn the_state_of_waves_is_where_the_kernel_writes_it() {
    let kfd = Kfd::new();
    let (queues, client) = (&kfd.thunk.queues, &kfd.thunk.client);
    let id = kfd.create(kfd.new_queue(HsaQueueType::COMPUTE_AQL)).unwrap().queue_id;
    let (info, save_area) = queues.info(client, id).unwrap();
    assert_eq!(save_area, 0x13f_1000, "of one die");
    let area = info.save_area_header;
    assert_eq!({ info.user_context_save_area }, area + 0x5000);
    assert_eq!(
        ({ info.control_stack_top }, { info.control_stack_used_in_bytes }),
        (area + 0x5000 - 0x18, 0x18)
    );
    assert_eq!({ info.save_area_size_in_bytes }, 0x2000);
    let header: Vec<u32> = (0..6).map(|index| word(area + 4 * index)).collect();
    assert_eq!(header, [0x4fe8, 0x18, 0x5000, 0x2000, 0x13f_1000, 0x1_0000], "the library's part stays");
    assert_eq!(
        (word(area + 0x4fe4), word(area + 0x4fe8), word(area + 0x4ffc)),
        (0, 0x5a5a_5a5a, 0x5a5a_5a5a)
    );
    let sdma = kfd.create(kfd.new_queue(HsaQueueType::SDMA)).unwrap();
    assert_eq!(status(queues.info(client, sdma.queue_id)), HsakmtStatus::ERROR);
}

#[test]
fn a_close_ends_queues_before_their_memory() {
    let kfd = Kfd::new();
    let mut addresses = Vec::new();
    for _ in 0..70 {
        addresses.push(kfd.create(kfd.new_queue(HsaQueueType::SDMA)).unwrap().queue_id);
    }
    kfd.frames();
    // One of them is gone on the host: the others go nevertheless.
    kfd.state.lock().unwrap().queues.pop_first();
    kfd.thunk.shut_down();
    let calls = kfd.frames().concat();
    let last = calls.iter().rposition(|call| *call == Call::DestroyQueue).unwrap();
    assert!(!calls[..last].contains(&Call::FreeMemory));
    let state = kfd.state.lock().unwrap();
    assert!(state.queues.is_empty() && state.buffers.is_empty());
}

#[test]
fn threads_make_and_destroy_queues_at_once() {
    let kfd = Kfd::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let queue = kfd.create(kfd.new_queue(HsaQueueType::SDMA)).unwrap();
                    kfd.destroy(queue.queue_id).unwrap();
                }
            });
        }
    });
    let state = kfd.state.lock().unwrap();
    assert!(state.queues.is_empty() && state.memory().is_empty());
    assert_eq!(state.doorbells.len(), 1, "the first queue brought them");
}

/// Waits until the host has been told so much of the trap.
fn await_told(kfd: &Kfd, armed: &[u32]) {
    let begin = Instant::now();
    while kfd.state.lock().unwrap().armed.len() < armed.len() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", kfd.state.lock().unwrap().armed);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(kfd.state.lock().unwrap().armed, armed);
}

fn store(address: u64, value: u64) {
    let pointer = std::ptr::with_exposed_provenance::<AtomicU64>(address as usize);
    // SAFETY: the address is a doorbell's.
    unsafe { &*pointer }.store(value, Ordering::Release);
}

/// Whether this process may have the trap.
pub fn can_trap() -> bool {
    let available = trap::is_available();
    if !available {
        println!("SKIP: userfaultfd for user mode is refused here");
    }
    available
}

#[test]
fn still_doorbells_trap_and_no_store_is_lost() {
    if !can_trap() {
        return;
    }
    let kfd = Kfd::new();
    let queue = kfd.create(kfd.new_queue(HsaQueueType::SDMA)).unwrap();
    let doorbell = queue.queue_door_bell;
    kfd.thunk.queues.watch(&kfd.thunk);
    store(doorbell, 1);
    assert_eq!(long(doorbell), 1);
    assert_eq!(kfd.state.lock().unwrap().armed, [0; 0], "they are not still");
    let mut told = Vec::new();
    for value in 2..6 {
        kfd.state.lock().unwrap().still = true;
        told.push(1);
        await_told(&kfd, &told);
        kfd.state.lock().unwrap().still = false;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || store(doorbell + 8 * thread, value));
            }
        });
        told.push(0);
        await_told(&kfd, &told);
        assert!(
            (0..4).all(|thread| long(doorbell + 8 * thread) == value),
            "in the memory that the host sees"
        );
    }
    // Doorbells of another GPU: those that trap and those that do not must not be mixed up.
    kfd.state.lock().unwrap().still = true;
    told.push(1);
    await_told(&kfd, &told);
    let mut other = kfd.new_queue(HsaQueueType::SDMA);
    other.node += 1;
    let other = kfd.create(other).unwrap();
    told.extend([0, 1]);
    await_told(&kfd, &told);
    kfd.thunk.shut_down();
    let calls = kfd.state.lock().unwrap().armed.clone();
    assert_eq!(calls.last(), Some(&0), "a close lets nothing trap");
    drop(kfd);
    assert!(is_gone(doorbell) && is_gone(other.queue_door_bell));
}

#[test]
fn a_host_without_room_for_the_question_is_asked_again() {
    if !can_trap() {
        return;
    }
    let kfd = Kfd::new();
    let queue = kfd.create(kfd.new_queue(HsaQueueType::SDMA)).unwrap();
    (kfd.state.lock().unwrap().still, kfd.state.lock().unwrap().wait_status) = (true, Status::LIMIT);
    kfd.thunk.queues.watch(&kfd.thunk);
    await_told(&kfd, &[1]);
    store(queue.queue_door_bell, 1);
    assert_eq!(long(queue.queue_door_bell), 1);
    kfd.thunk.shut_down();
}

/// How many there were.
static BROKEN_PIPES: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_broken_pipe(_signal: libc::c_int) {
    BROKEN_PIPES.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn doorbells_that_are_made_after_the_watchers_end_send_no_signal() {
    if !can_trap() {
        return;
    }
    let action = SigAction::new(SigHandler::Handler(count_broken_pipe), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler adds to a number, which is safe in a signal handler.
    let before = unsafe { sigaction(Signal::SIGPIPE, &action) }.unwrap();
    let kfd = Kfd::new();
    kfd.create(kfd.new_queue(HsaQueueType::SDMA)).unwrap();
    kfd.state.lock().unwrap().wait_status = Status::NOT_SUPPORTED;
    kfd.thunk.queues.watch(&kfd.thunk);
    // The last that it says. That it has ended cannot be seen, but takes far less than this.
    await_told(&kfd, &[0]);
    std::thread::sleep(Duration::from_millis(300));
    let mut other = kfd.new_queue(HsaQueueType::SDMA);
    other.node += 1;
    let other = kfd.create(other).unwrap();
    store(other.queue_door_bell, 1);
    kfd.thunk.shut_down();
    // SAFETY: what there was before.
    unsafe { sigaction(Signal::SIGPIPE, &before) }.unwrap();
    assert_eq!(BROKEN_PIPES.load(Ordering::Relaxed), 0);
}

#[test]
fn a_close_does_not_wait_for_children_of_fork() {
    if !can_trap() {
        return;
    }
    let kfd = Kfd::new();
    kfd.create(kfd.new_queue(HsaQueueType::SDMA)).unwrap();
    kfd.state.lock().unwrap().still = true;
    kfd.thunk.queues.watch(&kfd.thunk);
    await_told(&kfd, &[1]);
    // SAFETY: the child only sleeps until it is killed.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        loop {
            // SAFETY: no pointer.
            unsafe { libc::pause() };
        }
    }
    let thunk = Arc::clone(&kfd.thunk);
    let (closed, closes) = channel();
    std::thread::spawn(move || {
        thunk.shut_down();
        let _ = closed.send(());
    });
    let ended = closes.recv_timeout(Duration::from_secs(60));
    let child = Pid::from_raw(child);
    kill(child, Signal::SIGKILL).unwrap();
    waitpid(child, None).unwrap();
    ended.expect("closed while the child lives");
}

/// Doorbells of which it takes long to tell whether they are still there.
struct Counted {
    doorbells: Arc<dyn Slice>,
    asked: Arc<AtomicU32>,
}

impl Slice for Counted {
    fn start(&self) -> u64 {
        self.doorbells.start()
    }

    fn size(&self) -> u64 {
        self.doorbells.size()
    }

    fn map_again(&self, address: u64) -> std::io::Result<()> {
        self.doorbells.map_again(address)
    }

    fn may_go(&self) -> bool {
        true
    }

    fn is_there(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        true
    }
}

/// A thunk with such doorbells.
struct Counting {
    thunk: Arc<Thunk>,
    asked: Arc<AtomicU32>,
}

impl Connected for Counting {
    fn client(&self) -> &Client {
        self.thunk.client()
    }
}

impl Watched for Counting {
    fn with_slices<R>(&self, act: impl FnOnce(Vec<Arc<dyn Slice>>) -> R) -> Option<R> {
        self.thunk.with_slices(|slices| {
            let counted =
                |doorbells| Arc::new(Counted { doorbells, asked: Arc::clone(&self.asked) }) as Arc<dyn Slice>;
            act(slices.into_iter().map(counted).collect())
        })
    }
}

#[test]
fn where_doorbells_are_is_looked_at_once_for_each_trap() {
    if !can_trap() {
        return;
    }
    let kfd = Kfd::new();
    let doorbell = kfd.create(kfd.new_queue(HsaQueueType::SDMA)).unwrap().queue_door_bell;
    let asked = Arc::new(AtomicU32::new(0));
    let counting = Arc::new(Counting { thunk: Arc::clone(&kfd.thunk), asked: Arc::clone(&asked) });
    let watcher = Watcher::start(&counting).unwrap();
    let mut told = Vec::new();
    for round in 1..4 {
        kfd.state.lock().unwrap().still = true;
        told.push(1);
        await_told(&kfd, &told);
        kfd.state.lock().unwrap().still = false;
        assert_eq!(asked.load(Ordering::Relaxed), round);
        store(doorbell, round.into());
        told.push(0);
        await_told(&kfd, &told);
        assert_eq!(long(doorbell), u64::from(round));
    }
    watcher.end();
    kfd.thunk.shut_down();
}
