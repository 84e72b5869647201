//! The ioctls of a render node, as far as compute uses them (`drm_ioctl`, `amdgpu_info_ioctl`).
//!
//! Deliberate differences from the kernel (Linux 6.12): user pointers of the render node, contexts, command submission
//! and synchronisation objects answer `EOPNOTSUPP`; AMDGPU_INFO about video, sensors, the VBIOS and hardware blocks
//! answers `EINVAL`, as for a query that the driver does not know. GEM_CREATE has no on-chip memory (GDS, GWS, OA:
//! `EOPNOTSUPP`). GEM_OP places no memory anew (`EOPNOTSUPP`). GEM_VA changes the page table at once, `AMDGPU_VM_DELAY_UPDATE` or not. There is no primary node in
//! `/dev/dri`, only in sysfs.

mod gem;

use gem::{Gem, HOLE_END, HOLE_START, RESERVED_BOTTOM, RESERVED_TOP};
use kfd_abi::drm::amdgpu::{
    AMDGPU_INFO_ACCEL_WORKING, AMDGPU_INFO_DEV_INFO, AMDGPU_INFO_GTT_USAGE, AMDGPU_INFO_MEMORY,
    AMDGPU_INFO_MMR_SE_INDEX_MASK, AMDGPU_INFO_MMR_SE_INDEX_SHIFT, AMDGPU_INFO_MMR_SH_INDEX_MASK,
    AMDGPU_INFO_MMR_SH_INDEX_SHIFT, AMDGPU_INFO_NUM_BYTES_MOVED, AMDGPU_INFO_NUM_EVICTIONS,
    AMDGPU_INFO_READ_MMR_REG, AMDGPU_INFO_TIMESTAMP, AMDGPU_INFO_VIS_VRAM_USAGE, AMDGPU_INFO_VRAM_GTT,
    AMDGPU_INFO_VRAM_LOST_COUNTER, AMDGPU_INFO_VRAM_USAGE, GemCreate, GemMetadata, GemMmap, GemOp, GemVa,
    HeapInfo, Info, InfoDevice, InfoVramGtt, MemoryInfo,
};
use kfd_abi::drm::{
    self, DRM_CAP_PRIME, DRM_CAP_SYNCOBJ, DRM_CAP_SYNCOBJ_TIMELINE, DRM_CAP_TIMESTAMP_MONOTONIC,
    DRM_COMMAND_BASE, DRM_COMMAND_END, DRM_IOCTL_BASE, DRM_PRIME_CAP_EXPORT, DRM_PRIME_CAP_IMPORT, GemClose,
    GetCap, PrimeHandle, Version, nr,
};
use kfd_abi::ioctl;
use kfd_seam::{Exchange, FileId, Request, Result, UserMemory, UserPtr};
use nix::errno::Errno;
use zerocopy::{Immutable, IntoBytes};

use crate::arena::PAGE;
use crate::clock;
use crate::kfd::DescriptorTable;
use crate::process::{Device, Process, RESERVED_VRAM};

/// Major version of amdgpu's DRM interface (`KMS_DRIVER_MAJOR`).
const DRIVER_MAJOR: i32 = 3;

/// `AMDGPU_GFX_MAX_SE` and `AMDGPU_GFX_MAX_SH_PER_SE`.
const MAX_SHADER_ENGINES: u32 = 8;
const MAX_ARRAYS_PER_ENGINE: u32 = 2;

/// Registers that one READ_MMR_REG can ask for.
const MAX_REGISTERS: u32 = 128;

/// Dword offset of `GB_ADDR_CONFIG`, which clients read on every start.
const GB_ADDR_CONFIG: u32 = 0x263e;

/// Core ioctls that exist and that a render node refuses (no `DRM_RENDER_ALLOW` in `drm_ioctls`).
fn refused_on_render_nodes(number: u8) -> bool {
    const GET_UNIQUE_TO_SET_VERSION: [u8; 5] = [0x01, 0x02, 0x05, 0x06, 0x07];
    const OTHERS: [u8; 15] =
        [0x0a, 0x0b, 0x0d, 0x10, 0x11, 0x12, 0x13, 0x1e, 0x1f, 0x27, 0x28, 0x2b, 0x3a, 0x3f, 0xc6];
    // 0xa0 to 0xbe set display modes.
    GET_UNIQUE_TO_SET_VERSION.contains(&number) || OTHERS.contains(&number) || (0xa0..=0xbe).contains(&number)
}

/// amdgpu's ioctls that a render node serves (`amdgpu_ioctls_kms`), by number from `DRM_COMMAND_BASE` on.
fn driver_has(index: u8) -> bool {
    matches!(index, 0x00..=0x09 | 0x10..=0x14)
}

/// An open render node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenderFile {
    /// The open file.
    pub file: FileId,
    /// Index of its GPU.
    pub index: usize,
    /// The driver's minor version.
    pub drm_minor: i32,
}

/// Serves an ioctl of a render node.
///
/// # Errors
/// As the kernel's, but for the differences above.
pub fn ioctl(
    process: &Process,
    descriptors: &dyn DescriptorTable,
    node: RenderFile,
    request: u32,
    argument: UserPtr,
) -> Result<i32> {
    let RenderFile { file, index, drm_minor } = node;
    let user = Request(request);
    if user.kind() != DRM_IOCTL_BASE {
        return Err(Errno::ENOTTY);
    }
    let device = process.devices.get(index).ok_or(Errno::ENODEV)?;
    let number = user.number();
    let exchange = |kernel: u32| Exchange::drm(user, Request(kernel));
    let gem = Gem { process, descriptors, file, index, device };
    match number {
        nr::VERSION => exchange(drm::request::VERSION)
            .run::<Version, _>(&UserMemory, argument, |version| describe(version, drm_minor)),
        nr::GET_CAP => exchange(drm::request::GET_CAP).run::<GetCap, _>(&UserMemory, argument, capability),
        nr::AMDGPU_INFO => {
            exchange(drm::request::AMDGPU_INFO)
                .run::<Info, _>(&UserMemory, argument, |info| query(process, index, device, info))
        }
        nr::GEM_CLOSE => {
            exchange(drm::request::GEM_CLOSE)
                .run::<GemClose, _>(&UserMemory, argument, |arguments| gem.close(arguments))
        }
        nr::PRIME_HANDLE_TO_FD => exchange(drm::request::PRIME_HANDLE_TO_FD).run::<PrimeHandle, _>(
            &UserMemory,
            argument,
            |arguments| gem.handle_to_fd(arguments),
        ),
        nr::PRIME_FD_TO_HANDLE => exchange(drm::request::PRIME_FD_TO_HANDLE).run::<PrimeHandle, _>(
            &UserMemory,
            argument,
            |arguments| gem.fd_to_handle(arguments),
        ),
        nr::AMDGPU_GEM_CREATE => exchange(drm::request::AMDGPU_GEM_CREATE).run::<GemCreate, _>(
            &UserMemory,
            argument,
            |arguments| gem.create(arguments),
        ),
        nr::AMDGPU_GEM_MMAP => {
            exchange(drm::request::AMDGPU_GEM_MMAP)
                .run::<GemMmap, _>(&UserMemory, argument, |arguments| gem.mmap(arguments))
        }
        nr::AMDGPU_GEM_METADATA => exchange(drm::request::AMDGPU_GEM_METADATA).run::<GemMetadata, _>(
            &UserMemory,
            argument,
            |arguments| gem.metadata(arguments),
        ),
        nr::AMDGPU_GEM_VA => {
            exchange(drm::request::AMDGPU_GEM_VA)
                .run::<GemVa, _>(&UserMemory, argument, |arguments| gem.va(arguments))
        }
        nr::AMDGPU_GEM_OP => {
            exchange(drm::request::AMDGPU_GEM_OP)
                .run::<GemOp, _>(&UserMemory, argument, |arguments| gem.operation(arguments))
        }
        // DRM_MASTER, which a render node never is.
        SCHED => Err(Errno::EACCES),
        _ if refused_on_render_nodes(number) => Err(Errno::EACCES),
        DRM_COMMAND_BASE..DRM_COMMAND_END if driver_has(number - DRM_COMMAND_BASE) => Err(Errno::EOPNOTSUPP),
        SYNCOBJ_FIRST..=SYNCOBJ_LAST => Err(Errno::EOPNOTSUPP),
        _ if ioctl::by_nr(drm::IOCTLS, number).is_some() => Err(Errno::EOPNOTSUPP),
        _ => Err(Errno::EINVAL),
    }
}

const SCHED: u8 = DRM_COMMAND_BASE + 0x15;
const SYNCOBJ_FIRST: u8 = 0xbf;
const SYNCOBJ_LAST: u8 = 0xcf;

/// `drm_version`.
fn describe(version: &mut Version, drm_minor: i32) -> Result<i32> {
    version.version_major = DRIVER_MAJOR;
    version.version_minor = drm_minor;
    version.version_patchlevel = 0;
    copy_field(version.name, &mut version.name_len, b"amdgpu")?;
    copy_field(version.date, &mut version.date_len, b"0")?;
    copy_field(version.desc, &mut version.desc_len, b"AMD GPU")?;
    Ok(0)
}

/// `drm_copy_field`: as much as fits, and the whole length.
fn copy_field(pointer: u64, length: &mut u64, value: &[u8]) -> Result<()> {
    let fits = usize::try_from(*length).map_or(value.len(), |length| length.min(value.len()));
    *length = value.len() as u64;
    if pointer != 0 {
        UserMemory.write_bytes(UserPtr(pointer), value.get(..fits).unwrap_or(value))?;
    }
    Ok(())
}

/// `drm_getcap`, for a driver without mode setting.
fn capability(arguments: &mut GetCap) -> Result<i32> {
    arguments.value = 0;
    arguments.value = match arguments.capability {
        DRM_CAP_TIMESTAMP_MONOTONIC => 1,
        DRM_CAP_PRIME => DRM_PRIME_CAP_IMPORT | DRM_PRIME_CAP_EXPORT,
        DRM_CAP_SYNCOBJ | DRM_CAP_SYNCOBJ_TIMELINE => 0,
        _ => return Err(Errno::EOPNOTSUPP),
    };
    Ok(0)
}

/// `amdgpu_info_ioctl`.
fn query(process: &Process, index: usize, device: &Device, info: &mut Info) -> Result<i32> {
    if info.return_size == 0 || info.return_pointer == 0 {
        return Err(Errno::EINVAL);
    }
    match info.query {
        AMDGPU_INFO_ACCEL_WORKING => answer(info, &1u32),
        AMDGPU_INFO_TIMESTAMP => answer(info, &clock::gpu_counter(device.gpu.clocks.counter_khz)?),
        AMDGPU_INFO_NUM_BYTES_MOVED | AMDGPU_INFO_NUM_EVICTIONS => answer(info, &0u64),
        AMDGPU_INFO_VRAM_LOST_COUNTER => answer(info, &0u32),
        AMDGPU_INFO_VRAM_USAGE | AMDGPU_INFO_VIS_VRAM_USAGE => answer(info, &in_use(process, index)?.0),
        AMDGPU_INFO_GTT_USAGE => answer(info, &in_use(process, index)?.1),
        AMDGPU_INFO_VRAM_GTT => {
            let memory = memory_info(process, index, device)?;
            answer(
                info,
                &InfoVramGtt {
                    vram_size: memory.vram.usable_heap_size,
                    vram_cpu_accessible_size: memory.cpu_accessible_vram.usable_heap_size,
                    gtt_size: memory.gtt.usable_heap_size,
                },
            )
        }
        AMDGPU_INFO_MEMORY => answer(info, &memory_info(process, index, device)?),
        AMDGPU_INFO_READ_MMR_REG => registers(device, info),
        AMDGPU_INFO_DEV_INFO => answer(info, &device_info(device)),
        _ => Err(Errno::EINVAL),
    }
}

/// Copies out what fits into the caller's memory.
fn answer<T: IntoBytes + Immutable>(info: &Info, value: &T) -> Result<i32> {
    let bytes = value.as_bytes();
    let length = bytes.len().min(info.return_size as usize);
    UserMemory.write_bytes(UserPtr(info.return_pointer), bytes.get(..length).unwrap_or(bytes))?;
    Ok(0)
}

/// VRAM of a GPU, and system memory of the driver, in use.
fn in_use(process: &Process, index: usize) -> Result<(u64, u64)> {
    process.graveyard.sweep();
    let counts = process.ledger.in_use()?;
    Ok((counts.vram.get(index).map_or(0, |vram| vram.used), counts.driver))
}

fn heap(total: u64, usable: u64, used: u64) -> HeapInfo {
    HeapInfo {
        total_heap_size: total,
        usable_heap_size: usable,
        heap_usage: used,
        max_allocation: usable.saturating_mul(3) / 4,
    }
}

fn memory_info(process: &Process, index: usize, device: &Device) -> Result<MemoryInfo> {
    let (vram_used, gtt_used) = in_use(process, index)?;
    let memory = &device.gpu.memory;
    let vram = memory.vram_bytes();
    let usable = vram.saturating_sub(RESERVED_VRAM);
    let visible = memory.visible_bytes();
    let gtt = process.ledger.limits().driver;
    Ok(MemoryInfo {
        vram: heap(vram, usable, vram_used),
        cpu_accessible_vram: heap(visible, visible.min(usable), vram_used.min(visible)),
        gtt: heap(gtt, gtt, gtt_used),
    })
}

/// `AMDGPU_INFO_READ_MMR_REG`: the one register that compute clients read.
fn registers(device: &Device, info: &Info) -> Result<i32> {
    let engine = (info.instance >> AMDGPU_INFO_MMR_SE_INDEX_SHIFT) & AMDGPU_INFO_MMR_SE_INDEX_MASK;
    let array = (info.instance >> AMDGPU_INFO_MMR_SH_INDEX_SHIFT) & AMDGPU_INFO_MMR_SH_INDEX_MASK;
    if (engine != AMDGPU_INFO_MMR_SE_INDEX_MASK && engine >= MAX_SHADER_ENGINES)
        || (array != AMDGPU_INFO_MMR_SH_INDEX_MASK && array >= MAX_ARRAYS_PER_ENGINE)
        || info.count > MAX_REGISTERS
    {
        return Err(Errno::EINVAL);
    }
    match (info.count, info.dword_offset) {
        (0, _) => Ok(0),
        (1, GB_ADDR_CONFIG) => answer(info, &device.gpu.gb_addr_config),
        // A register that is not in the driver's list.
        _ => Err(Errno::EFAULT),
    }
}

fn device_info(device: &Device) -> InfoDevice {
    /// PCIe 3.0 with 16 lanes.
    const PCIE_GEN: u32 = 3;
    const PCIE_LANES: u32 = 16;

    let gpu = &device.gpu;
    let shader = &gpu.shader;
    let vm_size = crate::space::ADDRESS_END - RESERVED_TOP;
    let mut info = InfoDevice {
        device_id: u32::from(gpu.pci.device),
        chip_rev: gpu.revision_id,
        external_rev: gpu.external_revision,
        pci_rev: u32::from(gpu.pci.revision),
        family: gpu.family,
        num_shader_engines: shader.engines,
        num_shader_arrays_per_engine: shader.arrays_per_engine,
        gpu_counter_freq: gpu.clocks.counter_khz,
        max_engine_clock: u64::from(gpu.clocks.max_engine_mhz) * 1000,
        max_memory_clock: u64::from(gpu.memory.clock_mhz) * 1000,
        min_engine_clock: u64::from(gpu.clocks.max_engine_mhz) * 100,
        min_memory_clock: u64::from(gpu.memory.clock_mhz) * 100,
        cu_active_number: shader.active_cus(),
        num_hw_gfx_contexts: 8,
        pcie_gen: PCIE_GEN,
        pcie_num_lanes: PCIE_LANES,
        virtual_address_offset: RESERVED_BOTTOM,
        virtual_address_max: vm_size.min(HOLE_START),
        high_va_offset: HOLE_END,
        high_va_max: HOLE_END | vm_size,
        virtual_address_alignment: PAGE as u32,
        pte_fragment_size: 2 << 20,
        gart_page_size: PAGE as u32,
        vram_type: gpu.memory.vram_type,
        vram_bit_width: gpu.memory.width,
        wave_front_size: shader.wave_front_size,
        num_shader_visible_vgprs: 256,
        num_cu_per_sh: shader.cus_per_array,
        ..InfoDevice::default()
    };
    // The 4x4 bitmap folds engines from the fifth on behind the first four (amdgpu_gfx's layout).
    let engines = shader.cu_bitmap.chunks(shader.arrays_per_engine.max(1) as usize);
    for (engine, arrays) in engines.enumerate() {
        for (array, mask) in arrays.iter().enumerate() {
            let row = info.cu_bitmap.get_mut(engine % 4);
            if let Some(place) = row.and_then(|row| row.get_mut(array.saturating_add(engine / 4))) {
                *place = *mask;
            }
        }
    }
    info
}
