//! Memory of the host in files of a virtio-fs mount: to the guest's kernel it is ordinary pages, which direct I/O, a debugger
//! and the like can take hold of (ADR 3).
//!
//! The file is made under a secret name, and is memory of this context once a blob is made with that name. It has no link
//! from the start: the last that maps it ends it, also when this process is killed.

use std::any::Any;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use kfd_abi::virtgpu::VIRTGPU_BLOB_MEM_HOST3D;
use virtio_kfd_protocol::{GuestVa, ResourceId, ShareToken};

use super::Device;
use super::blob::GemBlob;
use crate::transport::{Blob, Result, TransportError};

/// By what the daemon's file system is mounted.
const TAG: &[u8] = b"virtio-kfd";

/// What the kernel lays into the window at a time (`FUSE_DAX_SZ`).
const GRANULE: usize = 2 << 20;

/// Smallest page of an x86-64 guest.
const PAGE: usize = 4096;

/// `MADV_POPULATE_WRITE` (Linux 5.14)
const MADV_POPULATE_WRITE: libc::c_int = 23;

/// The mount of this guest, if it has one.
pub(super) struct Mount {
    directory: OwnedFd,
}

/// Memory of a file, and the blob that is made with its name.
pub(super) struct PoolBlob {
    blob: GemBlob,
    /// Until it is mapped: from then on the mapping keeps it.
    file: Mutex<Option<File>>,
    size: u64,
}

fn failed(call: &'static str, detail: impl Into<String>) -> impl FnOnce(io::Error) -> TransportError {
    let detail = detail.into();
    move |error| TransportError::System { call, detail, error }
}

impl Mount {
    /// Looks for it. Without one, or the right to it, there is none.
    pub(super) fn find() -> Option<Mount> {
        let table = std::fs::read("/proc/self/mountinfo").ok()?;
        let path = table.split(|byte| *byte == b'\n').find_map(mount_point)?;
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: the path is a terminated string that lives beyond the call.
        let fd = unsafe { libc::open(path.as_ptr(), libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC) };
        if fd < 0 {
            return None;
        }
        // SAFETY: the kernel has just installed this descriptor, and nothing else owns it.
        Some(Mount { directory: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Memory of `size` bytes, a multiple of the page size, zeroed.
    pub(super) fn allocate(&self, device: &Arc<Device>, size: u64) -> Result<PoolBlob> {
        let name = secret()?;
        let file = self.create(name, size)?;
        lay(&file, size)?;
        let blob = GemBlob::new(device, VIRTGPU_BLOB_MEM_HOST3D, 0, name.0, size)?;
        Ok(PoolBlob { blob, file: Mutex::new(Some(file)), size })
    }

    fn create(&self, name: ShareToken, size: u64) -> Result<File> {
        let text = CString::new(format!("{:016x}", name.0)).unwrap_or_default();
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
        // SAFETY: the name is a terminated string that lives beyond the call.
        let fd = unsafe { libc::openat(self.directory.as_raw_fd(), text.as_ptr(), flags, 0o600) };
        if fd < 0 {
            // Not its name: that is a secret.
            return Err(failed("openat", "a file of the memory mount")(io::Error::last_os_error()));
        }
        // SAFETY: the kernel has just installed this descriptor, and nothing else owns it.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(size).map_err(failed("ftruncate", format!("{size} bytes of the memory mount")))?;
        Ok(file)
    }
}

/// The mount point in a line of mountinfo (proc_pid_mountinfo(5)), if it is the daemon's file system.
fn mount_point(line: &[u8]) -> Option<PathBuf> {
    let mut fields = line.split(|byte| *byte == b' ');
    let point = fields.nth(4)?;
    let mut after = fields.skip_while(|field| *field != b"-").skip(1);
    if after.next()? != b"virtiofs" || after.next()? != TAG {
        return None;
    }
    Some(PathBuf::from(OsString::from_vec(unescape(point))))
}

/// Spaces and the like stand in octal in that table.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, later)) = rest.split_first() {
        let octal = match (first, later.get(..3)) {
            (b'\\', Some(digits)) => str::from_utf8(digits).ok().and_then(|d| u8::from_str_radix(d, 8).ok()),
            _ => None,
        };
        plain.push(octal.unwrap_or(*first));
        rest = if octal.is_some() { later.get(3..).unwrap_or(&[]) } else { later };
    }
    plain
}

/// A name that nobody guesses.
fn secret() -> Result<ShareToken> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is exclusive and as long as is said.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if usize::try_from(got) != Ok(bytes.len()) {
        return Err(failed("getrandom", "8 bytes")(io::Error::last_os_error()));
    }
    Ok(ShareToken(u64::from_ne_bytes(bytes) | ShareToken::BIT))
}

/// Maps the file at `address`, or anywhere if that is 0.
///
/// # Safety
/// Nothing that others use is mapped in the range.
unsafe fn map(file: BorrowedFd<'_>, address: usize, length: usize, protection: i32) -> Result<usize> {
    let fixed = if address == 0 { 0 } else { libc::MAP_FIXED };
    let at = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: what is mapped over is nobody's, as the caller says.
    let mapped = unsafe { libc::mmap(at, length, protection, libc::MAP_SHARED | fixed, file.as_raw_fd(), 0) };
    if mapped == libc::MAP_FAILED {
        let detail = format!("{length} bytes of the memory mount at {address:#x}");
        return Err(failed("mmap", detail)(io::Error::last_os_error()));
    }
    Ok(mapped.expose_provenance())
}

/// Has the kernel lay the whole file into the window, which it otherwise does when it is first touched. That there is no
/// room shows here, and not as a SIGBUS later.
fn lay(file: &File, size: u64) -> Result<()> {
    use std::os::fd::AsFd;
    let invalid = |_| failed("mmap", format!("{size} bytes"))(io::Error::from_raw_os_error(libc::EINVAL));
    let length = usize::try_from(size).map_err(invalid)?;
    // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
    let address = unsafe { map(file.as_fd(), 0, length, libc::PROT_READ | libc::PROT_WRITE) }?;
    let populate = |offset| {
        let at = std::ptr::with_exposed_provenance_mut(address.saturating_add(offset));
        // SAFETY: the page lies in the mapping made above, which nothing else knows of; populating changes no content.
        match unsafe { libc::madvise(at, PAGE, MADV_POPULATE_WRITE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let laid = (0..length).step_by(GRANULE).try_for_each(populate);
    // SAFETY: the range is the mapping made above, unmapped only here. It cannot fail for want of anything but kernel
    // memory, and then stays, which harms nobody.
    let _ = unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(address), length) };
    laid.map_err(failed("madvise(MADV_POPULATE_WRITE)", format!("{size} bytes of the memory mount")))
}

impl Blob for PoolBlob {
    fn resource(&self) -> ResourceId {
        self.blob.resource()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn map_fixed(&self, address: GuestVa, length: u64, protection: i32) -> Result<()> {
        use std::os::fd::AsFd;
        let invalid = || TransportError::NotSupported("mapping memory of the pool at such an address");
        let at = usize::try_from(address.0).ok().filter(|at| *at != 0).ok_or_else(invalid)?;
        let length = usize::try_from(length).ok().filter(|_| length <= self.size).ok_or_else(invalid)?;
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner).take();
        let file = file.ok_or(TransportError::NotSupported("mapping memory of the pool a second time"))?;
        // SAFETY: the caller of map_fixed has reserved the range, so that nothing is mapped over that others use.
        unsafe { map(file.as_fd(), at, length, protection) }?;
        Ok(())
    }

    fn export(&self) -> Result<OwnedFd> {
        Err(TransportError::NotSupported("a dma-buf of pageable memory"))
    }

    fn mmap_offset(&self) -> Result<u64> {
        Err(TransportError::NotSupported("memory of the pool through the device"))
    }

    fn close_handle(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        // Mappings are the file's; the blob has none that would keep the resource.
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_is_found_by_its_tag() {
        // proc_pid_mountinfo(5); optional fields before the hyphen, and a space in the path.
        let ours = br"45 29 0:41 / /run/virtio\040kfd rw,nosuid shared:7 master:1 - virtiofs virtio-kfd rw,dax=always";
        assert_eq!(mount_point(ours), Some("/run/virtio kfd".into()));
        for other in [
            &br"45 29 0:41 / /mnt rw - virtiofs share rw"[..],
            br"45 29 0:41 / /mnt rw shared:7 - tmpfs virtio-kfd rw",
            br"45 29 0:41 / /virtiofs rw virtio-kfd",
            b"",
        ] {
            assert_eq!(mount_point(other), None);
        }
    }

    #[test]
    fn octal_stands_for_what_would_break_a_line() {
        assert_eq!(unescape(br"/a\040b\134c\9"), br"/a b\c\9");
    }

    #[test]
    fn names_are_tokens_and_differ() {
        let (one, two) = (secret().unwrap(), secret().unwrap());
        assert_ne!(one, two);
        assert!(ShareToken::from_blob_id(one.0).is_some());
    }
}
