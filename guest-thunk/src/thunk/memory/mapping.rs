//! Mapping allocations to GPUs.

use std::sync::Arc;

use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::calls::{AllocMemory, FreeMemory, MapMemory, MapRange, UnmapMemory, UnmapRange};
use virtio_kfd_protocol::limits::MAX_REQUESTS_PER_FRAME;
use virtio_kfd_protocol::{
    AllocMemoryAnswer, AllocMemoryRequest, BufferRequest, GpuId, GuestVa, Handle, MapMemoryAnswer,
    MapRangeRequest, Status, UnmapRangeRequest,
};

use super::address::page_size;
use super::flags::is_executable;
use super::import::{GUEST_FLAGS, Imported, Source};
use super::registered::{Piece, Registered};
use super::vram::no_memory;
use super::{Allocation, Backing, Host, Memory, State};
use crate::client::{Client, ClientError};
use crate::thunk::lock::lock;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::topology::Snapshot;

impl Memory {
    /// `hsaKmtMapMemoryToGPU`: to all GPUs that can reach it, or to its own GPU for a part of scratch memory.
    /// Gives the address on GPUs where that is another one than the application's, else 0.
    pub fn map(&self, host: Host<'_>, address: u64, size: u64) -> Outcome<u64> {
        if let Some(scratch) = self.scratch_at(address) {
            return scratch.map(host.client, address, size).map(|()| 0);
        }
        let unknown = || Refusal::parameter(format!("{address:#x} is not the start of an allocation"));
        let allocation = self.find_sized(address, size).ok_or_else(unknown)?;
        if let Backing::Registered(registered) = &allocation.backing {
            return map_registered(host, &allocation, registered);
        }
        let mut state = lock(&allocation.state);
        let gpus = match host.snapshot.gpu_of(allocation.node).ok().flatten() {
            _ if !state.registered.is_empty() => state.registered.clone(),
            Some(gpu) if is_vram(&allocation.backing) => host.snapshot.peers(gpu),
            _ => host.snapshot.all_gpus(),
        };
        map(host, &allocation, &mut state, &gpus).map(|()| 0)
    }

    /// `hsaKmtMapMemoryToGPUNodes`: to the GPUs of these nodes and to no others.
    /// Gives an address as `map` does.
    pub fn map_to_nodes(&self, host: Host<'_>, address: u64, size: u64, nodes: &[u32]) -> Outcome<u64> {
        let gpus = host.snapshot.gpu_ids(nodes)?;
        let unknown = || Refusal::error(format!("{address:#x} is not the start of an allocation"));
        let allocation = self.find_sized(address, size).ok_or_else(unknown)?;
        require_memory(&allocation)?;
        if let Backing::Registered(registered) = &allocation.backing {
            // AMD's library maps to what was registered, whatever the list says.
            return map_registered(host, &allocation, registered);
        }
        if matches!(allocation.backing, Backing::Private) {
            return Err(Refusal::error("memory without a GPU cannot be mapped to one"));
        }
        if gpus.contains(&GpuId(0)) {
            return Err(Refusal::error("the list of nodes has a node without a GPU"));
        }
        let mut state = lock(&allocation.state);
        let allowed = &state.registered;
        if !allowed.is_empty() && gpus.iter().any(|gpu| !allowed.contains(gpu)) {
            return Err(Refusal::error("the memory is registered for other nodes"));
        }
        let superfluous: Vec<GpuId> =
            state.mapped.iter().copied().filter(|gpu| !gpus.contains(gpu)).collect();
        unmap(host.client, &allocation, &mut state, &superfluous)?;
        map(host, &allocation, &mut state, &gpus).map(|()| 0)
    }

    /// `hsaKmtUnmapMemoryToGPU`: from all GPUs. A second unmap does nothing.
    pub fn unmap(&self, client: &Client, address: u64) -> Outcome<()> {
        if let Some(scratch) = self.scratch_at(address) {
            return scratch.unmap(client, address);
        }
        let unknown = || Refusal::error(format!("{address:#x} is not the start of an allocation"));
        let allocation = self.find(address).ok_or_else(unknown)?;
        let mut state = lock(&allocation.state);
        if state.mappings > 1 {
            state.mappings = state.mappings.saturating_sub(1);
            return Ok(());
        }
        let mapped = state.mapped.clone();
        // Under the same lock as the look at the count: another thread that maps now would lose its mapping else.
        unmap(client, &allocation, &mut state, &mapped)
    }

    /// Nodes of the GPUs that have an allocation mapped, for messages.
    pub fn describe(&self, snapshot: &Snapshot, address: u64) -> String {
        match self.pointer_info(snapshot, address) {
            Ok(info) => {
                let (start, size, node) = (info.gpu_address, info.size_in_bytes, info.node);
                format!("in an allocation of {size:#x} bytes at {start:#x}, node {node}")
            }
            Err(_) => "in no allocation".to_owned(),
        }
    }
}

/// Maps memory of the application to the GPUs that it is registered for, and counts. Gives its address there.
fn map_registered(host: Host<'_>, allocation: &Arc<Allocation>, registered: &Registered) -> Outcome<u64> {
    let mut state = lock(&allocation.state);
    if state.mappings == 0 || state.freed {
        let gpus = match state.registered.is_empty() {
            true => host.snapshot.all_gpus(),
            false => state.registered.clone(),
        };
        map(host, allocation, &mut state, &gpus)?;
    }
    state.mappings = state.mappings.saturating_add(1);
    drop(state);
    let offset = registered.address.checked_rem(page_size()).unwrap_or(0);
    Ok(allocation.start().saturating_add(offset))
}

fn is_vram(backing: &Backing) -> bool {
    match backing {
        Backing::Vram(_) | Backing::Piece(_) | Backing::Unplaced(_) => true,
        Backing::Imported(Imported { source, .. }) => !matches!(source, Source::Guest { .. }),
        Backing::System(_) | Backing::Private | Backing::Registered(_) | Backing::Nothing => false,
    }
}

fn require_memory(allocation: &Arc<Allocation>) -> Outcome<()> {
    match (&allocation.backing, &allocation.place) {
        (Backing::Nothing, _) => Err(Refusal::parameter("the allocation is addresses without memory")),
        (_, super::Place::Fake(_)) => Err(Refusal::parameter("the allocation is memory without an address")),
        _ => Ok(()),
    }
}

/// Maps to those of the GPUs that have it not mapped yet.
fn map(host: Host<'_>, allocation: &Arc<Allocation>, state: &mut State, gpus: &[GpuId]) -> Outcome<()> {
    let client = host.client;
    require_memory(allocation)?;
    if state.freed {
        return Err(Refusal::parameter("the allocation has been freed"));
    }
    let missing: Vec<GpuId> = gpus.iter().copied().filter(|gpu| !state.mapped.contains(gpu)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if let Some((handle, offset)) = allocation.range() {
        let once = without_repeats(&missing);
        let (done, result) = map_range(host, allocation, handle, offset, &once);
        // KFD passes over a GPU that has it already, and AMD's library keeps the list as it was.
        let listed = if result.is_ok() { &missing } else { &once };
        let done = if result.is_ok() { missing.len() } else { done };
        add(state, listed.iter().take(done));
        return result;
    }
    if let Some(pieces) = allocation.pieces() {
        return map_pieces(client, allocation, state, &pieces, &missing);
    }
    match &allocation.backing {
        Backing::Vram(part) => {
            let handle = part.buffer.handle;
            let (answer, _) = client.call::<MapMemory>(&BufferRequest { handle }, &missing, 0)?;
            mapped(state, &missing, answer)
        }
        // Nothing to do without a GPU.
        _ => Ok(()),
    }
}

/// Maps guest memory, piece by piece. What has no buffer yet gets it in the same frame.
fn map_pieces(
    client: &Client,
    allocation: &Allocation,
    state: &mut State,
    pieces: &[Piece],
    gpus: &[GpuId],
) -> Outcome<()> {
    let (gpu_id, flags) = match &allocation.backing {
        Backing::System(system) => (system.gpu, system.flags),
        Backing::Registered(registered) => (registered.gpu, registered.flags),
        Backing::Imported(Imported { source: Source::Guest { gpu, .. }, .. }) => (*gpu, GUEST_FLAGS),
        _ => return Ok(()),
    };
    let mut va = allocation.start();
    for (index, piece) in pieces.iter().enumerate() {
        let answer = match state.handles.get(index) {
            Some(handle) => {
                let request = BufferRequest { handle: *handle };
                client.call::<MapMemory>(&request, gpus, 0).map(|(answer, _)| answer).map_err(Refusal::from)
            }
            None => {
                let request = AllocMemoryRequest {
                    va: GuestVa(va),
                    size: piece.size,
                    gpu_id,
                    flags: flags.bits(),
                    resource: piece.resource,
                    pad: 0,
                    resource_offset: piece.offset,
                };
                allocate_and_map(client, &request, gpus).and_then(|(handle, answer)| {
                    state.handles.push(handle);
                    answer
                })
            }
        };
        let last = pieces.len() == 1;
        let done = match answer {
            // As with a single buffer of KFD: the GPUs that were reached stay.
            Ok(answer) if last => return mapped(state, gpus, answer),
            Ok(answer) => complete("map", gpus, answer),
            Err(refusal) => Err(refusal),
        };
        if let Err(refusal) = done {
            // All pieces or none.
            for handle in state.handles.iter().take(index.saturating_add(1)) {
                let _ = client.call::<UnmapMemory>(&BufferRequest { handle: *handle }, gpus, 0);
            }
            return Err(refusal);
        }
        va = va.saturating_add(piece.size);
    }
    add(state, gpus.iter());
    Ok(())
}

fn without_repeats(gpus: &[GpuId]) -> Vec<GpuId> {
    let mut once: Vec<GpuId> = Vec::with_capacity(gpus.len());
    for gpu in gpus {
        if !once.contains(gpu) {
            once.push(*gpu);
        }
    }
    once
}

/// GPUs in one frame, well below what a frame can have.
const GPUS_PER_FRAME: usize = MAX_REQUESTS_PER_FRAME / 2;

/// Maps a part of a buffer at the allocation's address. Gives how many of the GPUs have it.
fn map_range(
    host: Host<'_>,
    allocation: &Allocation,
    handle: Handle,
    offset: u64,
    gpus: &[GpuId],
) -> (usize, Outcome<()>) {
    let own = !matches!(allocation.backing, Backing::Imported(_));
    let writable = !(own && allocation.flags.is_set(HsaMemFlags::READ_ONLY));
    // What others own is executable, as in AMD's library.
    let executable = !own || is_executable(allocation.flags, host.settings);
    let request = |gpu: &GpuId| MapRangeRequest {
        handle,
        offset,
        size: allocation.size(),
        va: GuestVa(allocation.start()),
        gpu_id: *gpu,
        flags: page_flags(writable, executable).bits(),
    };
    each::<MapRange>(host.client, gpus, |gpu| request(gpu))
}

/// As KFD maps.
fn page_flags(writable: bool, executable: bool) -> VmPageFlags {
    let mut flags = VmPageFlags::PAGE_READABLE;
    flags.set(VmPageFlags::PAGE_WRITEABLE, writable);
    flags.set(VmPageFlags::PAGE_EXECUTABLE, executable);
    flags
}

/// What takes a part of a buffer from a GPU.
pub(super) fn unmap_request(handle: Handle, allocation: &Allocation, gpu_id: GpuId) -> UnmapRangeRequest {
    UnmapRangeRequest { handle, va: GuestVa(allocation.start()), size: allocation.size(), gpu_id, pad: 0 }
}

/// One call for each GPU, until one fails. Gives how many were done.
fn each<C>(client: &Client, gpus: &[GpuId], request: impl Fn(&GpuId) -> C::Request) -> (usize, Outcome<()>)
where
    C: virtio_kfd_protocol::CallType<RequestTail = u8>,
{
    let mut done: usize = 0;
    let mut run = |some: &[GpuId]| -> Result<(), ClientError> {
        let mut batch = client.batch();
        let mut tickets = Vec::with_capacity(some.len());
        for gpu in some {
            tickets.push(batch.push::<C>(&request(gpu), &[], 0)?);
        }
        let answers = batch.run()?;
        for ticket in tickets {
            answers.get(ticket)?;
            done = done.saturating_add(1);
        }
        Ok(())
    };
    let result = gpus.chunks(GPUS_PER_FRAME).try_for_each(&mut run);
    (done, result.map_err(Refusal::from))
}

/// Makes a buffer and maps it, in one frame. The outer result is the allocation's.
fn allocate_and_map(
    client: &Client,
    request: &AllocMemoryRequest,
    gpus: &[GpuId],
) -> Outcome<(Handle, Outcome<MapMemoryAnswer>)> {
    let mut batch = client.batch();
    let made = batch.push::<AllocMemory>(request, &[], 0)?;
    let mapped = batch.push::<MapMemory>(&BufferRequest { handle: made.handle() }, gpus, 0)?;
    let answers = batch.run()?;
    let (AllocMemoryAnswer { handle, .. }, _) = answers.get(made).map_err(|error| match error.status() {
        Some((Status::LIMIT, _)) => no_memory(&error),
        _ => error.into(),
    })?;
    Ok((handle, answers.get(mapped).map(|(answer, _)| answer).map_err(Refusal::from)))
}

/// Makes a buffer that all of these GPUs have mapped, or none. Where it cannot be made, that is the status.
pub fn map_buffer(
    client: &Client,
    request: &AllocMemoryRequest,
    gpus: &[GpuId],
    no_buffer: HsakmtStatus,
) -> Outcome<Handle> {
    let refused = |refusal: Refusal| match refusal.status {
        HsakmtStatus::ERROR => Refusal { status: no_buffer, ..refusal },
        _ => refusal,
    };
    let (handle, mapped) = allocate_and_map(client, request, gpus).map_err(refused)?;
    if let Err(refusal) = mapped.and_then(|answer| complete("map", gpus, answer)) {
        client.call::<FreeMemory>(&BufferRequest { handle }, &[], 0)?;
        return Err(refusal);
    }
    Ok(handle)
}

/// Unmaps a buffer from these GPUs and frees it.
pub fn free_buffer(client: &Client, handle: Handle, gpus: &[GpuId]) -> Outcome<()> {
    let mut batch = client.batch();
    batch.push::<UnmapMemory>(&BufferRequest { handle }, gpus, 0)?;
    batch.push::<FreeMemory>(&BufferRequest { handle }, &[], 0)?;
    batch.run()?.check()?;
    Ok(())
}

/// Writes down how far a mapping came.
fn mapped(state: &mut State, gpus: &[GpuId], answer: MapMemoryAnswer) -> Outcome<()> {
    let done = usize::try_from(answer.n_success).unwrap_or(usize::MAX).min(gpus.len());
    add(state, gpus.iter().take(done));
    complete("map", gpus, answer)
}

fn add<'a>(state: &mut State, gpus: impl Iterator<Item = &'a GpuId>) {
    state.mapped.extend(gpus);
    state.mapped_nodes = Box::default();
}

fn complete(what: &str, gpus: &[GpuId], answer: MapMemoryAnswer) -> Outcome<()> {
    let MapMemoryAnswer { n_success, errno } = answer;
    if errno == 0 && usize::try_from(n_success).is_ok_and(|done| done >= gpus.len()) {
        return Ok(());
    }
    Err(Refusal::new(
        HsakmtStatus::ERROR,
        format!("{what}: {n_success} of {} GPUs were done, errno {errno}", gpus.len()),
    ))
}

fn unmap(client: &Client, allocation: &Arc<Allocation>, state: &mut State, gpus: &[GpuId]) -> Outcome<()> {
    let gpus: Vec<GpuId> = gpus.iter().copied().filter(|gpu| state.mapped.contains(gpu)).collect();
    if gpus.is_empty() {
        return Ok(());
    }
    let (done, result) = match (allocation.range(), &allocation.backing) {
        (Some((handle, _)), _) => {
            let once = without_repeats(&gpus);
            let (done, result) =
                each::<UnmapRange>(client, &once, |gpu| unmap_request(handle, allocation, *gpu));
            match result {
                Ok(()) if once.len() == gpus.len() => (gpus.len(), Ok(())),
                // KFD's answer to a GPU that has not got it; those before it in the list were done.
                Ok(()) => (gpus.len(), Err(Refusal::error("a GPU is listed more than once"))),
                Err(refusal) => (done, Err(refusal)),
            }
        }
        (None, Backing::Vram(part)) => unmap_buffer(client, part.buffer.handle, &gpus),
        (None, _) => {
            // A buffer that a GPU does not have mapped is no error, so that a second try may begin anew.
            let mut least = (gpus.len(), Ok(()));
            for handle in &state.handles {
                least = unmap_buffer(client, *handle, &gpus);
                if least.1.is_err() {
                    let one = state.handles.len() == 1;
                    least.0 = if one { least.0 } else { 0 };
                    break;
                }
            }
            least
        }
    };
    let gone: Vec<GpuId> = gpus.iter().copied().take(done).collect();
    state.mapped.retain(|gpu| !gone.contains(gpu));
    state.mappings = 0;
    state.mapped_nodes = Box::default();
    result
}

fn unmap_buffer(client: &Client, handle: Handle, gpus: &[GpuId]) -> (usize, Outcome<()>) {
    match client.call::<UnmapMemory>(&BufferRequest { handle }, gpus, 0) {
        Ok((answer, _)) => {
            let done = usize::try_from(answer.n_success).unwrap_or(usize::MAX).min(gpus.len());
            (done, complete("unmap", gpus, answer))
        }
        Err(error) if went_with_its_blob(&error) => (gpus.len(), Ok(())),
        Err(error) => (0, Err(error.into())),
    }
}

/// Whether the host has no such buffer any more: the application has unmapped the memory under a registration, and with the
/// last mapping of a blob the host's buffers on it end.
pub(super) fn went_with_its_blob(error: &ClientError) -> bool {
    matches!(error.status(), Some((Status::BAD_HANDLE, _)))
}

/// KFD's flags of a part of scratch memory.
pub(super) const SCRATCH_FLAGS: AllocFlags = AllocFlags::VRAM.union(AllocFlags::WRITABLE);
