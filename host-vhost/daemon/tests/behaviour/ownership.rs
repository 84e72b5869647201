//! What contexts leave behind, and whose it is then.

use std::sync::atomic::Ordering;

use virtio_kfd_protocol::calls::Nop;
use virtio_kfd_protocol::{Nothing, Status};

use crate::daemon::{Daemon, open_files, wait_for};
use crate::gpu::*;
use crate::stub;
use crate::vmm::{SCRATCH, Vmm};

crate::tests![
    guest_memory_of_ended_contexts_stays_a_number,
    contexts_without_a_worker_count,
    a_late_answer_does_not_reach_a_blob_of_the_same_number,
    host_memory_of_ended_contexts_is_free,
    a_map_under_way_when_its_context_ends_is_taken_back,
    a_detach_takes_nothing,
];

/// Has the stub die, and sees that the context is lost.
fn lose(vmm: &mut Vmm, ctx: u32) {
    assert_eq!(run(vmm, ctx, &event(ctx, stub::DIE, 0)), [Status::WORKER_LOST; 2]);
}

fn guest_memory_of_ended_contexts_stays_a_number() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    let most = [(SCRATCH + 0x10_0000, 0x18_0000)];
    for (ctx, dies) in [(1, false), (2, true), (3, false)] {
        open_context(&mut vmm, ctx);
        let blob = 2000 + ctx;
        assert_eq!(kind(&vmm.command(&guest_blob(ctx, blob, 0x18_0000, &most))), OK, "context {ctx}");
        if dies {
            lose(&mut vmm, ctx);
            // Still the context's: a frame is answered there.
            assert_eq!(run(&mut vmm, ctx, &nop(ctx, 0)), [Status::WORKER_LOST]);
        }
        assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, ctx))), OK);
        // The numbers stay the guest's to give up, and nobody else's to use.
        assert_eq!(kind(&vmm.command(&guest_blob(0, blob, 0x1000, &most))), BAD_RESOURCE);
        open_context(&mut vmm, 9);
        assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 9, &[blob, 0]))), BAD_RESOURCE);
        assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 9))), OK);
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[answer_blob(9), 0]))), OK);
    }
    for blob in [2001, 2002, 2003] {
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[blob, 0]))), OK);
    }
    open_context(&mut vmm, 4);
    assert_eq!(kind(&vmm.command(&guest_blob(4, 2001, 0x18_0000, &most))), OK);
    check_context(&mut vmm, 4);
}

fn contexts_without_a_worker_count() {
    let daemon = Daemon::start(&["--max-contexts", "3"]);
    let mut vmm = Vmm::connect(&daemon);
    for ctx in 1..=3 {
        open_context(&mut vmm, ctx);
        lose(&mut vmm, ctx);
    }
    assert_eq!(daemon.workers().len(), 0);
    assert_eq!(kind(&vmm.command(&ctx_create(4, 8))), OUT_OF_MEMORY);
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 2))), OK);
    open_context(&mut vmm, 4);
    check_context(&mut vmm, 4);
}

fn a_late_answer_does_not_reach_a_blob_of_the_same_number() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    let (old, new) = (SCRATCH + 0x10_0000, SCRATCH + 0x20_0000);
    assert_eq!(kind(&vmm.command(&guest_blob(1, 50, 0x1000, &[(old, 0x1000)]))), OK);
    let mut late = frame(50, 0x80);
    late.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    let held = vmm.submit(&submit(1, stub::HELD_RING, 1, &late.finish()));
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[50, 0]))), OK);
    assert_eq!(kind(&vmm.command(&guest_blob(2, 50, 0x1000, &[(new, 0x1000)]))), OK);
    vmm.write(old, &[0x5a; 0x1000]);
    vmm.write(new, &[0x5a; 0x1000]);
    let release = vmm.submit(&submit(1, stub::RELEASE_RING, 2, &nop(1, 0)));
    let back = [vmm.next_response(), vmm.next_response()].map(|(head, response)| (head, kind(&response)));
    assert_eq!(back, [(release, OK), (held, UNSPEC)]);
    for place in [old, new] {
        assert_eq!(vmm.read(place, 0x1000), [0x5a; 0x1000], "{place:#x}");
    }
    check_context(&mut vmm, 2);
}

fn host_memory_of_ended_contexts_is_free() {
    let daemon = Daemon::start(&["--shmem-size", "1M"]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 9);
    let files = open_files(daemon.device());
    for (ctx, dies) in [(1, false), (2, true)] {
        open_context(&mut vmm, ctx);
        for blob in 60..63 {
            assert_eq!(kind(&vmm.command(&host_blob(ctx, blob, stub::GOOD_BUFFER, 0x2000))), OK);
        }
        assert_eq!(kind(&vmm.command(&map_blob(60, 0x4000))), OK_MAP_INFO);
        assert_eq!(kind(&vmm.command(&map_blob(61, 0x8000))), OK_MAP_INFO);
        if dies {
            lose(&mut vmm, ctx);
            // The process is there and may still look at it.
            assert_eq!(vmm.read_window(0x4000, stub::HOST_TEXT.len()), stub::HOST_TEXT);
        }
        assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, ctx))), OK);
        wait_for("the unmaps", || vmm.maps.live.lock().unwrap().is_empty());
        wait_for("the memory's files", || open_files(daemon.device()) == files);
        assert_eq!(kind(&vmm.command(&map_blob(62, 0xc000))), BAD_RESOURCE, "there is no memory any more");
        // What the guest does then: one is unmapped first, the others are not.
        assert_eq!(kind(&vmm.command(&simple(UNMAP_BLOB, 0, &[60, 0]))), OK);
        assert_eq!(kind(&vmm.command(&simple(UNMAP_BLOB, 0, &[60, 0]))), BAD_PARAMETER);
        for blob in [60, 61, 62, answer_blob(ctx)] {
            assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[blob, 0]))), OK, "{blob}");
        }
    }
    // The places are free, and nothing was unmapped twice.
    assert_eq!(kind(&vmm.command(&host_blob(9, 60, stub::GOOD_BUFFER, 0x8000))), OK);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0x4000))), OK_MAP_INFO);
    assert_eq!(vmm.maps.refused.load(Ordering::SeqCst), 0);
    check_context(&mut vmm, 9);
}

fn a_map_under_way_when_its_context_ends_is_taken_back() {
    let daemon = Daemon::start(&["--shmem-size", "1M"]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x2000))), OK);
    let maps = vmm.maps.clone();
    // The VMM is busy, so that the map is not done when the context goes.
    let busy = maps.live.lock().unwrap();
    let map = vmm.submit(&map_blob(60, 0x4000));
    let destroy = vmm.submit(&header(CTX_DESTROY, 1));
    assert_eq!(vmm.next_response().0, destroy);
    let unmap = vmm.submit(&simple(UNMAP_BLOB, 0, &[60, 0]));
    let again = vmm.submit(&map_blob(60, 0x4000));
    assert_eq!(vmm.try_response(), None);
    drop(busy);
    let back: Vec<(u16, u32)> = (0..3)
        .map(|_| {
            let (head, response) = vmm.next_response();
            (head, kind(&response))
        })
        .collect();
    assert_eq!(back, [(map, UNSPEC), (unmap, OK), (again, BAD_RESOURCE)]);
    assert!(vmm.maps.live.lock().unwrap().is_empty());
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[60, 0]))), OK);
    assert_eq!(vmm.maps.refused.load(Ordering::SeqCst), 0);
}

fn a_detach_takes_nothing() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    assert_eq!(kind(&vmm.command(&guest_blob(0, 50, 0x1000, &[(SCRATCH + 0x10_0000, 0x1000)]))), OK);
    // Of nobody yet, and of nobody after this.
    assert_eq!(kind(&vmm.command(&simple(CTX_DETACH, 1, &[50, 0]))), BAD_RESOURCE);
    assert_eq!(kind(&vmm.command(&simple(CTX_DETACH, 7, &[50, 0]))), BAD_CONTEXT);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[50, 0]))), OK);
    assert_eq!(kind(&vmm.command(&simple(CTX_DETACH, 1, &[50, 0]))), BAD_RESOURCE);
    assert_eq!(kind(&vmm.command(&simple(CTX_DETACH, 2, &[50, 0]))), OK);
    // It is still there for the context that has it.
    let mut answer = frame(50, 0x80);
    answer.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    assert_eq!(kind(&vmm.command(&submit(2, 0, 1, &answer.finish()))), OK);
}
