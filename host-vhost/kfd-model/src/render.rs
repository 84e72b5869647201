//! The ioctls of a render node, as far as compute uses them (`drm_ioctl`, `amdgpu_info_ioctl`).
//!
//! Deliberate differences from the kernel (Linux 6.12): buffer objects of the render node (GEM, PRIME), contexts,
//! command submission and synchronisation objects answer `EOPNOTSUPP`; AMDGPU_INFO about video, sensors, the
//! VBIOS and hardware blocks answers `EINVAL`, as for a query that the driver does not know; memory usage is that of
//! this process. There is no primary node in `/dev/dri`, only in sysfs.

use kfd_abi::drm::amdgpu::{
    AMDGPU_INFO_ACCEL_WORKING, AMDGPU_INFO_DEV_INFO, AMDGPU_INFO_GTT_USAGE, AMDGPU_INFO_MEMORY,
    AMDGPU_INFO_MMR_SE_INDEX_MASK, AMDGPU_INFO_MMR_SE_INDEX_SHIFT, AMDGPU_INFO_MMR_SH_INDEX_MASK,
    AMDGPU_INFO_MMR_SH_INDEX_SHIFT, AMDGPU_INFO_NUM_BYTES_MOVED, AMDGPU_INFO_NUM_EVICTIONS,
    AMDGPU_INFO_READ_MMR_REG, AMDGPU_INFO_TIMESTAMP, AMDGPU_INFO_VIS_VRAM_USAGE, AMDGPU_INFO_VRAM_GTT,
    AMDGPU_INFO_VRAM_LOST_COUNTER, AMDGPU_INFO_VRAM_USAGE, HeapInfo, Info, InfoDevice, InfoVramGtt,
    MemoryInfo,
};
use kfd_abi::drm::{
    self, DRM_CAP_PRIME, DRM_CAP_SYNCOBJ, DRM_CAP_SYNCOBJ_TIMELINE, DRM_CAP_TIMESTAMP_MONOTONIC,
    DRM_COMMAND_BASE, DRM_COMMAND_END, DRM_IOCTL_BASE, DRM_PRIME_CAP_EXPORT, DRM_PRIME_CAP_IMPORT, GetCap,
    Version, nr,
};
use kfd_abi::ioctl;
use kfd_seam::{Exchange, Request, Result, UserMemory, UserPtr};
use nix::errno::Errno;
use zerocopy::{Immutable, IntoBytes};

use crate::arena::PAGE;
use crate::clock;
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

/// Serves an ioctl of the render node of GPU `index`; `drm_minor` is the driver's minor version.
///
/// # Errors
/// As the kernel's, but for the differences above.
pub fn ioctl(
    process: &Process,
    index: usize,
    drm_minor: i32,
    request: u32,
    argument: UserPtr,
) -> Result<i32> {
    let user = Request(request);
    if user.kind() != DRM_IOCTL_BASE {
        return Err(Errno::ENOTTY);
    }
    let device = process.devices.get(index).ok_or(Errno::ENODEV)?;
    let number = user.number();
    let exchange = |kernel: u32| Exchange::drm(user, Request(kernel));
    match number {
        nr::VERSION => exchange(drm::request::VERSION)
            .run::<Version, _>(&UserMemory, argument, |version| describe(version, drm_minor)),
        nr::GET_CAP => exchange(drm::request::GET_CAP).run::<GetCap, _>(&UserMemory, argument, capability),
        nr::AMDGPU_INFO => {
            exchange(drm::request::AMDGPU_INFO)
                .run::<Info, _>(&UserMemory, argument, |info| query(process, index, device, info))
        }
        // No handle exists: drm_gem_handle_delete, drm_gem_prime_handle_to_dmabuf, drm_gem_object_lookup.
        nr::GEM_CLOSE => Err(Errno::EINVAL),
        nr::PRIME_HANDLE_TO_FD | nr::AMDGPU_GEM_MMAP | nr::AMDGPU_GEM_METADATA => Err(Errno::ENOENT),
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
        AMDGPU_INFO_VRAM_USAGE | AMDGPU_INFO_VIS_VRAM_USAGE => {
            answer(info, &process.state().device(index)?.vram_used)
        }
        AMDGPU_INFO_GTT_USAGE => answer(info, &process.state().driver_used),
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

fn heap(total: u64, usable: u64, used: u64) -> HeapInfo {
    HeapInfo {
        total_heap_size: total,
        usable_heap_size: usable,
        heap_usage: used,
        max_allocation: usable.saturating_mul(3) / 4,
    }
}

fn memory_info(process: &Process, index: usize, device: &Device) -> Result<MemoryInfo> {
    let mut state = process.state();
    let vram_used = state.device(index)?.vram_used;
    let memory = &device.gpu.memory;
    let vram = memory.vram_bytes();
    let usable = vram.saturating_sub(RESERVED_VRAM);
    let visible = memory.visible_bytes();
    Ok(MemoryInfo {
        vram: heap(vram, usable, vram_used),
        cpu_accessible_vram: heap(visible, visible.min(usable), vram_used.min(visible)),
        gtt: heap(process.limits.driver, process.limits.driver, state.driver_used),
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
    /// `AMDGPU_VA_RESERVED_BOTTOM`, `AMDGPU_VA_RESERVED_TOP`, `AMDGPU_GMC_HOLE_START`, `AMDGPU_GMC_HOLE_END`.
    const BOTTOM: u64 = 1 << 16;
    const TOP: u64 = (1 << 16) + (2 << 20) + (2 << 20);
    const HOLE_START: u64 = 0x8000_0000_0000;
    const HOLE_END: u64 = 0xffff_8000_0000_0000;
    /// PCIe 3.0 with 16 lanes.
    const PCIE_GEN: u32 = 3;
    const PCIE_LANES: u32 = 16;

    let gpu = &device.gpu;
    let shader = &gpu.shader;
    let vm_size = crate::space::ADDRESS_END - TOP;
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
        virtual_address_offset: BOTTOM,
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
