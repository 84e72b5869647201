//! SDWA and DPP. Expected values from the definitions of the selections (AMD "Vega" ISA, "SDWA" and "DPP"), written out
//! lane by lane or byte by byte.

use super::{Case, DST, inst, run};
use crate::inst::{Dpp, DppCtrl, Dst, Sdwa, Sel, Src, SubWord, Unused};
use crate::op::Op;
use crate::wave::{LANES, Row, Wave};

const PARTS: [(Sel, u32, u32); 7] = [
    (Sel::Byte0, 0, 8),
    (Sel::Byte1, 8, 8),
    (Sel::Byte2, 16, 8),
    (Sel::Byte3, 24, 8),
    (Sel::Word0, 0, 16),
    (Sel::Word1, 16, 16),
    (Sel::Dword, 0, 32),
];

#[test]
fn every_source_selection() {
    let value = 0x8182_0384u64;
    for (sel, low, width) in PARTS {
        for sext in [false, true] {
            let part = value >> low & (u64::MAX >> (64 - width));
            let negative = part >> (width - 1) & 1 == 1;
            let expected = if sext && negative { part | (u64::MAX << width) & 0xffff_ffff } else { part };
            let sub = Sdwa {
                dst_sel: Sel::Dword,
                dst_unused: Unused::Pad,
                src_sel: [Sel::Dword, sel],
                sext: if sext { 0b10 } else { 0 },
            };
            Case::with(Op::VOrB32, |inst| inst.sub = SubWord::Sdwa(sub)).check(&[([0, value], expected)]);
            let first = Sdwa { src_sel: [sel, Sel::Dword], sext: u8::from(sext), ..sub };
            Case::with(Op::VMovB32, |inst| inst.sub = SubWord::Sdwa(first)).check(&[([value], expected)]);
        }
    }
}

#[test]
fn every_destination_selection() {
    // gem5#1379: what becomes of the rest of the destination, which holds 0x5a5aa5a5 before.
    let (result, before) = (0x1234_5683u64, 0x5a5a_a5a5u64);
    for (sel, low, width) in PARTS {
        for unused in [Unused::Pad, Unused::Sext, Unused::Preserve] {
            let mask = (u64::MAX >> (64 - width)) << low;
            let part = result << low & mask;
            let negative = result >> (width - 1) & 1 == 1;
            let above = !(mask | ((1 << low) - 1)) & 0xffff_ffff;
            let expected = match unused {
                Unused::Pad => part,
                Unused::Sext => part | if negative { above } else { 0 },
                Unused::Preserve => part | before & !mask,
            };
            let sub = Sdwa { dst_sel: sel, dst_unused: unused, src_sel: [Sel::Dword; 2], sext: 0 };
            Case::with(Op::VOrB32, |inst| inst.sub = SubWord::Sdwa(sub)).check(&[([result, 0], expected)]);
        }
    }
}

#[test]
fn subword_floats_and_masks() {
    // f16 halves, the second negated: 1.5 - 0.25
    let sub = Sdwa {
        dst_sel: Sel::Word1,
        dst_unused: Unused::Preserve,
        src_sel: [Sel::Word1, Sel::Word0],
        sext: 0,
    };
    let mut add = Case::with(Op::VAddF16, |inst| {
        inst.sub = SubWord::Sdwa(sub);
        inst.modifiers.neg = 0b10;
    });
    add.wave.mode.0 = 0x3f0;
    add.check(&[([0x3e00_ffff, 0xffff_3400], 0x3d00_a5a5)]);
    let sub = Sdwa { src_sel: [Sel::Byte1, Sel::Byte0], sext: 0b01, ..Sdwa::default() };
    let compare = Case::with(Op::VCmpLtI32, |inst| inst.sub = SubWord::Sdwa(sub));
    compare.check_mask(&[([0x8000, 0], true), ([0x7f00, 0x80], true), ([0x0100, 0], false)]);
    let sub = Sdwa { dst_sel: Sel::Dword, src_sel: [Sel::Byte2, Sel::Dword], ..Sdwa::default() };
    let mut carry = Case::with(Op::VAddCoU32, |inst| inst.sub = SubWord::Sdwa(sub));
    carry.put(super::SOURCES[0], false, &[0x0001_0000; LANES]);
    carry.put(super::SOURCES[1], false, &[0xffff_ffff; LANES]);
    run(&mut carry.wave, &carry.inst);
    assert_eq!((carry.wave.row(DST).lane(3), carry.wave.sgpr64(super::MASK_OUT)), (0, u64::MAX));
}

/// The lane that each lane reads, `None` where there is none, from the definition of the control.
fn expected_source(ctrl: DppCtrl, lane: i32) -> Option<i32> {
    let same_row = |other: i32| (other >= 0 && other / 16 == lane / 16).then_some(other);
    match ctrl {
        DppCtrl::QuadPerm(perm) => Some(lane / 4 * 4 + i32::from(perm >> (lane % 4 * 2) & 3)),
        DppCtrl::RowShl(n) => same_row(lane + i32::from(n)),
        DppCtrl::RowShr(n) => same_row(lane - i32::from(n)),
        DppCtrl::RowRor(n) => Some(lane / 16 * 16 + (lane % 16 - i32::from(n)).rem_euclid(16)),
        DppCtrl::WaveShl1 => (lane < 63).then_some(lane + 1),
        DppCtrl::WaveRol1 => Some((lane + 1) % 64),
        DppCtrl::WaveShr1 => (lane > 0).then_some(lane - 1),
        DppCtrl::WaveRor1 => Some((lane + 63) % 64),
        DppCtrl::RowMirror => Some(lane / 16 * 16 + 15 - lane % 16),
        DppCtrl::RowHalfMirror => Some(lane / 8 * 8 + 7 - lane % 8),
        DppCtrl::RowBcast15 => (lane >= 16).then_some(lane / 16 * 16 - 1),
        DppCtrl::RowBcast31 => (lane >= 32).then_some(31),
    }
}

#[test]
fn every_lane_control() {
    let controls = [
        DppCtrl::QuadPerm(0b00_01_10_11),
        DppCtrl::QuadPerm(0b01_01_01_01),
        DppCtrl::RowShl(1),
        DppCtrl::RowShl(15),
        DppCtrl::RowShr(1),
        DppCtrl::RowShr(8),
        DppCtrl::RowRor(3),
        DppCtrl::RowRor(15),
        DppCtrl::WaveShl1,
        DppCtrl::WaveRol1,
        DppCtrl::WaveShr1,
        DppCtrl::WaveRor1,
        DppCtrl::RowMirror,
        DppCtrl::RowHalfMirror,
        DppCtrl::RowBcast15,
        DppCtrl::RowBcast31,
    ];
    for ctrl in controls {
        for exec in [u64::MAX, 0xffff_0f0f_3333_fffe] {
            for (row_mask, bank_mask) in [(0xf, 0xf), (0xa, 0xf), (0xf, 0x5)] {
                for bound_ctrl in [false, true] {
                    check_control(exec, Dpp { ctrl, row_mask, bank_mask, bound_ctrl });
                }
            }
        }
    }
}

fn check_control(exec: u64, dpp: Dpp) {
    let mut wave = Wave::new();
    wave.write_row(1, &Row(std::array::from_fn(|lane| 1000 + lane as u32)));
    wave.write_row(2, &Row::splat(7));
    wave.set_exec(exec);
    let mut mov = inst(Op::VMovB32, Dst::Vgpr(2), &[Src::Vgpr(1)]);
    mov.sub = SubWord::Dpp(dpp);
    run(&mut wave, &mov);
    for lane in 0..64usize {
        let on = exec >> lane & 1 == 1;
        let masked = dpp.row_mask >> (lane / 16) & 1 == 1 && dpp.bank_mask >> (lane % 16 / 4) & 1 == 1;
        let source = expected_source(dpp.ctrl, lane as i32).filter(|from| exec >> from & 1 == 1);
        let expected = match source {
            Some(from) if on && masked => 1000 + from as u32,
            None if on && masked && dpp.bound_ctrl => 0,
            _ => 7,
        };
        assert_eq!(wave.row(2).lane(lane), expected, "{dpp:?} exec {exec:#x} lane {lane}");
    }
}

#[test]
fn sum_of_a_row_by_shifts() {
    // The reduction that compilers write: after row_shr 1, 2, 4, 8 the last lane of each row has its sum.
    let mut wave = Wave::new();
    wave.write_row(1, &Row(std::array::from_fn(|lane| lane as u32)));
    for n in [1, 2, 4, 8] {
        let mut add = inst(Op::VAddU32, Dst::Vgpr(1), &[Src::Vgpr(1), Src::Vgpr(1)]);
        add.sub =
            SubWord::Dpp(Dpp { ctrl: DppCtrl::RowShr(n), row_mask: 0xf, bank_mask: 0xf, bound_ctrl: true });
        run(&mut wave, &add);
    }
    for row in 0..4u32 {
        assert_eq!(wave.row(1).lane(row as usize * 16 + 15), (row * 16..row * 16 + 16).sum());
    }
}
