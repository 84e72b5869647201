//! The ioctls of `/dev/kfd`, dispatched as `kfd_ioctl` does: by number alone, in the caller's size.

mod dma_buf;
mod event;
mod memory;
mod process;
mod queue;
mod smi;

use kfd_abi::kfd::{IOCTLS, nr};
use kfd_abi::{ioctl, version};
use kfd_seam::{Exchange, Request, Result, UserMemory, UserPtr};
use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::GuestKfd;

pub use self::queue::Queues;

/// One call in progress.
struct Call<'a> {
    kfd: &'a GuestKfd,
    exchange: Exchange,
    argument: UserPtr,
}

impl Call<'_> {
    fn run<T>(&self, handler: impl FnOnce(&mut T) -> Result<()>) -> Result<i32>
    where
        T: FromBytes + IntoBytes + Immutable,
    {
        self.exchange.run::<T, _>(&UserMemory, self.argument, |arguments| handler(arguments).map(|()| 0))
    }
}

/// Serves an ioctl.
///
/// # Errors
/// What the host's kernel answers, or this process's would.
pub fn ioctl(kfd: &GuestKfd, request: u32, argument: UserPtr) -> Result<i32> {
    let user = Request(request);
    let (_, minor) = kfd.client.kfd_version();
    let entry = ioctl::by_nr(IOCTLS, user.number())
        .filter(|entry| entry.nr >= version::AMDKFD_COMMAND_START && entry.since_minor <= minor)
        .ok_or(Errno::ENOTTY)?;
    let call = Call { kfd, exchange: Exchange::kfd(user, Request(entry.request)), argument };
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
        // SVM, checkpoints, the debugger and secondary processes.
        _ => Err(Errno::EOPNOTSUPP),
    }
}
