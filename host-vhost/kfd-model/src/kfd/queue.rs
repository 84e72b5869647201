//! Queues.

mod buffers;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use buffers::{Buffers, is_compute};
use kfd_abi::mmap::{self, MmapType};
use kfd_abi::queue::{
    AllocQueueGwsArgs, CreateQueueArgs, DestroyQueueArgs, GetQueueWaveStateArgs, KFD_IOC_QUEUE_TYPE_COMPUTE,
    KFD_IOC_QUEUE_TYPE_COMPUTE_AQL, KFD_IOC_QUEUE_TYPE_SDMA, KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID,
    KFD_IOC_QUEUE_TYPE_SDMA_XGMI, KFD_MAX_QUEUE_PERCENTAGE, KFD_MAX_QUEUE_PRIORITY, KFD_MIN_QUEUE_RING_SIZE,
    QUEUE_PERCENTAGE_MASK, SetCuMaskArgs, UpdateQueueArgs,
};
use kfd_abi::version::minor;
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;

use super::Call;
use crate::engine::QueueAddresses;
use crate::engine::compute::Units;
use crate::engine::doorbell::ArenaDoorbell;
use crate::engine::process::{self as engine, Exceptions, RingKind};
use crate::engine::runner::Queue;
use crate::engine::slots::{MAX_QUEUES, Slot, Use};
use crate::process::{Device, State};

/// The kernel's own `ENOTSUPP`, which `errno.h` does not have.
pub const ENOTSUPP: i32 = 524;

/// End of the addresses of a process (`TASK_SIZE_MAX` with four levels of page tables).
const USER_END: u64 = 0x7fff_ffff_f000;

/// Compute units that a mask can name; what a longer one has beyond is dropped.
const MAX_CU_MASK: u32 = 1024;

/// Bytes of a doorbell.
const DOORBELL_SIZE: u64 = 8;

/// `access_ok`: the range can belong to a process.
fn access_ok(address: u64, size: u64) -> Result<()> {
    match address.checked_add(size) {
        Some(end) if end <= USER_END => Ok(()),
        _ => Err(Errno::EFAULT),
    }
}

/// The checks that CREATE_QUEUE and UPDATE_QUEUE share.
fn check_ring(address: u64, size: u32, percentage: u32, priority: u32) -> Result<()> {
    if percentage & QUEUE_PERCENTAGE_MASK > KFD_MAX_QUEUE_PERCENTAGE {
        return Err(Errno::EINVAL);
    }
    if priority > KFD_MAX_QUEUE_PRIORITY {
        return Err(Errno::EINVAL);
    }
    if address != 0 {
        access_ok(address, 8)?;
    }
    if size != 0 && !size.is_power_of_two() {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

impl Call<'_> {
    /// `kfd_ioctl_create_queue`, `set_queue_properties_from_user`.
    pub(super) fn create_queue(&self) -> Result<i32> {
        self.run(|arguments: &mut CreateQueueArgs| {
            check_ring(
                arguments.ring_base_address,
                arguments.ring_size,
                arguments.queue_percentage,
                arguments.queue_priority,
            )?;
            arguments.ring_size = arguments.ring_size.max(KFD_MIN_QUEUE_RING_SIZE);
            access_ok(arguments.read_pointer_address, 4)?;
            access_ok(arguments.write_pointer_address, 4)?;
            for optional in [arguments.eop_buffer_address, arguments.ctx_save_restore_address] {
                if optional != 0 {
                    access_ok(optional, 4)?;
                }
            }
            match arguments.queue_type {
                KFD_IOC_QUEUE_TYPE_COMPUTE
                | KFD_IOC_QUEUE_TYPE_SDMA
                | KFD_IOC_QUEUE_TYPE_COMPUTE_AQL
                | KFD_IOC_QUEUE_TYPE_SDMA_XGMI => {}
                KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID if self.process.kfd_minor >= minor::SDMA_ENGINE_ID => {}
                _ => return Err(Errno::from_raw(ENOTSUPP)),
            }
            let (index, device) = self.process.device(arguments.gpu_id)?;
            self.process.state().bound(index, Errno::ESRCH)?;
            let engines = device.gpu.engines;
            if arguments.queue_type == KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID
                && arguments.sdma_engine_id >= engines.sdma.saturating_add(engines.sdma_xgmi)
            {
                return Err(Errno::EINVAL);
            }
            self.make_queue(arguments, index, device)
        })
    }

    /// `kfd_ioctl_set_cu_mask`, `pqm_update_mqd`. Kernels that run go on where they are.
    pub(super) fn set_cu_mask(&self) -> Result<i32> {
        self.run(|arguments: &mut SetCuMaskArgs| {
            if arguments.num_cu_mask == 0 || !arguments.num_cu_mask.is_multiple_of(32) {
                return Err(Errno::EINVAL);
            }
            let words = (arguments.num_cu_mask.min(MAX_CU_MASK) / 32) as usize;
            let mask = UserMemory.read_array::<u32>(UserPtr(arguments.cu_mask_ptr), words, words)?;
            let state = self.process.state();
            let queue = state.queues.get(arguments.queue_id).ok_or(Errno::EFAULT)?;
            let device = self.process.devices.get(queue.gpu).ok_or(Errno::EFAULT)?;
            // Compute units of a workgroup processor go together: bits 2n and 2n + 1 are equal.
            let split = |word: &u32| (word ^ (word >> 1)) & 0x5555_5555 != 0;
            if device.gpu.gc_version >= [10, 0, 0] && mask.iter().any(split) {
                return Err(Errno::EINVAL);
            }
            queue.units.mask(&mask);
            Ok(())
        })
    }

    /// `pqm_get_wave_state`. No kernel is ever in the middle of its work when its queue is inactive, so that nothing
    /// is saved.
    pub(super) fn get_queue_wave_state(&self) -> Result<i32> {
        self.run(|arguments: &mut GetQueueWaveStateArgs| {
            let state = self.process.state();
            let queue = state.queues.get(arguments.queue_id).ok_or(Errno::EFAULT)?;
            let device = self.process.devices.get(queue.gpu).ok_or(Errno::EFAULT)?;
            let active = queue.active && !device.evicted.load(Ordering::Relaxed);
            if active || !queue.compute {
                return Err(Errno::EINVAL);
            }
            (arguments.ctl_stack_used_size, arguments.save_area_used_size) = (0, 0);
            // Control stack and wave state both begin at the end of the stack: where, and how much, of each.
            let header = [queue.control_stack, 0, queue.control_stack, 0];
            // get_wave_state_v9_4_3
            let several = matches!(device.gpu.gc_version, [9, 4, 3 | 4]);
            let dies = if several { device.gpu.shader.xccs } else { 1 };
            for die in 0..dies {
                let at = UserPtr(arguments.ctl_stack_address);
                let at = at.offset(u64::from(die).saturating_mul(queue.save_area.into()))?;
                UserMemory.write_struct(at, &header)?;
            }
            Ok(())
        })
    }

    /// `kfd_ioctl_alloc_queue_gws`, `pqm_set_gws`.
    pub(super) fn alloc_queue_gws(&self) -> Result<i32> {
        self.run(|arguments: &mut AllocQueueGwsArgs| {
            let mut state = self.process.state();
            let state = &mut *state;
            let queue = state.queues.get_mut(arguments.queue_id).ok_or(Errno::EINVAL)?;
            let gpu = &self.process.devices.get(queue.gpu).ok_or(Errno::EINVAL)?.gpu;
            if gpu.shader.gws == 0 {
                return Err(Errno::ENODEV);
            }
            arguments.first_gws = 0;
            let own = state.devices.get_mut(queue.gpu).ok_or(Errno::EINVAL)?;
            let wanted = arguments.num_gws != 0;
            if wanted && own.gws {
                return Err(Errno::EBUSY);
            }
            // From gfx11 on, and on MI300, there is nothing behind it, and any queue can give it back. Elsewhere the
            // kernel looks for what the queue does not have, and crashes.
            let formal = matches!(gpu.gc_version, [9, 4, 3 | 4]) || gpu.gc_version >= [11, 0, 0];
            if !wanted && (!own.gws || (!queue.gws && !formal)) {
                return Err(Errno::EINVAL);
            }
            (own.gws, queue.gws) = (wanted, wanted);
            Ok(())
        })
    }
}

/// A queue of the process (`struct queue`).
#[derive(Debug)]
pub struct ProcessQueue {
    /// Index of its GPU.
    pub gpu: usize,
    /// Its place on the GPU.
    slot: Slot,
    /// It runs kernels.
    compute: bool,
    /// It has a ring and a share of the GPU (`QUEUE_IS_ACTIVE`, but for the eviction).
    active: bool,
    /// It has the global wave sync.
    gws: bool,
    /// Bytes of its control stack.
    control_stack: u32,
    /// Bytes of its save area for one compute die.
    save_area: u32,
    /// The compute units that it may use.
    units: Arc<Units>,
    /// What it holds in the GPU's page table.
    buffers: Buffers,
    /// Its processor and thread.
    queue: Queue,
}

/// A queue with these properties runs.
fn is_active(ring: u64, percentage: u32) -> bool {
    ring != 0 && percentage & QUEUE_PERCENTAGE_MASK != 0
}

/// Queues that a process can have on a GPU at once: as many as the firmware's scheduler takes (`pqm_create_queue`).
fn most_queues(device: &Device) -> usize {
    if matches!(device.gpu.gc_version, [9, 4, 3 | 4]) { 255 } else { 127 }
}

impl Call<'_> {
    /// `kfd_ioctl_create_queue` from `kfd_alloc_process_doorbells` on.
    fn make_queue(&self, arguments: &mut CreateQueueArgs, index: usize, device: &Arc<Device>) -> Result<()> {
        let mut state = self.process.state();
        let slice = super::doorbells(state.device(index)?, &device.arena)?;
        // Since 6.12.
        let buffers = match self.process.kfd_minor >= minor::SDMA_ENGINE_ID {
            true => Buffers::acquire(device, index, &state.svm, arguments)?,
            false => Buffers::default(),
        };
        let units = Arc::new(Units::new(&device.gpu.shader));
        match self.start_queue(&mut state, arguments, (index, device), &units, slice) {
            Ok((slot, queue)) => {
                let made = ProcessQueue {
                    gpu: index,
                    slot,
                    compute: is_compute(arguments.queue_type),
                    active: is_active(arguments.ring_base_address, arguments.queue_percentage),
                    gws: false,
                    control_stack: arguments.ctl_stack_size,
                    save_area: arguments.ctx_save_restore_size,
                    units,
                    buffers,
                    queue,
                };
                // There is room: start_queue looked.
                arguments.queue_id = state.queues.insert(made, MAX_QUEUES).ok_or(Errno::ENOMEM)?;
                let offset = u64::from(slot.doorbell) * DOORBELL_SIZE;
                arguments.doorbell_offset = mmap::offset(MmapType::Doorbell, arguments.gpu_id) | offset;
                Ok(())
            }
            Err(error) => {
                buffers.release(device);
                Err(error)
            }
        }
    }

    /// `pqm_create_queue`: the place of the queue, and what runs it.
    fn start_queue(
        &self,
        state: &mut State,
        arguments: &CreateQueueArgs,
        (index, device): (usize, &Arc<Device>),
        units: &Arc<Units>,
        slice: u64,
    ) -> Result<(Slot, Queue)> {
        if state.queues.iter().filter(|(_, queue)| queue.gpu == index).count() >= most_queues(device) {
            return Err(Errno::ENOSPC);
        }
        if state.queues.len() >= MAX_QUEUES as usize {
            return Err(Errno::ENOMEM);
        }
        let (kind, purpose) = match arguments.queue_type {
            KFD_IOC_QUEUE_TYPE_COMPUTE => (RingKind::Pm4, Use::Compute),
            KFD_IOC_QUEUE_TYPE_COMPUTE_AQL => (RingKind::Aql, Use::Compute),
            KFD_IOC_QUEUE_TYPE_SDMA => (RingKind::Sdma, Use::Sdma),
            KFD_IOC_QUEUE_TYPE_SDMA_XGMI => (RingKind::Sdma, Use::Xgmi),
            _ => (RingKind::Sdma, Use::Engine(arguments.sdma_engine_id)),
        };
        let addresses = QueueAddresses {
            ring: arguments.ring_base_address,
            ring_size: arguments.ring_size,
            read_pointer: arguments.read_pointer_address,
            write_pointer: arguments.write_pointer_address,
        };
        let active = is_active(arguments.ring_base_address, arguments.queue_percentage);
        let area = arguments.ctx_save_restore_address;
        let exceptions =
            (area != 0).then(|| Exceptions { enabled: state.exceptions.clone(), context_save_area: area });
        let slots = &mut state.device(index)?.slots;
        let slot = slots.take(purpose)?;
        let start = || {
            let at = slice.saturating_add(u64::from(slot.doorbell) * DOORBELL_SIZE);
            let doorbell = ArenaDoorbell::new(device.arena.clone(), at)?;
            doorbell.reset();
            let gpu = engine::gpu(device, &self.process.events, exceptions, units);
            let processor = engine::processor(device, kind, addresses);
            let doorbell = Arc::new(doorbell);
            let queue = match active {
                true => self.process.engines.add(gpu, processor, doorbell),
                false => self.process.engines.add_paused(gpu, processor, doorbell),
            };
            queue.map_err(|_| Errno::EAGAIN)
        };
        match start() {
            Ok(queue) => Ok((slot, queue)),
            Err(error) => {
                slots.give(slot);
                Err(error)
            }
        }
    }

    /// `pqm_destroy_queue`
    pub(super) fn destroy_queue(&self) -> Result<i32> {
        self.run(|arguments: &mut DestroyQueueArgs| {
            let gone = self.process.state().queues.remove(arguments.queue_id).ok_or(Errno::EINVAL)?;
            // Waits for its thread, which must not see the doorbell of the next queue in its place.
            drop(gone.queue);
            if let Some(device) = self.process.devices.get(gone.gpu) {
                gone.buffers.release(device);
            }
            let mut state = self.process.state();
            let own = state.device(gone.gpu)?;
            own.slots.give(gone.slot);
            own.gws &= !gone.gws;
            Ok(())
        })
    }

    /// `kfd_ioctl_update_queue`, `pqm_update_queue_properties`
    pub(super) fn update_queue(&self) -> Result<i32> {
        self.run(|arguments: &mut UpdateQueueArgs| {
            let (ring, percentage) = (arguments.ring_base_address, arguments.queue_percentage);
            check_ring(ring, arguments.ring_size, percentage, arguments.queue_priority)?;
            arguments.ring_size = arguments.ring_size.max(KFD_MIN_QUEUE_RING_SIZE);
            let mut state = self.process.state();
            let queue = state.queues.get_mut(arguments.queue_id).ok_or(Errno::EFAULT)?;
            if ring != 0 && self.process.kfd_minor >= minor::SDMA_ENGINE_ID {
                let device = self.process.devices.get(queue.gpu).ok_or(Errno::EFAULT)?;
                queue.buffers.change_ring(device, ring, arguments.ring_size)?;
            }
            queue.active = is_active(ring, percentage);
            queue.queue.pause();
            if queue.active {
                queue.queue.set_ring(ring, arguments.ring_size);
                queue.queue.resume().map_err(|_| Errno::EAGAIN)?;
            }
            Ok(())
        })
    }
}
