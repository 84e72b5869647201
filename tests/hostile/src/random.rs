//! Numbers that look random and are the same for the same seed.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// A number of a kind that tends to break things.
    pub fn nasty(&mut self) -> u64 {
        const EDGES: [u64; 12] = [
            0,
            1,
            7,
            4095,
            4096,
            0x7fff_ffff,
            0x8000_0000,
            0xffff_ffff,
            1 << 47,
            u64::MAX - 4095,
            i64::MAX as u64,
            u64::MAX,
        ];
        match self.below(3) {
            0 => EDGES.get(self.below(12) as usize).copied().unwrap_or(0),
            1 => self.below(4096),
            _ => self.next(),
        }
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        std::iter::repeat_with(|| self.next().to_le_bytes()).flatten().take(count).collect()
    }
}
