//! f16 operations: computed in wider formats and rounded, see [`super::half`].

use super::Handler;
use super::lanes::{Half, HalfBits, Short, op1, op2, op3};
use super::nan::Settle;
use super::transcendental;
use super::{convert, divide, half};
use crate::op::Op;

/// The handler of an opcode of this module.
pub(super) const fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VAddF16 => |w, i| op2(w, i, |a: Half, b: Half| Half((a.0 + b.0).settle2(a.0, b.0))),
        Op::VSubF16 => |w, i| op2(w, i, |a: Half, b: Half| Half((a.0 - b.0).settle2(a.0, b.0))),
        Op::VSubrevF16 => |w, i| op2(w, i, |a: Half, b: Half| Half((b.0 - a.0).settle2(a.0, b.0))),
        Op::VMulF16 => |w, i| op2(w, i, |a: Half, b: Half| Half((a.0 * b.0).settle2(a.0, b.0))),
        Op::VMinF16 => |w, i| {
            if w.mode.ieee() { op2(w, i, min::<true>) } else { op2(w, i, min::<false>) }
        },
        Op::VMaxF16 => |w, i| {
            if w.mode.ieee() { op2(w, i, max::<true>) } else { op2(w, i, max::<false>) }
        },
        Op::VLdexpF16 => |w, i| op2(w, i, |a: Half, b: Short| HalfBits(ldexp(a.0, b.0))),
        Op::VFmaF16 | Op::VFmaLegacyF16 => |w, i| op3(w, i, fma),
        Op::VMadF16 | Op::VMadLegacyF16 | Op::VMacF16 | Op::VMadmkF16 | Op::VMadakF16 => {
            |w, i| op3(w, i, mad)
        }
        Op::VMin3F16 => |w, i| {
            if w.mode.ieee() { op3(w, i, min3::<true>) } else { op3(w, i, min3::<false>) }
        },
        Op::VMax3F16 => |w, i| {
            if w.mode.ieee() { op3(w, i, max3::<true>) } else { op3(w, i, max3::<false>) }
        },
        Op::VMed3F16 => |w, i| {
            if w.mode.ieee() { op3(w, i, median::<true>) } else { op3(w, i, median::<false>) }
        },
        Op::VDivFixupF16 | Op::VDivFixupLegacyF16 => |w, i| op3(w, i, fixup),

        Op::VFractF16 => |w, i| op1(w, i, |a: Half| HalfBits(fract(a.0))),
        Op::VTruncF16 => |w, i| op1(w, i, |a: Half| Half(convert::quieted32(a.0.trunc()))),
        Op::VCeilF16 => |w, i| op1(w, i, |a: Half| Half(convert::quieted32(a.0.ceil()))),
        Op::VRndneF16 => |w, i| op1(w, i, |a: Half| Half(convert::quieted32(a.0.round_ties_even()))),
        Op::VFloorF16 => |w, i| op1(w, i, |a: Half| Half(convert::quieted32(a.0.floor()))),
        // An f16 is a normal f32, so that the exponent is right for its denormals, too.
        Op::VFrexpExpI16F16 => |w, i| op1(w, i, |a: Half| Short(convert::frexp_exp32(a.0) as u32)),
        Op::VFrexpMantF16 => |w, i| op1(w, i, |a: Half| Half(convert::frexp_mant32(a.0))),

        Op::VRcpF16 => |w, i| op1(w, i, |a: Half| Half(1.0 / a.0)),
        Op::VSqrtF16 => |w, i| op1(w, i, |a: Half| Half(a.0.sqrt())),
        Op::VRsqF16 => |w, i| op1(w, i, |a: Half| Half(transcendental::rsq32(a.0))),
        Op::VLogF16 => |w, i| op1(w, i, |a: Half| Half(transcendental::log2(a.0))),
        Op::VExpF16 => |w, i| op1(w, i, |a: Half| Half(transcendental::exp2(a.0))),
        Op::VSinF16 => |w, i| op1(w, i, |a: Half| Half(transcendental::sin(a.0))),
        Op::VCosF16 => |w, i| op1(w, i, |a: Half| Half(transcendental::cos(a.0))),

        Op::VCvtF16F32 => |w, i| op1(w, i, |a: f32| Half(a)),
        Op::VCvtF32F16 => |w, i| op1(w, i, |a: Half| a.0),
        Op::VCvtF16U16 => |w, i| op1(w, i, |a: Short| Half((a.0 & 0xffff) as f32)),
        Op::VCvtF16I16 => |w, i| op1(w, i, |a: Short| Half(f32::from(a.0 as i16))),
        Op::VCvtU16F16 => |w, i| op1(w, i, |a: Half| Short(u32::from(a.0 as u16))),
        Op::VCvtI16F16 => |w, i| op1(w, i, |a: Half| Short(a.0 as i16 as u32)),
        Op::VCvtNormI16F16 => |w, i| op1(w, i, |a: Half| Short(convert::norm_i16(a.0))),
        Op::VCvtNormU16F16 => |w, i| op1(w, i, |a: Half| Short(convert::norm_u16(a.0))),
        Op::VCvtPknormI16F16 => |w, i| {
            op2(w, i, |a: Half, b: Half| convert::norm_i16(a.0) | convert::norm_i16(b.0) << 16);
        },
        Op::VCvtPknormU16F16 => |w, i| {
            op2(w, i, |a: Half, b: Half| convert::norm_u16(a.0) | convert::norm_u16(b.0) << 16);
        },
        Op::VPackB32F16 => |w, i| op2(w, i, |a: HalfBits, b: HalfBits| a.0 & 0xffff | b.0 << 16),
        _ => return None,
    })
}

#[inline(always)]
fn fma(a: Half, b: Half, c: Half) -> HalfBits {
    HalfBits(half::fma(a.0, b.0, c.0))
}

/// V_MAD_F16: product and sum are rounded on their own, and denormals count as zero (LLVM,
/// `SITargetLowering::isFMADLegal`).
#[inline(always)]
fn mad(a: HalfBits, b: HalfBits, c: HalfBits) -> HalfBits {
    let [a, b, c] = [a, b, c].map(|bits| half::to_f32(half::flush(bits.0)));
    let product = half::flush(half::from_f32(a * b));
    HalfBits(half::flush(half::from_f32((half::to_f32(product) + c).settle3(a, b, c))))
}

#[inline(always)]
fn fixup(a: Half, b: Half, c: Half) -> Half {
    Half(divide::fixup16(a.0, b.0, c.0))
}

#[inline(always)]
fn min<const IEEE: bool>(a: HalfBits, b: HalfBits) -> HalfBits {
    HalfBits(half::min::<IEEE>(a.0, b.0))
}

#[inline(always)]
fn max<const IEEE: bool>(a: HalfBits, b: HalfBits) -> HalfBits {
    HalfBits(half::max::<IEEE>(a.0, b.0))
}

#[inline(always)]
fn min3<const IEEE: bool>(a: HalfBits, b: HalfBits, c: HalfBits) -> HalfBits {
    min::<IEEE>(min::<IEEE>(a, b), c)
}

#[inline(always)]
fn max3<const IEEE: bool>(a: HalfBits, b: HalfBits, c: HalfBits) -> HalfBits {
    max::<IEEE>(max::<IEEE>(a, b), c)
}

#[inline(always)]
fn median<const IEEE: bool>(a: HalfBits, b: HalfBits, c: HalfBits) -> HalfBits {
    HalfBits(half::median::<IEEE>(a.0, b.0, c.0))
}

#[inline(always)]
fn ldexp(a: f32, power: u32) -> u32 {
    // Within f32's normal range the scaling is exact; beyond it the result is zero or infinity anyway.
    let power = i32::from(power as i16).clamp(-60, 60);
    half::from_f32(a * f32::from_bits(((127 + power) as u32) << 23))
}

/// V_FRACT_F16: below 1.
#[inline(always)]
fn fract(a: f32) -> u32 {
    let bits = half::from_f32(a - a.floor());
    if bits == 0x3c00 { 0x3bff } else { bits }
}
