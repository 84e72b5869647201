//! Requests and answers of the calls, by noun.

mod event;
mod memory;
mod open;
mod process;
mod queue;
mod render;
mod smi;
mod topology;

pub use event::*;
pub use memory::*;
pub use open::*;
pub use process::*;
pub use queue::*;
pub use render::*;
pub use smi::*;
pub use topology::*;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{GpuId, Handle};

/// A fixed part without content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Nothing {}

/// A request that names a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct GpuRequest {
    /// The GPU; 0 where the call takes none.
    pub gpu_id: GpuId,
    /// Zero.
    pub pad: u32,
}

/// A request that names a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BufferRequest {
    /// The buffer.
    pub handle: Handle,
}

/// A GPU in a list of GPUs.
pub type GpuIdElement = GpuId;
