//! A preload library on a small service, for the tests of the front end.
//!
//! `SEAM_FIXTURE_LOG` names a file that gets a line whenever the service is made; `SEAM_FIXTURE_FAIL` lets that
//! fail.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use kfd_seam::{
    DeviceId, DirEntry, Entry, EntryKind, Exchange, FileId, KfdService, Lookup, MapRequest, MapSource,
    Opened, Request, Result, SharedMemory, UserMemory, UserPtr,
};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{Whence, lseek};

kfd_seam::preload!(kfd_seam::Preload {
    name: "seam-fixture",
    prefixes: &[
        "/dev/kfd",
        "/dev/dri",
        "/sys/class/kfd",
        "/sys/devices/virtual/kfd",
        "/sys/dev/char/226:*",
        "/proc/modules",
        "/usr/share",
    ],
    shared,
    service: make,
});

/// Whoever has this file position has the second page of a file.
const SHARED_POSITION: i64 = 1 << 40;

fn shared(descriptor: BorrowedFd<'_>) -> Option<SharedMemory> {
    let position = lseek(descriptor, 0, Whence::SeekCur).ok()?;
    (position == SHARED_POSITION).then_some(SharedMemory { offset: 4096, size: 4096 })
}

/// The device files by their ids.
const KFD: DeviceId = DeviceId(0);
const RENDER: DeviceId = DeviceId(1);

/// Requests of the device files; type 'S', the argument a pointer to two 64-bit numbers or unused.
const FILE_ID: u8 = 1;
const FAIL_WITH: u8 = 2;
const WAIT: u8 = 3;
const WAKE: u8 = 4;
const COUNTS: u8 = 5;
const PANIC: u8 = 6;
const REENTER: u8 = 7;
const POLL: u8 = 8;

/// The numbers that a request carries.
type Pair = [u64; 2];

struct Fixture {
    next_file: AtomicU64,
    opened: AtomicU64,
    released: AtomicU64,
    open: Mutex<BTreeSet<u64>>,
    woken: Mutex<bool>,
    wake: Condvar,
    memory: File,
}

fn make() -> std::result::Result<Box<dyn KfdService>, Box<dyn std::error::Error + Send + Sync>> {
    if let Some(log) = std::env::var_os("SEAM_FIXTURE_LOG") {
        writeln!(OpenOptions::new().append(true).create(true).open(log)?, "made {}", std::process::id())?;
    }
    if std::env::var_os("SEAM_FIXTURE_FAIL").is_some() {
        return Err("profile gfx000: unknown, expected gfx906".into());
    }
    let memory = File::from(memfd_create(c"fixture", MFdFlags::MFD_CLOEXEC)?);
    memory.set_len(64 << 12)?;
    Ok(Box::new(Fixture {
        next_file: AtomicU64::new(1),
        opened: AtomicU64::new(0),
        released: AtomicU64::new(0),
        open: Mutex::new(BTreeSet::new()),
        woken: Mutex::new(false),
        wake: Condvar::new(),
        memory,
    }))
}

fn directory(entries: &[(&str, EntryKind)], merge: bool) -> Lookup {
    let entries = entries.iter().map(|(name, kind)| DirEntry { name: name.into(), kind: *kind }).collect();
    Lookup::Found(Entry::Directory { entries, merge })
}

fn file(text: &str) -> Lookup {
    Lookup::Found(Entry::File(text.into()))
}

fn link(target: &str) -> Lookup {
    Lookup::Found(Entry::Symlink(target.into()))
}

impl KfdService for Fixture {
    fn lookup(&self, path: &Path) -> Lookup {
        use EntryKind::{CharDevice, Directory, File, Symlink};
        let Some(path) = path.to_str() else { return Lookup::Foreign };
        match path {
            "/dev/kfd" => Lookup::Found(Entry::Device { id: KFD, major: 511, minor: 0 }),
            "/dev/dri" => directory(&[("renderD128", CharDevice)], true),
            "/dev/dri/renderD128" => Lookup::Found(Entry::Device { id: RENDER, major: 226, minor: 128 }),
            "/sys/class/kfd" => directory(&[("kfd", Symlink)], false),
            "/sys/class/kfd/kfd" => link("../../devices/virtual/kfd/kfd"),
            "/sys/devices/virtual/kfd" => directory(&[("kfd", Directory)], false),
            "/sys/devices/virtual/kfd/kfd" => directory(
                &[("dev", File), ("topology", Directory), ("out", Symlink), ("loop", Symlink)],
                false,
            ),
            "/sys/devices/virtual/kfd/kfd/dev" => file("511:0\n"),
            "/sys/devices/virtual/kfd/kfd/out" => link("/etc/passwd"),
            "/sys/devices/virtual/kfd/kfd/loop" => link("loop"),
            "/sys/devices/virtual/kfd/kfd/topology" => {
                directory(&[("generation_id", File), ("nodes", Directory), ("secret", File)], false)
            }
            "/sys/devices/virtual/kfd/kfd/topology/generation_id" => file("2\n"),
            "/sys/devices/virtual/kfd/kfd/topology/secret" => Lookup::Missing(Errno::EACCES),
            "/sys/devices/virtual/kfd/kfd/topology/nodes" => directory(&[], false),
            "/sys/dev/char/226:128" => link("../../devices/virtual/kfd/kfd"),
            "/proc/modules" => file("amdgpu 1 0 - Live 0x0000000000000000\n"),
            "/usr/share" => directory(&[("kfd-seam-fixture", File)], true),
            "/usr/share/kfd-seam-fixture" => file("added\n"),
            _ if path.starts_with("/usr/share") || path.starts_with("/dev/dri") => Lookup::Foreign,
            _ => Lookup::Missing(Errno::ENOENT),
        }
    }

    fn open(&self, device: DeviceId, _flags: i32) -> Result<Opened> {
        let id = self.next_file.fetch_add(1, Ordering::SeqCst) << 8 | u64::from(device.0);
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
        self.opened.fetch_add(1, Ordering::SeqCst);
        Ok(Opened { file: FileId(id), descriptor: memfd_create(c"device", MFdFlags::empty())? })
    }

    fn ioctl(&self, file: FileId, request: u32, argument: UserPtr) -> Result<i32> {
        let request = Request(request);
        let run = |handler: &dyn Fn(&mut Pair) -> Result<i32>| {
            Exchange::kfd(request, request).run::<Pair, _>(&UserMemory, argument, handler)
        };
        if !self.open.lock().unwrap_or_else(PoisonError::into_inner).contains(&file.0) {
            // Never the front end's answer, so that a test can tell them apart.
            return Err(Errno::EOWNERDEAD);
        }
        match request.number() {
            FILE_ID => run(&|pair| {
                *pair = [file.0, 0];
                Ok(42)
            }),
            FAIL_WITH => run(&|pair| {
                let [errno, _] = *pair;
                Err(Errno::from_raw(i32::try_from(errno).unwrap_or(0)))
            }),
            WAIT => {
                let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
                while !*woken {
                    woken = self.wake.wait(woken).unwrap_or_else(PoisonError::into_inner);
                }
                *woken = false;
                Ok(0)
            }
            WAKE => {
                *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
                self.wake.notify_all();
                Ok(0)
            }
            // Waits in a function of libc in which a thread can be cancelled.
            POLL => loop {
                let woken = std::mem::take(&mut *self.woken.lock().unwrap_or_else(PoisonError::into_inner));
                if woken {
                    return Ok(0);
                }
                nix::poll::poll(&mut [], 1u8)?;
            },
            COUNTS => run(&|pair| {
                *pair = [self.opened.load(Ordering::SeqCst), self.released.load(Ordering::SeqCst)];
                // What a service does on the way must not show in the program's errno.
                Errno::EDOM.set();
                Ok(0)
            }),
            #[allow(clippy::panic)]
            PANIC => panic!("a fault of the service"),
            REENTER => run(&|pair| {
                let file = std::fs::read("/sys/class/kfd/kfd/topology/generation_id");
                let directory = std::fs::read_dir("/sys/devices/virtual/kfd/kfd/topology/nodes");
                // 0 where the real system answered: no GPU here has a topology of the fixture's shape.
                *pair = [file.is_ok_and(|content| content == b"2\n").into(), directory.is_ok().into()];
                // The program's descriptor is the fixture's memfd again.
                let status =
                    nix::sys::stat::fstat(std::io::stdin()).map(|status| status.st_mode & libc::S_IFMT);
                if status != Ok(libc::S_IFREG) {
                    return Err(Errno::EDOM);
                }
                Ok(0)
            }),
            _ => Err(Errno::ENOTTY),
        }
    }

    fn mmap(&self, file: FileId, request: &MapRequest) -> Result<MapSource> {
        // Bits 62 and 63 are the driver's own, as in KFD_MMAP_TYPE_*.
        let offset = request.offset & !(3 << 62);
        if offset >= 64 << 12 {
            return Err(Errno::EINVAL);
        }
        let text = format!("file {} kind {} length {}", file.0 & 0xff, request.offset >> 62, request.length);
        std::os::unix::fs::FileExt::write_all_at(&self.memory, text.as_bytes(), offset)
            .map_err(|_| Errno::EIO)?;
        let copy = self.memory.try_clone().map_err(|_| Errno::EMFILE)?;
        Ok(MapSource { file: OwnedFd::from(copy), offset })
    }

    fn release(&self, file: FileId) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&file.0);
        self.released.fetch_add(1, Ordering::SeqCst);
        Errno::EDOM.set();
    }

    fn forked(&self) {
        const MESSAGE: &CStr = c"forked\n";
        if std::env::var_os("SEAM_FIXTURE_LOG").is_some() {
            let _ = nix::unistd::write(std::io::stderr(), MESSAGE.to_bytes());
        }
    }
}
