//! What belongs to the KFD process as a whole: clocks, XNACK mode, trap handlers, tiling, the debugger's view.

use std::sync::atomic::{AtomicU64, Ordering};

use hsakmt_abi::status::HsakmtStatus;
use hsakmt_abi::topology::{HsaCapability, HsaClockCounters};
use nix::time::{ClockId, clock_gettime};
use virtio_kfd_protocol::calls::{
    AvailableMemory, GetClockCounters, GetTileConfig, RuntimeEnable, SetTrapHandler, SetXnackMode,
};
use virtio_kfd_protocol::limits::MAX_TILE_CONFIGS;
use virtio_kfd_protocol::{
    GetTileConfigAnswer, GetTileConfigRequest, GpuId, GpuRequest, GuestVa, RuntimeEnableRequest,
    SetTrapHandlerRequest, XnackMode,
};

use super::Thunk;
use super::refusal::{Outcome, Refusal};
use super::topology::Snapshot;
use crate::client::Client;

/// Ticks per second of the clocks below.
const NANOSECONDS: u64 = 1_000_000_000;

/// `KFD_RUNTIME_ENABLE_MODE_*` (kfd_ioctl.h)
const MODE_ENABLE: u32 = 1;
const MODE_TTMP_SAVE: u32 = 2;

/// KFD minor versions that brought the calls.
mod minor {
    pub const XNACK: u32 = 5;
    pub const AVAILABLE_MEMORY: u32 = 9;
    pub const RUNTIME_ENABLE: u32 = 13;
}

fn require_minor(client: &Client, minor: u32) -> Outcome<()> {
    let (_, found) = client.kfd_version();
    if found < minor {
        let why = format!("the host's KFD is 1.{found}, the call came with 1.{minor}");
        return Err(Refusal::new(HsakmtStatus::NOT_SUPPORTED, why));
    }
    Ok(())
}

/// Whether the host's KFD has dma-bufs of its buffers.
pub fn require_dma_bufs(client: &Client) -> Outcome<()> {
    require_minor(client, kfd_abi::version::minor::EXPORT_DMABUF)
}

fn now(clock: ClockId) -> Outcome<u64> {
    let time = clock_gettime(clock).map_err(|error| Refusal::error(format!("clock_gettime: {error}")))?;
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec()), u64::try_from(time.tv_nsec()));
    let time = seconds.ok().and_then(|s| s.checked_mul(NANOSECONDS)?.checked_add(nanoseconds.ok()?));
    time.ok_or_else(|| Refusal::error("the clock is beyond 64 bits of nanoseconds"))
}

/// The clocks that KFD reads: the CPU's and the system's.
fn clocks() -> Outcome<(u64, u64)> {
    Ok((now(ClockId::CLOCK_MONOTONIC_RAW)?, now(ClockId::CLOCK_BOOTTIME)?))
}

/// Round trips to the host for one look at a GPU's clock. The shortest counts.
const LOOKS: usize = 4;

/// The shortest round trip that this process has seen, in nanoseconds.
static SHORTEST: AtomicU64 = AtomicU64::new(u64::MAX);

/// `hsaKmtGetClockCounters`: the GPU's counter is the host's, the others are the guest's own clocks, taken in the
/// middle of the round trip, so that the error of the pair is at most half of it. Runtimes tell time stamps of packets in the
/// system's time by few such pairs, so one that took much longer than others is not taken.
pub fn clock_counters(client: &Client, gpu: Option<GpuId>) -> Outcome<HsaClockCounters> {
    let middle = |before: u64, after: u64| before.saturating_add(after.saturating_sub(before) / 2);
    let mut best: Option<(u64, HsaClockCounters)> = None;
    for _ in 0..LOOKS {
        let before = clocks()?;
        let (counter, after) = match gpu {
            Some(gpu_id) => {
                let (answer, _) = client.call::<GetClockCounters>(&GpuRequest { gpu_id, pad: 0 }, &[], 0)?;
                (answer.gpu_clock_counter, clocks()?)
            }
            None => (0, before),
        };
        let counters = HsaClockCounters {
            gpu_clock_counter: counter,
            cpu_clock_counter: middle(before.0, after.0),
            system_clock_counter: middle(before.1, after.1),
            system_clock_frequency_hz: NANOSECONDS,
        };
        let took = after.0.saturating_sub(before.0);
        let shortest = SHORTEST.fetch_min(took, Ordering::Relaxed).min(took);
        if best.is_none_or(|(best, _)| took < best) {
            best = Some((took, counters));
        }
        if gpu.is_none() || took <= shortest.saturating_mul(2) {
            break;
        }
    }
    best.map(|(_, counters)| counters).ok_or_else(|| Refusal::error("no look at the clocks"))
}

/// `hsaKmtSetXNACKMode`, `hsaKmtGetXNACKMode` (with a negative mode): the mode now.
pub fn xnack(client: &Client, mode: i32) -> Outcome<i32> {
    require_minor(client, minor::XNACK)?;
    match client.call::<SetXnackMode>(&XnackMode { mode, pad: 0 }, &[], 0) {
        Ok((answer, _)) => Ok(answer.mode),
        Err(error) if error.errno() == Some(libc::EPERM) => {
            Err(Refusal::host(HsakmtStatus::NOT_SUPPORTED, &error))
        }
        Err(error) => Err(error.into()),
    }
}

/// `hsaKmtSetTrapHandler`
pub fn set_trap_handler(client: &Client, gpu_id: GpuId, tba: u64, tma: u64) -> Outcome<()> {
    let request = SetTrapHandlerRequest { tba: GuestVa(tba), tma: GuestVa(tma), gpu_id, pad: 0 };
    client.call::<SetTrapHandler>(&request, &[], 0)?;
    Ok(())
}

/// `hsaKmtAvailableMemory`: what the host has, and what lies idle in this process.
pub fn available_memory(thunk: &Thunk, gpu_id: GpuId) -> Outcome<u64> {
    let client = &thunk.client;
    require_minor(client, minor::AVAILABLE_MEMORY)?;
    let idle = thunk.memory.idle(client, gpu_id);
    let (answer, _) = client.call::<AvailableMemory>(&GpuRequest { gpu_id, pad: 0 }, &[], 0)?;
    Ok(answer.available.saturating_add(idle))
}

/// Answer to [`tile_config`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TileConfig {
    /// Tile modes.
    pub tile: Vec<u32>,
    /// Macro tile modes.
    pub macro_tile: Vec<u32>,
    /// The registers.
    pub answer: GetTileConfigAnswer,
}

/// `hsaKmtGetTileConfig` with room for that many tile and macro tile modes.
pub fn tile_config(client: &Client, gpu_id: GpuId, tile: u32, macro_tile: u32) -> Outcome<TileConfig> {
    let most = u32::try_from(MAX_TILE_CONFIGS).unwrap_or(u32::MAX);
    let request = GetTileConfigRequest {
        gpu_id,
        max_tile_configs: tile.min(most),
        max_macro_tile_configs: macro_tile.min(most),
        pad: 0,
    };
    let room = MAX_TILE_CONFIGS.saturating_mul(2);
    let (answer, words) = client.call::<GetTileConfig>(&request, &[], room)?;
    let cut = |count: u32, most: u32| usize::try_from(count.min(most)).unwrap_or(0);
    let tiles = cut(answer.num_tile_configs, request.max_tile_configs);
    let macros = cut(answer.num_macro_tile_configs, request.max_macro_tile_configs);
    Ok(TileConfig {
        tile: words.iter().copied().take(tiles).collect(),
        macro_tile: words.iter().copied().skip(tiles).take(macros).collect(),
        answer,
    })
}

/// `hsaKmtCheckRuntimeDebugSupport`: whether the firmware of all GPUs and the kernel can do it.
pub fn check_debug_support(client: &Client, snapshot: &Snapshot) -> Outcome<()> {
    for node in snapshot.nodes.iter().filter(|node| node.gpu_id != 0) {
        let capability = node.properties.capability;
        if !capability.is_set(HsaCapability::DEBUG_SUPPORTED_FIRMWARE) {
            let why = format!("the firmware of GPU {:#x} does not support the debugger", node.gpu_id);
            return Err(Refusal::new(HsakmtStatus::NOT_SUPPORTED, why));
        }
    }
    require_minor(client, minor::RUNTIME_ENABLE)
}

/// `hsaKmtRuntimeEnable`
pub fn runtime_enable(thunk: &Thunk, snapshot: &Snapshot, r_debug: u64, setup_ttmp: bool) -> Outcome<()> {
    check_debug_support(&thunk.client, snapshot)?;
    let mode = MODE_ENABLE | if setup_ttmp { MODE_TTMP_SAVE } else { 0 };
    let request = RuntimeEnableRequest { r_debug: GuestVa(r_debug), mode, pad: 0 };
    match thunk.client.call::<RuntimeEnable>(&request, &[], 0) {
        Ok((answer, _)) => {
            thunk.set_runtime_capabilities(answer.capabilities);
            Ok(())
        }
        Err(error) if error.errno() == Some(libc::EBUSY) => {
            Err(Refusal::host(HsakmtStatus::UNAVAILABLE, &error))
        }
        Err(error) => Err(error.into()),
    }
}

/// `hsaKmtRuntimeDisable`
pub fn runtime_disable(thunk: &Thunk, snapshot: &Snapshot) -> Outcome<()> {
    check_debug_support(&thunk.client, snapshot)?;
    thunk.client.call::<RuntimeEnable>(&RuntimeEnableRequest::default(), &[], 0)?;
    Ok(())
}
