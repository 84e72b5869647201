//! The GPU's view of memory.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::Failure;
use crate::space::Fault;

/// What an access needs of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading only.
    Read,
    /// Writing, and reading where the operation does.
    Write,
}

/// Memory at GPU virtual addresses, through the page table.
///
/// The pages are shared with CPUs, other processes and the guest. [`Memory::word`] and
/// [`Memory::double_word`] are therefore real atomic accesses to the page; the others may tear.
pub trait Memory: Send + Sync {
    /// Fills `buffer` from `va` on.
    ///
    /// # Errors
    /// The fault at the first byte that could not be read.
    fn read(&self, va: u64, buffer: &mut [u8]) -> Result<(), Fault>;

    /// Writes `bytes` at `va`.
    ///
    /// # Errors
    /// The fault at the first byte that could not be written; what lies before it was written.
    fn write(&self, va: u64, bytes: &[u8]) -> Result<(), Fault>;

    /// Runs `operation` once on the 32-bit word at `va`, which is a multiple of 4.
    ///
    /// # Errors
    /// The fault; `operation` was not run then.
    fn word(&self, va: u64, access: Access, operation: &mut dyn FnMut(&AtomicU32)) -> Result<(), Fault>;

    /// Runs `operation` once on the 64-bit word at `va`, which is a multiple of 8.
    ///
    /// # Errors
    /// The fault; `operation` was not run then.
    fn double_word(
        &self,
        va: u64,
        access: Access,
        operation: &mut dyn FnMut(&AtomicU64),
    ) -> Result<(), Fault>;

    /// Copies `length` bytes; ranges that overlap are copied as `memmove` does.
    ///
    /// # Errors
    /// The fault; some of the bytes may have been copied.
    fn copy(&self, to: u64, from: u64, length: u64) -> Result<(), Fault> {
        copy_by_buffer(self, to, from, length)
    }

    /// Writes `pattern`, little-endian, over `length` bytes from `to` on.
    ///
    /// # Errors
    /// The fault; some of the bytes may have been written.
    fn fill(&self, to: u64, pattern: u32, length: u64) -> Result<(), Fault> {
        let whole = usize::try_from(length).map_or(BOUNCE, |length| length.min(BOUNCE));
        let buffer: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(whole).collect();
        let mut done = 0;
        while done < length {
            let piece = (length - done).min(buffer.len() as u64);
            let part = usize::try_from(piece).ok().and_then(|piece| buffer.get(..piece));
            let Some(part) = part else { return Ok(()) };
            self.write(to.wrapping_add(done), part)?;
            done += piece;
        }
        Ok(())
    }
}

/// Size of the buffer that copies go through, in bytes: a multiple of every pattern.
const BOUNCE: usize = 64 << 10;

/// Copies through a buffer, from whichever end does not overwrite what is still to be read.
pub(crate) fn copy_by_buffer(
    memory: &(impl Memory + ?Sized),
    to: u64,
    from: u64,
    length: u64,
) -> Result<(), Fault> {
    let mut buffer = vec![0u8; usize::try_from(length).map_or(BOUNCE, |length| length.min(BOUNCE))];
    let backwards = overlaps_backwards(to, from, length);
    let mut left = length;
    while left > 0 {
        let piece = left.min(buffer.len() as u64);
        let offset = if backwards { left - piece } else { length - left };
        let part = usize::try_from(piece).ok().and_then(|piece| buffer.get_mut(..piece));
        let Some(part) = part else { return Ok(()) };
        memory.read(from.wrapping_add(offset), part)?;
        memory.write(to.wrapping_add(offset), part)?;
        left -= piece;
    }
    Ok(())
}

/// A copy upwards onto itself, which has to start at the end.
pub(crate) fn overlaps_backwards(to: u64, from: u64, length: u64) -> bool {
    to > from && to - from < length
}

/// An address `offset` bytes on.
pub(crate) fn at(va: u64, offset: u64) -> Result<u64, Failure> {
    va.checked_add(offset).ok_or(Failure::AddressOverflow { va, offset })
}

fn aligned(va: u64, size: u32) -> Result<u64, Failure> {
    if va.is_multiple_of(u64::from(size)) { Ok(va) } else { Err(Failure::Unaligned { va, size }) }
}

impl dyn Memory + '_ {
    /// Reads a word that others may write at the same time; what they wrote before it is seen too.
    pub(crate) fn load32(&self, va: u64) -> Result<u32, Failure> {
        let mut value = 0;
        self.word(aligned(va, 4)?, Access::Read, &mut |word| value = word.load(Ordering::Acquire))?;
        Ok(value)
    }

    /// The same for 64 bits.
    pub(crate) fn load64(&self, va: u64) -> Result<u64, Failure> {
        let mut value = 0;
        self.double_word(aligned(va, 8)?, Access::Read, &mut |word| value = word.load(Ordering::Acquire))?;
        Ok(value)
    }

    /// Writes a word after everything that was written before.
    pub(crate) fn store32(&self, va: u64, value: u32) -> Result<(), Failure> {
        Ok(self.word(aligned(va, 4)?, Access::Write, &mut |word| word.store(value, Ordering::Release))?)
    }

    /// The same for 64 bits.
    pub(crate) fn store64(&self, va: u64, value: u64) -> Result<(), Failure> {
        Ok(self
            .double_word(aligned(va, 8)?, Access::Write, &mut |word| word.store(value, Ordering::Release))?)
    }

    /// Runs an atomic operation on a word.
    pub(crate) fn update32(
        &self,
        va: u64,
        operation: &mut dyn FnMut(&AtomicU32) -> u32,
    ) -> Result<u32, Failure> {
        let mut value = 0;
        self.word(aligned(va, 4)?, Access::Write, &mut |word| value = operation(word))?;
        Ok(value)
    }

    /// The same for 64 bits.
    pub(crate) fn update64(
        &self,
        va: u64,
        operation: &mut dyn FnMut(&AtomicU64) -> u64,
    ) -> Result<u64, Failure> {
        let mut value = 0;
        self.double_word(aligned(va, 8)?, Access::Write, &mut |word| value = operation(word))?;
        Ok(value)
    }

    /// Fills an array of little-endian words.
    pub(crate) fn read_words(&self, va: u64, words: &mut [u32]) -> Result<(), Failure> {
        let mut bytes = [0u8; 256];
        let mut va = va;
        for part in words.chunks_mut(bytes.len() / 4) {
            let Some(bytes) = bytes.get_mut(..part.len() * 4) else { continue };
            self.read(va, bytes)?;
            for (word, bytes) in part.iter_mut().zip(bytes.as_chunks().0) {
                *word = u32::from_le_bytes(*bytes);
            }
            va = va.wrapping_add(bytes.len() as u64);
        }
        Ok(())
    }
}
