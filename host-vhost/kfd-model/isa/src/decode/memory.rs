//! SMEM, DS, FLAT, GLOBAL, SCRATCH, MUBUF.

use super::{DecodeError, Raw, bit, bits, byte, empty, reserved};
use crate::inst::{Inst, MemFlags, Src};
use crate::op::{Encoding, Kind, Op, Traits};

/// The value of SADDR that says that there is none.
const NO_SADDR: u32 = 0x7f;

/// The flags whose bits are set in the word.
fn flags(word: u32, places: &[(u32, MemFlags)]) -> MemFlags {
    places.iter().filter(|(number, _)| bit(word, *number)).map(|(_, flag)| *flag).collect()
}

/// Whether it returns a value: loads always, atomics with GLC.
fn returns(op: Op, flags: MemFlags) -> bool {
    op.dst() != Kind::None && (!op.has(Traits::ATOMIC) || flags.contains(MemFlags::GLC))
}

pub(super) fn smem(raw: &Raw) -> Result<Inst, DecodeError> {
    let (word, second) = (raw.word, raw.second()?);
    let op = raw.op(Encoding::Smem, bits(word, 18, 8))?;
    let mut inst = empty(op, Encoding::Smem, 2);
    let (mut used, mut used_second) = (0xfffc_0000, 0);
    let sdata = bits(word, 6, 7);
    if op.src(0) != Kind::None {
        used |= 0x3f | 1 << 17 | 1 << 14;
        inst.src[0] = Src::Sgpr(raw.scalar(op, "SBASE", bits(word, 0, 6) << 1, op.src(0))?);
        // IMM: an offset in the word. SOFFSET_EN: a register besides. Neither: a register in the offset's place.
        match (bit(word, 17), bit(word, 14)) {
            (true, with_register) => {
                used_second |= 0x1f_ffff;
                // 21 bits with sign.
                inst.imm = (second << 11) as i32 >> 11;
                if with_register {
                    used_second |= NO_SADDR << 25;
                    inst.src[1] = Src::Sgpr(raw.scalar(op, "SOFFSET", bits(second, 25, 7), Kind::I32)?);
                }
            }
            (false, true) => {
                used_second |= NO_SADDR << 25;
                inst.src[1] = Src::Sgpr(raw.scalar(op, "SOFFSET", bits(second, 25, 7), Kind::I32)?);
            }
            (false, false) => {
                used_second |= 0x7f;
                inst.src[1] = Src::Sgpr(raw.scalar(op, "OFFSET", bits(second, 0, 7), Kind::I32)?);
            }
        }
    }
    if op.src(2) != Kind::None {
        used |= 0x7f << 6 | 1 << 16;
        inst.src[2] = Src::Sgpr(raw.scalar(op, "SDATA", sdata, op.src(2))?);
    } else if op.dst() != Kind::None {
        used |= 0x7f << 6;
        inst.dst = raw.scalar_dst(op, "SDATA", sdata, op.dst())?;
        if op.src(0) != Kind::None {
            used |= 1 << 16;
        }
    } else if matches!(op, Op::SAtcProbe | Op::SAtcProbeBuffer) {
        used |= 0x7f << 6;
        inst.src[2] = Src::Int(sdata as i8);
    }
    inst.flags = flags(word, &[(16, MemFlags::GLC), (15, MemFlags::NV)]);
    if op.src(0) != Kind::None {
        used |= 1 << 15;
    }
    if op.has(Traits::ATOMIC) && returns(op, inst.flags) {
        inst.dst = raw.scalar_dst(op, "SDATA", sdata, op.dst())?;
    }
    raw.only(op, used)?;
    reserved(op, 1, second, used_second)?;
    Ok(inst)
}

pub(super) fn ds(raw: &Raw) -> Result<Inst, DecodeError> {
    let (word, second) = (raw.word, raw.second()?);
    let op = raw.op(Encoding::Ds, bits(word, 17, 8))?;
    let mut inst = empty(op, Encoding::Ds, 2);
    let (mut used, mut used_second) = (0xfdfe_0000, 0);
    if op != Op::DsNop {
        used |= 0xffff;
        inst.imm = bits(word, 0, 16) as i32;
    }
    if !op.has(Traits::NO_GDS) {
        used |= 1 << 16;
    }
    inst.flags = flags(word, &[(16, MemFlags::GDS)]);
    if op.has(Traits::GDS_ONLY) && !inst.flags.contains(MemFlags::GDS) {
        return Err(raw.field(op, "GDS", 0));
    }
    for (n, field) in ["ADDR", "DATA0", "DATA1"].into_iter().enumerate() {
        let kind = op.src(n);
        let low = n as u32 * 8;
        if kind != Kind::None
            && let Some(source) = inst.src.get_mut(n)
        {
            used_second |= 0xff << low;
            *source = Src::Vgpr(raw.vector(op, field, bits(second, low, 8), kind)?);
        }
    }
    if op.dst() != Kind::None {
        used_second |= 0xff << 24;
        inst.dst = raw.vector_dst(op, "VDST", bits(second, 24, 8), op.dst())?;
    }
    raw.only(op, used)?;
    reserved(op, 1, second, used_second)?;
    Ok(inst)
}

pub(super) fn flat(raw: &Raw) -> Result<Inst, DecodeError> {
    let (word, second) = (raw.word, raw.second()?);
    let encoding = match bits(word, 14, 2) {
        0 => Encoding::Flat,
        1 => Encoding::Scratch,
        2 => Encoding::Global,
        _ => return Err(raw.unknown(Encoding::Flat, bits(word, 18, 7) as u16)),
    };
    let op = raw.op(encoding, bits(word, 18, 7))?;
    if encoding == Encoding::Scratch && !op.has(Traits::SCRATCH) {
        return Err(raw.unknown(encoding, op.row().code));
    }
    let mut inst = empty(op, encoding, 2);
    let mut used_second = 0x0080_0000;
    inst.flags =
        flags(word, &[(16, MemFlags::GLC), (17, MemFlags::SLC)]) | flags(second, &[(23, MemFlags::NV)]);
    let saddr = bits(second, 16, 7);
    let used = if encoding == Encoding::Flat {
        inst.imm = bits(word, 0, 12) as i32;
        0xfdff_cfff
    } else {
        // 13 bits with sign.
        inst.imm = (word << 19) as i32 >> 19;
        used_second |= NO_SADDR << 16;
        0xfdff_dfff
    };
    let has_saddr = encoding != Encoding::Flat && saddr != NO_SADDR;
    if has_saddr {
        let kind = if encoding == Encoding::Global { Kind::I64 } else { Kind::I32 };
        inst.src[2] = Src::Sgpr(raw.scalar(op, "SADDR", saddr, kind)?);
    }
    // With SADDR, the global address in it is offset by 32 bits of ADDR, and the scratch address comes from it alone.
    if !(has_saddr && encoding == Encoding::Scratch) {
        used_second |= 0xff;
        let kind = if has_saddr || encoding == Encoding::Scratch { Kind::I32 } else { Kind::I64 };
        inst.src[0] = Src::Vgpr(raw.vector(op, "ADDR", bits(second, 0, 8), kind)?);
    }
    if op.src(1) != Kind::None {
        used_second |= 0xff << 8;
        inst.src[1] = Src::Vgpr(raw.vector(op, "DATA", bits(second, 8, 8), op.src(1))?);
    }
    if returns(op, inst.flags) {
        used_second |= 0xff << 24;
        inst.dst = raw.vector_dst(op, "VDST", bits(second, 24, 8), op.dst())?;
    }
    raw.only(op, used)?;
    reserved(op, 1, second, used_second)?;
    Ok(inst)
}

pub(super) fn mubuf(raw: &Raw) -> Result<Inst, DecodeError> {
    let (word, second) = (raw.word, raw.second()?);
    let op = raw.op(Encoding::Mubuf, bits(word, 18, 7))?;
    let mut inst = empty(op, Encoding::Mubuf, 2);
    if op.row().src.is_empty() {
        // Cache control.
        raw.only(op, 0xfdfc_0000)?;
        reserved(op, 1, second, 0)?;
        return Ok(inst);
    }
    let mut used = 0xfdfc_0fff | 1 << 14 | 1 << 17;
    let mut used_second = 0xff1f_0000;
    inst.imm = bits(word, 0, 12) as i32;
    inst.flags = flags(
        word,
        &[
            (12, MemFlags::OFFEN),
            (13, MemFlags::IDXEN),
            (14, MemFlags::GLC),
            (16, MemFlags::LDS),
            (17, MemFlags::SLC),
        ],
    ) | flags(second, &[(23, MemFlags::TFE)]);
    if op.src(0) != Kind::None {
        used |= 3 << 12;
        let kind = match (inst.flags.contains(MemFlags::OFFEN), inst.flags.contains(MemFlags::IDXEN)) {
            (true, true) => Kind::I64,
            (false, false) => Kind::None,
            _ => Kind::I32,
        };
        if kind != Kind::None {
            used_second |= 0xff;
            inst.src[0] = Src::Vgpr(raw.vector(op, "VADDR", bits(second, 0, 8), kind)?);
        }
    }
    if op.has(Traits::LDS) {
        used |= 1 << 16;
    }
    if op == Op::BufferStoreLdsDword && !inst.flags.contains(MemFlags::LDS) {
        return Err(raw.field(op, "LDS", 0));
    }
    let to_lds = inst.flags.contains(MemFlags::LDS);
    // Only loads have a result that can fail.
    if !to_lds && op.src(1) == Kind::None && op.dst() != Kind::None {
        used_second |= 1 << 23;
    }
    let vdata = bits(second, 8, 8);
    if op.src(1) != Kind::None {
        used_second |= 0xff << 8;
        inst.src[1] = Src::Vgpr(raw.vector(op, "VDATA", vdata, op.src(1))?);
    }
    if returns(op, inst.flags) {
        used_second |= 0xff << 8;
        inst.dst = raw.vector_dst(op, "VDATA", vdata, op.dst())?;
        // The register after the data says whether it failed.
        if inst.flags.contains(MemFlags::TFE) && vdata + u32::from(op.dst().registers()) > 255 {
            return Err(raw.field(op, "VDATA", vdata));
        }
    }
    inst.src[2] = match raw.source(op, "SOFFSET", bits(second, 24, 8), Kind::I32)? {
        Src::Literal(_) | Src::LdsDirect => return Err(raw.field(op, "SOFFSET", bits(second, 24, 8))),
        found => found,
    };
    inst.src[3] = Src::Sgpr(raw.scalar(op, "SRSRC", u32::from(byte(second, 16, 5)) << 2, Kind::B128)?);
    raw.only(op, used)?;
    reserved(op, 1, second, used_second)?;
    Ok(inst)
}
