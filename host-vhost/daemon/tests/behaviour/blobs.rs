//! Blobs of guest and host memory, and the window.

use virtio_kfd_protocol::calls::AllocMemory;
use virtio_kfd_protocol::{AllocMemoryRequest, ResourceId, Status};

use crate::daemon::{Daemon, wait_for};
use crate::gpu::*;
use crate::stub;
use crate::vmm::{HIGH, HIGH_SIZE, LOW_SIZE, SCRATCH, Setup, Vmm, WINDOW};

crate::tests![
    workers_reach_the_guest_memory_of_a_blob,
    guest_memory_goes_to_the_context_it_is_attached_to,
    lists_of_guest_memory_are_checked,
    a_million_entries_are_refused_without_a_copy,
    blobs_of_more_than_4_gib,
    host_memory_is_seen_through_the_window,
    maps_are_bounded_and_apart,
    host_memory_that_cannot_be_had,
    commands_wait_for_the_memory_they_need,
    without_a_window_there_are_no_maps,
    a_worker_that_keeps_a_blob_is_ended,
];

/// Has the stub write into a blob.
pub fn mark(vmm: &mut Vmm, ctx: u32, blob: u32, offset: u64) {
    assert_eq!(use_blob(vmm, ctx, blob, offset), Status::OK);
}

/// As [`mark`]; what the stub answers.
pub fn use_blob(vmm: &mut Vmm, ctx: u32, blob: u32, offset: u64) -> Status {
    let mut builder = frame(answer_blob(ctx), 0);
    let request =
        AllocMemoryRequest { resource: ResourceId(blob), resource_offset: offset, ..Default::default() };
    builder.push::<AllocMemory>(&request, &[], 0).unwrap();
    run(vmm, ctx, &builder.finish())[0]
}

fn workers_reach_the_guest_memory_of_a_blob() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    // Three runs, after the first two entries are merged: the end of low memory, high memory, low memory.
    let entries =
        [(LOW_SIZE - 0x3000, 0x1000), (LOW_SIZE - 0x2000, 0x2000), (HIGH, 0x1000), (SCRATCH, 0x1000)];
    assert_eq!(kind(&vmm.command(&guest_blob(1, 5, 0x5000, &entries))), OK);
    for (offset, address) in [
        (0x0, LOW_SIZE - 0x3000),
        (0x2ff0, LOW_SIZE - 0x10),
        (0x3100, HIGH + 0x100),
        (0x4ff0, SCRATCH + 0xff0),
    ] {
        mark(&mut vmm, 1, 5, offset);
        assert_eq!(vmm.read(address, 16), stub::MARK);
    }
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[5, 0]))), OK);
}

fn guest_memory_goes_to_the_context_it_is_attached_to() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    let page = [(SCRATCH + 0x10_0000, 0x1000)];
    // Linux's order: no context in the command that makes it (virtio_gpu_ioctl.c, verify_blob), then the attach.
    assert_eq!(kind(&vmm.command(&guest_blob(0, 5, 0x1000, &page))), OK);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 1, &[5, 0]))), OK);
    mark(&mut vmm, 1, 5, 0x40);
    assert_eq!(vmm.read(SCRATCH + 0x10_0040, 16), stub::MARK);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 3, &[5, 0]))), BAD_CONTEXT);
    // Closing the handle takes nothing away; the memory may still be mapped.
    assert_eq!(kind(&vmm.command(&simple(CTX_DETACH, 1, &[5, 0]))), OK);
    mark(&mut vmm, 1, 5, 0x80);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[5, 0]))), OK);

    // A process whose context is lost makes blobs all the same: they do not use up those of others.
    assert_eq!(run(&mut vmm, 2, &event(2, stub::DIE, 0)), [Status::WORKER_LOST; 2]);
    for blob in 2000..2600 {
        assert_eq!(kind(&vmm.command(&guest_blob(0, blob, 0x1000, &page))), OK, "{blob}");
        assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[blob, 0]))), BAD_CONTEXT);
    }
    assert_eq!(kind(&vmm.command(&guest_blob(0, 5, 0x1000, &page))), OK);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 1, &[5, 0]))), OK);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[2000, 0]))), OK);
    // Blobs that nobody attaches are few.
    let made = (3000..3600).filter(|blob| kind(&vmm.command(&guest_blob(0, *blob, 0x1000, &page))) == OK);
    assert_eq!(made.count(), 256);
    check_context(&mut vmm, 1);
}

fn lists_of_guest_memory_are_checked() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    let page = [(SCRATCH, 0x1000)];
    let bad: &[(&str, Vec<u8>)] = &[
        ("no entries", create_blob(1, 5, 1, 0, 0x1000, 0, &[])),
        ("one entry that is missing", create_blob(1, 5, 1, 0, 0x1000, 1, &[])),
        ("one entry too few", create_blob(1, 5, 1, 0, 0x2000, 2, &page)),
        ("2^32 - 1 entries", create_blob(1, 5, 1, 0, 0x1000, u32::MAX, &page)),
        ("65536 entries", create_blob(1, 5, 1, 0, 0x1000, 65536, &page)),
        ("fewer bytes than the blob", guest_blob(1, 5, 0x2000, &page)),
        ("size 0", guest_blob(1, 5, 0, &page)),
        ("the last page and more", guest_blob(1, 5, 0x1000, &[(HIGH + HIGH_SIZE - 0x1000, 0x2000)])),
        ("a hole", guest_blob(1, 5, 0x1000, &[(LOW_SIZE, 0x1000)])),
        ("the window", guest_blob(1, 5, 0x1000, &[(WINDOW, 0x1000)])),
        ("the end of all addresses", guest_blob(1, 5, 0x1000, &[(u64::MAX - 0xfff, 0x1000)])),
        ("beyond all addresses", guest_blob(1, 5, 0x1000, &[(u64::MAX - 0xfff, 0x2000)])),
        ("an address inside a page", guest_blob(1, 5, 0x1000, &[(SCRATCH + 8, 0x1000)])),
        ("half a page", guest_blob(1, 5, 0x800, &[(SCRATCH, 0x800)])),
        ("an empty entry", guest_blob(1, 5, 0x1000, &[(SCRATCH, 0x1000), (SCRATCH, 0)])),
        ("HOST3D_GUEST", create_blob(1, 5, 3, 0, 0x1000, 1, &page)),
        ("HOST3D with entries", create_blob(1, 5, 2, 1, 0x1000, 1, &page)),
        ("HOST3D, half a page", create_blob(1, 5, 2, 1, 0x800, 0, &[])),
        ("blob_mem 0", create_blob(1, 5, 0, 0, 0x1000, 1, &page)),
    ];
    for (what, command) in bad {
        assert_eq!(kind(&vmm.command(command)), BAD_PARAMETER, "{what}");
        // Nothing was left behind: the id is free.
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[5, 0]))), BAD_RESOURCE, "{what}");
    }
    assert_eq!(kind(&vmm.command(&guest_blob(1, 0, 0x1000, &page))), BAD_RESOURCE);
    assert_eq!(kind(&vmm.command(&guest_blob(1, answer_blob(1), 0x1000, &page))), BAD_RESOURCE);
    assert_eq!(kind(&vmm.command(&guest_blob(2, 5, 0x1000, &page))), BAD_CONTEXT);
    assert_eq!(kind(&vmm.command(&host_blob(0, 5, stub::GOOD_BUFFER, 0x1000))), BAD_CONTEXT);
    assert_eq!(kind(&vmm.command(&guest_blob(1, 5, u64::MAX, &page))), BAD_PARAMETER);
    // Cut at every length.
    let whole = guest_blob(1, 5, 0x1000, &page);
    for len in 24..whole.len() {
        assert_eq!(kind(&vmm.command(&whole[..len])), BAD_PARAMETER, "{len}");
    }
    assert_eq!(kind(&vmm.command(&whole)), OK);
    check_context(&mut vmm, 1);
}

/// Most memory that the device process had so far, in KiB.
fn peak_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn a_million_entries_are_refused_without_a_copy() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    // Filled first: what the device reads of guest memory counts as its memory too.
    let list = SCRATCH + 0x10_0000;
    let entries = ((LOW_SIZE - list - 56) / 16) as u32;
    let mut command = create_blob(1, 5, 1, 0, 0x1000, entries, &[]);
    for index in 0..u64::from(entries) {
        // No two neighbours, so that nothing can be merged.
        command.extend((SCRATCH + index % 2 * 0x2000).to_le_bytes());
        command.extend(0x1000u64.to_le_bytes());
    }
    vmm.write(list, &command);
    let before = peak_memory(daemon.device());
    let head = vmm.submit_at(list, command.len() as u32);
    let (back, response) = vmm.next_response();
    assert_eq!((back, kind(&response)), (head, OUT_OF_MEMORY), "{entries} entries");
    let grown = peak_memory(daemon.device()) - before;
    assert!(grown < 16 * 1024, "{grown} KiB for a list of {} KiB", command.len() / 1024);

    // A list of as many runs as are allowed works, and takes more than one message to the worker.
    let most = 32 * 1024u32;
    vmm.write(list + 36, &most.to_le_bytes());
    vmm.submit_at(list, 56 + most * 16);
    assert_eq!(kind(&vmm.next_response().1), OK);
    mark(&mut vmm, 1, 5, u64::from(most - 1) * 0x1000);
    assert_eq!(vmm.read(SCRATCH + 0x2000, 16), stub::MARK);
    // And another one is more than the context may have, which its worker hears, since Linux does not look at
    // answers and attaches the blob: as Linux does it, and again when the number has had another blob meanwhile.
    vmm.write(list + 16, &0u32.to_le_bytes());
    vmm.write(list + 24, &6u32.to_le_bytes());
    for entries in [most, entries] {
        vmm.write(list + 36, &entries.to_le_bytes());
        vmm.submit_at(list, 56 + entries * 16);
        let made = kind(&vmm.next_response().1);
        assert_eq!(made, if entries == most { OK } else { OUT_OF_MEMORY });
        assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 1, &[6, 0]))), OUT_OF_MEMORY);
        assert_eq!(use_blob(&mut vmm, 1, 6, 0), Status::LIMIT);
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[6, 0]))), OK);
        assert_eq!(kind(&vmm.command(&guest_blob(1, 6, 0x1000, &[(SCRATCH, 0x1000)]))), OK);
        assert_eq!(use_blob(&mut vmm, 1, 6, 0), Status::OK);
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[6, 0]))), OK);
    }
}

fn blobs_of_more_than_4_gib() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    // The same 16 MiB again and again, and one page more, which is another one.
    let mut entries = vec![(HIGH, HIGH_SIZE as u32); 320];
    entries.push((SCRATCH, 0x1000));
    let size = 320 * HIGH_SIZE + 0x1000;
    assert!(size > 5 << 30);
    assert_eq!(kind(&vmm.command(&guest_blob(1, 5, size, &entries))), OK);
    mark(&mut vmm, 1, 5, size - 0x40);
    assert_eq!(vmm.read(SCRATCH + 0x1000 - 0x40, 16), stub::MARK);
    mark(&mut vmm, 1, 5, (4 << 30) + 0x123_4560);
    assert_eq!(vmm.read(HIGH + ((4 << 30) + 0x123_4560) % HIGH_SIZE, 16), stub::MARK);
}

fn host_memory_is_seen_through_the_window() {
    let daemon = Daemon::start(&["--shmem-size", "1M"]);
    let mut vmm = Vmm::connect(&daemon);
    assert_eq!(vmm.window, 1 << 20);
    open_context(&mut vmm, 1);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x2000))), OK);
    let response = vmm.command(&map_blob(60, 0x8000));
    assert_eq!(kind(&response), OK_MAP_INFO);
    // VIRTIO_GPU_MAP_CACHE_WC, as the worker said.
    assert_eq!(response[24..], [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(vmm.read_window(0x8000, stub::HOST_TEXT.len()), stub::HOST_TEXT);
    // The VMM has sent the map back as a region; it is not guest memory all the same.
    let command = guest_blob(1, 5, 0x1000, &[(WINDOW + 0x8000, 0x1000)]);
    assert_eq!(kind(&vmm.command(&command)), BAD_PARAMETER);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0x10000))), BAD_PARAMETER, "mapped already");
    assert_eq!(kind(&vmm.command(&simple(UNMAP_BLOB, 0, &[60, 0]))), OK);
    assert!(vmm.maps.live.lock().unwrap().is_empty());
    assert_eq!(kind(&vmm.command(&simple(UNMAP_BLOB, 0, &[60, 0]))), BAD_PARAMETER);
    // Unreferenced while mapped: unmapped first.
    assert_eq!(kind(&vmm.command(&map_blob(60, 0))), OK_MAP_INFO);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[60, 0]))), OK);
    assert!(vmm.maps.live.lock().unwrap().is_empty());
    check_context(&mut vmm, 1);
}

fn maps_are_bounded_and_apart() {
    let daemon = Daemon::start(&["--shmem-size", "16M"]);
    let mut vmm = Vmm::connect(&daemon);
    for ctx in 1..=3 {
        open_context(&mut vmm, ctx);
    }
    // 480, of which two regions are the guest's own: each context may have as many as it leaves to the next ones.
    let mut mapped = 0;
    for (ctx, share) in [(1, 239), (2, 120), (3, 60)] {
        let mut own = 0;
        for blob in ctx * 1000 + 1000..ctx * 1000 + 1250 {
            assert_eq!(kind(&vmm.command(&host_blob(ctx, blob, stub::GOOD_BUFFER, 0x1000))), OK);
            match kind(&vmm.command(&map_blob(blob, (mapped + own) * 0x1000))) {
                OK_MAP_INFO => own += 1,
                other => assert_eq!(other, OUT_OF_MEMORY),
            }
        }
        assert_eq!(own, share, "context {ctx}");
        mapped += own;
    }
    assert_eq!(vmm.maps.live.lock().unwrap().len() as u64, mapped);
    // So it is with blobs of host memory, 1024 in all: 274 are left.
    let more =
        (5000..).find(|blob| kind(&vmm.command(&host_blob(1, *blob, stub::GOOD_BUFFER, 0x1000))) != OK);
    assert_eq!(more, Some(5012), "a context that has 250 may have 262");
    // One goes, another one fits; where there is something already, nothing fits.
    assert_eq!(kind(&vmm.command(&simple(UNMAP_BLOB, 0, &[4000, 0]))), OK);
    assert_eq!(kind(&vmm.command(&map_blob(4249, 0x1000))), BAD_PARAMETER);
    assert_eq!(kind(&vmm.command(&map_blob(4249, 0x801))), BAD_PARAMETER);
    assert_eq!(kind(&vmm.command(&map_blob(4249, 16 << 20))), BAD_PARAMETER);
    assert_eq!(kind(&vmm.command(&map_blob(4249, u64::MAX - 0xfff))), BAD_PARAMETER);
    assert_eq!(kind(&vmm.command(&map_blob(4249, 359 * 0x1000))), OK_MAP_INFO);
    assert_eq!(kind(&vmm.command(&map_blob(9999, 0))), BAD_RESOURCE);
    assert_eq!(kind(&vmm.command(&map_blob(answer_blob(1), 0x90_0000))), BAD_RESOURCE);
    // The contexts end: the maps go, the blobs when the guest says so.
    for ctx in 1..=3 {
        assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, ctx))), OK);
        for blob in ctx * 1000 + 1000..ctx * 1000 + 1250 {
            assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[blob, 0]))), OK);
        }
    }
    assert!(vmm.maps.live.lock().unwrap().is_empty());
}

fn host_memory_that_cannot_be_had() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::NO_BUFFER, 0x1000))), UNSPEC);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0))), BAD_RESOURCE);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[60, 0]))), OK);
    check_context(&mut vmm, 1);
    // Workers that export the wrong thing are ended.
    for (ctx, buffer) in [(2, stub::SMALL_BUFFER), (3, stub::GUEST_RAM)] {
        open_context(&mut vmm, ctx);
        assert_eq!(kind(&vmm.command(&host_blob(ctx, 60 + ctx, buffer, 0x2000))), UNSPEC);
        assert_eq!(run(&mut vmm, ctx, &nop(ctx, 0)), [Status::WORKER_LOST]);
    }
    wait_for("the end of the workers", || daemon.workers().len() == 1);
    check_context(&mut vmm, 1);
}

fn commands_wait_for_the_memory_they_need() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    // All at once: the context's worker does not even run yet when the map comes.
    let commands = [
        (ctx_create(1, 8), OK),
        (host_blob(1, 60, stub::GOOD_BUFFER, 0x1000), OK),
        (map_blob(60, 0x3000), OK_MAP_INFO),
        (simple(UNMAP_BLOB, 0, &[60, 0]), OK),
        (map_blob(60, 0x5000), OK_MAP_INFO),
        (simple(RESOURCE_UNREF, 0, &[60, 0]), OK),
        (map_blob(60, 0x6000), BAD_RESOURCE),
    ];
    let mut expected: Vec<(u16, u32)> =
        commands.iter().map(|(command, kind)| (vmm.submit(command), *kind)).collect();
    let mut got: Vec<(u16, u32)> = commands
        .iter()
        .map(|_| {
            let (head, response) = vmm.next_response();
            (head, kind(&response))
        })
        .collect();
    got.sort_unstable();
    expected.sort_unstable();
    assert_eq!(got, expected);
    assert!(vmm.maps.live.lock().unwrap().is_empty());
}

fn without_a_window_there_are_no_maps() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::set_up(daemon.connect(), Setup { window: false, ..Setup::default() });
    let capset = vmm.command(&simple(GET_CAPSET, 0, &[8, 1]));
    // Features: GUEST_MEMORY and EXCEPTIONS.
    assert_eq!(capset[24 + 16..24 + 24], [6, 0, 0, 0, 0, 0, 0, 0]);
    open_context(&mut vmm, 1);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x1000))), OK);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0))), UNSPEC);
    check_context(&mut vmm, 1);
}

/// The guest gets its pages back in any case, but not before the worker that has them mapped is gone.
fn a_worker_that_keeps_a_blob_is_ended() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    let worker = daemon.workers().len();
    assert_eq!(worker, 2);
    assert_eq!(kind(&vmm.command(&guest_blob(1, stub::KEPT_BLOB, 0x1000, &[(SCRATCH, 0x1000)]))), OK);
    let head = vmm.submit(&simple(RESOURCE_UNREF, 0, &[stub::KEPT_BLOB, 0]));
    // The other context goes on meanwhile, and this one too.
    let other = vmm.submit(&submit(2, 0, 1, &nop(2, 0)));
    assert_eq!(vmm.next_response().0, other);
    assert_eq!(daemon.workers().len(), 2);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[stub::KEPT_BLOB, 0]))), BAD_RESOURCE);
    let (back, response) = vmm.next_response();
    assert_eq!((back, kind(&response)), (head, OK));
    assert_eq!(daemon.workers().len(), 1);
    assert_eq!(run(&mut vmm, 1, &nop(1, 0)), [Status::WORKER_LOST]);
    check_context(&mut vmm, 2);
}
