//! The device handle, and the functions of libdrm and libdrm_amdgpu that a runtime calls with it.
//!
//! They stand before the real ones in the order of the dynamic linker. Handles and descriptors that are not ours belong to
//! another user of libdrm in the same process, such as Mesa: those calls go on to the next library that has the function.
#![allow(unsafe_code, reason = "exported C functions, and calls of the real ones through dlsym")]
#![allow(non_snake_case, reason = "the API's names")]

use std::ffi::{CStr, c_int, c_ulong, c_void};
use std::mem::transmute;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::drm::amdgpu::GemMmap;

use super::cancellation::Uncancelled;
use super::exports;
use super::pointer::{Address, Out, descriptor, number};
use crate::thunk::open;
use crate::thunk::refusal::{Level, Outcome, Refusal, say};
use crate::thunk::render::bo::{Failure, is_bo};
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

    /// The file of a device.
    done("the guest's render node; none in loop-back")
    fn hsaKmtGetAmdGPUDeviceFd(device_handle: u64, fd: Out<i32>) {
        let thunk = open::current()?;
        let fd = fd.required("fd")?;
        if gpu_of(device_handle).is_none() {
            return Err(Refusal::handle("DeviceHandle is none of this library's"));
        }
        let none = || Refusal::new(HsakmtStatus::NOT_SUPPORTED, "loop-back has no render node");
        fd.write(thunk.client.device().ok_or_else(none)?.as_raw_fd());
        Ok(())
    }

    /// Takes a buffer of this or another process.
    not_implemented("experimental: its structs change from release to release; amdgpu_bo_import is there")
    fn hsaKmtHandleImport(import_desc: Address, import_result: Address, flags: Address);

    /// Gives a buffer to another process.
    not_implemented("experimental: its structs change from release to release; amdgpu_bo_export is there")
    fn hsaKmtHandleExport(export_desc: Address, export_result: Address, flags: Address);

    /// Maps a part of a buffer for the GPU.
    not_implemented("experimental: its arguments change from release to release; amdgpu_bo_va_op is there")
    fn hsaKmtMemoryVaMap(handle: u64, offset: u64, size: u64, addr: u64, flags: u64);

    /// Ends it.
    not_implemented("experimental: its arguments change from release to release; amdgpu_bo_va_op is there")
    fn hsaKmtMemoryVaUnmap(handle: u64, offset: u64, size: u64, addr: u64);

    /// Maps a buffer for the CPU.
    not_implemented("experimental; amdgpu_bo_cpu_map is there")
    fn hsaKmtMemoryCpuMap(handle: u64, out_cpu_ptr: Out<Address>);

    /// Where the CPU has a buffer.
    not_implemented("experimental: its arguments change from release to release; amdgpu_bo_cpu_map is there")
    fn hsaKmtMemoryGetCpuAddr(device_handle: u64, memory_handle: u64, fd: Out<i32>, cpu_addr: Out<u64>);

    /// Frees a buffer.
    not_implemented("experimental; amdgpu_bo_free is there")
    fn hsaKmtMemHandleFree(handle: u64);

    /// Frees a buffer, its metadata stay.
    not_implemented("experimental; amdgpu_bo_free is there")
    fn hsaKmtMemHandleFreePreserveMetadata(handle: u64);

    /// A handle of memory, on Windows.
    not_supported("Windows only")
    fn hsaKmtGetMemoryHandle(
        va: Address,
        memory_address: Address,
        size_in_bytes: u64,
        shared_memory_handle: Out<u64>,
    );
}

/// The functions below.
pub const LIBDRM: &[&str] = &[
    "amdgpu_bo_cpu_map",
    "amdgpu_bo_cpu_unmap",
    "amdgpu_bo_export",
    "amdgpu_bo_free",
    "amdgpu_bo_import",
    "amdgpu_bo_va_op",
    "amdgpu_device_get_fd",
    "amdgpu_query_gpu_info",
    "drmCommandWriteRead",
];

/// A function of the next library, as an address; 0 where no library has it.
pub(super) struct Next {
    name: &'static CStr,
    found: OnceLock<usize>,
}

/// The libraries that the real functions are in. Whoever has a handle of theirs has loaded them, but perhaps where RTLD_NEXT does
/// not look: as a need of something that was opened with RTLD_LOCAL, such as a driver of Mesa's.
const LIBRARIES: [&CStr; 2] = [c"libdrm_amdgpu.so.1", c"libdrm.so.2"];

impl Next {
    pub(super) const fn new(name: &'static CStr) -> Self {
        Next { name, found: OnceLock::new() }
    }

    pub(super) fn address(&self) -> usize {
        if let Some(found) = self.found.get() {
            return *found;
        }
        // SAFETY: dlsym takes any name; RTLD_NEXT is looked up from this library on.
        let next = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) }.addr();
        let found = if next == 0 { self.elsewhere() } else { next };
        // Without one, the library may come later.
        if found != 0 {
            let _ = self.found.set(found);
        }
        found
    }

    fn elsewhere(&self) -> usize {
        let find = |library: &CStr| {
            let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
            // SAFETY: nothing is loaded, so that no initializer runs. What is found stays loaded, for it is never closed.
            let library = unsafe { libc::dlopen(library.as_ptr(), flags) };
            if library.is_null() {
                return 0;
            }
            // SAFETY: the handle is that of a library which is loaded.
            unsafe { libc::dlsym(library, self.name.as_ptr()) }.addr()
        };
        LIBRARIES.into_iter().map(find).find(|found| *found != 0).unwrap_or(0)
    }
}

/// Calls the next library's function of this name and type, or answers `-ENOSYS`, or what is said, where there is none.
macro_rules! pass_on {
    ($name:expr, fn($($argument:expr => $type:ty),*)) => {
        pass_on!($name, fn($($argument => $type),*) -> c_int, -libc::ENOSYS)
    };
    ($name:expr, fn($($argument:expr => $type:ty),*) -> $result:ty, $without:expr) => {{
        static NEXT: $crate::export::render::Next = $crate::export::render::Next::new($name);
        match NEXT.address() {
            0 => $without,
            address => {
                let address = std::ptr::with_exposed_provenance::<c_void>(address);
                // SAFETY: the name is libdrm's, whose ABI gives the function this type.
                let next = unsafe { transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> $result>(address) };
                // SAFETY: the arguments are those that the caller made for this very function.
                unsafe { next($($argument),*) }
            }
        }
    }};
}

pub(super) use pass_on;

/// What the functions of libdrm answer: 0 or a negative errno.
fn libdrm(name: &str, logic: impl FnOnce() -> Outcome<()>) -> c_int {
    let _uncancelled = Uncancelled::enter();
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

/// What the functions on buffers answer: 0 or a negative errno.
pub(super) fn on_bo(name: &str, logic: impl FnOnce() -> Result<(), Failure>) -> c_int {
    let _uncancelled = Uncancelled::enter();
    match catch_unwind(AssertUnwindSafe(logic)) {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => {
            say(Level::Error, || format!("{name}: {failure}"));
            failure.errno.saturating_neg()
        }
        Err(_) => -libc::EIO,
    }
}

pub(super) fn missing(parameter: &'static str) -> Failure {
    Failure::invalid(format!("{parameter} is NULL"))
}

/// `struct amdgpu_bo_import_result` of amdgpu.h.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct AmdgpuBoImportResult {
    /// The buffer.
    pub buf_handle: u64,
    /// Bytes.
    pub alloc_size: u64,
}

/// The file of a device, for `mmap` at the offset that GEM_MMAP tells: the guest's render node.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_device_get_fd(device_handle: Address) -> c_int {
    if gpu_of(number(device_handle)).is_none() {
        return pass_on!(c"amdgpu_device_get_fd", fn(device_handle => Address));
    }
    let fd = || Some(open::current().ok()?.client.device()?.as_raw_fd());
    catch_unwind(AssertUnwindSafe(fd)).ok().flatten().unwrap_or(-1)
}

/// Takes a buffer of this or another process.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_import(
    dev: Address,
    kind: c_int,
    shared_handle: u32,
    output: Out<AmdgpuBoImportResult>,
) -> c_int {
    let Some(gpu_id) = gpu_of(number(dev)) else {
        return pass_on!(
            c"amdgpu_bo_import",
            fn(dev => Address, kind => c_int, shared_handle => u32, output => Out<AmdgpuBoImportResult>)
        );
    };
    on_bo("amdgpu_bo_import", || {
        let output = output.required("output").map_err(|_| missing("output"))?;
        let thunk = open::current()?;
        let snapshot = thunk.snapshot()?;
        // What libdrm answers; see Bos::import.
        let no_file = |_| Failure { errno: libc::EPERM, why: format!("{shared_handle} is no descriptor") };
        let dma_buf = || descriptor(shared_handle.into()).map_err(no_file);
        let host = thunk.host(&snapshot);
        let (buf_handle, alloc_size) = thunk.bos.import(host, &thunk.memory, gpu_id, kind, dma_buf)?;
        output.write(AmdgpuBoImportResult { buf_handle, alloc_size });
        Ok(())
    })
}

/// Gives a buffer to another process or driver.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_export(
    buf_handle: Address,
    kind: c_int,
    shared_handle: Out<u32>,
) -> c_int {
    if !is_bo(number(buf_handle)) {
        return pass_on!(
            c"amdgpu_bo_export",
            fn(buf_handle => Address, kind => c_int, shared_handle => Out<u32>)
        );
    }
    on_bo("amdgpu_bo_export", || {
        let place = shared_handle.required("shared_handle").map_err(|_| missing("shared_handle"))?;
        place.write(open::current()?.bos.export(number(buf_handle), kind)?);
        Ok(())
    })
}

/// Frees a buffer.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_free(buf_handle: Address) -> c_int {
    if !is_bo(number(buf_handle)) {
        return pass_on!(c"amdgpu_bo_free", fn(buf_handle => Address));
    }
    on_bo("amdgpu_bo_free", || {
        let thunk = open::current()?;
        thunk.bos.free(&thunk.client, number(buf_handle))
    })
}

/// Maps a buffer for the CPU.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_cpu_map(buf_handle: Address, cpu: Out<u64>) -> c_int {
    if !is_bo(number(buf_handle)) {
        return pass_on!(c"amdgpu_bo_cpu_map", fn(buf_handle => Address, cpu => Out<u64>));
    }
    on_bo("amdgpu_bo_cpu_map", || {
        let place = cpu.required("cpu").map_err(|_| missing("cpu"))?;
        let thunk = open::current()?;
        let snapshot = thunk.snapshot()?;
        place.write(thunk.bos.cpu_map(thunk.host(&snapshot), number(buf_handle))?);
        Ok(())
    })
}

/// Ends a mapping for the CPU.
///
/// # Safety
/// As amdgpu.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_bo_cpu_unmap(buf_handle: Address) -> c_int {
    if !is_bo(number(buf_handle)) {
        return pass_on!(c"amdgpu_bo_cpu_unmap", fn(buf_handle => Address));
    }
    on_bo("amdgpu_bo_cpu_unmap", || open::current()?.bos.cpu_unmap(number(buf_handle)))
}

/// Maps a part of a buffer for the GPU.
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
    if !is_bo(number(bo)) {
        return pass_on!(
            c"amdgpu_bo_va_op",
            fn(bo => Address, offset => u64, size => u64, addr => u64, flags => u64, ops => u32)
        );
    }
    on_bo("amdgpu_bo_va_op", || {
        let thunk = open::current()?;
        thunk.bos.va_op(&thunk.client, number(bo), offset, size, addr, ops)
    })
}

/// `DRM_AMDGPU_GEM_MMAP` of amdgpu_drm.h: the only command that a runtime gives to a device's file.
const GEM_MMAP: c_ulong = 1;

/// A command of a DRM driver.
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
    let ours = || Some(open::current().ok()?.client.device()?.as_raw_fd() == fd);
    if !catch_unwind(AssertUnwindSafe(ours)).ok().flatten().unwrap_or(false) {
        return pass_on!(
            c"drmCommandWriteRead",
            fn(fd => c_int, drm_command_index => c_ulong, data => Address, size => c_ulong)
        );
    }
    on_bo("drmCommandWriteRead", || {
        let argument = Out::<u64>::from(data.cast::<u64>());
        let asked = argument.read().map(|addr_ptr| GemMmap { addr_ptr });
        match (drm_command_index, asked) {
            (GEM_MMAP, Some(asked)) if usize::try_from(size) == Ok(size_of::<GemMmap>()) => {
                argument.write(open::current()?.bos.mmap_offset(asked.handle())?);
                Ok(())
            }
            (other, _) => Err(Failure::invalid(format!("command {other} with {size} bytes"))),
        }
    })
}
