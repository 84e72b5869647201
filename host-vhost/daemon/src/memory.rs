//! The guest's memory regions, and guest-physical addresses as places in their files.
//!
//! QEMU turns every map of the shared memory window into a region and sends it back to the device. Such a
//! region is not the guest's memory: no blob may lie in it, no queue is read from it, and no worker gets it.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;

use kfd_ipc::worker::Run;
use rustix::fs::{FileType, fstat};
use thiserror::Error;
use virtio_kfd_protocol::limits::MAX_BLOB_RUNS;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use crate::budget::PAGE;
use crate::chain::Ram;

/// Which file: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Of this file.
    pub fn of(file: &File) -> std::io::Result<Self> {
        let stat = fstat(file)?;
        Ok(FileId { device: stat.st_dev, inode: stat.st_ino })
    }
}

/// By what a region is known again when the VMM sends its table anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Identity {
    file: FileId,
    offset: u64,
    base: u64,
    size: u64,
}

/// An access beyond the end of a file ends the process that makes it (SIGBUS), so there may be none.
fn check_size(file: &File, identity: &Identity) -> std::io::Result<()> {
    let stat = fstat(file)?;
    let end = identity.offset.checked_add(identity.size);
    let reaches = end.is_some_and(|end| i64::try_from(end).is_ok_and(|end| end <= stat.st_size));
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && !reaches {
        return Err(std::io::Error::other(format!(
            "{:#x} bytes at {:#x} of a file of {:#x}",
            identity.size, identity.offset, stat.st_size
        )));
    }
    Ok(())
}

/// A region of the guest's memory.
#[derive(Clone, Debug)]
pub struct Region {
    /// Its id towards the workers; never reused.
    pub id: u32,
    /// Its file.
    pub file: Arc<File>,
    /// Where it begins in the file, in bytes.
    pub file_offset: u64,
    /// Guest-physical address.
    pub base: u64,
    /// Bytes.
    pub size: u64,
    identity: Identity,
}

impl Region {
    /// Whether it is memory of this file.
    pub fn is(&self, file: FileId) -> bool {
        self.identity.file == file
    }
}

/// What an update of the table changed.
#[derive(Debug, Default)]
pub struct Change {
    /// Regions that are new.
    pub added: Vec<Region>,
    /// Ids of regions that are gone.
    pub removed: Vec<u32>,
}

/// Why a list of guest memory is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MemoryError {
    /// Not whole pages.
    #[error("guest memory: {address:#x}, {len:#x} bytes, is not made of whole pages")]
    Alignment {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        len: u64,
    },
    /// Not in a region, or beyond the end of the address space.
    #[error("guest memory: {address:#x}, {len:#x} bytes, is not in the guest's memory")]
    Outside {
        /// Guest-physical address.
        address: u64,
        /// Bytes.
        len: u64,
    },
    /// Too scattered.
    #[error("guest memory: more than {MAX_BLOB_RUNS} separate runs")]
    Runs,
}

/// The guest's memory as the VMM last described it.
#[derive(Debug, Default)]
pub struct Memory {
    ram: Arc<Ram>,
    regions: Vec<Region>,
    own: HashSet<Identity>,
    last_id: u32,
}

impl Memory {
    /// The guest's memory, mapped.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// Its regions.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Takes over a new table. `is_own` says whether a file is one that this device mapped into the guest.
    pub fn update(&mut self, table: &Ram, is_own: impl Fn(FileId) -> bool) -> std::io::Result<Change> {
        let mut change = Change::default();
        let mut regions = Vec::new();
        let mut mapped = Vec::new();
        let mut own = HashSet::new();
        for region in table.iter() {
            // vhost-user regions always have a file; what has none cannot be shared with a worker.
            let Some(place) = region.file_offset() else { continue };
            let identity = Identity {
                file: FileId::of(place.file())?,
                offset: place.start(),
                base: region.start_addr().raw_value(),
                size: region.len(),
            };
            let known = self.regions.iter().find(|known| known.identity == identity);
            if known.is_none() && (self.own.contains(&identity) || is_own(identity.file)) {
                own.insert(identity);
                continue;
            }
            check_size(place.file(), &identity)?;
            let entry = match known {
                // The same memory by a new descriptor: the VMM may close the old one's file in its own time.
                Some(known) => Region { file: place.arc().clone(), ..known.clone() },
                None => {
                    self.last_id = self.last_id.wrapping_add(1);
                    let entry = Region {
                        id: self.last_id,
                        file: place.arc().clone(),
                        file_offset: identity.offset,
                        base: identity.base,
                        size: identity.size,
                        identity,
                    };
                    change.added.push(entry.clone());
                    entry
                }
            };
            regions.push(entry);
            mapped.extend(GuestRegionMmap::with_arc(region.get_mmap(), region.start_addr()));
        }
        let gone = |old: &&Region| !regions.iter().any(|new: &Region| new.id == old.id);
        change.removed = self.regions.iter().filter(gone).map(|region| region.id).collect();
        self.ram = Arc::new(if mapped.is_empty() {
            Ram::new()
        } else {
            Ram::from_regions(mapped).map_err(std::io::Error::other)?
        });
        self.regions = regions;
        self.own = own;
        Ok(change)
    }

    /// Whether a file is that of a region of the guest's memory.
    pub fn has_file(&self, file: FileId) -> bool {
        self.regions.iter().any(|region| region.identity.file == file)
    }

    /// Whether the VMM's table has memory of this file that the device mapped into the guest itself.
    pub fn has_own(&self, file: FileId) -> bool {
        self.own.iter().any(|identity| identity.file == file)
    }

    /// How much of what the device mapped into the guest itself the VMM's table has, by file.
    pub fn own_by_file(&self) -> HashMap<FileId, usize> {
        let mut counts: HashMap<FileId, usize> = HashMap::new();
        for identity in &self.own {
            let count = counts.entry(identity.file).or_default();
            *count = count.saturating_add(1);
        }
        counts
    }

    /// Whether the VMM's table has anything that the device mapped into the guest itself.
    pub fn has_any_own(&self) -> bool {
        !self.own.is_empty()
    }

    /// The region that holds this address.
    fn find(&self, address: u64) -> Option<&Region> {
        // The table is in the order of the addresses.
        let after = self.regions.partition_point(|region| region.base <= address);
        let region = self.regions.get(after.checked_sub(1)?)?;
        (address.checked_sub(region.base)? < region.size).then_some(region)
    }

    /// Writes to a place in a region. `false` if it is not there.
    pub fn write(&self, region: u32, offset: u64, bytes: &[u8]) -> bool {
        let Some(region) = self.regions.iter().find(|known| known.id == region) else { return false };
        let end = offset.checked_add(bytes.len() as u64);
        let address = region.base.checked_add(offset);
        match (end, address) {
            (Some(end), Some(address)) if end <= region.size => {
                self.ram.write_slice(bytes, GuestAddress(address)).is_ok()
            }
            _ => false,
        }
    }
}

/// A run of a blob and where in the blob it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedRun {
    /// Offset in the blob in bytes.
    pub start: u64,
    /// The run.
    pub run: Run,
}

/// Collects a blob's list, entry by entry: checks each, merges neighbours, and never holds more than
/// [`MAX_BLOB_RUNS`] runs.
#[derive(Debug, Default)]
pub struct RunList {
    runs: Vec<PlacedRun>,
    total: u64,
}

impl RunList {
    /// Adds an entry.
    pub fn push(&mut self, memory: &Memory, address: u64, len: u64) -> Result<(), MemoryError> {
        if len == 0 || !len.is_multiple_of(PAGE) || !address.is_multiple_of(PAGE) {
            return Err(MemoryError::Alignment { address, len });
        }
        let outside = MemoryError::Outside { address, len };
        let end = address.checked_add(len).ok_or(outside)?;
        let mut at = address;
        while at < end {
            // An entry may go over from one region into the next if both are the guest's memory.
            let region = memory.find(at).ok_or(outside)?;
            let offset = at.saturating_sub(region.base);
            let piece = end.saturating_sub(at).min(region.size.saturating_sub(offset));
            if piece == 0 || !piece.is_multiple_of(PAGE) {
                return Err(outside);
            }
            self.append(Run { region: region.id, offset, len: piece })?;
            at = at.checked_add(piece).ok_or(outside)?;
        }
        Ok(())
    }

    fn append(&mut self, run: Run) -> Result<(), MemoryError> {
        let start = self.total;
        let total = self.total.checked_add(run.len).ok_or(MemoryError::Runs)?;
        let full = self.runs.len() >= MAX_BLOB_RUNS;
        match self.runs.last_mut().map(|placed| &mut placed.run) {
            Some(last)
                if last.region == run.region && last.offset.checked_add(last.len) == Some(run.offset) =>
            {
                last.len = last.len.saturating_add(run.len);
            }
            _ if full => return Err(MemoryError::Runs),
            _ => self.runs.push(PlacedRun { start, run }),
        }
        self.total = total;
        Ok(())
    }

    /// Bytes of all runs.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The runs.
    pub fn into_runs(self) -> Vec<PlacedRun> {
        self.runs
    }
}

/// Writes `bytes` at `offset` of a blob with these runs. `false` if they do not reach that far.
pub fn write_blob(memory: &Memory, runs: &[PlacedRun], offset: u64, bytes: &[u8]) -> bool {
    let mut rest = bytes;
    let mut at = offset;
    let first = runs.partition_point(|placed| placed.start <= at).saturating_sub(1);
    for placed in runs.get(first..).unwrap_or(&[]) {
        if rest.is_empty() {
            break;
        }
        let Some(inside) = at.checked_sub(placed.start) else { return false };
        let room = usize::try_from(placed.run.len.saturating_sub(inside)).unwrap_or(usize::MAX);
        let (now, later) = rest.split_at_checked(room).unwrap_or((rest, &[]));
        let Some(place) = placed.run.offset.checked_add(inside) else { return false };
        if !memory.write(placed.run.region, place, now) {
            return false;
        }
        at = at.saturating_add(now.len() as u64);
        rest = later;
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use vm_memory::FileOffset;

    use super::*;

    fn file(bytes: u64) -> Arc<File> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        Arc::new(file)
    }

    fn table(parts: &[(u64, u64, &Arc<File>, u64)]) -> Ram {
        Ram::from_ranges_with_files(parts.iter().map(|(base, size, file, offset)| {
            (GuestAddress(*base), *size as usize, Some(FileOffset::from_arc((*file).clone(), *offset)))
        }))
        .unwrap()
    }

    fn never(_: FileId) -> bool {
        false
    }

    #[test]
    fn a_table_that_comes_again_changes_nothing_and_a_new_file_changes_all() {
        let (a, b) = (file(1 << 20), file(1 << 20));
        let mut memory = Memory::default();
        let first = memory.update(&table(&[(0, 1 << 20, &a, 0)]), never).unwrap();
        assert_eq!((first.added.len(), first.removed.len()), (1, 0));
        let again = memory.update(&table(&[(0, 1 << 20, &a, 0)]), never).unwrap();
        assert_eq!((again.added.len(), again.removed.len()), (0, 0));
        let other = memory.update(&table(&[(0, 1 << 20, &b, 0)]), never).unwrap();
        assert_eq!((other.added.len(), other.removed), (1, vec![1]));
        assert_eq!(other.added[0].id, 2, "ids are not reused");
    }

    #[test]
    fn a_region_ends_within_its_file() {
        let short = file(1 << 20);
        let mut memory = Memory::default();
        // Made while the file was large enough, as a hostile VMM would; the map itself succeeds in any case.
        let table = table(&[(0, 1 << 20, &short, 0)]);
        short.set_len(1 << 19).unwrap();
        let error = memory.update(&table, never).unwrap_err();
        assert_eq!(error.to_string(), "0x100000 bytes at 0x0 of a file of 0x80000");
        assert!(memory.regions().is_empty());
    }

    #[test]
    fn what_the_device_mapped_itself_is_not_guest_memory() {
        let (ram, vram) = (file(1 << 20), file(1 << 20));
        let vram_id = FileId::of(&vram).unwrap();
        let parts = [(0, 1 << 20, &ram, 0), (1 << 32, 1 << 20, &vram, 0)];
        let mut memory = Memory::default();
        let change = memory.update(&table(&parts), |file| file == vram_id).unwrap();
        assert_eq!(change.added.len(), 1);
        assert_eq!(memory.ram().num_regions(), 1);
        assert!(RunList::default().push(&memory, 1 << 32, 4096).is_err());
        // After the unmap the file is not known any more, but the region is still the same one.
        let change = memory.update(&table(&parts), never).unwrap();
        assert!(change.added.is_empty());
    }

    #[test]
    fn runs_are_checked_and_merged() {
        let ram = file(4 << 20);
        // Adjacent in the guest but not in the file, then a hole.
        let mut memory = Memory::default();
        memory.update(&table(&[(0, 1 << 20, &ram, 2 << 20), (1 << 20, 1 << 20, &ram, 0)]), never).unwrap();
        let mut list = RunList::default();
        list.push(&memory, 0xff000, 0x2000).unwrap();
        list.push(&memory, 0x101000, 0x1000).unwrap();
        assert_eq!(list.total(), 0x3000);
        let runs = list.into_runs();
        assert_eq!(
            runs,
            [
                PlacedRun { start: 0, run: Run { region: 1, offset: 0xff000, len: 0x1000 } },
                PlacedRun { start: 0x1000, run: Run { region: 2, offset: 0, len: 0x2000 } },
            ]
        );
        assert!(write_blob(&memory, &runs, 0xffe, b"over the edge"));
        let mut text = [0; 13];
        memory.ram().read_slice(&mut text, GuestAddress(0xffffe)).unwrap();
        assert_eq!(&text, b"over the edge");
        assert!(!write_blob(&memory, &runs, 0x2ffe, b"over the edge"));

        for (address, len) in
            [(0x1ff000, 0x2000), (u64::MAX - 0xfff, 0x1000), (1 << 40, 0x1000), (u64::MAX - 0xfff, 0x2000)]
        {
            let error = RunList::default().push(&memory, address, len).unwrap_err();
            assert!(matches!(error, MemoryError::Outside { .. }), "{address:#x} {len:#x}");
        }
        for (address, len) in [(0x10, 0x1000), (0x1000, 0x10), (0x1000, 0)] {
            let error = RunList::default().push(&memory, address, len).unwrap_err();
            assert!(matches!(error, MemoryError::Alignment { .. }), "{address:#x} {len:#x}");
        }
    }

    #[test]
    fn a_scattered_list_ends_at_the_limit() {
        let ram = file(1 << 20);
        let mut memory = Memory::default();
        memory.update(&table(&[(0, 1 << 20, &ram, 0)]), never).unwrap();
        let mut list = RunList::default();
        for index in 0..MAX_BLOB_RUNS as u64 {
            list.push(&memory, (index % 2) * 0x8000, 0x1000).unwrap();
        }
        assert_eq!(list.push(&memory, 0x10000, 0x1000), Err(MemoryError::Runs));
    }
}
