//! The packet processors of the software GPU: what runs the rings of AQL, PM4 and SDMA queues.
//!
//! Nothing here knows of ioctls or of processes. A processor sees the GPU's memory through [`Memory`], tells
//! the rest of the model what happened through [`World`], and hands kernels to a [`Dispatcher`]. It is a state
//! machine: [`Processor::step`] does one bounded piece of work and never blocks, so that whoever drives it
//! decides how to wait ([`runner`] does, with one thread for each queue that has work).
//!
//! Everything in a ring comes from a program that may be wrong or hostile. Each size, index and address is
//! checked, and what makes no sense ends in a [`Failure`]: the queue stops, and nothing else.
//!
//! Packet layouts are those of the kernel's `soc15d.h`, `vega10_sdma_pkt_open.h` and `navi10_sdma_pkt_open.h`, of
//! ROCr's `sdma_registers.h` and `amd_gpu_pm4.h`, and of `hsa.h`, `hsa_ext_amd.h`, `amd_hsa_queue.h` and
//! `amd_hsa_signal.h`.

pub mod aql;
pub mod atomic;
pub mod compute;
pub mod dispatch;
pub mod doorbell;
pub mod failure;
pub mod memory;
pub mod pm4;
pub mod process;
mod ring;
pub mod runner;
pub mod sdma;
pub mod signal;
pub mod slots;
mod threads;
mod transfer;
pub mod view;
pub mod windows;

use std::sync::atomic::{AtomicBool, Ordering};

pub use dispatch::{Dispatch, Dispatched, Dispatcher, EmptyKernels};
pub use failure::{DispatchFailure, Failure};
pub use memory::{Access, Memory};

use crate::space::Fault;

/// An interrupt that reaches the driver, with what it carries to find the event with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// End of pipe of a compute queue: 32 bits of context id (`SOC15_INTSRC_CP_END_OF_PIPE`).
    EndOfPipe(u32),
    /// SDMA trap: 28 bits of context id (`SOC15_INTSRC_SDMA_TRAP`).
    SdmaTrap(u32),
    /// Message of a wave: 24 bits (`SOC15_INTSRC_SQ_INTERRUPT_MSG`).
    Wave(u32),
}

impl Interrupt {
    /// The context id, and how many of its bits count (`kfd_signal_event_interrupt`).
    pub const fn context_id(self) -> (u32, u32) {
        match self {
            Self::EndOfPipe(id) => (id, 32),
            Self::SdmaTrap(id) => (id & 0x0fff_ffff, 28),
            Self::Wave(id) => (id & 0x00ff_ffff, 24),
        }
    }
}

/// What a processor tells the rest of the model.
pub trait World: Send + Sync {
    /// Raises an interrupt.
    fn interrupt(&self, interrupt: Interrupt);

    /// The GPU's clock in ticks, the one that GET_CLOCK_COUNTERS reports ([`crate::clock::gpu_counter`]).
    fn timestamp(&self) -> u64;

    /// An access failed. The queue stops right after; its [`Failure`] follows through [`World::queue_failed`].
    fn memory_fault(&self, fault: &Fault);

    /// A queue stopped for good. A runtime that reads `queue_inactive_signal` was told already.
    fn queue_failed(&self, failure: &Failure);
}

/// What a step works with.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The GPU's memory.
    pub memory: &'a dyn Memory,
    /// The rest of the model.
    pub world: &'a dyn World,
    /// What runs kernels.
    pub dispatcher: &'a dyn Dispatcher,
    /// Set when the step shall end soon: the queue is paused or destroyed.
    pub stop: &'a AtomicBool,
    /// The same for all queues that the process has on the GPU.
    pub evicted: &'a AtomicBool,
}

impl Context<'_> {
    /// Long work must end soon and be taken up again by a later step, if there is one.
    pub fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.evicted.load(Ordering::Relaxed)
    }
}

/// What a step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A packet or a piece of one was done; there may be more.
    Progressed,
    /// Nothing to do before the doorbell rings.
    Idle,
    /// The packet in front waits until the memory at `va` changes.
    Waiting {
        /// GPU address of what it looks at.
        va: u64,
    },
    /// The queue has stopped; it stays so.
    Failed(Failure),
}

/// A queue's processor.
pub trait Processor: Send {
    /// Does one bounded piece of work. `doorbell` is what the doorbell holds ([`DOORBELL_UNTOUCHED`] before the
    /// first ring).
    fn step(&mut self, context: &Context<'_>, doorbell: u64) -> Step;

    /// The queue is paused: makes known what was done, as far as that is held back.
    fn quiesce(&mut self, _context: &Context<'_>) {}

    /// Gives the queue another ring (UPDATE_QUEUE); indices go on from where they are.
    fn set_ring(&mut self, address: u64, size: u32);
}

/// A doorbell that was never rung.
pub const DOORBELL_UNTOUCHED: u64 = u64::MAX;

/// Where a queue's ring and pointers are, as CREATE_QUEUE has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueAddresses {
    /// GPU address of the ring.
    pub ring: u64,
    /// Its size in bytes.
    pub ring_size: u32,
    /// GPU address of the read pointer, which the processor writes.
    pub read_pointer: u64,
    /// GPU address of the write pointer.
    pub write_pointer: u64,
}

/// Ends a step: tells the world about a failure once, and keeps it.
fn settle(
    failed: &mut Option<Failure>,
    context: &Context<'_>,
    outcome: core::result::Result<Step, Failure>,
) -> Step {
    match outcome {
        Ok(step) => step,
        Err(failure) => {
            if let Some(fault) = failure.fault() {
                context.world.memory_fault(fault);
            }
            context.world.queue_failed(&failure);
            Step::Failed(failed.insert(failure).clone())
        }
    }
}

#[cfg(test)]
mod fake;
