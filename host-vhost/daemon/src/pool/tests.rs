//! The pool by itself.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::*;
use crate::session::Reclaiming;

/// Workers that give memory back, or do not, or not yet.
pub(super) struct Workers {
    progress: Mutex<Progress>,
    asked: AtomicUsize,
}

impl Workers {
    pub(super) fn new(progress: Progress) -> Self {
        Workers { progress: Mutex::new(progress), asked: AtomicUsize::new(0) }
    }

    pub(super) fn set(&self, progress: Progress) {
        *self.progress.lock().unwrap() = progress;
    }
}

impl Reclaim for Workers {
    fn begin(&self, _name: ShareToken) -> Reclaiming {
        self.asked.fetch_add(1, Ordering::Relaxed);
        Reclaiming::default()
    }

    fn look(&self, _reclaiming: &Reclaiming, _since: Instant) -> Progress {
        *self.progress.lock().unwrap()
    }

    fn wait(&self) {
        std::thread::yield_now();
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
        assert!(pool.space().0 * 100 < pool.window() * 80, "{size}: {:?} of {}", pool.space(), pool.window());
        assert!(pool.space().0 >= size);
    }
}

/// What docs/operating.md advises: these sizes leave least of their window empty.
#[test]
fn windows_that_are_used_best() {
    for (size, window) in [(6142, 8 << 10), (6144, 16 << 10), (12_286, 16 << 10), (12_288, 32 << 10)] {
        assert_eq!(Pool::new(size << 20).unwrap().window() >> 20, window, "{size} MiB");
    }
}

#[test]
fn a_name_opens_its_memory_once_and_when_all_of_it_has_a_place() {
    let pool = Pool::new(8 * GRANULE).unwrap();
    let workers = Workers::new(Progress::Over);
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
    let workers = Workers::new(Progress::Over);
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
    let workers = Workers::new(Progress::Kept);
    let node = pool.create(name(1), OWNER).unwrap();
    pool.resize(node, GRANULE).unwrap();
    pool.place(node, 0, 0).unwrap();
    pool.claim(name(1)).unwrap();
    pool.reset(&workers);
    assert_eq!(pool.space(), (3 * GRANULE, 3 * GRANULE));
    let next = pool.create(name(2), OWNER).unwrap();
    pool.resize(next, GRANULE).unwrap();
    assert_eq!(pool.place(next, 0, 0), Err(Errno::EAGAIN), "the kernel is to take another place");
}

#[test]
fn a_worker_that_takes_its_time_holds_up_nobody_and_nothing_comes_where_its_memory_was() {
    let pool = Pool::new(4 * GRANULE).unwrap();
    let workers = Workers::new(Progress::Pending);
    let node = pool.create(name(1), OWNER).unwrap();
    pool.resize(node, 2 * GRANULE).unwrap();
    pool.place(node, 0, 0).unwrap();
    pool.place(node, GRANULE, GRANULE).unwrap();
    pool.claim(name(1)).unwrap();
    pool.file().write_all_at(b"secret", GRANULE + 5).unwrap();
    // As Linux ends an inode: one place after the other, then the file.
    pool.remove(0, GRANULE, &workers);
    pool.remove(GRANULE, GRANULE, &workers);
    pool.forget(node, 1, &workers);
    assert_eq!(workers.asked.load(Ordering::Relaxed), 1);
    assert_eq!(pool.attributes(node), Err(Errno::ENOENT), "to the kernel it is gone");
    assert_eq!(pool.space(), (4 * GRANULE, 2 * GRANULE), "it still counts");
    assert_eq!(pool.create(name(1), OWNER), Err(Errno::EEXIST), "and its name is taken");
    // The others go on, at other places.
    let next = pool.create(name(2), OWNER).unwrap();
    pool.resize(next, 2 * GRANULE).unwrap();
    assert_eq!(pool.place(next, 0, GRANULE), Err(Errno::EAGAIN));
    pool.place(next, 0, 2 * GRANULE).unwrap();
    assert_eq!(pool.create(name(3), OWNER), Err(Errno::ENOSPC));
    assert!(pool.settle(&workers));
    workers.set(Progress::Over);
    assert!(!pool.settle(&workers));
    assert_eq!(pool.space(), (4 * GRANULE, 2 * GRANULE));
    pool.place(next, GRANULE, GRANULE).unwrap();
    let mut found = [1; 16];
    pool.file().read_exact_at(&mut found, GRANULE).unwrap();
    assert_eq!(found, [0; 16]);
}

#[test]
fn the_guest_holds_what_was_granted_and_no_more_whatever_its_kernel_does() {
    let pool = Pool::new(5 * GRANULE).unwrap();
    let workers = Workers::new(Progress::Over);
    // All that can be written at all, as by a kernel that asks nobody.
    assert_eq!(pool.file().metadata().unwrap().size(), 5 * GRANULE);
    assert!(pool.window() > pool.size());
    assert!(pool.file().write_all_at(b"x", 5 * GRANULE).is_err(), "there is nothing behind it");
    pool.file().write_all_at(b"dirt", 3 * GRANULE).unwrap();
    // Places without memory are not given; the kernel is to take another.
    let node = pool.create(name(1), OWNER).unwrap();
    pool.resize(node, GRANULE).unwrap();
    for place in 5..pool.window() / GRANULE {
        assert_eq!(pool.place(node, 0, place * GRANULE), Err(Errno::EAGAIN), "{place}");
    }
    pool.place(node, 0, 0).unwrap();
    // At a mount nothing stays, also of what no file had.
    pool.reset(&workers);
    assert_eq!(pool.file().metadata().unwrap().blocks(), 0);
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
