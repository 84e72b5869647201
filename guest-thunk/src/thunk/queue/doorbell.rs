//! Doorbells. A guest process rings in memory of its own, which stands for the page of doorbells of a GPU; the host passes
//! on what is stored there for live queues. So no store leaves the VM. GPUs have the real doorbells at the same addresses, as
//! natively: what a packet or a kernel stores there rings at once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use hsakmt_abi::memory::HsaMemFlags;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::calls::{AllocMemory, DoorbellPage, FreeMemory, MapMemory, UnmapMemory};
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferRequest, DOORBELL_SLICE_BYTES, DoorbellPageRequest, GpuId, GuestVa, Handle,
    Status,
};

use super::super::lock::lock;
use super::super::memory::address::page_size;
use super::super::memory::block::Block;
use super::super::memory::{Host, Memory};
use super::super::refusal::{Level, Outcome, Refusal, say};
use super::super::topology::Gpu;
use crate::client::Client;

/// Bytes of a doorbell.
const DOORBELL: u64 = 8;

/// How AMD's library has GPUs see doorbells (`fmm_allocate_doorbell`).
const FLAGS: AllocFlags = AllocFlags::DOORBELL
    .union(AllocFlags::WRITABLE)
    .union(AllocFlags::COHERENT)
    .union(AllocFlags::NO_SUBSTITUTE);

/// The doorbells of all GPUs that have had a queue. They stay until the close, as those that KFD maps.
#[derive(Default)]
pub struct Doorbells {
    /// By the GPU's id.
    slices: Mutex<BTreeMap<u32, Arc<Block>>>,
    /// What KFD has of them for GPUs to ring, and where.
    for_gpus: Mutex<Vec<(Handle, GpuId)>>,
}

impl Doorbells {
    /// All of them, by the GPU's id. There are no others meanwhile.
    pub fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<Block>>> {
        lock(&self.slices)
    }

    /// The doorbells of a GPU, made and shown to the host before its first queue; `made` is called then.
    pub fn of(&self, memory: &Memory, host: Host<'_>, gpu: &Gpu, made: impl FnOnce()) -> Outcome<Arc<Block>> {
        let mut slices = lock(&self.slices);
        if let Some(slice) = slices.get(&gpu.gpu_id.0) {
            return Ok(Arc::clone(slice));
        }
        let size = DOORBELL_SLICE_BYTES.next_multiple_of(page_size());
        // A GUEST blob. It keeps itself out of forked children, who must not ring.
        let pinned = HsaMemFlags(0).with(HsaMemFlags::NON_PAGED, 1);
        let slice = memory.guest_block(host, gpu, size, pinned)?;
        // A value that no queue rings with.
        slice.fill(0xff);
        let shown = slice.resource().ok_or_else(|| Refusal::error("doorbells are no guest memory")).and_then(
            |resource| {
                let request = DoorbellPageRequest { gpu_id: gpu.gpu_id, resource, offset: 0 };
                host.client.call::<DoorbellPage>(&request, &[], 0)?;
                show_gpu(host.client, gpu, slice.start())
            },
        );
        match shown {
            Ok(handle) => lock(&self.for_gpus).extend(handle.map(|handle| (handle, gpu.gpu_id))),
            Err(refusal) => {
                memory.free_block(host.client, &slice)?;
                return Err(refusal);
            }
        }
        let slice = Arc::new(slice);
        slices.insert(gpu.gpu_id.0, Arc::clone(&slice));
        drop(slices);
        made();
        Ok(slice)
    }

    /// Forgets them, and has KFD do so. After an error that is left to the end of the connection.
    pub fn release_all(&self, client: &Client) {
        lock(&self.slices).clear();
        for (handle, gpu) in lock(&self.for_gpus).drain(..) {
            let buffer = BufferRequest { handle };
            let _ = client.call::<UnmapMemory>(&buffer, &[gpu], 0);
            let _ = client.call::<FreeMemory>(&buffer, &[], 0);
        }
    }
}

/// Has the GPU's doorbells at these addresses of the GPU. None where the host cannot.
fn show_gpu(client: &Client, gpu: &Gpu, start: u64) -> Outcome<Option<Handle>> {
    let request = AllocMemoryRequest {
        va: GuestVa(start),
        size: DOORBELL_SLICE_BYTES,
        gpu_id: gpu.gpu_id,
        flags: FLAGS.bits(),
        ..Default::default()
    };
    let handle = match client.call::<AllocMemory>(&request, &[], 0) {
        Ok((answer, _)) => answer.handle,
        // An older host: a GPU gets a fault where it rings, all else works.
        Err(error) if matches!(error.status(), Some((Status::NOT_SUPPORTED, _))) => {
            say(Level::Info, || format!("GPU {} cannot ring doorbells: {error}", gpu.gpu_id.0));
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let buffer = BufferRequest { handle };
    let mapped = client.call::<MapMemory>(&buffer, &[gpu.gpu_id], 0);
    match mapped.map_err(Refusal::from).and_then(|(answer, _)| match answer.errno {
        0 => Ok(()),
        errno => Err(Refusal::error(format!("doorbells of GPU {}: errno {errno}", gpu.gpu_id.0))),
    }) {
        Ok(()) => Ok(Some(handle)),
        Err(refusal) => {
            // Else the connection's end frees it.
            let _ = client.call::<FreeMemory>(&buffer, &[], 0);
            Err(refusal)
        }
    }
}

/// The address of a doorbell that the host named.
pub fn address(slice: &Block, offset: u32) -> Outcome<u64> {
    let offset = u64::from(offset);
    let fits = offset.is_multiple_of(DOORBELL) && offset < DOORBELL_SLICE_BYTES;
    let wrong =
        || Refusal::error(format!("the host gave a doorbell at {offset:#x}, expected 8 bytes below 0x2000"));
    fits.then(|| slice.start().saturating_add(offset)).ok_or_else(wrong)
}
