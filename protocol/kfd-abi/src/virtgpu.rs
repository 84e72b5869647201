//! virtio-gpu's render node in a guest (include/uapi/drm/virtgpu_drm.h).

use crate::drm::{DRM_COMMAND_BASE, DRM_IOCTL_BASE};
use crate::ioctl::ioctls;
use crate::layout::{Since, Since::Defined, abi_consts, abi_structs};

/// Headers with blobs (Linux 5.11).
const BLOB: Since = Defined("VIRTGPU_PARAM_RESOURCE_BLOB");
/// Headers with context init (Linux 5.16).
const CONTEXT_INIT: Since = Defined("VIRTGPU_PARAM_CONTEXT_INIT");
/// Headers with sync objects in EXECBUFFER (Linux 6.6).
const SYNCOBJ: Since = Defined("VIRTGPU_EXECBUF_SYNCOBJ_RESET");
/// Headers with blob hints.
const BLOB_HINTS: Since = Defined("DRM_VIRTGPU_BLOB_FLAG_HINT_DEFER_MAPPING");

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of MAP.
    struct Map = "struct drm_virtgpu_map", size 16 {
        /// Out: mmap offset.
        offset: u64 = 0;
        /// In: the GEM handle.
        handle: u32 = 8;
        /// Padding.
        pad: u32 = 12;
    }

    /// A sync object in EXECBUFFER.
    struct ExecbufferSyncobj = "struct drm_virtgpu_execbuffer_syncobj", size 16, since(SYNCOBJ) {
        /// The sync object.
        handle: u32 = 0;
        /// [`VIRTGPU_EXECBUF_SYNCOBJ_RESET`].
        flags: u32 = 4;
        /// Point on its timeline, 0 for a binary one.
        point: u64 = 8;
    }

    /// Argument of EXECBUFFER. 32 bytes before rings, 40 before Linux 6.6's sync objects; the kernel
    /// takes a shorter one as if the rest were zero.
    struct Execbuffer = "struct drm_virtgpu_execbuffer", size 64, size_since(SYNCOBJ) {
        /// In: `VIRTGPU_EXECBUF_*`.
        flags: u32 = 0;
        /// In: size of the command in bytes.
        size: u32 = 4;
        /// In: pointer to the command.
        command: u64 = 8;
        /// In: pointer to GEM handles that the command uses.
        bo_handles: u64 = 16;
        /// In: their number.
        num_bo_handles: u32 = 24;
        /// In and out: descriptor of a fence.
        fence_fd: i32 = 28;
        /// In: which ring of the context.
        ring_idx: u32 = 32, since(Defined("VIRTGPU_EXECBUF_RING_IDX"));
        /// In: size in bytes of an [`ExecbufferSyncobj`].
        syncobj_stride: u32 = 36, since(SYNCOBJ);
        /// In: number of sync objects to wait for.
        num_in_syncobjs: u32 = 40, since(SYNCOBJ);
        /// In: number of sync objects to signal.
        num_out_syncobjs: u32 = 44, since(SYNCOBJ);
        /// In: pointer to them.
        in_syncobjs: u64 = 48, since(SYNCOBJ);
        /// In: pointer to them.
        out_syncobjs: u64 = 56, since(SYNCOBJ);
    }

    /// Argument of GETPARAM.
    struct Getparam = "struct drm_virtgpu_getparam", size 16 {
        /// In: `VIRTGPU_PARAM_*`.
        param: u64 = 0;
        /// In: pointer to an i32 for the answer (`virtio_gpu_getparam_ioctl` writes 4 bytes for every parameter).
        value: u64 = 8;
    }

    /// Argument of RESOURCE_INFO.
    struct ResourceInfo = "struct drm_virtgpu_resource_info", size 16 {
        /// In: the GEM handle.
        bo_handle: u32 = 0;
        /// Out: the resource id that the host sees.
        res_handle: u32 = 4;
        /// Out: size in bytes.
        size: u32 = 8;
        /// Out: `VIRTGPU_BLOB_MEM_*`, 0 if it is no blob; `stride` in older headers.
        blob_mem: u32 = 12, since(BLOB);
    }

    /// Argument of WAIT.
    struct Wait = "struct drm_virtgpu_3d_wait", size 8 {
        /// In: the GEM handle.
        handle: u32 = 0;
        /// In: [`VIRTGPU_WAIT_NOWAIT`].
        flags: u32 = 4;
    }

    /// Argument of GET_CAPS.
    struct GetCaps = "struct drm_virtgpu_get_caps", size 24 {
        /// In: id of the capset.
        cap_set_id: u32 = 0;
        /// In: its version.
        cap_set_ver: u32 = 4;
        /// In: pointer to memory for it.
        addr: u64 = 8;
        /// In: its size in bytes.
        size: u32 = 16;
        /// Padding.
        pad: u32 = 20;
    }

    /// Argument of RESOURCE_CREATE_BLOB. 48 bytes without the hints.
    struct ResourceCreateBlob = "struct drm_virtgpu_resource_create_blob", size 56,
        since(BLOB), size_since(BLOB_HINTS) {
        /// In: `VIRTGPU_BLOB_MEM_*`.
        blob_mem: u32 = 0;
        /// In: `VIRTGPU_BLOB_FLAG_*`.
        blob_flags: u32 = 4;
        /// Out: the GEM handle.
        bo_handle: u32 = 8;
        /// Out: the resource id that the host sees.
        res_handle: u32 = 12;
        /// In: size in bytes, page-aligned.
        size: u64 = 16;
        /// Padding, zero.
        pad: u32 = 24;
        /// In: size of the command in bytes, a multiple of 4.
        cmd_size: u32 = 28;
        /// In: pointer to a command that is sent before the blob is made.
        cmd: u64 = 32;
        /// In: what the host knows the memory by; zero for guest memory.
        blob_id: u64 = 40;
        /// In: hints.
        blob_hints: u32 = 48, since(BLOB_HINTS);
        /// Padding.
        pad2: u32 = 52, since(BLOB_HINTS);
    }

    /// One parameter of CONTEXT_INIT.
    struct ContextSetParam = "struct drm_virtgpu_context_set_param", size 16, since(CONTEXT_INIT) {
        /// In: `VIRTGPU_CONTEXT_PARAM_*`.
        param: u64 = 0;
        /// In: its value.
        value: u64 = 8;
    }

    /// Argument of CONTEXT_INIT.
    struct ContextInit = "struct drm_virtgpu_context_init", size 16, since(CONTEXT_INIT) {
        /// In: number of parameters.
        num_params: u32 = 0;
        /// Padding.
        pad: u32 = 4;
        /// In: pointer to an array of [`ContextSetParam`].
        ctx_set_params: u64 = 8;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// [`Execbuffer::flags`]: wait for [`Execbuffer::fence_fd`].
        VIRTGPU_EXECBUF_FENCE_FD_IN = 0x01;
        /// [`Execbuffer::flags`]: return a fence in [`Execbuffer::fence_fd`].
        VIRTGPU_EXECBUF_FENCE_FD_OUT = 0x02;
        /// [`Execbuffer::flags`]: [`Execbuffer::ring_idx`] counts.
        VIRTGPU_EXECBUF_RING_IDX = 0x04, since(CONTEXT_INIT);
        /// [`ExecbufferSyncobj::flags`]: reset after the wait.
        VIRTGPU_EXECBUF_SYNCOBJ_RESET = 0x01, since(SYNCOBJ);
        /// [`Wait::flags`]: ask only.
        VIRTGPU_WAIT_NOWAIT = 1;
        /// [`ResourceCreateBlob::blob_mem`]: guest memory.
        VIRTGPU_BLOB_MEM_GUEST = 1, since(BLOB);
        /// [`ResourceCreateBlob::blob_mem`]: host memory.
        VIRTGPU_BLOB_MEM_HOST3D = 2, since(BLOB);
        /// [`ResourceCreateBlob::blob_mem`]: host memory with guest memory behind.
        VIRTGPU_BLOB_MEM_HOST3D_GUEST = 3, since(BLOB);
        /// [`ResourceCreateBlob::blob_flags`]: will be mapped.
        VIRTGPU_BLOB_FLAG_USE_MAPPABLE = 1, since(BLOB);
        /// [`ResourceCreateBlob::blob_flags`]: will be exported.
        VIRTGPU_BLOB_FLAG_USE_SHAREABLE = 2, since(BLOB);
        /// [`ResourceCreateBlob::blob_flags`]: will be used by another device.
        VIRTGPU_BLOB_FLAG_USE_CROSS_DEVICE = 4, since(BLOB);
        /// [`ResourceCreateBlob::blob_hints`]: map it later.
        DRM_VIRTGPU_BLOB_FLAG_HINT_DEFER_MAPPING = 1, since(BLOB_HINTS);
        /// Event code of a signalled fence on a polled ring.
        VIRTGPU_EVENT_FENCE_SIGNALED = 0x9000_0000, since(CONTEXT_INIT);
    }
    Macro u64 {
        /// Whether the device runs 3D contexts.
        VIRTGPU_PARAM_3D_FEATURES = 1;
        /// Whether capset queries work.
        VIRTGPU_PARAM_CAPSET_QUERY_FIX = 2;
        /// Whether there are blobs.
        VIRTGPU_PARAM_RESOURCE_BLOB = 3, since(BLOB);
        /// Whether host blobs can be mapped.
        VIRTGPU_PARAM_HOST_VISIBLE = 4, since(BLOB);
        /// Whether blobs can be shared with other devices.
        VIRTGPU_PARAM_CROSS_DEVICE = 5, since(BLOB);
        /// Whether there is CONTEXT_INIT.
        VIRTGPU_PARAM_CONTEXT_INIT = 6, since(CONTEXT_INIT);
        /// Mask of capset ids, bit by id.
        #[allow(non_upper_case_globals, reason = "the header spells it so")]
        VIRTGPU_PARAM_SUPPORTED_CAPSET_IDs = 7, since(CONTEXT_INIT);
        /// Whether a context can have a debug name (Linux 6.12).
        VIRTGPU_PARAM_EXPLICIT_DEBUG_NAME = 8, since(Defined("VIRTGPU_PARAM_EXPLICIT_DEBUG_NAME"));
        /// The device's alignment of blobs in bytes (after Linux 6.12).
        VIRTGPU_PARAM_BLOB_ALIGNMENT = 9, since(Defined("VIRTGPU_PARAM_BLOB_ALIGNMENT"));
        /// Which capset the context speaks.
        VIRTGPU_CONTEXT_PARAM_CAPSET_ID = 1, since(CONTEXT_INIT);
        /// How many rings the context has, up to 64.
        VIRTGPU_CONTEXT_PARAM_NUM_RINGS = 2, since(CONTEXT_INIT);
        /// Which rings' fences are told through poll on the node.
        VIRTGPU_CONTEXT_PARAM_POLL_RINGS_MASK = 3, since(CONTEXT_INIT);
        /// Pointer to a debug name.
        VIRTGPU_CONTEXT_PARAM_DEBUG_NAME = 4, since(Defined("VIRTGPU_CONTEXT_PARAM_DEBUG_NAME"));
    }
}

ioctls! {
    /// The ioctls of a virtio-gpu render node that the guest library uses, beside DRM's own.
    pub const IOCTLS: "DRM_IOCTL_VIRTGPU_", DRM_IOCTL_BASE;
    /// The mmap offset of a buffer.
    MAP = DRM_COMMAND_BASE + 0x01, ReadWrite, Map, since 0;
    /// Sends a command to the host.
    EXECBUFFER = DRM_COMMAND_BASE + 0x02, ReadWrite, Execbuffer, since 0;
    /// Asks about the device.
    GETPARAM = DRM_COMMAND_BASE + 0x03, ReadWrite, Getparam, since 0;
    /// Describes a buffer.
    RESOURCE_INFO = DRM_COMMAND_BASE + 0x05, ReadWrite, ResourceInfo, since 0;
    /// Waits for a buffer.
    WAIT = DRM_COMMAND_BASE + 0x08, ReadWrite, Wait, since 0;
    /// Reads a capset.
    GET_CAPS = DRM_COMMAND_BASE + 0x09, ReadWrite, GetCaps, since 0;
    /// Makes a blob.
    RESOURCE_CREATE_BLOB = DRM_COMMAND_BASE + 0x0a, ReadWrite, ResourceCreateBlob, since 0;
    /// Makes the context.
    CONTEXT_INIT = DRM_COMMAND_BASE + 0x0b, ReadWrite, ContextInit, since 0;
}
