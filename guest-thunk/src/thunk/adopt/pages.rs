//! Pages of the process: copied, moved and mapped while everything that could use them is held. So nothing here allocates,
//! takes a lock or unwinds.
#![allow(unsafe_code, reason = "mremap, mmap, and copies of memory that others write")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

/// Smallest page of x86-64; the kernel's other page sizes are multiples.
pub const PAGE: usize = 4096;

/// Bytes that are copied at a time.
const BOUNCE: usize = 128 << 10;

/// Entries of /proc/self/pagemap that are read at a time.
const WINDOW: usize = 512;

/// A page is there, or swapped (pagemap.rst of the kernel's documentation).
const POPULATED: u64 = 0b11 << 62;

fn pointer(address: u64) -> *mut libc::c_void {
    // Lossless: the addresses are this process's.
    ptr::with_exposed_provenance_mut(address as usize)
}

fn last() -> io::Error {
    io::Error::last_os_error()
}

/// Reads memory that may vanish or be unreadable, without a fault.
pub struct Reader {
    pagemap: File,
    bounce: NonNull<u8>,
}

impl Reader {
    /// With a buffer of its own mapping, so that it cannot lie in what is read.
    pub fn new() -> io::Result<Reader> {
        let pagemap = File::open("/proc/self/pagemap")?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
        let place = unsafe { libc::mmap(ptr::null_mut(), BOUNCE, protection, flags, -1, 0) };
        match NonNull::new(place.cast::<u8>()) {
            Some(bounce) if place != libc::MAP_FAILED => Ok(Reader { pagemap, bounce }),
            _ => Err(last()),
        }
    }

    /// Copies the pages of a range that are not zero to zeroed pages at `to`, which is mapped for good.
    pub fn copy(&self, from: &Range<u64>, to: u64) -> io::Result<()> {
        let mut entries = [0u64; WINDOW];
        let mut at = from.start;
        while at < from.end {
            let pages = ((from.end.saturating_sub(at)) as usize / PAGE).min(WINDOW);
            self.populated(at, entries.get_mut(..pages).unwrap_or_default())?;
            let mut page = 0;
            while page < pages {
                let is = |entry: &&u64| **entry & POPULATED != 0;
                let rest = entries.get(page..pages).unwrap_or_default();
                let run = rest.iter().take(BOUNCE / PAGE).take_while(is).count();
                if run > 0 {
                    let start = at.saturating_add((page * PAGE) as u64);
                    let target = to.saturating_add(start.saturating_sub(from.start));
                    self.copy_run(start, target, run * PAGE)?;
                }
                page += run.max(1);
            }
            at = at.saturating_add((pages * PAGE) as u64);
        }
        Ok(())
    }

    fn populated(&self, at: u64, entries: &mut [u64]) -> io::Result<()> {
        let offset = (at / PAGE as u64).saturating_mul(8) as libc::off_t;
        let length = size_of_val(entries);
        // SAFETY: the entries are exclusive, as many bytes as is said, and valid whatever is written.
        let read =
            unsafe { libc::pread(self.pagemap.as_raw_fd(), entries.as_mut_ptr().cast(), length, offset) };
        match usize::try_from(read) {
            Ok(read) if read == length => Ok(()),
            Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
            Err(_) => Err(last()),
        }
    }

    fn copy_run(&self, from: u64, to: u64, length: usize) -> io::Result<()> {
        let local = libc::iovec { iov_base: self.bounce.as_ptr().cast(), iov_len: length };
        let own = std::process::id() as libc::pid_t;
        let remote = libc::iovec { iov_base: pointer(from), iov_len: length };
        // SAFETY: length is at most the buffer's; what cannot be read of the other side is an error.
        let read = unsafe { libc::process_vm_readv(own, &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(read) {
            Ok(read) if read == length => {}
            Ok(_) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
            Err(_) => return Err(last()),
        }
        // SAFETY: the caller promises that the target is mapped; the buffer is this object's own.
        unsafe { copy_pages(self.bounce.as_ptr(), pointer(to).cast(), length) };
        Ok(())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own.
        let _ = unsafe { libc::munmap(self.bounce.as_ptr().cast(), BOUNCE) };
    }
}

/// Copies pages that are not zero; the target is zeroed.
///
/// # Safety
/// Both are mapped for `length` bytes, a multiple of [`PAGE`], aligned to pages, and do not overlap.
pub unsafe fn copy_pages(from: *const u8, to: *mut u8, length: usize) {
    for offset in (0..length).step_by(PAGE) {
        let source = from.wrapping_add(offset);
        // SAFETY: the page lies in the source, as the caller promises.
        if unsafe { is_zero(source.cast()) } {
            continue;
        }
        // SAFETY: both pages are mapped and apart. Who else could write the source is held.
        unsafe { ptr::copy_nonoverlapping(source, to.wrapping_add(offset), PAGE) };
    }
}

/// # Safety
/// A mapped page.
unsafe fn is_zero(page: *const u64) -> bool {
    // Most pages have something at their start or end.
    (0..PAGE / 8).all(|word| {
        // SAFETY: the word lies in the page. A volatile read is defined whatever the GPU or the host writes there.
        unsafe { page.wrapping_add(word).read_volatile() == 0 }
    })
}

/// Copies mapped pages by address; see [`copy_pages`].
///
/// # Safety
/// As [`copy_pages`].
pub unsafe fn copy_mapped(from: &Range<u64>, to: u64) {
    let length = from.end.saturating_sub(from.start) as usize;
    // SAFETY: the caller's promise.
    unsafe { copy_pages(pointer(from.start).cast::<u8>().cast_const(), pointer(to).cast(), length) };
}

/// Moves a mapping, over what is mapped at its new place.
///
/// # Safety
/// The caller owns both ranges, and nothing in the old one is used any more.
pub unsafe fn move_over(from: &Range<u64>, to: u64) -> io::Result<()> {
    let length = from.end.saturating_sub(from.start) as usize;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's promise.
    let moved = unsafe { libc::mremap(pointer(from.start), length, length, flags, pointer(to)) };
    if moved == libc::MAP_FAILED { Err(last()) } else { Ok(()) }
}

/// Maps zeroed private memory at free addresses, or at any.
pub fn map_fresh(at: Option<u64>, length: u64, no_reserve: bool) -> io::Result<u64> {
    let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    if no_reserve {
        flags |= libc::MAP_NORESERVE;
    }
    if at.is_some() {
        flags |= libc::MAP_FIXED_NOREPLACE;
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the kernel takes only addresses that nothing uses.
    let place = unsafe { libc::mmap(pointer(at.unwrap_or(0)), length as usize, protection, flags, -1, 0) };
    match place.expose_provenance() as u64 {
        _ if place == libc::MAP_FAILED => Err(last()),
        // Kernels before 4.17 take the address for a hint.
        place if at.is_some_and(|at| at != place) => {
            let _ = unmap(place, length);
            Err(io::Error::from_raw_os_error(libc::EEXIST))
        }
        place => Ok(place),
    }
}

/// Whether anything at all is mapped in each page of a range.
pub fn is_mapped(range: &Range<u64>) -> bool {
    let mut residency = [0u8; WINDOW];
    let mut at = range.start;
    while at < range.end {
        let length = (range.end.saturating_sub(at) as usize).min(WINDOW * PAGE);
        // SAFETY: the vector has a byte for each page; nothing else is touched.
        if unsafe { libc::mincore(pointer(at), length, residency.as_mut_ptr()) } != 0 {
            return false;
        }
        at = at.saturating_add(length as u64);
    }
    true
}

/// Unmaps a range that the caller owns. Used only for mappings that this module's functions made.
pub fn unmap(at: u64, length: u64) -> io::Result<()> {
    // SAFETY: what is mapped there is the caller's own, and no Rust object lives in it.
    match unsafe { libc::munmap(pointer(at), length as usize) } {
        0 => Ok(()),
        _ => Err(last()),
    }
}

/// madvise(2). A kernel that does not know an advice changes nothing.
pub fn advise(range: &Range<u64>, advice: i32) {
    let length = range.end.saturating_sub(range.start) as usize;
    // SAFETY: only used with advice that changes no content.
    let _ = unsafe { libc::madvise(pointer(range.start), length, advice) };
}

/// Names a mapping as `[anon:...]`; the name ends with a zero.
pub fn name(range: &Range<u64>, name: &std::ffi::CStr) {
    let length = range.end.saturating_sub(range.start);
    /// linux/prctl.h
    const PR_SET_VMA: libc::c_int = 0x5356_4d41;
    const PR_SET_VMA_ANON_NAME: libc::c_ulong = 0;
    // SAFETY: the kernel copies the name.
    let _ = unsafe { libc::prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, range.start, length, name.as_ptr()) };
}
