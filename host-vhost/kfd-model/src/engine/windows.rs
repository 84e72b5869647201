//! CPU maps of a memory file, made where they are needed.
//!
//! Atomic operations of the GPU need a host pointer to the page itself, and copies are fastest with one. A
//! file of which VRAM and system memory are ranges is large and mostly holes, so it is mapped in windows,
//! each when something in it is touched first. The windows live as long as the file's owner.
#![allow(unsafe_code, reason = "maps memory; every pointer that leaves is checked to lie in a window")]

use std::collections::BTreeMap;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use kfd_seam::Result;
use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};

/// Bytes that are mapped at once.
pub const WINDOW: u64 = 1 << 30;

/// The windows of one file.
#[derive(Debug, Default)]
pub struct Windows {
    by_number: Mutex<BTreeMap<u64, Window>>,
}

#[derive(Debug)]
struct Window(NonNull<libc::c_void>);

// SAFETY: a window is an address range that belongs to nobody else; it is not tied to a thread.
unsafe impl Send for Window {}

impl Window {
    fn new(file: &File, number: u64) -> Result<Self> {
        let start = number.checked_mul(WINDOW).ok_or(Errno::EFAULT)?;
        let start = i64::try_from(start).map_err(|_| Errno::EFAULT)?;
        let size = NonZeroUsize::new(WINDOW as usize).ok_or(Errno::EFAULT)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: a new map at an address that the kernel chooses changes no memory that is in use.
        let address = unsafe { mmap(None, size, access, flags, file.as_fd(), start) }?;
        let window = Self(address);
        // A forked child has no GPU, and must not keep the file's ranges in use.
        // SAFETY: the range is the map that was just made; this advice changes nothing for this process.
        unsafe { madvise(address, WINDOW as usize, MmapAdvise::MADV_DONTFORK) }?;
        Ok(window)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the range is the map that `new` made. Whoever has a pointer into it borrows the owner of the
        // windows, which is gone now.
        let unmapped = unsafe { munmap(self.0, WINDOW as usize) };
        debug_assert!(unmapped.is_ok(), "munmap of a whole map does not fail");
    }
}

impl Windows {
    /// Where `length` bytes of the file from `offset` on lie in memory, and how many of them in a row: the rest is in
    /// the next window. The caller knows that they are within the file; beyond its end an access is SIGBUS.
    ///
    /// # Errors
    /// What `mmap` answers; `EFAULT` for an offset that no file has.
    pub fn find(&self, file: &File, offset: u64, length: u64) -> Result<(NonNull<u8>, u64)> {
        let mut windows = self.by_number.lock().unwrap_or_else(PoisonError::into_inner);
        let number = offset / WINDOW;
        let window = match windows.entry(number) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => entry.insert(Window::new(file, number)?),
        };
        let inside = offset % WINDOW;
        let start = window.0.cast::<u8>();
        // SAFETY: `inside` is less than WINDOW, the size of the map that `start` is the beginning of.
        let pointer = unsafe { start.add(inside as usize) };
        Ok((pointer, length.min(WINDOW - inside)))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn a_window_shows_the_file_and_ends_where_the_next_begins() {
        let file = File::from(memfd_create("test", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(3 * WINDOW).unwrap();
        let windows = Windows::default();
        let (pointer, length) = windows.find(&file, WINDOW + 5, 100).unwrap();
        assert_eq!(length, 100);
        // SAFETY: the byte is in the window that was found, and no other thread uses it.
        unsafe { pointer.write_volatile(7) };
        let mut byte = [0];
        file.read_exact_at(&mut byte, WINDOW + 5).unwrap();
        assert_eq!(byte, [7]);
        let (again, length) = windows.find(&file, 2 * WINDOW - 5, 100).unwrap();
        assert_eq!(length, 5);
        assert_eq!(again.addr().get() - pointer.addr().get(), WINDOW as usize - 10);
        assert_eq!(windows.find(&file, u64::MAX, 1).unwrap_err(), Errno::EFAULT);
    }
}
