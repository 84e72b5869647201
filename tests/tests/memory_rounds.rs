//! Many rounds of allocate, map, write, unmap and free, of mixed sizes and kinds, by several threads of several processes:
//! nothing is left on either side.
//!
//! In loop-back a VM is one process, so there are as many daemons; the processes of one VM are in `qemu_memory`.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::time::{Duration, Instant};

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::conformance::{ROUNDS_LEAVE, SET};
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, need};

const LIMIT: Duration = Duration::from_secs(240);

const PROCESSES: usize = 4;
const THREADS: &str = "8";

/// Rounds in all: 10,000.
const ROUNDS: &str = "2500";

#[test]
fn ten_thousand_rounds_leave_nothing_behind() {
    let artifacts = need!(Artifacts::for_thunk(&[], &[SET]));
    let root = artifacts.packages(SET).unwrap();
    let program = CProgram::compile(&root, &package_path("tests/c/rounds.c"), Place::Host).unwrap();
    let daemons: Vec<Daemon> =
        (0..PROCESSES).map(|_| Daemon::start(&artifacts, "model:gfx906", &[]).unwrap()).collect();
    let run = |rounds: &'static str| -> Vec<String> {
        let mut threads = Vec::new();
        for daemon in &daemons {
            let mut command = program.command(&Under::loopback(&artifacts, daemon.socket()).unwrap());
            command.args([rounds, THREADS]);
            threads.push(std::thread::spawn(move || text(command, LIMIT)));
        }
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
    };
    // What a daemon keeps for ever after its first guest is no leak.
    run("40");
    let before: Vec<_> = daemons.iter().map(|daemon| daemon.settled(LIMIT).unwrap()).collect();
    let begin = Instant::now();
    for (output, daemon) in run(ROUNDS).iter().zip(&daemons) {
        assert_eq!(output, ROUNDS_LEAVE, "{}", daemon.report());
    }
    println!("{PROCESSES} processes of {THREADS} threads, {ROUNDS} rounds each: {:?}", begin.elapsed());
    for (before, daemon) in before.iter().zip(&daemons) {
        let after = daemon.settled(LIMIT).unwrap();
        println!("{before:?}, after it {after:?}");
        assert_eq!((after.processes, after.descriptors), (before.processes, before.descriptors));
        assert!(after.mappings <= before.mappings + 16, "{before:?}, {after:?}");
        assert!(after.private_kib <= before.private_kib + 8 * 1024, "{before:?}, {after:?}");
    }
}

/// The program itself is right where AMD's own library is under it.
#[test]
fn rounds_leave_nothing_behind_natively() {
    let artifacts = need!(Artifacts::find());
    let root = need!(artifacts.packages(SET));
    need!(artifacts.program("libkfd_model_preload.so"));
    let program = CProgram::compile(&root, &package_path("tests/c/rounds.c"), Place::Host).unwrap();
    let mut command = program.command(&Under::model(&artifacts, "gfx906").unwrap());
    command.args([ROUNDS, THREADS]);
    assert_eq!(text(command, LIMIT).unwrap(), ROUNDS_LEAVE);
}
