//! The KFD-level seam: Debian's unmodified rocminfo over AMD's own thunk, which runs on `libkfd_preload.so` in loop-back and,
//! natively, on the model. With ROCr 6.4 and 7.2 the thunk is inside the runtime, so that no other library of ours
//! could reach them. Expected: the native output, of which no line may differ.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "rocr/expected.rs"]
#[allow(dead_code, reason = "shared with the tests of other runtimes")]
mod expected;

use std::path::{Path, PathBuf};
use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::{INSIDE, runtime, text};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::rocminfo::{gpus, system};
use virtio_kfd_tests::transcript::{Outcome, compare};
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Runtime, SharedVm, Under, need};

const LIMIT: Duration = Duration::from_secs(240);

/// The runtimes with the thunk inside, and one that has AMD's thunk beside it.
fn sets() -> impl Iterator<Item = &'static str> {
    INSIDE.into_iter().chain(["rocm-trixie"])
}

macro_rules! parts {
    ($artifacts:ident) => {
        let $artifacts = need!(Artifacts::for_daemon(&["libkfd_preload.so", "kfd-loopback-vm"], &[]));
    };
}

/// Runs rocminfo natively and in loop-back on a profile, and compares all of what it prints.
fn same_everywhere(artifacts: &Artifacts, set: &str, profile: &str) {
    let runtime = runtime(artifacts, set).unwrap();
    let rocminfo = |under: &Under<'_>| text(under.command(&runtime, Path::new("rocminfo")).unwrap(), LIMIT);
    let native = rocminfo(&Under::model(artifacts, profile).unwrap())
        .unwrap_or_else(|error| panic!("{set}, {profile}: {error:#}"));
    let daemon = Daemon::start(artifacts, &format!("model:{profile}"), &[]).unwrap();
    let ours = rocminfo(&Under::seam(artifacts, daemon.socket()).unwrap())
        .unwrap_or_else(|error| panic!("{set}, {profile}: {error:#}\n{}", daemon.report()));
    assert!(!gpus(&native).is_empty(), "{set}, {profile}:\n{native}");
    assert!(gpus(&native).iter().all(|gpu| gpu.lines.len() > 60), "{set}, {profile}: whole sections");
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    for (number, (native, ours)) in lines(&native).iter().zip(&lines(&ours)).enumerate() {
        assert_eq!(native, ours, "{set}, {profile}: line {number}: native, loop-back");
    }
    assert_eq!(native, ours, "{set}, {profile}");
}

#[test]
fn rocminfo_is_the_same_natively_and_in_loopback() {
    parts!(artifacts);
    let mut ran = 0;
    for set in sets() {
        // A suite that has moved on must not fail the others.
        if let Err(error) = artifacts.packages(set) {
            println!("SKIP: package set {set}: {error:#}");
            continue;
        }
        same_everywhere(&artifacts, set, "gfx906");
        ran += 1;
    }
    println!("{ran} of {} package sets compared", sets().count());
}

#[test]
fn other_boards_are_the_same_natively_and_in_loopback() {
    parts!(artifacts);
    let [_, newest] = INSIDE;
    need!(artifacts.packages(newest));
    for profile in ["gfx90a", "gfx942", "gfx1100", "gfx906x2", "gfx906x2-pcie"] {
        same_everywhere(&artifacts, newest, profile);
    }
}

fn source(name: &str) -> PathBuf {
    package_path("tests/c").join(name)
}

/// A set's runtime and a program on its API. None, and a line that says so, without the package set: a suite that has moved on
/// must not fail the others.
fn on_rocr(artifacts: &Artifacts, set: &str, file: &str) -> Option<(Runtime, CProgram)> {
    match artifacts.packages(set) {
        Ok(root) => {
            let program = CProgram::compile_for_rocr(&root, &source(file), Place::Guest).unwrap();
            Some((runtime(artifacts, set).unwrap(), program))
        }
        Err(error) => {
            println!("SKIP: package set {set}: {error:#}");
            None
        }
    }
}

/// ROCr's public API with the thunk inside: copies byte by byte, barriers, waits, queue errors (see `rocr.rs`).
#[test]
fn copies_barriers_and_waits_are_as_natively() {
    parts!(artifacts);
    for set in INSIDE {
        let Some((runtime, program)) = on_rocr(&artifacts, set, "rocr") else { continue };
        let run = |under: &Under<'_>| -> anyhow::Result<Outcome> {
            let text = text(under.command(&runtime, program.path())?, LIMIT)?;
            Ok(Outcome { lines: text.lines().map(str::to_owned).collect(), error: None })
        };
        let native = run(&Under::model(&artifacts, "gfx906").unwrap()).unwrap();
        let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
        let ours = run(&Under::seam(&artifacts, daemon.socket()).unwrap())
            .unwrap_or_else(|error| panic!("{set}: {error:#}\n{}", daemon.report()));
        expected::check(&format!("{set}, natively"), &native);
        expected::check(&format!("{set}, in loop-back"), &ours);
        compare(&native, &ours, expected::NOT_LOCKED)
            .unwrap_or_else(|error| panic!("{set}: {error:#}\n{}", daemon.report()));
        println!("{set}: {} lines", ours.lines.len());
        // Kernels of the runtime's own; the sums are computed.
        let mut kernels =
            Under::seam(&artifacts, daemon.socket()).unwrap().command(&runtime, program.path()).unwrap();
        kernels.arg("kernels");
        let found =
            text(kernels, LIMIT).unwrap_or_else(|error| panic!("{set}: {error:#}\n{}", daemon.report()));
        assert_eq!(found, expected::kernels("gfx906"), "{set}");
    }
}

/// What a program prints in loop-back, which is what it prints natively. None, and a line that says so, without the package set.
#[track_caller]
fn as_natively(
    artifacts: &Artifacts,
    set: &str,
    profile: &str,
    file: &str,
    arguments: &[&str],
) -> Option<String> {
    let (runtime, program) = on_rocr(artifacts, set, file)?;
    let run = |under: &Under<'_>| {
        let mut command = under.command(&runtime, program.path()).unwrap();
        command.args(arguments);
        text(command, LIMIT)
    };
    let native = run(&Under::model(artifacts, profile).unwrap()).unwrap();
    let daemon = Daemon::start(artifacts, &format!("model:{profile}"), &[]).unwrap();
    let ours = run(&Under::seam(artifacts, daemon.socket()).unwrap())
        .unwrap_or_else(|error| panic!("{set}: {error:#}\n{}", daemon.report()));
    assert_eq!(native, ours, "{set}");
    Some(ours)
}

/// ROCr's virtual memory interface: memory without an address that is mapped by dma-bufs and libdrm. Every line is the native one.
#[test]
fn virtual_memory_is_as_natively() {
    parts!(artifacts);
    for set in INSIDE {
        let Some(ours) = as_natively(&artifacts, set, "gfx906", "vmem.c", &[]) else { continue };
        for done in ["came back: 1", "it has moved: 1", "and is another one: 1", "offset 0, size 1"] {
            assert!(ours.contains(done), "{set}: {done}:\n{ours}");
        }
    }
}

/// More VRAM that the CPU sees than a VMM has maps for. The numbers of wrong words are the program's own count; all of it is what
/// it prints natively.
#[test]
fn many_buffers_are_as_natively() {
    parts!(artifacts);
    for set in INSIDE {
        let Some(ours) = as_natively(&artifacts, set, "gfx906", "many.c", &[]) else { continue };
        assert!(ours.contains("by 4 threads: 0 wrong\n") && ours.ends_with("= end\n"), "{set}:\n{ours}");
    }
}

/// Case C38 on the runtime that has its thunk inside: each start is like the first, and the process does not grow.
#[test]
fn thirty_starts_are_as_natively() {
    parts!(artifacts);
    for set in INSIDE {
        let Some(ours) = as_natively(&artifacts, set, "gfx906", "starts.c", &[]) else { continue };
        let round = |round: u32| {
            format!(
                "start {round}: 0\na GPU: 1\nmemory: 0\nqueue: 0\nqueue ends: 0\nmemory ends: 0\nend {round}: 0\n"
            )
        };
        let flat = "no more descriptors: 1, threads: 1, 16 MiB of addresses more: 0\n";
        let expected: String = (0..30).map(round).chain([flat.to_owned()]).collect();
        assert_eq!(ours, expected, "{set}");
    }
}

/// What stops a queue on a GPU reaches the runtime's callback with the status that it has natively: with the thunk inside the
/// runtime hears of it by exceptions, that is by the heads of its queues' save areas, and by no other way.
#[test]
fn exceptions_of_queues_are_as_natively() {
    parts!(artifacts);
    for set in INSIDE {
        let Some(ours) = as_natively(&artifacts, set, "gfx906", "rocr", &["dispatches"]) else { continue };
        assert_eq!(ours, expected::dispatches("gfx906"), "{set}");
    }
}

/// Arguments of ioctls in memory that GPUs share, where the kernel copies them as any others; in a guest they have no pages that a
/// process could be read by from outside (`qemu_seam`).
#[test]
fn arguments_in_shared_memory_are_as_natively() {
    parts!(artifacts);
    for set in INSIDE {
        let Some(ours) = as_natively(&artifacts, set, "gfx906", "waves.c", &[]) else { continue };
        // A queue that stands still has its waves' state, one that runs has none (`dqm get_wave_state`).
        let states = ours.matches("its waves: ok, ").count();
        assert!(
            ours.starts_with("version: ok 1\nevent: ok\nset: ok\nwait: ok 0\n") && states >= 1,
            "{set}:\n{ours}"
        );
    }
}

/// A second start of the runtime in one process does what it does natively on a GPU whose firmware cannot be debugged (amdkfd asks
/// the gfx906 for firmware 459 of the MEC): on ROCr 6.4.3 and 7.2.4 it fails.
#[test]
fn a_second_start_is_as_natively_without_a_debugger() {
    parts!(artifacts);
    let directory = tempfile::tempdir().unwrap();
    let profile = directory.path().join("gfx906.toml");
    let text_of = include_str!("../../host-vhost/kfd-model/profiles/gfx906.toml");
    let old = text_of.replace("mec = 468\n", "mec = 458\n");
    assert_ne!(text_of, old);
    std::fs::write(&profile, old).unwrap();
    for set in INSIDE {
        let profile = profile.to_str().unwrap();
        let Some(ours) = as_natively(&artifacts, set, profile, "twice.c", &[]) else { continue };
        assert!(
            ours.starts_with("start 0: 0\nend 0: 0\nstart 1: ") && !ours.contains("start 1: 0\n"),
            "{set}:\n{ours}"
        );
    }
}

/// Copies of descriptors, fork, exec, threads and wrong arguments, by a program that uses libc alone. What it prints on the
/// model is what amdkfd does, but where docs and `kfd-seam` say otherwise: the two must agree.
#[test]
fn descriptors_and_processes_are_as_natively() {
    parts!(artifacts);
    let root = need!(artifacts.packages("rocm-trixie"));
    let program = CProgram::compile_alone(&root, &source("seam.c")).unwrap();
    let run = |under: &Under<'_>, arguments: &[&str]| {
        let mut command = program.command(under);
        command.env_remove("LD_LIBRARY_PATH").args(arguments);
        text(command, LIMIT)
    };
    let model = Under::model(&artifacts, "gfx906").unwrap();
    let native = run(&model, &["alone"]).unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let ours = run(&Under::seam(&artifacts, daemon.socket()).unwrap(), &["alone"])
        .unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    assert_eq!(native, ours);
    assert!(ours.contains("in a child: EBADF\n") && ours.ends_with("= end\n"), "{ours}");
}

/// A program that uses libc alone, with the kernel's headers.
fn alone(artifacts: &Artifacts, file: &str) -> Option<CProgram> {
    match artifacts.packages("rocm-trixie") {
        Ok(root) => Some(CProgram::compile_alone(&root, &source(file)).unwrap()),
        Err(error) => {
            println!("SKIP: package set rocm-trixie: {error:#}");
            None
        }
    }
}

/// What such a program prints natively on the model, then in loop-back. It counts by itself what the kernel does otherwise.
fn runs(artifacts: &Artifacts, program: &CProgram, native: &[&str], loopback: &[&str]) -> [String; 2] {
    let run = |under: &Under<'_>, arguments: &[&str]| {
        let mut command = program.command(under);
        command.env_remove("LD_LIBRARY_PATH").args(arguments);
        text(command, LIMIT)
    };
    let natively = run(&Under::model(artifacts, "gfx906").unwrap(), native).unwrap();
    let daemon = Daemon::start(artifacts, "model:gfx906", &[]).unwrap();
    let ours = run(&Under::seam(artifacts, daemon.socket()).unwrap(), loopback)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    for text in [&natively, &ours] {
        assert!(text.ends_with("= 0 wrong\n"), "{text}");
    }
    [natively, ours]
}

/// Copies of descriptors and their flags, waiting, paths from directories and by /proc, the files of sysfs, closing of everything,
/// no descriptor left. What is right is in the program, from the kernel's source (kfd_chardev.c, fs/).
#[test]
fn every_way_to_the_devices_is_the_kernels() {
    parts!(artifacts);
    let Some(program) = alone(&artifacts, "device.c") else { return };
    let parts = ["copies", "waiting", "paths", "files", "exhausted"];
    let [natively, ours] = runs(&artifacts, &program, &parts, &parts);
    assert_eq!(natively, ours);
    // Without one, the VM and its descriptors are in the process.
    let [natively, ours] = in_a_vm(&artifacts, &program, &[]);
    assert_eq!(natively, ours);
    assert!(ours.contains("= closing all\n") && ours.contains("= passing on\n"), "{ours}");
}

/// The same for the processes of one loop-back VM.
fn in_a_vm(artifacts: &Artifacts, program: &CProgram, arguments: &[&str]) -> [String; 2] {
    let daemon = Daemon::start(artifacts, "model:gfx906", &[]).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let vm = SharedVm::start(artifacts, daemon.socket(), directory.path(), LIMIT).unwrap();
    let run = |under: &Under<'_>| {
        let mut command = program.command(under);
        command.env_remove("LD_LIBRARY_PATH").args(arguments);
        let text = text(command, LIMIT)
            .unwrap_or_else(|error| panic!("{error:#}\n{}\n{}", vm.report(), daemon.report()));
        assert!(text.ends_with("= 0 wrong\n"), "{text}");
        text
    };
    [run(&Under::model(artifacts, "gfx906").unwrap()), run(&Under::seam(artifacts, vm.socket()).unwrap())]
}

/// Forks of all shapes, also beside threads that are in calls, executed programs, short processes, a timer's signals.
#[test]
fn processes_and_threads_at_once_are_the_kernels() {
    parts!(artifacts);
    let Some(program) = alone(&artifacts, "shapes.c") else { return };
    let [natively, ours] = runs(&artifacts, &program, &["10"], &["alone"]);
    assert!(natively.contains("of short processes failed: 0\n"), "{natively}");
    assert!(ours.contains("of the rounds failed: 0\n"), "{ours}");
    let [natively, ours] = in_a_vm(&artifacts, &program, &["2"]);
    assert_eq!(natively, ours);
}

/// The launcher gives a program the library, and says so where no library reaches it.
#[test]
fn the_launcher_says_what_it_cannot_reach() {
    parts!(artifacts);
    let root = need!(artifacts.packages("rocm-trixie"));
    let program = CProgram::compile_alone(&root, &source("seam.c")).unwrap();
    let launcher = source("../../../guest-thunk/kfd-preload/kfd-run");
    let library = artifacts.program("libkfd_preload.so").unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let run = |program: &Path, arguments: &[&str]| {
        let mut command = std::process::Command::new(&launcher);
        command.env("VIRTIO_KFD_PRELOAD", &library).env("VIRTIO_KFD_LOOPBACK", daemon.socket());
        command.arg(program).args(arguments);
        virtio_kfd_tests::native::run(command, LIMIT).unwrap()
    };
    let output = run(program.path(), &["alone"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.starts_with("open: ok\n"), "{said}\n{}", daemon.report());
    let agent = need!(artifacts.agent());
    let output = run(&agent, &[]);
    assert_eq!(output.status.code(), Some(65));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is linked statically: no library reaches it"));
    let output = run(Path::new("/nonexistent/program"), &[]);
    assert_eq!(output.status.code(), Some(127));
}

/// Without a host there is no `/dev/kfd`, and it is said why.
#[test]
fn no_host_is_a_clean_end() {
    parts!(artifacts);
    let [set, _] = INSIDE;
    need!(artifacts.packages(set));
    let runtime = runtime(&artifacts, set).unwrap();
    let nowhere = Under::seam(&artifacts, Path::new("/nonexistent/socket")).unwrap();
    let command = nowhere.command(&runtime, Path::new("rocminfo")).unwrap();
    let output = virtio_kfd_tests::native::run(command, LIMIT).unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("virtio-kfd: ") && said.contains("/nonexistent/socket"), "{said}");
    assert!(system(&said).iter().all(|line| !line.starts_with("Runtime Version")), "{said}");
}
