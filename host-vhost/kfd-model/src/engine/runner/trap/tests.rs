//! A ring that is not heard hangs, and so does a watch that goes on looking: both are the test runner's to notice.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::*;
use crate::arena::Arena;
use crate::engine::fake::{FakeMemory, FakeWorld};
use crate::engine::runner::{Engines, Gpu, Patience, Queue};
use crate::engine::{Context, DOORBELL_UNTOUCHED, EmptyKernels, Processor, Step};

const SLICE: u64 = 8192;

/// A page of doorbells as a program has it mapped.
struct Page {
    _arena: Arc<Arena>,
    start: u64,
}

impl Page {
    fn new() -> Page {
        let arena = Arc::new(Arena::new("doorbells", 1 << 16).unwrap());
        let (pointer, length) = arena.host(arena.allocate(SLICE).unwrap(), SLICE).unwrap();
        assert_eq!(length, SLICE);
        Page { _arena: arena, start: pointer.as_ptr().expose_provenance() as u64 }
    }

    fn bell(&self, index: u64) -> &AtomicU64 {
        let word = std::ptr::with_exposed_provenance_mut((self.start + index * 8) as usize);
        // SAFETY: an aligned word of a map that lives as long as the page, and is only accessed so.
        unsafe { AtomicU64::from_ptr(word) }
    }
}

/// Consumes up to the doorbell's value.
struct Counter(Arc<AtomicU64>);

impl Processor for Counter {
    fn step(&mut self, _: &Context<'_>, doorbell: u64) -> Step {
        if doorbell == DOORBELL_UNTOUCHED || self.0.load(Ordering::Relaxed) >= doorbell {
            return Step::Idle;
        }
        self.0.fetch_add(1, Ordering::Relaxed);
        Step::Progressed
    }

    fn set_ring(&mut self, _: u64, _: u32) {}
}

struct Counted {
    page: Arc<Page>,
    index: u64,
    done: Arc<AtomicU64>,
    /// How often somebody looked at the doorbell.
    looks: Arc<AtomicU64>,
    _queue: Queue,
}

impl Counted {
    fn new(engines: &Engines, page: &Arc<Page>, index: u64) -> Counted {
        let gpu = Gpu {
            memory: Arc::new(FakeMemory::new(0x10_0000, 8)),
            world: Arc::new(FakeWorld::default()),
            dispatcher: Arc::new(EmptyKernels::for_gfx(9)),
            evicted: Arc::default(),
        };
        page.bell(index).store(DOORBELL_UNTOUCHED, Ordering::Release);
        let (done, looks) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (seen, counted) = (page.clone(), looks.clone());
        let bell = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            seen.bell(index).load(Ordering::Acquire)
        };
        let queue = engines.add(gpu, Box::new(Counter(done.clone())), Arc::new(bell)).unwrap();
        Counted { page: page.clone(), index, done, looks, _queue: queue }
    }

    fn ring(&self, value: u64) {
        self.page.bell(self.index).store(value, Ordering::Release);
    }

    fn wait(&self, value: u64) {
        until(|| self.done.load(Ordering::Relaxed) == value);
    }

    /// Nobody looks at the doorbell any more.
    fn is_left_alone(&self) -> bool {
        let looks = || self.looks.load(Ordering::Relaxed);
        let before = looks();
        std::thread::sleep(Duration::from_millis(5));
        looks() == before
    }
}

fn until(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::sleep(Duration::from_micros(20));
    }
}

fn engines() -> Engines {
    Engines::with_patience(Patience {
        spin: Duration::from_micros(1),
        linger: Duration::from_millis(1),
        shortest: Duration::from_micros(10),
        longest: Duration::from_micros(100),
        still: Duration::from_millis(1),
        trapped: Duration::from_secs(3600),
    })
}

fn skipped() -> bool {
    let refused = !Trap::is_available();
    if refused {
        println!("SKIP: userfaultfd for user mode is refused here");
    }
    refused
}

#[test]
fn rings_are_heard_before_the_doorbells_trap_while_and_after() {
    if skipped() {
        return;
    }
    let (engines, page) = (engines(), Arc::new(Page::new()));
    engines.doorbells_mapped(page.start, SLICE);
    let queues: Vec<Counted> = (0..4).map(|index| Counted::new(&engines, &page, index * 300)).collect();
    for round in 1..=200u64 {
        // Up to 4 ms: some fall into the moment in which the doorbells begin to trap.
        std::thread::sleep(Duration::from_micros(round * 197 % 4000));
        std::thread::scope(|scope| {
            for queue in &queues {
                scope.spawn(move || queue.ring(round));
            }
        });
        queues.iter().for_each(|queue| queue.wait(round));
    }
}

#[test]
fn nobody_looks_at_still_doorbells_and_a_ring_is_heard_all_the_same() {
    if skipped() {
        return;
    }
    let (engines, page) = (engines(), Arc::new(Page::new()));
    engines.doorbells_mapped(page.start, SLICE);
    let queues: Vec<Counted> = (0..64).map(|index| Counted::new(&engines, &page, index)).collect();
    for round in 1..=3 {
        queues.iter().for_each(|queue| queue.ring(round));
        queues.iter().for_each(|queue| queue.wait(round));
        until(|| queues.iter().all(Counted::is_left_alone));
    }
}

#[test]
fn doorbells_that_cannot_trap_are_looked_at() {
    let (engines, page) = (engines(), Arc::new(Page::new()));
    engines.doorbells_mapped(page.start, SLICE);
    // No memory is there.
    engines.doorbells_mapped(0x1000, SLICE);
    let queue = Counted::new(&engines, &page, 0);
    for round in 1..=3 {
        std::thread::sleep(Duration::from_millis(10));
        assert!(!queue.is_left_alone());
        queue.ring(round);
        queue.wait(round);
    }
}

#[test]
fn a_map_that_is_gone_is_forgotten() {
    if skipped() {
        return;
    }
    let (engines, page, gone) = (engines(), Arc::new(Page::new()), Page::new());
    engines.doorbells_mapped(page.start, SLICE);
    engines.doorbells_mapped(gone.start, SLICE);
    let queue = Counted::new(&engines, &page, 0);
    let trap = &engines.shared.trap;
    let ranges = || lock(&trap.state).ranges.len();
    until(|| queue.is_left_alone());
    assert_eq!(ranges(), 2);
    drop(gone);
    for round in 1..=2 {
        queue.ring(round);
        queue.wait(round);
        until(|| queue.is_left_alone());
        assert_eq!(ranges(), 1);
    }
}
