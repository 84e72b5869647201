//! A C program under the fixture, case by case, compiled in the ways that give a program different
//! entry points.

use std::process::Command;

use crate::support::{compile, package, run};

/// Runs `case` of the C program; the status must be success. Returns what it wrote to the standard error output.
fn check(case: &str, flags: &[&str], environment: &[(&str, &str)]) -> String {
    let directory = tempfile::tempdir().unwrap();
    let Some(program) = compile(directory.path(), flags) else { return String::new() };
    let output = run(&[program.to_str().unwrap(), case], environment);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{case}: {}\n{errors}", output.status);
    errors
}

/// With 64-bit names, and fortified: `open64`, `__open64_2`, `__readlink_chk`, `__realpath_chk`.
const FORTIFIED: &[&str] = &["-O2", "-D_FORTIFY_SOURCE=2", "-D_FILE_OFFSET_BITS=64"];

macro_rules! cases {
    ($($case:ident),*) => {
        $(#[test]
        fn $case() {
            check(stringify!($case), &[], &[]);
            check(stringify!($case), FORTIFIED, &[]);
        })*
    };
}

cases!(
    device,
    mmap,
    copies,
    escapes,
    files,
    directories,
    errno,
    fork,
    signals,
    threads,
    blocking,
    popen,
    reentry,
    shared,
    ways,
    vfork,
    vfork_first,
    cancellation
);

/// What a signal handler may call.
#[test]
fn handlers() {
    check("handlers", &["-DOWN_MALLOC"], &[]);
}

/// What libc makes of listings inside itself.
#[test]
fn scandir() {
    check("scandir", &["-DOWN_MALLOC"], &[]);
}

#[test]
fn panic() {
    assert!(check("panic", &[], &[]).contains("a fault of the service"));
}

/// A library's constructor comes before the preloaded library's own.
#[test]
fn early() {
    let directory = tempfile::tempdir().unwrap();
    let library = directory.path().join("libearly.so");
    let source = package().join("tests/preload/early.c");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status();
    if compiled.is_ok_and(|status| status.success()) {
        let library = library.to_str().unwrap();
        let run_path = format!("-Wl,-rpath,{}", directory.path().display());
        check("early", &["-DEARLY", "-Wl,--no-as-needed", library, &run_path], &[]);
    } else {
        println!("skipped: no C compiler (cc)");
    }
}

#[test]
fn failed() {
    let errors = check("failed", &[], &[("SEAM_FIXTURE_FAIL", "1")]);
    assert_eq!(errors, "seam-fixture: profile gfx000: unknown, expected gfx906\n");
}

/// The service is made once, and not by a program that names no path of it.
#[test]
fn the_service_is_made_when_it_is_needed() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let environment = [("SEAM_FIXTURE_LOG", log.to_str().unwrap())];
    let made = || std::fs::read_to_string(&log).map_or(0, |text| text.lines().count());
    for command in
        [&["true"][..], &["cat", "/etc/passwd"], &["ls", "-l", "/etc"], &["sh", "-c", "cd /; exec ls"]]
    {
        assert!(run(command, &environment).status.success(), "{command:?}");
        assert_eq!(made(), 0, "{command:?}");
    }
    assert!(run(&["cat", "/proc/modules", "/proc/modules"], &environment).status.success());
    assert_eq!(made(), 1);
    // The parent's, and the child's own after the fork, where the parent's is told once.
    let errors = check("fork", &[], &environment);
    assert_eq!(errors, "forked\n");
    assert_eq!(made(), 3);
}
