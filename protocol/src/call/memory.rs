//! Buffers and their mappings.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{GpuId, GuestVa, Handle, ResourceId};

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

const _: () = assert!(size_of::<AllocMemoryRequest>() == 40);
const _: () = assert!(size_of::<AllocMemoryAnswer>() == 16);
const _: () = assert!(size_of::<MapMemoryAnswer>() == 8);
