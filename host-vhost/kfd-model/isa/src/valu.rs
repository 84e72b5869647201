//! Vector instructions: VOP1, VOP2, VOPC, VOP3 and VOP3P, with modifiers, SDWA and DPP.
//!
//! Each opcode has a handler, found in a table by its number; a caller may look it up once, when it decodes.
//!
//! Exactness: integer and IEEE operations give the bits that the hardware gives, in the denormal and rounding modes of
//! MODE; the approximated functions (reciprocal, square root, exponential, logarithm, sine, cosine) are computed in f64
//! and rounded, so that their last bit may differ from hardware.

mod compare;
mod convert;
mod cross;
mod directed;
mod divide;
mod float16;
mod float32;
mod float64;
pub(crate) mod half;
mod integer;
mod lane;
mod lanes;
mod nan;
mod operand;
mod packed;
mod transcendental;
mod wide;

#[cfg(test)]
mod tests;

use crate::inst::{Dst, Inst, Src};
use crate::op::{Op, ROWS};
use crate::stop::Stop;
use crate::wave::{Round, Wave};

/// What executes one opcode, in modes that [`crate::wave::Mode::is_direct`] holds for. It does not advance PC; see
/// [`execute`].
pub type Handler = fn(&mut Wave, &Inst);

const COUNT: usize = ROWS.len();

static HANDLERS: [Option<Handler>; COUNT] = handlers();

#[allow(
    clippy::indexing_slicing,
    reason = "evaluated by the compiler, which would refuse an index out of range"
)]
const fn handlers() -> [Option<Handler>; COUNT] {
    let mut handlers: [Option<Handler>; COUNT] = [None; COUNT];
    let mut number = 0;
    while number < COUNT {
        handlers[number] = find(ROWS[number].op);
        number += 1;
    }
    handlers
}

const fn find(op: Op) -> Option<Handler> {
    if let Some(handler) = integer::handler(op) {
        return Some(handler);
    }
    if let Some(handler) = wide::handler(op) {
        return Some(handler);
    }
    if let Some(handler) = float16::handler(op) {
        return Some(handler);
    }
    if let Some(handler) = float32::handler(op) {
        return Some(handler);
    }
    if let Some(handler) = float64::handler(op) {
        return Some(handler);
    }
    if let Some(handler) = compare::float(op) {
        return Some(handler);
    }
    if let Some(handler) = compare::integer(op) {
        return Some(handler);
    }
    if let Some(handler) = cross::handler(op) {
        return Some(handler);
    }
    if let Some(handler) = packed::handler(op) {
        return Some(handler);
    }
    None
}

/// The handler of a vector opcode; `None` if there is none.
#[inline(always)]
pub fn handler(op: Op) -> Option<Handler> {
    HANDLERS.get(op as usize).copied().flatten()
}

/// Executes a vector instruction on the lanes that are on. PC is the caller's business.
///
/// # Errors
///
/// If there is no handler for the opcode, or an operand comes from LDS (`src_lds_direct`).
#[inline]
pub fn execute(wave: &mut Wave, inst: &Inst) -> Result<(), Stop> {
    let Some(handler) = handler(inst.op) else { return Err(Stop::not_supported(inst.op)) };
    if matches!(inst.src, [Src::LdsDirect, ..]) {
        return Err(Stop::not_supported(inst.op));
    }
    if wave.mode.is_direct() {
        handler(wave, inst);
    } else {
        execute_indirect(wave, inst, handler);
    }
    Ok(())
}

/// In a mode with relative register numbers or with another rounding.
#[cold]
fn execute_indirect(wave: &mut Wave, inst: &Inst, handler: Handler) {
    let rounds = wave.mode.round32() != Round::NearestEven || wave.mode.round64() != Round::NearestEven;
    let handler = if rounds { directed::handler(inst.op).unwrap_or(handler) } else { handler };
    if wave.mode.gpr_index() {
        handler(wave, &indexed(wave, inst));
    } else {
        handler(wave, inst);
    }
}

/// The instruction with the vector registers that `s_set_gpr_idx_on` makes relative: M0 bits 7:0 are added to those
/// that bits 15:12 name (bit 12 `src[0]` ... 14 `src[2]`, bit 15 the destination). Registers beyond the last one read
/// register 0; writes to them are dropped.
fn indexed(wave: &Wave, inst: &Inst) -> Inst {
    let m0 = wave.m0();
    let offset = m0 as u8;
    let mut moved = *inst;
    for (number, src) in moved.src.iter_mut().take(3).enumerate() {
        if let Src::Vgpr(n) = src
            && m0 >> (12 + number) & 1 == 1
        {
            *n = n.checked_add(offset).unwrap_or(0);
        }
    }
    if let Dst::Vgpr(n) = moved.dst
        && m0 >> 15 & 1 == 1
    {
        moved.dst = n.checked_add(offset).map_or(Dst::None, Dst::Vgpr);
    }
    moved
}
