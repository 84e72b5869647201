//! Waiting in an unmodified guest: what it costs, and what events and clocks tell. The programs, and what they prove in loop-back:
//! `idle`, `events_and_clocks`, `smi`.
//!
//! One guest for all of it; a failure's message begins with the part's name.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

use kfd_model::debug::HsaHwExceptionData;
use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::guest::Running;
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::parts::{OPEN_TO_USERS, package_path, user};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Under, Vm, cpu_time, gpu_view, need};

const SET: &str = "rocm-trixie";
const PROFILE: &str = "gfx906";
const LIMIT: Duration = Duration::from_secs(240);

/// Where the programs lie in the guest.
const PROGRAMS: &str = "/opt/virtio-kfd";

/// How long nothing happens.
const IDLE: Duration = Duration::from_secs(10);

/// CPU time of a blocked wait in that time, on the host. What a guest's kernel counts for a process is no measure on an emulated
/// CPU: it has all the time in it that the host gave to others. How often the process ran is.
const OF_A_WAIT: Duration = Duration::from_millis(10);

/// How often threads of the process may run in that time: the one that is told that it is over, and few others.
const RUNS: u64 = 20;

/// A hundredth of a core in that time.
const OF_QUEUES: Duration = Duration::from_millis(100);

/// How much slower the median call may be beside blocked waits. One that was held up by a wait would last until that one's
/// event is set, which is after all calls, or for a turn on its ring, thousands of calls long; a machine with other work may
/// take several times as long for a call as before. The test prints it.
const DELAY: f64 = 10.0;

/// What an emulated guest may take more in that time while a process in it waits. The guest itself, with its timers and the
/// devices of the harness, takes more than this, and not always the same.
const OF_QEMU: Duration = Duration::from_millis(500);

/// A part of the test, with its name.
type Part = (&'static str, fn(&Stack));

struct Stack {
    artifacts: Artifacts,
    root: PathBuf,
    daemon: Daemon,
    guest: Guest,
    /// What QEMU takes while nothing happens in the guest.
    alone: Duration,
}

/// What a run of the program has shown.
struct Cost {
    /// What it printed before it was ready.
    said: Vec<String>,
    /// CPU time of daemon and worker while nothing happened.
    host: Duration,
    /// How often threads of the program ran meanwhile.
    runs: u64,
    /// QEMU's meanwhile.
    qemu: Duration,
}

fn source(name: &str) -> PathBuf {
    package_path(&format!("tests/c/{name}.c"))
}

impl Stack {
    fn qemu(&self) -> BTreeSet<u32> {
        BTreeSet::from([self.guest.vm().pid().unwrap()])
    }

    /// Starts a program of an ordinary user.
    fn spawn(&self, program: &str) -> Running {
        let script = format!("exec {PROGRAMS}/{program}");
        self.guest.spawn(&user(&script).talks().limit(LIMIT)).unwrap()
    }

    /// What it prints; it must succeed.
    fn run(&self, program: &str) -> String {
        let output = self.spawn(program).wait().unwrap();
        output
            .checked()
            .unwrap_or_else(|error| panic!("{program}: {error:#}\n{}", self.daemon.report()))
            .text()
    }

    fn cost(&self, program: &str) -> Cost {
        let mut process = self.spawn(program);
        let mut said = Vec::new();
        loop {
            match process.next_line(LIMIT).unwrap() {
                Some(line) if line == "ready" => break,
                Some(line) => said.push(line),
                None => panic!("{program} ended early: {said:?}\n{}", self.daemon.report()),
            }
        }
        let (host, qemu) = (self.daemon.processes(), self.qemu());
        let before = (cpu_time::of(&host).unwrap(), cpu_time::of(&qemu).unwrap());
        std::thread::sleep(IDLE);
        let host = cpu_time::since(&host, before.0).unwrap();
        let qemu = cpu_time::since(&qemu, before.1).unwrap();
        process.send(b"\n").unwrap();
        let used = process.next_line(LIMIT).unwrap().unwrap();
        let [_, time, runs] = used.split(' ').collect::<Vec<_>>()[..] else { panic!("{used}") };
        process.wait().unwrap().checked().unwrap();
        println!(
            "    {program}: the process ran {runs} times, for {time} us; {host:?} on the host; QEMU {qemu:?} (alone {:?})",
            self.alone
        );
        Cost { said, host, runs: runs.parse().unwrap(), qemu }
    }

    /// The guest prints what is printed natively.
    fn as_natively(&self, program: &str, arguments: &[&str]) {
        let host = CProgram::compile(&self.root, &source(program), Place::Host).unwrap();
        let mut native = host.command(&Under::model(&self.artifacts, PROFILE).unwrap());
        native.args(arguments);
        let native = text(native, LIMIT).unwrap();
        assert_eq!(self.run(&format!("{program} {}", arguments.join(" "))), native);
    }
}

fn a_blocked_wait_costs_nothing(stack: &Stack) {
    let cost = stack.cost("idle wait");
    assert!(cost.host < OF_A_WAIT && cost.runs <= RUNS, "{:?}, {} times", cost.host, cost.runs);
    assert!(cost.qemu < stack.alone + OF_QEMU, "{:?}", cost.qemu);
}

fn idle_queues_cost_nothing(stack: &Stack) {
    let cost = stack.cost("idle queues 64");
    assert!(cost.host < OF_QUEUES && cost.runs <= RUNS, "{:?}, {} times", cost.host, cost.runs);
    assert!(cost.qemu < stack.alone + OF_QEMU, "{:?}", cost.qemu);
}

fn blocked_waits_do_not_delay_calls(stack: &Stack) {
    let cost = stack.cost("idle waits 64");
    let [line] = cost.said.as_slice() else { panic!("{:?}", cost.said) };
    println!("    {line}");
    let ratio: f64 = line.strip_prefix("ratio ").unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(ratio < DELAY, "{line}");
}

fn clocks_and_time_stamps_agree(stack: &Stack) {
    stack.as_natively("clocks", &[]);
}

fn events_say_what_happened(stack: &Stack) {
    for mode in ["memory", "read-only", "mailboxes"] {
        stack.as_natively("exceptions", &[mode]);
    }
    let mut process = stack.spawn("exceptions hardware");
    let mut said = Vec::new();
    while let Some(line) = process.next_line(LIMIT).unwrap() {
        let Some(gpu_id) = line.strip_prefix("ready ") else {
            said.push(line);
            continue;
        };
        let gpu_id = gpu_id.parse().unwrap();
        let data = HsaHwExceptionData { reset_type: 0, reset_cause: 1, memory_lost: 1, gpu_id };
        assert_eq!(gpu_view::reset(&stack.daemon.gpus(), &data).unwrap(), 1);
    }
    assert!(said.contains(&"the GPU's node: 1, reset type 0, memory lost 1, cause 1".to_owned()), "{said:?}");
    process.wait().unwrap().checked().unwrap();
}

/// `smi` is what it is in loop-back.
fn streams_have_a_processs_faults(stack: &Stack) {
    stack.as_natively("smi", &[]);
}

#[test]
fn waiting_in_a_guest() {
    let artifacts = need!(Artifacts::for_guest(&[], &[SET]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    need!(artifacts.thunk());
    let root = artifacts.packages(SET).unwrap();
    let programs = ["idle", "clocks", "exceptions", "smi"]
        .map(|name| (name, CProgram::compile(&root, &source(name), Place::Guest).unwrap()));
    for (name, program) in &programs {
        let place = format!("{}/{name}", PROGRAMS.trim_start_matches('/'));
        builder.overlay().file(&place, program.path()).unwrap();
    }
    let daemon = Daemon::start_watched(&artifacts, &format!("model:{PROFILE}"), &[]).unwrap();
    let guest = builder
        // Each queue has a save area of some MiB, as natively.
        .memory_mib(3072)
        .limit(4 * LIMIT)
        .boot_on(&daemon)
        .unwrap();
    guest.run(&Command::shell(OPEN_TO_USERS).limit(LIMIT)).unwrap().checked().unwrap();
    let mut stack = Stack { artifacts, root, daemon, guest, alone: Duration::ZERO };
    std::thread::sleep(Duration::from_secs(1));
    let before = cpu_time::of(&stack.qemu()).unwrap();
    std::thread::sleep(IDLE);
    stack.alone = cpu_time::since(&stack.qemu(), before).unwrap();
    let parts: &[Part] = &[
        ("a blocked wait costs nothing", a_blocked_wait_costs_nothing),
        ("idle queues cost nothing", idle_queues_cost_nothing),
        ("blocked waits do not delay calls", blocked_waits_do_not_delay_calls),
        ("clocks and time stamps agree", clocks_and_time_stamps_agree),
        ("events say what happened", events_say_what_happened),
        ("streams have a process's faults", streams_have_a_processs_faults),
    ];
    let mut failed = Vec::new();
    for (name, part) in parts {
        println!("{name}");
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| part(&stack))) {
            let message = panic.downcast_ref::<String>().map_or("(no message)", String::as_str);
            failed.push(format!("{name}: {message}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
