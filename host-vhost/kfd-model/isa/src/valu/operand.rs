//! Operands that are not plain registers: constants, scalar registers, modifiers, SDWA, DPP, flushed denormals; and
//! results with output modifiers.
//!
//! These paths copy rows; the fast path in [`super::lanes`] avoids them.

use super::half;
use super::lanes::{at, each, join, split};
use crate::inst::{Dpp, DppCtrl, Dst, Inst, Omod, Sdwa, Sel, Src, SubWord, Unused};
use crate::op::{Encoding, Kind, Op};
use crate::wave::{Denorm, LANES, Row, Wave};

const SIGN16: u32 = 0x8000;
const SIGN32: u32 = 0x8000_0000;
const SIGN64: u64 = 1 << 63;

/// 16-bit operations whose result leaves the upper half of the destination as it is; the others write zeros there
/// (LLVM, `GCNSubtarget::zeroesHigh16BitsOfDest`: GFX9 keeps the older rule, except for the operations that are new in
/// it and for those that accumulate).
pub(super) fn preserves_high_half(op: Op) -> bool {
    matches!(
        op,
        Op::VMacF16
            | Op::VMadmkF16
            | Op::VMadakF16
            | Op::VMadF16
            | Op::VMadU16
            | Op::VMadI16
            | Op::VFmaF16
            | Op::VDivFixupF16
            | Op::VMin3F16
            | Op::VMin3I16
            | Op::VMin3U16
            | Op::VMax3F16
            | Op::VMax3I16
            | Op::VMax3U16
            | Op::VMed3F16
            | Op::VMed3I16
            | Op::VMed3U16
            | Op::VAddI16
            | Op::VSubI16
            | Op::VFmaMixloF16
            | Op::VMadMixloF16
    )
}

/// The value of a source that is the same in all lanes; `None` if it is a vector register.
fn scalar(wave: &Wave, src: Src, kind: Kind) -> Option<u64> {
    let wide = matches!(kind, Kind::I64 | Kind::F64 | Kind::Mask);
    let aperture = |address: u64| if wide { address } else { address & 0xffff_ffff };
    Some(match src {
        Src::Vgpr(_) => return None,
        Src::Sgpr(n) if wide => wave.sgpr64(n),
        Src::Sgpr(n) => u64::from(wave.sgpr(n)),
        Src::SharedBase => aperture(wave.apertures.shared_base),
        Src::SharedLimit => aperture(wave.apertures.shared_limit),
        Src::PrivateBase => aperture(wave.apertures.private_base),
        Src::PrivateLimit => aperture(wave.apertures.private_limit),
        Src::Vccz => u64::from(wave.vcc() == 0),
        Src::Execz => u64::from(wave.exec() == 0),
        Src::Scc => u64::from(wave.scc),
        Src::PopsExitingWaveId | Src::LdsDirect | Src::None => 0,
        Src::Int(_) | Src::Float(_) | Src::Literal(_) => src.constant(kind).unwrap_or_default(),
    })
}

/// A 32-bit source without any modifier.
pub(super) fn raw32(wave: &Wave, inst: &Inst, index: usize, kind: Kind) -> Row {
    let src = inst.src.get(index).copied().unwrap_or_default();
    match (src, scalar(wave, src, kind)) {
        (_, Some(value)) => Row::splat(value as u32),
        (Src::Vgpr(n), None) => *wave.row(n),
        _ => Row::ZERO,
    }
}

/// A source of 32 bits or fewer, with everything that the instruction asks for.
pub(super) fn fetch32(wave: &Wave, inst: &Inst, index: usize, kind: Kind) -> Row {
    let mut row = raw32(wave, inst, index, kind);
    match &inst.sub {
        SubWord::None => {}
        SubWord::Sdwa(sdwa) => select(&mut row, sdwa, index),
        SubWord::Dpp(dpp) if index == 0 => row = permute(wave, &row, dpp),
        SubWord::Dpp(_) => {}
    }
    let bit = 1u8 << index;
    if inst.encoding == Encoding::Vop3
        && inst.modifiers.op_sel & bit != 0
        && matches!(kind, Kind::F16 | Kind::I16)
    {
        row = Row(each(|lane| at(&row.0, lane) >> 16));
    }
    let (abs, neg) = (inst.modifiers.abs & bit != 0, inst.modifiers.neg & bit != 0);
    let flush = |denorm: Denorm| denorm.flush_in && !keeps_denormals(inst.op);
    match kind {
        Kind::F16 => {
            if flush(wave.mode.denorm64()) {
                row = Row(each(|lane| half::flush(at(&row.0, lane))));
            }
            signs(&mut row, abs, neg, SIGN16);
        }
        Kind::F32 => {
            if flush(wave.mode.denorm32()) {
                row = Row(each(|lane| flush32(at(&row.0, lane))));
            }
            signs(&mut row, abs, neg, SIGN32);
        }
        // v_cndmask_b32 takes the modifiers of a float without being one.
        Kind::I32 if inst.op == Op::VCndmaskB32 => signs(&mut row, abs, neg, SIGN32),
        _ => {}
    }
    row
}

/// Operations on floats that do no arithmetic, so that denormals stay.
fn keeps_denormals(op: Op) -> bool {
    matches!(
        op,
        Op::VCmpClassF16
            | Op::VCmpClassF32
            | Op::VCmpClassF64
            | Op::VCmpxClassF16
            | Op::VCmpxClassF32
            | Op::VCmpxClassF64
            | Op::VPackB32F16
            | Op::VTrigPreopF64
    )
}

/// The operations with a signed source of 64 bits that may be a literal, which keeps its sign there: VOP3 has no room for one.
fn compares_signed(op: Op) -> bool {
    matches!(
        op,
        Op::VCmpLtI64
            | Op::VCmpEqI64
            | Op::VCmpLeI64
            | Op::VCmpGtI64
            | Op::VCmpNeI64
            | Op::VCmpGeI64
            | Op::VCmpxLtI64
            | Op::VCmpxEqI64
            | Op::VCmpxLeI64
            | Op::VCmpxGtI64
            | Op::VCmpxNeI64
            | Op::VCmpxGeI64
    )
}

fn signs(row: &mut Row, abs: bool, neg: bool, sign: u32) {
    if abs {
        *row = Row(each(|lane| at(&row.0, lane) & !sign));
    }
    if neg {
        *row = Row(each(|lane| at(&row.0, lane) ^ sign));
    }
}

/// The f32 bits with a denormal replaced by zero of the same sign.
#[inline(always)]
pub(super) fn flush32(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0 { bits & SIGN32 } else { bits }
}

/// The f64 bits with a denormal replaced by zero of the same sign.
#[inline(always)]
pub(super) fn flush64(bits: u64) -> u64 {
    if bits & 0x7ff << 52 == 0 { bits & SIGN64 } else { bits }
}

/// A source of 64 bits, with everything that the instruction asks for.
pub(super) fn fetch64(wave: &Wave, inst: &Inst, index: usize, kind: Kind) -> (Row, Row) {
    let src = inst.src.get(index).copied().unwrap_or_default();
    let mut lanes = match (src, scalar(wave, src, kind)) {
        (Src::Literal(value), _) if compares_signed(inst.op) => {
            [i64::from(value.cast_signed()).cast_unsigned(); LANES]
        }
        (_, Some(value)) => [value; LANES],
        (Src::Vgpr(n), None) => join(wave.row(n), wave.row_at(usize::from(n) + 1)),
        _ => [0; LANES],
    };
    let bit = 1u8 << index;
    if kind == Kind::F64 {
        if wave.mode.denorm64().flush_in && !keeps_denormals(inst.op) {
            lanes = each(|lane| flush64(at(&lanes, lane)));
        }
        if inst.modifiers.abs & bit != 0 {
            lanes = each(|lane| at(&lanes, lane) & !SIGN64);
        }
        if inst.modifiers.neg & bit != 0 {
            lanes = each(|lane| at(&lanes, lane) ^ SIGN64);
        }
    }
    split(&lanes)
}

/// A mask, one bit a lane: an SGPR pair or a constant.
#[inline(always)]
pub(super) fn fetch_mask(wave: &Wave, inst: &Inst, index: usize) -> u64 {
    match inst.src.get(index) {
        Some(Src::Sgpr(n)) => wave.sgpr64(*n),
        Some(src) => scalar(wave, *src, Kind::Mask).unwrap_or_default(),
        None => 0,
    }
}

/// The part of a dword that SDWA reads.
fn select(row: &mut Row, sdwa: &Sdwa, index: usize) {
    let Some(sel) = sdwa.src_sel.get(index) else { return };
    let Some((shift, bits)) = part(*sel) else { return };
    let up = 32 - bits;
    *row = if sdwa.sext & 1 << index != 0 {
        Row(each(|lane| (((at(&row.0, lane) >> shift) << up) as i32 >> up) as u32))
    } else {
        Row(each(|lane| ((at(&row.0, lane) >> shift) << up) >> up))
    };
}

/// Lowest bit and width of a part; `None` for the whole dword.
fn part(sel: Sel) -> Option<(u32, u32)> {
    Some(match sel {
        Sel::Byte0 => (0, 8),
        Sel::Byte1 => (8, 8),
        Sel::Byte2 => (16, 8),
        Sel::Byte3 => (24, 8),
        Sel::Word0 => (0, 16),
        Sel::Word1 => (16, 16),
        Sel::Dword => return None,
    })
}

/// The lane that `lane` reads, or `None` if there is no such lane.
fn source_lane(ctrl: DppCtrl, lane: usize) -> Option<usize> {
    let (row, place) = (lane & !15, lane & 15);
    match ctrl {
        DppCtrl::QuadPerm(lanes) => Some(lane & !3 | usize::from(lanes >> (2 * (lane & 3)) & 3)),
        DppCtrl::RowShl(n) => {
            Some(place + usize::from(n)).filter(|place| *place < 16).map(|place| row | place)
        }
        DppCtrl::RowShr(n) => place.checked_sub(usize::from(n)).map(|place| row | place),
        DppCtrl::RowRor(n) => Some(row | (place + 16 - usize::from(n & 15)) & 15),
        DppCtrl::WaveShl1 => Some(lane + 1).filter(|lane| *lane < LANES),
        DppCtrl::WaveRol1 => Some((lane + 1) % LANES),
        DppCtrl::WaveShr1 => lane.checked_sub(1),
        DppCtrl::WaveRor1 => Some((lane + LANES - 1) % LANES),
        DppCtrl::RowMirror => Some(row | (15 - place)),
        DppCtrl::RowHalfMirror => Some(lane & !7 | (7 - (lane & 7))),
        DppCtrl::RowBcast15 => row.checked_sub(1),
        DppCtrl::RowBcast31 => (lane >= 32).then_some(31),
    }
}

/// What each lane reads of another one; 0 where there is none or where it is off.
fn permute(wave: &Wave, row: &Row, dpp: &Dpp) -> Row {
    let exec = wave.exec();
    Row(each(|lane| match source_lane(dpp.ctrl, lane) {
        Some(from) if exec >> from & 1 == 1 => row.lane(from),
        _ => 0,
    }))
}

/// The lanes that an instruction writes: EXEC, without the rows and banks that DPP masks, and without lanes that read
/// where there is nothing, unless they are to read zero (BOUND_CTRL).
pub(super) fn enabled(wave: &Wave, inst: &Inst) -> u64 {
    let exec = wave.exec();
    let SubWord::Dpp(dpp) = &inst.sub else { return exec };
    let mut lanes = 0;
    for lane in 0..LANES {
        let masked = dpp.row_mask >> (lane / 16) & 1 == 1 && dpp.bank_mask >> (lane / 4 % 4) & 1 == 1;
        let valid = source_lane(dpp.ctrl, lane).is_some_and(|from| exec >> from & 1 == 1);
        if masked && (valid || dpp.bound_ctrl) {
            lanes |= 1 << lane;
        }
    }
    lanes & exec
}

/// Writes a result of 32 bits or fewer.
pub(super) fn store32(wave: &mut Wave, inst: &Inst, kind: Kind, result: &Row) {
    let Dst::Vgpr(n) = inst.dst else { return };
    let lanes = enabled(wave, inst);
    let mut row = *result;
    match kind {
        Kind::F32 => finish32(wave, inst, &mut row),
        Kind::F16 => finish16(wave, inst, &mut row),
        _ => {}
    }
    let old = wave.row(n);
    match &inst.sub {
        SubWord::Sdwa(sdwa) => row = insert(&row, old, sdwa),
        _ if matches!(kind, Kind::F16 | Kind::I16) => {
            let high = inst.encoding == Encoding::Vop3 && inst.modifiers.op_sel & 8 != 0;
            if high {
                row = Row(each(|lane| at(&row.0, lane) << 16 | at(&old.0, lane) & 0xffff));
            } else if preserves_high_half(inst.op) {
                row = Row(each(|lane| at(&row.0, lane) & 0xffff | at(&old.0, lane) & 0xffff_0000));
            }
        }
        _ => {}
    }
    wave.write_masked(lanes, usize::from(n), &row);
}

/// Where SDWA puts a result.
fn insert(result: &Row, old: &Row, sdwa: &Sdwa) -> Row {
    let Some((shift, bits)) = part(sdwa.dst_sel) else { return *result };
    let mask = (u32::MAX >> (32 - bits)) << shift;
    let placed = |lane: usize| at(&result.0, lane) << shift & mask;
    match sdwa.dst_unused {
        Unused::Pad => Row(each(placed)),
        Unused::Sext => {
            let up = 32 - bits - shift;
            Row(each(|lane| ((placed(lane) << up) as i32 >> up) as u32))
        }
        Unused::Preserve => Row(each(|lane| placed(lane) | at(&old.0, lane) & !mask)),
    }
}

/// Output modifiers do nothing where denormal results are kept or IEEE mode is on (AMD "Vega" ISA, "Output modifiers").
fn omod(wave: &Wave, inst: &Inst, denorm: Denorm) -> Option<f32> {
    if !denorm.flush_out || wave.mode.ieee() {
        return None;
    }
    match inst.modifiers.omod {
        Omod::None => None,
        Omod::Mul2 => Some(2.0),
        Omod::Mul4 => Some(4.0),
        Omod::Div2 => Some(0.5),
    }
}

fn finish32(wave: &Wave, inst: &Inst, row: &mut Row) {
    let denorm = wave.mode.denorm32();
    if denorm.flush_out && !keeps_denormals(inst.op) {
        *row = Row(each(|lane| flush32(at(&row.0, lane))));
    }
    if let Some(factor) = omod(wave, inst, denorm) {
        // The sign of a zero is lost.
        *row = Row(each(|lane| {
            (f32::from_bits(flush32((f32::from_bits(at(&row.0, lane)) * factor).to_bits())) + 0.0).to_bits()
        }));
    }
    if inst.modifiers.clamp {
        let dx10 = wave.mode.dx10_clamp();
        *row = Row(each(|lane| clamp32(f32::from_bits(at(&row.0, lane)), dx10).to_bits()));
    }
}

fn finish16(wave: &Wave, inst: &Inst, row: &mut Row) {
    let denorm = wave.mode.denorm64();
    if denorm.flush_out && !keeps_denormals(inst.op) {
        *row = Row(each(|lane| half::flush(at(&row.0, lane))));
    }
    if let Some(factor) = omod(wave, inst, denorm) {
        *row = Row(each(|lane| half::flush(half::from_f32(half::to_f32(at(&row.0, lane)) * factor + 0.0))));
    }
    if inst.modifiers.clamp {
        let dx10 = wave.mode.dx10_clamp();
        *row = Row(each(|lane| half::from_f32(clamp32(half::to_f32(at(&row.0, lane)), dx10))));
    }
}

/// The value limited to 0..=1; a NaN becomes 0 if DX10_CLAMP is set.
#[inline(always)]
pub(super) fn clamp32(value: f32, dx10: bool) -> f32 {
    if value.is_nan() {
        return if dx10 { 0.0 } else { value };
    }
    // Written such that -0 becomes +0.
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// The value limited to 0..=1; a NaN becomes 0 if DX10_CLAMP is set.
#[inline(always)]
fn clamp64(value: f64, dx10: bool) -> f64 {
    if value.is_nan() {
        return if dx10 { 0.0 } else { value };
    }
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// Writes a result of 64 bits.
pub(super) fn store64(wave: &mut Wave, inst: &Inst, kind: Kind, result: &[u64; LANES]) {
    let Dst::Vgpr(n) = inst.dst else { return };
    let mut lanes = *result;
    if kind == Kind::F64 {
        let denorm = wave.mode.denorm64();
        if denorm.flush_out && !keeps_denormals(inst.op) {
            lanes = each(|lane| flush64(at(&lanes, lane)));
        }
        if let Some(factor) = omod(wave, inst, denorm) {
            let factor = f64::from(factor);
            lanes = each(|lane| {
                (f64::from_bits(flush64((f64::from_bits(at(&lanes, lane)) * factor).to_bits())) + 0.0)
                    .to_bits()
            });
        }
        if inst.modifiers.clamp {
            let dx10 = wave.mode.dx10_clamp();
            lanes = each(|lane| clamp64(f64::from_bits(at(&lanes, lane)), dx10).to_bits());
        }
    }
    let (low, high) = split(&lanes);
    let enabled = enabled(wave, inst);
    wave.write_masked(enabled, usize::from(n), &low);
    wave.write_masked(enabled, usize::from(n) + 1, &high);
}
