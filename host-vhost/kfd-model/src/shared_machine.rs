//! The memory of one machine as several processes share it: a file in which each process says what it uses.
//!
//! Each process has a slot, and a lock on it that goes with the process however it ends (`locks`). What
//! stands in the slot of a process that is gone counts no more, so nothing has to be cleaned up and nothing that a
//! killed process left behind changes a later result.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use kfd_seam::Result;
use nix::errno::Errno;
use nix::unistd::close;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::ledger::{Counts, Vram};
use crate::locks;

/// The environment variable that names the file.
pub const MACHINE_VARIABLE: &str = "VIRTIO_KFD_MODEL_MACHINE";

/// GPUs that a machine can have.
pub const MAX_GPUS: usize = 31;

/// Processes that can share a machine.
const SLOTS: u64 = 1024;

/// `KFDMACH1`, in the order of the bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"KFDMACH1");

const HEADER_SIZE: u64 = 512;
const SLOT_SIZE: u64 = 512;

/// Bytes that are locked: while the counts are looked at and changed, and by each process for its slot. They lie
/// outside of the file.
const CHANGE_LOCK: u64 = 1 << 40;
const SLOT_LOCKS: u64 = CHANGE_LOCK + 1;

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Header {
    magic: u64,
    /// Slots from the first on that were ever taken.
    slots: u64,
    /// KFD's ids of the GPUs; 0 behind the last. Processes with other GPUs are on another machine.
    gpu_ids: [u32; 32],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Slot {
    system: u64,
    driver: u64,
    /// In use, and rounded up, of each GPU.
    vram: [[u64; 2]; MAX_GPUS],
}

impl Slot {
    fn of(counts: &Counts) -> Self {
        let vram = counts.vram.map(|vram| [vram.used, vram.aligned]);
        Self { system: counts.system, driver: counts.driver, vram }
    }

    fn counts(&self) -> Counts {
        let vram = self.vram.map(|[used, aligned]| Vram { used, aligned });
        Counts { system: self.system, driver: self.driver, vram }
    }

    fn is_empty(&self) -> bool {
        self.as_bytes().iter().all(|byte| *byte == 0)
    }
}

/// A machine's file, and this process's slot in it.
#[derive(Debug)]
pub struct SharedMachine {
    file: File,
    slot: u64,
}

/// Holds others off while it lives.
struct Change<'a>(&'a File);

impl<'a> Change<'a> {
    fn begin(file: &'a File) -> Result<Self> {
        locks::wait(file, CHANGE_LOCK, 1)?;
        Ok(Self(file))
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        // Giving back a lock that is held does not fail.
        let _ = locks::give(self.0, CHANGE_LOCK, 1);
    }
}

impl SharedMachine {
    /// Joins the machine of a file, which is made when it does not exist.
    ///
    /// # Errors
    /// What opening and reading it answer; [`ErrorKind::InvalidData`] when it is something else or the machine of other
    /// GPUs; [`ErrorKind::QuotaExceeded`] when 1024 processes share it already.
    pub fn join(path: &Path, gpu_ids: &[u32]) -> io::Result<Self> {
        let file =
            File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut wanted = Header { magic: MAGIC, slots: 0, gpu_ids: [0; 32] };
        for (place, gpu_id) in wanted.gpu_ids.iter_mut().take(MAX_GPUS).zip(gpu_ids) {
            *place = *gpu_id;
        }
        let change = Change::begin(&file)?;
        let mut header = Header::new_zeroed();
        match file.read_exact_at(header.as_mut_bytes(), 0) {
            Ok(()) => {}
            // Fresh.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                file.set_len(HEADER_SIZE + SLOTS * SLOT_SIZE)?;
            }
            Err(error) => return Err(error),
        }
        if header.magic == 0 {
            header = wanted;
        } else if header.magic != MAGIC {
            return Err(io::Error::new(ErrorKind::InvalidData, "it is no machine of the KFD model"));
        } else if header.gpu_ids != wanted.gpu_ids {
            return Err(io::Error::new(ErrorKind::InvalidData, "it is the machine of another profile"));
        }
        let free = (0..SLOTS).find(|slot| locks::take(&file, SLOT_LOCKS + slot, 1).is_ok());
        let slot = free.ok_or_else(|| io::Error::from(ErrorKind::QuotaExceeded))?;
        header.slots = header.slots.clamp(slot + 1, SLOTS);
        file.write_all_at(header.as_bytes(), 0)?;
        file.write_all_at(Slot::new_zeroed().as_bytes(), HEADER_SIZE + slot * SLOT_SIZE)?;
        drop(change);
        Ok(Self { file, slot })
    }

    /// This is a copy in a forked child, which has a slot of its own if it has any: the parent's is to go with the
    /// parent. Nothing may be asked of this copy any more.
    pub fn leave_to_parent(&self) {
        // Not dropped: a copy in a forked child never is.
        let _ = close(self.file.as_raw_fd());
    }

    /// Writes what this process uses, when `fits` lets it with what the others use.
    ///
    /// # Errors
    /// That of `fits`; what reading and writing the file answer.
    pub fn change(&self, own: &Counts, fits: impl FnOnce(&Counts) -> Result<()>) -> Result<()> {
        let _change = Change::begin(&self.file)?;
        fits(&self.sum()?)?;
        let at = HEADER_SIZE + self.slot * SLOT_SIZE;
        self.file.write_all_at(Slot::of(own).as_bytes(), at).map_err(|error| errno(&error))
    }

    /// What the other processes use.
    ///
    /// # Errors
    /// What reading the file answers.
    pub fn others(&self) -> Result<Counts> {
        let _change = Change::begin(&self.file)?;
        self.sum()
    }

    /// Sums the slots of other processes that live, and empties those of the dead.
    fn sum(&self) -> Result<Counts> {
        let mut header = Header::new_zeroed();
        self.file.read_exact_at(header.as_mut_bytes(), 0).map_err(|error| errno(&error))?;
        let mut all = Counts::default();
        for slot in (0..header.slots.min(SLOTS)).filter(|slot| *slot != self.slot) {
            let at = HEADER_SIZE + slot * SLOT_SIZE;
            let mut content = Slot::new_zeroed();
            self.file.read_exact_at(content.as_mut_bytes(), at).map_err(|error| errno(&error))?;
            if content.is_empty() {
                continue;
            }
            if locks::held_elsewhere(&self.file, SLOT_LOCKS + slot, 1)? {
                all.add(&content.counts());
            } else {
                let empty = Slot::new_zeroed();
                self.file.write_all_at(empty.as_bytes(), at).map_err(|error| errno(&error))?;
            }
        }
        Ok(all)
    }
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(system: u64) -> Counts {
        Counts { system, ..Counts::default() }
    }

    #[test]
    fn processes_see_each_other_and_the_dead_count_no_more() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("machine");
        // Each has a file description of its own, as processes have.
        let one = SharedMachine::join(&path, &[7]).unwrap();
        let two = SharedMachine::join(&path, &[7]).unwrap();
        one.change(&counts(5), |others| {
            assert_eq!(*others, Counts::default());
            Ok(())
        })
        .unwrap();
        assert_eq!(two.others().unwrap(), counts(5));
        assert_eq!(one.others().unwrap(), Counts::default());
        assert_eq!(two.change(&counts(9), |_| Err(Errno::ENOMEM)), Err(Errno::ENOMEM));
        assert_eq!(one.others().unwrap(), Counts::default(), "a change that does not fit is none");
        drop(one);
        assert_eq!(two.others().unwrap(), Counts::default());
        let three = SharedMachine::join(&path, &[7]).unwrap();
        assert_eq!(three.slot, 0, "the slot is free again");
        two.change(&counts(1), |_| Ok(())).unwrap();
        assert_eq!(three.others().unwrap(), counts(1));
    }

    #[test]
    fn other_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("machine");
        SharedMachine::join(&path, &[7]).unwrap();
        let other = SharedMachine::join(&path, &[8]).unwrap_err();
        assert!(other.to_string().contains("another profile"), "{other}");
        std::fs::write(&path, vec![b'x'; 4096]).unwrap();
        assert!(SharedMachine::join(&path, &[7]).unwrap_err().to_string().contains("no machine"));
        assert!(SharedMachine::join(directory.path(), &[7]).is_err());
    }
}
