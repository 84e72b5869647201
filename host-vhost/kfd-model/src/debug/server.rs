//! The side that answers: a thread of the process that has the model.

use std::ffi::c_int;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::JoinHandle;

use kfd_abi::event::HsaHwExceptionData;
use nix::libc;
use nix::sys::signal::{SigSet, SigmaskHow};
use nix::unistd::close;
use rustix::thread::futex;
use zerocopy::{FromZeros, IntoBytes};

use super::{
    ANSWER_AT, Answer, BYTES_AT, ENDING, FETCH, FILE_SIZE, FIND, MAGIC, MOST, Mapped, QUESTION_AT, Question,
    READ, RESET, SERVER_LOCK, VERSION, WRITE, number_of,
};
use crate::locks;
use crate::process::Process;
use crate::space::{Fault, FaultReason};

/// A mailbox of this process.
///
/// Its file is made at once, since a worker cannot make files later; the thread begins with the first GPU memory, so
/// that it is inside the sandbox.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    file: File,
    mapped: Mapped,
    ends: AtomicBool,
}

impl Server {
    /// Makes the file in `directory`.
    ///
    /// # Errors
    /// What creating, locking and mapping it answer.
    pub fn new(directory: &Path) -> io::Result<Self> {
        let random = RandomState::new().build_hasher().finish();
        let path = directory.join(format!("{}-{random:016x}.{ENDING}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        locks::take(&file, SERVER_LOCK, 1)?;
        file.set_len(FILE_SIZE)?;
        let mapped = Mapped::of(&file)?;
        mapped.words().version.store(VERSION, Ordering::Relaxed);
        mapped.words().magic.store(MAGIC, Ordering::Release);
        remove_at_exit(&path);
        Ok(Self {
            path,
            shared: Arc::new(Shared { file, mapped, ends: AtomicBool::new(false) }),
            thread: Mutex::default(),
        })
    }

    /// This is a copy in a forked child: the file is to say that the parent lives, and no other.
    pub fn leave_to_parent(&self) {
        // Not dropped: a copy in a forked child never is.
        let _ = close(self.shared.file.as_raw_fd());
    }

    /// Starts the thread, if it does not run yet. When there can be no thread, nobody answers.
    pub fn start(&self, process: &Arc<Process>) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_some() {
            return;
        }
        let (shared, process) = (self.shared.clone(), process.clone());
        // The program's signals are handled by its own threads.
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
        let started =
            std::thread::Builder::new().name("kfd-debug".into()).spawn(move || shared.serve(&process));
        if let Ok(before) = before {
            let _ = before.thread_set_mask();
        }
        if let Ok(handle) = started {
            *thread = Some(handle);
            self.shared.mapped.words().serving.store(1, Ordering::Release);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        let words = self.shared.mapped.words();
        words.asked.fetch_add(1, Ordering::AcqRel);
        let _ = futex::wake(&words.asked, futex::Flags::empty(), 1);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Shared {
    fn serve(&self, process: &Process) {
        let words = self.mapped.words();
        let mut bytes = vec![0; MOST];
        loop {
            let asked = words.asked.load(Ordering::Acquire);
            if self.ends.load(Ordering::Acquire) {
                return;
            }
            if asked == words.answered.load(Ordering::Relaxed) {
                // Woken, interrupted or changed before: look again.
                let _ = futex::wait(&words.asked, futex::Flags::empty(), asked, None);
                continue;
            }
            // Nobody can be told of a failure here; the client hears that nothing is mapped.
            let answer =
                self.answer(process, &mut bytes).unwrap_or(Answer { reason: 1, ..Answer::default() });
            let _ = self.file.write_all_at(answer.as_bytes(), ANSWER_AT);
            words.answered.store(asked, Ordering::Release);
            let _ = futex::wake(&words.answered, futex::Flags::empty(), u32::MAX >> 1);
        }
    }

    fn answer(&self, process: &Process, bytes: &mut [u8]) -> io::Result<Answer> {
        let mut question = Question::new_zeroed();
        self.file.read_exact_at(question.as_mut_bytes(), QUESTION_AT)?;
        let Question { operation, gpu_id, va, length } = question;
        let wanted = usize::try_from(length).unwrap_or(usize::MAX).min(bytes.len());
        let Some(bytes) = bytes.get_mut(..wanted) else { return Err(io::ErrorKind::InvalidData.into()) };
        let done = match operation {
            READ => process.read_gpu(gpu_id, va, bytes),
            FETCH => process.fetch_gpu(gpu_id, va, bytes),
            WRITE => {
                self.file.read_exact_at(bytes, BYTES_AT)?;
                process.write_gpu(gpu_id, va, bytes)
            }
            FIND => return Ok(find(process, gpu_id, va)),
            RESET => {
                let mut data = HsaHwExceptionData::new_zeroed();
                self.file.read_exact_at(data.as_mut_bytes(), BYTES_AT)?;
                let heard = process.events.hardware_exception(data);
                return Ok(Answer { size: u64::try_from(heard).unwrap_or(u64::MAX), ..Answer::default() });
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        if let Err(Fault { va, reason, .. }) = done {
            return Ok(Answer { reason: number_of(reason), va, ..Answer::default() });
        }
        if operation != WRITE {
            self.file.write_all_at(bytes, BYTES_AT)?;
        }
        Ok(Answer::default())
    }
}

fn find(process: &Process, gpu_id: u32, va: u64) -> Answer {
    let nothing = Answer { reason: number_of(FaultReason::NotPresent), va, ..Answer::default() };
    let Ok((_, device)) = process.device(gpu_id) else { return nothing };
    let space = device.space();
    match space.find(va) {
        Some((start, mapping)) => {
            Answer { reason: 0, flags: mapping.flags.bits(), va: start, size: mapping.size }
        }
        None => nothing,
    }
}

/// Files to remove when this process exits, with the process that made them: a preload library's model lives as
/// long as the process and is never dropped.
static LEFT: Mutex<Vec<(u32, PathBuf)>> = Mutex::new(Vec::new());

fn remove_at_exit(path: &Path) {
    static REGISTERED: Once = Once::new();
    extern "C" fn at_exit() {
        // In a forked child the list is its parent's.
        let own = std::process::id();
        if let Ok(left) = LEFT.try_lock() {
            for (_, path) in left.iter().filter(|(pid, _)| *pid == own) {
                let _ = std::fs::remove_file(path);
            }
        }
    }
    REGISTERED.call_once(|| {
        // SAFETY: the handler is a function of this library, which is never unloaded before it has run (the C library
        // runs a library's handlers when it unloads it). Where it is refused, the file stays.
        let _: c_int = unsafe { libc::atexit(at_exit) };
    });
    // Not waited for: in a forked child it may be locked for ever. The file stays then.
    if let Ok(mut left) = LEFT.try_lock() {
        left.push((std::process::id(), path.to_owned()));
    }
}
