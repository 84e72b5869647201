//! Comparison of what the decoder and LLVM say of words.

use std::fmt::{Display, Formatter};

use kfd_isa::{DecodeError, Encoding, Target, decode};

use crate::mc::Mc;

/// How many differences are printed.
const SHOWN: usize = 20;

/// Numbers of what was compared.
#[derive(Debug, Default, Clone, Copy)]
pub struct Report {
    /// Both decode, the text is the same.
    pub same: usize,
    /// Neither decodes.
    pub neither: usize,
    /// LLVM decodes what is refused here, for a reason that [`may_refuse`] accepts.
    pub stricter: usize,
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} with the same text, {} nothing, {} refused here only",
            self.same, self.neither, self.stricter
        )
    }
}

/// Whether words that LLVM decodes may be refused: for what the fields hold, and where a whole encoding is not there.
fn may_refuse(error: &DecodeError) -> bool {
    match error {
        // Registers that are not aligned or do not exist, fields that are not used, constants where registers belong.
        DecodeError::Reserved { .. } | DecodeError::Field { .. } | DecodeError::NotImplemented { .. } => true,
        // Interpolation is graphics: the long forms of VINTRP, and v_interp_p1ll_f16, v_interp_p1lv_f16,
        // v_interp_p2_legacy_f16, v_interp_p2_f16.
        DecodeError::Opcode { encoding: Encoding::Vop3, code: 0x270..=0x272 | 0x274..=0x277, .. } => true,
        // The number of buffer_wbinvl1 before gfx8, which LLVM 14 decodes still.
        DecodeError::Opcode { encoding: Encoding::Mubuf, code: 0x71, .. } => true,
        _ => false,
    }
}

/// Compares what decodes here and what LLVM makes of the same words, and panics with the differences.
pub fn must_agree(mc: &Mc, target: Target, words: &[Vec<u32>]) -> Report {
    compare(mc, target, words, may_refuse)
}

/// The same for words that must decode.
pub fn must_be_same(mc: &Mc, target: Target, words: &[Vec<u32>]) {
    let report = compare(mc, target, words, |_| false);
    assert_eq!(report.same, words.len());
}

fn compare(mc: &Mc, target: Target, words: &[Vec<u32>], may_refuse: fn(&DecodeError) -> bool) -> Report {
    let decoded: Vec<_> = words.iter().map(|words| decode(target, words)).collect();
    // What is an instruction here, LLVM gets without the words after it: it must see one instruction, which ends there.
    let blocks: Vec<_> = words
        .iter()
        .zip(&decoded)
        .map(|(words, inst)| match inst {
            Ok(inst) => words[..usize::from(inst.words)].to_vec(),
            Err(_) => words.clone(),
        })
        .collect();
    let listings = mc.disassemble(target, &blocks);
    let mut report = Report::default();
    let mut differences = Vec::new();
    for ((block, decoded), listing) in blocks.iter().zip(&decoded).zip(&listings) {
        let differs = match decoded {
            Ok(inst) => {
                report.same += 1;
                listing.invalid || listing.texts != [inst.to_string()]
            }
            Err(error) if listing.texts.is_empty() => {
                report.neither += 1;
                // LLVM says that too.
                !listing.invalid && !matches!(error, DecodeError::Short { .. })
            }
            Err(error) => {
                report.stricter += 1;
                !may_refuse(error)
            }
        };
        if differs {
            let here = match decoded {
                Ok(inst) => inst.to_string(),
                Err(error) => format!("error: {error}"),
            };
            differences.push(format!("{block:08x?}: here {here}, LLVM {listing:?}"));
        }
    }
    assert!(
        differences.is_empty(),
        "{target:?}: {} differences:\n{}",
        differences.len(),
        differences[..differences.len().min(SHOWN)].join("\n")
    );
    report
}
