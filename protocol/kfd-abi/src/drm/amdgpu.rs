//! amdgpu's part of the render node (include/uapi/drm/amdgpu_drm.h).

use crate::layout::{Since::Defined, abi_consts, abi_flags, abi_structs};

/// Headers with the fields that GFX11 brought.
const GFX11: crate::layout::Since = Defined("AMDGPU_INFO_MAX_IBS");
/// Headers with user queues.
const USERQ: crate::layout::Since = Defined("DRM_AMDGPU_USERQ");
/// Headers with the number of user queue slots, which came after the queues.
const USERQ_SLOTS: crate::layout::Since = Defined("DRM_AMDGPU_GEM_LIST_HANDLES");

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of AMDGPU_INFO.
    struct Info = "struct drm_amdgpu_info", size 32 {
        /// In: pointer to memory for the answer.
        return_pointer: u64 = 0;
        /// In: its size in bytes; the answer is cut to it.
        return_size: u32 = 8;
        /// In: `AMDGPU_INFO_*`.
        query: u32 = 12;
        /// In: READ_MMR_REG: register offset in dwords. HW_IP: the type. FW_VERSION: the firmware.
        /// SENSOR and VIDEO_CAPS: the type.
        dword_offset as "read_mmr_reg.dword_offset": u32 = 16;
        /// In: READ_MMR_REG: number of registers. HW_IP and FW_VERSION: the IP's instance. VBIOS: the offset.
        count as "read_mmr_reg.count": u32 = 20;
        /// In: READ_MMR_REG: shader engine and array (`AMDGPU_INFO_MMR_*`). FW_VERSION: the engine's index.
        instance as "read_mmr_reg.instance": u32 = 24;
        /// In: READ_MMR_REG: flags, none defined.
        flags as "read_mmr_reg.flags": u32 = 28;
    }

    /// Answer to [`AMDGPU_INFO_DEV_INFO`]. Older kernels and callers know a prefix: 368 bytes up to
    /// `tcc_disabled_mask`, 384 with the minimum clocks, 432 with GFX11's caches, 440 with shadow and CSA sizes.
    /// Callers built with libdrm 2.4.134 ask for 448; the last 8 bytes stay as they are.
    struct InfoDevice = "struct drm_amdgpu_info_device", size 440, size_since(GFX11) {
        /// PCI device id.
        device_id: u32 = 0;
        /// Chip revision.
        chip_rev: u32 = 4;
        /// External revision.
        external_rev: u32 = 8;
        /// PCI revision.
        pci_rev: u32 = 12;
        /// `AMDGPU_FAMILY_*`.
        family: u32 = 16;
        /// Shader engines.
        num_shader_engines: u32 = 20;
        /// Shader arrays per engine.
        num_shader_arrays_per_engine: u32 = 24;
        /// Clock of the GPU counter in kHz.
        gpu_counter_freq: u32 = 28;
        /// Highest engine clock in kHz.
        max_engine_clock: u64 = 32;
        /// Highest memory clock in kHz.
        max_memory_clock: u64 = 40;
        /// Compute units.
        cu_active_number: u32 = 48;
        /// Not valid.
        cu_ao_mask: u32 = 52;
        /// Compute units by engine and array.
        cu_bitmap: [[u32; 4]; 4] = 56;
        /// Enabled render back-ends, low half.
        enabled_rb_pipes_mask: u32 = 120;
        /// Render back-ends.
        num_rb_pipes: u32 = 124;
        /// Graphics contexts.
        num_hw_gfx_contexts: u32 = 128;
        /// PCIe generation; padding in older headers.
        pcie_gen: u32 = 132, since(GFX11);
        /// `AMDGPU_IDS_FLAGS_*`.
        ids_flags: u64 = 136;
        /// Lowest virtual address for user space.
        virtual_address_offset: u64 = 144;
        /// Highest virtual address.
        virtual_address_max: u64 = 152;
        /// Alignment of virtual addresses in bytes.
        virtual_address_alignment: u32 = 160;
        /// Fragment size of page table entries in bytes.
        pte_fragment_size: u32 = 164;
        /// GART page size in bytes.
        gart_page_size: u32 = 168;
        /// Constant engine RAM in bytes.
        ce_ram_size: u32 = 172;
        /// Kind of VRAM, `AMDGPU_VRAM_TYPE_*`.
        vram_type: u32 = 176;
        /// Width of VRAM in bits.
        vram_bit_width: u32 = 180;
        /// VCE instances that are switched off.
        vce_harvest_config: u32 = 184;
        /// Double off-chip LDS buffers.
        gc_double_offchip_lds_buf: u32 = 188;
        /// Primitive buffer.
        prim_buf_gpu_addr: u64 = 192;
        /// Position buffer.
        pos_buf_gpu_addr: u64 = 200;
        /// Control sideband.
        cntl_sb_buf_gpu_addr: u64 = 208;
        /// Parameter cache.
        param_buf_gpu_addr: u64 = 216;
        /// Its size in bytes.
        prim_buf_size: u32 = 224;
        /// Its size in bytes.
        pos_buf_size: u32 = 228;
        /// Its size in bytes.
        cntl_sb_buf_size: u32 = 232;
        /// Its size in bytes.
        param_buf_size: u32 = 236;
        /// Lanes of a wave.
        wave_front_size: u32 = 240;
        /// VGPRs that a shader sees.
        num_shader_visible_vgprs: u32 = 244;
        /// Compute units per shader array.
        num_cu_per_sh: u32 = 248;
        /// Texture cache blocks.
        num_tcc_blocks: u32 = 252;
        /// Geometry shader table.
        gs_vgt_table_depth: u32 = 256;
        /// Geometry shader primitive buffer.
        gs_prim_buffer_depth: u32 = 260;
        /// Geometry shader waves.
        max_gs_waves_per_vgt: u32 = 264;
        /// PCIe lanes; padding in older headers.
        pcie_num_lanes: u32 = 268, since(GFX11);
        /// Always-on compute units by engine and array.
        cu_ao_bitmap: [[u32; 4]; 4] = 272;
        /// Lowest virtual address above the hole.
        high_va_offset: u64 = 336;
        /// Highest virtual address above the hole.
        high_va_max: u64 = 344;
        /// Rasteriser steering.
        pa_sc_tile_steering_override: u32 = 352;
        /// Padding, unnamed in older headers.
        pad as "": u32 = 356;
        /// Texture cache blocks that are off.
        tcc_disabled_mask: u64 = 360;
        /// Lowest engine clock in kHz.
        min_engine_clock: u64 = 368, since(GFX11);
        /// Lowest memory clock in kHz.
        min_memory_clock: u64 = 376, since(GFX11);
        /// Vector L0 cache in KiB.
        tcp_cache_size: u32 = 384, since(GFX11);
        /// Scalar caches per WGP.
        num_sqc_per_wgp: u32 = 388, since(GFX11);
        /// Scalar data cache in KiB.
        sqc_data_cache_size: u32 = 392, since(GFX11);
        /// Instruction cache in KiB.
        sqc_inst_cache_size: u32 = 396, since(GFX11);
        /// L1 cache in KiB.
        gl1c_cache_size: u32 = 400, since(GFX11);
        /// L2 cache in KiB.
        gl2c_cache_size: u32 = 404, since(GFX11);
        /// Infinity cache in bytes.
        mall_size: u64 = 408, since(GFX11);
        /// Enabled render back-ends, high half.
        enabled_rb_pipes_mask_hi: u32 = 416, since(GFX11);
        /// Shadow area in bytes.
        shadow_size: u32 = 420, since(GFX11);
        /// Its alignment in bytes.
        shadow_alignment: u32 = 424, since(GFX11);
        /// Context save area in bytes.
        csa_size: u32 = 428, since(GFX11);
        /// Its alignment in bytes.
        csa_alignment: u32 = 432, since(GFX11);
        /// IPs with user queues; padding in older headers.
        userq_ip_mask: u32 = 436, since(USERQ);
    }

    /// One heap in [`MemoryInfo`].
    struct HeapInfo = "struct drm_amdgpu_heap_info", size 32 {
        /// Physical size in bytes.
        total_heap_size: u64 = 0;
        /// Usable size in bytes.
        usable_heap_size: u64 = 8;
        /// Bytes in use.
        heap_usage: u64 = 16;
        /// Largest buffer in bytes.
        max_allocation: u64 = 24;
    }

    /// Answer to [`AMDGPU_INFO_MEMORY`].
    struct MemoryInfo = "struct drm_amdgpu_memory_info", size 96 {
        /// All VRAM.
        vram: HeapInfo = 0;
        /// VRAM that the CPU can map.
        cpu_accessible_vram: HeapInfo = 32;
        /// System memory that GPUs can use.
        gtt: HeapInfo = 64;
    }

    /// Answer to [`AMDGPU_INFO_VRAM_GTT`].
    struct InfoVramGtt = "struct drm_amdgpu_info_vram_gtt", size 24 {
        /// VRAM in bytes.
        vram_size: u64 = 0;
        /// VRAM that the CPU can map, in bytes.
        vram_cpu_accessible_size: u64 = 8;
        /// System memory that GPUs can use, in bytes.
        gtt_size: u64 = 16;
    }

    /// Answer to [`AMDGPU_INFO_FW_VERSION`].
    struct InfoFirmware = "struct drm_amdgpu_info_firmware", size 8 {
        /// Version.
        ver: u32 = 0;
        /// Feature version.
        feature: u32 = 4;
    }

    /// Answer to [`AMDGPU_INFO_HW_IP_INFO`]. 32 bytes without the last two fields.
    struct InfoHwIp = "struct drm_amdgpu_info_hw_ip", size 40, size_since(USERQ_SLOTS) {
        /// Major version.
        hw_ip_version_major: u32 = 0;
        /// Minor version.
        hw_ip_version_minor: u32 = 4;
        /// Capabilities.
        capabilities_flags: u64 = 8;
        /// Alignment of a command buffer's start in bytes.
        ib_start_alignment: u32 = 16;
        /// Alignment of a command buffer's size in bytes.
        ib_size_alignment: u32 = 20;
        /// Rings, one bit each.
        available_rings: u32 = 24;
        /// Version by IP discovery: major, minor, revision in bits 16, 8, 0; padding in older headers.
        ip_discovery_version: u32 = 28, since(GFX11);
        /// Slots for user queues.
        userq_num_slots: u32 = 32, since(USERQ_SLOTS);
        /// Padding, unnamed in C.
        pad as "": u32 = 36;
    }

    /// Argument of AMDGPU_GEM_CREATE, in view; out it is [`GemCreateOut`].
    struct GemCreate = "union drm_amdgpu_gem_create", size 32 {
        /// In: size in bytes.
        bo_size as "in.bo_size": u64 = 0;
        /// In: alignment in bytes.
        alignment as "in.alignment": u64 = 8;
        /// In: `AMDGPU_GEM_DOMAIN_*`.
        domains as "in.domains": u64 = 16;
        /// In: flags.
        domain_flags as "in.domain_flags": u64 = 24;
    }

    /// The start of [`GemCreate`] on return.
    struct GemCreateOut = "struct drm_amdgpu_gem_create_out", size 8 {
        /// The GEM handle.
        handle: u32 = 0;
        /// Padding.
        pad as "_pad": u32 = 4;
    }

    /// Argument of AMDGPU_GEM_MMAP, out view; see [`GemMmap::handle`] for in.
    struct GemMmap = "union drm_amdgpu_gem_mmap", size 8 {
        /// Out: mmap offset in the render node.
        addr_ptr as "out.addr_ptr": u64 = 0;
    }

    /// Argument of AMDGPU_GEM_METADATA.
    struct GemMetadata = "struct drm_amdgpu_gem_metadata", size 288 {
        /// In: the GEM handle.
        handle: u32 = 0;
        /// In: `AMDGPU_GEM_METADATA_OP_*`.
        op: u32 = 4;
        /// Flags, none defined.
        flags as "data.flags": u64 = 8;
        /// Tiling.
        tiling_info as "data.tiling_info": u64 = 16;
        /// Bytes used of the metadata.
        data_size_bytes as "data.data_size_bytes": u32 = 24;
        /// The metadata.
        data as "data.data": [u32; 64] = 28;
        /// Padding, unnamed in C.
        pad as "": u32 = 284;
    }

    /// Argument of AMDGPU_GEM_OP. 16 bytes without the last two fields.
    struct GemOp = "struct drm_amdgpu_gem_op", size 24, size_since(USERQ_SLOTS) {
        /// In: the GEM handle.
        handle: u32 = 0;
        /// In: `AMDGPU_GEM_OP_*`.
        op: u32 = 4;
        /// In: of GET_GEM_CREATE_INFO a pointer to memory for a [`GemCreate`], in view. Of SET_PLACEMENT
        /// `AMDGPU_GEM_DOMAIN_*`.
        value: u64 = 8;
        /// In and out: entries of a list of mappings, which is not served here.
        num_entries: u32 = 16, since(USERQ_SLOTS);
        /// Padding.
        pad as "padding": u32 = 20, since(USERQ_SLOTS);
    }

    /// Argument of AMDGPU_GEM_VA. 40 bytes without the last four fields.
    struct GemVa = "struct drm_amdgpu_gem_va", size 64, size_since(USERQ) {
        /// In: the GEM handle.
        handle: u32 = 0;
        /// Padding.
        pad as "_pad": u32 = 4;
        /// In: `AMDGPU_VA_OP_*`.
        operation: u32 = 8;
        /// In: [`VmPageFlags`].
        flags: u32 = 12;
        /// In: GPU virtual address.
        va_address: u64 = 16;
        /// In: offset in the buffer in bytes.
        offset_in_bo: u64 = 24;
        /// In: size in bytes.
        map_size: u64 = 32;
        /// In: point on the timeline.
        vm_timeline_point: u64 = 40, since(USERQ);
        /// In: sync object for the update.
        vm_timeline_syncobj_out: u32 = 48, since(USERQ);
        /// In: number of sync objects to wait for.
        num_syncobj_handles: u32 = 52, since(USERQ);
        /// In: pointer to their handles.
        input_fence_syncobj_handles: u64 = 56, since(USERQ);
    }
}

impl GemMmap {
    /// The argument that asks for this GEM handle.
    pub const fn for_handle(handle: u32) -> Self {
        Self { addr_ptr: handle as u64 }
    }

    /// In view: the GEM handle (little-endian: the low half).
    pub const fn handle(self) -> u32 {
        (self.addr_ptr & 0xffff_ffff) as u32
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// Whether the GPU works: u32, 1.
        AMDGPU_INFO_ACCEL_WORKING = 0x00;
        /// An IP: [`InfoHwIp`].
        AMDGPU_INFO_HW_IP_INFO = 0x02;
        /// Number of instances of an IP: u32.
        AMDGPU_INFO_HW_IP_COUNT = 0x03;
        /// GPU counter: u64.
        AMDGPU_INFO_TIMESTAMP = 0x05;
        /// A firmware's version: [`InfoFirmware`].
        AMDGPU_INFO_FW_VERSION = 0x0e;
        /// Bytes moved by the memory manager: u64.
        AMDGPU_INFO_NUM_BYTES_MOVED = 0x0f;
        /// Bytes of VRAM in use: u64.
        AMDGPU_INFO_VRAM_USAGE = 0x10;
        /// Bytes of GTT in use: u64.
        AMDGPU_INFO_GTT_USAGE = 0x11;
        /// Heap sizes: [`InfoVramGtt`].
        AMDGPU_INFO_VRAM_GTT = 0x14;
        /// Registers: u32 each.
        AMDGPU_INFO_READ_MMR_REG = 0x15;
        /// The device: [`InfoDevice`].
        AMDGPU_INFO_DEV_INFO = 0x16;
        /// Bytes in use of the VRAM that the CPU can map: u64.
        AMDGPU_INFO_VIS_VRAM_USAGE = 0x17;
        /// Evictions: u64.
        AMDGPU_INFO_NUM_EVICTIONS = 0x18;
        /// The heaps: [`MemoryInfo`].
        AMDGPU_INFO_MEMORY = 0x19;
        /// Video BIOS.
        AMDGPU_INFO_VBIOS = 0x1b;
        /// A sensor: u32.
        AMDGPU_INFO_SENSOR = 0x1d;
        /// How often VRAM was lost: u32.
        AMDGPU_INFO_VRAM_LOST_COUNTER = 0x1f;
        /// RAS features: u64.
        AMDGPU_INFO_RAS_ENABLED_FEATURES = 0x20;
        /// Video codecs.
        AMDGPU_INFO_VIDEO_CAPS = 0x21;
        /// Largest command submissions: u32 per IP.
        AMDGPU_INFO_MAX_IBS = 0x22, since(GFX11);
        /// The last memory fault.
        AMDGPU_INFO_GPUVM_FAULT = 0x23, since(Defined("AMDGPU_INFO_GPUVM_FAULT"));
        /// [`Info::instance`]: position of the shader engine.
        AMDGPU_INFO_MMR_SE_INDEX_SHIFT = 0;
        /// [`Info::instance`]: width mask of the shader engine, 0xff is all.
        AMDGPU_INFO_MMR_SE_INDEX_MASK = 0xff;
        /// [`Info::instance`]: position of the shader array.
        AMDGPU_INFO_MMR_SH_INDEX_SHIFT = 8;
        /// [`Info::instance`]: width mask of the shader array, 0xff is all.
        AMDGPU_INFO_MMR_SH_INDEX_MASK = 0xff;
        /// [`Info::dword_offset`] of HW_IP: graphics.
        AMDGPU_HW_IP_GFX = 0;
        /// [`Info::dword_offset`] of HW_IP: compute.
        AMDGPU_HW_IP_COMPUTE = 1;
        /// [`Info::dword_offset`] of HW_IP: SDMA.
        AMDGPU_HW_IP_DMA = 2;
        /// [`GemMetadata::op`]: set.
        AMDGPU_GEM_METADATA_OP_SET_METADATA = 1;
        /// [`GemMetadata::op`]: get.
        AMDGPU_GEM_METADATA_OP_GET_METADATA = 2;
        /// [`GemOp::op`]: how the buffer was made.
        AMDGPU_GEM_OP_GET_GEM_CREATE_INFO = 0;
        /// [`GemOp::op`]: where it shall lie.
        AMDGPU_GEM_OP_SET_PLACEMENT = 1;
        /// [`GemVa::operation`]: map.
        AMDGPU_VA_OP_MAP = 1;
        /// [`GemVa::operation`]: unmap.
        AMDGPU_VA_OP_UNMAP = 2;
        /// [`GemVa::operation`]: unmap whatever is there.
        AMDGPU_VA_OP_CLEAR = 3;
        /// [`GemVa::operation`]: map in place of whatever is there.
        AMDGPU_VA_OP_REPLACE = 4;
        /// [`InfoDevice::family`]: GFX9 dGPUs and gfx940 and later.
        AMDGPU_FAMILY_AI = 141;
        /// [`InfoDevice::family`]: GFX9 APUs.
        AMDGPU_FAMILY_RV = 142;
        /// [`InfoDevice::family`]: GFX10 dGPUs.
        AMDGPU_FAMILY_NV = 143;
        /// [`InfoDevice::family`]: GFX11 dGPUs.
        AMDGPU_FAMILY_GC_11_0_0 = 145, since(Defined("AMDGPU_FAMILY_GC_11_0_0"));
        /// [`InfoDevice::family`]: GFX12 dGPUs.
        AMDGPU_FAMILY_GC_12_0_0 = 152, since(Defined("AMDGPU_FAMILY_GC_12_0_0"));
        /// [`InfoDevice::vram_type`]: unknown.
        AMDGPU_VRAM_TYPE_UNKNOWN = 0;
        /// [`InfoDevice::vram_type`]: GDDR5.
        AMDGPU_VRAM_TYPE_GDDR5 = 5;
        /// [`InfoDevice::vram_type`]: HBM.
        AMDGPU_VRAM_TYPE_HBM = 6;
        /// [`InfoDevice::vram_type`]: GDDR6.
        AMDGPU_VRAM_TYPE_GDDR6 = 9;
    }
    Macro u64 {
        /// [`InfoDevice::ids_flags`]: an APU.
        AMDGPU_IDS_FLAGS_FUSION = 0x1;
        /// [`InfoDevice::ids_flags`]: preemption.
        AMDGPU_IDS_FLAGS_PREEMPTION = 0x2;
        /// [`InfoDevice::ids_flags`]: trusted memory zone.
        AMDGPU_IDS_FLAGS_TMZ = 0x4;
        /// [`GemCreate::domains`]: system memory, not for GPUs.
        AMDGPU_GEM_DOMAIN_CPU = 0x1;
        /// [`GemCreate::domains`]: system memory for GPUs.
        AMDGPU_GEM_DOMAIN_GTT = 0x2;
        /// [`GemCreate::domains`]: VRAM.
        AMDGPU_GEM_DOMAIN_VRAM = 0x4;
    }
}

abi_flags! {
    /// Bits of [`VmPageFlags`] for the header check.
    pub const VM_PAGE_FLAGS;
    /// Flags of a mapping; bits 5 to 8 hold the memory type.
    Macro VmPageFlags: u32 = "AMDGPU_VM_" {
        /// Update the page table later.
        DELAY_UPDATE = 1 << 0;
        /// GPUs may read.
        PAGE_READABLE = 1 << 1;
        /// GPUs may write.
        PAGE_WRITEABLE = 1 << 2;
        /// GPUs may execute.
        PAGE_EXECUTABLE = 1 << 3;
        /// Partially resident texture.
        PAGE_PRT = 1 << 4;
        /// Memory type: not coherent.
        MTYPE_NC = 1 << 5;
        /// Memory type: write-combined.
        MTYPE_WC = 2 << 5;
        /// Memory type: cache coherent.
        MTYPE_CC = 3 << 5;
        /// Memory type: uncached.
        MTYPE_UC = 4 << 5;
        /// Memory type: cached by this GPU alone.
        MTYPE_RW = 5 << 5;
        /// Bits of the memory type.
        MTYPE_MASK = 0xf << 5;
        /// Do not allocate in the infinity cache.
        PAGE_NOALLOC = 1 << 9, since(Defined("AMDGPU_VM_PAGE_NOALLOC"));
    }
}
