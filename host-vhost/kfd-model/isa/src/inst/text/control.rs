//! SOP1, SOP2, SOPC, SOPK, SOPP.

use std::fmt::{Display, Formatter, Result};

use super::Operands;
use crate::inst::{HwReg, Inst};
use crate::op::{Encoding, Op, Traits};

pub(super) fn scalar(inst: &Inst, f: &mut Formatter<'_>) -> Result {
    let op = inst.op;
    write!(f, "{op}")?;
    let mut operands = Operands::new(f);
    operands.dst(inst.dst, op.dst())?;
    for n in 0..2 {
        if let Some(src) = inst.src.get(n) {
            operands.src(*src, op.src(n))?;
        }
    }
    if op == Op::SSetGprIdxOn {
        operands.push(GprIdx(inst.imm as u16))?;
    }
    Ok(())
}

pub(super) fn sopk(inst: &Inst, f: &mut Formatter<'_>) -> Result {
    let op = inst.op;
    write!(f, "{op}")?;
    let mut operands = Operands::new(f);
    match op {
        Op::SGetregB32 => {
            operands.dst(inst.dst, op.dst())?;
            operands.push(inst.hwreg())
        }
        Op::SSetregB32 | Op::SSetregImm32B32 => {
            operands.push(inst.hwreg())?;
            operands.src(inst.src[0], op.src(0))
        }
        _ => {
            operands.dst(inst.dst, op.dst())?;
            // What is read and written stands there once.
            if op.dst() == crate::op::Kind::None {
                operands.src(inst.src[0], op.src(0))?;
            }
            let imm = inst.imm as u16;
            if matches!(op, Op::SCallB64 | Op::SCbranchIFork) {
                operands.push(imm)
            } else {
                operands.push(format_args!("{imm:#x}"))
            }
        }
    }
}

impl Display for HwReg {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let name = match self.id {
            1 => "HW_REG_MODE",
            2 => "HW_REG_STATUS",
            3 => "HW_REG_TRAPSTS",
            4 => "HW_REG_HW_ID",
            5 => "HW_REG_GPR_ALLOC",
            6 => "HW_REG_LDS_ALLOC",
            7 => "HW_REG_IB_STS",
            15 => "HW_REG_SH_MEM_BASES",
            _ => "",
        };
        f.write_str("hwreg(")?;
        if name.is_empty() {
            write!(f, "{}", self.id)?;
        } else {
            f.write_str(name)?;
        }
        if self.offset != 0 || self.size != 32 {
            write!(f, ", {}, {}", self.offset, self.size)?;
        }
        f.write_str(")")
    }
}

/// Which operands the mode of relative addressing applies to.
struct GprIdx(u16);

impl Display for GprIdx {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        if self.0 > 0xf {
            return write!(f, "{:#x}", self.0);
        }
        f.write_str("gpr_idx(")?;
        let mut separator = "";
        for (number, name) in ["SRC0", "SRC1", "SRC2", "DST"].into_iter().enumerate() {
            if (self.0 >> number) & 1 != 0 {
                write!(f, "{}{name}", std::mem::replace(&mut separator, ","))?;
            }
        }
        f.write_str(")")
    }
}

pub(super) fn sopp(inst: &Inst, f: &mut Formatter<'_>) -> Result {
    let op = inst.op;
    debug_assert_eq!(inst.encoding, Encoding::Sopp);
    let imm = inst.imm as u16;
    write!(f, "{op}")?;
    match op {
        _ if op.has(Traits::NO_IMM) => Ok(()),
        Op::SEndpgm if imm == 0 => Ok(()),
        Op::SWaitcnt => waitcnt(f, imm),
        Op::SSendmsg | Op::SSendmsghalt => sendmsg(f, imm),
        Op::SSetGprIdxMode => write!(f, " {}", GprIdx(imm)),
        Op::SEndpgm
        | Op::SBranch
        | Op::SCbranchScc0
        | Op::SCbranchScc1
        | Op::SCbranchVccz
        | Op::SCbranchVccnz
        | Op::SCbranchExecz
        | Op::SCbranchExecnz
        | Op::SCbranchCdbgsys
        | Op::SCbranchCdbguser
        | Op::SCbranchCdbgsysOrUser
        | Op::SCbranchCdbgsysAndUser => write!(f, " {imm}"),
        // As the inline integers.
        _ if imm <= 64 => write!(f, " {imm}"),
        _ => write!(f, " {imm:#x}"),
    }
}

/// Counters that are waited for; one at its highest value is not, and left out unless all are.
fn waitcnt(f: &mut Formatter<'_>, imm: u16) -> Result {
    let vmcnt = (imm & 0xf) | (imm >> 14) << 4;
    let counters = [("vmcnt", vmcnt, 63), ("expcnt", (imm >> 4) & 7, 7), ("lgkmcnt", (imm >> 8) & 15, 15)];
    let all = counters.iter().all(|(_, value, highest)| value == highest);
    for (name, value, highest) in counters {
        if all || value != highest {
            write!(f, " {name}({value})")?;
        }
    }
    Ok(())
}

fn sendmsg(f: &mut Formatter<'_>, imm: u16) -> Result {
    let (id, operation, stream) = (imm & 0xf, (imm >> 4) & 7, (imm >> 8) & 3);
    let name = match id {
        1 => "MSG_INTERRUPT",
        2 => "MSG_GS",
        3 => "MSG_GS_DONE",
        4 => "MSG_SAVEWAVE",
        5 => "MSG_STALL_WAVE_GEN",
        6 => "MSG_HALT_WAVES",
        7 => "MSG_ORDERED_PS_DONE",
        8 => "MSG_EARLY_PRIM_DEALLOC",
        9 => "MSG_GS_ALLOC_REQ",
        10 => "MSG_GET_DOORBELL",
        15 => "MSG_SYSMSG",
        _ => "",
    };
    let geometry = ["GS_OP_NOP", "GS_OP_CUT", "GS_OP_EMIT", "GS_OP_EMIT_CUT"];
    let system = [
        "",
        "SYSMSG_OP_ECC_ERR_INTERRUPT",
        "SYSMSG_OP_REG_RD",
        "SYSMSG_OP_HOST_TRAP_ACK",
        "SYSMSG_OP_TTRACE_PC",
    ];
    let named = usize::from(operation);
    match (id, operation, stream) {
        (1 | 4..=10, 0, 0) => write!(f, " sendmsg({name})"),
        (3, 0, 0) => write!(f, " sendmsg({name}, GS_OP_NOP)"),
        (2 | 3, 1..=3, _) => {
            write!(f, " sendmsg({name}, {}, {stream})", geometry.get(named).unwrap_or(&""))
        }
        (15, 1..=4, 0) => write!(f, " sendmsg({name}, {})", system.get(named).unwrap_or(&"")),
        // Bits that belong to no field.
        _ if imm & !0x37f != 0 => write!(f, " {imm}"),
        _ => write!(f, " sendmsg({id}, {operation}, {stream})"),
    }
}
