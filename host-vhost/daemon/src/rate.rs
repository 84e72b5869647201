//! Logs that a guest causes, at a bounded rate.

use std::time::{Duration, Instant};

/// Lines in one period.
const LINES: u32 = 20;

/// The period.
const PERIOD: Duration = Duration::from_secs(10);

/// Most characters of what a worker says that get to the log.
const MAX_WORDS: usize = 512;

/// Allows `LINES` lines in each `PERIOD`, over all causes together.
#[derive(Debug)]
pub struct LogBudget {
    since: Instant,
    lines: u32,
    suppressed: u64,
}

impl Default for LogBudget {
    fn default() -> Self {
        LogBudget { since: Instant::now(), lines: 0, suppressed: 0 }
    }
}

impl LogBudget {
    /// Whether another line may be written now.
    pub fn allow(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.since) >= PERIOD {
            if self.suppressed > 0 {
                tracing::warn!("{} more lines that the guest caused were left out", self.suppressed);
            }
            *self = LogBudget { since: now, lines: 0, suppressed: 0 };
        }
        if self.lines >= LINES {
            self.suppressed = self.suppressed.saturating_add(1);
            return false;
        }
        self.lines = self.lines.saturating_add(1);
        true
    }
}

/// What a worker says, which may have been taken over by its guest process, as a piece of one line.
pub fn for_the_log(message: &str) -> String {
    let plain = |c: &char| c.is_ascii_graphic() || *c == ' ' || c.is_alphanumeric();
    let mut text: String = message
        .chars()
        .take(MAX_WORDS)
        .map(|c| if plain(&c) { c } else { char::REPLACEMENT_CHARACTER })
        .collect();
    if message.chars().nth(MAX_WORDS).is_some() {
        text.push_str(" ...");
    }
    text
}

/// Writes a warning that a guest caused, within the budget of the [`LogBudget`] that comes first.
#[macro_export]
macro_rules! guest_warn {
    ($budget:expr, $($arg:tt)*) => {
        if $budget.allow(std::time::Instant::now()) {
            tracing::warn!($($arg)*);
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_a_new_period_opens_it_again() {
        let mut budget = LogBudget::default();
        let start = budget.since;
        let passed = (0..1000).filter(|_| budget.allow(start)).count();
        assert_eq!(passed, LINES as usize);
        assert!(!budget.allow(start + PERIOD / 2));
        assert!(budget.allow(start + PERIOD));
    }

    #[test]
    fn a_worker_cannot_write_lines_of_its_own() {
        let kernel = "/dev/kfd: No such file or directory (os error 2)";
        assert_eq!(for_the_log(kernel), kernel);
        assert_eq!(for_the_log("a\nERROR b\u{1b}[2J\u{202e}é"), "a\u{fffd}ERROR b\u{fffd}[2J\u{fffd}é");
        let long = for_the_log(&"x".repeat(128 * 1024));
        assert_eq!((long.len(), long.ends_with("x ...")), (516, true));
    }
}
