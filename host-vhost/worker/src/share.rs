//! Memory that several contexts of the VM use: what this one gives to others, and what it takes from them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kfd_abi::memory::AllocFlags;
use kfd_abi::version::minor;
use kfd_host::DmabufInfo;
use kfd_ipc::worker::{Caching, ExportedMemory, SharedPiece};
use nix::errno::Errno;
use virtio_kfd_protocol::limits::MAX_SHARES;
use virtio_kfd_protocol::{
    GpuId, Handle, ImportMemoryRequest, ResourceId, ResourceInfoAnswer, ShareMemoryRequest, ShareToken,
    Status,
};

use crate::blob::PAGE;
use crate::buffer::{Backing, Buffer, Share};
use crate::context::Context;
use crate::failure::Failure;
use crate::memory::Memory;

/// Most HOST3D blobs that this context may use (the device has a lower bound for the VM).
const MAX_HOST_BLOBS: usize = 4096;

/// What a HOST3D blob shows.
#[derive(Debug)]
pub enum HostBlob {
    /// A buffer of this context from its start on, which may be freed by now.
    Own {
        /// The buffer.
        handle: Handle,
        /// Bytes of the blob.
        size: u64,
    },
    /// A piece of a buffer of another context.
    Foreign {
        /// The whole buffer, where the other side's kernel could export it.
        dmabuf: Option<Arc<OwnedFd>>,
        /// Where the piece begins, in bytes.
        offset: u64,
        /// Bytes of the piece.
        size: u64,
    },
}

/// A dma-buf that is made for one use, or held for many.
pub enum Dmabuf {
    /// For one use.
    New(OwnedFd),
    /// For many.
    Held(Arc<OwnedFd>),
}

impl Dmabuf {
    /// The descriptor.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Dmabuf::New(file) => file.as_fd(),
            Dmabuf::Held(file) => file.as_fd(),
        }
    }

    /// The descriptor, to be held.
    fn hold(self) -> Arc<OwnedFd> {
        match self {
            Dmabuf::New(file) => Arc::new(file),
            Dmabuf::Held(file) => file,
        }
    }
}

/// Whether a buffer may be given to other contexts. Memory of another context counts where it was allocated, for as long as what
/// that context has given out is used, so that it is not passed on from here; who has it by a blob or a token passes on
/// those. GTT, which is the host's own memory, ends with its context.
fn check_own(buffer: &Buffer) -> Result<(), Failure> {
    let refuse = |reason: &str| Err(Failure::new(Status::NOT_SUPPORTED, reason));
    match buffer.backing {
        Backing::Imported { .. } | Backing::Piece { .. } => {
            refuse("the memory is another context's to share")
        }
        Backing::Gtt { .. } => refuse("memory of the host is for its context alone"),
        Backing::Doorbells => refuse("doorbells are their context's alone"),
        Backing::Registers { .. } => refuse("registers are their context's alone"),
        Backing::Vram { .. } | Backing::Guest { .. } => Ok(()),
    }
}

impl Context {
    /// The whole memory of a buffer as a dma-buf.
    pub fn dmabuf(&self, buffer: &Buffer) -> Result<Dmabuf, Failure> {
        let refuse = |reason: String| Err(Failure::new(Status::NOT_SUPPORTED, reason));
        match (&buffer.backing, buffer.kfd) {
            (Backing::Piece { dmabuf, .. }, _) => Ok(Dmabuf::Held(dmabuf.clone())),
            // amdgpu_gem_prime_export refuses them.
            (Backing::Guest { .. }, _) => refuse("guest memory is no dma-buf on the host".to_owned()),
            (Backing::Doorbells, _) => refuse("doorbells are no dma-buf".to_owned()),
            (Backing::Registers { .. }, _) => refuse("registers are no dma-buf".to_owned()),
            _ if self.version.minor < minor::EXPORT_DMABUF => refuse(format!(
                "KFD 1.{} exports no dma-bufs, 1.{} is needed",
                self.version.minor,
                minor::EXPORT_DMABUF
            )),
            (_, Some(kfd)) => Ok(Dmabuf::New(self.kfd.export_dmabuf(kfd)?)),
            (_, None) => refuse("the buffer is not one of KFD's".to_owned()),
        }
    }

    /// Where a CPU finds `size` bytes of a buffer from `offset` on, in the file of the render node of its GPU.
    fn shown(&self, buffer: &Buffer, offset: u64, size: u64) -> Option<(BorrowedFd<'_>, ExportedMemory)> {
        let gpu = self.gpu(buffer.gpu_id).ok()?;
        // amdgpu maps VRAM write-combined and GTT cached (ttm caching of amdgpu_ttm_tt_create).
        let vram = matches!(buffer.backing, Backing::Vram { .. });
        let caching = if vram { Caching::WriteCombining } else { Caching::Cached };
        let offset = buffer.mmap_offset()?.checked_add(offset)?;
        Some((gpu.render.as_fd(), ExportedMemory { offset, size, caching }))
    }
}

/// What the device gets to map a buffer into the guest, and to give it to other contexts.
pub struct Exported<'c> {
    /// What it is.
    pub piece: SharedPiece,
    /// The file in which a CPU sees it: the one whose address space this context acquired, so that the kernel lets whoever
    /// holds it map the buffers of this context and no others.
    pub file: Option<BorrowedFd<'c>>,
    /// The buffer for other contexts, where the kernel can.
    pub dmabuf: Option<Dmabuf>,
}

impl Memory {
    /// The memory of a buffer for a HOST3D blob of `size` bytes.
    pub fn export<'c>(
        &mut self,
        context: &'c Context,
        resource: u32,
        handle: Handle,
        size: u64,
    ) -> Result<Exported<'c>, Errno> {
        let buffer = self.buffers.get_mut(handle).ok_or(Errno::EINVAL)?;
        if size == 0 || size > buffer.size || !size.is_multiple_of(PAGE) {
            return Err(Errno::EINVAL);
        }
        if self.host_blobs.len() >= MAX_HOST_BLOBS || self.host_blobs.contains_key(&resource) {
            return Err(Errno::ENOSPC);
        }
        let shown = context.shown(buffer, 0, size);
        let dmabuf = match check_own(buffer).and_then(|()| context.dmabuf(buffer)) {
            Ok(dmabuf) => Some(dmabuf),
            Err(failure) => {
                tracing::debug!("resource {resource} is for this context alone: {failure}");
                None
            }
        };
        if shown.is_none() && dmabuf.is_none() {
            return Err(Errno::EPERM);
        }
        let (vram, memory) = (vram_of(buffer), shown.map(|(_, memory)| memory));
        let piece = SharedPiece { offset: 0, size, handle: handle.0, vram, memory };
        buffer.uses = buffer.uses.saturating_add(1);
        self.host_blobs.insert(resource, HostBlob::Own { handle, size });
        Ok(Exported { piece, file: shown.map(|(file, _)| file), dmabuf })
    }

    /// A blob over memory of another context.
    pub fn attach_shared(
        &mut self,
        resource: u32,
        offset: u64,
        size: u64,
        dmabuf: Option<OwnedFd>,
    ) -> Result<(), String> {
        let known = self.host_blobs.contains_key(&resource);
        if known || self.host_blobs.len() >= MAX_HOST_BLOBS {
            return Err(format!("AttachShared {resource}: known already, or more than {MAX_HOST_BLOBS}"));
        }
        let pages = offset.is_multiple_of(PAGE) && size.is_multiple_of(PAGE) && size != 0;
        if !pages || offset.checked_add(size).is_none() {
            return Err(format!("AttachShared {resource}: {size:#x} bytes at {offset:#x}"));
        }
        let blob = HostBlob::Foreign { dmabuf: dmabuf.map(Arc::new), offset, size };
        self.host_blobs.insert(resource, blob);
        Ok(())
    }

    /// A HOST3D blob is gone.
    pub fn detach_shared(&mut self, context: &Context, resource: u32) -> Result<(), Failure> {
        match self.host_blobs.remove(&resource) {
            Some(HostBlob::Own { handle, .. }) => self.used_less(handle),
            Some(HostBlob::Foreign { .. }) => {}
            // It could not be exported.
            None => return Ok(()),
        }
        self.take_away(context, |buffer| {
            !matches!(buffer.backing, Backing::Guest { .. }) && buffer.resource() == Some(resource)
        })
    }

    /// Lets other contexts have a piece of a buffer. The same piece has the same token.
    pub fn share(
        &mut self,
        context: &Context,
        handle: Handle,
        request: &ShareMemoryRequest,
    ) -> Result<ShareToken, Failure> {
        let ShareMemoryRequest { offset, size, .. } = *request;
        let buffer = self.buffer(handle)?;
        let pages = offset.is_multiple_of(PAGE) && size.is_multiple_of(PAGE) && size != 0;
        if !pages || offset.checked_add(size).is_none_or(|end| end > buffer.size) {
            return Err(Failure::invalid(format!(
                "ShareMemory: {size:#x} bytes at {offset:#x} of a buffer of {:#x}",
                buffer.size
            )));
        }
        if let Some(share) = buffer.shares.iter().find(|share| (share.offset, share.size) == (offset, size)) {
            return Ok(share.token);
        }
        if self.tokens.len() >= MAX_SHARES {
            return Err(Failure::limit(format!("ShareMemory: {MAX_SHARES} pieces are shared")));
        }
        check_own(buffer)?;
        let dmabuf = context.dmabuf(buffer)?;
        let shown = context.shown(buffer, offset, size);
        let token = new_token()?;
        let (vram, memory) = (vram_of(buffer), shown.map(|(_, memory)| memory));
        let piece = SharedPiece { offset, size, handle: handle.0, vram, memory };
        context.share(token, piece, shown.map(|(file, _)| file), dmabuf.as_fd())?;
        self.tokens.insert(token, handle);
        let buffer = self.buffer_mut(handle)?;
        buffer.shares.push(Share { token, offset, size });
        buffer.uses = buffer.uses.saturating_add(1);
        Ok(token)
    }

    /// Ends a token before its buffer. Who has made something with it keeps that. A token that has ended already, of which
    /// something is still used, ends as well.
    pub fn unshare(&mut self, context: &Context, token: ShareToken) -> Result<(), Failure> {
        let known = self.tokens.get(&token).copied().ok_or_else(|| {
            // A secret is not for the log.
            Failure::new(Status::BAD_HANDLE, "UnshareMemory: this context has given out no such token")
        });
        if let Some(buffer) = self.buffers.get_mut(known?)
            && let Some(index) = buffer.shares.iter().position(|share| share.token == token)
        {
            buffer.shares.swap_remove(index);
            // Answered by `share_gone`, which gives back what it costs.
            context.unshare(token);
        }
        Ok(())
    }

    /// All that was made with a token is gone.
    pub fn share_gone(&mut self, token: ShareToken) {
        if let Some(handle) = self.tokens.remove(&token) {
            self.used_less(handle);
        }
    }

    /// The whole buffer behind a HOST3D blob, and which piece of it the blob shows.
    fn behind(&self, context: &Context, resource: ResourceId) -> Result<(Dmabuf, u64, u64), Failure> {
        let id = resource.0;
        match self.host_blobs.get(&id) {
            Some(HostBlob::Own { handle, size }) => {
                let gone = |_| {
                    let reason = format!("resource {id}: the buffer that it shows is freed");
                    Failure::new(Status::BAD_RESOURCE, reason)
                };
                // A blob of one's own shows one's own memory, from its start on (`check_own`).
                let buffer = self.buffer(*handle).map_err(gone)?;
                Ok((context.dmabuf(buffer)?, 0, *size))
            }
            Some(HostBlob::Foreign { dmabuf: Some(dmabuf), offset, size }) => {
                Ok((Dmabuf::Held(dmabuf.clone()), *offset, *size))
            }
            Some(HostBlob::Foreign { dmabuf: None, .. }) => {
                let reason = format!("resource {id}: the kernel cannot export its memory");
                Err(Failure::new(Status::NOT_SUPPORTED, reason))
            }
            None => {
                let reason = format!("resource {id} is no HOST3D blob that is attached to this context");
                Err(Failure::new(Status::BAD_RESOURCE, reason))
            }
        }
    }

    /// A buffer over memory that a HOST3D blob shows. Returns it and its bytes.
    pub fn import(
        &mut self,
        context: &Context,
        request: &ImportMemoryRequest,
    ) -> Result<(Handle, u64), Failure> {
        self.check_room("ImportMemory")?;
        let va = request.va.0;
        let (dmabuf, offset, size) = self.behind(context, request.resource)?;
        let info = context.kfd.dmabuf_info(dmabuf.as_fd())?;
        if offset.checked_add(size).is_none_or(|end| end > info.size) {
            let reason = format!(
                "resource {} shows {size:#x} bytes at {offset:#x} of a buffer of {:#x}",
                request.resource.0, info.size
            );
            return Err(Failure::new(Status::BAD_RESOURCE, reason));
        }
        let resource = request.resource.0;
        if va == 0 {
            let backing = Backing::Piece { resource, dmabuf: dmabuf.hold(), offset };
            let handle = self.keep(context, Buffer::new(None, request.gpu_id, size, backing))?;
            return Ok((handle, size));
        }
        if !va.is_multiple_of(PAGE) || va.checked_add(size).is_none() {
            return Err(Failure::invalid(format!("ImportMemory: {size:#x} bytes at {va:#x}")));
        }
        if offset != 0 || size != info.size {
            return Err(Failure::invalid(format!(
                "ImportMemory: resource {resource} shows a piece of a buffer, which can have no address of its own"
            )));
        }
        let kfd = context.kfd.import_dmabuf(request.gpu_id.0, dmabuf.as_fd(), va)?;
        let backing = Backing::Imported { resource };
        let buffer = Buffer::new(Some(kfd), request.gpu_id, size, backing).at(va, size);
        Ok((self.keep(context, buffer)?, size))
    }

    /// What is behind a blob.
    pub fn resource_info(
        &self,
        context: &Context,
        resource: ResourceId,
    ) -> Result<ResourceInfoAnswer, Failure> {
        if let Some(size) = self.guest.size(resource)? {
            return Ok(ResourceInfoAnswer { size, kind: ResourceInfoAnswer::GUEST, ..Default::default() });
        }
        let (dmabuf, _, size) = self.behind(context, resource)?;
        let DmabufInfo { gpu_id, flags, .. } = context.kfd.dmabuf_info(dmabuf.as_fd())?;
        // Which other GPUs the host has is not the guest's business.
        let gpu_id = context.gpu(GpuId(gpu_id)).map_or(GpuId(0), |gpu| gpu.id);
        let flags = AllocFlags::from_bits_retain(flags).bits();
        Ok(ResourceInfoAnswer { size, kind: ResourceInfoAnswer::HOST, gpu_id, flags, pad: 0 })
    }
}

/// Bytes of VRAM that a buffer uses.
fn vram_of(buffer: &Buffer) -> u64 {
    if matches!(buffer.backing, Backing::Vram { .. }) { buffer.size } else { 0 }
}

/// A number that nobody can guess.
fn new_token() -> Result<ShareToken, Failure> {
    let number = getrandom::u64().map_err(|error| {
        Failure::new(Status::NOT_SUPPORTED, format!("ShareMemory: random numbers: {error}"))
    })?;
    Ok(ShareToken(number | ShareToken::BIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_tokens_and_differ() {
        let (a, b) = (new_token().unwrap(), new_token().unwrap());
        assert_ne!(a, b);
        assert_eq!(ShareToken::from_blob_id(a.0), Some(a));
    }
}
