//! The harness itself: a guest without a GPU boots, runs commands, and goes away.

use std::time::Duration;

use virtio_kfd_tests::{Artifacts, Command, Vm, need};

#[test]
fn a_guest_runs_commands_and_moves_files() {
    let artifacts = need!(Artifacts::find());
    let builder = need!(Vm::builder(&artifacts));
    need!(artifacts.qemu());
    need!(artifacts.image());
    let guest = builder.boot().unwrap();

    let kernel = guest.run(&Command::new("uname").arg("-r")).unwrap().checked().unwrap();
    assert_eq!(kernel.text().trim(), guest.hello().kernel);
    assert!(kernel.text().starts_with("6.12."), "{}", kernel.text());

    // Longer than one frame, and not text.
    let data: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[0] ^ 0x5a).collect();
    guest.put("/tmp/data", 0o600, &data).unwrap();
    assert!(guest.get("/tmp/data").unwrap() == data);
    let size = guest.run(&Command::shell("wc -c < /tmp/data; cat >&2; exit 3").stdin("to the end")).unwrap();
    assert_eq!((size.text().trim(), size.exit.code), ("3000000", Some(3)));
    assert_eq!(size.stderr, b"to the end");

    let mut sleeper = guest.spawn(&Command::shell("echo ready; sleep 600")).unwrap();
    sleeper.wait_for("ready", Duration::from_secs(60)).unwrap();
    let quick = guest.run(&Command::new("sleep").arg("600").limit(Duration::from_millis(200))).unwrap();
    assert!(quick.exit.timed_out, "{quick}");
    sleeper.kill().unwrap();
    assert_eq!(sleeper.wait().unwrap().exit.signal, Some(9));

    assert!(guest.run(&Command::new("/no/such/program")).unwrap_err().to_string().contains("console"));
    let pid = guest.vm().pid().unwrap();
    let console = guest.kill();
    assert!(console.contains("guest is up"), "{console}");
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
