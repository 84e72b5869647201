//! The topology: what amdkfd derives from the machine and its GPUs (`kfd_topology.c`, `kfd_crat.c` of Linux 6.12).

mod cache;
mod link;
mod node;

pub use cache::CacheProperties;
pub use link::{IoLink, IoLinkFlags};
pub use node::{MemoryBank, NodeProperties};

use kfd_seam::sysfs::FIRST_RENDER_MINOR;

use crate::machine::Machine;
use crate::profile::{Gpu, PciAddress, Profile};

/// First processor id of the first GPU (`gpu_processor_id_low`).
const FIRST_GPU_PROCESSOR_ID: u32 = 0x8000_1000;

/// One node of the topology.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// KFD's id of the GPU, 0 for a CPU node.
    pub gpu_id: u32,
    /// Index of the GPU in the profile.
    pub gpu: Option<usize>,
    /// Name, empty for a CPU node.
    pub name: String,
    /// The file `properties`.
    pub properties: NodeProperties,
    /// Memory banks.
    pub banks: Vec<MemoryBank>,
    /// Caches; none on a CPU node (the kernel's CPU table has none).
    pub caches: Vec<CacheProperties>,
    /// Direct links.
    pub io_links: Vec<IoLink>,
    /// Links through other nodes.
    pub p2p_links: Vec<IoLink>,
}

/// All nodes: CPUs first, then GPUs in probe order.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    /// Counts changes: one for the CPUs, one for each GPU.
    pub generation: u32,
    /// The nodes; the index is the node number.
    pub nodes: Vec<Node>,
}

impl Topology {
    /// Builds the topology of a profile's GPUs in a machine.
    pub fn new(profile: &Profile, machine: &Machine) -> Self {
        let mut nodes = Vec::new();
        for cpu in &machine.nodes {
            nodes.push(Node {
                gpu_id: 0,
                gpu: None,
                name: String::new(),
                properties: NodeProperties::of_cpu(cpu, machine.max_clock_mhz),
                banks: vec![MemoryBank::system(cpu.memory_bytes)],
                caches: Vec::new(),
                io_links: Vec::new(),
                p2p_links: Vec::new(),
            });
        }
        link::connect_cpus(&mut nodes, machine.amd);
        let mut processor_id = FIRST_GPU_PROCESSOR_ID;
        for (index, gpu) in profile.gpu.iter().enumerate() {
            let taken: Vec<u32> = nodes.iter().map(|node| node.gpu_id).collect();
            let render_minor = FIRST_RENDER_MINOR.saturating_add(u32::try_from(index).unwrap_or(0));
            let properties = NodeProperties::of_gpu(gpu, processor_id, render_minor, machine.max_clock_mhz);
            let caches = cache::of_gpu(gpu, processor_id);
            processor_id =
                processor_id.saturating_add(gpu.shader.arrays().saturating_mul(gpu.shader.cus_per_array));
            nodes.push(Node {
                gpu_id: gpu_id(gpu, &taken),
                gpu: Some(index),
                name: gpu.name.clone(),
                properties,
                banks: vec![MemoryBank::vram(&gpu.memory)],
                caches,
                io_links: Vec::new(),
                p2p_links: Vec::new(),
            });
            link::connect_gpu(&mut nodes, profile, index);
        }
        for node in &mut nodes {
            node.properties.count(&node.banks, &node.caches, &node.io_links, &node.p2p_links);
        }
        let generation = u32::try_from(profile.gpu.len()).unwrap_or(u32::MAX).saturating_add(1);
        Self { generation, nodes }
    }

    /// The GPU nodes in order.
    pub fn gpu_nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.gpu.is_some())
    }
}

/// `kfd_generate_gpu_id`: a 16-bit hash of where the GPU sits and what it is, made unique and not 0.
fn gpu_id(gpu: &Gpu, taken: &[u32]) -> u32 {
    let PciAddress { domain, bus, .. } = gpu.address();
    let vram = gpu.memory.vram_bytes();
    // One node covers all XCCs, so the first bit of its mask is bit 0.
    let words = [
        u32::from(gpu.address().devfn()),
        u32::from(gpu.pci.subsystem_vendor) | (u32::from(gpu.pci.subsystem_device) << 16),
        u32::from(domain),
        u32::from(gpu.pci.device),
        u32::from(bus),
        (vram & 0xffff_ffff) as u32,
        (vram >> 32) as u32,
        gpu.shader.xccs << 16,
    ];
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    let mut id = u32::from(crc16(bytes));
    while id == 0 || taken.contains(&id) {
        id = if id == 0 { 1 } else { (id + 1) & 0xffff };
    }
    id
}

/// The kernel's `crc16`: polynomial 0x8005, reflected, start value 0.
fn crc16(bytes: impl Iterator<Item = u8>) -> u16 {
    bytes.fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(byte), |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0xa001 } else { crc >> 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc16_is_the_arc_one() {
        // Check value of CRC-16/ARC, the variant of the kernel's lib/crc16.c.
        assert_eq!(crc16(b"123456789".iter().copied()), 0xbb3d);
    }
}
