//! Frames of one or more requests.

use std::marker::PhantomData;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use virtio_kfd_protocol::frame::{
    AnswerArea, AnswerFrame, AnswerFrameHeader, AnswerHeader, CallError, FrameError, FrameHeader,
    RequestFrameBuilder, answer_bytes,
};
use virtio_kfd_protocol::limits::{CONTROL_RING, MAX_ANSWER_BYTES};
use virtio_kfd_protocol::{CallType, Handle, ResourceId};
use zerocopy::{FromBytes, IntoBytes};

use super::{Answer, Client, ClientError, HOST_SILENCE};
use crate::transport::TransportError;

/// Stands for the answer to a request of a batch.
#[derive(Debug)]
pub struct Ticket<C> {
    index: u32,
    call: PhantomData<fn() -> C>,
}

impl<C> Clone for Ticket<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Ticket<C> {}

impl<C> Ticket<C> {
    /// The buffer that the request makes, for later requests of the same batch.
    pub fn handle(self) -> Handle {
        Handle::in_frame(self.index)
    }
}

/// Several requests that go to the host in one frame.
pub struct Batch<'c> {
    client: &'c Client,
    frame: RequestFrameBuilder,
    requests: u32,
    /// Most bytes that the answer can have.
    answer: usize,
    /// The first request, for messages.
    name: &'static str,
    version: u32,
}

impl<'c> Batch<'c> {
    pub(super) fn new(client: &'c Client) -> Self {
        Batch::with_version(client, client.hello.version)
    }

    /// A frame of a version other than the agreed one: 0 for the handshake.
    pub(super) fn with_version(client: &'c Client, version: u32) -> Self {
        // The area is filled in when the frame is sent: only then is it known how large it has to be.
        let area =
            AnswerArea { resource: ResourceId::default(), offset: 0, capacity: MAX_ANSWER_BYTES as u32 };
        Batch {
            client,
            frame: RequestFrameBuilder::new(version, 0, area),
            requests: 0,
            answer: size_of::<AnswerFrameHeader>(),
            name: "an empty batch",
            version,
        }
    }

    /// Adds a request with room for `answer_elements` elements of answer tail. Fails if the frame or its answer would
    /// be larger than a frame can be; the batch stays as it was.
    pub fn push<C: CallType>(
        &mut self,
        request: &C::Request,
        tail: &[C::RequestTail],
        answer_elements: usize,
    ) -> Result<Ticket<C>, ClientError> {
        let index = self.frame.push::<C>(request, tail, answer_elements)?;
        if self.requests == 0 {
            self.name = C::CALL.name();
        }
        self.requests = index.saturating_add(1);
        self.answer = self
            .answer
            .saturating_add(size_of::<AnswerHeader>())
            .saturating_add(answer_bytes::<C>(answer_elements));
        Ok(Ticket { index, call: PhantomData })
    }

    /// Sends the frame on the control ring and waits for the answers. Succeeds if the host answered, whatever it
    /// answered; how each request ended is in the answers.
    pub fn run(self) -> Result<Answers, ClientError> {
        self.run_on(CONTROL_RING, HOST_SILENCE)
    }

    pub(super) fn run_on(self, ring: u8, limit: Duration) -> Result<Answers, ClientError> {
        let client = self.client;
        client.usable()?;
        if self.requests == 0 {
            // The host would end the context over it.
            return Err(FrameError::Field { field: "request_count", found: 0, expected: "1 to 64" }.into());
        }
        let _pass = client.rings.enter(ring);
        // It may have been lost meanwhile.
        client.usable()?;
        let slot = client
            .answers
            .slot(&*client.transport, self.answer)
            .map_err(|error| client.transport_failed(error))?;
        let sequence = client.next_sequence();
        let mut frame = self.frame.finish();
        address(&mut frame, sequence, slot.area())?;
        match client.transport.submit_and_wait(ring, &frame, limit) {
            Ok(()) => {}
            Err(TransportError::Lost(why)) => {
                // The host may still have the frame, and write the answer at any time.
                slot.forfeit();
                return Err(client.lose(format!("{}: {why}", self.name)));
            }
            Err(other) => return Err(ClientError::Transport(other)),
        }
        // The answer was written before the fence completed.
        fence(Ordering::Acquire);
        let head = slot.copy_out(size_of::<AnswerFrameHeader>());
        let said = AnswerFrameHeader::read_from_bytes(&head).unwrap_or_default();
        let length = (said.total_len as usize).min(self.answer).next_multiple_of(8);
        let bytes = slot.copy_out(length);
        match check(&bytes, self.version, sequence, self.requests) {
            Ok(()) => {}
            Err(why) => {
                slot.forfeit();
                return Err(client.lose(format!("{}: {why}", self.name)));
            }
        }
        drop(slot);
        let answers = Answers { bytes };
        answers.check_worker(client, self.name)?;
        Ok(answers)
    }
}

/// Writes down in a finished frame where its answer goes.
fn address(frame: &mut [u8], sequence: u64, area: AnswerArea) -> Result<(), FrameError> {
    let found = frame.len();
    let what = "the frame header";
    let short = FrameError::Short { what, expected: size_of::<FrameHeader>(), found };
    let (mut header, _) = FrameHeader::read_from_prefix(frame).map_err(|_| short)?;
    header.sequence = sequence;
    header.answer_resource = area.resource;
    header.answer_offset = area.offset;
    header.answer_capacity = area.capacity;
    header.write_to_prefix(frame).map_err(|_| short)
}

/// Whether the bytes (a private copy) are the answer to the frame with this sequence number.
fn check(bytes: &[u8], version: u32, sequence: u64, requests: u32) -> Result<(), String> {
    let (head, _) = AnswerFrameHeader::read_from_prefix(bytes)
        .map_err(|_| "the fence completed without an answer".to_string())?;
    if head.sequence != sequence {
        return Err(format!(
            "the fence completed without an answer: sequence number {} is there, {sequence} expected",
            head.sequence
        ));
    }
    let frame = AnswerFrame::parse(bytes).map_err(|error| error.to_string())?;
    if head.answer_count != requests {
        return Err(format!("the answer has {} records, {requests} expected", head.answer_count));
    }
    // The answer to the handshake already has the version that it agrees on.
    if version != 0 && head.version != version {
        return Err(format!("the answer is of wire version {}, {version} expected", head.version));
    }
    debug_assert_eq!(frame.header, head);
    Ok(())
}

/// The answers to a batch.
#[derive(Debug)]
pub struct Answers {
    bytes: Vec<u8>,
}

impl Answers {
    /// The answer to one request. A request that was not run since an earlier one failed has the status `NOT_RUN`.
    pub fn get<C: CallType>(&self, ticket: Ticket<C>) -> Result<Answer<C>, ClientError> {
        let frame = AnswerFrame::parse(&self.bytes)?;
        let missing = CallError::Mismatch { call: C::CALL.name(), found: 0 };
        let answer = frame.answers.get(ticket.index as usize).ok_or(missing)?;
        Ok(answer.decode::<C>()?)
    }

    /// The error of the first request that failed, if any did.
    pub fn check(&self) -> Result<(), ClientError> {
        let frame = AnswerFrame::parse(&self.bytes)?;
        match frame.answers.iter().find(|answer| !answer.header.status.is_ok()) {
            None => Ok(()),
            Some(answer) => Err(ClientError::Call(CallError::Failed {
                call: virtio_kfd_protocol::Call::from_opcode(answer.header.opcode)
                    .map_or("an unknown call", virtio_kfd_protocol::Call::name),
                status: answer.header.status,
                errno: answer.header.errno,
            })),
        }
    }

    fn check_worker(&self, client: &Client, name: &'static str) -> Result<(), ClientError> {
        let frame = AnswerFrame::parse(&self.bytes)?;
        frame.answers.iter().try_for_each(|answer| client.check_status(name, answer.header.status))
    }
}

impl Client {
    /// The handshake's frame: version 0, since none is agreed on yet.
    pub(super) fn greet<C: CallType>(&self, request: &C::Request) -> Result<Answer<C>, ClientError> {
        let mut batch = Batch::with_version(self, 0);
        let ticket = batch.push::<C>(request, &[], 0)?;
        batch.run()?.get(ticket)
    }
}
