//! OpenCL programs: those of this project (tests/opencl), which check their own results, and Debian's clinfo and clpeak. Natively
//! on the model with Debian's thunk, and in loop-back with ours; both must print the same.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use virtio_kfd_tests::gpu_program::Release;
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::{Artifacts, Daemon, GpuPrograms, Under, need};

const GPU: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(240);

fn source(name: &str) -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    package.join("tests/opencl").join(format!("{name}.c"))
}

/// What a program prints natively and in loop-back.
struct Both {
    native: String,
    loopback: String,
}

fn both(artifacts: &Artifacts, programs: &GpuPrograms, program: &Path, arguments: &[&str]) -> Both {
    let runtime = programs.runtime();
    let run = |under: &Under<'_>| {
        let mut command = under.command(&runtime, program)?;
        command.args(arguments).env("OCL_ICD_VENDORS", programs.opencl_vendors());
        // The runtime maps buffers of the GPU by memory of its own that it lends to the GPU (docs/limits.md).
        command.env("VIRTIO_KFD_REGISTER", "adopt");
        text(command, LIMIT)
    };
    let native = run(&Under::model(artifacts, GPU).unwrap())
        .unwrap_or_else(|error| panic!("{} {arguments:?} on the model: {error:#}", program.display()));
    let daemon = Daemon::start(artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let loopback = run(&Under::loopback(artifacts, daemon.socket()).unwrap()).unwrap_or_else(|error| {
        panic!("{} {arguments:?} in loop-back: {error:#}\n{}", program.display(), daemon.report())
    });
    Both { native, loopback }
}

#[track_caller]
fn same(both: &Both) {
    let (native, ours): (Vec<&str>, Vec<&str>) =
        (both.native.lines().collect(), both.loopback.lines().collect());
    let differ: Vec<String> = (0..native.len().max(ours.len()))
        .filter(|line| native.get(*line) != ours.get(*line))
        .map(|line| format!("line {line}: native {:?}, ours {:?}", native.get(line), ours.get(line)))
        .collect();
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

macro_rules! parts {
    ($artifacts:ident, $programs:ident) => {
        let $artifacts = need!(Artifacts::find());
        let $programs = need!(GpuPrograms::find(&$artifacts, Release::Trixie));
        need!($artifacts.thunk());
        need!($artifacts.program("vhost-user-kfd"));
        need!($artifacts.program("libkfd_model_preload.so"));
    };
}

/// Kernels are compiled when the program runs. Without optimisation Debian 13's runtime dies at the first launch, before it
/// asks the thunk, so the least is -O1.
fn own(name: &str, more: &[&str]) {
    parts!(artifacts, programs);
    let program = programs.opencl(&source(name)).unwrap();
    for options in ["-O1", "-O3"] {
        let arguments = [&[options], more].concat();
        let both = both(&artifacts, &programs, &program, &arguments);
        let last = format!("{name}: all right");
        for text in [&both.native, &both.loopback] {
            assert_eq!(text.lines().last(), Some(&*last), "{options}:\n{text}");
        }
        same(&both);
        println!("{options}\n{}", both.loopback);
    }
}

#[test]
fn kernels() {
    own("kernels", &[]);
}

#[test]
fn maths() {
    own("maths", &[]);
}

#[test]
fn memory() {
    own("memory", &[]);
}

/// Case C56. In loop-back, as in a guest, the times of two commands are only as exact as a round trip is short
/// (docs/limits.md).
#[test]
fn profiling() {
    own("profiling", &["loose"]);
}

#[test]
fn clinfo_lists_the_device() {
    parts!(artifacts, programs);
    let both = both(&artifacts, &programs, Path::new("clinfo"), &[]);
    for line in [
        "  Device Name                                     gfx906:sramecc-:xnack-",
        "  Max compute units                               60",
        "  Device Board Name (AMD)                         AMD Instinct MI60 / MI50",
        "  Compiler Available                              Yes",
    ] {
        assert!(both.loopback.lines().any(|found| found == line), "{line:?} in\n{}", both.loopback);
    }
    same(&both);
}

/// An existing open benchmark, unmodified. Its numbers are times, so only the names of its lines can be compared.
#[test]
fn clpeak_measures() {
    parts!(artifacts, programs);
    // The measurements that end soon on a simulated GPU.
    let both = both(&artifacts, &programs, Path::new("clpeak"), &["--kernel-latency"]);
    for text in [&both.native, &both.loopback] {
        assert!(text.contains("Device: gfx906:sramecc-:xnack-"), "{text}");
        let latency = text.lines().find_map(|line| line.trim().strip_prefix("Kernel launch latency : "));
        let number = latency.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
        assert!(number.is_some_and(|number| number > 0.0), "{text}");
    }
}
