//! The suite of HIP programs (tests/hip), compiled by Debian's compilers without and with optimisation: natively on the model
//! with Debian's thunk, and in loop-back with ours. Each program checks its own results against the CPU's; both runs must
//! print the same lines. Debian 13's runtime runs both programs, Debian 12's the one that its own compiler made.
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
fn compare(
    artifacts: &Artifacts,
    runtime: &Runtime,
    program: &Path,
    (name, what): (&str, &str),
    environment: &[(&str, &str)],
) {
    let model = Under::model(artifacts, GPU).unwrap();
    let native = text(model.command(runtime, program).unwrap(), LIMIT)
        .unwrap_or_else(|error| panic!("{name} {what} on the model: {error:#}"));
    let daemon = Daemon::start(artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let under = Under::loopback(artifacts, daemon.socket()).unwrap();
    let mut command = under.command(runtime, program).unwrap();
    command.envs(environment.iter().copied());
    let ours = text(command, LIMIT)
        .unwrap_or_else(|error| panic!("{name} {what} in loop-back: {error:#}\n{}", daemon.report()));
    for (place, text) in [("on the model", &native), ("in loop-back", &ours)] {
        assert_eq!(text.lines().last(), Some(&*format!("{name}: all right")), "{what} {place}:\n{text}");
    }
    assert_same_lines(what, ("native", "loop-back"), &native, &ours);
    println!("{name} {what}\n{ours}");
}

fn all(name: &str) {
    let artifacts = need!(Artifacts::find());
    let trixie = need!(GpuPrograms::find(&artifacts, Release::Trixie));
    let bookworm = need!(GpuPrograms::find(&artifacts, Release::Bookworm));
    need!(artifacts.thunk());
    need!(artifacts.program("vhost-user-kfd"));
    need!(artifacts.program("libkfd_model_preload.so"));
    let full = trixie.hip(&source(name), GPU, Optimisation::Full).unwrap();
    compare(&artifacts, &trixie.runtime(), &full, (name, "-O3, Debian 13"), &[]);
    let none = bookworm.hip(&source(name), GPU, Optimisation::None).unwrap();
    compare(&artifacts, &trixie.runtime(), &none, (name, "-O0, Debian 13"), &[]);
    // HIP 5.2.3 gives GPUs memory of its own (docs/limits.md).
    let adopt = [("VIRTIO_KFD_REGISTER", "adopt")];
    compare(&artifacts, &bookworm.runtime(), &none, (name, "-O0, Debian 12"), &adopt);
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

/// Why -O0 is not asked of Debian 13's own compiler: clang 17 puts reloads of registers before the restoration of EXEC (LLVM
/// issue 61083), so that lanes which took another branch keep what they had, an address for example. The program that
/// clang 15 builds of the same source is right without optimisation (`lanes`). When this test fails, the compiler has been repaired,
/// and its -O0 belongs into `all`.
#[test]
fn clang_17_is_wrong_without_optimisation() {
    let artifacts = need!(Artifacts::find());
    let trixie = need!(GpuPrograms::find(&artifacts, Release::Trixie));
    need!(artifacts.thunk());
    need!(artifacts.program("vhost-user-kfd"));
    need!(artifacts.program("libkfd_model_preload.so"));
    let program = trixie.hip(&source("lanes"), GPU, Optimisation::None).unwrap();
    let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let places =
        [Under::model(&artifacts, GPU).unwrap(), Under::loopback(&artifacts, daemon.socket()).unwrap()];
    for (place, under) in ["on the model", "in loop-back"].into_iter().zip(&places) {
        let error = text(under.command(&trixie.runtime(), &program).unwrap(), LIMIT).unwrap_err().to_string();
        assert!(error.contains("HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION"), "{place}: {error}");
    }
}

/// That a source without a test is noticed.
#[test]
fn every_program_has_a_test() {
    let directory = source("x").parent().unwrap().to_owned();
    let text = std::fs::read_to_string(directory.parent().unwrap().join("hip.rs")).unwrap();
    let list = text.split("programs! {").nth(1).unwrap().split('}').next().unwrap();
    let named: std::collections::BTreeSet<&str> = list.split_whitespace().collect();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "hip") {
            let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
            assert!(named.contains(stem.as_str()), "{stem}.hip is in no test");
        }
    }
}
