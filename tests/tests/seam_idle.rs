//! What a process on ROCr 7.2.4 costs while nothing happens, natively on the model and on `libkfd_preload.so` in loop-back: after
//! hsa_init, blocked in a wait, and idle in HIP. In a guest: `qemu_seam_idle`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

#[path = "idle/programs.rs"]
mod programs;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use programs::{CASES, GPU, Programs};
use virtio_kfd_tests::native::runtime;
use virtio_kfd_tests::talk::{OnHost, Talk};
use virtio_kfd_tests::{Artifacts, Daemon, Under, cpu_time, need};

const LIMIT: Duration = Duration::from_secs(120);

/// How long nothing happens.
const IDLE: Duration = Duration::from_secs(10);

/// Until doorbells that have just been rung are still, and trap.
const SETTLED: Duration = Duration::from_secs(1);

/// The process itself, above what it takes natively: a thousandth of a core in that time.
const OF_PROCESS: Duration = Duration::from_millis(10);

/// Daemon and worker in that time: a hundredth of a core. A host that looks at the doorbells takes up to 210 ms (docs/performance.md).
const OF_HOST: Duration = Duration::from_millis(100);

/// Starts a program, and waits until nothing happens in it.
fn start(
    artifacts: &Artifacts,
    under: &Under<'_>,
    (set, program, argument): (&str, &Path, &str),
) -> Box<OnHost> {
    let mut command = under.command(&runtime(artifacts, set).unwrap(), program).unwrap();
    command.arg(argument).env("AMD_COMGR_CACHE_DIR", artifacts.cache().path("comgr").unwrap());
    let mut process: Box<OnHost> = Box::new(OnHost::start(command, LIMIT).unwrap());
    assert_eq!(process.next_line(LIMIT).unwrap().as_deref(), Some("ready"));
    process
}

/// CPU time of the program and of `others` while nothing happens.
fn cost(mut process: Box<OnHost>, others: &BTreeSet<u32>) -> (Duration, Duration) {
    std::thread::sleep(SETTLED);
    let before = cpu_time::of(others).unwrap();
    std::thread::sleep(IDLE);
    let host = cpu_time::since(others, before).unwrap();
    process.say("").unwrap();
    let used = process.next_line(LIMIT).unwrap().unwrap();
    let used = used.strip_prefix("used ").unwrap().split(' ').next().unwrap().parse().unwrap();
    assert_eq!(process.next_line(LIMIT).unwrap().as_deref(), Some("= end"));
    process.finish().unwrap();
    (Duration::from_micros(used), host)
}

#[test]
fn waiting_costs_little_more_than_natively() {
    let artifacts = need!(Artifacts::for_daemon(&["libkfd_preload.so"], &[]));
    let programs = need!(Programs::find(&artifacts));
    for (what, set, program, argument) in CASES {
        let file = programs.file(program);
        let call = (set, file.as_path(), argument);
        let model = Under::model(&artifacts, GPU).unwrap();
        let (native, _) = cost(start(&artifacts, &model, call), &BTreeSet::new());
        let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
        let process = start(&artifacts, &Under::seam(&artifacts, daemon.socket()).unwrap(), call);
        // With the worker of this process.
        let (ours, host) = cost(process, &daemon.processes());
        println!(
            "{what}: {native:?} natively; {ours:?} in the process and {host:?} on the host, in {IDLE:?}"
        );
        assert!(ours < native + OF_PROCESS && host < OF_HOST, "{what}: {native:?}, {ours:?}, {host:?}");
    }
}
