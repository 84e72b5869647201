//! Links between nodes (`kfd_crat.c`, `kfd_fill_iolink_non_crat_info` of `kfd_topology.c`).

use super::Node;
use crate::profile::{Gpu, LinkKind, Profile};

bitflags::bitflags! {
    /// `HSA_IOLINK_FLAGS_*`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct IoLinkFlags: u32 {
        /// The link works.
        const ENABLED = 1;
        /// Accesses are not coherent.
        const NON_COHERENT = 1 << 1;
        /// No 32-bit atomics.
        const NO_ATOMICS_32_BIT = 1 << 2;
        /// No 64-bit atomics.
        const NO_ATOMICS_64_BIT = 1 << 3;
        /// No peer-to-peer DMA.
        const NO_PEER_TO_PEER_DMA = 1 << 4;
    }
}

/// `KFD_CRAT_XGMI_WEIGHT`: weight of one hop.
const XGMI_WEIGHT: u32 = 15;
/// Weight of a PCIe link.
const PCIE_WEIGHT: u32 = 20;
/// Distance between two CPU nodes; the kernel has it from the firmware's table, 20 is the usual value of neighbours.
const CPU_WEIGHT: u32 = 20;

/// `HSA_IOLINK_TYPE_*`.
const TYPE_HYPERTRANSPORT: u32 = 1;
const TYPE_PCIEXPRESS: u32 = 2;
const TYPE_QPI_1_1: u32 = 5;
const TYPE_XGMI: u32 = 11;

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoLink {
    /// `HSA_IOLINK_TYPE_*`.
    pub kind: u32,
    /// Node at this end.
    pub node_from: u32,
    /// Node at the other end.
    pub node_to: u32,
    /// NUMA distance.
    pub weight: u32,
    /// Lowest bandwidth in MB/s.
    pub min_bandwidth: u32,
    /// Highest bandwidth in MB/s.
    pub max_bandwidth: u32,
    /// SDMA engines to prefer on this link.
    pub recommended_sdma_engines: u32,
    /// What it can do.
    pub flags: IoLinkFlags,
}

impl IoLink {
    /// The lines of the file in the kernel's order (`iolink_show`).
    pub fn lines(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("type", u64::from(self.kind)),
            ("version_major", 0),
            ("version_minor", 0),
            ("node_from", u64::from(self.node_from)),
            ("node_to", u64::from(self.node_to)),
            ("weight", u64::from(self.weight)),
            ("min_latency", 0),
            ("max_latency", 0),
            ("min_bandwidth", u64::from(self.min_bandwidth)),
            ("max_bandwidth", u64::from(self.max_bandwidth)),
            ("recommended_transfer_size", 0),
            ("recommended_sdma_engine_id_mask", u64::from(self.recommended_sdma_engines)),
            ("flags", u64::from(self.flags.bits())),
        ]
    }

    fn reversed(&self) -> Self {
        Self { node_from: self.node_to, node_to: self.node_from, ..*self }
    }
}

fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// `kfd_fill_iolink_info_for_cpu`: every CPU node to every other one.
pub(super) fn connect_cpus(nodes: &mut [Node], amd: bool) {
    let count = nodes.len();
    for (from, node) in nodes.iter_mut().enumerate() {
        for to in (0..count).filter(|to| *to != from) {
            node.io_links.push(IoLink {
                kind: if amd { TYPE_HYPERTRANSPORT } else { TYPE_QPI_1_1 },
                node_from: number(from),
                node_to: number(to),
                weight: CPU_WEIGHT,
                min_bandwidth: 0,
                max_bandwidth: 0,
                recommended_sdma_engines: 0,
                flags: IoLinkFlags::empty(),
            });
        }
    }
}

/// Connects the last node, which is GPU `index` of the profile, to the nodes before it.
pub(super) fn connect_gpu(nodes: &mut [Node], profile: &Profile, index: usize) {
    let Some((last, before)) = nodes.split_last_mut() else { return };
    let Some(gpu) = profile.gpu.get(index) else { return };
    let this = number(before.len());
    let engines = mask(0, gpu.engines.sdma);

    let cpu_link = to_cpu(gpu, this, engines);
    last.io_links.push(cpu_link);
    if let Some(cpu) = before.first_mut() {
        // The reverse direction exists when the CPU reaches all of the VRAM.
        if gpu.memory.large_bar() || gpu.cpu_link.kind == LinkKind::Xgmi {
            let mut reverse = IoLink { flags: IoLinkFlags::ENABLED, ..cpu_link.reversed() };
            if reverse.kind == TYPE_PCIEXPRESS {
                reverse.flags |= IoLinkFlags::NON_COHERENT;
            }
            cpu.io_links.push(reverse);
        }
        if gpu.cpu_link.kind == LinkKind::Xgmi {
            cpu.properties.hive_id = last.properties.hive_id;
        }
    }
    connect_hive(last, before, profile, index, this);
    connect_other_cpus(last, before, gpu, this);
    if profile.kernel.p2p {
        connect_peers(last, before, profile, gpu, this);
    }
}

fn mask(offset: u32, count: u32) -> u32 {
    let bits = 1u64.checked_shl(count).map_or(u64::MAX, |bit| bit - 1);
    u32::try_from(bits.checked_shl(offset).unwrap_or(0) & 0xffff_ffff).unwrap_or(0)
}

/// `kfd_fill_gpu_direct_io_link_to_cpu`; the GPU sits at the first CPU node.
fn to_cpu(gpu: &Gpu, this: u32, engines: u32) -> IoLink {
    let link = &gpu.cpu_link;
    let (kind, weight) = match link.kind {
        LinkKind::Pcie => (TYPE_PCIEXPRESS, PCIE_WEIGHT),
        LinkKind::Xgmi => (TYPE_XGMI, XGMI_WEIGHT),
    };
    let mut flags = IoLinkFlags::ENABLED;
    if link.kind == LinkKind::Pcie && !link.atomics {
        flags |= IoLinkFlags::NO_ATOMICS_32_BIT | IoLinkFlags::NO_ATOMICS_64_BIT;
    }
    IoLink {
        kind,
        node_from: this,
        node_to: 0,
        weight,
        min_bandwidth: link.min_bandwidth,
        max_bandwidth: link.max_bandwidth,
        recommended_sdma_engines: engines,
        flags,
    }
}

/// `kfd_fill_gpu_xgmi_link_to_gpu`: direct links to the GPUs of the same hive that came before.
fn connect_hive(last: &mut Node, before: &mut [Node], profile: &Profile, index: usize, this: u32) {
    let Some(gpu) = profile.gpu.get(index) else { return };
    for (peer, node) in before.iter_mut().enumerate() {
        let Some(peer_index) = node.gpu else { continue };
        let Some(peer_gpu) = profile.gpu.get(peer_index) else { continue };
        let found = profile
            .link
            .iter()
            .find(|link| link.gpus == [index, peer_index] || link.gpus == [peer_index, index]);
        let Some(link) = found else { continue };
        let engines = if gpu.engines.sdma_xgmi > 0 {
            mask(gpu.engines.sdma, gpu.engines.sdma_xgmi)
        } else {
            mask(0, gpu.engines.sdma)
        };
        let mut flags = IoLinkFlags::ENABLED;
        // Vega 20 is the one whose XGMI is not coherent.
        if peer_gpu.gc_version == [9, 4, 0] {
            flags |= IoLinkFlags::NON_COHERENT;
        }
        let outbound = IoLink {
            kind: TYPE_XGMI,
            node_from: this,
            node_to: number(peer),
            weight: XGMI_WEIGHT.saturating_mul(link.hops),
            min_bandwidth: link.min_bandwidth,
            max_bandwidth: link.max_bandwidth,
            recommended_sdma_engines: engines,
            flags,
        };
        last.io_links.push(outbound);
        node.io_links.push(outbound.reversed());
    }
}

/// `kfd_create_indirect_link_prop`: to the CPU nodes behind the one that the GPU sits at.
fn connect_other_cpus(last: &mut Node, before: &mut [Node], gpu: &Gpu, this: u32) {
    let Some(gpu_link) = last.io_links.first().copied() else { return };
    for (number_of, cpu) in before.iter_mut().enumerate().filter(|(_, node)| node.gpu.is_none()).skip(1) {
        let Some(cpu_link) = cpu.io_links.iter().find(|link| link.node_to == gpu_link.node_to) else {
            continue;
        };
        let indirect = IoLink {
            node_from: this,
            node_to: number(number_of),
            weight: gpu_link.weight.saturating_add(cpu_link.weight),
            min_bandwidth: gpu_link.min_bandwidth.min(cpu_link.min_bandwidth),
            max_bandwidth: gpu_link.max_bandwidth.min(cpu_link.max_bandwidth),
            recommended_sdma_engines: 0,
            ..gpu_link
        };
        last.p2p_links.push(indirect);
        if gpu.memory.large_bar() {
            let mut reverse = IoLink { flags: IoLinkFlags::ENABLED, ..indirect.reversed() };
            if reverse.kind == TYPE_PCIEXPRESS {
                reverse.flags |= IoLinkFlags::NON_COHERENT;
            }
            cpu.p2p_links.push(reverse);
        }
    }
}

/// `kfd_add_peer_prop`: GPUs that reach each other's VRAM over PCIe; a GPU is reachable when its BAR covers its VRAM
/// (`amdgpu_device_is_peer_accessible`).
fn connect_peers(last: &mut Node, before: &mut [Node], profile: &Profile, gpu: &Gpu, this: u32) {
    let Some(own) = last.io_links.first().copied() else { return };
    for (peer, node) in before.iter_mut().enumerate() {
        let Some(peer_gpu) = node.gpu.and_then(|index| profile.gpu.get(index)) else { continue };
        if gpu.hive_id != 0 && gpu.hive_id == peer_gpu.hive_id {
            continue;
        }
        let Some(theirs) = node.io_links.first().copied() else { continue };
        let both = IoLink {
            weight: own.weight.saturating_add(theirs.weight),
            min_bandwidth: own.min_bandwidth.min(theirs.min_bandwidth),
            max_bandwidth: own.max_bandwidth.min(theirs.max_bandwidth),
            recommended_sdma_engines: 0,
            flags: IoLinkFlags::ENABLED | IoLinkFlags::NON_COHERENT,
            ..own
        };
        if gpu.memory.large_bar() {
            node.p2p_links.push(IoLink { node_from: number(peer), node_to: this, ..both });
        }
        if peer_gpu.memory.large_bar() {
            last.p2p_links.push(IoLink { node_from: this, node_to: number(peer), ..both });
        }
    }
}
