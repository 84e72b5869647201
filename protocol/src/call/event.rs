//! Events.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{EventId, GpuId, GuestVa, Handle};

/// `struct kfd_ioctl_create_event_args`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CreateEventRequest {
    /// `KFD_IOC_EVENT_*`
    pub event_type: u32,
    /// 1 for an event that a successful wait clears.
    pub auto_reset: u32,
    /// Only for events that belong to a node.
    pub node_id: u32,
    /// Zero.
    pub pad: u32,
    /// The buffer that becomes the process's page of event slots; with the first event of a process, else none.
    pub event_page: Handle,
}

/// Answer to a creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CreateEventAnswer {
    /// The event.
    pub event_id: EventId,
    /// What the GPU's packets send to signal it.
    pub trigger_data: u32,
    /// Its slot in the event page, in units of 8 bytes.
    pub slot_index: u32,
    /// Zero.
    pub pad: u32,
}

/// A request that names an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct EventRequest {
    /// The event.
    pub event_id: EventId,
    /// Zero.
    pub pad: u32,
}

/// `struct kfd_ioctl_wait_events_args`; the tail lists the events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WaitEventsRequest {
    /// Milliseconds; 0 only looks, `u32::MAX` waits for ever.
    pub timeout: u32,
    /// 1 to wait for all, 0 for any.
    pub wait_for_all: u32,
}

/// One event of a wait, in request and answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WaitEvent {
    /// The event.
    pub event_id: EventId,
    /// Request: 0. Answer: 0, [`WAITED_MEMORY`] or [`WAITED_HARDWARE`] where the answer's exception data are this event's.
    pub kind: u32,
    /// Age that the waiter saw last, or 0; in the answer, the age now.
    pub age: u64,
}

/// [`WaitEvent::kind`]: the event is a memory exception, its data stand in the answer.
pub const WAITED_MEMORY: u32 = 1;
/// [`WaitEvent::kind`]: the event is a hardware exception, its data stand in the answer.
pub const WAITED_HARDWARE: u32 = 2;

/// Answer to a wait. The exception data are those of the first event of each kind that has any; KFD gives
/// all memory events of a process the same data (`kfd_signal_vm_fault_event`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WaitEventsAnswer {
    /// `KFD_IOC_WAIT_RESULT_*`
    pub wait_result: u32,
    /// Linux errno of the call, or 0: a wait that failed since an event is gone still says so in `wait_result`.
    pub errno: u32,
    /// `struct kfd_hsa_memory_exception_data`: the faulting address.
    pub memory_va: GuestVa,
    /// The GPU that faulted.
    pub memory_gpu_id: GpuId,
    /// `failure` bits: 1 not present, 2 read-only, 4 no-execute, 8 imprecise.
    pub memory_failure: u32,
    /// `ErrorType`
    pub memory_error_type: u32,
    /// `struct kfd_hsa_hw_exception_data`: `reset_type`
    pub hardware_reset_type: u32,
    /// `reset_cause`
    pub hardware_reset_cause: u32,
    /// `memory_lost`
    pub hardware_memory_lost: u32,
    /// The GPU.
    pub hardware_gpu_id: GpuId,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<CreateEventRequest>() == 24);
const _: () = assert!(size_of::<CreateEventAnswer>() == 16);
const _: () = assert!(size_of::<WaitEvent>() == 16);
const _: () = assert!(size_of::<WaitEventsAnswer>() == 48);
