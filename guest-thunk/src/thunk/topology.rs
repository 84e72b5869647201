//! The topology as the guest sees it: its own CPU nodes, then the host's GPU nodes (one snapshot at a time, as
//! `hsaKmtAcquireSystemProperties` takes it).

pub mod cpu;
pub mod gpu;
pub mod link;
mod marketing;
pub mod text;

use std::path::Path;

use hsakmt_abi::caller::{NodeExtras, NodeLink};
use hsakmt_abi::status::HsakmtStatus;
use hsakmt_abi::topology::{
    HsaCacheProperties, HsaHeapType, HsaMemoryProperties, HsaNodeProperties356, HsaSystemProperties,
};
use kfd_abi::drm::amdgpu::AMDGPU_INFO_DEV_INFO;
use virtio_kfd_protocol::calls::{AcquireVm, GetApertures, RenderInfo, SetMemoryPolicy};
use virtio_kfd_protocol::limits::MAX_GPUS;
use virtio_kfd_protocol::{
    Apertures, Features, GpuId, GpuRequest, GuestVa, Nothing, RenderInfoRequest, SetMemoryPolicyRequest,
};
use zerocopy::FromBytes;

pub use self::gpu::Device;
use self::gpu::HostGpu;
use self::text::Files;
use super::refusal::{Level, Outcome, Refusal, say};
use super::settings::Settings;
use crate::client::{Client, ClientError};

/// Huge page of GPU page tables: SVM apertures begin and end at a multiple of it.
const GPU_HUGE_PAGE: u64 = 2 << 20;

/// `KFD_IOC_CACHE_POLICY_COHERENT`, `KFD_IOC_CACHE_POLICY_NONCOHERENT` (kfd_ioctl.h)
use kfd_abi::memory::{
    KFD_IOC_CACHE_POLICY_COHERENT as COHERENT, KFD_IOC_CACHE_POLICY_NONCOHERENT as NONCOHERENT,
    MMIO_REMAP_SIZE,
};

/// A node.
#[derive(Clone, Debug, Default)]
pub struct Node {
    /// KFD's id of its GPU, 0 for a CPU node.
    pub gpu_id: u32,
    /// Version of its GPU as `0xMMmmss`, 0 for a CPU node.
    pub gfx: u32,
    /// Its properties; the memory banks that [`Snapshot::banks`] adds are not counted in.
    pub properties: HsaNodeProperties356,
    /// What later layouts have besides; nothing for a CPU node.
    pub extras: NodeExtras,
    /// Memory banks that the kernel lists.
    pub banks: Vec<HsaMemoryProperties>,
    /// Caches.
    pub caches: Vec<HsaCacheProperties>,
    /// Links to other nodes.
    pub links: Vec<NodeLink>,
}

/// A GPU of the snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    /// Its node.
    pub node: u32,
    /// KFD's id.
    pub gpu_id: GpuId,
    /// Where it sees LDS, scratch and memory.
    pub apertures: Apertures,
    /// What its render node says, if it does.
    pub device: Option<Device>,
    /// Address of its page of HDP flush registers, if it has one.
    pub hdp_registers: Option<u64>,
}

/// The topology at one time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The system.
    pub system: HsaSystemProperties,
    /// The nodes, CPUs first.
    pub nodes: Vec<Node>,
    /// The GPUs, in the order of their nodes.
    pub gpus: Vec<Gpu>,
    /// First and last address that all GPUs can reach; none without a GPU.
    pub svm: Option<(u64, u64)>,
}

impl Snapshot {
    /// Reads the topology and makes the GPUs ready for this process: their address spaces are acquired, their
    /// memory policy is set.
    pub fn take(client: &Client, settings: &Settings) -> Outcome<Snapshot> {
        let files = Files::new(client.topology()?);
        let mut nodes = cpu::nodes(Path::new("/"));
        let cpus = nodes.len();
        let hosts = gpu::list(&files);
        if hosts.len() > MAX_GPUS {
            return Err(Refusal::error(format!(
                "the host lists {} GPUs, at most {MAX_GPUS} are possible",
                hosts.len()
            )));
        }
        let (apertures, devices) = ask_gpus(client, &hosts)?;
        let mut gpus = Vec::with_capacity(hosts.len());
        for (host, device) in hosts.iter().zip(devices) {
            let mut node = gpu::node(&files, *host, device.as_ref(), settings)?;
            if !client.features().contains(Features::HOST_BLOBS) {
                hide_cpu_visibility(&mut node);
            }
            let gpu_id = GpuId(host.gpu_id);
            let apertures = apertures.iter().find(|apertures| apertures.gpu_id == gpu_id).copied();
            let missing =
                || Refusal::error(format!("the host gives no apertures for GPU {:#x}", host.gpu_id));
            gpus.push(Gpu {
                node: u32::try_from(nodes.len()).unwrap_or(u32::MAX),
                gpu_id,
                apertures: apertures.ok_or_else(missing)?,
                device,
                hdp_registers: None,
            });
            nodes.push(node);
        }
        link::connect(&mut nodes, cpus, &hosts, &files);
        let svm = svm_aperture(&gpus)?;
        acquire(client, &gpus, svm, settings)?;
        let file = files.properties("system_properties").unwrap_or_default();
        let system = HsaSystemProperties {
            num_nodes: u32::try_from(nodes.len()).unwrap_or(u32::MAX),
            platform_oem: file.word("platform_oem"),
            platform_id: file.word("platform_id"),
            platform_rev: file.word("platform_rev"),
        };
        say(Level::Info, || format!("topology: {cpus} CPU nodes, {} GPU nodes", gpus.len()));
        Ok(Snapshot { system, nodes, gpus, svm })
    }

    /// A node.
    pub fn node(&self, node: u32) -> Outcome<&Node> {
        let found = usize::try_from(node).ok().and_then(|index| self.nodes.get(index));
        found.ok_or_else(|| {
            let count = self.nodes.len();
            Refusal::new(
                HsakmtStatus::INVALID_NODE_UNIT,
                format!("NodeId is {node}, there are {count} nodes"),
            )
        })
    }

    /// The GPU of a node, none for a CPU node.
    pub fn gpu_of(&self, node: u32) -> Outcome<Option<&Gpu>> {
        self.node(node)?;
        Ok(self.gpus.iter().find(|gpu| gpu.node == node))
    }

    /// The GPU of a node that must have one.
    pub fn gpu(&self, node: u32) -> Outcome<&Gpu> {
        self.gpu_of(node)?
            .ok_or_else(|| Refusal::new(HsakmtStatus::INVALID_NODE_UNIT, format!("node {node} has no GPU")))
    }

    /// The node of a GPU.
    pub fn node_of(&self, gpu_id: GpuId) -> Outcome<u32> {
        let found = self.gpus.iter().find(|gpu| gpu.gpu_id == gpu_id).map(|gpu| gpu.node);
        found.ok_or_else(|| {
            Refusal::new(HsakmtStatus::INVALID_NODE_UNIT, format!("no node has the GPU {:#x}", gpu_id.0))
        })
    }

    /// The KFD ids of a list of nodes, 0 for CPU nodes.
    pub fn gpu_ids(&self, nodes: &[u32]) -> Outcome<Vec<GpuId>> {
        if nodes.is_empty() {
            return Err(Refusal::parameter("the list of nodes is empty"));
        }
        nodes.iter().map(|&node| Ok(GpuId(self.node(node)?.gpu_id))).collect()
    }

    /// All GPUs.
    pub fn all_gpus(&self) -> Vec<GpuId> {
        self.gpus.iter().map(|gpu| gpu.gpu_id).collect()
    }

    /// The GPUs that can reach the memory of a GPU: itself, and those with a link to it.
    pub fn peers(&self, gpu: &Gpu) -> Vec<GpuId> {
        let links_here = |other: &&Gpu| {
            other.node != gpu.node
                && self
                    .node(other.node)
                    .is_ok_and(|node| node.links.iter().any(|link| link.properties.node_to == gpu.node))
        };
        let others = self.gpus.iter().filter(links_here).map(|other| other.gpu_id);
        std::iter::once(gpu.gpu_id).chain(others).collect()
    }

    /// A node's properties with all its memory banks counted.
    pub fn properties(&self, node: u32) -> Outcome<HsaNodeProperties356> {
        let mut properties = self.node(node)?.properties;
        properties.num_memory_banks = u32::try_from(self.banks(node)?.len()).unwrap_or(u32::MAX);
        Ok(properties)
    }

    /// A node's memory banks: those that the kernel lists, and for a GPU its apertures for LDS and scratch, the
    /// addresses that it shares with the process, and its page of HDP flush registers, if there is one.
    pub fn banks(&self, node: u32) -> Outcome<Vec<HsaMemoryProperties>> {
        let entry = self.node(node)?;
        let mut banks = entry.banks.clone();
        if let Some(gpu) = self.gpu_of(node)? {
            let aperture = |heap_type, base: u64, size| HsaMemoryProperties {
                heap_type,
                size_in_bytes: size,
                virtual_base_address: base,
                ..Default::default()
            };
            let spans = |(base, limit): (u64, u64)| limit.saturating_sub(base).saturating_add(1);
            let Apertures { lds_base, scratch_base, scratch_limit, .. } = gpu.apertures;
            let lds = u64::from(entry.properties.lds_size_in_kb).saturating_mul(1024);
            banks.push(aperture(HsaHeapType::GPU_LDS, lds_base, lds));
            let scratch = spans((scratch_base, scratch_limit));
            banks.push(aperture(HsaHeapType::GPU_SCRATCH, scratch_base, scratch));
            if let Some(svm) = self.svm {
                banks.push(aperture(HsaHeapType::DEVICE_SVM, svm.0, spans(svm)));
            }
            if let Some(page) = gpu.hdp_registers {
                banks.push(aperture(HsaHeapType::MMIO_REMAP, page, MMIO_REMAP_SIZE));
            }
        }
        Ok(banks)
    }
}

/// Without a window the CPU cannot map VRAM, so all of it is private.
fn hide_cpu_visibility(node: &mut Node) {
    for bank in &mut node.banks {
        if bank.heap_type == HsaHeapType::FRAME_BUFFER_PUBLIC {
            bank.heap_type = HsaHeapType::FRAME_BUFFER_PRIVATE;
        }
    }
}

/// GPUs asked about in one frame: well below the requests that a frame can have.
const GPUS_PER_FRAME: usize = 16;

/// What the render nodes say, one entry for each GPU.
type Devices = Vec<Option<Device>>;

/// Apertures and render node information of all GPUs.
fn ask_gpus(client: &Client, hosts: &[HostGpu]) -> Outcome<(Vec<Apertures>, Devices)> {
    let (mut apertures, mut devices) = (Vec::new(), Vec::new());
    for (first, some) in [true].into_iter().chain(std::iter::repeat(false)).zip(hosts.chunks(GPUS_PER_FRAME))
    {
        let mut batch = client.batch();
        let asked = first.then(|| batch.push::<GetApertures>(&Nothing {}, &[], MAX_GPUS)).transpose()?;
        let size = size_of::<Device>();
        let mut tickets = Vec::with_capacity(some.len());
        for host in some {
            let request = RenderInfoRequest {
                gpu_id: GpuId(host.gpu_id),
                query: AMDGPU_INFO_DEV_INFO,
                return_size: u32::try_from(size).unwrap_or(u32::MAX),
                ..Default::default()
            };
            tickets.push(batch.push::<RenderInfo>(&request, &[], size)?);
        }
        let answers = batch.run()?;
        if let Some(ticket) = asked {
            apertures = answers.get(ticket)?.1;
        }
        devices.extend(tickets.into_iter().map(|ticket| device(answers.get(ticket))));
    }
    Ok((apertures, devices))
}

/// AMD's library goes on without what the render node says; so does this.
fn device(answer: Result<crate::client::Answer<RenderInfo>, ClientError>) -> Option<Device> {
    match answer {
        Ok((_, mut bytes)) => {
            // Older kernels have fewer fields.
            bytes.resize(bytes.len().max(size_of::<Device>()), 0);
            Device::read_from_prefix(&bytes).ok().map(|(device, _)| device)
        }
        Err(error) => {
            say(Level::Info, || format!("no device information from the render node: {error}"));
            None
        }
    }
}

/// What all GPUs can reach, in huge pages.
fn svm_aperture(gpus: &[Gpu]) -> Outcome<Option<(u64, u64)>> {
    let Some(base) = gpus.iter().map(|gpu| gpu.apertures.gpuvm_base).max() else { return Ok(None) };
    let limit = gpus.iter().map(|gpu| gpu.apertures.gpuvm_limit).min().unwrap_or(0);
    let base = base.checked_next_multiple_of(GPU_HUGE_PAGE);
    let end = limit.saturating_add(1) / GPU_HUGE_PAGE * GPU_HUGE_PAGE;
    match base {
        Some(base) if base < end => Ok(Some((base, end.saturating_sub(1)))),
        _ => Err(Refusal::error(format!(
            "the GPUs have no addresses in common: the lowest limit is {limit:#x}"
        ))),
    }
}

fn acquire(client: &Client, gpus: &[Gpu], svm: Option<(u64, u64)>, settings: &Settings) -> Outcome<()> {
    let (base, limit) = svm.unwrap_or_default();
    for some in gpus.chunks(GPUS_PER_FRAME) {
        let mut batch = client.batch();
        for gpu in some {
            batch.push::<AcquireVm>(&GpuRequest { gpu_id: gpu.gpu_id, pad: 0 }, &[], 0)?;
        }
        for gpu in some {
            let request = SetMemoryPolicyRequest {
                alternate_aperture_base: GuestVa(base),
                alternate_aperture_size: limit.saturating_sub(base).saturating_add(1),
                gpu_id: gpu.gpu_id,
                default_policy: if settings.disable_cache { COHERENT } else { NONCOHERENT },
                alternate_policy: COHERENT,
                pad: 0,
            };
            batch.push::<SetMemoryPolicy>(&request, &[], 0)?;
        }
        batch.run()?.check()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(node: u32, gpuvm_base: u64, gpuvm_limit: u64) -> Gpu {
        let apertures = Apertures {
            lds_base: 1 << 48,
            lds_limit: 1 << 48 | 0xffff_ffff,
            scratch_base: 2 << 48,
            scratch_limit: 2 << 48 | 0xffff_ffff,
            gpuvm_base,
            gpuvm_limit,
            gpu_id: GpuId(node),
            pad: 0,
        };
        Gpu { node, gpu_id: GpuId(node), apertures, device: None, hdp_registers: None }
    }

    #[test]
    fn the_svm_aperture_is_what_all_reach_in_huge_pages() {
        // gpuvm_base is 64 KiB from Linux 6.12 on (AMDGPU_VA_RESERVED_BOTTOM).
        let gpus = [gpu(1, 0x10000, (1 << 47) - 1), gpu(2, 0, (1 << 48) - 1)];
        assert_eq!(svm_aperture(&gpus), Ok(Some((0x20_0000, (1 << 47) - 1))));
        assert_eq!(svm_aperture(&[]), Ok(None));
        assert!(svm_aperture(&[gpu(1, 1 << 40, 1 << 20)]).is_err());
    }

    fn snapshot() -> Snapshot {
        let link = |node_to| NodeLink {
            properties: hsakmt_abi::topology::HsaIoLinkProperties { node_to, ..Default::default() },
            ..Default::default()
        };
        let mut nodes: Vec<Node> = (0..3)
            .map(|gpu_id| Node { gpu_id, banks: vec![Default::default()], ..Default::default() })
            .collect();
        nodes[1].properties.lds_size_in_kb = 64;
        nodes[2].links = vec![link(0), link(1)];
        let gpus = vec![gpu(1, 0, (1 << 47) - 1), gpu(2, 0, (1 << 47) - 1)];
        Snapshot { system: Default::default(), nodes, gpus, svm: Some((0, (1 << 47) - 1)) }
    }

    #[test]
    fn gpu_nodes_have_their_apertures_as_banks() {
        let snapshot = snapshot();
        assert_eq!(snapshot.banks(0).unwrap().len(), 1);
        let banks = snapshot.banks(1).unwrap();
        assert_eq!(banks.len(), 4);
        assert_eq!({ snapshot.properties(1).unwrap().num_memory_banks }, 4);
        assert_eq!(({ banks[1].heap_type }, { banks[1].size_in_bytes }), (HsaHeapType::GPU_LDS, 65536));
        assert_eq!(({ banks[2].heap_type }, { banks[2].size_in_bytes }), (HsaHeapType::GPU_SCRATCH, 1 << 32));
        assert_eq!(({ banks[3].heap_type }, { banks[3].size_in_bytes }), (HsaHeapType::DEVICE_SVM, 1 << 47));
    }

    #[test]
    fn peers_are_those_with_a_link_here() {
        let snapshot = snapshot();
        assert_eq!(snapshot.peers(&snapshot.gpus[0]), [GpuId(1), GpuId(2)]);
        assert_eq!(snapshot.peers(&snapshot.gpus[1]), [GpuId(2)]);
    }

    #[test]
    fn wrong_nodes() {
        let snapshot = snapshot();
        assert_eq!(snapshot.node(3).unwrap_err().status, HsakmtStatus::INVALID_NODE_UNIT);
        assert_eq!(snapshot.gpu(0).unwrap_err().status, HsakmtStatus::INVALID_NODE_UNIT);
        assert_eq!(snapshot.gpu_ids(&[]).unwrap_err().status, HsakmtStatus::INVALID_PARAMETER);
        assert_eq!(snapshot.gpu_ids(&[0, 2]).unwrap(), [GpuId(0), GpuId(2)]);
    }
}
