//! What all contexts of a VM use together: a page that the device and its workers share.
//!
//! Each worker writes to its own slot and reads all. It adds first and looks at the sum then, and takes back what is over
//! the limit: of two that do so at once both may be refused, but never both served. Whoever ends a worker clears its slot.
//! A worker that is taken over can write to the slots of its VM's other workers; those of other VMs are in other pages.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::libc::c_void;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

use crate::channel::IpcError;

/// What is counted: memory in bytes, and queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Memory of GPUs.
    Vram,
    /// Memory of the guest, and of the host's system, that GPUs reach.
    System,
    /// Queues.
    Queues,
}

const KINDS: usize = 3;
const WORD: usize = size_of::<AtomicU64>();
/// Most slots: contexts of a VM and one for the device.
const MAX_SLOTS: usize = 64 * 1024;

/// The page.
#[derive(Debug)]
pub struct Ledger {
    file: OwnedFd,
    address: NonNull<c_void>,
    bytes: NonZeroUsize,
}

#[allow(unsafe_code)] // a shared page is a pointer
// SAFETY: the page is only reached as atomic words (`words`), from any thread.
unsafe impl Send for Ledger {}
#[allow(unsafe_code)] // as above
// SAFETY: as above.
unsafe impl Sync for Ledger {}

fn system(call: &'static str) -> impl Fn(Errno) -> IpcError {
    move |errno| IpcError::System { call, errno }
}

impl Ledger {
    /// A new one, all slots 0.
    pub fn create(slots: usize) -> Result<Self, IpcError> {
        let wrong = || IpcError::System { call: "memfd_create", errno: Errno::EINVAL };
        let bytes = slots.checked_mul(KINDS * WORD).filter(|_| slots <= MAX_SLOTS).ok_or_else(wrong)?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = memfd_create("ledger", flags).map_err(system("memfd_create"))?;
        ftruncate(&file, i64::try_from(bytes).map_err(|_| wrong())?).map_err(system("ftruncate"))?;
        // So that nobody who has it can take the page from under the others.
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(system("fcntl(F_ADD_SEALS)"))?;
        Self::open(file)
    }

    /// One that another process has made.
    #[allow(unsafe_code)] // mmap has no safe form
    pub fn open(file: OwnedFd) -> Result<Self, IpcError> {
        let wrong = || IpcError::System { call: "fstat", errno: Errno::EINVAL };
        let size = fstat(&file).map_err(system("fstat"))?.st_size;
        let bytes = usize::try_from(size)
            .ok()
            .filter(|bytes| bytes.is_multiple_of(KINDS * WORD) && *bytes <= MAX_SLOTS * KINDS * WORD)
            .and_then(NonZeroUsize::new)
            .ok_or_else(wrong)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses. The file is sealed against
        // shrinking by the one that made it, so that the pages stay.
        let address = unsafe { mmap(None, bytes, access, MapFlags::MAP_SHARED, &file, 0) };
        Ok(Ledger { address: address.map_err(system("mmap"))?, file, bytes })
    }

    /// The file, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    #[allow(unsafe_code)] // a shared page is a pointer
    fn words(&self) -> &[AtomicU64] {
        let words = self.address.cast::<AtomicU64>();
        let count = self.bytes.get() / WORD;
        // SAFETY: the mapping has `bytes` bytes from a page boundary on and lives as long as `self`; memory that
        // other processes change at any time may be looked at as atomics, which are valid for any bits.
        unsafe { std::slice::from_raw_parts(words.as_ptr(), count) }
    }

    fn word(&self, slot: usize, counted: Counted) -> Option<&AtomicU64> {
        let kind = match counted {
            Counted::Vram => 0,
            Counted::System => 1,
            Counted::Queues => 2,
        };
        self.words().get(slot.checked_mul(KINDS)?.checked_add(kind)?)
    }

    /// What all slots have together.
    pub fn sum(&self, counted: Counted) -> u64 {
        let slots = self.words().len() / KINDS;
        let words = (0..slots).filter_map(|slot| self.word(slot, counted));
        words.map(|word| word.load(Ordering::SeqCst)).fold(0, u64::saturating_add)
    }

    /// What a slot has.
    pub fn of(&self, slot: usize, counted: Counted) -> u64 {
        self.word(slot, counted).map_or(0, |word| word.load(Ordering::SeqCst))
    }

    /// Says what a slot has.
    pub fn set(&self, slot: usize, counted: Counted, amount: u64) {
        if let Some(word) = self.word(slot, counted) {
            word.store(amount, Ordering::SeqCst);
        }
    }

    /// A slot has nothing: its worker is gone.
    pub fn clear(&self, slot: usize) {
        self.set(slot, Counted::Vram, 0);
        self.set(slot, Counted::System, 0);
        self.set(slot, Counted::Queues, 0);
    }
}

impl Drop for Ledger {
    #[allow(unsafe_code)] // munmap has no safe form
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and references into it are bounded by its life.
        let result = unsafe { munmap(self.address, self.bytes.get()) };
        debug_assert!(result.is_ok());
    }
}

/// What one worker may take of what the VM may have.
#[derive(Clone, Debug)]
pub struct Account {
    ledger: Arc<Ledger>,
    slot: usize,
    counted: Counted,
    limit: u64,
}

impl Account {
    /// The account of a slot; `limit` is that of all slots together. Only one process may write to a slot at a time.
    pub fn new(ledger: Arc<Ledger>, slot: usize, counted: Counted, limit: u64) -> Self {
        Account { ledger, slot, counted, limit }
    }

    /// Takes `more`, if the limit allows it.
    pub fn take(&self, more: u64) -> bool {
        let own = self.ledger.of(self.slot, self.counted);
        let Some(sum) = own.checked_add(more) else { return false };
        self.ledger.set(self.slot, self.counted, sum);
        let fits = self.ledger.word(self.slot, self.counted).is_some()
            && self.ledger.sum(self.counted) <= self.limit;
        if !fits {
            self.ledger.set(self.slot, self.counted, own);
        }
        fits
    }

    /// Gives back what was taken.
    pub fn give(&self, less: u64) {
        let own = self.ledger.of(self.slot, self.counted);
        self.ledger.set(self.slot, self.counted, own.saturating_sub(less));
    }

    /// What the limit leaves.
    pub fn left(&self) -> u64 {
        self.limit.saturating_sub(self.ledger.sum(self.counted))
    }

    /// The limit.
    pub fn limit(&self) -> u64 {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(ledger: &Arc<Ledger>, slot: usize) -> Account {
        Account::new(ledger.clone(), slot, Counted::Vram, 100)
    }

    #[test]
    fn all_slots_together_stay_within_the_limit() {
        let ledger = Arc::new(Ledger::create(3).unwrap());
        let (a, b) = (account(&ledger, 0), account(&ledger, 1));
        assert!(a.take(60) && b.take(40));
        assert!(!a.take(1) && !b.take(u64::MAX) && b.take(0));
        assert_eq!((a.left(), ledger.sum(Counted::Vram), ledger.sum(Counted::System)), (0, 100, 0));
        a.give(10);
        assert_eq!(b.left(), 10);
        assert!(b.take(10));
        ledger.clear(1);
        assert_eq!((a.left(), ledger.of(0, Counted::Vram)), (50, 50));
        // A slot that there is not has nothing.
        assert!(!account(&ledger, 3).take(1));
        // A neighbour's nonsense is no overflow.
        ledger.set(2, Counted::Vram, u64::MAX);
        assert!(!a.take(1));
        assert_eq!(a.left(), 0);
    }

    #[test]
    fn another_process_sees_the_same_page_and_cannot_shrink_it() {
        let ours = Ledger::create(2).unwrap();
        let file = ours.file().try_clone_to_owned().unwrap();
        assert_eq!(ftruncate(&file, 0), Err(Errno::EPERM));
        let theirs = Arc::new(Ledger::open(file).unwrap());
        assert!(account(&theirs, 1).take(7));
        assert_eq!(ours.of(1, Counted::Vram), 7);
        let odd = OwnedFd::from(tempfile::tempfile().unwrap());
        assert!(Ledger::open(odd).is_err(), "no slots");
        assert!(Ledger::create(1 << 40).is_err());
    }

    /// Of threads that take at once never more get something than there is for.
    #[test]
    fn those_who_take_at_once_never_get_too_much() {
        let ledger = Arc::new(Ledger::create(4).unwrap());
        std::thread::scope(|scope| {
            for slot in 0..4 {
                let account = account(&ledger, slot);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        if account.take(40) {
                            // Two have 40 each, a third one may have its hand up and takes it down again.
                            assert!(account.ledger.of(slot, Counted::Vram) == 40);
                            account.give(40);
                        }
                    }
                });
            }
        });
        assert_eq!(ledger.sum(Counted::Vram), 0);
    }
}
