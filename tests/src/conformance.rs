//! The memory conformance suite: a C program on the thunk's public header (tests/c/memory), run with different libraries
//! under it. What it prints must be the same, line by line, but for [`EXCEPTIONS`].
//!
//! The expected values are what AMD's own library, as Debian packages it, prints on the model.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use kfd_model::debug::DEBUG_VARIABLE;

use crate::artifacts::Artifacts;
use crate::c_program::{CProgram, Place};
use crate::gpu_view::GpuView;
use crate::guest::Guest;
use crate::host::Daemon;
use crate::native::Under;
use crate::parts::{package_path, user};
use crate::talk::OnHost;
use crate::transcript::{Exception, Outcome, listen, listen_with};

/// The package set whose library is the measure.
pub const SET: &str = "rocm-trixie";

/// To try some sections by hand: their names, separated by commas.
pub const SECTIONS_VARIABLE: &str = "VIRTIO_KFD_TEST_SECTIONS";

/// To look at the outputs: a directory for them.
pub const TRANSCRIPTS_VARIABLE: &str = "VIRTIO_KFD_TEST_TRANSCRIPTS";

/// Lets registration of the application's memory work; see docs/limits.md.
pub const REGISTER: (&str, &str) = ("VIRTIO_KFD_REGISTER", "adopt");

/// Sections of the program that need one process; each runs in a process of its own.
pub const SECTIONS: &[&str] = &[
    "alloc", "fixed", "map", "nodes", "pointer", "register", "vmm", "drm", "data", "cases", "reopen", "misc",
];

/// Sections for guests alone: loop-back has no device file, and one process.
pub const SECTIONS_OF_GUESTS: &[&str] = &["replaced", "drm-file", "two", "data-large"];

/// Most system memory that the section `data-large` takes in a guest: what it takes, the guest must have.
pub const SYSTEM_MEMORY_OF_GUESTS: (&str, &str) = ("MEMORY_SYSTEM_MIB", "512");

/// Where ours must differ from the native library.
pub const EXCEPTIONS: &[Exception] = &[
    Exception {
        section: "register",
        native: "deregister(counted) = SUCCESS",
        ours: "deregister(counted) = MEMORY_NOT_REGISTERED",
        why: "the native library counts registrations that it refused (fmm_register_memory); ours does not",
    },
    Exception {
        section: "misc",
        native: "read from itself = NOT_IMPLEMENTED, 77 copied, a",
        ours: "read from itself = SUCCESS, 64 copied, b",
        why: "AMD's library has dropped the calls (6.2); ours serves them through process_vm_readv",
    },
    Exception {
        section: "misc",
        native: "write to itself = NOT_IMPLEMENTED, 77 copied, bbb",
        ours: "write to itself = SUCCESS, 64 copied, aba",
        why: "as above",
    },
    Exception {
        section: "misc",
        native: "read from nobody = NOT_IMPLEMENTED",
        ours: "read from nobody = ERROR",
        why: "as above",
    },
    Exception {
        section: "misc",
        native: "set = ERROR",
        ours: "set = NOT_SUPPORTED",
        why: "SVM is not there on either side: the model's kernel does not know the call, our library says so",
    },
    Exception { section: "misc", native: "get = ERROR", ours: "get = NOT_SUPPORTED", why: "as above" },
];

/// Where a guest must differ, and loop-back does not: see docs/limits.md.
pub const EXCEPTIONS_OF_GUESTS: &[Exception] = &[Exception {
    section: "replaced",
    native: "madvise(DONTNEED) = done",
    ours: "madvise(DONTNEED) = Invalid argument",
    why: "adopted memory is a map of the guest's driver, whose pages cannot be given back; the data stay",
}];

/// The environment variable by which the model's processes are of one machine; see docs/model.md.
const MACHINE_VARIABLE: &str = "VIRTIO_KFD_MODEL_MACHINE";

/// How long a section may take.
const LIMIT: Duration = Duration::from_secs(240);

/// The directory of the program's sources.
pub fn sources() -> PathBuf {
    package_path("tests/c/memory")
}

/// Whether a section is asked for.
pub fn wanted(section: &str) -> bool {
    match std::env::var(SECTIONS_VARIABLE) {
        Ok(only) if !only.is_empty() => only.split(',').any(|name| name == section),
        _ => true,
    }
}

/// Compiles the program.
///
/// # Errors
/// There is no C compiler, or the program does not compile.
pub fn compile(root: &Path, place: Place) -> Result<CProgram> {
    CProgram::compile_directory(root, &sources(), place)
}

/// Runs a section on the model with the set's own library.
///
/// # Errors
/// It cannot be started.
pub fn native(
    artifacts: &Artifacts,
    program: &CProgram,
    profile: &str,
    section: &str,
    variables: &[(&str, &str)],
) -> Result<Outcome> {
    let gpus = tempfile::tempdir()?;
    let mut command = program.command(&Under::model(artifacts, profile)?);
    // Processes of one machine: what one takes, another has not.
    command.arg(section).envs(variables.iter().copied());
    command.env(DEBUG_VARIABLE, gpus.path()).env(MACHINE_VARIABLE, gpus.path().join("machine"));
    let outcome = listen(Box::new(OnHost::start(command, LIMIT)?), &mut GpuView::new(gpus.path()));
    outcome.keep(TRANSCRIPTS_VARIABLE, &format!("{}.{section}.native", profile.replace('/', "_")));
    Ok(outcome)
}

/// Runs a section with our library in loop-back. The daemon must be a watched one.
///
/// # Errors
/// It cannot be started.
pub fn loopback(
    artifacts: &Artifacts,
    program: &CProgram,
    daemon: &Daemon,
    section: &str,
    variables: &[(&str, &str)],
) -> Result<Outcome> {
    let mut command = program.command(&Under::loopback(artifacts, daemon.socket())?);
    command.arg(section).envs(variables.iter().copied());
    let outcome = listen(Box::new(OnHost::start(command, LIMIT)?), &mut GpuView::new(&daemon.gpus()));
    outcome.keep(TRANSCRIPTS_VARIABLE, &format!("{section}.loopback"));
    Ok(outcome)
}

/// Runs a section in a guest, whose program lies at `path`, for a user without privileges. The daemon must be a watched
/// one. `act` does what the program waits for (see [`listen_with`]).
///
/// # Errors
/// It cannot be started.
pub fn in_guest(
    guest: &Guest,
    path: &str,
    daemon: &Daemon,
    section: &str,
    variables: &[(&str, &str)],
    act: &mut dyn FnMut(&str) -> Result<u64>,
) -> Result<Outcome> {
    let mut script = String::new();
    for (name, value) in variables {
        script.push_str(&format!("export {name}={value}; "));
    }
    script.push_str(&format!("exec {path} {section}"));
    let command = user(&script).talks().limit(LIMIT);
    let outcome = listen_with(Box::new(guest.spawn(&command)?), &mut GpuView::new(&daemon.gpus()), act);
    outcome.keep(TRANSCRIPTS_VARIABLE, &format!("{section}.guest"));
    Ok(outcome)
}

/// What tests/c/forks.c prints (cases C32 and C34): whatever a child does, it ends well or is refused, and the parent goes on.
pub const FORKS: &str = "fork before the first use: 0
fork and exec: 0
fork and a call without opening again is refused: 0
the parent afterwards: SUCCESS
fork and opening again: 0
the parent afterwards: SUCCESS
children that failed while threads were in the library: 0 of 25
the parent at the end: SUCCESS
close: SUCCESS
";

/// What tests/c/rounds.c prints when nothing is left behind.
pub const ROUNDS_LEAVE: &str =
    "failed calls: 0\nwrong bytes: 0\ndescriptors: +0\nmaps: as before\nVRAM: 0 MiB less\nclose: SUCCESS\n";

/// What the section `register-default` prints with our library without [`REGISTER`], after its heading: the application's
/// memory is not taken, and nothing happens to it. NOT_SUPPORTED is what makes a runtime stage its copies.
pub const NOT_REGISTERED: &[&str] = &[
    "== registration by default",
    "register(m, 0x4000) = NOT_SUPPORTED",
    "register(m, 0x4000, 1 nodes {1}) = NOT_SUPPORTED",
    "register(m, 0x4000, HostAccess) = NOT_SUPPORTED",
    "map(m, 0x4000) = INVALID_PARAMETER, alternate NULL",
    "info(m) = ERROR, type unknown",
    "deregister(m) = MEMORY_NOT_REGISTERED",
    "cpu reads 0x4000 bytes of m: same",
    "close = SUCCESS",
];

/// The lines from the first heading on.
pub fn from_heading(lines: &[String]) -> Vec<&str> {
    lines.iter().map(String::as_str).skip_while(|line| !line.starts_with("== ")).collect()
}
