//! User-mode queues: create, update, destroy, CU masks, wave state, GWS.

use crate::layout::{Since::KfdMinor, abi_consts, abi_structs};
use crate::version::minor;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of CREATE_QUEUE. 88 bytes before minor 17 (without the last two fields).
    struct CreateQueueArgs = "struct kfd_ioctl_create_queue_args", size 96,
        size_since(KfdMinor(minor::SDMA_ENGINE_ID)) {
        /// In: GPU address of the ring.
        ring_base_address: u64 = 0;
        /// In: address of the write pointer.
        write_pointer_address: u64 = 8;
        /// In: address of the read pointer.
        read_pointer_address: u64 = 16;
        /// Out: mmap offset of the doorbell page, with the doorbell's byte offset within the process's
        /// slice in the low bits (see [`crate::mmap`]).
        doorbell_offset: u64 = 24;
        /// In: size of the ring in bytes, a power of two, at least [`KFD_MIN_QUEUE_RING_SIZE`]
        /// (smaller ones are raised); 0 for a queue without a ring.
        ring_size: u32 = 32;
        /// In: which GPU.
        gpu_id: u32 = 36;
        /// In: `KFD_IOC_QUEUE_TYPE_*`.
        queue_type: u32 = 40;
        /// In: bits 0 to 7: share of the GPU in per cent, 0 to [`KFD_MAX_QUEUE_PERCENTAGE`], 0 makes
        /// the queue inactive; bits 8 to 15: the XCC that runs PM4.
        queue_percentage: u32 = 44;
        /// In: 0 to [`KFD_MAX_QUEUE_PRIORITY`].
        queue_priority: u32 = 48;
        /// Out: the queue's id within the process.
        queue_id: u32 = 52;
        /// In: GPU address of the end-of-pipe buffer.
        eop_buffer_address: u64 = 56;
        /// In: its size in bytes.
        eop_buffer_size: u64 = 64;
        /// In: GPU address of the context save area (CWSR).
        ctx_save_restore_address: u64 = 72;
        /// In: its size in bytes.
        ctx_save_restore_size: u32 = 80;
        /// In: size in bytes of the control stack within it.
        ctl_stack_size: u32 = 84;
        /// In: engine of a [`KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID`] queue.
        sdma_engine_id: u32 = 88, since(KfdMinor(minor::SDMA_ENGINE_ID));
        /// In: size in bytes of the metadata ring behind the ring; padding before minor 22.
        metadata_ring_size: u32 = 92, since(KfdMinor(minor::METADATA_RING));
    }

    /// Argument of DESTROY_QUEUE.
    struct DestroyQueueArgs = "struct kfd_ioctl_destroy_queue_args", size 8 {
        /// In: which queue.
        queue_id: u32 = 0;
        /// Padding.
        pad: u32 = 4;
    }

    /// Argument of UPDATE_QUEUE.
    struct UpdateQueueArgs = "struct kfd_ioctl_update_queue_args", size 24 {
        /// In: GPU address of the ring; 0 makes the queue inactive.
        ring_base_address: u64 = 0;
        /// In: which queue.
        queue_id: u32 = 8;
        /// In: size of the ring in bytes, as in [`CreateQueueArgs::ring_size`].
        ring_size: u32 = 12;
        /// In: as in [`CreateQueueArgs::queue_percentage`].
        queue_percentage: u32 = 16;
        /// In: 0 to [`KFD_MAX_QUEUE_PRIORITY`].
        queue_priority: u32 = 20;
    }

    /// Argument of SET_CU_MASK.
    struct SetCuMaskArgs = "struct kfd_ioctl_set_cu_mask_args", size 16 {
        /// In: which queue.
        queue_id: u32 = 0;
        /// In: number of bits in the mask, a multiple of 32.
        num_cu_mask: u32 = 4;
        /// In: pointer to the mask.
        cu_mask_ptr: u64 = 8;
    }

    /// Argument of GET_QUEUE_WAVE_STATE.
    struct GetQueueWaveStateArgs = "struct kfd_ioctl_get_queue_wave_state_args", size 24 {
        /// In: pointer to memory for the control stack.
        ctl_stack_address: u64 = 0;
        /// Out: bytes used of the control stack.
        ctl_stack_used_size: u32 = 8;
        /// Out: bytes used of the wave save area.
        save_area_used_size: u32 = 12;
        /// In: which queue; it must be inactive.
        queue_id: u32 = 16;
        /// Padding.
        pad: u32 = 20;
    }

    /// Argument of ALLOC_QUEUE_GWS (global wave sync).
    struct AllocQueueGwsArgs = "struct kfd_ioctl_alloc_queue_gws_args", size 16 {
        /// In: which queue.
        queue_id: u32 = 0;
        /// In: how many; 0 gives them back.
        num_gws: u32 = 4;
        /// Out: index of the first.
        first_gws: u32 = 8;
        /// Padding.
        pad: u32 = 12;
    }

    /// Head of a context save area, written by the caller and by the trap handler.
    struct ContextSaveAreaHeader = "struct kfd_context_save_area_header", size 40,
        since(KfdMinor(minor::DEBUGGER)) {
        /// Offset of the control stack in bytes from the area's start.
        control_stack_offset as "wave_state.control_stack_offset": u32 = 0;
        /// Its used size in bytes.
        control_stack_size as "wave_state.control_stack_size": u32 = 4;
        /// Offset of the wave state in bytes.
        wave_state_offset as "wave_state.wave_state_offset": u32 = 8;
        /// Its used size in bytes.
        wave_state_size as "wave_state.wave_state_size": u32 = 12;
        /// Offset of the debugger's memory in bytes.
        debug_offset: u32 = 16;
        /// Its size in bytes.
        debug_size: u32 = 20;
        /// Address of the error payload.
        err_payload_addr: u64 = 24;
        /// Event to set on an error.
        err_event_id: u32 = 32;
        /// Reserved.
        reserved1: u32 = 36;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// PM4 compute queue.
        KFD_IOC_QUEUE_TYPE_COMPUTE = 0;
        /// SDMA queue on an engine for PCIe.
        KFD_IOC_QUEUE_TYPE_SDMA = 1;
        /// AQL compute queue.
        KFD_IOC_QUEUE_TYPE_COMPUTE_AQL = 2;
        /// SDMA queue on an engine for XGMI.
        KFD_IOC_QUEUE_TYPE_SDMA_XGMI = 3;
        /// SDMA queue on the engine of the caller's choice.
        KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID = 4, since(KfdMinor(minor::SDMA_ENGINE_ID));
        /// Largest share of the GPU, in per cent.
        KFD_MAX_QUEUE_PERCENTAGE = 100;
        /// Highest priority.
        KFD_MAX_QUEUE_PRIORITY = 15;
        /// Smallest ring in bytes; smaller ones are raised to it.
        KFD_MIN_QUEUE_RING_SIZE = 1024, since(KfdMinor(minor::UNIFIED_CTX_SAVE_AREA));
    }
}

/// Queues per process and GPU (`KFD_MAX_NUM_OF_QUEUES_PER_PROCESS`, kernel-internal, kfd_priv.h).
pub const KFD_MAX_NUM_OF_QUEUES_PER_PROCESS: u32 = 1024;

/// Size in bytes of a process's doorbell slice on a GPU with 8-byte doorbells (GFX9 and later):
/// `kfd_doorbell_process_slice`, kernel-internal, kfd_doorbell.c.
pub const DOORBELL_SLICE_SIZE_GFX9: u64 = 8 * KFD_MAX_NUM_OF_QUEUES_PER_PROCESS as u64;

/// Size in bytes of a process's doorbell slice on a GPU with 4-byte doorbells (GFX8 and earlier).
pub const DOORBELL_SLICE_SIZE_GFX8: u64 = 4 * KFD_MAX_NUM_OF_QUEUES_PER_PROCESS as u64;

/// Bits of [`CreateQueueArgs::queue_percentage`] that hold the percentage.
pub const QUEUE_PERCENTAGE_MASK: u32 = 0xff;

/// Position of the target XCC in [`CreateQueueArgs::queue_percentage`] (8 bits).
pub const QUEUE_PERCENTAGE_XCC_SHIFT: u32 = 8;
