//! Messages between the processes of the host side, over `SOCK_SEQPACKET` socket pairs.
//!
//! Three kinds of process: the **supervisor** (starts and reaps workers, knows nothing of the guest), the
//! **device** (faces the guest: vhost-user, virtqueues, virtio-gpu commands) and one **worker** for each guest
//! context (holds `/dev/kfd`). Device and worker talk over [`worker`] messages, device and supervisor over
//! [`supervisor`] messages. Each message is one datagram: a postcard-encoded enum, with descriptors beside it.

#![deny(clippy::arithmetic_side_effects)]

mod channel;
pub mod ledger;
pub mod supervisor;
pub mod worker;

pub use channel::{Channel, IpcError, MAX_DESCRIPTORS, MAX_MESSAGE_BYTES};

/// The descriptor number at which an exec'd process finds its [`Channel`].
pub const IPC_FD: i32 = 3;
