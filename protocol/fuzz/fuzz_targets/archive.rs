//! The topology archive: what unpacks packs again to the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use virtio_kfd_protocol::topology::{pack, unpack};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(files) = unpack(bytes) {
        assert_eq!(pack(&files).as_deref(), Ok(bytes));
    }
});
