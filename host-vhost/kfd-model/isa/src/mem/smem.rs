//! SMEM: scalar loads, stores and atomics, the clocks.

use super::buffer::Descriptor;
use super::vector::atomic;
use crate::bus::{Bus, BusFault};
use crate::inst::{Dst, Inst, Src};
use crate::op::Op;
use crate::salu::{read32, read64};
use crate::stop::Stop;
use crate::wave::Wave;

/// Words that one instruction loads at most.
const MAX_WORDS: usize = 16;

/// Executes an instruction.
///
/// # Errors
/// Faults; [`Stop::NotSupported`].
pub fn execute(wave: &mut Wave, inst: &Inst, bus: &mut impl Bus) -> Result<(), Stop> {
    let [base, offset, data, _] = inst.src;
    match inst.op {
        Op::SMemtime | Op::SMemrealtime => {
            let Dst::Sgpr(to) = inst.dst else { return Err(Stop::Illegal) };
            wave.set_sgpr64(to, bus.clock());
            return Ok(());
        }
        Op::SDcacheInv | Op::SDcacheWb | Op::SDcacheInvVol | Op::SDcacheWbVol => {
            bus.fence();
            return Ok(());
        }
        // Hints.
        Op::SAtcProbe | Op::SAtcProbeBuffer | Op::SDcacheDiscard | Op::SDcacheDiscardX2 => return Ok(()),
        _ => {}
    }
    let offset = match offset {
        Src::None => 0,
        offset => read32(wave, offset),
    };
    let offset = u64::from(offset).wrapping_add_signed(i64::from(inst.imm));
    let code = inst.op.row().code;
    let scalar = |src: Src| if let Src::Sgpr(n) = src { n } else { 127 };
    let is_buffer = matches!(code, 0x08..=0x0c | 0x18..=0x1a | 0x40..=0x6c);
    let place = if is_buffer {
        Place::Buffer(Descriptor::read(wave, scalar(base)), offset)
    } else {
        Place::Address(read64(wave, base).wrapping_add(offset) & !3)
    };
    match code {
        0x00..=0x04 | 0x08..=0x0c => {
            let Dst::Sgpr(to) = inst.dst else { return Err(Stop::Illegal) };
            let mut words = [0u32; MAX_WORDS];
            let words = words.get_mut(..1 << (code & 7)).unwrap_or_default();
            place.load(bus, words)?;
            for (index, word) in (0..).zip(words) {
                wave.set_sgpr(to.wrapping_add(index), *word);
            }
        }
        0x10..=0x12 | 0x18..=0x1a => {
            let from = scalar(data);
            for index in 0..1u8 << (code & 3) {
                if let Some(va) = place.word(index) {
                    bus.store_words(va, &[wave.sgpr(from.wrapping_add(index))])?;
                }
            }
        }
        0x40..=0xac => {
            let Some(operation) = atomic(code) else { return Err(Stop::not_supported(inst.op)) };
            let Some(va) = place.word(0) else { return Ok(()) };
            let from = scalar(data);
            let wide = code & 0x20 != 0;
            let before = if wide {
                if !va.is_multiple_of(8) {
                    return Err(BusFault::Unaligned { va, size: 8 }.into());
                }
                let (source, compare) = (wave.sgpr64(from), wave.sgpr64(from.wrapping_add(2)));
                bus.atomic64(va, |old| operation.apply64(old, source, compare))?
            } else {
                let (source, compare) = (wave.sgpr(from), wave.sgpr(from.wrapping_add(1)));
                u64::from(bus.atomic32(va, |old| operation.apply32(old, source, compare))?)
            };
            if let Dst::Sgpr(to) = inst.dst {
                if wide { wave.set_sgpr64(to, before) } else { wave.set_sgpr(to, before as u32) }
            }
        }
        _ => return Err(Stop::not_supported(inst.op)),
    }
    Ok(())
}

/// Where the words are.
enum Place {
    Address(u64),
    Buffer(Descriptor, u64),
}

impl Place {
    /// Address of a word; `None` beyond the end of a buffer.
    fn word(&self, index: u8) -> Option<u64> {
        let behind = u64::from(index) * 4;
        match self {
            Self::Address(va) => Some(va.wrapping_add(behind)),
            Self::Buffer(descriptor, offset) => descriptor.scalar((offset & !3).wrapping_add(behind)),
        }
    }

    fn load(&self, bus: &mut impl Bus, words: &mut [u32]) -> Result<(), BusFault> {
        if let Self::Address(va) = self {
            return bus.load_words(*va, words);
        }
        for (index, word) in (0..).zip(words) {
            *word = 0;
            if let Some(va) = self.word(index) {
                bus.load_words(va, core::slice::from_mut(word))?;
            }
        }
        Ok(())
    }
}
