//! Threads that are cancelled (`pthread_cancel(3)`) while they are in the service.
//!
//! A call on a device is no cancellation point: the thread ends at the next one after it. The service makes calls of libc that are, and a
//! cancellation there would unwind its frames, which ends the process: Rust catches a panic only.
//!
//! Unsafe code: the function is libc's, which the libc crate does not declare.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::marker::PhantomData;

/// `PTHREAD_CANCEL_DISABLE` of glibc's `pthread.h`.
const DISABLE: c_int = 1;

unsafe extern "C" {
    /// `pthread_setcancelstate(3)`: a few instructions, also in signal handlers.
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While it lives, a cancellation of this thread waits.
pub struct Uncancelled {
    before: c_int,
    not_send: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Begins.
    pub fn enter() -> Self {
        let mut before = 0;
        // SAFETY: the state is one that there is, and the pointer is to a local variable.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self { before, not_send: PhantomData }
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        let mut disabled = 0;
        // SAFETY: the state is one that libc gave, and the pointer is to a local variable. In the default type of cancellation nothing happens
        // here; a thread that may be cancelled at any instruction may be so at this one.
        unsafe { pthread_setcancelstate(self.before, &raw mut disabled) };
    }
}
