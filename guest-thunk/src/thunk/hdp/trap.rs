//! The signal handler: a store to a page of registers ends with the host's store to the real one.
//!
//! The program sees a page of zeros that it cannot write. Its store raises SIGSEGV in the thread itself, whose handler asks the
//! [server](super::server) for the flush, waits for it, and goes on behind the instruction: so the flush is over before the
//! thread's next one, as natively. All other faults are the previous handler's.
//!
//! The handler takes no lock, allocates nothing and needs little stack, so that a program may store from wherever it
//! may natively, on whatever stack: it changes atomics and waits by futex. The server works on behalf of all threads;
//! a flush that begins after several have asked is all of theirs.
#![allow(unsafe_code, reason = "a signal handler, futexes")]

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use iced_x86::Register;
use libc::{c_int, c_void, siginfo_t, ucontext_t};
use nix::errno::Errno;
use virtio_kfd_protocol::limits::MAX_GPUS;

use super::store::{self, Found, LONGEST, Store};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// `SEGV_ACCERR` of asm-generic/siginfo.h: what is mapped does not allow it.
const SEGV_ACCERR: c_int = 2;
/// `X86_PF_WRITE` of arch/x86/include/asm/trap_pf.h.
const WRITE: i64 = 1 << 1;
/// For how long signals wait while a store does.
const PATIENCE: libc::timespec = libc::timespec { tv_sec: 1, tv_nsec: 0 };
/// Registers of a page, and their size in bytes.
pub const REGISTERS: [u32; 2] = [0, 4];
const REGISTER: u64 = 4;

/// A page, of whatever connection.
pub struct Page {
    /// Its address, 0 for none.
    address: AtomicU64,
    /// For each register: stores so far, and how many of them are flushed. Both wrap.
    asked: [AtomicU32; REGISTERS.len()],
    done: [AtomicU32; REGISTERS.len()],
}

/// All pages of the process.
static PAGES: [Page; MAX_GPUS] = [const {
    Page {
        address: AtomicU64::new(0),
        asked: [const { AtomicU32::new(0) }; REGISTERS.len()],
        done: [const { AtomicU32::new(0) }; REGISTERS.len()],
    }
}; MAX_GPUS];

/// Changes whenever there is something to do for a server.
static BELL: AtomicU32 = AtomicU32::new(0);

/// The process whose the pages are: a forked child has none of them.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// What handled SIGSEGV before. It is leaked: the handler may be in use at any time.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// What the kernel does by itself.
// SAFETY: a sigaction of zeros is valid: SIG_DFL, no flags, an empty mask.
static DEFAULT: libc::sigaction = unsafe { std::mem::zeroed() };

/// A page that stores are looked for in, until dropped.
pub struct Watched(&'static Page);

impl Watched {
    /// Looks for stores in a page, which must be readable, not writable, and stay so while this exists.
    pub fn new(address: u64) -> io::Result<Watched> {
        let me = std::process::id();
        if OWNER.swap(me, Ordering::SeqCst) != me {
            PAGES.iter().for_each(|page| page.address.store(0, Ordering::SeqCst));
        }
        install()?;
        let free = |page: &&Page| {
            page.address.compare_exchange(0, address, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        PAGES.iter().find(free).map(Watched).ok_or_else(|| io::Error::other("too many pages of registers"))
    }

    /// Flushes what was asked for: `flush` is called with the byte offset of each register that was stored to since it
    /// was last flushed.
    pub fn serve(&self, mut flush: impl FnMut(u32)) {
        for ((register, asked), done) in REGISTERS.into_iter().zip(&self.0.asked).zip(&self.0.done) {
            let until = asked.load(Ordering::SeqCst);
            if until != done.load(Ordering::SeqCst) {
                flush(register);
                done.store(until, Ordering::SeqCst);
                futex_wake(done);
            }
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.address.store(0, Ordering::SeqCst);
        // Who still waits goes on: the connection is closed, and the registers are no more. Who asks only now sees that
        // the page is another's (`Page::flush`).
        self.serve(|_| ());
    }
}

/// What is there to do up to now; for [`await_bell`].
pub fn bell() -> u32 {
    BELL.load(Ordering::SeqCst)
}

/// Waits until there is something to do that there was not when [`bell`] gave the number.
pub fn await_bell(heard: u32) {
    while bell() == heard {
        let _ = futex_wait(&BELL, heard, None);
    }
}

/// Has servers look.
pub fn ring() {
    BELL.fetch_add(1, Ordering::SeqCst);
    futex_wake(&BELL);
}

impl Page {
    /// Asks for a register's flush and waits for it. Where that takes long, the thread's signals are no longer kept waiting.
    fn flush(&self, address: u64, index: usize, interrupted: &libc::sigset_t) {
        let (Some(asked), Some(done)) = (self.asked.get(index), self.done.get(index)) else { return };
        let number = asked.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        ring();
        loop {
            let flushed = done.load(Ordering::SeqCst);
            // Numbers wrap; half of all of them would have to wait at once for one to be taken for another.
            let over = flushed.wrapping_sub(number) < u32::MAX / 2;
            if over || self.address.load(Ordering::SeqCst) != address {
                return;
            }
            if futex_wait(done, flushed, Some(&PATIENCE)) == Err(Errno::ETIMEDOUT) {
                set_mask(interrupted);
            }
        }
    }
}

fn futex_wait(word: &AtomicU32, value: u32, limit: Option<&libc::timespec>) -> Result<(), Errno> {
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let limit = limit.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the word and the time outlive the call, and no other pointer is looked at.
    let result = unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, limit) };
    Errno::result(result).map(drop)
}

fn futex_wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is only an address to the kernel.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, c_int::MAX) };
}

/// Installs the handler, once; what was there before gets all that is not ours.
fn install() -> io::Result<()> {
    if !PREVIOUS.load(Ordering::SeqCst).is_null() {
        return Ok(());
    }
    // The decoder makes its tables at its first use, for which it allocates.
    let _ = store::look(&[0x90], 0, |_| None);
    let before = current()?;
    let leaked = Box::into_raw(Box::new(before));
    if PREVIOUS.compare_exchange(ptr::null_mut(), leaked, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        // Another thread was first.
        // SAFETY: the box was not published.
        drop(unsafe { Box::from_raw(leaked) });
        return Ok(());
    }
    let found =
        exchange(&ours(&before)).inspect_err(|_| PREVIOUS.store(ptr::null_mut(), Ordering::SeqCst))?;
    if found.sa_sigaction != before.sa_sigaction {
        // The program has installed one meanwhile.
        PREVIOUS.store(Box::into_raw(Box::new(found)), Ordering::SeqCst);
        exchange(&ours(&found))?;
    }
    Ok(())
}

/// Our handler, with the stack that the one before it relies on. All signals are blocked in it: natively none can interrupt a store,
/// and the handler of one that did would find itself on our stack, and SIGSEGV blocked, with which a store of its own would
/// end the process.
fn ours(before: &libc::sigaction) -> libc::sigaction {
    let mut action = *before;
    action.sa_sigaction = on_fault as *const () as usize;
    action.sa_flags = match before.sa_sigaction {
        // Whoever has a stack for signals may lack another. Ignored signals interrupt no system call.
        libc::SIG_DFL | libc::SIG_IGN => libc::SA_ONSTACK | libc::SA_RESTART,
        _ => before.sa_flags & !libc::SA_RESETHAND,
    } | libc::SA_SIGINFO;
    // SAFETY: the set is the struct's own.
    unsafe { libc::sigfillset(&mut action.sa_mask) };
    action
}

/// What a thread had blocked when it was interrupted.
fn interrupted(thread: &ucontext_t) -> libc::sigset_t {
    let mut set = DEFAULT.sa_mask;
    // SAFETY: the kernel's set, of 8 bytes (arch/x86/include/uapi/asm/signal.h), is the first part of the C library's in both
    // structs; what follows it in the thread's is not the kernel's.
    unsafe {
        ptr::copy_nonoverlapping(
            ptr::from_ref(&thread.uc_sigmask).cast::<u8>(),
            (&raw mut set).cast(),
            size_of::<u64>(),
        );
    }
    set
}

/// Blocks these signals and no others.
fn set_mask(set: &libc::sigset_t) {
    // SAFETY: the set lives beyond the call; the old one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, set, ptr::null_mut()) };
}

/// Blocks what the kernel would have in an action's handler (`signal_delivered`). Its return restores what was before.
fn block_for(action: &libc::sigaction, thread: &ucontext_t) {
    let mut set = interrupted(thread);
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: the set was the kernel's answer, and the signal exists.
        let blocked = unsafe { libc::sigismember(&action.sa_mask, signal) } == 1;
        if blocked || signal == libc::SIGSEGV && action.sa_flags & libc::SA_NODEFER == 0 {
            // SAFETY: the set is this function's own, and the signal exists.
            unsafe { libc::sigaddset(&mut set, signal) };
        }
    }
    set_mask(&set);
}

fn current() -> io::Result<libc::sigaction> {
    let mut found = DEFAULT;
    // SAFETY: nothing is changed, and the struct is the library's own.
    match unsafe { libc::sigaction(libc::SIGSEGV, ptr::null(), &mut found) } {
        0 => Ok(found),
        _ => Err(io::Error::last_os_error()),
    }
}

fn exchange(action: &libc::sigaction) -> io::Result<libc::sigaction> {
    let mut found = DEFAULT;
    // SAFETY: the handler is a function of this library, which never goes, or what the program itself had installed.
    match unsafe { libc::sigaction(libc::SIGSEGV, action, &mut found) } {
        0 => Ok(found),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel gives a siginfo_t, which is this thread's alone until the return.
    let fault = unsafe { info.as_ref() };
    // SAFETY: and a ucontext_t.
    let thread = unsafe { context.cast::<ucontext_t>().as_mut() };
    if let (Some(fault), Some(thread)) = (fault, thread)
        && fault.si_code == SEGV_ACCERR
        && register(thread, libc::REG_ERR) & WRITE != 0
        // SAFETY: a SIGSEGV of the kernel's has an address.
        && try_store(unsafe { fault.si_addr() } as u64, thread)
    {
        return;
    }
    // SAFETY: the arguments are the kernel's.
    unsafe { chain(signal, info, context) };
}

/// Whether the fault was a store to one of our pages, which is done then.
fn try_store(address: u64, thread: &mut ucontext_t) -> bool {
    let base = address & !(PAGE - 1);
    let ours = |page: &&Page| page.address.load(Ordering::SeqCst) == base;
    let Some(page) =
        PAGES.iter().find(ours).filter(|_| base != 0 && OWNER.load(Ordering::SeqCst) == std::process::id())
    else {
        return false;
    };
    let Some(store) = instruction(thread) else { return false };
    let offset = store.address.wrapping_sub(base);
    let Some(end) = offset.checked_add(store.size).filter(|end| *end <= PAGE) else {
        // Other memory is in it too, which only the processor can store to.
        return false;
    };
    let errno = Errno::last_raw();
    // What was stored before, also with write combining, is on its way to the GPU before the host is asked.
    // SAFETY: every x86-64 has SSE2.
    unsafe { std::arch::x86_64::_mm_mfence() };
    for (index, register) in REGISTERS.into_iter().enumerate() {
        // Nothing is behind the rest of the page natively, and stores there have no effect.
        if offset < u64::from(register).saturating_add(REGISTER) && end > register.into() {
            page.flush(base, index, &interrupted(thread));
        }
    }
    Errno::set_raw(errno);
    if let Some((name, contents)) = store.loads
        && let Some(index) = general(name)
    {
        set_register(thread, index, contents);
    }
    set_register(thread, libc::REG_RIP, store.next);
    true
}

/// The store at the instruction pointer.
fn instruction(thread: &ucontext_t) -> Option<Store> {
    let pointer = register(thread, libc::REG_RIP) as u64;
    let value = |name| general(name).map(|index| register(thread, index).cast_unsigned());
    // What is behind the page that the instruction begins in is looked at only if the instruction goes on there.
    let here = (PAGE - pointer % PAGE).min(LONGEST as u64) as usize;
    let mut bytes = [0u8; LONGEST];
    for length in [here, LONGEST] {
        let some = bytes.get_mut(..length)?;
        for (offset, byte) in some.iter_mut().enumerate() {
            let place = ptr::with_exposed_provenance::<u8>(pointer as usize).wrapping_add(offset);
            // SAFETY: the processor has just fetched the instruction from these pages, so they are mapped, and code is
            // readable. Where it is not (memory that can only be executed), this is a fault while SIGSEGV is blocked,
            // which ends the process, as the store would without a handler.
            *byte = unsafe { place.read_volatile() };
        }
        match store::look(some, pointer, value) {
            Found::Store(store) => return Some(store),
            Found::Longer => {}
            Found::Other => return None,
        }
    }
    None
}

fn register(thread: &ucontext_t, index: c_int) -> i64 {
    usize::try_from(index).ok().and_then(|index| thread.uc_mcontext.gregs.get(index)).copied().unwrap_or(0)
}

fn set_register(thread: &mut ucontext_t, index: c_int, value: u64) {
    let place = usize::try_from(index).ok().and_then(|index| thread.uc_mcontext.gregs.get_mut(index));
    if let Some(place) = place {
        *place = value.cast_signed();
    }
}

/// Where a general register of 64 bits is in `gregs`.
fn general(name: Register) -> Option<c_int> {
    Some(match name {
        Register::RAX => libc::REG_RAX,
        Register::RCX => libc::REG_RCX,
        Register::RDX => libc::REG_RDX,
        Register::RBX => libc::REG_RBX,
        Register::RSP => libc::REG_RSP,
        Register::RBP => libc::REG_RBP,
        Register::RSI => libc::REG_RSI,
        Register::RDI => libc::REG_RDI,
        Register::R8 => libc::REG_R8,
        Register::R9 => libc::REG_R9,
        Register::R10 => libc::REG_R10,
        Register::R11 => libc::REG_R11,
        Register::R12 => libc::REG_R12,
        Register::R13 => libc::REG_R13,
        Register::R14 => libc::REG_R14,
        Register::R15 => libc::REG_R15,
        _ => return None,
    })
}

/// Does with a fault that is not ours what would have become of it.
///
/// # Safety
/// The arguments are those that the kernel gave this thread's handler.
unsafe fn chain(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: it is null or a leaked box, which nobody changes.
    let Some(before) = (unsafe { PREVIOUS.load(Ordering::SeqCst).as_ref() }) else { return };
    // SAFETY: the kernel gives a siginfo_t.
    let sent = unsafe { info.as_ref() }.is_some_and(|info| info.si_code <= 0);
    match before.sa_sigaction {
        // The kernel ignores what processes send, and not what an instruction does.
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            let _ = exchange(&DEFAULT);
            if sent {
                // It is blocked, and comes with the return. An instruction that faults does so again.
                // SAFETY: no pointer.
                unsafe { libc::raise(signal) };
            }
        }
        handler => {
            if before.sa_flags & libc::SA_RESETHAND != 0 {
                PREVIOUS.store(ptr::from_ref(&DEFAULT).cast_mut(), Ordering::SeqCst);
            }
            // SAFETY: the kernel gives a ucontext_t.
            if let Some(thread) = unsafe { context.cast::<ucontext_t>().as_ref() } {
                block_for(before, thread);
            }
            if before.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: with SA_SIGINFO the program has installed a function with these arguments.
                let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                    unsafe { std::mem::transmute(handler) };
                handler(signal, info, context);
            } else {
                // SAFETY: without it, one with this argument.
                let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
                handler(signal);
            }
        }
    }
}
