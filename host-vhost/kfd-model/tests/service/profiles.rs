//! Every built-in profile, and bad ones.

use std::collections::BTreeSet;

use kfd_model::Model;
use kfd_model::machine::{CpuNode, Machine};
use kfd_model::profile::{LinkKind, PciAddress, Profile, ProfileError};
use kfd_model::topology::IoLinkFlags;

use crate::caller::{machine, model};
use crate::sysfs::{names, properties, value};

const NODES: &str = "/sys/devices/virtual/kfd/kfd/topology/nodes";

#[test]
fn every_profile_makes_a_consistent_topology() {
    let mut count = 0;
    for name in Profile::known() {
        let model = model(name);
        let gpus = model.profile().gpu.len();
        let nodes = names(&model, NODES);
        assert_eq!(nodes.len(), 1 + gpus, "{name}");
        let mut ids = BTreeSet::new();
        for (number, node) in model.topology().nodes.iter().enumerate() {
            let base = format!("{NODES}/{number}");
            let node_properties = properties(&model, &format!("{base}/properties"));
            for (key, directory) in [
                ("mem_banks_count", "mem_banks"),
                ("caches_count", "caches"),
                ("io_links_count", "io_links"),
                ("p2p_links_count", "p2p_links"),
            ] {
                let listed = names(&model, &format!("{base}/{directory}")).len() as u64;
                assert_eq!(value(&node_properties, key), listed, "{name} {number} {key}");
            }
            if node.gpu.is_some() {
                assert!(node.gpu_id > 0 && node.gpu_id < 1 << 16 && ids.insert(node.gpu_id), "{name}");
                let capability = value(&node_properties, "capability");
                assert_eq!((capability >> 12) & 3, 2, "{name}: the thunk wants doorbell type 2");
                assert!(!node.caches.is_empty(), "{name}: ROCr 5.2.3 asserts that there are some");
                let simds = value(&node_properties, "simd_count");
                let most = value(&node_properties, "array_count")
                    * value(&node_properties, "cu_per_simd_array")
                    * value(&node_properties, "simd_per_cu");
                assert!(simds > 0 && simds <= most, "{name}");
                assert_eq!(value(&node_properties, "drm_render_minor"), 127 + number as u64, "{name}");
            }
            for link in node.io_links.iter().chain(&node.p2p_links) {
                assert_eq!(link.node_from as usize, number, "{name}");
                assert_ne!(link.node_from, link.node_to, "{name}");
                let other = &model.topology().nodes[link.node_to as usize];
                let back = |links: &[kfd_model::topology::IoLink]| {
                    links.iter().any(|back| back.node_to == link.node_from && back.kind == link.kind)
                };
                assert!(back(&other.io_links) || back(&other.p2p_links), "{name}: a link has two directions");
                assert!(link.flags.contains(IoLinkFlags::ENABLED), "{name}");
            }
        }
        count += 1;
    }
    assert_eq!(count, 9);
}

#[test]
fn the_gpu_id_is_the_kernels_hash() {
    // kfd_generate_gpu_id: CRC-16/ARC over devfn 0, subsystem 1002:0834, domain 0, device 66a1, bus c3, 16368 MiB and
    // one XCC as eight little-endian words; the value is from a separate implementation in Python.
    let model = model("gfx906");
    assert_eq!(model.topology().nodes[1].gpu_id, 0xe2ac);
}

#[test]
fn two_gpus_by_xgmi() {
    let model = model("gfx906x2");
    let [cpu, first, second] = &model.topology().nodes[..] else { panic!() };
    // kfd_fill_gpu_xgmi_link_to_gpu; kfd_set_iolink_non_coherent: Vega 20's XGMI is not coherent.
    let link = first.io_links.iter().find(|link| link.node_to == 2).unwrap();
    assert_eq!((link.kind, link.weight), (11, 15));
    assert_eq!(link.flags, IoLinkFlags::ENABLED | IoLinkFlags::NON_COHERENT);
    assert!(second.io_links.iter().any(|link| link.node_to == 1 && link.kind == 11));
    assert_eq!(first.properties.hive_id, second.properties.hive_id);
    assert_eq!(cpu.io_links.len(), 2);
    assert!(first.p2p_links.is_empty());
    assert_ne!(first.properties.simd_id_base, second.properties.simd_id_base);
}

#[test]
fn two_gpus_by_pcie() {
    let model = model("gfx906x2-pcie");
    let [_, first, second] = &model.topology().nodes[..] else { panic!() };
    // kfd_add_peer_prop: through the CPU, both weights.
    for (from, to) in [(first, 2), (second, 1)] {
        let [link] = &from.p2p_links[..] else { panic!() };
        assert_eq!((link.node_to, link.kind, link.weight), (to, 2, 40));
        assert_eq!(from.io_links.len(), 1);
    }
}

#[test]
fn a_machine_with_two_cpu_nodes() {
    // kfd_fill_iolink_info_for_cpu, kfd_create_indirect_link_prop.
    let node = CpuNode { cpus: 2, first_apic_id: 0, memory_bytes: 4 << 30 };
    let machine = Machine { nodes: vec![node, CpuNode { first_apic_id: 8, ..node }], ..machine() };
    let model = Model::on(Profile::load("gfx906").unwrap(), &machine).unwrap();
    let [first, second, gpu] = &model.topology().nodes[..] else { panic!() };
    assert_eq!(first.io_links.iter().map(|link| link.node_to).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(second.io_links.iter().map(|link| link.node_to).collect::<Vec<_>>(), [0]);
    assert_eq!(second.properties.cpu_core_id_base, 8);
    assert_eq!((gpu.io_links[0].node_to, gpu.p2p_links[0].node_to), (0, 1));
    assert_eq!((second.p2p_links[0].node_to, second.p2p_links[0].weight), (2, 40));
}

#[test]
fn capabilities_follow_the_generation() {
    // kfd_topology_set_capabilities.
    let of = |name| {
        let model = model(name);
        model.topology().nodes[1].properties.gpu.clone().unwrap()
    };
    const PRECISE_MEMORY: u32 = 0x4_0000;
    assert_eq!(of("gfx906").capability & PRECISE_MEMORY, 0);
    assert_ne!(of("gfx90a").capability & PRECISE_MEMORY, 0);
    assert_eq!(of("gfx942").debug_prop & 0x3ff, 30 << 4 | 7);
    assert_eq!(of("gfx1030").debug_prop & 0x3ff, 29 << 4 | 7);
    assert_eq!((of("gfx942").num_xcc, of("gfx906").num_xcc), (8, 1));
    for name in Profile::known().filter(|name| *name != "none") {
        assert_eq!(of(name).capability & 0x0800_0000, 0, "{name}: no SVM");
        assert_eq!(of(name).capability >> 31, 0, "{name}");
    }
}

#[test]
fn a_profile_can_be_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("own.toml");
    let text = include_str!("../../profiles/gfx906.toml").replace("vram_mib = 16368", "vram_mib = 32752");
    std::fs::write(&path, text.replace("visible_mib = 16368", "visible_mib = 32752")).unwrap();
    let profile = Profile::load(path.to_str().unwrap()).unwrap();
    assert_eq!(profile.gpu[0].memory.vram_mib, 32752);
    assert_eq!(profile.gpu[0].cpu_link.kind, LinkKind::Pcie);
}

#[test]
fn messages_say_what_was_found_and_what_is_known() {
    let message = Profile::load("gfx9000").unwrap_err().to_string();
    assert!(message.contains("\"gfx9000\"") && message.contains("none, gfx900, gfx906"), "{message}");
    let message = Profile::load("/nowhere/own.toml").unwrap_err().to_string();
    assert!(message.contains("/nowhere/own.toml") && message.contains("No such file"), "{message}");
    let message = Profile::parse("own", "description = 5").unwrap_err().to_string();
    assert!(message.contains("own") && message.contains("string"), "{message}");
    let message = Profile::parse("own", "description = \"x\"\nspeed = 1").unwrap_err().to_string();
    assert!(message.contains("speed"), "{message}");
    // Line and reason in one line, for whoever shows no more. The reason is serde's sentence.
    let message = Profile::parse("own", "description = \"x\"\n\nspeed = 1").unwrap_err().to_string();
    assert!(
        message.starts_with("the KFD model profile own is not valid in line 3: unknown field `speed`"),
        "{message}"
    );
    let message = Profile::parse("own", "description = \"x\"\n[[gpu]]\n").unwrap_err().to_string();
    assert!(message.contains("missing field") && !message.contains('\n'), "{message}");
    let message = Profile::parse("own", "description =").unwrap_err().to_string();
    assert!(message.contains("in line 1: ") && !message.contains('\n'), "{message}");
}

#[test]
fn contradictions_are_found() {
    let good = include_str!("../../profiles/gfx906x2.toml");
    assert!(Profile::parse("good", good).is_ok());
    for (from, to, part) in [
        ("kfd_minor = 17", "kfd_minor = 99", "expected 9 to 23"),
        ("0000:c6:00.0", "0000:c3:00.0", "two GPUs at PCI address"),
        ("0000:c6:00.0", "c6:00.0", "expected the form"),
        ("gpus = [0, 1]", "gpus = [0, 2]", "there are 2 GPUs"),
        ("gpus = [0, 1]", "gpus = [1, 1]", "to itself"),
        ("[0x7fff, 0x7fff, 0x7fff, 0x7fff]", "[0x7fff]", "expected 4"),
        ("[0x7fff, 0x7fff, 0x7fff, 0x7fff]", "[0x17fff, 0, 0, 0]", "more than 16 units"),
        ("[0x7fff, 0x7fff, 0x7fff, 0x7fff]", "[0, 0, 0, 0]", "no compute unit"),
        ("visible_mib = 16368", "visible_mib = 20000", "expected 1 to vram_mib"),
        ("counter_khz = 100000", "counter_khz = 0", "counter_khz"),
        ("lds_kib = 64", "lds_kib = 0", "lds_kib is 0"),
        ("cus_shared = 16", "cus_shared = 0", "cus_shared"),
        ("hive_id = 0x3f1c5a77d20b9e41", "", "share no hive_id"),
        (
            "[[link]]\ngpus = [0, 1]\nhops = 1\nmin_bandwidth = 50000\nmax_bandwidth = 100000\n",
            "",
            "no [[link]]",
        ),
    ] {
        assert!(good.contains(from), "{from}");
        let error = Profile::parse("bad", &good.replace(from, to)).unwrap_err();
        assert!(matches!(error, ProfileError::Inconsistent { .. }), "{error}");
        assert!(error.to_string().contains(part), "{from} -> {to}: {error}");
    }
}

#[test]
fn pci_addresses() {
    let address = PciAddress::parse("0001:c3:1f.7").unwrap();
    assert_eq!((address.location_id(), address.to_string()), (0xc3ff, "0001:c3:1f.7".to_owned()));
    for bad in
        ["", "0000:c3:00", "0000:c3:20.0", "0000:c3:00.8", "000:c3:00.0", "0000:zz:00.0", "0000:c3:00.0.0"]
    {
        assert_eq!(PciAddress::parse(bad), None, "{bad}");
    }
}
