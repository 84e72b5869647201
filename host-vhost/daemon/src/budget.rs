//! Bounds on everything that a guest can make the device hold, in one place.
//!
//! What is beyond a bound is answered with an error; nothing is allocated before its bound was checked. The
//! length of the control queue bounds the commands in flight (see [`crate::session::Session::has_room`]).

use std::time::Duration;

/// Contexts of a VM, those that are just ending included, unless the operator says otherwise. Each is a process.
pub const DEFAULT_MAX_CONTEXTS: u32 = 64;

/// Blobs of one context.
pub const MAX_BLOBS_PER_CONTEXT: usize = 16 * 1024;

/// Blobs of a VM, those that were refused to their context included, until the guest gives them up.
pub const MAX_BLOBS: usize = 128 * 1024;

/// Blobs of guest memory that are not attached to a context yet. Linux attaches each in the command after the one
/// that makes it; several guest processes can be between the two.
pub const MAX_BLOBS_WITHOUT_CONTEXT: usize = 256;

/// Runs of guest memory over all blobs of one context. Each is a mapping in the worker, which may have
/// `vm.max_map_count` (65,530 by default) and needs some for itself.
pub const MAX_RUNS_PER_CONTEXT: usize = 48 * 1024;

/// Entries of one blob's list as the guest sends them, before neighbours are merged. 16 bytes each.
pub const MAX_BLOB_ENTRIES: u32 = 1 << 20;

/// Whether a context that has `own` of what the VM has `all` of, and `most` at most, may have another one: it may
/// have as many as it leaves to others, so that a single process cannot take all.
pub fn has_share(own: usize, all: usize, most: usize) -> bool {
    own < most.saturating_sub(all)
}

/// HOST3D blobs of a VM: each holds a descriptor in the device. Shared out by [`has_share`].
pub const MAX_HOST_BLOBS: usize = 1024;

/// Maps in the shared memory window and regions of guest memory together. QEMU turns each map into a region, and
/// QEMU 11.1 aborts with 512 of them. The maps are shared out by [`has_share`].
pub const MAX_MAPS_AND_REGIONS: usize = 480;

/// Frames of one context that are not given back yet; with more it is ended.
pub const MAX_FRAMES_IN_FLIGHT: usize = virtio_kfd_protocol::limits::MAX_FRAMES_IN_FLIGHT;

/// Buffers of one context.
pub const MAX_BUFFERS_PER_CONTEXT: u32 = 64 * 1024;

/// Queues of one context, unless the operator says otherwise. The kernel has 1024 for each GPU of a process; each costs it
/// memory of the host that nothing else counts.
pub const DEFAULT_MAX_QUEUES_PER_PROCESS: u32 = 256;

/// How long a worker may take to start: KFD opens, the topology is read.
pub const WORKER_START: Duration = Duration::from_secs(30);

/// How long a worker may take to give back a blob or to export a buffer, before it is killed: taking memory
/// from a GPU waits for its queues to be preempted, which the kernel itself gives up after seconds.
pub const WORKER_REPLY: Duration = Duration::from_secs(10);

/// How long a worker may take for a frame that is not a wait while the room in the control queue is needed. The
/// calls of the kernel that take longest, for memory of many gigabytes, take seconds.
pub const FRAME_REPLY: Duration = Duration::from_secs(30);

/// Places in the control queue that waits leave free, at least; see [`crate::session`].
pub const MIN_RESERVE: usize = 32;

/// How long the stop of a ring waits for the workers to be gone.
pub const STOP: Duration = Duration::from_secs(5);

/// Default size of the shared memory window, in bytes.
pub const DEFAULT_WINDOW: u64 = 16 << 30;

/// Page size of guest and host, in bytes.
pub const PAGE: u64 = 4096;
