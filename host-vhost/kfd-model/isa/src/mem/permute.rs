//! DS instructions that move values between lanes and touch no memory (AMD "Vega" ISA, DS_SWIZZLE_B32,
//! DS_PERMUTE_B32, DS_BPERMUTE_B32).

use super::rows::lanes;
use crate::wave::{LANES, Row};

/// `ds_swizzle_b32`: groups of 32 lanes with masks, groups of 4 with a permutation in the offset, or, of GFX9, rotation and the
/// order of an FFT (LLVM: `QUAD_PERM_ENC`, `ROTATE_MODE_ENC`, `FFT_MODE_ENC`); a lane that is off gives 0.
pub fn swizzle(data: &Row, offset: u32, exec: u64) -> Row {
    let mut row = Row::ZERO;
    for lane in 0..LANES as u32 {
        let inside = lane & 0x1f;
        let mask = offset & 0x1f;
        let from = match offset & 0xe000 {
            0xe000 => (inside.reverse_bits() >> 27) >> mask.count_ones() | inside & mask,
            0xc000 => {
                let by = offset >> 5 & 0x1f;
                let by = if offset >> 10 & 1 == 1 { by.wrapping_neg() } else { by };
                inside & mask | inside.wrapping_add(by) & 0x1f & !mask
            }
            0x8000 | 0xa000 => inside & !3 | offset >> (2 * (lane & 3)) & 3,
            _ => (inside & mask | offset >> 5 & 0x1f) ^ (offset >> 10 & 0x1f),
        };
        let from = (lane & 0x20 | from) as usize;
        if exec >> from & 1 == 1 {
            row.set_lane(lane as usize, data.lane(from));
        }
    }
    row
}

fn target(address: u32, offset: u32) -> usize {
    (address.wrapping_add(offset) / 4) as usize % LANES
}

/// `ds_bpermute_b32`: each lane gets what the lane has that it names; 0 from one that is off.
pub fn pull(addresses: &Row, offset: u32, data: &Row, exec: u64) -> Row {
    let mut row = Row::ZERO;
    for (to, address) in row.0.iter_mut().zip(&addresses.0) {
        let from = target(*address, offset);
        if exec >> from & 1 == 1 {
            *to = data.lane(from);
        }
    }
    row
}

/// `ds_permute_b32`: each lane gives what it has to the lane that it names; the highest wins.
pub fn push(addresses: &Row, offset: u32, data: &Row, exec: u64) -> Row {
    let mut row = Row::ZERO;
    for lane in lanes(exec) {
        row.set_lane(target(addresses.lane(lane), offset), data.lane(lane));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers() -> Row {
        let mut row = Row::ZERO;
        row.0.iter_mut().zip(100..).for_each(|(value, number)| *value = number);
        row
    }

    #[test]
    fn a_swizzle_by_masks_stays_in_half_the_wave() {
        for xor in [1, 2, 4, 8, 16u32] {
            let row = swizzle(&numbers(), xor << 10 | 0x1f, u64::MAX);
            for lane in 0..64 {
                assert_eq!(row.lane(lane), 100 + (lane as u32 ^ xor), "lane {lane}, xor {xor}");
            }
        }
        // Broadcast of lane 5 of each half: and 0, or 5.
        let row = swizzle(&numbers(), 5 << 5, u64::MAX);
        assert_eq!((row.lane(0), row.lane(31), row.lane(32)), (105, 105, 137));
    }

    #[test]
    fn a_swizzle_of_four_permutes_them() {
        // Lanes 3, 0, 1, 2.
        let row = swizzle(&numbers(), 0x8000 | 0b10_01_00_11, u64::MAX);
        assert_eq!([4, 5, 6, 7].map(|lane| row.lane(lane)), [107, 104, 105, 106]);
        assert_eq!(swizzle(&numbers(), 0x8000, !1).lane(1), 0);
    }

    /// By the "Vega" ISA document's rules for offsets from 0xc000 and from 0xe000 on, worked out by hand.
    #[test]
    fn a_swizzle_rotates_and_reverses() {
        let lanes =
            |offset, wanted: [usize; 4]| wanted.map(|lane| swizzle(&numbers(), offset, u64::MAX).lane(lane));
        // To the left by 1; to the right by 1; by 1 with the lowest bit of the lane kept.
        assert_eq!(lanes(0xc020, [0, 30, 31, 63]), [101, 131, 100, 132]);
        assert_eq!(lanes(0xc420, [0, 1, 31, 32]), [131, 100, 130, 163]);
        assert_eq!(lanes(0xc021, [0, 1, 2, 3]), [100, 103, 102, 105]);
        // Bits reversed; nothing moved.
        assert_eq!(lanes(0xe000, [1, 2, 3, 33]), [116, 108, 124, 148]);
        assert_eq!(lanes(0xe01f, [1, 2, 31, 33]), [101, 102, 131, 133]);
    }

    #[test]
    fn lanes_pull_and_push() {
        let mut addresses = Row::ZERO;
        addresses.set_lane(0, 4 * 9);
        addresses.set_lane(1, 4 * 64 + 4 * 2 + 3);
        let row = pull(&addresses, 0, &numbers(), !(1 << 9));
        assert_eq!((row.lane(0), row.lane(1), row.lane(2)), (0, 102, 100));
        let row = push(&addresses, 4, &numbers(), 0b11);
        assert_eq!((row.lane(10), row.lane(3), row.lane(1)), (100, 101, 0));
    }
}
