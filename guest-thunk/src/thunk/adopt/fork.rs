//! A forked child gets a private copy of what is adopted, as it would of ordinary memory.
//!
//! The blob's mapping is shared, so the child would see, and change, the parent's memory. Before the fork the content is
//! copied; in the child the copies take the place of the shared mappings; in the parent they go. What other threads
//! write between the copy and the fork is not in the copy: they cannot be held meanwhile, for fork(3) itself waits for
//! locks that they may have.
//!
//! What the tracer exchanged ([`super::variables`]) is not inherited. [`super::child`] puts the content of the moment of the fork
//! in place before the child runs. Where the forking thread cannot be traced, the content is copied before, and the child
//! puts it in place. That is no stack to go on with, for its lower frames are others by then: a child on such a stack is killed,
//! if it comes so far. It does not come further than that, for it finds zeros where frames should be (the kernel extends what
//! is left of the main thread's stack), and none of them returns.
//!
//! Where the application has taken access away, the content is copied before the fork while all threads are stopped, and the
//! child has it with no more access than its parent.
//!
//! What cannot be copied, for want of memory or since the mappings cannot be listed, is not for the child (`MADV_DONTFORK`): it
//! gets a fault there, and changes nothing of its parent's. Without a list the child of a process that has variables adopted is
//! killed.
//!
//! This hangs on `pthread_atfork`: a child of the bare `clone` system call shares the memory with its parent, or has none there.
#![allow(unsafe_code, reason = "pthread_atfork, and mappings of the child")]

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use super::child::{self, Copied, Copies};
use super::maps::{Area, Later, Line};
use super::pages::{Bounce, READ_WRITE};
use super::stop::Stopped;
use super::swap::{Dress, changed, shifted};
use super::tracer::Tracer;
use super::variables::Kept;
use super::{OVERTAKEN, Overtaken, TABLE, Table, maps, pages, proc};
use crate::thunk::lock::lock;
use crate::thunk::memory::address::page_size;
use crate::thunk::refusal::{Level, say};

/// What a fork needs from before to after it, in the thread that forks.
struct Forking {
    /// Memory of the process, and its copy.
    copies: Copies,
    /// The same of what is not inherited: the copy is what was there before, aside. The box is what the tracer reads.
    apart: Box<Copies>,
    /// Memory that is not copied, and not inherited for the moment.
    withheld: Vec<Range<u64>>,
    /// Who puts the latter in place; without it the child does.
    tracer: Option<Tracer>,
    /// Without it the child has no stack to run on.
    doomed: bool,
    table: MutexGuard<'static, Table>,
    overtaken: MutexGuard<'static, Overtaken>,
}

thread_local! {
    static FORKING: RefCell<Option<Forking>> = const { RefCell::new(None) };
}

/// Installs the handlers, once, and before anything that they protect is locked: when the library is opened, so that they
/// come behind those of the application that are installed later, and what these have locked is not waited for.
pub fn install() {
    // No Once: a child that is forked meanwhile would wait for it for ever.
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if INSTALLED.swap(true, Ordering::AcqRel) {
        return;
    }
    // SAFETY: the handlers are functions of this library; glibc takes them back when it is unloaded.
    let result = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    if result != 0 {
        say(Level::Warning, || "pthread_atfork failed: children share what is adopted".to_owned());
    }
}

extern "C" fn before() {
    // Both stay locked until after the fork: the child must find them whole.
    let mut table = lock(&TABLE);
    let (mut copies, mut apart, mut withheld) = (Copies::new(), Copies::new(), Vec::new());
    let mut doomed = false;
    if !table.segments.is_empty() {
        match maps::areas(&(0..u64::MAX)) {
            Ok(areas) => (copies, apart, withheld) = places(&table, &areas),
            Err(error) => {
                say(Level::Error, || {
                    format!("fork: what is adopted cannot be copied: /proc/self/maps: {error}")
                });
                (withheld, doomed) = without_list(&mut table);
            }
        }
        if let Err(error) = fill(&mut copies, &mut apart) {
            say(Level::Error, || format!("fork: the child does not have all of what is adopted: {error}"));
        }
        withheld.extend(not_copied(&mut copies));
        doomed |= !withhold(&withheld);
        if doomed {
            say(Level::Error, || "fork: the child is killed".to_owned());
        }
    }
    let mut apart = Box::new(apart);
    let mut tracer = None;
    if !apart.is_empty() && !doomed {
        match child::follow(&apart) {
            Ok(following) => tracer = Some(following),
            Err(why) => {
                *apart = copy_open(std::mem::take(&mut apart), pages::copy_every_until);
                doomed = apart.iter().any(|it| lies_on_this_stack(&it.range));
                let then = if doomed { ", and the child is killed" } else { "" };
                say(Level::Error, || format!("fork: this thread cannot be traced{then}: {why}"));
            }
        }
    }
    let overtaken = lock(&OVERTAKEN);
    let now = Forking { copies, apart, withheld, tracer, doomed, table, overtaken };
    FORKING.with_borrow_mut(|forking| *forking = Some(now));
}

/// Whether a range may lie on the stack that this thread runs on, above it: all is mapped in between.
fn lies_on_this_stack(range: &Range<u64>) -> bool {
    /// Larger than stacks are.
    const FAR: u64 = 1 << 30;
    let local = 0u8;
    let page = page_size();
    let here = (std::ptr::from_ref(&local).addr() as u64).saturating_sub(page).next_multiple_of(page);
    here < range.end && range.start.saturating_sub(here) < FAR && pages::is_mapped(&(here..range.end))
}

/// Every piece that is adopted, with as much memory for its copy: fresh, or what was there before; and those for which there is
/// none.
fn places(table: &Table, areas: &[Area]) -> (Copies, Copies, Vec<Range<u64>>) {
    let (mut places, mut apart, mut without) = (Copies::new(), Copies::new(), Vec::new());
    for segment in table.segments.values() {
        if let Some(kept) = &segment.kept {
            let intact: Vec<_> = segment.intact_areas(areas, &segment.range).collect();
            apart.extend(kept.cut(&segment.range, &intact));
            continue;
        }
        let dress = Dress::of(&segment.character);
        for (range, access) in segment.intact_areas(areas, &segment.range) {
            match pages::map_fresh(None, length(&range), dress.no_reserve) {
                Ok(place) => {
                    let copied = Copied { range, place, access, filled: false };
                    dress.put_on(&copied.aside());
                    places.push(copied);
                }
                Err(error) => {
                    say(Level::Error, || format!("fork: memory for copies of what is adopted: {error}"));
                    without.push(range);
                }
            }
        }
    }
    (places, apart, without)
}

/// Where mappings cannot be listed: all that may be the child's parent's, and whether the child lacks what it runs on.
fn without_list(table: &mut Table) -> (Vec<Range<u64>>, bool) {
    // What the application has mapped there since is not known.
    table.settle_overtaken();
    let shared = table.segments.values().filter(|it| it.kept.is_none());
    let parts = shared.flat_map(|it| it.parts.iter().map(|(part, _)| shifted(part, it.range.start)));
    (parts.collect(), table.segments.values().any(|it| it.kept.is_some()))
}

/// Takes out what could not be copied.
fn not_copied(copies: &mut Copies) -> Vec<Range<u64>> {
    let (filled, rest): (Copies, Copies) = std::mem::take(copies).into_iter().partition(|it| it.filled);
    *copies = filled;
    discard(&rest);
    rest.into_iter().map(|it| it.range).collect()
}

/// Has the child not inherit some memory. False where that cannot be had.
fn withhold(ranges: &[Range<u64>]) -> bool {
    let Some(first) = ranges.first() else { return true };
    say(Level::Error, || {
        format!(
            "fork: {} ranges that are adopted, the first at {:#x}, are not copied: the child gets a fault there",
            ranges.len(),
            first.start
        )
    });
    let refused = ranges.iter().find_map(|range| match pages::advise(range, libc::MADV_DONTFORK) {
        // A part of it is not mapped any more, and the advice is taken for the rest. Want of memory is EAGAIN (madvise(2)).
        Err(error) if error.raw_os_error() != Some(libc::ENOMEM) => Some(error),
        _ => None,
    });
    if let Some(error) = &refused {
        say(Level::Error, || format!("fork: MADV_DONTFORK: {error}"));
    }
    refused.is_none()
}

fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

/// Copies what has to be copied before the fork.
fn fill(copies: &mut Copies, apart: &mut Copies) -> Result<(), String> {
    let bounce = Bounce::new().map_err(|error| format!("a buffer: {error}"))?;
    *copies = copy_open(std::mem::take(copies), |range, to| bounce.copy_until(range, to));
    let filled = fill_closed(&bounce, copies, apart);
    for it in copies.iter().filter(|it| it.filled && it.access != READ_WRITE) {
        // Where it fails, the child may do more than its parent, and loses nothing.
        let _ = pages::protect(&it.aside(), it.access);
    }
    filled
}

/// Copies what may be read. A page from which another thread has taken that just now becomes a piece of its own.
fn copy_open(pieces: Copies, copy: impl Fn(&Range<u64>, u64) -> Result<(), (u64, std::io::Error)>) -> Copies {
    let mut done = Copies::new();
    for mut rest in pieces {
        while !rest.filled && pages::is_readable(rest.access) {
            let Err((page, _)) = copy(&rest.range, rest.place) else {
                rest.filled = true;
                break;
            };
            let (before, from_page) = rest.split_at(page);
            let (closed, behind) = from_page.split_at(page.saturating_add(page_size()));
            done.extend(before.map(|it| Copied { filled: true, ..it }));
            done.extend(closed.map(|it| Copied { access: libc::PROT_NONE, ..it }));
            rest = behind;
        }
        if rest.range.start < rest.range.end {
            done.push(rest);
        }
    }
    done
}

/// Copies what the application may not read: that is made readable for as long as nobody runs.
fn fill_closed(bounce: &Bounce, copies: &mut Copies, apart: &mut Copies) -> Result<(), String> {
    let all = copies.iter_mut().map(|it| (it, false)).chain(apart.iter_mut().map(|it| (it, true)));
    let mut closed: Vec<_> = all.filter(|(it, _)| !pages::is_readable(it.access)).collect();
    if closed.is_empty() {
        return Ok(());
    }
    closed.sort_by_key(|(it, _)| it.range.start);
    let now: Vec<_> = closed.iter().map(|(it, _)| (it.range.clone(), Cell::new(None))).collect();
    let later = Later::open().map_err(|error| format!("/proc/self/maps: {error}"))?;
    let stopped = Stopped::new(&(0..0)).map_err(|why| why.to_string())?;
    // From here to the drop of `stopped`: no allocation, no lock.
    let outcome = copy_closed(bounce, &later, &now, &mut closed);
    drop(stopped);
    outcome.map_err(|error| error.to_string())
}

fn copy_closed(
    bounce: &Bounce,
    later: &Later,
    now: &[(Range<u64>, Cell<Option<i32>>)],
    closed: &mut [(&mut Copied, bool)],
) -> std::io::Result<()> {
    // Another thread may have changed it until it was stopped: it gets back what it has now, which is one access for each.
    let here = |access: &Cell<Option<i32>>, _: &Range<u64>, line: &Line, _| {
        let before = access.replace(Some(line.access()));
        before.is_none_or(|before| before == line.access())
    };
    if !later.fits(now, here)? {
        return Err(changed());
    }
    for ((it, is_apart), (_, access)) in closed.iter_mut().zip(now) {
        it.access = access.get().unwrap_or(it.access);
        let is_closed = !pages::is_readable(it.access);
        if *is_apart && !is_closed {
            // What may be read by now is copied later.
            continue;
        }
        if is_closed {
            pages::protect(&it.range, libc::PROT_READ)?;
        }
        let copied =
            if *is_apart { pages::copy_every(&it.range, it.place) } else { bounce.copy(&it.range, it.place) };
        if is_closed {
            let _ = pages::protect(&it.range, it.access);
        }
        copied?;
        it.filled = true;
    }
    Ok(())
}

fn discard(copies: &Copies) {
    for it in copies {
        let _ = pages::unmap(it.place, length(&it.range));
    }
}

fn taken() -> Option<Forking> {
    FORKING.with_borrow_mut(Option::take)
}

extern "C" fn in_parent() {
    if let Some(Forking { copies, apart, withheld, tracer, .. }) = taken() {
        // The table is free again only behind this: there is one tracer at a time.
        let filled = tracer.is_none() || apart.iter().any(|it| it.filled);
        if let Some(Err(error)) = tracer.as_ref().map(Tracer::outcome) {
            say(Level::Error, || {
                format!("fork: the child is killed: its memory could not be put right: {error}")
            });
        }
        drop(tracer);
        discard(&copies);
        for range in &withheld {
            // Where it stays, later children get a copy all the same.
            let _ = pages::advise(range, libc::MADV_DOFORK);
        }
        if filled {
            Kept::empty_all(&apart);
        }
    }
}

/// Only system calls, stores, and the unlocking of what this thread locked. What the table has is the parent's.
extern "C" fn in_child() {
    let Some(Forking { copies, apart, withheld, tracer, doomed, mut table, mut overtaken }) = taken() else {
        return;
    };
    if doomed {
        kill_this();
    }
    put(&copies);
    match tracer {
        // It has put them there.
        Some(tracer) if apart.iter().all(|it| pages::is_mapped(&it.range)) => tracer.forget(),
        // It was killed before it did, and the content is lost. Nothing else can be told to anybody here.
        Some(_) => kill_this(),
        None => {
            put(&apart);
            restrict(&apart);
        }
    }
    std::mem::forget((copies, apart, withheld));
    std::mem::forget(std::mem::take(&mut *table));
    std::mem::forget(std::mem::take(&mut *overtaken));
    // They show the parent.
    proc::MAPS.forget();
    proc::TASKS.forget();
}

/// Puts copies in place of what they are copies of.
fn put(copies: &Copies) {
    for it in copies {
        // SAFETY: the copy is this library's to move. The range is the child's view of the blob, or nothing is mapped
        // there, and the copy has the content that the range had before the fork.
        let _ = unsafe { pages::move_over(&it.aside(), it.range.start) };
    }
}

/// The child may do what its parent may; nothing where the content could not be had.
fn restrict(copies: &Copies) {
    for it in copies.iter().filter(|it| !it.filled || it.access != READ_WRITE) {
        let _ = pages::protect(&it.range, if it.filled { it.access } else { libc::PROT_NONE });
    }
}

fn kill_this() {
    // SAFETY: no pointer.
    unsafe { libc::kill(std::process::id().cast_signed(), libc::SIGKILL) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page that cannot be read, among others that can: an error and no signal, and all others are copied.
    #[test]
    fn a_page_that_was_closed_just_now_is_a_piece_of_its_own() {
        let page = page_size();
        let start = pages::map_fresh(None, 40 * page, false).unwrap();
        let place = pages::map_fresh(None, 40 * page, false).unwrap();
        let byte = |at: u64| std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
        for number in 0..40 {
            // SAFETY: a mapping of the test's own.
            unsafe { byte(start + number * page).write_volatile(number as u8) };
        }
        // In the second of the buffer's fillings, and at the end.
        for closed in [33, 39] {
            let at = start + closed * page;
            pages::protect(&(at..at + page), libc::PROT_NONE).unwrap();
        }
        let range = start..start + 40 * page;
        let bounce = Bounce::new().unwrap();
        for copy in [
            &(|range: &Range<u64>, to| bounce.copy_until(range, to)) as &dyn Fn(&_, _) -> _,
            &pages::copy_every_until,
        ] {
            let all = Copied { range: range.clone(), place, access: READ_WRITE, filled: false };
            let done = copy_open(vec![all], copy);
            let found: Vec<_> = done
                .iter()
                .map(|it| ((it.range.start - start) / page, (it.range.end - start) / page, it.filled))
                .collect();
            assert_eq!(found, [(0, 33, true), (33, 34, false), (34, 39, true), (39, 40, false)]);
            assert!(done.iter().all(|it| it.place - place == it.range.start - start));
            for number in 0..40 {
                // SAFETY: a mapping of the test's own.
                let found = unsafe { byte(place + number * page).read_volatile() };
                assert_eq!(found, if [33, 39].contains(&number) { 0 } else { number as u8 });
            }
            pages::advise(&(place..place + 40 * page), libc::MADV_DONTNEED).unwrap();
        }
        // What may not be read is not even tried.
        let closed = Copied { range, place, access: libc::PROT_NONE, filled: false };
        assert_eq!(copy_open(vec![closed.clone()], pages::copy_every_until), [closed]);
        pages::unmap(start, 40 * page).unwrap();
        pages::unmap(place, 40 * page).unwrap();
    }
}
