//! Open device files. Each is a memfd of its own, so that its inode tells which one a descriptor is.
#![allow(unsafe_code, reason = "a descriptor's number comes from the program")]

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use kfd_seam::{FileId, Result};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;

use super::{BorrowedFd, OpenFile};

/// A file, and the device and inode number of what the program has of it.
type Known = (OpenFile, (u64, u64));

/// All open files.
#[derive(Default)]
pub struct Files {
    open: BTreeMap<FileId, Known>,
    last: u64,
    /// The render nodes by which the process acquired the memory of GPUs, by their index: for good, as amdkfd keeps the file.
    acquired: BTreeMap<usize, FileId>,
}

impl Files {
    /// Opens one.
    pub fn open(&mut self, what: OpenFile) -> Result<(FileId, OwnedFd)> {
        let descriptor = memfd_create(c"virtio-kfd", MFdFlags::MFD_CLOEXEC)?;
        let status = fstat(&descriptor)?;
        self.last = self.last.checked_add(1).ok_or(Errno::ENFILE)?;
        let file = FileId(self.last);
        self.open.insert(file, (what, (status.st_dev, status.st_ino)));
        Ok((file, descriptor))
    }

    /// What it is.
    pub fn get(&self, file: FileId) -> Option<OpenFile> {
        self.open.get(&file).map(|(what, _)| *what)
    }

    /// What a descriptor of the process is.
    pub fn of_descriptor(&self, number: i32) -> Option<(FileId, OpenFile)> {
        // SAFETY: the borrow is used for one call, which fails or tells of whatever the number is then.
        let status = fstat(unsafe { BorrowedFd::borrow_raw(number) }).ok()?;
        let identity = (status.st_dev, status.st_ino);
        self.open.iter().find(|(_, (_, known))| *known == identity).map(|(file, (what, _))| (*file, *what))
    }

    /// Notes that `file` acquires the memory of the GPU `index`, and whether it is the first to. EBUSY when another file has
    /// (`kfd_ioctl_acquire_vm()`).
    pub fn acquire(&mut self, index: usize, file: FileId) -> Result<bool> {
        match self.acquired.get(&index) {
            Some(acquired) if *acquired != file => Err(Errno::EBUSY),
            Some(_) => Ok(false),
            None => {
                self.acquired.insert(index, file);
                Ok(true)
            }
        }
    }

    /// It failed after all.
    pub fn not_acquired(&mut self, index: usize) {
        self.acquired.remove(&index);
    }

    /// Closes one.
    pub fn close(&mut self, file: FileId) {
        self.open.remove(&file);
    }
}
