//! C programs on the thunk's API: natively on the model with Debian's libhsakmt, and with ours in loop-back. Both
//! must print the same.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::transcript::assert_same_lines;
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, need};

const SET: &str = "rocm-trixie";
const LIMIT: Duration = Duration::from_secs(240);

fn source(name: &str) -> PathBuf {
    package_path(&format!("tests/c/{name}.c"))
}

/// What a program prints natively and in loop-back.
struct Both {
    native: String,
    loopback: String,
}

fn both(artifacts: &Artifacts, root: &Path, name: &str, profile: &str, arguments: &[&str]) -> Both {
    let program = CProgram::compile(root, &source(name), Place::Host).unwrap();
    let run = |under: &Under<'_>| {
        let mut command = program.command(under);
        command.args(arguments);
        text(command, LIMIT)
    };
    let native = run(&Under::model(artifacts, profile).unwrap()).unwrap();
    let daemon = Daemon::start(artifacts, &format!("model:{profile}"), &[]).unwrap();
    let loopback = run(&Under::loopback(artifacts, daemon.socket()).unwrap())
        .unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    Both { native, loopback }
}

#[track_caller]
fn same(both: &Both) {
    assert_same_lines("a program", ("native", "ours"), &both.native, &both.loopback);
}

/// That a line stands in the output of both, as often as given.
#[track_caller]
fn has(both: &Both, line: &str, times: usize) {
    let count = |text: &str| text.lines().filter(|found| *found == line).count();
    assert_eq!(
        (count(&both.native), count(&both.loopback)),
        (times, times),
        "{line:?} in:\n{}",
        both.loopback
    );
}

macro_rules! parts {
    ($artifacts:ident, $root:ident) => {
        let $artifacts = need!(Artifacts::for_thunk(&[], &[SET]));
        let $root = $artifacts.packages(SET).unwrap();
    };
}

/// Cases C26 and C29. Expected statuses: libhsakmt's events.c and the kernel's kfd_events.c.
#[test]
fn events_have_the_statuses_of_the_native_thunk() {
    parts!(artifacts, root);
    let both = both(&artifacts, &root, "events", "gfx906", &[]);
    for (line, times) in [
        ("an event from before the topology has a slot: 1", 1),
        ("one from after it: 1", 1),
        ("create a debug event that is set: SUCCESS", 1),
        ("set NULL: INVALID_HANDLE", 1),
        ("wait on NULL: INVALID_HANDLE", 1),
        ("create of type MAXID: INVALID_PARAMETER", 1),
        ("set a memory event: ERROR", 1),
        ("set a hardware exception: ERROR", 1),
        ("100 ms: WAIT_TIMEOUT", 2),
        ("both took at least 100 ms: 1", 2),
        ("all of four with three set, 100 ms: WAIT_TIMEOUT", 1),
        // The auto-reset ones that were set are consumed; the kernel gives them back only after an interrupted wait.
        ("look at one: WAIT_TIMEOUT", 4),
        ("look at one: SUCCESS", 0),
        ("all of four: SUCCESS", 1),
        // A sleeper on an event that is destroyed comes back, and not with success.
        ("the sleeper: SUCCESS, soon", 0),
        ("a new one in its place: WAIT_TIMEOUT", 1),
        ("the new one works: SUCCESS", 1),
        ("one of three sleepers: SUCCESS, soon", 3),
        ("close: SUCCESS", 1),
    ] {
        has(&both, line, times);
    }
    assert_eq!(both.loopback.matches("the sleeper: ").count(), 2);
    assert!(!both.loopback.contains("late"), "{}", both.loopback);
    same(&both);
}

/// Case C26: the native thunk leaves the sleeper in the kernel, where it stays until the process ends; ours promises more.
#[test]
fn a_sleeper_comes_back_when_the_last_reference_is_closed() {
    parts!(artifacts, root);
    let program = CProgram::compile(&root, &source("closing"), Place::Host).unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let command = program.command(&Under::loopback(&artifacts, daemon.socket()).unwrap());
    let found = text(command, LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    assert_eq!(found, "close under a sleeper: SUCCESS\nthe sleeper came back\n");
}

/// Case C38. Expected states: libhsakmt's openclose.c.
#[test]
fn open_and_close_leave_nothing_behind() {
    parts!(artifacts, root);
    let both = both(&artifacts, &root, "openclose", "gfx906", &["60"]);
    for line in [
        "close before the first open: KERNEL_IO_CHANNEL_NOT_OPENED",
        "version before the first open: KERNEL_IO_CHANNEL_NOT_OPENED",
        "open: SUCCESS",
        "open again: KERNEL_ALREADY_OPENED",
        "version after one of two closes: SUCCESS",
        "close once too often: KERNEL_IO_CHANNEL_NOT_OPENED",
        "interface 1.17",
        "rounds: 0 failed calls",
        "8 threads: 0 failed calls",
    ] {
        has(&both, line, 1);
    }
    // What the native thunk itself keeps is its own affair.
    for line in ["descriptors grew by 0", "threads grew by 0", "address space grew by little"] {
        assert!(both.loopback.lines().any(|found| found == line), "{line:?} in:\n{}", both.loopback);
    }
}

/// Case C35: 60 starts with a signal every half millisecond find the GPU each time.
#[test]
fn signals_do_not_hide_the_gpu() {
    parts!(artifacts, root);
    let program = CProgram::compile(&root, &source("timer"), Place::Host).unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let under = Under::loopback(&artifacts, daemon.socket()).unwrap();
    for round in 0..60 {
        let found = text(program.command(&under), LIMIT)
            .unwrap_or_else(|error| panic!("round {round}: {error:#}\n{}", daemon.report()));
        assert_eq!(found, "gpu node 1, wait WAIT_TIMEOUT, ticks came\n", "round {round}");
    }
}

/// Cases C42 and C46. Newer releases of libhsakmt than Debian 13's tell EINVAL and ENOMEM of the kernel apart from other errors
/// of a new queue; so does ours.
#[test]
fn queues_are_refused_counted_and_have_doorbells_as_natively() {
    const NEWER: &[(&str, &str)] = &[
        ("a ring of 3000 bytes: ERROR", "a ring of 3000 bytes: INVALID_PARAMETER"),
        // kfd_queue_buffer_get: the ring is a buffer of its size.
        (
            "a ring twice as large as its memory: ERROR",
            "a ring twice as large as its memory: INVALID_PARAMETER",
        ),
        ("101 per cent: ERROR", "101 per cent: INVALID_PARAMETER"),
        // Two engines with eight queues each.
        (
            "SDMA queues: 16, then ERROR, 0 without a doorbell",
            "SDMA queues: 16, then NO_MEMORY, 0 without a doorbell",
        ),
    ];
    parts!(artifacts, root);
    let mut both = both(&artifacts, &root, "queue_table", "gfx906", &[]);
    for (native, newer) in NEWER {
        assert!(both.native.contains(native), "{native:?} in:\n{}", both.native);
        both.native = both.native.replace(native, newer);
    }
    for (line, times) in [
        ("priority 4: INVALID_PARAMETER", 3),
        ("node 99: INVALID_NODE_UNIT", 3),
        ("type 99: INVALID_PARAMETER", 1),
        ("AQL queues: 40, then SUCCESS, 0 without a doorbell", 2),
        ("32 doorbells: 0 not aligned, 0 twice, within 8 KiB: yes", 1),
        ("made again: 0 elsewhere", 1),
    ] {
        has(&both, line, times);
    }
    assert!(!both.loopback.contains("NULL"), "{}", both.loopback);
    same(&both);
}

/// The tables of gfx9 and gfx10; there is none for gfx11 (libhsakmt's pmc_table.c).
#[test]
fn performance_counters_are_those_of_the_native_thunk() {
    parts!(artifacts, root);
    for (profile, line) in [
        ("gfx906", "blocks: 20, at once: 158"),
        ("gfx1030", "blocks: 15, at once: 129"),
        ("gfx1100", "node 1: status 3"),
    ] {
        let both = both(&artifacts, &root, "counters", profile, &[]);
        has(&both, line, 1);
        has(&both, "a node too many: status 5", 1);
        same(&both);
    }
}

/// A native machine's memory banks as they must be in a guest.
fn as_a_guest_sees_it(native: &str) -> String {
    let mut text = String::new();
    for line in native.lines() {
        // HSA_HEAPTYPE_MMIO_REMAP: nobody has asked for the page (VIRTIO_KFD_HDP).
        if line.starts_with("  bank: heap 7,") {
            continue;
        }
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// Cases C51 and C53, with one GPU and with two of the same kind.
#[test]
fn the_library_tells_of_gpus_as_the_native_thunk_does() {
    parts!(artifacts, root);
    let topology = |profile: &str| {
        let mut both = both(&artifacts, &root, "topology", profile, &[]);
        both.native = as_a_guest_sees_it(&both.native);
        both
    };
    let one = topology("gfx906");
    same(&one);
    has(&one, "1 GPUs of 2 nodes", 1);
    has(&one, "a node too many: INVALID_NODE_UNIT", 1);
    // A Radeon VII has 60 compute units of 4 SIMDs; LDS and wave size are gfx9's.
    assert!(one.native.contains(", 60 compute units (240 cores by 4)"), "{}", one.native);
    assert!(one.native.contains("LDS 64 KiB, wave 64"), "{}", one.native);

    let two = topology("gfx906x2");
    same(&two);
    has(&two, "2 GPUs of 3 nodes", 1);
    let gpus: Vec<&str> = two.loopback.lines().filter(|line| line.starts_with("gpu ")).collect();
    let field = |line: &str, name: &str| {
        let mut words = line.split_whitespace().skip_while(|word| *word != name);
        words.nth(1).unwrap_or_default().to_owned()
    };
    for name in ["gpu_id", "unique", "location", "minor"] {
        let [a, b] = [0, 1].map(|number: usize| field(gpus[number], name));
        assert!(a != b && a != "0" && b != "0" && !a.is_empty(), "{name} of two GPUs: {a} and {b}");
    }
    let again = topology("gfx906x2");
    assert_eq!(again.loopback, two.loopback, "the same on each start");
}
