//! A small tree of directories, files and links in memory, with the kernel's rules of path resolution.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use crate::service::{DeviceId, DirEntry, Entry, EntryKind, Lookup};
use nix::errno::Errno;

/// Links that one path may go through (`MAXSYMLINKS`).
const MAX_LINKS: u32 = 40;

/// What stands at a name that is no directory.
#[derive(Debug)]
enum Leaf {
    File(Vec<u8>),
    Link(String),
    Device { id: DeviceId, major: u32, minor: u32 },
}

impl Leaf {
    fn kind(&self) -> EntryKind {
        match self {
            Self::File(_) => EntryKind::File,
            Self::Link(_) => EntryKind::Symlink,
            Self::Device { .. } => EntryKind::CharDevice,
        }
    }

    fn entry(&self) -> Entry {
        match self {
            Self::File(content) => Entry::File(content.clone()),
            Self::Link(target) => Entry::Symlink(target.into()),
            Self::Device { id, major, minor } => Entry::Device { id: *id, major: *major, minor: *minor },
        }
    }
}

#[derive(Debug)]
struct Directory {
    /// Names of the real directory of the same path show through.
    merge: bool,
    directories: BTreeMap<String, Directory>,
    leaves: BTreeMap<String, Leaf>,
}

impl Directory {
    fn new(merge: bool) -> Self {
        Self { merge, directories: BTreeMap::new(), leaves: BTreeMap::new() }
    }

    fn entry(&self) -> Entry {
        let directories = self.directories.keys().map(|name| (name, EntryKind::Directory));
        let leaves = self.leaves.iter().map(|(name, leaf)| (name, leaf.kind()));
        let mut entries: Vec<DirEntry> = directories
            .chain(leaves)
            .map(|(name, kind)| DirEntry { name: OsString::from(name), kind })
            .collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Entry::Directory { entries, merge: self.merge }
    }
}

/// The tree. Directories that are only named as parents of something let the real ones show through.
#[derive(Debug)]
pub struct Tree {
    root: Directory,
}

impl Default for Tree {
    fn default() -> Self {
        Self { root: Directory::new(true) }
    }
}

impl Tree {
    /// Makes a directory that hides a real one of the same path.
    pub fn own_directory(&mut self, path: &str) {
        self.directory(path).merge = false;
    }

    /// Puts a file.
    pub fn file(&mut self, path: &str, content: impl Into<Vec<u8>>) {
        self.put(path, Leaf::File(content.into()));
    }

    /// Puts a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.put(path, Leaf::Link(target.to_owned()));
    }

    /// Puts a device node.
    pub fn device(&mut self, path: &str, id: DeviceId, major: u32, minor: u32) {
        self.put(path, Leaf::Device { id, major, minor });
    }

    fn put(&mut self, path: &str, leaf: Leaf) {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        self.directory(parent).leaves.insert(name.to_owned(), leaf);
    }

    /// The directory at `path`, made with its parents when missing.
    fn directory(&mut self, path: &str) -> &mut Directory {
        let mut current = &mut self.root;
        for name in path.split('/').filter(|name| !matches!(*name, "" | ".")) {
            let merge = current.merge;
            current = current.directories.entry(name.to_owned()).or_insert_with(|| Directory::new(merge));
        }
        current
    }

    /// Resolves `path`: links on the way are followed, a link at the end is not.
    pub fn lookup(&self, path: &Path) -> Lookup {
        let Some(path) = path.to_str() else { return Lookup::Foreign };
        let mut path = path.to_owned();
        for followed in 0..=MAX_LINKS {
            match self.step(&path) {
                Step::Done(Lookup::Foreign) if followed > 0 => return Lookup::Missing(Errno::ENOENT),
                Step::Done(lookup) => return lookup,
                Step::Follow(next) => path = next,
            }
        }
        Lookup::Missing(Errno::ELOOP)
    }

    fn step(&self, path: &str) -> Step {
        let mut current = &self.root;
        let mut names = path.split('/').filter(|name| !matches!(*name, "" | ".")).peekable();
        let mut above: Vec<&str> = Vec::new();
        while let Some(name) = names.next() {
            if let Some(directory) = current.directories.get(name) {
                current = directory;
                above.push(name);
                continue;
            }
            let missing = if current.merge { Lookup::Foreign } else { Lookup::Missing(Errno::ENOENT) };
            let Some(leaf) = current.leaves.get(name) else { return Step::Done(missing) };
            if names.peek().is_none() {
                return Step::Done(Lookup::Found(leaf.entry()));
            }
            return match leaf {
                Leaf::Link(target) => {
                    let rest: Vec<&str> = names.collect();
                    Step::Follow(resolve(&above, target, &rest))
                }
                Leaf::File(_) | Leaf::Device { .. } => Step::Done(Lookup::Missing(Errno::ENOTDIR)),
            };
        }
        // A directory in which only names are added is found as one: its listing has both.
        Step::Done(Lookup::Found(current.entry()))
    }
}

enum Step {
    Done(Lookup),
    Follow(String),
}

/// The path that a link in the directory `above` leads to, with `rest` behind it.
fn resolve(above: &[&str], target: &str, rest: &[&str]) -> String {
    let mut names: Vec<&str> = if target.starts_with('/') { Vec::new() } else { above.to_vec() };
    for name in target.split('/').chain(rest.iter().copied()) {
        match name {
            "" | "." => {}
            ".." => {
                names.pop();
            }
            name => names.push(name),
        }
    }
    format!("/{}", names.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Tree {
        let mut tree = Tree::default();
        tree.own_directory("/sys/own");
        tree.file("/sys/own/deep/file", "text");
        tree.link("/sys/own/link", "deep");
        tree.link("/sys/own/loop", "loop");
        tree.link("/sys/own/away", "../../elsewhere");
        tree.device("/dev/node", DeviceId(3), 226, 128);
        tree
    }

    #[test]
    fn paths_resolve_as_in_the_kernel() {
        let tree = tree();
        let look = |path: &str| tree.lookup(Path::new(path));
        assert_eq!(look("/etc/passwd"), Lookup::Foreign);
        assert_eq!(look("/sys/other"), Lookup::Foreign);
        assert_eq!(look("/sys/own/other"), Lookup::Missing(Errno::ENOENT));
        assert_eq!(look("/sys/own/deep/file"), Lookup::Found(Entry::File(b"text".to_vec())));
        assert_eq!(look("/sys/own/deep/file/x"), Lookup::Missing(Errno::ENOTDIR));
        assert_eq!(look("/sys/own/link"), Lookup::Found(Entry::Symlink("deep".into())));
        assert_eq!(look("/sys/own/link/file"), Lookup::Found(Entry::File(b"text".to_vec())));
        assert_eq!(look("/sys/own/link/nothing"), Lookup::Missing(Errno::ENOENT));
        assert_eq!(look("/sys/own/loop/x"), Lookup::Missing(Errno::ELOOP));
        assert_eq!(look("/sys/own/away/x"), Lookup::Missing(Errno::ENOENT));
        let device = Entry::Device { id: DeviceId(3), major: 226, minor: 128 };
        assert_eq!(look("/dev/node"), Lookup::Found(device));
    }

    #[test]
    fn directories_list_and_merge() {
        let tree = tree();
        let Lookup::Found(Entry::Directory { entries, merge }) = tree.lookup(Path::new("/sys/own")) else {
            panic!("no directory")
        };
        assert!(!merge);
        let names: Vec<_> = entries.iter().map(|entry| entry.name.to_str().unwrap()).collect();
        assert_eq!(names, ["away", "deep", "link", "loop"]);
        let Lookup::Found(Entry::Directory { merge, .. }) = tree.lookup(Path::new("/dev")) else { panic!() };
        assert!(merge);
    }
}
