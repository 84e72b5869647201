//! The sandbox of the host processes: no new privileges, no capabilities, Landlock, seccomp.
//!
//! Each process calls [`enter`] once, when it has opened what it needs and before it reads a byte that a guest
//! could have written. A step that fails is an error and the process must end; only a kernel that has no
//! Landlock at all is let pass, and the [`Report`] says so.
//!
//! The lists of system calls are data ([`lists`]), so that the tests can try each rule and its near misses. The worker's
//! ioctls come from the call table ([`virtio_kfd_protocol::CALLS`]).

#![deny(clippy::arithmetic_side_effects)]

pub mod files;
mod heap;
pub mod lists;
pub mod privileges;
pub mod seccomp;

use std::fmt;
use std::os::fd::RawFd;

use thiserror::Error;

/// Which process is to be confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A worker: KFD and render-node ioctls, shared mappings, one channel.
    Worker {
        /// Its channel.
        channel: RawFd,
        /// Whether the KFD model stands under it by preload, which needs system calls of its own
        /// ([`lists::model`]). A production host never sets this.
        model: bool,
    },
    /// The device: vhost-user and the channels; no file is opened and no process started any more.
    Device,
    /// The supervisor: it starts workers, which inherit its filter, so only what none of them ever needs is denied.
    Supervisor {
        /// Whether its workers have the KFD model under them. A production host never sets this.
        model: bool,
    },
}

/// What the sandbox consists of, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// What became of the capability sets.
    pub capabilities: privileges::Dropped,
    /// What Landlock does; `None` where the role has no use for it.
    pub files: Option<files::Files>,
    /// System calls in the allow-list; `None` for a deny-list.
    pub allowed_calls: Option<usize>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no new privileges, {}", self.capabilities)?;
        if let Some(files) = &self.files {
            write!(f, ", {files}")?;
        }
        match self.allowed_calls {
            Some(count) => write!(f, ", {count} system calls allowed"),
            None => write!(f, ", dangerous system calls denied"),
        }
    }
}

/// Why the sandbox could not be set up. The process must not go on.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// `PR_SET_NO_NEW_PRIVS` failed.
    #[error("sandbox: prctl(PR_SET_NO_NEW_PRIVS): {0}")]
    NoNewPrivileges(nix::errno::Errno),
    /// The heap could not be told to open no files.
    #[error("sandbox: mallopt(M_ARENA_MAX, {arenas}) is refused")]
    Heap {
        /// Arenas that were asked for.
        arenas: i32,
    },
    /// A capability set could not be emptied.
    #[error("sandbox: {set} capabilities cannot be dropped: {error}")]
    Capabilities {
        /// Which set.
        set: &'static str,
        /// Why.
        error: caps::errors::CapsError,
    },
    /// The kernel has Landlock, but refused the rule set.
    #[error("sandbox: Landlock: {0}")]
    Landlock(#[from] landlock::RulesetError),
    /// The kernel has Landlock and took the rule set, but does not enforce it.
    #[error("sandbox: Landlock is there but enforces nothing")]
    NotEnforced,
    /// A filter could not be built.
    #[error("sandbox: seccomp filter of the {list} list: {error}")]
    Compile {
        /// Which list.
        list: &'static str,
        /// Why.
        error: seccompiler::BackendError,
    },
    /// The kernel refused a filter.
    #[error("sandbox: seccomp filter of the {list} list: {error}")]
    Install {
        /// Which list.
        list: &'static str,
        /// Why.
        error: seccompiler::Error,
    },
}

/// Confines the process, for good. seccomp reaches all threads; Landlock and capabilities reach the calling thread and
/// those that it starts later, so call this before there are others.
pub fn enter(role: Role) -> Result<Report, SandboxError> {
    nix::sys::prctl::set_no_new_privs().map_err(SandboxError::NoNewPrivileges)?;
    heap::keep_from_files()?;
    let capabilities = privileges::drop_capabilities()?;
    match role {
        Role::Worker { channel, model } => {
            let files = files::deny_all()?;
            let mut rules = lists::worker(channel);
            if model {
                rules.extend(lists::model());
            }
            let allowed_calls = Some(seccomp::confine("worker", &rules)?);
            Ok(Report { capabilities, files: Some(files), allowed_calls })
        }
        Role::Device => {
            let files = files::deny_all()?;
            let allowed_calls = Some(seccomp::confine("device", &lists::device())?);
            Ok(Report { capabilities, files: Some(files), allowed_calls })
        }
        Role::Supervisor { model } => {
            match model {
                true => seccomp::deny("supervisor", &lists::never_with_model())?,
                false => seccomp::deny("supervisor", lists::never())?,
            }
            Ok(Report { capabilities, files: None, allowed_calls: None })
        }
    }
}
