//! Blobs of host memory: what a worker's buffer holds, for the guest to map.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kfd_ipc::worker::{Caching, ExportedMemory, SharedPiece, ToWorker};
use virtio_kfd_protocol::ShareToken;

use super::blob::{Kind, Operation};
use super::link::ForWorker;
use super::orphan::Origin;
use super::{Answer, Asked, Session, Step, Token, refuse};
use crate::budget::{MAX_HOST_BLOBS, PAGE, WORKER_REPLY, has_share};
use crate::command::{CreateBlob, Header, Response};
use crate::guest_warn;
use crate::memory::FileId;

/// Host memory of a worker's buffer.
#[derive(Debug)]
pub struct HostBlob {
    /// Bytes.
    pub size: u64,
    /// The memory, when the worker has exported it and a CPU can see it.
    pub memory: Option<HostMemory>,
    /// The whole buffer, for other contexts, where the kernel can export it.
    pub dmabuf: Option<Arc<File>>,
    /// Where in the buffer the blob begins, in bytes.
    pub offset: u64,
    /// What the guest named: the buffer or the token.
    pub handle: u64,
    /// What brought the memory; none where it could not be had, or is gone.
    pub source: Option<Source>,
    /// Which buffer it shows, once that is known.
    pub origin: Option<Origin>,
    /// The worker that is kept waiting until the blob is gone.
    pub holds: Option<u64>,
    /// Where it is mapped in the window.
    pub mapped_at: Option<u64>,
    /// It was mapped when its context ended, and is not any more: the guest's own unmap has nothing left to do.
    pub taken: bool,
    /// The worker or the VMM is at work on it: what the guest asks meanwhile waits.
    pub busy: bool,
    /// What waits, in order.
    pub waiting: Vec<(Token, Header, Operation)>,
}

/// What brought a blob its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A buffer of the context that made the blob.
    Buffer,
    /// A token.
    Token(ShareToken),
}

/// Memory that a worker has exported.
#[derive(Clone, Debug)]
pub struct HostMemory {
    /// The file.
    pub file: Arc<File>,
    /// Which file.
    pub id: FileId,
    /// Where in the file, in bytes.
    pub offset: u64,
    /// How the guest maps it.
    pub caching: Caching,
}

impl HostBlob {
    /// A blob whose memory has to come yet.
    fn new(size: u64, handle: u64, source: Source) -> Self {
        HostBlob {
            size,
            memory: None,
            dmabuf: None,
            offset: 0,
            handle,
            source: Some(source),
            origin: None,
            holds: None,
            mapped_at: None,
            taken: false,
            busy: false,
            waiting: Vec::new(),
        }
    }
}

impl Session {
    pub(super) fn create_host_blob(&mut self, token: Token, owner: u64, request: CreateBlob) -> Answer {
        if let Some(name) = ShareToken::from_blob_id(request.blob_id)
            // A name that somebody shares memory under is not another's to take.
            && !self.is_shared(name)
            && self.is_pooled(name)
        {
            return self.create_pooled_blob(owner, &request, name);
        }
        self.check_blob_count(Some(owner))?;
        if request.nr_entries != 0 || !request.size.is_multiple_of(PAGE) {
            return refuse(
                Response::InvalidParameter,
                format_args!("host memory of {:#x} bytes, nr_entries {}", request.size, request.nr_entries),
            );
        }
        let all = self.host_blobs.len();
        let host_blobs = self.host_blobs.iter().filter_map(|resource| self.resources.get(resource));
        let own = host_blobs.filter(|resource| resource.owner == Some(owner)).count();
        if !has_share(own, all, MAX_HOST_BLOBS) {
            return refuse(
                Response::OutOfMemory,
                format_args!("{all} blobs of host memory are open, {own} of this context"),
            );
        }
        let resource = request.resource_id;
        let (host, step) = match ShareToken::from_blob_id(request.blob_id) {
            Some(secret) => {
                let mut host = HostBlob::new(request.size, request.blob_id, Source::Token(secret));
                self.use_share(secret, &mut host)?;
                (host, Step::Done(Response::Ok))
            }
            None => {
                let mut host = HostBlob::new(request.size, request.blob_id, Source::Buffer);
                host.busy = true;
                (host, Step::Pending)
            }
        };
        if let Some(worker) = self.workers.get_mut(&owner) {
            worker.blobs = worker.blobs.saturating_add(1);
        }
        self.insert(resource, Some(owner), Kind::Host(host));
        match step {
            Step::Done(_) => self.tell_attached(resource, owner),
            Step::Pending => {
                let ticket = self.new_ticket(owner, Asked::Export { resource, token }, Some(WORKER_REPLY));
                let message =
                    ToWorker::Export { ticket, resource, handle: request.blob_id, size: request.size };
                // Not behind what waits for blobs that go, or for exports of others: that may wait for this one.
                self.tell_before_held(owner, ForWorker::Plain(message));
            }
        }
        Ok(step)
    }

    /// The guest gives a blob up, which takes the VMM a while. Its memory counts until then, but to the guest it is free
    /// now: where VRAM is limited, what its context asks for next waits.
    pub(super) fn hold_owner(&mut self, resource: u32) {
        if !self.config.vram_limit.is_set() {
            return;
        }
        let Some(owner) = self.resources.get(&resource).and_then(|entry| entry.owner) else { return };
        let Some(host) = self.host_blob(resource) else { return };
        let holds = host.source == Some(Source::Buffer) && host.holds.is_none();
        if holds
            && self.hold_worker(owner)
            && let Some(host) = self.host_blob(resource)
        {
            host.holds = Some(owner);
        }
    }

    /// A worker has exported a buffer, or could not.
    pub(super) fn exported(
        &mut self,
        worker: u64,
        ticket: u64,
        piece: Result<SharedPiece, i32>,
        descriptors: Vec<OwnedFd>,
    ) {
        let asked = self.take_ticket(worker, ticket, |asked| match asked {
            Asked::Export { resource, token } => Ok((resource, token)),
            other => Err(other),
        });
        let Some((resource, token)) = asked else { return };
        let piece = match piece {
            Ok(piece) => piece,
            Err(errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                self.export_failed(resource, token, &error.to_string());
                return;
            }
        };
        let (size, handle) = self.host_blob(resource).map_or((0, 0), |host| (host.size, host.handle));
        let origin = Origin { worker, handle, vram: piece.vram };
        let mut descriptors = descriptors.into_iter();
        let checked = self.check_piece(worker, &piece, size, &mut descriptors).and_then(|memory| {
            let dmabuf = descriptors.next().map(|dmabuf| self.check_file(dmabuf)).transpose()?;
            match memory.is_none() && dmabuf.is_none() {
                true => Err("it exported memory without a descriptor".to_owned()),
                false => Ok((memory, dmabuf.map(|(file, _)| Arc::new(file)))),
            }
        });
        match checked {
            Ok((memory, dmabuf)) => {
                if let Some(host) = self.host_blob(resource) {
                    host.memory = memory;
                    host.dmabuf = dmabuf;
                    // None where its context has ended meanwhile, and it shows nothing.
                    host.origin = host.source.map(|_| origin);
                }
                self.commands.finish(token, Response::Ok);
                self.resume(resource);
            }
            Err(why) => {
                self.end_worker(worker, &why);
                self.export_failed(resource, token, &why);
            }
        }
    }

    /// The memory in which a CPU sees a piece, if it can.
    pub(super) fn check_piece(
        &mut self,
        worker: u64,
        piece: &SharedPiece,
        size: u64,
        descriptors: &mut impl Iterator<Item = OwnedFd>,
    ) -> Result<Option<HostMemory>, String> {
        let Some(memory) = piece.memory else { return Ok(None) };
        let missing = || "it exported memory without a descriptor".to_owned();
        let file = descriptors.next().ok_or_else(missing)?;
        self.check_memory(worker, memory, size, file).map(Some)
    }

    /// A worker is trusted less than the device: what it exports must be as large as was asked.
    fn check_memory(
        &mut self,
        worker: u64,
        memory: ExportedMemory,
        size: u64,
        descriptor: OwnedFd,
    ) -> Result<HostMemory, String> {
        let fits = memory.size >= size
            && memory.offset.is_multiple_of(PAGE)
            && memory.offset.checked_add(memory.size).is_some();
        if !fits {
            return Err(format!("it exported {memory:?} for {size:#x} bytes"));
        }
        let (file, id) = self.check_file(descriptor)?;
        let file = match self.workers.get_mut(&worker) {
            Some(worker) => worker.share_file(id, file),
            None => Arc::new(file),
        };
        Ok(HostMemory { file, id, offset: memory.offset, caching: memory.caching })
    }

    /// What a worker sends must not be the guest's own memory, which would then be taken for the window's.
    pub(super) fn check_file(&self, descriptor: OwnedFd) -> Result<(File, FileId), String> {
        let file = File::from(descriptor);
        let id =
            FileId::of(&file).map_err(|error| format!("what it exported cannot be examined: {error}"))?;
        if self.memory.has_file(id) {
            return Err("it exported the guest's own memory".into());
        }
        Ok((file, id))
    }

    pub(super) fn export_failed(&mut self, resource: u32, token: Token, why: &str) {
        guest_warn!(self.log, "resource {resource}: no memory to map: {why}");
        if let Some(host) = self.host_blob(resource) {
            host.source = None;
        }
        self.commands.finish(token, Response::Unspecified);
        self.resume(resource);
    }

    pub(super) fn host_blob(&mut self, resource: u32) -> Option<&mut HostBlob> {
        match self.resources.get_mut(&resource).map(|resource| &mut resource.kind) {
            Some(Kind::Host(host)) => Some(host),
            _ => None,
        }
    }

    /// A blob of host memory is not busy any more: what waited for that is done now.
    pub(super) fn resume(&mut self, resource: u32) {
        let Some(host) = self.host_blob(resource) else { return };
        host.busy = false;
        for (token, header, operation) in std::mem::take(&mut host.waiting) {
            let answer = self.on_resource(resource, token, header, operation);
            self.settle_answer(token, &header, answer);
            if let Operation::Attach { worker } = operation {
                self.let_go_of_worker(worker);
            }
        }
    }
}
