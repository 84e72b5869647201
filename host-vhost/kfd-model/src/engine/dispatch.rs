//! Where kernels go: the seam between packet processors and whatever runs the instruction set.

use super::memory::at;
use super::{Context, DispatchFailure, Failure};

/// Number of shader registers that a compute queue keeps (`PACKET3_SET_SH_REG_START` to `_END`).
pub const SH_REGISTERS: usize = 0x400;

/// Offset of `COMPUTE_PGM_LO` among the shader registers; `COMPUTE_PGM_HI`, of which 8 bits count, follows. The
/// code's address is in units of 256 bytes.
pub const COMPUTE_PGM_LO: usize = 0x20c;

/// A kernel to be run.
#[derive(Clone, Copy, Debug)]
pub enum Dispatch<'a> {
    /// From an AQL packet.
    Aql(&'a AqlDispatch),
    /// From DISPATCH_DIRECT and the registers before it.
    Registers(RegisterDispatch<'a>),
}

/// A KERNEL_DISPATCH packet and what belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AqlDispatch {
    /// The packet (`hsa_kernel_dispatch_packet_t`) as 16 words.
    pub packet: [u32; 16],
    /// GPU address of the packet in its ring.
    pub packet_address: u64,
    /// Index of the packet.
    pub index: u64,
    /// GPU address of the queue's `amd_queue_t`. `None` when the queue's read pointer is in none.
    pub amd_queue: Option<u64>,
}

impl AqlDispatch {
    /// `kernel_object`.
    pub fn kernel_object(&self) -> u64 {
        let [.., low, high, _, _, _, _, _, _] = self.packet;
        u64::from(low) | u64::from(high) << 32
    }
}

/// DISPATCH_DIRECT.
#[derive(Clone, Copy, Debug)]
pub struct RegisterDispatch<'a> {
    /// The queue's shader registers.
    pub registers: &'a [u32; SH_REGISTERS],
    /// Numbers of workgroups, or of work-items if the initiator says so.
    pub dimensions: [u32; 3],
    /// `COMPUTE_DISPATCH_INITIATOR`.
    pub initiator: u32,
}

impl RegisterDispatch<'_> {
    /// GPU address of the code.
    pub fn program(&self) -> u64 {
        let register = |index: usize| u64::from(self.registers.get(index).copied().unwrap_or(0));
        (register(COMPUTE_PGM_LO) | (register(COMPUTE_PGM_LO + 1) & 0xff) << 32) << 8
    }
}

/// How a kernel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatched {
    /// All of it ran.
    Done,
    /// [`Context::stopping`] asked for the end before. The same packet is dispatched again if the queue goes on.
    Stopped,
    /// The queue's scratch memory is not enough. The runtime is told through `queue_inactive_signal`, and the packet is
    /// dispatched again once it has set the signal back to 0.
    InsufficientScratch {
        /// Waves have 32 lanes (else 64).
        wave32: bool,
    },
}

/// What runs kernels.
pub trait Dispatcher: Send + Sync {
    /// Runs a kernel to its end. A long one looks at [`Context::stopping`] now and then.
    ///
    /// # Errors
    /// What stops the queue.
    fn dispatch(&self, dispatch: &Dispatch<'_>, context: &Context<'_>) -> Result<Dispatched, Failure>;
}

/// Offset of `kernel_code_entry_byte_offset` in a kernel descriptor, and in an `amd_kernel_code_t` too.
const ENTRY_OFFSET: u64 = 16;

/// Runs the kernels that do nothing: those whose first instruction is `s_endpgm`. Any other is a failure that
/// says so.
#[derive(Clone, Copy, Debug)]
pub struct EmptyKernels {
    endpgm: u32,
}

impl EmptyKernels {
    /// For a GPU of this major version.
    pub fn for_gfx(major: u32) -> Self {
        // SOPP opcode 1 up to gfx10, 48 from gfx11 on; the low 16 bits are an operand.
        Self { endpgm: if major >= 11 { 0xbfb0_0000 } else { 0xbf81_0000 } }
    }
}

impl Dispatcher for EmptyKernels {
    fn dispatch(&self, dispatch: &Dispatch<'_>, context: &Context<'_>) -> Result<Dispatched, Failure> {
        let pc = match dispatch {
            Dispatch::Aql(aql) => {
                let object = aql.kernel_object();
                if object == 0 {
                    return Err(DispatchFailure::Code { kernel_object: object }.into());
                }
                object.wrapping_add(context.memory.load64(at(object, ENTRY_OFFSET)?)?)
            }
            Dispatch::Registers(dispatch) => dispatch.program(),
        };
        let instruction = context.memory.load32(pc)?;
        if instruction & 0xffff_0000 == self.endpgm {
            Ok(Dispatched::Done)
        } else {
            Err(DispatchFailure::NotSupported { pc, instruction }.into())
        }
    }
}
