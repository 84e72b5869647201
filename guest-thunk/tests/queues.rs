//! Queues through loop-back, against the real daemon and worker on the KFD model. Expected answers: AMD's library (rocm-6.2.4
//! queues.c), kfd_chardev.c and kfd_doorbell.c; packets by sdma0 of gfx9 (FENCE: vega10_sdma_pkt_open.h).
#![cfg(feature = "loopback")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "calls of the C API, stores to rings and doorbells, fork")]

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use guest_thunk::client::LOOPBACK_VARIABLE;
use guest_thunk::export::pointer::{In, Out};
use guest_thunk::export::{memory, open, queue, topology};
use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::queue::{HsaQueueInfo, HsaQueuePriority, HsaQueueResource, HsaQueueType};
use hsakmt_abi::status::HsakmtStatus as Status;
use hsakmt_abi::topology::{HsaNodeProperties356, HsaSystemProperties};

use self::support::Daemon;

/// A call of the C API.
macro_rules! ask {
    ($function:path $(, $argument:expr)* $(,)?) => {
        // SAFETY: all pointers that the test passes are null or point to its own values.
        unsafe { $function($($argument),*) }
    };
}

/// Enough for a loaded machine; a ring takes microseconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longer than doorbells have to be still before a host looks at them less often or not at all.
const IDLE: Duration = Duration::from_millis(700);
/// Bytes of a ring.
const RING: u64 = 4096;
/// Bytes of the doorbells of a process on a GPU (`kfd_doorbell_process_slice`).
const SLICE: u64 = 8192;

fn out<T>(value: &mut T) -> Out<T> {
    Out::from(std::ptr::from_mut(value))
}

fn null<T>() -> Out<T> {
    Out::from(std::ptr::null_mut())
}

fn pointer<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

/// A word that GPUs, the host or other threads may look at.
fn word<'a>(address: u64) -> &'a AtomicU32 {
    // SAFETY: callers name words in memory that the library has given and that they free later.
    unsafe { &*pointer::<AtomicU32>(address) }
}

fn long<'a>(address: u64) -> &'a AtomicU64 {
    // SAFETY: as above.
    unsafe { &*pointer::<AtomicU64>(address) }
}

/// Memory of the guest that all GPUs have mapped.
fn mapped(size: u64) -> u64 {
    let flags = HsaMemFlags(0).with(HsaMemFlags::HOST_ACCESS, 1);
    let mut address = 0;
    assert_eq!(ask!(memory::hsaKmtAllocMemory, 0, size, flags, out(&mut address)), Status::SUCCESS);
    assert_eq!(ask!(memory::hsaKmtMapMemoryToGPU, pointer(address), size, null()), Status::SUCCESS);
    address
}

fn free(address: u64, size: u64) {
    assert_eq!(ask!(memory::hsaKmtUnmapMemoryToGPU, pointer(address)), Status::SUCCESS);
    assert_eq!(ask!(memory::hsaKmtFreeMemory, pointer(address), size), Status::SUCCESS);
}

fn create(
    node: u32,
    kind: HsaQueueType,
    (percentage, priority): (u32, i64),
    (ring, size): (u64, u64),
) -> (Status, HsaQueueResource) {
    let mut resource = HsaQueueResource::default();
    let status = ask!(
        queue::hsaKmtCreateQueue,
        node,
        kind,
        percentage,
        HsaQueuePriority(priority),
        pointer(ring),
        size,
        null(),
        out(&mut resource)
    );
    (status, resource)
}

fn destroy(id: u64) -> Status {
    ask!(queue::hsaKmtDestroyQueue, id)
}

/// An SDMA queue that writes numbers to a word.
struct Writer {
    resource: HsaQueueResource,
    ring: u64,
    target: u64,
    written: u64,
    last: u32,
}

impl Writer {
    fn new(gpu: u32) -> Writer {
        let (ring, target) = (mapped(RING), mapped(4096));
        let (made, resource) = create(gpu, HsaQueueType::SDMA, (100, 0), (ring, RING));
        assert_eq!(made, Status::SUCCESS);
        Writer { resource, ring, target, written: 0, last: 0 }
    }

    /// Puts a FENCE packet into the ring and rings.
    fn ring(&mut self) {
        self.put();
        long(self.resource.queue_door_bell).store(self.written, Ordering::Release);
    }

    /// The same without the ring.
    fn put(&mut self) {
        self.last += 1;
        let packet = [5, self.target as u32, (self.target >> 32) as u32, self.last];
        for (index, value) in (0u64..).zip(packet) {
            word(self.ring + self.written % RING + 4 * index).store(value, Ordering::Relaxed);
        }
        self.written += 16;
        long(self.resource.queue_wptr_value).store(self.written, Ordering::Release);
    }

    fn wait(&self) {
        let begin = Instant::now();
        while word(self.target).load(Ordering::Acquire) != self.last {
            assert!(begin.elapsed() < PATIENCE, "{} was not written", self.last);
            std::thread::yield_now();
        }
    }

    fn end(self) {
        assert_eq!(destroy(self.resource.queue_id), Status::SUCCESS);
        free(self.ring, RING);
        free(self.target, 4096);
    }
}

/// Opens and gives the first node with a GPU.
fn opened() -> u32 {
    assert_eq!(ask!(open::hsaKmtOpenKFD), Status::SUCCESS);
    let mut system = HsaSystemProperties::default();
    assert_eq!(ask!(topology::hsaKmtAcquireSystemProperties, out(&mut system)), Status::SUCCESS);
    let is_gpu = |node: &u32| {
        let mut properties = HsaNodeProperties356::default();
        let asked = ask!(topology::hsaKmtGetNodeProperties, *node, out(&mut properties));
        assert_eq!(asked, Status::SUCCESS);
        let units = properties.num_f_compute_cores;
        units > 0
    };
    (0..system.num_nodes).find(is_gpu).unwrap()
}

/// One test, since the library's state is the process's.
#[test]
fn queues_through_loopback() {
    let Some(daemon) = Daemon::start() else { return };
    // SAFETY: no other thread of this process reads variables.
    unsafe { std::env::set_var(LOOPBACK_VARIABLE, daemon.socket()) };
    let gpu = opened();
    let mut writer = Writer::new(gpu);
    for _ in 0..300 {
        writer.ring();
        writer.wait();
    }
    for _ in 0..5 {
        std::thread::sleep(IDLE);
        for _ in 0..3 {
            writer.ring();
        }
        writer.wait();
    }
    locked_memory(&mut writer);
    no_more_mappings(&mut writer);
    children_cannot_ring(&mut writer);
    threads_ring_after_a_pause(gpu);
    arguments(gpu);
    doorbells_are_distinct(gpu);
    compute_queues(gpu);
    writer.ring();
    writer.wait();
    // The queue is left to the close.
    assert_eq!(ask!(open::hsaKmtCloseKFD), Status::SUCCESS);
    let gpu = opened();
    let mut writer = Writer::new(gpu);
    writer.ring();
    writer.wait();
    writer.end();
    assert_eq!(ask!(open::hsaKmtCloseKFD), Status::SUCCESS);
}

/// A process that has all its memory locked, which the kernel then makes at once.
fn locked_memory(writer: &mut Writer) {
    // SAFETY: no pointer.
    if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
        println!("SKIP: mlockall: {}", std::io::Error::last_os_error());
        return;
    }
    for _ in 0..2 {
        std::thread::sleep(IDLE);
        writer.ring();
        writer.wait();
    }
    // SAFETY: no pointer.
    assert_eq!(unsafe { libc::munlockall() }, 0);
}

/// A process that has as many mappings as it may have, which can have none moved (`mremap_to`).
fn no_more_mappings(writer: &mut Writer) {
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let most: usize = most.trim().parse().unwrap();
    if most > 1 << 18 {
        println!("SKIP: {most} mappings would take the kernel's memory (vm.max_map_count)");
        return;
    }
    let (go, rung) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    writer.put();
    let (doorbell, value) = (writer.resource.queue_door_bell, writer.written);
    let (started, done) = (Arc::clone(&go), Arc::clone(&rung));
    let ringer = std::thread::spawn(move || {
        while !started.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        long(doorbell).store(value, Ordering::Release);
        done.store(true, Ordering::Release);
    });
    std::thread::sleep(IDLE);
    let map = |size: usize, flags| {
        let flags = flags | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: addresses that the kernel chooses.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_NONE, flags, -1, 0) };
        (place != libc::MAP_FAILED).then_some((place, size))
    };
    let area = map(most * 2 * 4096, libc::MAP_PRIVATE).unwrap();
    let mut mapped = Vec::with_capacity(64);
    for page in 0..most {
        let place = area.0.wrapping_byte_add(page * 2 * 4096);
        // SAFETY: a page of the area, where nothing is.
        if unsafe { libc::mprotect(place, 4096, libc::PROT_READ) } != 0 {
            break;
        }
    }
    // What is left.
    mapped.extend(std::iter::from_fn(|| map(4096, libc::MAP_SHARED)).take(64));
    let full = mapped.len() < 64;
    go.store(true, Ordering::Release);
    let begin = Instant::now();
    while !rung.load(Ordering::Acquire) && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    let in_time = rung.load(Ordering::Acquire);
    for (place, size) in mapped.into_iter().chain([area]) {
        // SAFETY: what was mapped above.
        assert_eq!(unsafe { libc::munmap(place, size) }, 0);
    }
    assert!(full, "there is room for more");
    assert!(in_time, "the store waits");
    ringer.join().unwrap();
    writer.wait();
}

fn children_cannot_ring(writer: &mut Writer) {
    for pause in [Duration::ZERO, IDLE] {
        std::thread::sleep(pause);
        // SAFETY: the child makes one store, then leaves with _exit.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            long(writer.resource.queue_door_bell).store(writer.written + 16, Ordering::Release);
            // SAFETY: _exit runs nothing of the parent's.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: the pointer is to a local.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(waited, pid);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
        writer.ring();
        writer.wait();
    }
}

fn threads_ring_after_a_pause(gpu: u32) {
    let mut writers: Vec<Writer> = (0..6).map(|_| Writer::new(gpu)).collect();
    for _ in 0..3 {
        std::thread::sleep(IDLE);
        std::thread::scope(|scope| {
            for writer in &mut writers {
                scope.spawn(|| {
                    for _ in 0..20 {
                        writer.ring();
                        writer.wait();
                    }
                });
            }
        });
    }
    writers.into_iter().for_each(Writer::end);
}

fn arguments(gpu: u32) {
    let ring = mapped(RING);
    let sdma = HsaQueueType::SDMA;
    for (node, kind, share, priority, size, expected) in [
        (gpu, sdma, 101, 0, RING, Status::INVALID_PARAMETER),
        (gpu, sdma, 100, 4, RING, Status::INVALID_PARAMETER),
        (gpu, sdma, 100, -4, RING, Status::INVALID_PARAMETER),
        (gpu, sdma, 100, 0, RING - 1, Status::INVALID_PARAMETER),
        (gpu, sdma, 100, 0, 1 << 33, Status::INVALID_PARAMETER),
        (gpu, HsaQueueType::MULTIMEDIA_DECODE, 100, 0, RING, Status::INVALID_PARAMETER),
        (99, sdma, 100, 0, RING, Status::INVALID_NODE_UNIT),
        (0, sdma, 100, 0, RING, Status::INVALID_NODE_UNIT),
    ] {
        let (status, resource) = create(node, kind, (share, priority), (ring, size));
        assert_eq!(status, expected, "{node} {kind:?} {share} {priority} {size:#x}");
        assert_eq!(resource, HsaQueueResource::default());
    }
    for id in [0, u64::MAX, ring] {
        assert_eq!(destroy(id), Status::INVALID_PARAMETER);
        let mut info = HsaQueueInfo::default();
        assert_eq!(ask!(queue::hsaKmtGetQueueInfo, id, out(&mut info)), Status::INVALID_PARAMETER);
    }
    assert_eq!(ask!(queue::hsaKmtGetQueueInfo, 0, null()), Status::INVALID_PARAMETER);
    let no_mask = In::from(std::ptr::null());
    assert_eq!(ask!(queue::hsaKmtSetQueueCUMask, 1, 32, no_mask), Status::INVALID_PARAMETER);
    free(ring, RING);
}

fn doorbells_are_distinct(gpu: u32) {
    let ring = mapped(RING);
    let made: Vec<HsaQueueResource> = (0..32)
        .map(|_| {
            let (made, resource) = create(gpu, HsaQueueType::COMPUTE, (100, 0), (ring, RING));
            assert_eq!(made, Status::SUCCESS);
            resource
        })
        .collect();
    let doorbells: BTreeSet<u64> = made.iter().map(|resource| resource.queue_door_bell).collect();
    assert_eq!(doorbells.len(), 32);
    let (first, last) = (*doorbells.first().unwrap(), *doorbells.last().unwrap());
    assert!(last - first < SLICE);
    assert!(doorbells.iter().all(|doorbell| doorbell.is_multiple_of(8)));
    for resource in &made {
        assert_eq!(destroy(resource.queue_id), Status::SUCCESS);
        assert_eq!(destroy(resource.queue_id), Status::INVALID_PARAMETER);
    }
    free(ring, RING);
}

fn compute_queues(gpu: u32) {
    let (ring, pointers) = (mapped(RING), mapped(4096));
    let mut resource = HsaQueueResource {
        queue_wptr_value: pointers,
        queue_rptr_value: pointers + 128,
        ..Default::default()
    };
    let (kind, place) = (HsaQueueType::COMPUTE_AQL, pointer(ring));
    let priority = HsaQueuePriority::MAXIMUM;
    let made =
        ask!(queue::hsaKmtCreateQueue, gpu, kind, 100, priority, place, RING, null(), out(&mut resource));
    assert_eq!(made, Status::SUCCESS);
    assert_eq!(({ resource.queue_wptr_value }, { resource.queue_rptr_value }), (pointers, pointers + 128));
    let update = |share, place| {
        ask!(queue::hsaKmtUpdateQueue, resource.queue_id, share, priority, place, RING, null())
    };
    assert_eq!(update(0, pointer(0)), Status::SUCCESS);
    assert_eq!(update(50, pointer(ring)), Status::SUCCESS);
    assert_eq!(update(101, pointer(ring)), Status::ERROR);
    assert_eq!(destroy(resource.queue_id), Status::SUCCESS);
    free(pointers, 4096);
    free(ring, RING);
}
