//! HIP and OpenCL in a guest: the programs of the suite and Debian's clinfo, by an ordinary user. Every line is that of a
//! native run on the model.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use virtio_kfd_tests::gpu_guest::{self, Program};
use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::{Artifacts, Command, Daemon, GpuPrograms, Under, need};

const GPU: &str = "gfx906";

/// For one program; a guest's CPU may be emulated.
const LIMIT: Duration = Duration::from_secs(300);

/// What runs in the guest: what differs from loop-back is memory and doorbells, so one optimisation will do, and one program
/// without, which lives in scratch.
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

fn source(place: &str) -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    package.join("tests").join(place)
}

#[track_caller]
fn same(what: &str, native: &str, guest: &str) {
    let (native, guest): (Vec<&str>, Vec<&str>) = (native.lines().collect(), guest.lines().collect());
    let differ: Vec<String> = (0..native.len().max(guest.len()))
        .filter(|line| native.get(*line) != guest.get(*line))
        .map(|line| format!("line {line}: native {:?}, guest {:?}", native.get(line), guest.get(line)))
        .collect();
    assert!(differ.is_empty(), "{what}:\n{}", differ.join("\n"));
}

#[test]
fn programs_give_the_native_results() {
    let artifacts = need!(Artifacts::find());
    let trixie = need!(GpuPrograms::find(&artifacts, Release::Trixie));
    need!(GpuPrograms::find(&artifacts, Release::Bookworm));
    need!(artifacts.qemu());
    need!(artifacts.image());
    need!(artifacts.thunk());
    need!(artifacts.program("vhost-user-kfd"));
    need!(artifacts.program("libkfd_model_preload.so"));
    let mut programs: Vec<Program> = SUITE
        .iter()
        .map(|(name, optimisation)| {
            Program::hip(&artifacts, &source(&format!("hip/{name}.hip")), GPU, *optimisation).unwrap()
        })
        .collect();
    for (name, arguments) in [
        ("kernels", ["-O3", ""]),
        ("maths", ["-O3", ""]),
        ("memory", ["-O3", ""]),
        ("profiling", ["-O3", "loose"]),
    ] {
        let file = trixie.opencl(&source(&format!("opencl/{name}.c"))).unwrap();
        let arguments = arguments.map(str::to_owned).to_vec();
        let adopts = name == "memory";
        programs.push(Program { name: format!("opencl-{name}"), file, arguments, adopts });
    }
    let wild = Program {
        name: "wild".to_owned(),
        file: trixie.hip(&source("wild/wild.hip"), GPU, Optimisation::Full).unwrap(),
        arguments: Vec::new(),
        adopts: false,
    };
    let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let in_image: Vec<Program> = programs.iter().chain([&wild]).cloned().collect();
    let builder = need!(gpu_guest::describe(&artifacts, daemon.socket(), &in_image));
    let guest = builder
        .limit(Duration::from_secs(3000))
        .boot()
        .unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    gpu_guest::open_to_all(&guest).unwrap();

    let runtime = trixie.runtime();
    let native = |program: &Path, arguments: &[String]| {
        let mut command = Under::model(&artifacts, GPU).unwrap().command(&runtime, program).unwrap();
        command.args(arguments).env("OCL_ICD_VENDORS", trixie.opencl_vendors());
        text(command, LIMIT).unwrap()
    };
    for program in &programs {
        let name = &program.name;
        let output = gpu_guest::run(&guest, &program.call(), &program.arguments, LIMIT).unwrap();
        let found = output.text();
        let last = found.lines().last().unwrap_or_default();
        assert!(
            output.success() && last.ends_with(": all right"),
            "{name}: {output}\n{}\n{}",
            daemon.report(),
            guest.vm().report()
        );
        same(name, &native(&program.file, &program.arguments), &found);
        println!("{name} ({} ms)\n{found}", output.exit.wall_ms);
    }

    // The guest has other CPUs than the host, of which clinfo says nothing.
    let output = gpu_guest::run(&guest, "clinfo", &[], LIMIT).unwrap();
    assert!(output.success(), "{output}\n{}", daemon.report());
    assert!(output.text().contains("gfx906:sramecc-:xnack-"), "{output}");
    same("clinfo", &native(Path::new("clinfo"), &[]), &output.text());

    // A kernel of one process that never ends: others go on, and it can be killed.
    let mut endless = guest.spawn(&Command::new(&wild.place()).arg("loop").limit(2 * LIMIT)).unwrap();
    endless.wait_for("loop", LIMIT).unwrap();
    let beside = gpu_guest::run(&guest, &wild.place(), &["fine".to_owned()], LIMIT).unwrap();
    assert!(beside.success(), "beside an endless kernel: {beside}\n{}", daemon.report());
    endless.kill().unwrap();
    assert_eq!(endless.wait().unwrap().exit.signal, Some(9));
    // And one that faults.
    let faulty = gpu_guest::run(&guest, &wild.place(), &["store".to_owned()], LIMIT).unwrap();
    assert!(
        !faulty.success()
            && String::from_utf8_lossy(&faulty.stderr).contains("Memory access fault by GPU node-1"),
        "{faulty}"
    );
    let after = gpu_guest::run(&guest, &wild.place(), &["fine".to_owned()], LIMIT).unwrap();
    assert!(after.success(), "after a fault: {after}\n{}", daemon.report());

    let kernel = guest.run(&Command::shell("dmesg | grep -E 'WARNING:|BUG:|Oops' || true")).unwrap();
    assert_eq!(kernel.text(), "", "the guest's kernel had nothing to complain of");
}
