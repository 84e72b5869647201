//! Float arithmetic against LLVM's APFloat (crate `rustc_apfloat`), which shares no code with the handlers: all pairs of
//! special values and pseudo-random bits, in the modes that keep and that flush denormals.

use rustc_apfloat::ieee::{Double, Half, Single};
use rustc_apfloat::{Float, Round};

use super::{Bits, Random, lanes1, lanes2, lanes3};
use crate::op::Op;

/// MODE with all denormals kept, and with all flushed; IEEE and DX10_CLAMP set.
const KEEP: u32 = 0x3f0;
const FLUSH: u32 = 0x300;

/// The values whose combinations are interesting.
fn special(width: Bits) -> Vec<u64> {
    let (mantissa, exponents) = match width {
        Bits::F16 => (10, 5),
        Bits::F32 => (23, 8),
        Bits::F64 => (52, 11),
    };
    let sign = 1u64 << (mantissa + exponents);
    let infinity = ((1u64 << exponents) - 1) << mantissa;
    let one = (infinity >> 1) & !((1 << mantissa) - 1);
    let positive = [
        0,
        1,
        2,
        (1 << mantissa) - 1,
        1 << mantissa,
        (1 << mantissa) + 1,
        one - (1 << mantissa),
        one - 1,
        one,
        one + 1,
        one + (1 << (mantissa - 1)),
        one + (1 << mantissa),
        one + (3 << (mantissa - 1)),
        one + ((mantissa + 1) << mantissa),
        infinity - 1,
        infinity - (1 << mantissa),
        infinity,
        infinity | 1 << (mantissa - 1),
    ];
    positive.iter().flat_map(|v| [*v, v | sign]).collect()
}

fn pairs(width: Bits) -> Vec<[u64; 2]> {
    let special = special(width);
    let mut pairs: Vec<_> = special.iter().flat_map(|a| special.iter().map(move |b| [*a, *b])).collect();
    let mut random = Random::new(1);
    for _ in 0..2000 {
        pairs.push([random.float(width), random.float(width)]);
    }
    pairs
}

fn triples(width: Bits) -> Vec<[u64; 3]> {
    let special = special(width);
    let mut random = Random::new(2);
    let mut triples = Vec::new();
    for a in &special {
        for b in &special {
            triples.push([*a, *b, special[random.below(special.len())]]);
            triples.push([*a, *b, random.float(width)]);
        }
    }
    for _ in 0..3000 {
        triples.push([random.float(width), random.float(width), random.float(width)]);
    }
    triples
}

/// Flushed as the mode says.
fn flushed<F: Float>(value: F, flush: bool) -> F {
    if flush && value.is_denormal() { F::ZERO.copy_sign(value) } else { value }
}

fn check2<F: Float>(op: Op, width: Bits, exact: impl Fn(F, F) -> F) {
    for mode in [KEEP, FLUSH] {
        let flush = mode == FLUSH;
        let pairs = pairs(width);
        for (pair, result) in pairs.iter().zip(lanes2(op, mode, &pairs)) {
            let [a, b] = pair.map(|v| flushed(F::from_bits(u128::from(v)), flush));
            let expected = flushed(exact(a, b), flush);
            compare(op, mode, pair, F::from_bits(u128::from(result)), expected);
        }
    }
}

fn check3<F: Float>(op: Op, width: Bits, exact: impl Fn(F, F, F) -> F) {
    for mode in [KEEP, FLUSH] {
        let flush = mode == FLUSH;
        let triples = triples(width);
        for (triple, result) in triples.iter().zip(lanes3(op, mode, &triples)) {
            let [a, b, c] = triple.map(|v| flushed(F::from_bits(u128::from(v)), flush));
            let expected = flushed(exact(a, b, c), flush);
            compare(op, mode, triple, F::from_bits(u128::from(result)), expected);
        }
    }
}

fn check1<F: Float>(op: Op, width: Bits, exact: impl Fn(F) -> F) {
    for mode in [KEEP, FLUSH] {
        let flush = mode == FLUSH;
        let values: Vec<_> = pairs(width).into_iter().map(|[a, _]| [a]).collect();
        for (value, result) in values.iter().zip(lanes1(op, mode, &values)) {
            let [a] = value.map(|v| flushed(F::from_bits(u128::from(v)), flush));
            compare(op, mode, value, F::from_bits(u128::from(result)), flushed(exact(a), flush));
        }
    }
}

/// A NaN has no particular payload, but it is quiet.
fn compare<F: Float>(op: Op, mode: u32, sources: &[u64], result: F, expected: F) {
    let equal = if expected.is_nan() {
        result.is_nan() && !result.is_signaling()
    } else {
        result.bitwise_eq(expected)
    };
    assert!(
        equal,
        "{} {sources:x?} mode {mode:#x}: {result} ({:#x}), expected {expected} ({:#x})",
        op.row().name,
        result.to_bits(),
        expected.to_bits()
    );
}

#[test]
fn sums_products_differences() {
    check2::<Single>(Op::VAddF32, Bits::F32, |a, b| (a + b).value);
    check2::<Single>(Op::VSubF32, Bits::F32, |a, b| (a - b).value);
    check2::<Single>(Op::VSubrevF32, Bits::F32, |a, b| (b - a).value);
    check2::<Single>(Op::VMulF32, Bits::F32, |a, b| (a * b).value);
    check2::<Double>(Op::VAddF64, Bits::F64, |a, b| (a + b).value);
    check2::<Double>(Op::VMulF64, Bits::F64, |a, b| (a * b).value);
    check2::<Half>(Op::VAddF16, Bits::F16, |a, b| (a + b).value);
    check2::<Half>(Op::VSubF16, Bits::F16, |a, b| (a - b).value);
    check2::<Half>(Op::VSubrevF16, Bits::F16, |a, b| (b - a).value);
    check2::<Half>(Op::VMulF16, Bits::F16, |a, b| (a * b).value);
}

#[test]
fn fused_multiply_add() {
    check3::<Single>(Op::VFmaF32, Bits::F32, |a, b, c| a.mul_add(b, c).value);
    check3::<Double>(Op::VFmaF64, Bits::F64, |a, b, c| a.mul_add(b, c).value);
    check3::<Half>(Op::VFmaLegacyF16, Bits::F16, |a, b, c| a.mul_add(b, c).value);
    // The destination is the third source.
    check3::<Single>(Op::VFmacF32, Bits::F32, |a, b, c| a.mul_add(b, c).value);
}

#[test]
fn multiply_add_rounds_twice_and_knows_no_denormals() {
    let mad = |a, b, c| {
        let product = flushed((flushed::<Single>(a, true) * flushed(b, true)).value, true);
        flushed((product + flushed(c, true)).value, true)
    };
    check3::<Single>(Op::VMadF32, Bits::F32, mad);
    check3::<Single>(Op::VMacF32, Bits::F32, mad);
    check3::<Single>(Op::VMadmkF32, Bits::F32, mad);
    check3::<Single>(Op::VMadakF32, Bits::F32, mad);
    check3::<Half>(Op::VMadLegacyF16, Bits::F16, |a, b, c| {
        let product = flushed((flushed::<Half>(a, true) * flushed(b, true)).value, true);
        flushed((product + flushed(c, true)).value, true)
    });
}

/// The minimum in IEEE mode: a signalling NaN comes out quiet, a quiet one loses against a number.
fn least<F: Float>(a: F, b: F) -> F {
    if a.is_signaling() || b.is_signaling() {
        return F::NAN;
    }
    if a.is_nan() {
        return b;
    }
    if b.is_nan() {
        return a;
    }
    if a.is_zero() && b.is_zero() {
        if a.is_negative() { a } else { b }
    } else if a < b {
        a
    } else {
        b
    }
}

fn greatest<F: Float>(a: F, b: F) -> F {
    -least(-a, -b)
}

#[test]
fn minimum_and_maximum() {
    check2::<Single>(Op::VMinF32, Bits::F32, least);
    check2::<Single>(Op::VMaxF32, Bits::F32, greatest);
    check2::<Double>(Op::VMinF64, Bits::F64, least);
    check2::<Double>(Op::VMaxF64, Bits::F64, greatest);
    check2::<Half>(Op::VMinF16, Bits::F16, least);
    check2::<Half>(Op::VMaxF16, Bits::F16, greatest);
    check3::<Single>(Op::VMin3F32, Bits::F32, |a, b, c| least(least(a, b), c));
    check3::<Single>(Op::VMax3F32, Bits::F32, |a, b, c| greatest(greatest(a, b), c));
}

#[test]
fn without_ieee_mode_a_signalling_nan_loses_too() {
    let one = u64::from(1.0f32.to_bits());
    let signalling = 0x7f80_0001;
    assert_eq!(lanes2(Op::VMinF32, 0x1f0, &[[signalling, one], [one, signalling]]), [one, one]);
    assert_eq!(lanes2(Op::VMaxF32, 0x1f0, &[[signalling, one], [one, signalling]]), [one, one]);
    assert_eq!(lanes2(Op::VMinF16, 0x1f0, &[[0x7c01, 0x3c00], [0x3c00, 0x7c01]]), [0x3c00, 0x3c00]);
    assert_eq!(lanes2(Op::VMinF32, 0x3f0, &[[signalling, one]]), [0x7fc0_0001]);
}

#[test]
fn median() {
    // The ISA: the minimum of all if one is a NaN, else the one that is neither the least nor the greatest.
    check3::<Single>(Op::VMed3F32, Bits::F32, |a, b, c| {
        if a.is_nan() || b.is_nan() || c.is_nan() {
            return least(least(a, b), c);
        }
        let mut sorted = [a, b, c];
        let key =
            |v: &Single| (v.to_bits() as u32 as i32) ^ ((v.to_bits() as u32 as i32) >> 31 & 0x7fff_ffff);
        sorted.sort_by_key(key);
        sorted[1]
    });
}

#[test]
fn roundings_to_integers() {
    check1::<Single>(Op::VTruncF32, Bits::F32, |a| a.round_to_integral(Round::TowardZero).value);
    check1::<Single>(Op::VCeilF32, Bits::F32, |a| a.round_to_integral(Round::TowardPositive).value);
    check1::<Single>(Op::VFloorF32, Bits::F32, |a| a.round_to_integral(Round::TowardNegative).value);
    check1::<Single>(Op::VRndneF32, Bits::F32, |a| a.round_to_integral(Round::NearestTiesToEven).value);
    check1::<Double>(Op::VTruncF64, Bits::F64, |a| a.round_to_integral(Round::TowardZero).value);
    check1::<Double>(Op::VCeilF64, Bits::F64, |a| a.round_to_integral(Round::TowardPositive).value);
    check1::<Double>(Op::VFloorF64, Bits::F64, |a| a.round_to_integral(Round::TowardNegative).value);
    check1::<Double>(Op::VRndneF64, Bits::F64, |a| a.round_to_integral(Round::NearestTiesToEven).value);
    check1::<Half>(Op::VTruncF16, Bits::F16, |a| a.round_to_integral(Round::TowardZero).value);
    check1::<Half>(Op::VCeilF16, Bits::F16, |a| a.round_to_integral(Round::TowardPositive).value);
    check1::<Half>(Op::VFloorF16, Bits::F16, |a| a.round_to_integral(Round::TowardNegative).value);
    check1::<Half>(Op::VRndneF16, Bits::F16, |a| a.round_to_integral(Round::NearestTiesToEven).value);
}

#[test]
fn scaling_by_powers_of_two() {
    let powers: [i32; 12] = [0, 1, -1, 23, -24, 126, -126, -149, 300, -300, i32::MAX, i32::MIN];
    for mode in [KEEP, FLUSH] {
        let flush = mode == FLUSH;
        let pairs: Vec<_> =
            special(Bits::F32).iter().flat_map(|a| powers.map(|p| [*a, u64::from(p as u32)])).collect();
        for (pair, result) in pairs.iter().zip(lanes2(Op::VLdexpF32, mode, &pairs)) {
            let a = flushed(Single::from_bits(u128::from(pair[0])), flush);
            let expected = flushed(a.scalbn((pair[1] as i32).clamp(-1000, 1000)), flush);
            compare(Op::VLdexpF32, mode, pair, Single::from_bits(u128::from(result)), expected);
        }
        let powers = powers.into_iter().chain([52, -53, 1000, -1000, 1023, -1022, -1074, -1075, 2100, -2100]);
        let pairs: Vec<_> = powers
            .flat_map(|p| special(Bits::F64).into_iter().map(move |a| [a, u64::from(p as u32)]))
            .collect();
        for (pair, result) in pairs.iter().zip(lanes2(Op::VLdexpF64, mode, &pairs)) {
            let a = flushed(Double::from_bits(u128::from(pair[0])), flush);
            let expected = flushed(a.scalbn((pair[1] as i32).clamp(-4000, 4000)), flush);
            compare(Op::VLdexpF64, mode, pair, Double::from_bits(u128::from(result)), expected);
        }
        let pairs: Vec<_> = special(Bits::F16)
            .iter()
            .flat_map(|a| {
                [0i16, 1, -1, 10, -11, 15, -14, 24, -24, 40, -40, i16::MAX, i16::MIN]
                    .map(|p| [*a, u64::from(p as u16)])
            })
            .collect();
        for (pair, result) in pairs.iter().zip(lanes2(Op::VLdexpF16, mode, &pairs)) {
            let a = flushed(Half::from_bits(u128::from(pair[0])), flush);
            let expected = flushed(a.scalbn(i32::from(pair[1] as i16)), flush);
            compare(Op::VLdexpF16, mode, pair, Half::from_bits(u128::from(result)), expected);
        }
    }
}

#[test]
fn mantissa_and_exponent() {
    for (op_exp, op_mant, width) in [
        (Op::VFrexpExpI32F32, Op::VFrexpMantF32, Bits::F32),
        (Op::VFrexpExpI32F64, Op::VFrexpMantF64, Bits::F64),
        (Op::VFrexpExpI16F16, Op::VFrexpMantF16, Bits::F16),
    ] {
        let values: Vec<_> = pairs(width).into_iter().map(|[a, _]| [a]).collect();
        let (exps, mants) = (lanes1(op_exp, KEEP, &values), lanes1(op_mant, KEEP, &values));
        for ((value, exp), mant) in values.iter().zip(exps).zip(mants) {
            let exp = if width == Bits::F16 { i32::from(exp as i16) } else { exp as i32 };
            match width {
                Bits::F16 => {
                    frexp(Half::from_bits(u128::from(value[0])), exp, Half::from_bits(u128::from(mant)))
                }
                Bits::F32 => {
                    frexp(Single::from_bits(u128::from(value[0])), exp, Single::from_bits(u128::from(mant)))
                }
                Bits::F64 => {
                    frexp(Double::from_bits(u128::from(value[0])), exp, Double::from_bits(u128::from(mant)))
                }
            }
        }
    }
}

fn frexp<F: Float>(value: F, exponent: i32, mantissa: F) {
    if !value.is_finite_non_zero() {
        assert_eq!(exponent, 0, "{value}");
        assert!(mantissa.bitwise_eq(value) || value.is_nan() && mantissa.is_nan(), "{value}");
        return;
    }
    let mut expected = 0;
    let expected_mantissa = value.frexp(&mut expected);
    assert_eq!(exponent, expected, "{value}");
    assert!(mantissa.bitwise_eq(expected_mantissa), "{value}: {mantissa}");
}

#[test]
fn fractions_stay_below_one() {
    let values = [0.0f32, 1.5, -1.5, -0.25, 7.0, -1e-30, f32::INFINITY].map(|v| [u64::from(v.to_bits())]);
    let results = lanes1(Op::VFractF32, KEEP, &values);
    let expected = [0.0f32, 0.5, 0.5, 0.75, 0.0, 0.999_999_94].map(|v| u64::from(v.to_bits()));
    assert_eq!(results[..6], expected);
    assert!(f32::from_bits(results[6] as u32).is_nan());
    let tiny = [[(-1e-300f64).to_bits()], [2.75f64.to_bits()]];
    assert_eq!(lanes1(Op::VFractF64, KEEP, &tiny), [1.0f64.to_bits() - 1, 0.75f64.to_bits()]);
    assert_eq!(lanes1(Op::VFractF16, KEEP, &[[0x8001], [0x3e00]]), [0x3bff, 0x3800]);
}

#[test]
fn legacy_multiplication_by_zero_is_zero() {
    let bits = |v: f32| u64::from(v.to_bits());
    let pairs = [[bits(0.0), bits(f32::INFINITY)], [bits(f32::NAN), bits(-0.0)], [bits(3.0), bits(-2.0)]];
    assert_eq!(lanes2(Op::VMulLegacyF32, KEEP, &pairs), [0, 0, bits(-6.0)]);
    let triples = [[bits(0.0), bits(f32::INFINITY), bits(7.0)], [bits(3.0), bits(-2.0), bits(1.0)]];
    assert_eq!(lanes3(Op::VMadLegacyF32, KEEP, &triples), [bits(7.0), bits(-5.0)]);
}

#[test]
fn cube_map_coordinates() {
    // AMD "Vega" ISA, V_CUBEID_F32 and its kin; one direction for each face: (x, y, z), face, s, t, major axis.
    let table: [([f32; 3], [f32; 4]); 6] = [
        ([3.0, 1.0, 2.0], [0.0, -2.0, -1.0, 6.0]),
        ([-3.0, 1.0, 2.0], [1.0, 2.0, -1.0, -6.0]),
        ([1.0, 3.0, 2.0], [2.0, 1.0, 2.0, 6.0]),
        ([1.0, -3.0, 2.0], [3.0, 1.0, -2.0, -6.0]),
        ([1.0, 2.0, 3.0], [4.0, 1.0, -2.0, 6.0]),
        ([1.0, 2.0, -3.0], [5.0, -1.0, -2.0, -6.0]),
    ];
    let sources = table.map(|(v, _)| v.map(|v| u64::from(v.to_bits())));
    for (n, op) in [Op::VCubeidF32, Op::VCubescF32, Op::VCubetcF32, Op::VCubemaF32].into_iter().enumerate() {
        let expected = table.map(|(_, v)| u64::from(v[n].to_bits()));
        assert_eq!(lanes3(op, KEEP, &sources), expected, "{}", op.row().name);
    }
}
