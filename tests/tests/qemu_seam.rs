//! Runtimes that carry AMD's thunk inside, in an unmodified guest: rocminfo, a program on ROCr's API and one on `/dev/kfd` itself,
//! over `libkfd_preload.so`. Each must print what it prints natively on the model.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "rocr/expected.rs"]
#[allow(dead_code, reason = "shared with the tests of other runtimes")]
mod expected;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::installed::{PLACE, command, install};
use virtio_kfd_tests::native::{INSIDE, runtime, text};
use virtio_kfd_tests::parts::{package_path, user};
use virtio_kfd_tests::rocminfo::{differences, gpus};
use virtio_kfd_tests::seam_guest::{add_library, on_library};
use virtio_kfd_tests::transcript::{Outcome, compare};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Under, Vm, need};

const PROFILE: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(400);

/// What a guest's kernel must not say.
const COMPLAINTS: &str = "WARNING:|BUG:|Oops|freeing invalid";

/// Buffers of many.c that lose a half.
const HALVES: usize = 20;

/// Queues of the section "many" of `rocr`: each has a save area of 20 MiB, which is memory of the guest.
const QUEUES: &str = "16";

fn source(name: &str) -> PathBuf {
    package_path("tests/c").join(name)
}

fn lines(text: &str) -> Outcome {
    Outcome { lines: text.lines().map(str::to_owned).collect(), error: None }
}

struct Stack {
    artifacts: Artifacts,
    daemon: Daemon,
    guest: Guest,
}

impl Stack {
    /// What a command prints on our `/dev/kfd`, run by an ordinary user.
    #[track_caller]
    fn run(&self, command: &str) -> String {
        let begin = Instant::now();
        let asked = user(&on_library("", command)).limit(LIMIT);
        let output = self.guest.run(&asked).unwrap();
        let output =
            output.checked().unwrap_or_else(|error| panic!("{command}: {error:#}\n{}", self.daemon.report()));
        println!("{command}: {:?}", begin.elapsed());
        output.text()
    }

    fn root(&self, script: &str) -> String {
        self.guest.run(&Command::shell(script)).unwrap().checked().unwrap().text()
    }

    fn native(&self, set: &str, program: &Path, arguments: &[&str]) -> String {
        let under = Under::model(&self.artifacts, PROFILE).unwrap();
        let mut command = under.command(&runtime(&self.artifacts, set).unwrap(), program).unwrap();
        command.args(arguments);
        text(command, LIMIT).unwrap()
    }
}

/// The library for every program of the guest, by ld.so(8)'s own list: those that do not look for a GPU run as ever, and a runtime
/// needs no variable.
fn system_wide(stack: &Stack, sets: impl Iterator<Item = &'static str>) {
    stack.root(&format!("echo /{PLACE}/libkfd_preload.so > /etc/ld.so.preload"));
    for set in sets {
        let asked = user(&command(set, "rocminfo")).limit(LIMIT);
        let ours = stack.guest.run(&asked).unwrap().checked().unwrap().text();
        let native = stack.native(set, Path::new("rocminfo"), &[]);
        assert_eq!(gpus(&native).len(), 1, "{set}");
        for (native, ours) in gpus(&native).iter().zip(&gpus(&ours)) {
            assert!(differences(native, ours, &[]).is_empty(), "{set}: {ours:?}");
        }
        assert_eq!(gpus(&ours).len(), 1, "{set}: {ours}");
    }
    stack.root("rm /etc/ld.so.preload");
}

#[test]
fn runtimes_with_the_thunk_inside_in_a_guest() {
    let artifacts = need!(Artifacts::for_guest(&["libkfd_preload.so"], &["rocm-trixie"]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    let headers = artifacts.packages("rocm-trixie").unwrap();
    add_library(&artifacts, builder.overlay()).unwrap();
    let processes = CProgram::compile_alone(&headers, &source("seam.c")).unwrap();
    builder.overlay().file(&format!("{PLACE}/seam"), processes.path()).unwrap();
    let mut programs = Vec::new();
    for set in INSIDE {
        let root = match artifacts.packages(set) {
            Ok(root) => root,
            Err(error) => {
                println!("SKIP: package set {set}: {error:#}");
                continue;
            }
        };
        let program = CProgram::compile_for_rocr(&root, &source("rocr"), Place::Guest).unwrap();
        install(&artifacts, set, program.path(), "rocr", builder.overlay()).unwrap();
        let others = ["vmem", "many", "starts", "waves"].map(|name| {
            let file = source(&format!("{name}.c"));
            let program = CProgram::compile_for_rocr(&root, &file, Place::Guest).unwrap();
            install(&artifacts, set, program.path(), name, builder.overlay()).unwrap();
            (name, program)
        });
        install(&artifacts, set, &root.join("usr/bin/rocminfo"), "rocminfo", builder.overlay()).unwrap();
        programs.push((set, program, others));
    }
    let daemon = Daemon::start(&artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let guest = builder.memory_mib(1536).limit(4 * LIMIT).boot_on(&daemon).unwrap();
    let stack = Stack { artifacts, daemon, guest };
    stack.root(&format!("chmod 666 /dev/dri/renderD*; chmod -R a+rX /{PLACE}"));
    for (set, program, others) in &programs {
        let native = stack.native(set, Path::new("rocminfo"), &[]);
        let ours = stack.run(&command(set, "rocminfo"));
        let (native, ours) = (gpus(&native), gpus(&ours));
        assert_eq!((native.len(), ours.len()), (1, 1), "{set}");
        for (native, ours) in native.iter().zip(&ours) {
            let differ = differences(native, ours, &[]);
            assert!(differ.is_empty(), "{set}: native | in the guest\n{}", differ.join("\n"));
        }
        println!("{set}: the GPU has {} lines", ours.iter().map(|gpu| gpu.lines.len()).sum::<usize>());

        let native = lines(&stack.native(set, program.path(), &[QUEUES]));
        let ours = lines(&stack.run(&format!("{} {QUEUES} 2>/dev/null", command(set, "rocr"))));
        expected::check(&format!("{set}, natively"), &native);
        expected::check(&format!("{set}, in the guest"), &ours);
        compare(&native, &ours, expected::NOT_LOCKED)
            .unwrap_or_else(|error| panic!("{set}: {error:#}\n{}", stack.daemon.report()));
        println!("{set}: {} lines of copies, barriers and waits", ours.lines.len());

        for (name, file) in others {
            let native = stack.native(set, file.path(), &[]);
            assert_eq!(native, stack.run(&format!("{} 2>/dev/null", command(set, name))), "{set}, {name}");
        }
        // What stops a queue is an exception, of which the runtime hears by the head of the queue's save area.
        let ours = stack.run(&format!("{} dispatches 2>/dev/null", command(set, "rocr")));
        assert_eq!(ours, expected::dispatches(PROFILE), "{set}");
        // Of some buffers many.c unmaps a half, which x86's account of memory types cannot follow (`untrack_pfn`) and tells of.
        let said = stack.root(&format!("dmesg | grep -E '{COMPLAINTS}' || true; dmesg -c > /dev/null"));
        let of_halves = said.lines().filter(|line| line.contains("freeing invalid memtype")).count();
        assert!(of_halves == said.lines().count() && of_halves <= HALVES, "{set}: {said}");
    }
    system_wide(&stack, programs.iter().map(|(set, ..)| *set));
    let mut natively = processes.command(&Under::model(&stack.artifacts, PROFILE).unwrap());
    natively.env_remove("LD_LIBRARY_PATH");
    assert_eq!(text(natively, LIMIT).unwrap(), stack.run(&format!("/{PLACE}/seam")));
    // The guest's kernel had nothing to complain of.
    assert_eq!(stack.root(&format!("dmesg | grep -E '{COMPLAINTS}' || true")), "");
}
