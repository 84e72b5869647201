//! Decoded code.

use std::sync::{Arc, OnceLock};

use crate::bus::BusFault;
use crate::inst::{Inst, Src};
use crate::op::{Encoding, Target};
use crate::valu::Handler;
use crate::{DecodeError, decode, valu};

/// Where code comes from.
pub trait Fetch {
    /// The page of code that `pc` lies in.
    ///
    /// # Errors
    /// The fault of the fetch.
    fn page(&mut self, pc: u64) -> Result<Arc<CodePage>, BusFault>;
}

/// Bytes of a page of code.
pub const PAGE: u64 = 4096;

/// An instruction, and what executes it where that is known from its opcode alone.
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    /// The instruction.
    pub inst: Inst,
    /// The handler of a vector instruction, which is to be used where [`crate::wave::Mode::is_direct`] holds.
    pub handler: Option<Handler>,
}

type Decoded = Result<Ready, DecodeError>;

fn ready(inst: Inst) -> Ready {
    let is_vector = matches!(
        inst.encoding,
        Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc | Encoding::Vop3 | Encoding::Vop3p
    );
    // What the handlers cannot do is refused by valu::execute.
    let handler = if is_vector && inst.src[0] != Src::LdsDirect { valu::handler(inst.op) } else { None };
    Ready { inst, handler }
}

/// A page of code. Its instructions are decoded when they are first run.
#[derive(Debug)]
pub struct CodePage {
    start: u64,
    words: Vec<u32>,
    decoded: Vec<OnceLock<Decoded>>,
    target: Target,
}

impl CodePage {
    /// The page at `start`, a multiple of [`PAGE`], with its words, and the first one behind it where there is one.
    pub fn new(target: Target, start: u64, words: Vec<u32>) -> Self {
        let mut decoded = Vec::new();
        decoded.resize_with((PAGE / 4) as usize, OnceLock::new);
        Self { start, words, decoded, target }
    }

    /// Address of its first word.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Its words, and the first one behind it where there is one.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The instruction at `pc`; `None` if that lies on another page, or between words.
    #[inline]
    pub fn instruction(&self, pc: u64) -> Option<&Decoded> {
        let offset = pc.wrapping_sub(self.start);
        if offset >= PAGE || !offset.is_multiple_of(4) {
            return None;
        }
        let index = (offset / 4) as usize;
        let slot = self.decoded.get(index)?;
        Some(slot.get_or_init(|| decode(self.target, self.words.get(index..).unwrap_or_default()).map(ready)))
    }

    /// The word at `pc`, for reports; 0 if there is none.
    pub fn word(&self, pc: u64) -> u32 {
        let index = usize::try_from(pc.wrapping_sub(self.start) / 4).unwrap_or(usize::MAX);
        self.words.get(index).copied().unwrap_or(0)
    }
}
