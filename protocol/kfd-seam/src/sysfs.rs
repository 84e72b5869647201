//! The files of amdkfd, amdgpu and the DRM core that every service shows: `/sys`, `/dev`, as Linux 6.12 lays them out.

use core::fmt::Write;

use crate::service::DeviceId;
use crate::tree::Tree;

/// The directory of `/dev/kfd` in sysfs, with `topology` below it.
pub const KFD: &str = "/sys/devices/virtual/kfd/kfd";

/// Where the files of this module and of a topology lie: [`Preload::prefixes`](crate::Preload::prefixes).
pub const PREFIXES: &[&str] = &[
    "/dev/kfd",
    "/dev/dri",
    "/proc/modules",
    "/sys/bus/pci/devices",
    "/sys/class/drm",
    "/sys/class/kfd",
    "/sys/dev/char",
    "/sys/devices/pci*",
    "/sys/devices/virtual/kfd",
    "/sys/module/amdgpu",
];

/// Major number of `/dev/kfd`. The kernel takes a free one (`register_chrdev(0, ...)`), below 255 at first.
const KFD_MAJOR: u32 = 242;

/// `DRM_MAJOR`.
pub const DRM_MAJOR: u32 = 226;

/// Render minor of the first GPU.
pub const FIRST_RENDER_MINOR: u32 = 128;

/// Minor number of the first GPU's primary node: behind those that a host may have.
const FIRST_CARD_MINOR: u32 = 16;

/// Size of the module in bytes, that of Debian's for 6.12.
const MODULE_SIZE: u32 = 14_397_440;

/// PCI class of a display controller without a VGA part.
const PCI_CLASS: u32 = 0x03_8000;

/// `/dev/kfd` and its directory, without the topology.
pub fn kfd_device(tree: &mut Tree, device: DeviceId) {
    tree.own_directory("/sys/devices/virtual/kfd");
    tree.own_directory("/sys/class/kfd");
    tree.file(&format!("{KFD}/dev"), format!("{KFD_MAJOR}:0\n"));
    tree.file(&format!("{KFD}/uevent"), format!("MAJOR={KFD_MAJOR}\nMINOR=0\nDEVNAME=kfd\n"));
    tree.link(&format!("{KFD}/subsystem"), "../../../../class/kfd");
    // Processes appear here with VRAM use and counters; there are none.
    tree.own_directory(&format!("{KFD}/proc"));
    tree.link("/sys/class/kfd/kfd", "../../devices/virtual/kfd/kfd");
    tree.link(&format!("/sys/dev/char/{KFD_MAJOR}:0"), "../../devices/virtual/kfd/kfd");
    tree.device("/dev/kfd", device, KFD_MAJOR, 0);
}

/// The directories that every node of a topology has, below `base`.
pub fn node_directories(tree: &mut Tree, base: &str) {
    for directory in ["mem_banks", "caches", "io_links", "p2p_links", "perf"] {
        tree.own_directory(&format!("{base}/{directory}"));
    }
}

/// `name value` lines (`sysfs_show_32bit_prop`).
pub fn properties(lines: &[(&str, u64)]) -> String {
    let mut text = String::new();
    for (name, value) in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name} {value}");
    }
    text
}

/// `/sys/module/amdgpu`, as programs ask it whether the driver is loaded. Mainline's amdgpu has no `version` file.
pub fn module(tree: &mut Tree) {
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

/// `/proc/modules` with the driver in it: programs ask lsmod whether it is loaded.
pub fn modules(mut real: Vec<u8>) -> Vec<u8> {
    if !real.split(|byte| *byte == b'\n').any(|line| line.starts_with(b"amdgpu ")) {
        real.extend(format!("amdgpu {MODULE_SIZE} 0 - Live 0x0000000000000000\n").into_bytes());
    }
    real
}

/// A GPU's PCI function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PciFunction {
    /// PCI domain.
    pub domain: u16,
    /// Bus.
    pub bus: u8,
    /// Device on the bus, 0 to 31.
    pub device: u8,
    /// Function of the device, 0 to 7.
    pub function: u8,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device_id: u16,
    /// Revision.
    pub revision: u8,
    /// Subsystem's vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem's device id.
    pub subsystem_device: u16,
    /// Bytes of VRAM.
    pub vram: u64,
    /// Bytes of VRAM that the CPU can reach.
    pub visible_vram: u64,
    /// The board's serial number.
    pub unique_id: u64,
}

/// The PCI function of a GPU, and its render node with this minor number.
pub fn render_node(tree: &mut Tree, pci: &PciFunction, device: DeviceId, minor: u32) {
    let PciFunction { domain, bus, .. } = *pci;
    let address = format!("{domain:04x}:{bus:02x}:{:02x}.{:x}", pci.device, pci.function);
    // The port that the GPU hangs on: the first device of the bus's group of 16.
    let root = bus & 0xf0;
    let base = format!("/sys/devices/pci{domain:04x}:{root:02x}/{domain:04x}:{root:02x}:01.1/{address}");
    tree.own_directory(&base);
    for (name, value) in [
        ("vendor", format!("{:#06x}", pci.vendor)),
        ("device", format!("{:#06x}", pci.device_id)),
        ("revision", format!("{:#04x}", pci.revision)),
        ("subsystem_vendor", format!("{:#06x}", pci.subsystem_vendor)),
        ("subsystem_device", format!("{:#06x}", pci.subsystem_device)),
        ("class", format!("{PCI_CLASS:#08x}")),
        ("numa_node", "-1".to_owned()),
        ("boot_vga", "0".to_owned()),
        ("mem_info_vram_total", pci.vram.to_string()),
        ("mem_info_vis_vram_total", pci.visible_vram.to_string()),
        ("unique_id", format!("{:016x}", pci.unique_id)),
    ] {
        tree.file(&format!("{base}/{name}"), format!("{value}\n"));
    }
    tree.file(&format!("{base}/config"), config_space(pci));
    let uevent = format!(
        "DRIVER=amdgpu\nPCI_CLASS={PCI_CLASS:X}\nPCI_ID={:04X}:{:04X}\nPCI_SUBSYS_ID={:04X}:{:04X}\n\
         PCI_SLOT_NAME={address}\n",
        pci.vendor, pci.device_id, pci.subsystem_vendor, pci.subsystem_device
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
    tree.device(&format!("/dev/dri/renderD{minor}"), device, DRM_MAJOR, minor);
    tree.link(&format!("/dev/dri/by-path/pci-{address}-render"), &format!("../renderD{minor}"));
}

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

/// The 64 bytes of configuration space that every user may read.
fn config_space(pci: &PciFunction) -> Vec<u8> {
    let mut config = Vec::with_capacity(64);
    config.extend(pci.vendor.to_le_bytes());
    config.extend(pci.device_id.to_le_bytes());
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
