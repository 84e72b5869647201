//! Buffer objects, as libdrm_amdgpu's callers know them: a runtime imports a dma-buf, maps parts of it at addresses of a
//! GPU, and for the CPU. ROCr's virtual memory interface and its sharing between processes consist of that.
//!
//! As in libdrm, a buffer that is imported again is the same object with one more reference; with the last one, whatever
//! it maps goes.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::{Arc, Mutex};

use kfd_abi::drm::amdgpu::{
    AMDGPU_VA_OP_CLEAR, AMDGPU_VA_OP_MAP, AMDGPU_VA_OP_REPLACE, AMDGPU_VA_OP_UNMAP, VmPageFlags,
};
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::calls::{AllocMemory, FreeMemory, MapMemory, MapRange, UnmapMemory, UnmapRange};
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferRequest, GpuId, GuestVa, Handle, MapRangeRequest, UnmapRangeRequest,
};

use crate::client::{Client, ClientError};
use crate::thunk::lock::lock;
use crate::thunk::memory::address::{Reservation, page_size};
use crate::thunk::memory::{GUEST_FLAGS, Host, Memory, Source};
use crate::thunk::refusal::Refusal;
use crate::transport::Blob;

/// Marks our handles; see [`super::device_handle`].
pub const HANDLE: u64 = 0xffff_9000_0000_0000;

/// `enum amdgpu_bo_handle_type` of amdgpu.h.
mod kind {
    pub const FLINK: i32 = 0;
    pub const KMS: i32 = 1;
    pub const DMA_BUF: i32 = 2;
    pub const KMS_NO_IMPORT: i32 = 3;
}

/// Why a call of libdrm's fails.
#[derive(Debug, thiserror::Error)]
#[error("errno {errno}: {why}")]
pub struct Failure {
    /// What the caller gets, negated.
    pub errno: i32,
    /// For the log.
    pub why: String,
}

impl Failure {
    fn new(errno: i32, why: impl Into<String>) -> Self {
        Failure { errno, why: why.into() }
    }

    /// An argument that the kernel would not take.
    pub fn invalid(why: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, why)
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::new(error.errno().unwrap_or(libc::EINVAL), error.to_string())
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::invalid(refusal.to_string())
    }
}

type Result<T> = core::result::Result<T, Failure>;

/// A part of a buffer that its GPU sees.
#[derive(Clone, Copy, Debug)]
struct Range {
    offset: u64,
    size: u64,
    /// Of guest memory: KFD's buffer over it.
    buffer: Option<Handle>,
    /// What the GPU may do with it.
    flags: VmPageFlags,
}

/// libdrm asks for all permissions whatever its caller says.
pub const ALL: VmPageFlags =
    VmPageFlags::PAGE_READABLE.union(VmPageFlags::PAGE_WRITEABLE).union(VmPageFlags::PAGE_EXECUTABLE);

/// The CPU's view of a buffer.
struct View {
    place: Reservation,
    count: u64,
}

/// A buffer object.
struct Bo {
    gpu: GpuId,
    // The view goes before what it shows.
    view: Option<View>,
    blob: Arc<dyn Blob>,
    source: Source,
    size: u64,
    references: u64,
    /// By address.
    ranges: BTreeMap<u64, Range>,
}

/// All buffer objects of a connection.
#[derive(Default)]
pub struct Bos {
    all: Mutex<BTreeMap<u64, Bo>>,
}

/// Whether a handle is one of ours.
pub fn is_bo(handle: u64) -> bool {
    handle & !u64::from(u32::MAX) == HANDLE
}

impl Bo {
    fn map(&mut self, client: &Client, va: u64, range: Range) -> Result<()> {
        let Range { offset, size, .. } = range;
        let end = offset.checked_add(size);
        if size == 0 || end.is_none_or(|end| end > self.size) {
            let why = format!("{size:#x} bytes at {offset:#x} of a buffer of {:#x}", self.size);
            return Err(Failure::invalid(why));
        }
        let buffer = match &self.source {
            Source::Guest { .. } => Some(self.map_guest(client, va, range)?),
            Source::Host { handle, .. } => self.map_host(client, *handle, va, range)?,
            Source::Own(part) => {
                let offset = offset.saturating_add(part.offset);
                self.map_host(client, part.buffer.handle, va, Range { offset, ..range })?
            }
        };
        self.ranges.insert(va, Range { buffer, ..range });
        Ok(())
    }

    fn map_host(&self, client: &Client, handle: Handle, va: u64, range: Range) -> Result<Option<Handle>> {
        let request = MapRangeRequest {
            handle,
            offset: range.offset,
            size: range.size,
            va: GuestVa(va),
            gpu_id: self.gpu,
            flags: range.flags.bits(),
        };
        client.call::<MapRange>(&request, &[], 0)?;
        Ok(None)
    }

    fn map_guest(&self, client: &Client, va: u64, range: Range) -> Result<Handle> {
        let mut flags = GUEST_FLAGS;
        flags.set(AllocFlags::WRITABLE, range.flags.contains(VmPageFlags::PAGE_WRITEABLE));
        flags.set(AllocFlags::EXECUTABLE, range.flags.contains(VmPageFlags::PAGE_EXECUTABLE));
        let request = AllocMemoryRequest {
            va: GuestVa(va),
            size: range.size,
            gpu_id: self.gpu,
            flags: flags.bits(),
            resource: self.blob.resource(),
            pad: 0,
            resource_offset: range.offset,
        };
        let mut batch = client.batch();
        let made = batch.push::<AllocMemory>(&request, &[], 0)?;
        let mapped = batch.push::<MapMemory>(&BufferRequest { handle: made.handle() }, &[self.gpu], 0)?;
        let answers = batch.run()?;
        let handle = answers.get(made)?.0.handle;
        let errno = match answers.get(mapped) {
            Ok((answer, _)) if answer.n_success == 1 => return Ok(handle),
            Ok((answer, _)) => i32::try_from(answer.errno).unwrap_or(libc::EINVAL),
            Err(error) => error.errno().unwrap_or(libc::EINVAL),
        };
        client.call::<FreeMemory>(&BufferRequest { handle }, &[], 0)?;
        Err(Failure::new(errno, "the GPU does not get the memory"))
    }

    fn unmap(&mut self, client: &Client, va: u64) -> Result<Range> {
        let missing = || Failure::new(libc::ENOENT, format!("nothing of the buffer is mapped at {va:#x}"));
        let range = *self.ranges.get(&va).ok_or_else(missing)?;
        let handle = match (&self.source, range.buffer) {
            (_, Some(handle)) => {
                let mut batch = client.batch();
                batch.push::<UnmapMemory>(&BufferRequest { handle }, &[self.gpu], 0)?;
                batch.push::<FreeMemory>(&BufferRequest { handle }, &[], 0)?;
                batch.run()?.check()?;
                self.ranges.remove(&va);
                return Ok(range);
            }
            (Source::Host { handle, .. }, None) => *handle,
            (Source::Own(part), None) => part.buffer.handle,
            (Source::Guest { .. }, None) => return Err(missing()),
        };
        let request =
            UnmapRangeRequest { handle, va: GuestVa(va), size: range.size, gpu_id: self.gpu, pad: 0 };
        client.call::<UnmapRange>(&request, &[], 0)?;
        self.ranges.remove(&va);
        Ok(range)
    }

    /// Takes away what lies in a range of addresses; of what reaches out of it, the rest stays.
    fn clear(&mut self, client: &Client, start: u64, end: u64) -> Result<()> {
        let overlap = |(va, range): (&u64, &Range)| {
            (*va < end && va.saturating_add(range.size) > start).then_some((*va, range.size))
        };
        let touched: Vec<(u64, u64)> = self.ranges.iter().filter_map(overlap).collect();
        for (va, size) in touched {
            let range = self.unmap(client, va)?;
            let last = va.saturating_add(size);
            let before = start.saturating_sub(va);
            if before > 0 {
                self.map(client, va, Range { size: before, ..range })?;
            }
            if last > end {
                let gone = end.saturating_sub(va);
                let offset = range.offset.saturating_add(gone);
                let size = last.saturating_sub(end);
                self.map(client, end, Range { offset, size, buffer: None, flags: range.flags })?;
            }
        }
        Ok(())
    }

    fn release(mut self, client: &Client) {
        let addresses: Vec<u64> = self.ranges.keys().copied().collect();
        for va in addresses {
            // What the host does not take away now it does at the end of the context.
            let _ = self.unmap(client, va);
        }
        let _ = self.source.release(client);
    }
}

impl Bos {
    /// `amdgpu_bo_import`: the handle and the size.
    pub fn import(
        &self,
        host: Host<'_>,
        memory: &Memory,
        gpu: GpuId,
        handle_kind: i32,
        dma_buf: impl FnOnce() -> Result<std::os::fd::OwnedFd>,
    ) -> Result<(u64, u64)> {
        match handle_kind {
            kind::DMA_BUF => {}
            kind::KMS | kind::KMS_NO_IMPORT => {
                return Err(Failure::new(libc::EPERM, "a handle of another file is not imported"));
            }
            // The kernel's answer on a render node.
            kind::FLINK => return Err(Failure::new(libc::EACCES, "global names need the primary node")),
            other => return Err(Failure::invalid(format!("handle type {other}"))),
        }
        let dma_buf = dma_buf()?;
        self.import_dma_buf(host, memory, gpu, std::os::fd::AsFd::as_fd(&dma_buf))
    }

    fn import_dma_buf(
        &self,
        host: Host<'_>,
        memory: &Memory,
        gpu: GpuId,
        dma_buf: BorrowedFd<'_>,
    ) -> Result<(u64, u64)> {
        let mut all = lock(&self.all);
        // drmPrimeFDToHandle does not say why: libdrm's callers get its -1.
        let refused = |refusal: Refusal| Failure::new(libc::EPERM, refusal.to_string());
        let (source, size, ..) = memory.open_dma_buf(host, dma_buf).map_err(refused)?;
        let blob = match &source {
            Source::Guest { blob, .. } | Source::Host { blob, .. } => Ok(Arc::clone(blob)),
            Source::Own(part) => part.blob(host.client),
        };
        let blob = match blob {
            Ok(blob) => blob,
            Err(refusal) => {
                source.release(host.client)?;
                return Err(refusal.into());
            }
        };
        let same = |bo: &&mut Bo| bo.gpu == gpu && same_memory(&bo.source, &source);
        if let Some((handle, bo)) =
            all.iter_mut().find_map(|(handle, bo)| Some((*handle, Some(bo).filter(same)?)))
        {
            bo.references = bo.references.saturating_add(1);
            let size = bo.size;
            source.release(host.client)?;
            return Ok((HANDLE | handle, size));
        }
        // The lowest number that is free; there are at most 2^32.
        let number = (1..=u64::from(u32::MAX)).find(|number| !all.contains_key(number));
        let number = number.ok_or_else(|| Failure::new(libc::ENOMEM, "too many buffers"))?;
        let ranges = BTreeMap::new();
        all.insert(number, Bo { gpu, view: None, blob, source, size, references: 1, ranges });
        Ok((HANDLE | number, size))
    }

    fn with<T>(&self, handle: u64, action: impl FnOnce(&mut Bo) -> Result<T>) -> Result<T> {
        let mut all = lock(&self.all);
        let bo = all.get_mut(&(handle ^ HANDLE));
        action(bo.ok_or_else(|| Failure::invalid(format!("{handle:#x} is no buffer of this process")))?)
    }

    /// `amdgpu_bo_export`: a number, or a descriptor that the caller closes.
    pub fn export(&self, handle: u64, handle_kind: i32) -> Result<u32> {
        self.with(handle, |bo| match handle_kind {
            kind::KMS | kind::KMS_NO_IMPORT => Ok(bo.blob.resource().0),
            kind::DMA_BUF => {
                let dma_buf = bo.blob.export().map_err(|error| Failure::invalid(error.to_string()))?;
                Ok(dma_buf.into_raw_fd().cast_unsigned())
            }
            kind::FLINK => Err(Failure::new(libc::EACCES, "global names need the primary node")),
            other => Err(Failure::invalid(format!("handle type {other}"))),
        })
    }

    /// The blob that shows a buffer, its size, and whether the CPU can be shown it.
    pub fn shown(&self, handle: u64) -> Result<(Arc<dyn Blob>, u64, bool)> {
        self.with(handle, |bo| {
            let visible = !matches!(&bo.source, Source::Own(part) if !part.buffer.visible);
            Ok((Arc::clone(&bo.blob), bo.size, visible))
        })
    }

    /// The host's buffer behind a buffer object, and the GPU on whose node it was opened. `None` for memory of the guest.
    pub fn host_buffer(&self, handle: u64) -> Result<Option<(Handle, GpuId)>> {
        self.with(handle, |bo| Ok(bo.source.host_buffer().map(|buffer| (buffer, bo.gpu))))
    }

    /// `amdgpu_bo_inc_ref`
    pub fn add_reference(&self, handle: u64) -> Result<()> {
        self.with(handle, |bo| {
            bo.references = bo.references.saturating_add(1);
            Ok(())
        })
    }

    /// `amdgpu_bo_free`
    pub fn free(&self, client: &Client, handle: u64) -> Result<()> {
        let mut all = lock(&self.all);
        let number = handle ^ HANDLE;
        let unknown = || Failure::invalid(format!("{handle:#x} is no buffer of this process"));
        let bo = all.get_mut(&number).ok_or_else(unknown)?;
        bo.references = bo.references.saturating_sub(1);
        if bo.references == 0
            && let Some(bo) = all.remove(&number)
        {
            bo.release(client);
        }
        Ok(())
    }

    /// `amdgpu_bo_va_op`: all sizes are whole pages to it, and all that is mapped may be read, written and executed.
    pub fn va_op(
        &self,
        client: &Client,
        handle: u64,
        offset: u64,
        size: u64,
        va: u64,
        op: u32,
    ) -> Result<()> {
        self.change(client, handle, offset, size, (va, ALL), op)
    }

    /// The same with permissions of the caller's.
    pub fn change(
        &self,
        client: &Client,
        handle: u64,
        offset: u64,
        size: u64,
        (va, flags): (u64, VmPageFlags),
        op: u32,
    ) -> Result<()> {
        let too_large = || Failure::invalid(format!("{size:#x} bytes"));
        let size = size.checked_next_multiple_of(page_size()).ok_or_else(too_large)?;
        let range = Range { offset, size, buffer: None, flags };
        let end = va.checked_add(size).ok_or_else(too_large)?;
        match op {
            AMDGPU_VA_OP_MAP => self.with(handle, |bo| bo.map(client, va, range)),
            // The kernel looks at the address only.
            AMDGPU_VA_OP_UNMAP => self.with(handle, |bo| bo.unmap(client, va).map(|_| ())),
            AMDGPU_VA_OP_CLEAR | AMDGPU_VA_OP_REPLACE => {
                self.clear(client, self.with(handle, |bo| Ok(bo.gpu))?, va, end)?;
                match op {
                    AMDGPU_VA_OP_REPLACE => self.with(handle, |bo| bo.map(client, va, range)),
                    _ => Ok(()),
                }
            }
            other => Err(Failure::invalid(format!("operation {other}"))),
        }
    }

    /// Takes away what a GPU sees in a range of addresses.
    pub fn clear(&self, client: &Client, gpu: GpuId, va: u64, end: u64) -> Result<()> {
        lock(&self.all).values_mut().filter(|bo| bo.gpu == gpu).try_for_each(|bo| bo.clear(client, va, end))
    }

    /// `amdgpu_bo_cpu_map`: the address, the same one each time.
    pub fn cpu_map(&self, host: Host<'_>, handle: u64) -> Result<u64> {
        self.with(handle, |bo| {
            if let Some(view) = &mut bo.view {
                view.count = view.count.saturating_add(1);
                return Ok(view.place.start());
            }
            let anywhere = (0, u64::MAX);
            // Where GPUs reach, for ROCr uses the address for them, too.
            let range = host.snapshot.svm.unwrap_or(anywhere);
            let no_memory = |error: std::io::Error| Failure::new(libc::ENOMEM, error.to_string());
            let place = Reservation::new(bo.size, page_size(), 0, range).map_err(no_memory)?;
            let start = place.start();
            bo.blob
                .map_fixed(GuestVa(start), bo.size, libc::PROT_READ | libc::PROT_WRITE)
                .map_err(|error| Failure::invalid(error.to_string()))?;
            place.keep_from_children();
            bo.view = Some(View { place, count: 1 });
            Ok(start)
        })
    }

    /// `amdgpu_bo_cpu_unmap`
    pub fn cpu_unmap(&self, handle: u64) -> Result<()> {
        self.with(handle, |bo| {
            let view = bo.view.as_mut().ok_or_else(|| Failure::invalid("the buffer is not mapped"))?;
            view.count = view.count.saturating_sub(1);
            if view.count == 0 {
                bo.view = None;
            }
            Ok(())
        })
    }

    /// Where `mmap` of the device's file shows the buffer that has this number ([`Bos::export`]).
    pub fn mmap_offset(&self, number: u32) -> Result<u64> {
        let all = lock(&self.all);
        let bo = all.values().find(|bo| bo.blob.resource().0 == number);
        let bo =
            bo.ok_or_else(|| Failure::new(libc::ENOENT, format!("no buffer has the handle {number}")))?;
        bo.blob.mmap_offset().map_err(|error| Failure::invalid(error.to_string()))
    }

    /// Frees all, for a close.
    pub fn release_all(&self, client: &Client) {
        let all = std::mem::take(&mut *lock(&self.all));
        all.into_values().for_each(|bo| bo.release(client));
    }
}

/// Whether two imports are of the same buffer.
fn same_memory(one: &Source, other: &Source) -> bool {
    match (one, other) {
        (Source::Own(one), Source::Own(other)) => {
            let same = (one.offset, one.size) == (other.offset, other.size);
            same && Arc::ptr_eq(&one.buffer, &other.buffer)
        }
        (
            Source::Guest { blob: one, .. } | Source::Host { blob: one, .. },
            Source::Guest { blob: other, .. } | Source::Host { blob: other, .. },
        ) => one.resource() == other.resource(),
        _ => false,
    }
}
