//! System management events: lines of text, read from an anonymous descriptor.

use crate::layout::{Since::KfdMinor, abi_consts, abi_structs};
use crate::version::minor;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of SMI_EVENTS.
    struct SmiEventsArgs = "struct kfd_ioctl_smi_events_args", size 8, since(KfdMinor(minor::SMI_EVENTS)) {
        /// In: which GPU.
        gpuid: u32 = 0;
        /// Out: the descriptor. A write of 8 bytes sets the event mask.
        anon_fd: u32 = 4;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// Longest line in bytes.
        KFD_SMI_EVENT_MSG_SIZE = 96, since(KfdMinor(minor::SMI_EVENTS));
    }
    Enum u32 {
        /// Not used.
        KFD_SMI_EVENT_NONE = 0;
        /// A memory fault.
        KFD_SMI_EVENT_VMFAULT = 1;
        /// The GPU was throttled.
        KFD_SMI_EVENT_THERMAL_THROTTLE = 2;
        /// A reset begins.
        KFD_SMI_EVENT_GPU_PRE_RESET = 3;
        /// A reset is done.
        KFD_SMI_EVENT_GPU_POST_RESET = 4;
        /// A migration begins.
        KFD_SMI_EVENT_MIGRATE_START = 5, since(KfdMinor(minor::SMI_PROFILER));
        /// A migration is done.
        KFD_SMI_EVENT_MIGRATE_END = 6, since(KfdMinor(minor::SMI_PROFILER));
        /// Handling of a page fault begins.
        KFD_SMI_EVENT_PAGE_FAULT_START = 7, since(KfdMinor(minor::SMI_PROFILER));
        /// Handling of a page fault is done.
        KFD_SMI_EVENT_PAGE_FAULT_END = 8, since(KfdMinor(minor::SMI_PROFILER));
        /// Queues were stopped.
        KFD_SMI_EVENT_QUEUE_EVICTION = 9, since(KfdMinor(minor::SMI_PROFILER));
        /// Queues run again.
        KFD_SMI_EVENT_QUEUE_RESTORE = 10, since(KfdMinor(minor::SMI_PROFILER));
        /// A range was unmapped from a GPU.
        KFD_SMI_EVENT_UNMAP_FROM_GPU = 11, since(KfdMinor(minor::SMI_PROFILER));
        /// A process began to use the GPU. Came between minor 17 and 23.
        KFD_SMI_EVENT_PROCESS_START = 12, since(KfdMinor(minor::PROFILER));
        /// A process ended. Came between minor 17 and 23.
        KFD_SMI_EVENT_PROCESS_END = 13, since(KfdMinor(minor::PROFILER));
        /// Events of all processes, for the privileged.
        KFD_SMI_EVENT_ALL_PROCESS = 64, since(KfdMinor(minor::SMI_PROFILER));
        /// Migration: a prefetch.
        KFD_MIGRATE_TRIGGER_PREFETCH = 0, since(KfdMinor(minor::SMI_PROFILER));
        /// Migration: a GPU's page fault.
        KFD_MIGRATE_TRIGGER_PAGEFAULT_GPU = 1, since(KfdMinor(minor::SMI_PROFILER));
        /// Migration: a CPU's page fault.
        KFD_MIGRATE_TRIGGER_PAGEFAULT_CPU = 2, since(KfdMinor(minor::SMI_PROFILER));
        /// Migration: VRAM ran out.
        KFD_MIGRATE_TRIGGER_TTM_EVICTION = 3, since(KfdMinor(minor::SMI_PROFILER));
        /// Eviction: migration.
        KFD_QUEUE_EVICTION_TRIGGER_SVM = 0, since(KfdMinor(minor::SMI_PROFILER));
        /// Eviction: user pages moved.
        KFD_QUEUE_EVICTION_TRIGGER_USERPTR = 1, since(KfdMinor(minor::SMI_PROFILER));
        /// Eviction: VRAM ran out.
        KFD_QUEUE_EVICTION_TRIGGER_TTM = 2, since(KfdMinor(minor::SMI_PROFILER));
        /// Eviction: the GPU is suspended.
        KFD_QUEUE_EVICTION_TRIGGER_SUSPEND = 3, since(KfdMinor(minor::SMI_PROFILER));
        /// Eviction: checkpoint.
        KFD_QUEUE_EVICTION_CRIU_CHECKPOINT = 4, since(KfdMinor(minor::SMI_PROFILER));
        /// Eviction: restore.
        KFD_QUEUE_EVICTION_CRIU_RESTORE = 5, since(KfdMinor(minor::SMI_PROFILER));
        /// Unmap: CPU pages moved.
        KFD_SVM_UNMAP_TRIGGER_MMU_NOTIFY = 0, since(KfdMinor(minor::SMI_PROFILER));
        /// Unmap: pages migrate.
        KFD_SVM_UNMAP_TRIGGER_MMU_NOTIFY_MIGRATE = 1, since(KfdMinor(minor::SMI_PROFILER));
        /// Unmap: the CPU unmapped.
        KFD_SVM_UNMAP_TRIGGER_UNMAP_FROM_CPU = 2, since(KfdMinor(minor::SMI_PROFILER));
    }
}

/// `KFD_SMI_EVENT_MASK_FROM_INDEX`: the mask bit of an event, 0 for [`KFD_SMI_EVENT_NONE`] and
/// for an index above 64.
pub const fn event_mask(event: u32) -> u64 {
    match event {
        1..=64 => 1 << (event - 1),
        _ => 0,
    }
}
