//! Memory of the pool in contexts (ADR 3). To a worker it is what a GUEST blob is: runs in a region of the guest's memory,
//! for QEMU sends the pool's window back as one.

use std::sync::Arc;

use virtio_kfd_protocol::ShareToken;

use super::blob::{Kind, NOBODY};
use super::{Answer, Session, Step, Token, refuse};
use crate::command::{CreateBlob, Response};
use crate::memory::RunList;
use crate::pool::{GRANULE, Pool};

/// What has to come to pass before no worker touches a piece of the pool any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaiming {
    /// The blob, and its number that is never used again.
    resource: Option<(u32, u64)>,
    /// Workers that were ending already: what they had is not known any more.
    ending: Vec<u64>,
    /// Workers that had it. When the device is stopped the blob is forgotten before they are gone.
    holders: Vec<u64>,
}

impl Session {
    /// Serves blobs from this pool as well.
    pub fn set_pool(&mut self, pool: Arc<Pool>) {
        self.pool = Some(pool);
    }

    /// Whether a name is one of the pool's.
    pub(super) fn is_pooled(&self, name: ShareToken) -> bool {
        self.pool.as_ref().is_some_and(|pool| pool.has(name))
    }

    /// A blob over a file of the pool, of at most its size.
    pub(super) fn create_pooled_blob(
        &mut self,
        owner: u64,
        request: &CreateBlob,
        name: ShareToken,
    ) -> Answer {
        let nothing =
            || refuse(Response::InvalidParameter, "no memory of the pool can be had under this name");
        let Some(pool) = self.pool.clone() else { return nothing() };
        let Some(base) = self.memory.regions().iter().find(|region| region.is(pool.id())).map(|r| r.base)
        else {
            return refuse(Response::Unspecified, "the VMM has not said where in the guest the pool lies");
        };
        let Some(places) = pool.claim(name) else { return nothing() };
        let mut list = RunList::default();
        for place in places {
            let pushed = list.push(&self.memory, base.saturating_add(place), GRANULE);
            if let Err(error) = pushed {
                return refuse(Response::InvalidParameter, error);
            }
        }
        if list.total() < request.size {
            let total = list.total();
            return refuse(
                Response::InvalidParameter,
                format_args!("the file has {total:#x} bytes, the blob {:#x}", request.size),
            );
        }
        let resource = request.resource_id;
        let kind = Kind::Guest { size: request.size, runs: list.into_runs(), over_limit: false };
        self.insert(resource, None, kind);
        if let Err(refusal) = self.give_to_worker(resource, owner) {
            self.forget(resource);
            return Err(refusal);
        }
        if let Some(serial) = self.resources.get(&resource).map(|entry| entry.serial) {
            self.pooled.insert(name, (resource, serial));
        }
        Ok(Step::Done(Response::Ok))
    }

    /// The guest's kernel ends the memory of a name. Workers are told to give it back; what the guest's driver has yet to
    /// say about the blob finds a number that stands for nothing.
    pub fn begin_reclaim(&mut self, name: ShareToken) -> Reclaiming {
        let ending = self.workers.values().filter(|worker| worker.ending).map(|worker| worker.id).collect();
        let resource = self.pooled.remove(&name);
        let mut reclaiming = Reclaiming { resource, ending, holders: Vec::new() };
        let Some((resource, serial)) = reclaiming.resource else { return reclaiming };
        let Some(entry) = self.resources.get_mut(&resource).filter(|entry| entry.serial == serial) else {
            return reclaiming;
        };
        let holders = entry.holders();
        reclaiming.holders.clone_from(&holders);
        if !entry.leaving {
            entry.leaving = true;
            self.reclaiming.insert(resource, None);
            self.take_back(resource, &holders, Token::NONE);
        }
        reclaiming
    }

    /// A blob that the pool took back is gone. Its number stays until the guest's driver has given it up.
    pub(super) fn leave_number(&mut self, resource: u32) {
        match self.reclaiming.remove(&resource) {
            Some(Some(token)) => self.commands.finish(token, Response::Ok),
            Some(None) => {
                let kind = Kind::Guest { size: 0, runs: Vec::new(), over_limit: false };
                self.insert(resource, Some(NOBODY), kind);
            }
            None => {}
        }
    }

    /// Whether it has come to pass.
    pub fn is_reclaimed(&self, reclaiming: &Reclaiming) -> bool {
        let there = |(resource, serial): (u32, u64)| {
            self.resources.get(&resource).is_some_and(|entry| entry.serial == serial)
        };
        let alive = |worker: &u64| self.workers.contains_key(worker);
        let ending = |worker: &u64| self.workers.get(worker).is_some_and(|worker| worker.ending);
        !reclaiming.resource.is_some_and(there)
            && !reclaiming.ending.iter().any(alive)
            && !reclaiming.holders.iter().any(ending)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use kfd_ipc::worker::SharedPiece;

    use super::*;
    use crate::pool::Owner;
    use crate::session::context::tests::session;

    fn token(number: u64) -> ShareToken {
        ShareToken::from_blob_id(ShareToken::BIT | number).unwrap()
    }

    /// A blob of the pool that worker 1 has.
    fn pooled(session: &mut Session, name: ShareToken) {
        session.insert(7, Some(1), Kind::Guest { size: GRANULE, runs: Vec::new(), over_limit: false });
        session.pooled.insert(name, (7, session.resources[&7].serial));
    }

    #[test]
    fn a_worker_that_hangs_beyond_a_stop_still_has_the_memory() {
        let (mut session, _supervisor) = session(&[(1, None), (2, None)]);
        pooled(&mut session, token(1));
        let reclaiming = session.begin_reclaim(token(1));
        assert!(!session.is_reclaimed(&reclaiming), "asked");
        session.begin_stop();
        session.finish_stop();
        assert!(!session.resources.contains_key(&7), "the blob is forgotten");
        session.workers.remove(&2);
        assert!(!session.is_reclaimed(&reclaiming), "worker 1 is alive");
        session.workers.remove(&1);
        assert!(session.is_reclaimed(&reclaiming));
    }

    #[test]
    fn a_worker_that_gave_it_back_may_live_on() {
        let (mut session, _supervisor) = session(&[(1, None)]);
        pooled(&mut session, token(1));
        let reclaiming = session.begin_reclaim(token(1));
        session.gave_back(7, Token::NONE);
        assert!(session.is_reclaimed(&reclaiming));
    }

    #[test]
    fn a_file_does_not_take_the_name_of_shared_memory() {
        let (mut session, _supervisor) = session(&[(1, None), (2, None)]);
        let pool = Arc::new(Pool::new(4 * GRANULE).unwrap());
        session.set_pool(pool.clone());
        let piece = SharedPiece { offset: 0, size: 4096, handle: 3, vram: 4096, memory: None };
        let dmabuf: OwnedFd = tempfile::tempfile().map(File::into).unwrap();
        session.share(1, token(5).0, piece, vec![dmabuf]);
        let node = pool.create(token(5), Owner::default()).unwrap();
        pool.resize(node, GRANULE).unwrap();
        pool.place(node, 0, 0).unwrap();
        let request = CreateBlob {
            resource_id: 9,
            blob_id: token(5).0,
            size: 4096,
            blob_mem: 0,
            blob_flags: 0,
            nr_entries: 0,
        };
        let made = session.create_host_blob(Token::NONE, 2, request);
        assert!(matches!(made, Ok(Step::Done(Response::Ok))));
        assert!(matches!(session.resources[&9].kind, Kind::Host(_)), "what was shared");
        assert!(pool.claim(token(5)).is_some(), "nobody took the file's memory");
    }
}
