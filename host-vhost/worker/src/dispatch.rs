//! Runs the requests of a frame.

use virtio_kfd_protocol::calls::Request;
use virtio_kfd_protocol::frame::{AnswerFrameBuilder, FrameError, RawRequest, RequestFrame};
use virtio_kfd_protocol::limits::CONTROL_RING;
use virtio_kfd_protocol::{Call, CallType, Handle, Ring, Status, calls};

use crate::call::{Made, Outcome, event, memory, open, process, queue, render, smi, topology};
use crate::context::Context;
use crate::failure::Failure;

/// Runs a frame: its requests in order until one fails. An error says that it is no frame, which the device should have
/// seen.
pub fn run_frame(context: &Context, ring: u8, bytes: &[u8]) -> Result<Vec<u8>, FrameError> {
    let frame = RequestFrame::parse(bytes)?;
    let mut run = Run {
        context,
        ring,
        version: frame.header.version,
        greeted: false,
        made: Made::default(),
        new_buffer: Handle::NONE,
        answers: AnswerFrameBuilder::new(frame.header.version, frame.header.sequence),
    };
    let mut failed = false;
    for raw in &frame.requests {
        if failed {
            run.answers.push_status(raw.header.opcode, Status::NOT_RUN, 0);
            continue;
        }
        run.new_buffer = Handle::NONE;
        failed = !run.request(raw);
        run.made.push(run.new_buffer);
    }
    Ok(run.answers.finish())
}

/// Answers every request of a frame with a status, without running any.
pub fn refuse_frame(bytes: &[u8], status: Status) -> Result<Vec<u8>, FrameError> {
    let frame = RequestFrame::parse(bytes)?;
    let mut answers = AnswerFrameBuilder::new(frame.header.version, frame.header.sequence);
    for raw in &frame.requests {
        answers.push_status(raw.header.opcode, status, 0);
    }
    Ok(answers.finish())
}

/// A frame on its way.
struct Run<'c> {
    context: &'c Context,
    ring: u8,
    version: u32,
    /// Whether the handshake was in this frame.
    greeted: bool,
    made: Made,
    /// What the current request made.
    new_buffer: Handle,
    answers: AnswerFrameBuilder,
}

impl Run<'_> {
    /// Runs a request and answers it. Returns whether it was done.
    fn request(&mut self, raw: &RawRequest<'_>) -> bool {
        let request = match self.admit(raw) {
            Ok(request) => request,
            Err(failure) => return self.fail(raw, &failure),
        };
        let context = self.context;
        match request {
            Request::Hello { fixed, .. } => {
                let outcome = open::hello(context, self.version, &fixed);
                self.greeted = outcome.is_ok();
                self.answer::<calls::Hello>(raw, outcome)
            }
            Request::Nop { .. } => self.answer::<calls::Nop>(raw, open::nop()),
            Request::TopologyRead { fixed, .. } => {
                self.answer::<calls::TopologyRead>(raw, topology::topology_read(context, &fixed))
            }
            Request::GetApertures { .. } => {
                self.answer::<calls::GetApertures>(raw, process::get_apertures(context))
            }
            Request::AcquireVm { fixed, .. } => {
                self.answer::<calls::AcquireVm>(raw, process::acquire_vm(context, &fixed))
            }
            Request::SetMemoryPolicy { fixed, .. } => {
                self.answer::<calls::SetMemoryPolicy>(raw, process::set_memory_policy(context, &fixed))
            }
            Request::GetClockCounters { fixed, .. } => {
                self.answer::<calls::GetClockCounters>(raw, process::get_clock_counters(context, &fixed))
            }
            Request::SetXnackMode { fixed, .. } => {
                self.answer::<calls::SetXnackMode>(raw, process::set_xnack_mode(context, &fixed))
            }
            Request::SetScratchBackingVa { fixed, .. } => self
                .answer::<calls::SetScratchBackingVa>(raw, process::set_scratch_backing_va(context, &fixed)),
            Request::SetTrapHandler { fixed, .. } => {
                self.answer::<calls::SetTrapHandler>(raw, process::set_trap_handler(context, &fixed))
            }
            Request::RuntimeEnable { fixed, .. } => {
                self.answer::<calls::RuntimeEnable>(raw, process::runtime_enable(context, &fixed))
            }
            Request::GetTileConfig { fixed, .. } => {
                self.answer::<calls::GetTileConfig>(raw, process::get_tile_config(context, &fixed))
            }
            Request::AllocMemory { fixed, .. } => {
                let outcome = memory::alloc_memory(context, &fixed);
                self.new_buffer = outcome.as_ref().map_or(Handle::NONE, |reply| reply.fixed.handle);
                self.answer::<calls::AllocMemory>(raw, outcome)
            }
            Request::FreeMemory { fixed, .. } => {
                let outcome = memory::free_memory(context, &self.made, &fixed);
                self.answer::<calls::FreeMemory>(raw, outcome)
            }
            Request::MapMemory { fixed, tail } => {
                let outcome = memory::map_memory(context, &self.made, &fixed, &tail);
                self.answer::<calls::MapMemory>(raw, outcome)
            }
            Request::UnmapMemory { fixed, tail } => {
                let outcome = memory::unmap_memory(context, &self.made, &fixed, &tail);
                self.answer::<calls::UnmapMemory>(raw, outcome)
            }
            Request::AvailableMemory { fixed, .. } => {
                self.answer::<calls::AvailableMemory>(raw, memory::available_memory(context, &fixed))
            }
            Request::MapRange { fixed, .. } => {
                let outcome = memory::map_range(context, &self.made, &fixed);
                self.answer::<calls::MapRange>(raw, outcome)
            }
            Request::UnmapRange { fixed, .. } => {
                let outcome = memory::unmap_range(context, &self.made, &fixed);
                self.answer::<calls::UnmapRange>(raw, outcome)
            }
            Request::ShareMemory { fixed, .. } => {
                let outcome = memory::share_memory(context, &self.made, &fixed);
                self.answer::<calls::ShareMemory>(raw, outcome)
            }
            Request::ImportMemory { fixed, .. } => {
                let outcome = memory::import_memory(context, &fixed);
                self.new_buffer = outcome.as_ref().map_or(Handle::NONE, |reply| reply.fixed.handle);
                self.answer::<calls::ImportMemory>(raw, outcome)
            }
            Request::ResourceInfo { fixed, .. } => {
                self.answer::<calls::ResourceInfo>(raw, memory::resource_info(context, &fixed))
            }
            Request::UnshareMemory { fixed, .. } => {
                self.answer::<calls::UnshareMemory>(raw, memory::unshare_memory(context, &fixed))
            }
            Request::FlushHdp { fixed, .. } => {
                self.answer::<calls::FlushHdp>(raw, memory::flush_hdp(context, &self.made, &fixed))
            }
            Request::BufferMetadata { fixed, .. } => {
                let outcome = memory::buffer_metadata(context, &self.made, &fixed);
                self.answer::<calls::BufferMetadata>(raw, outcome)
            }
            Request::SetBufferMetadata { fixed, tail } => {
                let outcome = memory::set_buffer_metadata(context, &self.made, &fixed, &tail);
                self.answer::<calls::SetBufferMetadata>(raw, outcome)
            }
            Request::CreateEvent { fixed, .. } => {
                let outcome = event::create_event(context, &self.made, &fixed);
                self.answer::<calls::CreateEvent>(raw, outcome)
            }
            Request::DestroyEvent { fixed, .. } => {
                self.answer::<calls::DestroyEvent>(raw, event::destroy_event(context, &fixed))
            }
            Request::SetEvent { fixed, .. } => {
                self.answer::<calls::SetEvent>(raw, event::set_event(context, &fixed))
            }
            Request::ResetEvent { fixed, .. } => {
                self.answer::<calls::ResetEvent>(raw, event::reset_event(context, &fixed))
            }
            Request::WaitEvents { fixed, tail } => {
                self.answer::<calls::WaitEvents>(raw, event::wait_events(context, &fixed, &tail))
            }
            Request::CreateQueue { fixed, .. } => {
                self.answer::<calls::CreateQueue>(raw, queue::create_queue(context, &fixed))
            }
            Request::DestroyQueue { fixed, .. } => {
                self.answer::<calls::DestroyQueue>(raw, queue::destroy_queue(context, &fixed))
            }
            Request::UpdateQueue { fixed, .. } => {
                self.answer::<calls::UpdateQueue>(raw, queue::update_queue(context, &fixed))
            }
            Request::SetCuMask { fixed, tail } => {
                self.answer::<calls::SetCuMask>(raw, queue::set_cu_mask(context, &fixed, &tail))
            }
            Request::GetQueueWaveState { fixed, .. } => {
                self.answer::<calls::GetQueueWaveState>(raw, queue::get_queue_wave_state(context, &fixed))
            }
            Request::AllocQueueGws { fixed, .. } => {
                self.answer::<calls::AllocQueueGws>(raw, queue::alloc_queue_gws(context, &fixed))
            }
            Request::DoorbellPage { fixed, .. } => {
                self.answer::<calls::DoorbellPage>(raw, queue::doorbell_page(context, &fixed))
            }
            Request::RingDoorbells { fixed, .. } => {
                self.answer::<calls::RingDoorbells>(raw, queue::ring_doorbells(context, &fixed))
            }
            Request::WaitDoorbells { fixed, .. } => {
                self.answer::<calls::WaitDoorbells>(raw, queue::wait_doorbells(context, &fixed))
            }
            Request::OpenSmi { fixed, .. } => {
                self.answer::<calls::OpenSmi>(raw, smi::open_smi(context, &fixed))
            }
            Request::CloseSmi { fixed, .. } => {
                self.answer::<calls::CloseSmi>(raw, smi::close_smi(context, &fixed))
            }
            Request::ReadSmi { fixed, .. } => {
                self.answer::<calls::ReadSmi>(raw, smi::read_smi(context, &fixed))
            }
            Request::RenderVersion { fixed, .. } => {
                self.answer::<calls::RenderVersion>(raw, render::render_version(context, &fixed))
            }
            Request::RenderInfo { fixed, .. } => {
                self.answer::<calls::RenderInfo>(raw, render::render_info(context, &fixed))
            }
        }
    }

    /// Reads a request, if it may be sent now and here.
    fn admit(&self, raw: &RawRequest<'_>) -> Result<Request, Failure> {
        let opcode = raw.header.opcode;
        if opcode != Call::Hello.opcode() {
            let agreed = self.context.agreed();
            let in_order =
                agreed.is_some() && (agreed == Some(self.version) || (self.version == 0 && self.greeted));
            if !in_order {
                let reason = format!(
                    "call {opcode:#x} in a frame of wire version {}, agreed: {agreed:?}",
                    self.version
                );
                return Err(Failure::new(Status::HANDSHAKE, reason));
            }
        }
        let request =
            Request::decode(raw).map_err(|error| Failure::new(error.status(), error.to_string()))?;
        if request.call().ring() == Ring::Waiting && self.ring == CONTROL_RING {
            let reason = format!("{} on the control ring", request.call().name());
            return Err(Failure::new(Status::WRONG_RING, reason));
        }
        Ok(request)
    }

    fn answer<C: CallType>(&mut self, raw: &RawRequest<'_>, outcome: Outcome<C>) -> bool {
        match outcome {
            Ok(reply) => {
                self.answers.push::<C>(&raw.header, &reply.fixed, &reply.tail);
                !reply.failed
            }
            Err(failure) => self.fail(raw, &failure),
        }
    }

    fn fail(&mut self, raw: &RawRequest<'_>, failure: &Failure) -> bool {
        self.context.throttle.log(|held| {
            let name = Call::from_opcode(raw.header.opcode).map_or("unknown call", Call::name);
            tracing::debug!("ring {}: {name}: {failure} ({held} messages before were held back)", self.ring);
        });
        self.answers.push_status(raw.header.opcode, failure.status, failure.errno);
        false
    }
}
