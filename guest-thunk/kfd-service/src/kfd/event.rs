//! Events.

use guest_thunk::thunk::lock::lock;
use kfd_abi::event::{
    CreateEventArgs, DestroyEventArgs, EventData, HsaHwExceptionData, HsaMemoryExceptionData,
    HsaSignalEventData, KFD_FIRST_NONSIGNAL_EVENT_ID, KFD_IOC_WAIT_RESULT_COMPLETE, KFD_IOC_WAIT_RESULT_FAIL,
    MemoryExceptionFailure, ResetEventArgs, SetEventArgs, WaitEventsArgs,
};
use kfd_abi::memory::AllocFlags;
use kfd_abi::mmap::KFD_MMAP_TYPE_EVENTS;
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::{
    AllocMemory, CreateEvent, DestroyEvent, FreeMemory, MapMemory, ResetEvent, SetEvent, UnmapMemory,
    WaitEvents,
};
use virtio_kfd_protocol::limits::MAX_WAIT_EVENTS;
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferRequest, CreateEventRequest, EventId, EventRequest, GuestVa, Handle,
    WAITED_HARDWARE, WAITED_MEMORY, WaitEvent, WaitEventsAnswer, WaitEventsRequest,
};

use super::Call;
use crate::buffers::{Buffer, Memory};
use crate::failure::errno;

/// Whether an event is a signal, which has an age.
fn is_signal(event_id: u32) -> bool {
    event_id < KFD_FIRST_NONSIGNAL_EVENT_ID
}

fn request(event_id: u32) -> EventRequest {
    EventRequest { event_id: EventId(event_id), pad: 0 }
}

impl Call<'_> {
    pub(super) fn create_event(&self) -> Result<i32> {
        self.run(|arguments: &mut CreateEventArgs| {
            let event_page = match arguments.event_page_offset {
                0 => Handle::NONE,
                handle => self.event_page(&*self.kfd.buffers.find(handle)?)?,
            };
            let request = CreateEventRequest {
                event_type: arguments.event_type,
                auto_reset: u32::from(arguments.auto_reset != 0),
                // KFD's events do not belong to nodes, whose numbers are others on the host.
                node_id: 0,
                pad: 0,
                event_page,
            };
            let (answer, _) = self.kfd.client.call::<CreateEvent>(&request, &[], 0).map_err(errno)?;
            arguments.event_id = answer.event_id.0;
            arguments.event_trigger_data = answer.trigger_data;
            arguments.event_page_offset = 0;
            if is_signal(answer.event_id.0) {
                if event_page == Handle::NONE {
                    self.kfd.event_page.begin();
                }
                arguments.event_page_offset = KFD_MMAP_TYPE_EVENTS;
                arguments.event_slot_index = answer.slot_index;
            }
            Ok(())
        })
    }

    /// The host's buffer for the event page. KFD takes only its own memory for it, and the program has memory of the guest,
    /// which it and GPUs have not used yet: a buffer of the host's memory takes its place at the same address of GPUs.
    /// The CPU keeps what it has mapped, which nothing looks at.
    fn event_page(&self, buffer: &Buffer) -> Result<Handle> {
        let mut state = lock(&buffer.state);
        if !matches!(buffer.memory, Memory::Guest(_)) || !buffer.flags.contains(AllocFlags::GTT) {
            return Err(Errno::EINVAL);
        }
        let client = &self.kfd.client;
        let old = BufferRequest { handle: state.host };
        let alloc = AllocMemoryRequest {
            va: GuestVa(buffer.va),
            size: buffer.size,
            gpu_id: buffer.gpu,
            flags: buffer.flags.bits(),
            ..Default::default()
        };
        let mut batch = client.batch();
        let unmapped = match state.mapped.is_empty() {
            true => None,
            false => Some(batch.push::<UnmapMemory>(&old, &state.mapped, 0).map_err(errno)?),
        };
        let freed = batch.push::<FreeMemory>(&old, &[], 0).map_err(errno)?;
        let made = batch.push::<AllocMemory>(&alloc, &[], 0).map_err(errno)?;
        let mapped = match state.mapped.is_empty() {
            true => None,
            false => {
                let new = BufferRequest { handle: made.handle() };
                Some(batch.push::<MapMemory>(&new, &state.mapped, 0).map_err(errno)?)
            }
        };
        let answers = batch.run().map_err(errno)?;
        if let Some(unmapped) = unmapped {
            answers.get(unmapped).map_err(errno)?;
        }
        answers.get(freed).map_err(errno)?;
        state.event_page = true;
        state.host = answers.get(made).map_err(errno)?.0.handle;
        if let Some(mapped) = mapped
            && let failed @ 1.. = answers.get(mapped).map_err(errno)?.0.errno
        {
            return Err(i32::try_from(failed).map_or(Errno::EIO, Errno::from_raw));
        }
        Ok(state.host)
    }

    pub(super) fn destroy_event(&self) -> Result<i32> {
        self.run(|arguments: &mut DestroyEventArgs| {
            self.kfd.client.call::<DestroyEvent>(&request(arguments.event_id), &[], 0).map_err(errno)?;
            Ok(())
        })
    }

    pub(super) fn set_event(&self) -> Result<i32> {
        self.run(|arguments: &mut SetEventArgs| {
            self.kfd.client.call::<SetEvent>(&request(arguments.event_id), &[], 0).map_err(errno)?;
            Ok(())
        })
    }

    pub(super) fn reset_event(&self) -> Result<i32> {
        self.run(|arguments: &mut ResetEventArgs| {
            self.kfd.client.call::<ResetEvent>(&request(arguments.event_id), &[], 0).map_err(errno)?;
            Ok(())
        })
    }

    /// Signals that arrive meanwhile are handled, and the wait goes on.
    pub(super) fn wait_events(&self) -> Result<i32> {
        self.run(|arguments: &mut WaitEventsArgs| {
            arguments.wait_result = KFD_IOC_WAIT_RESULT_FAIL;
            let pointer = UserPtr(arguments.events_ptr);
            let count = usize::try_from(arguments.num_events).map_err(|_| Errno::ENOMEM)?;
            let mut events = UserMemory.read_array::<EventData>(pointer, count, MAX_WAIT_EVENTS)?;
            let asked: Vec<WaitEvent> = events
                .iter()
                .map(|event| WaitEvent {
                    event_id: EventId(event.event_id),
                    kind: 0,
                    age: if is_signal(event.event_id) { event.signal_event_data().last_event_age } else { 0 },
                })
                .collect();
            let request = WaitEventsRequest {
                timeout: arguments.timeout,
                wait_for_all: u32::from(arguments.wait_for_all != 0),
            };
            let client = &self.kfd.client;
            let (answer, waited) =
                client.wait_call::<WaitEvents>(&request, &asked, asked.len()).map_err(errno)?;
            arguments.wait_result = answer.wait_result;
            if answer.errno != 0 {
                return Err(i32::try_from(answer.errno).map_or(Errno::EIO, Errno::from_raw));
            }
            if answer.wait_result != KFD_IOC_WAIT_RESULT_COMPLETE {
                return Ok(());
            }
            let size = u64::try_from(size_of::<EventData>()).unwrap_or(u64::MAX);
            for ((event, waited), index) in events.iter_mut().zip(&waited).zip(0u64..) {
                if tell(event, waited, &answer) {
                    let place = pointer.offset(index.saturating_mul(size))?;
                    UserMemory.write_struct(place, &event.data)?;
                }
            }
            Ok(())
        })
    }
}

/// Writes into an event what it says. Whether that is anything.
fn tell(event: &mut EventData, waited: &WaitEvent, answer: &WaitEventsAnswer) -> bool {
    let bit = |mask: u32| u32::from(answer.memory_failure & mask != 0);
    match waited.kind {
        WAITED_MEMORY => event.set_memory_exception_data(HsaMemoryExceptionData {
            failure: MemoryExceptionFailure {
                not_present: bit(1),
                read_only: bit(2),
                no_execute: bit(4),
                imprecise: bit(8),
            },
            va: answer.memory_va.0,
            gpu_id: answer.memory_gpu_id.0,
            error_type: answer.memory_error_type,
        }),
        WAITED_HARDWARE => event.set_hw_exception_data(HsaHwExceptionData {
            reset_type: answer.hardware_reset_type,
            reset_cause: answer.hardware_reset_cause,
            memory_lost: answer.hardware_memory_lost,
            gpu_id: answer.hardware_gpu_id.0,
        }),
        _ if is_signal(event.event_id) => {
            event.set_signal_event_data(HsaSignalEventData { last_event_age: waited.age });
        }
        _ => return false,
    }
    true
}
