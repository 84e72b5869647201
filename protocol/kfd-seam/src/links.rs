//! Ways to the service's paths that do not begin at the root: links of `/proc` to open descriptors, and directories of the real file
//! system.

use std::ffi::c_int;
use std::fmt::Write;
use std::os::fd::RawFd;

use rustix::fs::{CWD, readlinkat_raw};

use crate::path::is_near;

/// `PATH_MAX` of `linux/limits.h`, in bytes with the terminating zero.
const PATH_MAX: usize = 4096;

/// Where the kernel shows a process its descriptors.
const DIRECTORIES: [&[u8]; 3] = [b"/proc/self/fd/", b"/proc/thread-self/fd/", b"/dev/fd/"];

/// The descriptor that the absolute `path` leads through, and what comes after it. Allocates nothing.
pub fn descriptor(path: &[u8]) -> Option<(RawFd, &[u8])> {
    let own = |rest: &'_ [u8]| -> Option<usize> {
        let (number, after) = digits(rest)?;
        let is_own = i64::from(rustix::process::getpid().as_raw_pid()) == number;
        (is_own && after.starts_with(b"/fd/"))
            .then(|| rest.len().saturating_sub(after.len()).saturating_add(4))
    };
    let rest = DIRECTORIES.iter().find_map(|directory| path.strip_prefix(*directory)).or_else(|| {
        let rest = path.strip_prefix(b"/proc/")?;
        rest.get(own(rest)?..)
    })?;
    let (number, after) = digits(rest)?;
    let fd = RawFd::try_from(number).ok()?;
    (after.is_empty() || after.starts_with(b"/")).then_some((fd, after))
}

/// The decimal number at the beginning, as the kernel names entries, and the rest.
fn digits(text: &[u8]) -> Option<(i64, &[u8])> {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (number, rest) = text.split_at_checked(end)?;
    if number.len() > 1 && number.starts_with(b"0") {
        return None;
    }
    Some((str::from_utf8(number).ok()?.parse().ok()?, rest))
}

/// Whether the relative path `path` may lead to one of `prefixes` from a directory above it: its first component is one of theirs, or it
/// goes up somewhere. Most paths end here, without a system call.
pub fn may_lead(prefixes: &[&str], path: &[u8]) -> bool {
    let mut components = path.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."));
    let Some(first) = components.next() else { return false };
    let goes_up = first == b".." || components.any(|name| name == b"..");
    let is_one = |prefix: &&str| {
        let mut names = prefix.as_bytes().split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        names.any(|name| match name.strip_suffix(b"*") {
            Some(start) => first.starts_with(start),
            None => name == first,
        })
    };
    goes_up || prefixes.iter().any(is_one)
}

/// The absolute path of `path` from the real directory `directory` (`AT_FDCWD` for the working one), when it leads near one of `prefixes`.
pub fn from_directory(prefixes: &[&str], directory: c_int, path: &[u8]) -> Option<Vec<u8>> {
    let join = |place: &[u8]| {
        // What is no directory has no absolute path: "pipe:[1]".
        let begin = Some(place).filter(|place| place.first() == Some(&b'/'))?;
        let whole = [begin, b"/", path].concat();
        is_near(prefixes, &whole).then_some(whole)
    };
    match directory {
        libc::AT_FDCWD => target("/proc/self/cwd", join),
        fd => name_of(fd, join),
    }
}

/// What `/proc` calls the file behind `fd`, as `look` sees it; nothing where it cannot be asked.
pub fn name_of<T: Default>(fd: RawFd, look: impl FnOnce(&[u8]) -> T) -> T {
    let mut link = Text::default();
    match write!(link, "/proc/self/fd/{fd}") {
        Ok(()) => target(link.as_str(), look),
        Err(_) => T::default(),
    }
}

/// Where a link leads to.
fn target<T: Default>(link: &str, look: impl FnOnce(&[u8]) -> T) -> T {
    let mut buffer = [0u8; PATH_MAX];
    let length = readlinkat_raw(CWD, link, &mut buffer[..]).unwrap_or(0);
    match buffer.get(..length) {
        Some(target) if !target.is_empty() && length < PATH_MAX => look(target),
        _ => T::default(),
    }
}

/// A short text without the heap.
#[derive(Default)]
struct Text {
    bytes: [u8; 32],
    length: usize,
}

impl Text {
    fn as_str(&self) -> &str {
        self.bytes.get(..self.length).and_then(|text| str::from_utf8(text).ok()).unwrap_or_default()
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let end = self.length.checked_add(text.len()).ok_or(std::fmt::Error)?;
        self.bytes.get_mut(self.length..end).ok_or(std::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    const PREFIXES: &[&str] = &["/dev/kfd", "/dev/dri", "/sys/class/kfd", "/sys/devices/pci*"];

    #[test]
    fn links_to_descriptors() {
        assert_eq!(descriptor(b"/proc/self/fd/7"), Some((7, &b""[..])));
        assert_eq!(descriptor(b"/proc/thread-self/fd/0/x"), Some((0, &b"/x"[..])));
        assert_eq!(descriptor(b"/dev/fd/123/"), Some((123, &b"/"[..])));
        let own = format!("/proc/{}/fd/9", std::process::id());
        assert_eq!(descriptor(own.as_bytes()), Some((9, &b""[..])));
        for other in [
            &b"/proc/self/fd/"[..],
            b"/proc/self/fd/x",
            b"/proc/self/fd/07",
            b"/proc/self/fd/7x",
            b"/proc/self/fd/99999999999999999999",
            b"/proc/self/fdinfo/7",
            b"/proc/1/maps",
            b"/proc//fd/7",
            b"/dev/kfd",
        ] {
            assert_eq!(descriptor(other), None, "{}", String::from_utf8_lossy(other));
        }
        let other = format!("/proc/{}/fd/9", std::process::id() + 1);
        assert_eq!(descriptor(other.as_bytes()), None);
    }

    #[test]
    fn relative_paths_that_may_lead_there() {
        for near in
            [&b"kfd"[..], b"./dri/x", b"dev/null", b"../x", b"pci0000:00/x", b"class", b"x/../dev/kfd"]
        {
            assert!(may_lead(PREFIXES, near), "{}", String::from_utf8_lossy(near));
        }
        for far in [&b""[..], b".", b"src/main.c", b"kfd2", b"x/dev/kfd"] {
            assert!(!may_lead(PREFIXES, far), "{}", String::from_utf8_lossy(far));
        }
    }

    #[test]
    fn directories_of_the_real_file_system() {
        let dev = std::fs::File::open("/dev").unwrap();
        let from = |path: &[u8]| from_directory(PREFIXES, dev.as_raw_fd(), path);
        assert_eq!(from(b"kfd").as_deref(), Some(&b"/dev/kfd"[..]));
        assert_eq!(from(b"../sys/class/kfd").as_deref(), Some(&b"/dev/../sys/class/kfd"[..]));
        assert_eq!(from(b"null"), None);
        assert_eq!(from_directory(PREFIXES, libc::AT_FDCWD, b"kfd"), None);
        assert_eq!(from_directory(PREFIXES, -7, b"kfd"), None);
    }
}
