//! virtio-gpu commands as the guest's driver sends them (virtio 1.3, section 5.7.6).

use virtio_bindings::virtio_gpu as gpu;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Declares structures of the wire: all fields public, no hidden padding, the size asserted.
macro_rules! wire {
    ($($(#[doc = $doc:literal])* $name:ident $size:literal {
        $($(#[doc = $field_doc:literal])* $field:ident: $ty:ty,)*
    })*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[doc = $field_doc])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

wire! {
    /// `struct virtio_gpu_ctrl_hdr`
    Header 24 {
        /// `VIRTIO_GPU_CMD_*` or `VIRTIO_GPU_RESP_*`
        kind: u32,
        /// `VIRTIO_GPU_FLAG_*`
        flags: u32,
        /// Fence, if flagged.
        fence_id: u64,
        /// Context.
        ctx_id: u32,
        /// Ring, if flagged.
        ring_idx: u8,
        /// Zero.
        padding: [u8; 3],
    }
    /// `struct virtio_gpu_get_capset_info` and `struct virtio_gpu_get_capset` after the header: two words.
    Words 8 {
        /// Index of the capset, or its id.
        first: u32,
        /// Zero, or the version.
        second: u32,
    }
    /// `struct virtio_gpu_resp_capset_info` after the header
    CapsetInfo 16 {
        /// Its id.
        capset_id: u32,
        /// Newest version.
        capset_max_version: u32,
        /// Bytes.
        capset_max_size: u32,
        /// Zero.
        padding: u32,
    }
    /// `struct virtio_gpu_ctx_create` after the header
    CtxCreate 72 {
        /// Bytes of the name.
        nlen: u32,
        /// Capset id in the low byte.
        context_init: u32,
        /// Name for the host's logs.
        debug_name: [u8; 64],
    }
    /// `struct virtio_gpu_resource_unref`, `virtio_gpu_ctx_resource` and `virtio_gpu_resource_unmap_blob`
    /// after the header
    Resource 8 {
        /// Its id.
        resource_id: u32,
        /// Zero.
        padding: u32,
    }
    /// `struct virtio_gpu_resource_create_blob` after the header; the entries follow.
    CreateBlob 32 {
        /// Its id, chosen by the guest.
        resource_id: u32,
        /// `VIRTIO_GPU_BLOB_MEM_*`
        blob_mem: u32,
        /// `VIRTIO_GPU_BLOB_FLAG_*`
        blob_flags: u32,
        /// Entries that follow.
        nr_entries: u32,
        /// Which host memory.
        blob_id: u64,
        /// Bytes.
        size: u64,
    }
    /// `struct virtio_gpu_mem_entry`
    MemEntry 16 {
        /// Guest-physical address.
        addr: u64,
        /// Bytes.
        length: u32,
        /// Zero.
        padding: u32,
    }
    /// `struct virtio_gpu_resource_map_blob` after the header
    MapBlob 16 {
        /// The resource.
        resource_id: u32,
        /// Zero.
        padding: u32,
        /// Where in the window, in bytes.
        offset: u64,
    }
    /// `struct virtio_gpu_cmd_submit` after the header; the command follows.
    Submit 8 {
        /// Bytes of command.
        size: u32,
        /// Zero.
        padding: u32,
    }
    /// `struct virtio_gpu_config`
    Config 16 {
        /// Events that the device has.
        events_read: u32,
        /// Events to clear.
        events_clear: u32,
        /// Displays.
        num_scanouts: u32,
        /// Capsets.
        num_capsets: u32,
    }
}

/// A command without a fence.
pub fn header(kind: u32, ctx_id: u32) -> Header {
    Header { kind, ctx_id, ..Header::new_zeroed() }
}

/// The bytes of a header and what follows it.
pub fn message<B: IntoBytes + Immutable>(header: &Header, body: &B) -> Vec<u8> {
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(body.as_bytes());
    bytes
}

/// Whether a response says that the command was done.
pub const fn is_ok(kind: u32) -> bool {
    kind >= gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_OK_NODATA
        && kind < gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_ERR_UNSPEC
}
