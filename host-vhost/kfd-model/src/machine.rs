//! The CPU side of the topology: what the running machine has.

use std::fs;
use std::path::Path;

/// One NUMA node with CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuNode {
    /// Logical CPUs.
    pub cpus: u32,
    /// APIC id of the first CPU.
    pub first_apic_id: u32,
    /// Memory in bytes that the kernel manages on this node.
    pub memory_bytes: u64,
}

/// What the kernel knows of the machine when it builds the CPU part of the topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// NUMA nodes with CPUs, at least one.
    pub nodes: Vec<CpuNode>,
    /// Highest clock of CPU 0 in MHz as cpufreq has it (`cpufreq_quick_get_max`), 0 without cpufreq.
    pub max_clock_mhz: u32,
    /// The CPUs are AMD's (decides the type of the links between CPU nodes).
    pub amd: bool,
}

impl Machine {
    /// Reads the running machine. What cannot be read is replaced by the smallest truth (one node, one CPU).
    pub fn running() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let mut nodes = numa_nodes(Path::new("/sys/devices/system/node"), &cpuinfo);
        if nodes.is_empty() {
            let cpus = std::thread::available_parallelism().map_or(1, |count| count.get());
            let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
            nodes.push(CpuNode {
                cpus: u32::try_from(cpus).unwrap_or(1),
                first_apic_id: 0,
                memory_bytes: mem_total(&memory).unwrap_or(1 << 30),
            });
        }
        let clock = fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq")
            .ok()
            .and_then(|text| text.trim().parse::<u32>().ok());
        Self {
            nodes,
            max_clock_mhz: clock.map_or(0, |khz| khz / 1000),
            amd: cpuinfo.contains("AuthenticAMD"),
        }
    }

    /// Memory of all nodes in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.nodes.iter().fold(0u64, |sum, node| sum.saturating_add(node.memory_bytes))
    }
}

fn numa_nodes(directory: &Path, cpuinfo: &str) -> Vec<CpuNode> {
    let mut numbers: Vec<u32> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok())
        .collect();
    numbers.sort_unstable();
    let mut nodes = Vec::new();
    for number in numbers {
        let node = directory.join(format!("node{number}"));
        let list = fs::read_to_string(node.join("cpulist")).unwrap_or_default();
        let cpus = cpu_list(list.trim());
        // `kfd_create_vcrat_image_cpu` skips nodes without CPUs.
        let Some(first) = cpus.first() else { continue };
        let memory = fs::read_to_string(node.join("meminfo")).unwrap_or_default();
        nodes.push(CpuNode {
            cpus: u32::try_from(cpus.len()).unwrap_or(1),
            first_apic_id: apic_id(cpuinfo, *first).unwrap_or(*first),
            memory_bytes: mem_total(&memory).unwrap_or(0),
        });
    }
    nodes
}

/// Expands a list such as `0-3,8`.
fn cpu_list(text: &str) -> Vec<u32> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else { continue };
        // 8192 is the kernel's highest NR_CPUS.
        cpus.extend((first..=last).take(8192));
    }
    cpus
}

/// Finds `MemTotal` in the text of `/proc/meminfo` or of a node's `meminfo`, in bytes.
fn mem_total(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("MemTotal:"))?;
    let (_, value) = line.split_once("MemTotal:")?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Finds the APIC id of a logical CPU in the text of `/proc/cpuinfo`.
fn apic_id(cpuinfo: &str, cpu: u32) -> Option<u32> {
    let mut current = None;
    for line in cpuinfo.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        match key.trim() {
            "processor" => current = value.trim().parse::<u32>().ok(),
            "apicid" if current == Some(cpu) => return value.trim().parse().ok(),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_kernel_are_understood() {
        assert_eq!(cpu_list("0-3,8"), [0, 1, 2, 3, 8]);
        assert_eq!(cpu_list(""), Vec::<u32>::new());
        assert_eq!(mem_total("Node 0 MemTotal:       1048576 kB\nNode 0 MemFree: 1 kB\n"), Some(1 << 30));
        assert_eq!(mem_total("MemTotal:        2048 kB\n"), Some(2 << 20));
        let cpuinfo = "processor\t: 0\napicid\t\t: 6\n\nprocessor\t: 1\napicid\t\t: 7\n";
        assert_eq!(apic_id(cpuinfo, 1), Some(7));
        assert_eq!(apic_id(cpuinfo, 2), None);
    }

    #[test]
    fn this_machine_has_a_node_with_memory() {
        let machine = Machine::running();
        assert!(machine.nodes.iter().all(|node| node.cpus > 0));
        assert!(machine.memory_bytes() > 0);
    }
}
