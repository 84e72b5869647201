//! VOP3P. Expected values written out by hand, from LLVM's APFloat, or computed in wider integers.

use rustc_apfloat::ieee::{Half, Single};
use rustc_apfloat::{Float, FloatConvert};

use super::{Bits, Case, Random, inst, run};
use crate::inst::{Dst, FloatConst, Inst, Src};
use crate::op::Op;
use crate::wave::{Row, Wave};

/// As assemblers write it by default: the low result from low halves, the high one from high halves.
fn packed(op: Op) -> Case {
    Case::with(op, |inst| inst.modifiers.op_sel_hi = 0b111)
}

fn changed(op: Op, change: impl FnOnce(&mut Inst)) -> Case {
    Case::with(op, |inst| {
        inst.modifiers.op_sel_hi = 0b111;
        change(inst);
    })
}

fn clamped(op: Op) -> Case {
    changed(op, |inst| inst.modifiers.clamp = true)
}

#[test]
fn integers_in_both_halves() {
    packed(Op::VPkAddU16).check(&[([0x0001_ffff, 0x0002_0002], 0x0003_0001)]);
    packed(Op::VPkSubU16).check(&[([0x0001_0000, 0x0002_0002], 0xffff_fffe)]);
    packed(Op::VPkMadU16).check(&[([0x0003_ffff, 0x0005_ffff, 0x0007_0002], 0x0016_0003)]);
    packed(Op::VPkMulLoU16).check(&[([0x0003_ffff, 0x0005_ffff], 0x000f_0001)]);
    packed(Op::VPkMaxU16).check(&[([0x0003_ffff, 0x0005_0001], 0x0005_ffff)]);
    packed(Op::VPkMinU16).check(&[([0x0003_ffff, 0x0005_0001], 0x0003_0001)]);
    packed(Op::VPkAddI16).check(&[([0x7fff_8000, 0x0001_ffff], 0x8000_7fff)]);
    packed(Op::VPkSubI16).check(&[([0x8000_0005, 0x0001_0007], 0x7fff_fffe)]);
    packed(Op::VPkMadI16).check(&[([0xffff_0003, 0x0005_0005, 0x0007_0001], 0x0002_0010)]);
    packed(Op::VPkMaxI16).check(&[([0x0003_ffff, 0x8000_0001], 0x0003_0001)]);
    packed(Op::VPkMinI16).check(&[([0x0003_ffff, 0x8000_0001], 0x8000_ffff)]);
    packed(Op::VPkLshlrevB16).check(&[([0x0004_0010, 0x1234_5678], 0x2340_5678)]);
    packed(Op::VPkLshrrevB16).check(&[([0x0004_0008, 0x8234_5678], 0x0823_0056)]);
    packed(Op::VPkAshrrevI16).check(&[([0x0004_0008, 0x8234_5678], 0xf823_0056)]);
}

#[test]
fn clamped_integers_saturate() {
    clamped(Op::VPkAddU16).check(&[([0x0001_ffff, 0x0002_0002], 0x0003_ffff)]);
    clamped(Op::VPkSubU16).check(&[([0x0001_0005, 0x0002_0002], 0x0000_0003)]);
    clamped(Op::VPkMadU16).check(&[([0x0003_ffff, 0x0005_ffff, 0x0007_ffff], 0x0016_ffff)]);
    clamped(Op::VPkAddI16).check(&[([0x7fff_8000, 0x0001_ffff], 0x7fff_8000)]);
    clamped(Op::VPkSubI16).check(&[([0x8000_0005, 0x0001_0007], 0x8000_fffe)]);
    clamped(Op::VPkMadI16).check(&[([0x7fff_8000, 0x7fff_7fff, 0], 0x7fff_8000)]);
}

#[test]
fn halves_are_chosen() {
    // The low result from the high half of the first source, the high one from the low half of the second.
    let swapped = changed(Op::VPkAddU16, |inst| {
        inst.modifiers.op_sel = 0b01;
        inst.modifiers.op_sel_hi = 0b01;
    });
    swapped.check(&[([0x1000_0001, 0x2000_0002], 0x1002_1002)]);
    // An inline constant is in the low half.
    let mut wave = Wave::new();
    wave.write_row(1, &Row::splat(0x4000_3c00));
    let mut add = inst(Op::VPkAddF16, Dst::Vgpr(0), &[Src::Vgpr(1), Src::Float(FloatConst::One)]);
    add.modifiers.op_sel_hi = 0b01;
    run(&mut wave, &add);
    assert_eq!(wave.row(0), &Row::splat(0x4200_4000), "2 + 1, 1 + 1");
}

fn halves(random: &mut Random) -> u64 {
    random.float(Bits::F16) | random.float(Bits::F16) << 16
}

fn each_half(values: [u64; 3], f: impl Fn(Half, Half, Half) -> Half) -> [Half; 2] {
    let half = |shift: u32| {
        let [a, b, c] = values.map(|v| Half::from_bits(u128::from(v >> shift & 0xffff)));
        f(a, b, c)
    };
    [half(0), half(16)]
}

#[test]
fn floats_in_both_halves() {
    let mut random = Random::new(11);
    let mut triples: Vec<_> =
        (0..3000).map(|_| [halves(&mut random), halves(&mut random), halves(&mut random)]).collect();
    let special = [0u64, 0x8000, 1, 0x3ff, 0x400, 0x3c00, 0x7bff, 0x7c00, 0xfc00, 0x7e00];
    for a in special {
        for b in special {
            triples.push([a | b << 16, b | a << 16, a | 0x3c00 << 16]);
        }
    }
    let check = |op: Op, exact: &dyn Fn(Half, Half, Half) -> Half| {
        let mut case = packed(op);
        let results = match op.row().src.len() {
            2 => super::lanes(&mut case, &triples.iter().map(|[a, b, _]| [*a, *b]).collect::<Vec<_>>()),
            _ => super::lanes(&mut case, &triples),
        };
        for (triple, result) in triples.iter().zip(results) {
            for (half, expected) in each_half(*triple, exact).into_iter().enumerate() {
                let result = Half::from_bits(u128::from(result >> (16 * half) & 0xffff));
                let equal = if expected.is_nan() { result.is_nan() } else { result.bitwise_eq(expected) };
                assert!(equal, "{} {triple:x?} half {half}: {result}, expected {expected}", op.row().name);
            }
        }
    };
    check(Op::VPkAddF16, &|a, b, _| (a + b).value);
    check(Op::VPkMulF16, &|a, b, _| (a * b).value);
    check(Op::VPkFmaF16, &|a, b, c| a.mul_add(b, c).value);
}

#[test]
fn packed_floats_with_modifiers() {
    let both = |change: fn(&mut Inst)| changed(Op::VPkAddF16, change);
    // 1 and 2 plus 3 and 4, the low half of the first and the high half of the second source negated.
    both(|inst| {
        inst.modifiers.neg = 0b01;
        inst.modifiers.neg_hi = 0b10;
    })
    .check(&[([0x4000_3c00, 0x4400_4200], 0xc000_4000)]);
    // Clamped to 0..1.
    both(|inst| inst.modifiers.clamp = true)
        .check(&[([0x4000_bc00, 0x4400_b800], 0x3c00_0000), ([0x3400_3400, 0x3400_3400], 0x3800_3800)]);
    packed(Op::VPkMinF16)
        .check(&[([0x8000_3c00, 0x0000_7e00], 0x8000_3c00), ([0x3c00_4000, 0x4000_3c00], 0x3c00_3c00)]);
    packed(Op::VPkMaxF16)
        .check(&[([0x8000_3c00, 0x0000_7e00], 0x0000_3c00), ([0x3c00_4000, 0x4000_3c00], 0x4000_4000)]);
}

#[test]
fn mixed_precision() {
    let f = |v: f32| u64::from(v.to_bits());
    // src0 is the high half of its register, src1 a float, src2 a low half.
    let sources = |inst: &mut Inst| {
        inst.modifiers.op_sel_hi = 0b101;
        inst.modifiers.op_sel = 0b001;
    };
    let table = [([0x4200_dead, f(0.5), 0xdead_3c00], f(2.5))];
    Case::with(Op::VFmaMixF32, sources).check(&table);
    Case::with(Op::VMadMixF32, sources).check(&table);
    let keep = 0x5a5a_0000;
    Case::with(Op::VFmaMixloF16, sources).check(&[([0x4200_dead, f(0.5), 0xdead_3c00], keep | 0x4100)]);
    Case::with(Op::VFmaMixhiF16, sources).check(&[([0x4200_dead, f(0.5), 0xdead_3c00], 0x4100_a5a5)]);
    Case::with(Op::VMadMixhiF16, sources).check(&[([0x4200_dead, f(0.5), 0xdead_3c00], 0x4100_a5a5)]);
    // abs is NEG_HI here; -|3| * 0.5 + 1
    Case::with(Op::VFmaMixF32, |inst| {
        sources(inst);
        inst.modifiers.neg_hi = 1;
        inst.modifiers.neg = 1;
    })
    .check(&[([0xc200_dead, f(0.5), 0xdead_3c00], f(-0.5))]);
    // LLVM's #224911: mixed fma keeps f16 denormals in the default mode: 2^-24 * 1 + 0.
    Case::with(Op::VFmaMixF32, |inst| inst.modifiers.op_sel_hi = 0b001)
        .check(&[([1, f(1.0), f(0.0)], f(5.960_464_5e-8))]);
    Case::with(Op::VFmaMixloF16, |inst| inst.modifiers.op_sel_hi = 0b001)
        .check(&[([1, f(1.0), f(0.0)], keep | 1)]);
}

#[test]
fn mixed_results_round_once() {
    let mut random = Random::new(12);
    let mut case = Case::new(Op::VFmaMixhiF16);
    let mut triples: Vec<_> = (0..4000)
        .map(|_| [random.float(Bits::F32), random.float(Bits::F32), random.float(Bits::F32)])
        .collect();
    // A tie of f16 that a tiny addend decides: 1 + 2^-11, plus or minus 2^-60.
    let (one, tie, tiny) = (1.0f32, 1.0 + 1.0 / 2048.0, f32::from_bits((127 - 60) << 23));
    triples.push([one, tie, tiny].map(|v| u64::from(v.to_bits())));
    triples.push([one, tie, -tiny].map(|v| u64::from(v.to_bits())));
    for (triple, result) in triples.iter().zip(super::lanes(&mut case, &triples)) {
        // Exactly in a wide format, then once to f16.
        let [a, b, c] = triple.map(|v| -> rustc_apfloat::ieee::Quad {
            Single::from_bits(u128::from(v)).convert(&mut false).value
        });
        let exact = a.mul_add(b, c).value;
        let expected: Half = exact.convert(&mut false).value;
        let result = Half::from_bits(u128::from(result >> 16));
        assert!(
            if expected.is_nan() { result.is_nan() } else { result.bitwise_eq(expected) },
            "{triple:x?}: {result}, {expected}"
        );
    }
}

#[test]
fn dot_products() {
    let i = |v: i64| u64::from(v as u32);
    // ORNL/HeCBench#180: the clamp of a dot product was missing: 4 * 127 * 127 + INT_MAX saturates.
    let all = 0x7f7f_7f7f;
    Case::with(Op::VDot4I32I8, |inst| inst.modifiers.clamp = true).check(&[
        ([all, all, 0x7fff_ffff], 0x7fff_ffff),
        ([0x8080_8080, all, 0x8000_0000], 0x8000_0000),
        ([0x01ff_0203, 0x0102_03ff, 5], 7),
    ]);
    Case::new(Op::VDot4I32I8).check(&[([all, all, 0x7fff_ffff], i(0x7fff_ffff + 4 * 127 * 127))]);
    Case::new(Op::VDot4U32U8).check(&[([0xff01_0203, 0x0201_0305, 1], 1 + 510 + 1 + 6 + 15)]);
    Case::with(Op::VDot4U32U8, |inst| inst.modifiers.clamp = true)
        .check(&[([0xff, 0xff, 0xffff_ffff], 0xffff_ffff)]);
    // Nibbles -1, 2, 3, -4, 0, 0, 0, 7 with 1, 1, 1, 1, 0, 0, 0, 7.
    Case::new(Op::VDot8I32I4).check(&[([0x7000_c32f, 0x7000_1111, 10], 10 + 49)]);
    Case::new(Op::VDot8U32U4).check(&[([0x7000_c32f, 0x7000_1111, 10], 10 + 15 + 2 + 3 + 12 + 49)]);
    Case::new(Op::VDot2I32I16).check(&[([0xffff_0003, 0x0005_0007, 100], 100 - 5 + 21)]);
    Case::new(Op::VDot2U32U16).check(&[([0xffff_0003, 0x0005_0007, 100], 100 + 5 * 0xffff + 21)]);
    let f = |v: f32| u64::from(v.to_bits());
    // 1 * 3 + 2 * 4 + 0.5
    packed(Op::VDot2F32F16).check(&[([0x4000_3c00, 0x4400_4200, f(0.5)], f(11.5))]);
}
