//! User-mode queues: what AMD's library makes for them (queues.c), and their doorbells.
//!
//! | memory | where | who uses it |
//! |---|---|---|
//! | control page | guest memory of the library | read and write pointer of PM4 and SDMA queues; the mask of compute units, for `hsaKmtGetQueueInfo` |
//! | end-of-pipe buffer | VRAM | the GPU |
//! | save area | guest memory of the library | the GPU, when it preempts the queue; headers written here |
//! | doorbells | [`doorbell`] | the program rings there |
//!
//! A queue's id is the address of its control page, as in AMD's library, but it is looked up and not followed.

mod allowance;
mod doorbell;
mod ring;
mod sizes;
pub mod trap;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use hsakmt_abi::event::HsaEvent;
use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::queue::{
    HsaQueueInfo, HsaQueuePriority, HsaQueueResource, HsaQueueType, HsaUserContextSaveAreaHeader,
};
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::queue::{
    KFD_IOC_QUEUE_TYPE_COMPUTE, KFD_IOC_QUEUE_TYPE_COMPUTE_AQL, KFD_IOC_QUEUE_TYPE_SDMA,
    KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID, KFD_IOC_QUEUE_TYPE_SDMA_XGMI,
};
use virtio_kfd_protocol::calls::{
    AllocQueueGws, CreateQueue, DestroyQueue, GetQueueWaveState, SetCuMask, UpdateQueue,
};
use virtio_kfd_protocol::limits::{MAX_CONTROL_STACK_BYTES, MAX_CU_MASK_WORDS, MAX_REQUESTS_PER_FRAME};
use virtio_kfd_protocol::{
    AllocQueueGwsRequest, CreateQueueRequest, GuestVa, QueueId, QueueRequest, UpdateQueueRequest,
};

use self::doorbell::Doorbells;
use self::ring::Ring;
use self::sizes::{SaveArea, compute_units, end_of_pipe};
use self::trap::Watcher;
use super::Thunk;
use super::lock::lock;
use super::memory::block::Block;
use super::memory::{Host, Memory};
use super::refusal::{Level, Outcome, Refusal, say};
use super::topology::Gpu;
use crate::client::{Client, ClientError};

/// Bytes of a control page.
const CONTROL: u64 = 4096;
/// Where in it the pointers and the mask are, in bytes. The pointers are where AMD's library has them.
const WRITE_POINTER: u64 = 8;
const READ_POINTER: u64 = 16;
const CU_MASK: u64 = 128;

/// Bytes of the save area's header that the kernel writes: `wave_state` of `struct kfd_context_save_area_header`.
const WAVE_STATE: usize = 16;

/// What `hsaKmtCreateQueue` is asked for.
#[derive(Clone, Copy, Debug)]
pub struct NewQueue {
    /// Where.
    pub node: u32,
    /// Kind.
    pub kind: HsaQueueType,
    /// Share of the GPU in per cent.
    pub percentage: u32,
    /// Priority.
    pub priority: HsaQueuePriority,
    /// Number of the engine, for [`HsaQueueType::SDMA_BY_ENGINE`].
    pub sdma_engine: u32,
    /// Address of the ring.
    pub ring: u64,
    /// Its bytes.
    pub ring_size: u64,
    /// Event that says that the queue has failed.
    pub event: Option<HsaEvent>,
    /// Addresses of the application, for kinds of queues whose pointers are its own.
    pub resource: HsaQueueResource,
}

/// What `hsaKmtUpdateQueue` is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Share of the GPU in per cent.
    pub percentage: u32,
    /// Priority.
    pub priority: HsaQueuePriority,
    /// Address of the ring, 0 to make the queue inactive.
    pub ring: u64,
    /// Its bytes.
    pub ring_size: u64,
}

/// What the library has made for a queue.
struct Parts {
    control: Block,
    end_of_pipe: Option<Block>,
    save: Option<(SaveArea, Block)>,
}

impl Parts {
    fn blocks(&self) -> impl Iterator<Item = &Block> {
        let save = self.save.as_ref().map(|(_, block)| block);
        std::iter::once(&self.control).chain(&self.end_of_pipe).chain(save)
    }
}

/// A queue.
struct Queue {
    id: QueueId,
    parts: Parts,
    /// Bits in the mask of compute units.
    cu_bits: AtomicU32,
    /// How this library rings it, for AQL queues.
    ring: Option<Ring>,
}

/// All queues of one connection.
#[derive(Default)]
pub struct Queues {
    /// By the id that the application has.
    live: Mutex<BTreeMap<u64, Arc<Queue>>>,
    doorbells: Doorbells,
    watcher: Mutex<Watch>,
}

/// Whether the doorbells are watched.
#[derive(Default)]
enum Watch {
    /// There has been no queue.
    #[default]
    NotYet,
    Running(Watcher),
    /// This process cannot, or the connection is closed.
    Never,
}

/// KFD's number for a priority of -3 to 3.
fn priority(priority: HsaQueuePriority) -> Outcome<u32> {
    const PRIORITIES: [u32; 7] = [0, 3, 5, 7, 9, 11, 15];
    let index =
        priority.0.checked_sub(HsaQueuePriority::MINIMUM.0).and_then(|index| usize::try_from(index).ok());
    let found = index.and_then(|index| PRIORITIES.get(index)).copied();
    found.ok_or_else(|| Refusal::parameter(format!("Priority is {}, expected -3 to 3", priority.0)))
}

/// KFD's number for a kind of queue.
fn kind(kind: HsaQueueType) -> Outcome<u32> {
    match kind {
        HsaQueueType::COMPUTE => Ok(KFD_IOC_QUEUE_TYPE_COMPUTE),
        HsaQueueType::SDMA => Ok(KFD_IOC_QUEUE_TYPE_SDMA),
        HsaQueueType::SDMA_XGMI => Ok(KFD_IOC_QUEUE_TYPE_SDMA_XGMI),
        HsaQueueType::SDMA_BY_ENGINE => Ok(KFD_IOC_QUEUE_TYPE_SDMA_BY_ENG_ID),
        HsaQueueType::COMPUTE_AQL => Ok(KFD_IOC_QUEUE_TYPE_COMPUTE_AQL),
        other => Err(Refusal::parameter(format!("Type is {}, expected 1, 2, 5, 6 or 21", other.0))),
    }
}

fn is_compute(kind: HsaQueueType) -> bool {
    matches!(kind, HsaQueueType::COMPUTE | HsaQueueType::COMPUTE_AQL)
}

fn ring_size(bytes: u64) -> Outcome<u32> {
    u32::try_from(bytes)
        .map_err(|_| Refusal::parameter(format!("the ring has {bytes:#x} bytes, most are 32 bits")))
}

/// What the host's kernel says of a queue's arguments.
fn refused(error: &ClientError) -> Refusal {
    match error.errno() {
        Some(libc::EINVAL) => Refusal::host(HsakmtStatus::INVALID_PARAMETER, error),
        Some(libc::ENOMEM) => Refusal::host(HsakmtStatus::NO_MEMORY, error),
        _ => Refusal::host(HsakmtStatus::ERROR, error),
    }
}

impl Queues {
    /// `hsaKmtCreateQueue`: the queue's id and addresses.
    pub fn create(&self, memory: &Memory, host: Host<'_>, new: NewQueue) -> Outcome<HsaQueueResource> {
        let asked_priority = priority(new.priority)?;
        let gpu = *host.snapshot.gpu(new.node)?;
        let asked_kind = kind(new.kind)?;
        let asked_size = ring_size(new.ring_size)?;
        let parts = make(memory, host, &gpu, &new)?;
        let mut resource = new.resource;
        if new.kind != HsaQueueType::COMPUTE_AQL {
            resource.queue_wptr_value = parts.control.start().saturating_add(WRITE_POINTER);
            resource.queue_rptr_value = parts.control.start().saturating_add(READ_POINTER);
        }
        let mut request = CreateQueueRequest {
            ring_va: GuestVa(new.ring),
            write_pointer_va: GuestVa(resource.queue_wptr_value),
            read_pointer_va: GuestVa(resource.queue_rptr_value),
            ring_size: asked_size,
            gpu_id: gpu.gpu_id,
            kind: asked_kind,
            percentage: new.percentage,
            priority: asked_priority,
            sdma_engine_id: new.sdma_engine,
            ..Default::default()
        };
        if let Some(block) = &parts.end_of_pipe {
            (request.eop_va, request.eop_size) = (GuestVa(block.start()), block.size());
        }
        if let Some((save, block)) = &parts.save {
            request.context_save_va = GuestVa(block.start());
            (request.context_save_size, request.control_stack_size) = (save.area, save.control_stack);
        }
        let (id, doorbell) = self.create_on_host(memory, host, &gpu, &request).inspect_err(|_| {
            free(memory, host.client, &parts);
        })?;
        let name = parts.control.start();
        let units = host.snapshot.properties(new.node).map_or(0, |node| compute_units(&node));
        let cu_bits = units.next_multiple_of(u32::BITS);
        for (offset, word) in (CU_MASK..).step_by(size_of::<u32>()).zip(full_mask(units)) {
            parts.control.store(offset, word);
        }
        let aql = new.kind == HsaQueueType::COMPUTE_AQL;
        let ring = aql.then(|| Ring::new(resource.queue_wptr_value, doorbell));
        let queue = Queue { id, parts, cu_bits: AtomicU32::new(cu_bits), ring };
        lock(&self.live).insert(name, Arc::new(queue));
        resource.queue_id = name;
        resource.queue_door_bell = doorbell;
        Ok(resource)
    }

    /// The kernel's queue, and the address of its doorbell.
    fn create_on_host(
        &self,
        memory: &Memory,
        host: Host<'_>,
        gpu: &Gpu,
        request: &CreateQueueRequest,
    ) -> Outcome<(QueueId, u64)> {
        let anew = || {
            if let Watch::Running(watcher) = &mut *lock(&self.watcher) {
                watcher.begin_anew();
            }
        };
        let doorbells = self.doorbells.of(memory, host, gpu, anew)?;
        let (answer, _) =
            host.client.call::<CreateQueue>(request, &[], 0).map_err(|error| refused(&error))?;
        match doorbell::address(&doorbells, answer.doorbell_offset) {
            Ok(doorbell) => Ok((answer.queue, doorbell)),
            Err(refusal) => {
                // A queue that nobody could ring.
                host.client.call::<DestroyQueue>(&QueueRequest { queue: answer.queue, pad: 0 }, &[], 0)?;
                Err(refusal)
            }
        }
    }

    /// Has the doorbells watched from now on, so that the host can sleep while none rings.
    pub fn watch(&self, thunk: &Arc<Thunk>) {
        let mut watch = lock(&self.watcher);
        if matches!(*watch, Watch::NotYet) {
            *watch = Watcher::start(thunk).map_or_else(
                |error| {
                    say(Level::Info, || format!("doorbells cannot trap, the host looks at them: {error}"));
                    Watch::Never
                },
                Watch::Running,
            );
        }
    }

    fn find(&self, id: u64) -> Outcome<Arc<Queue>> {
        lock(&self.live).get(&id).cloned().ok_or_else(|| unknown(id))
    }

    /// `hsaKmtQueueRingDoorbell`
    pub fn ring(&self, id: u64) -> Outcome<()> {
        let queue = self.find(id)?;
        let other = || Refusal::new(HsakmtStatus::NOT_SUPPORTED, "the queue is no AQL queue");
        queue.ring.as_ref().ok_or_else(other)?.ring();
        Ok(())
    }

    /// `hsaKmtUpdateQueue`
    pub fn update(&self, client: &Client, id: u64, update: Update) -> Outcome<()> {
        let asked = priority(update.priority)?;
        let queue = self.find(id)?;
        let request = UpdateQueueRequest {
            ring_va: GuestVa(update.ring),
            queue: queue.id,
            ring_size: ring_size(update.ring_size)?,
            percentage: update.percentage,
            priority: asked,
        };
        client.call::<UpdateQueue>(&request, &[], 0)?;
        Ok(())
    }

    /// `hsaKmtDestroyQueue`. After an error the queue is as before.
    pub fn destroy(&self, memory: &Memory, client: &Client, id: u64) -> Outcome<()> {
        let queue = lock(&self.live).remove(&id).ok_or_else(|| unknown(id))?;
        if let Err(error) = client.call::<DestroyQueue>(&QueueRequest { queue: queue.id, pad: 0 }, &[], 0) {
            lock(&self.live).insert(id, queue);
            return Err(error.into());
        }
        free(memory, client, &queue.parts);
        Ok(())
    }

    /// `hsaKmtSetQueueCUMask`: the mask's words, of which the kernel takes the first 1024 bits.
    pub fn set_cu_mask(&self, client: &Client, id: u64, mask: &[u32]) -> Outcome<()> {
        let queue = self.find(id)?;
        let mask = mask.get(..MAX_CU_MASK_WORDS).unwrap_or(mask);
        client.call::<SetCuMask>(&QueueRequest { queue: queue.id, pad: 0 }, mask, 0)?;
        for (offset, word) in (CU_MASK..).step_by(size_of::<u32>()).zip(mask) {
            queue.parts.control.store(offset, *word);
        }
        let bits = u32::try_from(mask.len()).unwrap_or(0).saturating_mul(u32::BITS);
        queue.cu_bits.store(bits, Ordering::Relaxed);
        Ok(())
    }

    /// `hsaKmtGetQueueInfo`: the state of an inactive queue's waves, and the bytes of one die's save area. The control stack is
    /// then in there.
    pub fn info(&self, client: &Client, id: u64) -> Outcome<(HsaQueueInfo, u64)> {
        let queue = self.find(id)?;
        let none = || Refusal::error("the queue has no save area");
        let (save, block) = queue.parts.save.as_ref().ok_or_else(none)?;
        let request = QueueRequest { queue: queue.id, pad: 0 };
        let (answer, bytes) = client.call::<GetQueueWaveState>(&request, &[], MAX_CONTROL_STACK_BYTES)?;
        let used = answer.control_stack_used;
        let beyond = || {
            Refusal::error(format!("{used:#x} bytes of control stack, there are {:#x}", save.control_stack))
        };
        let top = save.control_stack.checked_sub(used).ok_or_else(beyond)?;
        // What the kernel writes, to where it writes it.
        if let Some(header) = bytes.get(..WAVE_STATE) {
            block.store_bytes(0, header);
        }
        let (from, to) = (usize::try_from(top).ok(), usize::try_from(save.control_stack).ok());
        if let (Some(from), Some(to)) = (from, to)
            && from >= WAVE_STATE
            && let Some(stack) = bytes.get(from..to)
        {
            block.store_bytes(top.into(), stack);
        }
        let start = block.start();
        let info = HsaQueueInfo {
            num_cu_assigned: queue.cu_bits.load(Ordering::Relaxed),
            cu_mask_info: queue.parts.control.start().saturating_add(CU_MASK),
            user_context_save_area: start.saturating_add(save.control_stack.into()),
            save_area_size_in_bytes: answer.save_area_used.into(),
            control_stack_top: start.saturating_add(top.into()),
            control_stack_used_in_bytes: used.into(),
            save_area_header: start,
            ..Default::default()
        };
        Ok((info, save.area.into()))
    }

    /// `hsaKmtAllocQueueGWS`: the first one.
    pub fn alloc_gws(&self, client: &Client, id: u64, count: u32) -> Outcome<u32> {
        let queue = self.find(id)?.id;
        match client.call::<AllocQueueGws>(&AllocQueueGwsRequest { queue, count }, &[], 0) {
            Ok((answer, _)) => Ok(answer.first),
            Err(error) => {
                let status = match error.errno() {
                    Some(libc::EINVAL) => HsakmtStatus::INVALID_PARAMETER,
                    Some(libc::EBUSY) => HsakmtStatus::OUT_OF_RESOURCES,
                    Some(libc::ENODEV) => HsakmtStatus::NOT_SUPPORTED,
                    _ => HsakmtStatus::ERROR,
                };
                Err(Refusal::host(status, &error))
            }
        }
    }

    /// Ends all queues, for a close. Their memory goes with all other memory.
    pub fn release_all(&self, client: &Client) {
        let watch = std::mem::replace(&mut *lock(&self.watcher), Watch::Never);
        if let Watch::Running(watcher) = watch {
            watcher.end();
        }
        let live: Vec<_> = std::mem::take(&mut *lock(&self.live)).into_values().collect();
        for some in live.chunks(MAX_REQUESTS_PER_FRAME) {
            let requests = || some.iter().map(|queue| QueueRequest { queue: queue.id, pad: 0 });
            let mut batch = client.batch();
            for request in requests() {
                let _ = batch.push::<DestroyQueue>(&request, &[], 0);
            }
            if batch.run().is_ok_and(|answers| answers.check().is_ok()) {
                continue;
            }
            // A frame ends at the first request that is refused.
            for request in requests() {
                let _ = client.call::<DestroyQueue>(&request, &[], 0);
            }
        }
        self.doorbells.release_all(client);
    }
}

fn unknown(id: u64) -> Refusal {
    Refusal::parameter(format!("QueueId {id:#x} is no queue of this process, or destroyed already"))
}

/// A mask of that many compute units, all set.
fn full_mask(units: u32) -> impl Iterator<Item = u32> {
    let words = units.div_ceil(u32::BITS);
    (0..words).map(move |word| {
        let left = units.saturating_sub(word.saturating_mul(u32::BITS));
        u32::MAX.checked_shr(u32::BITS.saturating_sub(left)).unwrap_or(0)
    })
}

/// Makes the memory that a queue works with, mapped to its GPU. After an error there is none of it.
fn make(memory: &Memory, host: Host<'_>, gpu: &Gpu, new: &NewQueue) -> Outcome<Parts> {
    let mapped = |block: Block| match memory.map_block(host, gpu, &block) {
        Ok(()) => Ok(block),
        Err(refusal) => {
            let _ = memory.free_block(host.client, &block);
            Err(refusal)
        }
    };
    let pinned = HsaMemFlags(0).with(HsaMemFlags::NON_PAGED, 1).with(HsaMemFlags::UNCACHED, 1);
    let control = memory.guest_block(host, gpu, CONTROL, pinned).and_then(mapped)?;
    let mut parts = Parts { control, end_of_pipe: None, save: None };
    if !is_compute(new.kind) {
        return Ok(parts);
    }
    let (gfx, properties) = (host.snapshot.node(new.node)?.gfx, host.snapshot.properties(new.node)?);
    let rest = || {
        let end_of_pipe = match end_of_pipe(gfx, new.kind) {
            0 => None,
            size => Some(memory.device_block(host, gpu, size).and_then(mapped)?),
        };
        Ok(end_of_pipe)
    };
    parts.end_of_pipe = rest().inspect_err(|_: &Refusal| free(memory, host.client, &parts))?;
    if let Some(save) = SaveArea::new(gfx, &properties) {
        let block = memory.guest_block(host, gpu, save.total, HsaMemFlags(0)).and_then(mapped);
        let block = block.inspect_err(|_| free(memory, host.client, &parts))?;
        write_headers(&block, save, new);
        parts.save = Some((save, block));
    }
    Ok(parts)
}

/// The head of each die's save area.
fn write_headers(block: &Block, save: SaveArea, new: &NewQueue) {
    use std::mem::offset_of;
    type Header = HsaUserContextSaveAreaHeader;
    let at = |start: u64, field: usize| start.saturating_add(u64::try_from(field).unwrap_or(u64::MAX));
    for die in 0..save.dies {
        let start = u64::from(die).saturating_mul(save.area.into());
        let rest = save.dies.saturating_sub(die);
        block.store(at(start, offset_of!(Header, debug_offset)), rest.saturating_mul(save.area));
        block.store(at(start, offset_of!(Header, debug_size)), save.debug.saturating_mul(save.dies));
        block.store_long(at(start, offset_of!(Header, error_reason)), new.resource.error_reason);
        let event = new.event.map_or(0, |event| event.event_id);
        block.store(at(start, offset_of!(Header, error_event_id)), event);
    }
}

/// Gives back what a queue worked with. What the host does not take back goes with the connection.
fn free(memory: &Memory, client: &Client, parts: &Parts) {
    for block in parts.blocks() {
        if let Err(refusal) = memory.free_block(client, block) {
            say(Level::Warning, || format!("memory of a queue: {refusal}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_are_those_of_amds_library() {
        let numbers: Vec<u32> = (-3..=3).map(|number| priority(HsaQueuePriority(number)).unwrap()).collect();
        assert_eq!(numbers, [0, 3, 5, 7, 9, 11, 15]);
        for bad in [-4, 4, 0xffff_ffff, i64::MIN, i64::MAX] {
            let refused = priority(HsaQueuePriority(bad)).unwrap_err();
            assert_eq!(refused.status, HsakmtStatus::INVALID_PARAMETER, "{bad}");
        }
    }

    #[test]
    fn masks_of_all_units() {
        assert_eq!(full_mask(0).count(), 0);
        assert_eq!(full_mask(60).collect::<Vec<_>>(), [u32::MAX, 0x0fff_ffff]);
        assert_eq!(full_mask(64).collect::<Vec<_>>(), [u32::MAX; 2]);
        assert_eq!(full_mask(1).collect::<Vec<_>>(), [1]);
    }
}
