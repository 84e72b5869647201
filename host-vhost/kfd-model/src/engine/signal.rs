//! Signals (`amd_signal_t`), as a packet processor sees them.

use std::sync::atomic::Ordering;

use super::memory::at;
use super::{Context, Failure, Interrupt};

/// Offset of `value`, 64 bits signed.
pub const VALUE: u64 = 8;
/// Offset of `event_mailbox_ptr`, 0 when nobody sleeps on the signal; `event_id`, 32 bits, follows.
pub const EVENT_MAILBOX_PTR: u64 = 16;
/// Offset of `start_ts`; `end_ts` follows.
pub const START_TS: u64 = 32;

/// A signal by its handle, which is its GPU address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal(u64);

impl Signal {
    /// The signal of a handle; `None` for the null handle.
    pub fn new(handle: u64) -> Option<Self> {
        (handle != 0).then_some(Self(handle))
    }

    /// GPU address of its value.
    pub(crate) fn value_address(self) -> Result<u64, Failure> {
        at(self.0, VALUE)
    }

    /// Its value.
    pub(crate) fn value(self, context: &Context<'_>) -> Result<u64, Failure> {
        context.memory.load64(self.value_address()?)
    }

    /// A packet is done: time stamps, then one less than before, then whoever sleeps is woken.
    pub(crate) fn complete(self, context: &Context<'_>, start: u64) -> Result<(), Failure> {
        // Read before the value changes: the owner may free the signal once it sees the last one.
        let wake = self.wake(context)?;
        let mut stamps = [0u8; 16];
        for (bytes, stamp) in stamps.as_chunks_mut().0.iter_mut().zip([start, context.world.timestamp()]) {
            *bytes = stamp.to_le_bytes();
        }
        context.memory.write(at(self.0, START_TS)?, &stamps)?;
        context.memory.update64(self.value_address()?, &mut |value| value.fetch_sub(1, Ordering::AcqRel))?;
        wake.run(context)
    }

    /// Stores a value and wakes whoever sleeps.
    pub(crate) fn store(self, context: &Context<'_>, value: u64) -> Result<(), Failure> {
        let wake = self.wake(context)?;
        context.memory.store64(self.value_address()?, value)?;
        wake.run(context)
    }

    fn wake(self, context: &Context<'_>) -> Result<Wake, Failure> {
        let mut words = [0u32; 3];
        context.memory.read_words(at(self.0, EVENT_MAILBOX_PTR)?, &mut words)?;
        let [low, high, event] = words;
        Ok(Wake { mailbox: u64::from(low) | u64::from(high) << 32, event })
    }
}

/// How to wake whoever sleeps on a signal.
struct Wake {
    mailbox: u64,
    event: u32,
}

impl Wake {
    fn run(self, context: &Context<'_>) -> Result<(), Failure> {
        if self.mailbox != 0 {
            context.memory.store64(self.mailbox, u64::from(self.event))?;
            context.world.interrupt(Interrupt::EndOfPipe(self.event));
        }
        Ok(())
    }
}
