//! Buffers of graphics drivers.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use std::os::fd::AsFd;

use hsakmt_abi::memory::HsaGraphicsResourceInfo;

use super::exports;
use super::memory::nodes;
use super::pointer::{Address, In, Out, descriptor};
use crate::thunk::open;
use crate::thunk::refusal::Outcome;

fn register(
    graphics_resource_handle: u64,
    graphics_resource_info: Out<HsaGraphicsResourceInfo>,
    number_of_nodes: u64,
    node_array: In<u32>,
) -> Outcome<()> {
    let thunk = open::current()?;
    let info = graphics_resource_info.required("GraphicsResourceInfo")?;
    let snapshot = thunk.snapshot()?;
    let gpus = match (node_array.is_null(), number_of_nodes) {
        (true, 0) => None,
        _ => Some(snapshot.gpu_ids(&nodes(number_of_nodes, node_array)?)?),
    };
    let dma_buf = descriptor(graphics_resource_handle)?;
    let imported = thunk.memory.import_graphics(thunk.host(&snapshot), dma_buf.as_fd(), gpus.as_deref())?;
    info.write(HsaGraphicsResourceInfo {
        memory_address: imported.address,
        size_in_bytes: imported.size,
        metadata: imported.metadata,
        metadata_size_in_bytes: 0,
        node_id: imported.node,
    });
    Ok(())
}

exports! {
    "graphics";
    /// Registers a dma-buf of a graphics driver.
    done("dma-bufs of the guest's virtio-gpu device, without metadata; those of other devices are refused")
    fn hsaKmtRegisterGraphicsHandleToNodes(
        graphics_resource_handle: u64,
        graphics_resource_info: Out<HsaGraphicsResourceInfo>,
        number_of_nodes: u64,
        node_array: In<u32>,
    ) {
        register(graphics_resource_handle, graphics_resource_info, number_of_nodes, node_array)
    }

    /// Registers a dma-buf of a graphics driver, with an address for GPUs whether the flags ask for one or not.
    done("as hsaKmtRegisterGraphicsHandleToNodes")
    fn hsaKmtRegisterGraphicsHandleToNodesExt(
        graphics_resource_handle: u64,
        graphics_resource_info: Out<HsaGraphicsResourceInfo>,
        number_of_nodes: u64,
        node_array: In<u32>,
        register_flags: u32,
    ) {
        let _ = register_flags;
        register(graphics_resource_handle, graphics_resource_info, number_of_nodes, node_array)
    }

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

    /// Takes a semaphore of a graphics driver.
    not_supported("for Windows, as AMD's library answers on Linux")
    fn hsaKmtImportExternalSemaphore(node_id: u32, nt_handle: Address, kind: u32, out_handle: Out<u64>);

    /// Lets go of it.
    not_supported("for Windows, as AMD's library answers on Linux")
    fn hsaKmtDestroyExternalSemaphore(handle: u64);

    /// Has a queue signal it.
    not_supported("for Windows, as AMD's library answers on Linux")
    fn hsaKmtQueueSignalExternalSemaphore(queue_id: u64, handle: u64, value: u64);

    /// Has a queue wait for it.
    not_supported("for Windows, as AMD's library answers on Linux")
    fn hsaKmtQueueWaitExternalSemaphore(queue_id: u64, handle: u64, value: u64);

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
