//! What FLAT and MUBUF instructions do with the bytes of a lane, wherever those are.

use super::atomic::Atomic;
use super::rows::{self, Addresses, Small, lanes};
use crate::bus::{BusFault, Space};
use crate::op::Op;
use crate::wave::{Row, Wave};

/// What an instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Loads so many words.
    Load(u8),
    /// Loads less than a word.
    LoadSmall(Small),
    /// Loads into one half of a register; true for the high one.
    LoadHalf(Small, bool),
    /// Stores so many words.
    Store(u8),
    /// Stores so many bytes, from the high half of the register if true.
    StoreSmall(u8, bool),
    /// An atomic operation, on 64 bits if true.
    Atomic(Atomic, bool),
}

/// The operation of FLAT, MUBUF and SMEM atomics, by the low bits of their number.
pub fn atomic(code: u16) -> Option<Atomic> {
    Some(match code & 0x1f {
        0 => Atomic::Swap,
        1 => Atomic::CompareSwap,
        2 => Atomic::Add,
        3 => Atomic::Sub,
        4 => Atomic::SignedMin,
        5 => Atomic::UnsignedMin,
        6 => Atomic::SignedMax,
        7 => Atomic::UnsignedMax,
        8 => Atomic::And,
        9 => Atomic::Or,
        10 => Atomic::Xor,
        11 => Atomic::Increment,
        12 => Atomic::Decrement,
        _ => return None,
    })
}

impl Shape {
    /// Of an instruction that is neither SMEM nor DS.
    #[inline]
    pub fn of(op: Op) -> Option<Self> {
        Some(match op {
            Op::FlatLoadDword | Op::BufferLoadDword => Self::Load(1),
            Op::FlatLoadDwordx2 | Op::BufferLoadDwordx2 => Self::Load(2),
            Op::FlatLoadDwordx3 | Op::BufferLoadDwordx3 => Self::Load(3),
            Op::FlatLoadDwordx4 | Op::BufferLoadDwordx4 => Self::Load(4),
            Op::FlatStoreDword | Op::BufferStoreDword => Self::Store(1),
            Op::FlatStoreDwordx2 | Op::BufferStoreDwordx2 => Self::Store(2),
            Op::FlatStoreDwordx3 | Op::BufferStoreDwordx3 => Self::Store(3),
            Op::FlatStoreDwordx4 | Op::BufferStoreDwordx4 => Self::Store(4),
            Op::FlatLoadUbyte | Op::BufferLoadUbyte => Self::LoadSmall(Small::U8),
            Op::FlatLoadSbyte | Op::BufferLoadSbyte => Self::LoadSmall(Small::I8),
            Op::FlatLoadUshort | Op::BufferLoadUshort => Self::LoadSmall(Small::U16),
            Op::FlatLoadSshort | Op::BufferLoadSshort => Self::LoadSmall(Small::I16),
            Op::FlatLoadUbyteD16 | Op::BufferLoadUbyteD16 => Self::LoadHalf(Small::U8, false),
            Op::FlatLoadUbyteD16Hi | Op::BufferLoadUbyteD16Hi => Self::LoadHalf(Small::U8, true),
            Op::FlatLoadSbyteD16 | Op::BufferLoadSbyteD16 => Self::LoadHalf(Small::I8, false),
            Op::FlatLoadSbyteD16Hi | Op::BufferLoadSbyteD16Hi => Self::LoadHalf(Small::I8, true),
            Op::FlatLoadShortD16 | Op::BufferLoadShortD16 => Self::LoadHalf(Small::U16, false),
            Op::FlatLoadShortD16Hi | Op::BufferLoadShortD16Hi => Self::LoadHalf(Small::U16, true),
            Op::FlatStoreByte | Op::BufferStoreByte => Self::StoreSmall(1, false),
            Op::FlatStoreByteD16Hi | Op::BufferStoreByteD16Hi => Self::StoreSmall(1, true),
            Op::FlatStoreShort | Op::BufferStoreShort => Self::StoreSmall(2, false),
            Op::FlatStoreShortD16Hi | Op::BufferStoreShortD16Hi => Self::StoreSmall(2, true),
            other => {
                let code = other.row().code;
                Self::Atomic(atomic(code).filter(|_| code & 0x40 != 0)?, code & 0x20 != 0)
            }
        })
    }
}

/// Where the bytes of each lane are: how far the next word is differs.
pub trait Place {
    /// The addresses of the word `index` words behind the first one.
    fn word(&self, index: u8) -> Addresses;

    /// All words of a lane follow one another.
    const IN_A_ROW: bool;
}

/// At addresses as they are.
pub struct Linear<'a>(pub &'a Addresses);

impl Place for Linear<'_> {
    const IN_A_ROW: bool = true;

    #[inline]
    fn word(&self, index: u8) -> Addresses {
        let mut addresses = *self.0;
        for address in &mut addresses {
            *address = address.wrapping_add(u64::from(index) * 4);
        }
        addresses
    }
}

/// The registers that an instruction names.
#[derive(Clone, Copy, Debug)]
pub struct Registers {
    /// Where results go, if anywhere.
    pub to: Option<u8>,
    /// The first register with data.
    pub data: u8,
}

fn half(row: &Row, high: bool) -> Row {
    let mut row = *row;
    if high {
        row.0.iter_mut().for_each(|value| *value >>= 16);
    }
    row
}

fn register(base: u8, index: usize) -> usize {
    usize::from(base) + index
}

fn source<const N: usize>(wave: &Wave, base: u8) -> [Row; N] {
    core::array::from_fn(|index| *wave.row_at(register(base, index)))
}

fn load_several<const N: usize, S: Space>(
    space: &mut S,
    addresses: &Addresses,
    mask: u64,
    wave: &mut Wave,
    to: u8,
) -> Result<(), BusFault> {
    let mut rows = [Row::ZERO; N];
    rows::load_words(space, addresses, mask, &mut rows)?;
    for (index, row) in rows.iter().enumerate() {
        wave.write_masked(mask, register(to, index), row);
    }
    Ok(())
}

/// Does it for the lanes of `mask`.
///
/// # Errors
/// The fault of the first lane that has one.
#[inline]
pub fn run<P: Place>(
    shape: Shape,
    wave: &mut Wave,
    registers: Registers,
    place: &P,
    mask: u64,
    space: &mut impl Space,
) -> Result<(), BusFault> {
    let Registers { to, data } = registers;
    match shape {
        Shape::Load(1) => {
            if let Some(row) = to.and_then(|to| wave.row_mut(to)) {
                rows::load_word(space, &place.word(0), mask, row)?;
            }
        }
        Shape::Load(count) if P::IN_A_ROW => {
            let Some(to) = to else { return Ok(()) };
            let addresses = place.word(0);
            match count {
                2 => load_several::<2, _>(space, &addresses, mask, wave, to)?,
                3 => load_several::<3, _>(space, &addresses, mask, wave, to)?,
                _ => load_several::<4, _>(space, &addresses, mask, wave, to)?,
            }
        }
        Shape::Load(count) => {
            let Some(to) = to else { return Ok(()) };
            // All before any is written: the addresses may come from these registers.
            let mut loaded = [Row::ZERO; 4];
            for (index, row) in (0..count).zip(&mut loaded) {
                rows::load_word(space, &place.word(index), mask, row)?;
            }
            for (index, row) in loaded.iter().take(usize::from(count)).enumerate() {
                wave.write_masked(mask, register(to, index), row);
            }
        }
        Shape::LoadSmall(kind) => {
            if let Some(row) = to.and_then(|to| wave.row_mut(to)) {
                rows::load_small(space, &place.word(0), mask, kind, row)?;
            }
        }
        Shape::LoadHalf(kind, high) => {
            let mut loaded = Row::ZERO;
            rows::load_small(space, &place.word(0), mask, kind, &mut loaded)?;
            if let Some(row) = to.and_then(|to| wave.row_mut(to)) {
                for lane in lanes(mask) {
                    let (old, new) = (row.lane(lane), loaded.lane(lane));
                    let value =
                        if high { old & 0xffff | new << 16 } else { old & 0xffff_0000 | new & 0xffff };
                    row.set_lane(lane, value);
                }
            }
        }
        Shape::Store(1) => rows::store_word(space, &place.word(0), mask, wave.row(data))?,
        Shape::Store(count) if P::IN_A_ROW => {
            let addresses = place.word(0);
            match count {
                2 => rows::store_words(space, &addresses, mask, &source::<2>(wave, data))?,
                3 => rows::store_words(space, &addresses, mask, &source::<3>(wave, data))?,
                _ => rows::store_words(space, &addresses, mask, &source::<4>(wave, data))?,
            }
        }
        Shape::Store(count) => {
            for index in 0..count {
                let row = wave.row_at(register(data, usize::from(index)));
                rows::store_word(space, &place.word(index), mask, row)?;
            }
        }
        Shape::StoreSmall(bytes, high) => {
            let row = half(wave.row(data), high);
            rows::store_small(space, &place.word(0), mask, usize::from(bytes), &row)?;
        }
        Shape::Atomic(operation, false) => {
            // The comparand stands behind the source.
            let [value, compare] = source(wave, data);
            let before = rows::atomic32(space, &place.word(0), mask, operation, &value, &compare)?;
            if let Some(to) = to {
                wave.write_masked(mask, usize::from(to), &before);
            }
        }
        Shape::Atomic(operation, true) => {
            let [low, high, compare_low, compare_high] = source(wave, data);
            let (value, compare) = ([&low, &high], [&compare_low, &compare_high]);
            let before = rows::atomic64(space, &place.word(0), mask, operation, value, compare)?;
            if let Some(to) = to {
                for (index, row) in before.iter().enumerate() {
                    wave.write_masked(mask, register(to, index), row);
                }
            }
        }
    }
    Ok(())
}
