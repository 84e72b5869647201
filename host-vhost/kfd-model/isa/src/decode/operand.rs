//! The operand codes that all encodings share.

use super::{DecodeError, Raw};
use crate::inst::{Dst, EXEC, FLAT_SCRATCH, FloatConst, M0, Src, TTMP, VCC, XNACK_MASK};
use crate::op::{Kind, Op};

/// The code of a literal.
pub(super) const LITERAL: u32 = 255;
/// The code that says that the second word is SDWA.
pub(super) const SDWA: u32 = 249;
/// The code that says that the second word is DPP.
pub(super) const DPP: u32 = 250;

/// The last of the numbered scalar registers.
const LAST_SGPR: u8 = 101;
/// The last trap temporary register.
const LAST_TTMP: u8 = TTMP + 15;

/// Whether `count` scalar registers from `first` on may be an operand: they must be of one group and aligned.
const fn is_scalar_range(first: u8, count: u8) -> bool {
    // Wide operands are aligned to four registers at most.
    let alignment = if count > 4 { 4 } else { count };
    if count == 0 || !first.is_multiple_of(alignment) {
        return false;
    }
    let Some(last) = first.checked_add(count - 1) else { return false };
    match first {
        0..=LAST_SGPR => last <= LAST_SGPR,
        FLAT_SCRATCH..XNACK_MASK => last < XNACK_MASK,
        XNACK_MASK..VCC => last < VCC,
        VCC..TTMP => last < TTMP,
        TTMP..=LAST_TTMP => last <= LAST_TTMP,
        M0 => count == 1,
        EXEC..=127 => last <= 127,
        _ => false,
    }
}

/// The inline float with a code.
const fn float(code: u32) -> Option<FloatConst> {
    Some(match code {
        240 => FloatConst::Half,
        241 => FloatConst::NegHalf,
        242 => FloatConst::One,
        243 => FloatConst::NegOne,
        244 => FloatConst::Two,
        245 => FloatConst::NegTwo,
        246 => FloatConst::Four,
        247 => FloatConst::NegFour,
        248 => FloatConst::InvTwoPi,
        _ => return None,
    })
}

impl Raw {
    /// A source in a field of 8 bits, or of 9 with the vector registers from 256 on.
    pub(super) fn source(
        &self,
        op: Op,
        field: &'static str,
        code: u32,
        kind: Kind,
    ) -> Result<Src, DecodeError> {
        let found = match code {
            0..=127 => self.scalar(op, field, code, kind).map(Src::Sgpr)?,
            128..=192 => Src::Int((code - 128) as i8),
            193..=208 => Src::Int(-((code - 192) as i8)),
            235 => Src::SharedBase,
            236 => Src::SharedLimit,
            237 => Src::PrivateBase,
            238 => Src::PrivateLimit,
            239 => Src::PopsExitingWaveId,
            251 => Src::Vccz,
            252 => Src::Execz,
            253 => Src::Scc,
            254 if kind.registers() == 1 => Src::LdsDirect,
            LITERAL => Src::Literal(self.second()?),
            256..=511 => self.vector(op, field, code - 256, kind).map(Src::Vgpr)?,
            _ => match float(code) {
                Some(value) => Src::Float(value),
                None => return Err(self.field(op, field, code)),
            },
        };
        // Masks are registers or constants; wider operands are registers.
        let is_register = matches!(found, Src::Sgpr(_) | Src::Vgpr(_));
        if kind.registers() > 2 && !is_register {
            return Err(self.field(op, field, code));
        }
        Ok(found)
    }

    /// A scalar register in a field of 7 or 8 bits.
    pub(super) fn scalar(
        &self,
        op: Op,
        field: &'static str,
        code: u32,
        kind: Kind,
    ) -> Result<u8, DecodeError> {
        match u8::try_from(code) {
            Ok(first) if is_scalar_range(first, kind.registers()) => Ok(first),
            _ => Err(self.field(op, field, code)),
        }
    }

    /// The same as a destination.
    pub(super) fn scalar_dst(
        &self,
        op: Op,
        field: &'static str,
        code: u32,
        kind: Kind,
    ) -> Result<Dst, DecodeError> {
        self.scalar(op, field, code, kind).map(Dst::Sgpr)
    }

    /// A vector register in a field of 8 bits.
    pub(super) fn vector(
        &self,
        op: Op,
        field: &'static str,
        code: u32,
        kind: Kind,
    ) -> Result<u8, DecodeError> {
        match u8::try_from(code) {
            // The last one has to exist too.
            Ok(first) if first.checked_add(kind.registers().saturating_sub(1)).is_some() => Ok(first),
            _ => Err(self.field(op, field, code)),
        }
    }

    /// The same as a destination.
    pub(super) fn vector_dst(
        &self,
        op: Op,
        field: &'static str,
        code: u32,
        kind: Kind,
    ) -> Result<Dst, DecodeError> {
        self.vector(op, field, code, kind).map(Dst::Vgpr)
    }
}
