//! The guest's own CPU nodes: its NUMA nodes with CPUs, as the kernel's KFD would list them, from the guest's
//! sysfs and procfs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use hsakmt_abi::caller::{NodeExtras, NodeLink};
use hsakmt_abi::topology::{
    HSA_CPU_SIBLINGS, HSA_PUBLIC_NAME_SIZE, HsaCacheProperties, HsaCacheType, HsaHeapType,
    HsaIoLinkProperties, HsaIoLinkType, HsaMemoryProperties, HsaNodeProperties356,
};

use super::Node;
use super::text::number_list;

/// What `/proc/cpuinfo` says of a processor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Processor {
    apicid: u32,
    model_name: String,
    vendor: String,
}

/// A NUMA node with CPUs.
struct NumaNode {
    /// The kernel's number.
    number: u32,
    cpus: Vec<u32>,
    memory: u64,
    distances: Vec<u32>,
    directory: PathBuf,
}

/// The CPU nodes of the machine below `root` (`/` but in tests). The links are those between them.
pub fn nodes(root: &Path) -> Vec<Node> {
    let processors = processors(&read(&root.join("proc/cpuinfo")));
    let numa = numa_nodes(root);
    let clock = max_clock_mhz(root);
    let mut nodes = Vec::with_capacity(numa.len());
    for (index, node) in (0u32..).zip(&numa) {
        let first = node.cpus.iter().min().and_then(|cpu| processors.get(cpu)).cloned().unwrap_or_default();
        let caches = caches(node, &processors);
        let links = links(index, node, &numa, &first.vendor);
        let mut properties = HsaNodeProperties356 {
            num_cpu_cores: count(node.cpus.len()),
            num_memory_banks: 1,
            num_caches: count(caches.len()),
            num_io_links: count(links.len()),
            c_compute_id_lo: first.apicid,
            max_engine_clock_mhz_c_compute: clock,
            ..Default::default()
        };
        let (mut marketing, mut amd) = ([0; HSA_PUBLIC_NAME_SIZE], [0; HSA_PUBLIC_NAME_SIZE]);
        for ((wide, narrow), byte) in
            marketing.iter_mut().zip(&mut amd).zip(first.model_name.bytes().take(HSA_PUBLIC_NAME_SIZE - 1))
        {
            (*wide, *narrow) = (byte.into(), byte);
        }
        (properties.marketing_name, properties.amd_name) = (marketing, amd);
        let bank = HsaMemoryProperties {
            heap_type: HsaHeapType::SYSTEM,
            size_in_bytes: node.memory,
            ..Default::default()
        };
        nodes.push(Node {
            gpu_id: 0,
            gfx: 0,
            properties,
            extras: NodeExtras::default(),
            banks: vec![bank],
            caches,
            links,
        });
    }
    nodes
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// A file's text, empty where it cannot be read: the kernel leaves out what it does not know.
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn read_number(path: &Path) -> u32 {
    read(path).trim().parse().unwrap_or(0)
}

fn processors(cpuinfo: &str) -> BTreeMap<u32, Processor> {
    let mut processors = BTreeMap::new();
    let mut current = None;
    for line in cpuinfo.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        if name.trim() == "processor" {
            current = value.parse::<u32>().ok();
        }
        let Some(number) = current else { continue };
        let processor: &mut Processor = processors.entry(number).or_default();
        match name.trim() {
            "apicid" => processor.apicid = value.parse().unwrap_or(0),
            "model name" => processor.model_name = value.to_owned(),
            "vendor_id" => processor.vendor = value.to_owned(),
            _ => {}
        }
    }
    processors
}

/// The bytes behind `label` in a file of lines like `MemTotal: 16 kB`.
fn mem_total(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.split_once("MemTotal:"));
    let kib = line.and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

fn numa_nodes(root: &Path) -> Vec<NumaNode> {
    let base = root.join("sys/devices/system/node");
    let online = number_list(&read(&root.join("sys/devices/system/cpu/online")));
    let node = |number: u32| {
        let directory = base.join(format!("node{number}"));
        let mut cpus = number_list(&read(&directory.join("cpulist")));
        cpus.retain(|cpu| online.is_empty() || online.contains(cpu));
        let distances = read(&directory.join("distance"));
        let distances = distances.split_whitespace().filter_map(|text| text.parse().ok()).collect();
        let memory = mem_total(&read(&directory.join("meminfo")));
        NumaNode { number, cpus, memory, distances, directory }
    };
    let mut nodes: Vec<NumaNode> = number_list(&read(&base.join("online")))
        .into_iter()
        .map(node)
        .filter(|node| !node.cpus.is_empty())
        .collect();
    if nodes.is_empty() {
        // A kernel without CONFIG_NUMA.
        nodes.push(NumaNode {
            number: 0,
            cpus: if online.is_empty() { vec![0] } else { online },
            memory: mem_total(&read(&root.join("proc/meminfo"))),
            distances: vec![10],
            directory: root.join("sys/devices/system/cpu"),
        });
    }
    nodes
}

/// The kernel reports the limit that cpufreq has set for CPU 0; without cpufreq it reports 0.
fn max_clock_mhz(root: &Path) -> u32 {
    read_number(&root.join("sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq")) / 1000
}

/// Links to the other NUMA nodes, weighted by their distance (`kfd_fill_iolink_info_for_cpu` and
/// `kfd_parse_subtype_iolink` in kfd_crat.c).
fn links(from: u32, node: &NumaNode, all: &[NumaNode], vendor: &str) -> Vec<NodeLink> {
    let io_link_type =
        if vendor == "AuthenticAMD" { HsaIoLinkType::HYPERTRANSPORT } else { HsaIoLinkType::QPI_1_1 };
    let link = |(to, other): (u32, &NumaNode)| {
        // The columns of the distance table are the online nodes in order.
        let weight = usize::try_from(to).ok().and_then(|column| node.distances.get(column)).copied();
        (other.number != node.number).then(|| NodeLink {
            properties: HsaIoLinkProperties {
                io_link_type,
                node_from: from,
                node_to: to,
                weight: weight.unwrap_or(20),
                ..Default::default()
            },
            ..Default::default()
        })
    };
    (0u32..).zip(all).filter_map(link).collect()
}

/// The caches of a node's CPUs, each once, at the first CPU that shares it.
fn caches(node: &NumaNode, processors: &BTreeMap<u32, Processor>) -> Vec<HsaCacheProperties> {
    let mut caches = Vec::new();
    let apicid = |cpu: u32| processors.get(&cpu).map_or(0, |processor| processor.apicid);
    for &cpu in &node.cpus {
        for index in 0.. {
            let directory = node.directory.join(format!("cpu{cpu}/cache/index{index}"));
            if !directory.is_dir() {
                break;
            }
            let sharers = number_list(&read(&directory.join("shared_cpu_list")));
            if sharers.first() == Some(&cpu) {
                caches.push(cache(&directory, apicid(cpu), sharers.iter().map(|&sharer| apicid(sharer))));
            }
        }
    }
    caches
}

fn cache(directory: &Path, processor: u32, sharers: impl Iterator<Item = u32>) -> HsaCacheProperties {
    let number = |name| read_number(&directory.join(name));
    let (data, instruction) = match read(&directory.join("type")).trim() {
        "Data" => (1, 0),
        "Instruction" => (0, 1),
        "Unified" => (1, 1),
        _ => (0, 0),
    };
    let mut sibling_map = [0; HSA_CPU_SIBLINGS];
    for sharer in sharers {
        if let Some(entry) = usize::try_from(sharer).ok().and_then(|index| sibling_map.get_mut(index)) {
            *entry = 1;
        }
    }
    HsaCacheProperties {
        processor_id_low: processor,
        cache_level: number("level"),
        // In bytes, as AMD's library gives the caches of CPUs (those of GPUs are in KiB).
        cache_size: size(&read(&directory.join("size"))),
        cache_line_size: number("coherency_line_size"),
        cache_lines_per_tag: number("physical_line_partition"),
        cache_associativity: number("ways_of_associativity"),
        cache_latency: 0,
        cache_type: HsaCacheType(0)
            .with(HsaCacheType::DATA, data)
            .with(HsaCacheType::INSTRUCTION, instruction)
            .with(HsaCacheType::CPU, 1),
        sibling_map,
    }
}

/// Bytes of a size like `32K`.
fn size(text: &str) -> u32 {
    let text = text.trim();
    let (number, factor) = match text.char_indices().last() {
        Some((at, 'K')) => (text.get(..at), 1 << 10),
        Some((at, 'M')) => (text.get(..at), 1 << 20),
        Some((at, 'G')) => (text.get(..at), 1 << 30),
        _ => (Some(text), 1),
    };
    number.and_then(|number| number.parse::<u32>().ok()).and_then(|n| n.checked_mul(factor)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of files in a directory that is removed again.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("guest-thunk-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Tree(root)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const CPUINFO: &str = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: A CPU\napicid\t\t: 4\n\n\
                           processor\t: 1\nvendor_id\t: AuthenticAMD\nmodel name\t: A CPU\napicid\t\t: 5\n";

    #[test]
    fn two_nodes_with_a_shared_cache_and_links() {
        let base = "sys/devices/system/node";
        let cache =
            |node: u32, cpu: u32, file: &str| format!("{base}/node{node}/cpu{cpu}/cache/index0/{file}");
        let owned = [
            (cache(0, 0, "shared_cpu_list"), "0-1\n"),
            (cache(0, 0, "type"), "Unified\n"),
            (cache(0, 0, "level"), "2\n"),
            (cache(0, 0, "size"), "512K\n"),
            (cache(0, 1, "shared_cpu_list"), "0-1\n"),
        ];
        let mut files: Vec<(&str, &str)> = owned.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        files.extend([
            ("proc/cpuinfo", CPUINFO),
            ("sys/devices/system/cpu/online", "0-2\n"),
            ("sys/devices/system/node/online", "0-2\n"),
            ("sys/devices/system/node/node0/cpulist", "0-1\n"),
            ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       1024 kB\n"),
            ("sys/devices/system/node/node0/distance", "10 32 40\n"),
            // Memory without CPUs: the kernel's KFD does not list it.
            ("sys/devices/system/node/node2/cpulist", "\n"),
            ("sys/devices/system/node/node1/cpulist", "2\n"),
            ("sys/devices/system/node/node1/distance", "32 10 40\n"),
        ]);
        let tree = Tree::new("numa", &files);
        let nodes = nodes(&tree.0);
        assert_eq!(nodes.len(), 2);
        let node = &nodes[0];
        assert_eq!({ node.properties.num_cpu_cores }, 2);
        assert_eq!({ node.properties.c_compute_id_lo }, 4);
        assert_eq!({ node.properties.num_caches }, 1, "the second CPU shares the first one's");
        assert_eq!(node.properties.amd_name[..6], *b"A CPU\0");
        assert_eq!({ node.banks[0].size_in_bytes }, 1 << 20);
        let cache = &node.caches[0];
        assert_eq!(
            ({ cache.cache_size }, { cache.processor_id_low }, { cache.cache_type }.0),
            (512 << 10, 4, 7)
        );
        assert_eq!(cache.sibling_map[4..7], [1, 1, 0]);
        let link = &node.links[0].properties;
        assert_eq!((link.node_to, link.weight, link.io_link_type), (1, 32, HsaIoLinkType::HYPERTRANSPORT));
    }

    #[test]
    fn a_kernel_without_numa() {
        let tree = Tree::new(
            "flat",
            &[
                ("proc/cpuinfo", CPUINFO),
                ("proc/meminfo", "MemTotal:       2048 kB\nMemFree: 1 kB\n"),
                ("sys/devices/system/cpu/online", "0-1\n"),
            ],
        );
        let nodes = nodes(&tree.0);
        assert_eq!(nodes.len(), 1);
        assert_eq!({ nodes[0].properties.num_cpu_cores }, 2);
        assert_eq!({ nodes[0].banks[0].size_in_bytes }, 2 << 20);
        assert!(nodes[0].links.is_empty());
    }

    #[test]
    fn this_machine_has_cpus_and_memory() {
        let nodes = nodes(Path::new("/"));
        assert!({ nodes[0].properties.num_cpu_cores } > 0);
        assert!({ nodes[0].banks[0].size_in_bytes } > 0);
    }

    #[test]
    fn sizes() {
        assert_eq!(
            [size("32K\n"), size("4M"), size("1G"), size("12"), size("x"), size("9G")],
            [32 << 10, 4 << 20, 1 << 30, 12, 0, 0]
        );
    }
}
