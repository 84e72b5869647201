//! Running a function over the lanes of a wave.
//!
//! [`op1`] to [`op3`] fetch the rows of an instruction's sources, apply a function lane by lane in one loop that the
//! compiler vectorises, and write the lanes that EXEC switches on. The loop is compiled several times, for the vector
//! units that CPUs have, and the best is chosen at run time (crate `pulp`). An instruction without modifiers in a plain
//! mode reads its registers in place; all others go through copies that [`super::operand`] prepares.

use std::marker::PhantomData;

use pulp::NullaryFnOnce;

pub(super) use super::lane::{Bits, Half, HalfBits, Lane, Short, at, each, join, split};
use super::operand;
use crate::inst::{Dst, Inst, Omod, SubWord};
use crate::op::{Kind, Op};
use crate::wave::{LANES, Row, Wave, lanes_of, mask_row};

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

/// The types of an operation, which its function does not show by itself.
struct Types<T>(PhantomData<fn() -> T>);

struct Op1<'a, F, T> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    f: F,
    _types: Types<T>,
}

// The functions are called in plain loops and not from closures: a closure of some size would be compiled on its own,
// without the vector unit.
impl<A: Lane, R: Lane, F: Fn(A) -> R> NullaryFnOnce for Op1<'_, F, (A, R)> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Op1 { wave, inst, f, .. } = self;
        let plain = is_plain(wave, inst, &[A::KIND], R::KIND);
        let mut result = <R::Bits as Bits>::Result::default();
        {
            let a = A::Bits::fetch(wave, inst, 0, A::KIND, plain);
            let a = A::Bits::view(&a);
            for lane in 0..LANES {
                let value = f(A::from_bits(A::Bits::lane(a, lane)));
                R::Bits::set(&mut result, lane, value.to_bits());
            }
        }
        R::Bits::store(wave, inst, R::KIND, plain, &result);
    }
}

struct Op2<'a, F, T> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    f: F,
    _types: Types<T>,
}

impl<A: Lane, B: Lane, R: Lane, F: Fn(A, B) -> R> NullaryFnOnce for Op2<'_, F, (A, B, R)> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Op2 { wave, inst, f, .. } = self;
        let plain = is_plain(wave, inst, &[A::KIND, B::KIND], R::KIND);
        let mut result = <R::Bits as Bits>::Result::default();
        {
            let a = A::Bits::fetch(wave, inst, 0, A::KIND, plain);
            let b = B::Bits::fetch(wave, inst, 1, B::KIND, plain);
            let (a, b) = (A::Bits::view(&a), B::Bits::view(&b));
            for lane in 0..LANES {
                let value = f(A::from_bits(A::Bits::lane(a, lane)), B::from_bits(B::Bits::lane(b, lane)));
                R::Bits::set(&mut result, lane, value.to_bits());
            }
        }
        R::Bits::store(wave, inst, R::KIND, plain, &result);
    }
}

struct Op3<'a, F, T> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    f: F,
    _types: Types<T>,
}

impl<A: Lane, B: Lane, C: Lane, R: Lane, F: Fn(A, B, C) -> R> NullaryFnOnce for Op3<'_, F, (A, B, C, R)> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Op3 { wave, inst, f, .. } = self;
        let plain = is_plain(wave, inst, &[A::KIND, B::KIND, C::KIND], R::KIND);
        let mut result = <R::Bits as Bits>::Result::default();
        {
            let a = A::Bits::fetch(wave, inst, 0, A::KIND, plain);
            let b = B::Bits::fetch(wave, inst, 1, B::KIND, plain);
            let c = C::Bits::fetch(wave, inst, 2, C::KIND, plain);
            let (a, b, c) = (A::Bits::view(&a), B::Bits::view(&b), C::Bits::view(&c));
            for lane in 0..LANES {
                let value = f(
                    A::from_bits(A::Bits::lane(a, lane)),
                    B::from_bits(B::Bits::lane(b, lane)),
                    C::from_bits(C::Bits::lane(c, lane)),
                );
                R::Bits::set(&mut result, lane, value.to_bits());
            }
        }
        R::Bits::store(wave, inst, R::KIND, plain, &result);
    }
}

/// Runs `call` compiled for the CPU's vector unit.
#[inline(always)]
pub(super) fn vectorised<T>(call: impl NullaryFnOnce<Output = T>) -> T {
    #[cfg(test)]
    if super::tests::BASELINE.get() {
        return call.call();
    }
    pulp::Arch::new().dispatch(call)
}

/// One source.
#[inline(always)]
pub(super) fn op1<A: Lane, R: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(A) -> R) {
    vectorised(Op1 { wave, inst, f, _types: Types::<(A, R)>(PhantomData) });
}

/// Two sources.
#[inline(always)]
pub(super) fn op2<A: Lane, B: Lane, R: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(A, B) -> R) {
    vectorised(Op2 { wave, inst, f, _types: Types::<(A, B, R)>(PhantomData) });
}

/// Three sources.
#[inline(always)]
pub(super) fn op3<A: Lane, B: Lane, C: Lane, R: Lane>(
    wave: &mut Wave,
    inst: &Inst,
    f: impl Fn(A, B, C) -> R,
) {
    vectorised(Op3 { wave, inst, f, _types: Types::<(A, B, C, R)>(PhantomData) });
}

/// Two 32-bit sources, the first of which is masked with a row that is the same for all waves.
#[inline(always)]
pub(super) fn op2_masked(wave: &mut Wave, inst: &Inst, mask: &Row, f: impl Fn(u32, u32) -> u32) {
    vectorised(Masked { wave, inst, mask, f });
}

struct Masked<'a, F> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    mask: &'a Row,
    f: F,
}

impl<F: Fn(u32, u32) -> u32> NullaryFnOnce for Masked<'_, F> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Masked { wave, inst, mask, f } = self;
        let plain = is_plain(wave, inst, &[Kind::I32, Kind::I32], Kind::I32);
        let mut result = Row::ZERO;
        {
            let a = u32::fetch(wave, inst, 0, Kind::I32, plain);
            let b = u32::fetch(wave, inst, 1, Kind::I32, plain);
            let (a, b) = (a.get(), b.get());
            for (lane, slot) in result.0.iter_mut().enumerate() {
                *slot = f(at(a, lane) & at(&mask.0, lane), at(b, lane));
            }
        }
        u32::store(wave, inst, Kind::I32, plain, &result);
    }
}

/// All ones or zero.
#[inline(always)]
pub(super) fn ones(set: bool) -> u32 {
    if set { u32::MAX } else { 0 }
}

struct Compare<'a, F, T> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    f: F,
    _types: Types<T>,
}

impl<A: Lane, B: Lane, F: Fn(A, B) -> bool> NullaryFnOnce for Compare<'_, F, (A, B)> {
    type Output = u64;

    #[inline(always)]
    fn call(self) -> u64 {
        let Compare { wave, inst, f, .. } = self;
        let plain = is_plain(wave, inst, &[A::KIND, B::KIND], Kind::Mask);
        let a = A::Bits::fetch(wave, inst, 0, A::KIND, plain);
        let b = B::Bits::fetch(wave, inst, 1, B::KIND, plain);
        let (a, b) = (A::Bits::view(&a), B::Bits::view(&b));
        let mut mask = Row::ZERO;
        for (lane, slot) in mask.0.iter_mut().enumerate() {
            *slot = ones(f(A::from_bits(A::Bits::lane(a, lane)), B::from_bits(B::Bits::lane(b, lane))));
        }
        lanes_of(&mask)
    }
}

/// Compares two sources; the result is a mask in which lanes that are off are 0. `v_cmpx` writes EXEC, too.
#[inline(always)]
pub(super) fn compare<A: Lane, B: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(A, B) -> bool) {
    let mask = vectorised(Compare { wave, inst, f, _types: Types::<(A, B)>(PhantomData) }) & wave.exec();
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
        let mut result = Row::ZERO;
        let mut out = Row::ZERO;
        {
            let a = u32::fetch(wave, inst, 0, Kind::I32, plain);
            let b = u32::fetch(wave, inst, 1, Kind::I32, plain);
            let (a, b) = (a.get(), b.get());
            for (lane, (slot, bit)) in result.0.iter_mut().zip(&mut out.0).enumerate() {
                (*slot, *bit) = f(at(a, lane), at(b, lane), at(&mask.0, lane));
            }
        }
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

struct WithFlag<'a, F, T> {
    wave: &'a mut Wave,
    inst: &'a Inst,
    vcc: u64,
    f: F,
    _types: Types<T>,
}

impl<A: Lane, C: Lane, F: Fn(A, A, C, bool) -> (C, bool)> NullaryFnOnce for WithFlag<'_, F, (A, C)> {
    type Output = u64;

    #[inline(always)]
    fn call(self) -> u64 {
        let WithFlag { wave, inst, vcc, f, .. } = self;
        let plain = is_plain(wave, inst, &[A::KIND, C::KIND], C::KIND);
        let vcc = mask_row(vcc);
        let mut result = <C::Bits as Bits>::Result::default();
        let mut flags = Row::ZERO;
        {
            let a = A::Bits::fetch(wave, inst, 0, A::KIND, plain);
            let b = A::Bits::fetch(wave, inst, 1, A::KIND, plain);
            let c = C::Bits::fetch(wave, inst, 2, C::KIND, plain);
            let (a, b, c) = (A::Bits::view(&a), A::Bits::view(&b), C::Bits::view(&c));
            for (lane, flag) in flags.0.iter_mut().enumerate() {
                let (value, set) = f(
                    A::from_bits(A::Bits::lane(a, lane)),
                    A::from_bits(A::Bits::lane(b, lane)),
                    C::from_bits(C::Bits::lane(c, lane)),
                    at(&vcc.0, lane) != 0,
                );
                C::Bits::set(&mut result, lane, value.to_bits());
                *flag = ones(set);
            }
        }
        C::Bits::store(wave, inst, C::KIND, plain, &result);
        lanes_of(&flags)
    }
}

/// Three sources and VCC.
#[inline(always)]
pub(super) fn op3_mask<T: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(T, T, T, bool) -> T) {
    let vcc = wave.vcc();
    let f = move |a, b, c, flag| (f(a, b, c, flag), false);
    vectorised(WithFlag { wave, inst, vcc, f, _types: Types::<(T, T)>(PhantomData) });
}

/// Three sources, and a flag as the second result, which becomes a mask in which lanes that are off are 0.
#[inline(always)]
pub(super) fn op3_flag<A: Lane, C: Lane>(wave: &mut Wave, inst: &Inst, f: impl Fn(A, A, C) -> (C, bool)) {
    let exec = wave.exec();
    let f = move |a, b, c, _| f(a, b, c);
    let flags = vectorised(WithFlag { wave, inst, vcc: 0, f, _types: Types::<(A, C)>(PhantomData) }) & exec;
    if let Dst::Sgpr(n) = inst.sdst {
        wave.set_sgpr64(n, flags);
    }
}

/// Runs a function of three rows, prepared by `source` for each of `src[0]` to `src[2]`.
#[inline(always)]
pub(super) fn rows3(
    wave: &Wave,
    inst: &Inst,
    source: impl Fn(&Wave, &Inst, usize) -> Row,
    f: impl Apply,
) -> Row {
    let (a, b, c) = (source(wave, inst, 0), source(wave, inst, 1), source(wave, inst, 2));
    vectorised(Rows3 { a: &a, b: &b, c: &c, f })
}

struct Rows3<'a, F> {
    a: &'a Row,
    b: &'a Row,
    c: &'a Row,
    f: F,
}

impl<F: Apply> NullaryFnOnce for Rows3<'_, F> {
    type Output = Row;

    #[inline(always)]
    fn call(self) -> Row {
        let Rows3 { a, b, c, f } = self;
        let mut result = Row::ZERO;
        for (lane, slot) in result.0.iter_mut().enumerate() {
            *slot = f.apply(at(&a.0, lane), at(&b.0, lane), at(&c.0, lane));
        }
        result
    }
}

/// A function of three lanes that is compiled into the loop that calls it.
pub(super) trait Apply {
    /// The result of a lane.
    fn apply(&self, a: u32, b: u32, c: u32) -> u32;
}

impl<F: Fn(u32, u32, u32) -> u32> Apply for F {
    #[inline(always)]
    fn apply(&self, a: u32, b: u32, c: u32) -> u32 {
        self(a, b, c)
    }
}
