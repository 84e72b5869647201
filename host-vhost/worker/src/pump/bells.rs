//! The doorbells of a context: what the guest stores, and where it goes.

use std::collections::{BTreeMap, BTreeSet};

use kfd_host::SharedWords;

use super::handover::Bells;

/// What a doorbell reads before anybody has rung it. Pointers into rings begin at 0 and count up, so that no ring of a
/// program has this value.
pub const IDLE: u64 = u64::MAX;

/// Guest memory that this process reads and writes itself.
#[derive(Debug)]
pub struct GuestWords {
    /// The words.
    pub words: SharedWords,
    /// The first one that is meant.
    pub first: u64,
    /// The blob that they are in.
    pub resource: u32,
    /// The regions under it.
    pub regions: BTreeSet<u32>,
}

/// A GPU's doorbells.
#[derive(Debug, Default)]
struct Gpu {
    shadow: Option<GuestWords>,
    real: Option<SharedWords>,
    live: Vec<Live>,
}

/// The doorbell of a queue.
#[derive(Debug)]
struct Live {
    index: u64,
    /// What it read last.
    last: u64,
    /// Where an AQL queue's program counts the packets that it has begun, and the packets in its ring.
    write_index: Option<(GuestWords, u64)>,
}

impl Live {
    /// What the doorbell gets. Threads that share an AQL queue ring in any order, the last one perhaps with an earlier packet than
    /// the one before it, and a look sees the last ring alone. A packet processor that hears of each ring takes the latest
    /// packet of all; so does this, by the write index: a packet that is begun and not finished it waits for anyway.
    fn value(&self, rung: u64) -> u64 {
        let Some((guest, slots)) = &self.write_index else { return rung };
        match guest.words.load(guest.first) {
            None | Some(0) => rung,
            Some(next) => {
                let latest = next.wrapping_sub(1);
                // A ring has no more packets than slots; what is further off is no index.
                if latest.wrapping_sub(rung) < *slots { latest } else { rung }
            }
        }
    }
}

/// All doorbells of a context.
#[derive(Debug, Default)]
pub struct Doorbells {
    /// By id.
    gpus: BTreeMap<u32, Gpu>,
}

impl Doorbells {
    fn gpu(&mut self, id: u32) -> &mut Gpu {
        self.gpus.entry(id).or_default()
    }

    /// Whether the guest's memory for the doorbells of a GPU is known.
    pub fn has_shadow(&self, gpu: u32) -> bool {
        self.gpus.get(&gpu).is_some_and(|gpu| gpu.shadow.is_some())
    }

    /// Whether the doorbells of a GPU are mapped.
    pub fn has_real(&self, gpu: u32) -> bool {
        self.gpus.get(&gpu).is_some_and(|gpu| gpu.real.is_some())
    }

    /// The doorbells of a GPU.
    pub fn set_real(&mut self, gpu: u32, words: SharedWords) {
        self.gpu(gpu).real = Some(words);
    }

    /// The guest's memory for the doorbells of a GPU; what it reads there so far is no ring.
    pub fn set_shadow(&mut self, gpu: u32, shadow: GuestWords) {
        let gpu = self.gpu(gpu);
        for live in &mut gpu.live {
            shadow.words.store(live.index, IDLE);
            live.last = IDLE;
        }
        gpu.shadow = Some(shadow);
    }

    /// A new queue has this doorbell. What an earlier one has left there is no ring.
    pub fn add(&mut self, gpu: u32, index: u64, write_index: Option<(GuestWords, u64)>) {
        let gpu = self.gpu(gpu);
        if let Some(shadow) = &gpu.shadow {
            shadow.words.store(index, IDLE);
        }
        gpu.live.retain(|live| live.index != index);
        gpu.live.push(Live { index, last: IDLE, write_index });
    }

    /// An AQL queue has a ring of so many packets from now on; other queues have nothing that depends on it.
    pub fn resize(&mut self, gpu: u32, index: u64, packets: u64) {
        let live = self.gpu(gpu).live.iter_mut().find(|live| live.index == index);
        if let Some((_, slots)) = live.and_then(|live| live.write_index.as_mut()) {
            *slots = packets;
        }
    }

    /// The queue is gone.
    pub fn remove(&mut self, gpu: u32, index: u64) {
        self.gpu(gpu).live.retain(|live| live.index != index);
    }

    /// The guest's memory for which `gone` holds is not looked at any more, and unmapped.
    pub fn fence(&mut self, gone: impl Fn(&GuestWords) -> bool) {
        for gpu in self.gpus.values_mut() {
            if gpu.shadow.as_ref().is_some_and(&gone) {
                gpu.shadow = None;
            }
            for live in &mut gpu.live {
                live.write_index = live.write_index.take().filter(|(words, _)| !gone(words));
            }
        }
    }
}

impl Bells for Doorbells {
    fn look(&mut self) -> bool {
        let mut rang = false;
        for Gpu { shadow, real, live } in self.gpus.values_mut() {
            let (Some(shadow), Some(real)) = (shadow.as_ref(), real.as_ref()) else { continue };
            for live in live {
                let Some(value) = shadow.words.load(live.index) else { continue };
                if value != live.last {
                    live.last = value;
                    real.store(live.index, live.value(value));
                    rang = true;
                }
            }
        }
        rang
    }

    fn is_empty(&self) -> bool {
        let rings = |gpu: &Gpu| gpu.shadow.is_some() && gpu.real.is_some() && !gpu.live.is_empty();
        !self.gpus.values().any(rings)
    }
}
