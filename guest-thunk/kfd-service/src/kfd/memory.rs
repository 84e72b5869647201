//! Buffers.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use guest_thunk::thunk::lock::lock;
use guest_thunk::thunk::memory::buffer::{Buffer as Vram, Part};
use guest_thunk::transport::Blob;
use kfd_abi::memory::{
    AllocFlags, AllocMemoryOfGpuArgs, FreeMemoryOfGpuArgs, GetAvailableMemoryArgs, MapMemoryToGpuArgs,
    UnmapMemoryFromGpuArgs,
};
use kfd_abi::mmap::{self, MmapType};
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{AllocMemory, AvailableMemory, FreeMemory, MapMemory, UnmapMemory};
use virtio_kfd_protocol::limits::MAX_GPUS;
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferRequest, Features, GpuId, GpuRequest, GuestVa, Handle, MapMemoryAnswer,
};

use super::Call;
use crate::buffers::{Buffer, Memory, PAGE, State};
use crate::failure::{errno, refused, transport};
use crate::fresh;

/// Bytes from which on an allocation is compared with what the guest has left.
const LARGE: u64 = 64 << 20;

impl Call<'_> {
    pub(super) fn alloc_memory_of_gpu(&self) -> Result<i32> {
        self.run(|arguments: &mut AllocMemoryOfGpuArgs| {
            let gpu = self.kfd.gpu(arguments.gpu_id).ok_or(Errno::EINVAL)?.gpu_id;
            if arguments.size == 0 || !arguments.size.is_multiple_of(PAGE) {
                return Err(Errno::EINVAL);
            }
            let flags = AllocFlags::from_bits_retain(arguments.flags);
            let buffer = match flags.intersection(AllocFlags::KINDS) {
                AllocFlags::VRAM => self.vram(gpu, flags, arguments)?,
                AllocFlags::GTT => self.system(gpu, flags, arguments)?,
                AllocFlags::USERPTR => self.user(gpu, flags, arguments)?,
                AllocFlags::DOORBELL => self.doorbells(gpu, flags, arguments)?,
                // The registers' page is the host process's alone.
                AllocFlags::MMIO_REMAP => return Err(Errno::EOPNOTSUPP),
                _ => return Err(Errno::EINVAL),
            };
            if !flags.contains(AllocFlags::USERPTR) {
                arguments.mmap_offset = match buffer.memory {
                    Memory::Doorbells => mmap::offset(MmapType::Doorbell, gpu.0),
                    _ => buffer.offset,
                };
            }
            arguments.handle = self.kfd.buffers.insert(buffer);
            Ok(())
        })
    }

    /// Has the host make a buffer.
    fn make(&self, request: &AllocMemoryRequest) -> Result<(Handle, bool)> {
        let (answer, _) = self.kfd.client.call::<AllocMemory>(request, &[], 0).map_err(errno)?;
        Ok((answer.handle, answer.mappable != 0))
    }

    fn vram(&self, gpu: GpuId, flags: AllocFlags, arguments: &AllocMemoryOfGpuArgs) -> Result<Buffer> {
        let shown = self.kfd.client.features().contains(Features::HOST_BLOBS);
        if flags.contains(AllocFlags::PUBLIC) && !shown {
            // As KFD answers where VRAM is not all visible to the CPU.
            return Err(Errno::ENOMEM);
        }
        let request = request(gpu, flags, arguments);
        let (host, mappable) = self.make(&request)?;
        let public = flags.contains(AllocFlags::PUBLIC);
        let size = bytes(flags, arguments.size);
        let memory = Memory::Vram(Part::whole(Vram::new(host, size, gpu, mappable && shown, public)));
        self.buffer(gpu, flags, arguments, host, memory)
    }

    /// KFD's own memory: memory of the guest.
    fn system(&self, gpu: GpuId, flags: AllocFlags, arguments: &AllocMemoryOfGpuArgs) -> Result<Buffer> {
        let blob = self.guest_memory(flags, arguments.size)?;
        self.guest(gpu, flags, arguments, blob)
    }

    /// Memory of the process: the thunk's own, that nobody has used yet.
    fn user(&self, gpu: GpuId, flags: AllocFlags, arguments: &AllocMemoryOfGpuArgs) -> Result<Buffer> {
        let at = arguments.mmap_offset;
        if !at.is_multiple_of(PAGE) {
            return Err(Errno::EINVAL);
        }
        // Memory of the application has other addresses on GPUs.
        if at != arguments.va_addr || !fresh::is_fresh(at, bytes(flags, arguments.size))? {
            return Err(Errno::EOPNOTSUPP);
        }
        let ordinary = self.kfd.client.ordinary_memory(bytes(flags, arguments.size));
        let blob = match ordinary {
            Some(blob) => Arc::from(blob),
            None => self.guest_memory(flags, arguments.size)?,
        };
        let buffer = self.guest(gpu, flags, arguments, Arc::clone(&blob))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let size = blob.size();
        if let Err(error) = blob.map_fixed(GuestVa(at), size, protection) {
            let handle = lock(&buffer.state).host;
            let _ = self.kfd.client.call::<FreeMemory>(&BufferRequest { handle }, &[], 0);
            return Err(transport(error));
        }
        fresh::keep_from_children(at, size);
        Ok(buffer)
    }

    fn guest_memory(&self, flags: AllocFlags, size: u64) -> Result<Arc<dyn Blob>> {
        let (client, size) = (&self.kfd.client, bytes(flags, size));
        // The guest's kernel would press all else out of memory first.
        if size >= LARGE && client.guest_memory_left().is_some_and(|left| size > left) {
            return Err(Errno::ENOMEM);
        }
        Ok(Arc::from(client.guest_memory(size).map_err(errno)?))
    }

    /// Has the host make a buffer of guest memory.
    pub(super) fn guest(
        &self,
        gpu: GpuId,
        flags: AllocFlags,
        arguments: &AllocMemoryOfGpuArgs,
        blob: Arc<dyn Blob>,
    ) -> Result<Buffer> {
        let user = flags.difference(AllocFlags::KINDS) | AllocFlags::USERPTR;
        let request = AllocMemoryRequest { resource: blob.resource(), ..request(gpu, user, arguments) };
        let (host, _) = self.make(&request)?;
        self.buffer(gpu, flags, arguments, host, Memory::Guest(blob))
    }

    fn doorbells(&self, gpu: GpuId, flags: AllocFlags, arguments: &AllocMemoryOfGpuArgs) -> Result<Buffer> {
        self.kfd.doorbells.make(gpu)?;
        let (host, _) = self.make(&request(gpu, flags, arguments))?;
        self.buffer(gpu, flags, arguments, host, Memory::Doorbells)
    }

    pub(super) fn buffer(
        &self,
        gpu: GpuId,
        flags: AllocFlags,
        arguments: &AllocMemoryOfGpuArgs,
        host: Handle,
        memory: Memory,
    ) -> Result<Buffer> {
        let size = bytes(flags, arguments.size);
        let offset = match memory {
            Memory::Doorbells => 0,
            _ if flags.contains(AllocFlags::USERPTR) => 0,
            _ => self.kfd.buffers.take_offset(size)?,
        };
        let state = Mutex::new(State { host, mapped: Vec::new(), event_page: false });
        let exported = AtomicBool::new(false);
        Ok(Buffer { gpu, va: arguments.va_addr, size, flags, offset, memory, exported, state })
    }

    pub(super) fn free_memory_of_gpu(&self) -> Result<i32> {
        self.run(|arguments: &mut FreeMemoryOfGpuArgs| {
            let buffer = self.kfd.buffers.find(arguments.handle)?;
            let state = lock(&buffer.state);
            if !state.mapped.is_empty() {
                return Err(Errno::EBUSY);
            }
            let client = &self.kfd.client;
            match &buffer.memory {
                // A dma-buf of it may be in use.
                Memory::Vram(part) => {
                    part.buffer.release(client).map_err(|refusal| refused(&refusal, Errno::EINVAL))?;
                }
                Memory::Imported(source) => {
                    source.release(client).map_err(|refusal| refused(&refusal, Errno::EINVAL))?;
                }
                Memory::Guest(_) | Memory::Doorbells => {
                    let handle = state.host;
                    client.call::<FreeMemory>(&BufferRequest { handle }, &[], 0).map_err(errno)?;
                }
            }
            self.kfd.buffers.remove(arguments.handle);
            Ok(())
        })
    }

    /// The GPUs of a list that are still to be done.
    fn gpus(&self, pointer: u64, count: u32, done: u32) -> Result<Vec<GpuId>> {
        let count = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
        let done = usize::try_from(done).map_err(|_| Errno::EINVAL)?;
        if count == 0 || done > count {
            return Err(Errno::EINVAL);
        }
        let ids = UserMemory.read_array::<u32>(UserPtr(pointer), count, MAX_GPUS)?;
        Ok(ids.into_iter().skip(done).map(GpuId).collect())
    }

    pub(super) fn map_memory_to_gpu(&self) -> Result<i32> {
        self.run(|arguments: &mut MapMemoryToGpuArgs| {
            let gpus = self.gpus(arguments.device_ids_array_ptr, arguments.n_devices, arguments.n_success)?;
            let buffer = self.kfd.buffers.find(arguments.handle)?;
            let mut state = lock(&buffer.state);
            let answer = match &buffer.memory {
                Memory::Imported(source) => self.map_ranges(&buffer, source, &gpus),
                _ => {
                    let handle = BufferRequest { handle: state.host };
                    self.kfd.client.call::<MapMemory>(&handle, &gpus, 0).map_err(errno)?.0
                }
            };
            let done = done(&gpus, answer);
            let new = done.iter().filter(|gpu| !state.mapped.contains(gpu)).copied().collect::<Vec<_>>();
            state.mapped.extend(new);
            arguments.n_success = arguments.n_success.saturating_add(answer.n_success);
            ended(answer)
        })
    }

    pub(super) fn unmap_memory_from_gpu(&self) -> Result<i32> {
        self.run(|arguments: &mut UnmapMemoryFromGpuArgs| {
            let gpus = self.gpus(arguments.device_ids_array_ptr, arguments.n_devices, arguments.n_success)?;
            let buffer = self.kfd.buffers.find(arguments.handle)?;
            let mut state = lock(&buffer.state);
            let answer = match &buffer.memory {
                Memory::Imported(source) => self.unmap_ranges(&buffer, source, &gpus),
                _ => {
                    let handle = BufferRequest { handle: state.host };
                    self.kfd.client.call::<UnmapMemory>(&handle, &gpus, 0).map_err(errno)?.0
                }
            };
            let done = done(&gpus, answer).to_vec();
            state.mapped.retain(|gpu| !done.contains(gpu));
            arguments.n_success = arguments.n_success.saturating_add(answer.n_success);
            ended(answer)
        })
    }

    pub(super) fn available_memory(&self) -> Result<i32> {
        self.run(|arguments: &mut GetAvailableMemoryArgs| {
            let gpu_id = self.kfd.gpu(arguments.gpu_id).ok_or(Errno::EINVAL)?.gpu_id;
            let request = GpuRequest { gpu_id, pad: 0 };
            let (answer, _) = self.kfd.client.call::<AvailableMemory>(&request, &[], 0).map_err(errno)?;
            arguments.available = answer.available;
            Ok(())
        })
    }
}

/// Bytes of memory: an AQL ring has twice as many addresses.
fn bytes(flags: AllocFlags, addresses: u64) -> u64 {
    if flags.contains(AllocFlags::AQL_QUEUE_MEM) { addresses / 2 } else { addresses }
}

fn request(gpu_id: GpuId, flags: AllocFlags, arguments: &AllocMemoryOfGpuArgs) -> AllocMemoryRequest {
    AllocMemoryRequest {
        va: GuestVa(arguments.va_addr),
        size: arguments.size,
        gpu_id,
        flags: flags.bits(),
        ..Default::default()
    }
}

fn done(gpus: &[GpuId], answer: MapMemoryAnswer) -> &[GpuId] {
    let count = usize::try_from(answer.n_success).unwrap_or(usize::MAX);
    gpus.get(..count).unwrap_or(gpus)
}

fn ended(answer: MapMemoryAnswer) -> Result<()> {
    match answer.errno {
        0 => Ok(()),
        errno => Err(i32::try_from(errno).map_or(Errno::EIO, Errno::from_raw)),
    }
}
