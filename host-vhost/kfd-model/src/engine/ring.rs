//! Rings: where packets are.
//!
//! Memory of the process is read with a system call, so words that were submitted are fetched ahead, as a
//! command processor does, and the read pointer is not reported with each packet.

use super::memory::at;
use super::{Failure, Memory};

/// Words that are fetched at once: 1 KiB.
const AHEAD: usize = 256;

/// Bytes of packets after which a read pointer is reported at the latest.
const UNREPORTED: u64 = 1024;

/// Words that were fetched ahead.
#[derive(Clone, Debug, Default)]
pub(super) struct Ahead {
    position: u64,
    words: Vec<u32>,
}

impl Ahead {
    /// Forgets them.
    pub(super) fn clear(&mut self) {
        self.words.clear();
    }

    fn get(&self, position: u64, words: usize) -> Option<&[u32]> {
        let first = usize::try_from(position.checked_sub(self.position)? / 4).ok()?;
        self.words.get(first..)?.get(..words)
    }
}

/// A position in a ring, and what was told of it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// Bytes that were consumed.
    pub read: u64,
    reported: u64,
}

impl Progress {
    /// Goes on; true when it is time to report.
    pub(super) fn advance(&mut self, bytes: u64, ring: &Ring) -> bool {
        self.read = self.read.wrapping_add(bytes);
        self.read.wrapping_sub(self.reported) >= UNREPORTED.min(ring.size() / 4)
    }

    /// What is to be reported now, if anything.
    pub(super) fn report(&mut self) -> Option<u64> {
        let new = self.read != self.reported;
        self.reported = self.read;
        new.then_some(self.read)
    }
}

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
    fn read(&self, memory: &dyn Memory, position: u64, words: &mut [u32]) -> Result<(), Failure> {
        let first = usize::try_from(self.until_end(position) / 4).unwrap_or(usize::MAX);
        match words.split_at_mut_checked(first) {
            Some((before, behind)) => {
                memory.read_words(self.address(position)?, before)?;
                memory.read_words(self.base, behind)
            }
            None => memory.read_words(self.address(position)?, words),
        }
    }

    /// Words from a position on, of which `pending` bytes were submitted: as many as `words` has, zeros for those that
    /// were not.
    pub(super) fn fetch(
        &self,
        memory: &dyn Memory,
        ahead: &mut Ahead,
        position: u64,
        pending: u64,
        words: &mut [u32],
    ) -> Result<(), Failure> {
        let submitted = usize::try_from(pending / 4).unwrap_or(usize::MAX);
        let (wanted, rest) = words.split_at_mut(submitted.min(words.len()));
        rest.fill(0);
        if let Some(there) = ahead.get(position, wanted.len()) {
            wanted.copy_from_slice(there);
            return Ok(());
        }
        if wanted.len() > AHEAD {
            return self.read(memory, position, wanted);
        }
        ahead.words.clear();
        ahead.position = position;
        ahead.words.resize(submitted.min(AHEAD), 0);
        // Where only a part can be read, that may be what is wanted.
        if self.read(memory, position, &mut ahead.words).is_err() {
            ahead.words.clear();
            return self.read(memory, position, wanted);
        }
        if let Some(there) = ahead.get(position, wanted.len()) {
            wanted.copy_from_slice(there);
        }
        Ok(())
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
