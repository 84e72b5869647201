//! What the VM's process says of guest processes: so much of it that none can fill its log.

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines in each second.
const MOST: u32 = 10;

const SECOND: Duration = Duration::from_secs(1);

/// How many lines may be written.
struct Budget {
    /// When the second has begun, if there was a line.
    begin: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl Budget {
    const fn new() -> Budget {
        Budget { begin: None, written: 0, left_out: 0 }
    }

    /// Whether a line may be written; then also how many were not since the last one.
    fn take(&mut self, now: Instant) -> Option<u64> {
        if self.begin.is_none_or(|begin| now.saturating_duration_since(begin) >= SECOND) {
            (self.begin, self.written) = (Some(now), 0);
        }
        if self.written >= MOST {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.written = self.written.saturating_add(1);
        Some(std::mem::take(&mut self.left_out))
    }
}

static BUDGET: Mutex<Budget> = Mutex::new(Budget::new());

/// Writes a line to standard error.
pub(super) fn say(what: &str) {
    let Some(left_out) = BUDGET.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now()) else {
        return;
    };
    let more = if left_out > 0 { format!(" ({left_out} lines before were left out)") } else { String::new() };
    // Nothing better can be done where nobody reads it any more.
    let _ = writeln!(std::io::stderr(), "virtio-kfd: {what}{more}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_lines_a_second_and_then_how_many_there_would_have_been() {
        let (mut budget, begin) = (Budget::new(), Instant::now());
        let written = (0..1000).filter(|_| budget.take(begin).is_some()).count();
        assert_eq!(written, 10);
        assert_eq!(budget.take(begin + SECOND / 2), None);
        assert_eq!(budget.take(begin + SECOND), Some(991));
        assert_eq!(budget.take(begin + SECOND), Some(0));
    }
}
