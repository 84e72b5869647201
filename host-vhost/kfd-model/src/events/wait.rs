//! WAIT_EVENTS (`kfd_wait_on_events`).

use std::sync::{Arc, Condvar, PoisonError};
use std::time::{Duration, Instant};

use kfd_abi::event::{
    EventData, HsaSignalEventData, KFD_EVENT_TIMEOUT_INFINITE, KFD_IOC_EVENT_HW_EXCEPTION,
    KFD_IOC_EVENT_MEMORY, KFD_IOC_EVENT_SIGNAL, KFD_IOC_WAIT_RESULT_COMPLETE, KFD_IOC_WAIT_RESULT_FAIL,
    KFD_IOC_WAIT_RESULT_TIMEOUT,
};
use kfd_seam::Result;
use nix::errno::Errno;

use super::{Events, Slot, Table, Wait};

/// Events of one wait: as many waiters of 56 bytes as fit into the kernel's largest allocation of 4 MiB.
pub const MAX_WAITERS: u32 = (4 << 20) / 56;

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitEnd {
    /// `KFD_IOC_WAIT_RESULT_*`, copied out in any case.
    pub wait_result: u32,
    /// The call's result.
    pub result: Result<()>,
}

impl WaitEnd {
    /// The call failed.
    pub fn failed(errno: Errno) -> Self {
        Self { wait_result: KFD_IOC_WAIT_RESULT_FAIL, result: Err(errno) }
    }
}

/// What a look at the slots of a wait says (`test_event_condition`).
fn condition(slots: &[Slot], all: bool) -> u32 {
    let mut activated = 0;
    for slot in slots {
        if slot.event.is_none() {
            return KFD_IOC_WAIT_RESULT_FAIL;
        }
        if slot.activated {
            if !all {
                return KFD_IOC_WAIT_RESULT_COMPLETE;
            }
            activated += 1;
        }
    }
    if activated == slots.len() { KFD_IOC_WAIT_RESULT_COMPLETE } else { KFD_IOC_WAIT_RESULT_TIMEOUT }
}

impl Table {
    /// `init_event_waiter`: takes an event's signal if it has one, otherwise queues for it.
    fn enter(&mut self, wait: u64, index: usize, data: &EventData) -> Result<Slot> {
        let event = self.get_mut(data.event_id).ok_or(Errno::EINVAL)?;
        let mut slot = Slot { event: Some(data.event_id), activated: event.signaled, age_enabled: false };
        event.signaled = event.signaled && !event.auto_reset;
        let seen = data.signal_event_data().last_event_age;
        if event.kind == KFD_IOC_EVENT_SIGNAL && seen != 0 {
            slot.age_enabled = true;
            slot.activated |= event.age != seen;
        }
        if !slot.activated {
            event.waiters.push((wait, index));
        }
        Ok(slot)
    }

    /// `free_waiters`.
    fn leave(&mut self, wait: u64) {
        let Some(gone) = self.waits.remove(&wait) else { return };
        for id in gone.slots.iter().filter_map(|slot| slot.event) {
            if let Some(event) = self.get_mut(id) {
                event.waiters.retain(|(waiter, _)| *waiter != wait);
            }
        }
    }

    /// `copy_signaled_event_data`, into `events`.
    fn fill(&self, wait: u64, events: &mut [EventData]) -> Result<()> {
        let Some(wait) = self.waits.get(&wait) else { return Ok(()) };
        for (slot, data) in wait.slots.iter().zip(events) {
            let event = slot.event.and_then(|id| self.get(id)).ok_or(Errno::EINVAL)?;
            if !slot.activated {
                continue;
            }
            match event.kind {
                KFD_IOC_EVENT_MEMORY => data.set_memory_exception_data(event.memory),
                KFD_IOC_EVENT_HW_EXCEPTION => data.set_hw_exception_data(event.hardware),
                KFD_IOC_EVENT_SIGNAL if slot.age_enabled => {
                    data.set_signal_event_data(HsaSignalEventData { last_event_age: event.age });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Events {
    /// Waits until one or all of `events` are signalled, or `timeout` milliseconds are over; fills in what they say.
    ///
    /// The kernel's wait also ends on a signal, with EINTR or a restart; a library cannot see one, so this
    /// behaves as a restart always does.
    pub fn wait(&self, events: &mut [EventData], all: bool, timeout: u32) -> WaitEnd {
        // The kernel takes all values but the infinite one as finite, and rounds up by a tick.
        let deadline = if timeout == KFD_EVENT_TIMEOUT_INFINITE {
            None
        } else {
            Instant::now().checked_add(Duration::from_millis(u64::from(timeout.min(0x7fff_ffff))))
        };
        let wake = Arc::new(Condvar::new());
        let mut table = self.table();
        let wait = table.next_wait;
        table.next_wait = table.next_wait.wrapping_add(1);
        table.waits.insert(wait, Wait { slots: Vec::with_capacity(events.len()), wake: wake.clone() });
        for (index, data) in events.iter().enumerate() {
            match table.enter(wait, index, data) {
                Ok(slot) => {
                    if let Some(wait) = table.waits.get_mut(&wait) {
                        wait.slots.push(slot);
                    }
                }
                Err(errno) => {
                    table.leave(wait);
                    return WaitEnd::failed(errno);
                }
            }
        }
        let wait_result = loop {
            let now =
                table.waits.get(&wait).map_or(KFD_IOC_WAIT_RESULT_FAIL, |wait| condition(&wait.slots, all));
            if now != KFD_IOC_WAIT_RESULT_TIMEOUT {
                break now;
            }
            table = match deadline {
                None => wake.wait(table).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break now;
                    }
                    wake.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        };
        let result = match wait_result {
            KFD_IOC_WAIT_RESULT_COMPLETE => table.fill(wait, events),
            KFD_IOC_WAIT_RESULT_FAIL => Err(Errno::EIO),
            _ => Ok(()),
        };
        table.leave(wait);
        match result {
            Err(Errno::EINVAL) => WaitEnd::failed(Errno::EINVAL),
            result => WaitEnd { wait_result, result },
        }
    }
}
