//! Guest memory: regions, and GUEST blobs as runs of them.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};

use kfd_host::mapping::Piece;
use kfd_ipc::worker::{MAX_RUNS_PER_MESSAGE, Run};
use virtio_kfd_protocol::limits::MAX_BLOB_RUNS;
use virtio_kfd_protocol::{ResourceId, Status};

use crate::failure::Failure;

/// Bytes of a page of guest and host (x86-64).
pub const PAGE: u64 = 4096;

/// Most blobs of a context that can be used.
const MAX_BLOBS: usize = 64 * 1024;
/// Refused blobs that are remembered as such, the last ones: the device does not tell of their end.
const MAX_REFUSED: usize = 1024;
/// Most regions of guest memory (vhost-user has at most 512 memory slots).
const MAX_REGIONS: usize = 4096;

#[derive(Debug)]
struct Region {
    file: OwnedFd,
    file_offset: u64,
    size: u64,
}

/// The runs of one blob.
#[derive(Debug, Default)]
struct Blob {
    size: u64,
    total_runs: u32,
    /// Runs that came, before neighbours were joined.
    received: u32,
    /// Bytes of those.
    bytes: u64,
    runs: Vec<Run>,
}

#[derive(Debug)]
enum State {
    /// Usable when all its runs have come.
    Attached(Blob),
    /// Its list of runs was wrong or over a limit.
    Refused(Failure),
}

/// A piece of a blob's list of runs, as it comes.
#[derive(Debug)]
pub struct BlobPiece {
    /// virtio-gpu resource id.
    pub resource: u32,
    /// Bytes of the whole blob.
    pub size: u64,
    /// Number of the first run of this piece.
    pub first_run: u32,
    /// Runs of the whole blob.
    pub total_runs: u32,
    /// The piece.
    pub runs: Vec<Run>,
}

/// All guest memory that this context knows.
#[derive(Debug)]
pub struct GuestMemory {
    regions: HashMap<u32, Region>,
    blobs: HashMap<u32, State>,
    /// Blobs that were refused, in order; their numbers may have been used again.
    refused: VecDeque<u32>,
    max_runs: u32,
    runs: u32,
}

impl GuestMemory {
    /// None yet; at most `max_runs` runs are kept over all blobs.
    pub fn new(max_runs: u32) -> Self {
        GuestMemory {
            regions: HashMap::new(),
            blobs: HashMap::new(),
            refused: VecDeque::new(),
            max_runs,
            runs: 0,
        }
    }

    /// A region of guest memory. Its numbers are the device's: wrong ones say that the device is broken.
    pub fn add_region(
        &mut self,
        region: u32,
        file: OwnedFd,
        file_offset: u64,
        size: u64,
    ) -> Result<(), String> {
        let pages = file_offset.is_multiple_of(PAGE) && size.is_multiple_of(PAGE) && size != 0;
        let end = file_offset.checked_add(size).is_some_and(|end| i64::try_from(end).is_ok());
        if !pages || !end {
            return Err(format!(
                "AddRegion {region}: offset {file_offset:#x} and size {size:#x} have to be whole pages of a file"
            ));
        }
        if self.regions.len() >= MAX_REGIONS || self.regions.contains_key(&region) {
            return Err(format!("AddRegion {region}: known already, or more than {MAX_REGIONS} regions"));
        }
        self.regions.insert(region, Region { file, file_offset, size });
        Ok(())
    }

    /// The region is gone. Blobs that lie in it cannot be used any more.
    pub fn remove_region(&mut self, region: u32) {
        self.regions.remove(&region);
    }

    /// A piece of a blob's list. What is wrong with it shows when the blob is used.
    pub fn attach(&mut self, piece: BlobPiece) -> Result<(), Failure> {
        let resource = piece.resource;
        // No more than the last term of them are refused ones.
        let most = MAX_BLOBS.saturating_add(MAX_REFUSED);
        if !self.blobs.contains_key(&resource) && self.blobs.len() >= most {
            return Err(Failure::limit(format!("blob {resource}: more than {MAX_BLOBS} blobs")));
        }
        let mut blob = match self.blobs.remove(&resource) {
            None => Blob { size: piece.size, total_runs: piece.total_runs, ..Default::default() },
            Some(State::Attached(blob)) => blob,
            // The guest has given the number up and uses it again.
            Some(State::Refused(_)) if piece.first_run == 0 => {
                Blob { size: piece.size, total_runs: piece.total_runs, ..Default::default() }
            }
            Some(State::Refused(failure)) => {
                self.blobs.insert(resource, State::Refused(failure.clone()));
                return Err(failure);
            }
        };
        let before = blob.runs.len();
        let result = self.extend(&mut blob, piece);
        // Neighbours only ever join, so a list never grows by more than the piece has.
        let grown = blob.runs.len().saturating_sub(before);
        self.runs = self.runs.saturating_add(u32::try_from(grown).unwrap_or(u32::MAX));
        match result {
            Ok(()) => {
                self.blobs.insert(resource, State::Attached(blob));
                Ok(())
            }
            Err(failure) => {
                self.give_back(&blob);
                self.remember(resource, failure.clone());
                Err(failure)
            }
        }
    }

    fn extend(&self, blob: &mut Blob, piece: BlobPiece) -> Result<(), Failure> {
        let resource = piece.resource;
        let bad = |what: String| Failure::new(Status::BAD_RESOURCE, format!("blob {resource}: {what}"));
        if piece.size != blob.size || piece.total_runs != blob.total_runs || piece.first_run != blob.received
        {
            return Err(bad("a piece of its list does not follow the one before".into()));
        }
        if piece.total_runs as usize > MAX_BLOB_RUNS || piece.runs.len() > MAX_RUNS_PER_MESSAGE {
            return Err(Failure::limit(format!("blob {resource}: more than {MAX_BLOB_RUNS} runs")));
        }
        let count = u32::try_from(piece.runs.len()).unwrap_or(u32::MAX);
        let received = blob.received.checked_add(count).filter(|&sum| sum <= blob.total_runs);
        blob.received = received.ok_or_else(|| bad("more runs than it said".into()))?;
        let budget = self.max_runs.saturating_sub(self.runs) as usize;
        let had = blob.runs.len();
        for run in piece.runs {
            if !self.contains(&run) {
                return Err(bad(format!("{run:?} is not whole pages of guest memory")));
            }
            let bytes = blob.bytes.checked_add(run.len).filter(|&sum| sum <= blob.size);
            blob.bytes = bytes.ok_or_else(|| bad("its runs are longer than its size".into()))?;
            push(&mut blob.runs, run);
            if blob.runs.len().saturating_sub(had) > budget {
                return Err(Failure::limit(format!(
                    "blob {resource}: more than {} runs in all",
                    self.max_runs
                )));
            }
        }
        if blob.received == blob.total_runs && blob.bytes != blob.size {
            return Err(bad(format!("its runs have {:#x} bytes, its size is {:#x}", blob.bytes, blob.size)));
        }
        Ok(())
    }

    fn contains(&self, run: &Run) -> bool {
        let Some(region) = self.regions.get(&run.region) else { return false };
        let end = run.offset.checked_add(run.len).is_some_and(|end| end <= region.size);
        run.len != 0 && run.len.is_multiple_of(PAGE) && run.offset.is_multiple_of(PAGE) && end
    }

    fn give_back(&mut self, blob: &Blob) {
        self.runs = self.runs.saturating_sub(u32::try_from(blob.runs.len()).unwrap_or(u32::MAX));
    }

    /// The guest gives a blob back.
    pub fn detach(&mut self, resource: u32) {
        if let Some(State::Attached(blob)) = self.blobs.remove(&resource) {
            self.give_back(&blob);
        }
    }

    /// A blob that the device has refused for one of its limits.
    pub fn refuse(&mut self, resource: u32) {
        self.detach(resource);
        self.remember(resource, Failure::limit(format!("blob {resource} is over a limit of the device")));
    }

    /// Whoever uses a blob is told why it was refused, until others have been since.
    fn remember(&mut self, resource: u32, failure: Failure) {
        self.blobs.insert(resource, State::Refused(failure));
        self.refused.push_back(resource);
        if self.refused.len() > MAX_REFUSED
            && let Some(oldest) = self.refused.pop_front()
            && oldest != resource
            && matches!(self.blobs.get(&oldest), Some(State::Refused(_)))
        {
            self.blobs.remove(&oldest);
        }
    }

    /// Bytes of a blob that can be used; `None` if it is not one of guest memory.
    pub fn size(&self, resource: ResourceId) -> Result<Option<u64>, Failure> {
        match self.blobs.contains_key(&resource.0) {
            true => self.usable(resource).map(|blob| Some(blob.size)),
            false => Ok(None),
        }
    }

    /// The runs of `size` bytes from `offset` on of a blob.
    pub fn slice(&self, resource: ResourceId, offset: u64, size: u64) -> Result<Vec<Run>, Failure> {
        let id = resource.0;
        let bad = |what: &str| Failure::new(Status::BAD_RESOURCE, format!("blob {id}: {what}"));
        let blob = self.usable(resource)?;
        if offset.checked_add(size).is_none_or(|end| end > blob.size) {
            return Err(bad(&format!("{size:#x} bytes at {offset:#x} reach beyond its {:#x}", blob.size)));
        }
        let mut runs = Vec::new();
        let (mut skip, mut left) = (offset, size);
        for run in &blob.runs {
            if left == 0 {
                break;
            }
            if skip >= run.len {
                skip = skip.saturating_sub(run.len);
                continue;
            }
            let len = run.len.saturating_sub(skip).min(left);
            runs.push(Run { region: run.region, offset: run.offset.saturating_add(skip), len });
            left = left.saturating_sub(len);
            skip = 0;
        }
        Ok(runs)
    }

    fn usable(&self, resource: ResourceId) -> Result<&Blob, Failure> {
        let id = resource.0;
        let bad = |what: &str| Err(Failure::new(Status::BAD_RESOURCE, format!("blob {id}: {what}")));
        match self.blobs.get(&id) {
            None => bad("not a GUEST blob of this context"),
            Some(State::Refused(failure)) => Err(failure.clone()),
            Some(State::Attached(blob)) if blob.received != blob.total_runs => {
                bad("its list of runs is not complete")
            }
            Some(State::Attached(blob)) => Ok(blob),
        }
    }

    /// Runs as pieces of files.
    pub fn pieces(&self, runs: &[Run]) -> Result<Vec<Piece<'_>>, Failure> {
        let gone = || Failure::new(Status::BAD_RESOURCE, "the region of guest memory under the blob is gone");
        runs.iter()
            .map(|run| {
                let region = self.regions.get(&run.region).ok_or_else(gone)?;
                let offset = region.file_offset.checked_add(run.offset).ok_or_else(gone)?;
                Ok(Piece { file: region.file.as_fd(), offset, len: run.len })
            })
            .collect()
    }
}

/// Appends a run, joined with the last one where it continues that.
fn push(runs: &mut Vec<Run>, run: Run) {
    if let Some(last) = runs.last_mut()
        && last.region == run.region
        && last.offset.checked_add(last.len) == Some(run.offset)
        && let Some(len) = last.len.checked_add(run.len)
    {
        last.len = len;
        return;
    }
    runs.push(run);
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE;

    fn memory(max_runs: u32) -> GuestMemory {
        let mut memory = GuestMemory::new(max_runs);
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        memory.add_region(1, file(), 0, 64 * P).unwrap();
        memory.add_region(2, file(), 16 * P, 64 * P).unwrap();
        memory
    }

    fn run(region: u32, page: u64, pages: u64) -> Run {
        Run { region, offset: page * P, len: pages * P }
    }

    fn whole(resource: u32, runs: Vec<Run>) -> BlobPiece {
        let size = runs.iter().map(|run| run.len).sum();
        BlobPiece { resource, size, first_run: 0, total_runs: runs.len() as u32, runs }
    }

    fn status(result: Result<impl std::fmt::Debug, Failure>) -> Status {
        result.unwrap_err().status
    }

    #[test]
    fn neighbours_join_and_slices_cut_runs() {
        let mut memory = memory(10);
        memory.attach(whole(7, vec![run(1, 4, 1), run(1, 5, 2), run(2, 0, 3), run(1, 0, 1)])).unwrap();
        assert_eq!(memory.runs, 3);
        let slice = |offset, pages| memory.slice(ResourceId(7), offset * P, pages * P).unwrap();
        assert_eq!(slice(0, 7), [run(1, 4, 3), run(2, 0, 3), run(1, 0, 1)]);
        assert_eq!(slice(2, 2), [run(1, 6, 1), run(2, 0, 1)]);
        assert_eq!(slice(4, 1), [run(2, 1, 1)]);
        assert_eq!(slice(6, 1), [run(1, 0, 1)]);
        let pieces = memory.pieces(&slice(2, 2)).unwrap();
        assert_eq!((pieces[0].offset, pieces[1].offset), (6 * P, 16 * P));
    }

    #[test]
    fn a_list_in_pieces_is_complete_at_its_last() {
        let mut memory = memory(10);
        let piece = |first_run, runs: Vec<Run>| BlobPiece {
            resource: 3,
            size: 4 * P,
            first_run,
            total_runs: 3,
            runs,
        };
        memory.attach(piece(0, vec![run(1, 0, 1), run(1, 9, 2)])).unwrap();
        assert_eq!(status(memory.slice(ResourceId(3), 0, P)), Status::BAD_RESOURCE);
        memory.attach(piece(2, vec![run(2, 0, 1)])).unwrap();
        assert_eq!(memory.slice(ResourceId(3), 0, 4 * P).unwrap().len(), 3);
        assert_eq!(status(memory.attach(piece(3, vec![]).tap_size())), Status::BAD_RESOURCE);
    }

    trait TapSize {
        fn tap_size(self) -> Self;
    }
    impl TapSize for BlobPiece {
        /// A further piece that tells another size.
        fn tap_size(mut self) -> Self {
            self.size += P;
            self
        }
    }

    #[test]
    fn wrong_lists_make_a_blob_that_cannot_be_used() {
        let wrong: Vec<(&str, BlobPiece)> = vec![
            ("unknown region", whole(1, vec![run(9, 0, 1)])),
            ("beyond the region", whole(1, vec![run(1, 63, 2)])),
            ("overflow", whole(1, vec![Run { region: 1, offset: u64::MAX - P + 1, len: P }])),
            ("no length", whole(1, vec![run(1, 0, 0), run(1, 0, 1)])),
            ("half a page", whole(1, vec![Run { region: 1, offset: 0, len: P / 2 }])),
            ("odd offset", whole(1, vec![Run { region: 1, offset: 8, len: P }])),
            ("shorter than its size", BlobPiece { size: 2 * P, ..whole(1, vec![run(1, 0, 1)]) }),
            ("longer than its size", BlobPiece { size: P, ..whole(1, vec![run(1, 0, 2)]) }),
            (
                "more runs than said",
                BlobPiece { total_runs: 1, ..whole(1, vec![run(1, 0, 1), run(1, 4, 1)]) },
            ),
            (
                "begins in the middle",
                BlobPiece { first_run: 1, total_runs: 2, ..whole(1, vec![run(1, 0, 1)]) },
            ),
        ];
        for (what, piece) in wrong {
            let mut memory = memory(10);
            assert_eq!(status(memory.attach(piece)), Status::BAD_RESOURCE, "{what}");
            assert_eq!(status(memory.slice(ResourceId(1), 0, P)), Status::BAD_RESOURCE, "{what}");
            assert_eq!(memory.runs, 0, "{what}");
        }
    }

    #[test]
    fn runs_are_bounded_over_all_blobs() {
        let mut memory = memory(3);
        memory.attach(whole(1, vec![run(1, 0, 1), run(1, 2, 1)])).unwrap();
        assert_eq!(status(memory.attach(whole(2, vec![run(1, 4, 1), run(1, 6, 1)]))), Status::LIMIT);
        assert_eq!(status(memory.slice(ResourceId(2), 0, P)), Status::LIMIT);
        memory.detach(1);
        memory.detach(2);
        assert_eq!(memory.runs, 0);
        memory.attach(whole(2, vec![run(1, 4, 1), run(1, 6, 1), run(1, 8, 1)])).unwrap();
        let long = BlobPiece { total_runs: MAX_BLOB_RUNS as u32 + 1, ..whole(5, vec![]) };
        assert_eq!(status(memory.attach(long)), Status::LIMIT);
    }

    #[test]
    fn a_refused_blob_is_over_a_limit_until_its_number_is_used_again() {
        let mut memory = memory(10);
        memory.attach(whole(1, vec![run(1, 0, 1), run(1, 4, 1)])).unwrap();
        memory.refuse(1);
        assert_eq!((memory.runs, status(memory.slice(ResourceId(1), 0, P))), (0, Status::LIMIT));
        assert_eq!(status(memory.size(ResourceId(1))), Status::LIMIT);
        let rest = BlobPiece { first_run: 1, ..whole(1, vec![run(1, 0, 1)]) };
        assert_eq!(status(memory.attach(rest)), Status::LIMIT, "the rest of the refused one");
        memory.attach(whole(1, vec![run(1, 0, 2)])).unwrap();
        assert_eq!(memory.size(ResourceId(1)), Ok(Some(2 * P)));
        assert_eq!(memory.size(ResourceId(2)), Ok(None));
    }

    #[test]
    fn refused_blobs_take_no_place_from_others() {
        let mut memory = memory(10);
        let last = (MAX_BLOBS + MAX_REFUSED) as u32 + 10;
        for resource in 0..last {
            assert_eq!(status(memory.attach(whole(resource, vec![run(9, 0, 1)]))), Status::BAD_RESOURCE);
            memory.refuse(resource);
        }
        assert_eq!(memory.blobs.len(), MAX_REFUSED / 2);
        assert_eq!(status(memory.size(ResourceId(last - 1))), Status::LIMIT);
        memory.attach(whole(last, vec![run(1, 0, 1)])).unwrap();
        assert_eq!(memory.size(ResourceId(last)), Ok(Some(P)));
    }

    #[test]
    fn slices_stay_within_the_blob() {
        let mut memory = memory(10);
        memory.attach(whole(1, vec![run(1, 0, 2)])).unwrap();
        for (offset, size) in [(0, 3 * P), (2 * P, P), (P, 2 * P), (u64::MAX, P), (P, u64::MAX)] {
            assert_eq!(status(memory.slice(ResourceId(1), offset, size)), Status::BAD_RESOURCE);
        }
        assert_eq!(status(memory.slice(ResourceId(2), 0, P)), Status::BAD_RESOURCE);
        memory.remove_region(1);
        let runs = memory.slice(ResourceId(1), 0, P).unwrap();
        assert_eq!(status(memory.pieces(&runs)), Status::BAD_RESOURCE);
    }

    #[test]
    fn regions_are_whole_pages() {
        let mut memory = memory(1);
        let mut add = |region, offset, size| {
            memory.add_region(region, tempfile::tempfile().unwrap().into(), offset, size)
        };
        for (region, offset, size) in [
            (3, 1, P),
            (3, 0, P + 1),
            (3, 0, 0),
            (3, u64::MAX - P + 1, P),
            (3, i64::MAX as u64 + 1, P),
            (1, 0, P),
        ] {
            assert!(add(region, offset, size).is_err(), "{region} {offset:#x} {size:#x}");
        }
        assert!(add(3, P, P).is_ok());
    }
}
