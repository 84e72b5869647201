//! Hardware registers (`s_getreg_b32`, `s_setreg_b32`).

use super::{PRIVATE_BASE_HIGH, SHARED_BASE_HIGH};
use crate::inst::HwReg;
use crate::wave::{Mode, Wave};

/// `HW_REG_MODE`
const MODE: u8 = 1;
/// `HW_REG_STATUS`
const STATUS: u8 = 2;
/// `HW_REG_TRAPSTS`
const TRAPSTS: u8 = 3;
/// `HW_REG_HW_ID`
const HW_ID: u8 = 4;
/// `HW_REG_SH_MEM_BASES`: bits 63:48 of the apertures, private in the low half, shared in the high one.
const SH_MEM_BASES: u8 = 15;

/// Bits of STATUS that are kept elsewhere.
mod status {
    pub const SCC: u32 = 1;
    pub const EXECZ: u32 = 1 << 9;
    pub const VCCZ: u32 = 1 << 10;
    pub const VALID: u32 = 1 << 16;
}

fn field(register: HwReg) -> u32 {
    let ones = if register.size >= 32 { u32::MAX } else { (1 << register.size) - 1 };
    ones << (register.offset & 31)
}

fn read(wave: &Wave, id: u8) -> u32 {
    let bit = |set: bool, bit: u32| if set { bit } else { 0 };
    match id {
        MODE => wave.mode.0,
        STATUS => {
            wave.status
                | status::VALID
                | bit(wave.scc, status::SCC)
                | bit(wave.exec() == 0, status::EXECZ)
                | bit(wave.vcc() == 0, status::VCCZ)
        }
        TRAPSTS => wave.trapsts,
        HW_ID => wave.hw_id,
        SH_MEM_BASES => SHARED_BASE_HIGH >> 16 << 16 | PRIVATE_BASE_HIGH >> 16,
        // What the wave allocated: a place like any other.
        _ => 0,
    }
}

/// A field of a register, in the low bits. Registers that are not modelled read as 0.
pub fn get(wave: &Wave, register: HwReg) -> u32 {
    (read(wave, register.id) & field(register)) >> (register.offset & 31)
}

/// Writes a field. A program can write MODE and, of TRAPSTS, what it reads there.
pub fn set(wave: &mut Wave, register: HwReg, value: u32) {
    let mask = field(register);
    let value = value << (register.offset & 31) & mask;
    match register.id {
        MODE => wave.mode = Mode(wave.mode.0 & !mask | value),
        TRAPSTS => wave.trapsts = wave.trapsts & !mask | value,
        _ => {}
    }
}
