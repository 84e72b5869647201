//! FLAT, GLOBAL and SCRATCH.
//!
//! A flat address is LDS, private memory or global memory by its bits 63:32. Private memory lies in global memory behind
//! FLAT_SCRATCH, in words, those of all lanes next to each other (AMD "Vega" ISA, flat scratch; the same as a scratch
//! buffer with swizzling has it).

use super::lds::Lds;
use super::rows::{Addresses, lanes};
use super::vector::{Linear, Place, Registers, Shape, run};
use crate::bus::{Bus, BusFault, Space};
use crate::inst::{Dst, Inst, Src};
use crate::op::Encoding;
use crate::salu::{PRIVATE_BASE_HIGH, SHARED_BASE_HIGH, read32, read64};
use crate::stop::Stop;
use crate::wave::{LANES, Wave, reg};

/// Bits of a global address.
const GLOBAL_BITS: u32 = 48;

/// Bytes of private memory of all lanes for one word of each.
const WORD_STRIDE: u64 = 4 * LANES as u64;

/// Offsets in private memory.
struct Private {
    base: u64,
    offsets: [u32; LANES],
}

impl Private {
    /// The global address of a byte of private memory.
    #[inline]
    fn address(&self, offset: u32, lane: u64) -> u64 {
        let word = u64::from(offset / 4) * WORD_STRIDE;
        self.base.wrapping_add(word).wrapping_add(lane * 4).wrapping_add(u64::from(offset % 4))
    }
}

impl Place for Private {
    const IN_A_ROW: bool = false;

    #[inline]
    fn word(&self, index: u8) -> Addresses {
        let mut addresses = [0; LANES];
        for ((address, offset), lane) in addresses.iter_mut().zip(&self.offsets).zip(0..) {
            *address = self.address(offset.wrapping_add(u32::from(index) * 4), lane);
        }
        addresses
    }
}

/// Private memory of one lane, by its offsets: for what is not aligned to words.
struct Bytes<'a, B> {
    private: &'a Private,
    lane: u64,
    bus: &'a mut B,
}

impl<B: Bus> Bytes<'_, B> {
    fn address(&self, va: u64) -> u64 {
        self.private.address(va as u32, self.lane)
    }
}

impl<B: Bus> Space for Bytes<'_, B> {
    fn load(&mut self, va: u64, to: &mut [u8]) -> Result<(), BusFault> {
        for (va, byte) in (va..).zip(to) {
            self.bus.load(self.address(va), core::slice::from_mut(byte))?;
        }
        Ok(())
    }

    fn store(&mut self, va: u64, from: &[u8]) -> Result<(), BusFault> {
        for (va, byte) in (va..).zip(from) {
            self.bus.store(self.address(va), core::slice::from_ref(byte))?;
        }
        Ok(())
    }

    fn load_words(&mut self, va: u64, to: &mut [u32]) -> Result<(), BusFault> {
        for (index, word) in (0..).zip(to) {
            self.bus.load_words(self.address(va + index * 4), core::slice::from_mut(word))?;
        }
        Ok(())
    }

    fn store_words(&mut self, va: u64, from: &[u32]) -> Result<(), BusFault> {
        for (index, word) in (0..).zip(from) {
            self.bus.store_words(self.address(va + index * 4), core::slice::from_ref(word))?;
        }
        Ok(())
    }

    fn atomic32(&mut self, va: u64, change: impl Fn(u32) -> u32) -> Result<u32, BusFault> {
        self.bus.atomic32(self.address(va), change)
    }

    fn atomic64(&mut self, va: u64, change: impl Fn(u64) -> u64) -> Result<u64, BusFault> {
        // No other lane reaches this memory in a way that programs may rely on.
        let mut words = [0; 2];
        self.load_words(va, &mut words)?;
        let [low, high] = words;
        let old = u64::from(low) | u64::from(high) << 32;
        let new = change(old);
        self.store_words(va, &[new as u32, (new >> 32) as u32])?;
        Ok(old)
    }
}

fn private(
    shape: Shape,
    wave: &mut Wave,
    registers: Registers,
    offsets: [u32; LANES],
    mask: u64,
    bus: &mut impl Bus,
) -> Result<(), Stop> {
    // Words are words, whatever the program made of the base.
    let private = Private { base: wave.sgpr64(reg::FLAT_SCRATCH) & !3, offsets };
    let words = matches!(shape, Shape::Load(_) | Shape::Store(_) | Shape::Atomic(_, false));
    let aligned =
        lanes(mask).all(|lane| private.offsets.get(lane).is_none_or(|offset| offset.is_multiple_of(4)));
    if words && aligned {
        return Ok(run(shape, wave, registers, &private, mask, bus)?);
    }
    let addresses = offsets.map(u64::from);
    for lane in lanes(mask) {
        let mut space = Bytes { private: &private, lane: lane as u64, bus };
        run(shape, wave, registers, &Linear(&addresses), 1 << lane, &mut space)?;
    }
    Ok(())
}

/// Executes an instruction.
///
/// # Errors
/// The fault of the first lane that has one, or an address in no aperture.
#[inline]
pub fn execute(wave: &mut Wave, inst: &Inst, lds: &mut Lds, bus: &mut impl Bus) -> Result<(), Stop> {
    let Some(shape) = Shape::of(inst.op) else { return Err(Stop::not_supported(inst.op)) };
    let mask = wave.exec();
    if mask == 0 {
        return Ok(());
    }
    let [address, data, saddr, _] = inst.src;
    let to = if let Dst::Vgpr(to) = inst.dst { Some(to) } else { None };
    let data = if let Src::Vgpr(data) = data { data } else { 0 };
    let registers = Registers { to, data };
    if inst.encoding == Encoding::Scratch {
        let base = (read_offset(wave, saddr)).wrapping_add_signed(inst.imm);
        let mut offsets = [base; LANES];
        if let Src::Vgpr(low) = address {
            for (offset, value) in offsets.iter_mut().zip(&wave.row(low).0) {
                *offset = offset.wrapping_add(*value);
            }
        }
        return private(shape, wave, registers, offsets, mask, bus);
    }
    let Src::Vgpr(low) = address else { return Err(Stop::Illegal) };
    let offset = i64::from(inst.imm) as u64;
    let mut addresses: Addresses = [offset; LANES];
    if saddr == Src::None {
        let (low, high) = (wave.row(low), wave.row_at(usize::from(low) + 1));
        for ((address, low), high) in addresses.iter_mut().zip(&low.0).zip(&high.0) {
            *address = address.wrapping_add(u64::from(*low) | u64::from(*high) << 32);
        }
    } else {
        let base = read64(wave, saddr);
        for (address, offset) in addresses.iter_mut().zip(&wave.row(low).0) {
            *address = address.wrapping_add(base).wrapping_add(u64::from(*offset));
        }
    }
    // Which lanes have an address that is not a global one.
    let mut any_high = 0;
    for address in &addresses {
        any_high |= address >> GLOBAL_BITS;
    }
    if any_high == 0 {
        return Ok(run(shape, wave, registers, &Linear(&addresses), mask, bus)?);
    }
    let (mut global, mut shared, mut scratch) = (0u64, 0u64, 0u64);
    for lane in lanes(mask) {
        let va = addresses.get(lane).copied().unwrap_or(0);
        let group = match (va >> 32) as u32 {
            SHARED_BASE_HIGH if inst.encoding == Encoding::Flat => &mut shared,
            PRIVATE_BASE_HIGH if inst.encoding == Encoding::Flat => &mut scratch,
            high if high >> (GLOBAL_BITS - 32) == 0 => &mut global,
            _ => return Err(Stop::Aperture { va }),
        };
        *group |= 1 << lane;
    }
    if global != 0 {
        run(shape, wave, registers, &Linear(&addresses), global, bus)?;
    }
    if shared != 0 {
        let inside = addresses.map(|address| address & 0xffff_ffff);
        run(shape, wave, registers, &Linear(&inside), shared, lds)?;
    }
    if scratch != 0 {
        private(shape, wave, registers, addresses.map(|address| address as u32), scratch, bus)?;
    }
    Ok(())
}

fn read_offset(wave: &Wave, saddr: Src) -> u32 {
    if saddr == Src::None { 0 } else { read32(wave, saddr) }
}
