//! Group memory (LDS): what the waves of a workgroup share.

use crate::bus::{BusFault, Space};

/// Most bytes that a workgroup can have.
pub const MAX_BYTES: u32 = 64 << 10;

/// The group memory of one workgroup. What is read beyond its end is 0, what is written there is lost, as in hardware.
#[derive(Clone, Debug, Default)]
pub struct Lds {
    words: Vec<u32>,
}

impl Lds {
    /// Group memory of `bytes`, at most [`MAX_BYTES`], in whole blocks of 512 as the hardware gives it out.
    pub fn new(bytes: u32) -> Self {
        let mut new = Self::default();
        new.reset(bytes);
        new
    }

    /// Becomes fresh group memory of another size.
    pub fn reset(&mut self, bytes: u32) {
        let words = (bytes.min(MAX_BYTES)).next_multiple_of(512) / 4;
        self.words.clear();
        self.words.resize(words as usize, 0);
    }

    /// Its size in bytes.
    pub fn size(&self) -> u32 {
        (self.words.len() * 4) as u32
    }

    #[inline]
    fn word(&self, va: u64) -> u32 {
        usize::try_from(va / 4).ok().and_then(|index| self.words.get(index)).copied().unwrap_or(0)
    }

    #[inline]
    fn word_mut(&mut self, va: u64) -> Option<&mut u32> {
        self.words.get_mut(usize::try_from(va / 4).ok()?)
    }

    /// What lies from `va` on, as far as it is there.
    fn run(&mut self, va: u64, length: usize) -> &mut [u32] {
        let start = usize::try_from(va / 4).unwrap_or(usize::MAX).min(self.words.len());
        let end = start.saturating_add(length).min(self.words.len());
        self.words.get_mut(start..end).unwrap_or_default()
    }
}

impl Space for Lds {
    #[inline]
    fn load(&mut self, va: u64, to: &mut [u8]) -> Result<(), BusFault> {
        for (va, byte) in (va..).zip(to) {
            *byte = (self.word(va) >> (va % 4 * 8)) as u8;
        }
        Ok(())
    }

    #[inline]
    fn store(&mut self, va: u64, from: &[u8]) -> Result<(), BusFault> {
        for (va, byte) in (va..).zip(from) {
            if let Some(word) = self.word_mut(va) {
                let shift = va % 4 * 8;
                *word = *word & !(0xff << shift) | u32::from(*byte) << shift;
            }
        }
        Ok(())
    }

    #[inline]
    fn load_words(&mut self, va: u64, to: &mut [u32]) -> Result<(), BusFault> {
        let run = self.run(va, to.len());
        let there = run.len();
        for (to, word) in to.iter_mut().zip(run) {
            *to = *word;
        }
        to.iter_mut().skip(there).for_each(|to| *to = 0);
        Ok(())
    }

    #[inline]
    fn store_words(&mut self, va: u64, from: &[u32]) -> Result<(), BusFault> {
        for (word, from) in self.run(va, from.len()).iter_mut().zip(from) {
            *word = *from;
        }
        Ok(())
    }

    #[inline]
    fn atomic32(&mut self, va: u64, change: impl Fn(u32) -> u32) -> Result<u32, BusFault> {
        let Some(word) = self.word_mut(va) else { return Ok(0) };
        let old = *word;
        *word = change(old);
        Ok(old)
    }

    #[inline]
    fn atomic64(&mut self, va: u64, change: impl Fn(u64) -> u64) -> Result<u64, BusFault> {
        let [low, high] = self.run(va, 2) else { return Ok(0) };
        let old = u64::from(*low) | u64::from(*high) << 32;
        let new = change(old);
        (*low, *high) = (new as u32, (new >> 32) as u32);
        Ok(old)
    }
}
