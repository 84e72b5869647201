//! GPU memory: allocate, map, unmap, free, cache policy, dma-bufs, scratch, trap handler, tiling.

use crate::layout::{Since::KfdMinor, abi_consts, abi_flags, abi_structs};
use crate::version::minor;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of SET_MEMORY_POLICY.
    struct SetMemoryPolicyArgs = "struct kfd_ioctl_set_memory_policy_args", size 32 {
        /// In: address of the aperture with the alternate policy.
        alternate_aperture_base: u64 = 0;
        /// In: its size in bytes.
        alternate_aperture_size: u64 = 8;
        /// In: which GPU.
        gpu_id: u32 = 16;
        /// In: `KFD_IOC_CACHE_POLICY_*` outside of the aperture.
        default_policy: u32 = 20;
        /// In: `KFD_IOC_CACHE_POLICY_*` within the aperture.
        alternate_policy: u32 = 24;
        /// In: `KFD_PROC_FLAG_*`; padding before minor 18.
        misc_process_flag: u32 = 28, since(KfdMinor(minor::PROCESS_FLAGS));
    }

    /// Argument of ALLOC_MEMORY_OF_GPU.
    struct AllocMemoryOfGpuArgs = "struct kfd_ioctl_alloc_memory_of_gpu_args", size 40 {
        /// In: GPU virtual address, chosen by the caller; all GPUs map the buffer there.
        va_addr: u64 = 0;
        /// In: size in bytes.
        size: u64 = 8;
        /// Out: handle for map, unmap, free and export; GPU id in the upper half.
        handle: u64 = 16;
        /// USERPTR: in: CPU address. Otherwise out: mmap offset in the render node, or in /dev/kfd
        /// for DOORBELL and MMIO_REMAP.
        mmap_offset: u64 = 24;
        /// In: which GPU.
        gpu_id: u32 = 32;
        /// In: [`AllocFlags`].
        flags: u32 = 36;
    }

    /// Argument of FREE_MEMORY_OF_GPU.
    struct FreeMemoryOfGpuArgs = "struct kfd_ioctl_free_memory_of_gpu_args", size 8 {
        /// In: the buffer.
        handle: u64 = 0;
    }

    /// Argument of MAP_MEMORY_TO_GPU.
    struct MapMemoryToGpuArgs = "struct kfd_ioctl_map_memory_to_gpu_args", size 24 {
        /// In: the buffer.
        handle: u64 = 0;
        /// In: pointer to an array of GPU ids (u32).
        device_ids_array_ptr: u64 = 8;
        /// In: number of GPU ids.
        n_devices: u32 = 16;
        /// In and out: how many of them, from the array's start, are done; a repeated call goes on there.
        n_success: u32 = 20;
    }

    /// Argument of UNMAP_MEMORY_FROM_GPU.
    struct UnmapMemoryFromGpuArgs = "struct kfd_ioctl_unmap_memory_from_gpu_args", size 24 {
        /// In: the buffer.
        handle: u64 = 0;
        /// In: pointer to an array of GPU ids (u32).
        device_ids_array_ptr: u64 = 8;
        /// In: number of GPU ids.
        n_devices: u32 = 16;
        /// In and out: how many of them, from the array's start, are done; a repeated call goes on there.
        n_success: u32 = 20;
    }

    /// Argument of AVAILABLE_MEMORY.
    struct GetAvailableMemoryArgs = "struct kfd_ioctl_get_available_memory_args", size 16,
        since(KfdMinor(minor::AVAILABLE_MEMORY)) {
        /// Out: free VRAM in bytes.
        available: u64 = 0;
        /// In: which GPU.
        gpu_id: u32 = 8;
        /// Padding.
        pad: u32 = 12;
    }

    /// Argument of SET_SCRATCH_BACKING_VA.
    struct SetScratchBackingVaArgs = "struct kfd_ioctl_set_scratch_backing_va_args", size 16 {
        /// In: GPU address of the scratch memory.
        va_addr: u64 = 0;
        /// In: which GPU.
        gpu_id: u32 = 8;
        /// Padding.
        pad: u32 = 12;
    }

    /// Argument of GET_TILE_CONFIG.
    struct GetTileConfigArgs = "struct kfd_ioctl_get_tile_config_args", size 40 {
        /// In: pointer to an array for tile modes (u32).
        tile_config_ptr: u64 = 0;
        /// In: pointer to an array for macro tile modes (u32).
        macro_tile_config_ptr: u64 = 8;
        /// In: entries in the first array. Out: entries filled.
        num_tile_configs: u32 = 16;
        /// In: entries in the second array. Out: entries filled.
        num_macro_tile_configs: u32 = 20;
        /// In: which GPU.
        gpu_id: u32 = 24;
        /// Out: GB_ADDR_CONFIG register.
        gb_addr_config: u32 = 28;
        /// Out: memory banks.
        num_banks: u32 = 32;
        /// Out: memory ranks.
        num_ranks: u32 = 36;
    }

    /// Argument of SET_TRAP_HANDLER.
    struct SetTrapHandlerArgs = "struct kfd_ioctl_set_trap_handler_args", size 24 {
        /// In: GPU address of the trap handler's code.
        tba_addr: u64 = 0;
        /// In: GPU address of its memory.
        tma_addr: u64 = 8;
        /// In: which GPU.
        gpu_id: u32 = 16;
        /// Padding.
        pad: u32 = 20;
    }

    /// Argument of ACQUIRE_VM.
    struct AcquireVmArgs = "struct kfd_ioctl_acquire_vm_args", size 8 {
        /// In: descriptor of the GPU's render node, whose address space the process takes.
        drm_fd: u32 = 0;
        /// In: which GPU.
        gpu_id: u32 = 4;
    }

    /// Argument of GET_DMABUF_INFO.
    struct GetDmabufInfoArgs = "struct kfd_ioctl_get_dmabuf_info_args", size 32 {
        /// Out: size in bytes.
        size: u64 = 0;
        /// In: pointer to memory for the metadata.
        metadata_ptr: u64 = 8;
        /// In: its size in bytes. Out: size of the metadata.
        metadata_size: u32 = 16;
        /// Out: which GPU.
        gpu_id: u32 = 20;
        /// Out: [`AllocFlags`].
        flags: u32 = 24;
        /// In: descriptor of the dma-buf.
        dmabuf_fd: u32 = 28;
    }

    /// Argument of IMPORT_DMABUF.
    struct ImportDmabufArgs = "struct kfd_ioctl_import_dmabuf_args", size 24 {
        /// In: GPU virtual address.
        va_addr: u64 = 0;
        /// Out: the buffer.
        handle: u64 = 8;
        /// In: which GPU.
        gpu_id: u32 = 16;
        /// In: descriptor of the dma-buf.
        dmabuf_fd: u32 = 20;
    }

    /// Argument of EXPORT_DMABUF.
    struct ExportDmabufArgs = "struct kfd_ioctl_export_dmabuf_args", size 16,
        since(KfdMinor(minor::EXPORT_DMABUF)) {
        /// In: the buffer.
        handle: u64 = 0;
        /// In: `O_*` flags of the new descriptor.
        flags: u32 = 8;
        /// Out: descriptor of the dma-buf.
        dmabuf_fd: u32 = 12;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// Caches are coherent with the host.
        KFD_IOC_CACHE_POLICY_COHERENT = 0;
        /// Caches are not coherent.
        KFD_IOC_CACHE_POLICY_NONCOHERENT = 1;
        /// [`SetMemoryPolicyArgs::misc_process_flag`]: MFMA in high precision.
        KFD_PROC_FLAG_MFMA_HIGH_PRECISION = 1, since(KfdMinor(minor::PROCESS_FLAGS));
        /// No descriptor.
        KFD_INVALID_FD = 0xffff_ffff;
    }
    Enum u32 {
        /// Byte offset of the HDP memory flush register in the remapped MMIO page.
        KFD_MMIO_REMAP_HDP_MEM_FLUSH_CNTL = 0;
        /// Byte offset of the HDP register flush register in the remapped MMIO page.
        KFD_MMIO_REMAP_HDP_REG_FLUSH_CNTL = 4;
    }
}

abi_flags! {
    /// Bits of [`AllocFlags`] for the header check.
    pub const ALLOC_FLAGS;
    /// Kind of memory (one of the first five) and how it is used.
    Macro AllocFlags: u32 = "KFD_IOC_ALLOC_MEM_FLAGS_" {
        /// Memory of the GPU.
        VRAM = 1 << 0;
        /// System memory that the driver allocates.
        GTT = 1 << 1;
        /// System memory of the caller.
        USERPTR = 1 << 2;
        /// The process's doorbell slice.
        DOORBELL = 1 << 3;
        /// The page of remapped registers.
        MMIO_REMAP = 1 << 4;
        /// GPUs may write.
        WRITABLE = 1 << 31;
        /// GPUs may execute.
        EXECUTABLE = 1 << 30;
        /// VRAM that the CPU can map.
        PUBLIC = 1 << 29;
        /// No other kind of memory instead. Not interpreted by the kernel.
        NO_SUBSTITUTE = 1 << 28;
        /// An AQL ring, mapped twice in a row.
        AQL_QUEUE_MEM = 1 << 27;
        /// Fine-grained coherence.
        COHERENT = 1 << 26;
        /// Not cached by GPUs.
        UNCACHED = 1 << 25;
        /// Coherent between devices by device-scope atomics. Came within minor 14.
        EXT_COHERENT = 1 << 24, since(KfdMinor(minor::GEM_VA));
        /// Physically contiguous VRAM.
        CONTIGUOUS = 1 << 23, since(KfdMinor(minor::CONTIGUOUS_VRAM));
    }
}

impl AllocFlags {
    /// The kinds of memory, of which a call names one.
    pub const KINDS: Self = Self::from_bits_retain(0x1f);
}

/// Size in bytes of the page of remapped registers on a kernel with 4 KiB pages.
pub const MMIO_REMAP_SIZE: u64 = 4096;
