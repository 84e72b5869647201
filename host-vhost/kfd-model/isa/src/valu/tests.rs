//! Each opcode on tables of values. Every table is run with all lanes on, with some on, with none on, with the
//! destination being a source, and with sources in scalar registers, see [`Case`].

#![allow(clippy::needless_range_loop, reason = "the numbers are those of lanes and sources")]

mod basics;
mod compare;
mod conversions;
mod directed;
mod division;
mod floats;
mod integers;
mod modifiers;
mod packed;
mod subword;

use std::cell::Cell;

use super::execute;
use crate::inst::{Dst, Inst, MemFlags, Modifiers, Src, SubWord};
use crate::op::{Kind, Op, Traits};
use crate::wave::{LANES, Row, Wave, reg};

/// What the destination holds before, where it must stay.
const BEFORE: u32 = 0x5a5a_a5a5;
/// Some lanes, in both halves.
const SOME: u64 = 0xf0f0_1234_8000_0f05;
/// Vector registers of the sources and of the destination.
const SOURCES: [u8; 3] = [8, 16, 24];
const DST: u8 = 32;
/// Scalar registers of the sources.
const SCALARS: [u8; 3] = [20, 24, 28];
/// Where masks come from and go to.
const MASK_IN: u8 = 40;
const MASK_OUT: u8 = 44;

/// An instruction as the decoder makes it.
pub(super) fn inst(op: Op, dst: Dst, src: &[Src]) -> Inst {
    let mut sources = [Src::None; 4];
    for (to, from) in sources.iter_mut().zip(src) {
        *to = *from;
    }
    Inst {
        op,
        encoding: op.row().encoding,
        words: 1,
        dst,
        sdst: Dst::None,
        src: sources,
        modifiers: Modifiers::NONE,
        sub: SubWord::None,
        imm: 0,
        flags: MemFlags::empty(),
    }
}

thread_local! {
    /// Handlers do without the CPU's vector unit, as on a CPU that has none.
    pub(super) static BASELINE: Cell<bool> = const { Cell::new(false) };
}

/// Executes and unwraps; the result must be the same as without the vector unit, NaNs included.
pub(super) fn run(wave: &mut Wave, inst: &Inst) {
    let mut other = wave.clone();
    BASELINE.set(true);
    execute(&mut other, inst).expect("implemented");
    BASELINE.set(false);
    execute(wave, inst).expect("implemented");
    assert_eq!(wave.sgpr, other.sgpr, "{}", inst.op.row().name);
    // No test goes beyond these.
    for n in 0..48 {
        assert_eq!(wave.row_at(n), other.row_at(n), "{} v{n}", inst.op.row().name);
    }
}

/// Width of a float.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Bits {
    F16,
    F32,
    F64,
}

/// Pseudo-random numbers, the same in each run (Marsaglia's xorshift64).
pub(super) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 20) as usize % limit
    }

    /// Any bits, or, half of the time, a number near one, so that sums and products do not all overflow.
    pub fn float(&mut self, width: Bits) -> u64 {
        let any = self.next();
        let near = any & 1 == 0;
        match width {
            Bits::F16 if near => any >> 8 & 0x83ff | (12 + (any >> 30) % 8) << 10,
            Bits::F16 => any >> 8 & 0xffff,
            Bits::F32 if near => any >> 8 & 0x807f_ffff | (115 + (any >> 45) % 30) << 23,
            Bits::F32 => any >> 8 & 0xffff_ffff,
            Bits::F64 if near => any & 0x800f_ffff_ffff_ffff | (1000 + (any >> 53) % 60) << 52,
            Bits::F64 => any,
        }
    }
}

/// Runs an opcode on any number of sources in a mode.
fn lanes<const N: usize>(case: &mut Case, sources: &[[u64; N]]) -> Vec<u64> {
    let wide = Case::is_wide(case.inst.op.dst());
    let mut results = Vec::new();
    for chunk in sources.chunks(LANES) {
        for n in 0..N {
            let values = std::array::from_fn(|lane| chunk[lane % chunk.len()][n]);
            case.put(SOURCES[n], Case::is_wide(case.kind(n)), &values);
        }
        run(&mut case.wave, &case.inst);
        results.extend_from_slice(&case.get(DST, wide)[..chunk.len()]);
    }
    results
}

pub(super) fn lanes1(op: Op, mode: u32, sources: &[[u64; 1]]) -> Vec<u64> {
    lanes(&mut Case::new(op).mode(mode), sources)
}

pub(super) fn lanes2(op: Op, mode: u32, sources: &[[u64; 2]]) -> Vec<u64> {
    lanes(&mut Case::new(op).mode(mode), sources)
}

pub(super) fn lanes3(op: Op, mode: u32, sources: &[[u64; 3]]) -> Vec<u64> {
    lanes(&mut Case::new(op).mode(mode), sources)
}

/// One opcode with the registers of the test and its modifiers.
pub(super) struct Case {
    pub inst: Inst,
    pub wave: Wave,
}

/// Lanes of a source or result: all 64 bits for 64-bit kinds.
type Lanes = [u64; LANES];

impl Case {
    pub fn new(op: Op) -> Case {
        let row = op.row();
        let src: Vec<Src> = row
            .src
            .iter()
            .zip(SOURCES)
            .map(|(kind, n)| if *kind == Kind::Mask { Src::Sgpr(MASK_IN) } else { Src::Vgpr(n) })
            .collect();
        let dst = if row.dst == Kind::Mask || row.traits.contains(Traits::SGPR_DST) {
            Dst::Sgpr(MASK_OUT)
        } else {
            Dst::Vgpr(DST)
        };
        let mut inst = inst(op, dst, &src);
        if row.traits.contains(Traits::CARRY_OUT) {
            inst.sdst = Dst::Sgpr(MASK_OUT);
        }
        Case { inst, wave: Wave::new() }
    }

    pub fn with(op: Op, change: impl FnOnce(&mut Inst)) -> Case {
        let mut case = Case::new(op);
        change(&mut case.inst);
        case
    }

    pub fn mode(mut self, mode: u32) -> Case {
        self.wave.mode.0 = mode;
        self
    }

    fn kind(&self, index: usize) -> Kind {
        self.inst.op.src(index)
    }

    fn is_wide(kind: Kind) -> bool {
        kind.registers() == 2
    }

    fn put(&mut self, register: u8, wide: bool, values: &Lanes) {
        let n = usize::from(register);
        *self.wave.row_at_mut(n).expect("in range") = Row(values.map(|v| v as u32));
        if wide {
            *self.wave.row_at_mut(n + 1).expect("in range") = Row(values.map(|v| (v >> 32) as u32));
        }
    }

    fn get(&self, register: u8, wide: bool) -> Lanes {
        let n = usize::from(register);
        std::array::from_fn(|lane| {
            let high = if wide { u64::from(self.wave.row_at(n + 1).lane(lane)) << 32 } else { 0 };
            u64::from(self.wave.row_at(n).lane(lane)) | high
        })
    }

    /// Spreads the values of a table over the lanes.
    fn spread(values: impl Fn(usize) -> u64) -> Lanes {
        std::array::from_fn(values)
    }

    /// Runs a table of sources and a result for a vector destination in all the ways that must not matter.
    pub fn check<const N: usize>(mut self, table: &[([u64; N], u64)]) {
        let wide = Self::is_wide(self.inst.op.dst());
        let before = if wide { u64::from(BEFORE) << 32 | u64::from(BEFORE) } else { u64::from(BEFORE) };
        let name = self.inst.op.row().name;
        for exec in [u64::MAX, SOME, 0] {
            for chunk in table.chunks(LANES) {
                let entry = |lane: usize| &chunk[lane % chunk.len()];
                for n in 0..N {
                    self.put(SOURCES[n], Self::is_wide(self.kind(n)), &Self::spread(|lane| entry(lane).0[n]));
                }
                self.put(DST, wide, &[before; LANES]);
                self.wave.set_exec(exec);
                run(&mut self.wave, &self.inst);
                let result = self.get(DST, wide);
                for lane in 0..LANES {
                    let expected = if exec >> lane & 1 == 1 { entry(lane).1 } else { before };
                    assert_eq!(
                        result[lane],
                        expected,
                        "{name} {:x?} exec {exec:#x} lane {lane}: {:#x}, expected {expected:#x}",
                        entry(lane).0,
                        result[lane]
                    );
                }
            }
        }
        self.check_overlap(table);
        self.check_scalar(table);
    }

    /// The destination is one of the sources.
    fn check_overlap<const N: usize>(&mut self, table: &[([u64; N], u64)]) {
        let wide = Self::is_wide(self.inst.op.dst());
        let name = self.inst.op.row().name;
        self.wave.set_exec(u64::MAX);
        for over in 0..N {
            if Self::is_wide(self.kind(over)) != wide || self.inst.src[over] != Src::Vgpr(SOURCES[over]) {
                continue;
            }
            let chunk = &table[..table.len().min(LANES)];
            let entry = |lane: usize| &chunk[lane % chunk.len()];
            for n in 0..N {
                self.put(SOURCES[n], Self::is_wide(self.kind(n)), &Self::spread(|lane| entry(lane).0[n]));
            }
            let mut inst = self.inst;
            inst.dst = Dst::Vgpr(SOURCES[over]);
            let keeps_half = matches!(inst.op, Op::VFmaMixhiF16 | Op::VMadMixhiF16);
            if keeps_half
                || super::operand::preserves_high_half(inst.op)
                || matches!(inst.sub, SubWord::Sdwa(_))
            {
                continue;
            }
            run(&mut self.wave, &inst);
            let result = self.get(SOURCES[over], wide);
            for lane in 0..LANES {
                assert_eq!(result[lane], entry(lane).1, "{name} {:x?} over its source {over}", entry(lane).0);
            }
        }
    }

    /// Each source in turn comes from scalar registers.
    fn check_scalar<const N: usize>(&mut self, table: &[([u64; N], u64)]) {
        let wide = Self::is_wide(self.inst.op.dst());
        let name = self.inst.op.row().name;
        let keeps_half = matches!(self.inst.op, Op::VFmaMixhiF16 | Op::VMadMixhiF16);
        if keeps_half
            || !matches!(self.inst.sub, SubWord::None)
            || super::operand::preserves_high_half(self.inst.op)
        {
            return;
        }
        self.wave.set_exec(u64::MAX);
        for (sources, expected) in table.iter().take(8) {
            for scalar in 0..N {
                if self.inst.src[scalar] != Src::Vgpr(SOURCES[scalar]) {
                    continue;
                }
                for n in 0..N {
                    self.put(SOURCES[n], Self::is_wide(self.kind(n)), &[sources[n]; LANES]);
                }
                self.wave.set_sgpr64(SCALARS[scalar], sources[scalar]);
                let mut inst = self.inst;
                inst.src[scalar] = Src::Sgpr(SCALARS[scalar]);
                self.put(DST, wide, &[0; LANES]);
                run(&mut self.wave, &inst);
                let result = self.get(DST, wide);
                assert!(
                    result.iter().all(|v| v == expected),
                    "{name} {sources:x?} with source {scalar} in an SGPR"
                );
            }
        }
    }

    /// Runs a table of sources and a bit for an operation that writes a mask, in all the ways that must not matter.
    pub fn check_mask<const N: usize>(mut self, table: &[([u64; N], bool)]) {
        let name = self.inst.op.row().name;
        for exec in [u64::MAX, SOME, 0] {
            for chunk in table.chunks(LANES) {
                let entry = |lane: usize| &chunk[lane % chunk.len()];
                for n in 0..N {
                    self.put(SOURCES[n], Self::is_wide(self.kind(n)), &Self::spread(|lane| entry(lane).0[n]));
                }
                self.wave.set_exec(exec);
                self.wave.set_sgpr64(MASK_OUT, u64::MAX);
                run(&mut self.wave, &self.inst);
                let mask = self.wave.sgpr64(MASK_OUT);
                for lane in 0..LANES {
                    let expected = exec >> lane & 1 == 1 && entry(lane).1;
                    assert_eq!(
                        mask >> lane & 1 == 1,
                        expected,
                        "{name} {:x?} exec {exec:#x} lane {lane}",
                        entry(lane).0
                    );
                }
            }
        }
    }
}

#[test]
fn registers_have_the_numbers_of_the_decoder() {
    assert_eq!(
        (reg::VCC, reg::TTMP, reg::M0, reg::EXEC),
        (crate::inst::VCC, crate::inst::TTMP, crate::inst::M0, crate::inst::EXEC)
    );
    assert_eq!((reg::FLAT_SCRATCH, reg::XNACK_MASK), (crate::inst::FLAT_SCRATCH, crate::inst::XNACK_MASK));
}
