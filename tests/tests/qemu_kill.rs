//! kill -9 at random moments with an unmodified guest: of a process in it with busy queues, of its worker, of QEMU, of the daemon.
//! Nothing hangs, nothing is left behind, neighbours notice nothing, who survives is told once, and the next process works at
//! once. The program and loop-back: `kill_matrix`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::path::Path;
use std::time::{Duration, Instant};

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::guest::{Output, Running};
use virtio_kfd_tests::host::Holdings;
use virtio_kfd_tests::moments::{Moments, rounds};
use virtio_kfd_tests::parts::{OPEN_TO_USERS, PARTS_VARIABLE, kernel_complaints, package_path, user};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Vm, need};

const SET: &str = "rocm-trixie";
const LIMIT: Duration = Duration::from_secs(240);
const PROGRAM: &str = "/opt/virtio-kfd/busy";

/// Rounds of each kind in a guest where nobody asks for more. Each lasts seconds on an emulated CPU.
const ROUNDS: u32 = 4;

/// Rounds with a VM of their own.
const ROUNDS_OF_VMS: u32 = 1;

/// The latest moment: some are killed while they start, most at work.
const LATEST: Duration = Duration::from_secs(4);

/// What the host may take to be rid of processes.
const SOON: Duration = Duration::from_secs(30);

/// What a guest may take, and a program that lives as long as it: longer where more rounds are asked for.
fn life() -> Duration {
    LIMIT * rounds(ROUNDS).max(8)
}

/// A round with a VM of its own.
type Part = fn(&Artifacts, &Path, &mut Daemon, Moments, &mut Option<String>, u32) -> Moments;

struct Machine {
    guest: Guest,
    moments: Moments,
}

impl Machine {
    fn boot(artifacts: &Artifacts, program: &Path, daemon: &Daemon, moments: Moments) -> Machine {
        let mut builder = Vm::builder(artifacts).unwrap();
        builder.overlay().file(PROGRAM.trim_start_matches('/'), program).unwrap();
        let guest = builder.memory_mib(1024).limit(life()).boot_on(daemon).unwrap();
        guest.run(&Command::shell(OPEN_TO_USERS).limit(LIMIT)).unwrap().checked().unwrap();
        Machine { guest, moments }
    }

    fn command(mode: &str) -> Command {
        let script = format!("exec {PROGRAM} {mode}");
        user(&script).limit(LIMIT)
    }

    fn spawn(&self, mode: &str) -> Running {
        self.guest.spawn(&Self::command(mode).talks().limit(life())).unwrap()
    }

    /// Starts the program, and lets a random time pass: in every second round from when all its threads are at work on, so
    /// that these are met however slow the machine is.
    fn busy(&mut self, at_work: bool) -> (Running, Duration) {
        let mut busy = self.spawn("busy");
        if at_work {
            busy.wait_for("busy\n", LIMIT).unwrap();
        }
        (busy, self.moments.pass(LATEST))
    }

    /// A new process, which must work; what it prints.
    fn check(&self, daemon: &Daemon) -> String {
        let output = self.guest.run(&Self::command("check")).unwrap();
        output.checked().unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report())).text()
    }

    /// The first process of a VM: finds what that of the VM before found, if there was one.
    fn check_new(&self, daemon: &Daemon, fresh: &mut Option<String>, what: &str) {
        let found = self.check(daemon);
        assert!(found.starts_with("works\n"), "{what}: {found}");
        assert_eq!(found, *fresh.get_or_insert_with(|| found.clone()), "{what}");
    }

    /// The same until it prints what is expected: VRAM that was freed is back a little later.
    fn check_until(&self, daemon: &Daemon, expected: &str, what: &str) {
        let begin = Instant::now();
        loop {
            let found = self.check(daemon);
            assert!(found.starts_with("works\n"), "{what}: {found}");
            if found == expected {
                return;
            }
            assert!(begin.elapsed() < LIMIT, "{what}: {found}, expected {expected}");
        }
    }
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    // It may have ended by itself.
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// A process that has lost its GPU has been told so by every call, and its user once.
fn is_clean(output: &Output, what: &str) -> bool {
    let text = output.text();
    let lost = String::from_utf8_lossy(&output.stderr).matches("the connection to the host is lost").count();
    let told: Vec<&str> = text.lines().filter(|line| *line != "busy").collect();
    if !text.starts_with("busy\n") {
        // It had not got that far.
        let last = told.last().copied().unwrap_or_default();
        let clean = last.ends_with("ERROR, cannot go on") || last.ends_with("NOT_OPENED, cannot go on");
        assert!(clean && lost <= 1, "{what}: {output}");
        return false;
    }
    let expected = [
        "spinning: ERROR",
        "interrupted: ERROR",
        "copies: ERROR",
        "memory: ERROR",
        "waits: ERROR",
        "exception: SUCCESS",
        "afterwards: ERROR",
    ];
    let (last, calls) = told.split_last().unwrap();
    assert!(output.success() && calls == expected && *last == "close: SUCCESS", "{what}: {output}");
    assert_eq!(lost, 1, "{what}: {output}");
    true
}

fn processes_and_workers(machine: &mut Machine, daemon: &Daemon) {
    let fresh = machine.check(daemon);
    daemon.wait_for_workers(0, SOON).unwrap();
    let mut neighbour = machine.spawn("steady");
    neighbour.wait_for("busy", LIMIT).unwrap();
    let of_neighbour = daemon.workers();
    assert_eq!(of_neighbour.len(), 1);
    let beside = machine.check(daemon);
    let (rounds, mut at_work) = (rounds(ROUNDS), 0);
    for round in 0..rounds {
        let (busy, moment) = machine.busy(round % 2 == 1);
        let what = format!("process, round {round}, {moment:?}");
        busy.kill().unwrap();
        assert!(machine.check(daemon).starts_with("works\n"), "{what}");
        assert_eq!(busy.wait().unwrap().exit.signal, Some(9), "{what}");
        daemon.wait_for_workers(1, SOON).unwrap();
    }
    machine.check_until(daemon, &beside, "after processes");
    for round in 0..rounds {
        let must_be_at_work = round % 2 == 1;
        let (busy, moment) = machine.busy(must_be_at_work);
        let what = format!("worker, round {round}, {moment:?}");
        let begin = Instant::now();
        let worker = loop {
            if let Some(worker) = daemon.workers().difference(&of_neighbour).next() {
                break *worker;
            }
            assert!(begin.elapsed() < LIMIT, "{what}: no worker");
            std::thread::sleep(Duration::from_millis(2));
        };
        kill(worker);
        assert!(machine.check(daemon).starts_with("works\n"), "{what}");
        let was_at_work = is_clean(&busy.wait().unwrap(), &what);
        assert!(was_at_work || !must_be_at_work, "{what}");
        at_work += u32::from(was_at_work);
        daemon.wait_for_workers(1, SOON).unwrap();
    }
    machine.check_until(daemon, &beside, "after workers");
    println!("    {rounds} processes, {rounds} workers, {at_work} of these at work");
    assert!(at_work > 0 || rounds < 2);
    // Nothing of all this was the neighbour's business.
    neighbour.send(b"end\n").unwrap();
    let output = neighbour.wait().unwrap();
    let expected =
        "busy\nspinning: SUCCESS\ninterrupted: SUCCESS\ncopies: SUCCESS\nmemory: SUCCESS\nclose: SUCCESS\n";
    assert_eq!(output.text(), expected, "{output}");
    machine.check_until(daemon, &fresh, "after all");
    // The guest's kernel had nothing to complain of.
    assert_eq!(kernel_complaints(&machine.guest).unwrap(), "");
}

/// A VM with busy processes, one of which has all its threads at work, and the end of its QEMU: the daemon is as before.
fn qemu(
    artifacts: &Artifacts,
    program: &Path,
    daemon: &mut Daemon,
    moments: Moments,
    fresh: &mut Option<String>,
    round: u32,
) -> Moments {
    let before = daemon.settled(SOON).unwrap();
    let mut machine = Machine::boot(artifacts, program, daemon, moments);
    machine.check_new(daemon, fresh, &format!("QEMU, round {round}"));
    let starting = machine.spawn("busy");
    let (at_work, moment) = machine.busy(true);
    let what = format!("QEMU, round {round}, {moment:?}");
    let Machine { guest, moments } = machine;
    guest.kill();
    drop((starting, at_work));
    // Its device process may have ended with it; then there is a new one, which has to start.
    let same =
        |after: &Holdings| (after.processes, after.descriptors) == (before.processes, before.descriptors);
    let begin = Instant::now();
    let after = loop {
        let after = daemon.settled(SOON).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        if same(&after) || begin.elapsed() > SOON {
            break after;
        }
    };
    println!("    {what}: {before:?}, afterwards {after:?}");
    assert!(same(&after), "{what}: {before:?}, {after:?}\n{}", daemon.report());
    assert!(after.mappings <= before.mappings + 40, "{what}: {before:?}, {after:?}");
    moments
}

/// The end of the daemon while a process in the VM is at work: all that the daemon had started ends, the process is told, the
/// guest goes on without its GPU, and the next daemon serves the next VM.
fn daemon(
    artifacts: &Artifacts,
    program: &Path,
    daemon: &mut Daemon,
    moments: Moments,
    fresh: &mut Option<String>,
    round: u32,
) -> Moments {
    let mut machine = Machine::boot(artifacts, program, daemon, moments);
    machine.check_new(daemon, fresh, &format!("daemon, round {round}"));
    let (busy, moment) = machine.busy(true);
    let what = format!("daemon, round {round}, {moment:?}");
    let processes = daemon.processes();
    kill(daemon.pid());
    assert!(is_clean(&busy.wait().unwrap(), &what), "{what}");
    let begin = Instant::now();
    while processes.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
        assert!(begin.elapsed() < SOON, "{what}: {processes:?} are still there");
        std::thread::sleep(Duration::from_millis(2));
    }
    // The guest goes on without its GPU.
    assert_eq!(machine.guest.run(&Command::shell("echo alive")).unwrap().text(), "alive\n", "{what}");
    let output = machine.guest.run(&Machine::command("check")).unwrap();
    assert!(!output.success() && !output.exit.timed_out, "{what}: {output}");
    let Machine { guest, moments } = machine;
    guest.kill();
    daemon.restart().unwrap_or_else(|error| panic!("{what}: {error:#}"));
    println!("    {what}");
    moments
}

/// What is killed in a guest's life, or with it, in the order of the tests; [`PARTS_VARIABLE`] chooses.
#[test]
fn whoever_is_killed_takes_nobody_along() {
    let artifacts = need!(Artifacts::for_guest(&[], &[SET]));
    need!(artifacts.thunk());
    let root = artifacts.packages(SET).unwrap();
    let program = CProgram::compile(&root, &package_path("tests/c/busy.c"), Place::Guest).unwrap();
    let mut server = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let mut moments = Moments::new();
    let only = std::env::var(PARTS_VARIABLE).unwrap_or_default();
    let wanted = |part: &str| part.contains(&only);
    if wanted("processes and workers") {
        println!("processes and workers");
        let mut machine = Machine::boot(&artifacts, program.path(), &server, moments);
        processes_and_workers(&mut machine, &server);
        let Machine { guest, moments: rest } = machine;
        guest.kill();
        moments = rest;
    }
    let mut fresh = None;
    for (name, part) in [("QEMU", qemu as Part), ("daemon", daemon)] {
        if wanted(name) {
            println!("{name}");
            for round in 0..rounds(ROUNDS_OF_VMS) {
                moments = part(&artifacts, program.path(), &mut server, moments, &mut fresh, round);
            }
        }
    }
}
