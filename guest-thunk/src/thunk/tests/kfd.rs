//! A host that keeps KFD's rules for buffers and events, as far as the thunk must keep them.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};

use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::frame::{AnswerFrameBuilder, RawRequest, RequestFrame};
use virtio_kfd_protocol::limits::MAX_SHARES;
use virtio_kfd_protocol::topology::{TopologyFile, pack};
use virtio_kfd_protocol::{
    AllocMemoryAnswer, AllocMemoryRequest, AllocQueueGwsAnswer, Apertures, AvailableMemoryAnswer, Call,
    CreateEventAnswer, CreateQueueAnswer, CreateQueueRequest, DoorbellPageRequest, EventId, GpuId, Handle,
    MapMemoryAnswer, MapRangeRequest, Nothing, QueueId, QueueWaveStateAnswer, Request, ShareMemoryAnswer,
    ShareToken, Status, TopologyReadAnswer, UpdateQueueRequest, WaitDoorbellsAnswer, WaitEvent,
    WaitEventsAnswer,
};

use crate::client::Client;
use crate::client::tests::host::{FakeHost, Fate, answer_with};
use crate::thunk::Thunk;
use crate::thunk::settings::Settings;

/// Two GPUs with a link between them.
pub const GPUS: [GpuId; 2] = [GpuId(77), GpuId(78)];

/// errno
const EINVAL: u32 = 22;
const EBUSY: u32 = 16;
const ENOMEM: u32 = 12;

/// A buffer.
#[derive(Clone, Debug, Default)]
pub struct Buffer {
    /// What it was made with.
    pub request: AllocMemoryRequest,
    /// Who has it mapped.
    pub mapped: Vec<GpuId>,
}

/// What the host knows.
#[derive(Default)]
pub struct State {
    /// Calls by frame, since the last look.
    pub frames: Vec<Vec<Call>>,
    /// Tokens that are good.
    pub tokens: HashSet<ShareToken>,
    /// Parts of buffers that GPUs have mapped.
    pub ranges: Vec<MapRangeRequest>,
    /// Buffers by slot.
    pub buffers: BTreeMap<u32, Buffer>,
    /// Bytes of VRAM that can still be allocated.
    pub vram: u64,
    /// How many GPUs a mapping may reach; the next one fails.
    pub map_limit: usize,
    /// The buffer of event slots.
    pub event_page: Option<Handle>,
    /// Events by id; whether they are set.
    pub events: BTreeMap<u32, bool>,
    /// Queues by id.
    pub queues: BTreeMap<u32, CreateQueueRequest>,
    /// Memory for doorbells, by GPU.
    pub doorbells: BTreeMap<u32, DoorbellPageRequest>,
    /// What was last asked about queues.
    pub updated: Option<UpdateQueueRequest>,
    /// The last mask.
    pub cu_mask: Vec<u32>,
    /// The errno with which the next calls about queues fail, or 0.
    pub queue_errno: u32,
    /// Where the next doorbell is.
    pub doorbell: u32,
    /// Whether doorbells are still.
    pub still: bool,
    /// How the next question for that is refused, or [`Status::OK`].
    pub wait_status: Status,
    /// What was said of the trap.
    pub armed: Vec<u32>,
    /// Whether there are no pages of registers.
    pub no_registers: bool,
    /// Registers that were stored to.
    pub flushes: Vec<u32>,
    /// What happens during the next such store.
    pub amid_flush: Option<Box<dyn FnOnce() + Send>>,
    queues_made: u32,
    made: u32,
}

/// A thunk on such a host.
pub struct Kfd {
    /// The host.
    pub state: Arc<Mutex<State>>,
    /// The thunk, with a topology.
    pub thunk: Arc<Thunk>,
    /// Bytes of the window that are free.
    pub window: Arc<Mutex<u64>>,
}

impl Kfd {
    /// Connects and takes a snapshot. The CPU cannot see VRAM.
    pub fn new() -> Kfd {
        Kfd::with_window(0)
    }

    /// The same with a window of so many bytes, if any.
    pub fn with_window(bytes: u64) -> Kfd {
        Kfd::with(bytes, Settings::default(), false)
    }

    /// The same in another environment, and on a host that has no pages of registers (those of SR-IOV guests).
    pub fn with(bytes: u64, settings: Settings, no_registers: bool) -> Kfd {
        let state = State { vram: 1 << 30, map_limit: 64, no_registers, ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let host = Arc::clone(&state);
        let host = FakeHost::new(move |_, frame| Fate::Answer(host.lock().unwrap().frame(frame)));
        let host = if bytes > 0 { host.with_window(bytes) } else { host };
        let window = host.window();
        let thunk = Arc::new(Thunk::new(Client::over(Box::new(host)).unwrap(), settings));
        thunk.acquire_snapshot().unwrap();
        state.lock().unwrap().frames.clear();
        Kfd { state, thunk, window }
    }

    /// The frames since the last time.
    pub fn frames(&self) -> Vec<Vec<Call>> {
        std::mem::take(&mut self.state.lock().unwrap().frames)
    }
}

fn topology() -> Vec<TopologyFile> {
    let file = |path: &str, content: &str| TopologyFile { path: path.into(), content: content.into() };
    let mut files = vec![file("generation_id", "2\n"), file("system_properties", "platform_oem 7\n")];
    for (node, gpu) in [(1, GPUS[0]), (2, GPUS[1])] {
        let path = |name: &str| format!("nodes/{node}/{name}");
        files.push(file(&path("gpu_id"), &format!("{}\n", gpu.0)));
        files.push(file(
            &path("properties"),
            "simd_count 240\nsimd_per_cu 4\narray_count 4\nsimd_arrays_per_engine 1\nnum_xcc 1\ngfx_target_version 90006\nlds_size_in_kb 64\ndevice_id 26273\n",
        ));
        files.push(file(&path("mem_banks/0/properties"), "heap_type 1\nsize_in_bytes 4096\n"));
        files.push(file(&path("io_links/0/properties"), "type 2\nnode_to 0\nweight 20\n"));
        let other = 3 - node;
        files.push(file(&path("io_links/1/properties"), &format!("type 11\nnode_to {other}\nweight 15\n")));
    }
    files
}

impl State {
    fn frame(&mut self, frame: &RequestFrame<'_>) -> Vec<u8> {
        self.frames.push(Vec::new());
        let (mut failed, mut handles) = (false, Vec::new());
        answer_with(frame, |request, answer| {
            let opcode = request.header.opcode;
            if failed {
                return answer.push_status(opcode, Status::NOT_RUN, 0);
            }
            self.frames.last_mut().unwrap().extend(Call::from_opcode(opcode));
            handles.resize(handles.len() + 1, Handle::NONE);
            if let Err(errno) = self.run(request, answer, &mut handles) {
                failed = true;
                answer.push_status(opcode, Status::ERRNO, errno);
            }
        })
    }

    fn buffer(&mut self, handle: Handle, made: &[Handle]) -> Result<&mut Buffer, u32> {
        let handle = match handle.generation() {
            Handle::IN_FRAME => *made.get(handle.index() as usize).ok_or(EINVAL)?,
            _ => handle,
        };
        self.buffers.get_mut(&handle.index()).ok_or(EINVAL)
    }

    fn run(
        &mut self,
        raw: &RawRequest<'_>,
        answer: &mut AnswerFrameBuilder,
        made: &mut [Handle],
    ) -> Result<(), u32> {
        let header = &raw.header;
        match Request::decode(raw).unwrap() {
            Request::TopologyRead { fixed, .. } => {
                let archive = pack(&topology()).unwrap();
                let total = archive.len() as u64;
                let piece = &archive[(fixed.offset as usize).min(archive.len())..];
                answer.push::<TopologyRead>(header, &TopologyReadAnswer { total, generation: 2 }, piece);
            }
            Request::GetApertures { .. } => {
                let apertures = GPUS.map(|gpu_id| Apertures {
                    lds_base: 1 << 48,
                    scratch_base: 2 << 48,
                    scratch_limit: 2 << 48 | 0xffff_ffff,
                    gpuvm_base: 1 << 16,
                    gpuvm_limit: (1 << 47) - 1,
                    gpu_id,
                    ..Default::default()
                });
                answer.push::<GetApertures>(header, &Nothing {}, &apertures);
            }
            Request::RenderInfo { .. } => return Err(EINVAL),
            Request::AllocMemory { fixed, .. } => {
                // amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu without adev->rmmio_remap.
                if fixed.flags & 1 << 4 != 0 && self.no_registers {
                    return Err(ENOMEM);
                }
                if fixed.flags & 1 != 0 {
                    self.vram = self.vram.checked_sub(fixed.size).ok_or(ENOMEM)?;
                }
                let overlap = |buffer: &Buffer| {
                    let other = &buffer.request;
                    (fixed.va.0 != 0 && other.va.0 != 0)
                        && fixed.va.0 < other.va.0 + other.size
                        && other.va.0 < fixed.va.0 + fixed.size
                };
                assert!(!self.buffers.values().any(overlap), "two buffers at one address");
                self.made += 1;
                let handle = Handle::new(self.made, 1);
                *made.last_mut().unwrap() = handle;
                self.buffers.insert(self.made, Buffer { request: fixed, mapped: Vec::new() });
                answer.push::<AllocMemory>(
                    header,
                    &AllocMemoryAnswer { handle, mappable: fixed.flags >> 29 & 1, pad: 0 },
                    &[],
                );
            }
            Request::MapMemory { fixed, tail } => {
                let limit = self.map_limit;
                let buffer = self.buffer(fixed.handle, made)?;
                let done: Vec<GpuId> = tail.iter().copied().take(limit).collect();
                for gpu in &done {
                    assert!(!buffer.mapped.contains(gpu), "mapped twice");
                }
                buffer.mapped.extend(&done);
                let errno = if done.len() < tail.len() { ENOMEM } else { 0 };
                let n_success = done.len() as u32;
                answer.push::<MapMemory>(header, &MapMemoryAnswer { n_success, errno }, &[]);
            }
            Request::UnmapMemory { fixed, tail } => {
                let buffer = self.buffer(fixed.handle, made)?;
                buffer.mapped.retain(|gpu| !tail.contains(gpu));
                let n_success = tail.len() as u32;
                answer.push::<UnmapMemory>(header, &MapMemoryAnswer { n_success, errno: 0 }, &[]);
            }
            Request::MapRange { fixed, .. } => {
                let limit = self.map_limit;
                let size = self.buffer(fixed.handle, made)?.request.size;
                // amdgpu_vm_bo_map: within the buffer, and over nothing that is mapped.
                let end = fixed.va.0 + fixed.size;
                let overlap = |other: &MapRangeRequest| {
                    other.gpu_id == fixed.gpu_id && fixed.va.0 < other.va.0 + other.size && other.va.0 < end
                };
                if fixed.size == 0
                    || fixed.offset + fixed.size > size
                    || self.ranges.iter().any(overlap)
                    || self.ranges.len() >= limit
                {
                    return Err(EINVAL);
                }
                self.ranges.push(fixed);
                answer.push::<MapRange>(header, &Nothing {}, &[]);
            }
            Request::UnmapRange { fixed, .. } => {
                let same = |range: &MapRangeRequest| {
                    (range.handle, range.va, range.size, range.gpu_id)
                        == (fixed.handle, fixed.va, fixed.size, fixed.gpu_id)
                };
                let place = self.ranges.iter().position(same).ok_or(EINVAL)?;
                self.ranges.remove(place);
                answer.push::<UnmapRange>(header, &Nothing {}, &[]);
            }
            Request::AvailableMemory { .. } => {
                let available = AvailableMemoryAnswer { available: self.vram };
                answer.push::<AvailableMemory>(header, &available, &[]);
            }
            Request::ShareMemory { fixed, .. } => {
                let token =
                    ShareToken(ShareToken::BIT | u64::from(fixed.handle.index()) << 32 | fixed.offset);
                if self.tokens.len() >= MAX_SHARES && !self.tokens.contains(&token) {
                    return Err(ENOMEM);
                }
                self.tokens.insert(token);
                answer.push::<ShareMemory>(header, &ShareMemoryAnswer { token }, &[]);
            }
            Request::UnshareMemory { fixed, .. } => {
                assert!(self.tokens.remove(&fixed.token), "a token that there is");
                answer.push::<UnshareMemory>(header, &Nothing {}, &[]);
            }
            Request::FreeMemory { fixed, .. } => {
                let handle = fixed.handle;
                assert!(!self.ranges.iter().any(|range| range.handle == handle), "still mapped in part");
                if !self.buffer(fixed.handle, made)?.mapped.is_empty() {
                    return Err(EBUSY);
                }
                let gone = self.buffers.remove(&fixed.handle.index()).unwrap();
                self.vram += if gone.request.flags & 1 != 0 { gone.request.size } else { 0 };
                answer.push::<FreeMemory>(header, &Nothing {}, &[]);
            }
            Request::FlushHdp { fixed, .. } => {
                let kind = self.buffer(fixed.handle, made)?.request.flags & 0x1f;
                assert_eq!(kind, 1 << 4, "KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP");
                self.flushes.push(fixed.register);
                if let Some(amid) = self.amid_flush.take() {
                    amid();
                }
                answer.push::<FlushHdp>(header, &Nothing {}, &[]);
            }
            Request::CreateEvent { fixed, .. } => {
                // kfd_kmap_event_page: one page, and before any event that has a slot elsewhere.
                if !fixed.event_page.is_none() {
                    if self.event_page.is_some() || !self.events.is_empty() {
                        return Err(EINVAL);
                    }
                    self.event_page = Some(fixed.event_page);
                }
                let id = self.events.keys().last().map_or(1, |last| last + 1);
                self.events.insert(id, false);
                let made =
                    CreateEventAnswer { event_id: EventId(id), trigger_data: id, slot_index: id, pad: 0 };
                answer.push::<CreateEvent>(header, &made, &[]);
            }
            Request::SetEvent { fixed, .. } => {
                *self.events.get_mut(&fixed.event_id.0).ok_or(EINVAL)? = true;
                answer.push::<SetEvent>(header, &Nothing {}, &[]);
            }
            Request::DestroyEvent { fixed, .. } => {
                self.events.remove(&fixed.event_id.0).ok_or(EINVAL)?;
                answer.push::<DestroyEvent>(header, &Nothing {}, &[]);
            }
            Request::WaitEvents { tail, .. } => {
                let set = |event: &WaitEvent| self.events.get(&event.event_id.0).copied();
                if tail.iter().any(|event| set(event).is_none()) {
                    let failed = WaitEventsAnswer { wait_result: 2, errno: EINVAL, ..Default::default() };
                    answer.push::<WaitEvents>(header, &failed, &tail);
                    return Ok(());
                }
                let wait_result = u32::from(!tail.iter().any(|event| set(event) == Some(true)));
                let aged: Vec<WaitEvent> =
                    tail.iter().map(|event| WaitEvent { age: event.age + 1, ..*event }).collect();
                let waited = WaitEventsAnswer { wait_result, ..Default::default() };
                answer.push::<WaitEvents>(header, &waited, &aged);
            }
            other => return self.run_queue(raw, other, answer),
        }
        Ok(())
    }

    /// The calls about queues, by kfd_chardev.c, kfd_process_queue_manager.c and kfd_queue.c of Linux 6.12.
    fn run_queue(
        &mut self,
        raw: &RawRequest<'_>,
        request: Request,
        answer: &mut AnswerFrameBuilder,
    ) -> Result<(), u32> {
        let header = &raw.header;
        if (0x180..0x187).contains(&header.opcode) && self.queue_errno != 0 {
            return Err(self.queue_errno);
        }
        match request {
            Request::DoorbellPage { fixed, .. } => {
                let old = self.doorbells.insert(fixed.gpu_id.0, fixed);
                assert!(old.is_none(), "a GPU has one");
                answer.push::<DoorbellPage>(header, &Nothing {}, &[]);
            }
            Request::CreateQueue { fixed, .. } => {
                assert!(self.doorbells.contains_key(&fixed.gpu_id.0), "doorbells come first");
                if fixed.percentage & 0xff > 100
                    || fixed.priority > 15
                    || !fixed.ring_size.is_power_of_two()
                    || !self.is_whole(&fixed)
                {
                    return Err(EINVAL);
                }
                self.queues_made += 1;
                self.queues.insert(self.queues_made, fixed);
                let queue = QueueId(self.queues_made);
                let made = CreateQueueAnswer { queue, doorbell_offset: self.doorbell };
                answer.push::<CreateQueue>(header, &made, &[]);
            }
            Request::DestroyQueue { fixed, .. } => {
                self.queues.remove(&fixed.queue.0).ok_or(EINVAL)?;
                answer.push::<DestroyQueue>(header, &Nothing {}, &[]);
            }
            Request::UpdateQueue { fixed, .. } => {
                self.updated = Some(fixed);
                answer.push::<UpdateQueue>(header, &Nothing {}, &[]);
            }
            Request::SetCuMask { tail, .. } => {
                self.cu_mask = tail;
                answer.push::<SetCuMask>(header, &Nothing {}, &[]);
            }
            Request::GetQueueWaveState { fixed, .. } => {
                let queue = self.queues.get(&fixed.queue.0).ok_or(EINVAL)?;
                // get_wave_state of kfd_mqd_manager_v9.c: 0x18 bytes used of the control stack, 0x2000 of the area.
                let (size, used) = (queue.control_stack_size, 0x18);
                let mut bytes = vec![0u8; size as usize];
                for (place, word) in
                    bytes.as_chunks_mut::<4>().0.iter_mut().zip([size - used, used, size, 0x2000])
                {
                    *place = word.to_le_bytes();
                }
                bytes[(size - used) as usize..].fill(0x5a);
                let state = QueueWaveStateAnswer { control_stack_used: used, save_area_used: 0x2000 };
                answer.push::<GetQueueWaveState>(header, &state, &bytes);
            }
            Request::AllocQueueGws { .. } => {
                answer.push::<AllocQueueGws>(header, &AllocQueueGwsAnswer { first: 0, pad: 0 }, &[]);
            }
            Request::WaitDoorbells { .. } if self.wait_status != Status::OK => {
                let status = std::mem::replace(&mut self.wait_status, Status::OK);
                answer.push_status(header.opcode, status, 0);
            }
            Request::WaitDoorbells { .. } => {
                let still = self.still.into();
                answer.push::<WaitDoorbells>(header, &WaitDoorbellsAnswer { still, pad: 0 }, &[]);
            }
            Request::RingDoorbells { fixed, .. } => {
                self.armed.push(fixed.armed);
                answer.push::<RingDoorbells>(header, &Nothing {}, &[]);
            }
            _ => answer.push_status(header.opcode, Status::OK, 0),
        }
        Ok(())
    }

    /// Buffers other than doorbells, which stay until the close (`KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL`).
    pub fn memory(&self) -> Vec<&Buffer> {
        self.buffers.values().filter(|buffer| buffer.request.flags & 1 << 3 == 0).collect()
    }

    /// `kfd_queue_acquire_buffers`: pointers, end-of-pipe buffer and save area are buffers of exactly their size, mapped
    /// to the GPU.
    fn is_whole(&self, queue: &CreateQueueRequest) -> bool {
        let is_buffer = |va: u64, size: u64| {
            let mut buffers = self.buffers.values();
            buffers.any(|buffer| {
                let request = &buffer.request;
                (request.va.0, request.size) == (va, size) && buffer.mapped == [queue.gpu_id]
            })
        };
        let page = |va: u64| va & !4095;
        // The sizes that the kernel computes for 60 units in 4 engines.
        let save = queue.context_save_va.0 == 0
            || (queue.context_save_size, queue.control_stack_size) == (0x13f_1000, 0x5000)
                && is_buffer(queue.context_save_va.0, 0x140_1000);
        let aql = queue.kind == 2;
        save && (aql || is_buffer(page(queue.write_pointer_va.0), 4096))
            && (aql || page(queue.write_pointer_va.0) == page(queue.read_pointer_va.0))
            && (queue.eop_va.0 == 0 || is_buffer(queue.eop_va.0, queue.eop_size))
    }
}
