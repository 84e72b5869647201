//! A buffer of the guest, as this worker knows it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kfd_abi::memory::AllocFlags;
use kfd_host::{GemHandle, GuestMapping, HdpPage, KfdHandle};
use virtio_kfd_protocol::{GpuId, ShareToken};

/// Where a buffer's memory lies.
#[derive(Debug)]
pub enum Backing {
    /// In VRAM.
    Vram {
        /// Whether a CPU can see it (`KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC`).
        public: bool,
        /// Where it lies in the render node's file, in bytes.
        mmap_offset: u64,
    },
    /// In system memory that the kernel allocated.
    Gtt {
        /// Where it lies in the render node's file, in bytes.
        mmap_offset: u64,
    },
    /// In guest memory.
    Guest {
        /// The addresses that KFD takes the pages from; unmapped when the buffer is gone.
        _mapping: GuestMapping,
        /// The blob.
        resource: u32,
        /// Where in the blob its memory begins, in bytes.
        offset: u64,
        /// The regions under it.
        regions: BTreeSet<u32>,
        /// Mappings that it consists of.
        runs: u32,
    },
    /// The GPU's doorbells of this process, for GPUs to ring. No memory.
    Doorbells,
    /// The GPU's page of HDP flush registers, for GPUs and for this process. No memory.
    Registers {
        /// The page.
        page: Arc<HdpPage>,
    },
    /// All of a buffer of another context.
    Imported {
        /// The blob that brought it.
        resource: u32,
    },
    /// A piece of a buffer of another context, at no address of its own: KFD does not know it.
    Piece {
        /// The blob that brought it.
        resource: u32,
        /// The whole buffer.
        dmabuf: Arc<OwnedFd>,
        /// Where the piece begins in the buffer, in bytes.
        offset: u64,
    },
}

/// A buffer.
#[derive(Debug)]
pub struct Buffer {
    /// KFD's handle; none for a [`Backing::Piece`].
    pub kfd: Option<KfdHandle>,
    /// The GPU that it was allocated on.
    pub gpu_id: GpuId,
    /// Its address, and the bytes of addresses from there on; none for a [`Backing::Piece`].
    pub addresses: Range<u64>,
    /// Bytes of memory. GPUs see an AQL ring twice in a row.
    pub size: u64,
    /// Its memory.
    pub backing: Backing,
    /// GPUs on which KFD maps it now.
    pub mapped: BTreeSet<u32>,
    /// The buffer on render nodes, by GPU, for its ranges.
    pub gems: BTreeMap<u32, GemHandle>,
    /// Its ranges: GPU and address, and bytes.
    pub ranges: BTreeMap<(u32, u64), u64>,
    /// The tokens that other contexts may have it by.
    pub shares: Vec<Share>,
    /// HOST3D blobs and tokens on its memory, which outlives the buffer while there are any.
    pub uses: u32,
}

/// A token, and what it opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The token.
    pub token: ShareToken,
    /// Offset in the buffer in bytes.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// The kinds of memory that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `KFD_IOC_ALLOC_MEM_FLAGS_VRAM`
    Vram,
    /// `KFD_IOC_ALLOC_MEM_FLAGS_GTT`
    Gtt,
    /// `KFD_IOC_ALLOC_MEM_FLAGS_USERPTR`
    Userptr,
    /// `KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL`: the doorbells of the process.
    Doorbells,
    /// `KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP`: the page of HDP flush registers.
    Registers,
}

/// How memory is used: the flags that may stand beside a kind.
const USE_FLAGS: AllocFlags = AllocFlags::WRITABLE
    .union(AllocFlags::EXECUTABLE)
    .union(AllocFlags::PUBLIC)
    .union(AllocFlags::NO_SUBSTITUTE)
    .union(AllocFlags::AQL_QUEUE_MEM)
    .union(AllocFlags::COHERENT)
    .union(AllocFlags::UNCACHED)
    .union(AllocFlags::EXT_COHERENT)
    .union(AllocFlags::CONTIGUOUS);

/// The kind of memory that the flags ask for; `None` if they ask for none, for several, or have bits that this host
/// does not know.
pub fn kind(flags: AllocFlags) -> Option<Kind> {
    if !AllocFlags::KINDS.union(USE_FLAGS).contains(flags) {
        return None;
    }
    let kind = flags.intersection(AllocFlags::KINDS);
    let is = |wanted: AllocFlags| kind == wanted;
    match () {
        () if is(AllocFlags::VRAM) => Some(Kind::Vram),
        () if is(AllocFlags::GTT) => Some(Kind::Gtt),
        () if is(AllocFlags::USERPTR) => Some(Kind::Userptr),
        () if is(AllocFlags::DOORBELL) => Some(Kind::Doorbells),
        () if is(AllocFlags::MMIO_REMAP) => Some(Kind::Registers),
        () => None,
    }
}

impl Buffer {
    /// A buffer that nothing was done with yet.
    pub fn new(kfd: Option<KfdHandle>, gpu_id: GpuId, size: u64, backing: Backing) -> Self {
        Buffer {
            kfd,
            gpu_id,
            addresses: 0..0,
            size,
            backing,
            mapped: BTreeSet::new(),
            gems: BTreeMap::new(),
            ranges: BTreeMap::new(),
            shares: Vec::new(),
            uses: 0,
        }
    }

    /// The same at an address.
    pub fn at(self, va: u64, bytes: u64) -> Self {
        Buffer { addresses: va..va.saturating_add(bytes), ..self }
    }

    /// Whether it may lie at an address of a GPU.
    pub fn covers(&self, gpu: GpuId, va: u64) -> bool {
        let in_range = |((id, start), size): (&(u32, u64), &u64)| {
            *id == gpu.0 && (*start..start.saturating_add(*size)).contains(&va)
        };
        self.addresses.contains(&va) || self.ranges.iter().any(in_range)
    }

    /// Whether its memory can be mapped into the guest.
    pub fn is_mappable(&self) -> bool {
        self.mmap_offset().is_some()
    }

    /// Where its memory lies in the render node's file in bytes, if a CPU can see it.
    pub fn mmap_offset(&self) -> Option<u64> {
        match self.backing {
            Backing::Gtt { mmap_offset } | Backing::Vram { public: true, mmap_offset } => Some(mmap_offset),
            _ => None,
        }
    }

    /// The blob that it lies on or was brought by.
    pub fn resource(&self) -> Option<u32> {
        match &self.backing {
            Backing::Guest { resource, .. }
            | Backing::Imported { resource }
            | Backing::Piece { resource, .. } => Some(*resource),
            Backing::Vram { .. } | Backing::Gtt { .. } | Backing::Doorbells | Backing::Registers { .. } => {
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flags that Debian's runtimes pass (traced natively): fine-grained GTT, VRAM, user pointers, the HDP flush page,
    /// doorbells.
    #[test]
    fn flags_of_real_programs() {
        let kind = |bits| super::kind(AllocFlags::from_bits_retain(bits));
        assert_eq!(kind(0xd600_0002), Some(Kind::Gtt));
        assert_eq!(kind(0xf000_0001), Some(Kind::Vram));
        assert_eq!(kind(0xd600_0004), Some(Kind::Userptr));
        assert_eq!(kind(0x9400_0010), Some(Kind::Registers));
        assert_eq!(kind(0x9400_0008), Some(Kind::Doorbells));
    }

    #[test]
    fn none_several_and_unknown_are_refused() {
        for bits in [0, 0x8000_0000, 3, 5, 6, 0x18, 1 | 1 << 5, 1 | 1 << 22] {
            assert_eq!(kind(AllocFlags::from_bits_retain(bits)), None, "{bits:#x}");
        }
    }
}
