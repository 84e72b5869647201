//! The performance counters of GPUs, which AMD's library has in tables of its own (pmc_table.c). What a counter counts to is
//! another matter: that would be perf events of the host.

use std::sync::OnceLock;

use hsakmt_abi::counters::{HsaCounter, HsaCounterBlockProperties, HsaProfileType};

use crate::thunk::refusal::{Outcome, Refusal};

/// A block of counters.
struct Block {
    /// Its `HSA_UUID` (`HSA_PROFILEBLOCK_AMD_*` of hsakmttypes.h), as words in memory.
    uuid: [u32; 4],
    /// Its number (`enum perf_block_id` of pmc_table.h).
    index: u32,
    /// Counters that count at once.
    slots: u32,
    /// First and last number of its counters.
    counters: &'static [(u32, u32)],
}

const fn block(uuid: [u32; 4], index: u32, slots: u32, counters: &'static [(u32, u32)]) -> Block {
    Block { uuid, index, slots, counters }
}

const CB: [u32; 4] = [0x9ba4_29c6, 0x4b38_af2d, 0x7215_49b3, 0x6aac_be71];
const CPF: [u32; 4] = [0x2b0a_d2b5, 0x4f46_1c43, 0x19e1_bca7, 0xc9a6_1e41];
const CPG: [u32; 4] = [0x590e_c94d, 0x448f_20f0, 0x6c31_ff8d, 0xffe7_9d67];
const DB: [u32; 4] = [0x3d1a_47fc, 0x4ed4_0013, 0x2c82_0683, 0xc2a6_b7a0];
const GDS: [u32; 4] = [0xf592_76ec, 0x4bf8_2526, 0x8f11_c08e, 0xc90d_7077];
const GRBM: [u32; 4] = [0x8f00_933c, 0x4801_c33d, 0x0770_b797, 0xad73_85f7];
const GRBMSE: [u32; 4] = [0x34eb_d8d7, 0x4d15_7c8b, 0x4e0e_fa88, 0xc19a_f54a];
const IA: [u32; 4] = [0x3427_6944, 0x4fcd_4264, 0x26ae_6e9d, 0x51ec_8245];
const PASC: [u32; 4] = [0xb0e7_fb5d, 0x4744_0efc, 0x235d_16b5, 0x6cd5_1fdc];
const PASU: [u32; 4] = [0x9a15_2b6a, 0x45f2_1fad, 0x63f1_bfa5, 0xcdd0_6b82];
const SPI: [u32; 4] = [0xeda8_1044, 0x47eb_d62c, 0x6f4f_89af, 0xe038_3bbf];
const SQ: [u32; 4] = [0xb5c3_96b6, 0x47e4_d310, 0xc35c_fc86, 0x08f5_3a04];
const SX: [u32; 4] = [0xbdb8_d737, 0x4162_43cc, 0xcf51_52be, 0xafbe_47b8];
const TA: [u32; 4] = [0xc01e_e43d, 0x44b1_ad92, 0x5ebe_b98a, 0xa7ee_6c69];
const TCA: [u32; 4] = [0x333e_393f, 0x4f49_e147, 0x9160_d1a6, 0xb086_704c];
const TCC: [u32; 4] = [0x848c_e855, 0x4566_d805, 0xe873_aba8, 0xff6b_cc84];
const TCP: [u32; 4] = [0xe10a_013b, 0x4bf5_17d4, 0x9542_89b0, 0x609b_0591];
const TD: [u32; 4] = [0x7d7c_0fe4, 0x4fea_fe41, 0x4445_c992, 0xc66d_70d7];
const VGT: [u32; 4] = [0x0b6a_8cb7, 0x409f_7a01, 0x1430_2ca2, 0x5913_4f85];
const WD: [u32; 4] = [0x0e17_6789, 0x4b02_46ed, 0x6d91_2a97, 0x4a24_ac2f];

/// `vega_blocks`
const GFX9: &[Block] = &[
    block(CB, 0, 7, &[(0, 437)]),
    block(CPF, 2, 5, &[(0, 31)]),
    block(CPG, 3, 5, &[(0, 58)]),
    block(DB, 4, 12, &[(0, 327)]),
    block(GDS, 5, 4, &[(0, 120)]),
    block(GRBM, 6, 2, &[(0, 37)]),
    block(GRBMSE, 7, 1, &[(0, 15)]),
    block(IA, 8, 7, &[(0, 31)]),
    block(PASC, 10, 11, &[(0, 490)]),
    block(PASU, 11, 10, &[(0, 291)]),
    block(SPI, 12, 18, &[(0, 195)]),
    block(SQ, 14, 16, &[(1, 183), (255, 372)]),
    block(SX, 15, 4, &[(0, 207)]),
    block(TA, 16, 6, &[(0, 118)]),
    block(TCA, 17, 10, &[(1, 34)]),
    block(TCC, 18, 10, &[(0, 107), (128, 255)]),
    block(TCP, 19, 10, &[(0, 84)]),
    block(TD, 21, 6, &[(0, 56)]),
    block(VGT, 22, 10, &[(0, 147)]),
    block(WD, 23, 4, &[(0, 57)]),
];

/// `navi_blocks`
const GFX10: &[Block] = &[
    block(CB, 0, 7, &[(0, 460)]),
    block(CPF, 2, 6, &[(0, 39)]),
    block(CPG, 3, 6, &[(0, 81)]),
    block(DB, 4, 12, &[(0, 369)]),
    block(GDS, 5, 10, &[(0, 122)]),
    block(GRBM, 6, 2, &[(0, 46)]),
    block(GRBMSE, 7, 1, &[(0, 18)]),
    block(PASC, 10, 11, &[(0, 551)]),
    block(PASU, 11, 16, &[(0, 265)]),
    block(SPI, 12, 18, &[(0, 328)]),
    block(SQ, 14, 16, &[(0, 511)]),
    block(SX, 15, 4, &[(0, 224)]),
    block(TA, 16, 5, &[(0, 225)]),
    block(TCP, 19, 10, &[(0, 76)]),
    block(TD, 21, 5, &[(0, 60)]),
];

/// Words of what stands before a block's counters, and of a counter.
const BLOCK_WORDS: usize = 6;
const COUNTER_WORDS: usize = 8;
const _: () = assert!(size_of::<HsaCounterBlockProperties>() == 4 * (BLOCK_WORDS + COUNTER_WORDS));
const _: () = assert!(size_of::<HsaCounter>() == 4 * COUNTER_WORDS);

/// The words of a `HsaCounterProperties` with all its blocks and their counters.
fn words(blocks: &[Block]) -> Vec<u32> {
    /// `ui32.Global`
    const GLOBAL: u32 = 1;
    let at_once = blocks.iter().fold(0u32, |sum, block| sum.saturating_add(block.slots));
    let mut words = vec![u32::try_from(blocks.len()).unwrap_or(0), at_once];
    for block in blocks {
        let ids: Vec<u32> = block.counters.iter().flat_map(|(first, last)| *first..=*last).collect();
        words.extend(block.uuid);
        words.extend([u32::try_from(ids.len()).unwrap_or(0), block.slots]);
        for id in ids {
            let kind = HsaProfileType::NONPRIV_IMMEDIATE.0;
            // All 64 bits of it count.
            words.extend([kind, id, 0, 64, u32::MAX, u32::MAX, GLOBAL, block.index]);
        }
    }
    words
}

/// `HsaCounterProperties` of a GPU of a version (`0xMMmmss`), for the rest of the process's life. As in AMD's library there
/// is none for a CPU and from gfx11 on.
pub fn properties(gfx: u32) -> Outcome<*mut u32> {
    static OF_GFX9: OnceLock<usize> = OnceLock::new();
    static OF_GFX10: OnceLock<usize> = OnceLock::new();
    let (place, blocks) = match gfx >> 16 {
        9 => (&OF_GFX9, GFX9),
        10 => (&OF_GFX10, GFX10),
        major => return Err(Refusal::parameter(format!("gfx{major} has no known performance counters"))),
    };
    // The application's from here on: it may keep the pointer beyond a close, and write there.
    let address = *place.get_or_init(|| {
        let words: &'static mut [u32] = Vec::leak(words(blocks));
        words.as_mut_ptr().expose_provenance()
    });
    Ok(std::ptr::with_exposed_provenance_mut(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_all_counters() {
        // As AMD's library has them natively: tests/tests/c/counters.c compares each.
        for (blocks, at_once, counters) in [(GFX9, 158, 3289), (GFX10, 129, 3390)] {
            let words = words(blocks);
            assert_eq!(words[..2], [blocks.len() as u32, at_once]);
            assert_eq!(words.len(), 2 + blocks.len() * BLOCK_WORDS + counters * COUNTER_WORDS);
        }
        let first = properties(0x09_0006).unwrap();
        assert_eq!(first, properties(0x09_0400).unwrap(), "made once");
        assert_ne!(first, properties(0x0a_0300).unwrap());
        assert!(properties(0).is_err() && properties(0x0b_0000).is_err());
    }
}
