//! Test programs of googletest, one test at a time: how they are run, what they print, and tables of it.

pub mod output;
pub mod rows;

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use virtio_kfd_tests::Keeper;

use self::output::{End, Outcome};

/// Where a program's tests run, and where what they print is kept.
#[derive(Debug)]
pub struct Bench<'a> {
    directory: tempfile::TempDir,
    logs: Option<&'a Path>,
    limit: Duration,
}

impl<'a> Bench<'a> {
    /// A directory of the program `name`, whose tests may take so many seconds natively. What they print is left in `logs`, if
    /// there is such a directory, a file for each test and place.
    ///
    /// # Errors
    /// A directory cannot be made.
    pub fn new(name: &str, logs: Option<&'a Path>, seconds: u64) -> Result<Self> {
        let prefix = format!("{name}-");
        let directory = tempfile::Builder::new().prefix(&prefix).tempdir().context("temporary directory")?;
        if let Some(logs) = logs {
            std::fs::create_dir_all(logs).with_context(|| format!("create {}", logs.display()))?;
        }
        Ok(Self { directory, logs, limit: Duration::from_secs(seconds) })
    }

    /// The directory in which tests run.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// What a test may take natively.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// What a test may take on our stack: `patience` times the native limit if it ends natively.
    pub fn limit_after(&self, native: &Outcome, patience: u32) -> Duration {
        match native {
            Outcome::TimedOut(_) => self.limit,
            _ => self.limit.saturating_mul(patience),
        }
    }

    /// The names that `command` prints, which lists a program's tests; with those that are disabled, or without.
    ///
    /// # Errors
    /// It cannot be started, or fails.
    pub fn names(&self, mut command: Command, disabled: bool) -> Result<Vec<String>> {
        let program = command.get_program().to_string_lossy().into_owned();
        command.arg("--gtest_list_tests");
        let (text, end) = run_alone(command, self.directory(), self.limit)?;
        if end != End::Status(0) {
            bail!("{program} does not list its tests ({end:?}):\n{text}");
        }
        Ok(output::names(&text, disabled))
    }

    /// Runs one test by `command`, keeps what it prints, and tells what became of it.
    ///
    /// # Errors
    /// It cannot be started, or its output cannot be read or kept.
    pub fn outcome(&self, command: Command, test: &str, place: &str, limit: Duration) -> Result<Outcome> {
        let (text, end) =
            run_alone(command, self.directory(), limit).with_context(|| format!("{test}, {place}"))?;
        self.keep(test, place, &text)?;
        Ok(output::outcome(test, &text, end))
    }

    /// Leaves a text about a test in the directory for them, if there is one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep(&self, test: &str, place: &str, text: &str) -> Result<()> {
        let Some(logs) = self.logs else { return Ok(()) };
        let file = logs.join(format!("{}.{place}", test.replace('/', "_")));
        std::fs::write(&file, text).with_context(|| format!("write {}", file.display()))
    }
}

/// Today, and the commit of the workspace at `root`, for a page.
///
/// # Errors
/// `date` or `git` fails.
pub fn when(root: &Path) -> Result<(String, String)> {
    Ok((said("date", &["-u", "+%F"], root)?, said("git", &["describe", "--always", "--dirty"], root)?))
}

/// Writes a page of the workspace at `root`, or prints it.
///
/// # Errors
/// The file cannot be written.
pub fn show(root: &Path, page: &str, text: &str, write: bool) -> Result<()> {
    if write {
        std::fs::write(root.join(page), text).with_context(|| format!("write {page}"))?;
        println!("{page}");
    } else {
        print!("{text}");
    }
    Ok(())
}

/// Runs a command in `directory` and in a process group of its own to its end or its limit, and ends whatever it leaves
/// behind. Returns standard output and standard error in one.
fn run_alone(mut command: Command, directory: &Path, limit: Duration) -> Result<(String, End)> {
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

/// What a program prints on one line.
fn said(program: &str, arguments: &[&str], directory: &Path) -> Result<String> {
    let output = Command::new(program).args(arguments).current_dir(directory).output();
    let output = output.with_context(|| format!("start {program}"))?;
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
