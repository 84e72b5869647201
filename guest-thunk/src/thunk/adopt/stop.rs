//! Stops all other threads of the process, by a helper that traces them.
//!
//! A thread in a ptrace stop has left every system call: what the call was writing is written, or the call has not begun to
//! and begins again. (A few calls end with EINTR instead, as after any stop: signal(7) lists them.) So nothing is lost, as it
//! would be with mprotect, where a call that meets the page fails.
//!
//! The tracer has to be another process. It shares this process's memory and descriptors (`CLONE_VM`, `CLONE_FILES`), so
//! that it costs no copy of the page tables; it has no exit signal, so that the application's `wait` does not
//! see it; and it makes only system calls, since a thread that it has stopped may hold any lock.
#![allow(unsafe_code, reason = "clone, ptrace, and memory that the tracer shares")]

use std::cell::UnsafeCell;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::patience::Attempts;
use super::signals::Blocked;
use super::syscall::call;
use super::tasks::{is_dead, next_thread};
use crate::thunk::lock::lock;
use crate::thunk::moves::Alone;

/// Most threads that can be stopped.
const MAX_THREADS: usize = 32 << 10;

/// `PTRACE_EVENT_STOP` of linux/ptrace.h: a stop that was asked for, or a group stop.
const EVENT_STOP: i32 = 128;

/// Steps of the protocol between the caller and the tracer, in [`Arena::step`].
mod step {
    /// The tracer exists, and waits until it is allowed to trace.
    pub const BORN: u32 = 0;
    /// It may begin.
    pub const GO: u32 = 1;
    /// All other threads are stopped.
    pub const STOPPED: u32 = 2;
    /// They could not be stopped, and run again.
    pub const FAILED: u32 = 3;
    /// They are to run again.
    pub const RELEASE: u32 = 4;
}

/// Why the threads could not be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Obstacle {
    /// A system call failed.
    System = 1,
    /// A thread may not be traced: a debugger has it, or a security policy forbids it, or it is the kernel's (io_uring).
    Forbidden = 2,
    /// A thread did not stop in time.
    Patience = 3,
    /// There are too many threads.
    Threads = 4,
    /// A thread's stack is in the range.
    Stack = 5,
    /// The tracer ended.
    Ended = 6,
    /// /proc is another PID namespace's: the threads have other numbers there.
    Foreign = 7,
}

/// Why the threads could not be stopped, with the system's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CannotStop {
    /// The kind.
    pub obstacle: Obstacle,
    /// `errno`, or 0.
    pub errno: i32,
}

impl CannotStop {
    fn last(obstacle: Obstacle) -> Self {
        CannotStop { obstacle, errno: io::Error::last_os_error().raw_os_error().unwrap_or(0) }
    }
}

impl std::fmt::Display for CannotStop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match self.obstacle {
            Obstacle::System => "a system call failed",
            Obstacle::Forbidden => {
                "a thread of the process may not be traced (a debugger, a security policy, io_uring)"
            }
            Obstacle::Patience => "a thread of the process did not stop in time",
            Obstacle::Threads => "the process has too many threads",
            Obstacle::Stack => "the stack of a thread is in the range",
            Obstacle::Ended => "the tracer ended",
            Obstacle::Foreign => "/proc belongs to another PID namespace",
        };
        match self.errno {
            0 => f.write_str(what),
            errno => write!(f, "{what}: {}", io::Error::from_raw_os_error(errno)),
        }
    }
}

/// A thread that the tracer has.
#[repr(C)]
struct Traced {
    /// 0 when it is gone.
    id: AtomicI32,
    /// The signal that it was about to get, or 0.
    signal: AtomicI32,
}

/// What the caller and the tracer share. Made of zeros.
#[repr(C)]
struct Arena {
    step: AtomicU32,
    obstacle: AtomicU32,
    errno: AtomicI32,
    /// Descriptor of /proc/self/task.
    tasks: AtomicI32,
    caller: AtomicI32,
    /// The caller's process.
    process: AtomicI32,
    /// How long a thread may take to stop.
    patience: AtomicI64,
    /// No stack may lie in here.
    avoid_start: AtomicU64,
    avoid_end: AtomicU64,
    count: AtomicU32,
    traced: [Traced; MAX_THREADS],
    /// The tracer's alone.
    entries: UnsafeCell<[u8; 32 << 10]>,
    /// The tracer's alone.
    stack: UnsafeCell<[u8; 64 << 10]>,
}

/// The arena, mapped once and kept.
struct Shared(NonNull<Arena>);

// SAFETY: all that several threads use in it is atomic.
unsafe impl Send for Shared {}

static ARENA: Mutex<Option<Shared>> = Mutex::new(None);

fn arena() -> Result<&'static Arena, CannotStop> {
    let mut shared = lock(&ARENA);
    if let Some(Shared(arena)) = &*shared {
        // SAFETY: it is mapped for good.
        return Ok(unsafe { arena.as_ref() });
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
    let place = unsafe { libc::mmap(ptr::null_mut(), size_of::<Arena>(), protection, flags, -1, 0) };
    let arena = match NonNull::new(place.cast::<Arena>()) {
        Some(arena) if place != libc::MAP_FAILED => arena,
        _ => return Err(CannotStop::last(Obstacle::System)),
    };
    *shared = Some(Shared(arena));
    // SAFETY: it is large enough, aligned to a page, and zeros are a valid Arena.
    Ok(unsafe { arena.as_ref() })
}

static ATTEMPTS: Attempts = Attempts::new();

/// All other threads of the process are stopped as long as this lives, and no signal is handled in this one. Whoever
/// has it must not take a lock or allocate.
pub struct Stopped {
    arena: &'static Arena,
    tracer: libc::pid_t,
    may_be_traced: bool,
    // Dropped last: signals come when everything runs again.
    _blocked: Blocked,
    _tasks: File,
}

/// Whether the numbers in /proc are those that system calls take.
fn is_own_proc() -> bool {
    let own = std::process::id().to_string();
    std::fs::read_link("/proc/self").is_ok_and(|number| number.as_os_str() == own.as_str())
}

/// The tracer is allowed what yama's default allows only to ancestors.
fn needs_permission() -> bool {
    std::fs::read("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.starts_with(b"1"))
}

fn permit(tracer: libc::pid_t) {
    // SAFETY: no pointer. Where it fails, tracing fails, and that is told.
    let _ = unsafe { libc::prctl(libc::PR_SET_PTRACER, tracer, 0, 0, 0) };
}

impl Stopped {
    /// Stops them. No stack of theirs may lie in `avoid` (first, end). Serialized by the caller.
    pub fn new(avoid: (u64, u64)) -> Result<Stopped, CannotStop> {
        let patience =
            ATTEMPTS.patience(now()).ok_or(CannotStop { obstacle: Obstacle::Patience, errno: 0 })?;
        let arena = arena()?;
        let tasks = File::open("/proc/self/task").map_err(|_| CannotStop::last(Obstacle::System))?;
        if !is_own_proc() {
            return Err(CannotStop { obstacle: Obstacle::Foreign, errno: 0 });
        }
        let may_be_traced = needs_permission();
        arena.step.store(step::BORN, Ordering::Relaxed);
        arena.obstacle.store(0, Ordering::Relaxed);
        arena.errno.store(0, Ordering::Relaxed);
        arena.tasks.store(tasks.as_raw_fd(), Ordering::Relaxed);
        arena.caller.store(thread_id(), Ordering::Relaxed);
        arena.process.store(std::process::id().cast_signed(), Ordering::Relaxed);
        arena.patience.store(patience, Ordering::Relaxed);
        arena.avoid_start.store(avoid.0, Ordering::Relaxed);
        arena.avoid_end.store(avoid.1, Ordering::Relaxed);
        arena.count.store(0, Ordering::Relaxed);
        // The tracer inherits the mask: it must not run handlers of the application.
        let blocked = Blocked::new();
        let stack = arena.stack.get().cast::<u8>().wrapping_add(size_of_val(&arena.stack)).cast();
        let flags = libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_FS | libc::CLONE_UNTRACED;
        let argument = ptr::from_ref(arena).cast_mut().cast();
        // What moves is not stopped.
        let _alone = Alone::wait();
        // SAFETY: the stack is the arena's, which only one tracer uses at a time and which is never unmapped; `trace` is
        // made for a process that shares the memory.
        let tracer = unsafe { libc::clone(trace, stack, flags, argument) };
        if tracer < 0 {
            return Err(CannotStop::last(Obstacle::System));
        }
        if may_be_traced {
            permit(tracer);
        }
        let stopped = Stopped { arena, tracer, may_be_traced, _blocked: blocked, _tasks: tasks };
        set_step(arena, step::GO);
        loop {
            match arena.step.load(Ordering::Acquire) {
                step::STOPPED => {
                    ATTEMPTS.succeeded();
                    return Ok(stopped);
                }
                step::FAILED => {
                    let failure = stopped.failure();
                    if failure.obstacle == Obstacle::Patience {
                        ATTEMPTS.failed(now());
                    }
                    return Err(failure);
                }
                now => futex_wait(&arena.step, now, Duration::from_millis(200)),
            }
            // Something may have killed it.
            if stopped.has_ended() && arena.step.load(Ordering::Acquire) == step::GO {
                return Err(CannotStop { obstacle: Obstacle::Ended, errno: 0 });
            }
        }
    }

    fn failure(&self) -> CannotStop {
        let obstacle = match self.arena.obstacle.load(Ordering::Relaxed) {
            2 => Obstacle::Forbidden,
            3 => Obstacle::Patience,
            4 => Obstacle::Threads,
            5 => Obstacle::Stack,
            _ => Obstacle::System,
        };
        CannotStop { obstacle, errno: self.arena.errno.load(Ordering::Relaxed) }
    }

    fn has_ended(&self) -> bool {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
        // SAFETY: the information lives beyond the call. WNOWAIT leaves the process for the drop.
        let result =
            unsafe { libc::waitid(libc::P_PID, self.tracer.unsigned_abs(), info.as_mut_ptr(), options) };
        // SAFETY: zeros are valid, and so is what the kernel wrote.
        let info = unsafe { info.assume_init() };
        // Without a process that has ended the signal stays 0; without a child the application has waited for it.
        result != 0 || info.si_signo != 0
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        set_step(self.arena, step::RELEASE);
        // The application may have waited for all its children, clones included.
        // SAFETY: a null status is allowed.
        while unsafe { libc::waitpid(self.tracer, ptr::null_mut(), libc::__WALL) } < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
        if self.may_be_traced {
            permit(0);
        }
    }
}

fn thread_id() -> libc::pid_t {
    // SAFETY: no argument.
    unsafe { libc::gettid() }
}

/// Waiters that a futex call wakes: all of them (INT_MAX).
const WAKE_ALL: usize = 0x7fff_ffff;

fn word(word: &AtomicU32) -> usize {
    word.as_ptr().expose_provenance()
}

fn set_step(arena: &Arena, to: u32) {
    arena.step.store(to, Ordering::Release);
    // SAFETY: the word lives as long as the process; waking reads nothing.
    let _ = unsafe { call(libc::SYS_futex, [word(&arena.step), libc::FUTEX_WAKE as usize, WAKE_ALL, 0]) };
}

fn futex_wait(futex: &AtomicU32, value: u32, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: limit.subsec_nanos() as libc::c_long,
    };
    let limit = ptr::from_ref(&limit).expose_provenance();
    let arguments = [word(futex), libc::FUTEX_WAIT as usize, value as usize, limit];
    // SAFETY: the word and the limit live beyond the call.
    let _ = unsafe { call(libc::SYS_futex, arguments) };
}

/// The tracer. Nothing here may allocate, lock, unwind, or use what belongs to a thread: it runs with the caller's
/// thread pointer.
extern "C" fn trace(argument: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the argument is the arena, which is never unmapped.
    let arena = unsafe { &*argument.cast::<Arena>() };
    // The caller's end must not leave its threads stopped for ever: a tracer's end lets them run.
    // SAFETY: no pointer.
    let _ = unsafe { call(libc::SYS_prctl, [libc::PR_SET_PDEATHSIG as usize, libc::SIGKILL as usize, 0, 0]) };
    // It may have ended before that, and nobody would say GO. In another PID namespace, where threads have other numbers,
    // there is no parent either (0).
    // SAFETY: no argument.
    let parent = unsafe { call(libc::SYS_getppid, [0; 4]) };
    if parent != Ok(arena.process.load(Ordering::Relaxed).unsigned_abs() as usize) {
        exit();
    }
    // Stops are told by SIGCHLD, unless that is ignored. The handlers are this process's own copy.
    // SAFETY: SIG_DFL is a valid disposition.
    let _ = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    while arena.step.load(Ordering::Acquire) == step::BORN {
        futex_wait(&arena.step, step::BORN, Duration::from_secs(1));
    }
    match stop_all(arena) {
        Ok(()) => {
            set_step(arena, step::STOPPED);
            while arena.step.load(Ordering::Acquire) == step::STOPPED {
                futex_wait(&arena.step, step::STOPPED, Duration::from_secs(60));
            }
            release_all(arena);
        }
        Err(CannotStop { obstacle, errno }) => {
            release_all(arena);
            arena.obstacle.store(obstacle as u32, Ordering::Relaxed);
            arena.errno.store(errno, Ordering::Relaxed);
            set_step(arena, step::FAILED);
        }
    }
    exit()
}

/// Ends the tracer. It does not return from its function: the C library would end what belongs to the caller's thread.
fn exit() -> ! {
    loop {
        // SAFETY: ends this process, of one thread, and no other.
        let _ = unsafe { call(libc::SYS_exit, [0; 4]) };
    }
}

fn traced(arena: &Arena) -> &[Traced] {
    let count = arena.count.load(Ordering::Relaxed) as usize;
    arena.traced.get(..count).unwrap_or(&arena.traced)
}

/// Stops all threads, again and again until no unknown one is found: then none that runs could make another. One that
/// ended meanwhile counts as well, for the kernel ends the list at a thread that ends just then.
fn stop_all(arena: &Arena) -> Result<(), CannotStop> {
    let deadline = now().saturating_add(arena.patience.load(Ordering::Relaxed));
    loop {
        let known = traced(arena).len();
        if !seize_new(arena)? {
            return Ok(());
        }
        for thread in traced(arena).get(known..).unwrap_or(&[]) {
            await_stop(arena, thread, deadline)?;
        }
        if now() > deadline {
            return Err(CannotStop { obstacle: Obstacle::Patience, errno: 0 });
        }
    }
}

fn system(errno: i32) -> CannotStop {
    CannotStop { obstacle: Obstacle::System, errno }
}

/// Seizes every thread that is not known yet, and asks it to stop. Whether there was any, even if it has ended already.
fn seize_new(arena: &Arena) -> Result<bool, CannotStop> {
    let tasks = arena.tasks.load(Ordering::Relaxed) as usize;
    // SAFETY: no pointer.
    unsafe { call(libc::SYS_lseek, [tasks, 0, libc::SEEK_SET as usize, 0]) }.map_err(system)?;
    let before = traced(arena).len();
    let mut any = false;
    loop {
        let entries = arena.entries.get().cast::<u8>();
        let capacity = size_of_val(&arena.entries);
        // SAFETY: the buffer is the tracer's alone, and as large as is said.
        let filled = unsafe { call(libc::SYS_getdents64, [tasks, entries.expose_provenance(), capacity, 0]) };
        let filled = match filled.map_err(system)? {
            0 => return Ok(any),
            filled => filled,
        };
        // SAFETY: the kernel has filled that much of it, and nobody else uses it.
        let mut rest = unsafe { std::slice::from_raw_parts(entries, filled) };
        while let Some((id, next)) = next_thread(rest) {
            rest = next;
            let known = || traced(arena).iter().take(before).any(|it| it.id.load(Ordering::Relaxed) == id);
            if id != 0 && id != arena.caller.load(Ordering::Relaxed) && !known() {
                any |= seize(arena, id)?;
            }
        }
    }
}

fn ptrace(request: libc::c_uint, id: libc::pid_t, data: usize) -> i32 {
    // SAFETY: data is a number, or a pointer that its caller vouches for.
    let result = unsafe { call(libc::SYS_ptrace, [request as usize, id.unsigned_abs() as usize, 0, data]) };
    result.err().unwrap_or(0)
}

/// Seizes a thread. False for one that is not waited for: the first thread of a process stays in the list when it has ended
/// before the others.
fn seize(arena: &Arena, id: libc::pid_t) -> Result<bool, CannotStop> {
    match ptrace(libc::PTRACE_SEIZE, id, 0) {
        0 => {}
        // It has ended meanwhile.
        libc::ESRCH => return Ok(true),
        libc::EPERM if is_dead(arena.tasks.load(Ordering::Relaxed), id) => {
            return Ok(id != arena.process.load(Ordering::Relaxed));
        }
        errno @ libc::EPERM => return Err(CannotStop { obstacle: Obstacle::Forbidden, errno }),
        errno => return Err(CannotStop { obstacle: Obstacle::System, errno }),
    }
    let count = arena.count.load(Ordering::Relaxed);
    let Some(place) = arena.traced.get(count as usize) else {
        let _ = ptrace(libc::PTRACE_DETACH, id, 0);
        return Err(CannotStop { obstacle: Obstacle::Threads, errno: 0 });
    };
    place.id.store(id, Ordering::Relaxed);
    place.signal.store(0, Ordering::Relaxed);
    arena.count.store(count.saturating_add(1), Ordering::Relaxed);
    // A failure means that it is ending, which the wait for it tells.
    let _ = ptrace(libc::PTRACE_INTERRUPT, id, 0);
    Ok(true)
}

/// Waits until a thread is in a ptrace stop, or gone.
fn await_stop(arena: &Arena, thread: &Traced, deadline: i64) -> Result<(), CannotStop> {
    let id = thread.id.load(Ordering::Relaxed);
    loop {
        let mut status = 0i32;
        let options = (libc::WNOHANG | libc::__WALL) as usize;
        let place = (&raw mut status).expose_provenance();
        // SAFETY: status lives beyond the call, and no resource usage is asked for.
        let result = unsafe { call(libc::SYS_wait4, [id.unsigned_abs() as usize, place, options, 0]) };
        match result {
            Ok(0) => {}
            Err(libc::EINTR) => continue,
            Err(_) => {
                thread.id.store(0, Ordering::Relaxed);
                return Ok(());
            }
            _ if libc::WIFSTOPPED(status) => {
                // A stop for a signal is as good; the thread gets the signal when it goes on.
                let signal = if status >> 16 == EVENT_STOP { 0 } else { libc::WSTOPSIG(status) };
                thread.signal.store(signal, Ordering::Relaxed);
                return check_stack(arena, id);
            }
            _ => {
                thread.id.store(0, Ordering::Relaxed);
                return Ok(());
            }
        }
        // The first thread of a process stays when it has ended before the others, and cannot be waited for.
        if is_dead(arena.tasks.load(Ordering::Relaxed), id) {
            return Ok(());
        }
        if now() > deadline {
            return Err(CannotStop { obstacle: Obstacle::Patience, errno: 0 });
        }
        await_news();
    }
}

/// Waits for a SIGCHLD, but not long: one that came before may have stood for several.
fn await_news() {
    let child = 1u64 << (libc::SIGCHLD - 1);
    let limit = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000 };
    let (set, limit) = (ptr::from_ref(&child).expose_provenance(), ptr::from_ref(&limit).expose_provenance());
    // SAFETY: set and limit live beyond the call, the set has the kernel's size, and no information is asked for.
    let _ = unsafe { call(libc::SYS_rt_sigtimedwait, [set, 0, limit, size_of::<u64>()]) };
}

/// That the thread does not run on the range.
fn check_stack(arena: &Arena, id: libc::pid_t) -> Result<(), CannotStop> {
    #[cfg(target_arch = "x86_64")]
    {
        let mut registers = MaybeUninit::<libc::user_regs_struct>::zeroed();
        if ptrace(libc::PTRACE_GETREGS, id, registers.as_mut_ptr().expose_provenance()) == 0 {
            // SAFETY: zeros are valid, and so is what the kernel wrote.
            let registers = unsafe { registers.assume_init() };
            let range = arena.avoid_start.load(Ordering::Relaxed)..arena.avoid_end.load(Ordering::Relaxed);
            // The ABI lets a function use 128 bytes below its stack pointer.
            let (top, red) = (registers.rsp, registers.rsp.saturating_sub(128));
            if range.contains(&top) || range.contains(&red) {
                return Err(CannotStop { obstacle: Obstacle::Stack, errno: 0 });
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (arena, id);
    Ok(())
}

fn release_all(arena: &Arena) {
    for thread in traced(arena) {
        let id = thread.id.load(Ordering::Relaxed);
        if id == 0 {
            continue;
        }
        let signal = usize::try_from(thread.signal.load(Ordering::Relaxed)).unwrap_or(0);
        // One that did not stop in time cannot be detached; it goes on when the tracer ends.
        let _ = ptrace(libc::PTRACE_DETACH, id, signal);
    }
}

/// Nanoseconds of the monotonic clock.
fn now() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let place = (&raw mut time).expose_provenance();
    // SAFETY: time lives beyond the call.
    let _ = unsafe { call(libc::SYS_clock_gettime, [libc::CLOCK_MONOTONIC as usize, place, 0, 0]) };
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}
