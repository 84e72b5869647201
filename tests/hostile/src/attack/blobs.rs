//! Blobs that cannot be, of buffers that are not there, in pieces, and too many.

use anyhow::{Context, Result, ensure};
use virtio_kfd_protocol::calls::AllocMemory;
use virtio_kfd_protocol::{AllocMemoryRequest, Features, GuestVa, Handle};

use super::Report;
use crate::neighbour::{VA, acquire};
use crate::random::Random;
use crate::raw::{Raw, View, client};

/// Sizes that no blob has.
pub fn impossible(_: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let raw = Raw::connect()?;
    for size in [0, 1, 4095, 4097, 1 << 50, u64::MAX - 4095, u64::MAX] {
        let blob = raw.transport.guest_blob(size);
        // The guest's driver rounds up to pages.
        if !(1..1 << 20).contains(&size) {
            report.must_err(|| format!("a guest blob of {size} bytes"), &blob);
        }
        let blob = raw.transport.host_blob(Handle::new(0, 1), size).map_err(anyhow::Error::from);
        // A driver may find out only at the map.
        let mapped = blob.and_then(|blob| View::of(&*blob).map(drop));
        report.must_err(|| format!("a host blob of {size} bytes"), &mapped);
    }
    Ok(())
}

/// Host memory by numbers that are no buffer's.
pub fn unknown_buffers(random: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut raw = Raw::connect()?;
    let mut handles: Vec<Handle> = (0..60).map(|_| Handle(random.nasty())).collect();
    handles.extend((0..20).map(|index| Handle::new(index, 1)));
    for handle in handles {
        let blob = raw.transport.host_blob(handle, 4096).map_err(anyhow::Error::from);
        let mapped = blob.and_then(|blob| View::of(&*blob).map(drop));
        report.must_err(|| format!("a host blob of {handle:?}"), &mapped);
    }
    if !raw.alive()? {
        report.accepted.push("that an unknown buffer ends the context".to_owned());
    }
    Ok(())
}

/// Blobs of many pieces, as the guest's memory is after many small blobs came and went.
pub fn fragmented(_: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut raw = Raw::connect()?;
    let mut small = Vec::new();
    for _ in 0..1024 {
        small.push(raw.transport.guest_blob(4096)?);
    }
    let mut number = 0;
    small.retain(|_| {
        number += 1;
        number % 2 == 0
    });
    for size in [4 << 20, 32 << 20] {
        let blob = raw.transport.guest_blob(size).with_context(|| format!("a blob of {size} bytes"))?;
        let view = View::of(&*blob)?;
        view.fill(1);
        report.sent += 1;
        report.done += 1;
    }
    ensure!(raw.alive()?, "the context is gone");
    Ok(())
}

/// Maps host memory until there is an end to it, frees it, and maps again.
pub fn many_maps(_: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    const MAPS: u64 = 600;
    let client = client()?;
    let gpu = acquire(&client)?;
    let (Some(gpu), true) = (gpu, client.features().contains(Features::HOST_BLOBS)) else {
        // Without host memory every one of them is refused.
        let raw = Raw::connect()?;
        for number in 0..MAPS {
            let blob =
                raw.transport.host_blob(Handle::new(number as u32, 1), 4096).map_err(anyhow::Error::from);
            let mapped = blob.and_then(|blob| View::of(&*blob).map(drop));
            report.must_err(|| format!("host blob {number}"), &mapped);
        }
        return Ok(());
    };
    for round in 0..2u64 {
        let mut kept = Vec::new();
        for number in 0..MAPS {
            let request = AllocMemoryRequest {
                va: GuestVa(VA + ((round * MAPS + number) << 16)),
                size: 4096,
                gpu_id: gpu,
                // GTT, writable, mappable: host memory that the CPU sees.
                flags: 1 << 1 | 1 << 31,
                ..Default::default()
            };
            report.sent += 1;
            let Ok((made, _)) = client.call::<AllocMemory>(&request, &[], 0) else {
                report.refused += 1;
                continue;
            };
            let mapped = client
                .host_memory(made.handle, 4096)
                .map_err(anyhow::Error::from)
                .and_then(|blob| View::of(&*blob).map(|view| (blob, view)));
            match mapped {
                Ok(mapped) => {
                    report.done += 1;
                    mapped.1.fill(number as u8);
                    kept.push((mapped, number as u8));
                }
                Err(_) => report.refused += 1,
            }
        }
        ensure!(!kept.is_empty(), "not one map in round {round}");
        for (place, ((_, view), byte)) in kept.iter().enumerate() {
            let page = view.copy(0, 4096);
            let wrong: Vec<(usize, u8)> =
                page.iter().copied().enumerate().filter(|(_, found)| found != byte).collect();
            ensure!(
                wrong.is_empty(),
                "round {round}: map {place} of {} does not show its own memory: {} bytes are not {byte:#x}: {:x?}",
                kept.len(),
                wrong.len(),
                wrong.get(..wrong.len().min(20))
            );
        }
    }
    if report.refused == 0 {
        report.accepted.push(format!("{MAPS} maps at once"));
    }
    Ok(())
}

/// Guest blobs without end.
pub fn many(_: &mut Random, frames: u64, report: &mut Report) -> Result<()> {
    let mut raw = Raw::connect()?;
    let mut blobs = Vec::new();
    for _ in 0..frames.clamp(100, 20_000) {
        report.sent += 1;
        match raw.transport.guest_blob(4096) {
            Ok(blob) => {
                report.done += 1;
                blobs.push(blob);
            }
            Err(_) => report.refused += 1,
        }
    }
    ensure!(raw.alive()?, "the context is gone");
    Ok(())
}
