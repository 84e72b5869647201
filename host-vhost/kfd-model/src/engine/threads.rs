//! Threads of the model in somebody else's process.

use std::io;
use std::thread::JoinHandle;

use nix::sys::signal::{SigSet, SigmaskHow};

/// Starts a thread that no signal of the program is delivered to: a GPU has no signal handlers.
pub(crate) fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
    let thread = std::thread::Builder::new().name(name).spawn(body);
    if let Ok(before) = before {
        before.thread_set_mask()?;
    }
    thread
}
