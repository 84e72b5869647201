//! When the pump looks at the doorbells, and when it sleeps: no ring may be lost between the two.
//!
//! The guest says that its stores trap (armed) after it has made them trap, and takes that back, which wakes the pump,
//! before a store that trapped is let through. So a store is either in memory when the guest arms, or announced. The pump
//! sleeps for good only if a look that began after the arming is over; whoever changes anything else wakes it.
//!
//! Nothing here knows of time or of memory, so that all interleavings can be tried; the primitives come from `super::sync`.

use super::sync::{Condvar, Mutex, MutexGuard};

/// What the pump looks at.
pub trait Bells {
    /// Looks at every doorbell once and passes on what has changed. Returns whether anything had.
    fn look(&mut self) -> bool;
    /// Whether there are no doorbells to look at.
    fn is_empty(&self) -> bool;
}

/// What the pump and the calls share.
#[derive(Debug)]
pub struct State<B> {
    /// The doorbells.
    pub bells: B,
    /// Every store from the arming on is announced.
    armed: bool,
    /// Changes each time the pump has to look though it may be asleep.
    calls: u64,
}

/// A pump and those who call it.
#[derive(Debug)]
pub struct Handover<B> {
    state: Mutex<State<B>>,
    called: Condvar,
}

/// How a turn of the pump ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Something had changed.
    Rang,
    /// Nothing had; the next look must not be long off.
    Still,
    /// The pump was asleep, and was called.
    Woken,
}

impl<B: Bells> Handover<B> {
    /// No doorbells ring yet.
    pub fn new(bells: B) -> Self {
        Handover { state: Mutex::new(State { bells, armed: false, calls: 0 }), called: Condvar::new() }
    }

    /// The state, to look at or to change without waking the pump.
    pub fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Changes the doorbells, and has the pump look at them.
    pub fn change<R>(&self, change: impl FnOnce(&mut B) -> R) -> R {
        let mut state = self.lock();
        let result = change(&mut state.bells);
        self.call(&mut state);
        result
    }

    /// The guest says whether it announces its stores from now on. Either way the pump looks once more.
    pub fn arm(&self, armed: bool) {
        let mut state = self.lock();
        state.armed = armed;
        self.call(&mut state);
    }

    fn call(&self, state: &mut State<B>) {
        state.calls = state.calls.wrapping_add(1);
        self.called.notify_all();
    }

    /// The pump's part: looks at every doorbell; if that is all that has to be done, sleeps until called.
    pub fn turn(&self) -> Turn {
        let mut state = self.lock();
        if state.bells.look() {
            return Turn::Rang;
        }
        if !state.armed && !state.bells.is_empty() {
            return Turn::Still;
        }
        let calls = state.calls;
        while state.calls == calls {
            state = self.called.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        Turn::Woken
    }
}
