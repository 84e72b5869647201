//! VOP3P: operations on two 16-bit halves, mixed precision and dot products.

use super::Handler;
use super::float16::fma;
use super::float32::{max, min};
use super::integer::{saturate, saturate_u};
use super::lanes::{at, each};
use super::operand::{clamp32, flush32, raw32, store32};
use super::transcendental;
use super::{divide, half};
use crate::inst::{Dst, Inst};
use crate::op::{Kind, Op};
use crate::wave::{LANES, Row, Wave};

/// The handler of an opcode of this module.
pub(super) const fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VPkAddU16 => |w, i| integer(w, i, |a, b, _| a + b, |v| v.clamp(0, 0xffff), unsigned),
        Op::VPkSubU16 => |w, i| integer(w, i, |a, b, _| a - b, |v| v.clamp(0, 0xffff), unsigned),
        Op::VPkMadU16 => |w, i| integer(w, i, |a, b, c| a * b + c, |v| v.clamp(0, 0xffff), unsigned),
        Op::VPkMulLoU16 => |w, i| integer(w, i, |a, b, _| a * b, |v| v, unsigned),
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

        Op::VPkAddF16 => |w, i| float(w, i, |a, b, _| half::from_f32(half::to_f32(a) + half::to_f32(b))),
        Op::VPkMulF16 => |w, i| float(w, i, |a, b, _| half::from_f32(half::to_f32(a) * half::to_f32(b))),
        Op::VPkFmaF16 => |w, i| float(w, i, |a, b, c| fma(half::to_f32(a), half::to_f32(b), half::to_f32(c))),
        Op::VPkMinF16 => |w, i| {
            let ieee = w.mode.ieee();
            float(w, i, move |a, b, _| half::from_f32(min(half::to_f32(a), half::to_f32(b), ieee)));
        },
        Op::VPkMaxF16 => |w, i| {
            let ieee = w.mode.ieee();
            float(w, i, move |a, b, _| half::from_f32(max(half::to_f32(a), half::to_f32(b), ieee)));
        },

        Op::VFmaMixF32 => |w, i| mix(w, i, Kind::F32, false, |a, b, c| a.mul_add(b, c).to_bits()),
        Op::VMadMixF32 => |w, i| mix(w, i, Kind::F32, true, |a, b, c| mad(a, b, c).to_bits()),
        Op::VFmaMixloF16 => |w, i| mix(w, i, Kind::F16, false, fma_to_half),
        Op::VMadMixloF16 => |w, i| mix(w, i, Kind::F16, true, |a, b, c| half::from_f32(mad(a, b, c))),
        Op::VFmaMixhiF16 => |w, i| mix_high(w, i, false, fma_to_half),
        Op::VMadMixhiF16 => |w, i| mix_high(w, i, true, |a, b, c| half::from_f32(mad(a, b, c))),

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

/// The halves of `src[index]` that the low result and the high result are computed from, in the low 16 bits.
fn halves(wave: &Wave, inst: &Inst, index: usize, kind: Kind) -> (Row, Row) {
    let row = raw32(wave, inst, index, kind);
    let half = |high: bool| {
        if high {
            Row(each(|lane| at(&row.0, lane) >> 16))
        } else {
            Row(each(|lane| at(&row.0, lane) & 0xffff))
        }
    };
    let bit = 1u8 << index;
    (half(inst.modifiers.op_sel & bit != 0), half(inst.modifiers.op_sel_hi & bit != 0))
}

fn unsigned(half: u32) -> i64 {
    i64::from(half & 0xffff)
}

fn signed(half: u32) -> i64 {
    i64::from(half as i16)
}

/// An integer operation on exact values; `limit` applies with CLAMP.
#[inline(always)]
fn integer(
    wave: &mut Wave,
    inst: &Inst,
    f: impl Fn(i64, i64, i64) -> i64,
    limit: impl Fn(i64) -> i64,
    value: impl Fn(u32) -> i64,
) {
    let clamp = inst.modifiers.clamp;
    let [a, b, c] = std::array::from_fn(|index| halves(wave, inst, index, Kind::PkI16));
    let half = |a: u32, b: u32, c: u32| {
        let exact = f(value(a), value(b), value(c));
        (if clamp { limit(exact) } else { exact }) as u32 & 0xffff
    };
    let result = each(|lane| {
        let low = half(at(&a.0.0, lane), at(&b.0.0, lane), at(&c.0.0, lane));
        low | half(at(&a.1.0, lane), at(&b.1.0, lane), at(&c.1.0, lane)) << 16
    });
    store32(wave, inst, Kind::PkI16, &Row(result));
}

/// A float operation on f16 bits.
#[inline(always)]
fn float(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32, u32) -> u32) {
    let denorm = wave.mode.denorm64();
    let dx10 = wave.mode.dx10_clamp();
    let clamp = inst.modifiers.clamp;
    let source = |index: usize| {
        let (low, high) = halves(wave, inst, index, Kind::PkF16);
        let bit = 1u8 << index;
        let adjust = |row: Row, negate: bool| {
            let sign = if negate { 0x8000 } else { 0 };
            let flushed = |bits: u32| if denorm.flush_in { half::flush(bits) } else { bits };
            Row(each(|lane| flushed(at(&row.0, lane)) ^ sign))
        };
        (adjust(low, inst.modifiers.neg & bit != 0), adjust(high, inst.modifiers.neg_hi & bit != 0))
    };
    let [a, b, c] = std::array::from_fn(source);
    let half = |a: u32, b: u32, c: u32| {
        let mut bits = f(a, b, c);
        if denorm.flush_out {
            bits = half::flush(bits);
        }
        if clamp {
            bits = half::from_f32(clamp32(half::to_f32(bits), dx10));
        }
        bits
    };
    let result = each(|lane| {
        let low = half(at(&a.0.0, lane), at(&b.0.0, lane), at(&c.0.0, lane));
        low | half(at(&a.1.0, lane), at(&b.1.0, lane), at(&c.1.0, lane)) << 16
    });
    store32(wave, inst, Kind::PkF16, &Row(result));
}

/// The f32 values of a mixed source: an f16 half if OP_SEL_HI says so. NEG_HI is the absolute value here.
fn mixed(wave: &Wave, inst: &Inst, index: usize, flush: bool) -> [f32; LANES] {
    let m = &inst.modifiers;
    let bit = 1u8 << index;
    let is_half = m.op_sel_hi & bit != 0;
    let row = raw32(wave, inst, index, if is_half { Kind::PkF16 } else { Kind::F32 });
    let shift = if is_half && m.op_sel & bit != 0 { 16 } else { 0 };
    let flush32_in = flush || wave.mode.denorm32().flush_in;
    let flush16_in = wave.mode.denorm64().flush_in;
    let (abs, neg) = ((m.abs | m.neg_hi) & bit != 0, m.neg & bit != 0);
    each(|lane| {
        let bits = at(&row.0, lane);
        let value = if is_half {
            let bits = bits >> shift & 0xffff;
            half::to_f32(if flush16_in { half::flush(bits) } else { bits })
        } else {
            f32::from_bits(if flush32_in { flush32(bits) } else { bits })
        };
        let value = if abs { value.abs() } else { value };
        if neg { -value } else { value }
    })
}

/// A mixed multiply-add; `flush` for those that know no f32 denormals.
#[inline(always)]
fn mix(wave: &mut Wave, inst: &Inst, out: Kind, flush: bool, f: impl Fn(f32, f32, f32) -> u32) {
    let [a, b, c] = std::array::from_fn(|index| mixed(wave, inst, index, flush));
    let result = each(|lane| f(at(&a, lane), at(&b, lane), at(&c, lane)));
    store32(wave, inst, out, &Row(result));
}

/// A mixed multiply-add whose result goes to the upper half of the destination.
#[inline(always)]
fn mix_high(wave: &mut Wave, inst: &Inst, flush: bool, f: impl Fn(f32, f32, f32) -> u32) {
    let Dst::Vgpr(n) = inst.dst else { return };
    let [a, b, c] = std::array::from_fn(|index| mixed(wave, inst, index, flush));
    let flush_out = wave.mode.denorm64().flush_out;
    let (clamp, dx10) = (inst.modifiers.clamp, wave.mode.dx10_clamp());
    let old = *wave.row(n);
    let result = each(|lane| {
        let mut bits = f(at(&a, lane), at(&b, lane), at(&c, lane));
        if flush_out {
            bits = half::flush(bits);
        }
        if clamp {
            bits = half::from_f32(clamp32(half::to_f32(bits), dx10));
        }
        old.lane(lane) & 0xffff | bits << 16
    });
    wave.write_row(usize::from(n), &Row(result));
}

/// A fused multiply-add rounded once, to f16.
#[inline(always)]
fn fma_to_half(a: f32, b: f32, c: f32) -> u32 {
    half::from_f64(divide::fma_to_odd(a, b, c))
}

#[inline(always)]
fn mad(a: f32, b: f32, c: f32) -> f32 {
    transcendental::flush32(transcendental::flush32(a * b) + c)
}

/// V_DOT2_F32_F16: the products are exact, the sum is rounded to f32 after each addition.
fn dot2_f32(wave: &mut Wave, inst: &Inst) {
    let source = |index: usize| {
        let (low, high) = halves(wave, inst, index, Kind::PkF16);
        let bit = 1u8 << index;
        let value = |row: Row, negate: bool| -> [f32; LANES] {
            each(|lane| if negate { -half::to_f32(at(&row.0, lane)) } else { half::to_f32(at(&row.0, lane)) })
        };
        (value(low, inst.modifiers.neg & bit != 0), value(high, inst.modifiers.neg_hi & bit != 0))
    };
    let [a, b] = std::array::from_fn(source);
    let c = raw32(wave, inst, 2, Kind::F32);
    let (abs, neg) = (inst.modifiers.abs & 4 != 0, inst.modifiers.neg & 4 != 0);
    let result = each(|lane| {
        let c = f32::from_bits(at(&c.0, lane));
        let c = if abs { c.abs() } else { c };
        let c = if neg { -c } else { c };
        let first = at(&a.0, lane) * at(&b.0, lane) + c;
        (at(&a.1, lane) * at(&b.1, lane) + first).to_bits()
    });
    store32(wave, inst, Kind::F32, &Row(result));
}

fn nibble(value: u32) -> i64 {
    i64::from((value << 28) as i32 >> 28)
}

/// An integer dot product with accumulation; CLAMP saturates.
#[inline(always)]
fn dot(wave: &mut Wave, inst: &Inst, signed: bool, bits: u32, f: impl Fn(u32, u32) -> i64) {
    let [a, b, c] = std::array::from_fn(|index| raw32(wave, inst, index, Kind::I32));
    let clamp = inst.modifiers.clamp;
    let result = each(|lane| {
        let (a, b, c) = (at(&a.0, lane), at(&b.0, lane), at(&c.0, lane));
        let products: i64 = (0..32 / bits).map(|n| f(a >> (n * bits), b >> (n * bits))).sum();
        let exact = products + if signed { i64::from(c as i32) } else { i64::from(c) };
        match (clamp, signed) {
            (false, _) => exact as u32,
            (true, true) => saturate(exact),
            (true, false) => saturate_u(exact as u64),
        }
    });
    store32(wave, inst, Kind::I32, &Row(result));
}
