//! The files that amdkfd, amdgpu and the DRM core show: `/sys`, `/dev`, as Linux 6.12 lays them out.

use core::fmt::Write;

use kfd_seam::DeviceId;

use crate::profile::{Gpu, Profile};
use crate::topology::{DRM_MAJOR, FIRST_RENDER_MINOR, Node, Topology};
use crate::tree::Tree;

/// The device of `/dev/kfd`.
pub const KFD_DEVICE: DeviceId = DeviceId(0);

/// The device of the render node of GPU `index`.
pub fn render_device(index: usize) -> DeviceId {
    DeviceId(u32::try_from(index).unwrap_or(u32::MAX - 1).saturating_add(1))
}

/// Which GPU a render node's device belongs to.
pub fn gpu_of_device(device: DeviceId) -> Option<usize> {
    usize::try_from(device.0.checked_sub(1)?).ok()
}

/// Major number of `/dev/kfd`. The kernel takes a free one (`register_chrdev(0, ...)`), below 255 at first.
const KFD_MAJOR: u32 = 242;

const KFD: &str = "/sys/devices/virtual/kfd/kfd";

/// Builds the tree of a topology.
pub fn build(profile: &Profile, topology: &Topology) -> Tree {
    let mut tree = Tree::default();
    kfd_device(&mut tree);
    topology_files(&mut tree, topology);
    module(&mut tree);
    for node in topology.gpu_nodes() {
        if let Some(index) = node.gpu
            && let Some(gpu) = profile.gpu.get(index)
        {
            render_node(&mut tree, gpu, index, node.properties.drm_render_minor);
        }
    }
    tree
}

fn kfd_device(tree: &mut Tree) {
    tree.own_directory("/sys/devices/virtual/kfd");
    tree.own_directory("/sys/class/kfd");
    tree.file(&format!("{KFD}/dev"), format!("{KFD_MAJOR}:0\n"));
    tree.file(&format!("{KFD}/uevent"), format!("MAJOR={KFD_MAJOR}\nMINOR=0\nDEVNAME=kfd\n"));
    tree.link(&format!("{KFD}/subsystem"), "../../../../class/kfd");
    // Processes appear here with VRAM use and counters; the model has none.
    tree.own_directory(&format!("{KFD}/proc"));
    tree.link("/sys/class/kfd/kfd", "../../devices/virtual/kfd/kfd");
    tree.link(&format!("/sys/dev/char/{KFD_MAJOR}:0"), "../../devices/virtual/kfd/kfd");
    tree.device("/dev/kfd", KFD_DEVICE, KFD_MAJOR, 0);
}

fn topology_files(tree: &mut Tree, topology: &Topology) {
    let base = format!("{KFD}/topology");
    tree.file(&format!("{base}/generation_id"), format!("{}\n", topology.generation));
    // From the OEM fields of the firmware's DSDT, which only root can read; these are QEMU's.
    let id = |text: &[u8; 8]| u64::from_le_bytes(*text);
    let properties =
        [("platform_oem", id(b"BXPC    ")), ("platform_id", id(b"BOCHS \0\0")), ("platform_rev", 1)];
    tree.file(&format!("{base}/system_properties"), text(&properties));
    for (number, node) in topology.nodes.iter().enumerate() {
        node_files(tree, &format!("{base}/nodes/{number}"), node);
    }
}

fn node_files(tree: &mut Tree, base: &str, node: &Node) {
    tree.file(&format!("{base}/gpu_id"), format!("{}\n", node.gpu_id));
    tree.file(&format!("{base}/name"), format!("{}\n", node.name));
    tree.file(&format!("{base}/properties"), text(&node.properties.lines()));
    for directory in ["mem_banks", "caches", "io_links", "p2p_links", "perf"] {
        tree.own_directory(&format!("{base}/{directory}"));
    }
    for (number, bank) in node.banks.iter().enumerate() {
        tree.file(&format!("{base}/mem_banks/{number}/properties"), text(&bank.lines()));
    }
    for (number, cache) in node.caches.iter().enumerate() {
        tree.file(&format!("{base}/caches/{number}/properties"), cache.text());
    }
    for (number, link) in node.io_links.iter().enumerate() {
        tree.file(&format!("{base}/io_links/{number}/properties"), text(&link.lines()));
    }
    for (number, link) in node.p2p_links.iter().enumerate() {
        tree.file(&format!("{base}/p2p_links/{number}/properties"), text(&link.lines()));
    }
}

/// `name value` lines (`sysfs_show_32bit_prop`).
fn text(lines: &[(&str, u64)]) -> String {
    let mut text = String::new();
    for (name, value) in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name} {value}");
    }
    text
}

/// `/sys/module/amdgpu`, as programs ask it whether the driver is loaded. Mainline's amdgpu has no `version` file.
fn module(tree: &mut Tree) {
    let base = "/sys/module/amdgpu";
    tree.own_directory(base);
    tree.file(&format!("{base}/initstate"), "live\n");
    tree.file(&format!("{base}/refcnt"), "0\n");
    tree.file(&format!("{base}/coresize"), format!("{MODULE_SIZE}\n"));
    tree.file(&format!("{base}/taint"), "\n");
    tree.own_directory(&format!("{base}/holders"));
    for (name, value) in [
        ("cwsr_enable", "1"),
        ("halt_if_hws_hang", "0"),
        ("hws_max_conc_proc", "-1"),
        ("mes", "0"),
        ("mtype_local", "0"),
        ("no_queue_eviction_on_vm_fault", "0"),
        ("no_system_mem_limit", "N"),
        ("noretry", "-1"),
        ("queue_preemption_timeout_ms", "9000"),
        ("sched_policy", "0"),
        ("send_sigterm", "0"),
        ("vm_size", "-1"),
    ] {
        tree.file(&format!("{base}/parameters/{name}"), format!("{value}\n"));
    }
}

/// Size of the module in bytes, that of Debian's for 6.12.
const MODULE_SIZE: u32 = 14_397_440;

/// The line of `/proc/modules`.
pub fn module_line() -> String {
    format!("amdgpu {MODULE_SIZE} 0 - Live 0x0000000000000000\n")
}

/// The PCI function of a GPU and its render node.
fn render_node(tree: &mut Tree, gpu: &Gpu, index: usize, minor: u32) {
    let address = gpu.address();
    let pci = &gpu.pci;
    // The port that the GPU hangs on: the first device of the bus's group of 16.
    let root = address.bus & 0xf0;
    let base = format!(
        "/sys/devices/pci{domain:04x}:{root:02x}/{domain:04x}:{root:02x}:01.1/{address}",
        domain = address.domain
    );
    tree.own_directory(&base);
    for (name, value) in [
        ("vendor", format!("{:#06x}", pci.vendor)),
        ("device", format!("{:#06x}", pci.device)),
        ("revision", format!("{:#04x}", pci.revision)),
        ("subsystem_vendor", format!("{:#06x}", pci.subsystem_vendor)),
        ("subsystem_device", format!("{:#06x}", pci.subsystem_device)),
        ("class", format!("{PCI_CLASS:#08x}")),
        ("numa_node", "-1".to_owned()),
        ("boot_vga", "0".to_owned()),
        ("mem_info_vram_total", gpu.memory.vram_bytes().to_string()),
        ("mem_info_vis_vram_total", gpu.memory.visible_bytes().to_string()),
        ("unique_id", format!("{:016x}", gpu.unique_id)),
    ] {
        tree.file(&format!("{base}/{name}"), format!("{value}\n"));
    }
    tree.file(&format!("{base}/config"), config_space(gpu));
    let uevent = format!(
        "DRIVER=amdgpu\nPCI_CLASS={PCI_CLASS:X}\nPCI_ID={:04X}:{:04X}\nPCI_SUBSYS_ID={:04X}:{:04X}\n\
         PCI_SLOT_NAME={address}\n",
        pci.vendor, pci.device, pci.subsystem_vendor, pci.subsystem_device
    );
    tree.file(&format!("{base}/uevent"), uevent);
    tree.link(&format!("{base}/subsystem"), "../../../../bus/pci");
    tree.link(&format!("{base}/driver"), "../../../../bus/pci/drivers/amdgpu");
    // libdrm tells GPUs apart by the name of their primary node. As in a container that was given render nodes only,
    // sysfs has it and /dev/dri does not.
    let card = FIRST_CARD_MINOR.saturating_add(minor.saturating_sub(FIRST_RENDER_MINOR));
    drm_minor(tree, &base, &format!("card{card}"), card);
    drm_minor(tree, &base, &format!("renderD{minor}"), minor);
    let from_sys = base.strip_prefix("/sys/").unwrap_or(&base);
    tree.link(&format!("/sys/bus/pci/devices/{address}"), &format!("../../../{from_sys}"));
    tree.device(&format!("/dev/dri/renderD{minor}"), render_device(index), DRM_MAJOR, minor);
    tree.link(&format!("/dev/dri/by-path/pci-{address}-render"), &format!("../renderD{minor}"));
}

/// Minor number of the first GPU's primary node: behind those that a host may have.
const FIRST_CARD_MINOR: u32 = 16;

/// A DRM device of the PCI function at `base`.
fn drm_minor(tree: &mut Tree, base: &str, name: &str, minor: u32) {
    let node = format!("{base}/drm/{name}");
    tree.file(&format!("{node}/dev"), format!("{DRM_MAJOR}:{minor}\n"));
    let uevent = format!("MAJOR={DRM_MAJOR}\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor\n");
    tree.file(&format!("{node}/uevent"), uevent);
    tree.link(&format!("{node}/device"), "../..");
    tree.link(&format!("{node}/subsystem"), "../../../../../../class/drm");
    let from_sys = node.strip_prefix("/sys/").unwrap_or(&node);
    tree.link(&format!("/sys/class/drm/{name}"), &format!("../../{from_sys}"));
    tree.link(&format!("/sys/dev/char/{DRM_MAJOR}:{minor}"), &format!("../../{from_sys}"));
}

/// PCI class of a display controller without a VGA part.
const PCI_CLASS: u32 = 0x03_8000;

/// The 64 bytes of configuration space that every user may read.
fn config_space(gpu: &Gpu) -> Vec<u8> {
    let pci = &gpu.pci;
    let mut config = Vec::with_capacity(64);
    config.extend(pci.vendor.to_le_bytes());
    config.extend(pci.device.to_le_bytes());
    // Command: memory space, bus master, INTx off. Status: capability list.
    config.extend(0x0406u16.to_le_bytes());
    config.extend(0x0010u16.to_le_bytes());
    config.push(pci.revision);
    config.extend(PCI_CLASS.to_le_bytes().iter().take(3));
    config.resize(0x2c, 0);
    config.extend(pci.subsystem_vendor.to_le_bytes());
    config.extend(pci.subsystem_device.to_le_bytes());
    config.resize(64, 0);
    config
}
