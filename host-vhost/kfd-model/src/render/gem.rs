//! Buffer objects of a render node: GEM handles, PRIME, and mappings in its page table.

use std::os::fd::IntoRawFd;
use std::sync::Arc;

use kfd_abi::drm::amdgpu::{
    AMDGPU_GEM_DOMAIN_CPU, AMDGPU_GEM_DOMAIN_GTT, AMDGPU_GEM_DOMAIN_VRAM,
    AMDGPU_GEM_METADATA_OP_GET_METADATA, AMDGPU_GEM_METADATA_OP_SET_METADATA,
    AMDGPU_GEM_OP_GET_GEM_CREATE_INFO, AMDGPU_GEM_OP_SET_PLACEMENT, AMDGPU_VA_OP_CLEAR, AMDGPU_VA_OP_MAP,
    AMDGPU_VA_OP_REPLACE, AMDGPU_VA_OP_UNMAP, GemCreate, GemMetadata, GemMmap, GemOp, GemVa, VmPageFlags,
};
use kfd_abi::drm::{DRM_CLOEXEC, DRM_RDWR, GemClose, PrimeHandle};
use kfd_abi::memory::AllocFlags;
use kfd_seam::{FileId, Result, UserMemory, UserPtr};
use nix::errno::Errno;

use crate::arena::{PAGE, page_align};
use crate::descriptors;
use crate::kfd::{self, DescriptorTable};
use crate::object::{Content, Object, Piece};
use crate::page_flags;
use crate::process::{Device, Process, State};
use crate::space::{ADDRESS_END, Backing, Mapping};

/// `AMDGPU_VA_RESERVED_BOTTOM`, `AMDGPU_VA_RESERVED_TOP` (trap handler, sequence numbers, context save area).
pub const RESERVED_BOTTOM: u64 = 1 << 16;
/// See [`RESERVED_BOTTOM`].
pub const RESERVED_TOP: u64 = (1 << 16) + (2 << 20) + (2 << 20);

/// `AMDGPU_GMC_HOLE_START`, `AMDGPU_GMC_HOLE_END`, `AMDGPU_GMC_HOLE_MASK`.
pub const HOLE_START: u64 = 0x8000_0000_0000;
/// See [`HOLE_START`].
pub const HOLE_END: u64 = 0xffff_8000_0000_0000;
const HOLE_MASK: u64 = 0xffff_ffff_ffff;

/// `AMDGPU_GEM_CREATE_NO_CPU_ACCESS`.
const NO_CPU_ACCESS: u64 = 1 << 1;

/// `AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED`.
const CPU_ACCESS_REQUIRED: u64 = 1 << 0;

/// `AMDGPU_GEM_CREATE_COHERENT`, `_UNCACHED`, `_EXT_COHERENT` and `_VRAM_WIPE_ON_RELEASE`: what
/// `amdgpu_amdkfd_gpuvm_alloc_memory_of_gpu` makes of KFD's flags.
const FROM_KFD: [(AllocFlags, u64); 3] =
    [(AllocFlags::COHERENT, 1 << 13), (AllocFlags::UNCACHED, 1 << 14), (AllocFlags::EXT_COHERENT, 1 << 15)];
const WIPE_ON_RELEASE: u64 = 1 << 9;

/// Flags that `amdgpu_gem_create_ioctl` lets pass: CPU access, write-combining, cleared, always valid, explicit sync,
/// encrypted, discardable, GFX12's compression.
const CREATE_FLAGS: u64 = 0x7 | (1 << 3) | (1 << 6) | (1 << 7) | (1 << 10) | (1 << 12) | (1 << 16);

/// `AMDGPU_GEM_CREATE_ENCRYPTED`, without a trusted memory zone.
const ENCRYPTED: u64 = 1 << 10;

/// Domains that can be asked for: those here, and on-chip memories that there are none of.
const DOMAINS: u64 = AMDGPU_GEM_DOMAIN_CPU | AMDGPU_GEM_DOMAIN_GTT | AMDGPU_GEM_DOMAIN_VRAM;
const ON_CHIP: u64 = 0x8 | 0x10 | 0x20;

/// A call on the render node of one GPU.
pub struct Gem<'a> {
    /// The process.
    pub process: &'a Process,
    /// Its descriptors.
    pub descriptors: &'a dyn DescriptorTable,
    /// The open file.
    pub file: FileId,
    /// Index of its GPU.
    pub index: usize,
    /// The GPU.
    pub device: &'a Device,
}

impl Gem<'_> {
    /// The object with a handle (`drm_gem_object_lookup`).
    fn object(&self, state: &State, handle: u32) -> Result<Arc<Object>> {
        let drm = state.drm_files.get(&self.file).ok_or(Errno::EBADF)?;
        drm.handles.get(handle).cloned().ok_or(Errno::ENOENT)
    }

    /// `amdgpu_gem_create_ioctl`.
    pub fn create(&self, arguments: &mut GemCreate) -> Result<i32> {
        let GemCreate { bo_size, domains, domain_flags, .. } = *arguments;
        let known = domains & !(DOMAINS | ON_CHIP) == 0;
        if !known || domain_flags & !CREATE_FLAGS != 0 || domain_flags & ENCRYPTED != 0 {
            return Err(Errno::EINVAL);
        }
        if domains & ON_CHIP != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let size = page_align(bo_size).filter(|size| *size > 0).ok_or(Errno::EINVAL)?;
        let mut piece = self.piece(size, domains, domain_flags)?;
        piece.cpu_access = domain_flags & NO_CPU_ACCESS == 0;
        let mut state = self.process.state();
        let graveyard = &self.process.graveyard;
        let object =
            Arc::new(Object::new(Some(self.index), size, piece.offset, Content::Piece(piece), graveyard));
        state.device(self.index)?.register(&object);
        let handle = self.process.open_handle(&mut state, self.file, &object)?;
        *arguments = GemCreate { bo_size: u64::from(handle), ..GemCreate::default() };
        Ok(0)
    }

    /// Memory of a domain; VRAM may come from system memory where it is short.
    fn piece(&self, size: u64, domains: u64, flags: u64) -> Result<Piece> {
        let take = |kind| kfd::take_piece(self.process, self.index, self.device, size, kind);
        if domains & AMDGPU_GEM_DOMAIN_VRAM != 0 {
            let mut kind = AllocFlags::VRAM;
            kind.set(AllocFlags::PUBLIC, flags & CPU_ACCESS_REQUIRED != 0);
            if let Ok(piece) = take(kind) {
                return Ok(piece);
            }
        }
        take(AllocFlags::GTT)
    }

    /// `drm_gem_close_ioctl`.
    pub fn close(&self, arguments: &mut GemClose) -> Result<i32> {
        let mut state = self.process.state();
        self.process.close_handle(&mut state, self.file, arguments.handle).map(|()| 0)
    }

    /// `amdgpu_gem_mmap_ioctl`.
    pub fn mmap(&self, arguments: &mut GemMmap) -> Result<i32> {
        let handle = arguments.handle();
        *arguments = GemMmap::default();
        let state = self.process.state();
        let object = self.object(&state, handle)?;
        if object.mappable().is_none() {
            return Err(Errno::EPERM);
        }
        arguments.addr_ptr = object.mmap_offset;
        Ok(0)
    }

    /// `amdgpu_gem_metadata_ioctl`.
    pub fn metadata(&self, arguments: &mut GemMetadata) -> Result<i32> {
        let state = self.process.state();
        let object = self.object(&state, arguments.handle)?;
        let mut note = object.note(self.device.gpu_id)?;
        match arguments.op {
            AMDGPU_GEM_METADATA_OP_GET_METADATA => {
                arguments.tiling_info = note.tiling;
                arguments.flags = note.data_flags;
                arguments.data_size_bytes = note.data_size;
                arguments.data = note.data;
            }
            AMDGPU_GEM_METADATA_OP_SET_METADATA => {
                if arguments.data_size_bytes as usize > size_of_val(&arguments.data) {
                    return Err(Errno::EINVAL);
                }
                note.tiling = arguments.tiling_info;
                note.data_flags = arguments.flags;
                note.data_size = arguments.data_size_bytes;
                note.data = arguments.data;
                let (arena, offset) = object.range().ok_or(Errno::EPERM)?;
                note.write(arena, offset)?;
            }
            // The driver's initial value of the result.
            _ => return Err(Errno::EPERM),
        }
        Ok(0)
    }

    /// `amdgpu_gem_op_ioctl`. Buffers of KFD and of GEM_CREATE tell of KFD's flags and of a page's alignment, whatever
    /// GEM_CREATE was asked for. Memory cannot be placed anew.
    pub fn operation(&self, arguments: &GemOp) -> Result<i32> {
        let state = self.process.state();
        let object = self.object(&state, arguments.handle)?;
        match arguments.op {
            AMDGPU_GEM_OP_GET_GEM_CREATE_INFO => {
                UserMemory.write_struct(UserPtr(arguments.value), &created(&object))?;
                Ok(0)
            }
            AMDGPU_GEM_OP_SET_PLACEMENT => Err(Errno::EOPNOTSUPP),
            _ => Err(Errno::EINVAL),
        }
    }

    /// `drm_prime_handle_to_fd_ioctl`.
    pub fn handle_to_fd(&self, arguments: &mut PrimeHandle) -> Result<i32> {
        if arguments.flags & !(DRM_CLOEXEC | DRM_RDWR) != 0 {
            return Err(Errno::EINVAL);
        }
        let state = self.process.state();
        let object = self.object(&state, arguments.handle)?;
        let descriptor = object.export(self.device.gpu_id, arguments.flags & DRM_RDWR != 0)?;
        descriptors::set_cloexec(&descriptor, arguments.flags & DRM_CLOEXEC != 0)?;
        arguments.fd = descriptor.into_raw_fd();
        Ok(0)
    }

    /// `drm_prime_fd_to_handle_ioctl`: the same handle again for the same dma-buf.
    pub fn fd_to_handle(&self, arguments: &mut PrimeHandle) -> Result<i32> {
        let number = u32::try_from(arguments.fd).map_err(|_| Errno::EBADF)?;
        let found = kfd::find_dmabuf(self.descriptors, number)?;
        let descriptor = descriptors::duplicate(number)?;
        let mut state = self.process.state();
        let object = self.process.import(&mut state, self.index, &descriptor, &found)?;
        arguments.handle = self.process.open_handle(&mut state, self.file, &object)?;
        Ok(0)
    }

    /// `amdgpu_gem_va_ioctl`.
    pub fn va(&self, arguments: &mut GemVa) -> Result<i32> {
        if arguments.va_address < RESERVED_BOTTOM || (HOLE_START..HOLE_END).contains(&arguments.va_address) {
            return Err(Errno::EINVAL);
        }
        arguments.va_address &= HOLE_MASK;
        let va = arguments.va_address;
        let size = arguments.map_size;
        if va.wrapping_add(size) > ADDRESS_END - RESERVED_TOP {
            return Err(Errno::EINVAL);
        }
        let flags = VmPageFlags::from_bits_retain(arguments.flags);
        let partial = VmPageFlags::DELAY_UPDATE | VmPageFlags::PAGE_PRT;
        let ordinary = VmPageFlags::DELAY_UPDATE
            | VmPageFlags::PAGE_READABLE
            | VmPageFlags::PAGE_WRITEABLE
            | VmPageFlags::PAGE_EXECUTABLE
            | VmPageFlags::MTYPE_MASK
            | VmPageFlags::PAGE_NOALLOC;
        if !ordinary.contains(flags) && !partial.contains(flags) {
            return Err(Errno::EINVAL);
        }
        let operation = arguments.operation;
        if !(AMDGPU_VA_OP_MAP..=AMDGPU_VA_OP_REPLACE).contains(&operation) {
            return Err(Errno::EINVAL);
        }
        let mut state = self.process.state();
        let without = operation == AMDGPU_VA_OP_CLEAR || flags.contains(VmPageFlags::PAGE_PRT);
        let object = if without { None } else { Some(self.object(&state, arguments.handle)?) };
        let object = object.as_deref();
        let mapping = |offset| self.mapping(object, offset, size, flags);
        self.process.with_space(&mut state, self.file, |space| {
            let id = object.map_or(0, |object| object.id);
            match operation {
                AMDGPU_VA_OP_MAP => space.map(va, mapping(arguments.offset_in_bo)?),
                AMDGPU_VA_OP_UNMAP => space.unmap(va, id),
                AMDGPU_VA_OP_CLEAR => space.clear(va, size),
                _ => space.replace(va, mapping(arguments.offset_in_bo)?),
            }
        })?;
        Ok(0)
    }

    /// A piece of an object (`amdgpu_vm_verify_parameters`), or nothing.
    fn mapping(
        &self,
        object: Option<&Object>,
        offset: u64,
        size: u64,
        flags: VmPageFlags,
    ) -> Result<Mapping> {
        let end =
            offset.checked_add(size).filter(|_| page_align(offset) == Some(offset)).ok_or(Errno::EINVAL)?;
        let Some(object) = object else {
            return Ok(Mapping { size, backing: Backing::Nothing, object: 0, flags });
        };
        if end > object.size {
            return Err(Errno::EINVAL);
        }
        let flags = page_flags::with_memory_type(
            flags - VmPageFlags::DELAY_UPDATE,
            object,
            self.index,
            &self.device.gpu,
        );
        Ok(Mapping { size, backing: object.backing().behind(offset), object: object.id, flags })
    }
}

/// What a buffer was made with.
fn created(object: &Object) -> GemCreate {
    let flags = object.flags();
    let of_kfd = FROM_KFD.iter().filter(|(flag, _)| flags.contains(*flag));
    let mut domain_flags = of_kfd.fold(0, |all, (_, flag)| all | flag);
    if object.is_vram() {
        domain_flags |= WIPE_ON_RELEASE;
        if flags.contains(AllocFlags::PUBLIC) {
            domain_flags |= CPU_ACCESS_REQUIRED;
        }
    }
    if object.mappable().is_none() {
        domain_flags |= NO_CPU_ACCESS;
    }
    let domains = if object.is_vram() { AMDGPU_GEM_DOMAIN_VRAM } else { AMDGPU_GEM_DOMAIN_GTT };
    GemCreate { bo_size: object.size, alignment: PAGE, domains, domain_flags }
}
