//! The page of HDP flush registers (`VIRTIO_KFD_HDP=trap`), natively on the model with Debian's libhsakmt, and with ours
//! in loop-back. Both must print the same.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::{run, text};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, need};

const SET: &str = "rocm-trixie";
const LIMIT: Duration = Duration::from_secs(240);
const SIGSEGV: i32 = 11;

fn source() -> PathBuf {
    package_path("tests/c/hdp.c")
}

/// The program with one of its parts, natively and in loop-back.
fn commands(artifacts: &Artifacts, program: &CProgram, socket: &Path, part: Option<&str>) -> [Command; 2] {
    let unders = [Under::model(artifacts, "gfx906").unwrap(), Under::loopback(artifacts, socket).unwrap()];
    unders.map(|under| {
        let mut command = program.command(&under);
        command.env("VIRTIO_KFD_HDP", "trap").args(part);
        command
    })
}

macro_rules! parts {
    ($artifacts:ident, $program:ident, $daemon:ident) => {
        let $artifacts = need!(Artifacts::find());
        let root = need!($artifacts.packages(SET));
        need!($artifacts.thunk());
        need!($artifacts.program("vhost-user-kfd"));
        need!($artifacts.program("libkfd_model_preload.so"));
        let $program = CProgram::compile(&root, &source(), Place::Host).unwrap();
        let $daemon = Daemon::start(&$artifacts, "model:gfx906", &[]).unwrap();
    };
}

#[test]
fn a_store_reaches_the_gpus_register() {
    parts!(artifacts, program, daemon);
    let [native, ours] = commands(&artifacts, &program, daemon.socket(), None);
    let native = text(native, LIMIT).unwrap();
    let ours = text(ours, LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    for line in [
        "a page of 4096 bytes",
        "at first: memory 0, registers 0",
        "a word: memory 1, registers 0",
        "the other word: memory 0, registers 1",
        "a double word: memory 1, registers 1",
        "an atomic store: memory 0, registers 1",
        "an exchange gives 0",
        "many threads: memory 1, registers 0",
        "signals: memory 1, registers 1",
        "a fault of the program's own: 1, at its place: 1",
        "one more: 4 0",
        "close: SUCCESS",
    ] {
        assert!(native.lines().any(|found| found == line), "{line:?} in:\n{native}");
    }
    assert_eq!(ours, native);
}

/// What nothing handles ends the program, after a store that was none of its faults.
#[test]
fn a_fault_ends_the_program_as_it_would_have() {
    parts!(artifacts, program, daemon);
    for part in ["default", "ignored"] {
        for command in commands(&artifacts, &program, daemon.socket(), Some(part)) {
            let shown = format!("{command:?}");
            // A program that a signal ends is an error, with the signal and the output's end in its message.
            let error = format!("{:#}", run(command, LIMIT).unwrap_err());
            assert!(error.contains("and now a fault\n"), "{shown}: {error}");
            assert!(error.contains(&format!("signal: {SIGSEGV} ")), "{shown}: {error}");
        }
    }
}

#[test]
fn who_has_not_asked_has_no_page() {
    parts!(artifacts, program, daemon);
    let [_, mut ours] = commands(&artifacts, &program, daemon.socket(), None);
    ours.env_remove("VIRTIO_KFD_HDP");
    let output = run(ours, LIMIT).unwrap();
    assert_eq!((output.status.code(), output.status.signal()), (Some(1), None));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "no page of registers\n");
}
