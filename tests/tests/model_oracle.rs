//! The same questions to the model as to the real driver (see `qemu_amdkfd.rs`): the answers must be the same.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::process::Command;
use std::time::Duration;

use virtio_kfd_tests::native::{LOOPBACK_VARIABLE, MODEL_VARIABLE, text};
use virtio_kfd_tests::transcript::assert_same_lines;
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
    assert_same_lines("kfd-oracle", ("the model's", "the kernel's"), found, golden);
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

/// Case C48: every node directory has a name (one newline for a CPU), a gpu_id, and properties that are decimal numbers,
/// one a line, each once; the generation does not change while nothing does.
#[test]
fn topology_files_have_the_form_that_tools_expect() {
    let artifacts = need!(Artifacts::find());
    let library = need!(artifacts.program("libkfd_model_preload.so"));
    // Absolute paths, since a change of directory is the real system's.
    let script = "t=/sys/class/kfd/kfd/topology; cat $t/generation_id; for n in $t/nodes/*; do echo \"= nodes/$n\"; \
                  for f in gpu_id name properties; do echo \"- $f\"; cat $n/$f; done; done; echo =; cat $t/generation_id";
    for (profile, gpus) in [("none", 0), ("gfx906", 1), ("gfx906x2", 2), ("gfx942", 1), ("gfx1100", 1)] {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("LD_PRELOAD", &library).env(MODEL_VARIABLE, profile);
        let found = text(command, LIMIT).unwrap();
        let parts: Vec<&str> = found.split("= nodes/").collect();
        let (first, nodes) = parts.split_first().unwrap();
        let (last, generation) = nodes.last().unwrap().split_once("=\n").unwrap();
        assert_eq!(first.trim(), generation.trim(), "{profile}: the generation");
        let mut ids = std::collections::BTreeSet::new();
        let mut with_gpu = 0;
        for node in nodes {
            let node = if *node == *nodes.last().unwrap() { last } else { node };
            let mut files = node.split("- ").skip(1).map(|file| file.split_once('\n').unwrap());
            let mut next = |name: &str| {
                let (found, content) = files.next().unwrap();
                assert_eq!(found, name);
                content
            };
            let (id, name, properties) = (next("gpu_id"), next("name"), next("properties"));
            let id: u32 = id.trim().parse().unwrap();
            assert_eq!(name == "\n", id == 0, "{profile}: name {name:?} of gpu_id {id}");
            assert!(name.ends_with('\n') && name.lines().count() == 1, "{profile}: {name:?}");
            with_gpu += usize::from(id != 0);
            assert!(id == 0 || ids.insert(id), "{profile}: gpu_id {id} twice");
            let mut names = std::collections::BTreeSet::new();
            for line in properties.lines() {
                let (key, value) = line.split_once(' ').unwrap_or_else(|| panic!("{profile}: {line:?}"));
                assert!(value.parse::<u64>().is_ok(), "{profile}: {line:?}");
                assert!(names.insert(key), "{profile}: {key} twice");
            }
            for key in ["cpu_cores_count", "simd_count", "mem_banks_count", "caches_count", "io_links_count"]
            {
                assert!(names.contains(key), "{profile}: {key} in {properties}");
            }
        }
        assert_eq!(with_gpu, gpus, "{profile}: {found}");
    }
}
