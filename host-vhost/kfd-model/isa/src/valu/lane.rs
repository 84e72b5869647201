//! What a lane of an operand is: 32 or 64 bits, read as a number of some kind.

use super::operand;
use crate::inst::{Dst, Inst, Src};
use crate::op::Kind;
use crate::wave::{LANES, Row, Wave};

/// What a lane of an operand is to an operation: the type says how the bits are read and which modifiers apply.
pub(super) trait Lane: Copy {
    /// The registers that hold it.
    type Bits: Bits;
    /// Its kind, for constants and modifiers.
    const KIND: Kind;
    /// From the bits in the registers.
    fn from_bits(bits: Self::Bits) -> Self;
    /// To the bits in the registers.
    fn to_bits(self) -> Self::Bits;
}

/// An f16 as the f32 of the same value.
#[derive(Clone, Copy)]
pub(super) struct Half(pub f32);

/// An f16 as its bits.
#[derive(Clone, Copy)]
pub(super) struct HalfBits(pub u32);

/// A 16-bit integer in the low half; the upper half is undefined for sources and dropped for results.
#[derive(Clone, Copy)]
pub(super) struct Short(pub u32);

impl Lane for u32 {
    type Bits = u32;
    const KIND: Kind = Kind::I32;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self
    }
}

impl Lane for f32 {
    type Bits = u32;
    const KIND: Kind = Kind::F32;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        f32::to_bits(self)
    }
}

impl Lane for Half {
    type Bits = u32;
    const KIND: Kind = Kind::F16;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Half(super::half::to_f32(bits))
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        super::half::from_f32(self.0)
    }
}

impl Lane for Short {
    type Bits = u32;
    const KIND: Kind = Kind::I16;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Short(bits)
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self.0 & 0xffff
    }
}

impl Lane for HalfBits {
    type Bits = u32;
    const KIND: Kind = Kind::F16;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        HalfBits(bits & 0xffff)
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self.0
    }
}

impl Lane for u64 {
    type Bits = u64;
    const KIND: Kind = Kind::I64;
    #[inline(always)]
    fn from_bits(bits: u64) -> Self {
        bits
    }
    #[inline(always)]
    fn to_bits(self) -> u64 {
        self
    }
}

impl Lane for f64 {
    type Bits = u64;
    const KIND: Kind = Kind::F64;
    #[inline(always)]
    fn from_bits(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    #[inline(always)]
    fn to_bits(self) -> u64 {
        f64::to_bits(self)
    }
}

/// The lanes of one source.
#[allow(clippy::large_enum_variant, reason = "it lives on the stack for one instruction")]
pub(super) enum Lanes<'a> {
    /// In a register.
    Register(&'a Row),
    /// Prepared.
    Copy(Row),
}

impl Lanes<'_> {
    #[inline(always)]
    pub(super) fn get(&self) -> &[u32; LANES] {
        match self {
            Lanes::Register(row) => &row.0,
            Lanes::Copy(row) => &row.0,
        }
    }
}

/// One or two registers' worth of bits in a lane.
pub(super) trait Bits: Copy + Default {
    /// The lanes of a source.
    type Source<'a>;
    /// A source to read lanes from.
    type View<'a>: Copy;
    /// The lanes of a result.
    type Result: Default;
    /// The lanes of `src[index]`.
    fn fetch<'a>(wave: &'a Wave, inst: &Inst, index: usize, kind: Kind, plain: bool) -> Self::Source<'a>;
    /// The source to read lanes from.
    fn view<'a>(source: &'a Self::Source<'_>) -> Self::View<'a>;
    /// One lane.
    fn lane(view: Self::View<'_>, lane: usize) -> Self;
    /// Sets one lane of a result.
    fn set(result: &mut Self::Result, lane: usize, value: Self);
    /// Writes the lanes that EXEC switches on.
    fn store(wave: &mut Wave, inst: &Inst, kind: Kind, plain: bool, result: &Self::Result);
}

impl Bits for u32 {
    type Source<'a> = Lanes<'a>;
    type View<'a> = &'a [u32; LANES];
    type Result = Row;

    #[inline(always)]
    fn fetch<'a>(wave: &'a Wave, inst: &Inst, index: usize, kind: Kind, plain: bool) -> Lanes<'a> {
        match inst.src.get(index) {
            Some(Src::Vgpr(n)) if plain => Lanes::Register(wave.row(*n)),
            Some(Src::Sgpr(n)) if plain => Lanes::Copy(Row::splat(wave.sgpr(*n))),
            Some(src) if plain && let Some(value) = src.constant(kind) => {
                Lanes::Copy(Row::splat(value as u32))
            }
            _ => Lanes::Copy(operand::fetch32(wave, inst, index, kind)),
        }
    }

    #[inline(always)]
    fn view<'a>(source: &'a Lanes<'_>) -> &'a [u32; LANES] {
        source.get()
    }

    #[inline(always)]
    fn lane(view: &[u32; LANES], lane: usize) -> u32 {
        at(view, lane)
    }

    #[inline(always)]
    fn set(result: &mut Row, lane: usize, value: u32) {
        put(result, lane, value);
    }

    #[inline(always)]
    fn store(wave: &mut Wave, inst: &Inst, kind: Kind, plain: bool, result: &Row) {
        match inst.dst {
            Dst::Vgpr(n) if plain => wave.write_row(usize::from(n), result),
            _ => operand::store32(wave, inst, kind, result),
        }
    }
}

impl Bits for u64 {
    type Source<'a> = (Lanes<'a>, Lanes<'a>);
    type View<'a> = (&'a [u32; LANES], &'a [u32; LANES]);
    type Result = (Row, Row);

    #[inline(always)]
    fn fetch<'a>(
        wave: &'a Wave,
        inst: &Inst,
        index: usize,
        kind: Kind,
        plain: bool,
    ) -> (Lanes<'a>, Lanes<'a>) {
        match inst.src.get(index) {
            Some(Src::Vgpr(n)) if plain => {
                (Lanes::Register(wave.row(*n)), Lanes::Register(wave.row_at(usize::from(*n) + 1)))
            }
            _ => {
                let (low, high) = operand::fetch64(wave, inst, index, kind);
                (Lanes::Copy(low), Lanes::Copy(high))
            }
        }
    }

    #[inline(always)]
    fn view<'a>(source: &'a (Lanes<'_>, Lanes<'_>)) -> (&'a [u32; LANES], &'a [u32; LANES]) {
        (source.0.get(), source.1.get())
    }

    #[inline(always)]
    fn lane((low, high): (&[u32; LANES], &[u32; LANES]), lane: usize) -> u64 {
        u64::from(at(low, lane)) | u64::from(at(high, lane)) << 32
    }

    #[inline(always)]
    fn set((low, high): &mut (Row, Row), lane: usize, value: u64) {
        put(low, lane, value as u32);
        put(high, lane, (value >> 32) as u32);
    }

    #[inline(always)]
    fn store(wave: &mut Wave, inst: &Inst, kind: Kind, plain: bool, (low, high): &(Row, Row)) {
        let Dst::Vgpr(n) = inst.dst else { return };
        if !plain {
            return operand::store64(wave, inst, kind, &join(low, high));
        }
        wave.write_row(usize::from(n), low);
        wave.write_row(usize::from(n) + 1, high);
    }
}

/// Sets a lane; the check falls away, as lanes are counted to [`LANES`].
#[inline(always)]
fn put(row: &mut Row, lane: usize, value: u32) {
    if let Some(slot) = row.0.get_mut(lane) {
        *slot = value;
    }
}

/// Two rows as one of twice the width.
#[inline(always)]
pub(super) fn join(low: &Row, high: &Row) -> [u64; LANES] {
    each(|lane| u64::lane((&low.0, &high.0), lane))
}

/// The two rows of a wide one.
#[inline(always)]
pub(super) fn split(lanes: &[u64; LANES]) -> (Row, Row) {
    (Row(each(|lane| at(lanes, lane) as u32)), Row(each(|lane| (at(lanes, lane) >> 32) as u32)))
}

/// The element of a lane; the check falls away, as lanes come from [`each`].
#[inline(always)]
pub(super) fn at<T: Copy + Default>(lanes: &[T; LANES], lane: usize) -> T {
    lanes.get(lane).copied().unwrap_or_default()
}

/// Computes all lanes.
#[inline(always)]
pub(super) fn each<T>(f: impl FnMut(usize) -> T) -> [T; LANES] {
    std::array::from_fn(f)
}
