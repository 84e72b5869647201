//! No test here depends on how fast the machine is: each waits for what must come, and a hang is the test runner's to
//! notice.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc;

use nix::sys::signal::SigSet;

use super::*;
use crate::engine::aql::AqlQueue;
use crate::engine::fake::{FakeMemory, FakeWorld};
use crate::engine::{DOORBELL_UNTOUCHED, Dispatch, Dispatched, EmptyKernels, QueueAddresses, Step};

const DATA: u64 = 0x10_0000;

fn gpu(memory: FakeMemory) -> Gpu {
    Gpu {
        memory: Arc::new(memory),
        world: Arc::new(FakeWorld::default()),
        dispatcher: Arc::new(EmptyKernels::for_gfx(9)),
        evicted: Arc::default(),
    }
}

fn until(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::yield_now();
    }
}

/// Counts its steps, and consumes up to the doorbell's value.
#[derive(Default)]
struct Counter {
    steps: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
}

impl Processor for Counter {
    fn step(&mut self, _: &Context<'_>, doorbell: u64) -> Step {
        self.steps.fetch_add(1, Ordering::Relaxed);
        if doorbell == DOORBELL_UNTOUCHED || self.done.load(Ordering::Relaxed) >= doorbell {
            return Step::Idle;
        }
        self.done.fetch_add(1, Ordering::Relaxed);
        Step::Progressed
    }

    fn set_ring(&mut self, _: u64, _: u32) {}
}

struct Counted {
    doorbell: Arc<AtomicU64>,
    steps: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
    queue: Queue,
}

fn counted(engines: &Engines) -> Counted {
    let doorbell = Arc::new(AtomicU64::new(DOORBELL_UNTOUCHED));
    let counter = Counter::default();
    let (steps, done) = (counter.steps.clone(), counter.done.clone());
    let bell = doorbell.clone();
    let bell = Arc::new(move || bell.load(Ordering::Acquire));
    let queue = engines.add(gpu(FakeMemory::new(DATA, 8)), Box::new(counter), bell).unwrap();
    Counted { doorbell, steps, done, queue }
}

fn short() -> Engines {
    Engines::with_patience(Patience {
        spin: Duration::from_micros(1),
        linger: Duration::from_millis(1),
        shortest: Duration::from_micros(10),
        longest: Duration::from_micros(100),
        still: Duration::from_millis(1),
        trapped: Duration::from_secs(3600),
    })
}

#[test]
fn every_ring_is_heard_whether_the_queue_sleeps_or_not() {
    let engines = short();
    let queue = counted(&engines);
    for round in 1..=300u64 {
        queue.doorbell.store(round, Ordering::Release);
        // Sometimes at once, sometimes when it just falls asleep, sometimes when its thread is gone.
        if !round.is_multiple_of(3) {
            until(|| queue.done.load(Ordering::Relaxed) == round);
            std::thread::sleep(Duration::from_micros(round * 10));
        }
    }
    until(|| queue.done.load(Ordering::Relaxed) == 300);
}

#[test]
fn an_idle_queue_is_left_alone() {
    let engines = short();
    let queues: Vec<Counted> = (0..64).map(|_| counted(&engines)).collect();
    for queue in &queues {
        queue.doorbell.store(1, Ordering::Release);
    }
    for queue in &queues {
        until(|| queue.done.load(Ordering::Relaxed) == 1);
        // Its thread has ended.
        until(|| !queue.queue.has_thread());
    }
    let steps = || queues.iter().map(|queue| queue.steps.load(Ordering::Relaxed)).sum::<u64>();
    let before = steps();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(steps(), before);
}

#[test]
fn a_paused_queue_does_nothing_until_it_is_resumed() {
    let engines = short();
    let queue = counted(&engines);
    queue.doorbell.store(1, Ordering::Release);
    until(|| queue.done.load(Ordering::Relaxed) == 1);
    queue.queue.pause();
    assert!(queue.queue.is_paused());
    let steps = queue.steps.load(Ordering::Relaxed);
    queue.doorbell.store(1000, Ordering::Release);
    engines.rang();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(queue.steps.load(Ordering::Relaxed), steps);
    queue.queue.resume().unwrap();
    until(|| queue.done.load(Ordering::Relaxed) == 1000);
}

#[test]
fn queues_of_an_evicted_process_do_nothing_and_can_be_ended() {
    let engines = short();
    let gpu = gpu(FakeMemory::new(DATA, 8));
    let doorbell = Arc::new(AtomicU64::new(DOORBELL_UNTOUCHED));
    let add = || {
        let counter = Counter::default();
        let (steps, bell) = (counter.steps.clone(), doorbell.clone());
        let bell = Arc::new(move || bell.load(Ordering::Acquire));
        (engines.add(gpu.clone(), Box::new(counter), bell).unwrap(), steps)
    };
    let (before, steps) = add();
    until(|| steps.load(Ordering::Relaxed) > 0);
    gpu.evicted.store(true, Ordering::Relaxed);
    // The step that runs now is the last.
    before.pause();
    before.resume().unwrap();
    let last = steps.load(Ordering::Relaxed);
    let (after, none) = add();
    doorbell.store(1000, Ordering::Release);
    engines.rang();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!((steps.load(Ordering::Relaxed), none.load(Ordering::Relaxed)), (last, 0));
    drop((before, after));
    assert!(engines.is_empty());
}

#[test]
fn a_queue_can_be_added_without_running() {
    let engines = short();
    let counter = Counter::default();
    let (steps, done) = (counter.steps.clone(), counter.done.clone());
    let queue = engines.add_paused(gpu(FakeMemory::new(DATA, 8)), Box::new(counter), Arc::new(|| 3)).unwrap();
    engines.rang();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(steps.load(Ordering::Relaxed), 0);
    queue.resume().unwrap();
    until(|| done.load(Ordering::Relaxed) == 3);
}

#[test]
fn pausing_in_the_middle_of_work_takes_hold_at_once() {
    let engines = short();
    let queue = counted(&engines);
    queue.doorbell.store(u64::MAX - 1, Ordering::Release);
    for _ in 0..50 {
        let before = queue.done.load(Ordering::Relaxed);
        until(|| queue.done.load(Ordering::Relaxed) > before);
        queue.queue.pause();
        let steps = queue.steps.load(Ordering::Relaxed);
        std::thread::yield_now();
        assert_eq!(queue.steps.load(Ordering::Relaxed), steps);
        queue.queue.resume().unwrap();
    }
}

#[test]
fn the_watch_ends_with_the_last_queue_and_starts_again() {
    let engines = short();
    for _ in 0..3 {
        let queue = counted(&engines);
        assert_eq!(engines.len(), 1);
        drop(queue);
        assert!(engines.is_empty());
        until(|| !lock(&engines.shared.registry).watched);
    }
    let queue = counted(&engines);
    queue.doorbell.store(5, Ordering::Release);
    until(|| queue.done.load(Ordering::Relaxed) == 5);
}

const SLOTS: u64 = 16;
const RINGS: u64 = 0x20_0000;
const POINTERS: u64 = 0x30_0000;

/// An AQL queue whose packets are written by the test.
struct Aql {
    ring: u64,
    write_pointer: u64,
    doorbell: Arc<AtomicU64>,
    queue: Queue,
}

fn aql(engines: &Engines, gpu: &Gpu, number: u64) -> Aql {
    let ring = RINGS + number * SLOTS * 64;
    let read_pointer = POINTERS + number * 16;
    for slot in 0..SLOTS {
        gpu.memory.store32(ring + slot * 64, 1).unwrap();
    }
    let addresses =
        QueueAddresses { ring, ring_size: SLOTS as u32 * 64, read_pointer, write_pointer: read_pointer + 8 };
    let doorbell = Arc::new(AtomicU64::new(DOORBELL_UNTOUCHED));
    let bell = doorbell.clone();
    let bell = Arc::new(move || bell.load(Ordering::Acquire));
    let queue = engines.add(gpu.clone(), Box::new(AqlQueue::new(addresses, 1)), bell).unwrap();
    Aql { ring, write_pointer: read_pointer + 8, doorbell, queue }
}

impl Aql {
    fn submit(&self, gpu: &Gpu, kind: u32, dependency: u64, signal: u64) {
        let memory = gpu.memory.as_ref();
        let index = memory.load64(self.write_pointer).unwrap();
        let slot = self.ring + index % SLOTS * 64;
        until(|| memory.load32(slot).unwrap() & 0xff == 1);
        memory.store64(self.write_pointer, index + 1).unwrap();
        memory.store64(slot + 8, dependency).unwrap();
        memory.store64(slot + 56, signal).unwrap();
        memory.store32(slot, kind).unwrap();
        self.doorbell.store(index, Ordering::Release);
    }
}

fn aql_gpu() -> Gpu {
    gpu(FakeMemory::new(DATA, 0x1000).with(RINGS, 0x4000, true).with(POINTERS, 0x1000, true))
}

#[test]
fn two_queues_wait_for_each_other() {
    let (engines, gpu) = (short(), aql_gpu());
    let (left, right) = (aql(&engines, &gpu, 0), aql(&engines, &gpu, 1));
    const ROUNDS: u64 = 100;
    let signal = |round: u64, side: u64| DATA + (round % 8 * 2 + side) * 64;
    for round in 0..ROUNDS {
        for side in 0..2 {
            gpu.memory.store64(signal(round, side) + 8, 1).unwrap();
        }
        // Left waits for right, whose packet comes later.
        left.submit(&gpu, 3, signal(round, 1), signal(round, 0));
        right.submit(&gpu, 3, 0, signal(round, 1));
        until(|| gpu.memory.load64(signal(round, 0) + 8).unwrap() == 0);
    }
    assert_eq!(gpu.memory.load64(left.write_pointer - 8).unwrap(), ROUNDS);
}

#[test]
fn a_signal_from_the_cpu_wakes_a_queue_that_waits_for_long() {
    let (engines, gpu) = (short(), aql_gpu());
    let queue = aql(&engines, &gpu, 0);
    gpu.memory.store64(DATA + 8, 1).unwrap();
    gpu.memory.store64(DATA + 64 + 8, 1).unwrap();
    queue.submit(&gpu, 3, DATA, DATA + 64);
    until(|| engines.shared.waiting.load(Ordering::Relaxed) == 1);
    gpu.memory.store64(DATA + 8, 0).unwrap();
    until(|| gpu.memory.load64(DATA + 64 + 8).unwrap() == 0);
}

#[test]
fn a_queue_that_waits_can_be_destroyed_and_does_not_hold_up_others() {
    let (engines, gpu) = (short(), aql_gpu());
    gpu.memory.store64(DATA + 8, 1).unwrap();
    let stuck: Vec<Aql> = (0..6).map(|number| aql(&engines, &gpu, number)).collect();
    for queue in &stuck {
        queue.submit(&gpu, 3, DATA, 0);
    }
    let other = aql(&engines, &gpu, 6);
    gpu.memory.store64(DATA + 64 + 8, 1).unwrap();
    other.submit(&gpu, 3, 0, DATA + 64);
    until(|| gpu.memory.load64(DATA + 64 + 8).unwrap() == 0);
    drop(stuck);
    assert_eq!(engines.len(), 1);
    assert_eq!(engines.shared.waiting.load(Ordering::Relaxed), 0);
    assert_eq!(gpu.memory.load64(DATA + 8).unwrap(), 1);
}

#[test]
fn a_failure_is_kept() {
    let (engines, gpu) = (short(), aql_gpu());
    let queue = aql(&engines, &gpu, 0);
    assert_eq!(queue.queue.failure(), None);
    queue.submit(&gpu, 4, 0, 0);
    until(|| queue.queue.failure().is_some());
    assert_eq!(queue.queue.failure(), Some(&Failure::PacketType { index: 0, kind: 4 }));
}

/// A kernel without end.
struct Endless {
    runs: mpsc::SyncSender<()>,
    stopped: Arc<AtomicBool>,
}

impl Dispatcher for Endless {
    fn dispatch(&self, _: &Dispatch<'_>, context: &Context<'_>) -> Result<Dispatched, Failure> {
        let _ = self.runs.try_send(());
        until(|| context.stopping());
        self.stopped.store(true, Ordering::Relaxed);
        Ok(Dispatched::Stopped)
    }
}

#[test]
fn a_kernel_without_end_is_broken_off() {
    let (runs, running) = mpsc::sync_channel(1);
    let stopped = Arc::new(AtomicBool::new(false));
    let endless = Endless { runs, stopped: stopped.clone() };
    let gpu = Gpu { dispatcher: Arc::new(endless), ..aql_gpu() };
    let engines = short();
    let queue = aql(&engines, &gpu, 0);
    queue.submit(&gpu, 2, 0, 0);
    running.recv().unwrap();
    queue.queue.pause();
    assert!(stopped.load(Ordering::Relaxed));
    queue.queue.resume().unwrap();
    running.recv().unwrap();
    drop(queue);
    assert_eq!(gpu.memory.load64(POINTERS).unwrap(), 0);
}

#[test]
fn no_signal_is_delivered_to_a_queues_thread() {
    struct Mask(mpsc::Sender<bool>);
    impl Processor for Mask {
        fn step(&mut self, _: &Context<'_>, _: u64) -> Step {
            let mask = SigSet::thread_get_mask().unwrap();
            let _ = self.0.send(mask.contains(nix::sys::signal::Signal::SIGUSR1));
            Step::Idle
        }
        fn set_ring(&mut self, _: u64, _: u32) {}
    }
    let (sender, receiver) = mpsc::channel();
    let engines = short();
    let before = SigSet::thread_get_mask().unwrap();
    let _queue = engines.add(gpu(FakeMemory::new(DATA, 8)), Box::new(Mask(sender)), Arc::new(|| 0)).unwrap();
    assert!(receiver.recv().unwrap());
    assert_eq!(SigSet::thread_get_mask().unwrap(), before);
}
