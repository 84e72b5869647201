//! Buffer objects (`struct amdgpu_bo`): memory with an owner, shared by everything that refers to it.

use std::collections::BTreeMap;
use std::mem;
use std::ops::Bound;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kfd_abi::memory::AllocFlags;
use kfd_seam::Result;
use nix::errno::Errno;

use crate::arena::Arena;
use crate::dmabuf::{self, Note};
use crate::ledger::{Charge, Ledger};
use crate::space::Backing;

/// Flags that say how an object is cached, and whether the CPU may map it.
pub const OBJECT_FLAGS: AllocFlags = AllocFlags::PUBLIC
    .union(AllocFlags::COHERENT)
    .union(AllocFlags::UNCACHED)
    .union(AllocFlags::EXT_COHERENT);

/// A range of an arena with what it costs, given back when it is dropped.
#[derive(Debug)]
pub struct Piece {
    /// The arena of the GPU that has it.
    pub arena: Arc<Arena>,
    /// Offset in the arena.
    pub offset: u64,
    /// Bytes, whole pages.
    pub size: u64,
    /// VRAM or GTT, and [`OBJECT_FLAGS`].
    pub flags: AllocFlags,
    /// Whether CPUs may map it (`AMDGPU_GEM_CREATE_NO_CPU_ACCESS`).
    pub cpu_access: bool,
    /// What it costs.
    charge: Charge,
    /// Who pays.
    ledger: Arc<Ledger>,
    /// It has a note for other processes.
    noted: AtomicBool,
    /// Others use the memory and the process ends: it stays with them.
    left: bool,
}

impl Piece {
    /// A range of `arena` for which `charge` was taken.
    pub fn new(
        arena: Arc<Arena>,
        offset: u64,
        size: u64,
        flags: AllocFlags,
        charge: Charge,
        ledger: Arc<Ledger>,
    ) -> Self {
        let noted = AtomicBool::new(false);
        Self { arena, offset, size, flags, cpu_access: true, charge, ledger, noted, left: false }
    }

    /// Leaves the memory to those that use it.
    fn leave(mut self) {
        self.left = true;
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if self.left {
            return self.ledger.give(&self.charge);
        }
        if *self.noted.get_mut() {
            // Where it fails, the note says what is free, and no descriptor of the range is left that could be asked.
            let _ = self.arena.erase_note(self.offset);
        }
        self.arena.free(self.offset, self.size);
        self.ledger.give(&self.charge);
    }
}

/// What an object is made of.
#[derive(Debug)]
pub enum Content {
    /// Memory of this process's model.
    Piece(Piece),
    /// Memory of another process's model, imported.
    Imported {
        /// Its arena; the description keeps the range in use.
        arena: Arc<Arena>,
        /// Offset in it.
        offset: u64,
        /// KFD's id of the GPU that has it.
        gpu_id: u32,
        /// VRAM or GTT, and [`OBJECT_FLAGS`].
        flags: AllocFlags,
    },
    /// Memory of the process at a CPU address.
    User {
        /// The address, whole pages.
        address: u64,
        /// [`OBJECT_FLAGS`].
        flags: AllocFlags,
        /// What it costs.
        charge: Charge,
        /// Who pays.
        ledger: Arc<Ledger>,
    },
    /// The doorbell slice or the page of remapped registers, which stay as long as the process.
    Registers {
        /// The arena of the GPU.
        arena: Arc<Arena>,
        /// Offset in it.
        offset: u64,
        /// DOORBELL or MMIO_REMAP.
        flags: AllocFlags,
    },
    /// Being dropped.
    Gone,
}

/// A buffer object.
#[derive(Debug)]
pub struct Object {
    /// Tells it from all others of this process.
    pub id: u64,
    /// Index of the GPU that it belongs to; `None` for memory of a GPU that this process does not know.
    pub gpu: Option<usize>,
    /// Bytes, whole pages.
    pub size: u64,
    /// Offset for `mmap` on a render node.
    pub mmap_offset: u64,
    content: Content,
    graveyard: Weak<Graveyard>,
}

impl Object {
    /// A new object.
    pub fn new(
        gpu: Option<usize>,
        size: u64,
        mmap_offset: u64,
        content: Content,
        graveyard: &Arc<Graveyard>,
    ) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        Self { id, gpu, size, mmap_offset, content, graveyard: Arc::downgrade(graveyard) }
    }

    /// What it is made of.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// What GPUs see from its start on.
    pub fn backing(&self) -> Backing {
        match &self.content {
            Content::Piece(Piece { arena, offset, .. })
            | Content::Imported { arena, offset, .. }
            | Content::Registers { arena, offset, .. } => {
                Backing::Arena { arena: arena.clone(), offset: *offset }
            }
            Content::User { address, .. } => Backing::User(*address),
            Content::Gone => Backing::Nothing,
        }
    }

    /// The kind of memory, and [`OBJECT_FLAGS`].
    pub fn flags(&self) -> AllocFlags {
        match &self.content {
            Content::Piece(piece) => piece.flags,
            Content::Imported { flags, .. } | Content::Registers { flags, .. } => *flags,
            Content::User { flags, .. } => *flags | AllocFlags::USERPTR,
            Content::Gone => AllocFlags::empty(),
        }
    }

    /// Its memory is VRAM.
    pub fn is_vram(&self) -> bool {
        self.flags().contains(AllocFlags::VRAM)
    }

    /// The note of its memory: what other processes see of it. It is written at the first use, for GPU `gpu_id`.
    ///
    /// # Errors
    /// `EPERM` for memory that cannot be shared (`amdgpu_gem_prime_export`); `EFAULT` when the note cannot be written.
    pub fn note(&self, gpu_id: u32) -> Result<Note> {
        match &self.content {
            Content::Piece(piece) => {
                if piece.noted.load(Ordering::Acquire)
                    && let Some(note) = Note::read(&piece.arena, piece.offset)
                {
                    return Ok(note);
                }
                let note = Note::new(self.size, gpu_id, piece.flags);
                note.write(&piece.arena, piece.offset)?;
                piece.noted.store(true, Ordering::Release);
                Ok(note)
            }
            Content::Imported { arena, offset, .. } => Note::read(arena, *offset).ok_or(Errno::EINVAL),
            _ => Err(Errno::EPERM),
        }
    }

    /// A dma-buf of it (`drm_gem_prime_export`); `gpu_id` is that of its GPU.
    ///
    /// # Errors
    /// As [`Self::note`]; `EMFILE` and the like.
    pub fn export(&self, gpu_id: u32, writable: bool) -> Result<OwnedFd> {
        self.note(gpu_id)?;
        match self.range() {
            Some((arena, offset)) => dmabuf::export(arena, offset, self.size, writable),
            None => Err(Errno::EPERM),
        }
    }

    /// The arena and the offset of memory that can be shared.
    pub fn range(&self) -> Option<(&Arc<Arena>, u64)> {
        match &self.content {
            Content::Piece(piece) => Some((&piece.arena, piece.offset)),
            Content::Imported { arena, offset, .. } => Some((arena, *offset)),
            _ => None,
        }
    }

    /// The arena and the offset of memory that a CPU can map through a render node.
    pub fn mappable(&self) -> Option<(&Arc<Arena>, u64)> {
        match &self.content {
            Content::Piece(piece) if piece.cpu_access => Some((&piece.arena, piece.offset)),
            Content::Imported { arena, offset, .. } => Some((arena, *offset)),
            _ => None,
        }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        match mem::replace(&mut self.content, Content::Gone) {
            Content::Piece(piece) if piece.arena.is_used_elsewhere(piece.offset, piece.size) => {
                match self.graveyard.upgrade() {
                    Some(graveyard) => graveyard.bury(piece),
                    None => piece.leave(),
                }
            }
            Content::User { charge, ledger, .. } => ledger.give(&charge),
            other => drop(other),
        }
    }
}

/// Memory that this process has no object for any more and that is still in use: by dma-bufs, by their maps, by other
/// processes. It costs what it did until the last use is gone.
#[derive(Debug, Default)]
pub struct Graveyard {
    graves: Mutex<Graves>,
}

/// Which arena, by its place in memory, and the offset.
type Key = (usize, u64);

#[derive(Debug, Default)]
struct Graves {
    pieces: BTreeMap<Key, Piece>,
    /// The last one that was looked at.
    last: Key,
}

impl Drop for Graveyard {
    fn drop(&mut self) {
        self.sweep();
        let graves = self.graves.get_mut().unwrap_or_else(PoisonError::into_inner);
        mem::take(&mut graves.pieces).into_values().for_each(Piece::leave);
    }
}

/// Pieces that one [`Graveyard::sweep_some`] looks at.
const SOME: usize = 16;

impl Graveyard {
    fn graves(&self) -> MutexGuard<'_, Graves> {
        self.graves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bury(&self, piece: Piece) {
        let key = (Arc::as_ptr(&piece.arena) as usize, piece.offset);
        let before = self.graves().pieces.insert(key, piece);
        drop(before);
    }

    /// Takes out what is used again (a dma-buf of it was imported).
    pub fn exhume(&self, arena: &Arc<Arena>, offset: u64) -> Option<Piece> {
        let key = (Arc::as_ptr(arena) as usize, offset);
        self.graves().pieces.remove(&key)
    }

    /// Gives back what is used no more, of some: all have their turn over several calls.
    pub fn sweep_some(&self) {
        self.sweep_next(SOME);
    }

    /// Gives back what is used no more.
    pub fn sweep(&self) {
        self.sweep_next(usize::MAX);
    }

    fn sweep_next(&self, most: usize) {
        let unused: Vec<Piece> = {
            let mut graves = self.graves();
            let next = (Bound::Excluded(graves.last), Bound::Unbounded);
            let around = graves.pieces.range(next).chain(graves.pieces.range(..=graves.last));
            let (keys, ended): (Vec<Key>, Vec<bool>) = around
                .take(most)
                .map(|(key, piece)| (*key, !piece.arena.is_used_elsewhere(piece.offset, piece.size)))
                .unzip();
            graves.last = keys.last().copied().unwrap_or(graves.last);
            let ended = keys.iter().zip(ended).filter(|(_, ended)| *ended);
            ended.filter_map(|(key, _)| graves.pieces.remove(key)).collect()
        };
        // Not under the lock: giving back takes others.
        drop(unused);
    }
}
