//! Buffers and their mappings.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{GpuId, GuestVa, Handle, ResourceId, ShareToken};

/// `struct kfd_ioctl_alloc_memory_of_gpu_args`, with a blob in place of a CPU pointer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AllocMemoryRequest {
    /// Address in the guest process and on the GPU; a multiple of the page size.
    pub va: GuestVa,
    /// Bytes; a multiple of the page size.
    pub size: u64,
    /// The GPU that holds the memory, or whose process it belongs to.
    pub gpu_id: GpuId,
    /// `KFD_IOC_ALLOC_MEM_FLAGS_*`. With USERPTR the memory is that of `resource`.
    pub flags: u32,
    /// For USERPTR: the GUEST blob. Else none.
    pub resource: ResourceId,
    /// Zero.
    pub pad: u32,
    /// For USERPTR: offset in the blob in bytes; a multiple of the page size.
    pub resource_offset: u64,
}

/// Answer to an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AllocMemoryAnswer {
    /// The new buffer. A HOST3D blob with this number as its `blob_id` shows its memory, if it can be shown.
    pub handle: Handle,
    /// 1 if a HOST3D blob can show the memory, else 0.
    pub mappable: u32,
    /// Zero.
    pub pad: u32,
}

/// Answer to a map or an unmap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MapMemoryAnswer {
    /// GPUs of the list that were done.
    pub n_success: u32,
    /// Linux errno that ended the list early, or 0.
    pub errno: u32,
}

/// Answer to the question for free memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AvailableMemoryAnswer {
    /// Bytes that could be allocated.
    pub available: u64,
}

/// A piece of a buffer, and where one GPU is to see it (`struct drm_amdgpu_gem_va`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MapRangeRequest {
    /// The buffer.
    pub handle: Handle,
    /// Offset in the buffer in bytes; a multiple of the page size.
    pub offset: u64,
    /// Bytes; a multiple of the page size, not 0.
    pub size: u64,
    /// Address on the GPU; a multiple of the page size.
    pub va: GuestVa,
    /// The GPU.
    pub gpu_id: GpuId,
    /// `AMDGPU_VM_PAGE_*`: readable, writeable, executable, memory type.
    pub flags: u32,
}

/// What a [`MapRangeRequest`] made, to be taken away again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct UnmapRangeRequest {
    /// The buffer.
    pub handle: Handle,
    /// Address on the GPU.
    pub va: GuestVa,
    /// Bytes.
    pub size: u64,
    /// The GPU.
    pub gpu_id: GpuId,
    /// Zero.
    pub pad: u32,
}

/// A piece of a buffer for other contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ShareMemoryRequest {
    /// The buffer, of VRAM or of the host's memory.
    pub handle: Handle,
    /// Offset in the buffer in bytes; a multiple of the page size.
    pub offset: u64,
    /// Bytes; a multiple of the page size, not 0.
    pub size: u64,
}

/// Answer to a share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ShareMemoryAnswer {
    /// What another context needs to know. It is good until the buffer is freed or its context ends; who has the memory by
    /// then keeps it.
    pub token: ShareToken,
}

/// A token that is no longer to be good for anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct UnshareMemoryRequest {
    /// A token of this context's.
    pub token: ShareToken,
}

/// Memory of another context, and where it is to be seen here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ImportMemoryRequest {
    /// The HOST3D blob, which belongs to another context and is attached to this one.
    pub resource: ResourceId,
    /// The GPU that the buffer is made for.
    pub gpu_id: GpuId,
    /// Address in this process and on the GPU, or 0 for a buffer that only MapRange gives addresses to. A blob
    /// over a piece of a buffer can only have 0.
    pub va: GuestVa,
}

/// Answer to an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ImportMemoryAnswer {
    /// The new buffer. Its memory is what the blob shows, from offset 0 on.
    pub handle: Handle,
    /// Bytes.
    pub size: u64,
}

/// A register of a page of HDP flush registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FlushHdpRequest {
    /// The buffer, made with `KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP`.
    pub handle: Handle,
    /// Byte offset in the page (`enum kfd_mmio_remap`): 0 flushes memory, 4 registers.
    pub register: u32,
    /// Zero.
    pub pad: u32,
}

/// A request that names a blob.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ResourceRequest {
    /// The blob, attached to this context.
    pub resource: ResourceId,
    /// Zero.
    pub pad: u32,
}

/// What is behind a blob.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ResourceInfoAnswer {
    /// Bytes.
    pub size: u64,
    /// [`ResourceInfoAnswer::GUEST`] or [`ResourceInfoAnswer::HOST`].
    pub kind: u32,
    /// For memory of the host: the GPU that has it, as `AMDKFD_IOC_GET_DMABUF_INFO` answers. Else 0.
    pub gpu_id: GpuId,
    /// For memory of the host: `KFD_IOC_ALLOC_MEM_FLAGS_*` as `AMDKFD_IOC_GET_DMABUF_INFO` answers. Else 0.
    pub flags: u32,
    /// Zero.
    pub pad: u32,
}

impl ResourceInfoAnswer {
    /// Guest memory: AllocMemory with USERPTR makes a buffer of it.
    pub const GUEST: u32 = 1;
    /// Memory of the host, of another context: ImportMemory makes a buffer of it.
    pub const HOST: u32 = 2;
}

/// A request for what was left with a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BufferMetadataRequest {
    /// The buffer: VRAM of this context's or imported memory.
    pub handle: Handle,
    /// The GPU on whose render node it is asked. Another one than that which has the memory may have metadata of its own.
    pub gpu_id: GpuId,
    /// Zero.
    pub pad: u32,
}

/// What was left with a buffer; the bytes are in the tail. All zero where there is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BufferMetadataAnswer {
    /// Flags, none defined by Linux.
    pub flags: u64,
    /// `AMDGPU_TILING_*`
    pub tiling: u64,
}

/// What is to be left with a buffer; the bytes are in the tail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SetBufferMetadataRequest {
    /// The buffer: VRAM of this context's or imported memory.
    pub handle: Handle,
    /// The GPU on whose render node it is set.
    pub gpu_id: GpuId,
    /// Zero.
    pub pad: u32,
    /// Flags, none defined by Linux.
    pub flags: u64,
    /// `AMDGPU_TILING_*`
    pub tiling: u64,
}

const _: () = assert!(size_of::<AllocMemoryRequest>() == 40);
const _: () = assert!(size_of::<AllocMemoryAnswer>() == 16);
const _: () = assert!(size_of::<MapMemoryAnswer>() == 8);
const _: () = assert!(size_of::<MapRangeRequest>() == 40);
const _: () = assert!(size_of::<UnmapRangeRequest>() == 32);
const _: () = assert!(size_of::<ShareMemoryRequest>() == 24);
const _: () = assert!(size_of::<ImportMemoryRequest>() == 16);
const _: () = assert!(size_of::<ImportMemoryAnswer>() == 16);
const _: () = assert!(size_of::<ResourceInfoAnswer>() == 24);
const _: () = assert!(size_of::<BufferMetadataRequest>() == 16);
const _: () = assert!(size_of::<SetBufferMetadataRequest>() == 32);
