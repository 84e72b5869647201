//! Stores to the pages of HDP flush registers, and faults that are none.
#![allow(unsafe_code)] // stores, a signal handler

use std::arch::asm;
use std::arch::x86_64::{__m128i, _mm_storeu_si128, _mm_stream_si32};
use std::ffi::c_void;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;

use hsakmt_abi::topology::HsaHeapType;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use super::kfd::{GPUS, Kfd};
use super::{is_gone, mapping};
use crate::thunk::settings::{HdpFlush, Settings};

/// `enum kfd_mmio_remap` (linux/kfd_ioctl.h).
const MEMORY: u32 = 0;
const REGISTERS: u32 = 4;

/// Faults that the program's own handler saw, where the last one was, and whether SIGSEGV was blocked meanwhile.
static SEEN: AtomicUsize = AtomicUsize::new(0);
static PLACE: AtomicU64 = AtomicU64::new(0);
static BLOCKED: AtomicBool = AtomicBool::new(false);

/// The program's own handler, as the library finds it: it makes the page writable.
extern "C" fn program(_: i32, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives a siginfo_t.
    let fault = unsafe { &*info };
    // SAFETY: a SIGSEGV of the kernel's has an address.
    let address = unsafe { fault.si_addr() }.addr();
    PLACE.store(address as u64, Ordering::SeqCst);
    BLOCKED.store(is_blocked(), Ordering::SeqCst);
    SEEN.fetch_add(1, Ordering::SeqCst);
    let page = std::ptr::with_exposed_provenance_mut::<c_void>(address & !4095);
    // SAFETY: the page is a test's own.
    let done =
        unsafe { mprotect(NonNull::new(page).unwrap(), 4096, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE) };
    assert!(done.is_ok());
}

/// Whether the thread that calls has SIGSEGV blocked.
fn is_blocked() -> bool {
    SigSet::thread_get_mask().unwrap().contains(Signal::SIGSEGV)
}

/// A thunk with pages; one at a time, for the handler's sake.
struct Trapping {
    kfd: Kfd,
    _alone: MutexGuard<'static, ()>,
}

impl Deref for Trapping {
    type Target = Kfd;

    fn deref(&self) -> &Kfd {
        &self.kfd
    }
}

fn trapping() -> Trapping {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let flags = SaFlags::SA_ONSTACK | SaFlags::SA_SIGINFO;
        let action = SigAction::new(SigHandler::SigAction(program), flags, SigSet::empty());
        // SAFETY: the handler only uses atomics and one system call.
        unsafe { sigaction(Signal::SIGSEGV, &action) }.unwrap();
    });
    let kfd = Kfd::with(0, Settings { hdp: HdpFlush::Trap, ..Settings::default() }, false);
    Trapping { kfd, _alone: alone }
}

/// Stores with one instruction.
fn put<T>(place: *mut T, value: T) {
    // SAFETY: the tests store to pages of their own, or to those of the thunk, where the store traps.
    unsafe { place.write_volatile(value) };
}

fn get(place: *const u32) -> u32 {
    // SAFETY: as in `put`.
    unsafe { place.read_volatile() }
}

/// `*place |= 1` with one instruction.
fn or_one(place: *mut u32) {
    // SAFETY: as in `put`.
    unsafe { asm!("or dword ptr [{}], 1", in(reg) place, options(nostack)) };
}

/// Stores with the one instruction that compilers make of a sequentially consistent atomic store, and gives what it loads.
fn exchange(place: *mut u32, mut value: u64) -> u64 {
    // SAFETY: as in `put`.
    unsafe { asm!("xchg dword ptr [{}], {:e}", in(reg) place, inout(reg) value, options(nostack)) };
    value
}

impl Kfd {
    /// The page of the first GPU.
    fn registers(&self) -> *mut u32 {
        let address = self.thunk.snapshot().unwrap().gpus[0].hdp_registers.unwrap();
        std::ptr::with_exposed_provenance_mut(address as usize)
    }

    /// What was flushed since the last time.
    fn flushed(&self) -> Vec<u32> {
        std::mem::take(&mut self.state.lock().unwrap().flushes)
    }
}

#[test]
fn nobody_who_has_not_asked_gets_a_page() {
    let kfd = Kfd::new();
    let banks = kfd.thunk.snapshot().unwrap().banks(kfd.gpu_node()).unwrap();
    assert!(!banks.iter().any(|bank| { bank.heap_type } == HsaHeapType::MMIO_REMAP));
    assert!(kfd.state.lock().unwrap().buffers.is_empty());
}

#[test]
fn the_page_is_a_bank_of_its_gpu_and_stays_until_the_close() {
    let kfd = trapping();
    let page = kfd.registers().addr() as u64;
    let banks = kfd.thunk.snapshot().unwrap().banks(kfd.gpu_node()).unwrap();
    let last = banks.last().unwrap();
    let found = ({ last.heap_type }, { last.size_in_bytes }, { last.virtual_base_address });
    // As hsaKmtGetNodeMemoryProperties of AMD's library ends the list (topology.c).
    assert_eq!(found, (HsaHeapType::MMIO_REMAP, 4096, page));
    let count = kfd.thunk.snapshot().unwrap().properties(kfd.gpu_node()).unwrap().num_memory_banks;
    assert_eq!(count as usize, banks.len());
    assert_eq!(mapping(page).as_deref(), Some("r--p"));
    {
        let state = kfd.state.lock().unwrap();
        let mut buffers = state.buffers.values();
        let buffer = buffers.find(|buffer| buffer.request.va.0 == page).unwrap();
        // Traced of AMD's library.
        assert_eq!((buffer.request.flags, buffer.request.size), (0x9400_0010, 4096));
        assert_eq!((buffer.request.gpu_id, &buffer.mapped[..]), (GPUS[0], &GPUS[..]));
    }
    assert_eq!(get(kfd.registers()), 0);
    kfd.thunk.release_snapshot();
    kfd.thunk.acquire_snapshot().unwrap();
    assert_eq!(kfd.registers().addr() as u64, page);
    assert_eq!(kfd.state.lock().unwrap().buffers.len(), GPUS.len());
    kfd.thunk.shut_down();
    assert!(kfd.state.lock().unwrap().buffers.is_empty());
    assert!(is_gone(page));
}

#[test]
fn stores_of_all_kinds_are_flushes() {
    let kfd = trapping();
    let page = kfd.registers();
    let bytes = page.cast::<u8>();
    let seen = SEEN.load(Ordering::SeqCst);
    let flushed_by = |store: &dyn Fn()| {
        Errno::set_raw(77);
        store();
        assert_eq!(Errno::last_raw(), 77);
        kfd.flushed()
    };
    assert_eq!(flushed_by(&|| put(page, 1)), [MEMORY]);
    assert_eq!(flushed_by(&|| put(page.wrapping_add(1), 1)), [REGISTERS]);
    assert_eq!(flushed_by(&|| put(bytes.wrapping_add(2), 1)), [MEMORY]);
    assert_eq!(flushed_by(&|| put(bytes.wrapping_add(7), 1)), [REGISTERS]);
    assert_eq!(flushed_by(&|| put(bytes.cast::<u16>().wrapping_add(1), 1)), [MEMORY]);
    assert_eq!(flushed_by(&|| put(page.cast::<u64>(), 1)), [MEMORY, REGISTERS]);
    // SAFETY: as in `put`.
    let stream = || unsafe { _mm_stream_si32(page.cast(), 1) };
    assert_eq!(flushed_by(&stream), [MEMORY]);
    // SAFETY: as in `put`; any bits are a vector.
    let vector: __m128i = unsafe { std::mem::zeroed() };
    // SAFETY: as in `put`.
    let wide = || unsafe { _mm_storeu_si128(page.cast(), vector) };
    assert_eq!(flushed_by(&wide), [MEMORY, REGISTERS]);
    // SAFETY: as in `put`; a register is aligned, and nobody looks at it otherwise.
    let atomic = unsafe { AtomicU32::from_ptr(page.wrapping_add(1)) };
    assert_eq!(flushed_by(&|| atomic.store(1, Ordering::SeqCst)), [REGISTERS]);
    assert_eq!(flushed_by(&|| assert_eq!(exchange(page, u64::MAX), 0)), [MEMORY]);
    // Nothing is there.
    assert_eq!(flushed_by(&|| put(page.wrapping_add(2), 1)), [0; 0]);
    assert_eq!(flushed_by(&|| put(page.wrapping_add(1023), 1)), [0; 0]);
    // By immediate, by register with an index, from a vector register, across both; what the instructions behind them do
    // is done, and flags and registers are as they were.
    let (flag, mut sum): (u8, u64);
    sum = 40;
    // SAFETY: as in `put`; the stack is not used, and all that changes is named.
    unsafe {
        asm!(
            "cmp {page}, {page}",
            "mov dword ptr [{page}], 1",
            "mov dword ptr [{page} + {index} * 4 - 12], {value:e}",
            "movd dword ptr [{page} + 4], {vector}",
            "mov dword ptr [{page} + 2], {value:e}",
            "sete {flag}",
            "lea {sum}, [{sum} + 2]",
            page = in(reg) page, index = in(reg) 3usize, value = in(reg) 9u32, vector = in(xmm_reg) 5.0f32,
            flag = out(reg_byte) flag, sum = inout(reg) sum,
            options(nostack)
        );
    }
    assert_eq!((flag, sum), (1, 42));
    assert_eq!(kfd.flushed(), [MEMORY, MEMORY, REGISTERS, MEMORY, REGISTERS]);
    assert_eq!(get(page), 0);
    assert_eq!(SEEN.load(Ordering::SeqCst), seen, "the program's handler saw none of them");
    assert_eq!(mapping(page.addr() as u64).as_deref(), Some("r--p"));
}

/// Each store waits for a flush that began after it: not for one that another thread had begun before.
#[test]
fn threads_store_at_once() {
    const THREADS: usize = 4;
    const STORES: usize = 50;
    let kfd = trapping();
    let page = kfd.registers().addr();
    let count = || kfd.state.lock().unwrap().flushes.len();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..STORES {
                    // The host counts a flush as it does it, so that all that are counted here began before the store.
                    let before = count();
                    put(std::ptr::with_exposed_provenance_mut::<u32>(page), 1);
                    assert!(count() > before);
                }
            });
        }
    });
    let all = count();
    assert!((STORES..=THREADS * STORES).contains(&all), "{all}");
}

/// Where a handler of another signal stores, and how far it has got.
static PAGE: AtomicPtr<u32> = AtomicPtr::new(std::ptr::null_mut());
static OWN: AtomicPtr<u32> = AtomicPtr::new(std::ptr::null_mut());
static STEPS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn stores_and_faults(_: i32) {
    STEPS.store(1, Ordering::SeqCst);
    put(PAGE.load(Ordering::SeqCst), 1);
    put(OWN.load(Ordering::SeqCst), 7);
    STEPS.store(2, Ordering::SeqCst);
}

/// A signal that arrives while a thread waits for the host: its handler stores as well, and faults. Natively nothing is special
/// about that; with SIGSEGV blocked, the kernel would end the process (force_sig_info_to_task).
fn signal_amid_a_store(host_waits_for_it: bool) {
    let kfd = trapping();
    let page = kfd.registers();
    let size = 4096.try_into().unwrap();
    // SAFETY: new memory at an address of the kernel's choice.
    let own = unsafe { mmap_anonymous(None, size, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE) }.unwrap();
    PAGE.store(page, Ordering::SeqCst);
    OWN.store(own.cast().as_ptr(), Ordering::SeqCst);
    STEPS.store(0, Ordering::SeqCst);
    let action = SigAction::new(SigHandler::Handler(stores_and_faults), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler only uses atomics, stores and faults.
    let before = unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
    // SAFETY: no argument.
    let me = unsafe { libc::pthread_self() };
    kfd.state.lock().unwrap().amid_flush = Some(Box::new(move || {
        // SAFETY: the thread waits for this.
        assert_eq!(unsafe { libc::pthread_kill(me, libc::SIGUSR1) }, 0);
        while host_waits_for_it && STEPS.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
    }));
    let seen = SEEN.load(Ordering::SeqCst);
    put(page.wrapping_add(1), 1);
    assert_eq!(STEPS.load(Ordering::SeqCst), 2);
    assert_eq!(kfd.flushed(), [REGISTERS, MEMORY]);
    assert_eq!((get(own.cast().as_ptr()), SEEN.load(Ordering::SeqCst)), (7, seen + 1));
    // SAFETY: the handler of before.
    unsafe { sigaction(Signal::SIGUSR1, &before) }.unwrap();
    // SAFETY: nothing refers to it.
    unsafe { munmap(own, 4096) }.unwrap();
}

#[test]
fn a_signal_amid_a_store_comes_after_it() {
    signal_amid_a_store(false);
}

#[test]
fn a_signal_amid_a_store_that_takes_long_comes_before_its_end() {
    let run = || {
        // std's stack for signals has no room for three of them.
        let none = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // SAFETY: the thread is on no such stack.
        assert_eq!(unsafe { libc::sigaltstack(&none, std::ptr::null_mut()) }, 0);
        signal_amid_a_store(true);
    };
    thread::spawn(run).join().unwrap();
}

#[test]
fn other_faults_are_the_programs() {
    let kfd = trapping();
    let two = 8192.try_into().unwrap();
    // SAFETY: new memory at an address of the kernel's choice.
    let own = unsafe { mmap_anonymous(None, two, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE) }.unwrap();
    let place = own.cast::<u32>().as_ptr();
    let fault = |access: &dyn Fn(), address: *mut u32| {
        let before = SEEN.load(Ordering::SeqCst);
        access();
        assert_eq!(SEEN.load(Ordering::SeqCst), before + 1);
        assert_eq!(PLACE.load(Ordering::SeqCst), address.addr() as u64);
        // As for a handler without SA_NODEFER (sigaction(2)), until it returns.
        assert!(BLOCKED.load(Ordering::SeqCst) && !is_blocked());
    };
    let second = place.wrapping_add(1024);
    fault(&|| put(place.wrapping_add(3), 1), place.wrapping_add(3));
    assert_eq!(get(place.wrapping_add(3)), 1, "the handler made it writable, and the store was done");
    let page = NonNull::new(second.cast()).unwrap();
    // SAFETY: the page is this test's own.
    unsafe { mprotect(page, 4096, ProtFlags::PROT_NONE) }.unwrap();
    fault(&|| assert_eq!(get(second), 0), second);
    // To one of our pages, but more than a store: only the processor could do it.
    let page = kfd.registers();
    fault(&|| or_one(page), page);
    assert_eq!((get(page), kfd.flushed()), (1, vec![]));
    // SAFETY: nothing refers to it.
    unsafe { munmap(own, 8192) }.unwrap();
}

#[test]
fn where_the_host_has_no_page_there_is_none() {
    let kfd = trapping();
    let other = Kfd::with(0, kfd.thunk.settings, true);
    let banks = other.thunk.snapshot().unwrap().banks(other.gpu_node()).unwrap();
    assert!(!banks.iter().any(|bank| { bank.heap_type } == HsaHeapType::MMIO_REMAP));
    assert!(other.state.lock().unwrap().buffers.is_empty());
}

/// The application may free it, as natively; a store has no effect then.
#[test]
fn a_page_that_was_freed_is_not_flushed() {
    let kfd = trapping();
    let page = kfd.registers();
    kfd.unmap(page.addr() as u64).unwrap();
    kfd.free(page.addr() as u64).unwrap();
    put(page, 1);
    assert_eq!(kfd.flushed(), [0; 0]);
}
