//! Events.

use std::collections::HashMap;

use kfd_abi::event::{
    EventData, HsaSignalEventData, KFD_IOC_EVENT_HW_EXCEPTION, KFD_IOC_EVENT_MEMORY, KFD_IOC_EVENT_SIGNAL,
    KFD_SIGNAL_EVENT_LIMIT,
};
use kfd_host::{KfdHandle, WaitOutcome};
use virtio_kfd_protocol::calls::{CreateEvent, DestroyEvent, ResetEvent, SetEvent, WaitEvents};
use virtio_kfd_protocol::{
    CreateEventAnswer, CreateEventRequest, EventId, EventRequest, GpuId, GuestVa, Nothing, WAITED_HARDWARE,
    WAITED_MEMORY, WaitEvent, WaitEventsAnswer, WaitEventsRequest,
};

use super::{Made, Outcome, Reply};
use crate::context::{Context, EventPage};
use crate::exceptions;
use crate::failure::{Failure, errno_number, expect_zero};

/// Most events of a context: all signal events that the kernel has room for in a process, and some of the other
/// types, which the kernel does not bound though each costs it memory.
const MAX_EVENTS: usize = KFD_SIGNAL_EVENT_LIMIT as usize + 256;

pub fn create_event(context: &Context, made: &Made, request: &CreateEventRequest) -> Outcome<CreateEvent> {
    expect_zero("CreateEvent", &[request.pad.into()])?;
    let page = match request.event_page.is_none() {
        true => None,
        false => {
            let handle = made.resolve(request.event_page)?;
            Some(
                context
                    .memory()
                    .buffer(handle)?
                    .kfd
                    .ok_or_else(|| Failure::invalid("CreateEvent: a buffer without an address"))?,
            )
        }
    };
    let made = make_event(context, page, request)?;
    let mut queues = context.queues();
    if queues.exceptions.wait_for_events() {
        exceptions::start(context, &mut queues);
    }
    Ok(Reply::of(made))
}

fn make_event(
    context: &Context,
    page: Option<KfdHandle>,
    request: &CreateEventRequest,
) -> Result<CreateEventAnswer, Failure> {
    // Held during the call, so that a destruction of the new id is not seen before its creation.
    let mut events = context.events();
    if events.types.len() >= MAX_EVENTS {
        return Err(Failure::limit(format!("CreateEvent: {MAX_EVENTS} events")));
    }
    if page.is_some() {
        events.page = EventPage::Buffer;
    }
    let auto_reset = request.auto_reset != 0;
    let event = context.kfd.create_event(request.event_type, auto_reset, request.node_id, page)?;
    events.types.insert(event.event_id, request.event_type);
    if events.page == EventPage::None && event.page_offset != 0 {
        events.page = EventPage::Kernel;
        if let Err(error) = context.kfd.use_all_event_slots(event.page_offset) {
            tracing::warn!("the context has 256 event slots only: {error}");
        }
    }
    Ok(CreateEventAnswer {
        event_id: EventId(event.event_id),
        trigger_data: event.trigger_data,
        slot_index: event.slot_index,
        pad: 0,
    })
}

pub fn destroy_event(context: &Context, request: &EventRequest) -> Outcome<DestroyEvent> {
    expect_zero("DestroyEvent", &[request.pad.into()])?;
    let mut events = context.events();
    context.kfd.destroy_event(events.guests(request.event_id.0))?;
    events.types.remove(&request.event_id.0);
    Ok(Reply::of(Nothing {}))
}

pub fn set_event(context: &Context, request: &EventRequest) -> Outcome<SetEvent> {
    expect_zero("SetEvent", &[request.pad.into()])?;
    let event = context.events().guests(request.event_id.0);
    context.kfd.set_event(event)?;
    Ok(Reply::of(Nothing {}))
}

pub fn reset_event(context: &Context, request: &EventRequest) -> Outcome<ResetEvent> {
    expect_zero("ResetEvent", &[request.pad.into()])?;
    let event = context.events().guests(request.event_id.0);
    context.kfd.reset_event(event)?;
    Ok(Reply::of(Nothing {}))
}

pub fn wait_events(
    context: &Context,
    request: &WaitEventsRequest,
    list: &[WaitEvent],
) -> Outcome<WaitEvents> {
    let (types, mut data) = {
        let events = context.events();
        let types = types(&events.types, list);
        let asked = list.iter().zip(&types);
        let data: Vec<EventData> =
            asked.map(|(event, kind)| ask(events.guests(event.event_id.0), event.age, *kind)).collect();
        (types, data)
    };
    let outcome = context.kfd.wait_events(&mut data, request.wait_for_all != 0, request.timeout);
    Ok(reply(outcome, list, &types, &data))
}

/// The type of each event of the list; of one that is not known, that of a signal.
fn types(events: &HashMap<u32, u32>, list: &[WaitEvent]) -> Vec<u32> {
    list.iter().map(|event| events.get(&event.event_id.0).copied().unwrap_or(KFD_IOC_EVENT_SIGNAL)).collect()
}

/// What the kernel is asked. Only signal events have an age; in the same bytes the others return their data.
fn ask(event_id: u32, age: u64, event_type: u32) -> EventData {
    let mut data = EventData { event_id, ..Default::default() };
    if event_type == KFD_IOC_EVENT_SIGNAL {
        data.set_signal_event_data(HsaSignalEventData { last_event_age: age });
    }
    data
}

/// What the kernel answered. It writes the data of exceptions only where they happened, over the zeros of the request.
fn reply(outcome: WaitOutcome, list: &[WaitEvent], types: &[u32], data: &[EventData]) -> Reply<WaitEvents> {
    let mut fixed = WaitEventsAnswer {
        wait_result: outcome.result,
        errno: outcome.errno.map_or(0, errno_number),
        ..Default::default()
    };
    let (mut memory, mut hardware) = (false, false);
    let mut tail = Vec::with_capacity(list.len());
    for ((event, event_type), data) in list.iter().zip(types).zip(data) {
        let happened = data.data.iter().any(|word| *word != 0);
        let mut answer = WaitEvent { event_id: event.event_id, kind: 0, age: 0 };
        match *event_type {
            KFD_IOC_EVENT_SIGNAL => answer.age = data.signal_event_data().last_event_age,
            KFD_IOC_EVENT_MEMORY if happened => {
                answer.kind = WAITED_MEMORY;
                if !memory {
                    memory = true;
                    fill_memory(&mut fixed, data);
                }
            }
            KFD_IOC_EVENT_HW_EXCEPTION if happened => {
                answer.kind = WAITED_HARDWARE;
                if !hardware {
                    hardware = true;
                    fill_hardware(&mut fixed, data);
                }
            }
            _ => {}
        }
        tail.push(answer);
    }
    Reply { fixed, tail, failed: outcome.errno.is_some() }
}

fn fill_memory(answer: &mut WaitEventsAnswer, data: &EventData) {
    let exception = data.memory_exception_data();
    let failure = exception.failure;
    let bits =
        [(failure.not_present, 1), (failure.read_only, 2), (failure.no_execute, 4), (failure.imprecise, 8)];
    answer.memory_va = GuestVa(exception.va);
    answer.memory_gpu_id = GpuId(exception.gpu_id);
    answer.memory_failure = bits.iter().filter(|(set, _)| *set != 0).fold(0, |sum, (_, bit)| sum | bit);
    answer.memory_error_type = exception.error_type;
}

fn fill_hardware(answer: &mut WaitEventsAnswer, data: &EventData) {
    let exception = data.hw_exception_data();
    answer.hardware_reset_type = exception.reset_type;
    answer.hardware_reset_cause = exception.reset_cause;
    answer.hardware_memory_lost = exception.memory_lost;
    answer.hardware_gpu_id = GpuId(exception.gpu_id);
}

#[cfg(test)]
mod tests {
    use kfd_abi::event::{HsaHwExceptionData, HsaMemoryExceptionData, MemoryExceptionFailure};
    use nix::errno::Errno;

    use super::*;

    fn wait(id: u32, age: u64) -> WaitEvent {
        WaitEvent { event_id: EventId(id), kind: 0, age }
    }

    #[test]
    fn ages_go_to_signal_events_only() {
        let events = HashMap::from([(1, KFD_IOC_EVENT_SIGNAL), (2, KFD_IOC_EVENT_MEMORY)]);
        let list = [wait(1, 5), wait(2, 5), wait(3, 5)];
        let types = types(&events, &list);
        let ages: Vec<u64> = list
            .iter()
            .zip(types)
            .map(|(event, kind)| ask(event.event_id.0, event.age, kind).signal_event_data().last_event_age)
            .collect();
        assert_eq!(ages, [5, 0, 5]);
    }

    #[test]
    fn exceptions_are_those_of_the_first_event_of_each_kind_that_has_any() {
        let list = [wait(1, 3), wait(2, 0), wait(3, 0), wait(4, 0), wait(5, 0)];
        let types = [
            KFD_IOC_EVENT_SIGNAL,
            KFD_IOC_EVENT_MEMORY,
            KFD_IOC_EVENT_MEMORY,
            KFD_IOC_EVENT_MEMORY,
            KFD_IOC_EVENT_HW_EXCEPTION,
        ];
        let mut data = [EventData::default(); 5];
        data[0].set_signal_event_data(HsaSignalEventData { last_event_age: 4 });
        let fault = |va| HsaMemoryExceptionData {
            failure: MemoryExceptionFailure { not_present: 1, read_only: 0, no_execute: 0, imprecise: 1 },
            va,
            gpu_id: 26287,
            error_type: 0,
        };
        data[2].set_memory_exception_data(fault(0x1000));
        data[3].set_memory_exception_data(fault(0x2000));
        let hang = HsaHwExceptionData { reset_type: 0, reset_cause: 1, memory_lost: 1, gpu_id: 26287 };
        data[4].set_hw_exception_data(hang);
        let reply = reply(WaitOutcome { result: 0, errno: None }, &list, &types, &data);
        assert!(!reply.failed);
        let kinds: Vec<u32> = reply.tail.iter().map(|event| event.kind).collect();
        assert_eq!(kinds, [0, 0, WAITED_MEMORY, WAITED_MEMORY, WAITED_HARDWARE]);
        assert_eq!(reply.tail[0].age, 4);
        let fixed = reply.fixed;
        assert_eq!(
            (fixed.memory_va, fixed.memory_failure, fixed.memory_gpu_id),
            (GuestVa(0x1000), 9, GpuId(26287))
        );
        assert_eq!((fixed.hardware_reset_cause, fixed.hardware_memory_lost), (1, 1));
    }

    #[test]
    fn a_failed_wait_still_carries_its_result() {
        let outcome = WaitOutcome { result: 2, errno: Some(Errno::EIO) };
        let reply = reply(outcome, &[wait(1, 0)], &[KFD_IOC_EVENT_SIGNAL], &[EventData::default()]);
        assert_eq!((reply.fixed.wait_result, reply.fixed.errno, reply.failed), (2, 5, true));
    }
}
