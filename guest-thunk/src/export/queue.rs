//! Queues.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use hsakmt_abi::event::HsaEvent;
use hsakmt_abi::queue::{HsaQueueInfo, HsaQueuePriority, HsaQueueResource, HsaQueueType};
use hsakmt_abi::status::HsakmtStatus;
use virtio_kfd_protocol::limits::MAX_CU_MASK_WORDS;

use super::caller::layout;
use super::exports;
use super::pointer::{Address, In, Out, number};
use crate::thunk::open;
use crate::thunk::queue::{NewQueue, Update};
use crate::thunk::refusal::{Outcome, Refusal};

/// Bits of a word of a mask.
const BITS: u32 = u32::BITS;
/// Bytes of a page.
const PAGE: u64 = 4096;

/// Makes a queue that is described once what stands in its resource is known.
fn create(
    queue_resource: Out<HsaQueueResource>,
    new: impl FnOnce(HsaQueueResource) -> NewQueue,
) -> Outcome<()> {
    let thunk = open::current()?;
    let no_place = || Refusal::parameter("QueueResource is NULL");
    let new = new(queue_resource.read().ok_or_else(no_place)?);
    let snapshot = thunk.snapshot()?;
    queue_resource.write(thunk.queues.create(&thunk.memory, thunk.host(&snapshot), new)?);
    thunk.queues.watch(&thunk);
    Ok(())
}

exports! {
    "queue";
    /// Makes a queue.
    done("gfx9 and later; what the kernel refuses with EINVAL or ENOMEM is INVALID_PARAMETER or NO_MEMORY, where AMD's library says ERROR")
    fn hsaKmtCreateQueue(
        node_id: u32,
        queue_type: HsaQueueType,
        queue_percentage: u32,
        priority: HsaQueuePriority,
        queue_address: Address,
        queue_size_in_bytes: u64,
        event: Out<HsaEvent>,
        queue_resource: Out<HsaQueueResource>,
    ) {
        create(queue_resource, |resource| NewQueue {
            node: node_id,
            kind: queue_type,
            percentage: queue_percentage,
            priority,
            sdma_engine: 0,
            ring: number(queue_address),
            ring_size: queue_size_in_bytes,
            event: event.read(),
            resource,
        })
    }

    /// Makes a queue, for SDMA on an engine of the caller's choice.
    done("as hsaKmtCreateQueue")
    fn hsaKmtCreateQueueExt(
        node_id: u32,
        queue_type: HsaQueueType,
        queue_percentage: u32,
        priority: HsaQueuePriority,
        sdma_engine_id: u32,
        queue_address: Address,
        queue_size_in_bytes: u64,
        event: Out<HsaEvent>,
        queue_resource: Out<HsaQueueResource>,
    ) {
        create(queue_resource, |resource| NewQueue {
            node: node_id,
            kind: queue_type,
            percentage: queue_percentage,
            priority,
            sdma_engine: sdma_engine_id,
            ring: number(queue_address),
            ring_size: queue_size_in_bytes,
            event: event.read(),
            resource,
        })
    }

    /// Makes a queue, with a ring of metadata behind its ring.
    done("as hsaKmtCreateQueue; NOT_IMPLEMENTED with metadata, which kernels from KFD 1.22 on know for gfx12.1's AQL queues")
    fn hsaKmtCreateQueueV2(
        node_id: u32,
        queue_type: HsaQueueType,
        queue_percentage: u32,
        priority: HsaQueuePriority,
        sdma_engine_id: u32,
        queue_address: Address,
        queue_size_in_bytes: u64,
        metadata_queue_size_in_bytes: u64,
        event: Out<HsaEvent>,
        queue_resource: Out<HsaQueueResource>,
    ) {
        match metadata_queue_size_in_bytes {
            0 => {}
            bytes if !bytes.is_multiple_of(PAGE) => {
                let why = format!("MetaDataQueueSizeInBytes is {bytes:#x}, expected whole pages");
                return Err(Refusal::parameter(why));
            }
            bytes => {
                let why = format!("a queue with {bytes:#x} bytes of metadata");
                return Err(Refusal::new(HsakmtStatus::NOT_IMPLEMENTED, why));
            }
        }
        create(queue_resource, |resource| NewQueue {
            node: node_id,
            kind: queue_type,
            percentage: queue_percentage,
            priority,
            sdma_engine: sdma_engine_id,
            ring: number(queue_address),
            ring_size: queue_size_in_bytes,
            event: event.read(),
            resource,
        })
    }

    /// Rings the doorbell of an AQL queue for all packets that have been reserved.
    done("what ROCr does under HSA_ENABLE_DTIF instead of a store to the doorbell")
    fn hsaKmtQueueRingDoorbell(queue_id: u64) {
        let thunk = open::current()?;
        thunk.queues.ring(queue_id)
    }

    /// The kernel's number of a queue.
    not_implemented("it is for debuggers, which need the process on the host")
    fn hsaKmtGetKernelQueueId(queue_id: u64, kernel_internal_queue_id: Out<u32>);

    /// Changes a queue.
    done
    fn hsaKmtUpdateQueue(
        queue_id: u64,
        queue_percentage: u32,
        priority: HsaQueuePriority,
        queue_address: Address,
        queue_size: u64,
        event: Out<HsaEvent>,
    ) {
        // As in AMD's library, the event is the one that the queue was made with.
        let _ = event;
        let thunk = open::current()?;
        let update = Update {
            percentage: queue_percentage,
            priority,
            ring: number(queue_address),
            ring_size: queue_size,
        };
        thunk.queues.update(&thunk.client, queue_id, update)
    }

    /// Destroys a queue.
    done
    fn hsaKmtDestroyQueue(queue_id: u64) {
        let thunk = open::current()?;
        thunk.queues.destroy(&thunk.memory, &thunk.client, queue_id)
    }

    /// Sets which compute units a queue may use.
    done("within those that the VM may use; bits beyond 1024 are dropped, as by the kernel")
    fn hsaKmtSetQueueCUMask(queue_id: u64, cu_mask_count: u32, queue_cu_mask: In<u32>) {
        let thunk = open::current()?;
        if cu_mask_count == 0 || !cu_mask_count.is_multiple_of(BITS) || queue_cu_mask.is_null() {
            let why = format!("CUMaskCount is {cu_mask_count}, expected a multiple of 32 and a mask");
            return Err(Refusal::parameter(why));
        }
        let words = usize::try_from(cu_mask_count / BITS).unwrap_or(MAX_CU_MASK_WORDS);
        let mask = queue_cu_mask.read_all(words.min(MAX_CU_MASK_WORDS));
        thunk.queues.set_cu_mask(&thunk.client, queue_id, &mask)
    }

    /// State of a queue's waves, in the caller's layout.
    done("not on GPUs of several dies")
    fn hsaKmtGetQueueInfo(queue_id: u64, queue_info: Out<HsaQueueInfo>) {
        let thunk = open::current()?;
        let queue_info = queue_info.required("QueueInfo")?;
        let (info, save_area) = thunk.queues.info(&thunk.client, queue_id)?;
        queue_info.bytes().write_all(&layout().queue_info(&info, save_area));
        Ok(())
    }

    /// Gives a queue global wave sync.
    done
    fn hsaKmtAllocQueueGWS(queue_id: u64, n_gws: u32, first_gws: Out<u32>) {
        let thunk = open::current()?;
        first_gws.write(thunk.queues.alloc_gws(&thunk.client, queue_id, n_gws)?);
        Ok(())
    }
}
