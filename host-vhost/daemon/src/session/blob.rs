//! Blobs: memory of the guest that a worker may use, and memory of the host that the guest may map.

use kfd_ipc::worker::{MAX_RUNS_PER_MESSAGE, Run, ToWorker};
use virtio_bindings::virtio_gpu as gpu;
use zerocopy::FromBytes;

use super::host::{HostBlob, Source};
use super::link::ForWorker;
use super::{Answer, Asked, Session, Step, Token, refuse};
use crate::budget::{
    MAX_BLOB_ENTRIES, MAX_BLOBS, MAX_BLOBS_PER_CONTEXT, MAX_BLOBS_WITHOUT_CONTEXT, MAX_RUNS_PER_CONTEXT,
    WORKER_REPLY,
};
use crate::chain::Input;
use crate::command::{self, CreateBlob, Header, MemEntry, Response};
use crate::memory::{MemoryError, PlacedRun, RunList};

/// Entries read from the guest at a time.
const ENTRIES_AT_A_TIME: usize = 512;

/// A worker that never runs: they count from 1.
pub(super) const NOBODY: u64 = 0;

/// A blob.
#[derive(Debug)]
pub struct Resource {
    /// Never reused, while the guest uses its ids again.
    pub serial: u64,
    /// The worker of the context that it belongs to. None for guest memory that was not attached to a context yet.
    pub owner: Option<u64>,
    /// Workers of further contexts that it is attached to: the guest's kernel attaches what a process has imported.
    pub attached: Vec<u64>,
    /// Workers that have been asked to give it back, and have not.
    pub awaited: usize,
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
        /// It is over a limit: whoever uses it is told so.
        over_limit: bool,
    },
    /// Host memory.
    Host(HostBlob),
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
    /// CTX_ATTACH_RESOURCE
    Attach {
        /// The context's worker.
        worker: u64,
    },
}

impl Resource {
    /// Whether it belongs to this worker's context or is attached to it.
    pub fn is_held_by(&self, worker: u64) -> bool {
        self.owner == Some(worker) || self.attached.contains(&worker)
    }

    /// The workers of the contexts that have it.
    pub fn holders(&self) -> Vec<u64> {
        self.owner.iter().chain(&self.attached).copied().collect()
    }

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

    pub(super) fn check_blob_count(&self, owner: Option<u64>) -> Result<(), super::Refusal> {
        let (count, most) = match owner {
            Some(owner) => (self.workers.get(&owner).map_or(usize::MAX, |w| w.blobs), MAX_BLOBS_PER_CONTEXT),
            None => (self.unattached.len(), MAX_BLOBS_WITHOUT_CONTEXT),
        };
        if count >= most {
            return refuse(Response::OutOfMemory, "the context has as many blobs as it may have");
        }
        Ok(())
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
        let list = match self.read_entries(request.nr_entries, input)? {
            Ok(list) => list,
            Err(error @ MemoryError::Runs) => return self.too_scattered(owner, &request, &error.to_string()),
            Err(error) => return refuse(Response::InvalidParameter, error),
        };
        let total = list.total();
        if total < request.size {
            return refuse(
                Response::InvalidParameter,
                format_args!("the entries have {total:#x} bytes, the blob {:#x}", request.size),
            );
        }
        let runs = list.into_runs();
        if owner.is_none() {
            let waiting = self.unattached.iter().filter_map(|resource| self.resources.get(resource));
            let waiting = waiting.map(Resource::runs).fold(runs.len(), usize::saturating_add);
            if let Err(refusal) = check_runs(waiting) {
                return self.too_scattered(owner, &request, &refusal.why);
            }
        }
        let kind = Kind::Guest { size: request.size, runs, over_limit: false };
        self.insert(request.resource_id, None, kind);
        if let Some(owner) = owner
            && let Err(refusal) = self.give_to_worker(request.resource_id, owner)
        {
            self.forget(request.resource_id);
            return Err(refusal);
        }
        Ok(Step::Done(Response::Ok))
    }

    /// Refuses a list of guest memory for a limit. Linux does not look at the answer and attaches the blob: its
    /// number stays, so that the context's worker can be told what it is then.
    fn too_scattered(&mut self, owner: Option<u64>, request: &CreateBlob, why: &str) -> Answer {
        if owner.is_none() {
            let kind = Kind::Guest { size: 0, runs: Vec::new(), over_limit: true };
            self.insert(request.resource_id, None, kind);
        }
        refuse(Response::OutOfMemory, why)
    }

    pub(super) fn insert(&mut self, resource: u32, owner: Option<u64>, kind: Kind) {
        self.last_serial = self.last_serial.wrapping_add(1);
        let serial = self.last_serial;
        if owner.is_none() {
            self.unattached.insert(resource);
        }
        if let Kind::Host(_) = kind {
            self.host_blobs.insert(resource);
        }
        let entry = Resource { serial, owner, attached: Vec::new(), awaited: 0, kind, leaving: false };
        self.resources.insert(resource, entry);
    }

    /// Gives guest memory to the worker of a context, the first or a further one, for as long as the blob lives. Each
    /// worker maps it, so that it counts for each.
    pub(super) fn give_to_worker(&mut self, resource: u32, to: u64) -> Result<(), super::Refusal> {
        let given = self.try_give(resource, to);
        if given.as_ref().is_err_and(|refusal| refusal.response == Response::OutOfMemory) {
            self.tell_worker(to, Some(ForWorker::Plain(ToWorker::RefuseBlob { resource })));
        }
        given
    }

    fn try_give(&mut self, resource: u32, to: u64) -> Result<(), super::Refusal> {
        self.check_blob_count(Some(to))?;
        let (Some(entry), Some(worker)) = (self.resources.get_mut(&resource), self.workers.get_mut(&to))
        else {
            return refuse(Response::InvalidContext, "the worker is gone");
        };
        let Kind::Guest { runs, over_limit, .. } = &entry.kind else {
            return refuse(Response::InvalidResource, format_args!("resource {resource} is host memory"));
        };
        if *over_limit {
            return refuse(Response::OutOfMemory, format_args!("resource {resource} is over a limit"));
        }
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
        match entry.owner {
            None => {
                entry.owner = Some(to);
                self.unattached.remove(&resource);
            }
            Some(_) => entry.attached.push(to),
        }
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
            self.tell_worker(to, Some(ForWorker::Plain(message)));
        }
        Ok(())
    }

    /// Guest memory that was refused to a context is forgotten, but for its number: it may not use up what the blobs
    /// of others need that are not attached yet.
    pub(super) fn give_to_nobody(&mut self, resource: u32) {
        let Some(entry) = self.resources.get_mut(&resource) else { return };
        entry.owner = Some(NOBODY);
        self.unattached.remove(&resource);
        match &mut entry.kind {
            Kind::Guest { size, runs, .. } => {
                *size = 0;
                *runs = Vec::new();
            }
            Kind::Host(host) => {
                host.memory = None;
                host.dmabuf = None;
                let (source, origin) = (host.source.take(), host.origin.take());
                if !host.busy {
                    self.take_map(resource);
                }
                self.leave_source(source);
                self.leave_origin(origin);
            }
        }
    }

    /// A context and its worker are gone. A blob that is attached to another context too is that one's from now on. Of
    /// the others only the numbers stay, until the guest gives them up: the budgets of the next context begin anew, so that
    /// nothing of theirs may count beside it, and a map that stayed would keep memory of the GPU that no limit counts any
    /// more.
    pub(super) fn abandon_resources(&mut self, owner: u64) {
        // The VMM may not be asked to unmap now, see `leave_window`; all blobs go in the end.
        if self.stopping {
            return;
        }
        let held = self.resources.iter_mut().filter(|(_, resource)| resource.is_held_by(owner));
        let mut orphans: Vec<u32> = Vec::new();
        let mut inherited: Vec<(u32, u64)> = Vec::new();
        for (id, resource) in held {
            resource.attached.retain(|worker| *worker != owner);
            if resource.owner != Some(owner) {
                continue;
            }
            let workers = &self.workers;
            let heir = resource.attached.iter().position(|worker| workers.contains_key(worker));
            match heir {
                Some(heir) => {
                    let heir = resource.attached.swap_remove(heir);
                    resource.owner = Some(heir);
                    inherited.push((*id, heir));
                }
                None => orphans.push(*id),
            }
        }
        for (resource, heir) in inherited {
            self.inherit_map(resource, heir);
        }
        for resource in orphans {
            self.give_to_nobody(resource);
        }
    }

    /// Whether nothing is left of a resource but its number.
    pub(super) fn is_abandoned(&self, resource: u32) -> bool {
        self.resources.get(&resource).is_some_and(|entry| entry.owner == Some(NOBODY))
    }

    fn read_entries(
        &self,
        count: u32,
        input: &mut Input<'_>,
    ) -> Result<Result<RunList, MemoryError>, super::Refusal> {
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
                    return Ok(Err(error));
                }
            }
        }
        Ok(Ok(list))
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
            if operation == Operation::Unref
                && let Some(waiting @ None) = self.reclaiming.get_mut(&resource)
            {
                *waiting = Some(token);
                return Ok(Step::Pending);
            }
            return refuse(Response::InvalidResource, format_args!("resource {resource} is given up"));
        }
        match (&mut entry.kind, operation) {
            (Kind::Host(host), Operation::Attach { worker }) if host.source.is_some() && host.busy => {
                if host.dmabuf.is_some() || host.memory.is_some() {
                    return self.attach_host(resource, worker);
                }
                // Its frames must find the blob attached: all that comes for this worker waits as well.
                if !self.hold_worker(worker) {
                    return refuse(Response::Unspecified, "the context has waited for memory for too long");
                }
                if let Some(host) = self.host_blob(resource) {
                    host.waiting.push((token, header, operation));
                }
                Ok(Step::Pending)
            }
            (Kind::Host(_), Operation::Attach { worker }) => self.attach_host(resource, worker),
            (Kind::Host(host), _) if host.busy => {
                host.waiting.push((token, header, operation));
                if operation == Operation::Unref {
                    self.hold_owner(resource);
                }
                Ok(Step::Pending)
            }
            (Kind::Host(_), Operation::Map { offset }) => self.map(resource, token, offset),
            (Kind::Host(_), Operation::Unmap) => self.unmap(resource, token),
            (Kind::Host(host), Operation::Unref) => {
                entry.leaving = true;
                if host.mapped_at.is_some() {
                    self.hold_owner(resource);
                    return self.unmap(resource, token);
                }
                self.release(resource, token);
                Ok(Step::Pending)
            }
            (Kind::Guest { .. }, Operation::Unref) => {
                entry.leaving = true;
                let holders = entry.holders();
                self.take_back(resource, &holders, token);
                Ok(Step::Pending)
            }
            (Kind::Guest { .. }, Operation::Attach { worker }) => {
                self.give_to_worker(resource, worker).map(|()| Step::Done(Response::Ok))
            }
            (Kind::Guest { .. }, _) => refuse(
                Response::InvalidResource,
                format_args!("resource {resource} is guest memory, which is not mapped by the host"),
            ),
        }
    }

    /// Takes guest memory back from all workers that have it. The command is done when nothing of the host touches it
    /// any more.
    pub(super) fn take_back(&mut self, resource: u32, holders: &[u64], token: Token) {
        let mut awaited = 0usize;
        for holder in holders {
            match self.workers.get_mut(holder) {
                None => continue,
                Some(worker) if worker.ending => worker.on_exit.push((token, Some(resource))),
                Some(_) => {
                    let asked = Asked::Detach { resource, token };
                    let ticket = self.new_ticket(*holder, asked, Some(WORKER_REPLY));
                    let message = ToWorker::DetachBlob { resource, ticket };
                    self.tell_worker(*holder, Some(ForWorker::Plain(message)));
                }
            }
            awaited = awaited.saturating_add(1);
        }
        match self.resources.get_mut(&resource) {
            Some(entry) if awaited != 0 => entry.awaited = awaited,
            _ => self.release(resource, token),
        }
    }

    /// A worker has given guest memory back, or is gone. The last one ends the blob.
    pub(super) fn gave_back(&mut self, resource: u32, token: Token) {
        if let Some(entry) = self.resources.get_mut(&resource) {
            entry.awaited = entry.awaited.saturating_sub(1);
            if entry.awaited != 0 {
                return;
            }
        }
        self.release(resource, token);
    }

    /// Forgets a resource and finishes the command that gave it up.
    pub(super) fn release(&mut self, resource: u32, token: Token) {
        self.forget(resource);
        self.commands.finish(token, Response::Ok);
        self.leave_number(resource);
    }

    pub(super) fn forget(&mut self, resource: u32) {
        let Some(entry) = self.resources.remove(&resource) else { return };
        self.unattached.remove(&resource);
        self.host_blobs.remove(&resource);
        let runs = entry.runs();
        for holder in entry.holders() {
            if let Some(worker) = self.workers.get_mut(&holder) {
                worker.blobs = worker.blobs.saturating_sub(1);
                worker.runs = worker.runs.saturating_sub(runs);
            }
            if let Kind::Host(_) = entry.kind {
                self.tell_before_held(holder, ForWorker::Plain(ToWorker::DetachShared { resource }));
            }
        }
        if let Kind::Host(HostBlob { holds: Some(worker), .. }) = entry.kind {
            self.let_go_of_worker(worker);
        }
        if let Kind::Host(HostBlob { source, origin, .. }) = entry.kind {
            self.leave_source(source);
            self.leave_origin(origin);
        }
    }

    /// One blob less shows this memory.
    fn leave_source(&mut self, source: Option<Source>) {
        if let Some(Source::Token(token)) = source {
            self.leave_share(token);
        }
    }
}
