//! Memory for other processes: as a dma-buf, or by a token in a handle of bytes.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use hsakmt_abi::memory::HsaSharedMemoryHandle;
use hsakmt_abi::status::HsakmtStatus;
use virtio_kfd_protocol::{Features, GpuId, ShareToken};

use super::address::page_size;
use super::buffer::{Buffer, Part};
use super::import::{Imported, Source};
use super::{Allocation, Backing, Host, Memory};
use crate::client::Client;
use crate::thunk::lock::{lock, read};
use crate::thunk::refusal::{Outcome, Refusal};
use crate::transport::Blob;

/// What a blob shows of a buffer of this process.
pub(super) struct Exported {
    buffer: Weak<Buffer>,
    offset: u64,
    size: u64,
}

/// In the words of a handle that AMD's library leaves to the kernel: that it is one of these, and whole.
fn mark(words: [u32; 8]) -> u32 {
    let [low, high, flags, _, aperture, index, pages, gpu] = words;
    // FNV-1a. Not a secret: that is the token.
    let mix = |hash: u32, word: u32| (hash ^ word).wrapping_mul(0x0100_0193);
    [low, high, flags, aperture, index, pages, gpu].into_iter().fold(u32::from_le_bytes(*b"vKFD"), mix)
}

/// `HSA_APERTURE_DGPU`: where AMD's library would put it.
const APERTURE_DGPU: u32 = 1;

/// A handle of shared memory, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SharedHandle {
    pub(super) token: ShareToken,
    /// `HsaMemFlags` of the memory.
    pub(super) flags: u32,
    pub(super) pages: u32,
    pub(super) gpu: GpuId,
}

impl SharedHandle {
    /// The bytes. Size and GPU stand where AMD's library has them, since ROCr puts the offset of a fragment to the size.
    fn words(self) -> HsaSharedMemoryHandle {
        let low = u32::try_from(self.token.0 & u64::from(u32::MAX)).unwrap_or(0);
        let high = u32::try_from(self.token.0 >> 32).unwrap_or(0);
        let words = [low, high, self.flags, 0, APERTURE_DGPU, 0, self.pages, self.gpu.0];
        let [.., aperture, index, pages, gpu] = words;
        let words = [low, high, self.flags, mark(words), aperture, index, pages, gpu];
        HsaSharedMemoryHandle { words }
    }

    /// Reads the bytes. None for what is no handle of this library.
    pub(super) fn read(handle: HsaSharedMemoryHandle) -> Option<Self> {
        let words = handle.words;
        let [low, high, flags, found, _, _, pages, gpu] = words;
        let token = ShareToken::from_blob_id(u64::from(high) << 32 | u64::from(low))?;
        let handle = SharedHandle { token, flags, pages, gpu: GpuId(gpu) };
        (found == mark(words) && pages > 0).then_some(handle)
    }
}

impl Memory {
    /// `hsaKmtExportDMABufHandle`: a dma-buf of the allocation that a range lies in, and where in it the range begins.
    pub fn export(&self, client: &Client, address: u64, size: u64) -> Outcome<(OwnedFd, u64)> {
        let unknown = || Refusal::parameter(format!("{size:#x} bytes at {address:#x} are in no allocation"));
        let (allocation, offset) = self.allocated_range(address, size).ok_or_else(unknown)?;
        let blob = self.blob_of(client, &allocation)?;
        let dma_buf = blob.export().map_err(|error| Refusal::error(error.to_string()))?;
        Ok((dma_buf, offset))
    }

    /// The allocation that GPUs see a range in.
    fn allocated_range(&self, address: u64, size: u64) -> Option<(Arc<Allocation>, u64)> {
        let allocations = read(&self.allocations);
        let (start, allocation) = allocations.range(..=address).next_back()?;
        let offset = address.checked_sub(*start)?;
        let fits = offset < allocation.size() && offset.checked_add(size)? <= allocation.size();
        fits.then(|| (Arc::clone(allocation), offset))
    }

    /// The blob that shows an allocation.
    fn blob_of(&self, client: &Client, allocation: &Allocation) -> Outcome<Arc<dyn Blob>> {
        let state = lock(&allocation.state);
        if state.freed {
            return Err(Refusal::parameter("the allocation is being freed"));
        }
        match &allocation.backing {
            Backing::Vram(part) | Backing::Piece(part) | Backing::Unplaced(part) => {
                self.part_blob(client, part)
            }
            Backing::Imported(Imported { source, .. }) => match source {
                Source::Guest { blob, .. } | Source::Host { blob, .. } => Ok(Arc::clone(blob)),
                Source::Own(part) => self.part_blob(client, part),
            },
            Backing::System(system) if system.pinned => match system.blobs.as_slice() {
                [blob] => Ok(Arc::clone(blob)),
                more => Err(Refusal::error(format!("the memory is in {} pieces", more.len()))),
            },
            // amdgpu_gem_prime_export: EPERM.
            Backing::System(_) | Backing::Registered(_) | Backing::Private => {
                Err(Refusal::error("pageable memory has no dma-buf"))
            }
            Backing::Nothing => Err(Refusal::error("the allocation is addresses without memory")),
        }
    }

    /// The blob that shows a part of a buffer of this process, and by which [`Memory::open_dma_buf`] knows it again.
    pub fn part_blob(&self, client: &Client, part: &Part) -> Outcome<Arc<dyn Blob>> {
        if !client.features().contains(Features::HOST_BLOBS) {
            let why = "a dma-buf of VRAM (the host has no window)";
            return Err(Refusal::new(HsakmtStatus::NOT_SUPPORTED, why));
        }
        let blob = part.blob(client)?;
        let Part { buffer, offset, size, .. } = part;
        let exported = Exported { buffer: Arc::downgrade(buffer), offset: *offset, size: *size };
        let mut all = lock(&self.exported);
        all.retain(|_, other| other.buffer.strong_count() > 0);
        all.insert(blob.resource().0, exported);
        Ok(blob)
    }

    /// This process's own memory behind a blob, held once more; none if it is another's.
    pub(super) fn own_part(&self, blob: &dyn Blob) -> Option<Part> {
        let all = lock(&self.exported);
        let Exported { buffer, offset, size } = all.get(&blob.resource().0)?;
        Part::again(&buffer.upgrade()?, *offset, *size)
    }

    /// `hsaKmtShareMemory`: a handle of an allocation, named by its first address, for other processes of this guest. Who
    /// has the bytes may have the memory, for as long as it is not freed.
    pub fn share(&self, host: Host<'_>, address: u64, size: u64) -> Outcome<HsaSharedMemoryHandle> {
        let pages = size.checked_div(page_size()).and_then(|pages| u32::try_from(pages).ok());
        let pages = pages.ok_or_else(|| Refusal::parameter(format!("SizeInBytes is {size:#x}")))?;
        let allocation = read(&self.allocations).get(&address).cloned();
        let unknown = || Refusal::parameter(format!("{address:#x} is not the start of an allocation"));
        let allocation = allocation.ok_or_else(unknown)?;
        let state = lock(&allocation.state);
        if state.freed {
            return Err(unknown());
        }
        let part = match &allocation.backing {
            Backing::Vram(part) | Backing::Piece(part) | Backing::Unplaced(part) => part,
            Backing::Imported(Imported { source: Source::Own(part), .. }) => part,
            Backing::Nothing => return Err(Refusal::error("the allocation is addresses without memory")),
            _ => {
                let why =
                    "a handle of system memory or of another process's memory; a dma-buf can be passed on";
                return Err(Refusal::new(HsakmtStatus::NOT_SUPPORTED, why));
            }
        };
        if u64::from(pages).saturating_mul(page_size()) > part.size || pages == 0 {
            return Err(Refusal::error(format!("{size:#x} bytes of an allocation of {:#x}", part.size)));
        }
        let token = part.share(host.client)?;
        let flags = allocation.flags.0;
        Ok(SharedHandle { token, flags, pages, gpu: part.buffer.gpu }.words())
    }

    /// Whether a token is one that this process gave out.
    pub(super) fn is_own_token(&self, token: ShareToken) -> bool {
        let of = |allocation: &Arc<Allocation>| match &allocation.backing {
            Backing::Vram(part)
            | Backing::Piece(part)
            | Backing::Unplaced(part)
            | Backing::Imported(Imported { source: Source::Own(part), .. }) => part.token() == Some(token),
            _ => false,
        };
        read(&self.allocations).values().any(of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_read_as_it_was_written_and_nothing_else_is_one() {
        let token = ShareToken(ShareToken::BIT | 0x1234_5678_9abc_def0);
        let handle = SharedHandle { token, flags: 0x41, pages: 1024, gpu: GpuId(77) };
        let words = handle.words();
        assert_eq!(SharedHandle::read(words), Some(handle));
        for place in 0..8 {
            let mut other = words;
            other.words[place] ^= 0x10000;
            assert_eq!(SharedHandle::read(other), None, "word {place}");
        }
        assert_eq!(SharedHandle::read(HsaSharedMemoryHandle::default()), None);
    }
}
