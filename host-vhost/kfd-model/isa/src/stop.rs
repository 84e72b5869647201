//! Why a wave cannot go on.

use crate::bus::BusFault;
use crate::op::Op;

/// Why an instruction was not executed. The wave's PC is behind the instruction then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stop {
    /// The words are no instruction, or its operands make none.
    #[error("the instruction is illegal")]
    Illegal,
    /// An instruction that there is and that is not implemented here.
    #[error("{name} is not implemented")]
    NotSupported {
        /// Its mnemonic.
        name: &'static str,
    },
    /// An access to memory failed.
    #[error(transparent)]
    Fault(#[from] BusFault),
    /// A flat address in no aperture.
    #[error("address {va:#x} is in no aperture")]
    Aperture {
        /// The address.
        va: u64,
    },
    /// Nothing is wrong: the instruction has to be executed again, since what it waits for has not happened.
    #[error("the wave waits")]
    Wait,
    /// `s_trap`, and no handler that goes on after it.
    #[error("trap {id}")]
    Trap {
        /// Number of the trap.
        id: u8,
    },
}

impl Stop {
    /// An opcode that is not implemented.
    #[cold]
    pub fn not_supported(op: Op) -> Self {
        Self::NotSupported { name: op.row().name }
    }
}
