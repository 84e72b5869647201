//! Scratch memory: for each GPU a range of addresses, of which parts are given VRAM as the runtime maps them.

use std::collections::BTreeMap;
use std::sync::Mutex;

use hsakmt_abi::status::HsakmtStatus;
use virtio_kfd_protocol::calls::SetScratchBackingVa;
use virtio_kfd_protocol::{
    AllocMemoryRequest, GpuId, GuestVa, Handle, ResourceId, SetScratchBackingVaRequest,
};

use super::address::{Reservation, page_size};
use super::mapping::{SCRATCH_FLAGS, free_buffer, map_buffer};
use super::{ANYWHERE, Host};
use crate::client::Client;
use crate::thunk::lock::lock;
use crate::thunk::refusal::{Outcome, Refusal};

/// Alignment of scratch memory: KFD takes the address in units of 64 KiB.
const ALIGN: u64 = 64 << 10;

/// A GPU's scratch memory.
pub struct Scratch {
    reservation: Reservation,
    gpu: GpuId,
    /// The parts that have memory, by address.
    parts: Mutex<BTreeMap<u64, Handle>>,
}

impl Scratch {
    /// Reserves addresses and tells KFD.
    pub fn new(host: Host<'_>, gpu: GpuId, address: u64, size: u64) -> Outcome<Self> {
        let no_memory = |why: String| Refusal::new(HsakmtStatus::NO_MEMORY, why);
        let size =
            size.checked_next_multiple_of(ALIGN).ok_or_else(|| no_memory(format!("{size:#x} bytes")))?;
        let range = host.snapshot.svm.unwrap_or(ANYWHERE);
        let reserved = match address {
            0 => Reservation::new(size, ALIGN, 0, range),
            address => Reservation::at(address, size),
        };
        let reservation =
            reserved.map_err(|error| no_memory(format!("no {size:#x} bytes of addresses: {error}")))?;
        let request = SetScratchBackingVaRequest { va: GuestVa(reservation.start()), gpu_id: gpu, pad: 0 };
        host.client
            .call::<SetScratchBackingVa>(&request, &[], 0)
            .map_err(|error| Refusal::host(HsakmtStatus::NO_MEMORY, &error))?;
        Ok(Scratch { reservation, gpu, parts: Mutex::default() })
    }

    /// First address.
    pub fn start(&self) -> u64 {
        self.reservation.start()
    }

    /// Whether an address lies in it.
    pub fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.start()).is_some_and(|offset| offset < self.reservation.size())
    }

    /// Gives a part memory and maps it, in one frame.
    pub fn map(&self, client: &Client, address: u64, size: u64) -> Outcome<()> {
        let page = page_size();
        let offset = address.saturating_sub(self.start());
        let fits = offset.checked_add(size).is_some_and(|end| end <= self.reservation.size());
        if size == 0 || !fits || !address.is_multiple_of(page) || !size.is_multiple_of(page) {
            return Err(Refusal::parameter(format!(
                "{size:#x} bytes at {address:#x}: expected whole pages within {:#x} bytes of scratch memory at {:#x}",
                self.reservation.size(),
                self.start()
            )));
        }
        let mut parts = lock(&self.parts);
        if parts.contains_key(&address) {
            return Err(Refusal::handle(format!("the scratch memory at {address:#x} is mapped already")));
        }
        let request = AllocMemoryRequest {
            va: GuestVa(address),
            size,
            gpu_id: self.gpu,
            flags: SCRATCH_FLAGS.bits(),
            resource: ResourceId(0),
            pad: 0,
            resource_offset: 0,
        };
        let handle = map_buffer(client, &request, &[self.gpu], HsakmtStatus::INVALID_HANDLE)?;
        parts.insert(address, handle);
        Ok(())
    }

    /// Takes the memory of a part.
    pub fn unmap(&self, client: &Client, address: u64) -> Outcome<()> {
        let mut parts = lock(&self.parts);
        let handle = *parts.get(&address).ok_or_else(|| {
            Refusal::error(format!("no part of the scratch memory is mapped at {address:#x}"))
        })?;
        free_buffer(client, handle, &[self.gpu])?;
        parts.remove(&address);
        Ok(())
    }

    /// Takes the memory of all parts.
    pub fn release(&self, client: &Client) -> Outcome<()> {
        let addresses: Vec<u64> = lock(&self.parts).keys().copied().collect();
        addresses.into_iter().try_for_each(|address| self.unmap(client, address))
    }
}
