//! The one service of the process: made when the program first names a path of it, left to the parent by a
//! fork.
//!
//! Unsafe code: the service lives as long as the process and is shared through an atomic pointer, because a
//! lock that another thread held during a fork would stay locked in the child for ever.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::error::Error;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use std::time::Duration;

use nix::errno::Errno;

use crate::cancellation::Uncancelled;
use crate::path::{Resolved, resolve};
use crate::service::{KfdService, Lookup, Result, SharedMemory};

/// Makes the service; the error is shown to the user.
pub type Constructor = fn() -> std::result::Result<Box<dyn KfdService>, Box<dyn Error + Send + Sync>>;

/// What a preload library is about; see [`crate::preload!`].
#[derive(Debug)]
pub struct Preload {
    /// The library's name, for messages.
    pub name: &'static str,
    /// Where the service's paths lie: absolute and normalised, each with all below it; a trailing `*` stands for
    /// any ending of the last component. The service is asked about no other path, and not made for one.
    pub prefixes: &'static [&'static str],
    /// Tells whether a descriptor stands for memory that the service of any process has shared: it may have come by
    /// `SCM_RIGHTS`. Asked about descriptors that nothing else is known of, also where no service was made, so it must be
    /// quick and may only look at the descriptor. Calls to libc that it makes go to the real system.
    pub shared: fn(BorrowedFd<'_>) -> Option<SharedMemory>,
    /// Makes the service, once per process (and again in a forked child that uses it). When it fails, the
    /// reason is printed once and every path below `prefixes` answers `ENODEV`.
    pub service: Constructor,
}

/// The service that was made, or what its calls answer without one.
pub struct Instance {
    service: Result<Box<dyn KfdService>>,
}

/// For a child of `vfork` whose parent has no service: it cannot make one, since memory is the parent's and descriptors are the child's.
static NONE_YET: Instance = Instance { service: Err(Errno::EOPNOTSUPP) };

/// The service of this process; null before the first use. Instances are leaked.
static CURRENT: AtomicPtr<Instance> = AtomicPtr::new(ptr::null_mut());

/// Whether a thread is making the service.
static MAKING: AtomicBool = AtomicBool::new(false);

/// The process that the tables of this library describe. A child of `vfork` runs in the same memory, and must
/// not change them for its parent.
static OWNER: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// Without a destructor and with a constant start, so that it is a plain word that is there from the
    /// thread's first instruction to its last.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, calls of this thread go to the real system.
#[derive(Debug)]
pub struct Bypass {
    not_send: PhantomData<*const ()>,
}

impl Bypass {
    /// Begins.
    pub fn enter() -> Self {
        DEPTH.with(|depth| depth.set(depth.get().saturating_add(1)));
        Self { not_send: PhantomData }
    }

    /// Whether this thread has one.
    pub fn is_active() -> bool {
        DEPTH.with(Cell::get) > 0
    }
}

impl Drop for Bypass {
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(depth.get().saturating_sub(1)));
    }
}

impl Instance {
    /// The service of this process, made now if there is none.
    pub fn get(preload: &Preload) -> &'static Self {
        loop {
            if let Some(instance) = Self::current() {
                return instance;
            }
            if !owns_tables() {
                return &NONE_YET;
            }
            if !Self::make(preload) {
                // Another thread is at it. Not a lock: one could not be released in a forked child.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Makes the service unless a thread is at it.
    fn make(preload: &Preload) -> bool {
        // From here on a signal handler of this thread is told that the real system is meant: it could not wait for the thread that it
        // interrupts.
        let _bypass = Bypass::enter();
        if MAKING.swap(true, Ordering::Acquire) {
            return false;
        }
        if Self::current().is_none() {
            let made = Box::leak(Box::new(Self { service: make(preload) }));
            CURRENT.store(made, Ordering::Release);
        }
        MAKING.store(false, Ordering::Release);
        true
    }

    fn current() -> Option<&'static Self> {
        // SAFETY: the pointer is null or came from `Box::leak`, and nothing frees it.
        unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
    }

    /// Whether it serves this process: it was not made by the parent of a fork.
    pub fn is_live(&self) -> bool {
        Self::current().is_some_and(|current| ptr::eq(current, self)) && owns_tables()
    }

    /// Calls the service, which leaves `errno` as it is. A panic is reported by the panic hook and becomes `EIO`: nothing unwinds into C.
    pub fn call<T>(&self, call: impl FnOnce(&dyn KfdService) -> Result<T>) -> Result<T> {
        let service = self.service.as_deref().map_err(|errno| *errno)?;
        let _uncancelled = Uncancelled::enter();
        let _bypass = Bypass::enter();
        // Look-ups may be on the way to a call of the real system that goes well.
        let errno = Errno::last_raw();
        let result = catch_unwind(AssertUnwindSafe(|| call(service))).unwrap_or(Err(Errno::EIO));
        Errno::set_raw(errno);
        result
    }

    /// What the absolute `path` comes to.
    pub fn resolve(&self, preload: &Preload, path: &[u8], follow: bool) -> Resolved {
        resolve(preload.prefixes, path, follow, |path: &Path| {
            self.call(|service| Ok(service.lookup(path))).unwrap_or_else(Lookup::Missing)
        })
    }
}

fn make(preload: &Preload) -> Result<Box<dyn KfdService>> {
    let _uncancelled = Uncancelled::enter();
    let errno = Errno::last_raw();
    let made = catch_unwind(preload.service);
    Errno::set_raw(errno);
    match made {
        Ok(Ok(service)) => return Ok(service),
        Ok(Err(error)) => eprintln!("{}: {error}", preload.name),
        Err(_) => eprintln!("{}: the service could not be made", preload.name),
    }
    Err(Errno::ENODEV)
}

/// Whether this is the process that the tables describe, and not a child of `vfork` or of a bare `clone`
/// that uses a copy.
pub fn owns_tables() -> bool {
    let pid = own_pid();
    match OWNER.load(Ordering::Acquire) {
        // A library's constructor that runs before this one's.
        0 => {
            loaded();
            OWNER.load(Ordering::Acquire) == pid
        }
        owner => owner == pid,
    }
}

/// The library was loaded: remembers the process and arranges for its forks, once.
pub fn loaded() {
    if OWNER.compare_exchange(0, own_pid(), Ordering::AcqRel, Ordering::Acquire).is_err() {
        return;
    }
    crate::trace::loaded();
    crate::kernel::bind();
    // SAFETY: the handler is a function of this library, which is never unloaded. A failure (no memory at
    // start) leaves forked children without their own service, with EBADF on every device file.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
}

/// Runs in the child of a fork, which has one thread and may find any lock taken.
unsafe extern "C" fn forked() {
    OWNER.store(own_pid(), Ordering::Release);
    let parents = CURRENT.swap(ptr::null_mut(), Ordering::AcqRel);
    MAKING.store(false, Ordering::Release);
    crate::hidden::forget();
    // SAFETY: the pointer is null or came from `Box::leak`, and nothing frees it.
    if let Some(parents) = unsafe { parents.as_ref() } {
        // A panic becomes an error that nobody can be told about.
        let _ = parents.call(|service| {
            service.forked();
            Ok(())
        });
    }
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_pid()
}
