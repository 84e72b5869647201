//! The guest's driver: contexts, blobs and fences as virtio-gpu commands.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use virtio_bindings::virtio_gpu as gpu;
use virtio_kfd_protocol::version::{CAPSET_ID, CAPSET_VERSION};
use virtio_kfd_protocol::{Capset, Features};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::blob::{Attached, ContextBlob, Resource};
use super::command::{
    CapsetInfo, CreateBlob, CtxCreate, Header, MapBlob, MemEntry, Resource as ResourceBody, Submit, Words,
    header, is_ok, message,
};
use super::queue::Submission;
use super::{LoopbackVm, PAGE, system};
use crate::transport::{Blob, Result, Transport, TransportError};

/// A context: a guest process, to the device.
pub struct LoopbackContext {
    context: Arc<Context>,
    capset: Capset,
}

/// Shared with the blobs, which have to go before it.
pub(super) struct Context {
    pub(super) vm: LoopbackVm,
    pub(super) id: u32,
    pub(super) attached: Attached,
    /// The first file that the device showed something of here: its memory of GPUs for this context, all of which is in one file
    /// as long as there is one GPU. It stands for the guest's render node, for those who map it themselves.
    pub(super) file: OnceLock<Arc<File>>,
    ended: AtomicBool,
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
        Ok(LoopbackContext {
            context: Arc::new(Context {
                vm: vm.clone(),
                id,
                attached: Attached::default(),
                file: OnceLock::new(),
                ended: AtomicBool::new(false),
            }),
            capset,
        })
    }

    /// The context's id on the device.
    pub fn id(&self) -> u32 {
        self.context.id
    }

    /// The VM.
    pub fn vm(&self) -> &LoopbackVm {
        &self.context.vm
    }

    /// Ends the context, whoever still uses it or holds a blob of it: what waits in it ends.
    pub(super) fn end(&self) {
        self.context.end();
    }

    pub(super) fn make_guest_blob(&self, size: u64) -> Result<ContextBlob> {
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
            blob_flags: gpu::VIRTIO_GPU_BLOB_FLAG_USE_MAPPABLE | gpu::VIRTIO_GPU_BLOB_FLAG_USE_SHAREABLE,
            nr_entries: entries.len() as u32,
            blob_id: 0,
            size,
        };
        self.context.create(0, &create, entries.as_bytes())?;
        let made = Resource::guest(vm, resource, size, pages);
        ContextBlob::attach(&self.context, Arc::new(made))
    }

    pub(super) fn make_host_blob(&self, blob_id: u64, size: u64, mappable: bool) -> Result<ContextBlob> {
        self.context.usable()?;
        whole(size)?;
        let vm = &self.context.vm;
        let window =
            vm.window().ok_or(TransportError::NotSupported("host memory (the device has no window)"))?;
        vm.exports().sweep();
        let resource = vm.new_resource_id();
        let flags = if mappable { gpu::VIRTIO_GPU_BLOB_FLAG_USE_MAPPABLE } else { 0 };
        let create = CreateBlob {
            resource_id: resource,
            blob_mem: gpu::VIRTIO_GPU_BLOB_MEM_HOST3D,
            blob_flags: flags | gpu::VIRTIO_GPU_BLOB_FLAG_USE_SHAREABLE,
            nr_entries: 0,
            blob_id,
            size,
        };
        self.context.create(self.context.id, &create, &[])?;
        let mut made = Resource::host(vm, resource, size);
        if mappable {
            let offset = window.take(size)?;
            let body = MapBlob { resource_id: resource, padding: 0, offset };
            let head = header(gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_MAP_BLOB, 0);
            // The answer has the caching mode and padding; all memory here is mapped as the kernel maps it.
            match command(vm, "RESOURCE_MAP_BLOB", head, &body, &[], 8) {
                Ok(_) => {
                    made.shown_at(offset);
                    if let Ok(shown) = window.shown(offset) {
                        self.context.file.get_or_init(|| shown.file);
                    }
                }
                Err(error) => {
                    window.give(offset, size);
                    return Err(error);
                }
            }
        }
        ContextBlob::attach(&self.context, Arc::new(made))
    }

    pub(super) fn take_dma_buf(&self, dma_buf: BorrowedFd<'_>) -> Result<ContextBlob> {
        self.context.usable()?;
        let resource = self.context.vm.exports().find(dma_buf)?;
        ContextBlob::attach(&self.context, resource)
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

/// A command about a resource that is answered without data.
pub(super) fn about(vm: &LoopbackVm, call: &'static str, head: Header, resource: u32) -> Result<()> {
    let body = ResourceBody { resource_id: resource, padding: 0 };
    command(vm, call, head, &body, &[], 0).map(|_| ())
}

impl Context {
    fn usable(&self) -> Result<()> {
        self.vm.usable()
    }

    /// Linux names the context of a HOST3D blob here, and for a GUEST blob none (`verify_blob`); that one the device
    /// learns when the blob is attached.
    fn create(&self, ctx_id: u32, create: &CreateBlob, entries: &[u8]) -> Result<()> {
        let head = header(gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_CREATE_BLOB, ctx_id);
        command(&self.vm, "RESOURCE_CREATE_BLOB", head, create, entries, 0).map(|_| ())
    }
}

impl Context {
    /// Ends it on the device, whoever still has a part in it.
    fn end(&self) {
        if self.usable().is_ok() && !self.ended.swap(true, Ordering::Relaxed) {
            let kind = gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_DESTROY;
            // A device that is gone has ended the context as well.
            let _ = command(&self.vm, "CTX_DESTROY", header(kind, self.id), &(), &[], 0);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.end();
    }
}

impl Transport for LoopbackContext {
    fn capset(&self) -> &Capset {
        &self.capset
    }

    fn submit_and_wait(&self, ring: u8, frame: &[u8], limit: Duration) -> Result<()> {
        let Context { vm, id, .. } = &*self.context;
        vm.usable()?;
        // Linux lets go of memory when the last dma-buf is closed; here that is seen at the next opportunity.
        vm.exports().sweep();
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
        Ok(Box::new(self.make_guest_blob(size)?))
    }

    fn host_memory(&self, blob_id: u64, size: u64, mappable: bool) -> Result<Box<dyn Blob>> {
        Ok(Box::new(self.make_host_blob(blob_id, size, mappable)?))
    }

    fn import(&self, dma_buf: BorrowedFd<'_>) -> Result<Box<dyn Blob>> {
        Ok(Box::new(self.take_dma_buf(dma_buf)?))
    }

    fn device(&self) -> Option<BorrowedFd<'_>> {
        self.context.usable().ok()?;
        Some(self.context.file.get()?.as_fd())
    }

    fn abandon(&self) {
        self.context.vm.abandon();
    }
}

pub(super) fn whole(size: u64) -> Result<()> {
    if size == 0 || !size.is_multiple_of(PAGE) {
        let error = std::io::Error::from_raw_os_error(libc::EINVAL);
        return Err(system("RESOURCE_CREATE_BLOB", format!("{size} bytes, not whole pages"), error));
    }
    Ok(())
}
