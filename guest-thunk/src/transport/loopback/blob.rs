//! Blobs as the guest's kernel keeps them: a resource lives until nobody has it, a context has each resource once.

use std::any::Any;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use virtio_bindings::virtio_gpu as gpu;
use virtio_kfd_protocol::{GuestVa, ResourceId};

use super::command::header;
use super::context::{Context, about, whole};
use super::ram::Pages;
use super::window::Shown;
use super::{LoopbackVm, WeakVm};
use crate::transport::{Blob, Result, TransportError};

/// A resource. It ends when no context has it and no dma-buf of it is open.
pub(super) struct Resource {
    /// Weak, since the VM keeps what is exported.
    vm: WeakVm,
    id: u32,
    size: u64,
    memory: Memory,
}

enum Memory {
    Guest(Option<Pages>),
    /// Where in the window it is, if it is.
    Host(Option<u64>),
}

impl Resource {
    /// A resource that the device was told of.
    pub(super) fn guest(vm: &LoopbackVm, id: u32, size: u64, pages: Pages) -> Resource {
        Resource { vm: vm.downgrade(), id, size, memory: Memory::Guest(Some(pages)) }
    }

    /// A resource that the device was told of, without a place in the window yet.
    pub(super) fn host(vm: &LoopbackVm, id: u32, size: u64) -> Resource {
        Resource { vm: vm.downgrade(), id, size, memory: Memory::Host(None) }
    }

    /// Bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Writes down where in the window it is.
    pub(super) fn shown_at(&mut self, offset: u64) {
        self.memory = Memory::Host(Some(offset));
    }
}

impl Drop for Resource {
    fn drop(&mut self) {
        // A VM that is gone has let go of everything.
        let Some(vm) = self.vm.upgrade() else { return };
        // One of a parent process is none of ours.
        if vm.usable().is_err() {
            if let Memory::Guest(pages) = &mut self.memory {
                std::mem::forget(pages.take());
            }
            return;
        }
        if let Memory::Host(Some(offset)) = self.memory {
            let kind = gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_UNMAP_BLOB;
            let unmapped = about(&vm, "RESOURCE_UNMAP_BLOB", header(kind, 0), self.id);
            // A place that the device still has mapped is not used again.
            if let (Ok(()), Some(window)) = (unmapped, vm.window()) {
                window.give(offset, self.size);
            }
        }
        // Linux names no context in commands about the resource as such: unref, map and unmap.
        let kind = gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_UNREF;
        let gone = about(&vm, "RESOURCE_UNREF", header(kind, 0), self.id);
        // The pages are free only when the device has let go of them; one that is gone has.
        if let (Memory::Guest(pages), false) =
            (&mut self.memory, matches!(gone, Ok(()) | Err(TransportError::Lost(_))))
        {
            std::mem::forget(pages.take());
        }
    }
}

/// How often each resource is held in a context: it is attached with the first holder and detached with the last.
#[derive(Default)]
pub(super) struct Attached(Mutex<HashMap<u32, usize>>);

/// A holder of a resource in a context.
pub(super) struct ContextBlob {
    context: Arc<Context>,
    resource: Arc<Resource>,
}

impl ContextBlob {
    pub(super) fn attach(context: &Arc<Context>, resource: Arc<Resource>) -> Result<ContextBlob> {
        let mut attached = context.attached.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = attached.get(&resource.id).copied().unwrap_or(0);
        if count == 0 {
            let kind = gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_ATTACH_RESOURCE;
            about(&context.vm, "CTX_ATTACH_RESOURCE", header(kind, context.id), resource.id)?;
        }
        attached.insert(resource.id, count.saturating_add(1));
        drop(attached);
        Ok(ContextBlob { context: Arc::clone(context), resource })
    }
}

impl ContextBlob {
    /// What is held.
    pub(super) fn held(&self) -> &Arc<Resource> {
        &self.resource
    }

    /// The pages of a guest blob.
    pub(super) fn pages(&self) -> Option<&Pages> {
        match &self.resource.memory {
            Memory::Guest(pages) => pages.as_ref(),
            Memory::Host(_) => None,
        }
    }

    /// What the window shows of a host blob.
    pub(super) fn shown(&self) -> Result<Shown> {
        match (&self.resource.memory, self.context.vm.window()) {
            (Memory::Host(Some(offset)), Some(window)) => window.shown(*offset),
            _ => Err(TransportError::NotSupported("a host blob that is not in the window")),
        }
    }
}

impl Drop for ContextBlob {
    fn drop(&mut self) {
        if self.context.vm.usable().is_err() {
            return;
        }
        let mut attached = self.context.attached.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = attached.get(&self.resource.id).copied().unwrap_or(1).saturating_sub(1);
        if left > 0 {
            attached.insert(self.resource.id, left);
            return;
        }
        attached.remove(&self.resource.id);
        let kind = gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_DETACH_RESOURCE;
        // A device that is gone has detached it as well.
        let _ =
            about(&self.context.vm, "CTX_DETACH_RESOURCE", header(kind, self.context.id), self.resource.id);
    }
}

impl Blob for ContextBlob {
    fn resource(&self) -> ResourceId {
        ResourceId(self.resource.id)
    }

    fn size(&self) -> u64 {
        self.resource.size
    }

    fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()> {
        self.context.vm.usable()?;
        whole(length)?;
        match (&self.resource.memory, self.context.vm.window()) {
            (Memory::Guest(Some(pages)), _) => pages.map_fixed(address, length, protection),
            (Memory::Guest(None), _) => Err(TransportError::NotSupported("a blob without pages")),
            (Memory::Host(_), _) if length != self.resource.size => {
                Err(TransportError::NotSupported("mapping a part of a host blob"))
            }
            (Memory::Host(Some(offset)), Some(window)) => {
                window.map_fixed(*offset, address, length, protection)
            }
            (Memory::Host(_), _) => {
                Err(TransportError::NotSupported("a host blob that is not in the window"))
            }
        }
    }

    fn export(&self) -> Result<OwnedFd> {
        self.context.vm.usable()?;
        self.context.vm.exports().add(&self.resource)
    }

    fn mmap_offset(&self) -> Result<u64> {
        match (&self.resource.memory, self.context.vm.window()) {
            (Memory::Host(Some(offset)), Some(window)) => {
                window.offset_in_file(*offset, self.context.file.get().map(Arc::as_ref))
            }
            _ => Err(TransportError::NotSupported("mmap of a blob that is not in the window")),
        }
    }

    fn close_handle(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        Box::new(Arc::clone(&self.resource))
    }
}
