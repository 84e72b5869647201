//! SDMA queues: rings of packets for the copy engines.
//!
//! Read and write pointers count bytes and go on for ever in 64 bits.

mod packet;

use super::atomic::{Operation, compare};
use super::memory::at;
use super::ring::{Ahead, Progress, Ring};
use super::transfer::Transfer;
use super::{Context, DOORBELL_UNTOUCHED, Failure, Interrupt, Processor, QueueAddresses, Step, settle};

use packet::{Action, Decoded, MAX_HEAD};
pub use packet::{Layout, Rectangles};

/// Name in failures.
const ENGINE: &str = "SDMA";

/// The processor of an SDMA queue.
#[derive(Debug)]
pub struct SdmaQueue {
    layout: Layout,
    ring: Ring,
    addresses: QueueAddresses,
    progress: Progress,
    ahead: Ahead,
    /// What the packet in front moves.
    transfers: Vec<Transfer>,
    failed: Option<Failure>,
}

impl SdmaQueue {
    /// A queue at the start of its ring.
    pub fn new(addresses: QueueAddresses, layout: Layout) -> Self {
        Self {
            layout,
            ring: Ring::new(addresses.ring, addresses.ring_size),
            addresses,
            progress: Progress::default(),
            ahead: Ahead::default(),
            transfers: Vec::new(),
            failed: None,
        }
    }

    fn run(&mut self, context: &Context<'_>, doorbell: u64) -> Result<Step, Failure> {
        if self.ring.size() == 0 {
            return Ok(Step::Idle);
        }
        let write = match doorbell {
            DOORBELL_UNTOUCHED => context.memory.load64(self.addresses.write_pointer)?,
            write => write,
        };
        let pending = self.ring.pending(self.progress.read, write & !3)?;
        if pending == 0 {
            return Ok(Step::Idle);
        }
        let read = self.progress.read;
        let va = self.ring.address(read)?;
        let mut head = [0u32; MAX_HEAD];
        self.ring.fetch(context.memory, &mut self.ahead, read, pending, &mut head)?;
        let Decoded { words, action } = self.layout.decode(&head, va)?;
        let bytes = u64::from(words) * 4;
        if bytes > pending {
            let [header, ..] = head;
            if bytes > self.ring.size() {
                let problem = "longer than the ring";
                return Err(Failure::Malformed { engine: ENGINE, va, header, problem });
            }
            // The rest of it comes with another ring of the doorbell.
            return Ok(Step::Idle);
        }
        if action.tells() {
            // Whoever is told by it that the work is done may look for room in the ring at once.
            self.advance(context, bytes)?;
            self.report(context)?;
            self.execute(context, action)?;
            return Ok(Step::Progressed);
        }
        let skip = match self.execute(context, action)? {
            Effect::Done => 0,
            Effect::Again => {
                self.report(context)?;
                return Ok(Step::Progressed);
            }
            Effect::Wait(va) => return Ok(Step::Waiting { va }),
            Effect::Skip(words) => u64::from(words) * 4,
        };
        let bytes = bytes + skip;
        if bytes > pending {
            let [header, ..] = head;
            let problem = "skips more than was submitted";
            return Err(Failure::Malformed { engine: ENGINE, va, header, problem });
        }
        self.advance(context, bytes)?;
        Ok(Step::Progressed)
    }

    /// Goes past a packet.
    fn advance(&mut self, context: &Context<'_>, bytes: u64) -> Result<(), Failure> {
        if self.progress.advance(bytes, &self.ring) { self.report(context) } else { Ok(()) }
    }

    /// Writes the read pointer.
    fn report(&mut self, context: &Context<'_>) -> Result<(), Failure> {
        let Some(read) = self.progress.report() else { return Ok(()) };
        context.memory.store64(self.addresses.read_pointer, read)
    }

    fn execute(&mut self, context: &Context<'_>, action: Action) -> Result<Effect, Failure> {
        match action {
            Action::Nothing => {}
            Action::Transfer(transfers) => {
                if self.transfers.is_empty() {
                    self.transfers.extend(transfers.into_iter().flatten());
                }
                if let Some(transfer) = self.transfers.first_mut() {
                    if transfer.advance(context)? {
                        self.transfers.remove(0);
                    }
                    if !self.transfers.is_empty() {
                        return Ok(Effect::Again);
                    }
                }
            }
            Action::Write { to, words } => self.write(context, to, words)?,
            Action::Fence { va, data } => context.memory.store32(va, data)?,
            Action::Trap { context_id } => context.world.interrupt(Interrupt::SdmaTrap(context_id)),
            Action::Poll { va, function, reference, mask } => {
                let value = context.memory.load32(va)? & mask;
                if compare(function, value, reference) != Some(true) {
                    return Ok(Effect::Wait(va));
                }
            }
            Action::Condition { va, reference, words } => {
                if context.memory.load32(va)? != reference {
                    return Ok(Effect::Skip(words));
                }
            }
            Action::Atomic { operation, va, source, compare, until_equal } => {
                let old = Operation::run(operation, context.memory, va, source, compare)?;
                if until_equal && !operation.compared_equal(old, compare) {
                    return Ok(Effect::Wait(va));
                }
            }
            Action::Timestamp { va } => context.memory.store64(va, context.world.timestamp())?,
        }
        Ok(Effect::Done)
    }

    /// Copies data that stand in the ring, behind the four words of their packet.
    fn write(&self, context: &Context<'_>, to: u64, words: u32) -> Result<(), Failure> {
        let data = self.progress.read.wrapping_add(16);
        let length = u64::from(words) * 4;
        let before = self.ring.until_end(data).min(length);
        context.memory.copy(to, self.ring.address(data)?, before)?;
        if length > before {
            context.memory.copy(at(to, before)?, self.ring.address(0)?, length - before)?;
        }
        Ok(())
    }
}

/// How far a packet came.
enum Effect {
    Done,
    Again,
    Wait(u64),
    Skip(u32),
}

impl Processor for SdmaQueue {
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
