//! Memory of the application, taken over in place: its pages are replaced by those of a GUEST blob at the same addresses,
//! which the host can give to GPUs, and put back when the last registration ends.
//!
//! This is done only where the user asks for it (`VIRTIO_KFD_REGISTER=adopt`), since the memory is not quite ordinary
//! meanwhile: docs/limits.md has the contract.
//!
//! | step | how |
//! |---|---|
//! | vet | the range is private, anonymous, of one character, not the main thread's stack ([`maps`]) |
//! | prepare | a blob, mapped and populated at a staging address |
//! | hold | writers wait, by userfaultfd ([`fault`]) or since all other threads are stopped ([`stop`]); system calls are not lost |
//! | swap | the content is copied, and the staging mapping moved over the range ([`pages`]) |
//! | let go | the blob's handle is closed: from now on the mapping alone keeps it, so what the application unmaps is gone |
//! | give back | threads stopped, the blob's mapping moved away, fresh private memory in its place, the content copied, access as the application had set it |
//!
//! With `VIRTIO_KFD_REGISTER=adopt-variables` stacks and the data of programs are adopted as well. A thread cannot exchange the
//! pages under itself, so the helper that stops threads does that, of all memory, while the calling thread is stopped too
//! ([`variables`]); and a child of `fork` gets its copies from the same helper before it runs ([`child`]).
//!
//! A page is adopted once; several registrations may use it. So a registration lies in one or more segments, each
//! with its own blob. The table is the process's, not the connection's, for addresses are the process's.

mod child;
mod fault;
pub(super) mod fork;
pub mod maps;
mod pages;
mod patience;
mod plan;
pub mod proc;
mod rseq;
pub mod shared;
mod signals;
mod stop;
mod swap;
mod syscall;
mod tasks;
mod tracer;
mod variables;

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use hsakmt_abi::memory::HsaMemFlags;
use hsakmt_abi::status::HsakmtStatus;
use kfd_abi::memory::AllocFlags;
use virtio_kfd_protocol::{GpuId, ResourceId};

use self::maps::{Area, Character, FilePlace, Fit, Unfit, Vetted};
use self::stop::Stopped;
use self::variables::Kept;
use super::Thunk;
use super::lock::lock;
use super::memory::address::page_size;
use super::memory::registered::{Piece, Registered};
use super::refusal::{Level, Outcome, Refusal, say};
use super::settings::Registration;
use crate::client::Client;

/// Bytes of the largest segment. Larger ranges have several, each exchanged by itself: writers wait only for one, and no
/// blob is larger than a command can list.
const MAX_SEGMENT: u64 = 256 << 20;

/// A range of the process that lies in a blob.
struct Segment {
    range: Range<u64>,
    resource: ResourceId,
    /// Where the transport needs it, what keeps the blob. None when it has been given back.
    blob: Option<Box<dyn Any + Send + Sync>>,
    /// What is mapped where, relative to the start; to see whether it still is.
    parts: Vec<(Range<u64>, FilePlace)>,
    character: Character,
    /// What was there before, where it is kept.
    kept: Option<Kept>,
    /// Registrations in it.
    uses: usize,
}

/// All segments of the process.
#[derive(Default)]
struct Table {
    segments: BTreeMap<u64, Segment>,
    /// By start: those where the application has not mapped something else.
    current: BTreeMap<u64, u64>,
    next: u64,
}

static TABLE: Mutex<Table> =
    Mutex::new(Table { segments: BTreeMap::new(), current: BTreeMap::new(), next: 0 });

/// Addresses that have been adopted, and what of them this library has taken from the kernel since. Locked for look-ups only.
#[derive(Default)]
struct Overtaken {
    /// First address and number of a segment, to its end.
    segments: BTreeMap<(u64, u64), u64>,
    taken: Vec<Range<u64>>,
}

static OVERTAKEN: Mutex<Overtaken> = Mutex::new(Overtaken { segments: BTreeMap::new(), taken: Vec::new() });

/// Whether anything was ever adopted: before, a fork does not wait for the lock above, and so nobody may take it.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// Told of every range that this library takes from the kernel: where a segment was, the application has unmapped it, and
/// what is mapped there next must not be taken for the segment's.
pub fn overtake(range: Range<u64>) {
    if !IN_USE.load(Ordering::Acquire) {
        return;
    }
    let mut overtaken = lock(&OVERTAKEN);
    let from = range.start.saturating_sub(MAX_SEGMENT);
    let mut near = overtaken.segments.range((from, 0)..(range.end, 0));
    if near.any(|(_, end)| *end > range.start) {
        overtaken.taken.push(range);
    }
}

/// Keeps a registration's segments.
pub struct Keep {
    ids: Vec<u64>,
}

impl Drop for Keep {
    fn drop(&mut self) {
        let mut table = lock(&TABLE);
        for id in &self.ids {
            if let Some(segment) = table.segments.get_mut(id) {
                segment.uses = segment.uses.saturating_sub(1);
            }
        }
        table.give_back_unused();
    }
}

/// `hsaKmtRegisterMemory*`: for these GPUs, or for all where the list is empty.
pub fn register(thunk: &Thunk, address: u64, size: u64, gpus: &[GpuId], flags: Kind) -> Outcome<()> {
    let replaced = thunk.memory.replaced(address, size, gpus, is_adopted)?;
    if replaced.is_none() && thunk.memory.register_again(address, size, gpus)? {
        return Ok(());
    }
    let registration = thunk.settings.registration;
    if registration == Registration::Refuse {
        return Err(refuse());
    }
    let snapshot = thunk.snapshot()?;
    let gpu = snapshot.gpus.first().map(|gpu| gpu.gpu_id);
    let gpu = gpu.ok_or_else(|| Refusal::error("there is no GPU to register memory for"))?;
    let (pieces, keep) = adopt(&thunk.client, address, size, registration)?;
    let registered = Registered { address, size, pieces, gpu, flags: flags.kfd(), keep: Box::new(keep) };
    let before = match replaced {
        Some(replaced) => thunk.memory.end_replaced(&thunk.client, replaced)?,
        None => 0,
    };
    thunk.memory.insert_registered(thunk.host(&snapshot), registered, gpus, flags.mem_flags())?;
    // Each registration is to be ended, also those of the memory that was there before.
    for _ in 0..before {
        thunk.memory.register_again(address, size, gpus)?;
    }
    Ok(())
}

/// Whether all pages of a registration are still in its blobs: the application may have mapped something else there.
fn is_adopted(registered: &Registered) -> Outcome<bool> {
    let Some(keep) = registered.keep.downcast_ref::<Keep>() else { return Ok(true) };
    let page = page_size();
    let start = registered.address.saturating_sub(registered.address.checked_rem(page).unwrap_or(0));
    let range = start..start.saturating_add(registered.size_in_pages().unwrap_or(0));
    let mut table = lock(&TABLE);
    table.settle_overtaken();
    let areas = maps::areas(&range).map_err(|error| system("/proc/self/maps", &error))?;
    let segments = keep.ids.iter().filter_map(|id| table.segments.get(id));
    let length = |piece: Range<u64>| piece.end.saturating_sub(piece.start);
    let intact: u64 = segments.map(|segment| segment.intact(&areas, &range).map(length).sum::<u64>()).sum();
    Ok(intact == length(range))
}

/// How GPUs see the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Coarse grained: coherent where a kernel begins and ends.
    Coarse,
    /// Fine grained.
    Fine,
    /// Fine grained, and coherent with other devices.
    Extended,
}

impl Kind {
    /// KFD's flags, as AMD's library sets them (`fmm_register_user_memory`).
    fn kfd(self) -> AllocFlags {
        let flags = AllocFlags::USERPTR | AllocFlags::WRITABLE | AllocFlags::EXECUTABLE;
        match self {
            Kind::Coarse => flags,
            Kind::Fine => flags | AllocFlags::COHERENT,
            Kind::Extended => flags | AllocFlags::COHERENT | AllocFlags::EXT_COHERENT,
        }
    }

    /// The flags that a query gives, as AMD's library makes them out of KFD's (`fmm_translate_ioc_to_hsa_flags`).
    fn mem_flags(self) -> HsaMemFlags {
        let none = HsaMemFlags(0);
        match self {
            Kind::Coarse => none.with(HsaMemFlags::COARSE_GRAIN, 1),
            Kind::Fine => none,
            Kind::Extended => none.with(HsaMemFlags::EXTENDED_COHERENT, 1),
        }
    }
}

/// By default the memory is not taken, and the status makes the runtime copy in stages. The option is named once:
/// a runtime asks twice for every large copy.
fn refuse() -> Refusal {
    static NAMED: AtomicBool = AtomicBool::new(false);
    if !NAMED.swap(true, Ordering::Relaxed) {
        say(Level::Warning, || {
            "memory of the application is not given to GPUs, so that copies are staged and hipHostRegister fails; \
             VIRTIO_KFD_REGISTER=adopt permits it, at a price (docs/limits.md, \"Memory that the application owns\")"
                .to_owned()
        });
    }
    let why = "the application's own memory is not given to GPUs in a guest unless VIRTIO_KFD_REGISTER=adopt is set";
    Refusal::new(HsakmtStatus::NOT_SUPPORTED, why)
}

fn unfit(unfit: Unfit) -> Refusal {
    match unfit {
        // As the kernel's EFAULT.
        Unfit::Hole(at) => Refusal::error(format!("nothing is mapped at {at:#x}")),
        Unfit::Kind(at, what) => Refusal::new(
            HsakmtStatus::NOT_SUPPORTED,
            format!("the memory at {at:#x} cannot be adopted: {what}"),
        ),
    }
}

fn system(what: &str, error: &std::io::Error) -> Refusal {
    Refusal::error(format!("{what}: {error}"))
}

/// Whether other threads can be stopped; without that nothing could be given back. Under the table's lock.
fn check_stop() -> Outcome<()> {
    static CHECKED: AtomicBool = AtomicBool::new(false);
    if CHECKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let checked = Stopped::new(&(0..0)).map(drop);
    CHECKED.store(checked.is_ok(), Ordering::Relaxed);
    checked.map_err(|why| {
        let why =
            format!("the process's threads cannot be stopped, so that its memory cannot be adopted: {why}");
        Refusal::new(HsakmtStatus::NOT_SUPPORTED, why)
    })
}

/// Adopts the pages of a range that are not adopted yet.
fn adopt(client: &Client, address: u64, size: u64, how: Registration) -> Outcome<(Vec<Piece>, Keep)> {
    let page = page_size();
    let start = address.checked_sub(address.checked_rem(page).unwrap_or(0));
    let end = address.checked_add(size).and_then(|end| end.checked_next_multiple_of(page));
    let range = match (start, end) {
        (Some(start), Some(end)) if size > 0 && start > 0 => start..end,
        _ => return Err(Refusal::error(format!("{size:#x} bytes at {address:#x} are no range of memory"))),
    };
    let mut table = lock(&TABLE);
    proc::MAPS.keep().map_err(|error| system("/proc/self/maps", &error))?;
    proc::TASKS.keep().map_err(|error| system("/proc/self/task", &error))?;
    check_stop()?;
    table.give_back_unused();
    table.forget_replaced(&range)?;
    // Everything is vetted before anything is done. As in the kernel a hole anywhere comes first.
    if let Some(hole) = maps::hole(&range).map_err(|error| system("/proc/self/maps", &error))? {
        return Err(unfit(Unfit::Hole(hole)));
    }
    let missing = table.missing(&range);
    let variables = how == Registration::AdoptVariables;
    let mut vetted = Vec::new();
    for gap in &missing {
        vetted.push(if variables { variables::vet(gap)? } else { vet(gap)? });
    }
    for (gap, vetted) in missing.into_iter().zip(vetted) {
        let adopted = if variables {
            variables::adopt(client, gap, vetted)
        } else {
            swap::adopt(client, gap, vetted.character)
        };
        match adopted {
            Ok(segment) => table.insert(segment),
            Err(refusal) => {
                table.give_back_unused();
                return Err(refusal);
            }
        }
    }
    Ok(table.take(&range))
}

/// That a range is ordinary memory.
fn vet(range: &Range<u64>) -> Outcome<Vetted> {
    if swap::is_in_use_here(range) {
        return Err(unfit(Unfit::Kind(range.start, "it is the calling thread's own".to_owned())));
    }
    let vetted = maps::vet(range, Fit::Ordinary).map_err(|error| system("/proc/self/smaps", &error))?;
    vetted.map_err(unfit)
}

impl Table {
    fn insert(&mut self, segment: Segment) {
        let id = self.next;
        self.next = self.next.saturating_add(1);
        // What the application has unmapped is gone, whatever lies there now. The kernel gives the next blob the same place
        // of the device's file as soon as one ends, so this one may look like an older one.
        for older in self.segments.values_mut() {
            if older.parts.iter().any(|part| segment.parts.iter().any(|new| overlap(part, new))) {
                older.parts.clear();
            }
            older.lose_at(&segment.range);
        }
        IN_USE.store(true, Ordering::Release);
        lock(&OVERTAKEN).segments.insert((segment.range.start, id), segment.range.end);
        self.current.insert(segment.range.start, id);
        self.segments.insert(id, segment);
    }

    /// Segments that a range touches, in order.
    fn touched(&self, range: &Range<u64>) -> Vec<u64> {
        let before = self.current.range(..range.start).next_back();
        let inside = self.current.range(range.clone());
        let all = before.into_iter().chain(inside).map(|(_, id)| *id);
        let touches = |id: &u64| {
            self.segments.get(id).is_some_and(|it| it.range.start < range.end && range.start < it.range.end)
        };
        all.filter(touches).collect()
    }

    /// What of a range is in no segment, in pieces of at most [`MAX_SEGMENT`].
    fn missing(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut next = range.start;
        let touched = self.touched(range);
        let taken = touched.iter().filter_map(|id| self.segments.get(id)).map(|it| it.range.clone());
        for segment in taken.chain(std::iter::once(range.end..range.end)) {
            while next < segment.start {
                let end = segment.start.min(next.saturating_add(MAX_SEGMENT));
                missing.push(next..end);
                next = end;
            }
            next = next.max(segment.end);
        }
        missing
    }

    /// The pieces of a range that lies in segments, each of which has one use more.
    fn take(&mut self, range: &Range<u64>) -> (Vec<Piece>, Keep) {
        let ids = self.touched(range);
        let mut pieces = Vec::new();
        for id in &ids {
            let Some(segment) = self.segments.get_mut(id) else { continue };
            segment.uses = segment.uses.saturating_add(1);
            let start = range.start.max(segment.range.start);
            pieces.push(Piece {
                resource: segment.resource,
                offset: start.saturating_sub(segment.range.start),
                size: range.end.min(segment.range.end).saturating_sub(start),
            });
        }
        (pieces, Keep { ids })
    }

    /// Takes segments out of the way that the application has since mapped something else over: what is there now is to
    /// be adopted anew.
    fn forget_replaced(&mut self, range: &Range<u64>) -> Outcome<()> {
        self.settle_overtaken();
        let touched = self.touched(range);
        if touched.is_empty() {
            return Ok(());
        }
        let areas = maps::areas(range).map_err(|error| system("/proc/self/maps", &error))?;
        for id in touched {
            let Some(segment) = self.segments.get(&id) else { continue };
            let wanted = segment.range.start.max(range.start)..segment.range.end.min(range.end);
            let intact: u64 = segment.intact(&areas, &wanted).map(|it| it.end.saturating_sub(it.start)).sum();
            if intact != wanted.end.saturating_sub(wanted.start) {
                let start = segment.range.start;
                self.current.remove(&start);
            }
        }
        Ok(())
    }

    /// What this library has mapped over since is not the segment's any more.
    fn settle_overtaken(&mut self) {
        let ranges = std::mem::take(&mut lock(&OVERTAKEN).taken);
        for range in ranges {
            for segment in self.segments.values_mut() {
                segment.lose_at(&range);
            }
        }
    }

    fn give_back_unused(&mut self) {
        let unused: Vec<u64> =
            self.segments.iter().filter(|(_, it)| it.uses == 0).map(|(id, _)| *id).collect();
        if unused.is_empty() {
            return;
        }
        self.settle_overtaken();
        for id in unused {
            let Some(mut segment) = self.segments.remove(&id) else { continue };
            let start = segment.range.start;
            match swap::give_back(&mut segment) {
                Ok(()) => {
                    lock(&OVERTAKEN).segments.remove(&(start, id));
                    if self.current.get(&start) == Some(&id) {
                        self.current.remove(&start);
                    }
                }
                // It stays as it is, and whole; the next call tries again.
                Err(why) => {
                    say(Level::Warning, || format!("memory at {start:#x} stays adopted for now: {why}"));
                    self.segments.insert(id, segment);
                }
            }
        }
    }
}

/// Whether two parts of segments have bytes of the same file in common.
fn overlap((part, place): &(Range<u64>, FilePlace), (other_part, other): &(Range<u64>, FilePlace)) -> bool {
    let length = |part: &Range<u64>| part.end.saturating_sub(part.start);
    place.inode == other.inode
        && place.offset < other.offset.saturating_add(length(other_part))
        && other.offset < place.offset.saturating_add(length(part))
        && place.device == other.device
}

impl Segment {
    /// The pieces of a range where the segment is still mapped as it was. The areas are in order.
    fn intact<'a>(
        &'a self,
        areas: &'a [Area],
        range: &'a Range<u64>,
    ) -> impl Iterator<Item = Range<u64>> + 'a {
        self.intact_areas(areas, range).map(|(piece, _)| piece)
    }

    /// The same with what the application may do with each: it may have taken some of that away.
    fn intact_areas<'a>(
        &'a self,
        areas: &'a [Area],
        range: &'a Range<u64>,
    ) -> impl Iterator<Item = (Range<u64>, i32)> + 'a {
        self.parts.iter().flat_map(move |(part, place)| {
            let start = self.range.start.saturating_add(part.start).max(range.start);
            let end = self.range.start.saturating_add(part.end).min(range.end);
            let first = areas.partition_point(|area| area.end <= start);
            let touched = areas.iter().skip(first).take_while(move |area| area.start < end);
            touched.filter_map(move |area| {
                let piece = area.within(&(start..end));
                let at = piece.start.checked_sub(self.range.start)?.checked_sub(part.start)?;
                (piece.start < piece.end && area.file_at(piece.start) == place.after(at))
                    .then(|| (piece, area.access()))
            })
        })
    }

    /// What lies at the start of an intact piece.
    fn place_of(&self, piece: &Range<u64>) -> Option<FilePlace> {
        let at = piece.start.checked_sub(self.range.start)?;
        let (part, place) = self.parts.iter().find(|(part, _)| part.contains(&at))?;
        Some(place.after(at.saturating_sub(part.start)))
    }

    /// Forgets that what of it lies at these addresses is mapped.
    fn lose_at(&mut self, range: &Range<u64>) {
        let start = self.range.start;
        if start < range.end && range.start < self.range.end {
            self.lose(&(range.start.saturating_sub(start)..range.end.saturating_sub(start)));
        }
    }

    /// Forgets that a piece of it is mapped.
    fn lose(&mut self, gone: &Range<u64>) {
        let mut left = Vec::new();
        for (part, place) in self.parts.drain(..) {
            let before = part.start..part.end.min(gone.start);
            let after = part.start.max(gone.end)..part.end;
            for piece in [before, after].into_iter().filter(|piece| piece.start < piece.end) {
                let place = place.after(piece.start.saturating_sub(part.start));
                left.push((piece, place));
            }
        }
        self.parts = left;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(range: Range<u64>) -> Segment {
        let length = range.end - range.start;
        // A blob's place in the file is its own.
        let place = FilePlace { device: "00:05".into(), inode: range.start, offset: 0x10000 };
        segment_of(range, place, length)
    }

    fn segment_of(range: Range<u64>, place: FilePlace, length: u64) -> Segment {
        let character = Character::default();
        let parts = vec![(0..length, place)];
        Segment { range, resource: ResourceId(1), blob: None, parts, character, kept: None, uses: 1 }
    }

    fn area(range: Range<u64>, inode: u64, offset: u64) -> Area {
        let file = FilePlace { device: "00:05".into(), inode, offset };
        let (permissions, name) = ("rw-s".to_owned(), String::new());
        Area { start: range.start, end: range.end, permissions, file, name, flags: Vec::new(), key: 0 }
    }

    #[test]
    fn a_page_is_adopted_once() {
        let mut table = Table::default();
        table.insert(segment(0x3000..0x5000));
        table.insert(segment(0x8000..0x9000));
        assert_eq!(table.missing(&(0x1000..0xa000)), [0x1000..0x3000, 0x5000..0x8000, 0x9000..0xa000]);
        assert_eq!(table.missing(&(0x3000..0x5000)), []);
        assert_eq!(table.missing(&(0x4000..0x6000)), std::slice::from_ref(&(0x5000..0x6000)));
        assert_eq!(table.missing(&(0x9000..0xb000)), std::slice::from_ref(&(0x9000..0xb000)));
        let large = MAX_SEGMENT + 0x1000;
        assert_eq!(table.missing(&(1 << 40..(1 << 40) + large)).len(), 2);
        let (pieces, keep) = table.take(&(0x4000..0x5000));
        assert_eq!(pieces, [Piece { resource: ResourceId(1), offset: 0x1000, size: 0x1000 }]);
        assert_eq!(table.segments[&keep.ids[0]].uses, 2);
        std::mem::forget(keep);
    }

    /// Memory that was unmapped while registered, and other memory registered there: drm_vma_offset_manager gives the new
    /// blob the old one's place of the file.
    #[test]
    fn a_new_segment_is_not_taken_for_an_older_one() {
        let mut table = Table::default();
        let place = |offset| FilePlace { device: "00:05".into(), inode: 7, offset };
        table.insert(segment_of(0x3000..0x7000, place(0x10000), 0x4000));
        table.insert(segment_of(0x20000..0x22000, place(0x30000), 0x2000));
        let old = |table: &Table, number: u64| {
            let segment = &table.segments[&number];
            let (start, offset) = (segment.range.start, [0x10000, 0x30000][number as usize]);
            let areas = [area(start..segment.range.end, 7, offset)];
            segment.intact(&areas, &segment.range).collect::<Vec<_>>()
        };
        assert_eq!(old(&table, 0), std::slice::from_ref(&(0x3000..0x7000)));
        // The same address and place of the file, and a size of its own.
        table.insert(segment_of(0x3000..0x5000, place(0x10000), 0x2000));
        assert_eq!(old(&table, 0), [], "its blob has ended");
        assert_eq!(old(&table, 1), std::slice::from_ref(&(0x20000..0x22000)));
        // The same address only.
        table.insert(segment_of(0x21000..0x22000, place(0x50000), 0x1000));
        assert_eq!(old(&table, 1), std::slice::from_ref(&(0x20000..0x21000)));
        // The same place of the file only: the application may move the new one.
        table.insert(segment_of(0x40000..0x41000, place(0x30000), 0x1000));
        assert_eq!(old(&table, 1), []);
    }

    #[test]
    fn what_the_application_replaced_is_not_intact() {
        let mut it = segment(0x3000..0x7000);
        let range = 0x3000..0x7000;
        let intact = |it: &Segment, areas: &[Area]| it.intact(areas, &range).collect::<Vec<_>>();
        assert_eq!(
            intact(&it, &[area(0x2000..0x9000, 0x3000, 0xf000)]),
            std::slice::from_ref(&range),
            "merged with neighbours"
        );
        assert_eq!(intact(&it, &[area(0x3000..0x7000, 8, 0x10000)]), []);
        assert_eq!(intact(&it, &[area(0x3000..0x7000, 0x3000, 0x11000)]), [], "another place of the file");
        let areas = [area(0x3000..0x4000, 0x3000, 0x10000), area(0x6000..0x7000, 0x3000, 0x13000)];
        assert_eq!(intact(&it, &areas), [0x3000..0x4000, 0x6000..0x7000], "a hole");
        it.lose(&(0x1000..0x2000));
        let whole = [area(0x3000..0x7000, 0x3000, 0x10000)];
        assert_eq!(intact(&it, &whole), [0x3000..0x4000, 0x5000..0x7000], "overtaken");
    }
}
