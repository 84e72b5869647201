//! Memory of variables: stacks, and the data of programs and libraries, beside ordinary memory.
//!
//! A thread cannot exchange the pages under its own frames, or under the data that it works with. So the tracer does it while
//! all threads are stopped, this one included. Nothing here is made anew afterwards: the mappings that were there are moved
//! aside, emptied, and moved back with the new content, so that a stack is one mapping again, which grows, and the data of
//! a program is again a mapping of its file.
//!
//! The blob is not for children (`MADV_DONTFORK`): [`super::child`].
#![allow(unsafe_code, reason = "mappings are moved under stacks, and the dynamic linker is asked")]

use std::io;
use std::ops::Range;

use super::child::{Copied, Copies};
use super::maps::{self, FilePlace, Fit, Later, Unfit, Vetted};
use super::pages::{self, Bounce, READ_WRITE, Reader};
use super::plan::Plan;
use super::stop::while_all_stopped;
use super::swap::{Prepared, cannot_stop, changed, is_as_expected, prepare, shifted};
use super::tracer::Obstacle;
use super::{Segment, child, system, unfit};
use crate::client::Client;
use crate::thunk::memory::address::{Reservation, page_size};
use crate::thunk::refusal::{Level, Outcome, say};

/// The mappings that were there before, aside.
pub struct Kept {
    /// Where they lie, in the order and with the distances that they had.
    start: u64,
    /// Each of them, relative to the start.
    pieces: Vec<Range<u64>>,
    /// A part is of a file: what is put into it has to be put there also where it is zero.
    of_file: bool,
}

fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

impl Kept {
    /// Cuts pieces of the segment, which come with what may be done with them, where one mapping ends and the next
    /// begins: only one can be moved at a time. With the address of the mapping that was there.
    pub fn cut(&self, segment: &Range<u64>, pieces: &[(Range<u64>, i32)]) -> Copies {
        let each = |(piece, access): &(Range<u64>, i32)| {
            let (piece, access) = (piece.clone(), *access);
            self.pieces.iter().filter_map(move |kept| {
                let kept = shifted(kept, segment.start);
                let both = kept.start.max(piece.start)..kept.end.min(piece.end);
                let place = both.start.checked_sub(segment.start)?.saturating_add(self.start);
                (both.start < both.end).then_some(Copied { range: both, place, access, filled: false })
            })
        };
        pieces.iter().flat_map(each).collect()
    }

    /// Frees the pages.
    fn empty(&self) {
        for piece in &self.pieces {
            // Where it does not, they are memory that nobody uses, and filled whole when they are put back.
            let _ = pages::advise(&shifted(piece, self.start), libc::MADV_DONTNEED);
        }
    }

    /// Frees pages that were filled for a child.
    pub fn empty_all(copies: &[Copied]) {
        for copied in copies {
            let _ = pages::advise(&copied.aside(), libc::MADV_DONTNEED);
        }
    }
}

/// That a range can be exchanged in this way.
pub fn vet(range: &Range<u64>) -> Outcome<Vetted> {
    let kind = |what: &str| unfit(Unfit::Kind(range.start, what.to_owned()));
    if !child::AVAILABLE {
        return Err(kind("variables can be adopted on x86-64 only"));
    }
    let vetted = maps::vet(range, Fit::Variables(&is_data_of_program));
    let vetted = vetted.map_err(|error| system("/proc/self/smaps", &error))?.map_err(unfit)?;
    if vetted.grows {
        // What lies below goes on growing; there has to be something.
        let lowest = lowest_below(range);
        extend_to(lowest);
        if !pages::is_mapped(&(lowest..range.start)) {
            return Err(kind("the stack does not reach further down"));
        }
    }
    Ok(vetted)
}

/// Adopts a range that was vetted.
pub fn adopt(client: &Client, range: Range<u64>, vetted: Vetted) -> Outcome<Segment> {
    static TOLD: std::sync::Once = std::sync::Once::new();
    TOLD.call_once(|| {
        say(Level::Info, || {
            "memory is adopted with writers held by ptrace, the thread that asks as well".to_owned()
        });
    });
    let Prepared { blob, staging, parts } = prepare(client, &range)?;
    let place = staging.start()..staging.start().saturating_add(length(&range));
    pages::advise(&place, libc::MADV_DONTFORK).map_err(|error| system("MADV_DONTFORK", &error))?;
    let aside = Reservation::new(length(&range), page_size(), 0, (0, u64::MAX));
    let aside = aside.map_err(|error| system("addresses for what was there", &error))?;
    let reader = Reader::new().map_err(|error| system("/proc/self/pagemap", &error))?;
    let later = Later::open().map_err(|error| system("/proc/self/maps", &error))?;
    let of_file = vetted.places.iter().any(|(_, place)| place.inode != 0);
    let relative =
        |piece: &Range<u64>| piece.start.saturating_sub(range.start)..piece.end.saturating_sub(range.start);
    let pieces: Vec<_> = vetted.places.iter().map(|(piece, _)| relative(piece)).collect();
    let plan = plan_of(&range, &pieces, aside.start(), place.start, &parts)
        .map_err(|error| system("memory for a plan", &error))?;
    // Everything is stopped. From the first move on nothing of this function may be used but the plan.
    let work = || {
        // Pages of a file that nobody has looked at yet are not in the page table.
        if of_file {
            reader.copy_all(&range, place.start)?
        } else {
            reader.copy(&range, place.start)?
        }
        // Another thread may have mapped something else there since the range was vetted.
        let same = later.fits(&vetted.places, |place, piece, line, at| match place.inode {
            0 => line.is_plain(),
            _ => line.is_private() && line.has(place, at, at.saturating_sub(piece.start)),
        });
        if !same? {
            return Err(changed());
        }
        // SAFETY: the application asked for the range to be replaced; the blob's mapping and the place aside are this
        // function's, and nobody runs.
        unsafe { plan.carry_out() }
    };
    match while_all_stopped(&range, &work) {
        Ok(done) => done.map_err(|error| system("the exchange of pages", &error))?,
        Err(why) => {
            if why.obstacle == Obstacle::Ended {
                // Something has killed it, and what lies where is not known: nothing of it is taken away.
                std::mem::forget((staging, aside, blob));
            }
            return Err(cannot_stop(why));
        }
    }
    let kept = Kept { start: aside.start(), pieces, of_file };
    // All of the one has been moved away, and the other keeps what the application gets back.
    std::mem::forget((staging, aside));
    kept.empty();
    let resource = blob.resource();
    let blob = Some(blob.close_handle());
    Ok(Segment { range, resource, blob, parts, character: vetted.character, kept: Some(kept), uses: 0 })
}

/// The mappings of a range moved aside, and a blob's in their place.
fn plan_of(
    range: &Range<u64>,
    pieces: &[Range<u64>],
    aside: u64,
    staging: u64,
    parts: &[(Range<u64>, FilePlace)],
) -> io::Result<Plan> {
    let mut plan = Plan::new(pieces.len().saturating_add(parts.len()))?;
    for piece in pieces {
        plan.push(&shifted(piece, range.start), piece.start.saturating_add(aside))?;
    }
    for (part, _) in parts {
        plan.push(&shifted(part, staging), part.start.saturating_add(range.start))?;
    }
    Ok(plan)
}

/// Puts what was there back in place of what is left of a segment, with the content of now. After an error it is as it was.
/// Each piece comes with what the application may do with it.
pub fn put_back(segment: &Segment, kept: &Kept, intact: &[(Range<u64>, i32)]) -> Result<(), String> {
    let pieces = kept.cut(&segment.range, intact);
    if !pieces.is_empty() {
        let temporary = Reservation::new(length(&segment.range), page_size(), 0, (0, u64::MAX));
        let temporary = temporary.map_err(|error| format!("addresses: {error}"))?;
        let expected = pieces
            .iter()
            .filter_map(|it| Some((it.range.clone(), (segment.place_of(&it.range)?, it.access))));
        let expected: Vec<_> = expected.collect();
        let bounce = Bounce::new().map_err(|error| format!("a buffer: {error}"))?;
        let later = Later::open().map_err(|error| format!("/proc/self/maps: {error}"))?;
        let plan = plan_back(&pieces, segment.range.start, temporary.start());
        let plan = plan.map_err(|error| format!("memory for a plan: {error}"))?;
        let of_file = kept.of_file;
        // Everything is stopped. From the first move on nothing of this function may be used but the plan.
        let work = || {
            is_as_expected(&later, &expected)?;
            // SAFETY: the blob's mapping and what is aside are this library's, and nobody runs.
            let done = fill_aside(&bounce, &pieces, of_file).and_then(|()| unsafe { plan.carry_out() });
            if done.is_err() {
                close_again(&pieces);
            }
            done
        };
        match while_all_stopped(&(0..0), &work) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                Kept::empty_all(&pieces);
                return Err(format!("the exchange of pages: {error}"));
            }
            Err(why) => {
                if why.obstacle == Obstacle::Ended {
                    // Something has killed it, and the only copy may lie there.
                    std::mem::forget(temporary);
                }
                return Err(why.to_string());
            }
        }
    }
    // What the application has unmapped is still aside.
    for rest in kept.cut(&segment.range, &without(&segment.range, &pieces)) {
        let _ = pages::unmap(rest.place, length(&rest.range));
    }
    Ok(())
}

/// Fills what was there before with the content of now, and gives it the access of now. Everything is stopped.
fn fill_aside(bounce: &Bounce, pieces: &[Copied], of_file: bool) -> io::Result<()> {
    for it in pieces {
        if !pages::is_readable(it.access) {
            pages::protect(&it.range, READ_WRITE)?;
        }
        // Only what is empty need not be given zeros. What the application has locked cannot be emptied.
        if of_file || pages::advise(&it.aside(), libc::MADV_DONTNEED).is_err() {
            pages::copy_every(&it.range, it.place)?;
        } else {
            bounce.copy(&it.range, it.place)?;
        }
        if it.access != READ_WRITE {
            pages::protect(&it.aside(), it.access)?;
        }
    }
    Ok(())
}

/// Undoes what that has done to access.
fn close_again(pieces: &[Copied]) {
    for it in pieces.iter().filter(|it| it.access != READ_WRITE) {
        let _ = pages::protect(&it.aside(), READ_WRITE);
        if !pages::is_readable(it.access) {
            let _ = pages::protect(&it.range, it.access);
        }
    }
}

/// What of a range lies in no piece. The pieces are in order.
fn without(range: &Range<u64>, pieces: &[Copied]) -> Vec<(Range<u64>, i32)> {
    let mut next = range.start;
    let mut rest = Vec::new();
    let ends = std::iter::once(range.end..range.end);
    for piece in pieces.iter().map(|it| it.range.clone()).chain(ends) {
        if next < piece.start {
            rest.push((next..piece.start, READ_WRITE));
        }
        next = piece.end;
    }
    rest
}

/// The blob moved away, and what was there before moved back, piece by piece.
fn plan_back(pieces: &[Copied], range: u64, temporary: u64) -> io::Result<Plan> {
    let mut plan = Plan::new(pieces.len().saturating_mul(2))?;
    for it in pieces {
        plan.push(&it.range, it.range.start.saturating_sub(range).saturating_add(temporary))?;
        plan.push(&it.aside(), it.range.start)?;
    }
    Ok(plan)
}

/// The data of a program or a library: whether all of a range lies in writable segments of what the dynamic linker has loaded.
fn is_data_of_program(range: &Range<u64>) -> bool {
    struct Asked {
        range: Range<u64>,
        page: u64,
        found: bool,
    }
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, asked: *mut libc::c_void) -> i32 {
        // SAFETY: the C library gives a valid description.
        let info = unsafe { &*info };
        // SAFETY: what the function below gave, which waits.
        let asked = unsafe { &mut *asked.cast::<Asked>() };
        if info.dlpi_phdr.is_null() {
            return 0;
        }
        // SAFETY: as many headers as it says.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        asked.found |= headers.iter().any(|header| {
            let start = info.dlpi_addr.wrapping_add(header.p_vaddr);
            let end = start.saturating_add(header.p_memsz).next_multiple_of(asked.page);
            let start = start.saturating_sub(start % asked.page);
            let writable = header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W != 0;
            writable && start <= asked.range.start && asked.range.end <= end
        });
        i32::from(asked.found)
    }
    let mut asked = Asked { range: range.clone(), page: page_size(), found: false };
    // SAFETY: the callback has this form, and `asked` lives beyond the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut asked).cast()) };
    asked.found
}

/// Pages of a mapping that grows downwards that have to be mapped below what is adopted of it: they go on growing.
const ROOM_TO_GROW: u64 = 16;

/// The lowest address that has to be mapped below a range.
fn lowest_below(range: &Range<u64>) -> u64 {
    range.start.saturating_sub(ROOM_TO_GROW.saturating_mul(page_size()))
}

/// Has the kernel extend a stack down to an address, where it may: by a system call that reads there, and fails in any case.
fn extend_to(address: u64) {
    let no_file = usize::MAX;
    let add = libc::EPOLL_CTL_ADD as usize;
    // SAFETY: the kernel reads the event, or finds none (EFAULT); then that there is no such file (EBADF).
    let _ = unsafe { super::syscall::call(libc::SYS_epoll_ctl, [no_file, add, no_file, address as usize]) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_cut_where_mappings_end() {
        let kept = Kept { start: 0x90000, pieces: vec![0..0x2000, 0x2000..0x5000], of_file: true };
        let range = 0x10000..0x15000;
        let copied = |range, place, access| Copied { range, place, access, filled: false };
        assert_eq!(
            kept.cut(&range, &[(0x11000..0x13000, READ_WRITE), (0x14000..0x15000, libc::PROT_NONE)]),
            [
                copied(0x11000..0x12000, 0x91000, READ_WRITE),
                copied(0x12000..0x13000, 0x92000, READ_WRITE),
                copied(0x14000..0x15000, 0x94000, libc::PROT_NONE)
            ]
        );
        let pieces = kept.cut(&range, &[(0x11000..0x13000, libc::PROT_READ)]);
        assert_eq!(
            without(&range, &pieces),
            [(0x10000..0x11000, READ_WRITE), (0x13000..0x15000, READ_WRITE)]
        );
        assert_eq!(without(&range, &[]), [(range, READ_WRITE)]);
    }

    #[test]
    fn data_of_this_program_is_known_as_such() {
        static DATA: std::sync::Mutex<[u64; 4]> = std::sync::Mutex::new([1, 2, 3, 4]);
        let page = page_size();
        let at = std::ptr::from_ref(&DATA).addr() as u64 / page * page;
        assert!(is_data_of_program(&(at..at + page)));
        let local = 0u8;
        let at = std::ptr::from_ref(&local).addr() as u64 / page * page;
        assert!(!is_data_of_program(&(at..at + page)));
        let code = (is_data_of_program as fn(&Range<u64>) -> bool as usize as u64) / page * page;
        assert!(!is_data_of_program(&(code..code + page)));
    }
}
