//! Memory of the GPU: allocate, map, unmap, free.

use kfd_abi::memory::{
    AllocFlags, AllocMemoryOfGpuArgs, FreeMemoryOfGpuArgs, GetAvailableMemoryArgs, MMIO_REMAP_SIZE,
    MapMemoryToGpuArgs, UnmapMemoryFromGpuArgs,
};
use kfd_abi::mmap::{self, MmapType};
use kfd_abi::queue::DOORBELL_SLICE_SIZE_GFX9;
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;

use std::sync::Arc;

use super::Call;
use crate::arena::{Arena, PAGE, page_align};
use crate::ledger::Charge;
use crate::object::{Content, OBJECT_FLAGS, Object, Piece};
use crate::page_flags;
use crate::process::{Buffer, Device, DeviceState, MAX_BUFFERS, Process, State};
use crate::space::{AddressSpace, Mapping};
use crate::user;

/// GPU ids in one MAP or UNMAP: as many as fit into the kernel's largest allocation of 4 MiB.
const MAX_DEVICES: u32 = (4 << 20) / 4;

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
    pub fn whole(self) -> u64 {
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
            let svm = |state: &State, start| state.svm.overlap(start, arguments.size);
            let unplaced = arguments.va_addr == 0 && flags.contains(AllocFlags::VRAM);
            {
                let state = self.process.state();
                let user = flags.contains(AllocFlags::USERPTR) && svm(&state, arguments.mmap_offset);
                if user || (!unplaced && svm(&state, arguments.va_addr)) {
                    return Err(Errno::EADDRINUSE);
                }
            }
            let (index, device) = self.process.device(arguments.gpu_id)?;
            if flags.contains(AllocFlags::PUBLIC | AllocFlags::VRAM) && !device.gpu.memory.large_bar() {
                return Err(Errno::EINVAL);
            }
            let mut state = self.process.state();
            state.bound(index, Errno::ENODEV)?;
            let request =
                Request { va: arguments.va_addr, size: arguments.size, user: arguments.mmap_offset, flags };
            let object = Arc::new(allocate(self.process, &mut state, index, device, &request)?);
            let mmap_offset =
                if flags.contains(AllocFlags::MMIO_REMAP) && !flags.contains(AllocFlags::DOORBELL) {
                    mmap::offset(MmapType::Mmio, arguments.gpu_id)
                } else {
                    object.mmap_offset
                };
            // The doorbell slice and the MMIO page are shared by all their buffers, and mapped through /dev/kfd.
            if !matches!(object.content(), Content::Registers { .. }) {
                state.device(index)?.register(&object);
            }
            let number = adopt(&mut state, index, Buffer::new(request.va, object, flags))?;
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
            let (index, _) = self.process.device(handle.gpu_id)?;
            let buffers = &mut state.device(index)?.buffers;
            if !buffers.get(handle.number).ok_or(Errno::EINVAL)?.mapped.is_empty() {
                return Err(Errno::EBUSY);
            }
            let buffer = buffers.remove(handle.number).ok_or(Errno::EINVAL)?;
            let own = state.device(index)?.drm_file;
            if let Some(drm) = own.and_then(|file| state.drm_files.get_mut(&file)) {
                drm.revoke(buffer.object.id);
            }
            for device in buffer.attached.iter().filter_map(|index| self.process.devices.get(*index)) {
                device.space_mut().remove(buffer.object.id);
            }
            Ok(())
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
            let (index, _) = self.process.device(arguments.gpu_id)?;
            self.process.graveyard.sweep();
            arguments.available = self.process.ledger.available(index)?;
            Ok(())
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
) -> Result<Object> {
    let flags = request.flags;
    if flags.contains(AllocFlags::DOORBELL) {
        if request.size != DOORBELL_SLICE_SIZE_GFX9 {
            return Err(Errno::EINVAL);
        }
    } else if flags.contains(AllocFlags::MMIO_REMAP) && request.size != MMIO_REMAP_SIZE {
        return Err(Errno::EINVAL);
    }
    if !flags.intersects(AllocFlags::KINDS) {
        return Err(Errno::EINVAL);
    }
    let kind = flags.intersection(AllocFlags::KINDS);
    let kind = match () {
        () if kind.contains(AllocFlags::VRAM) => AllocFlags::VRAM,
        () if kind.contains(AllocFlags::GTT) => AllocFlags::GTT,
        () if kind.contains(AllocFlags::USERPTR) => AllocFlags::USERPTR,
        () if kind.contains(AllocFlags::DOORBELL) => AllocFlags::DOORBELL,
        () => AllocFlags::MMIO_REMAP,
    };
    if kind == AllocFlags::USERPTR && request.user == 0 {
        return Err(Errno::EINVAL);
    }
    let size = if flags.contains(AllocFlags::AQL_QUEUE_MEM) { request.size >> 1 } else { request.size };
    let size = page_align(size).ok_or(Errno::ENOMEM)?;
    if size == 0 {
        return Err(Errno::EINVAL);
    }
    let cached = flags & OBJECT_FLAGS;
    let object = |offset, content| Object::new(Some(index), size, offset, content, &process.graveyard);
    if kind == AllocFlags::VRAM || kind == AllocFlags::GTT {
        let piece = take_piece(process, index, device, size, kind | cached)?;
        return Ok(object(piece.offset, Content::Piece(piece)));
    }
    if kind == AllocFlags::USERPTR {
        let charge = Charge { system: size, ..Charge::default() };
        process.ledger.take(&charge)?;
        // Pages are what the GPU maps.
        let address = request.user - request.user % PAGE;
        let content = Content::User { address, flags: cached, charge, ledger: process.ledger.clone() };
        // From here on a failure gives back what was taken.
        let object = object(state.device(index)?.fake_offset(), content);
        user::check(request.user, size)?;
        return Ok(object);
    }
    let own = state.device(index)?;
    let offset = match kind {
        AllocFlags::DOORBELL => doorbells(own, &device.arena)?,
        _ => mmio(own, &device.arena)?,
    };
    let content = Content::Registers { arena: device.arena.clone(), offset, flags: kind | cached };
    Ok(object(offset, content))
}

/// VRAM or GTT of a GPU, with what it costs taken; `flags` has the kind.
///
/// # Errors
/// `ENOMEM` when there is not enough.
pub(crate) fn take_piece(
    process: &Process,
    index: usize,
    device: &Device,
    size: u64,
    flags: AllocFlags,
) -> Result<Piece> {
    let charge = if flags.contains(AllocFlags::VRAM) {
        Charge { vram: Some((index, size)), ..Charge::default() }
    } else {
        Charge { system: size, driver: size, vram: None }
    };
    let ledger = &process.ledger;
    process.graveyard.sweep_some();
    ledger.take(&charge).or_else(|_| {
        process.graveyard.sweep();
        ledger.take(&charge)
    })?;
    let offset = device.arena.allocate(size).or_else(|_| {
        process.graveyard.sweep();
        device.arena.allocate(size)
    });
    let offset = offset.inspect_err(|_| ledger.give(&charge))?;
    let (arena, ledger) = (device.arena.clone(), ledger.clone());
    Ok(Piece::new(arena, offset, size, flags, charge, ledger))
}

/// Makes a buffer one of GPU `index`'s, with a number, and lets the CPU map it.
///
/// # Errors
/// `ENOMEM` when there are too many.
pub(super) fn adopt(state: &mut State, index: usize, buffer: Buffer) -> Result<u32> {
    let object = buffer.object.id;
    let own = state.device(index)?;
    let number = own.buffers.insert(buffer, MAX_BUFFERS).ok_or(Errno::ENOMEM)?;
    let file = own.drm_file;
    if let Some(drm) = file.and_then(|file| state.drm_files.get_mut(&file)) {
        drm.allow(object);
    }
    Ok(number)
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
    let mut space = device.space_mut();
    if !buffer.attached.contains(&target) {
        attach(process, buffer, target, &mut space)?;
    }
    let mapping = Mapping {
        size: buffer.object.size,
        backing: buffer.object.backing(),
        object: buffer.object.id,
        flags: page_flags::of_kfd(buffer, target, &device.gpu),
    };
    space.map(buffer.va, mapping.clone())?;
    if buffer.is_doubled() {
        let second = buffer.va.checked_add(buffer.object.size).ok_or(Errno::EINVAL);
        if let Err(errno) = second.and_then(|second| space.map(second, mapping)) {
            space.unmap(buffer.va, buffer.object.id)?;
            return Err(errno);
        }
    }
    buffer.mapped.push(target);
    Ok(())
}

/// `kfd_mem_attach`: lets a GPU's page table have the buffer.
fn attach(process: &Process, buffer: &mut Buffer, target: usize, space: &mut AddressSpace) -> Result<()> {
    if buffer.va == 0 {
        return Err(Errno::EINVAL);
    }
    let owner = buffer.object.gpu;
    let local = AllocFlags::VRAM | AllocFlags::DOORBELL | AllocFlags::MMIO_REMAP;
    let reaches = |owner| process.peers(owner, target, buffer.object.is_vram());
    if buffer.object.flags().intersects(local) && !owner.is_some_and(reaches) {
        return Err(Errno::EINVAL);
    }
    space.add(buffer.object.id);
    buffer.attached.push(target);
    Ok(())
}

/// `amdgpu_amdkfd_gpuvm_unmap_memory_from_gpu`.
fn unmap(buffer: &mut Buffer, target: usize, device: &Device) -> Result<()> {
    let place = buffer.mapped.iter().position(|index| *index == target).ok_or(Errno::EINVAL)?;
    let mut space = device.space_mut();
    // unmap_bo_from_gpuvm
    if space.is_held(buffer.object.id) {
        return Err(Errno::EBUSY);
    }
    buffer.mapped.swap_remove(place);
    // The render node's GEM_VA may have taken them away.
    let _ = space.unmap(buffer.va, buffer.object.id);
    if buffer.is_doubled()
        && let Some(second) = buffer.va.checked_add(buffer.object.size)
    {
        let _ = space.unmap(second, buffer.object.id);
    }
    Ok(())
}
