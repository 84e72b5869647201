//! The debug mailbox: reads and writes of a process's memory *as its GPUs see it*, from outside the process.
//!
//! A process that is started with [`DEBUG_VARIABLE`] set to a directory makes a file in it,
//! `PID-RANDOM.mailbox`, and serves what is asked through that file until it ends. A test opens the file with
//! [`Mailbox`] and so learns what the GPU's page table has at an address: the bytes, or the fault. It can also have a GPU
//! reset, as far as events tell of that.
//!
//! The file is removed when the process exits. One that was killed leaves it behind, and so does a worker in its
//! sandbox: [`Mailbox::find`] passes over files whose process is gone, and removes them.
//!
//! Whoever may write to the directory reads and writes the process's GPU memory: it is for tests, as the model is.
//!
//! Unsafe code: the words by which both sides wait for each other are mapped from the file.
#![allow(unsafe_code)]

mod client;
mod server;

pub use client::{Mailbox, MailboxError};
pub use kfd_abi::event::HsaHwExceptionData;
pub(crate) use server::Server;

use std::fs::File;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use kfd_seam::Result;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::arena::PAGE;
use crate::space::FaultReason;

/// The environment variable that names the directory for mailboxes.
pub const DEBUG_VARIABLE: &str = "VIRTIO_KFD_MODEL_DEBUG";

/// Ending of a mailbox's name.
const ENDING: &str = "mailbox";

/// `KFDM`, and the version of this layout.
const MAGIC: u32 = 0x4d44_464b;
const VERSION: u32 = 1;

/// Bytes that one exchange carries; longer reads and writes are several.
const MOST: usize = 64 << 10;

/// Where in the file the question and the bytes lie. The first page has the words.
const QUESTION_AT: u64 = PAGE;
const ANSWER_AT: u64 = PAGE + 256;
const BYTES_AT: u64 = 2 * PAGE;
const FILE_SIZE: u64 = BYTES_AT + MOST as u64;

/// Byte of the file that the serving process has locked, and the one that a client locks while it asks.
const SERVER_LOCK: u64 = 0;
const CLIENT_LOCK: u64 = 1;

/// What is asked for ([`Question::operation`]).
const READ: u32 = 0;
const WRITE: u32 = 1;
const FETCH: u32 = 2;
const FIND: u32 = 3;
const RESET: u32 = 4;

/// The words, at the start of the file.
#[repr(C)]
struct Words {
    magic: AtomicU32,
    version: AtomicU32,
    /// 1 once a thread answers. Before that the process has no GPU memory.
    serving: AtomicU32,
    /// Number of the last question; clients count it up.
    asked: AtomicU32,
    /// Number of the last question that was answered.
    answered: AtomicU32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Question {
    operation: u32,
    gpu_id: u32,
    va: u64,
    length: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Answer {
    /// 0, or the fault.
    reason: u32,
    /// FIND: flags of the mapping.
    flags: u32,
    /// Where the fault is. FIND: start of the mapping.
    va: u64,
    /// FIND: size of the mapping in bytes.
    size: u64,
}

/// A fault by number; 0 is none.
fn number_of(reason: FaultReason) -> u32 {
    match reason {
        FaultReason::NotPresent => 1,
        FaultReason::NotReadable => 2,
        FaultReason::ReadOnly => 3,
        FaultReason::NoExecute => 4,
        FaultReason::NoBacking => 5,
    }
}

fn reason_of(number: u32) -> Option<FaultReason> {
    let all = [
        FaultReason::NotPresent,
        FaultReason::NotReadable,
        FaultReason::ReadOnly,
        FaultReason::NoExecute,
        FaultReason::NoBacking,
    ];
    all.into_iter().find(|reason| number_of(*reason) == number)
}

/// The words of a mailbox, mapped.
#[derive(Debug)]
struct Mapped {
    words: NonNull<Words>,
}

// SAFETY: the mapping stays until this value is dropped, and all of it is atomics.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the first page of `file`, which must have it.
    fn of(file: &File) -> Result<Self> {
        let length = NonZeroUsize::new(PAGE as usize).ok_or(Errno::EINVAL)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Self { words: start.cast() })
    }

    fn words(&self) -> &Words {
        // SAFETY: the page is mapped while `self` lives, is aligned for `Words` and longer; the fields are atomics, so
        // that another process may change them at any time.
        unsafe { self.words.as_ref() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `of` with this length, and no reference outlives `self`.
        let _ = unsafe { munmap(self.words.cast(), PAGE as usize) };
    }
}
