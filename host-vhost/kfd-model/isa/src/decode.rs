//! From words to [`Inst`].
//!
//! Fields that an instruction does not use must be 0, as assemblers leave them; that a processor may ignore them is no
//! reason to guess what a program that sets them means.

mod memory;
mod operand;
mod scalar;
mod vector;

use crate::inst::{Dst, Inst, MemFlags, Modifiers, Src, SubWord};
use crate::op::{Encoding, Op, Target};

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
    let word = *words.first().ok_or(DecodeError::Short { needed: 1, found: 0 })?;
    let raw = Raw { target, word, second: words.get(1).copied() };
    match word >> 26 {
        0..=0x1f => match word >> 25 {
            0x3e => vector::vopc(&raw),
            0x3f => vector::vop1(&raw),
            _ => vector::vop2(&raw),
        },
        0x20..=0x2f => match word >> 23 {
            0x17d => scalar::sop1(&raw),
            0x17e => scalar::sopc(&raw),
            0x17f => scalar::sopp(&raw),
            0x160..=0x17c => scalar::sopk(&raw),
            _ => scalar::sop2(&raw),
        },
        0x30 => memory::smem(&raw),
        0x31 => Err(raw.not_implemented("EXP")),
        0x34 if word >> 23 == 0x1a7 => vector::vop3p(&raw),
        0x34 => vector::vop3(&raw),
        0x35 => Err(raw.not_implemented("VINTRP")),
        0x36 => memory::ds(&raw),
        0x37 => memory::flat(&raw),
        0x38 => memory::mubuf(&raw),
        0x3a => Err(raw.not_implemented("MTBUF")),
        0x3c => Err(raw.not_implemented("MIMG")),
        _ => Err(DecodeError::Encoding { word }),
    }
}

/// The words at hand.
struct Raw {
    target: Target,
    word: u32,
    second: Option<u32>,
}

impl Raw {
    fn not_implemented(&self, name: &'static str) -> DecodeError {
        DecodeError::NotImplemented { word: self.word, name }
    }

    fn second(&self) -> Result<u32, DecodeError> {
        self.second.ok_or(DecodeError::Short { needed: 2, found: 1 })
    }

    /// The opcode with this number in the encoding.
    fn op(&self, encoding: Encoding, code: u32) -> Result<Op, DecodeError> {
        let code = u16::try_from(code).unwrap_or(u16::MAX);
        Op::find(self.target, encoding, code).ok_or(self.unknown(encoding, code))
    }

    fn unknown(&self, encoding: Encoding, code: u16) -> DecodeError {
        DecodeError::Opcode { word: self.word, encoding, code }
    }

    fn field(&self, op: Op, field: &'static str, value: u32) -> DecodeError {
        DecodeError::Field { word: self.word, field, value, name: op.row().name }
    }

    /// Checks that no other bits than `used` are set in the first word.
    fn only(&self, op: Op, used: u32) -> Result<(), DecodeError> {
        reserved(op, 0, self.word, used)
    }
}

/// Checks that no other bits than `used` are set in a word.
fn reserved(op: Op, index: u8, word: u32, used: u32) -> Result<(), DecodeError> {
    match word & !used {
        0 => Ok(()),
        bits => Err(DecodeError::Reserved { word, index, bits, name: op.row().name }),
    }
}

/// `count` bits of a word from bit `low` on.
const fn bits(word: u32, low: u32, count: u32) -> u32 {
    (word >> low) & ((1 << count) - 1)
}

/// The same, as a number of a register and the like.
const fn byte(word: u32, low: u32, count: u32) -> u8 {
    bits(word, low, count) as u8
}

/// Whether a bit of a word is set.
const fn bit(word: u32, number: u32) -> bool {
    (word >> number) & 1 != 0
}

/// An instruction that has nothing yet.
const fn empty(op: Op, encoding: Encoding, words: u8) -> Inst {
    Inst {
        op,
        encoding,
        words,
        dst: Dst::None,
        sdst: Dst::None,
        src: [Src::None; 4],
        modifiers: Modifiers::NONE,
        sub: SubWord::None,
        imm: 0,
        flags: MemFlags::empty(),
    }
}

#[cfg(test)]
mod tests;
