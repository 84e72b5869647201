//! Assembly text of an [`Inst`], as LLVM 14 writes it.

mod control;
mod memory;
mod vector;

use std::fmt::{Display, Formatter, Result};

use crate::inst::{Dst, EXEC, FLAT_SCRATCH, FloatConst, Inst, M0, Src, TTMP, VCC, XNACK_MASK};
use crate::op::{Encoding, Kind, Op};

impl Display for Inst {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self.encoding {
            Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopc => control::scalar(self, f),
            Encoding::Sopk => control::sopk(self, f),
            Encoding::Sopp => control::sopp(self, f),
            Encoding::Smem => memory::smem(self, f),
            Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc | Encoding::Vop3 | Encoding::Vop3p => {
                vector::vector(self, f)
            }
            Encoding::Ds => memory::ds(self, f),
            Encoding::Flat | Encoding::Global | Encoding::Scratch => memory::flat(self, f),
            Encoding::Mubuf => memory::mubuf(self, f),
        }
    }
}

impl Display for Op {
    /// Its mnemonic.
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(self.row().name)
    }
}

/// Operands with commas between them.
struct Operands<'a, 'b> {
    f: &'a mut Formatter<'b>,
    separator: &'static str,
}

impl<'a, 'b> Operands<'a, 'b> {
    fn new(f: &'a mut Formatter<'b>) -> Self {
        Self { f, separator: " " }
    }

    fn push(&mut self, operand: impl Display) -> Result {
        let separator = std::mem::replace(&mut self.separator, ", ");
        write!(self.f, "{separator}{operand}")
    }

    /// The destination, if there is one.
    fn dst(&mut self, dst: Dst, kind: Kind) -> Result {
        match dst {
            Dst::None => Ok(()),
            Dst::Sgpr(first) => self.push(Scalar(first, kind)),
            Dst::Vgpr(first) => self.push(Vector(first, kind)),
        }
    }

    /// A source, if there is one.
    fn src(&mut self, src: Src, kind: Kind) -> Result {
        match src {
            Src::None => Ok(()),
            _ => self.push(Source(src, kind)),
        }
    }
}

/// Scalar registers.
struct Scalar(u8, Kind);

impl Display for Scalar {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (first, count) = (self.0, self.1.registers());
        let pairs =
            [(FLAT_SCRATCH, "flat_scratch"), (XNACK_MASK, "xnack_mask"), (VCC, "vcc"), (EXEC, "exec")];
        for (pair, name) in pairs {
            match first.wrapping_sub(pair) {
                0 if count == 2 => return f.write_str(name),
                0 => return write!(f, "{name}_lo"),
                1 => return write!(f, "{name}_hi"),
                _ => {}
            }
        }
        match first {
            M0 => f.write_str("m0"),
            TTMP..M0 => range(f, "ttmp", first - TTMP, count),
            _ => range(f, "s", first, count),
        }
    }
}

/// Vector registers.
struct Vector(u8, Kind);

impl Display for Vector {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        range(f, "v", self.0, self.1.registers())
    }
}

/// `count` registers from `first` on.
fn range(f: &mut Formatter<'_>, prefix: &str, first: u8, count: u8) -> Result {
    if count <= 1 {
        write!(f, "{prefix}{first}")
    } else {
        let last = u16::from(first) + u16::from(count) - 1;
        write!(f, "{prefix}[{first}:{last}]")
    }
}

/// A source without modifiers.
struct Source(Src, Kind);

impl Display for Source {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let kind = self.1;
        match self.0 {
            Src::None => Ok(()),
            Src::Sgpr(first) => Scalar(first, kind).fmt(f),
            Src::Vgpr(first) => Vector(first, kind).fmt(f),
            // Beyond what is inline only the immediate of s_atc_probe.
            Src::Int(value @ 65..) => write!(f, "{value:#x}"),
            Src::Int(value) => write!(f, "{value}"),
            Src::Float(value) => float(f, value, kind),
            Src::Literal(value) => literal(f, value, kind),
            Src::SharedBase => f.write_str("src_shared_base"),
            Src::SharedLimit => f.write_str("src_shared_limit"),
            Src::PrivateBase => f.write_str("src_private_base"),
            Src::PrivateLimit => f.write_str("src_private_limit"),
            Src::PopsExitingWaveId => f.write_str("src_pops_exiting_wave_id"),
            Src::Vccz => f.write_str("src_vccz"),
            Src::Execz => f.write_str("src_execz"),
            Src::Scc => f.write_str("src_scc"),
            Src::LdsDirect => f.write_str("src_lds_direct"),
        }
    }
}

/// All inline floats with their text.
const FLOATS: [(FloatConst, &str); 9] = [
    (FloatConst::Half, "0.5"),
    (FloatConst::NegHalf, "-0.5"),
    (FloatConst::One, "1.0"),
    (FloatConst::NegOne, "-1.0"),
    (FloatConst::Two, "2.0"),
    (FloatConst::NegTwo, "-2.0"),
    (FloatConst::Four, "4.0"),
    (FloatConst::NegFour, "-4.0"),
    (FloatConst::InvTwoPi, "0.15915494"),
];

fn float(f: &mut Formatter<'_>, value: FloatConst, kind: Kind) -> Result {
    match kind {
        // What is no float is written as its bits.
        Kind::I16 | Kind::PkI16 => write!(f, "{:#x}", value.f16_bits()),
        Kind::I64 | Kind::F64 | Kind::Mask if value == FloatConst::InvTwoPi => {
            f.write_str("0.15915494309189532")
        }
        _ => match FLOATS.iter().find(|(float, _)| *float == value) {
            Some((_, text)) => f.write_str(text),
            None => Ok(()),
        },
    }
}

/// A literal: where its value has an inline form, LLVM writes that.
fn literal(f: &mut Formatter<'_>, value: u32, kind: Kind) -> Result {
    let integer = match kind {
        Kind::I16 | Kind::F16 => i64::from(value as u16 as i16),
        Kind::I64 | Kind::F64 | Kind::Mask => i64::from(value),
        _ => i64::from(value as i32),
    };
    if (-16..=64).contains(&integer) {
        return write!(f, "{integer}");
    }
    for (float, text) in FLOATS {
        let bits = match kind {
            Kind::F16 => u32::from(float.f16_bits()),
            Kind::I32 | Kind::F32 => float.f32_bits(),
            _ => continue,
        };
        if bits == value {
            return f.write_str(text);
        }
    }
    match kind {
        Kind::I16 | Kind::F16 => write!(f, "{:#x}", value as u16),
        _ => write!(f, "{value:#x}"),
    }
}
