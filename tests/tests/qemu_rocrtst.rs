//! ROCr's own tests (rocrtst64 of ROCr 7.2.4) in an unmodified guest, through `kfd-run`: each alone in a process of an ordinary
//! user. They judge themselves.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::time::{Duration, Instant};

use virtio_kfd_tests::gpu_guest::{MEMORY_MIB, open_to_all, run};
use virtio_kfd_tests::installed::PLACE;
use virtio_kfd_tests::parts::{kernel_complaints, package_path};
use virtio_kfd_tests::rocrtst::{self, RUNTIME, Rocrtst, TESTS};
use virtio_kfd_tests::seam_guest::add_library;
use virtio_kfd_tests::{Artifacts, Daemon, Vm, need};

const GPU: &str = "gfx906";

/// For one test; a guest's CPU may be emulated.
const LIMIT: Duration = Duration::from_secs(300);

/// The tests of a usual run. The first two are two processes each, which share memory; a runtime's start takes an emulated CPU
/// some twenty seconds.
const USUAL: &[&str] = &[
    "rocrtstFunc.IPC",
    "rocrtstFunc.VirtMemory_Interprocess_Test",
    "rocrtstFunc.MemoryAccessTests",
    "rocrtstNeg.Queue_Validation_InvalidPacket",
    "rocrtstFunc.Signal_Create_Concurrently",
];

/// Others, of every kind that is not a measure of speed.
const MORE: &[&str] = &[
    "rocrtst.Test_Example",
    "rocrtstFunc.MemoryAccessCoherent",
    "rocrtstFunc.GroupMemoryAllocationTest",
    "rocrtstFunc.MemoryAllocateAndFreeTest",
    "rocrtstFunc.Concurrent_Shutdown",
    "rocrtstFunc.Reference_Count",
    "rocrtstFunc.Signal_Destroy_Concurrently",
    "rocrtstFunc.DISABLED_Signal_Kernel_Multi_Wait",
    "rocrtstFunc.DISABLED_Aql_Barrier_Bit_Set",
    "rocrtstFunc.Memory_Atomic_Add_Test",
    "rocrtstFunc.Memory_Atomic_Xchg_Test",
    "rocrtstFunc.DISABLED_DebugBasicTests",
    "rocrtstFunc.Memory_Alignment_Test",
    "rocrtstFunc.Deallocation_Notifier_Test",
    "rocrtstFunc.AgentPropertiesTests",
    "rocrtstFunc.VirtMemory_Basic_Test",
    "rocrtstFunc.VirtMemory_Access_Test",
    "rocrtstNeg.Memory_Negative_Tests",
    "rocrtstNeg.Queue_Validation_InvalidDimension",
    "rocrtstNeg.Queue_Validation_InvalidGroupMemory",
    "rocrtstNeg.Queue_Validation_InvalidKernelObject",
    "rocrtstStress.Memory_Concurrent_Pool_Info_Test",
];

/// With `all` in it the tests of [`MORE`] run too.
const LEVELS: &str = "VIRTIO_KFD_TEST_LEVELS";

#[test]
fn rocrs_own_tests_pass_in_a_guest() {
    let artifacts = need!(Artifacts::for_guest(&["libkfd_preload.so"], &[]));
    let (tests, runtime) = (need!(artifacts.packages(TESTS)), need!(artifacts.packages(RUNTIME)));
    let directory = tempfile::tempdir().unwrap();
    let rocrtst = Rocrtst::new(&tests, &runtime, directory.path()).unwrap();
    let mut builder = Vm::builder(&artifacts).unwrap();
    rocrtst.install(GPU, builder.overlay()).unwrap();
    let launcher = package_path("../guest-thunk/kfd-preload/kfd-run");
    builder.overlay().file(&format!("{PLACE}/kfd-run"), &launcher).unwrap();
    add_library(&artifacts, builder.overlay()).unwrap();
    let daemon = Daemon::start(&artifacts, &format!("model:{GPU}"), &[]).unwrap();
    let guest = builder.memory_mib(MEMORY_MIB).limit(10 * LIMIT).boot_on(&daemon).unwrap();
    open_to_all(&guest).unwrap();
    let all = std::env::var(LEVELS).is_ok_and(|levels| levels == "all");
    for test in USUAL.iter().chain(if all { MORE } else { &[] }) {
        let begin = Instant::now();
        let launcher = format!("sh /{PLACE}/kfd-run");
        let output = run(&guest, &rocrtst::call(&launcher, test), &[], LIMIT).unwrap();
        let text = output.text();
        let passed = text.contains(&format!("[       OK ] {test}")) && text.contains("[  PASSED  ] 1 test.");
        let report = || format!("{output}\n{}\n{}", daemon.report(), guest.vm().report());
        assert!(output.success() && passed, "{test}: {}", report());
        // A process of a test that ends without a word of its checks has failed them; rocrtst says so on its standard output.
        assert!(!text.contains("Failure"), "{test}: {}", report());
        println!("{test}: passes, {:?}", begin.elapsed());
    }
    assert_eq!(kernel_complaints(&guest).unwrap(), "", "the guest's kernel had nothing to complain of");
}
