//! Everything of a context that is memory: guest memory, buffers, and what of the limits is used up.

use std::collections::HashMap;
use std::sync::Arc;

use kfd_abi::memory::AllocFlags;
use kfd_host::{GuestMapping, HdpPage, KfdError, KfdHandle, NewBuffer, SharedWords};
use kfd_ipc::ledger::Account;
use kfd_ipc::worker::Run;
use nix::errno::Errno;
use virtio_kfd_protocol::{AllocMemoryRequest, GpuId, Handle, ResourceId, ShareToken, Status};

use crate::blob::{GuestMemory, PAGE};
use crate::budget::Budget;
use crate::buffer::{Backing, Buffer, Kind, kind};
use crate::context::Context;
use crate::failure::{Failure, errno_number};
use crate::handle::Table;
use crate::pump::GuestWords;
use crate::range::Gems;
use crate::share::HostBlob;

/// Most bytes of GTT buffers of a context, whatever the operator allows. They are memory of the host that no limit of the
/// VM counts, and the kernel gives KFD nearly all that the host has. A guest needs one for its page of events (32 KiB);
/// other memory that the CPU shares with GPUs is the guest's own, in GUEST blobs.
pub const MAX_GTT_BYTES: u64 = 16 << 20;

/// What a context may use.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Bytes of VRAM.
    pub vram: u64,
    /// Bytes of system memory that GPUs can reach: guest memory, and GTT buffers, which the host provides.
    pub system: u64,
    /// Bytes of VRAM of all contexts of the VM.
    pub vm_vram: Option<Account>,
    /// Bytes of system memory of all contexts of the VM.
    pub vm_system: Option<Account>,
    /// Buffers.
    pub buffers: usize,
    /// Mappings of guest memory in this process.
    pub runs: u32,
}

/// The memory of a context.
#[derive(Debug)]
pub struct Memory {
    /// Regions and blobs.
    pub guest: GuestMemory,
    pub(crate) buffers: Table<Buffer>,
    pub(crate) max_buffers: usize,
    vram: Budget,
    system: Budget,
    gtt: Budget,
    runs: Budget,
    pub(crate) gems: Gems,
    /// HOST3D blobs that this context may use.
    pub(crate) host_blobs: HashMap<u32, HostBlob>,
    /// Tokens that were given out and of which something may still be used.
    pub(crate) tokens: HashMap<ShareToken, Handle>,
    /// Memory of buffers that are freed, which HOST3D blobs or tokens still hold, and how many.
    lingering: HashMap<Handle, (Cost, u32)>,
}

/// What a buffer uses of each limit.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    vram: u64,
    system: u64,
    gtt: u64,
    runs: u64,
}

impl Memory {
    /// Nothing allocated.
    pub fn new(limits: Limits) -> Self {
        Memory {
            guest: GuestMemory::new(limits.runs),
            buffers: Table::new(),
            max_buffers: limits.buffers,
            vram: Budget::new("bytes of VRAM", limits.vram).with(limits.vm_vram),
            system: Budget::new("bytes of system memory", limits.system).with(limits.vm_system),
            gtt: Budget::new("bytes of the host's memory", MAX_GTT_BYTES),
            runs: Budget::new("mappings of guest memory", limits.runs.into()),
            gems: Gems::default(),
            host_blobs: HashMap::new(),
            tokens: HashMap::new(),
            lingering: HashMap::new(),
        }
    }

    /// Bytes of VRAM that the limit leaves.
    pub fn vram_left(&self) -> u64 {
        self.vram.left()
    }

    /// The buffer of a handle.
    pub fn buffer(&self, handle: Handle) -> Result<&Buffer, Failure> {
        self.buffers.get(handle).ok_or_else(|| bad_handle(handle))
    }

    /// The buffer of a handle, to change.
    pub(crate) fn buffer_mut(&mut self, handle: Handle) -> Result<&mut Buffer, Failure> {
        self.buffers.get_mut(handle).ok_or_else(|| bad_handle(handle))
    }

    /// Allocates a buffer and gives out a handle.
    pub fn alloc(&mut self, context: &Context, request: &AllocMemoryRequest) -> Result<Handle, Failure> {
        let flags = AllocFlags::from_bits_retain(request.flags);
        let Some(kind) = kind(flags) else {
            return Err(Failure::invalid(format!("AllocMemory: flags {:#x}", request.flags)));
        };
        let (va, size) = (request.va.0, request.size);
        let pages = va.is_multiple_of(PAGE) && size.is_multiple_of(PAGE) && size != 0;
        if !pages || va.checked_add(size).is_none() {
            return Err(Failure::invalid(format!(
                "AllocMemory: va {va:#x}, size {size:#x}: not whole pages"
            )));
        }
        let with_blob = request.resource != ResourceId(0) || request.resource_offset != 0;
        if with_blob && kind != Kind::Userptr {
            return Err(Failure::invalid("AllocMemory: a blob beside other memory than USERPTR"));
        }
        self.check_room("AllocMemory")?;
        let buffer = NewBuffer { va, size, gpu_id: request.gpu_id.0, flags };
        let bytes = memory_bytes(kind, flags, size)?;
        match kind {
            Kind::Vram => {
                let cost = Cost { vram: bytes, ..Default::default() };
                self.charged(context, cost, |_| {
                    let made = context.kfd.alloc(&buffer)?;
                    let public = flags.contains(AllocFlags::PUBLIC);
                    let backing = Backing::Vram { public, mmap_offset: made.mmap_offset };
                    Ok(Buffer::new(Some(made.handle), request.gpu_id, bytes, backing).at(va, size))
                })
            }
            Kind::Gtt => {
                let cost = Cost { system: bytes, gtt: bytes, ..Default::default() };
                self.charged(context, cost, |_| {
                    let made = context.kfd.alloc(&buffer)?;
                    let backing = Backing::Gtt { mmap_offset: made.mmap_offset };
                    Ok(Buffer::new(Some(made.handle), request.gpu_id, bytes, backing).at(va, size))
                })
            }
            Kind::Userptr => {
                if !request.resource_offset.is_multiple_of(PAGE) {
                    let reason = "AllocMemory: resource_offset is not a multiple of the page size";
                    return Err(Failure::invalid(reason));
                }
                let runs = self.guest.slice(request.resource, request.resource_offset, bytes)?;
                let cost = Cost { system: bytes, runs: runs.len() as u64, ..Default::default() };
                self.charged(context, cost, |memory| {
                    memory.alloc_guest(context, request, &buffer, bytes, &runs)
                })
            }
            // For GPUs alone: a CPU rings in the shadow.
            Kind::Doorbells => {
                let made = context.kfd.alloc(&buffer)?;
                let buffer = Buffer::new(Some(made.handle), request.gpu_id, bytes, Backing::Doorbells);
                self.keep(context, buffer.at(va, size))
            }
            Kind::Registers => {
                self.check_first_page(request.gpu_id)?;
                let cost = Cost { runs: 1, ..Default::default() };
                self.charged(context, cost, |_| {
                    let made = context.kfd.alloc(&buffer)?;
                    let page = context.kfd.hdp_page(&made).inspect_err(|_| {
                        if let Err(error) = context.kfd.free(made.handle) {
                            tracing::warn!("a page of registers stays until the context ends: {error}");
                        }
                    });
                    let backing = Backing::Registers { page: Arc::new(page.map_err(no_mapping)?) };
                    Ok(Buffer::new(Some(made.handle), request.gpu_id, bytes, backing).at(va, size))
                })
            }
        }
    }

    /// A GPU's registers are mapped once.
    fn check_first_page(&self, gpu_id: GpuId) -> Result<(), Failure> {
        let is_page =
            |buffer: &Buffer| buffer.gpu_id == gpu_id && matches!(buffer.backing, Backing::Registers { .. });
        match self.buffers.find(is_page).is_empty() {
            true => Ok(()),
            false => {
                Err(Failure::invalid(format!("AllocMemory: gpu_id {} has its page of registers", gpu_id.0)))
            }
        }
    }

    /// The page of registers that a buffer is.
    pub fn hdp_page(&self, handle: Handle) -> Result<Arc<HdpPage>, Failure> {
        match &self.buffer(handle)?.backing {
            Backing::Registers { page } => Ok(Arc::clone(page)),
            _ => Err(Failure::invalid(format!("handle {:#x} is no page of registers", handle.0))),
        }
    }

    fn alloc_guest(
        &self,
        context: &Context,
        request: &AllocMemoryRequest,
        buffer: &NewBuffer,
        bytes: u64,
        runs: &[Run],
    ) -> Result<Buffer, Failure> {
        let mapping = GuestMapping::new(&self.guest.pieces(runs)?).map_err(no_mapping)?;
        let made = context.kfd.alloc_userptr(buffer, &mapping)?;
        let backing = Backing::Guest {
            _mapping: mapping,
            resource: request.resource.0,
            offset: request.resource_offset,
            regions: runs.iter().map(|run| run.region).collect(),
            runs: u32::try_from(runs.len()).unwrap_or(u32::MAX),
        };
        Ok(Buffer::new(Some(made.handle), request.gpu_id, bytes, backing).at(buffer.va, buffer.size))
    }

    /// Eight bytes of guest memory at an address of a GPU, for this process itself; none where other memory is there.
    pub fn guest_word(&self, gpu: GpuId, va: u64) -> Result<Option<GuestWords>, Failure> {
        let here = self.buffers.find(|buffer| buffer.covers(gpu, va));
        let Some(buffer) = here.first().and_then(|handle| self.buffers.get(*handle)) else { return Ok(None) };
        let Backing::Guest { resource, offset, .. } = &buffer.backing else { return Ok(None) };
        // An AQL ring is there twice in a row.
        let Some(at) = va.checked_sub(buffer.addresses.start).filter(|at| *at < buffer.size) else {
            return Ok(None);
        };
        let Some(at) = offset.checked_add(at).filter(|at| at.is_multiple_of(8)) else { return Ok(None) };
        let within = at % PAGE;
        let page = self.guest_words(ResourceId(*resource), at.saturating_sub(within), PAGE)?;
        Ok(Some(GuestWords { first: within / 8, ..page }))
    }

    /// Guest memory of a blob for this process itself.
    pub fn guest_words(&self, resource: ResourceId, offset: u64, size: u64) -> Result<GuestWords, Failure> {
        let runs = self.guest.slice(resource, offset, size)?;
        let words = SharedWords::new(&self.guest.pieces(&runs)?)?;
        let regions = runs.iter().map(|run| run.region).collect();
        Ok(GuestWords { words, first: 0, resource: resource.0, regions })
    }

    /// Whether there may be another buffer.
    pub(crate) fn check_room(&self, what: &str) -> Result<(), Failure> {
        match self.buffers.len() < self.max_buffers {
            true => Ok(()),
            false => Err(Failure::limit(format!("{what}: {} buffers", self.max_buffers))),
        }
    }

    /// Makes a buffer if the limits allow it.
    fn charged(
        &mut self,
        context: &Context,
        cost: Cost,
        make: impl FnOnce(&Self) -> Result<Buffer, Failure>,
    ) -> Result<Handle, Failure> {
        self.charge(cost)?;
        let made = make(self).and_then(|buffer| self.keep(context, buffer));
        if made.is_err() {
            self.refund(cost);
        }
        made
    }

    fn charge(&mut self, cost: Cost) -> Result<(), Failure> {
        self.runs.take(cost.runs)?;
        let taken = self.gtt.take(cost.gtt).and_then(|()| {
            let taken = self
                .system
                .take(cost.system)
                .and_then(|()| self.vram.take(cost.vram).inspect_err(|_| self.system.give(cost.system)));
            taken.inspect_err(|_| self.gtt.give(cost.gtt))
        });
        taken.inspect_err(|_| self.runs.give(cost.runs))
    }

    fn refund(&mut self, cost: Cost) {
        self.runs.give(cost.runs);
        self.gtt.give(cost.gtt);
        self.system.give(cost.system);
        self.vram.give(cost.vram);
    }

    /// Gives out a handle. A buffer that gets none is freed.
    pub(crate) fn keep(&mut self, context: &Context, buffer: Buffer) -> Result<Handle, Failure> {
        self.buffers.insert(buffer).map_err(|buffer| {
            // KFD lets go of its addresses before a mapping goes with the buffer.
            if let Some(kfd) = buffer.kfd
                && let Err(error) = context.kfd.free(kfd)
            {
                tracing::warn!("a buffer without a handle stays until the context ends: {error}");
            }
            Failure::limit("all handles are used up")
        })
    }

    /// Frees a buffer, its ranges and its tokens first. What the kernel refuses (EBUSY while a GPU maps it) leaves it as
    /// it is.
    pub fn free(&mut self, context: &Context, handle: Handle) -> Result<(), Failure> {
        let buffer = self.buffer(handle)?;
        let kfd = buffer.kfd;
        // The kernel refuses it then, and the ranges must not be lost for that.
        if let Some(kfd) = kfd
            && !buffer.mapped.is_empty()
        {
            context.kfd.free(kfd)?;
        } else {
            self.unmap_ranges(context, handle)?;
            if let Some(kfd) = kfd {
                context.kfd.free(kfd)?;
            }
        }
        self.close_gems(context, handle);
        // Only now, when KFD has let go of its addresses, may the mapping go.
        if let Some(buffer) = self.buffers.remove(handle) {
            for share in &buffer.shares {
                context.unshare(share.token);
            }
            match buffer.uses {
                0 => self.refund(cost(&buffer)),
                uses => drop(self.lingering.insert(handle, (cost(&buffer), uses))),
            }
        }
        Ok(())
    }

    /// A HOST3D blob or a token of a buffer is gone. Memory of a freed buffer is gone with the last one.
    pub(crate) fn used_less(&mut self, handle: Handle) {
        if let Some(buffer) = self.buffers.get_mut(handle) {
            buffer.uses = buffer.uses.saturating_sub(1);
        } else if let Some((cost, uses)) = self.lingering.get_mut(&handle) {
            let cost = *cost;
            *uses = uses.saturating_sub(1);
            if *uses == 0 {
                self.lingering.remove(&handle);
                self.refund(cost);
            }
        }
    }

    /// Maps a buffer on GPUs, in the order of the list. Returns how many were done and what ended it early.
    pub fn map(
        &mut self,
        context: &Context,
        handle: Handle,
        gpus: &[GpuId],
    ) -> Result<(u32, Option<Errno>), Failure> {
        let buffer = self.buffer_mut(handle)?;
        let ids: Vec<u32> = gpus.iter().map(|gpu| gpu.0).collect();
        let outcome = context.kfd.map(with_address(buffer.kfd)?, &ids);
        buffer.mapped.extend(ids.iter().take(outcome.done as usize));
        Ok((outcome.done, outcome.errno))
    }

    /// Unmaps a buffer from GPUs, as [`Memory::map`].
    pub fn unmap(
        &mut self,
        context: &Context,
        handle: Handle,
        gpus: &[GpuId],
    ) -> Result<(u32, Option<Errno>), Failure> {
        let buffer = self.buffer_mut(handle)?;
        let ids: Vec<u32> = gpus.iter().map(|gpu| gpu.0).collect();
        let outcome = context.kfd.unmap(with_address(buffer.kfd)?, &ids);
        for id in ids.iter().take(outcome.done as usize) {
            buffer.mapped.remove(id);
        }
        Ok((outcome.done, outcome.errno))
    }

    /// Takes the buffers on a blob from the GPUs and frees them. An error means that the GPU may still reach the pages.
    pub fn detach(&mut self, context: &Context, blob: u32) -> Result<(), Failure> {
        self.guest.detach(blob);
        context.pump.fence(|words| words.resource == blob);
        self.take_away(context, |buffer| buffer.resource() == Some(blob))
    }

    /// Takes the buffers on a region of guest memory from the GPUs and frees them, and forgets the region.
    pub fn remove_region(&mut self, context: &Context, region: u32) -> Result<(), Failure> {
        self.guest.remove_region(region);
        context.pump.fence(|words| words.regions.contains(&region));
        self.take_away(context, |buffer| match &buffer.backing {
            Backing::Guest { regions, .. } => regions.contains(&region),
            _ => false,
        })
    }

    pub(crate) fn take_away(
        &mut self,
        context: &Context,
        which: impl Fn(&Buffer) -> bool,
    ) -> Result<(), Failure> {
        for handle in self.buffers.find(which) {
            // The kernel keeps what a queue works with on the GPU (kfd_queue_acquire_buffers, from Linux 6.12 on).
            context.queues().destroy_on(context, self.buffer(handle)?);
            let gpus: Vec<GpuId> = self.buffer(handle)?.mapped.iter().map(|id| GpuId(*id)).collect();
            if !gpus.is_empty()
                && let (done, Some(errno)) = self.unmap(context, handle, &gpus)?
            {
                let status = Status::ERRNO;
                let reason = format!("unmap of {handle:?}: {done} of {} GPUs, then {errno}", gpus.len());
                return Err(Failure { status, errno: errno_number(errno), reason });
            }
            self.free(context, handle)?;
        }
        Ok(())
    }
}

/// Bytes of memory behind `size` bytes of addresses: KFD shows an AQL ring twice in a row, so that it has half
/// (`amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu`).
fn memory_bytes(kind: Kind, flags: AllocFlags, size: u64) -> Result<u64, Failure> {
    if !flags.contains(AllocFlags::AQL_QUEUE_MEM) {
        return Ok(size);
    }
    let half = size / 2;
    match kind {
        // KFD would take the page after the mapping's last one as well.
        Kind::Userptr if !half.is_multiple_of(PAGE) => {
            let reason =
                format!("AllocMemory: an AQL ring of {size:#x} bytes, which is not twice whole pages");
            Err(Failure::invalid(reason))
        }
        _ => Ok(half.checked_next_multiple_of(PAGE).unwrap_or(size)),
    }
}

/// KFD's handle of a buffer that has one.
fn with_address(kfd: Option<KfdHandle>) -> Result<KfdHandle, Failure> {
    kfd.ok_or_else(|| Failure::invalid("the buffer has no address of its own: MapRange gives it some"))
}

/// Where the kernel has no room for another mapping (`vm.max_map_count`), that is a limit like our own.
fn no_mapping(error: KfdError) -> Failure {
    match error.errno {
        Errno::ENOMEM => Failure::limit(format!("AllocMemory: {error}")),
        _ => error.into(),
    }
}

fn bad_handle(handle: Handle) -> Failure {
    Failure::new(Status::BAD_HANDLE, format!("handle {:#x} names no buffer", handle.0))
}

fn cost(buffer: &Buffer) -> Cost {
    let size = buffer.size;
    match buffer.backing {
        Backing::Vram { .. } => Cost { vram: size, ..Default::default() },
        Backing::Gtt { .. } => Cost { system: size, gtt: size, ..Default::default() },
        Backing::Guest { runs, .. } => Cost { system: size, runs: runs.into(), ..Default::default() },
        Backing::Registers { .. } => Cost { runs: 1, ..Default::default() },
        // It is no memory, or counted where it was allocated.
        Backing::Doorbells | Backing::Imported { .. } | Backing::Piece { .. } => Cost::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aql_ring_has_half_the_memory_of_its_addresses() {
        let aql = AllocFlags::AQL_QUEUE_MEM;
        assert_eq!(memory_bytes(Kind::Userptr, AllocFlags::empty(), 3 * PAGE), Ok(3 * PAGE));
        assert_eq!(memory_bytes(Kind::Userptr, aql, 4 * PAGE), Ok(2 * PAGE));
        assert_eq!(memory_bytes(Kind::Userptr, aql, 3 * PAGE).unwrap_err().status, Status::INVALID);
        // PAGE_ALIGN(size >> 1)
        assert_eq!(memory_bytes(Kind::Vram, aql, 3 * PAGE), Ok(2 * PAGE));
        assert_eq!(memory_bytes(Kind::Gtt, aql, 8 << 32), Ok(4 << 32));
    }

    #[test]
    fn what_goes_over_one_limit_uses_up_no_other() {
        let mut memory =
            Memory::new(Limits { vram: 8, system: 8, buffers: 1, runs: 8, ..Default::default() });
        let cost = Cost { vram: 9, system: 8, gtt: 8, runs: 8 };
        for over in [cost, Cost { system: 9, vram: 8, ..cost }, Cost { runs: 9, ..cost }] {
            assert_eq!(memory.charge(over).unwrap_err().status, Status::LIMIT, "{over:?}");
        }
        let all = Cost { vram: 8, system: 8, gtt: MAX_GTT_BYTES, runs: 8 };
        memory.charge(all).unwrap();
        memory.refund(all);
        memory.charge(all).unwrap();
    }
}
