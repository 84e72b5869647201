//! The side that asks.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kfd_abi::drm::amdgpu::VmPageFlags;
use kfd_abi::event::HsaHwExceptionData;
use rustix::thread::{Timespec, futex};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    ANSWER_AT, Answer, BYTES_AT, CLIENT_LOCK, ENDING, FETCH, FILE_SIZE, FIND, MAGIC, MOST, Mapped,
    QUESTION_AT, Question, READ, RESET, SERVER_LOCK, VERSION, WRITE, reason_of,
};
use crate::locks;
use crate::space::{Fault, FaultReason};

/// How long an answer may take. What is asked is a copy of some pages.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum MailboxError {
    /// The GPU could not do it.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The file cannot be used.
    #[error("mailbox {}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The file is something else, or of another version.
    #[error("{} is no mailbox of this version", path.display())]
    Foreign {
        /// Which.
        path: PathBuf,
    },
    /// The process has ended.
    #[error("the process of mailbox {} is gone", path.display())]
    Gone {
        /// Which.
        path: PathBuf,
    },
    /// The process does not answer.
    #[error("the process of mailbox {} does not answer", path.display())]
    Silent {
        /// Which.
        path: PathBuf,
    },
}

/// What a GPU's page table has at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where the mapping starts.
    pub start: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Permissions and memory type.
    pub flags: VmPageFlags,
}

/// A process's GPU memory, seen from outside.
#[derive(Debug)]
pub struct Mailbox {
    path: PathBuf,
    file: File,
    mapped: Mapped,
}

impl Mailbox {
    /// Opens a mailbox.
    ///
    /// # Errors
    /// [`MailboxError::File`], [`MailboxError::Foreign`].
    pub fn open(path: &Path) -> Result<Self, MailboxError> {
        let failed = |error| MailboxError::File { path: path.to_owned(), error };
        let file = File::options().read(true).write(true).open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() != FILE_SIZE {
            return Err(MailboxError::Foreign { path: path.to_owned() });
        }
        let mapped = Mapped::of(&file).map_err(|errno| failed(errno.into()))?;
        let words = mapped.words();
        if words.magic.load(Ordering::Acquire) != MAGIC || words.version.load(Ordering::Relaxed) != VERSION {
            return Err(MailboxError::Foreign { path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), file, mapped })
    }

    /// The mailboxes in a directory whose processes live, by name. What others left behind is removed.
    ///
    /// # Errors
    /// [`MailboxError::File`] when the directory cannot be read.
    pub fn find(directory: &Path) -> Result<Vec<Self>, MailboxError> {
        let failed = |error| MailboxError::File { path: directory.to_owned(), error };
        let mut paths = Vec::new();
        for entry in fs::read_dir(directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension() == Some(OsStr::new(ENDING)) {
                paths.push(path);
            }
        }
        paths.sort();
        let mut found = Vec::new();
        for path in paths {
            // One that is just being made or removed.
            let Ok(mailbox) = Self::open(&path) else { continue };
            if mailbox.is_alive() {
                found.push(mailbox);
            } else {
                let _ = fs::remove_file(&path);
            }
        }
        Ok(found)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The process's number as it sees itself.
    pub fn pid(&self) -> Option<u32> {
        self.path.file_name()?.to_str()?.split_once('-')?.0.parse().ok()
    }

    /// Whether the process lives.
    pub fn is_alive(&self) -> bool {
        locks::held_elsewhere(&self.file, SERVER_LOCK, 1).unwrap_or(false)
    }

    /// Reads as the GPU with KFD id `gpu_id` does.
    ///
    /// # Errors
    /// [`MailboxError::Fault`] with the first byte that the GPU could not read.
    pub fn read(&self, gpu_id: u32, va: u64, buffer: &mut [u8]) -> Result<(), MailboxError> {
        self.load(READ, "read", gpu_id, va, buffer)
    }

    /// Fetches instructions as the GPU does: the mapping must be executable.
    ///
    /// # Errors
    /// [`MailboxError::Fault`] with the first byte that the GPU could not fetch.
    pub fn fetch(&self, gpu_id: u32, va: u64, buffer: &mut [u8]) -> Result<(), MailboxError> {
        self.load(FETCH, "execute", gpu_id, va, buffer)
    }

    fn load(
        &self,
        operation: u32,
        access: &'static str,
        gpu_id: u32,
        va: u64,
        buffer: &mut [u8],
    ) -> Result<(), MailboxError> {
        let mut at = va;
        for part in buffer.chunks_mut(MOST) {
            let question = Question { operation, gpu_id, va: at, length: part.len() as u64 };
            self.ask(&question, access, None, Some(part))?;
            at = at.wrapping_add(question.length);
        }
        Ok(())
    }

    /// Writes as the GPU does.
    ///
    /// # Errors
    /// [`MailboxError::Fault`] with the first byte that the GPU could not write; those before it are written.
    pub fn write(&self, gpu_id: u32, va: u64, bytes: &[u8]) -> Result<(), MailboxError> {
        let mut at = va;
        for part in bytes.chunks(MOST) {
            let question = Question { operation: WRITE, gpu_id, va: at, length: part.len() as u64 };
            self.ask(&question, "write", Some(part), None)?;
            at = at.wrapping_add(question.length);
        }
        Ok(())
    }

    /// What the GPU's page table has at an address.
    ///
    /// # Errors
    /// [`MailboxError::Fault`] when nothing is mapped there.
    pub fn entry(&self, gpu_id: u32, va: u64) -> Result<Entry, MailboxError> {
        let question = Question { operation: FIND, gpu_id, va, length: 0 };
        let answer = self.ask(&question, "find", None, None)?;
        let flags = VmPageFlags::from_bits_retain(answer.flags);
        Ok(Entry { start: answer.va, size: answer.size, flags })
    }

    /// Tells the process's events that a GPU was reset (`kfd_signal_reset_event`); what the GPU does goes on. Returns how many
    /// events heard it.
    ///
    /// # Errors
    /// [`MailboxError::Fault`] before the process has GPU memory.
    pub fn reset(&self, data: &HsaHwExceptionData) -> Result<u64, MailboxError> {
        let question = Question { operation: RESET, gpu_id: data.gpu_id, va: 0, length: 0 };
        Ok(self.ask(&question, "reset", Some(data.as_bytes()), None)?.size)
    }

    /// One question, alone among the clients of this mailbox.
    fn ask(
        &self,
        question: &Question,
        access: &'static str,
        bytes: Option<&[u8]>,
        buffer: Option<&mut [u8]>,
    ) -> Result<Answer, MailboxError> {
        let failed = |error: io::Error| MailboxError::File { path: self.path.clone(), error };
        let fault = |va, reason| MailboxError::from(Fault { gpu_id: question.gpu_id, va, access, reason });
        if self.mapped.words().serving.load(Ordering::Acquire) == 0 {
            // The process has made no GPU memory yet.
            return Err(match self.is_alive() {
                true => fault(question.va, FaultReason::NotPresent),
                false => MailboxError::Gone { path: self.path.clone() },
            });
        }
        // A description of its own for each question, so that threads of one client keep apart as well.
        let lock = File::options().write(true).read(true).open(&self.path).map_err(failed)?;
        locks::wait(&lock, CLIENT_LOCK, 1).map_err(|errno| failed(errno.into()))?;
        if let Some(bytes) = bytes {
            self.file.write_all_at(bytes, BYTES_AT).map_err(failed)?;
        }
        self.file.write_all_at(question.as_bytes(), QUESTION_AT).map_err(failed)?;
        let words = self.mapped.words();
        let number = words.asked.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        futex::wake(&words.asked, futex::Flags::empty(), 1).map_err(|error| failed(error.into()))?;
        self.wait_for(number)?;
        let mut answer = Answer::new_zeroed();
        self.file.read_exact_at(answer.as_mut_bytes(), ANSWER_AT).map_err(failed)?;
        if let Some(reason) = reason_of(answer.reason) {
            return Err(fault(answer.va, reason));
        }
        if let Some(buffer) = buffer {
            self.file.read_exact_at(buffer, BYTES_AT).map_err(failed)?;
        }
        Ok(answer)
    }

    fn wait_for(&self, number: u32) -> Result<(), MailboxError> {
        let words = self.mapped.words();
        let start = Instant::now();
        loop {
            let answered = words.answered.load(Ordering::Acquire);
            if answered == number {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                return Err(MailboxError::Silent { path: self.path.clone() });
            }
            let pause = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            // Woken, timed out or changed before: look again.
            let _ = futex::wait(&words.answered, futex::Flags::empty(), answered, Some(&pause));
            if !self.is_alive() && words.answered.load(Ordering::Acquire) != number {
                return Err(MailboxError::Gone { path: self.path.clone() });
            }
        }
    }
}
