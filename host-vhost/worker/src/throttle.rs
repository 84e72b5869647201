//! Logs that a guest can cause are bounded in number.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Length of a window.
const WINDOW: Duration = Duration::from_secs(10);
/// Messages in a window.
const MESSAGES: u32 = 20;

/// Lets [`MESSAGES`] pass in each [`WINDOW`].
#[derive(Debug, Default)]
pub struct Throttle {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    begin: Option<Instant>,
    passed: u32,
    held: u64,
}

impl Throttle {
    /// Runs `log` with the number of messages held back since the last one, or holds this one back.
    pub fn log(&self, log: impl FnOnce(u64)) {
        if let Some(held) = self.pass(Instant::now()) {
            log(held);
        }
    }

    fn pass(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let fresh = state.begin.is_none_or(|begin| now.saturating_duration_since(begin) >= WINDOW);
        if fresh {
            state.begin = Some(now);
            state.passed = 0;
        }
        if state.passed >= MESSAGES {
            state.held = state.held.saturating_add(1);
            return None;
        }
        state.passed = state.passed.saturating_add(1);
        Some(std::mem::take(&mut state.held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_twenty_first_message_of_a_window_is_held_back_and_counted() {
        let throttle = Throttle::default();
        let begin = Instant::now();
        for _ in 0..MESSAGES {
            assert_eq!(throttle.pass(begin), Some(0));
        }
        assert_eq!(throttle.pass(begin), None);
        assert_eq!(throttle.pass(begin), None);
        assert_eq!(throttle.pass(begin.checked_add(WINDOW).unwrap()), Some(2));
    }
}
