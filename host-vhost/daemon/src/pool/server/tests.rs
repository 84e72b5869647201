use vm_memory::{Bytes, GuestAddress};
use zerocopy::FromBytes;

use super::*;
use crate::pool::Progress;
use crate::pool::tests::Workers;

const NAME: &str = "8000000000000abc";

struct Kernel {
    device: MemoryDevice,
    workers: Arc<Workers>,
    ram: Ram,
}

impl Kernel {
    fn new(granules: u64) -> Self {
        let pool = Arc::new(Pool::new(granules.saturating_mul(GRANULE)).unwrap());
        let workers = Arc::new(Workers::new(Progress::Over));
        let device = MemoryDevice::new(pool, workers.clone()).unwrap();
        Kernel { device, workers, ram: Ram::from_ranges(&[(GuestAddress(0), 1 << 16)]).unwrap() }
    }

    fn raw(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        self.ram.write_slice(bytes, GuestAddress(0)).unwrap();
        self.device.request(&mut Input::first(&self.ram, bytes.len().try_into().unwrap()))
    }

    /// Errno or 0, and the body.
    fn ask(&self, opcode: u32, nodeid: u64, body: &[&[u8]]) -> (i32, Vec<u8>) {
        let header = fuse::InHeader { opcode, unique: 77, nodeid, uid: 5, gid: 6, ..Default::default() };
        let bytes = [header.as_bytes(), &body.concat()].concat();
        let answer = self.raw(&bytes).unwrap();
        let (out, body) = fuse::OutHeader::read_from_prefix(&answer).unwrap();
        assert_eq!((out.len as usize, out.unique), (answer.len(), 77));
        (out.error.wrapping_neg(), body.to_vec())
    }

    fn create(&self, name: &str) -> Result<u64, i32> {
        let created = self.ask(35, ROOT, &[fuse::CreateIn::default().as_bytes(), name.as_bytes(), &[0]]);
        match created {
            (0, body) => Ok(fuse::CreateOut::read_from_bytes(&body).unwrap().nodeid),
            (errno, _) => Err(errno),
        }
    }

    fn resize(&self, node: u64, size: u64) -> i32 {
        let request = fuse::SetAttrIn { valid: fuse::SET_SIZE, size, ..Default::default() };
        self.ask(4, node, &[request.as_bytes(), &[0; 64]]).0
    }

    fn place(&self, node: u64, foffset: u64, moffset: u64) -> i32 {
        let request = fuse::SetupMappingIn { foffset, len: GRANULE, flags: 3, moffset, ..Default::default() };
        self.ask(48, node, &[request.as_bytes()]).0
    }
}

#[test]
fn a_file_from_its_making_to_its_end() {
    let kernel = Kernel::new(4);
    let node = kernel.create(NAME).unwrap();
    assert_eq!(kernel.create(NAME), Err(Errno::EEXIST as i32));
    assert_eq!(kernel.ask(1, ROOT, &[NAME.as_bytes(), &[0]]).0, Errno::ENOENT as i32, "not opened again");
    assert_eq!(kernel.resize(node, GRANULE + 1), 0);
    let (_, body) = kernel.ask(3, node, &[&[0; 16]]);
    let attr = fuse::AttrOut::read_from_bytes(&body).unwrap().attr;
    assert_eq!((attr.size, attr.mode, attr.nlink), (GRANULE + 1, 0o100_600, 0));
    assert_eq!((attr.uid, attr.gid), (5, 6));
    assert_eq!((kernel.place(node, 0, GRANULE), kernel.place(node, GRANULE, 3 * GRANULE)), (0, 0));
    let claimed = kernel.device.pool.claim(ShareToken(0x8000_0000_0000_0abc));
    assert_eq!(claimed, Some(vec![GRANULE, 3 * GRANULE]));
    let places = [GRANULE, 3 * GRANULE].map(|moffset| fuse::RemoveMappingOne { moffset, len: GRANULE });
    let body = [&2u32.to_le_bytes()[..], places.as_bytes()].concat();
    assert_eq!(kernel.ask(49, node, &[&body]).0, 0);
    let forget = fuse::InHeader { opcode: 2, nodeid: node, ..Default::default() };
    let bytes = [forget.as_bytes(), &1u64.to_le_bytes()].concat();
    assert_eq!(kernel.raw(&bytes), None, "no answer");
    assert_eq!(kernel.device.pool.space(), (4 * GRANULE, 4 * GRANULE));
    assert_eq!(kernel.ask(3, node, &[&[0; 16]]).0, Errno::ENOENT as i32);
}

#[test]
fn a_process_whose_worker_hangs_does_not_hold_up_the_others() {
    let kernel = Kernel::new(4);
    let node = kernel.create(NAME).unwrap();
    assert_eq!(kernel.resize(node, GRANULE), 0);
    assert_eq!(kernel.place(node, 0, 0), 0);
    kernel.device.pool.claim(ShareToken(0x8000_0000_0000_0abc)).unwrap();
    kernel.workers.set(Progress::Pending);
    let place = fuse::RemoveMappingOne { moffset: 0, len: GRANULE };
    assert_eq!(kernel.ask(49, node, &[&1u32.to_le_bytes(), place.as_bytes()]).0, 0);
    let forget = fuse::InHeader { opcode: 2, nodeid: node, ..Default::default() };
    kernel.raw(&[forget.as_bytes(), &1u64.to_le_bytes()].concat());
    // All of that came back, with the worker as it is. Now another process, and a place that Linux has free.
    let other = kernel.create("8000000000000abd").unwrap();
    assert_eq!(kernel.resize(other, GRANULE), 0);
    assert_eq!(kernel.place(other, 0, 0), Errno::EAGAIN as i32, "not yet");
    assert_eq!(kernel.place(other, 0, GRANULE), 0);
    // The thread sees it by itself when the worker is through.
    assert_eq!(kernel.device.pool.space(), (4 * GRANULE, 2 * GRANULE));
    kernel.workers.set(Progress::Over);
    while kernel.device.pool.space().1 != 3 * GRANULE {
        std::thread::yield_now();
    }
}

#[test]
fn names_that_are_no_tokens_are_refused() {
    let kernel = Kernel::new(4);
    for name in [
        "",
        "8",
        "0000000000000abc",
        "8000000000000ABC",
        "+000000000000abc",
        "8000000000000abcd",
        "../../../../../x",
    ] {
        assert_eq!(kernel.create(name), Err(Errno::EINVAL as i32), "{name}");
    }
    // No name at all, and a node that is no directory.
    assert_eq!(kernel.ask(35, ROOT, &[fuse::CreateIn::default().as_bytes()]).0, Errno::EINVAL as i32);
    let node = kernel.create(NAME).unwrap();
    let create = fuse::CreateIn::default();
    let body = [create.as_bytes(), NAME.as_bytes(), &[0]];
    assert_eq!(kernel.ask(35, node, &body).0, Errno::ENOTDIR as i32);
}

#[test]
fn what_the_kernel_may_not_do() {
    let kernel = Kernel::new(4);
    let node = kernel.create(NAME).unwrap();
    assert_eq!(kernel.resize(node, 5 * GRANULE), Errno::ENOSPC as i32);
    assert_eq!(kernel.resize(ROOT, GRANULE), Errno::EPERM as i32);
    let mode = fuse::SetAttrIn { valid: 1, ..Default::default() };
    assert_eq!(kernel.ask(4, node, &[mode.as_bytes()]).0, Errno::EPERM as i32);
    let short = fuse::SetupMappingIn { len: 4096, ..Default::default() };
    assert_eq!(kernel.ask(48, node, &[short.as_bytes()]).0, Errno::EINVAL as i32);
    // Reading, listing, links, names from the future: what is not there.
    for opcode in [5, 6, 8, 9, 10, 12, 13, 14, 15, 16, 22, 27, 28, 43, 51, 4096, u32::MAX] {
        assert_eq!(kernel.ask(opcode, node, &[&[0xff; 64]]).0, Errno::ENOSYS as i32, "{opcode}");
    }
    // Too short for a header: nothing can be said.
    assert_eq!(kernel.raw(&[0; 39]), None);
    // More places than follow.
    assert_eq!(kernel.ask(49, node, &[&u32::MAX.to_le_bytes()]).0, Errno::EINVAL as i32);
}

#[test]
fn a_kernel_without_dax_and_a_vmm_without_a_window_are_told() {
    let kernel = Kernel::new(4);
    let init = |minor, flags| {
        let request = fuse::InitIn { major: 7, minor, max_readahead: 0, flags };
        kernel.ask(26, 0, &[request.as_bytes(), &[0; 48]]).0
    };
    assert_eq!(init(30, fuse::FLAG_MAP_ALIGNMENT), Errno::EPROTO as i32);
    assert_eq!(init(38, 0), Errno::EPROTO as i32);
    assert_eq!(init(38, fuse::FLAG_MAP_ALIGNMENT), Errno::EIO as i32, "it gave no channel");
}
