//! Ways to the service's paths that do not begin at the root: links of `/proc` to open descriptors, and directories of the real file
//! system.

use std::ffi::{CStr, c_int};
use std::fmt::Write;
use std::os::fd::RawFd;

use rustix::fs::{CWD, readlinkat_raw};

use crate::path::{components, is_near_from, is_one, names};

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

/// Whether the relative path `path` may lead to one of `prefixes` from a directory above it: where it has gone up as far as it goes, or at its
/// beginning, comes a component of theirs. Most paths end here, without a system call.
pub fn may_lead(prefixes: &[&str], path: &[u8]) -> bool {
    // Components below the highest directory that the path came through.
    let mut depth = 0usize;
    for component in components(path) {
        if component == b".." {
            depth = depth.saturating_sub(1);
            continue;
        }
        if depth == 0 && prefixes.iter().any(|prefix| names(prefix).any(|name| is_one(name, component))) {
            return true;
        }
        depth = depth.saturating_add(1);
    }
    false
}

/// The absolute path of `path` from the real directory `directory` (`AT_FDCWD` for the working one), when it leads near one of `prefixes`.
/// Allocates only then: paths that are none of the service's may be named in signal handlers.
pub fn from_directory(prefixes: &[&str], directory: c_int, path: &[u8]) -> Option<Vec<u8>> {
    // What is no directory has no absolute path: "pipe:[1]".
    let join = |place: &[u8]| is_near_from(prefixes, place, path).then(|| [place, b"/", path].concat());
    match directory {
        libc::AT_FDCWD => target(c"/proc/self/cwd", join),
        fd => name_of(fd, join),
    }
}

/// What `/proc` calls the file behind `fd`, as `look` sees it; nothing where it cannot be asked.
pub fn name_of<T: Default>(fd: RawFd, look: impl FnOnce(&[u8]) -> T) -> T {
    let mut link = Text::default();
    match write!(link, "/proc/self/fd/{fd}") {
        Ok(()) => target(link.as_c_str(), look),
        Err(_) => T::default(),
    }
}

/// Bytes of a link's target for which there is always room: little enough for a signal handler on a stack of its own, which may have
/// 4 KiB in all besides the kernel's frame.
const SHORT: usize = 256;

/// Where a link leads to.
fn target<T: Default>(link: &CStr, look: impl FnOnce(&[u8]) -> T) -> T {
    let mut buffer = [0u8; SHORT];
    let length = readlinkat_raw(CWD, link, &mut buffer[..]).unwrap_or(0);
    if length == SHORT {
        return long_target(link, look);
    }
    match buffer.get(..length) {
        Some(target) if !target.is_empty() => look(target),
        _ => T::default(),
    }
}

/// [`target`] with room for the longest, in a frame of its own, which short ones do without.
#[inline(never)]
fn long_target<T: Default>(link: &CStr, look: impl FnOnce(&[u8]) -> T) -> T {
    let mut buffer = [0u8; PATH_MAX];
    let length = readlinkat_raw(CWD, link, &mut buffer[..]).unwrap_or(0);
    match buffer.get(..length) {
        Some(target) if !target.is_empty() && length < PATH_MAX => look(target),
        _ => T::default(),
    }
}

/// A short text without the heap; what is not written is zero, and so is the last byte, always.
#[derive(Default)]
struct Text {
    bytes: [u8; 32],
    length: usize,
}

impl Text {
    fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let end = self.length.checked_add(text.len()).ok_or(std::fmt::Error)?;
        if end >= self.bytes.len() {
            return Err(std::fmt::Error);
        }
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
        for near in [
            &b"kfd"[..],
            b"./dri/x",
            b"dev/null",
            b"../../dev/x",
            b"pci0000:00/x",
            b"class",
            b"x/../dev/kfd",
            b"kfd/../x",
        ] {
            assert!(may_lead(PREFIXES, near), "{}", String::from_utf8_lossy(near));
        }
        for far in [
            &b""[..],
            b".",
            b"src/main.c",
            b"kfd2",
            b"x/dev/kfd",
            b"..",
            b"../x",
            b"../tmp/../dev2/kfd",
            b"a/b/../dev",
        ] {
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
        // From a directory with a long name.
        let directory = tempfile::tempdir().unwrap();
        for length in [SHORT - 1, SHORT, SHORT + 1, 3 * SHORT] {
            let mut deep = directory.path().canonicalize().unwrap().into_os_string();
            while length - deep.len() > 201 {
                deep.push("/");
                deep.push("x".repeat(100));
            }
            deep.push("/");
            deep.push("x".repeat(length - deep.len()));
            std::fs::create_dir_all(&deep).unwrap();
            assert_eq!(deep.len(), length);
            let opened = std::fs::File::open(&deep).unwrap();
            let up = [&b"../".repeat(20)[..], b"dev/kfd"].concat();
            let whole = [deep.as_encoded_bytes(), b"/", &up].concat();
            assert_eq!(from_directory(PREFIXES, opened.as_raw_fd(), &up), Some(whole));
            assert_eq!(from_directory(PREFIXES, opened.as_raw_fd(), b"dev/kfd"), None);
        }
    }
}
