//! Memory: what is allocated, where, and which GPUs have it mapped.
//!
//! System memory is memory of the guest: a GUEST blob, mapped at an address that all GPUs reach, and given to KFD as
//! a user pointer at that same address. KFD is asked for it when it is first mapped, in the same frame as the
//! mapping: before, no GPU could see the difference. VRAM is allocated at once, so that its lack is seen at once;
//! its addresses in the process are a reservation that cannot be accessed.
//!
//! The table of allocations is locked for look-ups only; what goes to the host is done under the lock of the
//! one allocation that it is about.

pub mod address;
mod flags;
mod mapping;
mod scratch;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, RwLock};

use hsakmt_abi::memory::{HsaMemFlags, HsaPointerInfo, HsaPointerType};
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::calls::{AllocMemory, FreeMemory, UnmapMemory};
use virtio_kfd_protocol::{AllocMemoryRequest, BufferRequest, GpuId, GuestVa, Handle, ResourceId};

use self::address::{Reservation, page_size};
pub use self::mapping::{free_buffer, map_buffer};
use self::scratch::Scratch;
use super::lock::{lock, read, write};
use super::refusal::{Outcome, Refusal};
use super::settings::Settings;
use super::topology::{Gpu, Snapshot};
use crate::client::{Client, ClientError};
use crate::transport::Blob;

/// Addresses that no GPU needs to reach.
const ANYWHERE: (u64, u64) = (0, u64::MAX);

/// What is behind the addresses.
enum Backing {
    /// Guest memory, and KFD's flags for it.
    System { blob: Box<dyn Blob>, gpu: GpuId, flags: AllocFlags },
    /// Private memory of the process, where there is no GPU.
    Private,
    /// Memory of a GPU.
    Vram,
    /// Nothing: addresses alone.
    Nothing,
}

/// What changes in an allocation.
#[derive(Default)]
struct State {
    /// KFD's buffer, once there is one.
    handle: Option<Handle>,
    /// The GPUs that have it mapped.
    mapped: Vec<GpuId>,
    /// Their nodes, for `hsaKmtQueryPointerInfo`, which hands out a pointer to them. Valid until the mapping changes.
    mapped_nodes: Box<[u32]>,
    user_data: u64,
    freed: bool,
}

/// An allocation.
struct Allocation {
    // Dropped in this order: nothing maps the blob any more when it goes.
    reservation: Reservation,
    backing: Backing,
    node: u32,
    flags: HsaMemFlags,
    state: Mutex<State>,
}

impl Allocation {
    fn start(&self) -> u64 {
        self.reservation.start()
    }
}

/// All memory of one connection.
#[derive(Default)]
pub struct Memory {
    allocations: RwLock<BTreeMap<u64, Arc<Allocation>>>,
    /// By GPU.
    scratch: Mutex<BTreeMap<u32, Arc<Scratch>>>,
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
    /// `hsaKmtAllocMemoryAlign`: the address.
    pub fn allocate(&self, host: Host<'_>, request: Request) -> Outcome<u64> {
        let Request { node, size, alignment, flags, address } = request;
        let set = |flag| flags.is_set(flag);
        // CONTIGUOUS_VRAM came with KFD 1.16.
        if set(HsaMemFlags::CONTIGUOUS) && host.client.kfd_version().1 < 16 {
            return Err(Refusal::new(HsakmtStatus::NOT_SUPPORTED, "the host's KFD has no contiguous VRAM"));
        }
        let gpu = host.snapshot.gpu_of(node)?.copied();
        flags::check(size, alignment, flags, address)?;
        let address = if set(HsaMemFlags::FIXED_ADDRESS) { address } else { 0 };
        if set(HsaMemFlags::SCRATCH) {
            let gpu = host.snapshot.gpu(node)?;
            return self.allocate_scratch(host, gpu, request);
        }
        let allocation = match gpu {
            Some(gpu) if set(HsaMemFlags::NON_PAGED) && !set(HsaMemFlags::GTT_ACCESS) => {
                vram(host, &gpu, Request { address, ..request })?
            }
            _ => system(host, gpu.as_ref(), Request { address, ..request })?,
        };
        let start = allocation.start();
        write(&self.allocations).insert(start, Arc::new(allocation));
        Ok(start)
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
        let mut state = lock(&allocation.state);
        if state.freed {
            return Err(Refusal::new(HsakmtStatus::MEMORY_NOT_REGISTERED, "the allocation is being freed"));
        }
        if let Some(handle) = state.handle {
            // KFD refuses (EBUSY) while it is mapped.
            client.call::<FreeMemory>(&BufferRequest { handle }, &[], 0)?;
        }
        state.freed = true;
        state.handle = None;
        drop(state);
        write(&self.allocations).remove(&allocation.start());
        Ok(())
    }

    /// `hsaKmtQueryPointerInfo`; the address may lie anywhere in an allocation. The pointer to the nodes is valid
    /// until the mapping changes.
    pub fn pointer_info(&self, snapshot: &Snapshot, address: u64) -> Outcome<HsaPointerInfo> {
        let allocation = self
            .find_range(address)
            .ok_or_else(|| Refusal::error(format!("{address:#x} is in no allocation")))?;
        let mut state = lock(&allocation.state);
        if state.mapped_nodes.len() != state.mapped.len() {
            let nodes: Outcome<Box<[u32]>> = state.mapped.iter().map(|gpu| snapshot.node_of(*gpu)).collect();
            state.mapped_nodes = nodes?;
        }
        let address_only = matches!(allocation.backing, Backing::Nothing);
        let mapped_nodes = if state.mapped_nodes.is_empty() { 0 } else { state.mapped_nodes.as_ptr().addr() };
        Ok(HsaPointerInfo {
            kind: if address_only { HsaPointerType::RESERVED_ADDR } else { HsaPointerType::ALLOCATED },
            node: allocation.node,
            mem_flags: allocation.flags,
            cpu_address: if address_only { 0 } else { allocation.start() },
            gpu_address: allocation.start(),
            size_in_bytes: allocation.reservation.size(),
            n_mapped_nodes: u32::try_from(state.mapped_nodes.len()).unwrap_or(0),
            mapped_nodes: u64::try_from(mapped_nodes).unwrap_or(0),
            user_data: state.user_data,
            ..Default::default()
        })
    }

    /// `hsaKmtSetMemoryUserData`
    pub fn set_user_data(&self, address: u64, user_data: u64) -> Outcome<()> {
        let allocation = self.find(address);
        let allocation = allocation
            .ok_or_else(|| Refusal::error(format!("{address:#x} is not the start of an allocation")))?;
        lock(&allocation.state).user_data = user_data;
        Ok(())
    }

    /// Whether an address is the start of an allocation.
    pub fn is_allocated(&self, address: u64) -> bool {
        self.find(address).is_some()
    }

    /// The allocation whose first page an address lies in, as AMD's library looks it up.
    fn find(&self, address: u64) -> Option<Arc<Allocation>> {
        let page = address.checked_sub(address.checked_rem(page_size())?)?;
        read(&self.allocations).get(&page).cloned()
    }

    /// The allocation that an address lies in.
    fn find_range(&self, address: u64) -> Option<Arc<Allocation>> {
        let allocations = read(&self.allocations);
        let (start, allocation) = allocations.range(..=address).next_back()?;
        (address.checked_sub(*start)? < allocation.reservation.size()).then(|| allocation.clone())
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
        let allocations: Vec<_> = std::mem::take(&mut *write(&self.allocations)).into_values().collect();
        for some in allocations.chunks(16) {
            let mut batch = client.batch();
            let mut any = false;
            for allocation in some {
                let mut state = lock(&allocation.state);
                state.freed = true;
                let Some(handle) = state.handle.take() else { continue };
                let mapped = std::mem::take(&mut state.mapped);
                if !mapped.is_empty() {
                    any |= batch.push::<UnmapMemory>(&BufferRequest { handle }, &mapped, 0).is_ok();
                }
                any |= batch.push::<FreeMemory>(&BufferRequest { handle }, &[], 0).is_ok();
            }
            if any {
                let _ = batch.run();
            }
        }
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

fn system(host: Host<'_>, gpu: Option<&Gpu>, request: Request) -> Outcome<Allocation> {
    // AMD's library answers HSAKMT_STATUS_ERROR to every failure here.
    let failed = |refusal: Refusal| Refusal { status: HsakmtStatus::ERROR, ..refusal };
    let reservation = reserve(host, address_size(request)?, request).map_err(failed)?;
    let Some(gpu) = gpu.or(host.snapshot.gpus.first()) else {
        let no_memory = |error| Refusal::error(format!("no {:#x} bytes of memory: {error}", request.size));
        reservation.fill_with_private_memory().map_err(no_memory)?;
        return Ok(Allocation {
            reservation,
            backing: Backing::Private,
            node: 0,
            flags: request.flags,
            state: Mutex::default(),
        });
    };
    let blob = host.client.guest_memory(request.size)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    blob.map_fixed(GuestVa(reservation.start()), request.size, protection)
        .map_err(|error| Refusal::error(error.to_string()))?;
    reservation.keep_from_children();
    let flags = flags::ioc(request.flags, host.settings) | AllocFlags::USERPTR;
    Ok(Allocation {
        reservation,
        backing: Backing::System { blob, gpu: gpu.gpu_id, flags },
        node: if request.flags.is_set(HsaMemFlags::GTT_ACCESS) { 0 } else { request.node },
        flags: request.flags,
        state: Mutex::default(),
    })
}

fn vram(host: Host<'_>, gpu: &Gpu, request: Request) -> Outcome<Allocation> {
    let set = |flag| request.flags.is_set(flag);
    if set(HsaMemFlags::ONLY_ADDRESS) && set(HsaMemFlags::NO_ADDRESS) {
        return Err(Refusal::parameter("MemFlags has both OnlyAddress and NoAddress"));
    }
    let missing = |what| Refusal::new(HsakmtStatus::NOT_IMPLEMENTED, what);
    if set(HsaMemFlags::NO_ADDRESS) {
        return Err(missing("VRAM without an address"));
    }
    if set(HsaMemFlags::HOST_ACCESS) && !set(HsaMemFlags::ONLY_ADDRESS) {
        return Err(missing("VRAM that the CPU can access"));
    }
    let reservation = reserve(host, address_size(request)?, request)?;
    let allocation = |reservation, backing, handle| Allocation {
        reservation,
        backing,
        node: request.node,
        flags: request.flags,
        state: Mutex::new(State { handle, ..State::default() }),
    };
    if set(HsaMemFlags::ONLY_ADDRESS) {
        return Ok(allocation(reservation, Backing::Nothing, None));
    }
    let (answer, _) = host
        .client
        .call::<AllocMemory>(
            &AllocMemoryRequest {
                va: GuestVa(reservation.start()),
                size: reservation.size(),
                gpu_id: gpu.gpu_id,
                flags: flags::vram(request.flags, host.settings).bits(),
                resource: ResourceId(0),
                pad: 0,
                resource_offset: 0,
            },
            &[],
            0,
        )
        .map_err(|error: ClientError| Refusal::host(HsakmtStatus::NO_MEMORY, &error))?;
    Ok(allocation(reservation, Backing::Vram, Some(answer.handle)))
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
