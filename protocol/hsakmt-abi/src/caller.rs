//! Structs whose size changed between releases. The functions that fill them take no size, so a library must know which
//! headers its caller was compiled with, and never write more.
//!
//! | layout | node | link | cache | queue | headers |
//! |---|---|---|---|---|---|
//! | [`N356`](CallerLayout::N356) | 356 | 48 | 1056 | 68 | ROCm 5.x to 6.2.4 (Debian 12 and 13) |
//! | [`N360`](CallerLayout::N360) | 360 | 52 | 1056 | 68 | ROCR-Runtime c7785a6d, 2024-10 |
//! | [`N368`](CallerLayout::N368) | 368 | 52 | 1056 | 68 | ROCm 7.0; rocm-systems 1b1610fc, 2025-08 |
//! | [`N376`](CallerLayout::N376) | 376 | 52 | 1056 | 68 | ROCm 7.2: what libhsa-runtime64 7.2.4 of Debian writes |
//! | [`N392`](CallerLayout::N392) | 392 | 52 | 1056 | 68 | 2026, before `FabricHandleSupported` |
//! | [`N396`](CallerLayout::N396) | 396 | 52 | 1056 | 68 | rocm-systems e3b50290, 2026 |
//! | [`N396Persisting`](CallerLayout::N396Persisting) | 396 | 52 | 1060 | 76 | rocm-systems 24bf20d3, 2026 |
//!
//! Fields came in the middle too, so the smaller struct is not the beginning of the larger. Between the last two there were headers
//! with 1056 and 76 bytes; who was compiled with them takes [`N396`](CallerLayout::N396), and `SaveAreaAllocSize` stays what it was.
//! Fields that only Windows fills are not listed: the end of `HsaQueueResource` (`SdmaProgressFenceVA`) and of
//! `HsaGraphicsResourceInfo` (`SizeHintInBytes`, which the caller fills) is never written.

use zerocopy::IntoBytes;

use crate::queue::HsaQueueInfo;
use crate::topology::{HsaCacheProperties, HsaEngineId, HsaIoLinkProperties, HsaNodeProperties356};

/// Which headers a caller was compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum CallerLayout {
    /// ROCm 5.x to 6.2.4.
    N356 = 0,
    /// 2024-10: `OverrideEngineId`, and `RecSdmaEngIdMask` of links.
    N360 = 1,
    /// ROCm 7.0: `NumNeuralCores`, `Capability2`.
    N368 = 2,
    /// ROCm 7.2: `CwsrSize`, `CtlStackSize`.
    N376 = 3,
    /// 2026: `LuidLowPart`, `LuidHighPart`, `WallClockKHz`.
    N392 = 4,
    /// 2026: `FabricHandleSupported`.
    N396 = 5,
    /// 2026: `PersistingCacheSizeMax` of caches, `SaveAreaAllocSize` of queues.
    N396Persisting = 6,
}

/// What layouts after [`CallerLayout::N356`] have besides its fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeExtras {
    /// `EngineId` with the GPU's own version. In the layout before it is that of `HSA_OVERRIDE_GFX_VERSION`.
    pub engine_id: HsaEngineId,
    /// `OverrideEngineId`: the version of `HSA_OVERRIDE_GFX_VERSION`, 0 without.
    pub override_engine_id: HsaEngineId,
    /// `Capability2`
    pub capability2: u32,
    /// `CwsrSize`: bytes of a queue's save area.
    pub cwsr_size: u32,
    /// `CtlStackSize`: bytes of its control stack.
    pub ctl_stack_size: u32,
    /// `WallClockKHz`
    pub wall_clock_khz: u64,
}

/// A link, with what layouts after [`CallerLayout::N356`] have besides its fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeLink {
    /// The fields of all layouts.
    pub properties: HsaIoLinkProperties,
    /// `RecSdmaEngIdMask`: a bit for each SDMA engine that is best for copies over the link, 0 for no advice.
    pub recommended_engines: u32,
}

impl CallerLayout {
    /// All of them, the oldest first.
    pub const ALL: [CallerLayout; 7] =
        [Self::N356, Self::N360, Self::N368, Self::N376, Self::N392, Self::N396, Self::N396Persisting];

    /// Bytes of `HsaNodeProperties`.
    pub const fn node_size(self) -> usize {
        match self {
            Self::N356 => size_of::<HsaNodeProperties356>(),
            Self::N360 => 360,
            Self::N368 => 368,
            Self::N376 => 376,
            Self::N392 => 392,
            Self::N396 | Self::N396Persisting => 396,
        }
    }

    /// Bytes of `HsaIoLinkProperties`.
    pub const fn link_size(self) -> usize {
        match self {
            Self::N356 => size_of::<HsaIoLinkProperties>(),
            _ => 52,
        }
    }

    /// Bytes of `HsaCacheProperties`.
    pub const fn cache_size(self) -> usize {
        match self {
            Self::N396Persisting => 1060,
            _ => size_of::<HsaCacheProperties>(),
        }
    }

    /// Bytes of `HsaQueueInfo`.
    pub const fn queue_info_size(self) -> usize {
        match self {
            Self::N396Persisting => 76,
            _ => size_of::<HsaQueueInfo>(),
        }
    }

    /// Whether the caller says what it executes: memory without `ExecuteAccess` is not executable for GPUs then. In ROCm 6.2's library
    /// all memory is; in that of August 2025 it is as the flag says (`fmm_translate_hsa_to_ioc_flags`, fmm.c).
    pub fn says_what_it_executes(self) -> bool {
        self >= Self::N368
    }

    /// The layout with structs of these sizes, if there is one.
    pub fn of_sizes(node: usize, cache: usize) -> Option<CallerLayout> {
        Self::ALL.into_iter().find(|layout| (layout.node_size(), layout.cache_size()) == (node, cache))
    }

    /// A node's properties as bytes of this layout.
    pub fn node(self, node: &HsaNodeProperties356, extras: &NodeExtras) -> Vec<u8> {
        let mut own = *node;
        if self >= Self::N360 {
            own.engine_id = extras.engine_id;
        }
        let bytes = own.as_bytes();
        let mut out = Vec::with_capacity(self.node_size());
        // The fields of the oldest layout up to here, then what came in.
        let mut from = 0;
        let mut up_to = |out: &mut Vec<u8>, end: usize| {
            out.extend_from_slice(bytes.get(from..end).unwrap_or_default());
            from = end;
        };
        if self >= Self::N368 {
            up_to(&mut out, core::mem::offset_of!(HsaNodeProperties356, num_memory_banks));
            // NumNeuralCores: no GPU of KFD has any.
            out.extend_from_slice(&0u32.to_ne_bytes());
            up_to(&mut out, core::mem::offset_of!(HsaNodeProperties356, max_waves_per_simd));
            out.extend_from_slice(&extras.capability2.to_ne_bytes());
        }
        if self >= Self::N360 {
            up_to(&mut out, core::mem::offset_of!(HsaNodeProperties356, vendor_id));
            out.extend_from_slice(extras.override_engine_id.as_bytes());
        }
        up_to(&mut out, bytes.len());
        if self >= Self::N376 {
            out.extend_from_slice(&extras.cwsr_size.to_ne_bytes());
            out.extend_from_slice(&extras.ctl_stack_size.to_ne_bytes());
        }
        if self >= Self::N392 {
            // LuidLowPart, LuidHighPart: Windows.
            out.extend_from_slice(&0u64.to_ne_bytes());
            out.extend_from_slice(&extras.wall_clock_khz.to_ne_bytes());
        }
        // FabricHandleSupported is 0.
        out.resize(self.node_size(), 0);
        out
    }

    /// Links one after the other as bytes of this layout.
    pub fn links(self, links: &[NodeLink]) -> Vec<u8> {
        let place = core::mem::offset_of!(HsaIoLinkProperties, flags);
        self.each(links, |link| {
            let added = link.recommended_engines.to_ne_bytes();
            insert(link.properties.as_bytes(), place, self.link_size(), &added)
        })
    }

    /// Caches one after the other as bytes of this layout.
    pub fn caches(self, caches: &[HsaCacheProperties]) -> Vec<u8> {
        // PersistingCacheSizeMax 0: none can be set aside.
        self.each(caches, |cache| {
            insert(cache.as_bytes(), size_of::<HsaCacheProperties>(), self.cache_size(), &[0; 4])
        })
    }

    /// What is known of a queue as bytes of this layout. `save_area` are the bytes of one die's save area (`SaveAreaAllocSize`).
    pub fn queue_info(self, info: &HsaQueueInfo, save_area: u64) -> Vec<u8> {
        let end = size_of::<HsaQueueInfo>();
        insert(info.as_bytes(), end, self.queue_info_size(), &save_area.to_ne_bytes())
    }

    fn each<T>(self, all: &[T], bytes: impl Fn(&T) -> Vec<u8>) -> Vec<u8> {
        all.iter().flat_map(bytes).collect()
    }
}

/// The bytes with as many of `added` at a place as make them `size`.
fn insert(bytes: &[u8], place: usize, size: usize, added: &[u8]) -> Vec<u8> {
    let (before, after) = bytes.split_at_checked(place).unwrap_or((bytes, &[]));
    let room = size.saturating_sub(bytes.len());
    let mut out = before.to_vec();
    out.extend(added.iter().copied().chain(core::iter::repeat(0)).take(room));
    out.extend_from_slice(after);
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

    use super::*;
    use crate::topology::{HsaCapability, HsaLinkProperty};

    /// `sizeof` of the three structs, and `offsetof` of NumFComputeCores, NumMemoryBanks, Capability, MaxWavesPerSIMD, EngineId,
    /// VendorId, LocalMemSize, KFDGpuID, FamilyID and a link's Flags, as gcc gives them for the headers named in the module's
    /// table. Those of ROCm 7.2 are also what its library stores to: family_id at 0x16c, cwsr_size at 0x170, ctl_stack_size at
    /// 0x174 (disassembled).
    const C: [(CallerLayout, [usize; 3], [usize; 10]); 7] = [
        (CallerLayout::N356, [356, 48, 1056], [4, 8, 28, 32, 68, 72, 80, 348, 352, 44]),
        (CallerLayout::N360, [360, 52, 1056], [4, 8, 28, 32, 68, 76, 84, 352, 356, 48]),
        (CallerLayout::N368, [368, 52, 1056], [4, 12, 32, 40, 76, 84, 92, 360, 364, 48]),
        (CallerLayout::N376, [376, 52, 1056], [4, 12, 32, 40, 76, 84, 92, 360, 364, 48]),
        (CallerLayout::N392, [392, 52, 1056], [4, 12, 32, 40, 76, 84, 92, 360, 364, 48]),
        (CallerLayout::N396, [396, 52, 1056], [4, 12, 32, 40, 76, 84, 92, 360, 364, 48]),
        (CallerLayout::N396Persisting, [396, 52, 1060], [4, 12, 32, 40, 76, 84, 92, 360, 364, 48]),
    ];

    fn word(bytes: &[u8], place: usize) -> u32 {
        u32::from_ne_bytes(bytes[place..place + 4].try_into().unwrap())
    }

    #[test]
    fn fields_are_where_c_has_them() {
        let node = HsaNodeProperties356 {
            num_f_compute_cores: 1,
            num_memory_banks: 2,
            capability: HsaCapability(3),
            max_waves_per_simd: 4,
            engine_id: HsaEngineId(5),
            vendor_id: 6,
            local_mem_size: 7,
            kfd_gpu_id: 8,
            family_id: 9,
            ..Default::default()
        };
        let extras = NodeExtras {
            engine_id: HsaEngineId(5),
            override_engine_id: HsaEngineId(11),
            capability2: 12,
            cwsr_size: 13,
            ctl_stack_size: 14,
            wall_clock_khz: 15,
        };
        let properties =
            HsaIoLinkProperties { node_from: 1, flags: HsaLinkProperty(10), ..Default::default() };
        let link = NodeLink { properties, recommended_engines: 17 };
        let cache = HsaCacheProperties { processor_id_low: 16, ..Default::default() };
        for (layout, sizes, offsets) in C {
            let bytes = layout.node(&node, &extras);
            let links = layout.links(&[link, link]);
            let caches = layout.caches(&[cache, cache]);
            assert_eq!([bytes.len(), links.len() / 2, caches.len() / 2], sizes, "{layout:?}");
            assert_eq!([layout.node_size(), layout.link_size(), layout.cache_size()], sizes, "{layout:?}");
            assert_eq!(CallerLayout::of_sizes(sizes[0], sizes[2]), Some(layout));
            for (value, offset) in (1..).zip(&offsets[..9]) {
                assert_eq!(word(&bytes, *offset) & 0xffff, value, "{layout:?} at {offset}");
            }
            let [.., flags] = offsets;
            assert_eq!([word(&links, flags), word(&links, sizes[1] + flags)], [10, 10], "{layout:?}");
            // RecSdmaEngIdMask stands before Flags.
            let engines = word(&links, sizes[1] + flags - 4);
            assert_eq!(engines, if layout == CallerLayout::N356 { 0 } else { 17 }, "{layout:?}");
            assert_eq!([word(&caches, 0), word(&caches, sizes[2])], [16, 16], "{layout:?}");
        }
        // OverrideEngineId follows EngineId, Capability2 follows Capability, the rest is at the end.
        assert_eq!(word(&CallerLayout::N360.node(&node, &extras), 72), 11);
        let newest = CallerLayout::N396.node(&node, &extras);
        let at = |place| word(&newest, place);
        assert_eq!(
            [at(8), at(36), at(80), at(368), at(372), at(376), at(384), at(392)],
            [0, 12, 11, 13, 14, 0, 15, 0]
        );
    }

    #[test]
    fn the_newest_queue_has_the_size_of_its_save_area_at_the_end() {
        // offsetof(HsaQueueInfo, SaveAreaHeader) and of SaveAreaAllocSize: 52 and 68.
        let info = HsaQueueInfo { save_area_header: 0x51, ..Default::default() };
        for layout in CallerLayout::ALL {
            let bytes = layout.queue_info(&info, 0x71);
            assert_eq!((bytes.len(), word(&bytes, 52)), (layout.queue_info_size(), 0x51), "{layout:?}");
        }
        assert_eq!(CallerLayout::N396.queue_info(&info, 0x71).len(), 68);
        let newest = CallerLayout::N396Persisting.queue_info(&info, 0x71);
        assert_eq!((newest.len(), word(&newest, 68), word(&newest, 72)), (76, 0x71, 0));
    }

    #[test]
    fn an_override_is_the_engine_of_the_oldest_layout_only() {
        let node = HsaNodeProperties356 { engine_id: HsaEngineId(11), ..Default::default() };
        let extras = NodeExtras {
            engine_id: HsaEngineId(5),
            override_engine_id: HsaEngineId(11),
            ..Default::default()
        };
        assert_eq!(word(&CallerLayout::N356.node(&node, &extras), 68), 11);
        let later = CallerLayout::N360.node(&node, &extras);
        assert_eq!([word(&later, 68), word(&later, 72)], [5, 11]);
    }
}
