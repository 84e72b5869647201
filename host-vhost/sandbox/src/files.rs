//! Landlock: no file of any file system, no TCP, no signals to and no abstract sockets of processes outside.

use std::fmt;

use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, RestrictionStatus, Ruleset, RulesetAttr, RulesetStatus,
    Scope,
};

use crate::SandboxError;

/// The newest Landlock whose rights are known here; of an older kernel's all are denied that it has.
const NEWEST: ABI = ABI::V7;

/// What Landlock does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// All that this kernel's Landlock can deny is denied. Descriptors that are open stay usable.
    Denied {
        /// Version of Landlock in effect.
        abi: i32,
    },
    /// The kernel has no Landlock, or it is switched off: seccomp alone keeps the process from opening files.
    Unavailable,
}

impl fmt::Display for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Files::Denied { abi } => write!(f, "no files (Landlock {abi})"),
            Files::Unavailable => write!(f, "no Landlock in this kernel"),
        }
    }
}

/// Denies everything that Landlock can deny, to the calling thread and those that it starts.
pub fn deny_all() -> Result<Files, SandboxError> {
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .restrict_self()?;
    judge(&status)
}

fn judge(status: &RestrictionStatus) -> Result<Files, SandboxError> {
    match (&status.landlock, &status.ruleset) {
        (LandlockStatus::NotEnabled | LandlockStatus::NotImplemented, _) => Ok(Files::Unavailable),
        (_, RulesetStatus::NotEnforced) => Err(SandboxError::NotEnforced),
        (LandlockStatus::Available { effective_abi, .. }, _) => {
            Ok(Files::Denied { abi: *effective_abi as i32 })
        }
    }
}
