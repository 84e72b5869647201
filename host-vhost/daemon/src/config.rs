//! What the supervisor tells the device process at its start.

use kfd_ipc::worker::{CuMask, Settings};
use serde::{Deserialize, Serialize};

/// A limit: of memory in bytes, or of a number of things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// Of all contexts together.
    pub vm: Option<u64>,
    /// Of each context.
    pub process: Option<u64>,
}

impl Limit {
    /// Whether there is any.
    pub fn is_set(&self) -> bool {
        self.vm.is_some() || self.process.is_some()
    }
}

/// Set by the operator, or found out by the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceConfig {
    /// GPUs of the host that the VM sees, as selectors.
    pub gpus: Vec<String>,
    /// How many GPUs they select.
    pub gpu_count: u32,
    /// Most bytes of VRAM, or no limit.
    pub vram_limit: Limit,
    /// Most bytes of guest memory that is given to GPUs, or no limit.
    pub guest_memory_limit: Limit,
    /// Most queues.
    pub queue_limit: Limit,
    /// The compute units that queues may use.
    pub cu_masks: Vec<CuMask>,
    /// Whether guests are told of no exceptions of queues.
    pub no_exceptions: bool,
    /// Bytes of the shared memory window.
    pub window: u64,
    /// Most contexts at a time.
    pub max_contexts: u32,
    /// Bytes of the pool, if there is one.
    pub pool: Option<u64>,
    /// Log filter.
    pub log: String,
}

impl DeviceConfig {
    /// What the worker of a context is told.
    pub fn worker_settings(&self, name: String, ledger_slot: u32) -> Settings {
        Settings {
            gpus: self.gpus.clone(),
            vram_limit: self.vram_limit.process,
            guest_memory_limit: self.guest_memory_limit.process,
            vm_vram_limit: self.vram_limit.vm,
            vm_guest_memory_limit: self.guest_memory_limit.vm,
            ledger_slot,
            max_queues: self
                .queue_limit
                .process
                .and_then(|most| u32::try_from(most).ok())
                .unwrap_or(u32::MAX),
            vm_max_queues: self.queue_limit.vm,
            cu_masks: self.cu_masks.clone(),
            no_exceptions: self.no_exceptions,
            max_buffers: crate::budget::MAX_BUFFERS_PER_CONTEXT,
            max_runs: u32::try_from(crate::budget::MAX_RUNS_PER_CONTEXT).unwrap_or(u32::MAX),
            name,
        }
    }
}
