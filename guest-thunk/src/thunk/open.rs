//! Open and close, and what a fork means.
//!
//! A connection belongs to the process that made it. A forked child has none: its calls answer that nothing is open
//! until it opens anew. What it inherited is not looked at, since other threads of the parent may
//! have held locks in it; only its descriptors are closed. So a fork needs to wait for nobody. It may close as often as its
//! parent had opened, which does nothing: AMD's library leaves the child that count until it opens.
#![allow(unsafe_code, reason = "pthread_atfork, and state that is reached from its handler without a lock")]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, RwLock};

use hsakmt_abi::status::HsakmtStatus;

use super::lock::{lock, read, write};
use super::refusal::{Level, Outcome, Refusal, read_level, say};
use super::settings::{Registration, Settings};
use super::{Thunk, adopt};
use crate::client::{Client, ConnectError};
use crate::transport::TransportError;

/// The state of a process. Never freed: a forked child leaves its parent's behind.
struct Process {
    pid: u32,
    /// How often it was opened more than closed.
    opened: Mutex<u64>,
    /// The same for the fork handler.
    count: AtomicU64,
    thunk: RwLock<Option<Arc<Thunk>>>,
    /// The same for the fork handler: null, or a thunk that `thunk` keeps.
    client: AtomicPtr<Client>,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

/// How often the parent had opened it, less the closes of this child, until that opens.
static INHERITED: AtomicU64 = AtomicU64::new(0);

impl Process {
    fn new() -> Self {
        Process {
            pid: std::process::id(),
            opened: Mutex::new(0),
            count: AtomicU64::new(0),
            thunk: RwLock::default(),
            client: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// This process's state, if it ever opened.
    fn existing() -> Option<&'static Process> {
        // SAFETY: PROCESS is null or a leaked box.
        unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
    }

    /// This process's state, made if need be.
    fn current() -> &'static Process {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            // SAFETY: the handler is a function of this library (glibc takes it back when the library is unloaded)
            // that does only what is allowed after a fork.
            // Without a handler the process id tells, at the next open.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        });
        if let Some(process) = Process::existing() {
            if process.pid == std::process::id() {
                return process;
            }
            // A child that no handler was called in, since it was made by clone or the bare system call.
            leave_parent();
        }
        let fresh = Box::into_raw(Box::new(Process::new()));
        match PROCESS.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it is a box that nothing frees any more.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: the box was not published.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: what is published is a leaked box.
                unsafe { &*other }
            }
        }
    }
}

/// Closes what was inherited from the parent, and forgets the rest.
fn leave_parent() {
    let inherited = PROCESS.swap(ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: PROCESS is null or a leaked box.
    let Some(parent) = (unsafe { inherited.as_ref() }) else { return };
    INHERITED.store(parent.count.load(Ordering::Acquire), Ordering::Release);
    // SAFETY: the pointer is taken back before the client is dropped, and the child's memory is as the parent's was
    // at the fork: so it is null, or the client is whole.
    if let Some(client) = unsafe { parent.client.load(Ordering::Acquire).as_ref() } {
        client.abandon();
    }
}

/// Only loads, stores and the system calls of `abandon` happen here: nothing that a lock or the allocator could stop.
extern "C" fn after_fork_in_child() {
    leave_parent();
}

/// `hsaKmtOpenKFD`. `all_executable` is for a caller that does not say what it executes; who opens first decides.
pub fn open(all_executable: bool) -> Outcome<()> {
    let process = Process::current();
    INHERITED.store(0, Ordering::Release);
    let mut opened = lock(&process.opened);
    if *opened > 0 {
        *opened = opened.saturating_add(1);
        process.count.store(*opened, Ordering::Release);
        return Err(Refusal::new(HsakmtStatus::KERNEL_ALREADY_OPENED, "opened before; the open counts"));
    }
    read_level();
    let client = Client::connect().map_err(|error| {
        say(Level::Error, || format!("hsaKmtOpenKFD: {error}"));
        refusal(&error)
    })?;
    let (major, minor) = client.kfd_version();
    if major != 1 {
        let why = format!("the host's KFD has interface version {major}.{minor}, expected 1.x");
        return Err(Refusal::new(HsakmtStatus::DRIVER_MISMATCH, why));
    }
    let settings = Settings { all_executable, ..Settings::from_environment() };
    if settings.registration != Registration::Refuse {
        adopt::fork::install();
    }
    let thunk = Arc::new(Thunk::new(client, settings));
    process.client.store(ptr::from_ref(&thunk.client).cast_mut(), Ordering::Release);
    *write(&process.thunk) = Some(thunk);
    *opened = 1;
    process.count.store(1, Ordering::Release);
    Ok(())
}

/// No device, or one that cannot be used, is like no `/dev/kfd`.
fn refusal(error: &ConnectError) -> Refusal {
    let status = match error {
        ConnectError::Handshake(_) | ConnectError::Transport(TransportError::Handshake(_)) => {
            HsakmtStatus::DRIVER_MISMATCH
        }
        ConnectError::Transport(_) | ConnectError::Hello(_) | ConnectError::Offer { .. } => {
            HsakmtStatus::KERNEL_IO_CHANNEL_NOT_OPENED
        }
    };
    Refusal::new(status, error.to_string())
}

/// `hsaKmtCloseKFD`: the last close ends the connection and all that is left on it.
pub fn close() -> Outcome<()> {
    let process = match Process::existing() {
        Some(process) if process.pid == std::process::id() => process,
        // A child that no handler was called in.
        Some(_) => {
            leave_parent();
            return close_inherited();
        }
        None => return close_inherited(),
    };
    let mut opened = lock(&process.opened);
    match *opened {
        0 => return close_inherited(),
        1 => {
            process.client.store(ptr::null_mut(), Ordering::Release);
            let thunk = write(&process.thunk).take();
            if let Some(thunk) = &thunk {
                thunk.shut_down();
            }
            // Threads that are in a call keep it until they are out.
            drop(thunk);
            *opened = 0;
        }
        more => *opened = more.saturating_sub(1),
    }
    process.count.store(*opened, Ordering::Release);
    Ok(())
}

/// A close of what the parent had opened.
fn close_inherited() -> Outcome<()> {
    let less = |count: u64| count.checked_sub(1);
    match INHERITED.fetch_update(Ordering::AcqRel, Ordering::Acquire, less) {
        Ok(_) => Ok(()),
        Err(_) => Err(Refusal::closed()),
    }
}

/// The connection, for all other calls.
pub fn current() -> Outcome<Arc<Thunk>> {
    let process = Process::existing().ok_or_else(Refusal::closed)?;
    read(&process.thunk).clone().ok_or_else(Refusal::closed)
}
