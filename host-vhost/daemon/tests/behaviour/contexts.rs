//! Contexts, frames, fences, and workers that misbehave.

use virtio_kfd_protocol::Status;
use virtio_kfd_protocol::version::{Capset, Features};
use zerocopy::FromBytes;

use crate::daemon::{Daemon, open_files, wait_for};
use crate::gpu::*;
use crate::stub;
use crate::vmm::{GPU_FEATURES, INDIRECT_DESC, Setup, Vmm};

crate::tests![
    a_context_from_capset_to_answer,
    what_is_no_compute_command_is_refused,
    rings_complete_on_their_own,
    a_worker_that_dies_takes_only_its_context,
    a_worker_that_misbehaves_is_ended,
    a_malformed_frame_ends_the_context,
    answers_go_to_blobs_of_the_context_only,
    frames_need_a_ring,
    the_number_of_contexts_is_bounded,
    contexts_come_and_go_without_a_trace,
    a_driver_without_blobs_gets_errors,
    processes_are_confined,
];

fn a_context_from_capset_to_answer() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    let info = vmm.command(&simple(GET_CAPSET_INFO, 0, &[0, 0]));
    assert_eq!(kind(&info), OK_CAPSET_INFO);
    assert_eq!(info[24..], [8, 0, 0, 0, 1, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(kind(&vmm.command(&simple(GET_CAPSET_INFO, 0, &[1, 0]))), BAD_PARAMETER);
    assert_eq!(kind(&vmm.command(&simple(GET_CAPSET, 0, &[4, 1]))), BAD_PARAMETER);
    assert_eq!(kind(&vmm.command(&simple(GET_CAPSET, 0, &[8, 2]))), BAD_PARAMETER);
    let capset = vmm.command(&simple(GET_CAPSET, 0, &[8, 1]));
    assert_eq!(kind(&capset), OK_CAPSET);
    let capset = Capset::read_from_bytes(&capset[24..]).unwrap();
    assert_eq!(capset, Capset::announce(Features::all(), 1));

    open_context(&mut vmm, 3);
    assert_eq!(run(&mut vmm, 3, &hello(3, 0)), [Status::OK]);
    check_context(&mut vmm, 3);
    for (command, expected) in [(CTX_ATTACH, OK), (CTX_DETACH, OK)] {
        assert_eq!(kind(&vmm.command(&simple(command, 3, &[answer_blob(3), 0]))), expected);
        assert_eq!(kind(&vmm.command(&simple(command, 3, &[77, 0]))), BAD_RESOURCE);
        assert_eq!(kind(&vmm.command(&simple(command, 4, &[answer_blob(3), 0]))), BAD_CONTEXT);
    }
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[answer_blob(3), 0]))), OK);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[answer_blob(3), 0]))), BAD_RESOURCE);
    assert_eq!(daemon.workers().len(), 1);
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 3))), OK);
    assert_eq!(daemon.workers().len(), 0, "the worker is gone before the guest hears of it");
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 3))), BAD_CONTEXT);
}

fn what_is_no_compute_command_is_refused() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    // GET_DISPLAY_INFO to SET_SCANOUT_BLOB and CREATE_3D, TRANSFER_*_3D, and numbers of nobody.
    let ours = [RESOURCE_UNREF, GET_CAPSET_INFO, GET_CAPSET, CREATE_BLOB];
    let numbers = (GET_DISPLAY_INFO..=0x10d).chain(0x204..=0x206).chain([0, 0x20a, 0x300, 0x1100, u32::MAX]);
    for number in numbers.filter(|number| !ours.contains(number)) {
        let mut command = header(number, 0);
        command.resize(128, 0xff);
        let response = vmm.command(&command);
        assert_eq!((kind(&response), response.len()), (UNSPEC, 24), "{number:#x}");
    }
    // Contexts that are not for this capset: 0 is what a driver sends for a process that asks for nothing.
    for capset in [0, 1, 2, 9] {
        assert_eq!(kind(&vmm.command(&ctx_create(1, capset))), BAD_PARAMETER, "{capset}");
    }
    assert_eq!(kind(&vmm.command(&ctx_create(0, 8))), BAD_CONTEXT);
    open_context(&mut vmm, 1);
    assert_eq!(kind(&vmm.command(&ctx_create(1, 8))), BAD_CONTEXT);
    check_context(&mut vmm, 1);
}

fn rings_complete_on_their_own() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    // On the held ring two frames wait; rings 0 and 5 and the other context go on meanwhile.
    let held = [
        vmm.submit(&submit(1, stub::HELD_RING, 1, &nop(1, 0x1000))),
        vmm.submit(&submit(1, stub::HELD_RING, 2, &nop(1, 0x2000))),
    ];
    for (ctx, ring, fence) in [(1, 0, 3), (1, 5, 4), (2, 0, 5), (2, 5, 6)] {
        let response = vmm.command(&submit(ctx, ring, fence, &nop(ctx, 0)));
        assert_eq!(kind(&response), OK);
        // FENCE and RING_IDX, the fence's number, the context, the ring.
        assert_eq!(response, fenced(OK, 3, fence, ctx, ring));
    }
    assert_eq!(vmm.try_response(), None);
    let release = vmm.submit(&submit(1, stub::RELEASE_RING, 7, &nop(1, 0x3000)));
    let order: Vec<(u16, u64)> = (0..3)
        .map(|_| {
            let (head, response) = vmm.next_response();
            (head, fence_of(&response))
        })
        .collect();
    assert_eq!(order, [(release, 7), (held[0], 1), (held[1], 2)]);
    assert_eq!(statuses(&vmm, answers(1) + 0x2000), [Status::OK]);
}

fn a_worker_that_dies_takes_only_its_context() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    let waiting = vmm.submit(&submit(1, stub::HELD_RING, 9, &nop(1, 0x1000)));
    let dying = vmm.submit(&submit(1, 0, 10, &event(1, stub::DIE, 0)));
    let mut back: Vec<u16> = (0..2).map(|_| vmm.next_response().0).collect();
    back.sort_unstable();
    assert_eq!(back, [waiting, dying]);
    assert_eq!(statuses(&vmm, answers(1) + 0x1000), [Status::WORKER_LOST]);
    assert_eq!(statuses(&vmm, answers(1)), [Status::WORKER_LOST; 2]);
    // Later frames are answered by the device.
    assert_eq!(run(&mut vmm, 1, &nop(1, 0)), [Status::WORKER_LOST]);
    assert_eq!(kind(&vmm.command(&guest_blob(1, 50, 4096, &[(answers(1), 4096)]))), BAD_CONTEXT);
    check_context(&mut vmm, 2);
    // The guest cleans up and its context's number is used again.
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[answer_blob(1), 0]))), OK);
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 1))), OK);
    open_context(&mut vmm, 1);
    check_context(&mut vmm, 1);
}

fn a_worker_that_misbehaves_is_ended() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 9);
    let ways = [stub::BABBLE, stub::WRONG_TICKET, stub::LARGE_ANSWER, stub::CLOSE, stub::READY_AGAIN];
    for (ctx, how) in (1..).zip(ways) {
        open_context(&mut vmm, ctx);
        assert_eq!(run(&mut vmm, ctx, &event(ctx, how, 0)), [Status::WORKER_LOST; 2], "{how}");
        assert_eq!(run(&mut vmm, ctx, &nop(ctx, 0)), [Status::WORKER_LOST], "{how}");
        check_context(&mut vmm, 9);
    }
    wait_for("the end of the workers", || daemon.workers().len() == 1);
}

fn a_malformed_frame_ends_the_context() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 9);
    let good = nop(1, 0);
    let mut wrong_magic = good.clone();
    wrong_magic[0] ^= 1;
    let mut too_long = good.clone();
    too_long.extend([0; 8]);
    for bytes in [&[][..], &good[..40], &wrong_magic, &too_long] {
        open_context(&mut vmm, 1);
        assert_eq!(kind(&vmm.command(&submit(1, 0, 5, bytes))), BAD_PARAMETER);
        assert_eq!(run(&mut vmm, 1, &good), [Status::WORKER_LOST]);
        check_context(&mut vmm, 9);
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[answer_blob(1), 0]))), OK);
        assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 1))), OK);
    }
    // More than the command holds is the driver's fault, not the process's.
    open_context(&mut vmm, 1);
    let mut command = submit(1, 0, 5, &good);
    command[24..28].copy_from_slice(&(good.len() as u32 + 1).to_le_bytes());
    assert_eq!(kind(&vmm.command(&command)), BAD_PARAMETER);
    check_context(&mut vmm, 1);
    assert_eq!(kind(&vmm.command(&submit(5, 0, 5, &good))), BAD_CONTEXT);
}

fn answers_go_to_blobs_of_the_context_only() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x1000))), OK);
    let at = |blob, offset| {
        let mut builder = frame(blob, offset);
        builder.push::<virtio_kfd_protocol::calls::Nop>(&virtio_kfd_protocol::Nothing {}, &[], 0).unwrap();
        builder.finish()
    };
    for (blob, offset, expected) in [
        (answer_blob(2), 0, BAD_RESOURCE),
        (77, 0, BAD_RESOURCE),
        (60, 0, BAD_RESOURCE),
        (answer_blob(1), ANSWER_BYTES - 0x3f8, BAD_PARAMETER),
        (answer_blob(1), u64::MAX - 7, BAD_PARAMETER),
        (answer_blob(1), ANSWER_BYTES - 0x400, OK),
    ] {
        let response = vmm.command(&submit(1, 0, 1, &at(blob, offset)));
        assert_eq!(kind(&response), expected, "blob {blob} at {offset:#x}");
    }
    check_context(&mut vmm, 1);
    check_context(&mut vmm, 2);
}

fn frames_need_a_ring() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    let frame = nop(1, 0);
    let mut no_ring = submit(1, 0, 1, &frame);
    no_ring[4] = FENCE as u8;
    assert_eq!(kind(&vmm.command(&no_ring)), BAD_PARAMETER);
    assert_eq!(kind(&vmm.command(&submit(1, 64, 1, &frame))), BAD_PARAMETER);
    assert_eq!(kind(&vmm.command(&submit(1, 61, 1, &frame))), OK);
}

fn the_number_of_contexts_is_bounded() {
    let daemon = Daemon::start(&["--max-contexts", "3"]);
    let mut vmm = Vmm::connect(&daemon);
    for ctx in 1..=3 {
        open_context(&mut vmm, ctx);
    }
    assert_eq!(kind(&vmm.command(&ctx_create(4, 8))), OUT_OF_MEMORY);
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 2))), OK);
    open_context(&mut vmm, 4);
    check_context(&mut vmm, 4);
}

fn contexts_come_and_go_without_a_trace() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 9);
    let mut files = None;
    for round in 0..40 {
        open_context(&mut vmm, 1);
        assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x2000))), OK);
        assert_eq!(kind(&vmm.command(&map_blob(60, 0x4000))), OK_MAP_INFO);
        check_context(&mut vmm, 1);
        // In every other round the context goes first, as when a process is killed.
        let mut last = vec![
            header(CTX_DESTROY, 1),
            simple(UNMAP_BLOB, 0, &[60, 0]),
            simple(RESOURCE_UNREF, 0, &[60, 0]),
            simple(RESOURCE_UNREF, 0, &[answer_blob(1), 0]),
        ];
        if round % 2 == 0 {
            last.rotate_left(1);
        }
        for command in last {
            assert_eq!(kind(&vmm.command(&command)), OK);
        }
        let now = open_files(daemon.device());
        assert_eq!(*files.get_or_insert(now), now, "open files of the device in round {round}");
    }
    assert_eq!(daemon.workers().len(), 1);
    check_context(&mut vmm, 9);
}

fn a_driver_without_blobs_gets_errors() {
    let daemon = Daemon::start(&[]);
    for missing in [1u64, 1 << 3, 1 << 4] {
        let setup = Setup { features: (GPU_FEATURES | INDIRECT_DESC) & !missing, ..Setup::default() };
        let mut vmm = Vmm::set_up(daemon.connect(), setup);
        assert_eq!(kind(&vmm.command(&ctx_create(1, 8))), UNSPEC);
        assert_eq!(kind(&vmm.command(&simple(GET_CAPSET_INFO, 0, &[0, 0]))), OK_CAPSET_INFO);
        assert_eq!(daemon.workers().len(), 0);
    }
}

fn processes_are_confined() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    for (who, pid) in [("supervisor", daemon.child.id()), ("device", daemon.device())] {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        // proc(5): mode 2 is a filter; all capability sets that give anything are empty.
        assert_eq!(field("Seccomp:"), "2", "{who}");
        assert_eq!(field("NoNewPrivs:"), "1", "{who}");
        for set in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
            assert_eq!(field(set), "0000000000000000", "{who} {set}");
        }
    }
}
