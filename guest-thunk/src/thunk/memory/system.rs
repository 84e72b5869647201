//! System memory: memory of the guest, which KFD is given as a user pointer when a GPU first maps it.

use std::sync::Arc;

use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::{GpuId, GuestVa};

use super::registered::Piece;
use super::{Allocation, Backing, Host, Place, Request, address_size, flags, reserve};
use crate::client::Client;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::topology::Gpu;
use crate::transport::Blob;

/// Bytes of the largest blob of pageable memory. One command lists the pages of a blob, and the host bounds the list: an
/// allocation of any size consists of blobs that each have far fewer, however fragmented the guest is.
const CHUNK: u64 = 1 << 30;

/// Guest memory, and how KFD gets it.
pub(super) struct System {
    /// One after the other.
    pub(super) blobs: Vec<Arc<dyn Blob>>,
    /// The GPU in whose name KFD has it.
    pub(super) gpu: GpuId,
    pub(super) flags: AllocFlags,
    /// Whether natively it would be KFD's own memory, which alone can be exported.
    pub(super) pinned: bool,
}

impl System {
    /// What KFD is given, buffer by buffer. An AQL ring has twice as many addresses as bytes.
    pub(super) fn pieces(&self, addresses: u64) -> Vec<Piece> {
        let piece = |blob: &Arc<dyn Blob>| {
            let size = if self.blobs.len() == 1 { addresses } else { blob.size() };
            Piece { resource: blob.resource(), offset: 0, size }
        };
        self.blobs.iter().map(piece).collect()
    }
}

/// Bytes from which on an allocation is compared with what the guest has left.
const LARGE: u64 = 64 << 20;

/// KFD refuses what the machine has not got before it takes a page (`amdgpu_amdkfd_reserve_mem_limit`). The guest's kernel
/// would press all else out of memory first.
fn check_room(client: &Client, size: u64) -> Outcome<()> {
    match client.guest_memory_left() {
        Some(left) if size >= LARGE && size > left => {
            let why = format!("{size:#x} bytes, of which the guest has {left:#x} left");
            Err(Refusal::error(why))
        }
        _ => Ok(()),
    }
}

/// Allocates memory that the CPU can access at once. Without any GPU it is private memory of the process.
pub(super) fn allocate(host: Host<'_>, gpu: Option<&Gpu>, request: Request) -> Outcome<Allocation> {
    // AMD's library answers HSAKMT_STATUS_ERROR to every failure here.
    let failed = |refusal: Refusal| Refusal { status: HsakmtStatus::ERROR, ..refusal };
    let set = |flag| request.flags.is_set(flag);
    let reservation = reserve(host, address_size(request)?, request).map_err(failed)?;
    let Some(gpu) = gpu.or(host.snapshot.gpus.first()) else {
        let no_memory = |error| Refusal::error(format!("no {:#x} bytes of memory: {error}", request.size));
        reservation.fill_with_private_memory().map_err(no_memory)?;
        let place = Place::Reserved(reservation);
        return Ok(Allocation::new(place, Backing::Private, Request { node: 0, ..request }));
    };
    // What can be exported is one blob, for a dma-buf is.
    let pinned = set(HsaMemFlags::NON_PAGED);
    let whole = pinned || set(HsaMemFlags::AQL_QUEUE_MEMORY);
    let chunk = if whole { request.size } else { CHUNK };
    let mut blobs: Vec<Arc<dyn Blob>> = Vec::new();
    let mut done = 0;
    check_room(host.client, request.size)?;
    while done < request.size {
        let size = request.size.saturating_sub(done).min(chunk);
        // What KFD would have as its own is no ordinary memory natively either.
        let ordinary = if pinned { None } else { host.client.ordinary_memory(size) };
        let blob: Arc<dyn Blob> = match ordinary {
            Some(blob) => Arc::from(blob),
            None => Arc::from(host.client.guest_memory(size)?),
        };
        if !pinned || set(HsaMemFlags::HOST_ACCESS) {
            let at = reservation.start().saturating_add(done);
            blob.map_fixed(GuestVa(at), size, libc::PROT_READ | libc::PROT_WRITE)
                .map_err(|error| Refusal::error(error.to_string()))?;
        }
        blobs.push(blob);
        done = done.saturating_add(size);
    }
    reservation.keep_from_children();
    let flags = flags::ioc(request.flags, host.settings) | AllocFlags::USERPTR;
    let system = System { blobs, gpu: gpu.gpu_id, flags, pinned };
    let node = if set(HsaMemFlags::GTT_ACCESS) { 0 } else { request.node };
    let place = Place::Reserved(reservation);
    Ok(Allocation::new(place, Backing::System(system), Request { node, ..request }))
}
