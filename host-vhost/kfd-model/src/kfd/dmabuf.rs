//! dma-bufs of KFD's buffers.

use std::os::fd::IntoRawFd;

use kfd_abi::memory::{AllocFlags, ExportDmabufArgs, GetDmabufInfoArgs, ImportDmabufArgs};
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;
use nix::libc;

use super::memory::{Handle, adopt};
use super::{Call, Descriptor, DescriptorTable};
use crate::descriptors;
use crate::dmabuf::{DmaBuf, METADATA_WORDS};
use crate::process::Buffer;

/// What dma-buf a descriptor is (`dma_buf_get`, then `amdgpu_gem_prime_import` for those of others).
///
/// # Errors
/// `EBADF` when it is not open, `EINVAL` when it is something else.
pub(crate) fn find(descriptors: &dyn DescriptorTable, descriptor: u32) -> Result<Box<DmaBuf>> {
    match descriptors.find(descriptor) {
        None => Err(Errno::EBADF),
        Some(Descriptor::DmaBuf(found)) => Ok(found),
        Some(_) => Err(Errno::EINVAL),
    }
}

impl Call<'_> {
    /// `kfd_ioctl_get_dmabuf_info`, `amdgpu_amdkfd_get_dmabuf_info`.
    pub(super) fn get_dmabuf_info(&self) -> Result<i32> {
        self.run(|arguments: &mut GetDmabufInfoArgs| {
            let first = self.process.devices.first().ok_or(Errno::EINVAL)?;
            let note = find(self.descriptors, arguments.dmabuf_fd)?.note;
            arguments.size = note.size;
            // amdgpu_bo_get_metadata, which is only called where there is room for something.
            if arguments.metadata_ptr != 0 {
                let room = arguments.metadata_size;
                arguments.metadata_size = note.data_size;
                if note.data_size > room {
                    return Err(Errno::EINVAL);
                }
            }
            // Memory that belongs to no partition of a GPU has no GPU, and the first one stands for it.
            let in_vram = note.flags().contains(AllocFlags::VRAM);
            arguments.gpu_id = if in_vram { note.gpu_id } else { first.gpu_id };
            arguments.flags =
                (note.flags() & (AllocFlags::VRAM | AllocFlags::GTT | AllocFlags::PUBLIC)).bits();
            if note.data_size == 0 || arguments.metadata_ptr == 0 {
                return Ok(());
            }
            let bytes: Vec<u8> = note.data.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let used = (note.data_size as usize).min(METADATA_WORDS * 4);
            UserMemory.write_bytes(UserPtr(arguments.metadata_ptr), bytes.get(..used).unwrap_or(&bytes))
        })
    }

    /// `kfd_ioctl_import_dmabuf`, `amdgpu_amdkfd_gpuvm_import_dmabuf_fd`.
    pub(super) fn import_dmabuf(&self) -> Result<i32> {
        self.run(|arguments: &mut ImportDmabufArgs| {
            let (index, _) = self.process.device(arguments.gpu_id)?;
            let mut state = self.process.state();
            state.bound(index, Errno::ENODEV)?;
            let found = find(self.descriptors, arguments.dmabuf_fd)?;
            let descriptor = descriptors::duplicate(arguments.dmabuf_fd)?;
            let object = self.process.import(&mut state, index, &descriptor, &found)?;
            // import_obj_create: as it lies, and the GPU may do everything.
            let kind = object.flags() & (AllocFlags::VRAM | AllocFlags::GTT);
            let flags = kind | AllocFlags::WRITABLE | AllocFlags::EXECUTABLE;
            let number = adopt(&mut state, index, Buffer::new(arguments.va_addr, object, flags))?;
            arguments.handle = Handle { gpu_id: arguments.gpu_id, number }.whole();
            Ok(())
        })
    }

    /// `kfd_ioctl_export_dmabuf`, `kfd_mem_export_dmabuf`.
    pub(super) fn export_dmabuf(&self) -> Result<i32> {
        self.run(|arguments: &mut ExportDmabufArgs| {
            let handle = Handle::from(arguments.handle);
            let (index, device) = self.process.device(handle.gpu_id)?;
            let mut state = self.process.state();
            let buffer = state.device(index)?.buffers.get(handle.number).ok_or(Errno::EINVAL)?;
            let writable = buffer.flags.contains(AllocFlags::WRITABLE);
            let descriptor = buffer.object.export(device.gpu_id, writable)?;
            // dma_buf_fd looks at nothing else of the flags.
            descriptors::set_cloexec(&descriptor, arguments.flags & libc::O_CLOEXEC.cast_unsigned() != 0)?;
            arguments.dmabuf_fd = descriptor.into_raw_fd().cast_unsigned();
            Ok(())
        })
    }
}
