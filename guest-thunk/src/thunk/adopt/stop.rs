//! Stops all threads of the process, by a helper that traces them ([`super::tracer`]): all others, while this one works; or
//! this one too, while the helper does.
//!
//! A thread in a ptrace stop has left every system call: what the call was writing is written, or the call has not begun to
//! and begins again. (A few calls end with EINTR instead, as after any stop: signal(7) lists them.) So nothing is lost, as it
//! would be with mprotect, where a call that meets the page fails. And its registers are in the kernel: nothing reads or
//! writes its stack until it runs again, so that the pages of that may be exchanged as any others.
#![allow(unsafe_code, reason = "ptrace, and memory that the tracer shares")]

use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::patience::Attempts;
use super::rseq;
use super::syscall::call;
use super::tasks::{is_dead, next_thread};
use super::tracer::{
    self, Arena, CannotStop, EVENT_STOP, News, Obstacle, Traced, Tracer, await_news, exit, now, ptrace, step,
    wait,
};
use crate::thunk::moves::Alone;

static ATTEMPTS: Attempts = Attempts::new();

/// All other threads of the process are stopped as long as this lives, and no signal is handled in this one. Whoever
/// has it must not take a lock or allocate.
pub struct Stopped {
    _tracer: Tracer,
}

impl Stopped {
    /// Stops them. No stack of theirs may lie in `avoid`. Serialized by the caller.
    pub fn new(avoid: &Range<u64>) -> Result<Stopped, CannotStop> {
        stop(avoid, None).map(|tracer| Stopped { _tracer: tracer })
    }
}

/// What the tracer does while all threads are stopped. It may read all memory, but not write to what it exchanges, nor
/// allocate, lock or unwind; and it makes bare system calls. The calling thread waits for it as for any call.
pub type Work<'a> = dyn Fn() -> io::Result<()> + 'a;

/// A pointer to it that fits in a word.
struct Task<'a> {
    work: &'a Work<'a>,
}

/// Has the tracer do something while all threads are stopped, this one included: also their stacks may be exchanged, but
/// what the C library keeps for them may not lie in `avoid`. Serialized by the caller.
pub fn while_all_stopped(avoid: &Range<u64>, work: &Work) -> Result<io::Result<()>, CannotStop> {
    let task = Task { work };
    let tracer = stop(avoid, Some(&task))?;
    Ok(tracer.outcome())
}

fn stop(avoid: &Range<u64>, task: Option<&Task>) -> Result<Tracer, CannotStop> {
    let patience = ATTEMPTS.patience(now()).ok_or(CannotStop { obstacle: Obstacle::Patience, errno: 0 })?;
    rseq::learn();
    // What moves is not stopped.
    let _alone = Alone::wait();
    let tracer = Tracer::launch(trace, |arena| {
        arena.patience.store(patience, Ordering::Relaxed);
        arena.avoid_start.store(avoid.start, Ordering::Relaxed);
        arena.avoid_end.store(avoid.end, Ordering::Relaxed);
        if let Some(task) = task {
            arena.task.store(ptr::from_ref(task).cast_mut().cast(), Ordering::Relaxed);
        }
    })?;
    match tracer.settled() {
        Ok(()) => {
            ATTEMPTS.succeeded();
            Ok(tracer)
        }
        Err(failure) => {
            if failure.obstacle == Obstacle::Patience {
                ATTEMPTS.failed(now());
            }
            Err(failure)
        }
    }
}

/// What the tracer is to do, if anything.
fn task(arena: &Arena) -> Option<&Task<'_>> {
    // SAFETY: whoever set it waits until the tracer is done with it.
    unsafe { arena.task.load(Ordering::Relaxed).cast::<Task>().as_ref() }
}

/// The tracer.
extern "C" fn trace(argument: *mut libc::c_void) -> libc::c_int {
    let arena = tracer::begin(argument);
    match (stop_all(arena), task(arena)) {
        (Ok(()), None) => {
            arena.set_step(step::READY);
            while arena.step() == step::READY {
                arena.await_step(step::READY, Duration::from_secs(60));
            }
            release_all(arena);
        }
        (Ok(()), Some(task)) => {
            let done = (task.work)();
            let errno = done.map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0);
            arena.outcome.store(errno, Ordering::Relaxed);
            release_all(arena);
            arena.set_step(step::DONE);
        }
        (Err(failure), _) => {
            release_all(arena);
            arena.fail(failure);
        }
    }
    exit()
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
    // The caller works itself, or waits for the tracer.
    let spared = if task(arena).is_some() { 0 } else { arena.caller.load(Ordering::Relaxed) };
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
            if id != 0 && id != spared && !known() {
                any |= seize(arena, id)?;
            }
        }
    }
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
        match wait(id, libc::WNOHANG) {
            News::None => {}
            News::Gone => {
                thread.id.store(0, Ordering::Relaxed);
                return Ok(());
            }
            News::Stopped(status) => {
                // A stop for a signal is as good; the thread gets the signal when it goes on.
                let signal = if status >> 16 == EVENT_STOP { 0 } else { libc::WSTOPSIG(status) };
                thread.signal.store(signal, Ordering::Relaxed);
                return check_place(arena, id);
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

/// Bytes around a thread pointer that are the C library's: below it the variables that it uses itself, above it its record of
/// the thread (0x900 bytes in glibc 2.36), with the word whose shared futex tells of the thread's end, which cannot lie in a
/// blob. What the kernel writes for restartable sequences may be far from it: [`rseq`].
const BELOW_THREAD_POINTER: u64 = 1024;
const ABOVE_THREAD_POINTER: u64 = 0x900;

/// That the thread neither runs on the range nor has its own data there. Its stack may be there when it is the tracer that
/// exchanges the range.
fn check_place(arena: &Arena, id: libc::pid_t) -> Result<(), CannotStop> {
    #[cfg(target_arch = "x86_64")]
    {
        let mut registers = MaybeUninit::<libc::user_regs_struct>::zeroed();
        if ptrace(libc::PTRACE_GETREGS, id, registers.as_mut_ptr().expose_provenance()) == 0 {
            // SAFETY: zeros are valid, and so is what the kernel wrote.
            let registers = unsafe { registers.assume_init() };
            let range = arena.avoid_start.load(Ordering::Relaxed)..arena.avoid_end.load(Ordering::Relaxed);
            // The ABI lets a function use 128 bytes below its stack pointer.
            let (top, red) = (registers.rsp, registers.rsp.saturating_sub(128));
            let runs_here = range.contains(&top) || range.contains(&red);
            let own = registers.fs_base.saturating_sub(BELOW_THREAD_POINTER)
                ..registers.fs_base.saturating_add(ABOVE_THREAD_POINTER);
            let sequences = rseq::of_stopped(id, registers.fs_base);
            let has_data = rseq::touch(&own, &range) || rseq::touch(&sequences, &range);
            if has_data || (runs_here && task(arena).is_none()) {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;
    use crate::thunk::adopt::TABLE;
    use crate::thunk::lock::lock;

    #[test]
    fn nobody_is_stopped_while_something_moves() {
        // One stop at a time.
        let _table = lock(&TABLE);
        let over = AtomicBool::new(false);
        let alone = Alone::wait();
        thread::scope(|scope| {
            scope.spawn(|| {
                // A stop that did not wait for the move would be over in a fraction of that.
                thread::sleep(Duration::from_millis(200));
                over.store(true, Ordering::Release);
                drop(alone);
            });
            let stopped = Stopped::new(&(0..0)).map(drop);
            let was_over = over.load(Ordering::Acquire);
            assert!(was_over, "threads were stopped during a move: {stopped:?}");
        });
    }
}
