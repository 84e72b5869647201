//! Rules of `kfd_events.c`, each with the function that has it.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kfd_abi::event::{
    EventData, HsaSignalEventData, KFD_EVENT_TIMEOUT_INFINITE, KFD_IOC_WAIT_RESULT_COMPLETE,
    KFD_IOC_WAIT_RESULT_FAIL, KFD_IOC_WAIT_RESULT_TIMEOUT, MemoryExceptionFailure,
};

use super::*;

const COMPLETE: WaitEnd = WaitEnd { wait_result: KFD_IOC_WAIT_RESULT_COMPLETE, result: Ok(()) };
const TIMEOUT: WaitEnd = WaitEnd { wait_result: KFD_IOC_WAIT_RESULT_TIMEOUT, result: Ok(()) };

fn events() -> (Arc<Events>, Arc<Arena>) {
    (Arc::new(Events::default()), Arc::new(Arena::new("test", 1 << 20).unwrap()))
}

fn data(id: u32) -> EventData {
    EventData { event_id: id, ..EventData::default() }
}

/// Waits until `count` waits sleep.
fn sleeping(events: &Events, count: usize) {
    while events.table().waits.len() < count {
        thread::yield_now();
    }
}

#[test]
fn ids_start_at_one_and_at_two_to_the_thirty() {
    // kfd_event_init_process reserves 0; KFD_FIRST_NONSIGNAL_EVENT_ID.
    let (events, arena) = events();
    let signal = events.create(KFD_IOC_EVENT_SIGNAL, true, &arena).unwrap();
    assert_eq!(signal, Created { id: 1, has_slot: true });
    let memory = events.create(KFD_IOC_EVENT_MEMORY, false, &arena).unwrap();
    assert_eq!(memory, Created { id: 0x4000_0000, has_slot: false });
    assert_eq!(events.destroy(1), Ok(()));
    assert_eq!(events.destroy(1), Err(Errno::EINVAL));
    assert_eq!(events.create(KFD_IOC_EVENT_SIGNAL, true, &arena).unwrap().id, 1, "the lowest free id");
}

#[test]
fn a_process_that_mapped_no_page_has_255_signal_events() {
    // allocate_event_notification_slot: 256 slots, of which 0 is reserved.
    let (events, arena) = events();
    for id in 1..256 {
        assert_eq!(events.create(KFD_IOC_EVENT_SIGNAL, false, &arena).unwrap().id, id);
    }
    assert_eq!(events.create(KFD_IOC_EVENT_SIGNAL, false, &arena), Err(Errno::ENOSPC));
    assert!(events.create(KFD_IOC_EVENT_MEMORY, false, &arena).is_ok());
    // kfd_event_mmap: mapping the whole page gives all 4095.
    events.map_page(EVENT_PAGE_SIZE).unwrap();
    for id in 256..4096 {
        assert_eq!(events.create(KFD_IOC_EVENT_SIGNAL, false, &arena).unwrap().id, id);
    }
    assert_eq!(events.create(KFD_IOC_EVENT_SIGNAL, false, &arena), Err(Errno::ENOSPC));
}

#[test]
fn the_page_is_mapped_up_to_its_size() {
    let (events, arena) = events();
    assert_eq!(events.map_page(EVENT_PAGE_SIZE).unwrap_err(), Errno::EINVAL, "no page yet");
    events.create(KFD_IOC_EVENT_SIGNAL, false, &arena).unwrap();
    assert_eq!(events.map_page(2 * EVENT_PAGE_SIZE).unwrap_err(), Errno::EINVAL);
    let (arena, offset) = events.map_page(EVENT_PAGE_SIZE).unwrap();
    let mut slots = vec![0u8; EVENT_PAGE_SIZE as usize];
    arena.read(offset, &mut slots).unwrap();
    assert!(slots.iter().all(|byte| *byte == 0xff), "UNSIGNALED_EVENT_SLOT");
}

#[test]
fn only_signal_events_are_set_by_the_cpu() {
    // event_can_be_cpu_signaled.
    let (events, arena) = events();
    for kind in 1..=8 {
        let id = events.create(kind, false, &arena).unwrap().id;
        assert_eq!(events.set(id), Err(Errno::EINVAL), "type {kind}");
        assert_eq!(events.reset(id), Err(Errno::EINVAL), "type {kind}");
    }
    assert_eq!(events.set(4000), Err(Errno::EINVAL), "no such event");
}

#[test]
fn auto_reset_is_taken_by_one_wait() {
    // init_event_waiter.
    let (events, arena) = events();
    let auto = events.create(KFD_IOC_EVENT_SIGNAL, true, &arena).unwrap().id;
    let manual = events.create(KFD_IOC_EVENT_SIGNAL, false, &arena).unwrap().id;
    events.set(auto).unwrap();
    events.set(manual).unwrap();
    for (id, second) in [(auto, TIMEOUT), (manual, COMPLETE)] {
        assert_eq!(events.wait(&mut [data(id)], true, 0), COMPLETE);
        assert_eq!(events.wait(&mut [data(id)], true, 0), second);
    }
    events.reset(manual).unwrap();
    assert_eq!(events.wait(&mut [data(manual)], true, 1), TIMEOUT);
}

#[test]
fn auto_reset_does_not_stay_when_it_woke_somebody() {
    // set_event: signaled = !auto_reset || no waiters.
    let (events, arena) = events();
    let id = events.create(KFD_IOC_EVENT_SIGNAL, true, &arena).unwrap().id;
    let waiter = {
        let events = events.clone();
        thread::spawn(move || events.wait(&mut [data(id)], true, KFD_EVENT_TIMEOUT_INFINITE))
    };
    sleeping(&events, 1);
    events.set(id).unwrap();
    assert_eq!(waiter.join().unwrap(), COMPLETE);
    assert_eq!(events.wait(&mut [data(id)], true, 0), TIMEOUT);
    assert!(events.table().waits.is_empty());
}

#[test]
fn one_signal_wakes_all_waits() {
    let (events, arena) = events();
    let id = events.create(KFD_IOC_EVENT_SIGNAL, true, &arena).unwrap().id;
    let waiters: Vec<_> = (0..8)
        .map(|_| {
            let events = events.clone();
            thread::spawn(move || events.wait(&mut [data(id)], false, KFD_EVENT_TIMEOUT_INFINITE))
        })
        .collect();
    sleeping(&events, 8);
    events.set(id).unwrap();
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap(), COMPLETE);
    }
}

#[test]
fn any_and_all() {
    // test_event_condition.
    let (events, arena) = events();
    let ids: Vec<u32> =
        (0..3).map(|_| events.create(KFD_IOC_EVENT_SIGNAL, false, &arena).unwrap().id).collect();
    let all = || ids.iter().map(|id| data(*id)).collect::<Vec<_>>();
    events.set(ids[1]).unwrap();
    assert_eq!(events.wait(&mut all(), false, 0), COMPLETE);
    assert_eq!(events.wait(&mut all(), true, 1), TIMEOUT);
    let (done, ended) = mpsc::channel();
    let waiter = {
        let (events, mut list) = (events.clone(), all());
        thread::spawn(move || done.send(events.wait(&mut list, true, KFD_EVENT_TIMEOUT_INFINITE)))
    };
    sleeping(&events, 1);
    events.set(ids[0]).unwrap();
    assert!(ended.recv_timeout(Duration::from_millis(20)).is_err(), "one is missing");
    events.set(ids[2]).unwrap();
    assert_eq!(ended.recv().unwrap(), COMPLETE);
    waiter.join().unwrap().unwrap();
    assert_eq!(events.wait(&mut [], true, 0), COMPLETE, "none of none is missing");
}

#[test]
fn a_bad_id_fails_at_once_and_leaves_no_waiter() {
    let (events, arena) = events();
    let id = events.create(KFD_IOC_EVENT_SIGNAL, false, &arena).unwrap().id;
    let end = events.wait(&mut [data(id), data(77)], false, KFD_EVENT_TIMEOUT_INFINITE);
    assert_eq!(end, WaitEnd::failed(Errno::EINVAL));
    assert!(events.table().get(id).unwrap().waiters.is_empty());
}

#[test]
fn destroying_an_event_wakes_its_waits_with_a_failure() {
    // destroy_event, kfd_wait_on_events.
    let (events, arena) = events();
    let id = events.create(KFD_IOC_EVENT_SIGNAL, false, &arena).unwrap().id;
    let waiter = {
        let events = events.clone();
        thread::spawn(move || events.wait(&mut [data(id)], true, KFD_EVENT_TIMEOUT_INFINITE))
    };
    sleeping(&events, 1);
    events.destroy(id).unwrap();
    let expected = WaitEnd { wait_result: KFD_IOC_WAIT_RESULT_FAIL, result: Err(Errno::EIO) };
    assert_eq!(waiter.join().unwrap(), expected);
}

#[test]
fn a_sleeping_wait_holds_up_nobody() {
    let (events, arena) = events();
    let id = events.create(KFD_IOC_EVENT_SIGNAL, false, &arena).unwrap().id;
    let waiter = {
        let events = events.clone();
        thread::spawn(move || events.wait(&mut [data(id)], true, KFD_EVENT_TIMEOUT_INFINITE))
    };
    sleeping(&events, 1);
    let other = events.create(KFD_IOC_EVENT_SIGNAL, true, &arena).unwrap().id;
    events.set(other).unwrap();
    assert_eq!(events.wait(&mut [data(other)], true, KFD_EVENT_TIMEOUT_INFINITE), COMPLETE);
    events.set(id).unwrap();
    waiter.join().unwrap();
}

#[test]
fn an_age_that_moved_on_ends_the_wait() {
    // init_event_waiter and copy_signaled_event_data: last_event_age.
    let (events, arena) = events();
    let id = events.create(KFD_IOC_EVENT_SIGNAL, true, &arena).unwrap().id;
    let aged = |age| {
        let mut event = data(id);
        event.set_signal_event_data(HsaSignalEventData { last_event_age: age });
        event
    };
    let mut list = [aged(1)];
    assert_eq!(events.wait(&mut list, true, 0), TIMEOUT, "age 1 is that of an event never signalled");
    events.set(id).unwrap();
    let mut list = [data(id)];
    assert_eq!(events.wait(&mut list, true, 0), COMPLETE);
    assert_eq!(list[0].signal_event_data().last_event_age, 0, "not asked for");
    let mut list = [aged(1)];
    assert_eq!(events.wait(&mut list, true, 0), COMPLETE, "missed one");
    assert_eq!(list[0].signal_event_data().last_event_age, 2);
    assert_eq!(events.wait(&mut list, true, 0), TIMEOUT);
}

#[test]
fn a_memory_event_says_where() {
    let (events, arena) = events();
    let id = events.create(KFD_IOC_EVENT_MEMORY, true, &arena).unwrap().id;
    let fault = HsaMemoryExceptionData {
        failure: MemoryExceptionFailure { not_present: 1, ..Default::default() },
        va: 0x1000,
        gpu_id: 5,
        error_type: 0,
    };
    assert_eq!(events.memory_fault(fault), 1);
    let mut list = [data(id)];
    assert_eq!(events.wait(&mut list, true, 0), COMPLETE);
    assert_eq!(list[0].memory_exception_data(), fault);
    assert_eq!(events.hardware_exception(HsaHwExceptionData::default()), 0);
}

#[test]
fn an_interrupt_wakes_what_wrote_its_slot() {
    // kfd_signal_event_interrupt, lookup_signaled_event_by_partial_id.
    let (events, arena) = events();
    let ids: Vec<u32> =
        (0..4).map(|_| events.create(KFD_IOC_EVENT_SIGNAL, true, &arena).unwrap().id).collect();
    let (arena, offset) = events.map_page(EVENT_PAGE_SIZE).unwrap();
    let write = |id: u32| arena.write(offset + u64::from(id) * 8, &1u64.to_ne_bytes()).unwrap();
    let state =
        || ids.iter().map(|id| events.wait(&mut [data(*id)], true, 0) == COMPLETE).collect::<Vec<_>>();
    write(ids[2]);
    write(ids[3]);
    events.interrupt(ids[2], 28);
    assert_eq!(state(), [false, false, true, false], "the id of the interrupt");
    events.interrupt(ids[0], 28);
    assert_eq!(state(), [false, false, false, true], "a wrong id: all that were written");
    events.interrupt(ids[1], 28);
    assert_eq!(state(), [false; 4], "nothing was written");
    // Ids are 1 to 4: with one valid bit, 0 matches 2 and 4.
    write(ids[0]);
    write(ids[3]);
    events.interrupt(0, 1);
    assert_eq!(state(), [false, false, false, true], "the first signalled one that matches");
}
