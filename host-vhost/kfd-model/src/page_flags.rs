//! Flags of page table entries: what the GPU may do, and how it caches.

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::memory::AllocFlags;

use crate::object::Object;
use crate::process::Buffer;
use crate::profile::Gpu;

/// What a mapping of KFD has (`get_pte_flags`), on the GPU with index `target`.
pub fn of_kfd(buffer: &Buffer, target: usize, gpu: &Gpu) -> VmPageFlags {
    let mut flags = VmPageFlags::PAGE_READABLE;
    flags.set(VmPageFlags::PAGE_WRITEABLE, buffer.flags.contains(AllocFlags::WRITABLE));
    flags.set(VmPageFlags::PAGE_EXECUTABLE, buffer.flags.contains(AllocFlags::EXECUTABLE));
    with_memory_type(flags, &buffer.object, target, gpu)
}

/// Chooses the memory type: the object's flags win over what the mapping asks for
/// (`gmc_v9_0_get_coherence_flags`; `gmc_v10_0_get_vm_pte` and later have the last rule for all).
pub fn with_memory_type(flags: VmPageFlags, object: &Object, target: usize, gpu: &Gpu) -> VmPageFlags {
    let has = |flag| object.flags().contains(flag);
    let uncached = has(AllocFlags::UNCACHED);
    let extended = has(AllocFlags::EXT_COHERENT);
    let coherent = has(AllocFlags::COHERENT) || extended;
    let local_vram = object.is_vram() && object.gpu == Some(target);
    let chosen = match gpu.gc_version {
        [9, 4, 1 | 2] if local_vram => match (uncached, coherent) {
            (true, _) => VmPageFlags::MTYPE_UC,
            (false, true) => VmPageFlags::MTYPE_CC,
            (false, false) => VmPageFlags::MTYPE_RW,
        },
        [9, 4, 3 | 4] => match (uncached, extended) {
            (true, _) => VmPageFlags::MTYPE_UC,
            (false, true) if local_vram && gpu.revision_id != 0 => VmPageFlags::MTYPE_CC,
            (false, true) => VmPageFlags::MTYPE_UC,
            (false, false) if local_vram => VmPageFlags::MTYPE_RW,
            (false, false) if object.is_vram() => VmPageFlags::MTYPE_NC,
            (false, false) => VmPageFlags::MTYPE_UC,
        },
        _ if uncached || coherent => VmPageFlags::MTYPE_UC,
        _ => VmPageFlags::MTYPE_NC,
    };
    let asked = flags & VmPageFlags::MTYPE_MASK;
    match chosen {
        VmPageFlags::MTYPE_NC if !asked.is_empty() => flags,
        chosen => (flags - VmPageFlags::MTYPE_MASK) | chosen,
    }
}
