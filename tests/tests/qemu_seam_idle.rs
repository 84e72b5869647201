//! What a process on ROCr 7.2.4 costs in a guest while nothing happens: after hsa_init, blocked in a wait, and idle in HIP. The
//! programs, and what they cost natively and in loop-back: `seam_idle`.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

#[path = "idle/programs.rs"]
mod programs;

use std::collections::BTreeSet;
use std::time::Duration;

use programs::{CASES, GPU, HIP, Programs, RUNTIME};
use virtio_kfd_tests::installed::{command, install};
use virtio_kfd_tests::parts::user;
use virtio_kfd_tests::{Artifacts, Daemon, cpu_time, gpu_guest, need, seam_guest};

const LIMIT: Duration = Duration::from_secs(400);

/// How long nothing happens.
const IDLE: Duration = Duration::from_secs(10);

/// Daemon and worker in that time: a hundredth of a core. A host that looks at the doorbells takes up to 210 ms (docs/performance.md).
const OF_HOST: Duration = Duration::from_millis(100);

/// How often threads of the process may run in that time: the runtime's own look at its signals once in a while.
const RUNS: u64 = 1000;

/// What an emulated guest may take more in that time while a process in it waits. The guest itself, with its timers and the
/// devices of the harness, takes more than this, and not always the same.
const OF_QEMU: Duration = Duration::from_millis(500);

#[test]
fn waiting_costs_the_host_next_to_nothing() {
    let artifacts = need!(Artifacts::for_guest(&["libkfd_preload.so"], &[]));
    let programs = need!(Programs::find(&artifacts));
    let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let hip = [("idle_hip".to_owned(), programs.file("idle_hip"))];
    let mut builder = seam_guest::describe(&artifacts, HIP, &hip).unwrap();
    install(&artifacts, RUNTIME, &programs.file("idle_rocr"), "idle_rocr", builder.overlay()).unwrap();
    let guest = builder.limit(4 * LIMIT).boot_on(&daemon).unwrap();
    gpu_guest::open_to_all(&guest).unwrap();
    let qemu = BTreeSet::from([guest.vm().pid().unwrap()]);
    let quiet = || {
        let before = cpu_time::of(&qemu).unwrap();
        std::thread::sleep(IDLE);
        cpu_time::since(&qemu, before).unwrap()
    };
    let alone = quiet();
    for (what, set, program, argument) in CASES {
        let call = format!("{} {argument}", command(set, program));
        let script = seam_guest::on_library("AMD_COMGR_CACHE_DIR=/tmp/comgr", &call);
        let mut process = guest.spawn(&user(&script).talks().limit(LIMIT)).unwrap();
        let ready = process.next_line(LIMIT).unwrap();
        assert_eq!(ready.as_deref(), Some("ready"), "{what}\n{}", daemon.report());
        let host = daemon.processes();
        let before = cpu_time::of(&host).unwrap();
        let inside = quiet();
        let host = cpu_time::since(&host, before).unwrap();
        process.send(b"\n").unwrap();
        let used = process.next_line(LIMIT).unwrap().unwrap();
        let [_, time, runs] = used.split(' ').collect::<Vec<_>>()[..] else { panic!("{used}") };
        assert_eq!(process.next_line(LIMIT).unwrap().as_deref(), Some("= end"));
        process.wait().unwrap().checked().unwrap();
        println!(
            "{what}: the process ran {runs} times, for {time} us; {host:?} on the host; QEMU {inside:?} (alone {alone:?}), in {IDLE:?}"
        );
        assert!(host < OF_HOST, "{what}: {host:?}");
        assert!(runs.parse::<u64>().unwrap() < RUNS, "{what}: {used}");
        assert!(inside < alone + OF_QEMU, "{what}: {inside:?}, alone {alone:?}");
    }
}
