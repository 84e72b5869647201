//! The pool: host memory that the guest's kernel treats as ordinary pages (ADR 3).
//!
//! The guest mounts a virtio-fs device whose window is one memfd, the pool. A process makes a file there under a secret
//! name, and the guest's kernel says which 2 MiB of the file lie where in the window. Who knows the name can have the file's
//! memory in a context, once. The kernel says when a place in the window ends; by then no worker may touch it, and
//! what comes next finds it zeroed.

mod fuse;
mod server;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use virtio_kfd_protocol::ShareToken;

use crate::memory::FileId;

pub use server::{MemoryDevice, TAG};

/// What the guest's kernel maps at a time (Linux, `FUSE_DAX_SZ` in fs/fuse/dax.c).
pub const GRANULE: u64 = 2 << 20;

/// The root directory's node (`FUSE_ROOT_ID`).
pub const ROOT: u64 = 1;

/// Ends the use of a file's memory by workers.
pub trait Reclaim: Send + Sync {
    /// Returns when no worker touches the memory of this name any more. `false` if that cannot be brought about.
    fn reclaim(&self, name: ShareToken) -> bool;
}

/// The pool.
#[derive(Debug)]
pub struct Pool {
    file: File,
    id: FileId,
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// This granule of this file.
    Taken { node: u64, granule: u64 },
    /// A worker may still touch it: never used again.
    Lost,
}

#[derive(Debug)]
struct PooledFile {
    name: ShareToken,
    owner: Owner,
    size: u64,
    granules: u64,
    /// Granule of the file, and place in the window.
    places: BTreeMap<u64, u64>,
    claimed: bool,
    lookups: u64,
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
    /// A pool of `size` bytes, in a window that is larger: Linux takes memory from files when less than a fifth of the
    /// window is free (`FUSE_DAX_RECLAIM_THRESHOLD`), which may not come to pass.
    pub fn new(size: u64) -> io::Result<Self> {
        let too_large = || io::Error::from(io::ErrorKind::InvalidInput);
        let limit = size.div_ceil(GRANULE);
        // A PCI BAR is a power of two.
        let third = limit.checked_div(3).and_then(|third| limit.checked_add(third)).ok_or_else(too_large)?;
        let window = third
            .saturating_add(1)
            .checked_mul(GRANULE)
            .and_then(u64::checked_next_power_of_two)
            .ok_or_else(too_large)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("virtio-kfd-pool", flags)?);
        file.set_len(window)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let id = FileId::of(&file)?;
        let store = Store { limit, last_node: ROOT, ..Store::default() };
        Ok(Pool { file, id, window, store: Mutex::new(store) })
    }

    /// Bytes of the window.
    pub fn window(&self) -> u64 {
        self.window
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
            claimed: false,
            lookups: 1,
        };
        store.files.insert(node, file);
        store.names.insert(name, node);
        Ok(node)
    }

    /// Gives a file its size, once.
    pub fn resize(&self, node: u64, size: u64) -> Result<(), Errno> {
        let mut store = self.store();
        let file = store.files.get(&node).ok_or(Errno::ENOENT)?;
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
        let file = store.files.get(&node).ok_or(Errno::ENOENT)?;
        Ok(Attributes { owner: file.owner, size: file.size })
    }

    /// The kernel lays a granule of a file to a place in the window, both in bytes.
    pub fn place(&self, node: u64, offset: u64, at: u64) -> Result<(), Errno> {
        let mut store = self.store();
        let file = store.files.get(&node).ok_or(Errno::ENOENT)?;
        let aligned = offset.is_multiple_of(GRANULE) && at.is_multiple_of(GRANULE);
        if !aligned || offset >= file.size || at >= self.window {
            return Err(Errno::EINVAL);
        }
        let (granule, place) = (offset / GRANULE, at / GRANULE);
        let taken = Place::Taken { node, granule };
        match (file.places.get(&granule), store.places.get(&place)) {
            // The same once more, as when it becomes writable.
            (Some(known), Some(there)) if *known == place && *there == taken => return Ok(()),
            (None, None) => {}
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
        let end = at.saturating_add(len).min(self.window) / GRANULE;
        let mut nodes: Vec<u64> = Vec::new();
        {
            let store = self.store();
            for place in at / GRANULE..end {
                if let Some(Place::Taken { node, .. }) = store.places.get(&place)
                    && !nodes.contains(node)
                {
                    nodes.push(*node);
                }
            }
        }
        for node in nodes {
            self.end_claim(node, workers);
        }
        for place in at / GRANULE..end {
            self.clear(place);
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

    /// The file system is mounted anew, or was unmounted: there are no files.
    pub fn reset(&self, workers: &dyn Reclaim) {
        let nodes: Vec<u64> = self.store().files.keys().copied().collect();
        for node in nodes {
            self.end(node, workers);
        }
    }

    /// Where the memory of a name lies in the window, in bytes, granule by granule. It can be had once, and only when
    /// all of it has a place.
    pub fn claim(&self, name: ShareToken) -> Option<Vec<u64>> {
        let mut store = self.store();
        let node = *store.names.get(&name)?;
        let file = store.files.get_mut(&node)?;
        let complete = file.places.len() as u64 == file.size.div_ceil(GRANULE);
        if file.claimed || file.size == 0 || !complete {
            return None;
        }
        file.claimed = true;
        Some(file.places.values().map(|place| place.saturating_mul(GRANULE)).collect())
    }

    /// Whether there is a file of this name.
    pub fn has(&self, name: ShareToken) -> bool {
        self.store().names.contains_key(&name)
    }

    fn end(&self, node: u64, workers: &dyn Reclaim) {
        self.end_claim(node, workers);
        let places: Vec<u64> = match self.store().files.get(&node) {
            Some(file) => file.places.values().copied().collect(),
            None => return,
        };
        for place in places {
            self.clear(place);
        }
        let mut store = self.store();
        if let Some(file) = store.files.remove(&node) {
            store.granted = store.granted.saturating_sub(file.granules);
            store.names.remove(&file.name);
        }
    }

    /// Takes a file's memory from the workers. No lock is held meanwhile: they claim under their own.
    fn end_claim(&self, node: u64, workers: &dyn Reclaim) {
        let name = {
            let mut store = self.store();
            let Some(file) = store.files.get_mut(&node) else { return };
            // Nobody gets it from now on.
            if !std::mem::replace(&mut file.claimed, true) {
                return;
            }
            file.name
        };
        if workers.reclaim(name) {
            return;
        }
        tracing::error!("a worker keeps memory of the pool: that part of it is not used again");
        let mut store = self.store();
        let places: Vec<u64> =
            store.files.get(&node).map(|file| file.places.values().copied().collect()).unwrap_or_default();
        for place in places {
            store.places.insert(place, Place::Lost);
            store.limit = store.limit.saturating_sub(1);
        }
    }

    /// Nothing uses a place any more: it is zeroed, and free.
    fn clear(&self, place: u64) {
        let mut store = self.store();
        let Some(Place::Taken { node, granule }) = store.places.get(&place).copied() else { return };
        if let Some(file) = store.files.get_mut(&node) {
            file.places.remove(&granule);
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, place.saturating_mul(GRANULE), GRANULE) {
            Ok(()) => {
                store.places.remove(&place);
            }
            // With what was there, nobody else may have it.
            Err(error) => {
                tracing::error!("fallocate(FALLOC_FL_PUNCH_HOLE) on the pool: {error}");
                store.places.insert(place, Place::Lost);
                store.limit = store.limit.saturating_sub(1);
            }
        }
    }
}

impl Store {
    fn charge(&mut self, granules: u64) -> Result<(), Errno> {
        let granted = self.granted.checked_add(granules).ok_or(Errno::ENOSPC)?;
        if granted > self.limit {
            return Err(Errno::ENOSPC);
        }
        self.granted = granted;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Workers that give memory back, or do not.
    struct Workers {
        obey: bool,
        asked: AtomicUsize,
    }

    impl Workers {
        fn new(obey: bool) -> Self {
            Workers { obey, asked: AtomicUsize::new(0) }
        }
    }

    impl Reclaim for Workers {
        fn reclaim(&self, _name: ShareToken) -> bool {
            self.asked.fetch_add(1, Ordering::Relaxed);
            self.obey
        }
    }

    const OWNER: Owner = Owner { uid: 1000, gid: 1001 };

    fn name(number: u64) -> ShareToken {
        ShareToken::from_blob_id(1 << 63 | number).unwrap()
    }

    #[test]
    fn the_window_is_larger_than_what_is_granted_by_more_than_a_fifth() {
        // Linux takes memory from files when less than 20 % of the window is free.
        for size in [1, GRANULE, 3 * GRANULE, 100 << 20, 3 << 30, 4 << 30] {
            let pool = Pool::new(size).unwrap();
            assert!(pool.window().is_power_of_two());
            assert!(
                pool.space().0 * 100 < pool.window() * 80,
                "{size}: {:?} of {}",
                pool.space(),
                pool.window()
            );
            assert!(pool.space().0 >= size);
        }
    }

    #[test]
    fn a_name_opens_its_memory_once_and_when_all_of_it_has_a_place() {
        let pool = Pool::new(8 * GRANULE).unwrap();
        let workers = Workers::new(true);
        let node = pool.create(name(1), OWNER).unwrap();
        assert_eq!(pool.create(name(1), OWNER), Err(Errno::EEXIST));
        pool.resize(node, 2 * GRANULE + 1).unwrap();
        assert_eq!(pool.resize(node, GRANULE), Err(Errno::EPERM));
        assert_eq!(pool.attributes(node), Ok(Attributes { owner: OWNER, size: 2 * GRANULE + 1 }));
        pool.place(node, 0, 4 * GRANULE).unwrap();
        pool.place(node, GRANULE, 0).unwrap();
        assert_eq!(pool.claim(name(1)), None, "a third is missing");
        pool.place(node, 2 * GRANULE, 2 * GRANULE).unwrap();
        pool.place(node, 2 * GRANULE, 2 * GRANULE).unwrap();
        assert_eq!(pool.claim(name(2)), None, "no such name");
        assert_eq!(pool.claim(name(1)), Some(vec![4 * GRANULE, 0, 2 * GRANULE]));
        assert_eq!(pool.claim(name(1)), None, "once");
        pool.forget(node, 1, &workers);
        assert_eq!(workers.asked.load(Ordering::Relaxed), 1);
        assert_eq!(pool.space(), (8 * GRANULE, 8 * GRANULE));
        assert!(!pool.has(name(1)));
    }

    #[test]
    fn a_kernel_cannot_lay_two_things_in_one_place() {
        let pool = Pool::new(8 * GRANULE).unwrap();
        let (one, two) = (pool.create(name(1), OWNER).unwrap(), pool.create(name(2), OWNER).unwrap());
        for node in [one, two] {
            pool.resize(node, 2 * GRANULE).unwrap();
        }
        pool.place(one, 0, 0).unwrap();
        assert_eq!(pool.place(two, 0, 0), Err(Errno::EBUSY), "another file there");
        assert_eq!(pool.place(one, GRANULE, 0), Err(Errno::EBUSY), "another granule there");
        assert_eq!(pool.place(one, 0, GRANULE), Err(Errno::EBUSY), "the granule lies elsewhere");
        assert_eq!(pool.place(one, 2 * GRANULE, GRANULE), Err(Errno::EINVAL), "beyond the file");
        assert_eq!(pool.place(one, GRANULE, pool.window()), Err(Errno::EINVAL), "beyond the window");
        assert_eq!(pool.place(one, GRANULE, 4096), Err(Errno::EINVAL), "no granule");
        assert_eq!(pool.place(99, 0, GRANULE), Err(Errno::ENOENT));
    }

    #[test]
    fn what_ends_is_zeroed_and_taken_from_the_workers_first() {
        let pool = Pool::new(8 * GRANULE).unwrap();
        let workers = Workers::new(true);
        let node = pool.create(name(1), OWNER).unwrap();
        pool.resize(node, GRANULE).unwrap();
        pool.place(node, 0, GRANULE).unwrap();
        pool.file().write_all_at(b"secret", GRANULE + 5).unwrap();
        pool.claim(name(1)).unwrap();
        pool.remove(GRANULE, GRANULE, &workers);
        assert_eq!(workers.asked.load(Ordering::Relaxed), 1);
        let mut found = [1; 16];
        pool.file().read_exact_at(&mut found, GRANULE).unwrap();
        assert_eq!(found, [0; 16]);
        let next = pool.create(name(2), OWNER).unwrap();
        pool.resize(next, GRANULE).unwrap();
        pool.place(next, 0, GRANULE).unwrap();
        assert_eq!(pool.claim(name(1)), None, "its memory has no place any more");
    }

    #[test]
    fn a_place_that_a_worker_keeps_is_never_used_again() {
        let pool = Pool::new(4 * GRANULE).unwrap();
        let workers = Workers::new(false);
        let node = pool.create(name(1), OWNER).unwrap();
        pool.resize(node, GRANULE).unwrap();
        pool.place(node, 0, 0).unwrap();
        pool.claim(name(1)).unwrap();
        pool.reset(&workers);
        assert_eq!(pool.space(), (3 * GRANULE, 3 * GRANULE));
        let next = pool.create(name(2), OWNER).unwrap();
        pool.resize(next, GRANULE).unwrap();
        assert_eq!(pool.place(next, 0, 0), Err(Errno::EBUSY));
    }

    #[test]
    fn what_was_granted_is_the_end() {
        let pool = Pool::new(4 * GRANULE).unwrap();
        let node = pool.create(name(1), OWNER).unwrap();
        assert_eq!(pool.resize(node, 5 * GRANULE), Err(Errno::ENOSPC));
        assert_eq!(pool.resize(node, u64::MAX), Err(Errno::ENOSPC));
        pool.resize(node, 3 * GRANULE).unwrap();
        pool.create(name(2), OWNER).unwrap();
        assert_eq!(pool.create(name(3), OWNER), Err(Errno::ENOSPC));
    }
}
