//! A forked child gets a private copy of what is adopted, as it would of ordinary memory.
//!
//! The blob's mapping is shared, so the child would see, and change, the parent's memory. Before the fork the content is
//! copied; in the child the copies take the place of the shared mappings; in the parent they go. What other threads
//! write between the copy and the fork is not in the copy: they cannot be held meanwhile, for fork(3) itself waits for
//! locks that they may have.
//!
//! This hangs on `pthread_atfork`: a child of the bare `clone` system call shares the memory with its parent.
#![allow(unsafe_code, reason = "pthread_atfork, and mappings of the child")]

use std::cell::RefCell;
use std::ops::Range;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use super::swap::Dress;
use super::{OVERTAKEN, Overtaken, TABLE, Table, maps, pages};
use crate::thunk::lock::lock;
use crate::thunk::refusal::{Level, say};

/// What a fork needs from before to after it, in the thread that forks.
struct Forking {
    /// Memory of the process, and its copy.
    copies: Vec<(Range<u64>, u64)>,
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
    let mut copies = Vec::new();
    if !table.segments.is_empty() {
        match places(&table) {
            Ok(places) => copies = places,
            Err(error) => say(Level::Error, || format!("fork: the child shares what is adopted: {error}")),
        }
        for (range, copy) in &copies {
            // SAFETY: the range is a mapped blob, as large as the fresh mapping.
            unsafe { pages::copy_mapped(range, *copy) };
        }
    }
    let overtaken = lock(&OVERTAKEN);
    FORKING.with_borrow_mut(|forking| *forking = Some(Forking { copies, table, overtaken }));
}

/// Every piece that is adopted, with as much memory for its copy.
fn places(table: &Table) -> std::io::Result<Vec<(Range<u64>, u64)>> {
    let areas = maps::areas(&(0..u64::MAX))?;
    let mut places: Vec<(Range<u64>, u64)> = Vec::new();
    for segment in table.segments.values() {
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
    Ok(places)
}

fn discard(copies: &[(Range<u64>, u64)]) {
    for (range, copy) in copies {
        let _ = pages::unmap(*copy, range.end.saturating_sub(range.start));
    }
}

fn taken() -> Option<Forking> {
    FORKING.with_borrow_mut(Option::take)
}

extern "C" fn in_parent() {
    if let Some(forking) = taken() {
        discard(&forking.copies);
    }
}

/// Only system calls, stores, and the unlocking of what this thread locked. What the table has is the parent's.
extern "C" fn in_child() {
    let Some(Forking { copies, mut table, mut overtaken }) = taken() else { return };
    for (range, copy) in &copies {
        let from = *copy..copy.saturating_add(range.end.saturating_sub(range.start));
        // SAFETY: the copy is this library's own mapping. The range is the child's view of the blob, and the copy has the
        // content that the range had at the fork.
        let _ = unsafe { pages::move_over(&from, range.start) };
    }
    std::mem::forget(copies);
    std::mem::forget(std::mem::take(&mut *table));
    std::mem::forget(std::mem::take(&mut *overtaken));
}
