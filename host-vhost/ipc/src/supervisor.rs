//! Device <-> supervisor: starting and ending workers.

use serde::{Deserialize, Serialize};

/// Device to supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToSupervisor {
    /// Start a worker. Answered by [`FromSupervisor::Started`].
    Start {
        /// Chosen by the device, never reused.
        worker: u64,
    },
    /// End a worker at once. Answered by [`FromSupervisor::Exited`] when it is reaped.
    Kill {
        /// The worker.
        worker: u64,
    },
}

/// Supervisor to device. Descriptors: a successful [`FromSupervisor::Started`] has one, the device's end of the
/// channel to the worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromSupervisor {
    /// Answer to a start.
    Started {
        /// The worker.
        worker: u64,
        /// Its process id, or what went wrong.
        pid: Result<i32, String>,
    },
    /// A worker ended, asked for or not, and was reaped.
    Exited {
        /// The worker.
        worker: u64,
        /// How, in words, for the log.
        how: String,
    },
}
