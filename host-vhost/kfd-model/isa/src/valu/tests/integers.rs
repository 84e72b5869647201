//! Integer operations. Expected values written out by hand from the definitions in AMD "Vega" ISA, or computed in wider
//! integers.

use super::{Case, DST, LANES, Random, inst, lanes2, lanes3, run};
use crate::inst::{Dst, Inst, Src};
use crate::op::Op;
use crate::wave::{Row, Wave};

const MODE: u32 = 0x3f0;

fn clamped(op: Op) -> Case {
    Case::with(op, |inst| inst.modifiers.clamp = true)
}

fn i(v: i64) -> u64 {
    u64::from(v as u32)
}

#[test]
fn minimum_maximum_median() {
    Case::new(Op::VMinI32).check(&[([i(-1), 1], i(-1)), ([0x8000_0000, 0x7fff_ffff], 0x8000_0000)]);
    Case::new(Op::VMaxI32).check(&[([i(-1), 1], 1), ([0x8000_0000, 0x7fff_ffff], 0x7fff_ffff)]);
    Case::new(Op::VMinU32).check(&[([0xffff_ffff, 1], 1)]);
    Case::new(Op::VMaxU32).check(&[([0xffff_ffff, 1], 0xffff_ffff)]);
    Case::new(Op::VMin3I32).check(&[([i(-5), 3, 0], i(-5)), ([3, 0, i(-5)], i(-5))]);
    Case::new(Op::VMax3I32).check(&[([i(-5), 3, 0], 3), ([i(-5), i(-6), i(-7)], i(-5))]);
    Case::new(Op::VMed3I32).check(&[
        ([i(-5), 3, 0], 0),
        ([3, i(-5), 0], 0),
        ([0, 3, i(-5)], 0),
        ([7, 7, i(-1)], 7),
    ]);
    Case::new(Op::VMin3U32).check(&[([0xffff_fffb, 3, 1], 1)]);
    Case::new(Op::VMax3U32).check(&[([0xffff_fffb, 3, 1], 0xffff_fffb)]);
    Case::new(Op::VMed3U32).check(&[
        ([0xffff_fffb, 3, 1], 3),
        ([1, 0xffff_fffb, 3], 3),
        ([3, 1, 0xffff_fffb], 3),
    ]);
}

#[test]
fn clamped_sums_saturate() {
    clamped(Op::VAddU32).check(&[([0xffff_ffff, 2], 0xffff_ffff), ([1, 2], 3)]);
    clamped(Op::VSubU32).check(&[([1, 2], 0), ([2, 1], 1)]);
    clamped(Op::VSubrevU32).check(&[([2, 1], 0), ([1, 2], 1)]);
    clamped(Op::VAddI32).check(&[
        ([0x7fff_ffff, 1], 0x7fff_ffff),
        ([0x8000_0000, i(-1)], 0x8000_0000),
        ([5, i(-6)], i(-1)),
    ]);
    clamped(Op::VSubI32).check(&[([0x8000_0000, 1], 0x8000_0000), ([0x7fff_ffff, i(-1)], 0x7fff_ffff)]);
    Case::new(Op::VAddI32).check(&[([0x7fff_ffff, 1], 0x8000_0000)]);
    Case::new(Op::VSubI32).check(&[([0x8000_0000, 1], 0x7fff_ffff)]);
    clamped(Op::VAddU16).check(&[([0xffff, 2], 0xffff), ([1, 2], 3)]);
    clamped(Op::VSubU16).check(&[([1, 2], 0)]);
    clamped(Op::VMadU32U24).check(&[([0xff_ffff, 0xff_ffff, 0], 0xffff_ffff), ([2, 3, 4], 10)]);
    clamped(Op::VMadI32I24)
        .check(&[([0x7f_ffff, 0x7f_ffff, 0], 0x7fff_ffff), ([0x80_0000, 0x7f_ffff, 0], 0x8000_0000)]);
}

#[test]
fn twenty_four_bits() {
    // The upper eight bits of the sources do not count.
    Case::new(Op::VMulU32U24)
        .check(&[([0xab00_0003, 0xcd00_0005], 15), ([0xff_ffff, 0xff_ffff], 0xfe00_0001)]);
    Case::new(Op::VMulHiU32U24).check(&[([0xff_ffff, 0xff_ffff], 0xffff)]);
    Case::new(Op::VMulI32I24).check(&[([0x00ff_ffff, 5], i(-5)), ([0x80_0000, 2], i(-0x100_0000))]);
    Case::new(Op::VMulHiI32I24).check(&[([0x00ff_ffff, 5], i(-1)), ([0x80_0000, 0x80_0000], 0x4000)]);
    Case::new(Op::VMadU32U24).check(&[([0xff00_0003, 5, 7], 22), ([0xff_ffff, 0xff_ffff, 1], 0xfe00_0002)]);
    Case::new(Op::VMadI32I24).check(&[([0xff_ffff, 5, 7], 2)]);
}

#[test]
fn combined_operations() {
    Case::new(Op::VLshlAddU32).check(&[
        ([3, 4, 5], 53),
        ([1, 32, 5], 6),
        ([0xffff_ffff, 31, 1], 0x8000_0001),
    ]);
    Case::new(Op::VAddLshlU32).check(&[([3, 4, 2], 28), ([0xffff_ffff, 2, 33], 2)]);
    Case::new(Op::VLshlOrB32).check(&[([3, 4, 5], 0x35)]);
    Case::new(Op::VAndOrB32).check(&[([0xff0f, 0x0ff0, 1], 0x0f01)]);
    Case::new(Op::VOr3B32).check(&[([1, 2, 4], 7)]);
    Case::new(Op::VXadU32).check(&[([0xff, 0x0f, 1], 0xf1)]);
    Case::new(Op::VBfiB32).check(&[([0xff00_ff00, 0x1234_5678, 0xaabb_ccdd], 0x12bb_56dd)]);
    Case::new(Op::VBcntU32B32).check(&[([0, 5], 5), ([0xffff_ffff, 1], 33)]);
    Case::new(Op::VFfbhU32).check(&[([0], 0xffff_ffff), ([1], 31), ([0x8000_0000], 0), ([0x0010_0000], 11)]);
    Case::new(Op::VFfblB32).check(&[([0], 0xffff_ffff), ([1], 0), ([0x8000_0000], 31)]);
    Case::new(Op::VFfbhI32).check(&[
        ([0], 0xffff_ffff),
        ([0xffff_ffff], 0xffff_ffff),
        ([1], 31),
        ([0x8000_0000], 1),
        ([0xffff_0000], 16),
    ]);
}

#[test]
fn bit_fields() {
    Case::new(Op::VBfeU32).check(&[
        ([0x1234_5678, 8, 8], 0x56),
        ([0x1234_5678, 8, 0], 0),
        ([0x1234_5678, 28, 8], 0x1),
        ([0x1234_5678, 40, 8], 0x56),
        ([0xffff_ffff, 0, 31], 0x7fff_ffff),
        ([0xffff_ffff, 0, 32], 0),
    ]);
    Case::new(Op::VBfeI32).check(&[
        ([0x1234_8678, 8, 8], 0xffff_ff86),
        ([0x1234_5678, 8, 8], 0x56),
        ([0x1234_5678, 8, 0], 0),
        ([0x8234_5678, 28, 8], 0xffff_fff8),
        ([0x8000_0000, 31, 1], 0xffff_ffff),
        ([0x7fff_ffff, 0, 31], 0xffff_ffff),
    ]);
    Case::new(Op::VBfmB32).check(&[([4, 8], 0xf00), ([0, 8], 0), ([31, 31], 0x8000_0000), ([32, 0], 0)]);
    Case::new(Op::VAlignbitB32).check(&[
        ([0x1122_3344, 0x5566_7788, 8], 0x4455_6677),
        ([1, 2, 0], 2),
        ([1, 2, 32], 2),
    ]);
    Case::new(Op::VAlignbyteB32)
        .check(&[([0x1122_3344, 0x5566_7788, 1], 0x4455_6677), ([0x1122_3344, 0x5566_7788, 7], 0x2233_4455)]);
    // Bytes 0 to 3 come from the second source, 4 to 7 from the first; 8 to 11 copy sign bits.
    Case::new(Op::VPermB32).check(&[
        ([0x7766_5544, 0x3322_1100, 0x0001_0203], 0x0011_2233),
        ([0x7766_5544, 0x3322_1100, 0x0405_0607], 0x4455_6677),
        ([0x7766_5544, 0x3322_1100, 0x0c0d_ff0c], 0x00ff_ff00),
        ([0x8000_0000, 0x0000_8000, 0x0b0a_0908], 0xff00_00ff),
    ]);
    // (255 + 0 + 1) / 2, (3 + 4 + 0) / 2, (3 + 4 + 1) / 2, 0
    Case::new(Op::VLerpU8).check(&[([0xff03_0300, 0x0004_0400, 0x0100_0100], 0x8003_0400)]);
}

#[test]
fn sums_of_absolute_differences() {
    Case::new(Op::VSadU8).check(&[([0x0102_0304, 0x0403_0201, 10], 10 + 3 + 1 + 1 + 3)]);
    Case::new(Op::VSadHiU8).check(&[([0x0102_0304, 0x0403_0201, 10], 10 + (8 << 16))]);
    Case::new(Op::VMsadU8).check(&[([0x0102_0304, 0x0403_0001, 10], 10 + 3 + 1 + 3)]);
    Case::new(Op::VSadU16).check(&[([0x0001_ffff, 0x0003_0000, 1], 1 + 2 + 0xffff)]);
    Case::new(Op::VSadU32).check(&[
        ([0xffff_ffff, 1, 1], 0xffff_ffff),
        ([1, 3, 5], 7),
        ([0xffff_ffff, 0, 2], 1),
    ]);
    clamped(Op::VSadU32).check(&[([0xffff_ffff, 0, 2], 0xffff_ffff)]);
    // Four windows of four bytes, each one byte further.
    let reference = |a: u64, b: u64, c: u64, masked: bool| {
        (0..4).fold(0u64, |all, n| {
            let sum: u64 = (0..4)
                .map(|m| {
                    let (x, y) = (a >> (8 * (n + m)) & 0xff, b >> (8 * m) & 0xff);
                    if masked && y == 0 { 0 } else { x.abs_diff(y) }
                })
                .sum();
            all | (sum + (c >> (16 * n) & 0xffff)) << (16 * n)
        })
    };
    let mut random = Random::new(9);
    let triples: Vec<_> = (0..100)
        .map(|_| [random.next(), random.next() & 0xff00_ffff, random.next() & 0x0fff_0fff_0fff_0fff])
        .collect();
    let plain: Vec<_> = triples.iter().map(|[a, b, c]| reference(*a, *b, *c, false)).collect();
    let masked: Vec<_> = triples.iter().map(|[a, b, c]| reference(*a, *b, *c, true)).collect();
    assert_eq!(lanes3(Op::VQsadPkU16U8, MODE, &triples), plain);
    assert_eq!(lanes3(Op::VMqsadPkU16U8, MODE, &triples), masked);
}

#[test]
fn four_wide_sums() {
    let mut wave = Wave::new();
    let values = [0x0403_0201u32, 0x0807_0605, 0x0101_0001, 10, 20, 30, 40];
    for (n, value) in values.into_iter().enumerate() {
        wave.write_row(n, &Row::splat(value));
    }
    run(&mut wave, &inst(Op::VMqsadU32U8, Dst::Vgpr(8), &[Src::Vgpr(0), Src::Vgpr(2), Src::Vgpr(3)]));
    // Bytes 1..=8 against 1, skipped, 1, 1: 0 + 2 + 3, and three more for each byte further.
    for (n, sum) in [10 + 5, 20 + 8, 30 + 11, 40 + 14].into_iter().enumerate() {
        assert_eq!(wave.row_at(8 + n), &Row::splat(sum));
    }
}

#[test]
fn counts_of_lower_lanes() {
    let mut wave = Wave::new();
    let mask = 0x8000_0001_ffff_0003u64;
    wave.set_sgpr64(10, mask);
    run(&mut wave, &inst(Op::VMbcntLoU32B32, Dst::Vgpr(0), &[Src::Sgpr(10), Src::Int(0)]));
    run(&mut wave, &inst(Op::VMbcntHiU32B32, Dst::Vgpr(0), &[Src::Sgpr(11), Src::Vgpr(0)]));
    for lane in 0..LANES {
        let below = mask & ((1u64 << lane) - 1);
        assert_eq!(wave.row(0).lane(lane), below.count_ones(), "lane {lane}");
    }
}

#[test]
fn sixteen_bits_write_zeros_above_or_keep_them() {
    Case::new(Op::VAddU16).check(&[([0xdead_ffff, 0xbeef_0002], 1)]);
    Case::new(Op::VSubU16).check(&[([1, 2], 0xffff)]);
    Case::new(Op::VSubrevU16).check(&[([1, 2], 1)]);
    Case::new(Op::VMulLoU16).check(&[([0x1_00ff, 0x101], 0xffff), ([0xffff, 0xffff], 1)]);
    Case::new(Op::VLshlrevB16).check(&[([4, 0xffff_1234], 0x2340), ([16, 1], 1)]);
    Case::new(Op::VLshrrevB16).check(&[([4, 0xffff_1234], 0x123)]);
    Case::new(Op::VAshrrevI16).check(&[([4, 0x8234], 0xf823)]);
    Case::new(Op::VMaxU16).check(&[([0xffff, 1], 0xffff)]);
    Case::new(Op::VMinU16).check(&[([0xffff, 1], 1)]);
    Case::new(Op::VMaxI16).check(&[([0xffff, 1], 1)]);
    Case::new(Op::VMinI16).check(&[([0xffff, 1], 0xffff)]);
    Case::new(Op::VMadLegacyU16).check(&[([3, 5, 7], 22), ([0xffff, 0xffff, 2], 3)]);
    Case::new(Op::VMadLegacyI16).check(&[([0xffff, 5, 7], 2)]);
    // Those that are new in GFX9 keep the upper half of the destination, 0x5a5a here.
    let keep = |v: u64| 0x5a5a_0000 | v;
    Case::new(Op::VMadU16).check(&[([3, 5, 7], keep(22))]);
    Case::new(Op::VMadI16).check(&[([0xffff, 5, 7], keep(2))]);
    Case::new(Op::VAddI16).check(&[([0x7fff, 1], keep(0x8000))]);
    Case::new(Op::VSubI16).check(&[([0x8000, 1], keep(0x7fff))]);
    Case::new(Op::VMin3I16).check(&[([0xffff, 1, 2], keep(0xffff))]);
    Case::new(Op::VMax3I16).check(&[([0xffff, 1, 2], keep(2))]);
    Case::new(Op::VMed3I16).check(&[([0xffff, 1, 2], keep(1))]);
    Case::new(Op::VMin3U16).check(&[([0xffff, 1, 2], keep(1))]);
    Case::new(Op::VMax3U16).check(&[([0xffff, 1, 2], keep(0xffff))]);
    Case::new(Op::VMed3U16).check(&[([0xffff, 1, 2], keep(2))]);
    clamped(Op::VMadU16).check(&[([0xffff, 0xffff, 2], keep(0xffff))]);
    clamped(Op::VMadI16).check(&[([0x7fff, 0x7fff, 0], keep(0x7fff)), ([0x8000, 0x7fff, 0], keep(0x8000))]);
    clamped(Op::VAddI16).check(&[([0x7fff, 1], keep(0x7fff))]);
    Case::new(Op::VMadU32U16).check(&[([0xdead_ffff, 0xffff, 1], 0xfffe_0002)]);
    Case::new(Op::VMadI32I16).check(&[([0xdead_ffff, 5, 7], 2)]);
    clamped(Op::VMadU32U16).check(&[([0xffff, 0xffff, 0xffff_ffff], 0xffff_ffff)]);
}

#[test]
fn halves_chosen_by_op_sel() {
    // op_sel 0b1001: the upper half of the first source, into the upper half of the destination.
    let high = |inst: &mut Inst| {
        inst.modifiers.op_sel = 0b1001;
        inst.encoding = crate::op::Encoding::Vop3;
    };
    Case::with(Op::VMadU16, high).check(&[([0x0003_ffff, 5, 7], 22 << 16 | 0xa5a5)]);
    Case::with(Op::VAddI16, high).check(&[([0x0003_ffff, 5], 8 << 16 | 0xa5a5)]);
    Case::with(Op::VMadU32U16, |inst| inst.modifiers.op_sel = 0b10).check(&[([3, 0x0005_ffff, 7], 22)]);
    Case::with(Op::VPackB32F16, |inst| inst.modifiers.op_sel = 0b01)
        .check(&[([0x1111_2222, 0x3333_4444], 0x4444_1111)]);
}

#[test]
fn wide_products_by_reference() {
    let mut random = Random::new(10);
    let pairs: Vec<_> = (0..500).map(|_| [random.next() >> 32, random.next() >> 32]).collect();
    let signed = |v: u64| i64::from(v as u32 as i32);
    let expect = |f: &dyn Fn(u64, u64) -> u64| pairs.iter().map(|[a, b]| f(*a, *b)).collect::<Vec<_>>();
    assert_eq!(
        lanes2(Op::VMulHiU32, MODE, &pairs),
        expect(&|a, b| ((u128::from(a) * u128::from(b)) >> 32) as u64)
    );
    assert_eq!(
        lanes2(Op::VMulHiI32, MODE, &pairs),
        expect(&|a, b| i(((i128::from(signed(a)) * i128::from(signed(b))) >> 32) as i64))
    );
    assert_eq!(
        lanes2(Op::VMulLoU32, MODE, &pairs),
        expect(&|a, b| i((u128::from(a) * u128::from(b)) as i64))
    );
}

#[test]
fn swapping() {
    let mut wave = Wave::new();
    wave.write_row(1, &Row::splat(11));
    wave.write_row(2, &Row::splat(22));
    wave.set_exec(0b10);
    run(&mut wave, &inst(Op::VSwapB32, Dst::Vgpr(1), &[Src::Vgpr(2)]));
    assert_eq!((wave.row(1).lane(0), wave.row(1).lane(1)), (11, 22));
    assert_eq!((wave.row(2).lane(0), wave.row(2).lane(1)), (22, 11));
}

#[test]
fn registers_relative_to_m0() {
    // s_set_gpr_idx_on: M0 bits 7:0 are added to the registers that bits 15:12 name; MODE bit 27 switches it on.
    let mut wave = Wave::new();
    for n in 0..16 {
        wave.write_row(n, &Row::splat(100 + n as u32));
    }
    let mov = inst(Op::VMovB32, Dst::Vgpr(1), &[Src::Vgpr(2)]);
    wave.mode.0 |= 1 << 27;
    wave.set_sgpr(124, 5 | 1 << 12);
    run(&mut wave, &mov);
    assert_eq!(wave.row(1), &Row::splat(107), "source relative");
    wave.set_sgpr(124, 7 | 1 << 15);
    run(&mut wave, &mov);
    assert_eq!(wave.row(8), &Row::splat(102), "destination relative");
    wave.set_sgpr(124, 255 | 1 << 12 | 1 << 15);
    run(&mut wave, &mov);
    assert_eq!(wave.row(0), &Row::splat(100), "a write beyond the last register is dropped");
    wave.mode.0 &= !(1 << 27);
    run(&mut wave, &mov);
    assert_eq!(wave.row(1), &Row::splat(102));
    assert_eq!(DST, 32);
}
