//! The suite of HIP programs (tests/hip) on the runtimes that carry AMD's thunk inside, HIP 6.4.3 and 7.2.4, each compiled by
//! the compiler of its own Debian suite: natively on the model, and on `libkfd_preload.so` in loop-back. Each program
//! checks its own results against the CPU's; both runs must print the same lines. No permission to lend memory of the
//! application to GPUs is given: the runtimes must copy in stages where they would register natively.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::transcript::assert_same_lines;
use virtio_kfd_tests::{Artifacts, Daemon, GpuPrograms, Runtime, Under, need};

const GPU: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(240);

fn source(name: &str) -> PathBuf {
    package_path(&format!("tests/hip/{name}.hip"))
}

/// Runs a program natively and in loop-back.
fn compare(artifacts: &Artifacts, runtime: &Runtime, program: &Path, name: &str, what: &str) {
    // What the runtime compiles for itself is kept out of the user's own cache.
    let kept = artifacts.cache().path("comgr").unwrap();
    let run = |under: &Under<'_>| {
        let mut command = under.command(runtime, program).unwrap();
        command.env("AMD_COMGR_CACHE_DIR", &kept);
        text(command, LIMIT)
    };
    let native = run(&Under::model(artifacts, GPU).unwrap())
        .unwrap_or_else(|error| panic!("{name} {what} on the model: {error:#}"));
    let daemon = Daemon::start(artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let ours = run(&Under::seam(artifacts, daemon.socket()).unwrap())
        .unwrap_or_else(|error| panic!("{name} {what} in loop-back: {error:#}\n{}", daemon.report()));
    for (place, text) in [("on the model", &native), ("in loop-back", &ours)] {
        assert_eq!(text.lines().last(), Some(&*format!("{name}: all right")), "{what} {place}:\n{text}");
    }
    assert_same_lines(what, ("native", "loop-back"), &native, &ours);
    println!("{name} {what}: {} lines\n{ours}", ours.lines().count());
}

fn all(name: &str) {
    let artifacts = need!(Artifacts::find());
    need!(artifacts.program("vhost-user-kfd"));
    need!(artifacts.program("libkfd_model_preload.so"));
    need!(artifacts.program("libkfd_preload.so"));
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
            compare(&artifacts, &programs.runtime(), &program, name, &what);
        }
    }
}

macro_rules! programs {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            all(stringify!($name));
        }
    )*};
}

programs! { vectors matrix reduce sort lanes integers floats doubles halves scratch atomics printf buffers memory streams }
