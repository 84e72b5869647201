//! Doorbells that are rung after they have been still, when the next store to them traps: our libhsakmt in loop-back, and AMD's thunk
//! on `libkfd_preload.so` in loop-back, where the program may map, move and unmap them. What traps save is measured by `idle` and
//! `seam_idle`.
//!
//! Expected: each packet is processed (the program gives up after 60 seconds), and a child of fork has no doorbells, since
//! `kfd_doorbell_mmap` sets VM_DONTCOPY.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::time::Duration;

use virtio_kfd_tests::thunk_stack::SET;
use virtio_kfd_tests::{Artifacts, ThunkStack, Under, need};

const LIMIT: Duration = Duration::from_secs(240);

const PAUSES: &str = "a page: 1\npackets: 1\n= end\n";

fn stack() -> anyhow::Result<ThunkStack> {
    Ok(ThunkStack::start(Artifacts::for_thunk(&["libkfd_preload.so"], &[SET])?, "still").unwrap())
}

#[track_caller]
fn prints(stack: &ThunkStack, under: &Under<'_>, arguments: &[&str], expected: &str) {
    let found = stack.text(under, arguments, LIMIT).unwrap();
    assert_eq!(found, expected, "{arguments:?}\n{}", stack.daemon().report());
}

#[test]
fn no_ring_is_lost_after_any_pause() {
    let stack = need!(stack());
    prints(&stack, &stack.native().unwrap(), &["pauses", "20"], PAUSES);
    for under in [stack.ours(), stack.seam()].map(Result::unwrap) {
        prints(&stack, &under, &["pauses", "150"], PAUSES);
    }
}

#[test]
fn doorbells_may_be_mapped_again_and_moved() {
    let stack = need!(stack());
    prints(&stack, &stack.seam().unwrap(), &["again"], "doorbells: 1\npackets: 16\n= end\n");
    prints(&stack, &stack.seam().unwrap(), &["moved"], "doorbells: 1\npackets: 8\n= end\n");
}

#[test]
fn memory_in_the_place_of_doorbells_stays() {
    let stack = need!(stack());
    prints(&stack, &stack.seam().unwrap(), &["gone"], "doorbells: 1\nown memory stays: 1\n= end\n");
}

#[test]
fn a_child_has_no_doorbells() {
    let stack = need!(stack());
    let expected = "doorbells: 1\nthe child: SEGV\nthe child: SEGV\npackets: 6\n= end\n";
    prints(&stack, &stack.seam().unwrap(), &["fork"], expected);
}
