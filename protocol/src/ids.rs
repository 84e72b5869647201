//! Identifiers on the wire. Different kinds are different types, so that a missed translation does not compile.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A buffer of one guest context: an index into the worker's table and the generation of that slot.
///
/// On the wire it is one `u64`: the index in the low half, the generation in the high half. Generation 0 never
/// occurs, so that 0 is "none". Generation [`Handle::IN_FRAME`] means "the buffer that request number `index`
/// of this same frame made", so that an allocation and its mapping are one round trip. Other generations are
/// below 2^31: with the top bit set a `blob_id` is a [`ShareToken`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Handle(pub u64);

impl Handle {
    /// No buffer.
    pub const NONE: Handle = Handle(0);
    /// The generation that marks a reference to another request of the same frame.
    pub const IN_FRAME: u32 = u32::MAX;

    /// Makes a handle of an index and a generation.
    pub const fn new(index: u32, generation: u32) -> Self {
        Handle((generation as u64) << 32 | index as u64)
    }

    /// The buffer that request number `request` (from 0) of the same frame makes.
    pub const fn in_frame(request: u32) -> Self {
        Self::new(request, Self::IN_FRAME)
    }

    /// The low half: slot, or request number.
    pub const fn index(self) -> u32 {
        (self.0 & 0xffff_ffff) as u32
    }

    /// The high half.
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Whether this is [`Handle::NONE`].
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// What one context tells another one of the same VM, so that it may have a piece of a buffer: a random number with the
/// top bit set, drawn by the host. Who knows it may use it, so it is a secret; a wrong one opens nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct ShareToken(pub u64);

impl ShareToken {
    /// Set in every token and in no [`Handle`] that names a buffer.
    pub const BIT: u64 = 1 << 63;

    /// The token that a `blob_id` is, if it is one.
    pub const fn from_blob_id(blob_id: u64) -> Option<ShareToken> {
        // IN_FRAME handles have the bit too, but never stand in a blob_id.
        if blob_id & Self::BIT != 0 { Some(ShareToken(blob_id)) } else { None }
    }
}

/// KFD's id of a GPU (`gpu_id` file of a topology node; 0 for nodes without a GPU).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct GpuId(pub u32);

/// A virtual address in the guest process, which is also the GPU's address. Never used as a pointer on the host.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
)]
#[repr(transparent)]
pub struct GuestVa(pub u64);

/// A virtio-gpu resource id as the guest's driver gave it out (`res_handle`); 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct ResourceId(pub u32);

/// KFD's id of an event. It is also what the GPU's packets carry (`event_trigger_data`), so it is not translated.
/// Its scope is the worker's KFD process, which belongs to one guest process alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct EventId(pub u32);

/// KFD's id of a queue. Its scope is the worker's KFD process, which belongs to one guest process alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct QueueId(pub u32);
