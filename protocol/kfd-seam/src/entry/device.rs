//! What device files are for: `ioctl` and `mmap`.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_ulong, c_void};
use std::os::fd::{AsRawFd, RawFd};

use nix::errno::Errno;

use super::shared;
use crate::files::{self, DeviceFile, Kind, OpenFile};
use crate::instance::{Bypass, Preload};
use crate::kernel::{SavedErrno, kernel};
use crate::links;
use crate::service::{MapRequest, Result, UserPtr};
use crate::table::Held;
use crate::trace;

/// Requests that the kernel serves itself before a driver sees them (`do_vfs_ioctl()`) and that are about
/// the descriptor: `asm-generic/ioctls.h`.
const FIOCLEX: u32 = 0x5451;
const FIONCLEX: u32 = 0x5450;
const FIONBIO: u32 = 0x5421;

/// `ioctl(2)`; `argument` is whatever stood in its place when the program passed none.
///
/// # Safety
/// As `ioctl`. The argument is the request's business; the service reads it through
/// [`crate::UserMemory`].
pub unsafe fn ioctl(_: &Preload, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let saved = SavedErrno::now();
    // The kernel takes an unsigned int.
    let number = request as u32;
    match device(fd) {
        Some(held) if !matches!(number, FIOCLEX | FIONCLEX | FIONBIO) => {
            let result = live(&held).and_then(|device| {
                let argument = UserPtr(argument as u64);
                device.instance.call(|service| service.ioctl(device.file, number, argument))
            });
            trace::ioctl(fd, number, &result);
            saved.finish(result, -1)
        }
        _ => {
            let result = kernel!(SYS_ioctl, fd, request, argument) as c_int;
            if result < 0 && Errno::last() == Errno::ENOTTY && is_passed_on(fd, number) {
                Errno::EBADF.set();
            }
            result
        }
    }
}

/// Whether `fd`, which is nothing of this process's service, stands for a device file of another process: it came by `exec` or
/// `SCM_RIGHTS`. amdkfd answers `EBADF` then.
fn is_passed_on(fd: RawFd, request: u32) -> bool {
    if Bypass::is_active() || !matches!((request >> 8) as u8, KFD | DRM) {
        return false;
    }
    links::name_of(fd, |name| MEMORY_FILES.contains(&name))
}

/// The type of amdkfd's requests (`AMDKFD_IOCTL_BASE`).
const KFD: u8 = b'K';

/// The type of DRM's requests (`DRM_IOCTL_BASE`).
const DRM: u8 = b'd';

/// What `/proc` says of the memory files by which services show their devices.
const MEMORY_FILES: [&[u8]; 3] =
    [b"/memfd:virtio-kfd (deleted)", b"/memfd:kfd (deleted)", b"/memfd:amdgpu (deleted)"];

/// Bytes of the smallest page of x86-64.
const PAGE: u64 = 4096;

/// Bytes of addresses that a process of x86-64 has for maps without asking for more (`DEFAULT_MAP_WINDOW`).
const ADDRESSES: u64 = (1 << 47) - PAGE;

/// `mmap(2)`.
///
/// # Safety
/// As `mmap`.
pub unsafe fn mmap(
    preload: &Preload,
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let saved = SavedErrno::now();
    let held = if flags & libc::MAP_ANONYMOUS == 0 { device(fd) } else { None };
    let Some(held) = held else {
        let shared = if flags & libc::MAP_ANONYMOUS == 0 { shared::find(preload, fd) } else { None };
        let place = match shared.map(|shared| shared.map(offset, length)) {
            Some(Err(errno)) => return saved.finish(Err(errno), libc::MAP_FAILED),
            Some(Ok(place)) => place,
            None => offset,
        };
        let mapped = kernel!(SYS_mmap, address, length, protection, flags, fd, place);
        return if mapped == -1 {
            libc::MAP_FAILED
        } else {
            saved.finish(Ok(mapped as *mut c_void), libc::MAP_FAILED)
        };
    };
    let request = MapRequest {
        // The bits as they are: the driver's encoding uses the sign bit.
        offset: offset as u64,
        length: length as u64,
        protection,
        flags,
    };
    let result = live(&held).and_then(|device| {
        // What the kernel looks at before a driver sees the call (`sys_mmap`, `do_mmap()`).
        if !request.offset.is_multiple_of(PAGE) || request.length == 0 {
            return Err(Errno::EINVAL);
        }
        if request.length > ADDRESSES {
            return Err(Errno::ENOMEM);
        }
        let served = device.instance.call(|service| service.map(device.file, &request, address as u64))?;
        if let Some(address) = served {
            return Ok(address as *mut c_void);
        }
        let source = device.instance.call(|service| service.mmap(device.file, &request))?;
        let offset = i64::try_from(source.offset).map_err(|_| Errno::EINVAL)?;
        let file = source.file.as_raw_fd();
        let mapped = kernel!(SYS_mmap, address, length, protection, flags, file, offset);
        if mapped == -1 {
            return Err(Errno::last());
        }
        // The map is there and the program gets it, whatever becomes of the call.
        let _ = device.instance.call(|service| {
            service.mapped(device.file, &request, mapped as u64);
            Ok(())
        });
        Ok(mapped as *mut c_void)
    });
    trace::mmap(fd, &request, &result);
    saved.finish(result, libc::MAP_FAILED)
}

/// The open file behind `fd` when it is a device of the service.
fn device(fd: RawFd) -> Option<Held<OpenFile>> {
    files::get(fd).filter(|held| matches!(held.kind, Kind::Device(_)))
}

/// The device file, unless another process opened it: amdkfd answers `EBADF` then (`kfd_ioctl()`,
/// `kfd_mmap()`).
fn live(held: &Held<OpenFile>) -> Result<&DeviceFile> {
    match &held.kind {
        Kind::Device(device) if device.instance.is_live() => Ok(device),
        _ => Err(Errno::EBADF),
    }
}
