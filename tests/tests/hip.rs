//! The suite of HIP programs (tests/hip), compiled by Debian's compilers without and with optimisation: natively on the model
//! with Debian's thunk, and in loop-back with ours. Each program checks its own results against the CPU's; both runs must
//! print the same lines. Debian 13's runtime runs both programs, Debian 12's the one that its own compiler made.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "hip/suite.rs"]
#[macro_use]
mod suite;

use std::collections::BTreeSet;
use std::path::Path;

use suite::{GPU, LIMIT, NAMES, compare, source};
use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::{Artifacts, Daemon, GpuPrograms, Runtime, Under, need};

/// Runs a program natively and in loop-back.
fn both(
    artifacts: &Artifacts,
    runtime: &Runtime,
    program: &Path,
    (name, what): (&str, &str),
    environment: &[(&str, &str)],
) {
    let native = Under::model(artifacts, GPU).unwrap().command(runtime, program).unwrap();
    let daemon = Daemon::start(artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let mut ours = Under::loopback(artifacts, daemon.socket()).unwrap().command(runtime, program).unwrap();
    ours.envs(environment.iter().copied());
    compare(name, what, native, ours, &daemon);
}

fn all(name: &str) {
    let artifacts = need!(Artifacts::for_thunk(&[], &[]));
    let trixie = need!(GpuPrograms::find(&artifacts, Release::Trixie));
    let bookworm = need!(GpuPrograms::find(&artifacts, Release::Bookworm));
    let full = trixie.hip(&source(name), GPU, Optimisation::Full).unwrap();
    both(&artifacts, &trixie.runtime(), &full, (name, "-O3, Debian 13"), &[]);
    let none = bookworm.hip(&source(name), GPU, Optimisation::None).unwrap();
    both(&artifacts, &trixie.runtime(), &none, (name, "-O0, Debian 13"), &[]);
    // HIP 5.2.3 gives GPUs memory of its own (docs/limits.md).
    let adopt = [("VIRTIO_KFD_REGISTER", "adopt")];
    both(&artifacts, &bookworm.runtime(), &none, (name, "-O0, Debian 12"), &adopt);
}

tests!();

/// Why -O0 is not asked of Debian 13's own compiler: clang 17 puts reloads of registers before the restoration of EXEC (LLVM
/// issue 61083), so that lanes which took another branch keep what they had, an address for example. The program that
/// clang 15 builds of the same source is right without optimisation (`lanes`). When this test fails, the compiler has been repaired,
/// and its -O0 belongs into `all`.
#[test]
fn clang_17_is_wrong_without_optimisation() {
    let artifacts = need!(Artifacts::for_thunk(&[], &[]));
    let trixie = need!(GpuPrograms::find(&artifacts, Release::Trixie));
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
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "hip") {
            found.insert(path.file_stem().unwrap().to_str().unwrap().to_owned());
        }
    }
    assert_eq!(found, NAMES.iter().map(|name| (*name).to_owned()).collect());
}
