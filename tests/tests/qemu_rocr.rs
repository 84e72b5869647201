//! Debian's unmodified ROCr in an unmodified guest, of both releases, with the program of `rocr.rs`: it must print what it
//! prints natively on the model.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "rocr/expected.rs"]
mod expected;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use expected::{CLASSES, NOT_LOCKED, class_size};
use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::installed::{PLACE, command, install_from};
use virtio_kfd_tests::native::{SETS, runtime, text};
use virtio_kfd_tests::parts::{kernel_complaints, package_path, user};
use virtio_kfd_tests::transcript::{Outcome, compare};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Under, Vm, need};

const PROFILE: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(400);

/// Queues of the section "many": each has a save area of 20 MiB, which is memory of the guest.
const QUEUES: &str = "16";

/// Cases C32: what the section "children" prints (the last one: libhsakmt's openclose.c, a forked child has no connection).
const CHILDREN: &str = "= children
forked before: 8 of 8
forked and executed: 8 of 8
the parent meanwhile: 16 of 16
only forked, refused: 1 of 1
the parent goes on: yes
= end
";

fn source() -> PathBuf {
    package_path("tests/c/rocr")
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
    /// What a script prints, run by an ordinary user.
    #[track_caller]
    fn run(&self, script: &str) -> String {
        let output = self.guest.run(&user(script).limit(LIMIT)).unwrap();
        output
            .checked()
            .unwrap_or_else(|error| panic!("{script}: {error:#}\n{}", self.daemon.report()))
            .text()
    }

    fn root(&self, script: &str) -> String {
        self.guest.run(&Command::shell(script)).unwrap().checked().unwrap().text()
    }
}

/// The program with the set's own libraries.
fn in_guest(set: &str, arguments: &str) -> String {
    format!("{} {arguments} 2>/dev/null", command(set, "rocr"))
}

fn everything_is_as_natively(stack: &Stack, set: &str, program: &CProgram) {
    let under = Under::model(&stack.artifacts, PROFILE).unwrap();
    let mut command = under.command(&runtime(&stack.artifacts, set).unwrap(), program.path()).unwrap();
    command.arg(QUEUES);
    let native = lines(&text(command, LIMIT).unwrap());
    let begin = Instant::now();
    let ours = lines(&stack.run(&in_guest(set, QUEUES)));
    println!("{set}: {} lines in {:?}", ours.lines.len(), begin.elapsed());
    expected::check(&format!("{set}, natively"), &native);
    expected::check(&format!("{set}, in the guest"), &ours);
    compare(&native, &ours, NOT_LOCKED)
        .unwrap_or_else(|error| panic!("{set}: {error:#}\n{}", stack.daemon.report()));
}

/// `hsa_memory_copy` has no other way than to lock pageable memory: see `rocr.rs`.
fn synchronous_copies_are_refused(stack: &Stack, set: &str) {
    let found = stack.run(&in_guest(set, "refused"));
    let refusals = found.matches("to VRAM: HSA_STATUS_ERROR, from VRAM: HSA_STATUS_ERROR, 0 bytes changed\n");
    assert_eq!(refusals.count(), usize::try_from(CLASSES).unwrap(), "{found}");
    assert!(found.contains(&format!("{} bytes to VRAM", class_size(CLASSES - 1))), "{found}");
    assert!(found.ends_with("VRAM is as it was: yes\n= end\nfailures: 0\n"), "{found}");
}

#[test]
fn unmodified_runtimes_of_both_releases_in_a_guest() {
    let artifacts = need!(Artifacts::for_guest(&[], &[]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    let thunk = need!(artifacts.thunk());
    let mut programs = Vec::new();
    for set in SETS {
        let root = need!(artifacts.packages(set));
        let program = CProgram::compile_for_rocr(&root, &source(), Place::Guest).unwrap();
        // Our thunk comes before the set's own.
        let libraries = runtime(&artifacts, set).unwrap().with_libraries(thunk.parent().unwrap());
        install_from(&libraries, set, program.path(), "rocr", builder.overlay()).unwrap();
        programs.push((set, program));
    }
    let daemon = Daemon::start(&artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let guest = builder.memory_mib(1536).limit(4 * LIMIT).boot_on(&daemon).unwrap();
    let stack = Stack { artifacts, daemon, guest };
    stack.root(&format!("chmod 666 /dev/dri/renderD*; chmod -R a+rX /{PLACE}"));
    for (set, program) in &programs {
        everything_is_as_natively(&stack, set, program);
        synchronous_copies_are_refused(&stack, set);
        let begin = Instant::now();
        let kernels = stack.run(&in_guest(set, "kernels"));
        assert_eq!(kernels, expected::kernels(PROFILE), "{set}: {}", stack.daemon.report());
        println!("{set}, kernels: {:?}", begin.elapsed());
        // Dispatches that no GPU can run: see `rocr.rs`.
        let dispatches = stack.run(&in_guest(set, "dispatches"));
        assert_eq!(dispatches, expected::dispatches(PROFILE), "{set}: {}", stack.daemon.report());
        println!("{set}, dispatches: {:?}", begin.elapsed());
    }
    // With the guest's own loader, so that it can execute itself.
    let begin = Instant::now();
    let children = stack.run(&format!("/{PLACE}/{}/rocr children", SETS[0]));
    assert_eq!(children, CHILDREN, "{}", stack.daemon.report());
    println!("children: {:?}", begin.elapsed());
    // The guest's kernel had nothing to complain of.
    assert_eq!(kernel_complaints(&stack.guest).unwrap(), "");
}
