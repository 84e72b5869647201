//! Queues.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use hsakmt_abi::event::HsaEvent;
use hsakmt_abi::queue::{HsaQueueInfo, HsaQueuePriority, HsaQueueResource, HsaQueueType};

use super::exports;
use super::pointer::{Address, In, Out};

exports! {
    "queue";
    /// Makes a queue.
    not_implemented("planned: doorbells and rings in shared memory")
    fn hsaKmtCreateQueue(
        node_id: u32,
        queue_type: HsaQueueType,
        queue_percentage: u32,
        priority: HsaQueuePriority,
        queue_address: Address,
        queue_size_in_bytes: u64,
        event: Out<HsaEvent>,
        queue_resource: Out<HsaQueueResource>,
    );

    /// Changes a queue.
    not_implemented("planned")
    fn hsaKmtUpdateQueue(
        queue_id: u64,
        queue_percentage: u32,
        priority: HsaQueuePriority,
        queue_address: Address,
        queue_size: u64,
        event: Out<HsaEvent>,
    );

    /// Destroys a queue.
    not_implemented("planned")
    fn hsaKmtDestroyQueue(queue_id: u64);

    /// Sets which compute units a queue may use.
    not_implemented("planned")
    fn hsaKmtSetQueueCUMask(queue_id: u64, cu_mask_count: u32, queue_cu_mask: In<u32>);

    /// State of a queue's waves.
    not_implemented("planned")
    fn hsaKmtGetQueueInfo(queue_id: u64, queue_info: Out<HsaQueueInfo>);

    /// Gives a queue global wave sync.
    not_implemented("planned")
    fn hsaKmtAllocQueueGWS(queue_id: u64, n_gws: u32, first_gws: Out<u32>);
}
