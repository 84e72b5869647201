//! Exceptions of queues with a runtime enabled: they reach what the head of the queue's save area names, in memory of the guest and
//! nowhere else.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kfd_ipc::worker::Settings;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::*;

use crate::queue::*;
use crate::support::*;

/// `KFD_RUNTIME_ENABLE_MODE_*_MASK`, errnos, and `KFD_IOC_WAIT_RESULT_*`.
const ENABLE: u32 = 1;
const TTMP: u32 = 2;
const EINVAL: u32 = 22;
const EBUSY: u32 = 16;
const EEXIST: u32 = 17;
const COMPLETE: u32 = 0;
const TIMEOUT: u32 = 1;

/// `KFD_EC_MASK(EC_QUEUE_PACKET_VENDOR_UNSUPPORTED)`: what the model's packet processors report of a packet that they do not know.
const REASON: u64 = 1 << 22;

/// `struct kfd_context_save_area_header` (linux/kfd_ioctl.h): `err_payload_addr`, `err_event_id`.
const PAYLOAD_AT: u64 = 24;
const EVENT_AT: u64 = 32;

/// The save area is the data page; the word for exceptions lies in the same page.
const AREA: u64 = VA + DATA * P;
const WORD: u64 = 0x200;

fn enable(guest: &mut Guest, mode: u32) -> (Status, u32) {
    let request = RuntimeEnableRequest { r_debug: GuestVa(0x1234_5678), mode, pad: 0 };
    guest.worker.failure::<RuntimeEnable>(&request, &[])
}

fn event(guest: &mut Guest) -> u32 {
    guest
        .worker
        .call::<CreateEvent>(&CreateEventRequest { auto_reset: 1, ..Default::default() }, &[])
        .unwrap()
        .0
        .event_id
        .0
}

/// The result of a wait for events.
fn wait(guest: &mut Guest, events: &[u32], timeout: u32) -> u32 {
    let list: Vec<WaitEvent> =
        events.iter().map(|id| WaitEvent { event_id: EventId(*id), kind: 0, age: 0 }).collect();
    let mut frame = frame(VERSION);
    let request = WaitEventsRequest { timeout, wait_for_all: 0 };
    frame.push::<WaitEvents>(&request, &list, list.len()).unwrap();
    guest.worker.frame(1, frame);
    guest.worker.answer(1).decode::<WaitEvents>(0).unwrap().0.wait_result
}

fn head(guest: &Guest, payload: u64, event: u32) {
    guest.set_word(DATA * P + PAYLOAD_AT, payload);
    guest.set_word(DATA * P + EVENT_AT, event.into());
}

fn request(guest: &Guest, area: u64) -> CreateQueueRequest {
    CreateQueueRequest { context_save_va: GuestVa(area), ..guest.queue() }
}

/// A queue that gets a packet which there is not, and so has an exception.
fn fail(guest: &mut Guest) -> QueueId {
    for pointer in [0, 64] {
        guest.set_word(POINTERS * P + pointer, 0);
    }
    let (answer, _) = guest.worker.call::<CreateQueue>(&request(guest, AREA), &[]).unwrap();
    guest.set_word(RING * P, 0xff);
    guest.set_word(POINTERS * P, 16);
    guest.set_word(BELLS * P + u64::from(answer.doorbell_offset), 16);
    guest.worker.call::<RingDoorbells>(&RingDoorbellsRequest { armed: 0, pad: 0 }, &[]).unwrap();
    answer.queue
}

fn guest() -> Guest {
    let mut guest = Guest::new("gfx906", settings());
    guest.worker.call::<DoorbellPage>(&guest.doorbell_page(), &[]).unwrap();
    guest
}

#[test]
fn an_exception_reaches_the_word_and_the_event_that_the_head_names() {
    let mut guest = guest();
    assert_eq!(enable(&mut guest, ENABLE | TTMP), (Status::OK, 0));
    let [named, other] = [(); 2].map(|()| event(&mut guest));
    head(&guest, AREA + WORD, named);
    guest.set_word(DATA * P + WORD, 1);
    for round in 0..20 {
        let queue = fail(&mut guest);
        assert_eq!(wait(&mut guest, &[named], 30_000), COMPLETE, "round {round}");
        assert_eq!(guest.word(DATA * P + WORD), REASON | 1, "round {round}");
        assert_eq!(wait(&mut guest, &[named, other], 0), TIMEOUT, "once, and no other: round {round}");
        assert_eq!(guest.destroy(queue), (Status::OK, 0));
        guest.set_word(DATA * P + WORD, 1);
    }
    // As the kernel does, the event is set even where there is no word.
    head(&guest, 0x7000, named);
    fail(&mut guest);
    assert_eq!(wait(&mut guest, &[named], 30_000), COMPLETE);
    assert_eq!(guest.word(DATA * P + WORD), 1);
}

/// Runtimes make none whose waits poll, such as ROCr with `HSA_ENABLE_INTERRUPT=0` or on `libdtif.so`. The kernel's page of events
/// comes with the guest's first event, so until then the worker has none either.
#[test]
fn an_exception_reaches_the_word_of_a_guest_that_has_made_no_event() {
    let mut guest = guest();
    assert_eq!(enable(&mut guest, ENABLE), (Status::OK, 0));
    head(&guest, AREA + WORD, 0);
    for _ in 0..2 {
        let queue = fail(&mut guest);
        let begin = Instant::now();
        while guest.word(DATA * P + WORD) != REASON {
            assert!(begin.elapsed() < PATIENCE, "{:#x}", guest.word(DATA * P + WORD));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(guest.destroy(queue), (Status::OK, 0));
        guest.set_word(DATA * P + WORD, 0);
    }
    let named = event(&mut guest);
    head(&guest, AREA + WORD, named);
    fail(&mut guest);
    assert_eq!(wait(&mut guest, &[named], 30_000), COMPLETE);
    assert_eq!(guest.word(DATA * P + WORD), REASON);
}

/// The kernel's answers (`runtime_enable`, kfd_chardev.c), and what is not passed on to it.
#[test]
fn a_runtime_is_enabled_once_and_before_there_are_queues() {
    let mut guest = guest();
    let queue = guest.worker.call::<CreateQueue>(&request(&guest, 0x5555_5555_5123), &[]).unwrap().0.queue;
    assert_eq!(enable(&mut guest, ENABLE), (Status::ERRNO, EEXIST));
    assert_eq!(guest.destroy(queue), (Status::OK, 0));
    assert_eq!(enable(&mut guest, ENABLE | 4), (Status::NOT_SUPPORTED, 0));
    assert_eq!(enable(&mut guest, ENABLE), (Status::OK, 0));
    assert_eq!(enable(&mut guest, ENABLE), (Status::ERRNO, EBUSY));
    assert_eq!(enable(&mut guest, 0), (Status::OK, 0));
    // The kernel may have looked at the mode before: places are bounded from now on.
    let refused = request(&guest, 0x5555_5555_5000);
    assert_eq!(guest.worker.failure::<CreateQueue>(&refused, &[]).0, Status::INVALID);
    assert_eq!(enable(&mut guest, ENABLE), (Status::OK, 0));
}

/// `--no-exceptions` of the daemon: nothing is enabled, so that the kernel looks for no head, and save areas may lie anywhere.
#[test]
fn no_runtime_is_enabled_where_the_operator_wants_none() {
    let mut guest = Guest::new("gfx906", Settings { no_exceptions: true, ..settings() });
    for mode in [ENABLE, TTMP, ENABLE | TTMP] {
        assert_eq!(enable(&mut guest, mode), (Status::NOT_SUPPORTED, 0));
    }
    let before = maps(&guest);
    for area in [AREA, 0x5555_5555_5000] {
        let queue = guest.worker.call::<CreateQueue>(&request(&guest, area), &[]).unwrap().0.queue;
        assert!(maps(&guest).iter().all(|(start, end, _)| (*start, *end) != (area, area + P)));
        assert_eq!(guest.destroy(queue), (Status::OK, 0));
    }
    assert!(before.len() > 20, "{before:x?}");
}

/// Ranges of the worker's addresses, by name.
fn maps(guest: &Guest) -> Vec<(u64, u64, String)> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.worker.pid())).unwrap();
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let line = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next().unwrap().split_once('-').unwrap();
        (
            number(start),
            number(end),
            format!("{} {}", words.next().unwrap(), words.nth(3).unwrap_or_default()),
        )
    };
    maps.lines().map(line).collect()
}

#[test]
fn no_save_area_is_where_the_worker_has_anything() {
    let mut guest = guest();
    assert_eq!(enable(&mut guest, ENABLE), (Status::OK, 0));
    let before = maps(&guest);
    assert!(before.len() > 20, "{before:x?}");
    let wild = [
        1,
        AREA + 1,
        AREA + 8,
        0x1000,
        0x3c00_0000_0000,
        0x65ff_ffff_f000,
        0x7fff_ffff_e000,
        1 << 47,
        u64::MAX - 4095,
    ];
    // The program and its heap; where the rest is depends on who started the worker.
    let own = before.iter().filter(|map| (0x3c00_0000_0000..0x6600_0000_0000).contains(&map.0));
    for area in own.flat_map(|(start, end, _)| [*start, end - P]).chain(wild) {
        let (status, errno) = guest.worker.failure::<CreateQueue>(&request(&guest, area), &[]);
        assert_eq!((status, errno), (Status::INVALID, 0), "{area:#x}");
    }
    // A queue has one page, which goes with it; two queues on one area cannot be.
    let queue = guest.worker.call::<CreateQueue>(&request(&guest, AREA), &[]).unwrap().0.queue;
    assert!(maps(&guest).iter().any(|(start, end, _)| (*start, *end) == (AREA, AREA + P)));
    assert_eq!(guest.worker.failure::<CreateQueue>(&request(&guest, AREA), &[]), (Status::LIMIT, 0));
    assert_eq!(guest.destroy(queue), (Status::OK, 0));
    assert!(maps(&guest).iter().all(|(start, end, _)| !(*start..*end).contains(&AREA)));
    let mut others = guest.worker.call::<CreateQueue>(&request(&guest, AREA + P * 4), &[]).unwrap().0;
    guest.destroy(others.queue);
    others = guest.worker.call::<CreateQueue>(&request(&guest, AREA), &[]).unwrap().0;
    assert_eq!(guest.destroy(others.queue), (Status::OK, 0));
}

/// A program of a guest without random addresses has its memory there.
#[test]
fn save_areas_of_programs_without_random_addresses_are_good() {
    let mut guest = guest();
    assert_eq!(enable(&mut guest, ENABLE), (Status::OK, 0));
    for area in [0x7fff_e000_0000, 0x7fff_f7ff_0000, 0x2aaa_aaaa_b000] {
        let queue = guest.worker.call::<CreateQueue>(&request(&guest, area), &[]).unwrap().0.queue;
        assert_eq!(guest.destroy(queue), (Status::OK, 0));
    }
}

/// What a guest that meets a mapping of its worker has found out is worth nothing any more.
#[test]
fn a_save_area_on_the_worker_ends_it() {
    let mut guest = guest();
    assert_eq!(enable(&mut guest, ENABLE), (Status::OK, 0));
    // A worker that the supervisor has not started has its libraries there.
    let own =
        maps(&guest).into_iter().find(|map| (0x6600_0000_0000..0x7fff_f800_0000).contains(&map.0)).unwrap();
    let mut one = frame(VERSION);
    one.push::<CreateQueue>(&request(&guest, own.0), &[], 0).unwrap();
    guest.worker.frame(0, one);
    let (status, log) = guest.worker.wait();
    assert!(status == 1 && log.contains("so it ends"), "{status}: {log}");
}

/// The event on which the worker waits is none of the guest's, whatever it does to all numbers.
#[test]
fn the_workers_own_event_is_out_of_reach() {
    let mut guest = guest();
    assert_eq!(enable(&mut guest, ENABLE), (Status::OK, 0));
    let named = event(&mut guest);
    head(&guest, AREA + WORD, named);
    for id in (0..64).filter(|id| *id != named) {
        let id = EventRequest { event_id: EventId(id), pad: 0 };
        assert_eq!(guest.worker.failure::<SetEvent>(&id, &[]), (Status::ERRNO, EINVAL), "{id:?}");
        assert_eq!(guest.worker.failure::<ResetEvent>(&id, &[]), (Status::ERRNO, EINVAL), "{id:?}");
        assert_eq!(guest.worker.failure::<DestroyEvent>(&id, &[]), (Status::ERRNO, EINVAL), "{id:?}");
        assert_ne!(wait(&mut guest, &[id.event_id.0], 0), COMPLETE, "{id:?}");
        // Nor by a head.
        if id.event_id.0 < 4 {
            head(&guest, AREA + WORD, id.event_id.0);
            let queue = fail(&mut guest);
            let begin = Instant::now();
            while guest.word(DATA * P + WORD) != REASON {
                assert!(begin.elapsed() < PATIENCE);
                std::thread::sleep(Duration::from_millis(1));
            }
            guest.set_word(DATA * P + WORD, 0);
            guest.destroy(queue);
        }
    }
    head(&guest, AREA + WORD, named);
    fail(&mut guest);
    assert_eq!(wait(&mut guest, &[named], 30_000), COMPLETE);
}

/// A head may name anything, and change at any time: nothing of the worker changes, and of the guest's only what it named itself.
#[test]
fn wild_heads_harm_nothing() {
    let mut guest = guest();
    assert_eq!(enable(&mut guest, ENABLE), (Status::OK, 0));
    let named = event(&mut guest);
    // The name of the program lies at the end of the stack; nothing changes it.
    let stack = maps(&guest).into_iter().find(|map| map.2.ends_with("[stack]")).unwrap();
    let watched = stack.1 - 64;
    let memory = File::open(format!("/proc/{}/mem", guest.worker.pid())).unwrap();
    let look = || {
        let mut bytes = [0; 64];
        memory.read_exact_at(&mut bytes, watched).unwrap();
        bytes
    };
    let before = look();
    let all = |guest: &Guest| {
        let mut bytes = vec![0; 16 * P as usize];
        guest.ram.read_exact_at(&mut bytes, 0).unwrap();
        bytes.drain(..BELLS as usize * P as usize);
        bytes
    };
    let rest = all(&guest);
    let writable = maps(&guest).into_iter().filter(|map| map.2.starts_with("rw")).map(|map| map.0);
    let wild = [
        watched,
        watched + 1,
        0,
        8,
        AREA + WORD + 4,
        AREA + P - 4,
        VA - 8,
        VA + 16 * P,
        1 << 63,
        u64::MAX,
        u64::MAX - 7,
    ];
    for payload in wild.into_iter().chain(writable) {
        head(&guest, payload, named);
        let queue = fail(&mut guest);
        assert_eq!(wait(&mut guest, &[named], 30_000), COMPLETE, "{payload:#x}");
        assert_eq!(guest.word(DATA * P + WORD), 0, "{payload:#x}");
        assert_eq!(guest.destroy(queue), (Status::OK, 0));
    }
    assert_eq!((look(), all(&guest)[2 * P as usize..] == rest[2 * P as usize..]), (before, true));
    // Neither does one that changes while it is looked at.
    let (ram, ended) = (guest.ram.try_clone().unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for payload in [AREA + WORD, watched, u64::MAX, AREA + WORD + 4] {
                    ram.write_all_at(&payload.to_le_bytes(), DATA * P + PAYLOAD_AT).unwrap();
                }
            }
        });
        for round in 0..50 {
            let queue = fail(&mut guest);
            assert_eq!(wait(&mut guest, &[named], 30_000), COMPLETE, "round {round}");
            assert_eq!(guest.word(DATA * P + WORD) & !REASON, 0, "round {round}");
            assert_eq!(guest.destroy(queue), (Status::OK, 0));
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(look(), before);
    // Memory that is no more: the area's page goes, and with it the queue.
    fail(&mut guest);
    let handle = guest.buffers[DATA as usize];
    guest.worker.call::<UnmapMemory>(&BufferRequest { handle }, &[guest.gpu_id]).unwrap();
    guest.worker.call::<Nop>(&Nothing {}, &[]).unwrap();
}
