//! The ioctls of a render node, as far as runtimes ask the driver about itself.
//!
//! Buffer objects are in [`crate::gem`]: those that come as dma-bufs. New ones (GEM_CREATE) are not served: `EOPNOTSUPP`.

use kfd_abi::drm::amdgpu::{
    AMDGPU_INFO_FW_VERSION, AMDGPU_INFO_HW_IP_COUNT, AMDGPU_INFO_HW_IP_INFO, AMDGPU_INFO_READ_MMR_REG,
    GemMetadata, GemMmap, GemOp, GemVa, Info,
};
use kfd_abi::drm::{
    self, DRM_CAP_PRIME, DRM_CAP_SYNCOBJ, DRM_CAP_SYNCOBJ_TIMELINE, DRM_CAP_TIMESTAMP_MONOTONIC,
    DRM_IOCTL_BASE, DRM_PRIME_CAP_EXPORT, DRM_PRIME_CAP_IMPORT, GemClose, GetCap, PrimeHandle, Version, nr,
};
use kfd_abi::ioctl;
use kfd_seam::{Exchange, Request, Result, UserMemory, UserPtr};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{RenderInfo, RenderVersion};
use virtio_kfd_protocol::limits::MAX_RENDER_INFO_BYTES;
use virtio_kfd_protocol::{GpuRequest, RenderInfoRequest, Status};

use crate::GuestKfd;
use crate::failure::errno;
use crate::topology::Gpu;

/// Serves an ioctl.
///
/// # Errors
/// What the host's kernel answers, or this process's would.
pub fn ioctl(kfd: &GuestKfd, gpu: &Gpu, request: u32, argument: UserPtr) -> Result<i32> {
    let user = Request(request);
    if user.kind() != DRM_IOCTL_BASE {
        return Err(Errno::ENOTTY);
    }
    let exchange = |kernel: u32| Exchange::drm(user, Request(kernel));
    match user.number() {
        nr::VERSION => exchange(drm::request::VERSION)
            .run::<Version, _>(&UserMemory, argument, |version| describe(kfd, gpu, version)),
        nr::GET_CAP => exchange(drm::request::GET_CAP).run::<GetCap, _>(&UserMemory, argument, capability),
        nr::AMDGPU_INFO => {
            exchange(drm::request::AMDGPU_INFO)
                .run::<Info, _>(&UserMemory, argument, |info| query(kfd, gpu, info))
        }
        nr::GEM_CLOSE => {
            exchange(drm::request::GEM_CLOSE)
                .run::<GemClose, _>(&UserMemory, argument, |arguments| kfd.gem_close(gpu, arguments))
        }
        nr::PRIME_HANDLE_TO_FD => exchange(drm::request::PRIME_HANDLE_TO_FD).run::<PrimeHandle, _>(
            &UserMemory,
            argument,
            |arguments| kfd.gem_export(gpu, arguments),
        ),
        nr::PRIME_FD_TO_HANDLE => exchange(drm::request::PRIME_FD_TO_HANDLE).run::<PrimeHandle, _>(
            &UserMemory,
            argument,
            |arguments| kfd.gem_import(gpu, arguments),
        ),
        nr::AMDGPU_GEM_MMAP => {
            exchange(drm::request::AMDGPU_GEM_MMAP)
                .run::<GemMmap, _>(&UserMemory, argument, |arguments| kfd.gem_mmap(gpu, arguments))
        }
        nr::AMDGPU_GEM_VA => {
            exchange(drm::request::AMDGPU_GEM_VA)
                .run::<GemVa, _>(&UserMemory, argument, |arguments| kfd.gem_va(gpu, arguments))
        }
        nr::AMDGPU_GEM_METADATA => exchange(drm::request::AMDGPU_GEM_METADATA).run::<GemMetadata, _>(
            &UserMemory,
            argument,
            |arguments| kfd.gem_metadata(gpu, arguments),
        ),
        nr::AMDGPU_GEM_OP => {
            exchange(drm::request::AMDGPU_GEM_OP)
                .run::<GemOp, _>(&UserMemory, argument, |arguments| kfd.gem_operation(gpu, arguments))
        }
        // No `DRM_RENDER_ALLOW`.
        nr::GET_CLIENT => Err(Errno::EACCES),
        number if ioctl::by_nr(drm::IOCTLS, number).is_some() => Err(Errno::EOPNOTSUPP),
        _ => Err(Errno::EINVAL),
    }
}

/// `drm_version`.
fn describe(kfd: &GuestKfd, gpu: &Gpu, version: &mut Version) -> Result<i32> {
    let request = GpuRequest { gpu_id: gpu.gpu_id, pad: 0 };
    let (answer, _) = kfd.client.call::<RenderVersion>(&request, &[], 0).map_err(errno)?;
    version.version_major = answer.major.cast_signed();
    version.version_minor = answer.minor.cast_signed();
    version.version_patchlevel = answer.patch.cast_signed();
    copy_field(version.name, &mut version.name_len, b"amdgpu")?;
    copy_field(version.date, &mut version.date_len, b"0")?;
    copy_field(version.desc, &mut version.desc_len, b"AMD GPU")?;
    Ok(0)
}

/// `drm_copy_field`: as much as fits, and the whole length.
fn copy_field(pointer: u64, length: &mut u64, value: &[u8]) -> Result<()> {
    let fits = usize::try_from(*length).map_or(value.len(), |length| length.min(value.len()));
    *length = u64::try_from(value.len()).unwrap_or(0);
    if pointer != 0 {
        UserMemory.write_bytes(UserPtr(pointer), value.get(..fits).unwrap_or(value))?;
    }
    Ok(())
}

/// `drm_getcap`: nothing that is not served.
fn capability(arguments: &mut GetCap) -> Result<i32> {
    arguments.value = 0;
    arguments.value = match arguments.capability {
        DRM_CAP_TIMESTAMP_MONOTONIC => 1,
        DRM_CAP_PRIME => DRM_PRIME_CAP_IMPORT | DRM_PRIME_CAP_EXPORT,
        DRM_CAP_SYNCOBJ | DRM_CAP_SYNCOBJ_TIMELINE => 0,
        _ => return Err(Errno::EOPNOTSUPP),
    };
    Ok(0)
}

/// `amdgpu_info_ioctl`. A query that the host does not allow is one that the driver does not know.
fn query(kfd: &GuestKfd, gpu: &Gpu, info: &mut Info) -> Result<i32> {
    if info.return_size == 0 || info.return_pointer == 0 {
        return Err(Errno::EINVAL);
    }
    let room = usize::try_from(info.return_size).unwrap_or(usize::MAX).min(MAX_RENDER_INFO_BYTES);
    let arguments = match info.query {
        // Others have none, whatever the caller left there.
        AMDGPU_INFO_READ_MMR_REG => [info.dword_offset, info.count, info.instance, info.flags],
        AMDGPU_INFO_HW_IP_INFO | AMDGPU_INFO_HW_IP_COUNT => [info.dword_offset, info.count, 0, 0],
        AMDGPU_INFO_FW_VERSION => [info.dword_offset, info.count, info.instance, 0],
        _ => [0; 4],
    };
    let request = RenderInfoRequest {
        gpu_id: gpu.gpu_id,
        query: info.query,
        return_size: u32::try_from(room).unwrap_or(u32::MAX),
        arguments,
        pad: 0,
    };
    let (_, bytes) = match kfd.client.call::<RenderInfo>(&request, &[], room) {
        Err(error) if matches!(error.status(), Some((Status::NOT_SUPPORTED, _))) => {
            return Err(Errno::EINVAL);
        }
        answer => answer.map_err(errno)?,
    };
    UserMemory.write_bytes(UserPtr(info.return_pointer), bytes.get(..room).unwrap_or(&bytes))?;
    Ok(0)
}
