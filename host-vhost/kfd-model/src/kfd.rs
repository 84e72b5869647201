//! The ioctls of `/dev/kfd` (`kfd_ioctl` and its table in `kfd_chardev.c`).
//!
//! Deliberate differences from the kernel (Linux 6.12):
//!
//! | call | kernel | here |
//! |---|---|---|
//! | a memory fault | all queues are off the GPU before the event comes | another queue may still end the packet that it is in the middle of |
//! | SET_CU_MASK | names the compute units of the queue | new workgroups are on these |
//! | CREATE_QUEUE with a save area of shared virtual memory | its range stays as long as the queue | may end before |
//! | ALLOC_QUEUE_GWS that takes away what another queue has, before gfx11 | crashes | `EINVAL` |
//! | queues for SDMA engines, doorbells | shared out over all processes | each process has all of a GPU |
//! | EXPORT_DMABUF of doorbells and registers | a dma-buf | `EPERM` |
//! | SMI_EVENTS | an event stream | one of memory faults, see [`crate::smi`] |
//! | SVM in a kernel that has it | memory migrates, a range ends with its CPU mapping, a GPU that loses access keeps its mapping | memory stays, ranges stay, access ends at once; the node's capability says that there is no SVM |
//! | DBG_TRAP on a process | the debugger | `EOPNOTSUPP` |
//! | CREATE_PROCESS (1.19), PROFILER (1.23) | | `EOPNOTSUPP` |
//! | CRIU_OP with a GPU and the capability for it | checkpoint and restore | `EOPNOTSUPP` |
//! | WAIT_EVENTS when a signal arrives | `EINTR` or a restart | goes on |
//! | WAIT_EVENTS with a bad pointer | events before the bad entry may be reset | none is |
//! | CREATE_EVENT | types other than signal and debug without limit | 4096 of them, then `ENOSPC` |
//! | ALLOC_MEMORY_OF_GPU | buffers without limit | 262144 for each GPU, then `ENOMEM` |
//! | ALLOC_MEMORY_OF_GPU of read-only user memory | `EPERM` | works; a write of the GPU faults |
//! | user memory that is unmapped later | GPU queues stop, its pages are mapped again when it is back | an access faults |
//! | freed memory that is still mapped by the CPU, other than by a dma-buf | stays until the last map is gone | shows zeros, later other memory |
//! | memory that outlives the process that made it | counts until it is gone | counts until that process is gone |
//! | the trap handler's memory | counts as system memory | does not |
//! | ACQUIRE_VM with another GPU's render node | takes it | `EINVAL` |
//! | VRAM and system memory in use | KFD's buffers for the machine | those of the render nodes too, for the processes that share a machine ([`crate::shared_machine`]) |

mod device;
mod dmabuf;
mod event;
mod memory;
mod queue;
mod svm;

pub(crate) use dmabuf::find as find_dmabuf;
pub(crate) use memory::{doorbells, mmio, take_piece};
pub use queue::ProcessQueue;

use kfd_abi::kfd::{IOCTLS, nr};
use kfd_abi::{ioctl, version};
use kfd_seam::{Exchange, FileId, Request, Result, UserMemory, UserPtr};
use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::dmabuf::DmaBuf;
use crate::process::Process;

/// What a descriptor of the process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Descriptor {
    /// A render node.
    Render {
        /// The open file.
        file: FileId,
        /// Index of its GPU.
        gpu: usize,
    },
    /// A dma-buf.
    DmaBuf(Box<DmaBuf>),
    /// Something else.
    Other,
}

/// The descriptors of the process, for calls that name a render node or a dma-buf by its descriptor.
pub trait DescriptorTable {
    /// What an open descriptor is; `None` when it is not open.
    fn find(&self, descriptor: u32) -> Option<Descriptor>;
}

/// One call in progress.
struct Call<'a> {
    process: &'a Process,
    descriptors: &'a dyn DescriptorTable,
    user: Request,
    kernel: Request,
    argument: UserPtr,
}

impl Call<'_> {
    fn run<T>(&self, handler: impl FnOnce(&mut T) -> Result<()>) -> Result<i32>
    where
        T: FromBytes + IntoBytes + Immutable,
    {
        Exchange::kfd(self.user, self.kernel)
            .run::<T, _>(&UserMemory, self.argument, |arguments| handler(arguments).map(|()| 0))
    }
}

/// Serves an ioctl of `/dev/kfd`. Only the number counts, neither the type nor the size.
///
/// # Errors
/// As the kernel's, but for the differences above.
pub fn ioctl(
    process: &Process,
    descriptors: &dyn DescriptorTable,
    request: u32,
    argument: UserPtr,
) -> Result<i32> {
    let user = Request(request);
    let entry = ioctl::by_nr(IOCTLS, user.number())
        .filter(|entry| entry.nr >= version::AMDKFD_COMMAND_START && entry.since_minor <= process.kfd_minor)
        .ok_or(Errno::ENOTTY)?;
    let call = Call { process, descriptors, user, kernel: Request(entry.request), argument };
    match entry.nr {
        nr::GET_VERSION => call.get_version(),
        nr::GET_PROCESS_APERTURES => call.get_process_apertures(),
        nr::GET_PROCESS_APERTURES_NEW => call.get_process_apertures_new(),
        nr::GET_CLOCK_COUNTERS => call.get_clock_counters(),
        nr::ACQUIRE_VM => call.acquire_vm(),
        nr::SET_MEMORY_POLICY => call.set_memory_policy(),
        nr::SET_SCRATCH_BACKING_VA => call.set_scratch_backing_va(),
        nr::SET_TRAP_HANDLER => call.set_trap_handler(),
        nr::GET_TILE_CONFIG => call.get_tile_config(),
        nr::SET_XNACK_MODE => call.set_xnack_mode(),
        nr::RUNTIME_ENABLE => call.runtime_enable(),
        nr::SVM => call.svm(),
        nr::SMI_EVENTS => call.smi_events(),

        nr::CREATE_EVENT => call.create_event(),
        nr::DESTROY_EVENT => call.destroy_event(),
        nr::SET_EVENT => call.set_event(),
        nr::RESET_EVENT => call.reset_event(),
        nr::WAIT_EVENTS => call.wait_events(),

        nr::ALLOC_MEMORY_OF_GPU => call.alloc_memory_of_gpu(),
        nr::FREE_MEMORY_OF_GPU => call.free_memory_of_gpu(),
        nr::MAP_MEMORY_TO_GPU => call.map_memory_to_gpu(),
        nr::UNMAP_MEMORY_FROM_GPU => call.unmap_memory_from_gpu(),
        nr::AVAILABLE_MEMORY => call.available_memory(),
        nr::GET_DMABUF_INFO => call.get_dmabuf_info(),
        nr::IMPORT_DMABUF => call.import_dmabuf(),
        nr::EXPORT_DMABUF => call.export_dmabuf(),

        nr::CREATE_QUEUE => call.create_queue(),
        nr::DESTROY_QUEUE => call.destroy_queue(),
        nr::UPDATE_QUEUE => call.update_queue(),
        nr::SET_CU_MASK => call.set_cu_mask(),
        nr::GET_QUEUE_WAVE_STATE => call.get_queue_wave_state(),
        nr::ALLOC_QUEUE_GWS => call.alloc_queue_gws(),

        nr::DBG_REGISTER_DEPRECATED
        | nr::DBG_UNREGISTER_DEPRECATED
        | nr::DBG_ADDRESS_WATCH_DEPRECATED
        | nr::DBG_WAVE_CONTROL_DEPRECATED => Err(Errno::EPERM),
        nr::CRIU_OP => call.criu_op(),
        nr::DBG_TRAP => call.dbg_trap(),
        _ => Err(Errno::EOPNOTSUPP),
    }
}
