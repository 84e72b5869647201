//! VOP1, VOP2, VOPC, VOP3, VOP3P.

use std::fmt::{Display, Formatter, Result};

use super::{Operands, Source};
use crate::inst::{Dpp, DppCtrl, Inst, Omod, Sdwa, Sel, Src, SubWord, Unused};
use crate::op::{Encoding, Kind, Traits};

/// What LLVM appends to the mnemonic.
fn suffix(inst: &Inst) -> &'static str {
    // Where there is one form only, and where there are no operands, nothing.
    if inst.op.row().src.is_empty() {
        return "";
    }
    match (inst.sub, inst.encoding) {
        (SubWord::Sdwa(_), _) => "_sdwa",
        (SubWord::Dpp(_), _) => "_dpp",
        _ if !inst.op.has(Traits::E64) => "",
        (_, Encoding::Vop3) => "_e64",
        _ => "_e32",
    }
}

/// A source with its modifiers.
struct Modified<'a> {
    inst: &'a Inst,
    n: usize,
    src: Src,
}

impl Display for Modified<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (inst, n) = (self.inst, self.n);
        let is_set = |mask: u8| (mask >> n) & 1 != 0;
        let packed = inst.encoding == Encoding::Vop3p && inst.op.src(0) != Kind::Mix;
        let neg = is_set(inst.modifiers.neg) && !packed;
        let abs = is_set(inst.modifiers.abs);
        let sext = matches!(inst.sub, SubWord::Sdwa(Sdwa { sext, .. }) if is_set(sext));
        // -1 is not neg(1).
        let is_constant = matches!(self.src, Src::Int(_) | Src::Float(_) | Src::Literal(_));
        let (before, after) = match (neg, abs) {
            (true, true) => ("-|", "|"),
            (true, false) if is_constant => ("neg(", ")"),
            (true, false) => ("-", ""),
            (false, true) => ("|", "|"),
            (false, false) if sext => ("sext(", ")"),
            (false, false) => ("", ""),
        };
        write!(f, "{before}{}{after}", Source(self.src, inst.op.src(n)))
    }
}

pub(super) fn vector(inst: &Inst, f: &mut Formatter<'_>) -> Result {
    let op = inst.op;
    write!(f, "{op}{}", suffix(inst))?;
    let mut operands = Operands::new(f);
    operands.dst(inst.dst, op.dst())?;
    operands.dst(inst.sdst, Kind::Mask)?;
    let count = if op.has(Traits::ACCUMULATE) { 2 } else { 3 };
    for (n, src) in inst.src.into_iter().enumerate().take(count) {
        // One that is always there is written as it stands.
        let is_literal = n == 1 && op.has(Traits::LITERAL_B) || n == 2 && op.has(Traits::LITERAL_C);
        match src {
            Src::None => {}
            Src::Literal(value) if is_literal => operands.push(format_args!("{value:#x}"))?,
            // The same one as a source, of which LLVM writes all bits here also where a half is read.
            Src::Literal(_) if op.has(Traits::LITERAL_B) || op.has(Traits::LITERAL_C) => {
                operands.push(Source(src, Kind::F32))?;
            }
            _ => operands.push(Modified { inst, n, src })?,
        }
    }
    if inst.encoding == Encoding::Vop3p {
        packed(inst, f)?;
    } else if inst.modifiers.op_sel != 0 {
        // The sources and the destination.
        let sources = op.row().src.len();
        let mut bits: Vec<u8> = (0..sources).map(|n| (inst.modifiers.op_sel >> n) & 1).collect();
        bits.push(inst.modifiers.op_sel >> 3);
        list(f, "op_sel", &bits)?;
    }
    if inst.modifiers.clamp {
        f.write_str(" clamp")?;
    }
    f.write_str(match inst.modifiers.omod {
        Omod::None => "",
        Omod::Mul2 => " mul:2",
        Omod::Mul4 => " mul:4",
        Omod::Div2 => " div:2",
    })?;
    match inst.sub {
        SubWord::None => Ok(()),
        SubWord::Sdwa(sub) => sdwa(inst, sub, f),
        SubWord::Dpp(sub) => dpp(sub, f),
    }
}

fn list(f: &mut Formatter<'_>, name: &str, bits: &[u8]) -> Result {
    write!(f, " {name}:[")?;
    for (n, bit) in bits.iter().enumerate() {
        write!(f, "{}{bit}", if n == 0 { "" } else { "," })?;
    }
    f.write_str("]")
}

/// The modifiers of VOP3P, where they are not what they are by default.
fn packed(inst: &Inst, f: &mut Formatter<'_>) -> Result {
    let count = inst.op.row().src.len();
    let mix = inst.op.src(0) == Kind::Mix;
    let all = (1_u8 << count) - 1;
    let modifiers = &inst.modifiers;
    let lists = [
        ("op_sel", modifiers.op_sel, 0),
        ("op_sel_hi", modifiers.op_sel_hi, if mix { 0 } else { all }),
        ("neg_lo", if mix { 0 } else { modifiers.neg }, 0),
        ("neg_hi", modifiers.neg_hi, 0),
    ];
    for (name, mask, default) in lists {
        if mask != default {
            let bits: Vec<u8> = (0..count).map(|n| (mask >> n) & 1).collect();
            list(f, name, &bits)?;
        }
    }
    Ok(())
}

impl Display for Sel {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match self {
            Self::Byte0 => "BYTE_0",
            Self::Byte1 => "BYTE_1",
            Self::Byte2 => "BYTE_2",
            Self::Byte3 => "BYTE_3",
            Self::Word0 => "WORD_0",
            Self::Word1 => "WORD_1",
            Self::Dword => "DWORD",
        })
    }
}

fn sdwa(inst: &Inst, sub: Sdwa, f: &mut Formatter<'_>) -> Result {
    if inst.encoding != Encoding::Vopc {
        let unused = match sub.dst_unused {
            Unused::Pad => "UNUSED_PAD",
            Unused::Sext => "UNUSED_SEXT",
            Unused::Preserve => "UNUSED_PRESERVE",
        };
        write!(f, " dst_sel:{} dst_unused:{unused}", sub.dst_sel)?;
    }
    let [first, second] = sub.src_sel;
    write!(f, " src0_sel:{first}")?;
    if inst.encoding != Encoding::Vop1 {
        write!(f, " src1_sel:{second}")?;
    }
    Ok(())
}

fn dpp(sub: Dpp, f: &mut Formatter<'_>) -> Result {
    match sub.ctrl {
        DppCtrl::QuadPerm(lanes) => {
            let lane = |n: u8| (lanes >> (2 * n)) & 3;
            write!(f, " quad_perm:[{},{},{},{}]", lane(0), lane(1), lane(2), lane(3))
        }
        DppCtrl::RowShl(n) => write!(f, " row_shl:{n}"),
        DppCtrl::RowShr(n) => write!(f, " row_shr:{n}"),
        DppCtrl::RowRor(n) => write!(f, " row_ror:{n}"),
        DppCtrl::WaveShl1 => f.write_str(" wave_shl:1"),
        DppCtrl::WaveRol1 => f.write_str(" wave_rol:1"),
        DppCtrl::WaveShr1 => f.write_str(" wave_shr:1"),
        DppCtrl::WaveRor1 => f.write_str(" wave_ror:1"),
        DppCtrl::RowMirror => f.write_str(" row_mirror"),
        DppCtrl::RowHalfMirror => f.write_str(" row_half_mirror"),
        DppCtrl::RowBcast15 => f.write_str(" row_bcast:15"),
        DppCtrl::RowBcast31 => f.write_str(" row_bcast:31"),
    }?;
    write!(f, " row_mask:{:#x} bank_mask:{:#x}", sub.row_mask, sub.bank_mask)?;
    if sub.bound_ctrl {
        f.write_str(" bound_ctrl:1")?;
    }
    Ok(())
}
