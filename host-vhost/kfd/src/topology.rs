//! KFD's topology: the files below `/sys/devices/virtual/kfd/kfd/topology`, read at one generation.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Where the kernel shows it.
pub const TOPOLOGY_PATH: &str = "/sys/devices/virtual/kfd/kfd/topology";

/// Longest file in bytes: a sysfs attribute is at most a page.
const MAX_FILE: u64 = 4096;
/// Most files (a machine of 64 GPUs with some hundreds of caches each has fewer).
const MAX_FILES: usize = 64 * 1024;
/// Deepest file: `nodes/1/caches/0/properties`.
const MAX_DEPTH: usize = 5;
/// How often it is read again when the generation changes meanwhile.
const ATTEMPTS: usize = 10;

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyFile {
    /// Path relative to the topology directory, with `/` between parts.
    pub path: String,
    /// Content.
    pub content: Vec<u8>,
}

/// All files of one generation, sorted by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// `generation_id`
    pub generation: u64,
    /// The files.
    pub files: Vec<TopologyFile>,
}

/// A GPU as the topology describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuNode {
    /// The node's number on this host.
    pub node: u32,
    /// `gpu_id`, not 0.
    pub gpu_id: u32,
    /// `drm_render_minor`: the number of the render node.
    pub render_minor: u32,
    /// `gfx_target_version`: major * 10000 + minor * 100 + stepping.
    pub gfx_target_version: u32,
    /// PCI domain.
    pub domain: u32,
    /// PCI bus in bits 8 to 15, device in 3 to 7, function in 0 to 2; partitions of one GPU differ in the bits above.
    pub location_id: u32,
    /// `unique_id`, 0 where the GPU has none.
    pub unique_id: u64,
    /// `num_xcc`: accelerator dies that run a queue together; 1 on kernels that do not tell.
    pub xccs: u32,
    /// Compute units of all dies (`simd_count` by `simd_per_cu`); 0 where the kernel does not tell.
    pub cus: u32,
}

/// Why the topology cannot be read.
#[derive(Debug, Error)]
pub enum TopologyError {
    /// A file or directory cannot be read.
    #[error("{path}: {error}", path = .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file is not what the kernel writes.
    #[error("{path}: {found:?}, expected {expected}", path = .path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What stands there.
        found: String,
        /// What should.
        expected: &'static str,
    },
    /// There is more than any kernel has.
    #[error("{path}: more than {max} {what}", path = .path.display())]
    TooLarge {
        /// Where.
        path: PathBuf,
        /// Of what.
        what: &'static str,
        /// Limit.
        max: u64,
    },
    /// It never stayed the same for as long as a reading took.
    #[error("{path}: generation_id changed during each of {ATTEMPTS} readings", path = .path.display())]
    Unstable {
        /// The topology directory.
        path: PathBuf,
    },
}

/// Reads everything below `root`, with the same `generation_id` before and after. Files that this process may
/// not read (a device cgroup hides the GPU: EPERM) are left out.
pub fn read(root: &Path) -> Result<Topology, TopologyError> {
    for _ in 0..ATTEMPTS {
        let before = read_generation(root)?;
        let mut files = Vec::new();
        walk(root, String::new(), 0, &mut files)?;
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let after = read_generation(root)?;
        if before == after {
            return Ok(Topology { generation: before, files });
        }
    }
    Err(TopologyError::Unstable { path: root.into() })
}

fn read_generation(root: &Path) -> Result<u64, TopologyError> {
    let path = root.join("generation_id");
    let content = read_file(&path).map_err(|error| TopologyError::Read { path: path.clone(), error })?;
    let text = String::from_utf8_lossy(&content);
    text.trim().parse().map_err(|_| TopologyError::Content {
        path,
        found: text.into_owned(),
        expected: "a number",
    })
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    fs::File::open(path)?.take(MAX_FILE.saturating_add(1)).read_to_end(&mut content)?;
    Ok(content)
}

fn walk(
    directory: &Path,
    prefix: String,
    depth: usize,
    files: &mut Vec<TopologyFile>,
) -> Result<(), TopologyError> {
    let fail = |path: &Path| {
        let path = path.to_path_buf();
        move |error| TopologyError::Read { path, error }
    };
    let too_large = |path: &Path, what, max: u64| TopologyError::TooLarge { path: path.into(), what, max };
    for entry in fs::read_dir(directory).map_err(fail(directory))? {
        let entry = entry.map_err(fail(directory))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(fail(&path))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        if kind.is_dir() {
            if depth >= MAX_DEPTH {
                return Err(too_large(&path, "levels of directories", MAX_DEPTH as u64));
            }
            walk(&path, name, depth.saturating_add(1), files)?;
        } else if kind.is_file() {
            let content = match read_file(&path) {
                Ok(content) => content,
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => continue,
                Err(error) => return Err(fail(&path)(error)),
            };
            if content.len() as u64 > MAX_FILE {
                return Err(too_large(&path, "bytes", MAX_FILE));
            }
            if files.len() >= MAX_FILES {
                return Err(too_large(directory, "files", MAX_FILES as u64));
            }
            files.push(TopologyFile { path: name, content });
        }
    }
    Ok(())
}

/// A value of a `properties` file: lines of a name, a space and a number.
pub fn property(content: &[u8], name: &str) -> Option<u64> {
    let text = std::str::from_utf8(content).ok()?;
    text.lines().find_map(|line| {
        let (found, value) = line.split_once(' ')?;
        if found == name { value.trim().parse().ok() } else { None }
    })
}

impl Topology {
    /// The content of a file.
    pub fn file(&self, path: &str) -> Option<&[u8]> {
        self.files.iter().find(|file| file.path == path).map(|file| file.content.as_slice())
    }

    /// The node numbers, in order.
    pub fn nodes(&self) -> Vec<u32> {
        let mut nodes: Vec<u32> = self.files.iter().filter_map(|file| node_of(&file.path)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// The GPU nodes that this process may use, in order: those whose `gpu_id` can be read and is not 0.
    pub fn gpus(&self) -> Result<Vec<GpuNode>, TopologyError> {
        let mut gpus = Vec::new();
        for node in self.nodes() {
            let path = format!("nodes/{node}/gpu_id");
            let Some(content) = self.file(&path) else { continue };
            let text = String::from_utf8_lossy(content);
            let gpu_id: u32 = text.trim().parse().map_err(|_| TopologyError::Content {
                path: path.clone().into(),
                found: text.clone().into_owned(),
                expected: "a number",
            })?;
            if gpu_id == 0 {
                continue;
            }
            let properties_path = format!("nodes/{node}/properties");
            let properties = self.file(&properties_path).unwrap_or(&[]);
            let number =
                |name: &'static str| property(properties, name).and_then(|value| u32::try_from(value).ok());
            let required = |name: &'static str| {
                number(name).ok_or_else(|| TopologyError::Content {
                    path: properties_path.clone().into(),
                    found: format!("no {name}"),
                    expected: "a line of that name with a 32-bit number",
                })
            };
            gpus.push(GpuNode {
                node,
                gpu_id,
                render_minor: required("drm_render_minor")?,
                gfx_target_version: number("gfx_target_version").unwrap_or(0),
                domain: number("domain").unwrap_or(0),
                location_id: number("location_id").unwrap_or(0),
                unique_id: property(properties, "unique_id").unwrap_or(0),
                xccs: number("num_xcc").unwrap_or(1),
                cus: number("simd_count")
                    .unwrap_or(0)
                    .checked_div(number("simd_per_cu").unwrap_or(0))
                    .unwrap_or(0),
            });
        }
        Ok(gpus)
    }
}

/// The node that a file belongs to (`nodes/1/…`).
pub fn node_of(path: &str) -> Option<u32> {
    let rest = path.strip_prefix("nodes/")?;
    rest.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, content: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Names and forms as node_show and sysprops_show write them (kfd_topology.c of Linux 6.12).
    fn two_nodes() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "generation_id", "2\n");
        write(root.path(), "system_properties", "platform_oem 0\nplatform_id 0\nplatform_rev 0\n");
        write(root.path(), "nodes/0/gpu_id", "0\n");
        write(root.path(), "nodes/0/properties", "cpu_cores_count 8\n");
        write(root.path(), "nodes/1/gpu_id", "26287\n");
        write(root.path(), "nodes/1/name", "vega20\n");
        write(
            root.path(),
            "nodes/1/properties",
            "cpu_cores_count 0\nlocation_id 768\ndomain 1\ndrm_render_minor 128\n\
             gfx_target_version 90006\nunique_id 1234605616436508552\n",
        );
        write(root.path(), "nodes/1/caches/0/properties", "level 1\n");
        root
    }

    #[test]
    fn every_file_of_every_node_is_read() {
        let root = two_nodes();
        let topology = read(root.path()).unwrap();
        assert_eq!(topology.generation, 2);
        let paths: Vec<&str> = topology.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "generation_id",
                "nodes/0/gpu_id",
                "nodes/0/properties",
                "nodes/1/caches/0/properties",
                "nodes/1/gpu_id",
                "nodes/1/name",
                "nodes/1/properties",
                "system_properties"
            ]
        );
        assert_eq!(topology.file("nodes/1/name"), Some(b"vega20\n".as_slice()));
        let gpus = topology.gpus().unwrap();
        let gpu = GpuNode {
            node: 1,
            gpu_id: 26287,
            render_minor: 128,
            gfx_target_version: 90006,
            domain: 1,
            location_id: 768,
            unique_id: 0x1122_3344_5566_7788,
            xccs: 1,
            cus: 0,
        };
        assert_eq!(gpus, [gpu]);
    }

    #[test]
    fn a_gpu_node_without_a_render_node_is_an_error_that_names_the_file() {
        let root = two_nodes();
        write(root.path(), "nodes/1/properties", "location_id 768\n");
        let error = read(root.path()).unwrap().gpus().unwrap_err().to_string();
        assert!(error.contains("nodes/1/properties") && error.contains("drm_render_minor"), "{error}");
    }

    #[test]
    fn what_is_not_there_is_named() {
        let root = tempfile::tempdir().unwrap();
        let error = read(root.path()).unwrap_err().to_string();
        assert!(error.contains("generation_id"), "{error}");
        write(root.path(), "generation_id", "many\n");
        let error = read(root.path()).unwrap_err().to_string();
        assert!(error.contains("many"), "{error}");
    }

    #[test]
    fn files_larger_than_a_page_are_refused() {
        let root = two_nodes();
        write(root.path(), "nodes/1/properties", &"x 1\n".repeat(1025));
        assert!(matches!(read(root.path()), Err(TopologyError::TooLarge { what: "bytes", .. })));
    }

    #[test]
    fn only_whole_names_are_properties() {
        let content = b"simd_count 240\nsimd_id_base 2147487744\nempty\n";
        assert_eq!(property(content, "simd_count"), Some(240));
        assert_eq!(property(content, "simd_id_base"), Some(2147487744));
        assert_eq!(property(content, "simd"), None);
        assert_eq!(property(content, "empty"), None);
    }
}
