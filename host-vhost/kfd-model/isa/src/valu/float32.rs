//! f32 operations.

use super::Handler;
use super::lanes::{op1, op2, op3};
use super::nan::Settle;
use super::transcendental::{cos, exp2, flush32, log2, rcp32, rsq32, sin, sqrt32};
use super::{convert, divide, half};
use crate::inst::{Dst, Inst};
use crate::op::Op;
use crate::wave::Wave;

/// The handler of an opcode of this module.
pub(super) const fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VAddF32 => |w, i| op2(w, i, |a: f32, b: f32| (a + b).settle2(a, b)),
        Op::VSubF32 => |w, i| op2(w, i, |a: f32, b: f32| (a - b).settle2(a, b)),
        Op::VSubrevF32 => |w, i| op2(w, i, |a: f32, b: f32| (b - a).settle2(a, b)),
        Op::VMulF32 => |w, i| op2(w, i, |a: f32, b: f32| (a * b).settle2(a, b)),
        Op::VMulLegacyF32 => |w, i| op2(w, i, mul_legacy),
        Op::VMinF32 => |w, i| {
            if w.mode.ieee() { op2(w, i, min::<true>) } else { op2(w, i, min::<false>) }
        },
        Op::VMaxF32 => |w, i| {
            if w.mode.ieee() { op2(w, i, max::<true>) } else { op2(w, i, max::<false>) }
        },
        Op::VFmaF32 | Op::VFmacF32 => {
            |w, i| op3(w, i, |a: f32, b: f32, c: f32| a.mul_add(b, c).settle3(a, b, c))
        }
        Op::VMadF32 | Op::VMacF32 | Op::VMadmkF32 | Op::VMadakF32 => |w, i| op3(w, i, mad),
        Op::VMadLegacyF32 => |w, i| {
            op3(
                w,
                i,
                |a: f32, b: f32, c: f32| if a == 0.0 || b == 0.0 { mad(0.0, 0.0, c) } else { mad(a, b, c) },
            );
        },
        Op::VMin3F32 => |w, i| {
            if w.mode.ieee() { op3(w, i, min3::<true>) } else { op3(w, i, min3::<false>) }
        },
        Op::VMax3F32 => |w, i| {
            if w.mode.ieee() { op3(w, i, max3::<true>) } else { op3(w, i, max3::<false>) }
        },
        Op::VMed3F32 => |w, i| {
            if w.mode.ieee() { op3(w, i, median::<true>) } else { op3(w, i, median::<false>) }
        },
        Op::VLdexpF32 => |w, i| op2(w, i, |a: f32, b: u32| convert::ldexp32(a, b as i32)),

        Op::VFractF32 => |w, i| op1(w, i, convert::fract32),
        Op::VTruncF32 => |w, i| op1(w, i, |a: f32| convert::quieted32(a.trunc())),
        Op::VCeilF32 => |w, i| op1(w, i, |a: f32| convert::quieted32(a.ceil())),
        Op::VRndneF32 => |w, i| op1(w, i, |a: f32| convert::quieted32(a.round_ties_even())),
        Op::VFloorF32 => |w, i| op1(w, i, |a: f32| convert::quieted32(a.floor())),
        Op::VFrexpExpI32F32 => |w, i| op1(w, i, |a: f32| convert::frexp_exp32(a) as u32),
        Op::VFrexpMantF32 => |w, i| op1(w, i, convert::frexp_mant32),

        Op::VExpF32 | Op::VExpLegacyF32 => |w, i| op1(w, i, exp2),
        Op::VLogF32 | Op::VLogLegacyF32 => |w, i| op1(w, i, log2),
        Op::VRcpF32 | Op::VRcpIflagF32 => |w, i| op1(w, i, rcp32),
        Op::VRsqF32 => |w, i| op1(w, i, rsq32),
        Op::VSqrtF32 => |w, i| op1(w, i, sqrt32),
        Op::VSinF32 => |w, i| op1(w, i, sin),
        Op::VCosF32 => |w, i| op1(w, i, cos),

        Op::VCvtF32I32 => |w, i| op1(w, i, |a: u32| a as i32 as f32),
        Op::VCvtF32U32 => |w, i| op1(w, i, |a: u32| a as f32),
        Op::VCvtU32F32 => |w, i| op1(w, i, |a: f32| a as u32),
        Op::VCvtI32F32 => |w, i| op1(w, i, |a: f32| a as i32 as u32),
        Op::VCvtRpiI32F32 => |w, i| op1(w, i, |a: f32| convert::floor_to_i32(round_half_up(a))),
        Op::VCvtFlrI32F32 => |w, i| op1(w, i, |a: f32| convert::floor_to_i32(a.floor())),
        Op::VCvtOffF32I4 => |w, i| op1(w, i, convert::offset_i4),
        Op::VCvtF32Ubyte0 => |w, i| op1(w, i, |a: u32| (a & 0xff) as f32),
        Op::VCvtF32Ubyte1 => |w, i| op1(w, i, |a: u32| (a >> 8 & 0xff) as f32),
        Op::VCvtF32Ubyte2 => |w, i| op1(w, i, |a: u32| (a >> 16 & 0xff) as f32),
        Op::VCvtF32Ubyte3 => |w, i| op1(w, i, |a: u32| (a >> 24) as f32),
        Op::VCvtPkU8F32 => |w, i| {
            op3(w, i, |a: f32, b: u32, c: u32| {
                let shift = 8 * (b & 3);
                c & !(0xff << shift) | convert::to_u8(a) << shift
            });
        },
        Op::VCvtPkaccumU8F32 => |w, i| {
            let Dst::Vgpr(n) = i.dst else { return };
            let mut accumulate = *i;
            let [a, b, ..] = i.src;
            accumulate.src = [a, b, crate::inst::Src::Vgpr(n), crate::inst::Src::None];
            op3(w, &accumulate, |a: f32, b: u32, c: u32| {
                let shift = 8 * (b & 3);
                c & !(0xff << shift) | convert::to_u8(a) << shift
            });
        },
        Op::VCvtPknormI16F32 => {
            |w, i| op2(w, i, |a: f32, b: f32| convert::norm_i16(a) | convert::norm_i16(b) << 16)
        }
        Op::VCvtPknormU16F32 => {
            |w, i| op2(w, i, |a: f32, b: f32| convert::norm_u16(a) | convert::norm_u16(b) << 16)
        }
        Op::VCvtPkrtzF16F32 => |w, i| {
            if w.mode.denorm64().flush_out { op2(w, i, pack_flushed) } else { op2(w, i, pack_towards_zero) }
        },

        Op::VCubeidF32 => |w, i| op3(w, i, |x: f32, y: f32, z: f32| cube(x, y, z).0),
        Op::VCubescF32 => |w, i| op3(w, i, |x: f32, y: f32, z: f32| cube(x, y, z).1),
        Op::VCubetcF32 => |w, i| op3(w, i, |x: f32, y: f32, z: f32| cube(x, y, z).2),
        Op::VCubemaF32 => |w, i| op3(w, i, |x: f32, y: f32, z: f32| cube(x, y, z).3),

        Op::VDivFixupF32 => |w, i| op3(w, i, divide::fixup32),
        Op::VDivFmasF32 => div_fmas,
        Op::VDivScaleF32 => div_scale,
        _ => return None,
    })
}

/// The NaN of an operation that was given one, quiet.
#[inline(always)]
fn is_signalling(a: f32) -> bool {
    a.is_nan() & (a.to_bits() & 1 << 22 == 0)
}

/// V_MIN_F32: the other operand if one is a NaN; -0 is less than +0; a signalling NaN wins in IEEE mode, made quiet.
#[inline(always)]
fn min<const IEEE: bool>(a: f32, b: f32) -> f32 {
    // Equal numbers have equal bits, except for zeros, of which the negative one has the sign.
    let equal = f32::from_bits(a.to_bits() | b.to_bits());
    let ordered = if a == b {
        equal
    } else if a < b {
        a
    } else {
        b
    };
    choose::<IEEE>(a, b, ordered)
}

/// V_MAX_F32; see [`min`].
#[inline(always)]
fn max<const IEEE: bool>(a: f32, b: f32) -> f32 {
    let equal = f32::from_bits(a.to_bits() & b.to_bits());
    let ordered = if a == b {
        equal
    } else if a > b {
        a
    } else {
        b
    };
    choose::<IEEE>(a, b, ordered)
}

#[inline(always)]
fn choose<const IEEE: bool>(a: f32, b: f32, ordered: f32) -> f32 {
    let other = if b.is_nan() { a } else { ordered };
    let other = if a.is_nan() { b } else { other };
    let other = if IEEE & is_signalling(b) { divide::quiet32(b) } else { other };
    if IEEE & is_signalling(a) { divide::quiet32(a) } else { other }
}

#[inline(always)]
fn min3<const IEEE: bool>(a: f32, b: f32, c: f32) -> f32 {
    min::<IEEE>(min::<IEEE>(a, b), c)
}

#[inline(always)]
fn max3<const IEEE: bool>(a: f32, b: f32, c: f32) -> f32 {
    max::<IEEE>(max::<IEEE>(a, b), c)
}

/// V_MED3_F32: the middle one; the least one if one is a NaN.
#[inline(always)]
fn median<const IEEE: bool>(a: f32, b: f32, c: f32) -> f32 {
    let least = min3::<IEEE>(a, b, c);
    let (low, high) = if order(a) < order(b) { (a, b) } else { (b, a) };
    let middle = if order(c) < order(low) {
        low
    } else if order(c) > order(high) {
        high
    } else {
        c
    };
    if a.is_nan() | b.is_nan() | c.is_nan() { least } else { middle }
}

/// An integer in the order of the numbers, -0 before +0.
#[inline(always)]
fn order(a: f32) -> i32 {
    let signed = a.to_bits() as i32;
    signed ^ (signed >> 31 & 0x7fff_ffff)
}

/// V_MAD_F32: product and sum are rounded on their own, and denormals count as zero whatever MODE says (LLVM,
/// `SITargetLowering::isFMADLegal`).
#[inline(always)]
fn mad(a: f32, b: f32, c: f32) -> f32 {
    flush32(flush32(flush32(a) * flush32(b)) + flush32(c)).settle3(a, b, c)
}

/// V_MUL_LEGACY_F32: zero times anything is zero.
#[inline(always)]
fn mul_legacy(a: f32, b: f32) -> f32 {
    if a == 0.0 || b == 0.0 { 0.0 } else { (a * b).settle2(a, b) }
}

/// floor(a + 0.5) without the rounding of the sum.
#[inline(always)]
fn round_half_up(a: f32) -> f32 {
    let floor = a.floor();
    if a - floor >= 0.5 { floor + 1.0 } else { floor }
}

/// Face, s, t and twice the major axis of a direction in a cube map.
#[inline(always)]
fn cube(x: f32, y: f32, z: f32) -> (f32, f32, f32, f32) {
    if z.abs() >= x.abs() && z.abs() >= y.abs() {
        if z < 0.0 { (5.0, -x, -y, 2.0 * z) } else { (4.0, x, -y, 2.0 * z) }
    } else if y.abs() >= x.abs() {
        if y < 0.0 { (3.0, x, -z, 2.0 * y) } else { (2.0, x, z, 2.0 * y) }
    } else if x < 0.0 {
        (1.0, z, -y, 2.0 * x)
    } else {
        (0.0, -z, -y, 2.0 * x)
    }
}

/// V_DIV_FMAS_F32 reads VCC.
fn div_fmas(wave: &mut Wave, inst: &Inst) {
    super::lanes::op3_mask(wave, inst, divide::fmas32);
}

/// V_DIV_SCALE_F32 writes a mask.
fn div_scale(wave: &mut Wave, inst: &Inst) {
    super::lanes::op3_flag(wave, inst, divide::scale32);
}

#[inline(always)]
fn pack_towards_zero(a: f32, b: f32) -> u32 {
    convert::f16_towards_zero(a) | convert::f16_towards_zero(b) << 16
}

#[inline(always)]
fn pack_flushed(a: f32, b: f32) -> u32 {
    half::flush(convert::f16_towards_zero(a)) | half::flush(convert::f16_towards_zero(b)) << 16
}
