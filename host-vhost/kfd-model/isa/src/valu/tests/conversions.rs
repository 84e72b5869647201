//! Conversions. Expected values from LLVM's APFloat, from Rust's conversions on another path, or written out by hand
//! (AMD "Vega" ISA: float to integer cuts, saturates, and makes 0 of a NaN).

use rustc_apfloat::ieee::{Double, Half, Single};
use rustc_apfloat::{Float, FloatConvert, Round};

use super::{Bits, Case, Random, lanes1, lanes2, lanes3};
use crate::op::Op;

const KEEP: u32 = 0x3f0;

fn f(v: f32) -> u64 {
    u64::from(v.to_bits())
}

fn i(v: i32) -> u64 {
    u64::from(v as u32)
}

#[test]
fn floats_to_integers() {
    Case::new(Op::VCvtI32F32).check(&[
        ([f(0.0)], 0),
        ([f(-0.9)], 0),
        ([f(1.9)], 1),
        ([f(-1.9)], i(-1)),
        ([f(2_147_483_520.0)], 2_147_483_520),
        ([f(2_147_483_648.0)], 0x7fff_ffff),
        ([f(-2_147_483_648.0)], 0x8000_0000),
        ([f(-3e9)], 0x8000_0000),
        ([f(f32::INFINITY)], 0x7fff_ffff),
        ([f(f32::NEG_INFINITY)], 0x8000_0000),
        ([f(f32::NAN)], 0),
    ]);
    Case::new(Op::VCvtU32F32).check(&[
        ([f(1.9)], 1),
        ([f(-1.0)], 0),
        ([f(4_294_967_040.0)], 4_294_967_040),
        ([f(4_294_967_296.0)], 0xffff_ffff),
        ([f(f32::INFINITY)], 0xffff_ffff),
        ([f(f32::NAN)], 0),
    ]);
    Case::new(Op::VCvtI32F64).check(&[
        ([2_147_483_647.9f64.to_bits()], 0x7fff_ffff),
        ([(-2_147_483_648.9f64).to_bits()], 0x8000_0000),
        ([(-1.5f64).to_bits()], i(-1)),
        ([f64::NAN.to_bits()], 0),
    ]);
    Case::new(Op::VCvtU32F64).check(&[
        ([4_294_967_295.9f64.to_bits()], 0xffff_ffff),
        ([1e300f64.to_bits()], 0xffff_ffff),
        ([(-1.5f64).to_bits()], 0),
    ]);
    Case::new(Op::VCvtFlrI32F32).check(&[
        ([f(-0.5)], i(-1)),
        ([f(1.9)], 1),
        ([f(-2.0)], i(-2)),
        ([f(1e20)], 0x7fff_ffff),
    ]);
    Case::new(Op::VCvtRpiI32F32).check(&[
        ([f(0.5)], 1),
        ([f(-0.5)], 0),
        ([f(-0.6)], i(-1)),
        ([f(2.49)], 2),
        ([f(0.499_999_97)], 0),
    ]);
    Case::new(Op::VCvtU16F16).check(&[
        ([0x3e00], 1),
        ([0xbc00], 0),
        ([0x7bff], 65504),
        ([0x7c00], 65535),
        ([0x7e00], 0),
    ]);
    Case::new(Op::VCvtI16F16).check(&[
        ([0xbe00], 0xffff),
        ([0x7800], 0x7fff),
        ([0xf800], 0x8000),
        ([0xfc00], 0x8000),
        ([0x7e00], 0),
    ]);
}

#[test]
fn integers_to_floats() {
    let mut random = Random::new(3);
    let mut values: Vec<_> =
        [0u64, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x0100_0001, 0x0100_0003, 0xffff_ff7f, 0xffff_ff80]
            .map(|v| [v])
            .to_vec();
    values.extend((0..500).map(|_| [random.next() >> 32]));
    let exact = |v: i128| Single::from_i128(v).value.to_bits() as u64;
    assert_eq!(
        lanes1(Op::VCvtF32U32, KEEP, &values),
        values.iter().map(|[v]| exact(i128::from(*v))).collect::<Vec<_>>()
    );
    assert_eq!(
        lanes1(Op::VCvtF32I32, KEEP, &values),
        values.iter().map(|[v]| exact(i128::from(*v as u32 as i32))).collect::<Vec<_>>()
    );
    let exact = |v: i128| Double::from_i128(v).value.to_bits() as u64;
    assert_eq!(
        lanes1(Op::VCvtF64U32, KEEP, &values),
        values.iter().map(|[v]| exact(i128::from(*v))).collect::<Vec<_>>()
    );
    assert_eq!(
        lanes1(Op::VCvtF64I32, KEEP, &values),
        values.iter().map(|[v]| exact(i128::from(*v as u32 as i32))).collect::<Vec<_>>()
    );
    let all: Vec<_> = (0..=0xffffu64).map(|v| [v]).collect();
    let exact = |v: i128| Half::from_i128(v).value.to_bits() as u64;
    assert_eq!(
        lanes1(Op::VCvtF16U16, KEEP, &all),
        all.iter().map(|[v]| exact(i128::from(*v))).collect::<Vec<_>>()
    );
    assert_eq!(
        lanes1(Op::VCvtF16I16, KEEP, &all),
        all.iter().map(|[v]| exact(i128::from(*v as i16))).collect::<Vec<_>>()
    );
    let bytes = [[0x0102_03ffu64]];
    for (op, byte) in [
        (Op::VCvtF32Ubyte0, 255.0f32),
        (Op::VCvtF32Ubyte1, 3.0),
        (Op::VCvtF32Ubyte2, 2.0),
        (Op::VCvtF32Ubyte3, 1.0),
    ] {
        assert_eq!(lanes1(op, KEEP, &bytes), [f(byte)]);
    }
    // -8..7 in sixteenths.
    let nibbles: Vec<_> = (0..16u64).map(|v| [v]).collect();
    let expected: Vec<_> = (0..16i32).map(|v| f((if v < 8 { v } else { v - 16 }) as f32 / 16.0)).collect();
    assert_eq!(lanes1(Op::VCvtOffF32I4, KEEP, &nibbles), expected);
}

#[test]
fn all_halves_to_floats() {
    let all: Vec<_> = (0..=0xffffu64).map(|v| [v]).collect();
    for (value, result) in all.iter().zip(lanes1(Op::VCvtF32F16, KEEP, &all)) {
        let expected: Single = Half::from_bits(u128::from(value[0])).convert(&mut false).value;
        let result = Single::from_bits(u128::from(result));
        assert!(if expected.is_nan() { result.is_nan() } else { result.bitwise_eq(expected) }, "{value:x?}");
    }
}

#[test]
fn floats_to_halves_round_once() {
    let mut random = Random::new(4);
    let mut values: Vec<[u64; 1]> = Vec::new();
    // Every f16, its neighbours in f32, and the ties between two of them.
    for half in (0..0x7c00u64).step_by(7) {
        let single: Single = Half::from_bits(u128::from(half)).convert(&mut false).value;
        let bits = single.to_bits() as u64;
        values.extend(
            [bits, bits + 1, bits.saturating_sub(1), bits | 0x1000, bits | 0x1001, bits | 0xfff].map(|v| [v]),
        );
    }
    for edge in [
        65503.0f32,
        65504.0,
        65519.0,
        65520.0,
        65535.0,
        65536.0,
        1e30,
        f32::INFINITY,
        f32::NAN,
        2.98e-8,
        2.99e-8,
        1e-40,
    ] {
        values.extend([[f(edge)], [f(-edge)]]);
    }
    values.extend((0..5000).map(|_| [random.float(Bits::F32)]));
    for (value, result) in values.iter().zip(lanes1(Op::VCvtF16F32, KEEP, &values)) {
        let expected: Half = Single::from_bits(u128::from(value[0])).convert(&mut false).value;
        let result = Half::from_bits(u128::from(result));
        assert!(
            if expected.is_nan() { result.is_nan() } else { result.bitwise_eq(expected) },
            "{value:x?}: {result}"
        );
    }
    // Towards zero, packed with itself.
    let pairs: Vec<_> = values.iter().map(|[v]| [*v, *v]).collect();
    for (pair, result) in pairs.iter().zip(lanes2(Op::VCvtPkrtzF16F32, KEEP, &pairs)) {
        let expected: Half =
            Single::from_bits(u128::from(pair[0])).convert_r(Round::TowardZero, &mut false).value;
        assert_eq!(result >> 16, result & 0xffff);
        let result = Half::from_bits(u128::from(result & 0xffff));
        assert!(
            if expected.is_nan() { result.is_nan() } else { result.bitwise_eq(expected) },
            "{pair:x?}: {result}"
        );
    }
}

#[test]
fn doubles_and_singles() {
    let mut random = Random::new(5);
    let mut values: Vec<[u64; 1]> = (0..4000).map(|_| [random.float(Bits::F64)]).collect();
    for edge in [
        0.0,
        1e-46,
        1.4e-45,
        2.2e-45,
        1.1754943e-38,
        1.17549429e-38,
        3.4e38,
        3.4028235e38,
        3.4028236e38,
        1e39,
        f64::INFINITY,
        f64::NAN,
    ] {
        values.extend([[edge.to_bits()], [(-edge).to_bits()]]);
    }
    for mode in [KEEP, 0x300] {
        for (value, result) in values.iter().zip(lanes1(Op::VCvtF32F64, mode, &values)) {
            let source = Double::from_bits(u128::from(value[0]));
            let source =
                if mode != KEEP && source.is_denormal() { Double::ZERO.copy_sign(source) } else { source };
            let expected: Single = source.convert(&mut false).value;
            let expected = if mode != KEEP && expected.is_denormal() {
                Single::ZERO.copy_sign(expected)
            } else {
                expected
            };
            let result = Single::from_bits(u128::from(result));
            assert!(
                if expected.is_nan() { result.is_nan() } else { result.bitwise_eq(expected) },
                "{value:x?}: {result}"
            );
        }
    }
    let singles: Vec<_> = (0..4000)
        .map(|_| [random.float(Bits::F32)])
        .chain([[1], [0x8000_0001], [0x7f80_0000], [0x7fc0_0000]])
        .collect();
    for (value, result) in singles.iter().zip(lanes1(Op::VCvtF64F32, KEEP, &singles)) {
        let expected: Double = Single::from_bits(u128::from(value[0])).convert(&mut false).value;
        let result = Double::from_bits(u128::from(result));
        assert!(
            if expected.is_nan() { result.is_nan() } else { result.bitwise_eq(expected) },
            "{value:x?}: {result}"
        );
    }
    assert_eq!(
        lanes1(Op::VCvtF64F32, 0x300, &[[0x8000_0001]]),
        [1 << 63],
        "a denormal source counts as zero"
    );
}

#[test]
fn packing() {
    let pair = |a: f32, b: f32| [f(a), f(b)];
    let table = [pair(1.0, -1.0), pair(0.5, 2.0), pair(-5.0, f32::NAN), pair(1.0 / 32767.0, 0.000_045)];
    // 16383.5 ties to even, 16384; 1.47 rounds to 1.
    assert_eq!(
        lanes2(Op::VCvtPknormI16F32, KEEP, &table),
        [0x8001_7fff, 0x7fff_4000, 0x0000_8001, 0x0001_0001]
    );
    // 32767.5 ties to even, 32768; 2.0 (1/32767 of 65535) and 2.95.
    assert_eq!(lanes2(Op::VCvtPknormU16F32, KEEP, &table), [0x0000_ffff, 0xffff_8000, 0, 0x0003_0002]);
    Case::new(Op::VCvtPkU16U32).check(&[([5, 0x1_0000], 0xffff_0005), ([0xffff_ffff, 0xffff], 0xffff_ffff)]);
    Case::new(Op::VCvtPkI16I32).check(&[([i(-40000), 40000], 0x7fff_8000), ([i(-5), 5], 0x0005_fffb)]);
    assert_eq!(
        lanes3(
            Op::VCvtPkU8F32,
            KEEP,
            &[
                [f(2.5), 0, 0xaabb_ccdd],
                [f(300.0), 2, 0xaabb_ccdd],
                [f(-1.0), 7, 0xaabb_ccdd],
                [f(f32::NAN), 1, 0xaabb_ccdd]
            ]
        ),
        [0xaabb_cc02, 0xaaff_ccdd, 0x00bb_ccdd, 0xaabb_00dd]
    );
    Case::new(Op::VSatPkU8I16).check(&[
        ([0x0010_ffff], 0x1000),
        ([0x7fff_0100], 0xffff),
        ([0x8000_00ff], 0x00ff),
    ]);
    assert_eq!(
        lanes1(Op::VCvtNormI16F16, KEEP, &[[0x3c00], [0xbc00], [0x3800], [0x7e00]]),
        [0x7fff, 0x8001, 0x4000, 0]
    );
    assert_eq!(lanes1(Op::VCvtNormU16F16, KEEP, &[[0x3c00], [0xbc00], [0x3800]]), [0xffff, 0, 0x8000]);
    assert_eq!(lanes2(Op::VPackB32F16, KEEP, &[[0xdead_3c01, 0xbeef_0001]]), [0x0001_3c01]);
}

#[test]
fn approximations_are_within_one_unit_in_the_last_place() {
    // The hardware's own tolerance (AMD "Vega" ISA: 1 ULP); the exact values from f64 functions of Rust's library.
    let values: Vec<f32> = (1..2000).map(|n| 0.013 * n as f32).collect();
    let sources: Vec<_> = values.iter().map(|v| [f(*v)]).collect();
    let check = |op: Op, exact: &dyn Fn(f64) -> f64| {
        for (value, result) in values.iter().zip(lanes1(op, KEEP, &sources)) {
            let (result, exact) = (f32::from_bits(result as u32), exact(f64::from(*value)));
            let unit = f64::from((exact as f32).abs()) * f64::from(f32::EPSILON);
            assert!(
                (f64::from(result) - exact).abs() <= unit.max(1e-9),
                "{} {value}: {result}, {exact}",
                op.row().name
            );
        }
    };
    check(Op::VRcpF32, &|v| 1.0 / v);
    check(Op::VRcpIflagF32, &|v| 1.0 / v);
    check(Op::VSqrtF32, &f64::sqrt);
    check(Op::VRsqF32, &|v| 1.0 / v.sqrt());
    check(Op::VExpF32, &|v| (v * std::f64::consts::LN_2).exp());
    check(Op::VLogF32, &|v| v.ln() / std::f64::consts::LN_2);
    check(Op::VSinF32, &|v| (v * std::f64::consts::TAU).sin());
    check(Op::VCosF32, &|v| (v * std::f64::consts::TAU).cos());
    let halves: Vec<_> = (0x3000..0x4c00u64).step_by(3).map(|v| [v]).collect();
    let check = |op: Op, exact: &dyn Fn(f64) -> f64| {
        for (value, result) in halves.iter().zip(lanes1(op, KEEP, &halves)) {
            let number = |bits: u64| Half::from_bits(u128::from(bits)).convert(&mut false).value;
            let (value, result): (Double, Double) = (number(value[0]), number(result));
            let (value, result) =
                (f64::from_bits(value.to_bits() as u64), f64::from_bits(result.to_bits() as u64));
            let exact = exact(value);
            assert!(
                (result - exact).abs() <= exact.abs() / 1024.0 + 6e-8,
                "{} {value}: {result}, {exact}",
                op.row().name
            );
        }
    };
    check(Op::VRcpF16, &|v| 1.0 / v);
    check(Op::VSqrtF16, &f64::sqrt);
    check(Op::VRsqF16, &|v| 1.0 / v.sqrt());
    check(Op::VLogF16, &|v| v.ln() / std::f64::consts::LN_2);
    check(Op::VSinF16, &|v| (v * std::f64::consts::TAU).sin());
}

#[test]
fn special_values_of_approximations() {
    let results = |op: Op, values: &[f32]| -> Vec<f32> {
        let sources: Vec<_> = values.iter().map(|v| [f(*v)]).collect();
        lanes1(op, KEEP, &sources).into_iter().map(|v| f32::from_bits(v as u32)).collect()
    };
    let inf = f32::INFINITY;
    assert_eq!(results(Op::VRcpF32, &[0.0, -0.0, inf, -inf, 1e-40, 2e38]), [inf, -inf, 0.0, -0.0, inf, 0.0]);
    assert_eq!(results(Op::VLogF32, &[0.0, 1.0, 8.0, inf, 1e-40]), [-inf, 0.0, 3.0, inf, -inf]);
    assert!(results(Op::VLogF32, &[-1.0])[0].is_nan());
    assert_eq!(
        results(Op::VExpF32, &[0.0, 10.0, -1.0, 128.0, -127.0, -inf, inf]),
        [1.0, 1024.0, 0.5, inf, 0.0, 0.0, inf]
    );
    assert_eq!(results(Op::VSqrtF32, &[4.0, 0.0, inf, 1e-40]), [2.0, 0.0, inf, 0.0]);
    assert!(results(Op::VSqrtF32, &[-1.0])[0].is_nan());
    assert_eq!(results(Op::VRsqF32, &[4.0, 0.0, inf]), [0.5, inf, 0.0]);
    // Quarter turns are exact; the domain ends at 256 turns.
    assert_eq!(results(Op::VSinF32, &[0.0, 0.25, 0.5, 0.75, 1.0, 256.25]), [0.0, 1.0, 0.0, -1.0, 0.0, 0.0]);
    assert_eq!(results(Op::VCosF32, &[0.0, 0.25, 0.5, 0.75, 1.0, 256.25]), [1.0, 0.0, -1.0, 0.0, 1.0, 1.0]);
    assert!(results(Op::VSinF32, &[inf])[0].is_nan());
    let wide = |op: Op, values: &[f64]| -> Vec<f64> {
        let sources: Vec<_> = values.iter().map(|v| [v.to_bits()]).collect();
        lanes1(op, KEEP, &sources).into_iter().map(f64::from_bits).collect()
    };
    assert_eq!(wide(Op::VRcpF64, &[4.0, -0.0, f64::INFINITY]), [0.25, f64::NEG_INFINITY, 0.0]);
    assert_eq!(wide(Op::VSqrtF64, &[2.25, 0.0]), [1.5, 0.0]);
    assert_eq!(wide(Op::VRsqF64, &[4.0, 0.0]), [0.5, f64::INFINITY]);
}

#[test]
fn reduction_of_large_arguments() {
    // 2 / pi with 2000 bits (mpmath 1.3), cut into segments as AMD "Vega" ISA says at V_TRIG_PREOP_F64.
    let table: [(f64, u64, u64); 8] = [
        (1.0, 0, 0x3fe4_5f30_6dc9_c882),
        (1.0, 1, 0x3c94_a7f0_9d5f_47d4),
        (1.0, 2, 0x394a_6ee0_6db1_4acc),
        (1e300, 0, 0x0d0f_516b_a93d_d63f),
        (1e300, 1, 0x09a7_cbe2_f67a_0e72),
        (3e18, 0, 0x3f6f_306d_c9c8_82a4),
        (1e22, 0, 0x3e8b_7272_20a9_4fe0),
        (1.7e308, 2, 0x04b2_ea6b_fb5f_b11f),
    ];
    let sources = table.map(|(value, segment, _)| [value.to_bits(), segment]);
    assert_eq!(lanes2(Op::VTrigPreopF64, KEEP, &sources), table.map(|(_, _, result)| result));
}
