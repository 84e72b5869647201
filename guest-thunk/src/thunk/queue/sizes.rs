//! How large what a queue works with has to be. Kernels from 6.12 on compute the same and refuse any other size
//! (`kfd_queue_ctx_save_restore_size`, `kfd_queue_acquire_buffers`, kfd_queue.c).

use hsakmt_abi::queue::{HsaQueueType, HsaUserContextSaveAreaHeader};
use hsakmt_abi::topology::HsaNodeProperties356;

/// Pages of the kernel on x86-64, which is what all sizes here are in.
const PAGE: u64 = 4096;
/// LDS of a compute unit in bytes.
const LDS: u64 = 0x1_0000;
/// Hardware registers of a compute unit in bytes.
const REGISTERS: u64 = 0x1000;
/// Bytes that the debugger keeps of a wave.
const DEBUGGER_BYTES: u64 = 32;
/// Alignment of what the debugger keeps.
const DEBUGGER_ALIGN: u64 = 64;
/// Most bytes of the control stack on gfx10.
const GFX10_CONTROL_STACK: u64 = 0x7000;
/// Bits of a mask of compute units that the kernel looks at.
const MAX_CU_BITS: u32 = 1024;

/// `GFX_VERSION_*` of AMD's library: `0xMMmmss`.
const GFX8: u32 = 0x08_0000;
const CARRIZO: u32 = 0x08_0001;
const TONGA: u32 = 0x08_0002;
const NAVI10: u32 = 0x0a_0100;

/// Bytes of the end-of-pipe buffer of a compute queue, 0 for none.
pub fn end_of_pipe(gfx: u32, kind: HsaQueueType) -> u64 {
    match gfx {
        TONGA => 0x8000,
        // On gfx94x AQL queues have none.
        0x09_0400..=0x09_04ff if kind != HsaQueueType::COMPUTE => 0,
        GFX8.. => 4096,
        _ => 0,
    }
}

/// Compute units of a GPU.
pub fn compute_units(node: &HsaNodeProperties356) -> u32 {
    { node.num_f_compute_cores }.checked_div(node.num_simd_per_cu).unwrap_or(0).min(MAX_CU_BITS)
}

/// Where the waves of a queue are saved when it is preempted. All sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveArea {
    /// The control stack, with the area's header.
    pub control_stack: u32,
    /// The area of one die (XCC): control stack and waves.
    pub area: u32,
    /// What the debugger keeps of one die, behind the areas of all.
    pub debug: u32,
    /// Dies.
    pub dies: u32,
    /// All of it, in whole pages.
    pub total: u64,
}

impl SaveArea {
    /// For a GPU; none where there is no preemption, or no compute unit.
    pub fn new(gfx: u32, node: &HsaNodeProperties356) -> Option<SaveArea> {
        let dies = { node.num_xcc }.max(1);
        let units = u64::from({ node.num_f_compute_cores }.checked_div(node.num_simd_per_cu)?);
        let per_die = units / u64::from(dies);
        if gfx < CARRIZO || per_die == 0 {
            return None;
        }
        let (waves, stack_bytes) = if gfx < NAVI10 {
            let engines = u64::from({ node.num_shader_banks }.checked_div(node.num_arrays)?);
            (per_die.checked_mul(40)?.min(engines.checked_mul(512)?), 8)
        } else {
            (per_die.checked_mul(32)?, 12)
        };
        let header = size_of::<HsaUserContextSaveAreaHeader>() as u64;
        let stack = waves.checked_mul(stack_bytes)?.checked_add(8)?.checked_add(header)?;
        let mut stack = stack.checked_next_multiple_of(PAGE)?;
        if gfx & 0x3f_0000 == 0x0a_0000 {
            stack = stack.min(GFX10_CONTROL_STACK);
        }
        let unit = u64::from(node.vgpr_size_per_cu)
            .checked_add(u64::from(node.sgpr_size_per_cu))?
            .checked_add(LDS.saturating_add(REGISTERS))?;
        let state = per_die.checked_mul(unit)?.checked_next_multiple_of(PAGE)?;
        let area = stack.checked_add(state)?;
        let debug = waves.checked_mul(DEBUGGER_BYTES)?.checked_next_multiple_of(DEBUGGER_ALIGN)?;
        let total = area.checked_add(debug)?.checked_mul(dies.into())?.checked_next_multiple_of(PAGE)?;
        // The header's offsets have 32 bits.
        u32::try_from(total).ok()?;
        Some(SaveArea {
            control_stack: u32::try_from(stack).ok()?,
            area: u32::try_from(area).ok()?,
            debug: u32::try_from(debug).ok()?,
            dies,
            total,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node with so many SIMDs, four or two in a unit, with shader engines of one array each.
    fn node(simds: u32, per_unit: u32, engines: u32, dies: u32, vgprs: u32) -> HsaNodeProperties356 {
        HsaNodeProperties356 {
            num_f_compute_cores: simds,
            num_simd_per_cu: per_unit,
            num_shader_banks: engines,
            num_arrays: 1,
            num_xcc: dies,
            vgpr_size_per_cu: vgprs,
            sgpr_size_per_cu: 0x4000,
            ..Default::default()
        }
    }

    #[test]
    fn the_save_area_is_what_the_kernel_computes() {
        // Measured: CREATE_QUEUE of Debian's libhsakmt 6.2.4 on a gfx906 with 60 units in 4 engines.
        let gfx906 = SaveArea::new(0x09_0006, &node(240, 4, 4, 1, 0x4_0000)).unwrap();
        assert_eq!((gfx906.area, gfx906.control_stack), (0x13f_1000, 0x5000));
        assert_eq!(gfx906.total, 0x140_1000);
        // By hand after kfd_queue_ctx_save_restore_size of Linux 6.12: gfx1030 with 80 units has 2560 waves, whose 30768 bytes
        // of control stack are cut to 0x7000; 80 * 0x55000 bytes of state; 2560 * 32 bytes for the debugger.
        let gfx1030 = SaveArea::new(0x0a_0300, &node(160, 2, 4, 1, 0x4_0000)).unwrap();
        assert_eq!((gfx1030.area, gfx1030.control_stack), (0x1a9_7000, 0x7000));
        assert_eq!((gfx1030.debug, gfx1030.total), (0x1_4000, 0x1aa_b000));
        // gfx942 with 304 units on 8 dies: 38 units and 1520 waves on each, 0x3000 bytes of control stack (12208 used),
        // 38 * 0x95000 bytes of state, 1520 * 32 for the debugger.
        let gfx942 = SaveArea::new(0x09_0402, &node(1216, 4, 32, 8, 0x8_0000)).unwrap();
        assert_eq!((gfx942.area, gfx942.control_stack), (0x162_1000, 0x3000));
        assert_eq!((gfx942.debug, gfx942.dies), (0xbe00, 8));
        assert_eq!(gfx942.total, (0x162_1000 + 0xbe00) * 8);
    }

    #[test]
    fn no_save_area_without_units_or_with_absurd_ones() {
        assert_eq!(SaveArea::new(0x08_0000, &node(240, 4, 4, 1, 0x4_0000)), None, "before Carrizo");
        assert_eq!(SaveArea::new(0x09_0006, &node(0, 4, 4, 1, 0x4_0000)), None);
        assert_eq!(SaveArea::new(0x09_0006, &node(240, 0, 4, 1, 0x4_0000)), None);
        assert_eq!(SaveArea::new(0x09_0006, &node(u32::MAX, 1, 4, 1, 0x4_0000)), None);
    }

    #[test]
    fn end_of_pipe_buffers() {
        let (pm4, aql) = (HsaQueueType::COMPUTE, HsaQueueType::COMPUTE_AQL);
        for (gfx, kind, size) in [
            (0x07_0000, aql, 0),
            (0x08_0002, aql, 0x8000),
            (0x08_0003, aql, 4096),
            (0x09_0006, aql, 4096),
            (0x09_0402, aql, 0),
            (0x09_0402, pm4, 4096),
            (0x0b_0000, aql, 4096),
        ] {
            assert_eq!(end_of_pipe(gfx, kind), size, "{gfx:#x}");
        }
    }

    #[test]
    fn units_of_a_mask() {
        assert_eq!(compute_units(&node(240, 4, 4, 1, 0)), 60);
        assert_eq!(compute_units(&node(240, 0, 4, 1, 0)), 0);
        assert_eq!(compute_units(&node(u32::MAX, 1, 4, 1, 0)), 1024);
    }
}
