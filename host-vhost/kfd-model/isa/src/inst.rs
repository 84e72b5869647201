//! One decoded instruction and its parts.

mod text;

use bitflags::bitflags;

use crate::op::{Encoding, Kind, Op};

/// Number of VCC's low half among the scalar registers.
pub const VCC: u8 = 106;
/// Number of the first trap temporary register; there are 16.
pub const TTMP: u8 = 108;
/// Number of M0 among the scalar registers.
pub const M0: u8 = 124;
/// Number of EXEC's low half among the scalar registers.
pub const EXEC: u8 = 126;
/// Number of FLAT_SCRATCH's low half among the scalar registers.
pub const FLAT_SCRATCH: u8 = 102;
/// Number of XNACK_MASK's low half among the scalar registers.
pub const XNACK_MASK: u8 = 104;

/// One decoded instruction: small and `Copy`, to be decoded once and kept.
///
/// Where the operands stand, by encoding:
///
/// | encoding | `dst` | `sdst` | `src[0]` | `src[1]` | `src[2]` | `src[3]` | `imm` |
/// |---|---|---|---|---|---|---|---|
/// | SOP1 SOP2 SOPC | SDST | | SSRC0 | SSRC1 | | | |
/// | `s_set_gpr_idx_on` | | | SSRC0 | | | | the mode, 0 to 15 |
/// | SOPK | SDST where written | | SDST where read; the literal of `s_setreg_imm32_b32` | | | | SIMM16, sign-extended |
/// | SOPP | | | | | | | SIMM16, sign-extended |
/// | SMEM | SDATA of loads, and of atomics with GLC | | SBASE | SGPR offset or `None` | SDATA of stores and atomics | | offset in bytes |
/// | VOP1 VOP2 VOPC VOP3 VOP3P | VDST (or SGPR) | carry or mask out | SRC0 | SRC1 | SRC2 | | |
/// | DS | VDST | | ADDR | DATA0 | DATA1 | | OFFSET, or OFFSET0 in bits 7:0 and OFFSET1 in bits 15:8 |
/// | FLAT GLOBAL SCRATCH | VDST of loads, and of atomics with GLC | | ADDR or `None` | DATA | | SADDR or `None` | offset in bytes, sign-extended |
/// | MUBUF | VDATA of loads, and of atomics with GLC | | VADDR or `None` | VDATA of stores and atomics | SOFFSET | SRSRC | offset in bytes |
///
/// Operands that are implied are written out: VCC as destination of the 32-bit VOPC and carry forms, VCC as carry-in
/// (`src[2]`), the destination as third source of `v_mac` and `v_fmac` (`src[2]`), the literal of `v_madmk` (`src[1]`)
/// and of `v_madak` (`src[2]`), so that all of these compute `src[0] * src[1] + src[2]`. Not written out: SCC, EXEC,
/// M0, VCC as read by `v_div_fmas`, and FLAT_SCRATCH.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Inst {
    /// What it does; the same for all encodings of one mnemonic (`v_add_f32` in VOP2, VOP3 and with SDWA, and
    /// `flat_load_dword`, `global_load_dword`, `scratch_load_dword`).
    pub op: Op,
    /// The encoding that it was written in.
    pub encoding: Encoding,
    /// Its length in 32-bit words, 1 or 2, a literal or sub-word dword included.
    pub words: u8,
    /// The destination.
    pub dst: Dst,
    /// A second destination: the mask or carry of VOP2 and VOP3B forms.
    pub sdst: Dst,
    /// The sources, see the table above.
    pub src: [Src; 4],
    /// Modifiers of vector operands.
    pub modifiers: Modifiers,
    /// The sub-dword or lane-crossing selection in the second word.
    pub sub: SubWord,
    /// The immediate, see the table above.
    pub imm: i32,
    /// Flags of memory instructions.
    pub flags: MemFlags,
}

impl Inst {
    /// Its length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.words as u64 * 4
    }

    /// Where a branch with a 16-bit offset (SOPP branches, `s_call_b64`, `s_cbranch_i_fork`) goes, if it stands at `pc`:
    /// the offset counts dwords from the instruction after it.
    #[must_use]
    pub const fn branch_target(&self, pc: u64) -> u64 {
        pc.wrapping_add(4).wrapping_add_signed((self.imm as i64) * 4)
    }

    /// The hardware register field that `s_getreg_b32`, `s_setreg_b32` and `s_setreg_imm32_b32` name.
    #[must_use]
    pub const fn hwreg(&self) -> HwReg {
        HwReg {
            id: (self.imm & 0x3f) as u8,
            offset: ((self.imm >> 6) & 0x1f) as u8,
            size: ((self.imm >> 11) & 0x1f) as u8 + 1,
        }
    }

    /// The first of the two offsets of DS instructions that access two places, in units of their elements (times 64 in
    /// the `st64` forms).
    #[must_use]
    pub const fn offset0(&self) -> u8 {
        self.imm as u8
    }

    /// The second of the two offsets, see [`Inst::offset0`].
    #[must_use]
    pub const fn offset1(&self) -> u8 {
        (self.imm >> 8) as u8
    }
}

/// A field of a hardware register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HwReg {
    /// Number of the register, 0 to 63.
    pub id: u8,
    /// Lowest bit of the field.
    pub offset: u8,
    /// Width of the field in bits, 1 to 32. Bits above bit 31 do not exist.
    pub size: u8,
}

/// Where a result goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Dst {
    /// Nowhere.
    #[default]
    None,
    /// A scalar register, or the first of several; numbers as in [`Src::Sgpr`].
    Sgpr(u8),
    /// A vector register, or the first of several.
    Vgpr(u8),
}

/// Where an operand comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Src {
    /// Nowhere: the instruction has no such operand.
    #[default]
    None,
    /// A scalar register, or the first of several: 0..=101 SGPRs, 102 FLAT_SCRATCH, 104 XNACK_MASK, 106 VCC,
    /// 108..=123 TTMPs, 124 M0, 126 EXEC.
    Sgpr(u8),
    /// A vector register, or the first of several.
    Vgpr(u8),
    /// An inline integer, -16..=64, sign-extended to the operand's width.
    Int(i8),
    /// An inline float; its bits depend on the operand's width.
    Float(FloatConst),
    /// The dword after the instruction. A 64-bit float takes it as its high half, a 64-bit integer is extended from it.
    Literal(u32),
    /// SRC_SHARED_BASE: address bits 63:32 of the LDS aperture in the high half of 64 bits.
    SharedBase,
    /// SRC_SHARED_LIMIT.
    SharedLimit,
    /// SRC_PRIVATE_BASE: address bits 63:32 of the scratch aperture in the high half of 64 bits.
    PrivateBase,
    /// SRC_PRIVATE_LIMIT.
    PrivateLimit,
    /// SRC_POPS_EXITING_WAVE_ID: a graphics register, 0 in compute waves.
    PopsExitingWaveId,
    /// 1 if VCC is zero.
    Vccz,
    /// 1 if EXEC is zero.
    Execz,
    /// The scalar condition code.
    Scc,
    /// A dword of LDS at the address in M0.
    LdsDirect,
}

impl Src {
    /// The value of a constant operand of this kind: its low dword for kinds of up to 32 bits (packed and 16-bit kinds:
    /// bits 15:0 hold the 16-bit constant), all 64 bits for 64-bit kinds. A literal is extended by zeros, as the hardware does
    /// for operands that are not signed integers (llvm/llvm-project#70274); those that are read it by themselves. `None` if it is not a constant.
    #[must_use]
    pub const fn constant(self, kind: Kind) -> Option<u64> {
        match self {
            Self::Int(value) => Some(match kind {
                Kind::I64 | Kind::F64 | Kind::Mask => value as i64 as u64,
                Kind::I16 | Kind::F16 => value as i16 as u16 as u64,
                _ => value as i32 as u32 as u64,
            }),
            Self::Float(value) => Some(match kind {
                Kind::I64 | Kind::F64 | Kind::Mask => value.f64_bits(),
                Kind::I16 | Kind::F16 | Kind::PkI16 | Kind::PkF16 => value.f16_bits() as u64,
                _ => value.f32_bits() as u64,
            }),
            Self::Literal(value) => Some(match kind {
                Kind::F64 => (value as u64) << 32,
                _ => value as u64,
            }),
            _ => None,
        }
    }
}

/// The inline floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FloatConst {
    /// 0.5
    Half,
    /// -0.5
    NegHalf,
    /// 1.0
    One,
    /// -1.0
    NegOne,
    /// 2.0
    Two,
    /// -2.0
    NegTwo,
    /// 4.0
    Four,
    /// -4.0
    NegFour,
    /// 1 / (2 * pi)
    InvTwoPi,
}

impl FloatConst {
    /// Its bits as a half.
    #[must_use]
    pub const fn f16_bits(self) -> u16 {
        match self {
            Self::Half => 0x3800,
            Self::NegHalf => 0xb800,
            Self::One => 0x3c00,
            Self::NegOne => 0xbc00,
            Self::Two => 0x4000,
            Self::NegTwo => 0xc000,
            Self::Four => 0x4400,
            Self::NegFour => 0xc400,
            Self::InvTwoPi => 0x3118,
        }
    }

    /// Its bits as a float.
    #[must_use]
    pub const fn f32_bits(self) -> u32 {
        match self {
            Self::Half => 0x3f00_0000,
            Self::NegHalf => 0xbf00_0000,
            Self::One => 0x3f80_0000,
            Self::NegOne => 0xbf80_0000,
            Self::Two => 0x4000_0000,
            Self::NegTwo => 0xc000_0000,
            Self::Four => 0x4080_0000,
            Self::NegFour => 0xc080_0000,
            Self::InvTwoPi => 0x3e22_f983,
        }
    }

    /// Its bits as a double.
    #[must_use]
    pub const fn f64_bits(self) -> u64 {
        match self {
            Self::Half => 0x3fe0_0000_0000_0000,
            Self::NegHalf => 0xbfe0_0000_0000_0000,
            Self::One => 0x3ff0_0000_0000_0000,
            Self::NegOne => 0xbff0_0000_0000_0000,
            Self::Two => 0x4000_0000_0000_0000,
            Self::NegTwo => 0xc000_0000_0000_0000,
            Self::Four => 0x4010_0000_0000_0000,
            Self::NegFour => 0xc010_0000_0000_0000,
            Self::InvTwoPi => 0x3fc4_5f30_6dc9_c882,
        }
    }
}

/// Modifiers of vector operands. Bit n of a mask belongs to `src[n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Modifiers {
    /// Take the absolute value (before `neg`).
    pub abs: u8,
    /// Negate; in VOP3P: the low half.
    pub neg: u8,
    /// VOP3P: negate the high half.
    pub neg_hi: u8,
    /// VOP3 of 16-bit operations: take the high half of the source; bit 3: write the high half of the destination.
    /// VOP3P: the half that the low result is computed from.
    pub op_sel: u8,
    /// VOP3P: the half that the high result is computed from. In the mix operations: the source is a half, not a float.
    pub op_sel_hi: u8,
    /// Multiplication of the result.
    pub omod: Omod,
    /// Clamp the result: to 0.0..=1.0, or to the integer type's range.
    pub clamp: bool,
}

impl Modifiers {
    /// None.
    pub const NONE: Self =
        Self { abs: 0, neg: 0, neg_hi: 0, op_sel: 0, op_sel_hi: 0, omod: Omod::None, clamp: false };
}

/// What the result is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Omod {
    /// Nothing.
    #[default]
    None,
    /// 2
    Mul2,
    /// 4
    Mul4,
    /// 1 / 2
    Div2,
}

/// What the second word of VOP1, VOP2 and VOPC selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SubWord {
    /// There is none.
    #[default]
    None,
    /// Parts of dwords.
    Sdwa(Sdwa),
    /// Other lanes of `src[0]`.
    Dpp(Dpp),
}

/// Sub-dword addressing. `abs` and `neg` of its sources, `clamp` and `omod` are in [`Modifiers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Sdwa {
    /// The part of the destination that is written (VOPC writes a mask, this does not apply).
    pub dst_sel: Sel,
    /// What becomes of the rest of the destination.
    pub dst_unused: Unused,
    /// The parts of `src[0]` and `src[1]` that are read.
    pub src_sel: [Sel; 2],
    /// Bit n: sign-extend the part of `src[n]`, else zero-extend it.
    pub sext: u8,
}

/// A part of a dword.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Sel {
    /// Bits 7:0.
    Byte0,
    /// Bits 15:8.
    Byte1,
    /// Bits 23:16.
    Byte2,
    /// Bits 31:24.
    Byte3,
    /// Bits 15:0.
    Word0,
    /// Bits 31:16.
    Word1,
    /// All.
    #[default]
    Dword,
}

/// What becomes of the bits of the destination that SDWA does not select.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Unused {
    /// They become 0.
    #[default]
    Pad,
    /// The highest bit of the written part is copied into those above it, those below become 0.
    Sext,
    /// They stay.
    Preserve,
}

/// Lane-crossing access of `src[0]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dpp {
    /// Which lane is read.
    pub ctrl: DppCtrl,
    /// Bit n: lanes 16n..16n+16 are written.
    pub row_mask: u8,
    /// Bit n: lanes 4n..4n+4 of each row are written.
    pub bank_mask: u8,
    /// A lane that reads outside of what the control allows reads 0; if false it is not written.
    pub bound_ctrl: bool,
}

/// Which lane a DPP operand comes from. Rows are 16 lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DppCtrl {
    /// Within four lanes: bits 2n+1:2n are the source of lane n.
    QuadPerm(u8),
    /// Lane i reads lane i + n of its row; n is 1..=15.
    RowShl(u8),
    /// Lane i reads lane i - n of its row; n is 1..=15.
    RowShr(u8),
    /// Lane i reads lane i - n of its row, rotating; n is 1..=15.
    RowRor(u8),
    /// Lane i reads lane i + 1 of the wave.
    WaveShl1,
    /// Lane i reads lane i + 1 of the wave, rotating.
    WaveRol1,
    /// Lane i reads lane i - 1 of the wave.
    WaveShr1,
    /// Lane i reads lane i - 1 of the wave, rotating.
    WaveRor1,
    /// Lane i reads lane 15 - i of its row.
    RowMirror,
    /// Lane i reads lane 7 - i of its half row.
    RowHalfMirror,
    /// Rows 1, 2 and 3 read lane 15 of the row before them.
    RowBcast15,
    /// Rows 2 and 3 read lane 31.
    RowBcast31,
}

bitflags! {
    /// Flags of memory instructions.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct MemFlags: u16 {
        /// Globally coherent; atomics return the value before.
        const GLC = 1;
        /// System-level coherent.
        const SLC = 1 << 1;
        /// Non-volatile.
        const NV = 1 << 2;
        /// Data goes to LDS, not to registers.
        const LDS = 1 << 3;
        /// MUBUF: an offset comes from VADDR.
        const OFFEN = 1 << 4;
        /// MUBUF: an index comes from VADDR (from its first register, if OFFEN is set too).
        const IDXEN = 1 << 5;
        /// DS: global data share, not LDS.
        const GDS = 1 << 6;
        /// MUBUF: texture fail enable, a further result register.
        const TFE = 1 << 7;
    }
}
