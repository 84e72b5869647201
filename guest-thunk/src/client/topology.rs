//! The host's topology, read in chunks.

use virtio_kfd_protocol::TopologyReadRequest;
use virtio_kfd_protocol::calls::TopologyRead;
use virtio_kfd_protocol::limits::{MAX_TOPOLOGY_BYTES, MAX_TOPOLOGY_CHUNK};
use virtio_kfd_protocol::topology::{ArchiveError, TopologyFile, unpack};

use super::{Client, ClientError};

/// How often a reading is begun again since the topology changed under it.
const ATTEMPTS: u32 = 8;

/// See [`Client::topology`].
pub(super) fn read(client: &Client) -> Result<Vec<TopologyFile>, ClientError> {
    for _ in 0..ATTEMPTS {
        if let Some(archive) = read_once(client)? {
            return Ok(unpack(&archive)?);
        }
    }
    Err(ClientError::TopologyUnstable { attempts: ATTEMPTS })
}

/// The archive, or none if it changed meanwhile.
fn read_once(client: &Client) -> Result<Option<Vec<u8>>, ClientError> {
    let mut archive = Vec::new();
    let mut snapshot = None;
    loop {
        let request = TopologyReadRequest { offset: archive.len() as u64 };
        let (answer, chunk) = client.call::<TopologyRead>(&request, &[], MAX_TOPOLOGY_CHUNK)?;
        if snapshot.is_some_and(|first| first != answer) {
            return Ok(None);
        }
        snapshot = Some(answer);
        archive.extend_from_slice(&chunk);
        let found = archive.len();
        if found as u64 >= answer.total {
            // A chunk that goes beyond the end is as wrong as one that is missing.
            return Ok((found as u64 == answer.total).then_some(archive));
        }
        if found > MAX_TOPOLOGY_BYTES || answer.total > MAX_TOPOLOGY_BYTES as u64 {
            let what = "the number of bytes of the archive";
            let found = usize::try_from(answer.total).unwrap_or(usize::MAX);
            return Err(ArchiveError::TooLarge { what, found, max: MAX_TOPOLOGY_BYTES }.into());
        }
        if chunk.is_empty() {
            return Err(ArchiveError::Short {
                at: found,
                total: usize::try_from(answer.total).unwrap_or(usize::MAX),
            }
            .into());
        }
    }
}
