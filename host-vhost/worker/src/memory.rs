//! Everything of a context that is memory: guest memory, buffers, and what of the limits is used up.

use std::collections::BTreeSet;

use kfd_abi::memory::AllocFlags;
use kfd_host::{Allocation, GuestMapping, Kfd, NewBuffer};
use nix::errno::Errno;
use virtio_kfd_protocol::{AllocMemoryRequest, GpuId, Handle, ResourceId, Status};

use crate::blob::{GuestMemory, PAGE};
use crate::buffer::{Backing, Buffer, Kind, kind};
use crate::failure::Failure;
use crate::handle::Table;

/// Most bytes of GTT buffers of a context, whatever the operator allows. They are memory of the host that no limit of the
/// VM counts, and the kernel gives KFD nearly all that the host has. A guest needs one for its page of events (32 KiB);
/// other memory that the CPU shares with GPUs is the guest's own, in GUEST blobs.
pub const MAX_GTT_BYTES: u64 = 16 << 20;

/// What a context may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of VRAM.
    pub vram: u64,
    /// Bytes of system memory that GPUs can reach: guest memory, and GTT buffers, which the host provides.
    pub system: u64,
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
    buffers: Table<Buffer>,
    limits: Limits,
    vram: u64,
    system: u64,
    gtt: u64,
    runs: u32,
}

/// What a buffer of guest memory lies on.
struct GuestBacking {
    mapping: GuestMapping,
    regions: BTreeSet<u32>,
    runs: u32,
}

impl Memory {
    /// Nothing allocated.
    pub fn new(limits: Limits) -> Self {
        Memory {
            guest: GuestMemory::new(limits.runs),
            buffers: Table::new(),
            limits,
            vram: 0,
            system: 0,
            gtt: 0,
            runs: 0,
        }
    }

    /// Bytes of VRAM that the limit leaves.
    pub fn vram_left(&self) -> u64 {
        self.limits.vram.saturating_sub(self.vram)
    }

    /// The buffer of a handle.
    pub fn buffer(&self, handle: Handle) -> Result<&Buffer, Failure> {
        self.buffers.get(handle).ok_or_else(|| bad_handle(handle))
    }

    /// Allocates a buffer and gives out a handle.
    pub fn alloc(&mut self, kfd: &Kfd, request: &AllocMemoryRequest) -> Result<Handle, Failure> {
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
        if self.buffers.len() >= self.limits.buffers {
            return Err(Failure::limit(format!("AllocMemory: {} buffers", self.limits.buffers)));
        }
        let buffer = NewBuffer { va, size, gpu_id: request.gpu_id.0, flags };
        let (allocation, backing) = match kind {
            Kind::Vram => {
                within("bytes of VRAM", self.vram, size, self.limits.vram)?;
                (kfd.alloc(&buffer)?, Backing::Vram { public: flags.contains(AllocFlags::PUBLIC) })
            }
            Kind::Gtt => {
                within("bytes of system memory", self.system, size, self.limits.system)?;
                within("bytes of the host's memory", self.gtt, size, MAX_GTT_BYTES)?;
                (kfd.alloc(&buffer)?, Backing::Gtt)
            }
            Kind::Userptr => {
                within("bytes of system memory", self.system, size, self.limits.system)?;
                let GuestBacking { mapping, regions, runs } = self.map_guest_memory(request)?;
                let allocation = kfd.alloc_userptr(&buffer, &mapping)?;
                let resource = request.resource.0;
                (allocation, Backing::Guest { _mapping: mapping, resource, regions, runs })
            }
            Kind::ProcessPage => {
                let reason = "AllocMemory: a page that only the KFD process itself can map";
                return Err(Failure::new(Status::NOT_SUPPORTED, reason));
            }
        };
        self.keep(Buffer { allocation, gpu_id: request.gpu_id, size, backing, mapped: BTreeSet::new() })
    }

    fn map_guest_memory(&self, request: &AllocMemoryRequest) -> Result<GuestBacking, Failure> {
        if !request.resource_offset.is_multiple_of(PAGE) {
            return Err(Failure::invalid("AllocMemory: resource_offset is not a multiple of the page size"));
        }
        let runs = self.guest.slice(request.resource, request.resource_offset, request.size)?;
        let count = u32::try_from(runs.len()).unwrap_or(u32::MAX);
        within("mappings of guest memory", self.runs.into(), count.into(), self.limits.runs.into())?;
        let mapping = GuestMapping::new(&self.guest.pieces(&runs)?)?;
        let regions = runs.iter().map(|run| run.region).collect();
        Ok(GuestBacking { mapping, regions, runs: count })
    }

    fn keep(&mut self, buffer: Buffer) -> Result<Handle, Failure> {
        let Cost { vram, system, gtt, runs } = cost(&buffer);
        let handle = self.buffers.insert(buffer);
        let handle = handle.ok_or_else(|| Failure::limit("AllocMemory: all handles are used up"))?;
        // Each sum was compared with its limit before.
        self.vram = self.vram.saturating_add(vram);
        self.system = self.system.saturating_add(system);
        self.gtt = self.gtt.saturating_add(gtt);
        self.runs = self.runs.saturating_add(runs);
        Ok(handle)
    }

    /// Frees a buffer. What the kernel refuses (EBUSY while a GPU maps it) leaves it as it is.
    pub fn free(&mut self, kfd: &Kfd, handle: Handle) -> Result<(), Failure> {
        kfd.free(self.buffer(handle)?.allocation.handle)?;
        // Only now, when KFD has let go of its addresses, may the mapping go.
        if let Some(buffer) = self.buffers.remove(handle) {
            let Cost { vram, system, gtt, runs } = cost(&buffer);
            self.vram = self.vram.saturating_sub(vram);
            self.system = self.system.saturating_sub(system);
            self.gtt = self.gtt.saturating_sub(gtt);
            self.runs = self.runs.saturating_sub(runs);
        }
        Ok(())
    }

    /// Maps a buffer on GPUs, in the order of the list. Returns how many were done and what ended it early.
    pub fn map(
        &mut self,
        kfd: &Kfd,
        handle: Handle,
        gpus: &[GpuId],
    ) -> Result<(u32, Option<Errno>), Failure> {
        let buffer = self.buffers.get_mut(handle).ok_or_else(|| bad_handle(handle))?;
        let ids: Vec<u32> = gpus.iter().map(|gpu| gpu.0).collect();
        let outcome = kfd.map(buffer.allocation.handle, &ids);
        buffer.mapped.extend(ids.iter().take(outcome.done as usize));
        Ok((outcome.done, outcome.errno))
    }

    /// Unmaps a buffer from GPUs, as [`Memory::map`].
    pub fn unmap(
        &mut self,
        kfd: &Kfd,
        handle: Handle,
        gpus: &[GpuId],
    ) -> Result<(u32, Option<Errno>), Failure> {
        let buffer = self.buffers.get_mut(handle).ok_or_else(|| bad_handle(handle))?;
        let ids: Vec<u32> = gpus.iter().map(|gpu| gpu.0).collect();
        let outcome = kfd.unmap(buffer.allocation.handle, &ids);
        for id in ids.iter().take(outcome.done as usize) {
            buffer.mapped.remove(id);
        }
        Ok((outcome.done, outcome.errno))
    }

    /// Takes the buffers on a blob from the GPUs and frees them. An error means that the GPU may still reach the pages.
    pub fn detach(&mut self, kfd: &Kfd, blob: u32) -> Result<(), Failure> {
        self.guest.detach(blob);
        self.take_away(
            kfd,
            |buffer| matches!(buffer.backing, Backing::Guest { resource, .. } if resource == blob),
        )
    }

    /// Takes the buffers on a region of guest memory from the GPUs and frees them, and forgets the region.
    pub fn remove_region(&mut self, kfd: &Kfd, region: u32) -> Result<(), Failure> {
        self.guest.remove_region(region);
        self.take_away(kfd, |buffer| match &buffer.backing {
            Backing::Guest { regions, .. } => regions.contains(&region),
            _ => false,
        })
    }

    fn take_away(&mut self, kfd: &Kfd, which: impl Fn(&Buffer) -> bool) -> Result<(), Failure> {
        for handle in self.buffers.find(which) {
            let gpus: Vec<GpuId> = self.buffer(handle)?.mapped.iter().map(|id| GpuId(*id)).collect();
            if !gpus.is_empty()
                && let (done, Some(errno)) = self.unmap(kfd, handle, &gpus)?
            {
                let status = Status::ERRNO;
                let reason = format!("unmap of {handle:?}: {done} of {} GPUs, then {errno}", gpus.len());
                return Err(Failure { status, errno: crate::failure::errno_number(errno), reason });
            }
            self.free(kfd, handle)?;
        }
        Ok(())
    }

    /// Where the memory of a buffer lies, for the guest to map `size` bytes of it.
    pub fn export(&self, handle: Handle, size: u64) -> Result<(GpuId, Allocation, bool), Errno> {
        let buffer = self.buffers.get(handle).ok_or(Errno::EINVAL)?;
        if !buffer.is_mappable() {
            return Err(Errno::EPERM);
        }
        if size == 0 || size > buffer.size || !size.is_multiple_of(PAGE) {
            return Err(Errno::EINVAL);
        }
        Ok((buffer.gpu_id, buffer.allocation, matches!(buffer.backing, Backing::Vram { .. })))
    }
}

fn bad_handle(handle: Handle) -> Failure {
    Failure::new(Status::BAD_HANDLE, format!("handle {:#x} names no buffer", handle.0))
}

/// What a buffer uses of each limit.
#[derive(Clone, Copy, Default)]
struct Cost {
    vram: u64,
    system: u64,
    gtt: u64,
    runs: u32,
}

fn cost(buffer: &Buffer) -> Cost {
    let size = buffer.size;
    match buffer.backing {
        Backing::Vram { .. } => Cost { vram: size, ..Default::default() },
        Backing::Gtt => Cost { system: size, gtt: size, ..Default::default() },
        Backing::Guest { runs, .. } => Cost { system: size, runs, ..Default::default() },
    }
}

/// Refuses what would go over a limit.
fn within(what: &str, used: u64, more: u64, limit: u64) -> Result<(), Failure> {
    match used.checked_add(more) {
        Some(sum) if sum <= limit => Ok(()),
        _ => Err(Failure::limit(format!("AllocMemory: {used} {what} are used, {more} more go over {limit}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_inclusive_and_do_not_overflow() {
        assert!(within("x", 3, 4, 7).is_ok());
        assert_eq!(within("x", 3, 5, 7).unwrap_err().status, Status::LIMIT);
        assert_eq!(within("x", 1, u64::MAX, u64::MAX).unwrap_err().status, Status::LIMIT);
        assert!(within("x", 0, u64::MAX, u64::MAX).is_ok());
    }
}
