//! Tests of OpenCL that are not ours: Piglit's, as Debian packages them, unmodified. Each compiles kernels in the runtime, runs them and
//! compares what they bring with what the test's own text says. Natively on the model with Debian's thunk, and in loop-back with ours;
//! both must pass, or end alike. A guest runs some in tests/qemu_hip.rs.
//!
//! `VIRTIO_KFD_TEST_PIGLIT=all` runs all of them, which takes an hour; another value those whose name contains it.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "opencl/piglit.rs"]
mod piglit;

use std::path::{Path, PathBuf};
use std::time::Duration;

use piglit::{Piglit, results};
use virtio_kfd_tests::gpu_program::Release;
use virtio_kfd_tests::native::run;
use virtio_kfd_tests::{Artifacts, Daemon, GpuPrograms, Under, need};

const GPU: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(240);

/// Which tests.
const CHOICE: &str = "VIRTIO_KFD_TEST_PIGLIT";

/// Those of every run: calls with a stack and arrays in it, mixed precision, f16 loads and stores, vectors, comparisons, products of
/// integers. None uses macros of OpenCL C, for which the compiler in the runtime would look for its headers below /usr.
const USUAL: &[&str] = &[
    "execute/calls.cl",
    "execute/tail-calls.cl",
    "execute/v3i32-stack-array.cl",
    "execute/i32-stack-array.cl",
    "execute/mad-mix.cl",
    "execute/store-hi16.cl",
    "execute/realign-stack.cl",
    "execute/sha256-Ch.cl",
    "execute/scalar-arithmetic-long.cl",
    "vload/vload_half-float-global.cl",
    "relational/builtin-float-isequal-1.0.generated.cl",
    "int/builtin-int-mul_hi-1.0.generated.cl",
];

/// Names of all tests that `choice` asks for.
fn chosen(piglit: &Piglit, choice: Option<&str>) -> Vec<PathBuf> {
    let all = piglit.programs().unwrap();
    let matches = |path: &Path, part: &str| path.to_string_lossy().contains(part);
    match choice {
        Some("all") => all,
        Some(part) => all.into_iter().filter(|path| matches(path, part)).collect(),
        None => USUAL
            .iter()
            .map(|name| {
                let found = all.iter().find(|path| path.ends_with(name));
                found.unwrap_or_else(|| panic!("Piglit has no {name}")).clone()
            })
            .collect(),
    }
}

#[test]
fn piglit_ends_in_loopback_as_natively() {
    let artifacts = need!(Artifacts::for_thunk(&[], &[]));
    let programs = need!(GpuPrograms::find(&artifacts, Release::Trixie));
    let piglit = need!(Piglit::find(&artifacts));
    let choice = std::env::var(CHOICE).ok().filter(|choice| !choice.is_empty());
    let tests = chosen(&piglit, choice.as_deref());
    assert!(!tests.is_empty(), "{CHOICE} matches no test");
    let runtime = piglit.runtime(programs.runtime());
    let model = Under::model(&artifacts, GPU).unwrap();
    let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let loopback = Under::loopback(&artifacts, daemon.socket()).unwrap();
    let (mut passed, mut differ) = (0, Vec::new());
    for test in &tests {
        let name = test.strip_prefix(piglit.root()).unwrap().display();
        let [native, ours] = [&model, &loopback].map(|under| {
            let mut command = under.command(&runtime, &piglit.tester()).unwrap();
            command.arg(test).env("OCL_ICD_VENDORS", programs.opencl_vendors());
            // As for OpenCL's mapped buffers (docs/limits.md).
            command.env("VIRTIO_KFD_REGISTER", "adopt");
            match run(command, LIMIT) {
                Ok(output) => results(&String::from_utf8_lossy(&output.stdout)),
                Err(error) => vec![format!("{error:#}").lines().next().unwrap_or_default().to_owned()],
            }
        });
        let passes = native.last().is_some_and(|last| last == piglit::PASS);
        println!("{name}: natively {:?}{}", native.last(), if native == ours { "" } else { ", DIFFERS" });
        passed += usize::from(passes);
        if native != ours || (choice.is_none() && !passes) {
            differ.push(format!("{name}: natively {native:?}, in loop-back {ours:?}"));
        }
    }
    println!("{} tests, {passed} pass natively, {} end otherwise in loop-back", tests.len(), differ.len());
    assert!(differ.is_empty(), "{}\n{}", differ.join("\n"), daemon.report());
}
