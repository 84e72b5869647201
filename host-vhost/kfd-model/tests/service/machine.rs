//! Memory that several processes of one machine use.

use kfd_abi::memory::AllocFlags;
use kfd_model::profile::Profile;
use kfd_model::{Model, ModelError};
use nix::errno::Errno;

use crate::caller::{Caller, PAGE, machine};

const VA: u64 = 0x7000_0000_0000;
const VRAM: AllocFlags = AllocFlags::VRAM.union(AllocFlags::WRITABLE);

fn caller(path: &std::path::Path) -> Caller {
    let model = Model::sharing(Profile::load("gfx906").unwrap(), &machine(), path).unwrap();
    let caller = Caller::on(model);
    caller.acquire(&caller.gpus[0], &caller.gpus[0].descriptor).unwrap();
    caller
}

#[test]
fn what_one_process_takes_another_has_not() {
    // amdgpu_amdkfd_reserve_mem_limit counts for the device, amdgpu_amdkfd_get_available_memory says so.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("machine");
    let (one, two) = (caller(&path), caller(&path));
    let gpu = one.gpu();
    let all = one.available();
    assert_eq!(two.available(), all);
    let buffer = one.allocate(gpu, VA, 1 << 30, VRAM).unwrap();
    assert_eq!((one.available(), two.available()), (all - (1 << 30), all - (1 << 30)));
    assert_eq!(two.allocate(gpu, VA, all, VRAM).map(|_| ()), Err(Errno::ENOMEM));
    let rest = two.allocate(gpu, VA, all - (1 << 30), VRAM).unwrap();
    assert_eq!(one.allocate(gpu, VA, 4 << 20, VRAM).map(|_| ()), Err(Errno::ENOMEM));
    one.free(buffer.handle).unwrap();
    two.free(rest.handle).unwrap();
    assert_eq!((one.available(), two.available()), (all, all));
    // A process that ends with memory in use.
    two.allocate(gpu, VA, 1 << 30, VRAM).unwrap();
    two.allocate(gpu, VA, 4 << 20, AllocFlags::GTT).unwrap();
    assert_eq!(one.available(), all - (1 << 30));
    drop(two);
    assert_eq!(one.available(), all);
    // Nothing is left for later ones, over many.
    for _ in 0..20 {
        let other = caller(&path);
        for _ in 0..10 {
            other.allocate(gpu, VA, 3 * PAGE, VRAM).unwrap();
        }
        assert_eq!(one.available(), all - (20 << 20), "each takes 2 MiB at least");
    }
    assert_eq!(one.available(), all);
}

#[test]
fn a_process_without_a_machine_has_one_of_its_own() {
    let (one, two) = (Caller::new("gfx906"), Caller::new("gfx906"));
    let all = one.available();
    one.allocate(one.gpu(), VA, all, VRAM).unwrap();
    assert_eq!(two.available(), all);
}

#[test]
fn the_machine_of_other_gpus_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("machine");
    let _one = caller(&path);
    let other = Model::sharing(Profile::load("gfx90a").unwrap(), &machine(), &path).unwrap_err();
    assert!(matches!(other, ModelError::Machine { .. }));
    assert!(other.to_string().starts_with("VIRTIO_KFD_MODEL_MACHINE: cannot use "), "{other}");
}

#[test]
fn memory_that_is_shared_counts_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("machine");
    let (one, two) = (caller(&path), caller(&path));
    let gpu = one.gpu();
    let all = one.available();
    let buffer = one.allocate(gpu, VA, 16 << 20, VRAM).unwrap();
    let handle = two.import(gpu, VA, one.export(buffer.handle).unwrap()).unwrap();
    assert_eq!(two.available(), all - (16 << 20));
    one.free(buffer.handle).unwrap();
    assert_eq!(two.available(), all - (16 << 20), "still there");
    two.free(handle).unwrap();
    assert_eq!(one.available(), all);
}
