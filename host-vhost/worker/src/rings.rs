//! Rings other than the control ring: a thread for each that is in use, so that a wait holds up nothing else.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use kfd_ipc::worker::FromWorker;
use kfd_ipc::{Channel, IpcError};
use virtio_kfd_protocol::Status;
use virtio_kfd_protocol::frame::FrameError;
use virtio_kfd_protocol::limits::MAX_FRAME_BYTES;

use crate::context::Context;
use crate::dispatch::{refuse_frame, run_frame};

/// Most bytes of frames that wait on all rings together; a frame beyond is refused with [`Status::LIMIT`] in
/// its turn.
const MAX_WAITING_BYTES: usize = 64 * MAX_FRAME_BYTES;
/// Most frames that wait on all rings together, refused ones included. A virtqueue has at most 32768 descriptors
/// and a frame takes at least two of them, so only a broken device sends more.
const MAX_WAITING_FRAMES: usize = 16 * 1024;
/// Stack of a ring's thread in bytes; no request recurses.
const STACK_BYTES: usize = 256 * 1024;

/// A frame in its turn.
enum Turn {
    /// To be run.
    Run { ticket: u64, bytes: Vec<u8> },
    /// Refused when it came; this is its answer.
    Refused { ticket: u64, answer: Vec<u8> },
}

/// What waits on all rings.
#[derive(Debug, Default)]
struct Waiting {
    bytes: AtomicUsize,
    frames: AtomicUsize,
}

/// The rings in use.
pub struct Rings {
    context: Arc<Context>,
    channel: Arc<Channel>,
    waiting: Arc<Waiting>,
    queues: HashMap<u8, Sender<Turn>>,
}

/// Why a frame cannot be taken: the device is broken.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// It is no frame.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// There are too many.
    #[error("more than {MAX_WAITING_FRAMES} frames wait")]
    TooMany,
}

impl Rings {
    /// None in use yet.
    pub fn new(context: Arc<Context>, channel: Arc<Channel>) -> Self {
        Rings { context, channel, waiting: Arc::default(), queues: HashMap::new() }
    }

    /// Puts a frame in the queue of its ring.
    pub fn push(&mut self, ring: u8, ticket: u64, bytes: &[u8]) -> Result<(), RingError> {
        if self.waiting.frames.fetch_add(1, Ordering::AcqRel) >= MAX_WAITING_FRAMES {
            return Err(RingError::TooMany);
        }
        let before = self.waiting.bytes.fetch_add(bytes.len(), Ordering::AcqRel);
        let fits = before.saturating_add(bytes.len()) <= MAX_WAITING_BYTES;
        let turn = if fits {
            Turn::Run { ticket, bytes: bytes.to_vec() }
        } else {
            self.waiting.bytes.fetch_sub(bytes.len(), Ordering::AcqRel);
            Turn::Refused { ticket, answer: refuse_frame(bytes, Status::LIMIT)? }
        };
        if self.queue(ring).is_some_and(|queue| queue.send(turn).is_ok()) {
            return Ok(());
        }
        // No thread could be started: nothing is before this frame on its ring, so it is answered at once.
        self.waiting.frames.fetch_sub(1, Ordering::AcqRel);
        if fits {
            self.waiting.bytes.fetch_sub(bytes.len(), Ordering::AcqRel);
        }
        let answer = refuse_frame(bytes, Status::LIMIT)?;
        send(&self.channel, ring, ticket, &answer);
        Ok(())
    }

    /// The queue of a ring, its thread started with the first frame.
    fn queue(&mut self, ring: u8) -> Option<&Sender<Turn>> {
        if !self.queues.contains_key(&ring) {
            let (sender, receiver) = channel();
            let (context, channel) = (self.context.clone(), self.channel.clone());
            let waiting = self.waiting.clone();
            let thread = thread::Builder::new().name(format!("ring-{ring}")).stack_size(STACK_BYTES);
            let started = thread.spawn(move || serve_ring(&context, &channel, &waiting, ring, &receiver));
            if let Err(error) = started {
                tracing::error!("ring {ring}: no thread: {error}");
                return None;
            }
            self.queues.insert(ring, sender);
        }
        self.queues.get(&ring)
    }
}

fn serve_ring(context: &Context, channel: &Channel, waiting: &Waiting, ring: u8, queue: &Receiver<Turn>) {
    while let Ok(turn) = queue.recv() {
        waiting.frames.fetch_sub(1, Ordering::AcqRel);
        let (ticket, answer) = match turn {
            Turn::Refused { ticket, answer } => (ticket, answer),
            Turn::Run { ticket, bytes } => {
                let answer = run_frame(context, ring, &bytes);
                waiting.bytes.fetch_sub(bytes.len(), Ordering::AcqRel);
                match answer {
                    Ok(answer) => (ticket, answer),
                    Err(error) => {
                        tracing::error!("ring {ring}: {error}");
                        channel.shut_down();
                        return;
                    }
                }
            }
        };
        send(channel, ring, ticket, &answer);
    }
}

/// Sends an answer. Where the channel is broken nobody waits for it, and the main thread sees the same and ends.
pub fn send(channel: &Channel, ring: u8, ticket: u64, bytes: &[u8]) {
    match channel.send(&FromWorker::Answer { ring, ticket, bytes }, &[]) {
        Ok(()) | Err(IpcError::Closed) => {}
        Err(error) => {
            tracing::error!("ring {ring}: {error}");
            channel.shut_down();
        }
    }
}
