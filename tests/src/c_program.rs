//! C programs on the thunk's or the runtime's API, compiled against a package set's header and linked to its library;
//! which library they get is decided when they run.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::native::{LOOPBACK_VARIABLE, MODEL_VARIABLE, Under, run};

/// Where a set has its libraries; C programs are built for sets with a merged /usr.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Loader of a set, relative to its root.
const LOADER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";

/// The C files of a directory, in the order of their names.
fn c_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("read {}", directory.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "c") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// A compiled program.
#[derive(Debug)]
pub struct CProgram {
    root: PathBuf,
    program: PathBuf,
    _directory: tempfile::TempDir,
}

/// Where a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On this machine, with the set's own C library.
    Host,
    /// In a guest, whose C library is the set's.
    Guest,
}

impl CProgram {
    /// Compiles `source` against the package set below `root`.
    ///
    /// # Errors
    /// There is no C compiler, or the program does not compile.
    pub fn compile(root: &Path, source: &Path, place: Place) -> Result<Self> {
        Self::compile_all(root, &[source], &[], place)
    }

    /// Compiles the C files of the directory `sources` into one program that uses libdrm and its library for amdgpu
    /// as well.
    ///
    /// # Errors
    /// There is no C compiler, or the program does not compile.
    pub fn compile_directory(root: &Path, sources: &Path, place: Place) -> Result<Self> {
        let files = c_files(sources)?;
        let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
        Self::compile_all(root, &files, &["libdrm_amdgpu.so.1", "libdrm.so.2"], place)
    }

    /// Compiles `source`, a C file or a directory of such, against ROCr's library of the package set below `root`. With [`Place::Guest`] it runs on the host
    /// as well, by [`Under::command`], which brings the set's loader.
    ///
    /// # Errors
    /// There is no C compiler, or the program does not compile.
    pub fn compile_for_rocr(root: &Path, source: &Path, place: Place) -> Result<Self> {
        let files = if source.is_dir() { c_files(source)? } else { vec![source.to_owned()] };
        let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
        Self::compile_with(root, &files, &["libhsa-runtime64.so.1"], place)
    }

    /// Compiles `source` with the kernel headers of the package set below `root`, and no library.
    ///
    /// # Errors
    /// There is no C compiler, or the program does not compile.
    pub fn compile_alone(root: &Path, source: &Path) -> Result<Self> {
        Self::compile_with(root, &[source], &[], Place::Guest)
    }

    fn compile_all(root: &Path, sources: &[&Path], libraries: &[&str], place: Place) -> Result<Self> {
        // The thunk comes first, so that what ours has of libdrm's functions is found there.
        let libraries: Vec<&str> = ["libhsakmt.so.1"].iter().chain(libraries).copied().collect();
        Self::compile_with(root, sources, &libraries, place)
    }

    fn compile_with(root: &Path, sources: &[&Path], libraries: &[&str], place: Place) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("kfd-c-").tempdir().context("temporary directory")?;
        let program = directory.path().join("program");
        let mut command = Command::new("cc");
        command.args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-isystem"]);
        command.arg(root.join("usr/include")).arg("-isystem").arg(root.join("usr/include/libdrm"));
        command.arg("-o").arg(&program).args(sources);
        // Linked to the libraries' own files: the set's C library is newer than the compiler's.
        for library in libraries {
            command.arg(root.join(LIBRARIES).join(library));
        }
        command.arg("-Wl,--unresolved-symbols=ignore-in-shared-libs");
        if place == Place::Host {
            command.arg(format!("-Wl,--dynamic-linker={}", root.join(LOADER).display()));
        }
        let output = run(command, Duration::from_secs(120))
            .context("cc (install it: apt-get install gcc libc6-dev)")?;
        if !output.status.success() {
            bail!("{sources:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(Self { root: root.to_owned(), program, _directory: directory })
    }

    /// The program's file.
    pub fn path(&self) -> &Path {
        &self.program
    }

    /// A command that runs it on this machine.
    pub fn command(&self, under: &Under<'_>) -> Command {
        let own = self.root.join(LIBRARIES);
        let mut command = Command::new(&self.program);
        match under {
            Under::Model { library, profile } => {
                command.env("LD_LIBRARY_PATH", &own);
                command.env("LD_PRELOAD", library).env(MODEL_VARIABLE, profile);
            }
            Under::Loopback { thunk, socket, .. } => {
                command.env("LD_LIBRARY_PATH", format!("{}:{}", thunk.display(), own.display()));
                command.env(LOOPBACK_VARIABLE, socket);
            }
            Under::Seam { library, socket } => {
                command.env("LD_LIBRARY_PATH", &own);
                command.env(LOOPBACK_VARIABLE, socket).env("LD_PRELOAD", library);
            }
        }
        command
    }
}
