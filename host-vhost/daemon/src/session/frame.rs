//! Frames: from SUBMIT_3D to the worker, and the answers into guest memory.

use virtio_kfd_protocol::Status;
use virtio_kfd_protocol::frame::{AnswerFrameBuilder, RequestFrame};
use virtio_kfd_protocol::limits::{MAX_FRAME_BYTES, MAX_RINGS};

use super::blob::Kind;
use super::link::ForWorker;
use super::{Answer, Asked, Session, Step, Token, refuse};
use crate::budget::MAX_FRAMES_IN_FLIGHT;
use crate::chain::Input;
use crate::command::{self, FLAG_RING_IDX, Header, Response};
use crate::guest_warn;
use crate::memory::write_blob;

/// A frame without an answer, and where the answer goes.
#[derive(Debug)]
pub struct Frame {
    token: Token,
    ring: u8,
    resource: u32,
    offset: u64,
    capacity: u32,
    version: u32,
    sequence: u64,
    opcodes: Vec<u32>,
}

impl Session {
    pub(super) fn submit(&mut self, token: Token, header: &Header, input: &mut Input<'_>) -> Answer {
        if header.flags & FLAG_RING_IDX == 0 || u32::from(header.ring_idx) >= MAX_RINGS {
            return refuse(
                Response::InvalidParameter,
                format_args!(
                    "a frame needs a ring, 0 to {}; found {}",
                    MAX_RINGS.wrapping_sub(1),
                    header.ring_idx
                ),
            );
        }
        let request: command::Submit = input.read()?;
        if u64::from(request.size) > input.remaining() {
            return refuse(
                Response::InvalidParameter,
                format_args!("size is {}, but {} bytes follow", request.size, input.remaining()),
            );
        }
        let Some(context) = self.contexts.get(&header.ctx_id) else {
            return refuse(Response::InvalidContext, "there is no such context");
        };
        let (worker, lost) = (context.worker, context.lost);
        if request.size as usize > MAX_FRAME_BYTES {
            self.end_worker(worker, "a frame is larger than the limit");
            return refuse(Response::InvalidParameter, format_args!("a frame of {} bytes", request.size));
        }
        let mut bytes = vec![0; request.size as usize];
        input.read_exact(&mut bytes)?;
        let parsed = match RequestFrame::parse(&bytes) {
            Ok(parsed) => parsed,
            Err(error) => {
                self.end_worker(worker, "a frame is malformed");
                return refuse(Response::InvalidParameter, error);
            }
        };
        let frame = Frame {
            token,
            ring: header.ring_idx,
            resource: parsed.header.answer_resource.0,
            offset: parsed.header.answer_offset,
            capacity: parsed.header.answer_capacity,
            version: parsed.header.version,
            sequence: parsed.header.sequence,
            opcodes: parsed.requests.iter().map(|request| request.header.opcode).collect(),
        };
        self.check_answer_area(worker, &frame)?;
        if lost {
            self.answer_lost(frame);
            return Ok(Step::Pending);
        }
        let Some(entry) = self.workers.get_mut(&worker) else {
            self.answer_lost(frame);
            return Ok(Step::Pending);
        };
        if entry.frames >= MAX_FRAMES_IN_FLIGHT {
            guest_warn!(self.log, "context {}: too many frames in flight", header.ctx_id);
            self.answer_all(frame, Status::LIMIT);
            return Ok(Step::Pending);
        }
        entry.frames = entry.frames.saturating_add(1);
        let ticket = self.new_ticket(worker, Asked::Frame(frame), None);
        self.tell_worker(worker, Some(ForWorker::Frame { ring: header.ring_idx, ticket, bytes }));
        Ok(Step::Pending)
    }

    fn check_answer_area(&self, worker: u64, frame: &Frame) -> Result<(), super::Refusal> {
        let end = frame.offset.checked_add(frame.capacity.into());
        match self.resources.get(&frame.resource) {
            Some(blob) if blob.owner == Some(worker) && !blob.leaving => match &blob.kind {
                Kind::Guest { size, .. } if end.is_some_and(|end| end <= *size) => Ok(()),
                Kind::Guest { size, .. } => refuse(
                    Response::InvalidParameter,
                    format_args!(
                        "the answer, {} bytes at {:#x}, goes beyond blob {} of {size:#x} bytes",
                        frame.capacity, frame.offset, frame.resource
                    ),
                ),
                Kind::Host { .. } => refuse(
                    Response::InvalidResource,
                    format_args!("the answer goes to resource {}, which is not guest memory", frame.resource),
                ),
            },
            _ => refuse(
                Response::InvalidResource,
                format_args!(
                    "the answer goes to resource {}, which this context does not have",
                    frame.resource
                ),
            ),
        }
    }

    /// A worker's answer: into the blob, then the command is done.
    pub(super) fn answer(&mut self, worker: u64, ring: u8, ticket: u64, bytes: &[u8]) {
        let frame = self.take_ticket(worker, ticket, |asked| match asked {
            Asked::Frame(frame) if frame.ring == ring => Ok(frame),
            other => Err(other),
        });
        let Some(frame) = frame else { return };
        if let Some(entry) = self.workers.get_mut(&worker) {
            entry.frames = entry.frames.saturating_sub(1);
        }
        if bytes.len() > frame.capacity as usize {
            self.end_worker(worker, "its answer is larger than the place for it");
            self.answer_lost(frame);
            return;
        }
        self.deliver(&frame, bytes);
    }

    /// The worker will not answer.
    pub(super) fn answer_lost(&mut self, frame: Frame) {
        self.answer_all(frame, Status::WORKER_LOST);
    }

    fn answer_all(&mut self, frame: Frame, status: Status) {
        let mut answer = AnswerFrameBuilder::new(frame.version, frame.sequence);
        for opcode in &frame.opcodes {
            answer.push_status(*opcode, status, 0);
        }
        // The parser of the request frame has made sure that a header for each request fits.
        self.deliver(&frame, &answer.finish());
    }

    fn deliver(&mut self, frame: &Frame, bytes: &[u8]) {
        let written = match self.resources.get(&frame.resource).map(|blob| &blob.kind) {
            Some(Kind::Guest { runs, .. }) => write_blob(&self.memory, runs, frame.offset, bytes),
            _ => false,
        };
        let response = if written { Response::Ok } else { Response::Unspecified };
        self.commands.finish(frame.token, response);
    }
}
