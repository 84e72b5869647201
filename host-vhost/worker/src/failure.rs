//! Why a request failed.

use kfd_host::KfdError;
use nix::errno::Errno;
use thiserror::Error;
use virtio_kfd_protocol::Status;

/// What the answer's header says, and a sentence for the log.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{status}: {reason}")]
pub struct Failure {
    /// The status.
    pub status: Status,
    /// The errno beside [`Status::ERRNO`], else 0.
    pub errno: u32,
    /// What was wrong.
    pub reason: String,
}

impl Failure {
    /// A failure that this worker decides on.
    pub fn new(status: Status, reason: impl Into<String>) -> Self {
        Failure { status, errno: 0, reason: reason.into() }
    }

    /// [`Status::INVALID`]
    pub fn invalid(reason: impl Into<String>) -> Self {
        Self::new(Status::INVALID, reason)
    }

    /// [`Status::LIMIT`]
    pub fn limit(reason: impl Into<String>) -> Self {
        Self::new(Status::LIMIT, reason)
    }
}

impl From<KfdError> for Failure {
    fn from(error: KfdError) -> Self {
        Failure { status: Status::ERRNO, errno: errno_number(error.errno), reason: error.to_string() }
    }
}

/// An errno as the wire has it.
pub fn errno_number(errno: Errno) -> u32 {
    (errno as i32).unsigned_abs()
}

/// Refuses content in fields that have none.
pub fn expect_zero(what: &str, fields: &[u64]) -> Result<(), Failure> {
    match fields.iter().all(|&field| field == 0) {
        true => Ok(()),
        false => Err(Failure::invalid(format!("{what}: a field that has to be 0 is not"))),
    }
}
