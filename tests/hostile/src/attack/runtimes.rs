//! Runtimes that enable themselves, save areas at odd addresses, and heads of save areas that lead anywhere.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_thunk::client::Client;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::{
    BufferRequest, EventId, EventRequest, Features, GuestVa, RuntimeEnableRequest, WaitEvent,
    WaitEventsRequest,
};

use super::Report;
use super::machine::{DATA, FAR, Machine, P};
use crate::neighbour::{VA, create};
use crate::random::Random;
use crate::raw::Raw;

/// `KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK`, `..._TTMP_SAVE_MASK` (linux/kfd_ioctl.h).
const ENABLE: u32 = 1;
const TTMP: u32 = 2;

/// `struct kfd_context_save_area_header` (linux/kfd_ioctl.h): `err_payload_addr`, `err_event_id`.
const PAYLOAD_AT: u64 = 24;
const EVENT_AT: u64 = 32;

/// The save area is the data page; the word that a well-behaved runtime names lies in it.
const AREA: u64 = VA + DATA * P;
const WORD: u64 = 0x200;

/// `KFD_EC_MASK(EC_QUEUE_PACKET_VENDOR_UNSUPPORTED)`: what a packet is that there is not.
const REASON: u64 = 1 << 22;

/// What the page out of the GPU's reach is full of.
const GUARD: u64 = 0x7777_7777_7777_7777;

/// What a waiting kernel answers (`KFD_IOC_WAIT_RESULT_COMPLETE`).
const COMPLETE: u32 = 0;

fn enable(client: &Client, mode: u32) -> Result<(), guest_thunk::client::ClientError> {
    let request = RuntimeEnableRequest { r_debug: GuestVa(0x1234_5678), mode, pad: 0 };
    client.call::<RuntimeEnable>(&request, &[], 0).map(drop)
}

/// A context with a runtime that is enabled; `None` where there is no GPU, or the host enables none.
fn enabled() -> Result<Option<Machine>> {
    let Some(machine) = Machine::new()? else { return Ok(None) };
    if !machine.client.features().contains(Features::EXCEPTIONS) {
        return Ok(None);
    }
    enable(&machine.client, ENABLE | TTMP).context("RuntimeEnable")?;
    for page in (0..P).step_by(8) {
        machine.view.store(FAR * P + page, GUARD);
    }
    Ok(Some(machine))
}

fn head(machine: &Machine, payload: u64, event: u64) {
    machine.view.store(DATA * P + PAYLOAD_AT, payload);
    machine.view.store(DATA * P + EVENT_AT, event);
}

/// Modes that there are not, a runtime that is enabled twice, and queues whose save areas are where nobody's memory is.
pub fn areas(random: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut raw = Raw::connect()?;
    for mode in [4, 8, 0x8000_0001, 0xffff_fffc, u32::MAX] {
        for pad in [0, 1] {
            let request = RuntimeEnableRequest { r_debug: GuestVa(random.nasty()), mode, pad };
            let outcome = raw.call::<RuntimeEnable>(0, &request, &[], 0)?;
            report.must_fail(|| format!("a runtime of mode {mode:#x}"), &outcome);
        }
    }
    let Some(mut machine) = enabled()? else { return Ok(()) };
    report.must_err(|| "a runtime twice".to_owned(), &enable(&machine.client, ENABLE));
    let call = |machine: &Machine, area: u64| {
        machine.client.call::<CreateQueue>(&machine.queue(area), &[], 0).map(|(made, _)| made.queue)
    };
    let refused = [
        1,
        7,
        4096,
        AREA + 1,
        AREA + 8,
        AREA + 2048,
        0x3c00_0000_0000,
        0x4400_0000_0000,
        0x5555_5555_4000,
        0x65ff_ffff_f000,
        0x7fff_f800_0000,
        0x7fff_ffff_f000,
        1 << 47,
        1 << 63,
        u64::MAX - 4095,
        u64::MAX,
    ];
    for area in refused {
        report.must_err(|| format!("a save area at {area:#x}"), &call(&machine, area));
    }
    for area in [0x1_0000, 0x2aaa_aaaa_b000, 0x3bff_ffff_f000, 0x6600_0000_0000, AREA] {
        let queue = call(&machine, area).with_context(|| format!("a save area at {area:#x}"))?;
        report.sent += 1;
        report.done += 1;
        report.must_err(|| format!("two queues on {area:#x}"), &call(&machine, area));
        machine.destroy(queue)?;
    }
    for _ in 0..200 {
        let area = random.nasty() & !(random.below(2) * 4095);
        report.sent += 1;
        match call(&machine, area) {
            Ok(queue) => {
                report.done += 1;
                machine.destroy(queue)?;
            }
            Err(_) if machine.client.is_lost() => {
                // It met something of its worker's, which ends that.
                report.ended += 1;
                machine = enabled()?.context("a context after one whose worker has ended")?;
            }
            Err(_) => report.refused += 1,
        }
    }
    Ok(())
}

/// Exceptions without end, whose heads name words and events that are not there, not its own, and change meanwhile; and
/// queues, memory and contexts that go in the middle. Nothing changes but what the process may change itself.
pub fn heads(random: &mut Random, frames: u64, report: &mut Report) -> Result<()> {
    let Some(mut machine) = enabled()? else {
        // No runtime is enabled here: what is left is the call itself.
        let mut raw = Raw::connect()?;
        let request = RuntimeEnableRequest { r_debug: GuestVa(0), mode: ENABLE, pad: 1 };
        let outcome = raw.call::<RuntimeEnable>(0, &request, &[], 0)?;
        report.must_fail(|| "a runtime with padding".to_owned(), &outcome);
        return Ok(());
    };
    let mut event = create(&machine.client, 1)?;
    for round in 0..(frames / 16).max(8) {
        let payload = match random.below(8) {
            0 => AREA + WORD,
            1 => AREA + WORD + 4,
            2 => AREA + P - 4,
            3 => VA + FAR * P + 8 * random.below(512),
            4 => 0x7ff0_0000_0000 | random.below(1 << 36),
            5 => 0x5555_0000_0000 | random.below(1 << 32),
            _ => random.nasty(),
        };
        let named = match random.below(3) {
            0 => event.0.into(),
            1 => random.below(64),
            _ => random.nasty(),
        };
        head(&machine, payload, named);
        let queue = machine.fail(AREA)?;
        report.sent += 1;
        report.done += 1;
        match random.below(16) {
            // The context, the memory or the head goes while the exception is on its way.
            0 => {
                drop(machine);
                machine = enabled()?.context("a context after one that went in the middle")?;
                event = create(&machine.client, 1)?;
                continue;
            }
            1 => {
                for handle in &machine.buffers {
                    let request = BufferRequest { handle: *handle };
                    // The kernel may say that a queue is on it.
                    let _ = machine.client.call::<UnmapMemory>(&request, &[machine.gpu], 0);
                    let _ = machine.client.call::<FreeMemory>(&request, &[], 0);
                }
                check_guard(&machine, round)?;
                machine = enabled()?.context("a context after one whose memory went")?;
                event = create(&machine.client, 1)?;
                continue;
            }
            2 => {
                let request = EventRequest { event_id: event, pad: 0 };
                machine.client.call::<DestroyEvent>(&request, &[], 0).context("DestroyEvent")?;
                event = create(&machine.client, 1)?;
            }
            3..8 => std::thread::sleep(Duration::from_millis(1)),
            _ => {}
        }
        machine.destroy(queue)?;
        check_guard(&machine, round)?;
    }
    toggled(&machine, frames, report)?;
    heard(&machine, event)
}

/// The head changes between any two looks at it.
fn toggled(machine: &Machine, frames: u64, report: &mut Report) -> Result<()> {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for payload in [AREA + WORD, VA + FAR * P, u64::MAX, AREA + WORD + 4, 0x7fff_f000_0000] {
                    machine.view.store(DATA * P + PAYLOAD_AT, payload);
                }
            }
        });
        let flood = (0..frames / 16).try_for_each(|round| -> Result<()> {
            let queue = machine.fail(AREA)?;
            report.sent += 1;
            report.done += 1;
            machine.destroy(queue)?;
            check_guard(machine, round)
        });
        ended.store(true, Ordering::Relaxed);
        flood
    })
}

/// The page that the GPU does not reach is as it was: the host writes where the queue's GPU could write itself.
fn check_guard(machine: &Machine, round: u64) -> Result<()> {
    let page = machine.view.copy((FAR * P) as usize, P as usize);
    let whole = page.chunks(8).all(|word| word == GUARD.to_le_bytes());
    ensure!(whole, "round {round}: an exception was noted in memory that no GPU reaches");
    Ok(())
}

/// After all that an exception still reaches a runtime that behaves.
fn heard(machine: &Machine, event: EventId) -> Result<()> {
    machine.view.store(DATA * P + WORD, 0);
    head(machine, AREA + WORD, event.0.into());
    let queue = machine.fail(AREA)?;
    let list = [WaitEvent { event_id: event, ..Default::default() }];
    let begin = Instant::now();
    // The event may still be set by what came before.
    while machine.view.load(DATA * P + WORD) & REASON == 0 {
        let request = WaitEventsRequest { timeout: 100, wait_for_all: 1 };
        machine.client.wait_call::<WaitEvents>(&request, &list, 1).context("WaitEvents")?;
        ensure!(begin.elapsed() < Duration::from_secs(60), "no exception is told any more");
    }
    let request = WaitEventsRequest { timeout: 10_000, wait_for_all: 1 };
    machine.destroy(queue)?;
    let queue = machine.fail(AREA)?;
    let (answer, _) = machine.client.wait_call::<WaitEvents>(&request, &list, 1).context("WaitEvents")?;
    ensure!(answer.wait_result == COMPLETE, "the event of an exception is not set");
    machine.destroy(queue)
}
