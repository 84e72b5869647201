//! The client over a host made of closures.

pub(crate) mod host;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex};

use virtio_kfd_protocol::calls::{AllocMemory, GetApertures, MapMemory, Nop, TopologyRead, WaitEvents};
use virtio_kfd_protocol::frame::{CallError, FrameError};
use virtio_kfd_protocol::limits::{MAX_REQUESTS_PER_FRAME, MAX_TOPOLOGY_CHUNK};
use virtio_kfd_protocol::topology::{TopologyFile, pack};
use virtio_kfd_protocol::{
    AllocMemoryAnswer, AllocMemoryRequest, Apertures, BufferRequest, Capset, Features, GpuId, Handle,
    MapMemoryAnswer, Nothing, Request, Status, TopologyReadAnswer, WaitEventsAnswer, WaitEventsRequest,
};

use self::host::{FakeHost, Fate, answer, answer_with};
use super::*;

fn connect(host: FakeHost) -> Client {
    Client::over(Box::new(host)).unwrap()
}

fn nop(client: &Client) -> Result<(), ClientError> {
    client.call::<Nop>(&Nothing {}, &[], 0).map(|_| ())
}

#[test]
fn the_handshake_tells_what_the_host_is_and_features_are_those_of_both() {
    let client = connect(FakeHost::new(|_, frame| Fate::Answer(answer(frame))));
    assert_eq!(client.kfd_version(), (1, 17));
    assert_eq!(client.gpu_count(), 1);
    assert_eq!(client.features(), Features::GUEST_MEMORY);
    nop(&client).unwrap();
}

#[test]
fn hosts_that_cannot_be_talked_to_are_refused_with_what_was_found() {
    let announced = Capset::announce(Features::GUEST_MEMORY, 1);
    let refused = |capset| match Client::over(Box::new(FakeHost::with_capset(capset))) {
        Ok(_) => panic!("connected"),
        Err(error) => error.to_string(),
    };
    let newer = refused(Capset { version_min: 7, version_max: 9, ..announced });
    assert!(newer.contains("the host 7 to 9"), "{newer}");
    let rings = refused(Capset { max_rings: 2, ..announced });
    assert!(rings.contains("2 rings"), "{rings}");
    let small = refused(Capset { max_answer_bytes: 4096, ..announced });
    assert!(small.contains("4096 bytes of answer"), "{small}");
}

#[test]
fn many_threads_get_their_own_answers() {
    // Each answer carries a number of its request, so that an answer that is mixed up shows.
    let client = connect(FakeHost::new(|_, frame| {
        Fate::Answer(answer_with(frame, |request, answer| {
            let Ok(Request::AllocMemory { fixed, .. }) = Request::decode(request) else { panic!() };
            let made = AllocMemoryAnswer { handle: Handle(fixed.size), ..Default::default() };
            answer.push::<AllocMemory>(&request.header, &made, &[]);
        }))
    }));
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let client = &client;
            scope.spawn(move || {
                for number in 0..1000 {
                    let size = thread << 32 | number;
                    let request = AllocMemoryRequest { size, ..Default::default() };
                    let (made, _) = client.call::<AllocMemory>(&request, &[], 0).unwrap();
                    assert_eq!(made.handle.0, size);
                }
            });
        }
    });
}

#[test]
fn a_batch_runs_in_one_frame_and_each_request_has_its_own_end() {
    let frames = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&frames);
    let client = connect(FakeHost::new(move |_, frame| {
        counted.fetch_add(1, Ordering::Relaxed);
        Fate::Answer(answer_with(frame, |request, answer| match Request::decode(request).unwrap() {
            Request::AllocMemory { .. } => {
                let made = AllocMemoryAnswer { handle: Handle::new(3, 9), ..Default::default() };
                answer.push::<AllocMemory>(&request.header, &made, &[]);
            }
            Request::MapMemory { fixed, tail } => {
                assert_eq!(fixed.handle, Handle::in_frame(0));
                assert_eq!(tail, [GpuId(5), GpuId(6)]);
                let done = MapMemoryAnswer { n_success: 2, errno: 0 };
                answer.push::<MapMemory>(&request.header, &done, &[]);
            }
            Request::GetApertures { .. } => answer.push_status(request.header.opcode, Status::ERRNO, 22),
            _ => answer.push_status(request.header.opcode, Status::NOT_RUN, 0),
        }))
    }));
    let mut batch = client.batch();
    let alloc = batch.push::<AllocMemory>(&AllocMemoryRequest::default(), &[], 0).unwrap();
    let buffer = BufferRequest { handle: alloc.handle() };
    let map = batch.push::<MapMemory>(&buffer, &[GpuId(5), GpuId(6)], 0).unwrap();
    let apertures = batch.push::<GetApertures>(&Nothing {}, &[], 4).unwrap();
    let last = batch.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    let answers = batch.run().unwrap();
    assert_eq!(frames.load(Ordering::Relaxed), 2, "the handshake and one frame");
    assert_eq!(answers.get(alloc).unwrap().0.handle, Handle::new(3, 9));
    assert_eq!(answers.get(map).unwrap().0.n_success, 2);
    assert_eq!(answers.get(apertures).unwrap_err().errno(), Some(22));
    assert_eq!(answers.get(last).unwrap_err().status(), Some((Status::NOT_RUN, 0)));
    let first = answers.check().unwrap_err();
    assert!(matches!(first, ClientError::Call(CallError::Failed { call: "GetApertures", .. })), "{first}");
    nop(&client).unwrap_err();
}

#[test]
fn answers_larger_than_a_small_slot_come_through() {
    let client = connect(FakeHost::new(|_, frame| {
        Fate::Answer(answer_with(frame, |request, answer| {
            let list: Vec<Apertures> = (0..64)
                .map(|gpu| Apertures {
                    gpu_id: GpuId(gpu),
                    lds_base: u64::from(gpu) << 40,
                    ..Default::default()
                })
                .collect();
            answer.push::<GetApertures>(&request.header, &Nothing {}, &list);
        }))
    }));
    // 64 apertures are 3584 bytes; two such lists no longer fit in 4 KiB.
    let mut batch = client.batch();
    let tickets = [(); 2].map(|()| batch.push::<GetApertures>(&Nothing {}, &[], 64).unwrap());
    let answers = batch.run().unwrap();
    for ticket in tickets {
        let (_, list) = answers.get(ticket).unwrap();
        assert_eq!(list.len(), 64);
        assert!(list.iter().all(|one| one.lds_base == u64::from(one.gpu_id.0) << 40));
    }
}

#[test]
fn what_does_not_fit_in_a_frame_is_refused_before_it_is_sent() {
    let client = connect(FakeHost::new(|_, frame| Fate::Answer(answer(frame))));
    let mut batch = client.batch();
    for _ in 0..MAX_REQUESTS_PER_FRAME {
        batch.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    }
    let error = batch.push::<Nop>(&Nothing {}, &[], 0).unwrap_err();
    assert!(matches!(error, ClientError::Frame(FrameError::TooLarge { .. })), "{error}");
    batch.run().unwrap();
    let empty = client.batch().run().unwrap_err();
    assert!(matches!(empty, ClientError::Frame(FrameError::Field { found: 0, .. })), "{empty}");
    nop(&client).unwrap();
}

/// A host that answers `good` frames and then does something else.
fn turning(
    good: usize,
    then: impl Fn(&virtio_kfd_protocol::frame::RequestFrame<'_>) -> Fate + Send + Sync + 'static,
) -> Client {
    let frames = AtomicUsize::new(0);
    connect(FakeHost::new(move |_, frame| match frames.fetch_add(1, Ordering::Relaxed) {
        number if number <= good => Fate::Answer(answer(frame)),
        _ => then(frame),
    }))
}

fn assert_lost(client: &Client, reason: &str) {
    let first = nop(client).unwrap_err();
    assert!(matches!(&first, ClientError::Lost(why) if why.contains(reason)), "{first}");
    let second = nop(client).unwrap_err();
    assert_eq!(first.to_string(), second.to_string(), "it stays lost, for the same reason");
    assert!(client.is_lost());
    assert!(matches!(client.guest_memory(4096), Err(ClientError::Lost(_))));
    assert!(matches!(client.topology(), Err(ClientError::Lost(_))));
}

#[test]
fn a_fence_without_an_answer_loses_the_connection() {
    let client = turning(3, |_| Fate::Silence);
    for _ in 0..3 {
        nop(&client).unwrap();
    }
    assert_lost(&client, "without an answer");
}

#[test]
fn an_answer_to_another_frame_loses_the_connection() {
    let client = turning(1, |frame| {
        let mut other = frame.clone();
        other.header.sequence -= 1;
        Fate::Answer(answer(&other))
    });
    nop(&client).unwrap();
    assert_lost(&client, "sequence number");
}

#[test]
fn an_answer_with_another_number_of_records_loses_the_connection() {
    let client = turning(0, |frame| {
        let mut other = frame.clone();
        other.requests.clear();
        Fate::Answer(answer(&other))
    });
    assert_lost(&client, "0 records, 1 expected");
}

#[test]
fn an_answer_that_is_no_frame_loses_the_connection() {
    let client = turning(0, |frame| {
        let mut bytes = answer(frame);
        // total_len beyond what the slot was asked for.
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        Fate::Answer(bytes)
    });
    assert_lost(&client, "the answer frame");
}

#[test]
fn a_worker_that_has_ended_loses_the_connection() {
    let client = turning(0, |frame| {
        Fate::Answer(answer_with(frame, |request, answer| {
            answer.push_status(request.header.opcode, Status::WORKER_LOST, 0);
        }))
    });
    assert_lost(&client, "WORKER_LOST");
}

#[test]
fn a_frame_that_could_not_be_sent_loses_only_that_call() {
    let frames = AtomicUsize::new(0);
    let client = connect(FakeHost::new(move |_, frame| match frames.fetch_add(1, Ordering::Relaxed) {
        1 => Fate::NotSent,
        _ => Fate::Answer(answer(frame)),
    }));
    assert!(matches!(nop(&client), Err(ClientError::Transport(TransportError::NotSupported(_)))));
    nop(&client).unwrap();
}

#[test]
fn a_loss_frees_all_who_wait() {
    // More threads than frames that may be in flight; the host keeps those until all have come, and then is gone.
    let kept = Arc::new(Barrier::new(32));
    let gate = Arc::clone(&kept);
    let client = turning(0, move |_| {
        gate.wait();
        Fate::Gone
    });
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..300).map(|_| scope.spawn(|| nop(&client).unwrap_err())).collect();
        for thread in threads {
            assert!(matches!(thread.join().unwrap(), ClientError::Lost(_)));
        }
    });
}

#[test]
fn never_more_frames_are_in_flight_than_the_host_holds() {
    let flying = AtomicUsize::new(0);
    let most = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&most);
    let client = connect(FakeHost::new(move |_, frame| {
        seen.fetch_max(flying.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(200));
        let fate = Fate::Answer(answer(frame));
        flying.fetch_sub(1, Ordering::SeqCst);
        fate
    }));
    std::thread::scope(|scope| {
        for _ in 0..200 {
            scope.spawn(|| (0..5).for_each(|_| nop(&client).unwrap()));
        }
    });
    let most = most.load(Ordering::SeqCst);
    assert!((2..=32).contains(&most), "{most} at once");
}

#[test]
fn a_host_that_ends_waits_early_does_not_shorten_them() {
    // Of the long wait: that many pieces until the event is there.
    const EARLY: usize = 5;
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&sent);
    let client = connect(FakeHost::new(move |_, frame| {
        let raw = frame.requests.first().unwrap();
        match Request::decode(raw).unwrap() {
            Request::WaitEvents { fixed, .. } => {
                let count = counted.fetch_add(1, Ordering::SeqCst) + 1;
                let is_long = fixed.timeout > 300;
                std::thread::sleep(Duration::from_millis(2));
                wait_answer(frame, u32::from(!is_long || count < EARLY))
            }
            _ => Fate::Answer(answer(frame)),
        }
    }));
    let start = std::time::Instant::now();
    let request = WaitEventsRequest { timeout: 300, wait_for_all: 0 };
    let (answer, _) = client.wait_call::<WaitEvents>(&request, &[], 0).unwrap();
    assert_eq!(answer.wait_result, 1);
    assert!(start.elapsed() >= Duration::from_millis(300));
    // Far from its end it asks again however often. (Of the wait above a busy machine may see one piece only.)
    sent.store(0, Ordering::SeqCst);
    let request = WaitEventsRequest { timeout: 3_600_000, wait_for_all: 0 };
    let (answer, _) = client.wait_call::<WaitEvents>(&request, &[], 0).unwrap();
    assert_eq!((answer.wait_result, sent.load(Ordering::SeqCst)), (0, EARLY));
}

#[test]
fn a_wait_that_the_host_has_no_room_for_is_tried_again_until_its_time_out() {
    // Room from the 5th try on; the event is set from the 8th look on.
    let (tries, looks) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (room, set) = (Arc::new(AtomicUsize::new(5)), Arc::new(AtomicUsize::new(usize::MAX)));
    let counted = (Arc::clone(&tries), Arc::clone(&looks), Arc::clone(&room), Arc::clone(&set));
    let client = connect(FakeHost::new(move |_, frame| {
        let (tries, looks, room, set) = &counted;
        match Request::decode(frame.requests.first().unwrap()).unwrap() {
            Request::WaitEvents { fixed, .. } if fixed.timeout == 0 => {
                let looked = looks.fetch_add(1, Ordering::SeqCst) + 1;
                wait_answer(frame, u32::from(looked < set.load(Ordering::SeqCst)))
            }
            Request::WaitEvents { .. }
                if tries.fetch_add(1, Ordering::SeqCst) + 1 >= room.load(Ordering::SeqCst) =>
            {
                wait_answer(frame, 0)
            }
            Request::WaitEvents { .. } => Fate::Answer(answer_with(frame, |request, answer| {
                answer.push_status(request.header.opcode, Status::LIMIT, 0);
            })),
            _ => Fate::Answer(answer(frame)),
        }
    }));
    let wait = |timeout| {
        let request = WaitEventsRequest { timeout, wait_for_all: 0 };
        client.wait_call::<WaitEvents>(&request, &[], 0).unwrap().0.wait_result
    };
    assert_eq!(wait(u32::MAX), 0);
    assert_eq!((tries.load(Ordering::SeqCst), looks.load(Ordering::SeqCst)), (5, 4));
    // No room at all: the time-out holds, and it does not spin.
    room.store(usize::MAX, Ordering::SeqCst);
    let start = std::time::Instant::now();
    assert_eq!(wait(100), 1);
    assert!(start.elapsed() >= Duration::from_millis(100));
    let spent = tries.load(Ordering::SeqCst) - 5;
    assert!((1..=20).contains(&spent), "{spent} tries in 100 ms");
    // What is waited for is noticed all the same.
    set.store(looks.load(Ordering::SeqCst) + 3, Ordering::SeqCst);
    assert_eq!(wait(u32::MAX), 0);
}

#[test]
fn memory_goes_back_when_the_client_goes() {
    let host = FakeHost::new(|_, frame| Fate::Answer(answer(frame)));
    let blobs = host.blobs();
    let client = connect(host);
    let memory = client.guest_memory(8192).unwrap();
    assert!(blobs.lock().unwrap().len() >= 2, "answers and memory");
    drop(memory);
    drop(client);
    assert_eq!(blobs.lock().unwrap().len(), 0);
}

fn wait_answer(frame: &virtio_kfd_protocol::frame::RequestFrame<'_>, wait_result: u32) -> Fate {
    Fate::Answer(answer_with(frame, |request, answer| {
        let done = WaitEventsAnswer { wait_result, ..Default::default() };
        answer.push::<WaitEvents>(&request.header, &done, &[]);
    }))
}

#[test]
fn waits_have_rings_of_their_own_and_more_waiters_than_rings_take_turns() {
    /// What the host knows: the time-outs that came on each ring, and whether the event is set.
    #[derive(Default)]
    struct Shared {
        rings: Mutex<BTreeSet<u8>>,
        set: Mutex<bool>,
        wake: Condvar,
        looks: AtomicU32,
    }
    let shared = Arc::new(Shared::default());
    let host = Arc::clone(&shared);
    let client = connect(FakeHost::new(move |ring, frame| {
        let raw = frame.requests.first().unwrap();
        match Request::decode(raw).unwrap() {
            Request::WaitEvents { fixed, .. } => {
                host.rings.lock().unwrap().insert(ring);
                if fixed.timeout == 0 {
                    host.looks.fetch_add(1, Ordering::Relaxed);
                }
                let timeout = Duration::from_millis(fixed.timeout.into());
                let set = host.set.lock().unwrap();
                let (set, _) = host.wake.wait_timeout_while(set, timeout, |set| !*set).unwrap();
                let result = if *set { 0 } else { 1 };
                wait_answer(frame, result)
            }
            _ => {
                assert_eq!(ring, 0);
                Fate::Answer(answer(frame))
            }
        }
    }));
    let wait = |timeout| {
        let request = WaitEventsRequest { timeout, wait_for_all: 0 };
        client.wait_call::<WaitEvents>(&request, &[], 0).unwrap().0.wait_result
    };
    assert_eq!(wait(0), 1, "a look at an event that is not set");
    assert_eq!(*shared.rings.lock().unwrap(), BTreeSet::from([63]), "looks share the last ring");
    std::thread::scope(|scope| {
        // Three times as many as there are rings.
        let waiters: Vec<_> = (0..186).map(|_| scope.spawn(|| wait(u32::MAX))).collect();
        while shared.rings.lock().unwrap().len() < 63 {
            std::thread::yield_now();
        }
        // With all rings taken: control calls, looks and short waits go on.
        nop(&client).unwrap();
        assert_eq!(wait(0), 1);
        assert_eq!(wait(20), 1, "a wait that gets no ring in time still gives an answer of the host");
        *shared.set.lock().unwrap() = true;
        shared.wake.notify_all();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), 0);
        }
    });
    assert_eq!(*shared.rings.lock().unwrap(), (1..=63).collect());
    assert!(shared.looks.load(Ordering::Relaxed) >= 2);
}

#[test]
fn time_outs_are_rounded_up_and_never_become_for_ever() {
    let request = WaitEventsRequest { timeout: 5, wait_for_all: 1 };
    let with = |timeout| <WaitEvents as WaitCall>::with_timeout(&request, timeout);
    assert_eq!(with(Duration::from_nanos(1)), WaitEventsRequest { timeout: 1, wait_for_all: 1 });
    assert_eq!(with(Duration::from_millis(7)).timeout, 7);
    assert_eq!(with(Duration::MAX).timeout, u32::MAX - 1);
    assert_eq!(<WaitEvents as WaitCall>::timeout(&with(Duration::ZERO)), Some(Duration::ZERO));
    let for_ever = WaitEventsRequest { timeout: u32::MAX, wait_for_all: 0 };
    assert_eq!(<WaitEvents as WaitCall>::timeout(&for_ever), None);
}

#[test]
fn the_topology_is_read_in_chunks_and_again_when_it_changes() {
    let files: Vec<TopologyFile> = (0..100)
        .map(|node| TopologyFile { path: format!("nodes/{node}/properties"), content: vec![b'x'; 4000] })
        .collect();
    let archive = pack(&files).unwrap();
    assert!(archive.len() > 3 * MAX_TOPOLOGY_CHUNK, "several chunks");
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reads);
    let client = connect(FakeHost::new(move |_, frame| {
        let archive = archive.clone();
        let reads = Arc::clone(&counted);
        Fate::Answer(answer_with(frame, move |request, answer| {
            let Ok(Request::TopologyRead { fixed, .. }) = Request::decode(request) else { panic!() };
            let read = reads.fetch_add(1, Ordering::Relaxed);
            // The generation changes after the second chunk.
            let generation = if read < 2 { 1 } else { 2 };
            let start = fixed.offset as usize;
            let end = archive.len().min(start + MAX_TOPOLOGY_CHUNK);
            let answered = TopologyReadAnswer { total: archive.len() as u64, generation };
            answer.push::<TopologyRead>(&request.header, &answered, &archive[start..end]);
        }))
    }));
    assert_eq!(client.topology().unwrap(), files);
    assert_eq!(reads.load(Ordering::Relaxed), 3 + 7, "three of the first attempt, seven of the second");
}

#[test]
fn a_topology_that_never_ends_or_never_comes_is_an_error() {
    let endless = |total: u64, chunk: usize| {
        connect(FakeHost::new(move |_, frame| {
            Fate::Answer(answer_with(frame, move |request, answer| {
                let answered = TopologyReadAnswer { total, generation: 1 };
                answer.push::<TopologyRead>(&request.header, &answered, &vec![0; chunk]);
            }))
        }))
    };
    assert!(matches!(endless(u64::MAX, 65536).topology(), Err(ClientError::Topology(_))));
    assert!(matches!(endless(100, 0).topology(), Err(ClientError::Topology(_))));
    assert!(matches!(endless(100, 101).topology(), Err(ClientError::TopologyUnstable { .. })));
}

/// C32, C34: a fork while other threads are inside the client.
#[test]
#[allow(unsafe_code)] // fork
fn a_forked_child_gets_an_error_at_once_and_the_parent_goes_on() {
    let client = connect(FakeHost::new(|_, frame| Fate::Answer(answer(frame))));
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    nop(&client).unwrap();
                }
            });
        }
        for _ in 0..50 {
            // SAFETY: the child only makes calls that take no lock and allocate nothing, then exits without
            // running destructors.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: alarm has no preconditions; it ends a child that hangs.
                unsafe { libc::alarm(20) };
                client.abandon();
                let refused = matches!(nop(&client), Err(ClientError::Forked { .. }))
                    && matches!(client.guest_memory(4096), Err(ClientError::Forked { .. }))
                    && !client.is_mine();
                // SAFETY: _exit has no preconditions.
                unsafe { libc::_exit(if refused { 0 } else { 1 }) };
            }
            let mut status = 0;
            // SAFETY: status is a place for an int.
            let waited = unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!((waited, status), (child, 0));
        }
        stop.store(true, Ordering::Relaxed);
    });
    nop(&client).unwrap();
}
