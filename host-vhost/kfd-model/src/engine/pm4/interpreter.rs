//! What PM4 packets do, wherever they come from: a PM4 ring, or an AQL packet that jumps to an indirect buffer.

use std::sync::atomic::{Ordering, fence};

use super::ENGINE;
use crate::engine::atomic::{Operation, compare};
use crate::engine::dispatch::{Dispatch, Dispatched, RegisterDispatch, SH_REGISTERS};
use crate::engine::memory::at;
use crate::engine::transfer::Transfer;
use crate::engine::{Context, Failure, Interrupt, Step};

const NOP: u32 = 0x10;
const DISPATCH_DIRECT: u32 = 0x15;
const ATOMIC_MEM: u32 = 0x1e;
const PRED_EXEC: u32 = 0x23;
const WRITE_DATA: u32 = 0x37;
const WAIT_REG_MEM: u32 = 0x3c;
const INDIRECT_BUFFER: u32 = 0x3f;
const COPY_DATA: u32 = 0x40;
const EVENT_WRITE: u32 = 0x46;
const RELEASE_MEM: u32 = 0x49;
const DMA_DATA: u32 = 0x50;
const ACQUIRE_MEM: u32 = 0x58;
const SET_SH_REG: u32 = 0x76;

/// Indirect buffers below the ring: the micro engine has IB1 and IB2.
const MAX_NESTING: usize = 2;

/// Buffers that one packet of the ring may chain.
const MAX_CHAIN: u32 = 4096;

/// Count field of a type 3 NOP of one word.
const NOP_ONE_WORD: u32 = 0x3fff;

/// Length of a packet in words, from its header. Only types 2 and 3 are for compute queues: 0 and 1 write
/// registers.
pub(in crate::engine) fn length(header: u32, va: u64) -> Result<u32, Failure> {
    let count = header >> 16 & 0x3fff;
    match header >> 30 {
        2 => Ok(1),
        3 if opcode(header) == NOP && count == NOP_ONE_WORD => Ok(1),
        3 => Ok(count + 2),
        _ => Err(Failure::Opcode { engine: ENGINE, va, header }),
    }
}

fn opcode(header: u32) -> u32 {
    header >> 8 & 0xff
}

/// A packet that is done at once, and tells somebody that all before it is.
pub(super) fn tells(header: u32) -> bool {
    header >> 30 == 3 && opcode(header) == RELEASE_MEM
}

/// A packet that may take its time.
pub(super) fn runs_long(header: u32) -> bool {
    header >> 30 == 3 && matches!(opcode(header), DISPATCH_DIRECT | DMA_DATA | INDIRECT_BUFFER)
}

fn address(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// What a packet asks of whoever reads packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Effect {
    /// On to the next packet.
    Done,
    /// The same packet once more: it moves memory, or its kernel was stopped.
    Again,
    /// The same packet once more when the memory at this address has changed.
    Wait(u64),
    /// The packet is done once the interpreter is in no buffer any more.
    Called,
    /// Another buffer took the place of the one that the packet is in.
    Chained,
    /// On to the packet behind so many words.
    Skip(u32),
}

/// An indirect buffer that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Frame {
    va: u64,
    words: u32,
}

/// State that goes from packet to packet.
#[derive(Debug)]
pub(in crate::engine) struct Interpreter {
    registers: Box<[u32; SH_REGISTERS]>,
    /// What ATOMIC_MEM read, for COPY_DATA.
    atomic_return: u64,
    frames: Vec<Frame>,
    chained: u32,
    transfer: Option<Transfer>,
    xccs: u32,
    /// Room for a packet, kept from one to the next.
    pub(in crate::engine) packet: Vec<u32>,
}

impl Interpreter {
    pub(in crate::engine) fn new(xccs: u32) -> Self {
        Self {
            registers: Box::new([0; SH_REGISTERS]),
            atomic_return: 0,
            frames: Vec::new(),
            chained: 0,
            transfer: None,
            xccs: 1u32.checked_shl(xccs).unwrap_or(0).wrapping_sub(1),
            packet: Vec::new(),
        }
    }

    /// Indirect buffers run.
    pub(in crate::engine) fn in_buffer(&self) -> bool {
        !self.frames.is_empty()
    }

    /// Runs the next packet of the innermost indirect buffer.
    pub(in crate::engine) fn step(&mut self, context: &Context<'_>) -> Result<Step, Failure> {
        let Some(frame) = self.frames.last().copied() else { return Ok(Step::Progressed) };
        let header = context.memory.load32(frame.va)?;
        let words = length(header, frame.va)?;
        let malformed = |problem| Failure::Malformed { engine: ENGINE, va: frame.va, header, problem };
        if words > frame.words {
            return Err(malformed("longer than what is left of its indirect buffer"));
        }
        let mut packet = core::mem::take(&mut self.packet);
        packet.clear();
        packet.resize(words as usize, 0);
        context.memory.read_words(frame.va, &mut packet)?;
        // Where to go on, before a call can push another frame.
        let depth = self.frames.len();
        let next = at(frame.va, u64::from(words) * 4)?;
        let effect = self.execute(&packet, frame.va, context);
        self.packet = packet;
        let skip = match effect? {
            Effect::Done | Effect::Called => 0,
            Effect::Skip(words) => words,
            Effect::Chained => {
                self.leave_finished();
                return Ok(Step::Progressed);
            }
            Effect::Again => return Ok(Step::Progressed),
            Effect::Wait(va) => return Ok(Step::Waiting { va }),
        };
        let left = (frame.words - words)
            .checked_sub(skip)
            .ok_or(malformed("skips more than is left of its indirect buffer"))?;
        let next = at(next, u64::from(skip) * 4)?;
        if let Some(own) = self.frames.get_mut(depth - 1) {
            *own = Frame { va: next, words: left };
        }
        self.leave_finished();
        Ok(Step::Progressed)
    }

    fn leave_finished(&mut self) {
        while self.frames.last().is_some_and(|frame| frame.words == 0) {
            self.frames.pop();
        }
        if self.frames.is_empty() {
            self.chained = 0;
        }
    }

    /// Runs one packet. `va` is its address.
    pub(in crate::engine) fn execute(
        &mut self,
        packet: &[u32],
        va: u64,
        context: &Context<'_>,
    ) -> Result<Effect, Failure> {
        let Some((header, body)) = packet.split_first() else { return Ok(Effect::Done) };
        let header = *header;
        if header >> 30 == 2 {
            return Ok(Effect::Done);
        }
        let origin = Origin { va, header };
        match opcode(header) {
            NOP => Ok(Effect::Done),
            // There are no caches to invalidate, but an order to keep.
            ACQUIRE_MEM => {
                fence(Ordering::SeqCst);
                Ok(Effect::Done)
            }
            INDIRECT_BUFFER => self.indirect_buffer(body, origin),
            WRITE_DATA => write_data(body, origin, context),
            RELEASE_MEM => release_mem(body, origin, context),
            WAIT_REG_MEM => wait_reg_mem(body, origin, context),
            EVENT_WRITE => event_write(body, origin),
            SET_SH_REG => self.set_sh_reg(body, origin),
            DISPATCH_DIRECT => self.dispatch_direct(body, origin, context),
            COPY_DATA => self.copy_data(body, origin, context),
            ATOMIC_MEM => self.atomic_mem(body, origin, context),
            DMA_DATA => self.dma_data(body, origin, context),
            PRED_EXEC => self.pred_exec(body, origin),
            _ => Err(Failure::Opcode { engine: ENGINE, va, header }),
        }
    }

    fn indirect_buffer(&mut self, body: &[u32], origin: Origin) -> Result<Effect, Failure> {
        let [low, high, control] = *body else { return origin.length() };
        let frame = Frame { va: address(low & !3, high & 0xffff), words: control & 0xf_ffff };
        let chain = control >> 20 & 1 == 1;
        let too_deep = Failure::IndirectBuffers { va: frame.va };
        let depth = self.frames.len();
        match self.frames.last_mut() {
            Some(current) if chain => {
                self.chained += 1;
                if self.chained > MAX_CHAIN {
                    return Err(too_deep);
                }
                *current = frame;
                Ok(Effect::Chained)
            }
            _ if frame.words == 0 => Ok(Effect::Done),
            _ if depth >= MAX_NESTING => Err(too_deep),
            _ => {
                self.frames.push(frame);
                Ok(Effect::Called)
            }
        }
    }

    fn set_sh_reg(&mut self, body: &[u32], origin: Origin) -> Result<Effect, Failure> {
        let Some((control, values)) = body.split_first() else { return origin.length() };
        let first = (control & 0xffff) as usize;
        let registers = self.registers.get_mut(first..).and_then(|rest| rest.get_mut(..values.len()));
        let Some(registers) = registers else { return origin.problem("beyond the shader registers") };
        registers.copy_from_slice(values);
        Ok(Effect::Done)
    }

    fn dispatch_direct(
        &mut self,
        body: &[u32],
        origin: Origin,
        context: &Context<'_>,
    ) -> Result<Effect, Failure> {
        let [x, y, z, initiator] = *body else { return origin.length() };
        let dispatch = RegisterDispatch { registers: &self.registers, dimensions: [x, y, z], initiator };
        match context.dispatcher.dispatch(&Dispatch::Registers(dispatch), context)? {
            Dispatched::Done => Ok(Effect::Done),
            Dispatched::Stopped => Ok(Effect::Again),
            Dispatched::InsufficientScratch { .. } => {
                origin.problem("the kernel needs more scratch memory than the queue has")
            }
        }
    }

    fn copy_data(&mut self, body: &[u32], origin: Origin, context: &Context<'_>) -> Result<Effect, Failure> {
        let [control, source_low, source_high, to_low, to_high] = *body else { return origin.length() };
        let wide = control >> 16 & 1 == 1;
        let source = address(source_low, source_high);
        let value = match control & 0xf {
            // Memory, through the L2 or not.
            1 | 2 if wide => context.memory.load64(source)?,
            1 | 2 => u64::from(context.memory.load32(source)?),
            5 => source,
            6 => self.atomic_return,
            9 => context.world.timestamp(),
            _ => return origin.problem("source of COPY_DATA is neither memory, data, clock nor atomic"),
        };
        let to = address(to_low, to_high);
        match control >> 8 & 0xf {
            1 | 2 | 5 if wide => context.memory.store64(to, value)?,
            1 | 2 | 5 => context.memory.store32(to, value as u32)?,
            _ => return origin.problem("destination of COPY_DATA is not memory"),
        }
        Ok(Effect::Done)
    }

    fn atomic_mem(&mut self, body: &[u32], origin: Origin, context: &Context<'_>) -> Result<Effect, Failure> {
        let [control, low, high, source_low, source_high, compare_low, compare_high, _interval] = *body
        else {
            return origin.length();
        };
        let Some(operation) = Operation::new(control & 0x7f) else {
            return origin.problem("no integer atomic has that number");
        };
        let (va, compare) = (address(low, high), address(compare_low, compare_high));
        let old = operation.run(context.memory, va, address(source_low, source_high), compare)?;
        self.atomic_return = old;
        let until_equal = control >> 8 & 0xf == 1;
        if until_equal && !operation.compared_equal(old, compare) {
            Ok(Effect::Wait(va))
        } else {
            Ok(Effect::Done)
        }
    }

    fn dma_data(&mut self, body: &[u32], origin: Origin, context: &Context<'_>) -> Result<Effect, Failure> {
        let [control, source_low, source_high, to_low, to_high, command] = *body else {
            return origin.length();
        };
        if command & (0b1111 << 26) != 0 {
            return origin.problem("DMA_DATA with registers or without counting up");
        }
        let length = u64::from(command & 0x03ff_ffff);
        let to = address(to_low, to_high);
        match control >> 20 & 3 {
            0 | 3 => {}
            2 => return Ok(Effect::Done),
            _ => return origin.problem("destination of DMA_DATA is not memory"),
        }
        let mut transfer = match (self.transfer.take(), control >> 29 & 3) {
            (Some(transfer), _) => transfer,
            (None, 0 | 3) => Transfer::copy(to, address(source_low, source_high), length),
            (None, 2) => Transfer::fill(to, source_low, length),
            (None, _) => return origin.problem("source of DMA_DATA is neither memory nor data"),
        };
        if transfer.advance(context)? {
            return Ok(Effect::Done);
        }
        self.transfer = Some(transfer);
        Ok(Effect::Again)
    }

    fn pred_exec(&self, body: &[u32], origin: Origin) -> Result<Effect, Failure> {
        let [control] = *body else { return origin.length() };
        // The model runs what any of its dies would.
        let mine = control >> 24 & self.xccs != 0;
        Ok(if mine { Effect::Done } else { Effect::Skip(control & 0x3fff) })
    }
}

/// The packet that runs, for failures.
#[derive(Clone, Copy)]
struct Origin {
    va: u64,
    header: u32,
}

impl Origin {
    fn problem(self, problem: &'static str) -> Result<Effect, Failure> {
        Err(Failure::Malformed { engine: ENGINE, va: self.va, header: self.header, problem })
    }

    fn length(self) -> Result<Effect, Failure> {
        self.problem("its length does not fit its opcode")
    }
}

fn write_data(body: &[u32], origin: Origin, context: &Context<'_>) -> Result<Effect, Failure> {
    let [control, low, high, values @ ..] = body else { return origin.length() };
    if !matches!(control >> 8 & 0xf, 1 | 2 | 5) {
        return origin.problem("destination of WRITE_DATA is not memory");
    }
    let mut va = address(low & !3, *high);
    match values {
        [] => return origin.length(),
        [value] => context.memory.store32(va, *value)?,
        values if control >> 16 & 1 == 1 => {
            for value in values {
                context.memory.store32(va, *value)?;
            }
        }
        values => {
            for part in values.chunks(64) {
                let mut bytes = [0u8; 256];
                for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(part) {
                    *bytes = value.to_le_bytes();
                }
                let length = part.len() * 4;
                context.memory.write(va, bytes.get(..length).unwrap_or_default())?;
                va = at(va, length as u64)?;
            }
        }
    }
    Ok(Effect::Done)
}

fn release_mem(body: &[u32], origin: Origin, context: &Context<'_>) -> Result<Effect, Failure> {
    // Without the context id on gfx8.
    let [_event, select, low, high, data_low, data_high, context_id @ ..] = body else {
        return origin.length();
    };
    let context_id = match *context_id {
        [] => 0,
        [id] => id,
        _ => return origin.length(),
    };
    if select >> 16 & 3 > 1 {
        return origin.problem("destination of RELEASE_MEM is not memory");
    }
    let interrupt = match select >> 24 & 7 {
        0 | 3 => false,
        1 | 2 | 4 => true,
        _ => return origin.problem("interrupt of RELEASE_MEM depends on a comparison"),
    };
    let (narrow, wide) = (address(low & !3, *high), address(low & !7, *high));
    match select >> 29 {
        0 => {}
        1 => context.memory.store32(narrow, *data_low)?,
        2 => context.memory.store64(wide, address(*data_low, *data_high))?,
        3 | 4 => context.memory.store64(wide, context.world.timestamp())?,
        _ => return origin.problem("data of RELEASE_MEM are neither immediate nor a clock"),
    }
    if interrupt {
        context.world.interrupt(Interrupt::EndOfPipe(context_id));
    }
    Ok(Effect::Done)
}

fn wait_reg_mem(body: &[u32], origin: Origin, context: &Context<'_>) -> Result<Effect, Failure> {
    let [control, low, high, reference, mask, _interval] = *body else { return origin.length() };
    if control >> 4 & 3 != 1 || !matches!(control >> 6 & 3, 0 | 3) {
        return origin.problem("WAIT_REG_MEM on a register");
    }
    let va = address(low & !3, high);
    let value = context.memory.load32(va)? & mask;
    match compare(control & 7, value, reference) {
        Some(true) => Ok(Effect::Done),
        Some(false) => Ok(Effect::Wait(va)),
        None => origin.problem("no comparison has that number"),
    }
}

fn event_write(body: &[u32], origin: Origin) -> Result<Effect, Failure> {
    let ([control] | [control, _, _]) = *body else { return origin.length() };
    match control >> 8 & 0xf {
        // Any other event, partial flush: everything before is done already.
        0 | 4 => Ok(Effect::Done),
        _ => origin.problem("EVENT_WRITE samples what the model does not count"),
    }
}
