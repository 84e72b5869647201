//! The main channel: tables of memory, stops, resets, disconnects.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::Ordering;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtio_kfd_protocol::Status;

use crate::blobs::{mark, use_blob};
use crate::daemon::{Daemon, open_files, wait_for};
use crate::gpu::*;
use crate::stub;
use crate::vmm::*;

crate::tests![
    negotiations_do_not_fill_the_log,
    what_is_offered,
    a_table_that_comes_again_keeps_everything,
    memory_that_is_added_and_taken_away,
    memory_under_a_blob_that_is_taken_away_is_fenced_off,
    wrong_changes_of_the_memory_are_refused,
    a_pause_gives_everything_back,
    a_reset_of_the_guest_gives_everything_back,
    a_vmm_that_keeps_its_maps_is_told_to_unmap,
    a_reset_message_gives_everything_back,
    a_ring_starts_from_its_base,
    after_a_disconnect_the_next_one_starts_anew,
    many_connections_leave_nothing_behind,
    a_device_that_is_killed_takes_its_workers_along,
    garbage_on_the_main_channel,
];

fn what_is_offered() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    let features = vmm.frontend.get_features().unwrap();
    // EDID (1), RESOURCE_UUID (2) and BLOB_ALIGNMENT (5) are not served.
    assert_eq!(features & 0x3f, 0b011001);
    let protocol = vmm.frontend.get_protocol_features().unwrap();
    assert!(!protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD));
    let slots = vmm.frontend.get_max_mem_slots().unwrap();
    assert!(slots >= 480, "{slots}");
    assert_eq!(vmm.window, 16 << 30);
    // struct virtio_gpu_config, and what QEMU reads of it with config_size=20.
    let flags = VhostUserConfigFlags::empty();
    let (_, config) = vmm.frontend.get_config(0, 20, flags, &[0; 20]).unwrap();
    assert_eq!(config, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let (_, config) = vmm.frontend.get_config(12, 4, flags, &[0; 4]).unwrap();
    assert_eq!(config, [1, 0, 0, 0]);
    vmm.frontend.set_config(4, flags, &[1, 0, 0, 0]).unwrap();
    assert_eq!(kind(&vmm.command(&header(GET_DISPLAY_INFO, 0))), UNSPEC);
}

fn a_table_that_comes_again_keeps_everything() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    let files = open_files(daemon.device());
    for round in 0..200 {
        vmm.send_table();
        if round % 2 == 0 {
            vmm.send_addresses();
        }
        check_context(&mut vmm, 1);
    }
    assert_eq!(open_files(daemon.device()), files);
    assert_eq!(daemon.workers().len(), 1);
}

/// A piece of memory beyond all others.
const MORE: u64 = 8 << 30;
const MORE_SIZE: u64 = 4 << 20;

fn more(file: &std::fs::File) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: MORE,
        memory_size: MORE_SIZE,
        userspace_addr: 0x6000_0000_0000,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }
}

fn memory_that_is_added_and_taken_away() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    let file = memfd(MORE_SIZE);
    let blob = guest_blob(1, 5, 0x1000, &[(MORE, 0x1000)]);
    for _ in 0..5 {
        assert_eq!(kind(&vmm.command(&blob)), BAD_PARAMETER);
        vmm.frontend.add_mem_region(&more(&file)).unwrap();
        assert_eq!(kind(&vmm.command(&blob)), OK);
        check_context(&mut vmm, 1);
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[5, 0]))), OK);
        vmm.frontend.remove_mem_region(&more(&file)).unwrap();
        check_context(&mut vmm, 1);
    }
}

fn memory_under_a_blob_that_is_taken_away_is_fenced_off() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    let files = open_files(daemon.device());
    let file = memfd(MORE_SIZE);
    vmm.frontend.add_mem_region(&more(&file)).unwrap();
    // One that lies there, and one with a page on each side.
    assert_eq!(kind(&vmm.command(&guest_blob(1, 5, 0x1000, &[(MORE, 0x1000)]))), OK);
    let both = [(SCRATCH, 0x1000), (MORE + 0x1000, 0x1000)];
    assert_eq!(kind(&vmm.command(&guest_blob(1, 6, 0x2000, &both))), OK);
    mark(&mut vmm, 1, 5, 0);
    mark(&mut vmm, 1, 6, 0x1000);
    vmm.frontend.remove_mem_region(&more(&file)).unwrap();
    // The stub has lost the region before it hears of any later frame, as the worker has.
    assert_eq!(use_blob(&mut vmm, 1, 5, 0), Status::BAD_RESOURCE);
    assert_eq!(use_blob(&mut vmm, 1, 6, 0x1000), Status::BAD_RESOURCE);
    check_context(&mut vmm, 1);
    check_context(&mut vmm, 2);
    // Nor can it be had by another context, or anew.
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[6, 0]))), BAD_RESOURCE);
    assert_eq!(kind(&vmm.command(&guest_blob(1, 7, 0x1000, &[(MORE, 0x1000)]))), BAD_PARAMETER);
    for blob in [5, 6] {
        assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[blob, 0]))), OK);
    }
    assert_eq!(open_files(daemon.device()), files);
}

/// A message of a front-end with descriptors, past the crate, which sends no wrong ones. Returns the acknowledgement; none where
/// the device breaks off.
fn raw(
    stream: &UnixStream,
    request: u32,
    region: &VhostUserMemoryRegionInfo,
    files: &[&std::fs::File],
) -> Option<u64> {
    use std::io::Read;
    // Version 1, an answer is asked for (VhostUserMsg and VhostUserMemRegMsg, docs/interop/vhost-user.rst).
    let mut bytes: Vec<u8> = [request, 1 | 1 << 3, 40].iter().flat_map(|word| word.to_le_bytes()).collect();
    let body = [0, region.guest_phys_addr, region.memory_size, region.userspace_addr, region.mmap_offset];
    bytes.extend(body.iter().flat_map(|word| word.to_le_bytes()));
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    }
    sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
    let mut answer = [0; 20];
    let mut stream = stream;
    stream.read_exact(&mut answer).ok()?;
    Some(u64::from_le_bytes(answer[12..].try_into().unwrap()))
}

/// Case C70. The vhost crate acknowledges an error and breaks the connection off; the next one is served by a new device process.
fn wrong_changes_of_the_memory_are_refused() {
    const ADD_MEM_REG: u32 = 37;
    const REM_MEM_REG: u32 = 38;
    let file = memfd(MORE_SIZE);
    let good = more(&file);
    let wrong: &[(&str, u32, VhostUserMemoryRegionInfo, usize)] = &[
        (
            "removed with another size",
            REM_MEM_REG,
            VhostUserMemoryRegionInfo { memory_size: MORE_SIZE / 2, ..good },
            0,
        ),
        (
            "removed elsewhere",
            REM_MEM_REG,
            VhostUserMemoryRegionInfo { guest_phys_addr: MORE + 4096, ..good },
            0,
        ),
        (
            "added without a file",
            ADD_MEM_REG,
            VhostUserMemoryRegionInfo { guest_phys_addr: 2 * MORE, ..good },
            0,
        ),
        (
            "added with two files",
            ADD_MEM_REG,
            VhostUserMemoryRegionInfo { guest_phys_addr: 2 * MORE, ..good },
            2,
        ),
        (
            "added beyond the file",
            ADD_MEM_REG,
            VhostUserMemoryRegionInfo { guest_phys_addr: 2 * MORE, mmap_offset: 1 << 40, ..good },
            1,
        ),
        (
            "added at an odd offset",
            ADD_MEM_REG,
            VhostUserMemoryRegionInfo { guest_phys_addr: 2 * MORE, mmap_offset: 8, ..good },
            1,
        ),
        (
            "added over other memory",
            ADD_MEM_REG,
            VhostUserMemoryRegionInfo { guest_phys_addr: MORE + 4096, ..good },
            1,
        ),
    ];
    for (what, request, region, count) in wrong {
        let daemon = Daemon::start(&[]);
        let stream = daemon.connect();
        let vmm_stream = stream.try_clone().unwrap();
        let mut vmm = Vmm::set_up(vmm_stream, Setup::default());
        open_context(&mut vmm, 1);
        // What is right is done, by the same means; a descriptor beside a removal is closed.
        let device = open_files(daemon.device());
        let files = open_files(daemon.supervisor());
        for _ in 0..10 {
            assert_eq!(raw(&stream, ADD_MEM_REG, &good, &[&file]), Some(0), "{what}");
            assert_eq!(raw(&stream, REM_MEM_REG, &good, &[&file]), Some(0), "{what}");
        }
        // What is on its way to a worker is still held.
        wait_for("the regions' files", || open_files(daemon.device()) == device);
        assert_eq!(raw(&stream, ADD_MEM_REG, &good, &[&file]), Some(0), "{what}");
        check_context(&mut vmm, 1);
        let given: Vec<&std::fs::File> = (0..*count).map(|_| &*file).collect();
        let answer = raw(&stream, *request, region, &given);
        assert_ne!(answer, Some(0), "{what}");
        drop((vmm, stream));
        let mut vmm = Vmm::connect(&daemon);
        open_context(&mut vmm, 1);
        check_context(&mut vmm, 1);
        drop(vmm);
        wait_for("what the connections held", || open_files(daemon.supervisor()) <= files);
    }
}

/// A device with contexts, a map and frames in flight.
fn busy(daemon: &Daemon, setup: Setup) -> (Vmm, [u16; 2]) {
    let mut vmm = Vmm::set_up(daemon.connect(), setup);
    open_context(&mut vmm, 1);
    open_context(&mut vmm, 2);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x1000))), OK);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0))), OK_MAP_INFO);
    let waiting = [
        vmm.submit(&submit(1, stub::HELD_RING, 11, &nop(1, 0x1000))),
        vmm.submit(&submit(2, stub::HELD_RING, 12, &nop(2, 0x1000))),
    ];
    // Answered after those before it were taken off the queue.
    assert_eq!(kind(&vmm.command(&header(GET_DISPLAY_INFO, 0))), UNSPEC);
    (vmm, waiting)
}

/// Everything has come back and is gone.
fn check_stopped(daemon: &Daemon, vmm: &mut Vmm, waiting: [u16; 2]) {
    assert_eq!(daemon.workers().len(), 0);
    let mut back: Vec<u16> = std::iter::from_fn(|| vmm.try_response().map(|(head, _)| head)).collect();
    back.sort_unstable();
    assert_eq!(back, waiting, "what was in flight came back before the answer");
    assert_eq!(statuses(vmm, answers(2) + 0x1000), [Status::WORKER_LOST]);
}

/// A new start finds an empty device, and a free window.
fn check_start(vmm: &mut Vmm, setup: Setup) {
    vmm.start(setup);
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 1))), BAD_CONTEXT);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[60, 0]))), BAD_RESOURCE);
    open_context(vmm, 1);
    check_context(vmm, 1);
    assert_eq!(kind(&vmm.command(&host_blob(1, 60, stub::GOOD_BUFFER, 0x1000))), OK);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0))), OK_MAP_INFO);
    assert_eq!(vmm.maps.live.lock().unwrap().len(), 1);
    assert_eq!(vmm.maps.refused.load(Ordering::SeqCst), 0);
}

/// As QEMU stops a device, for a reset of the guest as well as for a pause.
fn stop(vmm: &mut Vmm) {
    for queue in 0..2 {
        vmm.frontend.set_vring_enable(queue, false).unwrap();
    }
    for queue in 0..2 {
        vmm.frontend.get_vring_base(queue).unwrap();
    }
}

fn a_pause_gives_everything_back() {
    let daemon = Daemon::start(&[]);
    let (mut vmm, waiting) = busy(&daemon, Setup::default());
    stop(&mut vmm);
    check_stopped(&daemon, &mut vmm, waiting);
    // A stopped QEMU cannot be asked for anything.
    assert_eq!(vmm.maps.live.lock().unwrap().len(), 1);
    check_start(&mut vmm, Setup::default());
}

fn a_reset_of_the_guest_gives_everything_back() {
    let daemon = Daemon::start(&[]);
    let (mut vmm, waiting) = busy(&daemon, Setup::default());
    stop(&mut vmm);
    check_stopped(&daemon, &mut vmm, waiting);
    vmm.drop_maps();
    check_start(&mut vmm, Setup::default());
}

fn a_vmm_that_keeps_its_maps_is_told_to_unmap() {
    let daemon = Daemon::start(&[]);
    let setup = Setup { come_back: false, ..Setup::default() };
    let (mut vmm, waiting) = busy(&daemon, setup);
    stop(&mut vmm);
    check_stopped(&daemon, &mut vmm, waiting);
    wait_for("the unmap", || vmm.maps.live.lock().unwrap().is_empty());
    check_start(&mut vmm, setup);
}

fn a_reset_message_gives_everything_back() {
    let daemon = Daemon::start(&[]);
    let (mut vmm, waiting) = busy(&daemon, Setup::default());
    vmm.frontend.reset_device().unwrap();
    check_stopped(&daemon, &mut vmm, waiting);
    check_start(&mut vmm, Setup::default());
}

fn a_ring_starts_from_its_base() {
    let daemon = Daemon::start(&[]);
    let mut vmm = Vmm::set_up(daemon.connect(), Setup { base: 65530, ..Setup::default() });
    for _ in 0..20 {
        assert_eq!(kind(&vmm.command(&header(GET_DISPLAY_INFO, 0))), UNSPEC);
    }
    // Three commands are there before the ring starts, and one kick: exactly those are answered.
    let base = vmm.frontend.get_vring_base(0).unwrap() as u16;
    assert_eq!(base, 65530u16.wrapping_add(20));
    let heads: Vec<u16> = (0..3).map(|_| vmm.submit(&header(GET_DISPLAY_INFO, 0))).collect();
    vmm.send_addresses();
    vmm.frontend.set_vring_base(0, base).unwrap();
    vmm.frontend.set_vring_call(0, &vmm.control.call).unwrap();
    vmm.frontend.set_vring_kick(0, &vmm.control.kick).unwrap();
    for head in heads {
        assert_eq!(vmm.next_response().0, head);
    }
    assert_eq!(vmm.try_response(), None);
}

fn after_a_disconnect_the_next_one_starts_anew() {
    let mut daemon = Daemon::start(&[]);
    let (vmm, _) = busy(&daemon, Setup::default());
    let device = daemon.device();
    // Connected while the first one is still served: it waits for its turn.
    let early = daemon.connect();
    drop(vmm);
    let mut second = Vmm::set_up(early, Setup::default());
    assert_ne!(daemon.device(), device);
    assert_eq!(daemon.workers().len(), 0);
    open_context(&mut second, 1);
    check_context(&mut second, 1);
    assert_eq!(daemon.child.try_wait().unwrap(), None);
}

fn many_connections_leave_nothing_behind() {
    let daemon = Daemon::start(&[]);
    daemon.device();
    let files = open_files(daemon.child.id());
    for _ in 0..50 {
        let mut vmm = Vmm::connect(&daemon);
        open_context(&mut vmm, 1);
        // In the middle of commands.
        vmm.submit(&ctx_create(2, 8));
        vmm.submit(&submit(1, stub::HELD_RING, 1, &nop(1, 0x1000)));
    }
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    assert_eq!(daemon.workers().len(), 1);
    drop(vmm);
    wait_for("the end of the last connection", || {
        daemon.workers().is_empty() && open_files(daemon.child.id()) <= files
    });
}

fn a_device_that_is_killed_takes_its_workers_along() {
    let mut daemon = Daemon::start(&[]);
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    let (device, worker) = (daemon.device(), daemon.workers()[0]);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(device as i32), nix::sys::signal::Signal::SIGKILL)
        .unwrap();
    wait_for("the end of the worker", || !std::path::Path::new(&format!("/proc/{worker}")).exists());
    // The next connection is served.
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    check_context(&mut vmm, 1);
    // The supervisor goes, and all go with it.
    let (device, worker) = (daemon.device(), daemon.workers()[0]);
    daemon.child.kill().unwrap();
    assert_eq!(daemon.child.wait().unwrap().signal(), Some(9));
    for pid in [device, worker] {
        wait_for("the end of all", || {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
        });
    }
}

fn garbage_on_the_main_channel() {
    use std::io::{Read, Write};
    let daemon = Daemon::start(&[]);
    for bytes in [&[0xffu8; 64][..], &[0; 12], b"\x02\x00\x00\x00\x09\x00\x00\x00\xff\xff\xff\xff", &[]] {
        let mut stream = daemon.connect();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    let mut vmm = Vmm::connect(&daemon);
    open_context(&mut vmm, 1);
    check_context(&mut vmm, 1);
}

/// A guest negotiates as often as it likes: a reset, then the features.
fn negotiations_do_not_fill_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let (socket, log) = (directory.path().join("s"), directory.path().join("log"));
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_vhost-user-kfd"));
    command.arg("--worker").arg(std::env::current_exe().unwrap()).arg("--socket").arg(&socket);
    command.stderr(std::fs::File::create(&log).unwrap());
    let mut child = command.spawn().unwrap();
    wait_for("the socket", || socket.exists());
    let stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let vmm = Vmm::set_up(stream, Setup { window: false, ..Setup::default() });
    let base = VIRTIO_F_VERSION_1 | (1 << 30);
    for round in 0..200u64 {
        // With and without what contexts need; either is worth a word, once.
        vmm.frontend.set_features(base | ((round % 2) * GPU_FEATURES)).unwrap();
    }
    drop(vmm);
    child.kill().unwrap();
    child.wait().unwrap();
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(text.contains("no context can be made") && text.contains("no shared memory window"), "{text}");
    assert!(text.lines().count() < 40, "{} lines", text.lines().count());
}
