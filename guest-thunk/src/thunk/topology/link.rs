//! Links between the guest's CPU nodes and the host's GPU nodes.
//!
//! The host's CPU nodes are not the guest's. A GPU's best link to a CPU of the host becomes its link to the guest's
//! first CPU node, and reaches the guest's other CPU nodes over that one. Links between GPUs stay, if the VM was
//! given both.

use hsakmt_abi::topology::{HsaHeapType, HsaIoLinkProperties};

use super::Node;
use super::gpu::{HostGpu, HostLink};
use super::text::Files;

/// Whether a link leads to a CPU node of the host. The archive has no nodes but those of the VM's GPUs, and no links
/// to other GPUs, so what leads to none of them leads to a CPU.
fn is_cpu(gpus: &[HostGpu], link: &HostLink) -> bool {
    gpus.iter().all(|gpu| gpu.number != link.to)
}

/// Adds the links of the GPUs, which stand behind the CPUs in `nodes`, in the order of `gpus`.
pub fn connect(nodes: &mut [Node], cpus: usize, gpus: &[HostGpu], files: &Files) {
    let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
    let Some((cpu_nodes, gpu_nodes)) = nodes.split_at_mut_checked(cpus) else { return };
    for ((index, node), gpu) in gpu_nodes.iter_mut().enumerate().zip(gpus) {
        let from = number(cpus.saturating_add(index));
        let host = super::gpu::links(files, *gpu);
        let direct = host.iter().filter(|link| is_cpu(gpus, link)).min_by_key(|link| link.properties.weight);
        if let Some(direct) = direct {
            let visible = node.banks.iter().any(|bank| bank.heap_type == HsaHeapType::FRAME_BUFFER_PUBLIC);
            let distances: Vec<u32> = distances(cpu_nodes);
            for ((cpu, cpu_node), distance) in (0u32..).zip(&mut *cpu_nodes).zip(distances) {
                let there = HsaIoLinkProperties {
                    node_from: from,
                    node_to: cpu,
                    weight: direct.properties.weight.saturating_add(distance),
                    ..direct.properties
                };
                node.links.push(there);
                // The kernel has a link from a CPU to a GPU only where the CPU can reach the GPU's memory.
                if visible {
                    cpu_node.links.push(HsaIoLinkProperties { node_from: cpu, node_to: from, ..there });
                }
            }
        }
        let place = |link: &HostLink| gpus.iter().position(|other| other.number == link.to);
        for (link, to) in host.iter().filter_map(|link| Some((link, place(link)?))) {
            let node_to = number(cpus.saturating_add(to));
            node.links.push(HsaIoLinkProperties { node_from: from, node_to, ..link.properties });
        }
    }
    for node in nodes {
        node.properties.num_io_links = number(node.links.len());
    }
}

/// How far each CPU node is from the first one, 0 for itself.
fn distances(cpu_nodes: &[Node]) -> Vec<u32> {
    let links = cpu_nodes.first().map_or(&[][..], |first| &first.links);
    let distance = |to| links.iter().find(|link| link.node_to == to).map_or(0, |link| link.weight);
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
        let link = |&(node_from, node_to, weight): &(u32, u32, u32)| HsaIoLinkProperties {
            node_from,
            node_to,
            weight,
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
            .map(|link| (link.node_from, link.node_to, link.weight, { link.io_link_type }.0))
            .collect()
    }

    /// Two sockets on the host, two GPUs at the second.
    const HOST: &[(&str, &str)] = &[
        ("nodes/3/gpu_id", "77\n"),
        ("nodes/3/io_links/0/properties", "type 2\nnode_from 3\nnode_to 0\nweight 52\n"),
        ("nodes/3/io_links/1/properties", "type 2\nnode_from 3\nnode_to 1\nweight 20\n"),
        ("nodes/4/gpu_id", "78\n"),
        ("nodes/4/io_links/0/properties", "type 2\nnode_from 4\nnode_to 1\nweight 20\n"),
        ("nodes/4/p2p_links/0/properties", "type 11\nnode_from 4\nnode_to 3\nweight 15\n"),
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
