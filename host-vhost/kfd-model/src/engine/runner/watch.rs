//! The thread that looks at the doorbells of queues that sleep.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Patience, Shared, lock, spawn};

/// Starts the watch.
pub(super) fn start(shared: &Arc<Shared>) -> io::Result<()> {
    let shared = shared.clone();
    // Nobody waits for its end: it ends by itself, and holds nothing but its share of `Shared`.
    spawn("kfd-doorbells".to_owned(), move || watch(&shared)).map(drop)
}

fn watch(shared: &Arc<Shared>) {
    let mut last_ring = Instant::now();
    let mut registry = lock(&shared.registry);
    while !registry.queues.is_empty() {
        registry.rang = false;
        for queue in &registry.queues {
            if queue.is_rung() {
                last_ring = Instant::now();
                // Where no thread can be started now, the next look tries again.
                let _ = queue.wake(shared);
            }
        }
        let pause = pause(&shared.patience, last_ring.elapsed());
        registry = match shared.look.wait_timeout_while(registry, pause, |registry| !registry.rang) {
            Ok((registry, _)) => registry,
            Err(poisoned) => poisoned.into_inner().0,
        };
    }
    registry.watched = false;
}

/// The pause until the next look, after so long without a ring: an eighth of it, within bounds.
fn pause(patience: &Patience, quiet: Duration) -> Duration {
    (quiet / 8).clamp(patience.shortest, patience.longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_silence() {
        let patience = Patience::default();
        let pause = |micros| super::pause(&patience, Duration::from_micros(micros)).as_micros();
        assert_eq!([0, 400, 800, 4000, 8000, 1_000_000].map(pause), [50, 50, 100, 500, 1000, 1000]);
    }
}
