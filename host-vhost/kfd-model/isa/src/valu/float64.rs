//! f64 operations.

use super::Handler;
use super::convert;
use super::divide;
use super::lanes::{op1, op2, op3, op3_flag, op3_mask};
use super::transcendental::{rsq64, trig_preop};
use crate::op::Op;

/// The handler of an opcode of this module.
pub(super) const fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VAddF64 => |w, i| op2(w, i, |a: f64, b: f64| a + b),
        Op::VMulF64 => |w, i| op2(w, i, |a: f64, b: f64| a * b),
        Op::VFmaF64 => |w, i| op3(w, i, f64::mul_add),
        Op::VMinF64 => |w, i| {
            let ieee = w.mode.ieee();
            op2(w, i, move |a: f64, b: f64| min(a, b, ieee));
        },
        Op::VMaxF64 => |w, i| {
            let ieee = w.mode.ieee();
            op2(w, i, move |a: f64, b: f64| max(a, b, ieee));
        },
        Op::VLdexpF64 => |w, i| op2(w, i, |a: f64, b: u32| convert::ldexp64(a, b as i32)),
        Op::VTrigPreopF64 => |w, i| op2(w, i, trig_preop),

        Op::VTruncF64 => |w, i| op1(w, i, f64::trunc),
        Op::VCeilF64 => |w, i| op1(w, i, f64::ceil),
        Op::VRndneF64 => |w, i| op1(w, i, f64::round_ties_even),
        Op::VFloorF64 => |w, i| op1(w, i, f64::floor),
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
    a.is_nan() && a.to_bits() & 1 << 51 == 0
}

/// V_MIN_F64; see [`super::float32::min`].
#[inline(always)]
fn min(a: f64, b: f64, ieee: bool) -> f64 {
    let equal = f64::from_bits(a.to_bits() | b.to_bits());
    let ordered = if a == b {
        equal
    } else if a < b {
        a
    } else {
        b
    };
    choose(a, b, ordered, ieee)
}

/// V_MAX_F64.
#[inline(always)]
fn max(a: f64, b: f64, ieee: bool) -> f64 {
    let equal = f64::from_bits(a.to_bits() & b.to_bits());
    let ordered = if a == b {
        equal
    } else if a > b {
        a
    } else {
        b
    };
    choose(a, b, ordered, ieee)
}

#[inline(always)]
fn choose(a: f64, b: f64, ordered: f64, ieee: bool) -> f64 {
    let other = if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else {
        ordered
    };
    if ieee & is_signalling(a) {
        divide::quiet64(a)
    } else if ieee & is_signalling(b) {
        divide::quiet64(b)
    } else {
        other
    }
}
