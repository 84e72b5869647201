//! User-mode queues and their doorbells.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{GpuId, GuestVa, QueueId, ResourceId};

/// `struct kfd_ioctl_create_queue_args`: what goes in. All addresses are addresses of the guest process, which
/// are the GPU's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CreateQueueRequest {
    /// The ring.
    pub ring_va: GuestVa,
    /// The write pointer.
    pub write_pointer_va: GuestVa,
    /// The read pointer.
    pub read_pointer_va: GuestVa,
    /// The end-of-pipe buffer, or 0.
    pub eop_va: GuestVa,
    /// Its size in bytes.
    pub eop_size: u64,
    /// The context save area, or 0.
    pub context_save_va: GuestVa,
    /// Its size in bytes.
    pub context_save_size: u32,
    /// Bytes of the control stack within it.
    pub control_stack_size: u32,
    /// Bytes of the ring, a power of two.
    pub ring_size: u32,
    /// The GPU.
    pub gpu_id: GpuId,
    /// `KFD_IOC_QUEUE_TYPE_*`
    pub kind: u32,
    /// Share of the GPU in per cent, and the XCC (see `queue_percentage` in kfd_ioctl.h).
    pub percentage: u32,
    /// 0 to 15.
    pub priority: u32,
    /// Engine of a `KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID` queue.
    pub sdma_engine_id: u32,
}

/// Answer to a new queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CreateQueueAnswer {
    /// The queue.
    pub queue: QueueId,
    /// Where its doorbell is in the GPU's slice of doorbells, in bytes; a multiple of 8. The shadow
    /// ([`DoorbellPageRequest`]) has it in the same place.
    pub doorbell_offset: u32,
}

/// A request that names a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct QueueRequest {
    /// The queue.
    pub queue: QueueId,
    /// Zero.
    pub pad: u32,
}

/// `struct kfd_ioctl_update_queue_args`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct UpdateQueueRequest {
    /// The ring, or 0 to make the queue inactive.
    pub ring_va: GuestVa,
    /// The queue.
    pub queue: QueueId,
    /// Bytes of the ring.
    pub ring_size: u32,
    /// Share of the GPU in per cent; 0 makes the queue inactive.
    pub percentage: u32,
    /// 0 to 15.
    pub priority: u32,
}

/// `struct kfd_ioctl_get_queue_wave_state_args`: what comes out. The tail of the answer is what the kernel wrote to the
/// start of the save area: the first 16 bytes of `struct kfd_context_save_area_header`, and on gfx9 the rest of the
/// control stack's bytes up to its size (from gfx10 on the GPU has them in the save area already).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct QueueWaveStateAnswer {
    /// Bytes used of the control stack.
    pub control_stack_used: u32,
    /// Bytes used of the save area.
    pub save_area_used: u32,
}

/// `struct kfd_ioctl_alloc_queue_gws_args`: what goes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AllocQueueGwsRequest {
    /// The queue.
    pub queue: QueueId,
    /// How many; 0 gives them back.
    pub count: u32,
}

/// Answer to a request for global wave sync.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AllocQueueGwsAnswer {
    /// Index of the first.
    pub first: u32,
    /// Zero.
    pub pad: u32,
}

/// Guest memory that stands for a GPU's slice of doorbells, [`DOORBELL_SLICE_BYTES`] of it. What the guest
/// process stores there for a queue goes on to the queue's doorbell, 8 bytes at a time. The host stores all ones where the doorbell of a
/// new queue is, before it answers. The page is good until its blob, or the memory region under it, is given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DoorbellPageRequest {
    /// The GPU.
    pub gpu_id: GpuId,
    /// A GUEST blob of this context.
    pub resource: ResourceId,
    /// Offset in the blob in bytes; a multiple of the page size.
    pub offset: u64,
}

/// Bytes of the doorbells of a process on a GPU (`kfd_doorbell_process_slice`, gfx9 and later).
pub const DOORBELL_SLICE_BYTES: u64 = 8192;

/// How long the doorbells have to be still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WaitDoorbellsRequest {
    /// Longest wait in milliseconds.
    pub timeout_ms: u32,
    /// Zero.
    pub pad: u32,
}

/// Answer to a wait for still doorbells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WaitDoorbellsAnswer {
    /// 1 if no doorbell has rung for a while, 0 if the time was over before.
    pub still: u32,
    /// Zero.
    pub pad: u32,
}

/// Whether the guest's stores into the doorbells trap. So that no store is lost, one thread at a time makes them trap and
/// then says so here, or lets them pass again and then says that; a store that trapped goes on after the latter.
/// [`DoorbellPageRequest`] has the host look on as with 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RingDoorbellsRequest {
    /// 1: every store from now on is announced by another such call with 0, so the host need not look any
    /// more after it has looked once. 0: look now, and go on looking.
    pub armed: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<CreateQueueRequest>() == 80);
const _: () = assert!(size_of::<UpdateQueueRequest>() == 24);
const _: () = assert!(size_of::<DoorbellPageRequest>() == 16);
