//! The register state of one wave of 64 lanes.
//!
//! Scalar registers are numbered as instructions number them (AMD "Vega" ISA, table of scalar operands): general
//! registers from 0, then [`reg::FLAT_SCRATCH`], [`reg::XNACK_MASK`], [`reg::VCC`], the trap temporaries, [`reg::M0`]
//! and [`reg::EXEC`]. A vector register is a [`Row`]: one 32-bit value a lane, so that a handler runs one plain loop
//! over 64 lanes.

use std::fmt;

/// Lanes of a wave.
pub const LANES: usize = 64;

/// Vector registers that an instruction can name.
pub const VGPRS: usize = 256;

/// Numbers of the scalar registers with a name of their own; 64-bit ones are named by their low half.
pub mod reg {
    /// FLAT_SCRATCH: byte offset of the wave's private memory, 64 bits.
    pub const FLAT_SCRATCH: u8 = 102;
    /// XNACK_MASK, 64 bits.
    pub const XNACK_MASK: u8 = 104;
    /// VCC: one condition or carry bit a lane, 64 bits.
    pub const VCC: u8 = 106;
    /// The first of the sixteen trap temporaries TTMP0..TTMP15.
    pub const TTMP: u8 = 108;
    /// M0: limit of LDS addresses, message data, register index.
    pub const M0: u8 = 124;
    /// EXEC: one bit a lane that is switched on, 64 bits.
    pub const EXEC: u8 = 126;
}

/// One vector register: a 32-bit value for each lane.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(align(64))]
pub struct Row(pub [u32; LANES]);

impl Row {
    /// All lanes zero.
    pub const ZERO: Row = Row([0; LANES]);

    /// The same value in all lanes.
    #[inline(always)]
    pub const fn splat(value: u32) -> Row {
        Row([value; LANES])
    }

    /// The value of one lane; lanes are numbered modulo 64.
    #[inline(always)]
    pub fn lane(&self, lane: usize) -> u32 {
        self.0.get(lane % LANES).copied().unwrap_or_default()
    }

    /// Sets one lane; lanes are numbered modulo 64.
    #[inline(always)]
    pub fn set_lane(&mut self, lane: usize, value: u32) {
        if let Some(slot) = self.0.get_mut(lane % LANES) {
            *slot = value;
        }
    }
}

impl Default for Row {
    fn default() -> Self {
        Row::ZERO
    }
}

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|v| format!("{v:#x}"))).finish()
    }
}

/// How a result that cannot be represented is rounded (MODE.ROUND, two bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// To the nearest, ties to even.
    NearestEven,
    /// Towards +infinity.
    Up,
    /// Towards -infinity.
    Down,
    /// Towards zero.
    Zero,
}

/// Which denormal numbers are replaced by zeros of the same sign (MODE.DENORM, two bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denorm {
    /// Denormal sources count as zero.
    pub flush_in: bool,
    /// Denormal results become zero.
    pub flush_out: bool,
}

/// The MODE register (AMD "Vega" ISA, "Mode register"; `HW_REG_MODE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub u32);

impl Mode {
    /// What compilers set for compute: nearest-even, all denormals kept, DX10_CLAMP and IEEE on.
    pub const COMPUTE: Mode = Mode(0x3f0);
    /// DX10_CLAMP: a clamped NaN becomes 0.
    pub const DX10_CLAMP: u32 = 1 << 8;
    /// IEEE: signalling NaNs are quieted by minimum and maximum, output modifiers do nothing.
    pub const IEEE: u32 = 1 << 9;
    /// GPR_IDX_EN: vector register numbers are relative to M0.
    pub const GPR_IDX_EN: u32 = 1 << 27;
    /// The bits that change what a vector instruction does apart from clamping: ROUND, DENORM, GPR_IDX_EN.
    const ARITHMETIC: u32 = 0xff | Self::GPR_IDX_EN;

    /// Nearest-even, denormals kept everywhere, no relative register numbers: what the fast paths are written for.
    #[inline(always)]
    pub const fn is_plain(self) -> bool {
        self.0 & Self::ARITHMETIC == 0xf0
    }

    /// Nearest-even for all floats and no relative register numbers: vector handlers can be called as they are.
    #[inline(always)]
    pub const fn is_direct(self) -> bool {
        self.0 & (0xf | Self::GPR_IDX_EN) == 0
    }

    /// Rounding of f32 results.
    pub const fn round32(self) -> Round {
        round(self.0)
    }

    /// Rounding of f16 and f64 results.
    pub const fn round64(self) -> Round {
        round(self.0 >> 2)
    }

    /// Denormal numbers of f32.
    pub const fn denorm32(self) -> Denorm {
        denorm(self.0 >> 4)
    }

    /// Denormal numbers of f16 and f64.
    pub const fn denorm64(self) -> Denorm {
        denorm(self.0 >> 6)
    }

    /// A clamped NaN becomes 0.
    pub const fn dx10_clamp(self) -> bool {
        self.0 & Self::DX10_CLAMP != 0
    }

    /// IEEE mode.
    pub const fn ieee(self) -> bool {
        self.0 & Self::IEEE != 0
    }

    /// Vector register numbers are relative to M0.
    pub const fn gpr_index(self) -> bool {
        self.0 & Self::GPR_IDX_EN != 0
    }
}

const fn round(bits: u32) -> Round {
    match bits & 3 {
        0 => Round::NearestEven,
        1 => Round::Up,
        2 => Round::Down,
        _ => Round::Zero,
    }
}

const fn denorm(bits: u32) -> Denorm {
    // 0 flushes both, 1 allows denormal sources, 2 allows denormal results, 3 allows both.
    Denorm { flush_in: bits & 1 == 0, flush_out: bits & 2 == 0 }
}

/// The ranges of flat addresses that lead to LDS and to private memory, as SRC_SHARED_BASE and its kin show them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Apertures {
    /// First address of LDS.
    pub shared_base: u64,
    /// Last address of LDS.
    pub shared_limit: u64,
    /// First address of private memory.
    pub private_base: u64,
    /// Last address of private memory.
    pub private_limit: u64,
}

impl Default for Apertures {
    /// What the amdgpu driver sets up for a compute process on GFX9 (`kfd_init_apertures_v9`).
    fn default() -> Self {
        let range = |base: u64| (base, base | 0xffff_ffff);
        let (shared_base, shared_limit) = range(1 << 48);
        let (private_base, private_limit) = range(2 << 48);
        Apertures { shared_base, shared_limit, private_base, private_limit }
    }
}

/// The registers of one wave.
#[derive(Clone)]
pub struct Wave {
    /// Byte address of the next instruction.
    pub pc: u64,
    /// Scalar registers by operand number 0..=127; see [`reg`].
    pub sgpr: [u32; 128],
    /// SCC: the scalar condition code.
    pub scc: bool,
    /// MODE.
    pub mode: Mode,
    /// STATUS as `s_getreg_b32` shows it, without the bits that are kept elsewhere (SCC, VCCZ, EXECZ).
    pub status: u32,
    /// TRAPSTS.
    pub trapsts: u32,
    /// HW_ID: where it runs.
    pub hw_id: u32,
    /// What global wave sync gave it to wait with.
    pub ticket: Option<crate::gws::Ticket>,
    /// Where LDS and private memory appear among flat addresses.
    pub apertures: Apertures,
    vgpr: Box<[Row; VGPRS]>,
    /// The EXEC value that `mask` was made for.
    mask_exec: u64,
    /// All ones in each lane whose bit in `mask_exec` is set.
    mask: Row,
}

impl Wave {
    /// A wave whose registers are all zero, except that all lanes are on and MODE is [`Mode::COMPUTE`]. Takes 64 KiB.
    pub fn new() -> Wave {
        let mut wave = Wave {
            pc: 0,
            sgpr: [0; 128],
            scc: false,
            mode: Mode::COMPUTE,
            status: 0,
            trapsts: 0,
            hw_id: 0,
            ticket: None,
            apertures: Apertures::default(),
            vgpr: zeroed_rows(),
            mask_exec: u64::MAX,
            mask: Row::splat(u32::MAX),
        };
        wave.set_exec(u64::MAX);
        wave
    }

    /// Makes the wave as [`Wave::new`] does, but zeroes only the first `vgprs` vector registers: what a kernel that
    /// has so many allocated can see.
    pub fn reset(&mut self, vgprs: usize) {
        self.pc = 0;
        self.sgpr = [0; 128];
        self.scc = false;
        self.mode = Mode::COMPUTE;
        self.status = 0;
        self.trapsts = 0;
        self.hw_id = 0;
        self.ticket = None;
        self.set_exec(u64::MAX);
        for row in self.vgpr.iter_mut().take(vgprs) {
            *row = Row::ZERO;
        }
    }

    /// A vector register.
    #[inline(always)]
    pub fn row(&self, vgpr: u8) -> &Row {
        self.row_at(usize::from(vgpr))
    }

    /// A vector register by a number that may be too large; then it is register 0, as the hardware reads.
    #[inline(always)]
    pub fn row_at(&self, vgpr: usize) -> &Row {
        match self.vgpr.get(vgpr) {
            Some(row) => row,
            None => {
                let [first, ..] = &*self.vgpr;
                first
            }
        }
    }

    /// A vector register, to write to. All lanes: the caller respects EXEC.
    #[inline(always)]
    pub fn row_mut(&mut self, vgpr: u8) -> Option<&mut Row> {
        self.vgpr.get_mut(usize::from(vgpr))
    }

    /// A vector register by a number that may be too large, to write to; `None` if it is, as the hardware drops such
    /// a write.
    #[inline(always)]
    pub fn row_at_mut(&mut self, vgpr: usize) -> Option<&mut Row> {
        self.vgpr.get_mut(vgpr)
    }

    /// Writes the lanes that EXEC switches on.
    #[inline(always)]
    pub fn write_row(&mut self, vgpr: usize, value: &Row) {
        let exec = self.exec();
        if exec == u64::MAX {
            if let Some(row) = self.vgpr.get_mut(vgpr) {
                *row = *value;
            }
        } else {
            self.write_masked(exec, vgpr, value);
        }
    }

    /// Writes the lanes whose bit in `exec` is set.
    #[inline(always)]
    pub fn write_masked(&mut self, exec: u64, vgpr: usize, value: &Row) {
        if exec != self.mask_exec {
            self.mask_exec = exec;
            self.mask = mask_row(exec);
        }
        if let Some(row) = self.vgpr.get_mut(vgpr) {
            for ((dst, src), mask) in row.0.iter_mut().zip(&value.0).zip(&self.mask.0) {
                *dst = (*dst & !mask) | (src & mask);
            }
        }
    }

    /// A scalar register by operand number (0..=127, modulo 128).
    #[inline(always)]
    pub fn sgpr(&self, n: u8) -> u32 {
        self.sgpr.get(usize::from(n & 127)).copied().unwrap_or_default()
    }

    /// Two consecutive scalar registers as one value, the first in the low half.
    #[inline(always)]
    pub fn sgpr64(&self, n: u8) -> u64 {
        u64::from(self.sgpr(n)) | u64::from(self.sgpr(n.wrapping_add(1))) << 32
    }

    /// Sets a scalar register by operand number (0..=127, modulo 128).
    #[inline(always)]
    pub fn set_sgpr(&mut self, n: u8, value: u32) {
        if let Some(slot) = self.sgpr.get_mut(usize::from(n & 127)) {
            *slot = value;
        }
    }

    /// Sets two consecutive scalar registers.
    #[inline(always)]
    pub fn set_sgpr64(&mut self, n: u8, value: u64) {
        self.set_sgpr(n, value as u32);
        self.set_sgpr(n.wrapping_add(1), (value >> 32) as u32);
    }

    /// EXEC: the lanes that are on.
    #[inline(always)]
    pub fn exec(&self) -> u64 {
        self.sgpr64(reg::EXEC)
    }

    /// Sets EXEC.
    #[inline(always)]
    pub fn set_exec(&mut self, lanes: u64) {
        self.set_sgpr64(reg::EXEC, lanes);
    }

    /// VCC.
    #[inline(always)]
    pub fn vcc(&self) -> u64 {
        self.sgpr64(reg::VCC)
    }

    /// Sets VCC.
    #[inline(always)]
    pub fn set_vcc(&mut self, lanes: u64) {
        self.set_sgpr64(reg::VCC, lanes);
    }

    /// M0.
    #[inline(always)]
    pub fn m0(&self) -> u32 {
        self.sgpr(reg::M0)
    }
}

impl Default for Wave {
    fn default() -> Self {
        Wave::new()
    }
}

impl fmt::Debug for Wave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wave")
            .field("pc", &format_args!("{:#x}", self.pc))
            .field("exec", &format_args!("{:#x}", self.exec()))
            .field("vcc", &format_args!("{:#x}", self.vcc()))
            .field("scc", &self.scc)
            .field("mode", &format_args!("{:#x}", self.mode.0))
            .finish_non_exhaustive()
    }
}

/// Bit `n % 32` in lane `n`, to make rows of bit masks and back without a shift that differs by lane.
pub(crate) const BITS: Row = {
    let mut bits = [0u32; LANES];
    let mut rest: &mut [u32] = &mut bits;
    let mut n = 0;
    while let Some((first, tail)) = rest.split_first_mut() {
        *first = 1 << (n % 32);
        n += 1;
        rest = tail;
    }
    Row(bits)
};

/// All ones in each lane whose bit is set.
#[inline(always)]
pub(crate) fn mask_row(lanes: u64) -> Row {
    let mut row = Row::ZERO;
    let (low, high) = row.0.split_at_mut(LANES / 2);
    for (dst, bit) in low.iter_mut().zip(&BITS.0) {
        *dst = if lanes as u32 & bit != 0 { u32::MAX } else { 0 };
    }
    for (dst, bit) in high.iter_mut().zip(&BITS.0) {
        *dst = if (lanes >> 32) as u32 & bit != 0 { u32::MAX } else { 0 };
    }
    row
}

/// One bit for each lane whose value is not zero; the values must be 0 or all ones.
#[inline(always)]
pub(crate) fn lanes_of(mask: &Row) -> u64 {
    let (low, high) = mask.0.split_at(LANES / 2);
    let half = |values: &[u32]| values.iter().zip(&BITS.0).fold(0, |acc, (value, bit)| acc | (value & bit));
    u64::from(half(low)) | u64::from(half(high)) << 32
}

fn zeroed_rows() -> Box<[Row; VGPRS]> {
    // A boxed slice is made on the heap; an array literal might pass through the stack.
    match vec![Row::ZERO; VGPRS].into_boxed_slice().try_into() {
        Ok(rows) => rows,
        // Not reached: the length is right.
        Err(_) => Box::new([Row::ZERO; VGPRS]),
    }
}
