//! System memory: memory of the guest, which KFD is given as a user pointer when a GPU first maps it.

use std::sync::Mutex;

use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::GuestVa;

use super::{Allocation, Backing, Host, Place, Request, address_size, flags, reserve};
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::topology::Gpu;

/// Allocates memory that the CPU can access at once. Without any GPU it is private memory of the process.
pub(super) fn allocate(host: Host<'_>, gpu: Option<&Gpu>, request: Request) -> Outcome<Allocation> {
    // AMD's library answers HSAKMT_STATUS_ERROR to every failure here.
    let failed = |refusal: Refusal| Refusal { status: HsakmtStatus::ERROR, ..refusal };
    let reservation = reserve(host, address_size(request)?, request).map_err(failed)?;
    let Some(gpu) = gpu.or(host.snapshot.gpus.first()) else {
        let no_memory = |error| Refusal::error(format!("no {:#x} bytes of memory: {error}", request.size));
        reservation.fill_with_private_memory().map_err(no_memory)?;
        return Ok(Allocation {
            place: Place::Reserved(reservation),
            backing: Backing::Private,
            node: 0,
            flags: request.flags,
            state: Mutex::default(),
        });
    };
    let blob = host.client.guest_memory(request.size)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    blob.map_fixed(GuestVa(reservation.start()), request.size, protection)
        .map_err(|error| Refusal::error(error.to_string()))?;
    reservation.keep_from_children();
    let flags = flags::ioc(request.flags, host.settings) | AllocFlags::USERPTR;
    Ok(Allocation {
        place: Place::Reserved(reservation),
        backing: Backing::System { blob, gpu: gpu.gpu_id, flags },
        node: if request.flags.is_set(HsaMemFlags::GTT_ACCESS) { 0 } else { request.node },
        flags: request.flags,
        state: Mutex::default(),
    })
}
