//! How workers give memory of the pool back: asked for at once, waited for by a thread of its own.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Instant;

use virtio_kfd_protocol::ShareToken;

use super::{Claim, Pool};
use crate::session::Reclaiming;

/// Ends the use of a file's memory by workers.
pub trait Reclaim: Send + Sync {
    /// Tells the workers to give the memory of this name back.
    fn begin(&self, name: ShareToken) -> Reclaiming;
    /// How that stands, having begun at `since`.
    fn look(&self, reclaiming: &Reclaiming, since: Instant) -> Progress;
    /// Returns when that may be another, and after a moment in any case.
    fn wait(&self);
}

/// How the end of a file's use by workers stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// No worker touches the memory any more.
    Over,
    /// A worker may still touch it.
    Pending,
    /// A worker has not given it back in time.
    Kept,
}

/// A file whose memory workers are to give back.
#[derive(Clone, Debug)]
pub(super) struct Ending {
    node: u64,
    reclaiming: Reclaiming,
    since: Instant,
}

impl Pool {
    /// Takes a file's memory from the workers. No lock is held meanwhile: they claim under their own.
    pub(super) fn end_claim(&self, node: u64, workers: &dyn Reclaim) {
        let name = {
            let mut store = self.store();
            let Some(file) = store.files.get_mut(&node) else { return };
            match file.claim {
                Claim::Had => {
                    file.claim = Claim::Ending;
                    file.name
                }
                // Nobody gets it from now on, and nobody has it.
                Claim::Free | Claim::Over => {
                    file.claim = Claim::Over;
                    drop(store);
                    return self.finish(node, Progress::Over);
                }
                Claim::Ending => return,
            }
        };
        let ending = Ending { node, reclaiming: workers.begin(name), since: Instant::now() };
        self.store().endings.push(ending);
        self.settle(workers);
    }

    /// Takes over what workers have given back. Returns whether there is more to come.
    pub(super) fn settle(&self, workers: &dyn Reclaim) -> bool {
        let endings = self.store().endings.clone();
        for Ending { node, reclaiming, since } in endings {
            let progress = workers.look(&reclaiming, since);
            if progress != Progress::Pending {
                self.finish(node, progress);
            }
        }
        !self.store().endings.is_empty()
    }

    fn finish(&self, node: u64, progress: Progress) {
        let mut store = self.store();
        store.endings.retain(|ending| ending.node != node);
        let Some(file) = store.files.get_mut(&node) else { return };
        file.claim = Claim::Over;
        let places = std::mem::take(&mut file.ending);
        if progress == Progress::Over {
            for place in places {
                self.clear(&mut store, place);
            }
        } else {
            tracing::error!("a worker keeps memory of the pool: that part of it is not used again");
            let more = std::mem::take(&mut file.places);
            for place in places.into_iter().chain(more.into_values()) {
                store.lose(place);
            }
        }
        store.drop_forgotten(node);
    }
}

/// The thread that waits for workers. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Reclaimer {
    bell: Sender<()>,
}

impl Reclaimer {
    pub(super) fn start(pool: &Arc<Pool>, workers: &Arc<dyn Reclaim>) -> std::io::Result<Self> {
        let (bell, rings) = channel();
        let (pool, workers) = (Arc::downgrade(pool), Arc::downgrade(workers));
        std::thread::Builder::new().name("reclaim".into()).spawn(move || attend(&rings, &pool, &workers))?;
        Ok(Reclaimer { bell })
    }

    /// There is something to wait for.
    pub(super) fn ring(&self) {
        // Without the thread the process is about to end.
        let _ = self.bell.send(());
    }
}

fn attend(rings: &Receiver<()>, pool: &Weak<Pool>, workers: &Weak<dyn Reclaim>) {
    while rings.recv().is_ok() {
        while let (Some(pool), Some(workers)) = (pool.upgrade(), workers.upgrade()) {
            if !pool.settle(&*workers) {
                break;
            }
            workers.wait();
        }
    }
}
