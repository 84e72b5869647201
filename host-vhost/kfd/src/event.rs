//! Events.

use std::os::fd::AsFd;

use kfd_abi::event::{
    CreateEventArgs, DestroyEventArgs, EVENT_PAGE_SIZE, EventData, ResetEventArgs, SetEventArgs,
    WaitEventsArgs,
};
use kfd_abi::kfd::request;
use nix::errno::Errno;

use crate::call::{address, arguments, ioctl};
use crate::error::KfdError;
use crate::kfd::Kfd;
use crate::mapping::{GuestMapping, Piece};
use crate::memory::KfdHandle;

arguments! {
    CreateEventArgs = "AMDKFD_IOC_CREATE_EVENT", request::CREATE_EVENT;
    DestroyEventArgs = "AMDKFD_IOC_DESTROY_EVENT", request::DESTROY_EVENT;
    SetEventArgs = "AMDKFD_IOC_SET_EVENT", request::SET_EVENT;
    ResetEventArgs = "AMDKFD_IOC_RESET_EVENT", request::RESET_EVENT;
    WaitEventsArgs = "AMDKFD_IOC_WAIT_EVENTS", request::WAIT_EVENTS;
}

/// An event that the kernel made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// Its id.
    pub event_id: u32,
    /// For signal events, the value that the GPU puts into its interrupt.
    pub trigger_data: u32,
    /// For signal events, the slot in the event page, in units of 8 bytes.
    pub slot_index: u32,
    /// For signal events, the offset at which `/dev/kfd` shows the event page; else 0.
    pub page_offset: u64,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitOutcome {
    /// `KFD_IOC_WAIT_RESULT_*`
    pub result: u32,
    /// The errno of the call. The kernel gives EIO beside `KFD_IOC_WAIT_RESULT_FAIL` when an event was destroyed.
    pub errno: Option<Errno>,
}

impl Kfd {
    /// `AMDKFD_IOC_CREATE_EVENT`. `page` is the buffer that becomes the process's page of event slots (only GTT
    /// buffers can); without it the kernel makes a page of its own with the first signal event.
    pub fn create_event(
        &self,
        event_type: u32,
        auto_reset: bool,
        node_id: u32,
        page: Option<KfdHandle>,
    ) -> Result<NewEvent, KfdError> {
        let mut args = CreateEventArgs {
            event_page_offset: page.map_or(0, KfdHandle::number),
            event_type,
            auto_reset: u32::from(auto_reset),
            node_id,
            ..Default::default()
        };
        ioctl(self.as_fd(), &mut args, || {
            format!("event_type {event_type}, node_id {node_id}, event page {page:?}")
        })?;
        Ok(NewEvent {
            event_id: args.event_id,
            trigger_data: args.event_trigger_data,
            slot_index: args.event_slot_index,
            page_offset: args.event_page_offset,
        })
    }

    /// Makes all slots of the kernel's own event page usable: the kernel gives out no more of them than a process
    /// has ever mapped, 256 at first (`signal_mapped_size`, kfd_events.c). `page_offset` is that of a first
    /// signal event without a page. Not for a page that is a buffer: all of its slots are usable anyway, and
    /// the kernel has no check that such a page can be mapped this way.
    pub fn use_all_event_slots(&self, page_offset: u64) -> Result<(), KfdError> {
        let piece = Piece { file: self.as_fd(), offset: page_offset, len: EVENT_PAGE_SIZE };
        GuestMapping::new(&[piece]).map(drop)
    }

    /// `AMDKFD_IOC_DESTROY_EVENT`; waits on it end with a failure.
    pub fn destroy_event(&self, event_id: u32) -> Result<(), KfdError> {
        let mut args = DestroyEventArgs { event_id, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("event_id {event_id}"))
    }

    /// `AMDKFD_IOC_SET_EVENT`
    pub fn set_event(&self, event_id: u32) -> Result<(), KfdError> {
        let mut args = SetEventArgs { event_id, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("event_id {event_id}"))
    }

    /// `AMDKFD_IOC_RESET_EVENT`
    pub fn reset_event(&self, event_id: u32) -> Result<(), KfdError> {
        let mut args = ResetEventArgs { event_id, ..Default::default() };
        ioctl(self.as_fd(), &mut args, || format!("event_id {event_id}"))
    }

    /// `AMDKFD_IOC_WAIT_EVENTS`: blocks for up to `timeout` ms (`u32::MAX` for ever). The kernel fills in what the
    /// events say.
    pub fn wait_events(&self, events: &mut [EventData], wait_for_all: bool, timeout: u32) -> WaitOutcome {
        let mut args = WaitEventsArgs {
            events_ptr: address(events),
            num_events: events.len() as u32,
            wait_for_all: u32::from(wait_for_all),
            timeout,
            ..Default::default()
        };
        let result = ioctl(self.as_fd(), &mut args, String::new);
        WaitOutcome { result: args.wait_result, errno: result.err().map(|error| error.errno) }
    }
}
