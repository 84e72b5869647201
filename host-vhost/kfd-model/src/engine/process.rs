//! What ties a queue to the process that it belongs to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use kfd_abi::event::{HsaMemoryExceptionData, KFD_MEM_ERR_NO_RAS, MemoryExceptionFailure};
use kfd_abi::queue::ContextSaveAreaHeader;
use kfd_isa::Target;
use kfd_seam::{Result, UserMemory, UserPtr};

use super::aql::AqlQueue;
use super::compute::{Compute, Machine, Units};
use super::pm4::Pm4Queue;
use super::runner::Gpu;
use super::sdma::{Layout, SdmaQueue};
use super::view::View;
use super::{Dispatcher, EmptyKernels, Failure, Interrupt, Processor, QueueAddresses, World};
use crate::clock;
use crate::events::Events;
use crate::process::Device;
use crate::space::{Fault, FaultReason};

/// Failures that are written to standard error, as a driver writes them to its log.
const LOGGED_FAILURES: u32 = 16;

/// The three parts of a `gfx_target_version`: 90010 is gfx90a, that is 9, 0, 10.
pub fn gfx_version(gfx_target_version: u32) -> (u32, u32, u32) {
    (gfx_target_version / 10000, gfx_target_version / 100 % 100, gfx_target_version % 100)
}

/// What kind of ring a queue has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingKind {
    /// AQL packets.
    Aql,
    /// PM4 packets.
    Pm4,
    /// SDMA packets.
    Sdma,
}

/// The processor for a new queue on a GPU.
pub fn processor(device: &Device, kind: RingKind, addresses: QueueAddresses) -> Box<dyn Processor> {
    let xccs = device.gpu.shader.xccs;
    match kind {
        RingKind::Aql => Box::new(AqlQueue::new(addresses, xccs)),
        RingKind::Pm4 => Box::new(Pm4Queue::new(addresses, xccs)),
        RingKind::Sdma => {
            let (major, minor, stepping) = gfx_version(device.gpu.gfx_target_version);
            Box::new(SdmaQueue::new(addresses, Layout::for_gfx(major, minor, stepping)))
        }
    }
}

/// How a runtime hears of exceptions of its queue, if it enabled them.
#[derive(Clone, Debug)]
pub struct Exceptions {
    /// RUNTIME_ENABLE is in force.
    pub enabled: Arc<AtomicBool>,
    /// Address in the process of the queue's context save area, whose header says where to write what happened
    /// and which event to set.
    pub context_save_area: u64,
}

impl Exceptions {
    /// `send_exception_work_handler`
    fn send(&self, code: u32, events: &Events) -> Result<()> {
        let header: ContextSaveAreaHeader = UserMemory.read_struct(UserPtr(self.context_save_area))?;
        let payload = UserPtr(header.err_payload_addr);
        // KFD_EC_MASK
        let bit = 1u64.checked_shl(code.saturating_sub(1)).unwrap_or(0);
        let so_far: Result<u64> = UserMemory.read_struct(payload);
        let noted = so_far.and_then(|so_far| UserMemory.write_struct(payload, &(so_far | bit)));
        // The kernel sets the event whether there is a payload or not.
        events.set(header.err_event_id)?;
        noted
    }
}

/// The GPU for one queue of a process. Where the model does not have the GPU's instruction set, only kernels that do
/// nothing run ([`EmptyKernels`]).
pub fn gpu(
    device: &Arc<Device>,
    events: &Arc<Events>,
    exceptions: Option<Exceptions>,
    units: &Arc<Units>,
) -> Gpu {
    let world = Arc::new(QueueWorld { device: device.clone(), events: events.clone(), exceptions });
    let dispatcher: Arc<dyn Dispatcher> = match target(device.gpu.gfx_target_version) {
        Some(target) => {
            let machine = Machine {
                gpu_id: device.gpu_id,
                table: device.clone(),
                world: world.clone(),
                target,
                units: units.clone(),
            };
            Arc::new(Compute::new(machine, device.compute.clone()))
        }
        None => Arc::new(EmptyKernels::for_gfx(gfx_version(device.gpu.gfx_target_version).0)),
    };
    Gpu {
        memory: Arc::new(View::new(device.gpu_id, device.clone())),
        world,
        dispatcher,
        evicted: device.evicted.clone(),
    }
}

/// The instruction set of a GPU, if the model has it.
fn target(gfx_target_version: u32) -> Option<Target> {
    match gfx_version(gfx_target_version) {
        (9, 0, 0) => Some(Target::Gfx900),
        (9, 0, 6) => Some(Target::Gfx906),
        _ => None,
    }
}

/// The process that a queue's interrupts and faults go to.
#[derive(Debug)]
struct QueueWorld {
    device: Arc<Device>,
    events: Arc<Events>,
    exceptions: Option<Exceptions>,
}

/// Failures that this process wrote to standard error.
static LOGGED: AtomicU32 = AtomicU32::new(0);

impl World for QueueWorld {
    fn interrupt(&self, interrupt: Interrupt) {
        let (context_id, valid_bits) = interrupt.context_id();
        self.events.interrupt(context_id, valid_bits);
    }

    fn timestamp(&self) -> u64 {
        // A machine without CLOCK_MONOTONIC_RAW has no GET_CLOCK_COUNTERS that this could disagree with.
        clock::gpu_counter(self.device.gpu.clocks.counter_khz).unwrap_or(0)
    }

    fn memory_fault(&self, fault: &Fault) {
        // kfd_dqm_evict_pasid, which nothing takes back.
        self.device.evicted.store(true, Ordering::Relaxed);
        self.events.memory_fault(memory_exception(fault));
        self.device.smi.memory_fault();
    }

    fn queue_failed(&self, failure: &Failure) {
        if let Some(code) = failure.exception_code()
            && let Some(exceptions) = &self.exceptions
            && exceptions.enabled.load(Ordering::Relaxed)
        {
            // What the runtime gave may be wrong; the kernel says so in its log.
            let _ = exceptions.send(code, &self.events);
        }
        let below = |logged: u32| (logged < LOGGED_FAILURES).then(|| logged + 1);
        if LOGGED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, below).is_ok() {
            eprintln!("kfd-model: a queue of GPU {} stopped: {failure}", self.device.gpu_id);
        }
    }
}

/// What a memory event says of a fault (`svm_range_restore_pages` and `kfd_signal_vm_fault_event` name the page).
fn memory_exception(fault: &Fault) -> HsaMemoryExceptionData {
    let mut failure = MemoryExceptionFailure::default();
    match fault.reason {
        FaultReason::ReadOnly => failure.read_only = 1,
        FaultReason::NoExecute => failure.no_execute = 1,
        FaultReason::NotPresent | FaultReason::NotReadable | FaultReason::NoBacking => {
            failure.not_present = 1;
        }
    }
    HsaMemoryExceptionData {
        failure,
        va: fault.va & !0xfff,
        gpu_id: fault.gpu_id,
        error_type: KFD_MEM_ERR_NO_RAS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exception_is_added_to_the_payload_and_its_event_is_set() {
        let arena = Arc::new(crate::arena::Arena::new("test", 1 << 20).unwrap());
        let events = Events::default();
        let event = events.create(kfd_abi::event::KFD_IOC_EVENT_SIGNAL, false, &arena).unwrap().id;
        let payload = std::sync::atomic::AtomicU64::new(1);
        let header = ContextSaveAreaHeader {
            err_payload_addr: payload.as_ptr().expose_provenance() as u64,
            err_event_id: event,
            ..Default::default()
        };
        let area = (&raw const header).expose_provenance() as u64;
        let exceptions = Exceptions { enabled: Arc::default(), context_save_area: area };
        exceptions.send(20, &events).unwrap();
        assert_eq!(payload.load(Ordering::Relaxed), 1 << 19 | 1);
        assert_eq!(exceptions.send(4, &Events::default()), Err(nix::errno::Errno::EINVAL));
        let nowhere = Exceptions { enabled: Arc::default(), context_save_area: 0x1000 };
        assert_eq!(nowhere.send(20, &events), Err(nix::errno::Errno::EFAULT));
    }

    #[test]
    fn versions_are_decimal() {
        assert_eq!(gfx_version(90006), (9, 0, 6));
        assert_eq!(gfx_version(90010), (9, 0, 10));
        assert_eq!(gfx_version(90402), (9, 4, 2));
        assert_eq!(gfx_version(100300), (10, 3, 0));
    }

    #[test]
    fn a_fault_becomes_what_the_driver_says() {
        let fault = |reason| Fault { gpu_id: 3, va: 0x7f00_0123, access: "read", reason };
        let data = memory_exception(&fault(FaultReason::ReadOnly));
        assert_eq!((data.va, data.gpu_id, data.error_type), (0x7f00_0000, 3, 0));
        assert_eq!((data.failure.read_only, data.failure.not_present), (1, 0));
        let data = memory_exception(&fault(FaultReason::NotPresent));
        assert_eq!((data.failure.read_only, data.failure.not_present), (0, 1));
    }
}
