//! The memory conformance suite in loop-back: see [`virtio_kfd_tests::conformance`].
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::time::Instant;

use virtio_kfd_tests::c_program::Place;
use virtio_kfd_tests::conformance::{
    EXCEPTIONS, NOT_REGISTERED, REGISTER, SECTIONS, SET, compile, from_heading, loopback, native, wanted,
};
use virtio_kfd_tests::parts::package_path;
use virtio_kfd_tests::transcript::compare;
use virtio_kfd_tests::{Artifacts, Daemon, need};

#[track_caller]
fn same(profile: &str, sections: &[&str]) {
    let artifacts = need!(Artifacts::for_thunk(&[], &[SET]));
    let program = compile(&artifacts.packages(SET).unwrap(), Place::Host).unwrap();
    let daemon = Daemon::start_watched(&artifacts, &format!("model:{profile}"), &[]).unwrap();
    let mut failed = Vec::new();
    for section in sections.iter().filter(|section| wanted(section)) {
        let begin = Instant::now();
        let native = native(&artifacts, &program, profile, section, &[]).unwrap();
        let took = begin.elapsed();
        let ours = loopback(&artifacts, &program, &daemon, section, &[REGISTER]).unwrap();
        let lines = native.lines.len();
        println!(
            "{profile} {section}: {lines} lines, natively {took:?}, in loop-back {:?}",
            begin.elapsed() - took
        );
        if let Err(error) = compare(&native, &ours, EXCEPTIONS) {
            failed.push(format!("{profile}, {section}: {error:#}"));
        }
    }
    assert!(failed.is_empty(), "{}\n{}", failed.join("\n"), daemon.report());
}

/// What a section prints in loop-back, which must come to a good end.
#[track_caller]
fn lines(artifacts: &Artifacts, arguments: &[&str], section: &str) -> Vec<String> {
    let program = compile(&artifacts.packages(SET).unwrap(), Place::Host).unwrap();
    let daemon = Daemon::start_watched(artifacts, "model:gfx906", arguments).unwrap();
    let outcome = loopback(artifacts, &program, &daemon, section, &[]).unwrap();
    let text = outcome.lines.join("\n");
    assert!(outcome.error.is_none(), "{:?} after:\n{text}\n{}", outcome.error, daemon.report());
    outcome.lines
}

#[test]
fn memory_is_as_natively_with_one_gpu() {
    same("gfx906", SECTIONS);
}

/// Up to 8 GiB, of which only some pages are touched.
#[test]
fn large_memory_is_as_natively() {
    same("gfx906", &["data-large"]);
}

#[test]
fn memory_is_as_natively_with_two_gpus() {
    same("gfx906x2", SECTIONS);
}

#[test]
fn memory_is_as_natively_with_a_gpu_of_another_family() {
    same("gfx1030", SECTIONS);
}

/// Case C10: user memory is not bounded by VRAM. The profile has 256 MiB of it.
#[test]
fn more_memory_than_vram_is_registered_as_natively() {
    let directory = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(package_path("../host-vhost/kfd-model/profiles/gfx906.toml")).unwrap();
    let small = text
        .replace("vram_mib = 16368", "vram_mib = 256")
        .replace("visible_mib = 16368", "visible_mib = 256");
    assert_eq!(small.matches("_mib = 256").count(), 2, "the profile has changed:\n{small}");
    let profile = directory.path().join("small.toml");
    std::fs::write(&profile, small).unwrap();
    same(profile.to_str().unwrap(), &["beyond-vram"]);
}

/// The calls that differ by default, without the opt-in.
#[test]
fn registration_is_refused_by_default() {
    let artifacts = need!(Artifacts::for_thunk(&[], &[SET]));
    let found = lines(&artifacts, &[], "register-default");
    assert_eq!(from_heading(&found), NOT_REGISTERED);
}

/// Case C62: a window of 4 KiB, as when its size was given in the wrong unit.
#[test]
fn a_window_that_nothing_fits_in_is_told_in_time() {
    let artifacts = need!(Artifacts::for_thunk(&[], &[SET]));
    let found = lines(&artifacts, &["--shmem-size", "4K"], "tiny-window");
    let right = |node: u32, size: u32, flags: &str| {
        vec![
            format!("alloc a(node {node}, size {size:#x}, align 0, {flags}) = SUCCESS, address aligned"),
            format!("map(a, {size:#x}) = SUCCESS, alternate NULL"),
            format!("gpu 0 writes {size:#x} bytes of a: done"),
            format!("gpu 0 reads {size:#x} bytes of a: same"),
            "unmap(a) = SUCCESS".to_owned(),
            format!("free(a, {size:#x}) = SUCCESS"),
        ]
    };
    let none = |size: u32| {
        vec![format!(
            "alloc a(node 1, size {size:#x}, align 0, NonPaged|HostAccess|Coarse) = NO_MEMORY, address NULL"
        )]
    };
    let expected = [
        vec!["== a window of one page".to_owned()],
        none(0x1000),
        none(0x20_0000),
        right(1, 0x1000, "NonPaged|Coarse"),
        right(1, 0x20_0000, "NonPaged|Coarse"),
        right(0, 0x1000, "HostAccess"),
        right(0, 0x20_0000, "HostAccess"),
        vec!["close = SUCCESS".to_owned()],
    ];
    assert_eq!(from_heading(&found), expected.concat());
}

/// Case C62: a window of 64 MiB before 16 GiB of VRAM.
#[test]
fn a_small_window_is_exhausted_and_serves_again() {
    let artifacts = need!(Artifacts::for_thunk(&[], &[SET]));
    let found = lines(&artifacts, &["--shmem-size", "64M"], "window");
    let expected = [
        "== a small window",
        "1 MiB each until NO_MEMORY; at least 32: yes",
        "memory that needs no window = SUCCESS",
        "one of 32 MiB = SUCCESS",
        "20 rounds",
        "close = SUCCESS",
    ];
    assert_eq!(from_heading(&found), expected);
}
