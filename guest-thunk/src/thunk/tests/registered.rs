//! Registrations of the same memory by several threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use hsakmt_abi::memory::HsaMemFlags;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::ResourceId;

use super::kfd::Kfd;
use crate::thunk::memory::registered::{Piece, Registered};
use crate::thunk::refusal::Outcome;

const ADDRESS: u64 = 0x7000_0000_1000;
const SIZE: u64 = 8192;

/// Enough that an unmap outside the lock that counts is seen each time.
const ROUNDS: usize = 2000;

impl Kfd {
    /// What hsaKmtRegisterMemory does once the range lies in a blob.
    fn register(&self) -> Outcome<()> {
        let memory = &self.thunk.memory;
        if memory.register_again(ADDRESS, SIZE, &[])? {
            return Ok(());
        }
        let snapshot = self.thunk.snapshot().unwrap();
        let registered = Registered {
            address: ADDRESS,
            size: SIZE,
            pieces: vec![Piece { resource: ResourceId(9), offset: 0, size: SIZE }],
            gpu: super::GPUS[0],
            flags: AllocFlags::USERPTR,
            keep: Box::new(()),
        };
        memory.insert_registered(self.thunk.host(&snapshot), registered, &[], HsaMemFlags(0))
    }

    /// Whether every GPU of the list has the range mapped.
    fn reaches(&self, address: u64) -> bool {
        let state = self.state.lock().unwrap();
        state.buffers.values().any(|buffer| buffer.request.va.0 == address && buffer.mapped.len() == 2)
    }
}

/// `hsa_amd_memory_lock` of one pointer in several threads.
#[test]
fn threads_that_register_the_same_range_do_not_take_it_from_each_other() {
    let kfd = Kfd::new();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    kfd.register().unwrap_or_else(|refusal| panic!("round {round}: register: {refusal}"));
                    let snapshot = kfd.thunk.snapshot().unwrap();
                    let mapped = kfd.thunk.memory.map(kfd.thunk.host(&snapshot), ADDRESS, SIZE);
                    let address = mapped.unwrap_or_else(|refusal| panic!("round {round}: map: {refusal}"));
                    assert!(kfd.reaches(address), "round {round}: mapped, and no GPU reaches {address:#x}");
                    kfd.unmap(ADDRESS).unwrap();
                    kfd.thunk.memory.deregister(&kfd.thunk.client, ADDRESS).unwrap();
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 4 * ROUNDS);
    assert!(kfd.state.lock().unwrap().buffers.is_empty());
}
