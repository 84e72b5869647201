//! Why a call is refused, and the library's messages.
//!
//! Like AMD's library, this one is silent unless `HSAKMT_DEBUG_LEVEL` asks for messages: 3 errors, 4 warnings,
//! 6 information, 7 everything.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU8, Ordering};

use hsakmt_abi::status::HsakmtStatus;
use thiserror::Error;
use virtio_kfd_protocol::Status;

use crate::client::{Client, ClientError};

/// Result of a call's logic.
pub type Outcome<T> = Result<T, Refusal>;

/// A call that was not done: what its caller gets, and why.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{status}: {why}")]
pub struct Refusal {
    /// What the caller gets.
    pub status: HsakmtStatus,
    /// Argument, what was found, what was expected.
    pub why: Cow<'static, str>,
}

impl Refusal {
    /// A refusal with a reason.
    pub fn new(status: HsakmtStatus, why: impl Into<Cow<'static, str>>) -> Self {
        Refusal { status, why: why.into() }
    }

    /// `HSAKMT_STATUS_INVALID_PARAMETER`
    pub fn parameter(why: impl Into<Cow<'static, str>>) -> Self {
        Self::new(HsakmtStatus::INVALID_PARAMETER, why)
    }

    /// `HSAKMT_STATUS_INVALID_HANDLE`
    pub fn handle(why: impl Into<Cow<'static, str>>) -> Self {
        Self::new(HsakmtStatus::INVALID_HANDLE, why)
    }

    /// `HSAKMT_STATUS_ERROR`
    pub fn error(why: impl Into<Cow<'static, str>>) -> Self {
        Self::new(HsakmtStatus::ERROR, why)
    }

    /// `HSAKMT_STATUS_KERNEL_IO_CHANNEL_NOT_OPENED`
    pub fn closed() -> Self {
        Self::new(HsakmtStatus::KERNEL_IO_CHANNEL_NOT_OPENED, "hsaKmtOpenKFD has not been called")
    }

    /// The same as `HSAKMT_STATUS_NO_MEMORY`, for calls that do not say more where something of theirs fails; a lost connection
    /// is no want of memory.
    pub fn as_no_memory(self, client: &Client) -> Self {
        let status = if client.is_lost() { HsakmtStatus::ERROR } else { HsakmtStatus::NO_MEMORY };
        Self { status, ..self }
    }

    /// The host did not do it. `status` is what the call answers where nothing says more.
    pub fn host(status: HsakmtStatus, error: &ClientError) -> Self {
        let status = match error {
            ClientError::Forked { .. } => HsakmtStatus::KERNEL_IO_CHANNEL_NOT_OPENED,
            // As an ioctl that fails, whatever the call answers for want of something else: trying again is no use.
            ClientError::Lost(_) => HsakmtStatus::ERROR,
            _ => match error.status() {
                Some((Status::NOT_IMPLEMENTED | Status::UNKNOWN_CALL, _)) => HsakmtStatus::NOT_IMPLEMENTED,
                Some((Status::NOT_SUPPORTED, _)) => HsakmtStatus::NOT_SUPPORTED,
                Some((Status::LIMIT, _)) => HsakmtStatus::OUT_OF_RESOURCES,
                _ => status,
            },
        };
        Self::new(status, error.to_string())
    }
}

/// The host's refusal where AMD's library answers `HSAKMT_STATUS_ERROR` to a failed ioctl.
impl From<ClientError> for Refusal {
    fn from(error: ClientError) -> Self {
        Self::host(HsakmtStatus::ERROR, &error)
    }
}

/// How much is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Calls that fail.
    Error = 3,
    /// What is odd but goes on.
    Warning = 4,
    /// What was found.
    Info = 6,
    /// Every call.
    Debug = 7,
}

static LEVEL: AtomicU8 = AtomicU8::new(0);

/// Reads `HSAKMT_DEBUG_LEVEL`; called at each open.
pub fn read_level() {
    let asked = std::env::var("HSAKMT_DEBUG_LEVEL").ok().and_then(|value| value.trim().parse::<u8>().ok());
    let level = asked.filter(|level| (Level::Error as u8..=Level::Debug as u8).contains(level)).unwrap_or(0);
    LEVEL.store(level, Ordering::Relaxed);
}

/// Writes a message to standard error if it is asked for: one system call and no lock that a fork could find held.
pub fn say(level: Level, message: impl FnOnce() -> String) {
    if level as u8 <= LEVEL.load(Ordering::Relaxed) {
        tell(&message());
    }
}

/// As [`say`], whatever is asked for.
pub fn tell(message: &str) {
    let line = format!("libhsakmt (virtio-kfd): {message}\n");
    // Nothing better can be done where standard error is closed.
    let _ = nix::unistd::write(std::io::stderr(), line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_its_status() {
        let refusal = Refusal::parameter("SizeInBytes is 1, expected a multiple of 4096");
        assert!(refusal.to_string().contains("HSAKMT_STATUS_INVALID_PARAMETER: SizeInBytes"), "{refusal}");
    }

    #[test]
    fn a_forked_child_is_told_that_nothing_is_open() {
        let refusal = Refusal::from(ClientError::Forked { owner: 1 });
        assert_eq!(refusal.status, HsakmtStatus::KERNEL_IO_CHANNEL_NOT_OPENED);
        let refusal = Refusal::from(ClientError::Lost("gone".into()));
        assert_eq!(refusal.status, HsakmtStatus::ERROR);
        let refusal = Refusal::host(HsakmtStatus::NO_MEMORY, &ClientError::Lost("gone".into()));
        assert_eq!(refusal.status, HsakmtStatus::ERROR);
    }
}
