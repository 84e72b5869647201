//! Shared virtual memory and system management events.

use crate::bits::abi_enums;
use crate::layout::{abi_consts, abi_flags, abi_structs};
use crate::release::ROCM_6;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// One attribute of a range.
    struct HsaSvmAttribute = "HSA_SVM_ATTRIBUTE", size 8, pack 4 {
        /// Which attribute.
        kind as "type": HsaSvmAttrType = 0;
        /// A node id, [`HsaSvmFlags`] or a number, by type.
        value: u32 = 4;
    }
}

abi_flags! {
    /// Bits of [`HsaSvmFlags`] for the header check.
    pub const SVM_FLAGS;
    /// Flags of a range, the same as KFD's.
    Enum HsaSvmFlags: u32 = "HSA_SVM_FLAG_" {
        /// The host can always access.
        HOST_ACCESS = 0x01;
        /// Fine-grained coherence between devices.
        COHERENT = 0x02;
        /// Any GPU of the same hive may hold the memory.
        HIVE_LOCAL = 0x04;
        /// GPUs only read.
        GPU_RO = 0x08;
        /// GPUs may execute.
        GPU_EXEC = 0x10;
        /// GPUs mostly read.
        GPU_READ_MOSTLY = 0x20;
        /// GPU mappings are kept as without XNACK.
        GPU_ALWAYS_MAPPED = 0x40, since(ROCM_6);
        /// Coherent between devices by atomics.
        EXT_COHERENT = 0x80, since(ROCM_6);
    }
}

abi_enums! {
    /// Enums of this module for the header check.
    pub const ENUMS;

    /// Which attribute, the same as KFD's; locations are node ids here and GPU ids there.
    enum HsaSvmAttrType: u32 = "HSA_SVM_ATTR_TYPE", "HSA_SVM_ATTR_" {
        /// Where memory should be.
        PREFERRED_LOC = 0;
        /// Where to migrate memory to now.
        PREFETCH_LOC = 1;
        /// This node may access.
        ACCESS = 2;
        /// This node may access without migration.
        ACCESS_IN_PLACE = 3;
        /// This node may not access.
        NO_ACCESS = 4;
        /// Flags to set.
        SET_FLAGS = 5;
        /// Flags to clear.
        CLR_FLAGS = 6;
        /// Migration granularity, log2 of pages.
        GRANULARITY = 7;
    }

    /// A system management event. In C the type's name is `HSA_EVENT_TYPE`.
    enum HsaSmiEvent: u32 = "HSA_EVENT_TYPE", "HSA_SMI_EVENT_", since(ROCM_6) {
        /// Not used.
        NONE = 0;
        /// A memory fault.
        VMFAULT = 1;
        /// The GPU was throttled.
        THERMAL_THROTTLE = 2;
        /// A reset begins.
        GPU_PRE_RESET = 3;
        /// A reset is done.
        GPU_POST_RESET = 4;
        /// A migration begins.
        MIGRATE_START = 5;
        /// A migration is done.
        MIGRATE_END = 6;
        /// Handling of a page fault begins.
        PAGE_FAULT_START = 7;
        /// Handling of a page fault is done.
        PAGE_FAULT_END = 8;
        /// Queues were stopped.
        QUEUE_EVICTION = 9;
        /// Queues run again.
        QUEUE_RESTORE = 10;
        /// A range was unmapped from a GPU.
        UNMAP_FROM_GPU = 11;
        /// One past the last.
        INDEX_MAX = 12;
        /// Events of all processes.
        ALL_PROCESS = 64;
    }

    /// Why memory migrates.
    enum HsaMigrateTriggers: u32 = "HSA_MIGRATE_TRIGGERS", "HSA_MIGRATE_TRIGGER_", since(ROCM_6) {
        /// Prefetch.
        PREFETCH = 0;
        /// A GPU's page fault.
        PAGEFAULT_GPU = 1;
        /// A CPU's page fault.
        PAGEFAULT_CPU = 2;
        /// VRAM ran out.
        TTM_EVICTION = 3;
    }

    /// Why queues are stopped.
    enum HsaQueueEvictionTriggers: u32 = "HSA_QUEUE_EVICTION_TRIGGERS", "HSA_QUEUE_EVICTION_", since(ROCM_6) {
        /// Migration.
        TRIGGER_SVM = 0;
        /// User pages moved.
        TRIGGER_USERPTR = 1;
        /// VRAM ran out.
        TRIGGER_TTM = 2;
        /// The GPU is suspended.
        TRIGGER_SUSPEND = 3;
        /// Checkpoint.
        CRIU_CHECKPOINT = 4;
        /// Restore.
        CRIU_RESTORE = 5;
    }

    /// Why a range is unmapped.
    enum HsaSvmUnmapTriggers: u32 = "HSA_SVM_UNMAP_TRIGGERS", "HSA_SVM_UNMAP_TRIGGER_", since(ROCM_6) {
        /// CPU pages moved.
        MMU_NOTIFY = 0;
        /// Pages migrate.
        MMU_NOTIFY_MIGRATE = 1;
        /// The CPU unmapped.
        UNMAP_FROM_CPU = 2;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// Longest line of a system management event in bytes.
        HSA_SMI_EVENT_MSG_SIZE = 96, since(ROCM_6);
    }
}
