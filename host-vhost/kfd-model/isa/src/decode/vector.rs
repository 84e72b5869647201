//! VOP1, VOP2, VOPC, with SDWA and DPP, VOP3 and VOP3P.

use super::operand::{DPP, LITERAL, SDWA};
use super::{DecodeError, Raw, bit, bits, byte, empty, reserved};
use crate::inst::{Dpp, DppCtrl, Dst, Inst, Modifiers, Omod, Sdwa, Sel, Src, SubWord, Unused, VCC};
use crate::op::{Encoding, Kind, Op, Traits};

pub(super) fn vop1(raw: &Raw) -> Result<Inst, DecodeError> {
    let op = raw.op(Encoding::Vop1, bits(raw.word, 9, 8))?;
    short(raw, op, Encoding::Vop1)
}

pub(super) fn vop2(raw: &Raw) -> Result<Inst, DecodeError> {
    let op = raw.op(Encoding::Vop2, bits(raw.word, 25, 6))?;
    short(raw, op, Encoding::Vop2)
}

pub(super) fn vopc(raw: &Raw) -> Result<Inst, DecodeError> {
    let op = raw.op(Encoding::Vopc, bits(raw.word, 17, 8))?;
    short(raw, op, Encoding::Vopc)
}

/// VOP1, VOP2 and VOPC: the same operands at the same places, as far as they have them.
fn short(raw: &Raw, op: Op, encoding: Encoding) -> Result<Inst, DecodeError> {
    let mut inst = empty(op, encoding, 1);
    let word = raw.word;
    // The opcode and encoding bits.
    let mut used = match encoding {
        Encoding::Vop1 => 0xfe01_fe00,
        _ => 0xfe00_0000,
    };
    if encoding == Encoding::Vopc {
        used |= 0x01fe_0000;
        inst.dst = Dst::Sgpr(VCC);
    } else if op.has(Traits::SGPR_DST) {
        used |= 0x01fe_0000;
        inst.dst = raw.scalar_dst(op, "VDST", bits(word, 17, 8), op.dst())?;
    } else if op.dst() != Kind::None {
        used |= 0x01fe_0000;
        inst.dst = raw.vector_dst(op, "VDST", bits(word, 17, 8), op.dst())?;
    }
    let code = bits(word, 0, 9);
    match code {
        _ if op.src(0) == Kind::None => {}
        SDWA if op.has(Traits::SDWA) => {
            used |= 0x1ff;
            sdwa(raw, &mut inst)?;
        }
        DPP if op.has(Traits::DPP) => {
            used |= 0x1ff;
            dpp(raw, &mut inst)?;
        }
        _ => {
            used |= 0x1ff;
            if code == LITERAL {
                inst.words = 2;
            }
            inst.src[0] = raw.source(op, "SRC0", code, op.src(0))?;
        }
    }
    // What reads or exchanges whole registers wants registers.
    if matches!(op, Op::VReadfirstlaneB32 | Op::VSwapB32) && !matches!(inst.src[0], Src::Vgpr(_)) {
        return Err(raw.field(op, "SRC0", code));
    }
    if encoding != Encoding::Vop1 {
        used |= 0x1fe00;
        if inst.src[1] == Src::None {
            let place = if op.has(Traits::LITERAL_B) { 2 } else { 1 };
            let register = Src::Vgpr(raw.vector(op, "VSRC1", bits(word, 9, 8), op.src(place))?);
            if place == 2 {
                inst.src[2] = register;
            } else {
                inst.src[1] = register;
            }
        }
    }
    if op.has(Traits::LITERAL_B) {
        inst.words = 2;
        inst.src[1] = Src::Literal(raw.second()?);
    }
    if op.has(Traits::LITERAL_C) {
        inst.words = 2;
        inst.src[2] = Src::Literal(raw.second()?);
    }
    if op.has(Traits::CARRY_OUT) {
        inst.sdst = Dst::Sgpr(VCC);
    }
    if op.has(Traits::CARRY_IN) {
        inst.src[2] = Src::Sgpr(VCC);
    }
    accumulate(&mut inst);
    raw.only(op, used)?;
    Ok(inst)
}

/// The destination as third source, where it is one.
fn accumulate(inst: &mut Inst) {
    if let Dst::Vgpr(register) = inst.dst
        && inst.op.has(Traits::ACCUMULATE)
    {
        inst.src[2] = Src::Vgpr(register);
    }
}

/// A register or inline constant of SDWA: 8 bits and one that says that it is no vector register.
fn sdwa_source(raw: &Raw, op: Op, code: u32, is_scalar: bool, n: usize) -> Result<Src, DecodeError> {
    let field = if n == 0 { "SDWA SRC0" } else { "VSRC1" };
    if !is_scalar {
        return raw.source(op, field, code + 256, op.src(n));
    }
    match raw.source(op, field, code, op.src(n))? {
        Src::Literal(_) | Src::LdsDirect => Err(raw.field(op, field, code)),
        found => Ok(found),
    }
}

fn sel(raw: &Raw, op: Op, field: &'static str, code: u32) -> Result<Sel, DecodeError> {
    Ok(match code {
        0 => Sel::Byte0,
        1 => Sel::Byte1,
        2 => Sel::Byte2,
        3 => Sel::Byte3,
        4 => Sel::Word0,
        5 => Sel::Word1,
        6 => Sel::Dword,
        _ => return Err(raw.field(op, field, code)),
    })
}

const fn omod(code: u32) -> Omod {
    match code {
        1 => Omod::Mul2,
        2 => Omod::Mul4,
        3 => Omod::Div2,
        _ => Omod::None,
    }
}

fn sdwa(raw: &Raw, inst: &mut Inst) -> Result<(), DecodeError> {
    let (op, word) = (inst.op, raw.second()?);
    let mut sub = Sdwa::default();
    let mut used = 0xff;
    inst.words = 2;
    if inst.encoding == Encoding::Vopc {
        used |= 0xff00;
        if bit(word, 15) {
            inst.dst = raw.scalar_dst(op, "SDWA SDST", bits(word, 8, 7), Kind::Mask)?;
        } else if bits(word, 8, 7) != 0 {
            return Err(raw.field(op, "SDWA SDST", bits(word, 8, 7)));
        }
    } else {
        used |= 0x3f00;
        sub.dst_sel = sel(raw, op, "DST_SEL", bits(word, 8, 3))?;
        sub.dst_unused = match bits(word, 11, 2) {
            0 => Unused::Pad,
            1 => Unused::Sext,
            2 => Unused::Preserve,
            code => return Err(raw.field(op, "DST_UNUSED", code)),
        };
        inst.modifiers.clamp = bit(word, 13);
        if op.has(Traits::SDWA_OMOD) {
            used |= 0xc000;
            inst.modifiers.omod = omod(bits(word, 14, 2));
        }
    }
    let count = if inst.encoding == Encoding::Vop1 { 1 } else { 2 };
    let codes = [(bits(word, 0, 8), 23), (bits(raw.word, 9, 8), 31)];
    for (n, (code, is_scalar)) in codes.into_iter().enumerate().take(count) {
        let low = 16 + 8 * n as u32;
        used |= (1 << is_scalar) | (7 << low);
        let source = sdwa_source(raw, op, code, bit(word, is_scalar), n)?;
        let part = sel(raw, op, if n == 0 { "SRC0_SEL" } else { "SRC1_SEL" }, bits(word, low, 3))?;
        if let (Some(to), Some(parts)) = (inst.src.get_mut(n), sub.src_sel.get_mut(n)) {
            *to = source;
            *parts = part;
        }
        if op.src(n).is_float() {
            used |= 3 << (low + 4);
            inst.modifiers.neg |= byte(word, low + 4, 1) << n;
            inst.modifiers.abs |= byte(word, low + 5, 1) << n;
        } else {
            used |= 1 << (low + 3);
            sub.sext |= byte(word, low + 3, 1) << n;
        }
    }
    inst.sub = SubWord::Sdwa(sub);
    reserved(op, 1, word, used)
}

fn dpp(raw: &Raw, inst: &mut Inst) -> Result<(), DecodeError> {
    let (op, word) = (inst.op, raw.second()?);
    inst.words = 2;
    inst.src[0] = Src::Vgpr(raw.vector(op, "DPP SRC0", bits(word, 0, 8), op.src(0))?);
    let code = bits(word, 8, 9);
    let ctrl = match (code, byte(word, 8, 4)) {
        (0..=0xff, _) => DppCtrl::QuadPerm(code as u8),
        (0x101..=0x10f, n) => DppCtrl::RowShl(n),
        (0x111..=0x11f, n) => DppCtrl::RowShr(n),
        (0x121..=0x12f, n) => DppCtrl::RowRor(n),
        (0x130, _) => DppCtrl::WaveShl1,
        (0x134, _) => DppCtrl::WaveRol1,
        (0x138, _) => DppCtrl::WaveShr1,
        (0x13c, _) => DppCtrl::WaveRor1,
        (0x140, _) => DppCtrl::RowMirror,
        (0x141, _) => DppCtrl::RowHalfMirror,
        (0x142, _) => DppCtrl::RowBcast15,
        (0x143, _) => DppCtrl::RowBcast31,
        _ => return Err(raw.field(op, "DPP_CTRL", code)),
    };
    inst.sub = SubWord::Dpp(Dpp {
        ctrl,
        row_mask: byte(word, 28, 4),
        bank_mask: byte(word, 24, 4),
        bound_ctrl: bit(word, 19),
    });
    let mut used = 0xff09_ffff;
    let count = if inst.encoding == Encoding::Vop1 { 1 } else { 2 };
    for n in 0..count {
        if op.src(n).is_float() {
            let low = 20 + 2 * n as u32;
            used |= 3 << low;
            inst.modifiers.neg |= byte(word, low, 1) << n;
            inst.modifiers.abs |= byte(word, low + 1, 1) << n;
        }
    }
    reserved(op, 1, word, used)
}

/// The opcode of a VOP3 instruction: one of its own, or one of VOPC, VOP2 and VOP1.
fn vop3_op(raw: &Raw) -> Result<Op, DecodeError> {
    let code = bits(raw.word, 16, 10);
    let unknown = raw.unknown(Encoding::Vop3, code as u16);
    let short = match code {
        0..=0xff => (Encoding::Vopc, code),
        0x100..=0x13f => (Encoding::Vop2, code - 0x100),
        0x140..=0x1bf => (Encoding::Vop1, code - 0x140),
        _ => return raw.op(Encoding::Vop3, code),
    };
    match raw.op(short.0, short.1) {
        Ok(op) if op.has(Traits::E64) => Ok(op),
        _ => Err(unknown),
    }
}

/// The mask of the sources that have `abs` and `neg`.
fn float_sources(op: Op) -> u8 {
    if op.has(Traits::NEG_ABS) {
        return 3;
    }
    (0..field_count(op)).filter(|n| op.src(*n).is_float()).fold(0, |mask, n| mask | 1 << n)
}

/// How many sources are in fields of a VOP3 instruction; an accumulator is not.
fn field_count(op: Op) -> usize {
    if op.has(Traits::ACCUMULATE) { 2 } else { op.row().src.len() }
}

/// The sources of VOP3 and VOP3P.
fn long_sources(raw: &Raw, inst: &mut Inst, second: u32) -> Result<u32, DecodeError> {
    let op = inst.op;
    let mut used = 0;
    let fields = ["SRC0", "SRC1", "SRC2"].into_iter().enumerate().take(field_count(op));
    for (n, field) in fields {
        let low = 9 * n as u32;
        let code = bits(second, low, 9);
        // There is no room for a literal.
        if code == LITERAL {
            return Err(raw.field(op, field, code));
        }
        let found = raw.source(op, field, code, op.src(n))?;
        let is_allowed = match op {
            Op::VReadlaneB32 if n == 0 => matches!(found, Src::Vgpr(_)),
            Op::VReadlaneB32 | Op::VWritelaneB32 => !matches!(found, Src::Vgpr(_) | Src::LdsDirect),
            _ if op.src(n) == Kind::Mask => matches!(found, Src::Sgpr(_)),
            _ => n == 0 || found != Src::LdsDirect,
        };
        if !is_allowed {
            return Err(raw.field(op, field, code));
        }
        if let Some(to) = inst.src.get_mut(n) {
            *to = found;
            used |= 0x1ff << low;
        }
    }
    Ok(used)
}

pub(super) fn vop3(raw: &Raw) -> Result<Inst, DecodeError> {
    let (word, second) = (raw.word, raw.second()?);
    let op = vop3_op(raw)?;
    let mut inst = empty(op, Encoding::Vop3, 2);
    let mut used = 0xffff_0000;
    if op.has(Traits::SGPR_DST) || op.dst() == Kind::Mask {
        used |= 0xff;
        inst.dst = raw.scalar_dst(op, "VDST", bits(word, 0, 8), op.dst())?;
    } else if op.dst() != Kind::None {
        used |= 0xff;
        inst.dst = raw.vector_dst(op, "VDST", bits(word, 0, 8), op.dst())?;
    }
    let mut used_second = long_sources(raw, &mut inst, second)?;
    let floats = float_sources(op);
    inst.modifiers = Modifiers { neg: byte(second, 29, 3), ..Modifiers::NONE };
    used_second |= u32::from(floats) << 29;
    if op.has(Traits::CARRY_OUT) {
        used |= 0x7f00;
        inst.sdst = raw.scalar_dst(op, "SDST", bits(word, 8, 7), Kind::Mask)?;
    } else {
        inst.modifiers.abs = byte(word, 8, 3);
        used |= u32::from(floats) << 8;
        if op.has(Traits::OP_SEL) {
            inst.modifiers.op_sel = byte(word, 11, 4);
            let sources = (1 << field_count(op)) - 1;
            used |= (8 | sources) << 11;
        }
    }
    if op.has(Traits::CLAMP) {
        used |= 1 << 15;
        inst.modifiers.clamp = bit(word, 15);
    }
    if op.has(Traits::OMOD) {
        used_second |= 3 << 27;
        inst.modifiers.omod = omod(bits(second, 27, 2));
    }
    accumulate(&mut inst);
    raw.only(op, used)?;
    reserved(op, 1, second, used_second)?;
    Ok(inst)
}

pub(super) fn vop3p(raw: &Raw) -> Result<Inst, DecodeError> {
    let (word, second) = (raw.word, raw.second()?);
    let op = raw.op(Encoding::Vop3p, bits(word, 16, 7))?;
    let mut inst = empty(op, Encoding::Vop3p, 2);
    inst.dst = raw.vector_dst(op, "VDST", bits(word, 0, 8), op.dst())?;
    let mut used_second = long_sources(raw, &mut inst, second)? | 3 << 27;
    let floats = float_sources(op);
    let count = field_count(op);
    let sources = (1_u8 << count) - 1;
    inst.modifiers = Modifiers {
        neg: byte(second, 29, 3),
        op_sel: byte(word, 11, 3),
        // The third bit of OP_SEL_HI stands in the first word, also where there is no third source.
        op_sel_hi: (byte(second, 27, 2) | byte(word, 14, 1) << 2) & sources,
        clamp: bit(word, 15),
        ..Modifiers::NONE
    };
    if op.src(0) == Kind::Mix {
        inst.modifiers.abs = byte(word, 8, 3);
    } else {
        inst.modifiers.neg_hi = byte(word, 8, 3);
    }
    let used = 0xffff_c0ff | u32::from(floats) << 8 | u32::from(sources) << 11;
    used_second |= u32::from(floats) << 29;
    raw.only(op, used)?;
    reserved(op, 1, second, used_second)?;
    Ok(inst)
}
