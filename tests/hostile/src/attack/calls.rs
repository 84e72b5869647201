//! Well-formed requests about things that are not there or belong to others.

use anyhow::Result;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::frame::RequestFrameBuilder;
use virtio_kfd_protocol::version::VERSION_MAX;
use virtio_kfd_protocol::{
    AllocMemoryRequest, BufferRequest, CreateEventRequest, EventId, EventRequest, FlushHdpRequest, GpuId,
    GpuRequest, GuestVa, Handle, Nothing, RenderInfoRequest, ResourceId, Status, WaitEvent,
    WaitEventsRequest,
};

use super::{Connection, Report};
use crate::neighbour::{USERPTR, VA, VRAM, acquire};
use crate::random::Random;
use crate::raw::{Outcome, Raw, client};

/// The GPU that the topology has, or one that does not exist.
fn gpu(raw: &mut Raw) -> Result<GpuId> {
    let mut gpu = GpuId(1234);
    // The answer's content is not looked at by `Raw`; the apertures of a client are.
    if let Some(found) = acquire(&client()?)? {
        gpu = found;
    }
    raw.call::<AcquireVm>(0, &GpuRequest { gpu_id: gpu, pad: 0 }, &[], 0)?;
    Ok(gpu)
}

/// Buffers that nobody made, that another context made, and references within a frame that lead nowhere.
pub fn unknown_buffers(random: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut connection = Connection::new();
    let raw = connection.get()?;
    let gpu = gpu(raw)?;
    let mut handles: Vec<Handle> = (0..400).map(|_| Handle(random.nasty())).collect();
    // What a neighbour's first buffers are called.
    handles.extend((0..16).flat_map(|index| (1..8).map(move |generation| Handle::new(index, generation))));
    handles.extend([0, 1, 63, 64, u32::MAX].map(Handle::in_frame));
    for handle in handles {
        let raw = connection.get()?;
        let request = BufferRequest { handle };
        for outcome in [
            raw.call::<FreeMemory>(0, &request, &[], 0)?,
            raw.call::<MapMemory>(0, &request, &[gpu], 0)?,
            raw.call::<UnmapMemory>(0, &request, &[gpu, GpuId(1)], 0)?,
            raw.call::<FlushHdp>(0, &FlushHdpRequest { handle, register: 0, pad: 0 }, &[], 0)?,
        ] {
            report.must_fail(|| format!("{handle:?}: {outcome:?}"), &outcome);
        }
        let page = CreateEventRequest { event_page: handle, auto_reset: 1, ..Default::default() };
        if !handle.is_none() {
            let outcome = raw.call::<CreateEvent>(0, &page, &[], 0)?;
            report.must_fail(|| format!("event page {handle:?}"), &outcome);
        }
    }
    // A frame whose map names the buffer of a request that failed, of a later one, and of one that makes none.
    for reference in [0, 1, 2] {
        let raw = connection.get()?;
        let area = raw.area();
        let mut frame = RequestFrameBuilder::new(VERSION_MAX, raw.next(), area);
        frame.push::<Nop>(&Nothing {}, &[], 0)?;
        let request = BufferRequest { handle: Handle::in_frame(reference) };
        frame.push::<MapMemory>(&request, &[gpu], 0)?;
        let outcome = raw.send(0, &frame.finish())?;
        report.any(&outcome);
        let second = match &outcome {
            Outcome::Answered(all) => all.get(1).map(|(_, status, _)| *status),
            _ => None,
        };
        if second.is_some_and(Status::is_ok) {
            report.accepted.push(format!("a map of the buffer of request {reference}"));
        }
    }
    Ok(())
}

/// Allocations that cannot be.
pub fn impossible_buffers(random: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let neighbour = Raw::connect()?;
    let foreign = neighbour.transport.guest_blob(1 << 20)?;
    let mut raw = Raw::connect()?;
    let gpu = gpu(&mut raw)?;
    let blob = raw.transport.guest_blob(1 << 20)?;
    let good = AllocMemoryRequest {
        va: GuestVa(VA),
        size: 1 << 20,
        gpu_id: gpu,
        flags: USERPTR,
        resource: blob.resource(),
        ..Default::default()
    };
    let vram = AllocMemoryRequest { flags: VRAM, resource: ResourceId(0), ..good };
    let bad = [
        ("another context's blob", AllocMemoryRequest { resource: foreign.resource(), ..good }),
        ("no blob", AllocMemoryRequest { resource: ResourceId(0), ..good }),
        ("an unknown blob", AllocMemoryRequest { resource: ResourceId(u32::MAX), ..good }),
        ("more than the blob", AllocMemoryRequest { size: (1 << 20) + 4096, ..good }),
        ("beyond the blob", AllocMemoryRequest { resource_offset: 1 << 20, ..good }),
        ("across the blob's end", AllocMemoryRequest { resource_offset: 4096, ..good }),
        ("an offset that wraps", AllocMemoryRequest { resource_offset: u64::MAX - 4095, ..good }),
        ("half a page", AllocMemoryRequest { resource_offset: 2048, size: 4096, ..good }),
        ("an unknown GPU", AllocMemoryRequest { gpu_id: GpuId(gpu.0 ^ 1), ..vram }),
        ("GPU 0", AllocMemoryRequest { gpu_id: GpuId(0), ..vram }),
        ("no size", AllocMemoryRequest { size: 0, ..vram }),
        ("a size of 2^60", AllocMemoryRequest { size: 1 << 60, ..vram }),
        ("a size of 2^64 - 4096", AllocMemoryRequest { size: u64::MAX - 4095, ..vram }),
        ("an address that is no page", AllocMemoryRequest { va: GuestVa(VA + 12), ..vram }),
        ("an address that wraps", AllocMemoryRequest { va: GuestVa(u64::MAX - 4095), ..vram }),
        ("a doorbell", AllocMemoryRequest { flags: 1 << 3 | 1 << 31, ..vram }),
        ("the MMIO page", AllocMemoryRequest { flags: 1 << 4 | 1 << 31, ..vram }),
    ];
    for (what, request) in bad {
        let outcome = raw.call::<AllocMemory>(0, &request, &[], 0)?;
        report.must_fail(|| what.to_owned(), &outcome);
    }
    // The kernel looks at the address when the buffer is mapped (amdgpu_vm_bo_map), not before. How far a map came stands
    // in its answer.
    let client = client()?;
    if acquire(&client)?.is_some() {
        for va in [1 << 63, 1 << 48] {
            let request = AllocMemoryRequest { va: GuestVa(va), size: 4096, ..vram };
            report.sent += 1;
            let Ok((made, _)) = client.call::<AllocMemory>(&request, &[], 0) else {
                report.refused += 1;
                continue;
            };
            let request = BufferRequest { handle: made.handle };
            match client.call::<MapMemory>(&request, &[gpu], 0) {
                Ok((mapped, _)) if mapped.n_success > 0 => report.accepted.push(format!("a map at {va:#x}")),
                _ => report.refused += 1,
            }
        }
    }
    for _ in 0..300 {
        let request = AllocMemoryRequest {
            va: GuestVa(random.nasty()),
            size: random.nasty(),
            gpu_id: if random.below(2) == 0 { gpu } else { GpuId(random.nasty() as u32) },
            flags: random.nasty() as u32,
            resource: ResourceId(random.nasty() as u32),
            pad: random.below(2) as u32,
            resource_offset: random.nasty(),
        };
        let outcome = raw.call::<AllocMemory>(0, &request, &[], 0)?;
        report.any(&outcome);
    }
    for query in 0..0x40 {
        let request = RenderInfoRequest { gpu_id: GpuId(gpu.0 ^ 7), query, ..Default::default() };
        let outcome = raw.call::<RenderInfo>(0, &request, &[], 64)?;
        report.must_fail(|| format!("query {query} of an unknown GPU"), &outcome);
    }
    if !raw.alive()? {
        report.accepted.push("that a wrong argument ends the context".to_owned());
    }
    Ok(())
}

/// Sets, resets and destroys whatever events others may have. A neighbour checks that none of it shows there.
pub fn events_of_others(random: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut raw = Raw::connect()?;
    let ids = (0..600u32)
        .chain((0..600).map(|low| 0x4000_0000 | low))
        .chain((0..200).map(|_| random.nasty() as u32).collect::<Vec<_>>());
    for id in ids {
        let request = EventRequest { event_id: EventId(id), pad: 0 };
        for outcome in [
            raw.call::<SetEvent>(0, &request, &[], 0)?,
            raw.call::<ResetEvent>(0, &request, &[], 0)?,
            raw.call::<DestroyEvent>(0, &request, &[], 0)?,
        ] {
            report.must_fail(|| format!("event {id:#x}"), &outcome);
        }
    }
    Ok(())
}

/// Waits for events that are not there, for too many, and on the ring that may not block.
pub fn impossible_waits(_: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut raw = Raw::connect()?;
    let unknown = |id| WaitEvent { event_id: EventId(id), ..Default::default() };
    let outcome = raw.call::<WaitEvents>(
        0,
        &WaitEventsRequest { timeout: u32::MAX, wait_for_all: 1 },
        &[unknown(1)],
        1,
    )?;
    report.must_fail(|| "a wait on the control ring".to_owned(), &outcome);
    // The kernel's refusal of a wait stands in the answer, since the events' data is given back as well.
    let many: Vec<WaitEvent> = (0..4096).map(unknown).collect();
    for (timeout, list) in [
        (0, many.get(..1).unwrap_or_default()),
        (u32::MAX, many.get(..1).unwrap_or_default()),
        (u32::MAX, many.as_slice()),
    ] {
        let request = WaitEventsRequest { timeout, wait_for_all: 0 };
        let outcome = raw.call::<WaitEvents>(3, &request, list, list.len())?;
        report.any(&outcome);
    }
    if !raw.alive()? {
        report.accepted.push("that a wrong wait ends the context".to_owned());
    }
    Ok(())
}
