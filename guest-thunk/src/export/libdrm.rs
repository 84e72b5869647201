//! The other functions of libdrm_amdgpu that take the handle of a device or a buffer: some questions that the host answers,
//! and all that is of no use to a compute runtime. Our handles are no pointers, so that the real functions would crash on
//! them; what is not done here answers `-EOPNOTSUPP`.
#![allow(unsafe_code, reason = "exported C functions, and calls of the real ones through dlsym")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kfd_abi::drm::amdgpu::{AMDGPU_INFO_FW_VERSION, AMDGPU_INFO_HW_IP_COUNT, AMDGPU_INFO_READ_MMR_REG};
use virtio_kfd_protocol::calls::RenderInfo;
use virtio_kfd_protocol::{GpuId, RenderInfoRequest, Status};

use super::pointer::{Address, Out, number};
use super::render::{missing, on_bo, pass_on};
use crate::thunk::open;
use crate::thunk::refusal::{Level, say};
use crate::thunk::render::bo::{Failure, is_bo};
use crate::thunk::render::{device_handle as device_handle_of, gpu_of};

/// Functions of this file that do something for our handles.
pub const DONE: &[&str] = &[
    "amdgpu_bo_inc_ref",
    "amdgpu_device_deinitialize",
    "amdgpu_device_initialize",
    "amdgpu_get_marketing_name",
    "amdgpu_query_firmware_version",
    "amdgpu_query_hw_ip_count",
    "amdgpu_query_info",
    "amdgpu_read_mm_registers",
];

/// The version of amdgpu's interface that libdrm asks for at least (3.0), which has had no other major since 2016.
const DRM_VERSION: (u32, u32) = (3, 0);

/// What the render node says (`DRM_AMDGPU_INFO`), as much as was asked for.
fn ask(gpu_id: GpuId, query: u32, size: usize, arguments: [u32; 4]) -> Result<Vec<u8>, Failure> {
    let return_size = u32::try_from(size).unwrap_or(u32::MAX);
    let request = RenderInfoRequest { gpu_id, query, return_size, arguments, pad: 0 };
    let answer = open::current()?.client.call::<RenderInfo>(&request, &[], size);
    let (_, bytes) = answer.map_err(|error| match error.status() {
        Some((Status::NOT_SUPPORTED, _)) => Failure { errno: libc::EOPNOTSUPP, why: error.to_string() },
        _ => error.into(),
    })?;
    match bytes.get(..size) {
        Some(bytes) => Ok(bytes.to_vec()),
        None => Err(Failure::invalid(format!("query {query:#x} gave {} of {size} bytes", bytes.len()))),
    }
}

fn required<T: Copy>(place: Out<T>, parameter: &'static str) -> Result<Out<T>, Failure> {
    place.required(parameter).map_err(|_| missing(parameter))
}

/// A question about a device that has no arguments.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_query_info(dev: Address, info_id: u32, size: u32, value: Out<u8>) -> c_int {
    let Some(gpu_id) = gpu_of(number(dev)) else {
        return pass_on!(
            c"amdgpu_query_info",
            fn(dev => Address, info_id => u32, size => u32, value => Out<u8>)
        );
    };
    on_bo("amdgpu_query_info", || {
        let value = required(value, "value")?;
        value.write_all(&ask(gpu_id, info_id, size as usize, [0; 4])?);
        Ok(())
    })
}

/// How many instances of an IP block a device has.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_query_hw_ip_count(dev: Address, kind: u32, count: Out<u32>) -> c_int {
    let Some(gpu_id) = gpu_of(number(dev)) else {
        return pass_on!(c"amdgpu_query_hw_ip_count", fn(dev => Address, kind => u32, count => Out<u32>));
    };
    on_bo("amdgpu_query_hw_ip_count", || {
        let count = required(count, "count")?;
        count.write_all(&words(&ask(gpu_id, AMDGPU_INFO_HW_IP_COUNT, 4, [kind, 0, 0, 0])?));
        Ok(())
    })
}

/// The version of a firmware.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_query_firmware_version(
    dev: Address,
    fw_type: u32,
    ip_instance: u32,
    index: u32,
    version: Out<u32>,
    feature: Out<u32>,
) -> c_int {
    let Some(gpu_id) = gpu_of(number(dev)) else {
        return pass_on!(
            c"amdgpu_query_firmware_version",
            fn(dev => Address, fw_type => u32, ip_instance => u32, index => u32, version => Out<u32>, feature => Out<u32>)
        );
    };
    on_bo("amdgpu_query_firmware_version", || {
        let (version, feature) = (required(version, "version")?, required(feature, "feature")?);
        // struct drm_amdgpu_info_firmware
        let answer = words(&ask(gpu_id, AMDGPU_INFO_FW_VERSION, 8, [fw_type, ip_instance, index, 0])?);
        if let [ver, feat] = answer[..] {
            version.write(ver);
            feature.write(feat);
        }
        Ok(())
    })
}

/// Registers of a device, which are as many words.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_read_mm_registers(
    dev: Address,
    dword_offset: u32,
    count: u32,
    instance: u32,
    flags: u32,
    values: Out<u32>,
) -> c_int {
    let Some(gpu_id) = gpu_of(number(dev)) else {
        return pass_on!(
            c"amdgpu_read_mm_registers",
            fn(dev => Address, dword_offset => u32, count => u32, instance => u32, flags => u32, values => Out<u32>)
        );
    };
    on_bo("amdgpu_read_mm_registers", || {
        let values = required(values, "values")?;
        let size = (count as usize).checked_mul(4).ok_or_else(|| Failure::invalid("count is too large"))?;
        values.write_all(&words(&ask(
            gpu_id,
            AMDGPU_INFO_READ_MMR_REG,
            size,
            [dword_offset, count, instance, flags],
        )?));
        Ok(())
    })
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// A handle of the device that a file is of: for the guest's render node that of the GPU, where there is one GPU. Handles need no
/// memory, so none is lost.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_device_initialize(
    fd: c_int,
    major_version: Out<u32>,
    minor_version: Out<u32>,
    device_handle: Out<u64>,
) -> c_int {
    let ours = || Some(open::current().ok()?.client.device()?.as_raw_fd() == fd);
    if !catch_unwind(AssertUnwindSafe(ours)).ok().flatten().unwrap_or(false) {
        return pass_on!(
            c"amdgpu_device_initialize",
            fn(fd => c_int, major_version => Out<u32>, minor_version => Out<u32>, device_handle => Out<u64>)
        );
    }
    on_bo("amdgpu_device_initialize", || {
        let place = required(device_handle, "device_handle")?;
        let snapshot = open::current()?.snapshot()?;
        let [gpu] = snapshot.gpus.as_slice() else {
            let why = format!("the file is of {} GPUs", snapshot.gpus.len());
            return Err(Failure { errno: libc::EOPNOTSUPP, why });
        };
        place.write(device_handle_of(gpu)?);
        major_version.write(DRM_VERSION.0);
        minor_version.write(DRM_VERSION.1);
        Ok(())
    })
}

/// Lets go of a handle. Ours stay good.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_device_deinitialize(device_handle: Address) -> c_int {
    match gpu_of(number(device_handle)) {
        Some(_) => 0,
        None => pass_on!(c"amdgpu_device_deinitialize", fn(device_handle => Address)),
    }
}

/// One more reference to a buffer, which a further `amdgpu_bo_free` gives back.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_inc_ref(bo: Address) {
    if !is_bo(number(bo)) {
        // The real one gives no result, and what stands in the register is of no matter.
        pass_on!(c"amdgpu_bo_inc_ref", fn(bo => Address));
        return;
    }
    on_bo("amdgpu_bo_inc_ref", || open::current()?.bos.add_reference(number(bo)));
}

/// The name under which a device was sold. libdrm reads it from a file of its own, by numbers that the node's properties have
/// as well; for our handles there is none, as for a device that the file does not have.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_get_marketing_name(dev: Address) -> *const c_char {
    if gpu_of(number(dev)).is_some() {
        return std::ptr::null();
    }
    pass_on!(c"amdgpu_get_marketing_name", fn(dev => Address) -> *const c_char, std::ptr::null())
}

fn refused(name: &str) -> c_int {
    say(Level::Error, || format!("{name}: not for handles of this library"));
    -libc::EOPNOTSUPP
}

fn is_gpu(handle: u64) -> bool {
    gpu_of(handle).is_some()
}

macro_rules! refuse {
    ($($kind:ident $name:ident($($argument:ident: $type:ty),*);)*) => {
        /// Functions that answer `-EOPNOTSUPP` for our handles.
        pub const REFUSED: &[&str] = &[$(stringify!($name)),*];

        $(
            /// Not for our handles.
            ///
            /// # Safety
            /// As amdgpu.h says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(handle: Address $(, $argument: $type)*) -> c_int {
                const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                };
                if $kind(number(handle)) {
                    return refused(stringify!($name));
                }
                pass_on!(NAME, fn(handle => Address $(, $argument => $type)*))
            }
        )*
    };
}

refuse! {
    is_gpu amdgpu_bo_alloc(alloc_buffer: Address, buf_handle: Address);
    is_gpu amdgpu_bo_list_create(number_of_resources: u32, resources: Address, resource_prios: Address, result: Address);
    is_gpu amdgpu_bo_list_create_raw(number_of_buffers: u32, buffers: Address, result: Address);
    is_gpu amdgpu_bo_list_destroy_raw(bo_list: u32);
    is_bo amdgpu_bo_query_info(info: Address);
    is_bo amdgpu_bo_set_metadata(info: Address);
    is_gpu amdgpu_bo_va_op_raw(bo: Address, offset: u64, size: u64, addr: u64, flags: u64, ops: u32);
    is_bo amdgpu_bo_wait_for_idle(timeout_ns: u64, buffer_busy: Address);
    is_gpu amdgpu_create_bo_from_user_mem(cpu: Address, size: u64, buf_handle: Address);
    is_gpu amdgpu_cs_create_syncobj(syncobj: Address);
    is_gpu amdgpu_cs_create_syncobj2(flags: u32, syncobj: Address);
    is_gpu amdgpu_cs_ctx_create(context: Address);
    is_gpu amdgpu_cs_ctx_create2(priority: u32, context: Address);
    is_gpu amdgpu_cs_ctx_override_priority(context: Address, master_fd: c_int, priority: u32);
    is_gpu amdgpu_cs_destroy_syncobj(syncobj: u32);
    is_gpu amdgpu_cs_export_syncobj(syncobj: u32, shared_fd: Address);
    is_gpu amdgpu_cs_fence_to_handle(fence: Address, what: u32, out_handle: Address);
    is_gpu amdgpu_cs_import_syncobj(shared_fd: c_int, syncobj: Address);
    is_gpu amdgpu_cs_submit_raw(context: Address, bo_list_handle: Address, num_chunks: c_int, chunks: Address, seq_no: Address);
    is_gpu amdgpu_cs_submit_raw2(context: Address, bo_list_handle: u32, num_chunks: c_int, chunks: Address, seq_no: Address);
    is_gpu amdgpu_cs_syncobj_export_sync_file(syncobj: u32, sync_file_fd: Address);
    is_gpu amdgpu_cs_syncobj_export_sync_file2(syncobj: u32, point: u64, flags: u32, sync_file_fd: Address);
    is_gpu amdgpu_cs_syncobj_import_sync_file(syncobj: u32, sync_file_fd: c_int);
    is_gpu amdgpu_cs_syncobj_import_sync_file2(syncobj: u32, point: u64, sync_file_fd: c_int);
    is_gpu amdgpu_cs_syncobj_query(handles: Address, points: Address, num_handles: u32);
    is_gpu amdgpu_cs_syncobj_query2(handles: Address, points: Address, num_handles: u32, flags: u32);
    is_gpu amdgpu_cs_syncobj_reset(syncobjs: Address, syncobj_count: u32);
    is_gpu amdgpu_cs_syncobj_signal(syncobjs: Address, syncobj_count: u32);
    is_gpu amdgpu_cs_syncobj_timeline_signal(syncobjs: Address, points: Address, syncobj_count: u32);
    is_gpu amdgpu_cs_syncobj_timeline_wait(handles: Address, points: Address, num_handles: u32, timeout_nsec: i64, flags: u32, first_signaled: Address);
    is_gpu amdgpu_cs_syncobj_transfer(dst_handle: u32, dst_point: u64, src_handle: u32, src_point: u64, flags: u32);
    is_gpu amdgpu_cs_syncobj_wait(handles: Address, num_handles: u32, timeout_nsec: i64, flags: u32, first_signaled: Address);
    is_gpu amdgpu_find_bo_by_cpu_mapping(cpu: Address, size: u64, buf_handle: Address, offset_in_bo: Address);
    is_gpu amdgpu_query_buffer_size_alignment(info: Address);
    is_gpu amdgpu_query_crtc_from_id(id: u32, result: Address);
    is_gpu amdgpu_query_gds_info(gds_info: Address);
    is_gpu amdgpu_query_gpuvm_fault_info(size: u32, value: Address);
    is_gpu amdgpu_query_heap_info(heap: u32, flags: u32, info: Address);
    is_gpu amdgpu_query_hw_ip_info(kind: u32, ip_instance: u32, info: Address);
    is_gpu amdgpu_query_sensor_info(sensor_type: u32, size: u32, value: Address);
    is_gpu amdgpu_query_sw_info(info: c_int, value: Address);
    is_gpu amdgpu_query_video_caps_info(cap_type: u32, size: u32, value: Address);
    is_gpu amdgpu_va_range_alloc(va_range_type: c_int, size: u64, va_base_alignment: u64, va_base_required: u64, va_base_allocated: Address, va_range_handle: Address, flags: u64);
    is_gpu amdgpu_va_range_query(kind: c_int, start: Address, end: Address);
    is_gpu amdgpu_vm_reserve_vmid(flags: u32);
    is_gpu amdgpu_vm_unreserve_vmid(flags: u32);
}
