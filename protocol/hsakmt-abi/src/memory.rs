//! Memory: allocation and mapping flags, graphics and shared handles, pointer information.

use crate::bits::{abi_bits, abi_enums};
use crate::layout::abi_structs;
use crate::release::ROCM_6;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// A graphics buffer that was registered. Addresses are those of the process.
    struct HsaGraphicsResourceInfo = "HsaGraphicsResourceInfo", size 32, pack 4 {
        /// Address for the map calls.
        memory_address as "MemoryAddress": u64 = 0;
        /// Size in bytes.
        size_in_bytes as "SizeInBytes": u64 = 8;
        /// Address of metadata that the library owns.
        metadata as "Metadata": u64 = 16;
        /// Its size in bytes.
        metadata_size_in_bytes as "MetadataSizeInBytes": u32 = 24;
        /// The GPU that exported the buffer; reserved, 0, in ROCm 5.2.3.
        node_id as "NodeId": u32 = 28, since(ROCM_6);
    }

    /// What is known of an address.
    struct HsaPointerInfo = "HsaPointerInfo", size 68, pack 4 {
        /// Kind of memory.
        kind as "Type": HsaPointerType = 0;
        /// Node of the memory.
        node as "Node": u32 = 4;
        /// Flags that it was allocated with.
        mem_flags as "MemFlags": HsaMemFlags = 8;
        /// Start for the CPU, 0 for none.
        cpu_address as "CPUAddress": u64 = 12;
        /// Start for GPUs.
        gpu_address as "GPUAddress": u64 = 20;
        /// Size in bytes.
        size_in_bytes as "SizeInBytes": u64 = 28;
        /// Number of nodes it is registered to.
        n_registered_nodes as "NRegisteredNodes": u32 = 36;
        /// Number of nodes it is mapped to.
        n_mapped_nodes as "NMappedNodes": u32 = 40;
        /// Address of an array of their ids (u32), owned by the library.
        registered_nodes as "RegisteredNodes": u64 = 44;
        /// Address of an array of their ids (u32), owned by the library.
        mapped_nodes as "MappedNodes": u64 = 52;
        /// What `hsaKmtSetMemoryUserData` was given.
        user_data as "UserData": u64 = 60;
    }

    /// A shared memory handle, opaque to its user.
    struct HsaSharedMemoryHandle = "HsaSharedMemoryHandle", size 32, pack 4 {
        /// The handle.
        words as "": [u32; 8] = 0;
    }

    /// A range in `hsaKmtProcessVMRead` and `hsaKmtProcessVMWrite`.
    struct HsaMemoryRange = "HsaMemoryRange", size 16, pack 4 {
        /// Address.
        memory_address as "MemoryAddress": u64 = 0;
        /// Size in bytes.
        size_in_bytes as "SizeInBytes": u64 = 8;
    }
}

abi_bits! {
    /// Words of this module for the header check.
    pub const WORDS;

    /// Flags of an allocation. Passed by value.
    bits HsaMemFlags: u32 = "HsaMemFlags" {
        /// Not pageable.
        NON_PAGED = "ui32.NonPaged", 0, 1;
        /// [`HsaCachingType`].
        CACHE_POLICY = "ui32.CachePolicy", 1, 2;
        /// Read-only.
        READ_ONLY = "ui32.ReadOnly", 3, 1;
        /// [`HsaPageSize`].
        PAGE_SIZE = "ui32.PageSize", 4, 2;
        /// The CPU accesses it too.
        HOST_ACCESS = "ui32.HostAccess", 6, 1;
        /// No other memory instead.
        NO_SUBSTITUTE = "ui32.NoSubstitute", 7, 1;
        /// In the global data share.
        GDS_MEMORY = "ui32.GDSMemory", 8, 1;
        /// In the scratch aperture.
        SCRATCH = "ui32.Scratch", 9, 1;
        /// All atomics.
        ATOMIC_ACCESS_FULL = "ui32.AtomicAccessFull", 10, 1;
        /// PCIe's atomics.
        ATOMIC_ACCESS_PARTIAL = "ui32.AtomicAccessPartial", 11, 1;
        /// Executable.
        EXECUTE_ACCESS = "ui32.ExecuteAccess", 12, 1;
        /// Coherent at dispatch boundaries only.
        COARSE_GRAIN = "ui32.CoarseGrain", 13, 1;
        /// An AQL ring, mapped twice in a row.
        AQL_QUEUE_MEMORY = "ui32.AQLQueueMemory", 14, 1;
        /// At the given address or not at all.
        FIXED_ADDRESS = "ui32.FixedAddress", 15, 1;
        /// Not bound to a NUMA node.
        NO_NUMA_BIND = "ui32.NoNUMABind", 16, 1;
        /// Not cached.
        UNCACHED = "ui32.Uncached", 17, 1;
        /// VRAM without an address: a handle.
        NO_ADDRESS = "ui32.NoAddress", 18, 1, since(ROCM_6);
        /// An address without memory.
        ONLY_ADDRESS = "ui32.OnlyAddress", 19, 1, since(ROCM_6);
        /// Coherent between devices by atomics.
        EXTENDED_COHERENT = "ui32.ExtendedCoherent", 20, 1, since(ROCM_6);
        /// GTT for the scheduler firmware.
        GTT_ACCESS = "ui32.GTTAccess", 21, 1, since(ROCM_6);
        /// Physically contiguous VRAM.
        CONTIGUOUS = "ui32.Contiguous", 22, 1, since(ROCM_6);
        /// Reserved; bits 18 to 31 in ROCm 5.2.3.
        RESERVED = "ui32.Reserved", 23, 9, since(ROCM_6);
    }

    /// Flags of a mapping. Passed by value.
    bits HsaMemMapFlags: u32 = "HsaMemMapFlags" {
        /// Reserved.
        RESERVED1 = "ui32.Reserved1", 0, 1;
        /// [`HsaCachingType`].
        CACHE_POLICY = "ui32.CachePolicy", 1, 2;
        /// Not written while mapped.
        READ_ONLY = "ui32.ReadOnly", 3, 1;
        /// [`HsaPageSize`].
        PAGE_SIZE = "ui32.PageSize", 4, 2;
        /// The CPU accesses it too.
        HOST_ACCESS = "ui32.HostAccess", 6, 1;
        /// May move to the GPU's memory.
        MIGRATE = "ui32.Migrate", 7, 1;
        /// Will be mapped soon; not now.
        PROBE = "ui32.Probe", 8, 1;
        /// Reserved.
        RESERVED = "ui32.Reserved", 9, 23;
    }
}

abi_enums! {
    /// Enums of this module for the header check.
    pub const ENUMS;

    /// How memory is cached.
    enum HsaCachingType: u32 = "HSA_CACHING_TYPE", "HSA_CACHING_" {
        /// Cached.
        CACHED = 0;
        /// Not cached.
        NONCACHED = 1;
        /// Write-combined.
        WRITECOMBINED = 2;
        /// Reserved.
        RESERVED = 3;
    }

    /// Page size.
    enum HsaPageSize: u32 = "HSA_PAGE_SIZE", "HSA_PAGE_SIZE_" {
        /// 4 KiB.
        KB_4 as "HSA_PAGE_SIZE_4KB" = 0;
        /// 64 KiB.
        KB_64 as "HSA_PAGE_SIZE_64KB" = 1;
        /// 2 MiB.
        MB_2 as "HSA_PAGE_SIZE_2MB" = 2;
        /// 1 GiB.
        GB_1 as "HSA_PAGE_SIZE_1GB" = 3;
    }

    /// Kind of memory behind an address.
    enum HsaPointerType: u32 = "HSA_POINTER_TYPE", "HSA_POINTER_" {
        /// Not known.
        UNKNOWN = 0;
        /// Allocated with `hsaKmtAllocMemory`.
        ALLOCATED = 1;
        /// The application's, registered.
        REGISTERED_USER = 2;
        /// A graphics buffer.
        REGISTERED_GRAPHICS = 3;
        /// Another process's.
        REGISTERED_SHARED = 4;
        /// Addresses without memory.
        RESERVED_ADDR = 5, since(ROCM_6);
    }
}
