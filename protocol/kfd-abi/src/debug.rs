//! The debugger: runtime enable and DBG_TRAP.

use crate::layout::{Since::KfdMinor, abi_consts, abi_structs};
use crate::version::minor;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of DBG_REGISTER, deprecated: kernels answer EPERM.
    struct DbgRegisterArgs = "struct kfd_ioctl_dbg_register_args", size 8 {
        /// In: which GPU.
        gpu_id: u32 = 0;
        /// Padding.
        pad: u32 = 4;
    }

    /// Argument of DBG_UNREGISTER, deprecated: kernels answer EPERM.
    struct DbgUnregisterArgs = "struct kfd_ioctl_dbg_unregister_args", size 8 {
        /// In: which GPU.
        gpu_id: u32 = 0;
        /// Padding.
        pad: u32 = 4;
    }

    /// Argument of DBG_ADDRESS_WATCH, deprecated: kernels answer EPERM.
    struct DbgAddressWatchArgs = "struct kfd_ioctl_dbg_address_watch_args", size 16 {
        /// In: pointer to the content.
        content_ptr: u64 = 0;
        /// In: which GPU.
        gpu_id: u32 = 8;
        /// In: size of the content in bytes.
        buf_size_in_bytes: u32 = 12;
    }

    /// Argument of DBG_WAVE_CONTROL, deprecated: kernels answer EPERM.
    struct DbgWaveControlArgs = "struct kfd_ioctl_dbg_wave_control_args", size 16 {
        /// In: pointer to the content.
        content_ptr: u64 = 0;
        /// In: which GPU.
        gpu_id: u32 = 8;
        /// In: size of the content in bytes.
        buf_size_in_bytes: u32 = 12;
    }

    /// Argument of RUNTIME_ENABLE.
    struct RuntimeEnableArgs = "struct kfd_ioctl_runtime_enable_args", size 16,
        since(KfdMinor(minor::DEBUGGER)) {
        /// In: pointer to the runtime's `r_debug` for a debugger.
        r_debug: u64 = 0;
        /// In: `KFD_RUNTIME_ENABLE_MODE_*`; without the enable bit the runtime is taken off again.
        mode_mask: u32 = 8;
        /// Out: what the kernel supports.
        capabilities_mask: u32 = 12;
    }

    /// What a debugger learns of a runtime.
    struct RuntimeInfo = "struct kfd_runtime_info", size 16, since(KfdMinor(minor::DEBUGGER)) {
        /// As in [`RuntimeEnableArgs::r_debug`].
        r_debug: u64 = 0;
        /// `DEBUG_RUNTIME_STATE_*`.
        runtime_state: u32 = 8;
        /// Whether trap temporaries are set up.
        ttmp_setup: u32 = 12;
    }

    /// Argument of DBG_TRAP. What the operation's union holds is opaque here.
    struct DbgTrapArgs = "struct kfd_ioctl_dbg_trap_args", size 32, since(KfdMinor(minor::DEBUGGER)) {
        /// In: the process to debug.
        pid: u32 = 0;
        /// In: `KFD_IOC_DBG_TRAP_*`.
        op: u32 = 4;
        /// The operation's argument, one of 14 structs.
        data as "": [u64; 3] = 8;
    }

    /// A GPU in a debugger's snapshot. 120 bytes before `capability2`.
    struct DbgDeviceInfoEntry = "struct kfd_dbg_device_info_entry", size 128,
        since(KfdMinor(minor::DEBUGGER)), size_since(KfdMinor(minor::CREATE_PROCESS)) {
        /// Exceptions raised.
        exception_status: u64 = 0;
        /// Start of LDS.
        lds_base: u64 = 8;
        /// End of LDS.
        lds_limit: u64 = 16;
        /// Start of scratch.
        scratch_base: u64 = 24;
        /// End of scratch.
        scratch_limit: u64 = 32;
        /// Start of GPU virtual memory.
        gpuvm_base: u64 = 40;
        /// End of GPU virtual memory.
        gpuvm_limit: u64 = 48;
        /// Which GPU.
        gpu_id: u32 = 56;
        /// PCI location.
        location_id: u32 = 60;
        /// PCI vendor.
        vendor_id: u32 = 64;
        /// PCI device.
        device_id: u32 = 68;
        /// PCI revision.
        revision_id: u32 = 72;
        /// PCI subsystem vendor.
        subsystem_vendor_id: u32 = 76;
        /// PCI subsystem device.
        subsystem_device_id: u32 = 80;
        /// Firmware version.
        fw_version: u32 = 84;
        /// E.g. 90006 for gfx906.
        gfx_target_version: u32 = 88;
        /// SIMDs.
        simd_count: u32 = 92;
        /// Waves per SIMD.
        max_waves_per_simd: u32 = 96;
        /// Shader arrays.
        array_count: u32 = 100;
        /// Shader arrays per engine.
        simd_arrays_per_engine: u32 = 104;
        /// XCCs.
        num_xcc: u32 = 108;
        /// The node's capability word.
        capability: u32 = 112;
        /// Debug properties.
        debug_prop: u32 = 116;
        /// The node's second capability word. Came after minor 17.
        capability2: u32 = 120, since(KfdMinor(minor::CREATE_PROCESS));
        /// Padding.
        pad: u32 = 124, since(KfdMinor(minor::CREATE_PROCESS));
    }

    /// A queue in a debugger's snapshot.
    struct QueueSnapshotEntry = "struct kfd_queue_snapshot_entry", size 64, since(KfdMinor(minor::DEBUGGER)) {
        /// Exceptions raised.
        exception_status: u64 = 0;
        /// GPU address of the ring.
        ring_base_address: u64 = 8;
        /// Address of the write pointer.
        write_pointer_address: u64 = 16;
        /// Address of the read pointer.
        read_pointer_address: u64 = 24;
        /// GPU address of the context save area.
        ctx_save_restore_address: u64 = 32;
        /// Which queue.
        queue_id: u32 = 40;
        /// Which GPU.
        gpu_id: u32 = 44;
        /// Size of the ring in bytes.
        ring_size: u32 = 48;
        /// `KFD_IOC_QUEUE_TYPE_*`.
        queue_type: u32 = 52;
        /// Size of the context save area in bytes.
        ctx_save_restore_area_size: u32 = 56;
        /// Reserved.
        reserved: u32 = 60;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// Points of an old address watch.
        MAX_ALLOWED_NUM_POINTS = 100;
        /// [`RuntimeEnableArgs::mode_mask`]: enable.
        KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK = 1, since(KfdMinor(minor::DEBUGGER));
        /// [`RuntimeEnableArgs::mode_mask`]: save trap temporaries.
        KFD_RUNTIME_ENABLE_MODE_TTMP_SAVE_MASK = 2, since(KfdMinor(minor::DEBUGGER));
        /// Marks a queue id in suspend and resume: the hardware failed.
        KFD_DBG_QUEUE_ERROR_MASK = 1 << 30, since(KfdMinor(minor::DEBUGGER));
        /// Marks a queue id in suspend and resume: no such queue.
        KFD_DBG_QUEUE_INVALID_MASK = 1 << 31, since(KfdMinor(minor::DEBUGGER));
    }
    Enum u32 {
        /// Not enabled.
        DEBUG_RUNTIME_STATE_DISABLED = 0, since(KfdMinor(minor::DEBUGGER));
        /// Enabled.
        DEBUG_RUNTIME_STATE_ENABLED = 1, since(KfdMinor(minor::DEBUGGER));
        /// Enabled, another debugger was there.
        DEBUG_RUNTIME_STATE_ENABLED_BUSY = 2, since(KfdMinor(minor::DEBUGGER));
        /// Enabled, the debugger failed.
        DEBUG_RUNTIME_STATE_ENABLED_ERROR = 3, since(KfdMinor(minor::DEBUGGER));
        /// Begin a session.
        KFD_IOC_DBG_TRAP_ENABLE = 0, since(KfdMinor(minor::DEBUGGER));
        /// End a session.
        KFD_IOC_DBG_TRAP_DISABLE = 1, since(KfdMinor(minor::DEBUGGER));
        /// Raise an exception in the runtime.
        KFD_IOC_DBG_TRAP_SEND_RUNTIME_EVENT = 2, since(KfdMinor(minor::DEBUGGER));
        /// Choose exceptions.
        KFD_IOC_DBG_TRAP_SET_EXCEPTIONS_ENABLED = 3, since(KfdMinor(minor::DEBUGGER));
        /// Override trap masks of new waves.
        KFD_IOC_DBG_TRAP_SET_WAVE_LAUNCH_OVERRIDE = 4, since(KfdMinor(minor::DEBUGGER));
        /// Choose how new waves start.
        KFD_IOC_DBG_TRAP_SET_WAVE_LAUNCH_MODE = 5, since(KfdMinor(minor::DEBUGGER));
        /// Suspend queues.
        KFD_IOC_DBG_TRAP_SUSPEND_QUEUES = 6, since(KfdMinor(minor::DEBUGGER));
        /// Resume queues.
        KFD_IOC_DBG_TRAP_RESUME_QUEUES = 7, since(KfdMinor(minor::DEBUGGER));
        /// Set a watch point.
        KFD_IOC_DBG_TRAP_SET_NODE_ADDRESS_WATCH = 8, since(KfdMinor(minor::DEBUGGER));
        /// Clear a watch point.
        KFD_IOC_DBG_TRAP_CLEAR_NODE_ADDRESS_WATCH = 9, since(KfdMinor(minor::DEBUGGER));
        /// Set flags of waves.
        KFD_IOC_DBG_TRAP_SET_FLAGS = 10, since(KfdMinor(minor::DEBUGGER));
        /// Find raised exceptions.
        KFD_IOC_DBG_TRAP_QUERY_DEBUG_EVENT = 11, since(KfdMinor(minor::DEBUGGER));
        /// Ask for an exception's data.
        KFD_IOC_DBG_TRAP_QUERY_EXCEPTION_INFO = 12, since(KfdMinor(minor::DEBUGGER));
        /// List queues.
        KFD_IOC_DBG_TRAP_GET_QUEUE_SNAPSHOT = 13, since(KfdMinor(minor::DEBUGGER));
        /// List GPUs.
        KFD_IOC_DBG_TRAP_GET_DEVICE_SNAPSHOT = 14, since(KfdMinor(minor::DEBUGGER));
    }
}
