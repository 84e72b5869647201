//! What the CPU is shown of VRAM.
//!
//! A VRAM buffer that the CPU maps is a HOST3D blob, and each blob is a map of the VMM, of which a process can have some hundreds
//! (Linux maps a blob only as a whole and AMD's thunk chooses every address itself, so buffers cannot share one as in guest-thunk's
//! arenas). Most buffers the CPU never looks at. So only some of them are mapped at a time: the others are ranges without
//! pages under userfaultfd. Who touches one waits until it is mapped, if need be in place of the one that was mapped first; the
//! memory itself is the GPU's and stays where it is.
//!
//! The kernel's own accesses (`read` into VRAM) wait as well where the process may have a full userfaultfd; elsewhere they
//! fail with EFAULT at a range that is not mapped at that moment, which none is before there are [`MOST`].
//!
//! Nothing tells of what the program unmaps. So what lies at a range is looked at before anything is mapped over it: a mapping of
//! a blob by its place in its file, one that waits by its registration.
#![allow(unsafe_code, reason = "mappings")]

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};

use guest_thunk::client::Client;
use guest_thunk::thunk::adopt::maps::{Area, FilePlace, areas};
use guest_thunk::thunk::lock::lock;
use guest_thunk::thunk::refusal::{Level, say};
use guest_thunk::thunk::userfault::{MOVES, Mode, Userfault};
use kfd_seam::{Bypass, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use virtio_kfd_protocol::GuestVa;

use crate::buffers::{Buffer, Memory, map_nothing};
use crate::failure::{refused, transport};
use crate::fresh::keep_from_children;

/// Buffers that are mapped at a time, which leaves maps of the VMM for other things and for other processes.
const MOST: usize = 128;

type Addresses = std::ops::Range<u64>;

/// A mapping that the program has.
struct Range {
    length: u64,
    /// `PROT_*`.
    protection: i32,
    buffer: Arc<Buffer>,
    /// Where in its file the blob is that is mapped there. Otherwise accesses wait.
    mapped: Option<FilePlace>,
}

/// What is left of a range's mapping: the program unmaps without a word.
#[derive(Debug, PartialEq, Eq)]
enum Left {
    All,
    Some,
    None,
}

#[derive(Default)]
struct Ranges {
    /// By first address.
    all: BTreeMap<u64, Range>,
    /// Those that are mapped, the first one first.
    mapped: VecDeque<u64>,
}

/// All mappings of VRAM.
#[derive(Default)]
pub struct Shown {
    ranges: Mutex<Ranges>,
    /// Where accesses wait; none where the kernel has no such thing for this process. Made when it is first needed.
    faults: OnceLock<Option<Arc<Userfault>>>,
}

impl Shown {
    /// Serves an `mmap` of a VRAM buffer at a range that was taken for it.
    pub fn map(
        self: &Arc<Self>,
        client: &Arc<Client>,
        buffer: &Arc<Buffer>,
        (at, length): (u64, u64),
        protection: i32,
    ) -> Result<()> {
        let mut ranges = lock(&self.ranges);
        ranges.forget(at, length);
        let mut range = Range { length, protection, buffer: Arc::clone(buffer), mapped: None };
        let enough = ranges.mapped.len() >= MOST;
        if !enough || self.faults(client).is_none() {
            match range.map(client, at) {
                Ok(()) => {}
                Err(error) if self.faults(client).is_none() => return Err(error),
                // The VMM has no more maps for this process: later, in place of another one.
                Err(_) => {}
            }
        }
        if range.mapped.is_some() {
            ranges.mapped.push_back(at);
        } else {
            let faults = self.faults(client).ok_or(Errno::ENOMEM)?;
            range.hide(faults, at)?;
        }
        ranges.all.insert(at, range);
        Ok(())
    }

    /// A buffer is freed: nothing of it is mapped any more, or taken away. What the program still has mapped stays as it is,
    /// or has zeros.
    pub fn forget(&self, buffer: &Arc<Buffer>) {
        let mut ranges = lock(&self.ranges);
        let gone = ranges.all.extract_if(.., |_, range| Arc::ptr_eq(&range.buffer, buffer));
        let gone: Vec<(u64, Range)> = gone.collect();
        for (at, range) in gone {
            ranges.mapped.retain(|other| *other != at);
            if let (None, Some(Some(faults))) = (range.mapped, self.faults.get()) {
                // The program may have unmapped it.
                let _ = faults.unregister(at, range.length);
                let _ = faults.wake(at, range.length);
            }
        }
    }

    /// Where accesses wait.
    fn faults(self: &Arc<Self>, client: &Arc<Client>) -> Option<&Arc<Userfault>> {
        self.faults.get_or_init(|| start(self, client)).as_ref()
    }

    /// Somebody waits at an address.
    fn serve(&self, client: &Client, faults: &Userfault, address: u64) {
        let mut ranges = lock(&self.ranges);
        let Some((at, length)) = ranges.around(address) else {
            // It was freed meanwhile, and there is no one who waits there in vain.
            let _ = faults.wake(address & !(crate::buffers::PAGE - 1), crate::buffers::PAGE);
            return;
        };
        ranges.bring(client, faults, at, address);
        if let Err(error) = faults.wake(at, length) {
            say(Level::Error, || format!("UFFDIO_WAKE at {at:#x}: {error}"));
        }
    }
}

impl Ranges {
    fn around(&self, address: u64) -> Option<(u64, u64)> {
        let (at, range) = self.all.range(..=address).next_back()?;
        (address.checked_sub(*at)? < range.length).then_some((*at, range.length))
    }

    /// Forgets ranges that others are mapped over.
    fn forget(&mut self, at: u64, length: u64) {
        let end = at.saturating_add(length);
        let over = |(start, range): (&u64, &Range)| start.saturating_add(range.length) > at;
        let gone: Vec<u64> = self.all.range(..end).filter(|entry| over(*entry)).map(|(at, _)| *at).collect();
        for at in gone {
            self.all.remove(&at);
            self.mapped.retain(|other| *other != at);
        }
    }

    /// Maps the range at an address, where somebody waits at another one in it.
    fn bring(&mut self, client: &Client, faults: &Userfault, at: u64, address: u64) {
        let Some(range) = self.all.get(&at).filter(|range| range.mapped.is_none()) else { return };
        let parts = match waiting(faults, range.addresses(at)) {
            Ok(parts) => parts,
            Err(error) => {
                say(Level::Error, || format!("what waits at {at:#x}: {error}; {address:#x} cannot be read"));
                let page = address & !(crate::buffers::PAGE - 1);
                let page = page..page.saturating_add(crate::buffers::PAGE);
                return range.give_up(std::slice::from_ref(&page));
            }
        };
        if self.mapped.len() >= MOST {
            self.take_away(faults);
        }
        loop {
            let Some(range) = self.all.get_mut(&at) else { return };
            match range.map_parts(client, at, &parts) {
                Ok(()) => return self.mapped.push_back(at),
                Err(_) if self.take_away(faults) => {}
                Err(_) => break,
            }
        }
        // Nothing is left that could make room: as a page that cannot be read.
        if let Some(range) = self.all.remove(&at) {
            range.give_up(&parts);
        }
    }

    /// Takes the range that was mapped first from the CPU. False if there is none.
    fn take_away(&mut self, faults: &Userfault) -> bool {
        for _ in 0..self.mapped.len() {
            let Some(at) = self.mapped.pop_front() else { return false };
            let Some(range) = self.all.get_mut(&at) else { continue };
            if range.buffer.is_exported() {
                self.mapped.push_back(at);
                continue;
            }
            let buffer = Arc::clone(&range.buffer);
            match range.hide(faults, at) {
                Ok(Left::All) => {}
                // By now something else of the program's may be there.
                Ok(Left::None) => drop(self.all.remove(&at)),
                // It stays as it is.
                Ok(Left::Some) => {
                    self.all.remove(&at);
                    continue;
                }
                Err(_) => {
                    self.mapped.push_back(at);
                    continue;
                }
            }
            if let Memory::Vram(part) = &buffer.memory {
                part.forget_blob();
            }
            return true;
        }
        false
    }
}

impl Range {
    /// Maps the blob.
    fn map(&mut self, client: &Client, at: u64) -> Result<()> {
        self.map_at(client, at)?;
        keep_from_children(at, self.length);
        let place = areas(&self.addresses(at)).ok().and_then(|areas| Some(areas.first()?.file_at(at)));
        self.mapped = Some(place.unwrap_or_default());
        Ok(())
    }

    /// Maps the blob over these parts of the range, which wait, in order.
    fn map_parts(&mut self, client: &Client, at: u64, parts: &[Addresses]) -> Result<()> {
        if parts == [self.addresses(at)] {
            return self.map(client, at);
        }
        // Linux maps a blob only as a whole.
        let aside = Waiting::new(usize::try_from(self.length).map_err(|_| Errno::ENOMEM)?)?;
        self.map_at(client, aside.start())?;
        keep_from_children(aside.start(), self.length);
        aside.scatter(at, parts)?;
        // It can only stay as it is.
        self.mapped = Some(FilePlace::default());
        Ok(())
    }

    fn map_at(&self, client: &Client, at: u64) -> Result<()> {
        let Memory::Vram(part) = &self.buffer.memory else { return Err(Errno::EINVAL) };
        let mapped = part
            .blob(client)
            .map_err(|refusal| refused(&refusal, Errno::ENOMEM))
            .and_then(|blob| blob.map_fixed(GuestVa(at), self.length, self.protection).map_err(transport));
        if mapped.is_err() {
            // With virtgpu one that could not be mapped never can.
            part.forget_blob();
        }
        mapped
    }

    /// Whoever accesses these parts fails.
    fn give_up(&self, parts: &[Addresses]) {
        for part in parts {
            let length = part.end.saturating_sub(part.start);
            if let Err(error) = map_nothing(part.start, length, self.protection) {
                say(Level::Error, || format!("mmap at {:#x}: {error}", part.start));
            }
        }
    }

    fn addresses(&self, at: u64) -> Addresses {
        at..at.saturating_add(self.length)
    }

    /// What is left of the mapping of the blob.
    fn left(&self, at: u64) -> Result<Left> {
        let range = self.addresses(at);
        match &self.mapped {
            // The range was taken for it just now.
            None => Ok(Left::All),
            Some(place) if place.inode == 0 => Err(Errno::EIO),
            Some(place) => Ok(left(&areas(&range).map_err(|error| errno(&error))?, place, &range)),
        }
    }

    /// Lets accesses wait, if all of what was mapped there is still there. It goes in one step: the new range is made
    /// elsewhere and moved, with its registration.
    fn hide(&mut self, faults: &Userfault, at: u64) -> Result<Left> {
        let (Ok(place), Ok(length)) = (usize::try_from(at), usize::try_from(self.length)) else {
            return Err(Errno::ENOMEM);
        };
        let waiting = Waiting::new(length)?;
        faults.register(waiting.start(), self.length, Mode::Missing).map_err(|error| errno(&error))?;
        waiting.permit(self.protection)?;
        // The kernel knows no move that depends on what is there, so the look comes last.
        let left = self.left(at)?;
        if left == Left::All {
            waiting.move_over(place)?;
            keep_from_children(at, self.length);
            self.mapped = None;
        }
        Ok(left)
    }
}

fn errno(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// The parts of a range where accesses wait, in order: the program may have unmapped others, and have memory of its own
/// there.
fn waiting(faults: &Userfault, all: Addresses) -> std::io::Result<Vec<Addresses>> {
    // Where there is no answer it is as if nothing had been unmapped.
    let Ok(nowhere) =
        usize::try_from(all.end.saturating_sub(all.start)).map_err(|_| Errno::ENOMEM).and_then(Waiting::new)
    else {
        return Ok(vec![all]);
    };
    let waits = |part: &Addresses| loop {
        match faults.is_registered(part.start, part.end.saturating_sub(part.start), nowhere.start()) {
            // A move that another thread is about to read of.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::thread::yield_now(),
            other => return other,
        }
    };
    if waits(&all).unwrap_or(true) {
        return Ok(vec![all]);
    }
    let mut parts: Vec<Addresses> = Vec::new();
    for area in areas(&all)? {
        let part = area.within(&all);
        if area.file.inode != 0 || !waits(&part).unwrap_or(false) {
            continue;
        }
        match parts.last_mut() {
            // mprotect has divided it.
            Some(last) if last.end == part.start => last.end = part.end,
            _ => parts.push(part),
        }
    }
    Ok(parts)
}

/// What is left in a range of the mapping of a file's bytes from `place` on.
fn left(areas: &[Area], place: &FilePlace, range: &Addresses) -> Left {
    let mut end = range.start;
    for area in areas {
        let part = area.within(range);
        if part.start != end || area.file_at(part.start) != place.after(part.start.wrapping_sub(range.start))
        {
            break;
        }
        end = part.end;
    }
    let is_of_file = |area: &Area| (&area.file.device, area.file.inode) == (&place.device, place.inode);
    match areas.iter().any(is_of_file) {
        _ if end == range.end => Left::All,
        true => Left::Some,
        false => Left::None,
    }
}

/// Private memory without any page at an address that the kernel chooses, also where the program has all of its memory locked
/// (mlockall(2)): memory that can be accessed gets its pages at once there, and nobody would wait.
struct Waiting {
    place: *mut libc::c_void,
    length: usize,
}

impl Waiting {
    /// It cannot be accessed, so that not even a locked one has pages.
    fn new(length: usize) -> Result<Waiting> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
        if place == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        let made = Waiting { place, length };
        // SAFETY: to unlock changes no memory.
        if unsafe { libc::munlock(place, length) } != 0 {
            return Err(Errno::last());
        }
        Ok(made)
    }

    fn start(&self) -> u64 {
        u64::try_from(self.place.expose_provenance()).unwrap_or(u64::MAX)
    }

    /// It can be accessed from now on (`PROT_*`). Who has registered it before waits at all of it, whatever is locked meanwhile.
    fn permit(&self, protection: i32) -> Result<()> {
        // SAFETY: the mapping was made here, and nobody else knows of it.
        if unsafe { libc::mprotect(self.place, self.length, protection) } != 0 {
            return Err(Errno::last());
        }
        Ok(())
    }

    /// Moves it over what is mapped at an address.
    fn move_over(self, place: usize) -> Result<()> {
        self.move_to(0..self.length, place)?;
        // Nothing is mapped at its own address any more.
        std::mem::forget(self);
        Ok(())
    }

    /// Moves what is mapped here by now to these parts of the addresses from `at` on, which are in order. The rest goes.
    fn scatter(self, at: u64, parts: &[Addresses]) -> Result<()> {
        // Others may have what was moved away from, so that each piece goes once.
        let own = std::mem::ManuallyDrop::new(self);
        let offset = |address: u64| usize::try_from(address.saturating_sub(at)).unwrap_or(own.length);
        let (mut next, mut result) = (0, Ok(()));
        for part in parts {
            let piece = offset(part.start)..offset(part.end);
            own.unmap(next..piece.start);
            next = piece.end;
            if result.is_ok() {
                let place = usize::try_from(part.start).map_err(|_| Errno::ENOMEM);
                result = place.and_then(|place| own.move_to(piece.clone(), place));
            }
            if result.is_err() {
                own.unmap(piece);
            }
        }
        own.unmap(next..own.length);
        result
    }

    /// Moves some of its bytes over what is mapped at an address.
    fn move_to(&self, bytes: std::ops::Range<usize>, place: usize) -> Result<()> {
        let from = self.place.wrapping_byte_add(bytes.start);
        let to = std::ptr::with_exposed_provenance_mut::<libc::c_void>(place);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: what is moved was made here; what it goes over is the program's mapping of the buffer, or the range that was taken
        // for it, and whoever uses it finds the same memory there again.
        let moved = unsafe { libc::mremap(from, bytes.len(), bytes.len(), flags, to) };
        if moved == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(()) }
    }

    fn unmap(&self, bytes: std::ops::Range<usize>) {
        if !bytes.is_empty() {
            // SAFETY: the bytes were mapped here, and nobody else knows of them.
            let _ = unsafe { libc::munmap(self.place.wrapping_byte_add(bytes.start), bytes.len()) };
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.unmap(0..self.length);
    }
}

/// Makes the userfaultfd, and the threads that serve it.
fn start(shown: &Arc<Shown>, client: &Arc<Client>) -> Option<Arc<Userfault>> {
    let made = Userfault::full(MOVES).or_else(|_| Userfault::of_user_mode(MOVES));
    let faults = match made {
        Ok(faults) => Arc::new(faults),
        Err(error) => {
            say(Level::Error, || {
                format!("userfaultfd: {error}; a VMM's maps limit how many VRAM buffers there are")
            });
            return None;
        }
    };
    let (sender, addresses) = channel();
    let mut threads = Vec::new();
    // No signal of the program is to run in them.
    let before = SigSet::all().thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK).ok()?;
    let source = Arc::clone(&faults);
    threads.push(spawn("kfd-vram-faults", move || read(&source, &sender)));
    let (own, client, target) = (Arc::clone(shown), Arc::clone(client), Arc::clone(&faults));
    threads.push(spawn("kfd-vram-maps", move || serve(&own, &client, &target, &addresses)));
    let _ = before.thread_set_mask();
    threads.into_iter().all(|started| started).then_some(faults)
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> bool {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    if let Err(error) = &started {
        say(Level::Error, || format!("thread {name}: {error}"));
    }
    started.is_ok()
}

/// Reads what the userfaultfd says. A move waits until it has been read, so the thread that moves ranges does not read.
fn read(faults: &Userfault, sender: &Sender<u64>) {
    let _bypass = Bypass::enter();
    loop {
        let mut fds = [PollFd::new(faults.as_fd(), PollFlags::POLLIN)];
        if let Err(errno) = poll(&mut fds, PollTimeout::NONE)
            && errno != Errno::EINTR
        {
            return say(Level::Error, || format!("poll of a userfaultfd: {errno}"));
        }
        for address in faults.addresses() {
            if sender.send(address).is_err() {
                return;
            }
        }
    }
}

fn serve(shown: &Shown, client: &Client, faults: &Userfault, addresses: &Receiver<u64>) {
    let _bypass = Bypass::enter();
    while let Ok(address) = addresses.recv() {
        shown.serve(client, faults, address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = crate::buffers::PAGE;

    fn area(pages: std::ops::Range<u64>, inode: u64, page: u64) -> Area {
        let (start, end) = (pages.start * PAGE, pages.end * PAGE);
        let file = FilePlace { device: "00:06".to_owned(), inode, offset: page * PAGE };
        Area {
            start,
            end,
            permissions: "rw-s".to_owned(),
            file,
            name: String::new(),
            flags: Vec::new(),
            key: 0,
        }
    }

    #[test]
    fn what_the_program_unmapped_is_seen() {
        let (place, range) = (area(0..1, 7, 50).file, 10 * PAGE..14 * PAGE);
        let of = |areas: &[Area]| left(areas, &place, &range);
        assert_eq!(of(&[area(10..14, 7, 50)]), Left::All);
        // Of one that has grown together with its neighbours, and one that mprotect has divided.
        assert_eq!(of(&[area(8..20, 7, 48)]), Left::All);
        assert_eq!(of(&[area(10..11, 7, 50), area(11..14, 7, 51)]), Left::All);
        assert_eq!(of(&[]), Left::None);
        assert_eq!(of(&[area(10..14, 0, 0)]), Left::None, "the program's own memory");
        assert_eq!(of(&[area(10..14, 8, 50)]), Left::None, "another file");
        assert_eq!(of(&[area(10..14, 7, 90)]), Left::Some, "another buffer");
        assert_eq!(of(&[area(10..12, 7, 50)]), Left::Some);
        assert_eq!(of(&[area(11..14, 7, 51)]), Left::Some);
        assert_eq!(of(&[area(10..11, 7, 50), area(11..12, 0, 0), area(12..14, 7, 52)]), Left::Some);
    }

    #[test]
    fn parts_that_do_not_wait_any_more_are_seen() {
        const LENGTH: usize = 6 * PAGE as usize;
        // Nobody reads of moves, so that it does not tell of them; registrations do not move then.
        let faults = match Userfault::of_user_mode(0) {
            Ok(faults) => faults,
            Err(error) => return println!("SKIP: userfaultfd: {error}"),
        };
        let made = Waiting::new(LENGTH).unwrap();
        let at = made.start();
        let parts = || {
            let parts = waiting(&faults, at..at + 6 * PAGE).unwrap();
            parts.iter().map(|part| ((part.start - at) / PAGE, (part.end - at) / PAGE)).collect::<Vec<_>>()
        };
        assert_eq!(parts(), []);
        faults.register(at, 6 * PAGE, Mode::Missing).unwrap();
        made.permit(libc::PROT_READ | libc::PROT_WRITE).unwrap();
        assert_eq!(parts(), [(0, 6)]);
        let page = |number: usize| made.place.wrapping_byte_add(number * PAGE as usize);
        // SAFETY: the page is this test's own.
        assert_eq!(unsafe { libc::mprotect(page(4), PAGE as usize, libc::PROT_READ) }, 0);
        assert_eq!(parts(), [(0, 6)]);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the page is this test's own.
        let own = unsafe { libc::mmap(page(1), PAGE as usize, libc::PROT_READ, flags, -1, 0) };
        assert_eq!(own, page(1));
        assert_eq!(parts(), [(0, 1), (2, 6)]);
        // SAFETY: the page is this test's own.
        assert_eq!(unsafe { libc::munmap(page(5), PAGE as usize) }, 0);
        assert_eq!(parts(), [(0, 1), (2, 5)]);
        let place = Waiting::new(LENGTH).unwrap();
        let to = place.start();
        made.scatter(to, &[to + PAGE..to + 2 * PAGE, to + 2 * PAGE..to + 4 * PAGE]).unwrap();
        let found = areas(&(to..to + 6 * PAGE)).unwrap();
        let found = found.iter().map(|area| (area.within(&(to..to + 6 * PAGE)), &area.permissions[..]));
        let found: Vec<_> =
            found.map(|(part, access)| ((part.start - to) / PAGE..(part.end - to) / PAGE, access)).collect();
        assert_eq!(found, [(0..1, "---p"), (1..2, "r--p"), (2..4, "rw-p"), (4..6, "---p")]);
        assert_eq!(areas(&(at..at + 6 * PAGE)).unwrap(), []);
    }

    #[test]
    fn memory_that_is_to_wait_has_no_pages_where_all_is_locked() {
        const LENGTH: usize = 16 * PAGE as usize;
        let resident = |made: *mut libc::c_void| {
            let mut pages = [0u8; 16];
            // SAFETY: a byte for each page of the mapping.
            assert_eq!(unsafe { libc::mincore(made, LENGTH, pages.as_mut_ptr()) }, 0);
            pages.iter().filter(|page| **page & 1 != 0).count()
        };
        // SAFETY: no memory is changed.
        if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
            println!("SKIP: mlockall: {}", Errno::last());
            return;
        }
        let made = Waiting::new(LENGTH).unwrap();
        made.permit(libc::PROT_READ | libc::PROT_WRITE).unwrap();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let plain = unsafe { libc::mmap(std::ptr::null_mut(), LENGTH, libc::PROT_READ, flags, -1, 0) };
        // SAFETY: no memory is changed.
        assert_eq!(unsafe { libc::munlockall() }, 0);
        assert_ne!(plain, libc::MAP_FAILED);
        assert_eq!(resident(plain), 16, "mlockall(2): future mappings have all pages");
        assert_eq!(resident(made.place), 0);
        // SAFETY: the mapping is this test's own, and can be written.
        unsafe { made.place.cast::<u8>().write_volatile(1) };
        drop(made);
        // SAFETY: the mapping is this test's own.
        assert_eq!(unsafe { libc::munmap(plain, LENGTH) }, 0);
    }
}
