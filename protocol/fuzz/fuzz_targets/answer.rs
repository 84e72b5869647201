//! What a host sends: the guest library must not fall over either.
#![no_main]

use libfuzzer_sys::fuzz_target;
use virtio_kfd_protocol::calls::{GetApertures, Hello, WaitEvents};
use virtio_kfd_protocol::frame::AnswerFrame;
use virtio_kfd_protocol::{Capset, CallType};

fuzz_target!(|bytes: &[u8]| {
    let _ = Capset::parse(bytes);
    let Ok(frame) = AnswerFrame::parse(bytes) else { return };
    for raw in &frame.answers {
        let _ = raw.decode::<Hello>();
        if let Ok((_, tail)) = raw.decode::<GetApertures>() {
            assert!(tail.len() <= GetApertures::ANSWER_TAIL_MAX);
        }
        let _ = raw.decode::<WaitEvents>();
    }
});
