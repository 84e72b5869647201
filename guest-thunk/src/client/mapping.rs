//! The client's own view of the answer memory.
#![allow(unsafe_code)] // mmap, munmap, and reads of memory that another process writes

use std::io;
use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use virtio_kfd_protocol::GuestVa;

use crate::transport::{Blob, Result, TransportError};

const WORD: usize = size_of::<u64>();

/// A blob mapped for reading, its address chosen by the kernel. Not inherited by forked children.
pub(super) struct Mapping {
    address: NonNull<AtomicU64>,
    length: NonZeroUsize,
    owner: u32,
}

// SAFETY: the memory is plain words that are only ever read, each atomically, and it is unmapped by the last owner.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method needs exclusive access.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the whole blob.
    pub(super) fn new(blob: &dyn Blob) -> Result<Mapping> {
        let size = blob.size();
        let failed = |call, error| TransportError::System {
            call,
            detail: format!("answer memory of {size} bytes"),
            error,
        };
        let invalid = || failed("mmap", io::Error::from_raw_os_error(libc::EINVAL));
        let length = usize::try_from(size).ok().and_then(NonZeroUsize::new).ok_or_else(invalid)?;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses touches no existing memory.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length.get(),
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(failed("mmap", io::Error::last_os_error()));
        }
        let words = NonNull::new(address.cast()).ok_or_else(invalid)?;
        // From here on Drop unmaps it.
        let mapping = Mapping { address: words, length, owner: std::process::id() };
        blob.map_fixed(GuestVa(address.expose_provenance() as u64), size, libc::PROT_READ)?;
        // SAFETY: the range is the mapping made above, which nothing else knows of.
        let result = unsafe { libc::madvise(address, length.get(), libc::MADV_DONTFORK) };
        if result != 0 {
            return Err(failed("madvise(MADV_DONTFORK)", io::Error::last_os_error()));
        }
        Ok(mapping)
    }

    /// Copies up to `length` bytes from `offset`, both multiples of 8, as far as the mapping goes. Each word is read
    /// once; what the host writes meanwhile may or may not be seen.
    pub(super) fn copy_out(&self, offset: usize, length: usize) -> Vec<u8> {
        let words = self.length.get() / WORD;
        let first = (offset / WORD).min(words);
        let end = first.saturating_add(length / WORD).min(words);
        let mut bytes = Vec::with_capacity(end.saturating_sub(first).saturating_mul(WORD));
        for index in first..end {
            // SAFETY: index < words, so the word lies inside the mapping, which is as long as self.
            let word = unsafe { self.address.add(index) };
            // SAFETY: the mapping is aligned to a page and readable as long as self; an atomic load is defined
            // whatever another process writes there at the same time.
            let word = unsafe { word.as_ref() };
            bytes.extend_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            // A forked child has not inherited the mapping; something else may be at this address.
            return;
        }
        // SAFETY: the range was mapped by new(), is unmapped only here, and no reference into it outlives self.
        // A failure leaves the range mapped, which harms nobody.
        let _ = unsafe { libc::munmap(self.address.as_ptr().cast(), self.length.get()) };
    }
}
