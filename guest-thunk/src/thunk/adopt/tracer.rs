//! The tracer: a helper process that stops threads of this one by ptrace, and the steps between it and its caller.
//!
//! It has to be another process. It shares this process's memory and descriptors (`CLONE_VM`, `CLONE_FILES`), so
//! that it costs no copy of the page tables; it has no exit signal, so that the application's `wait` does not
//! see it; it has a stack of its own; and it makes only system calls, since a thread that it has stopped may hold any lock.
#![allow(unsafe_code, reason = "clone, ptrace, and memory that the tracer shares")]

use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::proc::{self, Opened};
use super::signals::Blocked;
use super::syscall::call;
use crate::thunk::lock::lock;

/// Most threads that can be stopped.
const MAX_THREADS: usize = 32 << 10;

/// `PTRACE_EVENT_STOP` of linux/ptrace.h: a stop that was asked for, or a group stop.
pub const EVENT_STOP: i32 = 128;

/// Steps of the protocol between the caller and the tracer, in [`Arena::step`].
pub mod step {
    /// The tracer exists, and waits until it is allowed to trace.
    pub const BORN: u32 = 0;
    /// It may begin.
    pub const GO: u32 = 1;
    /// All other threads are stopped, or the forking thread is traced.
    pub const READY: u32 = 2;
    /// They could not be, and run again.
    pub const FAILED: u32 = 3;
    /// They are to run again.
    pub const RELEASE: u32 = 4;
    /// The tracer has done what it was to do meanwhile, and all run again.
    pub const DONE: u32 = 5;
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
    /// A thread's stack is in the range, or what the C library keeps for it.
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
    pub fn last(obstacle: Obstacle) -> Self {
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
            Obstacle::Stack => "a thread's stack is in the range, or what the C library keeps for the thread",
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
pub struct Traced {
    /// 0 when it is gone.
    pub id: AtomicI32,
    /// The signal that it was about to get, or 0.
    pub signal: AtomicI32,
}

/// What the caller and the tracer share. Made of zeros.
#[repr(C)]
pub struct Arena {
    step: AtomicU32,
    obstacle: AtomicU32,
    errno: AtomicI32,
    /// Descriptor of /proc/self/task.
    pub tasks: AtomicI32,
    /// The caller's thread.
    pub caller: AtomicI32,
    /// The caller's process.
    pub process: AtomicI32,
    /// How long a thread may take to stop, in nanoseconds.
    pub patience: AtomicI64,
    /// No stack may lie in here.
    pub avoid_start: AtomicU64,
    /// End of that.
    pub avoid_end: AtomicU64,
    /// What the tracer does or needs, if anything; see who sets it.
    pub task: AtomicPtr<libc::c_void>,
    /// What became of it: `errno`, or 0.
    pub outcome: AtomicI32,
    /// How many of `traced` are in use.
    pub count: AtomicU32,
    /// The threads.
    pub traced: [Traced; MAX_THREADS],
    /// The tracer's alone.
    pub entries: UnsafeCell<[u8; 32 << 10]>,
    /// The tracer's alone.
    stack: UnsafeCell<[u8; 64 << 10]>,
}

impl Arena {
    /// The step at which both are.
    pub fn step(&self) -> u32 {
        self.step.load(Ordering::Acquire)
    }

    /// Sets it, and wakes who waits for it.
    pub fn set_step(&self, to: u32) {
        self.step.store(to, Ordering::Release);
        let arguments = [word(&self.step), libc::FUTEX_WAKE as usize, WAKE_ALL, 0];
        // SAFETY: the word lives as long as the process; waking reads nothing.
        let _ = unsafe { call(libc::SYS_futex, arguments) };
    }

    /// Waits until it is no longer `now`, or so long.
    pub fn await_step(&self, now: u32, limit: Duration) {
        futex_wait(&self.step, now, limit);
    }

    /// Tells the caller why nothing came of it.
    pub fn fail(&self, CannotStop { obstacle, errno }: CannotStop) {
        self.obstacle.store(obstacle as u32, Ordering::Relaxed);
        self.errno.store(errno, Ordering::Relaxed);
        self.set_step(step::FAILED);
    }
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

/// Whether the numbers in /proc are those that system calls take.
fn is_own_proc() -> bool {
    let own = std::process::id().to_string();
    std::fs::read_link("/proc/self").is_ok_and(|number| number.as_os_str() == own.as_str())
}

/// The tracer is allowed what yama's default allows only to ancestors.
fn needs_permission() -> bool {
    /// What was found last, for when no descriptor is left.
    static NEEDED: AtomicBool = AtomicBool::new(false);
    if let Ok(scope) = std::fs::read("/proc/sys/kernel/yama/ptrace_scope") {
        NEEDED.store(scope.starts_with(b"1"), Ordering::Relaxed);
    }
    NEEDED.load(Ordering::Relaxed)
}

fn permit(tracer: libc::pid_t) {
    // SAFETY: no pointer. Where it fails, tracing fails, and that is told.
    let _ = unsafe { libc::prctl(libc::PR_SET_PTRACER, tracer, 0, 0, 0) };
}

/// What the tracer runs. Nothing in it may allocate, lock, unwind, or use what belongs to a thread: it runs with the
/// caller's thread pointer. It ends with [`exit`].
pub type Run = extern "C" fn(*mut libc::c_void) -> libc::c_int;

/// A tracer, which ends when this is dropped. One at a time: serialized by the caller.
pub struct Tracer {
    arena: &'static Arena,
    /// 0 in a child, whose tracer it is not.
    id: libc::pid_t,
    may_be_traced: bool,
    // Dropped last: signals come when everything runs again.
    blocked: Option<Blocked>,
    _tasks: Opened,
}

impl Tracer {
    /// Makes one that runs `run`; `prepare` sets what that needs in the arena. Signals of this thread are blocked.
    pub fn launch(run: Run, prepare: impl FnOnce(&Arena)) -> Result<Tracer, CannotStop> {
        let arena = arena()?;
        let tasks = proc::TASKS.open().map_err(|error| CannotStop {
            obstacle: Obstacle::System,
            errno: error.raw_os_error().unwrap_or(0),
        })?;
        if !is_own_proc() {
            return Err(CannotStop { obstacle: Obstacle::Foreign, errno: 0 });
        }
        let may_be_traced = needs_permission();
        arena.step.store(step::BORN, Ordering::Relaxed);
        for word in [&arena.errno, &arena.outcome] {
            word.store(0, Ordering::Relaxed);
        }
        arena.obstacle.store(0, Ordering::Relaxed);
        arena.tasks.store(tasks.descriptor(), Ordering::Relaxed);
        arena.caller.store(thread_id(), Ordering::Relaxed);
        arena.process.store(std::process::id().cast_signed(), Ordering::Relaxed);
        arena.count.store(0, Ordering::Relaxed);
        arena.task.store(ptr::null_mut(), Ordering::Relaxed);
        prepare(arena);
        // The tracer inherits the mask: it must not run handlers of the application.
        let blocked = Some(Blocked::new());
        let stack = arena.stack.get().cast::<u8>().wrapping_add(size_of_val(&arena.stack)).cast();
        let flags = libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_FS | libc::CLONE_UNTRACED;
        let argument = ptr::from_ref(arena).cast_mut().cast();
        // SAFETY: the stack is the arena's, which only one tracer uses at a time and which is never unmapped; `run` is
        // made for a process that shares the memory.
        let id = unsafe { libc::clone(run, stack, flags, argument) };
        if id < 0 {
            return Err(CannotStop::last(Obstacle::System));
        }
        if may_be_traced {
            permit(id);
        }
        let tracer = Tracer { arena, id, may_be_traced, blocked, _tasks: tasks };
        arena.set_step(step::GO);
        Ok(tracer)
    }

    /// Waits until the tracer is ready, or done where it has something to do.
    pub fn settled(&self) -> Result<(), CannotStop> {
        loop {
            match self.arena.step() {
                step::READY | step::DONE => return Ok(()),
                step::FAILED => return Err(self.failure()),
                now => self.arena.await_step(now, Duration::from_millis(200)),
            }
            // Something may have killed it.
            if self.has_ended() && self.arena.step() == step::GO {
                return Err(CannotStop { obstacle: Obstacle::Ended, errno: 0 });
            }
        }
    }

    /// What became of what it had to do.
    pub fn outcome(&self) -> io::Result<()> {
        match self.arena.outcome.load(Ordering::Relaxed) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Lets signals come again while the tracer lives.
    pub fn unblock(&mut self) {
        self.blocked = None;
    }

    /// In a child: it has no tracer.
    pub fn forget(mut self) {
        self.id = 0;
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
        let result = unsafe { libc::waitid(libc::P_PID, self.id.unsigned_abs(), info.as_mut_ptr(), options) };
        // SAFETY: zeros are valid, and so is what the kernel wrote.
        let info = unsafe { info.assume_init() };
        // Without a process that has ended the signal stays 0; without a child the application has waited for it.
        result != 0 || info.si_signo != 0
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        if self.id == 0 {
            return;
        }
        // It is told of an end only while it waits for it.
        if self.arena.step() != step::DONE {
            self.arena.set_step(step::RELEASE);
        }
        // The application may have waited for all its children, clones included.
        // SAFETY: a null status is allowed.
        while unsafe { libc::waitpid(self.id, ptr::null_mut(), libc::__WALL) } < 0
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

/// How every tracer begins: it waits until it may trace. The argument is that of [`Run`].
pub fn begin(argument: *mut libc::c_void) -> &'static Arena {
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
    while arena.step() == step::BORN {
        arena.await_step(step::BORN, Duration::from_secs(1));
    }
    arena
}

/// Ends the tracer. It does not return from its function: the C library would end what belongs to the caller's thread.
pub fn exit() -> ! {
    loop {
        // SAFETY: ends this process, of one thread, and no other.
        let _ = unsafe { call(libc::SYS_exit, [0; 4]) };
    }
}

/// ptrace(2) without an address: `errno`, or 0.
pub fn ptrace(request: libc::c_uint, id: libc::pid_t, data: usize) -> i32 {
    // SAFETY: data is a number, or a pointer that its caller vouches for.
    let result = unsafe { call(libc::SYS_ptrace, [request as usize, id.unsigned_abs() as usize, 0, data]) };
    result.err().unwrap_or(0)
}

/// What a wait for a process or thread tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// Nothing yet.
    None,
    /// It is stopped; the status is that of wait(2).
    Stopped(i32),
    /// It is gone, or was never there.
    Gone,
}

/// Waits for one that is traced; not at all with `libc::WNOHANG`.
pub fn wait(id: libc::pid_t, options: i32) -> News {
    loop {
        let mut status = 0i32;
        let options = (options | libc::__WALL) as usize;
        let place = (&raw mut status).expose_provenance();
        // SAFETY: status lives beyond the call, and no resource usage is asked for.
        match unsafe { call(libc::SYS_wait4, [id.unsigned_abs() as usize, place, options, 0]) } {
            Ok(0) => return News::None,
            Err(libc::EINTR) => {}
            Ok(_) if libc::WIFSTOPPED(status) => return News::Stopped(status),
            _ => return News::Gone,
        }
    }
}

/// Waits for a SIGCHLD, but not long: one that came before may have stood for several.
pub fn await_news() {
    let child = 1u64 << (libc::SIGCHLD - 1);
    let limit = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000 };
    let (set, limit) = (ptr::from_ref(&child).expose_provenance(), ptr::from_ref(&limit).expose_provenance());
    // SAFETY: set and limit live beyond the call, the set has the kernel's size, and no information is asked for.
    let _ = unsafe { call(libc::SYS_rt_sigtimedwait, [set, 0, limit, size_of::<u64>()]) };
}

/// Nanoseconds of the monotonic clock.
pub fn now() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let place = (&raw mut time).expose_provenance();
    // SAFETY: time lives beyond the call.
    let _ = unsafe { call(libc::SYS_clock_gettime, [libc::CLOCK_MONOTONIC as usize, place, 0, 0]) };
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}
