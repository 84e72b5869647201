//! The QEMU of the cache: run from where it was unpacked, on its own libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

/// An unpacked QEMU package set.
#[derive(Debug, Clone)]
pub struct Qemu {
    root: PathBuf,
}

impl Qemu {
    /// QEMU below the package root `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// A command that runs `qemu-system-x86_64` with its own loader, libraries, modules and firmware, and without
    /// devices or configuration that were not asked for.
    pub fn command(&self) -> Command {
        let usr = self.root.join("usr");
        let libraries = usr.join("lib/x86_64-linux-gnu");
        let mut command = Command::new(usr.join("lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&libraries).arg(usr.join("bin/qemu-system-x86_64"));
        for directory in ["share/qemu", "share/seabios", "lib/ipxe/qemu"] {
            command.arg("-L").arg(usr.join(directory));
        }
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command
    }

    /// Where it was unpacked.
    pub fn root(&self) -> &Path {
        &self.root
    }
}
