//! Waiting for the device.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::transport::{Result, TransportError};

#[derive(Default)]
struct State {
    response: Option<Vec<u8>>,
    signalled: bool,
    failed: Option<String>,
}

/// A command that the device has, and whoever waits for it.
#[derive(Default)]
pub(super) struct Pending {
    state: Mutex<State>,
    wake: Condvar,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The response has come, and with it the fence if that `signals`. Who waits for both is woken once.
    pub(super) fn done(&self, response: Vec<u8>, signals: bool) {
        let mut state = self.lock();
        state.response = Some(response);
        state.signalled |= signals;
        drop(state);
        self.wake.notify_all();
    }

    /// The fence has completed, by this command's response or by a later one.
    pub(super) fn signal(&self) {
        self.lock().signalled = true;
        self.wake.notify_all();
    }

    /// Neither will come.
    pub(super) fn fail(&self, why: &str) {
        self.lock().failed.get_or_insert_with(|| why.to_owned());
        self.wake.notify_all();
    }

    /// Waits for the response.
    pub(super) fn response(&self, limit: Duration) -> Result<Vec<u8>> {
        self.wait(limit, "response", |state| state.response.take())
    }

    /// Waits for the fence. Gives the response, if it has come with it.
    pub(super) fn fence(&self, limit: Duration) -> Result<Option<Vec<u8>>> {
        self.wait(limit, "fence", |state| state.signalled.then(|| state.response.take()))
    }

    fn wait<T>(
        &self,
        limit: Duration,
        what: &'static str,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now().checked_add(limit);
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if let Some(why) = &state.failed {
                return Err(TransportError::Lost(why.clone()));
            }
            state = match deadline {
                None => self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        let limit = limit.as_secs();
                        return Err(TransportError::Lost(format!("no {what} of the device in {limit} s")));
                    }
                    self.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
