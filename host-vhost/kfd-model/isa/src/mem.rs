//! Memory instructions and the memory that they reach.
//!
//! Everything is done in order, at once: there is nothing that `s_waitcnt` would wait for. A lane that is off touches
//! nothing.

pub mod atomic;
mod buffer;
mod ds;
mod flat;
mod format;
pub mod lds;
mod permute;
pub mod rows;
mod smem;
mod vector;

use crate::bus::Bus;
use crate::inst::Inst;
use crate::op::Encoding;
use crate::stop::Stop;
use crate::wave::Wave;

use lds::Lds;

/// Executes a SMEM, FLAT, GLOBAL, SCRATCH, DS or MUBUF instruction.
///
/// # Errors
/// The fault of the first lane that has one; what lanes before it did stays done.
#[inline]
pub fn execute(wave: &mut Wave, inst: &Inst, lds: &mut Lds, bus: &mut impl Bus) -> Result<(), Stop> {
    match inst.encoding {
        Encoding::Smem => smem::execute(wave, inst, bus),
        Encoding::Flat | Encoding::Global | Encoding::Scratch => flat::execute(wave, inst, lds, bus),
        Encoding::Ds => ds::execute(wave, inst, lds, bus),
        Encoding::Mubuf => buffer::execute(wave, inst, bus),
        _ => Err(Stop::Illegal),
    }
}

#[cfg(test)]
mod tests;
