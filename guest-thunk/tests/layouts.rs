//! What the functions write, in each layout that a caller may have been compiled with: all of it and no byte more. Sizes are those
//! of the vendor's headers (hsakmt-abi's `caller`).
#![cfg(feature = "loopback")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "calls of the C API, memory without access")]

mod support;

use guest_thunk::client::LOOPBACK_VARIABLE;
use guest_thunk::export::caller::{layout, set_layout, virtio_kfd_caller_layout};
use guest_thunk::export::pointer::{Out, number};
use guest_thunk::export::{open, process, topology};
use hsakmt_abi::caller::CallerLayout;
use hsakmt_abi::status::HsakmtStatus as Status;

use self::support::Daemon;

/// A byte that is in no answer's end.
const UNTOUCHED: u8 = 0xa5;

/// Memory that ends where access ends.
struct Guarded {
    start: *mut libc::c_void,
    mapped: usize,
    size: usize,
}

impl Guarded {
    fn new(size: usize) -> Guarded {
        // SAFETY: sysconf takes any name.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        let whole = size.next_multiple_of(page);
        let (read_write, private) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), whole + page, read_write, private, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let guard = start.wrapping_byte_add(whole);
        // SAFETY: the last page of the mapping above, which nothing uses.
        assert_eq!(unsafe { libc::mprotect(guard, page, libc::PROT_NONE) }, 0);
        let guarded = Guarded { start: start.wrapping_byte_add(whole - size), mapped: whole + page, size };
        // SAFETY: `size` bytes before the guard, which are mapped for writing.
        unsafe { guarded.start.cast::<u8>().write_bytes(UNTOUCHED, size) };
        guarded
    }

    /// As the API takes it.
    fn out<T>(&self) -> Out<T> {
        Out::from(self.start.cast::<T>())
    }

    fn bytes(&self) -> Vec<u8> {
        self.out::<u8>().read_all(self.size)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let start = self.start.wrapping_byte_sub(usize::try_from(number(self.start)).unwrap() % 4096);
        // SAFETY: what `new` mapped: `start` lies in its first page, and nothing else has the address.
        unsafe { libc::munmap(start, self.mapped) };
    }
}

/// Calls a function of the API.
macro_rules! ask {
    ($function:path $(, $argument:expr)* $(,)?) => {
        // SAFETY: all pointers that the test passes are of memory that is as large as the function writes.
        assert_eq!(unsafe { $function($($argument),*) }, Status::SUCCESS, stringify!($function))
    };
}

fn word(bytes: &[u8], place: usize) -> u32 {
    u32::from_ne_bytes(bytes[place..place + 4].try_into().unwrap())
}

#[track_caller]
fn written_to_the_end(what: &str, bytes: &[u8]) {
    assert!(bytes.last().is_none_or(|last| *last != UNTOUCHED), "{what}: {:x?}", bytes.iter().rev().take(8));
}

#[test]
fn structs_have_the_size_of_the_callers_layout() {
    let Some(daemon) = Daemon::start() else { return };
    // SAFETY: no other thread reads the environment yet.
    unsafe { std::env::set_var(LOOPBACK_VARIABLE, daemon.socket()) };
    assert_eq!(layout(), CallerLayout::N356, "unless it is set");
    assert!(!virtio_kfd_caller_layout(1000, 1056) && layout() == CallerLayout::N356);
    ask!(open::hsaKmtOpenKFD);
    let system = Guarded::new(16);
    ask!(topology::hsaKmtAcquireSystemProperties, system.out());
    written_to_the_end("HsaSystemProperties", &system.bytes());

    let mut seen = Vec::new();
    for layout in CallerLayout::ALL {
        set_layout(layout);
        let node = Guarded::new(layout.node_size());
        ask!(topology::hsaKmtGetNodeProperties, 1, node.out());
        let node = node.bytes();
        written_to_the_end("HsaNodeProperties", &node);
        // NumMemoryBanks, NumCaches, NumIOLinks; DrmRenderMinor before the names (offsetof of the headers).
        let (first, minor) = match layout {
            CallerLayout::N356 => (8, 96),
            CallerLayout::N360 => (8, 100),
            _ => (12, 108),
        };
        let counts = [0, 4, 8].map(|place| word(&node, first + place));
        let [banks, caches, links] = counts;
        assert!(banks > 0 && caches > 0 && links > 0, "{layout:?}: {counts:?}");
        seen.push((counts, word(&node, minor)));

        let guarded = Guarded::new(32 * banks as usize);
        ask!(topology::hsaKmtGetNodeMemoryProperties, 1, banks, guarded.out());
        written_to_the_end("HsaMemoryProperties", &guarded.bytes());
        let guarded = Guarded::new(layout.cache_size() * caches as usize);
        ask!(topology::hsaKmtGetNodeCacheProperties, 1, 0, caches, guarded.out());
        let bytes = guarded.bytes();
        written_to_the_end("HsaCacheProperties", &bytes);
        for cache in bytes.chunks(layout.cache_size()) {
            assert!((1..=4).contains(&word(cache, 4)), "{layout:?}: level {}", word(cache, 4));
        }
        let guarded = Guarded::new(layout.link_size() * links as usize);
        ask!(topology::hsaKmtGetNodeIoLinkProperties, 1, links, guarded.out());
        let bytes = guarded.bytes();
        written_to_the_end("HsaIoLinkProperties", &bytes);
        for link in bytes.chunks(layout.link_size()) {
            assert_eq!(word(link, 12), 1, "{layout:?}: NodeFrom");
        }
    }
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "the same in all layouts: {seen:?}");

    let clocks = Guarded::new(32);
    ask!(process::hsaKmtGetClockCounters, 1, clocks.out());
    written_to_the_end("HsaClockCounters", &clocks.bytes());
    ask!(open::hsaKmtCloseKFD);
}
