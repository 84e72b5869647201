//! PM4 queues: rings of packets for the compute micro engine.
//!
//! Read and write pointers count words. The write pointer goes on for ever in 64 bits; the read pointer is
//! reported in 32 bits, modulo the ring.

mod interpreter;

use super::ring::{Ahead, Progress, Ring};
use super::{Context, DOORBELL_UNTOUCHED, Failure, Processor, QueueAddresses, Step, settle};

pub(super) use interpreter::{Effect, Interpreter, length};
use interpreter::{runs_long, tells};

/// Name in failures.
const ENGINE: &str = "PM4";

/// The processor of a PM4 queue.
#[derive(Debug)]
pub struct Pm4Queue {
    ring: Ring,
    addresses: QueueAddresses,
    progress: Progress,
    ahead: Ahead,
    interpreter: Interpreter,
    /// Bytes of the packet in front whose indirect buffers run.
    in_flight: Option<u64>,
    failed: Option<Failure>,
}

impl Pm4Queue {
    /// A queue at the start of its ring, on a GPU with `xccs` compute dies (1 but for gfx940 and later).
    pub fn new(addresses: QueueAddresses, xccs: u32) -> Self {
        Self {
            ring: Ring::new(addresses.ring, addresses.ring_size),
            addresses,
            progress: Progress::default(),
            ahead: Ahead::default(),
            interpreter: Interpreter::new(xccs),
            in_flight: None,
            failed: None,
        }
    }

    fn run(&mut self, context: &Context<'_>, doorbell: u64) -> Result<Step, Failure> {
        if self.interpreter.in_buffer() {
            let step = self.interpreter.step(context)?;
            if !self.interpreter.in_buffer()
                && let Some(bytes) = self.in_flight.take()
            {
                self.advance(context, bytes)?;
            }
            return Ok(step);
        }
        if self.ring.size() == 0 {
            return Ok(Step::Idle);
        }
        let words = match doorbell {
            DOORBELL_UNTOUCHED => context.memory.load64(self.addresses.write_pointer)?,
            words => words,
        };
        let pending = self.ring.pending(self.progress.read, words.wrapping_mul(4))?;
        if pending == 0 {
            return Ok(Step::Idle);
        }
        let mut header = [0u32];
        let read = self.progress.read;
        self.ring.fetch(context.memory, &mut self.ahead, read, pending, &mut header)?;
        let [header] = header;
        let va = self.ring.address(read)?;
        let words = length(header, va)?;
        let bytes = u64::from(words) * 4;
        if bytes > self.ring.size() {
            let problem = "longer than the ring";
            return Err(Failure::Malformed { engine: ENGINE, va, header, problem });
        }
        if bytes > pending {
            // The rest of it comes with another ring of the doorbell.
            return Ok(Step::Idle);
        }
        let mut packet = core::mem::take(&mut self.interpreter.packet);
        packet.clear();
        packet.resize(words as usize, 0);
        self.ring.fetch(context.memory, &mut self.ahead, read, pending, &mut packet)?;
        // Whoever is told by it that the work is done may look for room in the ring at once.
        let tells = tells(header);
        if tells {
            self.advance(context, bytes)?;
        }
        if tells || runs_long(header) {
            self.report(context)?;
        }
        let effect = self.interpreter.execute(&packet, va, context);
        self.interpreter.packet = packet;
        match effect? {
            Effect::Done if tells => {}
            Effect::Done => self.advance(context, bytes)?,
            Effect::Again => {}
            Effect::Wait(va) => return Ok(Step::Waiting { va }),
            Effect::Called | Effect::Chained => self.in_flight = Some(bytes),
            Effect::Skip(words) => {
                let skipped = bytes + u64::from(words) * 4;
                if skipped > self.ring.size() {
                    let problem = "skips more than the ring";
                    return Err(Failure::Malformed { engine: ENGINE, va, header, problem });
                }
                if skipped > pending {
                    return Ok(Step::Idle);
                }
                self.advance(context, skipped)?;
            }
        }
        Ok(Step::Progressed)
    }

    /// Goes past a packet.
    fn advance(&mut self, context: &Context<'_>, bytes: u64) -> Result<(), Failure> {
        if self.progress.advance(bytes, &self.ring) { self.report(context) } else { Ok(()) }
    }

    /// Writes the read pointer.
    fn report(&mut self, context: &Context<'_>) -> Result<(), Failure> {
        let Some(read) = self.progress.report() else { return Ok(()) };
        let words = read.checked_rem(self.ring.size()).unwrap_or(0) / 4;
        // A ring is smaller than 4 GiB.
        context.memory.store32(self.addresses.read_pointer, words as u32)
    }
}

impl Processor for Pm4Queue {
    fn step(&mut self, context: &Context<'_>, doorbell: u64) -> Step {
        if let Some(failure) = &self.failed {
            return Step::Failed(failure.clone());
        }
        let mut outcome = self.run(context, doorbell);
        if outcome != Ok(Step::Progressed) {
            let reported = self.report(context);
            outcome = outcome.and_then(|step| reported.map(|()| step));
        }
        settle(&mut self.failed, context, outcome)
    }

    fn quiesce(&mut self, context: &Context<'_>) {
        // A read pointer that cannot be written fails the next step.
        let _ = self.report(context);
    }

    fn set_ring(&mut self, address: u64, size: u32) {
        self.ring = Ring::new(address, size);
        self.ahead.clear();
    }
}

#[cfg(test)]
mod tests;
