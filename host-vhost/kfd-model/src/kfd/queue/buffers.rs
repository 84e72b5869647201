//! The buffers of queues, which stay mapped as long as their queue is there (`kfd_queue.c`).

use kfd_abi::queue::{CreateQueueArgs, KFD_IOC_QUEUE_TYPE_COMPUTE, KFD_IOC_QUEUE_TYPE_COMPUTE_AQL};
use kfd_seam::Result;
use nix::errno::Errno;

use crate::arena::{PAGE, page_align};
use crate::process::Device;
use crate::svm;

/// Bytes of an end-of-pipe buffer, at least, from gfx8 on (`eop_buffer_size`).
const EOP_BUFFER_SIZE: u32 = 4096;

/// The objects that a queue needs.
#[derive(Debug, Default)]
pub struct Buffers {
    /// Of the pointers, the end-of-pipe buffer and the save area.
    fixed: Vec<u64>,
    /// Of the ring.
    ring: Option<u64>,
}

/// The queue runs kernels.
pub fn is_compute(kind: u32) -> bool {
    matches!(kind, KFD_IOC_QUEUE_TYPE_COMPUTE | KFD_IOC_QUEUE_TYPE_COMPUTE_AQL)
}

impl Buffers {
    /// `kfd_queue_acquire_buffers`, on GPU `index`.
    ///
    /// # Errors
    /// `EINVAL` when a buffer is not mapped as the driver wants it, or too small.
    pub fn acquire(
        device: &Device,
        index: usize,
        ranges: &svm::Ranges,
        arguments: &CreateQueueArgs,
    ) -> Result<Self> {
        let mut buffers = Self::default();
        match buffers.hold_all(device, index, ranges, arguments) {
            Ok(()) => Ok(buffers),
            Err(error) => {
                buffers.release(device);
                Err(error)
            }
        }
    }

    fn hold_all(
        &mut self,
        device: &Device,
        index: usize,
        ranges: &svm::Ranges,
        arguments: &CreateQueueArgs,
    ) -> Result<()> {
        let mut space = device.space_mut();
        let mut hold = |va, size| space.hold(va, size);
        self.fixed.push(hold(arguments.write_pointer_address, PAGE)?);
        self.fixed.push(hold(arguments.read_pointer_address, PAGE)?);
        self.ring = Some(hold(arguments.ring_base_address, arguments.ring_size.into())?);
        if !is_compute(arguments.queue_type) {
            return Ok(());
        }
        if arguments.eop_buffer_address != 0 {
            // The kernel keeps 32 bits of the size.
            let size = (arguments.eop_buffer_size & 0xffff_ffff) as u32;
            if size < EOP_BUFFER_SIZE {
                return Err(Errno::EINVAL);
            }
            let size = page_align(size.into()).ok_or(Errno::EINVAL)?;
            self.fixed.push(hold(arguments.eop_buffer_address, size)?);
        }
        let memory = device.queue_memory;
        if arguments.ctl_stack_size != memory.control_stack
            || arguments.ctx_save_restore_size < memory.save_area
        {
            return Err(Errno::EINVAL);
        }
        let one = u64::from(arguments.ctx_save_restore_size).saturating_add(memory.debugger.into());
        let all = one.saturating_mul(device.gpu.shader.xccs.into());
        let all = page_align(all).ok_or(Errno::EINVAL)?;
        let area = arguments.ctx_save_restore_address;
        match hold(area, all) {
            Ok(object) => self.fixed.push(object),
            Err(_) if ranges.always_mapped(area - area % PAGE, all, index) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Takes another ring, of `size` bytes (`pqm_update_queue_properties`).
    ///
    /// # Errors
    /// `EFAULT` when it is not mapped as the driver wants it; the old one stays.
    pub fn change_ring(&mut self, device: &Device, va: u64, size: u32) -> Result<()> {
        let mut space = device.space_mut();
        let ring = space.hold(va, size.into()).map_err(|_| Errno::EFAULT)?;
        if let Some(before) = self.ring.replace(ring) {
            space.let_go(before);
        }
        Ok(())
    }

    /// `kfd_queue_unref_bo_vas`
    pub fn release(self, device: &Device) {
        let mut space = device.space_mut();
        for object in self.fixed.into_iter().chain(self.ring) {
            space.let_go(object);
        }
    }
}
