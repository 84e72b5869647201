//! A C program on the thunk's API, and a daemon that it can speak to: natively, on our thunk, or on AMD's over our
//! `/dev/kfd`.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::artifacts::Artifacts;
use crate::c_program::{CProgram, Place};
use crate::host::Daemon;
use crate::native::{Under, text};
use crate::parts::package_path;

/// The package set whose thunk the programs are compiled for.
pub const SET: &str = "rocm-trixie";

/// The profile of the model, natively and in the daemon.
pub const PROFILE: &str = "gfx906";

/// A compiled program and a running daemon.
#[derive(Debug)]
pub struct ThunkStack {
    artifacts: Artifacts,
    program: CProgram,
    daemon: Daemon,
}

impl ThunkStack {
    /// Compiles `tests/c/NAME.c` and starts a daemon. The artifacts are those of [`Artifacts::for_thunk`] with [`SET`].
    ///
    /// # Errors
    /// The program does not compile, or the daemon does not start.
    pub fn start(artifacts: Artifacts, name: &str) -> Result<Self> {
        let daemon = Daemon::start(&artifacts, &format!("model:{PROFILE}"), &[])?;
        Self::on(artifacts, name, daemon)
    }

    /// The same with a [watched](Daemon::start_watched) daemon.
    ///
    /// # Errors
    /// As for `start`.
    pub fn start_watched(artifacts: Artifacts, name: &str) -> Result<Self> {
        let daemon = Daemon::start_watched(&artifacts, &format!("model:{PROFILE}"), &[])?;
        Self::on(artifacts, name, daemon)
    }

    fn on(artifacts: Artifacts, name: &str, daemon: Daemon) -> Result<Self> {
        let source = package_path(&format!("tests/c/{name}.c"));
        let program = CProgram::compile(&artifacts.packages(SET)?, &source, Place::Host)?;
        Ok(Self { artifacts, program, daemon })
    }

    /// The daemon.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// The daemon, to be started again.
    pub fn daemon_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }

    /// AMD's thunk on the model.
    ///
    /// # Errors
    /// The model has not been built.
    pub fn native(&self) -> Result<Under<'static>> {
        Under::model(&self.artifacts, PROFILE)
    }

    /// Our thunk in loop-back.
    ///
    /// # Errors
    /// It has not been linked.
    pub fn ours(&self) -> Result<Under<'_>> {
        Under::loopback(&self.artifacts, self.daemon.socket())
    }

    /// AMD's thunk on our `/dev/kfd` in loop-back.
    ///
    /// # Errors
    /// Our library has not been built.
    pub fn seam(&self) -> Result<Under<'_>> {
        Under::seam(&self.artifacts, self.daemon.socket())
    }

    /// The command that runs the program.
    pub fn command(&self, under: &Under<'_>, arguments: &[&str]) -> Command {
        let mut command = self.program.command(under);
        command.args(arguments);
        command
    }

    /// What the program prints; it must succeed.
    ///
    /// # Errors
    /// It failed, or was killed at its limit; the message has its output and the daemon's log.
    pub fn text(&self, under: &Under<'_>, arguments: &[&str], limit: Duration) -> Result<String> {
        text(self.command(under, arguments), limit)
            .with_context(|| format!("{arguments:?}, {under:?}\n{}", self.daemon.report()))
    }
}
