//! The state that a wave of a kernel starts with (LLVM's "User Guide for AMDGPU Backend", Initial Kernel Execution State;
//! AMD "Vega" ISA, SPI_SHADER_PGM_RSRC registers).

use crate::wave::{LANES, Mode, Row, Wave, reg};

/// What the waves of a workgroup start with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// GPU address of the first instruction.
    pub entry: u64,
    /// `COMPUTE_PGM_RSRC1`.
    pub rsrc1: u32,
    /// `COMPUTE_PGM_RSRC2`.
    pub rsrc2: u32,
    /// User SGPRs, of which rsrc2 counts those that are loaded.
    pub user: [u32; 16],
    /// Number of the workgroup in each dimension.
    pub id: [u32; 3],
    /// Work-items of the workgroup in each dimension, none of which is 0; 1024 in all at most.
    pub size: [u32; 3],
    /// Bytes of group memory.
    pub group_segment: u32,
    /// The compute unit that it is on, as `HW_ID` has it: `CU_ID`, `SH_ID`, `SE_ID`.
    pub unit: u32,
}

impl Start {
    /// Work-items of the workgroup.
    pub fn items(&self) -> u32 {
        self.size.iter().fold(1u32, |items, size| items.saturating_mul(*size)).min(1024)
    }

    /// Waves of the workgroup.
    pub fn waves(&self) -> u32 {
        self.items().div_ceil(LANES as u32)
    }

    /// Rows of vector registers of a wave (`GRANULATED_WORKITEM_VGPR_COUNT`, in fours).
    pub fn vgprs(&self) -> usize {
        ((self.rsrc1 as usize & 0x3f) + 1) * 4
    }

    /// Makes `wave` the `index`th wave of the workgroup, with its private memory `scratch` bytes behind that of the
    /// queue.
    pub fn begin(&self, wave: &mut Wave, index: u32, scratch: u32) {
        wave.reset(self.vgprs());
        wave.pc = self.entry;
        let float_mode = self.rsrc1 >> 12 & 0xff;
        let dx10_clamp = if self.rsrc1 >> 21 & 1 == 1 { Mode::DX10_CLAMP } else { 0 };
        let ieee = if self.rsrc1 >> 23 & 1 == 1 { Mode::IEEE } else { 0 };
        wave.mode = Mode(float_mode | dx10_clamp | ieee);
        let mut next = 0u8;
        let mut push = |wave: &mut Wave, value: u32| {
            wave.set_sgpr(next, value);
            next += 1;
        };
        let users = (self.rsrc2 >> 1 & 0x1f) as usize;
        self.user.iter().take(users).for_each(|value| push(wave, *value));
        for (dimension, id) in self.id.iter().enumerate() {
            if self.rsrc2 >> (7 + dimension) & 1 == 1 {
                push(wave, *id);
            }
        }
        if self.rsrc2 >> 10 & 1 == 1 {
            let first = if index == 0 { 1 << 31 } else { 0 };
            push(wave, first | index << 6 | self.waves());
        }
        if self.rsrc2 & 1 == 1 {
            push(wave, scratch);
        }
        self.work_items(wave, index);
        wave.set_sgpr(reg::M0, 0);
        // WAVE_ID and SIMD_ID: the waves of a workgroup are spread over the SIMDs of its unit.
        wave.hw_id = self.unit | (index & 3) << 4 | index >> 2 & 0xf;
    }

    /// Work-item ids and EXEC.
    fn work_items(&self, wave: &mut Wave, index: u32) {
        let items = self.items();
        let [size_x, size_y, _] = self.size.map(|size| size.max(1));
        let first = index.saturating_mul(LANES as u32);
        let present = items.saturating_sub(first).min(LANES as u32);
        wave.set_exec(if present == 64 { u64::MAX } else { (1 << present) - 1 });
        let mut ids = [Row::ZERO; 3];
        let (mut x, mut y, mut z) = (first % size_x, first / size_x % size_y, first / size_x / size_y);
        for lane in 0..present as usize {
            for (row, id) in ids.iter_mut().zip([x, y, z]) {
                row.set_lane(lane, id);
            }
            x += 1;
            if x == size_x {
                (x, y) = (0, y + 1);
                if y == size_y {
                    (y, z) = (0, z + 1);
                }
            }
        }
        // TIDIG_COMP_CNT: how many of them beyond x.
        let count = (self.rsrc2 >> 11 & 3).min(2) as usize + 1;
        for (vgpr, ids) in ids.iter().take(count).enumerate() {
            if let Some(row) = wave.row_at_mut(vgpr) {
                *row = *ids;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> Start {
        Start {
            entry: 0x1000,
            rsrc1: 0,
            rsrc2: 0,
            user: core::array::from_fn(|index| 100 + index as u32),
            id: [7, 8, 9],
            size: [1, 1, 1],
            group_segment: 0,
            unit: 0,
        }
    }

    // LLVM's user guide, table "SGPR register set up order".
    #[test]
    fn scalar_registers_come_in_order() {
        let mut wave = Wave::new();
        // Two user SGPRs, ids x and z, information, scratch offset.
        let start = Start { rsrc2: 1 | 2 << 1 | 1 << 7 | 1 << 9 | 1 << 10, size: [65, 1, 1], ..start() };
        start.begin(&mut wave, 1, 0x4000);
        assert_eq!(wave.sgpr[..7], [100, 101, 7, 9, 1 << 6 | 2, 0x4000, 0]);
        assert_eq!((wave.pc, wave.exec()), (0x1000, 1));
        start.begin(&mut wave, 0, 0);
        assert_eq!((wave.sgpr[4], wave.exec()), (1 << 31 | 2, u64::MAX));
    }

    #[test]
    fn work_items_are_numbered_x_first() {
        let mut wave = Wave::new();
        let start = Start { rsrc2: 2 << 11, size: [3, 2, 15], ..start() };
        start.begin(&mut wave, 1, 0);
        // 90 work-items: 26 in the second wave, the first of which is number 64: 64 = 10 * 6 + 1 * 3 + 1.
        assert_eq!(wave.exec(), (1 << 26) - 1);
        assert_eq!([0, 1, 2].map(|vgpr| wave.row(vgpr).lane(0)), [1, 1, 10]);
        assert_eq!([0, 1, 2].map(|vgpr| wave.row(vgpr).lane(25)), [2, 1, 14]);
        assert_eq!(wave.row(0).lane(26), 0);
        let only_x = Start { rsrc2: 0, ..start };
        only_x.begin(&mut wave, 1, 0);
        assert_eq!([0, 1, 2].map(|vgpr| wave.row(vgpr).lane(0)), [1, 0, 0]);
    }

    // AMD "Vega" ISA, HW_ID: WAVE_ID bits 3:0, SIMD_ID 5:4, CU_ID 11:8, SH_ID 12, SE_ID 14:13.
    #[test]
    fn waves_know_where_they_are() {
        let mut wave = Wave::new();
        let start = Start { size: [1024, 1, 1], unit: 2 << 13 | 1 << 12 | 9 << 8, ..start() };
        start.begin(&mut wave, 6, 0);
        assert_eq!(wave.hw_id, 2 << 13 | 1 << 12 | 9 << 8 | 2 << 4 | 1);
    }

    // COMPUTE_PGM_RSRC1: FLOAT_MODE in bits 12 to 19, DX10_CLAMP 21, IEEE_MODE 23.
    #[test]
    fn the_mode_comes_from_the_kernel() {
        let mut wave = Wave::new();
        Start { rsrc1: 0xc0 << 12 | 1 << 23, ..start() }.begin(&mut wave, 0, 0);
        assert_eq!(wave.mode, Mode(0xc0 | Mode::IEEE));
        Start { rsrc1: 0xf0 << 12 | 1 << 21 | 1 << 23, ..start() }.begin(&mut wave, 0, 0);
        assert_eq!(wave.mode, Mode::COMPUTE);
    }
}
