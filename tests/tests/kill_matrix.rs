//! kill -9 at random moments, in loop-back: of a guest process with busy queues, of its worker, of the daemon's processes. Nothing
//! hangs, nothing is left behind, who survives gets a clean error and is told once, and the next process works at
//! once. The program: tests/c/busy.c. In a guest, with QEMU killed as well: `qemu_kill`.
//!
//! `VIRTIO_KFD_TEST_ROUNDS` does more rounds than usual, `VIRTIO_KFD_TEST_SEED` repeats a run.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use virtio_kfd_tests::moments::{Moments, rounds};
use virtio_kfd_tests::native::text;
use virtio_kfd_tests::thunk_stack::SET;
use virtio_kfd_tests::{Artifacts, Daemon, Keeper, ThunkStack, need};

/// Rounds of each kind where nobody asks for more.
const ROUNDS: u32 = 8;

/// The latest moment: some are killed while they start, most at work.
const LATEST: Duration = Duration::from_millis(600);

/// What hangs is killed after this. An honest end takes less than a second.
const HUNG: Duration = Duration::from_secs(60);

/// What processes may take to be gone.
const SOON: Duration = Duration::from_secs(30);

/// What the program prints when all its threads are at work.
const BUSY: &str = "busy\n";

/// Whether the program is at work before the moment of this round is chosen.
fn at_work_in(round: u32) -> bool {
    round % 2 == 1
}

struct Stack {
    thunk: ThunkStack,
    moments: Moments,
    /// For what processes print, and the place of their temporary files.
    directory: tempfile::TempDir,
    /// What the program prints on a stack that nothing happened to.
    fresh: String,
}

/// How a program ended, and what it printed.
struct End {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

impl Stack {
    fn new() -> anyhow::Result<Stack> {
        let thunk = ThunkStack::start(Artifacts::for_thunk(&[], &[SET])?, "busy").unwrap();
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("tmp")).unwrap();
        let mut stack = Stack { thunk, moments: Moments::new(), directory, fresh: String::new() };
        stack.fresh = stack.check();
        assert!(stack.fresh.starts_with("works\nvram "), "{}", stack.fresh);
        stack.daemon().wait_for_workers(0, SOON).unwrap();
        Ok(stack)
    }

    fn daemon(&self) -> &Daemon {
        self.thunk.daemon()
    }

    fn command(&self, mode: &str) -> Command {
        let mut command = self.thunk.command(&self.thunk.ours().unwrap(), &[mode]);
        command.env("TMPDIR", self.temporary());
        command
    }

    fn temporary(&self) -> PathBuf {
        self.directory.path().join("tmp")
    }

    /// A new process, which must work.
    fn check(&self) -> String {
        text(self.command("check"), HUNG)
            .unwrap_or_else(|error| panic!("{error:#}\n{}", self.daemon().report()))
    }

    fn place(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts the program, and lets a random time pass: in every second round from when all its threads are at work on, so
    /// that these are met however slow the machine is.
    fn start_busy(&mut self, round: u32) -> (Keeper, Duration) {
        let (stdout, stderr) = (self.place("stdout"), self.place("stderr"));
        let busy = Keeper::start_split(self.command("busy"), &stdout, &stderr, HUNG).unwrap();
        while at_work_in(round) && !self.said().0.starts_with(BUSY) {
            assert!(busy.is_running(), "round {round}: {}{}", self.said().0, self.said().1);
            std::thread::sleep(Duration::from_millis(2));
        }
        let moment = self.moments.pass(LATEST);
        (busy, moment)
    }

    fn said(&self) -> (String, String) {
        let read = |name| fs::read_to_string(self.place(name)).unwrap_or_default();
        (read("stdout"), read("stderr"))
    }

    fn end(&self, busy: Keeper) -> End {
        let status = busy.wait().unwrap();
        let (stdout, stderr) = self.said();
        End { status, stdout, stderr }
    }

    /// A process that has lost its GPU has been told so by every call, and its user once.
    fn is_clean(&self, end: &End) {
        let all = format!("{}\n{}\n{}\n{}", end.status, end.stdout, end.stderr, self.daemon().report());
        let lost = end.stderr.matches("the connection to the host is lost").count();
        let Some((_, told)) = end.stdout.split_once(BUSY) else {
            // It had not got that far: the call that it was in has failed.
            assert_eq!(end.status.code(), Some(1), "{all}");
            let last = end.stdout.lines().last().unwrap_or_default();
            let clean = last.ends_with(": ERROR, cannot go on")
                || last.ends_with(": KERNEL_IO_CHANNEL_NOT_OPENED, cannot go on");
            assert!(clean && lost <= 1, "{all}");
            return;
        };
        assert!(end.status.success(), "{all}");
        assert_eq!(lost, 1, "{all}");
        let expected = [
            "spinning: ERROR",
            "interrupted: ERROR",
            "copies: ERROR",
            "memory: ERROR",
            "waits: ERROR",
            "exception: SUCCESS",
            "afterwards: ERROR",
            "close: SUCCESS",
        ];
        assert_eq!(told.lines().collect::<Vec<_>>(), expected, "{all}");
    }

    /// No process, no descriptor, no mapping, no VRAM and no file is left of what was killed.
    fn nothing_is_left(&self, before: virtio_kfd_tests::host::Holdings) {
        let after = self.daemon().settled(SOON).unwrap();
        println!("{before:?}, afterwards {after:?}");
        assert_eq!((after.processes, after.descriptors), (before.processes, before.descriptors));
        assert!(after.mappings <= before.mappings + 40, "{before:?}, {after:?}");
        assert!(after.private_kib <= before.private_kib + 8 * 1024, "{before:?}, {after:?}");
        self.no_file_is_left();
    }

    fn no_file_is_left(&self) {
        let left: Vec<_> =
            fs::read_dir(self.temporary()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    // It may have ended by itself.
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// Waits until processes are gone, not even zombies left.
fn gone(processes: &BTreeSet<u32>) {
    let begin = Instant::now();
    let is_there = |pid: &&u32| Path::new(&format!("/proc/{pid}")).exists();
    while let Some(pid) = processes.iter().find(is_there) {
        assert!(begin.elapsed() < SOON, "process {pid} is still there");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_guest_process_is_killed() {
    let mut stack = need!(Stack::new());
    let before = stack.daemon().settled(SOON).unwrap();
    let rounds = rounds(ROUNDS);
    for round in 0..rounds {
        let (busy, moment) = stack.start_busy(round);
        assert!(busy.is_running(), "round {round}, {moment:?}: {}{}", stack.said().0, stack.said().1);
        // Killed and reaped.
        drop(busy);
        let works = stack.check();
        assert!(works.starts_with("works\n"), "round {round}, {moment:?}: {works}");
        stack.daemon().wait_for_workers(0, SOON).unwrap();
        assert_eq!(stack.check(), stack.fresh, "round {round}, {moment:?}");
    }
    println!("{rounds} rounds");
    stack.nothing_is_left(before);
}

#[test]
fn a_worker_is_killed() {
    let mut stack = need!(Stack::new());
    let before = stack.daemon().settled(SOON).unwrap();
    let (rounds, mut at_work) = (rounds(ROUNDS), 0);
    for round in 0..rounds {
        let (busy, moment) = stack.start_busy(round);
        let worker = loop {
            if let Some(worker) = stack.daemon().workers().first() {
                break *worker;
            }
            assert!(busy.is_running(), "round {round}, {moment:?}: {}", stack.said().1);
            std::thread::yield_now();
        };
        kill(worker);
        let works = stack.check();
        assert!(works.starts_with("works\n"), "round {round}, {moment:?}: {works}");
        let end = stack.end(busy);
        stack.is_clean(&end);
        let was_at_work = end.stdout.starts_with(BUSY);
        assert!(was_at_work || !at_work_in(round), "round {round}, {moment:?}");
        at_work += u32::from(was_at_work);
        stack.daemon().wait_for_workers(0, SOON).unwrap();
        assert_eq!(stack.check(), stack.fresh, "round {round}, {moment:?}");
    }
    println!("{rounds} rounds, {at_work} of them at work");
    assert!(at_work > 0 || rounds < 2);
    stack.nothing_is_left(before);
}

#[test]
fn a_process_of_the_daemon_is_killed() {
    let mut stack = need!(Stack::new());
    let before = stack.daemon().settled(SOON).unwrap();
    let (rounds, mut at_work, mut devices, mut at_work_on_device) = (rounds(ROUNDS), 0, 0, 0);
    for round in 0..rounds {
        let (busy, moment) = stack.start_busy(round);
        // By turns, each of them while the program starts and while it is at work.
        let of_device = round / 2 % 2 == 0;
        let begin = Instant::now();
        let (all, workers, others) = loop {
            let (all, workers) = (stack.daemon().processes(), stack.daemon().workers());
            let is_other = |pid: &u32| !workers.contains(pid) && *pid != stack.daemon().pid();
            let others: Vec<u32> = all.iter().copied().filter(is_other).collect();
            if !others.is_empty() || !of_device {
                break (all, workers, others);
            }
            assert!(
                begin.elapsed() < SOON,
                "round {round}, {moment:?}: no device\n{}",
                stack.daemon().report()
            );
            std::thread::yield_now();
        };
        let victim = if of_device {
            *others.get(usize::try_from(stack.moments.below(others.len() as u64)).unwrap()).unwrap()
        } else {
            stack.daemon().pid()
        };
        kill(victim);
        let end = stack.end(busy);
        stack.is_clean(&end);
        let was_at_work = end.stdout.starts_with(BUSY);
        assert!(was_at_work || !at_work_in(round), "round {round}, {moment:?}");
        at_work += u32::from(was_at_work);
        devices += u32::from(of_device);
        at_work_on_device += u32::from(was_at_work && of_device);
        if victim == stack.daemon().pid() {
            // Device and workers end with it.
            gone(&all);
            stack.thunk.daemon_mut().restart().unwrap();
        } else {
            // The workers end with it, and there is another one for the next connection.
            gone(&workers);
            gone(&BTreeSet::from([victim]));
            assert!(stack.daemon().is_running(), "{}", stack.daemon().report());
        }
        assert_eq!(stack.check(), stack.fresh, "round {round}, {moment:?}");
    }
    println!(
        "{rounds} rounds, {at_work} of them at work; {devices} of the device, {at_work_on_device} of them at work"
    );
    assert!(rounds < 2 || at_work_on_device > 0);
    assert!(rounds < 4 || (at_work > at_work_on_device && rounds > devices));
    stack.nothing_is_left(before);
}
