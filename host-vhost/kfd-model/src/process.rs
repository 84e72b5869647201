//! A KFD process: what amdkfd keeps for one address space (`struct kfd_process` and its per-GPU data).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::memory::AllocFlags;
use kfd_seam::{FileId, Result};
use nix::errno::Errno;

use crate::arena::{Arena, PAGE};
use crate::dmabuf::{self, DmaBuf};
use crate::engine::compute::Pool;
use crate::engine::runner::Engines;
use crate::engine::slots::Slots;
use crate::engine::view::next_generation;
use crate::events::Events;
use crate::ids::Ids;
use crate::kfd::ProcessQueue;
use crate::ledger::{Ledger, Limits};
use crate::machine::Machine;
use crate::object::{Content, Graveyard, OBJECT_FLAGS, Object};
use crate::profile::{Gpu, Profile};
use crate::shared_machine::SharedMachine;
use crate::smi::Streams;
use crate::space::{AddressSpace, Fault, SEQUENCES, SEQUENCES_SIZE, TRAP_HANDLER_SIZE};
use crate::svm;
use crate::topology::{NodeProperties, Topology};

/// Buffers that a process can have on one GPU. The kernel sets no limit but memory.
pub const MAX_BUFFERS: u32 = 1 << 18;

/// `AMDGPU_VM_RESERVED_VRAM`.
pub const RESERVED_VRAM: u64 = 8 << 20;

/// `AMDGPU_RESERVE_MEM_LIMIT`.
const SYSTEM_MEMORY_RESERVE: u64 = 3 << 29;

/// Room for the event page and other memory that belongs to no GPU.
const COMMON_CAPACITY: u64 = 1 << 20;

/// The state of the process that owns the model.
#[derive(Debug)]
pub struct Process {
    /// Its events.
    pub events: Arc<Events>,
    /// Its GPUs, in the topology's order.
    pub devices: Vec<Arc<Device>>,
    /// What runs its queues.
    pub engines: Engines,
    /// Memory that belongs to no GPU; its memfd is the descriptor of `/dev/kfd`.
    pub common: Arc<Arena>,
    /// Nodes of the topology, CPUs included.
    pub node_count: u32,
    /// The interface version.
    pub kfd_minor: u32,
    /// XNACK can be asked for (`CONFIG_HSA_AMD_SVM`).
    pub svm: bool,
    /// GPUs reach each other over PCIe (`CONFIG_HSA_AMD_P2P`).
    pub p2p: bool,
    /// Memory in use.
    pub ledger: Arc<Ledger>,
    /// Memory that is in use outside of the model alone.
    pub graveyard: Arc<Graveyard>,
    state: Mutex<State>,
}

/// One GPU of the process: what never changes, and the page table.
#[derive(Debug)]
pub struct Device {
    /// KFD's id.
    pub gpu_id: u32,
    /// What it is.
    pub gpu: Gpu,
    /// VRAM, system memory for the GPU, doorbells and the MMIO page; its memfd is the render node's descriptor.
    pub arena: Arc<Arena>,
    /// Offset of the memory for sequence numbers.
    sequences: u64,
    /// What its queues need.
    pub queue_memory: QueueMemory,
    /// A memory fault took the process's queues off the GPU for good (`qcm_process_device::evicted`).
    pub evicted: Arc<AtomicBool>,
    /// What runs its kernels, together with those of the process's other GPUs.
    pub compute: Arc<Pool>,
    /// Who listens to system management events of it.
    pub smi: Streams,
    space: RwLock<AddressSpace>,
    /// [`PageTable::generation`](crate::engine::view::PageTable::generation)
    generation: AtomicU64,
}

/// Sizes in bytes of what a compute queue needs beside its ring (`kfd_queue_ctx_save_restore_size`).
#[derive(Clone, Copy, Debug)]
pub struct QueueMemory {
    /// The control stack, at the start of the save area.
    pub control_stack: u32,
    /// The context save area of one compute die.
    pub save_area: u32,
    /// What the debugger has behind the save area.
    pub debugger: u32,
}

impl QueueMemory {
    fn of(node: &NodeProperties) -> Self {
        let debugger = node.gpu.as_ref().map_or(0, |gpu| gpu.debug_memory_size);
        Self { control_stack: node.ctl_stack_size, save_area: node.cwsr_size, debugger }
    }
}

impl Device {
    /// An open render node of it, with what every address space has (`amdgpu_driver_open_kms`).
    ///
    /// # Errors
    /// None that can happen: the address space is empty.
    pub fn open(&self, index: usize) -> Result<DrmFile> {
        let mut file = DrmFile::new(index);
        let memory = (&self.arena, self.sequences);
        file.space.map_for_the_driver(SEQUENCES, SEQUENCES_SIZE, memory, VmPageFlags::PAGE_READABLE)?;
        Ok(file)
    }

    /// The page table to translate with.
    pub fn space(&self) -> RwLockReadGuard<'_, AddressSpace> {
        self.space.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The page table to change.
    pub fn space_mut(&self) -> RwLockWriteGuard<'_, AddressSpace> {
        let space = self.space.write().unwrap_or_else(PoisonError::into_inner);
        self.generation.store(next_generation(), Ordering::Relaxed);
        space
    }

    /// Changes with the page table; it does not while that is held.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }
}

/// What the process's mutex guards in the kernel.
#[derive(Debug)]
pub struct State {
    /// One for each GPU.
    pub devices: Vec<DeviceState>,
    /// Handle of the buffer that serves as event page.
    pub event_page: Option<u64>,
    /// Runtime enabled, for its queues.
    pub exceptions: Arc<AtomicBool>,
    /// Queues.
    pub queues: Ids<ProcessQueue>,
    /// The runtime announced itself to the debugger (RUNTIME_ENABLE).
    pub runtime_enabled: bool,
    /// Recoverable page faults are on.
    pub xnack: bool,
    /// Ranges of shared virtual memory.
    pub svm: svm::Ranges,
    /// Open render nodes.
    pub drm_files: BTreeMap<FileId, DrmFile>,
    /// Objects that were made for other processes' memory, or another GPU's: by arena, offset, and the GPU that took
    /// them.
    imported: BTreeMap<((u64, u64), u64, usize), Weak<Object>>,
}

/// An open render node (`struct drm_file`, `struct amdgpu_fpriv`).
#[derive(Debug)]
pub struct DrmFile {
    /// Index of its GPU.
    pub gpu: usize,
    /// GEM handles.
    pub handles: Ids<Arc<Object>>,
    /// The handle of each object that has one.
    pub by_object: BTreeMap<u64, u32>,
    /// Objects that may be mapped through it by the CPU, and how often that was allowed (`drm_vma_node_allow`).
    allowed: BTreeMap<u64, u32>,
    /// Its page table, until the process takes it (ACQUIRE_VM): then it is [`Device::space`].
    pub space: AddressSpace,
}

impl DrmFile {
    /// A fresh one.
    fn new(gpu: usize) -> Self {
        Self {
            gpu,
            handles: Ids::starting_at(1),
            by_object: BTreeMap::new(),
            allowed: BTreeMap::new(),
            space: AddressSpace::default(),
        }
    }

    /// Lets the CPU map an object through it.
    pub fn allow(&mut self, object: u64) {
        let count = self.allowed.entry(object).or_default();
        *count = count.saturating_add(1);
    }

    /// Takes one [`Self::allow`] back.
    pub fn revoke(&mut self, object: u64) {
        if let Some(count) = self.allowed.get_mut(&object) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.allowed.remove(&object);
            }
        }
    }

    /// Whether the CPU may map an object through it.
    pub fn allows(&self, object: u64) -> bool {
        self.allowed.contains_key(&object)
    }
}

/// What a process has on one GPU.
#[derive(Debug)]
pub struct DeviceState {
    /// Places of its queues.
    pub slots: Slots,
    /// A queue has the global wave sync (`qcm_process_device::num_gws`).
    pub gws: bool,
    /// The render node whose address space the process took (ACQUIRE_VM).
    pub drm_file: Option<FileId>,
    /// Buffers by the low half of their handle.
    pub buffers: Ids<Buffer>,
    /// Objects by their mmap offset.
    pub objects: BTreeMap<u64, Weak<Object>>,
    /// Offset of the doorbell slice.
    pub doorbells: Option<u64>,
    /// Offset of the page of remapped registers.
    pub mmio: Option<u64>,
    /// Offset of the trap handler's memory.
    pub reserved: Option<u64>,
    /// Cache policy: default, alternate.
    pub cache_policy: (u32, u32),
    /// Address of the scratch memory, in units of 64 KiB as the caller gives it.
    pub scratch_base: u64,
    /// Trap handler: code and memory.
    pub trap_handler: (u64, u64),
    /// Fake mmap offsets for buffers without memory of the model.
    pub next_fake_offset: u64,
    /// Number of objects at which those that are gone are taken out.
    next_cleaning: usize,
}

/// A buffer of KFD (`struct kgd_mem`).
#[derive(Debug)]
pub struct Buffer {
    /// GPU address.
    pub va: u64,
    /// What it is. An AQL ring appears twice in a row at `va`.
    pub object: Arc<Object>,
    /// How it was allocated.
    pub flags: AllocFlags,
    /// Indices of the GPUs in whose page tables it was (`kfd_mem_attach`), mapped now or not.
    pub attached: Vec<usize>,
    /// Indices of the GPUs that have it mapped.
    pub mapped: Vec<usize>,
}

impl Buffer {
    /// One that no GPU has mapped.
    pub fn new(va: u64, object: Arc<Object>, flags: AllocFlags) -> Self {
        Self { va, object, flags, attached: Vec::new(), mapped: Vec::new() }
    }

    /// An AQL ring that appears twice.
    pub fn is_doubled(&self) -> bool {
        self.flags.contains(AllocFlags::AQL_QUEUE_MEM)
    }
}

/// `amdgpu_amdkfd_gpuvm_init_mem_limits`, and what `ESTIMATE_PT_SIZE` leaves of each GPU's VRAM.
fn limits(machine: &Machine, profile: &Profile, gpus: &[Gpu]) -> Limits {
    let memory = machine.memory_bytes();
    let mut system = memory - (memory >> 6);
    if system < 2 * SYSTEM_MEMORY_RESERVE {
        system >>= 1;
    } else {
        system -= SYSTEM_MEMORY_RESERVE;
    }
    let vram = profile.gpu.iter().fold(0u64, |sum, gpu| sum.saturating_add(gpu.memory.vram_bytes()));
    let page_tables = (memory.saturating_add(vram) >> 14).max(RESERVED_VRAM);
    let vram = gpus.iter().map(|gpu| gpu.memory.vram_bytes().saturating_sub(page_tables)).collect();
    Limits { system, driver: memory / 2, vram }
}

impl Process {
    /// A fresh process; with `shared`, its memory counts together with that of others.
    ///
    /// # Errors
    /// What making the memory files answers.
    pub fn new(
        profile: &Profile,
        topology: &Topology,
        machine: &Machine,
        shared: Option<SharedMachine>,
    ) -> Result<Self> {
        let gpus = topology.gpu_nodes().filter_map(|node| profile.gpu.get(node.gpu?).cloned());
        let limits = limits(machine, profile, &gpus.collect::<Vec<_>>());
        let mut devices = Vec::new();
        let mut states = Vec::new();
        let compute = Arc::<Pool>::default();
        for node in topology.gpu_nodes() {
            let Some(gpu) = node.gpu.and_then(|index| profile.gpu.get(index)) else { continue };
            // Twice of what can be in use, so that no mix of sizes ever lacks a range.
            let capacity = gpu.memory.vram_bytes().saturating_add(limits.driver).saturating_mul(2);
            let arena = Arc::new(Arena::new("amdgpu", capacity)?);
            let sequences = arena.allocate(SEQUENCES_SIZE)?;
            states.push(DeviceState::new(gpu));
            let (gpu_id, gpu, space) = (node.gpu_id, gpu.clone(), RwLock::default());
            let queue_memory = QueueMemory::of(&node.properties);
            let (evicted, compute) = (Arc::default(), compute.clone());
            let generation = next_generation().into();
            let smi = Streams::default();
            let device = Device {
                gpu_id,
                gpu,
                arena,
                sequences,
                queue_memory,
                evicted,
                compute,
                smi,
                space,
                generation,
            };
            devices.push(Arc::new(device));
        }
        Ok(Self {
            events: Arc::default(),
            engines: Engines::default(),
            devices,
            common: Arc::new(Arena::new("kfd", COMMON_CAPACITY)?),
            node_count: u32::try_from(topology.nodes.len()).unwrap_or(u32::MAX),
            kfd_minor: profile.kernel.kfd_minor,
            svm: profile.kernel.svm,
            p2p: profile.kernel.p2p,
            ledger: Arc::new(Ledger::new(limits, shared)),
            graveyard: Arc::default(),
            state: Mutex::new(State {
                devices: states,
                event_page: None,
                exceptions: Arc::default(),
                queues: Ids::starting_at(0),
                runtime_enabled: false,
                xnack: profile.kernel.svm
                    && !profile.gpu.is_empty()
                    && profile.gpu.iter().all(|gpu| gpu.retry_faults),
                svm: svm::Ranges::default(),
                drm_files: BTreeMap::new(),
                imported: BTreeMap::new(),
            }),
        })
    }

    /// The mutable part.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Index of the GPU with a KFD id.
    pub fn index_of(&self, gpu_id: u32) -> Option<usize> {
        self.devices.iter().position(|device| device.gpu_id == gpu_id)
    }

    /// The GPU with a KFD id (`kfd_process_device_data_by_id`), with its index.
    ///
    /// # Errors
    /// `EINVAL` when there is none.
    pub fn device(&self, gpu_id: u32) -> Result<(usize, &Arc<Device>)> {
        let index = self.index_of(gpu_id).ok_or(Errno::EINVAL)?;
        self.devices.get(index).map(|device| (index, device)).ok_or(Errno::EINVAL)
    }

    /// Reads through a GPU's page table of this process.
    ///
    /// # Errors
    /// The fault. An unknown GPU has nothing mapped.
    pub fn read_gpu(&self, gpu_id: u32, va: u64, buffer: &mut [u8]) -> core::result::Result<(), Fault> {
        match self.device(gpu_id) {
            Ok((_, device)) => device.space().read(gpu_id, va, buffer),
            Err(_) => AddressSpace::default().read(gpu_id, va, buffer),
        }
    }

    /// Fetches instructions through a GPU's page table of this process.
    ///
    /// # Errors
    /// The fault. An unknown GPU has nothing mapped.
    pub fn fetch_gpu(&self, gpu_id: u32, va: u64, buffer: &mut [u8]) -> core::result::Result<(), Fault> {
        match self.device(gpu_id) {
            Ok((_, device)) => device.space().fetch(gpu_id, va, buffer),
            Err(_) => AddressSpace::default().fetch(gpu_id, va, buffer),
        }
    }

    /// Writes through a GPU's page table of this process.
    ///
    /// # Errors
    /// The fault. An unknown GPU has nothing mapped.
    pub fn write_gpu(&self, gpu_id: u32, va: u64, bytes: &[u8]) -> core::result::Result<(), Fault> {
        match self.device(gpu_id) {
            Ok((_, device)) => device.space().write(gpu_id, va, bytes),
            Err(_) => AddressSpace::default().write(gpu_id, va, bytes),
        }
    }

    /// The object behind a dma-buf for GPU `target` (`amdgpu_gem_prime_import`): the one that was exported where it is
    /// that GPU's memory, else one that stands for it.
    ///
    /// # Errors
    /// `EINVAL` when the memory is gone; what opening it again answers.
    pub fn import(
        &self,
        state: &mut State,
        target: usize,
        descriptor: &OwnedFd,
        found: &DmaBuf,
    ) -> Result<Arc<Object>> {
        let device = self.devices.get(target).ok_or(Errno::EINVAL)?;
        let local = device.gpu_id == found.note.gpu_id;
        if local && device.arena.identity()? == found.arena {
            let objects = &mut state.device(target)?.objects;
            if let Some(object) = objects.get(&found.offset).and_then(Weak::upgrade) {
                return Ok(object);
            }
            let piece = self.graveyard.exhume(&device.arena, found.offset).ok_or(Errno::EINVAL)?;
            let content = Content::Piece(piece);
            let object = Object::new(Some(target), found.note.size, found.offset, content, &self.graveyard);
            let object = Arc::new(object);
            objects.insert(found.offset, Arc::downgrade(&object));
            return Ok(object);
        }
        let key = (found.arena, found.offset, target);
        if let Some(object) = state.imported.get(&key).and_then(Weak::upgrade) {
            return Ok(object);
        }
        state.imported.retain(|_, object| object.strong_count() > 0);
        // Another GPU's memory is system memory to this one (amdgpu_dma_buf_create_obj).
        let kind = found.note.flags() & (AllocFlags::VRAM | AllocFlags::GTT);
        let kind = if local { kind } else { AllocFlags::GTT };
        let flags = kind | (found.note.flags() & OBJECT_FLAGS);
        let arena = Arc::new(dmabuf::import(descriptor.as_fd(), found)?);
        let content = Content::Imported { arena, offset: found.offset, gpu_id: found.note.gpu_id, flags };
        let offset = state.device(target)?.fake_offset();
        let object = Arc::new(Object::new(Some(target), found.note.size, offset, content, &self.graveyard));
        state.imported.insert(key, Arc::downgrade(&object));
        state.device(target)?.register(&object);
        Ok(object)
    }

    /// Runs `change` on the page table of an open render node: the process's, once it has taken it.
    ///
    /// # Errors
    /// `EBADF` when it is none; what `change` answers.
    pub fn with_space<T>(
        &self,
        state: &mut State,
        file: FileId,
        change: impl FnOnce(&mut AddressSpace) -> Result<T>,
    ) -> Result<T> {
        let gpu = state.drm_files.get(&file).ok_or(Errno::EBADF)?.gpu;
        if state.device(gpu)?.drm_file == Some(file) {
            let device = self.devices.get(gpu).ok_or(Errno::EINVAL)?;
            return change(&mut device.space_mut());
        }
        change(&mut state.drm_files.get_mut(&file).ok_or(Errno::EBADF)?.space)
    }

    /// Gives an object a handle on an open render node; the one that it has there already, if it has one
    /// (`drm_gem_handle_create`, `drm_prime_lookup_buf_handle`).
    ///
    /// # Errors
    /// `EBADF`, `ENOMEM` when there are too many.
    pub fn open_handle(&self, state: &mut State, file: FileId, object: &Arc<Object>) -> Result<u32> {
        let drm = state.drm_files.get_mut(&file).ok_or(Errno::EBADF)?;
        if let Some(handle) = drm.by_object.get(&object.id) {
            return Ok(*handle);
        }
        let handle = drm.handles.insert(object.clone(), MAX_BUFFERS).ok_or(Errno::ENOMEM)?;
        drm.by_object.insert(object.id, handle);
        drm.allow(object.id);
        self.with_space(state, file, |space| {
            space.add(object.id);
            Ok(handle)
        })
    }

    /// Ends a handle (`drm_gem_handle_delete`, `amdgpu_gem_object_close`).
    ///
    /// # Errors
    /// `EINVAL` when there is none; `EBADF`.
    pub fn close_handle(&self, state: &mut State, file: FileId, handle: u32) -> Result<()> {
        let drm = state.drm_files.get_mut(&file).ok_or(Errno::EBADF)?;
        let object = drm.handles.remove(handle).ok_or(Errno::EINVAL)?;
        drm.by_object.remove(&object.id);
        drm.revoke(object.id);
        self.with_space(state, file, |space| {
            space.remove(object.id);
            Ok(())
        })
    }

    /// A render node was closed. One whose address space the process took lives as long as the process.
    pub fn close_drm_file(&self, file: FileId) {
        let mut state = self.state();
        if !state.devices.iter().any(|device| device.drm_file == Some(file)) {
            state.drm_files.remove(&file);
        }
    }

    /// Two GPUs can reach each other's memory: one hive, or PCIe with a BAR over the whole VRAM of the other
    /// (`kfd_mem_attach`).
    pub fn peers(&self, owner: usize, other: usize, vram: bool) -> bool {
        let (Some(owner_of), Some(other_of)) = (self.devices.get(owner), self.devices.get(other)) else {
            return false;
        };
        let same_hive = owner_of.gpu.hive_id != 0 && owner_of.gpu.hive_id == other_of.gpu.hive_id;
        owner == other || (vram && same_hive) || (self.p2p && owner_of.gpu.memory.large_bar())
    }
}

impl State {
    /// What a process has on GPU `index`.
    ///
    /// # Errors
    /// `EINVAL` when there is no such GPU.
    pub fn device(&mut self, index: usize) -> Result<&mut DeviceState> {
        self.devices.get_mut(index).ok_or(Errno::EINVAL)
    }

    /// The same, once the process took the GPU's address space (`kfd_bind_process_to_device`).
    ///
    /// # Errors
    /// `unbound` when it did not; `EINVAL` when there is no such GPU.
    pub fn bound(&mut self, index: usize, unbound: Errno) -> Result<&mut DeviceState> {
        let device = self.device(index)?;
        if device.drm_file.is_some() { Ok(device) } else { Err(unbound) }
    }
}

impl DeviceState {
    fn new(gpu: &Gpu) -> Self {
        Self {
            slots: Slots::new(gpu.gfx_target_version, gpu.engines),
            gws: false,
            drm_file: None,
            buffers: Ids::starting_at(0),
            objects: BTreeMap::new(),
            doorbells: None,
            mmio: None,
            reserved: None,
            cache_policy: (0, 0),
            scratch_base: 0,
            trap_handler: (0, 0),
            // Beyond the end of every arena.
            next_fake_offset: 1 << 46,
            next_cleaning: 64,
        }
    }

    /// A mmap offset that shows nothing.
    pub fn fake_offset(&mut self) -> u64 {
        let offset = self.next_fake_offset;
        self.next_fake_offset = offset.saturating_add(PAGE);
        offset
    }

    /// Offset of the trap handler's memory, made at the first use.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn trap_handler_memory(&mut self, arena: &Arena) -> Result<u64> {
        match self.reserved {
            Some(offset) => Ok(offset),
            None => Ok(*self.reserved.insert(arena.allocate(TRAP_HANDLER_SIZE)?)),
        }
    }

    /// Makes an object known by its mmap offset.
    pub fn register(&mut self, object: &Arc<Object>) {
        if self.objects.len() >= self.next_cleaning {
            self.objects.retain(|_, object| object.strong_count() > 0);
            self.next_cleaning = self.objects.len().saturating_mul(2).saturating_add(64);
        }
        self.objects.insert(object.mmap_offset, Arc::downgrade(object));
    }
}
