//! The interface version, and which minor brought what (the list at the top of
//! include/uapi/linux/kfd_ioctl.h).
//!
//! amdkfd dispatches by number alone: it copies as many bytes as the shorter of the caller's and its
//! own struct, zero-fills the rest and copies the caller's size back, also when the handler failed
//! (`kfd_ioctl`, drivers/gpu/drm/amd/amdkfd/kfd_chardev.c). So a struct that grew works with both older
//! and newer callers, and new fields mean nothing when zero.

use crate::layout::{abi_consts, abi_structs};

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Argument of GET_VERSION.
    struct GetVersionArgs = "struct kfd_ioctl_get_version_args", size 8 {
        /// Out: major version, 1 in all kernels.
        major_version: u32 = 0;
        /// Out: minor version, see [`minor`].
        minor_version: u32 = 4;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// Interface major version.
        KFD_IOCTL_MAJOR_VERSION = 1;
    }
    Macro u8 {
        /// First valid ioctl number; for the end see [`crate::kfd::command_end`].
        AMDKFD_COMMAND_START = 0x01;
    }
}

/// The ioctl type letter of /dev/kfd (`AMDKFD_IOCTL_BASE`).
pub const AMDKFD_IOCTL_BASE: u8 = b'K';

/// First number that only AMD's out-of-tree (DKMS) amdkfd serves: IPC, debugger, SPM, PC sampling.
pub const DKMS_COMMAND_START: u8 = 0x80;

/// The newest minor version that this crate describes.
pub const NEWEST_MINOR: u32 = minor::PROFILER;

/// The minor version of Linux 6.12 (Debian 13).
pub const LINUX_6_12_MINOR: u32 = minor::SDMA_ENGINE_ID;

/// The minor version of Linux 6.1 (Debian 12).
pub const LINUX_6_1_MINOR: u32 = minor::UNIFIED_CTX_SAVE_AREA;

/// Minor versions of major 1 by what they brought. AMD's DKMS driver numbers differently from
/// 1.19 on, so probe an ioctl rather than compare minors above 18.
pub mod minor {
    /// SMI_EVENTS.
    pub const SMI_EVENTS: u32 = 3;
    /// The SRAM EDC bit in a node's capability word.
    pub const SRAM_EDC: u32 = 4;
    /// SVM and SET_XNACK_MODE.
    pub const SVM: u32 = 5;
    /// SVM's GET_ATTR answers CLR_FLAGS.
    pub const SVM_CLEAR_FLAGS: u32 = 6;
    /// CRIU_OP.
    pub const CRIU: u32 = 7;
    /// CRIU copies GTT buffers by SDMA.
    pub const CRIU_SDMA: u32 = 8;
    /// AVAILABLE_MEMORY.
    pub const AVAILABLE_MEMORY: u32 = 9;
    /// SMI events that profile migration and eviction.
    pub const SMI_PROFILER: u32 = 10;
    /// The context save area may be unified (SVM) memory.
    pub const UNIFIED_CTX_SAVE_AREA: u32 = 11;
    /// EXPORT_DMABUF.
    pub const EXPORT_DMABUF: u32 = 12;
    /// RUNTIME_ENABLE and DBG_TRAP.
    pub const DEBUGGER: u32 = 13;
    /// Event ages in WAIT_EVENTS.
    pub const EVENT_AGE: u32 = 14;
    /// The render node's GEM_VA works on a compute VM.
    pub const GEM_VA: u32 = 15;
    /// Physically contiguous VRAM.
    pub const CONTIGUOUS_VRAM: u32 = 16;
    /// SDMA queues on a chosen engine.
    pub const SDMA_ENGINE_ID: u32 = 17;
    /// Per-process flags in SET_MEMORY_POLICY.
    pub const PROCESS_FLAGS: u32 = 18;
    /// CREATE_PROCESS.
    pub const CREATE_PROCESS: u32 = 19;
    /// Trap handlers may use expert scheduling mode.
    pub const EXPERT_SCHEDULING: u32 = 20;
    /// Debugger exceptions for LDS addresses out of range.
    pub const LDS_OUT_OF_ADDR_RANGE: u32 = 21;
    /// A metadata ring beside a queue's ring.
    pub const METADATA_RING: u32 = 22;
    /// PROFILER.
    pub const PROFILER: u32 = 23;
}
