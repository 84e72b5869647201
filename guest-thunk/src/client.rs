//! Calls: frames out, answers in.
//!
//! ```text
//! Client::connect()                                         handshake done, answer memory mapped
//! client.call::<GetClockCounters>(&request, &[], 0)         one request
//! let mut batch = client.batch();                           several requests in one frame
//! let alloc = batch.push::<AllocMemory>(&request, &[], 0)?; a ticket for the answer
//! batch.push::<MapMemory>(&BufferRequest { handle: alloc.handle() }, &gpus, 0)?;
//! let answers = batch.run()?;
//! let (buffer, _) = answers.get(alloc)?;
//! client.wait_call::<WaitEvents>(&request, &events, n)      blocks on a ring of its own
//! ```
//!
//! A client is used by many threads at once. It belongs to the process that connected: in a forked child every call
//! gives [`ClientError::Forked`] before it touches a lock, so nothing can be left locked there; the child may connect
//! anew. A lost connection stays lost: every later call gives [`ClientError::Lost`].

mod answers;
mod batch;
mod connect;
mod error;
mod mapping;
mod rings;
#[cfg(test)]
pub(crate) mod tests;
mod topology;
mod wait;

use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use virtio_kfd_protocol::calls::ResourceInfo;
use virtio_kfd_protocol::{
    CallType, Features, Handle, HelloAnswer, ResourceInfoAnswer, ResourceRequest, Status,
};

pub use self::batch::{Answers, Batch, Ticket};
pub use self::connect::{DEVICE_VARIABLE, LOOPBACK_VARIABLE};
pub use self::error::{ClientError, ConnectError};
pub use self::wait::WaitCall;

use self::answers::AnswerArena;
use self::rings::WaitRings;
use crate::transport::{Blob, Transport, TransportError};
use virtio_kfd_protocol::limits::CONTROL_RING;

/// The longest that the host may take for a call beyond the time that the call itself allows. A host that is alive
/// answers control calls in far less, even on an overloaded machine; one that is not would never answer.
pub const HOST_SILENCE: Duration = Duration::from_secs(120);

/// What the answer to a call consists of: the fixed part and the tail.
pub type Answer<C> = (<C as CallType>::Answer, Vec<<C as CallType>::AnswerTail>);

/// A connection of this process to its worker on the host.
pub struct Client {
    // Dropped in this order: the answer memory goes back before the context ends.
    answers: AnswerArena,
    transport: Box<dyn Transport>,
    rings: WaitRings,
    hello: HelloAnswer,
    sequence: AtomicU64,
    lost: OnceLock<String>,
    owner: u32,
}

impl Client {
    /// Connects: by the loop-back socket in `VIRTIO_KFD_LOOPBACK` if that is set, else by the render node in
    /// `VIRTIO_KFD_DEVICE` if that is set, else by the first render node that speaks virtio-kfd.
    pub fn connect() -> Result<Client, ConnectError> {
        Client::over(connect::transport()?)
    }

    /// One request on the control ring. `answer_elements` is how many elements of answer tail there is room for.
    pub fn call<C: CallType>(
        &self,
        request: &C::Request,
        tail: &[C::RequestTail],
        answer_elements: usize,
    ) -> Result<Answer<C>, ClientError> {
        self.call_on::<C>(CONTROL_RING, request, tail, answer_elements, HOST_SILENCE)
    }

    /// Several requests in one frame, run in order until one fails.
    pub fn batch(&self) -> Batch<'_> {
        Batch::new(self)
    }

    /// A request that blocks on the host for up to the time-out that stands in it (see [`WaitCall`]). It goes on a
    /// ring of its own, so neither control calls nor other waits are held up, however many threads wait.
    ///
    /// Long waits are sent again after a while, so that a host that has died is noticed and that more threads than
    /// rings take turns; an event that is set and reset in between is missed, as with a wait that a
    /// signal interrupts on bare metal.
    pub fn wait_call<C: WaitCall>(
        &self,
        request: &C::Request,
        tail: &[C::RequestTail],
        answer_elements: usize,
    ) -> Result<Answer<C>, ClientError> {
        wait::wait_call::<C>(self, request, tail, answer_elements)
    }

    /// Memory of the guest that the host can see: a GUEST blob of `size` bytes, a multiple of the page size.
    pub fn guest_memory(&self, size: u64) -> Result<Box<dyn Blob>, ClientError> {
        self.usable()?;
        self.transport.guest_blob(size).map_err(|error| self.transport_failed(error))
    }

    /// Bytes of guest memory that could be had in all, where that is known.
    pub fn guest_memory_left(&self) -> Option<u64> {
        self.transport.guest_memory_left()
    }

    /// The same in pages that the guest's kernel treats as ordinary ones, where there are such. It can be mapped once,
    /// and not exported.
    pub fn ordinary_memory(&self, size: u64) -> Option<Box<dyn Blob>> {
        self.usable().ok()?;
        let blob = self.transport.ordinary_memory(size)?;
        // Linux does not look at the device's answer to the blob's creation; here it is seen.
        let request = ResourceRequest { resource: blob.resource(), pad: 0 };
        let info = self.call::<ResourceInfo>(&request, &[], 0).ok()?.0;
        (info.kind == ResourceInfoAnswer::GUEST && info.size >= size).then_some(blob)
    }

    /// Memory of the host that this process can map: a HOST3D blob over `buffer`, of `size` bytes. Needs
    /// [`Features::HOST_BLOBS`].
    pub fn host_memory(&self, buffer: Handle, size: u64) -> Result<Box<dyn Blob>, ClientError> {
        self.usable()?;
        self.transport.host_blob(buffer, size).map_err(|error| self.transport_failed(error))
    }

    /// The same for what another process shares by a token. One that is not mappable can only be exported.
    pub fn host_blob(&self, blob_id: u64, size: u64, mappable: bool) -> Result<Box<dyn Blob>, ClientError> {
        self.usable()?;
        self.transport.host_memory(blob_id, size, mappable).map_err(|error| self.transport_failed(error))
    }

    /// The blob behind a dma-buf of this device.
    pub fn import(&self, dma_buf: BorrowedFd<'_>) -> Result<Box<dyn Blob>, ClientError> {
        self.usable()?;
        self.transport.import(dma_buf).map_err(|error| self.transport_failed(error))
    }

    /// The descriptor of the device, where there is one.
    pub fn device(&self) -> Option<BorrowedFd<'_>> {
        self.transport.device()
    }

    /// The files of the host's topology that this VM may see, all of one generation.
    pub fn topology(&self) -> Result<Vec<virtio_kfd_protocol::topology::TopologyFile>, ClientError> {
        topology::read(self)
    }

    /// Features that both sides have.
    pub fn features(&self) -> Features {
        Features::from_bits_truncate(self.hello.features)
    }

    /// The interface version of the host's KFD: major, minor.
    pub fn kfd_version(&self) -> (u32, u32) {
        (self.hello.kfd_major, self.hello.kfd_minor)
    }

    /// GPUs that this VM was given.
    pub fn gpu_count(&self) -> u32 {
        self.hello.gpu_count
    }

    /// Whether the connection is lost.
    pub fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Whether this process connected the client, rather than a parent that then forked.
    pub fn is_mine(&self) -> bool {
        self.owner == std::process::id()
    }

    /// For a forked child, also from an atfork handler: closes the inherited descriptors, so that the parent's context
    /// ends with the parent. The client itself is then to be forgotten (`mem::forget`), not dropped. Does nothing
    /// in the process that connected.
    pub fn abandon(&self) {
        self.transport.abandon();
    }

    fn call_on<C: CallType>(
        &self,
        ring: u8,
        request: &C::Request,
        tail: &[C::RequestTail],
        answer_elements: usize,
        limit: Duration,
    ) -> Result<Answer<C>, ClientError> {
        let mut batch = Batch::new(self);
        let ticket = batch.push::<C>(request, tail, answer_elements)?;
        batch.run_on(ring, limit)?.get(ticket)
    }

    /// Whether calls can work at all. Takes no lock.
    fn usable(&self) -> Result<(), ClientError> {
        if !self.is_mine() {
            return Err(ClientError::Forked { owner: self.owner });
        }
        match self.lost.get() {
            Some(why) => Err(ClientError::Lost(why.clone())),
            None => Ok(()),
        }
    }

    /// Marks the connection as lost, says so once, and gives the error for the call that found out.
    fn lose(&self, why: String) -> ClientError {
        let mut first = false;
        let why = self.lost.get_or_init(|| {
            first = true;
            why
        });
        if first {
            error::say(&format!("virtio-kfd: the connection to the host is lost: {why}\n"));
        }
        ClientError::Lost(why.clone())
    }

    fn transport_failed(&self, error: TransportError) -> ClientError {
        match error {
            TransportError::Lost(why) => self.lose(why),
            other => ClientError::Transport(other),
        }
    }

    fn next_sequence(&self) -> u64 {
        self.sequence.fetch_add(1, Ordering::Relaxed)
    }

    /// Looks at how a request ended: a worker that is gone takes the connection with it.
    fn check_status(&self, call: &'static str, status: Status) -> Result<(), ClientError> {
        match status {
            Status::WORKER_LOST => Err(self.lose(format!("{call}: {status}"))),
            _ => Ok(()),
        }
    }
}
