//! A child of `fork` whose memory is put right before it runs.
//!
//! What is exchanged while all threads are stopped (variables: stacks, data of programs) is not inherited by children
//! (`MADV_DONTFORK`): a child that shared its parent's stack would destroy it by its first call. A handler of the child's would
//! be too late, since it runs on that stack. So the tracer has the forking thread from before the fork to after it. The kernel
//! then stops the child before its first instruction, and the parent in its call; the tracer copies the content as it is at
//! that moment to private memory of the child's, and has the child move that to its place, by system calls that it makes the
//! child do as a debugger would.
#![allow(unsafe_code, reason = "registers of the child, and memory that the tracer shares")]

use std::ops::Range;

use super::tracer::{CannotStop, Obstacle, Tracer};

/// Memory of the parent, and as much private memory for its copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The memory.
    pub range: Range<u64>,
    /// First address of the private memory.
    pub place: u64,
    /// What the application may do with it, as mmap(2) is told.
    pub access: i32,
    /// The copy is made.
    pub filled: bool,
}

impl Copied {
    /// What lies below an address, unless that is nothing, and what from there on, which may be nothing.
    pub fn split_at(self, address: u64) -> (Option<Copied>, Copied) {
        let middle = address.clamp(self.range.start, self.range.end);
        let place = self.place.saturating_add(middle.saturating_sub(self.range.start));
        let below = Copied { range: self.range.start..middle, ..self.clone() };
        let above = Copied { range: middle..self.range.end, place, ..self };
        ((below.range.start < below.range.end).then_some(below), above)
    }

    /// The private memory.
    pub fn aside(&self) -> Range<u64> {
        self.place..self.place.saturating_add(self.range.end.saturating_sub(self.range.start))
    }
}

/// All of it.
pub type Copies = Vec<Copied>;

/// Where the calling convention and the registers are not known here, no child can be put right.
pub const AVAILABLE: bool = cfg!(target_arch = "x86_64");

/// Traces this thread until the tracer is dropped. The copies are only read, and have to live as long.
pub fn follow(copies: &Copies) -> Result<Tracer, CannotStop> {
    if !AVAILABLE {
        return Err(CannotStop { obstacle: Obstacle::System, errno: libc::ENOSYS });
    }
    #[cfg(target_arch = "x86_64")]
    {
        let mut tracer = Tracer::launch(x86::trace, |arena| {
            let copies = std::ptr::from_ref(copies).cast_mut().cast();
            arena.task.store(copies, std::sync::atomic::Ordering::Relaxed);
        })?;
        tracer.settled()?;
        // Handlers of others run before the fork, and may make threads, which inherit the mask.
        tracer.unblock();
        Ok(tracer)
    }
    #[cfg(not(target_arch = "x86_64"))]
    Err(CannotStop { obstacle: Obstacle::System, errno: copies.len() as i32 })
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::io;
    use std::mem::MaybeUninit;
    use std::ops::Range;
    use std::sync::atomic::Ordering;

    use super::{Copied, Copies};
    use crate::thunk::adopt::pages;
    use crate::thunk::adopt::syscall::call;
    use crate::thunk::adopt::tracer::{
        Arena, CannotStop, EVENT_STOP, News, Obstacle, await_news, begin, exit, ptrace, step, wait,
    };

    /// Stops for system calls have this bit (PTRACE_O_TRACESYSGOOD).
    const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;

    /// The tracer.
    pub extern "C" fn trace(argument: *mut libc::c_void) -> libc::c_int {
        let arena = begin(argument);
        let options = (libc::PTRACE_O_TRACEFORK | libc::PTRACE_O_TRACESYSGOOD) as usize;
        match ptrace(libc::PTRACE_SEIZE, arena.caller.load(Ordering::Relaxed), options) {
            0 => {
                arena.set_step(step::READY);
                accompany(arena);
            }
            errno @ libc::EPERM => arena.fail(CannotStop { obstacle: Obstacle::Forbidden, errno }),
            errno => arena.fail(CannotStop { obstacle: Obstacle::System, errno }),
        }
        // The tracer's end lets the thread go, wherever it is.
        exit()
    }

    /// Lets the thread do what it does, until it has forked.
    fn accompany(arena: &Arena) {
        let caller = arena.caller.load(Ordering::Relaxed);
        while arena.step() == step::READY {
            let status = match wait(caller, libc::WNOHANG) {
                News::None => {
                    await_news();
                    continue;
                }
                News::Stopped(status) => status,
                News::Gone => return,
            };
            let signal = libc::WSTOPSIG(status);
            match status >> 16 {
                libc::PTRACE_EVENT_FORK => {
                    tend_child(arena, caller);
                    let _ = ptrace(libc::PTRACE_CONT, caller, 0);
                }
                // The process is stopped (SIGSTOP and its like), and stays so until SIGCONT.
                EVENT_STOP if signal != libc::SIGTRAP => {
                    let _ = ptrace(libc::PTRACE_LISTEN, caller, 0);
                }
                0 => {
                    let _ = ptrace(libc::PTRACE_CONT, caller, signal.unsigned_abs() as usize);
                }
                _ => {
                    let _ = ptrace(libc::PTRACE_CONT, caller, 0);
                }
            }
        }
    }

    /// Puts the new child's memory right and lets it run. One that cannot be put right does not.
    fn tend_child(arena: &Arena, caller: libc::pid_t) {
        let mut number = 0usize;
        if ptrace(libc::PTRACE_GETEVENTMSG, caller, (&raw mut number).expose_provenance()) != 0 {
            return;
        }
        let Ok(child) = libc::pid_t::try_from(number) else { return };
        // SAFETY: the forking thread keeps them until it drops the tracer.
        let Some(copies) = (unsafe { arena.task.load(Ordering::Relaxed).cast::<Copies>().as_ref() }) else {
            return;
        };
        if let Err(error) = put_right(child, copies) {
            // The forking thread tells of it.
            arena.outcome.store(error.raw_os_error().unwrap_or(libc::EIO), Ordering::Relaxed);
            // SAFETY: no pointer.
            let _ = unsafe { call(libc::SYS_kill, [number, libc::SIGKILL as usize]) };
        }
    }

    fn put_right(child: libc::pid_t, copies: &Copies) -> io::Result<()> {
        let News::Stopped(_) = wait(child, 0) else { return Err(error(libc::ESRCH)) };
        let mut signal = 0;
        let before = registers(child)?;
        for Copied { range, place, access, filled } in copies {
            let length = range.end.saturating_sub(range.start);
            let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
            let arguments = [*place, length, length, flags, range.start];
            let moved = call_in(child, &before, libc::SYS_mremap, arguments, &mut signal)?;
            if moved != range.start {
                return Err(error(libc::EFAULT));
            }
            let mut protect = |piece: Range<u64>, access: i32| {
                let length = piece.end.saturating_sub(piece.start);
                if access == pages::READ_WRITE || length == 0 {
                    return Ok(());
                }
                let arguments = [piece.start, length, u64::from(access.unsigned_abs()), 0, 0];
                match call_in(child, &before, libc::SYS_mprotect, arguments, &mut signal)? {
                    0 => Ok(()),
                    _ => Err(error(libc::EACCES)),
                }
            };
            if *filled || !pages::is_readable(*access) {
                protect(range.clone(), *access)?;
                continue;
            }
            let mut rest = range.clone();
            while rest.start < rest.end {
                match pages::copy_to_until(child, &rest, rest.start) {
                    Ok(()) => {
                        protect(rest.clone(), *access)?;
                        break;
                    }
                    // Another thread has just taken the access to this page away: the child has none either.
                    Err((page, error)) if error.raw_os_error() == Some(libc::EFAULT) => {
                        let next = page.saturating_add(pages::PAGE as u64);
                        protect(rest.start..page, *access)?;
                        protect(page..next, libc::PROT_NONE)?;
                        rest.start = next;
                    }
                    Err((_, error)) => return Err(error),
                }
            }
        }
        set_registers(child, &before)?;
        match ptrace(libc::PTRACE_DETACH, child, signal) {
            0 => Ok(()),
            errno => Err(error(errno)),
        }
    }

    /// Has a stopped process make a system call; it is stopped again then. A signal that comes meanwhile is kept for it.
    fn call_in(
        child: libc::pid_t,
        before: &libc::user_regs_struct,
        number: libc::c_long,
        [first, second, third, fourth, fifth]: [u64; 5],
        signal: &mut usize,
    ) -> io::Result<u64> {
        let asking = libc::user_regs_struct {
            rip: gate as extern "C" fn() as usize as u64,
            rax: number.unsigned_abs(),
            // It is in no system call that might have to begin again.
            orig_rax: u64::MAX,
            rdi: first,
            rsi: second,
            rdx: third,
            r10: fourth,
            r8: fifth,
            ..*before
        };
        set_registers(child, &asking)?;
        // The first stop is before the call, the second behind it.
        for _ in 0..2 {
            go_on_to_call(child, signal)?;
        }
        registers(child).map(|registers| registers.rax)
    }

    /// Most other stops of a child on its way to one for a system call. It is new, and nobody should know it.
    const MOST_STOPS: usize = 1000;

    /// Lets a stopped process run to its next stop for a system call.
    fn go_on_to_call(child: libc::pid_t, signal: &mut usize) -> io::Result<()> {
        for _ in 0..MOST_STOPS {
            match ptrace(libc::PTRACE_SYSCALL, child, 0) {
                0 => {}
                errno => return Err(error(errno)),
            }
            let News::Stopped(status) = wait(child, 0) else { return Err(error(libc::ESRCH)) };
            match libc::WSTOPSIG(status) {
                SYSCALL_STOP => return Ok(()),
                // It cannot go on: it would fault again, without end. So it is where the kernel has nowhere to write what it
                // writes before a thread runs ([`crate::thunk::adopt::rseq`]).
                libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE | libc::SIGTRAP | libc::SIGSYS
                    if status >> 16 == 0 =>
                {
                    return Err(error(libc::EFAULT));
                }
                other if status >> 16 == 0 => *signal = other.unsigned_abs() as usize,
                _ => {}
            }
        }
        Err(error(libc::EINTR))
    }

    /// Where the child makes the system call. It goes no further.
    #[unsafe(naked)]
    extern "C" fn gate() {
        std::arch::naked_asm!("syscall", "ud2")
    }

    fn registers(child: libc::pid_t) -> io::Result<libc::user_regs_struct> {
        let mut registers = MaybeUninit::<libc::user_regs_struct>::zeroed();
        match ptrace(libc::PTRACE_GETREGS, child, registers.as_mut_ptr().expose_provenance()) {
            // SAFETY: zeros are valid, and so is what the kernel wrote.
            0 => Ok(unsafe { registers.assume_init() }),
            errno => Err(error(errno)),
        }
    }

    fn set_registers(child: libc::pid_t, registers: &libc::user_regs_struct) -> io::Result<()> {
        match ptrace(libc::PTRACE_SETREGS, child, std::ptr::from_ref(registers).expose_provenance()) {
            0 => Ok(()),
            errno => Err(error(errno)),
        }
    }

    fn error(errno: i32) -> io::Error {
        io::Error::from_raw_os_error(errno)
    }
}
