//! Doorbells that are rung after they have been still, when the next store to them traps: our libhsakmt in loop-back, and AMD's thunk
//! on `libkfd_preload.so` in loop-back, where the program may map, move and unmap them. What traps save is measured by `idle` and
//! `seam_idle`.
//!
//! Expected: each packet is processed (the program gives up after 60 seconds), and a child of fork has no doorbells, since
//! `kfd_doorbell_mmap` sets VM_DONTCOPY.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, need};

const SET: &str = "rocm-trixie";
const PROFILE: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(240);

const PAUSES: &str = "a page: 1\npackets: 1\n= end\n";

struct Stack {
    artifacts: Artifacts,
    program: CProgram,
    daemon: Daemon,
}

impl Stack {
    fn new() -> anyhow::Result<Stack> {
        let artifacts = Artifacts::find()?;
        artifacts.program("vhost-user-kfd")?;
        artifacts.program("libkfd_preload.so")?;
        artifacts.thunk()?;
        let root = artifacts.packages(SET)?;
        let program = CProgram::compile(&root, &package_path("tests/c/still.c"), Place::Host).unwrap();
        let daemon = Daemon::start(&artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
        Ok(Stack { artifacts, program, daemon })
    }

    fn seam(&self) -> Under<'_> {
        Under::seam(&self.artifacts, self.daemon.socket()).unwrap()
    }

    #[track_caller]
    fn prints(&self, under: &Under<'_>, arguments: &[&str], expected: &str) {
        let mut command = self.program.command(under);
        command.args(arguments);
        let found =
            text(command, LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", self.daemon.report()));
        assert_eq!(found, expected, "{arguments:?}\n{}", self.daemon.report());
    }
}

#[test]
fn no_ring_is_lost_after_any_pause() {
    let stack = need!(Stack::new());
    stack.prints(&Under::model(&stack.artifacts, PROFILE).unwrap(), &["pauses", "20"], PAUSES);
    let ours = Under::loopback(&stack.artifacts, stack.daemon.socket()).unwrap();
    for under in [ours, stack.seam()] {
        stack.prints(&under, &["pauses", "150"], PAUSES);
    }
}

#[test]
fn doorbells_may_be_mapped_again_and_moved() {
    let stack = need!(Stack::new());
    stack.prints(&stack.seam(), &["again"], "doorbells: 1\npackets: 16\n= end\n");
    stack.prints(&stack.seam(), &["moved"], "doorbells: 1\npackets: 8\n= end\n");
}

#[test]
fn memory_in_the_place_of_doorbells_stays() {
    let stack = need!(Stack::new());
    stack.prints(&stack.seam(), &["gone"], "doorbells: 1\nown memory stays: 1\n= end\n");
}

#[test]
fn a_child_has_no_doorbells() {
    let stack = need!(Stack::new());
    let expected = "doorbells: 1\nthe child: SEGV\nthe child: SEGV\npackets: 6\n= end\n";
    stack.prints(&stack.seam(), &["fork"], expected);
}
