//! Which file descriptors of the process are the service's.
//!
//! `close`, `dup2` and `fcntl` may be called from a signal handler and between `fork` and `exec`, where no
//! lock may be taken. So the table has none: a descriptor number is looked up in a tree of atomic pointers,
//! each filled slot owns one reference of a counted record, and records and tree nodes are recycled or kept but
//! never freed, so that a pointer once read stays good. This is what the kernel does with RCU
//! (`__fget_files`): take a reference unless the count is zero, then check that the slot still says the same.
//!
//! Unsafe code: the tree and the records are shared by raw pointers because their life is that of the process,
//! and the content of a record is guarded by its count, which the compiler cannot see.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Count of a record that one thread is filling or emptying.
const RESERVED: u32 = u32::MAX;

/// The largest count; more references than descriptors (2^31) cannot exist beside as many calls in flight.
const MOST: u32 = u32::MAX - 1;

/// A descriptor is 31 bits: 10 choose a branch, 10 a leaf, 11 a slot.
const LEAF_BITS: u32 = 11;
const BRANCH_BITS: u32 = 10;

type Slot<T> = AtomicPtr<Record<T>>;

struct Leaf<T> {
    slots: [Slot<T>; 1 << LEAF_BITS],
}

struct Branch<T> {
    leaves: [AtomicPtr<Leaf<T>>; 1 << BRANCH_BITS],
}

struct Record<T> {
    /// The record that was made before this one; written once, before the record is published.
    next: *mut Record<T>,
    /// 0: free; `RESERVED`: being filled or emptied; else the number of references.
    count: AtomicU32,
    /// Filled while the count is not 0; written only while it is `RESERVED`, read only with a reference.
    content: UnsafeCell<MaybeUninit<T>>,
}

/// A table from descriptor numbers to counted values.
pub struct Table<T: 'static> {
    branches: [AtomicPtr<Branch<T>>; 1 << BRANCH_BITS],
    records: AtomicPtr<Record<T>>,
}

// SAFETY: everything in it is atomic but `next`, which is constant once published, and `content`, which
// `Record::count` guards; the values themselves move and are shared between threads, hence the bounds.
unsafe impl<T: Send + Sync> Sync for Table<T> {}

/// One reference to a value of the table.
pub struct Held<T: 'static> {
    record: &'static Record<T>,
}

// SAFETY: a `Held` gives `&T`, and dropping the last one drops the `T` on that thread.
unsafe impl<T: Send + Sync> Send for Held<T> {}
// SAFETY: as above; the count is atomic.
unsafe impl<T: Send + Sync> Sync for Held<T> {}

impl<T: Send + Sync + 'static> Table<T> {
    /// An empty table.
    pub const fn new() -> Self {
        Self {
            branches: [const { AtomicPtr::new(ptr::null_mut()) }; 1 << BRANCH_BITS],
            records: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// A new value with one reference that no slot has yet.
    pub fn hold(&'static self, value: T) -> Held<T> {
        let record = self.free_record();
        // SAFETY: the count is RESERVED and this thread set it, so no other thread reads or writes it.
        unsafe { record.content.get().write(MaybeUninit::new(value)) };
        record.count.store(1, Ordering::Release);
        Held { record }
    }

    /// What `fd` stands for.
    pub fn get(&'static self, fd: RawFd) -> Option<Held<T>> {
        let slot = self.slot(fd)?;
        loop {
            let record = as_ref(slot.load(Ordering::Acquire))?;
            let Some(held) = record.acquire() else { continue };
            if ptr::eq(slot.load(Ordering::Acquire), record) {
                return Some(held);
            }
        }
    }

    /// Whether `fd` stands for anything; cheaper than `get`.
    pub fn has(&'static self, fd: RawFd) -> bool {
        self.slot(fd).is_some_and(|slot| !slot.load(Ordering::Acquire).is_null())
    }

    /// Gives `fd` the meaning `value`, and returns what it stood for.
    pub fn set(&'static self, fd: RawFd, value: Held<T>) -> Option<Held<T>> {
        let slot = self.make_slot(fd)?;
        let record = ptr::from_ref(value.record).cast_mut();
        std::mem::forget(value);
        as_ref(slot.swap(record, Ordering::AcqRel)).map(|record| Held { record })
    }

    /// Forgets `fd`, and returns what it stood for.
    pub fn take(&'static self, fd: RawFd) -> Option<Held<T>> {
        let record = self.slot(fd)?.swap(ptr::null_mut(), Ordering::AcqRel);
        as_ref(record).map(|record| Held { record })
    }

    /// Forgets every descriptor from `first` to `last` and drops what they stood for.
    pub fn take_range(&'static self, first: u32, last: u32) {
        for (upper, branch) in (0u32..).zip(&self.branches) {
            let Some(branch) = as_ref(branch.load(Ordering::Acquire)) else { continue };
            for (middle, leaf) in (0u32..).zip(&branch.leaves) {
                let Some(leaf) = as_ref(leaf.load(Ordering::Acquire)) else { continue };
                for (lower, slot) in (0u32..).zip(&leaf.slots) {
                    let fd = upper << (BRANCH_BITS + LEAF_BITS) | middle << LEAF_BITS | lower;
                    if fd >= first && fd <= last {
                        drop(
                            as_ref(slot.swap(ptr::null_mut(), Ordering::AcqRel))
                                .map(|record| Held { record }),
                        );
                    }
                }
            }
        }
    }

    /// The slot of `fd` where a tree node for it exists.
    fn slot(&'static self, fd: RawFd) -> Option<&'static Slot<T>> {
        let [upper, middle, lower] = digits(fd)?;
        let branch = as_ref(self.branches.get(upper)?.load(Ordering::Acquire))?;
        let leaf = as_ref(branch.leaves.get(middle)?.load(Ordering::Acquire))?;
        leaf.slots.get(lower)
    }

    /// The slot of `fd`, with the nodes on the way made where missing.
    fn make_slot(&'static self, fd: RawFd) -> Option<&'static Slot<T>> {
        let [upper, middle, lower] = digits(fd)?;
        let branch = get_or_make(self.branches.get(upper)?, || Branch {
            leaves: [const { AtomicPtr::new(ptr::null_mut()) }; 1 << BRANCH_BITS],
        })?;
        let leaf = get_or_make(branch.leaves.get(middle)?, || Leaf {
            slots: [const { AtomicPtr::new(ptr::null_mut()) }; 1 << LEAF_BITS],
        })?;
        leaf.slots.get(lower)
    }

    /// A record with the count RESERVED, a free one or a new one.
    fn free_record(&'static self) -> &'static Record<T> {
        let mut next = as_ref(self.records.load(Ordering::Acquire));
        while let Some(record) = next {
            if record.count.compare_exchange(0, RESERVED, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return record;
            }
            next = as_ref(record.next);
        }
        let record = Box::leak(Box::new(Record {
            next: ptr::null_mut(),
            count: AtomicU32::new(RESERVED),
            content: UnsafeCell::new(MaybeUninit::uninit()),
        }));
        let mut head = self.records.load(Ordering::Acquire);
        loop {
            record.next = head;
            match self.records.compare_exchange(head, record, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return record,
                Err(other) => head = other,
            }
        }
    }
}

impl<T> Record<T> {
    /// A reference, unless the record is free or changing hands.
    fn acquire(&'static self) -> Option<Held<T>> {
        self.count
            .try_update(Ordering::Acquire, Ordering::Relaxed, |count| {
                if count == 0 || count >= MOST { None } else { count.checked_add(1) }
            })
            .ok()
            .map(|_| Held { record: self })
    }
}

impl<T> Clone for Held<T> {
    fn clone(&self) -> Self {
        self.record.count.fetch_add(1, Ordering::Relaxed);
        Self { record: self.record }
    }
}

impl<T> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this reference keeps the count between 1 and MOST, and the content is written only
        // while the count is RESERVED.
        let content = unsafe { &*self.record.content.get() };
        // SAFETY: a record whose count is neither 0 nor RESERVED was filled by `Table::hold`.
        unsafe { content.assume_init_ref() }
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        let last = self.record.count.update(Ordering::AcqRel, Ordering::Acquire, |count| {
            if count == 1 { RESERVED } else { count.wrapping_sub(1) }
        });
        if last != 1 {
            return;
        }
        // SAFETY: the count went from 1, this reference, to RESERVED on this thread, so no other thread
        // has or can get access.
        let content = unsafe { self.record.content.get().replace(MaybeUninit::uninit()) };
        // SAFETY: the record was filled by `Table::hold` and has not been emptied since.
        let value = unsafe { content.assume_init() };
        self.record.count.store(0, Ordering::Release);
        drop(value);
    }
}

/// The steps through the tree for a descriptor; `None` for a negative one.
fn digits(fd: RawFd) -> Option<[usize; 3]> {
    let fd = usize::try_from(fd).ok()?;
    let branch_mask = (1 << BRANCH_BITS) - 1;
    Some([fd >> (BRANCH_BITS + LEAF_BITS), fd >> LEAF_BITS & branch_mask, fd & ((1 << LEAF_BITS) - 1)])
}

/// A node or record behind a pointer of the table.
fn as_ref<N>(pointer: *mut N) -> Option<&'static N> {
    // SAFETY: every non-null pointer in a table came from `Box::leak` and was published after it was
    // filled; nothing frees it.
    unsafe { pointer.as_ref() }
}

/// The node behind `place`, made by `make` where there is none; another thread's when that was first.
fn get_or_make<N: 'static>(place: &AtomicPtr<N>, make: impl FnOnce() -> N) -> Option<&'static N> {
    if let Some(node) = as_ref(place.load(Ordering::Acquire)) {
        return Some(node);
    }
    let made = Box::into_raw(Box::new(make()));
    match place.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => as_ref(made),
        Err(other) => {
            // SAFETY: `made` came from `Box::into_raw` above and was not published.
            drop(unsafe { Box::from_raw(made) });
            as_ref(other)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Counts its own drops.
    struct Counted(u64, Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn table<T: Send + Sync>() -> &'static Table<T> {
        Box::leak(Box::new(Table::new()))
    }

    fn value(held: &Held<Counted>) -> u64 {
        held.0
    }

    #[test]
    fn every_descriptor_number_has_a_slot_of_its_own() {
        let table = table();
        let numbers = [0, 1, 2047, 2048, 2049, (1 << 21) - 1, 1 << 21, i32::MAX - 1, i32::MAX];
        for (index, fd) in numbers.into_iter().enumerate() {
            assert!(table.set(fd, table.hold(index)).is_none(), "{fd}");
        }
        for (index, fd) in numbers.into_iter().enumerate() {
            assert_eq!(*table.get(fd).unwrap(), index, "{fd}");
        }
        for fd in [-1, i32::MIN, 3, 1 << 22] {
            assert!(!table.has(fd) && table.get(fd).is_none() && table.take(fd).is_none(), "{fd}");
        }
        assert!(table.set(-1, table.hold(0)).is_none());
    }

    #[test]
    fn the_value_goes_with_its_last_descriptor() {
        let drops = Arc::new(AtomicUsize::new(0));
        let table = table();
        table.set(5, table.hold(Counted(5, drops.clone())));
        table.set(6, table.get(5).unwrap());
        let in_flight = table.get(6).unwrap();
        drop(table.take(5));
        drop(table.take(6));
        assert_eq!((table.has(5), table.has(6)), (false, false));
        assert_eq!((value(&in_flight), drops.load(Ordering::SeqCst)), (5, 0), "a call in flight holds it");
        drop(in_flight);
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn setting_a_descriptor_returns_what_it_stood_for() {
        let drops = Arc::new(AtomicUsize::new(0));
        let table = table();
        table.set(5, table.hold(Counted(5, drops.clone())));
        let old = table.set(5, table.hold(Counted(6, drops.clone()))).unwrap();
        assert_eq!((value(&old), value(&table.get(5).unwrap())), (5, 6));
        drop(old);
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_range_is_forgotten() {
        let drops = Arc::new(AtomicUsize::new(0));
        let table = table();
        for fd in [3, 2047, 2048, 70_000] {
            table.set(fd, table.hold(Counted(0, drops.clone())));
        }
        table.take_range(2047, 2048);
        assert_eq!([3, 2047, 2048, 70_000].map(|fd| table.has(fd)), [true, false, false, true]);
        table.take_range(0, u32::MAX);
        assert_eq!(drops.load(Ordering::SeqCst), 4);
    }

    #[test]
    fn records_are_recycled() {
        let table = table::<u32>();
        let first = ptr::from_ref(table.hold(1).record);
        for _ in 0..100 {
            assert!(ptr::eq(first, table.hold(2).record));
        }
    }

    #[test]
    fn threads_that_open_copy_use_and_close_the_same_descriptors() {
        let drops = Arc::new(AtomicUsize::new(0));
        let table = table();
        const THREADS: u64 = 8;
        const ROUNDS: u64 = 5000;
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let drops = drops.clone();
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let fd = (round % 3) as RawFd;
                        drop(table.set(fd, table.hold(Counted(thread << 32 | round, drops.clone()))));
                        if let Some(held) = table.get(2 - fd) {
                            assert!(value(&held) >> 32 < THREADS && value(&held) & 0xffff_ffff < ROUNDS);
                            drop(table.set(fd, held));
                        }
                        drop(table.take((fd + 1) % 3));
                    }
                });
            }
        });
        table.take_range(0, u32::MAX);
        assert_eq!(
            drops.load(Ordering::SeqCst) as u64,
            THREADS * ROUNDS,
            "each value is dropped exactly once"
        );
    }
}
