//! Running a function over the lanes of a wave.
//!
//! [`op1`] to [`op3`] fetch the rows of an instruction's sources, apply a function lane by lane in one loop that the
//! compiler vectorises, and write the lanes that EXEC switches on. The loop is compiled several times, for the vector
//! units that CPUs have, and the best is chosen at run time (crate `pulp`). An instruction without modifiers in a plain
//! mode reads its registers in place; all others go through copies that [`super::operand`] prepares.

use pulp::NullaryFnOnce;

use super::operand;
use crate::inst::{Dst, Inst, Omod, Src, SubWord};
use crate::op::{Kind, Op};
use crate::wave::{LANES, Row, Wave, lanes_of, mask_row};

/// What a lane of an operand is to an operation: the type says how the bits are read and which modifiers apply.
pub(super) trait Lane: Copy {
    /// The registers that hold it.
    type Bits: Bits;
    /// Its kind, for constants and modifiers.
    const KIND: Kind;
    /// From the bits in the registers.
    fn from_bits(bits: Self::Bits) -> Self;
    /// To the bits in the registers.
    fn to_bits(self) -> Self::Bits;
}

/// An f16 as the f32 of the same value.
#[derive(Clone, Copy)]
pub(super) struct Half(pub f32);

/// An f16 as its bits.
#[derive(Clone, Copy)]
pub(super) struct HalfBits(pub u32);

/// A 16-bit integer in the low half; the upper half is undefined for sources and dropped for results.
#[derive(Clone, Copy)]
pub(super) struct Short(pub u32);

impl Lane for u32 {
    type Bits = u32;
    const KIND: Kind = Kind::I32;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        bits
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self
    }
}

impl Lane for f32 {
    type Bits = u32;
    const KIND: Kind = Kind::F32;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        f32::to_bits(self)
    }
}

impl Lane for Half {
    type Bits = u32;
    const KIND: Kind = Kind::F16;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Half(super::half::to_f32(bits))
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        super::half::from_f32(self.0)
    }
}

impl Lane for Short {
    type Bits = u32;
    const KIND: Kind = Kind::I16;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Short(bits)
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self.0 & 0xffff
    }
}

impl Lane for HalfBits {
    type Bits = u32;
    const KIND: Kind = Kind::F16;
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        HalfBits(bits & 0xffff)
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self.0
    }
}

impl Lane for u64 {
    type Bits = u64;
    const KIND: Kind = Kind::I64;
    #[inline(always)]
    fn from_bits(bits: u64) -> Self {
        bits
    }
    #[inline(always)]
    fn to_bits(self) -> u64 {
        self
    }
}

impl Lane for f64 {
    type Bits = u64;
    const KIND: Kind = Kind::F64;
    #[inline(always)]
    fn from_bits(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    #[inline(always)]
    fn to_bits(self) -> u64 {
        f64::to_bits(self)
    }
}

/// The lanes of one source.
pub(super) enum Lanes<'a, T> {
    /// In a register.
    Register(&'a [T; LANES]),
    /// Prepared.
    Copy([T; LANES]),
}

impl<T> Lanes<'_, T> {
    #[inline(always)]
    pub(super) fn get(&self) -> &[T; LANES] {
        match self {
            Lanes::Register(lanes) => lanes,
            Lanes::Copy(lanes) => lanes,
        }
    }
}

/// One or two registers' worth of bits in a lane.
pub(super) trait Bits: Copy + Default {
    /// The lanes of `src[index]`.
    fn fetch<'a>(wave: &'a Wave, inst: &Inst, index: usize, kind: Kind, plain: bool) -> Lanes<'a, Self>;
    /// Writes the lanes that EXEC switches on.
    fn store(wave: &mut Wave, inst: &Inst, kind: Kind, plain: bool, lanes: &[Self; LANES]);
}

impl Bits for u32 {
    #[inline(always)]
    fn fetch<'a>(wave: &'a Wave, inst: &Inst, index: usize, kind: Kind, plain: bool) -> Lanes<'a, u32> {
        match inst.src.get(index) {
            Some(Src::Vgpr(n)) if plain => Lanes::Register(&wave.row(*n).0),
            Some(Src::Sgpr(n)) if plain => Lanes::Copy([wave.sgpr(*n); LANES]),
            _ => Lanes::Copy(operand::fetch32(wave, inst, index, kind).0),
        }
    }

    #[inline(always)]
    fn store(wave: &mut Wave, inst: &Inst, kind: Kind, plain: bool, lanes: &[u32; LANES]) {
        match inst.dst {
            Dst::Vgpr(n) if plain => wave.write_row(usize::from(n), &Row(*lanes)),
            _ => operand::store32(wave, inst, kind, &Row(*lanes)),
        }
    }
}

impl Bits for u64 {
    #[inline(always)]
    fn fetch<'a>(wave: &'a Wave, inst: &Inst, index: usize, kind: Kind, plain: bool) -> Lanes<'a, u64> {
        match inst.src.get(index) {
            Some(Src::Vgpr(n)) if plain => {
                let (low, high) = (wave.row(*n), wave.row_at(usize::from(*n) + 1));
                Lanes::Copy(join(low, high))
            }
            _ => Lanes::Copy(operand::fetch64(wave, inst, index, kind)),
        }
    }

    #[inline(always)]
    fn store(wave: &mut Wave, inst: &Inst, kind: Kind, plain: bool, lanes: &[u64; LANES]) {
        let Dst::Vgpr(n) = inst.dst else { return };
        if !plain {
            return operand::store64(wave, inst, kind, lanes);
        }
        let (low, high) = split(lanes);
        wave.write_row(usize::from(n), &low);
        wave.write_row(usize::from(n) + 1, &high);
    }
}

/// Two rows as one of twice the width.
#[inline(always)]
pub(super) fn join(low: &Row, high: &Row) -> [u64; LANES] {
    each(|lane| u64::from(at(&low.0, lane)) | u64::from(at(&high.0, lane)) << 32)
}

/// The two rows of a wide one.
#[inline(always)]
pub(super) fn split(lanes: &[u64; LANES]) -> (Row, Row) {
    (Row(each(|lane| at(lanes, lane) as u32)), Row(each(|lane| (at(lanes, lane) >> 32) as u32)))
}

/// The element of a lane; the check falls away, as lanes come from [`each`].
#[inline(always)]
pub(super) fn at<T: Copy + Default>(lanes: &[T; LANES], lane: usize) -> T {
    lanes.get(lane).copied().unwrap_or_default()
}

/// Computes all lanes.
#[inline(always)]
pub(super) fn each<T>(f: impl FnMut(usize) -> T) -> [T; LANES] {
    std::array::from_fn(f)
}

/// Whether nothing but the operation itself is asked for, so that registers can be read and written in place.
#[inline(always)]
pub(super) fn is_plain(wave: &Wave, inst: &Inst, kinds: &[Kind], out: Kind) -> bool {
    let float = out.is_float() || kinds.iter().any(|kind| kind.is_float());
    let m = &inst.modifiers;
    matches!(inst.sub, SubWord::None)
        && (m.abs | m.neg | m.op_sel) == 0
        && !m.clamp
        && matches!(m.omod, Omod::None)
        && (!float || wave.mode.is_plain())
        && (!matches!(out, Kind::F16 | Kind::I16) || !operand::preserves_high_half(inst.op))
}

struct Op1<'a, F> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    kinds: [Kind; 1],
    out: Kind,
    f: F,
}

impl<A: Bits, R: Bits, F: Fn(A) -> R> NullaryFnOnce for Call<Op1<'_, F>, fn(A) -> R> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Op1 { wave, inst, kinds, out, f } = self.0;
        let plain = is_plain(wave, inst, &kinds, out);
        let result = {
            let [ka] = kinds;
            let a = A::fetch(wave, inst, 0, ka, plain);
            let a = a.get();
            each(|lane| f(at(a, lane)))
        };
        R::store(wave, inst, out, plain, &result);
    }
}

struct Op2<'a, F> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    kinds: [Kind; 2],
    out: Kind,
    f: F,
}

impl<A: Bits, B: Bits, R: Bits, F: Fn(usize, A, B) -> R> NullaryFnOnce for Call<Op2<'_, F>, fn(A, B) -> R> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Op2 { wave, inst, kinds, out, f } = self.0;
        let plain = is_plain(wave, inst, &kinds, out);
        let result = {
            let [ka, kb] = kinds;
            let a = A::fetch(wave, inst, 0, ka, plain);
            let b = B::fetch(wave, inst, 1, kb, plain);
            let (a, b) = (a.get(), b.get());
            each(|lane| f(lane, at(a, lane), at(b, lane)))
        };
        R::store(wave, inst, out, plain, &result);
    }
}

struct Op3<'a, F> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    kinds: [Kind; 3],
    out: Kind,
    f: F,
}

impl<A: Bits, B: Bits, C: Bits, R: Bits, F: Fn(A, B, C) -> R> NullaryFnOnce
    for Call<Op3<'_, F>, fn(A, B, C) -> R>
{
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Op3 { wave, inst, kinds, out, f } = self.0;
        let plain = is_plain(wave, inst, &kinds, out);
        let result = {
            let [ka, kb, kc] = kinds;
            let a = A::fetch(wave, inst, 0, ka, plain);
            let b = B::fetch(wave, inst, 1, kb, plain);
            let c = C::fetch(wave, inst, 2, kc, plain);
            let (a, b, c) = (a.get(), b.get(), c.get());
            each(|lane| f(at(a, lane), at(b, lane), at(c, lane)))
        };
        R::store(wave, inst, out, plain, &result);
    }
}

/// What is called, with the types of its function.
struct Call<O, F>(O, std::marker::PhantomData<F>);

/// Runs `call` compiled for the CPU's vector unit.
#[inline(always)]
pub(super) fn vectorised<T>(call: impl NullaryFnOnce<Output = T>) -> T {
    pulp::Arch::new().dispatch(call)
}

/// One source.
#[inline(always)]
pub(super) fn op1<A: Lane, R: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(A) -> R) {
    let f = move |a: A::Bits| f(A::from_bits(a)).to_bits();
    let op = Op1 { wave, inst, kinds: [A::KIND], out: R::KIND, f };
    vectorised(Call::<_, fn(A::Bits) -> R::Bits>(op, std::marker::PhantomData));
}

/// Two sources.
#[inline(always)]
pub(super) fn op2<A: Lane, B: Lane, R: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(A, B) -> R) {
    op2_lane(wave, inst, move |_, a, b| f(a, b));
}

/// Two sources and the number of the lane.
#[inline(always)]
pub(super) fn op2_lane<A: Lane, B: Lane, R: Lane>(
    wave: &mut Wave,
    inst: &Inst,
    f: impl Fn(usize, A, B) -> R,
) {
    let f = move |lane: usize, a: A::Bits, b: B::Bits| f(lane, A::from_bits(a), B::from_bits(b)).to_bits();
    let op = Op2 { wave, inst, kinds: [A::KIND, B::KIND], out: R::KIND, f };
    vectorised(Call::<_, fn(A::Bits, B::Bits) -> R::Bits>(op, std::marker::PhantomData));
}

/// Three sources.
#[inline(always)]
pub(super) fn op3<A: Lane, B: Lane, C: Lane, R: Lane>(
    wave: &mut Wave,
    inst: &Inst,
    f: impl Fn(A, B, C) -> R,
) {
    let f = move |a: A::Bits, b: B::Bits, c: C::Bits| {
        f(A::from_bits(a), B::from_bits(b), C::from_bits(c)).to_bits()
    };
    let op = Op3 { wave, inst, kinds: [A::KIND, B::KIND, C::KIND], out: R::KIND, f };
    vectorised(Call::<_, fn(A::Bits, B::Bits, C::Bits) -> R::Bits>(op, std::marker::PhantomData));
}

/// All ones or zero.
#[inline(always)]
pub(super) fn ones(set: bool) -> u32 {
    if set { u32::MAX } else { 0 }
}

struct Compare<'a, F> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    kinds: [Kind; 2],
    f: F,
}

impl<A: Bits, B: Bits, F: Fn(A, B) -> bool> NullaryFnOnce for Call<Compare<'_, F>, fn(A, B)> {
    type Output = u64;

    #[inline(always)]
    fn call(self) -> u64 {
        let Compare { wave, inst, kinds, f } = self.0;
        let plain = is_plain(wave, inst, &kinds, Kind::Mask);
        let [ka, kb] = kinds;
        let a = A::fetch(wave, inst, 0, ka, plain);
        let b = B::fetch(wave, inst, 1, kb, plain);
        let (a, b) = (a.get(), b.get());
        lanes_of(&Row(each(|lane| ones(f(at(a, lane), at(b, lane))))))
    }
}

/// Compares two sources; the result is a mask in which lanes that are off are 0. `v_cmpx` writes EXEC, too.
#[inline(always)]
pub(super) fn compare<A: Lane, B: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(A, B) -> bool) {
    let f = move |a: A::Bits, b: B::Bits| f(A::from_bits(a), B::from_bits(b));
    let compare = Compare { wave, inst, kinds: [A::KIND, B::KIND], f };
    let mask = vectorised(Call::<_, fn(A::Bits, B::Bits)>(compare, std::marker::PhantomData)) & wave.exec();
    if let Dst::Sgpr(n) = inst.dst {
        wave.set_sgpr64(n, mask);
    }
    if writes_exec(inst.op) {
        wave.set_exec(mask);
    }
}

/// Whether a comparison is a `v_cmpx`: of the groups of sixteen, or pairs of class tests, those in second place.
#[inline(always)]
fn writes_exec(op: Op) -> bool {
    let code = op.row().code;
    code & if code < 0x20 { 1 } else { 0x10 } != 0
}

struct WithMask<'a, F> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    mask: u64,
    f: F,
}

impl<F: Fn(u32, u32, u32) -> (u32, u32)> NullaryFnOnce for WithMask<'_, F> {
    type Output = u64;

    #[inline(always)]
    fn call(self) -> u64 {
        let WithMask { wave, inst, mask, f } = self;
        let plain = is_plain(wave, inst, &[Kind::I32, Kind::I32], Kind::I32);
        let mask = mask_row(mask);
        let (result, out) = {
            let a = u32::fetch(wave, inst, 0, Kind::I32, plain);
            let b = u32::fetch(wave, inst, 1, Kind::I32, plain);
            let (a, b) = (a.get(), b.get());
            let both = |lane| f(at(a, lane), at(b, lane), at(&mask.0, lane));
            // Two loops: each vectorises, one of pairs would not.
            (each(|lane| both(lane).0), Row(each(|lane| both(lane).1)))
        };
        u32::store(wave, inst, Kind::I32, plain, &result);
        lanes_of(&out)
    }
}

/// Two sources and a mask, which is all ones or zero in each lane; the second result, likewise, becomes a mask in
/// which lanes that are off are 0.
#[inline(always)]
pub(super) fn op2_mask(
    wave: &mut Wave,
    inst: &Inst,
    mask: u64,
    f: impl Fn(u32, u32, u32) -> (u32, u32),
) -> u64 {
    let lanes = operand::enabled(wave, inst);
    vectorised(WithMask { wave, inst, mask, f }) & lanes
}

/// Three sources and VCC.
#[inline(always)]
pub(super) fn op3_mask<T: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(T, T, T, bool) -> T) {
    let vcc = wave.vcc();
    let plain = is_plain(wave, inst, &[T::KIND], T::KIND);
    let result = {
        let a = T::Bits::fetch(wave, inst, 0, T::KIND, plain);
        let b = T::Bits::fetch(wave, inst, 1, T::KIND, plain);
        let c = T::Bits::fetch(wave, inst, 2, T::KIND, plain);
        let (a, b, c) = (a.get(), b.get(), c.get());
        let value = |lanes, lane| T::from_bits(at::<T::Bits>(lanes, lane));
        each(|lane| f(value(a, lane), value(b, lane), value(c, lane), vcc >> lane & 1 == 1).to_bits())
    };
    T::Bits::store(wave, inst, T::KIND, plain, &result);
}

/// Three sources, and a flag as the second result, which becomes a mask in which lanes that are off are 0.
#[inline(always)]
pub(super) fn op3_flag<A: Lane, C: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(A, A, C) -> (C, bool)) {
    let plain = is_plain(wave, inst, &[A::KIND, C::KIND], C::KIND);
    let mut flags = 0u64;
    let result = {
        let a = A::Bits::fetch(wave, inst, 0, A::KIND, plain);
        let b = A::Bits::fetch(wave, inst, 1, A::KIND, plain);
        let c = C::Bits::fetch(wave, inst, 2, C::KIND, plain);
        let (a, b, c) = (a.get(), b.get(), c.get());
        each(|lane| {
            let (value, flag) =
                f(A::from_bits(at(a, lane)), A::from_bits(at(b, lane)), C::from_bits(at(c, lane)));
            flags |= u64::from(flag) << lane;
            value.to_bits()
        })
    };
    let flags = flags & wave.exec();
    C::Bits::store(wave, inst, C::KIND, plain, &result);
    if let Dst::Sgpr(n) = inst.sdst {
        wave.set_sgpr64(n, flags);
    }
}
