//! User-mode queues and the doorbells of this process.

use std::os::fd::AsFd;

use kfd_abi::kfd::request;
use kfd_abi::mmap::{MmapType, offset as mmap_offset};
use kfd_abi::queue::{
    AllocQueueGwsArgs, ContextSaveAreaHeader, CreateQueueArgs, DOORBELL_SLICE_SIZE_GFX9, DestroyQueueArgs,
    GetQueueWaveStateArgs, SetCuMaskArgs, UpdateQueueArgs,
};
use nix::errno::Errno;

use crate::call::{address, arguments, ioctl};
use crate::error::KfdError;
use crate::kfd::Kfd;
use crate::mapping::Piece;
use crate::words::SharedWords;

arguments! {
    CreateQueueArgs = "AMDKFD_IOC_CREATE_QUEUE", request::CREATE_QUEUE;
    DestroyQueueArgs = "AMDKFD_IOC_DESTROY_QUEUE", request::DESTROY_QUEUE;
    UpdateQueueArgs = "AMDKFD_IOC_UPDATE_QUEUE", request::UPDATE_QUEUE;
    SetCuMaskArgs = "AMDKFD_IOC_SET_CU_MASK", request::SET_CU_MASK;
    GetQueueWaveStateArgs = "AMDKFD_IOC_GET_QUEUE_WAVE_STATE", request::GET_QUEUE_WAVE_STATE;
    AllocQueueGwsArgs = "AMDKFD_IOC_ALLOC_QUEUE_GWS", request::ALLOC_QUEUE_GWS;
}

/// A queue to be made. All addresses are the GPU's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewQueue {
    /// The GPU.
    pub gpu_id: u32,
    /// `KFD_IOC_QUEUE_TYPE_*`
    pub kind: u32,
    /// Address of the ring.
    pub ring: u64,
    /// Its bytes, a power of two.
    pub ring_size: u32,
    /// Address of the write pointer.
    pub write_pointer: u64,
    /// Address of the read pointer.
    pub read_pointer: u64,
    /// Address of the end-of-pipe buffer, or 0.
    pub eop: u64,
    /// Its bytes.
    pub eop_size: u64,
    /// Address of the context save area, or 0.
    pub context_save: u64,
    /// Its bytes.
    pub context_save_size: u32,
    /// Bytes of the control stack in it.
    pub control_stack_size: u32,
    /// Share of the GPU in per cent (bits 0 to 7), and the XCC (bits 8 to 15).
    pub percentage: u32,
    /// 0 to 15.
    pub priority: u32,
    /// The engine, for `KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID`.
    pub sdma_engine_id: u32,
}

/// A queue that the kernel made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Its id in this process.
    pub id: u32,
    /// The word of the process's [`Doorbells`] of the GPU that is its doorbell.
    pub doorbell: u64,
}

/// What a queue is to be from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueUpdate {
    /// Address of the ring; 0 makes the queue inactive.
    pub ring: u64,
    /// Its bytes.
    pub ring_size: u32,
    /// As in [`NewQueue::percentage`]; 0 makes the queue inactive.
    pub percentage: u32,
    /// 0 to 15.
    pub priority: u32,
}

/// What the waves of an inactive queue have left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaveState {
    /// Bytes used of the control stack.
    pub control_stack_used: u32,
    /// Bytes used of the save area.
    pub save_area_used: u32,
    /// What the kernel wrote to the start of the save area: `control_stack_size` bytes, or those of a
    /// [`ContextSaveAreaHeader`] if that is more.
    pub bytes: Vec<u8>,
}

/// This process's doorbells of a GPU: a word for each queue that it can have there.
pub type Doorbells = SharedWords;

impl Kfd {
    /// `AMDKFD_IOC_CREATE_QUEUE`, on a GPU with doorbells of 8 bytes (gfx9 and later).
    pub fn create_queue(&self, queue: &NewQueue) -> Result<Queue, KfdError> {
        let mut args = CreateQueueArgs {
            ring_base_address: queue.ring,
            write_pointer_address: queue.write_pointer,
            read_pointer_address: queue.read_pointer,
            ring_size: queue.ring_size,
            gpu_id: queue.gpu_id,
            queue_type: queue.kind,
            queue_percentage: queue.percentage,
            queue_priority: queue.priority,
            eop_buffer_address: queue.eop,
            eop_buffer_size: queue.eop_size,
            ctx_save_restore_address: queue.context_save,
            ctx_save_restore_size: queue.context_save_size,
            ctl_stack_size: queue.control_stack_size,
            sdma_engine_id: queue.sdma_engine_id,
            ..Default::default()
        };
        ioctl(self.as_fd(), &mut args, || format!("{queue:x?}"))?;
        // The offset within the process's slice stands in the low bits (kfd_ioctl_create_queue, KFD_IS_SOC15).
        let doorbell = (args.doorbell_offset & DOORBELL_SLICE_SIZE_GFX9.saturating_sub(1)) / 8;
        Ok(Queue { id: args.queue_id, doorbell })
    }

    /// The process's doorbells of a GPU, which has to be gfx9 or later; from the first queue on they do not change.
    pub fn doorbells(&self, gpu_id: u32) -> Result<Doorbells, KfdError> {
        let offset = mmap_offset(MmapType::Doorbell, gpu_id);
        // The kernel maps the slice as a whole only (kfd_doorbell_mmap).
        SharedWords::new(&[Piece { file: self.as_fd(), offset, len: DOORBELL_SLICE_SIZE_GFX9 }])
    }

    /// `AMDKFD_IOC_DESTROY_QUEUE`. ETIME says that its waves could not be preempted in time; the queue is gone then too
    /// (pqm_destroy_queue).
    pub fn destroy_queue(&self, id: u32) -> Result<(), KfdError> {
        let mut args = DestroyQueueArgs { queue_id: id, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("queue_id {id}"))
    }

    /// `AMDKFD_IOC_UPDATE_QUEUE`
    pub fn update_queue(&self, id: u32, update: &QueueUpdate) -> Result<(), KfdError> {
        let mut args = UpdateQueueArgs {
            ring_base_address: update.ring,
            queue_id: id,
            ring_size: update.ring_size,
            queue_percentage: update.percentage,
            queue_priority: update.priority,
        };
        ioctl(self.as_fd(), &mut args, || format!("queue_id {id}, {update:x?}"))
    }

    /// `AMDKFD_IOC_SET_CU_MASK`: the compute units that a queue may use. EINVAL for no words, and on GPUs with work group
    /// processors for a pair of units of which one is set.
    pub fn set_cu_mask(&self, id: u32, mask: &[u32]) -> Result<(), KfdError> {
        let mut words = mask.to_vec();
        let bits = u32::try_from(words.len()).ok().and_then(|words| words.checked_mul(u32::BITS));
        let wrong =
            || KfdError::new("AMDKFD_IOC_SET_CU_MASK", format!("{} words", mask.len()), Errno::EINVAL);
        let mut args = SetCuMaskArgs {
            queue_id: id,
            num_cu_mask: bits.ok_or_else(wrong)?,
            cu_mask_ptr: address(&mut words),
        };
        ioctl(self.as_fd(), &mut args, || format!("queue_id {id}, mask {mask:x?}"))
    }

    /// `AMDKFD_IOC_GET_QUEUE_WAVE_STATE` of an inactive compute queue whose control stack has `control_stack_size` bytes.
    pub fn queue_wave_state(&self, id: u32, control_stack_size: u32) -> Result<WaveState, KfdError> {
        // get_wave_state of all mqd managers: the header goes to the start, and on gfx9 the control stack to its place
        // before the end of `control_stack_size` bytes.
        let bytes = (control_stack_size as usize).max(size_of::<ContextSaveAreaHeader>());
        let mut bytes = vec![0u8; bytes];
        let mut args = GetQueueWaveStateArgs {
            ctl_stack_address: address(&mut bytes),
            queue_id: id,
            ..Default::default()
        };
        ioctl(self.as_fd(), &mut args, || format!("queue_id {id}"))?;
        Ok(WaveState {
            control_stack_used: args.ctl_stack_used_size,
            save_area_used: args.save_area_used_size,
            bytes,
        })
    }

    /// `AMDKFD_IOC_ALLOC_QUEUE_GWS`; a count of 0 gives them back. Returns the index of the first.
    pub fn alloc_queue_gws(&self, id: u32, count: u32) -> Result<u32, KfdError> {
        let mut args = AllocQueueGwsArgs { queue_id: id, num_gws: count, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("queue_id {id}, num_gws {count}"))?;
        Ok(args.first_gws)
    }
}
