//! MUBUF: memory behind a buffer descriptor, with swizzling and range checks (AMD "Vega" ISA, 8.1 Vector memory buffer
//! instructions).
//!
//! What is out of range reads 0 and is not written. On GFX9 the number of records counts structures when the instruction
//! has an index and the descriptor a stride, else bytes.

use super::format::{self, Format};
use super::rows::{self, Addresses};
use super::vector::{Place, Registers, Shape, run};
use crate::bus::Bus;
use crate::inst::{Dst, Inst, MemFlags, Src};
use crate::op::Op;
use crate::salu::read32;
use crate::stop::Stop;
use crate::wave::{LANES, Row, Wave};

/// A buffer descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    base: u64,
    stride: u64,
    records: u64,
    swizzle: bool,
    /// Indices that are next to each other in memory, when it is swizzled.
    index_stride: u64,
    add_lane: bool,
}

/// Bytes that stay together in a swizzled buffer.
const ELEMENT: u64 = 4;

impl Descriptor {
    /// From four scalar registers.
    pub fn read(wave: &Wave, first: u8) -> Self {
        let [w0, w1, w2, w3] = [0, 1, 2, 3].map(|index| wave.sgpr(first.wrapping_add(index)));
        let add_lane = w3 >> 23 & 1 == 1;
        // With the lane as index, the data format is the rest of the stride.
        let stride_high = if add_lane { w3 >> 15 & 0xf } else { 0 };
        Self {
            base: u64::from(w0) | u64::from(w1 & 0xffff) << 32,
            stride: u64::from(w1 >> 16 & 0x3fff | stride_high << 14),
            records: u64::from(w2),
            swizzle: w1 >> 31 == 1,
            index_stride: 8 << (w3 >> 21 & 3),
            add_lane,
        }
    }

    /// Address of the word at an offset, for scalar instructions; `None` beyond the end.
    pub fn scalar(&self, offset: u64) -> Option<u64> {
        let size = self.records.saturating_mul(self.stride.max(1));
        // The low bits of the base do not count.
        (offset.checked_add(4)? <= size).then(|| self.base.wrapping_add(offset) & !3)
    }

    /// Offset in the buffer.
    #[inline]
    fn offset(&self, index: u64, offset: u64) -> u64 {
        if !self.swizzle {
            return offset.wrapping_add(index.wrapping_mul(self.stride));
        }
        let (group, inside) = (index / self.index_stride, index % self.index_stride);
        let (element, byte) = (offset / ELEMENT, offset % ELEMENT);
        let row = group.wrapping_mul(self.stride).wrapping_add(element * ELEMENT);
        row.wrapping_mul(self.index_stride).wrapping_add(inside * ELEMENT).wrapping_add(byte)
    }
}

/// An address that no lane that is in range has.
const OUT_OF_RANGE: u64 = u64::MAX;

struct Buffer {
    descriptor: Descriptor,
    scalar_offset: u64,
    indices: [u32; LANES],
    offsets: [u64; LANES],
    by_index: bool,
    /// Bytes of what is accessed at once.
    bytes: u64,
}

impl Place for Buffer {
    const IN_A_ROW: bool = false;

    #[inline]
    fn word(&self, word: u8) -> Addresses {
        let mut addresses = [0; LANES];
        let limit = self.descriptor.records;
        let base = self.descriptor.base.wrapping_add(self.scalar_offset);
        for ((address, index), offset) in addresses.iter_mut().zip(&self.indices).zip(&self.offsets) {
            let index = u64::from(*index);
            let offset = offset.saturating_add(u64::from(word) * 4);
            let inside = self.descriptor.offset(index, offset);
            let in_range = if self.by_index {
                index < limit
            } else {
                inside.saturating_add(self.scalar_offset).saturating_add(self.bytes) <= limit
            };
            *address = if in_range { base.wrapping_add(inside) } else { OUT_OF_RANGE };
        }
        addresses
    }
}

impl Buffer {
    fn new(wave: &Wave, inst: &Inst, bytes: u64) -> Self {
        let [vaddr, _, soffset, _] = inst.src;
        let descriptor = Descriptor::read(wave, descriptor(inst));
        let (has_index, has_offset) =
            (inst.flags.contains(MemFlags::IDXEN), inst.flags.contains(MemFlags::OFFEN));
        let (mut indices, mut offsets) = ([0; LANES], [u64::from(inst.imm as u32); LANES]);
        if let Src::Vgpr(vaddr) = vaddr {
            if has_index {
                indices = wave.row(vaddr).0;
            }
            if has_offset {
                let row = wave.row_at(usize::from(vaddr) + usize::from(has_index));
                for (offset, value) in offsets.iter_mut().zip(&row.0) {
                    *offset = offset.saturating_add(u64::from(*value));
                }
            }
        }
        if descriptor.add_lane {
            for (index, lane) in indices.iter_mut().zip(0..) {
                *index = index.wrapping_add(lane);
            }
        }
        Self {
            descriptor,
            scalar_offset: u64::from(read32(wave, soffset)),
            indices,
            offsets,
            by_index: has_index && descriptor.stride != 0,
            bytes,
        }
    }
}

/// The first of the scalar registers with the descriptor.
#[inline]
fn descriptor(inst: &Inst) -> u8 {
    if let Src::Sgpr(first) = inst.src[3] { first } else { 0 }
}

/// Bytes of what is accessed at once.
#[inline]
fn bytes(shape: Shape) -> u64 {
    match shape {
        Shape::LoadSmall(kind) | Shape::LoadHalf(kind, _) => kind.bytes() as u64,
        Shape::StoreSmall(bytes, _) => u64::from(bytes),
        Shape::Atomic(_, true) => 8,
        _ => 4,
    }
}

/// One word of each lane that is in range, in place of several.
struct One<'a>(&'a Addresses);

impl Place for One<'_> {
    const IN_A_ROW: bool = true;

    #[inline]
    fn word(&self, _: u8) -> Addresses {
        *self.0
    }
}

/// Executes an instruction.
///
/// # Errors
/// Faults; [`Stop::NotSupported`] for stores and halves with a format and formats that [`Format`] does not have, LDS and
/// texture fail.
#[inline]
pub fn execute(wave: &mut Wave, inst: &Inst, bus: &mut impl Bus) -> Result<(), Stop> {
    if matches!(inst.op, Op::BufferWbinvl1 | Op::BufferWbinvl1Vol) {
        bus.fence();
        return Ok(());
    }
    if inst.flags.intersects(MemFlags::LDS.union(MemFlags::TFE)) {
        return Err(Stop::not_supported(inst.op));
    }
    if let Some(components) = format::components(inst.op) {
        return load_format(wave, inst, components, bus);
    }
    let Some(shape) = Shape::of(inst.op) else { return Err(Stop::not_supported(inst.op)) };
    let exec = wave.exec();
    if exec == 0 {
        return Ok(());
    }
    let buffer = Buffer::new(wave, inst, bytes(shape));
    let to = if let Dst::Vgpr(to) = inst.dst { Some(to) } else { None };
    let data = if let Src::Vgpr(data) = inst.src[1] { data } else { 0 };
    let (words, single) = match shape {
        Shape::Load(words) => (words, Shape::Load(1)),
        Shape::Store(words) => (words, Shape::Store(1)),
        other => (1, other),
    };
    // Each word is in range or not by itself.
    for word in 0..words {
        let addresses = buffer.word(word);
        let mut mask = exec;
        for (lane, address) in addresses.iter().enumerate() {
            if *address == OUT_OF_RANGE {
                mask &= !(1 << lane);
            }
        }
        let to = to.map(|to| to.wrapping_add(word));
        if mask != exec
            && let Some(to) = to
        {
            zero(wave, to, exec & !mask, shape);
        }
        let registers = Registers { to, data: data.wrapping_add(word) };
        run(single, wave, registers, &One(&addresses), mask, bus)?;
    }
    Ok(())
}

/// Loads components of elements, which are in range as a whole or not at all.
///
/// A lane that is out of range gets zeros; whether it gets the 1 that a descriptor may have for a component, the manual
/// leaves open, and it is not supported.
#[cold]
fn load_format(wave: &mut Wave, inst: &Inst, components: u8, bus: &mut impl Bus) -> Result<(), Stop> {
    let not_supported = || Stop::not_supported(inst.op);
    let word3 = wave.sgpr(descriptor(inst).wrapping_add(3));
    let format = Format::read(word3);
    let buffer = Buffer::new(wave, inst, format.map_or(4, Format::size) as u64);
    if buffer.descriptor.swizzle || buffer.descriptor.add_lane {
        return Err(not_supported());
    }
    let Dst::Vgpr(to) = inst.dst else { return Ok(()) };
    let selections = format::selections(word3);
    let selected = selections.iter().take(usize::from(components));
    let addresses = buffer.word(0);
    // All before any is written: the indices may come from these registers.
    let mut loaded = [Row::ZERO; 4];
    let exec = wave.exec();
    for lane in rows::lanes(exec) {
        let address = addresses.get(lane).copied().unwrap_or(OUT_OF_RANGE);
        let mut element = [0; 16];
        if address == OUT_OF_RANGE {
            if selected.clone().any(|select| matches!(select, None | Some(format::Select::One))) {
                return Err(not_supported());
            }
            continue;
        }
        let format = format.ok_or_else(not_supported)?;
        bus.load(address, element.get_mut(..format.size()).unwrap_or_default())?;
        for (row, select) in loaded.iter_mut().zip(selected.clone()) {
            row.set_lane(lane, format.value(select.ok_or_else(not_supported)?, &element));
        }
    }
    for (row, number) in loaded.iter().zip(0..components) {
        wave.write_masked(exec, usize::from(to) + usize::from(number), row);
    }
    Ok(())
}

/// What lanes get that are out of range.
fn zero(wave: &mut Wave, to: u8, lanes: u64, shape: Shape) {
    match shape {
        Shape::LoadHalf(_, high) => {
            let keep = if high { 0xffff } else { 0xffff_0000 };
            let row = Row(wave.row(to).0.map(|value| value & keep));
            wave.write_masked(lanes, usize::from(to), &row);
        }
        Shape::Atomic(_, true) => {
            wave.write_masked(lanes, usize::from(to), &Row::ZERO);
            wave.write_masked(lanes, usize::from(to) + 1, &Row::ZERO);
        }
        _ => wave.write_masked(lanes, usize::from(to), &Row::ZERO),
    }
}
