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
//! This hangs on `pthread_atfork`: a child of the bare `clone` system call shares the memory with its parent, or has none there.
#![allow(unsafe_code, reason = "pthread_atfork, and mappings of the child")]

use std::cell::RefCell;
use std::ops::Range;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use super::child::{self, Copies};
use super::swap::Dress;
use super::tracer::Tracer;
use super::variables::Kept;
use super::{OVERTAKEN, Overtaken, TABLE, Table, maps, pages};
use crate::thunk::lock::lock;
use crate::thunk::memory::address::page_size;
use crate::thunk::refusal::{Level, say};

/// What a fork needs from before to after it, in the thread that forks.
struct Forking {
    /// Memory of the process, and its copy.
    copies: Copies,
    /// The same of what is not inherited: the copy is what was there before, aside. The box is what the tracer reads.
    apart: Box<Copies>,
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

/// Installs the handlers, once, and before anything that they protect is locked.
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
    let table = lock(&TABLE);
    let (mut copies, mut apart) = (Copies::new(), Copies::new());
    if !table.segments.is_empty() {
        match places(&table) {
            Ok(places) => (copies, apart) = places,
            Err(error) => {
                say(Level::Error, || format!("fork: the child does not have what is adopted: {error}"))
            }
        }
        for (range, copy) in &copies {
            // SAFETY: the range is a mapped blob, as large as the fresh mapping.
            unsafe { pages::copy_mapped(range, *copy) };
        }
    }
    let apart = Box::new(apart);
    let (mut tracer, mut doomed) = (None, false);
    if !apart.is_empty() {
        match child::follow(&apart) {
            Ok(following) => tracer = Some(following),
            Err(why) => {
                for (range, copy) in apart.iter() {
                    // SAFETY: the range is a mapped blob, and what was there before is as large.
                    unsafe { pages::copy_every(range, *copy) };
                }
                doomed = apart.iter().any(|(range, _)| lies_on_this_stack(range));
                let then = if doomed { ", and the child is killed" } else { "" };
                say(Level::Error, || format!("fork: this thread cannot be traced{then}: {why}"));
            }
        }
    }
    let overtaken = lock(&OVERTAKEN);
    let now = Forking { copies, apart, tracer, doomed, table, overtaken };
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

/// Every piece that is adopted, with as much memory for its copy: fresh, or what was there before.
fn places(table: &Table) -> std::io::Result<(Copies, Copies)> {
    let areas = maps::areas(&(0..u64::MAX))?;
    let (mut places, mut apart) = (Copies::new(), Copies::new());
    for segment in table.segments.values() {
        if let Some(kept) = &segment.kept {
            let intact: Vec<_> = segment.intact(&areas, &segment.range).collect();
            apart.extend(kept.cut(&segment.range, &intact));
            continue;
        }
        let dress = Dress::of(&segment.character);
        for piece in segment.intact(&areas, &segment.range) {
            let length = piece.end.saturating_sub(piece.start);
            match pages::map_fresh(None, length, dress.no_reserve) {
                Ok(copy) => {
                    dress.put_on(&(copy..copy.saturating_add(length)));
                    places.push((piece, copy));
                }
                Err(error) => {
                    discard(&places);
                    return Err(error);
                }
            }
        }
    }
    Ok((places, apart))
}

fn discard(copies: &Copies) {
    for (range, copy) in copies {
        let _ = pages::unmap(*copy, range.end.saturating_sub(range.start));
    }
}

fn taken() -> Option<Forking> {
    FORKING.with_borrow_mut(Option::take)
}

extern "C" fn in_parent() {
    if let Some(Forking { copies, apart, tracer, .. }) = taken() {
        // The table is free again only behind this: there is one tracer at a time.
        let filled = tracer.is_none();
        drop(tracer);
        discard(&copies);
        if filled {
            Kept::empty_all(&apart);
        }
    }
}

/// Only system calls, stores, and the unlocking of what this thread locked. What the table has is the parent's.
extern "C" fn in_child() {
    let Some(Forking { copies, apart, tracer, doomed, mut table, mut overtaken }) = taken() else { return };
    put(&copies);
    match tracer {
        // It has put them there.
        Some(tracer) if apart.iter().all(|(range, _)| pages::is_mapped(range)) => tracer.forget(),
        // It was killed before it did, and the content is lost. Nothing else can be told to anybody here.
        Some(_) => kill_this(),
        None if doomed => kill_this(),
        None => put(&apart),
    }
    std::mem::forget((copies, apart));
    std::mem::forget(std::mem::take(&mut *table));
    std::mem::forget(std::mem::take(&mut *overtaken));
}

/// Puts copies in place of what they are copies of.
fn put(copies: &Copies) {
    for (range, copy) in copies {
        let from = *copy..copy.saturating_add(range.end.saturating_sub(range.start));
        // SAFETY: the copy is this library's to move. The range is the child's view of the blob, or nothing is mapped
        // there, and the copy has the content that the range had before the fork.
        let _ = unsafe { pages::move_over(&from, range.start) };
    }
}

fn kill_this() {
    // SAFETY: no pointer.
    unsafe { libc::kill(std::process::id().cast_signed(), libc::SIGKILL) };
}
