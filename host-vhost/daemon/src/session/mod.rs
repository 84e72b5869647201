//! The device's state and what each command does to it.
//!
//! One thread runs all of it (the one that serves the virtqueues), and it never waits: messages to workers and
//! to the supervisor are queued when their sockets are full, the VMM is asked by [`crate::mapper`], and a command
//! whose answer has to come from elsewhere stays in flight until it comes.

mod blob;
mod completion;
mod context;
mod frame;
mod host;
pub(crate) mod link;
mod orphan;
mod pool;
mod room;
mod share;
mod window;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kfd_ipc::ledger::Ledger;
use kfd_ipc::supervisor::{FromSupervisor, ToSupervisor};
use kfd_ipc::{Channel, MAX_MESSAGE_BYTES};
use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use virtio_kfd_protocol::ShareToken;
use virtio_kfd_protocol::version::{CAPSET_ID, CAPSET_VERSION, Capset, Features};

use crate::budget::WORKER_REPLY;
use crate::chain::{ChainError, Input, Output, Ram};
use crate::command::{self, Command, Header, Response};
use crate::config::DeviceConfig;
use crate::guest_warn;
use crate::mapper::{Mapper, OwnRegions, SharedBackend, WINDOW_ID};
use crate::memory::Memory;
use crate::pool::Pool;
use crate::rate::LogBudget;

pub use completion::{Commands, Completed, Token};
pub use pool::Reclaiming;

use blob::Resource;
use context::{Context, Worker};
use link::Link;
use orphan::Orphans;
use share::Share;
use window::Window;

/// Epoll data of the descriptors that are not a worker's channel.
const EVENT_SUPERVISOR: u64 = 0;
const EVENT_MAPPER: u64 = 1;
const EVENT_TIMER: u64 = 2;
/// Epoll data of the first worker.
const EVENT_WORKER: u64 = 16;

/// Messages taken from one channel before the others get their turn.
const MESSAGES_PER_TURN: usize = 64;

/// How often deadlines are looked at while there are any.
const TICK: Duration = Duration::from_secs(1);

/// How far a command came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It is done.
    Done(Response),
    /// Something else will finish it.
    Pending,
}

/// A command that is refused.
#[derive(Debug)]
struct Refusal {
    response: Response,
    why: String,
}

type Answer = Result<Step, Refusal>;

fn refuse<T>(response: Response, why: impl fmt::Display) -> Result<T, Refusal> {
    Err(Refusal { response, why: why.to_string() })
}

impl From<ChainError> for Refusal {
    fn from(error: ChainError) -> Self {
        Refusal { response: Response::InvalidParameter, why: error.to_string() }
    }
}

/// Something that a worker was asked and has not answered.
#[derive(Debug)]
struct Ticket {
    worker: u64,
    asked: Asked,
    since: Instant,
    deadline: Option<Instant>,
}

impl Ticket {
    /// Whether it still waits here, in the link of a worker that is held since then. Exports do not.
    fn is_held(&self, held_since: Option<Instant>) -> bool {
        let export = matches!(self.asked, Asked::Export { .. });
        !export && held_since.is_some_and(|held_since| self.since >= held_since)
    }
}

#[derive(Debug)]
enum Asked {
    Frame(frame::Frame),
    Detach { resource: u32, token: Token },
    Export { resource: u32, token: Token },
    RemoveRegion,
}

/// The device's state.
#[derive(Debug)]
pub struct Session {
    config: DeviceConfig,
    acked: u64,
    memory: Memory,
    commands: Commands,
    contexts: HashMap<u32, Context>,
    workers: HashMap<u64, Worker>,
    resources: HashMap<u32, Resource>,
    /// Those that no context has yet, and those of host memory: what one command looks through is bounded by their
    /// own limits, not by what all contexts have.
    unattached: HashSet<u32>,
    host_blobs: HashSet<u32>,
    shares: HashMap<ShareToken, Share>,
    /// What all contexts use together; the last slot is for what outlives its context.
    ledger: Ledger,
    ledger_file: Arc<File>,
    orphans: Orphans,
    pool: Option<Arc<Pool>>,
    /// Blobs over files of the pool, by name: number, and serial.
    pooled: HashMap<ShareToken, (u32, u64)>,
    /// Blobs that the pool takes back, and the guest's own command that gives one up meanwhile.
    reclaiming: HashMap<u32, Option<Token>>,
    tickets: HashMap<u64, Ticket>,
    window: Window,
    mapper: Mapper,
    /// What the mapper waits for.
    own_regions: Arc<OwnRegions>,
    supervisor: Link<ToSupervisor>,
    supervisor_lost: bool,
    log: LogBudget,
    last_worker: u64,
    last_ticket: u64,
    last_serial: u64,
    queue_size: u16,
    crowded_said: bool,
    epoll: OwnedFd,
    timer: OwnedFd,
    timer_set: bool,
    stopping: bool,
    stopped: bool,
    buffer: Vec<u8>,
}

impl Session {
    /// A device without contexts.
    pub fn new(
        config: DeviceConfig,
        supervisor: Channel,
        backend: SharedBackend,
        ledger: Ledger,
    ) -> io::Result<Self> {
        let ledger_file = Arc::new(File::from(ledger.file().try_clone_to_owned()?));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let timer = rustix::time::timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )?;
        let own_regions = Arc::new(OwnRegions::default());
        let mapper = Mapper::start(backend, own_regions.clone(), WINDOW_ID)?;
        let mut link = Link::default();
        link.connect(supervisor).map_err(io::Error::other)?;
        let session = Session {
            window: Window::new(config.window),
            config,
            acked: 0,
            memory: Memory::default(),
            commands: Commands::default(),
            contexts: HashMap::new(),
            workers: HashMap::new(),
            resources: HashMap::new(),
            unattached: HashSet::new(),
            host_blobs: HashSet::new(),
            shares: HashMap::new(),
            ledger,
            ledger_file,
            orphans: Orphans::default(),
            pool: None,
            pooled: HashMap::new(),
            reclaiming: HashMap::new(),
            tickets: HashMap::new(),
            mapper,
            own_regions,
            supervisor: link,
            supervisor_lost: false,
            log: LogBudget::default(),
            last_worker: 0,
            last_ticket: 0,
            last_serial: 0,
            queue_size: 0,
            crowded_said: false,
            epoll,
            timer,
            timer_set: false,
            stopping: false,
            stopped: false,
            buffer: vec![0; MAX_MESSAGE_BYTES],
        };
        session.watch(session.mapper.descriptor(), EVENT_MAPPER)?;
        session.watch(session.timer.as_fd(), EVENT_TIMER)?;
        if let Some(descriptor) = session.supervisor.descriptor() {
            session.watch(descriptor, EVENT_SUPERVISOR)?;
        }
        Ok(session)
    }

    fn watch(&self, descriptor: BorrowedFd<'_>, event: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(event);
        Ok(epoll::add(&self.epoll, descriptor, data, epoll::EventFlags::IN)?)
    }

    /// Readable when [`Session::poll`] has something to do.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The guest's memory.
    pub fn ram(&self) -> &Arc<Ram> {
        self.memory.ram()
    }

    /// The budget for logs that the guest causes.
    pub fn log(&mut self) -> &mut LogBudget {
        &mut self.log
    }

    /// Features that the guest's driver took.
    pub fn set_features(&mut self, acked: u64) {
        self.acked = acked;
    }

    /// The VMM has asked for the window, so it will have one.
    pub fn enable_window(&mut self) {
        self.window.enable();
    }

    /// Whether the VMM has a window.
    pub fn has_window(&self) -> bool {
        self.window.is_enabled()
    }

    /// Whether the supervisor is gone: nothing can be started or ended any more.
    pub fn is_orphaned(&self) -> bool {
        self.supervisor_lost
    }

    /// Whether another command can be taken from a queue of this length: a driver has at most that many in flight.
    pub fn has_room(&self, queue_size: u16) -> bool {
        self.commands.len() < queue_size.into()
    }

    /// What can be given back to the guest.
    pub fn take_completed(&mut self) -> Vec<Completed> {
        self.commands.take_completed()
    }

    /// A command of the control queue.
    pub fn command(&mut self, mut input: Input<'_>, output: Output) -> Result<(), (ChainError, Output)> {
        let header: Header = match input.read() {
            Ok(header) => header,
            Err(error) => return Err((error, output)),
        };
        if output.capacity() < size_of::<Header>() as u64 {
            let found = output.capacity();
            return Err((ChainError::Short { expected: size_of::<Header>(), found }, output));
        }
        let token = self.commands.begin(header, output);
        let answer = self.execute(token, &header, &mut input);
        self.settle_answer(token, &header, answer);
        Ok(())
    }

    fn settle_answer(&mut self, token: Token, header: &Header, answer: Answer) {
        match answer {
            Ok(Step::Done(response)) => self.commands.finish(token, response),
            Ok(Step::Pending) => {}
            Err(Refusal { response, why }) => {
                let kind = header.kind;
                guest_warn!(self.log, "context {}: command {kind:#x} refused: {why}", header.ctx_id);
                self.commands.finish(token, response);
            }
        }
    }

    fn execute(&mut self, token: Token, header: &Header, input: &mut Input<'_>) -> Answer {
        let command = Command::from_number(header.kind);
        match command {
            Command::GetCapsetInfo => return self.capset_info(input.read()?),
            Command::GetCapset => return self.capset(input.read()?),
            Command::Other(number) => {
                return refuse(
                    Response::Unspecified,
                    format_args!("command {number:#x} belongs to a display or 3D device, this one computes"),
                );
            }
            _ => {}
        }
        if self.acked & command::FEATURES != command::FEATURES {
            return refuse(
                Response::Unspecified,
                "the guest's driver did not take VIRGL, RESOURCE_BLOB and CONTEXT_INIT",
            );
        }
        match command {
            Command::CtxCreate => self.create_context(token, header, input),
            Command::CtxDestroy => self.destroy_context(token, header),
            Command::CtxAttachResource => self.attach_resource(token, header, input.read()?),
            Command::CtxDetachResource => self.detach_resource(header, input.read()?),
            Command::Submit3d => self.submit(token, header, input),
            Command::ResourceCreateBlob => self.create_blob(token, header, input),
            Command::ResourceUnref => {
                let request: command::ResourceId = input.read()?;
                self.on_resource(request.resource_id, token, *header, blob::Operation::Unref)
            }
            Command::ResourceMapBlob => {
                let request: command::MapBlob = input.read()?;
                let operation = blob::Operation::Map { offset: request.offset };
                self.on_resource(request.resource_id, token, *header, operation)
            }
            Command::ResourceUnmapBlob => {
                let request: command::ResourceId = input.read()?;
                self.on_resource(request.resource_id, token, *header, blob::Operation::Unmap)
            }
            Command::GetCapsetInfo | Command::GetCapset | Command::Other(_) => {
                refuse(Response::Unspecified, "not a command of this device")
            }
        }
    }

    fn capset_info(&self, request: command::GetCapsetInfo) -> Answer {
        if request.capset_index != 0 {
            return refuse(
                Response::InvalidParameter,
                format_args!("capset_index is {}, there is one capset", request.capset_index),
            );
        }
        Ok(Step::Done(Response::CapsetInfo(command::CapsetInfo {
            capset_id: CAPSET_ID,
            capset_max_version: CAPSET_VERSION,
            capset_max_size: size_of::<Capset>() as u32,
            padding: 0,
        })))
    }

    fn capset(&self, request: command::GetCapset) -> Answer {
        if request.capset_id != CAPSET_ID || request.capset_version != CAPSET_VERSION {
            return refuse(
                Response::InvalidParameter,
                format_args!(
                    "capset {} version {} asked for, {CAPSET_ID} version {CAPSET_VERSION} is served",
                    request.capset_id, request.capset_version
                ),
            );
        }
        let mut features = Features::GUEST_MEMORY;
        features.set(Features::EXCEPTIONS, !self.config.no_exceptions);
        features.set(Features::HOST_BLOBS, self.window.is_enabled());
        Ok(Step::Done(Response::Capset(Capset::announce(features, self.config.gpu_count))))
    }

    fn new_ticket(&mut self, worker: u64, asked: Asked, patience: Option<Duration>) -> u64 {
        self.last_ticket = self.last_ticket.wrapping_add(1);
        let now = Instant::now();
        // A worker that still starts hears of it only then.
        let start_by = self.workers.get(&worker).and_then(|worker| worker.start_by);
        let from = start_by.map_or(now, |start_by| start_by.max(now));
        let deadline = patience.and_then(|patience| from.checked_add(patience));
        self.tickets.insert(self.last_ticket, Ticket { worker, asked, since: now, deadline });
        if deadline.is_some() {
            self.set_timer();
        }
        self.last_ticket
    }

    /// A worker was held since then, and hears only now of what it was asked meanwhile.
    pub(super) fn restart_deadlines(&mut self, worker: u64, since: Instant) {
        let restarted = Instant::now().checked_add(WORKER_REPLY);
        for ticket in self.tickets.values_mut().filter(|ticket| ticket.worker == worker) {
            if ticket.is_held(Some(since)) {
                // A frame has none; one that still starts has longer.
                ticket.deadline =
                    ticket.deadline.map(|deadline| restarted.map_or(deadline, |r| r.max(deadline)));
            }
        }
    }

    fn set_timer(&mut self) {
        if self.timer_set {
            return;
        }
        let once = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec::try_from(TICK).unwrap_or_default(),
        };
        match rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.timer_set = true,
            Err(error) => tracing::error!("timerfd_settime: {error}: deadlines do not work"),
        }
    }

    /// Does what has become possible: messages of workers and of the supervisor, outcomes of the mapper, deadlines.
    pub fn poll(&mut self) {
        let mut events = Vec::with_capacity(64);
        let now = Timespec::default();
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&now)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return,
            Err(error) => {
                tracing::error!("epoll_wait: {error}");
                return;
            }
        }
        for event in events {
            let data = event.data;
            match data.u64() {
                EVENT_SUPERVISOR => self.poll_supervisor(),
                EVENT_MAPPER => {
                    for outcome in self.mapper.outcomes() {
                        self.map_outcome(outcome);
                    }
                }
                EVENT_TIMER => self.tick(),
                worker => self.poll_worker(worker.saturating_sub(EVENT_WORKER)),
            }
        }
    }

    fn poll_supervisor(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..MESSAGES_PER_TURN {
            let Some(channel) = self.supervisor.channel() else { break };
            match link::receive::<FromSupervisor>(channel, &mut buffer) {
                Ok(Some((message, descriptors))) => {
                    self.hear_supervisor(message, descriptors.into_iter().next());
                }
                Ok(None) => break,
                Err(error) => {
                    tracing::error!("supervisor: {error}");
                    self.supervisor_lost = true;
                    break;
                }
            }
        }
        self.buffer = buffer;
        self.tell_supervisor(None);
    }

    fn tell_supervisor(&mut self, message: Option<ToSupervisor>) {
        let sent = match message {
            Some(message) => self.supervisor.send(message),
            None => self.supervisor.flush(),
        };
        if let Err(error) = sent {
            tracing::error!("supervisor: {error}");
            self.supervisor_lost = true;
        }
        if let Err(error) = self.supervisor.update_watch(&self.epoll, EVENT_SUPERVISOR) {
            tracing::error!("supervisor: epoll_ctl: {error}");
        }
    }

    fn tick(&mut self) {
        let mut expirations = [0; 8];
        // An early tick finds nothing overdue and sets the timer again.
        let _ = rustix::io::read(&self.timer, &mut expirations);
        self.timer_set = false;
        let now = Instant::now();
        let overdue = |deadline: &Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        let mut late: Vec<u64> = Vec::new();
        // What waits for another worker, or for the VMM, has not been asked yet.
        let is_held = |ticket: &Ticket| {
            let worker = self.workers.get(&ticket.worker);
            ticket.is_held(worker.and_then(|worker| worker.link.held_since()))
        };
        let answered_late = |ticket: &&Ticket| overdue(&ticket.deadline) && !is_held(ticket);
        late.extend(self.tickets.values().filter(answered_late).map(|ticket| ticket.worker));
        late.extend(self.workers.values().filter(|worker| overdue(&worker.start_by)).map(|w| w.id));
        late.extend(self.silent_workers(now));
        for worker in late {
            self.end_worker(worker, "it did not answer in time");
        }
        let starved = self.workers.values().filter(|worker| worker.link.is_starved()).map(|worker| worker.id);
        for worker in starved.collect::<Vec<u64>>() {
            self.tell_worker(worker, None);
        }
        let waits = self.tickets.values().any(|ticket| ticket.deadline.is_some())
            || self.workers.values().any(|worker| worker.start_by.is_some())
            || self.is_crowded();
        if waits {
            self.set_timer();
        }
    }
}
