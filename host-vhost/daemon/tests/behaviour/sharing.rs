//! Memory that several contexts use: blobs attached to more than one, and tokens.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use virtio_kfd_protocol::calls::{AvailableMemory, FreeMemory, ImportMemory, ShareMemory};
use virtio_kfd_protocol::frame::{AnswerFrame, RequestFrameBuilder};
use virtio_kfd_protocol::*;

use crate::blobs::{mark, use_blob};
use crate::daemon::{Daemon, open_files, wait_for};
use crate::gpu::*;
use crate::stub;
use crate::vmm::{SCRATCH, Vmm};

crate::tests![
    host_memory_is_attached_to_further_contexts,
    an_import_waits_for_the_memory_and_not_for_more,
    an_import_of_memory_that_never_comes_fails_and_the_context_goes_on,
    what_a_context_makes_does_not_wait_for_what_it_imports,
    an_import_does_not_wait_for_the_end_of_a_worker,
    memory_that_cannot_be_shared_is_for_its_context_alone,
    the_memory_of_an_ended_context_is_the_importers,
    tokens_open_pieces_of_memory,
    what_a_token_opened_outlives_its_buffer,
    workers_that_share_nonsense_are_ended,
    guest_memory_is_used_by_two_contexts,
    memory_that_outlives_its_context_counts_for_the_vm,
];

/// One call of a context, on ring 0.
fn call<C: CallType>(vmm: &mut Vmm, ctx: u32, request: &C::Request) -> Result<C::Answer, Status> {
    run(vmm, ctx, &one::<C>(ctx, request).finish());
    decode::<C>(vmm, answers(ctx))
}

fn one<C: CallType>(ctx: u32, request: &C::Request) -> RequestFrameBuilder {
    let mut builder = frame(answer_blob(ctx), 0);
    builder.push::<C>(request, &[], 0).unwrap();
    builder
}

fn decode<C: CallType>(vmm: &Vmm, at: u64) -> Result<C::Answer, Status> {
    let bytes = vmm.read(at, 0x400);
    let answer = AnswerFrame::parse(&bytes).unwrap();
    answer.answers[0].decode::<C>().map(|(fixed, _)| fixed).map_err(|_| answer.answers[0].header.status)
}

/// The first words of what a blob shows a context's worker, and its size.
fn import(vmm: &mut Vmm, ctx: u32, resource: u32) -> Result<(u64, u64), Status> {
    let request = ImportMemoryRequest { resource: ResourceId(resource), ..Default::default() };
    call::<ImportMemory>(vmm, ctx, &request).map(|answer| (answer.handle.0, answer.size))
}

/// What the stub's memory begins with.
fn text() -> u64 {
    u64::from_le_bytes(stub::HOST_TEXT[..8].try_into().unwrap())
}

fn share(vmm: &mut Vmm, ctx: u32, buffer: u32, offset: u64, size: u64) -> u64 {
    let handle = Handle::new(buffer, 1);
    call::<ShareMemory>(vmm, ctx, &ShareMemoryRequest { handle, offset, size }).unwrap().token.0
}

fn by_token(ctx: u32, resource: u32, token: u64, size: u64) -> Vec<u8> {
    create_blob(ctx, resource, 2, token, size, 0, &[])
}

fn contexts(vmm: &mut Vmm, last: u32) {
    (1..=last).for_each(|ctx| open_context(vmm, ctx));
}

fn host_memory_is_attached_to_further_contexts() {
    let daemon = Daemon::start(&["--shmem-size", "1M"]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 3);
    let files = open_files(daemon.device());
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x3000))), OK);
    // Linux attaches what a process makes to its own context too.
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 1, &[60, 0]))), OK);
    assert_eq!(import(&mut vmm, 2, 60), Err(Status::BAD_RESOURCE));
    for _ in 0..2 {
        assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[60, 0]))), OK);
        assert_eq!(import(&mut vmm, 2, 60), Ok((text(), 0x3000)));
        // A handle is closed while memory is in use.
        assert_eq!(kind(&vmm.command(&simple(CTX_DETACH, 2, &[60, 0]))), OK);
        assert_eq!(import(&mut vmm, 2, 60), Ok((text(), 0x3000)));
    }
    assert_eq!(import(&mut vmm, 3, 60), Err(Status::BAD_RESOURCE), "it was never attached");
    assert_eq!(kind(&vmm.command(&simple(CTX_DETACH, 3, &[60, 0]))), BAD_RESOURCE);
    // One map for all.
    assert_eq!(kind(&vmm.command(&map_blob(60, 0x4000))), OK_MAP_INFO);
    assert_eq!(vmm.read_window(0x4000, stub::HOST_TEXT.len()), stub::HOST_TEXT);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[60, 0]))), OK);
    assert!(vmm.maps.live.lock().unwrap().is_empty());
    for ctx in 1..=3 {
        assert_eq!(import(&mut vmm, ctx, 60), Err(Status::BAD_RESOURCE), "{ctx}");
        check_context(&mut vmm, ctx);
    }
    // The number is free, and another blob's.
    assert_eq!(kind(&vmm.command(&host_blob(2, 60, stub::GOOD_BUFFER, 0x1000))), OK);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 1, &[60, 0]))), OK);
    assert_eq!(import(&mut vmm, 1, 60), Ok((text(), 0x1000)));
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[60, 0]))), OK);
    // But for one that each of two workers' memory lies in, which is known from then on.
    wait_for("the memory's files", || open_files(daemon.device()) <= files + 2);
}

/// The guest's kernel waits for nothing: the blob, the attach and the import come at once.
fn an_import_waits_for_the_memory_and_not_for_more() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 3);
    let request = ImportMemoryRequest { resource: ResourceId(60), ..Default::default() };
    let made = vmm.submit(&host_blob(1, 60, stub::HELD_BUFFER, 0x3000));
    let attached = vmm.submit(&simple(CTX_ATTACH, 2, &[60, 0]));
    let again = vmm.submit(&simple(CTX_ATTACH, 2, &[60, 0]));
    let imported = vmm.submit(&submit(2, 0, 1, &one::<ImportMemory>(2, &request).finish()));
    // The others go on, and no answer of these comes.
    check_context(&mut vmm, 3);
    let release = vmm.submit(&submit(1, stub::RELEASE_RING, 2, &nop(1, 0)));
    let mut back: Vec<(u16, u32)> = (0..5)
        .map(|_| {
            let (head, response) = vmm.next_response();
            (head, kind(&response))
        })
        .collect();
    back.sort_unstable();
    let mut expected = [(made, OK), (attached, OK), (again, OK), (imported, OK), (release, OK)];
    expected.sort_unstable();
    assert_eq!(back, expected);
    let answer = decode::<ImportMemory>(&vmm, answers(2)).unwrap();
    assert_eq!((answer.handle.0, answer.size), (text(), 0x3000));
}

fn an_import_of_memory_that_never_comes_fails_and_the_context_goes_on() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 3);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::NO_BUFFER, 0x1000))), UNSPEC);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[60, 0]))), BAD_RESOURCE);
    assert_eq!(import(&mut vmm, 2, 60), Err(Status::BAD_RESOURCE));

    let request = ImportMemoryRequest { resource: ResourceId(61), ..Default::default() };
    let made = vmm.submit(&host_blob(1, 61, stub::HELD_BUFFER, 0x1000));
    let attached = vmm.submit(&simple(CTX_ATTACH, 2, &[61, 0]));
    let imported = vmm.submit(&submit(2, 0, 1, &one::<ImportMemory>(2, &request).finish()));
    // A context that ends while it waits, and then the one that it waits for.
    let other = vmm.submit(&simple(CTX_ATTACH, 3, &[61, 0]));
    let gone = vmm.submit(&header(CTX_DESTROY, 3));
    let end = vmm.submit(&header(CTX_DESTROY, 1));
    let mut back: Vec<(u16, u32)> = (0..6)
        .map(|_| {
            let (head, response) = vmm.next_response();
            (head, kind(&response))
        })
        .collect();
    back.sort_unstable();
    let mut expected = [
        (made, UNSPEC),
        (attached, BAD_RESOURCE),
        (imported, OK),
        (other, BAD_RESOURCE),
        (gone, OK),
        (end, OK),
    ];
    expected.sort_unstable();
    assert_eq!(back, expected);
    assert_eq!(decode::<ImportMemory>(&vmm, answers(2)).err(), Some(Status::BAD_RESOURCE));
    check_context(&mut vmm, 2);
}

/// Two contexts that import from each other while a third one takes its time would wait for each other for ever.
fn what_a_context_makes_does_not_wait_for_what_it_imports() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 3);
    let made = vmm.submit(&host_blob(3, 60, stub::HELD_BUFFER, 0x1000));
    let attached = [1, 2].map(|ctx| vmm.submit(&simple(CTX_ATTACH, ctx, &[60, 0])));
    for (ctx, blob) in [(1, 61), (2, 62)] {
        assert_eq!(kind(&vmm.command(&host_blob(ctx, blob, stub::GOOD_BUFFER, 0x2000))), OK);
    }
    for (ctx, blob) in [(1, 62), (2, 61)] {
        assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, ctx, &[blob, 0]))), OK);
    }
    assert_eq!(vmm.try_response(), None, "the third one has not answered");
    let release = vmm.submit(&submit(3, stub::RELEASE_RING, 2, &nop(3, 0)));
    let mut back: Vec<(u16, u32)> = (0..4)
        .map(|_| {
            let (head, response) = vmm.next_response();
            (head, kind(&response))
        })
        .collect();
    back.sort_unstable();
    let mut expected = [made, attached[0], attached[1], release].map(|head| (head, OK));
    expected.sort_unstable();
    assert_eq!(back, expected);
    for (ctx, blob) in [(1, 62), (2, 61)] {
        assert_eq!(import(&mut vmm, ctx, blob), Ok((text(), 0x2000)));
    }
}

/// The end of a process that is in a call of the kernel takes as long as the call.
fn an_import_does_not_wait_for_the_end_of_a_worker() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 2);
    let made = vmm.submit(&host_blob(1, 60, stub::HELD_BUFFER, 0x1000));
    let attached = vmm.submit(&simple(CTX_ATTACH, 2, &[60, 0]));
    let request = ImportMemoryRequest { resource: ResourceId(60), ..Default::default() };
    let imported = vmm.submit(&submit(2, 0, 1, &one::<ImportMemory>(2, &request).finish()));
    // Nobody ends the worker, or hears of its end, until the supervisor goes on.
    let supervisor = Pid::from_raw(daemon.supervisor() as i32);
    kill(supervisor, Signal::SIGSTOP).unwrap();
    let end = vmm.submit(&header(CTX_DESTROY, 1));
    let back = [(); 3].map(|()| {
        let (head, response) = vmm.next_response();
        (head, kind(&response))
    });
    assert_eq!(back, [(made, UNSPEC), (attached, BAD_RESOURCE), (imported, OK)]);
    assert_eq!(decode::<ImportMemory>(&vmm, answers(2)).err(), Some(Status::BAD_RESOURCE));
    check_context(&mut vmm, 2);
    kill(supervisor, Signal::SIGCONT).unwrap();
    let (head, response) = vmm.next_response();
    assert_eq!((head, kind(&response)), (end, OK));
}

fn memory_that_cannot_be_shared_is_for_its_context_alone() {
    let daemon = Daemon::start(&["--shmem-size", "1M"]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 2);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::NO_DMABUF, 0x1000))), OK);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0))), OK_MAP_INFO);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 1, &[60, 0]))), OK, "its own");
    // What another context could hold would count nowhere after the end of this one.
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[60, 0]))), BAD_RESOURCE);
    assert_eq!(import(&mut vmm, 2, 60), Err(Status::BAD_RESOURCE));
    // The other way round: for GPUs alone.
    assert_eq!(kind(&vmm.command(&host_blob(1, 61, stub::NO_CPU, 0x1000))), OK);
    assert_eq!(kind(&vmm.command(&map_blob(61, 0x4000))), BAD_RESOURCE);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[61, 0]))), OK);
    assert_eq!(import(&mut vmm, 2, 61), Ok((text(), 0x1000)));
}

fn the_memory_of_an_ended_context_is_the_importers() {
    let daemon = Daemon::start(&["--shmem-size", "1M"]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 3);
    for (blob, at) in [(60, 0x4000), (61, 0x8000)] {
        assert_eq!(kind(&vmm.command(&host_blob(1, blob, stub::GOOD_BUFFER, 0x2000))), OK);
        assert_eq!(kind(&vmm.command(&map_blob(blob, at))), OK_MAP_INFO);
    }
    for ctx in [2, 3] {
        assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, ctx, &[60, 0]))), OK);
    }
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 1))), OK);
    // What nobody else has is taken away.
    wait_for("the unmap", || vmm.maps.live.lock().unwrap().len() == 1);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[61, 0]))), BAD_RESOURCE);
    for ctx in [2, 3] {
        assert_eq!(vmm.read_window(0x4000, stub::HOST_TEXT.len()), stub::HOST_TEXT);
        assert_eq!(import(&mut vmm, ctx, 60), Ok((text(), 0x2000)), "{ctx}");
        // From one to the next; with the last one it goes too.
        assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, ctx))), OK);
    }
    wait_for("the unmap", || vmm.maps.live.lock().unwrap().is_empty());
    for blob in [60, 61] {
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[blob, 0]))), OK);
    }
}

fn tokens_open_pieces_of_memory() {
    let daemon = Daemon::start(&["--shmem-size", "1M"]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 2);
    let token = share(&mut vmm, 1, stub::GOOD_BUFFER, 0x2000, 0x3000);
    for wrong in [token ^ 1, token | 1 << 62, u64::MAX, 1 << 63] {
        assert_eq!(kind(&vmm.command(&by_token(2, 60, wrong, 0x1000))), BAD_PARAMETER, "{wrong:#x}");
        assert_eq!(import(&mut vmm, 2, 60), Err(Status::BAD_RESOURCE));
    }
    for size in [0x4000, 0x1800, 0, !0xfff] {
        assert_eq!(kind(&vmm.command(&by_token(2, 60, token, size))), BAD_PARAMETER, "{size:#x}");
    }
    // In another context, in several blobs, and in the one that shares it.
    for (ctx, blob, size) in [(2, 60, 0x3000), (2, 61, 0x1000), (1, 62, 0x3000)] {
        assert_eq!(kind(&vmm.command(&by_token(ctx, blob, token, size))), OK);
        assert_eq!(import(&mut vmm, ctx, blob), Ok((2, size)), "the second page");
        assert_eq!(kind(&vmm.command(&map_blob(blob, 0x8000))), OK_MAP_INFO);
        assert_eq!(vmm.read_window(0x8000, 8), 2u64.to_le_bytes());
        assert_eq!(kind(&vmm.command(&simple(UNMAP_BLOB, 0, &[blob, 0]))), OK);
    }
    // The blob is the context's own: it ends with it.
    assert_eq!(kind(&vmm.command(&map_blob(60, 0x8000))), OK_MAP_INFO);
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 2))), OK);
    wait_for("the unmap", || vmm.maps.live.lock().unwrap().is_empty());
    check_context(&mut vmm, 1);
    // A token is of its VM: another device knows nothing of it.
    let other = Daemon::start(&[]);
    let mut elsewhere = Vmm::connect(&other);
    open_context(&mut elsewhere, 1);
    assert_eq!(kind(&elsewhere.command(&by_token(1, 60, token, 0x1000))), BAD_PARAMETER);
}

fn what_a_token_opened_outlives_its_buffer() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 3);
    let free = |vmm: &mut Vmm, ctx, buffer| {
        let request = BufferRequest { handle: Handle::new(buffer, 1) };
        call::<FreeMemory>(vmm, ctx, &request).map(drop)
    };
    let unused = share(&mut vmm, 1, stub::NO_DMABUF, 0, 0x1000);
    let token = share(&mut vmm, 1, stub::GOOD_BUFFER, 0, 0x1000);
    let of_another = share(&mut vmm, 3, stub::GOOD_BUFFER, 0, 0x1000);
    assert_eq!(kind(&vmm.command(&by_token(2, 60, token, 0x1000))), OK);
    assert_eq!(kind(&vmm.command(&by_token(2, 61, of_another, 0x1000))), OK);
    for buffer in [stub::NO_DMABUF, stub::GOOD_BUFFER] {
        assert_eq!(free(&mut vmm, 1, buffer), Ok(()));
    }
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 3))), OK);
    for token in [unused, token, of_another] {
        assert_eq!(kind(&vmm.command(&by_token(2, 62, token, 0x1000))), BAD_PARAMETER);
    }
    for blob in [60, 61] {
        assert_eq!(import(&mut vmm, 2, blob), Ok((text(), 0x1000)));
    }
    // The stub has to hear once of each token that nothing is left of it, and of no other.
    for blob in [60, 61] {
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[blob, 0]))), OK);
    }
    check_context(&mut vmm, 1);
    check_context(&mut vmm, 2);
}

fn workers_that_share_nonsense_are_ended() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 9);
    let wrong = [
        ("no token", stub::NO_TOKEN, 0, 0x1000),
        ("no descriptor", stub::NO_FILE, 0, 0x1000),
        ("the guest's own memory", stub::SHARED_GUEST_RAM, 0, 0x1000),
        ("no size", stub::GOOD_BUFFER, 0, 0),
        ("half a page", stub::GOOD_BUFFER, 0, 0x800),
        ("an odd offset", stub::GOOD_BUFFER, 0x10, 0x1000),
    ];
    for (ctx, (what, buffer, offset, size)) in (1..).zip(wrong) {
        open_context(&mut vmm, ctx);
        let handle = Handle::new(buffer, 1);
        let answer = call::<ShareMemory>(&mut vmm, ctx, &ShareMemoryRequest { handle, offset, size });
        assert_eq!(answer.err(), Some(Status::WORKER_LOST), "{what}");
    }
    // More than a context may have.
    open_context(&mut vmm, 8);
    for _ in 0..limits::MAX_SHARES {
        share(&mut vmm, 8, stub::GOOD_BUFFER, 0, 0x1000);
    }
    let request = ShareMemoryRequest { handle: Handle::new(stub::GOOD_BUFFER, 1), offset: 0, size: 0x1000 };
    assert_eq!(call::<ShareMemory>(&mut vmm, 8, &request).err(), Some(Status::WORKER_LOST));
    check_context(&mut vmm, 9);
}

fn guest_memory_is_used_by_two_contexts() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 3);
    let at = SCRATCH + 0x10_0000;
    // As Linux has it: made without a context, then attached.
    assert_eq!(kind(&vmm.command(&guest_blob(0, 50, 0x1000, &[(at, 0x1000)]))), OK);
    for ctx in [1, 2] {
        assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, ctx, &[50, 0]))), OK);
        mark(&mut vmm, ctx, 50, u64::from(ctx) * 0x100);
        assert_eq!(vmm.read(at + u64::from(ctx) * 0x100, 16), stub::MARK);
        assert_eq!(kind(&vmm.command(&simple(CTX_DETACH, ctx, &[50, 0]))), OK);
        mark(&mut vmm, ctx, 50, u64::from(ctx) * 0x100 + 0x80);
    }
    assert_eq!(use_blob(&mut vmm, 3, 50, 0), Status::BAD_RESOURCE, "it was never attached");
    // The first one ends; the other goes on, and gives it to a further one.
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 1))), OK);
    mark(&mut vmm, 2, 50, 0x300);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 3, &[50, 0]))), OK);
    mark(&mut vmm, 3, 50, 0x400);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[50, 0]))), OK);
    for ctx in [2, 3] {
        assert_eq!(use_blob(&mut vmm, ctx, 50, 0), Status::BAD_RESOURCE);
    }
    // The pages come back when both have let go of them: one that does not is ended first.
    let kept = stub::KEPT_BLOB;
    assert_eq!(kind(&vmm.command(&guest_blob(2, kept, 0x1000, &[(at, 0x1000)]))), OK);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 3, &[kept, 0]))), OK);
    let head = vmm.submit(&simple(RESOURCE_UNREF, 0, &[kept, 0]));
    let destroyed = vmm.submit(&header(CTX_DESTROY, 2));
    assert_eq!(vmm.next_response().0, destroyed);
    assert_eq!(vmm.try_response(), None);
    let last = vmm.submit(&header(CTX_DESTROY, 3));
    let mut back = [vmm.next_response(), vmm.next_response()].map(|(head, response)| (head, kind(&response)));
    back.sort_unstable();
    let mut expected = [(head, OK), (last, OK)];
    expected.sort_unstable();
    assert_eq!(back, expected);
}

fn memory_that_outlives_its_context_counts_for_the_vm() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    contexts(&mut vmm, 2);
    let used = |vmm: &mut Vmm| {
        let answer = call::<AvailableMemory>(vmm, 2, &GpuRequest::default()).unwrap();
        answer.available
    };
    assert_eq!(used(&mut vmm), 2 * stub::OWN_VRAM);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x4000))), OK);
    assert_eq!(kind(&vmm.command(&host_blob(1, 61, stub::HELD_BUFFER + 100, 0x8000))), OK);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[60, 0]))), OK);
    let token = share(&mut vmm, 1, stub::NO_DMABUF, 0, 0x1000);
    share(&mut vmm, 1, stub::NO_BUFFER, 0, 0x1_0000);
    for blob in [62, 63] {
        assert_eq!(kind(&vmm.command(&by_token(2, blob, token, 0x1000))), OK);
    }
    // While its context lives, its worker counts it.
    assert_eq!(used(&mut vmm), 2 * stub::OWN_VRAM);
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 1))), OK);
    assert_eq!(used(&mut vmm), stub::OWN_VRAM + 0x5000, "what the other one holds, each buffer once");
    for (blob, left) in [(62, 0x5000), (60, 0x1000), (63, 0)] {
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[blob, 0]))), OK);
        assert_eq!(used(&mut vmm), stub::OWN_VRAM + left, "{blob}");
    }
    // A slot is used again, empty.
    for _ in 0..3 {
        open_context(&mut vmm, 3);
        assert_eq!(used(&mut vmm), 2 * stub::OWN_VRAM);
        assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 3))), OK);
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[answer_blob(3), 0]))), OK);
    }
}
