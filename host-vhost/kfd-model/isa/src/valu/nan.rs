//! Which NaN an operation results in. Rust leaves that open (`f32`, "NaN bit patterns"), and compilers do choose differently for each
//! way of compiling an operation; here it is always the first operand that is one, made quiet, and if none is, the one that
//! V_DIV_FIXUP gives for invalid operations.

use super::divide::{NAN32, NAN64, quiet32, quiet64};

/// Numbers whose NaNs can be settled.
pub(super) trait Settle: Copy {
    /// The result of an operation on `a` and `b`.
    fn settle2(self, a: Self, b: Self) -> Self;

    /// The result of an operation on `a`, `b` and `c`.
    fn settle3(self, a: Self, b: Self, c: Self) -> Self;
}

macro_rules! settle {
    ($float:ty, $nan:ident, $quiet:ident) => {
        impl Settle for $float {
            #[inline(always)]
            fn settle2(self, a: Self, b: Self) -> Self {
                let nan = if b.is_nan() { $quiet(b) } else { Self::from_bits($nan) };
                let nan = if a.is_nan() { $quiet(a) } else { nan };
                if self.is_nan() { nan } else { self }
            }

            #[inline(always)]
            fn settle3(self, a: Self, b: Self, c: Self) -> Self {
                let nan = if c.is_nan() { $quiet(c) } else { Self::from_bits($nan) };
                let nan = if b.is_nan() { $quiet(b) } else { nan };
                let nan = if a.is_nan() { $quiet(a) } else { nan };
                if self.is_nan() { nan } else { self }
            }
        }
    };
}

settle!(f32, NAN32, quiet32);
settle!(f64, NAN64, quiet64);
