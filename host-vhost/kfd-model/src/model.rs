//! The model as a service.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kfd_abi::drm;
use kfd_abi::event::HsaMemoryExceptionData;
use kfd_abi::kfd::nr;
use kfd_abi::mmap::{self, MmapType};
use kfd_abi::queue::DOORBELL_SLICE_SIZE_GFX9;
use kfd_seam::tree::Tree;
use kfd_seam::{
    DeviceId, Entry, FileId, KfdService, Lookup, MapRequest, MapSource, Opened, Request, Result, UserPtr,
};
use nix::errno::Errno;
use nix::libc;

use crate::arena::{PAGE, page_align};
use crate::descriptors::{self, Examined};
use crate::kfd::{self, Descriptor, DescriptorTable};
use crate::machine::Machine;
use crate::process::Process;
use crate::profile::{Profile, ProfileError};
use crate::render::RenderFile;
use crate::shared_machine::{MACHINE_VARIABLE, SharedMachine};
use crate::space::{Fault, TRAP_HANDLER_SIZE};
use crate::topology::Topology;
use crate::{debug, render, sysfs};

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// No profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The memory files could not be made.
    #[error("cannot make the memory of the KFD model: {0}")]
    Memory(#[from] Errno),
    /// The machine that is shared with other processes cannot be used.
    #[error("{MACHINE_VARIABLE}: cannot use {}: {error}", path.display())]
    Machine {
        /// Its file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The debug mailbox could not be made.
    #[error("{}: cannot make a mailbox in {}: {error}", debug::DEBUG_VARIABLE, directory.display())]
    Mailbox {
        /// Where.
        directory: PathBuf,
        /// Why.
        error: std::io::Error,
    },
}

/// A software KFD for the process that it lives in.
#[derive(Debug)]
pub struct Model {
    profile: Profile,
    topology: Topology,
    tree: Tree,
    process: Arc<Process>,
    files: Mutex<Files>,
    /// This is a copy in a forked child.
    foreign: AtomicBool,
    /// The process that made it.
    pid: u32,
    mailbox: Option<debug::Server>,
}

#[derive(Debug, Default)]
struct Files {
    open: BTreeMap<FileId, OpenFile>,
    last: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenFile {
    Kfd,
    Render(usize),
}

impl Model {
    /// The model that the environment variable [`crate::profile::PROFILE_VARIABLE`] names, with a mailbox in the
    /// directory that [`debug::DEBUG_VARIABLE`] names and on the machine that [`MACHINE_VARIABLE`] names, if they do.
    ///
    /// # Errors
    /// See [`ModelError`].
    pub fn from_environment() -> core::result::Result<Self, ModelError> {
        let profile = Profile::from_environment()?;
        let mut model = match std::env::var_os(MACHINE_VARIABLE).filter(|name| !name.is_empty()) {
            Some(path) => Self::sharing(profile, &Machine::running(), Path::new(&path))?,
            None => Self::new(profile)?,
        };
        if let Some(directory) = std::env::var_os(debug::DEBUG_VARIABLE).filter(|name| !name.is_empty()) {
            model.open_mailbox(Path::new(&directory))?;
        }
        Ok(model)
    }

    /// Makes a debug mailbox in `directory`, see [`debug`].
    ///
    /// # Errors
    /// [`ModelError::Mailbox`].
    pub fn open_mailbox(&mut self, directory: &Path) -> core::result::Result<(), ModelError> {
        let failed = |error| ModelError::Mailbox { directory: directory.to_owned(), error };
        self.mailbox = Some(debug::Server::new(directory).map_err(failed)?);
        Ok(())
    }

    /// A model of a profile on the running machine.
    ///
    /// # Errors
    /// [`ModelError::Memory`].
    pub fn new(profile: Profile) -> core::result::Result<Self, ModelError> {
        Self::on(profile, &Machine::running())
    }

    /// A model of a profile on a machine.
    ///
    /// # Errors
    /// [`ModelError::Memory`].
    pub fn on(profile: Profile, machine: &Machine) -> core::result::Result<Self, ModelError> {
        let topology = Topology::new(&profile, machine);
        Self::with(profile, topology, machine, None)
    }

    /// A model of a profile on a machine whose memory is counted together with that of other processes, by the file
    /// `path` ([`crate::shared_machine`]).
    ///
    /// # Errors
    /// [`ModelError::Memory`], [`ModelError::Machine`].
    pub fn sharing(
        profile: Profile,
        machine: &Machine,
        path: &Path,
    ) -> core::result::Result<Self, ModelError> {
        let topology = Topology::new(&profile, machine);
        let gpu_ids: Vec<u32> = topology.gpu_nodes().map(|node| node.gpu_id).collect();
        let failed = |error| ModelError::Machine { path: path.to_owned(), error };
        let shared = SharedMachine::join(path, &gpu_ids).map_err(failed)?;
        Self::with(profile, topology, machine, Some(shared))
    }

    fn with(
        profile: Profile,
        topology: Topology,
        machine: &Machine,
        shared: Option<SharedMachine>,
    ) -> core::result::Result<Self, ModelError> {
        let tree = sysfs::build(&profile, &topology);
        let process = Arc::new(Process::new(&profile, &topology, machine, shared)?);
        let foreign = AtomicBool::new(false);
        Ok(Self {
            profile,
            topology,
            tree,
            process,
            files: Mutex::default(),
            foreign,
            pid: std::process::id(),
            mailbox: None,
        })
    }

    /// The profile.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The topology.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Reads the process's memory as a GPU sees it.
    ///
    /// # Errors
    /// The fault.
    pub fn read_gpu(&self, gpu_id: u32, va: u64, buffer: &mut [u8]) -> core::result::Result<(), Fault> {
        self.process.read_gpu(gpu_id, va, buffer)
    }

    /// Writes the process's memory as a GPU does.
    ///
    /// # Errors
    /// The fault.
    pub fn write_gpu(&self, gpu_id: u32, va: u64, bytes: &[u8]) -> core::result::Result<(), Fault> {
        self.process.write_gpu(gpu_id, va, bytes)
    }

    /// Raises an interrupt of a GPU that carries `valid_bits` bits of an event's id.
    pub fn interrupt(&self, partial_id: u32, valid_bits: u32) {
        self.process.events.interrupt(partial_id, valid_bits);
    }

    /// Reports a memory fault of a GPU; returns how many events heard it.
    pub fn memory_fault(&self, data: HsaMemoryExceptionData) -> usize {
        self.process.events.memory_fault(data)
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, file: FileId) -> Result<OpenFile> {
        if self.foreign.load(Ordering::Relaxed) {
            return Err(Errno::EBADF);
        }
        self.files().open.get(&file).copied().ok_or(Errno::EBADF)
    }

    /// `kfd_mmap`. `length` is in whole pages.
    fn map_kfd(&self, offset: u64, length: u64) -> Result<MapSource> {
        let device = self.process.device(mmap::gpu_id(offset)).map_err(|_| Errno::ENODEV);
        let kind = MmapType::of(offset);
        if kind == MmapType::Events {
            let (arena, offset) = self.process.events.map_page(length)?;
            return Ok(MapSource { file: arena.descriptor()?, offset });
        }
        let (index, device) = device?;
        let size = match kind {
            MmapType::Doorbell => DOORBELL_SLICE_SIZE_GFX9,
            MmapType::ReservedMem => TRAP_HANDLER_SIZE,
            MmapType::Mmio | MmapType::Events => PAGE,
        };
        if length != size {
            return Err(Errno::EINVAL);
        }
        let mut state = self.process.state();
        let own = state.device(index)?;
        let arena = &device.arena;
        let offset = match kind {
            MmapType::Doorbell => kfd::doorbells(own, arena)?,
            MmapType::ReservedMem => own.trap_handler_memory(arena)?,
            MmapType::Mmio | MmapType::Events => kfd::mmio(own, arena)?,
        };
        Ok(MapSource { file: arena.descriptor()?, offset })
    }

    /// `drm_gem_mmap`, `amdgpu_gem_object_mmap`. `length` is in whole pages.
    fn map_render(&self, file: FileId, index: usize, request: &MapRequest, length: u64) -> Result<MapSource> {
        let mut state = self.process.state();
        let own = state.device(index)?;
        let object = own.objects.get(&request.offset).and_then(Weak::upgrade).ok_or(Errno::EINVAL)?;
        if length > object.size {
            return Err(Errno::EINVAL);
        }
        // KFD's buffers can be mapped through the open file whose address space the process took, others through
        // those that have a handle.
        if !state.drm_files.get(&file).is_some_and(|drm| drm.allows(object.id)) {
            return Err(Errno::EACCES);
        }
        let (arena, offset) = object.mappable().ok_or(Errno::EPERM)?;
        // TTM has no private mappings; those without any access reserve addresses and are let through.
        if request.flags & libc::MAP_SHARED == 0 && request.protection != libc::PROT_NONE {
            return Err(Errno::EINVAL);
        }
        // Not by a description of its own, which would keep the memory as long as the map lasts: each lock of a file
        // costs time for every other one, and a program can have many thousand maps.
        Ok(MapSource { file: arena.descriptor()?, offset })
    }
}

/// Whether an ioctl can give the process its first GPU memory.
fn makes_memory(file: OpenFile, request: u32) -> bool {
    let number = Request(request).number();
    match file {
        OpenFile::Kfd => matches!(number, nr::ALLOC_MEMORY_OF_GPU | nr::IMPORT_DMABUF),
        OpenFile::Render(_) => number == drm::nr::AMDGPU_GEM_VA || number == drm::nr::AMDGPU_GEM_CREATE,
    }
}

impl DescriptorTable for Model {
    fn find(&self, descriptor: u32) -> Option<Descriptor> {
        let (identity, mark) = match descriptors::examine(descriptor).ok()? {
            Examined::DmaBuf(found) => return Some(Descriptor::DmaBuf(found)),
            Examined::File(identity, mark) => (identity, mark),
        };
        let gpu = self.process.devices.iter().position(|device| device.arena.identity() == Ok(identity));
        let Some(gpu) = gpu else { return Some(Descriptor::Other) };
        let files = self.files();
        let mut nodes =
            files.open.iter().filter(|(_, what)| **what == OpenFile::Render(gpu)).map(|(file, _)| *file);
        // Whoever has a copy of it may have moved its position: QEMU does, which asks memory of a file for its end. Where the node is
        // open once that is no matter.
        let file = match mark.filter(|mark| files.open.get(mark) == Some(&OpenFile::Render(gpu))) {
            Some(marked) => Some(marked),
            None => nodes.next().filter(|_| nodes.next().is_none()),
        };
        Some(file.map_or(Descriptor::Other, |file| Descriptor::Render { file, gpu }))
    }
}

impl KfdService for Model {
    fn lookup(&self, path: &Path) -> Lookup {
        if path == Path::new("/proc/modules") {
            let modules = kfd_seam::sysfs::modules(std::fs::read(path).unwrap_or_default());
            return Lookup::Found(Entry::File(modules));
        }
        self.tree.lookup(path)
    }

    fn open(&self, device: DeviceId, _flags: i32) -> Result<Opened> {
        if self.foreign.load(Ordering::Relaxed) {
            return Err(Errno::EBADF);
        }
        let (open, arena) = match sysfs::gpu_of_device(device) {
            None => (OpenFile::Kfd, &self.process.common),
            Some(index) => {
                let gpu = self.process.devices.get(index).ok_or(Errno::ENXIO)?;
                (OpenFile::Render(index), &gpu.arena)
            }
        };
        let descriptor = arena.open()?;
        let mut files = self.files();
        files.last = files.last.checked_add(1).ok_or(Errno::ENFILE)?;
        let file = FileId(files.last);
        descriptors::mark(&descriptor, file)?;
        files.open.insert(file, open);
        drop(files);
        if let OpenFile::Render(gpu) = open {
            let device = self.process.devices.get(gpu).ok_or(Errno::ENXIO)?;
            self.process.state().drm_files.insert(file, device.open(gpu)?);
        }
        Ok(Opened { file, descriptor })
    }

    fn ioctl(&self, file: FileId, request: u32, argument: UserPtr) -> Result<i32> {
        let open = self.file(file)?;
        if let Some(mailbox) = &self.mailbox
            && makes_memory(open, request)
        {
            mailbox.start(&self.process);
        }
        match open {
            OpenFile::Kfd => kfd::ioctl(&self.process, self, request, argument),
            OpenFile::Render(index) => {
                let node = RenderFile { file, index, drm_minor: self.profile.kernel.drm_minor };
                render::ioctl(&self.process, self, node, request, argument)
            }
        }
    }

    fn mmap(&self, file: FileId, request: &MapRequest) -> Result<MapSource> {
        let length = page_align(request.length).filter(|length| *length > 0).ok_or(Errno::EINVAL)?;
        match self.file(file)? {
            OpenFile::Kfd => self.map_kfd(request.offset, length),
            OpenFile::Render(index) => self.map_render(file, index, request, length),
        }
    }

    fn mapped(&self, file: FileId, request: &MapRequest, address: u64) {
        let shared = request.flags & libc::MAP_SHARED != 0;
        let rings = shared && MmapType::of(request.offset) == MmapType::Doorbell;
        if rings && self.file(file) == Ok(OpenFile::Kfd) {
            self.process.engines.doorbells_mapped(address, DOORBELL_SLICE_SIZE_GFX9);
        }
    }

    /// The process's state stays when its last descriptor is closed, as amdkfd keeps it until the address space is
    /// gone; a render node that it took stays taken.
    fn release(&self, file: FileId) {
        if !self.foreign.load(Ordering::Relaxed) {
            self.files().open.remove(&file);
            self.process.close_drm_file(file);
        }
    }

    fn forked(&self) {
        self.foreign.store(true, Ordering::Relaxed);
        // By a real fork, after which this copy is never used again nor dropped.
        if std::process::id() != self.pid {
            self.process.ledger.leave_to_parent();
            if let Some(mailbox) = &self.mailbox {
                mailbox.leave_to_parent();
            }
        }
    }
}
