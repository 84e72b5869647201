//! Reads of the topology archive.

use virtio_kfd_protocol::calls::TopologyRead;
use virtio_kfd_protocol::limits::MAX_TOPOLOGY_CHUNK;
use virtio_kfd_protocol::{TopologyReadAnswer, TopologyReadRequest};

use super::{Outcome, Reply};
use crate::context::Context;
use crate::failure::Failure;

/// Answers with what there is from the offset on, as much as one answer holds.
pub fn topology_read(context: &Context, request: &TopologyReadRequest) -> Outcome<TopologyRead> {
    let archive = &context.archive;
    let rest = usize::try_from(request.offset).ok().and_then(|offset| archive.bytes.get(offset..));
    let rest = rest.ok_or_else(|| {
        let total = archive.bytes.len();
        Failure::invalid(format!("TopologyRead: offset {:#x} is beyond {total:#x}", request.offset))
    })?;
    let answer = TopologyReadAnswer { total: archive.bytes.len() as u64, generation: archive.generation };
    Ok(Reply::with(answer, rest.iter().take(MAX_TOPOLOGY_CHUNK).copied().collect()))
}
