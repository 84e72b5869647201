//! Buffer objects of the render node that come as dma-bufs: with these ROCr's virtual memory interface maps memory at addresses of
//! its own choice, and shares memory between processes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Mutex;

use guest_thunk::thunk::lock::lock;
use guest_thunk::thunk::render::bo::{Failure, HANDLE};
use kfd_abi::drm::amdgpu::{
    AMDGPU_GEM_DOMAIN_GTT, AMDGPU_GEM_DOMAIN_VRAM, AMDGPU_GEM_METADATA_OP_GET_METADATA,
    AMDGPU_GEM_METADATA_OP_SET_METADATA, AMDGPU_GEM_OP_GET_GEM_CREATE_INFO, AMDGPU_GEM_OP_SET_PLACEMENT,
    AMDGPU_VA_OP_CLEAR, AMDGPU_VA_OP_MAP, AMDGPU_VA_OP_REPLACE, GemCreate, GemMetadata, GemMmap, GemOp,
    GemVa, VmPageFlags,
};
use kfd_abi::drm::{DRM_CLOEXEC, DRM_RDWR, GemClose, PrimeHandle};
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{BufferMetadata, SetBufferMetadata};
use virtio_kfd_protocol::limits::MAX_METADATA_BYTES;
use virtio_kfd_protocol::{
    BufferMetadataAnswer, BufferMetadataRequest, GpuId, Handle, SetBufferMetadataRequest,
};

use crate::failure::errno;
use crate::topology::Gpu;
use crate::{GuestKfd, dma_buf};

/// `enum amdgpu_bo_handle_type`: a dma-buf.
const DMA_BUF: i32 = 2;

/// A handle that a program has.
struct Object {
    gpu: GpuId,
    /// Where `mmap` shows it, once that was asked for.
    offset: Option<u64>,
}

/// The handles that are open.
#[derive(Default)]
pub struct Objects {
    open: Mutex<BTreeMap<u32, Object>>,
}

fn failed(failure: Failure) -> Errno {
    Errno::from_raw(failure.errno)
}

impl GuestKfd {
    /// The object of a handle of this GPU's node (`drm_gem_object_lookup`), by its name in guest-thunk.
    fn object(&self, gpu: &Gpu, handle: u32) -> Result<u64> {
        let open = lock(&self.objects.open);
        open.get(&handle).filter(|object| object.gpu == gpu.gpu_id).ok_or(Errno::ENOENT)?;
        Ok(HANDLE | u64::from(handle))
    }

    /// `drm_prime_fd_to_handle_ioctl`: the same handle again for the same memory.
    pub(crate) fn gem_import(&self, gpu: &Gpu, arguments: &mut PrimeHandle) -> Result<i32> {
        let descriptor = dma_buf::copy(arguments.fd)?;
        let imported = self.bos.import(self.host(), &self.memory, gpu.gpu_id, DMA_BUF, || Ok(descriptor));
        let (name, _) = imported.map_err(|_| Errno::EINVAL)?;
        let handle = u32::try_from(name ^ HANDLE).map_err(|_| Errno::ENOMEM)?;
        match lock(&self.objects.open).entry(handle) {
            // A handle is closed once, however often it was opened.
            Entry::Occupied(_) => self.bos.free(&self.client, name).map_err(failed)?,
            Entry::Vacant(place) => {
                place.insert(Object { gpu: gpu.gpu_id, offset: None });
            }
        }
        arguments.handle = handle;
        Ok(0)
    }

    /// `drm_prime_handle_to_fd_ioctl`.
    pub(crate) fn gem_export(&self, gpu: &Gpu, arguments: &mut PrimeHandle) -> Result<i32> {
        if arguments.flags & !(DRM_CLOEXEC | DRM_RDWR) != 0 {
            return Err(Errno::EINVAL);
        }
        let name = self.object(gpu, arguments.handle)?;
        let (blob, _, _) = self.bos.shown(name).map_err(failed)?;
        arguments.fd = dma_buf::export(&*blob, arguments.flags & DRM_CLOEXEC != 0)?;
        Ok(0)
    }

    /// `drm_gem_close_ioctl`. GPUs lose what they saw of it.
    pub(crate) fn gem_close(&self, gpu: &Gpu, arguments: &mut GemClose) -> Result<i32> {
        let name = self.object(gpu, arguments.handle).map_err(|_| Errno::EINVAL)?;
        let object = lock(&self.objects.open).remove(&arguments.handle).ok_or(Errno::EINVAL)?;
        if let Some(offset) = object.offset {
            self.buffers.hide(offset);
        }
        self.bos.free(&self.client, name).map_err(failed)?;
        Ok(0)
    }

    /// `amdgpu_gem_mmap_ioctl`.
    pub(crate) fn gem_mmap(&self, gpu: &Gpu, arguments: &mut GemMmap) -> Result<i32> {
        let handle = arguments.handle();
        *arguments = GemMmap::default();
        let name = self.object(gpu, handle)?;
        let (blob, size, visible) = self.bos.shown(name).map_err(failed)?;
        if !visible {
            return Err(Errno::EPERM);
        }
        let mut open = lock(&self.objects.open);
        let object = open.get_mut(&handle).ok_or(Errno::ENOENT)?;
        let offset = match object.offset {
            Some(offset) => offset,
            None => *object.offset.insert(self.buffers.show(blob, size)?),
        };
        arguments.addr_ptr = offset;
        Ok(0)
    }

    /// `amdgpu_gem_metadata_ioctl`, for memory of the host: what its processes leave with it. Memory of the guest has none, and
    /// nothing can be left with it.
    pub(crate) fn gem_metadata(&self, gpu: &Gpu, arguments: &mut GemMetadata) -> Result<i32> {
        let name = self.object(gpu, arguments.handle)?;
        let buffer = self.bos.host_buffer(name).map_err(failed)?;
        match arguments.op {
            AMDGPU_GEM_METADATA_OP_GET_METADATA => {
                let (fixed, bytes) = match buffer {
                    Some((handle, gpu)) => self.metadata(handle, gpu)?,
                    None => Default::default(),
                };
                arguments.flags = fixed.flags;
                arguments.tiling_info = fixed.tiling;
                arguments.data_size_bytes = u32::try_from(bytes.len()).map_err(|_| Errno::EINVAL)?;
                for (word, bytes) in arguments.data.iter_mut().zip(bytes.chunks(4)) {
                    let mut whole = [0; 4];
                    whole.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
                    *word = u32::from_ne_bytes(whole);
                }
            }
            AMDGPU_GEM_METADATA_OP_SET_METADATA => {
                let size = usize::try_from(arguments.data_size_bytes).map_err(|_| Errno::EINVAL)?;
                if size > MAX_METADATA_BYTES {
                    return Err(Errno::EINVAL);
                }
                let (handle, gpu_id) = buffer.ok_or(Errno::EOPNOTSUPP)?;
                let (flags, tiling) = (arguments.flags, arguments.tiling_info);
                let request = SetBufferMetadataRequest { handle, gpu_id, pad: 0, flags, tiling };
                let mut bytes: Vec<u8> = arguments.data.iter().flat_map(|word| word.to_ne_bytes()).collect();
                bytes.truncate(size);
                self.client.call::<SetBufferMetadata>(&request, &bytes, 0).map_err(errno)?;
            }
            // The driver's initial value of the result.
            _ => return Err(Errno::EPERM),
        }
        Ok(0)
    }

    /// What was left with a buffer of the host.
    pub(crate) fn metadata(&self, handle: Handle, gpu_id: GpuId) -> Result<(BufferMetadataAnswer, Vec<u8>)> {
        let request = BufferMetadataRequest { handle, gpu_id, pad: 0 };
        match self.client.call::<BufferMetadata>(&request, &[], MAX_METADATA_BYTES).map_err(errno) {
            // A host that cannot tell has kept nothing either: there, nothing can be left with a buffer.
            Err(Errno::EOPNOTSUPP) => Ok(Default::default()),
            other => other,
        }
    }

    /// `amdgpu_gem_op_ioctl`: how a buffer was made, with a page's alignment and without flags. Memory cannot be placed anew.
    pub(crate) fn gem_operation(&self, gpu: &Gpu, arguments: &GemOp) -> Result<i32> {
        let name = self.object(gpu, arguments.handle)?;
        match arguments.op {
            AMDGPU_GEM_OP_GET_GEM_CREATE_INFO => {
                let (_, bo_size, _) = self.bos.shown(name).map_err(failed)?;
                let host = self.bos.host_buffer(name).map_err(failed)?;
                let domains = if host.is_some() { AMDGPU_GEM_DOMAIN_VRAM } else { AMDGPU_GEM_DOMAIN_GTT };
                let alignment = guest_thunk::thunk::memory::address::page_size();
                let told = GemCreate { bo_size, alignment, domains, domain_flags: 0 };
                UserMemory.write_struct(UserPtr(arguments.value), &told)?;
                Ok(0)
            }
            AMDGPU_GEM_OP_SET_PLACEMENT => Err(Errno::EOPNOTSUPP),
            _ => Err(Errno::EINVAL),
        }
    }

    /// `amdgpu_gem_va_ioctl`, but for partially resident memory.
    pub(crate) fn gem_va(&self, gpu: &Gpu, arguments: &mut GemVa) -> Result<i32> {
        let flags = VmPageFlags::from_bits_retain(arguments.flags);
        if flags.contains(VmPageFlags::PAGE_PRT) {
            return Err(Errno::EOPNOTSUPP);
        }
        let (va, size) = (arguments.va_address, arguments.map_size);
        let end = va.checked_add(size).ok_or(Errno::EINVAL)?;
        if arguments.operation == AMDGPU_VA_OP_CLEAR {
            self.bos.clear(&self.client, gpu.gpu_id, va, end).map_err(failed)?;
            return Ok(0);
        }
        if !(AMDGPU_VA_OP_MAP..=AMDGPU_VA_OP_REPLACE).contains(&arguments.operation) {
            return Err(Errno::EINVAL);
        }
        let name = self.object(gpu, arguments.handle)?;
        let flags = flags - VmPageFlags::DELAY_UPDATE;
        let offset = arguments.offset_in_bo;
        self.bos
            .change(&self.client, name, offset, size, (va, flags), arguments.operation)
            .map_err(failed)?;
        Ok(0)
    }
}
