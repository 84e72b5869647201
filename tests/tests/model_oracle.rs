//! The same questions to the model as to the real driver (see `qemu_amdkfd.rs`): the answers must be the same.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::native::{LOOPBACK_VARIABLE, MODEL_VARIABLE, text};
use virtio_kfd_tests::{Artifacts, Daemon, need};

/// What Linux 6.12 without a GPU answers; printed by the real driver.
const DIRECT: &str = include_str!("../oracle/golden/linux-6.12-without-gpu-direct.txt");

/// The same through guest library, daemon and worker.
const LOOPBACK: &str = include_str!("../oracle/golden/linux-6.12-without-gpu-loopback.txt");

const LIMIT: Duration = Duration::from_secs(120);

/// The oracle's question about CRIU_OP is asked first about a capability, which an ordinary user does not have; the
/// golden was printed by root.
fn for_this_user(golden: &str) -> String {
    match rustix::process::geteuid().is_root() {
        true => golden.to_owned(),
        false => golden.replace("CRIU_OP with zeros: ENODEV", "CRIU_OP with zeros: EACCES"),
    }
}

#[track_caller]
fn same(found: &str, golden: &str) {
    let (found, golden): (Vec<&str>, Vec<&str>) = (found.lines().collect(), golden.lines().collect());
    let differ: Vec<String> = (0..found.len().max(golden.len()))
        .filter(|line| found.get(*line) != golden.get(*line))
        .map(|line| format!("line {line}: {:?}, the kernel's is {:?}", found.get(line), golden.get(line)))
        .collect();
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

#[test]
fn the_model_answers_as_the_real_driver_does() {
    let artifacts = need!(Artifacts::find());
    let oracle = need!(artifacts.program("kfd-oracle"));
    let library = need!(artifacts.program("libkfd_model_preload.so"));
    let mut command = Command::new(oracle);
    command.arg("direct").env("LD_PRELOAD", library).env(MODEL_VARIABLE, "none");
    same(&text(command, LIMIT).unwrap(), &for_this_user(DIRECT));
}

#[test]
fn through_daemon_and_worker_the_model_answers_as_the_real_driver_does() {
    let artifacts = need!(Artifacts::find());
    let oracle = need!(artifacts.program("kfd-oracle"));
    need!(artifacts.program("vhost-user-kfd"));
    let daemon = Daemon::start(&artifacts, "model:none", &[]).unwrap();
    let mut command = Command::new(oracle);
    command.arg("loopback").env(LOOPBACK_VARIABLE, daemon.socket());
    let found = text(command, LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    same(&found, LOOPBACK);
}
