//! Memory of the GPU: allocate, map, unmap, free.

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::memory::{
    AllocFlags, AllocMemoryOfGpuArgs, ExportDmabufArgs, FreeMemoryOfGpuArgs, GetAvailableMemoryArgs,
    GetDmabufInfoArgs, ImportDmabufArgs, MMIO_REMAP_SIZE, MapMemoryToGpuArgs, UnmapMemoryFromGpuArgs,
};
use kfd_abi::mmap::{self, MmapType};
use kfd_abi::queue::DOORBELL_SLICE_SIZE_GFX9;
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;

use super::Call;
use crate::arena::{Arena, PAGE, page_align};
use crate::process::{Buffer, Device, DeviceState, MAX_BUFFERS, Process, State};
use crate::space::{Backing, Mapping};
use crate::user;

/// GPU ids in one MAP or UNMAP: as many as fit into the kernel's largest allocation of 4 MiB.
const MAX_DEVICES: u32 = (4 << 20) / 4;

/// Kinds of memory that a render node's `mmap` knows.
const MAPPED_BY_RENDER_NODE: AllocFlags = AllocFlags::VRAM.union(AllocFlags::GTT).union(AllocFlags::USERPTR);

/// Content of a fresh doorbell: no queue is rung.
const IDLE_DOORBELLS: u8 = 0xff;

/// A buffer's handle, apart: `GET_GPU_ID`, `GET_IDR_HANDLE`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle {
    /// Which GPU.
    pub gpu_id: u32,
    /// Which of its buffers.
    pub number: u32,
}

impl From<u64> for Handle {
    fn from(handle: u64) -> Self {
        Self { gpu_id: (handle >> 32) as u32, number: (handle & 0xffff_ffff) as u32 }
    }
}

impl Handle {
    /// `MAKE_HANDLE`.
    fn whole(self) -> u64 {
        (u64::from(self.gpu_id) << 32) | u64::from(self.number)
    }
}

impl Call<'_> {
    /// `kfd_ioctl_alloc_memory_of_gpu`.
    pub(super) fn alloc_memory_of_gpu(&self) -> Result<i32> {
        self.run(|arguments: &mut AllocMemoryOfGpuArgs| {
            if arguments.size == 0 {
                return Err(Errno::EINVAL);
            }
            let flags = AllocFlags::from_bits_retain(arguments.flags);
            let (index, device) = self.process.device(arguments.gpu_id)?;
            if flags.contains(AllocFlags::PUBLIC | AllocFlags::VRAM) && !device.gpu.memory.large_bar() {
                return Err(Errno::EINVAL);
            }
            let mut state = self.process.state();
            state.bound(index, Errno::ENODEV)?;
            let request =
                Request { va: arguments.va_addr, size: arguments.size, user: arguments.mmap_offset, flags };
            let buffer = allocate(self.process, &mut state, index, device, &request)?;
            let mmap_offset =
                if flags.contains(AllocFlags::MMIO_REMAP) && !flags.contains(AllocFlags::DOORBELL) {
                    mmap::offset(MmapType::Mmio, arguments.gpu_id)
                } else {
                    buffer.mmap_offset
                };
            let Some(number) = state.device(index)?.buffers.insert(buffer.clone(), MAX_BUFFERS) else {
                release(&mut state, index, device, &buffer)?;
                return Err(Errno::ENOMEM);
            };
            // The doorbell slice and the MMIO page are shared by all their buffers, and mapped through /dev/kfd.
            if buffer.flags.intersects(MAPPED_BY_RENDER_NODE) {
                state.device(index)?.by_offset.insert(buffer.mmap_offset, number);
            }
            arguments.handle = Handle { gpu_id: arguments.gpu_id, number }.whole();
            arguments.mmap_offset = mmap_offset;
            Ok(())
        })
    }

    /// `kfd_ioctl_free_memory_of_gpu`.
    pub(super) fn free_memory_of_gpu(&self) -> Result<i32> {
        self.run(|arguments: &mut FreeMemoryOfGpuArgs| {
            let mut state = self.process.state();
            if state.event_page == Some(arguments.handle) {
                return Err(Errno::EPERM);
            }
            let handle = Handle::from(arguments.handle);
            let (index, device) = self.process.device(handle.gpu_id)?;
            let buffers = &mut state.device(index)?.buffers;
            if !buffers.get(handle.number).ok_or(Errno::EINVAL)?.mapped.is_empty() {
                return Err(Errno::EBUSY);
            }
            let buffer = buffers.remove(handle.number).ok_or(Errno::EINVAL)?;
            state.device(index)?.by_offset.remove(&buffer.mmap_offset);
            release(&mut state, index, device, &buffer)
        })
    }

    /// `kfd_ioctl_map_memory_to_gpu`.
    pub(super) fn map_memory_to_gpu(&self) -> Result<i32> {
        self.run(|arguments: &mut MapMemoryToGpuArgs| {
            let gpus = gpu_list(arguments.device_ids_array_ptr, arguments.n_devices, arguments.n_success)?;
            let handle = Handle::from(arguments.handle);
            let (owner, _) = self.process.device(handle.gpu_id)?;
            let mut state = self.process.state();
            state.bound(owner, Errno::ENODEV)?.buffers.get(handle.number).ok_or(Errno::ENOMEM)?;
            for gpu_id in gpus.iter().skip(arguments.n_success as usize) {
                let (target, device) = self.process.device(*gpu_id)?;
                state.bound(target, Errno::ENODEV)?;
                map(self.process, &mut state, owner, handle.number, target, device)?;
                arguments.n_success = arguments.n_success.saturating_add(1);
            }
            Ok(())
        })
    }

    /// `kfd_ioctl_unmap_memory_from_gpu`.
    pub(super) fn unmap_memory_from_gpu(&self) -> Result<i32> {
        self.run(|arguments: &mut UnmapMemoryFromGpuArgs| {
            let gpus = gpu_list(arguments.device_ids_array_ptr, arguments.n_devices, arguments.n_success)?;
            let handle = Handle::from(arguments.handle);
            let (owner, _) = self.process.device(handle.gpu_id)?;
            let mut state = self.process.state();
            let buffer = state.device(owner)?.buffers.get_mut(handle.number).ok_or(Errno::ENOMEM)?;
            for gpu_id in gpus.iter().skip(arguments.n_success as usize) {
                let (target, device) = self.process.device(*gpu_id)?;
                unmap(buffer, target, device)?;
                arguments.n_success = arguments.n_success.saturating_add(1);
            }
            Ok(())
        })
    }

    /// `kfd_ioctl_get_available_memory`.
    pub(super) fn available_memory(&self) -> Result<i32> {
        self.run(|arguments: &mut GetAvailableMemoryArgs| {
            let (index, device) = self.process.device(arguments.gpu_id)?;
            let limits = &self.process.limits;
            let vram = device.gpu.memory.vram_bytes();
            arguments.available = self.process.state().device(index)?.available(vram, limits);
            Ok(())
        })
    }

    /// `kfd_ioctl_get_dmabuf_info`: there are no dma-bufs of this driver, so every descriptor is something else.
    pub(super) fn get_dmabuf_info(&self) -> Result<i32> {
        self.run(|arguments: &mut GetDmabufInfoArgs| {
            let without_gpu = self.process.devices.is_empty();
            let open = without_gpu || self.descriptors.find(arguments.dmabuf_fd).is_some();
            Err(if open { Errno::EINVAL } else { Errno::EBADF })
        })
    }

    /// `kfd_ioctl_import_dmabuf`.
    pub(super) fn import_dmabuf(&self) -> Result<i32> {
        self.run(|arguments: &mut ImportDmabufArgs| {
            let (index, _) = self.process.device(arguments.gpu_id)?;
            self.process.state().bound(index, Errno::ENODEV)?;
            Err(Errno::EOPNOTSUPP)
        })
    }

    /// `kfd_ioctl_export_dmabuf`.
    pub(super) fn export_dmabuf(&self) -> Result<i32> {
        self.run(|arguments: &mut ExportDmabufArgs| {
            let handle = Handle::from(arguments.handle);
            let (index, _) = self.process.device(handle.gpu_id)?;
            let mut state = self.process.state();
            state.device(index)?.buffers.get(handle.number).ok_or(Errno::EINVAL)?;
            Err(Errno::EOPNOTSUPP)
        })
    }
}

/// The GPU ids of a MAP or UNMAP.
fn gpu_list(pointer: u64, count: u32, done: u32) -> Result<Vec<u32>> {
    if count == 0 || done > count {
        return Err(Errno::EINVAL);
    }
    if count > MAX_DEVICES {
        return Err(Errno::ENOMEM);
    }
    UserMemory.read_array(UserPtr(pointer), count as usize, MAX_DEVICES as usize)
}

/// What ALLOC_MEMORY_OF_GPU asks for.
struct Request {
    va: u64,
    size: u64,
    /// CPU address of a user pointer.
    user: u64,
    flags: AllocFlags,
}

/// `amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu`: one kind of memory counts, in this order.
fn allocate(
    process: &Process,
    state: &mut State,
    index: usize,
    device: &Device,
    request: &Request,
) -> Result<Buffer> {
    let flags = request.flags;
    if flags.contains(AllocFlags::DOORBELL) {
        if request.size != DOORBELL_SLICE_SIZE_GFX9 {
            return Err(Errno::EINVAL);
        }
    } else if flags.contains(AllocFlags::MMIO_REMAP) && request.size != MMIO_REMAP_SIZE {
        return Err(Errno::EINVAL);
    }
    let size = if flags.contains(AllocFlags::AQL_QUEUE_MEM) { request.size >> 1 } else { request.size };
    let size = page_align(size).ok_or(Errno::ENOMEM)?;
    if size == 0 {
        return Err(Errno::EINVAL);
    }
    let buffer = |backing, mmap_offset| Buffer {
        va: request.va,
        size,
        flags,
        backing,
        mmap_offset,
        mapped: Vec::new(),
    };
    let of_arena = |offset| Backing::Arena { arena: device.arena.clone(), offset };
    if flags.contains(AllocFlags::VRAM) {
        let vram = device.gpu.memory.vram_bytes();
        let own = state.device(index)?;
        own.take_vram(size, vram, &process.limits)?;
        let offset = device.arena.allocate(size).inspect_err(|_| own.give_vram(size))?;
        return Ok(buffer(of_arena(offset), offset));
    }
    if flags.contains(AllocFlags::GTT) {
        take_system(process, state, size, size)?;
        let offset = device.arena.allocate(size).inspect_err(|_| give_system(state, size, size))?;
        return Ok(buffer(of_arena(offset), offset));
    }
    if flags.contains(AllocFlags::USERPTR) {
        if request.user == 0 {
            return Err(Errno::EINVAL);
        }
        take_system(process, state, size, 0)?;
        user::check(request.user, size).inspect_err(|_| give_system(state, size, 0))?;
        let offset = state.device(index)?.fake_offset();
        // Pages are what the GPU maps.
        return Ok(buffer(Backing::User(request.user - request.user % PAGE), offset));
    }
    if flags.contains(AllocFlags::DOORBELL) {
        let offset = doorbells(state.device(index)?, &device.arena)?;
        return Ok(buffer(of_arena(offset), offset));
    }
    if flags.contains(AllocFlags::MMIO_REMAP) {
        let offset = mmio(state.device(index)?, &device.arena)?;
        return Ok(buffer(of_arena(offset), offset));
    }
    Err(Errno::EINVAL)
}

/// Gives back what a buffer that is mapped nowhere has.
fn release(state: &mut State, index: usize, device: &Device, buffer: &Buffer) -> Result<()> {
    let flags = buffer.flags;
    if flags.contains(AllocFlags::VRAM) {
        state.device(index)?.give_vram(buffer.size);
        device.arena.free(buffer.mmap_offset, buffer.size);
    } else if flags.contains(AllocFlags::GTT) {
        give_system(state, buffer.size, buffer.size);
        device.arena.free(buffer.mmap_offset, buffer.size);
    } else if flags.contains(AllocFlags::USERPTR) {
        give_system(state, buffer.size, 0);
    }
    // The doorbell slice and the MMIO page stay as long as the process.
    Ok(())
}

fn take_system(process: &Process, state: &mut State, size: u64, of_driver: u64) -> Result<()> {
    let system = state.system_used.checked_add(size).ok_or(Errno::ENOMEM)?;
    let driver = state.driver_used.checked_add(of_driver).ok_or(Errno::ENOMEM)?;
    if system > process.limits.system || driver > process.limits.driver {
        return Err(Errno::ENOMEM);
    }
    state.system_used = system;
    state.driver_used = driver;
    Ok(())
}

fn give_system(state: &mut State, size: u64, of_driver: u64) {
    state.system_used = state.system_used.saturating_sub(size);
    state.driver_used = state.driver_used.saturating_sub(of_driver);
}

/// The process's doorbell slice, made at the first use (`kfd_get_process_doorbells`).
pub(crate) fn doorbells(state: &mut DeviceState, arena: &Arena) -> Result<u64> {
    if let Some(offset) = state.doorbells {
        return Ok(offset);
    }
    let offset = arena.allocate(DOORBELL_SLICE_SIZE_GFX9)?;
    arena.write(offset, &[IDLE_DOORBELLS; DOORBELL_SLICE_SIZE_GFX9 as usize])?;
    state.doorbells = Some(offset);
    Ok(offset)
}

/// The page of remapped registers, made at the first use.
pub(crate) fn mmio(state: &mut DeviceState, arena: &Arena) -> Result<u64> {
    if let Some(offset) = state.mmio {
        return Ok(offset);
    }
    let offset = arena.allocate(MMIO_REMAP_SIZE)?;
    state.mmio = Some(offset);
    Ok(offset)
}

/// `get_pte_flags`, the permissions.
fn page_flags(flags: AllocFlags) -> VmPageFlags {
    let mut page = VmPageFlags::PAGE_READABLE;
    page.set(VmPageFlags::PAGE_WRITEABLE, flags.contains(AllocFlags::WRITABLE));
    page.set(VmPageFlags::PAGE_EXECUTABLE, flags.contains(AllocFlags::EXECUTABLE));
    page
}

/// `amdgpu_amdkfd_gpuvm_map_memory_to_gpu`: a buffer that is mapped already stays so.
fn map(
    process: &Process,
    state: &mut State,
    owner: usize,
    number: u32,
    target: usize,
    device: &Device,
) -> Result<()> {
    let buffer = state.device(owner)?.buffers.get_mut(number).ok_or(Errno::ENOMEM)?;
    if buffer.mapped.contains(&target) {
        return Ok(());
    }
    if buffer.va == 0 {
        return Err(Errno::EINVAL);
    }
    let vram = buffer.flags.contains(AllocFlags::VRAM);
    let local = AllocFlags::VRAM | AllocFlags::DOORBELL | AllocFlags::MMIO_REMAP;
    if buffer.flags.intersects(local) && !process.peers(owner, target, vram) {
        return Err(Errno::EINVAL);
    }
    let mapping =
        Mapping { size: buffer.size, backing: buffer.backing.clone(), flags: page_flags(buffer.flags) };
    let mut space = device.space_mut();
    space.map(buffer.va, mapping.clone())?;
    if buffer.is_doubled() {
        let second = buffer.va.checked_add(buffer.size).ok_or(Errno::EINVAL);
        if let Err(errno) = second.and_then(|second| space.map(second, mapping)) {
            space.unmap(buffer.va);
            return Err(errno);
        }
    }
    buffer.mapped.push(target);
    Ok(())
}

/// `amdgpu_amdkfd_gpuvm_unmap_memory_from_gpu`.
fn unmap(buffer: &mut Buffer, target: usize, device: &Device) -> Result<()> {
    let place = buffer.mapped.iter().position(|index| *index == target).ok_or(Errno::EINVAL)?;
    buffer.mapped.swap_remove(place);
    let mut space = device.space_mut();
    space.unmap(buffer.va);
    if buffer.is_doubled()
        && let Some(second) = buffer.va.checked_add(buffer.size)
    {
        space.unmap(second);
    }
    Ok(())
}
