//! The host's side on the model, and programs of the package sets that run on it or on the model alone.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use kfd_model::profile::Profile;
use virtio_kfd_tests::{Artifacts, Keeper, Runtime, SharedVm};

/// The package set whose programs run on the host.
const RUNTIME: &str = "rocm-trixie";

/// The model as a preload library.
const PRELOAD: &str = "libkfd_model_preload.so";

/// Checks a profile of the command line before anything is built for it. A path becomes one that holds in any directory.
pub fn profile(text: &str) -> Result<String> {
    Profile::load(text)?;
    if !text.contains('/') {
        return Ok(text.to_owned());
    }
    let path = Path::new(text).canonicalize().with_context(|| text.to_owned())?;
    path.into_os_string().into_string().map_err(|path| anyhow!("{}: not UTF-8", path.display()))
}

/// A running daemon; it ends when this is dropped.
#[derive(Debug)]
pub struct Stack {
    daemon: Keeper,
    directory: tempfile::TempDir,
}

impl Stack {
    /// Starts the daemon on the model `profile` and waits until it listens; it is killed after `limit`.
    pub fn start(artifacts: &Artifacts, profile: &str, limit: Duration) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("kfd-host-").tempdir().context("temporary directory")?;
        let socket = directory.path().join("gpu");
        let mut command = Command::new(artifacts.program("vhost-user-kfd")?);
        command.arg("--socket").arg(&socket).arg("--kfd").arg(format!("model:{profile}"));
        let daemon = Keeper::start(command, &directory.path().join("log"), limit)?;
        daemon.wait_for_path(&socket, Duration::from_secs(60))?;
        Ok(Self { daemon, directory })
    }

    /// The vhost-user socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("gpu")
    }

    /// What the daemon printed last.
    pub fn report(&self) -> String {
        self.daemon.report()
    }
}

/// A daemon and a loop-back VM of it, of which several processes can be guest processes.
#[derive(Debug)]
pub struct SharedStack {
    // The VM ends before its daemon.
    vm: SharedVm,
    stack: Stack,
}

impl SharedStack {
    /// Starts both; they are killed after `limit`.
    pub fn start(artifacts: &Artifacts, profile: &str, limit: Duration) -> Result<Self> {
        let stack = Stack::start(artifacts, profile, limit)?;
        let vm = SharedVm::start(artifacts, &stack.socket(), stack.directory.path(), limit)?;
        Ok(Self { vm, stack })
    }

    /// Where processes connect, in the place of the daemon's socket.
    pub fn socket(&self) -> &Path {
        self.vm.socket()
    }

    /// What daemon and VM printed last.
    pub fn report(&self) -> String {
        format!("{}\n{}", self.stack.report(), self.vm.report())
    }
}

/// A program of the package set on the model alone: Debian's thunk, no daemon.
pub fn native(artifacts: &Artifacts, profile: &str, program: &str) -> Result<Command> {
    on_model(artifacts, Runtime::new(artifacts.packages(RUNTIME)?), profile, program)
}

/// The same program in loop-back: our thunk, which speaks to the daemon at `socket`.
///
/// The model without a GPU stands under the program as well, but only for what rocminfo asks the system before it calls
/// the thunk (whether the amdgpu module is loaded): any GPU that it shows comes from the daemon.
pub fn loopback(artifacts: &Artifacts, socket: &Path, program: &str) -> Result<Command> {
    let thunk = artifacts.thunk()?;
    let directory = thunk.parent().context("the guest library's directory")?;
    let runtime = Runtime::new(artifacts.packages(RUNTIME)?).with_libraries(directory);
    let mut command = on_model(artifacts, runtime, "none", program)?;
    command.env("VIRTIO_KFD_LOOPBACK", socket);
    Ok(command)
}

fn on_model(artifacts: &Artifacts, runtime: Runtime, profile: &str, program: &str) -> Result<Command> {
    let mut command = runtime.command(program)?;
    command.env("LD_PRELOAD", artifacts.program(PRELOAD)?).env("VIRTIO_KFD_MODEL", profile);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_that_is_none_is_told_with_those_that_are() {
        assert_eq!(profile("gfx906").unwrap(), "gfx906");
        let why = profile("gfx9").unwrap_err().to_string();
        for known in Profile::known() {
            assert!(why.contains(known), "{known}: {why}");
        }
        assert!(profile("./none.toml").unwrap_err().to_string().contains("./none.toml"));
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../host-vhost/kfd-model/profiles/gfx906.toml");
        assert!(Path::new(&profile(file).unwrap()).is_absolute());
    }
}
