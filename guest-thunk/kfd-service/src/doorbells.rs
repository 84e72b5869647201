//! Doorbells: guest memory that stands for them, of which the host passes on what is stored there.
//!
//! While they are still the program's next store traps, so that the host can sleep ([`guest_thunk::thunk::queue::trap`]). The
//! program may unmap, move and map doorbells without a word, so the kernel is asked where they are.
#![allow(unsafe_code, reason = "a first value of memory that nobody else knows of yet")]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use guest_thunk::client::Client;
use guest_thunk::thunk::adopt::maps::{Area, FilePlace};
use guest_thunk::thunk::adopt::proc::MAPS;
use guest_thunk::thunk::adopt::shared::shared_files;
use guest_thunk::thunk::lock::lock;
use guest_thunk::thunk::memory::address::{Reservation, page_size};
use guest_thunk::thunk::queue::trap::{Slice, Watched, Watcher};
use guest_thunk::thunk::refusal::{Level, say};
use guest_thunk::thunk::smi::Connected;
use guest_thunk::transport::Blob;
use kfd_abi::mmap;
use kfd_seam::{Bypass, MapRequest, Result};
use nix::errno::Errno;
use virtio_kfd_protocol::calls::DoorbellPage;
use virtio_kfd_protocol::{DOORBELL_SLICE_BYTES, DoorbellPageRequest, GpuId, GuestVa};

use crate::buffers::map_blob;
use crate::failure::{errno, transport};
use crate::fresh::keep_from_children;

/// The doorbells of a GPU.
struct Own {
    blob: Arc<dyn Blob>,
    /// Where this library has them. It never rings there.
    home: Reservation,
    /// Which bytes of which file they are; none where that is not known.
    place: Option<FilePlace>,
}

/// The doorbells of all GPUs that have been asked for them. They stay, as those that KFD maps.
pub struct Doorbells {
    client: Arc<Client>,
    slices: Mutex<BTreeMap<u32, Own>>,
    watcher: Mutex<Watch>,
}

/// Whether doorbells trap.
enum Watch {
    /// The program has mapped none.
    NotYet,
    Running(Watcher),
    /// This process cannot.
    Never,
}

impl Doorbells {
    /// None yet.
    pub fn new(client: &Arc<Client>) -> Arc<Self> {
        let watcher = Mutex::new(Watch::NotYet);
        Arc::new(Doorbells { client: Arc::clone(client), slices: Mutex::default(), watcher })
    }

    /// Makes those of a GPU and shows them to the host, if that has not been done.
    pub fn make(&self, gpu_id: GpuId) -> Result<()> {
        let mut slices = lock(&self.slices);
        if slices.contains_key(&gpu_id.0) {
            return Ok(());
        }
        let size = DOORBELL_SLICE_BYTES.next_multiple_of(page_size());
        let failed = |error: io::Error| error.raw_os_error().map_or(Errno::ENOMEM, Errno::from_raw);
        let home = Reservation::new(size, page_size(), 0, (0, u64::MAX)).map_err(failed)?;
        let blob: Arc<dyn Blob> = Arc::from(self.client.guest_memory(size).map_err(errno)?);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        blob.map_fixed(GuestVa(home.start()), size, protection).map_err(transport)?;
        home.keep_from_children();
        quiet(&home);
        let request = DoorbellPageRequest { gpu_id, resource: blob.resource(), offset: 0 };
        self.client.call::<DoorbellPage>(&request, &[], 0).map_err(errno)?;
        // It is looked at again and again: a program that counts its descriptors shall not find one now and then.
        if let Err(error) = MAPS.keep() {
            say(Level::Info, || format!("/proc/self/maps: {error}"));
        }
        let at = home.start();
        let found = shared_files(&(at..at.saturating_add(size))).ok();
        let place = found.and_then(|areas| Some(areas.first()?.file_at(at))).filter(|place| place.inode != 0);
        slices.insert(gpu_id.0, Own { blob, home, place });
        Ok(())
    }

    /// Serves an `mmap` of them.
    pub fn map(self: &Arc<Self>, request: &MapRequest, address: u64) -> Result<u64> {
        let gpu_id = mmap::gpu_id(request.offset);
        let slices = lock(&self.slices);
        // KFD's numbers have 16 bits.
        let slice = slices.iter().find(|(id, _)| *id & 0xffff == gpu_id).map(|(_, slice)| slice);
        let slice = slice.ok_or(Errno::EINVAL)?;
        if request.length != DOORBELL_SLICE_BYTES || request.flags & libc::MAP_SHARED == 0 {
            return Err(Errno::EINVAL);
        }
        let size = slice.blob.size();
        let at = map_blob(&*slice.blob, request, address, size)?;
        // kfd_doorbell_mmap: VM_DONTCOPY.
        keep_from_children(at, size);
        // Within the lock: the host must not sleep while there are new ones that do not trap.
        self.watch();
        Ok(at)
    }

    /// Has the doorbells watched from now on, those of now among them.
    fn watch(self: &Arc<Self>) {
        let mut watch = lock(&self.watcher);
        match &mut *watch {
            Watch::Running(watcher) => watcher.begin_anew(),
            Watch::Never => {}
            Watch::NotYet => {
                *watch = Watcher::start(self).map_or_else(
                    |error| {
                        say(Level::Info, || {
                            format!("doorbells cannot trap, the host looks at them: {error}")
                        });
                        Watch::Never
                    },
                    Watch::Running,
                );
            }
        }
    }
}

impl Connected for Doorbells {
    fn client(&self) -> &Client {
        &self.client
    }
}

/// A mapping of a GPU's doorbells that the program has.
struct Mapped {
    blob: Arc<dyn Blob>,
    at: u64,
    place: FilePlace,
}

impl Slice for Mapped {
    fn start(&self) -> u64 {
        self.at
    }

    fn size(&self) -> u64 {
        self.blob.size()
    }

    fn map_again(&self, address: u64) -> io::Result<()> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        self.blob.map_fixed(GuestVa(address), self.blob.size(), protection).map_err(io::Error::other)
    }

    fn may_go(&self) -> bool {
        true
    }

    fn is_there(&self) -> bool {
        let _bypass = Bypass::enter();
        let range = self.at..self.at.saturating_add(self.blob.size());
        let found = shared_files(&range).ok().and_then(|areas| places(&areas, &self.place, self.blob.size()));
        found.is_some_and(|found| found == [self.at])
    }
}

impl Watched for Doorbells {
    fn with_slices<R>(&self, act: impl FnOnce(Vec<Arc<dyn Slice>>) -> R) -> Option<R> {
        let slices = lock(&self.slices);
        let all = {
            let _bypass = Bypass::enter();
            shared_files(&(0..u64::MAX)).ok()?
        };
        let mut mapped: Vec<Arc<dyn Slice>> = Vec::new();
        for Own { blob, home, place } in slices.values() {
            let place = place.as_ref()?;
            for at in places(&all, place, blob.size())? {
                if at != home.start() {
                    let place = place.clone();
                    mapped.push(Arc::new(Mapped { blob: Arc::clone(blob), at, place }));
                }
            }
        }
        Some(act(mapped))
    }
}

/// Where a file's bytes from `place` on are mapped, all `size` of them. None if some of them are mapped without the others.
fn places(areas: &[Area], place: &FilePlace, size: u64) -> Option<Vec<u64>> {
    let bytes: Range<u64> = place.offset..place.offset.checked_add(size)?;
    let mut found = Vec::new();
    for area in areas {
        if (&area.file.device, area.file.inode) != (&place.device, place.inode) {
            continue;
        }
        let end = area.file.offset.checked_add(area.end.checked_sub(area.start)?)?;
        if end <= bytes.start || area.file.offset >= bytes.end {
            continue;
        }
        // Neighbours of one file may be one mapping.
        let before = bytes.start.checked_sub(area.file.offset)?;
        if end < bytes.end {
            return None;
        }
        found.push(area.start.checked_add(before)?);
    }
    Some(found)
}

/// Fills doorbells with a value that no queue rings with.
fn quiet(home: &Reservation) {
    let (Ok(start), Ok(size)) = (usize::try_from(home.start()), usize::try_from(home.size())) else { return };
    // SAFETY: the range is the reservation's, a blob was mapped there for writing, and nobody else knows of it yet.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(start).write_bytes(0xff, size) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbells_are_found_where_they_are_mapped_whole() {
        let file = |inode, offset| FilePlace { device: "00:05".into(), inode, offset };
        let area = |start: u64, pages: u64, file: FilePlace| Area {
            start,
            end: start + pages * 4096,
            permissions: "rw-s".into(),
            file,
            name: String::new(),
            flags: Vec::new(),
            key: 0,
        };
        let place = file(7, 0x10000);
        let of = |areas: &[Area]| places(areas, &place, 8192);
        assert_eq!(of(&[]), Some(vec![]));
        let (one, two) = (area(0x5000, 2, file(7, 0x10000)), area(0x9000, 2, file(7, 0x10000)));
        assert_eq!(of(&[one, two]), Some(vec![0x5000, 0x9000]));
        assert_eq!(of(&[area(0x5000, 4, file(7, 0xf000))]), Some(vec![0x6000]), "part of a larger mapping");
        let others = [
            area(0x5000, 2, file(8, 0x10000)),
            area(0x9000, 2, file(7, 0x12000)),
            area(0x5000, 2, file(0, 0)),
        ];
        assert_eq!(of(&others), Some(vec![]));
        assert_eq!(of(&[area(0x5000, 1, file(7, 0x10000))]), None, "half of them");
        assert_eq!(of(&[area(0x5000, 1, file(7, 0x11000))]), None);
    }
}
