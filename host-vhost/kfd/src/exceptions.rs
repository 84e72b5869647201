//! The head of a queue's context save area as KFD looks for it to report the queue's exceptions.

use std::mem::offset_of;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kfd_abi::queue::ContextSaveAreaHeader;
use nix::errno::Errno;
use nix::libc::c_void;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::error::KfdError;

/// Bytes of the page.
const PAGE: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4095);

/// Where in the page the word is that the kernel adds exceptions to: behind the header.
const WORD: usize = 64;

const _: () = assert!(size_of::<ContextSaveAreaHeader>() <= WORD);

/// A page of this process at the address at which a queue of its KFD process has its context save area on the GPU.
///
/// GPUs reach the area by their own page tables. What the kernel looks for at the same address of the process is the head of it
/// alone: where to note which exceptions the queue had, and which event to set then (`send_exception_work_handler`,
/// kfd_process.c). Here it finds this page, whose head names a word of the page itself. Unmapped when dropped.
#[derive(Debug)]
pub struct ExceptionPage {
    address: NonNull<c_void>,
}

#[allow(unsafe_code)] // the page is a pointer
// SAFETY: munmap may be called by any thread.
unsafe impl Send for ExceptionPage {}

#[allow(unsafe_code)] // the page is a pointer
// SAFETY: the page is only reached as atomics (`part`), which any thread may use at any time.
unsafe impl Sync for ExceptionPage {}

impl ExceptionPage {
    /// Makes the page at an address, a multiple of the page size, where this process has nothing. No event is to be set yet.
    ///
    /// # Errors
    /// `EEXIST` where the process has something there; `EINVAL`, `EPERM` and `ENOMEM` as mmap(2) has them.
    #[allow(unsafe_code)] // mmap has no safe form
    pub fn new(address: u64) -> Result<Self, KfdError> {
        let error = |errno| KfdError::new("mmap", format!("a page at {address:#x}"), errno);
        let place = usize::try_from(address).ok().and_then(NonZeroUsize::new).ok_or(error(Errno::EINVAL))?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED_NOREPLACE;
        // SAFETY: MAP_FIXED_NOREPLACE replaces nothing (EEXIST); kernels before 4.17 take the address for a wish, and choose
        // another where something is there.
        let mapped = unsafe { mmap_anonymous(Some(place), PAGE, protection, flags) }.map_err(error)?;
        let page = ExceptionPage { address: mapped };
        if page.address.addr() != place {
            return Err(error(Errno::EEXIST));
        }
        if let (Some(payload), Some(word)) = (
            page.part::<AtomicU64>(offset_of!(ContextSaveAreaHeader, err_payload_addr)),
            address.checked_add(WORD as u64),
        ) {
            payload.store(word, Ordering::Release);
        }
        Ok(page)
    }

    /// A part of the page that is an atomic; `None` beyond its end, and where it is not aligned.
    #[allow(unsafe_code)] // the page is a pointer
    fn part<A: Atomic>(&self, offset: usize) -> Option<&A> {
        let end = offset.checked_add(size_of::<A>())?;
        if end > PAGE.get() || !offset.is_multiple_of(align_of::<A>()) {
            return None;
        }
        let part = self.address.as_ptr().cast::<u8>().wrapping_add(offset).cast::<A>();
        // SAFETY: the part lies wholly within the page (checked), which begins at a page boundary (so that it is aligned), is
        // readable and writable, and lives as long as `self`, which bounds the reference. The kernel changes it at any time;
        // as an atomic of any bits (`Atomic`) it may be looked at all the same, and nobody here has other references to it.
        unsafe { part.as_ref() }
    }

    /// The kernel sets this event of the process from now on when the queue has an exception; 0 for none.
    pub fn set_event(&self, event_id: u32) {
        if let Some(id) = self.part::<AtomicU32>(offset_of!(ContextSaveAreaHeader, err_event_id)) {
            id.store(event_id, Ordering::Release);
        }
    }

    /// The exceptions since the last time (`KFD_EC_MASK` of each `enum kfd_dbg_trap_exception_code`), and all that the
    /// kernel wrote before. One that comes meanwhile is returned now or the next time, or both times: the kernel adds it to
    /// what it has read before.
    pub fn take(&self) -> u64 {
        self.part::<AtomicU64>(WORD).map_or(0, |word| word.swap(0, Ordering::AcqRel))
    }
}

/// Integers that are atomic and have a meaning for any bits.
trait Atomic {}
impl Atomic for AtomicU32 {}
impl Atomic for AtomicU64 {}

impl Drop for ExceptionPage {
    #[allow(unsafe_code)] // munmap has no safe form
    fn drop(&mut self) {
        // SAFETY: this value owns the page, and no reference into it exists.
        let result = unsafe { munmap(self.address, PAGE.get()) };
        debug_assert!(result.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    /// This process's memory as the kernel's worker sees it.
    fn memory() -> File {
        File::options().read(true).write(true).open("/proc/self/mem").unwrap()
    }

    fn is_mapped(address: u64) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let number = |text| u64::from_str_radix(text, 16).unwrap();
            (number(start)..number(end)).contains(&address)
        })
    }

    /// What `send_exception_work_handler` does, at the offsets of `struct kfd_context_save_area_header` (linux/kfd_ioctl.h).
    fn send(area: u64, reason: u64) -> u32 {
        let memory = memory();
        let read = |at| {
            let mut bytes = [0; 8];
            memory.read_exact_at(&mut bytes, at).unwrap();
            u64::from_le_bytes(bytes)
        };
        let at = |offset| area.checked_add(offset).unwrap();
        let payload = read(at(24));
        assert!((area..at(4096)).contains(&payload), "{payload:#x}");
        memory.write_all_at(&(read(payload) | reason).to_le_bytes(), payload).unwrap();
        read(at(32)) as u32
    }

    #[test]
    fn the_kernel_notes_exceptions_in_the_page_itself() {
        const AREA: u64 = 0x1_2345_6000;
        let page = ExceptionPage::new(AREA).unwrap();
        assert_eq!((page.take(), send(AREA, 1 << 19)), (0, 0));
        page.set_event(77);
        assert_eq!(send(AREA, 2), 77);
        assert_eq!((page.take(), page.take()), (1 << 19 | 2, 0));
        assert!(is_mapped(AREA));
        drop(page);
        assert!(!is_mapped(AREA));
    }

    #[test]
    fn nothing_of_the_process_is_replaced() {
        let value = Box::new(5u64);
        let address = (&raw const *value).expose_provenance() as u64 & !4095;
        let function = nothing_of_the_process_is_replaced as fn();
        let code = (function as usize) as u64 & !4095;
        for taken in [address, code] {
            assert_eq!(ExceptionPage::new(taken).unwrap_err().errno, Errno::EEXIST, "{taken:#x}");
        }
        assert_eq!(*value, 5);
        for absurd in [0, 0x1_2345_6001, 1 << 63, u64::MAX] {
            ExceptionPage::new(absurd).unwrap_err();
        }
    }
}
