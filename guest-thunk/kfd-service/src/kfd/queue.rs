//! Queues.

use std::collections::BTreeMap;
use std::sync::Mutex;

use guest_thunk::thunk::lock::lock;
use kfd_abi::mmap::{self, MmapType};
use kfd_abi::queue::{
    AllocQueueGwsArgs, ContextSaveAreaHeader, CreateQueueArgs, DestroyQueueArgs, GetQueueWaveStateArgs,
    SetCuMaskArgs, UpdateQueueArgs,
};
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{
    AllocQueueGws, CreateQueue, DestroyQueue, GetQueueWaveState, SetCuMask, UpdateQueue,
};
use virtio_kfd_protocol::limits::{MAX_CONTROL_STACK_BYTES, MAX_CU_MASK_WORDS};
use virtio_kfd_protocol::{
    AllocQueueGwsRequest, CreateQueueRequest, DOORBELL_SLICE_BYTES, GuestVa, QueueId, QueueRequest,
    UpdateQueueRequest,
};

use super::Call;
use crate::failure::errno;

/// Bytes that the kernel writes of a save area's header: `wave_state`.
const WAVE_STATE: usize = std::mem::offset_of!(ContextSaveAreaHeader, debug_offset);

/// What is to be known of queues later.
#[derive(Default)]
pub struct Queues {
    /// Bytes of the control stack by id.
    control_stacks: Mutex<BTreeMap<u32, u32>>,
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
            self.kfd.doorbells.make(gpu_id)?;
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
