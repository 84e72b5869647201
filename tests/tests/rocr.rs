//! Debian's unmodified ROCr with a program on its public API (`tests/c/rocr.c`): natively on the model, and in loop-back
//! through daemon and worker. Both must print the same, line by line; what copies bring is computed here anew.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::PathBuf;
use std::time::Duration;

use virtio_kfd_tests::native::{SETS, run, runtime, text};
use virtio_kfd_tests::transcript::{Exception, Outcome, compare};
use virtio_kfd_tests::{Artifacts, CProgram, Daemon, Under, need};

const LIMIT: Duration = Duration::from_secs(240);

/// Environment variable of the library (docs/limits.md).
const REGISTER: &str = "VIRTIO_KFD_REGISTER";

/// Sizes of the pageable copies: powers of two up to 64 MiB, less one every second time from 8 on.
const CLASSES: u32 = 27;

const NOT_LOCKED: &[Exception] = &[Exception {
    section: "pageable",
    native: "hsa_amd_memory_lock: SUCCESS",
    ours: "hsa_amd_memory_lock: HSA_STATUS_ERROR",
    why: "memory of the application is not registered by default (docs/limits.md); the program stages",
}];

fn source() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    package.join("tests/c/rocr.c")
}

/// The artifacts, if all that these tests need is there.
fn parts() -> anyhow::Result<Artifacts> {
    let artifacts = Artifacts::find()?;
    for set in SETS {
        artifacts.packages(set)?;
    }
    artifacts.thunk()?;
    artifacts.program("vhost-user-kfd")?;
    artifacts.program("libkfd_model_preload.so")?;
    Ok(artifacts)
}

fn class_size(class: u32) -> usize {
    (1 << class) - usize::from(class % 2 == 1 && class > 2)
}

/// splitmix64.
fn mix(seed: u64) -> u64 {
    let x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// The data with this seed: the 8 bytes at 8 * i are mix(seed << 32 | i).
fn pattern(size: usize, seed: u64) -> Vec<u8> {
    let words = u64::try_from(size.div_ceil(8)).unwrap();
    let mut bytes: Vec<u8> = (0..words).flat_map(|word| mix(seed << 32 | word).to_le_bytes()).collect();
    bytes.truncate(size);
    bytes
}

/// FNV-1a over 64-bit words, the last one filled with zeros.
fn sum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, |sum: u64, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// What the section "copies" leaves on the host and in VRAM.
fn copied() -> (u64, u64) {
    const AREA: usize = 4 << 20;
    let from = pattern(AREA, 1);
    let (mut vram, mut host) = (from.clone(), vec![0; AREA]);
    let mut state = 1000;
    let mut next = |below: usize| -> usize {
        let number = mix(state);
        state += 1;
        usize::try_from(number % u64::try_from(below).unwrap()).unwrap()
    };
    for copy in 0..120 {
        let largest = match copy % 4 {
            0 => AREA / 2,
            1 => 64,
            _ => 5000,
        };
        let size = 1 + next(largest);
        let (source, target) = (next(AREA - size + 1), next(AREA - size + 1));
        if copy % 3 == 2 {
            host[target..target + size].copy_from_slice(&vram[source..source + size]);
        } else {
            vram[target..target + size].copy_from_slice(&from[source..source + size]);
        }
    }
    (sum(&host), sum(&vram))
}

/// Lines that must be there, by rules that need no program.
fn computed() -> Vec<String> {
    let (host, vram) = copied();
    let mut lines = vec![
        format!("host: {host:016x}"),
        format!("VRAM: {vram:016x}"),
        format!("came back: {:016x}", sum(&pattern(65536, 2))),
    ];
    for class in 0..CLASSES {
        let size = class_size(class);
        let sum = sum(&pattern(size, u64::from(100 + class)));
        lines.push(format!("{size} bytes: {sum:016x}, the same, nothing else"));
    }
    lines
}

/// What the HSA specification says about barriers, waits and a packet for another kind of agent, and that all of the
/// program ran.
const SPECIFIED: &[&str] = &[
    "byte by byte: yes",
    "a copy waits: yes",
    "and then is done: yes",
    "it has times: yes",
    "a box: SUCCESS",
    "the box alone: yes",
    "one queue after the other: 300",
    "the second queue waits: yes",
    "a chain of: 64",
    "four of five do not do: yes",
    "five do: yes",
    "one of five, number 4: done",
    "a masked value that is too small: yes",
    "and one that is not: yes",
    "a wait that ends by time: 1",
    "nobody was woken before: yes",
    "four sleepers are awake",
    "they slept: yes",
    "a handler had: 0",
    "access for all: SUCCESS",
    "the callback: HSA_STATUS_ERROR_INVALID_PACKET_FORMAT",
    "for this queue: yes",
    "it is not done: yes",
    "the other queue runs",
    "= end",
    "failures: 0",
];

/// Runs the program with `set` on `profile` natively and in loop-back, and compares.
#[track_caller]
fn same(
    artifacts: &Artifacts,
    set: &str,
    profile: &str,
    environment: &[(&str, &str)],
    exceptions: &[Exception],
) {
    let runtime = runtime(artifacts, set).unwrap();
    let program = CProgram::compile_for_rocr(&artifacts.packages(set).unwrap(), &source()).unwrap();
    let lines = |under: &Under<'_>| -> anyhow::Result<Outcome> {
        let mut command = under.command(&runtime, program.path())?;
        command.env_remove(REGISTER).envs(environment.iter().copied());
        let lines = text(command, LIMIT)?.lines().map(str::to_owned).collect();
        Ok(Outcome { lines, error: None })
    };
    let native = lines(&Under::model(artifacts, profile).unwrap()).unwrap();
    let daemon = Daemon::start(artifacts, &format!("model:{profile}"), &[]).unwrap();
    let ours = lines(&Under::loopback(artifacts, daemon.socket()).unwrap())
        .unwrap_or_else(|error| panic!("{set}, {profile}: {error:#}\n{}", daemon.report()));
    for line in computed().iter().map(String::as_str).chain(SPECIFIED.iter().copied()) {
        for (place, outcome) in [("natively", &native), ("in loop-back", &ours)] {
            let count = outcome.lines.iter().filter(|found| *found == line).count();
            assert_eq!(count, 1, "{set}, {profile}, {place}: {line:?} in\n{}", outcome.lines.join("\n"));
        }
    }
    compare(&native, &ours, exceptions)
        .unwrap_or_else(|error| panic!("{set}, {profile}: {error:#}\n{}", daemon.report()));
    println!("{set}, {profile}: {} lines", ours.lines.len());
}

#[test]
fn copies_barriers_and_waits_are_as_natively_with_trixies_rocr() {
    let artifacts = need!(parts());
    for profile in ["gfx906", "gfx1030"] {
        same(&artifacts, "rocm-trixie", profile, &[], NOT_LOCKED);
    }
}

#[test]
fn copies_barriers_and_waits_are_as_natively_with_bookworms_rocr() {
    let artifacts = need!(parts());
    for profile in ["gfx906", "gfx1030"] {
        same(&artifacts, "rocm-bookworm", profile, &[], NOT_LOCKED);
    }
}

#[test]
fn copies_go_from_gpu_to_gpu() {
    let artifacts = need!(parts());
    same(&artifacts, "rocm-trixie", "gfx906x2", &[], NOT_LOCKED);
}

/// With the option pageable memory is locked as natively, and nothing differs.
#[test]
fn nothing_differs_where_memory_is_adopted() {
    let artifacts = need!(parts());
    same(&artifacts, "rocm-trixie", "gfx906", &[(REGISTER, "adopt")], &[]);
}

/// `hsa_memory_copy` locks pageable memory and has no other way: its status, for every size, and that no byte on either
/// side has changed. Expected: HSA_STATUS_ERROR, as ROCr's `MemoryRegion::Lock` answers when the thunk refuses.
#[test]
fn synchronous_copies_of_pageable_memory_are_refused_and_change_nothing() {
    let artifacts = need!(parts());
    for set in SETS {
        let runtime = runtime(&artifacts, set).unwrap();
        let program = CProgram::compile_for_rocr(&artifacts.packages(set).unwrap(), &source()).unwrap();
        let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
        let under = Under::loopback(&artifacts, daemon.socket()).unwrap();
        let mut command = under.command(&runtime, program.path()).unwrap();
        command.arg("refused").env_remove(REGISTER);
        let output = run(command, LIMIT).unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let mut expected = "= agents\nGPUs: 1\ngfx906, pool with flags 4\n= refused\n".to_owned();
        for class in 0..CLASSES {
            let (size, status) = (class_size(class), "HSA_STATUS_ERROR");
            expected
                .push_str(&format!("{size} bytes to VRAM: {status}, from VRAM: {status}, 0 bytes changed\n"));
        }
        expected.push_str("VRAM is as it was: yes\n= end\nfailures: 0\n");
        assert_eq!(stdout, expected, "{set}: {}\n{}", output.status, daemon.report());
    }
}
