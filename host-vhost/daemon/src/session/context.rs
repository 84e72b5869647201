//! Contexts and their workers.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use kfd_ipc::Channel;
use kfd_ipc::supervisor::{FromSupervisor, ToSupervisor};
use kfd_ipc::worker::{FromWorker, ToWorker};
use virtio_kfd_protocol::limits::MAX_GPUS;
use virtio_kfd_protocol::version::CAPSET_ID;

use super::link::{self, ForWorker, Link};
use super::{Answer, Asked, EVENT_WORKER, MESSAGES_PER_TURN, Session, Step, Ticket, Token, refuse};
use crate::budget::WORKER_START;
use crate::chain::{Input, Ram};
use crate::command::{self, Header, Response};
use crate::guest_warn;
use crate::memory::{FileId, Region};
use crate::rate::for_the_log;

/// A context of the guest.
#[derive(Debug)]
pub struct Context {
    /// Its worker, which may have ended already.
    pub worker: u64,
    /// Whether the worker has ended or is about to: frames are answered by the device.
    pub lost: bool,
}

/// A worker process, from the request to start it until it is reaped.
#[derive(Debug)]
pub struct Worker {
    /// Its id towards the supervisor; never reused. Blobs remember it, since the guest reuses context ids.
    pub id: u64,
    /// The context's id.
    pub context: u32,
    /// Its slot in the ledger.
    pub slot: usize,
    /// The channel to it, once it runs.
    pub link: Link<ForWorker>,
    /// The command that made the context, until the worker is ready.
    create: Option<Token>,
    /// When it has to be ready, until it is.
    pub start_by: Option<Instant>,
    /// It is being killed.
    pub ending: bool,
    /// Commands that are done when it is gone, and the resource that each gives back.
    pub on_exit: Vec<(Token, Option<u32>)>,
    /// Blobs.
    pub blobs: usize,
    /// Runs of guest memory in them.
    pub runs: usize,
    /// The files that its memory lies in: its render nodes, one for each GPU, that come with each export.
    files: Vec<(FileId, Arc<File>)>,
}

impl Worker {
    /// A file that this worker has sent before is held once.
    pub fn share_file(&mut self, id: FileId, file: File) -> Arc<File> {
        if let Some((_, known)) = self.files.iter().find(|(known, _)| *known == id) {
            return known.clone();
        }
        let file = Arc::new(file);
        if self.files.len() < MAX_GPUS {
            self.files.push((id, file.clone()));
        }
        file
    }
}

fn clean_name(bytes: &[u8], context: u32) -> String {
    let name: String = bytes
        .iter()
        .take_while(|byte| **byte != 0)
        .map(|byte| if byte.is_ascii_graphic() { char::from(*byte) } else { '_' })
        .collect();
    if name.is_empty() { format!("context {context}") } else { name }
}

impl Session {
    pub(super) fn create_context(&mut self, token: Token, header: &Header, input: &mut Input<'_>) -> Answer {
        let request: command::CtxCreate = input.read()?;
        let name: [u8; command::DEBUG_NAME_BYTES] = input.read()?;
        if header.ctx_id == 0 || self.contexts.contains_key(&header.ctx_id) {
            return refuse(Response::InvalidContext, "the context's id is 0 or in use");
        }
        let capset = request.context_init & command::CONTEXT_INIT_CAPSET_MASK;
        if capset != CAPSET_ID {
            return refuse(
                Response::InvalidParameter,
                format_args!("a context for capset {capset}, only {CAPSET_ID} is served"),
            );
        }
        // A worker that is still ending has no context any more, and a context may have lost its worker.
        let alone = self.contexts.values().filter(|context| !self.workers.contains_key(&context.worker));
        let open = self.workers.len().saturating_add(alone.count());
        if open >= self.config.max_contexts as usize {
            return refuse(
                Response::OutOfMemory,
                format_args!("{open} contexts are open, no more are allowed"),
            );
        }
        let taken = |slot: &usize| self.workers.values().any(|worker| worker.slot == *slot);
        let Some(slot) = (0..self.config.max_contexts as usize).find(|slot| !taken(slot)) else {
            return refuse(Response::OutOfMemory, "no slot in the ledger is free");
        };
        self.last_worker = self.last_worker.wrapping_add(1);
        let id = self.last_worker;
        let mut worker = Worker {
            id,
            context: header.ctx_id,
            slot,
            link: Link::default(),
            create: Some(token),
            start_by: Instant::now().checked_add(WORKER_START),
            ending: false,
            on_exit: Vec::new(),
            blobs: 0,
            runs: 0,
            files: Vec::new(),
        };
        let settings = self
            .config
            .worker_settings(clean_name(&name, header.ctx_id), u32::try_from(slot).unwrap_or(u32::MAX));
        let start = ForWorker::WithFile(ToWorker::Start(settings), self.ledger_file.clone());
        let first = std::iter::once(start);
        for message in first.chain(self.memory.regions().iter().map(add_region)) {
            // There is no channel yet, so that nothing is sent and nothing can fail.
            let _ = worker.link.send(message);
        }
        self.workers.insert(id, worker);
        self.contexts.insert(header.ctx_id, Context { worker: id, lost: false });
        self.set_timer();
        self.tell_supervisor(Some(ToSupervisor::Start { worker: id }));
        Ok(Step::Pending)
    }

    pub(super) fn destroy_context(&mut self, token: Token, header: &Header) -> Answer {
        let Some(context) = self.contexts.remove(&header.ctx_id) else {
            return refuse(Response::InvalidContext, "there is no such context");
        };
        self.end_worker(context.worker, "the guest closed its context");
        match self.workers.get_mut(&context.worker) {
            Some(worker) => {
                worker.on_exit.push((token, None));
                Ok(Step::Pending)
            }
            None => {
                self.abandon_resources(context.worker);
                Ok(Step::Done(Response::Ok))
            }
        }
    }

    /// Ends a worker. All but its frames is settled when it is reaped, so that the guest gets no page back that
    /// a GPU may still write to.
    pub(super) fn end_worker(&mut self, id: u64, why: &str) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if worker.ending {
            return;
        }
        worker.ending = true;
        worker.start_by = None;
        // Closing the channel also takes it out of the epoll set.
        worker.link = Link::default();
        let number = worker.context;
        if let Some(context) = self.contexts.get_mut(&number)
            && context.worker == id
        {
            context.lost = true;
            guest_warn!(self.log, "context {number}: worker {id} is ended: {why}");
        } else {
            tracing::debug!("context {number}: worker {id} is ended: {why}");
        }
        self.tell_supervisor(Some(ToSupervisor::Kill { worker: id }));
        self.lose_frames(id);
        self.lose_exports(id);
    }

    /// A worker is being ended, which can take the kernel a while: other contexts do not wait for what it exports, in which
    /// nothing of the guest's memory is.
    fn lose_exports(&mut self, worker: u64) {
        let exports = self.tickets.iter().filter_map(|(key, ticket)| match ticket.asked {
            Asked::Export { resource, token } if ticket.worker == worker => Some((*key, resource, token)),
            _ => None,
        });
        let mut exports: Vec<(u64, u32, Token)> = exports.collect();
        // In the order of the commands.
        exports.sort_unstable_by_key(|(key, ..)| *key);
        for (ticket, resource, token) in exports {
            // Settling another one may have come to this one already.
            if self.tickets.remove(&ticket).is_some() {
                self.export_failed(resource, token, "the worker is ended");
            }
        }
    }

    /// A worker is gone: everything that waited for it is settled.
    fn settle_worker(&mut self, id: u64, how: &str) {
        let Some(worker) = self.workers.remove(&id) else { return };
        let number = worker.context;
        if let Some(context) = self.contexts.get_mut(&number)
            && context.worker == id
        {
            context.lost = true;
            if !worker.ending {
                guest_warn!(self.log, "context {number}: worker {id} {how}");
            }
        }
        let mut tickets: Vec<u64> = Vec::new();
        tickets.extend(self.tickets.iter().filter(|(_, asked)| asked.worker == id).map(|(key, _)| *key));
        // In the order of the commands.
        tickets.sort_unstable();
        for ticket in tickets {
            let Some(Ticket { asked, .. }) = self.tickets.remove(&ticket) else { continue };
            match asked {
                Asked::Frame(frame) => self.answer_lost(frame),
                Asked::Detach { resource, token } => self.gave_back(resource, token),
                Asked::Export { resource, token } => self.export_failed(resource, token, "the worker ended"),
                Asked::RemoveRegion => {}
            }
        }
        if let Some(token) = worker.create {
            self.commands.finish(token, Response::Unspecified);
        }
        for (token, resource) in worker.on_exit {
            match resource {
                Some(resource) => self.gave_back(resource, token),
                None => self.commands.finish(token, Response::Ok),
            }
        }
        self.revoke_shares(id);
        self.orphan_buffers(id, worker.slot);
        // A context that lives on without its worker still needs the blob for its answers.
        if self.contexts.get(&number).is_none_or(|context| context.worker != id) {
            self.abandon_resources(id);
        }
    }

    pub(super) fn hear_supervisor(&mut self, message: FromSupervisor, descriptor: Option<OwnedFd>) {
        match message {
            FromSupervisor::Started { worker, pid: Ok(pid) } => {
                tracing::debug!("worker {worker} is process {pid}");
                let Some(channel) = descriptor.map(Channel::from) else {
                    self.end_worker(worker, "the supervisor sent no channel");
                    return;
                };
                self.connect_worker(worker, channel);
            }
            FromSupervisor::Started { worker, pid: Err(why) } => {
                guest_warn!(self.log, "worker {worker} did not start: {why}");
                self.settle_worker(worker, "did not start");
            }
            FromSupervisor::Exited { worker, how } => {
                tracing::debug!("worker {worker} {how}");
                self.settle_worker(worker, &how);
            }
        }
    }

    fn connect_worker(&mut self, id: u64, channel: Channel) {
        let Some(worker) = self.workers.get_mut(&id).filter(|worker| !worker.ending) else { return };
        if let Err(error) = worker.link.connect(channel) {
            self.end_worker(id, &error.to_string());
            return;
        }
        let watched = match self.workers.get(&id).and_then(|worker| worker.link.descriptor()) {
            Some(descriptor) => self.watch(descriptor, EVENT_WORKER.saturating_add(id)),
            None => Ok(()),
        };
        if let Err(error) = watched {
            self.end_worker(id, &format!("epoll_ctl: {error}"));
            return;
        }
        self.tell_worker(id, None);
    }

    /// Queues a message for a worker, if it still listens.
    pub(super) fn tell_worker(&mut self, id: u64, message: Option<ForWorker>) {
        let Some(worker) = self.workers.get_mut(&id).filter(|worker| !worker.ending) else { return };
        let sent = match message {
            Some(message) => worker.link.send(message),
            None => worker.link.flush(),
        };
        let watched = worker.link.update_watch(&self.epoll, EVENT_WORKER.saturating_add(id));
        if worker.link.is_starved() {
            self.set_timer();
        }
        if let Err(error) = sent {
            self.end_worker(id, &error.to_string());
        } else if let Err(error) = watched {
            self.end_worker(id, &format!("epoll_ctl: {error}"));
        }
    }

    pub(super) fn poll_worker(&mut self, id: u64) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..MESSAGES_PER_TURN {
            let Some(channel) = self.workers.get(&id).and_then(|worker| worker.link.channel()) else { break };
            match link::receive::<FromWorker<'_>>(channel, &mut buffer) {
                Ok(Some((message, descriptors))) => self.hear_worker(id, message, descriptors),
                Ok(None) => break,
                Err(error) => {
                    self.end_worker(id, &error.to_string());
                    break;
                }
            }
        }
        self.buffer = buffer;
        self.tell_worker(id, None);
    }

    fn hear_worker(&mut self, id: u64, message: FromWorker<'_>, descriptors: Vec<OwnedFd>) {
        match message {
            FromWorker::Ready { kfd_major, kfd_minor, gpu_count } => {
                tracing::debug!("worker {id} is ready: KFD {kfd_major}.{kfd_minor}, {gpu_count} GPUs");
                let Some(worker) = self.workers.get_mut(&id) else { return };
                if worker.start_by.take().is_none() {
                    self.end_worker(id, "it said more than once that it is ready");
                    return;
                }
                if let Some(token) = worker.create.take() {
                    self.commands.finish(token, Response::Ok);
                }
            }
            FromWorker::Failed { message } => {
                self.end_worker(id, &format!("it cannot start: {}", for_the_log(&message)));
            }
            FromWorker::Answer { ring, ticket, bytes } => self.answer(id, ring, ticket, bytes),
            FromWorker::Done { ticket } => self.done(id, ticket),
            FromWorker::Exported { ticket, piece } => self.exported(id, ticket, piece, descriptors),
            FromWorker::Share { token, piece } => self.share(id, token, piece, descriptors),
            FromWorker::Unshare { token } => self.unshare(id, token),
        }
    }

    /// Takes a ticket of this worker that `pick` accepts; a worker that answers what was not asked is ended.
    pub(super) fn take_ticket<T>(
        &mut self,
        worker: u64,
        ticket: u64,
        pick: impl FnOnce(Asked) -> Result<T, Asked>,
    ) -> Option<T> {
        let found = match self.tickets.remove(&ticket) {
            Some(known) if known.worker == worker => match pick(known.asked) {
                Ok(found) => return Some(found),
                Err(asked) => Some(Ticket { asked, ..known }),
            },
            other => other,
        };
        if let Some(found) = found {
            self.tickets.insert(ticket, found);
        }
        self.end_worker(worker, &format!("it answered ticket {ticket}, which it does not have"));
        None
    }

    fn done(&mut self, worker: u64, ticket: u64) {
        let asked = self.take_ticket(worker, ticket, |asked| match asked {
            Asked::Detach { .. } | Asked::RemoveRegion => Ok(asked),
            other => Err(other),
        });
        if let Some(Asked::Detach { resource, token }) = asked {
            self.gave_back(resource, token);
        }
    }

    /// The VMM has changed the guest's memory. Buffers on memory that is gone are taken from the GPUs by their
    /// workers; the region's file lives until they have done so.
    /// An error leaves the memory as it was.
    pub fn update_memory(&mut self, table: &Ram) -> io::Result<()> {
        let window = &self.window;
        let change = self
            .memory
            .update(table, |file| window.has_file(file))
            .inspect_err(|error| tracing::error!("the VMM's memory table cannot be taken over: {error}"))?;
        if self.memory.has_any_own() {
            self.window.set_come_back();
        }
        self.own_regions.set(self.memory.own_by_file());
        if !change.added.is_empty() || !change.removed.is_empty() {
            tracing::debug!(
                "guest memory: {} regions new, {} gone, {} in all",
                change.added.len(),
                change.removed.len(),
                self.memory.regions().len()
            );
        }
        let hit = self.resources.values().filter(|resource| resource.lies_in(&change.removed)).count();
        if hit != 0 {
            tracing::warn!("the VMM took away guest memory under {hit} blobs: no GPU reaches it any more");
        }
        let workers: Vec<u64> = self.workers.keys().copied().collect();
        for worker in workers {
            for region in &change.removed {
                let ticket = self.new_ticket(worker, Asked::RemoveRegion, Some(crate::budget::WORKER_REPLY));
                let message = ToWorker::RemoveRegion { region: *region, ticket };
                self.tell_worker(worker, Some(ForWorker::Plain(message)));
            }
            for region in &change.added {
                self.tell_worker(worker, Some(add_region(region)));
            }
        }
        Ok(())
    }

    /// The control queue runs, after a stop or for the first time.
    pub fn start(&mut self) {
        if std::mem::take(&mut self.stopped) {
            self.clear_window();
        }
    }

    /// Begins to end everything: the ring was stopped or the device reset.
    pub fn begin_stop(&mut self) {
        self.stopping = true;
        let workers: Vec<u64> = self.workers.keys().copied().collect();
        for worker in workers {
            self.end_worker(worker, "the VMM stopped the device");
        }
    }

    /// Whether all workers are gone.
    pub fn is_stopped(&self) -> bool {
        self.workers.is_empty()
    }

    /// Gives back every command and forgets contexts, blobs and maps. Workers that are not gone yet (the stop did
    /// not wait longer) still count.
    pub fn finish_stop(&mut self) {
        let tickets = std::mem::take(&mut self.tickets);
        for (_, Ticket { asked, .. }) in tickets {
            if let Asked::Frame(frame) = asked {
                self.answer_lost(frame);
            }
        }
        for worker in self.workers.values_mut() {
            worker.on_exit.clear();
            worker.create = None;
        }
        self.commands.finish_all(Response::Unspecified);
        self.contexts.clear();
        self.resources.clear();
        self.unattached.clear();
        self.host_blobs.clear();
        self.shares.clear();
        self.forget_orphans();
        self.pooled.clear();
        self.reclaiming.clear();
        self.leave_window();
        self.stopping = false;
        self.stopped = true;
        if !self.workers.is_empty() {
            guest_warn!(self.log, "{} workers are not gone after the stop", self.workers.len());
        }
    }
}

fn add_region(region: &Region) -> ForWorker {
    let Region { id, file_offset, size, file, .. } = region;
    let message = ToWorker::AddRegion { region: *id, file_offset: *file_offset, size: *size };
    ForWorker::WithFile(message, file.clone())
}

#[cfg(test)]
pub(super) mod tests {
    use kfd_ipc::ledger::Ledger;

    use super::*;
    use crate::budget::WORKER_REPLY;
    use crate::config::DeviceConfig;

    /// A device with these workers.
    pub(in crate::session) fn session(workers: &[(u64, Option<Instant>)]) -> (Session, Channel) {
        let config = DeviceConfig {
            gpus: Vec::new(),
            gpu_count: 1,
            vram_limit: Default::default(),
            guest_memory_limit: Default::default(),
            queue_limit: Default::default(),
            cu_masks: Vec::new(),
            no_exceptions: false,
            window: 0,
            max_contexts: 2,
            pool: None,
            log: String::new(),
        };
        let (supervisor, other_end) = Channel::pair().unwrap();
        let mut session =
            Session::new(config, supervisor, Default::default(), Ledger::create(3).unwrap()).unwrap();
        for (id, start_by) in workers.iter().copied() {
            session.workers.insert(
                id,
                Worker {
                    id,
                    context: 0,
                    slot: 0,
                    link: Link::default(),
                    create: None,
                    start_by,
                    ending: false,
                    on_exit: Vec::new(),
                    blobs: 0,
                    runs: 0,
                    files: Vec::new(),
                },
            );
        }
        (session, other_end)
    }

    fn deadline(session: &mut Session, ticket: u64) -> &mut Option<Instant> {
        &mut session.tickets.get_mut(&ticket).unwrap().deadline
    }

    #[test]
    fn a_worker_that_starts_has_time_for_that_and_then_for_its_answer() {
        let now = Instant::now();
        let start_by = now + WORKER_START;
        let (mut session, _supervisor) = session(&[(1, None), (2, Some(start_by))]);
        let mut ask = |worker, patience| {
            let ticket = session.new_ticket(worker, Asked::RemoveRegion, patience);
            *deadline(&mut session, ticket)
        };
        let runs = ask(1, Some(WORKER_REPLY)).unwrap();
        assert!(runs >= now + WORKER_REPLY && runs < start_by, "{:?}", runs - now);
        assert_eq!(ask(2, Some(WORKER_REPLY)), Some(start_by + WORKER_REPLY));
        assert_eq!(ask(2, None), None, "a frame has no deadline");
    }

    #[test]
    fn what_a_held_worker_has_not_heard_of_is_not_late() {
        let (mut session, _supervisor) = session(&[(1, None), (2, None)]);
        let now = Instant::now();
        let ends = |session: &mut Session, worker| {
            session.tick();
            session.workers[&worker].ending
        };
        for worker in [1, 2] {
            assert!(session.hold_worker(worker));
        }
        let asked = session.new_ticket(1, Asked::RemoveRegion, Some(WORKER_REPLY));
        let frame = session.new_ticket(1, Asked::RemoveRegion, None);
        *deadline(&mut session, asked) = Some(now);
        assert!(!ends(&mut session, 1));
        session.let_go_of_worker(1);
        assert!(deadline(&mut session, asked).unwrap() >= now + WORKER_REPLY, "it hears of it now");
        assert_eq!(*deadline(&mut session, frame), None);
        assert!(!ends(&mut session, 1));
        // It has been told, and a later hold changes nothing about that.
        *deadline(&mut session, asked) = Some(now);
        assert!(session.hold_worker(1) && ends(&mut session, 1));
        // An export is sent to a worker that is held.
        let export = Asked::Export { resource: 1, token: Token::NONE };
        let export = session.new_ticket(2, export, Some(WORKER_REPLY));
        assert!(!ends(&mut session, 2));
        *deadline(&mut session, export) = Some(now);
        assert!(ends(&mut session, 2));
    }
}
