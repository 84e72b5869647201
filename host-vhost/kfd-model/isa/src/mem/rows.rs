//! Accesses of all lanes of a wave at once, each lane at an address of its own.

use super::atomic::Atomic;
use crate::bus::{BusFault, Space};
use crate::wave::{LANES, Row};

/// The address of each lane.
pub type Addresses = [u64; LANES];

/// The numbers of the lanes in a mask.
#[inline]
pub fn lanes(mask: u64) -> impl Iterator<Item = usize> {
    let mut left = mask;
    core::iter::from_fn(move || {
        let lane = left.trailing_zeros() as usize;
        left &= left.wrapping_sub(1);
        (lane < LANES).then_some(lane)
    })
}

#[inline]
fn at(addresses: &Addresses, lane: usize) -> u64 {
    addresses.get(lane).copied().unwrap_or(0)
}

/// The lanes of the mask follow one another, and so do their words: the first lane, how many, and the first address.
#[inline]
fn run(addresses: &Addresses, mask: u64) -> Option<(usize, usize, u64)> {
    let first = mask.trailing_zeros() as usize;
    let count = mask.count_ones() as usize;
    let ones = if count == LANES { u64::MAX } else { (1 << count) - 1 };
    if count == 0 || mask >> first != ones {
        return None;
    }
    let start = at(addresses, first);
    if !start.is_multiple_of(4) {
        return None;
    }
    let run = addresses.get(first..first + count)?;
    let mut wrong = 0;
    for (index, va) in (0u64..).zip(run) {
        wrong |= va ^ start.wrapping_add(4 * index);
    }
    (wrong == 0).then_some((first, count, start))
}

/// Loads a word for each lane of the mask; the other lanes of `row` stay.
///
/// # Errors
/// The fault of the first lane that has one.
#[inline]
pub fn load_word(
    space: &mut impl Space,
    addresses: &Addresses,
    mask: u64,
    row: &mut Row,
) -> Result<(), BusFault> {
    if let Some((first, count, start)) = run(addresses, mask)
        && let Some(words) = row.0.get_mut(first..first + count)
    {
        return space.load_words(start, words);
    }
    for lane in lanes(mask) {
        let [word] = load_words_of_lane(space, at(addresses, lane))?;
        row.set_lane(lane, word);
    }
    Ok(())
}

#[inline]
fn load_words_of_lane<const N: usize>(space: &mut impl Space, va: u64) -> Result<[u32; N], BusFault> {
    let mut words = [0u32; N];
    if va.is_multiple_of(4) {
        space.load_words(va, &mut words)?;
    } else {
        let mut va = va;
        for word in &mut words {
            let mut bytes = [0; 4];
            space.load(va, &mut bytes)?;
            *word = u32::from_le_bytes(bytes);
            va = va.wrapping_add(4);
        }
    }
    Ok(words)
}

/// Loads `N` words in a row for each lane of the mask; the other lanes stay.
///
/// # Errors
/// The fault of the first lane that has one.
#[inline]
pub fn load_words<const N: usize>(
    space: &mut impl Space,
    addresses: &Addresses,
    mask: u64,
    rows: &mut [Row; N],
) -> Result<(), BusFault> {
    for lane in lanes(mask) {
        let words: [u32; N] = load_words_of_lane(space, at(addresses, lane))?;
        for (row, word) in rows.iter_mut().zip(words) {
            row.set_lane(lane, word);
        }
    }
    Ok(())
}

/// Stores a word of each lane of the mask.
///
/// # Errors
/// The fault of the first lane that has one.
#[inline]
pub fn store_word(
    space: &mut impl Space,
    addresses: &Addresses,
    mask: u64,
    row: &Row,
) -> Result<(), BusFault> {
    if let Some((first, count, start)) = run(addresses, mask)
        && let Some(words) = row.0.get(first..first + count)
    {
        return space.store_words(start, words);
    }
    for lane in lanes(mask) {
        store_words_of_lane(space, at(addresses, lane), &[row.lane(lane)])?;
    }
    Ok(())
}

#[inline]
fn store_words_of_lane(space: &mut impl Space, va: u64, words: &[u32]) -> Result<(), BusFault> {
    if va.is_multiple_of(4) {
        return space.store_words(va, words);
    }
    let mut va = va;
    for word in words {
        space.store(va, &word.to_le_bytes())?;
        va = va.wrapping_add(4);
    }
    Ok(())
}

/// Stores `N` words in a row of each lane of the mask.
///
/// # Errors
/// The fault of the first lane that has one.
#[inline]
pub fn store_words<const N: usize>(
    space: &mut impl Space,
    addresses: &Addresses,
    mask: u64,
    rows: &[Row; N],
) -> Result<(), BusFault> {
    for lane in lanes(mask) {
        let words: [u32; N] = core::array::from_fn(|index| rows.get(index).map_or(0, |row| row.lane(lane)));
        store_words_of_lane(space, at(addresses, lane), &words)?;
    }
    Ok(())
}

/// A piece of less than a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Small {
    /// 8 bits, the rest zeros.
    U8,
    /// 8 bits with sign.
    I8,
    /// 16 bits, the rest zeros.
    U16,
    /// 16 bits with sign.
    I16,
}

impl Small {
    /// How many bytes.
    #[inline]
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
        }
    }

    /// Widened to 32 bits.
    #[inline]
    pub fn widen(self, value: u32) -> u32 {
        match self {
            Self::U8 => value & 0xff,
            Self::I8 => value as u8 as i8 as u32,
            Self::U16 => value & 0xffff,
            Self::I16 => value as u16 as i16 as u32,
        }
    }
}

/// Loads a piece for each lane of the mask, widened; the other lanes stay.
///
/// # Errors
/// The fault of the first lane that has one.
#[inline]
pub fn load_small(
    space: &mut impl Space,
    addresses: &Addresses,
    mask: u64,
    kind: Small,
    row: &mut Row,
) -> Result<(), BusFault> {
    for lane in lanes(mask) {
        let mut bytes = [0u8; 2];
        space.load(at(addresses, lane), bytes.get_mut(..kind.bytes()).unwrap_or_default())?;
        row.set_lane(lane, kind.widen(u32::from(u16::from_le_bytes(bytes))));
    }
    Ok(())
}

/// Stores the low `bytes` of each lane of the mask.
///
/// # Errors
/// The fault of the first lane that has one.
#[inline]
pub fn store_small(
    space: &mut impl Space,
    addresses: &Addresses,
    mask: u64,
    bytes: usize,
    row: &Row,
) -> Result<(), BusFault> {
    for lane in lanes(mask) {
        let value = row.lane(lane).to_le_bytes();
        space.store(at(addresses, lane), value.get(..bytes).unwrap_or_default())?;
    }
    Ok(())
}

/// Runs an atomic operation on a word of 32 bits for each lane of the mask, one after the other; what was there before.
///
/// # Errors
/// The fault of the first lane that has one.
#[inline]
pub fn atomic32(
    space: &mut impl Space,
    addresses: &Addresses,
    mask: u64,
    operation: Atomic,
    source: &Row,
    compare: &Row,
) -> Result<Row, BusFault> {
    let mut before = Row::ZERO;
    for lane in lanes(mask) {
        let va = at(addresses, lane);
        if !va.is_multiple_of(4) {
            return Err(BusFault::Unaligned { va, size: 4 });
        }
        let (source, compare) = (source.lane(lane), compare.lane(lane));
        let old = space.atomic32(va, |old| operation.apply32(old, source, compare))?;
        before.set_lane(lane, old);
    }
    Ok(before)
}

/// The same on 64 bits; rows of low and high halves.
///
/// # Errors
/// The fault of the first lane that has one.
#[inline]
pub fn atomic64(
    space: &mut impl Space,
    addresses: &Addresses,
    mask: u64,
    operation: Atomic,
    source: [&Row; 2],
    compare: [&Row; 2],
) -> Result<[Row; 2], BusFault> {
    let mut before = [Row::ZERO; 2];
    let wide =
        |[low, high]: [&Row; 2], lane: usize| u64::from(low.lane(lane)) | u64::from(high.lane(lane)) << 32;
    for lane in lanes(mask) {
        let va = at(addresses, lane);
        if !va.is_multiple_of(8) {
            return Err(BusFault::Unaligned { va, size: 8 });
        }
        let (source, compare) = (wide(source, lane), wide(compare, lane));
        let old = space.atomic64(va, |old| operation.apply64(old, source, compare))?;
        let [low, high] = &mut before;
        low.set_lane(lane, old as u32);
        high.set_lane(lane, (old >> 32) as u32);
    }
    Ok(before)
}
