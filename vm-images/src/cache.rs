//! The cache directory: content-addressed entries that appear whole or not at all.
//!
//! An entry is built in a temporary directory beside its final place and renamed, so that a run that is interrupted
//! never leaves something that looks complete. One lock file keeps two runs from building the same entry twice.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Context, Error, Result};

/// The environment variable that moves the cache.
pub const CACHE_VARIABLE: &str = "VIRTIO_KFD_CACHE";

/// The user's cache of packages and images.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens the cache of this user: `$VIRTIO_KFD_CACHE`, or `virtio-kfd` in `$XDG_CACHE_HOME` or `~/.cache`.
    ///
    /// # Errors
    /// [`Error::RelativeCache`] when `$VIRTIO_KFD_CACHE` is not absolute, [`Error::NoCacheDirectory`] when no variable says where, [`Error::Io`] when the directory cannot be made.
    pub fn open() -> Result<Self> {
        let absolute =
            |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        // Of the other two the XDG specification says that a relative one is to be ignored.
        if let Some(path) =
            std::env::var_os(CACHE_VARIABLE).map(PathBuf::from).filter(|path| path.is_relative())
        {
            return Err(Error::RelativeCache(path));
        }
        let root = absolute(CACHE_VARIABLE)
            .or_else(|| absolute("XDG_CACHE_HOME").map(|path| path.join("virtio-kfd")))
            .or_else(|| absolute("HOME").map(|path| path.join(".cache/virtio-kfd")))
            .ok_or(Error::NoCacheDirectory)?;
        Self::at(root)
    }

    /// Opens a cache at `root`, which is created if it is missing.
    ///
    /// # Errors
    /// [`Error::Io`] when the directory cannot be made.
    pub fn at(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        fs::create_dir_all(&root).at("create", &root)?;
        Ok(Self { root })
    }

    /// The cache's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A path inside the cache; its parent directory exists afterwards.
    ///
    /// # Errors
    /// [`Error::Io`] when the parent directory cannot be made.
    pub fn path(&self, relative: impl AsRef<Path>) -> Result<PathBuf> {
        let path = self.root.join(relative);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).at("create", parent)?;
        }
        Ok(path)
    }

    /// Takes the lock under which entries are built; it is given back when the value is dropped.
    ///
    /// `waiting` is called once if another process holds it.
    ///
    /// # Errors
    /// [`Error::Io`] when the lock file cannot be opened or locked.
    pub fn lock(&self, waiting: impl FnOnce()) -> Result<CacheLock> {
        let path = self.path("lock")?;
        let file = File::options().create(true).truncate(false).write(true).open(&path).at("open", &path)?;
        if file.try_lock().is_err() {
            waiting();
            file.lock().at("lock", &path)?;
        }
        // Entries are built under the lock only, so what lies here now was left by a run that was killed.
        let left = self.root.join("tmp");
        if left.exists() {
            fs::remove_dir_all(&left).at("remove", &left)?;
        }
        Ok(CacheLock { _file: file })
    }

    /// A new empty directory inside the cache for an entry that is being built, which is done under the lock; it is
    /// removed when dropped.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be made.
    pub fn scratch(&self, prefix: &str) -> Result<tempfile::TempDir> {
        let parent = self.root.join("tmp");
        fs::create_dir_all(&parent).at("create", &parent)?;
        tempfile::Builder::new().prefix(prefix).tempdir_in(&parent).at("create a directory in", &parent)
    }

    /// Moves a finished `scratch` directory to its place. A directory that stands there already is kept, since
    /// entries with one name have one content.
    ///
    /// # Errors
    /// [`Error::Io`] when the move fails.
    pub fn publish(&self, scratch: tempfile::TempDir, place: &Path) -> Result<()> {
        if place.exists() {
            return Ok(());
        }
        let from = scratch.keep();
        fs::rename(&from, place).at("move a finished entry to", place)
    }

    /// Writes a small file so that a reader sees the old or the new content and nothing between.
    ///
    /// # Errors
    /// [`Error::Io`] when a step fails.
    pub fn write_whole(&self, place: &Path, content: &[u8]) -> Result<()> {
        let parent = place.parent().unwrap_or(&self.root);
        fs::create_dir_all(parent).at("create", parent)?;
        let mut file = tempfile::NamedTempFile::new_in(parent).at("create a file in", parent)?;
        std::io::Write::write_all(&mut file, content).at("write", place)?;
        file.persist(place).map_err(|error| error.error).at("move a finished file to", place)?;
        Ok(())
    }
}

/// The held lock of a [`Cache`].
#[derive(Debug)]
pub struct CacheLock {
    _file: File,
}

/// A name for content: the first 16 hexadecimal digits of the SHA-256 over `parts`, each with its length.
pub fn content_name<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_build_leaves_no_entry() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("cache")).unwrap();
        let place = cache.path("packages/x").unwrap();
        let scratch = cache.scratch("x").unwrap();
        fs::write(scratch.path().join("half"), "half").unwrap();
        drop(scratch);
        assert!(!place.exists());
        assert_eq!(fs::read_dir(cache.root().join("tmp")).unwrap().count(), 0);

        let scratch = cache.scratch("x").unwrap();
        fs::write(scratch.path().join("whole"), "whole").unwrap();
        cache.publish(scratch, &place).unwrap();
        assert_eq!(fs::read_to_string(place.join("whole")).unwrap(), "whole");
    }

    #[test]
    fn the_lock_excludes_a_second_holder() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let first = cache.lock(|| panic!("nobody holds it")).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let other = cache.clone();
        let thread = std::thread::spawn(move || {
            let lock = other.lock(|| sender.send("waiting").unwrap());
            drop(lock);
            sender.send("had it").unwrap();
        });
        assert_eq!(receiver.recv().unwrap(), "waiting");
        drop(first);
        assert_eq!(receiver.recv().unwrap(), "had it");
        thread.join().unwrap();
    }

    #[test]
    fn the_lock_clears_what_a_killed_run_left() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let left = cache.scratch("killed").unwrap().keep();
        let _lock = cache.lock(|| ()).unwrap();
        assert!(!left.exists());
    }

    #[test]
    fn a_content_name_depends_on_where_parts_end() {
        assert_ne!(content_name([b"ab".as_slice(), b"c"]), content_name([b"a".as_slice(), b"bc"]));
        assert_eq!(content_name([b"ab".as_slice()]).len(), 16);
    }
}
