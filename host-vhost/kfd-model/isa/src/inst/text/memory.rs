//! SMEM, DS, FLAT, GLOBAL, SCRATCH, MUBUF.

use std::fmt::{Display, Formatter, Result};

use super::Operands;
use crate::inst::{Inst, MemFlags, Src};
use crate::op::{Encoding, Kind, Op, Traits};

/// Writes the names of the flags that are set, in this order.
fn flags(inst: &Inst, f: &mut Formatter<'_>, names: &[(MemFlags, &str)]) -> Result {
    for (flag, name) in names {
        if inst.flags.contains(*flag) {
            write!(f, " {name}")?;
        }
    }
    Ok(())
}

pub(super) fn smem(inst: &Inst, f: &mut Formatter<'_>) -> Result {
    let op = inst.op;
    write!(f, "{op}")?;
    let mut operands = Operands::new(f);
    match (inst.src[2], op.src(2)) {
        (Src::None, _) => operands.dst(inst.dst, op.dst())?,
        (data, kind) => operands.src(data, kind)?,
    }
    operands.src(inst.src[0], op.src(0))?;
    match (inst.src[1], inst.imm) {
        _ if op.src(0) == Kind::None => {}
        (Src::None, offset @ ..0) => operands.push(format_args!("-{:#x}", offset.unsigned_abs()))?,
        (Src::None, offset) => operands.push(format_args!("{offset:#x}"))?,
        (register, offset) => {
            operands.src(register, Kind::I32)?;
            if offset != 0 {
                write!(f, " offset:{offset:#x}")?;
            }
        }
    }
    flags(inst, f, &[(MemFlags::GLC, "glc")])
}

pub(super) fn ds(inst: &Inst, f: &mut Formatter<'_>) -> Result {
    let op = inst.op;
    write!(f, "{op}")?;
    let mut operands = Operands::new(f);
    operands.dst(inst.dst, op.dst())?;
    for (n, src) in inst.src.into_iter().enumerate() {
        operands.src(src, op.src(n))?;
    }
    if op.has(Traits::OFFSETS2) {
        for (name, offset) in [("offset0", inst.offset0()), ("offset1", inst.offset1())] {
            if offset != 0 {
                write!(f, " {name}:{offset}")?;
            }
        }
    } else if op == Op::DsSwizzleB32 && inst.imm != 0 {
        write!(f, " offset:{}", Swizzle(inst.imm as u16))?;
    } else if inst.imm != 0 {
        write!(f, " offset:{}", inst.imm)?;
    }
    flags(inst, f, &[(MemFlags::GDS, "gds")])
}

/// The pattern of `ds_swizzle_b32`.
struct Swizzle(u16);

impl Display for Swizzle {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let pattern = self.0;
        if pattern & 0xff00 == 0x8000 {
            let lane = |n: u16| (pattern >> (2 * n)) & 3;
            return write!(f, "swizzle(QUAD_PERM,{},{},{},{})", lane(0), lane(1), lane(2), lane(3));
        }
        if pattern & 0x8000 != 0 {
            return write!(f, "{pattern}");
        }
        let (and, or, xor) = (pattern & 0x1f, (pattern >> 5) & 0x1f, (pattern >> 10) & 0x1f);
        match (and, or) {
            (0x1f, 0) if xor.count_ones() == 1 => write!(f, "swizzle(SWAP,{xor})"),
            // The low bits are inverted: groups are reversed.
            (0x1f, 0) if xor > 0 && (xor + 1).is_power_of_two() => {
                write!(f, "swizzle(REVERSE,{})", xor + 1)
            }
            _ if xor == 0 && and != 0x1f => {
                let group = 0x20 - and;
                if group > 1 && group.is_power_of_two() && or < group {
                    return write!(f, "swizzle(BROADCAST,{group},{or})");
                }
                mask(f, and, or, xor)
            }
            _ => mask(f, and, or, xor),
        }
    }
}

/// What becomes of each of the five bits of a lane's number: it is set, cleared, preserved or inverted.
fn mask(f: &mut Formatter<'_>, and: u16, or: u16, xor: u16) -> Result {
    f.write_str("swizzle(BITMASK_PERM,\"")?;
    for bit in (0..5).rev() {
        let of = |mask: u16| (mask >> bit) & 1 != 0;
        let clear = of(or) ^ of(xor);
        let set = (of(and) || of(or)) ^ of(xor);
        f.write_str(match (clear, set) {
            (false, false) => "0",
            (true, true) => "1",
            (false, true) => "p",
            (true, false) => "i",
        })?;
    }
    f.write_str("\")")
}

pub(super) fn flat(inst: &Inst, f: &mut Formatter<'_>) -> Result {
    let op = inst.op;
    let name = op.row().name.strip_prefix("flat_").unwrap_or_default();
    let prefix = match inst.encoding {
        Encoding::Global => "global",
        Encoding::Scratch => "scratch",
        _ => "flat",
    };
    write!(f, "{prefix}_{name}")?;
    let is_flat = inst.encoding == Encoding::Flat;
    let has_saddr = inst.src[2] != Src::None;
    let mut operands = Operands::new(f);
    operands.dst(inst.dst, op.dst())?;
    match inst.src[0] {
        Src::None => operands.push("off")?,
        address => {
            let narrow = inst.encoding == Encoding::Scratch || has_saddr;
            operands.src(address, if narrow { Kind::I32 } else { Kind::I64 })?;
        }
    }
    operands.src(inst.src[1], op.src(1))?;
    if has_saddr {
        let kind = if inst.encoding == Encoding::Scratch { Kind::I32 } else { Kind::I64 };
        operands.src(inst.src[2], kind)?;
    } else if !is_flat {
        operands.push("off")?;
    }
    if inst.imm != 0 {
        write!(f, " offset:{}", inst.imm)?;
    }
    flags(inst, f, &[(MemFlags::GLC, "glc"), (MemFlags::SLC, "slc")])
}

pub(super) fn mubuf(inst: &Inst, f: &mut Formatter<'_>) -> Result {
    let op = inst.op;
    write!(f, "{op}")?;
    if op.row().src.is_empty() {
        return Ok(());
    }
    let mut operands = Operands::new(f);
    match inst.src[1] {
        Src::None => operands.dst(inst.dst, op.dst())?,
        data => operands.src(data, op.src(1))?,
    }
    if op.src(0) != Kind::None {
        match inst.src[0] {
            Src::None => operands.push("off")?,
            address => {
                let both = inst.flags.contains(MemFlags::OFFEN | MemFlags::IDXEN);
                operands.src(address, if both { Kind::I64 } else { Kind::I32 })?;
            }
        }
    }
    operands.src(inst.src[3], Kind::B128)?;
    operands.src(inst.src[2], Kind::I32)?;
    flags(inst, f, &[(MemFlags::IDXEN, "idxen"), (MemFlags::OFFEN, "offen")])?;
    if inst.imm != 0 {
        write!(f, " offset:{}", inst.imm)?;
    }
    if op == Op::BufferStoreLdsDword {
        return flags(inst, f, &[(MemFlags::LDS, "lds"), (MemFlags::GLC, "glc"), (MemFlags::SLC, "slc")]);
    }
    flags(
        inst,
        f,
        &[(MemFlags::GLC, "glc"), (MemFlags::SLC, "slc"), (MemFlags::TFE, "tfe"), (MemFlags::LDS, "lds")],
    )
}
