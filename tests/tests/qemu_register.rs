//! Memory of the application, adopted in place in an unmodified guest: the pages are a GUEST blob's of its own virtio_gpu
//! driver, so this is where the exchange has to hold. The program and what it proves: tests/c/registration.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::time::{Duration, Instant};

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::parts::{OPEN_TO_USERS, kernel_complaints, package_path, user};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Vm, need};

const SET: &str = "rocm-trixie";
const LIMIT: Duration = Duration::from_secs(240);
const PROGRAM: &str = "/opt/virtio-kfd/registration";

/// Environment variable: rounds of the storm in place of the 30 below.
const STORM_VARIABLE: &str = "VIRTIO_KFD_TEST_STORM";

/// Arguments and what is printed at the end.
const PARTS: &[(&str, &str)] = &[
    ("storm 30", "storm: nothing is lost"),
    ("fork 5 open", "fork: children have copies of their own"),
    ("heap 100", "heap: malloc goes on"),
    ("replaced", "replaced: what is the application's stays so"),
    ("access 6", "access: it stays as the application set it"),
    ("handlers 20", "handlers: nobody waits for ever"),
    ("sizes", "sizes: up to 256 MiB"),
    ("flat 100", "flat: nothing is left"),
    ("unfit", "unfit: refused"),
];

/// The same with the further option `adopt-variables`.
const OF_VARIABLES: &[(&str, &str)] = &[
    ("locals 10", "locals: nothing is lost"),
    ("growth", "growth: stacks grow on"),
    ("data 5", "data: nothing is lost"),
    ("children 5", "children: they have stacks of their own"),
    ("ends 10", "ends: stacks are used again"),
    ("heap 50", "heap: malloc goes on"),
    ("fork 3 open", "fork: children have copies of their own"),
    ("replaced", "replaced: what is the application's stays so"),
    ("access 6", "access: it stays as the application set it"),
    ("handlers 20", "handlers: nobody waits for ever"),
    ("flat 50", "flat: nothing is left"),
];

struct Stack {
    daemon: Daemon,
    guest: Guest,
}

impl Stack {
    fn root(&self, script: &str) -> String {
        let output = self.guest.run(&Command::shell(script).limit(LIMIT)).unwrap();
        output.checked().unwrap_or_else(|error| panic!("{script}: {error:#}")).text()
    }

    /// All parts, run by an ordinary user, which must say that writers were held in this way.
    fn parts(&self, parts: &[(&str, &str)], hold: &str, register: &str) {
        for (arguments, expected) in parts {
            let begin = Instant::now();
            let arguments = match std::env::var(STORM_VARIABLE) {
                Ok(rounds) if arguments.starts_with("storm") => format!("storm {rounds}"),
                _ if *arguments == "unfit" => format!("unfit {hold}"),
                _ => (*arguments).to_owned(),
            };
            let script =
                format!("VIRTIO_KFD_REGISTER={register} HSAKMT_DEBUG_LEVEL=6 {PROGRAM} {arguments} 2>&1");
            let output = self.guest.run(&user(&script).limit(LIMIT)).unwrap();
            let text = output.text();
            assert!(
                output.success() && text.lines().any(|line| line == *expected),
                "{arguments}, {hold}: {output}\n{}\n{}",
                self.root("dmesg | tail -20"),
                self.daemon.report()
            );
            let how = format!("held by {hold}");
            // The first registration that comes so far tells.
            assert!(text.contains(&how), "{arguments}: not {how}: {text}");
            text.lines().filter(|line| line.contains(" rounds")).for_each(|line| println!("    {line}"));
            println!("{arguments}, {hold}: {:?}", begin.elapsed());
        }
    }
}

#[test]
fn nothing_is_lost_in_a_guest() {
    let artifacts = need!(Artifacts::for_guest(&[], &[SET]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    need!(artifacts.thunk());
    let root = artifacts.packages(SET).unwrap();
    let program =
        CProgram::compile_directory(&root, &package_path("tests/c/registration"), Place::Guest).unwrap();
    builder.overlay().file(PROGRAM.trim_start_matches('/'), program.path()).unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let guest = builder.memory_mib(1536).limit(2 * LIMIT).boot_on(&daemon).unwrap();
    let stack = Stack { daemon, guest };
    stack.root(OPEN_TO_USERS);

    // As a distribution leaves it: no userfaultfd for users. And yama lets a process be traced by its ancestors only.
    stack.root("test ! -e /proc/sys/kernel/yama/ptrace_scope || echo 1 > /proc/sys/kernel/yama/ptrace_scope");
    stack.parts(PARTS, "ptrace", "adopt");
    stack.parts(OF_VARIABLES, "ptrace", "adopt-variables");
    // As docs/limits.md recommends it.
    stack.root("chmod 666 /dev/userfaultfd");
    stack.parts(PARTS, "userfaultfd", "adopt");

    // The guest's kernel had nothing to complain of.
    assert_eq!(kernel_complaints(&stack.guest).unwrap(), "");
}
