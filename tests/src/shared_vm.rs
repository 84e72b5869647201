//! A loop-back VM that several processes share: `kfd-loopback-vm`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::artifacts::Artifacts;
use crate::process::Keeper;

/// How long it may take to connect to the daemon and to listen.
const START: Duration = Duration::from_secs(60);

/// A running `kfd-loopback-vm`. It is killed when dropped.
#[derive(Debug)]
pub struct SharedVm {
    keeper: Keeper,
    socket: PathBuf,
}

impl SharedVm {
    /// Starts a VM of the daemon at the socket `device`, which listens in `directory`, and lives for at most `life`.
    ///
    /// # Errors
    /// It has not been built, or it ends early; the message has its output.
    pub fn start(artifacts: &Artifacts, device: &Path, directory: &Path, life: Duration) -> Result<Self> {
        let socket = directory.join("vm");
        let mut command = Command::new(artifacts.program("kfd-loopback-vm")?);
        command.arg("--device").arg(device).arg("--socket").arg(&socket);
        let keeper = Keeper::start(command, &directory.join("vm-log"), life)?;
        keeper.wait_for_path(&socket, START)?;
        Ok(Self { keeper, socket })
    }

    /// Where processes connect, in the place of the daemon's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.keeper.pid()
    }

    /// Whether it runs.
    pub fn is_running(&self) -> bool {
        self.keeper.is_running()
    }

    /// What it printed so far.
    pub fn log(&self) -> String {
        self.keeper.output()
    }

    /// The end of its output, for messages.
    pub fn report(&self) -> String {
        self.keeper.report()
    }
}
