//! Caches of a GPU (`kfd_fill_cache_non_crat_info` of `kfd_topology.c`).

use crate::profile::{Cache, CacheKind, Gpu};

/// One cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheProperties {
    /// Id of the first compute unit that uses it.
    pub processor_id_low: u32,
    /// Level.
    pub level: u32,
    /// Size in KiB.
    pub size: u32,
    /// Line in bytes.
    pub cache_line_size: u32,
    /// `HSA_CACHE_TYPE_*`.
    pub kind: u32,
    /// Compute units that share it, from `processor_id_low` on: 32 bits for each array.
    pub sibling_map: Vec<u32>,
}

impl CacheProperties {
    /// The file in the kernel's order (`kfd_cache_show`).
    pub fn text(&self) -> String {
        let map: Vec<&str> = self
            .sibling_map
            .iter()
            .flat_map(|word| (0..32).map(move |bit| if (word >> bit) & 1 == 1 { "1" } else { "0" }))
            .collect();
        format!(
            "processor_id_low {}\nlevel {}\nsize {}\ncache_line_size {}\ncache_lines_per_tag 0\n\
             association 0\nlatency 0\ntype {}\nsibling_map {}\n",
            self.processor_id_low,
            self.level,
            self.size,
            self.cache_line_size,
            self.kind,
            map.join(",")
        )
    }
}

/// `HSA_CACHE_TYPE_*`: GPU caches have the bit of compute units.
fn kind_bits(kind: CacheKind) -> u32 {
    const DATA: u32 = 1;
    const INSTRUCTION: u32 = 2;
    const HSACU: u32 = 8;
    HSACU
        | match kind {
            CacheKind::Data => DATA,
            CacheKind::Instruction => INSTRUCTION,
        }
}

/// All caches of a GPU whose first compute unit has the id `processor_id`.
pub(super) fn of_gpu(gpu: &Gpu, processor_id: u32) -> Vec<CacheProperties> {
    let mut caches = Vec::new();
    for cache in &gpu.cache {
        if cache.level == 1 {
            first_level(gpu, cache, processor_id, &mut caches);
        } else {
            caches.extend(whole_gpu(gpu, cache, processor_id));
        }
    }
    caches
}

fn properties(cache: &Cache, processor_id_low: u32, sibling_map: Vec<u32>) -> CacheProperties {
    CacheProperties {
        processor_id_low,
        level: cache.level,
        size: cache.size_kib,
        cache_line_size: cache.line,
        kind: kind_bits(cache.kind),
        sibling_map,
    }
}

/// `fill_in_l1_pcache` for each block of units that share a cache; blocks without a working unit have none.
fn first_level(gpu: &Gpu, cache: &Cache, processor_id: u32, caches: &mut Vec<CacheProperties>) {
    let shader = &gpu.shader;
    let shared = cache.cus_shared.max(1);
    let mut id = processor_id;
    for _xcc in 0..shader.xccs {
        for mask in &shader.cu_bitmap {
            let mut block = 0;
            while block < shader.cus_per_array {
                let siblings = (mask >> block) & ((1 << shared) - 1);
                if siblings != 0 {
                    let first = siblings.trailing_zeros();
                    caches.push(properties(cache, id.saturating_add(first), vec![siblings >> first]));
                }
                id = id.saturating_add(shared.min(shader.cus_per_array - block));
                block = block.saturating_add(shared);
            }
        }
    }
}

/// `fill_in_l2_l3_pcache`: one cache for the GPU. The map's first word is the first array, and then every array
/// follows but the last: so the kernel's loop writes it.
fn whole_gpu(gpu: &Gpu, cache: &Cache, processor_id: u32) -> Option<CacheProperties> {
    let shader = &gpu.shader;
    let limit = (1 << cache.cus_shared) - 1;
    let first_array = shader.cu_bitmap.iter().find(|mask| **mask != 0)? & limit;
    if first_array == 0 {
        return None;
    }
    let first = first_array.trailing_zeros();
    let arrays = (0..shader.xccs).flat_map(|_| shader.cu_bitmap.iter().map(|mask| mask & limit));
    let words = core::iter::once(first_array >> first).chain(arrays);
    let length = shader.cu_bitmap.len().saturating_mul(usize::try_from(shader.xccs).unwrap_or(1));
    Some(properties(cache, processor_id.saturating_add(first), words.take(length).collect()))
}
