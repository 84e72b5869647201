//! Bounds that both sides know. Every length that a peer names is checked against one of these
//! before anything is allocated or copied.

/// Largest request frame in bytes, header included. A frame is one datagram of a unix socket pair between
/// daemon and worker; 128 KiB stays below the kernel's default socket buffer (212,992 bytes).
pub const MAX_FRAME_BYTES: usize = 128 * 1024;

/// Largest answer frame in bytes, header included.
pub const MAX_ANSWER_BYTES: usize = 128 * 1024;

/// Most requests in one frame.
pub const MAX_REQUESTS_PER_FRAME: usize = 64;

/// Most GPUs that a VM can have; bounds every list of `gpu_id`s on the wire. KFD's own bound on
/// topology nodes is larger, but no machine has more GPU nodes (8 boards of 8 partitions).
pub const MAX_GPUS: usize = 64;

/// Most events in one wait (`KFD_SIGNAL_EVENT_LIMIT` in kfd_ioctl.h).
pub const MAX_WAIT_EVENTS: usize = 4096;

/// Most bytes of topology in one answer.
pub const MAX_TOPOLOGY_CHUNK: usize = 64 * 1024;

/// Largest whole topology archive that a client accepts, in bytes.
pub const MAX_TOPOLOGY_BYTES: usize = 8 * 1024 * 1024;

/// Most bytes of one `AMDGPU_INFO` answer (`struct drm_amdgpu_info_device` has under 500).
pub const MAX_RENDER_INFO_BYTES: usize = 4096;

/// Most entries of the tile configuration tables (`GB_TILE_MODE`, `GB_MACROTILE_MODE`: 32 and 16 registers).
pub const MAX_TILE_CONFIGS: usize = 64;

/// Rings of a context: ring 0 is the control ring, the others carry calls that block
/// (virtio-gpu allows 64 rings for each context).
pub const MAX_RINGS: u32 = 64;

/// Most frames of one context that may be in flight; the host ends a context with more. One for each ring that a
/// wait may block, and as many again for calls that share a ring. A frame behind a wait on the same ring may cost the
/// context too, where the VM's control queue is short of room; a wait that finds no room gets
/// [`crate::Status::LIMIT`] and is to be tried again.
pub const MAX_FRAMES_IN_FLIGHT: usize = 2 * MAX_RINGS as usize;

/// The ring for calls that do not block.
pub const CONTROL_RING: u8 = 0;

/// Most runs of guest-physical memory behind one blob after merging neighbours. Each is one mapping in the
/// worker, whose bound is `vm.max_map_count` (65,530 by default).
pub const MAX_BLOB_RUNS: usize = 32 * 1024;

/// Most buffers, or pieces of buffers, that a context can share with others at a time. Each holds a descriptor on the host.
pub const MAX_SHARES: usize = 256;

/// Most words of a mask of compute units (the kernel drops what is beyond 1024 bits).
pub const MAX_CU_MASK_WORDS: usize = 32;

/// Most bytes of a queue's control stack in one answer.
pub const MAX_CONTROL_STACK_BYTES: usize = 96 * 1024;

/// Most streams of system management events of a context. Each holds a descriptor on the host, and about 2 KiB of its kernel.
pub const MAX_SMI_STREAMS: usize = 63;

/// Most bytes of system management events in one answer. The kernel keeps 1024 of a stream (`MAX_KFIFO_SIZE`,
/// kfd_smi_events.c), which grow by no more than the guest's own name in each line.
pub const MAX_SMI_BYTES: usize = 4096;

/// Most bytes that programs can leave with a buffer (`struct drm_amdgpu_gem_metadata`).
pub const MAX_METADATA_BYTES: usize = 256;
