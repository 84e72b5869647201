//! Integer and bit operations of 32 bits or fewer.

use super::Handler;
use super::convert::{ffbh_i32, ffbh_u32, ffbl_b32};
use super::lanes::{Short, op1, op2, op2_mask, op2_masked, op3};
use super::operand::fetch_mask;
use crate::inst::{Dst, Inst};
use crate::op::Op;
use crate::wave::{LANES, Row, Wave};

/// The handler of an opcode of this module.
pub(super) const fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VMovB32 => |w, i| op1(w, i, |a: u32| a),
        Op::VNotB32 => |w, i| op1(w, i, |a: u32| !a),
        Op::VBfrevB32 => |w, i| op1(w, i, u32::reverse_bits),
        Op::VFfbhU32 => |w, i| op1(w, i, ffbh_u32),
        Op::VFfblB32 => |w, i| op1(w, i, ffbl_b32),
        Op::VFfbhI32 => |w, i| op1(w, i, ffbh_i32),
        Op::VSatPkU8I16 => |w, i| op1(w, i, sat_pk_u8),

        Op::VAndB32 => |w, i| op2(w, i, |a: u32, b: u32| a & b),
        Op::VOrB32 => |w, i| op2(w, i, |a: u32, b: u32| a | b),
        Op::VXorB32 => |w, i| op2(w, i, |a: u32, b: u32| a ^ b),
        Op::VXnorB32 => |w, i| op2(w, i, |a: u32, b: u32| !(a ^ b)),
        Op::VLshlrevB32 => |w, i| op2(w, i, |a: u32, b: u32| b << (a & 31)),
        Op::VLshrrevB32 => |w, i| op2(w, i, |a: u32, b: u32| b >> (a & 31)),
        Op::VAshrrevI32 => |w, i| op2(w, i, |a: u32, b: u32| (b as i32 >> (a & 31)) as u32),
        Op::VMinI32 => |w, i| op2(w, i, |a: u32, b: u32| (a as i32).min(b as i32) as u32),
        Op::VMaxI32 => |w, i| op2(w, i, |a: u32, b: u32| (a as i32).max(b as i32) as u32),
        Op::VMinU32 => |w, i| op2(w, i, |a: u32, b: u32| a.min(b)),
        Op::VMaxU32 => |w, i| op2(w, i, |a: u32, b: u32| a.max(b)),
        Op::VMulLoU32 => |w, i| op2(w, i, |a: u32, b: u32| a.wrapping_mul(b)),
        Op::VMulHiU32 => |w, i| op2(w, i, |a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        Op::VMulHiI32 => |w, i| op2(w, i, |a: u32, b: u32| ((wide(a) * wide(b)) >> 32) as u32),
        Op::VMulI32I24 => |w, i| {
            choose(w, i, |a, b| i24(a).wrapping_mul(i24(b)) as u32, |a, b| saturate(wide24(a) * wide24(b)));
        },
        Op::VMulHiI32I24 => |w, i| op2(w, i, |a: u32, b: u32| ((wide24(a) * wide24(b)) >> 32) as u32),
        Op::VMulU32U24 => |w, i| {
            choose(
                w,
                i,
                |a, b| u24(a).wrapping_mul(u24(b)),
                |a, b| saturate_u(u64::from(u24(a)) * u64::from(u24(b))),
            );
        },
        Op::VMulHiU32U24 => {
            |w, i| op2(w, i, |a: u32, b: u32| ((u64::from(u24(a)) * u64::from(u24(b))) >> 32) as u32)
        }
        Op::VAddU32 => |w, i| choose(w, i, u32::wrapping_add, u32::saturating_add),
        Op::VSubU32 => |w, i| choose(w, i, u32::wrapping_sub, u32::saturating_sub),
        Op::VSubrevU32 => |w, i| choose(w, i, |a, b| b.wrapping_sub(a), |a, b| b.saturating_sub(a)),
        Op::VAddI32 => {
            |w, i| choose(w, i, u32::wrapping_add, |a, b| (a as i32).saturating_add(b as i32) as u32)
        }
        Op::VSubI32 => {
            |w, i| choose(w, i, u32::wrapping_sub, |a, b| (a as i32).saturating_sub(b as i32) as u32)
        }
        Op::VBcntU32B32 => |w, i| op2(w, i, |a: u32, b: u32| a.count_ones().wrapping_add(b)),
        Op::VMbcntLoU32B32 => |w, i| op2_masked(w, i, &BELOW.0, |a, b| a.count_ones().wrapping_add(b)),
        Op::VMbcntHiU32B32 => |w, i| op2_masked(w, i, &BELOW.1, |a, b| a.count_ones().wrapping_add(b)),
        Op::VBfmB32 => |w, i| op2(w, i, |a: u32, b: u32| ((1u32 << (a & 31)) - 1) << (b & 31)),
        Op::VCvtPkU16U32 => |w, i| op2(w, i, |a: u32, b: u32| a.min(0xffff) | b.min(0xffff) << 16),
        Op::VCvtPkI16I32 => |w, i| {
            let half = |a: u32| (a as i32).clamp(-0x8000, 0x7fff) as u32 & 0xffff;
            op2(w, i, move |a: u32, b: u32| half(a) | half(b) << 16);
        },

        Op::VCndmaskB32 => |w, i| {
            let mask = fetch_mask(w, i, 2);
            op2_mask(w, i, mask, |a, b, mask| (a & !mask | b & mask, 0));
        },
        Op::VAddCoU32 => |w, i| carry(w, i, |a, b, _| sum(a, b, 0)),
        Op::VAddcCoU32 => |w, i| carry(w, i, |a, b, c| sum(a, b, c & 1)),
        Op::VSubCoU32 => |w, i| carry(w, i, |a, b, _| difference(a, b, 0)),
        Op::VSubbCoU32 => |w, i| carry(w, i, |a, b, c| difference(a, b, c & 1)),
        Op::VSubrevCoU32 => |w, i| carry(w, i, |a, b, _| difference(b, a, 0)),
        Op::VSubbrevCoU32 => |w, i| carry(w, i, |a, b, c| difference(b, a, c & 1)),

        Op::VAdd3U32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| a.wrapping_add(b).wrapping_add(c)),
        Op::VLshlAddU32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| (a << (b & 31)).wrapping_add(c)),
        Op::VAddLshlU32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| a.wrapping_add(b) << (c & 31)),
        Op::VLshlOrB32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| a << (b & 31) | c),
        Op::VAndOrB32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| a & b | c),
        Op::VOr3B32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| a | b | c),
        Op::VXadU32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| (a ^ b).wrapping_add(c)),
        Op::VBfiB32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| a & b | !a & c),
        Op::VBfeU32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| a >> (b & 31) & ((1u32 << (c & 31)) - 1)),
        Op::VBfeI32 => |w, i| op3(w, i, bfe_i32),
        Op::VAlignbitB32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| (pair(a, b) >> (c & 31)) as u32),
        Op::VAlignbyteB32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| (pair(a, b) >> (8 * (c & 3))) as u32),
        Op::VPermB32 => |w, i| op3(w, i, perm),
        Op::VLerpU8 => |w, i| op3(w, i, lerp),
        Op::VMin3I32 => {
            |w, i| op3(w, i, |a: u32, b: u32, c: u32| (a as i32).min(b as i32).min(c as i32) as u32)
        }
        Op::VMax3I32 => {
            |w, i| op3(w, i, |a: u32, b: u32, c: u32| (a as i32).max(b as i32).max(c as i32) as u32)
        }
        Op::VMed3I32 => {
            |w, i| op3(w, i, |a: u32, b: u32, c: u32| median(a as i32, b as i32, c as i32) as u32)
        }
        Op::VMin3U32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| a.min(b).min(c)),
        Op::VMax3U32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| a.max(b).max(c)),
        Op::VMed3U32 => |w, i| op3(w, i, |a: u32, b: u32, c: u32| median(a, b, c)),
        Op::VMadI32I24 => |w, i| {
            choose3(
                w,
                i,
                |a, b, c| (i24(a).wrapping_mul(i24(b)) as u32).wrapping_add(c),
                |a, b, c| saturate(wide24(a) * wide24(b) + wide(c)),
            );
        },
        Op::VMadU32U24 => |w, i| {
            choose3(
                w,
                i,
                |a, b, c| u24(a).wrapping_mul(u24(b)).wrapping_add(c),
                |a, b, c| saturate_u(u64::from(u24(a)) * u64::from(u24(b)) + u64::from(c)),
            );
        },
        Op::VSadU8 => |w, i| sad(w, i, |a, b| u64::from(sad_u8(a, b))),
        Op::VSadHiU8 => |w, i| sad(w, i, |a, b| u64::from(sad_u8(a, b)) << 16),
        Op::VSadU16 => |w, i| {
            sad(w, i, |a, b| u64::from((a & 0xffff).abs_diff(b & 0xffff) + (a >> 16).abs_diff(b >> 16)))
        },
        Op::VSadU32 => |w, i| sad(w, i, |a, b| u64::from(a.abs_diff(b))),
        Op::VMsadU8 => |w, i| sad(w, i, |a, b| u64::from(masked_sad_u8(a, b))),
        _ => return half_handler(op),
    })
}

/// The handler of a 16-bit operation.
const fn half_handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VAddU16 => {
            |w, i| choose16(w, i, |a, b| a + b, |a, b| u32::from((a as u16).saturating_add(b as u16)))
        }
        Op::VSubU16 => {
            |w, i| choose16(w, i, u32::wrapping_sub, |a, b| u32::from((a as u16).saturating_sub(b as u16)))
        }
        Op::VSubrevU16 => |w, i| {
            choose16(w, i, |a, b| b.wrapping_sub(a), |a, b| u32::from((b as u16).saturating_sub(a as u16)));
        },
        Op::VAddI16 => |w, i| choose16(w, i, |a, b| a + b, |a, b| (a as i16).saturating_add(b as i16) as u32),
        Op::VSubI16 => {
            |w, i| choose16(w, i, u32::wrapping_sub, |a, b| (a as i16).saturating_sub(b as i16) as u32)
        }
        Op::VMulLoU16 => |w, i| choose16(w, i, |a, b| a * b, |a, b| a * b),
        Op::VLshlrevB16 => |w, i| choose16(w, i, |a, b| b << (a & 15), |a, b| b << (a & 15)),
        Op::VLshrrevB16 => |w, i| choose16(w, i, |a, b| b >> (a & 15), |a, b| b >> (a & 15)),
        Op::VAshrrevI16 => |w, i| {
            op2(w, i, |a: Short, b: Short| Short((b.0 as i16 >> (a.0 & 15)) as u32));
        },
        Op::VMaxU16 => |w, i| choose16(w, i, u32::max, u32::max),
        Op::VMinU16 => |w, i| choose16(w, i, u32::min, u32::min),
        Op::VMaxI16 => |w, i| op2(w, i, |a: Short, b: Short| Short((a.0 as i16).max(b.0 as i16) as u32)),
        Op::VMinI16 => |w, i| op2(w, i, |a: Short, b: Short| Short((a.0 as i16).min(b.0 as i16) as u32)),
        Op::VMin3I16 => |w, i| triple16(w, i, |a, b, c| a.min(b).min(c)),
        Op::VMax3I16 => |w, i| triple16(w, i, |a, b, c| a.max(b).max(c)),
        Op::VMed3I16 => |w, i| triple16(w, i, median),
        Op::VMin3U16 => |w, i| triple16u(w, i, |a, b, c| a.min(b).min(c)),
        Op::VMax3U16 => |w, i| triple16u(w, i, |a, b, c| a.max(b).max(c)),
        Op::VMed3U16 => |w, i| triple16u(w, i, median),
        Op::VMadU16 | Op::VMadLegacyU16 => |w, i| {
            let clamp = i.modifiers.clamp;
            triple16u(w, i, move |a, b, c| {
                let exact = u64::from(a) * u64::from(b) + u64::from(c);
                if clamp { exact.min(0xffff) as u32 } else { exact as u32 }
            });
        },
        Op::VMadI16 | Op::VMadLegacyI16 => |w, i| {
            let clamp = i.modifiers.clamp;
            triple16(w, i, move |a, b, c| {
                let exact = i64::from(a) * i64::from(b) + i64::from(c);
                if clamp { exact.clamp(-0x8000, 0x7fff) as i32 } else { exact as i32 }
            });
        },
        Op::VMadU32U16 => |w, i| {
            let clamp = i.modifiers.clamp;
            op3(w, i, move |a: Short, b: Short, c: u32| {
                let exact = u64::from(a.0 & 0xffff) * u64::from(b.0 & 0xffff) + u64::from(c);
                if clamp { saturate_u(exact) } else { exact as u32 }
            });
        },
        Op::VMadI32I16 => |w, i| {
            let clamp = i.modifiers.clamp;
            op3(w, i, move |a: Short, b: Short, c: u32| {
                let exact = i64::from(a.0 as i16) * i64::from(b.0 as i16) + wide(c);
                if clamp { saturate(exact) } else { exact as u32 }
            });
        },
        _ => return None,
    })
}

/// The operation without and with CLAMP.
#[inline(always)]
fn choose(wave: &mut Wave, inst: &Inst, plain: impl Fn(u32, u32) -> u32, clamped: impl Fn(u32, u32) -> u32) {
    if inst.modifiers.clamp { op2(wave, inst, clamped) } else { op2(wave, inst, plain) }
}

/// The operation of three sources without and with CLAMP.
#[inline(always)]
fn choose3(
    wave: &mut Wave,
    inst: &Inst,
    plain: impl Fn(u32, u32, u32) -> u32,
    clamped: impl Fn(u32, u32, u32) -> u32,
) {
    if inst.modifiers.clamp { op3(wave, inst, clamped) } else { op3(wave, inst, plain) }
}

/// The 16-bit operation without and with CLAMP, on zero-extended values.
#[inline(always)]
fn choose16(
    wave: &mut Wave,
    inst: &Inst,
    plain: impl Fn(u32, u32) -> u32,
    clamped: impl Fn(u32, u32) -> u32,
) {
    if inst.modifiers.clamp {
        op2(wave, inst, |a: Short, b: Short| Short(clamped(a.0 & 0xffff, b.0 & 0xffff)));
    } else {
        op2(wave, inst, |a: Short, b: Short| Short(plain(a.0 & 0xffff, b.0 & 0xffff)));
    }
}

#[inline(always)]
fn triple16(wave: &mut Wave, inst: &Inst, f: impl Fn(i32, i32, i32) -> i32) {
    let signed = |a: Short| i32::from(a.0 as i16);
    op3(wave, inst, move |a: Short, b: Short, c: Short| Short(f(signed(a), signed(b), signed(c)) as u32));
}

#[inline(always)]
fn triple16u(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32, u32) -> u32) {
    op3(wave, inst, move |a: Short, b: Short, c: Short| Short(f(a.0 & 0xffff, b.0 & 0xffff, c.0 & 0xffff)));
}

/// An addition or subtraction with a carry in each lane; CLAMP makes the result the limit that it went beyond.
#[inline(always)]
fn carry(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32, u32) -> (u32, u32)) {
    let carry_in = fetch_mask(wave, inst, 2);
    let out = if inst.modifiers.clamp {
        let limit = if matches!(inst.op, Op::VAddCoU32 | Op::VAddcCoU32) { u32::MAX } else { 0 };
        op2_mask(wave, inst, carry_in, |a, b, c| {
            let (value, out) = f(a, b, c);
            (if out != 0 { limit } else { value }, out)
        })
    } else {
        op2_mask(wave, inst, carry_in, f)
    };
    if let Dst::Sgpr(n) = inst.sdst {
        wave.set_sgpr64(n, out);
    }
}

#[inline(always)]
fn sum(a: u32, b: u32, carry: u32) -> (u32, u32) {
    let partial = a.wrapping_add(b);
    let total = partial.wrapping_add(carry);
    (total, super::lanes::ones(partial < a || total < partial))
}

#[inline(always)]
fn difference(a: u32, b: u32, borrow: u32) -> (u32, u32) {
    let total = a.wrapping_sub(b).wrapping_sub(borrow);
    (total, super::lanes::ones(a < b || (a == b && borrow != 0)))
}

/// Sums of absolute differences, with the third source added; CLAMP saturates.
#[inline(always)]
fn sad(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32) -> u64) {
    if inst.modifiers.clamp {
        op3(wave, inst, |a: u32, b: u32, c: u32| saturate_u(f(a, b) + u64::from(c)));
    } else {
        op3(wave, inst, |a: u32, b: u32, c: u32| (f(a, b) as u32).wrapping_add(c));
    }
}

/// The sum of absolute differences of four bytes.
#[inline(always)]
pub(super) fn sad_u8(a: u32, b: u32) -> u32 {
    let byte = |n: u32| (a >> n & 0xff).abs_diff(b >> n & 0xff);
    byte(0) + byte(8) + byte(16) + byte(24)
}

/// The same, without the bytes that are zero in `b`.
#[inline(always)]
pub(super) fn masked_sad_u8(a: u32, b: u32) -> u32 {
    let byte = |n: u32| if b >> n & 0xff == 0 { 0 } else { (a >> n & 0xff).abs_diff(b >> n & 0xff) };
    byte(0) + byte(8) + byte(16) + byte(24)
}

/// Ones for the lanes below each lane, those of the lower and of the upper half of the wave.
static BELOW: (Row, Row) = {
    let (mut low, mut high) = ([0; LANES], [0; LANES]);
    let (mut rest_low, mut rest_high): (&mut [u32], &mut [u32]) = (&mut low, &mut high);
    let mut below = 0u64;
    while let (Some((first_low, tail_low)), Some((first_high, tail_high))) =
        (rest_low.split_first_mut(), rest_high.split_first_mut())
    {
        (*first_low, *first_high) = (below as u32, (below >> 32) as u32);
        below = below << 1 | 1;
        (rest_low, rest_high) = (tail_low, tail_high);
    }
    (Row(low), Row(high))
};

#[inline(always)]
fn u24(a: u32) -> u32 {
    a & 0xff_ffff
}

#[inline(always)]
fn i24(a: u32) -> i32 {
    (a << 8) as i32 >> 8
}

#[inline(always)]
fn wide24(a: u32) -> i64 {
    i64::from(i24(a))
}

#[inline(always)]
fn wide(a: u32) -> i64 {
    i64::from(a as i32)
}

#[inline(always)]
fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// An exact result limited to what 32 signed bits hold.
#[inline(always)]
pub(super) fn saturate(value: i64) -> u32 {
    value.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as u32
}

/// An exact result limited to what 32 bits hold.
#[inline(always)]
pub(super) fn saturate_u(value: u64) -> u32 {
    value.min(u64::from(u32::MAX)) as u32
}

#[inline(always)]
fn median<T: Ord + Copy>(a: T, b: T, c: T) -> T {
    a.max(b).min(a.min(b).max(c))
}

/// V_BFE_I32: a field that reaches beyond bit 31 ends there.
#[inline(always)]
fn bfe_i32(a: u32, b: u32, c: u32) -> u32 {
    let (offset, width) = (b & 31, c & 31);
    if width == 0 {
        return 0;
    }
    let up = 32u32.saturating_sub(offset + width);
    let down = (offset + up).min(31);
    ((a << up) as i32 >> down) as u32
}

/// V_PERM_B32: each byte of the selector picks a byte of `a:b`, a copied sign bit, 0x00 or 0xff.
#[inline(always)]
fn perm(a: u32, b: u32, selector: u32) -> u32 {
    let data = pair(a, b);
    let byte = |n: u32| {
        let pick = selector >> n & 0xff;
        let value = match pick {
            0..=7 => (data >> (8 * pick)) as u32 & 0xff,
            8..=11 => {
                if data >> (16 * (pick - 8) + 15) & 1 == 1 {
                    0xff
                } else {
                    0
                }
            }
            12 => 0,
            _ => 0xff,
        };
        value << n
    };
    byte(0) | byte(8) | byte(16) | byte(24)
}

/// V_LERP_U8: averages of bytes, rounded up where the third source's byte is odd.
#[inline(always)]
fn lerp(a: u32, b: u32, c: u32) -> u32 {
    let byte = |n: u32| (((a >> n & 0xff) + (b >> n & 0xff) + (c >> n & 1)) >> 1) << n;
    byte(0) | byte(8) | byte(16) | byte(24)
}

fn sat_pk_u8(a: u32) -> u32 {
    let byte = |half: u32| i32::from(half as i16).clamp(0, 255) as u32;
    byte(a & 0xffff) | byte(a >> 16) << 8
}
