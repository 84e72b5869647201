//! Integer operations with 64-bit or wider operands.

use super::Handler;
use super::integer::{masked_sad_u8, sad_u8};
use super::lanes::{at, each, join, op2, op3, op3_flag};
use super::operand::{fetch32, fetch64};
use crate::inst::{Dst, Inst, Src};
use crate::op::{Kind, Op};
use crate::wave::{Row, Wave};

/// The handler of an opcode of this module.
pub(super) const fn handler(op: Op) -> Option<Handler> {
    Some(match op {
        Op::VLshlrevB64 => |w, i| op2(w, i, |a: u32, b: u64| b << (a & 63)),
        Op::VLshrrevB64 => |w, i| op2(w, i, |a: u32, b: u64| b >> (a & 63)),
        Op::VAshrrevI64 => |w, i| op2(w, i, |a: u32, b: u64| (b as i64 >> (a & 63)) as u64),
        Op::VMadU64U32 => |w, i| {
            let clamp = i.modifiers.clamp;
            op3_flag(w, i, move |a: u32, b: u32, c: u64| {
                let (value, carry) = (u64::from(a) * u64::from(b)).overflowing_add(c);
                (if clamp && carry { u64::MAX } else { value }, carry)
            });
        },
        Op::VMadI64I32 => |w, i| {
            let clamp = i.modifiers.clamp;
            op3_flag(w, i, move |a: u32, b: u32, c: u64| {
                let product = i64::from(a as i32) * i64::from(b as i32);
                let (value, overflow) = product.overflowing_add(c as i64);
                let value = if clamp { product.saturating_add(c as i64) } else { value };
                (value as u64, overflow)
            });
        },
        Op::VQsadPkU16U8 => |w, i| packed_sad(w, i, sad_u8),
        Op::VMqsadPkU16U8 => |w, i| packed_sad(w, i, masked_sad_u8),
        Op::VMqsadU32U8 => mqsad_u32,
        _ => return None,
    })
}

/// Four sums of absolute differences of the bytes of `src[1]` and four bytes of `src[0]`, which start one byte further
/// each time, added to the 16-bit parts of `src[2]`; CLAMP saturates.
#[inline(always)]
fn packed_sad(wave: &mut Wave, inst: &Inst, sad: impl Fn(u32, u32) -> u32) {
    let clamp = inst.modifiers.clamp;
    op3(wave, inst, move |a: u64, b: u32, c: u64| {
        let part = |n: u32| {
            let total = sad((a >> (8 * n)) as u32, b) + (c >> (16 * n) & 0xffff) as u32;
            u64::from(if clamp { total.min(0xffff) } else { total & 0xffff }) << (16 * n)
        };
        part(0) | part(1) | part(2) | part(3)
    });
}

/// V_MQSAD_U32_U8: as [`packed_sad`] with 32-bit parts in four registers.
fn mqsad_u32(wave: &mut Wave, inst: &Inst) {
    let (Dst::Vgpr(dst), Src::Vgpr(third)) = (inst.dst, inst.src.get(2).copied().unwrap_or_default()) else {
        return;
    };
    let (low, high) = fetch64(wave, inst, 0, Kind::I64);
    let a = join(&low, &high);
    let b = fetch32(wave, inst, 1, Kind::I32);
    let sums: [Row; 4] = std::array::from_fn(|part| {
        let c = *wave.row_at(usize::from(third) + part);
        Row(each(|lane| {
            let sad = masked_sad_u8((at(&a, lane) >> (8 * part)) as u32, b.lane(lane));
            if inst.modifiers.clamp {
                sad.saturating_add(c.lane(lane))
            } else {
                sad.wrapping_add(c.lane(lane))
            }
        }))
    });
    for (part, row) in sums.iter().enumerate() {
        wave.write_row(usize::from(dst) + part, row);
    }
}
