//! Frames: what one EXECBUFFER carries, and what the host writes back.
//!
//! A request frame holds up to [`MAX_REQUESTS_PER_FRAME`] requests. They run in order until one fails; the rest
//! get [`Status::NOT_RUN`]. The answer frame holds one record for each request and goes to the place in a GUEST
//! blob that the request frame names, before the fence of the EXECBUFFER completes.
//!
//! All numbers are little-endian. Each record is a header, a fixed part and a tail of equal elements, and its
//! length is a multiple of 8. A fixed part that is shorter than the reader knows is extended with zeros; one
//! that is longer is accepted if what is beyond is zero (a newer peer that uses nothing new).
//!
//! The whole frame was copied out of guest memory before it comes here: nothing is read twice.

use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::calls::{Call, CallType};
use crate::ids::ResourceId;
use crate::limits::{MAX_ANSWER_BYTES, MAX_FRAME_BYTES, MAX_REQUESTS_PER_FRAME};
use crate::status::Status;

/// First word of a request frame.
pub const REQUEST_MAGIC: u32 = u32::from_le_bytes(*b"VKRQ");
/// First word of an answer frame.
pub const ANSWER_MAGIC: u32 = u32::from_le_bytes(*b"VKAN");

/// Begins a request frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FrameHeader {
    /// [`REQUEST_MAGIC`]
    pub magic: u32,
    /// Wire version that the handshake agreed on; 0 in the frame that carries the handshake.
    pub version: u32,
    /// Bytes of the whole frame, this header included.
    pub total_len: u32,
    /// Requests that follow.
    pub request_count: u32,
    /// Chosen by the client, returned in the answer.
    pub sequence: u64,
    /// The GUEST blob that the answer is written to.
    pub answer_resource: ResourceId,
    /// Bytes free for the answer at `answer_offset`.
    pub answer_capacity: u32,
    /// Offset of the answer in that blob, in bytes; a multiple of 8.
    pub answer_offset: u64,
    /// Zero.
    pub flags: u64,
}

/// Begins one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RequestHeader {
    /// Number of the call.
    pub opcode: u32,
    /// Bytes of this record, header and padding included; a multiple of 8.
    pub len: u32,
    /// Bytes of the fixed part that were sent; a multiple of 8.
    pub fixed_len: u32,
    /// Bytes of the tail, padding excluded.
    pub tail_len: u32,
    /// Most bytes of answer (fixed part and tail) that the client takes; a multiple of 8.
    pub answer_len: u32,
    /// Zero.
    pub flags: u32,
}

/// Begins an answer frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AnswerFrameHeader {
    /// [`ANSWER_MAGIC`]
    pub magic: u32,
    /// Wire version.
    pub version: u32,
    /// Bytes of the whole answer, this header included.
    pub total_len: u32,
    /// Records that follow.
    pub answer_count: u32,
    /// The request frame's.
    pub sequence: u64,
    /// Zero.
    pub flags: u64,
}

/// Begins one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AnswerHeader {
    /// The request's.
    pub opcode: u32,
    /// Bytes of this record, header and padding included; a multiple of 8.
    pub len: u32,
    /// How it ended.
    pub status: Status,
    /// Linux errno where `status` is [`Status::ERRNO`], else 0.
    pub errno: u32,
    /// Bytes of the fixed part; a multiple of 8.
    pub fixed_len: u32,
    /// Bytes of the tail, padding excluded.
    pub tail_len: u32,
}

const _: () = assert!(size_of::<FrameHeader>() == 48);
const _: () = assert!(core::mem::offset_of!(FrameHeader, answer_resource) == 24);
const _: () = assert!(core::mem::offset_of!(FrameHeader, answer_offset) == 32);
const _: () = assert!(size_of::<RequestHeader>() == 24);
const _: () = assert!(size_of::<AnswerFrameHeader>() == 32);
const _: () = assert!(size_of::<AnswerHeader>() == 24);

/// Why bytes are not a frame. Any of these in a request frame ends the context that sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// Shorter than its header says, or than a header.
    #[error("frame: {what} needs {expected} bytes, found {found}")]
    Short {
        /// What was being read.
        what: &'static str,
        /// Bytes it needs.
        expected: usize,
        /// Bytes there are.
        found: usize,
    },
    /// A field has a value that no peer sends.
    #[error("frame: {field} is {found:#x}, expected {expected}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What it may be.
        expected: &'static str,
    },
    /// The answers would not fit in what the client set aside.
    #[error("frame: the answers may take {needed} bytes, answer_capacity is {capacity}")]
    AnswerSpace {
        /// Bytes that the answers may take.
        needed: usize,
        /// Bytes there are for them.
        capacity: usize,
    },
    /// The frame would be larger than the limit.
    #[error(
        "frame: {needed} bytes or {requests} requests are over the limit of {MAX_FRAME_BYTES} bytes, {MAX_REQUESTS_PER_FRAME} requests"
    )]
    TooLarge {
        /// Bytes it would have.
        needed: usize,
        /// Requests it would have.
        requests: usize,
    },
}

const fn field(field: &'static str, found: u64, expected: &'static str) -> FrameError {
    FrameError::Field { field, found, expected }
}

const fn pad8(bytes: usize) -> usize {
    bytes.next_multiple_of(8)
}

/// One request of a frame, its lengths checked, its content not yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawRequest<'a> {
    /// Its header.
    pub header: RequestHeader,
    /// The fixed part as sent.
    pub fixed: &'a [u8],
    /// The tail.
    pub tail: &'a [u8],
}

/// A request frame whose structure has been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFrame<'a> {
    /// Its header.
    pub header: FrameHeader,
    /// Its requests, at least one.
    pub requests: Vec<RawRequest<'a>>,
}

impl<'a> RequestFrame<'a> {
    /// Checks the structure of a frame: lengths, counts, reserved fields, and that the answers fit.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let short = |what, expected| FrameError::Short { what, expected, found: bytes.len() };
        let (header, rest) = FrameHeader::read_from_prefix(bytes)
            .map_err(|_| short("the frame header", size_of::<FrameHeader>()))?;
        if header.magic != REQUEST_MAGIC {
            return Err(field("magic", header.magic.into(), "\"VKRQ\""));
        }
        if bytes.len() > MAX_FRAME_BYTES || header.total_len as usize != bytes.len() {
            return Err(field(
                "total_len",
                header.total_len.into(),
                "the length of the command, at most 128 KiB",
            ));
        }
        let count = header.request_count as usize;
        if count == 0 || count > MAX_REQUESTS_PER_FRAME {
            return Err(field("request_count", header.request_count.into(), "1 to 64"));
        }
        if header.flags != 0 {
            return Err(field("flags", header.flags, "0"));
        }
        if !header.answer_offset.is_multiple_of(8) {
            return Err(field("answer_offset", header.answer_offset, "a multiple of 8"));
        }
        let mut requests = Vec::with_capacity(count);
        let mut rest = rest;
        let mut needed = size_of::<AnswerFrameHeader>();
        for _ in 0..count {
            let found = rest.len();
            let (head, body) = RequestHeader::read_from_prefix(rest).map_err(|_| FrameError::Short {
                what: "a request header",
                expected: size_of::<RequestHeader>(),
                found,
            })?;
            let Record { fixed, tail, next } =
                split_record(body, head.len, size_of::<RequestHeader>(), head.fixed_len, head.tail_len)?;
            if head.flags != 0 {
                return Err(field("request flags", head.flags.into(), "0"));
            }
            if !head.answer_len.is_multiple_of(8) || head.answer_len as usize > MAX_ANSWER_BYTES {
                return Err(field("answer_len", head.answer_len.into(), "a multiple of 8, at most 128 KiB"));
            }
            // Both terms are at most 128 KiB and there are at most 64 of them.
            needed =
                needed.saturating_add(size_of::<AnswerHeader>()).saturating_add(head.answer_len as usize);
            requests.push(RawRequest { header: head, fixed, tail });
            rest = next;
        }
        if !rest.is_empty() {
            return Err(field("bytes behind the last request", rest.len() as u64, "0"));
        }
        let capacity = header.answer_capacity as usize;
        if needed > capacity.min(MAX_ANSWER_BYTES) {
            return Err(FrameError::AnswerSpace { needed, capacity: capacity.min(MAX_ANSWER_BYTES) });
        }
        Ok(RequestFrame { header, requests })
    }
}

/// A record taken apart.
struct Record<'a> {
    fixed: &'a [u8],
    tail: &'a [u8],
    next: &'a [u8],
}

/// Splits the body of a record into fixed part, tail and what follows the record.
fn split_record(
    body: &[u8],
    len: u32,
    header: usize,
    fixed_len: u32,
    tail_len: u32,
) -> Result<Record<'_>, FrameError> {
    let (fixed_bytes, tail_bytes) = (fixed_len as usize, tail_len as usize);
    if !fixed_bytes.is_multiple_of(8) {
        return Err(field("fixed_len", fixed_len.into(), "a multiple of 8"));
    }
    let whole = fixed_bytes
        .checked_add(tail_bytes)
        .and_then(|sum| sum.checked_next_multiple_of(8))
        .and_then(|sum| sum.checked_add(header));
    if whole != Some(len as usize) {
        return Err(field("len", len.into(), "header, fixed part and tail, rounded up to 8"));
    }
    let short = || FrameError::Short {
        what: "a record",
        expected: len as usize,
        found: body.len().saturating_add(header),
    };
    let payload = (len as usize).checked_sub(header).ok_or_else(short)?;
    let (payload, next) = body.split_at_checked(payload).ok_or_else(short)?;
    let (fixed, tail) = payload.split_at_checked(fixed_bytes).ok_or_else(short)?;
    let tail = tail.get(..tail_bytes).ok_or_else(short)?;
    Ok(Record { fixed, tail, next })
}

/// Where an answer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerArea {
    /// The GUEST blob.
    pub resource: ResourceId,
    /// Offset in it, in bytes; a multiple of 8.
    pub offset: u64,
    /// Bytes there.
    pub capacity: u32,
}

/// Builds a request frame (the client's side).
#[derive(Clone, Debug)]
pub struct RequestFrameBuilder {
    header: FrameHeader,
    bytes: Vec<u8>,
    answers: usize,
}

impl RequestFrameBuilder {
    /// Begins a frame.
    pub fn new(version: u32, sequence: u64, area: AnswerArea) -> Self {
        let header = FrameHeader {
            magic: REQUEST_MAGIC,
            version,
            sequence,
            answer_resource: area.resource,
            answer_capacity: area.capacity,
            answer_offset: area.offset,
            ..Default::default()
        };
        RequestFrameBuilder {
            header,
            bytes: vec![0; size_of::<FrameHeader>()],
            answers: size_of::<AnswerFrameHeader>(),
        }
    }

    /// Adds a request that takes up to `answer_elements` elements of answer tail. Returns its number in the
    /// frame, for [`crate::Handle::in_frame`].
    pub fn push<C: CallType>(
        &mut self,
        fixed: &C::Request,
        tail: &[C::RequestTail],
        answer_elements: usize,
    ) -> Result<u32, FrameError> {
        let answer = answer_bytes::<C>(answer_elements);
        let tail = tail.as_bytes();
        let fixed = fixed.as_bytes();
        let whole = size_of::<RequestHeader>()
            .saturating_add(fixed.len())
            .saturating_add(tail.len())
            .checked_next_multiple_of(8)
            .unwrap_or(usize::MAX);
        let needed = self.bytes.len().saturating_add(whole);
        let index = self.header.request_count;
        if needed > MAX_FRAME_BYTES || index as usize >= MAX_REQUESTS_PER_FRAME {
            return Err(FrameError::TooLarge { needed, requests: (index as usize).saturating_add(1) });
        }
        let answers = self.answers.saturating_add(size_of::<AnswerHeader>()).saturating_add(answer);
        let capacity = (self.header.answer_capacity as usize).min(MAX_ANSWER_BYTES);
        if answers > capacity {
            return Err(FrameError::AnswerSpace { needed: answers, capacity });
        }
        let head = RequestHeader {
            opcode: C::CALL.opcode(),
            len: whole as u32,
            fixed_len: fixed.len() as u32,
            tail_len: tail.len() as u32,
            answer_len: answer as u32,
            flags: 0,
        };
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(fixed);
        self.bytes.extend_from_slice(tail);
        self.bytes.resize(needed, 0);
        self.answers = answers;
        self.header.request_count = index.saturating_add(1);
        Ok(index)
    }

    /// Ends the frame.
    pub fn finish(mut self) -> Vec<u8> {
        self.header.total_len = self.bytes.len() as u32;
        if let Some(place) = self.bytes.get_mut(..size_of::<FrameHeader>()) {
            place.copy_from_slice(self.header.as_bytes());
        }
        self.bytes
    }
}

/// Bytes of answer (fixed part and tail, rounded) of a call with that many tail elements.
pub fn answer_bytes<C: CallType>(elements: usize) -> usize {
    pad8(size_of::<C::Answer>().saturating_add(elements.saturating_mul(size_of::<C::AnswerTail>())))
}

/// One answer of a frame, its lengths checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawAnswer<'a> {
    /// Its header.
    pub header: AnswerHeader,
    /// The fixed part.
    pub fixed: &'a [u8],
    /// The tail.
    pub tail: &'a [u8],
}

/// An answer frame whose structure has been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerFrame<'a> {
    /// Its header.
    pub header: AnswerFrameHeader,
    /// Its answers.
    pub answers: Vec<RawAnswer<'a>>,
}

impl<'a> AnswerFrame<'a> {
    /// Checks the structure of an answer frame. `bytes` may be longer than the frame.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let short = |what, expected| FrameError::Short { what, expected, found: bytes.len() };
        let (header, _) = AnswerFrameHeader::read_from_prefix(bytes)
            .map_err(|_| short("the answer frame header", size_of::<AnswerFrameHeader>()))?;
        if header.magic != ANSWER_MAGIC {
            return Err(field("magic", header.magic.into(), "\"VKAN\""));
        }
        let total = header.total_len as usize;
        let mut rest = bytes
            .get(size_of::<AnswerFrameHeader>()..total)
            .ok_or_else(|| short("the answer frame", total))?;
        let count = header.answer_count as usize;
        if count > MAX_REQUESTS_PER_FRAME {
            return Err(field("answer_count", header.answer_count.into(), "at most 64"));
        }
        let mut answers = Vec::with_capacity(count);
        for _ in 0..count {
            let found = rest.len();
            let (head, body) = AnswerHeader::read_from_prefix(rest).map_err(|_| FrameError::Short {
                what: "an answer header",
                expected: size_of::<AnswerHeader>(),
                found,
            })?;
            let Record { fixed, tail, next } =
                split_record(body, head.len, size_of::<AnswerHeader>(), head.fixed_len, head.tail_len)?;
            answers.push(RawAnswer { header: head, fixed, tail });
            rest = next;
        }
        Ok(AnswerFrame { header, answers })
    }
}

/// Builds an answer frame (the host's side). It never grows past what the request frame promised.
#[derive(Clone, Debug)]
pub struct AnswerFrameBuilder {
    header: AnswerFrameHeader,
    bytes: Vec<u8>,
}

impl AnswerFrameBuilder {
    /// Begins the answer to the frame with this sequence number.
    pub fn new(version: u32, sequence: u64) -> Self {
        let header = AnswerFrameHeader { magic: ANSWER_MAGIC, version, sequence, ..Default::default() };
        AnswerFrameBuilder { header, bytes: vec![0; size_of::<AnswerFrameHeader>()] }
    }

    /// Adds an answer without content: a failure, or a call that answers nothing.
    pub fn push_status(&mut self, opcode: u32, status: Status, errno: u32) {
        self.push_record(opcode, status, errno, &[], &[]);
    }

    /// Adds an answer. What the asker has no room for is cut: the fixed part at its end, the tail at whole elements.
    pub fn push<C: CallType>(&mut self, asked: &RequestHeader, fixed: &C::Answer, tail: &[C::AnswerTail]) {
        let room = asked.answer_len as usize;
        let fixed = fixed.as_bytes();
        let fixed = fixed.get(..room).unwrap_or(fixed);
        let left = room.saturating_sub(fixed.len());
        let elements = left.checked_div(size_of::<C::AnswerTail>()).unwrap_or(0);
        let tail = tail.get(..elements).unwrap_or(tail).as_bytes();
        self.push_record(asked.opcode, Status::OK, 0, fixed, tail);
    }

    fn push_record(&mut self, opcode: u32, status: Status, errno: u32, fixed: &[u8], tail: &[u8]) {
        let payload = pad8(fixed.len().saturating_add(tail.len()));
        let len = payload.saturating_add(size_of::<AnswerHeader>());
        let head = AnswerHeader {
            opcode,
            len: len as u32,
            status,
            errno,
            fixed_len: fixed.len() as u32,
            tail_len: tail.len() as u32,
        };
        let end = self.bytes.len().saturating_add(len);
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(fixed);
        self.bytes.extend_from_slice(tail);
        self.bytes.resize(end, 0);
        self.header.answer_count = self.header.answer_count.saturating_add(1);
    }

    /// Answers so far.
    pub fn count(&self) -> usize {
        self.header.answer_count as usize
    }

    /// Ends the frame.
    pub fn finish(mut self) -> Vec<u8> {
        self.header.total_len = self.bytes.len() as u32;
        if let Some(place) = self.bytes.get_mut(..size_of::<AnswerFrameHeader>()) {
            place.copy_from_slice(self.header.as_bytes());
        }
        self.bytes
    }
}

/// Why a request (or an answer) of a well-formed frame cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The call number is not in the table.
    #[error("call {0:#x} is not known")]
    UnknownCall(u32),
    /// The fixed part is longer than known here and its unknown end is not zero.
    #[error("{call}: the fixed part has {found} bytes with content beyond the {expected} known here")]
    Newer {
        /// The call.
        call: &'static str,
        /// Bytes that came.
        found: usize,
        /// Bytes known.
        expected: usize,
    },
    /// The tail is not a whole number of elements, or has too many.
    #[error("{call}: the tail has {found} bytes, expected at most {max} elements of {element}")]
    Tail {
        /// The call.
        call: &'static str,
        /// Bytes that came.
        found: usize,
        /// Size of an element in bytes.
        element: usize,
        /// Most elements.
        max: usize,
    },
}

impl DecodeError {
    /// The status that the request gets.
    pub const fn status(&self) -> Status {
        match self {
            DecodeError::UnknownCall(_) => Status::UNKNOWN_CALL,
            DecodeError::Newer { .. } | DecodeError::Tail { .. } => Status::INVALID,
        }
    }
}

/// Reads a fixed part: short ones are extended with zeros, long ones must be zero beyond what is known.
pub fn read_fixed<T: FromBytes + IntoBytes>(call: Call, bytes: &[u8]) -> Result<T, DecodeError> {
    let mut value = T::new_zeroed();
    let place = value.as_mut_bytes();
    let known = place.len().min(bytes.len());
    let (head, beyond) = bytes.split_at_checked(known).unwrap_or((bytes, &[]));
    if beyond.iter().any(|&byte| byte != 0) {
        return Err(DecodeError::Newer { call: call.name(), found: bytes.len(), expected: place.len() });
    }
    if let Some(place) = place.get_mut(..known) {
        place.copy_from_slice(head);
    }
    Ok(value)
}

/// Reads a tail: whole elements, at most `max`.
pub fn read_tail<T: FromBytes>(call: Call, bytes: &[u8], max: usize) -> Result<Vec<T>, DecodeError> {
    let element = size_of::<T>();
    let wrong = DecodeError::Tail { call: call.name(), found: bytes.len(), element, max };
    let count = bytes.len().checked_div(element).ok_or(wrong)?;
    if count > max || !bytes.len().is_multiple_of(element) {
        return Err(wrong);
    }
    bytes.chunks_exact(element).map(|chunk| T::read_from_bytes(chunk).map_err(|_| wrong)).collect()
}

/// What came of a request, as the client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError {
    /// The host answered with a failure.
    #[error("{call}: {status}, errno {errno}")]
    Failed {
        /// The call.
        call: &'static str,
        /// How it failed.
        status: Status,
        /// Linux errno where `status` is [`Status::ERRNO`].
        errno: u32,
    },
    /// The answer cannot be read.
    #[error("{call}: {error}")]
    Answer {
        /// The call.
        call: &'static str,
        /// What is wrong with it.
        error: DecodeError,
    },
    /// The answer is to another call.
    #[error("{call}: the answer is to call {found:#x}")]
    Mismatch {
        /// The call.
        call: &'static str,
        /// What came.
        found: u32,
    },
}

impl RawAnswer<'_> {
    /// Reads the answer to call `C`.
    pub fn decode<C: CallType>(&self) -> Result<(C::Answer, Vec<C::AnswerTail>), CallError> {
        let call = C::CALL.name();
        if self.header.opcode != C::CALL.opcode() {
            return Err(CallError::Mismatch { call, found: self.header.opcode });
        }
        if !self.header.status.is_ok() {
            return Err(CallError::Failed { call, status: self.header.status, errno: self.header.errno });
        }
        let wrong = |error| CallError::Answer { call, error };
        let fixed = read_fixed(C::CALL, self.fixed).map_err(wrong)?;
        let tail = read_tail(C::CALL, self.tail, C::ANSWER_TAIL_MAX).map_err(wrong)?;
        Ok((fixed, tail))
    }
}
