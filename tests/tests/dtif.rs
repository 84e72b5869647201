//! ROCr 7 on `libdtif.so`: Debian's unmodified runtime 7.2.4, which loads it under `HSA_ENABLE_DTIF=1` instead of its own thunk, in
//! loop-back. Expected: what `tests/c/rocr` computes, and the lines that it prints natively.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "rocr/expected.rs"]
#[allow(dead_code, reason = "shared with the tests of other runtimes")]
mod expected;

use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::{INSIDE, runtime, text};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::transcript::{Outcome, compare};
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, need};

const LIMIT: Duration = Duration::from_secs(240);

fn outcome(command: Command) -> anyhow::Result<Outcome> {
    let text = text(command, LIMIT)?;
    Ok(Outcome { lines: text.lines().map(str::to_owned).collect(), error: None })
}

#[test]
fn copies_barriers_and_waits_are_as_natively() {
    let [_, set] = INSIDE;
    let artifacts = need!(Artifacts::for_daemon(&[], &[set]));
    need!(artifacts.dtif());
    let root = artifacts.packages(set).unwrap();
    let runtime = runtime(&artifacts, set).unwrap();
    let program = CProgram::compile_for_rocr(&root, &package_path("tests/c/rocr"), Place::Guest).unwrap();

    // Its waits poll (docs/operating.md), so whether threads sleep is not asked.
    let mut native = Under::model(&artifacts, "gfx906").unwrap().command(&runtime, program.path()).unwrap();
    native.env(expected::POLLS, "1");
    let native = outcome(native).unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    // The library lies beside libhsakmt.so.1, which this runtime has no use for.
    let mut ours =
        Under::loopback(&artifacts, daemon.socket()).unwrap().command(&runtime, program.path()).unwrap();
    ours.env("HSA_ENABLE_DTIF", "1").env(expected::POLLS, "1");
    let ours = outcome(ours).unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    expected::check_polling("libdtif.so", &ours);
    compare(&native, &ours, expected::NOT_LOCKED)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    println!("{} lines", ours.lines.len());
}
