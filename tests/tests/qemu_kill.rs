//! kill -9 at random moments with an unmodified guest: of a process in it with busy queues, of its worker, of QEMU, of the daemon.
//! Nothing hangs, nothing is left behind, neighbours notice nothing, who survives is told once, and the next process works at
//! once. The program and loop-back: `kill_matrix`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::guest::{Output, Running};
use virtio_kfd_tests::moments::{Moments, rounds};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Guest, Vm, need};

const SET: &str = "rocm-trixie";
const LIMIT: Duration = Duration::from_secs(240);
const PROGRAM: &str = "/opt/virtio-kfd/busy";

/// Rounds of each kind in a guest where nobody asks for more. Each lasts seconds on an emulated CPU.
const ROUNDS: u32 = 4;

/// The latest moment: some are killed while they start, most at work.
const LATEST: Duration = Duration::from_secs(4);

/// What the host may take to be rid of processes.
const SOON: Duration = Duration::from_secs(10);

struct Machine {
    guest: Guest,
    moments: Moments,
}

impl Machine {
    fn boot(artifacts: &Artifacts, program: &Path, daemon: &Daemon, moments: Moments) -> Machine {
        let mut builder = Vm::builder(artifacts).unwrap();
        builder.overlay().file(PROGRAM.trim_start_matches('/'), program).unwrap();
        let guest = builder
            .memory_mib(1024)
            .limit(8 * LIMIT)
            .vhost_user_gpu(daemon.socket())
            .boot()
            .unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
        let prepare = "chmod 666 /dev/dri/renderD*; chmod 755 /opt/virtio-kfd";
        guest.run(&Command::shell(prepare).limit(LIMIT)).unwrap().checked().unwrap();
        Machine { guest, moments }
    }

    fn command(mode: &str) -> Command {
        let script = format!("exec {PROGRAM} {mode}");
        Command::new("su").args(&["-s", "/bin/sh", "user", "-c", &script]).limit(LIMIT)
    }

    fn spawn(&self, mode: &str) -> Running {
        self.guest.spawn(&Self::command(mode).talks()).unwrap()
    }

    /// A new process, which must work; what it prints.
    fn check(&self, daemon: &Daemon) -> String {
        let output = self.guest.run(&Self::command("check")).unwrap();
        output.checked().unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report())).text()
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
        let busy = machine.spawn("busy");
        let what = format!("process, round {round}, {:?}", machine.moments.pass(LATEST));
        busy.kill().unwrap();
        assert!(machine.check(daemon).starts_with("works\n"), "{what}");
        assert_eq!(busy.wait().unwrap().exit.signal, Some(9), "{what}");
        daemon.wait_for_workers(1, SOON).unwrap();
    }
    machine.check_until(daemon, &beside, "after processes");
    for round in 0..rounds {
        let busy = machine.spawn("busy");
        let what = format!("worker, round {round}, {:?}", machine.moments.pass(LATEST));
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
        at_work += u32::from(is_clean(&busy.wait().unwrap(), &what));
        daemon.wait_for_workers(1, SOON).unwrap();
    }
    machine.check_until(daemon, &beside, "after workers");
    println!("    {rounds} processes, {rounds} workers, {at_work} of these at work");
    // Nothing of all this was the neighbour's business.
    neighbour.send(b"end\n").unwrap();
    let output = neighbour.wait().unwrap();
    let expected =
        "busy\nspinning: SUCCESS\ninterrupted: SUCCESS\ncopies: SUCCESS\nmemory: SUCCESS\nclose: SUCCESS\n";
    assert_eq!(output.text(), expected, "{output}");
    machine.check_until(daemon, &fresh, "after all");
    // The guest's kernel had nothing to complain of.
    let script = "dmesg | grep -E 'WARNING:|BUG:|Oops|freeing invalid' || true";
    assert_eq!(machine.guest.run(&Command::shell(script)).unwrap().text(), "");
}

#[test]
fn whoever_is_killed_takes_nobody_along() {
    let artifacts = need!(Artifacts::find());
    need!(Vm::builder(&artifacts));
    need!(artifacts.qemu());
    need!(artifacts.image());
    need!(artifacts.thunk());
    need!(artifacts.program("vhost-user-kfd"));
    let root = need!(artifacts.packages(SET));
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let program = CProgram::compile(&root, &package.join("tests/c/busy.c"), Place::Guest).unwrap();
    let mut daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let moments = Moments::new();
    let before = daemon.settled(SOON).unwrap();
    let mut machine = Machine::boot(&artifacts, program.path(), &daemon, moments);
    println!("processes and workers");
    processes_and_workers(&mut machine, &daemon);

    println!("QEMU");
    let fresh = machine.check(&daemon);
    let busy: Vec<Running> = (0..2).map(|_| machine.spawn("busy")).collect();
    let what = format!("QEMU, {:?}", machine.moments.pass(LATEST));
    let Machine { guest, moments } = machine;
    guest.kill();
    drop(busy);
    // Its device process may have ended with it; then there is a new one.
    let begin = Instant::now();
    let after = loop {
        let after = daemon.settled(SOON).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        if after.processes == before.processes || begin.elapsed() > SOON {
            break after;
        }
    };
    println!("    {before:?}, afterwards {after:?}");
    assert_eq!(
        (after.processes, after.descriptors),
        (before.processes, before.descriptors),
        "{what}\n{}",
        daemon.report()
    );
    assert!(after.mappings <= before.mappings + 40, "{what}: {before:?}, {after:?}");

    println!("daemon");
    let mut machine = Machine::boot(&artifacts, program.path(), &daemon, moments);
    assert_eq!(machine.check(&daemon), fresh, "the next VM of the same daemon");
    let busy = machine.spawn("busy");
    let what = format!("daemon, {:?}", machine.moments.pass(LATEST));
    let processes = daemon.processes();
    kill(daemon.pid());
    is_clean(&busy.wait().unwrap(), &what);
    let begin = Instant::now();
    while processes.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
        assert!(begin.elapsed() < SOON, "{what}: {processes:?} are still there");
        std::thread::sleep(Duration::from_millis(2));
    }
    // The guest goes on without its GPU.
    assert_eq!(machine.guest.run(&Command::shell("echo alive")).unwrap().text(), "alive\n");
    let output = machine.guest.run(&Machine::command("check")).unwrap();
    assert!(!output.success() && !output.exit.timed_out, "{output}");
    machine.guest.kill();
    daemon.restart().unwrap();
}
