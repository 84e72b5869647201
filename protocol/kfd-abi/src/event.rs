//! Events: create, set, reset, wait, destroy, and what a memory fault or a reset says.

use zerocopy::transmute;

use crate::layout::{Since::KfdMinor, abi_consts, abi_structs};
use crate::version::minor;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of CREATE_EVENT.
    struct CreateEventArgs = "struct kfd_ioctl_create_event_args", size 32 {
        /// In: 0, or the handle of a buffer that becomes the event page (see [`EVENT_PAGE_SIZE`]).
        /// Out: mmap offset of the event page.
        event_page_offset: u64 = 0;
        /// Out: for signal events, the value that the GPU puts into its interrupt.
        event_trigger_data: u32 = 8;
        /// In: `KFD_IOC_EVENT_*`.
        event_type: u32 = 12;
        /// In: not 0: a wait that sees it resets it.
        auto_reset: u32 = 16;
        /// In: for some types, which node.
        node_id: u32 = 20;
        /// Out: the event.
        event_id: u32 = 24;
        /// Out: for signal events, its 8-byte slot in the event page.
        event_slot_index: u32 = 28;
    }

    /// Argument of DESTROY_EVENT.
    struct DestroyEventArgs = "struct kfd_ioctl_destroy_event_args", size 8 {
        /// In: the event.
        event_id: u32 = 0;
        /// Padding.
        pad: u32 = 4;
    }

    /// Argument of SET_EVENT.
    struct SetEventArgs = "struct kfd_ioctl_set_event_args", size 8 {
        /// In: the event.
        event_id: u32 = 0;
        /// Padding.
        pad: u32 = 4;
    }

    /// Argument of RESET_EVENT.
    struct ResetEventArgs = "struct kfd_ioctl_reset_event_args", size 8 {
        /// In: the event.
        event_id: u32 = 0;
        /// Padding.
        pad: u32 = 4;
    }

    /// Why an access failed; each field is 0 or 1.
    struct MemoryExceptionFailure = "struct kfd_memory_exception_failure", size 16 {
        /// No page there, or not for user mode.
        not_present as "NotPresent": u32 = 0;
        /// A write to a read-only page.
        read_only as "ReadOnly": u32 = 4;
        /// An execution of a page that must not be.
        no_execute as "NoExecute": u32 = 8;
        /// The address is not exact.
        imprecise: u32 = 12;
    }

    /// What a memory event says.
    struct HsaMemoryExceptionData = "struct kfd_hsa_memory_exception_data", size 32 {
        /// Why.
        failure: MemoryExceptionFailure = 0;
        /// The GPU virtual address.
        va: u64 = 16;
        /// Which GPU.
        gpu_id: u32 = 24;
        /// `KFD_MEM_ERR_*`.
        error_type as "ErrorType": u32 = 28;
    }

    /// What a hardware exception event says.
    struct HsaHwExceptionData = "struct kfd_hsa_hw_exception_data", size 16 {
        /// `KFD_HW_EXCEPTION_*_RESET`.
        reset_type: u32 = 0;
        /// `KFD_HW_EXCEPTION_GPU_HANG` or `_ECC`.
        reset_cause: u32 = 4;
        /// 1 if the memory of the GPU was lost.
        memory_lost: u32 = 8;
        /// Which GPU.
        gpu_id: u32 = 12;
    }

    /// What a signal event says.
    struct HsaSignalEventData = "struct kfd_hsa_signal_event_data", size 8,
        since(KfdMinor(minor::EVENT_AGE)) {
        /// In: age that the caller has seen, 0 for none. Out: the event's age; it grows with each signal.
        last_event_age: u64 = 0;
    }

    /// One event in WAIT_EVENTS's array.
    struct EventData = "struct kfd_event_data", size 48 {
        /// The union of what the event types say; see the methods.
        data as "memory_exception_data": [u64; 4] = 0;
        /// Pointer to more data, unused.
        kfd_event_data_ext: u64 = 32;
        /// In: the event.
        event_id: u32 = 40;
        /// Padding.
        pad: u32 = 44;
    }

    /// Argument of WAIT_EVENTS.
    struct WaitEventsArgs = "struct kfd_ioctl_wait_events_args", size 24 {
        /// In: pointer to an array of [`EventData`].
        events_ptr: u64 = 0;
        /// In: entries in the array.
        num_events: u32 = 8;
        /// In: not 0: wait for all of them.
        wait_for_all: u32 = 12;
        /// In: milliseconds, [`KFD_EVENT_TIMEOUT_IMMEDIATE`] or [`KFD_EVENT_TIMEOUT_INFINITE`].
        timeout: u32 = 16;
        /// Out: `KFD_IOC_WAIT_RESULT_*`.
        wait_result: u32 = 20;
    }
}

impl EventData {
    /// The union read as a memory event's data.
    pub fn memory_exception_data(&self) -> HsaMemoryExceptionData {
        transmute!(self.data)
    }

    /// Fills the union with a memory event's data.
    pub fn set_memory_exception_data(&mut self, data: HsaMemoryExceptionData) {
        self.data = transmute!(data);
    }

    /// The union read as a hardware exception's data.
    pub fn hw_exception_data(&self) -> HsaHwExceptionData {
        let [first, second, ..] = self.data;
        transmute!([first, second])
    }

    /// Fills the union with a hardware exception's data; the other bytes stay.
    pub fn set_hw_exception_data(&mut self, data: HsaHwExceptionData) {
        let [_, _, third, fourth] = self.data;
        let [first, second]: [u64; 2] = transmute!(data);
        self.data = [first, second, third, fourth];
    }

    /// The union read as a signal event's data.
    pub fn signal_event_data(&self) -> HsaSignalEventData {
        let [last_event_age, ..] = self.data;
        HsaSignalEventData { last_event_age }
    }

    /// Fills the union with a signal event's data; the other bytes stay.
    pub fn set_signal_event_data(&mut self, data: HsaSignalEventData) {
        let [first, ..] = &mut self.data;
        *first = data.last_event_age;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// Set by the GPU or the caller.
        KFD_IOC_EVENT_SIGNAL = 0;
        /// A node came or went.
        KFD_IOC_EVENT_NODECHANGE = 1;
        /// A device changed its state.
        KFD_IOC_EVENT_DEVICESTATECHANGE = 2;
        /// A GPU was reset.
        KFD_IOC_EVENT_HW_EXCEPTION = 3;
        /// System event.
        KFD_IOC_EVENT_SYSTEM_EVENT = 4;
        /// Debug event.
        KFD_IOC_EVENT_DEBUG_EVENT = 5;
        /// Profile event.
        KFD_IOC_EVENT_PROFILE_EVENT = 6;
        /// Queue event.
        KFD_IOC_EVENT_QUEUE_EVENT = 7;
        /// A memory access failed.
        KFD_IOC_EVENT_MEMORY = 8;
        /// The wait is satisfied.
        KFD_IOC_WAIT_RESULT_COMPLETE = 0;
        /// Time is up.
        KFD_IOC_WAIT_RESULT_TIMEOUT = 1;
        /// An event was destroyed while waited for.
        KFD_IOC_WAIT_RESULT_FAIL = 2;
        /// Signal events per process.
        KFD_SIGNAL_EVENT_LIMIT = 4096;
        /// [`HsaHwExceptionData::reset_type`]: the whole GPU.
        KFD_HW_EXCEPTION_WHOLE_GPU_RESET = 0;
        /// [`HsaHwExceptionData::reset_type`]: one engine.
        KFD_HW_EXCEPTION_PER_ENGINE_RESET = 1;
        /// [`HsaHwExceptionData::reset_cause`]: a hang.
        KFD_HW_EXCEPTION_GPU_HANG = 0;
        /// [`HsaHwExceptionData::reset_cause`]: a memory error.
        KFD_HW_EXCEPTION_ECC = 1;
        /// [`HsaMemoryExceptionData::error_type`]: an ordinary fault.
        KFD_MEM_ERR_NO_RAS = 0;
        /// [`HsaMemoryExceptionData::error_type`]: ECC error in SRAM.
        KFD_MEM_ERR_SRAM_ECC = 1;
        /// [`HsaMemoryExceptionData::error_type`]: poisoned data was used.
        KFD_MEM_ERR_POISON_CONSUMED = 2;
        /// [`HsaMemoryExceptionData::error_type`]: a hang.
        KFD_MEM_ERR_GPU_HANG = 3;
    }
}

/// [`WaitEventsArgs::timeout`]: do not wait (kernel-internal, kfd_events.h).
pub const KFD_EVENT_TIMEOUT_IMMEDIATE: u32 = 0;

/// [`WaitEventsArgs::timeout`]: wait for ever (kernel-internal, kfd_events.h).
pub const KFD_EVENT_TIMEOUT_INFINITE: u32 = 0xffff_ffff;

/// First id of an event that is no signal event; signal events have their slot's index as id
/// (kernel-internal, kfd_events.h).
pub const KFD_FIRST_NONSIGNAL_EVENT_ID: u32 = (i32::MAX as u32 >> 1) + 1;

/// Last id of an event that is no signal event (kernel-internal, kfd_events.h).
pub const KFD_LAST_NONSIGNAL_EVENT_ID: u32 = i32::MAX as u32;

/// Content of a slot in the event page whose event is not signalled (kernel-internal, kfd_events.h).
pub const UNSIGNALED_EVENT_SLOT: u64 = u64::MAX;

/// Size in bytes of the event page: a slot of 8 bytes per signal event (kfd_events.c).
pub const EVENT_PAGE_SIZE: u64 = KFD_SIGNAL_EVENT_LIMIT as u64 * 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn union_views_share_their_bytes() {
        let mut event = EventData::default();
        event.set_memory_exception_data(HsaMemoryExceptionData {
            failure: MemoryExceptionFailure { not_present: 1, read_only: 2, no_execute: 3, imprecise: 4 },
            va: 5,
            gpu_id: 6,
            error_type: 7,
        });
        let hw = event.hw_exception_data();
        assert_eq!((hw.reset_type, hw.reset_cause, hw.memory_lost, hw.gpu_id), (1, 2, 3, 4));
        assert_eq!(event.signal_event_data().last_event_age, 2 << 32 | 1);
        event.set_signal_event_data(HsaSignalEventData { last_event_age: 9 });
        event.set_hw_exception_data(HsaHwExceptionData { reset_type: 8, ..hw });
        assert_eq!(event.memory_exception_data().failure.not_present, 8);
        assert_eq!(event.memory_exception_data().va, 5);
    }
}
