//! Properties of nodes and their memory banks.

use super::{CacheProperties, IoLink};
use crate::machine::CpuNode;
use crate::profile::{Gpu, LinkKind, Memory};

/// Capability bits (`HSA_CAP_*` of `kfd_sysfs.h`).
mod capability {
    pub const WATCH_POINTS_SUPPORTED: u32 = 0x80;
    pub const WATCH_POINTS_TOTALBITS_SHIFT: u32 = 8;
    pub const DOORBELL_TYPE_2_0: u32 = 2 << 12;
    pub const TRAP_DEBUG_SUPPORT: u32 = 0x8000;
    pub const WAVE_LAUNCH_TRAP_OVERRIDE: u32 = 0x1_0000;
    pub const WAVE_LAUNCH_MODE: u32 = 0x2_0000;
    pub const PRECISE_MEMORY_OPERATIONS: u32 = 0x4_0000;
    pub const MEM_EDCSUPPORTED: u32 = 0x10_0000;
    pub const RASEVENTNOTIFY: u32 = 0x20_0000;
    pub const ASIC_REVISION_SHIFT: u32 = 22;
    pub const ASIC_REVISION_MASK: u32 = 0x03c0_0000;
    pub const SRAM_EDCSUPPORTED: u32 = 0x0400_0000;
    pub const COHERENTHOSTACCESS: u32 = 0x1000_0000;
    pub const TRAP_DEBUG_FIRMWARE: u32 = 0x2000_0000;
    pub const PRECISE_ALU_OPERATIONS: u32 = 0x4000_0000;
}

/// `HSA_DBG_DISPATCH_INFO_ALWAYS_VALID`.
const DISPATCH_INFO_ALWAYS_VALID: u64 = 0x400;

/// log2 of the 4 watch points that `kfd_device_info_init` gives to every GPU.
const WATCH_POINTS_LOG2: u32 = 2;

/// The values of the file `properties`, in no order; [`Self::lines`] gives the kernel's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the kernel's struct kfd_node_properties and its file name them")]
pub struct NodeProperties {
    pub cpu_cores_count: u32,
    pub simd_count: u32,
    pub mem_banks_count: u32,
    pub caches_count: u32,
    pub io_links_count: u32,
    pub p2p_links_count: u32,
    pub cpu_core_id_base: u32,
    pub simd_id_base: u32,
    pub max_waves_per_simd: u32,
    pub lds_size_in_kb: u32,
    pub gds_size_in_kb: u32,
    pub num_gws: u32,
    pub wave_front_size: u32,
    pub array_count: u32,
    pub simd_arrays_per_engine: u32,
    pub cu_per_simd_array: u32,
    pub simd_per_cu: u32,
    pub max_slots_scratch_cu: u32,
    pub gfx_target_version: u32,
    pub vendor_id: u32,
    pub device_id: u32,
    pub location_id: u32,
    pub domain: u32,
    pub drm_render_minor: u32,
    pub hive_id: u64,
    pub num_sdma_engines: u32,
    pub num_sdma_xgmi_engines: u32,
    pub num_sdma_queues_per_engine: u32,
    pub num_cp_queues: u32,
    pub cwsr_size: u32,
    pub ctl_stack_size: u32,
    /// The part that only GPU nodes have.
    pub gpu: Option<GpuProperties>,
    pub max_engine_clk_ccompute: u32,
}

/// The part of `properties` that only GPU nodes have.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the kernel's struct kfd_node_properties and its file name them")]
pub struct GpuProperties {
    pub max_engine_clk_fcompute: u32,
    pub fw_version: u32,
    pub capability: u32,
    pub debug_prop: u64,
    pub sdma_fw_version: u32,
    pub unique_id: u64,
    pub num_xcc: u32,
    /// Bytes that the debugger needs beside the save area; not in the file (`debug_memory_size`).
    pub debug_memory_size: u32,
}

impl NodeProperties {
    /// `kfd_fill_cu_for_cpu`.
    pub(super) fn of_cpu(cpu: &CpuNode, max_clock_mhz: u32) -> Self {
        Self {
            cpu_cores_count: cpu.cpus,
            cpu_core_id_base: cpu.first_apic_id,
            max_engine_clk_ccompute: max_clock_mhz,
            ..Self::default()
        }
    }

    /// `kfd_create_vcrat_image_gpu`, `kfd_topology_add_device`.
    pub(super) fn of_gpu(gpu: &Gpu, processor_id: u32, render_minor: u32, max_clock_mhz: u32) -> Self {
        let shader = &gpu.shader;
        let save = SaveArea::of(gpu);
        // A GPU outside any hive that is linked to its CPU by XGMI names the hive after its place.
        let own_hive = gpu.hive_id == 0 && gpu.cpu_link.kind == LinkKind::Xgmi;
        Self {
            simd_count: shader.active_cus().saturating_mul(shader.simds_per_cu),
            simd_id_base: processor_id,
            max_waves_per_simd: shader.max_waves_per_simd,
            lds_size_in_kb: shader.lds_kib,
            num_gws: shader.gws,
            wave_front_size: shader.wave_front_size,
            array_count: shader.arrays().saturating_mul(shader.xccs),
            simd_arrays_per_engine: shader.arrays_per_engine,
            cu_per_simd_array: shader.cus_per_array,
            simd_per_cu: shader.simds_per_cu,
            max_slots_scratch_cu: shader.scratch_slots_per_cu,
            gfx_target_version: gpu.gfx_target_version,
            vendor_id: u32::from(gpu.pci.vendor),
            device_id: u32::from(gpu.pci.device),
            location_id: gpu.address().location_id(),
            domain: u32::from(gpu.address().domain),
            drm_render_minor: render_minor,
            hive_id: if own_hive { u64::from(gpu.address().location_id()) } else { gpu.hive_id },
            num_sdma_engines: gpu.engines.sdma,
            num_sdma_xgmi_engines: gpu.engines.sdma_xgmi,
            num_sdma_queues_per_engine: gpu.engines.sdma_queues_per_engine,
            num_cp_queues: gpu.engines.cp_queues,
            cwsr_size: save.cwsr_size,
            ctl_stack_size: save.ctl_stack_size,
            gpu: Some(GpuProperties {
                max_engine_clk_fcompute: gpu.clocks.max_engine_mhz,
                fw_version: gpu.firmware.mec,
                capability: capability_of(gpu),
                debug_prop: debug_prop_of(gpu),
                sdma_fw_version: gpu.firmware.sdma,
                unique_id: gpu.unique_id,
                num_xcc: shader.xccs,
                debug_memory_size: save.debug_memory_size,
            }),
            max_engine_clk_ccompute: max_clock_mhz,
            ..Self::default()
        }
    }

    pub(super) fn count(
        &mut self,
        banks: &[MemoryBank],
        caches: &[CacheProperties],
        io_links: &[IoLink],
        p2p_links: &[IoLink],
    ) {
        let length = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        self.mem_banks_count = length(banks.len());
        self.caches_count = length(caches.len());
        self.io_links_count = length(io_links.len());
        self.p2p_links_count = length(p2p_links.len());
    }

    /// The lines of the file in the kernel's order (`node_show`).
    pub fn lines(&self) -> Vec<(&'static str, u64)> {
        let mut lines = vec![
            ("cpu_cores_count", u64::from(self.cpu_cores_count)),
            ("simd_count", u64::from(self.simd_count)),
            ("mem_banks_count", u64::from(self.mem_banks_count)),
            ("caches_count", u64::from(self.caches_count)),
            ("io_links_count", u64::from(self.io_links_count)),
            ("p2p_links_count", u64::from(self.p2p_links_count)),
            ("cpu_core_id_base", u64::from(self.cpu_core_id_base)),
            ("simd_id_base", u64::from(self.simd_id_base)),
            ("max_waves_per_simd", u64::from(self.max_waves_per_simd)),
            ("lds_size_in_kb", u64::from(self.lds_size_in_kb)),
            ("gds_size_in_kb", u64::from(self.gds_size_in_kb)),
            ("num_gws", u64::from(self.num_gws)),
            ("wave_front_size", u64::from(self.wave_front_size)),
            ("array_count", u64::from(self.array_count)),
            ("simd_arrays_per_engine", u64::from(self.simd_arrays_per_engine)),
            ("cu_per_simd_array", u64::from(self.cu_per_simd_array)),
            ("simd_per_cu", u64::from(self.simd_per_cu)),
            ("max_slots_scratch_cu", u64::from(self.max_slots_scratch_cu)),
            ("gfx_target_version", u64::from(self.gfx_target_version)),
            ("vendor_id", u64::from(self.vendor_id)),
            ("device_id", u64::from(self.device_id)),
            ("location_id", u64::from(self.location_id)),
            ("domain", u64::from(self.domain)),
            ("drm_render_minor", u64::from(self.drm_render_minor)),
            ("hive_id", self.hive_id),
            ("num_sdma_engines", u64::from(self.num_sdma_engines)),
            ("num_sdma_xgmi_engines", u64::from(self.num_sdma_xgmi_engines)),
            ("num_sdma_queues_per_engine", u64::from(self.num_sdma_queues_per_engine)),
            ("num_cp_queues", u64::from(self.num_cp_queues)),
            ("cwsr_size", u64::from(self.cwsr_size)),
            ("ctl_stack_size", u64::from(self.ctl_stack_size)),
        ];
        if let Some(gpu) = &self.gpu {
            lines.extend([
                ("max_engine_clk_fcompute", u64::from(gpu.max_engine_clk_fcompute)),
                ("local_mem_size", 0),
                ("fw_version", u64::from(gpu.fw_version)),
                ("capability", u64::from(gpu.capability)),
                ("debug_prop", gpu.debug_prop),
                ("sdma_fw_version", u64::from(gpu.sdma_fw_version)),
                ("unique_id", gpu.unique_id),
                ("num_xcc", u64::from(gpu.num_xcc)),
            ]);
        }
        lines.push(("max_engine_clk_ccompute", u64::from(self.max_engine_clk_ccompute)));
        lines
    }
}

/// `kfd_topology_set_capabilities`, `kfd_topology_add_device` and `node_show`.
///
/// `HSA_CAP_SVMAPI_SUPPORTED` is never set: the model does not serve `AMDKFD_IOC_SVM`.
fn capability_of(gpu: &Gpu) -> u32 {
    use capability as cap;
    let mut value = cap::WATCH_POINTS_SUPPORTED
        | (WATCH_POINTS_LOG2 << cap::WATCH_POINTS_TOTALBITS_SHIFT)
        | cap::DOORBELL_TYPE_2_0
        | cap::TRAP_DEBUG_SUPPORT
        | cap::WAVE_LAUNCH_TRAP_OVERRIDE
        | cap::WAVE_LAUNCH_MODE
        | ((gpu.revision_id << cap::ASIC_REVISION_SHIFT) & cap::ASIC_REVISION_MASK);
    if gpu.gc_version < [10, 0, 0] {
        if gpu.gc_version >= [9, 4, 2] {
            value |= cap::PRECISE_MEMORY_OPERATIONS;
        }
    } else if gpu.gc_version >= [12, 0, 0] {
        value |= cap::PRECISE_ALU_OPERATIONS;
    }
    if debug_firmware(gpu) {
        value |= cap::TRAP_DEBUG_FIRMWARE;
    }
    if gpu.ras.gfx {
        value |= cap::SRAM_EDCSUPPORTED;
    }
    if gpu.ras.umc {
        value |= cap::MEM_EDCSUPPORTED;
    }
    if (gpu.ras.gfx || gpu.ras.umc) && gpu.gc_version != [9, 0, 1] {
        value |= cap::RASEVENTNOTIFY;
    }
    if gpu.cpu_link.kind == LinkKind::Xgmi {
        value |= cap::COHERENTHOSTACCESS;
    }
    value
}

/// `kfd_topology_set_dbg_firmware_support`: the firmware from which exceptions are handled.
fn debug_firmware(gpu: &Gpu) -> bool {
    let mec = gpu.firmware.mec;
    match gpu.gc_version {
        [11, ..] => ((gpu.firmware.mes & 0x00ff_f000) >> 12) >= 14 && (gpu.firmware.mes & 0xfff) >= 64,
        [9, 0, 1] => mec >= 459 + 32768,
        [9, 1, 0] | [9, 2, 1] | [9, 2, 2] | [9, 3, 0] | [9, 4, 0] => mec >= 459,
        [9, 4, 1] => mec >= 60,
        [9, 4, 2] => mec >= 51,
        [10, 1, 10] | [10, 1, 2] | [10, 1, 1] => mec >= 144,
        [10, 3, 0] | [10, 3, 2] | [10, 3, 1] | [10, 3, 4] | [10, 3, 5] => mec >= 89,
        [10, 1, 3] | [10, 3, 3] => false,
        _ => true,
    }
}

/// `kfd_topology_set_capabilities` and `kfd_dbg_has_ttmps_always_setup`.
fn debug_prop_of(gpu: &Gpu) -> u64 {
    let gc = gpu.gc_version;
    let (low, high): (u64, u64) = match gc {
        [9, 4, 3] | [9, 4, 4] => (7, 30),
        [..10, _, _] => (6, 29),
        _ => (7, 29),
    };
    let always_valid =
        if gc < [11, 0, 0] { gc != [9, 4, 2] } else { gc >= [12, 0, 0] || (gpu.firmware.mes & 0xfff) >= 70 };
    low | (high << 4) | if always_valid { DISPATCH_INFO_ALWAYS_VALID } else { 0 }
}

/// Sizes for context save and restore (`kfd_queue_ctx_save_restore_size`), in bytes.
struct SaveArea {
    ctl_stack_size: u32,
    cwsr_size: u32,
    debug_memory_size: u32,
}

impl SaveArea {
    fn of(gpu: &Gpu) -> Self {
        const PAGE: u32 = 4096;
        const SGPR_SIZE_PER_CU: u32 = 0x4000;
        const LDS_SIZE_PER_CU: u32 = 0x1_0000;
        const HWREG_SIZE_PER_CU: u32 = 0x1000;
        const HEADER: u32 = 40;
        const DEBUGGER_BYTES_PER_WAVE: u32 = 32;
        const DEBUGGER_BYTES_ALIGN: u32 = 64;
        let version = gpu.gfx_target_version;
        let shader = &gpu.shader;
        let cus = shader.active_cus() / shader.xccs.max(1);
        // The kernel divides array_count of one XCC by the arrays of an engine.
        let waves = if version < 100_100 { (cus * 40).min(shader.engines * 512) } else { cus * 32 };
        let vgprs = match version {
            90_400..=90_499 | 90_010 | 90_008 => 0x8_0000,
            110_000 | 110_001 | 110_501 | 120_000 | 120_001 => 0x6_0000,
            _ => 0x4_0000,
        };
        let per_cu = vgprs + SGPR_SIZE_PER_CU + LDS_SIZE_PER_CU + HWREG_SIZE_PER_CU;
        let data = (cus * per_cu).next_multiple_of(PAGE);
        let per_wave = if version >= 100_100 { 12 } else { 8 };
        let mut ctl_stack_size = (HEADER + waves * per_wave + 8).next_multiple_of(PAGE);
        if version / 10_000 == 10 {
            ctl_stack_size = ctl_stack_size.min(0x7000);
        }
        Self {
            ctl_stack_size,
            cwsr_size: ctl_stack_size.saturating_add(data),
            debug_memory_size: (waves * DEBUGGER_BYTES_PER_WAVE).next_multiple_of(DEBUGGER_BYTES_ALIGN),
        }
    }
}

/// A memory bank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBank {
    /// `HSA_MEM_HEAP_TYPE_*`: 0 system, 1 VRAM all visible to the CPU, 2 VRAM not all visible.
    pub heap_type: u32,
    /// Size in bytes.
    pub size_in_bytes: u64,
    /// Width of the interface in bits; 0 when the firmware does not say.
    pub width: u32,
    /// Clock in MHz; 0 when the firmware does not say.
    pub mem_clk_max: u32,
}

impl MemoryBank {
    /// System memory. Width and clock come from DMI tables, which only root can read: 0 as without DMI.
    pub(super) fn system(size_in_bytes: u64) -> Self {
        Self { heap_type: 0, size_in_bytes, width: 0, mem_clk_max: 0 }
    }

    pub(super) fn vram(memory: &Memory) -> Self {
        Self {
            heap_type: if memory.large_bar() { 1 } else { 2 },
            size_in_bytes: memory.vram_bytes(),
            width: memory.width,
            mem_clk_max: memory.clock_mhz,
        }
    }

    /// The lines of the file in the kernel's order (`mem_show`).
    pub fn lines(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("heap_type", u64::from(self.heap_type)),
            ("size_in_bytes", self.size_in_bytes),
            ("flags", 0),
            ("width", u64::from(self.width)),
            ("mem_clk_max", u64::from(self.mem_clk_max)),
        ]
    }
}
