//! A guest program that sends garbage, in loop-back: it gets errors, and nobody else notices.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::native::{LOOPBACK_VARIABLE, text};
use virtio_kfd_tests::{Artifacts, Daemon, need};

const LIMIT: Duration = Duration::from_secs(400);
const SETTLE: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);

fn attack(kfd: &str, seed: &str, frames: &str, scatter: bool) {
    let artifacts = need!(Artifacts::find());
    let hostile = need!(artifacts.program("kfd-hostile"));
    need!(artifacts.program("vhost-user-kfd"));
    let daemon = Daemon::start(&artifacts, kfd, &[]).unwrap();
    let pid = daemon.pid();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&hostile);
        command.args(arguments).env(LOOPBACK_VARIABLE, daemon.socket());
        command.env("VIRTIO_KFD_LOOPBACK_SCATTER", if scatter { "1" } else { "0" });
        text(command, LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()))
    };
    // One connection first: what is loaded and started once is there afterwards.
    assert_eq!(run(&["rounds", "1"]), "rounds: 1\n");
    let before = daemon.settled(SETTLE).unwrap();
    let seen = run(&["attack", seed, frames]);
    println!("{seen}");
    assert!(seen.contains("none accepted") && seen.contains("all answers right"), "{seen}");
    assert!(daemon.is_running() && daemon.pid() == pid);
    // The VM is gone, and with it all that it held.
    daemon.wait_for_workers(0, SECOND).unwrap();
    assert!(!daemon.log().contains("panicked"), "{}", daemon.report());
    // A guest may cause messages, but not without end.
    assert!(daemon.log().len() < 1 << 20, "{} bytes of log", daemon.log().len());
    assert_eq!(run(&["rounds", "1"]), "rounds: 1\n");
    let after = daemon.settled(SETTLE).unwrap();
    assert_eq!(
        (after.processes, after.descriptors),
        (before.processes, before.descriptors),
        "{before:?}, {after:?}"
    );
}

#[test]
fn garbage_on_a_gpu() {
    attack("model:gfx906", "1", "1200", false);
}

#[test]
fn garbage_without_a_gpu_and_with_scattered_memory() {
    attack("model:none", "77", "400", true);
}
