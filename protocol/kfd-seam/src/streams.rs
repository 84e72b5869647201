//! `DIR` stand-ins for the service's directories.
//!
//! A program hands a `DIR *` back and wants to know nothing about it; the front end must tell its own from
//! libc's. Its own are nodes of a list that only grows, so the addresses on the list are the answer, without
//! a lock that a fork could leave locked.
//!
//! Unsafe code: the nodes live as long as the process, and `readdir` returns a pointer into one.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::attributes::{directory_type, inode};
use crate::service::DirEntry;

/// The streams, the newest first.
static STREAMS: AtomicPtr<Stream> = AtomicPtr::new(ptr::null_mut());

/// Largest read of a real directory at a time, bytes.
const REAL_BUFFER: usize = 32 * 1024;

/// A directory stream of the service.
pub struct Stream {
    /// The stream that was made before this one; constant once on the list.
    next: *mut Stream,
    in_use: AtomicBool,
    state: Mutex<State>,
    /// What the last `readdir` returned a pointer to. POSIX leaves concurrent calls on one stream to the
    /// program.
    current: UnsafeCell<MaybeUninit<libc::dirent64>>,
}

// SAFETY: `next` is constant once the stream is on the list; `current` is touched only in calls on this stream,
// which the program serialises as it must with libc's.
unsafe impl Sync for Stream {}

/// The names of a directory and how far they were read.
#[derive(Debug)]
pub struct State {
    /// Closed with the stream.
    pub fd: RawFd,
    names: Vec<Name>,
    /// Index of the next name.
    pub position: usize,
}

#[derive(Debug, PartialEq, Eq)]
struct Name {
    bytes: Vec<u8>,
    kind: u8,
    inode: u64,
}

impl Stream {
    /// A new stream on `fd`, which is open on the service's directory `path`.
    pub fn open(
        fd: RawFd,
        path: &Path,
        entries: &[DirEntry],
        merge: Option<BorrowedFd<'_>>,
    ) -> &'static Self {
        let state = State { fd, names: names(path, entries, merge), position: 0 };
        let mut next = as_ref(STREAMS.load(Ordering::Acquire));
        while let Some(stream) = next {
            if !stream.in_use.swap(true, Ordering::AcqRel) {
                *stream.state() = state;
                return stream;
            }
            next = as_ref(stream.next);
        }
        let stream = Box::leak(Box::new(Self {
            next: ptr::null_mut(),
            in_use: AtomicBool::new(true),
            state: Mutex::new(state),
            current: UnsafeCell::new(MaybeUninit::zeroed()),
        }));
        let mut head = STREAMS.load(Ordering::Acquire);
        loop {
            stream.next = head;
            match STREAMS.compare_exchange(head, stream, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return stream,
                Err(other) => head = other,
            }
        }
    }

    /// The stream behind a program's `DIR *`, when it is one of these.
    pub fn of(directory: *mut libc::DIR) -> Option<&'static Self> {
        let mut next = as_ref(STREAMS.load(Ordering::Acquire));
        while let Some(stream) = next {
            if ptr::addr_eq(directory, ptr::from_ref(stream)) {
                return stream.in_use.load(Ordering::Acquire).then_some(stream);
            }
            next = as_ref(stream.next);
        }
        None
    }

    /// What the program holds.
    pub fn as_dir(&self) -> *mut libc::DIR {
        ptr::from_ref(self).cast_mut().cast()
    }

    /// Names and position.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the names anew, as `rewinddir` wants it.
    pub fn rewind(&self, path: &Path, entries: &[DirEntry], merge: Option<BorrowedFd<'_>>) {
        let mut state = self.state();
        state.names = names(path, entries, merge);
        state.position = 0;
    }

    /// The next entry, null at the end; good until the next call.
    pub fn read(&self) -> *mut libc::dirent64 {
        let mut state = self.state();
        let position = state.position;
        let Some(name) = state.names.get(position) else { return ptr::null_mut() };
        let zero = MaybeUninit::<libc::dirent64>::zeroed();
        // SAFETY: a struct of integers may be zero.
        let mut entry = unsafe { zero.assume_init() };
        entry.d_ino = name.inode;
        entry.d_type = name.kind;
        entry.d_off = i64::try_from(position.saturating_add(1)).unwrap_or(i64::MAX);
        // The record's fixed part, the name and its zero, rounded up to 8 bytes as the kernel does.
        let length = std::mem::offset_of!(libc::dirent64, d_name) + name.bytes.len() + 1;
        entry.d_reclen = u16::try_from(length.next_multiple_of(8)).unwrap_or(u16::MAX);
        for (to, from) in entry.d_name.iter_mut().zip(&name.bytes) {
            *to = from.cast_signed();
        }
        state.position = position.saturating_add(1);
        let current = self.current.get().cast::<libc::dirent64>();
        // SAFETY: it points to this stream's own memory, which no other call is using (see `current`).
        unsafe { current.write(entry) };
        current
    }

    /// Ends the stream and returns its descriptor.
    pub fn close(&self) -> RawFd {
        let fd = {
            let mut state = self.state();
            state.names = Vec::new();
            state.fd
        };
        self.in_use.store(false, Ordering::Release);
        fd
    }
}

/// `.` and `..`, the service's names, then what the real directory has besides.
fn names(path: &Path, entries: &[DirEntry], merge: Option<BorrowedFd<'_>>) -> Vec<Name> {
    let parent = path.parent().unwrap_or(path);
    let mut names = vec![
        Name { bytes: b".".to_vec(), kind: libc::DT_DIR, inode: inode(path.as_os_str()) },
        Name { bytes: b"..".to_vec(), kind: libc::DT_DIR, inode: inode(parent.as_os_str()) },
    ];
    names.extend(entries.iter().map(|entry| Name {
        bytes: entry.name.as_bytes().to_vec(),
        kind: directory_type(entry.kind),
        inode: inode(path.join(&entry.name).as_os_str()),
    }));
    for name in merge.map(real_names).unwrap_or_default() {
        if names.iter().all(|known| known.bytes != name.bytes) {
            names.push(name);
        }
    }
    // A name of more than NAME_MAX bytes has no place in a dirent.
    names.retain(|name| name.bytes.len() <= 255);
    names
}

/// The names of a real directory; what cannot be read is left out.
fn real_names(directory: BorrowedFd<'_>) -> Vec<Name> {
    let mut names = Vec::new();
    let _ = rustix::fs::seek(directory, rustix::fs::SeekFrom::Start(0));
    let mut buffer = vec![MaybeUninit::uninit(); REAL_BUFFER];
    let mut entries = rustix::fs::RawDir::new(directory, &mut buffer);
    while let Some(Ok(entry)) = entries.next() {
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        let kind = match entry.file_type() {
            rustix::fs::FileType::RegularFile => libc::DT_REG,
            rustix::fs::FileType::Directory => libc::DT_DIR,
            rustix::fs::FileType::Symlink => libc::DT_LNK,
            rustix::fs::FileType::CharacterDevice => libc::DT_CHR,
            rustix::fs::FileType::BlockDevice => libc::DT_BLK,
            rustix::fs::FileType::Fifo => libc::DT_FIFO,
            rustix::fs::FileType::Socket => libc::DT_SOCK,
            rustix::fs::FileType::Unknown => libc::DT_UNKNOWN,
        };
        names.push(Name { bytes: name.as_bytes().to_vec(), kind, inode: entry.ino() });
    }
    names
}

/// A stream of the list.
fn as_ref(stream: *mut Stream) -> Option<&'static Stream> {
    // SAFETY: every non-null pointer of the list came from `Box::leak` and was published after it was
    // filled; nothing frees it.
    unsafe { stream.as_ref() }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::os::fd::AsFd;

    use super::*;
    use crate::service::EntryKind;

    fn entry(name: &str, kind: EntryKind) -> DirEntry {
        DirEntry { name: name.into(), kind }
    }

    fn list(stream: &Stream) -> Vec<(String, u8)> {
        let mut names = Vec::new();
        loop {
            let entry = stream.read();
            if entry.is_null() {
                return names;
            }
            // SAFETY: `read` returned an entry that is good until its next call.
            let entry = unsafe { &*entry };
            // SAFETY: the name ends with a zero: the rest of the field is zero and longer than any name.
            let name = unsafe { CStr::from_ptr(entry.d_name.as_ptr()) };
            assert!(entry.d_ino != 0 && entry.d_reclen % 8 == 0);
            names.push((name.to_str().unwrap().to_owned(), entry.d_type));
        }
    }

    #[test]
    fn the_services_names_come_first_and_hide_real_ones() {
        let real = tempfile::tempdir().unwrap();
        std::fs::create_dir(real.path().join("card0")).unwrap();
        std::fs::write(real.path().join("renderD128"), "").unwrap();
        let directory = std::fs::File::open(real.path()).unwrap();
        let ours = [entry("renderD128", EntryKind::CharDevice), entry("by-path", EntryKind::Directory)];
        let stream = Stream::open(7, Path::new("/dev/dri"), &ours, Some(directory.as_fd()));
        let expected = [
            (".", libc::DT_DIR),
            ("..", libc::DT_DIR),
            ("renderD128", libc::DT_CHR),
            ("by-path", libc::DT_DIR),
            ("card0", libc::DT_DIR),
        ]
        .map(|(name, kind)| (name.to_owned(), kind));
        assert_eq!(list(stream), expected);
        assert_eq!(list(stream), []);
        stream.state().position = 2;
        assert_eq!(list(stream), expected[2..]);
        stream.rewind(Path::new("/dev/dri"), &ours, Some(directory.as_fd()));
        assert_eq!(list(stream), expected);
        assert_eq!(stream.close(), 7);
    }

    #[test]
    fn streams_are_told_from_others_and_recycled() {
        let first = Stream::open(7, Path::new("/sys"), &[], None);
        assert!(ptr::eq(Stream::of(first.as_dir()).unwrap(), first));
        let mut other = 0u64;
        assert!(Stream::of((&raw mut other).cast()).is_none());
        assert!(Stream::of(ptr::null_mut()).is_none());
        let address = first.as_dir();
        first.close();
        assert!(Stream::of(address).is_none(), "closed");
    }
}
