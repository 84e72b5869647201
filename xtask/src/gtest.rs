//! Test programs of googletest, one test at a time: how they are run, what they print, and tables of it.

pub mod output;
pub mod rows;

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use virtio_kfd_tests::Keeper;

use self::output::End;

/// Runs a command in `directory` and in a process group of its own to its end or its limit, and ends whatever it leaves
/// behind. Returns standard output and standard error in one.
///
/// # Errors
/// The command cannot be started, or its output cannot be read.
pub fn run_alone(mut command: Command, directory: &Path, limit: Duration) -> Result<(String, End)> {
    command.process_group(0).current_dir(directory);
    let log = directory.join("output");
    let begin = Instant::now();
    let keeper = Keeper::start(command, &log, limit)?;
    let group = i32::try_from(keeper.pid()).ok().and_then(Pid::from_raw).context("a process id of zero")?;
    let status = keeper.wait().context("the status of a test's process")?;
    let late = begin.elapsed() >= limit;
    // Fails only when no process of the group is left.
    let _ = kill_process_group(group, Signal::KILL);
    let end = match (status.code(), status.signal()) {
        (Some(code), _) => End::Status(code),
        (None, Some(9)) if late => End::Limit,
        (None, signal) => End::Signal(signal.unwrap_or(0)),
    };
    let text = std::fs::read(&log).with_context(|| format!("read {}", log.display()))?;
    Ok((String::from_utf8_lossy(&text).into_owned(), end))
}

/// Leaves what a test printed in `logs`, if there is such a directory.
///
/// # Errors
/// The file cannot be written.
pub fn keep(logs: Option<&Path>, test: &str, place: &str, text: &str) -> Result<()> {
    let Some(logs) = logs else { return Ok(()) };
    let file = logs.join(format!("{}.{place}", test.replace('/', "_")));
    std::fs::write(&file, text).with_context(|| format!("write {}", file.display()))
}

/// What a program prints on one line.
///
/// # Errors
/// It cannot be started, or fails.
pub fn said(program: &str, arguments: &[&str], directory: &Path) -> Result<String> {
    let output = Command::new(program).args(arguments).current_dir(directory).output();
    let output = output.with_context(|| format!("start {program}"))?;
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
