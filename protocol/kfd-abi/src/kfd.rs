//! The ioctls of /dev/kfd in one table.

use crate::aperture::{GetProcessAperturesArgs, GetProcessAperturesNewArgs};
use crate::clock::GetClockCountersArgs;
use crate::criu::CriuArgs;
use crate::debug::{
    DbgAddressWatchArgs, DbgRegisterArgs, DbgTrapArgs, DbgUnregisterArgs, DbgWaveControlArgs,
    RuntimeEnableArgs,
};
use crate::event::{CreateEventArgs, DestroyEventArgs, ResetEventArgs, SetEventArgs, WaitEventsArgs};
use crate::ioctl::ioctls;
use crate::memory::{
    AcquireVmArgs, AllocMemoryOfGpuArgs, ExportDmabufArgs, FreeMemoryOfGpuArgs, GetAvailableMemoryArgs,
    GetDmabufInfoArgs, GetTileConfigArgs, ImportDmabufArgs, MapMemoryToGpuArgs, SetMemoryPolicyArgs,
    SetScratchBackingVaArgs, SetTrapHandlerArgs, UnmapMemoryFromGpuArgs,
};
use crate::profiler::ProfilerArgs;
use crate::queue::{
    AllocQueueGwsArgs, CreateQueueArgs, DestroyQueueArgs, GetQueueWaveStateArgs, SetCuMaskArgs,
    UpdateQueueArgs,
};
use crate::smi::SmiEventsArgs;
use crate::svm::{SetXnackModeArgs, SvmArgs};
use crate::version::GetVersionArgs;

ioctls! {
    /// All ioctls of the upstream driver, by number.
    pub const IOCTLS: "AMDKFD_IOC_", crate::version::AMDKFD_IOCTL_BASE;
    /// Interface version.
    GET_VERSION = 0x01, Read, GetVersionArgs, since 1;
    /// Creates a queue.
    CREATE_QUEUE = 0x02, ReadWrite, CreateQueueArgs, since 1;
    /// Destroys a queue.
    DESTROY_QUEUE = 0x03, ReadWrite, DestroyQueueArgs, since 1;
    /// Sets a GPU's cache policy.
    SET_MEMORY_POLICY = 0x04, Write, SetMemoryPolicyArgs, since 1;
    /// Reads the clocks.
    GET_CLOCK_COUNTERS = 0x05, ReadWrite, GetClockCountersArgs, since 1;
    /// Apertures of up to seven GPUs.
    GET_PROCESS_APERTURES = 0x06, Read, GetProcessAperturesArgs, since 1;
    /// Changes a queue.
    UPDATE_QUEUE = 0x07, Write, UpdateQueueArgs, since 1;
    /// Creates an event.
    CREATE_EVENT = 0x08, ReadWrite, CreateEventArgs, since 1;
    /// Destroys an event.
    DESTROY_EVENT = 0x09, Write, DestroyEventArgs, since 1;
    /// Signals an event.
    SET_EVENT = 0x0a, Write, SetEventArgs, since 1;
    /// Resets an event.
    RESET_EVENT = 0x0b, Write, ResetEventArgs, since 1;
    /// Waits for events.
    WAIT_EVENTS = 0x0c, ReadWrite, WaitEventsArgs, since 1;
    /// Old debugger.
    DBG_REGISTER_DEPRECATED = 0x0d, Write, DbgRegisterArgs, since 1;
    /// Old debugger.
    DBG_UNREGISTER_DEPRECATED = 0x0e, Write, DbgUnregisterArgs, since 1;
    /// Old debugger.
    DBG_ADDRESS_WATCH_DEPRECATED = 0x0f, Write, DbgAddressWatchArgs, since 1;
    /// Old debugger.
    DBG_WAVE_CONTROL_DEPRECATED = 0x10, Write, DbgWaveControlArgs, since 1;
    /// Sets the scratch memory's address.
    SET_SCRATCH_BACKING_VA = 0x11, ReadWrite, SetScratchBackingVaArgs, since 1;
    /// Tiling registers.
    GET_TILE_CONFIG = 0x12, ReadWrite, GetTileConfigArgs, since 1;
    /// Sets the second-level trap handler.
    SET_TRAP_HANDLER = 0x13, Write, SetTrapHandlerArgs, since 1;
    /// Apertures of all GPUs.
    GET_PROCESS_APERTURES_NEW = 0x14, ReadWrite, GetProcessAperturesNewArgs, since 1;
    /// Takes a render node's address space.
    ACQUIRE_VM = 0x15, Write, AcquireVmArgs, since 1;
    /// Allocates memory.
    ALLOC_MEMORY_OF_GPU = 0x16, ReadWrite, AllocMemoryOfGpuArgs, since 1;
    /// Frees memory.
    FREE_MEMORY_OF_GPU = 0x17, Write, FreeMemoryOfGpuArgs, since 1;
    /// Maps memory.
    MAP_MEMORY_TO_GPU = 0x18, ReadWrite, MapMemoryToGpuArgs, since 1;
    /// Unmaps memory.
    UNMAP_MEMORY_FROM_GPU = 0x19, ReadWrite, UnmapMemoryFromGpuArgs, since 1;
    /// Chooses a queue's compute units.
    SET_CU_MASK = 0x1a, Write, SetCuMaskArgs, since 1;
    /// Reads a stopped queue's wave state.
    GET_QUEUE_WAVE_STATE = 0x1b, ReadWrite, GetQueueWaveStateArgs, since 1;
    /// Describes a dma-buf.
    GET_DMABUF_INFO = 0x1c, ReadWrite, GetDmabufInfoArgs, since 1;
    /// Imports a dma-buf.
    IMPORT_DMABUF = 0x1d, ReadWrite, ImportDmabufArgs, since 1;
    /// Gives a queue global wave sync.
    ALLOC_QUEUE_GWS = 0x1e, ReadWrite, AllocQueueGwsArgs, since 1;
    /// Opens a stream of system management events.
    SMI_EVENTS = 0x1f, ReadWrite, SmiEventsArgs, since 3;
    /// Attributes of shared virtual memory.
    SVM = 0x20, ReadWrite, SvmArgs, since 5;
    /// Recoverable page faults.
    SET_XNACK_MODE = 0x21, ReadWrite, SetXnackModeArgs, since 5;
    /// Checkpoint and restore.
    CRIU_OP = 0x22, ReadWrite, CriuArgs, since 7;
    /// Free VRAM.
    AVAILABLE_MEMORY = 0x23, ReadWrite, GetAvailableMemoryArgs, since 9;
    /// Exports a buffer as a dma-buf.
    EXPORT_DMABUF = 0x24, ReadWrite, ExportDmabufArgs, since 12;
    /// Tells the debugger of a runtime.
    RUNTIME_ENABLE = 0x25, ReadWrite, RuntimeEnableArgs, since 13;
    /// Debugs another process.
    DBG_TRAP = 0x26, ReadWrite, DbgTrapArgs, since 13;
    /// Makes a secondary KFD process.
    CREATE_PROCESS = 0x27, None, (), since 19;
    /// Profiler control.
    PROFILER = 0x28, ReadWrite, ProfilerArgs, since 23;
}

/// `AMDKFD_COMMAND_END` of an interface minor: one past its last ioctl number. A number from there on is ENOTTY.
pub fn command_end(minor: u32) -> u8 {
    let last = IOCTLS.iter().filter(|ioctl| ioctl.since_minor <= minor).map(|ioctl| ioctl.nr).max();
    last.map_or(crate::version::AMDKFD_COMMAND_START, |nr| nr.saturating_add(1))
}
