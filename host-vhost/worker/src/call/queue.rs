//! Queues and doorbells.

use std::time::Duration;

use kfd_abi::queue::{
    KFD_IOC_QUEUE_TYPE_COMPUTE, KFD_IOC_QUEUE_TYPE_COMPUTE_AQL, KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID,
};
use kfd_host::{NewQueue, QueueUpdate};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{
    AllocQueueGws, CreateQueue, DestroyQueue, DoorbellPage, GetQueueWaveState, RingDoorbells, SetCuMask,
    UpdateQueue, WaitDoorbells,
};
use virtio_kfd_protocol::limits::MAX_CONTROL_STACK_BYTES;
use virtio_kfd_protocol::{
    AllocQueueGwsAnswer, AllocQueueGwsRequest, CreateQueueAnswer, CreateQueueRequest, DOORBELL_SLICE_BYTES,
    DoorbellPageRequest, Nothing, QueueId, QueueRequest, QueueWaveStateAnswer, RingDoorbellsRequest, Status,
    UpdateQueueRequest, WaitDoorbellsAnswer, WaitDoorbellsRequest,
};

use super::{Outcome, Reply};
use crate::blob::PAGE;
use crate::context::{Context, Gpu};
use crate::exceptions;
use crate::failure::{Failure, errno_number, expect_zero};
use crate::queue::Queue;

/// The kernel's own errno, which has no name here: `ENOTSUPP` of include/linux/errno.h.
const ENOTSUPP: u32 = 524;

/// Bytes of `struct kfd_context_save_area_header` that `get_wave_state` fills in.
const WAVE_STATE_HEADER: usize = 16;

/// Bytes of a packet in an AQL queue (HSA Platform System Architecture Specification).
const AQL_PACKET_BYTES: u64 = 64;

/// `gfx_target_version` of the first GPUs with doorbells of 8 bytes.
const GFX9: u32 = 90_000;
/// Of the first that have their control stack in the save area alone, and whose compute units come in pairs.
const GFX10: u32 = 100_000;

pub fn create_queue(context: &Context, request: &CreateQueueRequest) -> Outcome<CreateQueue> {
    let gpu = with_doorbells(context, "CreateQueue", request.gpu_id)?;
    // set_queue_properties_from_user
    if request.kind > KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID {
        let reason = format!("CreateQueue: type {}", request.kind);
        return Err(Failure { status: Status::ERRNO, errno: ENOTSUPP, reason });
    }
    // Held until the pump has the write index, so that a blob that goes meanwhile is fenced off.
    let memory = context.memory();
    // Held during the calls, so that nobody else's new queue gets the id before all is done.
    let mut queues = context.queues();
    exceptions::start(context, &mut queues);
    let area = request.context_save_va.0;
    let taken = |queue: &Queue| queue.exceptions.is_some() && queue.addresses.last() == Some(&area);
    if queues.live().any(taken) {
        return Err(Failure::limit(format!(
            "CreateQueue: another queue has its context save area at {area:#x}"
        )));
    }
    let page = queues.exceptions.page(request)?;
    let write_index = match request.kind {
        KFD_IOC_QUEUE_TYPE_COMPUTE_AQL => memory.guest_word(gpu.id, request.write_pointer_va.0)?,
        _ => None,
    };
    let no_thread = |error| Failure::limit(format!("CreateQueue: no thread for doorbells: {error}"));
    context.pump.start().map_err(no_thread)?;
    queues.budget.take(1)?;
    let made = create(context, request).inspect_err(|_| queues.budget.give(1))?;
    let id = QueueId(made.id);
    // From now on: where it cannot be ended below, it stays with its page and its share of the budget.
    queues.insert(id, Queue::new(request, made.doorbell, page));
    let finished =
        mask_new_queue(context, gpu, request.kind, made.id).and_then(|()| map_doorbells(context, gpu));
    if let Err(failure) = finished {
        if let Err(stays) = queues.destroy(context, id) {
            context.throttle.log(|held| {
                tracing::error!(
                    "a queue that was not finished: {stays} ({held} messages before were held back)"
                );
            });
        }
        return Err(failure);
    }
    let slots = u64::from(request.ring_size) / AQL_PACKET_BYTES;
    let write_index = write_index.map(|words| (words, slots));
    context.pump.change(|doorbells| doorbells.add(gpu.id.0, made.doorbell, write_index));
    let doorbell_offset = u32::try_from(made.doorbell.saturating_mul(8)).unwrap_or(u32::MAX);
    Ok(Reply::of(CreateQueueAnswer { queue: id, doorbell_offset }))
}

fn create(context: &Context, request: &CreateQueueRequest) -> Result<kfd_host::Queue, Failure> {
    Ok(context.kfd.create_queue(&NewQueue {
        gpu_id: request.gpu_id.0,
        kind: request.kind,
        ring: request.ring_va.0,
        ring_size: request.ring_size,
        write_pointer: request.write_pointer_va.0,
        read_pointer: request.read_pointer_va.0,
        eop: request.eop_va.0,
        eop_size: request.eop_size,
        context_save: request.context_save_va.0,
        context_save_size: request.context_save_size,
        control_stack_size: request.control_stack_size,
        percentage: request.percentage,
        priority: request.priority,
        sdma_engine_id: request.sdma_engine_id,
    })?)
}

fn mask_new_queue(context: &Context, gpu: &Gpu, kind: u32, id: u32) -> Result<(), Failure> {
    let compute = kind == KFD_IOC_QUEUE_TYPE_COMPUTE || kind == KFD_IOC_QUEUE_TYPE_COMPUTE_AQL;
    match &gpu.cu_mask {
        Some(mask) if compute => Ok(context.kfd.set_cu_mask(id, mask)?),
        _ => Ok(()),
    }
}

/// The pages are there from a GPU's first queue on.
fn map_doorbells(context: &Context, gpu: &Gpu) -> Result<(), Failure> {
    if !context.pump.look_up(|doorbells| doorbells.has_real(gpu.id.0)) {
        let words = context.kfd.doorbells(gpu.id.0)?;
        context.pump.change(|doorbells| doorbells.set_real(gpu.id.0, words));
    }
    Ok(())
}

fn with_doorbells<'c>(
    context: &'c Context,
    call: &str,
    id: virtio_kfd_protocol::GpuId,
) -> Result<&'c Gpu, Failure> {
    let gpu = context.gpu(id)?;
    match gpu.gfx >= GFX9 {
        true => Ok(gpu),
        false => {
            let reason = format!("{call}: doorbells of 4 bytes (before gfx9) cannot be passed on");
            Err(Failure::new(Status::NOT_SUPPORTED, reason))
        }
    }
}

pub fn destroy_queue(context: &Context, request: &QueueRequest) -> Outcome<DestroyQueue> {
    expect_zero("DestroyQueue", &[request.pad.into()])?;
    context.queues().destroy(context, request.queue)?;
    Ok(Reply::of(Nothing {}))
}

pub fn update_queue(context: &Context, request: &UpdateQueueRequest) -> Outcome<UpdateQueue> {
    let mut queues = context.queues();
    let UpdateQueueRequest { ring_va, queue, ring_size, percentage, priority } = *request;
    let update = QueueUpdate { ring: ring_va.0, ring_size, percentage, priority };
    context.kfd.update_queue(queue.0, &update)?;
    let updated = queues.get_mut(queue).map(|queue| {
        let [ring, ..] = &mut queue.addresses;
        *ring = ring_va.0;
        (queue.gpu_id.0, queue.doorbell)
    });
    // A program that makes a queue active is about to ring.
    context.pump.change(|doorbells| {
        if let Some((gpu, doorbell)) = updated {
            doorbells.resize(gpu, doorbell, u64::from(ring_size) / AQL_PACKET_BYTES);
        }
    });
    Ok(Reply::of(Nothing {}))
}

/// The guest's mask, without what the operator keeps from it.
pub fn set_cu_mask(context: &Context, request: &QueueRequest, mask: &[u32]) -> Outcome<SetCuMask> {
    expect_zero("SetCuMask", &[request.pad.into()])?;
    let queues = context.queues();
    let gpu = queues.get(request.queue).map(|queue| context.gpu(queue.gpu_id)).transpose()?;
    let allowed = gpu.and_then(|gpu| gpu.cu_mask.as_deref());
    context.kfd.set_cu_mask(request.queue.0, &restrict(mask, allowed)?)?;
    Ok(Reply::of(Nothing {}))
}

fn restrict(mask: &[u32], allowed: Option<&[u32]>) -> Result<Vec<u32>, Failure> {
    let Some(allowed) = allowed else { return Ok(mask.to_vec()) };
    let allowed = allowed.iter().copied().chain(std::iter::repeat(0));
    let left: Vec<u32> = mask.iter().zip(allowed).map(|(word, allowed)| word & allowed).collect();
    // Without any unit the queue would never end what it begins; a mask that asks for none is the kernel's to judge.
    match mask.iter().all(|word| *word == 0) || left.iter().any(|word| *word != 0) {
        true => Ok(left),
        false => {
            let reason = format!("SetCuMask: {mask:x?} has none of the compute units that this VM may use");
            Err(Failure::invalid(reason))
        }
    }
}

pub fn get_queue_wave_state(context: &Context, request: &QueueRequest) -> Outcome<GetQueueWaveState> {
    expect_zero("GetQueueWaveState", &[request.pad.into()])?;
    let queues = context.queues();
    let Some(queue) = queues.get(request.queue) else {
        // pqm_get_wave_state
        let reason = format!("GetQueueWaveState: no queue {}", request.queue.0);
        return Err(Failure { status: Status::ERRNO, errno: errno_number(Errno::EFAULT), reason });
    };
    let gpu = context.gpu(queue.gpu_id)?;
    if gpu.xccs > 1 {
        // The kernel writes a save area of each die side by side.
        let reason = format!("GetQueueWaveState: a queue on {} dies", gpu.xccs);
        return Err(Failure::new(Status::NOT_SUPPORTED, reason));
    }
    if queue.control_stack_size as usize > MAX_CONTROL_STACK_BYTES {
        let (found, most) = (queue.control_stack_size, MAX_CONTROL_STACK_BYTES);
        return Err(Failure::limit(format!(
            "GetQueueWaveState: a control stack of {found} bytes, most {most}"
        )));
    }
    let mut state = context.kfd.queue_wave_state(request.queue.0, queue.control_stack_size)?;
    if gpu.gfx >= GFX10 {
        state.bytes.truncate(WAVE_STATE_HEADER);
    }
    let fixed = QueueWaveStateAnswer {
        control_stack_used: state.control_stack_used,
        save_area_used: state.save_area_used,
    };
    Ok(Reply::with(fixed, state.bytes))
}

pub fn alloc_queue_gws(context: &Context, request: &AllocQueueGwsRequest) -> Outcome<AllocQueueGws> {
    let first = context.kfd.alloc_queue_gws(request.queue.0, request.count)?;
    Ok(Reply::of(AllocQueueGwsAnswer { first, pad: 0 }))
}

pub fn doorbell_page(context: &Context, request: &DoorbellPageRequest) -> Outcome<DoorbellPage> {
    let gpu = with_doorbells(context, "DoorbellPage", request.gpu_id)?;
    if !request.offset.is_multiple_of(PAGE) {
        return Err(Failure::invalid(format!("DoorbellPage: offset {:#x} is no page's", request.offset)));
    }
    // Held until the pump has it, so that a blob that goes meanwhile is fenced off.
    let memory = context.memory();
    if context.pump.look_up(|doorbells| doorbells.has_shadow(gpu.id.0)) {
        return Err(Failure::invalid(format!("DoorbellPage: gpu_id {} has one", gpu.id.0)));
    }
    let shadow = memory.guest_words(request.resource, request.offset, DOORBELL_SLICE_BYTES)?;
    context.pump.set_shadow(gpu.id.0, shadow);
    Ok(Reply::of(Nothing {}))
}

pub fn ring_doorbells(context: &Context, request: &RingDoorbellsRequest) -> Outcome<RingDoorbells> {
    expect_zero("RingDoorbells", &[request.pad.into()])?;
    match request.armed {
        0 => context.pump.ring(),
        1 => context.pump.arm(),
        other => return Err(Failure::invalid(format!("RingDoorbells: armed {other}, expected 0 or 1"))),
    }
    Ok(Reply::of(Nothing {}))
}

pub fn wait_doorbells(context: &Context, request: &WaitDoorbellsRequest) -> Outcome<WaitDoorbells> {
    expect_zero("WaitDoorbells", &[request.pad.into()])?;
    let still = context.pump.wait_still(Duration::from_millis(request.timeout_ms.into()));
    Ok(Reply::of(WaitDoorbellsAnswer { still: still.into(), pad: 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_of_the_guest_keeps_within_the_operators() {
        assert_eq!(restrict(&[0xff, 1], None).unwrap(), [0xff, 1]);
        assert_eq!(restrict(&[0xff, 1, 3], Some(&[0xf0, 3])).unwrap(), [0xf0, 1, 0]);
        assert_eq!(restrict(&[0x10], Some(&[0xf0, 3])).unwrap(), [0x10]);
        assert_eq!(restrict(&[], Some(&[1])).unwrap(), []);
        assert_eq!(restrict(&[0], Some(&[1])).unwrap(), [0]);
        assert_eq!(restrict(&[2, 1], Some(&[1])).unwrap_err().status, Status::INVALID);
    }
}
