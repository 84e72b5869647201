//! Answer memory that is not there, not the context's, or not large enough.

use anyhow::{Context, Result};
use virtio_kfd_protocol::frame::AnswerArea;
use virtio_kfd_protocol::{Call, ResourceId};

use super::{Connection, Report, frames};
use crate::random::Random;
use crate::raw::{AREA, Outcome, Raw, View};

pub fn answer_memory(random: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    // Memory of another context, in which nothing may change.
    let mut neighbour = Raw::connect()?;
    let other = neighbour.transport.guest_blob(AREA)?;
    let view = View::of(&*other)?;
    view.fill(0x77);

    let mut connection = Connection::new();
    let own = connection.get()?.area();
    let at = |resource, offset, capacity| AnswerArea { resource, offset, capacity };
    let end = AREA + 64 * 1024;
    let mut areas = vec![
        at(ResourceId(0), 0, own.capacity),
        at(ResourceId(u32::MAX), 0, own.capacity),
        at(ResourceId(0x7fff_0000), 0, own.capacity),
        at(other.resource(), 0, own.capacity),
        at(neighbour.resource(), 0, own.capacity),
        at(own.resource, 4, own.capacity),
        at(own.resource, end, own.capacity),
        at(own.resource, end - 16, 4096),
        at(own.resource, u64::MAX - 7, own.capacity),
        at(own.resource, u64::MAX - 4095, 4096),
        at(own.resource, 1 << 63, own.capacity),
        at(own.resource, 0, 0),
        at(own.resource, 0, 16),
    ];
    for _ in 0..200 {
        areas.push(at(ResourceId(random.nasty() as u32 | 1 << 30), random.nasty() & !7, own.capacity));
    }
    for area in areas {
        let raw = connection.get()?;
        // The area's own resource is that of the first connection; each new one has another.
        let area =
            if area.resource == own.resource { at(raw.resource(), area.offset, area.capacity) } else { area };
        let sequence = raw.next();
        let bytes = frames::request(area, sequence, Call::GetClockCounters.opcode(), &[0; 8], &[], 64);
        let outcome = raw.send(0, &bytes)?;
        report.must_fail(|| format!("{area:?}"), &outcome);
        if !matches!(outcome, Outcome::Answered(_)) && !raw.alive()? {
            connection.forget();
        }
    }
    if view.copy(0, AREA as usize).iter().any(|byte| *byte != 0x77) {
        report.accepted.push("an answer in another context's memory".to_owned());
    }
    neighbour.alive().context("the neighbour")?;
    Ok(())
}
