//! A guest program that sends garbage, in loop-back: it gets errors, and nobody else notices.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::process::Command;
use std::time::Duration;

use guest_thunk::client::Client;
use guest_thunk::transport::loopback::LoopbackVm;
use guest_thunk::transport::loopback::command::{CreateBlob, MapBlob, Resource, header, is_ok, message};
use virtio_kfd_protocol::GpuRequest;
use virtio_kfd_protocol::calls::GetClockCounters;
use virtio_kfd_tests::native::{LOOPBACK_VARIABLE, text};
use virtio_kfd_tests::{Artifacts, Daemon, need};

const LIMIT: Duration = Duration::from_secs(400);
const SETTLE: Duration = Duration::from_secs(30);

fn attack(kfd: &str, seed: &str, frames: &str, scatter: bool) {
    let artifacts = need!(Artifacts::for_daemon(&["kfd-hostile"], &[]));
    let hostile = artifacts.program("kfd-hostile").unwrap();
    let daemon = Daemon::start(&artifacts, kfd, &[]).unwrap();
    let pid = daemon.pid();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&hostile);
        command.args(arguments).env(LOOPBACK_VARIABLE, daemon.socket());
        command.env("VIRTIO_KFD_LOOPBACK_SCATTER", if scatter { "1" } else { "0" });
        text(command, LIMIT).unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()))
    };
    // One connection first: what is loaded and started once is there afterwards.
    assert_eq!(run(&["rounds", "1"]), "rounds: 1\n");
    let before = daemon.settled(SETTLE).unwrap();
    let seen = run(&["attack", seed, frames]);
    println!("{seen}");
    assert!(seen.contains("none accepted") && seen.contains("all answers right"), "{seen}");
    assert!(daemon.is_running() && daemon.pid() == pid);
    // The VM is gone, and with it all that it held.
    daemon.wait_for_workers(0, SETTLE).unwrap();
    assert!(!daemon.log().contains("panicked"), "{}", daemon.report());
    // A guest may cause messages, but not without end.
    assert!(daemon.log().len() < 1 << 20, "{} bytes of log", daemon.log().len());
    assert_eq!(run(&["rounds", "1"]), "rounds: 1\n");
    let after = daemon.settled(SETTLE).unwrap();
    assert_eq!(
        (after.processes, after.descriptors),
        (before.processes, before.descriptors),
        "{before:?}, {after:?}"
    );
}

#[test]
fn garbage_on_a_gpu() {
    attack("model:gfx906", "1", "1200", false);
}

#[test]
fn garbage_without_a_gpu_and_with_scattered_memory() {
    attack("model:none", "77", "400", true);
}

/// Numbers of virtio_gpu.h.
mod gpu {
    pub const CREATE_BLOB: u32 = 0x010c;
    pub const UNREF: u32 = 0x0102;
    pub const MAP_BLOB: u32 = 0x0208;
    pub const UNMAP_BLOB: u32 = 0x0209;
    pub const MEM_GUEST: u32 = 1;
    pub const MEM_HOST3D: u32 = 2;
    pub const MEM_HOST3D_GUEST: u32 = 3;
}

/// A guest's kernel that has gone mad: commands of a display and of a 3D device, lists of guest memory that are too long,
/// not there, or not what the command says (case C64). Each is answered with an error, and a process of the same guest
/// goes on.
#[test]
fn commands_that_no_driver_sends() {
    let artifacts = need!(Artifacts::for_daemon(&[], &[]));
    let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
    let vm = LoopbackVm::connect(daemon.socket()).unwrap();
    let context = vm.context().unwrap();
    let ctx = context.id();
    let client = Client::over(Box::new(context)).unwrap();
    let works = || client.call::<GetClockCounters>(&GpuRequest::default(), &[], 0).is_ok();
    let kind = |command: &[u8], data: &[u8]| {
        let response = vm.command(command, data, 64).unwrap();
        let (kind, _) = response.split_first_chunk::<4>().expect("a response has a header");
        u32::from_le_bytes(*kind)
    };
    let refused = |what: &str, command: &[u8], data: &[u8]| {
        let kind = kind(command, data);
        assert!((0x1200..0x1300).contains(&kind), "{what}: response {kind:#x}");
        assert!(works(), "after {what}");
    };

    // Displays, cursors, 3D resources, and numbers that mean nothing, with and without a body.
    for number in
        (0x0100..0x0108).chain([0x010a, 0x010b, 0x010d, 0x0205, 0x0206, 0x0300, 0x0301, 0, 7, u32::MAX])
    {
        refused(&format!("command {number:#x}"), &message(&header(number, 0), &[0u8; 64]), &[]);
        refused(&format!("command {number:#x} of {ctx}"), &message(&header(number, ctx), &[0xffu8; 64]), &[]);
    }
    let blob = |resource_id, blob_mem, nr_entries, blob_id, size| {
        let body = CreateBlob { resource_id, blob_mem, blob_flags: 1, nr_entries, blob_id, size };
        message(&header(gpu::CREATE_BLOB, ctx), &body)
    };
    let entry = |address: u64, length: u32| [address.to_le_bytes(), u64::from(length).to_le_bytes()].concat();
    let pages = vm.ram().take(2 * 4096).unwrap();
    let (good, end) = (pages.address(), 64u64 << 30);

    // What is announced and what follows.
    for announced in [1, 2, 65_536, 1_000_000, 0x7fff_ffff, u32::MAX] {
        let id = vm.new_resource_id();
        refused(
            &format!("{announced} entries, none there"),
            &blob(id, gpu::MEM_GUEST, announced, 0, 4096),
            &[],
        );
        if announced > 1 {
            let one = entry(good, 4096);
            refused(
                &format!("{announced} entries, one there"),
                &blob(id, gpu::MEM_GUEST, announced, 0, 4096),
                &one,
            );
        }
    }
    // A million that are there, in an order that leaves half a million runs: more than a process can map.
    let two = [entry(good + 4096, 4096), entry(good, 4096)].concat();
    let million = two.repeat(500_000);
    let id = vm.new_resource_id();
    refused("a million entries", &blob(id, gpu::MEM_GUEST, 1_000_000, 0, 4096 * 1_000_000), &million);
    drop(million);
    // The same id is still free.
    assert!(is_ok(kind(&blob(id, gpu::MEM_GUEST, 1, 0, 4096), &entry(good, 4096))));
    refused("an id that is taken", &blob(id, gpu::MEM_GUEST, 1, 0, 4096), &entry(good, 4096));
    let unref = message(&header(gpu::UNREF, 0), &Resource { resource_id: id, padding: 0 });
    assert!(is_ok(kind(&unref, &[])));
    refused("an id that is gone", &unref, &[]);

    let lists = [
        ("beyond the memory", entry(end + (1 << 40), 4096), 4096),
        ("in the hole below 4 GiB", entry(0xfee0_0000, 4096), 4096),
        ("across the hole", entry((2 << 30) - 4096, 8192), 8192),
        ("at the end of all addresses", entry(u64::MAX - 4095, 4096), 4096),
        ("that wrap", entry(u64::MAX - 4095, 8192), 8192),
        ("of no length", entry(good, 0), 4096),
        ("of half a page", entry(good, 2048), 4096),
        ("in the middle of a page", entry(good + 2048, 4096), 4096),
        ("less than the blob", entry(good, 4096), 8192),
    ];
    for (what, list, size) in lists {
        let id = vm.new_resource_id();
        refused(&format!("entries {what}"), &blob(id, gpu::MEM_GUEST, 1, 0, size), &list);
    }
    for (what, memory, id, size) in [
        ("memory of no kind", 0, 0, 4096),
        ("memory of an unknown kind", 99, 0, 4096),
        ("host memory with guest memory behind", gpu::MEM_HOST3D_GUEST, 1 << 32, 4096),
        ("no size", gpu::MEM_GUEST, 0, 0),
        ("a size of no pages", gpu::MEM_HOST3D, 1 << 32, 100),
        ("a size beyond everything", gpu::MEM_HOST3D, 1 << 32, u64::MAX),
    ] {
        refused(what, &blob(vm.new_resource_id(), memory, 0, id, size), &[]);
    }
    refused("resource 0", &blob(0, gpu::MEM_GUEST, 1, 0, 4096), &entry(good, 4096));

    // Maps of what cannot be mapped, and where nothing can be.
    let guest = vm.new_resource_id();
    assert!(is_ok(kind(&blob(guest, gpu::MEM_GUEST, 1, 0, 4096), &entry(good, 4096))));
    for (resource_id, offset) in
        [(guest, 0), (0, 0), (u32::MAX, 0), (guest, 1), (guest, u64::MAX - 4095), (guest, 1 << 60)]
    {
        let map = message(&header(gpu::MAP_BLOB, 0), &MapBlob { resource_id, padding: 0, offset });
        refused(&format!("a map of {resource_id} at {offset:#x}"), &map, &[]);
        let unmap = message(&header(gpu::UNMAP_BLOB, 0), &Resource { resource_id, padding: 0 });
        refused(&format!("an unmap of {resource_id}"), &unmap, &[]);
    }
    assert!(daemon.is_running() && !daemon.log().contains("panicked"), "{}", daemon.report());
    assert_eq!(daemon.workers().len(), 1);
}
