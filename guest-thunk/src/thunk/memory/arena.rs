//! Arenas: VRAM that the CPU can see, many allocations in one map of the VMM.
//!
//! A VMM bears some hundreds of maps in the shared memory window, shared by all processes of the guest, so that small
//! allocations cannot have one each. An arena is a buffer of KFD without an address, shown as a whole by one HOST3D blob at
//! one place of this process, its home. An allocation is a part of it and stays at its place in the home mapping; GPUs
//! see it at that very address, mapped part by part (`DRM_IOCTL_AMDGPU_GEM_VA`), so that what is unmapped or
//! freed is out of their reach.
//!
//! The policy:
//! - Allocations from [`DEDICATED`] on, and all with a fixed address, a larger alignment than [`ALIGN`], or flags that
//!   make them special, are buffers with a map of their own, as are all where KFD is older than 1.15.
//! - The first arena of a GPU and of flags has [`SMALLEST`] bytes; each further one as many as there are already in all,
//!   up to [`LARGEST`]. Where window, VRAM or budget have not that much, half of it is tried, down to what is needed.
//! - An arena without allocations is given back, but for the last small one; that goes when anything lacks the room.
//! - An allocation of whole [`ALIGN`] is at a multiple of it, and has no guard; others are at any page, with a guard behind.
//! - A part is zeroed when it is freed. One that was exported is not used again, for others may still see it: it
//!   goes with the arena.
//!
//! Linux maps a HOST3D blob only as a whole, and keeps a record of such a mapping that a split one damages
//! (`memtype_free`, up to 6.15). So the home mapping is never split: the CPU can reach parts that
//! are free. docs/limits.md says so.
#![allow(unsafe_code, reason = "zeroing")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::{GpuId, GuestVa};

use super::Host;
use super::address::{Reservation, page_size};
use super::buffer::{Buffer, Part};
use super::space::Space;
use super::vram::make_buffer;
use crate::client::Client;
use crate::thunk::lock::lock;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::transport::Blob;

/// Bytes of the first arena.
pub(super) const SMALLEST: u64 = 2 << 20;

/// Bytes of the largest arenas.
pub(super) const LARGEST: u64 = 64 << 20;

/// Bytes from which on an allocation has a buffer and a map of its own.
pub(super) const DEDICATED: u64 = 16 << 20;

/// The largest alignment in an arena, and its own.
pub(super) const ALIGN: u64 = 2 << 20;

/// Arenas that allocations can share: of one GPU, with the same flags.
type Kind = (GpuId, u32);

/// One arena. Dropped in this order: the mapping, what it shows, the buffer.
struct Arena {
    home: Reservation,
    blob: Arc<dyn Blob>,
    buffer: Arc<Buffer>,
    /// Offsets that are free.
    space: Space,
    /// Allocations in it.
    used: usize,
}

/// All arenas of a connection.
#[derive(Default)]
pub(super) struct Arenas {
    all: Mutex<HashMap<Kind, Vec<Arena>>>,
}

/// An allocation's place in an arena.
pub(super) struct Place {
    kind: Kind,
    /// First address.
    pub(super) start: u64,
    /// Bytes for use.
    pub(super) size: u64,
    /// Bytes that were taken: with what keeps it apart from its neighbour.
    taken: u64,
}

impl Arena {
    /// Makes an arena of about `most` bytes, or as many as can be had: a multiple of `least`, which is what is needed now.
    fn new(host: Host<'_>, kind: Kind, least: u64, most: u64) -> Outcome<Arena> {
        // Allocations of one size leave no gap.
        let mut size = most.checked_next_multiple_of(least).unwrap_or(least);
        loop {
            match Arena::with(host, kind, size) {
                Ok(arena) => return Ok(arena),
                Err(refusal) if size <= least => return Err(refusal),
                // Less may be there.
                Err(_) => size = (size / 2).checked_next_multiple_of(least).unwrap_or(least),
            }
        }
    }

    fn with(host: Host<'_>, (gpu, flags): Kind, size: u64) -> Outcome<Arena> {
        let no_memory = |why: String| Refusal::new(HsakmtStatus::NO_MEMORY, why);
        let range = host.snapshot.svm.unwrap_or(super::ANYWHERE);
        let guard = host.settings.guard_pages.saturating_mul(page_size());
        let home = Reservation::new(size, ALIGN, guard, range)
            .map_err(|error| no_memory(format!("no {size:#x} bytes of addresses: {error}")))?;
        let buffer = make_buffer(host, gpu, AllocFlags::from_bits_retain(flags), GuestVa(0), size, size)?;
        let shown = host.client.host_blob(buffer.handle.0, size, true).map(Arc::<dyn Blob>::from);
        let refuse = |why: String| no_memory(why).as_no_memory(host.client);
        let mapped = shown.map_err(|error| refuse(error.to_string())).and_then(|blob| {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let mapped = blob.map_fixed(GuestVa(home.start()), size, protection);
            mapped.map_err(|error| refuse(error.to_string()))?;
            Ok(blob)
        });
        match mapped {
            Ok(blob) => {
                home.keep_from_children();
                Ok(Arena { home, blob, buffer, space: Space::new(0, size), used: 0 })
            }
            Err(refusal) => {
                // KFD has nothing mapped of it, so that it is freed.
                let _ = buffer.release(host.client);
                Err(refusal)
            }
        }
    }

    fn size(&self) -> u64 {
        self.buffer.size
    }

    fn offset(&self, address: u64) -> Option<u64> {
        address.checked_sub(self.home.start()).filter(|offset| *offset < self.size())
    }

    fn take(&mut self, taken: u64, align: u64) -> Option<u64> {
        let offset = self.space.take(taken, align)?;
        self.used = self.used.saturating_add(1);
        Some(offset)
    }

    /// Zeroes a part.
    fn zero(&self, offset: u64, size: u64) {
        let address = self.home.start().saturating_add(offset);
        let (Ok(address), Ok(size)) = (usize::try_from(address), usize::try_from(size)) else { return };
        let place = std::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: the part lies in the home mapping, which is readable and writable for as long as the arena; its
        // allocation has been freed, so that nobody else uses it.
        unsafe { place.write_bytes(0, size) };
    }

    /// Gives it back to the host. An import in this process may hold the buffer further.
    fn release(self, client: &Client) {
        let Arena { home, blob, buffer, .. } = self;
        drop(home);
        drop(blob);
        // KFD refuses only what is mapped, and an arena never is as a whole; the host frees what is left at the end.
        let _ = buffer.release(client);
    }
}

impl Arenas {
    /// Takes `size` bytes with these flags of KFD.
    pub(super) fn allocate(
        &self,
        host: Host<'_>,
        gpu: GpuId,
        flags: AllocFlags,
        size: u64,
        align: u64,
    ) -> Outcome<(Place, Part)> {
        let kind = (gpu, flags.bits());
        let page = page_size();
        let no_memory = || Refusal::new(HsakmtStatus::NO_MEMORY, format!("{size:#x} bytes are too many"));
        // AMD's library has all of this size at such addresses (mmap_aperture_allocate_aligned), and ROCr ends a program that
        // shares a piece of memory which is not (Runtime::IPCCreate). A guard between them would cost as much VRAM again.
        let (align, guard) = match size.is_multiple_of(ALIGN) {
            true => (align.max(ALIGN), 0),
            false => (align.max(page), host.settings.guard_pages.saturating_mul(page)),
        };
        let taken = size.checked_add(guard).ok_or_else(no_memory)?;
        let mut all = lock(&self.all);
        let arenas = all.entry(kind).or_default();
        let found = arenas.iter_mut().find_map(|arena| Some((arena.take(taken, align)?, &*arena)));
        if let Some((offset, arena)) = found {
            return part(kind, arena, offset, size, taken);
        }
        let there = arenas.iter().fold(0, |sum: u64, arena| sum.saturating_add(arena.size()));
        let most = there.clamp(SMALLEST, LARGEST);
        let mut arena = match Arena::new(host, kind, taken, most) {
            Ok(arena) => arena,
            Err(_) if release_empty(&mut all, host.client) => Arena::new(host, kind, taken, taken)?,
            Err(refusal) => return Err(refusal),
        };
        let offset = arena.take(taken, align).ok_or_else(no_memory)?;
        let made = part(kind, &arena, offset, size, taken);
        all.entry(kind).or_default().push(arena);
        made
    }

    /// Gives a place back that nothing maps any more. The part's hold of the buffer ends with it.
    pub(super) fn free(&self, client: &Client, place: &Place, part: &Part) {
        let mut all = lock(&self.all);
        let Some(arenas) = all.get_mut(&place.kind) else { return };
        let found = arenas.iter_mut().find_map(|arena| Some((arena.offset(place.start)?, arena)));
        if let Some((offset, arena)) = found {
            arena.used = arena.used.saturating_sub(1);
            if part.is_exported() {
                part.unshare(client);
            } else {
                arena.zero(offset, place.size);
                arena.space.give(offset, place.taken);
            }
        }
        // The arena itself holds the buffer, so that KFD is not asked.
        let _ = part.buffer.release(client);
        let spare = |arena: &Arena| arena.size() < 2 * SMALLEST && arena.space.bytes() == arena.size();
        let keep = arenas.iter().position(spare).filter(|_| arenas.iter().all(|arena| arena.used == 0));
        let mut index = 0..;
        let gone: Vec<Arena> = arenas
            .extract_if(.., |arena| {
                let kept = index.next() == keep && keep.is_some();
                arena.used == 0 && !kept
            })
            .collect();
        gone.into_iter().for_each(|arena| arena.release(client));
    }

    /// Gives arenas without allocations back. Whether there was any.
    pub(super) fn trim(&self, client: &Client) -> bool {
        release_empty(&mut lock(&self.all), client)
    }

    /// Bytes of a GPU that are free in arenas.
    pub(super) fn available(&self, gpu: GpuId) -> u64 {
        let all = lock(&self.all);
        let arenas = all.iter().filter(|((of, _), _)| *of == gpu).flat_map(|(_, arenas)| arenas);
        arenas.fold(0, |sum, arena| sum.saturating_add(arena.space.bytes()))
    }

    /// Forgets all, for a close.
    pub(super) fn release_all(&self, client: &Client) {
        let all = std::mem::take(&mut *lock(&self.all));
        all.into_values().flatten().for_each(|arena| arena.release(client));
    }
}

fn part(kind: Kind, arena: &Arena, offset: u64, size: u64, taken: u64) -> Outcome<(Place, Part)> {
    let part = Part::again(&arena.buffer, offset, size);
    let start = arena.home.start().saturating_add(offset);
    let part = part.ok_or_else(|| Refusal::error("the arena has been freed"))?;
    Ok((Place { kind, start, size, taken }, part))
}

fn release_empty(all: &mut HashMap<Kind, Vec<Arena>>, client: &Client) -> bool {
    let mut any = false;
    for arenas in all.values_mut() {
        for arena in arenas.extract_if(.., |arena| arena.used == 0) {
            arena.release(client);
            any = true;
        }
    }
    any
}
