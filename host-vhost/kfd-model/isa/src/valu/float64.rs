//! f64 operations.

use super::Handler;
use super::convert;
use super::divide;
use super::lanes::{op1, op2, op3, op3_flag, op3_mask};
use super::nan::Settle;
use super::transcendental::{rsq64, trig_preop};
use crate::op::Op;

/// The handler of an opcode of this module.
pub(super) const fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VAddF64 => |w, i| op2(w, i, |a: f64, b: f64| (a + b).settle2(a, b)),
        Op::VMulF64 => |w, i| op2(w, i, |a: f64, b: f64| (a * b).settle2(a, b)),
        Op::VFmaF64 => |w, i| op3(w, i, |a: f64, b: f64, c: f64| a.mul_add(b, c).settle3(a, b, c)),
        Op::VMinF64 => |w, i| {
            if w.mode.ieee() { op2(w, i, min::<true>) } else { op2(w, i, min::<false>) }
        },
        Op::VMaxF64 => |w, i| {
            if w.mode.ieee() { op2(w, i, max::<true>) } else { op2(w, i, max::<false>) }
        },
        Op::VLdexpF64 => |w, i| op2(w, i, |a: f64, b: u32| convert::ldexp64(a, b as i32)),
        Op::VTrigPreopF64 => |w, i| op2(w, i, trig_preop),

        Op::VTruncF64 => |w, i| op1(w, i, |a: f64| convert::quieted64(a.trunc())),
        Op::VCeilF64 => |w, i| op1(w, i, |a: f64| convert::quieted64(a.ceil())),
        Op::VRndneF64 => |w, i| op1(w, i, |a: f64| convert::quieted64(a.round_ties_even())),
        Op::VFloorF64 => |w, i| op1(w, i, |a: f64| convert::quieted64(a.floor())),
        Op::VFractF64 => |w, i| op1(w, i, convert::fract64),
        Op::VFrexpExpI32F64 => |w, i| op1(w, i, |a: f64| convert::frexp_exp64(a) as u32),
        Op::VFrexpMantF64 => |w, i| op1(w, i, convert::frexp_mant64),
        Op::VRcpF64 => |w, i| op1(w, i, |a: f64| 1.0 / a),
        Op::VRsqF64 => |w, i| op1(w, i, rsq64),
        Op::VSqrtF64 => |w, i| op1(w, i, f64::sqrt),

        Op::VCvtI32F64 => |w, i| op1(w, i, |a: f64| a as i32 as u32),
        Op::VCvtU32F64 => |w, i| op1(w, i, |a: f64| a as u32),
        Op::VCvtF64I32 => |w, i| op1(w, i, |a: u32| f64::from(a as i32)),
        Op::VCvtF64U32 => |w, i| op1(w, i, |a: u32| f64::from(a)),
        Op::VCvtF32F64 => |w, i| op1(w, i, |a: f64| a as f32),
        Op::VCvtF64F32 => |w, i| op1(w, i, |a: f32| f64::from(a)),

        Op::VDivFixupF64 => |w, i| op3(w, i, divide::fixup64),
        Op::VDivFmasF64 => |w, i| op3_mask(w, i, divide::fmas64),
        Op::VDivScaleF64 => |w, i| op3_flag(w, i, divide::scale64),
        _ => return None,
    })
}

#[inline(always)]
fn is_signalling(a: f64) -> bool {
    a.is_nan() & (a.to_bits() & 1 << 51 == 0)
}

/// V_MIN_F64; see [`super::float32::min`].
#[inline(always)]
fn min<const IEEE: bool>(a: f64, b: f64) -> f64 {
    let equal = f64::from_bits(a.to_bits() | b.to_bits());
    let ordered = if a == b {
        equal
    } else if a < b {
        a
    } else {
        b
    };
    choose::<IEEE>(a, b, ordered)
}

/// V_MAX_F64.
#[inline(always)]
fn max<const IEEE: bool>(a: f64, b: f64) -> f64 {
    let equal = f64::from_bits(a.to_bits() & b.to_bits());
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
fn choose<const IEEE: bool>(a: f64, b: f64, ordered: f64) -> f64 {
    let other = if b.is_nan() { a } else { ordered };
    let other = if a.is_nan() { b } else { other };
    let other = if IEEE & is_signalling(b) { divide::quiet64(b) } else { other };
    if IEEE & is_signalling(a) { divide::quiet64(a) } else { other }
}
