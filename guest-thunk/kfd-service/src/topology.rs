//! The topology files as the guest shall see them: its own CPU nodes, then the host's GPU nodes, as the kernel writes them.
//!
//! What the host's kernel wrote about a GPU is passed on line by line, so that a line that is not known here reaches the
//! runtime as well. What is rewritten: counts and ends of links, the render minor (one that the guest has not got), the
//! capabilities for shared virtual memory and, with old hosts, for debugging, and the kind of VRAM where the guest has no
//! window for it.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::path::Path;

use guest_thunk::client::{Client, ClientError};
use guest_thunk::thunk::topology::gpu::{self, HostGpu};
use guest_thunk::thunk::topology::link::{Route, routes};
use guest_thunk::thunk::topology::text::Files;
use guest_thunk::thunk::topology::{Device, Node, cpu};
use kfd_abi::drm::amdgpu::AMDGPU_INFO_DEV_INFO;
use kfd_seam::DeviceId;
use kfd_seam::sysfs::{self, FIRST_RENDER_MINOR, KFD, PciFunction};
use kfd_seam::tree::Tree;
use virtio_kfd_protocol::calls::RenderInfo;
use virtio_kfd_protocol::limits::MAX_GPUS;
use virtio_kfd_protocol::{Features, GpuId, RenderInfoRequest};
use zerocopy::FromBytes;

use crate::KFD_DEVICE;

/// `HSA_CAP_SVMAPI_SUPPORTED` (kfd_sysfs.h): SVM ties GPU addresses to the CPU addresses of the process that owns the KFD
/// process, which is the host's.
const CAP_SVM: u64 = 0x0800_0000;

/// `HSA_CAP_TRAP_DEBUG_FIRMWARE_SUPPORTED`: only where the host can enable a runtime ([`Features::EXCEPTIONS`]). With the bit a
/// runtime takes a refused RUNTIME_ENABLE for a broken driver, without it for one that cannot.
const CAP_DEBUG: u64 = 0x2000_0000;

/// `HSA_MEM_HEAP_TYPE_FB_PUBLIC`, `HSA_MEM_HEAP_TYPE_FB_PRIVATE` (kfd_crat.h).
const HEAP_PUBLIC: u64 = 1;
const HEAP_PRIVATE: u64 = 2;

/// Render minors (drm_drv.c: 64 for each kind of node).
const RENDER_MINORS: u32 = 64;

/// A GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// KFD's id.
    pub gpu_id: GpuId,
    /// Its render node's minor number in the guest.
    pub minor: u32,
}

/// Why the topology cannot be shown.
#[derive(Debug)]
pub enum TopologyError {
    /// It cannot be read.
    Read(ClientError),
    /// There are more GPUs than there can be.
    Gpus(usize),
    /// The guest has no render minor left.
    Minors,
}

impl fmt::Display for TopologyError {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TopologyError::Read(error) => write!(to, "{error}"),
            TopologyError::Gpus(count) => write!(to, "{count} GPUs, at most {MAX_GPUS} are possible"),
            TopologyError::Minors => write!(to, "the guest has no free render minor"),
        }
    }
}

impl Error for TopologyError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            TopologyError::Read(error) => Some(error),
            TopologyError::Gpus(_) | TopologyError::Minors => None,
        }
    }
}

/// Reads it.
///
/// # Errors
/// See [`TopologyError`].
pub fn read(client: &Client) -> Result<(Tree, Vec<Gpu>), TopologyError> {
    let files = Files::new(client.topology().map_err(TopologyError::Read)?);
    let hosts = gpu::list(&files);
    if hosts.len() > MAX_GPUS {
        return Err(TopologyError::Gpus(hosts.len()));
    }
    let taken = render_minors();
    let free = (FIRST_RENDER_MINOR..FIRST_RENDER_MINOR.saturating_add(RENDER_MINORS))
        .filter(|minor| !taken.contains(minor));
    let gpus: Vec<Gpu> =
        hosts.iter().zip(free).map(|(host, minor)| Gpu { gpu_id: GpuId(host.gpu_id), minor }).collect();
    if gpus.len() < hosts.len() {
        return Err(TopologyError::Minors);
    }
    let window = client.features().contains(Features::HOST_BLOBS);
    let hidden = match client.features().contains(Features::EXCEPTIONS) {
        true => CAP_SVM,
        false => CAP_SVM | CAP_DEBUG,
    };
    let cpus = cpu::nodes(Path::new("/"));
    let view = View { files: &files, hosts: &hosts, gpus: &gpus, cpus, window, hidden };
    let mut tree = Tree::default();
    sysfs::kfd_device(&mut tree, KFD_DEVICE);
    sysfs::module(&mut tree);
    view.write(&mut tree);
    for (index, (host, gpu)) in (1u32..).zip(hosts.iter().zip(&gpus)) {
        let function = view.function(host, device(client, gpu.gpu_id));
        sysfs::render_node(&mut tree, &function, DeviceId(index), gpu.minor);
    }
    Ok((tree, gpus))
}

/// The minors of the guest's own render nodes.
fn render_minors() -> BTreeSet<u32> {
    let nodes = std::fs::read_dir("/dev/dri").into_iter().flatten().flatten();
    nodes.filter_map(|node| node.file_name().to_str()?.strip_prefix("renderD")?.parse().ok()).collect()
}

/// What the render node says of the device. The files go without what is not known.
fn device(client: &Client, gpu_id: GpuId) -> Device {
    let size = size_of::<Device>();
    let return_size = u32::try_from(size).unwrap_or(u32::MAX);
    let request =
        RenderInfoRequest { gpu_id, query: AMDGPU_INFO_DEV_INFO, return_size, ..Default::default() };
    let mut bytes =
        client.call::<RenderInfo>(&request, &[], size).map(|(_, bytes)| bytes).unwrap_or_default();
    bytes.resize(bytes.len().max(size), 0);
    Device::read_from_prefix(&bytes).map(|(device, _)| device).unwrap_or_default()
}

/// What the files are made of.
struct View<'a> {
    files: &'a Files,
    hosts: &'a [HostGpu],
    gpus: &'a [Gpu],
    cpus: Vec<Node>,
    /// Whether the CPU can map VRAM.
    window: bool,
    /// Capabilities that GPUs have on the host, and not here.
    hidden: u64,
}

/// Lines of a file, some with another number.
fn rewrite(text: &str, change: impl Fn(&str, u64) -> Option<u64>) -> String {
    let line = |line: &str| {
        let changed = line.split_once(' ').and_then(|(name, value)| {
            let value = value.trim().parse().ok()?;
            Some(format!("{name} {}\n", change(name, value)?))
        });
        changed.unwrap_or_else(|| format!("{line}\n"))
    };
    text.lines().map(line).collect()
}

fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

impl View<'_> {
    fn write(&self, tree: &mut Tree) {
        let base = format!("{KFD}/topology");
        for file in ["generation_id", "system_properties"] {
            tree.file(&format!("{base}/{file}"), self.files.text(file).unwrap_or_default());
        }
        let visible =
            |index: usize| self.window && self.hosts.get(index).is_some_and(|host| self.is_public(host));
        let routes = routes(&self.cpus, self.hosts, visible, self.files);
        for (number, node) in (0u32..).zip(&self.cpus) {
            self.cpu_node(tree, &format!("{base}/nodes/{number}"), number, node, &routes);
        }
        let first = u32::try_from(self.cpus.len()).unwrap_or(u32::MAX);
        for (number, (host, gpu)) in (first..).zip(self.hosts.iter().zip(self.gpus)) {
            self.gpu_node(tree, &format!("{base}/nodes/{number}"), number, host, gpu, &routes);
        }
    }

    fn banks(&self, host: &HostGpu) -> Vec<(u32, &str)> {
        let directory = format!("nodes/{}/mem_banks", host.number);
        let numbers = self.files.numbered(&directory).into_iter();
        let bank = |number| Some((number, self.files.text(&format!("{directory}/{number}/properties"))?));
        numbers.filter_map(bank).collect()
    }

    /// Whether the host's CPU can map a GPU's VRAM.
    fn is_public(&self, host: &HostGpu) -> bool {
        let is = |(_, text): (u32, &str)| text.lines().any(|line| line == format!("heap_type {HEAP_PUBLIC}"));
        self.banks(host).into_iter().any(is)
    }

    /// A link's file. Those to and from CPUs have the host's GPU's numbers as well.
    fn link(&self, route: &Route) -> String {
        let number = self.hosts.get(route.gpu).map_or(0, |host| host.number);
        let path = format!("nodes/{number}/{}/{}/properties", route.host.kind, route.host.number);
        rewrite(self.files.text(&path).unwrap_or_default(), |name, _| match name {
            "node_from" => Some(route.from.into()),
            "node_to" => Some(route.to.into()),
            "weight" => Some(route.weight.into()),
            _ => None,
        })
    }

    /// Writes the links of a node, and how many of each kind there are.
    fn links(&self, tree: &mut Tree, base: &str, own: &[String], node: u32, routes: &[Route]) -> (u64, u64) {
        let of_kind = |kind: &'static str| {
            routes.iter().filter(move |route| route.from == node && route.host.kind == kind)
        };
        let direct = own.iter().cloned().chain(of_kind("io_links").map(|route| self.link(route)));
        let peers = of_kind("p2p_links").map(|route| self.link(route));
        let mut put = |kind: &str, links: &mut dyn Iterator<Item = String>| {
            let mut number = 0u64;
            for text in links {
                tree.file(&format!("{base}/{kind}/{number}/properties"), text);
                number = number.saturating_add(1);
            }
            number
        };
        (put("io_links", &mut { direct }), put("p2p_links", &mut { peers }))
    }

    fn cpu_node(&self, tree: &mut Tree, base: &str, number: u32, node: &Node, routes: &[Route]) {
        sysfs::node_directories(tree, base);
        tree.file(&format!("{base}/gpu_id"), "0\n");
        tree.file(&format!("{base}/name"), "\n");
        for (index, bank) in node.banks.iter().enumerate() {
            let lines = [
                ("heap_type", u64::from({ bank.heap_type }.0)),
                ("size_in_bytes", bank.size_in_bytes),
                ("flags", 0),
                ("width", bank.width.into()),
                ("mem_clk_max", bank.memory_clock_max.into()),
            ];
            tree.file(&format!("{base}/mem_banks/{index}/properties"), sysfs::properties(&lines));
        }
        let own: Vec<String> = node.links.iter().map(cpu_link).collect();
        let (io_links, p2p_links) = self.links(tree, base, &own, number, routes);
        let properties = &node.properties;
        // The kernel lists no caches of CPUs.
        let mut lines = vec![
            ("cpu_cores_count", u64::from(properties.num_cpu_cores)),
            ("simd_count", 0),
            ("mem_banks_count", count(node.banks.len())),
            ("caches_count", 0),
            ("io_links_count", io_links),
            ("p2p_links_count", p2p_links),
            ("cpu_core_id_base", properties.c_compute_id_lo.into()),
        ];
        lines.extend(ZERO_ON_CPUS.iter().map(|name| (*name, 0)));
        lines.push(("max_engine_clk_ccompute", properties.max_engine_clock_mhz_c_compute.into()));
        tree.file(&format!("{base}/properties"), sysfs::properties(&lines));
    }

    fn gpu_node(
        &self,
        tree: &mut Tree,
        base: &str,
        number: u32,
        host: &HostGpu,
        gpu: &Gpu,
        routes: &[Route],
    ) {
        sysfs::node_directories(tree, base);
        let source = format!("nodes/{}", host.number);
        for file in ["gpu_id", "name"] {
            tree.file(
                &format!("{base}/{file}"),
                self.files.text(&format!("{source}/{file}")).unwrap_or_default(),
            );
        }
        for (index, (_, text)) in self.banks(host).into_iter().enumerate() {
            let text = rewrite(text, |name, value| {
                (name == "heap_type" && value == HEAP_PUBLIC && !self.window).then_some(HEAP_PRIVATE)
            });
            tree.file(&format!("{base}/mem_banks/{index}/properties"), text);
        }
        for (index, cache) in self.files.numbered(&format!("{source}/caches")).into_iter().enumerate() {
            let text = self.files.text(&format!("{source}/caches/{cache}/properties")).unwrap_or_default();
            tree.file(&format!("{base}/caches/{index}/properties"), text);
        }
        let (io_links, p2p_links) = self.links(tree, base, &[], number, routes);
        let text = self.files.text(&format!("{source}/properties")).unwrap_or_default();
        let text = rewrite(text, |name, value| match name {
            // The CPUs are the guest's own, in nodes of their own, whatever this node is on the host.
            "cpu_cores_count" | "cpu_core_id_base" => Some(0),
            "io_links_count" => Some(io_links),
            "p2p_links_count" => Some(p2p_links),
            "drm_render_minor" => Some(gpu.minor.into()),
            "capability" => Some(value & !self.hidden),
            _ => None,
        });
        tree.file(&format!("{base}/properties"), text);
    }

    /// A GPU's PCI function, as far as the host tells: not its subsystem.
    fn function(&self, host: &HostGpu, device: Device) -> PciFunction {
        let file = self.files.properties(&format!("nodes/{}/properties", host.number)).unwrap_or_default();
        let [devfn, bus, ..] = file.word("location_id").to_le_bytes();
        let [revision, ..] = device.pci_rev.to_le_bytes();
        let low = |value: u32| u16::try_from(value & 0xffff).unwrap_or(0);
        let banks = self.banks(host);
        let size =
            |text: &str| guest_thunk::thunk::topology::text::Properties::parse(text).long("size_in_bytes");
        let vram: u64 = banks.iter().fold(0, |sum: u64, (_, text)| sum.saturating_add(size(text)));
        PciFunction {
            domain: low(file.word("domain")),
            bus,
            device: devfn >> 3,
            function: devfn & 7,
            vendor: low(file.word("vendor_id")),
            device_id: low(file.word("device_id")),
            revision,
            subsystem_vendor: 0,
            subsystem_device: 0,
            vram,
            visible_vram: if self.window && self.is_public(host) { vram } else { 0 },
            unique_id: file.long("unique_id"),
        }
    }
}

/// A link between CPUs.
fn cpu_link(link: &hsakmt_abi::caller::NodeLink) -> String {
    let link = &link.properties;
    sysfs::properties(&[
        ("type", u64::from({ link.io_link_type }.0)),
        ("version_major", 0),
        ("version_minor", 0),
        ("node_from", link.node_from.into()),
        ("node_to", link.node_to.into()),
        ("weight", link.weight.into()),
        ("min_latency", 0),
        ("max_latency", 0),
        ("min_bandwidth", 0),
        ("max_bandwidth", 0),
        ("recommended_transfer_size", 0),
        ("recommended_sdma_engine_id_mask", 0),
        ("flags", u64::from({ link.flags }.0)),
    ])
}

/// Properties of GPUs, which the kernel writes for CPUs as well, in its order (`node_show`).
const ZERO_ON_CPUS: &[&str] = &[
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
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_not_known_pass() {
        let text = "io_links_count 3\ncapability 671588992\nnew_thing 7\nodd\n";
        let changed = rewrite(text, |name, value| match name {
            "io_links_count" => Some(1),
            "capability" => Some(value | CAP_SVM),
            _ => None,
        });
        assert_eq!(
            changed,
            format!("io_links_count 1\ncapability {}\nnew_thing 7\nodd\n", 671588992u64 | CAP_SVM)
        );
    }
}
