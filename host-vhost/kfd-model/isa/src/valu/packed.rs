//! VOP3P: operations on two 16-bit halves, mixed precision and dot products.

use super::Handler;
use super::integer::{saturate, saturate_u};
use super::lanes::{Apply, at, each, rows3};
use super::nan::Settle;
use super::operand::{clamp32, flush32, raw32, store32};
use super::transcendental;
use super::{divide, half};
use crate::inst::{Dst, Inst};
use crate::op::{Kind, Op};
use crate::wave::{Row, Wave};

/// The handler of an opcode of this module.
pub(super) const fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VPkAddU16 => |w, i| integer(w, i, |a, b, _| a + b, |v| v.clamp(0, 0xffff), unsigned),
        Op::VPkSubU16 => |w, i| integer(w, i, |a, b, _| a - b, |v| v.clamp(0, 0xffff), unsigned),
        Op::VPkMadU16 => |w, i| {
            // The exact result needs 33 bits, but as an unsigned number 32.
            integer(
                w,
                i,
                |a, b, c| a.wrapping_mul(b).wrapping_add(c),
                |v| (v as u32).min(0xffff) as i32,
                unsigned,
            );
        },
        Op::VPkMulLoU16 => |w, i| integer(w, i, |a, b, _| a.wrapping_mul(b), |v| v, unsigned),
        Op::VPkMaxU16 => |w, i| integer(w, i, |a, b, _| a.max(b), |v| v, unsigned),
        Op::VPkMinU16 => |w, i| integer(w, i, |a, b, _| a.min(b), |v| v, unsigned),
        Op::VPkLshlrevB16 => |w, i| integer(w, i, |a, b, _| b << (a & 15), |v| v, unsigned),
        Op::VPkLshrrevB16 => |w, i| integer(w, i, |a, b, _| b >> (a & 15), |v| v, unsigned),
        Op::VPkAddI16 => |w, i| integer(w, i, |a, b, _| a + b, |v| v.clamp(-0x8000, 0x7fff), signed),
        Op::VPkSubI16 => |w, i| integer(w, i, |a, b, _| a - b, |v| v.clamp(-0x8000, 0x7fff), signed),
        Op::VPkMadI16 => |w, i| integer(w, i, |a, b, c| a * b + c, |v| v.clamp(-0x8000, 0x7fff), signed),
        Op::VPkMaxI16 => |w, i| integer(w, i, |a, b, _| a.max(b), |v| v, signed),
        Op::VPkMinI16 => |w, i| integer(w, i, |a, b, _| a.min(b), |v| v, signed),
        Op::VPkAshrrevI16 => |w, i| integer(w, i, |a, b, _| b >> (a & 15), |v| v, signed),

        Op::VPkAddF16 => |w, i| float(w, i, add),
        Op::VPkMulF16 => |w, i| float(w, i, mul),
        Op::VPkFmaF16 => |w, i| float(w, i, fma),
        Op::VPkMinF16 => |w, i| {
            if w.mode.ieee() { float(w, i, min::<true>) } else { float(w, i, min::<false>) }
        },
        Op::VPkMaxF16 => |w, i| {
            if w.mode.ieee() { float(w, i, max::<true>) } else { float(w, i, max::<false>) }
        },

        Op::VFmaMixF32 => {
            |w, i| mix(w, i, Kind::F32, false, |a, b, c| a.mul_add(b, c).settle3(a, b, c).to_bits())
        }
        Op::VMadMixF32 => |w, i| mix(w, i, Kind::F32, true, |a, b, c| mad(a, b, c).to_bits()),
        Op::VFmaMixloF16 => |w, i| mix(w, i, Kind::F16, false, fma_to_half),
        Op::VMadMixloF16 => |w, i| mix(w, i, Kind::F16, true, mad_to_half),
        Op::VFmaMixhiF16 => |w, i| mix_high(w, i, false, fma_to_half),
        Op::VMadMixhiF16 => |w, i| mix_high(w, i, true, mad_to_half),

        Op::VDot2F32F16 => dot2_f32,
        Op::VDot2I32I16 => |w, i| dot(w, i, true, 16, |a, b| i64::from(a as i16) * i64::from(b as i16)),
        Op::VDot2U32U16 => |w, i| dot(w, i, false, 16, |a, b| i64::from(a & 0xffff) * i64::from(b & 0xffff)),
        Op::VDot4I32I8 => |w, i| dot(w, i, true, 8, |a, b| i64::from(a as i8) * i64::from(b as i8)),
        Op::VDot4U32U8 => |w, i| dot(w, i, false, 8, |a, b| i64::from(a & 0xff) * i64::from(b & 0xff)),
        Op::VDot8I32I4 => |w, i| dot(w, i, true, 4, |a, b| nibble(a) * nibble(b)),
        Op::VDot8U32U4 => |w, i| dot(w, i, false, 4, |a, b| i64::from(a & 0xf) * i64::from(b & 0xf)),
        _ => return None,
    })
}

/// A source such that the low and the high result are computed from its low and high half.
fn halves(wave: &Wave, inst: &Inst, index: usize, kind: Kind) -> Row {
    let row = raw32(wave, inst, index, kind);
    let bit = 1u8 << index;
    let shift = |sel: u8| if sel & bit != 0 { 16 } else { 0 };
    let (low, high) = (shift(inst.modifiers.op_sel), shift(inst.modifiers.op_sel_hi));
    if (low, high) == (0, 16) {
        return row;
    }
    Row(each(|lane| at(&row.0, lane) >> low & 0xffff | at(&row.0, lane) >> high << 16))
}

/// The same for f16 halves, negated and with denormals flushed as the instruction and MODE say.
fn float_halves(wave: &Wave, inst: &Inst, index: usize) -> Row {
    let mut row = halves(wave, inst, index, Kind::PkF16);
    let bit = 1u8 << index;
    if wave.mode.denorm64().flush_in {
        row = Row(each(|lane| half::flush(at(&row.0, lane)) | half::flush(at(&row.0, lane) >> 16) << 16));
    }
    let sign = |neg: u8, sign: u32| if neg & bit != 0 { sign } else { 0 };
    let signs = sign(inst.modifiers.neg, 0x8000) | sign(inst.modifiers.neg_hi, 0x8000_0000);
    if signs != 0 {
        row = Row(each(|lane| at(&row.0, lane) ^ signs));
    }
    row
}

fn unsigned(half: u32) -> i32 {
    (half & 0xffff) as i32
}

fn signed(half: u32) -> i32 {
    i32::from(half as i16)
}

/// An integer operation on exact values; `limit` applies with CLAMP.
#[inline(always)]
fn integer(
    wave: &mut Wave,
    inst: &Inst,
    f: impl Fn(i32, i32, i32) -> i32,
    limit: impl Fn(i32) -> i32,
    value: impl Fn(u32) -> i32,
) {
    let source = |wave: &Wave, inst: &Inst, index: usize| halves(wave, inst, index, Kind::PkI16);
    let result = if inst.modifiers.clamp {
        let half = |a, b, c| limit(f(value(a), value(b), value(c))) as u32 & 0xffff;
        rows3(wave, inst, source, |a, b, c| half(a, b, c) | half(a >> 16, b >> 16, c >> 16) << 16)
    } else {
        let half = |a, b, c| f(value(a), value(b), value(c)) as u32 & 0xffff;
        rows3(wave, inst, source, |a, b, c| half(a, b, c) | half(a >> 16, b >> 16, c >> 16) << 16)
    };
    store32(wave, inst, Kind::PkI16, &result);
}

/// A function applied to the low and to the high halves.
struct BothHalves<F>(F);

impl<F: Fn(u32, u32, u32) -> u32> Apply for BothHalves<F> {
    #[inline(always)]
    fn apply(&self, a: u32, b: u32, c: u32) -> u32 {
        let low = (self.0)(a & 0xffff, b & 0xffff, c & 0xffff);
        low | (self.0)(a >> 16, b >> 16, c >> 16) << 16
    }
}

#[inline(always)]
fn add(a: u32, b: u32, _: u32) -> u32 {
    let (a, b) = (half::to_f32(a), half::to_f32(b));
    half::from_f32((a + b).settle2(a, b))
}

#[inline(always)]
fn mul(a: u32, b: u32, _: u32) -> u32 {
    let (a, b) = (half::to_f32(a), half::to_f32(b));
    half::from_f32((a * b).settle2(a, b))
}

#[inline(always)]
fn fma(a: u32, b: u32, c: u32) -> u32 {
    half::fma(half::to_f32(a), half::to_f32(b), half::to_f32(c))
}

#[inline(always)]
fn min<const IEEE: bool>(a: u32, b: u32, _: u32) -> u32 {
    half::min::<IEEE>(a, b)
}

#[inline(always)]
fn max<const IEEE: bool>(a: u32, b: u32, _: u32) -> u32 {
    half::max::<IEEE>(a, b)
}

/// A float operation on f16 bits.
#[inline(always)]
pub(super) fn float(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32, u32) -> u32) {
    let mut result = rows3(wave, inst, float_halves, BothHalves(f));
    let (flush, dx10) = (wave.mode.denorm64().flush_out, wave.mode.dx10_clamp());
    if flush || inst.modifiers.clamp {
        let finish = |bits: u32| finish_half(bits & 0xffff, flush, inst.modifiers.clamp, dx10);
        result = Row(each(|lane| finish(at(&result.0, lane)) | finish(at(&result.0, lane) >> 16) << 16));
    }
    store32(wave, inst, Kind::PkF16, &result);
}

/// An f16 result with what MODE and CLAMP make of it.
fn finish_half(bits: u32, flush: bool, clamp: bool, dx10: bool) -> u32 {
    let bits = if flush { half::flush(bits) } else { bits };
    if clamp { half::from_f32(clamp32(half::to_f32(bits), dx10)) } else { bits }
}

/// The f32 values of a mixed source: an f16 half if OP_SEL_HI says so. NEG_HI is the absolute value here.
fn mixed(wave: &Wave, inst: &Inst, index: usize, flush: bool) -> Row {
    let m = &inst.modifiers;
    let bit = 1u8 << index;
    let is_half = m.op_sel_hi & bit != 0;
    let mut row = raw32(wave, inst, index, if is_half { Kind::PkF16 } else { Kind::F32 });
    if is_half {
        let shift = if m.op_sel & bit != 0 { 16 } else { 0 };
        let flush = wave.mode.denorm64().flush_in;
        let value = |bits: u32| half::to_f32(if flush { half::flush(bits) } else { bits });
        row = Row(each(|lane| value(at(&row.0, lane) >> shift).to_bits()));
    } else if flush || wave.mode.denorm32().flush_in {
        row = Row(each(|lane| flush32(at(&row.0, lane))));
    }
    let clear = if (m.abs | m.neg_hi) & bit != 0 { 0x8000_0000 } else { 0 };
    let flip = if m.neg & bit != 0 { 0x8000_0000 } else { 0 };
    if clear | flip != 0 {
        row = Row(each(|lane| at(&row.0, lane) & !clear ^ flip));
    }
    row
}

/// The results of a mixed multiply-add; `flush` for those that know no f32 denormals.
#[inline(always)]
fn mixed_results(wave: &Wave, inst: &Inst, flush: bool, f: impl Fn(f32, f32, f32) -> u32) -> Row {
    let source = move |wave: &Wave, inst: &Inst, index: usize| mixed(wave, inst, index, flush);
    rows3(wave, inst, source, Floats(f))
}

/// A function of f32 applied to bits.
struct Floats<F>(F);

impl<F: Fn(f32, f32, f32) -> u32> Apply for Floats<F> {
    #[inline(always)]
    fn apply(&self, a: u32, b: u32, c: u32) -> u32 {
        (self.0)(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c))
    }
}

/// A mixed multiply-add; `flush` for those that know no f32 denormals.
#[inline(always)]
pub(super) fn mix(wave: &mut Wave, inst: &Inst, out: Kind, flush: bool, f: impl Fn(f32, f32, f32) -> u32) {
    let result = mixed_results(wave, inst, flush, f);
    store32(wave, inst, out, &result);
}

/// A mixed multiply-add whose result goes to the upper half of the destination.
#[inline(always)]
pub(super) fn mix_high(wave: &mut Wave, inst: &Inst, flush: bool, f: impl Fn(f32, f32, f32) -> u32) {
    let Dst::Vgpr(n) = inst.dst else { return };
    let result = mixed_results(wave, inst, flush, f);
    let (flush, clamp, dx10) = (wave.mode.denorm64().flush_out, inst.modifiers.clamp, wave.mode.dx10_clamp());
    let old = wave.row(n);
    let merged =
        each(|lane| at(&old.0, lane) & 0xffff | finish_half(at(&result.0, lane), flush, clamp, dx10) << 16);
    wave.write_row(usize::from(n), &Row(merged));
}

/// A fused multiply-add rounded once, to f16.
#[inline(always)]
fn fma_to_half(a: f32, b: f32, c: f32) -> u32 {
    let result = divide::fma_to_odd(a, b, c);
    half::from_f64(result.settle3(f64::from(a), f64::from(b), f64::from(c)))
}

#[inline(always)]
fn mad_to_half(a: f32, b: f32, c: f32) -> u32 {
    half::from_f32(mad(a, b, c))
}

#[inline(always)]
fn mad(a: f32, b: f32, c: f32) -> f32 {
    transcendental::flush32(transcendental::flush32(a * b) + c).settle3(a, b, c)
}

/// V_DOT2_F32_F16: the products are exact, the sum is rounded to f32 after each addition.
fn dot2_f32(wave: &mut Wave, inst: &Inst) {
    let source = |wave: &Wave, inst: &Inst, index: usize| {
        if index < 2 {
            return float_halves(wave, inst, index);
        }
        let row = raw32(wave, inst, index, Kind::F32);
        let clear = if inst.modifiers.abs & 4 != 0 { 0x8000_0000 } else { 0 };
        let flip = if inst.modifiers.neg & 4 != 0 { 0x8000_0000 } else { 0 };
        Row(each(|lane| at(&row.0, lane) & !clear ^ flip))
    };
    let product = |a: u32, b: u32| half::to_f32(a) * half::to_f32(b);
    let result = rows3(wave, inst, source, |a, b, c| {
        (product(a >> 16, b >> 16) + (product(a, b) + f32::from_bits(c))).to_bits()
    });
    store32(wave, inst, Kind::F32, &result);
}

fn nibble(value: u32) -> i64 {
    i64::from((value << 28) as i32 >> 28)
}

/// An integer dot product with accumulation; CLAMP saturates.
#[inline(always)]
fn dot(wave: &mut Wave, inst: &Inst, signed: bool, bits: u32, f: impl Fn(u32, u32) -> i64) {
    let source = |wave: &Wave, inst: &Inst, index: usize| raw32(wave, inst, index, Kind::I32);
    let products = |a: u32, b: u32| (0..32 / bits).map(|n| f(a >> (n * bits), b >> (n * bits))).sum::<i64>();
    let result = if !inst.modifiers.clamp {
        rows3(wave, inst, source, |a, b, c| (products(a, b) as u32).wrapping_add(c))
    } else if signed {
        rows3(wave, inst, source, |a, b, c| saturate(products(a, b) + i64::from(c as i32)))
    } else {
        rows3(wave, inst, source, |a, b, c| saturate_u((products(a, b) + i64::from(c)) as u64))
    };
    store32(wave, inst, Kind::I32, &result);
}
