//! The queues of a context.

use std::collections::BTreeMap;

use kfd_host::{ExceptionPage, KfdError};
use kfd_ipc::ledger::Account;
use nix::errno::Errno;
use virtio_kfd_protocol::{CreateQueueRequest, GpuId, QueueId};

use crate::budget::Budget;
use crate::buffer::Buffer;
use crate::context::Context;
use crate::exceptions::Exceptions;
use crate::failure::Failure;

/// A queue that there is.
#[derive(Debug)]
pub struct Queue {
    /// Its GPU.
    pub gpu_id: GpuId,
    /// Its word among the GPU's doorbells.
    pub doorbell: u64,
    /// Bytes of its control stack.
    pub control_stack_size: u32,
    /// Addresses in the memory that it works with: ring, pointers, end-of-pipe buffer, save area; 0 for those that it has
    /// not. The ring is the first, the save area the last.
    pub addresses: [u64; 5],
    /// Where the kernel notes its exceptions.
    pub exceptions: Option<ExceptionPage>,
}

impl Queue {
    /// A queue as it was asked for.
    pub fn new(request: &CreateQueueRequest, doorbell: u64, exceptions: Option<ExceptionPage>) -> Self {
        let CreateQueueRequest {
            ring_va, write_pointer_va, read_pointer_va, eop_va, context_save_va, ..
        } = request;
        let addresses = [ring_va, write_pointer_va, read_pointer_va, eop_va, context_save_va];
        Queue {
            gpu_id: request.gpu_id,
            doorbell,
            control_stack_size: request.control_stack_size,
            addresses: addresses.map(|va| va.0),
            exceptions,
        }
    }

    /// Whether it works with memory of a buffer.
    fn is_on(&self, buffer: &Buffer) -> bool {
        self.addresses.iter().any(|va| *va != 0 && buffer.covers(self.gpu_id, *va))
    }
}

/// The queues of a context, by KFD's id.
#[derive(Debug)]
pub struct Queues {
    live: BTreeMap<u32, Queue>,
    /// What of the limits is used up.
    pub budget: Budget,
    /// Of their exceptions.
    pub exceptions: Exceptions,
}

impl Queues {
    /// None yet; at most `limit`, and what the VM's account allows.
    pub fn new(limit: u64, vm: Option<Account>) -> Self {
        let budget = Budget::new("queues", limit).with(vm);
        Queues { live: BTreeMap::new(), budget, exceptions: Exceptions::default() }
    }

    /// A queue; the kernel's own answer where there is none.
    pub fn get(&self, id: QueueId) -> Option<&Queue> {
        self.live.get(&id.0)
    }

    /// A queue, to change.
    pub fn get_mut(&mut self, id: QueueId) -> Option<&mut Queue> {
        self.live.get_mut(&id.0)
    }

    /// All queues.
    pub fn live(&self) -> impl Iterator<Item = &Queue> {
        self.live.values()
    }

    /// The kernel has made a queue, for which the budget was taken.
    pub fn insert(&mut self, id: QueueId, queue: Queue) {
        if self.live.insert(id.0, queue).is_some() {
            // The kernel had ended that one after all.
            self.budget.give(1);
        }
    }

    /// Ends a queue. Where the kernel refuses that it stays as it is.
    pub fn destroy(&mut self, context: &Context, id: QueueId) -> Result<(), Failure> {
        let destroyed = context.kfd.destroy_queue(id.0);
        // Its page for exceptions goes now: the kernel passes them on under the lock that it destroys queues under.
        if is_gone(&destroyed)
            && let Some(queue) = self.live.remove(&id.0)
        {
            context.pump.change(|doorbells| doorbells.remove(queue.gpu_id.0, queue.doorbell));
            self.budget.give(1);
        }
        Ok(destroyed?)
    }

    /// Ends the queues that work with memory of a buffer, which is about to go.
    pub fn destroy_on(&mut self, context: &Context, buffer: &Buffer) {
        let on_it = self.live.iter().filter(|(_, queue)| queue.is_on(buffer));
        let ids: Vec<u32> = on_it.map(|(id, _)| *id).collect();
        for id in ids {
            if let Err(failure) = self.destroy(context, QueueId(id)) {
                // Whether the memory can go nevertheless the kernel says when it is unmapped.
                context.throttle.log(|held| {
                    tracing::warn!("queue {id}: {failure} ({held} messages before were held back)");
                });
            }
        }
    }
}

/// Whether there is no queue any more. Where its waves did not stop in time (ETIME) or the GPU hangs (EIO) the kernel says so and goes on
/// (`pqm_destroy_queue`); with EIO kernels before 2025 keep its number, but it runs nowhere (`destroy_queue_cpsch`), and the kernel finds nothing
/// where it had its page.
fn is_gone(destroyed: &Result<(), KfdError>) -> bool {
    match destroyed {
        Ok(()) => true,
        Err(error) => matches!(error.errno, Errno::ETIME | Errno::EIO),
    }
}

#[cfg(test)]
mod tests {
    use virtio_kfd_protocol::GuestVa;

    use super::*;
    use crate::buffer::Backing;

    /// `pqm_destroy_queue` (kfd_process_queue_manager.c) goes on after these two alone.
    #[test]
    fn a_queue_that_a_hung_gpu_could_not_stop_is_gone_all_the_same() {
        let failed = |errno| Err(KfdError::new("AMDKFD_IOC_DESTROY_QUEUE", "queue_id 1", errno));
        assert!(is_gone(&Ok(())) && is_gone(&failed(Errno::ETIME)) && is_gone(&failed(Errno::EIO)));
        for stays in [Errno::EINVAL, Errno::EBUSY, Errno::ENOMEM, Errno::EFAULT] {
            assert!(!is_gone(&failed(stays)), "{stays}");
        }
    }

    #[test]
    fn a_queue_is_on_the_buffers_at_its_addresses() {
        let request = CreateQueueRequest {
            ring_va: GuestVa(0x10000),
            write_pointer_va: GuestVa(0x20038),
            read_pointer_va: GuestVa(0x20080),
            gpu_id: GpuId(7),
            ..Default::default()
        };
        let queue = Queue::new(&request, 3, None);
        let buffer =
            |va, bytes| Buffer::new(None, GpuId(9), bytes, Backing::Gtt { mmap_offset: 0 }).at(va, bytes);
        assert!(queue.is_on(&buffer(0x10000, 0x1000)));
        assert!(queue.is_on(&buffer(0x20000, 0x1000)));
        assert!(!queue.is_on(&buffer(0x11000, 0x1000)) && !queue.is_on(&buffer(0xf000, 0x1000)));
        // No end-of-pipe buffer is not one at address 0.
        assert!(!queue.is_on(&buffer(0, 0x1000)));
        // Without an address of its own, but with a range on a GPU.
        let mut piece = buffer(0, 0);
        piece.ranges.insert((8, 0x10000), 0x1000);
        assert!(!queue.is_on(&piece), "another GPU's");
        piece.ranges.insert((7, 0x20000), 0x1000);
        assert!(queue.is_on(&piece));
    }
}
