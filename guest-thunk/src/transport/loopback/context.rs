//! The guest's driver: contexts, blobs and fences as virtio-gpu commands.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use virtio_bindings::virtio_gpu as gpu;
use virtio_kfd_protocol::version::{CAPSET_ID, CAPSET_VERSION};
use virtio_kfd_protocol::{Capset, Features, GuestVa, Handle, ResourceId};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::command::{
    CapsetInfo, CreateBlob, CtxCreate, Header, MapBlob, MemEntry, Resource, Submit, Words, header, is_ok,
    message,
};
use super::queue::Submission;
use super::ram::Pages;
use super::{LoopbackVm, PAGE, system};
use crate::transport::{Blob, Result, Transport, TransportError};

/// A context: a guest process, to the device.
pub struct LoopbackContext {
    context: Arc<Context>,
    capset: Capset,
}

/// Shared with the blobs, which have to go before it.
struct Context {
    vm: LoopbackVm,
    id: u32,
}

const HEADER: usize = size_of::<Header>();

/// Sends a command and checks its response; gives the bytes after the header.
fn command<B: IntoBytes + Immutable>(
    vm: &LoopbackVm,
    call: &'static str,
    head: Header,
    body: &B,
    data: &[u8],
    answer: usize,
) -> Result<Vec<u8>> {
    let capacity = HEADER.saturating_add(answer);
    let mut response = vm.command(&message(&head, body), data, capacity)?;
    let (answered, _) = Header::read_from_prefix(&response)
        .map_err(|_| TransportError::Lost(format!("{call}: a response of {} bytes", response.len())))?;
    if !is_ok(answered.kind) {
        let error = std::io::Error::from_raw_os_error(libc::EIO);
        return Err(system(call, format!("the device answered {:#x}", answered.kind), error));
    }
    Ok(response.split_off(HEADER))
}

impl LoopbackContext {
    pub(super) fn new(vm: &LoopbackVm) -> Result<LoopbackContext> {
        vm.usable()?;
        let mut capset = read_capset(vm)?;
        if vm.window().is_none() {
            capset.features &= !Features::HOST_BLOBS.bits();
        }
        let id = vm.new_context_id();
        let name = b"loop-back";
        let mut create = CtxCreate { nlen: name.len() as u32, context_init: CAPSET_ID, debug_name: [0; 64] };
        for (place, byte) in create.debug_name.iter_mut().zip(name) {
            *place = *byte;
        }
        let kind = gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_CREATE;
        command(vm, "CTX_CREATE", header(kind, id), &create, &[], 0)?;
        Ok(LoopbackContext { context: Arc::new(Context { vm: vm.clone(), id }), capset })
    }

    /// The context's id on the device.
    pub fn id(&self) -> u32 {
        self.context.id
    }

    /// The VM.
    pub fn vm(&self) -> &LoopbackVm {
        &self.context.vm
    }
}

/// Finds our capset among the device's and reads it, as the driver does when it is loaded.
fn read_capset(vm: &LoopbackVm) -> Result<Capset> {
    let mut found = Vec::new();
    let kind = gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_GET_CAPSET_INFO;
    for index in 0..vm.config().num_capsets {
        let body = Words { first: index, second: 0 };
        let answer = command(vm, "GET_CAPSET_INFO", header(kind, 0), &body, &[], size_of::<CapsetInfo>())?;
        let (info, _) = CapsetInfo::read_from_prefix(&answer).map_err(|_| {
            TransportError::NoDevice(format!("GET_CAPSET_INFO was answered with {} bytes", answer.len()))
        })?;
        if info.capset_id != CAPSET_ID || info.capset_max_version < CAPSET_VERSION {
            found.push(format!("{} version {}", info.capset_id, info.capset_max_version));
            continue;
        }
        let size = (info.capset_max_size as usize).min(PAGE as usize - HEADER);
        let body = Words { first: CAPSET_ID, second: CAPSET_VERSION };
        let kind = gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_GET_CAPSET;
        let bytes = command(vm, "GET_CAPSET", header(kind, 0), &body, &[], size)?;
        return Ok(Capset::parse(&bytes)?);
    }
    Err(TransportError::NoDevice(format!(
        "its capsets are [{}], expected {CAPSET_ID} version {CAPSET_VERSION}",
        found.join(", ")
    )))
}

impl Context {
    fn usable(&self) -> Result<()> {
        self.vm.usable()
    }

    /// A command about a resource that is answered without data.
    fn about(&self, call: &'static str, head: Header, resource: u32) -> Result<()> {
        let body = Resource { resource_id: resource, padding: 0 };
        command(&self.vm, call, head, &body, &[], 0).map(|_| ())
    }

    /// Linux names the context of a HOST3D blob here, and for a GUEST blob none (`verify_blob`); that one the device
    /// learns when the blob is attached.
    fn create(&self, ctx_id: u32, create: &CreateBlob, entries: &[u8]) -> Result<()> {
        let head = header(gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_CREATE_BLOB, ctx_id);
        command(&self.vm, "RESOURCE_CREATE_BLOB", head, create, entries, 0).map(|_| ())
    }

    fn attach(&self, resource: u32) -> Result<()> {
        let head = header(gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_ATTACH_RESOURCE, self.id);
        self.about("CTX_ATTACH_RESOURCE", head, resource)
    }

    fn detach(&self, resource: u32) -> Result<()> {
        let head = header(gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_DETACH_RESOURCE, self.id);
        self.about("CTX_DETACH_RESOURCE", head, resource)
    }

    /// Linux names no context in commands about the resource as such: unref, map and unmap.
    fn unref(&self, resource: u32) -> Result<()> {
        let head = header(gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_UNREF, 0);
        self.about("RESOURCE_UNREF", head, resource)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.usable().is_ok() {
            let kind = gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_DESTROY;
            // A device that is gone has ended the context as well.
            let _ = command(&self.vm, "CTX_DESTROY", header(kind, self.id), &(), &[], 0);
        }
    }
}

impl Transport for LoopbackContext {
    fn capset(&self) -> &Capset {
        &self.capset
    }

    fn submit_and_wait(&self, ring: u8, frame: &[u8], limit: Duration) -> Result<()> {
        let Context { vm, id } = &*self.context;
        vm.usable()?;
        let size =
            u32::try_from(frame.len()).map_err(|_| TransportError::NotSupported("a frame of 4 GiB"))?;
        let head = header(gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_SUBMIT_3D, *id);
        let submission = Submission {
            command: &message(&head, &Submit { size, padding: 0 }),
            data: frame,
            capacity: HEADER,
            timeline: Some((*id, ring)),
        };
        let pending = vm.control_queue().submit(&submission)?;
        let response = pending.fence(limit)?;
        let answered = response.as_deref().and_then(|bytes| Header::read_from_prefix(bytes).ok());
        match answered {
            // The driver of a guest does not look either; but a person may have to.
            Some((answered, _)) if !is_ok(answered.kind) => {
                Err(TransportError::Lost(format!("SUBMIT_3D: the device answered {:#x}", answered.kind)))
            }
            _ => Ok(()),
        }
    }

    fn guest_blob(&self, size: u64) -> Result<Box<dyn Blob>> {
        self.context.usable()?;
        whole(size)?;
        let vm = &self.context.vm;
        let pages = vm.ram().take(size)?;
        let mut entries = Vec::new();
        for run in pages.runs() {
            let (mut addr, mut left) = (run.address, run.length);
            while left > 0 {
                // The length has 32 bits; pieces are whole pages.
                let length = left.min(1 << 31);
                entries.push(MemEntry { addr, length: length as u32, padding: 0 });
                addr = addr.saturating_add(length);
                left = left.saturating_sub(length);
            }
        }
        let resource = vm.new_resource_id();
        let create = CreateBlob {
            resource_id: resource,
            blob_mem: gpu::VIRTIO_GPU_BLOB_MEM_GUEST,
            blob_flags: gpu::VIRTIO_GPU_BLOB_FLAG_USE_MAPPABLE,
            nr_entries: entries.len() as u32,
            blob_id: 0,
            size,
        };
        self.context.create(0, &create, entries.as_bytes())?;
        let blob = GuestBlob { context: Arc::clone(&self.context), resource, size, pages: Some(pages) };
        self.context.attach(resource)?;
        Ok(Box::new(blob))
    }

    fn host_blob(&self, buffer: Handle, size: u64) -> Result<Box<dyn Blob>> {
        self.context.usable()?;
        whole(size)?;
        let vm = &self.context.vm;
        let window =
            vm.window().ok_or(TransportError::NotSupported("host memory (the device has no window)"))?;
        let resource = vm.new_resource_id();
        let create = CreateBlob {
            resource_id: resource,
            blob_mem: gpu::VIRTIO_GPU_BLOB_MEM_HOST3D,
            blob_flags: gpu::VIRTIO_GPU_BLOB_FLAG_USE_MAPPABLE,
            nr_entries: 0,
            blob_id: buffer.0,
            size,
        };
        self.context.create(self.context.id, &create, &[])?;
        let mut blob = HostBlob { context: Arc::clone(&self.context), resource, size, place: None };
        let offset = window.take(size)?;
        let body = MapBlob { resource_id: resource, padding: 0, offset };
        let head = header(gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_MAP_BLOB, 0);
        // The answer has the caching mode and padding; all memory here is mapped as the kernel maps it.
        match command(vm, "RESOURCE_MAP_BLOB", head, &body, &[], 8) {
            Ok(_) => blob.place = Some(offset),
            Err(error) => {
                window.give(offset, size);
                return Err(error);
            }
        }
        self.context.attach(resource)?;
        Ok(Box::new(blob))
    }

    fn device(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn abandon(&self) {
        self.context.vm.abandon();
    }
}

fn whole(size: u64) -> Result<()> {
    if size == 0 || !size.is_multiple_of(PAGE) {
        let error = std::io::Error::from_raw_os_error(libc::EINVAL);
        return Err(system("RESOURCE_CREATE_BLOB", format!("{size} bytes, not whole pages"), error));
    }
    Ok(())
}

struct GuestBlob {
    context: Arc<Context>,
    resource: u32,
    size: u64,
    pages: Option<Pages>,
}

impl Blob for GuestBlob {
    fn resource(&self) -> ResourceId {
        ResourceId(self.resource)
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()> {
        self.context.usable()?;
        whole(length)?;
        match &self.pages {
            Some(pages) => pages.map_fixed(address, length, protection),
            None => Err(TransportError::NotSupported("a blob without pages")),
        }
    }
}

impl Drop for GuestBlob {
    fn drop(&mut self) {
        let gone = match self.context.usable() {
            // The pages are free only when the device has let go of them; one that is gone has.
            Ok(()) => {
                // Not attached if its creation failed halfway.
                let _ = self.context.detach(self.resource);
                matches!(self.context.unref(self.resource), Ok(()) | Err(TransportError::Lost(_)))
            }
            Err(_) => false,
        };
        if !gone {
            std::mem::forget(self.pages.take());
        }
    }
}

struct HostBlob {
    context: Arc<Context>,
    resource: u32,
    size: u64,
    /// Offset in the window.
    place: Option<u64>,
}

impl Blob for HostBlob {
    fn resource(&self) -> ResourceId {
        ResourceId(self.resource)
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()> {
        self.context.usable()?;
        whole(length)?;
        if length != self.size {
            return Err(TransportError::NotSupported("mapping a part of a host blob"));
        }
        match (self.place, self.context.vm.window()) {
            (Some(offset), Some(window)) => window.map_fixed(offset, address, length, protection),
            _ => Err(TransportError::NotSupported("a host blob that is not in the window")),
        }
    }
}

impl Drop for HostBlob {
    fn drop(&mut self) {
        if self.context.usable().is_err() {
            return;
        }
        // Not attached if its creation failed halfway.
        let _ = self.context.detach(self.resource);
        if let Some(offset) = self.place.take() {
            let head = header(gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_UNMAP_BLOB, 0);
            let unmapped = self.context.about("RESOURCE_UNMAP_BLOB", head, self.resource);
            // A place that the device still has mapped is not used again.
            if let (Ok(()), Some(window)) = (unmapped, self.context.vm.window()) {
                window.give(offset, self.size);
            }
        }
        // A device that is gone has let go of the resource as well.
        let _ = self.context.unref(self.resource);
    }
}
