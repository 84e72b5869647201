//! Vector instructions.
