//! The system, its nodes and what they have: memory banks, caches, links; versions and clocks.

use crate::bits::{abi_bits, abi_enums};
use crate::layout::{abi_consts, abi_structs};
use crate::release::ROCM_6;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Version of the kernel's interface.
    struct HsaVersionInfo = "HsaVersionInfo", size 8, pack 4 {
        /// Major version.
        kernel_interface_major_version as "KernelInterfaceMajorVersion": u32 = 0;
        /// Minor version.
        kernel_interface_minor_version as "KernelInterfaceMinorVersion": u32 = 4;
    }

    /// The system.
    struct HsaSystemProperties = "HsaSystemProperties", size 16, pack 4 {
        /// Number of nodes.
        num_nodes as "NumNodes": u32 = 0;
        /// OEM id of the CRAT.
        platform_oem as "PlatformOem": u32 = 4;
        /// Table id of the CRAT.
        platform_id as "PlatformId": u32 = 8;
        /// Revision of the CRAT.
        platform_rev as "PlatformRev": u32 = 12;
    }

    /// A node, in the layout of 356 bytes (ROCm 5.x to 6.2.4). `hsaKmtGetNodeProperties` takes no size, and
    /// later releases have other layouts: see [`CallerLayout`](crate::caller::CallerLayout).
    struct HsaNodeProperties356 = "HsaNodeProperties", size 356, pack 4 {
        /// CPU cores.
        num_cpu_cores as "NumCPUCores": u32 = 0;
        /// SIMDs.
        num_f_compute_cores as "NumFComputeCores": u32 = 4;
        /// Memory banks.
        num_memory_banks as "NumMemoryBanks": u32 = 8;
        /// Caches.
        num_caches as "NumCaches": u32 = 12;
        /// Links to other nodes.
        num_io_links as "NumIOLinks": u32 = 16;
        /// Id of the first CPU core.
        c_compute_id_lo as "CComputeIdLo": u32 = 20;
        /// Id of the first SIMD.
        f_compute_id_lo as "FComputeIdLo": u32 = 24;
        /// Capabilities.
        capability as "Capability": HsaCapability = 28;
        /// Waves per SIMD.
        max_waves_per_simd as "MaxWavesPerSIMD": u32 = 32;
        /// LDS in KiB.
        lds_size_in_kb as "LDSSizeInKB": u32 = 36;
        /// GDS in KiB.
        gds_size_in_kb as "GDSSizeInKB": u32 = 40;
        /// Lanes of a wave.
        wave_front_size as "WaveFrontSize": u32 = 44;
        /// Shader engines.
        num_shader_banks as "NumShaderBanks": u32 = 48;
        /// SIMD arrays per engine.
        num_arrays as "NumArrays": u32 = 52;
        /// Compute units per SIMD array.
        num_cu_per_array as "NumCUPerArray": u32 = 56;
        /// SIMDs per compute unit.
        num_simd_per_cu as "NumSIMDPerCU": u32 = 60;
        /// Scratch slots per compute unit.
        max_slots_scratch_cu as "MaxSlotsScratchCU": u32 = 64;
        /// Version of the compute engine.
        engine_id as "EngineId": HsaEngineId = 68;
        /// PCI vendor.
        vendor_id as "VendorId": u16 = 72;
        /// PCI device.
        device_id as "DeviceId": u16 = 74;
        /// PCI bus, device and function.
        location_id as "LocationId": u32 = 76;
        /// Local memory in bytes.
        local_mem_size as "LocalMemSize": u64 = 80;
        /// Highest clock of the compute units in MHz.
        max_engine_clock_mhz_f_compute as "MaxEngineClockMhzFCompute": u32 = 88;
        /// Highest clock of the CPU cores in MHz.
        max_engine_clock_mhz_c_compute as "MaxEngineClockMhzCCompute": u32 = 92;
        /// Minor device number of the render node, -1 for none.
        drm_render_minor as "DrmRenderMinor": i32 = 96;
        /// Marketing name, UTF-16, zero-terminated.
        marketing_name as "MarketingName": [u16; HSA_PUBLIC_NAME_SIZE] = 100;
        /// AMD's name, ASCII, zero-terminated.
        amd_name as "AMDName": [u8; HSA_PUBLIC_NAME_SIZE] = 228;
        /// Version of the SDMA engine.
        u_code_engine_versions as "uCodeEngineVersions": HsaEngineVersion = 292;
        /// Debugger properties.
        debug_properties as "DebugProperties": HsaDebugProperties = 296;
        /// XGMI hive, 0 for none.
        hive_id as "HiveID": u64 = 304;
        /// SDMA engines for PCIe.
        num_sdma_engines as "NumSdmaEngines": u32 = 312;
        /// SDMA engines for XGMI.
        num_sdma_xgmi_engines as "NumSdmaXgmiEngines": u32 = 316;
        /// Queues per SDMA engine.
        num_sdma_queues_per_engine as "NumSdmaQueuesPerEngine": u8 = 320;
        /// Compute queues.
        num_cp_queues as "NumCpQueues": u8 = 321;
        /// Global wave sync barriers.
        num_gws as "NumGws": u8 = 322;
        /// 1 for an APU; reserved, 0, in ROCm 5.2.3.
        integrated as "Integrated": u8 = 323, since(ROCM_6);
        /// PCI domain.
        domain as "Domain": u32 = 324;
        /// Unique id, 0 for none.
        unique_id as "UniqueID": u64 = 328;
        /// VGPRs of a compute unit in bytes.
        vgpr_size_per_cu as "VGPRSizePerCU": u32 = 336;
        /// SGPRs of a compute unit in bytes.
        sgpr_size_per_cu as "SGPRSizePerCU": u32 = 340;
        /// XCCs; reserved in ROCm 5.2.3.
        num_xcc as "NumXcc": u32 = 344, since(ROCM_6);
        /// KFD's GPU id; reserved in ROCm 5.2.3.
        kfd_gpu_id as "KFDGpuID": u32 = 348, since(ROCM_6);
        /// `AMDGPU_FAMILY_*`; reserved in ROCm 5.2.3.
        family_id as "FamilyID": u32 = 352, since(ROCM_6);
    }

    /// A memory bank.
    struct HsaMemoryProperties = "HsaMemoryProperties", size 32, pack 4 {
        /// Which heap.
        heap_type as "HeapType": HsaHeapType = 0;
        /// Size in bytes.
        size_in_bytes as "SizeInBytes": u64 = 4;
        /// Flags.
        flags as "Flags": HsaMemoryProperty = 12;
        /// Width in bits.
        width as "Width": u32 = 16;
        /// Clock in MHz.
        memory_clock_max as "MemoryClockMax": u32 = 20;
        /// Address in the process's space, 0 for none.
        virtual_base_address as "VirtualBaseAddress": u64 = 24;
    }

    /// A cache.
    struct HsaCacheProperties = "HsaCacheProperties", size 1056, pack 4 {
        /// Id of the first processor that uses it.
        processor_id_low as "ProcessorIdLow": u32 = 0;
        /// Level, from 1.
        cache_level as "CacheLevel": u32 = 4;
        /// Size in KiB.
        cache_size as "CacheSize": u32 = 8;
        /// Line in bytes.
        cache_line_size as "CacheLineSize": u32 = 12;
        /// Lines per tag.
        cache_lines_per_tag as "CacheLinesPerTag": u32 = 16;
        /// Associativity.
        cache_associativity as "CacheAssociativity": u32 = 20;
        /// Latency in ns.
        cache_latency as "CacheLatency": u32 = 24;
        /// What it caches.
        cache_type as "CacheType": HsaCacheType = 28;
        /// Which processors share it: 0 or 1 each, from `processor_id_low` on.
        sibling_map as "SiblingMap": [u32; HSA_CPU_SIBLINGS] = 32;
    }

    /// CPU cores that belong together.
    struct HsaCComputeProperties = "HsaCComputeProperties", size 1024, pack 4 {
        /// 0 or 1 per core.
        sibling_map as "SiblingMap": [u32; HSA_CPU_SIBLINGS] = 0;
    }

    /// A link between two nodes.
    struct HsaIoLinkProperties = "HsaIoLinkProperties", size 48, pack 4 {
        /// Which bus.
        io_link_type as "IoLinkType": HsaIoLinkType = 0;
        /// Major version of the bus.
        version_major as "VersionMajor": u32 = 4;
        /// Minor version of the bus.
        version_minor as "VersionMinor": u32 = 8;
        /// The node that has the link.
        node_from as "NodeFrom": u32 = 12;
        /// The node that it leads to.
        node_to as "NodeTo": u32 = 16;
        /// Distance.
        weight as "Weight": u32 = 20;
        /// Latency in ns.
        minimum_latency as "MinimumLatency": u32 = 24;
        /// Latency in ns.
        maximum_latency as "MaximumLatency": u32 = 28;
        /// Bandwidth in MB/s.
        minimum_bandwidth as "MinimumBandwidth": u32 = 32;
        /// Bandwidth in MB/s.
        maximum_bandwidth as "MaximumBandwidth": u32 = 36;
        /// Best transfer size in bytes.
        rec_transfer_size as "RecTransferSize": u32 = 40;
        /// Flags.
        flags as "Flags": HsaLinkProperty = 44;
    }

    /// Clocks.
    struct HsaClockCounters = "HsaClockCounters", size 32, pack 4 {
        /// The GPU's counter in its own ticks.
        gpu_clock_counter as "GPUClockCounter": u64 = 0;
        /// The CPU's clock in ns.
        cpu_clock_counter as "CPUClockCounter": u64 = 8;
        /// The system's clock.
        system_clock_counter as "SystemClockCounter": u64 = 16;
        /// Its ticks per second.
        system_clock_frequency_hz as "SystemClockFrequencyHz": u64 = 24;
    }

    /// Tiling. In C it has pointers that the caller fills in.
    struct HsaGpuTileConfig = "HsaGpuTileConfig", size 64, pack 4 {
        /// In: pointer to an array for tile modes (u32).
        tile_config as "TileConfig": u64 = 0;
        /// In: pointer to an array for macro tile modes (u32).
        macro_tile_config as "MacroTileConfig": u64 = 8;
        /// In: entries in the first array. Out: entries filled.
        num_tile_configs as "NumTileConfigs": u32 = 16;
        /// In: entries in the second array. Out: entries filled.
        num_macro_tile_configs as "NumMacroTileConfigs": u32 = 20;
        /// Out: GB_ADDR_CONFIG register.
        gb_addr_config as "GbAddrConfig": u32 = 24;
        /// Out: memory banks.
        num_banks as "NumBanks": u32 = 28;
        /// Out: memory ranks.
        num_ranks as "NumRanks": u32 = 32;
        /// Reserved.
        reserved as "Reserved": [u32; 7] = 36;
    }
}

abi_bits! {
    /// Words of this module for the header check.
    pub const WORDS;

    /// Version of the compute engine.
    bits HsaEngineId: u32 = "HSA_ENGINE_ID" {
        /// Firmware.
        U_CODE = "ui32.uCode", 0, 10;
        /// GFX major version.
        MAJOR = "ui32.Major", 10, 6;
        /// GFX minor version.
        MINOR = "ui32.Minor", 16, 8;
        /// GFX stepping.
        STEPPING = "ui32.Stepping", 24, 8;
    }

    /// Version of the SDMA engine.
    bits HsaEngineVersion: u32 = "HSA_ENGINE_VERSION" {
        /// Firmware.
        U_CODE_SDMA = "uCodeSDMA", 0, 10;
        /// Reserved firmware.
        U_CODE_RES = "uCodeRes", 10, 10;
        /// Reserved.
        RESERVED = "Reserved", 20, 12;
    }

    /// Capabilities of a node, also the sysfs file's `capability`.
    bits HsaCapability: u32 = "HSA_CAPABILITY" {
        /// The node may go away.
        HOT_PLUGGABLE = "ui32.HotPluggable", 0, 1;
        /// Address translation service.
        HSA_MMU_PRESENT = "ui32.HSAMMUPresent", 1, 1;
        /// Also draws the screen.
        SHARED_WITH_GRAPHICS = "ui32.SharedWithGraphics", 2, 1;
        /// Queue sizes must be powers of two.
        QUEUE_SIZE_POWER_OF_TWO = "ui32.QueueSizePowerOfTwo", 3, 1;
        /// Queue sizes must be below 4 GiB.
        QUEUE_SIZE_32BIT = "ui32.QueueSize32bit", 4, 1;
        /// Tells when a queue is idle.
        QUEUE_IDLE_EVENT = "ui32.QueueIdleEvent", 5, 1;
        /// Few virtual address bits.
        VA_LIMIT = "ui32.VALimit", 6, 1;
        /// Watch points.
        WATCH_POINTS_SUPPORTED = "ui32.WatchPointsSupported", 7, 1;
        /// log2 of the number of watch points.
        WATCH_POINTS_TOTAL_BITS = "ui32.WatchPointsTotalBits", 8, 4;
        /// Kind of doorbells: 0 before 1.0, 1 1.0, 2 64-bit (GFX9 and later).
        DOORBELL_TYPE = "ui32.DoorbellType", 12, 2;
        /// AQL rings must be mapped twice.
        AQL_QUEUE_DOUBLE_MAP = "ui32.AQLQueueDoubleMap", 14, 1;
        /// Debug trap.
        DEBUG_TRAP_SUPPORTED = "ui32.DebugTrapSupported", 15, 1;
        /// Override of wave launch traps.
        WAVE_LAUNCH_TRAP_OVERRIDE_SUPPORTED = "ui32.WaveLaunchTrapOverrideSupported", 16, 1;
        /// Wave launch modes.
        WAVE_LAUNCH_MODE_SUPPORTED = "ui32.WaveLaunchModeSupported", 17, 1;
        /// Precise memory operations.
        PRECISE_MEMORY_OPERATIONS_SUPPORTED = "ui32.PreciseMemoryOperationsSupported", 18, 1;
        /// Must be 0.
        DEPRECATED_SRAM_EDC_SUPPORT = "ui32.DEPRECATED_SRAM_EDCSupport", 19, 1;
        /// ECC in DRAM.
        MEM_EDC_SUPPORT = "ui32.Mem_EDCSupport", 20, 1;
        /// RAS events.
        RAS_EVENT_NOTIFY = "ui32.RASEventNotify", 21, 1;
        /// Chip revision.
        ASIC_REVISION = "ui32.ASICRevision", 22, 4;
        /// ECC in SRAM.
        SRAM_EDC_SUPPORT = "ui32.SRAM_EDCSupport", 26, 1;
        /// SVM.
        SVM_API_SUPPORTED = "ui32.SVMAPISupported", 27, 1;
        /// The host accesses the GPU's memory coherently.
        COHERENT_HOST_ACCESS = "ui32.CoherentHostAccess", 28, 1;
        /// Firmware that the debugger needs; RUNTIME_ENABLE is called only with it.
        DEBUG_SUPPORTED_FIRMWARE = "ui32.DebugSupportedFirmware", 29, 1;
        /// Reserved.
        RESERVED = "ui32.Reserved", 30, 2;
    }

    /// Debugger properties of a node.
    bits HsaDebugProperties: u64 = "HSA_DEBUG_PROPERTIES" {
        /// Lowest bit of the watch mask that counts.
        WATCH_ADDR_MASK_LO_BIT = "WatchAddrMaskLoBit", 0, 4;
        /// Highest bit of the watch mask that counts.
        WATCH_ADDR_MASK_HI_BIT = "WatchAddrMaskHiBit", 4, 6;
        /// Trap temporaries are always set up.
        DISPATCH_INFO_ALWAYS_VALID = "DispatchInfoAlwaysValid", 10, 1;
        /// Watch points are per process.
        ADDRESS_WATCHPOINT_SHARE_KIND = "AddressWatchpointShareKind", 11, 1;
        /// Reserved.
        RESERVED = "Reserved", 12, 52;
    }

    /// Flags of a memory bank.
    bits HsaMemoryProperty: u32 = "HSA_MEMORYPROPERTY" {
        /// May go away.
        HOT_PLUGGABLE = "ui32.HotPluggable", 0, 1;
        /// Survives power-off.
        NON_VOLATILE = "ui32.NonVolatile", 1, 1;
        /// Reserved.
        RESERVED = "ui32.Reserved", 2, 30;
    }

    /// What a cache caches.
    bits HsaCacheType: u32 = "HsaCacheType" {
        /// Data.
        DATA = "ui32.Data", 0, 1;
        /// Instructions.
        INSTRUCTION = "ui32.Instruction", 1, 1;
        /// A CPU's.
        CPU = "ui32.CPU", 2, 1;
        /// A compute unit's.
        HSACU = "ui32.HSACU", 3, 1;
        /// Reserved.
        RESERVED = "ui32.Reserved", 4, 28;
    }

    /// Flags of a link.
    bits HsaLinkProperty: u32 = "HSA_LINKPROPERTY" {
        /// The other flags count.
        OVERRIDE = "ui32.Override", 0, 1;
        /// Not coherent.
        NON_COHERENT = "ui32.NonCoherent", 1, 1;
        /// No 32-bit atomics.
        NO_ATOMICS_32BIT = "ui32.NoAtomics32bit", 2, 1;
        /// No 64-bit atomics.
        NO_ATOMICS_64BIT = "ui32.NoAtomics64bit", 3, 1;
        /// No peer-to-peer DMA.
        NO_PEER_TO_PEER_DMA = "ui32.NoPeerToPeerDMA", 4, 1;
        /// Reserved.
        RESERVED = "ui32.Reserved", 5, 27;
    }
}

abi_enums! {
    /// Enums of this module for the header check.
    pub const ENUMS;

    /// Kind of a memory bank.
    enum HsaHeapType: u32 = "HSA_HEAPTYPE", "HSA_HEAPTYPE_" {
        /// System memory.
        SYSTEM = 0;
        /// VRAM that the CPU can map.
        FRAME_BUFFER_PUBLIC = 1;
        /// VRAM that the CPU cannot map.
        FRAME_BUFFER_PRIVATE = 2;
        /// Global data share.
        GPU_GDS = 3;
        /// Local data share.
        GPU_LDS = 4;
        /// Scratch.
        GPU_SCRATCH = 5;
        /// System memory that GPU page tables map.
        DEVICE_SVM = 6;
        /// Remapped registers.
        MMIO_REMAP = 7;
    }

    /// Bus of a link. The C names are `HSA_IOLINKTYPE_*` up to MIPI and `HSA_IOLINK_TYPE_*` after.
    enum HsaIoLinkType: u32 = "HSA_IOLINKTYPE", "HSA_IOLINKTYPE_" {
        /// Unknown.
        UNDEFINED = 0;
        /// HyperTransport.
        HYPERTRANSPORT = 1;
        /// PCI Express.
        PCIEXPRESS = 2;
        /// AMBA.
        AMBA = 3;
        /// MIPI.
        MIPI = 4;
        /// QPI.
        QPI_1_1 as "HSA_IOLINK_TYPE_QPI_1_1" = 5;
        /// Reserved.
        RESERVED1 as "HSA_IOLINK_TYPE_RESERVED1" = 6;
        /// Reserved.
        RESERVED2 as "HSA_IOLINK_TYPE_RESERVED2" = 7;
        /// RapidIO.
        RAPID_IO as "HSA_IOLINK_TYPE_RAPID_IO" = 8;
        /// InfiniBand.
        INFINIBAND as "HSA_IOLINK_TYPE_INFINIBAND" = 9;
        /// Reserved.
        RESERVED3 as "HSA_IOLINK_TYPE_RESERVED3" = 10;
        /// XGMI.
        XGMI as "HSA_IOLINK_TYPE_XGMI" = 11;
        /// XGOP.
        XGOP as "HSA_IOLINK_TYPE_XGOP" = 12;
        /// GZ.
        GZ as "HSA_IOLINK_TYPE_GZ" = 13;
        /// Ethernet RDMA.
        ETHERNET_RDMA as "HSA_IOLINK_TYPE_ETHERNET_RDMA" = 14;
        /// Other RDMA.
        RDMA_OTHER as "HSA_IOLINK_TYPE_RDMA_OTHER" = 15;
        /// Another bus.
        OTHER as "HSA_IOLINK_TYPE_OTHER" = 16;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro usize {
        /// Entries of the names in a node's properties.
        HSA_PUBLIC_NAME_SIZE = 64;
        /// Entries of a sibling map.
        HSA_CPU_SIBLINGS = 256;
    }
    Macro u32 {
        /// All processors.
        HSA_PROCESSORID_ALL = 0xffff_ffff;
        /// Never a process id.
        INVALID_PID = 0xffff_ffff;
        /// Never a node id.
        INVALID_NODEID = 0xffff_ffff;
    }
}
