//! What is known of an address.

use hsakmt_abi::memory::{HsaPointerInfo, HsaPointerType};
use virtio_kfd_protocol::GpuId;

use super::address::page_size;
use super::import::Kind;
use super::{Backing, Memory};
use crate::thunk::lock::lock;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::topology::Snapshot;

impl Memory {
    /// `hsaKmtQueryPointerInfo`; the address may lie anywhere in an allocation. The pointer to the nodes is valid
    /// until the mapping changes.
    pub fn pointer_info(&self, snapshot: &Snapshot, address: u64) -> Outcome<HsaPointerInfo> {
        let allocation = self
            .find_range(address)
            .ok_or_else(|| Refusal::error(format!("{address:#x} is in no allocation")))?;
        let mut state = lock(&allocation.state);
        let nodes =
            |gpus: &[GpuId]| gpus.iter().map(|gpu| snapshot.node_of(*gpu)).collect::<Outcome<Box<[u32]>>>();
        if state.mapped_nodes.len() != state.mapped.len() {
            state.mapped_nodes = nodes(&state.mapped)?;
        }
        if state.registered_nodes.len() != state.registered.len() {
            state.registered_nodes = nodes(&state.registered)?;
        }
        let mut info = HsaPointerInfo {
            kind: HsaPointerType::ALLOCATED,
            node: allocation.node,
            mem_flags: allocation.flags,
            cpu_address: allocation.start(),
            gpu_address: allocation.start(),
            size_in_bytes: allocation.size(),
            n_registered_nodes: count(&state.registered_nodes),
            registered_nodes: list(&state.registered_nodes),
            n_mapped_nodes: count(&state.mapped_nodes),
            mapped_nodes: list(&state.mapped_nodes),
            user_data: state.user_data,
        };
        match &allocation.backing {
            Backing::Nothing => {
                info.kind = HsaPointerType::RESERVED_ADDR;
                info.cpu_address = 0;
            }
            Backing::Imported(imported) => {
                info.kind = match imported.kind {
                    Kind::Graphics => HsaPointerType::REGISTERED_GRAPHICS,
                    Kind::Shared => HsaPointerType::REGISTERED_SHARED,
                };
                info.cpu_address = 0;
            }
            Backing::Registered(registered) => {
                let offset = registered.address.checked_rem(page_size()).unwrap_or(0);
                info.kind = HsaPointerType::REGISTERED_USER;
                info.cpu_address = registered.address;
                info.gpu_address = allocation.start().saturating_add(offset);
                info.size_in_bytes = registered.size;
            }
            _ => {}
        }
        Ok(info)
    }

    /// `hsaKmtSetMemoryUserData`
    pub fn set_user_data(&self, address: u64, user_data: u64) -> Outcome<()> {
        let allocation = self.find(address);
        let allocation = allocation
            .ok_or_else(|| Refusal::error(format!("{address:#x} is not the start of an allocation")))?;
        lock(&allocation.state).user_data = user_data;
        Ok(())
    }
}

fn count(nodes: &[u32]) -> u32 {
    u32::try_from(nodes.len()).unwrap_or(0)
}

/// The address of a list, null for an empty one.
fn list(nodes: &[u32]) -> u64 {
    let address = if nodes.is_empty() { 0 } else { nodes.as_ptr().addr() };
    u64::try_from(address).unwrap_or(0)
}
