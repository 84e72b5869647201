//! Programs of an unpacked package set, run on the host with the set's own loader and libraries.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// Places of the loader in a set; Debian 12 has it outside of `usr`.
const LOADERS: &[&str] = &["usr/lib64/ld-linux-x86-64.so.2", "lib64/ld-linux-x86-64.so.2"];

/// Directories with libraries in a set.
const LIBRARIES: &[&str] = &["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// An unpacked set of ROCm packages with its own C library.
#[derive(Debug, Clone)]
pub struct Runtime {
    root: PathBuf,
    before: Vec<PathBuf>,
}

impl Runtime {
    /// The set below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), before: Vec::new() }
    }

    /// Lets the libraries in `directory` go before the set's own.
    pub fn with_libraries(mut self, directory: &Path) -> Self {
        self.before.push(directory.to_owned());
        self
    }

    /// A command that runs a program of the set (`usr/bin/NAME`).
    ///
    /// # Errors
    /// The set has no loader.
    pub fn command(&self, name: &str) -> Result<Command> {
        // Debian 12's lib64 is a link that leads out of the set, to the host's own loader, so the file is asked for first.
        let libraries: Vec<PathBuf> = LIBRARIES.iter().map(|place| self.root.join(place)).collect();
        let loader = libraries
            .iter()
            .map(|directory| directory.join("ld-linux-x86-64.so.2"))
            .chain(LOADERS.iter().map(|place| self.root.join(place)))
            .find(|place| place.symlink_metadata().is_ok_and(|data| data.is_file()))
            .with_context(|| format!("no ld-linux-x86-64.so.2 in {}", self.root.display()))?;
        let path: Vec<OsString> =
            self.before.iter().chain(&libraries).map(|directory| directory.as_os_str().to_owned()).collect();
        let mut command = Command::new(loader);
        command.arg("--library-path").arg(path.join(std::ffi::OsStr::new(":")));
        command.arg(self.root.join("usr/bin").join(name));
        Ok(command)
    }
}
