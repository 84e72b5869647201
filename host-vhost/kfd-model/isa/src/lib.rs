//! The GFX9 instruction set: [`decode()`] turns words into an [`Inst`], `Display` of an [`Inst`] is its assembly text as
//! LLVM writes it, and the modules after these execute it on a wave's state.
//!
//! The crate knows neither ioctls nor page tables: memory is reached through a trait of the caller.
//!
//! Source of opcode numbers, operand widths and text: LLVM's AMDGPU assembler, against which the tests compare every row
//! of the table; source of semantics: AMD, "Vega" 7nm Instruction Set Architecture (2020).

#![forbid(unsafe_code)]

pub mod bus;
pub mod code;
mod decode;
pub mod group;
pub mod gws;
pub mod inst;
pub mod mem;
pub mod op;
pub mod salu;
pub mod start;
pub mod stop;
#[cfg(test)]
mod testing;
pub mod valu;
pub mod wave;

pub use decode::{DecodeError, decode};
pub use inst::{Dst, FloatConst, Inst, Src};
pub use op::{Encoding, Op, Target};
