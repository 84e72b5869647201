//! Device <-> worker.
//!
//! The worker answers every message that has a ticket, exactly once, in any order across rings and in order
//! within a ring. The end of the channel ends the worker.

use serde::{Deserialize, Serialize};

/// A contiguous piece of guest memory: `len` bytes at `offset` of the file of region `region`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Id given with [`ToWorker::AddRegion`].
    pub region: u32,
    /// Offset from the region's start, in bytes; a multiple of the page size.
    pub offset: u64,
    /// Length in bytes; a multiple of the page size, not 0.
    pub len: u64,
}

/// Most runs in one [`ToWorker::AttachBlob`]; longer lists come in pieces.
pub const MAX_RUNS_PER_MESSAGE: usize = 4096;

/// Compute units of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CuMask {
    /// Which GPU, in a form of [`Settings::gpus`]; none for all.
    pub gpu: Option<String>,
    /// A bit for each unit, the first one in the lowest bit of the first word, as `AMDKFD_IOC_SET_CU_MASK` has them.
    pub words: Vec<u32>,
}

/// What a worker may do, set by the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Which GPUs of the host the VM sees; empty for all. Forms: `all`, an index (`0`: first GPU node), `gpu_id:N`,
    /// `renderD128`, a PCI address (`0000:03:00.0`), `uuid:HEX` or `gfx906`.
    pub gpus: Vec<String>,
    /// Most bytes of VRAM of this context, or no limit.
    pub vram_limit: Option<u64>,
    /// Most bytes of guest memory of this context that are given to the GPU, or no limit.
    pub guest_memory_limit: Option<u64>,
    /// Most bytes of VRAM of all contexts together, or no limit.
    pub vm_vram_limit: Option<u64>,
    /// Most bytes of guest memory of all contexts together, or no limit.
    pub vm_guest_memory_limit: Option<u64>,
    /// The slot of the [`crate::ledger::Ledger`] that is this worker's.
    pub ledger_slot: u32,
    /// Most queues of this context.
    pub max_queues: u32,
    /// Most queues of all contexts together, or no limit.
    pub vm_max_queues: Option<u64>,
    /// The compute units that queues may use. Where several name a GPU the last one counts.
    pub cu_masks: Vec<CuMask>,
    /// Whether runtimes are refused when they enable themselves, so that no exception of a queue is told.
    pub no_exceptions: bool,
    /// Most buffers.
    pub max_buffers: u32,
    /// Most runs of guest memory that are mapped in the worker, over all blobs.
    pub max_runs: u32,
    /// Name of the context for logs.
    pub name: String,
}

/// Device to worker. Descriptors: [`ToWorker::Start`] has one, the ledger, where there are limits of the VM;
/// [`ToWorker::AddRegion`] has one, the region's file; [`ToWorker::AttachShared`] has one,
/// the dma-buf, or none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToWorker<'a> {
    /// First message: open KFD, read the topology, apply the settings. Answered by [`FromWorker::Ready`] or
    /// [`FromWorker::Failed`].
    Start(Settings),
    /// A region of guest memory.
    AddRegion {
        /// Chosen by the device, never reused.
        region: u32,
        /// Where the region starts in the file, in bytes.
        file_offset: u64,
        /// Bytes.
        size: u64,
    },
    /// The region is gone: buffers on it are taken from the GPU and unmapped. Answered by [`FromWorker::Done`].
    RemoveRegion {
        /// The region.
        region: u32,
        /// For the answer.
        ticket: u64,
    },
    /// A GUEST blob of this context, or a further piece of its list of runs.
    AttachBlob {
        /// virtio-gpu resource id.
        resource: u32,
        /// Bytes of the whole blob: the sum of all runs.
        size: u64,
        /// Number of the first run of this piece.
        first_run: u32,
        /// Runs of the whole blob.
        total_runs: u32,
        /// The piece.
        runs: Vec<Run>,
    },
    /// A GUEST blob of this context that is over a limit of the device: its use is answered with
    /// [`virtio_kfd_protocol::Status::LIMIT`].
    RefuseBlob {
        /// virtio-gpu resource id.
        resource: u32,
    },
    /// The guest gives the blob's pages back: buffers on it are taken from the GPU, unmapped and freed.
    /// Answered by [`FromWorker::Done`] when nothing of the host touches the pages any more.
    DetachBlob {
        /// virtio-gpu resource id.
        resource: u32,
        /// For the answer.
        ticket: u64,
    },
    /// A HOST3D blob that shows memory of another context, or of a token. Beside it comes the dma-buf of the whole
    /// buffer, where the kernel can export one.
    AttachShared {
        /// virtio-gpu resource id.
        resource: u32,
        /// Where in the buffer the blob begins, in bytes.
        offset: u64,
        /// Bytes of the blob.
        size: u64,
    },
    /// A HOST3D blob is gone, be it one that this context's buffer is behind or one that was attached. Buffers that
    /// were imported over it are taken from the GPU and freed. Not answered.
    DetachShared {
        /// virtio-gpu resource id.
        resource: u32,
    },
    /// All that was made with a token is gone, after [`FromWorker::Unshare`]. Not answered.
    ShareGone {
        /// The token.
        token: u64,
    },
    /// A request frame whose structure the device has checked. Answered by [`FromWorker::Answer`].
    Frame {
        /// Ring that it came on.
        ring: u8,
        /// For the answer.
        ticket: u64,
        /// The frame.
        #[serde(borrow)]
        bytes: &'a [u8],
    },
    /// Asks for the memory of a buffer, to be mapped into the guest. Answered by [`FromWorker::Exported`].
    Export {
        /// For the answer.
        ticket: u64,
        /// The HOST3D blob that will show it: virtio-gpu resource id.
        resource: u32,
        /// [`virtio_kfd_protocol::Handle`] as a number.
        handle: u64,
        /// Bytes that the guest wants to see.
        size: u64,
    },
}

/// Caching of exported memory, as virtio-gpu's `map_info` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Caching {
    /// `VIRTIO_GPU_MAP_CACHE_CACHED`
    Cached,
    /// `VIRTIO_GPU_MAP_CACHE_UNCACHED`
    Uncached,
    /// `VIRTIO_GPU_MAP_CACHE_WC`
    WriteCombining,
}

/// Memory of a buffer in a file that travels beside the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedMemory {
    /// Offset in the file in bytes, a multiple of the page size.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// How the guest should map it.
    pub caching: Caching,
}

/// A piece of a buffer for a HOST3D blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPiece {
    /// Where in the buffer the piece begins, in bytes; a multiple of the page size.
    pub offset: u64,
    /// Bytes; a multiple of the page size, not 0.
    pub size: u64,
    /// The buffer: [`virtio_kfd_protocol::Handle`] as a number.
    pub handle: u64,
    /// Bytes of VRAM of the whole buffer, which are in use for as long as anything of it is.
    pub vram: u64,
    /// Where the piece lies in a file that travels beside the message, and its caching. None for memory that no CPU can
    /// see.
    pub memory: Option<ExportedMemory>,
}

/// Worker to device. Descriptors: [`FromWorker::Share`] and a successful [`FromWorker::Exported`] have the file of
/// [`SharedPiece::memory`], if there is one, and then the dma-buf of the whole buffer, which an export may be without where the
/// kernel cannot make one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromWorker<'a> {
    /// The worker is set up and sandboxed.
    Ready {
        /// KFD interface version.
        kfd_major: u32,
        /// KFD interface version.
        kfd_minor: u32,
        /// GPUs that the settings select.
        gpu_count: u32,
    },
    /// The worker cannot start, and ends. One sentence for the operator.
    Failed {
        /// The sentence.
        message: String,
    },
    /// The answer to a frame.
    Answer {
        /// The frame's ring.
        ring: u8,
        /// The frame's ticket.
        ticket: u64,
        /// The answer frame.
        #[serde(borrow)]
        bytes: &'a [u8],
    },
    /// Something with a ticket is done.
    Done {
        /// The ticket.
        ticket: u64,
    },
    /// Answer to an export.
    Exported {
        /// The ticket.
        ticket: u64,
        /// The buffer from its start on, or the errno why not.
        piece: Result<SharedPiece, i32>,
    },
    /// Other contexts that know the token may have a piece of a buffer of this one. Sent before the answer that
    /// tells the token to the guest.
    Share {
        /// [`virtio_kfd_protocol::ShareToken`] as a number.
        token: u64,
        /// What it opens.
        piece: SharedPiece,
    },
    /// The token opens nothing any more: its buffer is gone. Answered by [`ToWorker::ShareGone`].
    Unshare {
        /// The token.
        token: u64,
    },
}
