//! Modifiers of VOP3 and the modes of MODE. Expected values written out by hand from AMD "Vega" ISA, "Input modifiers",
//! "Output modifiers", "Mode register".

use super::{Case, lanes1, lanes2};
use crate::inst::{Inst, Omod};
use crate::op::Op;

fn f(v: f32) -> u64 {
    u64::from(v.to_bits())
}

#[test]
fn absolute_value_comes_before_negation() {
    let case = |abs: u8, neg: u8| {
        Case::with(Op::VAddF32, |inst| {
            inst.modifiers.abs = abs;
            inst.modifiers.neg = neg;
        })
    };
    let source = [f(-3.0), f(-4.0)];
    for (abs, neg, result) in
        [(0, 0, -7.0), (1, 0, -1.0), (2, 0, 1.0), (3, 0, 7.0), (0, 1, -1.0), (3, 3, -7.0), (1, 1, -7.0)]
    {
        case(abs, neg).check(&[(source, f(result))]);
    }
    Case::with(Op::VFmaF32, |inst| inst.modifiers.neg = 4).check(&[([f(2.0), f(3.0), f(10.0)], f(-4.0))]);
    let wide = |v: f64| v.to_bits();
    Case::with(Op::VAddF64, |inst| {
        inst.modifiers.abs = 1;
        inst.modifiers.neg = 2;
    })
    .check(&[([wide(-3.0), wide(4.0)], wide(-1.0))]);
    Case::with(Op::VAddF16, |inst| {
        inst.modifiers.abs = 1;
        inst.modifiers.neg = 2;
    })
    .check(&[([0xc200, 0x4400], 0xbc00)]);
    // A select has the modifiers of a float, whatever its operands are.
    let mut select = Case::with(Op::VCndmaskB32, |inst| {
        inst.modifiers.abs = 2;
        inst.modifiers.neg = 1;
    });
    select.wave.set_sgpr64(super::MASK_IN, 0);
    select.check(&[([f(3.0), f(-4.0)], f(-3.0))]);
    let mut select = Case::with(Op::VCndmaskB32, |inst| inst.modifiers.abs = 2);
    select.wave.set_sgpr64(super::MASK_IN, u64::MAX);
    select.check(&[([f(3.0), f(-4.0)], f(4.0))]);
}

#[test]
fn clamping() {
    // gem5#1379: results outside of 0..1 survive without clamp.
    let table = [-2.0f32, 0.5, 3.0, -0.0];
    for (value, clamped) in table.into_iter().zip([0.0f32, 0.5, 1.0, 0.0]) {
        Case::new(Op::VAddF32).check(&[([f(value), f(-0.0)], f(value))]);
        Case::with(Op::VAddF32, |inst| inst.modifiers.clamp = true)
            .check(&[([f(value), f(-0.0)], f(clamped))]);
    }
    let nan = [([f(f32::NAN), f(1.0)], 0)];
    let clamp = |inst: &mut Inst| inst.modifiers.clamp = true;
    Case::with(Op::VAddF32, clamp).mode(0x1f0).check(&nan);
    let nan = [([f(f32::NAN), f(1.0)], f(f32::NAN))];
    Case::with(Op::VAddF32, clamp).mode(0x0f0).check(&nan);
    let wide = |v: f64| v.to_bits();
    Case::with(Op::VMulF64, clamp)
        .check(&[([wide(2.0), wide(3.0)], wide(1.0)), ([wide(-2.0), wide(3.0)], 0)]);
    Case::with(Op::VMulF16, clamp).check(&[([0x4000, 0x4200], 0x3c00), ([0xc000, 0x4200], 0)]);
}

#[test]
fn output_factors_need_flushed_denormals_and_no_ieee_mode() {
    let times = |omod: Omod, mode: u32| Case::with(Op::VMulF32, |inst| inst.modifiers.omod = omod).mode(mode);
    let (flush, keep, ieee) = (0x1c0, 0x1f0, 0x3c0);
    times(Omod::Mul2, flush).check(&[([f(3.0), f(1.0)], f(6.0)), ([f(-0.0), f(1.0)], f(0.0))]);
    times(Omod::Mul4, flush).check(&[([f(3.0), f(1.0)], f(12.0))]);
    times(Omod::Div2, flush).check(&[([f(3.0), f(1.0)], f(1.5)), ([f(f32::MIN_POSITIVE), f(1.0)], f(0.0))]);
    times(Omod::Mul2, keep).check(&[([f(3.0), f(1.0)], f(3.0))]);
    times(Omod::Mul2, ieee).check(&[([f(3.0), f(1.0)], f(3.0))]);
    let both = Case::with(Op::VMulF32, |inst| {
        inst.modifiers.omod = Omod::Mul4;
        inst.modifiers.clamp = true;
    });
    both.mode(flush).check(&[([f(0.5), f(1.0)], f(1.0)), ([f(0.125), f(1.0)], f(0.5))]);
}

#[test]
fn denormals_as_the_mode_says() {
    let (denormal, half_min) = (0x0000_1000u64, f(5.877_472e-39));
    // DENORM bits 5:4: 0 flushes both ways, 1 results only, 2 sources only, 3 nothing.
    let sum = |mode: u32| lanes2(Op::VAddF32, 0x300 | 0xc0 | mode << 4, &[[denormal, denormal]])[0];
    assert_eq!([sum(0), sum(1), sum(2), sum(3)], [0, 0, 0, 0x2000]);
    // A normal source, a denormal result.
    let half =
        |mode: u32| lanes2(Op::VMulF32, 0x300 | 0xc0 | mode << 4, &[[f(f32::MIN_POSITIVE), f(-0.5)]])[0];
    assert_eq!(
        [half(0), half(1), half(2), half(3)],
        [f(-0.0), f(-0.0), half_min | 1 << 31, half_min | 1 << 31]
    );
    // A denormal source, a normal result.
    let twice = |mode: u32| lanes2(Op::VMulF32, 0x300 | 0xc0 | mode << 4, &[[half_min, f(2.0)]])[0];
    assert_eq!([twice(0), twice(1), twice(2), twice(3)], [0, f(f32::MIN_POSITIVE), 0, f(f32::MIN_POSITIVE)]);
    // Moves and bit operations change nothing.
    assert_eq!(lanes1(Op::VMovB32, 0x300, &[[denormal]]), [denormal]);
    // f16 and f64 have bits 7:6.
    assert_eq!(lanes2(Op::VAddF16, 0x330, &[[1, 1]]), [0]);
    assert_eq!(lanes2(Op::VAddF16, 0x3c0, &[[1, 1]]), [2]);
    assert_eq!(lanes2(Op::VAddF64, 0x330, &[[1, 1]]), [0]);
    assert_eq!(lanes2(Op::VAddF64, 0x3c0, &[[1, 1]]), [2]);
}
