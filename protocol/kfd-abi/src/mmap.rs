//! Offsets for `mmap` on /dev/kfd. The encoding is kernel-internal (drivers/gpu/drm/amd/amdkfd/kfd_priv.h)
//! but callers depend on it: they get such offsets from CREATE_QUEUE, CREATE_EVENT and ALLOC_MEMORY_OF_GPU.
//!
//! Bits 63 to 62 hold the type, 61 to 46 the GPU id, 45 to 0 a value in bytes.

/// Position of the type.
pub const KFD_MMAP_TYPE_SHIFT: u32 = 62;
/// Bits of the type.
pub const KFD_MMAP_TYPE_MASK: u64 = 0x3 << KFD_MMAP_TYPE_SHIFT;
/// Type: the process's doorbell slice of a GPU.
pub const KFD_MMAP_TYPE_DOORBELL: u64 = 0x3 << KFD_MMAP_TYPE_SHIFT;
/// Type: the event page.
pub const KFD_MMAP_TYPE_EVENTS: u64 = 0x2 << KFD_MMAP_TYPE_SHIFT;
/// Type: memory of the trap handler on APUs.
pub const KFD_MMAP_TYPE_RESERVED_MEM: u64 = 0x1 << KFD_MMAP_TYPE_SHIFT;
/// Type: the page of remapped registers.
pub const KFD_MMAP_TYPE_MMIO: u64 = 0x0 << KFD_MMAP_TYPE_SHIFT;
/// Width of a GPU id in bits.
pub const KFD_GPU_ID_HASH_WIDTH: u32 = 16;
/// Position of the GPU id.
pub const KFD_MMAP_GPU_ID_SHIFT: u32 = 46;
/// Bits of the GPU id.
pub const KFD_MMAP_GPU_ID_MASK: u64 = ((1 << KFD_GPU_ID_HASH_WIDTH) - 1) << KFD_MMAP_GPU_ID_SHIFT;

/// What an offset shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MmapType {
    /// The page of remapped registers.
    Mmio,
    /// Memory of the trap handler on APUs.
    ReservedMem,
    /// The event page.
    Events,
    /// A doorbell slice.
    Doorbell,
}

impl MmapType {
    /// The type bits of an offset.
    pub const fn bits(self) -> u64 {
        match self {
            Self::Mmio => KFD_MMAP_TYPE_MMIO,
            Self::ReservedMem => KFD_MMAP_TYPE_RESERVED_MEM,
            Self::Events => KFD_MMAP_TYPE_EVENTS,
            Self::Doorbell => KFD_MMAP_TYPE_DOORBELL,
        }
    }

    /// The type of an offset.
    pub const fn of(offset: u64) -> Self {
        match offset >> KFD_MMAP_TYPE_SHIFT {
            0 => Self::Mmio,
            1 => Self::ReservedMem,
            2 => Self::Events,
            _ => Self::Doorbell,
        }
    }
}

/// The offset of a type and GPU. Bits of `gpu_id` above the lower 16 are cut off, as the kernel does.
pub const fn offset(kind: MmapType, gpu_id: u32) -> u64 {
    kind.bits() | (((gpu_id as u64) << KFD_MMAP_GPU_ID_SHIFT) & KFD_MMAP_GPU_ID_MASK)
}

/// The GPU id in an offset.
pub const fn gpu_id(offset: u64) -> u32 {
    ((offset & KFD_MMAP_GPU_ID_MASK) >> KFD_MMAP_GPU_ID_SHIFT) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// kfd_priv.h: `KFD_MMAP_TYPE_DOORBELL | KFD_MMAP_GPU_ID(gpu_id)`.
    #[test]
    fn doorbell_offset() {
        let doorbell = offset(MmapType::Doorbell, 0x66af);
        assert_eq!(doorbell, 0xd9ab_c000_0000_0000);
        assert_eq!(gpu_id(doorbell), 0x66af);
        assert_eq!(MmapType::of(doorbell | 0x18), MmapType::Doorbell);
    }
}
