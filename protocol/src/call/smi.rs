//! System management events: lines of text of a GPU.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A request that names a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SmiStream {
    /// The stream. Its scope is one context, in which no number is used again soon.
    pub stream: u32,
    /// Zero.
    pub pad: u32,
}

/// Asks for lines of any stream of the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ReadSmiRequest {
    /// Milliseconds; 0 only looks, `u32::MAX` waits for ever.
    pub timeout: u32,
    /// Zero.
    pub pad: u32,
}

/// Whole lines of one stream; the tail is their text, each with its newline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ReadSmiAnswer {
    /// [`SMI_LINES`], [`SMI_NOTHING`] or [`SMI_CLOSED`].
    pub outcome: u32,
    /// With [`SMI_LINES`], the stream.
    pub stream: u32,
    /// The host's `CLOCK_BOOTTIME` when it answered, in ns: lines with a time have it by this clock.
    pub boot_time: u64,
}

/// [`ReadSmiAnswer::outcome`]: the time was up.
pub const SMI_NOTHING: u32 = 0;
/// [`ReadSmiAnswer::outcome`]: there are lines.
pub const SMI_LINES: u32 = 1;
/// [`ReadSmiAnswer::outcome`]: the context has no stream.
pub const SMI_CLOSED: u32 = 2;

const _: () = assert!(size_of::<SmiStream>() == 8);
const _: () = assert!(size_of::<ReadSmiRequest>() == 8);
const _: () = assert!(size_of::<ReadSmiAnswer>() == 16);
