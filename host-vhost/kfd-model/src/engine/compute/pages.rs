//! Pages of the GPU's memory, found fast: what a compute unit reads and writes through.
//!
//! A compute unit works in short slices. For a slice it holds the page table, so that what it found in it stays true,
//! and whoever changes the page table waits for the end of the slices that run: once memory is unmapped, no kernel has
//! a way to it. Between slices it keeps what it found, as long as the page table did not change
//! ([`PageTable::generation`]).
//!
//! Pages of the process (user pointers) are made present when they are first touched in a slice, and used for the rest
//! of it. A program that unmaps such memory while its GPU uses it, without freeing the buffer first, gets a SIGSEGV where
//! hardware would report a fault.
#![allow(unsafe_code, reason = "accesses memory that a page table leads to, shared with everybody")]

use std::ptr::NonNull;
use std::sync::RwLockReadGuard;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_seam::{UserMemory, UserPtr};
use nix::errno::Errno;
use nix::libc;

use crate::arena::PAGE;
use crate::engine::Access;
use crate::engine::view::PageTable;
use crate::space::{AddressSpace, Backing, Fault, FaultReason};

/// Pages that are remembered.
const ENTRIES: usize = 1024;

/// Pages that a slice looks up in the page table, or makes present, before it ends: some hundred microseconds.
const MAX_MISSES: u32 = 1000;

/// No page has this number.
const NO_PAGE: u64 = u64::MAX;

/// Bytes of a page.
const PAGE_BYTES: usize = PAGE as usize;

/// A page that was found.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Number of the page, if it may be read.
    read: u64,
    /// Number of the page, if it may be written.
    write: u64,
    host: NonNull<u8>,
}

// SAFETY: an address of a page that is shared with everybody anyway; it is not tied to a thread.
unsafe impl Send for Entry {}

impl Entry {
    const NONE: Self = Self { read: NO_PAGE, write: NO_PAGE, host: NonNull::dangling() };
}

/// A page of this process's own.
#[repr(align(4096))]
struct Blank([AtomicU8; PAGE_BYTES]);

impl Blank {
    fn new() -> Box<Self> {
        Box::new(Self([const { AtomicU8::new(0) }; PAGE_BYTES]))
    }

    fn pointer(&self) -> NonNull<u8> {
        NonNull::from(&self.0).cast()
    }
}

/// What a compute unit remembers of page tables from slice to slice.
pub struct Translations {
    entries: Vec<Entry>,
    /// The generation of the page table that the entries are of; no two page tables share one.
    of: Option<u64>,
    /// Places that had an entry of a user pointer in this slice: those are good for one slice.
    user: Vec<usize>,
    /// Which of them are listed.
    listed: Vec<bool>,
    /// What is read where nothing is behind a mapping; never written.
    zeros: Box<Blank>,
    /// What is written there.
    sink: Box<Blank>,
}

impl core::fmt::Debug for Translations {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.debug_struct("Translations").field("of", &self.of).finish_non_exhaustive()
    }
}

impl Default for Translations {
    fn default() -> Self {
        let entries = vec![Entry::NONE; ENTRIES];
        let listed = vec![false; ENTRIES];
        Self { entries, of: None, user: Vec::new(), listed, zeros: Blank::new(), sink: Blank::new() }
    }
}

impl Translations {
    fn forget(&mut self) {
        self.entries.fill(Entry::NONE);
        self.listed.fill(false);
        self.user.clear();
    }

    /// The entry at a place is of a user pointer.
    fn list(&mut self, index: usize) {
        if let Some(listed) = self.listed.get_mut(index)
            && !core::mem::replace(listed, true)
        {
            self.user.push(index);
        }
    }

    /// Begins a slice: nothing changes the page table until what is returned is dropped. Whoever holds it does nothing
    /// that could wait for a change of the page table.
    pub fn slice<'a>(&'a mut self, gpu_id: u32, table: &'a dyn PageTable) -> Pages<'a> {
        let space = table.space();
        let of = Some(table.generation());
        if self.of != of {
            self.forget();
            self.of = of;
        }
        for index in self.user.drain(..) {
            if let (Some(entry), Some(listed)) = (self.entries.get_mut(index), self.listed.get_mut(index)) {
                (*entry, *listed) = (Entry::NONE, false);
            }
        }
        Pages { gpu_id, space, found: self, misses: 0 }
    }
}

/// The GPU's memory for one slice.
pub struct Pages<'a> {
    gpu_id: u32,
    space: RwLockReadGuard<'a, AddressSpace>,
    found: &'a mut Translations,
    /// Pages that were not among those that are remembered.
    misses: u32,
}

impl core::fmt::Debug for Pages<'_> {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.debug_struct("Pages").field("gpu_id", &self.gpu_id).finish_non_exhaustive()
    }
}

macro_rules! units {
    ($(#[$text:meta])* $name:ident, $unit:ty) => {
        $(#[$text])*
        ///
        /// # Errors
        /// The fault at `va`.
        #[inline]
        pub fn $name(&mut self, va: u64, access: Access, count: usize) -> Result<&[$unit], Fault> {
            const SIZE: usize = size_of::<$unit>();
            let host = self.find(va, access)?;
            let left = PAGE_BYTES - (va % PAGE) as usize;
            let count = count.min(left / SIZE);
            if !host.cast::<$unit>().is_aligned() {
                return Ok(&[]);
            }
            // SAFETY: `find` gave a pointer into a page that is mapped for this access as long as the page table is
            // held, which is longer than what is returned lives (for user pointers: see the module's text); `count` units
            // end with the page; the pointer is aligned. All that this process does there goes through atomics, but for
            // copies of the same bytes elsewhere in the engine, which may mix.
            Ok(unsafe { core::slice::from_raw_parts(host.cast::<$unit>().as_ptr(), count) })
        }
    };
}

impl Pages<'_> {
    /// The host's address of `va`.
    #[inline]
    fn find(&mut self, va: u64, access: Access) -> Result<NonNull<u8>, Fault> {
        let page = va / PAGE;
        if let Some(entry) = self.found.entries.get(page as usize % ENTRIES) {
            let known = if access == Access::Read { entry.read } else { entry.write };
            if known == page {
                // SAFETY: the page is mapped at `host` whole, and the offset is less than its size.
                return Ok(unsafe { entry.host.add((va % PAGE) as usize) });
            }
        }
        self.miss(va, access)
    }

    /// So many pages were looked up that the slice shall end.
    pub fn is_exhausted(&self) -> bool {
        self.misses >= MAX_MISSES
    }

    #[cold]
    fn miss(&mut self, va: u64, access: Access) -> Result<NonNull<u8>, Fault> {
        self.misses = self.misses.saturating_add(1);
        let name = if access == Access::Read { "read" } else { "write" };
        let fault = |reason| Fault { gpu_id: self.gpu_id, va, access: name, reason };
        let (start, mapping) = self.space.find(va).ok_or(fault(FaultReason::NotPresent))?;
        let readable = mapping.flags.contains(VmPageFlags::PAGE_READABLE);
        let writable = mapping.flags.contains(VmPageFlags::PAGE_WRITEABLE);
        match access {
            Access::Read if !readable => return Err(fault(FaultReason::NotReadable)),
            Access::Write if !writable => return Err(fault(FaultReason::ReadOnly)),
            _ => {}
        }
        let page = va / PAGE;
        let inside = page.saturating_mul(PAGE).saturating_sub(start);
        let gone = |_: Errno| fault(FaultReason::NoBacking);
        let only = |allowed: bool| if allowed { page } else { NO_PAGE };
        let index = page as usize % ENTRIES;
        let entry = match &mapping.backing {
            Backing::Arena { arena, offset } => {
                let offset = offset.checked_add(inside).ok_or(fault(FaultReason::NoBacking))?;
                let (host, length) = arena.host(offset, PAGE).map_err(gone)?;
                if length < PAGE {
                    return Err(fault(FaultReason::NoBacking));
                }
                Entry { read: only(readable), write: only(writable), host }
            }
            Backing::User(address) => {
                let address = address.checked_add(inside).ok_or(fault(FaultReason::NoBacking))?;
                let host = populate(address, access).map_err(gone)?;
                self.found.list(index);
                let write = only(writable && access == Access::Write);
                Entry { read: only(readable), write, host }
            }
            Backing::Nothing if access == Access::Read => {
                Entry { read: page, write: NO_PAGE, host: self.found.zeros.pointer() }
            }
            Backing::Nothing => Entry { read: NO_PAGE, write: page, host: self.found.sink.pointer() },
        };
        if !entry.host.cast::<Blank>().is_aligned() {
            return Err(fault(FaultReason::NoBacking));
        }
        if let Some(slot) = self.found.entries.get_mut(index) {
            *slot = entry;
        }
        // SAFETY: the page is mapped at `host` whole, and the offset is less than its size.
        Ok(unsafe { entry.host.add((va % PAGE) as usize) })
    }

    units!(
        /// At most `count` bytes from `va` on, up to the end of the page.
        bytes, AtomicU8
    );
    units!(
        /// At most `count` words of 16 bits from `va`, a multiple of 2, up to the end of the page. Empty when it is none.
        half_words, AtomicU16
    );
    units!(
        /// At most `count` words of 32 bits from `va`, a multiple of 4, up to the end of the page. Empty when it is none.
        words, AtomicU32
    );
    units!(
        /// At most `count` words of 64 bits from `va`, a multiple of 8, up to the end of the page. Empty when it is none.
        double_words, AtomicU64
    );

    /// Fetches code.
    ///
    /// # Errors
    /// The fault, at the first byte that could not be fetched.
    pub fn fetch(&self, va: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.space.fetch(self.gpu_id, va, buffer)
    }
}

/// Makes a page of the process present, without changing what is in it.
fn populate(address: u64, access: Access) -> Result<NonNull<u8>, Errno> {
    let address = usize::try_from(address).map_err(|_| Errno::EFAULT)?;
    let advice = match access {
        Access::Read => libc::MADV_POPULATE_READ,
        Access::Write => libc::MADV_POPULATE_WRITE,
    };
    let pointer = core::ptr::with_exposed_provenance_mut::<u8>(address);
    // SAFETY: this advice changes nothing but whether the pages are present; an address that is not mapped, or not for
    // this access, is an error.
    let result = unsafe { libc::madvise(pointer.cast(), PAGE_BYTES, advice) };
    match Errno::result(result) {
        // Before Linux 5.14: what can be read is there.
        Err(Errno::EINVAL) => UserMemory.read_bytes(UserPtr(address as u64), &mut [0])?,
        other => drop(other?),
    }
    NonNull::new(pointer).ok_or(Errno::EFAULT)
}
