//! The topology archive: what of the host's topology a VM sees. Its form stands at
//! [`virtio_kfd_protocol::topology`].

use std::collections::HashSet;

use kfd_host::topology::{GpuNode, Topology, node_of, property};
use virtio_kfd_protocol::topology::{ArchiveError, TopologyFile, pack};

/// `heap_type` of the frame buffer (`HSA_MEM_HEAP_TYPE_FB_PUBLIC`, `_PRIVATE`; kfd_crat.h).
const FRAME_BUFFER_HEAPS: [u64; 2] = [1, 2];

/// The packed archive.
#[derive(Debug)]
pub struct Archive {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The host's `generation_id`.
    pub generation: u64,
}

impl Archive {
    /// Packs what belongs to `gpus`, with VRAM shown as no larger than `vram_limit`.
    pub fn new(topology: &Topology, gpus: &[GpuNode], vram_limit: Option<u64>) -> Result<Self, ArchiveError> {
        let files: Vec<TopologyFile> = visible(topology, gpus)
            .map(|file| TopologyFile {
                path: file.path.clone(),
                content: limited(&file.path, &file.content, vram_limit),
            })
            .collect();
        Ok(Archive { bytes: pack(&files)?, generation: topology.generation })
    }
}

fn visible<'t>(
    topology: &'t Topology,
    gpus: &[GpuNode],
) -> impl Iterator<Item = &'t kfd_host::topology::TopologyFile> {
    let given: HashSet<u32> = gpus.iter().map(|gpu| gpu.node).collect();
    let withheld: HashSet<u32> = topology
        .nodes()
        .into_iter()
        .filter(|node| !given.contains(node) && !is_cpu(topology, *node))
        .collect();
    let cut: HashSet<String> = topology
        .files
        .iter()
        .filter(|file| leads_to(&file.path, &file.content).is_some_and(|node| withheld.contains(&node)))
        .filter_map(|file| file.path.rsplit_once('/').map(|(directory, _)| directory.to_owned()))
        .collect();
    topology.files.iter().filter(move |file| match node_of(&file.path) {
        None => matches!(file.path.as_str(), "generation_id" | "system_properties"),
        Some(node) => {
            let directory = file.path.rsplit_once('/').map_or("", |(directory, _)| directory);
            given.contains(&node) && !cut.contains(directory)
        }
    })
}

/// A node whose `gpu_id` reads 0; one that cannot be read is a GPU of which this process must know nothing.
fn is_cpu(topology: &Topology, node: u32) -> bool {
    let content = topology.file(&format!("nodes/{node}/gpu_id")).unwrap_or(&[]);
    String::from_utf8_lossy(content).trim() == "0"
}

/// The node that a link leads to.
fn leads_to(path: &str, content: &[u8]) -> Option<u32> {
    let parts: Vec<&str> = path.split('/').collect();
    match parts.as_slice() {
        ["nodes", _, "io_links" | "p2p_links", _, "properties"] => {
            property(content, "node_to").and_then(|node| u32::try_from(node).ok())
        }
        _ => None,
    }
}

/// The content of a file, with the size of a bank of VRAM bounded.
fn limited(path: &str, content: &[u8], vram_limit: Option<u64>) -> Vec<u8> {
    let parts: Vec<&str> = path.split('/').collect();
    let ["nodes", _, "mem_banks", _, "properties"] = parts.as_slice() else { return content.to_vec() };
    let (Some(limit), Some(heap)) = (vram_limit, property(content, "heap_type")) else {
        return content.to_vec();
    };
    let larger = property(content, "size_in_bytes").is_some_and(|size| size > limit);
    if !FRAME_BUFFER_HEAPS.contains(&heap) || !larger {
        return content.to_vec();
    }
    let text = String::from_utf8_lossy(content);
    let lines = text.lines().map(|line| match line.split_once(' ') {
        Some(("size_in_bytes", _)) => format!("size_in_bytes {limit}\n"),
        _ => format!("{line}\n"),
    });
    lines.collect::<String>().into_bytes()
}

#[cfg(test)]
mod tests {
    use virtio_kfd_protocol::topology::unpack;

    use super::*;

    fn host() -> Topology {
        let mut files = vec![
            ("generation_id", "2\n".to_string()),
            ("system_properties", "platform_oem 0\n".to_string()),
            ("nodes/0/gpu_id", "0\n".to_string()),
            ("nodes/0/io_links/0/properties", "node_from 0\nnode_to 1\n".to_string()),
        ];
        for node in ["1", "2"] {
            let other = if node == "1" { 2 } else { 1 };
            files.extend([
                (format!("nodes/{node}/gpu_id").leak() as &str, format!("{node}000\n")),
                (format!("nodes/{node}/properties").leak(), "io_links_count 2\n".into()),
                (
                    format!("nodes/{node}/io_links/0/properties").leak(),
                    format!("node_from {node}\nnode_to 0\n"),
                ),
                (
                    format!("nodes/{node}/io_links/1/properties").leak(),
                    format!("node_from {node}\nnode_to {other}\n"),
                ),
                (
                    format!("nodes/{node}/p2p_links/0/properties").leak(),
                    format!("node_from {node}\nnode_to {other}\n"),
                ),
                (
                    format!("nodes/{node}/mem_banks/0/properties").leak(),
                    "heap_type 1\nsize_in_bytes 17163091968\nflags 0\n".into(),
                ),
            ]);
        }
        let file = |(path, content): (&str, String)| kfd_host::topology::TopologyFile {
            path: path.into(),
            content: content.into_bytes(),
        };
        Topology { generation: 2, files: files.into_iter().map(file).collect() }
    }

    fn gpu(node: u32) -> GpuNode {
        GpuNode { node, gpu_id: node * 1000, ..Default::default() }
    }

    fn archive(gpus: &[GpuNode], limit: Option<u64>) -> Vec<(String, String)> {
        let archive = Archive::new(&host(), gpus, limit).unwrap();
        assert_eq!(archive.generation, 2);
        let text = |file: TopologyFile| (file.path, String::from_utf8(file.content).unwrap());
        unpack(&archive.bytes).unwrap().into_iter().map(text).collect()
    }

    #[test]
    fn one_gpu_of_two_shows_no_trace_of_the_other() {
        let files = archive(&[gpu(2)], None);
        let paths: Vec<&str> = files.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "generation_id",
                "system_properties",
                "nodes/2/gpu_id",
                "nodes/2/properties",
                "nodes/2/io_links/0/properties",
                "nodes/2/mem_banks/0/properties"
            ]
        );
        assert!(files.iter().all(|(_, content)| !content.contains("node_to 1")));
    }

    #[test]
    fn links_between_given_gpus_and_to_the_cpu_stay() {
        let files = archive(&[gpu(1), gpu(2)], None);
        let links: Vec<&str> =
            files.iter().map(|(path, _)| path.as_str()).filter(|path| path.contains("links/")).collect();
        assert_eq!(
            links,
            [
                "nodes/1/io_links/0/properties",
                "nodes/1/io_links/1/properties",
                "nodes/1/p2p_links/0/properties",
                "nodes/2/io_links/0/properties",
                "nodes/2/io_links/1/properties",
                "nodes/2/p2p_links/0/properties"
            ]
        );
    }

    #[test]
    fn without_gpus_only_the_machine_is_there() {
        let files = archive(&[], None);
        assert_eq!(files.len(), 2, "{files:?}");
    }

    #[test]
    fn vram_is_shown_as_what_may_be_used() {
        let bank = |limit| archive(&[gpu(1)], limit).pop().unwrap().1;
        assert_eq!(bank(Some(1 << 30)), "heap_type 1\nsize_in_bytes 1073741824\nflags 0\n");
        assert_eq!(bank(Some(1 << 40)), "heap_type 1\nsize_in_bytes 17163091968\nflags 0\n");
        assert_eq!(bank(None), "heap_type 1\nsize_in_bytes 17163091968\nflags 0\n");
    }
}
