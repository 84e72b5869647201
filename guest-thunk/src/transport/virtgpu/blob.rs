//! Blobs as GEM objects.

use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use kfd_abi::drm::{self, GemClose, PrimeHandle};
use kfd_abi::virtgpu::{
    self as abi, Map, ResourceCreateBlob, ResourceInfo, VIRTGPU_BLOB_FLAG_USE_SHAREABLE,
    VIRTGPU_BLOB_MEM_GUEST,
};
use nix::unistd::{Whence, lseek};
use virtio_kfd_protocol::{GuestVa, ResourceId};

use super::Device;
use super::ioctl::ioctl;
use crate::transport::{Blob, Result, TransportError};

/// Smallest page of an x86-64 guest; each page of a mapping is touched once.
const PAGE: usize = 4096;

/// A blob of a context: one of perhaps several holders of a GEM handle.
pub(super) struct GemBlob {
    device: Arc<Device>,
    handle: u32,
    resource: ResourceId,
    size: u64,
    memory: u32,
}

impl GemBlob {
    /// Makes a blob: guest memory, or host memory known by the number of a buffer or a token. It can be exported.
    pub(super) fn new(
        device: &Arc<Device>,
        memory: u32,
        flags: u32,
        blob_id: u64,
        size: u64,
    ) -> Result<GemBlob> {
        let mut create = ResourceCreateBlob {
            blob_mem: memory,
            blob_flags: flags | VIRTGPU_BLOB_FLAG_USE_SHAREABLE,
            size,
            blob_id,
            ..Default::default()
        };
        // SAFETY: the argument has no pointer but the command's, which is null with a size of 0.
        unsafe { ioctl(device.fd()?, abi::request::RESOURCE_CREATE_BLOB, &mut create) }.map_err(|error| {
            TransportError::System {
                call: "DRM_IOCTL_VIRTGPU_RESOURCE_CREATE_BLOB",
                // Not which one of the host's: that may be a secret.
                detail: format!("memory kind {memory}, flags {flags}, {size} bytes"),
                error,
            }
        })?;
        device.handles().insert(create.bo_handle, 1);
        Ok(GemBlob {
            device: Arc::clone(device),
            handle: create.bo_handle,
            resource: ResourceId(create.res_handle),
            size,
            memory,
        })
    }

    /// Its GEM handle.
    pub(super) fn handle(&self) -> u32 {
        self.handle
    }

    /// Takes what is behind a dma-buf. The kernel attaches it to this context.
    pub(super) fn import(device: &Arc<Device>, dma_buf: BorrowedFd<'_>) -> Result<GemBlob> {
        let failed = |call, error| TransportError::System { call, detail: "a dma-buf".into(), error };
        let fd = device.fd()?;
        // The 32 bits of RESOURCE_INFO do not hold the size of a large one. Only a dma-buf's end can be asked for.
        let size = lseek(dma_buf, 0, Whence::SeekEnd).map_err(|errno| failed("lseek", errno.into()))?;
        let mut import = PrimeHandle { fd: dma_buf.as_raw_fd(), ..Default::default() };
        // Held so that no other holder closes the handle before it is counted here.
        let mut handles = device.handles();
        // SAFETY: the argument has no pointer.
        unsafe { ioctl(fd, drm::request::PRIME_FD_TO_HANDLE, &mut import) }
            .map_err(|error| failed("DRM_IOCTL_PRIME_FD_TO_HANDLE", error))?;
        let count = handles.entry(import.handle).or_insert(0);
        *count = count.saturating_add(1);
        drop(handles);
        // From here on a failure gives the handle back.
        let mut blob = GemBlob {
            device: Arc::clone(device),
            handle: import.handle,
            resource: ResourceId(0),
            size: u64::try_from(size).unwrap_or(0),
            memory: 0,
        };
        let mut info = ResourceInfo { bo_handle: import.handle, ..Default::default() };
        // SAFETY: the argument has no pointer.
        unsafe { ioctl(fd, abi::request::RESOURCE_INFO, &mut info) }
            .map_err(|error| failed("DRM_IOCTL_VIRTGPU_RESOURCE_INFO", error))?;
        blob.resource = ResourceId(info.res_handle);
        blob.memory = info.blob_mem;
        Ok(blob)
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
        let offset = libc::off_t::try_from(self.mmap_offset()?).map_err(invalid)?;
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

    fn export(&self) -> Result<OwnedFd> {
        let flags = drm::DRM_CLOEXEC | drm::DRM_RDWR;
        let mut export = PrimeHandle { handle: self.handle, flags, fd: -1 };
        // SAFETY: the argument has no pointer.
        unsafe { ioctl(self.device.fd()?, drm::request::PRIME_HANDLE_TO_FD, &mut export) }.map_err(
            |error| TransportError::System {
                call: "DRM_IOCTL_PRIME_HANDLE_TO_FD",
                detail: format!("a blob of {} bytes", self.size),
                error,
            },
        )?;
        // SAFETY: the kernel has just installed this descriptor, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(export.fd) })
    }

    fn mmap_offset(&self) -> Result<u64> {
        let mut map = Map { handle: self.handle, ..Default::default() };
        // SAFETY: the argument has no pointer.
        unsafe { ioctl(self.device.fd()?, abi::request::MAP, &mut map) }.map_err(|error| {
            TransportError::System {
                call: "DRM_IOCTL_VIRTGPU_MAP",
                detail: format!("a blob of {} bytes", self.size),
                error,
            }
        })?;
        Ok(map.offset)
    }

    fn close_handle(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        Box::new(())
    }
}

impl Drop for GemBlob {
    fn drop(&mut self) {
        // In a forked child the handle is the parent's: the open file is the same. Nor may the lock be taken there.
        let Ok(fd) = self.device.fd() else { return };
        let mut handles = self.device.handles();
        let left = handles.get(&self.handle).copied().unwrap_or(1).saturating_sub(1);
        if left > 0 {
            handles.insert(self.handle, left);
            return;
        }
        handles.remove(&self.handle);
        let mut close = GemClose { handle: self.handle, pad: 0 };
        // SAFETY: the argument has no pointer. A failure could only mean that the handle is gone already.
        let _ = unsafe { ioctl(fd, drm::request::GEM_CLOSE, &mut close) };
    }
}
