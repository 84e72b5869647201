//! Scalar instructions: SOP1, SOP2, SOPC, SOPK in here, SOPP in [`control`].

pub mod control;
mod hwreg;

use crate::inst::{Dst, Inst, Src};
use crate::op::{Encoding, Kind, Op};
use crate::stop::Stop;
use crate::wave::{Mode, Wave, reg};

/// Bits 63:32 of the addresses of the LDS aperture (`LDS_BASE` of amdkfd for gfx9, 1 << 48).
pub const SHARED_BASE_HIGH: u32 = 0x1_0000;
/// Bits 63:32 of the addresses of the scratch aperture (2 << 48).
pub const PRIVATE_BASE_HIGH: u32 = 0x2_0000;

/// A 32-bit source.
#[inline]
pub(crate) fn read32(wave: &Wave, src: Src) -> u32 {
    match src {
        Src::Sgpr(n) => wave.sgpr(n),
        other => read64_special(wave, other, Kind::I32) as u32,
    }
}

/// A 64-bit source.
#[inline]
pub(crate) fn read64(wave: &Wave, src: Src) -> u64 {
    match src {
        Src::Sgpr(n) => wave.sgpr64(n),
        other => read64_special(wave, other, Kind::I64),
    }
}

/// A 64-bit source that is a signed number: a literal keeps its sign.
fn read64_signed(wave: &Wave, src: Src) -> i64 {
    match src {
        Src::Literal(value) => i64::from(value.cast_signed()),
        other => read64(wave, other).cast_signed(),
    }
}

fn read64_special(wave: &Wave, src: Src, kind: Kind) -> u64 {
    match src {
        // The registers have 64 bits; a 32-bit instruction reads the low half (LLVM's SRC_SHARED_BASE_LO).
        Src::SharedBase => u64::from(SHARED_BASE_HIGH) << 32,
        Src::PrivateBase => u64::from(PRIVATE_BASE_HIGH) << 32,
        Src::SharedLimit => u64::from(SHARED_BASE_HIGH) << 32 | 0xffff_ffff,
        Src::PrivateLimit => u64::from(PRIVATE_BASE_HIGH) << 32 | 0xffff_ffff,
        Src::Vccz => u64::from(wave.vcc() == 0),
        Src::Execz => u64::from(wave.exec() == 0),
        Src::Scc => u64::from(wave.scc),
        other => other.constant(kind).unwrap_or(0),
    }
}

#[inline]
fn destination(inst: &Inst) -> u8 {
    match inst.dst {
        Dst::Sgpr(n) => n,
        // The decoder gives scalar instructions no other.
        Dst::Vgpr(_) | Dst::None => 127,
    }
}

/// Executes a SOP1, SOP2, SOPC or SOPK instruction.
///
/// # Errors
/// [`Stop::Illegal`] and [`Stop::NotSupported`].
#[inline]
pub fn execute(wave: &mut Wave, inst: &Inst) -> Result<(), Stop> {
    match inst.encoding {
        Encoding::Sop2 => sop2(wave, inst),
        Encoding::Sop1 => sop1(wave, inst),
        Encoding::Sopc => sopc(wave, inst),
        Encoding::Sopk => sopk(wave, inst),
        _ => Err(Stop::Illegal),
    }
}

/// Writes a result and sets SCC if it is not 0.
#[inline]
fn set32(wave: &mut Wave, inst: &Inst, value: u32) {
    wave.set_sgpr(destination(inst), value);
    wave.scc = value != 0;
}

#[inline]
fn set64(wave: &mut Wave, inst: &Inst, value: u64) {
    wave.set_sgpr64(destination(inst), value);
    wave.scc = value != 0;
}

/// Writes a result with a carry or overflow.
#[inline]
fn carried(wave: &mut Wave, inst: &Inst, (value, carry): (u32, bool)) {
    wave.set_sgpr(destination(inst), value);
    wave.scc = carry;
}

fn bfm(width: u64, offset: u64) -> u64 {
    ((1u64 << width) - 1) << offset
}

/// A field of bits: offset in the low bits of `control`, width from bit 16 on.
fn bfe_u(value: u64, offset: u32, width: u32) -> u64 {
    let value = value >> offset;
    if width >= 64 { value } else { value & ((1 << width) - 1) }
}

fn bfe_i(value: i64, offset: u32, width: u32, bits: u32) -> i64 {
    if width == 0 {
        return 0;
    }
    // What lies beyond the value is its sign.
    let value = value >> offset;
    let width = width.min(bits);
    value << (64 - width) >> (64 - width)
}

fn sop2(wave: &mut Wave, inst: &Inst) -> Result<(), Stop> {
    let [s0, s1, ..] = inst.src;
    let a = || read32(wave, s0);
    let b = || read32(wave, s1);
    let wide = || (read64(wave, s0), read64(wave, s1));
    let shifted = |by: u32| (u64::from(a()) << by).wrapping_add(u64::from(b()));
    match inst.op {
        Op::SAddU32 => carried(wave, inst, a().overflowing_add(b())),
        Op::SSubU32 => carried(wave, inst, a().overflowing_sub(b())),
        Op::SAddI32 => {
            let (value, overflow) = (a() as i32).overflowing_add(b() as i32);
            carried(wave, inst, (value as u32, overflow));
        }
        Op::SSubI32 => {
            let (value, overflow) = (a() as i32).overflowing_sub(b() as i32);
            carried(wave, inst, (value as u32, overflow));
        }
        Op::SAddcU32 => {
            let sum = u64::from(a()) + u64::from(b()) + u64::from(wave.scc);
            carried(wave, inst, (sum as u32, sum >> 32 != 0));
        }
        Op::SSubbU32 => {
            let difference = u64::from(a()).wrapping_sub(u64::from(b())).wrapping_sub(u64::from(wave.scc));
            carried(wave, inst, (difference as u32, difference >> 32 != 0));
        }
        Op::SMinI32 => {
            let (a, b) = (a() as i32, b() as i32);
            carried(wave, inst, (a.min(b) as u32, a < b));
        }
        Op::SMinU32 => {
            let (a, b) = (a(), b());
            carried(wave, inst, (a.min(b), a < b));
        }
        Op::SMaxI32 => {
            let (a, b) = (a() as i32, b() as i32);
            carried(wave, inst, (a.max(b) as u32, a > b));
        }
        Op::SMaxU32 => {
            let (a, b) = (a(), b());
            carried(wave, inst, (a.max(b), a > b));
        }
        Op::SCselectB32 => {
            let value = if wave.scc { a() } else { b() };
            wave.set_sgpr(destination(inst), value);
        }
        Op::SCselectB64 => {
            let (a, b) = wide();
            let value = if wave.scc { a } else { b };
            wave.set_sgpr64(destination(inst), value);
        }
        Op::SAndB32 => set32(wave, inst, a() & b()),
        Op::SOrB32 => set32(wave, inst, a() | b()),
        Op::SXorB32 => set32(wave, inst, a() ^ b()),
        Op::SAndn2B32 => set32(wave, inst, a() & !b()),
        Op::SOrn2B32 => set32(wave, inst, a() | !b()),
        Op::SNandB32 => set32(wave, inst, !(a() & b())),
        Op::SNorB32 => set32(wave, inst, !(a() | b())),
        Op::SXnorB32 => set32(wave, inst, !(a() ^ b())),
        Op::SAndB64
        | Op::SOrB64
        | Op::SXorB64
        | Op::SAndn2B64
        | Op::SOrn2B64
        | Op::SNandB64
        | Op::SNorB64
        | Op::SXnorB64 => {
            let (a, b) = wide();
            let value = match inst.op {
                Op::SAndB64 => a & b,
                Op::SOrB64 => a | b,
                Op::SXorB64 => a ^ b,
                Op::SAndn2B64 => a & !b,
                Op::SOrn2B64 => a | !b,
                Op::SNandB64 => !(a & b),
                Op::SNorB64 => !(a | b),
                _ => !(a ^ b),
            };
            set64(wave, inst, value);
        }
        Op::SLshlB32 => set32(wave, inst, a() << (b() & 31)),
        Op::SLshrB32 => set32(wave, inst, a() >> (b() & 31)),
        Op::SAshrI32 => set32(wave, inst, (a() as i32 >> (b() & 31)) as u32),
        Op::SLshlB64 => set64(wave, inst, read64(wave, s0) << (b() & 63)),
        Op::SLshrB64 => set64(wave, inst, read64(wave, s0) >> (b() & 63)),
        Op::SAshrI64 => set64(wave, inst, (read64_signed(wave, s0) >> (b() & 63)) as u64),
        Op::SBfmB32 => {
            let value = bfm(u64::from(a() & 31), u64::from(b() & 31)) as u32;
            wave.set_sgpr(destination(inst), value);
        }
        Op::SBfmB64 => {
            let value = bfm(u64::from(a() & 63), u64::from(b() & 63));
            wave.set_sgpr64(destination(inst), value);
        }
        Op::SMulI32 => {
            let value = a().wrapping_mul(b());
            wave.set_sgpr(destination(inst), value);
        }
        Op::SMulHiU32 => {
            let value = (u64::from(a()) * u64::from(b())) >> 32;
            wave.set_sgpr(destination(inst), value as u32);
        }
        Op::SMulHiI32 => {
            let value = (i64::from(a() as i32) * i64::from(b() as i32)) >> 32;
            wave.set_sgpr(destination(inst), value as u32);
        }
        Op::SBfeU32 => {
            let value = bfe_u(u64::from(a()), b() & 31, b() >> 16 & 0x7f);
            set32(wave, inst, value as u32);
        }
        Op::SBfeI32 => {
            let value = bfe_i(i64::from(a() as i32), b() & 31, b() >> 16 & 0x7f, 32);
            set32(wave, inst, value as u32);
        }
        Op::SBfeU64 => set64(wave, inst, bfe_u(read64(wave, s0), b() & 63, b() >> 16 & 0x7f)),
        Op::SBfeI64 => {
            let value = bfe_i(read64_signed(wave, s0), b() & 63, b() >> 16 & 0x7f, 64);
            set64(wave, inst, value as u64);
        }
        Op::SAbsdiffI32 => {
            // Modulo 2^32, and then the absolute value of that.
            let value = a().wrapping_sub(b()) as i32;
            set32(wave, inst, value.unsigned_abs());
        }
        Op::SLshl1AddU32 | Op::SLshl2AddU32 | Op::SLshl3AddU32 | Op::SLshl4AddU32 => {
            let sum = shifted(match inst.op {
                Op::SLshl1AddU32 => 1,
                Op::SLshl2AddU32 => 2,
                Op::SLshl3AddU32 => 3,
                _ => 4,
            });
            carried(wave, inst, (sum as u32, sum >> 32 != 0));
        }
        Op::SPackLlB32B16 => {
            let value = a() & 0xffff | b() << 16;
            wave.set_sgpr(destination(inst), value);
        }
        Op::SPackLhB32B16 => {
            let value = a() & 0xffff | b() & 0xffff_0000;
            wave.set_sgpr(destination(inst), value);
        }
        Op::SPackHhB32B16 => {
            let value = a() >> 16 | b() & 0xffff_0000;
            wave.set_sgpr(destination(inst), value);
        }
        _ => return Err(Stop::not_supported(inst.op)),
    }
    Ok(())
}

/// Position of the first bit that is set, from the low end; -1 if there is none.
fn first_one(value: u64) -> u32 {
    if value == 0 { u32::MAX } else { value.trailing_zeros() }
}

/// Leading bits that are like the sign, the sign itself included; -1 if all are.
fn leading_signs(value: i64, bits: u32) -> u32 {
    let different = if value < 0 { !value } else { value } as u64;
    if different == 0 { u32::MAX } else { different.leading_zeros() - (64 - bits) }
}

fn quads(value: u64) -> u64 {
    let any = value | value >> 1 | value >> 2 | value >> 3;
    any & 0x1111_1111_1111_1111
}

fn sop1(wave: &mut Wave, inst: &Inst) -> Result<(), Stop> {
    let [s0, ..] = inst.src;
    let to = destination(inst);
    let a = || read32(wave, s0);
    let w = || read64(wave, s0);
    match inst.op {
        Op::SMovB32 => wave.set_sgpr(to, a()),
        Op::SMovB64 => wave.set_sgpr64(to, w()),
        Op::SCmovB32 if wave.scc => wave.set_sgpr(to, a()),
        Op::SCmovB64 if wave.scc => wave.set_sgpr64(to, w()),
        Op::SCmovB32 | Op::SCmovB64 => {}
        Op::SNotB32 => set32(wave, inst, !a()),
        Op::SNotB64 => set64(wave, inst, !w()),
        Op::SWqmB32 => set32(wave, inst, (quads(u64::from(a())) * 0xf) as u32),
        Op::SWqmB64 => set64(wave, inst, quads(w()).wrapping_mul(0xf)),
        Op::SBrevB32 => wave.set_sgpr(to, a().reverse_bits()),
        Op::SBrevB64 => wave.set_sgpr64(to, w().reverse_bits()),
        Op::SBcnt0I32B32 => set32(wave, inst, a().count_zeros()),
        Op::SBcnt0I32B64 => set32(wave, inst, w().count_zeros()),
        Op::SBcnt1I32B32 => set32(wave, inst, a().count_ones()),
        Op::SBcnt1I32B64 => set32(wave, inst, w().count_ones()),
        Op::SFf0I32B32 => wave.set_sgpr(to, first_one(u64::from(!a()))),
        Op::SFf0I32B64 => wave.set_sgpr(to, first_one(!w())),
        Op::SFf1I32B32 => wave.set_sgpr(to, first_one(u64::from(a()))),
        Op::SFf1I32B64 => wave.set_sgpr(to, first_one(w())),
        Op::SFlbitI32B32 => wave.set_sgpr(to, leading_signs(i64::from(a()), 32)),
        Op::SFlbitI32B64 => {
            let value = w();
            wave.set_sgpr(to, if value == 0 { u32::MAX } else { value.leading_zeros() });
        }
        Op::SFlbitI32 => wave.set_sgpr(to, leading_signs(i64::from(a() as i32), 32)),
        Op::SFlbitI32I64 => wave.set_sgpr(to, leading_signs(read64_signed(wave, s0), 64)),
        Op::SSextI32I8 => wave.set_sgpr(to, a() as u8 as i8 as u32),
        Op::SSextI32I16 => wave.set_sgpr(to, a() as u16 as i16 as u32),
        Op::SBitset0B32 => wave.set_sgpr(to, wave.sgpr(to) & !(1 << (a() & 31))),
        Op::SBitset1B32 => wave.set_sgpr(to, wave.sgpr(to) | 1 << (a() & 31)),
        Op::SBitset0B64 => wave.set_sgpr64(to, wave.sgpr64(to) & !(1 << (a() & 63))),
        Op::SBitset1B64 => wave.set_sgpr64(to, wave.sgpr64(to) | 1 << (a() & 63)),
        Op::SGetpcB64 => wave.set_sgpr64(to, wave.pc),
        Op::SSetpcB64 => wave.pc = w(),
        Op::SSwappcB64 => {
            let target = w();
            wave.set_sgpr64(to, wave.pc);
            wave.pc = target;
        }
        Op::SAndSaveexecB64
        | Op::SOrSaveexecB64
        | Op::SXorSaveexecB64
        | Op::SAndn2SaveexecB64
        | Op::SOrn2SaveexecB64
        | Op::SNandSaveexecB64
        | Op::SNorSaveexecB64
        | Op::SXnorSaveexecB64
        | Op::SAndn1SaveexecB64
        | Op::SOrn1SaveexecB64 => {
            let (source, before) = (w(), wave.exec());
            let exec = match inst.op {
                Op::SAndSaveexecB64 => source & before,
                Op::SOrSaveexecB64 => source | before,
                Op::SXorSaveexecB64 => source ^ before,
                Op::SAndn2SaveexecB64 => source & !before,
                Op::SOrn2SaveexecB64 => source | !before,
                Op::SNandSaveexecB64 => !(source & before),
                Op::SNorSaveexecB64 => !(source | before),
                Op::SXnorSaveexecB64 => !(source ^ before),
                Op::SAndn1SaveexecB64 => !source & before,
                _ => !source | before,
            };
            wave.set_sgpr64(to, before);
            wave.set_exec(exec);
            wave.scc = exec != 0;
        }
        Op::SAndn1WrexecB64 | Op::SAndn2WrexecB64 => {
            let (source, before) = (w(), wave.exec());
            let exec = if inst.op == Op::SAndn1WrexecB64 { !source & before } else { source & !before };
            wave.set_exec(exec);
            set64(wave, inst, exec);
        }
        Op::SQuadmaskB32 => {
            let quads = quads(u64::from(a()));
            set32(wave, inst, compress(quads) as u32);
        }
        Op::SQuadmaskB64 => set64(wave, inst, compress(quads(w()))),
        Op::SMovrelsB32 | Op::SMovrelsB64 => {
            let Src::Sgpr(from) = s0 else { return Err(Stop::Illegal) };
            let from = relative(wave, from)?;
            match inst.op {
                Op::SMovrelsB32 => wave.set_sgpr(to, wave.sgpr(from)),
                _ => wave.set_sgpr64(to, wave.sgpr64(from)),
            }
        }
        Op::SMovreldB32 => {
            let value = a();
            wave.set_sgpr(relative(wave, to)?, value);
        }
        Op::SMovreldB64 => {
            let value = w();
            wave.set_sgpr64(relative(wave, to)?, value);
        }
        Op::SAbsI32 => set32(wave, inst, (a() as i32).unsigned_abs()),
        Op::SSetGprIdxIdx => wave.set_sgpr(reg::M0, wave.m0() & !0xff | a() & 0xff),
        Op::SBitreplicateB64B32 => {
            let mut value = 0u64;
            for bit in 0..32 {
                value |= u64::from(a() >> bit & 1) * (3 << (2 * bit));
            }
            wave.set_sgpr64(to, value);
        }
        _ => return Err(Stop::not_supported(inst.op)),
    }
    Ok(())
}

/// Every fourth bit, next to each other.
fn compress(quads: u64) -> u64 {
    (0..16).fold(0, |mask, quad| mask | (quads >> (4 * quad) & 1) << quad)
}

/// A general register behind another by M0.
fn relative(wave: &Wave, base: u8) -> Result<u8, Stop> {
    let number = u32::from(base).saturating_add(wave.m0());
    u8::try_from(number).ok().filter(|number| *number < reg::FLAT_SCRATCH).ok_or(Stop::Illegal)
}

fn sopc(wave: &mut Wave, inst: &Inst) -> Result<(), Stop> {
    let [s0, s1, ..] = inst.src;
    let (a, b) = (read32(wave, s0), read32(wave, s1));
    wave.scc = match inst.op {
        Op::SCmpEqI32 | Op::SCmpEqU32 => a == b,
        Op::SCmpLgI32 | Op::SCmpLgU32 => a != b,
        Op::SCmpGtI32 => (a as i32) > b as i32,
        Op::SCmpGeI32 => a as i32 >= b as i32,
        Op::SCmpLtI32 => (a as i32) < b as i32,
        Op::SCmpLeI32 => a as i32 <= b as i32,
        Op::SCmpGtU32 => a > b,
        Op::SCmpGeU32 => a >= b,
        Op::SCmpLtU32 => a < b,
        Op::SCmpLeU32 => a <= b,
        Op::SBitcmp0B32 => a >> (b & 31) & 1 == 0,
        Op::SBitcmp1B32 => a >> (b & 31) & 1 == 1,
        Op::SBitcmp0B64 => read64(wave, s0) >> (b & 63) & 1 == 0,
        Op::SBitcmp1B64 => read64(wave, s0) >> (b & 63) & 1 == 1,
        Op::SCmpEqU64 => read64(wave, s0) == read64(wave, s1),
        Op::SCmpLgU64 => read64(wave, s0) != read64(wave, s1),
        Op::SSetGprIdxOn => {
            wave.mode = Mode(wave.mode.0 | Mode::GPR_IDX_EN);
            wave.set_sgpr(reg::M0, wave.m0() & !0xf0ff | a & 0xff | (inst.imm as u32 & 0xf) << 12);
            return Ok(());
        }
        _ => return Err(Stop::not_supported(inst.op)),
    };
    Ok(())
}

fn sopk(wave: &mut Wave, inst: &Inst) -> Result<(), Stop> {
    let [s0, ..] = inst.src;
    let to = destination(inst);
    let signed = inst.imm;
    let unsigned = inst.imm as u32 & 0xffff;
    let a = || read32(wave, s0);
    match inst.op {
        Op::SMovkI32 => wave.set_sgpr(to, signed as u32),
        Op::SCmovkI32 => {
            if wave.scc {
                wave.set_sgpr(to, signed as u32);
            }
        }
        Op::SCmpkEqI32 => wave.scc = a() as i32 == signed,
        Op::SCmpkLgI32 => wave.scc = a() as i32 != signed,
        Op::SCmpkGtI32 => wave.scc = a() as i32 > signed,
        Op::SCmpkGeI32 => wave.scc = a() as i32 >= signed,
        Op::SCmpkLtI32 => wave.scc = (a() as i32) < signed,
        Op::SCmpkLeI32 => wave.scc = a() as i32 <= signed,
        Op::SCmpkEqU32 => wave.scc = a() == unsigned,
        Op::SCmpkLgU32 => wave.scc = a() != unsigned,
        Op::SCmpkGtU32 => wave.scc = a() > unsigned,
        Op::SCmpkGeU32 => wave.scc = a() >= unsigned,
        Op::SCmpkLtU32 => wave.scc = a() < unsigned,
        Op::SCmpkLeU32 => wave.scc = a() <= unsigned,
        Op::SAddkI32 => {
            let (value, overflow) = (wave.sgpr(to) as i32).overflowing_add(signed);
            carried(wave, inst, (value as u32, overflow));
        }
        Op::SMulkI32 => wave.set_sgpr(to, wave.sgpr(to).wrapping_mul(signed as u32)),
        Op::SGetregB32 => {
            let value = hwreg::get(wave, inst.hwreg());
            wave.set_sgpr(to, value);
        }
        Op::SSetregB32 | Op::SSetregImm32B32 => {
            let value = a();
            hwreg::set(wave, inst.hwreg(), value);
        }
        Op::SCallB64 => {
            let target = wave.pc.wrapping_add_signed(i64::from(signed) * 4);
            wave.set_sgpr64(to, wave.pc);
            wave.pc = target;
        }
        _ => return Err(Stop::not_supported(inst.op)),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
