//! Events.

use kfd_abi::event::{
    CreateEventArgs, DestroyEventArgs, EventData, ResetEventArgs, SetEventArgs, WaitEventsArgs,
};
use kfd_abi::memory::AllocFlags;
use kfd_abi::mmap::KFD_MMAP_TYPE_EVENTS;
use kfd_seam::{Result, UserMemory, UserPtr};
use nix::errno::Errno;

use super::Call;
use super::memory::Handle;
use crate::events::{MAX_WAITERS, WaitEnd};

impl Call<'_> {
    /// `kfd_ioctl_create_event`.
    pub(super) fn create_event(&self) -> Result<i32> {
        self.run(|arguments: &mut CreateEventArgs| {
            if arguments.event_page_offset != 0 {
                self.take_event_page(arguments.event_page_offset)?;
            }
            arguments.event_page_offset = 0;
            let auto_reset = arguments.auto_reset != 0;
            let created =
                self.process.events.create(arguments.event_type, auto_reset, &self.process.common)?;
            arguments.event_id = created.id;
            arguments.event_trigger_data = created.id;
            if created.has_slot {
                arguments.event_page_offset = KFD_MMAP_TYPE_EVENTS;
                arguments.event_slot_index = created.id;
            }
            Ok(())
        })
    }

    /// `kfd_kmap_event_page`: a buffer of system memory becomes the event page.
    fn take_event_page(&self, handle: u64) -> Result<()> {
        if self.process.events.has_page() {
            return Err(Errno::EINVAL);
        }
        let parts = Handle::from(handle);
        let (index, _) = self.process.device(parts.gpu_id)?;
        let mut state = self.process.state();
        let buffer = state.bound(index, Errno::ENODEV)?.buffers.get(parts.number).ok_or(Errno::EINVAL)?;
        // It has no memory of the model or is VRAM: amdgpu_amdkfd_gpuvm_map_gtt_bo_to_kernel.
        let object = &buffer.object;
        let Some((arena, offset)) = object.range() else { return Err(Errno::EINVAL) };
        if !object.flags().contains(AllocFlags::GTT) {
            return Err(Errno::EINVAL);
        }
        self.process.events.set_page(arena.clone(), offset, object.size)?;
        state.event_page = Some(handle);
        Ok(())
    }

    /// `kfd_ioctl_destroy_event`.
    pub(super) fn destroy_event(&self) -> Result<i32> {
        self.run(|arguments: &mut DestroyEventArgs| self.process.events.destroy(arguments.event_id))
    }

    /// `kfd_ioctl_set_event`.
    pub(super) fn set_event(&self) -> Result<i32> {
        self.run(|arguments: &mut SetEventArgs| self.process.events.set(arguments.event_id))
    }

    /// `kfd_ioctl_reset_event`.
    pub(super) fn reset_event(&self) -> Result<i32> {
        self.run(|arguments: &mut ResetEventArgs| self.process.events.reset(arguments.event_id))
    }

    /// `kfd_ioctl_wait_events`.
    pub(super) fn wait_events(&self) -> Result<i32> {
        self.run(|arguments: &mut WaitEventsArgs| {
            let end = self.wait(arguments);
            arguments.wait_result = end.wait_result;
            end.result
        })
    }

    fn wait(&self, arguments: &WaitEventsArgs) -> WaitEnd {
        if arguments.num_events > MAX_WAITERS {
            return WaitEnd::failed(Errno::ENOMEM);
        }
        let pointer = UserPtr(arguments.events_ptr);
        let before = match UserMemory.read_array::<EventData>(
            pointer,
            arguments.num_events as usize,
            MAX_WAITERS as usize,
        ) {
            Ok(events) => events,
            Err(errno) => return WaitEnd::failed(errno),
        };
        let mut events = before.clone();
        let end = self.process.events.wait(&mut events, arguments.wait_for_all != 0, arguments.timeout);
        let size = size_of::<EventData>() as u64;
        for (index, (old, new)) in before.iter().zip(&events).enumerate() {
            // Only what an event says is copied out, and only where there is something.
            if old.data != new.data
                && let Err(errno) = pointer
                    .offset((index as u64).saturating_mul(size))
                    .and_then(|place| UserMemory.write_struct(place, &new.data))
            {
                return WaitEnd::failed(errno);
            }
        }
        end
    }
}
