//! Comparisons: VOPC and its long forms.
//!
//! A comparison with a NaN is false except for the negated forms; `v_cmp_lg` is "less or greater", `v_cmp_neq` "not
//! equal".

#![allow(
    clippy::nonminimal_bool,
    clippy::neg_cmp_op_on_partial_ord,
    clippy::double_comparisons,
    reason = "a NaN makes the difference"
)]

use super::Handler;
use super::lanes::{Half, Short, compare};
use crate::op::Op;

/// The handler of a comparison of floats.
pub(super) const fn float(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VCmpFF16 | Op::VCmpxFF16 => |w, i| compare(w, i, |_: Half, _: Half| false),
        Op::VCmpLtF16 | Op::VCmpxLtF16 => |w, i| compare(w, i, |a: Half, b: Half| a.0 < b.0),
        Op::VCmpEqF16 | Op::VCmpxEqF16 => |w, i| compare(w, i, |a: Half, b: Half| a.0 == b.0),
        Op::VCmpLeF16 | Op::VCmpxLeF16 => |w, i| compare(w, i, |a: Half, b: Half| a.0 <= b.0),
        Op::VCmpGtF16 | Op::VCmpxGtF16 => |w, i| compare(w, i, |a: Half, b: Half| a.0 > b.0),
        Op::VCmpLgF16 | Op::VCmpxLgF16 => |w, i| compare(w, i, |a: Half, b: Half| a.0 < b.0 || a.0 > b.0),
        Op::VCmpGeF16 | Op::VCmpxGeF16 => |w, i| compare(w, i, |a: Half, b: Half| a.0 >= b.0),
        Op::VCmpOF16 | Op::VCmpxOF16 => {
            |w, i| compare(w, i, |a: Half, b: Half| !a.0.is_nan() && !b.0.is_nan())
        }
        Op::VCmpUF16 | Op::VCmpxUF16 => |w, i| compare(w, i, |a: Half, b: Half| a.0.is_nan() || b.0.is_nan()),
        Op::VCmpNgeF16 | Op::VCmpxNgeF16 => |w, i| compare(w, i, |a: Half, b: Half| !(a.0 >= b.0)),
        Op::VCmpNlgF16 | Op::VCmpxNlgF16 => {
            |w, i| compare(w, i, |a: Half, b: Half| !(a.0 < b.0 || a.0 > b.0))
        }
        Op::VCmpNgtF16 | Op::VCmpxNgtF16 => |w, i| compare(w, i, |a: Half, b: Half| !(a.0 > b.0)),
        Op::VCmpNleF16 | Op::VCmpxNleF16 => |w, i| compare(w, i, |a: Half, b: Half| !(a.0 <= b.0)),
        Op::VCmpNeqF16 | Op::VCmpxNeqF16 => |w, i| compare(w, i, |a: Half, b: Half| a.0 != b.0),
        Op::VCmpNltF16 | Op::VCmpxNltF16 => |w, i| compare(w, i, |a: Half, b: Half| !(a.0 < b.0)),
        Op::VCmpTruF16 | Op::VCmpxTruF16 => |w, i| compare(w, i, |_: Half, _: Half| true),
        Op::VCmpFF32 | Op::VCmpxFF32 => |w, i| compare(w, i, |_: f32, _: f32| false),
        Op::VCmpLtF32 | Op::VCmpxLtF32 => |w, i| compare(w, i, |a: f32, b: f32| a < b),
        Op::VCmpEqF32 | Op::VCmpxEqF32 => |w, i| compare(w, i, |a: f32, b: f32| a == b),
        Op::VCmpLeF32 | Op::VCmpxLeF32 => |w, i| compare(w, i, |a: f32, b: f32| a <= b),
        Op::VCmpGtF32 | Op::VCmpxGtF32 => |w, i| compare(w, i, |a: f32, b: f32| a > b),
        Op::VCmpLgF32 | Op::VCmpxLgF32 => |w, i| compare(w, i, |a: f32, b: f32| a < b || a > b),
        Op::VCmpGeF32 | Op::VCmpxGeF32 => |w, i| compare(w, i, |a: f32, b: f32| a >= b),
        Op::VCmpOF32 | Op::VCmpxOF32 => |w, i| compare(w, i, |a: f32, b: f32| !a.is_nan() && !b.is_nan()),
        Op::VCmpUF32 | Op::VCmpxUF32 => |w, i| compare(w, i, |a: f32, b: f32| a.is_nan() || b.is_nan()),
        Op::VCmpNgeF32 | Op::VCmpxNgeF32 => |w, i| compare(w, i, |a: f32, b: f32| !(a >= b)),
        Op::VCmpNlgF32 | Op::VCmpxNlgF32 => |w, i| compare(w, i, |a: f32, b: f32| !(a < b || a > b)),
        Op::VCmpNgtF32 | Op::VCmpxNgtF32 => |w, i| compare(w, i, |a: f32, b: f32| !(a > b)),
        Op::VCmpNleF32 | Op::VCmpxNleF32 => |w, i| compare(w, i, |a: f32, b: f32| !(a <= b)),
        Op::VCmpNeqF32 | Op::VCmpxNeqF32 => |w, i| compare(w, i, |a: f32, b: f32| a != b),
        Op::VCmpNltF32 | Op::VCmpxNltF32 => |w, i| compare(w, i, |a: f32, b: f32| !(a < b)),
        Op::VCmpTruF32 | Op::VCmpxTruF32 => |w, i| compare(w, i, |_: f32, _: f32| true),
        Op::VCmpFF64 | Op::VCmpxFF64 => |w, i| compare(w, i, |_: f64, _: f64| false),
        Op::VCmpLtF64 | Op::VCmpxLtF64 => |w, i| compare(w, i, |a: f64, b: f64| a < b),
        Op::VCmpEqF64 | Op::VCmpxEqF64 => |w, i| compare(w, i, |a: f64, b: f64| a == b),
        Op::VCmpLeF64 | Op::VCmpxLeF64 => |w, i| compare(w, i, |a: f64, b: f64| a <= b),
        Op::VCmpGtF64 | Op::VCmpxGtF64 => |w, i| compare(w, i, |a: f64, b: f64| a > b),
        Op::VCmpLgF64 | Op::VCmpxLgF64 => |w, i| compare(w, i, |a: f64, b: f64| a < b || a > b),
        Op::VCmpGeF64 | Op::VCmpxGeF64 => |w, i| compare(w, i, |a: f64, b: f64| a >= b),
        Op::VCmpOF64 | Op::VCmpxOF64 => |w, i| compare(w, i, |a: f64, b: f64| !a.is_nan() && !b.is_nan()),
        Op::VCmpUF64 | Op::VCmpxUF64 => |w, i| compare(w, i, |a: f64, b: f64| a.is_nan() || b.is_nan()),
        Op::VCmpNgeF64 | Op::VCmpxNgeF64 => |w, i| compare(w, i, |a: f64, b: f64| !(a >= b)),
        Op::VCmpNlgF64 | Op::VCmpxNlgF64 => |w, i| compare(w, i, |a: f64, b: f64| !(a < b || a > b)),
        Op::VCmpNgtF64 | Op::VCmpxNgtF64 => |w, i| compare(w, i, |a: f64, b: f64| !(a > b)),
        Op::VCmpNleF64 | Op::VCmpxNleF64 => |w, i| compare(w, i, |a: f64, b: f64| !(a <= b)),
        Op::VCmpNeqF64 | Op::VCmpxNeqF64 => |w, i| compare(w, i, |a: f64, b: f64| a != b),
        Op::VCmpNltF64 | Op::VCmpxNltF64 => |w, i| compare(w, i, |a: f64, b: f64| !(a < b)),
        Op::VCmpTruF64 | Op::VCmpxTruF64 => |w, i| compare(w, i, |_: f64, _: f64| true),
        Op::VCmpClassF16 | Op::VCmpxClassF16 => {
            |w, i| compare(w, i, |a: Half, b: u32| b >> class16(a.0) & 1 == 1)
        }
        Op::VCmpClassF32 | Op::VCmpxClassF32 => {
            |w, i| compare(w, i, |a: f32, b: u32| b >> class32(a) & 1 == 1)
        }
        Op::VCmpClassF64 | Op::VCmpxClassF64 => {
            |w, i| compare(w, i, |a: f64, b: u32| b >> class64(a) & 1 == 1)
        }
        _ => return None,
    })
}

/// The handler of a comparison of integers.
pub(super) const fn integer(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VCmpFI16 | Op::VCmpxFI16 => |w, i| compare(w, i, |_: Short, _: Short| false),
        Op::VCmpLtI16 | Op::VCmpxLtI16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as i16) < (b.0 as i16))
        }
        Op::VCmpEqI16 | Op::VCmpxEqI16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as i16) == (b.0 as i16))
        }
        Op::VCmpLeI16 | Op::VCmpxLeI16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as i16) <= (b.0 as i16))
        }
        Op::VCmpGtI16 | Op::VCmpxGtI16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as i16) > (b.0 as i16))
        }
        Op::VCmpNeI16 | Op::VCmpxNeI16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as i16) != (b.0 as i16))
        }
        Op::VCmpGeI16 | Op::VCmpxGeI16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as i16) >= (b.0 as i16))
        }
        Op::VCmpTI16 | Op::VCmpxTI16 => |w, i| compare(w, i, |_: Short, _: Short| true),
        Op::VCmpFU16 | Op::VCmpxFU16 => |w, i| compare(w, i, |_: Short, _: Short| false),
        Op::VCmpLtU16 | Op::VCmpxLtU16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as u16) < (b.0 as u16))
        }
        Op::VCmpEqU16 | Op::VCmpxEqU16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as u16) == (b.0 as u16))
        }
        Op::VCmpLeU16 | Op::VCmpxLeU16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as u16) <= (b.0 as u16))
        }
        Op::VCmpGtU16 | Op::VCmpxGtU16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as u16) > (b.0 as u16))
        }
        Op::VCmpNeU16 | Op::VCmpxNeU16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as u16) != (b.0 as u16))
        }
        Op::VCmpGeU16 | Op::VCmpxGeU16 => {
            |w, i| compare(w, i, |a: Short, b: Short| (a.0 as u16) >= (b.0 as u16))
        }
        Op::VCmpTU16 | Op::VCmpxTU16 => |w, i| compare(w, i, |_: Short, _: Short| true),
        Op::VCmpFI32 | Op::VCmpxFI32 => |w, i| compare(w, i, |_: u32, _: u32| false),
        Op::VCmpLtI32 | Op::VCmpxLtI32 => |w, i| compare(w, i, |a: u32, b: u32| (a as i32) < (b as i32)),
        Op::VCmpEqI32 | Op::VCmpxEqI32 => |w, i| compare(w, i, |a: u32, b: u32| (a as i32) == (b as i32)),
        Op::VCmpLeI32 | Op::VCmpxLeI32 => |w, i| compare(w, i, |a: u32, b: u32| (a as i32) <= (b as i32)),
        Op::VCmpGtI32 | Op::VCmpxGtI32 => |w, i| compare(w, i, |a: u32, b: u32| (a as i32) > (b as i32)),
        Op::VCmpNeI32 | Op::VCmpxNeI32 => |w, i| compare(w, i, |a: u32, b: u32| (a as i32) != (b as i32)),
        Op::VCmpGeI32 | Op::VCmpxGeI32 => |w, i| compare(w, i, |a: u32, b: u32| (a as i32) >= (b as i32)),
        Op::VCmpTI32 | Op::VCmpxTI32 => |w, i| compare(w, i, |_: u32, _: u32| true),
        Op::VCmpFU32 | Op::VCmpxFU32 => |w, i| compare(w, i, |_: u32, _: u32| false),
        Op::VCmpLtU32 | Op::VCmpxLtU32 => |w, i| compare(w, i, |a: u32, b: u32| a < b),
        Op::VCmpEqU32 | Op::VCmpxEqU32 => |w, i| compare(w, i, |a: u32, b: u32| a == b),
        Op::VCmpLeU32 | Op::VCmpxLeU32 => |w, i| compare(w, i, |a: u32, b: u32| a <= b),
        Op::VCmpGtU32 | Op::VCmpxGtU32 => |w, i| compare(w, i, |a: u32, b: u32| a > b),
        Op::VCmpNeU32 | Op::VCmpxNeU32 => |w, i| compare(w, i, |a: u32, b: u32| a != b),
        Op::VCmpGeU32 | Op::VCmpxGeU32 => |w, i| compare(w, i, |a: u32, b: u32| a >= b),
        Op::VCmpTU32 | Op::VCmpxTU32 => |w, i| compare(w, i, |_: u32, _: u32| true),
        Op::VCmpFI64 | Op::VCmpxFI64 => |w, i| compare(w, i, |_: u64, _: u64| false),
        Op::VCmpLtI64 | Op::VCmpxLtI64 => |w, i| compare(w, i, |a: u64, b: u64| (a as i64) < (b as i64)),
        Op::VCmpEqI64 | Op::VCmpxEqI64 => |w, i| compare(w, i, |a: u64, b: u64| (a as i64) == (b as i64)),
        Op::VCmpLeI64 | Op::VCmpxLeI64 => |w, i| compare(w, i, |a: u64, b: u64| (a as i64) <= (b as i64)),
        Op::VCmpGtI64 | Op::VCmpxGtI64 => |w, i| compare(w, i, |a: u64, b: u64| (a as i64) > (b as i64)),
        Op::VCmpNeI64 | Op::VCmpxNeI64 => |w, i| compare(w, i, |a: u64, b: u64| (a as i64) != (b as i64)),
        Op::VCmpGeI64 | Op::VCmpxGeI64 => |w, i| compare(w, i, |a: u64, b: u64| (a as i64) >= (b as i64)),
        Op::VCmpTI64 | Op::VCmpxTI64 => |w, i| compare(w, i, |_: u64, _: u64| true),
        Op::VCmpFU64 | Op::VCmpxFU64 => |w, i| compare(w, i, |_: u64, _: u64| false),
        Op::VCmpLtU64 | Op::VCmpxLtU64 => |w, i| compare(w, i, |a: u64, b: u64| a < b),
        Op::VCmpEqU64 | Op::VCmpxEqU64 => |w, i| compare(w, i, |a: u64, b: u64| a == b),
        Op::VCmpLeU64 | Op::VCmpxLeU64 => |w, i| compare(w, i, |a: u64, b: u64| a <= b),
        Op::VCmpGtU64 | Op::VCmpxGtU64 => |w, i| compare(w, i, |a: u64, b: u64| a > b),
        Op::VCmpNeU64 | Op::VCmpxNeU64 => |w, i| compare(w, i, |a: u64, b: u64| a != b),
        Op::VCmpGeU64 | Op::VCmpxGeU64 => |w, i| compare(w, i, |a: u64, b: u64| a >= b),
        Op::VCmpTU64 | Op::VCmpxTU64 => |w, i| compare(w, i, |_: u64, _: u64| true),
        _ => return None,
    })
}

/// Numbers of the classes of `v_cmp_class`: 0 signalling NaN, 1 quiet NaN, 2 -infinity, 3 negative normal, 4 negative
/// denormal, 5 -0, 6 +0, 7 positive denormal, 8 positive normal, 9 +infinity.
fn class(nan: bool, quiet: bool, negative: bool, infinite: bool, zero: bool, normal: bool) -> u32 {
    if nan {
        return u32::from(quiet);
    }
    let magnitude = if infinite {
        3
    } else if normal {
        2
    } else if zero {
        0
    } else {
        1
    };
    if negative { 5 - magnitude } else { 6 + magnitude }
}

fn class32(a: f32) -> u32 {
    class(
        a.is_nan(),
        a.to_bits() >> 22 & 1 == 1,
        a.is_sign_negative(),
        a.is_infinite(),
        a == 0.0,
        a.is_normal(),
    )
}

fn class64(a: f64) -> u32 {
    class(
        a.is_nan(),
        a.to_bits() >> 51 & 1 == 1,
        a.is_sign_negative(),
        a.is_infinite(),
        a == 0.0,
        a.is_normal(),
    )
}

/// The f16 is given as f32; numbers below 2^-14 are denormal as f16.
fn class16(a: f32) -> u32 {
    let normal = a.is_finite() && a.abs() >= 1.0 / 16384.0;
    class(a.is_nan(), a.to_bits() >> 22 & 1 == 1, a.is_sign_negative(), a.is_infinite(), a == 0.0, normal)
}
