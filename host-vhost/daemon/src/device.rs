//! The device process: serves one connection of the VMM, and is thrown away with it, so that nothing of one
//! connection reaches the next.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};

use kfd_ipc::ledger::Ledger;
use kfd_ipc::{Channel, IPC_FD};
use kfd_sandbox::{Role, SandboxError};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use thiserror::Error;
use vhost::vhost_user::{Error as VhostUserError, Listener};
use vhost_user_backend::{Error as DaemonError, VhostUserDaemon};
use vm_memory::GuestMemoryAtomic;
use vmm_sys_util::epoll::EventSet;

use crate::chain::Ram;
use crate::config::DeviceConfig;
use crate::pool::{MemoryDevice, Pool};
use crate::session::Session;
use crate::spawn::take_inherited;
use crate::vhost::{Device, SESSION_EVENT};

/// Descriptor of the listening socket in the device process.
pub const SOCKET_FD: i32 = IPC_FD.wrapping_add(1);

/// Descriptor of the memory device's listening socket, if there is one.
const MEMORY_SOCKET_FD: i32 = SOCKET_FD.wrapping_add(1);

/// Exit status of a device process whose VMM never had a driver that could use the device.
pub const UNUSABLE: u8 = 3;

/// How a connection went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// A driver could use the device, or none came.
    Well,
    /// Drivers came, and none took the features that it takes.
    Unusable,
}

/// Why the device process ends early.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// Its configuration cannot be read.
    #[error("device: configuration: {0}")]
    Config(#[from] serde_json::Error),
    /// Something that it needs of the system.
    #[error("device: {what}: {error}")]
    System {
        /// What.
        what: &'static str,
        /// Why not.
        error: io::Error,
    },
    /// It cannot be confined.
    #[error("device: {0}")]
    Sandbox(#[from] SandboxError),
    /// The VMM goes on to queues that lie in no memory.
    #[error(
        "none of the guest's memory has come ({0}): it must be shared, with QEMU by -object \
         memory-backend-memfd,id=m0,size=SIZE,share=on and -M memory-backend=m0"
    )]
    NoMemory(DaemonError),
    /// The vhost-user machinery.
    #[error("device: {0}")]
    Daemon(DaemonError),
}

fn system(what: &'static str) -> impl Fn(io::Error) -> DeviceError {
    move |error| DeviceError::System { what, error }
}

/// Runs the device process until the VMM disconnects.
pub fn run(config: &str) -> Result<Served, DeviceError> {
    let config: DeviceConfig = serde_json::from_str(config)?;
    crate::init_log(&config.log);
    // A panic in one thread would leave a device that hangs; the supervisor starts a new one.
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!("the device has a fault and ends: {panic}");
        std::process::abort();
    }));
    raise_descriptor_limit();
    let supervisor = Channel::from(take_inherited(IPC_FD).map_err(system("the supervisor's channel"))?);
    let socket = take_inherited(SOCKET_FD).map_err(system("the listening socket"))?;
    let mut listener = Listener::from(UnixListener::from(socket));
    let memory = match config.pool {
        Some(size) => {
            let pool = Arc::new(Pool::new(size).map_err(system("the pool"))?);
            Some((pool, take_inherited(MEMORY_SOCKET_FD).map_err(system("the memory device's socket"))?))
        }
        None => None,
    };
    let slots = (config.max_contexts as usize).saturating_add(1);
    let ledger = Ledger::create(slots).map_err(|error| system("the ledger")(io::Error::other(error)))?;
    // Before there are other threads, which Landlock and the capability sets would not reach.
    let sandbox = kfd_sandbox::enter(Role::Device)?;
    tracing::debug!("device: {sandbox}");

    let backend = Arc::new(Mutex::new(None));
    let window = config.window;
    let mut session =
        Session::new(config, supervisor, backend.clone(), ledger).map_err(system("the session"))?;
    if let Some((pool, _)) = &memory {
        session.set_pool(pool.clone());
    }
    let device = Arc::new(Device::new(session, backend, window));
    if let Some((pool, socket)) = memory {
        serve_memory(pool, device.clone(), socket)?;
    }
    let memory = GuestMemoryAtomic::new(Ram::new());
    let mut daemon =
        VhostUserDaemon::new("vhost-user".into(), device.clone(), memory).map_err(DeviceError::Daemon)?;
    for handler in daemon.get_epoll_handlers() {
        handler
            .register_listener(device.session_descriptor(), EventSet::IN, SESSION_EVENT)
            .map_err(system("epoll_ctl"))?;
    }
    daemon.start(&mut listener).map_err(DeviceError::Daemon)?;
    tracing::info!("the VMM has connected");
    let ended = daemon.wait();
    // The queue's thread would be waited for, and it has no end; the process has.
    std::mem::forget(daemon);
    match ended {
        Ok(())
        | Err(DaemonError::HandleRequest(VhostUserError::Disconnected | VhostUserError::PartialMessage)) => {
            tracing::info!("the VMM has disconnected");
            Ok(if device.was_unusable() { Served::Unusable } else { Served::Well })
        }
        // QEMU has no descriptors for memory that is not shared, and leaves it out. Whether a table is empty or an address of
        // a queue lies nowhere, the vhost-user machinery refuses it before anybody is asked.
        Err(
            error @ DaemonError::HandleRequest(VhostUserError::InvalidParam | VhostUserError::InvalidMessage),
        ) if device.lacks_memory() => Err(DeviceError::NoMemory(error)),
        // QEMU's own vhost-user-gpu up to 11.1 takes feature bits that it was never offered, which the vhost-user
        // machinery refuses before anybody is asked.
        Err(error @ DaemonError::HandleRequest(_)) if !device.was_usable() => {
            tracing::warn!("the VMM breaks off before a driver could use the device: {error}");
            Ok(Served::Unusable)
        }
        Err(error) => Err(DeviceError::Daemon(error)),
    }
}

/// Serves the memory device on threads of its own, for as long as this process lives.
fn serve_memory(pool: Arc<Pool>, device: Arc<Device>, socket: OwnedFd) -> Result<(), DeviceError> {
    let (size, window) = (pool.size(), pool.window());
    let memory = Arc::new(MemoryDevice::new(pool, device).map_err(system("the memory device"))?);
    let mut listener = Listener::from(UnixListener::from(socket));
    let mut daemon = VhostUserDaemon::new("memory".into(), memory, GuestMemoryAtomic::new(Ram::new()))
        .map_err(DeviceError::Daemon)?;
    let serve = move || {
        let served = daemon.start(&mut listener).and_then(|()| {
            tracing::info!(
                "the VMM has connected to the memory device: {} MiB of the host's memory at the beginning of a window of {} MiB",
                size >> 20,
                window >> 20
            );
            daemon.wait()
        });
        tracing::debug!("the memory device's connection is over: {served:?}");
        // As for the other device.
        std::mem::forget(daemon);
    };
    std::thread::Builder::new().name("memory".into()).spawn(serve).map_err(system("a thread"))?;
    Ok(())
}

/// Blobs of host memory, workers and regions of guest memory each hold a descriptor.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!("the limit of open files stays as it is: {error}");
    }
}
