//! One queue with its thread.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Context, Doorbell, Failure, Gpu, Processor, Shared, WAITING_AT_FULL_RATE, lock, spawn};
use crate::engine::{DOORBELL_UNTOUCHED, Step};

/// A queue that runs. Dropping it ends it: what it is doing is broken off, and its thread is gone afterwards.
pub struct Queue {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    /// The process that has the thread; a forked child has a copy of this without one.
    process: u32,
}

/// What a queue's thread, the watch and the owner share.
pub(super) struct Inner {
    number: u64,
    gpu: Gpu,
    processor: Mutex<Box<dyn Processor>>,
    doorbell: Arc<dyn Doorbell>,
    control: Mutex<Control>,
    wake: Condvar,
    /// No step may begin, and a long one shall end: paused or ended.
    stop: AtomicBool,
    /// The thread sleeps, or there is none: the watch looks at the doorbell.
    asleep: AtomicBool,
    /// The processor waits for memory.
    waiting: AtomicBool,
    /// What the doorbell held before the last step.
    seen: AtomicU64,
    failure: OnceLock<Failure>,
}

#[derive(Default)]
struct Control {
    paused: bool,
    ended: bool,
    /// There may be something to do.
    kicked: bool,
    /// There is a thread, and it has not decided to end.
    has_thread: bool,
    thread: Option<JoinHandle<()>>,
}

impl Queue {
    pub(super) fn new(inner: Arc<Inner>, shared: Arc<Shared>) -> Self {
        Self { inner, shared, process: std::process::id() }
    }

    /// Stops the queue: once this returns, no step runs. Packets stay where they are.
    pub fn pause(&self) {
        lock(&self.inner.control).paused = true;
        self.inner.stop.store(true, Ordering::Relaxed);
        self.inner.wake.notify_all();
        lock(&self.inner.processor).quiesce(&self.inner.context());
    }

    /// Lets a paused queue go on.
    ///
    /// # Errors
    /// Those of starting a thread; the queue then starts with the next ring of its doorbell.
    pub fn resume(&self) -> io::Result<()> {
        {
            let mut control = lock(&self.inner.control);
            control.paused = false;
            self.inner.stop.store(false, Ordering::Relaxed);
        }
        self.inner.wake(&self.shared)
    }

    /// It is paused.
    pub fn is_paused(&self) -> bool {
        lock(&self.inner.control).paused
    }

    /// Gives the queue another ring, after the step that runs now. Pause it before where that is not enough.
    pub fn set_ring(&self, address: u64, size: u32) {
        lock(&self.inner.processor).set_ring(address, size);
    }

    /// It has a thread at the moment.
    #[cfg(test)]
    pub(super) fn has_thread(&self) -> bool {
        lock(&self.inner.control).has_thread
    }

    /// Why the queue stopped for good, if it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.inner.failure.get()
    }
}

impl core::fmt::Debug for Queue {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let failure = self.failure();
        formatter
            .debug_struct("Queue")
            .field("number", &self.inner.number)
            .field("failure", &failure)
            .finish_non_exhaustive()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let thread = {
            let mut control = lock(&self.inner.control);
            control.ended = true;
            self.inner.stop.store(true, Ordering::Relaxed);
            control.thread.take()
        };
        self.inner.wake.notify_all();
        if self.process != std::process::id() {
            return;
        }
        self.shared.remove(&self.inner);
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // An error would be a panic of the thread, which has told about itself.
            let _ = thread.join();
        }
    }
}

/// Why a sleep ended.
#[derive(PartialEq, Eq)]
enum Woken {
    /// There is something to do, or the queue is paused.
    Yes,
    /// Nothing happened for so long.
    TimedOut,
}

impl Inner {
    pub(super) fn new(
        number: u64,
        gpu: Gpu,
        processor: Box<dyn Processor>,
        doorbell: Arc<dyn Doorbell>,
    ) -> Self {
        Self {
            number,
            gpu,
            processor: Mutex::new(processor),
            doorbell,
            control: Mutex::default(),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            seen: AtomicU64::new(DOORBELL_UNTOUCHED),
            failure: OnceLock::new(),
        }
    }

    /// The queue sleeps, could run, and its doorbell was rung since it last looked.
    pub(super) fn is_rung(&self) -> bool {
        let sleeps = self.asleep.load(Ordering::Acquire) && !self.is_stopped();
        sleeps && self.doorbell.value() != self.seen.load(Ordering::Acquire)
    }

    /// It does nothing before its doorbell rings.
    pub(super) fn is_quiet(&self) -> bool {
        (self.asleep.load(Ordering::Acquire) && !self.waiting.load(Ordering::Acquire)) || self.is_stopped()
    }

    /// No step may begin.
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.is_evicted()
    }

    fn is_evicted(&self) -> bool {
        self.gpu.evicted.load(Ordering::Relaxed)
    }

    /// Has the queue look for work, with a thread if it has none.
    pub(super) fn wake(self: &Arc<Self>, shared: &Arc<Shared>) -> io::Result<()> {
        let mut control = lock(&self.control);
        control.kicked = true;
        if !control.has_thread && !control.ended && !control.paused && !self.is_evicted() {
            let (inner, shared) = (self.clone(), shared.clone());
            let thread = spawn(format!("kfd-queue-{}", self.number), move || inner.run(&shared))?;
            control.thread = Some(thread);
            control.has_thread = true;
        }
        drop(control);
        self.wake.notify_all();
        Ok(())
    }

    /// Has the queue look again at what it waits for.
    pub(super) fn wake_if_waiting(&self) {
        if self.waiting.load(Ordering::Acquire) {
            lock(&self.control).kicked = true;
            self.wake.notify_all();
        }
    }

    /// The thread.
    fn run(&self, shared: &Arc<Shared>) {
        let mut progressed = false;
        let mut waits_since = None;
        while self.may_step() {
            let doorbell = self.doorbell.value();
            self.seen.store(doorbell, Ordering::Release);
            let Some(step) = self.step(doorbell) else { continue };
            if step == Step::Progressed {
                progressed = true;
                waits_since = None;
                continue;
            }
            if core::mem::take(&mut progressed) {
                shared.memory_changed();
            }
            match step {
                Step::Progressed => {}
                Step::Waiting { .. } => {
                    let since = *waits_since.get_or_insert_with(Instant::now);
                    self.wait_for_memory(shared, since.elapsed());
                }
                Step::Idle => {
                    waits_since = None;
                    let spun = self.spin(shared.patience.spin, doorbell);
                    if !spun && self.sleep(shared.patience.linger, true) == Woken::TimedOut {
                        return;
                    }
                }
                Step::Failed(failure) => {
                    let _ = self.failure.set(failure);
                    if self.sleep(shared.patience.linger, true) == Woken::TimedOut {
                        return;
                    }
                }
            }
        }
    }

    /// Waits while the queue is paused, or for ever when it was evicted; false when it ended.
    fn may_step(&self) -> bool {
        self.asleep.store(false, Ordering::Release);
        let mut control = lock(&self.control);
        while (control.paused || self.is_evicted()) && !control.ended {
            control = self.wake.wait(control).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        control.kicked = false;
        !control.ended
    }

    /// One step; `None` when there may be none now.
    fn step(&self, doorbell: u64) -> Option<Step> {
        let mut processor = lock(&self.processor);
        // Whoever stops the queue sets this first and takes the lock then.
        if self.is_stopped() {
            return None;
        }
        Some(processor.step(&self.context(), doorbell))
    }

    fn context(&self) -> Context<'_> {
        Context {
            memory: self.gpu.memory.as_ref(),
            world: self.gpu.world.as_ref(),
            dispatcher: self.gpu.dispatcher.as_ref(),
            stop: &self.stop,
            evicted: &self.gpu.evicted,
        }
    }

    /// Looks at the doorbell for a moment; true when there may be work.
    fn spin(&self, time: Duration, doorbell: u64) -> bool {
        let start = Instant::now();
        loop {
            if self.doorbell.value() != doorbell || self.is_stopped() {
                return true;
            }
            if start.elapsed() >= time {
                return false;
            }
            // Not yielding: on a busy machine that costs whole time slices, and sleeping does not.
            core::hint::spin_loop();
        }
    }

    /// Pauses before the memory is looked at again, after `waited` without success.
    fn wait_for_memory(&self, shared: &Shared, waited: Duration) {
        if waited < shared.patience.spin {
            core::hint::spin_loop();
            return;
        }
        self.waiting.store(true, Ordering::Release);
        let others = shared.waiting.fetch_add(1, Ordering::Relaxed);
        let factor = u32::try_from(others / WAITING_AT_FULL_RATE).unwrap_or(u32::MAX).saturating_add(1);
        let patience = &shared.patience;
        let pause = (waited / 8).clamp(patience.shortest, patience.longest.saturating_mul(factor));
        self.sleep(pause, false);
        shared.waiting.fetch_sub(1, Ordering::Relaxed);
        self.waiting.store(false, Ordering::Release);
    }

    /// Sleeps until there is something to do, or `time` is over. If it is over and the thread `ends` then, there is
    /// none from then on.
    fn sleep(&self, time: Duration, ends: bool) -> Woken {
        self.asleep.store(true, Ordering::Release);
        let control = lock(&self.control);
        let quiet = |control: &mut Control| !control.kicked && !control.ended && !control.paused;
        let (mut control, timeout) = match self.wake.wait_timeout_while(control, time, quiet) {
            Ok(result) => result,
            Err(poisoned) => poisoned.into_inner(),
        };
        if timeout.timed_out() {
            control.has_thread = !ends;
            return Woken::TimedOut;
        }
        Woken::Yes
    }
}
