//! What there is where stores cannot be told from the instruction: no pages.

use std::convert::Infallible;
use std::io;

/// None.
pub struct Watched(Infallible);

impl Watched {
    /// An error.
    pub fn new(_address: u64) -> io::Result<Watched> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "stores cannot be told from instructions of this processor",
        ))
    }

    /// Never called.
    pub fn serve(&self, _flush: impl FnMut(u32)) {}
}

/// Nothing to do.
pub fn bell() -> u32 {
    0
}

/// Returns at once.
pub fn await_bell(_heard: u32) {}

/// Nobody hears it.
pub fn ring() {}
