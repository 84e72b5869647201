//! Processes of the host that must not outlive the test: QEMU, the daemon.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::hang::threads_of_descendants;

/// A process with a limited life, kept by a thread of its own.
///
/// The thread matters: the kernel kills the process when the thread that started it ends, which is meant for the death of
/// the whole test program; a test's own thread may well end earlier.
#[derive(Debug)]
pub struct Keeper {
    name: String,
    pid: u32,
    log: PathBuf,
    running: Arc<AtomicBool>,
    threads: Arc<OnceLock<String>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<Option<ExitStatus>>>,
}

impl Keeper {
    /// Starts `command` with its output in `log`; it is killed after `limit`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut command: Command, log: &Path, limit: Duration) -> Result<Self> {
        let output = create(log)?;
        let errors = output.try_clone().context("duplicate a log file")?;
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        Ok(Self::start_with(command, log, limit)?.0)
    }

    /// Starts `command` with its standard output and its standard error in files of their own.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_split(mut command: Command, stdout: &Path, stderr: &Path, limit: Duration) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(create(stdout)?).stderr(create(stderr)?);
        Ok(Self::start_with(command, stdout, limit)?.0)
    }

    /// Starts `command` with pipes for its input and output, and its standard error in a file.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_talking(
        mut command: Command,
        stderr: &Path,
        limit: Duration,
    ) -> Result<(Self, ChildStdin, ChildStdout)> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(create(stderr)?);
        let (keeper, stdin, stdout) = Self::start_with(command, stderr, limit)?;
        Ok((keeper, stdin.context("a pipe for the input")?, stdout.context("a pipe for the output")?))
    }

    fn start_with(
        mut command: Command,
        log: &Path,
        limit: Duration,
    ) -> Result<(Self, Option<ChildStdin>, Option<ChildStdout>)> {
        let name = command.get_program().to_string_lossy().into_owned();
        die_with_parent(&mut command);
        let (stop, stopped) = mpsc::channel::<()>();
        let (started, start) = mpsc::channel();
        let running = Arc::new(AtomicBool::new(true));
        let flag = Arc::clone(&running);
        let threads = Arc::<OnceLock<String>>::default();
        let at_limit = Arc::clone(&threads);
        let thread = std::thread::spawn(move || {
            let begin = Instant::now();
            let mut child = match command.spawn() {
                Ok(child) => child,
                Err(error) => {
                    let _ = started.send(Err(error));
                    return None;
                }
            };
            let _ = started.send(Ok((child.id(), child.stdin.take(), child.stdout.take())));
            while begin.elapsed() < limit && !matches!(child.try_wait(), Ok(Some(_)) | Err(_)) {
                if stopped.recv_timeout(Duration::from_millis(20)) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            if begin.elapsed() >= limit && matches!(child.try_wait(), Ok(None)) {
                at_limit.get_or_init(threads_of_descendants);
            }
            // Fails only when the process has ended already.
            let _ = child.kill();
            let status = child.wait().ok();
            flag.store(false, Ordering::Release);
            status
        });
        let started = start.recv().with_context(|| format!("the thread that starts {name} ended"))?;
        let (pid, stdin, stdout) = started.with_context(|| format!("start {name}"))?;
        let (log, stop, thread) = (log.to_owned(), Some(stop), Some(thread));
        let keeper = Self { name, pid, log, running, threads, stop, thread };
        Ok((keeper, stdin, stdout))
    }

    /// Whether the process still runs.
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What it has printed so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The last lines that it printed, under its name, for messages.
    pub fn report(&self) -> String {
        format!("--- {}:\n{}", self.name, tail(&self.output(), 40))
    }

    /// Waits until the process has made `path` (a socket that it listens on).
    ///
    /// # Errors
    /// It ends, or `limit` passes, before that.
    pub fn wait_for_path(&self, path: &Path, limit: Duration) -> Result<()> {
        let begin = Instant::now();
        while !path.exists() {
            if !self.is_running() || begin.elapsed() > limit {
                bail!("{} did not make {}\n{}", self.name, path.display(), self.report());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// What all threads of the test's processes did when this process was killed at its limit; nothing if it was not.
    pub fn threads_at_limit(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.threads)
    }

    /// Waits until the process ends by itself or its limit passes; how it ended, if that could be learnt.
    pub fn wait(mut self) -> Option<ExitStatus> {
        self.thread.take().and_then(|thread| thread.join().ok()).flatten()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn create(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("create {}", path.display()))
}

/// The last `count` lines of a text.
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines.get(lines.len().saturating_sub(count)..).unwrap_or_default().join("\n")
}

/// Makes the kernel kill the process when its parent thread ends.
#[allow(
    unsafe_code,
    reason = "a hook between fork and exec is the only way to set a death signal without a helper"
)]
fn die_with_parent(command: &mut Command) {
    // SAFETY: the hook runs in the forked child before exec. It makes one prctl system call through rustix, which takes
    // no lock and allocates nothing, so it is sound even though other threads of the parent may have held locks.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
                .map_err(std::io::Error::from)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_killed_at_its_limit_and_when_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let sleep = || {
            let mut command = Command::new("sleep");
            command.arg("600");
            command
        };
        let kept = Keeper::start(sleep(), &log, Duration::from_millis(50)).unwrap();
        assert!(!kept.wait().unwrap().success());
        let kept = Keeper::start(sleep(), &log, Duration::from_secs(600)).unwrap();
        let process = PathBuf::from(format!("/proc/{}", kept.pid()));
        assert!(process.exists() && kept.is_running());
        drop(kept);
        assert!(!process.exists());
    }

    #[test]
    fn a_process_that_ends_early_is_reported_with_its_output() {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no socket today; exit 4"]);
        let kept = Keeper::start(command, &directory.path().join("log"), Duration::from_secs(60)).unwrap();
        let error =
            kept.wait_for_path(&directory.path().join("socket"), Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().contains("no socket today"), "{error}");
        assert_eq!(kept.wait().unwrap().code(), Some(4));
    }
}
