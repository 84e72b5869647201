//! Finding the render node that speaks virtio-kfd.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use kfd_abi::drm::{self, Version};
use kfd_abi::virtgpu::{self as abi, GetCaps, Getparam};
use virtio_kfd_protocol::Capset;
use virtio_kfd_protocol::version::{CAPSET_ID, CAPSET_VERSION};

use super::VirtGpu;
use super::ioctl::ioctl;
use crate::transport::{Result, TransportError};

/// Where render nodes are.
pub const DRI_DIRECTORY: &str = "/dev/dri";

/// Name of the guest's kernel driver.
const DRIVER: &str = "virtio_gpu";

/// What a node offers.
pub(super) struct Offer {
    pub(super) capset: Capset,
    /// Whether host memory can be mapped.
    pub(super) host_visible: bool,
    /// Whether a context can have a debug name.
    pub(super) debug_name: bool,
}

/// Opens the first node that speaks virtio-kfd.
pub(super) fn find(directory: &Path) -> Result<VirtGpu> {
    let mut reasons = Vec::new();
    for path in nodes(directory)? {
        match VirtGpu::open(&path) {
            Ok(device) => return Ok(device),
            Err(TransportError::NoDevice(reason)) => reasons.push(reason),
            Err(error) => reasons.push(format!("{}: {error}", path.display())),
        }
    }
    if reasons.is_empty() {
        reasons.push(format!("{} has no render node", directory.display()));
    }
    Err(TransportError::NoDevice(reasons.join("; ")))
}

/// The render nodes in the order of their numbers.
fn nodes(directory: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error| TransportError::NoDevice(format!("{}: {error}", directory.display()));
    let mut nodes = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("renderD")?.parse::<u32>().ok());
        if let Some(number) = number {
            nodes.push((number, entry.path()));
        }
    }
    nodes.sort();
    Ok(nodes.into_iter().map(|(_, path)| path).collect())
}

/// Opens a node, close-on-exec, again as long as a signal interrupts it.
pub(super) fn open(path: &Path) -> Result<File> {
    loop {
        let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(path);
        match opened {
            Ok(file) => return Ok(file),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(TransportError::NoDevice(format!("{}: {error}", path.display()))),
        }
    }
}

/// Asks a node what it is; an error says what was found.
pub(super) fn examine(file: &File, path: &Path) -> Result<Offer> {
    let no = |what: String| TransportError::NoDevice(format!("{}: {what}", path.display()));
    // First the driver's name: the numbers of all other ioctls mean something else to another driver.
    let driver = driver_name(file).map_err(|error| no(format!("DRM_IOCTL_VERSION: {error}")))?;
    if driver != DRIVER {
        return Err(no(format!("its driver is {driver}, expected {DRIVER}")));
    }
    let has = |param| parameter(file, param).unwrap_or(0);
    let needed = [
        (abi::VIRTGPU_PARAM_3D_FEATURES, "contexts (the device offers no VIRGL)"),
        (abi::VIRTGPU_PARAM_CAPSET_QUERY_FIX, "capset queries"),
        (abi::VIRTGPU_PARAM_RESOURCE_BLOB, "blobs (the device or VMM offers no RESOURCE_BLOB)"),
        (abi::VIRTGPU_PARAM_CONTEXT_INIT, "typed contexts (the device or VMM offers no CONTEXT_INIT)"),
    ];
    if let Some((_, what)) = needed.iter().find(|(param, _)| has(*param) == 0) {
        return Err(no(format!("it has no {what}")));
    }
    let ids = has(abi::VIRTGPU_PARAM_SUPPORTED_CAPSET_IDs);
    if ids & (1 << CAPSET_ID) == 0 {
        let found: Vec<String> =
            (0..u32::BITS).filter(|id| ids & (1 << id) != 0).map(|id| id.to_string()).collect();
        return Err(no(format!("its capsets are [{}], expected {CAPSET_ID}", found.join(", "))));
    }
    let bytes = capset(file).map_err(|error| {
        no(format!("DRM_IOCTL_VIRTGPU_GET_CAPS of capset {CAPSET_ID} version {CAPSET_VERSION}: {error}"))
    })?;
    let capset = Capset::parse(&bytes).map_err(|error| no(error.to_string()))?;
    Ok(Offer {
        capset,
        host_visible: has(abi::VIRTGPU_PARAM_HOST_VISIBLE) != 0,
        debug_name: has(abi::VIRTGPU_PARAM_EXPLICIT_DEBUG_NAME) != 0,
    })
}

fn driver_name(file: &File) -> io::Result<String> {
    let mut name = [0u8; 32];
    let mut version = Version {
        name_len: name.len() as u64,
        name: name.as_mut_ptr().expose_provenance() as u64,
        ..Default::default()
    };
    // SAFETY: name points to name_len writable bytes; the other buffers are null with a length of 0.
    unsafe { ioctl(file.as_fd(), drm::request::VERSION, &mut version) }?;
    let length = usize::try_from(version.name_len).unwrap_or(0).min(name.len());
    Ok(String::from_utf8_lossy(name.get(..length).unwrap_or(&[])).into_owned())
}

/// A parameter of the device. One that the kernel does not know is an error.
fn parameter(file: &File, param: u64) -> io::Result<u64> {
    // The kernel writes an int.
    let mut value = 0i32;
    let mut get = Getparam { param, value: std::ptr::from_mut(&mut value).expose_provenance() as u64 };
    // SAFETY: value points to an int that lives beyond the call.
    unsafe { ioctl(file.as_fd(), abi::request::GETPARAM, &mut get) }?;
    Ok(u64::from(value.cast_unsigned()))
}

fn capset(file: &File) -> io::Result<[u8; size_of::<Capset>()]> {
    let mut bytes = [0u8; size_of::<Capset>()];
    let mut get = GetCaps {
        cap_set_id: CAPSET_ID,
        cap_set_ver: CAPSET_VERSION,
        addr: bytes.as_mut_ptr().expose_provenance() as u64,
        size: bytes.len() as u32,
        pad: 0,
    };
    // SAFETY: addr points to size writable bytes.
    unsafe { ioctl(file.as_fd(), abi::request::GET_CAPS, &mut get) }?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_directory_and_no_node_are_told_apart() {
        let directory = std::env::temp_dir().join(format!("virtio-kfd-scan-{}", std::process::id()));
        let text = find(&directory).map(|_| ()).unwrap_err().to_string();
        assert!(text.contains("No such file"), "{text}");
        std::fs::create_dir(&directory).unwrap();
        let empty = find(&directory).map(|_| ()).unwrap_err().to_string();
        // A file that is no DRM node: the driver's name cannot be asked for (ENOTTY).
        std::fs::write(directory.join("renderD128"), "").unwrap();
        let file = find(&directory).map(|_| ()).unwrap_err().to_string();
        std::fs::remove_dir_all(&directory).unwrap();
        assert!(empty.contains("no render node"), "{empty}");
        assert!(file.contains("renderD128: DRM_IOCTL_VERSION: Inappropriate ioctl"), "{file}");
    }
}
