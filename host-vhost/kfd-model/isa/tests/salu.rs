//! Every scalar opcode on values worked out by hand from AMD's "Vega" 7nm Instruction Set Architecture (chapter 12.1 to
//! 12.4): result, SCC, and that nothing else changes. An opcode without a line in here must say that it is not
//! implemented.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::collections::HashSet;

use kfd_isa::op::{Kind, ROWS};
use kfd_isa::stop::Stop;
use kfd_isa::wave::{Wave, reg};
use kfd_isa::{Encoding, Op, Target, decode, salu};

/// What stands in the destination before, and in registers that nothing may touch.
const BEFORE: u64 = 0x5555_6666_7777_8888;

/// An instruction with its sources in s[2:3] and s[4:5], the destination s[6:7], PC and EXEC as they are before.
struct Case {
    op: Op,
    a: u64,
    b: u64,
    scc: u8,
    want: u64,
    want_scc: u8,
}

const fn case(op: Op, a: u64, b: u64, scc: u8, want: u64, want_scc: u8) -> Case {
    Case { op, a, b, scc, want, want_scc }
}

/// The word of an instruction with these operands.
fn word(op: Op) -> u32 {
    let code = u32::from(op.row().code);
    let dst = if op.dst() == Kind::None { 0 } else { 6 << 16 };
    let first = if op.src(0) == Kind::None { 0 } else { 2 };
    match op.row().encoding {
        Encoding::Sop2 => 0x8000_0000 | code << 23 | dst | 4 << 8 | first,
        Encoding::Sop1 => 0xbe80_0000 | dst | code << 8 | first,
        Encoding::Sopc => 0xbf00_0000 | code << 16 | 4 << 8 | first,
        other => panic!("{other:?}"),
    }
}

fn run(wave: &mut Wave, word: u32) -> Result<(), Stop> {
    let inst = decode(Target::Gfx906, &[word, 0]).unwrap();
    wave.pc += inst.bytes();
    salu::execute(wave, &inst)
}

/// A wave with the sources and, in all else, what must not change.
fn wave(a: u64, b: u64, scc: u8) -> Wave {
    let mut wave = Wave::new();
    wave.pc = 0x1000;
    for register in (0..106).step_by(2) {
        wave.set_sgpr64(register, BEFORE);
    }
    wave.set_sgpr64(2, a);
    wave.set_sgpr64(4, b);
    wave.scc = scc != 0;
    wave
}

/// Executes, and compares the destination, SCC and all other scalar registers.
fn check(case: &Case) {
    let name = case.op.row().name;
    let mut wave = wave(case.a, case.b, case.scc);
    let before = wave.sgpr;
    run(&mut wave, word(case.op)).unwrap();
    let got = match case.op.dst().registers() {
        0 => 0,
        1 => u64::from(wave.sgpr(6)),
        _ => wave.sgpr64(6),
    };
    assert_eq!(
        (format!("{got:#x}"), u8::from(wave.scc)),
        (format!("{:#x}", case.want), case.want_scc),
        "{name} of {:#x}, {:#x}, SCC {}",
        case.a,
        case.b,
        case.scc
    );
    let written = 6..6 + usize::from(case.op.dst().registers());
    for (number, (now, then)) in wave.sgpr.iter().zip(before).enumerate() {
        assert!(written.contains(&number) || *now == then, "{name} changes scalar register {number}");
    }
    assert_eq!(wave.pc, 0x1004, "{name} changes the PC");
}

const ONES: u64 = u64::MAX;
const ONES32: u64 = 0xffff_ffff;
const MIN32: u64 = 0x8000_0000;
const MAX32: u64 = 0x7fff_ffff;
const MIN64: u64 = 1 << 63;

#[rustfmt::skip]
const SOP2: &[Case] = &[
    case(Op::SAddU32, 1, 2, 1, 3, 0),
    case(Op::SAddU32, ONES32, 1, 0, 0, 1),
    case(Op::SSubU32, 3, 2, 1, 1, 0),
    case(Op::SSubU32, 2, 3, 0, ONES32, 1),
    case(Op::SSubU32, 2, 2, 1, 0, 0),
    case(Op::SAddI32, MAX32, 1, 0, MIN32, 1),
    case(Op::SAddI32, MIN32, ONES32, 0, MAX32, 1),
    case(Op::SAddI32, ONES32, 1, 1, 0, 0),
    case(Op::SSubI32, MIN32, 1, 0, MAX32, 1),
    case(Op::SSubI32, 0, 1, 1, ONES32, 0),
    case(Op::SSubI32, 0, MIN32, 0, MIN32, 1),
    case(Op::SAddcU32, ONES32, 0, 1, 0, 1),
    case(Op::SAddcU32, 1, 2, 0, 3, 0),
    case(Op::SAddcU32, ONES32, ONES32, 1, ONES32, 1),
    case(Op::SSubbU32, 5, 4, 1, 0, 0),
    case(Op::SSubbU32, 5, 5, 1, ONES32, 1),
    case(Op::SSubbU32, 0, ONES32, 1, 0, 1),
    case(Op::SMinI32, ONES32, 1, 0, ONES32, 1),
    case(Op::SMinI32, 1, ONES32, 1, ONES32, 0),
    case(Op::SMinI32, 1, 1, 1, 1, 0),
    case(Op::SMinU32, ONES32, 1, 1, 1, 0),
    case(Op::SMinU32, 1, ONES32, 0, 1, 1),
    case(Op::SMaxI32, ONES32, 1, 1, 1, 0),
    case(Op::SMaxI32, 1, MIN32, 0, 1, 1),
    case(Op::SMaxI32, 1, 1, 1, 1, 0),
    case(Op::SMaxU32, ONES32, 1, 0, ONES32, 1),
    case(Op::SMaxU32, 1, ONES32, 1, ONES32, 0),
    case(Op::SCselectB32, 1, 2, 1, 1, 1),
    case(Op::SCselectB32, 1, 2, 0, 2, 0),
    case(Op::SCselectB64, 1 << 40, 2, 1, 1 << 40, 1),
    case(Op::SCselectB64, 1, 2 << 40, 0, 2 << 40, 0),
    case(Op::SAndB32, 0b1100, 0b1010, 0, 0b1000, 1),
    case(Op::SAndB32, 0b1100, 0b0011, 1, 0, 0),
    case(Op::SAndB64, ONES, MIN64, 0, MIN64, 1),
    case(Op::SAndB64, ONES32, ONES << 32, 1, 0, 0),
    case(Op::SOrB32, 0b1100, 0b1010, 0, 0b1110, 1),
    case(Op::SOrB32, 0, 0, 1, 0, 0),
    case(Op::SOrB64, ONES32, MIN64, 0, MIN64 | ONES32, 1),
    case(Op::SOrB64, 0, 0, 1, 0, 0),
    case(Op::SXorB32, 0b1100, 0b1010, 0, 0b0110, 1),
    case(Op::SXorB32, 7, 7, 1, 0, 0),
    case(Op::SXorB64, ONES, 1, 0, !1, 1),
    case(Op::SXorB64, MIN64, MIN64, 1, 0, 0),
    case(Op::SAndn2B32, 0b1100, 0b1010, 0, 0b0100, 1),
    case(Op::SAndn2B32, 0b1100, 0b1110, 1, 0, 0),
    case(Op::SAndn2B64, ONES, 1, 0, !1, 1),
    case(Op::SAndn2B64, 1, ONES, 1, 0, 0),
    case(Op::SOrn2B32, 0b1100, 0b1010, 0, 0xffff_fffd, 1),
    case(Op::SOrn2B32, 0, ONES32, 1, 0, 0),
    case(Op::SOrn2B64, 1, 1, 0, ONES, 1),
    case(Op::SOrn2B64, 0, ONES, 1, 0, 0),
    case(Op::SNandB32, 0b1100, 0b1010, 0, 0xffff_fff7, 1),
    case(Op::SNandB32, ONES32, ONES32, 1, 0, 0),
    case(Op::SNandB64, MIN64, MIN64, 0, !MIN64, 1),
    case(Op::SNandB64, ONES, ONES, 1, 0, 0),
    case(Op::SNorB32, 0b1100, 0b1010, 0, 0xffff_fff1, 1),
    case(Op::SNorB32, ONES32, 0, 1, 0, 0),
    case(Op::SNorB64, 1, MIN64, 0, !(MIN64 | 1), 1),
    case(Op::SNorB64, ONES32, ONES << 32, 1, 0, 0),
    case(Op::SXnorB32, 0b1100, 0b1010, 0, 0xffff_fff9, 1),
    case(Op::SXnorB32, 0, ONES32, 1, 0, 0),
    case(Op::SXnorB64, 1, MIN64, 0, !(MIN64 | 1), 1),
    case(Op::SXnorB64, 0, ONES, 1, 0, 0),
    case(Op::SLshlB32, 1, 31, 0, MIN32, 1),
    case(Op::SLshlB32, MIN32, 1, 1, 0, 0),
    case(Op::SLshlB32, 3, 32, 0, 3, 1),
    case(Op::SLshlB64, 1, 63, 0, MIN64, 1),
    case(Op::SLshlB64, 3, 64, 0, 3, 1),
    case(Op::SLshlB64, MIN64, 1, 1, 0, 0),
    case(Op::SLshrB32, MIN32, 31, 0, 1, 1),
    case(Op::SLshrB32, 1, 1, 1, 0, 0),
    case(Op::SLshrB32, 3, 33, 0, 1, 1),
    case(Op::SLshrB64, MIN64, 63, 0, 1, 1),
    case(Op::SLshrB64, 2, 65, 0, 1, 1),
    case(Op::SLshrB64, 1, 1, 1, 0, 0),
    case(Op::SAshrI32, MIN32, 31, 0, ONES32, 1),
    case(Op::SAshrI32, MIN32, 32, 0, MIN32, 1),
    case(Op::SAshrI32, 1, 1, 1, 0, 0),
    case(Op::SAshrI64, MIN64, 62, 0, !1, 1),
    case(Op::SAshrI64, 1 << 40, 40, 0, 1, 1),
    case(Op::SAshrI64, 1, 1, 1, 0, 0),
    // 4 ones from bit 8 on.
    case(Op::SBfmB32, 4, 8, 1, 0xf00, 1),
    case(Op::SBfmB32, 32 + 4, 32 + 8, 0, 0xf00, 0),
    case(Op::SBfmB32, 31, 31, 0, MIN32, 0),
    case(Op::SBfmB32, 0, 5, 1, 0, 1),
    case(Op::SBfmB64, 4, 40, 0, 0xf00_0000_0000, 0),
    case(Op::SBfmB64, 63, 1, 1, !1, 1),
    case(Op::SMulI32, 0x1_0001, 0x1_0001, 1, 0x2_0001, 1),
    case(Op::SMulI32, ONES32, 7, 0, 0xffff_fff9, 0),
    case(Op::SMulHiU32, ONES32, ONES32, 1, 0xffff_fffe, 1),
    case(Op::SMulHiI32, ONES32, ONES32, 0, 0, 0),
    case(Op::SMulHiI32, MIN32, 2, 0, ONES32, 0),
    case(Op::SBfeU32, 0xabcd_1234, 0x0008_0010, 0, 0xcd, 1),
    case(Op::SBfeU32, 0xabcd_1234, 0x0000_0010, 1, 0, 0),
    case(Op::SBfeU32, 0xabcd_1234, 0x0040_0004, 0, 0x0abc_d123, 1),
    case(Op::SBfeI32, 0xabcd_1234, 0x0008_0010, 0, 0xffff_ffcd, 1),
    case(Op::SBfeI32, 0xabcd_1234, 0x0004_0000, 0, 4, 1),
    case(Op::SBfeI32, 0xabcd_1234, 0x0000_0000, 1, 0, 0),
    case(Op::SBfeI32, 0xabcd_1234, 0x0020_0000, 1, 0xabcd_1234, 1),
    case(Op::SBfeU64, 0x1234_5678_9abc_def0, 0x0010_0020, 0, 0x5678, 1),
    case(Op::SBfeU64, ONES, 0x0040_0001, 0, ONES >> 1, 1),
    case(Op::SBfeU64, ONES, 0x0000_0001, 1, 0, 0),
    case(Op::SBfeI64, 0x1234_f678_9abc_def0, 0x0010_0020, 0, 0xffff_ffff_ffff_f678, 1),
    case(Op::SBfeI64, 0x1234_f678_9abc_def0, 0x0040_0000, 0, 0x1234_f678_9abc_def0, 1),
    case(Op::SBfeI64, ONES, 0, 1, 0, 0),
    case(Op::SAbsdiffI32, 3, 5, 0, 2, 1),
    case(Op::SAbsdiffI32, 5, 5, 1, 0, 0),
    // The manual's examples: the difference wraps around before the absolute value is taken.
    case(Op::SAbsdiffI32, MIN32, 0, 0, MIN32, 1),
    case(Op::SAbsdiffI32, MIN32, 1, 0, MAX32, 1),
    case(Op::SAbsdiffI32, MIN32, ONES32, 0, MAX32, 1),
    case(Op::SLshl1AddU32, 3, 1, 1, 7, 0),
    case(Op::SLshl1AddU32, MIN32, 0, 0, 0, 1),
    case(Op::SLshl2AddU32, 3, 1, 1, 13, 0),
    case(Op::SLshl2AddU32, 0x3fff_ffff, 4, 0, 0, 1),
    case(Op::SLshl3AddU32, 3, 1, 1, 25, 0),
    case(Op::SLshl3AddU32, 0x2000_0000, 1, 0, 1, 1),
    case(Op::SLshl4AddU32, 3, 1, 1, 49, 0),
    case(Op::SLshl4AddU32, 0x0fff_ffff, 0x10, 0, 0, 1),
    case(Op::SPackLlB32B16, 0x1111_2222, 0x3333_4444, 1, 0x4444_2222, 1),
    case(Op::SPackLhB32B16, 0x1111_2222, 0x3333_4444, 0, 0x3333_2222, 0),
    case(Op::SPackHhB32B16, 0x1111_2222, 0x3333_4444, 0, 0x3333_1111, 0),
];

#[rustfmt::skip]
const SOP1: &[Case] = &[
    case(Op::SMovB32, 0x1234_5678, 0, 1, 0x1234_5678, 1),
    case(Op::SMovB64, BEFORE + 1, 0, 0, BEFORE + 1, 0),
    case(Op::SCmovB32, 1, 0, 1, 1, 1),
    case(Op::SCmovB32, 1, 0, 0, BEFORE & ONES32, 0),
    case(Op::SCmovB64, 1, 0, 1, 1, 1),
    case(Op::SCmovB64, 1, 0, 0, BEFORE, 0),
    case(Op::SNotB32, 0xff, 0, 0, 0xffff_ff00, 1),
    case(Op::SNotB32, ONES32, 0, 1, 0, 0),
    case(Op::SNotB64, 1, 0, 0, !1, 1),
    case(Op::SNotB64, ONES, 0, 1, 0, 0),
    // Whole quads: a group of four lanes is on if one of them is.
    case(Op::SWqmB32, 0x8001_0020, 0, 0, 0xf00f_00f0, 1),
    case(Op::SWqmB32, 0, 0, 1, 0, 0),
    case(Op::SWqmB64, 0x4000_0000_0000_0100, 0, 0, 0xf000_0000_0000_0f00, 1),
    case(Op::SWqmB64, 0, 0, 1, 0, 0),
    case(Op::SBrevB32, 0x8000_0003, 0, 1, 0xc000_0001, 1),
    case(Op::SBrevB64, 3, 0, 0, 3 << 62, 0),
    case(Op::SBcnt0I32B32, 0xff, 0, 0, 24, 1),
    case(Op::SBcnt0I32B32, ONES32, 0, 1, 0, 0),
    case(Op::SBcnt0I32B64, 0xff, 0, 0, 56, 1),
    case(Op::SBcnt0I32B64, ONES, 0, 1, 0, 0),
    case(Op::SBcnt1I32B32, 0xff, 0, 0, 8, 1),
    case(Op::SBcnt1I32B32, 0, 0, 1, 0, 0),
    case(Op::SBcnt1I32B64, ONES, 0, 0, 64, 1),
    case(Op::SBcnt1I32B64, 0, 0, 1, 0, 0),
    case(Op::SFf0I32B32, 0b1011, 0, 1, 2, 1),
    case(Op::SFf0I32B32, ONES32, 0, 0, ONES32, 0),
    case(Op::SFf0I32B64, ONES32, 0, 1, 32, 1),
    case(Op::SFf0I32B64, ONES, 0, 0, ONES32, 0),
    case(Op::SFf1I32B32, 0b1000, 0, 1, 3, 1),
    case(Op::SFf1I32B32, 0, 0, 0, ONES32, 0),
    case(Op::SFf1I32B64, MIN64, 0, 1, 63, 1),
    case(Op::SFf1I32B64, 0, 0, 0, ONES32, 0),
    case(Op::SFlbitI32B32, 1, 0, 1, 31, 1),
    case(Op::SFlbitI32B32, MIN32, 0, 0, 0, 0),
    case(Op::SFlbitI32B32, 0, 0, 0, ONES32, 0),
    case(Op::SFlbitI32B64, 1, 0, 1, 63, 1),
    case(Op::SFlbitI32B64, MIN64, 0, 0, 0, 0),
    case(Op::SFlbitI32B64, 0, 0, 0, ONES32, 0),
    // How many bits from the top are like the sign.
    case(Op::SFlbitI32, 1, 0, 1, 31, 1),
    case(Op::SFlbitI32, 0x0000_ffff, 0, 0, 16, 0),
    case(Op::SFlbitI32, 0xffff_fffe, 0, 0, 31, 0),
    case(Op::SFlbitI32, MIN32, 0, 0, 1, 0),
    case(Op::SFlbitI32, 0, 0, 0, ONES32, 0),
    case(Op::SFlbitI32, ONES32, 0, 0, ONES32, 0),
    case(Op::SFlbitI32I64, MIN64, 0, 1, 1, 1),
    case(Op::SFlbitI32I64, ONES32, 0, 0, 32, 0),
    case(Op::SFlbitI32I64, ONES, 0, 0, ONES32, 0),
    case(Op::SSextI32I8, 0x180, 0, 1, 0xffff_ff80, 1),
    case(Op::SSextI32I8, 0xff7f, 0, 0, 0x7f, 0),
    case(Op::SSextI32I16, 0x1_8000, 0, 1, 0xffff_8000, 1),
    case(Op::SSextI32I16, 0xffff_7fff, 0, 0, 0x7fff, 0),
    case(Op::SBitset0B32, 3, 0, 1, BEFORE & ONES32 & !8, 1),
    case(Op::SBitset0B32, 35, 0, 0, BEFORE & ONES32 & !8, 0),
    case(Op::SBitset0B64, 62, 0, 0, BEFORE & !(1 << 62), 0),
    case(Op::SBitset1B32, 0, 0, 1, (BEFORE & ONES32) | 1, 1),
    case(Op::SBitset1B32, 32, 0, 0, (BEFORE & ONES32) | 1, 0),
    case(Op::SBitset1B64, 63 + 64, 0, 0, BEFORE | MIN64, 0),
    case(Op::SGetpcB64, 0, 0, 1, 0x1004, 1),
    // A bit for each quad of lanes.
    case(Op::SQuadmaskB32, 0x8001_0020, 0, 0, 0b1001_0010, 1),
    case(Op::SQuadmaskB32, 0, 0, 1, 0, 0),
    case(Op::SQuadmaskB64, 0x4000_0000_0000_0100, 0, 0, 0x8004, 1),
    case(Op::SQuadmaskB64, 0, 0, 1, 0, 0),
    case(Op::SAbsI32, ONES32, 0, 0, 1, 1),
    case(Op::SAbsI32, MIN32, 0, 0, MIN32, 1),
    case(Op::SAbsI32, 0, 0, 1, 0, 0),
    case(Op::SBitreplicateB64B32, 0x8000_0005, 0, 1, 0xc000_0000_0000_0033, 1),
];

#[rustfmt::skip]
const SOPC: &[Case] = &[
    case(Op::SCmpEqI32, 1, 1, 0, 0, 1),
    case(Op::SCmpEqI32, 1, 2, 1, 0, 0),
    case(Op::SCmpLgI32, 1, 2, 0, 0, 1),
    case(Op::SCmpLgI32, 2, 2, 1, 0, 0),
    case(Op::SCmpGtI32, 1, ONES32, 0, 0, 1),
    case(Op::SCmpGtI32, 1, 1, 1, 0, 0),
    case(Op::SCmpGeI32, 1, 1, 0, 0, 1),
    case(Op::SCmpGeI32, MIN32, MAX32, 1, 0, 0),
    case(Op::SCmpLtI32, ONES32, 1, 0, 0, 1),
    case(Op::SCmpLtI32, 1, 1, 1, 0, 0),
    case(Op::SCmpLeI32, 1, 1, 0, 0, 1),
    case(Op::SCmpLeI32, 1, MIN32, 1, 0, 0),
    case(Op::SCmpEqU32, ONES32, ONES32, 0, 0, 1),
    case(Op::SCmpEqU32, ONES32, 1, 1, 0, 0),
    case(Op::SCmpLgU32, 1, 2, 0, 0, 1),
    case(Op::SCmpLgU32, 2, 2, 1, 0, 0),
    case(Op::SCmpGtU32, ONES32, 1, 0, 0, 1),
    case(Op::SCmpGtU32, 1, 1, 1, 0, 0),
    case(Op::SCmpGeU32, 1, 1, 0, 0, 1),
    case(Op::SCmpGeU32, MAX32, MIN32, 1, 0, 0),
    case(Op::SCmpLtU32, 1, ONES32, 0, 0, 1),
    case(Op::SCmpLtU32, 1, 1, 1, 0, 0),
    case(Op::SCmpLeU32, 1, 1, 0, 0, 1),
    case(Op::SCmpLeU32, MIN32, 1, 1, 0, 0),
    case(Op::SBitcmp0B32, 0b1011, 2, 0, 0, 1),
    case(Op::SBitcmp0B32, 0b1011, 32, 1, 0, 0),
    case(Op::SBitcmp1B32, 0b1011, 3, 0, 0, 1),
    case(Op::SBitcmp1B32, 0b1011, 34, 1, 0, 0),
    case(Op::SBitcmp0B64, !MIN64, 63, 0, 0, 1),
    case(Op::SBitcmp0B64, MIN64, 63, 1, 0, 0),
    case(Op::SBitcmp1B64, MIN64, 63 + 64, 0, 0, 1),
    case(Op::SBitcmp1B64, MIN64, 62, 1, 0, 0),
    case(Op::SCmpEqU64, MIN64, MIN64, 0, 0, 1),
    case(Op::SCmpEqU64, MIN64, 0, 1, 0, 0),
    case(Op::SCmpLgU64, MIN64, 0, 0, 0, 1),
    case(Op::SCmpLgU64, MIN64, MIN64, 1, 0, 0),
];

#[test]
fn results_and_scc_are_as_the_manual_says() {
    for case in SOP2.iter().chain(SOP1).chain(SOPC) {
        check(case);
    }
}

/// Opcode, source, EXEC before; EXEC after, what is written to the destination.
#[rustfmt::skip]
const EXEC: &[(Op, u64, u64, u64, bool)] = &[
    (Op::SAndSaveexecB64, 0b1100, 0b1010, 0b1000, true),
    (Op::SAndSaveexecB64, 0b0100, 0b1010, 0, true),
    (Op::SOrSaveexecB64, 0b1100, 0b1010, 0b1110, true),
    (Op::SXorSaveexecB64, 0b1100, 0b1010, 0b0110, true),
    (Op::SAndn2SaveexecB64, 0b1100, 0b1010, 0b0100, true),
    (Op::SOrn2SaveexecB64, 0b1100, 0b1010, !0b0010, true),
    (Op::SNandSaveexecB64, 0b1100, 0b1010, !0b1000, true),
    (Op::SNorSaveexecB64, 0b1100, 0b1010, !0b1110, true),
    (Op::SXnorSaveexecB64, 0b1100, 0b1010, !0b0110, true),
    (Op::SAndn1SaveexecB64, 0b1100, 0b1010, 0b0010, true),
    (Op::SOrn1SaveexecB64, 0b1100, 0b1010, !0b0100, true),
    // These write the new value.
    (Op::SAndn1WrexecB64, 0b1100, 0b1010, 0b0010, false),
    (Op::SAndn2WrexecB64, 0b1100, 0b1010, 0b0100, false),
    (Op::SAndn2WrexecB64, 0b1100, 0b1110, 0, false),
];

#[test]
fn exec_is_saved_combined_and_tested() {
    for (op, source, before, after, saves) in EXEC {
        let name = op.row().name;
        for scc in [0, 1] {
            let mut wave = wave(*source, 0, scc);
            wave.set_exec(*before);
            run(&mut wave, word(*op)).unwrap();
            assert_eq!(wave.exec(), *after, "{name}: EXEC");
            assert_eq!(wave.sgpr64(6), if *saves { *before } else { *after }, "{name}: destination");
            assert_eq!(wave.scc, *after != 0, "{name}: SCC");
        }
    }
    // The source is read before the destination and EXEC are written: s_and_saveexec_b64 s[6:7], s[6:7].
    let mut wave = wave(0, 0, 0);
    wave.set_sgpr64(6, 0b1100);
    wave.set_exec(0b1010);
    run(&mut wave, 0xbe86_2006).unwrap();
    assert_eq!((wave.exec(), wave.sgpr64(6)), (0b1000, 0b1010));
}

/// Opcode, register before, immediate, SCC before; register after, SCC after.
#[rustfmt::skip]
const SOPK: &[(Op, u32, u16, bool, u32, bool)] = &[
    (Op::SMovkI32, 7, 0x7fff, true, 0x7fff, true),
    (Op::SMovkI32, 7, 0x8000, false, 0xffff_8000, false),
    (Op::SCmovkI32, 7, 0xffff, true, 0xffff_ffff, true),
    (Op::SCmovkI32, 7, 0xffff, false, 7, false),
    (Op::SCmpkEqI32, 0xffff_ffff, 0xffff, false, 0xffff_ffff, true),
    (Op::SCmpkEqI32, 0xffff, 0xffff, true, 0xffff, false),
    (Op::SCmpkLgI32, 0xffff, 0xffff, false, 0xffff, true),
    (Op::SCmpkLgI32, 1, 1, true, 1, false),
    (Op::SCmpkGtI32, 0, 0xffff, false, 0, true),
    (Op::SCmpkGtI32, 1, 1, true, 1, false),
    (Op::SCmpkGeI32, 1, 1, false, 1, true),
    (Op::SCmpkGeI32, 0xffff_fffe, 0xffff, true, 0xffff_fffe, false),
    (Op::SCmpkLtI32, 0xffff_fffe, 0xffff, false, 0xffff_fffe, true),
    (Op::SCmpkLtI32, 1, 1, true, 1, false),
    (Op::SCmpkLeI32, 1, 1, false, 1, true),
    (Op::SCmpkLeI32, 0, 0xffff, true, 0, false),
    (Op::SCmpkEqU32, 0xffff, 0xffff, false, 0xffff, true),
    (Op::SCmpkEqU32, 0xffff_ffff, 0xffff, true, 0xffff_ffff, false),
    (Op::SCmpkLgU32, 0xffff_ffff, 0xffff, false, 0xffff_ffff, true),
    (Op::SCmpkLgU32, 0xffff, 0xffff, true, 0xffff, false),
    (Op::SCmpkGtU32, 0x1_0000, 0xffff, false, 0x1_0000, true),
    (Op::SCmpkGtU32, 0xffff, 0xffff, true, 0xffff, false),
    (Op::SCmpkGeU32, 0xffff, 0xffff, false, 0xffff, true),
    (Op::SCmpkGeU32, 0xfffe, 0xffff, true, 0xfffe, false),
    (Op::SCmpkLtU32, 0xfffe, 0xffff, false, 0xfffe, true),
    (Op::SCmpkLtU32, 0xffff_ffff, 0xffff, true, 0xffff_ffff, false),
    (Op::SCmpkLeU32, 0xffff, 0xffff, false, 0xffff, true),
    (Op::SCmpkLeU32, 0x1_0000, 0xffff, true, 0x1_0000, false),
    (Op::SAddkI32, 0x7fff_ffff, 1, false, 0x8000_0000, true),
    (Op::SAddkI32, 5, 0xffff, true, 4, false),
    (Op::SAddkI32, 0x8000_0000, 0xffff, false, 0x7fff_ffff, true),
    (Op::SMulkI32, 3, 0xfffe, true, 0xffff_fffa, true),
    (Op::SMulkI32, 0x8000_0001, 2, false, 2, false),
];

#[test]
fn immediates_are_extended_as_the_opcode_says() {
    for (op, before, imm, scc, after, scc_after) in SOPK {
        let mut wave = wave(0, 0, u8::from(*scc));
        wave.set_sgpr(6, *before);
        run(&mut wave, 0xb000_0000 | u32::from(op.row().code) << 23 | 6 << 16 | u32::from(*imm)).unwrap();
        let name = op.row().name;
        assert_eq!(
            (wave.sgpr(6), wave.scc),
            (*after, *scc_after),
            "{name} of {before:#x}, {imm:#x}, SCC {scc}"
        );
        assert_eq!(wave.sgpr(7), (BEFORE >> 32) as u32, "{name} changes the register behind");
    }
}

#[test]
fn program_counters_are_read_and_set() {
    let at = |op: Op| {
        let mut wave = wave(0x7f00_1234_5678, 0, 1);
        run(&mut wave, word(op)).unwrap();
        assert!(wave.scc);
        (wave.pc, wave.sgpr64(6))
    };
    assert_eq!(at(Op::SSetpcB64), (0x7f00_1234_5678, BEFORE));
    assert_eq!(at(Op::SSwappcB64), (0x7f00_1234_5678, 0x1004));
    for (offset, target) in [(0, 0x10_1004), (3, 0x10_1010), (0xffff, 0x10_1000), (0x8000, 0x0e_1004)] {
        let mut wave = wave(0, 0, 1);
        wave.pc = 0x10_1000;
        run(&mut wave, 0xba86_0000 | offset).unwrap(); // s_call_b64 s[6:7], offset
        assert_eq!((wave.pc, wave.sgpr64(6)), (target, 0x10_1004), "{offset:#x}");
    }
}

#[test]
fn registers_are_reached_through_m0() {
    let with = |op: Op| {
        let mut wave = wave(0x1_0000_0002, 0x3_0000_0004, 1);
        wave.set_sgpr(reg::M0, 2);
        run(&mut wave, word(op)).unwrap();
        assert!(wave.scc);
        wave
    };
    let wave = with(Op::SMovrelsB32);
    assert_eq!(wave.sgpr64(6), BEFORE & !ONES32 | 4);
    let wave = with(Op::SMovrelsB64);
    assert_eq!(wave.sgpr64(6), 0x3_0000_0004);
    let wave = with(Op::SMovreldB32);
    assert_eq!((wave.sgpr64(6), wave.sgpr64(8)), (BEFORE, BEFORE & !ONES32 | 2));
    let wave = with(Op::SMovreldB64);
    assert_eq!((wave.sgpr64(6), wave.sgpr64(8)), (BEFORE, 0x1_0000_0002));
}

#[test]
fn relative_addressing_of_vector_registers_is_set_in_m0_and_mode() {
    let mut wave = wave(0x1ff, 0, 1);
    wave.set_sgpr(reg::M0, 0xabcd_ef12);
    run(&mut wave, word(Op::SSetGprIdxIdx)).unwrap();
    assert_eq!(wave.sgpr(reg::M0), 0xabcd_efff);
    // s_set_gpr_idx_on s2, gpr_idx(SRC0,DST): index in bits 7:0, what it applies to in bits 15:12.
    wave.set_sgpr(2, 0x134);
    run(&mut wave, 0xbf11_0902).unwrap();
    assert_eq!(wave.sgpr(reg::M0), 0xabcd_9f34);
    assert_eq!(wave.mode.0 >> 27 & 1, 1);
    assert!(wave.scc);
}

#[test]
fn fields_of_hardware_registers_are_read_and_written() {
    let mut wave = wave(0, 0, 1);
    wave.mode = kfd_isa::wave::Mode(0x3f0);
    let getreg = |wave: &mut Wave, id: u32, offset: u32, size: u32| {
        run(wave, 0xb886_0000 | id | offset << 6 | (size - 1) << 11).unwrap();
        wave.sgpr(6)
    };
    assert_eq!(getreg(&mut wave, 1, 0, 32), 0x3f0);
    assert_eq!(getreg(&mut wave, 1, 4, 4), 0xf);
    assert_eq!(getreg(&mut wave, 1, 8, 1), 1);
    // A field that would go on beyond bit 31 ends there.
    assert_eq!(getreg(&mut wave, 1, 31, 32), 0);
    // STATUS shows SCC in bit 0, EXECZ in bit 9, VCCZ in bit 10.
    assert_eq!(getreg(&mut wave, 2, 0, 1), 1);
    assert_eq!(getreg(&mut wave, 2, 9, 2), 0b10);
    wave.set_exec(0);
    wave.set_vcc(1);
    assert_eq!(getreg(&mut wave, 2, 9, 2), 0b01);
    // s_setreg_b32 hwreg(HW_REG_MODE, 4, 2), s2: only these bits, and not what is above them in the register.
    wave.set_sgpr(2, 0xffff_fff1);
    run(&mut wave, 0xb902_0000 | 1 | 4 << 6 | 1 << 11).unwrap();
    assert_eq!(wave.mode.0, 0x3d0);
    assert!(wave.scc);
}

/// Those that have a test of their own above.
const ELSEWHERE: &[Op] = &[
    Op::SSetpcB64,
    Op::SSwappcB64,
    Op::SCallB64,
    Op::SMovrelsB32,
    Op::SMovrelsB64,
    Op::SMovreldB32,
    Op::SMovreldB64,
    Op::SSetGprIdxIdx,
    Op::SSetGprIdxOn,
    Op::SGetregB32,
    Op::SSetregB32,
    Op::SSetregImm32B32,
];

#[test]
fn what_has_no_test_is_not_implemented() {
    let mut tested: HashSet<Op> = ELSEWHERE.iter().copied().collect();
    tested.extend(SOP2.iter().chain(SOP1).chain(SOPC).map(|case| case.op));
    tested.extend(EXEC.iter().map(|case| case.0));
    tested.extend(SOPK.iter().map(|case| case.0));
    let mut refused = Vec::new();
    for row in ROWS {
        let encoding = row.encoding;
        if !matches!(encoding, Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopc | Encoding::Sopk)
            || tested.contains(&row.op)
        {
            continue;
        }
        let word = match encoding {
            Encoding::Sopk => 0xb000_0000 | u32::from(row.code) << 23 | 6 << 16,
            _ => word(row.op),
        };
        assert_eq!(run(&mut wave(0, 0, 0), word), Err(Stop::NotSupported { name: row.name }));
        refused.push(row.name);
    }
    // Subroutines by fork and join, skipping of vector instructions, and what only a trap handler may do.
    let expected = [
        "s_cbranch_g_fork",
        "s_rfe_restore_b64",
        "s_rfe_b64",
        "s_cbranch_join",
        "s_setvskip",
        "s_cbranch_i_fork",
    ];
    assert_eq!(refused.iter().collect::<HashSet<_>>(), expected.iter().collect::<HashSet<_>>());
}
