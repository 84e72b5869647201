//! What can go wrong while packages are fetched or an image is built.

use std::path::PathBuf;

/// Result of this crate's operations.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed fetch or build; every message names the thing it failed on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was tried, as a verb ("read", "create").
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Programs that the build needs are not installed.
    #[error("missing: {missing}; install with: {install}")]
    MissingTools {
        /// The programs, separated by commas.
        missing: String,
        /// The command that installs them.
        install: String,
    },
    /// A program could not be started or ended with an error.
    #[error("{command} failed ({status}): {output}")]
    Command {
        /// Program and first arguments.
        command: String,
        /// Exit status or start error.
        status: String,
        /// The last lines of its output.
        output: String,
    },
    /// The system's apt sources name no Debian mirror.
    #[error(
        "no Debian mirror in /etc/apt/sources.list or /etc/apt/sources.list.d: set {} to the address of one",
        crate::mirror::MIRROR_VARIABLE
    )]
    NoMirror,
    /// A package is missing from the mirror or too old.
    #[error("package {package}: found {found}, expected {expected}")]
    Package {
        /// The package's name.
        package: String,
        /// What the mirror has.
        found: String,
        /// What the set needs.
        expected: String,
    },
    /// A name that no recipe has.
    #[error("unknown package set {name}: the sets are {known}")]
    UnknownSet {
        /// The name asked for.
        name: String,
        /// All names, separated by commas.
        known: String,
    },
    /// A file has not the form that is needed of it.
    #[error("{path}: {problem}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was expected and what was found.
        problem: String,
    },
    /// A set is not in the cache and this run may not download.
    #[error("package set {set} is not in the cache ({cache}): run `cargo xtask packages` first")]
    NotCached {
        /// The set.
        set: String,
        /// The cache directory.
        cache: PathBuf,
    },
    /// `VIRTIO_KFD_CACHE` would be another directory for each program.
    #[error("VIRTIO_KFD_CACHE={path}: expected an absolute path", path = .0.display())]
    RelativeCache(PathBuf),
    /// The environment does not say where the cache may live.
    #[error(
        "no cache directory: none of VIRTIO_KFD_CACHE, XDG_CACHE_HOME and HOME is set to an absolute path"
    )]
    NoCacheDirectory,
}

/// Attaches an action and a path to an I/O error.
pub(crate) trait Context<T> {
    /// Turns the error into [`Error::Io`].
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> Context<T> for std::io::Result<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|source| Error::Io { action, path: path.into(), source })
    }
}
