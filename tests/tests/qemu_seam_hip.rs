//! HIP 6.4.3 and 7.2.4, on runtimes that carry AMD's thunk inside, in an unmodified guest over `libkfd_preload.so`: the programs of
//! the suite (tests/hip) by an ordinary user. Every line is that of a native run on the model.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::PathBuf;
use std::time::Duration;

use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::{kernel_complaints, package_path};
use virtio_kfd_tests::{Artifacts, Daemon, GpuPrograms, Under, gpu_guest, need, seam_guest};

const GPU: &str = "gfx906";

/// For one program; a guest's CPU may be emulated, and the first program compiles the runtime's own kernels.
const LIMIT: Duration = Duration::from_secs(400);

/// What differs from loop-back is memory and doorbells, so one optimisation will do, and one program without, which lives in
/// scratch.
const SUITE: &[(&str, Optimisation)] = &[
    ("vectors", Optimisation::Full),
    ("matrix", Optimisation::Full),
    ("reduce", Optimisation::Full),
    ("sort", Optimisation::Full),
    ("lanes", Optimisation::Full),
    ("integers", Optimisation::Full),
    ("floats", Optimisation::Full),
    ("doubles", Optimisation::Full),
    ("halves", Optimisation::Full),
    ("scratch", Optimisation::Full),
    ("scratch", Optimisation::None),
    ("atomics", Optimisation::Full),
    ("printf", Optimisation::Full),
    ("buffers", Optimisation::Full),
    ("memory", Optimisation::Full),
    ("streams", Optimisation::Full),
];

/// The programs of a usual run, by what they use of the path through the guest. Each has a runtime to start, which takes an
/// emulated CPU some twenty seconds.
const USUAL: &[(&str, Optimisation)] = &[
    ("reduce", Optimisation::Full),
    ("scratch", Optimisation::None),
    ("atomics", Optimisation::Full),
    ("printf", Optimisation::Full),
    ("memory", Optimisation::Full),
    ("streams", Optimisation::Full),
];

/// With `all` in it every program of [`SUITE`] runs.
const LEVELS: &str = "VIRTIO_KFD_TEST_LEVELS";

fn source(name: &str) -> PathBuf {
    package_path(&format!("tests/hip/{name}.hip"))
}

/// Runs the programs in a guest of their own, and natively.
fn suite(release: Release) {
    let artifacts = need!(Artifacts::for_guest(&["libkfd_preload.so"], &[]));
    let programs = need!(GpuPrograms::find(&artifacts, release));
    let (set, runtime) = (release.set(), programs.runtime());
    let mut built = Vec::new();
    let all = std::env::var(LEVELS).is_ok_and(|levels| levels == "all");
    for (name, optimisation) in if all { SUITE } else { USUAL } {
        let file = programs.hip(&source(name), GPU, *optimisation).unwrap();
        built.push((format!("{name}{}", optimisation.option()), file));
    }
    let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let guest = seam_guest::describe(&artifacts, release, &built)
        .unwrap()
        .limit(Duration::from_secs(3000))
        .boot_on(&daemon)
        .unwrap();
    gpu_guest::open_to_all(&guest).unwrap();
    let kept = artifacts.cache().path("comgr").unwrap();
    for (name, file) in &built {
        let under = Under::model(&artifacts, GPU).unwrap();
        let mut natively = under.command(&runtime, file).unwrap();
        natively.env("AMD_COMGR_CACHE_DIR", &kept);
        let native = text(natively, LIMIT).unwrap();
        assert!(native.ends_with(": all right\n"), "{name} on the model:\n{native}");
        let call = seam_guest::call(release, name);
        let output = gpu_guest::run(&guest, &call, &[], LIMIT).unwrap();
        let report = || format!("{output}\n{}\n{}", daemon.report(), guest.vm().report());
        assert!(output.success(), "{set}, {name}: {}", report());
        assert_eq!(native, output.text(), "{set}, {name}: natively, in the guest: {}", report());
        println!("{set}, {name}: {} lines, {} ms", native.lines().count(), output.exit.wall_ms);
    }
    assert_eq!(kernel_complaints(&guest).unwrap(), "", "the guest's kernel had nothing to complain of");
}

#[test]
fn hip_6_4_gives_the_native_results() {
    suite(Release::Forky);
}

#[test]
fn hip_7_2_gives_the_native_results() {
    suite(Release::Experimental);
}
