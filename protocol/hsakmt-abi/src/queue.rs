//! Queues.

use crate::bits::abi_enums;
use crate::layout::{abi_consts, abi_structs};

/// Id of a queue (`HSA_QUEUEID`).
pub type HsaQueueId = u64;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// What `hsaKmtCreateQueue` gives. All members but the first are addresses in the process.
    struct HsaQueueResource = "HsaQueueResource", size 40, pack 4 {
        /// Out: the queue's id.
        queue_id as "QueueId": u64 = 0;
        /// Out: address of the doorbell.
        queue_door_bell as "QueueDoorBell": u64 = 8;
        /// In: address of the write pointer, 0 to have one made. Out: the address.
        queue_wptr_value as "QueueWptrValue": u64 = 16;
        /// In: address of the read pointer, 0 to have one made. Out: the address.
        queue_rptr_value as "QueueRptrValue": u64 = 24;
        /// In: address of the word that gets exception bits, 0 for none.
        error_reason as "ErrorReason": u64 = 32;
    }

    /// What `hsaKmtGetQueueInfo` gives. Addresses are those of the process.
    struct HsaQueueInfo = "HsaQueueInfo", size 68, pack 4 {
        /// Error state of the hardware.
        queue_detail_error as "QueueDetailError": u32 = 0;
        /// More about the type, 0 for nothing.
        queue_type_extended as "QueueTypeExtended": u32 = 4;
        /// Bits in the compute unit mask, a multiple of 32.
        num_cu_assigned as "NumCUAssigned": u32 = 8;
        /// Address of the mask.
        cu_mask_info as "CUMaskInfo": u64 = 12;
        /// Address of the context save area.
        user_context_save_area as "UserContextSaveArea": u64 = 20;
        /// Its size in bytes.
        save_area_size_in_bytes as "SaveAreaSizeInBytes": u64 = 28;
        /// Address of the top of the control stack.
        control_stack_top as "ControlStackTop": u64 = 36;
        /// Bytes used of the control stack.
        control_stack_used_in_bytes as "ControlStackUsedInBytes": u64 = 44;
        /// Address of an [`HsaUserContextSaveAreaHeader`].
        save_area_header as "SaveAreaHeader": u64 = 52;
        /// Reserved.
        reserved2 as "Reserved2": u64 = 60;
    }

    /// Head of a context save area.
    struct HsaUserContextSaveAreaHeader = "HsaUserContextSaveAreaHeader", size 40, pack 4 {
        /// Offset of the control stack's top in bytes from the area's start.
        control_stack_offset as "ControlStackOffset": u32 = 0;
        /// Its size in bytes.
        control_stack_size as "ControlStackSize": u32 = 4;
        /// Offset of the wave state in bytes.
        wave_state_offset as "WaveStateOffset": u32 = 8;
        /// Its size in bytes.
        wave_state_size as "WaveStateSize": u32 = 12;
        /// Offset of the debugger's memory in bytes.
        debug_offset as "DebugOffset": u32 = 16;
        /// Its size in bytes.
        debug_size as "DebugSize": u32 = 20;
        /// Address of the word that gets exception bits.
        error_reason as "ErrorReason": u64 = 24;
        /// Event to set on an exception.
        error_event_id as "ErrorEventId": u32 = 32;
        /// Reserved.
        reserved1 as "Reserved1": u32 = 36;
    }

    /// For `hsaKmtReportQueue`, which no release exports.
    struct HsaQueueReport = "HsaQueueReport", size 20, pack 4 {
        /// VMID.
        vmid as "VMID": u32 = 0;
        /// Address of the ring.
        queue_address as "QueueAddress": u64 = 4;
        /// Its size in bytes.
        queue_size as "QueueSize": u64 = 12;
    }
}

abi_enums! {
    /// Enums of this module for the header check.
    pub const ENUMS;

    /// Kind of a queue.
    enum HsaQueueType: u32 = "HSA_QUEUE_TYPE", "HSA_QUEUE_" {
        /// PM4 compute.
        COMPUTE = 1;
        /// SDMA for PCIe.
        SDMA = 2;
        /// Not used.
        MULTIMEDIA_DECODE = 3;
        /// Not used.
        MULTIMEDIA_ENCODE = 4;
        /// SDMA for XGMI.
        SDMA_XGMI = 5;
        /// PM4 compute with graphics resources.
        COMPUTE_OS = 11;
        /// SDMA with graphics resources.
        SDMA_OS = 12;
        /// Not used.
        MULTIMEDIA_DECODE_OS = 13;
        /// Not used.
        MULTIMEDIA_ENCODE_OS = 14;
        /// AQL compute.
        COMPUTE_AQL = 21;
        /// AQL DMA.
        DMA_AQL = 22;
        /// AQL DMA for XGMI.
        DMA_AQL_XGMI = 23;
    }

    /// Priority of a queue. It has negative values and 0xffffffff, so C makes it 8 bytes wide; a caller passes it
    /// in a 64-bit register.
    enum HsaQueuePriority: i64 = "HSA_QUEUE_PRIORITY", "HSA_QUEUE_PRIORITY_" {
        /// Lowest.
        MINIMUM = -3;
        /// Low.
        LOW = -2;
        /// Below normal.
        BELOW_NORMAL = -1;
        /// Normal.
        NORMAL = 0;
        /// Above normal.
        ABOVE_NORMAL = 1;
        /// High.
        HIGH = 2;
        /// Highest.
        MAXIMUM = 3;
    }
}

impl HsaQueueType {
    /// SDMA on a given engine (`hsaKmtCreateQueueExt`), in headers since ROCm 6.3.
    pub const SDMA_BY_ENGINE: HsaQueueType = HsaQueueType(6);
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u64 {
        /// Never a queue id.
        INVALID_QUEUEID = 0xffff_ffff_ffff_ffff;
    }
}
