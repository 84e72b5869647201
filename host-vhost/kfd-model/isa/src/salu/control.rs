//! SOPP: branches, barriers, messages, and what else steers a wave.

use crate::bus::Bus;
use crate::inst::Inst;
use crate::op::Op;
use crate::stop::Stop;
use crate::wave::{Mode, Wave, reg};

/// How a wave goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// With the next instruction.
    Next,
    /// When all waves of its workgroup are where it is.
    Barrier,
    /// It has nothing better to do than to let others run first.
    Sleep,
    /// Not at all: it is done.
    End,
}

/// `llvm.debugtrap`: nothing without a debugger.
const DEBUG_TRAP: u8 = 3;

fn branch(wave: &mut Wave, inst: &Inst, taken: bool) {
    if taken {
        wave.pc = wave.pc.wrapping_add_signed(i64::from(inst.imm) * 4);
    }
}

/// Executes a SOPP instruction.
///
/// # Errors
/// [`Stop::Trap`], [`Stop::NotSupported`].
#[inline]
pub fn execute(wave: &mut Wave, inst: &Inst, bus: &mut impl Bus) -> Result<Flow, Stop> {
    match inst.op {
        Op::SBranch => branch(wave, inst, true),
        Op::SCbranchScc0 => branch(wave, inst, !wave.scc),
        Op::SCbranchScc1 => branch(wave, inst, wave.scc),
        Op::SCbranchVccz => branch(wave, inst, wave.vcc() == 0),
        Op::SCbranchVccnz => branch(wave, inst, wave.vcc() != 0),
        Op::SCbranchExecz => branch(wave, inst, wave.exec() == 0),
        Op::SCbranchExecnz => branch(wave, inst, wave.exec() != 0),
        // There is no debugger.
        Op::SCbranchCdbgsys
        | Op::SCbranchCdbguser
        | Op::SCbranchCdbgsysOrUser
        | Op::SCbranchCdbgsysAndUser => {}
        Op::SEndpgm | Op::SEndpgmSaved | Op::SEndpgmOrderedPsDone => return Ok(Flow::End),
        Op::SBarrier => return Ok(Flow::Barrier),
        Op::SSleep => return Ok(Flow::Sleep),
        // Accesses are done in order, each before the next instruction.
        Op::SWaitcnt => {}
        Op::SNop
        | Op::SWakeup
        | Op::SSetprio
        | Op::SIncperflevel
        | Op::SDecperflevel
        | Op::STtracedata
        | Op::SSetkill => {}
        Op::SSendmsg => bus.message(inst.imm as u16, wave.m0()),
        Op::STrap => {
            let id = inst.imm as u8;
            if id != DEBUG_TRAP {
                return Err(Stop::Trap { id });
            }
        }
        Op::SIcacheInv => {
            bus.invalidate_code();
            // The wave leaves the page of code that it runs, and finds the new one.
            return Ok(Flow::Sleep);
        }
        Op::SSethalt if inst.imm & 1 == 0 => {}
        Op::SSetGprIdxOff => wave.mode = Mode(wave.mode.0 & !Mode::GPR_IDX_EN),
        Op::SSetGprIdxMode => {
            wave.set_sgpr(reg::M0, wave.m0() & !0xf000 | (inst.imm as u32 & 0xf) << 12);
        }
        _ => return Err(Stop::not_supported(inst.op)),
    }
    Ok(Flow::Next)
}
