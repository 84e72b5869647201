//! The shared memory window: which host memory the guest sees where.

use std::collections::{BTreeMap, HashMap};

use kfd_ipc::worker::Caching;
use virtio_bindings::virtio_gpu as gpu;

use super::{Answer, Session, Step, Token, refuse};
use crate::budget::{MAX_MAPS_AND_REGIONS, PAGE, has_share};
use crate::command::{MapInfo, Response};
use crate::guest_warn;
use crate::mapper::{Job, Outcome};
use crate::memory::FileId;

#[derive(Debug)]
enum Doing {
    Map {
        resource: u32,
        token: Token,
    },
    Unmap {
        resource: u32,
        token: Token,
    },
    /// Its context has ended.
    Take {
        resource: u32,
    },
    /// The device was stopped meanwhile.
    Forgotten,
}

#[derive(Debug)]
struct Running {
    doing: Doing,
    offset: u64,
    file: FileId,
}

#[derive(Debug)]
struct Slot {
    /// The worker whose memory it is.
    owner: Option<u64>,
    len: u64,
    file: FileId,
    /// The VMM has said that it is mapped.
    done: bool,
}

/// The window.
#[derive(Debug)]
pub struct Window {
    size: u64,
    enabled: bool,
    slots: BTreeMap<u64, Slot>,
    /// Maps from before a stop.
    stale: BTreeMap<u64, Slot>,
    /// Maps of this VMM come back as memory regions.
    come_back: bool,
    jobs: HashMap<u64, Running>,
    last_job: u64,
}

impl Window {
    /// A window of this many bytes, not known to the VMM yet.
    pub fn new(size: u64) -> Self {
        Window {
            size,
            enabled: false,
            slots: BTreeMap::new(),
            stale: BTreeMap::new(),
            come_back: false,
            jobs: HashMap::new(),
            last_job: 0,
        }
    }

    /// The VMM knows it.
    pub fn enable(&mut self) {
        self.enabled = true;
    }

    /// Whether the VMM knows it.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Whether memory of this file is mapped, or is about to be mapped or unmapped.
    pub fn has_file(&self, file: FileId) -> bool {
        let in_slot = |slots: &BTreeMap<u64, Slot>| slots.values().any(|slot| slot.file == file);
        in_slot(&self.slots) || in_slot(&self.stale) || self.jobs.values().any(|job| job.file == file)
    }

    /// A map has come back as a memory region.
    pub fn set_come_back(&mut self) {
        self.come_back = true;
    }

    /// Whether `len` bytes at `offset` are in the window and free.
    fn check(&self, offset: u64, len: u64) -> Result<(), String> {
        let end = offset.checked_add(len).filter(|end| *end <= self.size);
        let Some(end) = end.filter(|_| offset.is_multiple_of(PAGE)) else {
            return Err(format!("{len:#x} bytes at {offset:#x} of a window of {:#x} bytes", self.size));
        };
        let before = self.slots.range(..end).next_back();
        match before {
            Some((at, slot)) if at.saturating_add(slot.len) > offset => {
                Err(format!("{len:#x} bytes at {offset:#x} overlap {:#x} bytes at {at:#x}", slot.len))
            }
            _ => Ok(()),
        }
    }

    fn start(&mut self, doing: Doing, offset: u64, file: FileId) -> u64 {
        self.last_job = self.last_job.wrapping_add(1);
        self.jobs.insert(self.last_job, Running { doing, offset, file });
        self.last_job
    }
}

impl Session {
    pub(super) fn map(&mut self, resource: u32, token: Token, offset: u64) -> Answer {
        let live = self.window.slots.len().saturating_add(self.memory.regions().len());
        let owner = self.resources.get(&resource).and_then(|entry| entry.owner);
        let own = self.window.slots.values().filter(|slot| slot.owner == owner).count();
        let enabled = self.window.enabled;
        let Some(host) = self.host_blob(resource) else {
            return refuse(Response::InvalidResource, format_args!("there is no resource {resource}"));
        };
        if !enabled {
            return refuse(Response::Unspecified, "this VMM has no shared memory window");
        }
        if let Some(at) = host.mapped_at {
            return refuse(Response::InvalidParameter, format_args!("it is mapped already, at {at:#x}"));
        }
        let Some(memory) = host.memory.clone() else {
            return refuse(Response::InvalidResource, "it has no memory that a CPU can see");
        };
        let len = host.size;
        if !has_share(own, live, MAX_MAPS_AND_REGIONS) {
            return refuse(
                Response::OutOfMemory,
                format_args!("{live} maps and memory regions are in use, {own} of them by this context"),
            );
        }
        if let Err(why) = self.window.check(offset, len) {
            return refuse(Response::InvalidParameter, why);
        }
        if let Some(host) = self.host_blob(resource) {
            host.busy = true;
            host.mapped_at = Some(offset);
        }
        self.window.slots.insert(offset, Slot { owner, len, file: memory.id, done: false });
        let job = self.window.start(Doing::Map { resource, token }, offset, memory.id);
        let job = Job::Map { job, file: memory.file, id: memory.id, file_offset: memory.offset, offset, len };
        self.submit_job(job);
        Ok(Step::Pending)
    }

    pub(super) fn unmap(&mut self, resource: u32, token: Token) -> Answer {
        if self.host_blob(resource).is_some_and(|host| std::mem::take(&mut host.taken)) {
            return Ok(Step::Done(Response::Ok));
        }
        if !self.start_unmap(resource, Doing::Unmap { resource, token }) {
            return refuse(Response::InvalidParameter, format_args!("resource {resource} is not mapped"));
        }
        Ok(Step::Pending)
    }

    /// A blob has become another worker's, and its map with it.
    pub(super) fn inherit_map(&mut self, resource: u32, heir: u64) {
        let at = self.host_blob(resource).and_then(|host| host.mapped_at);
        if let Some(slot) = at.and_then(|at| self.window.slots.get_mut(&at)) {
            slot.owner = Some(heir);
        }
    }

    /// Unmaps a blob that is not busy, without being asked by the guest: its context has ended.
    pub(super) fn take_map(&mut self, resource: u32) {
        self.start_unmap(resource, Doing::Take { resource });
    }

    /// `false` if it is not mapped.
    fn start_unmap(&mut self, resource: u32, doing: Doing) -> bool {
        let found = self.host_blob(resource).and_then(|host| host.mapped_at);
        let Some((offset, slot)) = found.and_then(|at| self.window.slots.get(&at).map(|slot| (at, slot)))
        else {
            return false;
        };
        let (len, file) = (slot.len, slot.file);
        if let Some(host) = self.host_blob(resource) {
            host.busy = true;
        }
        let job = self.window.start(doing, offset, file);
        self.submit_job(Job::Unmap { job, id: file, offset, len });
        true
    }

    fn submit_job(&mut self, job: Job) {
        if !self.mapper.submit(job) {
            tracing::error!("the mapper thread is gone: nothing can be mapped any more");
        }
    }

    /// The VMM has mapped or unmapped, or refused to.
    pub(super) fn map_outcome(&mut self, outcome: Outcome) {
        let Some(Running { doing, offset, .. }) = self.window.jobs.remove(&outcome.job) else { return };
        match doing {
            Doing::Map { resource, token } => {
                if let (Ok(()), Some(slot)) = (&outcome.result, self.window.slots.get_mut(&offset)) {
                    slot.done = true;
                }
                let response = match outcome.result {
                    Ok(()) => match self.host_blob(resource).and_then(|host| host.memory.as_ref()) {
                        Some(memory) => Response::MapInfo(map_info(memory.caching)),
                        None => Response::Unspecified,
                    },
                    Err(why) => {
                        guest_warn!(self.log, "resource {resource}: the VMM does not map it: {why}");
                        self.window.slots.remove(&offset);
                        if let Some(host) = self.host_blob(resource) {
                            host.mapped_at = None;
                        }
                        Response::Unspecified
                    }
                };
                self.commands.finish(token, response);
                // What waits for this one waits for the unmap then.
                if !self.is_abandoned(resource) || !self.start_unmap(resource, Doing::Take { resource }) {
                    self.resume(resource);
                }
            }
            Doing::Take { resource } => {
                let unmapped = outcome.result.is_ok();
                if let Err(why) = outcome.result {
                    guest_warn!(self.log, "resource {resource}: the VMM does not unmap it: {why}");
                } else {
                    self.window.slots.remove(&offset);
                }
                if let Some(host) = self.host_blob(resource) {
                    host.mapped_at = None;
                    host.taken = unmapped;
                }
                self.resume(resource);
            }
            Doing::Unmap { resource, token } => {
                let leaving = self.resources.get(&resource).is_some_and(|entry| entry.leaving);
                let response = match outcome.result {
                    Ok(()) => {
                        self.window.slots.remove(&offset);
                        Response::Ok
                    }
                    Err(why) => {
                        // The slot stays taken: the VMM may still show the memory there.
                        guest_warn!(self.log, "resource {resource}: the VMM does not unmap it: {why}");
                        Response::Unspecified
                    }
                };
                if let Some(host) = self.host_blob(resource) {
                    host.mapped_at = None;
                }
                if leaving {
                    self.release(resource, token);
                } else {
                    self.commands.finish(token, response);
                    self.resume(resource);
                }
            }
            Doing::Forgotten => {
                if let Err(why) = outcome.result {
                    tracing::debug!("after a stop: {why}");
                }
            }
        }
    }

    /// The device was stopped, and nothing in the window has a meaning any more.
    ///
    /// QEMU drops its maps when the device is reset and keeps them when the VM is paused, and does not say which it
    /// was. It must not be asked to unmap now: it has taken its device apart and follows a null pointer (11.1:
    /// `vhost_dev_stop` clears `vdev`, `vhost_user_backend_handle_shmem_unmap` uses it). What is left of its maps is
    /// seen at the next start, since they come back as regions. crosvm keeps its maps, which do not come back.
    pub(super) fn leave_window(&mut self) {
        for running in self.window.jobs.values_mut() {
            running.doing = Doing::Forgotten;
        }
        for (offset, slot) in std::mem::take(&mut self.window.slots) {
            if slot.done && !self.window.come_back {
                self.unmap_forgotten(offset, &slot);
            } else {
                self.window.stale.insert(offset, slot);
            }
        }
    }

    /// The device runs again: of the maps from before, those go that the VMM still has.
    pub(super) fn clear_window(&mut self) {
        for (offset, slot) in std::mem::take(&mut self.window.stale) {
            if self.memory.has_own(slot.file) {
                self.unmap_forgotten(offset, &slot);
            }
        }
    }

    fn unmap_forgotten(&mut self, offset: u64, slot: &Slot) {
        let job = self.window.start(Doing::Forgotten, offset, slot.file);
        self.submit_job(Job::Unmap { job, id: slot.file, offset, len: slot.len });
    }
}

fn map_info(caching: Caching) -> MapInfo {
    let map_info = match caching {
        Caching::Cached => gpu::VIRTIO_GPU_MAP_CACHE_CACHED,
        Caching::Uncached => gpu::VIRTIO_GPU_MAP_CACHE_UNCACHED,
        Caching::WriteCombining => gpu::VIRTIO_GPU_MAP_CACHE_WC,
    };
    MapInfo { map_info, padding: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_stay_in_the_window_and_apart() {
        let file = FileId::of(&tempfile::tempfile().unwrap()).unwrap();
        let mut window = Window::new(16 * PAGE);
        window.slots.insert(4 * PAGE, Slot { owner: None, len: 4 * PAGE, file, done: true });
        for (offset, len) in [(0, 4), (8, 8), (2, 2), (15, 1)] {
            assert_eq!(window.check(offset * PAGE, len * PAGE), Ok(()), "{offset} {len}");
        }
        for (offset, len) in [(0, 5), (7, 1), (4, 4), (5, 1), (3, 6), (0, 16), (15, 2), (16, 1)] {
            assert!(window.check(offset * PAGE, len * PAGE).is_err(), "{offset} {len}");
        }
        assert!(window.check(1, PAGE).is_err());
        assert!(window.check(u64::MAX - PAGE + 1, PAGE).is_err());
    }
}
