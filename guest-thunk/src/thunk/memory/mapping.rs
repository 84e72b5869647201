//! Mapping allocations to GPUs.

use std::sync::Arc;

use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::calls::{AllocMemory, FreeMemory, MapMemory, UnmapMemory};
use virtio_kfd_protocol::{
    AllocMemoryAnswer, AllocMemoryRequest, BufferRequest, GpuId, GuestVa, Handle, MapMemoryAnswer,
};

use super::address::page_size;
use super::registered::Registered;
use super::{Allocation, Backing, Host, Memory, State};
use crate::client::Client;
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
        let registered = lock(&allocation.state).registered.clone();
        let gpus = match host.snapshot.gpu_of(allocation.node).ok().flatten() {
            _ if !registered.is_empty() => registered,
            Some(gpu) if matches!(allocation.backing, Backing::Vram) => host.snapshot.peers(gpu),
            _ => host.snapshot.all_gpus(),
        };
        map(host.client, &allocation, &gpus).map(|()| 0)
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
        let superfluous: Vec<GpuId> =
            lock(&allocation.state).mapped.iter().copied().filter(|gpu| !gpus.contains(gpu)).collect();
        unmap(host.client, &allocation, &superfluous)?;
        map(host.client, &allocation, &gpus).map(|()| 0)
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
        drop(state);
        unmap(client, &allocation, &mapped)
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
    let gpus = {
        let mut state = lock(&allocation.state);
        if state.mappings > 0 && !state.freed {
            state.mappings = state.mappings.saturating_add(1);
            Vec::new()
        } else if state.registered.is_empty() {
            host.snapshot.all_gpus()
        } else {
            state.registered.clone()
        }
    };
    if !gpus.is_empty() {
        map(host.client, allocation, &gpus)?;
        let mut state = lock(&allocation.state);
        state.mappings = state.mappings.saturating_add(1);
    }
    let offset = registered.address.checked_rem(page_size()).unwrap_or(0);
    Ok(allocation.start().saturating_add(offset))
}

fn require_memory(allocation: &Arc<Allocation>) -> Outcome<()> {
    match allocation.backing {
        Backing::Nothing => Err(Refusal::parameter("the allocation is addresses without memory")),
        _ => Ok(()),
    }
}

/// Maps to those of the GPUs that have it not mapped yet.
fn map(client: &Client, allocation: &Arc<Allocation>, gpus: &[GpuId]) -> Outcome<()> {
    require_memory(allocation)?;
    let mut state = lock(&allocation.state);
    if state.freed {
        return Err(Refusal::parameter("the allocation has been freed"));
    }
    let missing: Vec<GpuId> = gpus.iter().copied().filter(|gpu| !state.mapped.contains(gpu)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    match (&allocation.backing, state.handle) {
        (_, Some(handle)) => {
            let (answer, _) = client.call::<MapMemory>(&BufferRequest { handle }, &missing, 0)?;
            mapped(&mut state, &missing, answer)
        }
        (backing @ (Backing::System { .. } | Backing::Registered(_)), None) => {
            let (gpu_id, flags, resource, resource_offset) = match backing {
                Backing::System { blob, gpu, flags } => (*gpu, flags.bits(), blob.resource(), 0),
                Backing::Registered(it) => (it.gpu, it.flags.bits(), it.resource, it.resource_offset),
                _ => return Ok(()),
            };
            let request = AllocMemoryRequest {
                va: GuestVa(allocation.start()),
                size: allocation.size(),
                gpu_id,
                flags,
                resource,
                pad: 0,
                resource_offset,
            };
            let (handle, answer) = allocate_and_map(client, &request, &missing)?;
            state.handle = Some(handle);
            mapped(&mut state, &missing, answer?)
        }
        // Nothing to do without a GPU.
        (_, None) => Ok(()),
    }
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
    let (AllocMemoryAnswer { handle, .. }, _) = answers.get(made)?;
    Ok((handle, answers.get(mapped).map(|(answer, _)| answer).map_err(Refusal::from)))
}

/// Makes a buffer that all of these GPUs have mapped, or none.
pub fn map_buffer(client: &Client, request: &AllocMemoryRequest, gpus: &[GpuId]) -> Outcome<Handle> {
    let (handle, mapped) = allocate_and_map(client, request, gpus)?;
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
    state.mapped.extend(gpus.iter().take(done));
    state.mapped_nodes = Box::default();
    complete("map", gpus, answer)
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

fn unmap(client: &Client, allocation: &Arc<Allocation>, gpus: &[GpuId]) -> Outcome<()> {
    let mut state = lock(&allocation.state);
    let gpus: Vec<GpuId> = gpus.iter().copied().filter(|gpu| state.mapped.contains(gpu)).collect();
    let Some(handle) = state.handle.filter(|_| !gpus.is_empty()) else { return Ok(()) };
    let (answer, _) = client.call::<UnmapMemory>(&BufferRequest { handle }, &gpus, 0)?;
    let done = usize::try_from(answer.n_success).unwrap_or(usize::MAX).min(gpus.len());
    let gone: Vec<GpuId> = gpus.iter().copied().take(done).collect();
    state.mapped.retain(|gpu| !gone.contains(gpu));
    state.mappings = 0;
    state.mapped_nodes = Box::default();
    complete("unmap", &gpus, answer)
}

/// KFD's flags of a part of scratch memory.
pub(super) const SCRATCH_FLAGS: AllocFlags = AllocFlags::VRAM.union(AllocFlags::WRITABLE);
