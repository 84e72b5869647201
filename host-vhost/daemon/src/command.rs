//! virtio-gpu commands and responses as they stand in memory (virtio 1.3, section 5.7.6), and their numbers.

use virtio_bindings::virtio_gpu as gpu;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `VIRTIO_GPU_F_BLOB_ALIGNMENT` is 5 and not offered: with an alignment of 0 every blob fails on new kernels.
pub const FEATURES: u64 =
    1 << gpu::VIRTIO_GPU_F_VIRGL | 1 << gpu::VIRTIO_GPU_F_RESOURCE_BLOB | 1 << gpu::VIRTIO_GPU_F_CONTEXT_INIT;

/// `VIRTIO_GPU_FLAG_FENCE`
pub const FLAG_FENCE: u32 = gpu::VIRTIO_GPU_FLAG_FENCE;
/// `VIRTIO_GPU_FLAG_INFO_RING_IDX`
pub const FLAG_RING_IDX: u32 = gpu::VIRTIO_GPU_FLAG_INFO_RING_IDX;
/// `VIRTIO_GPU_CONTEXT_INIT_CAPSET_ID_MASK`
pub const CONTEXT_INIT_CAPSET_MASK: u32 = 0xff;
/// Every known `VIRTIO_GPU_BLOB_FLAG_*`.
pub const BLOB_FLAGS: u32 = gpu::VIRTIO_GPU_BLOB_FLAG_USE_MAPPABLE
    | gpu::VIRTIO_GPU_BLOB_FLAG_USE_SHAREABLE
    | gpu::VIRTIO_GPU_BLOB_FLAG_USE_CROSS_DEVICE;

/// A command that this device knows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `VIRTIO_GPU_CMD_GET_CAPSET_INFO`
    GetCapsetInfo,
    /// `VIRTIO_GPU_CMD_GET_CAPSET`
    GetCapset,
    /// `VIRTIO_GPU_CMD_CTX_CREATE`
    CtxCreate,
    /// `VIRTIO_GPU_CMD_CTX_DESTROY`
    CtxDestroy,
    /// `VIRTIO_GPU_CMD_CTX_ATTACH_RESOURCE`
    CtxAttachResource,
    /// `VIRTIO_GPU_CMD_CTX_DETACH_RESOURCE`
    CtxDetachResource,
    /// `VIRTIO_GPU_CMD_SUBMIT_3D`
    Submit3d,
    /// `VIRTIO_GPU_CMD_RESOURCE_CREATE_BLOB`
    ResourceCreateBlob,
    /// `VIRTIO_GPU_CMD_RESOURCE_UNREF`
    ResourceUnref,
    /// `VIRTIO_GPU_CMD_RESOURCE_MAP_BLOB`
    ResourceMapBlob,
    /// `VIRTIO_GPU_CMD_RESOURCE_UNMAP_BLOB`
    ResourceUnmapBlob,
    /// A command of a display or a 3D device, or an unknown one: answered with an error.
    Other(u32),
}

impl Command {
    /// The command with this number.
    #[allow(non_upper_case_globals)] // the names of the header
    pub fn from_number(number: u32) -> Self {
        match number {
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_GET_CAPSET_INFO => Command::GetCapsetInfo,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_GET_CAPSET => Command::GetCapset,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_CREATE => Command::CtxCreate,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_DESTROY => Command::CtxDestroy,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_ATTACH_RESOURCE => Command::CtxAttachResource,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_CTX_DETACH_RESOURCE => Command::CtxDetachResource,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_SUBMIT_3D => Command::Submit3d,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_CREATE_BLOB => Command::ResourceCreateBlob,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_UNREF => Command::ResourceUnref,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_MAP_BLOB => Command::ResourceMapBlob,
            gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_CMD_RESOURCE_UNMAP_BLOB => Command::ResourceUnmapBlob,
            other => Command::Other(other),
        }
    }
}

/// Declares structures of the wire: all fields public, no padding that is not named, the size asserted.
macro_rules! wire {
    ($($(#[doc = $doc:literal])* $name:ident $size:literal { $($(#[doc = $field_doc:literal])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[doc = $field_doc])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

wire! {
    /// `struct virtio_gpu_ctrl_hdr`
    Header 24 {
        /// Command or response.
        kind: u32,
        /// [`FLAG_FENCE`], [`FLAG_RING_IDX`]
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
    /// `struct virtio_gpu_get_capset_info`, after the header.
    GetCapsetInfo 8 {
        /// From 0.
        capset_index: u32,
        /// Zero.
        padding: u32,
    }
    /// `struct virtio_gpu_resp_capset_info`, after the header.
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
    /// `struct virtio_gpu_get_capset`, after the header.
    GetCapset 8 {
        /// Its id.
        capset_id: u32,
        /// Its version.
        capset_version: u32,
    }
    /// The numbers of `struct virtio_gpu_ctx_create`, after the header; 64 bytes of name follow.
    CtxCreate 8 {
        /// Bytes of the name.
        nlen: u32,
        /// Capset id in the low byte.
        context_init: u32,
    }
    /// A resource: `struct virtio_gpu_resource_unref`, `virtio_gpu_ctx_resource`,
    /// `virtio_gpu_resource_unmap_blob`, after the header.
    ResourceId 8 {
        /// Its id.
        resource_id: u32,
        /// Zero.
        padding: u32,
    }
    /// `struct virtio_gpu_resource_create_blob`, after the header; the entries follow.
    CreateBlob 32 {
        /// Its id, chosen by the guest.
        resource_id: u32,
        /// `VIRTIO_GPU_BLOB_MEM_*`
        blob_mem: u32,
        /// [`BLOB_FLAGS`]
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
    /// `struct virtio_gpu_resource_map_blob`, after the header.
    MapBlob 16 {
        /// Its id.
        resource_id: u32,
        /// Zero.
        padding: u32,
        /// Offset in the window, in bytes.
        offset: u64,
    }
    /// `struct virtio_gpu_resp_map_info`, after the header.
    MapInfo 8 {
        /// `VIRTIO_GPU_MAP_CACHE_*`
        map_info: u32,
        /// Zero.
        padding: u32,
    }
    /// `struct virtio_gpu_cmd_submit`, after the header; the frame follows.
    Submit 8 {
        /// Bytes of the frame.
        size: u32,
        /// Zero.
        padding: u32,
    }
    /// `struct virtio_gpu_config` (virtio 1.3: `blob_alignment` comes with a feature that is not offered).
    Config 16 {
        /// None.
        events_read: u32,
        /// None.
        events_clear: u32,
        /// Displays: none, so that the guest's driver is a render device only.
        num_scanouts: u32,
        /// Capsets: one.
        num_capsets: u32,
    }
}

/// Longest name of a context, `virtio_gpu_ctx_create.debug_name`.
pub const DEBUG_NAME_BYTES: usize = 64;

/// What a command is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response {
    /// `VIRTIO_GPU_RESP_OK_NODATA`
    Ok,
    /// `VIRTIO_GPU_RESP_OK_CAPSET_INFO`
    CapsetInfo(CapsetInfo),
    /// `VIRTIO_GPU_RESP_OK_CAPSET`
    Capset(virtio_kfd_protocol::Capset),
    /// `VIRTIO_GPU_RESP_OK_MAP_INFO`
    MapInfo(MapInfo),
    /// `VIRTIO_GPU_RESP_ERR_UNSPEC`
    Unspecified,
    /// `VIRTIO_GPU_RESP_ERR_OUT_OF_MEMORY`: a budget is used up.
    OutOfMemory,
    /// `VIRTIO_GPU_RESP_ERR_INVALID_RESOURCE_ID`
    InvalidResource,
    /// `VIRTIO_GPU_RESP_ERR_INVALID_CONTEXT_ID`
    InvalidContext,
    /// `VIRTIO_GPU_RESP_ERR_INVALID_PARAMETER`
    InvalidParameter,
}

impl Response {
    /// Its number.
    pub fn number(&self) -> u32 {
        match self {
            Response::Ok => gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_OK_NODATA,
            Response::CapsetInfo(_) => gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_OK_CAPSET_INFO,
            Response::Capset(_) => gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_OK_CAPSET,
            Response::MapInfo(_) => gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_OK_MAP_INFO,
            Response::Unspecified => gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_ERR_UNSPEC,
            Response::OutOfMemory => gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_ERR_OUT_OF_MEMORY,
            Response::InvalidResource => gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_ERR_INVALID_RESOURCE_ID,
            Response::InvalidContext => gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_ERR_INVALID_CONTEXT_ID,
            Response::InvalidParameter => gpu::virtio_gpu_ctrl_type_VIRTIO_GPU_RESP_ERR_INVALID_PARAMETER,
        }
    }

    /// The whole response to a command with this header. Fence, context and ring are copied: the guest's driver
    /// retires the fence by them, also when the command failed.
    pub fn bytes(&self, command: &Header) -> Vec<u8> {
        let header = Header {
            kind: self.number(),
            flags: command.flags & (FLAG_FENCE | FLAG_RING_IDX),
            fence_id: command.fence_id,
            ctx_id: command.ctx_id,
            ring_idx: command.ring_idx,
            padding: [0; 3],
        };
        let body: &[u8] = match self {
            Response::CapsetInfo(body) => body.as_bytes(),
            Response::Capset(body) => body.as_bytes(),
            Response::MapInfo(body) => body.as_bytes(),
            _ => &[],
        };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(body);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernel_header() {
        // include/uapi/linux/virtio_gpu.h, through virtio-bindings; ours are without the header.
        let header = size_of::<gpu::virtio_gpu_ctrl_hdr>();
        assert_eq!(size_of::<Header>(), header);
        assert_eq!(size_of::<CreateBlob>() + header, size_of::<gpu::virtio_gpu_resource_create_blob>());
        assert_eq!(size_of::<MapBlob>() + header, size_of::<gpu::virtio_gpu_resource_map_blob>());
        assert_eq!(
            size_of::<CtxCreate>() + DEBUG_NAME_BYTES + header,
            size_of::<gpu::virtio_gpu_ctx_create>()
        );
        assert_eq!(size_of::<Submit>() + header, size_of::<gpu::virtio_gpu_cmd_submit>());
        assert_eq!(size_of::<CapsetInfo>() + header, size_of::<gpu::virtio_gpu_resp_capset_info>());
        assert_eq!(size_of::<MemEntry>(), size_of::<gpu::virtio_gpu_mem_entry>());
    }

    #[test]
    fn a_failed_command_still_retires_its_fence() {
        let command =
            Header { kind: 0x207, flags: 3 | 1 << 9, fence_id: 77, ctx_id: 5, ring_idx: 9, padding: [1; 3] };
        let bytes = Response::Unspecified.bytes(&command);
        let (answer, rest) = Header::read_from_prefix(&bytes).unwrap();
        assert!(rest.is_empty());
        assert_eq!(
            answer,
            Header { kind: 0x1200, flags: 3, fence_id: 77, ctx_id: 5, ring_idx: 9, padding: [0; 3] }
        );
    }
}
