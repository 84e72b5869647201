//! What is left with buffers: with those of others, with those that there are not, and while they go.

use anyhow::{Context, Result, ensure};
use guest_thunk::client::Client;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::limits::MAX_METADATA_BYTES;
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferMetadataRequest, BufferRequest, GpuId, GuestVa, Handle,
    SetBufferMetadataRequest,
};

use super::Report;
use crate::neighbour::{VA, VRAM, acquire};
use crate::random::Random;
use crate::raw::{Raw, client};

fn buffer(client: &Client, gpu_id: GpuId, number: u64) -> Result<Handle> {
    let va = GuestVa(VA + (number << 20));
    let request = AllocMemoryRequest { va, size: 1 << 16, gpu_id, flags: VRAM, ..Default::default() };
    Ok(client.call::<AllocMemory>(&request, &[], 0).context("AllocMemory")?.0.handle)
}

fn get(client: &Client, handle: Handle, gpu_id: GpuId) -> Result<(u64, u64, Vec<u8>)> {
    let request = BufferMetadataRequest { handle, gpu_id, pad: 0 };
    let (answer, bytes) =
        client.call::<BufferMetadata>(&request, &[], MAX_METADATA_BYTES).context("BufferMetadata")?;
    Ok((answer.flags, answer.tiling, bytes))
}

fn set(client: &Client, request: &SetBufferMetadataRequest, bytes: &[u8]) -> Result<()> {
    client.call::<SetBufferMetadata>(request, bytes, 0).context("SetBufferMetadata")?;
    Ok(())
}

fn content(random: &mut Random) -> Vec<u8> {
    let length = random.below(MAX_METADATA_BYTES as u64 + 1) as usize;
    random.bytes(length)
}

/// Reads and writes by all handles that others may have; what an owner left stays. Then any flags and sizes on one's own,
/// which go in the middle.
pub fn all(random: &mut Random, frames: u64, report: &mut Report) -> Result<()> {
    let owner = client()?;
    let gpu = acquire(&owner)?;
    let mut raw = Raw::connect()?;
    let named = gpu.unwrap_or(GpuId(1234));
    let mut left = Vec::new();
    if let Some(gpu) = gpu {
        raw.call::<AcquireVm>(0, &virtio_kfd_protocol::GpuRequest { gpu_id: gpu, pad: 0 }, &[], 0)?;
        for number in 0..4 {
            let handle = buffer(&owner, gpu, number)?;
            let bytes = random.bytes(number as usize * 64 + 1);
            let request =
                SetBufferMetadataRequest { handle, gpu_id: gpu, pad: 0, flags: number, tiling: number };
            set(&owner, &request, &bytes)?;
            left.push((handle, (number, number, bytes)));
        }
    }
    let mut handles: Vec<Handle> = (0..100).map(|_| Handle(random.nasty())).collect();
    handles.extend(left.iter().map(|(handle, _)| *handle));
    handles.extend([0, 1, 63, u32::MAX].map(Handle::in_frame));
    for handle in handles {
        for (gpu_id, pad) in [(named, 0), (GpuId(named.0 ^ 1), 0), (GpuId(0), 0), (named, 1)] {
            let request = BufferMetadataRequest { handle, gpu_id, pad };
            let outcome = raw.call::<BufferMetadata>(0, &request, &[], MAX_METADATA_BYTES)?;
            report.must_fail(|| format!("what is left with {handle:?} on {gpu_id:?}"), &outcome);
            let (flags, tiling) = (random.nasty(), random.nasty());
            let request = SetBufferMetadataRequest { handle, gpu_id, pad, flags, tiling };
            let bytes = content(random);
            let outcome = raw.call::<SetBufferMetadata>(0, &request, &bytes, 0)?;
            report.must_fail(|| format!("something left with {handle:?} on {gpu_id:?}"), &outcome);
        }
    }
    for (handle, expected) in &left {
        let found = get(&owner, *handle, named)?;
        ensure!(found == *expected, "{handle:?}: another context has changed what was left: {found:?}");
    }
    match gpu {
        Some(gpu) => own(random, frames, report, gpu, &owner),
        None => Ok(()),
    }
}

/// Any content on one's own buffers, by several threads, while others free them.
fn own(random: &mut Random, frames: u64, report: &mut Report, gpu: GpuId, owner: &Client) -> Result<()> {
    let seeds: Vec<u64> = (0..4).map(|_| random.next()).collect();
    let done = std::thread::scope(|scope| {
        let threads: Vec<_> = (0u64..)
            .zip(&seeds)
            .map(|(thread, seed)| {
                scope.spawn(move || -> Result<u64> {
                    let mut random = Random::new(*seed);
                    for round in 0..frames / 8 {
                        let handle = buffer(owner, gpu, 16 + thread)?;
                        let request = SetBufferMetadataRequest {
                            handle,
                            gpu_id: gpu,
                            pad: 0,
                            flags: random.nasty(),
                            tiling: random.nasty(),
                        };
                        let bytes = content(&mut random);
                        let mut batch = owner.batch();
                        batch.push::<SetBufferMetadata>(&request, &bytes, 0)?;
                        batch.push::<FreeMemory>(&BufferRequest { handle }, &[], 0)?;
                        batch.push::<SetBufferMetadata>(&request, &bytes, 0)?;
                        batch.push::<BufferMetadata>(
                            &BufferMetadataRequest { handle, gpu_id: gpu, pad: 0 },
                            &[],
                            MAX_METADATA_BYTES,
                        )?;
                        ensure!(
                            batch.run()?.check().is_err(),
                            "round {round}: a buffer that was freed has metadata"
                        );
                    }
                    Ok(frames / 8)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    for rounds in done {
        report.sent += rounds.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    }
    report.done += frames / 8;
    Ok(())
}
