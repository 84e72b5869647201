//! A process that calls the model.

use std::fs::File;
use std::hint::black_box;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use kfd_abi::event::CreateEventArgs;
use kfd_abi::kfd::request;
use kfd_abi::memory::{
    AcquireVmArgs, AllocFlags, AllocMemoryOfGpuArgs, ExportDmabufArgs, FreeMemoryOfGpuArgs,
    GetAvailableMemoryArgs, GetDmabufInfoArgs, ImportDmabufArgs, MapMemoryToGpuArgs, UnmapMemoryFromGpuArgs,
};
use kfd_model::Model;
use kfd_model::machine::{CpuNode, Machine};
use kfd_model::profile::Profile;
use kfd_model::space::Fault;
use kfd_seam::{Entry, FileId, KfdService, Lookup, MapRequest, MapSource, Result, UserPtr};
use nix::libc;

pub const PAGE: u64 = 4096;

/// A machine with one node of 4 CPUs and 16 GiB.
pub fn machine() -> Machine {
    Machine {
        nodes: vec![CpuNode { cpus: 4, first_apic_id: 0, memory_bytes: 16 << 30 }],
        max_clock_mhz: 3000,
        amd: true,
    }
}

pub fn model(profile: &str) -> Model {
    Model::on(Profile::load(profile).unwrap(), &machine()).unwrap()
}

pub fn pointer<T: ?Sized>(to: &mut T) -> UserPtr {
    UserPtr((to as *mut T).cast::<u8>() as u64)
}

/// A process with `/dev/kfd` open, and each GPU's render node open and taken.
pub struct Caller {
    pub model: Model,
    pub kfd: FileId,
    /// The descriptor that the process has for `/dev/kfd`.
    pub descriptor: OwnedFd,
    pub gpus: Vec<Gpu>,
}

pub struct Gpu {
    pub id: u32,
    pub file: FileId,
    pub descriptor: OwnedFd,
}

impl Caller {
    /// Opens everything, and takes the GPUs' address spaces.
    pub fn new(profile: &str) -> Self {
        Self::bound(model(profile))
    }

    /// The same of a model.
    pub fn bound(model: Model) -> Self {
        let caller = Self::on(model);
        for gpu in &caller.gpus {
            caller.acquire(gpu, &gpu.descriptor).unwrap();
        }
        caller
    }

    /// Opens everything.
    pub fn unbound(profile: &str) -> Self {
        Self::on(model(profile))
    }

    pub fn on(model: Model) -> Self {
        let opened = open(&model, "/dev/kfd");
        let minors: Vec<(u32, u32)> = model
            .topology()
            .gpu_nodes()
            .map(|node| (node.gpu_id, node.properties.drm_render_minor))
            .collect();
        let gpus = minors
            .into_iter()
            .map(|(id, minor)| {
                let (file, descriptor) = open(&model, &format!("/dev/dri/renderD{minor}"));
                Gpu { id, file, descriptor }
            })
            .collect();
        Self { model, kfd: opened.0, descriptor: opened.1, gpus }
    }

    pub fn gpu(&self) -> u32 {
        self.gpus[0].id
    }

    pub fn acquire(&self, gpu: &Gpu, descriptor: &OwnedFd) -> Result<i32> {
        let drm_fd = u32::try_from(descriptor.as_raw_fd()).unwrap();
        self.call(request::ACQUIRE_VM, &mut AcquireVmArgs { drm_fd, gpu_id: gpu.id })
    }

    /// An ioctl of `/dev/kfd`.
    pub fn call<T>(&self, request: u32, arguments: &mut T) -> Result<i32> {
        let result = self.model.ioctl(self.kfd, request, pointer(arguments));
        black_box(arguments);
        result
    }

    pub fn allocate(&self, gpu_id: u32, va_addr: u64, size: u64, flags: AllocFlags) -> Result<Buffer> {
        self.allocate_user(gpu_id, va_addr, size, flags, 0)
    }

    pub fn allocate_user(
        &self,
        gpu_id: u32,
        va_addr: u64,
        size: u64,
        flags: AllocFlags,
        user: u64,
    ) -> Result<Buffer> {
        let mut arguments =
            AllocMemoryOfGpuArgs { va_addr, size, handle: 0, mmap_offset: user, gpu_id, flags: flags.bits() };
        self.call(request::ALLOC_MEMORY_OF_GPU, &mut arguments)?;
        Ok(Buffer { handle: arguments.handle, mmap_offset: arguments.mmap_offset })
    }

    pub fn free(&self, handle: u64) -> Result<i32> {
        self.call(request::FREE_MEMORY_OF_GPU, &mut FreeMemoryOfGpuArgs { handle })
    }

    /// Maps a buffer to GPUs; the count of successes.
    pub fn map(&self, handle: u64, gpus: &[u32]) -> (Result<i32>, u32) {
        let mut gpus = gpus.to_vec();
        let mut arguments = MapMemoryToGpuArgs {
            handle,
            device_ids_array_ptr: pointer(gpus.as_mut_slice()).0,
            n_devices: u32::try_from(gpus.len()).unwrap(),
            n_success: 0,
        };
        let result = self.call(request::MAP_MEMORY_TO_GPU, &mut arguments);
        (result, arguments.n_success)
    }

    /// Unmaps a buffer from GPUs; the count of successes.
    pub fn unmap(&self, handle: u64, gpus: &[u32]) -> (Result<i32>, u32) {
        let mut gpus = gpus.to_vec();
        let mut arguments = UnmapMemoryFromGpuArgs {
            handle,
            device_ids_array_ptr: pointer(gpus.as_mut_slice()).0,
            n_devices: u32::try_from(gpus.len()).unwrap(),
            n_success: 0,
        };
        let result = self.call(request::UNMAP_MEMORY_FROM_GPU, &mut arguments);
        (result, arguments.n_success)
    }

    pub fn create_event(&self, event_type: u32, page: u64) -> Result<CreateEventArgs> {
        let mut arguments =
            CreateEventArgs { event_page_offset: page, event_type, ..CreateEventArgs::default() };
        self.call(request::CREATE_EVENT, &mut arguments)?;
        Ok(arguments)
    }

    /// `EXPORT_DMABUF`, close-on-exec.
    pub fn export(&self, handle: u64) -> Result<OwnedFd> {
        let flags = u32::try_from(libc::O_CLOEXEC).unwrap();
        let mut arguments = ExportDmabufArgs { handle, flags, ..ExportDmabufArgs::default() };
        self.call(request::EXPORT_DMABUF, &mut arguments)?;
        Ok(adopt(arguments.dmabuf_fd))
    }

    /// `IMPORT_DMABUF`; the buffer's handle.
    pub fn import(&self, gpu_id: u32, va_addr: u64, descriptor: impl Number) -> Result<u64> {
        let dmabuf_fd = descriptor.number().cast_unsigned();
        let mut arguments = ImportDmabufArgs { va_addr, handle: 0, gpu_id, dmabuf_fd };
        self.call(request::IMPORT_DMABUF, &mut arguments)?;
        Ok(arguments.handle)
    }

    /// `GET_DMABUF_INFO`, with room for `room` bytes of metadata.
    pub fn dmabuf_info(
        &self,
        descriptor: impl Number,
        metadata: &mut [u8],
    ) -> (Result<i32>, GetDmabufInfoArgs) {
        let mut arguments = GetDmabufInfoArgs {
            metadata_ptr: pointer(metadata).0,
            metadata_size: u32::try_from(metadata.len()).unwrap(),
            dmabuf_fd: descriptor.number().cast_unsigned(),
            ..GetDmabufInfoArgs::default()
        };
        (self.call(request::GET_DMABUF_INFO, &mut arguments), arguments)
    }

    /// An ioctl of an open render node.
    pub fn render<T>(&self, file: FileId, request: u32, arguments: &mut T) -> Result<i32> {
        let result = self.model.ioctl(file, request, pointer(arguments));
        black_box(arguments);
        result
    }

    pub fn available(&self) -> u64 {
        let mut arguments = GetAvailableMemoryArgs { gpu_id: self.gpu(), ..Default::default() };
        self.call(request::AVAILABLE_MEMORY, &mut arguments).unwrap();
        arguments.available
    }

    /// Reads as a GPU.
    pub fn seen(&self, gpu_id: u32, va: u64, length: usize) -> core::result::Result<Vec<u8>, Fault> {
        let mut bytes = vec![0; length];
        self.model.read_gpu(gpu_id, va, &mut bytes).map(|()| bytes)
    }

    pub fn mmap_kfd(&self, offset: u64, length: u64) -> Result<MapSource> {
        self.model.mmap(self.kfd, &shared(offset, length))
    }

    pub fn mmap_render(&self, gpu: &Gpu, offset: u64, length: u64) -> Result<MapSource> {
        self.model.mmap(gpu.file, &shared(offset, length))
    }
}

/// A descriptor as a program names it.
pub trait Number {
    fn number(&self) -> RawFd;
}

impl Number for RawFd {
    fn number(&self) -> RawFd {
        *self
    }
}

impl Number for OwnedFd {
    fn number(&self) -> RawFd {
        self.as_raw_fd()
    }
}

impl<T: Number> Number for &T {
    fn number(&self) -> RawFd {
        (*self).number()
    }
}

/// Takes over a descriptor that the model made.
#[allow(unsafe_code, reason = "an ioctl gives a descriptor as a number")]
pub fn adopt(number: u32) -> OwnedFd {
    // SAFETY: the call that just succeeded made it, and nobody else knows of it.
    unsafe { OwnedFd::from_raw_fd(i32::try_from(number).unwrap()) }
}

#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub handle: u64,
    pub mmap_offset: u64,
}

pub fn shared(offset: u64, length: u64) -> MapRequest {
    MapRequest { offset, length, protection: libc::PROT_READ | libc::PROT_WRITE, flags: libc::MAP_SHARED }
}

pub fn open(model: &Model, path: &str) -> (FileId, OwnedFd) {
    let Lookup::Found(Entry::Device { id, .. }) = model.lookup(Path::new(path)) else {
        panic!("no device at {path}")
    };
    let opened = model.open(id, libc::O_RDWR).unwrap();
    (opened.file, opened.descriptor)
}

/// Reads what a map would show.
pub fn peek(source: &MapSource, at: u64, buffer: &mut [u8]) {
    file(source).read_exact_at(buffer, source.offset + at).unwrap();
}

/// Writes as through a map.
pub fn poke(source: &MapSource, at: u64, bytes: &[u8]) {
    file(source).write_all_at(bytes, source.offset + at).unwrap();
}

fn file(source: &MapSource) -> File {
    source.file.try_clone().unwrap().into()
}
