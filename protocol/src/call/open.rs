//! Handshake.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The handshake's request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct HelloRequest {
    /// Oldest wire version that the guest speaks.
    pub version_min: u32,
    /// Newest wire version that the guest speaks.
    pub version_max: u32,
    /// [`crate::Features`] that the guest can use.
    pub features: u64,
    /// Process id in the guest, for the host's logs; means nothing else.
    pub guest_pid: u32,
    /// Zero.
    pub pad: u32,
    /// Name of the guest process, padded with zeros, for the host's logs.
    pub name: [u8; 16],
}

/// The handshake's answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct HelloAnswer {
    /// The wire version that both use from now on.
    pub version: u32,
    /// `kfd_ioctl_get_version_args.major_version`
    pub kfd_major: u32,
    /// `kfd_ioctl_get_version_args.minor_version`
    pub kfd_minor: u32,
    /// GPUs that this VM was given.
    pub gpu_count: u32,
    /// [`crate::Features`] that both have.
    pub features: u64,
}

const _: () = assert!(size_of::<HelloRequest>() == 40);
const _: () = assert!(size_of::<HelloAnswer>() == 24);
