//! Memory of a GPU, and addresses without memory.

use std::sync::Mutex;

use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus;
use virtio_kfd_protocol::calls::AllocMemory;
use virtio_kfd_protocol::{AllocMemoryRequest, GuestVa, ResourceId};

use super::{Allocation, Backing, Host, Place, Request, State, address_size, flags, reserve};
use crate::client::ClientError;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::topology::Gpu;

/// Allocates memory of a GPU at once, so that its lack is seen at once; or addresses alone.
pub(super) fn allocate(host: Host<'_>, gpu: &Gpu, request: Request) -> Outcome<Allocation> {
    let set = |flag| request.flags.is_set(flag);
    if set(HsaMemFlags::ONLY_ADDRESS) && set(HsaMemFlags::NO_ADDRESS) {
        return Err(Refusal::parameter("MemFlags has both OnlyAddress and NoAddress"));
    }
    let missing = |what| Refusal::new(HsakmtStatus::NOT_IMPLEMENTED, what);
    if set(HsaMemFlags::NO_ADDRESS) {
        return Err(missing("VRAM without an address"));
    }
    if set(HsaMemFlags::HOST_ACCESS) && !set(HsaMemFlags::ONLY_ADDRESS) {
        return Err(missing("VRAM that the CPU can access"));
    }
    let reservation = reserve(host, address_size(request)?, request)?;
    let (va, size) = (GuestVa(reservation.start()), reservation.size());
    let allocation = |backing, handle| Allocation {
        place: Place::Reserved(reservation),
        backing,
        node: request.node,
        flags: request.flags,
        state: Mutex::new(State { handle, ..State::default() }),
    };
    if set(HsaMemFlags::ONLY_ADDRESS) {
        return Ok(allocation(Backing::Nothing, None));
    }
    let buffer = AllocMemoryRequest {
        va,
        size,
        gpu_id: gpu.gpu_id,
        flags: flags::vram(request.flags, host.settings).bits(),
        resource: ResourceId(0),
        pad: 0,
        resource_offset: 0,
    };
    let made = host.client.call::<AllocMemory>(&buffer, &[], 0);
    let (answer, _) = made.map_err(|error: ClientError| Refusal::host(HsakmtStatus::NO_MEMORY, &error))?;
    Ok(allocation(Backing::Vram, Some(answer.handle)))
}
