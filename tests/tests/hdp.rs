//! The page of HDP flush registers (`VIRTIO_KFD_HDP=trap`), natively on the model with Debian's libhsakmt, and with ours
//! in loop-back. Both must print the same.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::native::{run, text};
use virtio_kfd_tests::thunk_stack::SET;
use virtio_kfd_tests::{Artifacts, ThunkStack, need};

const LIMIT: Duration = Duration::from_secs(240);
const SIGSEGV: i32 = 11;

fn stack() -> anyhow::Result<ThunkStack> {
    Ok(ThunkStack::start(Artifacts::for_thunk(&[], &[SET])?, "hdp").unwrap())
}

/// The program with one of its parts, natively and in loop-back.
fn commands(stack: &ThunkStack, part: &[&str]) -> [Command; 2] {
    [stack.native(), stack.ours()].map(|under| {
        let mut command = stack.command(&under.unwrap(), part);
        command.env("VIRTIO_KFD_HDP", "trap");
        command
    })
}

#[test]
fn a_store_reaches_the_gpus_register() {
    let stack = need!(stack());
    let [native, ours] = commands(&stack, &[]);
    let native = text(native, LIMIT).unwrap();
    let ours = text(ours, LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", stack.daemon().report()));
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
    let stack = need!(stack());
    for part in ["default", "ignored"] {
        for command in commands(&stack, &[part]) {
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
    let stack = need!(stack());
    let [_, mut ours] = commands(&stack, &[]);
    ours.env_remove("VIRTIO_KFD_HDP");
    let output = run(ours, LIMIT).unwrap();
    assert_eq!((output.status.code(), output.status.signal()), (Some(1), None));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "no page of registers\n");
}
