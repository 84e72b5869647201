//! Packets are spelled as words here, from the bit positions in `vega10_sdma_pkt_open.h` and `sdma_registers.h`, not by
//! the code under test; results are computed by plain loops.

use proptest::prelude::*;

use super::*;
use crate::engine::Memory;
use crate::engine::fake::{FakeGpu, FakeMemory, seen_at_interrupts};

const RING: u64 = 0x10_0000;
const RING_SIZE: u32 = 0x1000;
const POINTERS: u64 = 0x20_0000;
const DATA: u64 = 0x7f00_0000_0000;
const DATA_SIZE: u64 = 0x4_0000;
const READ_ONLY: u64 = 0x7fff_0000_0000;

const GFX9: (u32, u32, u32) = (9, 0, 6);

struct Fixture {
    gpu: FakeGpu,
    queue: SdmaQueue,
    write: u64,
}

impl Fixture {
    fn new((major, minor, stepping): (u32, u32, u32)) -> Self {
        let memory = FakeMemory::new(RING, u64::from(RING_SIZE))
            .with(POINTERS, 0x1000, true)
            .with(DATA, DATA_SIZE, true)
            .with(READ_ONLY, 0x1000, false);
        let addresses = QueueAddresses {
            ring: RING,
            ring_size: RING_SIZE,
            read_pointer: POINTERS,
            write_pointer: POINTERS + 8,
        };
        let queue = SdmaQueue::new(addresses, Layout::for_gfx(major, minor, stepping));
        Self { gpu: FakeGpu::new(memory), queue, write: 0 }
    }

    /// Puts a packet into the ring without ringing the doorbell.
    fn put(&mut self, words: &[u32]) {
        for word in words {
            self.gpu.memory.put(RING + self.write % u64::from(RING_SIZE), &[*word]);
            self.write += 4;
        }
    }

    fn run(&mut self) -> Step {
        self.gpu.run(&mut self.queue, self.write)
    }

    /// Puts a packet, runs the queue and expects that all of it was consumed.
    fn consume(&mut self, words: &[u32]) {
        self.put(words);
        assert_eq!(self.run(), Step::Idle);
        assert_eq!(self.reported(), self.write);
    }

    fn fail(&mut self, words: &[u32]) -> Failure {
        self.put(words);
        match self.run() {
            Step::Failed(failure) => failure,
            other => panic!("{other:?} for {words:x?}"),
        }
    }

    fn reported(&self) -> u64 {
        self.gpu.memory().load64(POINTERS).unwrap()
    }
}

fn lo(va: u64) -> u32 {
    va as u32
}

fn hi(va: u64) -> u32 {
    (va >> 32) as u32
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn copy(from: u64, to: u64, length: u32) -> [u32; 7] {
    [1, length - 1, 0, lo(from), hi(from), lo(to), hi(to)]
}

#[test]
fn a_linear_copy_moves_count_plus_one_bytes() {
    let mut queue = Fixture::new(GFX9);
    let source = pattern(300, 7);
    queue.gpu.memory.write(DATA + 3, &source).unwrap();
    queue.consume(&copy(DATA + 3, DATA + 0x1001, 300));
    assert_eq!(queue.gpu.memory.bytes(DATA + 0x1001, 300), source);
    assert_eq!(queue.gpu.memory.bytes(DATA + 0x1000, 1), [0]);
    assert_eq!(queue.gpu.memory.bytes(DATA + 0x1001 + 300, 1), [0]);
}

#[test]
fn overlapping_copies_are_moves_in_both_directions() {
    for (from, to) in [(DATA + 0x100, DATA + 0x90), (DATA + 0x90, DATA + 0x100)] {
        let mut queue = Fixture::new(GFX9);
        let source = pattern(0x18000, 1);
        queue.gpu.memory.write(from, &source).unwrap();
        queue.consume(&copy(from, to, source.len() as u32));
        assert!(queue.gpu.memory.bytes(to, source.len()) == source, "from {from:#x} to {to:#x}");
    }
}

#[test]
fn a_broadcast_has_two_destinations() {
    let mut queue = Fixture::new(GFX9);
    let source = pattern(64, 3);
    queue.gpu.memory.write(DATA, &source).unwrap();
    let (a, b) = (DATA + 0x400, DATA + 0x801);
    queue.consume(&[1 | 1 << 27, 63, 0, lo(DATA), hi(DATA), lo(a), hi(a), lo(b), hi(b)]);
    assert_eq!(queue.gpu.memory.bytes(a, 64), source);
    assert_eq!(queue.gpu.memory.bytes(b, 64), source);
}

#[test]
fn the_count_has_as_many_bits_as_the_generation() {
    // ROCr's GpuAgent::CreateBlitSdma: 22 bits, 30 on gfx90a and from gfx10.3 on.
    let bits = |major, minor, stepping| Layout::for_gfx(major, minor, stepping).count_bits;
    assert_eq!([bits(9, 0, 0), bits(9, 0, 6), bits(9, 0, 8), bits(10, 1, 0)], [22; 4]);
    assert_eq!([bits(9, 0, 10), bits(9, 4, 2), bits(10, 3, 0), bits(11, 0, 0), bits(12, 0, 0)], [30; 5]);
    // What lies above is no part of the count.
    let mut queue = Fixture::new(GFX9);
    let mut packet = copy(DATA, DATA + 0x100, 8);
    packet[1] |= 1 << 22;
    queue.gpu.memory.write(DATA, &pattern(9, 1)).unwrap();
    queue.consume(&packet);
    assert_eq!(queue.gpu.memory.bytes(DATA + 0x100, 9), [&pattern(8, 1)[..], &[0]].concat());
}

#[test]
fn a_box_is_copied_row_by_row() {
    // The element's exponent is in bits 29 to 31, pitches and sizes are one less than they say (sdma_registers.h).
    let mut queue = Fixture::new(GFX9);
    let (size, pitches) = ([5u64, 3, 2], [(40u64, 200u64), (48, 480)]);
    let (from, to) = (DATA + 0x100, DATA + 0x8000);
    let (start, end) = ([2u64, 1, 3], [1u64, 4, 1]);
    queue.gpu.memory.write(DATA, &pattern(0x4000, 5)).unwrap();
    let before = queue.gpu.memory.bytes(DATA, DATA_SIZE as usize);
    let [(source_pitch, source_slice), (pitch, slice)] = pitches;
    queue.consume(&[
        1 | 4 << 8 | 2 << 29,
        lo(from),
        hi(from),
        (start[0] | start[1] << 16) as u32,
        (start[2] | (source_pitch - 1) << 13) as u32,
        (source_slice - 1) as u32,
        lo(to),
        hi(to),
        (end[0] | end[1] << 16) as u32,
        (end[2] | (pitch - 1) << 13) as u32,
        (slice - 1) as u32,
        ((size[0] - 1) | (size[1] - 1) << 16) as u32,
        (size[2] - 1) as u32,
    ]);
    let mut expected = before.clone();
    for z in 0..size[2] {
        for y in 0..size[1] {
            for byte in 0..size[0] * 4 {
                let source = 0x100
                    + ((start[2] + z) * source_slice + (start[1] + y) * source_pitch + start[0]) * 4
                    + byte;
                let place = 0x8000 + ((end[2] + z) * slice + (end[1] + y) * pitch + end[0]) * 4 + byte;
                expected[place as usize] = before[source as usize];
            }
        }
    }
    assert!(queue.gpu.memory.bytes(DATA, DATA_SIZE as usize) == expected);
    assert!(expected != before);
}

#[test]
fn a_box_of_gfx12_has_wider_fields() {
    let mut queue = Fixture::new((12, 0, 0));
    let (from, to) = (DATA, DATA + 0x8000);
    queue.gpu.memory.write(from, &pattern(0x4000, 9)).unwrap();
    // 3 bytes of 2 rows from x 2, y 1 with a pitch of 0x123 to x 0, y 0 with one of 16.
    let words = [
        1 | 4 << 8,
        lo(from),
        hi(from),
        2 | 1 << 16,
        0x122 << 16,
        0,
        lo(to),
        hi(to),
        0,
        15 << 16,
        0,
        2 | 1 << 16,
        0,
    ];
    queue.consume(&words);
    let row = |y: u64| queue.gpu.memory.bytes(from + (1 + y) * 0x123 + 2, 3);
    assert_eq!(queue.gpu.memory.bytes(to, 3), row(0));
    assert_eq!(queue.gpu.memory.bytes(to + 16, 3), row(1));
    assert_eq!(queue.gpu.memory.bytes(to + 3, 13), [0; 13]);
}

#[test]
fn written_words_come_from_the_ring_also_around_its_end() {
    let mut queue = Fixture::new(GFX9);
    // A NOP of 1020 words leaves four to the end: the data lie behind it.
    let mut nop = vec![1019 << 16];
    nop.resize(1020, 0xdead_beef);
    queue.consume(&nop);
    queue.consume(&[2, lo(DATA + 8), hi(DATA + 8), 2, 11, 22, 33]);
    let bytes = queue.gpu.memory.bytes(DATA, 24);
    let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    assert_eq!(words, [0, 0, 11, 22, 33, 0]);
}

#[test]
fn every_packet_may_lie_across_the_end_of_the_ring() {
    for before in 1..7 {
        let mut queue = Fixture::new(GFX9);
        let mut nop = vec![(1023 - before) << 16];
        nop.resize(1024 - before as usize, 0);
        queue.consume(&nop);
        queue.gpu.memory.write(DATA, &[1, 2, 3, 4]).unwrap();
        queue.consume(&copy(DATA, DATA + 4, 4));
        assert_eq!(queue.gpu.memory.bytes(DATA, 8), [1, 2, 3, 4, 1, 2, 3, 4]);
    }
}

#[test]
fn fills_have_units_of_one_two_and_four_bytes() {
    // ROCr counts a word fill as (words - 1) * 4, kfdtest as bytes - 1: both mean the same.
    for (unit, count, expected) in [
        (0u32, 4, vec![0x78; 5]),
        (1, 4, [0x78, 0x56].repeat(3)),
        (2, 8, [0x78, 0x56, 0x34, 0x12].repeat(3)),
        (2, 11, [0x78, 0x56, 0x34, 0x12].repeat(3)),
    ] {
        let mut queue = Fixture::new(GFX9);
        queue.consume(&[11 | unit << 30, lo(DATA), hi(DATA), 0x1234_5678, count]);
        let mut bytes = expected.clone();
        bytes.push(0);
        assert_eq!(queue.gpu.memory.bytes(DATA, bytes.len()), bytes, "unit {unit}, count {count}");
    }
    let failure = Fixture::new(GFX9).fail(&[11 | 3 << 30, lo(DATA), hi(DATA), 0, 0]);
    assert!(matches!(failure, Failure::Malformed { .. }), "{failure}");
}

#[test]
fn a_signal_is_completed_as_rocr_does_it() {
    // BlitSdma::SubmitCommand: poll both halves of a dependency, HDP flush, copy, time stamp, decrement, mailbox, trap.
    let mut queue = Fixture::new(GFX9);
    let (dependency, signal, mailbox) = (DATA + 8, DATA + 0x48, DATA + 0x100);
    let memory = queue.gpu.memory();
    memory.store64(dependency, 1 << 32).unwrap();
    memory.store64(signal, 1).unwrap();
    memory.store64(mailbox, u64::MAX).unwrap();
    let poll = |va: u64| [8 | 3 << 28 | 1 << 31, lo(va), hi(va), 0, u32::MAX, 0xfff_0004];
    queue.put(&poll(dependency + 4));
    queue.put(&poll(dependency));
    queue.put(&[0x8, 0, 0x8000_0000, 0, 0, 0]);
    queue.put(&copy(DATA, DATA + 0x200, 16));
    queue.put(&[13 | 2 << 8, lo(DATA + 0x60), hi(DATA + 0x60)]);
    queue.put(&[10 | 47 << 25, lo(signal), hi(signal), u32::MAX, u32::MAX, 0, 0, 0]);
    queue.put(&[5, lo(mailbox), hi(mailbox), 0x123]);
    queue.put(&[6, 0x123]);
    assert_eq!(queue.run(), Step::Waiting { va: dependency + 4 });
    assert_eq!(queue.reported(), 0);
    queue.gpu.memory().store64(dependency, 2).unwrap();
    assert_eq!(queue.run(), Step::Waiting { va: dependency });
    assert_eq!(queue.gpu.memory().load64(signal).unwrap(), 1);
    queue.gpu.memory().store64(dependency, 0).unwrap();
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.reported(), queue.write);
    let memory = queue.gpu.memory();
    assert_eq!(memory.load64(signal).unwrap(), 0);
    assert_eq!(memory.load64(DATA + 0x60).unwrap(), 1, "the clock's first value");
    assert_eq!(memory.load64(mailbox).unwrap(), 0xffff_ffff_0000_0123, "a fence writes 32 bits");
    assert_eq!(*queue.gpu.world.interrupts.lock().unwrap(), [Interrupt::SdmaTrap(0x123)]);
}

#[test]
fn a_condition_leaves_packets_out() {
    let mut queue = Fixture::new(GFX9);
    let fence = |place: u64| [5, lo(DATA + place), hi(DATA + place), 7];
    queue.gpu.memory.put(DATA, &[5]);
    queue.put(&[9, lo(DATA), hi(DATA), 6, 4]);
    queue.put(&fence(8));
    queue.put(&[9, lo(DATA), hi(DATA), 5, 4]);
    queue.put(&fence(16));
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.gpu.memory().load32(DATA + 8).unwrap(), 0);
    assert_eq!(queue.gpu.memory().load32(DATA + 16).unwrap(), 7);
    assert_eq!(queue.reported(), queue.write);
}

#[test]
fn a_compare_and_swap_can_loop() {
    let mut queue = Fixture::new(GFX9);
    queue.gpu.memory().store64(DATA, 4).unwrap();
    queue.put(&[10 | 1 << 16 | 0x28 << 25, lo(DATA), hi(DATA), 9, 0, 5, 0, 0]);
    assert_eq!(queue.run(), Step::Waiting { va: DATA });
    queue.gpu.memory().store64(DATA, 5).unwrap();
    assert_eq!(queue.run(), Step::Idle);
    assert_eq!(queue.gpu.memory().load64(DATA).unwrap(), 9);
}

#[test]
fn gcr_is_for_navi() {
    let gcr = [17 | 1 << 8, 0, 0xc3c0_0000, 0, 0];
    Fixture::new((10, 3, 0)).consume(&gcr);
    Fixture::new((11, 0, 0)).consume(&gcr);
    let failure = Fixture::new(GFX9).fail(&gcr);
    assert_eq!(failure, Failure::Opcode { engine: "SDMA", va: RING, header: gcr[0] });
}

#[test]
fn a_fence_of_navi_has_cache_bits_in_its_header() {
    // kfdtest's SDMAFencePacket::InitPacketNV.
    let mut queue = Fixture::new((10, 3, 0));
    queue.consume(&[5 | 3 << 16 | 1 << 20 | 1 << 22, lo(DATA), hi(DATA), 42]);
    assert_eq!(queue.gpu.memory().load32(DATA).unwrap(), 42);
}

#[test]
fn the_queue_stops_at_the_first_bad_packet() {
    let mut queue = Fixture::new(GFX9);
    queue.put(&[5, lo(DATA), hi(DATA), 1]);
    let failure = queue.fail(&[0xff]);
    assert_eq!(failure, Failure::Opcode { engine: "SDMA", va: RING + 16, header: 0xff });
    assert_eq!(queue.reported(), 16);
    assert_eq!(queue.gpu.memory().load32(DATA).unwrap(), 1);
    queue.put(&[5, lo(DATA), hi(DATA), 2]);
    assert_eq!(queue.run(), Step::Failed(failure.clone()));
    assert_eq!(queue.gpu.memory().load32(DATA).unwrap(), 1);
    assert_eq!(*queue.gpu.world.failures.lock().unwrap(), [failure], "told once");
}

#[test]
fn a_fault_is_told_with_its_address() {
    for (packet, va, access) in [
        (copy(0x5000, DATA, 8), 0x5000, "read"),
        (copy(DATA, READ_ONLY + 8, 8), READ_ONLY + 8, "write"),
        (copy(DATA, DATA + DATA_SIZE - 4, 8), DATA + DATA_SIZE, "write"),
        (copy(u64::MAX - 3, DATA, 8), u64::MAX - 3, "read"),
    ] {
        let mut queue = Fixture::new(GFX9);
        let failure = queue.fail(&packet);
        let fault = failure.fault().unwrap();
        assert_eq!((fault.va, fault.access), (va, access));
        assert_eq!(queue.gpu.world.faults.lock().unwrap()[..], [*fault]);
        assert_eq!(queue.reported(), 0);
    }
}

#[test]
fn doorbells_that_make_no_sense() {
    let mut queue = Fixture::new(GFX9);
    queue.consume(&[0]);
    let context = queue.gpu.context();
    // Late ones have nothing to say; a packet that is not whole waits for its rest.
    assert_eq!(queue.queue.step(&context, 0), Step::Idle);
    assert_eq!(queue.queue.step(&context, 4), Step::Idle);
    queue.gpu.memory.put(RING + 4, &copy(DATA, DATA, 1));
    assert_eq!(queue.queue.step(&context, 8), Step::Idle);
    let step = queue.queue.step(&context, 0x100000);
    let failure = Failure::WritePointer { write: 0x100000, read: 4, size: 0x1000 };
    assert_eq!(step, Step::Failed(failure));
}

#[test]
fn the_write_pointer_counts_until_the_first_ring() {
    let mut queue = Fixture::new(GFX9);
    queue.put(&[5, lo(DATA), hi(DATA), 1]);
    queue.gpu.memory().store64(POINTERS + 8, 16).unwrap();
    assert_eq!(queue.gpu.run(&mut queue.queue, DOORBELL_UNTOUCHED), Step::Idle);
    assert_eq!(queue.reported(), 16);
}

#[test]
fn a_large_copy_takes_several_steps() {
    let size = 5 << 20;
    let memory = FakeMemory::new(RING, 0x1000).with(POINTERS, 0x1000, true).with(DATA, 2 * size, true);
    let gpu = FakeGpu::new(memory);
    let addresses =
        QueueAddresses { ring: RING, ring_size: 0x1000, read_pointer: POINTERS, write_pointer: POINTERS + 8 };
    let mut queue = SdmaQueue::new(addresses, Layout::for_gfx(9, 0, 10));
    gpu.memory.put(RING, &copy(DATA, DATA + size, size as u32));
    gpu.memory().store64(DATA + size - 8, 77).unwrap();
    for _ in 0..4 {
        assert_eq!(queue.step(&gpu.context(), 28), Step::Progressed);
        assert_eq!(gpu.memory().load64(POINTERS).unwrap(), 0);
    }
    assert_eq!(gpu.run(&mut queue, 28), Step::Idle);
    assert_eq!(gpu.memory().load64(POINTERS).unwrap(), 28);
    assert_eq!(gpu.memory().load64(DATA + 2 * size - 8).unwrap(), 77);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is in the ring, the queue ends waiting, idle or failed, and only where it may write.
    #[test]
    fn garbage_ends(
        headers in proptest::collection::vec((0u32..20, 0u32..6, any::<u32>(), any::<[u32; 12]>()), 1..20),
        generation in 0usize..3,
        near in any::<bool>(),
    ) {
        let mut queue = Fixture::new([GFX9, (10, 3, 0), (12, 0, 0)][generation]);
        for (op, sub, flags, body) in headers {
            queue.put(&[op | sub << 8 | flags & 0xffff_0000]);
            // Half of the time, make addresses that there are.
            let body = body.map(|word| if near { [word & 0xffff, hi(DATA)][word as usize % 2] } else { word });
            queue.put(&body);
        }
        match queue.run() {
            Step::Failed(_) => prop_assert_eq!(queue.gpu.world.failures.lock().unwrap().len(), 1),
            Step::Idle | Step::Waiting { .. } => {}
            Step::Progressed => prop_assert!(false),
        }
        prop_assert!(queue.reported() <= queue.write);
    }

    /// Random copies against slices.
    #[test]
    fn copies_are_exact(from in 0u64..0x1000, to in 0u64..0x1000, length in 1u32..0x1000) {
        let mut queue = Fixture::new(GFX9);
        let mut expected = pattern(0x2000, 11);
        queue.gpu.memory.write(DATA, &expected).unwrap();
        queue.consume(&copy(DATA + from, DATA + to, length));
        expected.copy_within(from as usize..(from + u64::from(length)) as usize, to as usize);
        prop_assert!(queue.gpu.memory.bytes(DATA, 0x2000) == expected);
    }
}

#[test]
fn the_read_pointer_is_reported_on_the_way_and_when_the_queue_is_paused() {
    let mut queue = Fixture::new(GFX9);
    queue.put(&[0; 1000]);
    let context = queue.gpu.context();
    for packets in 1..=1000 {
        assert_eq!(queue.queue.step(&context, queue.write), Step::Progressed);
        let reported = queue.gpu.memory().load64(POINTERS).unwrap();
        assert!(reported <= 4 * packets && reported + 1024 > 4 * packets, "{reported} after {packets}");
    }
    queue.queue.quiesce(&context);
    assert_eq!(queue.reported(), 4000);
}

#[test]
fn words_that_were_not_submitted_are_not_fetched_ahead() {
    let mut queue = Fixture::new(GFX9);
    queue.consume(&[0]);
    // Where the NOP was fetched, nothing behind it was there yet.
    queue.consume(&[5, lo(DATA), hi(DATA), 3]);
    assert_eq!(queue.gpu.memory().load32(DATA).unwrap(), 3);
    // The same slots, one round later.
    let mut nop = vec![1018 << 16];
    nop.resize(1019, 0);
    queue.consume(&nop);
    queue.consume(&[5, lo(DATA), hi(DATA), 4]);
    queue.consume(&[5, lo(DATA), hi(DATA), 5]);
    assert_eq!(queue.gpu.memory().load32(DATA).unwrap(), 5);
}

#[test]
fn the_read_pointer_is_past_a_trap_before_anybody_hears_of_it() {
    // kfdtest places its next packet as soon as it was woken, and wants room for it.
    let Fixture { gpu, mut queue, .. } = Fixture::new(GFX9);
    gpu.memory.put(RING, &[0, 6, 1]);
    assert_eq!(seen_at_interrupts(&gpu, &mut queue, 12, POINTERS), [12]);
}
