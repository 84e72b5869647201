//! What the operator allows is like the end of the memory: allocations are refused, what is held goes on, and what is freed
//! can be had again. Through loop-back, against the real daemon and worker on the KFD model. Expected statuses: AMD's
//! library (rocm-6.2.4 memory.c, fmm.c).
#![cfg(feature = "loopback")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "calls of the C API")]

mod support;

use guest_thunk::client::LOOPBACK_VARIABLE;
use guest_thunk::export::pointer::Out;
use guest_thunk::export::{memory, open, topology};
use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus as Status;
use hsakmt_abi::topology::HsaSystemProperties;

use self::support::Daemon;

const MIB: u64 = 1 << 20;

fn out<T>(value: &mut T) -> Out<T> {
    Out::from(std::ptr::from_mut(value))
}

fn pointer(address: u64) -> *mut libc::c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

fn allocate(node: u32, size: u64, flags: HsaMemFlags) -> Result<u64, Status> {
    let mut address = 0;
    // SAFETY: the pointer is to a value of this function.
    match unsafe { memory::hsaKmtAllocMemory(node, size, flags, out(&mut address)) } {
        Status::SUCCESS => Ok(address),
        refused => Err(refused),
    }
}

fn free(address: u64) {
    // SAFETY: the address is of an allocation that nobody uses any more.
    let freed = unsafe { memory::hsaKmtFreeMemory(pointer(address), 0) };
    assert_eq!(freed, Status::SUCCESS);
}

fn map(address: u64) -> Status {
    // SAFETY: the address is of an allocation.
    unsafe { memory::hsaKmtMapMemoryToGPU(pointer(address), MIB, Out::from(std::ptr::null_mut())) }
}

/// One test, since the library's state is the process's.
#[test]
fn limits_are_no_memory_and_not_the_end() {
    let limits = ["--vram-limit", "16M", "--guest-memory-limit", "24M"];
    let Some(daemon) = Daemon::start_with(&limits) else { return };
    // SAFETY: this process has one thread that reads or writes variables.
    unsafe { std::env::set_var(LOOPBACK_VARIABLE, daemon.socket()) };
    let mut system = HsaSystemProperties::default();
    // SAFETY: no pointer.
    assert_eq!(unsafe { open::hsaKmtOpenKFD() }, Status::SUCCESS);
    // SAFETY: the pointer is to a value of this function.
    let acquired = unsafe { topology::hsaKmtAcquireSystemProperties(out(&mut system)) };
    assert_eq!(acquired, Status::SUCCESS);
    let gpu = system.num_nodes - 1;
    let vram = HsaMemFlags(0).with(HsaMemFlags::NON_PAGED, 1).with(HsaMemFlags::COARSE_GRAIN, 1);
    for flags in [vram, vram.with(HsaMemFlags::HOST_ACCESS, 1), vram.with(HsaMemFlags::NO_ADDRESS, 1)] {
        let mut held = Vec::new();
        let refused = loop {
            match allocate(gpu, MIB, flags) {
                Ok(address) => held.push(address),
                Err(status) => break status,
            }
            assert!(held.len() <= 16, "the VM has 16 MiB of VRAM");
        };
        assert_eq!(refused, Status::NO_MEMORY);
        assert!(held.len() >= 12, "{} of 16 MiB could be had", held.len());
        if !flags.is_set(HsaMemFlags::NO_ADDRESS) {
            assert!(held.iter().all(|address| map(*address) == Status::SUCCESS));
            for address in &held {
                // SAFETY: the address is of an allocation.
                let unmapped = unsafe { memory::hsaKmtUnmapMemoryToGPU(pointer(*address)) };
                assert_eq!(unmapped, Status::SUCCESS);
            }
        }
        free(held.pop().unwrap());
        held.push(allocate(gpu, MIB, flags).unwrap());
        held.into_iter().for_each(free);
    }
    // Of guest memory the host learns when a GPU is to see it.
    let host = HsaMemFlags(0).with(HsaMemFlags::HOST_ACCESS, 1);
    let all: Vec<u64> = (0..32).map(|_| allocate(0, MIB, host).unwrap()).collect();
    let mapped = all.iter().take_while(|address| map(**address) == Status::SUCCESS).count();
    assert!((16..32).contains(&mapped), "{mapped} MiB of 24 could be mapped");
    assert_eq!(map(all[mapped]), Status::NO_MEMORY);
    // SAFETY: the address is of an allocation.
    assert_eq!(unsafe { memory::hsaKmtUnmapMemoryToGPU(pointer(all[0])) }, Status::SUCCESS);
    free(all[0]);
    assert_eq!(map(all[mapped]), Status::SUCCESS);
    // SAFETY: no pointer.
    assert_eq!(unsafe { open::hsaKmtCloseKFD() }, Status::SUCCESS);
}
