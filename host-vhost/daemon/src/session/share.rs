//! Memory that several contexts use: attached blobs, and tokens.
//!
//! Two ways lead to another context's memory. The guest's kernel attaches a blob to a further context when a process
//! imports it there, which it can only do with a descriptor that it was given; that is the guest kernel's word, and
//! good for processes of this guest. And who knows a token may make a blob of its own with it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use kfd_ipc::worker::{SharedPiece, ToWorker};
use virtio_kfd_protocol::ShareToken;
use virtio_kfd_protocol::limits::MAX_SHARES;

use super::blob::Operation;
use super::host::{HostBlob, HostMemory};
use super::link::ForWorker;
use super::orphan::Origin;
use super::{Answer, Session, Step, Token, refuse};
use crate::budget::{PAGE, WORKER_REPLY};
use crate::command::{self, Header, Response};

/// What a token opens.
#[derive(Debug)]
pub struct Share {
    /// The buffer.
    origin: Origin,
    /// Where in the buffer the piece begins, in bytes.
    offset: u64,
    /// Bytes.
    size: u64,
    /// The whole buffer.
    dmabuf: Arc<File>,
    /// The piece as a CPU sees it, if it can.
    memory: Option<HostMemory>,
    /// Blobs that were made with it.
    blobs: usize,
    /// It makes no more: its buffer is freed.
    revoked: bool,
}

impl Session {
    /// Memory belongs to the context that made it or, for guest memory, to the first one that it is attached to, for as
    /// long as the blob lives; attaching it there again changes nothing. A further context uses it as well.
    pub(super) fn attach_resource(
        &mut self,
        token: Token,
        header: &Header,
        request: command::ResourceId,
    ) -> Answer {
        let Some(context) = self.contexts.get(&header.ctx_id) else {
            return refuse(Response::InvalidContext, "there is no such context");
        };
        let (worker, lost) = (context.worker, context.lost);
        let Some(resource) = self.resources.get(&request.resource_id) else {
            return refuse(
                Response::InvalidResource,
                format_args!("there is no resource {}", request.resource_id),
            );
        };
        if resource.leaving || self.is_abandoned(request.resource_id) {
            return refuse(
                Response::InvalidResource,
                format_args!("resource {} is given up", request.resource_id),
            );
        }
        if resource.is_held_by(worker) {
            return Ok(Step::Done(Response::Ok));
        }
        let first = resource.owner.is_none();
        let attached = match lost {
            true => refuse(Response::InvalidContext, "the context's worker is gone"),
            false => self.on_resource(request.resource_id, token, *header, Operation::Attach { worker }),
        };
        if first && attached.is_err() {
            self.give_to_nobody(request.resource_id);
        }
        attached
    }

    /// Changes nothing: the guest does this when it closes a handle to memory that it still maps.
    pub(super) fn detach_resource(&mut self, header: &Header, request: command::ResourceId) -> Answer {
        let Some(context) = self.contexts.get(&header.ctx_id) else {
            return refuse(Response::InvalidContext, "there is no such context");
        };
        match self.resources.get(&request.resource_id) {
            Some(resource) if resource.is_held_by(context.worker) => Ok(Step::Done(Response::Ok)),
            // What the pool took back is still a handle for the guest's driver.
            Some(_) if self.is_abandoned(request.resource_id) => Ok(Step::Done(Response::Ok)),
            _ => refuse(
                Response::InvalidResource,
                format_args!("the context does not have resource {}", request.resource_id),
            ),
        }
    }

    /// Attaches host memory to a further context.
    pub(super) fn attach_host(&mut self, resource: u32, worker: u64) -> Answer {
        if self.host_blob(resource).is_none_or(|host| host.source.is_none()) {
            return refuse(Response::InvalidResource, "no worker has exported memory for it");
        }
        // Asked for more than once while the memory was on its way.
        if self.resources.get(&resource).is_some_and(|entry| entry.is_held_by(worker)) {
            return Ok(Step::Done(Response::Ok));
        }
        // It ends with its own context, and counts nowhere beyond that.
        if self.host_blob(resource).is_none_or(|host| host.dmabuf.is_none()) {
            return refuse(Response::InvalidResource, "its memory is for its own context alone");
        }
        self.check_blob_count(Some(worker))?;
        let Some(known) = self.workers.get_mut(&worker) else {
            return refuse(Response::InvalidContext, "the worker is gone");
        };
        known.blobs = known.blobs.saturating_add(1);
        if let Some(entry) = self.resources.get_mut(&resource) {
            entry.attached.push(worker);
        }
        self.tell_attached(resource, worker);
        Ok(Step::Done(Response::Ok))
    }

    /// Tells a worker what a blob of another worker's memory shows, before all that is held back from it for that.
    pub(super) fn tell_attached(&mut self, resource: u32, worker: u64) {
        let Some(host) = self.host_blob(resource) else { return };
        let message = ToWorker::AttachShared { resource, offset: host.offset, size: host.size };
        let message = match host.dmabuf.clone() {
            Some(dmabuf) => ForWorker::WithFile(message, dmabuf),
            None => ForWorker::Plain(message),
        };
        self.tell_before_held(worker, message);
    }

    /// Tells a worker something before all that is held back from it.
    pub(super) fn tell_before_held(&mut self, worker: u64, message: ForWorker) {
        if let Some(known) = self.workers.get_mut(&worker).filter(|known| !known.ending) {
            known.link.put_before_held(message);
        }
        self.tell_worker(worker, None);
    }

    /// What is sent to a worker waits until [`Session::let_go_of_worker`]. `false` where it waits for too long already.
    pub(super) fn hold_worker(&mut self, worker: u64) -> bool {
        let known = self.workers.get_mut(&worker);
        known.is_none_or(|known| known.link.hold(Instant::now(), WORKER_REPLY))
    }

    pub(super) fn let_go_of_worker(&mut self, worker: u64) {
        if let Some(since) = self.workers.get_mut(&worker).and_then(|known| known.link.let_go()) {
            self.restart_deadlines(worker, since);
        }
        self.tell_worker(worker, None);
    }

    /// A worker shares a piece of a buffer.
    pub(super) fn share(&mut self, worker: u64, token: u64, piece: SharedPiece, descriptors: Vec<OwnedFd>) {
        if let Err(why) = self.take_share(worker, token, piece, descriptors) {
            self.end_worker(worker, &why);
        }
    }

    fn take_share(
        &mut self,
        worker: u64,
        token: u64,
        piece: SharedPiece,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), String> {
        let SharedPiece { offset, size, handle, vram, .. } = piece;
        let origin = Origin { worker, handle, vram };
        let pages = offset.is_multiple_of(PAGE) && size.is_multiple_of(PAGE) && size != 0;
        let Some(token) = ShareToken::from_blob_id(token).filter(|token| !self.shares.contains_key(token))
        else {
            return Err("it shared memory under a token that is none, or in use".to_owned());
        };
        if !pages || offset.checked_add(size).is_none() {
            return Err(format!("it shared {piece:?}"));
        }
        if self.shares.values().filter(|share| share.origin.worker == worker).count() >= MAX_SHARES {
            return Err(format!("it shares more than {MAX_SHARES} pieces"));
        }
        let mut descriptors = descriptors.into_iter();
        let missing = || "it shared memory without a descriptor".to_owned();
        let memory = self.check_piece(worker, &piece, size, &mut descriptors)?;
        let (dmabuf, _) = self.check_file(descriptors.next().ok_or_else(missing)?)?;
        let dmabuf = Arc::new(dmabuf);
        let share = Share { origin, offset, size, dmabuf, memory, blobs: 0, revoked: false };
        self.shares.insert(token, share);
        Ok(())
    }

    /// A worker has freed a buffer that it shared.
    pub(super) fn unshare(&mut self, worker: u64, token: u64) {
        let token = ShareToken(token);
        match self.shares.get_mut(&token) {
            Some(share) if share.origin.worker == worker && !share.revoked => share.revoked = true,
            _ => {
                self.end_worker(worker, "it took back a token that it does not have");
                return;
            }
        }
        self.settle_share(token);
    }

    /// A worker is gone, and its buffers with it: its tokens open nothing any more. What was made with them goes on.
    pub(super) fn revoke_shares(&mut self, worker: u64) {
        let tokens: Vec<ShareToken> = self
            .shares
            .iter()
            .filter(|(_, share)| share.origin.worker == worker)
            .map(|(token, _)| *token)
            .collect();
        for token in tokens {
            if let Some(share) = self.shares.get_mut(&token) {
                share.revoked = true;
            }
            self.settle_share(token);
        }
    }

    /// Gives a blob the memory that a token opens.
    pub(super) fn use_share(&mut self, token: ShareToken, host: &mut HostBlob) -> Result<(), super::Refusal> {
        let Some(share) = self.shares.get_mut(&token).filter(|share| !share.revoked) else {
            return refuse(Response::InvalidParameter, "no memory is shared under this token");
        };
        if host.size > share.size {
            return refuse(
                Response::InvalidParameter,
                format_args!("a blob of {:#x} bytes over {:#x} that are shared", host.size, share.size),
            );
        }
        share.blobs = share.blobs.saturating_add(1);
        host.memory = share.memory.clone();
        host.dmabuf = Some(share.dmabuf.clone());
        host.offset = share.offset;
        host.origin = Some(share.origin);
        Ok(())
    }

    /// Whether memory is, or was, shared under a token.
    pub(super) fn is_shared(&self, token: ShareToken) -> bool {
        self.shares.contains_key(&token)
    }

    /// A blob that was made with a token is gone.
    pub(super) fn leave_share(&mut self, token: ShareToken) {
        if let Some(share) = self.shares.get_mut(&token) {
            share.blobs = share.blobs.saturating_sub(1);
        }
        self.settle_share(token);
    }

    /// Forgets a token that nothing is left of, and tells its worker.
    fn settle_share(&mut self, token: ShareToken) {
        let over = self.shares.get(&token).is_some_and(|share| share.revoked && share.blobs == 0);
        if over && let Some(share) = self.shares.remove(&token) {
            let message = ToWorker::ShareGone { token: token.0 };
            self.tell_worker(share.origin.worker, Some(ForWorker::Plain(message)));
        }
    }
}
