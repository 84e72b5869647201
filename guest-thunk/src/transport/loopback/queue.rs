//! A split virtqueue from the driver's side (virtio 1.3, section 2.7), commands in indirect descriptors as Linux
//! sends them.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use virtio_bindings::virtio_gpu::{VIRTIO_GPU_FLAG_FENCE, VIRTIO_GPU_FLAG_INFO_RING_IDX};
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::command::Header;
use super::pending::Pending;
use super::ram::{Pages, Ram};
use super::{PAGE, system};
use crate::transport::{Result, TransportError};

/// Descriptors of a queue, as QEMU's default. Each of the three parts of the queue then fits in a page.
pub const QUEUE_SIZE: u16 = 256;

/// `VRING_USED_F_NO_NOTIFY`
const USED_NO_NOTIFY: u16 = 1;

/// `struct vring_desc`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Descriptor {
    /// Guest-physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// `VRING_DESC_F_*`
    pub flags: u16,
    /// The next descriptor of the chain, if flagged.
    pub next: u16,
}

/// A timeline of fences: a context and one of its rings.
pub(super) type Timeline = (u32, u8);

/// A command for the device.
pub(super) struct Submission<'a> {
    /// Header and body, together at most a page.
    pub(super) command: &'a [u8],
    /// What follows the body.
    pub(super) data: &'a [u8],
    /// Bytes of room for the response, at most a page.
    pub(super) capacity: usize,
    /// Where it is fenced, if it is: the fence goes into the header.
    pub(super) timeline: Option<Timeline>,
}

/// Memory of a head, used again and again.
struct Buffers {
    table: Pages,
    command: Pages,
    response: Pages,
}

/// What a head is used for.
enum Flight {
    Free,
    /// Taken for descriptors written by hand; with what the device returned it, if it did.
    Raw(Option<u32>),
    Command {
        pending: Arc<Pending>,
        capacity: usize,
        /// Kept until the device is done with them.
        _data: Vec<Pages>,
    },
}

struct State {
    free: Vec<u16>,
    flights: Vec<Flight>,
    buffers: Vec<Option<Buffers>>,
    available: u16,
    seen: u16,
    next_fence: u64,
    fences: BTreeMap<u64, (Timeline, Arc<Pending>)>,
    lost: Option<String>,
}

/// A virtqueue.
pub struct Queue {
    ram: Arc<Ram>,
    descriptors: Pages,
    available: Pages,
    used: Pages,
    event_idx: bool,
    kick: EventFd,
    call: EventFd,
    state: Mutex<State>,
    /// Told when a head becomes free or a raw chain is returned.
    returned: Condvar,
}

const DESCRIPTOR: u64 = size_of::<Descriptor>() as u64;

/// Byte offsets in the available ring: flags, index, entries, then the index that the driver wants to be told at.
const INDEX: u64 = 2;
const ENTRIES: u64 = 4;
const USED_EVENT: u64 = ENTRIES + 2 * QUEUE_SIZE as u64;
/// In the used ring: the index that the device wants to be told at.
const AVAIL_EVENT: u64 = ENTRIES + 8 * QUEUE_SIZE as u64;

impl Queue {
    pub(super) fn new(ram: &Arc<Ram>, event_idx: bool) -> Result<Queue> {
        let event = || {
            EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(|e| system("eventfd", "a queue", e))
        };
        Ok(Queue {
            descriptors: ram.take(PAGE)?,
            available: ram.take(PAGE)?,
            used: ram.take(PAGE)?,
            ram: Arc::clone(ram),
            event_idx,
            kick: event()?,
            call: event()?,
            state: Mutex::new(State {
                free: (0..QUEUE_SIZE).rev().collect(),
                flights: (0..QUEUE_SIZE).map(|_| Flight::Free).collect(),
                buffers: (0..QUEUE_SIZE).map(|_| None).collect(),
                available: 0,
                seen: 0,
                next_fence: 1,
                fences: BTreeMap::new(),
                lost: None,
            }),
            returned: Condvar::new(),
        })
    }

    /// Guest-physical addresses of descriptor table, available ring and used ring.
    pub fn addresses(&self) -> (u64, u64, u64) {
        (self.descriptors.address(), self.available.address(), self.used.address())
    }

    pub(super) fn call(&self) -> &EventFd {
        &self.call
    }

    pub(super) fn kick_event(&self) -> &EventFd {
        &self.kick
    }

    /// Tells the device to look, whether it wants to be told or not.
    pub fn kick(&self) -> Result<()> {
        self.kick.write(1).map_err(|error| system("write", "a kick", error))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load(&self, address: u64) -> Result<u16> {
        self.ram
            .memory()
            .load(GuestAddress(address), Ordering::Acquire)
            .map_err(|error| system("load", format!("{address:#x}"), io::Error::other(error.to_string())))
    }

    fn store(&self, value: u16, address: u64) -> Result<()> {
        self.ram
            .memory()
            .store(value, GuestAddress(address), Ordering::Release)
            .map_err(|error| system("store", format!("{address:#x}"), io::Error::other(error.to_string())))
    }

    /// Puts a command into the queue, waiting for room if need be.
    pub(super) fn submit(&self, submission: &Submission<'_>) -> Result<Arc<Pending>> {
        let mut state = self.lock();
        let head = loop {
            if let Some(why) = &state.lost {
                return Err(TransportError::Lost(why.clone()));
            }
            match state.free.pop() {
                Some(head) => break head,
                None => state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        match self.place(&mut state, head, submission) {
            Ok(pending) => Ok(pending),
            Err(error) => {
                state.free.push(head);
                Err(error)
            }
        }
    }

    fn place(&self, state: &mut State, head: u16, submission: &Submission<'_>) -> Result<Arc<Pending>> {
        let slot = usize::from(head);
        let page = PAGE as usize;
        if submission.command.len() > page || submission.capacity > page {
            return Err(TransportError::NotSupported("a command or response of more than a page"));
        }
        let mut command = submission.command.to_vec();
        let fence_id = state.next_fence;
        if let Some((ctx_id, ring_idx)) = submission.timeline
            && let Ok((header, _)) = Header::mut_from_prefix(&mut command)
        {
            header.flags |= VIRTIO_GPU_FLAG_FENCE | VIRTIO_GPU_FLAG_INFO_RING_IDX;
            header.fence_id = fence_id;
            header.ctx_id = ctx_id;
            header.ring_idx = ring_idx;
        }
        let Some(buffers) = state.buffers.get_mut(slot) else {
            return Err(TransportError::NotSupported("a descriptor beyond the queue"));
        };
        let buffers = match buffers {
            Some(buffers) => buffers,
            None => buffers.insert(Buffers {
                table: self.ram.take(PAGE)?,
                command: self.ram.take(PAGE)?,
                response: self.ram.take(PAGE)?,
            }),
        };
        buffers.command.write(&command)?;
        let mut chain = vec![(buffers.command.address(), command.len() as u64, 0)];
        let mut extra = Vec::new();
        let inline = page.saturating_sub(command.len());
        if submission.data.is_empty() {
        } else if submission.data.len() <= inline {
            let at = buffers.command.address().saturating_add(command.len() as u64);
            self.ram.write(submission.data, at)?;
            chain.push((at, submission.data.len() as u64, 0));
        } else {
            let pages = self.ram.take(submission.data.len() as u64)?;
            pages.write(submission.data)?;
            let mut left = submission.data.len() as u64;
            for run in pages.runs() {
                let length = run.length.min(left);
                chain.push((run.address, length, 0));
                left = left.saturating_sub(length);
            }
            extra.push(pages);
        }
        if submission.capacity > 0 {
            chain.push((buffers.response.address(), submission.capacity as u64, VRING_DESC_F_WRITE as u16));
        }
        let table = table(&chain);
        let at = if table.len() <= page {
            buffers.table.write(&table)?;
            buffers.table.address()
        } else {
            let pages = self.ram.take_adjacent(table.len() as u64)?;
            pages.write(&table)?;
            let at = pages.address();
            extra.push(pages);
            at
        };
        let len = u32::try_from(table.len())
            .map_err(|_| TransportError::NotSupported("an indirect table of 4 GiB"))?;
        self.write_descriptor(
            head,
            Descriptor { addr: at, len, flags: VRING_DESC_F_INDIRECT as u16, next: 0 },
        )?;
        let pending = Arc::new(Pending::default());
        if let Some(timeline) = submission.timeline {
            state.next_fence = fence_id.saturating_add(1);
            state.fences.insert(fence_id, (timeline, Arc::clone(&pending)));
        }
        if let Some(flight) = state.flights.get_mut(slot) {
            let (pending, capacity) = (Arc::clone(&pending), submission.capacity);
            *flight = Flight::Command { pending, capacity, _data: extra };
        }
        if self.make_available(state, &[head])? {
            self.kick()?;
        }
        Ok(pending)
    }

    /// Puts heads into the available ring. Whether the device wants to be told.
    fn make_available(&self, state: &mut State, heads: &[u16]) -> Result<bool> {
        let old = state.available;
        for &head in heads {
            let entry = u64::from(state.available % QUEUE_SIZE);
            self.store(head, self.available.address().saturating_add(ENTRIES + 2 * entry))?;
            state.available = state.available.wrapping_add(1);
        }
        self.store(state.available, self.available.address().saturating_add(INDEX))?;
        // The device must see the index before we look at whether it sleeps.
        fence(Ordering::SeqCst);
        if !self.event_idx {
            return Ok(self.load(self.used.address())? & USED_NO_NOTIFY == 0);
        }
        let event = self.load(self.used.address().saturating_add(AVAIL_EVENT))?;
        // vring_need_event of the specification.
        let new = state.available;
        Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
    }

    /// Takes what the device has returned. Called when the device has rung the bell.
    pub(super) fn reap(&self) -> Result<()> {
        let mut state = self.lock();
        loop {
            let end = self.load(self.used.address().saturating_add(INDEX))?;
            while state.seen != end {
                let entry = u64::from(state.seen % QUEUE_SIZE);
                let mut element = [0u32; 2];
                let at = self.used.address().saturating_add(ENTRIES + 8 * entry);
                self.ram.read(element.as_mut_bytes(), at)?;
                state.seen = state.seen.wrapping_add(1);
                let [id, length] = element;
                if let Err(why) = self.returned(&mut state, id, length) {
                    self.lose_all(&mut state, &why);
                }
            }
            if !self.event_idx {
                break;
            }
            self.store(state.seen, self.available.address().saturating_add(USED_EVENT))?;
            // The device must see that before we look whether it has gone on meanwhile.
            fence(Ordering::SeqCst);
            if self.load(self.used.address().saturating_add(INDEX))? == state.seen {
                break;
            }
        }
        drop(state);
        self.returned.notify_all();
        Ok(())
    }

    /// Takes one returned head. An error says what the device did wrong.
    fn returned(&self, state: &mut State, id: u32, length: u32) -> std::result::Result<(), String> {
        let bad = || format!("the device returned descriptor {id}, which it did not have");
        let slot = usize::try_from(id).map_err(|_| bad())?;
        let flight = state.flights.get_mut(slot).ok_or_else(bad)?;
        let (pending, capacity) = match flight {
            Flight::Free => return Err(bad()),
            Flight::Raw(result) => {
                *result = Some(length);
                return Ok(());
            }
            Flight::Command { pending, capacity, .. } => (Arc::clone(pending), *capacity),
        };
        *flight = Flight::Free;
        state.free.push(id as u16);
        if length as usize > capacity {
            return Err(format!("the device wrote {length} bytes of response to {capacity}"));
        }
        let mut response = vec![0; length as usize];
        if let Some(Some(buffers)) = state.buffers.get(slot) {
            self.ram.read(&mut response, buffers.response.address()).map_err(|error| error.to_string())?;
        }
        let fenced = Header::read_from_prefix(&response)
            .ok()
            .map(|(header, _)| header)
            .filter(|header| header.flags & VIRTIO_GPU_FLAG_FENCE != 0);
        let own = fenced.as_ref().and_then(|header| state.fences.get(&header.fence_id));
        pending.done(response, own.is_some_and(|(_, waiting)| Arc::ptr_eq(waiting, &pending)));
        match fenced {
            Some(header) => signal(&mut state.fences, header.fence_id),
            None => state.fences.retain(|_, (_, waiting)| {
                let same = Arc::ptr_eq(waiting, &pending);
                if same {
                    pending.fail("the response to a fenced command had no fence");
                }
                !same
            }),
        }
        Ok(())
    }

    /// Fails everything that is under way and whatever comes.
    pub(super) fn lose(&self, why: &str) {
        self.lose_all(&mut self.lock(), why);
        self.returned.notify_all();
    }

    fn lose_all(&self, state: &mut State, why: &str) {
        state.lost.get_or_insert_with(|| why.to_owned());
        for flight in &state.flights {
            if let Flight::Command { pending, .. } = flight {
                pending.fail(why);
            }
        }
        for (_, pending) in state.fences.values() {
            pending.fail(why);
        }
        state.fences.clear();
    }

    /// Takes descriptors out of use, for chains that are written by hand. Lowest numbers first.
    pub fn take_descriptors(&self, count: usize) -> Result<Vec<u16>> {
        let mut state = self.lock();
        let left = state.free.len().saturating_sub(count);
        if state.free.len() < count {
            return Err(TransportError::NotSupported("more descriptors than are free"));
        }
        let mut taken: Vec<u16> = state.free.split_off(left);
        taken.sort_unstable();
        for &index in &taken {
            if let Some(flight) = state.flights.get_mut(usize::from(index)) {
                *flight = Flight::Raw(None);
            }
        }
        Ok(taken)
    }

    /// Gives descriptors back that [`Queue::take_descriptors`] gave out and the device does not have.
    pub fn give_descriptors(&self, indices: &[u16]) {
        let mut state = self.lock();
        for &index in indices {
            if let Some(flight) = state.flights.get_mut(usize::from(index)) {
                *flight = Flight::Free;
            }
            state.free.push(index);
        }
        drop(state);
        self.returned.notify_all();
    }

    /// Writes a descriptor of the table.
    pub fn write_descriptor(&self, index: u16, descriptor: Descriptor) -> Result<()> {
        let at = self.descriptors.address().saturating_add(DESCRIPTOR.saturating_mul(index.into()));
        self.ram.write(descriptor.as_bytes(), at)
    }

    /// Makes heads available, whatever stands in their descriptors, and kicks.
    pub fn publish(&self, heads: &[u16]) -> Result<()> {
        let mut state = self.lock();
        for &head in heads {
            if let Some(flight) = state.flights.get_mut(usize::from(head)) {
                *flight = Flight::Raw(None);
            }
        }
        self.make_available(&mut state, heads)?;
        drop(state);
        self.kick()
    }

    /// Writes the index of the available ring, as a driver that is broken would, and kicks.
    pub fn set_available_index(&self, index: u16) -> Result<()> {
        self.store(index, self.available.address().saturating_add(INDEX))?;
        self.kick()
    }

    /// The index of the available ring: how many heads were made available, modulo 65536.
    pub fn available_index(&self) -> u16 {
        self.lock().available
    }

    /// Waits until the device returns a head that was published, and gives the length that it wrote; none when
    /// `limit` has passed.
    pub fn wait_returned(&self, head: u16, limit: Duration) -> Result<Option<u32>> {
        let deadline = Instant::now().checked_add(limit);
        let mut state = self.lock();
        loop {
            if let Some(Flight::Raw(Some(length))) = state.flights.get(usize::from(head)) {
                return Ok(Some(*length));
            }
            if let Some(why) = &state.lost {
                return Err(TransportError::Lost(why.clone()));
            }
            let left = deadline.map_or(limit, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(None);
            }
            state = self.returned.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The bytes of an indirect table for these buffers (address, length, flags); buffers too long for one
/// descriptor become several.
fn table(chain: &[(u64, u64, u16)]) -> Vec<u8> {
    let mut pieces = VecDeque::new();
    for &(mut addr, mut left, flags) in chain {
        while left > 0 {
            // A whole number of pages.
            let len = left.min(1 << 30);
            pieces.push_back(Descriptor { addr, len: len as u32, flags, next: 0 });
            addr = addr.saturating_add(len);
            left = left.saturating_sub(len);
        }
    }
    let last = pieces.len().saturating_sub(1);
    for (number, piece) in pieces.iter_mut().enumerate().take(last) {
        piece.flags |= VRING_DESC_F_NEXT as u16;
        piece.next = number.saturating_add(1) as u16;
    }
    pieces.make_contiguous().as_bytes().to_vec()
}

/// Signals a fence and all earlier ones of its timeline, as the guest's driver does (`virtio_gpu_fence_event_process`).
fn signal(fences: &mut BTreeMap<u64, (Timeline, Arc<Pending>)>, fence: u64) {
    let Some(&(timeline, _)) = fences.get(&fence) else { return };
    fences.retain(|&id, (of, pending)| {
        let signalled = *of == timeline && id <= fence;
        if signalled {
            pending.signal();
        }
        !signalled
    });
}
