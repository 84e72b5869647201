//! The VMM: speaks vhost-user to the device, rings bells, serves the device's requests.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Error as VhostUserError, Frontend, FrontendReqHandler, VhostUserFrontend};
use vhost::{VhostBackend, VringConfigData};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_gpu::{
    VIRTIO_GPU_F_CONTEXT_INIT, VIRTIO_GPU_F_RESOURCE_BLOB, VIRTIO_GPU_F_VIRGL,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, IntoBytes};

use super::LoopbackOptions;
use super::command::Config;
use super::exports::Exports;
use super::queue::{QUEUE_SIZE, Queue};
use super::ram::Ram;
use super::system;
use super::window::{SHM_ID, Window};
use crate::transport::{Result, TransportError};

/// Control queue and cursor queue.
pub(super) const QUEUES: usize = 2;

const PROTOCOL_FEATURES: Protocol = Protocol::MQ
    .union(Protocol::REPLY_ACK)
    .union(Protocol::CONFIG)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::BACKEND_SEND_FD)
    .union(Protocol::CONFIGURE_MEM_SLOTS)
    .union(Protocol::RESET_DEVICE)
    .union(Protocol::SHMEM);

/// Features that the guest's driver needs for contexts with blobs.
const NEEDED: [(u32, &str); 5] = [
    (VIRTIO_F_VERSION_1, "VERSION_1"),
    (VIRTIO_RING_F_INDIRECT_DESC, "INDIRECT_DESC"),
    (VIRTIO_GPU_F_VIRGL, "VIRGL"),
    (VIRTIO_GPU_F_RESOURCE_BLOB, "RESOURCE_BLOB"),
    (VIRTIO_GPU_F_CONTEXT_INIT, "CONTEXT_INIT"),
];

/// A VM in this process.
pub(super) struct Vm {
    pub(super) ram: Arc<Ram>,
    pub(super) queues: [Arc<Queue>; QUEUES],
    pub(super) window: Option<Arc<Window>>,
    pub(super) config: Config,
    /// dma-bufs that may be open.
    pub(super) exports: Exports,
    /// The main channel, kept open, and usable by tests.
    pub(super) frontend: Frontend,
    pub(super) next_context: AtomicU32,
    pub(super) next_resource: AtomicU32,
    pub(super) owner: u32,
    socket: UnixStream,
    /// All descriptors of the main channel.
    channel: [RawFd; 2],
    abandoned: AtomicBool,
    exit: Arc<EventFd>,
    requests: Option<UnixStream>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

fn failed(what: &'static str) -> impl FnOnce(vhost::Error) -> TransportError {
    move |error| system(what, "vhost-user".to_owned(), io::Error::other(format!("{error}")))
}

/// Runs with all signals blocked, so that threads that are started inside never take a signal of the application, and
/// none of the vhost crate's system calls is interrupted.
fn without_signals<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    let failed = |errno: Errno| system("pthread_sigmask", "all signals".to_owned(), errno.into());
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK).map_err(failed)?;
    let result = run();
    before.thread_set_mask().map_err(failed)?;
    result
}

impl Vm {
    pub(super) fn connect(path: &Path, options: &LoopbackOptions) -> Result<Vm> {
        without_signals(|| Vm::connect_quietly(path, options))
    }

    fn connect_quietly(path: &Path, options: &LoopbackOptions) -> Result<Vm> {
        let no = |what: String| TransportError::NoDevice(format!("{}: {what}", path.display()));
        let socket = UnixStream::connect(path).map_err(|error| no(format!("connect: {error}")))?;
        let watch = Watch::start(&socket, options.patience)?;
        let result = Vm::set_up(path, socket, options);
        if watch.end() {
            let patience = options.patience;
            return Err(no(format!("no answer to vhost-user in {patience:?}: is it serving another VM?")));
        }
        result
    }

    fn set_up(path: &Path, socket: UnixStream, options: &LoopbackOptions) -> Result<Vm> {
        let no = |what: String| TransportError::NoDevice(format!("{}: {what}", path.display()));
        let copy = socket.try_clone().map_err(|error| no(format!("dup: {error}")))?;
        let channel = [socket.as_raw_fd(), copy.as_raw_fd()];
        // A device that serves another VM accepts no more connections, and the kernel does not say so.
        socket
            .set_read_timeout(Some(options.patience))
            .map_err(|error| no(format!("setsockopt: {error}")))?;
        let mut frontend = Frontend::from_stream(copy, QUEUES as u64);

        frontend.set_owner().map_err(failed("SET_OWNER"))?;
        let offered = frontend.get_features().map_err(failed("GET_FEATURES"))?;
        if let Some((_, name)) = NEEDED.iter().find(|(bit, _)| offered & (1 << bit) == 0) {
            return Err(no(format!("the device offers features {offered:#x} without {name}")));
        }
        let protocol_bit = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        if offered & protocol_bit == 0 {
            return Err(no(format!("the device offers features {offered:#x} without protocol features")));
        }
        let protocol = frontend.get_protocol_features().map_err(failed("GET_PROTOCOL_FEATURES"))?;
        if !protocol.contains(Protocol::MQ | Protocol::CONFIG) {
            return Err(no(format!(
                "the device offers protocol features {protocol:?} without MQ and CONFIG"
            )));
        }
        let protocol = protocol & PROTOCOL_FEATURES;
        frontend.set_protocol_features(protocol).map_err(failed("SET_PROTOCOL_FEATURES"))?;
        if protocol.contains(Protocol::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let queues = frontend.get_queue_num().map_err(failed("GET_QUEUE_NUM"))?;
        if queues < QUEUES as u64 {
            return Err(no(format!("the device has {queues} queues, expected {QUEUES}")));
        }
        let config = config(&mut frontend)?;

        let exit = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)
            .map_err(|error| system("eventfd", "the end of the VM".to_owned(), error))?;
        let exit = Arc::new(exit);
        let host = host_window(&mut frontend, protocol)?;

        let event_idx = offered & (1 << VIRTIO_RING_F_EVENT_IDX);
        let features = NEEDED.iter().fold(protocol_bit | event_idx, |mask, (bit, _)| mask | 1 << bit);
        frontend.set_features(features).map_err(failed("SET_FEATURES"))?;
        let ram = Ram::new(options.ram_bytes, options.scatter)?;
        frontend.set_mem_table(&ram.regions()?).map_err(failed("SET_MEM_TABLE"))?;
        let queue = || Queue::new(&ram, event_idx != 0).map(Arc::new);
        let queues = [queue()?, queue()?];
        for (index, queue) in queues.iter().enumerate() {
            start_queue(&frontend, &ram, index, queue)?;
        }

        let mut threads = Vec::new();
        let (mut window, mut requests) = (None, None);
        if let Some(host) = host {
            if options.announce_maps && protocol.contains(Protocol::CONFIGURE_MEM_SLOTS) {
                host.window.announce_maps(frontend.clone());
            }
            (window, requests) = (Some(host.window), Some(host.requests));
            threads.push(spawn("kfd-loop-shm", move || serve(host.server))?);
        }
        let reaper = Reaper {
            socket: socket.try_clone().map_err(|error| no(format!("dup: {error}")))?,
            exit: Arc::clone(&exit),
            queues: queues.clone(),
        };
        threads.push(spawn("kfd-loop-irq", move || reaper.run())?);
        Ok(Vm {
            ram,
            queues,
            window,
            config,
            exports: Exports::default(),
            frontend,
            next_context: AtomicU32::new(1),
            next_resource: AtomicU32::new(1),
            owner: std::process::id(),
            socket,
            channel,
            abandoned: AtomicBool::new(false),
            exit,
            requests,
            threads: Mutex::new(threads),
        })
    }

    /// The connection to the device.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn is_mine(&self) -> bool {
        self.owner == std::process::id()
    }

    /// For a forked child: closes the main channel, so that the device sees the end of the parent. Only an atomic
    /// swap and close(2).
    pub(super) fn abandon(&self) {
        if !self.is_mine() && !self.abandoned.swap(true, Ordering::Relaxed) {
            for fd in self.channel {
                // The owners of these descriptors are never dropped in a child (see VmHandle).
                let _ = nix::unistd::close(fd);
            }
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.ram.end();
        // Nothing can be done about any failure here: the sockets are closed in any case.
        let _ = self.exit.write(1);
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(requests) = &self.requests {
            let _ = requests.shutdown(std::net::Shutdown::Both);
        }
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Shuts a socket down unless it is ended in time. A device that serves another VM accepts no more connections, which
/// the kernel does not tell, and the vhost crate waits for ever.
struct Watch {
    end: mpsc::Sender<()>,
    thread: JoinHandle<bool>,
}

impl Watch {
    fn start(socket: &UnixStream, patience: Duration) -> Result<Watch> {
        let socket = socket.try_clone().map_err(|error| system("dup", "the device's socket", error))?;
        let (end, ended) = mpsc::channel();
        let thread = spawn("kfd-loop-watch", move || {
            let late = ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout);
            if late {
                // Whoever waits for the device gets an error then; if this fails, it waits on.
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
            late
        })?;
        Ok(Watch { end, thread })
    }

    /// Whether it was too late.
    fn end(self) -> bool {
        drop(self.end);
        self.thread.join().unwrap_or(false)
    }
}

fn spawn<T: Send + 'static>(name: &str, run: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|error| system("pthread_create", name.to_owned(), error))
}

fn config(frontend: &mut Frontend) -> Result<Config> {
    let size = size_of::<Config>() as u32;
    let empty = [0u8; size_of::<Config>()];
    let (_, bytes) =
        frontend.get_config(0, size, VhostUserConfigFlags::empty(), &empty).map_err(failed("GET_CONFIG"))?;
    let (config, _) = Config::read_from_prefix(bytes.as_bytes())
        .map_err(|_| TransportError::NoDevice(format!("the configuration space has under {size} bytes")))?;
    Ok(config)
}

type Server = FrontendReqHandler<Window>;

/// The window, and the channel that the device asks for maps on.
struct HostWindow {
    window: Arc<Window>,
    server: Server,
    /// The server's socket again, to end it.
    requests: UnixStream,
}

/// Sets the window up, if the device has one.
fn host_window(frontend: &mut Frontend, protocol: Protocol) -> Result<Option<HostWindow>> {
    if !protocol.contains(Protocol::SHMEM | Protocol::BACKEND_REQ | Protocol::BACKEND_SEND_FD) {
        return Ok(None);
    }
    let shared = frontend.get_shmem_config().map_err(failed("GET_SHMEM_CONFIG"))?;
    let sizes = shared.memory_sizes;
    let size = sizes.get(usize::from(SHM_ID)).copied().unwrap_or(0);
    if size == 0 {
        return Ok(None);
    }
    let window = Arc::new(Window::new(size)?);
    let wrong = |error: VhostUserError| system("socketpair", error.to_string(), io::Error::last_os_error());
    let mut server = FrontendReqHandler::new(Arc::clone(&window)).map_err(wrong)?;
    server.set_reply_ack_flag(protocol.contains(Protocol::REPLY_ACK));
    frontend.set_backend_request_fd(&server.get_tx_raw_fd()).map_err(failed("SET_BACKEND_REQ_FD"))?;
    let requests = super::duplicate(&server).map(UnixStream::from)?;
    Ok(Some(HostWindow { window, server, requests }))
}

/// Serves the device's requests until the socket is shut down.
fn serve(mut server: Server) {
    loop {
        match server.handle_request() {
            Ok(_) => {}
            // A request that was refused; the device has been told.
            Err(VhostUserError::ReqHandlerError(_) | VhostUserError::SocketRetry(_)) => {}
            Err(_) => return,
        }
    }
}

fn start_queue(frontend: &Frontend, ram: &Ram, index: usize, queue: &Queue) -> Result<()> {
    let (descriptors, available, used) = queue.addresses();
    let addresses = VringConfigData {
        queue_max_size: QUEUE_SIZE,
        queue_size: QUEUE_SIZE,
        flags: 0,
        desc_table_addr: ram.user_address(descriptors)?,
        avail_ring_addr: ram.user_address(available)?,
        used_ring_addr: ram.user_address(used)?,
        log_addr: None,
    };
    frontend.set_vring_num(index, QUEUE_SIZE).map_err(failed("SET_VRING_NUM"))?;
    frontend.set_vring_base(index, 0).map_err(failed("SET_VRING_BASE"))?;
    frontend.set_vring_addr(index, &addresses).map_err(failed("SET_VRING_ADDR"))?;
    frontend.set_vring_call(index, queue.call()).map_err(failed("SET_VRING_CALL"))?;
    frontend.set_vring_kick(index, queue.kick_event()).map_err(failed("SET_VRING_KICK"))?;
    frontend.clone().set_vring_enable(index, true).map_err(failed("SET_VRING_ENABLE"))
}

/// The interrupt handler.
struct Reaper {
    socket: UnixStream,
    exit: Arc<EventFd>,
    queues: [Arc<Queue>; QUEUES],
}

impl Reaper {
    fn run(self) {
        let why = match self.reap() {
            Ok(why) => why,
            Err(error) => error.to_string(),
        };
        for queue in &self.queues {
            queue.lose(&why);
        }
    }

    /// Runs until the VM ends or the device is gone, and tells which.
    fn reap(&self) -> Result<String> {
        let exit = event_fd(&self.exit)?;
        let [control, cursor] = &self.queues;
        let (control_call, cursor_call) = (event_fd(control.call())?, event_fd(cursor.call())?);
        loop {
            let mut fds = [
                PollFd::new(exit, PollFlags::POLLIN),
                // POLLHUP comes unasked.
                PollFd::new(self.socket.as_fd(), PollFlags::empty()),
                PollFd::new(control_call, PollFlags::POLLIN),
                PollFd::new(cursor_call, PollFlags::POLLIN),
            ];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(system("poll", "the device".to_owned(), errno.into())),
            }
            let [exit, socket, control_rang, cursor_rang] = fds.map(|fd| fd.any().unwrap_or(false));
            for (rang, queue) in [(control_rang, control), (cursor_rang, cursor)] {
                if rang {
                    // Nothing to read means that another bell was already answered.
                    let _ = queue.call().read();
                    queue.reap()?;
                }
            }
            if exit {
                return Ok("the VM has ended".to_owned());
            }
            if socket {
                return Ok("the device has closed its vhost-user connection".to_owned());
            }
        }
    }
}

fn event_fd(event: &EventFd) -> Result<BorrowedFd<'_>> {
    super::borrow(event)
}
