//! The host's refusals as the errors that the kernel has for them.

use guest_thunk::client::ClientError;
use guest_thunk::thunk::refusal::{Level, Refusal, say};
use guest_thunk::transport::TransportError;
use nix::errno::Errno;
use virtio_kfd_protocol::Status;

/// The error of a call.
pub fn errno(error: ClientError) -> Errno {
    say(Level::Error, || error.to_string());
    match &error {
        ClientError::Forked { .. } => Errno::EBADF,
        ClientError::Lost(_) => Errno::EIO,
        ClientError::Transport(TransportError::System { error, .. }) => {
            error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
        }
        ClientError::Transport(TransportError::NotSupported(_)) => Errno::EOPNOTSUPP,
        ClientError::Transport(_) => Errno::EIO,
        ClientError::Frame(_) => Errno::EINVAL,
        ClientError::Topology(_) | ClientError::TopologyUnstable { .. } => Errno::EIO,
        ClientError::Call(_) => match error.status() {
            Some((Status::ERRNO, number)) => i32::try_from(number).map_or(Errno::EIO, Errno::from_raw),
            Some((Status::NOT_IMPLEMENTED | Status::NOT_SUPPORTED | Status::UNKNOWN_CALL, _)) => {
                Errno::EOPNOTSUPP
            }
            Some((Status::LIMIT, _)) => Errno::ENOMEM,
            Some((Status::WORKER_LOST, _)) => Errno::EIO,
            _ => Errno::EINVAL,
        },
    }
}

/// The error of what guest-thunk did for its own callers, of which no errno is left.
pub fn refused(refusal: &Refusal, errno: Errno) -> Errno {
    say(Level::Error, || refusal.to_string());
    errno
}

/// The same for what the transport did.
pub fn transport(error: TransportError) -> Errno {
    errno(ClientError::Transport(error))
}
