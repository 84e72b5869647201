//! The debugger.

use crate::bits::abi_enums;
use crate::layout::{abi_consts, abi_structs};
use crate::release::ROCM_6;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// A message to waves.
    struct HsaDbgWaveMsgAmdGen2 = "HsaDbgWaveMsgAMDGen2", size 8, pack 4 {
        /// The message.
        value as "Value": u32 = 0;
        /// Reserved.
        reserved2 as "Reserved2": u32 = 4;
    }

    /// A message to waves with data.
    struct HsaDbgWaveMessage = "HsaDbgWaveMessage", size 16, pack 4 {
        /// Address of the data.
        memory_va as "MemoryVA": u64 = 0;
        /// The message; in C a union of one.
        dbg_wave_msg as "DbgWaveMsg.WaveMsgInfoGen2": HsaDbgWaveMsgAmdGen2 = 8;
    }
}

abi_enums! {
    /// Enums of this module for the header check.
    pub const ENUMS;

    /// What to do with waves.
    enum HsaDbgWaveOp: u32 = "HSA_DBG_WAVEOP", "HSA_DBG_WAVEOP_" {
        /// Halt.
        HALT = 1;
        /// Resume.
        RESUME = 2;
        /// Kill.
        KILL = 3;
        /// Debug mode.
        DEBUG = 4;
        /// Trap.
        TRAP = 5;
    }

    /// Which waves.
    enum HsaDbgWaveMode: u32 = "HSA_DBG_WAVEMODE", "HSA_DBG_WAVEMODE_" {
        /// One.
        SINGLE = 0;
        /// All of the process.
        BROADCAST_PROCESS = 2;
        /// All of the process on a compute unit.
        BROADCAST_PROCESS_CU = 3;
    }

    /// Kind of a message.
    enum HsaDbgWaveMsgType: u32 = "HSA_DBG_WAVEMSG_TYPE", "HSA_DBG_WAVEMSG_" {
        /// Automatic.
        AUTO = 0;
        /// User.
        USER = 1;
        /// Error.
        ERROR = 2;
    }

    /// What a watch point watches.
    enum HsaDbgWatchMode: u32 = "HSA_DBG_WATCH_MODE", "HSA_DBG_WATCH_" {
        /// Reads.
        READ = 0;
        /// Writes and atomics.
        NONREAD = 1;
        /// Atomics.
        ATOMIC = 2;
        /// All.
        ALL = 3;
    }

    /// How a trap mask is changed.
    enum HsaDbgTrapOverride: u32 = "HSA_DBG_TRAP_OVERRIDE", "HSA_DBG_TRAP_OVERRIDE_" {
        /// Bits are added.
        OR = 0;
        /// The mask is replaced.
        REPLACE = 1;
    }

    /// Bits of a trap mask.
    enum HsaDbgTrapMask: u32 = "HSA_DBG_TRAP_MASK", "HSA_DBG_TRAP_MASK_" {
        /// Floating point: invalid operation.
        FP_INVALID = 1;
        /// Floating point: denormal input. C spells it so.
        FP_INPUT_DENOMAL = 2;
        /// Floating point: division by zero.
        FP_DIVIDE_BY_ZERO = 4;
        /// Floating point: overflow.
        FP_OVERFLOW = 8;
        /// Floating point: underflow.
        FP_UNDERFLOW = 16;
        /// Floating point: inexact.
        FP_INEXACT = 32;
        /// Integer: division by zero.
        INT_DIVIDE_BY_ZERO = 64;
        /// A watch point.
        DBG_ADDRESS_WATCH = 128;
        /// A memory fault.
        DBG_MEMORY_VIOLATION = 256;
    }

    /// How new waves start.
    enum HsaDbgWaveLaunchMode: u32 = "HSA_DBG_WAVE_LAUNCH_MODE", "HSA_DBG_WAVE_LAUNCH_MODE_" {
        /// Normally.
        NORMAL = 0;
        /// Halted.
        HALT = 1;
        /// Killed at once.
        KILL = 2;
        /// With a trap after each instruction.
        SINGLE_STEP = 3;
        /// Not at all.
        DISABLE = 4;
    }

    /// An exception, the same as KFD's `EC_*`.
    enum HsaDbgTrapExceptionCode: u32 = "HSA_DBG_TRAP_EXCEPTION_CODE", "HSA_DBG_EC_", since(ROCM_6) {
        /// None.
        NONE = 0;
        /// Queue: a wave aborted.
        QUEUE_WAVE_ABORT = 1;
        /// Queue: a wave trapped.
        QUEUE_WAVE_TRAP = 2;
        /// Queue: arithmetic.
        QUEUE_WAVE_MATH_ERROR = 3;
        /// Queue: illegal instruction.
        QUEUE_WAVE_ILLEGAL_INSTRUCTION = 4;
        /// Queue: memory fault.
        QUEUE_WAVE_MEMORY_VIOLATION = 5;
        /// Queue: aperture.
        QUEUE_WAVE_APERTURE_VIOLATION = 6;
        /// Packet: dimensions.
        QUEUE_PACKET_DISPATCH_DIM_INVALID = 16;
        /// Packet: group segment size.
        QUEUE_PACKET_DISPATCH_GROUP_SEGMENT_SIZE_INVALID = 17;
        /// Packet: code address.
        QUEUE_PACKET_DISPATCH_CODE_INVALID = 18;
        /// Packet: reserved.
        QUEUE_PACKET_RESERVED = 19;
        /// Packet: not supported.
        QUEUE_PACKET_UNSUPPORTED = 20;
        /// Packet: work-group size.
        QUEUE_PACKET_DISPATCH_WORK_GROUP_SIZE_INVALID = 21;
        /// Packet: registers.
        QUEUE_PACKET_DISPATCH_REGISTER_INVALID = 22;
        /// Packet: vendor's, not supported.
        QUEUE_PACKET_VENDOR_UNSUPPORTED = 23;
        /// Queue: preemption failed.
        QUEUE_PREEMPTION_ERROR = 30;
        /// Queue: new.
        QUEUE_NEW = 31;
        /// Device: a queue was deleted.
        DEVICE_QUEUE_DELETE = 32;
        /// Device: memory fault.
        DEVICE_MEMORY_VIOLATION = 33;
        /// Device: RAS error.
        DEVICE_RAS_ERROR = 34;
        /// Device: halted.
        DEVICE_FATAL_HALT = 35;
        /// Device: new.
        DEVICE_NEW = 36;
        /// Process: the runtime.
        PROCESS_RUNTIME = 48;
        /// Process: a device was removed.
        PROCESS_DEVICE_REMOVE = 49;
    }
}

abi_consts! {
    /// Constants of this module for the header check.
    pub const CONSTS;
    Macro u32 {
        /// `hsaKmtGetRuntimeCapabilities`: core dumps are supported.
        HSA_RUNTIME_ENABLE_CAPS_SUPPORTS_CORE_DUMP_MASK = 0x8000_0000, since(ROCM_6);
    }
}
