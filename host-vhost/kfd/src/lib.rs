//! `/dev/kfd` and its render nodes, called through libc.
//!
//! One method for each ioctl, with typed arguments and without pointers in its signature: this crate is the only
//! place on the host side that makes an ioctl or maps guest memory. Everything goes through the libc symbols
//! (`open`, `ioctl`, `mmap`, `opendir`, `read`), so that the KFD model can stand under a process by preload
//! and the process has one KFD path in both cases.
//!
//! Nothing here knows of a guest. A CPU address is passed to the kernel only where a [`mapping::GuestMapping`]
//! owns it; that of a queue's context save area is one of the process for a kernel that reports exceptions alone, for which an
//! [`ExceptionPage`] can own it.

#![deny(clippy::arithmetic_side_effects)]

mod call;
mod dmabuf;
mod error;
mod event;
mod exceptions;
mod hdp;
pub mod kfd;
pub mod mapping;
mod memory;
mod process;
mod queue;
mod range;
pub mod render;
mod smi;
pub mod topology;
mod words;

pub use dmabuf::DmabufInfo;
pub use error::KfdError;
pub use event::{NewEvent, WaitOutcome};
pub use exceptions::ExceptionPage;
pub use hdp::{HdpPage, HdpRegister};
pub use kfd::{Kfd, Version};
pub use mapping::GuestMapping;
pub use memory::{Allocation, KfdHandle, MapOutcome, NewBuffer};
pub use process::{Clocks, PolicyRequest, TileConfig};
pub use queue::{Doorbells, NewQueue, Queue, QueueUpdate, WaveState};
pub use range::{GemHandle, Metadata, Range};
pub use render::{DriverVersion, RenderNode};
pub use smi::{SmiPlace, SmiPlaces};
pub use words::SharedWords;
