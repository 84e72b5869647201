//! How a frame is waited for.
//!
//! | way | kernel | needs |
//! |---|---|---|
//! | a sync object (include/uapi/drm/drm.h) | Linux 6.6 and later | no descriptor: it is a number of the open node, used again by later calls |
//! | the descriptor of a fence | older | a free descriptor for the length of the call |
//! | a buffer that the frame uses (DRM_IOCTL_VIRTGPU_WAIT) | older, where no descriptor is free | one more blob of a page for each call at a time |

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kfd_abi::drm::{self, DRM_CAP_SYNCOBJ, GetCap};
use kfd_abi::ioctl::{Direction, request};
use kfd_abi::virtgpu::{
    self as abi, Execbuffer, ExecbufferSyncobj, VIRTGPU_BLOB_FLAG_USE_MAPPABLE, VIRTGPU_BLOB_MEM_GUEST,
    VIRTGPU_EXECBUF_FENCE_FD_OUT, VIRTGPU_EXECBUF_RING_IDX, Wait,
};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Device;
use super::blob::GemBlob;
use super::ioctl::{ioctl, ioctl_once};
use crate::transport::{Result, TransportError};

/// Environment variable: `descriptor` waits as on a kernel without sync objects for this driver.
const VARIABLE: &str = "VIRTIO_KFD_FENCES";

/// Bytes of a buffer that only stands for a call: the smallest.
const STAND_IN: u64 = 4096;

/// `struct drm_syncobj_create`.
#[repr(C)]
#[derive(Default)]
struct Create {
    /// Out.
    handle: u32,
    /// `DRM_SYNCOBJ_CREATE_*`
    flags: u32,
}

/// `struct drm_syncobj_wait` without the deadline of Linux 6.6, which `drm_ioctl()` then takes as 0.
#[repr(C)]
#[derive(Default)]
struct SyncobjWait {
    /// Pointer to handles.
    handles: u64,
    /// Nanoseconds of CLOCK_MONOTONIC.
    timeout: i64,
    count: u32,
    /// `DRM_SYNCOBJ_WAIT_FLAGS_*`
    flags: u32,
    /// Out: the index of one that is signalled.
    first_signaled: u32,
    pad: u32,
}

const SYNCOBJ_CREATE: u32 = request(Direction::ReadWrite, drm::DRM_IOCTL_BASE, 0xbf, size_of::<Create>());
const SYNCOBJ_WAIT: u32 = request(Direction::ReadWrite, drm::DRM_IOCTL_BASE, 0xc3, size_of::<SyncobjWait>());

/// What calls are waited for with.
pub(super) struct Fences {
    /// Sync objects that no call uses, or none where the kernel has none.
    syncobjs: Option<Mutex<Vec<u32>>>,
    /// Buffers that no call uses.
    stand_ins: Mutex<Vec<GemBlob>>,
}

impl Fences {
    /// Asks the node what it has.
    pub(super) fn new(device: BorrowedFd<'_>) -> Fences {
        let descriptors = std::env::var_os(VARIABLE).is_some_and(|text| text == "descriptor");
        let mut asked = GetCap { capability: DRM_CAP_SYNCOBJ, value: 0 };
        // SAFETY: the argument has no pointer.
        let has = unsafe { ioctl(device, drm::request::GET_CAP, &mut asked) }.is_ok() && asked.value != 0;
        Fences { syncobjs: (has && !descriptors).then(Mutex::default), stand_ins: Mutex::default() }
    }

    /// Sends a frame on a ring and waits until the host is done with it. In the process that opened the node only.
    pub(super) fn submit_and_wait(
        &self,
        device: &Arc<Device>,
        ring: u8,
        frame: &[u8],
        limit: Duration,
    ) -> Result<()> {
        let size =
            u32::try_from(frame.len()).map_err(|_| TransportError::NotSupported("a frame of 4 GiB"))?;
        let exec = Execbuffer {
            flags: VIRTGPU_EXECBUF_RING_IDX,
            size,
            command: frame.as_ptr().expose_provenance() as u64,
            fence_fd: -1,
            ring_idx: ring.into(),
            ..Default::default()
        };
        let deadline = Deadline::after(limit);
        match &self.syncobjs {
            Some(idle) => by_syncobj(device, idle, exec, &deadline),
            None => match by_descriptor(device, exec, &deadline) {
                Err(TransportError::System { error, .. })
                    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) =>
                {
                    self.by_buffer(device, exec, &deadline)
                }
                done => done,
            },
        }
    }

    fn by_buffer(&self, device: &Arc<Device>, mut exec: Execbuffer, deadline: &Deadline) -> Result<()> {
        let stand_in = match lock(&self.stand_ins).pop() {
            Some(blob) => blob,
            None => {
                let flags = VIRTGPU_BLOB_FLAG_USE_MAPPABLE;
                GemBlob::new(device, VIRTGPU_BLOB_MEM_GUEST, flags, 0, STAND_IN)?
            }
        };
        let handles = [stand_in.handle()];
        exec.bo_handles = handles.as_ptr().expose_provenance() as u64;
        exec.num_bo_handles = 1;
        send(device, &mut exec)?;
        let mut wait = Wait { handle: stand_in.handle(), flags: 0 };
        loop {
            // SAFETY: the argument has no pointer.
            match unsafe { ioctl_once(device.fd()?, abi::request::WAIT, &mut wait) } {
                Ok(()) => break,
                Err(Errno::EINTR | Errno::EAGAIN) => {}
                // virtio_gpu_wait_ioctl: it waits for 15 seconds.
                Err(Errno::EBUSY) if !deadline.is_over() => {}
                Err(Errno::EBUSY) => return Err(deadline.missed()),
                Err(errno) => return Err(lost("DRM_IOCTL_VIRTGPU_WAIT", errno)),
            }
        }
        // One that was not waited for is left to the kernel.
        lock(&self.stand_ins).push(stand_in);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing panics while it is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The end of a wait.
struct Deadline {
    limit: Duration,
    /// None: never.
    at: Option<Instant>,
}

impl Deadline {
    fn after(limit: Duration) -> Deadline {
        Deadline { limit, at: Instant::now().checked_add(limit) }
    }

    /// None: no end.
    fn left(&self) -> Option<Duration> {
        self.at.map(|at| at.saturating_duration_since(Instant::now()))
    }

    fn is_over(&self) -> bool {
        self.left() == Some(Duration::ZERO)
    }

    fn missed(&self) -> TransportError {
        TransportError::Lost(format!("a fence did not complete in {} s", self.limit.as_secs()))
    }
}

/// The frame is under way, so that the connection cannot be used further.
fn lost(call: &str, errno: Errno) -> TransportError {
    TransportError::Lost(format!("{call}: {errno}"))
}

/// Sends. An error of the kernel's own, which was short of something, leaves nothing sent.
fn send(device: &Device, exec: &mut Execbuffer) -> Result<()> {
    // SAFETY: command points to size bytes that the kernel copies before it returns, the lists to as many elements as
    // is said, which the callers hold; all other pointers are null with a count of 0.
    let sent = unsafe { ioctl(device.fd()?, abi::request::EXECBUFFER, exec) };
    sent.map_err(|error| {
        let call = "DRM_IOCTL_VIRTGPU_EXECBUFFER";
        let detail = format!("{} bytes on ring {}", exec.size, exec.ring_idx);
        match error.raw_os_error() {
            Some(libc::ENOMEM | libc::EMFILE | libc::ENFILE) => {
                TransportError::System { call, detail, error }
            }
            _ => TransportError::Lost(format!("{call} ({detail}): {error}")),
        }
    })
}

fn by_syncobj(
    device: &Device,
    idle: &Mutex<Vec<u32>>,
    mut exec: Execbuffer,
    deadline: &Deadline,
) -> Result<()> {
    let taken = lock(idle).pop();
    let handle = match taken {
        Some(handle) => handle,
        None => {
            let mut create = Create::default();
            // SAFETY: the argument has no pointer.
            unsafe { ioctl(device.fd()?, SYNCOBJ_CREATE, &mut create) }.map_err(|error| {
                let call = "DRM_IOCTL_SYNCOBJ_CREATE";
                TransportError::System { call, detail: "a sync object".into(), error }
            })?;
            create.handle
        }
    };
    let signalled = [ExecbufferSyncobj { handle, flags: 0, point: 0 }];
    exec.syncobj_stride = size_of::<ExecbufferSyncobj>() as u32;
    exec.num_out_syncobjs = 1;
    exec.out_syncobjs = signalled.as_ptr().expose_provenance() as u64;
    if let Err(error) = send(device, &mut exec) {
        lock(idle).push(handle);
        return Err(error);
    }
    // EXECBUFFER has put its fence into the sync object, in the place of the last call's.
    let handles = [handle];
    loop {
        let mut wait = SyncobjWait {
            handles: handles.as_ptr().expose_provenance() as u64,
            timeout: monotonic_after(deadline.left()),
            count: 1,
            ..Default::default()
        };
        // SAFETY: handles points to count numbers that live beyond the call.
        match unsafe { ioctl_once(device.fd()?, SYNCOBJ_WAIT, &mut wait) } {
            Ok(()) => break,
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(Errno::ETIME) if !deadline.is_over() => {}
            Err(Errno::ETIME) => return Err(deadline.missed()),
            Err(errno) => return Err(lost("DRM_IOCTL_SYNCOBJ_WAIT", errno)),
        }
    }
    lock(idle).push(handle);
    Ok(())
}

/// A time on CLOCK_MONOTONIC, in nanoseconds: the far future for none.
fn monotonic_after(left: Option<Duration>) -> i64 {
    let Some(left) = left else { return i64::MAX };
    let nanoseconds = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
    let clock = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    // The clock is always there. Without it the kernel answers at once, and is asked again.
    clock.map_or(0, |now| nanoseconds(Duration::from(now)).saturating_add(nanoseconds(left)))
}

fn by_descriptor(device: &Device, mut exec: Execbuffer, deadline: &Deadline) -> Result<()> {
    exec.flags |= VIRTGPU_EXECBUF_FENCE_FD_OUT;
    send(device, &mut exec)?;
    // SAFETY: with FENCE_FD_OUT a successful EXECBUFFER has installed a new descriptor that nothing else owns.
    let fence = unsafe { OwnedFd::from_raw_fd(exec.fence_fd) };
    loop {
        let timeout = deadline
            .left()
            .map_or(PollTimeout::NONE, |left| PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX));
        match poll(&mut [PollFd::new(fence.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) if !deadline.is_over() => {}
            Ok(0) => return Err(deadline.missed()),
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(lost(&format!("poll of fence {}", fence.as_raw_fd()), errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_those_of_the_header() {
        // include/uapi/drm/drm.h of Linux 6.1, computed by hand: _IOWR('d', nr, size).
        assert_eq!((SYNCOBJ_CREATE, SYNCOBJ_WAIT), (0xc008_64bf, 0xc020_64c3));
    }

    #[test]
    fn a_deadline_is_a_time_of_the_monotonic_clock() {
        let before = monotonic_after(Some(Duration::ZERO));
        let later = monotonic_after(Some(Duration::from_secs(5)));
        assert!(before > 0 && later - before >= 5_000_000_000, "{before} {later}");
        assert_eq!(monotonic_after(None), i64::MAX);
        assert_eq!(monotonic_after(Some(Duration::MAX)), i64::MAX);
        assert!(Deadline::after(Duration::ZERO).is_over());
        assert!(!Deadline::after(Duration::from_secs(1000)).is_over());
        assert!(!Deadline::after(Duration::MAX).is_over());
    }
}
