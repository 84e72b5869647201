//! Conversion between f16 bits and f32, without branches, so that a loop over lanes vectorises (the `half` crate
//! decides by CPU at each call).
//!
//! f16 arithmetic is done in f32, or f64 for fused operations, and rounded once more. That is exact: a sum, product or
//! quotient of two p-bit numbers that is rounded first to at least 2p + 2 bits, then to p, is as rounded once (Figueroa,
//! "When is double rounding innocuous?", 1995); p = 11 here and f32 has 24 bits.

use super::nan::Settle;

/// The value of the f16 in the low half of `bits`.
#[inline(always)]
pub fn to_f32(bits: u32) -> f32 {
    let magnitude = (bits & 0x7fff) << 13;
    // The exponent's bias differs by 112; the multiplication also normalises denormals.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let value = if magnitude >= 0x7c00 << 13 { magnitude | 0x7f80_0000 } else { scaled };
    f32::from_bits(value | (bits & 0x8000) << 16)
}

/// Rounds to f16, to nearest even; the upper half is zero. A NaN stays one, made quiet.
#[inline(always)]
pub fn from_f32(value: f32) -> u32 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Normal results: rebias and let the rounding carry run into the exponent.
    let odd = magnitude >> 13 & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    // Denormal results: adding 0.5 aligns the mantissa with f16's smallest unit, 2^-24, and rounds.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let special = if magnitude > 0x7f80_0000 { 0x7e00 | (magnitude >> 13 & 0x3ff) } else { 0x7c00 };
    let finite = if magnitude < 113 << 23 { small } else { normal };
    let rounded = if magnitude >= 143 << 23 { special } else { finite };
    rounded | bits >> 16 & 0x8000
}

/// Rounds an f64 to f16 once, to nearest even.
#[inline(always)]
pub fn from_f64(value: f64) -> u32 {
    from_f32(to_odd(value))
}

/// Rounds an f64 to f32 such that a further rounding to 22 bits or fewer gives what one rounding would: cut off, and
/// the last bit set if anything was cut off ("round to odd").
#[inline(always)]
pub fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let back = f64::from(near);
    let bits = near.to_bits();
    let cut = if back.abs() > value.abs() { bits.wrapping_sub(1) } else { bits };
    f32::from_bits(if back != value && !value.is_nan() { cut | 1 } else { bits })
}

/// a * b + c for values of f16, rounded once to f16. The product is exact in f32, what the sum loses is found exactly
/// (Knuth's TwoSum), and rounding to odd keeps it in mind.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> u32 {
    let product = a * b;
    let sum = product + c;
    let part = sum - product;
    let error = (product - (sum - part)) + (c - part);
    let bits = sum.settle3(a, b, c).to_bits();
    let towards_zero = (error < 0.0) == (sum > 0.0);
    let odd = if towards_zero { bits.wrapping_sub(1) | 1 } else { bits | 1 };
    // An infinite or NaN sum has a NaN for an error.
    from_f32(f32::from_bits(if error != 0.0 && !error.is_nan() { odd } else { bits }))
}

/// V_MIN_F16 on bits: the other operand if one is a NaN; -0 is less than +0; a signalling NaN wins in IEEE mode, made
/// quiet.
#[inline(always)]
pub fn min<const IEEE: bool>(a: u32, b: u32) -> u32 {
    choose::<IEEE>(a, b, if order(a) < order(b) { a } else { b })
}

/// V_MAX_F16 on bits; see [`min`].
#[inline(always)]
pub fn max<const IEEE: bool>(a: u32, b: u32) -> u32 {
    choose::<IEEE>(a, b, if order(a) > order(b) { a } else { b })
}

/// V_MED3_F16 on bits: the middle one; the least one if one is a NaN.
#[inline(always)]
pub fn median<const IEEE: bool>(a: u32, b: u32, c: u32) -> u32 {
    let least = min::<IEEE>(min::<IEEE>(a, b), c);
    let (low, high) = if order(a) < order(b) { (a, b) } else { (b, a) };
    let middle = if order(c) < order(low) {
        low
    } else if order(c) > order(high) {
        high
    } else {
        c
    };
    if is_nan(a) | is_nan(b) | is_nan(c) { least } else { middle }
}

/// An integer in the order of the numbers, -0 before +0.
#[inline(always)]
fn order(bits: u32) -> i32 {
    let signed = i32::from(bits as i16);
    signed ^ (signed >> 15 & 0x7fff)
}

#[inline(always)]
fn is_nan(bits: u32) -> bool {
    bits & 0x7fff > 0x7c00
}

#[inline(always)]
fn choose<const IEEE: bool>(a: u32, b: u32, ordered: u32) -> u32 {
    let signalling = |bits: u32| IEEE & is_nan(bits) & (bits & 0x200 == 0);
    let other = if is_nan(b) { a } else { ordered };
    let other = if is_nan(a) { b } else { other };
    let other = if signalling(b) { b | 0x200 } else { other };
    if signalling(a) { a | 0x200 } else { other }
}

/// The f16 with denormals replaced by zeros of the same sign.
#[inline(always)]
pub fn flush(bits: u32) -> u32 {
    if bits & 0x7c00 == 0 { bits & 0x8000 } else { bits & 0xffff }
}
