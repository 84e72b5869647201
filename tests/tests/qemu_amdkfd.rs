//! The real amdkfd of the guest's kernel: present without any GPU once amdgpu is loaded.
//!
//! One body of questions, two kernels: `model_oracle.rs` asks the model the same and expects the same file.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::time::Duration;

use virtio_kfd_tests::{Artifacts, Command, Guest, Vm, need};

const DIRECT: &str = include_str!("../oracle/golden/linux-6.12-without-gpu-direct.txt");
const LOOPBACK: &str = include_str!("../oracle/golden/linux-6.12-without-gpu-loopback.txt");

/// Where the host's programs lie in the guest.
const PROGRAMS: &str = "/opt/virtio-kfd";

/// On Linux 6.12 `modprobe amdgpu` without an AMD GPU creates /dev/kfd and one topology node, the CPU (seen on Debian's
/// 6.12 kernels; `kfd_init` and `kfd_topology_init` in drivers/gpu/drm/amd/amdkfd).
fn there_is_a_kfd(guest: &Guest) {
    let script = "set -e; test -c /dev/kfd; ls /sys/class/kfd/kfd/topology/nodes; cat /sys/module/amdgpu/initstate; \
                  cat /sys/class/kfd/kfd/topology/nodes/0/gpu_id";
    let seen = guest.run(&Command::shell(script)).unwrap().checked().unwrap();
    assert_eq!(seen.text(), "0\nlive\n0\n");
}

/// The driver's own answers, as root and, but for the one question of capabilities, as an ordinary user.
fn the_driver_answers(guest: &Guest) {
    let oracle = format!("{PROGRAMS}/kfd-oracle direct");
    let root = guest.run(&Command::shell(&oracle).limit(Duration::from_secs(120))).unwrap();
    assert_eq!(root.checked().unwrap().text(), DIRECT);
    let script = format!("chmod 666 /dev/kfd; chmod 755 {PROGRAMS}; exec su -s /bin/sh user -c '{oracle}'");
    let user = guest.run(&Command::shell(&script).limit(Duration::from_secs(120))).unwrap();
    let golden = DIRECT.replace("CRIU_OP with zeros: ENODEV", "CRIU_OP with zeros: EACCES");
    assert_ne!(golden, DIRECT);
    assert_eq!(user.checked().unwrap().text(), golden);
}

/// The host side itself in the guest, on the guest's real driver: daemon, worker, sandbox, and the guest library in
/// loop-back, all as an ordinary user.
fn the_driver_answers_through_daemon_and_worker(guest: &Guest) {
    let script = format!(
        "cd {PROGRAMS} && exec su -s /bin/sh user -c '
            ./vhost-user-kfd --socket /tmp/gpu --kfd real --once >/tmp/daemon.log 2>&1 &
            daemon=$!
            n=0; while [ ! -S /tmp/gpu ] && [ $n -lt 600 ]; do sleep 0.1; n=$((n+1)); done
            VIRTIO_KFD_LOOPBACK=/tmp/gpu VIRTIO_KFD_LOOPBACK_RAM=256 ./kfd-oracle loopback || status=1
            wait $daemon || status=2
            [ -z \"$status\" ] || cat /tmp/daemon.log >&2
            exit ${{status:-0}}'"
    );
    let seen = guest.run(&Command::shell(&script).limit(Duration::from_secs(200))).unwrap();
    assert_eq!(seen.checked().unwrap().text(), LOOPBACK);
}

/// Case C49: a guest without the device has no GPU in rocminfo, a status that says so, and no crash.
fn without_the_device_there_is_a_clean_status(guest: &Guest) {
    let seen =
        guest.run(&Command::shell("HSAKMT_DEBUG_LEVEL=3 rocminfo").limit(Duration::from_secs(120))).unwrap();
    assert!(
        seen.exit.signal.is_none() && seen.exit.code.is_some_and(|code| (1..126).contains(&code)),
        "{seen}"
    );
    let said = seen.text() + &String::from_utf8_lossy(&seen.stderr);
    assert!(said.contains("no virtio-kfd device"), "{seen}");
}

#[test]
fn the_real_driver_without_a_gpu() {
    let artifacts = need!(Artifacts::find());
    let mut builder = need!(Vm::builder(&artifacts));
    need!(artifacts.qemu());
    need!(artifacts.image());
    need!(artifacts.thunk());
    for name in ["kfd-oracle", "vhost-user-kfd", "kfd-worker"] {
        let program = need!(artifacts.program(name));
        builder.overlay().file(&format!("{}/{name}", PROGRAMS.trim_start_matches('/')), &program).unwrap();
    }
    let guest = builder.module("amdgpu").limit(Duration::from_secs(400)).boot().unwrap();
    there_is_a_kfd(&guest);
    the_driver_answers(&guest);
    the_driver_answers_through_daemon_and_worker(&guest);
    without_the_device_there_is_a_clean_status(&guest);
}
