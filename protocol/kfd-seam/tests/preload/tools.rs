//! Stock tools under the fixture: what a person looks with must see the service's files.

use crate::support::{output_of, run};

const NODES: &str = "/sys/class/kfd/kfd/topology";

#[test]
fn contents() {
    assert_eq!(
        output_of(&["cat", &format!("{NODES}/generation_id"), "/proc/modules"]),
        "2\namdgpu 1 0 - Live 0x0000000000000000\n"
    );
    assert_eq!(output_of(&["head", "-c", "3", "/proc/modules"]), "amd");
    assert_eq!(output_of(&["tail", "-n", "1", "/proc/modules"]), "amdgpu 1 0 - Live 0x0000000000000000\n");
    assert_eq!(output_of(&["grep", "-c", "amdgpu", "/proc/modules"]), "1\n");
    assert_eq!(output_of(&["sh", "-c", "read x < /sys/class/kfd/kfd/dev; echo $x"]), "511:0\n");
}

#[test]
fn lists() {
    assert_eq!(output_of(&["ls", NODES]), "generation_id\nnodes\nsecret\n");
    assert_eq!(output_of(&["ls", "-F", "/sys/class/kfd/kfd/"]), "dev\nloop@\nout@\ntopology/\n");
    let long = output_of(&["ls", "-la", "/sys/class/kfd", "/dev/kfd"]);
    let modes: Vec<_> = long.lines().filter_map(|line| line.get(..10)).collect();
    assert_eq!(modes.iter().filter(|mode| **mode == "crw-rw-rw-").count(), 1, "{long}");
    assert!(long.contains(" 511, 0 ") && long.contains("kfd -> ../../devices/virtual/kfd/kfd"), "{long}");
    assert!(output_of(&["ls", "/dev/dri"]).lines().any(|name| name == "renderD128"));
}

#[test]
fn trees() {
    let tree = run(&["find", "/sys/devices/virtual/kfd", "-printf", "%y %p\n"], &[]);
    assert_eq!(
        String::from_utf8(tree.stdout).unwrap(),
        "d /sys/devices/virtual/kfd\n\
         d /sys/devices/virtual/kfd/kfd\n\
         f /sys/devices/virtual/kfd/kfd/dev\n\
         d /sys/devices/virtual/kfd/kfd/topology\n\
         f /sys/devices/virtual/kfd/kfd/topology/generation_id\n\
         d /sys/devices/virtual/kfd/kfd/topology/nodes\n\
         f /sys/devices/virtual/kfd/kfd/topology/secret\n\
         l /sys/devices/virtual/kfd/kfd/out\n\
         l /sys/devices/virtual/kfd/kfd/loop\n"
    );
    let matches = run(&["grep", "-r", ".", "/sys/devices/virtual/kfd"], &[]);
    assert!(String::from_utf8(matches.stdout).unwrap().contains("kfd/dev:511:0\n"));
    // The one entry that the service lets nobody read.
    let errors = String::from_utf8(matches.stderr).unwrap();
    assert!(errors.contains("topology/secret: Permission denied"), "{errors}");
}

#[test]
fn attributes_and_links() {
    assert_eq!(
        output_of(&["stat", "-c", "%F %t %T %a", "/dev/dri/renderD128"]),
        "character special file e2 80 666\n"
    );
    assert_eq!(
        output_of(&["stat", "-c", "%F %s %a", &format!("{NODES}/generation_id")]),
        "regular file 2 444\n"
    );
    assert_eq!(output_of(&["readlink", "/sys/class/kfd/kfd"]), "../../devices/virtual/kfd/kfd\n");
    assert_eq!(
        output_of(&["readlink", "-f", "/sys/dev/char/226:128/topology"]),
        "/sys/devices/virtual/kfd/kfd/topology\n"
    );
    assert_eq!(output_of(&["realpath", NODES]), "/sys/devices/virtual/kfd/kfd/topology\n");
    assert_eq!(
        output_of(&["sh", "-c", "test -c /dev/kfd && test -r /dev/kfd && ! test -x /dev/kfd && echo yes"]),
        "yes\n"
    );
}

#[test]
fn nothing_else_changes() {
    for command in [
        &["cat", "/etc/passwd"][..],
        &["ls", "/etc"],
        &["stat", "-c", "%i %s %F", "/etc/passwd"],
        &["readlink", "/proc/self/exe"],
        &["realpath", "/etc/../usr/bin/cat"],
    ] {
        let bare =
            std::process::Command::new(command[0]).args(&command[1..]).env("LC_ALL", "C").output().unwrap();
        assert_eq!(output_of(command), String::from_utf8(bare.stdout).unwrap(), "{command:?}");
    }
}
