//! Threads that drive processors: at most one for each queue, asleep while its queue has nothing to do.
//!
//! A write to a doorbell page wakes nobody, so somebody has to look. A queue's thread does for a moment after its last
//! packet, then it sleeps, and one thread for all queues (the watch) looks at the doorbells of those that sleep: every
//! 50 µs at first, once in a millisecond when nothing happened for a while. When nothing happens for longer, doorbells
//! trap ([`trap`]) and the watch sleeps as well. A queue that slept for long has no thread
//! at all. With the last queue the watch ends.
//!
//! A processor that waits for memory is tried again at once, then in growing intervals, and whenever
//! another queue has come to the end of what it had to do.

mod queue;
mod trap;
mod watch;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use queue::Inner;
pub use queue::Queue;

use trap::Trap;

use super::threads::spawn;
use super::{Context, Dispatcher, Failure, Memory, Processor, World};

/// What a queue works on.
#[derive(Clone)]
pub struct Gpu {
    /// The GPU's memory.
    pub memory: Arc<dyn Memory>,
    /// The rest of the model.
    pub world: Arc<dyn World>,
    /// What runs kernels.
    pub dispatcher: Arc<dyn Dispatcher>,
    /// Set when no queue shall go on any more: a memory fault takes all queues of the process off the GPU.
    pub evicted: Arc<AtomicBool>,
}

/// A queue's doorbell.
pub trait Doorbell: Send + Sync {
    /// What was written to it last, or [`super::DOORBELL_UNTOUCHED`].
    fn value(&self) -> u64;
}

impl<F: Fn() -> u64 + Send + Sync> Doorbell for F {
    fn value(&self) -> u64 {
        self()
    }
}

/// How long to go on before sleeping.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How long a queue's thread looks at its doorbell, or at what it waits for, before it sleeps.
    pub spin: Duration,
    /// How long a queue's thread sleeps before it ends.
    pub linger: Duration,
    /// Shortest pause between two looks.
    pub shortest: Duration,
    /// Longest pause between two looks. Where many queues wait for memory, theirs are longer in proportion.
    pub longest: Duration,
    /// After so long without a ring doorbells trap, where they can.
    pub still: Duration,
    /// The pause between two looks at doorbells that trap.
    pub trapped: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            spin: Duration::from_micros(50),
            linger: Duration::from_secs(1),
            shortest: Duration::from_micros(50),
            longest: Duration::from_millis(1),
            still: Duration::from_millis(100),
            trapped: Duration::from_millis(250),
        }
    }
}

/// Queues that wait for memory at the same time and yet are tried at the full rate.
const WAITING_AT_FULL_RATE: usize = 8;

/// The queues of a process.
pub struct Engines {
    shared: Arc<Shared>,
}

struct Shared {
    patience: Patience,
    registry: Mutex<Registry>,
    /// Ends a pause of the watch.
    look: Condvar,
    /// Queues that wait for memory.
    waiting: AtomicUsize,
    trap: Arc<Trap>,
}

#[derive(Default)]
struct Registry {
    queues: Vec<Arc<Inner>>,
    /// The watch runs, or is about to.
    watched: bool,
    /// Somebody asked for a look now.
    rang: bool,
    made: u64,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for Engines {
    fn default() -> Self {
        Self::with_patience(Patience::default())
    }
}

impl Engines {
    /// No queues yet.
    pub fn with_patience(patience: Patience) -> Self {
        let shared = Shared {
            patience,
            registry: Mutex::default(),
            look: Condvar::new(),
            waiting: AtomicUsize::new(0),
            trap: Arc::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Starts a queue. It ends, and its thread with it, when what is returned is dropped.
    ///
    /// # Errors
    /// Those of starting a thread.
    pub fn add(
        &self,
        gpu: Gpu,
        processor: Box<dyn Processor>,
        doorbell: Arc<dyn Doorbell>,
    ) -> io::Result<Queue> {
        self.insert(gpu, processor, doorbell, false)
    }

    /// The same for a queue that does nothing before [`Queue::resume`].
    ///
    /// # Errors
    /// Those of starting a thread.
    pub fn add_paused(
        &self,
        gpu: Gpu,
        processor: Box<dyn Processor>,
        doorbell: Arc<dyn Doorbell>,
    ) -> io::Result<Queue> {
        self.insert(gpu, processor, doorbell, true)
    }

    fn insert(
        &self,
        gpu: Gpu,
        processor: Box<dyn Processor>,
        doorbell: Arc<dyn Doorbell>,
        paused: bool,
    ) -> io::Result<Queue> {
        let mut registry = lock(&self.shared.registry);
        registry.made = registry.made.wrapping_add(1);
        let inner = Arc::new(Inner::new(registry.made, gpu, processor, doorbell));
        let queue = Queue::new(inner.clone(), self.shared.clone());
        if paused {
            queue.pause();
        }
        // There may be work already: packets that were there before the queue.
        let started = inner.wake(&self.shared).and_then(|()| match registry.watched {
            true => Ok(()),
            false => watch::start(&self.shared),
        });
        if started.is_ok() {
            registry.watched = true;
            registry.queues.push(inner);
        }
        // The end of a queue looks into the registry.
        drop(registry);
        started.map(|()| queue)
    }

    /// Looks at all doorbells now, and closely for a while: for whoever writes one and knows it.
    pub fn rang(&self) {
        self.shared.rang();
    }

    /// The process has mapped doorbells there, `length` bytes in whole pages. While it rings none of its doorbells for long,
    /// stores to them trap instead of being looked for.
    pub fn doorbells_mapped(&self, address: u64, length: u64) {
        let shared = Arc::downgrade(&self.shared);
        let heard = move || {
            if let Some(shared) = shared.upgrade() {
                shared.rang();
            }
        };
        self.shared.trap.add(address, length, Box::new(heard));
    }

    /// How many queues there are.
    pub fn len(&self) -> usize {
        lock(&self.shared.registry).queues.len()
    }

    /// There is no queue.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl core::fmt::Debug for Engines {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.debug_struct("Engines").field("queues", &self.len()).finish_non_exhaustive()
    }
}

impl Shared {
    fn rang(&self) {
        lock(&self.registry).rang = true;
        self.look.notify_all();
    }

    /// Has queues that wait for memory look again.
    fn memory_changed(self: &Arc<Self>) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        let queues = lock(&self.registry).queues.clone();
        for queue in queues {
            queue.wake_if_waiting();
        }
    }

    fn remove(&self, queue: &Arc<Inner>) {
        lock(&self.registry).queues.retain(|other| !Arc::ptr_eq(other, queue));
        self.look.notify_all();
    }
}

#[cfg(test)]
mod tests;
