//! Streams of system management events: of others, too many, and waits for them while they come and go.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_thunk::client::Client;
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::frame::{AnswerArea, AnswerFrame, RequestFrameBuilder};
use virtio_kfd_protocol::limits::MAX_SMI_STREAMS;
use virtio_kfd_protocol::version::VERSION_MAX;
use virtio_kfd_protocol::{
    CallType, GpuId, GpuRequest, ReadSmiRequest, SMI_CLOSED, SMI_LINES, SMI_NOTHING, SmiStream,
};

use super::machine::{DATA, Machine, P};
use super::{Connection, Report};
use crate::neighbour::{VA, acquire};
use crate::random::Random;
use crate::raw::{PATIENCE, Raw, View, client};

fn open(client: &Client, gpu_id: GpuId) -> Result<u32, guest_thunk::client::ClientError> {
    client.call::<OpenSmi>(&GpuRequest { gpu_id, pad: 0 }, &[], 0).map(|(made, _)| made.stream)
}

fn close(client: &Client, stream: u32) -> Result<(), guest_thunk::client::ClientError> {
    client.call::<CloseSmi>(&SmiStream { stream, pad: 0 }, &[], 0).map(drop)
}

fn read(client: &Client, timeout: u32) -> Result<(u32, Vec<u8>)> {
    let request = ReadSmiRequest { timeout, pad: 0 };
    let (answer, text) =
        client.wait_call::<ReadSmi>(&request, &[], ReadSmi::ANSWER_TAIL_MAX).context("ReadSmi")?;
    Ok((answer.outcome, text))
}

/// Streams of GPUs that there are not, that nobody opened, that another context opened, and more than there can be.
pub fn of_others(random: &mut Random, _: u64, report: &mut Report) -> Result<()> {
    let mut connection = Connection::new();
    let raw = connection.get()?;
    for (gpu_id, pad) in [(0, 0), (1, 0), (u32::MAX, 0), (random.nasty() as u32 | 1, 1)] {
        let outcome = raw.call::<OpenSmi>(0, &GpuRequest { gpu_id: GpuId(gpu_id), pad }, &[], 0)?;
        report.must_fail(|| format!("a stream of GPU {gpu_id}"), &outcome);
    }
    for (ring, pad) in [(0, 0), (1, 1), (63, u32::MAX)] {
        let request = ReadSmiRequest { timeout: u32::MAX, pad };
        let outcome = raw.call::<ReadSmi>(ring, &request, &[], ReadSmi::ANSWER_TAIL_MAX)?;
        report.must_fail(|| format!("a read of streams on ring {ring}, padding {pad}"), &outcome);
    }
    let (one, other) = (client()?, client()?);
    let (Some(gpu), Some(_)) = (acquire(&one)?, acquire(&other)?) else { return Ok(()) };
    let mut streams = Vec::new();
    for number in 0..MAX_SMI_STREAMS + 20 {
        let opened = open(&one, gpu);
        report.sent += 1;
        match opened {
            Ok(stream) => {
                report.done += 1;
                streams.push(stream);
            }
            Err(_) => report.refused += 1,
        }
        if streams.len() > MAX_SMI_STREAMS {
            report.accepted.push(format!("{} streams, {number} asked for", streams.len()));
        }
    }
    ensure!(streams.len() == MAX_SMI_STREAMS, "{} streams could be opened", streams.len());
    let wild = (0..100).map(|_| random.nasty() as u32);
    for stream in streams.iter().copied().chain(wild) {
        report.must_err(|| format!("another context closes stream {stream}"), &close(&other, stream));
    }
    ensure!(read(&other, 0)?.0 == SMI_CLOSED, "a context without a stream has one");
    ensure!(read(&one, 0)?.0 == SMI_NOTHING, "streams were closed by another context");
    let own = open(&other, gpu).context("a stream of the other context")?;
    faults(report, &one, &other)?;
    for stream in streams {
        close(&one, stream).context("CloseSmi")?;
        report.must_err(|| format!("stream {stream} closed twice"), &close(&one, stream));
    }
    ensure!(read(&one, 5)?.0 == SMI_CLOSED, "all streams are closed, and one is there");
    ensure!(read(&other, 0)?.0 == SMI_NOTHING, "the other context's stream is gone");
    close(&other, own).context("CloseSmi")
}

/// A third process has memory faults; nobody else hears of them, and it hears of each.
fn faults(report: &mut Report, one: &Client, other: &Client) -> Result<()> {
    let Some(machine) = Machine::new()? else { bail!("the GPU is gone") };
    let stream = open(&machine.client, machine.gpu).context("a stream of the third context")?;
    // SDMA_PKT_FENCE (vega10_sdma_pkt_open.h) to an address that nothing is mapped at.
    let nowhere = VA + (1 << 40);
    let packet = [5 | (nowhere << 32), nowhere >> 32 | 7 << 32];
    let queue = machine.start(VA + DATA * P, &packet)?;
    report.sent += 1;
    report.done += 1;
    let (outcome, text) = read(&machine.client, 30_000)?;
    ensure!(
        outcome == SMI_LINES && text.starts_with(b"1 "),
        "no line of the process's own memory fault: {outcome}, {:?}",
        String::from_utf8_lossy(&text)
    );
    for client in [one, other] {
        let (outcome, text) = read(client, 50)?;
        ensure!(
            outcome == SMI_NOTHING,
            "another process hears of a fault: {:?}",
            String::from_utf8_lossy(&text)
        );
    }
    // After a fault the kernel may take its time, or the end of the process, to end the queue.
    let _ = machine.destroy(queue);
    close(&machine.client, stream).context("CloseSmi")
}

/// Waits for ever on many rings, while streams come and go: they end with the last stream, and the context lives.
pub fn waits(_: &mut Random, frames: u64, report: &mut Report) -> Result<()> {
    const WAITERS: u8 = 12;
    let client = client()?;
    let raw = Raw::connect()?;
    let Some(gpu) = acquire(&client)? else {
        ensure!(read(&client, u32::MAX)?.0 == SMI_CLOSED, "a wait without a stream");
        report.sent += 1;
        report.done += 1;
        return Ok(());
    };
    drop(client);
    for round in 0..(frames / 40).clamp(5, 100) {
        let blob = raw.transport.guest_blob(u64::from(WAITERS) * 2 * P)?;
        let view = View::of(&*blob)?;
        let control = |request: &dyn Fn(&mut RequestFrameBuilder) -> Result<()>| -> Result<Vec<u8>> {
            let area = AnswerArea { resource: blob.resource(), offset: 0, capacity: P as u32 };
            let mut frame = RequestFrameBuilder::new(VERSION_MAX, round + 1, area);
            request(&mut frame)?;
            raw.transport.submit_and_wait(0, &frame.finish(), PATIENCE)?;
            Ok(view.copy(0, P as usize))
        };
        let made = control(&|frame| {
            frame.push::<OpenSmi>(&GpuRequest { gpu_id: gpu, pad: 0 }, &[], 0)?;
            frame.push::<OpenSmi>(&GpuRequest { gpu_id: gpu, pad: 0 }, &[], 0)?;
            Ok(())
        })?;
        let made = AnswerFrame::parse(&made).context("the answer to OpenSmi")?;
        let streams: Result<Vec<u32>, _> =
            made.answers.iter().map(|answer| Ok(answer.decode::<OpenSmi>()?.0.stream)).collect();
        let streams: Vec<u32> = streams.map_err(|error: anyhow::Error| error)?;
        std::thread::scope(|scope| -> Result<()> {
            let waiting: Vec<_> = (1..=WAITERS)
                .map(|ring| {
                    let (raw, resource) = (&raw, blob.resource());
                    scope.spawn(move || -> Result<()> {
                        let offset = u64::from(ring) * P;
                        let area = AnswerArea { resource, offset, capacity: P as u32 };
                        let mut frame = RequestFrameBuilder::new(VERSION_MAX, round + 1, area);
                        let request = ReadSmiRequest { timeout: u32::MAX, pad: 0 };
                        frame.push::<ReadSmi>(&request, &[], 512)?;
                        Ok(raw.transport.submit_and_wait(ring, &frame.finish(), PATIENCE)?)
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(round % 3));
            for stream in &streams {
                control(&|frame| {
                    Ok(frame.push::<CloseSmi>(&SmiStream { stream: *stream, pad: 0 }, &[], 0).map(drop)?)
                })?;
            }
            for waiter in waiting {
                let ended = waiter.join().map_err(|_| anyhow::anyhow!("a waiter panicked"))?;
                ended.with_context(|| format!("round {round}: a wait after the last stream was closed"))?;
                report.sent += 1;
                report.done += 1;
            }
            Ok(())
        })?;
        for ring in 1..=WAITERS {
            let bytes = view.copy(usize::from(ring) * P as usize, P as usize);
            let answer = AnswerFrame::parse(&bytes).context("the answer to ReadSmi")?;
            let answer = answer.answers.first().context("an answer to ReadSmi")?.decode::<ReadSmi>()?;
            ensure!(answer.0.outcome == SMI_CLOSED, "a wait without a stream: {:?}", answer.0);
        }
    }
    Ok(())
}
