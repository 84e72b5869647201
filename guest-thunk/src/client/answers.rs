//! Answer memory: blobs divided into slots, one slot for each frame in flight.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use virtio_kfd_protocol::frame::AnswerArea;
use virtio_kfd_protocol::limits::{MAX_ANSWER_BYTES, MAX_RINGS};

use super::mapping::Mapping;
use crate::transport::{Blob, Result, Transport, TransportError};

/// Slots of one size.
struct SizeClass {
    /// Bytes of a slot.
    bytes: usize,
    /// Slots in one blob.
    per_blob: usize,
    /// Most slots. Waits hold at most a slot for each ring for as long as they like; what is beyond that
    /// serves control calls, whose slots come back soon.
    most: usize,
}

/// Most calls need some hundred bytes; topology chunks, waits for many events and large batches need more.
const CLASSES: [SizeClass; 2] = [
    SizeClass { bytes: 4096, per_blob: 64, most: 1024 },
    SizeClass { bytes: MAX_ANSWER_BYTES, per_blob: 4, most: MAX_RINGS as usize + 32 },
];

struct AnswerBlob {
    // Unmapped before the memory goes back.
    mapping: Mapping,
    blob: Box<dyn Blob>,
}

struct Place {
    blob: Arc<AnswerBlob>,
    offset: usize,
}

#[derive(Default)]
struct Slots {
    free: Vec<Place>,
    made: usize,
    /// The connection is lost: slots do not come back.
    closed: bool,
}

/// The slots of a client.
pub(super) struct AnswerArena {
    slots: [(Mutex<Slots>, Condvar); CLASSES.len()],
}

/// A slot for one frame in flight. Goes back when dropped.
pub(super) struct Slot<'a> {
    arena: &'a AnswerArena,
    class: usize,
    place: Option<Place>,
}

fn lock(slots: &Mutex<Slots>) -> MutexGuard<'_, Slots> {
    // A list of places has no state in between that a panic could leave behind.
    slots.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AnswerArena {
    pub(super) fn new() -> Self {
        AnswerArena { slots: Default::default() }
    }

    /// A slot for an answer of up to `bytes` (at most [`MAX_ANSWER_BYTES`]). Makes another blob if all slots are in
    /// use, and waits for one to come back if there are as many as there may be.
    pub(super) fn slot(&self, transport: &dyn Transport, bytes: usize) -> Result<Slot<'_>> {
        let last = CLASSES.len().saturating_sub(1);
        let index = CLASSES.iter().position(|class| bytes <= class.bytes).unwrap_or(last);
        let (Some(class), Some((mutex, freed))) = (CLASSES.get(index), self.slots.get(index)) else {
            return Err(TransportError::NotSupported("an answer of this size"));
        };
        let mut slots = lock(mutex);
        loop {
            if slots.closed {
                return Err(TransportError::Lost("an earlier call was not answered".into()));
            }
            if let Some(place) = slots.free.pop() {
                return Ok(Slot { arena: self, class: index, place: Some(place) });
            }
            if slots.made < class.most {
                match AnswerBlob::new(transport, class) {
                    Ok(blob) => {
                        let places = blob.places(class);
                        slots.made = slots.made.saturating_add(places.len());
                        slots.free.extend(places);
                        continue;
                    }
                    // Short of memory: slots that are in use will come back.
                    Err(error) if slots.made == 0 => return Err(error),
                    Err(_) => {}
                }
            }
            slots = freed.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl AnswerBlob {
    fn new(transport: &dyn Transport, class: &SizeClass) -> Result<Arc<AnswerBlob>> {
        let size = class.bytes.saturating_mul(class.per_blob) as u64;
        let blob = transport.guest_blob(size)?;
        let mapping = Mapping::new(&*blob)?;
        Ok(Arc::new(AnswerBlob { mapping, blob }))
    }

    fn places(self: &Arc<AnswerBlob>, class: &SizeClass) -> Vec<Place> {
        (0..class.per_blob)
            .map(|slot| Place { blob: Arc::clone(self), offset: slot.saturating_mul(class.bytes) })
            .collect()
    }
}

impl Slot<'_> {
    /// Where the host is to write the answer.
    pub(super) fn area(&self) -> AnswerArea {
        match &self.place {
            Some(place) => AnswerArea {
                resource: place.blob.blob.resource(),
                offset: place.offset as u64,
                capacity: self.bytes() as u32,
            },
            None => AnswerArea { resource: Default::default(), offset: 0, capacity: 0 },
        }
    }

    /// Copies the first `length` bytes of the slot, a multiple of 8.
    pub(super) fn copy_out(&self, length: usize) -> Vec<u8> {
        match &self.place {
            Some(place) => place.blob.mapping.copy_out(place.offset, length.min(self.bytes())),
            None => Vec::new(),
        }
    }

    /// Gives the slot up for good, for the host may still write to it: the connection is lost. Whoever waits for a
    /// slot is told so.
    pub(super) fn forfeit(mut self) {
        // Some frame is still out there with this address: neither the slot nor its blob may be used again.
        std::mem::forget(self.place.take());
        for (mutex, freed) in &self.arena.slots {
            lock(mutex).closed = true;
            freed.notify_all();
        }
    }

    fn bytes(&self) -> usize {
        CLASSES.get(self.class).map_or(0, |class| class.bytes)
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if let (Some(place), Some((mutex, freed))) = (self.place.take(), self.arena.slots.get(self.class)) {
            lock(mutex).free.push(place);
            freed.notify_one();
        }
    }
}
