//! What a guest sends: any bytes are a frame or an error, and what is a frame keeps its promises.
#![no_main]

use libfuzzer_sys::fuzz_target;
use virtio_kfd_protocol::frame::RequestFrame;
use virtio_kfd_protocol::{Request, limits};

fuzz_target!(|bytes: &[u8]| {
    let Ok(frame) = RequestFrame::parse(bytes) else { return };
    assert!(!frame.requests.is_empty() && frame.requests.len() <= limits::MAX_REQUESTS_PER_FRAME);
    let answers: usize = frame.requests.iter().map(|raw| raw.header.answer_len as usize + 24).sum();
    assert!(answers + 32 <= frame.header.answer_capacity as usize);
    for raw in &frame.requests {
        let _ = Request::decode(raw);
    }
});
