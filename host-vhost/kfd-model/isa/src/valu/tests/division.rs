//! The division that LLVM builds from `v_div_scale`, `v_rcp`, fused steps, `v_div_fmas` and `v_div_fixup`
//! (`SITargetLowering::LowerFDIV32` and `LowerFDIV64`): it is right if its result is IEEE's quotient, which Rust's `/`
//! gives, for all sorts of operands. That tests the scaling rules, for which there is no other public truth.

use super::{Bits, Random, inst, run};
use crate::inst::{Dst, FloatConst, Src};
use crate::op::Op;
use crate::wave::{LANES, Row, Wave, reg};

const X: u8 = 10;
const Y: u8 = 12;
const DENOMINATOR: u8 = 14;
const NUMERATOR: u8 = 16;
const RCP: u8 = 18;
const T0: u8 = 20;
const T1: u8 = 22;
const T2: u8 = 24;
const T3: u8 = 26;
const ONE: Src = Src::Float(FloatConst::One);

fn v(n: u8) -> Src {
    Src::Vgpr(n)
}

/// An instruction with three sources; `neg` as in the encoding.
fn step(wave: &mut Wave, op: Op, dst: u8, src: [Src; 3], neg: u8) {
    let mut step = inst(op, Dst::Vgpr(dst), &src);
    step.modifiers.neg = neg;
    run(wave, &step);
}

/// `v_div_scale` with the mask going to `mask`.
fn scale(wave: &mut Wave, op: Op, dst: u8, mask: u8, src: [Src; 3]) {
    let mut scale = inst(op, Dst::Vgpr(dst), &src);
    scale.sdst = Dst::Sgpr(mask);
    run(wave, &scale);
}

fn divide32(x: [f32; LANES], y: [f32; LANES]) -> [f32; LANES] {
    let mut wave = Wave::new();
    let w = &mut wave;
    w.write_row(usize::from(X), &Row(x.map(f32::to_bits)));
    w.write_row(usize::from(Y), &Row(y.map(f32::to_bits)));
    scale(w, Op::VDivScaleF32, DENOMINATOR, 40, [v(Y), v(Y), v(X)]);
    scale(w, Op::VDivScaleF32, NUMERATOR, reg::VCC, [v(X), v(Y), v(X)]);
    run(w, &inst(Op::VRcpF32, Dst::Vgpr(RCP), &[v(DENOMINATOR)]));
    step(w, Op::VFmaF32, T0, [v(DENOMINATOR), v(RCP), ONE], 1);
    step(w, Op::VFmaF32, RCP, [v(T0), v(RCP), v(RCP)], 0);
    run(w, &inst(Op::VMulF32, Dst::Vgpr(T1), &[v(NUMERATOR), v(RCP)]));
    step(w, Op::VFmaF32, T2, [v(DENOMINATOR), v(T1), v(NUMERATOR)], 1);
    step(w, Op::VFmaF32, T1, [v(T2), v(RCP), v(T1)], 0);
    step(w, Op::VFmaF32, T3, [v(DENOMINATOR), v(T1), v(NUMERATOR)], 1);
    step(w, Op::VDivFmasF32, T3, [v(T3), v(RCP), v(T1)], 0);
    step(w, Op::VDivFixupF32, T3, [v(T3), v(Y), v(X)], 0);
    w.row(T3).0.map(f32::from_bits)
}

fn divide64(x: [f64; LANES], y: [f64; LANES]) -> [f64; LANES] {
    let mut wave = Wave::new();
    let w = &mut wave;
    for (n, values) in [(X, x), (Y, y)] {
        w.write_row(usize::from(n), &Row(values.map(|v| v.to_bits() as u32)));
        w.write_row(usize::from(n) + 1, &Row(values.map(|v| (v.to_bits() >> 32) as u32)));
    }
    scale(w, Op::VDivScaleF64, DENOMINATOR, 40, [v(Y), v(Y), v(X)]);
    run(w, &inst(Op::VRcpF64, Dst::Vgpr(RCP), &[v(DENOMINATOR)]));
    step(w, Op::VFmaF64, T0, [v(DENOMINATOR), v(RCP), ONE], 1);
    step(w, Op::VFmaF64, RCP, [v(RCP), v(T0), v(RCP)], 0);
    step(w, Op::VFmaF64, T0, [v(DENOMINATOR), v(RCP), ONE], 1);
    scale(w, Op::VDivScaleF64, NUMERATOR, reg::VCC, [v(X), v(Y), v(X)]);
    step(w, Op::VFmaF64, RCP, [v(RCP), v(T0), v(RCP)], 0);
    run(w, &inst(Op::VMulF64, Dst::Vgpr(T1), &[v(NUMERATOR), v(RCP)]));
    step(w, Op::VFmaF64, T2, [v(DENOMINATOR), v(T1), v(NUMERATOR)], 1);
    step(w, Op::VDivFmasF64, T3, [v(T2), v(RCP), v(T1)], 0);
    step(w, Op::VDivFixupF64, T3, [v(T3), v(Y), v(X)], 0);
    let (low, high) = (*w.row(T3), *w.row(T3 + 1));
    std::array::from_fn(|lane| f64::from_bits(u64::from(high.lane(lane)) << 32 | u64::from(low.lane(lane))))
}

#[test]
fn single_precision_is_exact() {
    let special = [
        0.0,
        1.0,
        1.5,
        3.0,
        7.0,
        1e-45,
        1.1e-38,
        1.175_494_4e-38,
        2e-38,
        3e-39,
        5.9e-39,
        1e-30,
        1e30,
        1.7e38,
        3.4e38,
        f32::MAX,
        8.5e37,
        0.1,
        16_777_215.0,
        f32::INFINITY,
        f32::NAN,
    ];
    let mut pairs: Vec<(f32, f32)> =
        special.iter().flat_map(|x| special.iter().flat_map(move |y| [(*x, *y), (-*x, *y)])).collect();
    let mut random = Random::new(7);
    for _ in 0..20_000 {
        pairs.push((
            f32::from_bits(random.float(Bits::F32) as u32),
            f32::from_bits(random.float(Bits::F32) as u32),
        ));
    }
    for chunk in pairs.chunks(LANES) {
        let at = |lane: usize| chunk[lane % chunk.len()];
        let results =
            divide32(std::array::from_fn(|lane| at(lane).0), std::array::from_fn(|lane| at(lane).1));
        for ((x, y), result) in chunk.iter().zip(results) {
            let expected = x / y;
            assert!(
                result.to_bits() == expected.to_bits() || result.is_nan() && expected.is_nan(),
                "{x:e} / {y:e} = {result:e}, expected {expected:e}"
            );
        }
    }
}

#[test]
fn double_precision_is_exact() {
    let special = [
        0.0,
        1.0,
        1.5,
        3.0,
        7.0,
        5e-324,
        2.2e-308,
        2.3e-308,
        1e-309,
        4.5e-308,
        1e-300,
        1e300,
        8.9e307,
        1.7e308,
        f64::MAX,
        0.1,
        9_007_199_254_740_991.0,
        f64::INFINITY,
        f64::NAN,
    ];
    let mut pairs: Vec<(f64, f64)> =
        special.iter().flat_map(|x| special.iter().flat_map(move |y| [(*x, *y), (-*x, *y)])).collect();
    let mut random = Random::new(8);
    for _ in 0..20_000 {
        pairs.push((f64::from_bits(random.float(Bits::F64)), f64::from_bits(random.float(Bits::F64))));
    }
    for chunk in pairs.chunks(LANES) {
        let at = |lane: usize| chunk[lane % chunk.len()];
        let results =
            divide64(std::array::from_fn(|lane| at(lane).0), std::array::from_fn(|lane| at(lane).1));
        for ((x, y), result) in chunk.iter().zip(results) {
            let expected = x / y;
            assert!(
                result.to_bits() == expected.to_bits() || result.is_nan() && expected.is_nan(),
                "{x:e} / {y:e} = {result:e}, expected {expected:e}"
            );
        }
    }
}

#[test]
fn fixup_of_half_precision() {
    let half = |v: f32| u64::from(half_bits(v));
    let table = [
        ([half(2.5), half(2.0), half(5.0)], half(2.5)),
        ([half(2.5), half(-2.0), half(5.0)], half(-2.5)),
        ([half(1.0), half(0.0), half(-5.0)], half(f32::NEG_INFINITY)),
        ([half(1.0), half(f32::INFINITY), half(-5.0)], half(-0.0)),
        ([half(1.0), half(0.0), half(0.0)], 0xfe00),
    ];
    let sources = table.map(|(sources, _)| sources);
    assert_eq!(super::lanes3(Op::VDivFixupLegacyF16, 0x3f0, &sources), table.map(|(_, result)| result));
}

/// Bits of a number that f16 holds, by APFloat.
fn half_bits(value: f32) -> u16 {
    use rustc_apfloat::ieee::{Half, Single};
    use rustc_apfloat::{Float, FloatConvert};
    let half: Half = Single::from_bits(u128::from(value.to_bits())).convert(&mut false).value;
    half.to_bits() as u16
}
