//! Each request by itself: the first byte picks the call (or `VIRTIO_KFD_FUZZ_CALL`, by its name), the second
//! where the fixed part ends.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use virtio_kfd_protocol::frame::{RawRequest, RequestHeader};
use virtio_kfd_protocol::{CALLS, CallInfo, Request};

fn chosen() -> Option<&'static CallInfo> {
    static CHOSEN: OnceLock<Option<&'static CallInfo>> = OnceLock::new();
    *CHOSEN.get_or_init(|| {
        let name = std::env::var("VIRTIO_KFD_FUZZ_CALL").ok()?;
        Some(CALLS.iter().find(|call| call.name == name).expect("VIRTIO_KFD_FUZZ_CALL names a call of the table"))
    })
}

fuzz_target!(|bytes: &[u8]| {
    let [first, second, payload @ ..] = bytes else { return };
    let call = chosen().unwrap_or(&CALLS[*first as usize % CALLS.len()]);
    let (fixed, tail) = payload.split_at((*second as usize).min(payload.len()));
    let header = RequestHeader { opcode: call.opcode, ..Default::default() };
    if let Ok(request) = Request::decode(&RawRequest { header, fixed, tail }) {
        assert_eq!(request.call(), call.call);
        assert!(tail.len() <= call.request_max * call.request_element);
    }
});
