//! Pieces of buffers at addresses of one GPU (`DRM_IOCTL_AMDGPU_GEM_VA`). The buffer reaches the GPU's render node as a
//! dma-buf, with its first range there, and stays until it is freed.

use std::collections::HashMap;

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::version::minor;
use kfd_host::{GemHandle, Metadata, Range};
use virtio_kfd_protocol::{GpuId, Handle, MapRangeRequest, Status, UnmapRangeRequest};

use crate::blob::PAGE;
use crate::buffer::Backing;
use crate::context::{Context, Gpu};
use crate::failure::Failure;
use crate::memory::Memory;

/// Most ranges of a context over all buffers and GPUs. Each is some hundred bytes in the kernel.
pub const MAX_RANGES: usize = 128 * 1024;

/// What a range may ask for: access and memory type. Not a late update of the page table, which nothing would wait for, and
/// no partially resident textures.
const RANGE_FLAGS: VmPageFlags = VmPageFlags::PAGE_READABLE
    .union(VmPageFlags::PAGE_WRITEABLE)
    .union(VmPageFlags::PAGE_EXECUTABLE)
    .union(VmPageFlags::MTYPE_MASK)
    .union(VmPageFlags::PAGE_NOALLOC);

/// GEM handles by render node, and how many buffers have each: the kernel gives the same one for the same dma-buf, and a
/// close ends it for all.
#[derive(Debug, Default)]
pub struct Gems {
    users: HashMap<(u32, GemHandle), u32>,
    /// Ranges over all buffers.
    ranges: usize,
}

impl Gems {
    fn add(&mut self, gpu: u32, gem: GemHandle) {
        let users = self.users.entry((gpu, gem)).or_default();
        *users = users.saturating_add(1);
    }

    /// One buffer less. Returns whether it was the last.
    fn remove(&mut self, gpu: u32, gem: GemHandle) -> bool {
        let Some(users) = self.users.get_mut(&(gpu, gem)) else { return false };
        *users = users.saturating_sub(1);
        let last = *users == 0;
        if last {
            self.users.remove(&(gpu, gem));
        }
        last
    }
}

impl Memory {
    /// Maps a piece of a buffer.
    pub fn map_range(
        &mut self,
        context: &Context,
        handle: Handle,
        request: &MapRangeRequest,
    ) -> Result<(), Failure> {
        let gpu = context.gpu(request.gpu_id)?;
        let MapRangeRequest { offset, size, .. } = *request;
        let va = request.va.0;
        let buffer = self.buffer(handle)?;
        let pages = [offset, size, va].iter().all(|number| number.is_multiple_of(PAGE));
        let inside = offset.checked_add(size).is_some_and(|end| end <= buffer.size);
        if !pages || !inside || size == 0 || va == 0 || va.checked_add(size).is_none() {
            return Err(Failure::invalid(format!(
                "MapRange: {size:#x} bytes at {offset:#x} of a buffer of {:#x}, at {va:#x}",
                buffer.size
            )));
        }
        let flags = VmPageFlags::from_bits_retain(request.flags);
        if !RANGE_FLAGS.contains(flags) {
            return Err(Failure::invalid(format!("MapRange: flags {:#x}", request.flags)));
        }
        if self.gems.ranges >= MAX_RANGES {
            return Err(Failure::limit(format!("MapRange: {MAX_RANGES} ranges")));
        }
        let key = (gpu.id.0, va);
        if buffer.ranges.contains_key(&key) {
            return Err(Failure::invalid(format!("MapRange: a range of this buffer begins at {va:#x}")));
        }
        let start = match buffer.backing {
            Backing::Piece { offset: start, .. } => start,
            _ => 0,
        };
        let offset = start.checked_add(offset).ok_or_else(|| Failure::invalid("MapRange: the offset"))?;
        let gem = self.gem(context, handle, gpu)?;
        gpu.render.map_range(gem, &Range { va, offset, size, flags: flags.bits() })?;
        self.buffer_mut(handle)?.ranges.insert(key, size);
        self.gems.ranges = self.gems.ranges.saturating_add(1);
        Ok(())
    }

    /// Unmaps what a [`Memory::map_range`] with the same address, size and GPU made.
    pub fn unmap_range(
        &mut self,
        context: &Context,
        handle: Handle,
        request: &UnmapRangeRequest,
    ) -> Result<(), Failure> {
        let gpu = context.gpu(request.gpu_id)?;
        let va = request.va.0;
        let known = self.buffer(handle)?.ranges.get(&(gpu.id.0, va)).copied();
        if known.is_none() || known != Some(request.size) {
            return Err(Failure::invalid(format!(
                "UnmapRange: {:#x} bytes at {va:#x}, this buffer has there: {known:x?}",
                request.size
            )));
        }
        self.take_range(context, handle, (gpu.id.0, va), request.size)
    }

    fn take_range(
        &mut self,
        context: &Context,
        handle: Handle,
        key: (u32, u64),
        size: u64,
    ) -> Result<(), Failure> {
        let (gpu_id, va) = key;
        let gpu = context.gpu(GpuId(gpu_id))?;
        let buffer = self.buffer_mut(handle)?;
        if let Some(gem) = buffer.gems.get(&gpu_id) {
            gpu.render.unmap_range(*gem, va, size)?;
        }
        if buffer.ranges.remove(&key).is_some() {
            self.gems.ranges = self.gems.ranges.saturating_sub(1);
        }
        Ok(())
    }

    /// Unmaps all ranges of a buffer. An error leaves those that it did not come to.
    pub(crate) fn unmap_ranges(&mut self, context: &Context, handle: Handle) -> Result<(), Failure> {
        while let Some((key, size)) = self.buffer(handle)?.ranges.first_key_value().map(|(k, s)| (*k, *s)) {
            self.take_range(context, handle, key, size)?;
        }
        Ok(())
    }

    /// What was left with a buffer on a GPU's render node.
    pub fn metadata(&mut self, context: &Context, handle: Handle, gpu: GpuId) -> Result<Metadata, Failure> {
        let gpu = context.gpu(gpu)?;
        let gem = self.gem(context, handle, gpu)?;
        Ok(gpu.render.metadata(gem)?)
    }

    /// Leaves something with a buffer.
    pub fn set_metadata(
        &mut self,
        context: &Context,
        handle: Handle,
        gpu: GpuId,
        metadata: &Metadata,
    ) -> Result<(), Failure> {
        let gpu = context.gpu(gpu)?;
        let gem = self.gem(context, handle, gpu)?;
        Ok(gpu.render.set_metadata(gem, metadata)?)
    }

    /// The buffer on the GPU's render node.
    fn gem(&mut self, context: &Context, handle: Handle, gpu: &Gpu) -> Result<GemHandle, Failure> {
        if let Some(gem) = self.buffer(handle)?.gems.get(&gpu.id.0) {
            return Ok(*gem);
        }
        // Before, KFD and the render node each made a mapping of their own of one buffer, and closing the handle took away
        // whichever was newer, KFD's among them (amdgpu_gem_object_close).
        if context.version.minor < minor::GEM_VA {
            let reason = format!(
                "buffer on a render node: KFD 1.{}, 1.{} is needed",
                context.version.minor,
                minor::GEM_VA
            );
            return Err(Failure::new(Status::NOT_SUPPORTED, reason));
        }
        let gem = gpu.render.import(context.dmabuf(self.buffer(handle)?)?.as_fd())?;
        self.gems.add(gpu.id.0, gem);
        self.buffer_mut(handle)?.gems.insert(gpu.id.0, gem);
        Ok(gem)
    }

    /// Takes a buffer without ranges from the render nodes.
    pub(crate) fn close_gems(&mut self, context: &Context, handle: Handle) {
        let Some(buffer) = self.buffers.get_mut(handle) else { return };
        // Left over where KFD itself freed a buffer that it had mapped.
        self.gems.ranges = self.gems.ranges.saturating_sub(std::mem::take(&mut buffer.ranges).len());
        for (gpu_id, gem) in std::mem::take(&mut buffer.gems) {
            let last = self.gems.remove(gpu_id, gem);
            let Ok(gpu) = context.gpu(GpuId(gpu_id)) else { continue };
            if last && let Err(error) = gpu.render.close(gem) {
                context.throttle.log(|held| {
                    tracing::warn!("{error} ({held} messages before were held back)");
                });
            }
        }
    }
}
