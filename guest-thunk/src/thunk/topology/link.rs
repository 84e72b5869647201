//! Links between the guest's CPU nodes and the host's GPU nodes.
//!
//! The host's CPU nodes are not the guest's. A GPU's best link to a CPU of the host becomes its link to the guest's
//! first CPU node, and reaches the guest's other CPU nodes over that one. Links between GPUs stay, if the VM was
//! given both.

use hsakmt_abi::caller::NodeLink;
use hsakmt_abi::topology::{HsaHeapType, HsaIoLinkProperties};

use super::Node;
use super::gpu::{HostGpu, HostLink};
use super::text::Files;

/// Whether a link leads to a CPU node of the host. The archive has no nodes but those of the VM's GPUs, and no links
/// to other GPUs, so what leads to none of them leads to a CPU.
fn is_cpu(gpus: &[HostGpu], link: &HostLink) -> bool {
    gpus.iter().all(|gpu| gpu.number != link.to)
}

/// A link that the guest sees between a GPU and another node.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The guest's node that it leads from.
    pub from: u32,
    /// The guest's node that it leads to.
    pub to: u32,
    /// Its weight.
    pub weight: u32,
    /// Index of the GPU whose link it is on the host.
    pub gpu: usize,
    /// That link.
    pub host: HostLink,
}

impl Route {
    /// It, as a node's link.
    fn link(&self) -> NodeLink {
        let Route { from, to, weight, host, .. } = *self;
        NodeLink {
            properties: HsaIoLinkProperties { node_from: from, node_to: to, weight, ..host.properties },
            recommended_engines: host.recommended_engines,
        }
    }
}

fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// The links of the GPUs, which stand behind the CPUs, in the order of `gpus`. `visible` tells whether the CPU can reach a
/// GPU's memory.
pub fn routes(
    cpu_nodes: &[Node],
    gpus: &[HostGpu],
    visible: impl Fn(usize) -> bool,
    files: &Files,
) -> Vec<Route> {
    let mut routes = Vec::new();
    let distances = distances(cpu_nodes);
    let node_of = |index: usize| number(cpu_nodes.len().saturating_add(index));
    for (index, gpu) in gpus.iter().enumerate() {
        let from = node_of(index);
        let links = super::gpu::links(files, *gpu);
        let direct = links.iter().filter(|link| is_cpu(gpus, link)).min_by_key(|link| link.properties.weight);
        if let Some(&host) = direct {
            for (cpu, distance) in (0u32..).zip(&distances) {
                let weight = host.properties.weight.saturating_add(*distance);
                routes.push(Route { from, to: cpu, weight, gpu: index, host });
                // The kernel has a link from a CPU to a GPU only where the CPU can reach the GPU's memory.
                if visible(index) {
                    routes.push(Route { from: cpu, to: from, weight, gpu: index, host });
                }
            }
        }
        let place = |link: &HostLink| gpus.iter().position(|other| other.number == link.to);
        for (&host, to) in links.iter().filter_map(|link| Some((link, place(link)?))) {
            routes.push(Route { from, to: node_of(to), weight: host.properties.weight, gpu: index, host });
        }
    }
    routes
}

/// Adds the links of the GPUs, which stand behind the CPUs in `nodes`, in the order of `gpus`.
pub fn connect(nodes: &mut [Node], cpus: usize, gpus: &[HostGpu], files: &Files) {
    let Some((cpu_nodes, gpu_nodes)) = nodes.split_at_checked(cpus) else { return };
    let is_public =
        |node: &Node| node.banks.iter().any(|bank| bank.heap_type == HsaHeapType::FRAME_BUFFER_PUBLIC);
    let visible = |index: usize| gpu_nodes.get(index).is_some_and(is_public);
    for route in routes(cpu_nodes, gpus, visible, files) {
        let from = usize::try_from(route.from).ok().and_then(|from| nodes.get_mut(from));
        if let Some(node) = from {
            node.links.push(route.link());
        }
    }
    for node in nodes {
        node.properties.num_io_links = number(node.links.len());
    }
}

/// How far each CPU node is from the first one, 0 for itself.
fn distances(cpu_nodes: &[Node]) -> Vec<u32> {
    let links = cpu_nodes.first().map_or(&[][..], |first| &first.links);
    let links = || links.iter().map(|link| link.properties);
    let distance = |to| links().find(|link| link.node_to == to).map_or(0, |link| link.weight);
    (0u32..).zip(cpu_nodes).map(|(to, _)| distance(to)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hsakmt_abi::topology::HsaMemoryProperties;
    use virtio_kfd_protocol::topology::TopologyFile;

    fn files(list: &[(&str, &str)]) -> Files {
        let file = |(path, text): &(&str, &str)| TopologyFile {
            path: (*path).into(),
            content: text.as_bytes().to_vec(),
        };
        Files::new(list.iter().map(file).collect())
    }

    fn cpu(links: &[(u32, u32, u32)]) -> Node {
        let link = |&(node_from, node_to, weight): &(u32, u32, u32)| NodeLink {
            properties: HsaIoLinkProperties { node_from, node_to, weight, ..Default::default() },
            ..Default::default()
        };
        Node { links: links.iter().map(link).collect(), ..Default::default() }
    }

    fn gpu(heap_type: HsaHeapType) -> Node {
        let bank = HsaMemoryProperties { heap_type, ..Default::default() };
        Node { gpu_id: 1, banks: vec![bank], ..Default::default() }
    }

    fn shape(node: &Node) -> Vec<(u32, u32, u32, u32)> {
        node.links
            .iter()
            .map(|link| link.properties)
            .map(|link| (link.node_from, link.node_to, link.weight, { link.io_link_type }.0))
            .collect()
    }

    /// Two sockets on the host, two GPUs at the second.
    const HOST: &[(&str, &str)] = &[
        ("nodes/3/gpu_id", "77\n"),
        ("nodes/3/io_links/0/properties", "type 2\nnode_from 3\nnode_to 0\nweight 52\n"),
        ("nodes/3/io_links/1/properties", "type 2\nnode_from 3\nnode_to 1\nweight 20\n"),
        ("nodes/4/gpu_id", "78\n"),
        (
            "nodes/4/io_links/0/properties",
            "type 2\nnode_from 4\nnode_to 1\nweight 20\nrecommended_sdma_engine_id_mask 3\n",
        ),
        (
            "nodes/4/p2p_links/0/properties",
            "type 11\nnode_from 4\nnode_to 3\nweight 15\nrecommended_sdma_engine_id_mask 252\n",
        ),
    ];

    #[test]
    fn the_best_cpu_link_leads_to_the_first_node() {
        let files = files(HOST);
        let gpus = super::super::gpu::list(&files);
        let mut nodes = [
            cpu(&[(0, 1, 32)]),
            cpu(&[(1, 0, 32)]),
            gpu(HsaHeapType::FRAME_BUFFER_PRIVATE),
            gpu(HsaHeapType::FRAME_BUFFER_PRIVATE),
        ];
        connect(&mut nodes, 2, &gpus, &files);
        assert_eq!(shape(&nodes[2]), [(2, 0, 20, 2), (2, 1, 52, 2)]);
        assert_eq!(shape(&nodes[3]), [(3, 0, 20, 2), (3, 1, 52, 2), (3, 2, 15, 11)]);
        assert_eq!(shape(&nodes[0]), [(0, 1, 32, 0)], "the CPU does not reach the GPU's memory");
        assert_eq!({ nodes[3].properties.num_io_links }, 3);
        // Kernels before 6.10 say nothing of engines, as the first GPU here.
        let engines =
            |node: &Node| node.links.iter().map(|link| link.recommended_engines).collect::<Vec<_>>();
        assert_eq!([engines(&nodes[2]), engines(&nodes[3])], [vec![0, 0], vec![3, 3, 252]]);
    }

    #[test]
    fn a_visible_gpu_has_a_link_from_the_cpu() {
        let files = files(&[
            ("nodes/1/gpu_id", "77\n"),
            ("nodes/1/io_links/0/properties", "type 2\nnode_from 1\nnode_to 0\nweight 20\n"),
        ]);
        let gpus = super::super::gpu::list(&files);
        let mut nodes = [cpu(&[]), gpu(HsaHeapType::FRAME_BUFFER_PUBLIC)];
        connect(&mut nodes, 1, &gpus, &files);
        assert_eq!(shape(&nodes[0]), [(0, 1, 20, 2)]);
        assert_eq!(shape(&nodes[1]), [(1, 0, 20, 2)]);
    }
}
