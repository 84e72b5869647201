//! Functions that the hardware approximates: computed in f64 and rounded, so the last bit may differ from hardware.
//!
//! The f32 forms know no denormals, whatever MODE says: compilers scale their arguments (LLVM, AMDGPU lowering of
//! square root, division, exp2 and log2).

use super::divide::{NAN32, NAN64};

/// The f32 with a denormal replaced by zero of the same sign.
#[inline(always)]
pub fn flush32(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits(if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

/// V_RCP_F32.
#[inline(always)]
pub fn rcp32(value: f32) -> f32 {
    flush32(1.0 / flush32(value))
}

/// V_SQRT_F32.
#[inline(always)]
pub fn sqrt32(value: f32) -> f32 {
    flush32(value).sqrt()
}

/// V_RSQ_F32.
#[inline(always)]
pub fn rsq32(value: f32) -> f32 {
    (1.0 / f64::from(flush32(value)).sqrt()) as f32
}

/// V_EXP_F32: 2^value.
pub fn exp2(value: f32) -> f32 {
    flush32(f64::from(flush32(value)).exp2() as f32)
}

/// V_LOG_F32: the logarithm of base 2.
pub fn log2(value: f32) -> f32 {
    let value = flush32(value);
    if value < 0.0 {
        return f32::from_bits(NAN32);
    }
    f64::from(value).log2() as f32
}

/// V_SIN_F32: the sine of `turns` full turns; 0 beyond 256 turns.
pub fn sin(turns: f32) -> f32 {
    let Some(fraction) = turn_fraction(turns) else {
        return if turns.is_finite() { 0.0 } else { f32::from_bits(NAN32) };
    };
    if fraction.abs() == 0.5 {
        // Half a turn is exact in turns, but not in radians.
        return 0.0;
    }
    (fraction * std::f64::consts::TAU).sin() as f32
}

/// V_COS_F32: the cosine of `turns` full turns; 1 beyond 256 turns.
pub fn cos(turns: f32) -> f32 {
    let Some(fraction) = turn_fraction(turns) else {
        return if turns.is_finite() { 1.0 } else { f32::from_bits(NAN32) };
    };
    if fraction.abs() == 0.25 {
        return 0.0;
    }
    (fraction * std::f64::consts::TAU).cos() as f32
}

/// The part of a turn beyond whole turns, in -0.5..=0.5; `None` outside of the domain.
fn turn_fraction(turns: f32) -> Option<f64> {
    if turns.is_nan() || turns.abs() > 256.0 {
        return None;
    }
    let turns = f64::from(flush32(turns));
    Some(turns - turns.round_ties_even())
}

/// V_RSQ_F64.
#[inline(always)]
pub fn rsq64(value: f64) -> f64 {
    if value < 0.0 { f64::from_bits(NAN64) } else { 1.0 / value.sqrt() }
}

/// 2 / pi: the first 1201 bits after the binary point, from the most significant on.
const TWO_OVER_PI: [u32; 38] = [
    0xa2f9_836e,
    0x4e44_1529,
    0xfc27_57d1,
    0xf534_ddc0,
    0xdb62_9599,
    0x3c43_9041,
    0xfe51_63ab,
    0xdebb_c561,
    0xb724_6e3a,
    0x424d_d2e0,
    0x0649_2eea,
    0x09d1_921c,
    0xfe1d_eb1c,
    0xb129_a73e,
    0xe882_35f5,
    0x2ebb_4484,
    0xe99c_7026,
    0xb45f_7e41,
    0x3991_d639,
    0x8353_39f4,
    0x9c84_5f8b,
    0xbdf9_283b,
    0x1ff8_97ff,
    0xde05_980f,
    0xef2f_118b,
    0x5a0a_6d1f,
    0x6d36_7ecf,
    0x27cb_09b7,
    0x4f46_3f66,
    0x9e5f_ea2d,
    0x7527_bac7,
    0xebe5_f17b,
    0x3d07_39f7,
    0x8a52_92ea,
    0x6bfb_5fb1,
    0x1f8d_5d08,
    0x5603_3046,
    0xfc7b_0000,
];

/// V_TRIG_PREOP_F64: 53 bits of 2 / pi for the reduction of a large argument. Segment `segment & 31` counts from where
/// the argument's exponent makes bits matter; the result is scaled so that the product with the argument stays finite.
pub fn trig_preop(value: f64, segment: u32) -> f64 {
    let exponent = (value.to_bits() >> 52 & 0x7ff) as u32;
    let shift = (segment & 31) * 53 + exponent.saturating_sub(1077);
    let word = |n: u32| u128::from(TWO_OVER_PI.get(n as usize).copied().unwrap_or_default());
    let first = shift / 32;
    let window = word(first) << 64 | word(first + 1) << 32 | word(first + 2);
    let bits = (window >> (96 - 53 - shift % 32)) as u64 & ((1 << 53) - 1);
    let scale = -53 - shift as i32 + if exponent >= 1968 { 128 } else { 0 };
    super::convert::ldexp64(bits as f64, scale)
}
