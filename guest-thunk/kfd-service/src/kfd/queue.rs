//! Queues and their doorbells.
#![allow(unsafe_code, reason = "doorbells are memory that the host looks at")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use guest_thunk::client::Client;
use guest_thunk::thunk::lock::lock;
use guest_thunk::thunk::memory::address::{Reservation, page_size};
use guest_thunk::transport::Blob;
use kfd_abi::mmap::{self, MmapType};
use kfd_abi::queue::{
    AllocQueueGwsArgs, ContextSaveAreaHeader, CreateQueueArgs, DestroyQueueArgs, GetQueueWaveStateArgs,
    SetCuMaskArgs, UpdateQueueArgs,
};
use kfd_seam::{MapRequest, Result, UserMemory, UserPtr};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{
    AllocQueueGws, CreateQueue, DestroyQueue, DoorbellPage, GetQueueWaveState, SetCuMask, UpdateQueue,
};
use virtio_kfd_protocol::limits::{MAX_CONTROL_STACK_BYTES, MAX_CU_MASK_WORDS};
use virtio_kfd_protocol::{
    AllocQueueGwsRequest, CreateQueueRequest, DOORBELL_SLICE_BYTES, DoorbellPageRequest, GpuId, GuestVa,
    QueueId, QueueRequest, UpdateQueueRequest,
};

use super::Call;
use crate::buffers::map_blob;
use crate::failure::{errno, transport};

/// Bytes that the kernel writes of a save area's header: `wave_state`.
const WAVE_STATE: usize = std::mem::offset_of!(ContextSaveAreaHeader, debug_offset);

/// What is to be known of queues later.
#[derive(Default)]
pub struct Queues {
    /// Bytes of the control stack by id.
    control_stacks: Mutex<BTreeMap<u32, u32>>,
}

/// The doorbells of a GPU: guest memory, of which the host passes on what is stored there.
struct Slice {
    blob: Arc<dyn Blob>,
    /// Where this library has them.
    _home: Reservation,
}

/// The doorbells of all GPUs that have been asked for them. They stay, as those that KFD maps.
#[derive(Default)]
pub struct Doorbells {
    slices: Mutex<BTreeMap<u32, Slice>>,
}

impl Doorbells {
    /// Makes those of a GPU and shows them to the host, if that has not been done.
    pub fn make(&self, client: &Client, gpu_id: GpuId) -> Result<()> {
        let mut slices = lock(&self.slices);
        if slices.contains_key(&gpu_id.0) {
            return Ok(());
        }
        let size = DOORBELL_SLICE_BYTES.next_multiple_of(page_size());
        let failed = |error: std::io::Error| error.raw_os_error().map_or(Errno::ENOMEM, Errno::from_raw);
        let home = Reservation::new(size, page_size(), 0, (0, u64::MAX)).map_err(failed)?;
        let blob: Arc<dyn Blob> = Arc::from(client.guest_memory(size).map_err(errno)?);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        blob.map_fixed(GuestVa(home.start()), size, protection).map_err(transport)?;
        home.keep_from_children();
        quiet(&home);
        let request = DoorbellPageRequest { gpu_id, resource: blob.resource(), offset: 0 };
        client.call::<DoorbellPage>(&request, &[], 0).map_err(errno)?;
        slices.insert(gpu_id.0, Slice { blob, _home: home });
        Ok(())
    }

    /// Serves an `mmap` of them.
    pub fn map(&self, request: &MapRequest, address: u64) -> Result<u64> {
        let gpu_id = mmap::gpu_id(request.offset);
        let slices = lock(&self.slices);
        // KFD's numbers have 16 bits.
        let slice = slices.iter().find(|(id, _)| *id & 0xffff == gpu_id).map(|(_, slice)| slice);
        let slice = slice.ok_or(Errno::EINVAL)?;
        if request.length != DOORBELL_SLICE_BYTES || request.flags & libc::MAP_SHARED == 0 {
            return Err(Errno::EINVAL);
        }
        map_blob(&*slice.blob, request, address, slice.blob.size())
    }
}

/// Fills doorbells with a value that no queue rings with.
fn quiet(home: &Reservation) {
    let (Ok(start), Ok(size)) = (usize::try_from(home.start()), usize::try_from(home.size())) else { return };
    // SAFETY: the range is the reservation's, a blob was mapped there for writing, and nobody else knows of it yet.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(start).write_bytes(0xff, size) };
}

fn queue(id: u32) -> QueueRequest {
    QueueRequest { queue: QueueId(id), pad: 0 }
}

impl Call<'_> {
    pub(super) fn create_queue(&self) -> Result<i32> {
        self.run(|arguments: &mut CreateQueueArgs| {
            // A ring for metadata came after the wire.
            if arguments.metadata_ring_size != 0 {
                return Err(Errno::EINVAL);
            }
            let gpu_id = self.kfd.gpu(arguments.gpu_id).ok_or(Errno::EINVAL)?.gpu_id;
            let client = &self.kfd.client;
            self.kfd.doorbells.make(client, gpu_id)?;
            let request = CreateQueueRequest {
                ring_va: GuestVa(arguments.ring_base_address),
                write_pointer_va: GuestVa(arguments.write_pointer_address),
                read_pointer_va: GuestVa(arguments.read_pointer_address),
                eop_va: GuestVa(arguments.eop_buffer_address),
                eop_size: arguments.eop_buffer_size,
                context_save_va: GuestVa(arguments.ctx_save_restore_address),
                context_save_size: arguments.ctx_save_restore_size,
                control_stack_size: arguments.ctl_stack_size,
                ring_size: arguments.ring_size,
                gpu_id,
                kind: arguments.queue_type,
                percentage: arguments.queue_percentage,
                priority: arguments.queue_priority,
                sdma_engine_id: arguments.sdma_engine_id,
            };
            let (answer, _) = client.call::<CreateQueue>(&request, &[], 0).map_err(errno)?;
            let offset = u64::from(answer.doorbell_offset);
            if offset >= DOORBELL_SLICE_BYTES {
                // A queue that nobody could ring.
                client.call::<DestroyQueue>(&queue(answer.queue.0), &[], 0).map_err(errno)?;
                return Err(Errno::EIO);
            }
            arguments.queue_id = answer.queue.0;
            arguments.doorbell_offset = mmap::offset(MmapType::Doorbell, gpu_id.0) | offset;
            lock(&self.kfd.queues.control_stacks).insert(answer.queue.0, arguments.ctl_stack_size);
            Ok(())
        })
    }

    pub(super) fn destroy_queue(&self) -> Result<i32> {
        self.run(|arguments: &mut DestroyQueueArgs| {
            self.kfd.client.call::<DestroyQueue>(&queue(arguments.queue_id), &[], 0).map_err(errno)?;
            lock(&self.kfd.queues.control_stacks).remove(&arguments.queue_id);
            Ok(())
        })
    }

    pub(super) fn update_queue(&self) -> Result<i32> {
        self.run(|arguments: &mut UpdateQueueArgs| {
            let request = UpdateQueueRequest {
                ring_va: GuestVa(arguments.ring_base_address),
                queue: QueueId(arguments.queue_id),
                ring_size: arguments.ring_size,
                percentage: arguments.queue_percentage,
                priority: arguments.queue_priority,
            };
            self.kfd.client.call::<UpdateQueue>(&request, &[], 0).map_err(errno)?;
            Ok(())
        })
    }

    pub(super) fn set_cu_mask(&self) -> Result<i32> {
        self.run(|arguments: &mut SetCuMaskArgs| {
            if arguments.num_cu_mask == 0 || !arguments.num_cu_mask.is_multiple_of(u32::BITS) {
                return Err(Errno::EINVAL);
            }
            // The kernel takes no more.
            let words = usize::try_from(arguments.num_cu_mask / u32::BITS).unwrap_or(usize::MAX);
            let words = words.min(MAX_CU_MASK_WORDS);
            let mask = UserMemory.read_array::<u32>(UserPtr(arguments.cu_mask_ptr), words, words)?;
            self.kfd.client.call::<SetCuMask>(&queue(arguments.queue_id), &mask, 0).map_err(errno)?;
            Ok(())
        })
    }

    /// Writes what the host's kernel wrote, to where it would write it: the start of the header, and the used part of the
    /// control stack where the kernel has it.
    pub(super) fn get_queue_wave_state(&self) -> Result<i32> {
        self.run(|arguments: &mut GetQueueWaveStateArgs| {
            let request = queue(arguments.queue_id);
            let client = &self.kfd.client;
            let (answer, bytes) =
                client.call::<GetQueueWaveState>(&request, &[], MAX_CONTROL_STACK_BYTES).map_err(errno)?;
            let place = UserPtr(arguments.ctl_stack_address);
            UserMemory.write_bytes(place, bytes.get(..WAVE_STATE).unwrap_or(&bytes))?;
            let size = lock(&self.kfd.queues.control_stacks).get(&arguments.queue_id).copied().unwrap_or(0);
            let top = size.checked_sub(answer.control_stack_used).ok_or(Errno::EIO)?;
            let from = usize::try_from(top).unwrap_or(usize::MAX);
            let to = usize::try_from(size).unwrap_or(usize::MAX);
            if from >= WAVE_STATE
                && let Some(stack) = bytes.get(from..to)
            {
                UserMemory.write_bytes(place.offset(top.into())?, stack)?;
            }
            arguments.ctl_stack_used_size = answer.control_stack_used;
            arguments.save_area_used_size = answer.save_area_used;
            Ok(())
        })
    }

    pub(super) fn alloc_queue_gws(&self) -> Result<i32> {
        self.run(|arguments: &mut AllocQueueGwsArgs| {
            let request =
                AllocQueueGwsRequest { queue: QueueId(arguments.queue_id), count: arguments.num_gws };
            let (answer, _) = self.kfd.client.call::<AllocQueueGws>(&request, &[], 0).map_err(errno)?;
            arguments.first_gws = answer.first;
            Ok(())
        })
    }
}
