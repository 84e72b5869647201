//! The virtio-kfd wire.
//!
//! A guest process is a virtio-gpu context. It sends [frames](frame) of KFD-level requests on the context's
//! rings and gets answers in a blob of its own memory. Requests say what the ioctls, mmaps and topology reads
//! of `/dev/kfd` mean, in guest addresses and handles; nothing on the wire is a host pointer.
//!
//! [`calls::CALLS`] is the one table of calls. [`version`] has the handshake, [`limits`] the bounds.

#![deny(clippy::arithmetic_side_effects)]

#[cfg(target_endian = "big")]
compile_error!("the wire is little-endian and its structures are used in place");

pub mod call;
pub mod calls;
pub mod frame;
pub mod ids;
pub mod limits;
pub mod page;
pub mod status;
pub mod topology;
pub mod version;

pub use call::*;
pub use calls::{CALLS, Call, CallInfo, CallType, Request, Ring};
pub use ids::{EventId, GpuId, GuestVa, Handle, QueueId, ResourceId, ShareToken};
pub use status::Status;
pub use version::{Capset, Features, HandshakeError};
