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
//!
//! Whose doorbells they are, and whether the program may unmap or move them, is said by [`Watched`] and [`Slice`].
#![allow(unsafe_code, reason = "mremap, and what makes pages empty")]

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow};
use virtio_kfd_protocol::calls::{RingDoorbells, WaitDoorbells};
use virtio_kfd_protocol::{RingDoorbellsRequest, Status, WaitDoorbellsRequest};

use super::allowance::{Allowance, spent};
use crate::client::{Client, ClientError};
use crate::thunk::Thunk;
use crate::thunk::memory::address::{Reservation, keep_from_children, page_size};
use crate::thunk::memory::block::Block;
use crate::thunk::moves::Alone;
use crate::thunk::refusal::{Level, say};
use crate::thunk::smi::Connected;
use crate::thunk::userfault::{Event, MOVES, Mode, Userfault};
use crate::thunk::wake::Wake;

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

/// Doorbells of a GPU where the program has them mapped.
pub trait Slice: Send + Sync {
    /// First address.
    fn start(&self) -> u64;

    /// Bytes, whole pages.
    fn size(&self) -> u64;

    /// Maps all of it once more, over what is mapped at an address that the caller has reserved for that.
    fn map_again(&self, address: u64) -> io::Result<()>;

    /// Whether the program may unmap it without a word.
    fn may_go(&self) -> bool {
        false
    }

    /// Whether all of it is where it was. Asked as seldom as can be: it may take long.
    fn is_there(&self) -> bool {
        true
    }
}

/// What has doorbells.
pub trait Watched: Connected {
    /// Calls with all places where doorbells can be rung; there are no others meanwhile. None where that cannot be told.
    fn with_slices<R>(&self, act: impl FnOnce(Vec<Arc<dyn Slice>>) -> R) -> Option<R>;
}

impl Slice for Block {
    fn start(&self) -> u64 {
        Block::start(self)
    }

    fn size(&self) -> u64 {
        Block::size(self)
    }

    fn map_again(&self, address: u64) -> io::Result<()> {
        Block::map_again(self, address)
    }
}

impl Watched for Thunk {
    fn with_slices<R>(&self, act: impl FnOnce(Vec<Arc<dyn Slice>>) -> R) -> Option<R> {
        let slices = self.queues.doorbells.lock();
        let all = slices.values().map(|block| Arc::clone(block) as Arc<dyn Slice>).collect();
        Some(act(all))
    }
}

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
    // SAFETY: the old range is the reservation's alone, and nothing refers to it. The new one is that of the doorbells: their
    // owner keeps its addresses reserved, or it was just seen that they are there; the program sees the same memory there, or
    // waits.
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
    fn new(slice: &dyn Slice) -> io::Result<Spare> {
        let reservation = Reservation::new(slice.size(), page_size(), 0, ANYWHERE)?;
        slice.map_again(reservation.start())?;
        reservation.keep_from_children();
        Ok(Spare(reservation))
    }
}

/// A thread that moves empty pages over doorbells: the kernel holds it until what it says of the move has been read. There is one
/// for the watcher's whole life, since each thread that begins may have the C library reserve addresses for it.
struct Mover {
    orders: Option<Sender<Order>>,
    done: Receiver<io::Result<bool>>,
    thread: Option<JoinHandle<()>>,
}

/// Empty pages, and what they are to be moved over.
struct Order {
    empty: Reservation,
    slice: Arc<dyn Slice>,
}

impl Order {
    /// False if the program has unmapped the doorbells.
    fn carry_out(self) -> io::Result<bool> {
        // The kernel knows no move that depends on what is there, so the look comes last.
        if !self.slice.is_there() {
            return Ok(false);
        }
        let to = self.slice.start();
        move_over(self.empty, to).map(|()| true).map_err(|(_, error)| error)
    }
}

impl Mover {
    fn start() -> io::Result<Mover> {
        let (orders, received) = channel::<Order>();
        let (sender, done) = channel();
        let builder = thread::Builder::new().name("doorbell-moves".into()).stack_size(STACK_BYTES);
        let thread = builder.spawn(move || {
            while let Ok(order) = received.recv()
                && sender.send(order.carry_out()).is_ok()
            {}
        })?;
        Ok(Mover { orders: Some(orders), done, thread: Some(thread) })
    }

    /// Moves, while `meanwhile` is called again and again to read what the kernel says.
    fn carry_out(&self, order: Order, mut meanwhile: impl FnMut()) -> io::Result<bool> {
        let ended = || io::Error::other("the thread that moves pages has ended");
        self.orders.as_ref().and_then(|orders| orders.send(order).ok()).ok_or_else(ended)?;
        loop {
            match self.done.try_recv() {
                Ok(moved) => return moved,
                Err(TryRecvError::Empty) => meanwhile(),
                Err(TryRecvError::Disconnected) => return Err(ended()),
            }
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Addresses of doorbells that trap.
struct Place {
    /// A program may move them.
    at: Cell<u64>,
    size: u64,
}

impl Place {
    /// The program has moved pages.
    fn follow(&self, from: u64, to: u64, length: u64) {
        if length == self.size && self.at.get() == from {
            self.at.set(to);
        }
    }
}

/// What lets stores trap, and where, by what it has said.
struct Traps {
    faults: Userfault,
    places: RefCell<Vec<Rc<Place>>>,
    /// How many moves it has told of.
    moves: Cell<u64>,
}

impl Traps {
    fn new(faults: Userfault) -> Rc<Traps> {
        Rc::new(Traps { faults, places: RefCell::default(), moves: Cell::new(0) })
    }

    /// Moves are followed from now on.
    fn add(&self, at: u64, size: u64) -> Rc<Place> {
        let place = Rc::new(Place { at: Cell::new(at), size });
        self.places.borrow_mut().push(Rc::clone(&place));
        place
    }

    /// Takes what the userfaultfd says. Whether somebody waits.
    fn hear(&self) -> bool {
        let mut waits = false;
        for event in self.faults.events() {
            match event {
                Event::Fault => waits = true,
                Event::Moved { from, to, length } => {
                    self.moves.update(|moves| moves.wrapping_add(1));
                    self.places.borrow().iter().for_each(|place| place.follow(from, to, length));
                }
                Event::Other => {}
            }
        }
        waits
    }
}

/// Doorbells that trap. They are what they were when this is dropped.
struct Armed {
    traps: Rc<Traps>,
    place: Rc<Place>,
    slice: Arc<dyn Slice>,
    spare: Option<Spare>,
    /// Another one, in whose place a process can map that has as many mappings as it may have, and so can move none.
    room: Option<Spare>,
    given_back: bool,
    /// As many addresses that cannot be read, to ask what is there; none where nothing else can be.
    nowhere: Option<Reservation>,
}

impl Armed {
    /// From here on every access to the doorbells waits for the drop. Also whether somebody waits already. None where the program
    /// has unmapped them.
    fn new(traps: &Rc<Traps>, mover: &Mover, slice: &Arc<dyn Slice>) -> io::Result<Option<(Armed, bool)>> {
        let (to, size) = (slice.start(), slice.size());
        let [spare, room] = [Spare::new(&**slice)?, Spare::new(&**slice)?].map(Some);
        let nowhere = match slice.may_go() {
            false => None,
            true => Some(Reservation::new(size, page_size(), 0, ANYWHERE)?),
        };
        let empty = Reservation::new(size, page_size(), 0, ANYWHERE)?;
        empty.fill_with_private_memory()?;
        // A child has no watcher, and must not ring.
        empty.keep_from_children();
        traps.faults.register(empty.start(), empty.size(), Mode::Missing)?;
        make_empty(&empty)?;
        let mut armed = Armed {
            traps: Rc::clone(traps),
            place: traps.add(to, size),
            slice: Arc::clone(slice),
            spare,
            room,
            // As long as nothing has been moved there.
            given_back: true,
            nowhere,
        };
        let mut rung = false;
        let _alone = Alone::wait();
        // A fault may be told of before the move.
        armed.given_back = !mover.carry_out(Order { empty, slice: Arc::clone(slice) }, || {
            let _ = readable([traps.faults.as_fd()], Some(MOVE));
            rung |= traps.hear();
        })?;
        Ok((!armed.given_back).then_some((armed, rung)))
    }

    /// Whether accesses wait where the doorbells are: the program may have something else there by now. None while a move
    /// has not been heard of.
    fn waits(&self, at: u64) -> Option<bool> {
        let Some(nowhere) = &self.nowhere else { return Some(true) };
        // Page by page: mprotect divides mappings.
        for page in (at..at.saturating_add(self.place.size)).step_by(page_size() as usize) {
            match self.traps.faults.is_registered(page, page_size(), nowhere.start()) {
                Ok(true) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Ok(false) | Err(_) => return Some(false),
            }
        }
        Some(true)
    }

    /// Has the doorbells be what they were. False if they are not where they should be: the program has unmapped them, or is moving
    /// them right now.
    fn give_back(&mut self) -> bool {
        let mut put = None;
        while !self.given_back {
            let at = self.place.at.get();
            match self.waits(at) {
                Some(true) => match self.put(at) {
                    Ok(()) => {
                        // Who waits came to do so before, so all of them are woken.
                        let _ = self.traps.faults.wake(at, self.place.size);
                        // If they can be moved, they may have been just before.
                        put = Some(at);
                        self.given_back = self.nowhere.is_none();
                    }
                    // Short of kernel memory: the program waits with its store until there is some.
                    Err(_) => thread::sleep(AGAIN),
                },
                Some(false) if put == Some(at) => self.given_back = true,
                Some(false) => break,
                // Whoever moves stands still until that is heard, which nobody does but this thread.
                None => {
                    let _ = readable([self.traps.faults.as_fd()], Some(MOVE));
                    self.traps.hear();
                }
            }
        }
        let _ = self.traps.faults.wake(self.place.at.get(), self.place.size);
        self.given_back
    }

    /// Puts the doorbells in place of the pages that trap there. After an error those are as before.
    fn put(&mut self, at: u64) -> io::Result<()> {
        if let Some(Spare(reservation)) = self.spare.take() {
            match move_over(reservation, at) {
                Ok(()) => return Ok(()),
                Err((reservation, _)) => self.spare = Some(Spare(reservation)),
            }
        }
        // mremap refuses a process that has all but three of the mappings that it may have. One over the same range is none more,
        // but must not find it with one too many, which mmap lets it have.
        self.room = None;
        self.slice.map_again(at)?;
        keep_from_children(at, self.place.size);
        Ok(())
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        if !self.given_back {
            self.give_back();
        }
        self.traps.places.borrow_mut().retain(|place| !Rc::ptr_eq(place, &self.place));
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
        Ok(_) | Err(Errno::EINTR) => Ok(polled.map(|polled| polled.any().unwrap_or(true))),
        Err(error) => Err(error.into()),
    }
}

/// The watcher of a connection's doorbells.
pub struct Watcher {
    thread: JoinHandle<()>,
    calls: Arc<Calls>,
}

impl Watcher {
    /// Starts it. An error where this process may not have it.
    pub fn start<W: Watched>(watched: &Arc<W>) -> io::Result<Watcher> {
        let faults = faults()?;
        let calls = Arc::new(Calls::new()?);
        let (weak, own) = (Arc::downgrade(watched), Arc::clone(&calls));
        let builder = thread::Builder::new().name("doorbells".into()).stack_size(STACK_BYTES);
        // The program's signals are handled by its own threads. The new one inherits this.
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let thread = builder.spawn(move || {
            // Without the trap the host goes on looking.
            if let Err(why) = watch(&weak, &Traps::new(faults), &own) {
                say(Level::Info, || format!("doorbells do not trap any more: {why}"));
            }
        });
        before.thread_set_mask()?;
        Ok(Watcher { thread: thread?, calls })
    }

    /// The doorbells are others now.
    pub fn begin_anew(&self) {
        self.calls.wake.call();
    }

    /// Ends it. No doorbell traps any more.
    pub fn end(self) {
        self.calls.over.store(true, Ordering::Release);
        self.calls.wake.call();
        let _ = self.thread.join();
    }
}

/// What the watcher does, until the connection is closed or lost.
fn watch<W: Watched>(watched: &Weak<W>, traps: &Rc<Traps>, calls: &Calls) -> Result<(), Box<dyn Error>> {
    let mover = Mover::start()?;
    // Doorbells that were not where they should have been, until what the program does with them has been told.
    let mut lost: Vec<Armed> = Vec::new();
    let (mut allowance, mut pause) = (Allowance::new(Instant::now()), LOOK);
    loop {
        let [called, said] = readable([calls.wake.as_fd(), traps.faults.as_fd()], Some(pause))?;
        if called && calls.are_over() {
            return Ok(());
        }
        if said {
            // Whoever moves such memory stands still until this has been heard.
            traps.hear();
            give_back(traps, &mut lost);
            continue;
        }
        lost.clear();
        let before = spent();
        let armed = match watched.upgrade() {
            Some(watched) => arm(&*watched, traps, &mover),
            None => return Ok(()),
        };
        pause = LOOK.max(allowance.take(spent().saturating_sub(before), Instant::now()));
        match &armed {
            Ok(None) => continue,
            Ok(Some(_)) => await_ring(traps, calls),
            Err(_) => {}
        }
        let armed = armed.map(|armed| lost.extend(armed.into_iter().flatten()));
        give_back(traps, &mut lost);
        // Whatever the host has understood, it looks from now on.
        loop {
            let Some(watched) = watched.upgrade() else { return Ok(()) };
            match tell(watched.client(), false) {
                Err(error) if watched.client().is_lost() => return Err(error.into()),
                Err(_) => thread::sleep(AGAIN),
                Ok(()) => break,
            }
        }
        armed?;
    }
}

/// Has doorbells be what they were. Those that are not where they should be are left.
fn give_back(traps: &Traps, armed: &mut Vec<Armed>) {
    loop {
        let before = traps.moves.get();
        armed.retain_mut(|armed| !armed.give_back());
        // Moves that were heard of meanwhile may be those of others.
        if armed.is_empty() || traps.moves.get() == before {
            return;
        }
    }
}

/// Waits until the program rings or the watcher is called.
fn await_ring(traps: &Traps, calls: &Calls) {
    // Without a poll the doorbells must not trap.
    while let Ok([said, called]) = readable([traps.faults.as_fd(), calls.wake.as_fd()], None) {
        let waits = said && traps.hear();
        if called || waits {
            return;
        }
    }
}

/// Makes the doorbells trap if they are still, and has the host sleep. None where something rings.
fn arm<W: Watched>(
    watched: &W,
    traps: &Rc<Traps>,
    mover: &Mover,
) -> Result<Option<Vec<Armed>>, Box<dyn Error>> {
    let request = WaitDoorbellsRequest { timeout_ms: 0, pad: 0 };
    let client = watched.client();
    match client.wait_call::<WaitDoorbells>(&request, &[], 0) {
        Ok((answer, _)) if answer.still == 0 => return Ok(None),
        Ok(_) => {}
        // The host has no room for the question: later.
        Err(error) if matches!(error.status(), Some((Status::LIMIT, _))) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    // Within, until the host knows: it must not sleep while there are doorbells that do not trap. New ones wake it.
    let armed = watched.with_slices(|slices| {
        let (mut armed, mut rung) = (Vec::with_capacity(slices.len()), false);
        for slice in &slices {
            match Armed::new(traps, mover, slice)? {
                Some((one, waits)) => {
                    armed.push(one);
                    rung |= waits;
                }
                // Others than there were a moment ago.
                None => rung = true,
            }
        }
        if rung {
            return Ok(None);
        }
        tell(client, true)?;
        Ok(Some(armed))
    });
    armed.unwrap_or(Ok(None))
}

fn tell(client: &Client, armed: bool) -> Result<(), ClientError> {
    client.call::<RingDoorbells>(&RingDoorbellsRequest { armed: armed.into(), pad: 0 }, &[], 0).map(|_| ())
}

/// What the watcher is called by. It outlives whoever ends first.
struct Calls {
    wake: Wake,
    /// There are no more calls.
    over: AtomicBool,
}

impl Calls {
    fn new() -> io::Result<Calls> {
        Ok(Calls { wake: Wake::new()?, over: AtomicBool::new(false) })
    }

    /// Takes all calls. Whether there are no more.
    fn are_over(&self) -> bool {
        self.wake.take().is_err() || self.over.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests;
