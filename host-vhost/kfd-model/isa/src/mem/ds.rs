//! DS: group memory.

use super::atomic::Atomic;
use super::lds::Lds;
use super::permute;
use super::rows::{Addresses, Small, lanes};
use super::vector::{Linear, Registers, Shape, run};
use crate::bus::{Bus, Space};
use crate::gws::Operation;
use crate::inst::{Dst, Inst, MemFlags, Src};
use crate::op::Op;
use crate::stop::Stop;
use crate::wave::{LANES, Row, Wave};

/// Numbers of atomic operations: those that return the old value add this.
const RETURNS: u16 = 0x20;
/// Those on 64 bits add this.
const WIDE: u16 = 0x40;

/// The operation of an instruction, by its number without the above.
fn atomic(code: u16) -> Option<Atomic> {
    Some(match code & !(RETURNS | WIDE) {
        0x00 => Atomic::Add,
        0x01 => Atomic::Sub,
        0x02 => Atomic::ReverseSub,
        0x03 => Atomic::Increment,
        0x04 => Atomic::Decrement,
        0x05 => Atomic::SignedMin,
        0x06 => Atomic::SignedMax,
        0x07 => Atomic::UnsignedMin,
        0x08 => Atomic::UnsignedMax,
        0x09 => Atomic::And,
        0x0a => Atomic::Or,
        0x0b => Atomic::Xor,
        0x0c => Atomic::MaskedOr,
        0x0d => Atomic::Swap,
        0x10 => Atomic::CompareSwap,
        0x11 => Atomic::FloatCompareSwap,
        0x12 => Atomic::FloatMin,
        0x13 => Atomic::FloatMax,
        0x15 => Atomic::FloatAdd,
        _ => return None,
    })
}

/// What an instruction with one address does.
fn shape(op: Op) -> Option<Shape> {
    Some(match op {
        Op::DsReadB32 => Shape::Load(1),
        Op::DsReadB64 => Shape::Load(2),
        Op::DsReadB96 => Shape::Load(3),
        Op::DsReadB128 => Shape::Load(4),
        Op::DsReadU8 => Shape::LoadSmall(Small::U8),
        Op::DsReadI8 => Shape::LoadSmall(Small::I8),
        Op::DsReadU16 => Shape::LoadSmall(Small::U16),
        Op::DsReadI16 => Shape::LoadSmall(Small::I16),
        Op::DsReadU8D16 => Shape::LoadHalf(Small::U8, false),
        Op::DsReadU8D16Hi => Shape::LoadHalf(Small::U8, true),
        Op::DsReadI8D16 => Shape::LoadHalf(Small::I8, false),
        Op::DsReadI8D16Hi => Shape::LoadHalf(Small::I8, true),
        Op::DsReadU16D16 => Shape::LoadHalf(Small::U16, false),
        Op::DsReadU16D16Hi => Shape::LoadHalf(Small::U16, true),
        Op::DsWriteB32 => Shape::Store(1),
        Op::DsWriteB64 => Shape::Store(2),
        Op::DsWriteB96 => Shape::Store(3),
        Op::DsWriteB128 => Shape::Store(4),
        Op::DsWriteB8 => Shape::StoreSmall(1, false),
        Op::DsWriteB16 => Shape::StoreSmall(2, false),
        Op::DsWriteB8D16Hi => Shape::StoreSmall(1, true),
        Op::DsWriteB16D16Hi => Shape::StoreSmall(2, true),
        _ => return None,
    })
}

/// Two accesses at offsets of their own.
struct Pair {
    /// Words of each.
    words: u8,
    /// Bytes that the offsets count.
    unit: u32,
    access: Access,
}

#[derive(PartialEq, Eq)]
enum Access {
    Read,
    Write,
    Exchange,
}

fn pair(op: Op) -> Option<Pair> {
    let of = |access, words: u8, far: bool| {
        let unit = u32::from(words) * if far { 256 } else { 4 };
        Some(Pair { words, unit, access })
    };
    match op {
        Op::DsRead2B32 => of(Access::Read, 1, false),
        Op::DsRead2st64B32 => of(Access::Read, 1, true),
        Op::DsRead2B64 => of(Access::Read, 2, false),
        Op::DsRead2st64B64 => of(Access::Read, 2, true),
        Op::DsWrite2B32 => of(Access::Write, 1, false),
        Op::DsWrite2st64B32 => of(Access::Write, 1, true),
        Op::DsWrite2B64 => of(Access::Write, 2, false),
        Op::DsWrite2st64B64 => of(Access::Write, 2, true),
        Op::DsWrxchg2RtnB32 => of(Access::Exchange, 1, false),
        Op::DsWrxchg2st64RtnB32 => of(Access::Exchange, 1, true),
        Op::DsWrxchg2RtnB64 => of(Access::Exchange, 2, false),
        Op::DsWrxchg2st64RtnB64 => of(Access::Exchange, 2, true),
        _ => None,
    }
}

/// The addresses of all lanes: a register and an offset, in 32 bits.
#[inline]
fn addresses(row: &Row, offset: u32) -> Addresses {
    let mut addresses = [0; LANES];
    for (address, base) in addresses.iter_mut().zip(&row.0) {
        *address = u64::from(base.wrapping_add(offset));
    }
    addresses
}

fn register(src: Src) -> u8 {
    if let Src::Vgpr(register) = src { register } else { 0 }
}

/// Executes an instruction.
///
/// # Errors
/// [`Stop::NotSupported`] for global data share and what else there is not.
#[inline]
pub fn execute(wave: &mut Wave, inst: &Inst, lds: &mut Lds, bus: &mut impl Bus) -> Result<(), Stop> {
    if inst.flags.contains(MemFlags::GDS) {
        return gws(wave, inst, bus);
    }
    let mask = wave.exec();
    if mask == 0 {
        return Ok(());
    }
    let [address, data0, data1, _] = inst.src.map(register);
    let to = if let Dst::Vgpr(to) = inst.dst { Some(to) } else { None };
    let offset = inst.imm as u32 & 0xffff;
    if let Some(shape) = shape(inst.op) {
        let addresses = addresses(wave.row(address), offset);
        return Ok(run(shape, wave, Registers { to, data: data0 }, &Linear(&addresses), mask, lds)?);
    }
    if let Some(pair) = pair(inst.op) {
        return two(wave, inst, lds, &pair, mask);
    }
    match inst.op {
        Op::DsNop => Ok(()),
        Op::DsSwizzleB32 | Op::DsPermuteB32 | Op::DsBpermuteB32 => {
            let row = match inst.op {
                Op::DsSwizzleB32 => permute::swizzle(wave.row(address), offset, mask),
                Op::DsPermuteB32 => permute::push(wave.row(address), offset, wave.row(data0), mask),
                _ => permute::pull(wave.row(address), offset, wave.row(data0), mask),
            };
            if let Some(to) = to {
                wave.write_masked(mask, usize::from(to), &row);
            }
            Ok(())
        }
        Op::DsAppend | Op::DsConsume => {
            let count = mask.count_ones();
            let va = u64::from((wave.m0() & 0xffff).wrapping_add(offset) & !3);
            let change = |old: u32| match inst.op {
                Op::DsAppend => old.wrapping_add(count),
                _ => old.wrapping_sub(count),
            };
            let before = lds.atomic32(va, change)?;
            if let Some(to) = to {
                wave.write_masked(mask, usize::from(to), &Row::splat(before));
            }
            Ok(())
        }
        Op::DsReadAddtidB32 | Op::DsWriteAddtidB32 => {
            let base = (wave.m0() & 0xffff).wrapping_add(offset);
            let mut addresses = [0; LANES];
            for (address, lane) in addresses.iter_mut().zip(0u64..) {
                *address = u64::from(base) + 4 * lane;
            }
            let (shape, data) = match inst.op {
                Op::DsReadAddtidB32 => (Shape::Load(1), data0),
                _ => (Shape::Store(1), data0),
            };
            Ok(run(shape, wave, Registers { to, data }, &Linear(&addresses), mask, lds)?)
        }
        other => {
            let code = other.row().code;
            let Some(operation) = atomic(code).filter(|_| code < 0x80) else {
                return Err(Stop::not_supported(inst.op));
            };
            let addresses = addresses(wave.row(address), offset);
            atomics(wave, lds, (operation, code & WIDE != 0), &addresses, mask, [data0, data1], to);
            Ok(())
        }
    }
}

/// Global wave sync; of the global data share itself there is nothing.
#[cold]
fn gws(wave: &mut Wave, inst: &Inst, bus: &mut impl Bus) -> Result<(), Stop> {
    // The value of the first lane that is on.
    let value = || {
        let lane = wave.exec().trailing_zeros() as usize;
        wave.row(register(inst.src[0])).lane(lane)
    };
    let operation = match inst.op {
        Op::DsGwsInit => Operation::Init(value()),
        Op::DsGwsSemaV => Operation::Release(1),
        Op::DsGwsSemaBr => Operation::Release(value()),
        Op::DsGwsSemaReleaseAll => Operation::ReleaseAll,
        Op::DsGwsSemaP => Operation::Acquire,
        Op::DsGwsBarrier => Operation::Barrier(value()),
        _ => return Err(Stop::not_supported(inst.op)),
    };
    // M0 has the base in bits 21:16.
    let resource = (wave.m0() >> 16 & 0x3f).wrapping_add(inst.imm as u32);
    wave.ticket = bus.gws(resource, operation, wave.ticket);
    if wave.ticket.is_some() { Err(Stop::Wait) } else { Ok(()) }
}

/// Atomic operations. Those with a comparand have it first, unlike those of FLAT.
fn atomics(
    wave: &mut Wave,
    lds: &mut Lds,
    (operation, wide): (Atomic, bool),
    addresses: &Addresses,
    mask: u64,
    [data0, data1]: [u8; 2],
    to: Option<u8>,
) {
    let compares = matches!(operation, Atomic::CompareSwap | Atomic::FloatCompareSwap);
    let (source, second) = if compares { (data1, data0) } else { (data0, data1) };
    let word =
        |register: u8, index: usize, lane: usize| wave.row_at(usize::from(register) + index).lane(lane);
    let value = |register: u8, lane: usize| {
        let high = if wide { word(register, 1, lane) } else { 0 };
        u64::from(word(register, 0, lane)) | u64::from(high) << 32
    };
    let mut before = [Row::ZERO; 2];
    for lane in lanes(mask) {
        let (source, second) = (value(source, lane), value(second, lane));
        // Group memory has no address that faults. The hardware ignores the low bits of an address.
        let va = addresses.get(lane).copied().unwrap_or(0);
        let old = if wide {
            lds.atomic64(va & !7, |old| operation.apply64(old, source, second)).unwrap_or(0)
        } else {
            let (source, second) = (source as u32, second as u32);
            u64::from(lds.atomic32(va & !3, |old| operation.apply32(old, source, second)).unwrap_or(0))
        };
        let [low, high] = &mut before;
        low.set_lane(lane, old as u32);
        high.set_lane(lane, (old >> 32) as u32);
    }
    if let Some(to) = to {
        for (index, row) in before.iter().take(1 + usize::from(wide)).enumerate() {
            wave.write_masked(mask, usize::from(to) + index, row);
        }
    }
}

/// Reads, writes or exchanges in two places.
fn two(wave: &mut Wave, inst: &Inst, lds: &mut Lds, pair: &Pair, mask: u64) -> Result<(), Stop> {
    let [address, data0, data1, _] = inst.src.map(register);
    let base = *wave.row(address);
    let places =
        [inst.offset0(), inst.offset1()].map(|offset| addresses(&base, u32::from(offset) * pair.unit));
    let words = usize::from(pair.words);
    // Everything is read before anything is written: to memory, and to registers that may be sources.
    let mut before = [Row::ZERO; 4];
    if pair.access != Access::Write {
        for (rows, place) in before.chunks_exact_mut(words).zip(&places) {
            for (row, behind) in rows.iter_mut().zip(0u64..) {
                let addresses = place.map(|address| address.wrapping_add(behind * 4));
                super::rows::load_word(lds, &addresses, mask, row)?;
            }
        }
    }
    if pair.access != Access::Read {
        for (place, data) in places.iter().zip([data0, data1]) {
            run(Shape::Store(pair.words), wave, Registers { to: None, data }, &Linear(place), mask, lds)?;
        }
    }
    if pair.access != Access::Write
        && let Dst::Vgpr(to) = inst.dst
    {
        for (index, row) in before.iter().take(2 * words).enumerate() {
            wave.write_masked(mask, usize::from(to) + index, row);
        }
    }
    Ok(())
}
