//! Frames as bytes: golden ones, damaged ones, arbitrary ones.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)] // a test fails by panicking

use proptest::prelude::*;
use virtio_kfd_protocol::calls::{AllocMemory, GetApertures, MapMemory, Nop};
use virtio_kfd_protocol::frame::*;
use virtio_kfd_protocol::*;

const AREA: AnswerArea = AnswerArea { resource: ResourceId(7), offset: 4096, capacity: 65536 };

fn alloc_and_map() -> Vec<u8> {
    let mut frame = RequestFrameBuilder::new(1, 9, AREA);
    let alloc = AllocMemoryRequest {
        va: GuestVa(0x7f00_0000_0000),
        size: 4096,
        gpu_id: GpuId(26287),
        flags: 0xd000_0004,
        resource: ResourceId(12),
        ..Default::default()
    };
    let index = frame.push::<AllocMemory>(&alloc, &[], 0).unwrap();
    frame.push::<MapMemory>(&BufferRequest { handle: Handle::in_frame(index) }, &[GpuId(26287)], 0).unwrap();
    frame.finish()
}

/// The bytes written out by hand from the layout in frame.rs, so that a change of layout cannot pass unseen.
#[test]
fn golden_request_frame() {
    let mut golden: Vec<u8> = Vec::new();
    let mut words = |words: &[u32]| words.iter().for_each(|word| golden.extend(word.to_le_bytes()));
    words(&[u32::from_le_bytes(*b"VKRQ"), 1, 152, 2, 9, 0, 7, 65536, 4096, 0, 0, 0]);
    words(&[0x140, 64, 40, 0, 16, 0]);
    words(&[0, 0x7f00, 4096, 0, 26287, 0xd000_0004, 12, 0, 0, 0]);
    words(&[0x142, 40, 8, 4, 8, 0]);
    words(&[0, u32::MAX, 26287, 0]);
    assert_eq!(alloc_and_map(), golden);
}

#[test]
fn requests_read_back() {
    let bytes = alloc_and_map();
    let frame = RequestFrame::parse(&bytes).unwrap();
    assert_eq!(frame.header.sequence, 9);
    let [alloc, map] = frame.requests.as_slice() else { panic!("two requests") };
    match Request::decode(alloc).unwrap() {
        Request::AllocMemory { fixed, tail } => {
            assert_eq!((fixed.va, fixed.resource), (GuestVa(0x7f00_0000_0000), ResourceId(12)));
            assert!(tail.is_empty());
        }
        other => panic!("{other:?}"),
    }
    match Request::decode(map).unwrap() {
        Request::MapMemory { fixed, tail } => {
            assert_eq!((fixed.handle.index(), fixed.handle.generation()), (0, Handle::IN_FRAME));
            assert_eq!(tail, [GpuId(26287)]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_cut_or_lengthened_frame_is_an_error() {
    let bytes = alloc_and_map();
    for len in 0..bytes.len() {
        assert!(RequestFrame::parse(&bytes[..len]).is_err(), "{len}");
    }
    let longer = [bytes, vec![0; 8]].concat();
    assert!(RequestFrame::parse(&longer).is_err());
}

#[test]
fn a_short_fixed_part_is_extended_with_zeros_and_a_long_one_must_end_in_zeros() {
    let wait = |bytes: &[u8]| read_fixed::<WaitEventsRequest>(Call::WaitEvents, bytes);
    assert_eq!(wait(&5u32.to_le_bytes()).unwrap(), WaitEventsRequest { timeout: 5, wait_for_all: 0 });
    let mut long = vec![0u8; 16];
    assert!(wait(&long).is_ok());
    long[15] = 1;
    assert!(matches!(wait(&long), Err(DecodeError::Newer { found: 16, expected: 8, .. })));
}

#[test]
fn a_tail_over_its_bound_is_refused() {
    let tail = vec![0u8; (limits::MAX_GPUS + 1) * 4];
    let error = read_tail::<GpuId>(Call::MapMemory, &tail, limits::MAX_GPUS).unwrap_err();
    assert_eq!(error.status(), Status::INVALID);
    assert!(read_tail::<GpuId>(Call::MapMemory, &tail[..7], limits::MAX_GPUS).is_err(), "half an element");
}

#[test]
fn answers_that_would_not_fit_are_refused_before_anything_runs() {
    let mut frame = RequestFrameBuilder::new(1, 1, AnswerArea { capacity: 100, ..AREA });
    frame.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    assert!(matches!(frame.push::<GetApertures>(&Nothing {}, &[], 64), Err(FrameError::AnswerSpace { .. })));
    // A client that lies about its room is caught on the host as well.
    let mut bytes = alloc_and_map();
    bytes[28..32].copy_from_slice(&40u32.to_le_bytes());
    assert!(matches!(RequestFrame::parse(&bytes), Err(FrameError::AnswerSpace { .. })));
}

#[test]
fn answers_are_cut_to_what_was_asked_for() {
    let asked =
        RequestHeader { opcode: GetApertures::CALL.opcode(), answer_len: 56 * 2 + 8, ..Default::default() };
    let list = [Apertures { gpuvm_base: 1, ..Default::default() }; 5];
    let mut answer = AnswerFrameBuilder::new(1, 3);
    answer.push::<GetApertures>(&asked, &Nothing {}, &list);
    answer.push_status(Call::Nop.opcode(), Status::ERRNO, 22);
    let bytes = answer.finish();
    let frame = AnswerFrame::parse(&bytes).unwrap();
    assert_eq!(frame.answers[0].decode::<GetApertures>().unwrap().1.len(), 2, "whole elements only");
    assert_eq!(
        frame.answers[1].decode::<Nop>().unwrap_err(),
        CallError::Failed { call: "Nop", status: Status::ERRNO, errno: 22 }
    );
}

#[test]
fn the_table_is_sorted_and_unique_and_every_answer_can_be_asked_for() {
    assert!(CALLS.windows(2).all(|pair| pair[0].opcode < pair[1].opcode));
    for call in CALLS {
        assert_eq!(Call::from_opcode(call.opcode), Some(call.call));
        let request = call.request_size + call.request_max * call.request_element;
        let answer = call.answer_size + call.answer_max * call.answer_element;
        assert!(request + 72 <= limits::MAX_FRAME_BYTES, "{}", call.name);
        assert!(answer + 56 <= limits::MAX_ANSWER_BYTES, "{}", call.name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Any bytes are a frame or an error; every request of a frame is a request or an error.
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let _ = RequestFrame::parse(&bytes);
        let _ = AnswerFrame::parse(&bytes);
        let _ = topology::unpack(&bytes);
        let _ = Capset::parse(&bytes);
        for call in CALLS {
            let header = RequestHeader { opcode: call.opcode, ..Default::default() };
            let (fixed, tail) = bytes.split_at(bytes.len() / 2);
            let _ = Request::decode(&RawRequest { header, fixed, tail });
        }
    }

    /// A valid frame with some bytes changed parses or fails, and what parses can be decoded or refused.
    #[test]
    fn damaged_frames_never_panic(changes in proptest::collection::vec((0usize..152, any::<u8>()), 1..6)) {
        let mut bytes = alloc_and_map();
        for (at, value) in changes {
            bytes[at] = value;
        }
        if let Ok(frame) = RequestFrame::parse(&bytes) {
            prop_assert_eq!(frame.requests.len(), frame.header.request_count as usize);
            for raw in &frame.requests {
                let _ = Request::decode(raw);
            }
        }
    }
}
