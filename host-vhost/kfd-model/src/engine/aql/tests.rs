//! Packets are laid out here by hand, from `hsa.h` and `hsa_ext_amd.h`; signals and queues from `amd_hsa_signal.h` and
//! `amd_hsa_queue.h`.

use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::*;
use crate::engine::dispatch::Dispatcher;
use crate::engine::fake::{FakeGpu, FakeMemory};
use crate::engine::{DispatchFailure, EmptyKernels, Interrupt};

const RING: u64 = 0x10_0000;
const SLOTS: u64 = 64;
/// An `amd_queue_t`.
const QUEUE: u64 = 0x20_0000;
const WRITE_INDEX: u64 = QUEUE + 56;
const READ_INDEX: u64 = QUEUE + 128;
const INACTIVE: u64 = 0x21_0000;
const MAILBOXES: u64 = 0x22_0000;
const DATA: u64 = 0x7f00_0000_0000;

struct Fixture {
    gpu: FakeGpu,
    queue: AqlQueue,
}

impl Fixture {
    fn new() -> Self {
        let memory = FakeMemory::new(RING, SLOTS * 64)
            .with(QUEUE, 0x1000, true)
            .with(INACTIVE, 0x1000, true)
            .with(MAILBOXES, 0x8000, true)
            .with(DATA, 0x1_0000, true);
        for slot in 0..SLOTS {
            memory.put(RING + slot * 64, &[1]);
        }
        memory.put(READ_INDEX + 8, &[128]);
        let fixture = Self {
            queue: AqlQueue::new(
                QueueAddresses {
                    ring: RING,
                    ring_size: SLOTS as u32 * 64,
                    read_pointer: READ_INDEX,
                    write_pointer: WRITE_INDEX,
                },
                1,
            ),
            gpu: FakeGpu::new(memory),
        };
        fixture.store(QUEUE + 192, INACTIVE);
        fixture.signal(INACTIVE, 0, 9);
        fixture
    }

    fn store(&self, va: u64, value: u64) {
        self.gpu.memory().store64(va, value).unwrap();
    }

    fn load(&self, va: u64) -> u64 {
        self.gpu.memory().load64(va).unwrap()
    }

    /// Makes a signal whose waiters sleep on event `event`; 0 for none.
    fn signal(&self, handle: u64, value: u64, event: u32) {
        self.store(handle, 1);
        self.store(handle + 8, value);
        self.store(handle + 16, if event == 0 { 0 } else { MAILBOXES + u64::from(event) * 8 });
        self.gpu.memory.put(handle + 24, &[event]);
        self.store(MAILBOXES + u64::from(event) * 8, u64::MAX);
    }

    fn reserve(&self, count: u64) -> u64 {
        self.gpu
            .memory()
            .update64(WRITE_INDEX, &mut |index| index.fetch_add(count, Ordering::AcqRel))
            .unwrap()
    }

    /// Writes a packet and then its header.
    fn publish(&self, index: u64, packet: Packet) {
        let va = RING + index % SLOTS * 64;
        self.gpu.memory.put(va + 4, &packet.0[1..]);
        self.gpu.memory().store32(va, packet.0[0]).unwrap();
    }

    fn submit(&self, packet: Packet) -> u64 {
        let index = self.reserve(1);
        self.publish(index, packet);
        index
    }

    fn run(&mut self) -> Step {
        self.gpu.run(&mut self.queue, 0)
    }

    fn header(&self, index: u64) -> u32 {
        self.gpu.memory().load32(RING + index % SLOTS * 64).unwrap()
    }
}

#[derive(Clone, Copy)]
struct Packet([u32; 16]);

impl Packet {
    fn new(kind: u32) -> Self {
        let mut words = [0; 16];
        words[0] = kind | 1 << 8 | 2 << 9 | 2 << 11;
        Self(words)
    }

    /// 64 bits at a byte offset.
    fn with(mut self, offset: usize, value: u64) -> Self {
        self.0[offset / 4] = value as u32;
        self.0[offset / 4 + 1] = (value >> 32) as u32;
        self
    }

    fn format(mut self, format: u32) -> Self {
        self.0[0] |= format << 16;
        self
    }

    fn completes(self, signal: u64) -> Self {
        self.with(56, signal)
    }
}

fn barrier(kind: u32, dependencies: &[u64]) -> Packet {
    let mut packet = Packet::new(kind);
    for (index, signal) in dependencies.iter().enumerate() {
        packet = packet.with(8 + 8 * index, *signal);
    }
    packet
}

fn dispatch(kernel_object: u64) -> Packet {
    let mut packet = Packet::new(2).with(32, kernel_object);
    packet.0[1] = 64 | 1 << 16;
    packet.0[2] = 1;
    packet
}

#[test]
fn a_packet_completes_its_signal() {
    let mut queue = Fixture::new();
    queue.signal(DATA, 3, 5);
    queue.submit(barrier(3, &[]).completes(DATA));
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.load(DATA + 8), 2);
    let (start, end) = (queue.load(DATA + 32), queue.load(DATA + 40));
    assert_eq!((start, end), (1, 2), "the clock when it began and when it ended");
    assert_eq!(queue.load(MAILBOXES + 40), 5);
    assert_eq!(*queue.gpu.world.interrupts.lock().unwrap(), [Interrupt::EndOfPipe(5)]);
    assert_eq!(queue.load(READ_INDEX), 1);
    assert_eq!(queue.header(0) & 0xffff, 1, "the slot is invalid again");
}

#[test]
fn packets_run_in_order_whatever_the_order_of_their_publication() {
    let mut queue = Fixture::new();
    queue.signal(DATA, 0, 0);
    let first = queue.reserve(3);
    let packet = barrier(3, &[]).completes(DATA);
    queue.publish(first + 2, packet);
    assert_eq!(queue.run(), Step::Waiting { va: RING });
    queue.publish(first, packet);
    assert_eq!(queue.run(), Step::Waiting { va: RING + 64 });
    assert_eq!(queue.load(READ_INDEX), 1);
    queue.publish(first + 1, packet);
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.load(READ_INDEX), 3);
    assert_eq!(queue.load(DATA + 8) as i64, -3);
}

#[test]
fn the_ring_goes_round_without_losing_a_packet() {
    let mut queue = Fixture::new();
    queue.signal(DATA, 10 * SLOTS + 7, 0);
    for _ in 0..10 * SLOTS + 7 {
        queue.submit(barrier(3, &[]).completes(DATA));
        assert_eq!(queue.run(), Step::Idle);
    }
    assert_eq!(queue.load(DATA + 8), 0);
    assert_eq!(queue.queue.read_index(), 10 * SLOTS + 7);
}

#[test]
fn barrier_and_waits_for_all_five_but_for_each_only_once() {
    let mut queue = Fixture::new();
    let signals = [DATA, DATA + 64, DATA + 128, DATA + 192, DATA + 256];
    for signal in signals {
        queue.signal(signal, 1, 0);
    }
    queue.submit(barrier(3, &signals));
    queue.submit(barrier(3, &[]));
    assert_eq!(queue.run(), Step::Waiting { va: DATA + 8 });
    for signal in signals {
        assert!(matches!(queue.run(), Step::Waiting { .. }));
        assert_eq!(queue.load(READ_INDEX), 0);
        queue.store(signal + 8, 0);
        queue.run();
        // It was seen; that it is used again does not matter.
        queue.store(signal + 8, 1);
    }
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.load(READ_INDEX), 2);
}

#[test]
fn barrier_and_ignores_null_and_negative_is_not_zero() {
    let mut queue = Fixture::new();
    queue.signal(DATA, 0, 0);
    queue.signal(DATA + 64, u64::MAX, 0);
    queue.submit(barrier(3, &[DATA, 0, DATA, 0, 0]));
    assert_eq!(queue.run(), Step::Idle);
    queue.submit(barrier(3, &[0, DATA + 64]));
    assert_eq!(queue.run(), Step::Waiting { va: DATA + 72 });
}

#[test]
fn barrier_or_waits_for_any() {
    let mut queue = Fixture::new();
    let signals = [DATA, 0, DATA + 64, DATA + 128, DATA + 192];
    for signal in [DATA, DATA + 64, DATA + 128, DATA + 192] {
        queue.signal(signal, 1, 0);
    }
    queue.submit(barrier(5, &signals));
    assert_eq!(queue.run(), Step::Waiting { va: DATA + 8 });
    queue.store(DATA + 192 + 8, 0);
    assert_eq!(queue.run(), Step::Idle);
    // Nothing to wait for.
    queue.submit(barrier(5, &[]));
    assert_eq!(queue.run(), Step::Idle);
}

#[test]
fn barrier_value_compares_the_masked_value() {
    // (value, mask, reference, condition, satisfied), conditions in the order of hsa_signal_condition_t: EQ,
    // NE, LT, GTE.
    for (value, mask, reference, condition, satisfied) in [
        (0x15u64, 0xf, 5, 0, true),
        (0x15, 0xff, 5, 0, false),
        (4, u64::MAX, 5, 1, true),
        (5, u64::MAX, 5, 1, false),
        (u64::MAX, u64::MAX, 0, 2, true),
        (0, u64::MAX, 0, 2, false),
        (0, u64::MAX, u64::MAX, 3, true),
        (u64::MAX, u64::MAX, 0, 3, false),
    ] {
        let mut queue = Fixture::new();
        queue.signal(DATA, value, 0);
        let mut packet = Packet::new(0).format(2).with(8, DATA).with(16, reference).with(24, mask);
        packet.0[8] = condition;
        queue.submit(packet);
        let expected = if satisfied { Step::Idle } else { Step::Waiting { va: DATA + 8 } };
        assert_eq!(queue.run(), expected, "{value:#x} & {mask:#x}, condition {condition}");
    }
    let mut queue = Fixture::new();
    queue.submit(Packet::new(0).format(2).with(16, 1));
    assert_eq!(queue.run(), Step::Idle, "a null signal is satisfied");
}

#[test]
fn a_vendor_packet_jumps_to_pm4() {
    let mut queue = Fixture::new();
    queue.signal(DATA, 1, 0);
    let buffer = DATA + 0x1000;
    let target = DATA + 0x2000;
    let words = [
        // ACQUIRE_MEM, as ROCr invalidates the instruction cache.
        0xc005_5800,
        0x2880_0000,
        u32::MAX,
        0,
        0,
        0,
        0,
        // WAIT_REG_MEM: equal, memory.
        0xc005_3c00,
        0x13,
        target as u32,
        (target >> 32) as u32,
        1,
        u32::MAX,
        4,
    ];
    queue.gpu.memory.put(buffer, &words);
    let mut packet = Packet::new(0).format(1).completes(DATA);
    packet.0[1..6].copy_from_slice(&[
        0xc002_3f00,
        buffer as u32,
        (buffer >> 32) as u32,
        words.len() as u32 | 1 << 23,
        10,
    ]);
    queue.submit(packet);
    queue.submit(barrier(3, &[]));
    assert_eq!(queue.run(), Step::Waiting { va: target });
    assert_eq!((queue.load(DATA + 8), queue.load(READ_INDEX)), (1, 0));
    queue.gpu.memory.put(target, &[1]);
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!((queue.load(DATA + 8), queue.load(READ_INDEX)), (0, 2));
}

/// Runs until failure: the code in queue_inactive_signal, its event, and the failure.
fn failure_of(packet: Packet) -> (u64, Failure) {
    let mut queue = Fixture::new();
    queue.signal(DATA, 1, 0);
    queue.submit(packet.completes(DATA));
    queue.submit(barrier(3, &[]));
    let Step::Failed(failure) = queue.run() else { panic!("it did not fail") };
    assert_eq!(queue.load(DATA + 8), 1, "the signal is left alone");
    assert_eq!(queue.load(READ_INDEX), 0, "the queue stands");
    assert_eq!(queue.run(), Step::Failed(failure.clone()));
    assert_eq!(*queue.gpu.world.failures.lock().unwrap(), std::slice::from_ref(&failure));
    let code = queue.load(INACTIVE + 8);
    let expected: &[_] = if code == 0 { &[] } else { &[Interrupt::EndOfPipe(9)] };
    assert_eq!(queue.gpu.world.interrupts.lock().unwrap()[..], *expected);
    (code, failure)
}

#[test]
fn bad_packets_stop_the_queue_with_the_codes_that_rocr_reads() {
    // AqlQueue::DynamicQueueEventsHandler: 32 and 256 are INVALID_PACKET_FORMAT, 8 is INVALID_CODE_OBJECT,
    // 0x40000000 is ILLEGAL_INSTRUCTION, 0x20000000 is MEMORY_APERTURE_VIOLATION.
    let (code, failure) = failure_of(Packet::new(4));
    assert_eq!((code, failure.exception_code()), (32, Some(20)));
    assert_eq!(failure, Failure::PacketType { index: 0, kind: 4 });
    for reserved in [6, 7, 0xff] {
        assert_eq!(failure_of(Packet::new(reserved)).0, 32);
    }
    let (code, failure) = failure_of(Packet::new(0).format(3));
    assert_eq!((code, failure.exception_code()), (256, Some(23)));
    assert_eq!(failure_of(Packet::new(0)).0, 256);
    // A jump that is none.
    assert_eq!(failure_of(Packet::new(0).format(1)).0, 256);
    assert_eq!(failure_of(barrier(3, &[DATA + 4])).0, 0x2000_0000);
    let (code, failure) = failure_of(dispatch(0));
    assert_eq!((code, failure), (8, DispatchFailure::Code { kernel_object: 0 }.into()));
}

#[test]
fn a_fault_is_the_drivers_to_report() {
    let (code, failure) = failure_of(barrier(3, &[0x5000]));
    assert_eq!((code, failure.exception_code()), (0, None));
    assert_eq!(failure.fault().unwrap().va, 0x5008);
}

#[test]
fn a_queue_without_a_runtime_has_no_signal_to_tell() {
    let mut queue = Fixture::new();
    queue.gpu.memory.put(READ_INDEX + 8, &[3]);
    queue.submit(Packet::new(4));
    assert!(matches!(queue.run(), Step::Failed(_)));
    assert_eq!(queue.load(INACTIVE + 8), 0);
}

#[test]
fn an_empty_kernel_runs_and_another_says_what_is_missing() {
    let mut queue = Fixture::new();
    queue.signal(DATA, 2, 0);
    let (object, code) = (DATA + 0x100, DATA + 0x1000);
    // A kernel descriptor: its code lies 0xf00 further on.
    queue.store(object + 16, 0xf00);
    queue.gpu.memory.put(code, &[0xbf81_0000]);
    queue.submit(dispatch(object).completes(DATA));
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.load(DATA + 8), 1);
    // v_mov_b32 v0, 0
    queue.gpu.memory.put(code, &[0x7e00_0280]);
    queue.submit(dispatch(object).completes(DATA));
    let Step::Failed(failure) = queue.run() else { panic!("it did not fail") };
    assert_eq!(failure, DispatchFailure::NotSupported { pc: code, instruction: 0x7e00_0280 }.into());
    assert!(failure.to_string().contains("not supported yet"), "{failure}");
    assert_eq!(queue.load(INACTIVE + 8), 0x4000_0000);
    assert_eq!(queue.load(DATA + 8), 1);
}

/// Wants scratch memory until `compute_tmpring_size` says that there is some.
struct Scratch;

impl Dispatcher for Scratch {
    fn dispatch(&self, dispatch: &Dispatch<'_>, context: &Context<'_>) -> Result<Dispatched, Failure> {
        let Dispatch::Aql(aql) = dispatch else { panic!("not from an AQL ring") };
        assert_eq!((aql.packet_address, aql.amd_queue), (RING, Some(QUEUE)));
        let size = context.memory.load32(QUEUE + 140)?;
        Ok(if size == 0 { Dispatched::InsufficientScratch { wave32: true } } else { Dispatched::Done })
    }
}

#[test]
fn a_kernel_waits_until_the_runtime_gave_it_scratch_memory() {
    let mut queue = Fixture::new();
    queue.gpu.dispatcher = Box::new(Scratch);
    queue.signal(DATA, 1, 0);
    queue.submit(dispatch(DATA + 0x100).completes(DATA));
    assert_eq!(queue.run(), Step::Waiting { va: INACTIVE + 8 });
    assert_eq!(queue.load(INACTIVE + 8), 0x400);
    assert_eq!(*queue.gpu.world.interrupts.lock().unwrap(), [Interrupt::EndOfPipe(9)]);
    queue.gpu.memory.put(QUEUE + 140, &[1]);
    assert_eq!(queue.run(), Step::Waiting { va: INACTIVE + 8 });
    queue.store(INACTIVE + 8, 0);
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.load(DATA + 8), 0);
}

// ROCr's DynamicQueueEventsHandler: 512 has it take the scratch memory back, and it stores 0 then.
#[test]
fn scratch_memory_for_one_dispatch_is_given_back_before_the_next_packet() {
    let mut queue = Fixture::new();
    queue.gpu.dispatcher = Box::new(Scratch);
    queue.signal(DATA, 1, 0);
    queue.signal(DATA + 0x40, 1, 0);
    queue.gpu.memory.put(QUEUE + 140, &[1]);
    queue.gpu.memory.put(QUEUE + 180, &[1 << 4]);
    queue.submit(dispatch(DATA + 0x100).with(24, 4096).completes(DATA));
    queue.submit(barrier(3, &[]).completes(DATA + 0x40));
    assert_eq!(queue.run(), Step::Waiting { va: INACTIVE + 8 });
    assert_eq!(queue.load(INACTIVE + 8), 512);
    assert_eq!((queue.load(DATA + 8), queue.load(DATA + 0x48)), (0, 1));
    queue.store(INACTIVE + 8, 0);
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.load(DATA + 0x48), 0);
}

#[test]
fn the_first_instruction_of_a_kernel_depends_on_the_generation() {
    // llvm-mc: s_endpgm is bf810000 up to gfx1030 and bfb00000 on gfx1100.
    for (major, word, ends) in [
        (9, 0xbf81_0000u32, true),
        (10, 0xbf81_0000, true),
        (11, 0xbfb0_0000, true),
        (11, 0xbf81_0000, false),
    ] {
        let mut queue = Fixture::new();
        queue.gpu.dispatcher = Box::new(EmptyKernels::for_gfx(major));
        queue.store(DATA + 0x110, 0x100);
        queue.gpu.memory.put(DATA + 0x200, &[word]);
        queue.submit(dispatch(DATA + 0x100));
        assert_eq!(queue.run() == Step::Idle, ends, "gfx{major} {word:x}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is in the ring, the queue ends waiting, idle or failed, and the read index never passes the
    /// write index.
    #[test]
    fn garbage_ends(
        packets in proptest::collection::vec((0u32..8, 0u32..4, any::<[u32; 16]>()), 1..40),
        near in any::<bool>(),
    ) {
        let mut queue = Fixture::new();
        for (kind, format, body) in &packets {
            let mut packet = *body;
            packet[0] = kind | format << 16;
            if near {
                for (index, word) in packet.iter_mut().enumerate().skip(1) {
                    *word = if index % 2 == 0 { *word & 0xfff8 } else { 0x7f00 };
                }
            }
            queue.submit(Packet(packet));
        }
        match queue.run() {
            Step::Failed(_) => prop_assert_eq!(queue.gpu.world.failures.lock().unwrap().len(), 1),
            Step::Idle | Step::Waiting { .. } => {}
            Step::Progressed => prop_assert!(false),
        }
        prop_assert!(queue.queue.read_index() <= packets.len() as u64);
    }
}
