//! dma-bufs: memory of a buffer as a file that other processes and GPUs can take.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use kfd_abi::kfd::request;
use kfd_abi::memory::{ExportDmabufArgs, GetDmabufInfoArgs, ImportDmabufArgs};
use nix::errno::Errno;

use crate::call::{arguments, ioctl};
use crate::error::KfdError;
use crate::kfd::Kfd;
use crate::memory::KfdHandle;

arguments! {
    ExportDmabufArgs = "AMDKFD_IOC_EXPORT_DMABUF", request::EXPORT_DMABUF;
    ImportDmabufArgs = "AMDKFD_IOC_IMPORT_DMABUF", request::IMPORT_DMABUF;
    GetDmabufInfoArgs = "AMDKFD_IOC_GET_DMABUF_INFO", request::GET_DMABUF_INFO;
}

/// What the kernel knows of a dma-buf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmabufInfo {
    /// Bytes of the whole buffer.
    pub size: u64,
    /// The GPU that has the memory, of all those of the host.
    pub gpu_id: u32,
    /// `KFD_IOC_ALLOC_MEM_FLAGS_*`: VRAM or GTT, and whether it is public.
    pub flags: u32,
}

/// Takes over a descriptor that an ioctl of this process has made.
#[allow(unsafe_code)] // an ioctl hands out a plain number
pub(crate) fn own(fd: i32, call: &'static str) -> Result<OwnedFd, KfdError> {
    if fd < 0 {
        return Err(KfdError::new(call, format!("descriptor {fd}"), Errno::EBADF));
    }
    // SAFETY: the kernel has installed this descriptor in our table in the call that just succeeded and told it to
    // nobody else, so that nothing owns it yet.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Kfd {
    /// `AMDKFD_IOC_EXPORT_DMABUF` (KFD 1.12): the whole buffer, close-on-exec. EPERM for user pointers
    /// (amdgpu_gem_prime_export), ENOTTY on kernels without the call.
    pub fn export_dmabuf(&self, handle: KfdHandle) -> Result<OwnedFd, KfdError> {
        let mut args = ExportDmabufArgs {
            handle: handle.number(),
            flags: libc::O_CLOEXEC.cast_unsigned(),
            ..Default::default()
        };
        ioctl(self.as_fd(), &mut args, || format!("handle {:#x}", handle.number()))?;
        own(args.dmabuf_fd.cast_signed(), "AMDKFD_IOC_EXPORT_DMABUF")
    }

    /// `AMDKFD_IOC_IMPORT_DMABUF`: a buffer over all of a dma-buf's memory, at an address. EINVAL if it is not one
    /// of amdgpu's.
    pub fn import_dmabuf(&self, gpu_id: u32, dmabuf: BorrowedFd<'_>, va: u64) -> Result<KfdHandle, KfdError> {
        let mut args = ImportDmabufArgs {
            va_addr: va,
            gpu_id,
            dmabuf_fd: dmabuf.as_raw_fd().cast_unsigned(),
            ..Default::default()
        };
        ioctl(self.as_fd(), &mut args, || format!("va_addr {va:#x}, gpu_id {gpu_id}"))?;
        Ok(KfdHandle::from_number(args.handle))
    }

    /// `AMDKFD_IOC_GET_DMABUF_INFO`, without the metadata.
    pub fn dmabuf_info(&self, dmabuf: BorrowedFd<'_>) -> Result<DmabufInfo, KfdError> {
        let mut args =
            GetDmabufInfoArgs { dmabuf_fd: dmabuf.as_raw_fd().cast_unsigned(), ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("descriptor {}", dmabuf.as_raw_fd()))?;
        Ok(DmabufInfo { size: args.size, gpu_id: args.gpu_id, flags: args.flags })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_answers_nonsense_is_an_error() {
        let error = own(-1, "AMDKFD_IOC_EXPORT_DMABUF").unwrap_err();
        assert_eq!(error.to_string(), "AMDKFD_IOC_EXPORT_DMABUF(descriptor -1): EBADF: Bad file number");
    }
}
