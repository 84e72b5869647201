//! The three steps that compilers build an IEEE division from (AMD "Vega" ISA, V_DIV_SCALE, V_DIV_FMAS, V_DIV_FIXUP).
//!
//! `div_scale` brings numerator and denominator to where the reciprocal and the Newton steps lose nothing, `div_fmas`
//! takes the scale back with the last step, `div_fixup` puts special values and signs right.

use super::nan::Settle;

/// The NaN of an invalid operation.
pub const NAN32: u32 = 0xffc0_0000;
/// The NaN of an invalid operation.
pub const NAN64: u64 = 0xfff8_0000_0000_0000;

fn exponent32(value: f32) -> i32 {
    (value.to_bits() >> 23 & 0xff) as i32
}

fn exponent64(value: f64) -> i32 {
    (value.to_bits() >> 52 & 0x7ff) as i32
}

fn is_denormal32(value: f32) -> bool {
    value != 0.0 && exponent32(value) == 0
}

fn is_denormal64(value: f64) -> bool {
    value != 0.0 && exponent64(value) == 0
}

/// V_DIV_SCALE_F32: `value` is the denominator or the numerator again, the one that is to be scaled. Returns the scaled
/// value and whether `div_fmas` has to take a scale back.
pub fn scale32(value: f32, denominator: f32, numerator: f32) -> (f32, bool) {
    let up = value * 18_446_744_073_709_551_616.0; // 2^64
    let down = value * (1.0 / 18_446_744_073_709_551_616.0);
    if denominator == 0.0 || numerator == 0.0 {
        return (f32::from_bits(NAN32), false);
    }
    if exponent32(numerator) - exponent32(denominator) >= 96 {
        // The quotient is near the largest number.
        return (if value == denominator { up } else { value }, true);
    }
    if is_denormal32(denominator) {
        return (up, false);
    }
    let tiny_reciprocal = is_denormal32(1.0 / denominator);
    let tiny_quotient = is_denormal32(numerator / denominator);
    if tiny_reciprocal && tiny_quotient {
        // The ISA document scales the denominator up here, which would make it infinite; only down does a division of
        // such operands come out right, as it does on hardware.
        (if value == denominator { down } else { value }, true)
    } else if tiny_reciprocal {
        (down, false)
    } else if tiny_quotient {
        (if value == numerator { up } else { value }, true)
    } else if exponent32(numerator) <= 23 {
        (up, false)
    } else {
        (value, false)
    }
}

/// V_DIV_SCALE_F64; see [`scale32`].
pub fn scale64(value: f64, denominator: f64, numerator: f64) -> (f64, bool) {
    let factor = f64::from_bits((1023 + 128) << 52); // 2^128
    let up = value * factor;
    let down = value * f64::from_bits((1023 - 128) << 52);
    if denominator == 0.0 || numerator == 0.0 {
        return (f64::from_bits(NAN64), false);
    }
    if exponent64(numerator) - exponent64(denominator) >= 768 {
        return (if value == denominator { up } else { value }, true);
    }
    if is_denormal64(denominator) {
        return (up, false);
    }
    let tiny_reciprocal = is_denormal64(1.0 / denominator);
    let tiny_quotient = is_denormal64(numerator / denominator);
    if tiny_reciprocal && tiny_quotient {
        (if value == denominator { down } else { value }, true)
    } else if tiny_reciprocal {
        (down, false)
    } else if tiny_quotient {
        (if value == numerator { up } else { value }, true)
    } else if exponent64(numerator) <= 53 {
        (up, false)
    } else {
        (value, false)
    }
}

/// V_DIV_FMAS_F32: a fused multiply-add whose result is scaled if `div_scale` said so. The direction follows from the
/// addend, the quotient so far: a scaled quotient is at least 2 if it has to grow.
pub fn fmas32(a: f32, b: f32, c: f32, scaled: bool) -> f32 {
    if !scaled {
        return a.mul_add(b, c).settle3(a, b, c);
    }
    // The sum is rounded once, after the scaling.
    let (exact, error) = fused64(a, b, c);
    let power = if exponent32(c) > 127 { 64 } else { -64 };
    let factor = f64::from_bits(((1023 + power) as u64) << 52);
    (round_odd64(exact, error, factor) as f32).settle3(a, b, c)
}

/// a * b + c in f64 and what the rounding of the sum lost; the product of two f32 is exact in f64.
fn fused64(a: f32, b: f32, c: f32) -> (f64, f64) {
    let (x, y) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = x + y;
    let part = sum - x;
    let error = (x - (sum - part)) + (y - part);
    (sum, error)
}

/// `sum + error` times a power of two, with the last bit of the f64 set if it is inexact.
fn round_odd64(sum: f64, error: f64, factor: f64) -> f64 {
    let scaled = sum * factor;
    if error == 0.0 || !scaled.is_finite() || scaled == 0.0 {
        return scaled;
    }
    let bits = scaled.to_bits();
    // Cut towards zero, then set the last bit.
    let cut = if (error > 0.0) != (scaled > 0.0) { bits.wrapping_sub(1) } else { bits };
    f64::from_bits(cut | 1)
}

/// a * b + c in f64 with the last bit set if it is inexact, so that one more rounding to 51 bits or fewer gives what a
/// single one would.
#[inline(always)]
pub fn fma_to_odd(a: f32, b: f32, c: f32) -> f64 {
    let (sum, error) = fused64(a, b, c);
    round_odd64(sum, error, 1.0)
}

/// V_DIV_FMAS_F64; see [`fmas32`].
pub fn fmas64(a: f64, b: f64, c: f64, scaled: bool) -> f64 {
    let sum = a.mul_add(b, c).settle3(a, b, c);
    if !scaled {
        return sum;
    }
    let power: i64 = if exponent64(c) > 1023 { 128 } else { -128 };
    let factor = f64::from_bits(((1023 + power) as u64) << 52);
    let scaled = sum * factor;
    if !is_denormal64(scaled) {
        return scaled;
    }
    // The scaling rounds as well. That goes wrong only if the sum lies just between two results: then what it lost
    // itself, a * b + c - sum, decides.
    let product = a * b;
    let rest = a.mul_add(b, -product);
    let total = product + c;
    let back = total - product;
    let error = (product - (total - back)) + (c - back) + rest + (total - sum);
    let smallest = f64::from_bits(1);
    let above = sum - scaled / factor;
    if above.abs() == smallest / factor / 2.0 && error != 0.0 && (error > 0.0) == (above > 0.0) {
        return scaled + smallest.copysign(above);
    }
    scaled
}

/// V_DIV_FIXUP_F32.
pub fn fixup32(quotient: f32, denominator: f32, numerator: f32) -> f32 {
    let sign = (denominator.to_bits() ^ numerator.to_bits()) & 0x8000_0000;
    let signed = |magnitude: f32| f32::from_bits(magnitude.to_bits() & 0x7fff_ffff | sign);
    if numerator.is_nan() {
        quiet32(numerator)
    } else if denominator.is_nan() {
        quiet32(denominator)
    } else if (denominator == 0.0 && numerator == 0.0)
        || (denominator.is_infinite() && numerator.is_infinite())
    {
        f32::from_bits(NAN32)
    } else if denominator == 0.0 || numerator.is_infinite() {
        signed(f32::INFINITY)
    } else if denominator.is_infinite()
        || numerator == 0.0
        || exponent32(numerator) - exponent32(denominator) < -150
    {
        signed(0.0)
    } else if quotient.is_nan() {
        // The steps before overflowed.
        signed(f32::INFINITY)
    } else {
        signed(quotient)
    }
}

/// V_DIV_FIXUP_F64.
pub fn fixup64(quotient: f64, denominator: f64, numerator: f64) -> f64 {
    let sign = (denominator.to_bits() ^ numerator.to_bits()) & 1 << 63;
    let signed = |magnitude: f64| f64::from_bits(magnitude.to_bits() & !(1 << 63) | sign);
    if numerator.is_nan() {
        quiet64(numerator)
    } else if denominator.is_nan() {
        quiet64(denominator)
    } else if (denominator == 0.0 && numerator == 0.0)
        || (denominator.is_infinite() && numerator.is_infinite())
    {
        f64::from_bits(NAN64)
    } else if denominator == 0.0 || numerator.is_infinite() {
        signed(f64::INFINITY)
    } else if denominator.is_infinite()
        || numerator == 0.0
        || exponent64(numerator) - exponent64(denominator) < -1075
    {
        signed(0.0)
    } else if quotient.is_nan() {
        signed(f64::INFINITY)
    } else {
        signed(quotient)
    }
}

/// V_DIV_FIXUP_F16, on values widened to f32: the quotient was computed in f32 and needs no scaling.
pub fn fixup16(quotient: f32, denominator: f32, numerator: f32) -> f32 {
    let sign = (denominator.to_bits() ^ numerator.to_bits()) & 0x8000_0000;
    let signed = |magnitude: f32| f32::from_bits(magnitude.to_bits() & 0x7fff_ffff | sign);
    if numerator.is_nan() {
        quiet32(numerator)
    } else if denominator.is_nan() {
        quiet32(denominator)
    } else if (denominator == 0.0 && numerator == 0.0)
        || (denominator.is_infinite() && numerator.is_infinite())
    {
        f32::from_bits(NAN32)
    } else if denominator == 0.0 || numerator.is_infinite() {
        signed(f32::INFINITY)
    } else if denominator.is_infinite() || numerator == 0.0 {
        signed(0.0)
    } else {
        signed(quotient)
    }
}

/// The NaN made quiet.
#[inline(always)]
pub fn quiet32(value: f32) -> f32 {
    f32::from_bits(value.to_bits() | 1 << 22)
}

/// The NaN made quiet.
#[inline(always)]
pub fn quiet64(value: f64) -> f64 {
    f64::from_bits(value.to_bits() | 1 << 51)
}
