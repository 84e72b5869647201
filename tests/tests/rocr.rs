//! Debian's unmodified ROCr with a program on its public API (`tests/c/rocr`): natively on the model, and in loop-back
//! through daemon and worker. Both must print the same, line by line; what copies bring is computed here anew.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "rocr/expected.rs"]
mod expected;

use std::path::PathBuf;
use std::time::Duration;

use expected::{CLASSES, NOT_LOCKED, class_size};
use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::parts::package_path;

use virtio_kfd_tests::native::{SETS, run, runtime, text};
use virtio_kfd_tests::process::Keeper;
use virtio_kfd_tests::transcript::{Exception, Outcome, compare};
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, need};

const LIMIT: Duration = Duration::from_secs(240);

/// Environment variable of the library (docs/limits.md).
const REGISTER: &str = "VIRTIO_KFD_REGISTER";

fn source() -> PathBuf {
    package_path("tests/c/rocr")
}

/// Runs the program with `set` on `profile` natively and in loop-back, and compares.
#[track_caller]
fn same(
    artifacts: &Artifacts,
    set: &str,
    profile: &str,
    environment: &[(&str, &str)],
    exceptions: &[Exception],
) {
    let runtime = runtime(artifacts, set).unwrap();
    let program =
        CProgram::compile_for_rocr(&artifacts.packages(set).unwrap(), &source(), Place::Guest).unwrap();
    let lines = |under: &Under<'_>| -> anyhow::Result<Outcome> {
        let mut command = under.command(&runtime, program.path())?;
        command.env_remove(REGISTER).envs(environment.iter().copied());
        let lines = text(command, LIMIT)?.lines().map(str::to_owned).collect();
        Ok(Outcome { lines, error: None })
    };
    let native = lines(&Under::model(artifacts, profile).unwrap()).unwrap();
    let daemon = Daemon::start(artifacts, &format!("model:{profile}"), &[]).unwrap();
    let ours = lines(&Under::loopback(artifacts, daemon.socket()).unwrap())
        .unwrap_or_else(|error| panic!("{set}, {profile}: {error:#}\n{}", daemon.report()));
    for (place, outcome) in [("natively", &native), ("in loop-back", &ours)] {
        expected::check(&format!("{set}, {profile}, {place}"), outcome);
    }
    compare(&native, &ours, exceptions)
        .unwrap_or_else(|error| panic!("{set}, {profile}: {error:#}\n{}", daemon.report()));
    println!("{set}, {profile}: {} lines", ours.lines.len());
}

#[test]
fn copies_barriers_and_waits_are_as_natively_with_trixies_rocr() {
    let artifacts = need!(Artifacts::for_thunk(&[], &SETS));
    for profile in ["gfx906", "gfx1030"] {
        same(&artifacts, "rocm-trixie", profile, &[], NOT_LOCKED);
    }
}

#[test]
fn copies_barriers_and_waits_are_as_natively_with_bookworms_rocr() {
    let artifacts = need!(Artifacts::for_thunk(&[], &SETS));
    for profile in ["gfx906", "gfx1030"] {
        same(&artifacts, "rocm-bookworm", profile, &[], NOT_LOCKED);
    }
}

#[test]
fn copies_go_from_gpu_to_gpu() {
    let artifacts = need!(Artifacts::for_thunk(&[], &SETS));
    same(&artifacts, "rocm-trixie", "gfx906x2", &[], NOT_LOCKED);
}

/// Fills, copies within a GPU and synchronous copies are kernels of the runtime's.
#[test]
fn kernels_of_the_runtime_fill_and_copy() {
    let artifacts = need!(Artifacts::for_thunk(&[], &SETS));
    for set in SETS {
        let runtime = runtime(&artifacts, set).unwrap();
        let root = artifacts.packages(set).unwrap();
        let program = CProgram::compile_for_rocr(&root, &source(), Place::Guest).unwrap();
        let run = |under: &Under<'_>| {
            let mut command = under.command(&runtime, program.path())?;
            command.arg("kernels").env_remove(REGISTER);
            text(command, LIMIT)
        };
        let expected = expected::kernels("gfx906");
        assert_eq!(run(&Under::model(&artifacts, "gfx906").unwrap()).unwrap(), expected, "{set}, natively");
        let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
        let ours = run(&Under::loopback(&artifacts, daemon.socket()).unwrap())
            .unwrap_or_else(|error| panic!("{set}: {error:#}\n{}", daemon.report()));
        assert_eq!(ours, expected, "{set}, in loop-back");
    }
}

/// What `hip_wild` cannot ask for, since HIP does not let it through: workgroups that are too large or empty, a grid
/// that never ends.
#[test]
fn dispatches_that_no_gpu_can_run_stop_their_queue_alone() {
    let artifacts = need!(Artifacts::for_thunk(&[], &SETS));
    for set in SETS {
        let runtime = runtime(&artifacts, set).unwrap();
        let root = artifacts.packages(set).unwrap();
        let program = CProgram::compile_for_rocr(&root, &source(), Place::Guest).unwrap();
        let command = |under: &Under<'_>, section: &str| {
            let mut command = under.command(&runtime, program.path()).unwrap();
            command.arg(section).env_remove(REGISTER);
            command
        };
        let expected = expected::dispatches("gfx906");
        let model = Under::model(&artifacts, "gfx906").unwrap();
        assert_eq!(text(command(&model, "dispatches"), LIMIT).unwrap(), expected, "{set}, natively");

        let [daemon, other] = [(); 2].map(|()| Daemon::start(&artifacts, "model:gfx906", &[]).unwrap());
        let loopback = Under::loopback(&artifacts, daemon.socket()).unwrap();
        let neighbour = Under::loopback(&artifacts, other.socket()).unwrap();
        let run = |under: &Under<'_>, daemon: &Daemon, when: &str| {
            let ours = text(command(under, "dispatches"), LIMIT)
                .unwrap_or_else(|error| panic!("{set}, {when}: {error:#}\n{}", daemon.report()));
            assert_eq!(ours, expected, "{set}, {when}");
        };
        // In loop-back each process is a guest of its own, so the neighbour is another VM's.
        let directory = tempfile::tempdir().unwrap();
        let vast = Keeper::start(command(&loopback, "vast"), &directory.path().join("log"), LIMIT).unwrap();
        while !vast.output().contains("= vast") {
            assert!(vast.is_running(), "{set}: {}{}", vast.report(), daemon.report());
            std::thread::sleep(Duration::from_millis(20));
        }
        run(&neighbour, &other, "beside an endless grid");
        assert!(vast.is_running(), "{set}: {}{}", vast.report(), daemon.report());
        drop(vast);
        daemon.wait_for_workers(0, LIMIT).unwrap();
        run(&loopback, &daemon, "after it was killed");
    }
}

/// With the option pageable memory is locked as natively, and nothing differs.
#[test]
fn nothing_differs_where_memory_is_adopted() {
    let artifacts = need!(Artifacts::for_thunk(&[], &SETS));
    same(&artifacts, "rocm-trixie", "gfx906", &[(REGISTER, "adopt")], &[]);
}

/// `hsa_memory_copy` locks pageable memory and has no other way: its status, for every size, and that no byte on either
/// side has changed. Expected: HSA_STATUS_ERROR, as ROCr's `MemoryRegion::Lock` answers when the thunk refuses.
#[test]
fn synchronous_copies_of_pageable_memory_are_refused_and_change_nothing() {
    let artifacts = need!(Artifacts::for_thunk(&[], &SETS));
    for set in SETS {
        let runtime = runtime(&artifacts, set).unwrap();
        let program =
            CProgram::compile_for_rocr(&artifacts.packages(set).unwrap(), &source(), Place::Guest).unwrap();
        let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
        let under = Under::loopback(&artifacts, daemon.socket()).unwrap();
        let mut command = under.command(&runtime, program.path()).unwrap();
        command.arg("refused").env_remove(REGISTER);
        let output = run(command, LIMIT).unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let mut expected = "= agents\nGPUs: 1\ngfx906, pool with flags 4\n= refused\n".to_owned();
        for class in 0..CLASSES {
            let (size, status) = (class_size(class), "HSA_STATUS_ERROR");
            expected
                .push_str(&format!("{size} bytes to VRAM: {status}, from VRAM: {status}, 0 bytes changed\n"));
        }
        expected.push_str("VRAM is as it was: yes\n= end\nfailures: 0\n");
        assert_eq!(stdout, expected, "{set}: {}\n{}", output.status, daemon.report());
    }
}
