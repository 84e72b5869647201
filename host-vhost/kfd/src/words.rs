//! Memory that this process shares with a guest or with a GPU, as 64-bit words.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::KfdError;
use crate::mapping::{GuestMapping, Piece};

const WORD: u64 = size_of::<u64>() as u64;

/// Pieces of files one after the other, read and written a word at a time: each access is one instruction of the CPU, so
/// that neither side sees half a word. Unmapped when dropped.
///
/// The files have to have the pieces for as long as this lives: the kernel ends a process that touches a page beyond the
/// end of a file.
#[derive(Debug)]
pub struct SharedWords {
    mapping: GuestMapping,
}

#[allow(unsafe_code)] // the mapping is a pointer
// SAFETY: words are only reached as atomics (`word`), which any thread may use at any time.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps the pieces, shared, readable and writable.
    pub fn new(pieces: &[Piece<'_>]) -> Result<Self, KfdError> {
        Ok(SharedWords { mapping: GuestMapping::new(pieces)? })
    }

    /// Words.
    pub fn count(&self) -> u64 {
        self.mapping.len() / WORD
    }

    #[allow(unsafe_code)] // shared memory is a pointer
    fn word(&self, index: u64) -> Option<&AtomicU64> {
        let offset = index.checked_mul(WORD).filter(|_| index < self.count())?;
        let address = usize::try_from(self.mapping.address().checked_add(offset)?).ok()?;
        let word = NonNull::new(std::ptr::with_exposed_provenance_mut::<u64>(address))?;
        // SAFETY: the word lies wholly within the mapping, which begins at a page boundary (so that every word is aligned),
        // is readable and writable, and lives as long as `self`, which bounds the reference. Memory that others change at
        // any time may be looked at as atomics, which are valid for any bits; nobody here has other references to it.
        Some(unsafe { AtomicU64::from_ptr(word.as_ptr()) })
    }

    /// The word with that number, and all that its writer wrote before it; `None` beyond the end.
    pub fn load(&self, index: u64) -> Option<u64> {
        self.word(index).map(|word| word.load(Ordering::Acquire))
    }

    /// Stores a word, after all that this thread has seen and written. Does nothing beyond the end.
    pub fn store(&self, index: u64, value: u64) {
        if let Some(word) = self.word(index) {
            word.store(value, Ordering::Release);
        }
    }

    /// Sets bits of a word, after all that this thread has seen and written. `false` beyond the end.
    pub fn set_bits(&self, index: u64, bits: u64) -> bool {
        self.word(index).map(|word| word.fetch_or(bits, Ordering::AcqRel)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn words_are_those_of_the_files() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 * 4096).unwrap();
        let piece = |page: u64| Piece { file: file.as_fd(), offset: page * 4096, len: 4096 };
        let words = SharedWords::new(&[piece(2), piece(0)]).unwrap();
        assert_eq!(words.count(), 1024);
        file.write_all_at(&0x1122_3344_5566_7788u64.to_ne_bytes(), 2 * 4096 + 16).unwrap();
        assert_eq!(words.load(2), Some(0x1122_3344_5566_7788));
        words.store(512, u64::MAX);
        words.store(1024, 5);
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((bytes, words.load(1024), words.load(u64::MAX)), ([0xff; 8], None, None));
        assert!(words.set_bits(2, 0xf000) && !words.set_bits(1024, 1));
        assert_eq!(words.load(2), Some(0x1122_3344_5566_f788));
    }
}
