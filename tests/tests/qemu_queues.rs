//! Queues in an unmodified guest: the doorbells are a GUEST blob of its own virtio_gpu driver, so this is where they have to
//! trap and come back. The program and what it proves: tests/c/queues.c.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::time::Duration;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::parts::{OPEN_TO_USERS, kernel_complaints, package_path, user};
use virtio_kfd_tests::{Artifacts, CProgram, Command, Daemon, Vm, need};

const SET: &str = "rocm-trixie";
const LIMIT: Duration = Duration::from_secs(240);
const PROGRAM: &str = "/opt/virtio-kfd/queues";

#[test]
fn every_ring_of_a_guest_arrives() {
    let artifacts = need!(Artifacts::for_guest(&[], &[SET]));
    let mut builder = Vm::builder(&artifacts).unwrap();
    need!(artifacts.thunk());
    let root = artifacts.packages(SET).unwrap();
    let program = CProgram::compile(&root, &package_path("tests/c/queues.c"), Place::Guest).unwrap();
    builder.overlay().file(PROGRAM.trim_start_matches('/'), program.path()).unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let guest = builder.memory_mib(1024).limit(2 * LIMIT).boot_on(&daemon).unwrap();
    let root = |script: &str| {
        let output = guest.run(&Command::shell(script).limit(LIMIT)).unwrap();
        output.checked().unwrap_or_else(|error| panic!("{script}: {error:#}")).text()
    };
    root(OPEN_TO_USERS);
    // By an ordinary user, who needs no privilege for it.
    let script = format!("HSAKMT_DEBUG_LEVEL=6 {PROGRAM} 2>&1");
    let output = guest.run(&user(&script).limit(LIMIT)).unwrap();
    let text = output.text();
    assert!(
        output.success() && text.lines().any(|line| line == "queues: every ring arrived"),
        "{output}\n{}\n{}",
        root("dmesg | tail -20"),
        daemon.report()
    );
    println!("{text}");
    assert!(!text.contains("trap"), "doorbells do not trap: {text}");
    // The guest's kernel had nothing to complain of.
    assert_eq!(kernel_complaints(&guest).unwrap(), "");
}
