//! Two contexts with the real worker on the KFD model: memory that both use, and what the VM may have.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::frame::AnswerFrame;
use virtio_kfd_protocol::version::{Capset, Features};
use virtio_kfd_protocol::*;
use zerocopy::FromBytes;

use crate::daemon::Daemon;
use crate::gpu::*;
use crate::vmm::Vmm;

crate::tests![
    contexts_share_memory_of_the_gpu_and_the_vms_limit,
    a_piece_that_was_shared_is_all_that_is_reached,
    what_is_freed_can_be_had_at_once,
    a_blob_comes_and_goes_while_another_one_goes,
    runtimes_enable_themselves_unless_the_operator_refuses,
];

/// `KFD_IOC_ALLOC_MEM_FLAGS_*` (linux/kfd_ioctl.h): VRAM, writable, public.
const VRAM: u32 = 1 | 1 << 31 | 1 << 29;
/// `AMDGPU_VM_PAGE_*` (drm/amdgpu_drm.h): readable, writeable.
const READ_WRITE: u32 = 1 << 1 | 1 << 2;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

type Answered<C> = Result<(<C as CallType>::Answer, Vec<<C as CallType>::AnswerTail>), (Status, u32)>;

const VA: u64 = 0x7f00_0000_0000;

/// A package of this workspace, built beside this test: the daemon's package depends on neither.
fn build(manifest: &str, arguments: &[&str], file: &str) -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    build.args(["build", "--quiet", "--offline", "--manifest-path"]).arg(package.join(manifest));
    build.args(arguments).arg("--target-dir").arg(profile.parent().unwrap());
    if profile.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "{build:?}");
    profile.join(file)
}

fn real(arguments: &[&str]) -> Daemon {
    let worker = build("../worker/Cargo.toml", &["--bins"], "kfd-worker");
    let model = build("../kfd-model/preload/Cargo.toml", &["--lib"], "libkfd_model_preload.so");
    let mut command = Command::new(env!("CARGO_BIN_EXE_vhost-user-kfd"));
    command.arg("--worker").arg(worker).arg("--model-library").arg(model);
    command.args(["--kfd", "model:gfx906", "--log"]);
    command.arg(std::env::var("TEST_LOG").unwrap_or_else(|_| "off".into()));
    Daemon::start_program(command, arguments)
}

/// One call of a context on ring 0.
fn call<C: CallType>(vmm: &mut Vmm, ctx: u32, request: &C::Request, tail: &[C::RequestTail]) -> Answered<C> {
    let mut builder = frame(answer_blob(ctx), 0);
    builder.push::<C>(request, tail, C::ANSWER_TAIL_MAX.min(4)).unwrap();
    run(vmm, ctx, &builder.finish());
    let bytes = vmm.read(answers(ctx), 0x400);
    let answer = AnswerFrame::parse(&bytes).unwrap();
    let header = answer.answers[0].header;
    answer.answers[0].decode::<C>().map_err(|_| (header.status, header.errno))
}

/// A context that has the GPU.
fn open(vmm: &mut Vmm, ctx: u32) -> GpuId {
    open_context(vmm, ctx);
    let versions = HelloRequest { version_min: 1, version_max: 1, ..Default::default() };
    let mut builder = frame::RequestFrameBuilder::new(
        0,
        7,
        frame::AnswerArea { resource: ResourceId(answer_blob(ctx)), offset: 0, capacity: 0x400 },
    );
    builder.push::<Hello>(&versions, &[], 0).unwrap();
    assert_eq!(run(vmm, ctx, &builder.finish()), [Status::OK]);
    let gpu_id = call::<GetApertures>(vmm, ctx, &Nothing {}, &[]).unwrap().1[0].gpu_id;
    call::<AcquireVm>(vmm, ctx, &GpuRequest { gpu_id, pad: 0 }, &[]).unwrap();
    gpu_id
}

fn alloc(vmm: &mut Vmm, ctx: u32, gpu_id: GpuId, va: u64, size: u64) -> Result<Handle, (Status, u32)> {
    let request = AllocMemoryRequest { va: GuestVa(va), size, gpu_id, flags: VRAM, ..Default::default() };
    call::<AllocMemory>(vmm, ctx, &request, &[]).map(|(answer, _)| answer.handle)
}

fn import(vmm: &mut Vmm, ctx: u32, resource: u32, gpu_id: GpuId, va: u64) -> Result<Handle, (Status, u32)> {
    let request = ImportMemoryRequest { resource: ResourceId(resource), gpu_id, va: GuestVa(va) };
    call::<ImportMemory>(vmm, ctx, &request, &[]).map(|(answer, _)| answer.handle)
}

fn range(handle: Handle, gpu_id: GpuId, offset: u64, size: u64, va: u64) -> MapRangeRequest {
    MapRangeRequest { handle, offset, size, va: GuestVa(va), gpu_id, flags: READ_WRITE }
}

fn left(vmm: &mut Vmm, ctx: u32, gpu_id: GpuId) -> u64 {
    call::<AvailableMemory>(vmm, ctx, &GpuRequest { gpu_id, pad: 0 }, &[]).unwrap().0.available
}

fn blob(vmm: &mut Vmm, ctx: u32, resource: u32, blob_id: u64, size: u64) -> u32 {
    kind(&vmm.command(&create_blob(ctx, resource, 2, blob_id, size, 0, &[])))
}

/// Writes where the guest sees a map of the window.
fn write_window(vmm: &Vmm, at: u64, offset: u64, bytes: &[u8]) {
    let maps = vmm.maps.live.lock().unwrap();
    let map = &maps[&at];
    map.file.write_all_at(bytes, map.offset + offset).unwrap();
}

fn contexts_share_memory_of_the_gpu_and_the_vms_limit() {
    let daemon = real(&["--vram-limit", "64M", "--vram-limit-per-process", "48M", "--shmem-size", "64M"]);
    let mut vmm = Vmm::connect(&daemon);
    let gpu_id = open(&mut vmm, 1);
    assert_eq!(open(&mut vmm, 2), gpu_id);
    assert_eq!(left(&mut vmm, 1, gpu_id), 48 * MIB);
    let buffer = alloc(&mut vmm, 1, gpu_id, VA, 16 * MIB).unwrap();
    assert_eq!((left(&mut vmm, 1, gpu_id), left(&mut vmm, 2, gpu_id)), (32 * MIB, 48 * MIB));
    let second = alloc(&mut vmm, 2, gpu_id, VA, 40 * MIB).unwrap();
    assert_eq!(
        alloc(&mut vmm, 1, gpu_id, VA + 64 * GIB, 16 * MIB),
        Err((Status::LIMIT, 0)),
        "the VM's limit"
    );
    call::<FreeMemory>(&mut vmm, 2, &BufferRequest { handle: second }, &[]).unwrap();

    // By the guest's kernel, which attaches what a process has imported.
    assert_eq!(blob(&mut vmm, 1, 60, buffer.0, 16 * MIB), OK);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0))), OK_MAP_INFO);
    write_window(&vmm, 0, 5 * MIB, b"of the first context");
    assert_eq!(import(&mut vmm, 2, 60, gpu_id, VA), Err((Status::BAD_RESOURCE, 0)));
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[60, 0]))), OK);
    let request = ResourceRequest { resource: ResourceId(60), pad: 0 };
    let info = call::<ResourceInfo>(&mut vmm, 2, &request, &[]).unwrap().0;
    assert_eq!((info.kind, info.size, info.gpu_id), (ResourceInfoAnswer::HOST, 16 * MIB, gpu_id));
    let whole = import(&mut vmm, 2, 60, gpu_id, VA).unwrap();
    let mapped = call::<MapMemory>(&mut vmm, 2, &BufferRequest { handle: whole }, &[gpu_id]).unwrap().0;
    assert_eq!((mapped.n_success, mapped.errno), (1, 0));
    assert_eq!(left(&mut vmm, 2, gpu_id), 48 * MIB, "it counts where it was allocated");

    // By a token.
    let piece = ShareMemoryRequest { handle: buffer, offset: 5 * MIB, size: MIB };
    let token = call::<ShareMemory>(&mut vmm, 1, &piece, &[]).unwrap().0.token;
    assert_eq!(blob(&mut vmm, 2, 61, token.0, MIB), OK);
    assert_eq!(kind(&vmm.command(&map_blob(61, 32 * MIB))), OK_MAP_INFO);
    assert_eq!(vmm.read_window(32 * MIB, 20), b"of the first context");
    let part = import(&mut vmm, 2, 61, gpu_id, 0).unwrap();
    call::<MapRange>(&mut vmm, 2, &range(part, gpu_id, 0, MIB, VA + 64 * GIB), &[]).unwrap();

    // The first context ends: the other one has the memory, and the VM pays for it until it lets go.
    assert_eq!(kind(&vmm.command(&header(CTX_DESTROY, 1))), OK);
    assert_eq!(vmm.read_window(32 * MIB, 20), b"of the first context");
    assert_eq!(vmm.read_window(5 * MIB, 20), b"of the first context");
    call::<MapRange>(&mut vmm, 2, &range(part, gpu_id, 0, MIB, VA + 128 * GIB), &[]).unwrap();
    let most = alloc(&mut vmm, 2, gpu_id, VA + 256 * GIB, 48 * MIB).unwrap();
    assert_eq!(left(&mut vmm, 2, gpu_id), 0);
    call::<FreeMemory>(&mut vmm, 2, &BufferRequest { handle: most }, &[]).unwrap();
    open(&mut vmm, 3);
    let other = alloc(&mut vmm, 3, gpu_id, VA, 32 * MIB).unwrap();
    assert_eq!(left(&mut vmm, 2, gpu_id), 16 * MIB);
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[60, 0]))), OK);
    let gone = call::<UnmapMemory>(&mut vmm, 2, &BufferRequest { handle: whole }, &[gpu_id]);
    assert_eq!(gone.err(), Some((Status::BAD_HANDLE, 0)), "the import went with its blob");
    assert_eq!(left(&mut vmm, 2, gpu_id), 16 * MIB, "the other blob holds it");
    assert_eq!(kind(&vmm.command(&simple(RESOURCE_UNREF, 0, &[61, 0]))), OK);
    assert_eq!(left(&mut vmm, 2, gpu_id), 32 * MIB);
    call::<FreeMemory>(&mut vmm, 3, &BufferRequest { handle: other }, &[]).unwrap();
    assert_eq!(left(&mut vmm, 2, gpu_id), 48 * MIB);
    assert!(vmm.maps.live.lock().unwrap().is_empty());
}

fn a_piece_that_was_shared_is_all_that_is_reached() {
    let daemon = real(&["--shmem-size", "64M"]);
    let mut vmm = Vmm::connect(&daemon);
    let gpu_id = open(&mut vmm, 1);
    open(&mut vmm, 2);
    // A buffer without an address, of which pieces are used.
    let arena = alloc(&mut vmm, 1, gpu_id, 0, 4 * MIB).unwrap();
    call::<MapRange>(&mut vmm, 1, &range(arena, gpu_id, MIB, MIB, VA), &[]).unwrap();
    let piece = ShareMemoryRequest { handle: arena, offset: MIB, size: MIB };
    let token = call::<ShareMemory>(&mut vmm, 1, &piece, &[]).unwrap().0.token;
    for wrong in [token.0 ^ 1, token.0 ^ 1 << 40] {
        assert_eq!(blob(&mut vmm, 2, 61, wrong, MIB), BAD_PARAMETER);
        assert_eq!(import(&mut vmm, 2, 61, gpu_id, 0), Err((Status::BAD_RESOURCE, 0)));
    }
    assert_eq!(blob(&mut vmm, 2, 61, token.0, 2 * MIB), BAD_PARAMETER);
    assert_eq!(blob(&mut vmm, 2, 61, token.0, MIB), OK);
    // KFD imports whole buffers only.
    assert_eq!(import(&mut vmm, 2, 61, gpu_id, VA), Err((Status::INVALID, 0)));
    let part = import(&mut vmm, 2, 61, gpu_id, 0).unwrap();
    for (offset, size) in [(0, 2 * MIB), (MIB, 4096), (MIB - 4096, 8192), (!0xfff, 4096)] {
        let request = range(part, gpu_id, offset, size, VA);
        let refused = call::<MapRange>(&mut vmm, 2, &request, &[]).err();
        assert_eq!(refused, Some((Status::INVALID, 0)), "{offset:#x} {size:#x}");
    }
    call::<MapRange>(&mut vmm, 2, &range(part, gpu_id, MIB - 4096, 4096, VA), &[]).unwrap();
    // The owner's own blob of its own token, as a guest library exports a piece; then by the guest's kernel.
    assert_eq!(blob(&mut vmm, 1, 62, token.0, MIB), OK);
    assert_eq!(kind(&vmm.command(&simple(CTX_ATTACH, 2, &[62, 0]))), OK);
    let again = import(&mut vmm, 2, 62, gpu_id, 0).unwrap();
    let request = range(again, gpu_id, MIB, 4096, VA + 64 * GIB);
    assert_eq!(call::<MapRange>(&mut vmm, 2, &request, &[]).err(), Some((Status::INVALID, 0)));
    call::<MapRange>(&mut vmm, 2, &range(again, gpu_id, 0, MIB, VA + 64 * GIB), &[]).unwrap();
}

/// The guest's kernel gives blobs up without waiting, and the VMM takes its time to unmap them.
fn what_is_freed_can_be_had_at_once() {
    let daemon = real(&["--vram-limit-per-process", "16M", "--shmem-size", "64M"]);
    let mut vmm = Vmm::connect(&daemon);
    let gpu_id = open(&mut vmm, 1);
    for unmaps in [true, false] {
        let handle = alloc(&mut vmm, 1, gpu_id, VA, 16 * MIB).unwrap();
        assert_eq!(blob(&mut vmm, 1, 60, handle.0, 16 * MIB), OK);
        assert_eq!(kind(&vmm.command(&map_blob(60, 0))), OK_MAP_INFO);
        let maps = vmm.maps.clone();
        let busy = maps.live.lock().unwrap();
        call::<FreeMemory>(&mut vmm, 1, &BufferRequest { handle }, &[]).unwrap();
        assert_eq!(alloc(&mut vmm, 1, gpu_id, VA, MIB), Err((Status::LIMIT, 0)), "the blob holds it");
        let mut expected = Vec::new();
        if unmaps {
            expected.push((vmm.submit(&simple(UNMAP_BLOB, 0, &[60, 0])), OK));
        }
        expected.push((vmm.submit(&simple(RESOURCE_UNREF, 0, &[60, 0])), OK));
        let mut builder = frame(answer_blob(1), 0);
        let (va, size) = (GuestVa(VA), 16 * MIB);
        let request = AllocMemoryRequest { va, size, gpu_id, flags: VRAM, ..Default::default() };
        builder.push::<AllocMemory>(&request, &[], 0).unwrap();
        expected.push((vmm.submit(&submit(1, 0, 1, &builder.finish())), OK));
        // As always: what belongs to no context's memory is answered.
        assert_eq!(kind(&vmm.command(&header(GET_DISPLAY_INFO, 0))), UNSPEC);
        assert_eq!(vmm.try_response(), None);
        drop(busy);
        let back: Vec<(u16, u32)> = expected
            .iter()
            .map(|_| {
                let (head, response) = vmm.next_response();
                (head, kind(&response))
            })
            .collect();
        assert_eq!(back, expected);
        assert_eq!(statuses(&vmm, answers(1)), [Status::OK]);
        let bytes = vmm.read(answers(1), 0x400);
        let answer = AnswerFrame::parse(&bytes).unwrap();
        let (made, _) = answer.answers[0].decode::<AllocMemory>().unwrap();
        call::<FreeMemory>(&mut vmm, 1, &BufferRequest { handle: made.handle }, &[]).unwrap();
    }
}

/// Where VRAM is limited, a context waits for the end of its mapped blobs; what it exports meanwhile does not.
fn a_blob_comes_and_goes_while_another_one_goes() {
    let daemon = real(&["--vram-limit-per-process", "64M", "--shmem-size", "64M"]);
    let mut vmm = Vmm::connect(&daemon);
    let gpu_id = open(&mut vmm, 1);
    let first = alloc(&mut vmm, 1, gpu_id, VA, MIB).unwrap();
    let second = alloc(&mut vmm, 1, gpu_id, VA + GIB, MIB).unwrap();
    assert_eq!(blob(&mut vmm, 1, 60, first.0, MIB), OK);
    assert_eq!(kind(&vmm.command(&map_blob(60, 0))), OK_MAP_INFO);
    let maps = vmm.maps.clone();
    let busy = maps.live.lock().unwrap();
    let going = vmm.submit(&simple(RESOURCE_UNREF, 0, &[60, 0]));
    let commands = [create_blob(1, 61, 2, second.0, MIB, 0, &[]), simple(RESOURCE_UNREF, 0, &[61, 0])];
    let heads = commands.map(|command| vmm.submit(&command));
    for head in heads {
        let (back, response) = vmm.next_response();
        assert_eq!((back, kind(&response)), (head, OK));
    }
    assert_eq!(vmm.try_response(), None, "the first one is still mapped");
    drop(busy);
    let (back, response) = vmm.next_response();
    assert_eq!((back, kind(&response)), (going, OK));
    assert_eq!(left(&mut vmm, 1, gpu_id), 62 * MIB, "the context goes on");
}

/// Without the feature bit guests hide the capability by which runtimes would take the refusal for a broken driver.
fn runtimes_enable_themselves_unless_the_operator_refuses() {
    let enabled = |arguments: &[&str]| {
        let daemon = real(arguments);
        let mut vmm = Vmm::connect(&daemon);
        let capset = vmm.command(&simple(GET_CAPSET, 0, &[8, 1]));
        let capset = Capset::read_from_bytes(&capset[24..]).unwrap();
        open(&mut vmm, 1);
        let request = RuntimeEnableRequest { r_debug: GuestVa(0x1234_5678), mode: 1, pad: 0 };
        let answer = call::<RuntimeEnable>(&mut vmm, 1, &request, &[]).map(drop);
        (Features::from_bits_truncate(capset.features).contains(Features::EXCEPTIONS), answer)
    };
    assert_eq!(enabled(&[]), (true, Ok(())));
    assert_eq!(enabled(&["--no-exceptions"]), (false, Err((Status::NOT_SUPPORTED, 0))));
}
