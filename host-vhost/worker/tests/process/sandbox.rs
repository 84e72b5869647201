//! No rule of the worker's allow-list is there for nothing: each is used in one run of a traced worker, or
//! stands below with the reason why it cannot be seen.
#![allow(unsafe_code)] // ptrace, in the child before exec

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;

use kfd_ipc::worker::ToWorker;
use kfd_sandbox::lists;
use kfd_sandbox::seccomp::{Check, Rule};
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::*;

use crate::support::*;

/// Rules that no run shows for certain.
const UNSEEN: &[(&str, &str)] = &[
    (
        "SYS_ioctl",
        "the model serves ioctls in the process; the rules are those of the call table by construction",
    ),
    ("SYS_restart_syscall", "only after a stop by a debugger or the terminal"),
    ("SYS_sched_yield", "only when a lock is contended for long"),
    ("SYS_mremap", "only when a block of more than 128 KiB grows"),
    ("SYS_clock_gettime", "only where the vDSO has no clock"),
    ("SYS_rseq", "glibc 2.35 and later"),
    ("SYS_gettid", "only some versions of glibc and of the standard library"),
    ("SYS_sched_getaffinity", "only some versions of glibc and of the standard library"),
    ("SYS_getrandom", "only in a thread that makes its first hash table"),
    ("SYS_brk", "only when the heap grows there"),
    ("SYS_clone", "only where clone3 is denied or missing"),
    ("SYS_exit", "a race with the end of the process"),
    ("SYS_madvise", "a race with the end of the process"),
];

type Call = (i64, [u64; 6]);

/// Runs `drive` on a worker whose threads are traced, and returns the system calls that it made once confined.
fn traced(drive: impl FnOnce(&mut Worker) + Send) -> Option<Vec<Call>> {
    let (channel, mut command) = command(Some("gfx906"));
    // SAFETY: one system call, which touches no memory.
    unsafe { command.pre_exec(|| Ok(ptrace::traceme()?)) };
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("skipped: processes cannot be traced here: {error}");
            return None;
        }
    };
    // Whoever sent the command keeps the worker's end open.
    drop(command);
    let pid = Pid::from_raw(child.id() as i32);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut worker = Worker::over(channel);
            drive(&mut worker);
        });
        Some(follow(pid))
    })
}

/// Follows all threads of a process to its end.
fn follow(main: Pid) -> Vec<Call> {
    let mut calls = Vec::new();
    let mut filters = 0;
    let mut known = BTreeSet::new();
    loop {
        // Only children of this thread: other tests have their own.
        let any = Pid::from_raw(-1);
        let status = waitpid(any, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)).unwrap();
        let Some(pid) = status.pid() else { continue };
        let mut signal = None;
        match status {
            WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..) if pid == main => return calls,
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => continue,
            WaitStatus::PtraceSyscall(pid) => {
                if let Ok(info) = ptrace::syscall_info(pid)
                    && info.op == libc::PTRACE_SYSCALL_INFO_ENTRY
                {
                    // SAFETY: this member is the valid one at an entry.
                    let entry = unsafe { info.u.entry };
                    if filters == 2 {
                        calls.push((entry.nr as i64, entry.args));
                    }
                    filters += usize::from(entry.nr as i64 == libc::SYS_seccomp);
                }
            }
            WaitStatus::Stopped(_, Signal::SIGTRAP | Signal::SIGSTOP) => {}
            WaitStatus::Stopped(_, other) => signal = Some(other),
            _ => {}
        }
        if known.insert(pid) && pid == main {
            let options =
                Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL;
            ptrace::setoptions(pid, options).unwrap();
        }
        // Fails for a thread that is ending, which the next wait tells.
        let _ = ptrace::syscall(pid, signal);
    }
}

fn used(rule: &Rule, calls: &[Call]) -> bool {
    calls.iter().any(|(number, arguments)| {
        *number == rule.number
            && rule.checks.iter().all(|check| match *check {
                Check::Is(argument, value) => arguments[usize::from(argument)] as u32 == value,
                Check::Without(argument, bits) => arguments[usize::from(argument)] as u32 & bits == 0,
                Check::Within(argument, mask, value) => {
                    arguments[usize::from(argument)] as u32 & mask == value
                }
            })
    })
}

/// What makes the worker do all that it does: guest memory, events, a thread, a log.
fn everything(worker: &mut Worker) {
    worker.start(settings());
    worker.hello().unwrap();
    let gpu_id = worker.acquire();
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    worker.guest_memory(&file, 1, 5, &[0]);
    let request = AllocMemoryRequest {
        va: GuestVa(0x7f00_0000_0000),
        size: 4096,
        gpu_id,
        flags: 0xd600_0004,
        resource: ResourceId(5),
        ..Default::default()
    };
    let handle = worker.call::<AllocMemory>(&request, &[]).unwrap().0.handle;
    worker.call::<FreeMemory>(&BufferRequest { handle }, &[]).unwrap();
    worker.send(&ToWorker::RemoveRegion { region: 5, ticket: 1 }, None);
    worker.other();
    let event_id = worker.call::<CreateEvent>(&CreateEventRequest::default(), &[]).unwrap().0.event_id;
    for ring in [1, 2] {
        let mut frame = frame(VERSION);
        let list = [WaitEvent { event_id, kind: 0, age: 0 }];
        let wait = WaitEventsRequest { timeout: 1, wait_for_all: 0 };
        frame.push::<WaitEvents>(&wait, &list, 1).unwrap();
        worker.frame(ring, frame);
        worker.answer(ring);
    }
    let stream = worker.call::<OpenSmi>(&GpuRequest { gpu_id, pad: 0 }, &[]).unwrap().0;
    let mut read = frame(VERSION);
    read.push::<ReadSmi>(&ReadSmiRequest { timeout: 200, pad: 0 }, &[], 0).unwrap();
    worker.frame(1, read);
    worker.answer(1);
    worker.call::<CloseSmi>(&stream, &[]).unwrap();
    // What the device must not send: the worker says so in its log and ends.
    worker.send(&ToWorker::Start(settings()), None);
}

#[test]
fn no_rule_is_there_for_nothing() {
    let Some(calls) = traced(everything) else { return };
    let rules = lists::worker(kfd_ipc::IPC_FD);
    let unused: Vec<&Rule> = rules.iter().filter(|rule| !used(rule, &calls)).collect();
    let names = unused.iter().map(|rule| rule.name);
    let surprising: Vec<&str> = names.filter(|name| !UNSEEN.iter().any(|(known, _)| known == name)).collect();
    assert!(!calls.is_empty() && surprising.is_empty(), "{} calls, unused: {surprising:?}", calls.len());
    for (name, reason) in UNSEEN {
        assert!(rules.iter().any(|rule| rule.name == *name), "{name} ({reason}) is no rule any more");
    }
}
