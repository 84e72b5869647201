//! What atomic operations make of a word: the same for LDS, FLAT and MUBUF.

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// The source.
    Swap,
    /// The source, if the word is equal to the comparand.
    CompareSwap,
    /// Sum.
    Add,
    /// Difference: word minus source.
    Sub,
    /// Difference: source minus word.
    ReverseSub,
    /// Smaller of two signed numbers.
    SignedMin,
    /// Smaller of two unsigned numbers.
    UnsignedMin,
    /// Larger of two signed numbers.
    SignedMax,
    /// Larger of two unsigned numbers.
    UnsignedMax,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// One more, from the source on 0.
    Increment,
    /// One less; from 0 or above the source, the source.
    Decrement,
    /// What is masked by the comparand is taken from the source (`ds_mskor`): the word without the bits of the first
    /// operand, with those of the second.
    MaskedOr,
    /// Sum of floating point numbers.
    FloatAdd,
    /// The smaller floating point number.
    FloatMin,
    /// The larger floating point number.
    FloatMax,
    /// The source, if the word is equal to the comparand as a floating point number.
    FloatCompareSwap,
}

macro_rules! apply {
    ($name:ident, $unsigned:ty, $signed:ty, $float:ty) => {
        impl Atomic {
            /// The new value of a word. `compare` is the second operand of those that have two.
            #[inline]
            pub fn $name(self, old: $unsigned, source: $unsigned, compare: $unsigned) -> $unsigned {
                let number = <$float>::from_bits;
                match self {
                    Self::Swap => source,
                    Self::CompareSwap if old == compare => source,
                    Self::CompareSwap => old,
                    Self::Add => old.wrapping_add(source),
                    Self::Sub => old.wrapping_sub(source),
                    Self::ReverseSub => source.wrapping_sub(old),
                    Self::SignedMin => (old as $signed).min(source as $signed) as $unsigned,
                    Self::UnsignedMin => old.min(source),
                    Self::SignedMax => (old as $signed).max(source as $signed) as $unsigned,
                    Self::UnsignedMax => old.max(source),
                    Self::And => old & source,
                    Self::Or => old | source,
                    Self::Xor => old ^ source,
                    Self::Increment if old >= source => 0,
                    Self::Increment => old + 1,
                    Self::Decrement if old == 0 || old > source => source,
                    Self::Decrement => old - 1,
                    Self::MaskedOr => old & !source | compare,
                    Self::FloatAdd => (number(old) + number(source)).to_bits(),
                    // A number wins over none.
                    Self::FloatMin if number(source) < number(old) || number(old).is_nan() => source,
                    Self::FloatMax if number(source) > number(old) || number(old).is_nan() => source,
                    Self::FloatMin | Self::FloatMax => old,
                    Self::FloatCompareSwap if number(old) == number(compare) => source,
                    Self::FloatCompareSwap => old,
                }
            }
        }
    };
}

apply!(apply32, u32, i32, f32);
apply!(apply64, u64, i64, f64);

#[cfg(test)]
mod tests {
    use super::Atomic::*;

    // Vega ISA document, DS_INC_U32 and DS_DEC_U32.
    #[test]
    fn counters_wrap_at_the_source() {
        let increment: Vec<u32> = [0, 4, 5, 6, u32::MAX].map(|old| Increment.apply32(old, 5, 0)).into();
        assert_eq!(increment, [1, 5, 0, 0, 0]);
        let decrement: Vec<u32> = [0, 1, 5, 6, u32::MAX].map(|old| Decrement.apply32(old, 5, 0)).into();
        assert_eq!(decrement, [5, 0, 4, 5, 5]);
    }

    #[test]
    fn signs_count_where_they_should() {
        assert_eq!(SignedMin.apply32(1, u32::MAX, 0), u32::MAX);
        assert_eq!(UnsignedMin.apply32(1, u32::MAX, 0), 1);
        assert_eq!(SignedMax.apply64(1, u64::MAX, 0), 1);
        assert_eq!(UnsignedMax.apply64(1, u64::MAX, 0), u64::MAX);
    }

    #[test]
    fn a_comparison_decides_about_a_swap() {
        assert_eq!(CompareSwap.apply32(3, 9, 3), 9);
        assert_eq!(CompareSwap.apply32(4, 9, 3), 4);
        assert_eq!(FloatCompareSwap.apply32((-0f32).to_bits(), 9, 0), 9);
        assert_eq!(MaskedOr.apply32(0xff, 0x0f, 0x100), 0x1f0);
    }

    #[test]
    fn sums_wrap() {
        assert_eq!(Add.apply32(u32::MAX, 2, 0), 1);
        assert_eq!(Sub.apply64(0, 1, 0), u64::MAX);
        assert_eq!(ReverseSub.apply32(3, 10, 0), 7);
        assert_eq!(FloatAdd.apply64(1.5f64.to_bits(), 2.25f64.to_bits(), 0), 3.75f64.to_bits());
    }
}
