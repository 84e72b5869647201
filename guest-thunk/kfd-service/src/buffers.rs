//! Buffers, and what the CPU sees of them through the render node.
#![allow(unsafe_code, reason = "addresses for mappings")]

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use guest_thunk::client::Client;
use guest_thunk::thunk::lock::lock;
use guest_thunk::thunk::memory::Source;
use guest_thunk::thunk::memory::buffer::Part;
use guest_thunk::transport::Blob;
use kfd_abi::memory::AllocFlags;
use kfd_seam::{MapRequest, Result};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use virtio_kfd_protocol::{GpuId, GuestVa, Handle};

use crate::failure::transport;

/// Smallest page of x86-64.
pub const PAGE: u64 = 4096;

/// The first offset that DRM gives out (`DRM_FILE_PAGE_OFFSET_START`).
const FIRST_OFFSET: u64 = 1 << 32;

/// Where the memory is.
pub enum Memory {
    /// Memory of the guest.
    Guest(Arc<dyn Blob>),
    /// Memory of a GPU.
    Vram(Part),
    /// Memory of a GPU that came as a dma-buf. GPUs see it part by part.
    Imported(Source),
    /// Doorbells.
    Doorbells,
}

/// What changes in a buffer.
pub struct State {
    /// The host's number for it.
    pub host: Handle,
    /// GPUs that have it mapped.
    pub mapped: Vec<GpuId>,
    /// It is the event page, which is the host's own memory.
    pub event_page: bool,
}

/// A buffer.
pub struct Buffer {
    /// The GPU that it was made for.
    pub gpu: GpuId,
    /// Its address on GPUs.
    pub va: u64,
    /// Bytes of addresses.
    pub size: u64,
    /// How it was asked for.
    pub flags: AllocFlags,
    /// Where `mmap` on the render node shows it; 0 for nowhere.
    pub offset: u64,
    /// What it is.
    pub memory: Memory,
    /// A dma-buf of it was made.
    pub exported: AtomicBool,
    /// What changes.
    pub state: Mutex<State>,
}

impl Buffer {
    /// Whether there is, or was, a dma-buf of it.
    pub fn is_exported(&self) -> bool {
        self.exported.load(Ordering::Relaxed)
    }
}

/// What an offset of a render node shows.
#[derive(Clone)]
enum Shown {
    Buffer(Arc<Buffer>),
    /// A buffer object of libdrm's, and its size.
    Object(Arc<dyn Blob>, u64),
}

#[derive(Default)]
struct Table {
    /// By the handle that the program has.
    all: BTreeMap<u64, Arc<Buffer>>,
    /// By offset.
    shown: BTreeMap<u64, Shown>,
    next: u64,
    /// Imports that there have been.
    imported: u32,
}

/// All buffers of the process.
#[derive(Default)]
pub struct Buffers {
    table: Mutex<Table>,
    /// What the CPU has of VRAM.
    vram: Arc<crate::shown::Shown>,
}

impl Buffers {
    /// An offset that nothing else of this size has.
    pub fn take_offset(&self, size: u64) -> Result<u64> {
        let mut table = lock(&self.table);
        let offset = table.next.max(FIRST_OFFSET);
        table.next = offset.checked_add(size).ok_or(Errno::ENOMEM)?;
        Ok(offset)
    }

    /// Writes one down by the host's number, which the program gets as its handle.
    pub fn insert(&self, buffer: Buffer) -> u64 {
        let handle = lock(&buffer.state).host.0;
        let buffer = Arc::new(buffer);
        let mut table = lock(&self.table);
        if buffer.offset != 0 {
            table.shown.insert(buffer.offset, Shown::Buffer(Arc::clone(&buffer)));
        }
        table.all.insert(handle, buffer);
        handle
    }

    /// Writes one down that another one's memory is behind: the handle is this table's own.
    pub fn insert_imported(&self, buffer: Buffer) -> Result<u64> {
        let mut table = lock(&self.table);
        let number = table.imported.checked_add(1).ok_or(Errno::ENOMEM)?;
        table.imported = number;
        // The host's generations are not 0.
        let handle = Handle::new(number, 0).0;
        table.all.insert(handle, Arc::new(buffer));
        Ok(handle)
    }

    /// The buffer of a handle.
    pub fn find(&self, handle: u64) -> Result<Arc<Buffer>> {
        lock(&self.table).all.get(&handle).cloned().ok_or(Errno::EINVAL)
    }

    /// Forgets one that is freed.
    pub fn remove(&self, handle: u64) {
        let mut table = lock(&self.table);
        let Some(buffer) = table.all.remove(&handle) else { return };
        table.shown.remove(&buffer.offset);
        drop(table);
        self.vram.forget(&buffer);
    }

    /// Gives a buffer object an offset.
    pub fn show(&self, blob: Arc<dyn Blob>, size: u64) -> Result<u64> {
        let offset = self.take_offset(size)?;
        lock(&self.table).shown.insert(offset, Shown::Object(blob, size));
        Ok(offset)
    }

    /// Takes it back.
    pub fn hide(&self, offset: u64) {
        lock(&self.table).shown.remove(&offset);
    }

    /// Serves an `mmap` of a render node.
    pub fn map(&self, client: &Arc<Client>, request: &MapRequest, address: u64) -> Result<u64> {
        let shown = lock(&self.table).shown.get(&request.offset).cloned().ok_or(Errno::EINVAL)?;
        let size = match &shown {
            Shown::Buffer(buffer) => buffer.size,
            Shown::Object(_, size) => *size,
        };
        let length = request.length.checked_next_multiple_of(PAGE).filter(|length| *length > 0);
        let length = length.filter(|length| *length <= size).ok_or(Errno::EINVAL)?;
        // The thunk keeps addresses so that the CPU shall not use. It takes no place in the window.
        if request.protection == libc::PROT_NONE {
            return place(request, address, length, |at| map_nothing(at, length, libc::PROT_NONE));
        }
        // TTM has no private mappings.
        if request.flags & libc::MAP_SHARED == 0 {
            return Err(Errno::EINVAL);
        }
        let blob = match &shown {
            Shown::Object(blob, _) => Arc::clone(blob),
            Shown::Buffer(buffer) => match &buffer.memory {
                Memory::Guest(blob) => Arc::clone(blob),
                Memory::Vram(part) if !part.buffer.visible => return Err(Errno::EPERM),
                Memory::Vram(_) => {
                    return place(request, address, length, |at| {
                        self.vram.map(client, buffer, (at, length), request.protection)
                    });
                }
                Memory::Imported(_) | Memory::Doorbells => return Err(Errno::EINVAL),
            },
        };
        map_blob(&*blob, request, address, length)
    }
}

/// Maps what has no content, over a range that was taken: who accesses it, or makes it accessible later, gets a bus error there, and
/// not memory that no GPU sees.
pub fn map_nothing(at: u64, length: u64, protection: i32) -> Result<()> {
    let nothing = memfd_create(c"virtio-kfd", MFdFlags::MFD_CLOEXEC)?;
    let (Ok(at), Ok(length)) = (usize::try_from(at), usize::try_from(length)) else {
        return Err(Errno::ENOMEM);
    };
    let (place, flags) = (std::ptr::with_exposed_provenance_mut(at), libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: the caller has taken the range for this call.
    let got = unsafe { libc::mmap(place, length, protection, flags, nothing.as_raw_fd(), 0) };
    if got == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(()) }
}

/// Maps a blob where the program wants it.
pub fn map_blob(blob: &dyn Blob, request: &MapRequest, address: u64, length: u64) -> Result<u64> {
    place(request, address, length, |at| {
        blob.map_fixed(GuestVa(at), length, request.protection).map_err(transport)
    })
}

/// Takes the addresses as `mmap` does, inaccessible at first, and fills them. After an error they are free again, but for those
/// that MAP_FIXED named.
fn place(
    request: &MapRequest,
    address: u64,
    length: u64,
    fill: impl FnOnce(u64) -> Result<()>,
) -> Result<u64> {
    let (Ok(hint), Ok(bytes)) = (usize::try_from(address), usize::try_from(length)) else {
        return Err(Errno::ENOMEM);
    };
    let asked = request.flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE);
    let flags = asked | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: what is mapped over is what the program named in its own mmap call; without MAP_FIXED nothing is.
    let got = unsafe {
        libc::mmap(std::ptr::with_exposed_provenance_mut(hint), bytes, libc::PROT_NONE, flags, -1, 0)
    };
    if got == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    let at = u64::try_from(got.expose_provenance()).map_err(|_| Errno::ENOMEM)?;
    match fill(at) {
        Ok(()) => Ok(at),
        Err(error) => {
            if asked == 0 {
                // SAFETY: the range was made above, and the program has not been told of it.
                let _ = unsafe { libc::munmap(got, bytes) };
            }
            Err(error)
        }
    }
}
