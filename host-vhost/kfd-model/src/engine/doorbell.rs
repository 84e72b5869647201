//! Doorbells: words of the process's doorbell slice, which programs map and write.
#![allow(unsafe_code, reason = "keeps a pointer into a map that its arena keeps")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kfd_seam::Result;
use nix::errno::Errno;

use super::runner::Doorbell;
use crate::arena::Arena;

/// A doorbell in a memory file.
#[derive(Debug)]
pub struct ArenaDoorbell {
    word: NonNull<u64>,
    /// Keeps the map that `word` is in.
    _arena: Arc<Arena>,
}

// SAFETY: the word lives as long as the arena, which is shared, and is only accessed as an atomic.
unsafe impl Send for ArenaDoorbell {}
// SAFETY: as above.
unsafe impl Sync for ArenaDoorbell {}

impl ArenaDoorbell {
    /// The doorbell at `offset`, a multiple of 8, in the file.
    ///
    /// # Errors
    /// What `mmap` answers; `EINVAL` for an offset that is no multiple of 8.
    pub fn new(arena: Arc<Arena>, offset: u64) -> Result<Self> {
        let (pointer, length) = arena.host(offset, 8)?;
        let word = pointer.cast::<u64>();
        if length < 8 || !word.is_aligned() {
            return Err(Errno::EINVAL);
        }
        Ok(Self { word, _arena: arena })
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: aligned and mapped as long as the arena, which `self` keeps; everybody else who accesses
        // the word does so with single instructions of their CPU or through this.
        unsafe { AtomicU64::from_ptr(self.word.as_ptr()) }
    }

    /// Makes it look as if it had never been rung, for a new queue in the place of an old one.
    pub fn reset(&self) {
        self.word().store(super::DOORBELL_UNTOUCHED, Ordering::Release);
    }
}

impl Doorbell for ArenaDoorbell {
    fn value(&self) -> u64 {
        self.word().load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::DOORBELL_UNTOUCHED;

    #[test]
    fn a_doorbell_is_a_word_of_the_file() {
        let arena = Arc::new(Arena::new("test", 1 << 16).unwrap());
        let offset = arena.allocate(8192).unwrap();
        let doorbell = ArenaDoorbell::new(arena.clone(), offset + 16).unwrap();
        assert_eq!(doorbell.value(), 0);
        doorbell.reset();
        assert_eq!(doorbell.value(), DOORBELL_UNTOUCHED);
        arena.write(offset + 16, &77u64.to_le_bytes()).unwrap();
        assert_eq!(doorbell.value(), 77);
        assert_eq!(ArenaDoorbell::new(arena, offset + 4).unwrap_err(), Errno::EINVAL);
    }
}
