//! VRAM of buffers whose context has ended while blobs of other contexts hold it: it counts for the VM until they are gone.

use std::collections::HashMap;

use kfd_ipc::ledger::Counted;

use super::Session;
use super::blob::Kind;

/// Which buffer a blob shows, and what that costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The worker that allocated it.
    pub worker: u64,
    /// Its handle there.
    pub handle: u64,
    /// Bytes of VRAM, as the worker said.
    pub vram: u64,
}

/// Buffers of workers that are gone: bytes of VRAM, and how many blobs hold each.
#[derive(Debug, Default)]
pub struct Orphans {
    buffers: HashMap<(u64, u64), (u64, usize)>,
}

impl Orphans {
    fn add(&mut self, origin: Origin) {
        let (vram, blobs) = self.buffers.entry((origin.worker, origin.handle)).or_default();
        *vram = (*vram).max(origin.vram);
        *blobs = blobs.saturating_add(1);
    }

    fn remove(&mut self, origin: Origin) {
        let key = (origin.worker, origin.handle);
        if let Some((_, blobs)) = self.buffers.get_mut(&key) {
            *blobs = blobs.saturating_sub(1);
            if *blobs == 0 {
                self.buffers.remove(&key);
            }
        }
    }

    fn vram(&self) -> u64 {
        self.buffers.values().map(|(vram, _)| *vram).fold(0, u64::saturating_add)
    }
}

impl Session {
    /// A worker is gone. What blobs still hold of its memory is counted in the device's own slot from now on, before
    /// the worker's slot is cleared, so that it is never counted nowhere.
    pub(super) fn orphan_buffers(&mut self, worker: u64, slot: usize) {
        for resource in self.host_blobs.iter().filter_map(|resource| self.resources.get(resource)) {
            if let Kind::Host(host) = &resource.kind
                && let Some(origin) = host.origin.filter(|origin| origin.worker == worker)
            {
                self.orphans.add(origin);
            }
        }
        self.count_orphans();
        self.ledger.clear(slot);
    }

    /// A blob does not hold its memory any more.
    pub(super) fn leave_origin(&mut self, origin: Option<Origin>) {
        if let Some(origin) = origin {
            self.orphans.remove(origin);
            self.count_orphans();
        }
    }

    /// The device is stopped: nothing of it holds memory.
    pub(super) fn forget_orphans(&mut self) {
        self.orphans = Orphans::default();
        self.count_orphans();
    }

    fn count_orphans(&self) {
        self.ledger.set(self.config.max_contexts as usize, Counted::Vram, self.orphans.vram());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_counts_once_and_until_its_last_blob() {
        let mut orphans = Orphans::default();
        let of = |worker, handle| Origin { worker, handle, vram: 10 };
        for origin in [of(1, 1), of(1, 1), of(1, 2), of(2, 1)] {
            orphans.add(origin);
        }
        assert_eq!(orphans.vram(), 30);
        orphans.remove(of(1, 1));
        orphans.remove(of(7, 7));
        assert_eq!(orphans.vram(), 30);
        orphans.remove(of(1, 1));
        assert_eq!(orphans.vram(), 20);
    }
}
