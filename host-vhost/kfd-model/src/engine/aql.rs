//! AQL queues: rings of packets of 64 bytes that say by themselves when they are valid.

use super::dispatch::{AqlDispatch, Dispatch, Dispatched};
use super::memory::at;
use super::pm4::{Effect, Interpreter, length};
use super::ring::Ring;
use super::signal::Signal;
use super::{Context, Failure, Processor, QueueAddresses, Step, settle};

/// Size of a packet in bytes.
pub const PACKET: u64 = 64;

/// `HSA_PACKET_TYPE_VENDOR_SPECIFIC`
const VENDOR_SPECIFIC: u8 = 0;
/// `HSA_PACKET_TYPE_INVALID`: nothing was published here yet, or it is done.
const INVALID: u8 = 1;
/// `HSA_PACKET_TYPE_KERNEL_DISPATCH`
const KERNEL_DISPATCH: u8 = 2;
/// `HSA_PACKET_TYPE_BARRIER_AND`
const BARRIER_AND: u8 = 3;
/// `HSA_PACKET_TYPE_BARRIER_OR`
const BARRIER_OR: u8 = 5;

/// `AMD_AQL_FORMAT_PM4_IB`: a jump to an indirect buffer of PM4 packets.
const FORMAT_PM4_IB: u8 = 1;
/// `HSA_AMD_PACKET_TYPE_BARRIER_VALUE`
const FORMAT_BARRIER_VALUE: u8 = 2;

/// Offset of `read_dispatch_id` in `amd_queue_t`.
const READ_DISPATCH_ID: u64 = 128;
/// Offset of `read_dispatch_id_field_base_byte_offset` from `read_dispatch_id`.
const FIELD_BASE_OFFSET: u64 = 8;
/// Offset of `queue_properties` in `amd_queue_t`.
const QUEUE_PROPERTIES: u64 = 180;
/// `AMD_QUEUE_PROPERTIES_USE_SCRATCH_ONCE`
const USE_SCRATCH_ONCE: u32 = 1 << 4;
/// Offset of `queue_inactive_signal` in `amd_queue_t`.
const QUEUE_INACTIVE_SIGNAL: u64 = 192;

/// Not enough scratch memory, waves of 64 lanes.
const SCRATCH_WAVE64: u64 = 1;
/// Not enough scratch memory, waves of 32 lanes.
const SCRATCH_WAVE32: u64 = 0x400;
/// The scratch memory that was for one dispatch is not needed any more.
const SCRATCH_RECLAIM: u64 = 0x200;

/// Word of a KERNEL_DISPATCH packet with `private_segment_size`.
const PRIVATE_SEGMENT_SIZE: usize = 6;

/// The processor of an AQL queue.
///
/// Packets run one after the other, each to its end, so the barrier bit asks for nothing that is not so
/// anyway. The doorbell is a hint: what counts are the write index in memory and the packets' headers.
#[derive(Debug)]
pub struct AqlQueue {
    ring: Ring,
    addresses: QueueAddresses,
    /// Index of the packet in front.
    read: u64,
    /// The write index when it was last looked at.
    write: u64,
    front: Option<Front>,
    interpreter: Interpreter,
    /// The signal that must go back to 0 before the next packet: the runtime takes scratch memory back.
    reclaims: Option<Signal>,
    failed: Option<Failure>,
}

/// What is known of the packet in front once it was begun.
#[derive(Clone, Copy, Debug)]
struct Front {
    start: u64,
    /// Dependencies of a BARRIER_AND that were seen at 0.
    satisfied: u8,
    /// The indirect buffer was entered.
    jumped: bool,
    /// The signal that must go back to 0 before the packet is tried again.
    scratch: Option<Signal>,
}

/// How far a packet came.
enum Progress {
    Complete,
    Step(Step),
}

impl AqlQueue {
    /// A queue at the start of its ring, on a GPU with `xccs` compute dies (1 but for gfx940 and later).
    pub fn new(addresses: QueueAddresses, xccs: u32) -> Self {
        Self {
            ring: Ring::new(addresses.ring, addresses.ring_size),
            addresses,
            read: 0,
            write: 0,
            front: None,
            interpreter: Interpreter::new(xccs),
            reclaims: None,
            failed: None,
        }
    }

    /// Index of the next packet.
    pub fn read_index(&self) -> u64 {
        self.read
    }

    fn run(&mut self, context: &Context<'_>) -> Result<Step, Failure> {
        if self.ring.size() < PACKET {
            return Ok(Step::Idle);
        }
        if let Some(signal) = self.reclaims {
            if signal.value(context)? != 0 {
                return Ok(Step::Waiting { va: signal.value_address()? });
            }
            self.reclaims = None;
        }
        // Indices never wrap in earnest; one that lies behind has nothing to say.
        if self.write <= self.read {
            self.write = context.memory.load64(self.addresses.write_pointer)?;
        }
        if self.write <= self.read {
            return Ok(Step::Idle);
        }
        let slots = self.ring.size() / PACKET;
        let va = self.ring.address(self.read.checked_rem(slots).unwrap_or(0).wrapping_mul(PACKET))?;
        // The header is published last: what else is in the packet is read after it.
        let header = context.memory.load32(va)?;
        let kind = (header & 0xff) as u8;
        if kind == INVALID {
            return Ok(Step::Waiting { va });
        }
        let mut packet = [0u32; 16];
        context.memory.read_words(va, &mut packet)?;
        let fresh = || Front { start: context.world.timestamp(), satisfied: 0, jumped: false, scratch: None };
        let mut front = self.front.take().unwrap_or_else(fresh);
        let progress = match kind {
            KERNEL_DISPATCH => self.kernel_dispatch(context, va, &packet, &mut front),
            BARRIER_AND => barrier_and(context, &packet, &mut front),
            BARRIER_OR => barrier_or(context, &packet),
            VENDOR_SPECIFIC => self.vendor_specific(context, va, header, &packet, &mut front),
            kind => Err(Failure::PacketType { index: self.read, kind }),
        };
        match progress? {
            Progress::Step(step) => {
                self.front = Some(front);
                Ok(step)
            }
            Progress::Complete => {
                // The completion signal comes last: whoever sees it may take the queue away.
                context.memory.store32(va, header & 0xffff_0000 | u32::from(INVALID))?;
                self.read = self.read.wrapping_add(1);
                context.memory.store64(self.addresses.read_pointer, self.read)?;
                if let Some(signal) = Signal::new(handle(&packet, 14)) {
                    signal.complete(context, front.start)?;
                }
                Ok(Step::Progressed)
            }
        }
    }

    fn kernel_dispatch(
        &mut self,
        context: &Context<'_>,
        va: u64,
        packet: &[u32; 16],
        front: &mut Front,
    ) -> Result<Progress, Failure> {
        if let Some(signal) = front.scratch {
            if signal.value(context)? != 0 {
                return Ok(Progress::Step(Step::Waiting { va: signal.value_address()? }));
            }
            front.scratch = None;
        }
        let amd_queue = self.amd_queue(context)?;
        let dispatch = AqlDispatch { packet: *packet, packet_address: va, index: self.read, amd_queue };
        match context.dispatcher.dispatch(&Dispatch::Aql(&dispatch), context)? {
            Dispatched::Done => {
                if packet.get(PRIVATE_SEGMENT_SIZE).is_some_and(|size| *size != 0) {
                    self.reclaim_scratch(context)?;
                }
                Ok(Progress::Complete)
            }
            Dispatched::Stopped => Ok(Progress::Step(Step::Progressed)),
            Dispatched::InsufficientScratch { wave32 } => {
                let Some(signal) = self.inactive_signal(context)? else {
                    let problem = "the kernel needs more scratch memory, and nobody can be asked for it";
                    let [header, ..] = *packet;
                    return Err(Failure::Malformed { engine: "AQL", va, header, problem });
                };
                signal.store(context, if wave32 { SCRATCH_WAVE32 } else { SCRATCH_WAVE64 })?;
                front.scratch = Some(signal);
                Ok(Progress::Step(Step::Progressed))
            }
        }
    }

    /// Gives scratch memory back that was for this dispatch alone.
    fn reclaim_scratch(&mut self, context: &Context<'_>) -> Result<(), Failure> {
        let Some(queue) = self.amd_queue(context)? else { return Ok(()) };
        let properties = context.memory.load32(at(queue, QUEUE_PROPERTIES)?)?;
        if properties & USE_SCRATCH_ONCE != 0
            && let Some(signal) = self.inactive_signal(context)?
        {
            signal.store(context, SCRATCH_RECLAIM)?;
            self.reclaims = Some(signal);
        }
        Ok(())
    }

    fn vendor_specific(
        &mut self,
        context: &Context<'_>,
        va: u64,
        header: u32,
        packet: &[u32; 16],
        front: &mut Front,
    ) -> Result<Progress, Failure> {
        match (header >> 16 & 0xff) as u8 {
            FORMAT_PM4_IB => self.pm4_indirect_buffer(context, va, packet, front),
            FORMAT_BARRIER_VALUE => barrier_value(context, va, packet),
            format => Err(Failure::VendorFormat { index: self.read, format }),
        }
    }

    /// `amd_aql_pm4_ib`: words 1 to 4 are an INDIRECT_BUFFER packet.
    fn pm4_indirect_buffer(
        &mut self,
        context: &Context<'_>,
        va: u64,
        packet: &[u32; 16],
        front: &mut Front,
    ) -> Result<Progress, Failure> {
        if !front.jumped {
            let [_, jump @ .., _, _, _, _, _, _, _, _, _, _, _] = packet;
            let jump: &[u32; 4] = jump;
            let [header, ..] = *jump;
            let address = at(va, 4)?;
            let problem = "no jump to an indirect buffer";
            let malformed = Failure::Malformed { engine: "PM4", va: address, header, problem };
            if length(header, address)? != 4 || header >> 8 & 0xff != 0x3f {
                return Err(malformed);
            }
            match self.interpreter.execute(jump, address, context)? {
                Effect::Done => return Ok(Progress::Complete),
                Effect::Called => front.jumped = true,
                _ => return Err(malformed),
            }
        }
        if self.interpreter.in_buffer() {
            let step = self.interpreter.step(context)?;
            if self.interpreter.in_buffer() {
                return Ok(Progress::Step(step));
            }
        }
        Ok(Progress::Complete)
    }

    /// The `amd_queue_t` that the read pointer is in.
    fn amd_queue(&self, context: &Context<'_>) -> Result<Option<u64>, Failure> {
        let read_pointer = self.addresses.read_pointer;
        let Some(queue) = read_pointer.checked_sub(READ_DISPATCH_ID) else { return Ok(None) };
        // A queue that was made without a runtime has its pointers anywhere.
        let offset = context.memory.load32(at(read_pointer, FIELD_BASE_OFFSET)?)?;
        Ok((u64::from(offset) == READ_DISPATCH_ID).then_some(queue))
    }

    fn inactive_signal(&self, context: &Context<'_>) -> Result<Option<Signal>, Failure> {
        let Some(queue) = self.amd_queue(context)? else { return Ok(None) };
        Ok(Signal::new(context.memory.load64(at(queue, QUEUE_INACTIVE_SIGNAL)?)?))
    }

    /// Tells the runtime why its queue stopped.
    fn tell(&self, context: &Context<'_>, failure: &Failure) -> Result<(), Failure> {
        if let Some(code) = failure.inactive_code()
            && let Some(signal) = self.inactive_signal(context)?
        {
            signal.store(context, code)?;
        }
        Ok(())
    }
}

impl Processor for AqlQueue {
    fn step(&mut self, context: &Context<'_>, _doorbell: u64) -> Step {
        if let Some(failure) = &self.failed {
            return Step::Failed(failure.clone());
        }
        let outcome = self.run(context);
        if let Err(failure) = &outcome {
            // A runtime whose signal cannot be written hears of it through the world only.
            let _ = self.tell(context, failure);
        }
        settle(&mut self.failed, context, outcome)
    }

    fn set_ring(&mut self, address: u64, size: u32) {
        self.ring = Ring::new(address, size);
    }
}

/// 64 bits of a packet, from an even word on.
fn handle(packet: &[u32; 16], word: usize) -> u64 {
    let pair = |index: usize| u64::from(packet.get(index).copied().unwrap_or(0));
    pair(word) | pair(word + 1) << 32
}

/// The five dependencies of a barrier packet.
fn dependencies(packet: &[u32; 16]) -> [Option<Signal>; 5] {
    [2, 4, 6, 8, 10].map(|word| Signal::new(handle(packet, word)))
}

/// Done once each signal was seen at 0, not necessarily all at once.
fn barrier_and(context: &Context<'_>, packet: &[u32; 16], front: &mut Front) -> Result<Progress, Failure> {
    let mut waits = None;
    for (index, signal) in dependencies(packet).into_iter().enumerate() {
        let bit = 1 << index;
        let Some(signal) = signal.filter(|_| front.satisfied & bit == 0) else { continue };
        if signal.value(context)? == 0 {
            front.satisfied |= bit;
        } else if waits.is_none() {
            waits = Some(signal.value_address()?);
        }
    }
    Ok(waits.map_or(Progress::Complete, |va| Progress::Step(Step::Waiting { va })))
}

/// Done once one of the signals is at 0, or there is none.
fn barrier_or(context: &Context<'_>, packet: &[u32; 16]) -> Result<Progress, Failure> {
    let mut waits = None;
    for signal in dependencies(packet).into_iter().flatten() {
        if signal.value(context)? == 0 {
            return Ok(Progress::Complete);
        }
        waits = Some(waits.unwrap_or(signal.value_address()?));
    }
    Ok(waits.map_or(Progress::Complete, |va| Progress::Step(Step::Waiting { va })))
}

/// `hsa_amd_barrier_value_packet_t`: done once the signal's value, masked, compares as asked.
fn barrier_value(context: &Context<'_>, va: u64, packet: &[u32; 16]) -> Result<Progress, Failure> {
    let Some(signal) = Signal::new(handle(packet, 2)) else { return Ok(Progress::Complete) };
    let value = (signal.value(context)? & handle(packet, 6)) as i64;
    let reference = handle(packet, 4) as i64;
    let [header, _, _, _, _, _, _, _, condition, ..] = *packet;
    let satisfied = match condition {
        0 => value == reference,
        1 => value != reference,
        2 => value < reference,
        3 => value >= reference,
        _ => {
            let problem = "no signal condition has that number";
            return Err(Failure::Malformed { engine: "AQL", va, header, problem });
        }
    };
    if satisfied {
        return Ok(Progress::Complete);
    }
    Ok(Progress::Step(Step::Waiting { va: signal.value_address()? }))
}

#[cfg(test)]
mod tests;
