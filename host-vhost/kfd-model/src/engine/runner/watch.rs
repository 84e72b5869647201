//! The thread that looks at the doorbells of queues that sleep.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Patience, Registry, Shared, lock, spawn};

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
        let asked = core::mem::take(&mut registry.rang);
        if look(&registry, shared) || asked {
            last_ring = Instant::now();
        }
        let quiet = last_ring.elapsed();
        // A queue that is at work can ring others by what it writes, which no trap is told of.
        let still = quiet >= shared.patience.still && registry.queues.iter().all(|queue| queue.is_quiet());
        let armed = still && shared.trap.arm();
        // What was stored before the doorbells trapped is seen now, what comes later is heard of.
        let rung = armed && look(&registry, shared);
        if rung {
            last_ring = Instant::now();
        }
        if rung || !still {
            shared.trap.disarm();
        }
        let quiet = last_ring.elapsed();
        let pause = if armed && !rung { shared.patience.trapped } else { pause(&shared.patience, quiet) };
        registry = match shared.look.wait_timeout_while(registry, pause, |registry| !registry.rang) {
            Ok((registry, _)) => registry,
            Err(poisoned) => poisoned.into_inner().0,
        };
    }
    registry.watched = false;
}

/// Looks at the doorbells of the queues that sleep. Whether any has rung.
fn look(registry: &Registry, shared: &Arc<Shared>) -> bool {
    let mut rang = false;
    for queue in registry.queues.iter().filter(|queue| queue.is_rung()) {
        rang = true;
        // Where no thread can be started now, the next look tries again.
        let _ = queue.wake(shared);
    }
    rang
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
