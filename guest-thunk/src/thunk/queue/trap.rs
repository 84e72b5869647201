//! Lets the host sleep while no doorbell rings.
//!
//! A host cannot be woken by a store to memory that it shares with a guest, so it looks at the doorbells again and again, less
//! often when they are still. While they are still for long, a thread of this library, the watcher, makes the program's next
//! store trap: it moves an empty page of userfaultfd's (user mode only, for which a process needs no privilege) over the
//! doorbells and tells the host that it may sleep. The store that then faults waits until the watcher has moved the doorbells
//! back; the host is told to look again. So a ring is either in memory when the host is told that it may sleep, and it looks
//! once more then, or it traps.
//!
//! Where a process may not have userfaultfd (containers filter the system call), the host goes on looking.
#![allow(unsafe_code, reason = "mremap, and what makes pages empty")]

use std::error::Error;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow};
use virtio_kfd_protocol::calls::{RingDoorbells, WaitDoorbells};
use virtio_kfd_protocol::{RingDoorbellsRequest, WaitDoorbellsRequest};

use crate::client::{Client, ClientError};
use crate::thunk::Thunk;
use crate::thunk::memory::address::{Reservation, page_size};
use crate::thunk::memory::block::Block;
use crate::thunk::moves::Alone;
use crate::thunk::refusal::{Level, say};
use crate::thunk::userfault::{Event, MOVES, Mode, Userfault};

/// No GPU needs to reach these addresses.
const ANYWHERE: (u64, u64) = (0, u64::MAX);
/// Between two questions whether the doorbells are still.
const LOOK: Duration = Duration::from_millis(200);
/// Between two looks whether a move is over that has not told so.
const MOVE: Duration = Duration::from_millis(1);
/// Between two attempts to move doorbells back.
const AGAIN: Duration = Duration::from_millis(1);
/// Stack of the watcher in bytes.
const STACK_BYTES: usize = 128 << 10;

/// A userfaultfd for the program's own stores.
fn faults() -> io::Result<Userfault> {
    Userfault::of_user_mode(MOVES)
}

/// Whether this process may have the trap.
#[cfg(test)]
pub fn is_available() -> bool {
    faults().is_ok()
}

/// Moves what is mapped at a reservation over other addresses, whose mapping goes.
fn move_over(from: Reservation, to: u64) -> Result<(), (Reservation, io::Error)> {
    let place = |address: u64| std::ptr::with_exposed_provenance_mut::<libc::c_void>(address as usize);
    let (old, new, size) = (place(from.start()), place(to), from.size() as usize);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the old range is the reservation's alone, and nothing refers to it. The new one is that of the doorbells, whose
    // owner keeps its addresses reserved: the program sees the same memory there, or waits.
    let moved = unsafe { libc::mremap(old, size, size, flags, new) };
    if moved == libc::MAP_FAILED {
        return Err((from, io::Error::last_os_error()));
    }
    // Nothing is mapped at its addresses any more.
    std::mem::forget(from);
    Ok(())
}

/// Takes the pages that a process has at once that locks all its memory (mlockall): stores to them would not trap, and
/// be lost.
fn make_empty(reservation: &Reservation) -> io::Result<()> {
    let place = std::ptr::with_exposed_provenance_mut::<libc::c_void>(reservation.start() as usize);
    let size = reservation.size() as usize;
    // SAFETY: unlocking changes no memory.
    if unsafe { libc::munlock(place, size) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the range is the reservation's, and nobody has stored anything there.
    if unsafe { libc::madvise(place, size, libc::MADV_DONTNEED) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut resident = vec![0u8; size.div_ceil(page_size() as usize)];
    // SAFETY: the vector has a byte for each page of the range.
    if unsafe { libc::mincore(place, size, resident.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    match resident.iter().all(|page| page & 1 == 0) {
        true => Ok(()),
        false => Err(io::Error::other("the kernel keeps pages that should be empty")),
    }
}

/// The doorbells of a GPU, mapped once more, so that moving them back needs nothing that could be lacking.
struct Spare(Reservation);

impl Spare {
    fn new(block: &Block) -> io::Result<Spare> {
        let reservation = Reservation::new(block.size(), page_size(), 0, ANYWHERE)?;
        block.map_again(reservation.start())?;
        reservation.keep_from_children();
        Ok(Spare(reservation))
    }
}

/// Doorbells that trap. They are what they were when this is dropped.
struct Armed {
    faults: Arc<Userfault>,
    block: Arc<Block>,
    spare: Option<Spare>,
}

impl Armed {
    /// From here on every access to the doorbells waits for the drop. Also whether somebody waits already.
    fn new(faults: &Arc<Userfault>, block: &Arc<Block>) -> io::Result<(Armed, bool)> {
        let spare = Spare::new(block)?;
        let empty = Reservation::new(block.size(), page_size(), 0, ANYWHERE)?;
        empty.fill_with_private_memory()?;
        // A child has no watcher, and must not ring.
        empty.keep_from_children();
        faults.register(empty.start(), empty.size(), Mode::Missing)?;
        make_empty(&empty)?;
        let to = block.start();
        let mut rung = false;
        let _alone = Alone::wait();
        thread::scope(|scope| {
            let mover = thread::Builder::new().stack_size(STACK_BYTES);
            // The kernel holds the mover until what it says of the move has been read, which may come after a fault.
            let mover =
                mover.spawn_scoped(scope, move || move_over(empty, to).map_err(|(_, error)| error))?;
            while !mover.is_finished() {
                let _ = readable([faults.as_fd()], Some(MOVE));
                rung |= faults.events().contains(&Event::Fault);
            }
            mover.join().unwrap_or_else(|_| Err(io::Error::other("the move was not finished")))
        })?;
        Ok((Armed { faults: Arc::clone(faults), block: Arc::clone(block), spare: Some(spare) }, rung))
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        while let Some(Spare(reservation)) = self.spare.take() {
            if let Err((reservation, _)) = move_over(reservation, self.block.start()) {
                // Short of kernel memory: the program waits with its store until there is some.
                self.spare = Some(Spare(reservation));
                thread::sleep(AGAIN);
            }
        }
        // Who waits came to do so before the move, so all of them are woken.
        let _ = self.faults.wake(self.block.start(), self.block.size());
    }
}

/// Which of the descriptors can be read, or have ended; after the time at the latest, without one for ever.
fn readable<const N: usize>(
    descriptors: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> io::Result<[bool; N]> {
    let timeout = timeout
        .map_or(PollTimeout::NONE, |timeout| PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX));
    let mut polled = descriptors.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN));
    match poll(&mut polled, timeout) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(polled.map(|polled| polled.any().unwrap_or(true))),
        Err(error) => Err(error.into()),
    }
}

/// The watcher of a connection's doorbells.
pub struct Watcher {
    thread: JoinHandle<()>,
    /// A byte has it begin anew, the end has it end.
    calls: PipeWriter,
}

impl Watcher {
    /// Starts it. An error where this process may not have it.
    pub fn start(thunk: &Arc<Thunk>) -> io::Result<Watcher> {
        let faults = Arc::new(faults()?);
        let (reader, calls) = io::pipe()?;
        let weak = Arc::downgrade(thunk);
        let builder = thread::Builder::new().name("doorbells".into()).stack_size(STACK_BYTES);
        // The program's signals are handled by its own threads. The new one inherits this.
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let thread = builder.spawn(move || {
            // Without the trap the host goes on looking.
            if let Err(why) = watch(&weak, &faults, reader) {
                say(Level::Info, || format!("doorbells do not trap any more: {why}"));
            }
        });
        before.thread_set_mask()?;
        Ok(Watcher { thread: thread?, calls })
    }

    /// The doorbells are others now.
    pub fn begin_anew(&mut self) {
        // A pipe that is full says the same.
        let _ = self.calls.write(&[0]);
    }

    /// Ends it. No doorbell traps any more.
    pub fn end(self) {
        drop(self.calls);
        let _ = self.thread.join();
    }
}

/// What the watcher does, until the connection is closed or lost.
fn watch(thunk: &Weak<Thunk>, faults: &Arc<Userfault>, mut calls: PipeReader) -> Result<(), Box<dyn Error>> {
    loop {
        let [called] = readable([calls.as_fd()], Some(LOOK))?;
        if called && is_over(&mut calls) {
            return Ok(());
        }
        let armed = match thunk.upgrade() {
            Some(thunk) => arm(&thunk, faults),
            None => return Ok(()),
        };
        match &armed {
            Ok(None) => continue,
            Ok(Some(_)) => await_ring(faults, &calls),
            Err(_) => {}
        }
        let armed = armed.map(drop);
        // Whatever the host has understood, it looks from now on.
        loop {
            let Some(thunk) = thunk.upgrade() else { return Ok(()) };
            match tell(&thunk.client, false) {
                Err(error) if thunk.client.is_lost() => return Err(error.into()),
                Err(_) => thread::sleep(AGAIN),
                Ok(()) => break,
            }
        }
        armed?;
    }
}

/// Waits until the program rings or the watcher is called.
fn await_ring(faults: &Userfault, calls: &PipeReader) {
    // Without a poll the doorbells must not trap.
    while let Ok([fault, called]) = readable([faults.as_fd(), calls.as_fd()], None) {
        if called || (fault && faults.events().contains(&Event::Fault)) {
            return;
        }
    }
}

/// Makes the doorbells trap if they are still, and has the host sleep. None where something rings.
fn arm(thunk: &Thunk, faults: &Arc<Userfault>) -> Result<Option<Vec<Armed>>, Box<dyn Error>> {
    let request = WaitDoorbellsRequest { timeout_ms: 0, pad: 0 };
    if thunk.client.wait_call::<WaitDoorbells>(&request, &[], 0)?.0.still == 0 {
        return Ok(None);
    }
    // Held until the host knows: it must not sleep while there are doorbells that do not trap. New ones wake it.
    let slices = thunk.queues.doorbells.lock();
    let (mut armed, mut rung) = (Vec::with_capacity(slices.len()), slices.is_empty());
    for slice in slices.values() {
        let (one, waits) = Armed::new(faults, slice)?;
        armed.push(one);
        rung |= waits;
    }
    if rung {
        return Ok(None);
    }
    tell(&thunk.client, true)?;
    Ok(Some(armed))
}

fn tell(client: &Client, armed: bool) -> Result<(), ClientError> {
    client.call::<RingDoorbells>(&RingDoorbellsRequest { armed: armed.into(), pad: 0 }, &[], 0).map(|_| ())
}

/// Takes what the pipe has. Whether it has ended.
fn is_over(calls: &mut PipeReader) -> bool {
    !matches!(calls.read(&mut [0; 64]), Ok(1..))
}
