//! HIP and OpenCL in a guest: the programs of the suite, some of Piglit's tests and Debian's clinfo, by an ordinary user. Every line
//! is that of a native run on the model.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "wild/ends.rs"]
mod ends;
#[path = "opencl/piglit.rs"]
mod piglit;

use std::path::{Path, PathBuf};
use std::time::Duration;

use piglit::Piglit;
use virtio_kfd_tests::gpu_guest::{self, Program};
use virtio_kfd_tests::gpu_program::{Optimisation, Release};
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::process::Keeper;
use virtio_kfd_tests::transcript::assert_same_lines;
use virtio_kfd_tests::{Artifacts, Command, Daemon, GpuPrograms, Guest, Under, need};

const GPU: &str = "gfx906";

/// For one program; a guest's CPU may be emulated.
const LIMIT: Duration = Duration::from_secs(300);

/// The suite; with optimisation each program runs, without it those of [`USUAL`] or all.
const SUITE: &[&str] = &[
    "vectors", "matrix", "reduce", "sort", "lanes", "integers", "floats", "doubles", "halves", "scratch",
    "atomics", "printf", "buffers", "memory", "streams",
];

/// What runs without optimisation each time: what differs from loop-back is memory and doorbells, and each program takes ten times
/// as long on an emulated CPU.
const USUAL: &[&str] = &["scratch", "reduce", "atomics", "printf", "streams"];

/// `all` runs all programs without optimisation as well.
const LEVELS: &str = "VIRTIO_KFD_TEST_LEVELS";

/// Tests of Piglit; tests/opencl_piglit.rs runs more, but none with macros of OpenCL C as the last two.
const PIGLIT: &[&str] = &["calls.cl", "local-memory.cl", "load-hi16.cl"];

/// The OpenCL programs and what they are told besides how their kernels are compiled.
const OPENCL: &[(&str, &str)] = &[("kernels", ""), ("maths", ""), ("memory", ""), ("profiling", "loose")];

/// The line of clinfo that says how much memory is free, and how often it is looked at again.
const FREE: &str = "Global free memory (AMD)";
const MORE_LOOKS: u32 = 3;

fn line_of<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find(|line| line.trim_start().starts_with(name))
}

fn source(place: &str) -> PathBuf {
    package_path(&format!("tests/{place}"))
}

#[track_caller]
fn same(what: &str, native: &str, guest: &str) {
    assert_same_lines(what, ("native", "guest"), native, guest);
}

#[test]
fn programs_give_the_native_results() {
    let artifacts = need!(Artifacts::for_guest(&[], &[]));
    let trixie = need!(GpuPrograms::find(&artifacts, Release::Trixie));
    need!(GpuPrograms::find(&artifacts, Release::Bookworm));
    need!(artifacts.thunk());
    let bookworm = need!(GpuPrograms::find(&artifacts, Release::Bookworm));
    let mut programs = Vec::new();
    let all = std::env::var(LEVELS).is_ok_and(|levels| levels == "all");
    for (name, optimisation) in SUITE.iter().flat_map(|name| Optimisation::ALL.map(|how| (name, how))) {
        if optimisation == Optimisation::None && !all && !USUAL.contains(name) {
            continue;
        }
        let source = source(&format!("hip/{name}.hip"));
        let program = Program::hip(&artifacts, &source, GPU, optimisation).unwrap();
        programs.push((program, Vec::new()));
    }
    // Code objects that OpenCL programs load.
    let mut data = Vec::new();
    for (name, more) in OPENCL {
        let file = trixie.opencl(&source(&format!("opencl/{name}.c"))).unwrap();
        let code = bookworm.opencl_kernels(&file, name, GPU, Optimisation::None).unwrap();
        let there = data_of(&format!("opencl-{name}.co"), &code);
        let unoptimised = [&there.place(), code.to_str().unwrap()].map(|place| format!("@{place}"));
        let optimised = ["-O3", "-O3"].map(str::to_owned);
        for (level, [guest, native]) in [("-O0", unoptimised), ("-O3", optimised)] {
            let program = Program {
                name: format!("opencl-{name}{level}"),
                file: file.clone(),
                arguments: vec![guest, (*more).to_owned()],
                adopts: *name == "memory",
            };
            programs.push((program, vec![native, (*more).to_owned()]));
        }
        data.push(there);
    }
    let wild = data_of("wild", &trixie.hip(&source("wild/wild.hip"), GPU, Optimisation::Full).unwrap());
    let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let of_piglit = match Piglit::find(&artifacts) {
        Ok(piglit) => piglit_files(&piglit),
        Err(error) => {
            println!("skipped: Piglit's tests: {error:#}");
            Vec::new()
        }
    };
    let suite = programs.iter().map(|(program, _)| program);
    let in_image: Vec<Program> = suite.chain(&data).chain(&of_piglit).chain([&wild]).cloned().collect();
    let builder = need!(gpu_guest::describe(&artifacts, &in_image));
    let guest = builder.limit(Duration::from_secs(3000)).boot_on(&daemon).unwrap();
    gpu_guest::open_to_all(&guest).unwrap();

    let runtime = trixie.runtime();
    let native = |program: &Path, arguments: &[String]| {
        let mut command = Under::model(&artifacts, GPU).unwrap().command(&runtime, program).unwrap();
        command.args(arguments).env("OCL_ICD_VENDORS", trixie.opencl_vendors());
        text(command, LIMIT).unwrap()
    };
    for (program, on_host) in &programs {
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
        same(name, &native(&program.file, on_host), &found);
        println!("{name} ({} ms)\n{found}", output.exit.wall_ms);
    }

    // The guest has other CPUs than the host, of which clinfo says nothing. It says how much memory is free: what the program before
    // had is, once its worker has ended.
    daemon.wait_for_workers(0, LIMIT).unwrap();
    let expected = native(Path::new("clinfo"), &[]);
    let clinfo = || {
        let output = gpu_guest::run(&guest, "clinfo", &[], LIMIT).unwrap();
        assert!(output.success(), "{output}\n{}", daemon.report());
        assert!(output.text().contains("gfx906:sramecc-:xnack-"), "{output}");
        output.text()
    };
    let mut found = clinfo();
    // What clinfo itself has just freed may not be back yet, since the guest's kernel gives buffers back in the background.
    for _ in 0..MORE_LOOKS {
        if line_of(&expected, FREE) == line_of(&found, FREE) {
            break;
        }
        found = clinfo();
    }
    same("clinfo", &expected, &found);

    let directory = Path::new(&wild.place()).parent().unwrap().to_str().unwrap().to_owned();
    for name in PIGLIT.iter().filter(|_| !of_piglit.is_empty()) {
        let call = format!("LD_LIBRARY_PATH={directory} {directory}/cl-program-tester {directory}/{name}");
        let output = gpu_guest::run(&guest, &call, &[], LIMIT).unwrap();
        let results = piglit::results(&output.text());
        assert_eq!(
            results.last().map(String::as_str),
            Some(piglit::PASS),
            "{name}: {output}\n{}",
            daemon.report()
        );
        println!("Piglit's {name}: {} results ({} ms)", results.len(), output.exit.wall_ms);
    }

    wild_kernels(&Wild {
        artifacts: &artifacts,
        guest: &guest,
        daemon: &daemon,
        program: &wild,
        programs: &trixie,
    });

    let kernel = guest.run(&Command::shell("dmesg | grep -E 'WARNING:|BUG:|Oops' || true")).unwrap();
    assert_eq!(kernel.text(), "", "the guest's kernel had nothing to complain of");
}

fn piglit_files(piglit: &Piglit) -> Vec<Program> {
    let mut files = vec![data_of("cl-program-tester", &piglit.tester())];
    for library in piglit.libraries() {
        let file = library.canonicalize().unwrap();
        files.push(data_of(library.file_name().unwrap().to_str().unwrap(), &file));
    }
    let programs = piglit.programs().unwrap();
    for name in PIGLIT {
        files.push(data_of(name, programs.iter().find(|path| path.ends_with(name)).unwrap()));
    }
    files
}

/// A file for the guest.
fn data_of(name: &str, file: &Path) -> Program {
    Program { name: name.to_owned(), file: file.to_owned(), arguments: Vec::new(), adopts: false }
}

/// What is needed to run kernels that go wrong.
struct Wild<'a> {
    artifacts: &'a Artifacts,
    guest: &'a Guest,
    daemon: &'a Daemon,
    program: &'a Program,
    programs: &'a GpuPrograms,
}

/// Kernels that go wrong are reported to their own process (as in `hip_wild`), or can be killed, while one neighbour in the same
/// guest and one in another VM (a loop-back program with a daemon of its own) run right ones all the time.
fn wild_kernels(wild: &Wild<'_>) {
    let (guest, daemon, place) = (wild.guest, wild.daemon, wild.program.place());
    let directory = tempfile::tempdir().unwrap();
    let (log, stop) = (directory.path().join("neighbour"), directory.path().join("stop"));
    let vm = Daemon::start(wild.artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let under = Under::loopback(wild.artifacts, vm.socket()).unwrap();
    let mut command = under.command(&wild.programs.runtime(), &wild.program.file).unwrap();
    command.arg("keep").arg(&stop);
    let outside = Keeper::start(command, &log, 10 * LIMIT).unwrap();
    let keep = Command::new(&place).args(&["keep", "/tmp/stop"]).limit(10 * LIMIT);
    let mut inside = guest.spawn(&keep).unwrap();
    inside.wait_for("at work", LIMIT).unwrap();

    let run = |kind: &str| {
        // The shell's status of a process that ended with a signal is 128 and its number.
        gpu_guest::run(guest, &format!("{place} {kind} 2>&1; echo status $?"), &[], LIMIT).unwrap().text()
    };
    for (kind, said) in ends::ABORTED {
        let text = run(kind);
        assert!(text.contains(said) && text.ends_with("status 134\n"), "{kind}: {text}\n{}", daemon.report());
    }
    assert_eq!(run("absurd"), format!("{}status 1\n", ends::ABSURD));
    // One that never ends takes the host's CPUs: others go on, and it can be killed.
    let mut endless = guest.spawn(&Command::new(&place).arg("loop").limit(10 * LIMIT)).unwrap();
    endless.wait_for("loop", LIMIT).unwrap();
    let beside = run("fine");
    assert!(beside.ends_with("results: right\nstatus 0\n"), "beside: {beside}\n{}", daemon.report());
    endless.kill().unwrap();
    assert_eq!(endless.wait().unwrap().exit.signal, Some(9));
    let after = run("fine");
    assert!(after.ends_with("results: right\nstatus 0\n"), "afterwards: {after}\n{}", daemon.report());

    guest.run(&Command::shell("touch /tmp/stop")).unwrap().checked().unwrap();
    let inside = inside.wait().unwrap();
    assert!(inside.success() && inside.text() == ends::KEPT, "{inside}\n{}", daemon.report());
    std::fs::write(&stop, "").unwrap();
    let status = outside.wait().unwrap();
    assert_eq!(
        (status.code(), &*std::fs::read_to_string(&log).unwrap()),
        (Some(0), ends::KEPT),
        "{}",
        vm.report()
    );
}
