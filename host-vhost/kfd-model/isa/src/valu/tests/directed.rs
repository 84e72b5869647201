//! Rounding modes. A result is right if it is on the side that the mode asks for and no other number lies between it and
//! the exact value, which f64 holds for these operands; edge cases written out by hand (IEEE 754, section 4.3).

use super::{lanes1, lanes2, lanes3};
use crate::op::Op;

/// MODE with denormals kept and this rounding of all floats: 0 nearest, 1 up, 2 down, 3 towards zero.
fn mode(round: u32) -> u32 {
    0x3f0 | round | round << 2
}

/// Whether `result` is the exact value rounded to f32 in a direction.
fn rounded(result: f32, exact: f64, round: u32) -> bool {
    let value = f64::from(result);
    let up = value >= exact && f64::from(result.next_down()) < exact;
    let down = value <= exact && f64::from(result.next_up()) > exact;
    match round {
        1 => up,
        2 => down,
        3 if exact < 0.0 => up,
        3 => down,
        _ => unreachable!("nearest is tested elsewhere"),
    }
}

/// Pairs of f32 whose sums and products are exact in f64.
fn pairs() -> Vec<[f32; 2]> {
    let mut random = super::Random::new(21);
    (0..2000)
        .map(|_| {
            let mut near = || {
                f32::from_bits(
                    (random.next() as u32 & 0x807f_ffff) | (120 + (random.next() % 14) as u32) << 23,
                )
            };
            [near(), near()]
        })
        .collect()
}

#[test]
fn sums_and_products_in_every_direction() {
    let pairs = pairs();
    let bits: Vec<_> = pairs.iter().map(|pair| pair.map(|v| u64::from(v.to_bits()))).collect();
    let triples: Vec<_> = bits.iter().map(|[a, b]| [*a, *b, u64::from(3.0f32.to_bits())]).collect();
    for round in 1..4 {
        let check = |op: Op, results: Vec<u64>, exact: &dyn Fn(f64, f64) -> f64| {
            for ([a, b], result) in pairs.iter().zip(results) {
                let (result, exact) = (f32::from_bits(result as u32), exact(f64::from(*a), f64::from(*b)));
                assert!(
                    rounded(result, exact, round),
                    "{} {a:e} {b:e} mode {round}: {result:e}, {exact:e}",
                    op.row().name
                );
            }
        };
        let two = |op| lanes2(op, mode(round), &bits);
        check(Op::VAddF32, two(Op::VAddF32), &|a, b| a + b);
        check(Op::VSubF32, two(Op::VSubF32), &|a, b| a - b);
        check(Op::VSubrevF32, two(Op::VSubrevF32), &|a, b| b - a);
        check(Op::VMulF32, two(Op::VMulF32), &|a, b| a * b);
        // The exact sum of a product of 48 bits and 3 still fits f64: the product is at least 2^-14 with 2^-60 last.
        let fused = lanes3(Op::VFmaF32, mode(round), &triples);
        for (([a, b], result), sum) in pairs.iter().zip(fused).zip(0..) {
            let exact = f64::from(*a) * f64::from(*b) + 3.0;
            let lost = (exact - 3.0) - f64::from(*a) * f64::from(*b);
            if lost == 0.0 {
                assert!(
                    rounded(f32::from_bits(result as u32), exact, round),
                    "fma {sum} {a:e} {b:e} mode {round}"
                );
            }
        }
    }
}

#[test]
fn conversions_in_every_direction() {
    let value = |v: f64| [v.to_bits()];
    let f = |v: f32| u64::from(v.to_bits());
    let above_one = 1.0f32.next_up();
    let doubles = [value(1.0 + 1e-9), value(-1.0 - 1e-9), value(1e-60), value(1e300)];
    let tiny = f32::from_bits(1);
    let expected = [
        [f(above_one), f(-1.0), f(tiny), f(f32::INFINITY)],
        [f(1.0), f(-above_one), 0, f(f32::MAX)],
        [f(1.0), f(-1.0), 0, f(f32::MAX)],
    ];
    for (round, expected) in (1..4).zip(expected) {
        assert_eq!(lanes1(Op::VCvtF32F64, mode(round), &doubles), expected, "mode {round}");
    }
    // 2^24 + 1 lies between 2^24 and 2^24 + 2.
    let integers = [[0x0100_0001u64], [0xfeff_ffff]];
    let (low, high) = (16_777_216.0f32, 16_777_218.0f32);
    let expected = [[f(high), f(-low)], [f(low), f(-high)], [f(low), f(-low)]];
    for (round, expected) in (1..4).zip(expected) {
        assert_eq!(lanes1(Op::VCvtF32I32, mode(round), &integers), expected, "mode {round}");
    }
    // 1 + 2^-12 lies between the f16 1 and 1 + 2^-10; 1e6 beyond the largest.
    let singles = [[f(1.0 + 1.0 / 4096.0)], [f(-1.0 - 1.0 / 4096.0)], [f(1e6)], [f(-1e6)]];
    let expected = [
        [0x3c01, 0xbc00, 0x7c00, 0xfbff],
        [0x3c00, 0xbc01, 0x7bff, 0xfc00],
        [0x3c00, 0xbc00, 0x7bff, 0xfbff],
    ];
    for (round, expected) in (1..4).zip(expected) {
        assert_eq!(lanes1(Op::VCvtF16F32, mode(round), &singles), expected, "mode {round}");
    }
}

#[test]
fn wide_and_half_sums() {
    let (one, tiny) = (1.0f64.to_bits(), 1e-30f64.to_bits());
    let expected = [1.0f64.next_up().to_bits(), one, one];
    for (round, expected) in (1..4).zip(expected) {
        assert_eq!(lanes2(Op::VAddF64, mode(round), &[[one, tiny]]), [expected]);
        assert_eq!(lanes3(Op::VFmaF64, mode(round), &[[one, one, tiny]]), [expected]);
    }
    for (round, expected) in (1..4).zip([0x3c01, 0x3c00, 0x3c00]) {
        assert_eq!(lanes2(Op::VAddF16, mode(round), &[[0x3c00, 0x0c00]]), [expected], "1 + 2^-12");
        assert_eq!(lanes3(Op::VFmaLegacyF16, mode(round), &[[0x3c00, 0x0c00, 0x3c00]]), [expected]);
    }
    // An exact zero is negative only downwards.
    let f = |v: f32| u64::from(v.to_bits());
    for (round, expected) in (1..4).zip([0.0f32, -0.0, 0.0]) {
        assert_eq!(lanes2(Op::VSubF32, mode(round), &[[f(5.0), f(5.0)]]), [f(expected)]);
    }
    // The two fields of MODE.ROUND are apart: f32 up, f64 to nearest.
    assert_eq!(lanes2(Op::VAddF32, 0x3f1, &[[f(1.0), f(1e-30)]]), [f(1.0f32.next_up())]);
    assert_eq!(lanes2(Op::VAddF64, 0x3f1, &[[one, tiny]]), [one]);
}
