//! The handshake: what stands in the capset, and how a version is agreed on.

use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// virtio-gpu capset id. The number that the published virtio path of ROCm uses, so that its dialects can
/// be served beside ours later; ours is told apart by [`CAPSET_VERSION`] and by [`CAPSET_MAGIC`].
pub const CAPSET_ID: u32 = 8;

/// The capset version under which [`Capset`] is served.
pub const CAPSET_VERSION: u32 = 1;

/// First word of [`Capset`]: "VKFD" in little-endian. A client of another dialect reads it as an absurd wire version.
pub const CAPSET_MAGIC: u32 = u32::from_le_bytes(*b"VKFD");

/// Oldest wire version that this build speaks.
pub const VERSION_MIN: u32 = 1;

/// Newest wire version that this build speaks.
pub const VERSION_MAX: u32 = 1;

bitflags::bitflags! {
    /// Optional parts of the protocol. A bit is used only when both sides have it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// The VMM maps host memory into the guest (shared memory window), so HOST3D blobs can be mapped.
        const HOST_BLOBS = 1 << 0;
        /// GPU buffers over guest memory (`ALLOC_MEMORY` with a GUEST blob).
        const GUEST_MEMORY = 1 << 1;
        /// A runtime can be enabled (`RUNTIME_ENABLE`): exceptions of queues reach the guest process as the heads of the
        /// queues' context save areas say.
        const EXCEPTIONS = 1 << 2;
    }
}

/// The capset: the first thing that a guest reads of the host, before it makes a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Capset {
    /// [`CAPSET_MAGIC`]
    pub magic: u32,
    /// Size of this structure in bytes as the host knows it.
    pub size: u32,
    /// Oldest wire version that the host speaks.
    pub version_min: u32,
    /// Newest wire version that the host speaks.
    pub version_max: u32,
    /// [`Features`] that the host offers.
    pub features: u64,
    /// Largest request frame that the host takes, in bytes.
    pub max_frame_bytes: u32,
    /// Largest answer that the host gives, in bytes.
    pub max_answer_bytes: u32,
    /// Rings of a context.
    pub max_rings: u32,
    /// GPUs that this VM was given.
    pub gpu_count: u32,
    /// Zero.
    pub reserved: [u32; 6],
}

const _: () = assert!(size_of::<Capset>() == 64);
const _: () = assert!(core::mem::offset_of!(Capset, features) == 16);
const _: () = assert!(core::mem::offset_of!(Capset, max_frame_bytes) == 24);
const _: () = assert!(core::mem::offset_of!(Capset, gpu_count) == 36);

impl Capset {
    /// What a host with these features and that many GPUs announces.
    pub fn announce(features: Features, gpu_count: u32) -> Self {
        Capset {
            magic: CAPSET_MAGIC,
            size: size_of::<Capset>() as u32,
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: features.bits(),
            max_frame_bytes: crate::limits::MAX_FRAME_BYTES as u32,
            max_answer_bytes: crate::limits::MAX_ANSWER_BYTES as u32,
            max_rings: crate::limits::MAX_RINGS,
            gpu_count,
            reserved: [0; 6],
        }
    }

    /// Reads a capset as a guest gets it. Longer ones (a newer host) are cut, shorter ones refused.
    pub fn parse(bytes: &[u8]) -> Result<Self, HandshakeError> {
        let (capset, _) = Capset::read_from_prefix(bytes)
            .map_err(|_| HandshakeError::Short { found: bytes.len(), expected: size_of::<Capset>() })?;
        if capset.magic != CAPSET_MAGIC {
            return Err(HandshakeError::Magic { found: capset.magic, expected: CAPSET_MAGIC });
        }
        Ok(capset)
    }
}

/// Why two peers cannot talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HandshakeError {
    /// Fewer bytes than the structure has.
    #[error("virtio-kfd handshake: the capset has {found} bytes, expected at least {expected}")]
    Short {
        /// Bytes that came.
        found: usize,
        /// Bytes of [`Capset`].
        expected: usize,
    },
    /// The device serves capset 8 but is not virtio-kfd.
    #[error(
        "virtio-kfd handshake: capset {CAPSET_ID} begins with {found:#010x}, expected {expected:#010x}: this device speaks another protocol"
    )]
    Magic {
        /// First word that came.
        found: u32,
        /// [`CAPSET_MAGIC`]
        expected: u32,
    },
    /// The ranges do not meet.
    #[error(
        "virtio-kfd handshake: the guest speaks wire versions {guest_min} to {guest_max}, the host {host_min} to {host_max}: no version in common, update the older side"
    )]
    Version {
        /// Oldest version of the guest.
        guest_min: u32,
        /// Newest version of the guest.
        guest_max: u32,
        /// Oldest version of the host.
        host_min: u32,
        /// Newest version of the host.
        host_max: u32,
    },
}

/// The newest version that both ranges hold. Both sides use this same function, so both can tell the user
/// the same sentence.
pub fn agree(guest: (u32, u32), host: (u32, u32)) -> Result<u32, HandshakeError> {
    let newest = guest.1.min(host.1);
    let oldest = guest.0.max(host.0);
    if guest.0 > guest.1 || host.0 > host.1 || newest < oldest {
        return Err(HandshakeError::Version {
            guest_min: guest.0,
            guest_max: guest.1,
            host_min: host.0,
            host_max: host.1,
        });
    }
    Ok(newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_meet_at_the_newest_common_version() {
        assert_eq!(agree((1, 3), (2, 5)), Ok(3));
        assert_eq!(agree((4, 4), (2, 5)), Ok(4));
    }

    #[test]
    fn a_mismatch_names_both_ranges() {
        let text = agree((1, 2), (3, 4)).unwrap_err().to_string();
        assert!(text.contains("1 to 2") && text.contains("3 to 4"), "{text}");
        assert!(agree((2, 1), (1, 2)).is_err(), "an empty range agrees with nothing");
    }

    #[test]
    fn a_foreign_capset_is_told_apart() {
        // The other dialect's capset begins with wire_format_version 0.
        let foreign = [0u8; 64];
        assert!(matches!(Capset::parse(&foreign), Err(HandshakeError::Magic { found: 0, .. })));
        assert!(matches!(
            Capset::parse(&foreign[..24]),
            Err(HandshakeError::Short { found: 24, expected: 64 })
        ));
    }

    #[test]
    fn golden_bytes() {
        let capset = Capset::announce(Features::HOST_BLOBS | Features::GUEST_MEMORY, 2);
        let mut golden = Vec::new();
        golden.extend(b"VKFD");
        for word in [64u32, 1, 1, 3, 0, 131072, 131072, 64, 2] {
            golden.extend(word.to_le_bytes());
        }
        golden.resize(64, 0);
        assert_eq!(capset.as_bytes(), golden);
        assert_eq!(Capset::parse(&golden), Ok(capset));
    }
}
