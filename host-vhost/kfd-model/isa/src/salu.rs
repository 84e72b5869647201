//! Scalar instructions.
