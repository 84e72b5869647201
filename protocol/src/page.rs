//! The protocol page (docs/protocol.md), generated from the call table.

use core::fmt::Write;

use crate::calls::{CALLS, Ring};
use crate::status::Status;
use crate::{limits, version};

/// The text of docs/protocol.md.
pub fn protocol_page() -> String {
    let mut page = String::from(
        "# The wire\n\nGenerated from the call table in `protocol/src/calls.rs` by `cargo xtask docs`; do not edit.\n\n",
    );
    // Writing to a String cannot fail.
    let _ = writeln!(
        page,
        "Capset {} version {}; wire versions {} to {}. All numbers are little-endian. A frame has at most {} bytes and {} \
         requests; an answer at most {} bytes. Structures: the doc comments of the `virtio-kfd-protocol` crate.\n",
        version::CAPSET_ID,
        version::CAPSET_VERSION,
        version::VERSION_MIN,
        version::VERSION_MAX,
        limits::MAX_FRAME_BYTES,
        limits::MAX_REQUESTS_PER_FRAME,
        limits::MAX_ANSWER_BYTES,
    );
    page.push_str("## Calls\n\nSizes in bytes: fixed part + most elements x size of an element.\n\n");
    page.push_str("| number | call | noun | request | answer | ring | KFD ioctls | what it does |\n");
    page.push_str("|---|---|---|---|---|---|---|---|\n");
    for call in CALLS {
        let part = |size: usize, max: usize, element: usize| match max {
            0 => format!("{size}"),
            _ => format!("{size} + {max} x {element}"),
        };
        let ioctls: Vec<String> = call.kfd_ioctls.iter().map(|nr| format!("{nr:#04x}")).collect();
        let _ = writeln!(
            page,
            "| {:#x} | {} | {} | {} | {} | {} | {} | {} |",
            call.opcode,
            call.name,
            call.noun,
            part(call.request_size, call.request_max, call.request_element),
            part(call.answer_size, call.answer_max, call.answer_element),
            match call.ring {
                Ring::Any => "any",
                Ring::Waiting => "1 to 63",
            },
            ioctls.join(" "),
            call.doc.trim(),
        );
    }
    page.push_str("\n## Statuses\n\n| number | name | meaning |\n|---|---|---|\n");
    for (status, name, meaning) in Status::ALL {
        let _ = writeln!(page, "| {} | {name} | {meaning} |", status.0);
    }
    page
}
