//! The thread that asks the VMM to map and unmap: the only one that ever waits for the VMM.
//!
//! QEMU answers a map in its main loop, and may before that send the new region over the main channel and wait
//! for the device. So no lock of the device may be held meanwhile, and no command may wait for it on the queue's
//! own thread. Jobs are done in the order in which they come.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags};
use vhost::vhost_user::{Backend, VhostUserFrontendReqHandler};

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
    /// Starts the thread.
    pub fn start(backend: SharedBackend) -> std::io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (jobs, next_job) = channel();
        let (report, outcomes) = channel();
        let bell = wake.clone();
        std::thread::Builder::new().name("mapper".into()).spawn(move || {
            for job in next_job {
                if report.send(run(&backend, job)).is_err() {
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

fn run(backend: &SharedBackend, job: Job) -> Outcome {
    // Cloned, so that the lock is not held while the VMM is asked.
    let channel = backend.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let (job, result) = match (channel, job) {
        (None, Job::Map { job, .. } | Job::Unmap { job, .. }) => {
            (job, Err("the VMM has given no channel for requests".to_owned()))
        }
        (Some(channel), Job::Map { job, file, file_offset, offset, len }) => {
            let request = request(file_offset, offset, len, VhostUserMMapFlags::WRITABLE);
            (job, channel.shmem_map(&request, &*file).map_err(|error| error.to_string()))
        }
        (Some(channel), Job::Unmap { job, offset, len }) => {
            let request = request(0, offset, len, VhostUserMMapFlags::empty());
            (job, channel.shmem_unmap(&request).map_err(|error| error.to_string()))
        }
    };
    Outcome { job, result: result.map(|_| ()) }
}

fn request(fd_offset: u64, shm_offset: u64, len: u64, flags: VhostUserMMapFlags) -> VhostUserMMap {
    VhostUserMMap { shmid: WINDOW_ID, padding: [0; 7], fd_offset, shm_offset, len, flags: flags.bits() }
}
