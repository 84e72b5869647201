//! Doorbells. A guest process rings in memory of its own, which stands for the page of doorbells of a GPU; the host passes
//! on what is stored there for live queues. So no store leaves the VM.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use hsakmt_abi::memory::HsaMemFlags;
use virtio_kfd_protocol::calls::DoorbellPage;
use virtio_kfd_protocol::{DOORBELL_SLICE_BYTES, DoorbellPageRequest};

use super::super::lock::lock;
use super::super::memory::address::page_size;
use super::super::memory::block::Block;
use super::super::memory::{Host, Memory};
use super::super::refusal::{Outcome, Refusal};
use super::super::topology::Gpu;

/// Bytes of a doorbell.
const DOORBELL: u64 = 8;

/// The doorbells of all GPUs that have had a queue. They stay until the close, as those that KFD maps.
#[derive(Default)]
pub struct Doorbells {
    /// By the GPU's id.
    slices: Mutex<BTreeMap<u32, Arc<Block>>>,
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
                Ok(host.client.call::<DoorbellPage>(&request, &[], 0).map(|_| ())?)
            },
        );
        if let Err(refusal) = shown {
            memory.free_block(host.client, &slice)?;
            return Err(refusal);
        }
        let slice = Arc::new(slice);
        slices.insert(gpu.gpu_id.0, Arc::clone(&slice));
        drop(slices);
        made();
        Ok(slice)
    }

    /// Forgets them.
    pub fn release_all(&self) {
        lock(&self.slices).clear();
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
