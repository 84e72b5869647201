//! Threads that stand for the compute units of all GPUs of a process: at most one for each core of the host, started
//! when there is work for several, gone when there was none for a while. The queue that dispatched a kernel works on it
//! too.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::job::{Job, Turn, Worker};
use crate::engine::threads::spawn;

/// Most threads, however many cores there are.
const MAX_THREADS: usize = 64;

/// How long a thread waits for work before it ends.
const LINGER: Duration = Duration::from_secs(1);

/// The compute units of a process.
pub struct Pool {
    shared: Arc<Shared>,
    most: usize,
    waves: Arc<AtomicU32>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    jobs: Vec<Arc<Job>>,
    /// The job that is asked first next time.
    next: usize,
    threads: usize,
    /// Threads that wait.
    idle: usize,
    /// Counts what may be work.
    changes: u64,
    ended: bool,
}

impl core::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let waves = self.waves.load(Ordering::Relaxed);
        formatter
            .debug_struct("Pool")
            .field("most", &self.most)
            .field("waves", &waves)
            .finish_non_exhaustive()
    }
}

impl Default for Pool {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with_threads(cores.saturating_sub(1).min(MAX_THREADS))
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// One that has at most so many threads beside those of the queues.
    pub fn with_threads(most: usize) -> Self {
        let shared = Shared { state: Mutex::default(), work: Condvar::new() };
        Self { shared: Arc::new(shared), most, waves: Arc::default() }
    }

    /// Waves that are begun and not ended, of all kernels.
    pub(super) fn waves(&self) -> Arc<AtomicU32> {
        self.waves.clone()
    }

    /// Offers a job to the threads, at which so many of them can work.
    pub fn offer(&self, job: &Arc<Job>, workers: usize) {
        if self.most == 0 {
            return;
        }
        let mut state = lock(&self.shared);
        state.jobs.push(job.clone());
        state.changes = state.changes.wrapping_add(1);
        for _ in state.idle..workers.min(self.most) {
            if state.threads >= self.most {
                break;
            }
            let shared = self.shared.clone();
            // Without another thread those that there are do the work.
            if spawn("kfd-compute".into(), move || serve(&shared)).is_err() {
                break;
            }
            state.threads += 1;
        }
        drop(state);
        self.shared.work.notify_all();
    }

    /// Threads that there are now.
    #[cfg(test)]
    pub(super) fn threads(&self) -> usize {
        lock(&self.shared).threads
    }

    /// Takes a job back; threads that are at it finish their turn.
    pub fn withdraw(&self, job: &Arc<Job>) {
        lock(&self.shared).jobs.retain(|other| !Arc::ptr_eq(other, job));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared).ended = true;
        self.shared.work.notify_all();
    }
}

/// A thread.
fn serve(shared: &Shared) {
    let mut worker = Worker::default();
    let mut fruitless = 0;
    loop {
        let mut state = lock(shared);
        if state.ended {
            state.threads -= 1;
            return;
        }
        let count = state.jobs.len();
        if fruitless >= count {
            let seen = state.changes;
            state.idle += 1;
            let quiet = |state: &mut State| state.changes == seen && !state.ended;
            let waited = shared.work.wait_timeout_while(state, LINGER, quiet);
            let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            if timeout.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
            fruitless = 0;
            continue;
        }
        let index = state.next.checked_rem(count).unwrap_or(0);
        state.next = index.wrapping_add(1);
        let job = state.jobs.get(index).cloned();
        drop(state);
        let Some(job) = job else { continue };
        match job.turn(&mut worker, &|| false) {
            Turn::Ran => fruitless = 0,
            Turn::Nothing => fruitless += 1,
        }
    }
}
