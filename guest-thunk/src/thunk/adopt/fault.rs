//! Holds writers to a range by userfaultfd's write protection.
//!
//! Full userfaultfd, which serves the kernel's own faults too: a system call that writes to the range waits in the kernel and
//! goes on afterwards. One for user mode alone would let the call fail, and what it had read from a socket would be lost.

use std::io;
use std::ops::Range;

use super::signals::Blocked;
use crate::thunk::userfault::{Mode, UNPOPULATED, Userfault, WRITE_PROTECTION};

/// Who writes to the range waits as long as this lives; no signal is handled in this thread. Whoever has it must not
/// write to the range, and so neither allocate nor take a lock.
#[derive(Debug)]
pub struct Protected {
    // Dropped first: the last close lets the writers go on.
    _faults: Userfault,
    _blocked: Blocked,
}

fn opened() -> io::Result<Userfault> {
    Userfault::full(WRITE_PROTECTION | UNPOPULATED)
}

/// Whether this process may do it, on this kernel.
pub fn is_available() -> bool {
    opened().is_ok()
}

impl Protected {
    /// Protects a range of whole pages of private anonymous memory.
    pub fn new(range: &Range<u64>) -> io::Result<Protected> {
        let faults = opened()?;
        let (start, length) = (range.start, range.end.saturating_sub(range.start));
        let blocked = Blocked::new();
        faults.register(start, length, Mode::Protected)?;
        faults.protect(start, length)?;
        Ok(Protected { _faults: faults, _blocked: blocked })
    }
}
