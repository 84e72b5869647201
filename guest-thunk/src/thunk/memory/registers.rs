//! A GPU's page of HDP flush registers: the real one for GPUs, and for the CPU a page of zeros that it can only read.

use hsakmt_abi::memory::HsaMemFlags;
use kfd_abi::memory::{AllocFlags, MMIO_REMAP_SIZE};
use virtio_kfd_protocol::calls::AllocMemory;
use virtio_kfd_protocol::{AllocMemoryRequest, GuestVa, Handle};

use super::address::{Reservation, page_size};
use super::block::Block;
use super::buffer::{Buffer, Part};
use super::{ANYWHERE, Allocation, Backing, Host, Memory, Place, Request};
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::topology::Gpu;

/// How AMD's library makes it (`map_mmio` of fmm.c).
const FLAGS: AllocFlags = AllocFlags::MMIO_REMAP
    .union(AllocFlags::WRITABLE)
    .union(AllocFlags::COHERENT)
    .union(AllocFlags::NO_SUBSTITUTE);

impl Memory {
    /// The page, mapped to all GPUs.
    pub fn registers_block(&self, host: Host<'_>, gpu: &Gpu) -> Outcome<(Block, Handle)> {
        let range = host.snapshot.svm.unwrap_or(ANYWHERE);
        let refused = |error: std::io::Error| Refusal::error(error.to_string());
        let reservation = Reservation::new(MMIO_REMAP_SIZE, page_size(), 0, range).map_err(refused)?;
        reservation.fill_with_zeros_to_read().map_err(refused)?;
        // The real page is not there in a child either (VM_DONTCOPY).
        reservation.keep_from_children();
        let request = AllocMemoryRequest {
            va: GuestVa(reservation.start()),
            size: MMIO_REMAP_SIZE,
            gpu_id: gpu.gpu_id,
            flags: FLAGS.bits(),
            ..Default::default()
        };
        let handle = host.client.call::<AllocMemory>(&request, &[], 0)?.0.handle;
        let part = Part::whole(Buffer::new(handle, MMIO_REMAP_SIZE, gpu.gpu_id, false, false));
        let flags = HsaMemFlags(0).with(HsaMemFlags::NON_PAGED, 1).with(HsaMemFlags::HOST_ACCESS, 1);
        let request = Request { node: gpu.node, size: MMIO_REMAP_SIZE, alignment: 0, flags, address: 0 };
        let allocation = Allocation::new(Place::Reserved(reservation), Backing::Vram(part), request);
        let block = self.block(self.insert(allocation), MMIO_REMAP_SIZE)?;
        // AMD's library maps it to all GPUs, and has none where KFD refuses one of them (GPUs that are no peers on the bus).
        let nodes: Vec<u32> = host.snapshot.gpus.iter().map(|gpu| gpu.node).collect();
        match self.map_to_nodes(host, block.start(), block.size(), &nodes) {
            Ok(_) => Ok((block, handle)),
            Err(refusal) => {
                self.free_block(host.client, &block)?;
                Err(refusal)
            }
        }
    }
}
