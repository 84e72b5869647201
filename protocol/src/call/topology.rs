//! Reads of the topology archive.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Asks for a piece of the topology archive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TopologyReadRequest {
    /// Offset in the archive, in bytes. 0 takes a new snapshot; the others read the one taken last.
    pub offset: u64,
}

/// A piece of the topology archive, in the tail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TopologyReadAnswer {
    /// Bytes of the whole archive.
    pub total: u64,
    /// The archive's `generation_id`; a client that sees it change between pieces begins again.
    pub generation: u64,
}

const _: () = assert!(size_of::<TopologyReadRequest>() == 8);
const _: () = assert!(size_of::<TopologyReadAnswer>() == 16);
