//! The render node's questions.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::GpuId;

/// `struct drm_version`: the numbers; the name is `amdgpu`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RenderVersionAnswer {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Patch level.
    pub patch: u32,
    /// Zero.
    pub pad: u32,
}

/// `struct drm_amdgpu_info`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RenderInfoRequest {
    /// The GPU.
    pub gpu_id: GpuId,
    /// `AMDGPU_INFO_*`
    pub query: u32,
    /// Bytes of answer that are asked for, at most 4096.
    pub return_size: u32,
    /// The four words of the query's own union.
    pub arguments: [u32; 4],
    /// Zero.
    pub pad: u32,
}

/// Answer; the bytes are in the tail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RenderInfoAnswer {
    /// Bytes that the kernel was asked for and that stand in the tail.
    pub size: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<RenderInfoRequest>() == 32);
