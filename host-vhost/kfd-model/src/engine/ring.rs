//! Rings: where packets are.

use super::memory::at;
use super::{Failure, Memory};

/// A ring that positions run around, in bytes, without ever being taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ring {
    base: u64,
    size: u64,
}

impl Ring {
    /// A ring of `size` bytes, of which whole words count.
    pub(super) fn new(base: u64, size: u32) -> Self {
        Self { base, size: u64::from(size & !3) }
    }

    /// Size in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// GPU address of a position.
    pub(super) fn address(&self, position: u64) -> Result<u64, Failure> {
        at(self.base, position.checked_rem(self.size).unwrap_or(0))
    }

    /// Bytes from a position to the end of the ring.
    pub(super) fn until_end(&self, position: u64) -> u64 {
        self.size - position.checked_rem(self.size).unwrap_or(0)
    }

    /// Reads words from a position on, around the end if need be.
    pub(super) fn read(&self, memory: &dyn Memory, position: u64, words: &mut [u32]) -> Result<(), Failure> {
        let first = usize::try_from(self.until_end(position) / 4).unwrap_or(usize::MAX);
        match words.split_at_mut_checked(first) {
            Some((before, behind)) => {
                memory.read_words(self.address(position)?, before)?;
                memory.read_words(self.base, behind)
            }
            None => memory.read_words(self.address(position)?, words),
        }
    }

    /// How far a write pointer is ahead of a read pointer, both in bytes. 0 for one that lies behind: a doorbell
    /// that came late.
    pub(super) fn pending(&self, read: u64, write: u64) -> Result<u64, Failure> {
        let ahead = write.wrapping_sub(read);
        if ahead > i64::MAX as u64 {
            return Ok(0);
        }
        if ahead > self.size {
            return Err(Failure::WritePointer { write, read, size: self.size });
        }
        Ok(ahead)
    }
}
