//! The device handle, and the functions of libdrm and libdrm_amdgpu that a runtime calls with it.
//!
//! They stand before the real ones in the order of the dynamic linker. Handles and descriptors that are not ours belong to
//! another user of libdrm in the same process, such as Mesa: those calls go on to the next library that has the function.
#![allow(unsafe_code, reason = "exported C functions, and calls of the real ones through dlsym")]
#![allow(non_snake_case, reason = "the API's names")]

use std::ffi::{CStr, c_int, c_ulong, c_void};
use std::mem::transmute;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use super::exports;
use super::pointer::{Address, Out, number};
use crate::thunk::open;
use crate::thunk::refusal::{Level, Outcome, say};
use crate::thunk::render::{AmdgpuGpuInfo, device_handle, gb_addr_config, gpu_of};

exports! {
    "render";
    /// The handle of a GPU's device.
    done("for the functions of libdrm_amdgpu that this library exports")
    fn hsaKmtGetAMDGPUDeviceHandle(node_id: u32, handle: Out<u64>) {
        let thunk = open::current()?;
        let handle = handle.required("DeviceHandle")?;
        handle.write(device_handle(thunk.snapshot()?.gpu(node_id)?)?);
        Ok(())
    }
}

/// The functions below.
pub const LIBDRM: &[&str] = &[
    "amdgpu_bo_cpu_map",
    "amdgpu_bo_export",
    "amdgpu_bo_free",
    "amdgpu_bo_import",
    "amdgpu_bo_va_op",
    "amdgpu_query_gpu_info",
    "drmCommandWriteRead",
];

/// A function of the next library, as an address; 0 where no library has it.
struct Next {
    name: &'static CStr,
    found: OnceLock<usize>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Next { name, found: OnceLock::new() }
    }

    fn address(&self) -> usize {
        *self.found.get_or_init(|| {
            // SAFETY: dlsym takes any name; RTLD_NEXT is looked up from this library on.
            unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) }.addr()
        })
    }
}

/// Calls the next library's function of this name and type, or answers `-ENOSYS` where there is none.
macro_rules! pass_on {
    ($name:literal, fn($($argument:expr => $type:ty),*)) => {{
        static NEXT: Next = Next::new($name);
        match NEXT.address() {
            0 => -libc::ENOSYS,
            address => {
                let address = std::ptr::with_exposed_provenance::<c_void>(address);
                // SAFETY: the name is libdrm's, whose ABI gives the function this type.
                let next = unsafe { transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> c_int>(address) };
                // SAFETY: the arguments are those that the caller made for this very function.
                unsafe { next($($argument),*) }
            }
        }
    }};
}

/// What the functions of libdrm answer: 0 or a negative errno.
fn libdrm(name: &str, logic: impl FnOnce() -> Outcome<()>) -> c_int {
    match catch_unwind(AssertUnwindSafe(logic)) {
        Ok(Ok(())) => 0,
        Ok(Err(refusal)) => {
            say(Level::Error, || format!("{name}: {refusal}"));
            -libc::EINVAL
        }
        Err(_) => -libc::EIO,
    }
}

/// Information on a device.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_query_gpu_info(dev: Address, info: Out<AmdgpuGpuInfo>) -> c_int {
    let Some(gpu_id) = gpu_of(number(dev)) else {
        return pass_on!(c"amdgpu_query_gpu_info", fn(dev => Address, info => Out<AmdgpuGpuInfo>));
    };
    libdrm("amdgpu_query_gpu_info", || {
        let info = info.required("info")?;
        let thunk = open::current()?;
        let snapshot = thunk.snapshot()?;
        let gpu = snapshot.gpu(snapshot.node_of(gpu_id)?)?;
        let device = gpu.device.unwrap_or_default();
        info.write(AmdgpuGpuInfo::new(&device, gb_addr_config(&thunk.client, gpu_id)?));
        Ok(())
    })
}

/// Takes a buffer of another process or driver.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_import(
    dev: Address,
    kind: c_int,
    shared_handle: u32,
    output: Address,
) -> c_int {
    match gpu_of(number(dev)) {
        // No buffer can be given to our devices yet.
        Some(_) => -libc::ENOTSUP,
        None => pass_on!(
            c"amdgpu_bo_import",
            fn(dev => Address, kind => c_int, shared_handle => u32, output => Address)
        ),
    }
}

/// Gives a buffer to another process or driver. Ours has none of our buffers' handles given out.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_export(buf_handle: Address, kind: c_int, shared_handle: Address) -> c_int {
    pass_on!(c"amdgpu_bo_export", fn(buf_handle => Address, kind => c_int, shared_handle => Address))
}

/// Frees a buffer.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_free(buf_handle: Address) -> c_int {
    pass_on!(c"amdgpu_bo_free", fn(buf_handle => Address))
}

/// Maps a buffer for the CPU.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_cpu_map(buf_handle: Address, cpu: Address) -> c_int {
    pass_on!(c"amdgpu_bo_cpu_map", fn(buf_handle => Address, cpu => Address))
}

/// Maps a buffer for the GPU.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_va_op(
    bo: Address,
    offset: u64,
    size: u64,
    addr: u64,
    flags: u64,
    ops: u32,
) -> c_int {
    pass_on!(
        c"amdgpu_bo_va_op",
        fn(bo => Address, offset => u64, size => u64, addr => u64, flags => u64, ops => u32)
    )
}

/// A command of a DRM driver. None of the descriptors that it can be called with is ours.
///
/// # Safety
/// As xf86drm.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn drmCommandWriteRead(
    fd: c_int,
    drm_command_index: c_ulong,
    data: Address,
    size: c_ulong,
) -> c_int {
    pass_on!(
        c"drmCommandWriteRead",
        fn(fd => c_int, drm_command_index => c_ulong, data => Address, size => c_ulong)
    )
}
