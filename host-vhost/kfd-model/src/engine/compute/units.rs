//! Compute units: where the GPU has them, and which of them a queue may use.
//!
//! The threads that run workgroups are of no unit ([`super::pool`]). Each workgroup is said to be on one, so that kernels that
//! ask where they run, and masks of compute units, find what they would on hardware: workgroups take turns on the units that
//! their queue may use, and as many run at a time as these have room for.

use std::sync::{Arc, PoisonError, RwLock};

use crate::profile::Shader;

/// Fields of `HW_ID` (AMD "Vega" ISA, HW_ID): unit in its array, array in its engine, engine.
const CU_ID: u32 = 8;
const SH_ID: u32 = 12;
const SE_ID: u32 = 13;

/// The compute units of one queue.
#[derive(Debug)]
pub struct Units {
    /// Where each is, as `HW_ID` has it, in the order in which masks name them.
    all: Vec<u32>,
    /// Those that may be used; none is all.
    used: RwLock<Arc<[u32]>>,
}

impl Units {
    /// All of a GPU. The GPUs whose kernels the model runs have one compute die.
    ///
    /// A mask names the first unit of each engine, then that of each engine's second array, then the second ones
    /// (`mqd_symmetrically_map_cu_mask`).
    pub fn new(shader: &Shader) -> Self {
        let mut all = Vec::new();
        for rank in 0..shader.cus_per_array {
            for array in 0..shader.arrays_per_engine {
                for engine in 0..shader.engines {
                    let index = engine.saturating_mul(shader.arrays_per_engine).saturating_add(array);
                    let present = shader.cu_bitmap.get(index as usize).copied().unwrap_or(0);
                    let unit = (0..u32::BITS).filter(|unit| present >> unit & 1 == 1).nth(rank as usize);
                    all.extend(unit.map(|unit| unit << CU_ID | array << SH_ID | engine << SE_ID));
                }
            }
        }
        let used = RwLock::new(all.as_slice().into());
        Self { all, used }
    }

    /// Limits the queue to the units whose bits are set; what has no bit is not used. Kernels that run go on where they are.
    /// A mask without any unit, with which hardware would run nothing, is as none.
    pub fn mask(&self, words: &[u32]) {
        let bits = words.iter().flat_map(|word| (0..u32::BITS).map(move |bit| word >> bit & 1 == 1));
        let named: Arc<[u32]> =
            self.all.iter().zip(bits).filter_map(|(unit, set)| set.then_some(*unit)).collect();
        let used = if named.is_empty() { self.all.as_slice().into() } else { named };
        *self.used.write().unwrap_or_else(PoisonError::into_inner) = used;
    }

    /// Those that may be used now.
    pub fn used(&self) -> Arc<[u32]> {
        self.used.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shader(engines: u32, arrays_per_engine: u32, cu_bitmap: &[u32]) -> Shader {
        let profile = crate::profile::Profile::load("gfx906").unwrap();
        let [gpu] = &*profile.gpu else { panic!("gfx906 has one GPU") };
        Shader { engines, arrays_per_engine, cu_bitmap: cu_bitmap.to_vec(), ..gpu.shader.clone() }
    }

    // The example in the comment of mqd_symmetrically_map_cu_mask (drivers/gpu/drm/amd/amdkfd/kfd_mqd_manager.c): with four
    // engines bits 0 to 3 are the first units of these, bit 4 is the second array's or the second unit of the first engine.
    #[test]
    fn masks_name_units_across_engines() {
        let place = |engine: u32, array: u32, unit: u32| unit << 8 | array << 12 | engine << 13;
        let units = Units::new(&shader(4, 1, &[0b111, 0b101, 0b110, 0b1]));
        let all = [(0, 0), (1, 0), (2, 1), (3, 0), (0, 1), (1, 2), (2, 2), (0, 2)];
        assert_eq!(*units.used(), all.map(|(engine, unit)| place(engine, 0, unit)));
        units.mask(&[0b1010_0010]);
        assert_eq!(*units.used(), [place(1, 0, 0), place(1, 0, 2), place(0, 0, 2)]);
        units.mask(&[0, 0]);
        assert_eq!(units.used().len(), 8);
        let units = Units::new(&shader(2, 2, &[0b11; 4]));
        units.mask(&[0b1_0100]);
        assert_eq!(*units.used(), [place(0, 1, 0), place(0, 0, 1)]);
    }

    #[test]
    fn units_without_a_bit_are_not_used() {
        let units = Units::new(&shader(4, 1, &[0x7fff; 4]));
        assert_eq!(units.used().len(), 60);
        units.mask(&[u32::MAX]);
        assert_eq!(units.used().len(), 32);
        units.mask(&[0, u32::MAX]);
        assert_eq!(units.used().len(), 28);
    }
}
