//! Events.
//!
//! The slots of a process's events lie in a page that GPUs write to. It is host memory (GTT), as on bare metal, at an
//! address of this process that is reserved and cannot be accessed: only GPUs use it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use hsakmt_abi::event::{
    HsaAccessAttributeFailure, HsaEvent, HsaEventData, HsaEventDescriptor, HsaEventIdMemoryFlags,
    HsaEventType, HsaHwException, HsaHwExceptionCause, HsaMemoryAccessFault,
};
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::event::{
    EVENT_PAGE_SIZE, KFD_IOC_WAIT_RESULT_COMPLETE, KFD_IOC_WAIT_RESULT_TIMEOUT, KFD_SIGNAL_EVENT_LIMIT,
};
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::calls::{CreateEvent, DestroyEvent, ResetEvent, SetEvent, WaitEvents};
use virtio_kfd_protocol::limits::MAX_WAIT_EVENTS;
use virtio_kfd_protocol::{
    AllocMemoryRequest, CreateEventAnswer, CreateEventRequest, EventId, EventRequest, GpuId, GuestVa, Handle,
    ResourceId, WAITED_HARDWARE, WAITED_MEMORY, WaitEvent, WaitEventsAnswer, WaitEventsRequest,
};

use super::lock::lock;
use super::memory::address::{Reservation, page_size};
use super::memory::{Host, free_buffer, map_buffer};
use super::refusal::{Level, Outcome, Refusal, say};
use super::topology::Snapshot;
use crate::client::{Client, ClientError};

/// Bytes of an event's slot.
const SLOT: u64 = 8;

/// First event type that does not exist (`HSA_EVENTTYPE_MAXID`).
const EVENT_TYPE_END: u32 = HsaEventType::MEMORY.0 + 1;

/// The page of event slots.
struct Page {
    reservation: Reservation,
    handle: Handle,
}

/// Whether there is a page of slots.
#[derive(Default)]
enum Slots {
    /// No event has been made.
    #[default]
    Undecided,
    /// The first event was made without one; KFD takes none later.
    None,
    There(Arc<Page>),
}

/// All events of one connection.
#[derive(Default)]
pub struct Events {
    slots: Mutex<Slots>,
    /// The events that the application has, by the address of their `HsaEvent`.
    live: Mutex<BTreeMap<usize, EventId>>,
    waiters: AtomicU32,
}

/// Whether only the driver may set events of a type. Debug events are set like signals.
fn is_system(event_type: HsaEventType) -> bool {
    !matches!(event_type, HsaEventType::SIGNAL | HsaEventType::DEBUG_EVENT)
}

fn request(event: &HsaEvent) -> EventRequest {
    EventRequest { event_id: EventId(event.event_id), pad: 0 }
}

impl Events {
    /// `hsaKmtCreateEvent`. `host` needs a topology where [`Self::are_first`].
    pub fn create(
        &self,
        host: Host<'_>,
        descriptor: HsaEventDescriptor,
        manual_reset: bool,
        signaled: bool,
    ) -> Outcome<HsaEvent> {
        let event_type = descriptor.event_type;
        if event_type.0 >= EVENT_TYPE_END {
            return Err(Refusal::parameter(format!(
                "EventType is {}, expected less than {EVENT_TYPE_END}",
                event_type.0
            )));
        }
        let (page, answer) = self.create_on_page(
            host,
            CreateEventRequest {
                event_type: event_type.0,
                auto_reset: u32::from(!manual_reset),
                // KFD's events do not belong to nodes, whose numbers are others on the host.
                node_id: 0,
                pad: 0,
                event_page: Handle::NONE,
            },
        )?;
        let slot = u64::from(answer.slot_index);
        let slot_address = match &page {
            Some(page) if answer.slot_index < KFD_SIGNAL_EVENT_LIMIT => {
                page.reservation.start().saturating_add(slot.saturating_mul(SLOT))
            }
            _ => 0,
        };
        let mut event_data = HsaEventData {
            event_type,
            hw_data1: answer.event_id.0.into(),
            hw_data2: slot_address,
            hw_data3: answer.trigger_data,
            ..Default::default()
        };
        event_data.set_sync_var(descriptor.sync_var);
        let event = HsaEvent { event_id: answer.event_id.0, event_data };
        if signaled && !is_system(event_type) {
            match host.client.call::<SetEvent>(&request(&event), &[], 0) {
                // As AMD's library: KFD does not set debug events, and they are made nevertheless.
                Err(error) if error.errno().is_none() => return Err(error.into()),
                _ => {}
            }
        }
        Ok(event)
    }

    /// Whether no event has been made yet: the first one needs a topology, by which there is a page of slots or none.
    pub fn are_first(&self) -> bool {
        matches!(*lock(&self.slots), Slots::Undecided)
    }

    /// Makes an event. The first one of a process that has a GPU brings the page of slots.
    fn create_on_page(
        &self,
        host: Host<'_>,
        request: CreateEventRequest,
    ) -> Outcome<(Option<Arc<Page>>, CreateEventAnswer)> {
        let create = |event_page| {
            let request = CreateEventRequest { event_page, ..request };
            Ok(host.client.call::<CreateEvent>(&request, &[], 0)?.0)
        };
        let mut slots = lock(&self.slots);
        let page = match &*slots {
            Slots::Undecided => {
                let page = new_page(host)?;
                let answer = match create(page.as_ref().map_or(Handle::NONE, |page| page.handle)) {
                    Ok(answer) => answer,
                    Err(refusal) => {
                        if let Some(page) = page {
                            free_buffer(host.client, page.handle, &host.snapshot.all_gpus())?;
                        }
                        return Err(refusal);
                    }
                };
                let page = page.map(Arc::new);
                *slots = page.clone().map_or(Slots::None, Slots::There);
                return Ok((page, answer));
            }
            Slots::None => None,
            Slots::There(page) => Some(page.clone()),
        };
        drop(slots);
        Ok((page, create(Handle::NONE)?))
    }
    /// Remembers the event that the application was given at an address.
    pub fn own(&self, address: usize, event: &HsaEvent) {
        lock(&self.live).insert(address, EventId(event.event_id));
    }

    /// Whether the application was given an event at an address and has not destroyed it.
    pub fn is_live(&self, address: usize) -> bool {
        lock(&self.live).contains_key(&address)
    }

    /// `hsaKmtDestroyEvent`, for the event at an address. Whoever waits for it is woken and told that it failed.
    pub fn destroy(&self, client: &Client, address: usize) -> Outcome<()> {
        let unknown = || Refusal::handle("Event is no event of this process, or destroyed already");
        let event_id = lock(&self.live).remove(&address).ok_or_else(unknown)?;
        let answer = client.call::<DestroyEvent>(&EventRequest { event_id, pad: 0 }, &[], 0);
        if let Err(error) = answer {
            lock(&self.live).insert(address, event_id);
            return Err(error.into());
        }
        Ok(())
    }

    /// `hsaKmtSetEvent`
    pub fn set(&self, client: &Client, event: &HsaEvent) -> Outcome<()> {
        require_signal(event)?;
        client.call::<SetEvent>(&request(event), &[], 0)?;
        Ok(())
    }

    /// `hsaKmtResetEvent`
    pub fn reset(&self, client: &Client, event: &HsaEvent) -> Outcome<()> {
        require_signal(event)?;
        client.call::<ResetEvent>(&request(event), &[], 0)?;
        Ok(())
    }

    /// Waits. `ages` are the ages that the caller saw last, for signal events; they are then what they are now.
    /// What memory and hardware exception events say is written into them.
    pub fn wait(
        &self,
        client: &Client,
        snapshot: Option<&Snapshot>,
        events: &mut [HsaEvent],
        ages: Option<&mut [u64]>,
        all: bool,
        milliseconds: u32,
    ) -> Outcome<()> {
        if events.len() > MAX_WAIT_EVENTS {
            return Err(Refusal::parameter(format!(
                "NumEvents is {}, expected at most {MAX_WAIT_EVENTS}",
                events.len()
            )));
        }
        let age = |index: usize| ages.as_ref().and_then(|ages| ages.get(index)).copied().unwrap_or(0);
        let element = |(index, event): (usize, &HsaEvent)| WaitEvent {
            event_id: EventId(event.event_id),
            kind: 0,
            age: if event.event_data.event_type == HsaEventType::SIGNAL { age(index) } else { 0 },
        };
        let asked: Vec<WaitEvent> = events.iter().enumerate().map(element).collect();
        let request = WaitEventsRequest { timeout: milliseconds, wait_for_all: all.into() };
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let answer = client.wait_call::<WaitEvents>(&request, &asked, asked.len());
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        let (answer, waited) = match answer {
            Err(ClientError::Lost(_)) if tell_loss(events, all, snapshot) => return Ok(()),
            answer => answer?,
        };
        if let Some(ages) = ages {
            for ((age, event), waited) in ages.iter_mut().zip(&*events).zip(&waited) {
                if event.event_data.event_type == HsaEventType::SIGNAL {
                    *age = waited.age;
                }
            }
        }
        match (answer.errno, answer.wait_result) {
            (0, KFD_IOC_WAIT_RESULT_COMPLETE) => {}
            (0, KFD_IOC_WAIT_RESULT_TIMEOUT) => {
                return Err(Refusal::new(HsakmtStatus::WAIT_TIMEOUT, "the time is up"));
            }
            (errno, result) => {
                return Err(Refusal::error(format!("the wait failed: wait_result {result}, errno {errno}")));
            }
        }
        for (event, waited) in events.iter_mut().zip(&waited) {
            tell(event, waited.kind, &answer, snapshot)?;
        }
        Ok(())
    }

    /// Ends all waits by destroying the events, for a close.
    pub fn release_all(&self, client: &Client) {
        let live = std::mem::take(&mut *lock(&self.live));
        // Events that nobody waits for go with the connection.
        if self.waiters.load(Ordering::Relaxed) == 0 {
            return;
        }
        for event_id in live.into_values() {
            let _ = client.call::<DestroyEvent>(&EventRequest { event_id, pad: 0 }, &[], 0);
        }
    }
}

/// Memory for the slots, none without a GPU.
fn new_page(host: Host<'_>) -> Outcome<Option<Page>> {
    let Some(gpu) = host.snapshot.gpus.first() else { return Ok(None) };
    let range = host.snapshot.svm.unwrap_or((0, u64::MAX));
    let size = EVENT_PAGE_SIZE.next_multiple_of(page_size());
    let reservation = Reservation::new(size, page_size(), page_size(), range)
        .map_err(|error| Refusal::error(format!("no addresses for the event page: {error}")))?;
    let flags = AllocFlags::GTT
        | AllocFlags::WRITABLE
        | AllocFlags::EXECUTABLE
        | AllocFlags::COHERENT
        | AllocFlags::UNCACHED;
    let request = AllocMemoryRequest {
        va: GuestVa(reservation.start()),
        size,
        gpu_id: gpu.gpu_id,
        flags: flags.bits(),
        resource: ResourceId(0),
        pad: 0,
        resource_offset: 0,
    };
    let handle = map_buffer(host.client, &request, &host.snapshot.all_gpus(), HsakmtStatus::ERROR)?;
    Ok(Some(Page { reservation, handle }))
}

/// Applications may not set or reset what the driver sets.
fn require_signal(event: &HsaEvent) -> Outcome<()> {
    let event_type = event.event_data.event_type;
    if is_system(event_type) {
        return Err(Refusal::error(format!("events of type {} are the driver's to set", event_type.0)));
    }
    Ok(())
}

/// The connection is lost, and with it the GPUs and what is in their memory. That is what hardware exception events are for:
/// a runtime that waits for one ends its program, where it would take a wait that fails for one that was interrupted. Whether
/// that ends the wait: one for all of its events has not come to its end while another one is missing.
fn tell_loss(events: &mut [HsaEvent], all: bool, snapshot: Option<&Snapshot>) -> bool {
    let tells = |event: &HsaEvent| event.event_data.event_type == HsaEventType::HW_EXCEPTION;
    if all && !events.iter().all(tells) {
        return false;
    }
    let Some(gpu) = snapshot.and_then(|snapshot| snapshot.gpus.first()) else { return false };
    let lost = HsaHwException { node_id: gpu.node, reset_type: 0, memory_lost: 1, ..Default::default() };
    let mut told = false;
    for event in events.iter_mut().filter(|event| tells(event)) {
        event.event_data.set_hw_exception(lost);
        told = true;
    }
    told
}

/// Writes into an event what it says.
fn tell(
    event: &mut HsaEvent,
    kind: u32,
    answer: &WaitEventsAnswer,
    snapshot: Option<&Snapshot>,
) -> Outcome<()> {
    let node_of = |gpu: GpuId| {
        let unknown = || Refusal::new(HsakmtStatus::INVALID_NODE_UNIT, "the topology has been released");
        snapshot.ok_or_else(unknown)?.node_of(gpu)
    };
    let bit = |mask: u32| u32::from(answer.memory_failure & mask != 0);
    match (event.event_data.event_type, kind) {
        (HsaEventType::MEMORY, WAITED_MEMORY) if answer.memory_gpu_id.0 != 0 => {
            let ecc = u32::from(matches!(answer.memory_error_type, 1 | 2));
            let fault = HsaMemoryAccessFault {
                node_id: node_of(answer.memory_gpu_id)?,
                virtual_address: answer.memory_va.0,
                failure: HsaAccessAttributeFailure(0)
                    .with(HsaAccessAttributeFailure::NOT_PRESENT, bit(1))
                    .with(HsaAccessAttributeFailure::READ_ONLY, bit(2))
                    .with(HsaAccessAttributeFailure::NO_EXECUTE, bit(4))
                    .with(HsaAccessAttributeFailure::IMPRECISE, bit(8))
                    .with(HsaAccessAttributeFailure::ERROR_TYPE, answer.memory_error_type)
                    .with(HsaAccessAttributeFailure::ECC, ecc),
                flags: HsaEventIdMemoryFlags::FATAL_PROCESS,
            };
            event.event_data.set_memory_access_fault(fault);
            let (node, address) = (fault.node_id, fault.virtual_address);
            say(Level::Error, || format!("memory access fault by node {node} at {address:#x}"));
        }
        (HsaEventType::HW_EXCEPTION, WAITED_HARDWARE) if answer.hardware_gpu_id.0 != 0 => {
            event.event_data.set_hw_exception(HsaHwException {
                node_id: node_of(answer.hardware_gpu_id)?,
                reset_type: answer.hardware_reset_type,
                memory_lost: answer.hardware_memory_lost,
                reset_cause: HsaHwExceptionCause(answer.hardware_reset_cause),
            });
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thunk::topology::Gpu;
    use virtio_kfd_protocol::Apertures;

    fn event(event_type: HsaEventType) -> HsaEvent {
        HsaEvent { event_id: 5, event_data: HsaEventData { event_type, ..Default::default() } }
    }

    fn snapshot() -> Snapshot {
        let gpu = Gpu {
            node: 3,
            gpu_id: GpuId(77),
            apertures: Apertures::default(),
            device: None,
            hdp_registers: None,
        };
        Snapshot { gpus: vec![gpu], ..Default::default() }
    }

    #[test]
    fn only_signals_and_debug_events_can_be_set() {
        // Status table of events.c of AMD's library.
        for (event_type, system) in [(0, false), (5, false), (3, true), (8, true), (1, true)] {
            let refused =
                require_signal(&event(HsaEventType(event_type))).err().map(|refusal| refusal.status);
            assert_eq!(refused, system.then_some(HsakmtStatus::ERROR), "{event_type}");
        }
    }

    #[test]
    fn a_memory_fault_is_told_in_the_guests_terms() {
        let answer = WaitEventsAnswer {
            memory_va: GuestVa(0x7000_1000),
            memory_gpu_id: GpuId(77),
            memory_failure: 1 | 8,
            memory_error_type: 2,
            ..Default::default()
        };
        let mut memory = event(HsaEventType::MEMORY);
        tell(&mut memory, WAITED_MEMORY, &answer, Some(&snapshot())).unwrap();
        let fault = memory.event_data.memory_access_fault();
        assert_eq!(({ fault.node_id }, { fault.virtual_address }), (3, 0x7000_1000));
        let failure = fault.failure;
        assert!(failure.is_set(HsaAccessAttributeFailure::NOT_PRESENT));
        assert!(failure.is_set(HsaAccessAttributeFailure::IMPRECISE));
        assert!(failure.is_set(HsaAccessAttributeFailure::ECC));
        assert!(!failure.is_set(HsaAccessAttributeFailure::READ_ONLY));
        assert_eq!({ fault.flags }, HsaEventIdMemoryFlags::FATAL_PROCESS);

        let mut other = event(HsaEventType::MEMORY);
        tell(&mut other, 0, &answer, Some(&snapshot())).unwrap();
        assert_eq!(other, event(HsaEventType::MEMORY), "it was not this event");
    }

    #[test]
    fn a_loss_is_told_to_those_who_wait_for_hardware_exceptions() {
        let before = [event(HsaEventType::SIGNAL), event(HsaEventType::HW_EXCEPTION)];
        let mut both = before;
        assert!(!tell_loss(&mut both, true, Some(&snapshot())), "nobody has set the signal");
        assert_eq!(both, before);
        assert!(tell_loss(&mut both, false, Some(&snapshot())));
        let [signal, exception] = both;
        assert_eq!(signal, event(HsaEventType::SIGNAL));
        let told = exception.event_data.hw_exception();
        assert_eq!(({ told.node_id }, { told.memory_lost }), (3, 1));
        for all in [false, true] {
            let mut only = [event(HsaEventType::HW_EXCEPTION); 2];
            assert!(tell_loss(&mut only, all, Some(&snapshot())));
            assert_eq!(only, [exception; 2]);
            assert!(!tell_loss(&mut [signal], all, Some(&snapshot())));
            assert!(!tell_loss(&mut [], all, Some(&snapshot())));
            assert!(!tell_loss(&mut [exception], all, None), "no GPU");
        }
    }

    #[test]
    fn an_unknown_gpu_is_an_error() {
        let answer = WaitEventsAnswer { hardware_gpu_id: GpuId(1), ..Default::default() };
        let mut exception = event(HsaEventType::HW_EXCEPTION);
        let refusal = tell(&mut exception, WAITED_HARDWARE, &answer, Some(&snapshot())).unwrap_err();
        assert_eq!(refusal.status, HsakmtStatus::INVALID_NODE_UNIT);
    }

    #[test]
    fn an_event_is_live_until_destroyed() {
        let events = Events::default();
        events.own(0x1000, &event(HsaEventType::SIGNAL));
        assert!(events.is_live(0x1000));
        assert!(!events.is_live(0x2000));
    }
}
