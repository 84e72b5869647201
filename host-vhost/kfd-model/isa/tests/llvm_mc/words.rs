//! Words to decode.

/// The encodings: bits that are fixed, and bits that are free.
const ENCODINGS: [(u32, u32); 20] = [
    (0x8000_0000, 0x7fff_ffff), // SOP2 and what begins with a one
    (0xb000_0000, 0x0fff_ffff), // SOPK
    (0xbe80_0000, 0x007f_ffff), // SOP1
    (0xbf00_0000, 0x007f_ffff), // SOPC
    (0xbf80_0000, 0x007f_ffff), // SOPP
    (0xc000_0000, 0x03ff_ffff), // SMEM
    (0x7e00_0000, 0x01ff_ffff), // VOP1
    (0x0000_0000, 0x7fff_ffff), // VOP2
    (0x7c00_0000, 0x01ff_ffff), // VOPC
    (0xd000_0000, 0x03ff_ffff), // VOP3
    (0xd1c0_0000, 0x00ff_ffff), // VOP3 without a short form
    (0xd380_0000, 0x007f_ffff), // VOP3P
    (0xd800_0000, 0x03ff_ffff), // DS
    (0xdc00_0000, 0x03ff_ffff), // FLAT
    (0xe000_0000, 0x03ff_ffff), // MUBUF
    (0x7e00_00f9, 0x01ff_fe00), // SDWA
    (0x0000_00f9, 0x7fff_fe00),
    (0x7c00_00f9, 0x01ff_fe00),
    (0x7e00_00fa, 0x01ff_fe00), // DPP
    (0x0000_00fa, 0x7fff_fe00),
];

/// A small generator (splitmix64), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// A word, most of them with few bits set, as instructions are.
    fn word(&mut self) -> u32 {
        let ands = self.below(3);
        (0..ands).fold(self.next() as u32, |word, _| word & self.next() as u32)
    }
}

/// Whether LLVM can be asked. It aborts when it is to write a sub-word selection that does not exist, and LLVM 14 does
/// not know SOFFSET_EN of scalar memory instructions and takes another field for the register.
fn can_be_asked(words: &[u32]) -> bool {
    let [first, second] = words else { return true };
    if first >> 31 == 0 && first & 0x1ff == 0xf9 {
        let field = |low: u32, width: u32| (second >> low) & ((1 << width) - 1);
        return field(8, 3) != 7 && field(11, 2) != 3 && field(16, 3) != 7 && field(24, 3) != 7;
    }
    !(first >> 26 == 0x30 && (first >> 14) & 1 != 0)
}

/// Pairs of words, nearly all of them with the fixed bits of an encoding.
pub fn random(seed: u64, count: usize) -> Vec<Vec<u32>> {
    let mut random = Random(seed);
    let mut all = Vec::new();
    while all.len() < count {
        let words = match random.below(20) {
            0 => vec![random.next() as u32, random.next() as u32],
            _ => {
                let (fixed, free) = ENCODINGS[random.below(ENCODINGS.len())];
                vec![fixed | (random.word() & free), random.word()]
            }
        };
        if can_be_asked(&words) {
            all.push(words);
        }
    }
    all
}

/// Every number of every encoding, each with several operands, so that LLVM accepts one of them if it has the number.
pub fn all_opcodes() -> Vec<Vec<u32>> {
    // Encoding bits, place of the number, how many numbers.
    let encodings: [(u32, u32, u32); 17] = [
        (0x8000_0000, 23, 0x60),
        (0xb000_0000, 23, 0x20),
        (0xbe80_0000, 8, 0x100),
        (0xbf00_0000, 16, 0x80),
        (0xbf80_0000, 16, 0x80),
        (0xc000_0000, 18, 0x100),
        (0x7e00_0000, 9, 0x100),
        (0x0000_0000, 25, 0x3e),
        (0x7c00_0000, 17, 0x100),
        (0xd000_0000, 16, 0x400),
        (0xd800_0000, 17, 0x100),
        (0xdc00_0000, 18, 0x80),
        (0xdc00_4000, 18, 0x80),
        (0xdc00_8000, 18, 0x80),
        (0xe000_0000, 18, 0x80),
        (0x7e00_00f9, 9, 0x100),
        (0x7e00_00fa, 9, 0x100),
    ];
    let seconds = [
        0,
        0x0000_0004,
        // VOP3: one, two and three vector registers.
        0x0000_0102,
        0x0002_0902,
        0x0412_0902,
        // GDS, SADDR off, SRSRC and SOFFSET, IDXEN.
        0x007f_0000,
        0x8001_0000,
        // SDWA: whole dwords; DPP: all lanes.
        0x0606_0600,
        0x0006_0600,
        0xff00_e400,
    ];
    let mut all = Vec::new();
    for (fixed, place, count) in encodings {
        for number in 0..count {
            for second in seconds {
                // Also the bit that is GDS, LDS or an immediate.
                for more in [0, 1 << 16, 1 << 17] {
                    if more & (((count - 1) << place) | fixed) == 0 {
                        let words = vec![fixed | number << place | more, second];
                        if can_be_asked(&words) {
                            all.push(words);
                        }
                    }
                }
            }
        }
    }
    all
}
