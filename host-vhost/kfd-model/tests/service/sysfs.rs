//! The files of the topology and of the PCI devices.

use std::path::Path;

use kfd_model::Model;
use kfd_model::machine::{CpuNode, Machine};
use kfd_model::profile::Profile;
use kfd_seam::{Entry, KfdService, Lookup};
use nix::errno::Errno;

use crate::caller::model;

const NODES: &str = "/sys/devices/virtual/kfd/kfd/topology/nodes";

pub fn text(model: &Model, path: &str) -> String {
    match model.lookup(Path::new(path)) {
        Lookup::Found(Entry::File(content)) => String::from_utf8(content).unwrap(),
        other => panic!("{path}: {other:?}"),
    }
}

pub fn names(model: &Model, path: &str) -> Vec<String> {
    match model.lookup(Path::new(path)) {
        Lookup::Found(Entry::Directory { entries, .. }) => {
            entries.into_iter().map(|entry| entry.name.into_string().unwrap()).collect()
        }
        other => panic!("{path}: {other:?}"),
    }
}

/// Keys and values of a properties file.
pub fn properties(model: &Model, path: &str) -> Vec<(String, u64)> {
    let text = text(model, path);
    assert!(text.ends_with('\n'));
    text.lines()
        .map(|line| {
            let (key, value) = line.split_once(' ').unwrap();
            (key.to_owned(), value.parse().unwrap())
        })
        .collect()
}

pub fn value(properties: &[(String, u64)], key: &str) -> u64 {
    properties.iter().find(|(name, _)| name == key).unwrap_or_else(|| panic!("no {key}")).1
}

/// `node_show`, in its order. A CPU node lacks the eight from `max_engine_clk_fcompute` to `num_xcc`.
const NODE_KEYS: [&str; 40] = [
    "cpu_cores_count",
    "simd_count",
    "mem_banks_count",
    "caches_count",
    "io_links_count",
    "p2p_links_count",
    "cpu_core_id_base",
    "simd_id_base",
    "max_waves_per_simd",
    "lds_size_in_kb",
    "gds_size_in_kb",
    "num_gws",
    "wave_front_size",
    "array_count",
    "simd_arrays_per_engine",
    "cu_per_simd_array",
    "simd_per_cu",
    "max_slots_scratch_cu",
    "gfx_target_version",
    "vendor_id",
    "device_id",
    "location_id",
    "domain",
    "drm_render_minor",
    "hive_id",
    "num_sdma_engines",
    "num_sdma_xgmi_engines",
    "num_sdma_queues_per_engine",
    "num_cp_queues",
    "cwsr_size",
    "ctl_stack_size",
    "max_engine_clk_fcompute",
    "local_mem_size",
    "fw_version",
    "capability",
    "debug_prop",
    "sdma_fw_version",
    "unique_id",
    "num_xcc",
    "max_engine_clk_ccompute",
];

#[test]
fn keys_stand_in_the_kernels_order() {
    let model = model("gfx906");
    let keys = |path: &str| properties(&model, path).into_iter().map(|(key, _)| key).collect::<Vec<_>>();
    assert_eq!(keys(&format!("{NODES}/1/properties")), NODE_KEYS);
    let mut cpu = NODE_KEYS.to_vec();
    cpu.drain(31..39);
    assert_eq!(keys(&format!("{NODES}/0/properties")), cpu);
    // iolink_show, mem_show.
    assert_eq!(
        keys(&format!("{NODES}/1/io_links/0/properties")),
        [
            "type",
            "version_major",
            "version_minor",
            "node_from",
            "node_to",
            "weight",
            "min_latency",
            "max_latency",
            "min_bandwidth",
            "max_bandwidth",
            "recommended_transfer_size",
            "recommended_sdma_engine_id_mask",
            "flags",
        ]
    );
    let bank = format!("{NODES}/1/mem_banks/0/properties");
    assert_eq!(keys(&bank), ["heap_type", "size_in_bytes", "flags", "width", "mem_clk_max"]);
    let cache = text(&model, &format!("{NODES}/1/caches/0/properties"));
    let keys: Vec<&str> = cache.lines().map(|line| line.split(' ').next().unwrap()).collect();
    // kfd_cache_show.
    assert_eq!(
        keys,
        [
            "processor_id_low",
            "level",
            "size",
            "cache_line_size",
            "cache_lines_per_tag",
            "association",
            "latency",
            "type",
            "sibling_map",
        ]
    );
}

#[test]
fn gfx906_is_what_its_data_sheet_says() {
    let model = model("gfx906");
    let node = properties(&model, &format!("{NODES}/1/properties"));
    let expect = |key, expected: u64| assert_eq!(value(&node, key), expected, "{key}");
    expect("simd_count", 240);
    expect("array_count", 4);
    expect("wave_front_size", 64);
    expect("gfx_target_version", 90006);
    expect("vendor_id", 0x1002);
    expect("device_id", 0x66a1);
    expect("simd_id_base", 0x8000_1000);
    expect("drm_render_minor", 128);
    // kfd_queue_ctx_save_restore_size; the sizes that Debian's thunk computes for 60 compute units.
    expect("cwsr_size", 0x13f_1000);
    expect("ctl_stack_size", 0x5000);
    // Watch points (4), doorbell type 2, trap debugging with firmware, revision 1.
    expect("capability", 0x2000_0000 | 1 << 22 | 0x3_8000 | 0x2000 | 0x280);
    expect("debug_prop", 0x400 | 29 << 4 | 6);
    assert_eq!(text(&model, &format!("{NODES}/1/name")), "vega20\n");
    assert_eq!(text(&model, &format!("{NODES}/0/name")), "\n");
    assert_eq!(text(&model, &format!("{NODES}/0/gpu_id")), "0\n");
    assert_ne!(text(&model, &format!("{NODES}/1/gpu_id")), "0\n");
    assert_eq!(text(&model, "/sys/class/kfd/kfd/topology/generation_id"), "2\n");
}

#[test]
fn caches_name_who_shares_them() {
    // kfd_fill_cache_non_crat_info, fill_in_l1_pcache, fill_in_l2_l3_pcache.
    let model = model("gfx906");
    let caches = &model.topology().nodes[1].caches;
    // Per array of 15 working units of 16: 15 vector caches, 5 of the 6 blocks of three twice; and one L2.
    assert_eq!(caches.len(), 4 * (15 + 5 + 5) + 1);
    let first = &caches[0];
    assert_eq!((first.processor_id_low, first.level, first.size, first.kind), (0x8000_1000, 1, 16, 1 | 8));
    assert_eq!(first.sibling_map, [1]);
    let instruction = &caches[60];
    assert_eq!((instruction.kind, instruction.size), (2 | 8, 32));
    assert_eq!(instruction.sibling_map, [0b111]);
    assert_eq!(caches[15].processor_id_low, 0x8000_1010, "ids count units that do not work");
    let l2 = caches.last().unwrap();
    assert_eq!((l2.level, l2.size), (2, 8192));
    assert_eq!(l2.sibling_map, [0x7fff; 4]);
    let line = text(&model, &format!("{NODES}/1/caches/100/properties"));
    let map = line.lines().last().unwrap().strip_prefix("sibling_map ").unwrap();
    assert_eq!(map.split(',').count(), 128);
    assert_eq!(map.split(',').filter(|bit| *bit == "1").count(), 60);
}

#[test]
fn the_pci_device_is_where_libdrm_looks() {
    let model = model("gfx906");
    // drmParsePciBusInfo, drmParsePciDeviceInfo, drmParseSubsystemType, drmNodeIsDRM.
    let device = "/sys/dev/char/226:128/device";
    let uevent = text(&model, &format!("{device}/uevent"));
    assert!(uevent.contains("PCI_SLOT_NAME=0000:c3:00.0\n"), "{uevent}");
    assert_eq!(text(&model, &format!("{device}/vendor")), "0x1002\n");
    assert_eq!(text(&model, &format!("{device}/device")), "0x66a1\n");
    assert_eq!(text(&model, &format!("{device}/revision")), "0x02\n");
    assert_eq!(text(&model, &format!("{device}/subsystem_device")), "0x0834\n");
    assert_eq!(names(&model, &format!("{device}/drm")), ["card16", "renderD128"]);
    let Lookup::Found(Entry::Symlink(subsystem)) = model.lookup(Path::new(&format!("{device}/subsystem")))
    else {
        panic!()
    };
    assert!(subsystem.to_str().unwrap().ends_with("/pci"));
    let Lookup::Found(Entry::File(config)) = model.lookup(Path::new(&format!("{device}/config"))) else {
        panic!()
    };
    assert_eq!((config.len(), &config[..4]), (64, &[0x02, 0x10, 0xa1, 0x66][..]));
    assert_eq!(config[8], 0x02);
    assert_eq!(text(&model, "/sys/class/drm/renderD128/dev"), "226:128\n");
    assert_eq!(text(&model, "/sys/bus/pci/devices/0000:c3:00.0/vendor"), "0x1002\n");
}

#[test]
fn the_module_is_loaded() {
    for profile in ["none", "gfx906"] {
        let model = model(profile);
        assert_eq!(text(&model, "/sys/module/amdgpu/initstate"), "live\n");
        assert_eq!(text(&model, "/sys/module/amdgpu/parameters/cwsr_enable"), "1\n");
        assert!(text(&model, "/proc/modules").lines().any(|line| line.starts_with("amdgpu ")));
        let version = model.lookup(Path::new("/sys/module/amdgpu/version"));
        assert_eq!(version, Lookup::Missing(Errno::ENOENT), "only the out-of-tree driver has one");
    }
}

/// The real thing: `find . | sort` and the content of all files of `/sys/devices/virtual/kfd/kfd`, without `power`, taken
/// in a QEMU guest with 2 CPUs, Debian's kernel 6.12.117 and amdgpu loaded without a GPU.
const REAL: &str = include_str!("../data/amdkfd-6.12-without-gpu.txt");

#[test]
fn without_a_gpu_the_tree_is_that_of_a_real_amdkfd() {
    let machine = Machine {
        nodes: vec![CpuNode { cpus: 2, first_apic_id: 0, memory_bytes: 1_540_984_832 }],
        max_clock_mhz: 0,
        amd: true,
    };
    let model = Model::on(Profile::load("none").unwrap(), &machine).unwrap();
    let root = "/sys/devices/virtual/kfd/kfd";
    let expected: Vec<&str> = REAL.lines().filter_map(|line| line.strip_prefix("TREE ")).collect();
    let mut found = Vec::new();
    walk(&model, root, ".", &mut found);
    found.sort();
    assert_eq!(found, expected);
    let mut files = 0;
    for part in REAL.split("FILE ").skip(1) {
        let (path, content) = part.split_once('\n').unwrap();
        assert_eq!(text(&model, &format!("{root}/{path}")), content, "{path}");
        files += 1;
    }
    assert_eq!(files, 6);
}

fn walk(model: &Model, root: &str, path: &str, found: &mut Vec<String>) {
    found.push(path.to_owned());
    if let Lookup::Found(Entry::Directory { entries, .. }) =
        model.lookup(Path::new(&format!("{root}/{path}")))
    {
        for entry in entries {
            walk(model, root, &format!("{path}/{}", entry.name.to_str().unwrap()), found);
        }
    }
}

#[test]
fn other_paths_are_not_the_models() {
    let model = model("gfx906");
    for path in [
        "/etc/passwd",
        "/sys/class/net",
        "/dev/null",
        "/proc/cpuinfo",
        "/dev/dri/renderD129",
        "/sys/dev/char/1:3",
    ] {
        assert_eq!(model.lookup(Path::new(path)), Lookup::Foreign, "{path}");
    }
    let nodes = model.lookup(Path::new(&format!("{NODES}/2")));
    assert_eq!(nodes, Lookup::Missing(Errno::ENOENT), "a real topology does not show through");
}
