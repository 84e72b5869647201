//! Atomic operations and comparisons that packets ask for.
//!
//! Operations have the numbers of `TC_OP` (`GL2_OP` from gfx10 on): bit 5 says 64 bits, bit 6 says that the old value
//! is not wanted. Those on floating point numbers are not there.

use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::Failure;
use super::memory::Memory;

/// Bit of an operation on 64 bits.
const WIDE: u32 = 1 << 5;
/// Bit of an operation that returns nothing.
const NO_RETURN: u32 = 1 << 6;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `TC_OP_ATOMIC_SWAP`
    Swap,
    /// `TC_OP_ATOMIC_CMPSWAP`
    CompareSwap,
    /// `TC_OP_ATOMIC_ADD`
    Add,
    /// `TC_OP_ATOMIC_SUB`
    Sub,
    /// `TC_OP_ATOMIC_SMIN`
    SignedMin,
    /// `TC_OP_ATOMIC_UMIN`
    UnsignedMin,
    /// `TC_OP_ATOMIC_SMAX`
    SignedMax,
    /// `TC_OP_ATOMIC_UMAX`
    UnsignedMax,
    /// `TC_OP_ATOMIC_AND`
    And,
    /// `TC_OP_ATOMIC_OR`
    Or,
    /// `TC_OP_ATOMIC_XOR`
    Xor,
    /// `TC_OP_ATOMIC_INC`: to 0 from the source value on.
    Increment,
    /// `TC_OP_ATOMIC_DEC`: to the source value from 0 or above it.
    Decrement,
}

/// An operation with its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// What it does.
    pub kind: Kind,
    /// On 64 bits; else on 32.
    pub wide: bool,
}

impl Operation {
    /// The operation with a number of 7 bits, if there is one on integers.
    pub fn new(number: u32) -> Option<Self> {
        let kind = match number & !(WIDE | NO_RETURN) {
            0x07 => Kind::Swap,
            0x08 => Kind::CompareSwap,
            0x0f => Kind::Add,
            0x10 => Kind::Sub,
            0x11 => Kind::SignedMin,
            0x12 => Kind::UnsignedMin,
            0x13 => Kind::SignedMax,
            0x14 => Kind::UnsignedMax,
            0x15 => Kind::And,
            0x16 => Kind::Or,
            0x17 => Kind::Xor,
            0x18 => Kind::Increment,
            0x19 => Kind::Decrement,
            _ => return None,
        };
        Some(Self { kind, wide: number & WIDE != 0 })
    }

    /// Runs the operation; the value before it.
    pub(crate) fn run(self, memory: &dyn Memory, va: u64, source: u64, compare: u64) -> Result<u64, Failure> {
        if self.wide {
            memory.update64(va, &mut |word| run64(self.kind, word, source, compare))
        } else {
            // Only the low halves count.
            let (source, compare) = (source as u32, compare as u32);
            Ok(u64::from(memory.update32(va, &mut |word| run32(self.kind, word, source, compare))?))
        }
    }

    /// The old value is the one that a comparing operation waits for.
    pub(crate) fn compared_equal(self, old: u64, compare: u64) -> bool {
        if self.wide { old == compare } else { old as u32 == compare as u32 }
    }
}

macro_rules! run {
    ($name:ident, $atomic:ty, $unsigned:ty, $signed:ty) => {
        fn $name(kind: Kind, word: &$atomic, source: $unsigned, compare: $unsigned) -> $unsigned {
            // fetch_update with a closure that always gives a value never fails.
            let update = |change: &dyn Fn($unsigned) -> $unsigned| {
                word.fetch_update(AcqRel, Acquire, |old| Some(change(old))).unwrap_or_else(|old| old)
            };
            match kind {
                Kind::Swap => word.swap(source, AcqRel),
                Kind::CompareSwap => {
                    word.compare_exchange(compare, source, AcqRel, Acquire).unwrap_or_else(|old| old)
                }
                Kind::Add => word.fetch_add(source, AcqRel),
                Kind::Sub => word.fetch_sub(source, AcqRel),
                Kind::SignedMin => {
                    update(&|old| if (old as $signed) < source as $signed { old } else { source })
                }
                Kind::UnsignedMin => word.fetch_min(source, AcqRel),
                Kind::SignedMax => {
                    update(&|old| if old as $signed > source as $signed { old } else { source })
                }
                Kind::UnsignedMax => word.fetch_max(source, AcqRel),
                Kind::And => word.fetch_and(source, AcqRel),
                Kind::Or => word.fetch_or(source, AcqRel),
                Kind::Xor => word.fetch_xor(source, AcqRel),
                Kind::Increment => update(&|old| if old >= source { 0 } else { old.wrapping_add(1) }),
                Kind::Decrement => {
                    update(&|old| if old == 0 || old > source { source } else { old.wrapping_sub(1) })
                }
            }
        }
    };
}

run!(run32, AtomicU32, u32, i32);
run!(run64, AtomicU64, u64, i64);

/// A comparison of WAIT_REG_MEM and POLL_REGMEM (`WAIT_REG_MEM_FUNCTION`), unsigned: memory on the left, reference on
/// the right. `None` for the number that is reserved.
pub(crate) fn compare(function: u32, value: u32, reference: u32) -> Option<bool> {
    Some(match function {
        0 => true,
        1 => value < reference,
        2 => value <= reference,
        3 => value == reference,
        4 => value != reference,
        5 => value >= reference,
        6 => value > reference,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::fake::FakeMemory;

    /// (number, old, source, compare, new): the rules of the atomics in the "Vega" 7nm ISA document.
    const CASES: &[(u32, u64, u64, u64, u64)] = &[
        (0x07, 5, 9, 0, 9),
        (0x08, 5, 9, 5, 9),
        (0x08, 5, 9, 6, 5),
        (0x0f, 0xffff_ffff, 2, 0, 1),
        (0x10, 1, 2, 0, 0xffff_ffff),
        (0x11, 0xffff_fffe, 3, 0, 0xffff_fffe),
        (0x12, 0xffff_fffe, 3, 0, 3),
        (0x13, 0xffff_fffe, 3, 0, 3),
        (0x14, 0xffff_fffe, 3, 0, 0xffff_fffe),
        (0x15, 0xc, 0xa, 0, 0x8),
        (0x16, 0xc, 0xa, 0, 0xe),
        (0x17, 0xc, 0xa, 0, 0x6),
        (0x18, 4, 5, 0, 5),
        (0x18, 5, 5, 0, 0),
        (0x19, 0, 5, 0, 5),
        (0x19, 6, 5, 0, 5),
        (0x19, 3, 5, 0, 2),
        // 64 bits: ADD_RTN_64 is 47 in ROCr's sdma_registers.h, SWAP_RTN_64 is 39 in its amd_gpu_pm4.h.
        (47, 7, u64::MAX, 0, 6),
        (39, 7, 1 << 40, 0, 1 << 40),
        (0x28, 1 << 40, 3, 1 << 40, 3),
        (0x31, u64::MAX, 1, 0, u64::MAX),
        (0x34, u64::MAX, 1, 0, u64::MAX),
        // Without the old value.
        (0x4f, 1, 1, 0, 2),
        (0x6f, u64::MAX, 1, 0, 0),
    ];

    #[test]
    fn operations_change_the_word_and_return_what_was_there() {
        let memory = FakeMemory::new(0x1000, 0x1000);
        let memory: &dyn Memory = &memory;
        for (number, old, source, compare, new) in CASES {
            memory.store64(0x1000, *old).unwrap();
            let operation = Operation::new(*number).unwrap();
            let returned = operation.run(memory, 0x1000, *source, *compare).unwrap();
            assert_eq!(returned, *old, "{number:#x}");
            assert_eq!(memory.load64(0x1000).unwrap(), *new, "{number:#x} on {old:#x} with {source:#x}");
        }
    }

    #[test]
    fn a_narrow_operation_leaves_the_next_word_alone() {
        let memory = FakeMemory::new(0x1000, 0x1000);
        let memory: &dyn Memory = &memory;
        memory.store64(0x1000, u64::MAX).unwrap();
        Operation::new(0x0f).unwrap().run(memory, 0x1000, 1, 0).unwrap();
        assert_eq!(memory.load64(0x1000).unwrap(), 0xffff_ffff_0000_0000);
        let error = Operation::new(0x2f).unwrap().run(memory, 0x1004, 1, 0).unwrap_err();
        assert_eq!(error, Failure::Unaligned { va: 0x1004, size: 8 });
    }

    #[test]
    fn numbers_without_an_integer_operation_are_refused() {
        for number in [0, 1, 2, 3, 0x1a, 0x1f, 0x20, 0x21, 0x3a, 0x40, 0x41, 0x5f] {
            assert_eq!(Operation::new(number), None, "{number:#x}");
        }
    }

    #[test]
    fn comparisons_are_unsigned() {
        let row = |function| {
            [(1, 2), (2, 2), (u32::MAX, 2)].map(|(value, reference)| compare(function, value, reference))
        };
        assert_eq!(row(0), [Some(true); 3]);
        assert_eq!(row(1), [Some(true), Some(false), Some(false)]);
        assert_eq!(row(2), [Some(true), Some(true), Some(false)]);
        assert_eq!(row(3), [Some(false), Some(true), Some(false)]);
        assert_eq!(row(4), [Some(true), Some(false), Some(true)]);
        assert_eq!(row(5), [Some(false), Some(true), Some(true)]);
        assert_eq!(row(6), [Some(false), Some(false), Some(true)]);
        assert_eq!(row(7), [None; 3]);
    }
}
