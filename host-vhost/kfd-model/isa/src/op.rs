//! The opcodes: one table with mnemonic, encoding, number, operands and availability of each.

use bitflags::bitflags;

#[macro_use]
mod table;

/// An instruction encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Encoding {
    /// Scalar, two sources.
    Sop2,
    /// Scalar, 16-bit immediate.
    Sopk,
    /// Scalar, one source.
    Sop1,
    /// Scalar comparison.
    Sopc,
    /// Scalar program control.
    Sopp,
    /// Scalar memory.
    Smem,
    /// Vector, one source.
    Vop1,
    /// Vector, two sources.
    Vop2,
    /// Vector comparison.
    Vopc,
    /// Vector, up to three sources, with modifiers; also the long form of VOP1, VOP2 and VOPC.
    Vop3,
    /// Vector, packed.
    Vop3p,
    /// Local and global data share.
    Ds,
    /// Memory at flat addresses.
    Flat,
    /// Memory at global addresses.
    Global,
    /// Scratch memory.
    Scratch,
    /// Untyped buffers.
    Mubuf,
}

/// The instruction set of one processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// Vega 10.
    Gfx900,
    /// Vega 20.
    Gfx906,
}

impl Target {
    const fn bit(self) -> Targets {
        match self {
            Self::Gfx900 => Targets::GFX900,
            Self::Gfx906 => Targets::GFX906,
        }
    }
}

bitflags! {
    /// A set of targets.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Targets: u8 {
        /// Vega 10.
        const GFX900 = 1;
        /// Vega 20.
        const GFX906 = 1 << 1;
        /// Those with v_mad_mix instead of v_fma_mix.
        const MAD_MIX = Self::GFX900.bits();
        /// Those with the deep-learning instructions (dot products, v_fmac_f32, v_xnor_b32) and v_fma_mix.
        const DL = Self::GFX906.bits();
        /// All.
        const ALL = Self::GFX900.bits() | Self::GFX906.bits();
    }
}

/// Width and type of an operand. Signedness is the operation's business.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// There is no such operand.
    None,
    /// 16 bits, integer, in the low half of a register.
    I16,
    /// 16 bits, float, in the low half of a register.
    F16,
    /// Two 16-bit integers.
    PkI16,
    /// Two 16-bit floats.
    PkF16,
    /// A float or a half, as OP_SEL_HI says.
    Mix,
    /// 32 bits, integer or untyped.
    I32,
    /// 32 bits, float.
    F32,
    /// 64 bits, integer or untyped.
    I64,
    /// 64 bits, float.
    F64,
    /// A scalar register pair with a bit per lane.
    Mask,
    /// 3 dwords.
    B96,
    /// 4 dwords.
    B128,
    /// 8 dwords.
    B256,
    /// 16 dwords.
    B512,
}

impl Kind {
    /// How many registers it takes.
    #[must_use]
    pub const fn registers(self) -> u8 {
        match self {
            Self::None => 0,
            Self::I16 | Self::F16 | Self::PkI16 | Self::PkF16 | Self::Mix | Self::I32 | Self::F32 => 1,
            Self::I64 | Self::F64 | Self::Mask => 2,
            Self::B96 => 3,
            Self::B128 => 4,
            Self::B256 => 8,
            Self::B512 => 16,
        }
    }

    /// Whether it is a float, to which `abs` and `neg` apply.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::PkF16 | Self::Mix | Self::F32 | Self::F64)
    }
}

bitflags! {
    /// Properties of an opcode.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Traits: u32 {
        /// VOP1, VOP2, VOPC: has a VOP3 form.
        const E64 = 1;
        /// VOP1, VOP2, VOPC: has an SDWA form.
        const SDWA = 1 << 1;
        /// VOP1, VOP2: has a DPP form.
        const DPP = 1 << 2;
        /// The VOP3 form has CLAMP.
        const CLAMP = 1 << 3;
        /// The VOP3 form has OMOD.
        const OMOD = 1 << 4;
        /// The SDWA form has OMOD.
        const SDWA_OMOD = 1 << 5;
        /// VOP3: OP_SEL chooses halves.
        const OP_SEL = 1 << 6;
        /// Writes a second destination, a mask.
        const CARRY_OUT = 1 << 7;
        /// Reads a mask: VCC, or `src[2]` in VOP3.
        const CARRY_IN = 1 << 8;
        /// The destination is the third source.
        const ACCUMULATE = 1 << 9;
        /// `src[1]` is a literal.
        const LITERAL_B = 1 << 10;
        /// `src[2]` is a literal.
        const LITERAL_C = 1 << 11;
        /// The destination is a scalar register.
        const SGPR_DST = 1 << 12;
        /// Memory atomic: returns the value before if GLC is set.
        const ATOMIC = 1 << 13;
        /// DS: two offsets of 8 bits.
        const OFFSETS2 = 1 << 14;
        /// DS: GDS only.
        const GDS_ONLY = 1 << 15;
        /// DS: GDS cannot be set.
        const NO_GDS = 1 << 16;
        /// FLAT: has a SCRATCH form.
        const SCRATCH = 1 << 17;
        /// MUBUF: may go to LDS.
        const LDS = 1 << 18;
        /// SOPP: without an immediate.
        const NO_IMM = 1 << 19;
        /// The VOP3 form has `abs` and `neg`, although its operands are not floats.
        const NEG_ABS = 1 << 20;
    }
}

/// What the table says of an opcode.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The opcode.
    pub op: Op,
    /// The mnemonic without a suffix for the encoding; of the FLAT family with `flat_`.
    pub name: &'static str,
    /// The encoding that `code` belongs to; [`Encoding::Flat`] for the whole FLAT family.
    pub encoding: Encoding,
    /// The number in that encoding. VOP3 forms add 0 (VOPC), 0x100 (VOP2) and 0x140 (VOP1) to it.
    pub code: u16,
    /// The destination.
    pub dst: Kind,
    /// The sources, by their place in [`crate::Inst::src`], up to the last one.
    pub src: &'static [Kind],
    /// Properties.
    pub traits: Traits,
    /// Where it exists.
    pub targets: Targets,
}

/// Sets of traits, for the table.
macro_rules! traits {
    ($($name:ident)*) => { Traits::from_bits_retain(0 $(| Traits::$name.bits())*) };
}

/// Makes the enumeration and the rows from the table.
macro_rules! opcodes {
    ($($encoding:ident {
        $($code:literal $op:ident $name:literal $dst:ident [$($src:ident)*] ($($traits:ident)*) $targets:ident;)*
    })*) => {
        /// The opcodes, one per mnemonic; see [`Row`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        pub enum Op {
            $($(
                #[doc = concat!("`", $name, "`")]
                $op,
            )*)*
        }

        /// All rows, in the order of [`Op`].
        pub static ROWS: &[Row] = ALL_ROWS;

        const ALL_ROWS: &[Row] = &[
            $($(
                Row {
                    op: Op::$op,
                    name: $name,
                    encoding: Encoding::$encoding,
                    code: $code,
                    dst: Kind::$dst,
                    src: &[$(Kind::$src),*],
                    traits: traits!($($traits)*),
                    targets: Targets::$targets,
                },
            )*)*
        ];

        impl Op {
            /// What the table says of it.
            #[must_use]
            pub const fn row(self) -> &'static Row {
                match self {
                    $($(
                        Self::$op => const { &Row {
                            op: Op::$op,
                            name: $name,
                            encoding: Encoding::$encoding,
                            code: $code,
                            dst: Kind::$dst,
                            src: &[$(Kind::$src),*],
                            traits: traits!($($traits)*),
                            targets: Targets::$targets,
                        } },
                    )*)*
                }
            }
        }
    };
}

all_opcodes!(opcodes);

impl Op {
    /// The opcode with this number in an encoding of the target; `code` as in [`Row::code`].
    #[must_use]
    pub fn find(target: Target, encoding: Encoding, code: u16) -> Option<Self> {
        let slots = match target {
            Target::Gfx900 => &GFX900,
            Target::Gfx906 => &GFX906,
        };
        let (base, size) = slot(encoding);
        if usize::from(code) >= size {
            return None;
        }
        let number = slots.get(base.checked_add(usize::from(code))?)?;
        let row = ROWS.get(usize::from(number.checked_sub(1)?))?;
        Some(row.op)
    }

    /// The kind of `src[n]`.
    #[must_use]
    pub fn src(self, n: usize) -> Kind {
        self.row().src.get(n).copied().unwrap_or(Kind::None)
    }

    /// The kind of the destination.
    #[must_use]
    pub const fn dst(self) -> Kind {
        self.row().dst
    }

    /// Whether it has all of these properties.
    #[must_use]
    pub const fn has(self, traits: Traits) -> bool {
        self.row().traits.contains(traits)
    }
}

/// How many numbers all encodings have.
const SLOTS: usize = 3136;

/// Where the numbers of an encoding begin among the slots, and how many there are.
const fn slot(encoding: Encoding) -> (usize, usize) {
    match encoding {
        Encoding::Sop2 => (0, 96),
        Encoding::Sopk => (96, 32),
        Encoding::Sop1 => (128, 256),
        Encoding::Sopc => (384, 128),
        Encoding::Sopp => (512, 128),
        Encoding::Smem => (640, 256),
        Encoding::Vop1 => (896, 256),
        Encoding::Vop2 => (1152, 64),
        Encoding::Vopc => (1216, 256),
        Encoding::Vop3 => (1472, 1024),
        Encoding::Vop3p => (2496, 128),
        Encoding::Ds => (2624, 256),
        Encoding::Flat | Encoding::Global | Encoding::Scratch => (2880, 128),
        Encoding::Mubuf => (3008, 128),
    }
}

static GFX900: [u16; SLOTS] = slots(Target::Gfx900);
static GFX906: [u16; SLOTS] = slots(Target::Gfx906);

/// For each number of each encoding: 1 + the row that has it on the target, or 0.
#[allow(
    clippy::indexing_slicing,
    reason = "evaluated by the compiler, which would refuse an index out of range"
)]
const fn slots(target: Target) -> [u16; SLOTS] {
    let mut slots = [0; SLOTS];
    let mut number = 0;
    while number < ALL_ROWS.len() {
        let row = &ALL_ROWS[number];
        if row.targets.contains(target.bit()) {
            let (base, size) = slot(row.encoding);
            assert!((row.code as usize) < size, "the number does not fit its encoding");
            let slot = &mut slots[base + row.code as usize];
            assert!(*slot == 0, "two opcodes with one number");
            *slot = number as u16 + 1;
        }
        number += 1;
    }
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_by_number_and_by_opcode() {
        for (number, row) in ROWS.iter().enumerate() {
            assert_eq!(row.op as usize, number);
            assert_eq!(row.op.row().name, row.name);
            for target in [Target::Gfx900, Target::Gfx906] {
                let found = Op::find(target, row.encoding, row.code);
                assert_eq!(found == Some(row.op), row.targets.contains(target.bit()), "{}", row.name);
            }
        }
    }
}
