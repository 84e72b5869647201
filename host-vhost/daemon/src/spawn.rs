//! Starting processes with chosen descriptors, so that none outlives the one that started it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Once;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use rustix::process::{
    Resource, Rlimit, Signal, getpid, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
};

/// Numbers that a child's descriptors get are below this.
const FIRST_FREE: RawFd = 16;

/// Starts a process. `descriptors` become the child's 3, 4 and so on. It has no other but standard error, no
/// input, and an empty environment but for `command`'s. It is killed when the calling thread ends, which must be
/// the process's main thread.
#[allow(unsafe_code)] // pre_exec: nothing else runs code between fork and exec
pub fn spawn(mut command: Command, descriptors: &[BorrowedFd<'_>]) -> io::Result<Child> {
    // Above every target, so that no copy overwrites a source.
    let sources: Vec<OwnedFd> =
        descriptors.iter().map(|fd| duplicate_above(*fd, FIRST_FREE)).collect::<io::Result<_>>()?;
    let copies: Vec<(RawFd, RawFd)> =
        sources.iter().map(AsRawFd::as_raw_fd).zip(kfd_ipc::IPC_FD..FIRST_FREE).collect();
    let parent = getpid();
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let before_exec = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != Some(parent) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        for (from, to) in &copies {
            copy_to(*from, *to)?;
        }
        Ok(())
    };
    // SAFETY: the closure runs in the child after fork, where only async-signal-safe calls are allowed: it makes
    // prctl, getppid and dup2 and reads a vector that was filled before; it does not allocate or lock.
    unsafe { command.pre_exec(before_exec) };
    command.spawn()
}

fn duplicate_above(descriptor: BorrowedFd<'_>, least: RawFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(descriptor, least)?)
}

/// Bytes that workers leave free for a stack below the end of all addresses. Linux puts a process's mappings below that
/// (`mmap_base`, arch/x86/mm/mmap.c), so that they lie between 0x4400_0000_0000 and 0x5400_0000_0000, however many bits of an
/// address are random. Programs with common limits have theirs above 0x6f00_0000_0000, those without a limit from
/// 0x2aaa_0000_0000 on: guests have room for the save areas of queues at the same addresses as a worker (`exceptions` of the worker).
const WORKER_STACK_LIMIT: u64 = 0x2c00_0000_0000;

/// Has a program that is yet to be started put its mappings where [`WORKER_STACK_LIMIT`] says, where the hard limit allows it.
#[allow(unsafe_code)] // pre_exec: the limit counts from exec on, and is not for this process
pub fn keep_from_guests_addresses(command: &mut Command) {
    let hard = getrlimit(Resource::Stack).maximum;
    if hard.is_some_and(|hard| hard < WORKER_STACK_LIMIT) {
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            tracing::warn!(
            "the hard limit of the stack is below {WORKER_STACK_LIMIT}: runtimes of guests may fail to make queues"
        );
        });
        return;
    }
    let before_exec =
        move || Ok(setrlimit(Resource::Stack, Rlimit { current: Some(WORKER_STACK_LIMIT), maximum: hard })?);
    // SAFETY: the closure runs in the child after fork, where only async-signal-safe calls are allowed: it makes setrlimit,
    // and does not allocate or lock.
    unsafe { command.pre_exec(before_exec) };
}

#[allow(unsafe_code)] // dup2 to a fixed number has no safe form: it would close what another owner holds
fn copy_to(from: RawFd, to: RawFd) -> io::Result<()> {
    // SAFETY: dup2 takes two numbers and touches no memory. It runs in the child between fork and exec only, where
    // nobody owns what `to` may have been.
    let result = unsafe { nix::libc::dup2(from, to) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes over a descriptor that this process was started with, and keeps it from its own children.
#[allow(unsafe_code)] // a descriptor that comes by its number only
pub fn take_inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number < kfd_ipc::IPC_FD {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: a descriptor number is borrowed for one fcntl, which fails on a number that is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(borrowed, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    // SAFETY: the number is open, since fcntl took it, and this is called once for each number, at the start of
    // the process, before anything else opens a descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Keeps from all children what this process was started with by oversight, be it of a shell or a service manager.
#[allow(unsafe_code)] // close_range has no safe form
pub fn keep_inherited_to_ourselves() -> io::Result<()> {
    let (first, last) = (kfd_ipc::IPC_FD.unsigned_abs(), u32::MAX);
    // By its number: the C library may be older than its function.
    // SAFETY: close_range with CLOSE_RANGE_CLOEXEC sets a flag of the open descriptors, closes none and touches no
    // memory.
    let result = unsafe {
        nix::libc::syscall(nix::libc::SYS_close_range, first, last, nix::libc::CLOSE_RANGE_CLOEXEC)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
