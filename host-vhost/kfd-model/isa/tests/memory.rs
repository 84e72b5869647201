//! Every load, store and atomic opcode of every memory encoding on values worked out by hand from AMD's "Vega" 7nm
//! Instruction Set Architecture: what is in memory and registers after it, and that nothing else changes.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::collections::HashSet;

use kfd_isa::bus::{Bus, BusFault, Space};
use kfd_isa::gws::{Operation, Ticket};
use kfd_isa::mem::lds::Lds;
use kfd_isa::op::{Kind, ROWS, Row, Traits};
use kfd_isa::wave::{Row as Values, Wave};
use kfd_isa::{Encoding, Op, Target, decode, mem};

/// Where memory begins.
const BASE: u64 = 0x7f00_0000_0000;
/// Bytes of memory, and of LDS.
const SIZE: usize = 4096;
/// Bytes from lane to lane.
const STRIDE: u64 = 64;
/// The lanes that are on.
const EXEC: u64 = 0xf00f_0ff0_8421_0001;
/// What registers hold that must not change.
const KEPT: u32 = 0x5eed_cafe;

/// Memory, of which every byte tells its place.
struct Memory(Vec<u8>);

fn byte_at(place: usize) -> u8 {
    (place as u8).wrapping_mul(37) ^ (place >> 8) as u8
}

impl Memory {
    fn new() -> Self {
        Self((0..SIZE).map(byte_at).collect())
    }

    fn place(&mut self, va: u64, length: usize) -> Result<&mut [u8], BusFault> {
        let start = va.wrapping_sub(BASE) as usize;
        let end = start.saturating_add(length);
        self.0.get_mut(start..end).ok_or(BusFault::Page { va, write: false })
    }
}

impl Space for Memory {
    fn load(&mut self, va: u64, to: &mut [u8]) -> Result<(), BusFault> {
        to.copy_from_slice(self.place(va, to.len())?);
        Ok(())
    }

    fn store(&mut self, va: u64, from: &[u8]) -> Result<(), BusFault> {
        self.place(va, from.len())?.copy_from_slice(from);
        Ok(())
    }

    fn load_words(&mut self, va: u64, to: &mut [u32]) -> Result<(), BusFault> {
        let bytes = self.place(va, to.len() * 4)?;
        for (word, bytes) in to.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes(bytes.try_into().unwrap());
        }
        Ok(())
    }

    fn store_words(&mut self, va: u64, from: &[u32]) -> Result<(), BusFault> {
        let bytes: Vec<u8> = from.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.store(va, &bytes)
    }

    fn atomic32(&mut self, va: u64, change: impl Fn(u32) -> u32) -> Result<u32, BusFault> {
        let place = self.place(va, 4)?;
        let old = u32::from_le_bytes((&*place).try_into().unwrap());
        place.copy_from_slice(&change(old).to_le_bytes());
        Ok(old)
    }

    fn atomic64(&mut self, va: u64, change: impl Fn(u64) -> u64) -> Result<u64, BusFault> {
        let place = self.place(va, 8)?;
        let old = u64::from_le_bytes((&*place).try_into().unwrap());
        place.copy_from_slice(&change(old).to_le_bytes());
        Ok(old)
    }
}

impl Bus for Memory {
    fn clock(&mut self) -> u64 {
        0x1122_3344_5566
    }

    fn message(&mut self, _: u16, _: u32) {}

    fn fence(&mut self) {}

    fn gws(&mut self, _: u32, _: Operation, _: Option<Ticket>) -> Option<Ticket> {
        None
    }

    fn invalidate_code(&mut self) {}
}

/// The registers that [`words`] names.
const ADDRESS: u8 = 4;
const DATA: u8 = 8;
const DATA1: u8 = 12;
const RESULT: u8 = 16;

/// An instruction on these registers; in buffers VADDR is an offset. Memory instructions without scalars as addresses.
fn words(row: &Row, form: Encoding, glc: bool) -> [u32; 2] {
    let code = u32::from(row.code);
    let has = |n: usize| row.src.get(n).is_some_and(|kind| *kind != Kind::None);
    let field = |present: bool, bits: u32| if present { bits } else { 0 };
    let returns = row.dst != Kind::None && (glc || !row.traits.contains(Traits::ATOMIC));
    let [address, data, data1, result] = [ADDRESS, DATA, DATA1, RESULT].map(u32::from);
    match form {
        Encoding::Smem => [0xc000_0000 | code << 18 | 1 << 17 | field(glc, 1 << 16) | result << 6 | 2, 0],
        Encoding::Ds => {
            let operands = address | field(has(1), data << 8) | field(has(2), data1 << 16);
            [0xd800_0000 | code << 17, operands | field(row.dst != Kind::None, result << 24)]
        }
        Encoding::Flat | Encoding::Global => {
            let segment = if form == Encoding::Global { 2 << 14 } else { 0 };
            let saddr = if form == Encoding::Global { 0x7f << 16 } else { 0 };
            let operands = address | field(has(1), data << 8) | field(returns, result << 24);
            [0xdc00_0000 | code << 18 | segment | field(glc, 1 << 16), saddr | operands]
        }
        // VDATA is source and result; OFFEN; SRSRC is s[4:7], SOFFSET is 0.
        Encoding::Mubuf => {
            [0xe000_0000 | code << 18 | 1 << 12 | field(glc, 1 << 14), 0x8001_0000 | data << 8 | address]
        }
        other => panic!("{other:?}"),
    }
}

/// A wave whose lanes have addresses at [`STRIDE`], and a buffer over all memory in s[4:7].
fn wave(form: Encoding) -> Wave {
    let mut wave = Wave::new();
    for register in 0..32 {
        wave.write_row(register, &Values::splat(KEPT));
        wave.set_sgpr(register as u8, KEPT);
    }
    let base = if matches!(form, Encoding::Flat | Encoding::Global) { BASE } else { 0 };
    for lane in 0..64 {
        let address = base + STRIDE * lane as u64;
        set(&mut wave, ADDRESS, lane, address as u32);
        if base != 0 {
            set(&mut wave, ADDRESS + 1, lane, (address >> 32) as u32);
        }
    }
    wave.set_sgpr64(4, BASE);
    if form == Encoding::Mubuf {
        wave.set_sgpr64(6, 0x0002_7000 << 32 | SIZE as u64);
    }
    wave.set_exec(EXEC);
    wave
}

fn set(wave: &mut Wave, register: u8, lane: usize, value: u32) {
    let mut row = *wave.row(register);
    row.set_lane(lane, value);
    let exec = wave.exec();
    wave.set_exec(u64::MAX);
    wave.write_row(usize::from(register), &row);
    wave.set_exec(exec);
}

/// Sets a register in all lanes.
fn fill(wave: &mut Wave, register: u8, values: &[u32]) {
    for (register, value) in (register..).zip(values) {
        wave.set_exec(u64::MAX);
        wave.write_row(usize::from(register), &Values::splat(*value));
    }
    wave.set_exec(EXEC);
}

/// Runs it with this memory, which is that of LDS for DS, and says what memory is then.
fn run(wave: &mut Wave, words: [u32; 2], form: Encoding, memory: Memory) -> Vec<u8> {
    let inst = decode(Target::Gfx906, &words).unwrap_or_else(|error| panic!("{error}"));
    let mut bus = memory;
    let mut lds = Lds::new(SIZE as u32);
    if form == Encoding::Ds {
        lds.store(0, &bus.0).unwrap();
    }
    mem::execute(wave, &inst, &mut lds, &mut bus).unwrap_or_else(|stop| panic!("{inst}: {stop}"));
    if form == Encoding::Ds {
        lds.load(0, &mut bus.0).unwrap();
    }
    bus.0
}

fn is_on(lane: usize) -> bool {
    EXEC >> lane & 1 != 0
}

/// The form that a FLAT row has besides its own.
fn forms(row: &Row) -> &'static [Encoding] {
    match row.encoding {
        Encoding::Flat => &[Encoding::Flat, Encoding::Global],
        Encoding::Ds => &[Encoding::Ds],
        Encoding::Mubuf => &[Encoding::Mubuf],
        Encoding::Smem => &[Encoding::Smem],
        _ => &[],
    }
}

/// The bytes that one lane sees, and what registers hold then: those before are [`KEPT`].
fn loads(name: &str) -> Option<(Vec<u8>, Vec<u32>)> {
    let low = KEPT & 0xffff;
    let high = KEPT & 0xffff_0000;
    let wide = |count: u32| {
        let words: Vec<u32> = (0..count).map(|n| 0x8182_8380 + n).collect();
        (words.iter().flat_map(|word| word.to_le_bytes()).collect(), words)
    };
    Some(match name {
        "load_ubyte" | "read_u8" => (vec![0x80], vec![0x80]),
        "load_sbyte" | "read_i8" => (vec![0x80], vec![0xffff_ff80]),
        "load_ushort" | "read_u16" => (vec![0x34, 0x92], vec![0x9234]),
        "load_sshort" | "read_i16" => (vec![0x34, 0x92], vec![0xffff_9234]),
        "load_ubyte_d16" | "read_u8_d16" => (vec![0x80], vec![high | 0x80]),
        "load_ubyte_d16_hi" | "read_u8_d16_hi" => (vec![0x80], vec![0x80_0000 | low]),
        "load_sbyte_d16" | "read_i8_d16" => (vec![0x80], vec![high | 0xff80]),
        "load_sbyte_d16_hi" | "read_i8_d16_hi" => (vec![0x80], vec![0xff80_0000 | low]),
        "load_short_d16" | "read_u16_d16" => (vec![0x34, 0x92], vec![high | 0x9234]),
        "load_short_d16_hi" | "read_u16_d16_hi" => (vec![0x34, 0x92], vec![0x9234_0000 | low]),
        "load_dword" | "read_b32" => wide(1),
        "load_dwordx2" | "read_b64" => wide(2),
        "load_dwordx3" | "read_b96" => wide(3),
        "load_dwordx4" | "read_b128" => wide(4),
        _ => return None,
    })
}

/// What registers hold, and the bytes that one lane writes.
fn stores(name: &str) -> Option<(Vec<u32>, Vec<u8>)> {
    let wide = |count: u32| {
        let words: Vec<u32> = (0..count).map(|n| 0x8182_8380 + n).collect();
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        (words, bytes)
    };
    Some(match name {
        "store_byte" | "write_b8" => (vec![0x1234_5678], vec![0x78]),
        "store_byte_d16_hi" | "write_b8_d16_hi" => (vec![0x1234_5678], vec![0x34]),
        "store_short" | "write_b16" => (vec![0x1234_5678], vec![0x78, 0x56]),
        "store_short_d16_hi" | "write_b16_d16_hi" => (vec![0x1234_5678], vec![0x34, 0x12]),
        "store_dword" | "write_b32" => wide(1),
        "store_dwordx2" | "write_b64" => wide(2),
        "store_dwordx3" | "write_b96" => wide(3),
        "store_dwordx4" | "write_b128" => wide(4),
        _ => return None,
    })
}

/// A word before, source, comparand or second operand, and the word after.
type Change = (u64, u64, u64, u64);

const MIN: u64 = 1 << 31;
const MINUS1: u64 = 0xffff_ffff;
const WIDE_MINUS1: u64 = u64::MAX;
const WIDE_MIN: u64 = 1 << 63;

/// What atomic operations do on 32 and on 64 bits.
#[rustfmt::skip]
fn changes(name: &str) -> Option<(&'static [Change], &'static [Change])> {
    Some(match name {
        "swap" => (&[(1, 2, 0, 2)], &[(1, 2 << 40, 0, 2 << 40)]),
        "cmpswap" => (&[(5, 7, 5, 7), (5, 7, 6, 5)], &[(5 << 40, 7, 5 << 40, 7), (5 << 40, 7, 5, 5 << 40)]),
        "add" => (&[(MINUS1, 2, 0, 1)], &[(MINUS1, 2, 0, MINUS1 + 2), (WIDE_MINUS1, 2, 0, 1)]),
        "sub" => (&[(1, 2, 0, MINUS1)], &[(1, 2, 0, WIDE_MINUS1)]),
        "rsub" => (&[(1, 5, 0, 4), (5, 1, 0, MINUS1 - 3)], &[(1, 5 << 40, 0, (5 << 40) - 1)]),
        "smin" => (&[(MINUS1, 1, 0, MINUS1), (1, MIN, 0, MIN)], &[(MINUS1, 1, 0, 1), (WIDE_MINUS1, 1, 0, WIDE_MINUS1)]),
        "smax" => (&[(MINUS1, 1, 0, 1), (1, MIN, 0, 1)], &[(MINUS1, 1, 0, MINUS1), (WIDE_MIN, 1, 0, 1)]),
        "umin" => (&[(MINUS1, 1, 0, 1), (1, MIN, 0, 1)], &[(WIDE_MINUS1, 1, 0, 1), (1 << 40, 2, 0, 2)]),
        "umax" => (&[(MINUS1, 1, 0, MINUS1), (1, MIN, 0, MIN)], &[(2, 1 << 40, 0, 1 << 40), (WIDE_MIN, 1, 0, WIDE_MIN)]),
        "and" => (&[(0b1100, 0b1010, 0, 0b1000)], &[(WIDE_MINUS1, 0b1010 << 40, 0, 0b1010 << 40)]),
        "or" => (&[(0b1100, 0b1010, 0, 0b1110)], &[(1, 1 << 40, 0, 1 << 40 | 1)]),
        "xor" => (&[(0b1100, 0b1010, 0, 0b0110)], &[(1, 1 << 40 | 1, 0, 1 << 40)]),
        // Up to the source, then 0; down to 0, then the source.
        "inc" => (&[(4, 5, 0, 5), (5, 5, 0, 0), (6, 5, 0, 0)], &[(MINUS1, 1 << 40, 0, 1 << 32), (1 << 40, 1 << 40, 0, 0)]),
        "dec" => (&[(4, 5, 0, 3), (0, 5, 0, 5), (6, 5, 0, 5)], &[(1 << 32, 1 << 40, 0, MINUS1), (0, 1 << 40, 0, 1 << 40)]),
        // The bits that the first operand has are replaced by the second.
        "mskor" => (&[(0xff00_ff00, 0xffff, 0x1234, 0xff00_1234)], &[(WIDE_MINUS1, 0xff << 40, 0x12 << 40, 0xffff_12ff_ffff_ffff)]),
        "fadd" => (&[(0x3fc0_0000, 0x4010_0000, 0, 0x4070_0000)], &[]), // 1.5 + 2.25 = 3.75
        "fmin" => (&[(0x3f80_0000, 0xc000_0000, 0, 0xc000_0000), (0xc000_0000, 0x3f80_0000, 0, 0xc000_0000)], // 1, -2
            &[(0x3ff0_0000_0000_0000, 0xc000_0000_0000_0000, 0, 0xc000_0000_0000_0000)]),
        "fmax" => (&[(0x3f80_0000, 0xc000_0000, 0, 0x3f80_0000), (0xc000_0000, 0x3f80_0000, 0, 0x3f80_0000)],
            &[(0xc000_0000_0000_0000, 0x3ff0_0000_0000_0000, 0, 0x3ff0_0000_0000_0000)]),
        // 0.0 is -0.0, and no number is nothing, not even itself.
        "fcmpswap" => (&[(0, 7, 1 << 31, 7), (0x7fc0_0000, 7, 0x7fc0_0000, 0x7fc0_0000), (1 << 30, 7, 0, 1 << 30)],
            &[(0, 7, WIDE_MIN, 7), (1 << 62, 7, 0, 1 << 62)]),
        _ => return None,
    })
}

/// The operation of an atomic opcode, and whether it is one of 64 bits.
fn atomic(row: &Row) -> Option<(String, bool)> {
    if let Some(name) = row.name.strip_prefix("ds_") {
        let name = name.replace("_rtn", "");
        let (name, of) = name.split_once('_')?;
        let signed = of.starts_with('i');
        let float = of.starts_with('f');
        let operation = match name {
            "min" | "max" | "add" if float => format!("f{name}"),
            "min" | "max" if signed => format!("s{name}"),
            "min" | "max" => format!("u{name}"),
            "wrxchg" => "swap".to_owned(),
            "cmpst" if float => "fcmpswap".to_owned(),
            "cmpst" => "cmpswap".to_owned(),
            "add" | "sub" | "rsub" | "inc" | "dec" | "and" | "or" | "xor" | "mskor" => name.to_owned(),
            _ => return None,
        };
        return (!row.name.contains("src2")).then(|| (operation, of.ends_with("64")));
    }
    let (_, operation) = row.name.split_once("atomic_")?;
    match operation.strip_suffix("_x2") {
        Some(operation) => Some((operation.to_owned(), true)),
        None => Some((operation.to_owned(), false)),
    }
}

/// The name of what a vector memory opcode does, without the encoding's prefix.
fn plain(row: &Row) -> &str {
    row.name.split_once('_').unwrap().1
}

#[test]
fn loads_change_the_lanes_that_are_on_and_as_much_as_they_load() {
    let mut count = 0;
    for row in ROWS {
        let Some((bytes, want)) = loads(plain(row)).filter(|_| row.encoding != Encoding::Smem) else {
            continue;
        };
        for form in forms(row) {
            count += 1;
            let mut memory = Memory::new();
            for lane in 0..64 {
                let start = lane * STRIDE as usize;
                memory.0[start..start + bytes.len()].copy_from_slice(&bytes);
            }
            let before = memory.0.clone();
            let mut wave = wave(*form);
            let after = run(&mut wave, words(row, *form, false), *form, memory);
            assert_eq!(after, before, "{} writes memory", row.name);
            let result = if *form == Encoding::Mubuf { DATA } else { RESULT };
            for lane in 0..64 {
                for n in 0..6 {
                    let loaded = want.get(n).filter(|_| is_on(lane)).copied().unwrap_or(KEPT);
                    let got = wave.row(result + n as u8).lane(lane);
                    assert_eq!(got, loaded, "{} as {form:?}: register {n} of lane {lane}", row.name);
                }
            }
        }
    }
    // 14 of each, FLAT in two forms.
    assert_eq!(count, 14 * 4);
}

#[test]
fn stores_write_what_they_say_and_no_more() {
    let mut count = 0;
    for row in ROWS {
        let Some((registers, bytes)) = stores(plain(row)).filter(|_| row.encoding != Encoding::Smem) else {
            continue;
        };
        for form in forms(row) {
            count += 1;
            let mut want = Memory::new().0;
            for lane in (0..64).filter(|lane| is_on(*lane)) {
                let start = lane * STRIDE as usize;
                want[start..start + bytes.len()].copy_from_slice(&bytes);
            }
            let mut wave = wave(*form);
            fill(&mut wave, DATA, &registers);
            let after = run(&mut wave, words(row, *form, false), *form, Memory::new());
            assert!(after == want, "{} as {form:?}", row.name);
        }
    }
    assert_eq!(count, 8 * 4);
}

/// The dwords of a number.
fn dwords(value: u64, wide: bool) -> Vec<u32> {
    if wide { vec![value as u32, (value >> 32) as u32] } else { vec![value as u32] }
}

#[test]
fn atomics_change_memory_and_return_what_was_there_if_asked() {
    let mut tested = HashSet::new();
    for row in ROWS {
        let Some((operation, wide)) = atomic(row) else { continue };
        let Some((narrow, double)) = changes(&operation) else { continue };
        for form in forms(row) {
            let cases = if wide { double } else { narrow };
            assert!(!cases.is_empty(), "{}", row.name);
            for (before, source, second, after) in cases {
                for glc in [false, true] {
                    if *form == Encoding::Ds && glc {
                        continue;
                    }
                    one_atomic(row, *form, wide, (*before, *source, *second, *after), glc);
                }
            }
            tested.insert((row.op, *form));
        }
    }
    // 13 operations on 32 and on 64 bits: FLAT, GLOBAL, MUBUF, scalar memory and buffers. LDS: these, ds_rsub, ds_mskor,
    // comparison of floats, their minimum and maximum, all with and without a result except ds_wrxchg, which has one (what
    // it would be without is ds_write), and ds_add_f32.
    let of = |form: Encoding| tested.iter().filter(|(_, other)| *other == form).count();
    assert_eq!([Encoding::Flat, Encoding::Global, Encoding::Mubuf].map(of), [26; 3]);
    assert_eq!(of(Encoding::Smem), 52);
    assert_eq!(of(Encoding::Ds), 18 + 19 + 17 + 18);
}

fn one_atomic(row: &Row, form: Encoding, wide: bool, (before, source, second, after): Change, glc: bool) {
    let size = if wide { 8 } else { 4 };
    let name = format!("{} as {form:?}, GLC {glc}: {before:#x}, {source:#x}, {second:#x}", row.name);
    let scalar = form == Encoding::Smem;
    let lanes = if scalar { 1 } else { 64 };
    let mut memory = Memory::new();
    for lane in 0..lanes {
        let start = lane * STRIDE as usize;
        memory.0[start..start + size].copy_from_slice(&before.to_le_bytes()[..size]);
    }
    let mut want = memory.0.clone();
    for lane in (0..lanes).filter(|lane| scalar || is_on(*lane)) {
        let start = lane * STRIDE as usize;
        want[start..start + size].copy_from_slice(&after.to_le_bytes()[..size]);
    }
    let mut wave = wave(form);
    if scalar && row.name.contains("buffer") {
        wave.set_sgpr64(6, SIZE as u64);
    }
    let (source, second) = (dwords(source, wide), dwords(second, wide));
    let two = row.src.get(2).is_some_and(|kind| *kind != Kind::None) && form == Encoding::Ds;
    if scalar {
        for (register, value) in (RESULT..).zip(source.iter().chain(&second)) {
            wave.set_sgpr(register, *value);
        }
    } else if two {
        // The mask or comparand is first in LDS instructions.
        let compares = row.name.contains("cmpst");
        let [first, other] = if compares { [&second, &source] } else { [&source, &second] };
        fill(&mut wave, DATA, first);
        fill(&mut wave, DATA1, other);
    } else {
        fill(&mut wave, DATA, &source);
        // Behind it, where there is one.
        if row.name.contains("cmpswap") {
            fill(&mut wave, DATA + source.len() as u8, &second);
        }
    }
    let registers = |wave: &Wave| -> Vec<Values> { (0..32).map(|register| *wave.row(register)).collect() };
    let scalars = wave.sgpr;
    let mut expected = registers(&wave);
    let after = run(&mut wave, words(row, form, glc), form, memory);
    assert!(after == want, "{name}: memory");
    let returns = if form == Encoding::Ds { row.dst != Kind::None } else { glc };
    let mut expected_scalars = scalars;
    if returns && scalar {
        for (register, value) in (usize::from(RESULT)..).zip(dwords(before, wide)) {
            expected_scalars[register] = value;
        }
    } else if returns {
        let result = if form == Encoding::Mubuf { DATA } else { RESULT };
        for (register, value) in (usize::from(result)..).zip(dwords(before, wide)) {
            for lane in (0..64).filter(|lane| is_on(*lane)) {
                expected[register].set_lane(lane, value);
            }
        }
    }
    assert!(registers(&wave) == expected, "{name}: vector registers");
    assert!(wave.sgpr == expected_scalars, "{name}: scalar registers");
}

#[test]
fn scalars_are_loaded_and_stored() {
    let mut count = 0;
    for row in ROWS.iter().filter(|row| row.encoding == Encoding::Smem) {
        let size = match row.name.rsplit_once("dword") {
            Some((_, "")) => 1,
            Some((_, times)) => times.trim_start_matches('x').parse().unwrap(),
            None => continue,
        };
        if row.name.contains("scratch") {
            continue;
        }
        count += 1;
        let buffer = row.name.contains("buffer");
        let mut wave = wave(Encoding::Smem);
        if buffer {
            wave.set_sgpr64(6, SIZE as u64);
        }
        let before = wave.sgpr;
        let mut want = Memory::new().0;
        let mut expected = before;
        let [first, second] = words(row, Encoding::Smem, false);
        // At an offset of 64 bytes.
        for n in 0..size {
            let place = 64 + 4 * n;
            let register = usize::from(RESULT) + n;
            if row.name.contains("load") {
                let bytes = std::array::from_fn(|index| byte_at(place + index));
                expected[register] = u32::from_le_bytes(bytes);
            } else {
                want[place..place + 4].copy_from_slice(&before[register].to_le_bytes());
            }
        }
        let after = run(&mut wave, [first, second | 64], Encoding::Smem, Memory::new());
        assert!(after == want, "{}: memory", row.name);
        assert_eq!(wave.sgpr, expected, "{}: registers", row.name);
    }
    // s_load and s_buffer_load of 1, 2, 4, 8, 16 dwords, stores of 1, 2, 4.
    assert_eq!(count, 2 * (5 + 3));
}

#[test]
fn clocks_are_read() {
    for op in [Op::SMemtime, Op::SMemrealtime] {
        let mut wave = wave(Encoding::Smem);
        let [first, _] = words(op.row(), Encoding::Smem, false);
        run(&mut wave, [first & !(1 << 17) & !0x3f, 0], Encoding::Smem, Memory::new());
        assert_eq!(wave.sgpr64(RESULT), 0x1122_3344_5566);
    }
}

#[test]
fn lds_pairs_are_read_written_and_exchanged() {
    // Offsets 1 and 3, in elements or in 64 of them.
    let sorts: [(&str, usize, usize); 4] =
        [("2_b32", 1, 4), ("2st64_b32", 1, 256), ("2_b64", 2, 8), ("2st64_b64", 2, 512)];
    for (name, words_each, unit) in sorts {
        let row = |start: &str| {
            let name = match name.split_once('_') {
                Some((far, of)) if start == "wrxchg" => format!("ds_wrxchg{far}_rtn_{of}"),
                _ => format!("ds_{start}{name}"),
            };
            *ROWS.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("{name}"))
        };
        let places = |lane: usize| [lane * 8 + unit, lane * 8 + 3 * unit];
        let memory_word = |place: usize| u32::from_le_bytes(std::array::from_fn(|n| byte_at(place + n)));
        for start in ["read", "write", "wrxchg"] {
            let row = row(start);
            let mut wave = wave(Encoding::Ds);
            // One lane only, so that what two lanes touch does not overlap.
            let lane = 5;
            wave.set_exec(1 << lane);
            set(&mut wave, ADDRESS, lane, 8 * lane as u32);
            for n in 0..2u8 {
                set(&mut wave, DATA + n, lane, 0xa0 + u32::from(n));
                set(&mut wave, DATA1 + n, lane, 0xb0 + u32::from(n));
            }
            let [first, second] = words(&row, Encoding::Ds, false);
            let after = run(&mut wave, [first | 3 << 8 | 1, second], Encoding::Ds, Memory::new());
            let mut want = Memory::new().0;
            for (which, place) in places(lane).into_iter().enumerate() {
                for n in 0..words_each {
                    if start != "write" {
                        let got = wave.row(RESULT + (which * words_each + n) as u8).lane(lane);
                        assert_eq!(got, memory_word(place + 4 * n), "{}: {which}, {n}", row.name);
                    }
                    if start != "read" {
                        let value = [0xa0_u32, 0xb0][which] + n as u32;
                        want[place + 4 * n..place + 4 * n + 4].copy_from_slice(&value.to_le_bytes());
                    }
                }
            }
            assert!(after == want, "{}", row.name);
            assert_eq!(wave.row(RESULT).lane(lane + 1), KEPT, "{} writes lanes that are off", row.name);
        }
    }
}
