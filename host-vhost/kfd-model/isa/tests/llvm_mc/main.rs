//! The decoder and its text against LLVM's assembler and disassembler, which are the outside truth here.
//!
//! LLVM 14 is what the text follows; another version writes some operands in another way.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "all of this is tests")]

mod agree;
mod mc;
mod shapes;
mod words;

use kfd_isa::{Op, Target};

use crate::mc::Mc;

/// The targets that are compared.
const TARGETS: [Target; 2] = [Target::Gfx900, Target::Gfx906];

/// The one that every text is tried on.
const FULL: Target = Target::Gfx906;

/// LLVM, or a return with the line that the test runner counts as a skip.
macro_rules! llvm {
    () => {
        match Mc::find() {
            Ok(mc) => mc,
            Err(reason) => {
                println!("SKIP: {reason}");
                return;
            }
        }
    };
}

#[test]
fn what_is_assembled_is_decoded_and_has_the_same_text() {
    let mc = llvm!();
    for target in TARGETS {
        let rows: Vec<_> = kfd_isa::op::ROWS
            .iter()
            .filter(|row| Op::find(target, row.encoding, row.code) == Some(row.op))
            .collect();
        let mut shapes: Vec<_> = rows.iter().flat_map(|row| shapes::of(row)).collect();
        if target != FULL {
            // What both have is compared in full once.
            let mut count = std::collections::HashMap::new();
            shapes.retain(|shape| {
                let count = count.entry((shape.op, shape.form)).or_insert(0);
                *count += 1;
                Op::find(FULL, shape.op.row().encoding, shape.op.row().code) != Some(shape.op) || *count <= 4
            });
        }
        let lines: Vec<_> = shapes.iter().map(|shape| shape.text.as_str()).collect();
        let encoded = mc.assemble(target, &lines);
        let words: Vec<_> = encoded.iter().flatten().cloned().collect();
        agree::must_be_same(&mc, target, &words);

        // Every form that the table claims was among them, and LLVM refuses all others.
        let mut accepted = std::collections::HashSet::new();
        for (shape, words) in shapes.iter().zip(&encoded) {
            if words.is_some() {
                accepted.insert((shape.op, shape.form));
            }
        }
        for row in &rows {
            for form in shapes::FORMS {
                let claimed = form.is_of(row);
                assert_eq!(
                    accepted.contains(&(row.op, form)),
                    claimed,
                    "{target:?} {}: the table says that the form {form:?} is {}there, LLVM differs",
                    row.name,
                    if claimed { "" } else { "not " }
                );
            }
        }
        println!(
            "{target:?}: {} opcodes, {} texts assembled, {} refused",
            rows.len(),
            words.len(),
            lines.len() - words.len()
        );
    }
}

#[test]
fn random_words_mean_the_same_or_nothing() {
    let mc = llvm!();
    for (target, seed) in TARGETS.into_iter().zip(1..) {
        let words = words::random(seed, 40_000);
        let report = agree::must_agree(&mc, target, &words);
        println!("{target:?}: {report}");
        // A generator that makes nothing that decodes would prove nothing.
        assert!(report.same > 5_000, "{report}");
    }
}

#[test]
fn llvm_knows_no_opcode_that_the_table_does_not() {
    let mc = llvm!();
    for target in TARGETS {
        let words = words::all_opcodes();
        let report = agree::must_agree(&mc, target, &words);
        println!("{target:?}: {report}");
        assert!(report.same > 1_000, "{report}");
    }
}
