//! Memory that several processes can map: one memfd, of which ranges are given out.
//!
//! The descriptor of a render node *is* the memfd of its GPU's arena, and the mmap offset of a buffer is its
//! offset in that file. So whoever holds the descriptor can map a buffer without the model's help: a VMM that
//! got the descriptor by SCM_RIGHTS maps it with the offset that the kernel's interface would have given.
//!
//! A range can be in use outside of the buffer that it was taken for: by a dma-buf, its maps and its imports, in this
//! process or another. Whoever uses one has an open file description of its own with a shared lock on the range's
//! bytes, so that the end of the last use is seen ([`Arena::is_used_elsewhere`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kfd_seam::Result;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::engine::windows::Windows;
use crate::locks;

/// Page size of the GPU and of the CPU.
pub const PAGE: u64 = 4096;

/// The first range starts here, so that no valid offset is 0.
const FIRST_OFFSET: u64 = 1 << 20;

/// Behind all ranges: what other processes have to know of them ([`crate::dmabuf`]), [`NOTE_SIZE`] bytes for each page.
/// Arenas are smaller than this.
pub const NOTES: u64 = 1 << 45;

/// Bytes of a note.
pub const NOTE_SIZE: u64 = 512;

/// Where the note of the range that starts at `offset` lies.
pub fn note_at(offset: u64) -> Option<u64> {
    (offset / PAGE).checked_mul(NOTE_SIZE)?.checked_add(NOTES)
}

/// Rounds up to whole pages; `None` when that leaves 64 bits.
pub fn page_align(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(PAGE)
}

/// A memfd from which ranges are taken. Fresh memory reads as zeros.
#[derive(Debug)]
pub struct Arena {
    file: File,
    ranges: Mutex<Ranges>,
    /// Held while a note is written or taken away: several lie on a page.
    notes: Mutex<()>,
    windows: Windows,
}

impl Drop for Arena {
    fn drop(&mut self) {
        kfd_seam::hidden::show(self.file.as_raw_fd());
    }
}

impl Arena {
    /// Makes an arena for `capacity` bytes. Pages cost memory only when they are touched.
    ///
    /// # Errors
    /// What `memfd_create` and `ftruncate` answer.
    pub fn new(name: &str, capacity: u64) -> Result<Self> {
        let descriptor = kfd_seam::hidden::keep(memfd_create(name, MFdFlags::MFD_CLOEXEC)?);
        let end = FIRST_OFFSET.checked_add(capacity).filter(|end| *end <= NOTES).ok_or(Errno::ENOMEM)?;
        let file = File::from(descriptor);
        file.set_len(note_at(end).ok_or(Errno::ENOMEM)?).map_err(|error| errno(&error))?;
        Ok(Self {
            file,
            ranges: Mutex::new(Ranges::new(FIRST_OFFSET, end)),
            notes: Mutex::default(),
            windows: Windows::default(),
        })
    }

    /// The arena of another process, of which this one uses what it has a lock on. Nothing can be taken from it.
    pub fn of_another(file: File) -> Self {
        Self {
            file,
            ranges: Mutex::new(Ranges::new(0, 0)),
            notes: Mutex::default(),
            windows: Windows::default(),
        }
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a range of `length` bytes, rounded up to pages; its offset in the file.
    ///
    /// # Errors
    /// `ENOMEM` when no range is long enough.
    pub fn allocate(&self, length: u64) -> Result<u64> {
        let length = page_align(length).filter(|length| *length > 0).ok_or(Errno::ENOMEM)?;
        self.ranges().take(length).ok_or(Errno::ENOMEM)
    }

    /// Gives a range back and drops its pages. Mappings of it that are still there read zeros, until the range is
    /// taken again (the kernel keeps a buffer until its last mapping is gone).
    pub fn free(&self, offset: u64, length: u64) {
        let Some(length) = page_align(length) else { return };
        // Where it fails, the pages stay, and the next owner of the range must not see them.
        if self.punch(offset, length).is_err() {
            return;
        }
        self.ranges().give(offset, length);
    }

    /// Writes the note of the range that starts at `offset`.
    ///
    /// # Errors
    /// `EFAULT` when it cannot be written.
    pub fn write_note(&self, offset: u64, note: &[u8]) -> Result<()> {
        let _notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        self.write(note_at(offset).ok_or(Errno::EFAULT)?, note)
    }

    /// Takes the note of the range that starts at `offset` away, and its page with the last one in it.
    ///
    /// # Errors
    /// `EFAULT` when it cannot be written.
    pub fn erase_note(&self, offset: u64) -> Result<()> {
        let at = note_at(offset).ok_or(Errno::EFAULT)?;
        let _notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        self.write(at, &[0; NOTE_SIZE as usize])?;
        let start = at - at % PAGE;
        let mut page = [0; PAGE as usize];
        self.read(start, &mut page)?;
        if page.iter().all(|byte| *byte == 0) {
            // Where it fails, a page of zeros stays.
            let _ = self.punch(start, PAGE);
        }
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        let start = i64::try_from(offset).map_err(|_| Errno::EFAULT)?;
        let size = i64::try_from(length).map_err(|_| Errno::EFAULT)?;
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&self.file, mode, start, size)
    }

    /// Reads at a file offset.
    ///
    /// # Errors
    /// `EFAULT` past the end of the file.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buffer, offset).map_err(|_| Errno::EFAULT)
    }

    /// Writes at a file offset.
    ///
    /// # Errors
    /// `EFAULT` when the bytes cannot be written.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(|_| Errno::EFAULT)
    }

    /// A descriptor of the file, with an open file description of its own where `/proc` can be had.
    ///
    /// # Errors
    /// `EMFILE` and the like.
    pub fn open(&self) -> Result<OwnedFd> {
        match reopen(&self.file, true) {
            Ok(file) => Ok(file.into()),
            Err(_) => self.descriptor(),
        }
    }

    /// A descriptor with an open file description of its own, which keeps a range from being reused until its last
    /// copy is closed and its last map is gone.
    ///
    /// # Errors
    /// `EMFILE` and the like; `ENOENT` without `/proc`.
    pub fn open_range(&self, offset: u64, length: u64, writable: bool) -> Result<OwnedFd> {
        let file = reopen(&self.file, writable)?;
        locks::share(&file, offset, length)?;
        Ok(file.into())
    }

    /// Whether a range is in use by anything that [`Self::open_range`] gave out, in any process.
    pub fn is_used_elsewhere(&self, offset: u64, length: u64) -> bool {
        // What cannot be told is taken as used: the range is then lost, and nothing else.
        locks::held_elsewhere(&self.file, offset, length).unwrap_or(true)
    }

    /// Where bytes of the file lie in this process, and how many of `length` in a row. They are mapped as long as the
    /// arena lives.
    ///
    /// # Errors
    /// What `mmap` answers.
    pub fn host(&self, offset: u64, length: u64) -> Result<(NonNull<u8>, u64)> {
        self.windows.find(&self.file, offset, length)
    }

    /// Another descriptor of the same open file description, for a map.
    ///
    /// # Errors
    /// `EMFILE` and the like.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned().map_err(|error| errno(&error))
    }

    /// Device and inode number, which tell this file from all others.
    ///
    /// # Errors
    /// What `fstat` answers.
    pub fn identity(&self) -> Result<(u64, u64)> {
        // Not File::metadata, which is statx: a worker's system calls are listed, and fstat is the one for this.
        let status = nix::sys::stat::fstat(&self.file)?;
        Ok((status.st_dev, status.st_ino))
    }
}

/// Opens a file of this process again, for an open file description of its own.
///
/// # Errors
/// `EMFILE` and the like; `ENOENT` without `/proc`.
pub fn reopen(file: impl AsFd, writable: bool) -> Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    File::options().read(true).write(writable).open(path).map_err(|error| errno(&error))
}

fn errno(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// Free ranges by start. Ranges are taken one behind the other and reused as late as possible, so that a stale
/// mapping does not show another buffer soon.
#[derive(Debug)]
struct Ranges {
    free: BTreeMap<u64, u64>,
    cursor: u64,
}

impl Ranges {
    fn new(start: u64, end: u64) -> Self {
        Self { free: BTreeMap::from([(start, end.saturating_sub(start))]), cursor: start }
    }

    fn take(&mut self, length: u64) -> Option<u64> {
        let fits = |(_, free): &(&u64, &u64)| **free >= length;
        let after = self.free.range(self.cursor..).find(fits);
        let (start, free) = after.or_else(|| self.free.range(..self.cursor).find(fits))?;
        let (start, free) = (*start, *free);
        self.free.remove(&start);
        self.cursor = start.checked_add(length)?;
        if free > length {
            self.free.insert(self.cursor, free - length);
        }
        Some(start)
    }

    fn give(&mut self, start: u64, length: u64) {
        let (mut start, mut length) = (start, length);
        if let Some((before, free)) = self.free.range(..start).next_back()
            && before.checked_add(*free) == Some(start)
        {
            let before = *before;
            length = length.saturating_add(*free);
            start = before;
            self.free.remove(&before);
        }
        if let Some(behind) = start.checked_add(length)
            && let Some(free) = self.free.remove(&behind)
        {
            length = length.saturating_add(free);
        }
        self.free.insert(start, length);
        // A merge can swallow the cursor's place; the next range then starts at the merged one.
        if start < self.cursor && self.cursor < start.saturating_add(length) {
            self.cursor = start;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_come_back_whole() {
        let mut ranges = Ranges::new(0, 4 * PAGE);
        let all: Vec<u64> = (0..4).filter_map(|_| ranges.take(PAGE)).collect();
        assert_eq!(all, [0, PAGE, 2 * PAGE, 3 * PAGE]);
        assert_eq!(ranges.take(PAGE), None);
        for start in [PAGE, 3 * PAGE, 0, 2 * PAGE] {
            ranges.give(start, PAGE);
        }
        assert_eq!(ranges.take(4 * PAGE), Some(0));
    }

    #[test]
    fn a_freed_range_is_not_the_next_one_taken() {
        let mut ranges = Ranges::new(0, 8 * PAGE);
        let first = ranges.take(PAGE).unwrap();
        ranges.take(PAGE).unwrap();
        ranges.give(first, PAGE);
        assert_ne!(ranges.take(PAGE), Some(first));
    }

    #[test]
    fn a_range_is_in_use_until_its_last_descriptor_is_closed() {
        let arena = Arena::new("test", 16 * PAGE).unwrap();
        let offset = arena.allocate(2 * PAGE).unwrap();
        assert!(!arena.is_used_elsewhere(offset, 2 * PAGE));
        let used = arena.open_range(offset, 2 * PAGE, false).unwrap();
        let copy = used.try_clone().unwrap();
        assert!(arena.is_used_elsewhere(offset, 2 * PAGE));
        assert!(!arena.is_used_elsewhere(offset + 2 * PAGE, PAGE), "others are not");
        drop(used);
        assert!(arena.is_used_elsewhere(offset, 2 * PAGE));
        drop(copy);
        assert!(!arena.is_used_elsewhere(offset, 2 * PAGE));
    }

    #[test]
    fn freed_memory_reads_as_zeros() {
        let arena = Arena::new("test", 16 * PAGE).unwrap();
        let offset = arena.allocate(PAGE).unwrap();
        arena.write(offset, b"secret").unwrap();
        arena.free(offset, PAGE);
        let mut bytes = [1u8; 6];
        arena.read(offset, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 6]);
        assert_eq!(arena.allocate(u64::MAX), Err(Errno::ENOMEM));
        assert_eq!(arena.allocate(17 * PAGE), Err(Errno::ENOMEM));
    }
}
