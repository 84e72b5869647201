//! Pages of the process: copied, moved and mapped while everything that could use them is held. So nothing here allocates,
//! takes a lock or unwinds, and system calls are bare ones: the tracer uses this with another thread's thread pointer.
#![allow(unsafe_code, reason = "mremap, mmap, and copies of memory that others write")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

use super::syscall::call;

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

/// What a call answers. Made without allocation.
fn error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn length_of(range: &Range<u64>) -> usize {
    range.end.saturating_sub(range.start) as usize
}

/// What memory is adopted with: the application may change it (mprotect) while it is.
pub const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// A buffer with a mapping of its own, so that it cannot lie in what is copied.
pub struct Bounce {
    place: NonNull<u8>,
}

impl Bounce {
    /// Maps it.
    pub fn new() -> io::Result<Bounce> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
        let place = unsafe { libc::mmap(ptr::null_mut(), BOUNCE, READ_WRITE, flags, -1, 0) };
        match NonNull::new(place.cast::<u8>()) {
            Some(bounce) if place != libc::MAP_FAILED => Ok(Bounce { place: bounce }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Copies the pages of a range that are not zero to zeroed pages at `to`, which is mapped for good. It is read as this
    /// thread reads, so that pages of a device may lie there, but by the kernel: what is not readable is an error.
    pub fn copy(&self, from: &Range<u64>, to: u64) -> io::Result<()> {
        self.copy_until(from, to).map_err(|(_, error)| error)
    }

    /// The same; an error comes with the page that it is about, before which all is copied.
    pub fn copy_until(&self, from: &Range<u64>, to: u64) -> Result<(), (u64, io::Error)> {
        let own = own_id().map_err(|error| (from.start, error))?;
        let length = length_of(from);
        for offset in (0..length).step_by(BOUNCE) {
            let run = length.saturating_sub(offset).min(BOUNCE);
            let start = from.start.saturating_add(offset as u64);
            let place = self.place.as_ptr().expose_provenance() as u64;
            let copied = copy_to_until(own, &(start..start.saturating_add(run as u64)), place);
            let whole = match &copied {
                Ok(()) => run,
                Err((page, _)) => page.saturating_sub(start) as usize,
            };
            let target = pointer(to.saturating_add(offset as u64)).cast();
            // SAFETY: the caller promises that the target is mapped; the buffer is this object's own.
            unsafe { copy_pages(self.place.as_ptr(), target, whole) };
            copied?;
        }
        Ok(())
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own.
        let _ = unsafe { libc::munmap(self.place.as_ptr().cast(), BOUNCE) };
    }
}

/// Reads memory that may vanish or be unreadable, without a fault.
pub struct Reader {
    pagemap: File,
    bounce: Bounce,
}

impl Reader {
    /// With a buffer of its own.
    pub fn new() -> io::Result<Reader> {
        Ok(Reader { pagemap: File::open("/proc/self/pagemap")?, bounce: Bounce::new()? })
    }

    /// Copies all pages of a range, whatever backs them, to zeroed pages at `to`, which is mapped for good.
    pub fn copy_all(&self, from: &Range<u64>, to: u64) -> io::Result<()> {
        let length = length_of(from);
        for offset in (0..length).step_by(BOUNCE) {
            let run = length.saturating_sub(offset).min(BOUNCE);
            let offset = offset as u64;
            self.copy_run(from.start.saturating_add(offset), to.saturating_add(offset), run)?;
        }
        Ok(())
    }

    /// Copies the pages of a range of anonymous memory that are not zero to zeroed pages at `to`, which is mapped for good.
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
        let place = entries.as_mut_ptr().expose_provenance();
        let arguments = [self.pagemap.as_raw_fd() as usize, place, length, offset as usize];
        // SAFETY: the entries are exclusive, as many bytes as is said, and valid whatever is written.
        match unsafe { call(libc::SYS_pread64, arguments) } {
            Ok(read) if read == length => Ok(()),
            Ok(_) => Err(error(libc::EFAULT)),
            Err(errno) => Err(error(errno)),
        }
    }

    fn copy_run(&self, from: u64, to: u64, length: usize) -> io::Result<()> {
        let bounce = self.bounce.place.as_ptr();
        let local = libc::iovec { iov_base: bounce.cast(), iov_len: length };
        let remote = libc::iovec { iov_base: pointer(from), iov_len: length };
        // SAFETY: length is at most the buffer's; what cannot be read of the other side is an error.
        let read = unsafe { between(libc::SYS_process_vm_readv, own_id()?, &local, &remote) }?;
        if read != length {
            return Err(error(libc::EFAULT));
        }
        // SAFETY: the caller promises that the target is mapped; the buffer is this object's own.
        unsafe { copy_pages(bounce, pointer(to).cast(), length) };
        Ok(())
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

/// Copies all bytes of a range, also zeros, to private memory of this library's own. Unreadable memory is an error.
pub fn copy_every(from: &Range<u64>, to: u64) -> io::Result<()> {
    copy_every_until(from, to).map_err(|(_, error)| error)
}

/// The same; an error comes with the page that it is about, before which all is copied.
pub fn copy_every_until(from: &Range<u64>, to: u64) -> Result<(), (u64, io::Error)> {
    copy_to_until(own_id().map_err(|error| (from.start, error))?, from, to)
}

/// mprotect(2): what the application may do with its memory, or this library meanwhile.
pub fn protect(range: &Range<u64>, access: i32) -> io::Result<()> {
    // SAFETY: content is not changed, and no Rust object lives in what is adopted or fresh.
    let done = unsafe { call(libc::SYS_mprotect, [range.start as usize, length_of(range), access as usize]) };
    done.map(drop).map_err(error)
}

/// Whether memory with this access can be read.
pub fn is_readable(access: i32) -> bool {
    access & libc::PROT_READ != 0
}

/// Moves a mapping, over what is mapped at its new place.
///
/// # Safety
/// The caller owns both ranges, and nothing in the old one is used any more.
pub unsafe fn move_over(from: &Range<u64>, to: u64) -> io::Result<()> {
    let length = length_of(from);
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
    // SAFETY: the caller's promise.
    let moved = unsafe { call(libc::SYS_mremap, [from.start as usize, length, length, flags, to as usize]) };
    moved.map(drop).map_err(error)
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
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let arguments = [at.unwrap_or(0) as usize, length as usize, protection, flags as usize, usize::MAX, 0];
    // SAFETY: the kernel takes only addresses that nothing uses.
    match unsafe { call(libc::SYS_mmap, arguments) }.map_err(error)? as u64 {
        // Kernels before 4.17 take the address for a hint.
        place if at.is_some_and(|at| at != place) => {
            let _ = unmap(place, length);
            Err(error(libc::EEXIST))
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
        let place = residency.as_mut_ptr().expose_provenance();
        // SAFETY: the vector has a byte for each page; nothing else is touched.
        if unsafe { call(libc::SYS_mincore, [at as usize, length, place]) }.is_err() {
            return false;
        }
        at = at.saturating_add(length as u64);
    }
    true
}

/// Unmaps a range that the caller owns. Used only for mappings that this module's functions made.
pub fn unmap(at: u64, length: u64) -> io::Result<()> {
    // SAFETY: what is mapped there is the caller's own, and no Rust object lives in it.
    unsafe { call(libc::SYS_munmap, [at as usize, length as usize]) }.map(drop).map_err(error)
}

/// madvise(2).
pub fn advise(range: &Range<u64>, advice: i32) -> io::Result<()> {
    // SAFETY: only used with advice that changes no content, or for memory of this library's own.
    let done = unsafe { call(libc::SYS_madvise, [range.start as usize, length_of(range), advice as usize]) };
    done.map(drop).map_err(error)
}

/// Names a mapping as `[anon:...]`; the name ends with a zero.
pub fn name(range: &Range<u64>, name: &std::ffi::CStr) {
    /// linux/prctl.h
    const PR_SET_VMA: usize = 0x5356_4d41;
    const PR_SET_VMA_ANON_NAME: usize = 0;
    let name = name.as_ptr().expose_provenance();
    let arguments = [PR_SET_VMA, PR_SET_VMA_ANON_NAME, range.start as usize, length_of(range), name];
    // SAFETY: the kernel copies the name.
    let _ = unsafe { call(libc::SYS_prctl, arguments) };
}

/// Copies memory of this process to a process, to memory that nobody uses yet. Unreadable memory is an error, which comes
/// with the page that it is about, before which all is copied.
pub fn copy_to_until(process: libc::pid_t, from: &Range<u64>, to: u64) -> Result<(), (u64, io::Error)> {
    let mut done = 0;
    while done < length_of(from) {
        let at = |start: u64| pointer(start.saturating_add(done as u64));
        let length = length_of(from).saturating_sub(done);
        let local = libc::iovec { iov_base: at(from.start), iov_len: length };
        let remote = libc::iovec { iov_base: at(to), iov_len: length };
        // SAFETY: this process's memory is only read, and by the kernel.
        let why = match unsafe { between(libc::SYS_process_vm_writev, process, &local, &remote) } {
            Ok(written) if written > 0 => {
                done = done.saturating_add(written);
                continue;
            }
            Ok(_) => error(libc::EFAULT),
            Err(error) => error,
        };
        let page = done.saturating_sub(done % PAGE) as u64;
        return Err((from.start.saturating_add(page), why));
    }
    Ok(())
}

/// The number of this process: the tracer's, where that calls.
fn own_id() -> io::Result<libc::pid_t> {
    // SAFETY: no argument.
    unsafe { call(libc::SYS_getpid, []) }.map(|id| id as libc::pid_t).map_err(error)
}

/// process_vm_readv(2) or process_vm_writev(2) of one piece.
///
/// # Safety
/// What is written of this process's memory is the caller's.
unsafe fn between(
    number: libc::c_long,
    process: libc::pid_t,
    local: &libc::iovec,
    remote: &libc::iovec,
) -> io::Result<usize> {
    let (local, remote) =
        (ptr::from_ref(local).expose_provenance(), ptr::from_ref(remote).expose_provenance());
    // SAFETY: both vectors have one entry, and live beyond the call; the rest is the caller's promise.
    unsafe { call(number, [process.unsigned_abs() as usize, local, 1, remote, 1, 0]) }.map_err(error)
}
