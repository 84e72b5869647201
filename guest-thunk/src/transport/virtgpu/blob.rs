//! Blobs as GEM objects.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use kfd_abi::drm::{self, GemClose};
use kfd_abi::virtgpu::{
    self as abi, Map, ResourceCreateBlob, VIRTGPU_BLOB_FLAG_USE_MAPPABLE, VIRTGPU_BLOB_MEM_GUEST,
};
use virtio_kfd_protocol::{GuestVa, Handle, ResourceId};

use super::Device;
use super::ioctl::ioctl;
use crate::transport::{Blob, Result, TransportError};

/// Smallest page of an x86-64 guest; each page of a mapping is touched once.
const PAGE: usize = 4096;

/// A blob of a context.
pub(super) struct GemBlob {
    device: Arc<Device>,
    handle: u32,
    resource: ResourceId,
    size: u64,
    memory: u32,
}

impl GemBlob {
    /// Makes a blob: guest memory, or host memory known by the number of a buffer.
    pub(super) fn new(device: &Arc<Device>, memory: u32, buffer: Handle, size: u64) -> Result<GemBlob> {
        let mut create = ResourceCreateBlob {
            blob_mem: memory,
            blob_flags: VIRTGPU_BLOB_FLAG_USE_MAPPABLE,
            size,
            blob_id: buffer.0,
            ..Default::default()
        };
        // SAFETY: the argument has no pointer but the command's, which is null with a size of 0.
        unsafe { ioctl(device.fd()?, abi::request::RESOURCE_CREATE_BLOB, &mut create) }.map_err(|error| {
            TransportError::System {
                call: "DRM_IOCTL_VIRTGPU_RESOURCE_CREATE_BLOB",
                detail: format!("memory kind {memory}, {size} bytes, buffer {:#x}", buffer.0),
                error,
            }
        })?;
        Ok(GemBlob {
            device: Arc::clone(device),
            handle: create.bo_handle,
            resource: ResourceId(create.res_handle),
            size,
            memory,
        })
    }

    /// Brings every page into the page tables by reading it.
    ///
    /// The driver's fault handler counts from the start of the mapping that faults (`drm_gem_shmem_fault`). When an
    /// mprotect, munmap or madvise of a part splits the mapping, faults in the later part would get the
    /// pages of the earlier one. The pages exist and are pinned already, so that nothing faults after this.
    fn touch(address: usize, length: usize) {
        for offset in (0..length).step_by(PAGE) {
            let page = std::ptr::with_exposed_provenance::<u8>(address.saturating_add(offset));
            // SAFETY: the page lies in the readable mapping of length bytes at address that the caller has just
            // made; the volatile read of a byte is defined whatever the host writes there.
            let _ = unsafe { page.read_volatile() };
        }
    }
}

impl Blob for GemBlob {
    fn resource(&self) -> ResourceId {
        self.resource
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()> {
        let fd = self.device.fd()?;
        let failed = |call, error| TransportError::System {
            call,
            detail: format!("{length} bytes of a blob of {} at {:#x}", self.size, address.0),
            error,
        };
        let invalid = |_| failed("mmap", io::Error::from_raw_os_error(libc::EINVAL));
        let bytes = usize::try_from(length).map_err(invalid)?;
        let at = usize::try_from(address.0).map_err(invalid)?;
        let mut map = Map { handle: self.handle, ..Default::default() };
        // SAFETY: the argument has no pointer.
        unsafe { ioctl(fd, abi::request::MAP, &mut map) }
            .map_err(|error| failed("DRM_IOCTL_VIRTGPU_MAP", error))?;
        let offset = libc::off_t::try_from(map.offset).map_err(invalid)?;
        // SAFETY: the caller of map_fixed has reserved the range, so that nothing is mapped over that others use;
        // the kernel checks length and offset against the object.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::with_exposed_provenance_mut(at),
                bytes,
                protection,
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd.as_raw_fd(),
                offset,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(failed("mmap", io::Error::last_os_error()));
        }
        if self.memory == VIRTGPU_BLOB_MEM_GUEST && protection & libc::PROT_READ != 0 {
            GemBlob::touch(at, bytes);
        }
        Ok(())
    }
}

impl Drop for GemBlob {
    fn drop(&mut self) {
        // In a forked child the handle is the parent's: the open file is the same.
        let Ok(fd) = self.device.fd() else { return };
        let mut close = GemClose { handle: self.handle, pad: 0 };
        // SAFETY: the argument has no pointer. A failure could only mean that the handle is gone already.
        let _ = unsafe { ioctl(fd, drm::request::GEM_CLOSE, &mut close) };
    }
}
