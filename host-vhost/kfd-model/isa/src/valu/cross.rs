//! Operations that move values between lanes, or between vector and scalar registers, and those that do nothing.

use super::Handler;
use super::operand::raw32;
use crate::inst::{Dst, Inst, Src};
use crate::op::{Kind, Op};
use crate::wave::{LANES, Wave};

/// The handler of an opcode of this module.
pub(super) const fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VReadfirstlaneB32 => read_first_lane,
        Op::VReadlaneB32 => read_lane,
        Op::VWritelaneB32 => write_lane,
        Op::VSwapB32 => swap,
        // V_CLREXCP clears exception flags that nothing here raises.
        Op::VNop | Op::VClrexcp => |_, _| {},
        _ => return None,
    })
}

/// The lowest lane that is on; lane 0 if none is.
fn read_first_lane(wave: &mut Wave, inst: &Inst) {
    let lane = wave.exec().trailing_zeros() as usize % LANES;
    let value = lane_of(wave, inst, lane);
    if let Dst::Sgpr(n) = inst.dst {
        wave.set_sgpr(n, value);
    }
}

/// Any lane, whether on or off.
fn read_lane(wave: &mut Wave, inst: &Inst) {
    let lane = scalar(wave, inst, 1) as usize % LANES;
    let value = lane_of(wave, inst, lane);
    if let Dst::Sgpr(n) = inst.dst {
        wave.set_sgpr(n, value);
    }
}

/// Any lane, whether on or off.
fn write_lane(wave: &mut Wave, inst: &Inst) {
    let lane = scalar(wave, inst, 1) as usize % LANES;
    let value = scalar(wave, inst, 0);
    if let Dst::Vgpr(n) = inst.dst
        && let Some(row) = wave.row_mut(n)
    {
        row.set_lane(lane, value);
    }
}

/// A lane of `src[0]`.
fn lane_of(wave: &Wave, inst: &Inst, lane: usize) -> u32 {
    match inst.src {
        [Src::Vgpr(n), ..] => wave.row(n).lane(lane),
        _ => raw32(wave, inst, 0, Kind::I32).lane(lane),
    }
}

/// A source that is the same in all lanes.
fn scalar(wave: &Wave, inst: &Inst, index: usize) -> u32 {
    match inst.src.get(index) {
        Some(Src::Sgpr(n)) => wave.sgpr(*n),
        _ => raw32(wave, inst, index, Kind::I32).lane(0),
    }
}

/// V_SWAP_B32, of the lanes that are on.
fn swap(wave: &mut Wave, inst: &Inst) {
    let (Dst::Vgpr(first), [Src::Vgpr(second), ..]) = (inst.dst, inst.src) else { return };
    let (a, b) = (*wave.row(first), *wave.row(second));
    wave.write_row(usize::from(first), &b);
    wave.write_row(usize::from(second), &a);
}
