//! SOP1, SOP2, SOPC, SOPK, SOPP.

use super::operand::LITERAL;
use super::{DecodeError, Raw, bits, empty, reserved};
use crate::inst::{Inst, Src};
use crate::op::{Encoding, Kind, Op, Traits};

/// A source of an instruction that may have a literal.
fn source(raw: &Raw, inst: &mut Inst, field: &'static str, code: u32, n: usize) -> Result<Src, DecodeError> {
    let kind = inst.op.src(n);
    if code == LITERAL {
        inst.words = 2;
    }
    match raw.source(inst.op, field, code, kind)? {
        // It exists for vector instructions only.
        Src::LdsDirect => Err(raw.field(inst.op, field, code)),
        found => Ok(found),
    }
}

pub(super) fn sop1(raw: &Raw) -> Result<Inst, DecodeError> {
    let op = raw.op(Encoding::Sop1, bits(raw.word, 8, 8))?;
    let mut inst = empty(op, Encoding::Sop1, 1);
    let mut used = 0xff80_ff00;
    if op.dst() != Kind::None {
        used |= 0x7f << 16;
        inst.dst = raw.scalar_dst(op, "SDST", bits(raw.word, 16, 7), op.dst())?;
    }
    if op.src(0) != Kind::None {
        used |= 0xff;
        let code = bits(raw.word, 0, 8);
        inst.src[0] = source(raw, &mut inst, "SSRC0", code, 0)?;
        // These take registers only.
        if matches!(op, Op::SMovrelsB32 | Op::SMovrelsB64 | Op::SRfeB64)
            && !matches!(inst.src[0], Src::Sgpr(_))
        {
            return Err(raw.field(op, "SSRC0", code));
        }
    }
    raw.only(op, used)?;
    Ok(inst)
}

pub(super) fn sop2(raw: &Raw) -> Result<Inst, DecodeError> {
    let op = raw.op(Encoding::Sop2, bits(raw.word, 23, 7))?;
    let mut inst = empty(op, Encoding::Sop2, 1);
    let mut used = 0xff80_ffff;
    if op.dst() != Kind::None {
        used |= 0x7f << 16;
        inst.dst = raw.scalar_dst(op, "SDST", bits(raw.word, 16, 7), op.dst())?;
    }
    inst.src[0] = source(raw, &mut inst, "SSRC0", bits(raw.word, 0, 8), 0)?;
    inst.src[1] = source(raw, &mut inst, "SSRC1", bits(raw.word, 8, 8), 1)?;
    raw.only(op, used)?;
    Ok(inst)
}

pub(super) fn sopc(raw: &Raw) -> Result<Inst, DecodeError> {
    let op = raw.op(Encoding::Sopc, bits(raw.word, 16, 7))?;
    let mut inst = empty(op, Encoding::Sopc, 1);
    inst.src[0] = source(raw, &mut inst, "SSRC0", bits(raw.word, 0, 8), 0)?;
    let second = bits(raw.word, 8, 8);
    if op == Op::SSetGprIdxOn {
        // The field is the mode itself.
        if second > 0xf {
            return Err(raw.field(op, "SSRC1", second));
        }
        inst.imm = second as i32;
    } else {
        inst.src[1] = source(raw, &mut inst, "SSRC1", second, 1)?;
    }
    Ok(inst)
}

pub(super) fn sopk(raw: &Raw) -> Result<Inst, DecodeError> {
    let op = raw.op(Encoding::Sopk, bits(raw.word, 23, 5))?;
    let mut inst = empty(op, Encoding::Sopk, 1);
    inst.imm = i32::from(raw.word as u16 as i16);
    let register = bits(raw.word, 16, 7);
    if op == Op::SSetregImm32B32 {
        inst.words = 2;
        inst.src[0] = Src::Literal(raw.second()?);
        raw.only(op, 0xff80_ffff)?;
        return Ok(inst);
    }
    if op.dst() != Kind::None {
        inst.dst = raw.scalar_dst(op, "SDST", register, op.dst())?;
    }
    if op.src(0) != Kind::None {
        inst.src[0] = Src::Sgpr(raw.scalar(op, "SDST", register, op.src(0))?);
    }
    Ok(inst)
}

pub(super) fn sopp(raw: &Raw) -> Result<Inst, DecodeError> {
    let op = raw.op(Encoding::Sopp, bits(raw.word, 16, 7))?;
    let mut inst = empty(op, Encoding::Sopp, 1);
    if op.has(Traits::NO_IMM) {
        reserved(op, 0, raw.word, 0xffff_0000)?;
    }
    inst.imm = i32::from(raw.word as u16 as i16);
    Ok(inst)
}
