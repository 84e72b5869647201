//! From words to [`Inst`].

use crate::inst::Inst;
use crate::op::{Encoding, Target};

/// Why words are no instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// There is no first word, or the second one that the first asks for is missing.
    #[error("an instruction of {needed} words, {found} are there")]
    Short {
        /// How many words it takes.
        needed: u8,
        /// How many there are.
        found: u8,
    },
    /// The encoding bits mean nothing.
    #[error("{word:#010x}: no encoding has bits 31:26 = {:#04x}", .word >> 26)]
    Encoding {
        /// The first word.
        word: u32,
    },
    /// An encoding that is known and not implemented.
    #[error("{word:#010x}: {name} instructions are not implemented")]
    NotImplemented {
        /// The first word.
        word: u32,
        /// The encoding's name.
        name: &'static str,
    },
    /// No instruction of the encoding has this number on the target.
    #[error("{word:#010x}: {encoding:?} has no opcode {code:#x} on this target")]
    Opcode {
        /// The first word.
        word: u32,
        /// The encoding.
        encoding: Encoding,
        /// The number.
        code: u16,
    },
    /// Bits that must be zero in this instruction are not.
    #[error("{word:#010x}: bits {bits:#x} of word {index} must be 0 in {name}")]
    Reserved {
        /// The word.
        word: u32,
        /// Which word it is, 0 or 1.
        index: u8,
        /// Those of its bits that are set and must not be.
        bits: u32,
        /// The mnemonic.
        name: &'static str,
    },
    /// A field has a value that means nothing in this instruction.
    #[error("{word:#010x}: {field} = {value:#x} means nothing in {name}")]
    Field {
        /// The first word.
        word: u32,
        /// The field's name.
        field: &'static str,
        /// Its value.
        value: u32,
        /// The mnemonic.
        name: &'static str,
    },
}

/// Decodes the instruction at the start of `words`, of which at most two are looked at.
///
/// # Errors
///
/// If they are no instruction of the target; the error names the bits.
pub fn decode(target: Target, words: &[u32]) -> Result<Inst, DecodeError> {
    let _ = target;
    let word = *words.first().ok_or(DecodeError::Short { needed: 1, found: 0 })?;
    Err(DecodeError::Encoding { word })
}
