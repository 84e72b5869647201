//! Descriptors that the service has for itself, of which the program knows nothing.
//!
//! On a device there are none: the kernel has what the library must hold open. Programs close what they have not opened (daemons close all
//! numbers from 3 on), and put other files in the place of any number; a service that loses its connection so, or makes its
//! calls on another file, could not say why. So `close` and its kind do as if these numbers were not open, and `dup2` over one
//! fails with `EBUSY`, which dup2(2) has for a number that the kernel is about to give out.
//!
//! The table is a bit for each number, read in signal handlers.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers that can be hidden: 0 up to this. Larger ones are left as they are.
const NUMBERS: usize = 1 << 16;

/// Lowest number of a descriptor that is kept.
const LOWEST: u64 = 512;

const WORDS: usize = NUMBERS / 64;

static TABLE: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// Hides a descriptor of the service's and gives it a large number, close-on-exec, if there is one: programs that put files in place of
/// numbers that they know take small ones. The service tells with [`show`] that it closes it.
pub fn keep(descriptor: OwnedFd) -> OwnedFd {
    let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let lowest = RawFd::try_from(soft.map_or(LOWEST, |soft| LOWEST.min(soft / 2))).unwrap_or(0);
    let kept = rustix::io::fcntl_dupfd_cloexec(&descriptor, lowest).unwrap_or(descriptor);
    hide(kept.as_raw_fd());
    kept
}

/// Hides an open descriptor, which the service closes by itself, after [`show`].
pub fn hide(fd: RawFd) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_or(bit, Ordering::AcqRel);
    }
}

/// The descriptor is no longer hidden: it is about to be closed.
pub fn show(fd: RawFd) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_and(!bit, Ordering::AcqRel);
    }
}

/// Whether it is hidden.
pub fn is_hidden(fd: RawFd) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
}

/// None is hidden any more: they are the parent's, and closed in this child of a fork.
pub(crate) fn forget() {
    for word in &TABLE {
        word.store(0, Ordering::Release);
    }
}

/// The ranges of numbers in `first..=last` that are not hidden.
pub(crate) fn between(first: u32, last: u32) -> Between {
    Between { next: Some(first), last }
}

/// See [`between`].
pub(crate) struct Between {
    /// None after the last range.
    next: Option<u32>,
    last: u32,
}

impl Iterator for Between {
    type Item = (u32, u32);

    fn next(&mut self) -> Option<(u32, u32)> {
        let mut first = self.next.take()?;
        while hidden_number(first) {
            first = first.checked_add(1)?;
        }
        if first > self.last {
            return None;
        }
        let known = u32::try_from(NUMBERS).unwrap_or(u32::MAX);
        let hidden = (first..self.last.min(known)).find(|number| {
            // The one after it: the range ends before a hidden number.
            hidden_number(number.saturating_add(1))
        });
        match hidden {
            Some(end) => {
                self.next = end.checked_add(1);
                Some((first, end))
            }
            None => Some((first, self.last)),
        }
    }
}

fn hidden_number(number: u32) -> bool {
    i32::try_from(number).is_ok_and(is_hidden)
}

fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(fd).ok()?;
    let word = TABLE.get(number / 64)?;
    Some((word, 1 << (number % 64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_has_a_large_number_and_is_the_same_file() {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let (number, of) = (file.as_raw_fd(), crate::kernel::identity(file.as_raw_fd()));
        let kept = keep(file);
        assert!(kept.as_raw_fd() > number && is_hidden(kept.as_raw_fd()), "{kept:?}");
        assert_eq!(crate::kernel::identity(kept.as_raw_fd()), of);
        show(kept.as_raw_fd());
        assert!(!is_hidden(kept.as_raw_fd()));
    }

    #[test]
    fn ranges_go_around_what_is_hidden() {
        // Numbers that no other test has.
        let hidden = [60_000, 60_001, 60_010, 65_535];
        for fd in hidden {
            assert!(!is_hidden(fd));
            hide(fd);
            assert!(is_hidden(fd));
        }
        let ranges = |first, last| between(first, last).collect::<Vec<_>>();
        assert_eq!(ranges(59_990, 60_020), [(59_990, 59_999), (60_002, 60_009), (60_011, 60_020)]);
        assert_eq!(ranges(60_000, 60_001), []);
        assert_eq!(ranges(60_001, 60_002), [(60_002, 60_002)]);
        assert_eq!(ranges(60_005, 60_010), [(60_005, 60_009)]);
        assert_eq!(ranges(60_011, u32::MAX), [(60_011, 65_534), (65_536, u32::MAX)]);
        assert_eq!(ranges(u32::MAX, u32::MAX), [(u32::MAX, u32::MAX)]);
        for fd in hidden {
            show(fd);
        }
        assert_eq!(ranges(59_990, 60_020), [(59_990, 60_020)]);
        for fd in [-1, 65_536, i32::MAX] {
            hide(fd);
            assert!(!is_hidden(fd), "{fd}");
        }
    }
}
