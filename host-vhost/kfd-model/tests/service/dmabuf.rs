//! dma-bufs between buffers, GPUs and processes. Two models in one test process are two processes to each other: each
//! knows the other's memory by its descriptors only.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use kfd_abi::memory::AllocFlags;
use kfd_model::dmabuf::recognise;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::caller::{Caller, PAGE, open, peek, poke};

const VA: u64 = 0x7000_0000_0000;
const VRAM: AllocFlags = AllocFlags::VRAM.union(AllocFlags::WRITABLE);
const GTT: AllocFlags = AllocFlags::GTT.union(AllocFlags::WRITABLE);

/// Passes a descriptor as SCM_RIGHTS does: another number for the same open file description.
fn passed(descriptor: OwnedFd) -> OwnedFd {
    descriptor.try_clone().unwrap()
}

#[test]
fn another_process_sees_the_same_bytes() {
    let exporter = Caller::new("gfx906");
    let importer = Caller::new("gfx906");
    let gpu = exporter.gpu();
    for (number, flags) in
        [VRAM | AllocFlags::PUBLIC, VRAM, GTT | AllocFlags::COHERENT].into_iter().enumerate()
    {
        let va = VA + (number as u64) * (1 << 30);
        let buffer = exporter.allocate(gpu, va, 4 * PAGE, flags).unwrap();
        exporter.map(buffer.handle, &[gpu]).0.unwrap();
        exporter.model.write_gpu(gpu, va + 3 * PAGE, b"exported").unwrap();
        let dmabuf = passed(exporter.export(buffer.handle).unwrap());

        // amdgpu_amdkfd_get_dmabuf_info: what it is and of which GPU.
        let (result, info) = importer.dmabuf_info(&dmabuf, &mut []);
        assert_eq!((result, info.size, info.gpu_id), (Ok(0), 4 * PAGE, gpu));
        let kind = flags & (AllocFlags::VRAM | AllocFlags::GTT | AllocFlags::PUBLIC);
        assert_eq!(info.flags, kind.bits());

        let handle = importer.import(gpu, va + PAGE, &dmabuf).unwrap();
        drop(dmabuf);
        importer.map(handle, &[gpu]).0.unwrap();
        assert_eq!(importer.seen(gpu, va + 4 * PAGE, 8).unwrap(), b"exported");
        assert!(importer.seen(gpu, va + 5 * PAGE, 1).is_err(), "not beyond its end");
        importer.model.write_gpu(gpu, va + PAGE, b"imported").unwrap();
        assert_eq!(exporter.seen(gpu, va, 8).unwrap(), b"imported");
        assert_eq!(importer.free(handle), Err(Errno::EBUSY), "still mapped");
        importer.unmap(handle, &[gpu]).0.unwrap();
        importer.free(handle).unwrap();
    }
}

#[test]
fn memory_outlives_its_exporters_free_and_stays_accounted() {
    let exporter = Caller::new("gfx906");
    let importer = Caller::new("gfx906");
    let gpu = exporter.gpu();
    let size = 8 << 20;
    let before = exporter.available();
    let buffer = exporter.allocate(gpu, VA, size, VRAM).unwrap();
    let map = exporter.mmap_render(&exporter.gpus[0], buffer.mmap_offset, size).unwrap();
    poke(&map, 0, b"kept");
    drop(map);
    let dmabuf = exporter.export(buffer.handle).unwrap();
    exporter.free(buffer.handle).unwrap();
    assert_eq!(exporter.available(), before - size, "a dma-buf holds it");
    // Its range is not given out again while it is held.
    let others: Vec<_> = (0..64).map(|_| exporter.allocate(gpu, VA, 64 << 20, VRAM).unwrap()).collect();
    assert!(others.iter().all(|other| other.mmap_offset.abs_diff(buffer.mmap_offset) >= size));
    for other in others {
        exporter.free(other.handle).unwrap();
    }
    let handle = importer.import(gpu, VA, &dmabuf).unwrap();
    drop(dmabuf);
    assert_eq!(exporter.available(), before - size, "an import holds it");
    importer.map(handle, &[gpu]).0.unwrap();
    assert_eq!(importer.seen(gpu, VA, 4).unwrap(), b"kept");
    importer.unmap(handle, &[gpu]).0.unwrap();
    importer.free(handle).unwrap();
    assert_eq!(exporter.available(), before, "the last use is gone");

    // The exporter is gone altogether.
    let buffer = exporter.allocate(gpu, VA, PAGE, VRAM).unwrap();
    exporter.map(buffer.handle, &[gpu]).0.unwrap();
    exporter.model.write_gpu(gpu, VA, b"orphan").unwrap();
    let handle = importer.import(gpu, VA, exporter.export(buffer.handle).unwrap()).unwrap();
    drop(exporter);
    importer.map(handle, &[gpu]).0.unwrap();
    assert_eq!(importer.seen(gpu, VA, 6).unwrap(), b"orphan");
}

#[test]
fn ones_own_dma_buf_is_the_buffer_itself() {
    // amdgpu_gem_prime_import: obj->dev == dev.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let buffer = caller.allocate(gpu, VA, 2 * PAGE, VRAM).unwrap();
    let dmabuf = caller.export(buffer.handle).unwrap();
    let again = caller.import(gpu, VA + (1 << 30), &dmabuf).unwrap();
    assert_ne!(again, buffer.handle);
    caller.map(buffer.handle, &[gpu]).0.unwrap();
    caller.map(again, &[gpu]).0.unwrap();
    caller.model.write_gpu(gpu, VA + PAGE, b"one").unwrap();
    assert_eq!(caller.seen(gpu, VA + (1 << 30) + PAGE, 3).unwrap(), b"one");
    caller.unmap(buffer.handle, &[gpu]).0.unwrap();
    caller.free(buffer.handle).unwrap();
    assert_eq!(caller.seen(gpu, VA + (1 << 30) + PAGE, 3).unwrap(), b"one", "the import keeps it");
    caller.unmap(again, &[gpu]).0.unwrap();
    caller.free(again).unwrap();
    // Nothing refers to it but the dma-buf; from there it comes back.
    let back = caller.import(gpu, VA, &dmabuf).unwrap();
    caller.map(back, &[gpu]).0.unwrap();
    assert_eq!(caller.seen(gpu, VA + PAGE, 3).unwrap(), b"one");
    let before = caller.available();
    caller.unmap(back, &[gpu]).0.unwrap();
    caller.free(back).unwrap();
    assert_eq!(caller.available(), before);
    drop(dmabuf);
    assert!(caller.available() > before);
}

#[test]
fn what_cannot_be_shared_and_what_is_no_dma_buf() {
    // amdgpu_gem_prime_export; dma_buf_get; kfd_ioctl_export_dmabuf; kfd_ioctl_import_dmabuf.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let mut memory = vec![0u8; 2 * PAGE as usize];
    let user = (memory.as_mut_ptr() as u64).next_multiple_of(PAGE);
    let user = caller.allocate_user(gpu, VA, PAGE, AllocFlags::USERPTR, user).unwrap();
    assert_eq!(caller.export(user.handle).unwrap_err(), Errno::EPERM);
    assert_eq!(caller.export(user.handle + 1).unwrap_err(), Errno::EINVAL);
    assert_eq!(caller.export(0).unwrap_err(), Errno::EINVAL);
    let closed = 999_999;
    for (descriptor, errno) in [
        (caller.descriptor.as_raw_fd(), Errno::EINVAL),
        (caller.gpus[0].descriptor.as_raw_fd(), Errno::EINVAL),
        (closed, Errno::EBADF),
    ] {
        assert_eq!(caller.dmabuf_info(descriptor, &mut []).0, Err(errno));
        assert_eq!(caller.import(gpu, VA, descriptor).unwrap_err(), errno);
    }
    let buffer = caller.allocate(gpu, VA, PAGE, VRAM).unwrap();
    let dmabuf = caller.export(buffer.handle).unwrap();
    assert_eq!(caller.import(gpu ^ 1, VA, &dmabuf).unwrap_err(), Errno::EINVAL);
    let unbound = Caller::unbound("gfx906");
    assert_eq!(unbound.import(gpu, VA, &dmabuf).unwrap_err(), Errno::ENODEV);
    let nowhere = caller.import(gpu, 0, &dmabuf).unwrap();
    assert_eq!(caller.map(nowhere, &[gpu]).0, Err(Errno::EINVAL), "kfd_mem_attach: no address");
    caller.free(nowhere).unwrap();
}

#[test]
fn the_descriptor_is_as_the_kernels() {
    // kfd_mem_export_dmabuf: DRM_RDWR for writable buffers; dma_buf_fd: O_CLOEXEC.
    let caller = Caller::new("gfx906");
    let gpu = caller.gpu();
    let mode = |flags| {
        let buffer = caller.allocate(gpu, VA, PAGE, flags).unwrap();
        let dmabuf = caller.export(buffer.handle).unwrap();
        assert_eq!(fcntl(&dmabuf, FcntlArg::F_GETFD).unwrap(), 1);
        OFlag::from_bits_retain(fcntl(&dmabuf, FcntlArg::F_GETFL).unwrap()) & OFlag::O_ACCMODE
    };
    assert_eq!(mode(VRAM), OFlag::O_RDWR);
    assert_eq!(mode(AllocFlags::VRAM), OFlag::O_RDONLY);
    // A map of one shows the buffer from its start on.
    let buffer = caller.allocate(gpu, VA, 3 * PAGE, VRAM).unwrap();
    let dmabuf = caller.export(buffer.handle).unwrap();
    let shared = recognise(dmabuf.as_fd()).unwrap();
    assert_eq!((shared.offset, shared.size), (buffer.mmap_offset, 3 * PAGE));
}

#[test]
fn a_read_only_dma_buf_is_written_by_the_gpu_of_its_importer() {
    // import_obj_create: WRITABLE | EXECUTABLE.
    let exporter = Caller::new("gfx906");
    let importer = Caller::new("gfx906");
    let gpu = exporter.gpu();
    let buffer = exporter.allocate(gpu, VA, PAGE, AllocFlags::VRAM).unwrap();
    exporter.map(buffer.handle, &[gpu]).0.unwrap();
    assert!(exporter.model.write_gpu(gpu, VA, b"no").is_err());
    let handle = importer.import(gpu, VA, exporter.export(buffer.handle).unwrap()).unwrap();
    importer.map(handle, &[gpu]).0.unwrap();
    importer.model.write_gpu(gpu, VA, b"yes").unwrap();
    assert_eq!(exporter.seen(gpu, VA, 3).unwrap(), b"yes");
}

#[test]
fn an_import_is_exported_again_as_what_it_was() {
    // drm_gem_prime_handle_to_dmabuf: obj->import_attach, obj->dma_buf.
    let callers = [Caller::new("gfx906"), Caller::new("gfx906"), Caller::new("gfx906")];
    let [first, second, third] = &callers;
    let gpu = first.gpu();
    let buffer = first.allocate(gpu, VA, PAGE, VRAM).unwrap();
    let handle = second.import(gpu, VA, first.export(buffer.handle).unwrap()).unwrap();
    let onward = second.export(handle).unwrap();
    second.free(handle).unwrap();
    let handle = third.import(gpu, VA, &onward).unwrap();
    let home = first.import(gpu, VA, &onward).unwrap();
    third.map(handle, &[gpu]).0.unwrap();
    first.map(home, &[gpu]).0.unwrap();
    third.model.write_gpu(gpu, VA, b"around").unwrap();
    assert_eq!(first.seen(gpu, VA, 6).unwrap(), b"around");
    let map = first.mmap_render(&first.gpus[0], buffer.mmap_offset, PAGE).unwrap();
    let mut bytes = [0; 6];
    peek(&map, 0, &mut bytes);
    assert_eq!(&bytes, b"around");
}

#[test]
fn another_gpu_takes_it_as_system_memory() {
    // amdgpu_dma_buf_create_obj: GTT.
    let caller = Caller::new("gfx906x2");
    let (one, two) = (caller.gpus[0].id, caller.gpus[1].id);
    let buffer = caller.allocate(one, VA, PAGE, VRAM).unwrap();
    caller.map(buffer.handle, &[one]).0.unwrap();
    caller.model.write_gpu(one, VA, b"peer").unwrap();
    let handle = caller.import(two, VA + (1 << 30), caller.export(buffer.handle).unwrap()).unwrap();
    assert_eq!(handle >> 32, u64::from(two));
    caller.map(handle, &[two, one]).0.unwrap();
    for gpu in [one, two] {
        assert_eq!(caller.seen(gpu, VA + (1 << 30), 4).unwrap(), b"peer");
    }
    let (_, info) = caller.dmabuf_info(caller.export(handle).unwrap(), &mut []);
    assert_eq!((info.gpu_id, info.flags), (one, AllocFlags::VRAM.bits()), "the dma-buf is still VRAM");
    // Memory of no GPU in particular is said to be of the first one.
    let system = caller.allocate(two, VA, PAGE, GTT).unwrap();
    let (_, info) = caller.dmabuf_info(caller.export(system.handle).unwrap(), &mut []);
    assert_eq!((info.gpu_id, info.flags), (one, AllocFlags::GTT.bits()));
}

#[test]
fn rounds_leave_nothing_behind() {
    let caller = Caller::new("gfx906");
    let importer = Caller::new("gfx906");
    let gpu = caller.gpu();
    let file: File = caller.gpus[0].descriptor.try_clone().unwrap().into();
    // Bytes that the render node's memory holds.
    let held = || file.metadata().unwrap().blocks() * 512;
    let round = |number: u64| {
        let size = PAGE << (number % 8);
        let buffer = caller.allocate(gpu, VA, size, VRAM).unwrap();
        let map = caller.mmap_render(&caller.gpus[0], buffer.mmap_offset, size).unwrap();
        poke(&map, size - 1, b"x");
        caller.map(buffer.handle, &[gpu]).0.unwrap();
        let dmabuf = caller.export(buffer.handle).unwrap();
        let handle = importer.import(gpu, VA, &dmabuf).unwrap();
        importer.map(handle, &[gpu]).0.unwrap();
        importer.model.write_gpu(gpu, VA, b"y").unwrap();
        caller.unmap(buffer.handle, &[gpu]).0.unwrap();
        caller.free(buffer.handle).unwrap();
        importer.unmap(handle, &[gpu]).0.unwrap();
        importer.free(handle).unwrap();
    };
    (0..8).for_each(round);
    let all = caller.available();
    let before = held();
    (0..1000).for_each(round);
    assert_eq!(caller.available(), all);
    assert_eq!(held(), before);
}

#[test]
fn hostile_descriptors_are_no_harm() {
    // A dma-buf's note is in memory that another process can write.
    let exporter = Caller::new("gfx906");
    let importer = Caller::new("gfx906");
    let gpu = exporter.gpu();
    let buffer = exporter.allocate(gpu, VA, PAGE, VRAM).unwrap();
    let dmabuf = exporter.export(buffer.handle).unwrap();
    let file: File = exporter.gpus[0].descriptor.try_clone().unwrap().into();
    let note = kfd_model::arena::note_at(buffer.mmap_offset).unwrap();
    for size in [0u64, 1, 1 << 45, 1 << 62, u64::MAX, 1 << 44] {
        file.write_all_at(&size.to_ne_bytes(), note + 8).unwrap();
        if let Ok(handle) = importer.import(gpu, VA, &dmabuf) {
            let _ = importer.map(handle, &[gpu]);
            let _ = importer.seen(gpu, VA, 16);
            let _ = importer.unmap(handle, &[gpu]);
            importer.free(handle).unwrap();
        }
    }
    // A render node of the importer's own that stands where a dma-buf's mark would be is none.
    let (_, descriptor) = open(&importer.model, "/dev/dri/renderD128");
    assert_eq!(importer.import(gpu, VA, &descriptor).unwrap_err(), Errno::EINVAL);
}
