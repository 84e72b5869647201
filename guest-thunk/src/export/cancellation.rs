//! Threads that are cancelled (`pthread_cancel(3)`) while they are in a call.
//!
//! AMD's library waits in ioctls, which are no cancellation points: the thread ends at the next one after the call. This one makes calls of
//! libc that are, and a cancellation there would unwind its frames, which ends the process: Rust catches a panic only.
#![allow(unsafe_code, reason = "a function of libc that the libc crate does not declare")]

use std::ffi::c_int;
use std::marker::PhantomData;

/// `PTHREAD_CANCEL_DISABLE` of glibc's `pthread.h`.
const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While it lives, a cancellation of this thread waits.
pub(super) struct Uncancelled {
    before: c_int,
    /// It is this thread's.
    _not_send: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Begins.
    pub(super) fn enter() -> Self {
        let mut before = 0;
        // SAFETY: the state is one that there is, and the pointer is to a local variable.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        Self { before, _not_send: PhantomData }
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        let mut disabled = 0;
        // SAFETY: the state is one that libc gave, and the pointer is to a local variable. In the default type of cancellation nothing
        // happens here; a thread that may be cancelled at any instruction may be so at this one.
        unsafe { pthread_setcancelstate(self.before, &raw mut disabled) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use hsakmt_abi::status::HsakmtStatus;

    use super::*;
    use crate::export::boundary;

    unsafe extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> c_int;
    }

    #[test]
    fn a_call_goes_on_to_its_end_in_a_thread_that_is_cancelled() {
        static CANCELLED: AtomicBool = AtomicBool::new(false);
        let (inside, enters) = channel();
        let thread = thread::spawn(move || {
            let status = boundary("test", || {
                // SAFETY: no pointer.
                inside.send(unsafe { libc::pthread_self() }).unwrap();
                // nanosleep(2) is a cancellation point (pthreads(7)).
                while !CANCELLED.load(Ordering::Acquire) {
                    thread::sleep(Duration::from_millis(1));
                }
                thread::sleep(Duration::from_millis(1));
                Ok(())
            });
            // The thread is Rust's, and has no end but its own.
            std::mem::forget(Uncancelled::enter());
            status
        });
        let own = enters.recv().unwrap();
        // SAFETY: the thread lives until it has seen what is stored below.
        assert_eq!(unsafe { pthread_cancel(own) }, 0);
        CANCELLED.store(true, Ordering::Release);
        assert_eq!(thread.join().unwrap(), HsakmtStatus::SUCCESS);
    }
}
