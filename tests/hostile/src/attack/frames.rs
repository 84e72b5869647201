//! Frames that are none, requests with nonsense in them.

use std::mem::offset_of;

use anyhow::Result;
use virtio_kfd_protocol::calls::{GetClockCounters, Hello, Nop};
use virtio_kfd_protocol::frame::{
    AnswerArea, FrameHeader, REQUEST_MAGIC, RequestFrameBuilder, RequestHeader,
};
use virtio_kfd_protocol::version::VERSION_MAX;
use virtio_kfd_protocol::{CALLS, Call, GpuRequest, HelloRequest, Nothing, Ring, Status};
use zerocopy::IntoBytes;

use super::{Connection, Report};
use crate::random::Random;
use crate::raw::{Outcome, Raw};

/// Frames after which the context may have ended: what it does with a few more is looked at before a new one is made.
const AFTER: u64 = 3;

/// A frame of one request with any content; lengths are consistent.
pub fn request(
    area: AnswerArea,
    sequence: u64,
    opcode: u32,
    fixed: &[u8],
    tail: &[u8],
    answer: u32,
) -> Vec<u8> {
    let mut body = fixed.to_vec();
    body.extend_from_slice(tail);
    body.resize(body.len().next_multiple_of(8), 0);
    let header = RequestHeader {
        opcode,
        len: (size_of::<RequestHeader>() + body.len()) as u32,
        fixed_len: fixed.len() as u32,
        tail_len: tail.len() as u32,
        answer_len: answer,
        flags: 0,
    };
    frame(area, sequence, &[(header, body)])
}

fn frame(area: AnswerArea, sequence: u64, requests: &[(RequestHeader, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = vec![0; size_of::<FrameHeader>()];
    for (header, body) in requests {
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(body);
    }
    let header = FrameHeader {
        magic: REQUEST_MAGIC,
        version: VERSION_MAX,
        total_len: bytes.len() as u32,
        request_count: requests.len() as u32,
        sequence,
        answer_resource: area.resource,
        answer_capacity: area.capacity,
        answer_offset: area.offset,
        flags: 0,
    };
    if let Some(place) = bytes.get_mut(..size_of::<FrameHeader>()) {
        place.copy_from_slice(header.as_bytes());
    }
    bytes
}

/// Sends a frame. If no answer comes, looks whether the context has ended, which it must have if `is_none`: if the bytes
/// were no frame. One that has ended stays so, and one that has not goes on.
fn send_on(
    connection: &mut Connection,
    ring: u8,
    bytes: &[u8],
    is_none: bool,
    report: &mut Report,
) -> Result<Outcome> {
    let raw = connection.get()?;
    let outcome = raw.send(ring, bytes)?;
    if !matches!(outcome, Outcome::Answered(_)) {
        let goes_on = raw.alive()?;
        for _ in 0..AFTER {
            if raw.alive()? != goes_on {
                report.accepted.push(format!("a context that is half gone after {bytes:02x?}"));
            }
        }
        if goes_on && is_none {
            report.accepted.push(format!("bytes that are no frame: {bytes:02x?}"));
        }
        connection.forget();
    }
    Ok(outcome)
}

/// Bytes without any structure, bytes after a right first word, and right frames with bits flipped or cut.
pub fn random_bytes(random: &mut Random, frames: u64, report: &mut Report) -> Result<()> {
    let mut connection = Connection::new();
    for round in 0..frames {
        let raw = connection.get()?;
        let (area, sequence) = (raw.area(), raw.next());
        let bytes = match round % 4 {
            0 => {
                let length = 1 + random.below(4096) as usize;
                random.bytes(length)
            }
            1 => {
                let length = random.below(512) as usize;
                let mut bytes = REQUEST_MAGIC.to_le_bytes().to_vec();
                bytes.extend(random.bytes(length));
                bytes
            }
            kind => {
                let mut bytes = request(area, sequence, Call::GetClockCounters.opcode(), &[0; 8], &[], 64);
                if kind == 2 {
                    let at = random.below(bytes.len() as u64) as usize;
                    // A changed offset of the answer may be as good as the right one; the answer then stands elsewhere.
                    let offset = offset_of!(FrameHeader, answer_offset);
                    if !(offset..offset + 8).contains(&at)
                        && let Some(byte) = bytes.get_mut(at)
                    {
                        *byte ^= 1 << random.below(8);
                    }
                } else {
                    bytes.truncate(1 + random.below(bytes.len() as u64 - 1) as usize);
                }
                bytes
            }
        };
        let ring = (random.below(64)) as u8;
        let outcome = send_on(&mut connection, ring, &bytes, round % 4 != 2, report)?;
        // A flipped bit may leave a right request; bytes without structure and cut frames may not.
        if round % 4 == 2 {
            report.any(&outcome);
        } else {
            report.must_fail(|| format!("frame {bytes:02x?}"), &outcome);
        }
    }
    Ok(())
}

/// Well-formed frames with known calls and any content.
pub fn random_requests(random: &mut Random, frames: u64, report: &mut Report) -> Result<()> {
    let mut connection = Connection::new();
    for _ in 0..frames {
        let raw = connection.get()?;
        let (area, sequence) = (raw.area(), raw.next());
        let Some(info) = CALLS.get(random.below(CALLS.len() as u64) as usize) else { continue };
        // A wait that may last for ever would be a hang that was asked for.
        let waits = info.ring == Ring::Waiting;
        let mut fixed: Vec<u8> = Vec::new();
        while fixed.len() < info.request_size {
            fixed.extend(random.nasty().to_le_bytes());
        }
        if waits && let Some(timeout) = fixed.get_mut(..4) {
            timeout.copy_from_slice(&(random.below(3) as u32).to_le_bytes());
        }
        let elements = random.below(4).min(info.request_max as u64) as usize;
        let tail = random.bytes(elements * info.request_element);
        let answer = (info.answer_size + 64 * info.answer_element.min(64)).next_multiple_of(8) as u32;
        let bytes = request(area, sequence, info.opcode, &fixed, &tail, answer);
        let ring = if waits { 1 + random.below(63) as u8 } else { 0 };
        let outcome = send_on(&mut connection, ring, &bytes, false, report)?;
        report.any(&outcome);
    }
    Ok(())
}

/// Each call with a fixed part, tail and answer of a wrong length, and headers whose lengths do not add up.
pub fn wrong_lengths(_: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut connection = Connection::new();
    for info in CALLS {
        let waits = info.ring == Ring::Waiting;
        let ring = u8::from(waits);
        let answer =
            (info.answer_size + info.answer_element.min(8) * info.answer_max.min(8)).next_multiple_of(8);
        // Longer than known, and not zero there: something of a newer version that this host cannot do.
        let mut longer = vec![0; info.request_size];
        longer.extend([0xff; 8]);
        // More tail than the call takes, and a tail that ends within an element.
        let over = vec![0; (info.request_max + 1) * info.request_element.max(1)];
        let torn = vec![0; info.request_element / 2 + 1];
        let mut cases: Vec<(&str, Vec<u8>, Vec<u8>)> = vec![("too long", longer, Vec::new())];
        if over.len() < 64 * 1024 {
            cases.push(("too many elements", vec![0; info.request_size], over));
        }
        if info.request_element != 1 {
            cases.push(("half an element", vec![0; info.request_size], torn));
        }
        for (what, fixed, tail) in cases {
            let raw = connection.get()?;
            let (area, sequence) = (raw.area(), raw.next());
            let bytes = request(area, sequence, info.opcode, &fixed, &tail, answer as u32);
            let outcome = send_on(&mut connection, ring, &bytes, false, report)?;
            report.must_fail(|| format!("{} with a request {what}", info.name), &outcome);
        }
    }
    for field in 0..7usize {
        for value in [1u32, 7, 23, 25, 0x7fff_ffff, 0xffff_fff8, u32::MAX] {
            let raw = connection.get()?;
            let (area, sequence) = (raw.area(), raw.next());
            let mut bytes = request(area, sequence, Call::Nop.opcode(), &[0; 8], &[0; 8], 0);
            // total_len, request_count; then the request's len, fixed_len, tail_len, answer_len, flags.
            let at = [8, 12, 48 + 4, 48 + 8, 48 + 12, 48 + 16, 48 + 20].get(field).copied().unwrap_or(8);
            let place = bytes.get_mut(at..at + 4);
            let (Some(place), true) = (place, !(field == 1 && value == 1)) else { continue };
            place.copy_from_slice(&value.to_le_bytes());
            let outcome = send_on(&mut connection, 0, &bytes, false, report)?;
            report.must_fail(|| format!("a frame with {value:#x} at byte {at}"), &outcome);
        }
    }
    Ok(())
}

/// Every number on the control ring and on another one.
pub fn call_numbers(_: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut connection = Connection::new();
    for opcode in (0..0x400u32).chain([0x4b7f, 0x8000_0000, u32::MAX]) {
        let known = Call::from_opcode(opcode);
        for ring in [0u8, 9] {
            // A greeting is welcome once; a wait on nothing is complete at once.
            let raw = connection.get()?;
            let (area, sequence) = (raw.area(), raw.next());
            let bytes = request(area, sequence, opcode, &[0; 64], &[], 1024);
            let outcome = send_on(&mut connection, ring, &bytes, false, report)?;
            report.any(&outcome);
            let status = outcome.status();
            if known.is_none() && status != Some(Status::UNKNOWN_CALL) {
                report.accepted.push(format!("number {opcode:#x} on ring {ring}: {outcome:?}"));
            }
            let wrong = known.is_some_and(|call| call.ring() == Ring::Waiting) && ring == 0;
            if wrong && outcome.anything_done() {
                report.accepted.push(format!("number {opcode:#x} on ring 0: {outcome:?}"));
            }
        }
    }
    Ok(())
}

/// Calls without a greeting, with a version that was not agreed on, greetings that cannot be agreed on.
pub fn before_the_greeting(_: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut raw = Raw::silent()?;
    let outcome = raw.call::<GetClockCounters>(0, &GpuRequest::default(), &[], 0)?;
    report.must_fail(|| "a call before the greeting".to_owned(), &outcome);
    for (version_min, version_max) in [(0, 0), (2, 9), (9, 2), (u32::MAX, u32::MAX)] {
        let mut raw = Raw::silent()?;
        let hello = HelloRequest { version_min, version_max, ..Default::default() };
        let area = raw.area();
        let mut builder = RequestFrameBuilder::new(0, raw.next(), area);
        builder.push::<Hello>(&hello, &[], 0)?;
        let outcome = raw.send(0, &builder.finish())?;
        report.must_fail(|| format!("versions {version_min} to {version_max}"), &outcome);
    }
    for version in [0, VERSION_MAX + 1, u32::MAX] {
        let mut raw = Raw::connect()?;
        let area = raw.area();
        let mut builder = RequestFrameBuilder::new(version, raw.next(), area);
        builder.push::<Nop>(&Nothing {}, &[], 0)?;
        let outcome = raw.send(0, &builder.finish())?;
        report.must_fail(|| format!("a frame of version {version}"), &outcome);
    }
    Ok(())
}

/// Connects until the host has had enough. Those that are there go on, and when they have gone there is room again.
pub fn many_contexts(_: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    const MORE_THAN_ALLOWED: usize = 80;
    let mut open = Vec::new();
    for number in 0..MORE_THAN_ALLOWED {
        report.sent += 1;
        match Raw::connect() {
            Ok(raw) => {
                report.done += 1;
                open.push(raw);
            }
            Err(_) => {
                report.refused += 1;
                if number + 4 < MORE_THAN_ALLOWED && report.refused > 4 {
                    break;
                }
            }
        }
    }
    if report.refused == 0 {
        report.accepted.push(format!("{MORE_THAN_ALLOWED} contexts at once"));
    }
    for raw in &mut open {
        if !raw.alive()? {
            report.accepted.push("that a new context ends an old one".to_owned());
        }
    }
    Ok(())
}
