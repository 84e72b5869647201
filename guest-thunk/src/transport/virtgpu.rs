//! The guest's own driver: a render node of an unpatched `virtio_gpu` kernel module.
//!
//! An open file of the node is a context. A frame is one EXECBUFFER with a fence; blobs are GEM objects.

mod blob;
mod fence;
mod ioctl;
mod pool;
mod scan;

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kfd_abi::virtgpu::{
    self as abi, ContextInit, ContextSetParam, VIRTGPU_BLOB_FLAG_USE_MAPPABLE, VIRTGPU_BLOB_MEM_GUEST,
    VIRTGPU_BLOB_MEM_HOST3D,
};
use virtio_kfd_protocol::version::CAPSET_ID;
use virtio_kfd_protocol::{Capset, Features, limits};

use self::blob::GemBlob;
use self::fence::Fences;
use self::ioctl::ioctl;
use self::pool::Mount;
use super::{Blob, Result, Transport, TransportError, own};

pub use self::scan::DRI_DIRECTORY;

/// A context on a render node.
pub struct VirtGpu {
    device: Arc<Device>,
    capset: Capset,
    fences: Fences,
    mount: OnceLock<Option<Mount>>,
}

/// The open node. Shared with the blobs, which close their GEM handles on it.
struct Device {
    /// -1 once a forked child has closed it.
    fd: AtomicI32,
    owner: u32,
    /// How often each GEM handle is held: importing what this file has already gives the handle that it has.
    handles: Mutex<HashMap<u32, usize>>,
}

impl Device {
    fn new(file: File) -> Self {
        Device {
            fd: AtomicI32::new(own::opened(OwnedFd::from(file)).into_raw_fd()),
            owner: std::process::id(),
            handles: Mutex::default(),
        }
    }

    fn raw(&self) -> RawFd {
        self.fd.load(Ordering::Relaxed)
    }

    /// The node, in the process that opened it.
    fn fd(&self) -> Result<BorrowedFd<'_>> {
        let raw = self.raw();
        if raw < 0 || !self.is_mine() {
            return Err(TransportError::NotSupported("a context that a parent process opened"));
        }
        // SAFETY: raw is open: only close() closes it, which in the process that opened it runs only from Drop.
        Ok(unsafe { BorrowedFd::borrow_raw(raw) })
    }

    fn is_mine(&self) -> bool {
        self.owner == std::process::id()
    }

    /// The counts of handles. Not to be taken in a forked child.
    fn handles(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        // Nothing panics while it is held.
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Async-signal-safe: one swap and one close(2).
    fn close(&self) {
        let raw = self.fd.swap(-1, Ordering::Relaxed);
        if raw >= 0 {
            own::closing(raw);
            // SAFETY: the descriptor came from an OwnedFd, and the swap gives it to exactly one caller.
            drop(unsafe { OwnedFd::from_raw_fd(raw) });
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.close();
    }
}

impl VirtGpu {
    /// Opens the first render node that speaks virtio-kfd.
    pub fn find() -> Result<VirtGpu> {
        scan::find(Path::new(DRI_DIRECTORY))
    }

    /// Opens this render node.
    pub fn open(path: &Path) -> Result<VirtGpu> {
        let file = scan::open(path)?;
        let offer = scan::examine(&file, path)?;
        VirtGpu::with(file, offer)
    }

    fn with(file: File, offer: scan::Offer) -> Result<VirtGpu> {
        let rings = offer.capset.max_rings.min(limits::MAX_RINGS);
        let name = CString::new("virtio-kfd").unwrap_or_default();
        let parameter = |param, value| ContextSetParam { param, value };
        let mut parameters = vec![
            parameter(abi::VIRTGPU_CONTEXT_PARAM_CAPSET_ID, CAPSET_ID.into()),
            parameter(abi::VIRTGPU_CONTEXT_PARAM_NUM_RINGS, rings.into()),
        ];
        if offer.debug_name {
            parameters.push(parameter(
                abi::VIRTGPU_CONTEXT_PARAM_DEBUG_NAME,
                name.as_ptr().expose_provenance() as u64,
            ));
        }
        let mut init = ContextInit {
            num_params: parameters.len() as u32,
            pad: 0,
            ctx_set_params: parameters.as_ptr().expose_provenance() as u64,
        };
        // SAFETY: ctx_set_params points to num_params parameters and the debug name to a terminated string, both of
        // which live beyond the call; the kernel only reads them.
        unsafe { ioctl(file.as_fd(), abi::request::CONTEXT_INIT, &mut init) }.map_err(|error| {
            TransportError::System {
                call: "DRM_IOCTL_VIRTGPU_CONTEXT_INIT",
                detail: format!("capset {CAPSET_ID}, {rings} rings"),
                error,
            }
        })?;
        let mut capset = offer.capset;
        if !offer.host_visible {
            capset.features &= !Features::HOST_BLOBS.bits();
        }
        let fences = Fences::new(file.as_fd());
        Ok(VirtGpu { device: Arc::new(Device::new(file)), capset, fences, mount: OnceLock::new() })
    }
}

impl Transport for VirtGpu {
    fn capset(&self) -> &Capset {
        &self.capset
    }

    fn submit_and_wait(&self, ring: u8, frame: &[u8], limit: Duration) -> Result<()> {
        self.device.fd()?;
        self.fences.submit_and_wait(&self.device, ring, frame, limit)
    }

    fn guest_blob(&self, size: u64) -> Result<Box<dyn Blob>> {
        let flags = VIRTGPU_BLOB_FLAG_USE_MAPPABLE;
        Ok(Box::new(GemBlob::new(&self.device, VIRTGPU_BLOB_MEM_GUEST, flags, 0, size)?))
    }

    fn guest_memory_left(&self) -> Option<u64> {
        available(&std::fs::read_to_string("/proc/meminfo").ok()?)
    }

    fn ordinary_memory(&self, size: u64) -> Option<Box<dyn Blob>> {
        if !self.device.is_mine() {
            return None;
        }
        let mount = self.mount.get_or_init(Mount::find).as_ref()?;
        Some(Box::new(mount.allocate(&self.device, size).ok()?))
    }

    fn host_memory(&self, blob_id: u64, size: u64, mappable: bool) -> Result<Box<dyn Blob>> {
        if self.capset.features & Features::HOST_BLOBS.bits() == 0 {
            return Err(TransportError::NotSupported("host memory in this guest (no shared memory window)"));
        }
        let flags = if mappable { VIRTGPU_BLOB_FLAG_USE_MAPPABLE } else { 0 };
        Ok(Box::new(GemBlob::new(&self.device, VIRTGPU_BLOB_MEM_HOST3D, flags, blob_id, size)?))
    }

    fn import(&self, dma_buf: BorrowedFd<'_>) -> Result<Box<dyn Blob>> {
        Ok(Box::new(GemBlob::import(&self.device, dma_buf)?))
    }

    fn device(&self) -> Option<BorrowedFd<'_>> {
        self.device.fd().ok()
    }

    fn abandon(&self) {
        if !self.device.is_mine() {
            self.device.close();
        }
    }
}

/// `MemAvailable` of /proc/meminfo, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    kib.trim().strip_suffix("kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:        2017172 kB\nMemFree:          169436 kB\nMemAvailable:    1501184 kB\n";
        assert_eq!(available(text), Some(1_501_184 * 1024));
        for text in ["", "MemTotal: 1 kB\n", "MemAvailable: x kB\n", "MemAvailable: 1 MB\n"] {
            assert_eq!(available(text), None, "{text}");
        }
        assert!(available(&std::fs::read_to_string("/proc/meminfo").unwrap()).is_some_and(|bytes| bytes > 0));
    }
}
