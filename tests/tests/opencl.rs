//! OpenCL programs: those of this project (tests/opencl), which check their own results, and Debian's clinfo and clpeak. Natively
//! on the model with Debian's thunk, and in loop-back with ours; both must print the same.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::transcript::assert_same_lines;
use virtio_kfd_tests::{Artifacts, Daemon, GpuPrograms, Under, need};

const GPU: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(240);

fn source(name: &str) -> PathBuf {
    package_path(&format!("tests/opencl/{name}.c"))
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
    assert_same_lines("a program", ("native", "ours"), &both.native, &both.loopback);
}

macro_rules! parts {
    ($artifacts:ident, $programs:ident) => {
        let $artifacts = need!(Artifacts::for_thunk(&[], &[]));
        let $programs = need!(GpuPrograms::find(&$artifacts, Release::Trixie));
    };
}

/// Kernels are compiled by the runtime when the program runs; without optimisation by Debian 12's compiler before
/// ([`without_optimisation_the_runtime_dies_by_itself`]).
fn own(name: &str, more: &[&str]) {
    parts!(artifacts, programs);
    let bookworm = need!(GpuPrograms::find(&artifacts, Release::Bookworm));
    let program = programs.opencl(&source(name)).unwrap();
    let code = bookworm.opencl_kernels(&program, name, GPU, Optimisation::None).unwrap();
    let code = format!("@{}", code.display());
    for options in [&*code, "-O1", "-O3"] {
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

/// Why -O0 is not asked of the runtime's own compiler: unoptimised kernels of its code object version have an argument for a
/// heap, and Debian 13's runtime, which has such a heap for HIP programs only, sets it up at their first launch.
/// That is natively so as well. When this test fails, the runtime has been repaired, and `-O0` belongs into the list of `own`.
#[test]
fn without_optimisation_the_runtime_dies_by_itself() {
    parts!(artifacts, programs);
    let program = programs.opencl(&source("kernels")).unwrap();
    let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let places =
        [Under::model(&artifacts, GPU).unwrap(), Under::loopback(&artifacts, daemon.socket()).unwrap()];
    for (place, under) in ["on the model", "in loop-back"].into_iter().zip(&places) {
        for option in ["-O0", "-cl-opt-disable"] {
            let mut command = under.command(&programs.runtime(), &program).unwrap();
            command.arg(option).env("OCL_ICD_VENDORS", programs.opencl_vendors());
            let error = text(command, LIMIT).unwrap_err().to_string();
            assert!(error.starts_with("signal: 11 (SIGSEGV)"), "{option} {place}: {error}");
        }
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
