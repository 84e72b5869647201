//! The daemon as a process.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a test waits for what has to come.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon that listens, with stub workers.
pub struct Daemon {
    pub child: Child,
    pub socket: PathBuf,
    _directory: tempfile::TempDir,
}

/// The daemon's program with stub workers.
pub fn program() -> Command {
    program_with_log(&std::env::var("TEST_LOG").unwrap_or_else(|_| "off".into()))
}

/// The same, with this filter of its log.
pub fn program_with_log(filter: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vhost-user-kfd"));
    command.arg("--worker").arg(std::env::current_exe().unwrap());
    command.args(["--log", filter]);
    command.stdin(Stdio::null());
    command
}

impl Daemon {
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_program(program(), arguments)
    }

    /// Starts it by another command.
    pub fn start_program(mut program: Command, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("kfd.sock");
        let child = program.arg("--socket").arg(&socket).args(arguments).spawn().unwrap();
        let daemon = Daemon { child, socket, _directory: directory };
        wait_for("the socket", || daemon.socket.exists());
        daemon
    }

    pub fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.socket).unwrap()
    }

    /// The supervisor.
    pub fn supervisor(&self) -> u32 {
        self.child.id()
    }

    /// The device process that runs now.
    pub fn device(&self) -> u32 {
        wait_for_some("the device process", || {
            self.children().into_iter().find(|pid| name_of(*pid).contains("vhost-user"))
        })
    }

    /// Workers that run now.
    pub fn workers(&self) -> Vec<u32> {
        self.children().into_iter().filter(|pid| name_of(*pid).contains("kfd-worker")).collect()
    }

    fn children(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// argv[0] of a process.
fn name_of(pid: u32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(line.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

/// Files that a process has open.
pub fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for_some(what, || condition().then_some(()));
}

pub fn wait_for_some<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = get() {
            return value;
        }
        assert!(Instant::now() < end, "{what} did not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}
