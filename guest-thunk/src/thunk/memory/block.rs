//! Memory that the library itself writes to: what a queue works with, and doorbells.
#![allow(unsafe_code, reason = "stores to memory that GPUs and the host look at")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus;
use virtio_kfd_protocol::{GuestVa, ResourceId};

use super::system::System;
use super::{Allocation, Backing, Host, Memory, Request, system};
use crate::client::Client;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::topology::Gpu;

/// Bytes of what is stored at once.
const WORD: u64 = size_of::<u32>() as u64;

/// An allocation of this library's own. Its addresses are valid for as long as this exists, whatever the application frees.
pub struct Block {
    allocation: Arc<Allocation>,
    size: u64,
}

impl Block {
    /// First address, of the CPU and of GPUs.
    pub fn start(&self) -> u64 {
        self.allocation.start()
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The blob that it is, if it is memory of the guest.
    pub fn resource(&self) -> Option<ResourceId> {
        let pieces = self.allocation.pieces()?;
        pieces.first().map(|piece| piece.resource)
    }

    /// Stores a word. Offsets are in bytes and multiples of 4; what does not lie in memory that the CPU can access is
    /// not stored.
    pub fn store(&self, offset: u64, value: u32) {
        let inside = offset.checked_add(WORD).is_some_and(|end| end <= self.size);
        if !inside || !offset.is_multiple_of(WORD) || !self.is_visible() {
            return;
        }
        let Ok(address) = usize::try_from(self.start().saturating_add(offset)) else { return };
        let word = std::ptr::with_exposed_provenance::<AtomicU32>(address);
        // SAFETY: the word lies in the guest memory of the allocation, which is mapped for reading and writing at its
        // start until the allocation goes, and self keeps that. The start is a page's and the offset a multiple of 4.
        // Whoever else looks at the memory is another process or a GPU, and the store is atomic.
        let word = unsafe { &*word };
        word.store(value, Ordering::Relaxed);
    }

    /// Stores a double word, low half first.
    pub fn store_long(&self, offset: u64, value: u64) {
        let bytes = value.to_le_bytes();
        self.store_bytes(offset, &bytes);
    }

    /// Stores whole words of bytes; what is beyond the last whole word is not stored.
    pub fn store_bytes(&self, offset: u64, bytes: &[u8]) {
        let (words, _) = bytes.as_chunks::<4>();
        let offsets = (offset..).step_by(size_of::<u32>());
        for (offset, word) in offsets.zip(words) {
            self.store(offset, u32::from_le_bytes(*word));
        }
    }

    /// Fills it with a byte.
    pub fn fill(&self, byte: u8) {
        let word = u32::from_le_bytes([byte; 4]);
        for offset in (0..self.size).step_by(size_of::<u32>()) {
            self.store(offset, word);
        }
    }

    /// Maps all of it once more, over what is mapped at an address that the caller has reserved for that.
    pub fn map_again(&self, address: u64) -> io::Result<()> {
        let no_blob = || io::Error::other("it is no blob");
        let Backing::System(System { blobs, .. }) = &self.allocation.backing else { return Err(no_blob()) };
        let [blob] = blobs.as_slice() else { return Err(no_blob()) };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        blob.map_fixed(GuestVa(address), self.size, protection).map_err(io::Error::other)
    }

    /// Whether the CPU has it mapped.
    fn is_visible(&self) -> bool {
        matches!(self.allocation.backing, Backing::System(_))
            && self.allocation.flags.is_set(HsaMemFlags::HOST_ACCESS)
    }
}

impl Memory {
    /// Memory of the guest that the CPU has mapped, in a GPU's name. `more` are flags beside `HostAccess`.
    pub fn guest_block(&self, host: Host<'_>, gpu: &Gpu, size: u64, more: HsaMemFlags) -> Outcome<Block> {
        let flags = more.with(HsaMemFlags::HOST_ACCESS, 1).with(HsaMemFlags::EXECUTE_ACCESS, 1);
        let request = Request { node: 0, size, alignment: 0, flags, address: 0 };
        let allocation =
            system::allocate(host, Some(gpu), request).map_err(|refusal| no_memory(host.client, refusal))?;
        let address = self.insert(allocation);
        self.block(address, size)
    }

    /// Memory of a GPU that the CPU cannot access.
    pub fn device_block(&self, host: Host<'_>, gpu: &Gpu, size: u64) -> Outcome<Block> {
        let flags = [HsaMemFlags::NON_PAGED, HsaMemFlags::COARSE_GRAIN, HsaMemFlags::EXECUTE_ACCESS];
        let flags = flags.into_iter().fold(HsaMemFlags(0), |flags, field| flags.with(field, 1));
        let request = Request { node: gpu.node, size, alignment: 0, flags, address: 0 };
        let address = self.allocate(host, request).map_err(|refusal| no_memory(host.client, refusal))?;
        self.block(address, size)
    }

    /// An allocation as a block.
    pub(super) fn block(&self, address: u64, size: u64) -> Outcome<Block> {
        let gone = || Refusal::error("memory of the library's own was freed by the application");
        let allocation = self.find(address).ok_or_else(gone)?;
        Ok(Block { allocation, size })
    }

    /// Maps a block to a GPU.
    pub fn map_block(&self, host: Host<'_>, gpu: &Gpu, block: &Block) -> Outcome<()> {
        self.map_to_nodes(host, block.start(), block.size(), &[gpu.node])
            .map(|_| ())
            .map_err(|refusal| no_memory(host.client, refusal))
    }

    /// Gives a block back. What the host does not free stays until the connection ends.
    pub fn free_block(&self, client: &Client, block: &Block) -> Outcome<()> {
        self.unmap(client, block.start())?;
        self.free(client, block.start())
    }
}

/// AMD's library does not say more where it lacks memory for a queue.
fn no_memory(client: &Client, refusal: Refusal) -> Refusal {
    match refusal.status {
        HsakmtStatus::ERROR | HsakmtStatus::OUT_OF_RESOURCES => refusal.as_no_memory(client),
        _ => refusal,
    }
}
