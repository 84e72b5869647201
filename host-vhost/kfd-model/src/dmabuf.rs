//! dma-bufs: descriptors of buffers that can be passed to other processes.
//!
//! A dma-buf is an open file description of the arena that the buffer lies in, with a lock on the buffer's range that
//! keeps it from being reused ([`Arena::open_range`]). Which range it is, its file position tells, which all copies
//! of a descriptor share, in this process and in others: [`MARK`] and the offset. A note behind the ranges of the arena
//! tells the rest ([`crate::arena::NOTES`]).
//!
//! The descriptor can be passed on like any other. Where a preload library with this model is under the program, `mmap`,
//! `lseek` and `fstat` on it show the buffer alone, as on the kernel ([`recognise`]); without one it is the whole arena.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use kfd_abi::memory::AllocFlags;
use kfd_seam::{Result, SharedMemory};
use nix::errno::Errno;
use nix::sys::stat::fstat;
use nix::unistd::{Whence, lseek};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::arena::{Arena, NOTE_SIZE, NOTES, PAGE, note_at, reopen};
use crate::object::OBJECT_FLAGS;

/// Set in the file position of a dma-buf; the rest is the offset of its range.
pub const MARK: i64 = 1 << 62;

/// `KFDMBUF1`, in the order of the bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"KFDMBUF1");

/// Words of driver metadata (`struct drm_amdgpu_gem_metadata`).
pub const METADATA_WORDS: usize = 64;

/// What other processes have to know of a range.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Note {
    magic: u64,
    /// Bytes of the range.
    pub size: u64,
    /// KFD's id of the GPU that has it.
    pub gpu_id: u32,
    /// VRAM or GTT, and [`OBJECT_FLAGS`].
    pub flags: u32,
    /// Metadata: bytes used.
    pub data_size: u32,
    pad: u32,
    /// Metadata: tiling.
    pub tiling: u64,
    /// Metadata: flags.
    pub data_flags: u64,
    /// Metadata.
    pub data: [u32; METADATA_WORDS],
    rest: [u64; 26],
}

const _: () = assert!(size_of::<Note>() == NOTE_SIZE as usize);

impl Note {
    /// A note without metadata.
    pub fn new(size: u64, gpu_id: u32, flags: AllocFlags) -> Self {
        let flags = flags & (AllocFlags::VRAM | AllocFlags::GTT | OBJECT_FLAGS);
        Self { magic: MAGIC, size, gpu_id, flags: flags.bits(), ..Self::new_zeroed() }
    }

    /// The flags.
    pub fn flags(&self) -> AllocFlags {
        AllocFlags::from_bits_retain(self.flags)
    }

    /// Reads the note of the range at `offset`; `None` when it has none.
    pub fn read(arena: &Arena, offset: u64) -> Option<Self> {
        let mut note = Self::new_zeroed();
        arena.read(note_at(offset)?, note.as_mut_bytes()).ok()?;
        (note.magic == MAGIC).then_some(note)
    }

    /// Writes it.
    ///
    /// # Errors
    /// `EFAULT` when it cannot be written.
    pub fn write(&self, arena: &Arena, offset: u64) -> Result<()> {
        arena.write_note(offset, self.as_bytes())
    }
}

/// A dma-buf that a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaBuf {
    /// Device and inode number of the arena.
    pub arena: (u64, u64),
    /// Offset in it.
    pub offset: u64,
    /// The rest.
    pub note: Note,
}

/// A new descriptor of the range at `offset`, which must have a note.
///
/// # Errors
/// `EMFILE` and the like.
pub fn export(arena: &Arena, offset: u64, size: u64, writable: bool) -> Result<OwnedFd> {
    let descriptor = arena.open_range(offset, size, writable)?;
    let position = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW)? | MARK;
    lseek(&descriptor, position, Whence::SeekSet)?;
    Ok(descriptor)
}

/// What dma-buf a descriptor is, if it is one.
pub fn examine(descriptor: impl AsFd) -> Option<DmaBuf> {
    let position = lseek(&descriptor, 0, Whence::SeekCur).ok().filter(|position| position & MARK != 0)?;
    let offset = u64::try_from(position & !MARK).ok().filter(|offset| offset.is_multiple_of(PAGE))?;
    let status = fstat(&descriptor).ok()?;
    let file = File::from(descriptor.as_fd().try_clone_to_owned().ok()?);
    let mut note = Note::new_zeroed();
    file.read_exact_at(note.as_mut_bytes(), note_at(offset)?).ok()?;
    let fits = offset.checked_add(note.size).is_some_and(|end| end <= NOTES);
    let whole = note.size != 0 && note.size.is_multiple_of(PAGE) && note.magic == MAGIC;
    (fits && whole).then_some(DmaBuf { arena: (status.st_dev, status.st_ino), offset, note })
}

/// What a descriptor that a program maps or asks about shows, if it is a dma-buf. For [`kfd_seam::Preload::shared`].
pub fn recognise(descriptor: std::os::fd::BorrowedFd<'_>) -> Option<SharedMemory> {
    let found = examine(descriptor)?;
    Some(SharedMemory { offset: found.offset, size: found.note.size })
}

/// The arena behind another process's dma-buf, through a description that keeps the range in use.
///
/// # Errors
/// `EMFILE` and the like.
pub fn import(descriptor: impl AsFd, found: &DmaBuf) -> Result<Arena> {
    let file = reopen(descriptor, true)?;
    crate::locks::share(&file, found.offset, found.note.size)?;
    Ok(Arena::of_another(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dma_buf_is_known_by_any_copy_of_its_descriptor() {
        let arena = Arena::new("test", 64 * PAGE).unwrap();
        let offset = arena.allocate(3 * PAGE).unwrap();
        let note = Note::new(3 * PAGE, 7, AllocFlags::VRAM | AllocFlags::WRITABLE);
        assert_eq!(note.flags(), AllocFlags::VRAM);
        note.write(&arena, offset).unwrap();
        let exported = export(&arena, offset, 3 * PAGE, true).unwrap();
        let copy = exported.try_clone().unwrap();
        drop(exported);
        let found = examine(&copy).unwrap();
        assert_eq!(found, DmaBuf { arena: arena.identity().unwrap(), offset, note });
        let shared = recognise(copy.as_fd()).unwrap();
        assert_eq!((shared.offset, shared.size), (offset, 3 * PAGE));
        let imported = import(&copy, &found).unwrap();
        drop(copy);
        assert!(arena.is_used_elsewhere(offset, 3 * PAGE));
        arena.write(offset, b"one memory").unwrap();
        let mut bytes = [0; 10];
        imported.read(offset, &mut bytes).unwrap();
        assert_eq!(&bytes, b"one memory");
        drop(imported);
        assert!(!arena.is_used_elsewhere(offset, 3 * PAGE));
    }

    #[test]
    fn other_files_are_none() {
        let arena = Arena::new("test", 64 * PAGE).unwrap();
        let offset = arena.allocate(PAGE).unwrap();
        assert_eq!(examine(arena.open().unwrap()), None, "no mark");
        assert_eq!(examine(export(&arena, offset, PAGE, true).unwrap()), None, "no note");
        for size in [0, 1, 1 << 60, !(PAGE - 1)] {
            Note::new(size, 7, AllocFlags::VRAM).write(&arena, offset).unwrap();
            assert_eq!(examine(export(&arena, offset, PAGE, true).unwrap()), None, "size {size:#x}");
        }
        let (reader, _writer) = nix::unistd::pipe().unwrap();
        assert_eq!(examine(reader), None, "no position");
        assert_eq!(examine(File::open("/proc/self/exe").unwrap()), None);
    }
}
