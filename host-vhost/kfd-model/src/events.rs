//! Events, by the rules of `kfd_events.c`.
//!
//! One lock guards all events of the process. A wait gives it up while it sleeps (a condition variable of its
//! own), so that it holds up nobody.

mod wait;

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kfd_abi::event::{
    EVENT_PAGE_SIZE, HsaHwExceptionData, HsaMemoryExceptionData, KFD_FIRST_NONSIGNAL_EVENT_ID,
    KFD_IOC_EVENT_DEBUG_EVENT, KFD_IOC_EVENT_HW_EXCEPTION, KFD_IOC_EVENT_MEMORY, KFD_IOC_EVENT_SIGNAL,
    KFD_SIGNAL_EVENT_LIMIT, UNSIGNALED_EVENT_SLOT,
};
use kfd_seam::Result;
use nix::errno::Errno;

pub use wait::{MAX_WAITERS, WaitEnd};

use crate::arena::Arena;
use crate::ids::Ids;

/// Events of other types than signal and debug that a process can have. The kernel sets no limit but memory.
pub const MAX_OTHER_EVENTS: u32 = 4096;

/// Slots that user space can use before it mapped the event page (the oldest thunks mapped no more).
const SLOTS_BEFORE_MAP: u64 = 256 * 8;

/// All events of a process.
#[derive(Debug)]
pub struct Events {
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    /// Signal and debug events; their id is their slot. Id 0 is never given.
    signal: Ids<Event>,
    /// Events of other types.
    other: Ids<Event>,
    page: Option<Page>,
    /// Bytes of the event page that user space mapped.
    mapped_size: u64,
    /// Signal events plus the reserved id 0.
    signal_count: u64,
    /// Waits that sleep.
    waits: BTreeMap<u64, Wait>,
    next_wait: u64,
}

/// The event page: a slot of 8 bytes for each signal event.
#[derive(Clone, Debug)]
struct Page {
    arena: Arc<Arena>,
    offset: u64,
}

impl Page {
    /// All slots.
    fn slots(&self) -> Result<Vec<[u8; 8]>> {
        let mut bytes = vec![0u8; EVENT_PAGE_SIZE as usize];
        self.arena.read(self.offset, &mut bytes)?;
        Ok(bytes.as_chunks().0.to_vec())
    }

    fn clear(&self, id: u32) -> Result<()> {
        self.arena.write(self.place(id)?, &UNSIGNALED_EVENT_SLOT.to_ne_bytes())
    }

    fn place(&self, id: u32) -> Result<u64> {
        self.offset.checked_add(u64::from(id).saturating_mul(8)).ok_or(Errno::EINVAL)
    }
}

#[derive(Debug)]
struct Event {
    kind: u32,
    auto_reset: bool,
    signaled: bool,
    /// Grows with each signal; 0 means "not known" and 1 "never signalled".
    age: u64,
    /// Waits that this event will wake: number of the wait and place in its list.
    waiters: Vec<(u64, usize)>,
    memory: HsaMemoryExceptionData,
    hardware: HsaHwExceptionData,
}

#[derive(Debug)]
struct Wait {
    slots: Vec<Slot>,
    wake: Arc<Condvar>,
}

/// One event of a wait.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// `None` once the event was destroyed.
    event: Option<u32>,
    activated: bool,
    age_enabled: bool,
}

/// A new event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Created {
    /// Its id, also what the GPU puts into its interrupt.
    pub id: u32,
    /// It has a slot in the event page.
    pub has_slot: bool,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            table: Mutex::new(Table {
                signal: Ids::starting_at(1),
                other: Ids::starting_at(KFD_FIRST_NONSIGNAL_EVENT_ID),
                page: None,
                mapped_size: 0,
                signal_count: 1,
                waits: BTreeMap::new(),
                next_wait: 0,
            }),
        }
    }
}

fn is_signal(kind: u32) -> bool {
    matches!(kind, KFD_IOC_EVENT_SIGNAL | KFD_IOC_EVENT_DEBUG_EVENT)
}

impl Events {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is an event page already.
    pub fn has_page(&self) -> bool {
        self.table().page.is_some()
    }

    /// Makes a buffer the event page (`kfd_event_page_set`).
    ///
    /// # Errors
    /// `EBUSY` when there is a page, `EINVAL` when the buffer is too small.
    pub fn set_page(&self, arena: Arc<Arena>, offset: u64, size: u64) -> Result<()> {
        let mut table = self.table();
        if table.page.is_some() {
            return Err(Errno::EBUSY);
        }
        if size < EVENT_PAGE_SIZE {
            return Err(Errno::EINVAL);
        }
        table.install(Page { arena, offset }, size)
    }

    /// The event page for `mmap` of `length` bytes, whole pages (`kfd_event_mmap`).
    ///
    /// # Errors
    /// `EINVAL` when there is no page or `length` is more than it.
    pub fn map_page(&self, length: u64) -> Result<(Arc<Arena>, u64)> {
        let mut table = self.table();
        if length == 0 || length > EVENT_PAGE_SIZE {
            return Err(Errno::EINVAL);
        }
        let page = table.page.clone().ok_or(Errno::EINVAL)?;
        table.mapped_size = length;
        Ok((page.arena, page.offset))
    }

    /// Creates an event (`kfd_event_create`). `spare` is where the event page comes from when there is none.
    ///
    /// # Errors
    /// `ENOSPC` when there is no free slot, `ENOMEM` when there is no memory for the page.
    pub fn create(&self, kind: u32, auto_reset: bool, spare: &Arc<Arena>) -> Result<Created> {
        let mut table = self.table();
        let event = Event {
            kind,
            auto_reset,
            signaled: false,
            age: 1,
            waiters: Vec::new(),
            memory: HsaMemoryExceptionData::default(),
            hardware: HsaHwExceptionData::default(),
        };
        if is_signal(kind) {
            let id = table.create_signal(event, spare)?;
            return Ok(Created { id, has_slot: true });
        }
        if table.other.len() >= MAX_OTHER_EVENTS as usize {
            return Err(Errno::ENOSPC);
        }
        let id = table.other.insert(event, i32::MAX as u32).ok_or(Errno::ENOSPC)?;
        Ok(Created { id, has_slot: false })
    }

    /// Destroys an event; waits for it end with a failure (`kfd_event_destroy`).
    ///
    /// # Errors
    /// `EINVAL` when there is no such event.
    pub fn destroy(&self, id: u32) -> Result<()> {
        let mut table = self.table();
        let event = table.remove(id).ok_or(Errno::EINVAL)?;
        if is_signal(event.kind) {
            table.signal_count = table.signal_count.saturating_sub(1);
        }
        for (wait, index) in event.waiters {
            if let Some(wait) = table.waits.get_mut(&wait) {
                if let Some(slot) = wait.slots.get_mut(index) {
                    slot.event = None;
                }
                wait.wake.notify_all();
            }
        }
        Ok(())
    }

    /// Signals an event from the CPU (`kfd_set_event`).
    ///
    /// # Errors
    /// `EINVAL` when there is no such event or it is no signal event.
    pub fn set(&self, id: u32) -> Result<()> {
        let mut table = self.table();
        match table.get(id) {
            Some(event) if event.kind == KFD_IOC_EVENT_SIGNAL => table.signal(id),
            _ => return Err(Errno::EINVAL),
        }
        Ok(())
    }

    /// Resets an event (`kfd_reset_event`).
    ///
    /// # Errors
    /// `EINVAL` when there is no such event or it is no signal event.
    pub fn reset(&self, id: u32) -> Result<()> {
        match self.table().get_mut(id) {
            Some(event) if event.kind == KFD_IOC_EVENT_SIGNAL => event.signaled = false,
            _ => return Err(Errno::EINVAL),
        }
        Ok(())
    }

    /// An interrupt of the GPU that carries `valid_bits` bits of an event's id (`kfd_signal_event_interrupt`):
    /// wakes that event if its slot was written, otherwise every event whose slot was.
    pub fn interrupt(&self, partial_id: u32, valid_bits: u32) {
        let mut table = self.table();
        let Some(page) = table.page.clone() else { return };
        let Ok(slots) = page.slots() else { return };
        let written =
            |id: u32| slots.get(id as usize).is_some_and(|slot| *slot != UNSIGNALED_EVENT_SLOT.to_ne_bytes());
        let step = 1u32.checked_shl(valid_bits).unwrap_or(KFD_SIGNAL_EVENT_LIMIT).min(KFD_SIGNAL_EVENT_LIMIT);
        let found = (valid_bits > 0 && partial_id < KFD_SIGNAL_EVENT_LIMIT)
            .then(|| (partial_id..KFD_SIGNAL_EVENT_LIMIT).step_by(step as usize))
            .into_iter()
            .flatten()
            .find(|id| written(*id) && table.signal.get(*id).is_some());
        // A slot without an event stays as it is, as in the kernel.
        let ids: Vec<u32> = match found {
            Some(id) => vec![id],
            None => table.signal.iter().map(|(id, _)| id).filter(|id| written(*id)).collect(),
        };
        for id in ids {
            if page.clear(id).is_ok() {
                table.signal(id);
            }
        }
    }

    /// A memory access of a GPU failed: signals every memory event (`kfd_signal_vm_fault_event`). Returns how many.
    pub fn memory_fault(&self, data: HsaMemoryExceptionData) -> usize {
        let mut table = self.table();
        table.signal_type(KFD_IOC_EVENT_MEMORY, |event| event.memory = data)
    }

    /// A GPU was reset: signals every hardware exception event (`kfd_signal_reset_event`). Returns how many.
    pub fn hardware_exception(&self, data: HsaHwExceptionData) -> usize {
        let mut table = self.table();
        table.signal_type(KFD_IOC_EVENT_HW_EXCEPTION, |event| event.hardware = data)
    }
}

impl Table {
    fn get(&self, id: u32) -> Option<&Event> {
        if id < KFD_FIRST_NONSIGNAL_EVENT_ID { self.signal.get(id) } else { self.other.get(id) }
    }

    fn get_mut(&mut self, id: u32) -> Option<&mut Event> {
        if id < KFD_FIRST_NONSIGNAL_EVENT_ID { self.signal.get_mut(id) } else { self.other.get_mut(id) }
    }

    fn remove(&mut self, id: u32) -> Option<Event> {
        if id < KFD_FIRST_NONSIGNAL_EVENT_ID { self.signal.remove(id) } else { self.other.remove(id) }
    }

    fn install(&mut self, page: Page, mapped_size: u64) -> Result<()> {
        for id in 0..KFD_SIGNAL_EVENT_LIMIT {
            page.clear(id)?;
        }
        self.page = Some(page);
        self.mapped_size = mapped_size;
        Ok(())
    }

    /// `create_signal_event` and `allocate_event_notification_slot`.
    fn create_signal(&mut self, event: Event, spare: &Arc<Arena>) -> Result<u32> {
        if self.mapped_size > 0 && self.signal_count == self.mapped_size / 8 {
            return Err(Errno::ENOSPC);
        }
        if self.page.is_none() {
            let offset = spare.allocate(EVENT_PAGE_SIZE)?;
            self.install(Page { arena: spare.clone(), offset }, SLOTS_BEFORE_MAP)?;
        }
        let page = self.page.clone().ok_or(Errno::ENOMEM)?;
        // A buffer that serves as event page can be larger than all slots.
        let slots = u32::try_from(self.mapped_size / 8).unwrap_or(u32::MAX).min(KFD_SIGNAL_EVENT_LIMIT);
        let id = self.signal.insert(event, slots).ok_or(Errno::ENOSPC)?;
        self.signal_count = self.signal_count.saturating_add(1);
        page.clear(id)?;
        Ok(id)
    }

    /// `set_event`: an auto-reset event that wakes somebody does not stay signalled.
    fn signal(&mut self, id: u32) {
        let waits = &mut self.waits;
        let event =
            if id < KFD_FIRST_NONSIGNAL_EVENT_ID { self.signal.get_mut(id) } else { self.other.get_mut(id) };
        if let Some(event) = event {
            signal(event, waits);
        }
    }

    fn signal_type(&mut self, kind: u32, fill: impl Fn(&mut Event)) -> usize {
        let waits = &mut self.waits;
        let mut count = 0;
        for (_, event) in self.other.iter_mut().filter(|(_, event)| event.kind == kind) {
            fill(event);
            signal(event, waits);
            count += 1;
        }
        count
    }
}

fn signal(event: &mut Event, waits: &mut BTreeMap<u64, Wait>) {
    event.signaled = !event.auto_reset || event.waiters.is_empty();
    // Never back to the reserved ages 0 and 1.
    event.age = event.age.checked_add(1).unwrap_or(2);
    for (wait, index) in &event.waiters {
        if let Some(wait) = waits.get_mut(wait) {
            if let Some(slot) = wait.slots.get_mut(*index) {
                slot.activated = true;
            }
            wait.wake.notify_all();
        }
    }
}

#[cfg(test)]
mod tests;
