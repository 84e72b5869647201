//! Memory of a GPU, and addresses without memory.

use std::sync::Arc;

use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::memory::AllocFlags;
use kfd_abi::version::minor;
use virtio_kfd_protocol::calls::AllocMemory;
use virtio_kfd_protocol::{AllocMemoryRequest, Features, GpuId, GuestVa, ResourceId};

use super::buffer::{Buffer, Part};
use super::{Allocation, Backing, Host, Memory, Place, Request, address_size, arena, flags, reserve};
use crate::client::ClientError;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::topology::Gpu;

/// Asks KFD for VRAM of `size` bytes, shown to GPUs as `addresses` bytes at an address, or nowhere yet where that is 0.
pub(super) fn make_buffer(
    host: Host<'_>,
    gpu: GpuId,
    flags: AllocFlags,
    va: GuestVa,
    addresses: u64,
    size: u64,
) -> Outcome<Arc<Buffer>> {
    let public = flags.contains(AllocFlags::PUBLIC);
    make(host, gpu, flags, (va, addresses, size), public)
}

/// The same, where the flags may say more than what was asked for.
fn make(
    host: Host<'_>,
    gpu: GpuId,
    flags: AllocFlags,
    (va, addresses, size): (GuestVa, u64, u64),
    public: bool,
) -> Outcome<Arc<Buffer>> {
    let request = AllocMemoryRequest {
        va,
        size: addresses,
        gpu_id: gpu,
        flags: flags.bits(),
        resource: ResourceId(0),
        pad: 0,
        resource_offset: 0,
    };
    let (answer, _) = host.client.call::<AllocMemory>(&request, &[], 0).map_err(|error| no_memory(&error))?;
    let visible = answer.mappable != 0;
    let buffer = Buffer::new(answer.handle, size, gpu, visible, public);
    if !visible && flags.contains(AllocFlags::PUBLIC) && host.client.features().contains(Features::HOST_BLOBS)
    {
        buffer.release(host.client)?;
        let why = "the host cannot show that VRAM to the CPU";
        return Err(Refusal::new(HsakmtStatus::NO_MEMORY, why));
    }
    Ok(buffer)
}

/// A limit that the operator has set is like the end of the memory.
pub(super) fn no_memory(error: &ClientError) -> Refusal {
    let refusal = Refusal::host(HsakmtStatus::NO_MEMORY, error);
    match refusal.status {
        HsakmtStatus::OUT_OF_RESOURCES => Refusal { status: HsakmtStatus::NO_MEMORY, ..refusal },
        _ => refusal,
    }
}

impl Memory {
    /// Allocates memory of a GPU at once, so that its lack is seen at once; or addresses alone.
    pub(super) fn allocate_vram(&self, host: Host<'_>, gpu: &Gpu, request: Request) -> Outcome<Allocation> {
        let set = |flag| request.flags.is_set(flag);
        if set(HsaMemFlags::ONLY_ADDRESS) && set(HsaMemFlags::NO_ADDRESS) {
            return Err(Refusal::parameter("MemFlags has both OnlyAddress and NoAddress"));
        }
        if set(HsaMemFlags::ONLY_ADDRESS) {
            let place = Place::Reserved(reserve(host, address_size(request)?, request)?);
            return Ok(Allocation::new(place, Backing::Nothing, request));
        }
        let kfd = flags::vram(request.flags, host.settings);
        let visible = set(HsaMemFlags::HOST_ACCESS);
        if visible && !host.client.features().contains(Features::HOST_BLOBS) {
            // As KFD answers where VRAM is not all visible to the CPU.
            let why = "the CPU of this guest cannot access VRAM (the host has no window for it)";
            return Err(Refusal::new(HsakmtStatus::NO_MEMORY, why));
        }
        self.with_room(host, |memory| match () {
            () if set(HsaMemFlags::NO_ADDRESS) => memory.unplaced(host, gpu, kfd, request),
            () if visible && is_small(host, request) => {
                let Request { size, alignment, .. } = request;
                // What a GPU may do with a piece is said when it is mapped, so executable ones need no arena of their own.
                let shared = kfd | AllocFlags::EXECUTABLE;
                let (place, part) = memory.arenas.allocate(host, gpu.gpu_id, shared, size, alignment)?;
                Ok(Allocation::new(Place::Arena(place), Backing::Piece(part), request))
            }
            () => dedicated(host, gpu, kfd, visible, request),
        })
    }

    /// Tries again where what lies idle in arenas was in the way.
    fn with_room<T>(&self, host: Host<'_>, allocate: impl Fn(&Memory) -> Outcome<T>) -> Outcome<T> {
        let allocated = allocate(self);
        match &allocated {
            Err(refusal) if refusal.status == HsakmtStatus::NO_MEMORY && self.arenas.trim(host.client) => {
                allocate(self)
            }
            _ => allocated,
        }
    }

    /// Memory without an address: the caller gets a number that only stands for it, and maps it through libdrm.
    fn unplaced(&self, host: Host<'_>, gpu: &Gpu, kfd: AllocFlags, request: Request) -> Outcome<Allocation> {
        let place = self.fake_addresses(request.size, request.alignment)?;
        let public = kfd.contains(AllocFlags::PUBLIC);
        let nowhere = (GuestVa(0), request.size, request.size);
        let attempt = |flags| make(host, gpu.gpu_id, flags, nowhere, public);
        // The CPU may be shown it later (amdgpu_bo_cpu_map), where all VRAM of the GPU can be.
        let shown = host.client.features().contains(Features::HOST_BLOBS);
        let made = if public || !shown {
            attempt(kfd)
        } else {
            attempt(kfd | AllocFlags::PUBLIC).or_else(|_| attempt(kfd))
        };
        match made {
            Ok(buffer) => {
                Ok(Allocation::new(Place::Fake(place), Backing::Unplaced(Part::whole(buffer)), request))
            }
            Err(refusal) => {
                self.give_fake_addresses(place);
                Err(refusal)
            }
        }
    }
}

/// Whether an allocation that the CPU can see goes into an arena.
fn is_small(host: Host<'_>, request: Request) -> bool {
    let special = [HsaMemFlags::AQL_QUEUE_MEMORY, HsaMemFlags::CONTIGUOUS, HsaMemFlags::FIXED_ADDRESS];
    host.client.kfd_version().1 >= minor::GEM_VA
        && request.size < arena::DEDICATED
        && request.alignment <= arena::ALIGN
        && !special.into_iter().any(|flag| request.flags.is_set(flag))
}

/// A buffer of its own, and if the CPU is to see it a map of its own.
fn dedicated(
    host: Host<'_>,
    gpu: &Gpu,
    kfd: AllocFlags,
    visible: bool,
    request: Request,
) -> Outcome<Allocation> {
    let reservation = reserve(host, address_size(request)?, request)?;
    let va = GuestVa(reservation.start());
    // KFD shows half of an AQL ring's addresses twice.
    let buffer = make_buffer(host, gpu.gpu_id, kfd, va, reservation.size(), request.size)?;
    let part = Part::whole(buffer);
    if visible {
        let shown = part.blob(host.client).and_then(|blob| {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let mapped = blob.map_fixed(va, request.size, protection);
            mapped.map_err(|error| Refusal::error(error.to_string()))
        });
        if let Err(refusal) = shown {
            part.buffer.release(host.client)?;
            return Err(refusal.as_no_memory(host.client));
        }
        reservation.keep_from_children();
    }
    Ok(Allocation::new(Place::Reserved(reservation), Backing::Vram(part), request))
}
