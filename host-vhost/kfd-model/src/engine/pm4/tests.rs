//! Packets are spelled as words here, from the bit positions in `soc15d.h` and `amd_gpu_pm4.h` and from
//! kfdtest's packets, not by the code under test.

use proptest::prelude::*;

use super::*;
use crate::engine::dispatch::{Dispatch, Dispatched, Dispatcher};
use crate::engine::fake::{FakeGpu, FakeMemory, seen_at_interrupts};
use crate::engine::{DispatchFailure, Interrupt, Memory};

const RING: u64 = 0x10_0000;
const RING_SIZE: u32 = 0x1000;
const POINTERS: u64 = 0x20_0000;
const DATA: u64 = 0x7f00_0000_0000;
const DATA_SIZE: u64 = 0x1_0000;

/// Name for `PACKET3` with a body of so many words, for the compute engine as kfdtest has it.
fn packet(opcode: u32, body: &[u32]) -> Vec<u32> {
    let mut words = vec![3 << 30 | (body.len() as u32 - 1) << 16 | opcode << 8 | 1 << 1];
    words.extend(body);
    words
}

fn lo(va: u64) -> u32 {
    va as u32
}

fn hi(va: u64) -> u32 {
    (va >> 32) as u32
}

fn write_data(va: u64, values: &[u32]) -> Vec<u32> {
    // Memory, confirmed.
    let mut body = vec![5 << 8 | 1 << 20, lo(va), hi(va)];
    body.extend(values);
    packet(0x37, &body)
}

fn indirect_buffer(va: u64, words: u32) -> Vec<u32> {
    packet(0x3f, &[lo(va), hi(va), words | 1 << 23])
}

fn wait_equal(va: u64, reference: u32) -> Vec<u32> {
    packet(0x3c, &[3 | 1 << 4, lo(va), hi(va), reference, u32::MAX, 4])
}

struct Fixture {
    gpu: FakeGpu,
    queue: Pm4Queue,
    /// Words.
    write: u64,
}

impl Fixture {
    fn new() -> Self {
        Self::with_xccs(1)
    }

    fn with_xccs(xccs: u32) -> Self {
        let memory = FakeMemory::new(RING, u64::from(RING_SIZE))
            .with(POINTERS, 0x1000, true)
            .with(DATA, DATA_SIZE, true);
        let addresses = QueueAddresses {
            ring: RING,
            ring_size: RING_SIZE,
            read_pointer: POINTERS,
            write_pointer: POINTERS + 8,
        };
        Self { gpu: FakeGpu::new(memory), queue: Pm4Queue::new(addresses, xccs), write: 0 }
    }

    fn put(&mut self, words: &[u32]) {
        for word in words {
            self.gpu.memory.put(RING + self.write * 4 % u64::from(RING_SIZE), &[*word]);
            self.write += 1;
        }
    }

    fn run(&mut self) -> Step {
        self.gpu.run(&mut self.queue, self.write)
    }

    fn consume(&mut self, words: &[u32]) {
        self.put(words);
        assert_eq!(self.run(), Step::Idle);
        assert_eq!(u64::from(self.reported()), self.write % u64::from(RING_SIZE / 4));
    }

    fn fail(&mut self, words: &[u32]) -> Failure {
        self.put(words);
        match self.run() {
            Step::Failed(failure) => failure,
            other => panic!("{other:?} for {words:x?}"),
        }
    }

    fn reported(&self) -> u32 {
        self.gpu.memory().load32(POINTERS).unwrap()
    }

    fn word(&self, va: u64) -> u32 {
        self.gpu.memory().load32(va).unwrap()
    }

    fn wide(&self, va: u64) -> u64 {
        self.gpu.memory().load64(va).unwrap()
    }
}

#[test]
fn a_write_of_kfdtest() {
    let mut queue = Fixture::new();
    queue.consume(&write_data(DATA + 4, &[1, 2, 3]));
    assert_eq!([0, 4, 8, 12, 16].map(|at| queue.word(DATA + at)), [0, 1, 2, 3, 0]);
    // Bit 16: all to one address.
    queue.consume(&packet(0x37, &[2 << 8 | 1 << 16, lo(DATA), hi(DATA), 7, 8]));
    assert_eq!([0, 4].map(|at| queue.word(DATA + at)), [8, 1]);
    let failure = queue.fail(&packet(0x37, &[0, 0x207, 0, 7]));
    assert!(matches!(failure, Failure::Malformed { .. }), "a register: {failure}");
}

#[test]
fn fillers_of_all_kinds() {
    let mut queue = Fixture::new();
    // Type 2; kfdtest's CMD_NOP_TYPE_3, which is one word; a NOP with a body.
    queue.consume(&[0x8000_0000, 0xffff_1002, 0xffff_1002]);
    queue.consume(&packet(0x10, &[0xdead_beef, 0xffff_ffff, 0]));
    assert_eq!(queue.reported(), 7);
    assert_eq!(queue.fail(&[0]), Failure::Opcode { engine: "PM4", va: RING + 28, header: 0 });
    let failure = Fixture::new().fail(&[1 << 30]);
    assert_eq!(failure, Failure::Opcode { engine: "PM4", va: RING, header: 1 << 30 });
}

#[test]
fn the_read_pointer_wraps_at_the_ring() {
    let mut queue = Fixture::new();
    for round in 0..3000u32 {
        queue.consume(&write_data(DATA, &[round]));
        assert_eq!(queue.word(DATA), round);
    }
    assert_eq!(u64::from(queue.reported()), 3000 * 5 % 1024);
}

#[test]
fn a_release_writes_and_interrupts() {
    let mut queue = Fixture::new();
    let release = |select: u32, data: u64, context: u32| {
        packet(0x49, &[0x14 | 5 << 8, select, lo(DATA), hi(DATA), lo(data), hi(data), context])
    };
    // kfdtest: 64 bits of data and the event's id, interrupt after write confirm.
    queue.consume(&release(2 << 29 | 2 << 24, 0x12, 0x12));
    assert_eq!(queue.wide(DATA), 0x12);
    // 32 bits, no interrupt.
    queue.consume(&release(1 << 29 | 3 << 24, u64::MAX, 0x13));
    assert_eq!(queue.wide(DATA), 0xffff_ffff);
    // The clock.
    queue.consume(&release(3 << 29 | 3 << 24, 0, 0));
    assert_eq!(queue.wide(DATA), 1);
    // Interrupt only; and without a context id, as on gfx8.
    queue.consume(&release(1 << 24, 0, 0x14));
    queue.consume(&packet(0x49, &[0x14, 1 << 24, 0, 0, 0, 0]));
    let ids = [0x12, 0x14, 0].map(Interrupt::EndOfPipe);
    assert_eq!(*queue.gpu.world.interrupts.lock().unwrap(), ids);
    assert!(matches!(queue.fail(&release(5 << 29, 0, 0)), Failure::Malformed { .. }));
}

#[test]
fn the_read_pointer_is_past_a_release_before_anybody_hears_of_it() {
    // kfdtest places its next packet as soon as it was woken, and wants room for it.
    let mut fixture = Fixture::new();
    fixture.put(&packet(0x49, &[0x14, 1 << 24, 0, 0, 0, 0, 1]));
    let Fixture { gpu, mut queue, write } = fixture;
    assert_eq!(seen_at_interrupts(&gpu, &mut queue, write, POINTERS), [8]);
}

#[test]
fn a_wait_holds_everything_behind_it() {
    let mut queue = Fixture::new();
    queue.put(&wait_equal(DATA + 8, 5));
    queue.put(&write_data(DATA, &[1]));
    assert_eq!(queue.run(), Step::Waiting { va: DATA + 8 });
    assert_eq!((queue.word(DATA), queue.reported()), (0, 0));
    queue.gpu.memory.put(DATA + 8, &[5]);
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!((queue.word(DATA), queue.reported()), (1, 12));
    // Masked, with another comparison: (5 & 4) >= 4.
    queue.consume(&packet(0x3c, &[5 | 1 << 4, lo(DATA + 8), hi(DATA), 4, 4, 0]));
    let failure = queue.fail(&packet(0x3c, &[3, 0x2000, 0, 0, 0, 0]));
    assert!(matches!(failure, Failure::Malformed { .. }), "a register: {failure}");
}

#[test]
fn indirect_buffers_nest_twice_and_count_as_one_packet() {
    let mut queue = Fixture::new();
    let (first, second) = (DATA + 0x1000, DATA + 0x2000);
    let mut outer = indirect_buffer(second, 10);
    outer.extend(write_data(DATA + 12, &[3]));
    queue.gpu.memory.put(first, &outer);
    let mut inner = write_data(DATA + 4, &[1]);
    inner.extend(write_data(DATA + 8, &[2]));
    queue.gpu.memory.put(second, &inner);
    queue.put(&indirect_buffer(first, 9));
    queue.put(&write_data(DATA + 16, &[4]));
    let context = queue.gpu.context();
    // The call, the inner call, its first write: nothing is consumed yet.
    for _ in 0..3 {
        assert_eq!(queue.queue.step(&context, queue.write), Step::Progressed);
    }
    assert_eq!((queue.word(DATA + 4), queue.word(DATA + 8), queue.reported()), (1, 0, 0));
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!([4, 8, 12, 16].map(|at| queue.word(DATA + at)), [1, 2, 3, 4]);
    assert_eq!(queue.reported(), 9);
}

#[test]
fn a_third_level_and_endless_chains_are_failures() {
    let mut queue = Fixture::new();
    let buffer = DATA + 0x1000;
    // Calls itself.
    queue.gpu.memory.put(buffer, &indirect_buffer(buffer, 4));
    assert_eq!(queue.fail(&indirect_buffer(buffer, 4)), Failure::IndirectBuffers { va: buffer });
    // Chains to itself.
    let mut queue = Fixture::new();
    queue.gpu.memory.put(buffer, &packet(0x3f, &[lo(buffer), hi(buffer), 4 | 1 << 20 | 1 << 23]));
    assert_eq!(queue.fail(&indirect_buffer(buffer, 4)), Failure::IndirectBuffers { va: buffer });
}

#[test]
fn a_chain_replaces_the_buffer() {
    let mut queue = Fixture::new();
    let (first, second) = (DATA + 0x1000, DATA + 0x2000);
    let mut words = write_data(DATA, &[1]);
    words.extend(packet(0x3f, &[lo(second), hi(second), 5 | 1 << 20]));
    // Behind a chain nothing runs.
    words.extend(write_data(DATA + 4, &[9]));
    queue.gpu.memory.put(first, &words);
    queue.gpu.memory.put(second, &write_data(DATA + 8, &[2]));
    queue.consume(&indirect_buffer(first, 14));
    assert_eq!([0, 4, 8].map(|at| queue.word(DATA + at)), [1, 0, 2]);
}

#[test]
fn a_packet_that_leaves_its_buffer_is_a_failure() {
    let mut queue = Fixture::new();
    let buffer = DATA + 0x1000;
    queue.gpu.memory.put(buffer, &write_data(DATA, &[1, 2]));
    let failure = queue.fail(&indirect_buffer(buffer, 5));
    assert!(matches!(failure, Failure::Malformed { va, .. } if va == buffer), "{failure}");
    assert_eq!(queue.word(DATA), 0);
}

#[test]
fn atomics_and_copies() {
    let mut queue = Fixture::new();
    queue.gpu.memory().store64(DATA, 40).unwrap();
    // ROCr's PC sampling: ATOMIC_SWAP_RTN_64, then the old value goes to memory.
    queue.consume(&packet(0x1e, &[39, lo(DATA), hi(DATA), 7, 1, 0, 0, 0]));
    let to = DATA + 0x40;
    queue.consume(&packet(0x40, &[6 | 2 << 8 | 1 << 16 | 1 << 20, 0, 0, lo(to), hi(to)]));
    assert_eq!((queue.wide(DATA), queue.wide(to)), (1 << 32 | 7, 40));
    // Memory to memory, 32 bits; immediate, 64 bits; clock.
    queue.consume(&packet(0x40, &[1 | 5 << 8, lo(DATA), hi(DATA), lo(to), hi(to)]));
    assert_eq!(queue.wide(to), 7);
    queue.consume(&packet(0x40, &[5 | 5 << 8 | 1 << 16, 3, 4, lo(to), hi(to)]));
    assert_eq!(queue.wide(to), 4 << 32 | 3);
    queue.consume(&packet(0x40, &[9 | 5 << 8 | 1 << 16, 0, 0, lo(to), hi(to)]));
    assert_eq!(queue.wide(to), 1);
    // A compare and swap that waits.
    queue.put(&packet(0x1e, &[8 | 1 << 8, lo(to), hi(to), 6, 0, 5, 0, 128]));
    assert_eq!(queue.run(), Step::Waiting { va: to });
    queue.gpu.memory.put(to, &[5]);
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.word(to), 6);
}

#[test]
fn dma_copies_and_fills() {
    let mut queue = Fixture::new();
    queue.gpu.memory.write(DATA, b"sixteen bytes...").unwrap();
    let to = DATA + 0x101;
    // ROCr: through L2 on both sides.
    queue.consume(&packet(0x50, &[3 << 20 | 3 << 29, lo(DATA), hi(DATA), lo(to), hi(to), 13]));
    assert_eq!(queue.gpu.memory.bytes(to, 16), b"sixteen bytes\0\0\0");
    queue.consume(&packet(0x50, &[2 << 29, 0x6463_6261, 0, lo(to), hi(to), 6]));
    assert_eq!(queue.gpu.memory.bytes(to, 8), b"abcdabn ");
    let failure = queue.fail(&packet(0x50, &[0, lo(DATA), hi(DATA), lo(to), hi(to), 4 | 1 << 27]));
    assert!(matches!(failure, Failure::Malformed { .. }), "a register: {failure}");
}

#[test]
fn packets_for_other_dies_are_left_out() {
    let predicated = |select: u32| {
        let mut words = packet(0x23, &[select << 24 | 5]);
        words.extend(write_data(DATA + u64::from(select) * 4, &[1]));
        words
    };
    let mut queue = Fixture::new();
    queue.consume(&[predicated(1), predicated(2)].concat());
    assert_eq!([4, 8].map(|at| queue.word(DATA + at)), [1, 0]);
    let mut queue = Fixture::with_xccs(6);
    queue.consume(&[predicated(2), predicated(0x20), predicated(0x40)].concat());
    assert_eq!([8, 0x80, 0x100].map(|at| queue.word(DATA + at)), [1, 1, 0]);
}

#[test]
fn flushes_have_nothing_to_do() {
    let mut queue = Fixture::new();
    // kfdtest's PM4AcquireMemoryPacket for gfx9 and gfx10, and its partial flush.
    queue.consume(&packet(0x58, &[0x28c0_0000, u32::MAX, 0, 0, 0, 4]));
    queue.consume(&packet(0x58, &[0, u32::MAX, 0, 0, 0, 4, 0x4381]));
    queue.consume(&packet(0x46, &[7 | 4 << 8]));
    assert!(matches!(queue.fail(&packet(0x46, &[1 << 8, 0, 0])), Failure::Malformed { .. }));
}

fn registers(first: u32, values: &[u32]) -> Vec<u32> {
    let mut body = vec![first];
    body.extend(values);
    packet(0x76, &body)
}

#[test]
fn an_empty_kernel_runs_and_another_says_what_is_missing() {
    let mut queue = Fixture::new();
    let code = DATA + 0x100;
    queue.gpu.memory.put(code, &[0xbf81_0000]);
    // kfdtest sets PGM_ATC, bit 8 of the high half, for APUs.
    queue.consume(&registers(0x20c, &[lo(code >> 8), hi(code >> 8) | 1 << 8]));
    queue.consume(&packet(0x15, &[1, 1, 1, 0x21]));
    // s_mov_b32 s0, 0
    queue.gpu.memory.put(code, &[0xbe80_0080]);
    let failure = queue.fail(&packet(0x15, &[1, 1, 1, 0x21]));
    let expected = DispatchFailure::NotSupported { pc: code, instruction: 0xbe80_0080 };
    assert_eq!(failure, Failure::Dispatch(expected));
}

/// Runs until it is told to stop; then, once more, to the end.
struct Endless;

impl Dispatcher for Endless {
    fn dispatch(&self, dispatch: &Dispatch<'_>, context: &Context<'_>) -> Result<Dispatched, Failure> {
        let Dispatch::Registers(dispatch) = dispatch else { panic!("not from a ring of PM4") };
        assert_eq!(dispatch.dimensions, [4, 5, 6]);
        assert_eq!(dispatch.initiator, 0x8021);
        assert_eq!(dispatch.registers[0x240..0x243], [7, 8, 9]);
        Ok(if context.stopping() { Dispatched::Stopped } else { Dispatched::Done })
    }
}

#[test]
fn a_kernel_that_was_stopped_is_dispatched_again() {
    let mut queue = Fixture::new();
    queue.gpu.dispatcher = Box::new(Endless);
    queue.put(&registers(0x240, &[7, 8, 9]));
    queue.put(&packet(0x15, &[4, 5, 6, 0x8021]));
    queue.gpu.stop.store(true, std::sync::atomic::Ordering::Relaxed);
    for _ in 0..3 {
        assert_eq!(queue.queue.step(&queue.gpu.context(), queue.write), Step::Progressed);
    }
    assert_eq!(queue.reported(), 5);
    queue.gpu.stop.store(false, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.reported(), 10);
}

#[test]
fn registers_beyond_the_last_are_refused() {
    let mut queue = Fixture::new();
    queue.consume(&registers(0x3ff, &[1]));
    assert!(matches!(queue.fail(&registers(0x3ff, &[1, 2])), Failure::Malformed { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is in the ring and in a buffer, the queue ends waiting, idle or failed.
    #[test]
    fn garbage_ends(
        packets in proptest::collection::vec((0usize..14, 0u32..9, any::<u32>(), any::<[u32; 9]>()), 1..20),
        near in any::<bool>(),
        inside in any::<bool>(),
    ) {
        const KNOWN: [u32; 14] = [
            0x10, 0x15, 0x1e, 0x23, 0x37, 0x3c, 0x3f, 0x40, 0x46, 0x49, 0x50, 0x58, 0x76, 0x99,
        ];
        let mut words = Vec::new();
        for (opcode, length, flags, body) in packets {
            words.push(3 << 30 | length << 16 | KNOWN[opcode] << 8 | flags & 0xff);
            words.extend(body.map(|word| {
                if near { [word & 0xffff, hi(DATA), word & 0xff0_0000][word as usize % 3] } else { word }
            }));
        }
        let mut queue = Fixture::new();
        if inside {
            queue.gpu.memory.put(DATA + 0x1000, &words);
            queue.put(&indirect_buffer(DATA + 0x1000, words.len() as u32));
        } else {
            queue.put(&words);
        }
        match queue.run() {
            Step::Failed(_) => prop_assert_eq!(queue.gpu.world.failures.lock().unwrap().len(), 1),
            Step::Idle | Step::Waiting { .. } => {}
            Step::Progressed => prop_assert!(false),
        }
    }

    /// Pure noise.
    #[test]
    fn noise_ends(words in proptest::collection::vec(any::<u32>(), 1..1000)) {
        let mut queue = Fixture::new();
        queue.put(&words);
        let step = queue.run();
        prop_assert!(step != Step::Progressed);
    }
}
