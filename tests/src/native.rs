//! Programs on the host: on the model with the set's own thunk, or on ours in loop-back.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::artifacts::Artifacts;
use crate::process::{Keeper, tail};
use crate::runtime::Runtime;

/// The environment variable by which the guest library finds the daemon.
pub const LOOPBACK_VARIABLE: &str = "VIRTIO_KFD_LOOPBACK";

/// The environment variable that names the model's profile.
pub const MODEL_VARIABLE: &str = "VIRTIO_KFD_MODEL";

/// The package sets with a runtime.
pub const SETS: [&str; 2] = ["rocm-trixie", "rocm-bookworm"];

/// The package sets whose runtime has its thunk inside, the oldest first.
pub const INSIDE: [&str; 2] = ["rocm-forky", "rocm-experimental"];

/// The runtime of a package set.
///
/// # Errors
/// It is not in the cache.
pub fn runtime(artifacts: &Artifacts, set: &str) -> Result<Runtime> {
    Ok(Runtime::new(artifacts.packages(set)?))
}

/// What is under a program.
#[derive(Debug, Clone)]
pub enum Under<'a> {
    /// The runtime's own thunk on the model, with this profile.
    Model {
        /// The model's library.
        library: PathBuf,
        /// The profile.
        profile: &'a str,
    },
    /// Our thunk, speaking to the daemon at this socket.
    Loopback {
        /// Directory of our thunk.
        thunk: PathBuf,
        /// The model's library, by which rocminfo finds the module amdgpu loaded, before it asks the thunk. It stands
        /// under rocminfo without a GPU, so that every GPU that rocminfo lists came from the daemon.
        library: PathBuf,
        /// The daemon's socket.
        socket: &'a Path,
    },
    /// AMD's own thunk on our `/dev/kfd`, which speaks to the daemon at this socket.
    Seam {
        /// Our library.
        library: PathBuf,
        /// The daemon's socket.
        socket: &'a Path,
    },
}

impl<'a> Under<'a> {
    /// The model.
    ///
    /// # Errors
    /// It has not been built.
    pub fn model(artifacts: &Artifacts, profile: &'a str) -> Result<Self> {
        Ok(Self::Model { library: artifacts.program("libkfd_model_preload.so")?, profile })
    }

    /// Our thunk in loop-back.
    ///
    /// # Errors
    /// It has not been linked.
    pub fn loopback(artifacts: &Artifacts, socket: &'a Path) -> Result<Self> {
        let library = artifacts.thunk()?;
        let thunk = library.parent().context("the directory of the thunk")?.to_owned();
        Ok(Self::Loopback { thunk, library: artifacts.program("libkfd_model_preload.so")?, socket })
    }

    /// AMD's thunk on our `/dev/kfd` in loop-back.
    ///
    /// # Errors
    /// The library has not been built.
    pub fn seam(artifacts: &Artifacts, socket: &'a Path) -> Result<Self> {
        Ok(Self::Seam { library: artifacts.program("libkfd_preload.so")?, socket })
    }

    /// A command that runs a program of `runtime`, or another program by its absolute path, with this under it.
    ///
    /// # Errors
    /// The runtime has no loader.
    pub fn command(&self, runtime: &Runtime, program: &Path) -> Result<Command> {
        let name = program.to_str().context("the path of a program")?;
        let mut command = match self {
            Self::Model { library, profile } => {
                let mut command = runtime.command(name)?;
                command.env("LD_PRELOAD", library).env(MODEL_VARIABLE, profile);
                command
            }
            Self::Loopback { thunk, library, socket } => {
                let mut command = runtime.clone().with_libraries(thunk).command(name)?;
                command.env(LOOPBACK_VARIABLE, socket);
                command.env("LD_PRELOAD", library).env(MODEL_VARIABLE, "none");
                command
            }
            Self::Seam { library, socket } => {
                let mut command = runtime.command(name)?;
                command.env(LOOPBACK_VARIABLE, socket).env("LD_PRELOAD", library);
                command
            }
        };
        command.stdin(Stdio::null());
        Ok(command)
    }
}

/// Runs a command to its end, and kills it at its limit.
///
/// # Errors
/// It cannot be started, or was killed; the message has its output.
pub fn run(command: Command, limit: Duration) -> Result<Output> {
    let directory = tempfile::tempdir().context("temporary directory")?;
    let (stdout, stderr) = (directory.path().join("stdout"), directory.path().join("stderr"));
    let keeper = Keeper::start_split(command, &stdout, &stderr, limit)?;
    let threads = keeper.threads_at_limit();
    let status = keeper.wait().context("the command's status")?;
    let read = |path: &Path| std::fs::read(path).unwrap_or_default();
    let output = Output { status, stdout: read(&stdout), stderr: read(&stderr) };
    if status.code().is_none() {
        // The ends come first and are short: who shows a failure shows the beginning of its message.
        let end = |bytes: &[u8]| tail(&String::from_utf8_lossy(bytes), 15);
        let (stdout, stderr) = (end(&output.stdout), end(&output.stderr));
        let threads = threads.get().map_or("", String::as_str);
        bail!(
            "{status}\n--- end of stdout:\n{stdout}\n--- end of stderr:\n{stderr}\n--- threads at the limit:\n{threads}"
        );
    }
    Ok(output)
}

/// The standard output of a command that must succeed.
///
/// # Errors
/// It failed; the message has its output.
pub fn text(command: Command, limit: Duration) -> Result<String> {
    let output = run(command, limit)?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!(
            "{}\n--- stdout:\n{stdout}\n--- stderr:\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(stdout)
}
