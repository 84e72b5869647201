//! The supervisor's children: workers by their number.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};

use kfd_ipc::Channel;
use nix::sys::signal::Signal;

use crate::spawn::{keep_from_guests_addresses, spawn};

/// How workers are started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerProgram {
    /// The program.
    pub path: PathBuf,
    /// Its whole environment.
    pub environment: Vec<(OsString, OsString)>,
}

/// The workers that run.
#[derive(Debug)]
pub struct Workers {
    program: WorkerProgram,
    most: usize,
    running: HashMap<u64, Child>,
}

impl Workers {
    /// None yet, and never more than `most`: whoever asks faces the guest and is not trusted with that.
    pub fn new(program: WorkerProgram, most: usize) -> Self {
        Workers { program, most, running: HashMap::new() }
    }

    /// The program.
    pub fn program(&self) -> &Path {
        &self.program.path
    }

    /// Starts one. Returns its process id and the channel to it.
    pub fn start(&mut self, worker: u64) -> Result<(i32, Channel), String> {
        self.start_with(worker, Stdio::inherit())
    }

    /// Starts one whose standard error is read by this process. Returns the channel to it and that.
    pub fn start_heard(&mut self, worker: u64) -> Result<(Channel, Option<ChildStderr>), String> {
        let (_, channel) = self.start_with(worker, Stdio::piped())?;
        let stderr = self.running.get_mut(&worker).and_then(|child| child.stderr.take());
        Ok((channel, stderr))
    }

    fn start_with(&mut self, worker: u64, stderr: Stdio) -> Result<(i32, Channel), String> {
        if self.running.len() >= self.most {
            return Err(format!("{} workers run, no more are allowed", self.running.len()));
        }
        if self.running.contains_key(&worker) {
            return Err(format!("worker {worker} runs already"));
        }
        let (ours, theirs) = Channel::pair().map_err(|error| error.to_string())?;
        let mut command = Command::new(&self.program.path);
        command.arg0("kfd-worker").env_clear().stderr(stderr);
        command.envs(self.program.environment.iter().map(|(name, value)| (name, value)));
        keep_from_guests_addresses(&mut command);
        let child = spawn(command, &[theirs.as_fd()])
            .map_err(|error| format!("{} cannot be started: {error}", self.program.path.display()))?;
        let pid = i32::try_from(child.id()).unwrap_or(0);
        self.running.insert(worker, child);
        Ok((pid, ours))
    }

    /// Ends one. It is reported by [`Workers::reap`] like any other that ends.
    pub fn kill(&mut self, worker: u64) {
        if let Some(child) = self.running.get_mut(&worker)
            && let Err(error) = child.kill()
        {
            tracing::error!("worker {worker} cannot be killed: {error}");
        }
    }

    /// Those that have ended since the last time, and how.
    pub fn reap(&mut self) -> Vec<(u64, String)> {
        let mut ended = Vec::new();
        self.running.retain(|worker, child| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                ended.push((*worker, describe(status)));
                false
            }
            Err(error) => {
                ended.push((*worker, format!("cannot be waited for: {error}")));
                false
            }
        });
        ended
    }

    /// Ends all, and waits until they are gone.
    pub fn end_all(&mut self) {
        let running: Vec<u64> = self.running.keys().copied().collect();
        for worker in running {
            self.kill(worker);
        }
        for (worker, mut child) in self.running.drain() {
            if let Err(error) = child.wait() {
                tracing::error!("worker {worker} cannot be waited for: {error}");
            }
        }
    }
}

/// How a process ended, in words that follow its name.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => format!("was killed by {signal}"),
            Err(_) => format!("was killed by signal {signal}"),
        },
        (None, None) => "ended".to_owned(),
    }
}

/// A program or library beside this executable.
pub fn beside(name: &str) -> io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}
