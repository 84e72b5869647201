//! The pool: host memory that the guest's kernel treats as ordinary pages (ADR 3).
//!
//! The guest mounts a virtio-fs device whose window has one memfd at its beginning, the pool. A process makes a file there
//! under a secret name, and the guest's kernel says which 2 MiB of the file lie where in the window. Who knows the name can
//! have the file's memory in a context, once. The kernel says when a place in the window ends; nothing else comes there
//! before no worker touches it any more and it is zeroed. Nobody waits for that: until then, the kernel is told to try
//! another place.

mod fuse;
mod reclaim;
mod server;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use virtio_kfd_protocol::ShareToken;

use crate::memory::FileId;

pub use reclaim::{Progress, Reclaim};
pub use server::{MemoryDevice, TAG};

/// What the guest's kernel maps at a time (Linux, `FUSE_DAX_SZ` in fs/fuse/dax.c).
pub const GRANULE: u64 = 2 << 20;

/// The root directory's node (`FUSE_ROOT_ID`).
pub const ROOT: u64 = 1;

/// The pool.
#[derive(Debug)]
pub struct Pool {
    file: File,
    id: FileId,
    /// Bytes of the memory, whole granules.
    size: u64,
    /// Bytes of the window, of which the memory is the beginning.
    window: u64,
    store: Mutex<Store>,
}

#[derive(Debug, Default)]
struct Store {
    /// Granules that files may have, and have.
    limit: u64,
    granted: u64,
    last_node: u64,
    files: HashMap<u64, PooledFile>,
    names: HashMap<ShareToken, u64>,
    /// Place in the window, in granules, and what lies there.
    places: HashMap<u64, Place>,
    /// Files whose memory workers are to give back.
    endings: Vec<reclaim::Ending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// This granule of this file.
    Taken { node: u64, granule: u64 },
    /// The kernel has ended it, and workers may still touch it.
    Ending,
    /// A worker may touch it for ever: never used again.
    Lost,
}

/// How the memory of a file stands to the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    /// Who knows the name may have it.
    Free,
    /// A worker has it.
    Had,
    /// Workers are to give it back.
    Ending,
    /// Nobody gets it any more.
    Over,
}

#[derive(Debug)]
struct PooledFile {
    name: ShareToken,
    owner: Owner,
    size: u64,
    granules: u64,
    /// Granule of the file, and place in the window.
    places: BTreeMap<u64, u64>,
    /// Places that the kernel has ended and workers may still touch.
    ending: Vec<u64>,
    claim: Claim,
    lookups: u64,
    /// The kernel knows it no more.
    forgotten: bool,
}

/// Who made a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// What there is to know of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Who made it.
    pub owner: Owner,
    /// Bytes.
    pub size: u64,
}

impl Pool {
    /// A pool of `size` bytes, rounded up to granules, in a window that is larger: Linux takes memory from files when less
    /// than a fifth of the window is free (`FUSE_DAX_RECLAIM_THRESHOLD`), which may not come to pass. What of the window has
    /// no memory behind it stays free, so the guest holds `size` bytes and no more, whatever its kernel does.
    pub fn new(size: u64) -> io::Result<Self> {
        let too_large = || io::Error::from(io::ErrorKind::InvalidInput);
        let limit = size.div_ceil(GRANULE);
        let size = limit.checked_mul(GRANULE).ok_or_else(too_large)?;
        // A PCI BAR is a power of two.
        let third = limit.checked_div(3).and_then(|third| limit.checked_add(third)).ok_or_else(too_large)?;
        let window = third
            .saturating_add(1)
            .checked_mul(GRANULE)
            .and_then(u64::checked_next_power_of_two)
            .ok_or_else(too_large)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("virtio-kfd-pool", flags)?);
        file.set_len(size)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let id = FileId::of(&file)?;
        let store = Store { limit, last_node: ROOT, ..Store::default() };
        Ok(Pool { file, id, size, window, store: Mutex::new(store) })
    }

    /// Bytes of the window.
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Bytes of the memory, which is at the beginning of the window: all that the guest can have.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The memory.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Which file it is.
    pub fn id(&self) -> FileId {
        self.id
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that files may have, and bytes that are free.
    pub fn space(&self) -> (u64, u64) {
        let store = self.store();
        let free = store.limit.saturating_sub(store.granted);
        (store.limit.saturating_mul(GRANULE), free.saturating_mul(GRANULE))
    }

    /// Makes a file. It is charged from the start, so that files are bounded as well.
    pub fn create(&self, name: ShareToken, owner: Owner) -> Result<u64, Errno> {
        let mut store = self.store();
        if store.names.contains_key(&name) {
            return Err(Errno::EEXIST);
        }
        store.charge(1)?;
        store.last_node = store.last_node.wrapping_add(1);
        let node = store.last_node;
        let file = PooledFile {
            name,
            owner,
            size: 0,
            granules: 1,
            places: BTreeMap::new(),
            ending: Vec::new(),
            claim: Claim::Free,
            lookups: 1,
            forgotten: false,
        };
        store.files.insert(node, file);
        store.names.insert(name, node);
        Ok(node)
    }

    /// Gives a file its size, once.
    pub fn resize(&self, node: u64, size: u64) -> Result<(), Errno> {
        let mut store = self.store();
        let file = store.known(node)?;
        if size == file.size {
            return Ok(());
        }
        if file.size != 0 {
            return Err(Errno::EPERM);
        }
        let (granules, charged) = (size.div_ceil(GRANULE), file.granules);
        store.charge(granules.saturating_sub(charged))?;
        if let Some(file) = store.files.get_mut(&node) {
            file.size = size;
            file.granules = granules.max(1);
        }
        Ok(())
    }

    /// What is known of a file.
    pub fn attributes(&self, node: u64) -> Result<Attributes, Errno> {
        let store = self.store();
        let file = store.known(node)?;
        Ok(Attributes { owner: file.owner, size: file.size })
    }

    /// The kernel lays a granule of a file to a place in the window, both in bytes. EAGAIN where that place has no memory or
    /// is not free yet: Linux then takes the next place that it has free (`__fuse_dax_fault`), and finds one, for what
    /// files are charged with is never more than there are places.
    pub fn place(&self, node: u64, offset: u64, at: u64) -> Result<(), Errno> {
        let mut store = self.store();
        let file = store.known(node)?;
        let aligned = offset.is_multiple_of(GRANULE) && at.is_multiple_of(GRANULE);
        if !aligned || offset >= file.size || at >= self.window {
            return Err(Errno::EINVAL);
        }
        let (granule, place) = (offset / GRANULE, at / GRANULE);
        let taken = Place::Taken { node, granule };
        match (file.places.get(&granule), store.places.get(&place)) {
            // The same once more, as when it becomes writable.
            (Some(known), Some(there)) if *known == place && *there == taken => return Ok(()),
            (None, None) if at < self.size => {}
            (None, None | Some(Place::Ending | Place::Lost)) => return Err(Errno::EAGAIN),
            _ => return Err(Errno::EBUSY),
        }
        store.places.insert(place, taken);
        if let Some(file) = store.files.get_mut(&node) {
            file.places.insert(granule, place);
        }
        Ok(())
    }

    /// The kernel ends places in the window, in bytes.
    pub fn remove(&self, at: u64, len: u64, workers: &dyn Reclaim) {
        let end = at.saturating_add(len).min(self.size) / GRANULE;
        let mut nodes: Vec<u64> = Vec::new();
        {
            let mut store = self.store();
            for place in at / GRANULE..end {
                if let Some(node) = store.end_place(place)
                    && !nodes.contains(&node)
                {
                    nodes.push(node);
                }
            }
        }
        for node in nodes {
            self.end_claim(node, workers);
        }
    }

    /// The kernel has forgotten a file so many times of those that it was told of it.
    pub fn forget(&self, node: u64, count: u64, workers: &dyn Reclaim) {
        {
            let mut store = self.store();
            let Some(file) = store.files.get_mut(&node) else { return };
            file.lookups = file.lookups.saturating_sub(count);
            if file.lookups != 0 {
                return;
            }
        }
        self.end(node, workers);
    }

    /// The file system is mounted anew, or was unmounted: there are no files. All that is not lost is zeroed, also what no
    /// file had. Waits for the workers: there is nobody else whom that could hold up.
    pub fn reset(&self, workers: &dyn Reclaim) {
        let nodes: Vec<u64> = self.store().files.keys().copied().collect();
        for node in nodes {
            self.end(node, workers);
        }
        while self.settle(workers) {
            workers.wait();
        }
        let mut store = self.store();
        for place in 0..self.size / GRANULE {
            if !store.places.contains_key(&place) {
                self.clear(&mut store, place);
            }
        }
    }

    /// Where the memory of a name lies in the window, in bytes, granule by granule. It can be had once, and only when
    /// all of it has a place.
    pub fn claim(&self, name: ShareToken) -> Option<Vec<u64>> {
        let mut store = self.store();
        let node = *store.names.get(&name)?;
        let file = store.files.get_mut(&node)?;
        let complete = file.places.len() as u64 == file.size.div_ceil(GRANULE);
        if file.claim != Claim::Free || file.size == 0 || !complete {
            return None;
        }
        file.claim = Claim::Had;
        Some(file.places.values().map(|place| place.saturating_mul(GRANULE)).collect())
    }

    /// Whether there is a file of this name.
    pub fn has(&self, name: ShareToken) -> bool {
        self.store().names.contains_key(&name)
    }

    /// The kernel knows a file no more.
    fn end(&self, node: u64, workers: &dyn Reclaim) {
        {
            let mut store = self.store();
            let Some(file) = store.files.get_mut(&node) else { return };
            file.forgotten = true;
            let places: Vec<u64> = file.places.values().copied().collect();
            for place in places {
                store.end_place(place);
            }
        }
        self.end_claim(node, workers);
    }

    /// Nothing uses a place any more: it is zeroed, and free.
    fn clear(&self, store: &mut Store, place: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, place.saturating_mul(GRANULE), GRANULE) {
            Ok(()) => {
                store.places.remove(&place);
            }
            // With what was there, nobody else may have it.
            Err(error) => {
                tracing::error!("fallocate(FALLOC_FL_PUNCH_HOLE) on the pool: {error}");
                store.lose(place);
            }
        }
    }
}

impl Store {
    /// A file that the kernel still knows.
    fn known(&self, node: u64) -> Result<&PooledFile, Errno> {
        self.files.get(&node).filter(|file| !file.forgotten).ok_or(Errno::ENOENT)
    }

    fn charge(&mut self, granules: u64) -> Result<(), Errno> {
        let granted = self.granted.checked_add(granules).ok_or(Errno::ENOSPC)?;
        if granted > self.limit {
            return Err(Errno::ENOSPC);
        }
        self.granted = granted;
        Ok(())
    }

    /// The kernel has ended a place. Returns the file that was there.
    fn end_place(&mut self, place: u64) -> Option<u64> {
        let there = self.places.get_mut(&place)?;
        let Place::Taken { node, granule } = *there else { return None };
        *there = Place::Ending;
        if let Some(file) = self.files.get_mut(&node) {
            file.places.remove(&granule);
            file.ending.push(place);
        }
        Some(node)
    }

    /// A place is never used again.
    fn lose(&mut self, place: u64) {
        if self.places.insert(place, Place::Lost) != Some(Place::Lost) {
            self.limit = self.limit.saturating_sub(1);
        }
    }

    /// Forgets a file that neither the kernel nor a worker has.
    fn drop_forgotten(&mut self, node: u64) {
        let over = |file: &PooledFile| file.forgotten && file.claim == Claim::Over;
        if self.files.get(&node).is_some_and(over)
            && let Some(file) = self.files.remove(&node)
        {
            self.granted = self.granted.saturating_sub(file.granules);
            self.names.remove(&file.name);
        }
    }
}
