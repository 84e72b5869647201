//! Buffers on a render node, and pieces of them at addresses of its GPU.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use kfd_abi::drm::amdgpu::{
    AMDGPU_GEM_METADATA_OP_GET_METADATA, AMDGPU_GEM_METADATA_OP_SET_METADATA, AMDGPU_VA_OP_MAP,
    AMDGPU_VA_OP_UNMAP, GemMetadata, GemVa,
};
use kfd_abi::drm::{GemClose, PrimeHandle, request};
use nix::errno::Errno;

use crate::call::{arguments, ioctl};
use crate::error::KfdError;
use crate::render::RenderNode;

arguments! {
    PrimeHandle = "DRM_IOCTL_PRIME_FD_TO_HANDLE", request::PRIME_FD_TO_HANDLE;
    GemClose = "DRM_IOCTL_GEM_CLOSE", request::GEM_CLOSE;
    GemVa = "DRM_IOCTL_AMDGPU_GEM_VA", request::AMDGPU_GEM_VA;
    GemMetadata = "DRM_IOCTL_AMDGPU_GEM_METADATA", request::AMDGPU_GEM_METADATA;
}

/// A GEM handle: valid on one open render node only. The kernel gives the same one again for the same dma-buf, and one
/// close ends it (`drm_prime_lookup_buf_handle`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GemHandle(u32);

/// A piece of a buffer and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Address on the GPU.
    pub va: u64,
    /// Offset in the buffer in bytes.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// `AMDGPU_VM_PAGE_*` and the memory type.
    pub flags: u32,
}

/// What programs left with a buffer for others that have it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Flags, none defined by Linux.
    pub flags: u64,
    /// `AMDGPU_TILING_*`
    pub tiling: u64,
    /// At most 256 bytes.
    pub bytes: Vec<u8>,
}

impl RenderNode {
    /// `DRM_IOCTL_PRIME_FD_TO_HANDLE`
    pub fn import(&self, dmabuf: BorrowedFd<'_>) -> Result<GemHandle, KfdError> {
        let mut args = PrimeHandle { fd: dmabuf.as_raw_fd(), ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("descriptor {}", dmabuf.as_raw_fd()))?;
        Ok(GemHandle(args.handle))
    }

    /// `DRM_IOCTL_GEM_CLOSE`. Ranges that are still mapped may stay where KFD has the buffer as well, so unmap them
    /// first.
    pub fn close(&self, handle: GemHandle) -> Result<(), KfdError> {
        let mut args = GemClose { handle: handle.0, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("handle {}", handle.0))
    }

    /// `DRM_IOCTL_AMDGPU_GEM_VA`, map (on a compute process's address space: KFD 1.15). EINVAL where another mapping of
    /// this address space lies in the range, or the piece is not within the buffer (amdgpu_vm_bo_map).
    pub fn map_range(&self, handle: GemHandle, range: &Range) -> Result<(), KfdError> {
        self.range(handle, AMDGPU_VA_OP_MAP, range)
    }

    /// `DRM_IOCTL_AMDGPU_GEM_VA`, unmap: the mapping that begins at the range's address (amdgpu_vm_bo_unmap).
    pub fn unmap_range(&self, handle: GemHandle, va: u64, size: u64) -> Result<(), KfdError> {
        self.range(handle, AMDGPU_VA_OP_UNMAP, &Range { va, offset: 0, size, flags: 0 })
    }

    /// `DRM_IOCTL_AMDGPU_GEM_METADATA`, get.
    pub fn metadata(&self, handle: GemHandle) -> Result<Metadata, KfdError> {
        let mut args =
            GemMetadata { handle: handle.0, op: AMDGPU_GEM_METADATA_OP_GET_METADATA, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("get, handle {}", handle.0))?;
        let mut bytes: Vec<u8> = args.data.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.truncate(args.data_size_bytes as usize);
        Ok(Metadata { flags: args.flags, tiling: args.tiling_info, bytes })
    }

    /// `DRM_IOCTL_AMDGPU_GEM_METADATA`, set. EINVAL for more than 256 bytes.
    pub fn set_metadata(&self, handle: GemHandle, metadata: &Metadata) -> Result<(), KfdError> {
        let mut args = GemMetadata {
            handle: handle.0,
            op: AMDGPU_GEM_METADATA_OP_SET_METADATA,
            flags: metadata.flags,
            tiling_info: metadata.tiling,
            data_size_bytes: u32::try_from(metadata.bytes.len()).unwrap_or(u32::MAX),
            ..Default::default()
        };
        for (word, bytes) in args.data.iter_mut().zip(metadata.bytes.chunks(4)) {
            let mut whole = [0; 4];
            whole.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            *word = u32::from_ne_bytes(whole);
        }
        let describe = || format!("set, handle {}, {} bytes", handle.0, metadata.bytes.len());
        ioctl(self.as_fd(), &mut args, describe)
    }

    fn range(&self, handle: GemHandle, operation: u32, range: &Range) -> Result<(), KfdError> {
        let mut args = GemVa {
            handle: handle.0,
            operation,
            flags: range.flags,
            va_address: range.va,
            offset_in_bo: range.offset,
            map_size: range.size,
            ..Default::default()
        };
        let describe = || format!("operation {operation}, {range:x?}");
        loop {
            match ioctl(self.as_fd(), &mut args, describe) {
                // Waiting for the page table was interrupted before anything was changed; libdrm asks again too (drmIoctl).
                Err(error) if error.errno == Errno::EAGAIN => continue,
                other => return other,
            }
        }
    }
}
