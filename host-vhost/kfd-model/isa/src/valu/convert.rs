//! Conversions and the other functions of one value that are more than an operator.
//!
//! Float to integer: cut towards zero, saturating, NaN becomes 0 (AMD "Vega" ISA, V_CVT_I32_F32 and its kin), which is
//! what Rust's `as` does.

/// V_CVT_RPI_I32_F32 and V_CVT_FLR_I32_F32 after the rounding: a NaN becomes the limit of its sign.
#[inline(always)]
pub fn floor_to_i32(rounded: f32) -> u32 {
    if rounded.is_nan() {
        return if rounded.is_sign_negative() { 0x8000_0000 } else { 0x7fff_ffff };
    }
    (rounded as i32) as u32
}

/// V_CVT_OFF_F32_I4: the low four bits as a signed number, in sixteenths.
#[inline(always)]
pub fn offset_i4(value: u32) -> f32 {
    ((value << 28) as i32 >> 28) as f32 / 16.0
}

/// V_FREXP_EXP_I32_F32: the exponent e of m * 2^e with 0.5 <= |m| < 1; 0 for zero, infinity and NaN.
#[inline(always)]
pub fn frexp_exp32(value: f32) -> i32 {
    let bits = value.to_bits() & 0x7fff_ffff;
    if bits == 0 || bits >= 0x7f80_0000 {
        return 0;
    }
    if bits < 1 << 23 {
        // The leading bit of the mantissa counts from 2^-149.
        return 32 - bits.leading_zeros() as i32 - 149;
    }
    (bits >> 23) as i32 - 126
}

/// V_FREXP_MANT_F32: the m of [`frexp_exp32`]; zero, infinity and NaN (made quiet) stay what they are.
#[inline(always)]
pub fn frexp_mant32(value: f32) -> f32 {
    if value == 0.0 || !value.is_finite() {
        return if value.is_nan() { super::divide::quiet32(value) } else { value };
    }
    ldexp32(value, -frexp_exp32(value))
}

/// V_FREXP_EXP_I32_F64.
#[inline(always)]
pub fn frexp_exp64(value: f64) -> i32 {
    let bits = value.to_bits() & !(1 << 63);
    if bits == 0 || bits >= 0x7ff << 52 {
        return 0;
    }
    if bits < 1 << 52 {
        return 64 - bits.leading_zeros() as i32 - 1074;
    }
    (bits >> 52) as i32 - 1022
}

/// V_FREXP_MANT_F64.
#[inline(always)]
pub fn frexp_mant64(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return if value.is_nan() { super::divide::quiet64(value) } else { value };
    }
    ldexp64(value, -frexp_exp64(value))
}

/// V_LDEXP_F32: value * 2^power, rounded once.
#[inline(always)]
pub fn ldexp32(value: f32, power: i32) -> f32 {
    // f64 holds any f32 times 2^+-300 exactly; beyond, the result is zero or infinity anyway.
    let power = power.clamp(-300, 300);
    (f64::from(value) * f64::from_bits(((1023 + power) as u64) << 52)) as f32
}

/// V_LDEXP_F64: value * 2^power, rounded once.
#[inline(always)]
pub fn ldexp64(value: f64, power: i32) -> f64 {
    let two = |power: i32| f64::from_bits(((1023 + power) as u64) << 52);
    let mut rest = power.clamp(-2200, 2200);
    let mut result = value;
    // At most two steps before the last one. Upwards they are exact or overflow; downwards they leave 53 bits above the
    // smallest normal number, so that a step that rounds leaves nothing for the last one but zero.
    for _ in 0..2 {
        if rest > 1023 {
            result *= two(1023);
            rest -= 1023;
        } else if rest < -1022 {
            result *= two(-969);
            rest += 969;
        }
    }
    result * two(rest.clamp(-1022, 1023))
}

/// V_FRACT_F32: value - floor(value), below 1.
#[inline(always)]
pub fn fract32(value: f32) -> f32 {
    let fraction = value - value.floor();
    if fraction >= 1.0 { f32::from_bits(0x3f7f_ffff) } else { fraction }
}

/// V_FRACT_F64.
#[inline(always)]
pub fn fract64(value: f64) -> f64 {
    let fraction = value - value.floor();
    if fraction >= 1.0 { f64::from_bits(0x3fef_ffff_ffff_ffff) } else { fraction }
}

/// The result of an operation that passes NaNs on, made quiet.
#[inline(always)]
pub fn quieted32(value: f32) -> f32 {
    if value.is_nan() { super::divide::quiet32(value) } else { value }
}

/// The result of an operation that passes NaNs on, made quiet.
#[inline(always)]
pub fn quieted64(value: f64) -> f64 {
    if value.is_nan() { super::divide::quiet64(value) } else { value }
}

/// V_FFBH_U32: zeros before the highest one; all ones if there is none.
#[inline(always)]
pub fn ffbh_u32(value: u32) -> u32 {
    if value == 0 { u32::MAX } else { value.leading_zeros() }
}

/// V_FFBL_B32: zeros below the lowest one; all ones if there is none.
#[inline(always)]
pub fn ffbl_b32(value: u32) -> u32 {
    if value == 0 { u32::MAX } else { value.trailing_zeros() }
}

/// V_FFBH_I32: bits equal to the sign from the top; all ones if all are.
#[inline(always)]
pub fn ffbh_i32(value: u32) -> u32 {
    ffbh_u32(value ^ ((value as i32) >> 31) as u32)
}

/// A normalised signed 16-bit number: -1..1 becomes -32767..32767.
#[inline(always)]
pub fn norm_i16(value: f32) -> u32 {
    let scaled = (value.clamp(-1.0, 1.0) * 32767.0).round_ties_even();
    (scaled as i16) as u16 as u32
}

/// A normalised unsigned 16-bit number: 0..1 becomes 0..65535.
#[inline(always)]
pub fn norm_u16(value: f32) -> u32 {
    let scaled = (value.clamp(0.0, 1.0) * 65535.0).round_ties_even();
    u32::from(scaled as u16)
}

/// V_CVT_PK_U8_F32's byte: rounded to nearest even, saturating, NaN becomes 0.
#[inline(always)]
pub fn to_u8(value: f32) -> u32 {
    u32::from(value.round_ties_even() as u8)
}

/// V_CVT_PKRTZ_F16_F32's halves: rounded towards zero.
#[inline(always)]
pub fn f16_towards_zero(value: f32) -> u32 {
    let near = super::half::from_f32(value);
    let away = super::half::to_f32(near).abs() > value.abs();
    // Rounded up in magnitude: one step back. Infinity from a finite number becomes the largest number.
    if away { near - 1 } else { near }
}
