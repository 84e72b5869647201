//! What all requests of a context share.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use kfd_host::{Kfd, RenderNode, Version};
use kfd_ipc::Channel;
use kfd_ipc::worker::{FromWorker, SharedPiece};
use virtio_kfd_protocol::{GpuId, ShareToken, Status};

use crate::archive::Archive;
use crate::failure::Failure;
use crate::memory::Memory;
use crate::pump::Pump;
use crate::queue::Queues;
use crate::smi::Smi;
use crate::throttle::Throttle;

/// A GPU that this VM was given.
#[derive(Debug)]
pub struct Gpu {
    /// KFD's id.
    pub id: GpuId,
    /// Its render node, open.
    pub render: RenderNode,
    /// `gfx_target_version`: major * 10000 + minor * 100 + stepping.
    pub gfx: u32,
    /// Accelerator dies that run a queue together.
    pub xccs: u32,
    /// The compute units that queues may use, if the operator has said.
    pub cu_mask: Option<Vec<u32>>,
}

/// An event that there never is: the kernel counts them from 1 (kfd_events.c).
const NO_EVENT: u32 = u32::MAX;

/// Where the event slots of a KFD process lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventPage {
    /// No signal event yet, and no buffer was offered.
    #[default]
    None,
    /// In a page of the kernel's.
    Kernel,
    /// A buffer was offered, and may be the page even if the call failed.
    Buffer,
}

/// The events that there are.
#[derive(Debug, Default)]
pub struct Events {
    /// Their types (`KFD_IOC_EVENT_*`) by id.
    pub types: HashMap<u32, u32>,
    /// Their page.
    pub page: EventPage,
    /// The one that is not the guest's: this process waits on it for exceptions of queues.
    pub own: Option<u32>,
}

impl Events {
    /// What the guest calls an event, as the kernel is told. One that is not the guest's is one that there is not.
    pub fn guests(&self, event: u32) -> u32 {
        match self.own == Some(event) {
            true => NO_EVENT,
            false => event,
        }
    }
}

/// The context.
#[derive(Debug)]
pub struct Context {
    /// The device.
    pub kfd: Kfd,
    /// Its interface version.
    pub version: Version,
    /// The GPUs of this VM, in the host's order.
    pub gpus: Vec<Gpu>,
    /// The topology that this VM sees.
    pub archive: Archive,
    /// Bytes of VRAM that this context may use, or no limit.
    pub vram_limit: Option<u64>,
    /// For messages that the guest can cause.
    pub throttle: Throttle,
    channel: Arc<Channel>,
    memory: Mutex<Memory>,
    events: Mutex<Events>,
    queues: Mutex<Queues>,
    /// Passes the guest's doorbells on.
    pub pump: Pump,
    /// Streams of system management events.
    pub smi: Smi,
    agreed: AtomicU32,
    shared: OnceLock<Weak<Context>>,
}

impl Context {
    /// A context before its handshake.
    pub fn new(
        kfd: Kfd,
        version: Version,
        gpus: Vec<Gpu>,
        archive: Archive,
        vram_limit: Option<u64>,
        (memory, queues, smi): (Memory, Queues, Smi),
        channel: Arc<Channel>,
    ) -> Self {
        Context {
            kfd,
            version,
            gpus,
            archive,
            vram_limit,
            throttle: Throttle::default(),
            channel,
            memory: Mutex::new(memory),
            events: Mutex::default(),
            queues: Mutex::new(queues),
            pump: Pump::new(),
            smi,
            agreed: AtomicU32::new(0),
            shared: OnceLock::new(),
        }
    }

    /// The context, to be shared by its threads.
    pub fn share_threads(self) -> Arc<Self> {
        let context = Arc::new(self);
        // Nobody else has it yet.
        let _ = context.shared.set(Arc::downgrade(&context));
        context
    }

    /// The context, for a thread of its own; `None` while it ends.
    pub fn shared(&self) -> Option<Arc<Self>> {
        self.shared.get()?.upgrade()
    }

    /// The memory. Held during the KFD calls that change it, none of which waits for anything of the guest.
    pub fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The events. Not held during waits; may be taken while the queues are held, and not the other way round.
    pub fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queues. Held during the KFD calls that change them; may be taken while the memory is held, and not the other way
    /// round.
    pub fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The wire version of the handshake; `None` before it.
    pub fn agreed(&self) -> Option<u32> {
        match self.agreed.load(Ordering::Acquire) {
            0 => None,
            version => Some(version),
        }
    }

    /// Sets the wire version; `false` if there was a handshake before.
    pub fn agree(&self, version: u32) -> bool {
        self.agreed.compare_exchange(0, version, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Tells the device what a token opens. Called with the memory locked, so that [`Context::unshare`] comes after it.
    pub fn share(
        &self,
        token: ShareToken,
        piece: SharedPiece,
        file: Option<BorrowedFd<'_>>,
        dmabuf: BorrowedFd<'_>,
    ) -> Result<(), Failure> {
        let descriptors: Vec<BorrowedFd<'_>> = file.into_iter().chain([dmabuf]).collect();
        let sent = self.channel.send(&FromWorker::Share { token: token.0, piece }, &descriptors);
        sent.map_err(|error| Failure::new(Status::WORKER_LOST, error.to_string()))
    }

    /// Tells the device that a token opens nothing any more.
    pub fn unshare(&self, token: ShareToken) {
        if let Err(error) = self.channel.send(&FromWorker::Unshare { token: token.0 }, &[]) {
            // The main thread sees the same and ends.
            tracing::debug!("{error}");
        }
    }

    /// The GPU of this VM with that id.
    pub fn gpu(&self, id: GpuId) -> Result<&Gpu, Failure> {
        let found = self.gpus.iter().find(|gpu| gpu.id == id);
        found.ok_or_else(|| Failure::new(Status::NO_SUCH_GPU, format!("gpu_id {} is not of this VM", id.0)))
    }
}
