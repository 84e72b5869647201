//! What a wave sees of the rest of the machine: memory, clock, messages, global wave sync.

use crate::gws;

/// An access to memory that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BusFault {
    /// No page there, or none for this access.
    #[error("address {va:#x} cannot be {}", if *write { "written" } else { "read" })]
    Page {
        /// The first byte that could not be accessed.
        va: u64,
        /// It was to be written.
        write: bool,
    },
    /// An atomic operation on an address that is no multiple of its size.
    #[error("an atomic operation on {size} bytes at {va:#x} is not aligned")]
    Unaligned {
        /// The address.
        va: u64,
        /// Bytes of the operation.
        size: u32,
    },
}

/// Bytes at addresses.
pub trait Space {
    /// Reads bytes.
    ///
    /// # Errors
    /// The fault at the first byte that could not be read.
    fn load(&mut self, va: u64, to: &mut [u8]) -> Result<(), BusFault>;

    /// Writes bytes.
    ///
    /// # Errors
    /// The fault at the first byte that could not be written; what lies before it was written.
    fn store(&mut self, va: u64, from: &[u8]) -> Result<(), BusFault>;

    /// Reads words from `va` on, a multiple of 4, none of which tears.
    ///
    /// # Errors
    /// The fault at the first word that could not be read.
    fn load_words(&mut self, va: u64, to: &mut [u32]) -> Result<(), BusFault>;

    /// Writes words from `va` on, a multiple of 4, none of which tears.
    ///
    /// # Errors
    /// The fault at the first word that could not be written; what lies before it was written.
    fn store_words(&mut self, va: u64, from: &[u32]) -> Result<(), BusFault>;

    /// Changes a word of 32 bits as one operation; what it was before. `change` may run several times.
    ///
    /// # Errors
    /// The fault; nothing was changed then.
    fn atomic32(&mut self, va: u64, change: impl Fn(u32) -> u32) -> Result<u32, BusFault>;

    /// The same for 64 bits.
    ///
    /// # Errors
    /// The fault; nothing was changed then.
    fn atomic64(&mut self, va: u64, change: impl Fn(u64) -> u64) -> Result<u64, BusFault>;
}

/// Memory that all waves share, and what else a wave reaches.
pub trait Bus: Space {
    /// The machine's clock in ticks (`s_memtime`, `s_memrealtime`).
    fn clock(&mut self) -> u64;

    /// `s_sendmsg` with the message in the low bits of `message`, and M0.
    fn message(&mut self, message: u16, m0: u32);

    /// What was written before is seen by others before what is written after, and the other way round for reads.
    fn fence(&mut self);

    /// Global wave sync, see [`gws::Gws::ask`].
    fn gws(
        &mut self,
        resource: u32,
        operation: gws::Operation,
        ticket: Option<gws::Ticket>,
    ) -> Option<gws::Ticket>;

    /// The cache of instructions is invalid (`s_icache_inv`).
    fn invalidate_code(&mut self);

    /// Accesses took so long that waves shall stop running for now, as if their instructions were used up.
    fn is_exhausted(&self) -> bool {
        false
    }
}
