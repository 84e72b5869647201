//! Memory of the application, adopted in place, in loop-back: nothing that is written meanwhile is lost, and nothing
//! is left behind. Both ways to hold writers, where this machine allows both. In a guest: `qemu_register.rs`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::native::{run, text};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::talk::{OnHost, Talk};
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, need};

const SET: &str = "rocm-trixie";
const PROFILE: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(300);

/// Environment variables of the library (docs/limits.md).
const REGISTER: &str = "VIRTIO_KFD_REGISTER";
const HOLD: &str = "VIRTIO_KFD_REGISTER_HOLD";

/// Rounds of the test that looks for what is left behind; the full measure is 100000.
const FLAT_VARIABLE: &str = "VIRTIO_KFD_TEST_REGISTRATIONS";

/// Arguments and what is printed at the end; natively the program prints the same.
const PARTS: &[Part<'_>] = &[
    (&["storm", "300"], "storm: nothing is lost\n"),
    (&["fork", "10"], "fork: children have copies of their own\n"),
    (&["heap", "600"], "heap: malloc goes on\n"),
    (&["replaced"], "replaced: what is the application's stays so\n"),
    (&["access", "12"], "access: it stays as the application set it\n"),
    (&["descriptors", "4"], "descriptors: none is needed\n"),
    (&["handlers", "20"], "handlers: nobody waits for ever\n"),
    (&["sizes"], "sizes: up to 256 MiB\n"),
];

/// The same where each page is a run of its own: more runs than 32768 in a blob are refused.
const SCATTERED: &[Part<'_>] = &[
    (&["storm", "100"], "storm: nothing is lost\n"),
    (&["replaced"], "replaced: what is the application's stays so\n"),
    (&["access", "12"], "access: it stays as the application set it\n"),
    (&["descriptors", "4"], "descriptors: none is needed\n"),
    (&["handlers", "20"], "handlers: nobody waits for ever\n"),
    (&["sizes", "16"], "sizes: up to 16 MiB\n"),
];

/// The further option, with which all of the above holds as well.
const VARIABLES: &str = "adopt-variables";

/// What only that takes.
const OF_VARIABLES: &[Part<'_>] = &[
    (&["locals", "50"], "locals: nothing is lost\n"),
    (&["growth"], "growth: stacks grow on\n"),
    (&["data", "40"], "data: nothing is lost\n"),
    (&["children", "20"], "children: they have stacks of their own\n"),
    (&["ends", "50"], "ends: stacks are used again\n"),
    (&["threads", "10"], "threads: what is theirs alone stays so\n"),
];

/// Environment variable: rounds of `locals` in place of 150; the full measure is 5000.
const LOCALS_VARIABLE: &str = "VIRTIO_KFD_TEST_LOCALS";

/// Arguments, and what is printed at the end.
type Part<'a> = (&'a [&'a str], &'a str);

struct Stack {
    artifacts: Artifacts,
    program: CProgram,
}

/// Whether this user has userfaultfd in full (userfaultfd(2)), with what the library needs of Linux 6.4.
fn faults_may_be_held() -> anyhow::Result<()> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(|it: char| !it.is_ascii_digit()).map(|it| it.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    anyhow::ensure!(version >= (6, 4), "userfaultfd of Linux {} does not do, 6.4 is needed", release.trim());
    let open = std::fs::File::open("/dev/userfaultfd").is_ok();
    let anyone = std::fs::read("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|it| it.starts_with(b"1"));
    let status = std::fs::read_to_string("/proc/self/status")?;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap_or("0");
    /// linux/capability.h
    const CAP_SYS_PTRACE: u32 = 19;
    let capable = u64::from_str_radix(effective.trim(), 16)? >> CAP_SYS_PTRACE & 1 == 1;
    anyhow::ensure!(open || anyone || capable, "this user may not use userfaultfd (/dev/userfaultfd)");
    Ok(())
}

fn stack() -> anyhow::Result<Stack> {
    let artifacts = Artifacts::for_thunk(&[], &[SET])?;
    let root = artifacts.packages(SET)?;
    let source = package_path("tests/c/registration");
    let program = CProgram::compile_directory(&root, &source, Place::Host).unwrap();
    Ok(Stack { artifacts, program })
}

impl Stack {
    fn command(&self, socket: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Command {
        let mut command = self.program.command(&Under::loopback(&self.artifacts, socket).unwrap());
        command.args(arguments).env(REGISTER, "adopt").envs(environment.iter().copied());
        command
    }

    /// All parts, with writers held in this way; says which way it was.
    fn parts(&self, parts: &[Part<'_>], hold: &str, environment: &[(&str, &str)]) {
        for (arguments, expected) in parts {
            let daemon = Daemon::start(&self.artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
            let mut command = self.command(daemon.socket(), arguments, environment);
            command.env(HOLD, hold).env("HSAKMT_DEBUG_LEVEL", "6");
            let output = run(command, LIMIT).unwrap();
            let (stdout, stderr) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(
                output.status.success() && stdout == *expected,
                "{arguments:?}, {hold}: {}\n{stdout}\n{stderr}\n{}",
                output.status,
                daemon.report()
            );
            // The first registration that comes so far tells.
            assert!(
                stderr.contains(&format!("held by {hold}")),
                "{arguments:?}: not held by {hold}: {stderr}"
            );
            let told = |line: &&str| line.contains("held by") || line.contains(" rounds in ");
            stderr.lines().filter(told).for_each(|line| println!("{}: {line}", arguments.join(" ")));
        }
    }
}

#[test]
fn nothing_is_lost_with_threads_stopped() {
    let stack = need!(stack());
    stack.parts(PARTS, "ptrace", &[]);
}

#[test]
fn nothing_is_lost_with_writers_held_by_faults() {
    let stack = need!(stack());
    need!(faults_may_be_held());
    stack.parts(PARTS, "userfaultfd", &[]);
}

#[test]
fn nothing_is_lost_in_memory_without_two_pages_side_by_side() {
    let stack = need!(stack());
    // Several mappings are exchanged for one, which always stops threads.
    stack.parts(SCATTERED, "ptrace", &[("VIRTIO_KFD_LOOPBACK_SCATTER", "1")]);
}

/// Local variables, of the thread that asks and of others, while all run and handle signals on these stacks; data of the
/// program; what children have of them, and what is left when they are given back.
#[test]
fn variables_are_adopted_where_it_is_asked_for() {
    let stack = need!(stack());
    let rounds = std::env::var(LOCALS_VARIABLE).unwrap_or_else(|_| "150".to_owned());
    let locals: &[&str] = &["locals", &rounds];
    stack.parts(&[(locals, "locals: nothing is lost\n")], "ptrace", &[(REGISTER, VARIABLES)]);
    stack.parts(OF_VARIABLES, "ptrace", &[(REGISTER, VARIABLES)]);
    stack.parts(PARTS, "ptrace", &[(REGISTER, VARIABLES)]);
    stack.parts(&[(&["unfit", "ptrace"], "unfit: refused\n")], "ptrace", &[(REGISTER, VARIABLES)]);
}

/// Several mappings of the blob for one of the application's.
#[test]
fn variables_are_adopted_in_memory_without_two_pages_side_by_side() {
    let stack = need!(stack());
    let environment = [(REGISTER, VARIABLES), ("VIRTIO_KFD_LOOPBACK_SCATTER", "1")];
    stack.parts(OF_VARIABLES, "ptrace", &environment);
}

/// Stacks, locked memory, files, holes; a debugger, and a thread that cannot be stopped. Natively the kernel takes most.
#[test]
fn what_cannot_be_adopted_is_refused_and_stays_as_it_is() {
    let stack = need!(stack());
    stack.parts(&[(&["unfit", "ptrace"], "unfit: refused\n")], "ptrace", &[]);
}

/// The same where writers are held without threads being stopped: what it takes is given back when they can be.
#[test]
fn what_is_adopted_while_threads_cannot_be_stopped_is_given_back_later() {
    let stack = need!(stack());
    need!(faults_may_be_held());
    stack.parts(&[(&["unfit", "userfaultfd"], "unfit: refused\n")], "userfaultfd", &[]);
}

/// That the program can go well at all: natively, where registration takes no pages away.
#[test]
fn the_program_is_right_natively() {
    let stack = need!(stack());
    for (arguments, expected) in PARTS.iter().chain(OF_VARIABLES) {
        let mut command = stack.program.command(&Under::model(&stack.artifacts, PROFILE).unwrap());
        command.args(*arguments);
        assert_eq!(text(command, LIMIT).unwrap(), *expected);
    }
}

#[test]
fn by_default_it_is_refused_and_the_option_is_named_once() {
    let stack = need!(stack());
    let daemon = Daemon::start(&stack.artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let stderr = |level: &str| {
        let mut command = stack.command(daemon.socket(), &["refused"], &[("HSAKMT_DEBUG_LEVEL", level)]);
        command.env_remove(REGISTER);
        let output = run(command, LIMIT).unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "refused: NOT_SUPPORTED, NOT_SUPPORTED\n");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert_eq!(stderr("0"), "", "two calls for every large copy: silence unless it is asked for");
    let warned = stderr("4");
    assert_eq!(warned.matches("hipHostRegister").count(), 1, "{warned}");
    assert!(warned.contains("VIRTIO_KFD_REGISTER=adopt"), "{warned}");
}

/// A mistyped option is not taken for none in silence.
#[test]
fn an_option_that_is_not_known_is_told_of_once() {
    let stack = need!(stack());
    let daemon = Daemon::start(&stack.artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let command =
        stack.command(daemon.socket(), &["refused"], &[("HSAKMT_DEBUG_LEVEL", "0"), (REGISTER, "1")]);
    let output = run(command, LIMIT).unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "refused: NOT_SUPPORTED, NOT_SUPPORTED\n");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains("VIRTIO_KFD_REGISTER is \"1\", expected adopt, adopt-variables or refuse"),
        "{said}"
    );
}

/// Descriptors and mappings of each process of the daemon, workers included.
fn holdings(daemon: &Daemon) -> BTreeMap<u32, (usize, usize)> {
    let count = |pid: u32| {
        let place = |name: &str| format!("/proc/{pid}/{name}");
        let descriptors = std::fs::read_dir(place("fd")).unwrap().count();
        (descriptors, std::fs::read_to_string(place("maps")).unwrap().lines().count())
    };
    daemon.processes().into_iter().map(|pid| (pid, count(pid))).collect()
}

#[test]
fn many_registrations_leave_nothing_on_either_side() {
    let stack = need!(stack());
    let rounds = std::env::var(FLAT_VARIABLE).unwrap_or_else(|_| "3000".to_owned());
    let limit = LIMIT.max(Duration::from_millis(10 * rounds.parse::<u64>().unwrap()));
    let daemon = Daemon::start(&stack.artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let command = stack.command(daemon.socket(), &["flat", &rounds, "ask"], &[]);
    let mut program = Box::new(OnHost::start(command, limit).unwrap());
    let mut line = || program.next_line(limit).unwrap();
    assert_eq!(line().as_deref(), Some("warm"));
    let before = holdings(&daemon);
    program.say("go on").unwrap();
    let mut line = || program.next_line(limit).unwrap();
    // The program itself has looked at its own mappings, descriptors and memory.
    assert_eq!(line().as_deref(), Some("done"), "{}", daemon.report());
    let after = holdings(&daemon);
    program.say("go on").unwrap();
    assert_eq!(program.next_line(limit).unwrap().as_deref(), Some("flat: nothing is left"));
    program.finish().unwrap();
    println!("{rounds} registrations; descriptors and mappings of each process: {before:?}, then {after:?}");
    for (pid, (descriptors, mappings)) in &after {
        let (fds, maps) = before[pid];
        // A thread's stack or an arena of malloc's may come late; a leak would be thousands.
        assert!(
            *descriptors <= fds + 4 && *mappings <= maps + 16,
            "process {pid}: {descriptors} descriptors, {mappings} mappings; before {fds}, {maps}"
        );
    }
}
