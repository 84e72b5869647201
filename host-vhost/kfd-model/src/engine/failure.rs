//! Why a queue stops.

use crate::space::Fault;

/// What was wrong with a queue's packet, or went wrong while it ran.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// An AQL packet of a type that no queue of a GPU takes: AGENT_DISPATCH, reserved ones.
    #[error("AQL packet {index}: packets of type {kind} are not for a GPU's queue")]
    PacketType {
        /// Index of the packet.
        index: u64,
        /// Type in its header.
        kind: u8,
    },
    /// A vendor specific AQL packet of a format that there is not.
    #[error("AQL packet {index}: there is no vendor specific format {format}")]
    VendorFormat {
        /// Index of the packet.
        index: u64,
        /// `amd_format` in its header.
        format: u8,
    },
    /// A packet that the processor does not know.
    #[error("{engine} packet at {va:#x}: header {header:#010x} is not one that the model knows")]
    Opcode {
        /// `PM4` or `SDMA`.
        engine: &'static str,
        /// GPU address of the packet.
        va: u64,
        /// Its first word.
        header: u32,
    },
    /// A packet whose fields make no sense, or ask for what the model does not have.
    #[error("{engine} packet at {va:#x}, header {header:#010x}: {problem}")]
    Malformed {
        /// `AQL`, `PM4` or `SDMA`.
        engine: &'static str,
        /// GPU address of the packet.
        va: u64,
        /// Its first word.
        header: u32,
        /// What is wrong.
        problem: &'static str,
    },
    /// The doorbell or write pointer is further ahead of the read pointer than the ring is long.
    #[error("write pointer {write:#x} is more than a ring of {size:#x} ahead of read pointer {read:#x}")]
    WritePointer {
        /// Write pointer in the queue's units.
        write: u64,
        /// Read pointer.
        read: u64,
        /// Size of the ring.
        size: u64,
    },
    /// Indirect buffers nested or chained without end.
    #[error("PM4 indirect buffer at {va:#x}: nested or chained too deeply")]
    IndirectBuffers {
        /// GPU address of the one that was too much.
        va: u64,
    },
    /// An address plus an offset leaves 64 bits.
    #[error("address {va:#x} plus {offset:#x} overflows")]
    AddressOverflow {
        /// The address.
        va: u64,
        /// What was to be added.
        offset: u64,
    },
    /// A word at an address that is no multiple of its size.
    #[error("a word of {size} bytes at {va:#x} is not aligned")]
    Unaligned {
        /// GPU address.
        va: u64,
        /// Size in bytes.
        size: u32,
    },
    /// An access through the page table failed.
    #[error(transparent)]
    Memory(#[from] Fault),
    /// A kernel could not be run, or failed.
    #[error(transparent)]
    Dispatch(#[from] DispatchFailure),
}

/// Why a kernel did not run or did not end well.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DispatchFailure {
    /// The model cannot run this kernel yet.
    #[error("kernel at {pc:#x}: instruction {instruction:#010x} is not supported yet by the model")]
    NotSupported {
        /// GPU address of the instruction.
        pc: u64,
        /// Its first word.
        instruction: u32,
    },
    /// An instruction that there is not.
    #[error("kernel at {pc:#x}: instruction {instruction:#010x} is illegal")]
    IllegalInstruction {
        /// GPU address of the instruction.
        pc: u64,
        /// Its first word.
        instruction: u32,
    },
    /// No dimensions, or a size of 0 in one of them.
    #[error("the dimensions of the dispatch are invalid")]
    Dimensions,
    /// More group memory than a workgroup can have.
    #[error("the group segment is too large")]
    GroupSegment,
    /// No code at the kernel object.
    #[error("the kernel object at {kernel_object:#x} is invalid")]
    Code {
        /// GPU address in the packet.
        kernel_object: u64,
    },
    /// More work-items in a workgroup than there can be.
    #[error("the workgroup is too large")]
    WorkgroupSize,
    /// More registers than there are.
    #[error("the kernel needs more registers than there are")]
    Registers,
    /// An address that no aperture covers.
    #[error("kernel at {pc:#x}: address {va:#x} is in no aperture")]
    Aperture {
        /// GPU address of the instruction.
        pc: u64,
        /// The address that it used.
        va: u64,
    },
    /// A trap that stops the queue.
    #[error("kernel at {pc:#x}: trap {trap}")]
    Trap {
        /// GPU address of the instruction.
        pc: u64,
        /// Number of the trap.
        trap: u8,
    },
}

impl Failure {
    /// The memory fault that it comes from.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Memory(fault) => Some(fault),
            _ => None,
        }
    }

    /// What the packet processor stores into an AQL queue's `queue_inactive_signal`, by the meanings that ROCr's
    /// `DynamicQueueEventsHandler` gives to the bits. `None` for a memory fault: the driver reports those, as events.
    pub fn inactive_code(&self) -> Option<u64> {
        Some(match self {
            Self::Memory(_) => return None,
            Self::PacketType { .. } => 1 << 5,
            Self::VendorFormat { .. }
            | Self::Opcode { .. }
            | Self::Malformed { .. }
            | Self::IndirectBuffers { .. } => 1 << 8,
            Self::AddressOverflow { .. } | Self::Unaligned { .. } | Self::WritePointer { .. } => 1 << 29,
            Self::Dispatch(failure) => match failure {
                DispatchFailure::Dimensions => 1 << 1,
                DispatchFailure::GroupSegment => 1 << 2,
                DispatchFailure::Code { .. } => 1 << 3,
                DispatchFailure::WorkgroupSize => 1 << 6,
                DispatchFailure::Registers => 1 << 7,
                DispatchFailure::Aperture { .. } => 1 << 29,
                DispatchFailure::NotSupported { .. } | DispatchFailure::IllegalInstruction { .. } => 1 << 30,
                DispatchFailure::Trap { .. } => 1 << 31,
            },
        })
    }

    /// The exception that KFD reports to a runtime that enabled them (`enum kfd_dbg_trap_exception_code`). `None` for a
    /// memory fault, which it reports as an event (`kfd_signal_vm_fault_event`).
    pub fn exception_code(&self) -> Option<u32> {
        Some(match self {
            Self::Memory(_) => return None,
            Self::PacketType { .. } => 20,
            Self::VendorFormat { .. }
            | Self::Opcode { .. }
            | Self::Malformed { .. }
            | Self::IndirectBuffers { .. } => 23,
            Self::AddressOverflow { .. } | Self::Unaligned { .. } | Self::WritePointer { .. } => 6,
            Self::Dispatch(failure) => match failure {
                DispatchFailure::Trap { .. } => 2,
                DispatchFailure::NotSupported { .. } | DispatchFailure::IllegalInstruction { .. } => 4,
                DispatchFailure::Aperture { .. } => 6,
                DispatchFailure::Dimensions => 16,
                DispatchFailure::GroupSegment => 17,
                DispatchFailure::Code { .. } => 18,
                DispatchFailure::WorkgroupSize => 21,
                DispatchFailure::Registers => 22,
            },
        })
    }
}
