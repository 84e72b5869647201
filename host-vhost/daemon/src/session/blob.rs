//! Blobs: memory of the guest that a worker may use, and memory of the host that the guest may map.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kfd_ipc::worker::{Caching, ExportedMemory, MAX_RUNS_PER_MESSAGE, Run, ToWorker};
use virtio_bindings::virtio_gpu as gpu;
use zerocopy::FromBytes;

use super::link::ForWorker;
use super::{Answer, Asked, Session, Step, Token, refuse};
use crate::budget::{
    MAX_BLOB_ENTRIES, MAX_BLOBS, MAX_BLOBS_PER_CONTEXT, MAX_BLOBS_WITHOUT_CONTEXT, MAX_HOST_BLOBS,
    MAX_RUNS_PER_CONTEXT, PAGE, WORKER_REPLY, has_share,
};
use crate::chain::Input;
use crate::command::{self, CreateBlob, Header, MemEntry, Response};
use crate::guest_warn;
use crate::memory::{FileId, PlacedRun, RunList};

/// Entries read from the guest at a time.
const ENTRIES_AT_A_TIME: usize = 512;

/// A worker that never runs: they count from 1.
const NOBODY: u64 = 0;

/// A blob.
#[derive(Debug)]
pub struct Resource {
    /// Never reused, while the guest uses its ids again.
    pub serial: u64,
    /// The worker of the context that it belongs to. None for guest memory that was not attached to a context yet.
    pub owner: Option<u64>,
    /// What is behind it.
    pub kind: Kind,
    /// The guest has given it up, and waits until it has it back.
    pub leaving: bool,
}

/// What is behind a blob.
#[derive(Debug)]
pub enum Kind {
    /// Guest memory.
    Guest {
        /// Bytes that the guest named; the runs have at least as many.
        size: u64,
        /// Where it is.
        runs: Vec<PlacedRun>,
    },
    /// Host memory.
    Host(HostBlob),
}

/// Host memory of a worker's buffer.
#[derive(Debug)]
pub struct HostBlob {
    /// Bytes.
    pub size: u64,
    /// The memory, when the worker has exported it.
    pub memory: Option<HostMemory>,
    /// Where it is mapped in the window.
    pub mapped_at: Option<u64>,
    /// It was mapped when its context ended, and is not any more: the guest's own unmap has nothing left to do.
    pub taken: bool,
    /// The worker or the VMM is at work on it: what the guest asks meanwhile waits.
    pub busy: bool,
    /// What waits, in order.
    pub waiting: Vec<(Token, Header, Operation)>,
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

/// What a guest does to a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// RESOURCE_MAP_BLOB
    Map {
        /// Where in the window, in bytes.
        offset: u64,
    },
    /// RESOURCE_UNMAP_BLOB
    Unmap,
    /// RESOURCE_UNREF
    Unref,
}

impl Resource {
    /// Whether it has memory in one of these regions.
    pub fn lies_in(&self, regions: &[u32]) -> bool {
        match &self.kind {
            Kind::Guest { runs, .. } => runs.iter().any(|placed| regions.contains(&placed.run.region)),
            Kind::Host(_) => false,
        }
    }

    /// Runs of guest memory.
    fn runs(&self) -> usize {
        match &self.kind {
            Kind::Guest { runs, .. } => runs.len(),
            Kind::Host(_) => 0,
        }
    }
}

fn check_runs(sum: usize) -> Result<(), super::Refusal> {
    if sum > MAX_RUNS_PER_CONTEXT {
        return refuse(
            Response::OutOfMemory,
            format_args!("{sum} runs of guest memory, {MAX_RUNS_PER_CONTEXT} are allowed"),
        );
    }
    Ok(())
}

impl Session {
    pub(super) fn create_blob(&mut self, token: Token, header: &Header, input: &mut Input<'_>) -> Answer {
        let request: CreateBlob = input.read()?;
        if request.resource_id == 0 || self.resources.contains_key(&request.resource_id) {
            return refuse(Response::InvalidResource, "the resource's id is 0 or in use");
        }
        if self.resources.len() >= MAX_BLOBS {
            return refuse(Response::OutOfMemory, "the VM has as many blobs as it may have");
        }
        let owner = match self.contexts.get(&header.ctx_id) {
            Some(context) if !context.lost => Some(context.worker),
            // Linux names no context for guest memory (virtio_gpu's verify_blob) and attaches it in the next command.
            None if header.ctx_id == 0 && request.blob_mem == gpu::VIRTIO_GPU_BLOB_MEM_GUEST => None,
            _ => return refuse(Response::InvalidContext, "a blob needs a context whose worker runs"),
        };
        if request.size == 0 || request.blob_flags & !command::BLOB_FLAGS != 0 {
            return refuse(
                Response::InvalidParameter,
                format_args!("size {:#x}, blob_flags {:#x}", request.size, request.blob_flags),
            );
        }
        match (request.blob_mem, owner) {
            (gpu::VIRTIO_GPU_BLOB_MEM_GUEST, _) => self.create_guest_blob(owner, request, input),
            (gpu::VIRTIO_GPU_BLOB_MEM_HOST3D, Some(owner)) => self.create_host_blob(token, owner, request),
            (other, _) => refuse(
                Response::InvalidParameter,
                format_args!("blob_mem is {other}, 1 (GUEST) and 2 (HOST3D) are supported"),
            ),
        }
    }

    fn check_blob_count(&self, owner: Option<u64>) -> Result<(), super::Refusal> {
        let (count, most) = match owner {
            Some(owner) => (self.workers.get(&owner).map_or(usize::MAX, |w| w.blobs), MAX_BLOBS_PER_CONTEXT),
            None => (self.without_context().count(), MAX_BLOBS_WITHOUT_CONTEXT),
        };
        if count >= most {
            return refuse(Response::OutOfMemory, "the context has as many blobs as it may have");
        }
        Ok(())
    }

    fn without_context(&self) -> impl Iterator<Item = &Resource> {
        self.resources.values().filter(|resource| resource.owner.is_none())
    }

    fn create_guest_blob(
        &mut self,
        owner: Option<u64>,
        request: CreateBlob,
        input: &mut Input<'_>,
    ) -> Answer {
        self.check_blob_count(owner)?;
        let entry_bytes = size_of::<MemEntry>() as u64;
        let listed = u64::from(request.nr_entries).saturating_mul(entry_bytes);
        if request.nr_entries == 0 || request.nr_entries > MAX_BLOB_ENTRIES || listed > input.remaining() {
            return refuse(
                Response::InvalidParameter,
                format_args!("nr_entries is {}, {} bytes follow", request.nr_entries, input.remaining()),
            );
        }
        let limit = self.config.guest_memory_limit.unwrap_or(u64::MAX);
        if self.guest_bytes.checked_add(request.size).is_none_or(|sum| sum > limit) {
            return refuse(
                Response::OutOfMemory,
                format_args!("{:#x} bytes of guest memory are more than the limit allows", request.size),
            );
        }
        let list = self.read_entries(request.nr_entries, input)?;
        let total = list.total();
        if total < request.size || self.guest_bytes.checked_add(total).is_none_or(|sum| sum > limit) {
            return refuse(
                Response::InvalidParameter,
                format_args!("the entries have {total:#x} bytes, the blob {:#x}", request.size),
            );
        }
        let runs = list.into_runs();
        if owner.is_none() {
            let waiting = self.without_context().map(Resource::runs).fold(runs.len(), usize::saturating_add);
            check_runs(waiting)?;
        }
        self.guest_bytes = self.guest_bytes.saturating_add(total);
        let kind = Kind::Guest { size: request.size, runs };
        self.insert(request.resource_id, None, kind);
        if let Some(owner) = owner
            && let Err(refusal) = self.give_to_worker(request.resource_id, owner)
        {
            self.forget(request.resource_id);
            return Err(refusal);
        }
        Ok(Step::Done(Response::Ok))
    }

    fn insert(&mut self, resource: u32, owner: Option<u64>, kind: Kind) {
        self.last_serial = self.last_serial.wrapping_add(1);
        let entry = Resource { serial: self.last_serial, owner, kind, leaving: false };
        self.resources.insert(resource, entry);
    }

    /// Gives guest memory that belongs to no context yet to a worker, for as long as the blob lives.
    pub(super) fn give_to_worker(&mut self, resource: u32, owner: u64) -> Result<(), super::Refusal> {
        self.check_blob_count(Some(owner))?;
        let (Some(entry), Some(worker)) = (self.resources.get_mut(&resource), self.workers.get_mut(&owner))
        else {
            return refuse(Response::InvalidContext, "the worker is gone");
        };
        let Kind::Guest { runs, .. } = &entry.kind else {
            return refuse(Response::InvalidResource, format_args!("resource {resource} is host memory"));
        };
        let known = |run: &Run| self.memory.regions().iter().any(|region| region.id == run.region);
        if !runs.iter().all(|placed| known(&placed.run)) {
            return refuse(
                Response::InvalidResource,
                format_args!("the VMM has taken away memory of resource {resource}"),
            );
        }
        let sum = worker.runs.saturating_add(runs.len());
        check_runs(sum)?;
        worker.runs = sum;
        worker.blobs = worker.blobs.saturating_add(1);
        entry.owner = Some(owner);
        let size = runs.iter().map(|placed| placed.run.len).fold(0, u64::saturating_add);
        let total_runs = u32::try_from(runs.len()).unwrap_or(u32::MAX);
        let mut messages = Vec::new();
        let mut first_run = 0u32;
        for piece in runs.chunks(MAX_RUNS_PER_MESSAGE) {
            let runs: Vec<Run> = piece.iter().map(|placed| placed.run).collect();
            let next = first_run.saturating_add(u32::try_from(runs.len()).unwrap_or(u32::MAX));
            messages.push(ToWorker::AttachBlob { resource, size, first_run, total_runs, runs });
            first_run = next;
        }
        for message in messages {
            self.tell_worker(owner, Some(ForWorker::Plain(message)));
        }
        Ok(())
    }

    /// Guest memory that was refused to a context is forgotten, but for its number: it may not use up what the blobs
    /// of others need that are not attached yet.
    pub(super) fn give_to_nobody(&mut self, resource: u32) {
        let Some(entry) = self.resources.get_mut(&resource) else { return };
        entry.owner = Some(NOBODY);
        match &mut entry.kind {
            Kind::Guest { size, runs } => {
                let bytes = runs.iter().map(|placed| placed.run.len).fold(0, u64::saturating_add);
                self.guest_bytes = self.guest_bytes.saturating_sub(bytes);
                *size = 0;
                *runs = Vec::new();
            }
            Kind::Host(host) => {
                host.memory = None;
                if !host.busy {
                    self.take_map(resource);
                }
            }
        }
    }

    /// A context and its worker are gone: of their blobs only the numbers stay, until the guest gives them up. The
    /// budgets of the next context begin anew, so that nothing of theirs may count beside it; a map that stayed would
    /// keep memory of the GPU that no limit counts any more.
    pub(super) fn abandon_resources(&mut self, owner: u64) {
        // The VMM may not be asked to unmap now, see `leave_window`; all blobs go in the end.
        if self.stopping {
            return;
        }
        let owned = self.resources.iter().filter(|(_, resource)| resource.owner == Some(owner));
        let owned: Vec<u32> = owned.map(|(id, _)| *id).collect();
        for resource in owned {
            self.give_to_nobody(resource);
        }
    }

    /// Whether nothing is left of a resource but its number.
    pub(super) fn is_abandoned(&self, resource: u32) -> bool {
        self.resources.get(&resource).is_some_and(|entry| entry.owner == Some(NOBODY))
    }

    fn read_entries(&self, count: u32, input: &mut Input<'_>) -> Result<RunList, super::Refusal> {
        let mut list = RunList::default();
        let mut bytes = [0; ENTRIES_AT_A_TIME.wrapping_mul(size_of::<MemEntry>())];
        let mut left = count as usize;
        while left > 0 {
            let now = left.min(ENTRIES_AT_A_TIME);
            left = left.saturating_sub(now);
            let piece = bytes.get_mut(..now.saturating_mul(size_of::<MemEntry>())).unwrap_or(&mut []);
            input.read_exact(piece)?;
            for entry in piece.chunks_exact(size_of::<MemEntry>()) {
                let Ok(entry) = MemEntry::read_from_bytes(entry) else { continue };
                if let Err(error) = list.push(&self.memory, entry.addr, entry.length.into()) {
                    return refuse(Response::InvalidParameter, error);
                }
            }
        }
        Ok(list)
    }

    fn create_host_blob(&mut self, token: Token, owner: u64, request: CreateBlob) -> Answer {
        self.check_blob_count(Some(owner))?;
        if request.nr_entries != 0 || !request.size.is_multiple_of(PAGE) {
            return refuse(
                Response::InvalidParameter,
                format_args!("host memory of {:#x} bytes, nr_entries {}", request.size, request.nr_entries),
            );
        }
        let host_blobs = || self.resources.values().filter(|r| matches!(r.kind, Kind::Host(_)));
        let own = host_blobs().filter(|resource| resource.owner == Some(owner)).count();
        let all = host_blobs().count();
        if !has_share(own, all, MAX_HOST_BLOBS) {
            return refuse(
                Response::OutOfMemory,
                format_args!("{all} blobs of host memory are open, {own} of this context"),
            );
        }
        if let Some(worker) = self.workers.get_mut(&owner) {
            worker.blobs = worker.blobs.saturating_add(1);
        }
        let host = HostBlob {
            size: request.size,
            memory: None,
            mapped_at: None,
            taken: false,
            busy: true,
            waiting: Vec::new(),
        };
        let resource = request.resource_id;
        self.insert(resource, Some(owner), Kind::Host(host));
        let ticket = self.new_ticket(owner, Asked::Export { resource, token }, Some(WORKER_REPLY));
        let message = ToWorker::Export { ticket, resource, handle: request.blob_id, size: request.size };
        self.tell_worker(owner, Some(ForWorker::Plain(message)));
        Ok(Step::Pending)
    }

    /// A worker has exported a buffer, or could not.
    pub(super) fn exported(
        &mut self,
        worker: u64,
        ticket: u64,
        memory: Result<ExportedMemory, i32>,
        descriptor: Option<OwnedFd>,
    ) {
        let asked = self.take_ticket(worker, ticket, |asked| match asked {
            Asked::Export { resource, token } => Ok((resource, token)),
            other => Err(other),
        });
        let Some((resource, token)) = asked else { return };
        let memory = match (memory, descriptor) {
            (Ok(memory), Some(descriptor)) => match self.check_export(resource, memory, descriptor) {
                Ok(memory) => memory,
                Err(why) => {
                    self.end_worker(worker, &why);
                    self.export_failed(resource, token, &why);
                    return;
                }
            },
            (Ok(_), None) => {
                self.end_worker(worker, "it exported memory without a descriptor");
                self.export_failed(resource, token, "no descriptor");
                return;
            }
            (Err(errno), _) => {
                let error = std::io::Error::from_raw_os_error(errno);
                self.export_failed(resource, token, &error.to_string());
                return;
            }
        };
        if let Some(host) = self.host_blob(resource) {
            host.memory = Some(memory);
        }
        self.commands.finish(token, Response::Ok);
        self.resume(resource);
    }

    /// A worker is trusted less than the device: what it exports must be as large as was asked, and must not be
    /// the guest's own memory, which would then be taken for the window's.
    fn check_export(
        &mut self,
        resource: u32,
        memory: ExportedMemory,
        descriptor: OwnedFd,
    ) -> Result<HostMemory, String> {
        let size = self.host_blob(resource).map_or(0, |host| host.size);
        let fits = memory.size >= size
            && memory.offset.is_multiple_of(PAGE)
            && memory.offset.checked_add(memory.size).is_some();
        if !fits {
            return Err(format!("it exported {memory:?} for {size:#x} bytes"));
        }
        let file = File::from(descriptor);
        let id =
            FileId::of(&file).map_err(|error| format!("what it exported cannot be examined: {error}"))?;
        if self.memory.has_file(id) {
            return Err("it exported the guest's own memory".into());
        }
        Ok(HostMemory { file: Arc::new(file), id, offset: memory.offset, caching: memory.caching })
    }

    pub(super) fn export_failed(&mut self, resource: u32, token: Token, why: &str) {
        guest_warn!(self.log, "resource {resource}: no memory to map: {why}");
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
        }
    }

    /// MAP_BLOB, UNMAP_BLOB, UNREF.
    pub(super) fn on_resource(
        &mut self,
        resource: u32,
        token: Token,
        header: Header,
        operation: Operation,
    ) -> Answer {
        let Some(entry) = self.resources.get_mut(&resource) else {
            return refuse(Response::InvalidResource, format_args!("there is no resource {resource}"));
        };
        if entry.leaving {
            return refuse(Response::InvalidResource, format_args!("resource {resource} is given up"));
        }
        let owner = entry.owner;
        match (&mut entry.kind, operation) {
            (Kind::Host(host), _) if host.busy => {
                host.waiting.push((token, header, operation));
                Ok(Step::Pending)
            }
            (Kind::Host(_), Operation::Map { offset }) => self.map(resource, token, offset),
            (Kind::Host(_), Operation::Unmap) => self.unmap(resource, token),
            (Kind::Host(host), Operation::Unref) => {
                entry.leaving = true;
                if host.mapped_at.is_some() {
                    return self.unmap(resource, token);
                }
                self.release(resource, token);
                Ok(Step::Pending)
            }
            (Kind::Guest { .. }, Operation::Unref) => {
                entry.leaving = true;
                self.detach(resource, owner, token);
                Ok(Step::Pending)
            }
            (Kind::Guest { .. }, _) => refuse(
                Response::InvalidResource,
                format_args!("resource {resource} is guest memory, which is not mapped by the host"),
            ),
        }
    }

    /// Takes guest memory back from a worker. The command is done when nothing of the host touches it any more.
    fn detach(&mut self, resource: u32, owner: Option<u64>, token: Token) {
        match owner.and_then(|owner| Some((owner, self.workers.get_mut(&owner)?))) {
            None => self.release(resource, token),
            Some((_, worker)) if worker.ending => worker.on_exit.push((token, Some(resource))),
            Some((owner, _)) => {
                let ticket = self.new_ticket(owner, Asked::Detach { resource, token }, Some(WORKER_REPLY));
                self.tell_worker(owner, Some(ForWorker::Plain(ToWorker::DetachBlob { resource, ticket })));
            }
        }
    }

    /// Forgets a resource and finishes the command that gave it up.
    pub(super) fn release(&mut self, resource: u32, token: Token) {
        self.forget(resource);
        self.commands.finish(token, Response::Ok);
    }

    fn forget(&mut self, resource: u32) {
        if let Some(entry) = self.resources.remove(&resource) {
            let mut runs_gone = 0;
            if let Kind::Guest { runs, .. } = &entry.kind {
                runs_gone = runs.len();
                let bytes: u64 = runs.iter().map(|placed| placed.run.len).sum();
                self.guest_bytes = self.guest_bytes.saturating_sub(bytes);
            }
            if let Some(worker) = entry.owner.and_then(|owner| self.workers.get_mut(&owner)) {
                worker.blobs = worker.blobs.saturating_sub(1);
                worker.runs = worker.runs.saturating_sub(runs_gone);
            }
        }
    }
}
