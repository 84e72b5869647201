//! Reads of the topology archive.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Asks for a piece of the topology archive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TopologyReadRequest {
    /// Offset in the archive, in bytes. The archive is that of the context's start and does not change.
    pub offset: u64,
}

/// A piece of the topology archive, in the tail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TopologyReadAnswer {
    /// Bytes of the whole archive.
    pub total: u64,
    /// The host's `generation_id` when the archive was read.
    pub generation: u64,
}

const _: () = assert!(size_of::<TopologyReadRequest>() == 8);
const _: () = assert!(size_of::<TopologyReadAnswer>() == 16);
