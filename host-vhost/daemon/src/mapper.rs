//! The thread that asks the VMM to map and unmap: the only one that ever waits for the VMM.
//!
//! QEMU answers a map in its main loop, and may before that send the new region over the main channel and wait
//! for the device. So no lock of the device may be held meanwhile, and no command may wait for it on the queue's
//! own thread. Jobs are done in the order in which they come.
//!
//! QEMU answers before it has changed the guest's address space (`vhost_user_backend_handle_shmem_map` sends its
//! reply, then comes `memory_region_transaction_commit`). A guest that was told at once would store to nothing. The
//! change is in place when the map has come back as a region of the guest's memory, which is the last step of that
//! commit; so a job is done only then. A VMM whose maps do not come back (crosvm) is found out with the first one.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{Backend, VhostUserFrontendReqHandler};

use crate::memory::FileId;

/// How long the first map may take to come back before the VMM counts as one whose maps do not.
const FIRST: Duration = Duration::from_secs(1);

/// How long a later one may take. The VMM has answered already, and only its own locks can hold it up.
const LATER: Duration = Duration::from_secs(5);

/// Id of the window: `VIRTIO_GPU_SHM_ID_HOST_VISIBLE`.
pub const WINDOW_ID: u8 = 1;

/// What to do.
#[derive(Debug)]
pub enum Job {
    /// Map.
    Map {
        /// For the outcome.
        job: u64,
        /// The memory.
        file: Arc<File>,
        /// Which file that is.
        id: FileId,
        /// Where in the file, in bytes.
        file_offset: u64,
        /// Where in the window, in bytes.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Unmap.
    Unmap {
        /// For the outcome.
        job: u64,
        /// Which file is mapped there.
        id: FileId,
        /// Where in the window, in bytes.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// How a job ended.
#[derive(Debug)]
pub struct Outcome {
    /// Which.
    pub job: u64,
    /// Whether the VMM did it, or what it said.
    pub result: Result<(), String>,
}

/// What of the device's own maps the VMM's memory table has, by file.
#[derive(Debug, Default)]
pub struct OwnRegions {
    counts: Mutex<HashMap<FileId, usize>>,
    changed: Condvar,
}

impl OwnRegions {
    /// Takes over what the table has now.
    pub fn set(&self, counts: HashMap<FileId, usize>) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner) = counts;
        self.changed.notify_all();
    }

    fn count(&self, file: FileId) -> usize {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).get(&file).copied().unwrap_or(0)
    }

    /// Waits until the number for a file is another. `false` after `limit`.
    fn wait_for_change(&self, file: FileId, before: usize, limit: Duration) -> bool {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |counts: &mut HashMap<FileId, usize>| counts.get(&file).copied().unwrap_or(0) == before;
        let waited = self.changed.wait_timeout_while(counts, limit, same);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// The channel to the VMM, once it has given one.
pub type SharedBackend = Arc<Mutex<Option<Backend>>>;

/// The thread, seen from outside. It ends when this is dropped and its last job is done.
#[derive(Debug)]
pub struct Mapper {
    jobs: Sender<Job>,
    outcomes: Receiver<Outcome>,
    wake: Arc<OwnedFd>,
}

impl Mapper {
    /// Starts the thread, for the window with this id. `regions` is kept up to date by who hears of the VMM's memory table.
    pub fn start(backend: SharedBackend, regions: Arc<OwnRegions>, window: u8) -> std::io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (jobs, next_job) = channel();
        let (report, outcomes) = channel();
        let bell = wake.clone();
        std::thread::Builder::new().name("mapper".into()).spawn(move || {
            let mut comes_back = None;
            for job in next_job {
                if report.send(run(&backend, &regions, window, &mut comes_back, job)).is_err() {
                    break;
                }
                // Fails only when the counter is at its end, and then the reader has a wake-up to come.
                let _ = rustix::io::write(&bell, &1u64.to_ne_bytes());
            }
        })?;
        Ok(Mapper { jobs, outcomes, wake })
    }

    /// Readable when there are outcomes.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Queues a job. `false` if the thread is gone.
    pub fn submit(&self, job: Job) -> bool {
        self.jobs.send(job).is_ok()
    }

    /// The outcomes so far.
    pub fn outcomes(&self) -> Vec<Outcome> {
        let mut count = [0; 8];
        // Nothing to read means only that there was no bell since the last time.
        let _ = rustix::io::read(&self.wake, &mut count);
        self.outcomes.try_iter().collect()
    }
}

fn run(
    backend: &SharedBackend,
    regions: &OwnRegions,
    window: u8,
    comes_back: &mut Option<bool>,
    job: Job,
) -> Outcome {
    let (Job::Map { id, .. } | Job::Unmap { id, .. }) = &job;
    let (id, is_map) = (*id, matches!(job, Job::Map { .. }));
    let before = regions.count(id);
    let outcome = ask(backend, window, job);
    if outcome.result.is_err() {
        return outcome;
    }
    match comes_back {
        Some(true) if !regions.wait_for_change(id, before, LATER) => {
            tracing::warn!("the VMM has answered and has not changed its memory table after {LATER:?}");
        }
        None if is_map => *comes_back = Some(regions.wait_for_change(id, before, FIRST)),
        Some(_) | None => {}
    }
    outcome
}

fn ask(backend: &SharedBackend, window: u8, job: Job) -> Outcome {
    // Cloned, so that the lock is not held while the VMM is asked.
    let channel = backend.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let (job, result) = match (channel, job) {
        (None, Job::Map { job, .. } | Job::Unmap { job, .. }) => {
            (job, Err("the VMM has given no channel for requests".to_owned()))
        }
        (Some(channel), Job::Map { job, file, file_offset, offset, len, .. }) => {
            let request = request(window, file_offset, offset, len, VhostUserMMapFlags::WRITABLE);
            (job, channel.shmem_map(&request, &*file).map_err(|error| error.to_string()))
        }
        (Some(channel), Job::Unmap { job, offset, len, .. }) => {
            let request = request(window, 0, offset, len, VhostUserMMapFlags::empty());
            (job, channel.shmem_unmap(&request).map_err(|error| error.to_string()))
        }
    };
    Outcome { job, result: result.map(|_| ()) }
}

fn request(
    window: u8,
    fd_offset: u64,
    shm_offset: u64,
    len: u64,
    flags: VhostUserMMapFlags,
) -> VhostUserMMap {
    VhostUserMMap { shmid: window, padding: [0; 7], fd_offset, shm_offset, len, flags: flags.bits() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_waited_for_and_no_longer() {
        let file = FileId::of(&tempfile::tempfile().unwrap()).unwrap();
        let other = FileId::of(&tempfile::tempfile().unwrap()).unwrap();
        let regions = OwnRegions::default();
        assert!(!regions.wait_for_change(file, 0, Duration::from_millis(10)));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| regions.wait_for_change(file, 0, Duration::from_secs(60)));
            regions.set(HashMap::from([(other, 1)]));
            regions.set(HashMap::from([(other, 1), (file, 1)]));
            assert!(waiter.join().unwrap());
        });
        assert_eq!((regions.count(file), regions.count(other)), (1, 1));
        assert!(regions.wait_for_change(file, 0, Duration::ZERO), "it has happened already");
        regions.set(HashMap::new());
        assert!(regions.wait_for_change(file, 1, Duration::from_secs(60)), "an unmap");
    }
}
