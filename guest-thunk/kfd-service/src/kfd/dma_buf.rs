//! dma-bufs of buffers.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use guest_thunk::thunk::lock::lock;
use guest_thunk::thunk::memory::Source;
use guest_thunk::thunk::render::bo::ALL;
use kfd_abi::memory::{
    AllocFlags, AllocMemoryOfGpuArgs, ExportDmabufArgs, GetDmabufInfoArgs, ImportDmabufArgs,
};
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{MapRange, UnmapRange};
use virtio_kfd_protocol::{GpuId, GuestVa, Handle, MapMemoryAnswer, MapRangeRequest, UnmapRangeRequest};

use super::Call;
use crate::buffers::{Buffer, Memory, State};
use crate::dma_buf;
use crate::failure::{errno, refused};

impl Call<'_> {
    pub(super) fn export_dmabuf(&self) -> Result<i32> {
        self.run(|arguments: &mut ExportDmabufArgs| {
            let buffer = self.kfd.buffers.find(arguments.handle)?;
            let (client, memory) = (&self.kfd.client, &self.kfd.memory);
            let part_blob = |part| {
                // From now on the blob stays.
                buffer.exported.store(true, Ordering::Relaxed);
                memory.part_blob(client, part).map_err(|refusal| refused(&refusal, Errno::EOPNOTSUPP))
            };
            let blob = match &buffer.memory {
                // amdgpu_gem_prime_export: pageable memory has no dma-buf.
                Memory::Guest(_) if buffer.flags.contains(AllocFlags::USERPTR) => return Err(Errno::EPERM),
                Memory::Guest(_) if lock(&buffer.state).event_page => return Err(Errno::EPERM),
                Memory::Guest(blob) => Arc::clone(blob),
                Memory::Vram(part) => part_blob(part)?,
                Memory::Imported(Source::Guest { blob, .. } | Source::Host { blob, .. }) => Arc::clone(blob),
                Memory::Imported(Source::Own(part)) => part_blob(part)?,
                Memory::Doorbells => return Err(Errno::EPERM),
            };
            let cloexec = arguments.flags & libc::O_CLOEXEC.cast_unsigned() != 0;
            arguments.dmabuf_fd = dma_buf::export(&*blob, cloexec)?.cast_unsigned();
            Ok(())
        })
    }

    fn open_dma_buf(&self, number: u32) -> Result<(Source, u64, GpuId, AllocFlags)> {
        let descriptor = dma_buf::copy(number.cast_signed())?;
        let opened = self.kfd.memory.open_dma_buf(self.kfd.host(), descriptor.as_fd());
        opened.map_err(|refusal| refused(&refusal, Errno::EINVAL))
    }

    /// `kfd_ioctl_get_dmabuf_info`, `amdgpu_amdkfd_get_dmabuf_info`.
    pub(super) fn get_dmabuf_info(&self) -> Result<i32> {
        self.run(|arguments: &mut GetDmabufInfoArgs| {
            let (source, size, gpu, flags) = self.open_dma_buf(arguments.dmabuf_fd)?;
            // Memory of a GPU that this VM does not have is told of without.
            let asked = arguments.metadata_ptr != 0 && gpu != GpuId(0);
            let metadata = match source.host_buffer().filter(|_| asked) {
                Some(buffer) => self.kfd.metadata(buffer, gpu),
                None => Ok(Default::default()),
            };
            source.release(&self.kfd.client).map_err(|refusal| refused(&refusal, Errno::EINVAL))?;
            arguments.size = size;
            arguments.gpu_id = gpu.0;
            arguments.flags = (flags & (AllocFlags::VRAM | AllocFlags::GTT | AllocFlags::PUBLIC)).bits();
            let (_, bytes) = metadata?;
            if arguments.metadata_ptr == 0 {
                return Ok(());
            }
            let room = arguments.metadata_size;
            arguments.metadata_size = u32::try_from(bytes.len()).map_err(|_| Errno::EINVAL)?;
            if arguments.metadata_size > room {
                return Err(Errno::EINVAL);
            }
            UserMemory.write_bytes(UserPtr(arguments.metadata_ptr), &bytes)
        })
    }

    pub(super) fn import_dmabuf(&self) -> Result<i32> {
        self.run(|arguments: &mut ImportDmabufArgs| {
            let gpu = self.kfd.gpu(arguments.gpu_id).ok_or(Errno::EINVAL)?.gpu_id;
            let (source, size, _, kind) = self.open_dma_buf(arguments.dmabuf_fd)?;
            // import_obj_create: the GPU may do everything.
            let flags =
                (kind & (AllocFlags::VRAM | AllocFlags::GTT)) | AllocFlags::WRITABLE | AllocFlags::EXECUTABLE;
            let buffer = match source {
                Source::Guest { blob, .. } => {
                    let va = arguments.va_addr;
                    let asked = AllocMemoryOfGpuArgs { va_addr: va, size, ..Default::default() };
                    self.guest(gpu, flags, &asked, blob)?
                }
                source => {
                    let host = match &source {
                        Source::Host { handle, .. } => *handle,
                        Source::Own(part) => part.buffer.handle,
                        Source::Guest { .. } => Handle::NONE,
                    };
                    let state = Mutex::new(State { host, mapped: Vec::new(), event_page: false });
                    let memory = Memory::Imported(source);
                    let exported = AtomicBool::new(true);
                    Buffer { gpu, va: arguments.va_addr, size, flags, offset: 0, memory, exported, state }
                }
            };
            arguments.handle = self.kfd.buffers.insert_imported(buffer)?;
            Ok(())
        })
    }

    /// Maps imported memory of a GPU, GPU by GPU.
    pub(super) fn map_ranges(&self, buffer: &Buffer, source: &Source, gpus: &[GpuId]) -> MapMemoryAnswer {
        let Some((handle, offset)) = place(source) else { return failed(0, Errno::EINVAL) };
        each(gpus, |gpu_id| {
            let Buffer { size, va, .. } = *buffer;
            let request =
                MapRangeRequest { handle, offset, size, va: GuestVa(va), gpu_id, flags: ALL.bits() };
            self.kfd.client.call::<MapRange>(&request, &[], 0).map_err(errno).map(drop)
        })
    }

    /// Takes it away again.
    pub(super) fn unmap_ranges(&self, buffer: &Buffer, source: &Source, gpus: &[GpuId]) -> MapMemoryAnswer {
        let Some((handle, _)) = place(source) else { return failed(0, Errno::EINVAL) };
        each(gpus, |gpu_id| {
            let Buffer { size, va, .. } = *buffer;
            let request = UnmapRangeRequest { handle, va: GuestVa(va), size, gpu_id, pad: 0 };
            self.kfd.client.call::<UnmapRange>(&request, &[], 0).map_err(errno).map(drop)
        })
    }
}

/// The host's buffer, and where in it the memory begins.
fn place(source: &Source) -> Option<(Handle, u64)> {
    match source {
        Source::Own(part) => Some((part.buffer.handle, part.offset)),
        Source::Host { handle, .. } => Some((*handle, 0)),
        Source::Guest { .. } => None,
    }
}

fn failed(n_success: u32, errno: Errno) -> MapMemoryAnswer {
    MapMemoryAnswer { n_success, errno: u32::try_from(errno as i32).unwrap_or(u32::MAX) }
}

fn each(gpus: &[GpuId], mut change: impl FnMut(GpuId) -> Result<()>) -> MapMemoryAnswer {
    for (done, gpu) in (0u32..).zip(gpus) {
        if let Err(errno) = change(*gpu) {
            return failed(done, errno);
        }
    }
    MapMemoryAnswer { n_success: u32::try_from(gpus.len()).unwrap_or(u32::MAX), errno: 0 }
}
