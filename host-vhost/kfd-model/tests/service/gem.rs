//! GEM handles of a render node: `amdgpu_gem.c`, `amdgpu_vm.c`, `drm_prime.c`.

use std::os::fd::OwnedFd;

use kfd_abi::drm::amdgpu::{
    AMDGPU_GEM_DOMAIN_GTT, AMDGPU_GEM_DOMAIN_VRAM, AMDGPU_GEM_METADATA_OP_GET_METADATA,
    AMDGPU_GEM_METADATA_OP_SET_METADATA, AMDGPU_GEM_OP_GET_GEM_CREATE_INFO, AMDGPU_VA_OP_CLEAR,
    AMDGPU_VA_OP_MAP, AMDGPU_VA_OP_REPLACE, AMDGPU_VA_OP_UNMAP, GemCreate, GemMetadata, GemMmap, GemOp,
    GemVa, VmPageFlags,
};
use kfd_abi::drm::{DRM_CLOEXEC, DRM_RDWR, GemClose, PrimeHandle, request};
use kfd_abi::memory::{AllocFlags, GetDmabufInfoArgs};
use kfd_model::space::FaultReason;
use kfd_seam::{FileId, Result};
use nix::errno::Errno;

use crate::caller::{Caller, Number, PAGE, adopt, open, peek, poke};

const VA: u64 = 0x7000_0000_0000;
const VRAM: AllocFlags = AllocFlags::VRAM.union(AllocFlags::WRITABLE);
const ALL: VmPageFlags =
    VmPageFlags::PAGE_READABLE.union(VmPageFlags::PAGE_WRITEABLE).union(VmPageFlags::PAGE_EXECUTABLE);

/// An open render node of a process.
struct Node<'a> {
    caller: &'a Caller,
    file: FileId,
}

impl Node<'_> {
    fn create(&self, size: u64, domains: u64, domain_flags: u64) -> Result<u32> {
        let mut arguments = GemCreate { bo_size: size, alignment: 0, domains, domain_flags };
        self.caller.render(self.file, request::AMDGPU_GEM_CREATE, &mut arguments)?;
        Ok(u32::try_from(arguments.bo_size).unwrap())
    }

    fn close(&self, handle: u32) -> Result<i32> {
        self.caller.render(self.file, request::GEM_CLOSE, &mut GemClose { handle, pad: 0 })
    }

    fn export(&self, handle: u32, flags: u32) -> Result<OwnedFd> {
        let mut arguments = PrimeHandle { handle, flags, fd: -1 };
        self.caller.render(self.file, request::PRIME_HANDLE_TO_FD, &mut arguments)?;
        Ok(adopt(u32::try_from(arguments.fd).unwrap()))
    }

    fn import(&self, descriptor: impl Number) -> Result<u32> {
        let mut arguments = PrimeHandle { handle: 0, flags: 0, fd: descriptor.number() };
        self.caller.render(self.file, request::PRIME_FD_TO_HANDLE, &mut arguments)?;
        Ok(arguments.handle)
    }

    fn offset(&self, handle: u32) -> Result<u64> {
        let mut arguments = GemMmap::for_handle(handle);
        self.caller.render(self.file, request::AMDGPU_GEM_MMAP, &mut arguments)?;
        Ok(arguments.addr_ptr)
    }

    fn va(&self, operation: u32, handle: u32, va: u64, offset: u64, size: u64) -> Result<i32> {
        self.va_with(operation, handle, va, offset, size, ALL)
    }

    fn va_with(
        &self,
        operation: u32,
        handle: u32,
        va_address: u64,
        offset_in_bo: u64,
        map_size: u64,
        flags: VmPageFlags,
    ) -> Result<i32> {
        let mut arguments = GemVa {
            handle,
            operation,
            flags: flags.bits(),
            va_address,
            offset_in_bo,
            map_size,
            ..GemVa::default()
        };
        self.caller.render(self.file, request::AMDGPU_GEM_VA, &mut arguments)
    }
}

/// The render node whose address space the process took.
fn node(caller: &Caller) -> Node<'_> {
    Node { caller, file: caller.gpus[0].file }
}

#[test]
fn pieces_of_a_buffer_at_addresses_of_their_own() {
    // What an arena does: a KFD buffer without an address, a GEM handle for it, and pieces mapped one by one.
    let caller = Caller::new("gfx906");
    let (gpu, node) = (caller.gpu(), node(&caller));
    let buffer = caller.allocate(gpu, 0, 16 * PAGE, VRAM | AllocFlags::PUBLIC).unwrap();
    let handle = node.import(caller.export(buffer.handle).unwrap()).unwrap();
    let map = caller.mmap_render(&caller.gpus[0], buffer.mmap_offset, 16 * PAGE).unwrap();
    for page in 0..16u64 {
        poke(&map, page * PAGE, &page.to_ne_bytes());
    }
    let value = |va| caller.seen(gpu, va, 8).map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap()));
    node.va(AMDGPU_VA_OP_MAP, handle, VA, 4 * PAGE, 2 * PAGE).unwrap();
    node.va(AMDGPU_VA_OP_MAP, handle, VA + (1 << 30), 15 * PAGE, PAGE).unwrap();
    assert_eq!((value(VA), value(VA + PAGE), value(VA + (1 << 30))), (Ok(4), Ok(5), Ok(15)));
    assert_eq!(value(VA + 2 * PAGE).unwrap_err().reason, FaultReason::NotPresent);
    // The same piece twice.
    node.va(AMDGPU_VA_OP_MAP, handle, VA + 2 * PAGE, 5 * PAGE, PAGE).unwrap();
    caller.model.write_gpu(gpu, VA + PAGE, b"piece").unwrap();
    assert_eq!(caller.seen(gpu, VA + 2 * PAGE, 5).unwrap(), b"piece");
    let mut bytes = [0; 5];
    peek(&map, 5 * PAGE, &mut bytes);
    assert_eq!(&bytes, b"piece");
    // amdgpu_vm_bo_unmap: by where it starts.
    assert_eq!(node.va(AMDGPU_VA_OP_UNMAP, handle, VA + PAGE, 0, PAGE), Err(Errno::ENOENT));
    node.va(AMDGPU_VA_OP_UNMAP, handle, VA, 0, 2 * PAGE).unwrap();
    assert!(value(VA).is_err() && value(VA + PAGE).is_err());
    assert_eq!(value(VA + (1 << 30)), Ok(15));
    // The handle's end takes its mappings (amdgpu_vm_bo_del), KFD's buffer stays.
    node.close(handle).unwrap();
    assert!(value(VA + (1 << 30)).is_err());
    assert_eq!(node.close(handle), Err(Errno::EINVAL));
    caller.free(buffer.handle).unwrap();
}

#[test]
fn mappings_are_checked() {
    // amdgpu_gem_va_ioctl, amdgpu_vm_verify_parameters, amdgpu_vm_bo_map.
    let caller = Caller::new("gfx906");
    let node = node(&caller);
    let handle = node.create(4 * PAGE, AMDGPU_GEM_DOMAIN_VRAM, 0).unwrap();
    let map = |va, offset, size| node.va(AMDGPU_VA_OP_MAP, handle, va, offset, size);
    let top = (1 << 48) - ((1 << 16) + (4 << 20));
    for (why, va, offset, size) in [
        ("reserved bottom", 0xf000, 0, PAGE),
        ("the hole", 0x8000_0000_0000, 0, PAGE),
        ("the hole's end", 0xffff_7fff_ffff_f000, 0, PAGE),
        ("reserved top", u64::MAX << 48 | (top - PAGE), 0, 2 * PAGE),
        ("no page", VA + 8, 0, PAGE),
        ("no page of the buffer", VA, 8, PAGE),
        ("half a page", VA, 0, 0x800),
        ("nothing", VA, 0, 0),
        ("beyond the buffer", VA, 3 * PAGE, 2 * PAGE),
        ("far beyond", VA, !0xfff, 2 * PAGE),
        ("endless", VA, 0, !0xfff),
    ] {
        assert_eq!(map(va, offset, size), Err(Errno::EINVAL), "{why}");
    }
    map(VA, 0, 4 * PAGE).unwrap();
    assert_eq!(map(VA + 3 * PAGE, 0, PAGE), Err(Errno::EINVAL), "in the way of another");
    assert_eq!(map(u64::MAX << 47 | 0x10000, 0, PAGE), Ok(0), "above the hole");
    let with = |operation, handle, flags| node.va_with(operation, handle, VA + (1 << 30), 0, PAGE, flags);
    assert_eq!(with(0, handle, ALL), Err(Errno::EINVAL));
    assert_eq!(with(5, handle, ALL), Err(Errno::EINVAL));
    assert_eq!(with(AMDGPU_VA_OP_MAP, handle, ALL | VmPageFlags::PAGE_PRT), Err(Errno::EINVAL));
    assert_eq!(with(AMDGPU_VA_OP_MAP, handle, VmPageFlags::from_bits_retain(1 << 20)), Err(Errno::EINVAL));
    assert_eq!(with(AMDGPU_VA_OP_MAP, 77, ALL), Err(Errno::ENOENT));
    assert_eq!(with(AMDGPU_VA_OP_MAP, 0, ALL), Err(Errno::ENOENT));
    let other = node.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, 0).unwrap();
    assert_eq!(node.va(AMDGPU_VA_OP_UNMAP, other, VA, 0, PAGE), Err(Errno::ENOENT), "another buffer's");
}

#[test]
fn permissions_types_and_partial_residence() {
    let caller = Caller::new("gfx906");
    let (gpu, node) = (caller.gpu(), node(&caller));
    let handle = node.create(PAGE, AMDGPU_GEM_DOMAIN_VRAM, 0).unwrap();
    let map = |va, flags| node.va_with(AMDGPU_VA_OP_MAP, handle, va, 0, PAGE, flags).unwrap();
    map(VA, VmPageFlags::PAGE_READABLE);
    map(VA + PAGE, VmPageFlags::PAGE_WRITEABLE);
    let write = |va| caller.model.write_gpu(gpu, va, b"x").map_err(|fault| fault.reason);
    let read = |va| caller.seen(gpu, va, 1).map_err(|fault| fault.reason);
    assert_eq!((write(VA), read(VA)), (Err(FaultReason::ReadOnly), Ok(vec![0])));
    assert_eq!((write(VA + PAGE), read(VA + PAGE)), (Ok(()), Err(FaultReason::NotReadable)));
    assert_eq!(read(VA), Ok(vec![b'x']));
    // Reads of a partially resident texture give zeros, writes are lost.
    node.va_with(AMDGPU_VA_OP_MAP, 0, VA + 2 * PAGE, 0, PAGE, VmPageFlags::PAGE_PRT).unwrap();
    assert_eq!((write(VA + 2 * PAGE), read(VA + 2 * PAGE)), (Ok(()), Ok(vec![0])));
    // amdgpu_vm_bo_replace_map, amdgpu_vm_bo_clear_mappings.
    node.va(AMDGPU_VA_OP_REPLACE, handle, VA + PAGE, 0, PAGE).unwrap();
    assert_eq!(read(VA + PAGE), Ok(vec![b'x']));
    node.va(AMDGPU_VA_OP_CLEAR, 0, VA, 0, 2 * PAGE).unwrap();
    assert!(read(VA).is_err() && read(VA + PAGE).is_err());
    assert_eq!(node.va(AMDGPU_VA_OP_CLEAR, 0, VA, 0, 0), Err(Errno::EINVAL));
}

#[test]
fn handles_and_dma_bufs() {
    let caller = Caller::new("gfx906");
    let node = node(&caller);
    let handle = node.create(PAGE + 1, AMDGPU_GEM_DOMAIN_VRAM, 0).unwrap();
    assert_eq!(node.export(handle + 1, 0).unwrap_err(), Errno::ENOENT);
    assert_eq!(node.export(handle, 1).unwrap_err(), Errno::EINVAL);
    assert_eq!(node.import(999_999).unwrap_err(), Errno::EBADF);
    assert_eq!(node.import(-1).unwrap_err(), Errno::EBADF);
    assert_eq!(node.import(&caller.descriptor).unwrap_err(), Errno::EINVAL);
    assert_eq!(node.offset(handle + 1).unwrap_err(), Errno::ENOENT);
    let dmabuf = node.export(handle, DRM_CLOEXEC | DRM_RDWR).unwrap();
    assert_eq!(caller.dmabuf_info(&dmabuf, &mut []).1.size, 2 * PAGE, "whole pages");
    assert_eq!(node.import(&dmabuf), Ok(handle), "drm_prime_lookup_buf_handle");
    // Another open file of the same node has handles, and a page table, of its own.
    let (stranger, _descriptor) = open(&caller.model, "/dev/dri/renderD128");
    let stranger = Node { caller: &caller, file: stranger };
    assert_eq!(stranger.offset(handle).unwrap_err(), Errno::ENOENT);
    let theirs = stranger.import(&dmabuf).unwrap();
    stranger.va(AMDGPU_VA_OP_MAP, theirs, VA, 0, PAGE).unwrap();
    assert!(caller.seen(caller.gpu(), VA, 1).is_err());
    let (ours, offset) = (node.offset(handle).unwrap(), stranger.offset(theirs).unwrap());
    assert_eq!(ours, offset, "drm_vma_node: one offset for each object");
    poke(&caller.mmap_render(&caller.gpus[0], ours, PAGE).unwrap(), 0, b"gem");
    // The end of one file leaves the other's.
    node.close(handle).unwrap();
    let mut bytes = [0; 3];
    let request = crate::caller::shared(offset, PAGE);
    let map = |file| kfd_seam::KfdService::mmap(&caller.model, file, &request);
    assert_eq!(map(node.file).map(|_| ()), Err(Errno::EACCES), "drm_vma_node_is_allowed");
    peek(&map(stranger.file).unwrap(), 0, &mut bytes);
    assert_eq!(&bytes, b"gem");
    drop(dmabuf);
    let used = caller.available();
    kfd_seam::KfdService::release(&caller.model, stranger.file);
    assert!(caller.available() > used, "the last handle went with its file");
}

#[test]
fn an_import_of_another_process_can_be_mapped_by_the_cpu() {
    let exporter = Caller::new("gfx906");
    let importer = Caller::new("gfx906");
    let buffer = exporter.allocate(exporter.gpu(), VA, 2 * PAGE, VRAM).unwrap();
    let map = exporter.mmap_render(&exporter.gpus[0], buffer.mmap_offset, 2 * PAGE).unwrap();
    poke(&map, PAGE, b"theirs");
    let node = node(&importer);
    let handle = node.import(exporter.export(buffer.handle).unwrap()).unwrap();
    let offset = node.offset(handle).unwrap();
    let here = importer.mmap_render(&importer.gpus[0], offset, 2 * PAGE).unwrap();
    let mut bytes = [0; 6];
    peek(&here, PAGE, &mut bytes);
    assert_eq!(&bytes, b"theirs");
    node.va(AMDGPU_VA_OP_MAP, handle, VA, PAGE, PAGE).unwrap();
    assert_eq!(importer.seen(importer.gpu(), VA, 6).unwrap(), b"theirs");
}

#[test]
fn creation_is_checked() {
    // amdgpu_gem_create_ioctl.
    let caller = Caller::new("gfx906");
    let node = node(&caller);
    assert_eq!(node.create(PAGE, 0x40, 0), Err(Errno::EINVAL), "doorbells");
    assert_eq!(node.create(PAGE, 0x80, 0), Err(Errno::EINVAL));
    assert_eq!(node.create(PAGE, AMDGPU_GEM_DOMAIN_VRAM, 1 << 40), Err(Errno::EINVAL));
    assert_eq!(node.create(PAGE, AMDGPU_GEM_DOMAIN_VRAM, 1 << 10), Err(Errno::EINVAL), "no trusted memory");
    assert_eq!(node.create(0, AMDGPU_GEM_DOMAIN_VRAM, 0), Err(Errno::EINVAL));
    assert_eq!(node.create(u64::MAX, AMDGPU_GEM_DOMAIN_VRAM, 0), Err(Errno::EINVAL));
    assert_eq!(node.create(1 << 44, AMDGPU_GEM_DOMAIN_VRAM, 0), Err(Errno::ENOMEM));
    let hidden = node.create(PAGE, AMDGPU_GEM_DOMAIN_VRAM, 1 << 1).unwrap();
    assert_eq!(node.offset(hidden), Err(Errno::EPERM), "AMDGPU_GEM_CREATE_NO_CPU_ACCESS");
    // VRAM that does not suffice is made up for by system memory.
    let most = caller.available();
    let whole = caller.allocate(caller.gpu(), VA, most, VRAM).unwrap();
    let other = node.create(16 << 20, AMDGPU_GEM_DOMAIN_VRAM, 0).unwrap();
    let dmabuf = node.export(other, 0).unwrap();
    assert_eq!(caller.dmabuf_info(&dmabuf, &mut []).1.flags, AllocFlags::GTT.bits());
    caller.free(whole.handle).unwrap();
}

#[test]
fn metadata_goes_with_the_memory() {
    // amdgpu_gem_metadata_ioctl, amdgpu_amdkfd_get_dmabuf_info.
    let exporter = Caller::new("gfx906");
    let importer = Caller::new("gfx906");
    let from = node(&exporter);
    let handle = from.create(PAGE, AMDGPU_GEM_DOMAIN_VRAM, 0).unwrap();
    let call = |node: &Node, arguments: &mut GemMetadata| {
        node.caller.render(node.file, request::AMDGPU_GEM_METADATA, arguments)
    };
    let mut set = GemMetadata {
        handle,
        op: AMDGPU_GEM_METADATA_OP_SET_METADATA,
        tiling_info: 0x1234,
        data_size_bytes: 8,
        ..GemMetadata::default()
    };
    set.data[..2].copy_from_slice(&[7, 9]);
    call(&from, &mut set).unwrap();
    let mut long = GemMetadata { data_size_bytes: 257, ..set };
    assert_eq!(call(&from, &mut long), Err(Errno::EINVAL));
    assert_eq!(call(&from, &mut GemMetadata { handle: 77, ..set }), Err(Errno::ENOENT));
    let dmabuf = from.export(handle, 0).unwrap();
    let to = node(&importer);
    let mut get = GemMetadata {
        handle: to.import(&dmabuf).unwrap(),
        op: AMDGPU_GEM_METADATA_OP_GET_METADATA,
        ..GemMetadata::default()
    };
    call(&to, &mut get).unwrap();
    assert_eq!((get.tiling_info, get.data_size_bytes, &get.data[..3]), (0x1234, 8, &[7, 9, 0][..]));
    let mut bytes = [0; 8];
    let (result, info) = importer.dmabuf_info(&dmabuf, &mut bytes);
    assert_eq!((result, info.metadata_size, bytes), (Ok(0), 8, [7, 0, 0, 0, 9, 0, 0, 0]));
    let (result, info) = importer.dmabuf_info(&dmabuf, &mut bytes[..4]);
    assert_eq!((result, info.metadata_size), (Err(Errno::EINVAL), 8), "too little room");
    let number = dmabuf.number().cast_unsigned();
    let mut without = GetDmabufInfoArgs { metadata_size: 3, dmabuf_fd: number, ..Default::default() };
    importer.call(kfd_abi::kfd::request::GET_DMABUF_INFO, &mut without).unwrap();
    assert_eq!((without.size, without.metadata_size), (PAGE, 3), "nobody asks for metadata");
}

#[test]
fn how_a_buffer_was_made_is_told() {
    // amdgpu_gem_op_ioctl, amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu; flags by amdgpu_drm.h.
    const CPU_ACCESS_REQUIRED: u64 = 1 << 0;
    const VRAM_WIPE_ON_RELEASE: u64 = 1 << 9;
    const COHERENT: u64 = 1 << 13;
    let exporter = Caller::new("gfx906");
    let importer = Caller::new("gfx906");
    let to = node(&importer);
    let ask = |op: u32, handle: u32, out: &mut GemCreate| {
        let value = std::ptr::from_mut(out).addr() as u64;
        to.caller.render(
            to.file,
            request::AMDGPU_GEM_OP,
            &mut GemOp { handle, op, value, ..Default::default() },
        )
    };
    for (flags, domains, domain_flags) in [
        (VRAM, AMDGPU_GEM_DOMAIN_VRAM, VRAM_WIPE_ON_RELEASE),
        (
            VRAM | AllocFlags::PUBLIC | AllocFlags::COHERENT,
            AMDGPU_GEM_DOMAIN_VRAM,
            VRAM_WIPE_ON_RELEASE | CPU_ACCESS_REQUIRED | COHERENT,
        ),
        (AllocFlags::GTT | AllocFlags::WRITABLE, AMDGPU_GEM_DOMAIN_GTT, 0),
    ] {
        let buffer = exporter.allocate(exporter.gpu(), VA, 3 * PAGE, flags).unwrap();
        let dmabuf = exporter.export(buffer.handle).unwrap();
        let handle = to.import(&dmabuf).unwrap();
        let mut told = GemCreate::default();
        assert_eq!(ask(AMDGPU_GEM_OP_GET_GEM_CREATE_INFO, handle, &mut told), Ok(0));
        assert_eq!(
            told,
            GemCreate { bo_size: 3 * PAGE, alignment: PAGE, domains, domain_flags },
            "{flags:?}"
        );
        assert_eq!(ask(AMDGPU_GEM_OP_GET_GEM_CREATE_INFO, handle + 7, &mut told), Err(Errno::ENOENT));
        assert_eq!(ask(9, handle, &mut told), Err(Errno::EINVAL));
        let mut nowhere =
            GemOp { handle, op: AMDGPU_GEM_OP_GET_GEM_CREATE_INFO, value: 8, ..Default::default() };
        assert_eq!(to.caller.render(to.file, request::AMDGPU_GEM_OP, &mut nowhere), Err(Errno::EFAULT));
        exporter.free(buffer.handle).unwrap();
    }
}

#[test]
fn memory_types_follow_the_buffer() {
    // gmc_v9_0_get_coherence_flags.
    for (profile, flags, local, expected) in [
        ("gfx906", AllocFlags::VRAM, true, VmPageFlags::MTYPE_NC),
        ("gfx906", AllocFlags::VRAM | AllocFlags::COHERENT, true, VmPageFlags::MTYPE_UC),
        ("gfx906", AllocFlags::GTT | AllocFlags::UNCACHED, true, VmPageFlags::MTYPE_UC),
        ("gfx90a", AllocFlags::VRAM, true, VmPageFlags::MTYPE_RW),
        ("gfx90a", AllocFlags::VRAM | AllocFlags::COHERENT, true, VmPageFlags::MTYPE_CC),
        ("gfx90a", AllocFlags::GTT, true, VmPageFlags::MTYPE_NC),
        ("gfx906x2", AllocFlags::VRAM, false, VmPageFlags::MTYPE_NC),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let mut model = crate::caller::model(profile);
        model.open_mailbox(directory.path()).unwrap();
        let caller = Caller::on(model);
        for gpu in &caller.gpus {
            caller.acquire(gpu, &gpu.descriptor).unwrap();
        }
        let mailbox = kfd_model::debug::Mailbox::find(directory.path()).unwrap().pop().unwrap();
        let target = if local { caller.gpu() } else { caller.gpus[1].id };
        let buffer = caller.allocate(caller.gpu(), VA, PAGE, flags).unwrap();
        caller.map(buffer.handle, &[target]).0.unwrap();
        let seen = mailbox.entry(target, VA).unwrap().flags & VmPageFlags::MTYPE_MASK;
        assert_eq!(seen, expected, "{profile} {flags:?}");
    }
}
