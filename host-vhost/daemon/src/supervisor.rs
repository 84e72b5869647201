//! The supervisor: what the operator starts. It listens, starts a device process for each connection of the VMM and
//! workers when the device asks for them, and ends them. It reads nothing that a guest wrote.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use kfd_ipc::supervisor::{FromSupervisor, ToSupervisor};
use kfd_ipc::worker::{FromWorker, ToWorker};
use kfd_ipc::{Channel, IpcError, MAX_MESSAGE_BYTES};
use kfd_sandbox::Role;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use thiserror::Error;

use crate::budget::WORKER_START;
use crate::cli::{Args, Kfd};
use crate::config::{DeviceConfig, Limit};
use crate::device::UNUSABLE;
use crate::session::link::{Link, Message, receive};
use crate::socket::{Socket, SocketError};
use crate::spawn::{keep_inherited_to_ourselves, spawn};
use crate::vhost::NEEDS;
use crate::workers::{WorkerProgram, Workers, beside, describe};

/// Environment variable by which a worker's model library learns the profile.
const MODEL_VARIABLE: &str = "VIRTIO_KFD_MODEL";

/// Environment variable that names the directory in which each model lets tests see its GPU memory. Workers get it
/// from this process's own environment.
const MODEL_DEBUG_VARIABLE: &str = "VIRTIO_KFD_MODEL_DEBUG";

/// Environment variable that names the file by which models count the memory of one machine together.
const MODEL_MACHINE_VARIABLE: &str = "VIRTIO_KFD_MODEL_MACHINE";

/// Environment variable by which a worker learns what to log.
const LOG_VARIABLE: &str = "VIRTIO_KFD_LOG";

/// Device processes that may crash one after the other before the supervisor gives up.
const MAX_CRASHES: u32 = 5;

/// A device process that lived longer did not crash because of how it was started.
const LONG_LIFE: Duration = Duration::from_secs(10);

/// How long a device process may live after it has closed its channel.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);

/// Messages taken from the device before signals and workers that have ended get their turn.
const MESSAGES_PER_TURN: usize = 64;

/// Messages that wait for the device before it is not heard any more. What it has asked for still comes to this.
const MAX_BACKLOG: usize = 1024;

/// How a line of the model's library begins.
const MODEL_SAYS: &str = "kfd-model: ";

/// Worker number of the probe; the device counts from 1.
const PROBE: u64 = 0;

/// Why the supervisor ends with an error.
#[derive(Debug, Error)]
pub enum SupervisorError {
    /// No socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// One path for two devices.
    #[error("--socket and --memory-socket are both {0}: each device has a socket of its own")]
    SamePath(PathBuf),
    /// More memory than there is.
    #[error("--memory-size: {mebibytes} MiB, and this host has {host} MiB of memory and swap")]
    NoSuchMemory {
        /// As given, in MiB.
        mebibytes: u64,
        /// What the host has, in MiB.
        host: u64,
    },
    /// A program or library is not there.
    #[error("{option}: {path} does not exist")]
    Missing {
        /// The option that names it.
        option: &'static str,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// KFD cannot be used as the operator asked.
    #[error("{0}")]
    Probe(String),
    /// A worker did not even say why.
    #[error("the worker {path} {how} before it was ready")]
    ProbeEnded {
        /// The program.
        path: PathBuf,
        /// How it ended.
        how: String,
    },
    /// Nothing matches `--gpu`.
    #[error("--gpu {0}: no GPU of this host matches")]
    NoGpu(String),
    /// The only VMM could not use the device.
    #[error("this VMM cannot use the device: {NEEDS}")]
    Unusable,
    /// The device process failed.
    #[error("the device process {0}")]
    Device(String),
    /// Something that it needs of the system.
    #[error("{what}: {error}")]
    System {
        /// What.
        what: &'static str,
        /// Why not.
        error: io::Error,
    },
    /// It cannot be confined.
    #[error(transparent)]
    Sandbox(#[from] kfd_sandbox::SandboxError),
    /// A channel failed.
    #[error(transparent)]
    Ipc(#[from] IpcError),
}

fn system<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> SupervisorError {
    move |error| SupervisorError::System { what, error: error.into() }
}

/// Runs until it is told to end, or the only connection is over.
pub fn run(args: &Args) -> Result<(), SupervisorError> {
    crate::init_log(&args.log);
    // Linux has this from 5.11.
    keep_inherited_to_ourselves().map_err(system("close_range"))?;
    let program = worker_program(args)?;
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signals.add(signal);
    }
    // Children start with an empty mask: std resets it.
    signals.thread_block().map_err(system("sigprocmask"))?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .map_err(system("signalfd"))?;
    check_memory(args)?;
    // The socket first: what is wrong with it is found out without starting anything.
    let mut socket = match (&args.socket, args.fd) {
        (Some(path), _) => Socket::bind("--socket", path)?,
        (None, Some(number)) => Socket::inherit(number)?,
        (None, None) => return Err(SocketError::None.into()),
    };
    let bind = |path: &PathBuf| Socket::bind("--memory-socket", path);
    let memory = args.memory_socket.as_ref().map(bind).transpose()?;
    // After the bind, since a socket may lie where only root's capabilities reach.
    let sandbox = kfd_sandbox::enter(Role::Supervisor { model: matches!(args.kfd, Kfd::Model(_)) })?;
    tracing::debug!("supervisor: {sandbox}");
    socket.start_relay()?;
    let mut config = DeviceConfig {
        gpus: args.gpus.clone(),
        gpu_count: 0,
        vram_limit: Limit { vm: args.vram_limit, process: args.vram_limit_per_process },
        guest_memory_limit: Limit {
            vm: args.guest_memory_limit,
            process: args.guest_memory_limit_per_process,
        },
        queue_limit: Limit {
            vm: args.max_queues.map(u64::from),
            process: Some(args.max_queues_per_process.into()),
        },
        cu_masks: args.cu_masks.clone(),
        no_exceptions: args.no_exceptions,
        window: args.shmem_size,
        max_contexts: args.max_contexts,
        pool: memory.as_ref().and(args.memory_size),
        log: args.log.clone(),
    };
    let mut workers = Workers::new(program, args.max_contexts as usize);
    config.gpu_count = probe(&mut workers, &config)?;
    match config.gpu_count {
        0 if !config.gpus.is_empty() => return Err(SupervisorError::NoGpu(config.gpus.join(", "))),
        0 => tracing::warn!("this host has no GPU that KFD drives: the VM gets none"),
        1 => tracing::info!("the VM gets 1 GPU of {}", origin(&args.kfd)),
        count => tracing::info!("the VM gets {count} GPUs of {}", origin(&args.kfd)),
    }
    match (&args.socket, &args.memory_socket) {
        (Some(socket), Some(memory)) => {
            tracing::info!(
                "listening on {}, for the memory device on {}",
                socket.display(),
                memory.display()
            );
        }
        (Some(socket), None) => tracing::info!("listening on {}", socket.display()),
        (None, Some(memory)) => tracing::info!("listening for the memory device on {}", memory.display()),
        (None, None) => {}
    }
    let config = serde_json::to_string(&config)
        .map_err(|error| SupervisorError::System { what: "configuration", error: error.into() })?;
    let mut supervisor = Supervisor { signals, socket, memory, workers, config };
    let once = args.once || supervisor.socket.is_connected();
    let ended = supervisor.serve(once);
    supervisor.workers.end_all();
    ended
}

/// Whose GPUs they are.
fn origin(kfd: &Kfd) -> String {
    match kfd {
        Kfd::Real => "this host".to_owned(),
        Kfd::Model(profile) => format!("the model {profile}"),
    }
}

/// What is wrong with the memory device is said before anything is made.
fn check_memory(args: &Args) -> Result<(), SupervisorError> {
    let place = |path: &PathBuf| {
        // Of the socket itself there may be nothing yet.
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new(".")).canonicalize().ok()?;
        Some(directory.join(path.file_name()?))
    };
    if let (Some(socket), Some(memory)) = (&args.socket, &args.memory_socket)
        && place(socket).is_some_and(|socket| place(memory) == Some(socket))
    {
        return Err(SupervisorError::SamePath(memory.clone()));
    }
    let Some(size) = args.memory_size else { return Ok(()) };
    let host = nix::sys::sysinfo::sysinfo().map_err(system("sysinfo"))?;
    let host = host.ram_total().saturating_add(host.swap_total());
    if size > host {
        return Err(SupervisorError::NoSuchMemory { mebibytes: size >> 20, host: host >> 20 });
    }
    Ok(())
}

fn worker_program(args: &Args) -> Result<WorkerProgram, SupervisorError> {
    let find = |given: &Option<PathBuf>, name: &str, option: &'static str| {
        let path = match given {
            Some(path) => path.clone(),
            None => beside(name).map_err(system("the path of this program"))?,
        };
        // A path without a slash would be searched for in PATH, or by the dynamic linker.
        match path.canonicalize() {
            Ok(path) => Ok(path),
            Err(_) => Err(SupervisorError::Missing { option, path }),
        }
    };
    let path = find(&args.worker, "kfd-worker", "--worker")?;
    let mut environment: Vec<(OsString, OsString)> = vec![(LOG_VARIABLE.into(), args.log.clone().into())];
    if let Kfd::Model(profile) = &args.kfd {
        let library = find(&args.model_library, "libkfd_model_preload.so", "--model-library")?;
        environment.push(("LD_PRELOAD".into(), library.into()));
        environment.push((MODEL_VARIABLE.into(), profile.clone().into()));
        if let Some(directory) = std::env::var_os(MODEL_DEBUG_VARIABLE) {
            environment.push((MODEL_DEBUG_VARIABLE.into(), directory));
        }
        let machine = match std::env::var_os(MODEL_MACHINE_VARIABLE) {
            Some(machine) => machine,
            None => model_machine().map_err(system("memory for the machine of the KFD model"))?.into(),
        };
        environment.push((MODEL_MACHINE_VARIABLE.into(), machine));
    }
    Ok(WorkerProgram { path, environment })
}

/// A file that is the machine of all workers, by a path that they can open. It is there as long as this process.
fn model_machine() -> io::Result<String> {
    let file = rustix::fs::memfd_create(c"kfd-model-machine", rustix::fs::MemfdFlags::CLOEXEC)?;
    Ok(format!("/proc/{}/fd/{}", std::process::id(), file.into_raw_fd()))
}

/// Starts one worker and ends it again, so that what is wrong with KFD or the selection of GPUs is said now.
/// Returns the number of GPUs.
fn probe(workers: &mut Workers, config: &DeviceConfig) -> Result<u32, SupervisorError> {
    let (channel, stderr) = workers.start_heard(PROBE).map_err(SupervisorError::Probe)?;
    let answer = ask(workers, &channel, config);
    workers.end_all();
    let mut said = String::new();
    if let Some(mut stderr) = stderr {
        // What cannot be read is only a log.
        let _ = stderr.read_to_string(&mut said);
    }
    // Without its model a worker finds no /dev/kfd. That would be told as well, and would be the wrong sentence.
    let complaint = said.lines().find_map(|line| line.strip_prefix(MODEL_SAYS));
    match (answer, complaint) {
        (Err(_), Some(complaint)) => Err(SupervisorError::Probe(format!("--kfd model: {complaint}"))),
        (answer, _) => {
            // To where it would have gone.
            let _ = io::stderr().write_all(said.as_bytes());
            answer
        }
    }
}

/// Waits until the worker is ready. Returns the number of GPUs that it has found.
fn ask(workers: &mut Workers, channel: &Channel, config: &DeviceConfig) -> Result<u32, SupervisorError> {
    match channel.send(&ToWorker::Start(config.worker_settings("probe".to_owned(), 0)), &[]) {
        // It has ended already; how is found out below.
        Ok(()) | Err(IpcError::Closed) => {}
        Err(error) => return Err(error.into()),
    }
    let deadline = PollTimeout::try_from(WORKER_START).unwrap_or(PollTimeout::MAX);
    let mut waiting = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
    let ready = loop {
        match poll(&mut waiting, deadline) {
            Err(Errno::EINTR) => {}
            other => break other.map_err(system("poll"))?,
        }
    };
    if ready == 0 {
        let path = workers.program().display();
        let seconds = WORKER_START.as_secs();
        return Err(SupervisorError::Probe(format!("the worker {path} was not ready in {seconds} seconds")));
    }
    let mut buffer = vec![0; MAX_MESSAGE_BYTES];
    match channel.receive::<FromWorker<'_>>(&mut buffer) {
        Ok((FromWorker::Ready { kfd_major, kfd_minor, gpu_count }, _)) => {
            tracing::debug!("KFD {kfd_major}.{kfd_minor}, {gpu_count} GPUs");
            Ok(gpu_count)
        }
        Ok((FromWorker::Failed { message }, _)) => Err(SupervisorError::Probe(message)),
        Ok((other, _)) => {
            Err(SupervisorError::Probe(format!("the worker said {other:?} before it was ready")))
        }
        Err(IpcError::Closed) => {
            let how = wait_for(workers, PROBE);
            Err(SupervisorError::ProbeEnded { path: workers.program().into(), how })
        }
        Err(error) => Err(error.into()),
    }
}

/// A worker has closed its channel: it is about to end.
fn wait_for(workers: &mut Workers, worker: u64) -> String {
    let end = Instant::now().checked_add(Duration::from_secs(2));
    while end.is_some_and(|end| Instant::now() < end) {
        if let Some((_, how)) = workers.reap().into_iter().find(|(number, _)| *number == worker) {
            return how;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    "closed its channel".to_owned()
}

struct Supervisor {
    signals: SignalFd,
    socket: Socket,
    memory: Option<Socket>,
    workers: Workers,
    config: String,
}

/// How a connection ended.
enum Ended {
    Device(ExitStatus),
    Told(Signal),
}

impl Supervisor {
    fn serve(&mut self, once: bool) -> Result<(), SupervisorError> {
        let mut crashes = 0u32;
        loop {
            let started = Instant::now();
            match self.serve_connection()? {
                Ended::Told(signal) => {
                    tracing::info!("{signal}: ending");
                    return Ok(());
                }
                Ended::Device(status) if status.success() => {
                    crashes = 0;
                    if once {
                        return Ok(());
                    }
                }
                // No fault of the device's, and said in the log by now.
                Ended::Device(status) if status.code() == Some(UNUSABLE.into()) => {
                    crashes = 0;
                    if once {
                        return Err(SupervisorError::Unusable);
                    }
                }
                Ended::Device(status) => {
                    let how = describe(status);
                    if started.elapsed() > LONG_LIFE {
                        crashes = 0;
                    }
                    crashes = crashes.saturating_add(1);
                    if once || crashes >= MAX_CRASHES {
                        return Err(SupervisorError::Device(how));
                    }
                    tracing::error!("the device process {how}; waiting for the next connection");
                }
            }
        }
    }

    /// One device process, from its start to its end.
    fn serve_connection(&mut self) -> Result<Ended, SupervisorError> {
        let (ours, theirs) = Channel::pair()?;
        // A device that does not read may not hold up its supervisor.
        let mut link = Link::default();
        link.connect(ours)?;
        let program = std::env::current_exe().map_err(system("the path of this program"))?;
        let mut command = Command::new(program);
        command.arg("--device-process").arg(&self.config).env_clear();
        let mut descriptors = vec![theirs.as_fd(), self.socket.as_fd()];
        descriptors.extend(self.memory.as_ref().map(AsFd::as_fd));
        let mut device =
            spawn(command, &descriptors).map_err(system("the device process cannot be started"))?;
        drop(theirs);
        let ended = self.attend(&mut device, &mut link);
        if !matches!(ended, Ok(Ended::Device(_))) {
            // Fails only if it has ended by itself.
            let _ = device.kill();
            let _ = device.wait();
        }
        self.workers.end_all();
        ended
    }

    fn attend(&mut self, device: &mut Child, link: &mut Link<ForDevice>) -> Result<Ended, SupervisorError> {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let mut closed: Option<Instant> = None;
        loop {
            let mut waiting = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            let mut patience = PollTimeout::NONE;
            match link.descriptor().filter(|_| closed.is_none()) {
                Some(descriptor) => {
                    let mut flags = PollFlags::empty();
                    flags.set(PollFlags::POLLIN, link.backlog() < MAX_BACKLOG);
                    flags.set(PollFlags::POLLOUT, link.is_waiting());
                    waiting.push(PollFd::new(descriptor, flags));
                }
                None => patience = PollTimeout::from(100u8),
            }
            if link.is_starved() {
                patience = PollTimeout::from(100u8);
            }
            match poll(&mut waiting, patience) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(system("poll")(error)),
            }
            while let Some(info) = self.signals.read_signal().map_err(system("signalfd"))? {
                match i32::try_from(info.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok()) {
                    Some(Signal::SIGCHLD) | None => {}
                    Some(signal) => return Ok(Ended::Told(signal)),
                }
            }
            let mut heard = if closed.is_none() { link.flush() } else { Ok(()) };
            for (worker, how) in self.workers.reap() {
                heard =
                    heard.and_then(|()| link.send(ForDevice::plain(FromSupervisor::Exited { worker, how })));
            }
            if let Some(status) = device.try_wait().map_err(system("waitpid"))? {
                return Ok(Ended::Device(status));
            }
            if closed.is_none() {
                heard = heard.and_then(|()| self.read_device(link, &mut buffer));
            }
            match heard {
                Ok(()) => {}
                // A device that exits in good order closes its channel an instant before it is gone.
                Err(IpcError::Closed) => {
                    closed.get_or_insert_with(Instant::now);
                }
                Err(error) => {
                    tracing::error!("the device process is ended: {error}");
                    // Fails only if it has ended by itself; a signal reports its end either way.
                    let _ = device.kill();
                    closed.get_or_insert_with(Instant::now);
                }
            }
            if closed.is_some_and(|since| since.elapsed() > EXIT_PATIENCE) {
                // As above.
                let _ = device.kill();
            }
        }
    }

    /// Does what the device asks, for one turn: signals and workers that have ended get theirs in any case. A device
    /// that does not read what it is told is not heard.
    fn read_device(&mut self, link: &mut Link<ForDevice>, buffer: &mut [u8]) -> Result<(), IpcError> {
        for _ in 0..MESSAGES_PER_TURN {
            if link.backlog() >= MAX_BACKLOG {
                break;
            }
            let Some(channel) = link.channel() else { break };
            let Some((message, _)) = receive::<ToSupervisor>(channel, buffer)? else { break };
            match message {
                ToSupervisor::Kill { worker } => self.workers.kill(worker),
                ToSupervisor::Start { worker } => {
                    let (pid, end) = match self.workers.start(worker) {
                        Ok((pid, end)) => (Ok(pid), Some(end)),
                        Err(why) => (Err(why), None),
                    };
                    link.send(ForDevice { message: FromSupervisor::Started { worker, pid }, end })?;
                }
            }
        }
        Ok(())
    }
}

/// A message to the device, and the device's end of the channel to a worker.
struct ForDevice {
    message: FromSupervisor,
    end: Option<Channel>,
}

impl ForDevice {
    fn plain(message: FromSupervisor) -> Self {
        ForDevice { message, end: None }
    }
}

impl Message for ForDevice {
    fn send(&self, channel: &Channel) -> Result<(), IpcError> {
        let end: Vec<BorrowedFd<'_>> = self.end.iter().map(AsFd::as_fd).collect();
        channel.send(&self.message, &end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_floods_gets_turns_and_one_that_reads_late_loses_nothing() {
        const REQUESTS: u64 = 3000;
        let directory = tempfile::tempdir().unwrap();
        let program = WorkerProgram { path: directory.path().join("none"), environment: Vec::new() };
        let mut supervisor = Supervisor {
            signals: SignalFd::with_flags(&SigSet::empty(), SfdFlags::SFD_CLOEXEC).unwrap(),
            socket: Socket::bind("--socket", &directory.path().join("s")).unwrap(),
            memory: None,
            workers: Workers::new(program, 8),
            config: String::new(),
        };
        let (ours, device) = Channel::pair().unwrap();
        let mut link = Link::default();
        link.connect(ours).unwrap();
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        // The device asks for workers, which cannot be started, and reads no answer.
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                for worker in 0..REQUESTS {
                    device.send(&ToSupervisor::Start { worker }, &[]).unwrap();
                }
            });
            while link.backlog() < MAX_BACKLOG {
                let before = link.backlog();
                supervisor.read_device(&mut link, &mut buffer).unwrap();
                assert!(link.backlog() <= before + MESSAGES_PER_TURN);
            }
            supervisor.read_device(&mut link, &mut buffer).unwrap();
            assert_eq!(link.backlog(), MAX_BACKLOG, "bounded");
            // Now it reads.
            let mut theirs = vec![0; MAX_MESSAGE_BYTES];
            for expected in 0..REQUESTS {
                link.flush().unwrap();
                supervisor.read_device(&mut link, &mut buffer).unwrap();
                while link.backlog() == 0 && !asking.is_finished() {
                    supervisor.read_device(&mut link, &mut buffer).unwrap();
                    std::thread::yield_now();
                }
                match device.receive::<FromSupervisor>(&mut theirs).unwrap().0 {
                    FromSupervisor::Started { worker, pid: Err(_) } => assert_eq!(worker, expected),
                    other => panic!("{other:?}"),
                }
            }
        });
    }
}
