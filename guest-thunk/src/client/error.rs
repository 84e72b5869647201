//! What can go wrong with a client, and how it is said.

use std::io::stderr;

use thiserror::Error;
use virtio_kfd_protocol::frame::{CallError, FrameError};
use virtio_kfd_protocol::topology::ArchiveError;
use virtio_kfd_protocol::{HandshakeError, Status};

use crate::transport::TransportError;

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// There is no device, or it cannot be used.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The host speaks another version.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The host did not answer the handshake as it should.
    #[error("virtio-kfd handshake: {0}")]
    Hello(#[source] ClientError),
    /// The host offers less than the guest library needs.
    #[error("virtio-kfd handshake: the host offers {found} {what}, expected {expected}")]
    Offer {
        /// What it offers.
        what: &'static str,
        /// How many or much.
        found: u64,
        /// What it should be.
        expected: &'static str,
    },
}

/// Why a call did not work.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The host refused the request, or its answer cannot be read.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The requests do not fit in a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The topology that the host gave cannot be read.
    #[error(transparent)]
    Topology(#[from] ArchiveError),
    /// The topology changed in every attempt to read it.
    #[error("TopologyRead: the generation changed in each of {attempts} attempts")]
    TopologyUnstable {
        /// Attempts made.
        attempts: u32,
    },
    /// The guest's kernel or the VMM could not do it; the connection goes on.
    #[error(transparent)]
    Transport(TransportError),
    /// The connection is lost; no call works any more.
    #[error("the connection to the host is lost: {0}")]
    Lost(String),
    /// The client was connected by a process that this one was forked from.
    #[error("the connection belongs to process {owner}, which this process was forked from")]
    Forked {
        /// Who connected.
        owner: u32,
    },
}

impl ClientError {
    /// The status and errno that the host answered, if it did.
    pub fn status(&self) -> Option<(Status, u32)> {
        match self {
            ClientError::Call(CallError::Failed { status, errno, .. }) => Some((*status, *errno)),
            _ => None,
        }
    }

    /// The Linux errno of the host's kernel, if it was the one that refused.
    pub fn errno(&self) -> Option<i32> {
        match self.status() {
            Some((Status::ERRNO, errno)) => i32::try_from(errno).ok(),
            _ => None,
        }
    }
}

/// Writes a line to standard error in one system call and without a lock of the standard library, which
/// another thread may hold while this process forks.
pub(super) fn say(line: &str) {
    // Nothing better can be done where standard error is closed.
    let _ = nix::unistd::write(stderr(), line.as_bytes());
}
