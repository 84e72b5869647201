//! Streams of system management events.
//!
//! The kernel's lines name processes: the one whose GPU work they are about, by its number on the host. Here that is this
//! worker, and the guest gets its own number and name in their place. Kernels up to 2026 give a memory fault of any process to
//! everybody who listens, so a fault of another process is left out here; events that can only be other processes', or that
//! have addresses of this one, are not enabled.

mod line;

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kfd_abi::smi::{
    KFD_SMI_EVENT_GPU_POST_RESET, KFD_SMI_EVENT_GPU_PRE_RESET, KFD_SMI_EVENT_QUEUE_EVICTION,
    KFD_SMI_EVENT_QUEUE_RESTORE, KFD_SMI_EVENT_THERMAL_THROTTLE, KFD_SMI_EVENT_VMFAULT, event_mask,
};
use kfd_host::{Kfd, KfdError, SmiPlace, SmiPlaces};
use virtio_kfd_protocol::limits::{MAX_SMI_BYTES, MAX_SMI_STREAMS};
use virtio_kfd_protocol::{HelloRequest, Status};

use self::line::{Guest, Lines, rewrite};
use crate::failure::Failure;
use crate::throttle::Throttle;

/// What is enabled on the host, whatever the guest wants to see: its library chooses. Not `KFD_SMI_EVENT_ALL_PROCESS`, with which
/// a privileged worker would see others' work; not starts and ends of processes, which the kernel tells everybody; not the
/// events of shared virtual memory, which this process has none of.
const EVENTS: u64 = event_mask(KFD_SMI_EVENT_THERMAL_THROTTLE)
    | event_mask(KFD_SMI_EVENT_GPU_PRE_RESET)
    | event_mask(KFD_SMI_EVENT_GPU_POST_RESET)
    | event_mask(KFD_SMI_EVENT_QUEUE_EVICTION)
    | event_mask(KFD_SMI_EVENT_QUEUE_RESTORE);

/// What the kernel keeps of a stream in bytes (`MAX_KFIFO_SIZE`, kfd_smi_events.c).
const KERNEL_BYTES: usize = 1024;

/// The streams of a context.
#[derive(Debug)]
pub struct Smi {
    /// An error is why there can be none.
    places: Result<SmiPlaces, KfdError>,
    /// Mask of the events.
    events: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Who was served last is at the end.
    streams: VecDeque<Stream>,
    last: u32,
    guest: Guest,
    /// Threads that wait.
    waiting: usize,
    /// How often streams have come and gone.
    changes: u64,
    /// Threads that wait and have not heard of the last change.
    called: usize,
}

#[derive(Debug)]
struct Stream {
    id: u32,
    place: SmiPlace,
    lines: Lines,
    /// The kernel refuses to read it.
    broken: bool,
}

/// How a read ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// Whole lines of a stream.
    Lines {
        /// The stream.
        stream: u32,
        /// Their text.
        text: Vec<u8>,
    },
    /// The time was up.
    Nothing,
    /// There is no stream.
    Closed,
}

impl Smi {
    /// No streams, with places for some. `knows_threads` is whether the kernel's numbers of threads are those that this process has for
    /// its own: else it could take another process's memory fault for one of its own, and hears of none.
    pub fn new(places: Result<SmiPlaces, KfdError>, knows_threads: bool) -> Self {
        let faults = if knows_threads { event_mask(KFD_SMI_EVENT_VMFAULT) } else { 0 };
        Smi { places, events: EVENTS | faults, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn places(&self) -> Result<&SmiPlaces, Failure> {
        self.places.as_ref().map_err(|error| Failure::new(Status::NOT_SUPPORTED, error.to_string()))
    }

    /// Who the guest process is.
    pub fn greet(&self, hello: &HelloRequest) {
        let name = hello.name.split(|byte| *byte == 0).next().unwrap_or(&[]);
        let guest = &mut self.state().guest;
        guest.pid = hello.guest_pid;
        guest.name = name.to_vec();
    }

    /// The calling thread has taken a GPU's address space, so faults in there are by its number
    /// (`amdgpu_vm_set_task_info`).
    pub fn acquired(&self) {
        let task = nix::unistd::gettid().as_raw().unsigned_abs();
        let guest = &mut self.state().guest;
        if !guest.tasks.contains(&task) {
            guest.tasks.push(task);
        }
    }

    /// Opens a stream of a GPU of this VM.
    pub fn open(&self, kfd: &Kfd, gpu_id: u32) -> Result<u32, Failure> {
        let places = self.places()?;
        let mut state = self.state();
        let free = places.all().find(|place| state.streams.iter().all(|stream| stream.place != *place));
        let limit = || Failure::limit(format!("OpenSmi: {MAX_SMI_STREAMS} streams"));
        let place = free.ok_or_else(limit)?;
        places.open(kfd, gpu_id, self.events, place)?;
        let id = state.last.wrapping_add(1);
        state.last = id;
        state.streams.push_front(Stream { id, place, lines: Lines::default(), broken: false });
        // Who waits has to wait for this one too.
        state.call(places);
        Ok(id)
    }

    /// Closes a stream.
    pub fn close(&self, id: u32) -> Result<(), Failure> {
        let places = self.places()?;
        let mut state = self.state();
        let found = state.streams.iter().position(|stream| stream.id == id);
        let unknown = || Failure::new(Status::BAD_HANDLE, format!("CloseSmi: there is no stream {id}"));
        let index = found.ok_or_else(unknown)?;
        if let Some(stream) = state.streams.get(index) {
            places.close(stream.place)?;
        }
        state.streams.remove(index);
        state.call(places);
        Ok(())
    }

    /// Waits for lines; without a time for ever.
    pub fn read(&self, timeout: Option<Duration>, throttle: &Throttle) -> Result<Read, Failure> {
        let Ok(places) = &self.places else { return Ok(Read::Closed) };
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let (waiting, changes): (Vec<SmiPlace>, u64) = {
                let mut state = self.state();
                if state.streams.is_empty() {
                    return Ok(Read::Closed);
                }
                if let Some((stream, text)) = state.take(places, throttle) {
                    return Ok(Read::Lines { stream, text });
                }
                if left.is_some_and(|left| left.is_zero()) {
                    return Ok(Read::Nothing);
                }
                state.waiting = state.waiting.saturating_add(1);
                let whole = state.streams.iter().filter(|stream| !stream.broken);
                (whole.map(|stream| stream.place).collect(), state.changes)
            };
            // A place that is closed and used again meanwhile is a wait that ends for nothing, or goes on until the poke.
            let waited = places.wait(&waiting, left);
            self.state().waited(places, changes);
            waited?;
        }
    }
}

impl State {
    /// Streams have come or gone: all that wait look anew.
    fn call(&mut self, places: &SmiPlaces) {
        self.changes = self.changes.wrapping_add(1);
        self.called = self.waiting;
        if self.called > 0 {
            places.poke();
        }
    }

    /// A thread waits no more, that did so since that many changes. The last one that was called lets others wait again: one that did it
    /// earlier could have those sleep on that have not looked yet.
    fn waited(&mut self, places: &SmiPlaces, changes: u64) {
        self.waiting = self.waiting.saturating_sub(1);
        if changes != self.changes {
            self.called = self.called.saturating_sub(1);
            if self.called == 0 {
                places.calm();
            }
        }
    }

    /// The lines of the next stream that has some.
    fn take(&mut self, places: &SmiPlaces, throttle: &Throttle) -> Option<(u32, Vec<u8>)> {
        for index in 0..self.streams.len() {
            let stream = self.streams.get_mut(index)?;
            if stream.broken {
                continue;
            }
            let text = stream.text(places, &self.guest, throttle);
            if !text.is_empty() {
                let stream = self.streams.remove(index)?;
                let id = stream.id;
                self.streams.push_back(stream);
                return Some((id, text));
            }
        }
        None
    }
}

impl Stream {
    /// What the kernel has, as the guest may see it.
    fn text(&mut self, places: &SmiPlaces, guest: &Guest, throttle: &Throttle) -> Vec<u8> {
        let mut text = Vec::new();
        let mut buffer = [0; KERNEL_BYTES];
        // As much as the kernel keeps, even where it gives it in small pieces (Linux 5.8 gives 8 bytes at a time), and
        // not for ever.
        for _ in 0..KERNEL_BYTES {
            let read = match places.read(self.place, &mut buffer) {
                Ok(read) => read,
                Err(error) => {
                    self.broken = true;
                    throttle.log(|_| tracing::warn!("a stream of events ends: {error}"));
                    break;
                }
            };
            if read == 0 {
                break;
            }
            self.lines.push(buffer.get(..read).unwrap_or(&buffer), |line| match rewrite(line, guest) {
                // What does not fit is left out whole, as the kernel does.
                Ok(Some(line)) if text.len().saturating_add(line.len()) <= MAX_SMI_BYTES => text.extend(line),
                Ok(_) => {}
                Err(why) => throttle.log(|held| tracing::warn!("{why} ({held} messages held back)")),
            });
            if text.len() >= KERNEL_BYTES {
                break;
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a PID namespace another process's thread may have the number that this process has for one of its own.
    #[test]
    fn a_worker_that_the_kernel_has_other_numbers_for_hears_of_no_faults() {
        let events = |knows_threads| {
            Smi::new(Err(KfdError::new("fcntl", "", nix::errno::Errno::EBUSY)), knows_threads).events
        };
        let fault = event_mask(KFD_SMI_EVENT_VMFAULT);
        assert_eq!((events(true) & fault, events(false)), (fault, events(true) & !fault));
        // KFD_SMI_EVENT_ALL_PROCESS, and starts and ends of processes.
        assert_eq!(events(true) & (1 << 63 | 1 << 11 | 1 << 12), 0);
    }
}
