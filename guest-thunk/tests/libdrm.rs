//! The functions of libdrm_amdgpu that do nothing for this library's handles, and what becomes of other handles.
#![allow(unsafe_code, reason = "the C API")]
#![allow(clippy::unwrap_used, reason = "a test")]

use std::ffi::{CString, c_int};
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::ptr::{null_mut, without_provenance_mut};

use guest_thunk::export::libdrm::*;
use guest_thunk::export::pointer::Address;

/// What a function says to a handle of ours.
macro_rules! answer {
    ($call:expr) => {{
        // SAFETY: no argument is looked at but the handle.
        unsafe { $call }
    }};
}

fn device() -> Address {
    // Any GPU's: no pointer that a program could have.
    without_provenance_mut(0xffff_8000_0000_1234)
}

fn buffer() -> Address {
    without_provenance_mut(0xffff_9000_0000_0001)
}

/// Natively they work on pointers; ours would crash there.
#[test]
fn what_is_not_done_for_our_handles_says_so() {
    let none: Address = null_mut();
    let answers = [
        answer!(amdgpu_query_heap_info(device(), 1, 0, none)),
        answer!(amdgpu_bo_alloc(device(), none, none)),
        answer!(amdgpu_va_range_alloc(device(), 0, 4096, 0, 0, none, none, 0)),
        answer!(amdgpu_cs_ctx_create2(device(), 0, none)),
        answer!(amdgpu_cs_syncobj_timeline_wait(device(), none, none, 1, -1, 0, none)),
        answer!(amdgpu_bo_va_op_raw(device(), buffer(), 0, 4096, 0, 0, 1)),
        answer!(amdgpu_bo_query_info(buffer(), none)),
        answer!(amdgpu_bo_set_metadata(buffer(), none)),
        answer!(amdgpu_bo_wait_for_idle(buffer(), u64::MAX, none)),
    ];
    assert_eq!(answers, [-libc::EOPNOTSUPP; 9]);
    assert_eq!(answer!(amdgpu_device_deinitialize(device())), 0, "handles need no memory and stay good");
    assert!(answer!(amdgpu_get_marketing_name(device())).is_null());
}

/// Whose handle it is has loaded libdrm, though perhaps not where all libraries of the process find it.
#[test]
fn handles_of_others_go_on_to_the_real_library_wherever_it_is() {
    let ask = |dev: usize| -> c_int {
        let info: Address = without_provenance_mut(3);
        // SAFETY: the handle is none of ours, and the library below takes any.
        unsafe { amdgpu_query_heap_info(without_provenance_mut(dev), 1, 2, info) }
    };
    assert_eq!(ask(0x5000), -libc::ENOSYS, "no library has it");
    let directory = tempfile::tempdir().unwrap();
    let (source, library) = (directory.path().join("d.c"), directory.path().join("libdrm_amdgpu.so.1"));
    let text = "int amdgpu_query_heap_info(void *dev, unsigned heap, unsigned flags, void *info) { return \
                dev == (void *)0x5000 && heap == 1 && flags == 2 && info == (void *)3 ? 42 : 43; }";
    std::fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wl,-soname,libdrm_amdgpu.so.1", "-o"]).arg(&library).arg(&source);
    match cc.status() {
        Ok(status) => assert!(status.success()),
        Err(error) => {
            println!("SKIP: cc: {error}");
            return;
        }
    }
    let path = CString::new(library.as_os_str().as_bytes()).unwrap();
    // SAFETY: the library has no initializer.
    let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!opened.is_null());
    assert_eq!(ask(0x5000), 42);
    assert_eq!(ask(0x6000), 43);
    assert_eq!(
        answer!(amdgpu_query_heap_info(device(), 1, 2, null_mut())),
        -libc::EOPNOTSUPP,
        "ours stay ours"
    );
}
