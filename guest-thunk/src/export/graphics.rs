//! Buffers of graphics drivers.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use hsakmt_abi::memory::HsaGraphicsResourceInfo;

use super::exports;
use super::pointer::{In, Out};
use crate::thunk::open;

exports! {
    "graphics";
    /// Registers a dma-buf of a graphics driver.
    not_implemented("planned over dma-buf")
    fn hsaKmtRegisterGraphicsHandleToNodes(
        graphics_resource_handle: u64,
        graphics_resource_info: Out<HsaGraphicsResourceInfo>,
        number_of_nodes: u64,
        node_array: In<u32>,
    );

    /// Maps a graphics buffer of Kaveri.
    not_implemented("as AMD's library answers")
    fn hsaKmtMapGraphicHandle(
        node_id: u32,
        graphic_device_handle: u64,
        graphic_resource_handle: u64,
        graphic_resource_offset: u64,
        graphic_resource_size: u64,
        flat_memory_address: Out<u64>,
    );

    /// Unmaps a buffer from all GPUs.
    done
    fn hsaKmtUnmapGraphicHandle(node_id: u32, flat_memory_address: u64, size_in_bytes: u64) {
        let _ = (node_id, size_in_bytes);
        let thunk = open::current()?;
        match flat_memory_address {
            0 => Ok(()),
            address => thunk.memory.unmap(&thunk.client, address),
        }
    }
}
