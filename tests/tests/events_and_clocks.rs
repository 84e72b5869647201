//! What events carry, and what clocks tell: natively on the model with Debian's libhsakmt, and with ours in loop-back. In a guest:
//! `qemu_waiting`.
//!
//! The expected lines are the kernel's: `kfd_signal_vm_fault_event_with_userptr` (the page and why), `kfd_signal_reset_event`,
//! `kfd_ioctl_get_clock_counters` (CLOCK_MONOTONIC_RAW and CLOCK_BOOTTIME); flags are hsakmttypes.h's.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use kfd_model::debug::{DEBUG_VARIABLE, HsaHwExceptionData};
use virtio_kfd_tests::talk::{OnHost, Talk};
use virtio_kfd_tests::thunk_stack::SET;
use virtio_kfd_tests::{Artifacts, ThunkStack, gpu_view, need};

const LIMIT: Duration = Duration::from_secs(120);

/// What `clocks` prints; the frequency is the profile's.
const CLOCKS: &str = "the CPU's counter is this system's CLOCK_MONOTONIC_RAW: yes
the system's counter is this system's CLOCK_BOOTTIME: yes
the system's counter counts nanoseconds: yes
the GPU's counter is monotone: yes
clocks of the CPU's node: SUCCESS
clocks of no node: INVALID_NODE_UNIT
packets begin and end between looks at the GPU's counter: yes
packets begin after the end of those before: yes
the GPU counts at 100 MHz
intervals between packets are the system's: yes
close: SUCCESS
";

/// What `exceptions memory` and `exceptions read-only` print; in each the bits say why.
fn fault(not_present: u32, read_only: u32) -> String {
    let data = format!(
        "SUCCESS
the GPU's node: 1, the page: 1, flags 1
not present {not_present}, read only {read_only}, no execute 0, imprecise 0, ecc 0, error type 0"
    );
    format!("before it: WAIT_TIMEOUT\none event: {data}\nanother event: {data}\nclose: SUCCESS\n")
}

const MAILBOXES: &str = "600 of 600 events were reached, 0 others, each address is one event's: 1
close: SUCCESS
";

fn stack(name: &str) -> anyhow::Result<ThunkStack> {
    Ok(ThunkStack::start_watched(Artifacts::for_thunk(&[], &[SET])?, name).unwrap())
}

/// Natively and in loop-back the program prints this.
#[track_caller]
fn both_print(stack: &ThunkStack, arguments: &[&str], expected: &str) {
    for under in [stack.native(), stack.ours()].map(Result::unwrap) {
        assert_eq!(stack.text(&under, arguments, LIMIT).unwrap(), expected, "{under:?}");
    }
}

#[test]
fn clocks_and_time_stamps_agree() {
    let stack = need!(stack("clocks"));
    both_print(&stack, &[], CLOCKS);
}

#[test]
fn memory_events_say_where_and_why() {
    let stack = need!(stack("exceptions"));
    both_print(&stack, &["memory"], &fault(1, 0));
    both_print(&stack, &["read-only"], &fault(0, 1));
}

#[test]
fn gpus_reach_events_by_their_mailboxes() {
    let stack = need!(stack("exceptions"));
    both_print(&stack, &["mailboxes"], MAILBOXES);
}

/// A hardware exception, told by the mailbox in `directory` to the process that `command` starts.
fn after_a_reset(command: Command, directory: &Path) -> Vec<String> {
    let mut process: Box<OnHost> = Box::new(OnHost::start(command, LIMIT).unwrap());
    let mut said = Vec::new();
    while let Some(line) = process.next_line(LIMIT).unwrap() {
        let Some(gpu_id) = line.strip_prefix("ready ") else {
            said.push(line);
            continue;
        };
        // KFD_HW_EXCEPTION_WHOLE_GPU_RESET, KFD_HW_EXCEPTION_ECC (linux/kfd_ioctl.h)
        let gpu_id = gpu_id.parse().unwrap();
        let data = HsaHwExceptionData { reset_type: 0, reset_cause: 1, memory_lost: 1, gpu_id };
        assert_eq!(gpu_view::reset(directory, &data).unwrap(), 1);
    }
    process.finish().unwrap();
    said
}

#[test]
fn hardware_exceptions_say_what_happened() {
    let stack = need!(stack("exceptions"));
    let expected = [
        "before it: WAIT_TIMEOUT",
        "wait: SUCCESS",
        "the GPU's node: 1, reset type 0, memory lost 1, cause 1",
        "once only: WAIT_TIMEOUT",
        "close: SUCCESS",
    ];
    let directory = tempfile::tempdir().unwrap();
    let mut native = stack.command(&stack.native().unwrap(), &["hardware"]);
    native.env(DEBUG_VARIABLE, directory.path());
    assert_eq!(after_a_reset(native, directory.path()), expected, "natively");
    let ours = stack.command(&stack.ours().unwrap(), &["hardware"]);
    assert_eq!(after_a_reset(ours, &stack.daemon().gpus()), expected, "{}", stack.daemon().report());
}
