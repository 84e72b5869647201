//! Where the kernel writes for a thread's restartable sequences (rseq(2)).
//!
//! It does so when the thread returns to user mode, and sends SIGSEGV where it cannot. A forked child inherits the place: if
//! there is no memory, as where that is not inherited (`MADV_DONTFORK`), the child comes to no instruction of its own, and to
//! none that it could be made to run. So the pages of these areas are not adopted.
//!
//! They are the C library's: behind its record of the thread before glibc 2.41, below all thread-local variables since then; or
//! those of a program that has turned that off and registers its own.
#![allow(unsafe_code, reason = "ptrace, symbols of the C library, the thread pointer")]

use std::ops::Range;
use std::sync::OnceLock;

use super::syscall::call;

/// The least that the kernel takes: `ORIG_RSEQ_SIZE`, bytes.
const LEAST: u64 = 32;

/// What glibc tells since 2.35: how far from the thread pointer its area lies, and the size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OfLibrary {
    offset: i64,
    size: u32,
}

static OF_LIBRARY: OnceLock<Option<OfLibrary>> = OnceLock::new();

/// Asks the dynamic linker, once. A tracer cannot.
pub fn learn() {
    OF_LIBRARY.get_or_init(of_library);
}

fn of_library() -> Option<OfLibrary> {
    // SAFETY: the name ends with a zero.
    let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()) };
    // SAFETY: as above.
    let size = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()) };
    if offset.is_null() || size.is_null() {
        return None;
    }
    // SAFETY: `extern const ptrdiff_t __rseq_offset` of sys/rseq.h, constant since before main.
    let offset = unsafe { offset.cast::<libc::ptrdiff_t>().read() };
    // SAFETY: `extern const unsigned int __rseq_size` of the same header.
    let size = unsafe { size.cast::<libc::c_uint>().read() };
    // Without a size it is not registered.
    (size > 0).then_some(OfLibrary { offset: offset as i64, size })
}

impl OfLibrary {
    /// The area of the thread with this thread pointer.
    fn area(self, thread_pointer: u64) -> Range<u64> {
        let start = thread_pointer.saturating_add_signed(self.offset);
        // The size is that of the fields that are used; more may be registered.
        start..start.saturating_add(u64::from(self.size).max(LEAST))
    }
}

/// `PTRACE_GET_RSEQ_CONFIGURATION` of linux/ptrace.h, since Linux 5.13.
const GET_CONFIGURATION: usize = 0x420f;

/// `struct ptrace_rseq_configuration` of linux/ptrace.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Configuration {
    abi_pointer: u64,
    abi_size: u32,
    signature: u32,
    flags: u32,
    pad: u32,
}

/// The area of a thread that the caller has stopped by ptrace, empty where it has none. A bare system call, and no more.
pub fn of_stopped(id: libc::pid_t, thread_pointer: u64) -> Range<u64> {
    let mut found = Configuration::default();
    let place = (&raw mut found).expose_provenance();
    let arguments = [GET_CONFIGURATION, id.unsigned_abs() as usize, size_of::<Configuration>(), place];
    // SAFETY: the kernel writes as many bytes as is said.
    match unsafe { call(libc::SYS_ptrace, arguments) } {
        Ok(_) if found.abi_pointer == 0 => 0..0,
        Ok(_) => {
            let size = u64::from(found.abi_size).max(LEAST);
            found.abi_pointer..found.abi_pointer.saturating_add(size)
        }
        // An older kernel.
        Err(_) => OF_LIBRARY.get().copied().flatten().map_or(0..0, |it| it.area(thread_pointer)),
    }
}

/// The area that the C library has registered for the calling thread, empty where it has not.
pub fn of_this_thread() -> Range<u64> {
    learn();
    match (OF_LIBRARY.get().copied().flatten(), thread_pointer()) {
        (Some(it), Some(pointer)) => it.area(pointer),
        _ => 0..0,
    }
}

#[cfg(target_arch = "x86_64")]
fn thread_pointer() -> Option<u64> {
    let pointer: u64;
    // SAFETY: the ABI has the thread pointer's own address in the word that it points to, and that word is only read.
    unsafe {
        std::arch::asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, readonly, preserves_flags));
    }
    Some(pointer)
}

#[cfg(not(target_arch = "x86_64"))]
fn thread_pointer() -> Option<u64> {
    None
}

/// Whether two ranges have an address in common.
pub fn touch(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start.max(other.start) < one.end.min(other.end)
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::thunk::adopt::TABLE;
    use crate::thunk::adopt::stop::while_all_stopped;
    use crate::thunk::adopt::swap::is_in_use_here;
    use crate::thunk::adopt::tracer::{CannotStop, Obstacle};
    use crate::thunk::lock::lock;
    use crate::thunk::memory::address::page_size;

    #[test]
    fn ranges_with_an_address_in_common() {
        assert!(touch(&(10..20), &(19..30)) && touch(&(10..20), &(12..13)) && touch(&(12..13), &(10..20)));
        assert!(!touch(&(10..20), &(20..30)) && !touch(&(0..0), &(0..30)) && !touch(&(5..5), &(0..30)));
    }

    /// The kernel's word for it: to register the same again is EBUSY, another one EINVAL (kernel/rseq.c).
    #[test]
    fn the_area_of_this_thread_is_the_one_that_the_kernel_has() {
        let area = of_this_thread();
        if area.is_empty() {
            println!("skipped: this C library registers no area");
            return;
        }
        /// RSEQ_SIG of sys/rseq.h for x86.
        const SIGNATURE: usize = 0x5305_3053;
        let register = |size: u64| {
            // SAFETY: the C library has registered one, and the kernel takes no second.
            unsafe { call(libc::SYS_rseq, [area.start as usize, size as usize, 0, SIGNATURE]) }
        };
        // Which size is registered differs from one library and kernel to another.
        let sizes = [area.end - area.start, LEAST, (area.end - area.start).next_multiple_of(LEAST)];
        assert!(sizes.iter().any(|size| register(*size) == Err(libc::EBUSY)), "{area:x?}");
    }

    /// The page of the area, of the calling thread and of another, is not exchanged; nor is it without threads being stopped.
    #[test]
    fn its_page_is_not_to_be_exchanged() {
        // One stop at a time.
        let _table = lock(&TABLE);
        let page = page_size();
        let page_of = |area: &Range<u64>| area.start / page * page..area.end.next_multiple_of(page);
        let mine = of_this_thread();
        if mine.is_empty() {
            println!("skipped: this C library registers no area");
            return;
        }
        let (tell, told) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            tell.send(of_this_thread()).unwrap();
            let _ = released.recv();
        });
        let others = told.recv().unwrap();
        assert_ne!(mine, others);
        assert!(is_in_use_here(&page_of(&mine)));
        // The area alone lies in nothing else that is refused, at least before glibc 2.41.
        for area in [&mine, &others, &page_of(&mine), &page_of(&others)] {
            match while_all_stopped(area, &|| Ok(())) {
                Err(CannotStop { obstacle: Obstacle::Stack, .. }) => {}
                Err(CannotStop { obstacle: Obstacle::Forbidden, .. }) => {
                    println!("skipped: threads may not be traced here");
                }
                done => panic!("{area:x?}: {done:?}"),
            }
        }
        drop(release);
        other.join().unwrap();
    }
}
