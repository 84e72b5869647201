//! Memory: what is allocated, where, and which GPUs have it mapped.
//!
//! | kind | what it is | how GPUs get it |
//! |---|---|---|
//! | system | GUEST blobs, mapped at an address that all GPUs reach | user pointers at that address, made when first mapped: before, no GPU could see the difference |
//! | VRAM | a buffer of KFD, made at once, so that its lack is seen at once; the process's addresses cannot be accessed | mapped as a whole |
//! | VRAM that the CPU sees, large | the same, and a HOST3D blob at that address | mapped as a whole |
//! | VRAM that the CPU sees, small | part of an [`arena`] | mapped part by part |
//! | VRAM without an address | a buffer of KFD and a number that stands for it | through libdrm |
//! | registered | the application's memory in GUEST blobs | user pointers at addresses of their own |
//! | imported | blobs of other processes, or parts of buffers of this one | as system memory, or part by part |
//!
//! The table of allocations is locked for look-ups only; what goes to the host is done under the lock of the
//! one allocation that it is about.

pub mod address;
mod arena;
pub mod block;
pub mod buffer;
mod export;
mod fake;
mod flags;
mod import;
mod mapping;
mod pointer;
pub mod registered;
mod registers;
mod scratch;
mod space;
mod system;
mod vram;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, RwLock};

use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::version::minor;
use virtio_kfd_protocol::calls::{FreeMemory, UnmapMemory, UnmapRange};
use virtio_kfd_protocol::{BufferRequest, GpuId, Handle};

use self::address::{Reservation, page_size};
use self::arena::Arenas;
use self::buffer::Part;
use self::export::Exported;
use self::fake::Fake;
use self::import::Imported;
pub use self::import::{GUEST_FLAGS, Graphics, Source};
pub use self::mapping::{free_buffer, map_buffer};
use self::registered::{Piece, Registered};
use self::scratch::Scratch;
use self::space::Space;
use self::system::System;
use super::lock::{lock, read, write};
use super::refusal::{Outcome, Refusal};
use super::settings::Settings;
use super::topology::{Gpu, Snapshot};
use crate::client::Client;

/// Addresses that no GPU needs to reach.
const ANYWHERE: (u64, u64) = (0, u64::MAX);

/// What is behind the addresses.
enum Backing {
    /// Memory of the guest.
    System(System),
    /// Private memory of the process, where there is no GPU.
    Private,
    /// Memory of a GPU, a buffer of its own.
    Vram(Part),
    /// Memory of a GPU, part of an arena.
    Piece(Part),
    /// Memory of a GPU without an address.
    Unplaced(Part),
    /// Memory of the application.
    Registered(Registered),
    /// Memory of others, or of this process once more.
    Imported(Imported),
    /// Nothing: addresses alone.
    Nothing,
}

/// What changes in an allocation.
#[derive(Default)]
struct State {
    /// KFD's buffers of guest memory, one for each piece, once they are made.
    handles: Vec<Handle>,
    /// The GPUs that have it mapped.
    mapped: Vec<GpuId>,
    /// Their nodes, for `hsaKmtQueryPointerInfo`, which hands out a pointer to them. Valid until the mapping changes.
    mapped_nodes: Box<[u32]>,
    /// The GPUs that it is registered for; none stands for all.
    registered: Vec<GpuId>,
    /// Their nodes, as `mapped_nodes`.
    registered_nodes: Box<[u32]>,
    /// How often memory of the application is registered.
    registrations: u64,
    /// How often memory of the application is mapped.
    mappings: u64,
    user_data: u64,
    freed: bool,
}

impl State {
    fn register(&mut self, gpus: &[GpuId]) {
        self.registered = gpus.to_vec();
        self.registered_nodes = Box::default();
    }

    /// Frees KFD's buffers of guest memory.
    fn free_handles(&mut self, client: &Client) -> Outcome<()> {
        while let Some(handle) = self.handles.last() {
            // KFD refuses (EBUSY) while it is mapped.
            match client.call::<FreeMemory>(&BufferRequest { handle: *handle }, &[], 0) {
                Err(error) if !mapping::went_with_its_blob(&error) => return Err(error.into()),
                _ => self.handles.pop(),
            };
        }
        Ok(())
    }
}

/// Where an allocation is.
enum Place {
    /// At addresses that this library reserved; they go with the allocation.
    Reserved(Reservation),
    /// In an arena's home.
    Arena(arena::Place),
    /// Nowhere; numbers stand for it.
    Fake(Fake),
}

/// An allocation.
struct Allocation {
    // Dropped in this order: nothing maps the blobs any more when they go.
    place: Place,
    backing: Backing,
    node: u32,
    flags: HsaMemFlags,
    state: Mutex<State>,
}

impl Allocation {
    fn new(place: Place, backing: Backing, request: Request) -> Allocation {
        let Request { node, flags, .. } = request;
        Allocation { place, backing, node, flags, state: Mutex::default() }
    }

    /// First address, for GPUs.
    fn start(&self) -> u64 {
        match &self.place {
            Place::Reserved(reservation) => reservation.start(),
            Place::Arena(place) => place.start,
            Place::Fake(fake) => fake.start,
        }
    }

    /// Bytes of addresses.
    fn size(&self) -> u64 {
        match &self.place {
            Place::Reserved(reservation) => reservation.size(),
            Place::Arena(place) => place.size,
            Place::Fake(fake) => fake.size,
        }
    }

    /// The blobs that KFD is given as user pointers, one after the other.
    fn pieces(&self) -> Option<Vec<Piece>> {
        match &self.backing {
            Backing::System(system) => Some(system.pieces(self.size())),
            Backing::Registered(registered) => Some(registered.pieces.clone()),
            Backing::Imported(Imported { source: Source::Guest { blob, .. }, .. }) => {
                Some(vec![Piece { resource: blob.resource(), offset: 0, size: self.size() }])
            }
            _ => None,
        }
    }

    /// The buffer that is mapped part by part, and where in it the memory begins.
    fn range(&self) -> Option<(Handle, u64)> {
        match &self.backing {
            Backing::Piece(part) | Backing::Imported(Imported { source: Source::Own(part), .. }) => {
                Some((part.buffer.handle, part.offset))
            }
            Backing::Imported(Imported { source: Source::Host { handle, .. }, .. }) => Some((*handle, 0)),
            _ => None,
        }
    }

    /// KFD's buffers that are freed with it.
    fn own_buffers(&self, state: &State) -> Vec<Handle> {
        match &self.backing {
            Backing::Vram(part) | Backing::Unplaced(part) => vec![part.buffer.handle],
            Backing::Imported(Imported { source: Source::Host { handle, .. }, .. }) => vec![*handle],
            _ => state.handles.clone(),
        }
    }
}

/// All memory of one connection.
#[derive(Default)]
pub struct Memory {
    allocations: RwLock<BTreeMap<u64, Arc<Allocation>>>,
    /// Memory of the application by its address and size there. Locked before `allocations`.
    registered: RwLock<BTreeMap<(u64, u64), Arc<Allocation>>>,
    /// By GPU.
    scratch: Mutex<BTreeMap<u32, Arc<Scratch>>>,
    arenas: Arenas,
    fake: Mutex<Option<Space>>,
    /// What dma-bufs of this process show of its own buffers, by resource.
    exported: Mutex<HashMap<u32, Exported>>,
}

/// The arguments of an allocation.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Where the memory should be.
    pub node: u32,
    /// Bytes.
    pub size: u64,
    /// A power of two, or 0 for whatever is best.
    pub alignment: u64,
    /// Kind of memory.
    pub flags: HsaMemFlags,
    /// Where, with `FixedAddress`.
    pub address: u64,
}

impl Request {
    /// The first checks of `hsaKmtAllocMemoryAlign`: alignment and size.
    pub fn check_size(&self) -> Outcome<()> {
        flags::check_size(self.size, self.alignment, self.flags)
    }

    /// The next ones.
    pub fn check_flags(&self) -> Outcome<()> {
        flags::check(self.flags, self.address)
    }
}

/// The connection and what is known of its GPUs.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    /// The connection.
    pub client: &'a Client,
    /// The topology.
    pub snapshot: &'a Snapshot,
    /// The environment.
    pub settings: &'a Settings,
}

impl Memory {
    /// The very first check of an allocation.
    pub fn check_version(&self, client: &Client, flags: HsaMemFlags) -> Outcome<()> {
        // CONTIGUOUS_VRAM came with KFD 1.16.
        if flags.is_set(HsaMemFlags::CONTIGUOUS) && client.kfd_version().1 < minor::CONTIGUOUS_VRAM {
            return Err(Refusal::new(HsakmtStatus::NOT_SUPPORTED, "the host's KFD has no contiguous VRAM"));
        }
        Ok(())
    }

    /// `hsaKmtAllocMemoryAlign`: the address.
    pub fn allocate(&self, host: Host<'_>, request: Request) -> Outcome<u64> {
        let Request { node, flags, address, .. } = request;
        let set = |flag| flags.is_set(flag);
        self.check_version(host.client, flags)?;
        let gpu = host.snapshot.gpu_of(node)?.copied();
        request.check_size()?;
        request.check_flags()?;
        let address = if set(HsaMemFlags::FIXED_ADDRESS) { address } else { 0 };
        if set(HsaMemFlags::SCRATCH) {
            let no_gpu =
                || Refusal::new(HsakmtStatus::NO_MEMORY, format!("node {node} has no scratch memory"));
            return self.allocate_scratch(host, &gpu.ok_or_else(no_gpu)?, request);
        }
        let allocation = match gpu {
            Some(gpu) if set(HsaMemFlags::NON_PAGED) && !set(HsaMemFlags::GTT_ACCESS) => {
                self.allocate_vram(host, &gpu, Request { address, ..request })?
            }
            _ => system::allocate(host, gpu.as_ref(), Request { address, ..request })?,
        };
        Ok(self.insert(allocation))
    }

    /// Writes an allocation down, and gives its address.
    fn insert(&self, allocation: Allocation) -> u64 {
        let start = allocation.start();
        write(&self.allocations).insert(start, Arc::new(allocation));
        start
    }

    fn allocate_scratch(&self, host: Host<'_>, gpu: &Gpu, request: Request) -> Outcome<u64> {
        if request.alignment != 0 {
            return Err(Refusal::new(
                HsakmtStatus::NOT_IMPLEMENTED,
                "scratch memory has an alignment of its own",
            ));
        }
        let in_use = || Refusal::new(HsakmtStatus::NO_MEMORY, "the GPU has its scratch memory already");
        let key = gpu.gpu_id.0;
        if lock(&self.scratch).contains_key(&key) {
            return Err(in_use());
        }
        let address = if request.flags.is_set(HsaMemFlags::FIXED_ADDRESS) { request.address } else { 0 };
        let scratch = Scratch::new(host, gpu.gpu_id, address, request.size)?;
        let start = scratch.start();
        // Two threads may both have seen that there was none; then the second one's goes again.
        match lock(&self.scratch).entry(key) {
            std::collections::btree_map::Entry::Occupied(_) => Err(in_use()),
            std::collections::btree_map::Entry::Vacant(place) => {
                place.insert(Arc::new(scratch));
                Ok(start)
            }
        }
    }

    /// `hsaKmtFreeMemory`
    pub fn free(&self, client: &Client, address: u64) -> Outcome<()> {
        if let Some(scratch) = self.scratch_at(address) {
            lock(&self.scratch).retain(|_, other| !Arc::ptr_eq(other, &scratch));
            return scratch.release(client);
        }
        let allocation = self.find(address).ok_or_else(|| {
            Refusal::new(
                HsakmtStatus::MEMORY_NOT_REGISTERED,
                format!("{address:#x} is not the start of an allocation"),
            )
        })?;
        if matches!(allocation.backing, Backing::Registered(_)) {
            return self.deregister(client, address);
        }
        let mut state = lock(&allocation.state);
        if state.freed {
            return Err(Refusal::new(HsakmtStatus::MEMORY_NOT_REGISTERED, "the allocation is being freed"));
        }
        self.give_up(client, &allocation, &mut state)?;
        drop(state);
        self.forget(client, &allocation);
        Ok(())
    }

    /// Gives the host's part of an allocation back. After an error all is as before.
    fn give_up(&self, client: &Client, allocation: &Allocation, state: &mut State) -> Outcome<()> {
        if !state.mapped.is_empty() {
            // As KFD answers (EBUSY).
            let why = format!("{:#x} is still mapped to {} GPUs", allocation.start(), state.mapped.len());
            return Err(Refusal::error(why));
        }
        match &allocation.backing {
            Backing::Vram(part) | Backing::Unplaced(part) => part.buffer.release(client)?,
            Backing::Imported(imported) => imported.source.release(client)?,
            _ => {}
        }
        state.free_handles(client)?;
        state.freed = true;
        Ok(())
    }

    /// Takes an allocation that was given up out of the table, and then gives its place back.
    fn forget(&self, client: &Client, allocation: &Allocation) {
        write(&self.allocations).remove(&allocation.start());
        match (&allocation.place, &allocation.backing) {
            (Place::Arena(place), Backing::Piece(part)) => self.arenas.free(client, place, part),
            (Place::Fake(fake), _) => self.give_fake_addresses(*fake),
            _ => {}
        }
    }

    /// Bytes of a GPU that are free in what was taken for small allocations. What is not used at all goes back to the host
    /// first, whose own number is rounded.
    pub fn idle(&self, client: &Client, gpu: GpuId) -> u64 {
        self.arenas.trim(client);
        self.arenas.available(gpu)
    }

    /// Whether an address is the start of an allocation.
    pub fn is_allocated(&self, address: u64) -> bool {
        self.find(address).is_some()
    }

    /// The allocation whose first page an address lies in, or the only registration that begins there.
    fn find(&self, address: u64) -> Option<Arc<Allocation>> {
        self.find_sized(address, 0)
    }

    /// As AMD's library looks addresses up (`vm_find_object`): first the application's memory by its address there, then
    /// what begins in that page. An address of the application's memory on GPUs must have its offset in the page, and
    /// the size must be its own, or 0.
    fn find_sized(&self, address: u64, size: u64) -> Option<Arc<Allocation>> {
        if let Some(allocation) = self.registered_range(address, size) {
            return Some(allocation);
        }
        let offset = address.checked_rem(page_size())?;
        let allocation = read(&self.allocations).get(&address.checked_sub(offset)?).cloned()?;
        match &allocation.backing {
            Backing::Registered(registered) => {
                let same = registered.address.checked_rem(page_size()) == Some(offset);
                (same && (size == 0 || size == registered.size)).then_some(allocation)
            }
            _ => Some(allocation),
        }
    }

    /// The allocation that an address lies in.
    fn find_range(&self, address: u64) -> Option<Arc<Allocation>> {
        if let Some(allocation) = self.registered_at(address) {
            return Some(allocation);
        }
        let allocations = read(&self.allocations);
        let (start, allocation) = allocations.range(..=address).next_back()?;
        (address.checked_sub(*start)? < allocation.size()).then(|| allocation.clone())
    }

    fn scratch_at(&self, address: u64) -> Option<Arc<Scratch>> {
        lock(&self.scratch).values().find(|scratch| scratch.contains(address)).cloned()
    }

    /// Frees everything on the host, for a close. The memory itself goes with this object.
    pub fn release_all(&self, client: &Client) {
        let scratch = std::mem::take(&mut *lock(&self.scratch));
        for (_, scratch) in scratch {
            // The host frees what is left when the connection ends.
            let _ = scratch.release(client);
        }
        write(&self.registered).clear();
        let allocations: Vec<_> = std::mem::take(&mut *write(&self.allocations)).into_values().collect();
        for some in allocations.chunks(8) {
            let mut batch = client.batch();
            let mut any = false;
            for allocation in some {
                let mut state = lock(&allocation.state);
                state.freed = true;
                let mapped = std::mem::take(&mut state.mapped);
                if let Some((handle, _)) = allocation.range() {
                    for gpu in &mapped {
                        let request = mapping::unmap_request(handle, allocation, *gpu);
                        any |= batch.push::<UnmapRange>(&request, &[], 0).is_ok();
                    }
                }
                for handle in allocation.own_buffers(&state) {
                    if !mapped.is_empty() && allocation.range().is_none() {
                        any |= batch.push::<UnmapMemory>(&BufferRequest { handle }, &mapped, 0).is_ok();
                    }
                    any |= batch.push::<FreeMemory>(&BufferRequest { handle }, &[], 0).is_ok();
                }
                state.handles.clear();
            }
            if any {
                let _ = batch.run();
            }
        }
        for allocation in allocations {
            if let Backing::Piece(part) = &allocation.backing {
                let _ = part.buffer.release(client);
            }
        }
        self.arenas.release_all(client);
    }
}

/// The alignment for an allocation of that size: large ones get larger pages of the GPU's page tables.
fn alignment(size: u64, asked: u64, settings: &Settings) -> u64 {
    let most = page_size().saturating_mul(1 << settings.alignment_order);
    let mut align = asked.max(page_size());
    while align < most && size >= align.saturating_mul(2) {
        align = align.saturating_mul(2);
    }
    align
}

fn reserve(host: Host<'_>, size: u64, request: Request) -> Outcome<Reservation> {
    let range = host.snapshot.svm.unwrap_or(ANYWHERE);
    let reserved = match request.address {
        0 => {
            let align = alignment(size, request.alignment, host.settings);
            Reservation::new(size, align, host.settings.guard_pages.saturating_mul(page_size()), range)
        }
        address => Reservation::at(address, size),
    };
    let reservation = reserved.map_err(|error| {
        Refusal::new(HsakmtStatus::NO_MEMORY, format!("no {size:#x} bytes of addresses: {error}"))
    })?;
    let last = reservation.start().saturating_add(size.saturating_sub(1));
    if reservation.start() < range.0 || last > range.1 {
        let what = format!("the GPUs reach {:#x} to {:#x}, not {last:#x}", range.0, range.1);
        return Err(Refusal::new(HsakmtStatus::NO_MEMORY, what));
    }
    Ok(reservation)
}

/// Bytes of addresses: a ring of AQL packets is mapped twice in a row by GPUs.
fn address_size(request: Request) -> Outcome<u64> {
    let factor = if request.flags.is_set(HsaMemFlags::AQL_QUEUE_MEMORY) { 2 } else { 1 };
    let size = request.size.checked_mul(factor);
    size.ok_or_else(|| Refusal::new(HsakmtStatus::NO_MEMORY, "SizeInBytes is beyond the address space"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_allocations_are_aligned_to_large_pages() {
        let settings = Settings::default();
        assert_eq!(alignment(4096, 0, &settings), 4096);
        assert_eq!(alignment(64 << 10, 0, &settings), 64 << 10);
        assert_eq!(alignment(3 << 20, 0, &settings), 2 << 20);
        assert_eq!(alignment(1 << 30, 0, &settings), 2 << 20, "at most a huge page");
        assert_eq!(alignment(4096, 1 << 30, &settings), 1 << 30, "what was asked for");
        let order0 = Settings { alignment_order: 0, ..settings };
        assert_eq!(alignment(1 << 30, 0, &order0), 4096);
    }
}
