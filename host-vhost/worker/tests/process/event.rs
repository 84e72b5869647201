//! Events, and waits that hold up nothing.

use std::time::{Duration, Instant};

use kfd_ipc::worker::ToWorker;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::*;

use crate::support::*;

const EINVAL: u32 = 22;
const EIO: u32 = 5;
/// `KFD_IOC_WAIT_RESULT_*` (linux/kfd_ioctl.h).
const COMPLETE: u32 = 0;
const TIMEOUT: u32 = 1;
const FAIL: u32 = 2;
const FOR_EVER: u32 = u32::MAX;

fn event(event_id: EventId) -> EventRequest {
    EventRequest { event_id, pad: 0 }
}

fn create(worker: &mut Worker, auto_reset: u32) -> CreateEventAnswer {
    let request = CreateEventRequest { auto_reset, ..Default::default() };
    worker.call::<CreateEvent>(&request, &[]).unwrap().0
}

fn wait(worker: &mut Worker, ring: u8, ids: &[EventId], all: bool, timeout: u32) -> u64 {
    let list: Vec<WaitEvent> = ids.iter().map(|id| WaitEvent { event_id: *id, kind: 0, age: 0 }).collect();
    let mut frame = frame(VERSION);
    let request = WaitEventsRequest { timeout, wait_for_all: all.into() };
    frame.push::<WaitEvents>(&request, &list, list.len()).unwrap();
    worker.frame(ring, frame)
}

/// Result and errno of the wait with that ticket, which is the next to be answered.
fn ended(worker: &mut Worker, ring: u8, ticket: u64) -> (u32, u32) {
    let answer = worker.answer(ring);
    assert_eq!(answer.ticket, ticket);
    let (wait, _) = answer.decode::<WaitEvents>(0).unwrap();
    (wait.wait_result, wait.errno)
}

/// Real KFD answers the same without a GPU (Linux 6.12): time-out 1, then 0, and clear again where it resets itself.
#[test]
fn events_are_set_waited_for_reset_and_destroyed() {
    for profile in ["none", "gfx906"] {
        let mut worker = Worker::greeted(profile, settings());
        let (auto, manual) = (create(&mut worker, 1), create(&mut worker, 0));
        assert_ne!(auto.event_id, manual.event_id);
        let both = [auto.event_id, manual.event_id];
        let check = |worker: &mut Worker, all, expected| {
            let ticket = wait(worker, 1, &both, all, 10);
            assert_eq!(ended(worker, 1, ticket), expected, "{profile}");
        };
        check(&mut worker, false, (TIMEOUT, 0));
        worker.call::<SetEvent>(&event(auto.event_id), &[]).unwrap();
        check(&mut worker, false, (COMPLETE, 0));
        check(&mut worker, false, (TIMEOUT, 0));
        worker.call::<SetEvent>(&event(manual.event_id), &[]).unwrap();
        check(&mut worker, false, (COMPLETE, 0));
        check(&mut worker, false, (COMPLETE, 0));
        check(&mut worker, true, (TIMEOUT, 0));
        worker.call::<ResetEvent>(&event(manual.event_id), &[]).unwrap();
        check(&mut worker, false, (TIMEOUT, 0));
        worker.call::<DestroyEvent>(&event(manual.event_id), &[]).unwrap();
        assert_eq!(worker.failure::<DestroyEvent>(&event(manual.event_id), &[]), (Status::ERRNO, EINVAL));
        assert_eq!(worker.failure::<SetEvent>(&event(EventId(4000)), &[]), (Status::ERRNO, EINVAL));
        let ticket = wait(&mut worker, 1, &[manual.event_id], false, 0);
        assert_eq!(ended(&mut worker, 1, ticket), (FAIL, EINVAL));
    }
}

#[test]
fn a_wait_on_one_ring_holds_up_no_other() {
    let mut worker = Worker::greeted("gfx906", settings());
    let (first, second) = (create(&mut worker, 1), create(&mut worker, 1));
    let waiting = wait(&mut worker, 5, &[first.event_id], false, FOR_EVER);
    let other = wait(&mut worker, 6, &[second.event_id], false, FOR_EVER);
    for _ in 0..100 {
        worker.call::<Nop>(&Nothing {}, &[]).unwrap();
    }
    // Behind the wait on the same ring.
    let mut behind = frame(VERSION);
    behind.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    let behind = worker.frame(5, behind);
    worker.call::<SetEvent>(&event(second.event_id), &[]).unwrap();
    assert_eq!(ended(&mut worker, 6, other), (COMPLETE, 0));
    worker.call::<SetEvent>(&event(first.event_id), &[]).unwrap();
    assert_eq!(ended(&mut worker, 5, waiting), (COMPLETE, 0));
    let answer = worker.answer(5);
    assert_eq!((answer.ticket, answer.statuses()), (behind, vec![Status::OK]));
}

#[test]
fn waits_go_on_any_ring_but_the_control_ring() {
    let mut worker = Worker::greeted("none", settings());
    let id = create(&mut worker, 1).event_id;
    wait(&mut worker, 0, &[id], false, 0);
    assert_eq!(worker.answer(0).statuses(), [Status::WRONG_RING]);
    for ring in [1, 63] {
        let ticket = wait(&mut worker, ring, &[id], false, 0);
        assert_eq!(ended(&mut worker, ring, ticket), (TIMEOUT, 0));
    }
}

/// kfd_wait_on_events: a destroyed event ends the wait with KFD_IOC_WAIT_RESULT_FAIL and EIO.
#[test]
fn destroying_an_event_ends_the_wait_on_it() {
    let mut worker = Worker::greeted("gfx906", settings());
    let id = create(&mut worker, 0).event_id;
    let ticket = wait(&mut worker, 2, &[id], true, FOR_EVER);
    // The wait may begin after the destruction, and then finds no event.
    worker.call::<DestroyEvent>(&event(id), &[]).unwrap();
    let (result, errno) = ended(&mut worker, 2, ticket);
    assert_eq!(result, FAIL);
    assert!(errno == EIO || errno == EINVAL, "{errno}");
}

#[test]
fn ages_tell_of_signals_that_were_missed() {
    let mut worker = Worker::greeted("gfx906", settings());
    let id = create(&mut worker, 1).event_id;
    let look = |worker: &mut Worker, age| {
        let mut frame = frame(VERSION);
        let request = WaitEventsRequest { timeout: 0, wait_for_all: 0 };
        frame.push::<WaitEvents>(&request, &[WaitEvent { event_id: id, kind: 0, age }], 1).unwrap();
        worker.frame(3, frame);
        let (answer, events) = worker.answer(3).decode::<WaitEvents>(0).unwrap();
        (answer.wait_result, events[0].age)
    };
    // An age of 1 is that of a new event (kfd_events.c: create_other_event, create_signal_event).
    assert_eq!(look(&mut worker, 1).0, TIMEOUT);
    worker.call::<SetEvent>(&event(id), &[]).unwrap();
    let (result, age) = look(&mut worker, 1);
    assert_eq!((result, age), (COMPLETE, 2));
    let (result, age) = look(&mut worker, 1);
    assert_eq!((result, age), (COMPLETE, 2), "an old age is told at once, though the event is clear again");
    assert_eq!(look(&mut worker, 2).0, TIMEOUT);
}

#[test]
fn a_gtt_buffer_becomes_the_event_page_and_cannot_be_freed() {
    let mut worker = Worker::greeted("gfx906", settings());
    let gpu_id = worker.acquire();
    // 8 pages of slots, GTT and writable, at an address of the guest's choice.
    let request = AllocMemoryRequest {
        va: GuestVa(0x7f00_0000_0000),
        size: 8 * 4096,
        gpu_id,
        flags: 0xd600_0002,
        ..Default::default()
    };
    let mut frame = frame(VERSION);
    let index = frame.push::<AllocMemory>(&request, &[], 0).unwrap();
    frame.push::<MapMemory>(&BufferRequest { handle: Handle::in_frame(index) }, &[gpu_id], 0).unwrap();
    let page = CreateEventRequest { event_page: Handle::in_frame(index), ..Default::default() };
    frame.push::<CreateEvent>(&page, &[], 0).unwrap();
    worker.frame(0, frame);
    let answer = worker.answer(0);
    assert_eq!(answer.statuses(), [Status::OK; 3]);
    let (event, _) = answer.decode::<CreateEvent>(2).unwrap();
    assert_eq!((event.event_id.0, event.slot_index, event.trigger_data), (1, 1, 1));
    let handle = answer.decode::<AllocMemory>(0).unwrap().0.handle;
    worker.call::<UnmapMemory>(&BufferRequest { handle }, &[gpu_id]).unwrap();
    // EPERM: kfd_ioctl_free_memory_of_gpu refuses to free the event page.
    assert_eq!(worker.failure::<FreeMemory>(&BufferRequest { handle }, &[]), (Status::ERRNO, 1));
    let bad = CreateEventRequest { event_page: Handle(77), ..Default::default() };
    assert_eq!(worker.failure::<CreateEvent>(&bad, &[]), (Status::BAD_HANDLE, 0));
}

/// Creates events of a type, 64 at a time, until one fails or there are `most`; how many, and the failure.
fn fill(worker: &mut Worker, event_type: u32, most: usize) -> (usize, Option<Status>) {
    let mut made = 0;
    while made < most {
        let mut frame = frame(VERSION);
        for _ in 0..64.min(most - made) {
            frame
                .push::<CreateEvent>(&CreateEventRequest { event_type, ..Default::default() }, &[], 0)
                .unwrap();
        }
        worker.frame(0, frame);
        let statuses = worker.answer(0).statuses();
        made += statuses.iter().filter(|status| status.is_ok()).count();
        if let Some(failed) = statuses.into_iter().find(|status| !status.is_ok()) {
            return (made, Some(failed));
        }
    }
    (made, None)
}

/// The kernel has 4095 signal events (ids from 1 to 4095) and does not bound those of other types; the worker bounds all.
#[test]
fn events_are_bounded() {
    let mut worker = Worker::greeted("none", settings());
    assert_eq!(fill(&mut worker, 0, 4096), (4095, Some(Status::ERRNO)));
    assert_eq!(fill(&mut worker, 8, 1000), (257, Some(Status::LIMIT)));
    worker.call::<DestroyEvent>(&event(EventId(17)), &[]).unwrap();
    assert_eq!(fill(&mut worker, 8, 2), (1, Some(Status::LIMIT)));
}

#[test]
fn the_end_of_the_channel_ends_a_worker_that_waits() {
    let mut worker = Worker::greeted("gfx906", settings());
    let id = create(&mut worker, 1).event_id;
    for ring in 1..64 {
        wait(&mut worker, ring, &[id], false, FOR_EVER);
    }
    worker.call::<Nop>(&Nothing {}, &[]).unwrap();
    let begin = Instant::now();
    let (status, log) = worker.end();
    assert_eq!(status, 0, "{log}");
    assert!(begin.elapsed() < Duration::from_secs(10));
}

/// A guest that fills the queue behind a wait gets its surplus refused, in its turn, and nothing else suffers.
#[test]
fn a_full_ring_refuses_in_order() {
    let mut worker = Worker::greeted("none", settings());
    let id = create(&mut worker, 1).event_id;
    let first = wait(&mut worker, 1, &[id], false, FOR_EVER);
    let large = vec![WaitEvent { event_id: id, kind: 0, age: 0 }; 4096];
    let mut tickets = Vec::new();
    for _ in 0..200 {
        let mut frame = frame(VERSION);
        frame.push::<WaitEvents>(&WaitEventsRequest { timeout: 0, wait_for_all: 0 }, &large, 0).unwrap();
        let ticket = worker.ticket();
        worker.send(&ToWorker::Frame { ring: 1, ticket, bytes: &frame.finish() }, None);
        tickets.push(ticket);
    }
    worker.call::<SetEvent>(&event(id), &[]).unwrap();
    assert_eq!(ended(&mut worker, 1, first), (COMPLETE, 0));
    let mut refused = 0;
    for ticket in tickets {
        let answer = worker.answer(1);
        assert_eq!(answer.ticket, ticket);
        match answer.statuses()[..] {
            [Status::OK] => assert_eq!(refused, 0, "nothing is taken after the first that did not fit"),
            [Status::LIMIT] => refused += 1,
            ref other => panic!("{other:?}"),
        }
    }
    // Frames of 64 KiB and some, and room for 8 MiB.
    assert!((60..200).contains(&refused), "{refused}");
}
