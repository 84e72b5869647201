//! The system's nodes and what they have.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use hsakmt_abi::status::HsakmtStatus;
use hsakmt_abi::topology::{
    HsaCacheProperties, HsaIoLinkProperties, HsaMemoryProperties, HsaNodeProperties356, HsaSystemProperties,
};

use super::caller::layout;
use super::exports;
use super::pointer::Out;
use crate::thunk::open;
use crate::thunk::refusal::{Outcome, Refusal};

/// The first `count` of the entries, which must be there.
fn first<'a, T>(what: &str, entries: &'a [T], count: u32) -> Outcome<&'a [T]> {
    let there = entries.len();
    let found = usize::try_from(count).ok().and_then(|count| entries.get(..count));
    found.ok_or_else(|| Refusal::parameter(format!("{what} is {count}, the node has {there}")))
}

exports! {
    "topology";
    /// Takes a snapshot of the topology, unless there is one.
    done
    fn hsaKmtAcquireSystemProperties(system_properties: Out<HsaSystemProperties>) {
        let thunk = open::current()?;
        let system_properties = system_properties.required("SystemProperties")?;
        system_properties.write(thunk.acquire_snapshot()?.system);
        Ok(())
    }

    /// Forgets the snapshot.
    done
    fn hsaKmtReleaseSystemProperties() {
        // AMD's library has something to forget even when it is not open.
        if let Ok(thunk) = open::current() {
            thunk.release_snapshot();
        }
        Ok(())
    }

    /// A node's properties, in the caller's layout.
    done("CPU nodes are the guest's; no SVM; a bank of remapped registers only where `VIRTIO_KFD_HDP=trap` asks for it; VRAM is private where there is no shared memory window; NumShaderBanks counts engines, as in 6.2.4, where 5.2.3 counts arrays")
    fn hsaKmtGetNodeProperties(node_id: u32, node_properties: Out<HsaNodeProperties356>) {
        let node_properties = node_properties.required("NodeProperties")?;
        let thunk = open::current()?;
        let snapshot = thunk.snapshot()?;
        let properties = snapshot.properties(node_id)?;
        node_properties.bytes().write_all(&layout().node(&properties, &snapshot.node(node_id)?.extras));
        Ok(())
    }

    /// How fast a GPU's clock counter counts, in Hz.
    done
    fn hsaKmtGetNodeWallclockFrequency(node_id: u32, frequency: Out<u64>) {
        let frequency = frequency.required("Frequency")?;
        let thunk = open::current()?;
        let khz = thunk.snapshot()?.node(node_id)?.extras.wall_clock_khz;
        if khz == 0 {
            return Err(Refusal::new(HsakmtStatus::NOT_SUPPORTED, format!("node {node_id} has no such clock")));
        }
        frequency.write(khz.saturating_mul(1000));
        Ok(())
    }

    /// A node's memory banks.
    done
    fn hsaKmtGetNodeMemoryProperties(
        node_id: u32,
        num_banks: u32,
        memory_properties: Out<HsaMemoryProperties>,
    ) {
        let memory_properties = memory_properties.required("MemoryProperties")?;
        let thunk = open::current()?;
        let mut banks = thunk.snapshot()?.banks(node_id)?;
        // Entries beyond the node's banks are cleared.
        banks.resize(usize::try_from(num_banks).unwrap_or(usize::MAX).min(4096), Default::default());
        memory_properties.write_all(&banks);
        Ok(())
    }

    /// A node's caches. The processor is not looked at.
    done
    fn hsaKmtGetNodeCacheProperties(
        node_id: u32,
        processor_id: u32,
        num_caches: u32,
        cache_properties: Out<HsaCacheProperties>,
    ) {
        let _ = processor_id;
        let cache_properties = cache_properties.required("CacheProperties")?;
        let thunk = open::current()?;
        let snapshot = thunk.snapshot()?;
        let caches = first("NumCaches", &snapshot.node(node_id)?.caches, num_caches)?;
        cache_properties.bytes().write_all(&layout().caches(caches));
        Ok(())
    }

    /// Sets a part of the L2 cache aside.
    not_supported("kernels without AMD's own patches have no such call")
    fn hsaKmtSetPersistingCacheSize(node_id: u32, size_in_bytes: u64);

    /// A node's links to other nodes.
    done("rewritten to the guest's CPU nodes and the GPUs of this VM")
    fn hsaKmtGetNodeIoLinkProperties(
        node_id: u32,
        num_io_links: u32,
        io_link_properties: Out<HsaIoLinkProperties>,
    ) {
        let io_link_properties = io_link_properties.required("IoLinkProperties")?;
        let thunk = open::current()?;
        let snapshot = thunk.snapshot()?;
        let links = first("NumIoLinks", &snapshot.node(node_id)?.links, num_io_links)?;
        io_link_properties.bytes().write_all(&layout().links(links));
        Ok(())
    }
}
