//! Comparisons and class tests. The truth tables are those of IEEE 754 (section 5.11), written out for the four
//! relations that two values can have; AMD "Vega" ISA, "Vector Compare Instructions", for names and class bits.

use super::{Case, run};
use crate::inst::{Dst, Src};
use crate::op::{Op, ROWS};
use crate::wave::{Wave, reg};

/// What a comparison gives for: less, equal, greater, unordered.
fn truth(name: &str) -> [bool; 4] {
    let (t, f) = (true, false);
    match name {
        "f" => [f, f, f, f],
        "lt" => [t, f, f, f],
        "eq" => [f, t, f, f],
        "le" => [t, t, f, f],
        "gt" => [f, f, t, f],
        "lg" => [t, f, t, f],
        "ge" => [f, t, t, f],
        "o" => [t, t, t, f],
        "u" => [f, f, f, t],
        "nge" => [t, f, f, t],
        "nlg" => [f, t, f, t],
        "ngt" => [t, t, f, t],
        "nle" => [f, f, t, t],
        "neq" | "ne" => [t, f, t, t],
        "nlt" => [f, t, t, t],
        "tru" | "t" => [t, t, t, t],
        other => panic!("no such comparison: {other}"),
    }
}

/// Pairs of values with their relation (0 less, 1 equal, 2 greater, 3 unordered) for each operand type.
fn pairs(kind: &str) -> Vec<([u64; 2], usize)> {
    let int = |bits: u32, signed: bool| {
        let max = u64::MAX >> (64 - bits);
        let top = 1u64 << (bits - 1);
        // C73's values: 0, 1, the largest positive, the most negative, all ones.
        let values = [0, 1, top - 1, top, max];
        let mut pairs = Vec::new();
        for a in values {
            for b in values {
                let key = |v: u64| if signed { v ^ top } else { v };
                pairs.push(([a, b], 1 + usize::from(key(a) > key(b)) - usize::from(key(a) < key(b))));
            }
        }
        pairs
    };
    let float = |one: u64, inf: u64, sign: u64, quiet: u64| {
        let nan = inf | quiet;
        vec![
            ([0, 0], 1),
            ([0, sign], 1),
            ([sign, 0], 1),
            ([1, 0], 2),
            ([sign | 1, 0], 0),
            ([1, 2], 0),
            ([one, one], 1),
            ([one, one + 1], 0),
            ([sign | one, sign | (one + 1)], 2),
            ([sign | one, one], 0),
            ([inf, one], 2),
            ([sign | inf, inf], 0),
            ([inf, inf], 1),
            ([nan, one], 3),
            ([one, nan], 3),
            ([nan, nan], 3),
            ([inf | 1, 0], 3),
            ([sign | nan, inf], 3),
        ]
    };
    match kind {
        "i16" => int(16, true),
        "u16" => int(16, false),
        "i32" => int(32, true),
        "u32" => int(32, false),
        "i64" => int(64, true),
        "u64" => int(64, false),
        "f16" => float(0x3c00, 0x7c00, 0x8000, 0x200),
        "f32" => float(0x3f80_0000, 0x7f80_0000, 0x8000_0000, 0x40_0000),
        "f64" => float(0x3ff0_0000_0000_0000, 0x7ff0_0000_0000_0000, 1 << 63, 1 << 51),
        other => panic!("no such type: {other}"),
    }
}

#[test]
fn every_comparison_of_every_type() {
    let mut seen = 0;
    for row in ROWS {
        let Some(rest) = row.name.strip_prefix("v_cmp_").or(row.name.strip_prefix("v_cmpx_")) else {
            continue;
        };
        let (condition, kind) = rest.split_once('_').expect("condition and type");
        if condition == "class" {
            continue;
        }
        let truth = truth(condition);
        let table: Vec<_> = pairs(kind).into_iter().map(|(pair, relation)| (pair, truth[relation])).collect();
        if row.name.starts_with("v_cmpx") {
            check_exec(row.op, &table);
        } else {
            Case::new(row.op).check_mask(&table);
        }
        seen += 1;
    }
    // 16 comparisons of 3 float types and 8 of 6 integer types, each with and without EXEC.
    assert_eq!(seen, 2 * (16 * 3 + 8 * 6));
}

/// `v_cmpx` writes EXEC as well as its destination; lanes that are off stay off.
fn check_exec(op: Op, table: &[([u64; 2], bool)]) {
    for exec in [u64::MAX, super::SOME, 0] {
        let mut case = Case::new(op);
        let wide = Case::is_wide(op.src(0));
        for n in 0..2 {
            case.put(super::SOURCES[n], wide, &std::array::from_fn(|lane| table[lane % table.len()].0[n]));
        }
        case.wave.set_exec(exec);
        run(&mut case.wave, &case.inst);
        let expected =
            (0..64).fold(0u64, |mask, lane| mask | u64::from(table[lane % table.len()].1) << lane) & exec;
        assert_eq!(case.wave.exec(), expected, "{}", op.row().name);
        assert_eq!(case.wave.sgpr64(super::MASK_OUT), expected, "{}", op.row().name);
    }
}

/// A literal is extended by its sign for `v_cmp_*_i64` and `v_cmpx_*_i64`, and by zeros for their unsigned siblings: operands of
/// type I64 and of all others in llvm/llvm-project#186575; AMD's emulator likewise (ROCm/rocm-systems#9575).
#[test]
fn literals_of_64_bits_keep_their_sign_where_the_operand_has_one() {
    const LITERAL: u32 = 0xffff_ff00;
    let mut seen = 0;
    for row in ROWS {
        let Some(rest) = row.name.strip_prefix("v_cmp_").or(row.name.strip_prefix("v_cmpx_")) else {
            continue;
        };
        let Some((condition, kind @ ("i64" | "u64"))) = rest.split_once('_') else { continue };
        // With its relation to what the second source is: -256 as a signed number, 4294967040 as one without a sign.
        let values: [(u64, usize); 4] = match kind {
            "i64" => [(0, 0), (-256i64 as u64, 1), (-257i64 as u64, 2), (0xffff_ff00, 0)],
            _ => [(0, 2), (0xffff_ff00, 1), (-256i64 as u64, 0), (0xffff_feff, 2)],
        };
        let mut case = Case::new(row.op);
        case.inst.src[0] = Src::Literal(LITERAL);
        case.put(super::SOURCES[1], true, &std::array::from_fn(|lane| values[lane % values.len()].0));
        run(&mut case.wave, &case.inst);
        let truth = truth(condition);
        let expected =
            (0..64).fold(0u64, |mask, lane| mask | u64::from(truth[values[lane % values.len()].1]) << lane);
        assert_eq!(case.wave.sgpr64(super::MASK_OUT), expected, "{}", row.name);
        seen += 1;
    }
    assert_eq!(seen, 2 * 2 * 8);
}

#[test]
fn plain_comparisons_leave_exec_alone_and_long_forms_write_where_they_say() {
    let mut wave = Wave::new();
    wave.set_exec(0xff);
    wave.set_vcc(0x1234);
    let mut compare = Case::new(Op::VCmpEqU32).inst;
    run(&mut wave, &compare);
    assert_eq!((wave.exec(), wave.vcc(), wave.sgpr64(super::MASK_OUT)), (0xff, 0x1234, 0xff));
    compare.dst = Dst::Sgpr(reg::VCC);
    run(&mut wave, &compare);
    assert_eq!(wave.vcc(), 0xff);
}

#[test]
fn comparisons_honour_abs_and_neg() {
    // gem5#2350: modifiers were ignored in compares.
    let bits = |v: f32| u64::from(v.to_bits());
    let table =
        [([bits(-3.0), bits(2.0)], false), ([bits(-3.0), bits(-4.0)], true), ([bits(1.0), bits(-4.0)], true)];
    let case = Case::with(Op::VCmpLtF32, |inst| {
        inst.modifiers.abs = 1;
        inst.modifiers.neg = 2;
    });
    // |a| < -b
    case.check_mask(&table);
}

#[test]
fn classes() {
    // Bit numbers as in the ISA: sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf.
    let f32s = [
        0x7f80_0001u64,
        0x7fc0_0000,
        0xff80_0000,
        0xbf80_0000,
        0x8000_0001,
        0x8000_0000,
        0,
        0x007f_ffff,
        0x0080_0000,
        0x7f80_0000,
    ];
    let f16s = [0x7c01u64, 0x7e00, 0xfc00, 0xbc00, 0x8001, 0x8000, 0, 0x03ff, 0x0400, 0x7c00];
    let f64s = [
        0x7ff0_0000_0000_0001u64,
        0x7ff8_0000_0000_0000,
        0xfff0_0000_0000_0000,
        0xbff0_0000_0000_0000,
        0x8000_0000_0000_0001,
        0x8000_0000_0000_0000,
        0,
        0x000f_ffff_ffff_ffff,
        0x0010_0000_0000_0000,
        0x7ff0_0000_0000_0000,
    ];
    for (op, values) in [(Op::VCmpClassF16, f16s), (Op::VCmpClassF32, f32s), (Op::VCmpClassF64, f64s)] {
        let mut table = Vec::new();
        for (class, value) in values.into_iter().enumerate() {
            for bit in 0..10u64 {
                table.push(([value, 1 << bit], bit as usize == class));
            }
            table.push(([value, 0x3ff], true));
            table.push(([value, 0], false));
        }
        Case::new(op).check_mask(&table);
        // Denormals are a class of their own whatever MODE makes of them in arithmetic.
        Case::new(op).mode(0).check_mask(&table);
    }
}
