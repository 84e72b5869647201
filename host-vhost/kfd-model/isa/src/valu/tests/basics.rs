//! What the first kernels need: moves, additions with carry, comparisons, selects. Expected values written out by hand.

use super::{Case, DST, LANES, MASK_IN, MASK_OUT, inst, run};
use crate::inst::{Dst, FloatConst, Src};
use crate::op::{Op, ROWS};
use crate::wave::{Row, Wave};

#[test]
fn moves_and_bits() {
    Case::new(Op::VMovB32).check(&[([0], 0), ([0xdead_beef], 0xdead_beef)]);
    Case::new(Op::VNotB32).check(&[([0], 0xffff_ffff), ([0xff00_ff00], 0x00ff_00ff)]);
    Case::new(Op::VBfrevB32).check(&[([1], 0x8000_0000), ([0x0000_f001], 0x800f_0000)]);
    Case::new(Op::VAndB32).check(&[([0xff00_ff00, 0x0ff0_0ff0], 0x0f00_0f00)]);
    Case::new(Op::VOrB32).check(&[([0xff00_0000, 0x0000_00ff], 0xff00_00ff)]);
    Case::new(Op::VXorB32).check(&[([0xffff_0000, 0xff00_ff00], 0x00ff_ff00)]);
    Case::new(Op::VXnorB32).check(&[([0xffff_0000, 0xff00_ff00], 0xff00_00ff)]);
}

#[test]
fn shifts_use_the_low_bits_of_the_amount() {
    Case::new(Op::VLshlrevB32).check(&[
        ([0, 3], 3),
        ([4, 3], 0x30),
        ([31, 3], 0x8000_0000),
        ([32, 3], 3),
        ([0xffff_ffff, 1], 1 << 31),
    ]);
    Case::new(Op::VLshrrevB32).check(&[
        ([4, 0xf000_0000], 0x0f00_0000),
        ([31, 0x8000_0000], 1),
        ([33, 4], 2),
    ]);
    Case::new(Op::VAshrrevI32).check(&[
        ([4, 0xf000_0000], 0xff00_0000),
        ([31, 0x8000_0000], 0xffff_ffff),
        ([32, 7], 7),
    ]);
    Case::new(Op::VLshlrevB64).check(&[([0, 5], 5), ([32, 5], 5 << 32), ([63, 3], 1 << 63), ([64, 5], 5)]);
    Case::new(Op::VLshrrevB64).check(&[([32, 5 << 32], 5), ([63, 1 << 63], 1), ([65, 8], 4)]);
    Case::new(Op::VAshrrevI64)
        .check(&[([63, 1 << 63], u64::MAX), ([4, 0x8000_0000_0000_0000], 0xf800_0000_0000_0000)]);
}

#[test]
fn additions_wrap() {
    Case::new(Op::VAddU32).check(&[([1, 2], 3), ([0xffff_ffff, 2], 1)]);
    Case::new(Op::VSubU32).check(&[([1, 2], 0xffff_ffff), ([0x8000_0000, 1], 0x7fff_ffff)]);
    Case::new(Op::VSubrevU32).check(&[([1, 2], 1), ([2, 1], 0xffff_ffff)]);
    Case::new(Op::VAdd3U32).check(&[([1, 2, 3], 6), ([0xffff_ffff, 1, 7], 7)]);
    Case::new(Op::VMulLoU32).check(&[([0x1_0001, 0x1_0001], 0x0002_0001), ([0xffff_ffff, 3], 0xffff_fffd)]);
    Case::new(Op::VMulHiU32).check(&[([0xffff_ffff, 0xffff_ffff], 0xffff_fffe), ([0x8000_0000, 2], 1)]);
    Case::new(Op::VMulHiI32).check(&[([0xffff_ffff, 0xffff_ffff], 0), ([0x8000_0000, 2], 0xffff_ffff)]);
}

#[test]
fn carry_chains() {
    let with_carry = |op, a: u64, b: u64, carry_in: bool| {
        let mut case = Case::new(op);
        case.wave.set_sgpr64(MASK_IN, if carry_in { u64::MAX } else { 0 });
        case.put(super::SOURCES[0], false, &[a; LANES]);
        case.put(super::SOURCES[1], false, &[b; LANES]);
        run(&mut case.wave, &case.inst);
        let out = case.wave.sgpr64(MASK_OUT);
        assert!(out == 0 || out == u64::MAX);
        (case.wave.row(DST).lane(5), out != 0)
    };
    assert_eq!(with_carry(Op::VAddCoU32, 0xffff_ffff, 1, true), (0, true));
    assert_eq!(with_carry(Op::VAddCoU32, 0x7fff_ffff, 1, true), (0x8000_0000, false));
    assert_eq!(with_carry(Op::VAddcCoU32, 0xffff_ffff, 0xffff_ffff, true), (0xffff_ffff, true));
    assert_eq!(with_carry(Op::VAddcCoU32, 0xffff_ffff, 0, false), (0xffff_ffff, false));
    assert_eq!(with_carry(Op::VAddcCoU32, 0xffff_ffff, 0, true), (0, true));
    assert_eq!(with_carry(Op::VSubCoU32, 1, 2, false), (0xffff_ffff, true));
    assert_eq!(with_carry(Op::VSubCoU32, 2, 2, true), (0, false));
    assert_eq!(with_carry(Op::VSubbCoU32, 2, 2, true), (0xffff_ffff, true));
    assert_eq!(with_carry(Op::VSubbCoU32, 0, 0xffff_ffff, true), (0, true));
    assert_eq!(with_carry(Op::VSubrevCoU32, 2, 1, false), (0xffff_ffff, true));
    assert_eq!(with_carry(Op::VSubbrevCoU32, 1, 2, true), (0, false));
}

#[test]
fn carries_of_lanes_that_are_off_are_zero() {
    let mut case = Case::new(Op::VAddCoU32);
    case.put(super::SOURCES[0], false, &[0xffff_ffff; LANES]);
    case.put(super::SOURCES[1], false, &[1; LANES]);
    case.wave.set_exec(super::SOME);
    case.wave.set_sgpr64(MASK_OUT, u64::MAX);
    run(&mut case.wave, &case.inst);
    assert_eq!(case.wave.sgpr64(MASK_OUT), super::SOME);
}

#[test]
fn select_by_mask() {
    let mut case = Case::new(Op::VCndmaskB32);
    case.wave.set_sgpr64(MASK_IN, 0x8000_0000_0000_0002);
    case.put(super::SOURCES[0], false, &[11; LANES]);
    case.put(super::SOURCES[1], false, &[22; LANES]);
    run(&mut case.wave, &case.inst);
    let row = case.wave.row(DST);
    assert_eq!([row.lane(0), row.lane(1), row.lane(62), row.lane(63)], [11, 22, 11, 22]);
}

#[test]
fn wide_multiply_add_delivers_its_carry() {
    // ORNL/HeCBench#177: an emulator that lost the carry of v_mad_u64_u32.
    let big = 0xffff_ffffu64;
    let table = [
        ([big, big, 0], false),
        ([big, big, u64::MAX], true),
        ([2, 3, u64::MAX - 5], true),
        ([2, 3, u64::MAX - 6], false),
    ];
    Case::new(Op::VMadU64U32).check_mask(&table);
    let low = |a: u64, b: u64, c: u64| (u128::from(a) * u128::from(b) + u128::from(c)) as u64;
    Case::new(Op::VMadU64U32).check(&table.map(|([a, b, c], _)| ([a, b, c], low(a, b, c))));
    Case::new(Op::VMadI64I32).check(&[
        ([big, big, 5], 6),
        ([0x8000_0000, 2, 0], 0xffff_ffff_0000_0000),
        ([big, 1, 0], u64::MAX),
    ]);
}

#[test]
fn constants_have_the_width_of_the_operand() {
    let mut wave = Wave::new();
    run(&mut wave, &inst(Op::VMovB32, Dst::Vgpr(0), &[Src::Int(-16)]));
    assert_eq!(wave.row(0), &Row::splat(0xffff_fff0));
    run(&mut wave, &inst(Op::VMovB32, Dst::Vgpr(0), &[Src::Literal(0x1234_5678)]));
    assert_eq!(wave.row(0), &Row::splat(0x1234_5678));
    run(&mut wave, &inst(Op::VMovB32, Dst::Vgpr(0), &[Src::Float(FloatConst::One)]));
    assert_eq!(wave.row(0), &Row::splat(1.0f32.to_bits()));
    run(
        &mut wave,
        &inst(Op::VAddF64, Dst::Vgpr(0), &[Src::Float(FloatConst::One), Src::Float(FloatConst::NegFour)]),
    );
    assert_eq!((wave.row(0).lane(9), wave.row(1).lane(9)), (0, ((-3.0f64).to_bits() >> 32) as u32));
    run(&mut wave, &inst(Op::VLshlrevB64, Dst::Vgpr(0), &[Src::Int(4), Src::Int(-1)]));
    assert_eq!((wave.row(0).lane(9), wave.row(1).lane(9)), (0xffff_fff0, 0xffff_ffff));
}

#[test]
fn lanes_to_scalars_and_back() {
    let mut wave = Wave::new();
    *wave.row_mut(3).unwrap() = Row(std::array::from_fn(|lane| 100 + lane as u32));
    wave.set_exec(0xff00);
    run(&mut wave, &inst(Op::VReadfirstlaneB32, Dst::Sgpr(7), &[Src::Vgpr(3)]));
    assert_eq!(wave.sgpr(7), 108);
    wave.set_exec(0);
    run(&mut wave, &inst(Op::VReadfirstlaneB32, Dst::Sgpr(7), &[Src::Vgpr(3)]));
    assert_eq!(wave.sgpr(7), 100, "lane 0 if none is on");
    run(&mut wave, &inst(Op::VReadlaneB32, Dst::Sgpr(7), &[Src::Vgpr(3), Src::Int(63)]));
    assert_eq!(wave.sgpr(7), 163);
    wave.set_sgpr(9, 64 + 5);
    run(&mut wave, &inst(Op::VReadlaneB32, Dst::Sgpr(7), &[Src::Vgpr(3), Src::Sgpr(9)]));
    assert_eq!(wave.sgpr(7), 105, "lane number modulo 64");
    run(&mut wave, &inst(Op::VWritelaneB32, Dst::Vgpr(3), &[Src::Sgpr(7), Src::Int(62)]));
    assert_eq!((wave.row(3).lane(61), wave.row(3).lane(62), wave.row(3).lane(63)), (161, 105, 163));
}

#[test]
fn vector_opcodes_without_a_handler() {
    use crate::op::Encoding::{Vop1, Vop2, Vop3, Vop3p, Vopc};
    let missing: Vec<&str> = ROWS
        .iter()
        .filter(|row| matches!(row.encoding, Vop1 | Vop2 | Vop3 | Vop3p | Vopc))
        .filter(|row| super::super::handler(row.op).is_none())
        .map(|row| row.name)
        .collect();
    // A graphics instruction whose table of screen partitions no compute program needs.
    assert_eq!(missing, ["v_screen_partition_4se_b32"]);
}

#[test]
fn an_opcode_without_a_handler_is_named() {
    let mut wave = Wave::new();
    let refused = inst(Op::VScreenPartition4seB32, Dst::Vgpr(0), &[Src::Vgpr(1)]);
    let stop = super::execute(&mut wave, &refused).unwrap_err();
    assert_eq!(stop.to_string(), "v_screen_partition_4se_b32 is not implemented");
}
