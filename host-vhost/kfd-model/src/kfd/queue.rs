//! Queues.

use std::sync::Arc;

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
use crate::engine::doorbell::ArenaDoorbell;
use crate::engine::process::{self as engine, Exceptions, RingKind};
use crate::engine::runner::Queue;
use crate::engine::slots::{MAX_QUEUES, Slot, Use};
use crate::process::Device;

/// The kernel's own `ENOTSUPP`, which `errno.h` does not have.
pub const ENOTSUPP: i32 = 524;

/// End of the addresses of a process (`TASK_SIZE_MAX` with four levels of page tables).
const USER_END: u64 = 0x7fff_ffff_f000;

/// Compute units that a mask can name; what a longer one has beyond is dropped.
const MAX_CU_MASK: u32 = 1024;

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

    /// `kfd_ioctl_set_cu_mask`, `pqm_update_mqd`: no queue has that id.
    pub(super) fn set_cu_mask(&self) -> Result<i32> {
        self.run(|arguments: &mut SetCuMaskArgs| {
            if arguments.num_cu_mask == 0 || !arguments.num_cu_mask.is_multiple_of(32) {
                return Err(Errno::EINVAL);
            }
            let words = (arguments.num_cu_mask.min(MAX_CU_MASK) / 32) as usize;
            UserMemory.read_array::<u32>(UserPtr(arguments.cu_mask_ptr), words, words)?;
            Err(Errno::EFAULT)
        })
    }

    /// `pqm_get_wave_state`: no queue has that id.
    pub(super) fn get_queue_wave_state(&self) -> Result<i32> {
        self.run(|_: &mut GetQueueWaveStateArgs| Err(Errno::EFAULT))
    }

    /// `kfd_ioctl_alloc_queue_gws`: no queue has that id.
    pub(super) fn alloc_queue_gws(&self) -> Result<i32> {
        self.run(|_: &mut AllocQueueGwsArgs| Err(Errno::EINVAL))
    }
}

/// A queue of the process (`struct queue`).
#[derive(Debug)]
pub struct ProcessQueue {
    /// Index of its GPU.
    pub gpu: usize,
    /// Its place on the GPU.
    pub slot: Slot,
    /// Its processor and thread.
    pub queue: Queue,
}

/// A queue with these properties runs (`q->is_active`).
fn is_active(ring: u64, size: u32, percentage: u32) -> bool {
    ring != 0 && size != 0 && percentage & QUEUE_PERCENTAGE_MASK != 0
}

impl Call<'_> {
    /// `pqm_create_queue`
    fn make_queue(&self, arguments: &mut CreateQueueArgs, index: usize, device: &Arc<Device>) -> Result<()> {
        let (kind, purpose) = match arguments.queue_type {
            KFD_IOC_QUEUE_TYPE_COMPUTE => (RingKind::Pm4, Use::Compute),
            KFD_IOC_QUEUE_TYPE_COMPUTE_AQL => (RingKind::Aql, Use::Compute),
            KFD_IOC_QUEUE_TYPE_SDMA => (RingKind::Sdma, Use::Sdma),
            KFD_IOC_QUEUE_TYPE_SDMA_XGMI => (RingKind::Sdma, Use::Xgmi),
            _ => (RingKind::Sdma, Use::Engine(arguments.sdma_engine_id)),
        };
        let addresses = QueueAddresses {
            ring: arguments.ring_base_address,
            ring_size: arguments.ring_size.max(KFD_MIN_QUEUE_RING_SIZE),
            read_pointer: arguments.read_pointer_address,
            write_pointer: arguments.write_pointer_address,
        };
        let active = is_active(arguments.ring_base_address, arguments.ring_size, arguments.queue_percentage);
        let area = arguments.ctx_save_restore_address;
        let mut state = self.process.state();
        let exceptions =
            (area != 0).then(|| Exceptions { enabled: state.exceptions.clone(), context_save_area: area });
        let own = state.device(index)?;
        let slice = super::doorbells(own, &device.arena)?;
        let slot = own.slots.take(purpose)?;
        let offset = u64::from(slot.doorbell) * 8;
        let start = || {
            let doorbell = ArenaDoorbell::new(device.arena.clone(), slice.saturating_add(offset))?;
            doorbell.reset();
            let gpu = engine::gpu(device, &self.process.events, exceptions);
            let processor = engine::processor(device, kind, addresses);
            let doorbell = Arc::new(doorbell);
            let queue = match active {
                true => self.process.engines.add(gpu, processor, doorbell),
                false => self.process.engines.add_paused(gpu, processor, doorbell),
            };
            queue.map_err(|_| Errno::EAGAIN)
        };
        let queue = match start() {
            Ok(queue) => queue,
            Err(error) => {
                own.slots.give(slot);
                return Err(error);
            }
        };
        let Some(id) = state.queues.insert(ProcessQueue { gpu: index, slot, queue }, MAX_QUEUES) else {
            state.device(index)?.slots.give(slot);
            return Err(Errno::ENOMEM);
        };
        arguments.queue_id = id;
        arguments.doorbell_offset = mmap::offset(MmapType::Doorbell, arguments.gpu_id) | offset;
        Ok(())
    }

    /// `pqm_destroy_queue`
    pub(super) fn destroy_queue(&self) -> Result<i32> {
        self.run(|arguments: &mut DestroyQueueArgs| {
            let gone = self.process.state().queues.remove(arguments.queue_id).ok_or(Errno::EINVAL)?;
            let ProcessQueue { gpu, slot, queue } = gone;
            // Waits for its thread, which must not see the doorbell of the next queue in its place.
            drop(queue);
            self.process.state().device(gpu)?.slots.give(slot);
            Ok(())
        })
    }

    /// `kfd_ioctl_update_queue`, `pqm_update_queue_properties`
    pub(super) fn update_queue(&self) -> Result<i32> {
        self.run(|arguments: &mut UpdateQueueArgs| {
            let &mut UpdateQueueArgs { ring_base_address, ring_size, queue_percentage, .. } = arguments;
            check_ring(ring_base_address, ring_size, queue_percentage, arguments.queue_priority)?;
            let state = self.process.state();
            let ProcessQueue { queue, .. } = state.queues.get(arguments.queue_id).ok_or(Errno::EFAULT)?;
            queue.pause();
            if is_active(ring_base_address, ring_size, queue_percentage) {
                queue.set_ring(ring_base_address, ring_size);
                queue.resume().map_err(|_| Errno::EAGAIN)?;
            }
            Ok(())
        })
    }
}
