//! Performance counters and PC sampling.

use crate::bits::{abi_bits, abi_enums};
use crate::layout::abi_structs;
use crate::release::ROCM_6;

/// Id of a trace (`HSATraceId`).
pub type HsaTraceId = u64;

/// Id of a PC sampling session (`HsaPcSamplingTraceId`).
pub type HsaPcSamplingTraceId = u32;

abi_structs! {
    /// Structs of this module for the header check.
    pub const STRUCTS;

    /// Id of a block of counters.
    struct HsaUuid = "HSA_UUID", size 16, pack 4 {
        /// First part.
        data1 as "Data1": u32 = 0;
        /// Second part.
        data2 as "Data2": u16 = 4;
        /// Third part.
        data3 as "Data3": u16 = 6;
        /// The rest.
        data4 as "Data4": [u8; 8] = 8;
    }

    /// A counter.
    struct HsaCounter = "HsaCounter", size 32, pack 4 {
        /// Kind.
        kind as "Type": HsaProfileType = 0;
        /// Register offset.
        counter_id as "CounterId": u64 = 4;
        /// Width in bits.
        counter_size_in_bits as "CounterSizeInBits": u32 = 12;
        /// Bits of the value.
        counter_mask as "CounterMask": u64 = 16;
        /// Flags.
        flags as "Flags": HsaCounterFlags = 24;
        /// Block of the counter.
        block_index as "BlockIndex": u32 = 28;
    }

    /// A block of counters, followed by `num_counters - 1` more [`HsaCounter`]s.
    struct HsaCounterBlockProperties = "HsaCounterBlockProperties", size 56, pack 4 {
        /// Which block.
        block_id as "BlockId": HsaUuid = 0;
        /// Counters of the block.
        num_counters as "NumCounters": u32 = 16;
        /// Counters that can be used at once.
        num_concurrent as "NumConcurrent": u32 = 20;
        /// The first counter.
        counters as "Counters": [HsaCounter; 1] = 24;
    }

    /// All counters of a node, followed by more [`HsaCounterBlockProperties`] of their own sizes.
    struct HsaCounterProperties = "HsaCounterProperties", size 64, pack 4 {
        /// Blocks.
        num_blocks as "NumBlocks": u32 = 0;
        /// Blocks that can be used at once.
        num_concurrent as "NumConcurrent": u32 = 4;
        /// The first block.
        blocks as "Blocks": [HsaCounterBlockProperties; 1] = 8;
    }

    /// A registered trace.
    struct HsaPmcTraceRoot = "HsaPmcTraceRoot", size 20, pack 4 {
        /// Smallest trace buffer in bytes, page-aligned.
        trace_buffer_min_size_bytes as "TraceBufferMinSizeBytes": u64 = 0;
        /// Passes that the trace needs.
        number_of_passes as "NumberOfPasses": u32 = 8;
        /// Id.
        trace_id as "TraceId": u64 = 12;
    }

    /// A way to sample program counters.
    struct HsaPcSamplingInfo = "HsaPcSamplingInfo", size 40, pack 4, since(ROCM_6) {
        /// Interval.
        value: u64 = 0;
        /// Shortest interval.
        value_min: u64 = 8;
        /// Longest interval.
        value_max: u64 = 16;
        /// Flags.
        flags: u64 = 24;
        /// Method.
        method: HsaPcSamplingMethodKind = 32;
        /// Unit of the interval.
        units: HsaPcSamplingUnitInterval = 36;
    }
}

abi_bits! {
    /// Words of this module for the header check.
    pub const WORDS;

    /// Flags of a counter.
    bits HsaCounterFlags: u32 = "HsaCounterFlags" {
        /// Not tied to a process or wave.
        GLOBAL = "ui32.Global", 0, 1;
        /// Can be reset.
        RESETTABLE = "ui32.Resettable", 1, 1;
        /// Read-only.
        READ_ONLY = "ui32.ReadOnly", 2, 1;
        /// Streams into a buffer.
        STREAM = "ui32.Stream", 3, 1;
        /// Reserved.
        RESERVED = "ui32.Reserved", 4, 28;
    }
}

abi_enums! {
    /// Enums of this module for the header check.
    pub const ENUMS;

    /// Kind of a counter.
    enum HsaProfileType: u32 = "HSA_PROFILE_TYPE", "HSA_PROFILE_TYPE_" {
        /// Read by the kernel.
        PRIVILEGED_IMMEDIATE = 0;
        /// Streamed by the kernel.
        PRIVILEGED_STREAMING = 1;
        /// Read by a queue.
        NONPRIV_IMMEDIATE = 2;
        /// Streamed by a queue.
        NONPRIV_STREAMING = 3;
    }

    /// How program counters are sampled.
    enum HsaPcSamplingMethodKind: u32 =
        "HSA_PC_SAMPLING_METHOD_KIND", "HSA_PC_SAMPLING_METHOD_KIND_", since(ROCM_6) {
        /// The host traps.
        HOSTTRAP_V1 = 1;
        /// The hardware samples.
        STOCHASTIC_V1 = 2;
    }

    /// Unit of a sampling interval.
    enum HsaPcSamplingUnitInterval: u32 =
        "HSA_PC_SAMPLING_UNIT_INTERVAL", "HSA_PC_SAMPLING_UNIT_INTERVAL_", since(ROCM_6) {
        /// Microseconds.
        MICROSECONDS = 0;
        /// Clock cycles.
        CYCLES = 1;
        /// Instructions.
        INSTRUCTIONS = 2;
    }
}
