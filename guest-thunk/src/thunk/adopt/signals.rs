//! Signals of the calling thread.
#![allow(unsafe_code, reason = "rt_sigprocmask")]

use std::marker::PhantomData;
use std::ptr;

/// No signal is handled in this thread as long as this lives: a handler could take locks or write to memory that is held.
/// Also not the C library's own two, which its sigprocmask leaves out.
#[derive(Debug)]
pub struct Blocked {
    before: u64,
    /// It belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl Blocked {
    /// Blocks them.
    pub fn new() -> Self {
        let (all, mut before) = (u64::MAX, 0u64);
        let (set, old) = (ptr::from_ref(&all), &raw mut before);
        // SAFETY: both sets live beyond the call and have the kernel's size. It cannot fail with valid arguments.
        let _ =
            unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, set, old, size_of::<u64>()) };
        Blocked { before, _thread: PhantomData }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let (set, old) = (ptr::from_ref(&self.before), ptr::null_mut::<u64>());
        // SAFETY: the set lives beyond the call and has the kernel's size.
        let _ =
            unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, set, old, size_of::<u64>()) };
    }
}
