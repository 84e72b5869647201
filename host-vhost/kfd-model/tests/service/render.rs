//! The render node's ioctls.

use kfd_abi::drm::amdgpu::{
    AMDGPU_INFO_ACCEL_WORKING, AMDGPU_INFO_DEV_INFO, AMDGPU_INFO_MEMORY, AMDGPU_INFO_READ_MMR_REG,
    AMDGPU_INFO_VRAM_USAGE, Info, InfoDevice, MemoryInfo,
};
use kfd_abi::drm::{GetCap, Version, request};
use kfd_abi::ioctl::{Direction, request as ioc};
use kfd_abi::memory::AllocFlags;
use kfd_seam::{KfdService, UserPtr};
use nix::errno::Errno;

use crate::caller::{Caller, pointer};

fn call<T>(caller: &Caller, code: u32, arguments: &mut T) -> Result<i32, Errno> {
    let result = caller.model.ioctl(caller.gpus[0].file, code, pointer(arguments));
    std::hint::black_box(arguments);
    result
}

fn info<T>(caller: &Caller, query: u32, value: &mut T, size: u32) -> Result<i32, Errno> {
    let mut arguments =
        Info { return_pointer: pointer(value).0, return_size: size, query, ..Default::default() };
    let result = call(caller, request::AMDGPU_INFO, &mut arguments);
    std::hint::black_box(value);
    result
}

#[test]
fn the_driver_says_its_name() {
    // drm_version, drm_copy_field: as much as fits, and the whole length.
    let caller = Caller::new("gfx906");
    let mut name = [0u8; 4];
    let mut version = Version { name_len: 4, name: pointer(&mut name).0, ..Default::default() };
    assert_eq!(call(&caller, request::VERSION, &mut version), Ok(0));
    assert_eq!((version.version_major, version.version_minor, version.version_patchlevel), (3, 61, 0));
    assert_eq!((&name, version.name_len), (b"amdg", 6));
    assert!(version.desc_len > 0 && version.date_len > 0);
}

#[test]
fn sizes_of_answers_are_the_callers() {
    // amdgpu_info_ioctl: min(size, sizeof).
    let caller = Caller::new("gfx906");
    let mut working = [0u32; 2];
    assert_eq!(info(&caller, AMDGPU_INFO_ACCEL_WORKING, &mut working, 8), Ok(0));
    assert_eq!(working, [1, 0]);
    let mut device = InfoDevice { min_engine_clock: 0x55, ..Default::default() };
    assert_eq!(info(&caller, AMDGPU_INFO_DEV_INFO, &mut device, 368), Ok(0), "Debian 12's structure");
    assert_eq!((device.device_id, device.family, device.cu_active_number), (0x66a1, 141, 60));
    assert_eq!(device.gpu_counter_freq, 100_000);
    assert_eq!(device.cu_bitmap[3][0], 0x7fff);
    assert_eq!(device.min_engine_clock, 0x55, "not touched");
    let mut memory = MemoryInfo::default();
    assert_eq!(info(&caller, AMDGPU_INFO_MEMORY, &mut memory, size_of::<MemoryInfo>() as u32), Ok(0));
    assert_eq!(memory.vram.total_heap_size, 16368 << 20);
    assert_eq!(info(&caller, AMDGPU_INFO_MEMORY, &mut memory, 0), Err(Errno::EINVAL));
    let mut null = Info { return_size: 4, ..Default::default() };
    assert_eq!(call(&caller, request::AMDGPU_INFO, &mut null), Err(Errno::EINVAL));
    let mut bad = Info { return_size: 4, return_pointer: 8, ..Default::default() };
    assert_eq!(call(&caller, request::AMDGPU_INFO, &mut bad), Err(Errno::EFAULT));
    assert_eq!(info(&caller, 0x7fff, &mut working, 4), Err(Errno::EINVAL));
}

#[test]
fn usage_follows_the_buffers() {
    let caller = Caller::new("gfx906");
    let mut used = 0u64;
    caller.allocate(caller.gpu(), 0x10_0000, 12288, AllocFlags::VRAM).unwrap();
    assert_eq!(info(&caller, AMDGPU_INFO_VRAM_USAGE, &mut used, 8), Ok(0));
    assert_eq!(used, 12288);
}

#[test]
fn one_register_can_be_read() {
    // amdgpu_info_ioctl: AMDGPU_INFO_READ_MMR_REG.
    let caller = Caller::new("gfx906");
    let mut value = [0u32; 2];
    let read = |dword_offset, count, instance, value: &mut [u32; 2]| {
        let mut arguments = Info {
            return_pointer: pointer(value).0,
            return_size: 8,
            query: AMDGPU_INFO_READ_MMR_REG,
            dword_offset,
            count,
            instance,
            flags: 0,
        };
        call(&caller, request::AMDGPU_INFO, &mut arguments)
    };
    assert_eq!(read(0x263e, 1, 0xffff_ffff, &mut value), Ok(0));
    assert_eq!(value, [caller.model.profile().gpu[0].gb_addr_config, 0]);
    assert_eq!(read(0x263f, 1, 0xffff_ffff, &mut value), Err(Errno::EFAULT), "not in the list");
    assert_eq!(read(0x263e, 129, 0xffff_ffff, &mut value), Err(Errno::EINVAL));
    assert_eq!(read(0x263e, 1, 8, &mut value), Err(Errno::EINVAL), "no such shader engine");
}

#[test]
fn render_nodes_refuse_what_needs_a_primary_node() {
    // drm_ioctl, drm_ioctl_permit.
    let caller = Caller::new("gfx906");
    let mut bytes = [0u8; 256];
    let mut answer =
        |kind, number| call(&caller, ioc(Direction::ReadWrite, kind, number, 0), &mut bytes).unwrap_err();
    assert_eq!(answer(b'T', 0x01), Errno::ENOTTY, "another type: isatty()");
    assert_eq!(answer(b'K', 0x01), Errno::ENOTTY);
    for number in [0x01, 0x02, 0x05, 0x0d, 0xa7, 0x55] {
        assert_eq!(answer(b'd', number), Errno::EACCES, "{number:#x}");
    }
    for number in [0x03, 0x20, 0x4a, 0x60, 0x9f] {
        assert_eq!(answer(b'd', number), Errno::EINVAL, "{number:#x}");
    }
    for number in [0x42, 0x44, 0x51, 0xbf] {
        assert_eq!(answer(b'd', number), Errno::EOPNOTSUPP, "{number:#x}");
    }
}

#[test]
fn capabilities() {
    // drm_getcap.
    let caller = Caller::new("gfx906");
    let cap = |capability| {
        let mut arguments = GetCap { capability, value: 99 };
        call(&caller, request::GET_CAP, &mut arguments).map(|_| arguments.value)
    };
    assert_eq!((cap(6), cap(5)), (Ok(1), Ok(3)));
    assert_eq!((cap(1), cap(0x100)), (Err(Errno::EOPNOTSUPP), Err(Errno::EOPNOTSUPP)));
    let null = caller.model.ioctl(caller.gpus[0].file, request::GET_CAP, UserPtr(0));
    assert_eq!(null, Err(Errno::EFAULT));
}
