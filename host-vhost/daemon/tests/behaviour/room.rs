//! Room in the control queue: whatever guest processes do, commands of the guest's kernel find some.

use virtio_kfd_protocol::Status;
use virtio_kfd_protocol::calls::{Nop, WaitEvents};
use virtio_kfd_protocol::limits::MAX_FRAMES_IN_FLIGHT;
use virtio_kfd_protocol::{Nothing, WaitEventsRequest};

use crate::daemon::{Daemon, wait_for, wait_for_some};
use crate::gpu::*;
use crate::stub;
use crate::vmm::{Desc, NEXT, QUEUE, SCRATCH, Vmm, WRITE};

crate::tests![
    a_context_with_too_many_frames_is_ended,
    refused_frames_behind_a_wait_count,
    frames_behind_waits_do_not_fill_the_queue,
    waits_beyond_the_room_are_tried_again,
    a_long_cursor_queue_does_not_keep_the_control_queue_waiting,
];

/// Waits that a queue of [`QUEUE`] places takes: a quarter is kept free.
const ROOM: usize = 192;

/// Heads of commands of one place each, behind those that [`Vmm::command`] uses in these tests.
const HEADS: u16 = 40;

/// A frame that waits for `timeout` milliseconds.
fn wait(ctx: u32, timeout: u32, offset: u64) -> Vec<u8> {
    let mut builder = frame(answer_blob(ctx), offset);
    builder.push::<WaitEvents>(&WaitEventsRequest { timeout, wait_for_all: 0 }, &[], 0).unwrap();
    builder.finish()
}

/// The heads of what has come back until `head` has.
fn until(vmm: &mut Vmm, head: u16) -> usize {
    let mut others = 0;
    while vmm.next_response().0 != head {
        others += 1;
    }
    others
}

fn a_context_with_too_many_frames_is_ended() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    for index in 0..MAX_FRAMES_IN_FLIGHT as u16 {
        let ring = if index < 64 { stub::HELD_RING } else { 1 };
        vmm.submit_in_table(HEADS + index, &submit(1, ring, index.into(), &wait(1, u32::MAX, 0x1000)));
    }
    // As many as it may have: it goes on, though one more is too many.
    check_context(&mut vmm, 2);
    assert_eq!(daemon.workers().len(), 2);
    let last = vmm.submit(&submit(1, 2, 999, &nop(1, 0)));
    assert_eq!(until(&mut vmm, last), MAX_FRAMES_IN_FLIGHT);
    assert_eq!(statuses(&vmm, answers(1)), [Status::WORKER_LOST]);
    assert_eq!(statuses(&vmm, answers(1) + 0x1000), [Status::WORKER_LOST]);
    wait_for("the end of the worker", || daemon.workers().len() == 1);
    check_context(&mut vmm, 2);
}

fn refused_frames_behind_a_wait_count() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    vmm.submit_in_table(HEADS, &submit(1, 1, 1, &wait(1, u32::MAX, 0x1000)));
    let mut no_place = frame(4711, 0);
    no_place.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    let refused = no_place.finish();
    for index in 1..=200 {
        vmm.submit_in_table(HEADS + index, &submit(1, 1, u64::from(index) + 1, &refused));
    }
    for _ in 0..=200 {
        vmm.next_response();
    }
    assert_eq!(run(&mut vmm, 1, &nop(1, 0)), [Status::WORKER_LOST]);
}

/// Linux sleeps uninterruptibly for a place in the queue, with every process that opens, closes or unmaps.
fn frames_behind_waits_do_not_fill_the_queue() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    for ctx in 1..=3 {
        open_context(&mut vmm, ctx);
    }
    // A process that behaves, with a wait on each of ten rings; two that stack frames behind one wait.
    for ring in 1..=10 {
        vmm.submit_in_table(HEADS + u16::from(ring), &submit(1, ring, 1, &wait(1, u32::MAX, 0x1000)));
    }
    let stack = ROOM as u16 - 10 - 100;
    for index in 0..100 {
        let bytes = if index == 0 { wait(2, u32::MAX, 0x1000) } else { nop(2, 0x1000) };
        vmm.submit_in_table(HEADS + 11 + index, &submit(2, 1, u64::from(index) + 1, &bytes));
    }
    for index in 0..stack {
        let bytes = if index == 0 { wait(3, u32::MAX, 0x1000) } else { nop(3, 0x1000) };
        vmm.submit_in_table(HEADS + 111 + index, &submit(3, 1, u64::from(index) + 1, &bytes));
    }
    assert_eq!(vmm.try_response(), None);
    assert_eq!(daemon.workers().len(), 3);
    // One more command, and the room that is kept free is needed: the one with the most goes.
    let last = vmm.submit(&submit(3, 1, 999, &nop(3, 0x2000)));
    for _ in 0..100 {
        assert_ne!(vmm.next_response().0, last);
    }
    open_context(&mut vmm, 4);
    check_context(&mut vmm, 4);
    assert_eq!(run(&mut vmm, 2, &nop(2, 0)), [Status::WORKER_LOST]);
    check_context(&mut vmm, 1);
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 2))), OK);
}

/// Threads of four processes that all wait, as they may.
fn waits_beyond_the_room_are_tried_again() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    for ctx in 1..=4 {
        open_context(&mut vmm, ctx);
    }
    let mut heads = HEADS..;
    for ctx in 1..=4 {
        for ring in 1..=(ROOM / 4) as u8 {
            let head = heads.next().unwrap();
            vmm.submit_in_table(head, &submit(ctx, ring, 1, &wait(ctx, u32::MAX, 0x1000)));
        }
    }
    assert_eq!(vmm.try_response(), None, "there is room for so many");
    for ctx in 1..=4 {
        let one_more = vmm.command(&submit(ctx, 60, 2, &wait(ctx, u32::MAX, 0)));
        assert_eq!(kind(&one_more), OK);
        assert_eq!(statuses(&vmm, answers(ctx)), [Status::LIMIT]);
        // Looks and calls go on.
        assert_eq!(run(&mut vmm, ctx, &wait(ctx, 0, 0)), [Status::OK]);
        check_context(&mut vmm, ctx);
    }
    assert!(usize::from(QUEUE) > ROOM && daemon.workers().len() == 4);
    // Those of one process end, and the next is taken.
    let release = vmm.submit(&submit(1, stub::RELEASE_RING, 3, &nop(1, 0)));
    until(&mut vmm, release);
    for _ in 0..ROOM / 4 {
        vmm.next_response();
    }
    assert_eq!(statuses(&vmm, answers(1) + 0x1000), [Status::OK]);
    vmm.submit_in_table(HEADS, &submit(2, 60, 4, &wait(2, u32::MAX, 0)));
    check_context(&mut vmm, 3);
    assert_eq!(vmm.try_response(), None);
    assert_eq!(kind(&vmm.command(&header(GET_DISPLAY_INFO, 0))), UNSPEC);
}

/// Between turns of the cursor queue the control queue gets its own: here without a notification, which says that the
/// device did not come to it another way.
fn a_long_cursor_queue_does_not_keep_the_control_queue_waiting() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    let mem = vmm.mem.clone();
    let desc = |addr, len, flags, next| Desc { addr, len, flags, next };
    for head in 0..QUEUE {
        vmm.cursor.set_desc(&mem, head, desc(SCRATCH, 24, 0, 0));
        vmm.cursor.offer(&mem, head);
    }
    vmm.write(SCRATCH, &header(GET_DISPLAY_INFO, 0));
    vmm.control.set_desc(&mem, HEADS, desc(SCRATCH, 24, NEXT, HEADS + 1));
    vmm.control.set_desc(&mem, HEADS + 1, desc(SCRATCH + 0x1000, 24, WRITE, 0));
    vmm.control.offer(&mem, HEADS);
    vmm.cursor.kick();
    assert_eq!(wait_for_some("the answer", || vmm.control.used(&mem)), (HEADS, 24));
    for head in 0..QUEUE {
        assert_eq!(wait_for_some("a cursor command", || vmm.cursor.used(&mem)), (head, 0));
    }
}
