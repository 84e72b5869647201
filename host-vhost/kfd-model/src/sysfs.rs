//! The files of the model's GPUs: those of every service ([`kfd_seam::sysfs`]), and the topology.

use kfd_seam::DeviceId;
use kfd_seam::sysfs::{self, KFD, PciFunction};
use kfd_seam::tree::Tree;

use crate::profile::{Gpu, Profile};
use crate::topology::{Node, Topology};

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

/// Builds the tree of a topology.
pub fn build(profile: &Profile, topology: &Topology) -> Tree {
    let mut tree = Tree::default();
    sysfs::kfd_device(&mut tree, KFD_DEVICE);
    topology_files(&mut tree, topology);
    sysfs::module(&mut tree);
    for node in topology.gpu_nodes() {
        if let Some(index) = node.gpu
            && let Some(gpu) = profile.gpu.get(index)
        {
            let minor = node.properties.drm_render_minor;
            sysfs::render_node(&mut tree, &function(gpu), render_device(index), minor);
        }
    }
    tree
}

fn function(gpu: &Gpu) -> PciFunction {
    let (address, pci) = (gpu.address(), &gpu.pci);
    PciFunction {
        domain: address.domain,
        bus: address.bus,
        device: address.device,
        function: address.function,
        vendor: pci.vendor,
        device_id: pci.device,
        revision: pci.revision,
        subsystem_vendor: pci.subsystem_vendor,
        subsystem_device: pci.subsystem_device,
        vram: gpu.memory.vram_bytes(),
        visible_vram: gpu.memory.visible_bytes(),
        unique_id: gpu.unique_id,
    }
}

fn topology_files(tree: &mut Tree, topology: &Topology) {
    let base = format!("{KFD}/topology");
    tree.file(&format!("{base}/generation_id"), format!("{}\n", topology.generation));
    // From the OEM fields of the firmware's DSDT, which only root can read; these are QEMU's.
    let id = |text: &[u8; 8]| u64::from_le_bytes(*text);
    let properties =
        [("platform_oem", id(b"BXPC    ")), ("platform_id", id(b"BOCHS \0\0")), ("platform_rev", 1)];
    tree.file(&format!("{base}/system_properties"), sysfs::properties(&properties));
    for (number, node) in topology.nodes.iter().enumerate() {
        node_files(tree, &format!("{base}/nodes/{number}"), node);
    }
}

fn node_files(tree: &mut Tree, base: &str, node: &Node) {
    tree.file(&format!("{base}/gpu_id"), format!("{}\n", node.gpu_id));
    tree.file(&format!("{base}/name"), format!("{}\n", node.name));
    tree.file(&format!("{base}/properties"), sysfs::properties(&node.properties.lines()));
    sysfs::node_directories(tree, base);
    for (number, bank) in node.banks.iter().enumerate() {
        tree.file(&format!("{base}/mem_banks/{number}/properties"), sysfs::properties(&bank.lines()));
    }
    for (number, cache) in node.caches.iter().enumerate() {
        tree.file(&format!("{base}/caches/{number}/properties"), cache.text());
    }
    for (number, link) in node.io_links.iter().enumerate() {
        tree.file(&format!("{base}/io_links/{number}/properties"), sysfs::properties(&link.lines()));
    }
    for (number, link) in node.p2p_links.iter().enumerate() {
        tree.file(&format!("{base}/p2p_links/{number}/properties"), sysfs::properties(&link.lines()));
    }
}
