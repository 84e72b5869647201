//! A KFD process: what amdkfd keeps for one address space (`struct kfd_process` and its per-GPU data).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kfd_abi::memory::AllocFlags;
use kfd_seam::{FileId, Result};
use nix::errno::Errno;

use crate::arena::{Arena, PAGE};
use crate::events::Events;
use crate::ids::Ids;
use crate::machine::Machine;
use crate::profile::{Gpu, Profile};
use crate::space::{AddressSpace, Backing, Fault};
use crate::topology::Topology;

/// Buffers that a process can have on one GPU. The kernel sets no limit but memory.
pub const MAX_BUFFERS: u32 = 1 << 18;

/// `AMDGPU_VM_RESERVED_VRAM`.
pub const RESERVED_VRAM: u64 = 8 << 20;

/// `VRAM_AVAILABLITY_ALIGN`.
const VRAM_AVAILABILITY_ALIGN: u64 = 2 << 20;

/// `AMDGPU_RESERVE_MEM_LIMIT`.
const SYSTEM_MEMORY_RESERVE: u64 = 3 << 29;

/// Room for the event page and other memory that belongs to no GPU.
const COMMON_CAPACITY: u64 = 1 << 20;

/// The state of the process that owns the model.
#[derive(Debug)]
pub struct Process {
    /// Its events.
    pub events: Events,
    /// Its GPUs, in the topology's order.
    pub devices: Vec<Device>,
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
    /// System memory limits.
    pub limits: Limits,
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
    space: RwLock<AddressSpace>,
}

impl Device {
    /// The page table to translate with.
    pub fn space(&self) -> RwLockReadGuard<'_, AddressSpace> {
        self.space.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The page table to change.
    pub fn space_mut(&self) -> RwLockWriteGuard<'_, AddressSpace> {
        self.space.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the process's mutex guards in the kernel.
#[derive(Debug)]
pub struct State {
    /// One for each GPU.
    pub devices: Vec<DeviceState>,
    /// Handle of the buffer that serves as event page.
    pub event_page: Option<u64>,
    /// The runtime announced itself to the debugger (RUNTIME_ENABLE).
    pub runtime_enabled: bool,
    /// Recoverable page faults are on.
    pub xnack: bool,
    /// System memory in use: of the driver and of the process.
    pub system_used: u64,
    /// System memory in use that the driver allocated.
    pub driver_used: u64,
}

/// What a process has on one GPU.
#[derive(Debug)]
pub struct DeviceState {
    /// The render node whose address space the process took (ACQUIRE_VM).
    pub drm_file: Option<FileId>,
    /// Buffers by the low half of their handle.
    pub buffers: Ids<Buffer>,
    /// Numbers of buffers by their mmap offset.
    pub by_offset: BTreeMap<u64, u32>,
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
    /// VRAM in use.
    pub vram_used: u64,
    /// VRAM in use, each buffer rounded up to 2 MiB.
    pub vram_used_aligned: u64,
    /// Fake mmap offsets for buffers without memory of the model.
    pub next_fake_offset: u64,
}

/// A buffer (`struct kgd_mem`).
#[derive(Clone, Debug)]
pub struct Buffer {
    /// GPU address.
    pub va: u64,
    /// Size in bytes, whole pages. An AQL ring appears twice in a row at `va`.
    pub size: u64,
    /// How it was allocated.
    pub flags: AllocFlags,
    /// What it is made of.
    pub backing: Backing,
    /// Offset for `mmap`.
    pub mmap_offset: u64,
    /// Indices of the GPUs that have it mapped.
    pub mapped: Vec<usize>,
}

impl Buffer {
    /// An AQL ring that appears twice.
    pub fn is_doubled(&self) -> bool {
        self.flags.contains(AllocFlags::AQL_QUEUE_MEM)
    }
}

/// Limits on system memory (`amdgpu_amdkfd_gpuvm_init_mem_limits`), in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// All system memory for GPUs.
    pub system: u64,
    /// What the driver itself allocates (half of the memory, TTM's default).
    pub driver: u64,
    /// What the page tables may need on each GPU.
    pub page_tables: u64,
}

impl Limits {
    fn new(machine: &Machine, profile: &Profile) -> Self {
        let memory = machine.memory_bytes();
        let mut system = memory - (memory >> 6);
        if system < 2 * SYSTEM_MEMORY_RESERVE {
            system >>= 1;
        } else {
            system -= SYSTEM_MEMORY_RESERVE;
        }
        let vram = profile.gpu.iter().fold(0u64, |sum, gpu| sum.saturating_add(gpu.memory.vram_bytes()));
        let page_tables = (memory.saturating_add(vram) >> 14).max(RESERVED_VRAM);
        Self { system, driver: memory / 2, page_tables }
    }
}

impl Process {
    /// A fresh process.
    ///
    /// # Errors
    /// What making the memory files answers.
    pub fn new(profile: &Profile, topology: &Topology, machine: &Machine) -> Result<Self> {
        let limits = Limits::new(machine, profile);
        let mut devices = Vec::new();
        let mut states = Vec::new();
        for node in topology.gpu_nodes() {
            let Some(gpu) = node.gpu.and_then(|index| profile.gpu.get(index)) else { continue };
            // Twice of what can be in use, so that no mix of sizes ever lacks a range.
            let capacity = gpu.memory.vram_bytes().saturating_add(limits.driver).saturating_mul(2);
            devices.push(Device {
                gpu_id: node.gpu_id,
                gpu: gpu.clone(),
                arena: Arc::new(Arena::new("amdgpu", capacity)?),
                space: RwLock::default(),
            });
            states.push(DeviceState::new());
        }
        Ok(Self {
            events: Events::default(),
            devices,
            common: Arc::new(Arena::new("kfd", COMMON_CAPACITY)?),
            node_count: u32::try_from(topology.nodes.len()).unwrap_or(u32::MAX),
            kfd_minor: profile.kernel.kfd_minor,
            svm: profile.kernel.svm,
            p2p: profile.kernel.p2p,
            limits,
            state: Mutex::new(State {
                devices: states,
                event_page: None,
                runtime_enabled: false,
                xnack: profile.kernel.svm
                    && !profile.gpu.is_empty()
                    && profile.gpu.iter().all(|gpu| gpu.retry_faults),
                system_used: 0,
                driver_used: 0,
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
    pub fn device(&self, gpu_id: u32) -> Result<(usize, &Device)> {
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
    fn new() -> Self {
        Self {
            drm_file: None,
            buffers: Ids::starting_at(0),
            by_offset: BTreeMap::new(),
            doorbells: None,
            mmio: None,
            reserved: None,
            cache_policy: (0, 0),
            scratch_base: 0,
            trap_handler: (0, 0),
            vram_used: 0,
            vram_used_aligned: 0,
            // Beyond the end of every arena, whose size is 4 TiB at most.
            next_fake_offset: 1 << 46,
        }
    }

    /// A mmap offset that shows nothing.
    pub fn fake_offset(&mut self) -> u64 {
        let offset = self.next_fake_offset;
        self.next_fake_offset = offset.saturating_add(PAGE);
        offset
    }

    /// VRAM left for buffers (`amdgpu_amdkfd_get_available_memory`).
    pub fn available(&self, vram: u64, limits: &Limits) -> u64 {
        let left = vram.saturating_sub(self.vram_used_aligned).saturating_sub(limits.page_tables);
        left - left % VRAM_AVAILABILITY_ALIGN
    }

    /// Takes VRAM (`amdgpu_amdkfd_reserve_mem_limit`).
    ///
    /// # Errors
    /// `ENOMEM` when there is not enough.
    pub fn take_vram(&mut self, size: u64, vram: u64, limits: &Limits) -> Result<()> {
        let used = self.vram_used.checked_add(size).ok_or(Errno::ENOMEM)?;
        if used > vram.saturating_sub(limits.page_tables) {
            return Err(Errno::ENOMEM);
        }
        self.vram_used = used;
        self.vram_used_aligned = self.vram_used_aligned.saturating_add(aligned(size));
        Ok(())
    }

    /// Gives VRAM back.
    pub fn give_vram(&mut self, size: u64) {
        self.vram_used = self.vram_used.saturating_sub(size);
        self.vram_used_aligned = self.vram_used_aligned.saturating_sub(aligned(size));
    }
}

fn aligned(size: u64) -> u64 {
    size.checked_next_multiple_of(VRAM_AVAILABILITY_ALIGN).unwrap_or(u64::MAX)
}
