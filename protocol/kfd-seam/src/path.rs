//! Which paths may be the service's, and what a path comes to when the service's symbolic links are
//! followed.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::service::{Entry, Lookup};

/// `PATH_MAX` of `linux/limits.h`, in bytes with the terminating zero.
const PATH_MAX: usize = 4096;

/// `MAXSYMLINKS` of `linux/namei.h`.
const MAX_SYMLINKS: u32 = 40;

/// Whether the service is to be asked about the absolute path `path`: whether one of its components, after
/// `.`, `..` and repeated slashes are taken out, leads to or below one of `prefixes`. Allocates nothing,
/// makes no system call, takes no lock and no more than a few words of stack: it runs on every path that the process names, before
/// `main` and in signal handlers.
///
/// A prefix is absolute and normalised; a trailing `*` lets its last component be any that begins so.
pub fn is_near(prefixes: &[&str], path: &[u8]) -> bool {
    path.first() == Some(&b'/')
        && path.len() < PATH_MAX
        && may_be_near(prefixes, path)
        && prefixes.iter().any(|prefix| walks_near(prefix, components(path)))
}

/// [`is_near`] of the relative `path` as seen from the absolute path `directory`.
pub fn is_near_from(prefixes: &[&str], directory: &[u8], path: &[u8]) -> bool {
    let length = directory.len().saturating_add(1).saturating_add(path.len());
    directory.first() == Some(&b'/')
        && length < PATH_MAX
        && prefixes.iter().any(|prefix| walks_near(prefix, components(directory).chain(components(path))))
}

/// Whether the path begins with the same component as one of `prefixes`, or can come to by `..`. Most paths do
/// not, and end here.
pub fn may_be_near(prefixes: &[&str], path: &[u8]) -> bool {
    let mut components = components(path);
    let Some(first) = components.next() else { return false };
    let starts = |prefix: &&str| names(prefix).next().is_some_and(|name| is_one(name, first));
    first == b".." || prefixes.iter().any(starts) || components.any(|name| name == b"..")
}

/// The components of a path that lead somewhere: names and `..`.
pub fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."))
}

/// The components of a prefix.
pub fn names(prefix: &str) -> impl Iterator<Item = &[u8]> {
    components(prefix.as_bytes())
}

/// Whether `component` is what a prefix has as `name`.
pub fn is_one(name: &[u8], component: &[u8]) -> bool {
    match name.strip_suffix(b"*") {
        Some(start) => component.starts_with(start),
        None => name == component,
    }
}

/// Whether a walk of `components` from the root comes to `prefix`.
fn walks_near<'path>(prefix: &str, components: impl Iterator<Item = &'path [u8]>) -> bool {
    // How many components deep the walk is, and how many of them, from the root on, are the prefix's.
    let mut depth = 0usize;
    let mut shared = 0usize;
    for component in components {
        if component == b".." {
            depth = depth.saturating_sub(1);
            shared = shared.min(depth);
            continue;
        }
        if shared == depth {
            let mut names = names(prefix).skip(shared);
            if names.next().is_some_and(|name| is_one(name, component)) {
                if names.next().is_none() {
                    return true;
                }
                shared = shared.saturating_add(1);
            }
        }
        depth = depth.saturating_add(1);
    }
    false
}

/// What a path comes to.
#[derive(Debug, PartialEq, Eq)]
pub enum Resolved {
    /// The service has no part in it.
    Untouched,
    /// The way leads through the service and ends at this path of the real file system.
    Foreign(PathBuf),
    /// The service says that nothing can be reached there.
    Missing(Errno),
    /// The service has this at `path`, which is free of links.
    Found {
        /// The resolved path.
        path: PathBuf,
        /// What is there.
        entry: Entry,
    },
}

/// Walks `path` (absolute) component by component as the kernel does, asking `lookup` about each place
/// below `prefixes` and following the links that it returns; the last component's link only when `follow`
/// is set or a slash comes after it. Directories of the real file system on the way are taken as they are
/// written: a real link among them is left to the real system.
pub fn resolve(prefixes: &[&str], path: &[u8], follow: bool, lookup: impl Fn(&Path) -> Lookup) -> Resolved {
    let mut at = PathBuf::from("/");
    let mut pending = Vec::new();
    push_components(&mut pending, path);
    let mut links = 0u32;
    // Whether the walk went through a place that the real system need not have.
    let mut owned = false;
    let mut found = None;
    while let Some(component) = pending.pop() {
        if !matches!(found, None | Some(Entry::Directory { .. })) {
            return Resolved::Missing(Errno::ENOTDIR);
        }
        match component.as_slice() {
            b"" | b"." => continue,
            b".." => {
                at.pop();
            }
            name => at.push(OsStr::from_bytes(name)),
        }
        if !is_near(prefixes, at.as_os_str().as_bytes()) {
            found = None;
            continue;
        }
        match lookup(&at) {
            Lookup::Foreign => found = None,
            Lookup::Missing(errno) => return Resolved::Missing(errno),
            Lookup::Found(Entry::Symlink(target)) if follow || !pending.is_empty() => {
                links = links.saturating_add(1);
                if links > MAX_SYMLINKS {
                    return Resolved::Missing(Errno::ELOOP);
                }
                if target.is_empty() {
                    return Resolved::Missing(Errno::ENOENT);
                }
                at.pop();
                if target.as_bytes().starts_with(b"/") {
                    at = PathBuf::from("/");
                }
                push_components(&mut pending, target.as_bytes());
                found = None;
            }
            Lookup::Found(entry) => {
                owned = true;
                found = Some(entry);
            }
        }
    }
    match found {
        Some(entry) => Resolved::Found { path: at, entry },
        None if owned || links > 0 => Resolved::Foreign(at),
        None => Resolved::Untouched,
    }
}

/// Puts the components of `path` on the stack of what is still to be walked, the first on top. A trailing
/// slash stays there as an empty component, which demands a directory.
fn push_components(pending: &mut Vec<Vec<u8>>, path: &[u8]) {
    let mut components = path.split(|byte| *byte == b'/').rev().peekable();
    if components.next_if(|last| last.is_empty()).is_some() {
        pending.push(Vec::new());
    }
    pending.extend(components.filter(|component| !component.is_empty()).map(<[u8]>::to_vec));
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIXES: &[&str] =
        &["/dev/kfd", "/dev/dri", "/sys/class/kfd", "/sys/dev/char/226:*", "/sys/devices/virtual/kfd"];

    #[test]
    fn near_and_far() {
        for near in [
            "/dev/kfd",
            "//dev///kfd",
            "/dev/./kfd/",
            "/dev/shm/../kfd",
            "/../dev/kfd",
            "/dev/dri",
            "/dev/dri/renderD128",
            "/dev/dri/..",
            "/sys/dev/char/226:128/device",
            "/sys/class/kfd/kfd/topology/../../../../net",
        ] {
            assert!(is_near(PREFIXES, near.as_bytes()), "{near}");
        }
        for far in [
            "",
            "/",
            "dev/kfd",
            "/dev",
            "/dev/kfd2",
            "/dev/kfd/../null".trim_start_matches("/dev/kfd/.."),
            "/sys/dev/char/22",
            "/tmp/dev/kfd",
        ] {
            assert!(!is_near(PREFIXES, far.as_bytes()), "{far}");
        }
    }

    #[test]
    fn seen_from_a_directory() {
        let near = |directory: &str, path: &str| {
            let joined = is_near(PREFIXES, format!("{directory}/{path}").as_bytes());
            let apart = is_near_from(PREFIXES, directory.as_bytes(), path.as_bytes());
            assert_eq!(apart, joined, "{path} from {directory}");
            apart
        };
        for (directory, path) in [
            ("/dev", "kfd"),
            ("/", "dev/kfd"),
            ("/dev/shm", "../kfd/"),
            ("/sys/class", "kfd/../net"),
            ("/sys/dev", "char/226:1"),
            ("/a/b", "../../../dev//./dri"),
        ] {
            assert!(near(directory, path), "{path} from {directory}");
        }
        for (directory, path) in
            [("/dev", "null"), ("/dev", "../kfd"), ("/a/dev", "kfd"), ("/sys/a/class", "../kfd"), ("/", "..")]
        {
            assert!(!near(directory, path), "{path} from {directory}");
        }
        // What is no directory has no absolute path.
        assert!(!is_near_from(PREFIXES, b"pipe:[1]", b"../dev/kfd"));
        let (length, deep) = (PATH_MAX - b"//kfd".len(), "/".repeat(PATH_MAX));
        let from =
            |length| is_near_from(PREFIXES, &[b"/dev", &deep.as_bytes()[..length - 4]].concat(), b"kfd");
        assert!(from(length) && !from(length + 1));
    }

    #[test]
    fn a_prefix_of_one_component() {
        assert!(
            is_near(&["/kfd*"], b"/kfd7/x")
                && is_near(&["/kfd*"], b"/a/../kfd")
                && is_near(&["/kfd"], b"/./kfd")
        );
        assert!(
            !is_near(&["/kfd*"], b"/a/kfd")
                && !is_near(&["/kfd"], b"/kfd7")
                && !is_near(&["/kfd"], b"/a/../kf")
        );
    }

    #[test]
    fn the_longest_path() {
        let mut path = b"/dev".to_vec();
        while path.len() + 4 < PATH_MAX {
            path.push(b'/');
        }
        path.extend(b"kfd");
        assert_eq!(path.len(), PATH_MAX - 1);
        assert!(is_near(PREFIXES, &path));
        path.insert(0, b'/');
        assert!(!is_near(PREFIXES, &path), "the kernel answers ENAMETOOLONG");
        assert!(!is_near(PREFIXES, &[b'/'; 2 * PATH_MAX]));
    }

    fn tree(path: &Path) -> Lookup {
        let directory = || Lookup::Found(Entry::Directory { entries: vec![], merge: false });
        match path.to_str().unwrap() {
            "/sys/class/kfd" | "/sys/devices/virtual/kfd" | "/sys/devices/virtual/kfd/kfd" => directory(),
            "/dev/dri" => Lookup::Found(Entry::Directory { entries: vec![], merge: true }),
            "/dev/kfd" => Lookup::Found(Entry::Device { id: crate::DeviceId(0), major: 234, minor: 0 }),
            "/sys/class/kfd/kfd" => Lookup::Found(Entry::Symlink("../../devices/virtual/kfd/kfd".into())),
            "/sys/class/kfd/loop" => Lookup::Found(Entry::Symlink("loop".into())),
            "/sys/class/kfd/out" => Lookup::Found(Entry::Symlink("/etc/./hosts".into())),
            "/sys/class/kfd/empty" => Lookup::Found(Entry::Symlink("".into())),
            "/sys/devices/virtual/kfd/kfd/dev" => Lookup::Found(Entry::File(b"234:0\n".to_vec())),
            "/dev/dri/card7" => Lookup::Foreign,
            _ => Lookup::Missing(Errno::ENOENT),
        }
    }

    fn walk(path: &str, follow: bool) -> Resolved {
        resolve(PREFIXES, path.as_bytes(), follow, tree)
    }

    fn found_at(path: &str, follow: bool) -> Option<String> {
        match walk(path, follow) {
            Resolved::Found { path, .. } => Some(path.to_str().unwrap().to_owned()),
            _ => None,
        }
    }

    #[test]
    fn links_are_followed() {
        let real = Some("/sys/devices/virtual/kfd/kfd/dev".to_owned());
        assert_eq!(found_at("/sys/class/kfd/kfd/dev", true), real);
        assert_eq!(found_at("/sys/class/kfd/kfd/dev", false), real);
        assert_eq!(found_at("//sys/class/./kfd/kfd/../kfd/dev", true), real);
        assert_eq!(found_at("/sys/class/kfd/kfd", true).as_deref(), Some("/sys/devices/virtual/kfd/kfd"));
        assert_eq!(found_at("/sys/class/kfd/kfd", false).as_deref(), Some("/sys/class/kfd/kfd"));
        assert_eq!(found_at("/sys/class/kfd/kfd/", false).as_deref(), Some("/sys/devices/virtual/kfd/kfd"));
    }

    #[test]
    fn dot_dot_is_the_parent_of_the_links_target() {
        assert_eq!(found_at("/sys/class/kfd/kfd/..", true).as_deref(), Some("/sys/devices/virtual/kfd"));
    }

    #[test]
    fn errors_of_the_walk() {
        assert_eq!(walk("/sys/class/kfd/loop", true), Resolved::Missing(Errno::ELOOP));
        assert_eq!(walk("/sys/class/kfd/empty", true), Resolved::Missing(Errno::ENOENT));
        assert_eq!(walk("/sys/class/kfd/none", true), Resolved::Missing(Errno::ENOENT));
        for path in ["/dev/kfd/", "/dev/kfd/.", "/dev/kfd/..", "/dev/kfd/x", "/sys/class/kfd/kfd/dev/x"] {
            assert_eq!(walk(path, true), Resolved::Missing(Errno::ENOTDIR), "{path}");
        }
    }

    #[test]
    fn what_is_not_the_services() {
        assert_eq!(walk("/dev/null", true), Resolved::Untouched);
        assert_eq!(walk("/dev/dri/card7", true), Resolved::Foreign("/dev/dri/card7".into()));
        assert_eq!(walk("/dev/dri/../null", true), Resolved::Foreign("/dev/null".into()));
        assert_eq!(walk("/dev/dri/..", true), Resolved::Foreign("/dev".into()));
        assert_eq!(walk("/sys/class/kfd/out", true), Resolved::Foreign("/etc/hosts".into()));
        assert!(matches!(
            walk("/sys/class/kfd/out", false),
            Resolved::Found { entry: Entry::Symlink(_), .. }
        ));
    }
}
