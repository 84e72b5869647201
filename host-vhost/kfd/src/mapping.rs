//! Guest memory in this process's address space, side by side.

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::libc::{c_void, off_t};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::error::KfdError;

/// A piece of a file to be mapped. All numbers are bytes and multiples of the page size.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'fd> {
    /// The file.
    pub file: BorrowedFd<'fd>,
    /// Where the piece begins in the file.
    pub offset: u64,
    /// Its length, not 0.
    pub len: u64,
}

/// A range of addresses that shows pieces of files one after the other. This process never reads or writes it
/// itself, but for [`crate::SharedWords`] and [`crate::HdpPage`]: it gives the addresses to KFD (USERPTR), which takes
/// the pages. Unmapped when dropped.
#[derive(Debug)]
pub struct GuestMapping {
    address: NonNull<c_void>,
    len: NonZeroUsize,
}

// The mapping is only a range of addresses: no thread reads or writes through it.
#[allow(unsafe_code)]
// SAFETY: no method gives access to the memory; munmap may be called by any thread.
unsafe impl Send for GuestMapping {}

fn error(argument: String, errno: Errno) -> KfdError {
    KfdError::new("mmap", argument, errno)
}

impl GuestMapping {
    /// Maps the pieces, shared, readable and writable.
    pub fn new(pieces: &[Piece<'_>]) -> Result<Self, KfdError> {
        let total = pieces
            .iter()
            .try_fold(0u64, |sum, piece| sum.checked_add(piece.len))
            .and_then(|sum| usize::try_from(sum).ok())
            .and_then(NonZeroUsize::new)
            .ok_or_else(|| error(format!("{} pieces: no valid size", pieces.len()), Errno::EINVAL))?;
        let mapping = Self::reserve(total)?;
        let mut at = 0usize;
        for piece in pieces {
            at = mapping.place(at, piece)?;
        }
        Ok(mapping)
    }

    #[allow(unsafe_code)] // mmap has no safe form
    fn reserve(len: NonZeroUsize) -> Result<Self, KfdError> {
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses, and nothing is accessible there.
        let address = unsafe {
            mmap_anonymous(None, len, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE)
        }
        .map_err(|errno| error(format!("reservation of {len} bytes"), errno))?;
        Ok(GuestMapping { address, len })
    }

    /// Maps a piece at `at` bytes from the start; returns where the next one goes.
    #[allow(unsafe_code)] // mmap has no safe form
    fn place(&self, at: usize, piece: &Piece<'_>) -> Result<usize, KfdError> {
        let wrong = || error(format!("{piece:?} at {at} of {}", self.len), Errno::EINVAL);
        let len = usize::try_from(piece.len).ok().and_then(NonZeroUsize::new).ok_or_else(wrong)?;
        let end = at.checked_add(len.get()).filter(|&end| end <= self.len.get()).ok_or_else(wrong)?;
        // /dev/kfd has offsets with the highest bit set; of files the kernel refuses them.
        let offset: off_t = piece.offset.cast_signed();
        let place = self.address.addr().checked_add(at).ok_or_else(wrong)?;
        // SAFETY: the range [at, end) lies within the reservation that this value owns (checked above), so
        // MAP_FIXED replaces nothing of anyone else's; nobody holds references into it.
        unsafe {
            mmap(
                Some(place),
                len,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED | MapFlags::MAP_FIXED | MapFlags::MAP_NORESERVE,
                piece.file,
                offset,
            )
        }
        .map_err(|errno| error(format!("{piece:?}"), errno))?;
        Ok(end)
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address.addr().get() as u64
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> u64 {
        self.len.get() as u64
    }
}

impl Drop for GuestMapping {
    #[allow(unsafe_code)] // munmap has no safe form
    fn drop(&mut self) {
        // SAFETY: this value owns the range, and no reference into it exists.
        let result = unsafe { munmap(self.address, self.len.get()) };
        // It fails only where the kernel has no memory to split a mapping; the range then stays, at addresses
        // that nothing uses, until the process ends.
        debug_assert!(result.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    const PAGE: usize = 4096;

    /// A file whose page n is filled with `first + n`.
    fn file(first: u8, pages: u8) -> File {
        let mut file = tempfile::tempfile().unwrap();
        for page in 0..pages {
            file.write_all(&[first.wrapping_add(page); PAGE]).unwrap();
        }
        file
    }

    /// Memory of this process as the kernel sees it, which is how KFD takes it.
    fn look(mapping: &GuestMapping) -> Vec<u8> {
        let mut bytes = vec![0; mapping.len() as usize];
        File::open("/proc/self/mem").unwrap().read_exact_at(&mut bytes, mapping.address()).unwrap();
        bytes
    }

    #[test]
    fn pieces_lie_side_by_side_and_share_the_files() {
        let (a, b) = (file(10, 4), file(20, 4));
        let piece = |file, page: usize, pages: usize| Piece {
            file,
            offset: (page * PAGE) as u64,
            len: (pages * PAGE) as u64,
        };
        let mapping =
            GuestMapping::new(&[piece(a.as_fd(), 2, 1), piece(b.as_fd(), 1, 2), piece(a.as_fd(), 0, 1)])
                .unwrap();
        let pages: Vec<u8> = look(&mapping).chunks(PAGE).map(|page| page[0]).collect();
        assert_eq!(pages, [12, 21, 22, 10]);
        b.write_all_at(&[99; PAGE], 2 * PAGE as u64).unwrap();
        assert_eq!(look(&mapping)[2 * PAGE], 99);
    }

    #[test]
    fn sizes_that_are_none_are_refused() {
        let file = file(0, 1);
        let piece = |offset, len| Piece { file: file.as_fd(), offset, len };
        for pieces in [
            vec![],
            vec![piece(0, 0)],
            vec![piece(0, u64::MAX), piece(0, 4096)],
            vec![piece(1, 4096)],
            vec![piece(u64::MAX - 4095, 4096)],
        ] {
            let error = GuestMapping::new(&pieces).unwrap_err();
            assert!(matches!(error.errno, Errno::EINVAL | Errno::EOVERFLOW), "{pieces:?}: {error}");
        }
    }

    #[test]
    fn a_dropped_mapping_is_gone() {
        let file = file(1, 1);
        let mapping =
            GuestMapping::new(&[Piece { file: file.as_fd(), offset: 0, len: PAGE as u64 }]).unwrap();
        let line = format!("{:x}-", mapping.address());
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps().lines().any(|map| map.starts_with(&line) && map.contains("rw-s")));
        drop(mapping);
        assert!(!maps().lines().any(|map| map.starts_with(&line) && map.contains("rw-s")));
    }
}
