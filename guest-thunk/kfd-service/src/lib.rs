//! The host's KFD as a service of one guest process.
//!
//! Runtimes that carry AMD's thunk inside reach the host here: the front end of `kfd-seam` takes their calls on `/dev/kfd`, the
//! render nodes and the topology files, and [`GuestKfd`] answers them over guest-thunk's client. The wire's calls
//! are what the ioctls mean, so most go over one to one. What does not:
//!
//! | call | here |
//! |---|---|
//! | ALLOC_MEMORY_OF_GPU of GTT | a GUEST blob, which the host's KFD gets as a user pointer at the same address |
//! | the buffer that CREATE_EVENT makes the event page | replaced by the host's own memory, which KFD insists on; the CPU never looks at it |
//! | ALLOC_MEMORY_OF_GPU of VRAM | a buffer of the host; a HOST3D blob when the CPU maps it, see [`shown`] |
//! | ALLOC_MEMORY_OF_GPU with a user pointer | see [`fresh`] |
//! | doorbells | guest memory that stands for them (`DoorbellPage`), which traps while they are still, see [`doorbells`] |
//! | SMI_EVENTS | an end of a pair of sockets, see [`guest_thunk::thunk::smi`] |
//! | MMIO_REMAP, SVM, the debugger | refused as by a kernel that has none |
//! | GET_CLOCK_COUNTERS | the CPU's clocks are the guest's |

mod buffers;
mod connect;
mod dma_buf;
mod doorbells;
mod event_page;
mod failure;
mod files;
pub mod fresh;
mod gem;
mod kfd;
mod render;
mod shown;
mod topology;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use guest_thunk::client::{Client, ConnectError};
use guest_thunk::thunk::lock::lock;
use guest_thunk::thunk::memory::{Host, Memory};
use guest_thunk::thunk::render::bo::Bos;
use guest_thunk::thunk::settings::Settings;
use guest_thunk::thunk::smi::Smi;
use guest_thunk::thunk::topology::Snapshot;
use kfd_abi::mmap::{self, MmapType};
use kfd_seam::tree::Tree;
use kfd_seam::{
    DeviceId, Entry, FileId, KfdService, Lookup, MapRequest, MapSource, Opened, Result, UserPtr, sysfs,
};
use nix::errno::Errno;

use self::buffers::Buffers;
use self::doorbells::Doorbells;
use self::event_page::EventPage;
use self::files::Files;
use self::gem::Objects;
use self::kfd::Queues;
use self::topology::{Gpu, TopologyError};

pub use self::connect::StartError;

/// The host's KFD, for the process that it lives in.
pub struct GuestKfd {
    // The client is last, so that the host is there for as long as anything is its.
    smi: Smi,
    objects: Objects,
    bos: Bos,
    buffers: Buffers,
    /// Only what dma-bufs need of it.
    memory: Memory,
    snapshot: Snapshot,
    settings: Settings,
    doorbells: Arc<Doorbells>,
    queues: Queues,
    event_page: EventPage,
    files: Mutex<Files>,
    tree: Tree,
    gpus: Vec<Gpu>,
    client: Arc<Client>,
}

/// What an open file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenFile {
    Kfd,
    /// The render node of the GPU with this index.
    Render(usize),
}

/// The device of `/dev/kfd`. The render nodes' follow.
const KFD_DEVICE: DeviceId = DeviceId(0);

impl GuestKfd {
    /// The connection, as guest-thunk's memory wants it.
    fn host(&self) -> Host<'_> {
        Host { client: &self.client, snapshot: &self.snapshot, settings: &self.settings }
    }

    fn file(&self, file: FileId) -> Result<OpenFile> {
        lock(&self.files).get(file).ok_or(Errno::EBADF)
    }

    /// Whether an offset of `/dev/kfd` names a GPU that there is. It has 16 bits of the id.
    fn has_gpu(&self, offset: u64) -> bool {
        self.gpus.iter().any(|gpu| gpu.gpu_id.0 & 0xffff == mmap::gpu_id(offset))
    }

    /// The GPU with KFD's id.
    fn gpu(&self, gpu_id: u32) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.gpu_id.0 == gpu_id)
    }
}

impl KfdService for GuestKfd {
    fn lookup(&self, path: &Path) -> Lookup {
        if path == Path::new("/proc/modules") {
            return Lookup::Found(Entry::File(sysfs::modules(std::fs::read(path).unwrap_or_default())));
        }
        self.tree.lookup(path)
    }

    fn open(&self, device: DeviceId, _flags: i32) -> Result<Opened> {
        let what = match device {
            KFD_DEVICE => OpenFile::Kfd,
            DeviceId(number) => {
                let index = number.checked_sub(1).and_then(|index| usize::try_from(index).ok());
                let index = index.filter(|index| *index < self.gpus.len());
                OpenFile::Render(index.ok_or(Errno::ENXIO)?)
            }
        };
        let (file, descriptor) = lock(&self.files).open(what)?;
        Ok(Opened { file, descriptor })
    }

    fn ioctl(&self, file: FileId, request: u32, argument: UserPtr) -> Result<i32> {
        match self.file(file)? {
            OpenFile::Kfd => kfd::ioctl(self, request, argument),
            OpenFile::Render(index) => {
                let gpu = self.gpus.get(index).ok_or(Errno::ENODEV)?;
                render::ioctl(self, gpu, request, argument)
            }
        }
    }

    fn map(&self, file: FileId, request: &MapRequest, address: u64) -> Result<Option<u64>> {
        match self.file(file)? {
            OpenFile::Kfd => match MmapType::of(request.offset) {
                MmapType::Doorbell if !self.has_gpu(request.offset) => Err(Errno::ENODEV),
                MmapType::Doorbell => self.doorbells.map(request, address).map(Some),
                MmapType::Events => Ok(None),
                // Memory that only the host's process can map.
                MmapType::Mmio | MmapType::ReservedMem if !self.has_gpu(request.offset) => Err(Errno::ENODEV),
                MmapType::Mmio | MmapType::ReservedMem => Err(Errno::EINVAL),
            },
            OpenFile::Render(_) => self.buffers.map(&self.client, request, address).map(Some),
        }
    }

    /// What [`map`](Self::map) has left: the page of events.
    fn mmap(&self, _file: FileId, request: &MapRequest) -> Result<MapSource> {
        self.event_page.show(request)
    }

    fn release(&self, file: FileId) {
        lock(&self.files).close(file);
    }

    fn forked(&self) {
        self.client.abandon();
        fresh::forget();
    }
}
