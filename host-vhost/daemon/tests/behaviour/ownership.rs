//! What contexts leave behind, and whose it is then.

use virtio_kfd_protocol::calls::Nop;
use virtio_kfd_protocol::{Nothing, Status};

use crate::daemon::Daemon;
use crate::gpu::*;
use crate::stub;
use crate::vmm::{SCRATCH, Vmm};

crate::tests![
    guest_memory_of_ended_contexts_is_free,
    contexts_without_a_worker_count,
    a_late_answer_does_not_reach_a_blob_of_the_same_number,
];

/// Has the stub die, and sees that the context is lost.
fn lose(vmm: &mut Vmm, ctx: u32) {
    assert_eq!(run(vmm, ctx, &event(ctx, stub::DIE, 0)), [Status::WORKER_LOST; 2]);
}

fn guest_memory_of_ended_contexts_is_free() {
    let daemon = Daemon::start(&["--guest-memory-limit", "2M"]);
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
            assert_eq!(kind(&vmm.command(&guest_blob(0, 99, 0x18_0000, &most))), OUT_OF_MEMORY);
        }
        assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, ctx))), OK);
        // The numbers stay the guest's to give up.
        assert_eq!(kind(&vmm.command(&guest_blob(0, blob, 0x1000, &most))), BAD_RESOURCE);
    }
    for blob in [2001, 2002, 2003] {
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[blob, 0]))), OK);
    }
    open_context(&mut vmm, 4);
    assert_eq!(kind(&vmm.command(&guest_blob(4, 2001, 0x18_0000, &most))), OK);
    // Counted once: no more than the limit is there.
    assert_eq!(kind(&vmm.command(&guest_blob(4, 2002, 0x8_0000, &[(SCRATCH, 0x8_0000)]))), OUT_OF_MEMORY);
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
