//! The render node: DRM's own ioctls (include/uapi/drm/drm.h) and the part of amdgpu's
//! ([`amdgpu`]) that a compute process uses. Pointers and `size_t` are those of a 64-bit process.

pub mod amdgpu;

use amdgpu::{GemCreate, GemMetadata, GemMmap, GemOp, GemVa, Info};

use crate::ioctl::ioctls;
use crate::layout::{abi_consts, abi_structs};

/// The ioctl type letter of DRM (`DRM_IOCTL_BASE`).
pub const DRM_IOCTL_BASE: u8 = b'd';

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of VERSION. Called twice: with lengths 0 to learn them, then with memory.
    struct Version = "struct drm_version", size 64 {
        /// Out: major version.
        version_major: i32 = 0;
        /// Out: minor version.
        version_minor: i32 = 4;
        /// Out: patch level.
        version_patchlevel: i32 = 8;
        /// Padding, unnamed in C.
        pad as "": u32 = 12;
        /// In: size of the name buffer in bytes. Out: length of the name.
        name_len: u64 = 16;
        /// In: pointer to the name buffer.
        name: u64 = 24;
        /// In: size of the date buffer in bytes. Out: length of the date.
        date_len: u64 = 32;
        /// In: pointer to the date buffer.
        date: u64 = 40;
        /// In: size of the description buffer in bytes. Out: length of the description.
        desc_len: u64 = 48;
        /// In: pointer to the description buffer.
        desc: u64 = 56;
    }

    /// Argument of GET_CLIENT.
    struct Client = "struct drm_client", size 40 {
        /// In: which client; only 0, the caller, is answered.
        idx: i32 = 0;
        /// Out: whether it is authenticated.
        auth: i32 = 4;
        /// Out: process id.
        pid: u64 = 8;
        /// Out: user id.
        uid: u64 = 16;
        /// Out: magic, 0.
        magic: u64 = 24;
        /// Out: number of ioctls, 0.
        iocs: u64 = 32;
    }

    /// Argument of GET_CAP.
    struct GetCap = "struct drm_get_cap", size 16 {
        /// In: `DRM_CAP_*`.
        capability: u64 = 0;
        /// Out: its value.
        value: u64 = 8;
    }

    /// Argument of GEM_CLOSE.
    struct GemClose = "struct drm_gem_close", size 8 {
        /// In: the GEM handle.
        handle: u32 = 0;
        /// Padding.
        pad: u32 = 4;
    }

    /// Argument of PRIME_HANDLE_TO_FD and PRIME_FD_TO_HANDLE.
    struct PrimeHandle = "struct drm_prime_handle", size 12 {
        /// The GEM handle.
        handle: u32 = 0;
        /// In: `DRM_CLOEXEC`, `DRM_RDWR`, for HANDLE_TO_FD.
        flags: u32 = 4;
        /// Descriptor of the dma-buf.
        fd: i32 = 8;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u8 {
        /// Number of the first driver-specific ioctl.
        DRM_COMMAND_BASE = 0x40;
        /// One past the last driver-specific ioctl.
        DRM_COMMAND_END = 0xa0;
    }
    Macro u64 {
        /// Dumb buffers.
        DRM_CAP_DUMB_BUFFER = 0x1;
        /// dma-bufs: [`DRM_PRIME_CAP_IMPORT`] and [`DRM_PRIME_CAP_EXPORT`].
        DRM_CAP_PRIME = 0x5;
        /// May import.
        DRM_PRIME_CAP_IMPORT = 0x1;
        /// May export.
        DRM_PRIME_CAP_EXPORT = 0x2;
        /// Time stamps are monotonic.
        DRM_CAP_TIMESTAMP_MONOTONIC = 0x6;
        /// Sync objects.
        DRM_CAP_SYNCOBJ = 0x13;
        /// Timeline sync objects.
        DRM_CAP_SYNCOBJ_TIMELINE = 0x14;
    }
    Macro u32 {
        /// [`PrimeHandle::flags`]: close on exec (`O_CLOEXEC`).
        DRM_CLOEXEC = 0o2000000;
        /// [`PrimeHandle::flags`]: mappable for reading and writing (`O_RDWR`).
        DRM_RDWR = 0o2;
    }
}

ioctls! {
    /// The ioctls of an amdgpu render node that a compute process uses.
    pub const IOCTLS: "DRM_IOCTL_", DRM_IOCTL_BASE;
    /// The driver's name and version.
    VERSION = 0x00, ReadWrite, Version, since 0;
    /// Whether the caller is authenticated.
    GET_CLIENT = 0x05, ReadWrite, Client, since 0;
    /// Closes a GEM handle.
    GEM_CLOSE = 0x09, Write, GemClose, since 0;
    /// Asks for a capability.
    GET_CAP = 0x0c, ReadWrite, GetCap, since 0;
    /// Exports a GEM handle as a dma-buf.
    PRIME_HANDLE_TO_FD = 0x2d, ReadWrite, PrimeHandle, since 0;
    /// Imports a dma-buf as a GEM handle.
    PRIME_FD_TO_HANDLE = 0x2e, ReadWrite, PrimeHandle, since 0;
    /// Allocates a buffer.
    AMDGPU_GEM_CREATE = DRM_COMMAND_BASE, ReadWrite, GemCreate, since 0;
    /// The mmap offset of a buffer.
    AMDGPU_GEM_MMAP = DRM_COMMAND_BASE + 0x01, ReadWrite, GemMmap, since 0;
    /// Asks about the GPU.
    AMDGPU_INFO = DRM_COMMAND_BASE + 0x05, Write, Info, since 0;
    /// Metadata of a buffer.
    AMDGPU_GEM_METADATA = DRM_COMMAND_BASE + 0x06, ReadWrite, GemMetadata, since 0;
    /// Maps and unmaps a buffer in the GPU's address space.
    AMDGPU_GEM_VA = DRM_COMMAND_BASE + 0x08, Write, GemVa, since 0;
    /// How a buffer was made, and where it shall lie.
    AMDGPU_GEM_OP = DRM_COMMAND_BASE + 0x10, ReadWrite, GemOp, since 0;
}
