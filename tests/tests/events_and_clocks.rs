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
use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::talk::{OnHost, Talk};
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, gpu_view, need};

const SET: &str = "rocm-trixie";
const PROFILE: &str = "gfx906";
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

struct Stack {
    artifacts: Artifacts,
    program: CProgram,
    daemon: Daemon,
}

impl Stack {
    fn new(name: &str) -> anyhow::Result<Stack> {
        let artifacts = Artifacts::find()?;
        artifacts.program("vhost-user-kfd")?;
        artifacts.thunk()?;
        let root = artifacts.packages(SET)?;
        let source = package_path(&format!("tests/c/{name}.c"));
        let program = CProgram::compile(&root, &source, Place::Host).unwrap();
        let daemon = Daemon::start_watched(&artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
        Ok(Stack { artifacts, program, daemon })
    }

    fn command(&self, under: &Under<'_>, arguments: &[&str]) -> Command {
        let mut command = self.program.command(under);
        command.args(arguments);
        command
    }

    fn native(&self) -> Under<'static> {
        Under::model(&self.artifacts, PROFILE).unwrap()
    }

    fn ours(&self) -> Under<'_> {
        Under::loopback(&self.artifacts, self.daemon.socket()).unwrap()
    }

    /// Both print this.
    fn both_print(&self, arguments: &[&str], expected: &str) {
        assert_eq!(text(self.command(&self.native(), arguments), LIMIT).unwrap(), expected, "natively");
        let ours = text(self.command(&self.ours(), arguments), LIMIT);
        assert_eq!(ours.unwrap_or_else(|error| panic!("{error:#}\n{}", self.daemon.report())), expected);
    }
}

#[test]
fn clocks_and_time_stamps_agree() {
    let stack = need!(Stack::new("clocks"));
    stack.both_print(&[], CLOCKS);
}

#[test]
fn memory_events_say_where_and_why() {
    let stack = need!(Stack::new("exceptions"));
    stack.both_print(&["memory"], &fault(1, 0));
    stack.both_print(&["read-only"], &fault(0, 1));
}

#[test]
fn gpus_reach_events_by_their_mailboxes() {
    let stack = need!(Stack::new("exceptions"));
    stack.both_print(&["mailboxes"], MAILBOXES);
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
    let stack = need!(Stack::new("exceptions"));
    let expected = [
        "before it: WAIT_TIMEOUT",
        "wait: SUCCESS",
        "the GPU's node: 1, reset type 0, memory lost 1, cause 1",
        "once only: WAIT_TIMEOUT",
        "close: SUCCESS",
    ];
    let directory = tempfile::tempdir().unwrap();
    let mut native = stack.command(&stack.native(), &["hardware"]);
    native.env(DEBUG_VARIABLE, directory.path());
    assert_eq!(after_a_reset(native, directory.path()), expected, "natively");
    let ours = stack.command(&stack.ours(), &["hardware"]);
    assert_eq!(after_a_reset(ours, &stack.daemon.gpus()), expected, "{}", stack.daemon.report());
}
