//! Several processes of an unmodified guest at once over `libkfd_preload.so`: forks, executed programs, daemons that close all descriptors,
//! processes without a descriptor left, and memory that one process of ROCr 7.2.4 makes and another one uses. Each program prints what it
//! prints natively on the model, and counts itself what the kernel does otherwise.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::Path;
use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::installed::{PLACE, command, install};
use virtio_kfd_tests::native::{INSIDE, runtime, text};
use virtio_kfd_tests::parts::{OPEN_TO_USERS, Part, kernel_complaints, package_path, run_parts, user};
use virtio_kfd_tests::seam_guest::{add_library, on_library};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Under, Vm, need};

const PROFILE: &str = "gfx906";

/// For one program; a guest's CPU may be emulated.
const LIMIT: Duration = Duration::from_secs(400);

struct Stack {
    artifacts: Artifacts,
    daemon: Daemon,
    guest: Guest,
    device: CProgram,
    shapes: CProgram,
    /// By set.
    shared: Vec<(&'static str, CProgram)>,
}

impl Stack {
    /// What a command prints on our `/dev/kfd`, run by an ordinary user with some variables.
    #[track_caller]
    fn run(&self, variables: &str, command: &str) -> String {
        let output = self.guest.run(&user(&on_library(variables, command)).limit(LIMIT)).unwrap();
        let report = || format!("{command}\n{}", self.daemon.report());
        output.checked().unwrap_or_else(|error| panic!("{error:#}\n{}", report())).text()
    }

    fn native(&self, program: &CProgram, arguments: &[&str]) -> String {
        let mut command = program.command(&Under::model(&self.artifacts, PROFILE).unwrap());
        command.env_remove("LD_LIBRARY_PATH").args(arguments);
        text(command, LIMIT).unwrap()
    }

    fn root(&self, script: &str) -> String {
        self.guest.run(&Command::shell(script)).unwrap().checked().unwrap().text()
    }

    /// Runs device.c.
    #[track_caller]
    fn device(&self, variables: &str, part: &str) {
        let natively = self.native(&self.device, &[part]);
        assert!(natively.ends_with("= 0 wrong\n"), "{natively}");
        let ours = self.run(variables, &format!("/{PLACE}/device {part}"));
        assert_eq!(natively, ours, "natively, in the guest");
    }
}

fn copies(stack: &Stack) {
    stack.device("", "copies");
}

fn waiting(stack: &Stack) {
    stack.device("", "waiting");
}

fn paths(stack: &Stack) {
    stack.device("", "paths");
}

/// The guest has a render node of its own, and so the GPU's is another number.
fn files(stack: &Stack) {
    stack.device("", "files");
}

fn passing_on(stack: &Stack) {
    stack.device("", "passing");
}

fn closing(stack: &Stack) {
    stack.device("", "closing");
}

/// The way of Linux 6.6 and later to wait for the host, and the one before.
fn no_descriptor_left(stack: &Stack) {
    stack.device("", "exhausted");
    stack.device("VIRTIO_KFD_FENCES=descriptor", "exhausted");
}

fn shapes(stack: &Stack) {
    let natively = stack.native(&stack.shapes, &["1"]);
    let ours = stack.run("", &format!("/{PLACE}/shapes 1"));
    assert_eq!(natively, ours, "natively, in the guest");
    let before = stack.run("VIRTIO_KFD_FENCES=descriptor", &format!("/{PLACE}/shapes 1"));
    assert_eq!(natively, before, "natively, with descriptors of fences");
}

/// A container's process 1, whose number KFD knows as another one.
fn a_process_of_a_namespace(stack: &Stack) {
    let command = format!("unshare --pid --fork --mount-proc /{PLACE}/shapes one");
    let ours = stack.root(&on_library("", &command));
    assert_eq!(ours, "process: 1 0\nits child: 0\n");
}

/// dma-bufs by SCM_RIGHTS, and handles of ROCr's (hipIpcGetMemHandle).
fn memory_of_another_process(stack: &Stack) {
    for (set, program) in &stack.shared {
        let under = Under::model(&stack.artifacts, PROFILE).unwrap();
        let natively = under.command(&runtime(&stack.artifacts, set).unwrap(), program.path()).unwrap();
        let natively = text(natively, LIMIT).unwrap();
        let ours = stack.run("", &format!("{} 2>/dev/null", command(set, "shared")));
        assert_eq!(natively, ours, "{set}: natively, in the guest");
        assert!(ours.ends_with("the second one ended with 0\n= end\n"), "{ours}");
    }
}

const PARTS: &[Part<Stack>] = &[
    ("copies of descriptors", copies),
    ("waiting", waiting),
    ("paths", paths),
    ("files", files),
    ("passing on", passing_on),
    ("closing all", closing),
    ("no descriptor left", no_descriptor_left),
    ("forks and threads", shapes),
    ("a process of a namespace", a_process_of_a_namespace),
    ("memory of another process", memory_of_another_process),
];

#[test]
fn processes_of_a_guest() {
    let artifacts = need!(Artifacts::for_guest(&["libkfd_preload.so"], &["rocm-trixie"]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    let headers = artifacts.packages("rocm-trixie").unwrap();
    let overlay = builder.overlay();
    add_library(&artifacts, overlay).unwrap();
    let [device, shapes] = ["device", "shapes"].map(|name| {
        let source = package_path(&format!("tests/c/{name}.c"));
        let program = CProgram::compile_alone(&headers, &source).unwrap();
        overlay.file(&format!("{PLACE}/{name}"), program.path()).unwrap();
        program
    });
    let mut shared = Vec::new();
    for set in INSIDE {
        let Some(root) = found(&artifacts, set) else { continue };
        let source = package_path("tests/c/shared.c");
        let program = CProgram::compile_for_rocr(&root, &source, Place::Guest).unwrap();
        install(&artifacts, set, program.path(), "shared", overlay).unwrap();
        shared.push((set, program));
    }
    let daemon = Daemon::start(&artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let guest = builder.memory_mib(1024).limit(4 * LIMIT).boot_on(&daemon).unwrap();
    guest.run(&Command::shell(OPEN_TO_USERS)).unwrap().checked().unwrap();
    guest.run(&Command::shell(&format!("chmod -R a+rX /{PLACE}"))).unwrap().checked().unwrap();
    let stack = Stack { artifacts, daemon, guest, device, shapes, shared };
    let failed = run_parts(&stack, PARTS, |_| {});
    assert!(failed.is_empty(), "{failed:?}\n{}", stack.daemon.report());
    assert_eq!(kernel_complaints(&stack.guest).unwrap(), "");
}

/// The root of a package set, or a line that says that it is not there.
fn found(artifacts: &Artifacts, set: &str) -> Option<Box<Path>> {
    let root = artifacts.packages(set);
    root.inspect_err(|error| println!("SKIP: package set {set}: {error:#}")).ok().map(Into::into)
}
