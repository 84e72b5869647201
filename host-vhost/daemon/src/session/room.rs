//! What frames may hold of the control queue.
//!
//! A command holds its place in the queue until it is given back, and a wait may take for as long as a guest process
//! says. Linux sleeps without end for a place, with every process of the VM that wants one, so a part of the queue
//! is kept free of waits. Beyond it, waits are answered at once and the guest library tries them again; frames
//! stacked behind a wait, which it never sends, cost their context.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use virtio_kfd_protocol::calls::{CALLS, Request, Ring};
use virtio_kfd_protocol::frame::RawRequest;

use super::{Asked, Session};
use crate::budget::{FRAME_REPLY, MAX_FRAMES_IN_FLIGHT, MIN_RESERVE};

/// Most commands in flight in a queue of this length for another wait to be passed on.
fn most_with_waits(queue_size: u16) -> usize {
    let size = usize::from(queue_size);
    // Of a queue that is very short, half.
    let reserve = (size >> 2).max(MIN_RESERVE).min(size >> 1);
    size.saturating_sub(reserve)
}

/// Whether a request may be answered as late as the guest process likes.
pub fn may_wait(raw: &RawRequest<'_>) -> bool {
    if !CALLS.iter().any(|call| call.ring == Ring::Waiting && call.opcode == raw.header.opcode) {
        return false;
    }
    // A look, or one that the worker refuses, is answered at once.
    match Request::decode(raw) {
        Ok(Request::WaitEvents { fixed, .. }) => fixed.timeout != 0,
        Ok(Request::WaitDoorbells { fixed, .. }) => fixed.timeout_ms != 0,
        Ok(Request::ReadSmi { fixed, .. }) => fixed.timeout != 0,
        Ok(_) => true,
        Err(_) => false,
    }
}

impl Session {
    /// Length of the control queue.
    pub fn set_queue_size(&mut self, queue_size: u16) {
        self.queue_size = queue_size;
    }

    /// Whether the part of the queue that is kept free of waits is in use.
    pub(super) fn is_crowded(&self) -> bool {
        self.commands.len() > most_with_waits(self.queue_size)
    }

    /// Tells the operator, once: the guest may keep it so.
    pub(super) fn say_crowded(&mut self) {
        if !std::mem::replace(&mut self.crowded_said, true) {
            tracing::warn!(
                "{} commands are in flight in a control queue of {}: more threads of the guest wait for GPUs than it \
                 has room for, and look for their events by turns; QEMU takes vq_size=1024",
                self.commands.len(),
                self.queue_size
            );
        }
    }

    /// Another frame of this context has come: ends contexts that hold what they may not.
    pub(super) fn make_room(&mut self, context: u32) {
        if self.commands.frames(context) > MAX_FRAMES_IN_FLIGHT
            && let Some(worker) = self.contexts.get(&context).map(|context| context.worker)
        {
            self.end_worker(worker, "it has too many frames in flight");
        }
        // Each round ends a context, whose frames come back at once.
        while self.is_crowded()
            && let Some(worker) = self.most_stacked()
        {
            self.end_worker(worker, "the control queue is short of room and it sends frames behind a wait");
        }
        if self.is_crowded() {
            self.set_timer();
        }
    }

    /// The context with the most frames on rings with a wait, by its worker; of several the newest.
    fn most_stacked(&self) -> Option<u64> {
        let waits = self.tickets.values().filter_map(|ticket| match &ticket.asked {
            Asked::Frame(frame) if frame.waits => Some((frame.context, frame.ring)),
            _ => None,
        });
        let waits: HashSet<(u32, u8)> = waits.collect();
        let mut on_rings: HashMap<(u32, u8), usize> = HashMap::new();
        for place in self.commands.frame_rings().filter(|place| waits.contains(place)) {
            let count = on_rings.entry(place).or_default();
            *count = count.saturating_add(1);
        }
        let mut stacked: HashMap<u32, usize> = HashMap::new();
        for ((context, _), count) in on_rings {
            let sum = stacked.entry(context).or_default();
            *sum = sum.saturating_add(count.saturating_sub(1));
        }
        let living = stacked.into_iter().filter_map(|(context, count)| {
            let context = self.contexts.get(&context).filter(|context| !context.lost)?;
            (count > 0).then_some((count, context.worker))
        });
        living.max().map(|(_, worker)| worker)
    }

    /// Workers that leave frames unanswered for longer than the guest has patience, while others need the room.
    pub(super) fn silent_workers(&self, now: Instant) -> Vec<u64> {
        if !self.is_crowded() {
            return Vec::new();
        }
        let silent = self.tickets.values().filter(|ticket| match &ticket.asked {
            Asked::Frame(frame) => !frame.waits && now.saturating_duration_since(frame.since) >= FRAME_REPLY,
            _ => false,
        });
        silent.map(|ticket| ticket.worker).collect()
    }
}

#[cfg(test)]
mod tests {
    use virtio_kfd_protocol::calls::{Nop, ReadSmi, WaitDoorbells, WaitEvents};
    use virtio_kfd_protocol::frame::{AnswerArea, RequestFrame, RequestFrameBuilder};
    use virtio_kfd_protocol::{Nothing, ReadSmiRequest, ResourceId, WaitDoorbellsRequest, WaitEventsRequest};

    use super::*;

    #[test]
    fn a_part_of_every_queue_stays_free_of_waits() {
        for (size, most) in [(1024, 768), (256, 192), (128, 96), (64, 32), (16, 8), (2, 1), (32768, 24576)] {
            assert_eq!(most_with_waits(size), most, "{size}");
        }
    }

    #[test]
    fn only_what_takes_as_long_as_the_guest_says_is_a_wait() {
        let mut builder = RequestFrameBuilder::new(
            1,
            7,
            AnswerArea { resource: ResourceId(1), offset: 0, capacity: 0x400 },
        );
        builder.push::<Nop>(&Nothing {}, &[], 0).unwrap();
        for timeout in [0, 1, u32::MAX] {
            let request = WaitEventsRequest { timeout, wait_for_all: 0 };
            builder.push::<WaitEvents>(&request, &[], 0).unwrap();
            let request = WaitDoorbellsRequest { timeout_ms: timeout, pad: 0 };
            builder.push::<WaitDoorbells>(&request, &[], 0).unwrap();
            builder.push::<ReadSmi>(&ReadSmiRequest { timeout, pad: 0 }, &[], 0).unwrap();
        }
        let bytes = builder.finish();
        let frame = RequestFrame::parse(&bytes).unwrap();
        let waits: Vec<bool> = frame.requests.iter().map(may_wait).collect();
        // Nop; looks; waits of a millisecond; longer ones.
        assert_eq!(waits.chunk_by(PartialEq::eq).map(<[bool]>::len).collect::<Vec<_>>(), [4, 6]);
        assert_eq!(waits.first(), Some(&false));
    }
}
