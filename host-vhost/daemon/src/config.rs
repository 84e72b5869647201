//! What the supervisor tells the device process at its start.

use kfd_ipc::worker::Settings;
use serde::{Deserialize, Serialize};

/// Set by the operator, or found out by the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceConfig {
    /// GPUs of the host that the VM sees, as selectors.
    pub gpus: Vec<String>,
    /// How many GPUs they select.
    pub gpu_count: u32,
    /// Most bytes of VRAM of each context, or no limit. There is none over all contexts.
    pub vram_limit: Option<u64>,
    /// Most bytes of guest memory in blobs, over all contexts, or no limit.
    pub guest_memory_limit: Option<u64>,
    /// Bytes of the shared memory window.
    pub window: u64,
    /// Most contexts at a time.
    pub max_contexts: u32,
    /// Log filter.
    pub log: String,
}

impl DeviceConfig {
    /// What the worker of a context is told.
    pub fn worker_settings(&self, name: String) -> Settings {
        Settings {
            gpus: self.gpus.clone(),
            vram_limit: self.vram_limit,
            guest_memory_limit: self.guest_memory_limit,
            max_buffers: crate::budget::MAX_BUFFERS_PER_CONTEXT,
            max_runs: u32::try_from(crate::budget::MAX_RUNS_PER_CONTEXT).unwrap_or(u32::MAX),
            name,
        }
    }
}
