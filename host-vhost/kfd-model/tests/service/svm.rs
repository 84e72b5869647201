//! Attributes of shared virtual memory: `kfd_svm.c`, `kfd_ioctl_svm`.

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::kfd::request;
use kfd_abi::memory::AllocFlags;
use kfd_abi::svm::{
    KFD_IOCTL_SVM_ATTR_ACCESS as ACCESS, KFD_IOCTL_SVM_ATTR_ACCESS_IN_PLACE as IN_PLACE,
    KFD_IOCTL_SVM_ATTR_CLR_FLAGS as CLEAR, KFD_IOCTL_SVM_ATTR_GRANULARITY as GRANULARITY,
    KFD_IOCTL_SVM_ATTR_NO_ACCESS as NO_ACCESS, KFD_IOCTL_SVM_ATTR_PREFERRED_LOC as PREFERRED,
    KFD_IOCTL_SVM_ATTR_PREFETCH_LOC as PREFETCH, KFD_IOCTL_SVM_ATTR_SET_FLAGS as SET,
    KFD_IOCTL_SVM_LOCATION_UNDEFINED as UNDEFINED, KFD_IOCTL_SVM_OP_GET_ATTR, KFD_IOCTL_SVM_OP_SET_ATTR,
    SvmArgs, SvmAttribute,
};
use kfd_model::Model;
use kfd_model::debug::Mailbox;
use kfd_model::profile::Profile;
use kfd_model::space::FaultReason;
use kfd_seam::{KfdService, UserPtr};
use nix::errno::Errno;
use zerocopy::IntoBytes;

use crate::caller::{Caller, PAGE, machine};

const DEFAULT_FLAGS: u32 = 0x3;

/// A process on a kernel with SVM, and its mailbox.
fn caller(directory: &tempfile::TempDir) -> (Caller, Mailbox) {
    let mut profile = Profile::load("gfx906x2").unwrap();
    profile.kernel.svm = true;
    let mut model = Model::on(profile, &machine()).unwrap();
    model.open_mailbox(directory.path()).unwrap();
    let caller = Caller::on(model);
    for gpu in &caller.gpus {
        caller.acquire(gpu, &gpu.descriptor).unwrap();
    }
    let mailbox = Mailbox::find(directory.path()).unwrap().pop().unwrap();
    (caller, mailbox)
}

fn call(caller: &Caller, op: u32, start: u64, size: u64, attributes: &mut [(u32, u32)]) -> Result<(), Errno> {
    let nattr = u32::try_from(attributes.len()).unwrap();
    let mut bytes = SvmArgs { start_addr: start, size, op, nattr }.as_bytes().to_vec();
    for (kind, value) in attributes.iter() {
        bytes.extend(SvmAttribute { kind: *kind, value: *value }.as_bytes());
    }
    // The size of the attributes is added to the request's (linux/kfd_ioctl.h).
    let request = request::SVM + ((8 * nattr) << 16);
    let argument = UserPtr(bytes.as_mut_ptr() as u64);
    let result = caller.model.ioctl(caller.kfd, request, argument).map(|_| ());
    let word = |at: usize| u32::from_ne_bytes(std::hint::black_box(&bytes)[at..at + 4].try_into().unwrap());
    for (number, attribute) in attributes.iter_mut().enumerate() {
        *attribute = (word(24 + 8 * number), word(28 + 8 * number));
    }
    result
}

fn set(caller: &Caller, start: u64, size: u64, attributes: &[(u32, u32)]) -> Result<(), Errno> {
    call(caller, KFD_IOCTL_SVM_OP_SET_ATTR, start, size, &mut attributes.to_vec())
}

fn get<const N: usize>(
    caller: &Caller,
    start: u64,
    size: u64,
    mut attributes: [(u32, u32); N],
) -> Result<[(u32, u32); N], Errno> {
    call(caller, KFD_IOCTL_SVM_OP_GET_ATTR, start, size, &mut attributes).map(|()| attributes)
}

/// Memory of `pages` pages; its address.
fn memory(pages: usize) -> (Vec<u8>, u64) {
    let mut memory = vec![7u8; (pages + 1) * PAGE as usize];
    let address = (memory.as_mut_ptr() as u64).next_multiple_of(PAGE);
    (memory, address)
}

#[test]
fn attributes_are_kept_for_each_page() {
    let directory = tempfile::tempdir().unwrap();
    let (caller, _mailbox) = caller(&directory);
    let (one, two) = (caller.gpus[0].id, caller.gpus[1].id);
    let (_memory, start) = memory(8);
    let asked = [(PREFERRED, 0), (PREFETCH, 0), (ACCESS, one), (SET, 0), (CLEAR, 0), (GRANULARITY, 0)];
    // svm_range_set_default_attributes.
    assert_eq!(
        get(&caller, start, 8 * PAGE, asked),
        Ok([
            (PREFERRED, UNDEFINED),
            (PREFETCH, UNDEFINED),
            (NO_ACCESS, one),
            (SET, DEFAULT_FLAGS),
            (CLEAR, !DEFAULT_FLAGS),
            (GRANULARITY, 9)
        ])
    );
    set(&caller, start, 8 * PAGE, &[(PREFERRED, one), (ACCESS, one), (IN_PLACE, two), (SET, 0x10)]).unwrap();
    // The middle differs.
    set(&caller, start + 2 * PAGE, PAGE, &[(PREFERRED, two), (CLEAR, 0x2), (GRANULARITY, 99), (PREFETCH, 0)])
        .unwrap();
    let at =
        |page: u64, pages: u64, what| get(&caller, start + page * PAGE, pages * PAGE, [what]).unwrap()[0];
    assert_eq!((at(0, 2, (PREFERRED, 0)), at(2, 1, (PREFERRED, 0))), ((PREFERRED, one), (PREFERRED, two)));
    assert_eq!(at(0, 8, (PREFERRED, 0)), (PREFERRED, UNDEFINED));
    assert_eq!((at(3, 5, (SET, 0)), at(2, 1, (SET, 0))), ((SET, 0x13), (SET, 0x11)));
    assert_eq!((at(0, 8, (SET, 0)), at(0, 8, (CLEAR, 0))), ((SET, 0x11), (CLEAR, !0x13)));
    assert_eq!(
        (at(0, 8, (GRANULARITY, 0)), at(2, 1, (GRANULARITY, 0))),
        ((GRANULARITY, 9), (GRANULARITY, 0x3f))
    );
    assert_eq!(at(2, 1, (PREFETCH, 0)), (PREFETCH, 0));
    assert_eq!((at(0, 8, (ACCESS, one)), at(0, 8, (ACCESS, two))), ((ACCESS, one), (IN_PLACE, two)));
    set(&caller, start, PAGE, &[(NO_ACCESS, one)]).unwrap();
    assert_eq!((at(0, 2, (ACCESS, one)), at(1, 1, (ACCESS, one))), ((NO_ACCESS, one), (ACCESS, one)));
}

#[test]
fn a_gpu_with_access_sees_the_processs_memory() {
    let directory = tempfile::tempdir().unwrap();
    let (caller, mailbox) = caller(&directory);
    let (one, two) = (caller.gpus[0].id, caller.gpus[1].id);
    // The mailbox answers from the first buffer on.
    caller.allocate(one, 0x1000_0000, PAGE, AllocFlags::GTT).unwrap();
    let (_memory, start) = memory(4);
    let read = |gpu, page: u64| caller.seen(gpu, start + page * PAGE, 1).map_err(|fault| fault.reason);
    assert_eq!(read(one, 0), Err(FaultReason::NotPresent));
    set(&caller, start, 4 * PAGE, &[(ACCESS, one)]).unwrap();
    assert_eq!(
        (read(one, 0), read(one, 3), read(two, 0)),
        (Ok(vec![7]), Ok(vec![7]), Err(FaultReason::NotPresent))
    );
    let flags = |page: u64| mailbox.entry(one, start + page * PAGE).unwrap().flags;
    let both = VmPageFlags::PAGE_READABLE | VmPageFlags::PAGE_WRITEABLE;
    assert_eq!(flags(0), both | VmPageFlags::MTYPE_UC, "coherent by default");
    set(&caller, start + PAGE, PAGE, &[(SET, 0x18), (CLEAR, 0x2)]).unwrap();
    let only = VmPageFlags::PAGE_READABLE | VmPageFlags::PAGE_EXECUTABLE | VmPageFlags::MTYPE_NC;
    assert_eq!((flags(0), flags(1)), (both | VmPageFlags::MTYPE_UC, only), "GPU_RO, GPU_EXEC");
    let write =
        |page: u64| caller.model.write_gpu(one, start + page * PAGE, &[9]).map_err(|fault| fault.reason);
    assert_eq!((write(1), write(2)), (Err(FaultReason::ReadOnly), Ok(())));
    assert_eq!(read(one, 2), Ok(vec![9]));
    set(&caller, start + 3 * PAGE, PAGE, &[(NO_ACCESS, one)]).unwrap();
    assert_eq!((read(one, 2), read(one, 3)), (Ok(vec![9]), Err(FaultReason::NotPresent)));
}

#[test]
fn arguments_are_checked() {
    let directory = tempfile::tempdir().unwrap();
    let (caller, _mailbox) = caller(&directory);
    let gpu = caller.gpu();
    let (_memory, start) = memory(4);
    let good = [(ACCESS, gpu)];
    for (why, start, size) in [
        ("nowhere", 0, PAGE),
        ("nothing", start, 0),
        ("no page", start + 8, PAGE),
        ("half a page", start, PAGE / 2),
    ] {
        assert_eq!(set(&caller, start, size, &good), Err(Errno::EINVAL), "{why}");
        assert_eq!(get(&caller, start, size, good).map(|_| ()), Err(Errno::EINVAL), "{why}");
    }
    // svm_range_is_valid.
    assert_eq!(set(&caller, PAGE, PAGE, &good), Err(Errno::EFAULT));
    assert_eq!(get(&caller, PAGE, PAGE, good).map(|_| ()), Err(Errno::EFAULT));
    assert_eq!(set(&caller, start, !0xfff, &good), Err(Errno::EOVERFLOW));
    // svm_range_check_attr, svm_range_get_attr.
    for bad in [(ACCESS, 1), (IN_PLACE, 0), (NO_ACCESS, 1), (PREFERRED, 1), (PREFETCH, UNDEFINED), (8, 0)] {
        assert_eq!(set(&caller, start, PAGE, &[bad]), Err(Errno::EINVAL), "{bad:?}");
    }
    for bad in [(IN_PLACE, gpu), (NO_ACCESS, gpu), (ACCESS, 1), (8, 0)] {
        assert_eq!(get(&caller, start, PAGE, [bad]).map(|_| ()), Err(Errno::EINVAL), "{bad:?}");
    }
    assert_eq!(call(&caller, 2, start, PAGE, &mut [(ACCESS, gpu)]), Err(Errno::EINVAL), "no such operation");
    // kfd_ioctl_svm_validate: more attributes than the request has room for.
    let mut short = SvmArgs { start_addr: start, size: PAGE, op: 0, nattr: 1 };
    assert_eq!(caller.call(request::SVM, &mut short), Err(Errno::EINVAL));
    let mut endless = SvmArgs { nattr: u32::MAX, ..short };
    assert_eq!(caller.call(request::SVM, &mut endless), Err(Errno::EINVAL));
    assert_eq!(set(&caller, start, PAGE, &[]), Ok(()));
    // kfd_ioctl_alloc_memory_of_gpu, svm_range_check_vm: addresses are of one or the other.
    let allocate = |va, flags| caller.allocate_user(gpu, va, PAGE, flags, start).map(|_| ());
    assert_eq!(allocate(start, AllocFlags::VRAM), Err(Errno::EADDRINUSE));
    assert_eq!(allocate(0x1000_0000, AllocFlags::USERPTR), Err(Errno::EADDRINUSE));
    assert_eq!(allocate(0, AllocFlags::VRAM), Ok(()), "without an address");
    let (_other, other) = memory(1);
    let buffer = caller.allocate(gpu, other, PAGE, AllocFlags::VRAM).unwrap();
    assert_eq!(set(&caller, other, PAGE, &good), Ok(()), "not mapped");
    assert_eq!(caller.map(buffer.handle, &[gpu]).0, Ok(0));
    assert_eq!(set(&caller, other, PAGE, &good), Err(Errno::EADDRINUSE));
}
