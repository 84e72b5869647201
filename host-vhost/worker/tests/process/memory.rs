//! Buffers: guest memory, GTT, VRAM, their limits, and how they are taken back.

use std::fs::File;
use std::os::unix::fs::FileExt;

use kfd_ipc::ledger::{Counted, Ledger};
use kfd_ipc::worker::{Caching, Run, Settings, ToWorker};
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::*;

use crate::support::memory::{GTT, PUBLIC, USERPTR, VRAM, WRITABLE};
use crate::support::*;

const VA: u64 = 0x7f00_0000_0000;
const EBUSY: u32 = 16;
const EINVAL: i32 = 22;

/// A worker on a GPU whose address space is acquired.
fn worker(settings: Settings) -> (Worker, GpuId) {
    on_gpu("gfx906", settings)
}

fn alloc(gpu_id: GpuId, page: u64, pages: u64, flags: u32) -> AllocMemoryRequest {
    AllocMemoryRequest {
        va: GuestVa(VA + page * 4096),
        size: pages * 4096,
        gpu_id,
        flags: flags | WRITABLE,
        ..Default::default()
    }
}

fn guest_ram() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(64 * 4096).unwrap();
    file
}

/// Shared mappings of a file in the worker.
fn mappings(worker: &Worker) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", worker.pid())).unwrap();
    maps.lines()
        .filter(|line| line.contains("rw-s") && line.contains("(deleted)") && !line.contains("memfd:"))
        .count()
}

#[test]
fn guest_memory_is_allocated_and_mapped_in_one_frame_and_freed() {
    let (mut worker, gpu_id) = worker(settings());
    worker.guest_memory(&guest_ram(), 64, 5, &[3, 4, 9, 1]);
    let request = AllocMemoryRequest { resource: ResourceId(5), ..alloc(gpu_id, 0, 4, USERPTR) };
    let mut both = frame(VERSION);
    let index = both.push::<AllocMemory>(&request, &[], 0).unwrap();
    both.push::<MapMemory>(&BufferRequest { handle: Handle::in_frame(index) }, &[gpu_id], 0).unwrap();
    worker.frame(0, both);
    let answer = worker.answer(0);
    let (allocated, _) = answer.decode::<AllocMemory>(0).unwrap();
    let (mapped, _) = answer.decode::<MapMemory>(1).unwrap();
    assert_eq!((allocated.mappable, mapped.n_success, mapped.errno), (0, 1, 0));
    assert_eq!(mappings(&worker), 3, "pages 3 and 4 are one mapping");

    let buffer = BufferRequest { handle: allocated.handle };
    // amdgpu_amdkfd_gpuvm_free_memory_of_gpu refuses what a GPU still maps.
    assert_eq!(worker.failure::<FreeMemory>(&buffer, &[]), (Status::ERRNO, EBUSY));
    let (unmapped, _) = worker.call::<UnmapMemory>(&buffer, &[gpu_id]).unwrap();
    assert_eq!((unmapped.n_success, unmapped.errno), (1, 0));
    worker.call::<FreeMemory>(&buffer, &[]).unwrap();
    assert_eq!(mappings(&worker), 0);
    assert_eq!(worker.failure::<FreeMemory>(&buffer, &[]), (Status::BAD_HANDLE, 0));
    assert_eq!(worker.failure::<MapMemory>(&buffer, &[gpu_id]), (Status::BAD_HANDLE, 0));
}

#[test]
fn a_frame_stops_at_the_first_failure() {
    let (mut worker, gpu_id) = worker(settings());
    let mut frame = frame(VERSION);
    frame.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    frame.push::<MapMemory>(&BufferRequest { handle: Handle::in_frame(0) }, &[gpu_id], 0).unwrap();
    frame.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    worker.frame(0, frame);
    assert_eq!(worker.answer(0).statuses(), [Status::OK, Status::BAD_HANDLE, Status::NOT_RUN]);
    // A map without GPUs is EINVAL in the kernel (kfd_ioctl_map_memory_to_gpu), told inside an answer that is OK.
    let (buffer, _) = worker.call::<AllocMemory>(&alloc(gpu_id, 0, 1, GTT), &[]).unwrap();
    let mut frame = crate::support::frame(VERSION);
    frame.push::<MapMemory>(&BufferRequest { handle: buffer.handle }, &[], 0).unwrap();
    frame.push::<Nop>(&Nothing {}, &[], 0).unwrap();
    worker.frame(0, frame);
    let answer = worker.answer(0);
    assert_eq!(answer.statuses(), [Status::OK, Status::NOT_RUN]);
    assert_eq!(answer.decode::<MapMemory>(0).unwrap().0.errno, 22);
}

#[test]
fn blobs_are_taken_back_with_all_that_lies_on_them() {
    let (mut worker, gpu_id) = worker(settings());
    for resource in [5, 6] {
        worker.guest_memory(&guest_ram(), 64, resource, &[0, 2]);
        for page in 0..2 {
            let request = AllocMemoryRequest {
                resource: ResourceId(resource),
                resource_offset: page * 4096,
                ..alloc(gpu_id, u64::from(resource) * 16 + page, 1, USERPTR)
            };
            let (buffer, _) = worker.call::<AllocMemory>(&request, &[]).unwrap();
            if page == 0 {
                let handle = buffer.handle;
                worker.call::<MapMemory>(&BufferRequest { handle }, &[gpu_id]).unwrap();
            }
        }
    }
    assert_eq!(mappings(&worker), 4);
    worker.send(&ToWorker::DetachBlob { resource: 5, ticket: 77 }, None);
    assert_eq!(worker.other().0, Other::Done(77));
    assert_eq!(mappings(&worker), 2);
    worker.send(&ToWorker::RemoveRegion { region: 6, ticket: 78 }, None);
    assert_eq!(worker.other().0, Other::Done(78));
    assert_eq!(mappings(&worker), 0);
    for resource in [5, 6, 7] {
        let request = AllocMemoryRequest { resource: ResourceId(resource), ..alloc(gpu_id, 0, 1, USERPTR) };
        assert_eq!(worker.failure::<AllocMemory>(&request, &[]), (Status::BAD_RESOURCE, 0), "{resource}");
    }
    // The addresses are free again.
    worker.call::<AllocMemory>(&alloc(gpu_id, 5 * 16, 1, GTT), &[]).unwrap();
}

#[test]
fn what_cannot_be_allocated() {
    let (mut worker, gpu_id) = worker(settings());
    worker.guest_memory(&guest_ram(), 64, 5, &[0, 2]);
    let on_blob = |offset, pages| AllocMemoryRequest {
        resource: ResourceId(5),
        resource_offset: offset,
        ..alloc(gpu_id, 0, pages, USERPTR)
    };
    let cases = [
        ("beyond the blob", on_blob(4096, 2), Status::BAD_RESOURCE),
        ("far beyond the blob", on_blob(u64::MAX - 4095, 1), Status::BAD_RESOURCE),
        ("half a page in", on_blob(2048, 1), Status::INVALID),
        ("no blob", alloc(gpu_id, 0, 1, USERPTR), Status::BAD_RESOURCE),
        ("a blob beside VRAM", AllocMemoryRequest { flags: VRAM, ..on_blob(0, 1) }, Status::INVALID),
        ("no kind", alloc(gpu_id, 0, 1, 0), Status::INVALID),
        ("two kinds", alloc(gpu_id, 0, 1, VRAM | GTT), Status::INVALID),
        ("an unknown flag", alloc(gpu_id, 0, 1, GTT | 1 << 10), Status::INVALID),
        ("no size", alloc(gpu_id, 0, 0, GTT), Status::INVALID),
        ("half a page", AllocMemoryRequest { size: 2048, ..alloc(gpu_id, 0, 1, GTT) }, Status::INVALID),
        (
            "an odd address",
            AllocMemoryRequest { va: GuestVa(VA + 1), ..alloc(gpu_id, 0, 1, GTT) },
            Status::INVALID,
        ),
        (
            "the end of the address space",
            AllocMemoryRequest { va: GuestVa(u64::MAX - 4095), ..alloc(gpu_id, 0, 2, GTT) },
            Status::INVALID,
        ),
    ];
    for (what, request, status) in cases {
        assert_eq!(worker.failure::<AllocMemory>(&request, &[]), (status, 0), "{what}");
    }
    assert_eq!(mappings(&worker), 0);
}

#[test]
fn limits_of_the_operator_hold_and_come_back() {
    let limits = Settings {
        vram_limit: Some(8 * 4096),
        guest_memory_limit: Some(4 * 4096),
        max_buffers: 3,
        max_runs: 4,
        ..settings()
    };
    let (mut worker, gpu_id) = worker(limits);
    let gpu = GpuRequest { gpu_id, pad: 0 };
    let left = |worker: &mut Worker| worker.call::<AvailableMemory>(&gpu, &[]).unwrap().0.available / 4096;
    assert_eq!(left(&mut worker), 8);
    assert_eq!(worker.failure::<AllocMemory>(&alloc(gpu_id, 0, 9, VRAM), &[]), (Status::LIMIT, 0));
    let (vram, _) = worker.call::<AllocMemory>(&alloc(gpu_id, 0, 6, VRAM), &[]).unwrap();
    assert_eq!(left(&mut worker), 2);
    assert_eq!(worker.failure::<AllocMemory>(&alloc(gpu_id, 8, 3, VRAM), &[]), (Status::LIMIT, 0));
    worker.call::<FreeMemory>(&BufferRequest { handle: vram.handle }, &[]).unwrap();
    assert_eq!(left(&mut worker), 8);

    let (gtt, _) = worker.call::<AllocMemory>(&alloc(gpu_id, 0, 3, GTT), &[]).unwrap();
    worker.guest_memory(&guest_ram(), 64, 5, &[0, 2, 4]);
    let on_blob = |page: u64, pages| AllocMemoryRequest {
        resource: ResourceId(5),
        ..alloc(gpu_id, 16 + page, pages, USERPTR)
    };
    assert_eq!(worker.failure::<AllocMemory>(&on_blob(0, 2), &[]), (Status::LIMIT, 0), "bytes");
    worker.call::<FreeMemory>(&BufferRequest { handle: gtt.handle }, &[]).unwrap();
    worker.call::<AllocMemory>(&on_blob(0, 2), &[]).unwrap();
    worker.call::<AllocMemory>(&on_blob(4, 1), &[]).unwrap();
    worker.call::<AllocMemory>(&on_blob(8, 1), &[]).unwrap();
    assert_eq!(worker.failure::<AllocMemory>(&alloc(gpu_id, 0, 1, VRAM), &[]), (Status::LIMIT, 0), "buffers");
    // The list of a further blob would be the fourth and fifth run.
    worker.guest_memory(&guest_ram(), 64, 6, &[0, 2]);
    worker.send(&ToWorker::DetachBlob { resource: 5, ticket: 1 }, None);
    worker.other();
    let request = AllocMemoryRequest { resource: ResourceId(6), ..alloc(gpu_id, 0, 1, USERPTR) };
    assert_eq!(worker.failure::<AllocMemory>(&request, &[]), (Status::LIMIT, 0), "runs");
}

#[test]
fn memory_of_the_host_is_bounded_without_an_operators_limit() {
    let (mut worker, gpu_id) = worker(settings());
    let pages = (16 << 20) / 4096;
    let most = alloc(gpu_id, 0, pages, GTT);
    let (whole, _) = worker.call::<AllocMemory>(&most, &[]).unwrap();
    assert_eq!(worker.failure::<AllocMemory>(&alloc(gpu_id, pages, 1, GTT), &[]), (Status::LIMIT, 0));
    worker.call::<FreeMemory>(&BufferRequest { handle: whole.handle }, &[]).unwrap();
    assert_eq!(
        worker.failure::<AllocMemory>(&alloc(gpu_id, 0, pages + 1, GTT), &[]),
        (Status::LIMIT, 0),
        "alone"
    );
    worker.call::<AllocMemory>(&most, &[]).expect("what was given back can be had again");
}

#[test]
fn exported_memory_is_the_buffers_own() {
    let (mut worker, gpu_id) = worker(settings());
    let (gtt, _) = worker.call::<AllocMemory>(&alloc(gpu_id, 0, 4, GTT), &[]).unwrap();
    let (public, _) = worker.call::<AllocMemory>(&alloc(gpu_id, 8, 4, VRAM | PUBLIC), &[]).unwrap();
    let (private, _) = worker.call::<AllocMemory>(&alloc(gpu_id, 16, 4, VRAM), &[]).unwrap();
    assert_eq!([gtt.mappable, public.mappable, private.mappable], [1, 1, 0]);
    let mut export = |handle: Handle, size| {
        let ticket = worker.ticket();
        let resource = 100 + ticket as u32;
        worker.send(&ToWorker::Export { ticket, resource, handle: handle.0, size }, None);
        match worker.other() {
            (Other::Exported { ticket: answered, piece }, files) if answered == ticket => {
                (piece.map(|piece| piece.memory), files)
            }
            other => panic!("{other:?}"),
        }
    };
    let (memory, files) = export(gtt.handle, 4 * 4096);
    let (memory, file) = (memory.unwrap().unwrap(), File::from(files.into_iter().next().unwrap()));
    assert_eq!((memory.size, memory.caching), (4 * 4096, Caching::Cached));
    // The model's render node is a memfd with the memory at the offset that mmap takes.
    file.write_all_at(b"shared", memory.offset).unwrap();
    let (memory, _) = export(public.handle, 4096);
    assert_eq!(memory.unwrap().unwrap().caching, Caching::WriteCombining);
    let (memory, files) = export(private.handle, 4096);
    assert_eq!((memory, files.len()), (Ok(None), 1), "for GPUs alone");
    for (handle, size) in
        [(gtt.handle, 5 * 4096), (gtt.handle, 0), (gtt.handle, 1), (gtt.handle, u64::MAX), (Handle(9), 4096)]
    {
        assert_eq!(export(handle, size).0, Err(EINVAL), "{handle:?} {size}");
    }
    drop(file);
}

/// KFD shows an AQL ring twice in a row: a blob of half its size is behind it
/// (`amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu`).
#[test]
fn an_aql_ring_lies_on_half_its_size() {
    const AQL_QUEUE_MEM: u32 = 1 << 27;
    let (mut worker, gpu_id) = worker(Settings { guest_memory_limit: Some(4 * 4096), ..settings() });
    worker.guest_memory(&guest_ram(), 64, 5, &[0, 2, 4]);
    let ring = |pages, offset: u64| AllocMemoryRequest {
        resource: ResourceId(5),
        resource_offset: offset * 4096,
        ..alloc(gpu_id, 0, pages, USERPTR | AQL_QUEUE_MEM)
    };
    assert_eq!(worker.failure::<AllocMemory>(&ring(3, 0), &[]), (Status::INVALID, 0), "one page and a half");
    assert_eq!(worker.failure::<AllocMemory>(&ring(8, 0), &[]), (Status::BAD_RESOURCE, 0), "beyond the blob");
    assert_eq!(worker.failure::<AllocMemory>(&ring(6, 1), &[]), (Status::BAD_RESOURCE, 0), "beyond the blob");
    let (buffer, _) = worker.call::<AllocMemory>(&ring(6, 0), &[]).unwrap();
    assert_eq!(mappings(&worker), 3);
    let buffer = BufferRequest { handle: buffer.handle };
    let (mapped, _) = worker.call::<MapMemory>(&buffer, &[gpu_id]).unwrap();
    assert_eq!((mapped.n_success, mapped.errno), (1, 0));
    // Three of the four pages of the limit are used, not six.
    let more = AllocMemoryRequest { resource: ResourceId(5), ..alloc(gpu_id, 64, 1, USERPTR) };
    worker.call::<AllocMemory>(&more, &[]).unwrap();
    worker.call::<UnmapMemory>(&buffer, &[gpu_id]).unwrap();
    worker.call::<FreeMemory>(&buffer, &[]).unwrap();
}

/// KFD takes address 0 for memory that gets its addresses by other means, and refuses only to map it (facts of
/// hsaKmtAllocMemory with NoAddress).
#[test]
fn memory_without_an_address_can_be_had() {
    let (mut worker, gpu_id) = worker(settings());
    let request = AllocMemoryRequest { va: GuestVa(0), ..alloc(gpu_id, 0, 4, VRAM | PUBLIC) };
    let (one, _) = worker.call::<AllocMemory>(&request, &[]).unwrap();
    let (two, _) = worker.call::<AllocMemory>(&request, &[]).unwrap();
    assert_eq!((one.mappable, two.mappable), (1, 1));
    for buffer in [one, two] {
        worker.call::<FreeMemory>(&BufferRequest { handle: buffer.handle }, &[]).unwrap();
    }
}

#[test]
fn limits_of_the_vm_hold_over_its_contexts() {
    let ledger = Ledger::create(3).unwrap();
    let file = File::from(ledger.file().try_clone_to_owned().unwrap());
    let start = |slot| {
        let limits = Settings {
            vram_limit: Some(6 * 4096),
            vm_vram_limit: Some(8 * 4096),
            vm_guest_memory_limit: Some(4 * 4096),
            ledger_slot: slot,
            ..settings()
        };
        let mut worker = Worker::spawn(Some("gfx906"));
        worker.start_with(limits, Some(&file));
        worker.hello().unwrap();
        let gpu_id = worker.acquire();
        (worker, gpu_id)
    };
    let ((mut a, gpu_id), (mut b, _)) = (start(0), start(1));
    let gpu = GpuRequest { gpu_id, pad: 0 };
    let left = |worker: &mut Worker| worker.call::<AvailableMemory>(&gpu, &[]).unwrap().0.available / 4096;
    let vram = |page, pages| alloc(gpu_id, page, pages, VRAM);
    assert_eq!((left(&mut a), left(&mut b)), (6, 6));
    let (held, _) = a.call::<AllocMemory>(&vram(0, 5), &[]).unwrap();
    assert_eq!((left(&mut a), left(&mut b)), (1, 3));
    assert_eq!(b.failure::<AllocMemory>(&vram(0, 4), &[]), (Status::LIMIT, 0));
    let (_second, _) = b.call::<AllocMemory>(&vram(0, 3), &[]).unwrap();
    assert_eq!((left(&mut a), left(&mut b)), (0, 0));
    assert_eq!(a.failure::<AllocMemory>(&vram(8, 1), &[]), (Status::LIMIT, 0));
    // What is held stays usable, and what is given back can be had by the other.
    let (mapped, _) = a.call::<MapMemory>(&BufferRequest { handle: held.handle }, &[gpu_id]).unwrap();
    assert_eq!((mapped.n_success, mapped.errno), (1, 0));
    a.call::<UnmapMemory>(&BufferRequest { handle: held.handle }, &[gpu_id]).unwrap();
    a.call::<FreeMemory>(&BufferRequest { handle: held.handle }, &[]).unwrap();
    assert_eq!((left(&mut a), left(&mut b)), (5, 3), "its own limit, and the VM's");
    assert_eq!(ledger.of(0, Counted::Vram), 0);
    // Guest memory.
    for worker in [&mut a, &mut b] {
        worker.guest_memory(&guest_ram(), 64, 5, &[0, 2, 4]);
    }
    let on_blob = |pages| AllocMemoryRequest { resource: ResourceId(5), ..alloc(gpu_id, 16, pages, USERPTR) };
    a.call::<AllocMemory>(&on_blob(3), &[]).unwrap();
    assert_eq!(b.failure::<AllocMemory>(&on_blob(2), &[]), (Status::LIMIT, 0));
    b.call::<AllocMemory>(&on_blob(1), &[]).unwrap();
    assert_eq!((ledger.of(0, Counted::System), ledger.of(1, Counted::System)), (3 * 4096, 4096));
    // The device clears the slot of a worker that is gone.
    drop(b);
    ledger.clear(1);
    assert_eq!(left(&mut a), 6);
}

/// A guest whose every page lies apart from the next: up to the bounds all of it is real mappings, of which a process
/// has 65,530 (`vm.max_map_count`).
#[test]
fn scattered_memory_works_up_to_its_bounds() {
    use virtio_kfd_protocol::limits::MAX_BLOB_RUNS;
    /// What the device gives a context (`MAX_RUNS_PER_CONTEXT`).
    const ALL: u64 = 48 * 1024;
    let (mut worker, gpu_id) = worker(Settings { max_runs: ALL as u32, ..settings() });
    let pages = 2 * ALL + 2;
    let file = tempfile::tempfile().unwrap();
    file.set_len(pages * 4096).unwrap();
    worker.send(&ToWorker::AddRegion { region: 1, file_offset: 0, size: pages * 4096 }, Some(&file));
    let attach = |worker: &mut Worker, resource: u32, first_page: u64, count: u64| {
        let runs: Vec<Run> = (0..count)
            .map(|run| Run { region: 1, offset: (first_page + 2 * run) * 4096, len: 4096 })
            .collect();
        for (first_run, runs) in (0..).step_by(4096).zip(runs.chunks(4096)) {
            let (size, total_runs, runs) = (count * 4096, count as u32, runs.to_vec());
            worker.send(&ToWorker::AttachBlob { resource, size, first_run, total_runs, runs }, None);
        }
    };
    let most = MAX_BLOB_RUNS as u64;
    attach(&mut worker, 5, 0, most);
    attach(&mut worker, 6, 2 * most, ALL - most);
    attach(&mut worker, 7, 2 * ALL, 1);
    attach(&mut worker, 8, 0, most + 1);
    let on = |resource, page: u64, count: u64| AllocMemoryRequest {
        resource: ResourceId(resource),
        ..alloc(gpu_id, page, count, USERPTR)
    };
    let mut buffers = Vec::new();
    for (resource, page, count) in [(5, 0, most), (6, 2 * most, ALL - most)] {
        let (buffer, _) = worker.call::<AllocMemory>(&on(resource, page, count), &[]).unwrap();
        let buffer = BufferRequest { handle: buffer.handle };
        let (mapped, _) = worker.call::<MapMemory>(&buffer, &[gpu_id]).unwrap();
        assert_eq!((mapped.n_success, mapped.errno), (1, 0));
        buffers.push(buffer);
    }
    assert_eq!(mappings(&worker), ALL as usize);
    // One run more: of the context, of its mappings, of a blob.
    for (resource, count) in [(7, 1), (8, 1), (5, 1)] {
        let request = on(resource, 4 * ALL, count);
        assert_eq!(worker.failure::<AllocMemory>(&request, &[]), (Status::LIMIT, 0), "{resource}");
    }
    // What is held works on, and comes back whole.
    for buffer in buffers {
        let (unmapped, _) = worker.call::<UnmapMemory>(&buffer, &[gpu_id]).unwrap();
        assert_eq!((unmapped.n_success, unmapped.errno), (1, 0));
        worker.call::<FreeMemory>(&buffer, &[]).unwrap();
    }
    assert_eq!(mappings(&worker), 0);
    let (whole, _) = worker.call::<AllocMemory>(&on(5, 0, most), &[]).unwrap();
    assert_eq!(mappings(&worker), most as usize);
    worker.call::<FreeMemory>(&BufferRequest { handle: whole.handle }, &[]).unwrap();
}

/// Memory hotplug: of a blob over two regions the part on the one that is left works on.
#[test]
fn a_region_takes_what_lies_on_it_and_nothing_else() {
    let (mut worker, gpu_id) = worker(settings());
    for region in [1, 2] {
        worker.send(&ToWorker::AddRegion { region, file_offset: 0, size: 64 * 4096 }, Some(&guest_ram()));
    }
    let run = |region, page: u64| Run { region, offset: page * 4096, len: 2 * 4096 };
    let runs = vec![run(1, 0), run(2, 8)];
    worker
        .send(&ToWorker::AttachBlob { resource: 5, size: 4 * 4096, first_run: 0, total_runs: 2, runs }, None);
    let on_blob = |va_page, first: u64, pages| AllocMemoryRequest {
        resource: ResourceId(5),
        resource_offset: first * 4096,
        ..alloc(gpu_id, va_page, pages, USERPTR)
    };
    let buffers: Vec<BufferRequest> = [(0, 0, 2), (8, 2, 2), (16, 1, 2)]
        .into_iter()
        .map(|(va_page, first, pages)| {
            let (made, _) = worker.call::<AllocMemory>(&on_blob(va_page, first, pages), &[]).unwrap();
            let buffer = BufferRequest { handle: made.handle };
            let (mapped, _) = worker.call::<MapMemory>(&buffer, &[gpu_id]).unwrap();
            assert_eq!((mapped.n_success, mapped.errno), (1, 0));
            buffer
        })
        .collect();
    assert_eq!(mappings(&worker), 4);
    worker.send(&ToWorker::RemoveRegion { region: 2, ticket: 1 }, None);
    assert_eq!(worker.other().0, Other::Done(1));
    assert_eq!(mappings(&worker), 1);
    for (buffer, gone) in buffers.iter().zip([false, true, true]) {
        let status = worker.failure::<UnmapMemory>(buffer, &[gpu_id]).0;
        assert_eq!(status, if gone { Status::BAD_HANDLE } else { Status::OK });
    }
    worker.call::<AllocMemory>(&on_blob(24, 1, 1), &[]).unwrap();
    for (first, pages) in [(2, 1), (3, 1), (1, 2), (0, 4)] {
        let request = on_blob(32, first, pages);
        assert_eq!(
            worker.failure::<AllocMemory>(&request, &[]),
            (Status::BAD_RESOURCE, 0),
            "{first} {pages}"
        );
    }
    // Another region in its place is another one.
    worker.send(&ToWorker::AddRegion { region: 3, file_offset: 0, size: 64 * 4096 }, Some(&guest_ram()));
    assert_eq!(worker.failure::<AllocMemory>(&on_blob(32, 2, 1), &[]), (Status::BAD_RESOURCE, 0));
}
