//! Processes that a test speaks with, line by line, on the host or in a guest.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::guest::Running;
use crate::process::Keeper;

/// A process that prints lines and waits for lines.
pub trait Talk {
    /// The next line that it prints, without the line's end; `None` when it prints no more.
    ///
    /// # Errors
    /// `limit` has passed before that.
    fn next_line(&mut self, limit: Duration) -> Result<Option<String>>;

    /// Gives it a line.
    ///
    /// # Errors
    /// It does not read any more.
    fn say(&mut self, line: &str) -> Result<()>;

    /// Waits for its end, which must be a good one.
    ///
    /// # Errors
    /// It failed or was killed; the message has its standard error.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// A process of the host.
#[derive(Debug)]
pub struct OnHost {
    keeper: Keeper,
    stdin: ChildStdin,
    lines: Receiver<String>,
    // After the keeper, whose log lies in it.
    _directory: tempfile::TempDir,
}

impl OnHost {
    /// Starts `command`; it is killed after `limit`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(command: Command, limit: Duration) -> Result<Self> {
        let directory = tempfile::tempdir().context("temporary directory")?;
        let (keeper, stdin, stdout) =
            Keeper::start_talking(command, &directory.path().join("stderr"), limit)?;
        let (sender, lines) = mpsc::channel();
        // Ends with the process's output.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(std::io::Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { keeper, stdin, lines, _directory: directory })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.keeper.pid()
    }
}

impl Talk for OnHost {
    fn next_line(&mut self, limit: Duration) -> Result<Option<String>> {
        match self.lines.recv_timeout(limit) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => bail!("no line within {limit:?}\n{}", self.keeper.report()),
        }
    }

    fn say(&mut self, line: &str) -> Result<()> {
        self.stdin
            .write_all(format!("{line}\n").as_bytes())
            .with_context(|| format!("say {line:?}\n{}", self.keeper.report()))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { keeper, stdin, _directory, .. } = *self;
        drop(stdin);
        let log = _directory.path().join("stderr");
        let status = keeper.wait().context("the process's status")?;
        if !status.success() {
            bail!("{status}\n--- stderr:\n{}", std::fs::read_to_string(log).unwrap_or_default());
        }
        Ok(())
    }
}

impl Talk for Running {
    fn next_line(&mut self, limit: Duration) -> Result<Option<String>> {
        Self::next_line(self, limit)
    }

    fn say(&mut self, line: &str) -> Result<()> {
        self.send(format!("{line}\n").as_bytes())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.wait()?.checked().map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> OnHost {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        OnHost::start(command, LIMIT).unwrap()
    }

    #[test]
    fn lines_go_to_and_fro() {
        let mut process = shell("echo name?; read name; echo hello $name");
        assert_eq!(process.next_line(LIMIT).unwrap().as_deref(), Some("name?"));
        process.say("you").unwrap();
        assert_eq!(process.next_line(LIMIT).unwrap().as_deref(), Some("hello you"));
        assert_eq!(process.next_line(LIMIT).unwrap(), None);
        Box::new(process).finish().unwrap();
    }

    #[test]
    fn a_bad_end_is_told_with_the_error_output() {
        let process = shell("echo what is wrong >&2; exit 3");
        let error = Box::new(process).finish().unwrap_err().to_string();
        assert!(error.contains("what is wrong") && error.contains('3'), "{error}");
    }
}
