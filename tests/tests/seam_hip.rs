//! The suite of HIP programs (tests/hip) on the runtimes that carry AMD's thunk inside, HIP 6.4.3 and 7.2.4, each compiled by
//! the compiler of its own Debian suite: natively on the model, and on `libkfd_preload.so` in loop-back. Each program
//! checks its own results against the CPU's; both runs must print the same lines. No permission to lend memory of the
//! application to GPUs is given: the runtimes must copy in stages where they would register natively.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "hip/suite.rs"]
#[macro_use]
#[allow(dead_code, reason = "shared with the tests of other runtimes")]
mod suite;

use std::path::Path;

use suite::{GPU, compare, source};
use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::{Artifacts, Daemon, GpuPrograms, Runtime, Under, need};

/// Runs a program natively and in loop-back.
fn both(artifacts: &Artifacts, runtime: &Runtime, program: &Path, name: &str, what: &str) {
    // What the runtime compiles for itself is kept out of the user's own cache.
    let kept = artifacts.cache().path("comgr").unwrap();
    let command = |under: &Under<'_>| {
        let mut command = under.command(runtime, program).unwrap();
        command.env("AMD_COMGR_CACHE_DIR", &kept);
        command
    };
    let native = command(&Under::model(artifacts, GPU).unwrap());
    let daemon = Daemon::start(artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let ours = command(&Under::seam(artifacts, daemon.socket()).unwrap());
    compare(name, what, native, ours, &daemon);
}

fn all(name: &str) {
    let artifacts = need!(Artifacts::for_daemon(&["libkfd_preload.so"], &[]));
    for release in Release::INSIDE {
        // A suite that has moved on must not fail the others.
        let programs = match GpuPrograms::find(&artifacts, release) {
            Ok(programs) => programs,
            Err(error) => {
                println!("SKIP: package set {}: {error:#}", release.set());
                continue;
            }
        };
        for optimisation in Optimisation::ALL {
            let program = programs.hip(&source(name), GPU, optimisation).unwrap();
            let what = format!("{}, {}", release.set(), optimisation.option());
            both(&artifacts, &programs.runtime(), &program, name, &what);
        }
    }
}

tests!();
