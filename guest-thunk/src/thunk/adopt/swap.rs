//! The exchange of a range's pages for a blob's, and back.
#![allow(unsafe_code, reason = "mappings are moved over memory of the application")]

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::OnceLock;

use hsakmt_abi::status::HsakmtStatus;
use virtio_kfd_protocol::GuestVa;

use super::maps::{self, Character, FilePlace, Later};
use super::pages::{self, Bounce, READ_WRITE, Reader};
use super::stop::Stopped;
use super::tracer::CannotStop;
use super::{Segment, fault, plan, rseq, system, variables};
use crate::client::Client;
use crate::thunk::memory::address::{Reservation, page_size};
use crate::thunk::refusal::{Level, Outcome, Refusal, say};
use crate::thunk::settings::HOLD;
use crate::transport::Blob;

/// How writers are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Fault,
    Stop,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Method::Fault => "userfaultfd",
            Method::Stop => "ptrace",
        }
    }
}

/// Chosen at the first use, while nothing is held.
fn method() -> Method {
    static METHOD: OnceLock<Method> = OnceLock::new();
    *METHOD.get_or_init(|| {
        let method = match std::env::var(HOLD).as_deref() {
            Ok("ptrace") => Method::Stop,
            _ if fault::is_available() => Method::Fault,
            _ => Method::Stop,
        };
        say(Level::Info, || format!("memory is adopted with writers held by {}", method.name()));
        method
    })
}

/// As long as it lives nobody else writes to the range; see what its parts say about allocation and locks.
enum Hold {
    Fault { _protected: fault::Protected },
    Stop { _stopped: Stopped },
}

impl Hold {
    fn new(range: &Range<u64>, parts: usize) -> Outcome<Hold> {
        // With several parts a failure between them has to be undone, which takes that nobody goes on meanwhile.
        if method() == Method::Fault && parts == 1 {
            // Where it does not do for this range, the other way may.
            if let Ok(protected) = fault::Protected::new(range) {
                return Ok(Hold::Fault { _protected: protected });
            }
        }
        let stopped = Stopped::new(range);
        Ok(Hold::Stop { _stopped: stopped.map_err(cannot_stop)? })
    }
}

/// Whether the calling thread itself needs a range: its stack, or what the C library keeps for it.
pub fn is_in_use_here(range: &Range<u64>) -> bool {
    let local = 0u8;
    let here = std::ptr::from_ref(&local).addr() as u64;
    let stack = stack().unwrap_or_else(|| here.saturating_sub(64 << 10)..here.saturating_add(64 << 10));
    // SAFETY: no argument; the place is the thread's own.
    let errno = unsafe { libc::__errno_location() }.addr() as u64;
    rseq::touch(&stack, range) || range.contains(&errno) || rseq::touch(&rseq::of_this_thread(), range)
}

/// The calling thread's stack.
fn stack() -> Option<Range<u64>> {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: no argument.
    let this = unsafe { libc::pthread_self() };
    // SAFETY: the C library fills the attributes of the calling thread.
    if unsafe { libc::pthread_getattr_np(this, attributes.as_mut_ptr()) } != 0 {
        return None;
    }
    let (mut lowest, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: the attributes were filled, and the results live beyond the call.
    let result = unsafe { libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut lowest, &raw mut size) };
    // SAFETY: they were filled, and are not used again.
    let _ = unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
    let lowest = lowest.addr() as u64;
    (result == 0).then(|| lowest..lowest.saturating_add(size as u64))
}

/// A blob, mapped and populated beside the range that it is going to replace.
pub struct Prepared {
    /// The blob.
    pub blob: Box<dyn Blob>,
    /// Where it is mapped.
    pub staging: Reservation,
    /// What of it lies where, relative to the start.
    pub parts: Vec<(Range<u64>, FilePlace)>,
}

/// Adopts a range that was vetted as ordinary memory.
pub fn adopt(client: &Client, range: Range<u64>, character: Character) -> Outcome<Segment> {
    let Prepared { blob, staging, parts } = prepare(client, &range)?;
    let reader = Reader::new().map_err(|error| system("/proc/self/pagemap", &error))?;
    let later = Later::open().map_err(|error| system("/proc/self/maps", &error))?;
    let hold = Hold::new(&range, parts.len())?;
    // From here to the drop of the hold: no allocation, no lock.
    let swapped = swap(&reader, &later, &range, staging.start(), &parts);
    drop(hold);
    swapped.map_err(|error| system("the exchange of pages", &error))?;
    // All of it has been moved away: what is mapped there next is somebody else's.
    std::mem::forget(staging);
    let resource = blob.resource();
    let blob = Some(blob.close_handle());
    Ok(Segment { range, resource, blob, parts, character, kept: None, uses: 0 })
}

/// The runtime then does without.
pub fn cannot_stop(why: CannotStop) -> Refusal {
    Refusal::new(HsakmtStatus::NOT_SUPPORTED, why.to_string())
}

/// Makes a blob for a range, and maps it.
pub fn prepare(client: &Client, range: &Range<u64>) -> Outcome<Prepared> {
    let size = range.end.saturating_sub(range.start);
    let blob = client.guest_memory(size)?;
    let staging = Reservation::new(size, page_size(), 0, (0, u64::MAX));
    let staging = staging.map_err(|error| system("addresses for staging", &error))?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    blob.map_fixed(GuestVa(staging.start()), size, protection)
        .map_err(|error| Refusal::error(error.to_string()))?;
    let place = staging.start()..staging.start().saturating_add(size);
    let areas = maps::areas(&place).map_err(|error| system("/proc/self/maps", &error))?;
    let parts = areas.iter().map(|area| {
        let piece = area.within(&place);
        let start = piece.start.saturating_sub(place.start);
        (start..piece.end.saturating_sub(place.start), area.file_at(piece.start))
    });
    Ok(Prepared { blob, parts: parts.collect(), staging })
}

/// Copies and moves; after an error the range is as it was.
fn swap(
    reader: &Reader,
    later: &Later,
    range: &Range<u64>,
    staging: u64,
    parts: &[(Range<u64>, FilePlace)],
) -> std::io::Result<()> {
    reader.copy(range, staging)?;
    // Another thread may have mapped something else there since the range was vetted.
    if !later.fits(&[(range.clone(), ())], |(), _, line, _| line.is_plain())? {
        return Err(changed());
    }
    for (done, (part, _)) in parts.iter().enumerate() {
        let from = shifted(part, staging);
        let to = shifted(part, range.start);
        // SAFETY: the staging mapping is ours, and nobody has its address. The range is the application's, who asked
        // for it to be replaced; it has the same content, and who could change that is held.
        if let Err(error) = unsafe { pages::move_over(&from, to.start) } {
            restore(&to, &from);
            undo(range, staging, parts.get(..done).unwrap_or_default());
            return Err(error);
        }
    }
    Ok(())
}

/// The mappings have changed. An error that is made without allocation.
pub fn changed() -> std::io::Error {
    std::io::Error::from_raw_os_error(libc::EAGAIN)
}

/// So much further up.
pub fn shifted(part: &Range<u64>, by: u64) -> Range<u64> {
    part.start.saturating_add(by)..part.end.saturating_add(by)
}

/// A move that failed may have left a hole: it is filled again.
fn restore(hole: &Range<u64>, content: &Range<u64>) {
    if !pages::is_mapped(hole)
        && pages::map_fresh(Some(hole.start), hole.end.saturating_sub(hole.start), true).is_ok()
    {
        // SAFETY: both are mapped now, the staging mapping and the fresh one.
        unsafe { pages::copy_mapped(content, hole.start) };
    }
}

/// Moves parts back to the staging addresses, and puts private memory in their place. Everything is stopped.
fn undo(range: &Range<u64>, staging: u64, parts: &[(Range<u64>, FilePlace)]) {
    for (part, _) in parts {
        let (from, to) = (shifted(part, range.start), shifted(part, staging));
        // SAFETY: the part is the blob's mapping, moved there by this call, and its old place is free.
        if unsafe { pages::move_over(&from, to.start) }.is_ok() {
            restore(&from, &to);
        }
    }
}

/// Puts fresh private memory with the same content in place of what is left of a segment. After an error it is as it was.
pub fn give_back(segment: &mut Segment) -> Result<(), String> {
    let areas = maps::areas(&segment.range).map_err(|error| format!("/proc/self/maps: {error}"))?;
    let intact: Vec<_> = segment.intact_areas(&areas, &segment.range).collect();
    let whole = segment.range.end.saturating_sub(segment.range.start);
    let left: u64 = intact.iter().map(|(piece, _)| piece.end.saturating_sub(piece.start)).sum();
    match &segment.kept {
        Some(kept) => variables::put_back(segment, kept, &intact)?,
        None if intact.is_empty() => {}
        None => replace(segment, &intact)?,
    }
    let Some(blob) = segment.blob.take() else { return Ok(()) };
    if left != whole && is_mapped_elsewhere(segment) {
        // The application has moved it. With a guest's kernel the mapping keeps the memory; in loop-back nothing else
        // does, so it is not given back.
        std::mem::forget(blob);
    }
    Ok(())
}

fn is_mapped_elsewhere(segment: &Segment) -> bool {
    let Ok(areas) = maps::areas(&(0..u64::MAX)) else { return true };
    segment.parts.iter().any(|(part, place)| {
        let (first, end) = (place.offset, place.after(part.end.saturating_sub(part.start)).offset);
        areas.iter().any(|area| {
            let file = &area.file;
            let until = file.after(area.end.saturating_sub(area.start)).offset;
            file.inode == place.inode && file.device == place.device && file.offset < end && first < until
        })
    })
}

/// What makes fresh memory like the memory that was there before.
pub struct Dress {
    /// It is mapped without a reservation of swap space.
    pub no_reserve: bool,
    advice: [(bool, i32); 4],
    name: Option<CString>,
}

impl Dress {
    /// Looks it up.
    pub fn of(character: &Character) -> Dress {
        let has = |flag: &str| character.flags.iter().any(|it| it == flag);
        let name = character.name.as_deref().and_then(|name| name.strip_prefix("[anon:")?.strip_suffix(']'));
        Dress {
            no_reserve: has("nr"),
            advice: [
                (has("hg"), libc::MADV_HUGEPAGE),
                (has("nh"), libc::MADV_NOHUGEPAGE),
                (has("mg"), libc::MADV_MERGEABLE),
                (has("dd"), libc::MADV_DONTDUMP),
            ],
            name: name.and_then(|name| CString::new(name).ok()),
        }
    }

    /// Gives it to fresh memory. Only system calls.
    pub fn put_on(&self, range: &Range<u64>) {
        for (_, advice) in self.advice.iter().filter(|(wanted, _)| *wanted) {
            // A kernel that does not know an advice changes nothing.
            let _ = pages::advise(range, *advice);
        }
        if let Some(name) = &self.name {
            pages::name(range, name);
        }
    }
}

/// Each piece with what the application may do with it.
fn replace(segment: &Segment, intact: &[(Range<u64>, i32)]) -> Result<(), String> {
    let Segment { range, character, .. } = segment;
    let aside = Reservation::new(range.end.saturating_sub(range.start), page_size(), 0, (0, u64::MAX));
    let aside = aside.map_err(|error| format!("addresses: {error}"))?;
    let dress = Dress::of(character);
    let expected = intact
        .iter()
        .filter_map(|(piece, access)| Some((piece.clone(), (segment.place_of(piece)?, *access))));
    let expected: Vec<_> = expected.collect();
    let later = Later::open().map_err(|error| format!("/proc/self/maps: {error}"))?;
    let bounce = Bounce::new().map_err(|error| format!("a buffer: {error}"))?;
    // No allocation, no lock: everything is stopped.
    let stopped = Stopped::new(&(0..0)).map_err(|why| why.to_string())?;
    // From here to the drop of `stopped`: no allocation, no lock.
    let outcome = match is_as_expected(&later, &expected) {
        Ok(()) => exchange_back(&bounce, intact, range, aside.start(), &dress),
        changed => changed,
    };
    drop(stopped);
    outcome.map_err(|error| format!("the exchange of pages: {error}"))
}

/// That pieces of a segment are what they were when they were looked at. Until everything stopped, another thread may have
/// mapped something else there, which is nobody's to replace, or have changed what may be done with it.
pub fn is_as_expected(later: &Later, expected: &[(Range<u64>, (FilePlace, i32))]) -> std::io::Result<()> {
    let here = |(place, access): &(FilePlace, i32), piece: &Range<u64>, line: &maps::Line, at: u64| {
        line.access() == *access && line.has(place, at, at.saturating_sub(piece.start))
    };
    if later.fits(expected, here)? { Ok(()) } else { Err(changed()) }
}

/// After an error each piece is as it was, or has been given back.
fn exchange_back(
    bounce: &Bounce,
    intact: &[(Range<u64>, i32)],
    range: &Range<u64>,
    aside: u64,
    dress: &Dress,
) -> std::io::Result<()> {
    for (piece, access) in intact {
        // The list may lie in the piece itself, if that is of the heap.
        let (piece, access) = (piece.clone(), *access);
        let relative = piece.start.saturating_sub(range.start)..piece.end.saturating_sub(range.start);
        let away = shifted(&relative, aside);
        if !pages::is_readable(access) {
            pages::protect(&piece, READ_WRITE)?;
        }
        // SAFETY: the piece is the blob's mapping, and the new place is the caller's reservation.
        let moved = unsafe { pages::move_over(&piece, away.start) };
        let is_moved = moved.is_ok();
        let Err(error) = moved.and_then(|()| fill_fresh(bounce, &piece, &away, access, dress)) else {
            continue;
        };
        if is_moved {
            // SAFETY: back to where it was: nothing is there, or the fresh memory of above.
            let _ = unsafe { pages::move_over(&away, piece.start) };
        }
        plan::reserve(away.start, away.end.saturating_sub(away.start));
        if !pages::is_readable(access) {
            let _ = pages::protect(&piece, access);
        }
        return Err(error);
    }
    Ok(())
}

/// Fresh memory in place of a piece that lies away, with its content and this access.
fn fill_fresh(
    bounce: &Bounce,
    piece: &Range<u64>,
    away: &Range<u64>,
    access: i32,
    dress: &Dress,
) -> std::io::Result<()> {
    let length = piece.end.saturating_sub(piece.start);
    pages::map_fresh(Some(piece.start), length, dress.no_reserve)?;
    dress.put_on(piece);
    bounce.copy(away, piece.start)?;
    if access == READ_WRITE { Ok(()) } else { pages::protect(piece, access) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thunk::adopt::TABLE;
    use crate::thunk::lock::lock;

    fn fill(at: &Range<u64>, byte: u8) {
        let length = (at.end - at.start) as usize;
        // SAFETY: the test's own mapping.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(at.start as usize).write_bytes(byte, length) };
    }

    fn first_and_last(at: &Range<u64>) -> (u8, u8) {
        // SAFETY: the test's own mapping.
        let byte = |at: u64| unsafe { std::ptr::with_exposed_provenance::<u8>(at as usize).read_volatile() };
        (byte(at.start), byte(at.end - 1))
    }

    /// What is left to do when a move fails between two parts.
    #[test]
    fn an_exchange_that_fails_is_undone() {
        let page = page_size();
        let size = 4 * page;
        let start = pages::map_fresh(None, size, false).unwrap();
        let staging = pages::map_fresh(None, size, false).unwrap();
        let (range, place) = (start..start + size, FilePlace::default());
        fill(&range, 1);
        fill(&(staging..staging + size), 2);
        let parts = [(0..2 * page, place.clone()), (2 * page..size, place)];
        let [first, second] = &parts;
        // The first part was moved; the second move has made a hole.
        // SAFETY: both are this test's mappings.
        unsafe { pages::move_over(&shifted(&first.0, staging), start) }.unwrap();
        let hole = shifted(&second.0, start);
        pages::unmap(hole.start, 2 * page).unwrap();
        assert!(!pages::is_mapped(&hole));
        restore(&hole, &shifted(&second.0, staging));
        undo(&range, staging, &parts[..1]);
        assert!(pages::is_mapped(&range));
        assert_eq!(first_and_last(&range), (2, 2), "the content of the staging pages, which is the range's");
        let areas = maps::areas(&range).unwrap();
        assert!(areas.iter().all(|area| area.permissions == "rw-p" && area.file.inode == 0));
        pages::unmap(start, size).unwrap();
        pages::unmap(staging, size).unwrap();
    }

    /// What another thread does between the look at the mappings and the stop.
    #[test]
    fn what_was_mapped_meanwhile_is_not_replaced() {
        // One stop at a time.
        let _table = lock(&TABLE);
        if let Err(why) = Stopped::new(&(0..0)) {
            println!("SKIP: threads cannot be stopped here: {why}");
            return;
        }
        let page = page_size();
        let start = pages::map_fresh(None, 2 * page, false).unwrap();
        let range = start..start + 2 * page;
        fill(&range, 5);
        // Of a file that is not there any more.
        let place = FilePlace { device: "00:01".into(), inode: 12345, offset: 0 };
        let segment = Segment {
            range: range.clone(),
            resource: virtio_kfd_protocol::ResourceId(1),
            blob: None,
            parts: vec![(0..2 * page, place)],
            character: Character { flags: vec!["dd".into()], name: None },
            kept: None,
            uses: 0,
        };
        let error = replace(&segment, &[(range.clone(), READ_WRITE)]).unwrap_err();
        assert!(error.contains("os error 11"), "{error}");
        assert_eq!(first_and_last(&range), (5, 5));
        // A replacement would have been left out of core dumps, as the segment's memory was.
        let areas = maps::areas_with_flags(&range).unwrap();
        assert!(areas.iter().all(|area| !area.flags.iter().any(|flag| flag == "dd")), "{areas:?}");
        // And a range that is a file by now is not adopted.
        let reader = Reader::new().unwrap();
        let staging = pages::map_fresh(None, 2 * page, false).unwrap();
        let parts = [(0..2 * page, FilePlace::default())];
        pages::unmap(start, page).unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let (flags, protection) = (libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE, libc::PROT_READ);
        // SAFETY: the address is free: this test has just unmapped it.
        let mapped = unsafe {
            let at = std::ptr::with_exposed_provenance_mut(start as usize);
            libc::mmap(at, page as usize, protection, flags, std::os::fd::AsRawFd::as_raw_fd(&file), 0)
        };
        assert_eq!(mapped.expose_provenance() as u64, start);
        let later = Later::open().unwrap();
        let error = swap(&reader, &later, &range, staging, &parts).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
        let areas = maps::areas(&range).unwrap();
        assert_eq!(areas.first().map(|area| area.permissions.as_str()), Some("r--p"));
        pages::unmap(start, 2 * page).unwrap();
        pages::unmap(staging, 2 * page).unwrap();
    }

    /// Pages that are shared, as a blob's are, each filled with its number from 1 on, and with this access.
    fn blob_with(access: &[i32]) -> (Range<u64>, Vec<(Range<u64>, i32)>) {
        let page = page_size();
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let length = page * access.len() as u64;
        // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length as usize, READ_WRITE, flags, -1, 0) };
        let start = start.expose_provenance() as u64;
        let piece = |(number, access): (usize, &i32)| {
            let at = start + number as u64 * page;
            fill(&(at..at + page), number as u8 + 1);
            pages::protect(&(at..at + page), *access).unwrap();
            (at..at + page, *access)
        };
        let pieces = access.iter().enumerate().map(piece).collect();
        (start..start + length, pieces)
    }

    fn permissions(range: &Range<u64>) -> Vec<String> {
        let page = page_size();
        let areas = maps::areas(range).unwrap();
        let at = |at: u64| areas.iter().find(|area| area.start <= at && at < area.end).unwrap();
        (range.start..range.end).step_by(page as usize).map(|it| at(it).permissions.clone()).collect()
    }

    /// What mprotect(2) has taken away is not in the way of what gives memory back, and comes back with it.
    #[test]
    fn access_is_given_back_as_the_application_has_set_it() {
        let (none, read) = (libc::PROT_NONE, libc::PROT_READ);
        let (range, pieces) = blob_with(&[READ_WRITE, none, read, none]);
        let aside = pages::map_fresh(None, range.end - range.start, false).unwrap();
        let (bounce, dress) = (Bounce::new().unwrap(), Dress::of(&Character::default()));
        exchange_back(&bounce, &pieces, &range, aside, &dress).unwrap();
        assert_eq!(permissions(&range), ["rw-p", "---p", "r--p", "---p"]);
        pages::protect(&range, READ_WRITE).unwrap();
        for (number, (piece, _)) in pieces.iter().enumerate() {
            assert_eq!(first_and_last(piece), (number as u8 + 1, number as u8 + 1));
        }
        pages::unmap(range.start, range.end - range.start).unwrap();
        pages::unmap(aside, range.end - range.start).unwrap();
    }

    #[test]
    fn a_piece_that_cannot_be_given_back_stays_what_it_is() {
        // The kernel knows no such access, so that the last step fails.
        let unknown = 1 << 12;
        let (range, mut pieces) = blob_with(&[READ_WRITE, libc::PROT_READ]);
        pieces[1].1 |= unknown;
        let aside = pages::map_fresh(None, range.end - range.start, false).unwrap();
        let (bounce, dress) = (Bounce::new().unwrap(), Dress::of(&Character::default()));
        let error = exchange_back(&bounce, &pieces, &range, aside, &dress).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        assert_eq!(permissions(&range), ["rw-p", "r--s"], "the first was given back before");
        assert_eq!((first_and_last(&pieces[0].0), first_and_last(&pieces[1].0)), ((1, 1), (2, 2)));
        assert!(pages::is_mapped(&(aside..aside + range.end - range.start)), "the reservation is there");
        pages::unmap(range.start, range.end - range.start).unwrap();
        pages::unmap(aside, range.end - range.start).unwrap();
    }

    #[test]
    fn own_stack_and_thread_data_are_in_use() {
        let local = [0u8; 64];
        let page = page_size();
        let at = local.as_ptr().addr() as u64 / page * page;
        assert!(is_in_use_here(&(at..at + page)));
        let fresh = pages::map_fresh(None, page, false).unwrap();
        assert!(!is_in_use_here(&(fresh..fresh + page)));
        pages::unmap(fresh, page).unwrap();
    }
}
