//! GPU nodes: the host's sysfs text as AMD's library reads it.

use hsakmt_abi::caller::NodeExtras;
use hsakmt_abi::topology::{
    HSA_CPU_SIBLINGS, HSA_PUBLIC_NAME_SIZE, HsaCacheProperties, HsaCacheType, HsaCapability,
    HsaDebugProperties, HsaEngineId, HsaEngineVersion, HsaHeapType, HsaIoLinkProperties, HsaIoLinkType,
    HsaLinkProperty, HsaMemoryProperties, HsaMemoryProperty, HsaNodeProperties356,
};

use super::Node;
use super::text::{Files, Properties};
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::settings::Settings;

/// SGPRs of a compute unit in bytes, the same for all (`SGPR_SIZE_PER_CU` of AMD's library).
const SGPR_SIZE_PER_CU: u32 = 0x4000;

/// `AMDGPU_IDS_FLAGS_FUSION` (amdgpu_drm.h): an APU.
const IDS_FLAGS_FUSION: u64 = kfd_abi::drm::amdgpu::AMDGPU_IDS_FLAGS_FUSION;

/// Where a GPU stands in the host's topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostGpu {
    /// Number of its directory in `nodes/`.
    pub number: u32,
    /// KFD's id.
    pub gpu_id: u32,
}

/// A link as the host has it: its nodes are the host's.
#[derive(Clone, Copy, Debug)]
pub struct HostLink {
    /// The host's node that it leads to.
    pub to: u32,
    /// `io_links` or `p2p_links`.
    pub kind: &'static str,
    /// Its number there.
    pub number: u32,
    /// All else; the nodes in here are not set.
    pub properties: HsaIoLinkProperties,
    /// SDMA engines that are best for copies over it, a bit each.
    pub recommended_engines: u32,
}

/// What the render node says of a GPU.
pub type Device = kfd_abi::drm::amdgpu::InfoDevice;

/// The GPUs in the host's topology, in the host's order.
pub fn list(files: &Files) -> Vec<HostGpu> {
    let gpu = |number| {
        let gpu_id = files.number(&format!("nodes/{number}/gpu_id")).and_then(|id| u32::try_from(id).ok());
        gpu_id.filter(|&id| id != 0).map(|gpu_id| HostGpu { number, gpu_id })
    };
    files.numbered("nodes").into_iter().filter_map(gpu).collect()
}

/// A GPU's node, without links. `device` is what the render node said, if it did.
pub fn node(files: &Files, gpu: HostGpu, device: Option<&Device>, settings: &Settings) -> Outcome<Node> {
    let directory = format!("nodes/{}", gpu.number);
    let file = files.properties(&format!("{directory}/properties"));
    let file =
        file.ok_or_else(|| Refusal::error(format!("the host's topology has no {directory}/properties")))?;
    let banks: Vec<_> = banks(files, &directory);
    let caches: Vec<_> = caches(files, &directory);
    let mut properties = from_file(&file);
    properties.kfd_gpu_id = gpu.gpu_id;
    properties.num_memory_banks = u32::try_from(banks.len()).unwrap_or(u32::MAX);
    properties.num_caches = u32::try_from(caches.len()).unwrap_or(u32::MAX);

    let gfx = file.word("gfx_target_version");
    let own = (gfx / 10000 % 100, gfx / 100 % 100, gfx % 100);
    let invalid = |_| Refusal::error("HSA_OVERRIDE_GFX_VERSION is not of the form major.minor.stepping");
    let version = settings.gfx_override.map_err(invalid)?.unwrap_or(own);
    let engine = |id: HsaEngineId, (major, minor, stepping)| {
        id.with(HsaEngineId::MAJOR, major)
            .with(HsaEngineId::MINOR, minor)
            .with(HsaEngineId::STEPPING, stepping)
    };
    let extras = NodeExtras {
        engine_id: engine(properties.engine_id, own),
        override_engine_id: settings
            .gfx_override
            .map_err(invalid)?
            .map_or(HsaEngineId(0), |version| engine(HsaEngineId(0), version)),
        capability2: file.word("capability2"),
        cwsr_size: file.word("cwsr_size"),
        ctl_stack_size: file.word("ctl_stack_size"),
        wall_clock_khz: device.map_or(0, |device| device.gpu_counter_freq.into()),
    };
    properties.engine_id = engine(properties.engine_id, version);
    let full = version.0 << 16 | version.1 << 8 | version.2;
    let amd_name = amd_name(own).map_or_else(|| format!("GFX{full:06x}"), str::to_owned);
    let mut bytes = [0; HSA_PUBLIC_NAME_SIZE];
    for (place, byte) in bytes.iter_mut().zip(amd_name.bytes().take(HSA_PUBLIC_NAME_SIZE - 1)) {
        *place = byte;
    }
    properties.amd_name = bytes;
    if let Some(device) = device {
        let name = super::marketing::name(device.device_id, device.pci_rev);
        let mut wide = [0; HSA_PUBLIC_NAME_SIZE];
        // AMD's library widens the bytes one by one.
        for (place, byte) in wide.iter_mut().zip(name.bytes().take(HSA_PUBLIC_NAME_SIZE - 1)) {
            *place = byte.into();
        }
        properties.marketing_name = wide;
        properties.family_id = device.family;
        properties.integrated = u8::from(device.ids_flags & IDS_FLAGS_FUSION != 0);
    }
    properties.sgpr_size_per_cu = SGPR_SIZE_PER_CU;
    properties.vgpr_size_per_cu = vgpr_size_per_cu(full);
    Ok(Node { gpu_id: gpu.gpu_id, gfx: full, properties, extras, banks, caches, links: Vec::new() })
}

fn from_file(file: &Properties) -> HsaNodeProperties356 {
    let arrays = file.word("simd_arrays_per_engine");
    HsaNodeProperties356 {
        // The CPUs are the guest's own, in nodes of their own, whatever this node is on the host.
        num_cpu_cores: 0,
        c_compute_id_lo: 0,
        num_f_compute_cores: file.word("simd_count"),
        f_compute_id_lo: file.word("simd_id_base"),
        // SVM ties GPU addresses to the CPU addresses of the process that owns the KFD process, which is the host's.
        capability: HsaCapability(file.word("capability")).with(HsaCapability::SVM_API_SUPPORTED, 0),
        max_waves_per_simd: file.word("max_waves_per_simd"),
        lds_size_in_kb: file.word("lds_size_in_kb"),
        gds_size_in_kb: file.word("gds_size_in_kb"),
        wave_front_size: file.word("wave_front_size"),
        num_shader_banks: file.word("array_count").checked_div(arrays).unwrap_or(0),
        num_arrays: arrays,
        num_cu_per_array: file.word("cu_per_simd_array"),
        num_simd_per_cu: file.word("simd_per_cu"),
        max_slots_scratch_cu: file.word("max_slots_scratch_cu"),
        engine_id: HsaEngineId(0).with(HsaEngineId::U_CODE, file.word("fw_version")),
        vendor_id: low16(file.word("vendor_id")),
        device_id: low16(file.word("device_id")),
        location_id: file.word("location_id"),
        local_mem_size: file.long("local_mem_size"),
        max_engine_clock_mhz_f_compute: file.word("max_engine_clk_fcompute"),
        max_engine_clock_mhz_c_compute: file.word("max_engine_clk_ccompute"),
        drm_render_minor: file.word("drm_render_minor").cast_signed(),
        u_code_engine_versions: HsaEngineVersion(0)
            .with(HsaEngineVersion::U_CODE_SDMA, file.word("sdma_fw_version")),
        debug_properties: HsaDebugProperties(file.long("debug_prop")),
        hive_id: file.long("hive_id"),
        num_sdma_engines: file.word("num_sdma_engines"),
        num_sdma_xgmi_engines: file.word("num_sdma_xgmi_engines"),
        num_sdma_queues_per_engine: low8(file.word("num_sdma_queues_per_engine")),
        num_cp_queues: low8(file.word("num_cp_queues")),
        num_gws: low8(file.word("num_gws")),
        domain: file.word("domain"),
        unique_id: file.long("unique_id"),
        // Kernels before 6.5 do not say.
        num_xcc: file.word("num_xcc").max(1),
        ..Default::default()
    }
}

fn low16(value: u32) -> u16 {
    (value & 0xffff) as u16
}

fn low8(value: u32) -> u8 {
    (value & 0xff) as u8
}

/// AMD's names of the chips that its library knows by name; it calls the others by their version.
fn amd_name((major, minor, stepping): (u32, u32, u32)) -> Option<&'static str> {
    Some(match (major, minor, stepping) {
        (9, 0, 0) => "Vega10",
        (9, 0, 2) => "Raven",
        (9, 0, 4) => "Vega12",
        (9, 0, 6) => "Vega20",
        (9, 0, 8) => "Arcturus",
        (9, 0, 10) => "Aldebaran",
        (9, 0, 12) => "Renoir",
        (10, 1, 0) => "Navi10",
        (10, 1, 1) => "Navi12",
        (10, 1, 2) => "Navi14",
        (10, 1, 3) => "cyan_skillfish",
        (10, 3, 0) => "SIENNA_CICHLID",
        (10, 3, 1) => "NAVY_FLOUNDER",
        (10, 3, 2) => "DIMGREY_CAVEFISH",
        (10, 3, 3) => "VanGogh",
        (10, 3, 4) => "BEIGE_GOBY",
        (10, 3, 5) => "YELLOW_CARP",
        _ => return None,
    })
}

/// VGPRs of a compute unit in bytes, by the version as `0xMMmmss` (`get_vgpr_size_per_cu` of AMD's library, 6.2.4).
fn vgpr_size_per_cu(gfx: u32) -> u32 {
    match gfx {
        0x09_0400..=0x09_04ff | 0x09_000a | 0x09_0008 => 0x8_0000,
        0x0b_0000 | 0x0b_0001 | 0x0c_0000 | 0x0c_0001 => 0x6_0000,
        _ => 0x4_0000,
    }
}

fn banks(files: &Files, directory: &str) -> Vec<HsaMemoryProperties> {
    let bank = |number| {
        let file = files.properties(&format!("{directory}/mem_banks/{number}/properties"))?;
        Some(HsaMemoryProperties {
            heap_type: HsaHeapType(file.word("heap_type")),
            size_in_bytes: file.long("size_in_bytes"),
            flags: HsaMemoryProperty(file.word("flags")),
            width: file.word("width"),
            memory_clock_max: file.word("mem_clk_max"),
            virtual_base_address: 0,
        })
    };
    files.numbered(&format!("{directory}/mem_banks")).into_iter().filter_map(bank).collect()
}

fn caches(files: &Files, directory: &str) -> Vec<HsaCacheProperties> {
    let cache = |number| {
        let path = format!("{directory}/caches/{number}/properties");
        let file = files.properties(&path)?;
        let siblings = files.text(&path)?.lines().find_map(|line| line.strip_prefix("sibling_map "));
        let mut sibling_map = [0; HSA_CPU_SIBLINGS];
        for (place, text) in sibling_map.iter_mut().zip(siblings.unwrap_or_default().split(',')) {
            *place = text.trim().parse().unwrap_or(0);
        }
        Some(HsaCacheProperties {
            processor_id_low: file.word("processor_id_low"),
            cache_level: file.word("level"),
            cache_size: file.word("size"),
            cache_line_size: file.word("cache_line_size"),
            cache_lines_per_tag: file.word("cache_lines_per_tag"),
            cache_associativity: file.word("association"),
            cache_latency: file.word("latency"),
            cache_type: HsaCacheType(file.word("type")),
            sibling_map,
        })
    };
    files.numbered(&format!("{directory}/caches")).into_iter().filter_map(cache).collect()
}

/// A GPU's links: direct ones, then peer-to-peer.
pub fn links(files: &Files, gpu: HostGpu) -> Vec<HostLink> {
    let mut links = Vec::new();
    for kind in ["io_links", "p2p_links"] {
        let directory = format!("nodes/{}/{kind}", gpu.number);
        let link = |number| {
            let file = files.properties(&format!("{directory}/{number}/properties"))?;
            let properties = HsaIoLinkProperties {
                io_link_type: HsaIoLinkType(file.word("type")),
                version_major: file.word("version_major"),
                version_minor: file.word("version_minor"),
                weight: file.word("weight"),
                minimum_latency: file.word("min_latency"),
                maximum_latency: file.word("max_latency"),
                minimum_bandwidth: file.word("min_bandwidth"),
                maximum_bandwidth: file.word("max_bandwidth"),
                rec_transfer_size: file.word("recommended_transfer_size"),
                flags: HsaLinkProperty(file.word("flags")),
                ..Default::default()
            };
            let recommended_engines = file.word("recommended_sdma_engine_id_mask");
            Some(HostLink { to: file.word("node_to"), kind, number, properties, recommended_engines })
        };
        links.extend(files.numbered(&directory).into_iter().filter_map(link));
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtio_kfd_protocol::topology::TopologyFile;

    fn files(list: &[(&str, &str)]) -> Files {
        let file = |(path, text): &(&str, &str)| TopologyFile {
            path: (*path).into(),
            content: text.as_bytes().to_vec(),
        };
        Files::new(list.iter().map(file).collect())
    }

    const VEGA20: &str = "cpu_cores_count 0\nsimd_count 240\ncapability 671588992\narray_count 4\n\
        simd_arrays_per_engine 1\ngfx_target_version 90006\nfw_version 1492\nvendor_id 4098\ndevice_id 26273\n\
        num_gws 64\nsdma_fw_version 145\n";

    fn vega20(settings: &Settings) -> Outcome<Node> {
        let files = files(&[
            ("nodes/0/gpu_id", "0\n"),
            ("nodes/1/gpu_id", "26287\n"),
            ("nodes/1/properties", VEGA20),
            (
                "nodes/1/mem_banks/0/properties",
                "heap_type 1\nsize_in_bytes 17163091968\nwidth 4096\nmem_clk_max 1000\n",
            ),
            (
                "nodes/1/caches/0/properties",
                "processor_id_low 8\nlevel 1\nsize 16\ntype 9\nsibling_map 1,0,1\n",
            ),
        ]);
        let gpus = list(&files);
        assert_eq!(gpus, [HostGpu { number: 1, gpu_id: 26287 }]);
        node(&files, gpus[0], None, settings)
    }

    #[test]
    fn a_node_from_its_files() {
        let node = vega20(&Settings::default()).unwrap();
        let engine = node.properties.engine_id;
        assert_eq!((engine.get(HsaEngineId::MAJOR), engine.get(HsaEngineId::STEPPING)), (9, 6));
        assert_eq!(engine.get(HsaEngineId::U_CODE), 1492 & 0x3ff);
        assert!(!node.properties.capability.is_set(HsaCapability::SVM_API_SUPPORTED));
        assert_eq!({ node.properties.num_shader_banks }, 4);
        assert_eq!({ node.properties.num_xcc }, 1);
        assert_eq!({ node.properties.vgpr_size_per_cu }, 0x40000);
        assert_eq!(node.properties.amd_name[..7], *b"Vega20\0");
        assert_eq!({ node.banks[0].size_in_bytes }, 17163091968);
        assert_eq!(node.caches[0].sibling_map[..4], [1, 0, 1, 0]);
        assert_eq!({ node.caches[0].cache_type }.0, 9);
    }

    #[test]
    fn the_version_can_be_overridden() {
        let settings = Settings { gfx_override: Ok(Some((10, 3, 0))), ..Default::default() };
        let node = vega20(&settings).unwrap();
        assert_eq!(node.gfx, 0x0a0300);
        assert_eq!(node.properties.amd_name[..7], *b"Vega20\0", "the name is the chip's");
        let bad =
            Settings { gfx_override: Err(crate::thunk::settings::InvalidOverride), ..Default::default() };
        assert!(vega20(&bad).is_err());
    }
}
