//! Pieces of buffers at addresses of one GPU, and memory of other contexts.

use std::fs::File;

use kfd_ipc::worker::ToWorker;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::*;

use crate::support::memory::{GTT, PUBLIC, USERPTR, VRAM, WRITABLE};
use crate::support::*;

/// `AMDGPU_VM_PAGE_*` (drm/amdgpu_drm.h): readable, writeable.
const READ_WRITE: u32 = 1 << 1 | 1 << 2;

const P: u64 = 4096;
const VA: u64 = 0x7f00_0000_0000;
const EBUSY: u32 = 16;
const EINVAL: u32 = 22;

fn worker() -> (Worker, GpuId) {
    worker_on("gfx906")
}

fn worker_on(profile: &str) -> (Worker, GpuId) {
    on_gpu(profile, settings())
}

fn alloc(worker: &mut Worker, gpu_id: GpuId, va: u64, pages: u64, flags: u32) -> Handle {
    let request = AllocMemoryRequest {
        va: GuestVa(va),
        size: pages * P,
        gpu_id,
        flags: flags | WRITABLE,
        ..Default::default()
    };
    worker.call::<AllocMemory>(&request, &[]).unwrap().0.handle
}

fn range(handle: Handle, gpu_id: GpuId, page: u64, pages: u64, va: u64) -> MapRangeRequest {
    let (offset, size) = (page * P, pages * P);
    MapRangeRequest { handle, offset, size, va: GuestVa(va), gpu_id, flags: READ_WRITE }
}

fn unrange(handle: Handle, gpu_id: GpuId, pages: u64, va: u64) -> UnmapRangeRequest {
    UnmapRangeRequest { handle, va: GuestVa(va), size: pages * P, gpu_id, pad: 0 }
}

fn free(worker: &mut Worker, handle: Handle) -> (Status, u32) {
    worker.failure::<FreeMemory>(&BufferRequest { handle }, &[])
}

/// What another worker needs to use a buffer of this one: the piece and the dma-buf.
fn share(worker: &mut Worker, handle: Handle, page: u64, pages: u64) -> (ShareToken, u64, u64, File) {
    let request = ShareMemoryRequest { handle, offset: page * P, size: pages * P };
    let mut frame = frame(VERSION);
    frame.push::<ShareMemory>(&request, &[], 0).unwrap();
    worker.frame(0, frame);
    let (Other::Share { token, piece }, files) = worker.other() else { panic!("not shared") };
    let (answer, _) = worker.answer(0).decode::<ShareMemory>(0).unwrap();
    assert_eq!(answer.token.0, token, "the device hears of it first");
    // The memory as a CPU sees it comes first.
    let dmabuf = files.into_iter().last().unwrap();
    (answer.token, piece.offset, piece.size, File::from(dmabuf))
}

fn import(
    worker: &mut Worker,
    resource: u32,
    gpu_id: GpuId,
    va: u64,
) -> Result<(Handle, u64), (Status, u32)> {
    let request = ImportMemoryRequest { resource: ResourceId(resource), gpu_id, va: GuestVa(va) };
    match worker.call::<ImportMemory>(&request, &[]) {
        Ok((answer, _)) => Ok((answer.handle, answer.size)),
        Err(frame::CallError::Failed { status, errno, .. }) => Err((status, errno)),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn pieces_have_addresses_of_their_own() {
    let (mut worker, gpu_id) = worker();
    let arena = alloc(&mut worker, gpu_id, 0, 16, VRAM | PUBLIC);
    // KFD itself cannot map what has no address.
    let buffer = BufferRequest { handle: arena };
    let (mapped, _) = worker.call::<MapMemory>(&buffer, &[gpu_id]).unwrap();
    assert_eq!((mapped.n_success, mapped.errno != 0), (0, true));
    for (page, va) in [(0, VA), (4, VA + 64 * P), (15, VA + 32 * P)] {
        worker.call::<MapRange>(&range(arena, gpu_id, page, 1, va), &[]).unwrap();
    }
    // The kernel's page table has no room twice (amdgpu_vm_bo_map).
    let other = alloc(&mut worker, gpu_id, 0, 4, VRAM | PUBLIC);
    assert_eq!(
        worker.failure::<MapRange>(&range(other, gpu_id, 0, 2, VA + 63 * P), &[]),
        (Status::ERRNO, EINVAL)
    );
    let invalid = [
        ("beyond the buffer", range(arena, gpu_id, 15, 2, VA + 128 * P)),
        ("nothing", range(arena, gpu_id, 0, 0, VA + 128 * P)),
        ("no address", range(arena, gpu_id, 0, 1, 0)),
        ("an odd address", range(arena, gpu_id, 0, 1, VA + 8)),
        ("an odd offset", MapRangeRequest { offset: 8, ..range(arena, gpu_id, 0, 1, VA + 128 * P) }),
        ("half a page", MapRangeRequest { size: P / 2, ..range(arena, gpu_id, 0, 1, VA + 128 * P) }),
        ("an offset without end", MapRangeRequest { offset: !0xfff, ..range(arena, gpu_id, 0, 1, VA) }),
        ("the end of all addresses", range(arena, gpu_id, 0, 2, !0xfff)),
        ("a delayed update", MapRangeRequest { flags: 1, ..range(arena, gpu_id, 0, 1, VA + 128 * P) }),
        ("a sparse texture", MapRangeRequest { flags: 1 << 4, ..range(arena, gpu_id, 0, 1, VA + 128 * P) }),
        ("unknown flags", MapRangeRequest { flags: 1 << 20, ..range(arena, gpu_id, 0, 1, VA + 128 * P) }),
        ("the same address again", range(arena, gpu_id, 1, 1, VA)),
    ];
    for (what, request) in invalid {
        assert_eq!(worker.failure::<MapRange>(&request, &[]), (Status::INVALID, 0), "{what}");
    }
    assert_eq!(worker.failure::<MapRange>(&range(arena, GpuId(1), 0, 1, VA), &[]), (Status::NO_SUCH_GPU, 0));
    assert_eq!(
        worker.failure::<MapRange>(&range(Handle::new(99, 1), gpu_id, 0, 1, VA), &[]),
        (Status::BAD_HANDLE, 0)
    );
    for wrong in
        [unrange(arena, gpu_id, 2, VA), unrange(arena, gpu_id, 1, VA + P), unrange(other, gpu_id, 1, VA)]
    {
        assert_eq!(worker.failure::<UnmapRange>(&wrong, &[]), (Status::INVALID, 0), "{wrong:?}");
    }
    worker.call::<UnmapRange>(&unrange(arena, gpu_id, 1, VA), &[]).unwrap();
    assert_eq!(worker.failure::<UnmapRange>(&unrange(arena, gpu_id, 1, VA), &[]), (Status::INVALID, 0));
    // The place is free, for this buffer and others.
    worker.call::<MapRange>(&range(other, gpu_id, 0, 1, VA), &[]).unwrap();
    assert_eq!(free(&mut worker, other), (Status::OK, 0));
    // A free takes the ranges along.
    worker.call::<MapRange>(&range(arena, gpu_id, 7, 1, VA), &[]).unwrap();
    assert_eq!(free(&mut worker, arena), (Status::OK, 0));
    let last = alloc(&mut worker, gpu_id, 0, 2, VRAM);
    for va in [VA, VA + 64 * P, VA + 32 * P] {
        worker.call::<MapRange>(&range(last, gpu_id, 0, 2, va), &[]).unwrap();
    }
}

#[test]
fn ranges_and_maps_of_one_buffer_go_together() {
    let (mut worker, gpu_id) = worker();
    let buffer = alloc(&mut worker, gpu_id, VA, 4, GTT);
    worker.call::<MapMemory>(&BufferRequest { handle: buffer }, &[gpu_id]).unwrap();
    worker.call::<MapRange>(&range(buffer, gpu_id, 2, 1, VA + 64 * P), &[]).unwrap();
    // What KFD maps it does not free, and nothing is lost of the ranges then.
    assert_eq!(free(&mut worker, buffer), (Status::ERRNO, EBUSY));
    worker.call::<UnmapRange>(&unrange(buffer, gpu_id, 1, VA + 64 * P), &[]).unwrap();
    worker.call::<MapRange>(&range(buffer, gpu_id, 2, 1, VA + 64 * P), &[]).unwrap();
    worker.call::<UnmapMemory>(&BufferRequest { handle: buffer }, &[gpu_id]).unwrap();
    assert_eq!(free(&mut worker, buffer), (Status::OK, 0));
}

#[test]
fn guest_memory_has_no_ranges_and_is_not_shared_by_token() {
    let (mut worker, gpu_id) = worker();
    let ram = tempfile::tempfile().unwrap();
    ram.set_len(64 * P).unwrap();
    worker.guest_memory(&ram, 64, 5, &[0, 2]);
    let request = AllocMemoryRequest {
        va: GuestVa(VA),
        size: 2 * P,
        gpu_id,
        flags: USERPTR | WRITABLE,
        resource: ResourceId(5),
        ..Default::default()
    };
    let handle = worker.call::<AllocMemory>(&request, &[]).unwrap().0.handle;
    assert_eq!(
        worker.failure::<MapRange>(&range(handle, gpu_id, 0, 1, VA + 64 * P), &[]),
        (Status::NOT_SUPPORTED, 0)
    );
    let request = ShareMemoryRequest { handle, offset: 0, size: P };
    assert_eq!(worker.failure::<ShareMemory>(&request, &[]), (Status::NOT_SUPPORTED, 0));
    let info = |worker: &mut Worker, resource| {
        let request = ResourceRequest { resource: ResourceId(resource), pad: 0 };
        worker.call::<ResourceInfo>(&request, &[]).map(|(answer, _)| answer)
    };
    let guest = info(&mut worker, 5).unwrap();
    assert_eq!((guest.kind, guest.size, guest.gpu_id), (ResourceInfoAnswer::GUEST, 2 * P, GpuId(0)));
    assert!(info(&mut worker, 6).is_err());
    assert_eq!(import(&mut worker, 5, gpu_id, 0), Err((Status::BAD_RESOURCE, 0)), "it is no host memory");
}

#[test]
fn memory_of_another_context_is_imported() {
    let (mut owner, gpu_id) = worker();
    let (mut other, _) = worker();
    let buffer = alloc(&mut owner, gpu_id, VA, 8, VRAM | PUBLIC);
    let (token, offset, size, whole) = share(&mut owner, buffer, 0, 8);
    let (piece_token, piece_offset, piece_size, piece) = share(&mut owner, buffer, 2, 3);
    assert_eq!(((offset, size), (piece_offset, piece_size)), ((0, 8 * P), (2 * P, 3 * P)));
    assert_ne!(token, piece_token);
    // The same piece has one token.
    let again = ShareMemoryRequest { handle: buffer, offset: 2 * P, size: 3 * P };
    assert_eq!(owner.call::<ShareMemory>(&again, &[]).unwrap().0.token, piece_token);
    for (offset, size) in [(6 * P, 3 * P), (0, 0), (8, P), (0, P / 2), (!0xfff, P)] {
        let request = ShareMemoryRequest { handle: buffer, offset, size };
        assert_eq!(
            owner.failure::<ShareMemory>(&request, &[]),
            (Status::INVALID, 0),
            "{offset:#x} {size:#x}"
        );
    }

    assert_eq!(import(&mut other, 60, gpu_id, 0), Err((Status::BAD_RESOURCE, 0)), "it was never attached");
    other.send(&ToWorker::AttachShared { resource: 60, offset, size }, Some(&whole));
    other
        .send(&ToWorker::AttachShared { resource: 61, offset: piece_offset, size: piece_size }, Some(&piece));
    other.send(&ToWorker::AttachShared { resource: 62, offset: 0, size: P }, None);
    let request = ResourceRequest { resource: ResourceId(61), pad: 0 };
    let (info, _) = other.call::<ResourceInfo>(&request, &[]).unwrap();
    assert_eq!((info.kind, info.size, info.gpu_id), (ResourceInfoAnswer::HOST, 3 * P, gpu_id));
    assert_eq!(info.flags & (VRAM | GTT), VRAM);
    assert_eq!(import(&mut other, 62, gpu_id, 0), Err((Status::NOT_SUPPORTED, 0)), "old kernels");

    // The whole buffer at an address, as KFD imports it.
    let (imported, bytes) = import(&mut other, 60, gpu_id, VA + 256 * P).unwrap();
    assert_eq!(bytes, 8 * P);
    let buffer_of = |handle| BufferRequest { handle };
    let (mapped, _) = other.call::<MapMemory>(&buffer_of(imported), &[gpu_id]).unwrap();
    assert_eq!((mapped.n_success, mapped.errno), (1, 0));
    // A piece has none, and only its own pages.
    assert_eq!(import(&mut other, 61, gpu_id, VA), Err((Status::INVALID, 0)));
    let (small, bytes) = import(&mut other, 61, gpu_id, 0).unwrap();
    assert_eq!(bytes, 3 * P);
    assert_eq!(other.failure::<MapMemory>(&buffer_of(small), &[gpu_id]), (Status::INVALID, 0));
    for (page, pages) in [(3, 1), (0, 4), (2, 2)] {
        let request = range(small, gpu_id, page, pages, VA);
        assert_eq!(other.failure::<MapRange>(&request, &[]), (Status::INVALID, 0), "{page} {pages}");
    }
    other.call::<MapRange>(&range(small, gpu_id, 0, 3, VA), &[]).unwrap();
    // Twice, at two places; the first one's end leaves the second one alone.
    let (twice, _) = import(&mut other, 61, gpu_id, 0).unwrap();
    other.call::<MapRange>(&range(twice, gpu_id, 1, 1, VA + 64 * P), &[]).unwrap();
    assert_eq!(free(&mut other, small), (Status::OK, 0));
    other.call::<MapRange>(&range(twice, gpu_id, 0, 3, VA), &[]).unwrap();

    // The owner frees it and ends: who has it keeps it.
    let mut frame = frame(VERSION);
    frame.push::<FreeMemory>(&buffer_of(buffer), &[], 0).unwrap();
    owner.frame(0, frame);
    let mut gone = [owner.other().0, owner.other().0];
    gone.sort_by_key(|other| format!("{other:?}"));
    let mut expected = [Other::Unshare(token.0), Other::Unshare(piece_token.0)];
    expected.sort_by_key(|other| format!("{other:?}"));
    assert_eq!(gone, expected);
    assert_eq!(owner.answer(0).statuses(), [Status::OK]);
    drop(owner);
    other.call::<MapRange>(&range(twice, gpu_id, 2, 1, VA + 128 * P), &[]).unwrap();

    // The blob goes, and its buffers with it.
    other.send(&ToWorker::DetachShared { resource: 60 }, None);
    other.send(&ToWorker::DetachShared { resource: 61 }, None);
    for handle in [imported, twice] {
        assert_eq!(free(&mut other, handle), (Status::BAD_HANDLE, 0));
    }
    assert_eq!(import(&mut other, 61, gpu_id, 0), Err((Status::BAD_RESOURCE, 0)));
    let last = alloc(&mut other, gpu_id, 0, 3, VRAM);
    other.call::<MapRange>(&range(last, gpu_id, 0, 3, VA), &[]).unwrap();
}

/// A process may import what it has exported itself.
#[test]
fn a_blob_of_ones_own_is_imported() {
    let (mut worker, gpu_id) = worker();
    let buffer = alloc(&mut worker, gpu_id, 0, 4, VRAM | PUBLIC);
    worker.send(&ToWorker::Export { ticket: 1, resource: 60, handle: buffer.0, size: 4 * P }, None);
    let (Other::Exported { piece: Ok(_), .. }, files) = worker.other() else { panic!("not exported") };
    assert_eq!(files.len(), 2, "the memory, and its dma-buf");
    let (whole, bytes) = import(&mut worker, 60, gpu_id, VA).unwrap();
    assert_eq!(bytes, 4 * P);
    let (mapped, _) = worker.call::<MapMemory>(&BufferRequest { handle: whole }, &[gpu_id]).unwrap();
    assert_eq!((mapped.n_success, mapped.errno), (1, 0));
    assert_eq!(free(&mut worker, buffer), (Status::OK, 0));
    assert_eq!(import(&mut worker, 60, gpu_id, 0), Err((Status::BAD_RESOURCE, 0)), "it is freed");
    worker.send(&ToWorker::DetachShared { resource: 60 }, None);
    assert_eq!(free(&mut worker, whole), (Status::BAD_HANDLE, 0));
}

/// A token ends before its buffer, and makes room for others; who has it keeps what it opened.
#[test]
fn a_token_ends_before_its_buffer() {
    let (mut owner, gpu_id) = worker();
    let (mut other, _) = worker();
    let buffer = alloc(&mut owner, gpu_id, 0, 8, VRAM | PUBLIC);
    let (token, offset, size, piece) = share(&mut owner, buffer, 5, 2);
    other.send(&ToWorker::AttachShared { resource: 60, offset, size }, Some(&piece));
    let (imported, _) = import(&mut other, 60, gpu_id, 0).unwrap();
    let unknown = UnshareMemoryRequest { token: ShareToken(token.0 ^ 1) };
    assert_eq!(owner.failure::<UnshareMemory>(&unknown, &[]), (Status::BAD_HANDLE, 0));
    let unshare = UnshareMemoryRequest { token };
    let mut request = frame(VERSION);
    request.push::<UnshareMemory>(&unshare, &[], 0).unwrap();
    owner.frame(0, request);
    assert_eq!(owner.other().0, Other::Unshare(token.0));
    assert_eq!(owner.answer(0).statuses(), [Status::OK]);
    // Once more while the other one has it: nothing happens.
    owner.call::<UnshareMemory>(&unshare, &[]).unwrap();
    other.call::<MapRange>(&range(imported, gpu_id, 0, 2, VA), &[]).unwrap();
    owner.send(&ToWorker::ShareGone { token: token.0 }, None);
    assert_eq!(owner.failure::<UnshareMemory>(&unshare, &[]), (Status::BAD_HANDLE, 0));
    // The same piece has another token now.
    let (again, ..) = share(&mut owner, buffer, 5, 2);
    assert_ne!(again, token);
    let mut last = again;
    // 256 at a time, and any number one after the other.
    for _ in 0..300 {
        let mut request = frame(VERSION);
        request.push::<UnshareMemory>(&UnshareMemoryRequest { token: last }, &[], 0).unwrap();
        owner.frame(0, request);
        assert_eq!(owner.other().0, Other::Unshare(last.0));
        assert_eq!(owner.answer(0).statuses(), [Status::OK]);
        owner.send(&ToWorker::ShareGone { token: last.0 }, None);
        (last, ..) = share(&mut owner, buffer, 5, 2);
    }
    let mut request = frame(VERSION);
    request.push::<FreeMemory>(&BufferRequest { handle: buffer }, &[], 0).unwrap();
    owner.frame(0, request);
    assert_eq!(owner.other().0, Other::Unshare(last.0), "only the one that there is");
    assert_eq!(owner.answer(0).statuses(), [Status::OK]);
}

/// Memory that another context has shared is not passed on by handle: neither the rest of the buffer that it is a piece of,
/// nor beyond the time for which its owner counts it.
#[test]
fn imported_memory_and_the_hosts_own_are_not_passed_on() {
    let (mut owner, gpu_id) = worker();
    let (mut other, _) = worker();
    let buffer = alloc(&mut owner, gpu_id, 0, 8, VRAM | PUBLIC);
    let (_, offset, size, piece) = share(&mut owner, buffer, 5, 2);
    let (_, _, _, whole) = share(&mut owner, buffer, 0, 8);
    other.send(&ToWorker::AttachShared { resource: 60, offset, size }, Some(&piece));
    other.send(&ToWorker::AttachShared { resource: 61, offset: 0, size: 8 * P }, Some(&whole));
    let (piece, _) = import(&mut other, 60, gpu_id, 0).unwrap();
    let (whole, _) = import(&mut other, 61, gpu_id, VA).unwrap();
    // A page of events, which the CPU sees.
    let gtt = alloc(&mut other, gpu_id, VA + 256 * P, 8, GTT);
    for (handle, pages) in [(piece, 2), (whole, 8), (gtt, 8)] {
        let request = ShareMemoryRequest { handle, offset: 0, size: pages * P };
        assert_eq!(other.failure::<ShareMemory>(&request, &[]), (Status::NOT_SUPPORTED, 0));
    }
    for (ticket, handle, pages) in [(1, piece, 2), (2, whole, 8)] {
        let size = pages * P;
        other.send(&ToWorker::Export { ticket, resource: 62, handle: handle.0, size }, None);
        assert_eq!(other.other().0, Other::Exported { ticket, piece: Err(1) }, "EPERM");
    }
    other.send(&ToWorker::Export { ticket: 3, resource: 62, handle: gtt.0, size: 8 * P }, None);
    let (Other::Exported { piece: Ok(piece), .. }, files) = other.other() else { panic!("not exported") };
    assert!(piece.memory.is_some());
    assert_eq!(files.len(), 1, "for the CPU, and not for other GPUs");
}

/// VRAM that no CPU can see is shared among GPUs all the same.
#[test]
fn private_memory_is_exported_for_gpus() {
    let (mut owner, gpu_id) = worker();
    let (mut other, _) = worker();
    let buffer = alloc(&mut owner, gpu_id, VA, 4, VRAM);
    owner.send(&ToWorker::Export { ticket: 1, resource: 60, handle: buffer.0, size: 4 * P }, None);
    let (Other::Exported { piece: Ok(piece), .. }, files) = owner.other() else { panic!("not exported") };
    assert_eq!((piece.memory, piece.vram, files.len()), (None, 4 * P, 1));
    let dmabuf = File::from(files.into_iter().next().unwrap());
    other.send(&ToWorker::AttachShared { resource: 60, offset: 0, size: 4 * P }, Some(&dmabuf));
    let (whole, _) = import(&mut other, 60, gpu_id, VA).unwrap();
    let (mapped, _) = other.call::<MapMemory>(&BufferRequest { handle: whole }, &[gpu_id]).unwrap();
    assert_eq!((mapped.n_success, mapped.errno), (1, 0));
}

/// VRAM that a blob or a token still holds is not free for another buffer.
#[test]
fn memory_counts_until_nothing_holds_it() {
    let limits = kfd_ipc::worker::Settings { vram_limit: Some(8 * P), ..settings() };
    let mut worker = Worker::greeted("gfx906", limits);
    let gpu_id = worker.acquire();
    let left = |worker: &mut Worker| {
        worker.call::<AvailableMemory>(&GpuRequest { gpu_id, pad: 0 }, &[]).unwrap().0.available / P
    };
    let buffer = alloc(&mut worker, gpu_id, 0, 6, VRAM | PUBLIC);
    worker.send(&ToWorker::Export { ticket: 1, resource: 60, handle: buffer.0, size: P }, None);
    let (Other::Exported { piece: Ok(_), .. }, _files) = worker.other() else { panic!("not exported") };
    let (token, ..) = share(&mut worker, buffer, 0, 1);
    let mut frame = frame(VERSION);
    frame.push::<FreeMemory>(&BufferRequest { handle: buffer }, &[], 0).unwrap();
    worker.frame(0, frame);
    assert_eq!(worker.other().0, Other::Unshare(token.0));
    assert_eq!(worker.answer(0).statuses(), [Status::OK]);
    assert_eq!(left(&mut worker), 2);
    worker.send(&ToWorker::DetachShared { resource: 60 }, None);
    assert_eq!(left(&mut worker), 2);
    worker.send(&ToWorker::ShareGone { token: token.0 }, None);
    assert_eq!(left(&mut worker), 8);
    // Freed last, it is free at once.
    let buffer = alloc(&mut worker, gpu_id, 0, 8, VRAM | PUBLIC);
    worker.send(&ToWorker::Export { ticket: 2, resource: 60, handle: buffer.0, size: P }, None);
    let (Other::Exported { piece: Ok(_), .. }, _files) = worker.other() else { panic!("not exported") };
    worker.send(&ToWorker::DetachShared { resource: 60 }, None);
    assert_eq!((left(&mut worker), free(&mut worker, buffer)), (0, (Status::OK, 0)));
    assert_eq!(left(&mut worker), 8);
}

#[test]
fn sizes_above_4_gib() {
    const GIB: u64 = 1 << 30;
    let (mut worker, gpu_id) = worker();
    let buffer = alloc(&mut worker, gpu_id, 0, 6 * GIB / P, VRAM | PUBLIC);
    worker.send(&ToWorker::Export { ticket: 1, resource: 60, handle: buffer.0, size: 6 * GIB }, None);
    let (Other::Exported { piece: Ok(piece), .. }, _files) = worker.other() else { panic!("not exported") };
    assert_eq!((piece.memory.unwrap().size, piece.vram), (6 * GIB, 6 * GIB));
    let high =
        MapRangeRequest { offset: 5 * GIB + P, size: GIB - P, ..range(buffer, gpu_id, 0, 1, VA + 8 * GIB) };
    worker.call::<MapRange>(&high, &[]).unwrap();
    let beyond = MapRangeRequest { size: GIB, ..high };
    assert_eq!(worker.failure::<MapRange>(&beyond, &[]), (Status::INVALID, 0));
    let (_, offset, size, _dmabuf) = share(&mut worker, buffer, (4 * GIB + P) / P, 2);
    assert_eq!((offset, size), (4 * GIB + P, 2 * P));
    let (whole, bytes) = import(&mut worker, 60, gpu_id, VA + 64 * GIB).unwrap();
    assert_eq!(bytes, 6 * GIB);
    let (mapped, _) = worker.call::<MapMemory>(&BufferRequest { handle: whole }, &[gpu_id]).unwrap();
    assert_eq!((mapped.n_success, mapped.errno), (1, 0));

    let ram = tempfile::tempfile().unwrap();
    ram.set_len(9 * GIB).unwrap();
    worker.send(&ToWorker::AddRegion { region: 1, file_offset: 0, size: 9 * GIB }, Some(&ram));
    let runs = vec![
        kfd_ipc::worker::Run { region: 1, offset: 4 * GIB, len: 5 * GIB },
        kfd_ipc::worker::Run { region: 1, offset: 0, len: 3 * GIB },
    ];
    worker
        .send(&ToWorker::AttachBlob { resource: 5, size: 8 * GIB, first_run: 0, total_runs: 2, runs }, None);
    for (offset, size, va) in [(0, 8 * GIB, VA + 128 * GIB), (4 * GIB, 4 * GIB, VA + 256 * GIB)] {
        let request = AllocMemoryRequest {
            va: GuestVa(va),
            size,
            gpu_id,
            flags: USERPTR | WRITABLE,
            resource: ResourceId(5),
            resource_offset: offset,
            ..Default::default()
        };
        let (guest, _) = worker.call::<AllocMemory>(&request, &[]).unwrap();
        let (mapped, _) =
            worker.call::<MapMemory>(&BufferRequest { handle: guest.handle }, &[gpu_id]).unwrap();
        assert_eq!((mapped.n_success, mapped.errno), (1, 0));
    }
}

/// Descriptors and mappings of the worker after many rounds of everything that has them.
#[test]
fn many_rounds_leave_nothing_behind() {
    let (mut worker, gpu_id) = worker();
    let count = |worker: &Worker| {
        let files = std::fs::read_dir(format!("/proc/{}/fd", worker.pid())).unwrap().count();
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", worker.pid())).unwrap();
        (files, maps.lines().filter(|line| line.contains("rw-s")).count())
    };
    let mut before = None;
    for round in 0..300u32 {
        let buffer = alloc(&mut worker, gpu_id, 0, 8, VRAM | PUBLIC);
        let export = ToWorker::Export { ticket: 1, resource: 60, handle: buffer.0, size: 8 * P };
        worker.send(&export, None);
        let (Other::Exported { piece: Ok(_), .. }, _files) = worker.other() else { panic!("not exported") };
        let (token, offset, size, dmabuf) = share(&mut worker, buffer, 2, 2);
        worker.send(&ToWorker::AttachShared { resource: 61, offset, size }, Some(&dmabuf));
        let (own, _) = import(&mut worker, 60, gpu_id, VA).unwrap();
        let (piece, _) = import(&mut worker, 61, gpu_id, 0).unwrap();
        for (handle, va) in [(buffer, VA + 64 * P), (own, VA + 128 * P), (piece, VA + 192 * P)] {
            worker.call::<MapRange>(&range(handle, gpu_id, 0, 2, va), &[]).unwrap();
        }
        // What fails is in nobody's way either.
        assert!(import(&mut worker, 61, gpu_id, VA + 256 * P).is_err());
        assert!(import(&mut worker, 62, gpu_id, 0).is_err());
        assert!(worker.call::<MapRange>(&range(piece, gpu_id, 0, 3, VA), &[]).is_err());
        if round % 2 == 0 {
            worker.call::<UnmapRange>(&unrange(own, gpu_id, 2, VA + 128 * P), &[]).unwrap();
            assert_eq!(free(&mut worker, own), (Status::OK, 0));
        }
        let mut frame = frame(VERSION);
        frame.push::<FreeMemory>(&BufferRequest { handle: buffer }, &[], 0).unwrap();
        worker.frame(0, frame);
        assert_eq!(worker.other().0, Other::Unshare(token.0));
        assert_eq!(worker.answer(0).statuses(), [Status::OK]);
        worker.send(&ToWorker::DetachShared { resource: 60 }, None);
        worker.send(&ToWorker::DetachShared { resource: 61 }, None);
        worker.send(&ToWorker::ShareGone { token: token.0 }, None);
        worker.call::<Nop>(&Nothing {}, &[]).unwrap();
        if round == 10 {
            before = Some(count(&worker));
        }
    }
    assert_eq!(Some(count(&worker)), before);
}

#[test]
fn what_is_left_with_a_buffer_is_seen_by_who_has_it() {
    // amdgpu_gem_metadata_ioctl: it is the buffer's, and all files of the device that have it see the same.
    let (mut owner, gpu_id) = worker();
    let (mut other, _) = worker();
    let buffer = alloc(&mut owner, gpu_id, VA, 8, VRAM);
    let ask = |handle| BufferMetadataRequest { handle, gpu_id, pad: 0 };
    let nothing = owner.call::<BufferMetadata>(&ask(buffer), &[]).unwrap();
    assert_eq!(nothing, (BufferMetadataAnswer::default(), Vec::new()));
    let request = SetBufferMetadataRequest { handle: buffer, gpu_id, pad: 0, flags: 5, tiling: 0x1234 };
    owner.call::<SetBufferMetadata>(&request, &[1, 2, 3, 4, 5, 6]).unwrap();
    let (_, offset, size, dmabuf) = share(&mut owner, buffer, 2, 3);
    other.send(&ToWorker::AttachShared { resource: 60, offset, size }, Some(&dmabuf));
    let (imported, _) = import(&mut other, 60, gpu_id, 0).unwrap();
    for (worker, handle) in [(&mut owner, buffer), (&mut other, imported)] {
        let (fixed, bytes) = worker.call::<BufferMetadata>(&ask(handle), &[]).unwrap();
        assert_eq!((fixed.flags, fixed.tiling, bytes), (5, 0x1234, vec![1, 2, 3, 4, 5, 6]));
    }
    let request = SetBufferMetadataRequest { handle: imported, ..request };
    other.call::<SetBufferMetadata>(&request, &[9; 256]).unwrap();
    assert_eq!(owner.call::<BufferMetadata>(&ask(buffer), &[]).unwrap().1, [9; 256]);
    // KFD's buffer is freed although the render node has it.
    assert_eq!(free(&mut other, imported), (Status::OK, 0));
    assert_eq!(other.failure::<BufferMetadata>(&ask(imported), &[]), (Status::BAD_HANDLE, 0));
    let padded = BufferMetadataRequest { pad: 1, ..ask(buffer) };
    assert_eq!(owner.failure::<BufferMetadata>(&padded, &[]), (Status::INVALID, 0));
    let nowhere = BufferMetadataRequest { gpu_id: GpuId(1), ..ask(buffer) };
    assert_ne!(owner.failure::<BufferMetadata>(&nowhere, &[]).0, Status::OK);
}

#[test]
fn before_kfd_1_15_buffers_stay_away_from_render_nodes() {
    // There KFD and the render node make mappings of their own of one buffer, and closing the render node's handle deletes the newest
    // one (kfd_mem_attach without amdgpu_vm_bo_find, amdgpu_gem_object_close; Linux 6.6).
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("old.toml");
    let profile = concat!(env!("CARGO_MANIFEST_DIR"), "/../kfd-model/profiles/gfx906.toml");
    let text = std::fs::read_to_string(profile).unwrap();
    let old = text.replace("kfd_minor = 17", "kfd_minor = 14");
    assert_ne!(text, old);
    std::fs::write(&path, old).unwrap();
    let (mut worker, gpu_id) = worker_on(path.to_str().unwrap());
    let buffer = alloc(&mut worker, gpu_id, VA, 8, VRAM);
    let ask = BufferMetadataRequest { handle: buffer, gpu_id, pad: 0 };
    assert_eq!(worker.failure::<BufferMetadata>(&ask, &[]), (Status::NOT_SUPPORTED, 0));
    let leave = SetBufferMetadataRequest { handle: buffer, gpu_id, pad: 0, flags: 0, tiling: 0 };
    assert_eq!(worker.failure::<SetBufferMetadata>(&leave, &[1, 2, 3, 4]), (Status::NOT_SUPPORTED, 0));
    let piece = range(buffer, gpu_id, 0, 1, VA + 64 * P);
    assert_eq!(worker.failure::<MapRange>(&piece, &[]), (Status::NOT_SUPPORTED, 0));
    assert_eq!(free(&mut worker, buffer), (Status::OK, 0));
}
