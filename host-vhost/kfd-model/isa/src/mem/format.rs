//! Elements of buffers with a format, as HIP's one-dimensional textures (`tex1Dfetch`) read them.
//!
//! Source: AMD, "Vega" 7nm Instruction Set Architecture (2020), 8.1.8 Buffer resource descriptor: where the fields are;
//! `SQ_SEL_XYZW01`, `BUF_DATA_FORMAT` and `BUF_NUM_FORMAT` of the kernel's `gfx9` register headers: what they mean.

use crate::op::Op;
use crate::valu::half;

/// How the bits of a component become a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Unsigned,
    Signed,
    Float,
}

/// Where a component of a result comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    /// It is 0.
    Zero,
    /// It is 1, in the format's kind of number.
    One,
    /// This component of the element; 0 if it has fewer.
    Component(u8),
}

/// What the last word of a buffer descriptor says of the elements: components of 8, 16 or 32 bits as they are. What is
/// normalized or scaled to a floating point number, and packed formats, are not implemented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    components: u8,
    /// Bytes of a component.
    bytes: u8,
    number: Number,
}

impl Format {
    /// From word 3 of a descriptor; `None` if it is invalid or not implemented.
    pub fn read(word3: u32) -> Option<Self> {
        let (components, bytes) = match word3 >> 15 & 0xf {
            1 => (1, 1),
            2 => (1, 2),
            3 => (2, 1),
            4 => (1, 4),
            5 => (2, 2),
            10 => (4, 1),
            11 => (2, 4),
            12 => (4, 2),
            13 => (3, 4),
            14 => (4, 4),
            _ => return None,
        };
        let number = match word3 >> 12 & 7 {
            4 => Number::Unsigned,
            5 => Number::Signed,
            7 if bytes > 1 => Number::Float,
            _ => return None,
        };
        Some(Self { components, bytes, number })
    }

    /// Bytes of an element, at most 16.
    pub fn size(self) -> usize {
        usize::from(self.components) * usize::from(self.bytes)
    }

    /// A component of the result, from the bytes of an element.
    pub fn value(self, select: Select, element: &[u8; 16]) -> u32 {
        let component = match select {
            Select::Zero => return 0,
            Select::One if self.number == Number::Float => return 1f32.to_bits(),
            Select::One => return 1,
            Select::Component(component) if component >= self.components => return 0,
            Select::Component(component) => usize::from(component),
        };
        let at = component * usize::from(self.bytes);
        let mut word = [0; 4];
        for (to, from) in word.iter_mut().zip(element.iter().skip(at)).take(usize::from(self.bytes)) {
            *to = *from;
        }
        let bits = u32::from_le_bytes(word);
        match (self.number, self.bytes) {
            (Number::Signed, 1) => bits as u8 as i8 as u32,
            (Number::Signed, 2) => bits as u16 as i16 as u32,
            (Number::Float, 2) => half::to_f32(bits).to_bits(),
            _ => bits,
        }
    }
}

/// The selections of word 3 of a descriptor, X first; `None` stands for what is reserved.
pub fn selections(word3: u32) -> [Option<Select>; 4] {
    [0, 3, 6, 9].map(|at| match word3 >> at & 7 {
        0 => Some(Select::Zero),
        1 => Some(Select::One),
        component @ 4..=7 => Some(Select::Component((component - 4) as u8)),
        _ => None,
    })
}

/// How many components an instruction loads; `None` for one that does not load with a format, or in halves.
pub fn components(op: Op) -> Option<u8> {
    match op {
        Op::BufferLoadFormatX => Some(1),
        Op::BufferLoadFormatXy => Some(2),
        Op::BufferLoadFormatXyz => Some(3),
        Op::BufferLoadFormatXyzw => Some(4),
        _ => None,
    }
}
