//! Memory that other processes, or this one, gave out: dma-bufs and shared handles.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use hsakmt_abi::memory::{HsaMemFlags, HsaSharedMemoryHandle};
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::calls::{FreeMemory, ImportMemory, ResourceInfo};
use virtio_kfd_protocol::{
    BufferRequest, Features, GpuId, GuestVa, Handle, ImportMemoryRequest, ResourceInfoAnswer, ResourceRequest,
};

use super::address::{Reservation, page_size};
use super::buffer::Part;
use super::export::SharedHandle;
use super::{ANYWHERE, Allocation, Backing, Host, Memory, Place, Request, State, reserve};
use crate::client::Client;

use crate::thunk::refusal::{Outcome, Refusal};
use crate::transport::Blob;

/// Alignment of an imported graphics buffer's address (`IMAGE_ALIGN` in fmm.c).
const IMAGE_ALIGN: u64 = 256 << 10;

/// Bytes of metadata that AMD's library has room for at least (`GRAPHICS_METADATA_DEFAULT_SIZE`).
const METADATA: usize = 64;

/// How it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// As a dma-buf.
    Graphics,
    /// By a shared handle.
    Shared,
}

/// Where it comes from.
pub enum Source {
    /// Guest memory of a process of this guest.
    Guest {
        /// What shows it.
        blob: Arc<dyn Blob>,
        /// The GPU in whose name KFD gets it.
        gpu: GpuId,
    },
    /// Memory of the host, of another process.
    Host {
        /// What shows it, and keeps it there.
        blob: Arc<dyn Blob>,
        /// KFD's buffer over it.
        handle: Handle,
    },
    /// A buffer of this process.
    Own(Part),
}

impl Source {
    /// The host's buffer that has the memory, whole or as a part. `None` for memory of the guest.
    pub fn host_buffer(&self) -> Option<Handle> {
        match self {
            Self::Guest { .. } => None,
            Self::Host { handle, .. } => Some(*handle),
            Self::Own(part) => Some(part.buffer.handle),
        }
    }
}

/// Imported memory.
pub(super) struct Imported {
    pub(super) kind: Kind,
    pub(super) source: Source,
    /// Of a graphics buffer, for the caller to read. Hosts tell of none.
    metadata: Box<[u8; METADATA]>,
}

impl Source {
    /// Gives the host's part back; what it shows is to be kept until then.
    pub fn release(&self, client: &Client) -> Outcome<()> {
        match self {
            Source::Guest { .. } => {}
            Source::Host { handle, .. } => {
                client.call::<FreeMemory>(&BufferRequest { handle: *handle }, &[], 0)?;
            }
            Source::Own(part) => part.buffer.release(client)?,
        }
        Ok(())
    }
}

/// KFD's flags for imported guest memory, as the kernel's for an imported buffer (`import_obj_create`).
pub const GUEST_FLAGS: AllocFlags =
    AllocFlags::USERPTR.union(AllocFlags::WRITABLE).union(AllocFlags::EXECUTABLE);

/// An imported graphics buffer.
#[derive(Clone, Copy, Debug)]
pub struct Graphics {
    /// Its address, or the number that stands for it.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Address of its metadata.
    pub metadata: u64,
    /// Node of the GPU.
    pub node: u32,
}

impl Memory {
    /// What is behind a dma-buf, its size, its GPU and KFD's flags of it. The caller releases it.
    pub fn open_dma_buf(
        &self,
        host: Host<'_>,
        dma_buf: BorrowedFd<'_>,
    ) -> Outcome<(Source, u64, GpuId, AllocFlags)> {
        let blob: Arc<dyn Blob> = Arc::from(host.client.import(dma_buf)?);
        if let Some(part) = self.own_part(&*blob) {
            let (size, gpu) = (part.size, part.buffer.gpu);
            let public = if part.buffer.public { AllocFlags::PUBLIC } else { AllocFlags::empty() };
            return Ok((Source::Own(part), size, gpu, AllocFlags::VRAM | public));
        }
        let info = resource_info(host.client, &*blob)?;
        let first = host.snapshot.gpus.first().map(|gpu| gpu.gpu_id);
        match info.kind {
            ResourceInfoAnswer::GUEST => {
                let gpu = first.ok_or_else(|| Refusal::error("there is no GPU"))?;
                Ok((Source::Guest { blob, gpu }, info.size, gpu, AllocFlags::GTT))
            }
            ResourceInfoAnswer::HOST => {
                host.snapshot.node_of(info.gpu_id)?;
                let (source, size) = import(host.client, blob, info.gpu_id)?;
                Ok((source, size, info.gpu_id, AllocFlags::from_bits_retain(info.flags)))
            }
            other => Err(Refusal::error(format!("the host's memory is of kind {other}"))),
        }
    }

    /// `hsaKmtRegisterGraphicsHandleToNodes`: for these GPUs at an address, or without one where there is no list.
    pub fn import_graphics(
        &self,
        host: Host<'_>,
        dma_buf: BorrowedFd<'_>,
        gpus: Option<&[GpuId]>,
    ) -> Outcome<Graphics> {
        let (source, size, gpu, ioc) = self.open_dma_buf(host, dma_buf)?;
        let placed = || {
            let place = match gpus {
                None => Place::Fake(self.fake_addresses(size, IMAGE_ALIGN)?),
                Some(_) => {
                    let range = host.snapshot.svm.unwrap_or(ANYWHERE);
                    let guard = host.settings.guard_pages.saturating_mul(page_size());
                    let reserved = Reservation::new(size, IMAGE_ALIGN, guard, range);
                    Place::Reserved(reserved.map_err(|error| Refusal::error(error.to_string()))?)
                }
            };
            Ok((place, host.snapshot.node_of(gpu)?))
        };
        let imported = Imported { kind: Kind::Graphics, source, metadata: Box::new([0; METADATA]) };
        let (place, node) = match placed() {
            Ok(placed) => placed,
            Err(refusal) => {
                imported.source.release(host.client)?;
                return Err(refusal);
            }
        };
        let metadata = u64::try_from(imported.metadata.as_ptr().addr()).unwrap_or(0);
        let address = self.insert_imported(place, imported, node, hsa_flags(ioc), gpus.unwrap_or(&[]));
        Ok(Graphics { address, size, metadata, node })
    }

    /// `hsaKmtRegisterSharedHandleToNodes`: address and size.
    pub fn import_shared(
        &self,
        host: Host<'_>,
        handle: HsaSharedMemoryHandle,
        gpus: &[GpuId],
    ) -> Outcome<(u64, u64)> {
        let unknown = || Refusal::error("SharedMemoryHandle is no handle of this guest's");
        let SharedHandle { token, flags, pages, gpu } = SharedHandle::read(handle).ok_or_else(unknown)?;
        if self.is_own_token(token) {
            return Err(Refusal::error("SharedMemoryHandle is this process's own"));
        }
        let node = host.snapshot.node_of(gpu).map_err(|_| unknown())?;
        let size = u64::from(pages).saturating_mul(page_size());
        let flags = HsaMemFlags(flags);
        let visible =
            flags.is_set(HsaMemFlags::HOST_ACCESS) && host.client.features().contains(Features::HOST_BLOBS);
        let blob: Arc<dyn Blob> = Arc::from(host.client.host_blob(token.0, size, visible)?);
        // Linux does not look at the device's answer to the blob's creation; here it is seen.
        let info = resource_info(host.client, &*blob)?;
        if info.kind != ResourceInfoAnswer::HOST || info.size != size || info.gpu_id != gpu {
            return Err(unknown());
        }
        let request = Request { node, size, alignment: 0, flags, address: 0 };
        let reservation = reserve(host, size, request)?;
        if visible {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            blob.map_fixed(GuestVa(reservation.start()), size, protection)
                .map_err(|error| Refusal::error(error.to_string()))?;
            reservation.keep_from_children();
        }
        let (source, _) = import(host.client, blob, gpu)?;
        let imported = Imported { kind: Kind::Shared, source, metadata: Box::new([0; METADATA]) };
        Ok((self.insert_imported(Place::Reserved(reservation), imported, node, flags, gpus), size))
    }

    fn insert_imported(
        &self,
        place: Place,
        imported: Imported,
        node: u32,
        flags: HsaMemFlags,
        gpus: &[GpuId],
    ) -> u64 {
        let mut state = State::default();
        state.register(gpus);
        let backing = Backing::Imported(imported);
        self.insert(Allocation { place, backing, node, flags, state: Mutex::new(state) })
    }
}

fn resource_info(client: &Client, blob: &dyn Blob) -> Outcome<ResourceInfoAnswer> {
    let request = ResourceRequest { resource: blob.resource(), pad: 0 };
    Ok(client.call::<ResourceInfo>(&request, &[], 0)?.0)
}

/// A buffer of KFD, without an address, over the host memory behind a blob.
fn import(client: &Client, blob: Arc<dyn Blob>, gpu: GpuId) -> Outcome<(Source, u64)> {
    let request = ImportMemoryRequest { resource: blob.resource(), gpu_id: gpu, va: GuestVa(0) };
    let (answer, _) = client.call::<ImportMemory>(&request, &[], 0)?;
    Ok((Source::Host { blob, handle: answer.handle }, answer.size))
}

/// As AMD's library tells of an imported buffer (`fmm_translate_ioc_to_hsa_flags`).
fn hsa_flags(ioc: AllocFlags) -> HsaMemFlags {
    let bit = |flag: bool| u32::from(flag);
    HsaMemFlags(0)
        .with(HsaMemFlags::READ_ONLY, bit(!ioc.contains(AllocFlags::WRITABLE)))
        .with(HsaMemFlags::COARSE_GRAIN, 1)
        .with(HsaMemFlags::EXTENDED_COHERENT, bit(ioc.contains(AllocFlags::EXT_COHERENT)))
        .with(HsaMemFlags::HOST_ACCESS, bit(ioc.contains(AllocFlags::PUBLIC)))
}
