//! The descriptors of this process that stand for something of the service's.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use nix::errno::Errno;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::DupFlags;

use crate::attributes::Attributes;
use crate::instance::{Bypass, Instance, owns_tables};
use crate::kernel::{errno, identity};
use crate::service::{FileId, Result};
use crate::table::{Held, Table};

static FILES: Table<OpenFile> = Table::new();

/// What a descriptor of the table stands for; copies of a descriptor share it.
pub struct OpenFile {
    /// What `fstat` says.
    pub attributes: Attributes,
    /// What it is.
    pub kind: Kind,
    /// `O_RDONLY`, `O_WRONLY` or `O_RDWR`, or `O_PATH`'s own 0, as `F_GETFL` shows it.
    pub access: i32,
    /// Where it was opened: resolved, absolute.
    pub path: PathBuf,
    /// Device and inode number of the kernel's file behind the descriptor. A descriptor can be closed and its
    /// number given out again without a call of this library (`fclose`, a raw system call); then these
    /// differ, and the number is no longer the service's.
    identity: (u64, u64),
}

/// The kinds of open files.
pub enum Kind {
    /// A file with content: an ordinary one of the kernel, but for what `stat` says.
    Content,
    /// A device file.
    Device(DeviceFile),
    /// A directory, or anything opened with `O_PATH`: paths can begin here.
    Place,
}

/// An open file description of the service, released when the last descriptor is gone and no call is in
/// flight, like `struct file`.
pub struct DeviceFile {
    /// The service that opened it.
    pub instance: &'static Instance,
    /// The service's name for it.
    pub file: FileId,
}

impl Drop for DeviceFile {
    fn drop(&mut self) {
        // In a forked child the parent still has it.
        if self.instance.is_live() {
            let _ = self.instance.call(|service| {
                service.release(self.file);
                Ok(())
            });
        }
    }
}

/// What `fd` stands for to the program, if it is still the file that was opened. The service sees the kernel's
/// file behind it.
pub fn get(fd: RawFd) -> Option<Held<OpenFile>> {
    if !FILES.has(fd) || Bypass::is_active() {
        return None;
    }
    let held = FILES.get(fd)?;
    if identity(fd) == Some(held.identity) {
        return Some(held);
    }
    if owns_tables() {
        drop(FILES.take(fd));
    }
    None
}

/// Takes over `descriptor` as `kind`, opened at `path` with `flags`, and returns its number.
pub fn insert(
    descriptor: OwnedFd,
    attributes: Attributes,
    kind: Kind,
    path: &std::path::Path,
    flags: i32,
) -> Result<RawFd> {
    let identity = identity(descriptor.as_raw_fd()).ok_or(Errno::EBADF)?;
    // O_PATH leaves no access.
    let access = if flags & libc::O_PATH == 0 { flags & libc::O_ACCMODE } else { 0 };
    let path = path.to_owned();
    let held = FILES.hold(OpenFile { attributes, kind, access, path, identity });
    let fd = std::os::fd::IntoRawFd::into_raw_fd(descriptor);
    drop(FILES.set(fd, held));
    Ok(fd)
}

/// Forgets `fd` before it is closed or replaced. What it stood for is to be dropped when that is done, or
/// [`restore`]d when it failed.
pub fn forget(fd: RawFd) -> Option<Held<OpenFile>> {
    if FILES.has(fd) && owns_tables() { FILES.take(fd) } else { None }
}

/// Undoes [`forget`].
pub fn restore(fd: RawFd, held: Option<Held<OpenFile>>) {
    if let Some(held) = held {
        drop(FILES.set(fd, held));
    }
}

/// Forgets all from `first` to `last`.
pub fn forget_range(first: u32, last: u32) {
    if owns_tables() {
        FILES.take_range(first, last);
    }
}

/// The kernel gave out `copy` for the file of `fd`.
pub fn copied(fd: RawFd, copy: RawFd) {
    match get(fd) {
        Some(held) if owns_tables() => drop(FILES.set(copy, held)),
        _ => given_out(copy),
    }
}

/// The kernel gave out `fd` for a file of its own.
pub fn given_out(fd: RawFd) {
    drop(forget(fd));
}

/// A file with `content` and mode 0444 that can be read, positioned and mapped and not written.
pub fn content_file(content: &[u8], cloexec: bool) -> Result<OwnedFd> {
    let memory = rustix::fs::memfd_create(c"kfd-seam", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(errno)?;
    let mut rest = content;
    while !rest.is_empty() {
        let written = rustix::io::write(&memory, rest).map_err(errno)?;
        rest = rest.get(written..).ok_or(Errno::EIO)?;
    }
    rustix::fs::fchmod(&memory, Mode::RUSR | Mode::RGRP | Mode::ROTH).map_err(errno)?;
    rustix::fs::fcntl_add_seals(
        &memory,
        SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
    )
    .map_err(errno)?;
    // A second open of the same memory has the access mode of the program's open and its position at the
    // start. Without /proc the first one does: the seals keep it as it is.
    rustix::fs::seek(&memory, rustix::fs::SeekFrom::Start(0)).map_err(errno)?;
    reopened(memory, OFlags::RDONLY, cloexec)
}

/// `memory` opened anew with `access`, under the same number: open(2) gives out the lowest that is free, and programs count on it. As it is
/// where there is no `/proc`.
fn reopened(mut memory: OwnedFd, access: OFlags, cloexec: bool) -> Result<OwnedFd> {
    let link = format!("/proc/self/fd/{}", memory.as_raw_fd());
    match rustix::fs::open(link, access | OFlags::CLOEXEC, Mode::empty()) {
        Ok(opened) => {
            let flags = if cloexec { DupFlags::CLOEXEC } else { DupFlags::empty() };
            rustix::io::dup3(&opened, &mut memory, flags).map_err(errno)?;
        }
        Err(_) => set_cloexec(&memory, cloexec)?,
    }
    Ok(memory)
}

/// A descriptor for a place of the service's: the real directory when there is one of that path and it is to
/// show through, else one that is good for nothing by itself. That is no directory, so that the real system does nothing at a place of its
/// own where the program means this one: `fchdir`, `mkdirat`, `unlinkat` and the like fail with `ENOTDIR`.
pub fn place_file(path: &std::path::Path, real: bool, cloexec: bool) -> Result<OwnedFd> {
    let mut directory = OFlags::RDONLY | OFlags::DIRECTORY;
    directory.set(OFlags::CLOEXEC, cloexec);
    if real && let Ok(opened) = rustix::fs::open(path.as_os_str().as_bytes(), directory, Mode::empty()) {
        return Ok(opened);
    }
    // A file of its own, which tells the descriptor from one that the number is given to later.
    let memory = rustix::fs::memfd_create(c"kfd-seam", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(errno)?;
    rustix::fs::fchmod(&memory, Mode::empty()).map_err(errno)?;
    rustix::fs::fcntl_add_seals(
        &memory,
        SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
    )
    .map_err(errno)?;
    // Without /proc a read finds nothing there.
    reopened(memory, OFlags::PATH, cloexec)
}

/// Sets or clears `FD_CLOEXEC`.
pub fn set_cloexec(descriptor: &OwnedFd, cloexec: bool) -> Result<()> {
    let flags = if cloexec { rustix::io::FdFlags::CLOEXEC } else { rustix::io::FdFlags::empty() };
    rustix::io::fcntl_setfd(descriptor, flags).map_err(errno)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn a_content_file_reads_and_does_not_write() {
        let mut file = File::from(content_file(b"gfx_target_version 90006\n", true).unwrap());
        let metadata = file.metadata().unwrap();
        assert_eq!((metadata.mode(), metadata.len()), (libc::S_IFREG | 0o444, 25));
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "gfx_target_version 90006\n");
        file.rewind().unwrap();
        let mut start = [0; 3];
        file.read_exact_at(&mut start, 0).unwrap();
        assert_eq!(&start, b"gfx");
        let error = file.write(b"x").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        assert!(file.set_len(0).is_err());
    }

    #[test]
    fn an_empty_content_file_is_at_its_end() {
        let mut text = String::new();
        File::from(content_file(b"", false).unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "");
    }

    #[test]
    fn a_place_without_a_real_directory_opens_and_is_no_directory() {
        let open = || place_file(std::path::Path::new("/no/such/directory"), true, true).unwrap();
        let (place, other) = (open(), open());
        assert_ne!(identity(place.as_raw_fd()), identity(other.as_raw_fd()));
        assert_eq!(rustix::process::fchdir(&place), Err(rustix::io::Errno::NOTDIR));
        assert_eq!(rustix::fs::mkdirat(&place, "none", Mode::RWXU), Err(rustix::io::Errno::NOTDIR));
        assert_eq!(rustix::io::read(&place, &mut [0; 8]), Err(rustix::io::Errno::BADF));
        assert!(rustix::io::fcntl_getfd(&place).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        let real = place_file(std::path::Path::new("/usr"), true, false).unwrap();
        let usr = std::fs::metadata("/usr").unwrap();
        assert_eq!(identity(real.as_raw_fd()), Some((usr.dev(), usr.ino())));
        assert!(!rustix::io::fcntl_getfd(&real).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}
