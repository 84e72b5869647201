//! The daemon under test, and what it holds.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use kfd_model::debug::DEBUG_VARIABLE;

use crate::artifacts::Artifacts;
use crate::process::Keeper;

/// How long a daemon of a test may live.
const LIFE: Duration = Duration::from_secs(3600);

/// How long it may take to listen: it starts a worker first, to see whether its KFD works.
const START: Duration = Duration::from_secs(60);

/// The argument by which the daemon's program is its device process.
const DEVICE: &str = "--device-process";

/// The directory for mailboxes, below the daemon's own.
const GPUS: &str = "gpus";

/// A running `vhost-user-kfd` with a socket of its own. It is killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    keeper: Keeper,
    program: Program,
    socket: PathBuf,
    directory: tempfile::TempDir,
}

/// How a daemon is started.
#[derive(Debug)]
struct Program {
    path: PathBuf,
    arguments: Vec<OsString>,
    variables: Vec<(String, PathBuf)>,
}

impl Program {
    fn start(&self, log: &Path) -> Result<Keeper> {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments);
        for (variable, place) in &self.variables {
            command.env(variable, place);
        }
        Keeper::start(command, log, LIFE)
    }
}

/// What processes hold, to be compared with what they held before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holdings {
    /// Processes.
    pub processes: usize,
    /// Open descriptors, over all of them.
    pub descriptors: usize,
    /// Memory mappings, over all of them.
    pub mappings: usize,
    /// Memory in use that no other process has, in KiB, over all of them.
    pub private_kib: u64,
}

impl Daemon {
    /// Starts a daemon with `--kfd KFD` and more arguments, and waits until it serves: no worker is there then.
    ///
    /// # Errors
    /// It has not been built, or it ends early; the message has its output.
    pub fn start(artifacts: &Artifacts, kfd: &str, arguments: &[&str]) -> Result<Self> {
        Self::start_in(artifacts, kfd, arguments, &[])
    }

    /// Starts a daemon as [`start`](Self::start) does, whose workers' GPUs can be looked at: see
    /// [`gpus`](Self::gpus).
    ///
    /// # Errors
    /// As for `start`.
    pub fn start_watched(artifacts: &Artifacts, kfd: &str, arguments: &[&str]) -> Result<Self> {
        Self::start_in(artifacts, kfd, arguments, &[(DEBUG_VARIABLE, GPUS)])
    }

    /// Starts a daemon with variables that name directories below its own.
    fn start_in(
        artifacts: &Artifacts,
        kfd: &str,
        arguments: &[&str],
        directories: &[(&str, &str)],
    ) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("kfd-daemon-").tempdir().context("temporary directory")?;
        let socket = directory.path().join("gpu");
        let path = artifacts.program("vhost-user-kfd")?;
        // Before the daemon listens it looks for these; a skip is better than its error.
        artifacts.program("kfd-worker")?;
        artifacts.program("libkfd_model_preload.so")?;
        let mut options: Vec<OsString> =
            vec!["--socket".into(), socket.clone().into(), "--kfd".into(), kfd.into()];
        options.extend(arguments.iter().map(OsString::from));
        let mut variables = Vec::new();
        for (variable, name) in directories {
            let place = directory.path().join(name);
            fs::create_dir(&place).with_context(|| format!("create {}", place.display()))?;
            variables.push(((*variable).to_owned(), place));
        }
        let program = Program { path, arguments: options, variables };
        let keeper = program.start(&directory.path().join("log"))?;
        keeper.wait_for_path(&socket, START)?;
        let daemon = Self { keeper, program, socket, directory };
        daemon.wait_until_up()?;
        Ok(daemon)
    }

    /// Waits for the device process. It is started when the worker is gone by which the daemon has found out whether its KFD
    /// works; the socket is there before that worker.
    fn wait_until_up(&self) -> Result<()> {
        let begin = Instant::now();
        let is_device = |pid: &u32| arguments(*pid).any(|argument| argument == DEVICE);
        while !descendants(self.pid()).iter().any(is_device) {
            if !self.is_running() || begin.elapsed() > START {
                bail!("the daemon has no device process\n{}", self.report());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Starts the daemon again, at the same path, in the place of one that is killed if it still runs. A path that was left
    /// behind is the new one's to take away.
    ///
    /// # Errors
    /// It does not listen, or does not serve.
    pub fn restart(&mut self) -> Result<()> {
        // A file system may give the new socket the number of the old one.
        let identity = |path: &Path| {
            fs::symlink_metadata(path).map(|data| (data.ino(), data.ctime(), data.ctime_nsec())).ok()
        };
        let left = identity(&self.socket);
        let log = self.directory.path().join("log");
        self.keeper = self.program.start(&log)?;
        let begin = Instant::now();
        while identity(&self.socket).is_none() || identity(&self.socket) == left {
            if !self.is_running() || begin.elapsed() > START {
                bail!("the daemon does not listen again\n{}", self.report());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.wait_until_up()
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Where the workers of a [watched](Self::start_watched) daemon leave the mailboxes of their GPUs.
    pub fn gpus(&self) -> PathBuf {
        self.directory.path().join(GPUS)
    }

    /// A directory that lives as long as the daemon.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Process id of the supervisor.
    pub fn pid(&self) -> u32 {
        self.keeper.pid()
    }

    /// Whether the supervisor runs.
    pub fn is_running(&self) -> bool {
        self.keeper.is_running()
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        self.keeper.output()
    }

    /// The end of its log, for messages.
    pub fn report(&self) -> String {
        self.keeper.report()
    }

    /// Process ids of the workers that exist now.
    pub fn workers(&self) -> BTreeSet<u32> {
        descendants(self.pid()).into_iter().filter(|pid| name(*pid).starts_with("kfd-worker")).collect()
    }

    /// All its processes.
    pub fn processes(&self) -> BTreeSet<u32> {
        let mut all = descendants(self.pid());
        all.insert(self.pid());
        all
    }

    /// What the daemon's processes hold, workers not included.
    ///
    /// # Errors
    /// A process that cannot be looked into, as one that is about to end.
    pub fn holdings(&self) -> Result<Holdings> {
        let workers = self.workers();
        let mut sum = Holdings { processes: 0, descriptors: 0, mappings: 0, private_kib: 0 };
        for pid in self.processes().difference(&workers) {
            let place = |name: &str| PathBuf::from(format!("/proc/{pid}/{name}"));
            let read = |name: &str| {
                fs::read_to_string(place(name)).with_context(|| format!("read {}", place(name).display()))
            };
            sum.processes += 1;
            sum.descriptors += fs::read_dir(place("fd")).context("descriptors of the daemon")?.count();
            sum.mappings += read("maps")?.lines().count();
            let rollup = read("smaps_rollup")?;
            let private = rollup.lines().filter(|line| line.starts_with("Private_"));
            sum.private_kib +=
                private.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>();
        }
        Ok(sum)
    }

    /// What the daemon holds once nothing runs any more: no worker is there, the device process is (a new one starts after a
    /// VMM's end), and two looks one after the other are the same.
    ///
    /// # Errors
    /// `limit` has passed before that.
    pub fn settled(&self, limit: Duration) -> Result<Holdings> {
        let begin = Instant::now();
        self.wait_for_workers(0, limit)?;
        let mut before = None;
        loop {
            // A process may end while it is looked at.
            let now = self.holdings().ok();
            if let (Some(before), Some(now)) = (before, now)
                && before == now
                && now.processes >= 2
            {
                return Ok(now);
            }
            if begin.elapsed() > limit {
                bail!("not settled after {limit:?}: {before:?}, {now:?}\n{}", self.report());
            }
            before = now;
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until there are `count` workers and none that is about to end, and tells how long that took.
    ///
    /// # Errors
    /// `limit` has passed.
    pub fn wait_for_workers(&self, count: usize, limit: Duration) -> Result<Duration> {
        let begin = Instant::now();
        loop {
            // One that is about to end has no name any more, but may have its files still open.
            let ending = descendants(self.pid()).into_iter().any(|pid| name(pid).is_empty());
            let workers = self.workers();
            if workers.len() == count && !ending {
                return Ok(begin.elapsed());
            }
            if begin.elapsed() > limit {
                bail!("workers {workers:?} after {limit:?}, expected {count}\n{}", self.report());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// All processes below `ancestor`.
pub(crate) fn descendants(ancestor: u32) -> BTreeSet<u32> {
    let mut children: Vec<(u32, u32)> = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // pid (comm) state ppid ..., where comm may hold anything but the last parenthesis.
        let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
        let mut fields = after.split_whitespace();
        let state = fields.next().unwrap_or("Z");
        if let Some(parent) = fields.next().and_then(|parent| parent.parse().ok())
            && state != "Z"
        {
            children.push((parent, pid));
        }
    }
    let mut found = BTreeSet::new();
    let mut pending = vec![ancestor];
    while let Some(parent) = pending.pop() {
        for (_, pid) in children.iter().filter(|(of, _)| *of == parent) {
            if found.insert(*pid) {
                pending.push(*pid);
            }
        }
    }
    found
}

/// Name of the program that a process runs; empty for one that is about to end.
fn name(pid: u32) -> String {
    let first = arguments(pid).next().unwrap_or_default();
    first.rsplit('/').next().unwrap_or_default().to_owned()
}

/// What a process was started with, its program first.
fn arguments(pid: u32) -> impl Iterator<Item = String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    words.into_iter()
}
