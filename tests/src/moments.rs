//! Random moments that can be had again.

use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

/// Environment variable with the seed of a run that is to be repeated.
pub const SEED_VARIABLE: &str = "VIRTIO_KFD_TEST_SEED";

/// Environment variable with how many rounds a test is to do.
pub const ROUNDS_VARIABLE: &str = "VIRTIO_KFD_TEST_ROUNDS";

/// The rounds that [`ROUNDS_VARIABLE`] asks for, or `usual`.
pub fn rounds(usual: u32) -> u32 {
    number(ROUNDS_VARIABLE).unwrap_or(usual)
}

fn number<T: std::str::FromStr>(variable: &str) -> Option<T> {
    std::env::var(variable).ok()?.parse().ok()
}

/// A sequence of random numbers (SplitMix64). What is done with them takes its own time, so that a repeated run meets the
/// same moments only about.
#[derive(Debug, Clone)]
pub struct Moments {
    state: u64,
}

impl Moments {
    /// Starts at the seed that [`SEED_VARIABLE`] names, or at a new one; prints which.
    pub fn new() -> Self {
        let fresh = || std::collections::hash_map::RandomState::new().build_hasher().finish();
        let state = number(SEED_VARIABLE).unwrap_or_else(fresh);
        println!("{SEED_VARIABLE}={state}");
        Self { state }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`.
    ///
    /// # Panics
    /// `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Sleeps for less than `longest`, and tells how long.
    pub fn pass(&mut self, longest: Duration) -> Duration {
        let micros = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX).max(1);
        let pause = Duration::from_micros(self.below(micros));
        std::thread::sleep(pause);
        pause
    }
}

impl Default for Moments {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_splitmix64() {
        // The generator's first numbers from 1234567 (Vigna's splitmix64.c).
        let mut moments = Moments { state: 1234567 };
        assert_eq!([moments.next(), moments.next()], [6457827717110365317, 3203168211198807973]);
        assert!((0..1000).all(|_| moments.below(7) < 7));
    }
}
