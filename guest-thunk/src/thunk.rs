//! The thunk's logic: what AMD's libhsakmt does between the API and the ioctls, over the client.

pub mod adopt;
pub mod cross;
pub mod event;
pub mod hdp;
pub mod lock;
pub mod memory;
pub mod moves;
pub mod open;
pub mod process;
pub mod queue;
pub mod refusal;
pub mod render;
pub mod settings;
pub mod smi;
#[cfg(test)]
mod tests;
pub mod topology;
pub mod userfault;
mod wake;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use hsakmt_abi::status::HsakmtStatus;

use self::event::Events;
use self::hdp::Hdp;
use self::lock::{lock, read, write};
use self::memory::{Host, Memory};
use self::queue::Queues;
use self::refusal::{Outcome, Refusal};
use self::render::bo::Bos;
use self::settings::{HdpFlush, Settings};
use self::smi::{Connected, Smi};
use self::topology::Snapshot;
use crate::client::Client;

/// One connection to the host, from the first open to the last close.
pub struct Thunk {
    // Dropped in this order: the client is last, so that the host is there for as long as anything is its.
    /// Queues.
    pub queues: Queues,
    /// Pages of HDP flush registers.
    pub hdp: Hdp,
    /// Events.
    pub events: Events,
    /// Streams of system management events.
    pub smi: Smi,
    /// Buffers that were imported through libdrm.
    pub bos: Bos,
    /// Memory.
    pub memory: Memory,
    snapshot: RwLock<Option<Arc<Snapshot>>>,
    /// Held while a snapshot is taken, so that two threads do not take two.
    taking: Mutex<()>,
    runtime_capabilities: AtomicU32,
    /// The environment at the open.
    pub settings: Settings,
    /// The connection.
    pub client: Client,
}

impl Thunk {
    /// Begins with a connection.
    pub fn new(client: Client, settings: Settings) -> Self {
        Thunk {
            queues: Queues::default(),
            hdp: Hdp::default(),
            events: Events::default(),
            smi: Smi::default(),
            bos: Bos::default(),
            memory: Memory::default(),
            snapshot: RwLock::default(),
            taking: Mutex::default(),
            runtime_capabilities: AtomicU32::new(0),
            settings,
            client,
        }
    }

    /// The topology, taken now if there is none.
    pub fn acquire_snapshot(self: &Arc<Self>) -> Outcome<Arc<Snapshot>> {
        let _taking = lock(&self.taking);
        if let Some(snapshot) = self.current_snapshot() {
            return Ok(snapshot);
        }
        let mut snapshot = Snapshot::take(&self.client, &self.settings)?;
        if self.settings.hdp == HdpFlush::Trap {
            let page = |gpu| self.hdp.page(self, &snapshot, gpu);
            let pages: Vec<Option<u64>> = snapshot.gpus.iter().map(page).collect();
            for (gpu, page) in snapshot.gpus.iter_mut().zip(pages) {
                gpu.hdp_registers = page;
            }
        }
        let snapshot = Arc::new(snapshot);
        *write(&self.snapshot) = Some(snapshot.clone());
        Ok(snapshot)
    }

    /// Forgets the topology.
    pub fn release_snapshot(&self) {
        *write(&self.snapshot) = None;
    }

    /// The topology, if it was acquired.
    pub fn current_snapshot(&self) -> Option<Arc<Snapshot>> {
        read(&self.snapshot).clone()
    }

    /// The topology, for calls that name a node: none of them is valid without it.
    pub fn snapshot(&self) -> Outcome<Arc<Snapshot>> {
        let missing = "hsaKmtAcquireSystemProperties has not been called";
        self.current_snapshot().ok_or_else(|| Refusal::new(HsakmtStatus::INVALID_NODE_UNIT, missing))
    }

    /// The connection with a topology.
    pub fn host<'a>(&'a self, snapshot: &'a Snapshot) -> Host<'a> {
        Host { client: &self.client, snapshot, settings: &self.settings }
    }

    /// What the kernel said when the runtime was enabled.
    pub fn runtime_capabilities(&self) -> u32 {
        self.runtime_capabilities.load(Ordering::Relaxed)
    }

    fn set_runtime_capabilities(&self, capabilities: u32) {
        self.runtime_capabilities.store(capabilities, Ordering::Relaxed);
    }

    /// Ends waits and frees what the host holds for this connection.
    fn shut_down(&self) {
        self.queues.release_all(&self.client);
        self.hdp.release_all(&self.memory, &self.client);
        self.events.release_all(&self.client);
        self.smi.release_all(&self.client);
        self.bos.release_all(&self.client);
        self.memory.release_all(&self.client);
    }
}

impl Connected for Thunk {
    fn client(&self) -> &Client {
        &self.client
    }
}
