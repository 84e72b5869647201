//! DS instructions that move values between lanes and touch no memory (AMD "Vega" ISA, DS_SWIZZLE_B32,
//! DS_PERMUTE_B32, DS_BPERMUTE_B32).

use super::rows::lanes;
use crate::wave::{LANES, Row};

/// `ds_swizzle_b32`: groups of 4 lanes with a permutation in the offset, or groups of 32 with masks; a lane that is off
/// gives 0.
pub fn swizzle(data: &Row, offset: u32, exec: u64) -> Row {
    let mut row = Row::ZERO;
    for lane in 0..LANES {
        let from = if offset >> 15 & 1 == 1 {
            lane & !3 | (offset >> (2 * (lane & 3)) & 3) as usize
        } else {
            let (and, or, xor) = (offset & 0x1f, offset >> 5 & 0x1f, offset >> 10 & 0x1f);
            let inside = (lane as u32 & 0x1f & and | or) ^ xor;
            lane & !0x1f | inside as usize
        };
        if exec >> from & 1 == 1 {
            row.set_lane(lane, data.lane(from));
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
