//! Frames: from SUBMIT_3D to the worker, and the answers into guest memory.

use std::time::Instant;

use virtio_kfd_protocol::Status;
use virtio_kfd_protocol::frame::{AnswerFrameBuilder, RequestFrame};
use virtio_kfd_protocol::limits::{MAX_FRAME_BYTES, MAX_RINGS};

use super::blob::Kind;
use super::link::ForWorker;
use super::{Answer, Asked, Session, Step, Token, refuse, room};
use crate::chain::Input;
use crate::command::{self, FLAG_RING_IDX, Header, Response};
use crate::memory::write_blob;

/// A frame without an answer, and where the answer goes.
#[derive(Debug)]
pub struct Frame {
    token: Token,
    /// Context and ring that it came on.
    pub context: u32,
    pub ring: u8,
    /// Whether it may wait for as long as the guest says.
    pub waits: bool,
    /// When it came.
    pub since: Instant,
    resource: u32,
    /// Of the blob that the resource was when the frame came.
    serial: u64,
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
        self.make_room(header.ctx_id);
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
        let mut frame = Frame {
            token,
            context: header.ctx_id,
            ring: header.ring_idx,
            waits: parsed.requests.iter().any(room::may_wait),
            since: Instant::now(),
            resource: parsed.header.answer_resource.0,
            serial: 0,
            offset: parsed.header.answer_offset,
            capacity: parsed.header.answer_capacity,
            version: parsed.header.version,
            sequence: parsed.header.sequence,
            opcodes: parsed.requests.iter().map(|request| request.header.opcode).collect(),
        };
        frame.serial = self.check_answer_area(worker, &frame)?;
        if lost {
            self.answer_lost(frame);
            return Ok(Step::Pending);
        }
        if frame.waits && self.is_crowded() {
            // The guest tries again.
            self.say_crowded();
            self.answer_all(frame, Status::LIMIT);
            return Ok(Step::Pending);
        }
        let ticket = self.new_ticket(worker, Asked::Frame(frame), None);
        self.tell_worker(worker, Some(ForWorker::Frame { ring: header.ring_idx, ticket, bytes }));
        Ok(Step::Pending)
    }

    /// Returns the blob's serial number.
    fn check_answer_area(&self, worker: u64, frame: &Frame) -> Result<u64, super::Refusal> {
        let end = frame.offset.checked_add(frame.capacity.into());
        match self.resources.get(&frame.resource) {
            Some(blob) if blob.is_held_by(worker) && !blob.leaving => match &blob.kind {
                Kind::Guest { size, .. } if end.is_some_and(|end| end <= *size) => Ok(blob.serial),
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

    /// A worker is being ended: its frames are done now, since the guest may have stacked more behind them. What
    /// gives memory back to the guest still waits until the worker is gone.
    pub(super) fn lose_frames(&mut self, worker: u64) {
        let frames = self.tickets.iter().filter(|(_, ticket)| ticket.worker == worker);
        let frames = frames.filter(|(_, ticket)| matches!(ticket.asked, Asked::Frame(_)));
        let mut frames: Vec<u64> = frames.map(|(key, _)| *key).collect();
        // In the order of the commands.
        frames.sort_unstable();
        for ticket in frames {
            if let Some(super::Ticket { asked: Asked::Frame(frame), .. }) = self.tickets.remove(&ticket) {
                self.answer_lost(frame);
            }
        }
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
        // The guest may have given the blob up meanwhile and used its id for one of another context.
        let blob = self.resources.get(&frame.resource).filter(|blob| blob.serial == frame.serial);
        let written = match blob.map(|blob| &blob.kind) {
            Some(Kind::Guest { runs, .. }) => write_blob(&self.memory, runs, frame.offset, bytes),
            _ => false,
        };
        let response = if written { Response::Ok } else { Response::Unspecified };
        self.commands.finish(frame.token, response);
    }
}
